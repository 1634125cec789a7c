"""Moves of devices between the device plugin and DRA: the requested share, which devices move, how a move ends."""
