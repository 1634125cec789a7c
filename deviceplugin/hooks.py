"""Calls the hooks of an author's source, each with a deadline.

If a hook fails or never returns, only the caller that needs the hook's result fails. Each plain function runs in a
daemon thread of its own, because in a thread pool, hanging functions would occupy all threads, and the process could
not end. A coroutine that does not end after its cancellation is abandoned. A coroutine that blocks (`time.sleep`
instead of `asyncio.sleep`) blocks the whole agent, and so the check of the coroutine's timeout too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, overload

from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_STUCK: Final = 64
"""Maximum number of threads that hang in timed-out calls of one hook. Further calls of the hook fail at once."""

LATE: Final = 0.5
"""If a coroutine ends later than this number of seconds after its deadline, the coroutine must have blocked the event
loop, and the log says so."""

NOT_AWAITED: Final = "nobody awaited it; write `await` before the call"

_stuck: dict[asyncio.Future[Any], str] = {}
"""For each call that hangs in a thread: the call's future, and the name of the hook."""
_abandoned: set[asyncio.Task[Any]] = set()


class HookError(Exception):
    """Raised when a hook raised an exception (see `__cause__`), or returned an awaitable instead of awaiting it."""


class HookTimeoutError(HookError):
    """Raised when a hook has exceeded its timeout.

    work: a future that is done when the hook has ended; None if the hook was not called.
    """

    def __init__(self, message: str, work: asyncio.Future[Any] | None = None) -> None:
        super().__init__(message)
        self.work = work


Left = Callable[[asyncio.Future[Any]], None]


def _nobody(work: asyncio.Future[Any]) -> None:
    """Do nothing about an abandoned call. This function is the default of the argument `left`."""


@overload
async def call(
    what: str, hook: Callable[..., Awaitable[_T]], *args: object, timeout: float, left: Left = _nobody
) -> _T: ...
@overload
async def call(
    what: str, hook: Callable[..., _T | Awaitable[_T]], *args: object, timeout: float, left: Left = _nobody
) -> _T: ...
async def call(what: str, hook: Callable[..., Any], *args: object, timeout: float, left: Left = _nobody) -> Any:
    """Call a plain or coroutine function with `args` and return its result.

    what: the hook's name for messages, such as "reset of example.com/fpga". timeout: seconds after which the call is
    abandoned. left: a function that is called if the call is abandoned, after its timeout or because the caller is
    cancelled. The argument of `left` is a future that is done when the hook has ended.

    Raises HookTimeoutError if the hook did not end in time, or if too many earlier calls of hooks still hang. Raises
    HookError if the hook raised an exception, or returned an awaitable instead of awaiting it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    if inspect.iscoroutinefunction(hook):
        result: Any = hook(*args)
    else:
        if (count := sum(hook_name == what for hook_name in _stuck.values())) >= MAX_STUCK:
            raise HookTimeoutError(f"{what} was not called: {count} earlier calls of it still hang")
        future: asyncio.Future[Any] = loop.create_future()
        threading.Thread(target=_run, args=(loop, future, hook, args), name=f"hook {what}", daemon=True).start()
        result = await _finish(what, future, timeout, timeout, left)
    if inspect.isawaitable(result):
        rest = max(0.0, deadline - loop.time())
        result = await _finish(what, asyncio.ensure_future(result), rest, timeout, left)
        if inspect.iscoroutine(result):
            result.close()
            raise HookError(f"{what} returned a coroutine: {NOT_AWAITED}")
    return result


@dataclass(slots=True)
class HookStatistics:
    """For each (resource, hook), statistics of the hook's calls. Counters only grow.

    seconds: the total duration of all calls, including failed calls.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], float] = field(default_factory=partial(defaultdict, float))

    async def call(
        self,
        name: str,
        source: DeviceSource,
        hook: Callable[..., _T | Awaitable[_T]],
        *args: object,
        left: Left = _nobody,
    ) -> _T:
        """Call a source's hook with the source's timeout, and count the call. name: the hook's name."""
        key, began = (source.resource, name), time.perf_counter()
        self.calls[key] += 1
        try:
            return await call(f"{name} of {source.resource}", hook, *args, timeout=source.hook_timeout, left=left)
        except HookError:
            self.failures[key] += 1
            raise
        finally:
            self.seconds[key] += time.perf_counter() - began


async def _finish(what: str, future: asyncio.Future[Any], rest: float, timeout: float, left: Left) -> Any:
    """Wait at most `rest` seconds for a hook's result, and return it. timeout: the hook's timeout, for messages."""
    began = asyncio.get_running_loop().time()
    try:
        done, _ = await asyncio.wait({future}, timeout=rest)
    except asyncio.CancelledError:
        _abandon(what, future)
        left(future)
        raise
    if not done:
        _abandon(what, future)
        left(future)
        raise HookTimeoutError(f"{what} did not answer within {timeout:g} s", future)
    if isinstance(future, asyncio.Task) and (late := asyncio.get_running_loop().time() - began - rest) > LATE:
        _LOG.warning(
            "%s blocked the whole agent for %.1f s: a coroutine must not block, a plain function may", what, late
        )
    try:
        return future.result()
    except asyncio.CancelledError as error:
        raise HookError(f"{what} was cancelled") from error
    except Exception as error:
        _LOG.debug("%s failed", what, exc_info=error)
        raise HookError(f"{what} failed: {type(error).__name__}: {error}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Return the line in the hook's file at which an error was raised, as " (file:line)"; "" if it is unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _abandon(what: str, future: asyncio.Future[Any]) -> None:
    """Stop waiting for a call, and cancel a coroutine. The call's future is kept in `_stuck` until the call ends."""

    def forget(done: asyncio.Future[Any]) -> None:
        _abandoned.discard(done)
        _stuck.pop(done, None)
        if not done.cancelled():
            done.exception()  # Retrieve the exception, because otherwise asyncio logs that it was never retrieved.

    future.add_done_callback(forget)
    if isinstance(future, asyncio.Task):
        _abandoned.add(future)
        future.cancel()
    else:
        _stuck[future] = what


def _run(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], hook: Callable[..., Any], args: tuple[object, ...]
) -> None:
    try:
        outcome, error = hook(*args), None
    except Exception as raised:
        outcome, error = None, raised
    except BaseException as raised:  # Even SystemExit is caught, because the caller needs a result.
        outcome, error = None, RuntimeError(f"{type(raised).__name__}: {raised}")
    try:
        loop.call_soon_threadsafe(_complete, future, outcome, error)
    except RuntimeError:  # The loop is closed, so no caller waits for the result. The thread has ended.
        _stuck.pop(future, None)


def _complete(future: asyncio.Future[Any], outcome: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):  # A future cannot hold a StopIteration.
        future.set_exception(RuntimeError("StopIteration"))
    else:
        future.set_exception(error)
