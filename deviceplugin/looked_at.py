"""Names the path at which a thread looks, for the message if that look hangs (`deviceplugin.looks`).

A module of its own, since `deviceplugin validate` reads files without an event loop.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Looking(Protocol):
    """A look in a thread. path: where it is now; written by its thread, read by others."""

    path: str


class _Now(threading.local):
    look: Looking | None = None


_now = _Now()


def begin(look: Looking | None) -> None:
    """Have the paths that this thread looks at written into `look`; None: nowhere."""
    _now.look = look


def at(path: str | os.PathLike[str]) -> None:
    """Have the look that runs in this thread name this path if it hangs."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a path; if it hangs, the message names the path."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)
    return os.stat(path)
