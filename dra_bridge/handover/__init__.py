"""Moves devices between the device plugin and DRA, until as many devices as requested are for claims."""
