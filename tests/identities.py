"""A function that makes a device's identity (the tokens of its hardware) for tests."""

from __future__ import annotations

from deviceplugin.identity import Identity, identified


def seen_as(boot: str, *tokens: str) -> Identity:
    """Return the identity of a device that had these tokens in this boot of the node."""
    return identified(frozenset(tokens), boot)
