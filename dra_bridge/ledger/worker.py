"""Class `AsyncLedger` serves the ledger to one event loop from a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Self, TypeVar

from deviceplugin.register.records import LedgerError, LedgerLostError, Operation, RegisterSnapshot
from deviceplugin.register.store import Changes
from dra_bridge.ledger.store import Ledger

_T = TypeVar("_T")


class AsyncLedger:
    """The ledger for one event loop, and a thread for what waits for the disk, so that a slow one blocks nothing else.

    What need not be synced is recorded at once, by a write that the kernel keeps in memory: with four pods at once on
    two busy cores the way to a thread and back took longer than the rest of an Unprepare. Operations that arrive during
    a commit of the thread are committed together afterwards.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Final = ledger
        self.changes = Changes()
        self.lost = asyncio.Event()
        """Set when the ledger grants nothing any more and the process has to begin again."""
        self.write_failures = 0
        """How often something could not be recorded."""
        self._asked: list[tuple[Operation[Any], asyncio.Future[Any]]] = []
        self._batch: list[tuple[Operation[Any], asyncio.Future[Any]]] = []
        """What the thread carries out now."""
        self._answering: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(1, "ledger")

    @classmethod
    async def open(cls, path: str, copy: str = "") -> Self:
        """Open the ledger as `Ledger` does; wait as long as another agent of this node has it."""
        opening: Future[Ledger] = Future()
        # A thread that waits for a lock cannot be cancelled; a daemon one does not keep the process alive.
        threading.Thread(target=_open, args=(path, copy, opening), name="ledger open", daemon=True).start()
        try:
            return cls(await asyncio.wrap_future(opening))
        except asyncio.CancelledError:
            if not opening.cancel() and not opening.exception():  # it is open already
                opening.result().close()
            raise

    @property
    def snapshot(self) -> RegisterSnapshot:
        """Everything as of the last commit."""
        return self.ledger.snapshot

    def do(self, operation: Operation[_T]) -> asyncio.Future[_T]:
        """Decide and record; the answer that the future has then survives this process.

        It has a LedgerError if nothing could be recorded, also after `close`. To cancel it takes nothing back.
        """
        answered: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        try:
            # Not before what came earlier: an Unprepare must find what its claim's Prepare has recorded.
            waits = self._asked or self._batch
            if not waits and (decision := self.ledger.do_at_once(operation)) is not None:
                answered.set_result(decision.answer)
                if decision.changes:
                    self.changes.note()
            else:
                self._asked.append((operation, answered))
        except LedgerError as error:
            self.write_failures += 1
            answered.set_exception(error)
        if self._asked or self.ledger.must_tidy:
            self._work()
        return answered

    async def close(self) -> None:
        """Answer what was asked, then close the ledger."""
        if self._answering is not None:
            await asyncio.wait({self._answering})
        await asyncio.get_running_loop().run_in_executor(self._executor, self.ledger.close)

    def _work(self) -> None:
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        """Carry out what is asked, together what came meanwhile, until there is nothing more.

        The copy of the allocations follows the answers: it counts only where the ledger and the checkpoint are lost.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._asked or self.ledger.must_tidy:
                if not self._asked:
                    await loop.run_in_executor(self._executor, self.ledger.tidy)
                    continue
                self._batch, self._asked = self._asked, []
                operations = [operation for operation, _ in self._batch]
                answers: list[Any]
                try:
                    answers = await loop.run_in_executor(self._executor, self.ledger.do_all, operations)
                except Exception as error:  # a LedgerError for all of them
                    self.write_failures += 1
                    answers = [error] * len(operations)
                for (_, answered), answer in zip(self._batch, answers, strict=True):
                    self._set(answered, answer)
                self.changes.note()
                self._batch = []
        finally:
            for _, answered in (*self._batch, *self._asked):  # this task was cancelled: nobody answers them any more
                answered.cancel()

    def _set(self, answered: asyncio.Future[Any], answer: object) -> None:
        if isinstance(answer, LedgerLostError):
            self.lost.set()
        if answered.done():  # its caller was cancelled
            return
        if isinstance(answer, Exception):
            answered.set_exception(answer)
        else:
            answered.set_result(answer)


def _open(path: str, copy: str, opening: Future[Ledger]) -> None:
    """Open the ledger for `opening`; close it if that was cancelled meanwhile."""
    try:
        ledger = Ledger(path, copy)
    except Exception as error:  # passed on
        if opening.set_running_or_notify_cancel():
            opening.set_exception(error)
    else:
        if opening.set_running_or_notify_cancel():
            opening.set_result(ledger)
        else:
            ledger.close()
