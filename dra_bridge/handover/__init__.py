"""Moves of devices between the two sides: the requested share, which devices move, and how a move ends."""
