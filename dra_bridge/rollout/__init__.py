"""Moves devices on many nodes between plugin and DRA: shows each node's progress, and requests each node's share."""
