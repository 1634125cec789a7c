"""Notifies readers that a directory may have changed. Such a notice is called a hint.

Each event loop has one watcher with one inotify instance. An event of inotify is only a hint to read the directory
again. Events can be missing: an overflow drops events, a directory that was moved away causes no events, some file
systems cause no events, and the user may have no inotify instance or watch left. So each wait for a hint has two
timeouts, after which the reader reads without a hint: one for directories with events, one for directories without.

While a directory does not exist, its nearest existing ancestor is watched. Ancestors are not watched otherwise, because
the kubelet replaces a file in /var/lib/kubelet nine times for each pod. A periodic check shows whether the directory at
the path is still the watched directory.

The event loop makes no system call that waits for a file system. A temporary thread makes such calls. watchdog 7 holds
a lock while it begins to watch a directory. So the thread first reads the directory's status: if the file system hangs,
only this thread hangs, without the lock. If the file system stops responding only after this read, no directory causes
events until a new inotify instance replaces the present one, at the end of the first wait after 5 s. Until then, waits
end by their timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from watchdog import events
from watchdog.observers import Observer
from watchdog.observers.api import ObservedWatch

from deviceplugin import unwatched
from deviceplugin.backoff import Backoff
from deviceplugin.tasks import in_time
from deviceplugin.unwatched import Unwatched, UnwatchedCause, WatchFailure, files_left

_LOG: Final = logging.getLogger(__name__)

_Events = frozenset[type[events.FileSystemEvent]]
_Call = Callable[..., None]
_NOTHING: Final = _Events()
NAMES: Final[_Events] = frozenset(
    {
        *(events.DirCreatedEvent, events.DirDeletedEvent, events.DirMovedEvent),
        *(events.FileCreatedEvent, events.FileDeletedEvent, events.FileMovedEvent),
    }
)
"""The inotify events for created, removed and renamed entries of a directory."""
NAMES_AND_WRITES: Final[_Events] = NAMES | {events.FileClosedEvent}
"""The events of `NAMES`, and events of written files. They must not be used for /dev, because each close of /dev/null
would be an event."""

CHECK: Final = 1.0
"""Minimum seconds between two checks whether a path still leads to the watched directory. Each check is made at the end
of a wait for a hint."""
SOON: Final = 0.03
"""Seconds between two reads of a directory without file events, while a caller waits for its content."""
AT_REST: Final = 2.0
"""Seconds between two reads of a directory without file events, while no caller waits for its content."""
RENEW: Final = 600.0
"""Seconds after which a check renews a directory's inotify watch, because the watch may have ended, and the event about
its end may have been lost."""
_LOOKS: Final = 20
"""Maximum tries of one thread to watch a directory that is created and removed repeatedly. The next wait starts another
thread."""


class Gather(NamedTuple):
    """The delay of the hints of a `Watch`, so that several file events cause one hint. seconds: the delay.

    prompt: the ending of those paths whose file events cause a hint without delay.
    """

    seconds: float
    prompt: str


AT_ONCE: Final = Gather(0.0, "")


class Watcher:
    """The file watcher of one event loop; only this loop uses it. `shared()` returns the running loop's watcher."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._instance: _Instance | None = None
        self._failure: WatchFailure | None = None
        self._next_try = 0.0
        self._backoff = Backoff(first=1.0, most=60.0)
        self._places: dict[str, _Place] = {}
        self._looking: set[Watch] = set()
        self._said: frozenset[WatchFailure] = frozenset()

    def watch(self, directories: Iterable[str], hints: _Events = NAMES, gather: Gather = AT_ONCE) -> Watch:
        """Return a context manager that watches directories. hints: types of events, `NAMES` or `NAMES_AND_WRITES`."""
        return Watch(self, directories, hints, gather)

    def unwatched(self) -> tuple[Unwatched, ...]:
        """Return the watched directories without file events, with the causes. Any thread may call this method."""
        found: defaultdict[WatchFailure, list[str]] = defaultdict(list)
        for place in sorted(self._places.copy().values(), key=lambda place: place.directory):
            failure = WatchFailure(UnwatchedCause.SILENT) if place.silent else self._failure or place.failure
            if place.wants and failure is not None:
                found[failure].append(place.directory)
        return tuple(Unwatched(failure, tuple(directories)) for failure, directories in found.items())

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop. Any thread may use this method."""
        if (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(function, *arguments)

    def want(self, watch: Watch, directories: frozenset[str], hints: _Events) -> None:
        """Set the directories whose file events cause hints for `watch`. hints: the types of these events."""
        gone = [watch.places.pop(directory) for directory in watch.places.keys() - directories]
        for directory in directories - watch.places.keys():
            place = watch.places[directory] = self._places.setdefault(directory, _Place(directory))
            place.want(watch, hints)
        for place in gone:
            place.want(watch, _NOTHING)
        self._drop(*gone)
        if any(place.wants for place in self._places.values()):
            self._open()
            self._look(watch)
        else:
            self._close()

    def check(self, watch: Watch, *, hinted: bool) -> None:
        """Start a thread that checks the directories of `watch` that are due, and watches them again if needed."""
        if not watch.places:
            return
        self._open()
        now = time.monotonic()
        for place in watch.places.values():
            place.due |= place.asked_at is None and ((hinted and place.indirect) or now >= place.next_look)
        self._look(watch)
        if any(place.silent for place in watch.places.values()):
            self._report()

    def _open(self) -> None:
        """Create the inotify instance, unless a working instance exists or the next try is not due yet."""
        if self._instance is not None and self._instance.stuck:
            _LOG.warning("a file system does not answer and holds up the inotify instance; another one replaces it")
            self._close()
        if self._instance is not None or time.monotonic() < self._next_try:
            return
        try:
            self._instance = _Instance(self.call)
        except (OSError, RuntimeError) as error:
            self._failure = WatchFailure.of(error)
            self._next_try = time.monotonic() + self._backoff.next()
        else:
            self._failure = None
            self._backoff.reset()
            for place in self._places.values():
                self._look_at(place)
        self._report()

    def _close(self) -> None:
        """End the inotify instance, and mark all directories as not watched."""
        if self._instance is not None:
            _in_thread(self._instance.end)
            self._instance = None
        for place in self._places.values():
            place.take(_NOT_WATCHED)
            place.due = True

    def _look(self, watch: Watch) -> None:
        """Start a thread that makes inotify watches for the directories of `watch` that need one (`_Place.due`)."""
        due = any(place.due and place.asked_at is None for place in watch.places.values())
        if self._instance is None or watch in self._looking or not due:
            return
        if _in_thread(self._look_at_all, self._instance, watch, tuple(watch.places.values())):
            self._looking.add(watch)

    def _look_at(self, place: _Place) -> None:
        """Start a thread that makes the inotify watch of a directory, if one of its `Watch` objects has no thread."""
        place.due = True
        for watch in place.wants:
            if watch not in self._looking:
                self._look(watch)
                break

    def _look_at_all(self, instance: _Instance, watch: Watch, places: Iterable[_Place]) -> None:
        """Make inotify watches for the directories that need one, one after another. This method runs in a thread."""
        for place in places:
            if place.due and place.wants and place.asked_at is None:
                place.due, place.asked_at = False, time.monotonic()
                self.call(self._seen, instance, place, instance.look(place, self.hint))
        self.call(self._looked, watch)

    def _looked(self, watch: Watch) -> None:
        self._looking.discard(watch)
        self._look(watch)

    def _seen(self, instance: _Instance, place: _Place, begun: _Begun) -> None:
        """Store the result of a thread's try to watch a directory, and start the next try if one is due."""
        place.asked_at = None
        if place.wants:
            self._open()
        if instance is self._instance:
            before = place.begun
            place.take(begun)
            if begun.found != before.found:
                place.wake()  # A hint is needed, because changes before the watch began have caused no event.
            if begun.failure != before.failure or self._said:
                self._report()
        else:
            place.due = True
        self._drop(place)
        if place.wants and place.due:
            self._look_at(place)

    def _drop(self, *places: _Place) -> None:
        """Remove the directories (places) that no `Watch` needs any more.

        If a thread is working on a directory, the directory is removed when the thread has ended its work.
        """
        dropped = [place for place in places if not place.wants and place.asked_at is None]
        for place in dropped:
            if self._places.get(place.directory) is place:
                del self._places[place.directory]
        if dropped and self._instance is not None:
            _in_thread(self._instance.forget, dropped)

    def hint(self, place: _Place, at: str, event: events.FileSystemEvent | None) -> None:
        """Give a hint to those `Watch` objects of a directory (place) that want this event. at: the watched path.

        event: the file event; None if the directory was removed.
        """
        if place.hint(at, event):
            self._look_at(place)

    def _report(self) -> None:
        """Log each directory that has ceased to cause events, and log when all directories cause events again."""
        lacking = {one.failure: one for one in self.unwatched()}
        for failure in sorted(lacking.keys() - self._said):
            _LOG.warning("%s", lacking[failure])
        if self._said and not lacking:
            _LOG.info("all directories are watched again")
        self._said = frozenset(lacking)


