"""Moves devices on many nodes between plugin and DRA: shows the nodes' progress, and requests a share node by node."""
