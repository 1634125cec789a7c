"""Looks at files: in threads of their own for each resource or directory, and with a deadline.

A file system may stop answering (a network that is lost, FUSE, a broken disk). Then a call to it keeps its thread, and
nothing can end it. So no file operation is made in the event loop. Each resource, and each directory that the agent
uses, has a pool of a few threads for its looks: what hangs there keeps no other look waiting. They are daemon threads,
so that they keep no process from ending; those of `concurrent.futures` would.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from deviceplugin import looked_at

_T = TypeVar("_T")

TIMEOUT: Final = 3.0
"""Seconds that a look may take while the kubelet waits for an answer."""
LONG: Final = 15.0
"""Seconds that a look may take that nobody waits for: it reads many files."""
PROMPT: Final = 0.01
"""Seconds for which the event loop itself waits for a look that takes microseconds.

The way back from a thread through the loop takes longer than that on a busy node.
"""
SLOW: Final = 10.0
"""Seconds for which the loop does not wait for such looks of a pool, after one that took longer."""
IDLE: Final = 30.0
"""Seconds after which a thread without work ends."""


timeouts: Final[Counter[tuple[str, str]]] = Counter()
"""How often a look did not end in time, by resource ("" for other files) and kind; it only grows."""


class LookTimeoutError(OSError):
    """Raised when a look did not end within its time, or when one before it in its pool still has not ended."""


class Look(Generic[_T]):
    """One call in a thread of a pool. path: where it is now, for messages."""

    def __init__(self, kind: str, function: Callable[..., _T], arguments: tuple[object, ...], path: str) -> None:
        self.kind, self.begun, self.abandoned, self.path = kind, False, False, path
        self._function, self._arguments = function, arguments
        self._context = contextvars.copy_context()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._waiting: list[Callable[[], None]] | None = []
        """What to call when it has ended; None once it has. Only with the pool's lock."""
        self._outcome: _T | None = None
        self._error: BaseException | None = None

    def run(self, lock: threading.Lock) -> None:
        """Make the call, in a thread of the pool."""
        looked_at.begin(self)
        try:
            self._outcome = self._context.run(self._function, *self._arguments)
        except Exception as error:  # raised where the result is wanted
            self._error = error
        except BaseException as error:  # SystemExit and the like must not end this thread without a result
            self._error = RuntimeError(f"{type(error).__name__}: {error}")
        looked_at.begin(None)
        self._arguments = ()
        with lock:
            waiting, self._waiting = self._waiting, None
        self._ended.release()
        for callback in waiting or ():
            callback()

    def ended_within(self, seconds: float) -> bool:
        """Block for so long at most; return whether it has ended."""
        if ended := self._ended.acquire(timeout=seconds):
            self._ended.release()
        return ended

    def when_ended(self, callback: Callable[[], None], lock: threading.Lock) -> None:
        """Have `callback` called once it has ended, in its thread or at once."""
        with lock:
            if self._waiting is not None:
                self._waiting.append(callback)
                return
        callback()

    @property
    def result(self) -> _T:
        """What the call returned, once it has ended. Raises what it raised, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame: nothing but a collection of garbage would end that circle
        return self._outcome  # type: ignore[return-value]  # it has ended


class Looks:
    """The looks at one subject: a resource's hardware, or a directory. Its calls are made in one event loop.

    subject: for messages, such as a path. threads: how many looks may be under way, and so may hang. resource: the one
    whose hardware is looked at. changed: called in the loop when `hanging` changes.
    """

    def __init__(self, subject: str, threads: int = 3, resource: str = "") -> None:
        self.subject = subject
        self.resource = resource
        self.changed: Callable[[], None] = lambda: None
        self.hanging = ""
        """Why nothing is looked at now: a look before has not ended yet; "" if all have."""
        self._most = threads
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Look[Any]] = queue.SimpleQueue()
        self._threads = 0
        self._outstanding = 0
        """Looks that wait for a thread, or have one."""
        self._overdue: set[Look[Any]] = set()
        self._slow_until = 0.0

    def __repr__(self) -> str:
        return f"<Looks at {self.subject}: {self.hanging or 'none hangs'}>"

    async def at(
        self,
        kind: str,
        function: Callable[..., _T],
        *arguments: object,
        timeout: float = TIMEOUT,
        place: str = "",
        brief: bool = False,
    ) -> _T:
        """Call a function that blocks; return what it returns, or raise what it raises.

        kind: for the metric. place: the path for messages, where the function does not tell it by `looked_at`.
        brief: it usually takes microseconds. Raises LookTimeoutError. A look that has begun goes on then.
        """
        if self.hanging:
            raise LookTimeoutError(self.hanging)
        look = self.begin(kind, function, *arguments, place=place)
        if not (brief and self.ended_at_once(look)) and (why := await self.late(look, timeout)):
            raise LookTimeoutError(why)
        return look.result

    async def until_answered(
        self, kind: str, function: Callable[..., _T], *arguments: object, timeout: float = TIMEOUT, brief: bool = False
    ) -> _T:
        """Do as `at`, but wait until it ends: after `timeout` seconds `hanging` says that it has not."""
        look = self.begin(kind, function, *arguments)
        if not (brief and self.ended_at_once(look)) and await self.late(look, timeout, give_up=False):
            await self.until_ended(look)
        return look.result

    def brief(self, kind: str, function: Callable[..., object], *arguments: object, place: str = "") -> bool:
        """Call a function that usually takes microseconds; return whether it has ended. It goes on if it has not.

        It is not called while a look before has not ended. What it returns is dropped. Raises what it raises.
        """
        if self.hanging or self._outstanding:
            return False
        look = self.begin(kind, function, *arguments, place=place)
        if self.ended_at_once(look):
            look.result  # noqa: B018  # raises
            return True
        with contextlib.suppress(RuntimeError):  # without a loop nobody waits for it
            asyncio.get_running_loop().call_later(TIMEOUT, self._note_late, look, TIMEOUT)
        return False

    def within(self, seconds: float, kind: str, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function from a thread that waits so long at most. Raises LookTimeoutError."""
        if self._outstanding >= self._most:
            raise LookTimeoutError(f"{self.subject}: {self._outstanding} looks have not ended")
        look = self.begin(kind, function, *arguments)
        if not look.ended_within(seconds):
            timeouts[self.resource, kind] += 1
            raise LookTimeoutError(f"{look.path} did not answer within {seconds:g} s")
        return look.result

    def begin(self, kind: str, function: Callable[..., _T], *arguments: object, place: str = "") -> Look[_T]:
        """Begin a look; the caller waits for it by `ended_at_once` or `late`."""
        look = Look(kind, function, arguments, place or self.subject)
        timeouts.setdefault((self.resource, kind), 0)  # a counter is to begin at 0
        with self._lock:
            self._outstanding += 1
            more = self._outstanding > self._threads and self._threads < self._most
            self._threads += more
        self._queue.put(look)
        if more:
            threading.Thread(target=self._work, name=f"look at {self.subject}", daemon=True).start()
        return look

    def ended_at_once(self, look: Look[Any]) -> bool:
        """Have the loop wait shortly for a look that usually takes microseconds; return whether it has ended."""
        if time.monotonic() < self._slow_until:
            return look.ended_within(0.0)
        if ended := look.ended_within(PROMPT):
            return ended
        self._slow_until = time.monotonic() + SLOW
        return False

    async def late(self, look: Look[Any], timeout: float, *, give_up: bool = True) -> str:
        """Wait for a look; return "" if it has ended, else why not: then it keeps others from being begun.

        give_up: it is not begun any more, if it has not begun yet.
        """
        await self._end_of(look, timeout)
        return self._note_late(look, timeout, give_up=give_up)

    async def until_ended(self, look: Look[Any]) -> None:
        """Wait until a look has ended."""
        await self._end_of(look, None)

    async def _end_of(self, look: Look[Any], timeout: float | None) -> None:
        """Wait until a look has ended, or for so many seconds. That of a cancelled caller is not begun any more."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        look.when_ended(wake, self._lock)
        try:
            async with asyncio.timeout(timeout):
                await ended.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.give_up(look)
            raise

    def give_up(self, look: Look[Any]) -> bool:
        """Have a look not begun any more: nobody expects what it would do; return whether it had not begun yet."""
        with self._lock:
            look.abandoned = not look.begun
            return look.abandoned

    def _note_late(self, look: Look[Any], timeout: float, *, give_up: bool = True) -> str:
        """Take note if a look has not ended in time; return why not, "" if it has."""
        if look.ended_within(0.0):
            return ""
        timeouts[self.resource, look.kind] += 1
        if give_up and self.give_up(look):
            return f"{look.path} was not looked at within {timeout:g} s: other looks at {self.subject} have not ended"
        why = f"{look.path} did not answer within {timeout:g} s"
        loop = asyncio.get_running_loop()

        def over() -> None:
            self._overdue.discard(look)
            if not self._overdue:
                self._set_hanging("")

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(over)

        self._overdue.add(look)
        self._set_hanging(self.hanging or why)
        look.when_ended(wake, self._lock)
        return why

    def _set_hanging(self, why: str) -> None:
        if why != self.hanging:
            self.hanging = why
            self.changed()

    def _work(self) -> None:
        """Make the calls that come, until there are none for a while."""
        while True:
            try:
                look = self._queue.get(timeout=IDLE)
            except queue.Empty:
                with self._lock:
                    if self._outstanding < self._threads:
                        self._threads -= 1
                        return
                continue
            with self._lock:
                look.begun = not look.abandoned
            if look.begun:
                look.run(self._lock)
            with self._lock:
                self._outstanding -= 1
            del look
