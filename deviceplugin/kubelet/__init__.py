"""Connects the agent to this node's kubelet: registration, servicer, and the evidence of the holders of devices."""
