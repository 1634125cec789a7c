"""Moves over many nodes: what the fleet shows, and the rollout of a share."""
