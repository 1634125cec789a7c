"""One call at a time for each claim, and calls that a cancellation does not tear apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

__all__ = ["Turns", "ended", "in_thread"]

_T = TypeVar("_T")


class Turns:
    """A lock for each claim, kept while somebody wants it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, uid: str) -> AsyncIterator[None]:
        """Hold the claim's lock."""
        lock, users = self._locks.get(uid) or (asyncio.Lock(), 0)
        self._locks[uid] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(uid)
            if users > 1:
                self._locks[uid] = lock, users - 1


async def in_thread(function: Callable[..., _T], *args: object) -> _T:
    """Call a function in a thread; if this task is cancelled meanwhile, raise that when the call has ended.

    A thread cannot be cancelled: a claim's turn that ended before it would let the next call for
    this claim work on the same file beside it.
    """
    return await ended(asyncio.get_running_loop().run_in_executor(None, function, *args))


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
