"""Moves devices on many nodes: shows the progress of nodes, and rolls out a share node by node."""
