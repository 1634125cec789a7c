"""Tasks that run in the background, and calls that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, Generic, TypeVar

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


class Tasks:
    """Keeps references to tasks until they end, and logs what they raise: nobody may wait for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self, timeout: float | None = None) -> None:  # as asyncio.wait has it
        """Wait until the tasks that run now have ended, or until so many seconds are over."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        await cancel_all(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a task in the background failed: %s", task.get_name(), exc_info=error)


class SharedCall(Generic[_T]):
    """Makes a call once for all who ask for it before it begins. Calls follow each other, none runs beside another.

    A call goes on if those who asked are cancelled: others may have come to wait for it.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._call = call
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[_T] | None = None
        self._tasks: set[asyncio.Task[_T]] = set()

    async def __call__(self) -> _T:
        """Return what a call returns that begins now or later; raise what it raises."""
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
            task.exception()  # all who asked may be gone

    async def close(self) -> None:
        """Cancel the calls that are under way or wait for their turn."""
        await cancel_all(self._tasks)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends; what they raise is dropped."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ended(future: asyncio.Future[_T]) -> _T:
    """Wait for the end of a future, and only then raise the cancellation of this task, if there was one."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved; the cancellation counts
        raise cancelled
    return future.result()
