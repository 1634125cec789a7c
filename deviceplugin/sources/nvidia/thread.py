"""The thread in which NVML is called: a driver may hang, so each call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from deviceplugin.health import Verdict
from deviceplugin.sources.nvidia.values import NvmlError

_T = TypeVar("_T")


class NvmlThread:
    """One thread in which blocking calls are made, one after another, each with a deadline.

    A call that hangs keeps the thread, and no other call is begun meanwhile: a second thread would
    hang beside it. The thread is free again when it returns.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: list[threading.Event] = []
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[..., _T], *arguments: Any, timeout: float) -> _T:
        """Call a function in the thread and return what it returns.

        Raises:
            NvmlError: it, or one before it, did not answer in time.

        """
        self._overdue = [job for job in self._overdue if not job.is_set()]
        if self._overdue:
            raise NvmlError("NVML still hangs", Verdict.UNREADABLE)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        over = threading.Event()

        def settle(outcome: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(outcome)
            else:
                future.set_exception(error)

        def run() -> None:
            outcome, error = None, None
            try:
                if not future.done():
                    outcome = function(*arguments)
            except Exception as raised:  # the caller's
                error = raised
            finally:
                over.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, outcome, error)

        self._jobs.put(run)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            self._overdue.append(over)
            raise NvmlError(f"NVML did not answer within {timeout:g} s", Verdict.UNREADABLE) from None

    def close(self, last: Callable[[], None]) -> None:
        """Have the thread end after a last call."""
        self._jobs.put(last)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
