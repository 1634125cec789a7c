"""Lets vendors' unmodified plugins register with the agent, at a kubelet.sock in a directory of the agent.

A vendor's plugin registers at the kubelet.sock in the directory that is mounted into its container. If the agent's
directory is mounted there, the plugin registers with the agent. Then the agent registers the plugin's resource with the
kubelet, lists the plugin's devices, and forwards the kubelet's calls to the plugin.
"""
