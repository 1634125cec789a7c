"""Identifies, atomically replaces, and locks files that several processes use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path
from typing import Final, NamedTuple

from deviceplugin import looked_at

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
"""Matches a character such as a space, as the kernel writes it in /proc/self/mountinfo."""


_TICK: Final = 50_000_000
"""Nanoseconds within which two changes of a file or directory may leave the same modification time."""


class FileIdentity(NamedTuple):
    """Distinguishes a file from later files of the same name, such as a new version or a new socket.

    The modification time is a part of the identity, because a new file can get the inode number of a removed file. The
    modification time of a socket does not change after its creation.
    """

    device: int
    inode: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity of the file with this status."""
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns)

    @property
    def settled(self) -> bool:
        """Whether any change from now on gives the file, or directory, another modification time."""
        return time.time_ns() - self.modified_ns > _TICK


def file_identity(path: str | Path) -> FileIdentity | None:
    """Return the identity of the file at a path; None if the file's status cannot be read."""
    try:
        status = looked_at.stat(path)
    except OSError:
        return None
    return FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)


def inode_of(path: str | Path) -> tuple[int, int] | None:
    """Return device and inode number of the file at a path; None if the file's status cannot be read."""
    try:
        status = looked_at.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def place_of(path: str | Path) -> str:
    """Return a text with a directory's file system and the directory's path in it; "" if they are not known.

    The text is the same in each container. It stays the same if the directory is removed and created again, and is
    already known before the directory exists. For a path at which another directory is mounted, the text is that of the
    other directory. Blocks.
    """
    looked_at.at(path)
    existing = real = os.path.realpath(path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    try:
        descriptor = os.open(existing, os.O_PATH | os.O_CLOEXEC)
        try:
            about = dict(line.split(":", 1) for line in _lines(f"/proc/self/fdinfo/{descriptor}"))
        finally:
            os.close(descriptor)
        mounts = {line.split(" ", 1)[0]: line for line in _lines("/proc/self/mountinfo")}
        _, _, file_system, root, point = mounts[about["mnt_id"].strip()].split(" ")[:5]
    except (OSError, LookupError):
        return ""
    root, point = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), text) for text in (root, point))
    place = os.path.normpath(os.path.join(root.removesuffix("//deleted"), os.path.relpath(real, point)))
    return os.fsencode(f"{file_system} {place}").decode(errors="replace")


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().splitlines()


def put(path: str, data: bytes, draft: str, mode: int) -> None:
    """Replace a file atomically, without a sync to disk. A draft file that an earlier call has left behind is removed.

    draft: the path of a temporary file in the same directory that no other writer uses. Raises OSError, after the draft
    has been removed.
    """
    looked_at.at(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)
        _draft(draft, data, mode)
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(draft)
        raise


def put_changed(path: str, data: bytes, draft: str, mode: int) -> bool:
    """Replace a file as `put` does, unless the file already has these bytes. Return whether it was replaced.

    Missing directories above the file are created. Raises OSError.
    """
    looked_at.at(path)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == data:
            return False
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    put(path, data, draft, mode)
    return True


def _draft(path: str, data: bytes, mode: int) -> None:
    # O_EXCL ensures that no existing file or symbolic link is opened.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def locked(path: str | Path, *, wait: bool = False) -> int:
    """Open and lock a file, and return its descriptor. A missing file is created.

    The kernel releases the lock when the process ends. wait: whether to wait until another process releases its lock.
    Raises BlockingIOError if another process has the lock and `wait` is False, OSError if the file system supports no
    locks.
    """
    looked_at.at(path)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        if leads_to(path, lock):
            return lock
        os.close(lock)  # The file was removed before it was locked, so the file that is at the path now is opened.


def leads_to(path: str | Path, file: int) -> bool:
    """Return whether a path still leads to an open file. file: the file's descriptor."""
    try:
        return os.path.samestat(os.fstat(file), looked_at.stat(path))
    except OSError:
        return False
