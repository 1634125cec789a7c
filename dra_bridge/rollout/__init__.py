"""Moves devices between device plugin and DRA on many nodes.

The commands request, for each node, the share of its devices that claims get, and show each node's progress.
"""
