"""Connects the agent to this node's kubelet: registration, gRPC servicer, and evidence of which pods hold devices."""
