"""Moves of devices between the two sides."""
