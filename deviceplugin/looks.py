"""Accesses to files ("looks") in threads, each with a deadline, so that a hanging file system blocks no event loop.

If a file system stops responding (a lost network, FUSE, a broken disk), a call hangs, and nothing can end its thread.
So the event loop makes no file operation. Each resource, and each directory that the agent uses, has its own pool of a
few threads, so that a hanging look does not delay the looks of other pools. The threads are daemon threads, which,
unlike threads of `concurrent.futures`, do not keep the process from ending.
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
"""Maximum seconds for a file access while the kubelet waits for the agent's response."""
LONG: Final = 15.0
"""Maximum seconds for an access to many files while the kubelet does not wait."""
PROMPT: Final = 0.01
"""Maximum seconds for which the event loop blocks while a thread makes a file access that usually takes microseconds.

Blocking is better than waiting for a wake-up, because on a busy node, the switch from the thread back to the event loop
takes longer than the file access.
"""
SLOW: Final = 10.0
"""After a file access took longer than PROMPT, the event loop does not block for file accesses of the same pool for
this number of seconds."""
IDLE: Final = 30.0
"""Seconds without work after which a thread of a pool ends."""


timeouts: Final[Counter[tuple[str, str]]] = Counter()
"""For each (resource, kind of access), the number of file accesses that exceeded their deadline; the resource is "" for
files of no resource. Counters only grow."""


class LookTimeoutError(OSError):
    """Raised when a file access exceeded its deadline, or did not begin because an earlier access of its pool hangs."""


