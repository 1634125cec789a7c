"""Moves of devices between the two sides: what is asked for, which devices move, and how a move ends."""