class _Found(NamedTuple):
    """An existing directory: the requested one, or its nearest existing ancestor.

    at: the directory's path as requested. path: the same path without symbolic links. identity: device and inode
    number.
    """

    at: str
    path: str
    identity: tuple[int, int]


class _Begun(NamedTuple):
    """The result of a try to watch a directory.

    found: the watched directory; None if no directory is watched. hints: the watched types of events. failure: the
    reason why no directory is watched.
    """

    found: _Found | None
    hints: _Events
    failure: WatchFailure | None


_NOT_WATCHED: Final = _Begun(None, _NOTHING, None)


def _find(directory: str) -> _Found:
    """Return the directory at a path, or its nearest existing ancestor. Blocks. Raises OSError."""
    at = directory
    while True:
        try:
            state = os.stat(os.path.join(at, ""))  # With a trailing slash, os.stat fails for a file.
            break
        except (FileNotFoundError, NotADirectoryError):
            at = os.path.dirname(at)
    # The permission is checked, because watchdog 7 ignores inotify_add_watch's error for an unreadable directory.
    if not os.access(at, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), at)
    return _Found(at, os.path.realpath(at), (state.st_dev, state.st_ino))


def _says_more_than_stopped(record: logging.LogRecord) -> bool:
    """Return whether to log a record: False only for watchdog's error about an emitter that has stopped already."""
    return "called when the thread is inactive" not in record.getMessage()


