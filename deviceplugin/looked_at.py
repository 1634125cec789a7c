"""Records the path that a thread is reading, so that a message can name it if the read hangs (`deviceplugin.looks`).

This is a separate module, because `deviceplugin validate` reads files without an event loop.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Looking(Protocol):
    """A read in a thread (`deviceplugin.looks.Look`). path: the path that it reads now, for any thread."""

    path: str


class _Now(threading.local):
    look: Looking | None = None


_now = _Now()


def begin(look: Looking | None) -> None:
    """Record in `look.path` the paths that this thread reads from now on; None ends the recording."""
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
