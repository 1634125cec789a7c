"""The kubelet's device plugin directory, looked at once for all resources of this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deviceplugin import filewatch, looked_at
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.kubelet import checkpoint
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.tasks import SharedCall

KUBELET_SOCKET: Final = "kubelet.sock"
GATHER: Final = 0.02
"""Seconds in which changes of the checkpoint are gathered: the kubelet replaces it several times for a pod."""
POLL: Final = 10.0
"""Seconds between two looks, should every hint be lost."""


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """What was in the directory at one moment. kubelet: the kubelet's socket. sockets: by name, of all plugins."""

    kubelet: FileIdentity | None
    sockets: Mapping[str, FileIdentity]
    checkpoint: FileIdentity | None


def contents(directory: Path) -> DirectoryContents:
    """Look at the directory. Blocks."""
    looked_at.at(directory)
    sockets: dict[str, FileIdentity] = {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it has gone meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode):
                    sockets[entry.name] = FileIdentity.of(status)
    return DirectoryContents(file_identity(f"{directory}/{KUBELET_SOCKET}"), sockets, checkpoint.identity(directory))


class DirectoryReader:
    """Waits for changes of the directory, for one resource. wait, wake: as `filewatch.Watch` has them."""

    def __init__(self, directory: PluginDirectory) -> None:
        self.unwatched = math.inf
        self._directory = directory
        self._hinted = asyncio.Event()
        self._watcher = filewatch.shared()

    def wake(self) -> None:
        """Have the present or the next wait end; from any thread."""
        self._watcher.call(self._hinted.set)

    def changed(self) -> None:
        """Have the present or the next wait end; in the loop."""
        self._hinted.set()

    async def wait(self, timeout: float = math.inf, unwatched: float = math.inf) -> bool:
        """Wait until something has changed or `wake` is called; return False if neither was in `timeout` seconds.

        unwatched: seconds between two looks at the directory where there are no events of it.
        """
        self.unwatched = unwatched
        self._directory.hurry(unwatched)
        hinted = True
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                await self._hinted.wait()
        except TimeoutError:
            hinted = False
        self._hinted.clear()
        return hinted


class PluginDirectory:
    """Looks at the device plugin directory for all resources, and wakes their registrations when it has changed.

    looks: at the directory. poll: see `POLL`. turn: held while a resource registers: the kubelet dials back during the
    call, and leaks memory when registrations follow too fast (kubernetes#124716).
    """

    def __init__(self, path: Path, poll: float = POLL) -> None:
        self.path: Final = path
        self.looks: Final = Looks(str(path))
        self.turn: Final = asyncio.Lock()
        self._poll = poll
        self._call = SharedCall(self._look)
        self._readers: set[DirectoryReader] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._watch: filewatch.Watch | None = None
        self._unwatched = math.inf
        """The seconds of the present wait where there are no events."""
        self._last: DirectoryContents | None = None

    async def now(self) -> DirectoryContents:
        """Look at it now; one look serves all calls that come before it begins. Raises LookTimeoutError."""
        return await self._call()

    async def _look(self) -> DirectoryContents:
        return await self.looks.at("socket", contents, self.path, brief=True)

    @contextlib.contextmanager
    def reader(self) -> Iterator[DirectoryReader]:
        """Return a new reader. While there is one the directory is watched."""
        reader = DirectoryReader(self)
        self._readers.add(reader)
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name=f"watch {self.path}")
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self._readers:
                self._keeping.cancel()
                self._keeping = None

    def hurry(self, unwatched: float) -> None:
        """Have the directory looked at so often where there are no events."""
        if unwatched < self._unwatched and self._watch is not None:
            self._watch.wake()

    async def _keep(self) -> None:
        """Wake the readers after each change, until cancelled."""
        gather = filewatch.Gather(GATHER, prompt=".sock")
        with filewatch.shared().watch([str(self.path)], gather=gather) as self._watch:
            while True:
                with contextlib.suppress(LookTimeoutError):  # the readers find out themselves
                    now = await self.now()
                    if now != self._last:
                        self._last = now
                        for reader in self._readers:
                            reader.changed()
                self._unwatched = min((reader.unwatched for reader in self._readers), default=math.inf)
                await self._watch.wait(self._poll, unwatched=self._unwatched)
