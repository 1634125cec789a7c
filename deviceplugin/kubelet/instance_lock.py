"""Lets only one process of this framework serve a resource on a node, by a lock file in the device plugin directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from pathlib import Path
from typing import Final

from deviceplugin.files import leads_to, locked

NEEDED: Final = "the agent needs write access to the kubelet's device plugin directory, and free space there"


class RegistrationError(Exception):
    """Raised when a resource cannot be served because of the device plugin directory or of another process."""


def slug(resource: str) -> str:
    """Return a unique, readable file name for a resource: example.com_fpga-1a2b3c."""
    digest = hashlib.sha256(resource.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', resource)}-{digest}"


class InstanceLock:
    """Locks a resource for one process on this node. The kernel releases the lock at the end of the process.

    The lock file is in the device plugin directory, which all agents use; the kubelet deletes only sockets there.
    """

    def __init__(self, directory: Path, resource: str) -> None:
        self.path = directory / f".{slug(resource)}.lock"
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process has locked the lock file that exists now; a lock on a deleted file does not count."""
        return self._fd is not None and leads_to(self.path, self._fd)

    def acquire(self) -> bool:
        """Try to lock the resource; return whether this process has the lock.

        Raises RegistrationError if the lock file cannot be created.
        """
        if self.held:
            return True
        self.release()
        try:
            fd = self._fd = locked(self.path)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RegistrationError(f"{self.path}: cannot lock it: {error.strerror}; {NEEDED}") from error
        with contextlib.suppress(OSError):  # The text in the lock file is only for messages.
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    def owner(self) -> str:
        """Return the text that the process with the lock has written into the lock file to describe itself."""
        try:
            return self.path.read_text(errors="replace").strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Release the lock. The lock file is not deleted, because another process may just be locking it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
