"""Moves of devices on many nodes: their progress, and the rollout of a share."""
