"""Identities for tests, in one line."""

from __future__ import annotations

from deviceplugin.identity import Identity, identified


def seen_as(boot: str, *tokens: str) -> Identity:
    """Return the identity of hardware with these tokens in a boot of the node."""
    return identified(frozenset(tokens), boot)