class _Instance:
    """A watchdog observer with one inotify instance, used by several threads.

    Raises OSError if no inotify instance can be created (EMFILE if the user's limit is reached), RuntimeError if no
    thread can be started.
    """

    def __init__(self, call: _Call) -> None:
        logging.getLogger("watchdog.observers.inotify").addFilter(_says_more_than_stopped)
        if not files_left(3):  # watchdog 7 would leak the inotify file if it could not open a pipe after it.
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        self._observer = Observer()
        self._observer.start()
        self._call = call
        self._lock = threading.Lock()
        self._held_since: float | None = None
        self._over = False
        self._observed: dict[str, _Observed] = {}
        self._of: dict[_Place, _Observed] = {}

    @property
    def stuck(self) -> bool:
        """Whether a call that makes an inotify watch hangs in a file system. Any thread may read this property."""
        since = self._held_since
        return since is not None and time.monotonic() - since > unwatched.SILENT

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """While the context is active, no other thread may change the observed directories.

        Raises TimeoutError if another thread does not leave the context in time.
        """
        if not self._lock.acquire(timeout=unwatched.SILENT):
            raise TimeoutError
        try:
            self._held_since = time.monotonic()
            yield
        finally:
            if self._over:
                self._observer.stop()
            self._held_since = None
            self._lock.release()

    def end(self) -> None:
        """End all inotify watches. If a thread hangs in a call of the instance, they end when this call returns."""
        self._over = True
        with contextlib.suppress(TimeoutError), self._held():
            pass

    def look(self, place: _Place, hint: _Call) -> _Begun:
        """Watch a directory or its nearest existing ancestor; return the result. hint: the function for its events."""
        hints = place.wanted
        found: _Found | None = None
        try:
            # After the watch has begun, the directory is searched again: changes before that have caused no event.
            for _ in range(_LOOKS):
                before, found = found, _find(place.directory)
                if found == before:
                    return _Begun(found, hints, None)
                try:
                    self._observe(place, found, hints if found.at == place.directory else NAMES, hint)
                except (FileNotFoundError, NotADirectoryError):
                    found = None
        except (OSError, RuntimeError) as error:
            return _Begun(None, _NOTHING, WatchFailure.of(error))
        return _NOT_WATCHED

    def _observe(self, place: _Place, found: _Found, hints: _Events, hint: _Call) -> None:
        with self._held():
            if self._over:
                return
            observed = self._observed.setdefault(found.path, _Observed(found.path, hint, self._call))
            observed.identity = found.identity
            observed.wants = {**observed.wants, place: (found.at, hints)}
            if self._of.get(place) is not observed:
                self._leave(place)
                self._of[place] = observed
            self._renew(observed)

    def forget(self, places: Iterable[_Place]) -> None:
        """End the inotify watches of these directories (places). The directories cause no more events."""
        with contextlib.suppress(TimeoutError), self._held():
            for place in places:
                self._leave(place)

    def _leave(self, place: _Place) -> None:
        if (observed := self._of.pop(place, None)) is not None:
            observed.wants = {other: wanted for other, wanted in observed.wants.items() if other is not place}
            # A failure is not reported here, because the next try to watch the directory would report it.
            with contextlib.suppress(OSError, RuntimeError):
                self._renew(observed)

    def _renew(self, observed: _Observed) -> None:
        """Watch an observed directory for all events that its `_Place` objects want. Raises OSError, RuntimeError.

        The kernel has only one watch for each inode, so one request must name the events of all these objects.
        """
        hints = _NOTHING.union(*(wanted for _, wanted in observed.wants.values()))
        if observed.watch is not None:
            recent = time.monotonic() - observed.begun_at < RENEW
            if hints and recent and not observed.ended and observed.begun == (observed.identity, hints):
                return
            # A KeyError means that watchdog has already removed the emitter of a deleted directory.
            with contextlib.suppress(KeyError, OSError):
                self._observer.unschedule(observed.watch)
            observed.watch = None
        if not hints or self._over:
            self._observed.pop(observed.path, None)
            return
        observed.ended, observed.begun, observed.begun_at = False, (observed.identity, hints), time.monotonic()
        observed.watch = self._observer.schedule(observed, observed.path, event_filter=list(hints))
        for place in observed.wants:
            self._call(place.wake)  # Hints are needed: changes before the watch began have caused no event.


