"""Defines the reasons why a directory causes no file events, with words for messages."""

from __future__ import annotations

import enum
import errno
import math
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

SILENT: Final = 5.0
"""Seconds without a response after which a directory's file system counts as hanging."""


class UnwatchedCause(enum.Enum):
    """The reason why a directory causes no file events."""

    INSTANCES = "instances"
    WATCHES = "watches"
    FILES = "files"
    SILENT = "silent"
    ERROR = "error"

    @classmethod
    def of(cls, error: OSError | RuntimeError) -> UnwatchedCause:
        """Return the cause that an error of the operating system shows.

        EMFILE can mean two causes: no file descriptor is left, or no inotify instance is left.
        """
        if isinstance(error, TimeoutError):
            return cls.SILENT
        match error.errno if isinstance(error, OSError) else None:
            case errno.ENOSPC:
                return cls.WATCHES
            case errno.ENFILE:
                return cls.FILES
            case errno.EMFILE:
                return cls.INSTANCES if files_left(1) else cls.FILES
        return cls.ERROR


class WatchFailure(NamedTuple):
    """The reason why a directory could not be watched. error: the system's error as text, if `cause` is ERROR."""

    cause: UnwatchedCause
    error: str = ""

    @classmethod
    def of(cls, error: OSError | RuntimeError) -> WatchFailure:
        """Return the `WatchFailure` for an error of the operating system."""
        cause = UnwatchedCause.of(error)
        return cls(cause, str(error) if cause is UnwatchedCause.ERROR else "")


class Unwatched(NamedTuple):
    """Directories without file events, all for the same cause."""

    failure: WatchFailure
    directories: tuple[str, ...]

    def __str__(self) -> str:
        rest = f" and {len(self.directories) - 1} more" if len(self.directories) > 1 else ""
        match self.failure.cause:
            case UnwatchedCause.INSTANCES:
                why = f"this user has no inotify instance left ({_limit('instances')}); raise the limit"
            case UnwatchedCause.WATCHES:
                why = f"this user has no inotify watch left ({_limit('watches')}); raise the limit"
            case UnwatchedCause.FILES:
                why = "no file can be opened any more; raise the limit of open files"
            case UnwatchedCause.SILENT:
                return f"cannot watch {self.directories[0]}{rest}: its file system has not answered for {SILENT:g} s"
            case UnwatchedCause.ERROR:
                why = self.failure.error
        return f"cannot watch {self.directories[0]}{rest}: {why}; changes are found by reading again, within seconds"


def files_left(number: int) -> bool:
    """Return whether this process can open `number` more files."""
    files: list[int] = []
    try:
        files.extend(os.eventfd(0) for _ in range(number))
    except OSError:
        return False
    finally:
        for file in files:
            os.close(file)
    return True


_LIMITS: Final[Mapping[str, str]] = {
    "fs/inotify/max_user_": "fs.inotify.max_user_",
    "user/max_inotify_": "user.max_inotify_",
}


def _limit(what: str) -> str:
    """Return the lower of the user's and the user namespace's limit of inotify instances or watches, as text."""
    limits = [(_read_limit(f"{file}{what}"), f"{name}{what}") for file, name in _LIMITS.items()]
    value, name = min(limits, key=lambda limit: int(limit[0]) if limit[0].isdigit() else math.inf)
    return f"{name} is {value}"


def _read_limit(name: str) -> str:
    """Return a kernel setting, "unknown" if it cannot be read. Does not block, because /proc/sys is in memory."""
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
