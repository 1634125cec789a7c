"""Reads directories once on behalf of several readers, and wakes the readers when the content has changed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from deviceplugin import filewatch
from deviceplugin.filewatch import Gather
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.tasks import SharedCall, in_time

_T = TypeVar("_T")

POLL: Final = 10.0
"""Maximum seconds between two reads of the directories, in case file events are lost."""


class DirectoryReader:
    """Waits for changes of directories.

    directories: for each directory, a function that returns those parts of the directory's content whose changes end a
    wait of this reader. unwatched, polled: arguments of the last call of `wait`.
    """

    def __init__(self, directories: Mapping[DirectoryWatch[Any], Callable[[Any], object]]) -> None:
        self.unwatched = math.inf
        self.polled: Collection[DirectoryWatch[Any]] = ()
        self._interval = 0.0
        self._later: asyncio.TimerHandle | None = None
        """The timer of a comparison that was delayed until the end of the interval."""
        self._directories = directories
        self._shown: dict[DirectoryWatch[Any], tuple[Any, float]] = {}
        """For each directory, the content with which the next content is compared, and the time of its read."""
        self._changed = asyncio.Event()
        self._watcher = filewatch.shared()

    def wake(self) -> None:
        """End the present or the next wait. Any thread may call this method."""
        self._watcher.call(self._changed.set)

    def show(self, directory: DirectoryWatch[Any], now: Any, at: float) -> None:
        """End the present or the next wait if the parts of the content for this reader have changed.

        Must be called in the event loop, after each read. at: the time of the read (monotonic seconds).
        """
        before, last = self._shown.get(directory, (None, -math.inf))
        if (rest := last + self._interval - at) > 0:
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(rest, self._show_latest)
            return
        self._shown[directory] = now, at
        part = self._directories[directory]
        if before is None or (before is not now and part(before) != part(now)):
            self._changed.set()

    def _show_latest(self) -> None:
        self._later = None
        for directory in self._directories:
            if directory.latest is not None:
                self.show(directory, directory.latest, time.monotonic())

    def close(self) -> None:
        """End a delayed comparison."""
        if self._later is not None:
            self._later.cancel()

    async def wait(
        self,
        timeout: float = math.inf,
        unwatched: float = math.inf,
        *,
        polled: Collection[DirectoryWatch[Any]] = (),
        interval: float = 0.0,
    ) -> bool:
        """Wait until a directory's content changes or `wake` is called. Return False after `timeout` seconds.

        unwatched: the maximum seconds between two reads of directories without file events. polled: the directories
        whose file events this reader does not need now. A directory is not watched while no reader needs its events.
        interval: the minimum seconds between two comparisons of the content. A change in between is seen at its end.
        """
        self.unwatched, self.polled, self._interval = unwatched, polled, interval
        for directory in self._directories:
            directory.hurry(unwatched, events=directory not in polled)
        changed = await in_time(self._changed.wait(), timeout)
        self._changed.clear()
        return changed


class DirectoryWatch(Generic[_T]):
    """Watches directories while there are readers. The function `contents` reads the directories.

    contents: a blocking function. A result that differs from the last result is a change. gather: the delay of file
    events (`filewatch.Gather`). poll: the maximum seconds between two reads.
    """

    def __init__(
        self, looks: Looks, contents: Callable[[], _T], paths: tuple[Path, ...], gather: Gather, poll: float = POLL
    ) -> None:
        self.looks: Final = looks
        self.latest: _T | None = None
        """The content at the last read; None before the first read."""
        self._contents = contents
        self._paths = [str(path) for path in paths]
        self._gather = gather
        self._poll = poll
        self._call = SharedCall(self._look)
        self._readers: set[DirectoryReader] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._watch: filewatch.Watch | None = None
        self._unwatched = math.inf
        """In the present wait of `_keep`: the maximum seconds to the next read while the directories cause no file
        events."""
        self._events = True
        """Whether the directories are watched for file events in the present wait of `_keep`."""

    async def now(self) -> _T:
        """Read the directories now. Raises LookTimeoutError.

        Calls that arrive before this read begins, or while another read runs, share one read.
        """
        return await self._call()

    async def seen(self) -> _T:
        """Return the content at the last read; read now if there was none. Raises LookTimeoutError if a read hangs."""
        return self.latest if self.latest is not None and not self.looks.hanging else await self.now()

    async def _look(self) -> _T:
        self.latest = latest = await self.looks.at("socket", self._contents, brief=True)
        return latest

    def add(self, reader: DirectoryReader) -> None:
        """Register a reader, which is then woken after each change of the content. The first reader starts `_keep`."""
        self._readers.add(reader)
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name=f"watch {', '.join(self._paths)}")

    def remove(self, reader: DirectoryReader) -> None:
        """Remove a registered reader. The removal of the last reader ends the watch."""
        self._readers.discard(reader)
        if not self._readers and self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    def hurry(self, unwatched: float, *, events: bool) -> None:
        """Read the directories now if the present wait is too long for a reader, or lacks file events for the reader.

        unwatched: as in `DirectoryReader.wait`. events: whether the reader needs file events.
        """
        if (unwatched < self._unwatched or (events and not self._events)) and self._watch is not None:
            self._watch.wake()

    async def _keep(self) -> None:
        """Read the directories repeatedly, and wake the readers after each change of the content, until cancelled."""
        shown: _T | None = None
        with filewatch.shared().watch(self._paths, gather=self._gather) as self._watch:
            while True:
                with contextlib.suppress(LookTimeoutError):  # Readers get this error from their own calls of `now`.
                    now = await self.now()
                    shown = now if now != shown else shown
                    for reader in self._readers:
                        reader.show(self, shown, time.monotonic())
                self._unwatched = min((reader.unwatched for reader in self._readers), default=math.inf)
                events = any(self not in reader.polled for reader in self._readers)
                if events != self._events:
                    self._events = events
                    self._watch.set(self._paths if events else ())
                longest = self._poll if events else min(self._poll, self._unwatched)
                await self._watch.wait(longest, unwatched=self._unwatched)


@contextlib.contextmanager
def reading(directories: Mapping[DirectoryWatch[Any], Callable[[Any], object]]) -> Iterator[DirectoryReader]:
    """Provide a new `DirectoryReader` of these directories while the context manager is active."""
    reader = DirectoryReader(directories)
    for directory in directories:
        directory.add(reader)
    try:
        yield reader
    finally:
        reader.close()
        for directory in directories:
            directory.remove(reader)


def all_of(content: object) -> object:
    """Return the whole content. Use this function for a reader that waits for all changes of a directory."""
    return content
