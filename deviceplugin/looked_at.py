"""Names the path at which a thread looks, for the message if that look hangs (`deviceplugin.looks`).

A module of its own, since `deviceplugin validate` reads files without an event loop.
"""

from __future__ import annotations

import os
import threading


class LookPlace:
    """The path at which a look is now. Written by the thread of the look, read by others."""

    def __init__(self, path: str) -> None:
        self.path = path


class _Now(threading.local):
    place: LookPlace | None = None


_now = _Now()


def begin(place: LookPlace | None) -> None:
    """Have the paths that this thread looks at written into `place`; None: nowhere."""
    _now.place = place


def at(path: str | os.PathLike[str]) -> None:
    """Have the look that runs in this thread name this path if it hangs."""
    if _now.place is not None:
        _now.place.path = os.fspath(path)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a path; if it hangs, the message names the path."""
    at(path)
    return os.stat(path)