class _Observed(events.FileSystemEventHandler):
    """An observed directory, and the `_Place` objects that want its events.

    path: the directory's path without symbolic links.
    """

    def __init__(self, path: str, hint: _Call, call: _Call) -> None:
        self.path = path
        self.identity = (0, 0)
        self.wants: Mapping[_Place, tuple[str, _Events]] = {}
        """For each `_Place`: the path by which it names this directory, and the types of events that it wants. A change
        replaces the mapping."""
        self.watch: ObservedWatch | None = None
        self.begun: tuple[tuple[int, int], _Events] | None = None
        """The identity of the directory, and the types of events, with which the present inotify watch was made."""
        self.begun_at = 0.0
        self.ended = False
        """Whether the directory was deleted after the watch began."""
        self._hint = hint
        self._call = call

    def dispatch(self, event: events.FileSystemEvent) -> None:
        # Events are only queued for the event loop, because an exception here would end watchdog's thread.
        gone = isinstance(event, events.DirDeletedEvent) and os.fsdecode(event.src_path) == self.path
        self.ended |= gone
        for place, (at, hints) in self.wants.items():
            if gone or type(event) in hints:
                self._call(self._hint, place, at, None if gone else event)


class _Place:
    """A directory, and the `Watch` objects that want hints when it changes."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.wants: dict[Watch, _Events] = {}
        self.wanted = _NOTHING
        self.begun = _NOT_WATCHED
        self.due = True
        """Whether a thread should make a new inotify watch of the directory."""
        self.next_look = 0.0
        self.asked_at: float | None = None
        """The time at which a thread began to work on the directory (monotonic seconds); None if no thread does."""
        self._backoff = Backoff(first=CHECK, most=60.0)

    def want(self, watch: Watch, hints: _Events) -> None:
        """Set the types of events that cause a hint for a `Watch`. `_NOTHING` removes the `Watch`."""
        self.wants.pop(watch, None)
        if hints:
            self.wants[watch] = hints
        self.wanted = _NOTHING.union(*self.wants.values())
        self.due |= not self.wanted <= self.begun.hints

    @property
    def at(self) -> str:
        """The path that is watched: the directory's, or that of its nearest existing ancestor."""
        return self.directory if self.begun.found is None else self.begun.found.at

    @property
    def indirect(self) -> bool:
        """Whether the watched path contains symbolic links. A change of a link on the path causes no event."""
        return self.begun.found is not None and self.begun.found.path != self.begun.found.at

    @property
    def failure(self) -> WatchFailure | None:
        """The reason why the last try to watch the directory failed; None if it did not fail."""
        return self.begun.failure

    @property
    def silent(self) -> bool:
        """Whether the directory's file system has not responded for SILENT seconds."""
        asked_at = self.asked_at
        return asked_at is not None and time.monotonic() - asked_at > unwatched.SILENT

    @property
    def watched(self) -> bool:
        """Whether the directory or its nearest existing ancestor is watched, and its file system responds."""
        return self.begun.found is not None and not self.silent

    def take(self, begun: _Begun) -> None:
        """Store the result of a try to watch the directory."""
        self.begun = begun
        self.due |= not self.wanted <= begun.hints and begun.found is not None
        if begun.failure is None:
            self._backoff.reset()
        self.next_look = time.monotonic() + (CHECK if begun.failure is None else self._backoff.next())

    def wake(self) -> None:
        """Give a hint to each `Watch` of this directory."""
        for watch in self.wants:
            watch.wake()

    def hint(self, at: str, event: events.FileSystemEvent | None) -> bool:
        """Give hints for an event in the watched path `at`. Return whether a thread should make a new inotify watch.

        event: None if the directory was removed.
        """
        if event is None:
            self.wake()
            return True
        names = (os.path.basename(os.fsdecode(path)) for path in (event.src_path, event.dest_path) if path)
        paths = [os.path.join(at, name) for name in names]
        if at != self.directory:
            leads_to = any(f"{self.directory}/".startswith(f"{path}/") for path in paths)
            if leads_to:
                self.wake()
            return leads_to
        for watch, hints in self.wants.items():
            if type(event) in hints:
                watch.hint(*paths)
        return False


