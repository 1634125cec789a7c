"""Connects the agent to this node's kubelet: registration, servicer, and the evidence of who holds which device."""