class Look(Generic[_T]):
    """A look: one call of a blocking function in a thread of a pool. path: the path that the function reads now."""

    def __init__(self, kind: str, function: Callable[..., _T], arguments: tuple[object, ...], path: str) -> None:
        self.kind, self.begun, self.abandoned, self.path = kind, False, False, path
        self._function, self._arguments = function, arguments
        self._context = contextvars.copy_context()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._waiting: list[Callable[[], None]] | None = []
        """Callbacks for the end of the call; None after the end. This list is used only while the pool's lock is
        held."""
        self._outcome: _T | None = None
        self._error: BaseException | None = None

    def run(self, lock: threading.Lock) -> None:
        """Call the function. This method runs in a thread of the pool. lock: the pool's lock."""
        looked_at.begin(self)
        try:
            self._outcome = self._context.run(self._function, *self._arguments)
        except Exception as error:  # The property `result` raises the exception.
            self._error = error
        except BaseException as error:  # Even SystemExit is caught, because the caller needs a result.
            self._error = RuntimeError(f"{type(error).__name__}: {error}")
        looked_at.begin(None)
        self._arguments = ()
        with lock:
            waiting, self._waiting = self._waiting, None
        self._ended.release()
        for callback in waiting or ():
            callback()

    def ended_within(self, seconds: float) -> bool:
        """Block until the call has ended, at most `seconds`; return whether it has ended."""
        if ended := self._ended.acquire(timeout=seconds):
            self._ended.release()
        return ended

    def when_ended(self, callback: Callable[[], None], lock: threading.Lock) -> None:
        """Call `callback` in the pool's thread when the function returns, or here if it has returned already."""
        with lock:
            if self._waiting is not None:
                self._waiting.append(callback)
                return
        callback()

    @property
    def result(self) -> _T:
        """The result of the function; raises the function's exception, once.

        Read this property only after the function has returned.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            # The exception's traceback refers to this frame. The `del` breaks this reference cycle, which only a
            # garbage collection could free otherwise.
            del error
        return self._outcome  # type: ignore[return-value]  # it has ended


class Looks:
    """A thread pool for looks (file accesses with deadlines) at one resource's hardware, or at one directory.

    An instance belongs to one event loop. subject: the name of the hardware or directory in messages, such as a path.
    threads: the maximum number of looks at a time, hanging looks included. resource: the resource whose hardware is
    read; "" for other files. changed: a function that the loop calls when `hanging` changes.
    """

    def __init__(self, subject: str, threads: int = 3, resource: str = "") -> None:
        self.subject = subject
        self.resource = resource
        self.changed: Callable[[], None] = lambda: None
        self.hanging = ""
        """A text that names the file access that hangs now, so that no other access can begin; "" if none hangs."""
        self._most = threads
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Look[Any]] = queue.SimpleQueue()
        self._threads = 0
        self._outstanding = 0
        """The number of calls that run in a thread or wait for a thread."""
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
        """Call a blocking function in a thread; return its result, or raise its exception.

        kind: the label of the call in the metric of timeouts. place: the path for messages, if the function does not
        record paths by `looked_at`. brief: whether the function usually takes microseconds. Raises LookTimeoutError
        after `timeout` seconds, or at once while an earlier call hangs. After a timeout, the function continues in its
        thread.
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
        """Call a function as `at` does, but wait without a limit; `hanging` names the path after `timeout` seconds."""
        look = self.begin(kind, function, *arguments)
        if not (brief and self.ended_at_once(look)) and await self.late(look, timeout, give_up=False):
            await self.until_ended(look)
        return look.result

    def brief(self, kind: str, function: Callable[..., _T], *arguments: object, place: str = "") -> Look[_T] | None:
        """Call a function that usually takes microseconds; return its `Look`, or None if it takes longer than PROMPT.

        The function then continues in its thread, and its result is dropped. If an earlier look of the pool has not
        ended, the function is not called, and the result is None.
        """
        if self.hanging or self._outstanding:
            return None
        look = self.begin(kind, function, *arguments, place=place)
        if self.ended_at_once(look):
            return look
        with contextlib.suppress(RuntimeError):  # Without a running event loop, no task waits for this look.
            asyncio.get_running_loop().call_later(TIMEOUT, self._note_late, look, TIMEOUT)
        return None

    def within(self, seconds: float, kind: str, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function in a thread, and block for at most `seconds` until it returns. Return its result.

        Raises LookTimeoutError.
        """
        if self._outstanding >= self._most:
            raise LookTimeoutError(f"{self.subject}: {self._outstanding} earlier file accesses have not ended")
        look = self.begin(kind, function, *arguments)
        if not look.ended_within(seconds):
            timeouts[self.resource, kind] += 1
            raise LookTimeoutError(f"{look.path} did not answer within {seconds:g} s")
        return look.result

    def begin(self, kind: str, function: Callable[..., _T], *arguments: object, place: str = "") -> Look[_T]:
        """Start a call in a thread, and return its `Look`. The caller then waits by `ended_at_once` or `late`."""
        look = Look(kind, function, arguments, place or self.subject)
        timeouts.setdefault((self.resource, kind), 0)  # The metric has a series even before the first timeout.
        with self._lock:
            self._outstanding += 1
            more = self._outstanding > self._threads and self._threads < self._most
            self._threads += more
        self._queue.put(look)
        if more:
            threading.Thread(target=self._work, name=f"look at {self.subject}", daemon=True).start()
        return look

    def ended_at_once(self, look: Look[Any]) -> bool:
        """Block the event loop for up to PROMPT seconds until a call has ended; return whether it has ended.

        For SLOW seconds after a call that had not ended within PROMPT, this method does not block.
        """
        if time.monotonic() < self._slow_until:
            return look.ended_within(0.0)
        if ended := look.ended_within(PROMPT):
            return ended
        self._slow_until = time.monotonic() + SLOW
        return False

    async def late(self, look: Look[Any], timeout: float, *, give_up: bool = True) -> str:
        """Wait for a look, at most `timeout` seconds. Return "" if the look has ended, else a text that it hangs.

        While the look hangs, `at` refuses further looks. give_up: whether to cancel the look if it has not begun within
        `timeout` seconds.
        """
        await self._end_of(look, timeout)
        return self._note_late(look, timeout, give_up=give_up)

    async def until_ended(self, look: Look[Any]) -> None:
        """Wait without a limit until the function of a `Look` has returned."""
        await self._end_of(look, None)

    async def _end_of(self, look: Look[Any], timeout: float | None) -> None:
        """Wait until the function of a `Look` has returned, at most `timeout` seconds.

        If the caller is cancelled, a call that has not begun is cancelled too.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(end)

        look.when_ended(wake, self._lock)
        timer = loop.call_later(timeout, end) if timeout is not None else None
        try:
            await ended
        except asyncio.CancelledError:
            self.give_up(look)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def give_up(self, look: Look[Any]) -> bool:
        """Cancel a call if it has not begun, because no caller needs it; return whether it was cancelled."""
        with self._lock:
            look.abandoned = not look.begun
            return look.abandoned

    def _note_late(self, look: Look[Any], timeout: float, *, give_up: bool = True) -> str:
        """Record that a look exceeded its deadline. Return a text for messages; "" if the look has ended after all."""
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
            with contextlib.suppress(RuntimeError):  # The loop is closed.
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
        """Run the queued calls, in a thread of the pool. End after IDLE seconds without a call."""
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