class Watch:
    """Collects the hints about some directories for one reader. Several hints before a wait end only one wait."""

    def __init__(
        self, watcher: Watcher, directories: Iterable[str], hints: _Events = NAMES, gather: Gather = AT_ONCE
    ) -> None:
        self.places: dict[str, _Place] = {}
        self._watcher = watcher
        self._hints = hints
        self._gather = gather
        self._gathering = False
        self._hinted = asyncio.Event()
        self.set(directories)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, directories: Iterable[str]) -> None:
        """Watch these directories instead of the former ones. The beginning of a new directory's watch gives a hint."""
        wanted = frozenset(os.path.abspath(directory) for directory in directories)
        self._watcher.want(self, wanted, self._hints)

    async def wait(self, timeout: float, unwatched: float = math.inf) -> bool:
        """Wait for a hint; return False if none came within `timeout` seconds. In both cases, the caller reads again.

        unwatched: a further timeout (seconds), which applies while any of the directories causes no file events.
        """
        watched = all(place.watched for place in self.places.values())
        hinted = await in_time(self._hinted.wait(), timeout if watched else min(timeout, unwatched))
        self._hinted.clear()
        self._watcher.check(self, hinted=hinted)
        return hinted

    def wake(self) -> None:
        """Give a hint. Any thread may call this method."""
        self._watcher.call(self._hinted.set)

    def hint(self, *paths: str) -> None:
        """Record an event at these paths. The hint is given at once, or after the delay of `Gather`."""
        if any(path.endswith(self._gather.prompt) for path in paths):
            self._hinted.set()
        elif not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_later(self._gather.seconds, self._gathered)

    def _gathered(self) -> None:
        self._gathering = False  # `_gathering` is reset first, so that a later event causes another hint.
        self._hinted.set()

    def close(self) -> None:
        """End the watch of all directories."""
        self.set(())


def _in_thread(function: Callable[..., object], *arguments: Any) -> bool:
    """Start a daemon thread for a function; return False if no thread can be started."""
    try:
        threading.Thread(target=function, args=arguments, name=f"watch: {function.__name__}", daemon=True).start()
    except RuntimeError:
        return False
    return True


_WATCHERS: Final = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watcher]()


def shared() -> Watcher:
    """Return the watcher of the running event loop. The first call creates the watcher."""
    return _WATCHERS.setdefault(asyncio.get_running_loop(), Watcher())
