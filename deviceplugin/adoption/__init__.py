"""The kubelet's side towards vendors' unmodified plugins: a directory with a kubelet.sock of our own.

A vendor's plugin knows a directory and what is in it. In ours it registers with the agent, which lists its devices as
the plugin does and passes the kubelet's calls on.
"""
