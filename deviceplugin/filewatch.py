"""Hints that something in a directory changed: one watcher for the whole process.

inotify events are hints: an overflow drops them, and a directory that is moved away ends them silently. So a watch says
only "read again", and notices by the inode that a directory is another one; its user reads again after some time in any
case. While a directory is not there the nearest of its ancestors is watched, and only then: in /var/lib/kubelet the
kubelet replaces a file nine times for a pod. All watches share one watchdog observer, so one inotify instance: a user
has 128.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Self

from watchdog import events
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from deviceplugin.files import inode_of

_LOG: Final = logging.getLogger(__name__)
_Events = frozenset[type[events.FileSystemEvent]]
NAMES: Final[_Events] = frozenset(
    {
        *(events.DirCreatedEvent, events.DirDeletedEvent, events.DirMovedEvent),
        *(events.FileCreatedEvent, events.FileDeletedEvent, events.FileMovedEvent),
    }
)
"""Names that come and go."""
NAMES_AND_WRITES: Final[_Events] = NAMES | {events.FileClosedEvent}
"""Also files that were written. Not for device directories: every close of /dev/null would be one."""

_CANNOT_WATCH: Final = (
    "cannot watch %s (%s); it is read from time to time instead. "
    "fs.inotify.max_user_instances or max_user_watches may be too low"
)
_Wants = Mapping["Watch", _Events]  # what is a hint


class Gather(NamedTuple):
    """Which hints may come later than at once, so that several become one. seconds: how much later.

    prompt: how the paths end that do not wait.
    """

    seconds: float
    prompt: str


AT_ONCE: Final = Gather(0.0, "")


def _says_more_than_stopped(record: logging.LogRecord) -> bool:
    """Return whether to log: watchdog 7 calls it an error that an emitter is stopped while it has an event."""
    return "called when the thread is inactive" not in record.getMessage()


class Watcher:
    """The process's watcher; `shared()` gives it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._armed: dict[str, _Armed] = {}
        self._complained = False

    def watch(self, directories: Iterable[str], hints: _Events = NAMES, gather: Gather = AT_ONCE) -> Watch:
        """Watch for `NAMES` or `NAMES_AND_WRITES`; a context manager, in a running loop."""
        return Watch(self, directories, hints, gather)

    @functools.cached_property
    def _observer(self) -> BaseObserver:
        logging.getLogger("watchdog.observers.inotify").addFilter(_says_more_than_stopped)
        observer = Observer()
        observer.daemon = True
        observer.start()
        return observer

    def arm(self, watch: Watch, before: Iterable[str], wanted: Mapping[str, _Events]) -> None:
        """Give hints of the wanted directories to `watch`, and no more of those before.

        wanted: by directory, what is a hint. Begins anew where another directory has the name now.
        """
        with self._lock:
            for directory in {*before, *wanted}:
                wants = dict(self._armed[directory].wants) if directory in self._armed else {}
                wants.pop(watch, None)
                if directory in wanted:
                    wants[watch] = wanted[directory]
                self._observe(directory, wants)

    def _observe(self, directory: str, wants: _Wants) -> None:
        """Observe the directory that is there now for these watches, and what any of them wants.

        All share one inotify watch: of two on one directory the kernel keeps only what the later one asks for.
        """
        before, identity = self._armed.pop(directory, None), inode_of(directory)
        if before is not None:
            if wants and (before.identity, before.hints) == (identity, _union(wants)):
                before.wants = wants
                self._armed[directory] = before
                return
            # A directory that was deleted took its emitter along.
            with contextlib.suppress(KeyError, OSError):
                self._observer.unschedule(before.observed)
        if not wants or identity is None:
            return
        armed = _Armed(identity, wants)
        try:
            armed.observed = self._observer.schedule(armed, directory, event_filter=list(armed.hints))
            self._armed[directory] = armed
        except OSError as error:
            if not self._complained:
                self._complained = True
                _LOG.warning(_CANNOT_WATCH, directory, error)
        if before is not None and before.identity == identity:
            for watch in wants:
                watch.wake()  # for what came in between


def _union(wants: _Wants) -> _Events:
    return frozenset[type[events.FileSystemEvent]]().union(*wants.values())


class _Armed(events.FileSystemEventHandler):
    """A directory that is observed, and the watches that want hints; in the observer's thread."""

    observed: ObservedWatch

    def __init__(self, identity: tuple[int, int], wants: _Wants) -> None:
        self.identity = identity
        self.wants = wants
        self.hints = _union(wants)

    def dispatch(self, event: events.FileSystemEvent) -> None:
        # Only enqueue: an exception here would end the observer's thread.
        for watch, hints in self.wants.items():
            if type(event) in hints:
                watch.hint(os.fsdecode(event.src_path), os.fsdecode(event.dest_path))


class Watch:
    """Hints of some directories for one reader; several hints become one."""

    def __init__(
        self, watcher: Watcher, directories: Iterable[str], hints: _Events = NAMES, gather: Gather = AT_ONCE
    ) -> None:
        self._watcher = watcher
        self._hints = hints
        self._gather = gather
        self._gathering = False
        self._loop = asyncio.get_running_loop()
        self._hinted = asyncio.Event()
        self._wanted: frozenset[str] = frozenset()
        self._armed: Mapping[str, _Events] = {}
        self.set(directories)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, directories: Iterable[str]) -> None:
        """Watch these directories from now on instead of the former ones."""
        self._wanted = frozenset(os.path.abspath(directory) for directory in directories)
        self._rearm()

    async def wait(self, timeout: float) -> bool:
        """Wait for a hint; return False if none came in `timeout` seconds. Read in either case."""
        try:
            async with asyncio.timeout(timeout):
                await self._hinted.wait()
            hinted = True
        except TimeoutError:
            hinted = False
        self._hinted.clear()
        self._rearm()
        return hinted

    def wake(self) -> None:
        """Give a hint by hand; thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._hinted.set)

    def hint(self, *paths: str) -> None:
        """Take note of an event at these paths, from any thread."""
        inside = False
        for path in filter(None, paths):
            leads_to = any(f"{wanted}/".startswith(f"{path}/") for wanted in self._wanted)
            if leads_to or (os.path.dirname(path) in self._wanted and path.endswith(self._gather.prompt)):
                self.wake()
                return
            inside |= os.path.dirname(path) in self._wanted
        if inside and not self._gathering:
            self._gathering = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._loop.call_later, self._gather.seconds, self._gathered)

    def _gathered(self) -> None:
        self._gathering = False  # first: what comes now may be seen too late by this reading
        self._hinted.set()

    def close(self) -> None:
        """End the watch."""
        self._arm({})

    def _rearm(self) -> None:
        missing, before = self._missing(), None
        while missing != before:  # one that came or went before its parent was watched gave no hint
            parents = {_nearest(os.path.dirname(directory)) for directory in missing}
            parents |= {_nearest(os.path.dirname(parent)) for parent in parents}
            self._arm(dict.fromkeys(parents, NAMES) | dict.fromkeys(self._wanted, self._hints))
            missing, before = self._missing(), missing

    def _missing(self) -> frozenset[str]:
        return frozenset(directory for directory in self._wanted if not os.path.isdir(directory))

    def _arm(self, directories: Mapping[str, _Events]) -> None:
        self._watcher.arm(self, self._armed, directories)
        self._armed = directories


def _nearest(directory: str) -> str:
    """Return the directory or the nearest of its ancestors that exists."""
    while directory != "/" and not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory


_SHARED: Final = Watcher()


def shared() -> Watcher:
    """Return the process's one watcher."""
    return _SHARED
