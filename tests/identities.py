"""Identities for tests, in one line."""

from __future__ import annotations

from deviceplugin.identity import Identity, identified


def seen_as(boot: str, *tokens: str) -> Identity:
    """What hardware with these tokens was in a boot of the node."""
    return identified(frozenset(tokens), boot)
