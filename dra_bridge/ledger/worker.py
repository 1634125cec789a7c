"""Class `AsyncLedger` serves the ledger to one event loop from a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from dra_bridge.ledger.operations import identify
from dra_bridge.ledger.records import Key, LedgerError, LedgerLostError, Operation, Snapshot
from dra_bridge.ledger.store import Ledger

_T = TypeVar("_T")
_BATCH: Final = 64
_Asked = tuple[Operation[Any], "asyncio.Future[Any]"]


class AsyncLedger:
    """The ledger for one event loop: a thread of its own, so that a slow disk blocks nothing else.

    Operations that arrive during a commit are committed together afterwards, so pods that start at once share fsyncs.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Final = ledger
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._closed = False
        self.lost = asyncio.Event()
        """Set when the ledger grants nothing any more and the process has to begin again."""
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, path: str) -> Self:
        """Open the ledger as `Ledger` does; wait as long as another agent of this node has it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Ledger] = loop.create_future()

        def answer(ledger: Ledger | Exception) -> None:
            if not opened.done():
                _answer(opened, ledger)
            elif isinstance(ledger, Ledger):  # the caller was cancelled
                ledger.close()

        def work() -> None:
            ledger: Ledger | Exception
            try:
                ledger = Ledger(path)
            except Exception as error:  # passed on
                ledger = error
            try:
                loop.call_soon_threadsafe(answer, ledger)
            except RuntimeError:  # the loop is closed
                if isinstance(ledger, Ledger):
                    ledger.close()

        # A thread that waits for a lock cannot be cancelled; a daemon one does not keep the process alive.
        threading.Thread(target=work, name="ledger open", daemon=True).start()
        return cls(await opened)

    @property
    def snapshot(self) -> Snapshot:
        """Everything as of the last commit."""
        return self.ledger.snapshot

    async def do(self, operation: Operation[_T]) -> _T:
        """Decide and record; the answer is durable when it is returned.

        When the caller is cancelled, the operation may be done all the same. Raises LedgerError if it could not be
        recorded; nothing was granted then.
        """
        if self._closed:
            raise LedgerError(f"the ledger {self.ledger.path} is closed")
        answered: asyncio.Future[_T] = self._loop.create_future()
        self._asked.put((operation, answered))
        return await answered

    async def identify(self, identities: Mapping[Key, str]) -> None:
        """Record what devices are, if that is anything new. Raises LedgerError if it could not be recorded."""
        known = self.snapshot.devices
        if any(identity and key in known and known[key].identity != identity for key, identity in identities.items()):
            await self.do(identify(identities))

    async def close(self) -> None:
        """Answer what was asked, then close the ledger."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
            await self._loop.run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        batch: list[_Asked] = []
        while (asked := self._asked.get()) is not None:
            batch.append(asked)
            if len(batch) == _BATCH or self._asked.empty():
                self._carry_out(batch)
                batch = []
        if batch:
            self._carry_out(batch)
        self.ledger.close()

    def _carry_out(self, batch: Sequence[_Asked]) -> None:
        answers: Sequence[Any]
        try:
            answers = self.ledger.do_all([operation for operation, _ in batch])
        except Exception as error:  # a LedgerError for all of them
            answers = [error] * len(batch)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, batch, answers)

    def _deliver(self, batch: Sequence[_Asked], answers: Sequence[Any]) -> None:
        for (_, future), answer in zip(batch, answers, strict=True):
            if isinstance(answer, LedgerLostError):
                self.lost.set()
            if not future.done():
                _answer(future, answer)


def _answer(future: asyncio.Future[Any], answer: object) -> None:
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
