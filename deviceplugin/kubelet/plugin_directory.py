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
from typing import Final, Self

import grpc.aio

from deviceplugin import looked_at
from deviceplugin.directory_watch import POLL, DirectoryWatch
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.filewatch import Gather
from deviceplugin.kubelet import checkpoint
from deviceplugin.kubelet.foreign_plugin import Socket, foreign_sockets
from deviceplugin.kubelet.podresources import CHANNEL_OPTIONS, unix_address
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
            if entry.is_file(follow_symlinks=False):  # Usually known without a stat; each resource has a lock file.
                continue
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


class RegisterTurn:
    """Lets one resource register at a time. Registers that follow one another without a pause share a channel.

    Overlapping registrations would make the kubelet leak memory (kubernetes#124716). A channel is never used after a
    failed Register, because a channel that had failed for long took 3 s to recover; a new channel takes 1 ms.
    """

    def __init__(self, kubelet: Path) -> None:
        self._kubelet = kubelet
        self._lock = asyncio.Lock()
        self._wanted = 0
        """The number of resources that have the turn or wait for it."""
        self._channel: tuple[FileIdentity | None, grpc.aio.Channel] | None = None

    async def __aenter__(self) -> Self:
        self._wanted += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._wanted -= 1
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._wanted -= 1
        try:
            if kind is not None or not self._wanted:
                await self._close()
        finally:
            self._lock.release()

    async def channel(self, kubelet: FileIdentity | None) -> grpc.aio.Channel:
        """Return a channel to the kubelet, for the resource that has the turn. kubelet: kubelet.sock's identity."""
        if self._channel is None or self._channel[0] != kubelet:
            await self._close()
            self._channel = kubelet, grpc.aio.insecure_channel(unix_address(self._kubelet), options=CHANNEL_OPTIONS)
        return self._channel[1]

    async def _close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel[1], None
            await channel.close(None)


class PluginDirectory(DirectoryWatch[DirectoryContents]):
    """Watches the kubelet's device plugin directory. turn: taken by each resource while it registers."""

    def __init__(self, path: Path, poll: float = POLL) -> None:
        gather = Gather(GATHER, prompt=".sock")
        super().__init__(Looks(str(path)), partial(contents, path), (path,), gather, poll)
        self.path: Final = path
        self.turn: Final = RegisterTurn(path / KUBELET_SOCKET)

    @property
    def kubelet(self) -> FileIdentity | None:
        """The identity of kubelet.sock at the last read; None if the socket did not exist. Thread-safe."""
        return self.latest.kubelet if self.latest is not None else None
