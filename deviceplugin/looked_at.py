"""Records the path that a thread is reading. If the read hangs, messages name this path (`deviceplugin.looks`).

This module is separate from `deviceplugin.looks`, so that `deviceplugin validate` can use it without asyncio.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Looking(Protocol):
    """A call in a thread that reads files (`deviceplugin.looks.Look`). path: the path that the call reads now."""

    path: str


class _Now(threading.local):
    look: Looking | None = None


_now = _Now()


def begin(look: Looking | None) -> None:
    """Record each path that this thread reads from now on in `look.path`; None ends the recording."""
    _now.look = look


def at(path: str | os.PathLike[str]) -> None:
    """Record that this thread reads this path, so that a message can name the path if the read hangs."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a path. If the call hangs, the message names the path."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)
    return os.stat(path)
