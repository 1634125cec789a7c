"""Runs background tasks, and calls that continue after their caller was cancelled."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, Generic, TypeVar

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


class Tasks:
    """Runs background tasks: keeps references to tasks until they end, and logs their exceptions."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task that runs this coroutine; return the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self, timeout: float | None = None) -> None:  # The signature is that of asyncio.wait.
        """Wait until all tasks that run now have ended, at most `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        await cancel_all(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a task in the background failed: %s", task.get_name(), exc_info=error)


class SharedCall(Generic[_T]):
    """Makes one call on behalf of all callers that arrive before this call begins. Calls run one after another.

    If a caller is cancelled, the call continues, because other callers may wait for its result.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._call = call
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[_T] | None = None
        self._tasks: set[asyncio.Task[_T]] = set()

    async def __call__(self) -> _T:
        """Return the result of a call that begins after this method was called, or raise the call's exception."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._ended)
        return await asyncio.shield(self._next)

    async def _make(self) -> _T:
        async with self._turn:
            self._next = None
            return await self._call()

    def _ended(self, task: asyncio.Task[_T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The call of `exception` prevents asyncio's warning if all callers were cancelled and none got the
            # exception.
            task.exception()

    async def close(self) -> None:
        """Cancel the running call and the waiting call."""
        await cancel_all(self._tasks)


async def in_time(work: Awaitable[object], timeout: float | None = None) -> bool:
    """Wait for an awaitable; return whether it finished within `timeout` seconds. timeout: None or inf for no limit."""
    try:
        async with asyncio.timeout(None if timeout == math.inf else timeout):
            await work
    except TimeoutError:
        return False
    return True


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their exceptions are dropped."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ended(future: asyncio.Future[_T]) -> _T:
    """Return a future's result. If the calling task is cancelled, first wait until the future has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            # The call of `exception` prevents asyncio's warning: the cancellation is raised instead of the exception.
            future.exception()
        raise cancelled
    return future.result()
