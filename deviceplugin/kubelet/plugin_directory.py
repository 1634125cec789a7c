"""Reads the kubelet's device plugin directory once for all resources of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deviceplugin import looked_at
from deviceplugin.directory_watch import POLL, DirectoryWatch
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.filewatch import Gather
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.foreign_plugin import Socket, foreign_sockets
from deviceplugin.looks import Looks

KUBELET_SOCKET: Final = "kubelet.sock"
GATHER: Final = 0.02
"""Seconds for which file events are collected before one read of the directory, because the kubelet often replaces its
checkpoint there."""


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """The content of the device plugin directory at one moment.

    kubelet: the identity of kubelet.sock. sockets: for each socket's file name, including kubelet.sock, the socket's
    identity. foreign: the sockets of other plugins.
    """

    kubelet: FileIdentity | None
    sockets: Mapping[str, FileIdentity]
    foreign: frozenset[Socket]
    checkpoint: FileIdentity | None


def sockets_in(directory: Path) -> dict[str, FileIdentity]:
    """Return, for each socket's file name, the socket's identity; empty if the directory cannot be read. Blocks."""
    looked_at.at(directory)
    sockets: dict[str, FileIdentity] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # The socket was removed after the listing.
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode):
                    sockets[entry.name] = FileIdentity.of(status)
    return sockets


def contents(directory: Path) -> DirectoryContents:
    """Read the device plugin directory now. Blocks."""
    kubelet = file_identity(f"{directory}/{KUBELET_SOCKET}")
    sockets = sockets_in(directory)
    return DirectoryContents(kubelet, sockets, foreign_sockets(sockets), checkpoint.identity(directory))


class PluginDirectory(DirectoryWatch[DirectoryContents]):
    """Watches the kubelet's device plugin directory.

    turn: a lock that a resource holds while it registers. Without the lock, registrations would overlap, and the
    kubelet leaks memory when registrations follow each other too fast (kubernetes#124716).
    """

    def __init__(self, path: Path, poll: float = POLL) -> None:
        gather = Gather(GATHER, prompt=".sock")
        super().__init__(Looks(str(path)), partial(contents, path), (path,), gather, poll)
        self.path: Final = path
        self.turn: Final = asyncio.Lock()

    @property
    def kubelet(self) -> FileIdentity | None:
        """The identity of kubelet.sock at the last read; None if the socket did not exist. Thread-safe."""
        return self.latest.kubelet if self.latest is not None else None
