"""Everything between this node's kubelet and the agent: registration, servicer, and the evidence of who holds what."""
