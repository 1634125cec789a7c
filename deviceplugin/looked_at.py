"""Records the path that a thread is reading, for the message if the read hangs (`deviceplugin.looks`).

It is a separate module, because `deviceplugin validate` reads files without an event loop.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Looking(Protocol):
    """A look in a thread. path: the present path; its thread writes it, others read it."""

    path: str


class _Now(threading.local):
    look: Looking | None = None


_now = _Now()


def begin(look: Looking | None) -> None:
    """Write the paths that this thread reads into `look`; None ends that."""
    _now.look = look


def at(path: str | os.PathLike[str]) -> None:
    """Record that this thread reads this path, for the message if the read hangs."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a path. If it hangs, the message names the path."""
    if _now.look is not None:
        _now.look.path = os.fspath(path)
    return os.stat(path)
