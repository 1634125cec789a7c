"""Moves devices between the device plugin and DRA, until DRA has the requested number of devices."""
