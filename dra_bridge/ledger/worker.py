"""Class `AsyncLedger` serves the ledger to one event loop from a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar

from deviceplugin.looks import Look, Looks, LookTimeoutError
from deviceplugin.register.records import Decision, LedgerError, LedgerLostError, Operation, RegisterSnapshot
from deviceplugin.register.store import Changes
from dra_bridge.ledger.store import Ledger

_T = TypeVar("_T")
_Asked = tuple[Operation[Any], asyncio.Future[Any]]

DEADLINE: Final = 5.0
"""Seconds in which something has to be recorded; a sync to a slow disk that is busy takes one or two."""
CLOSING: Final = 2.0
"""Seconds that the ledger has to be closed; the kernel unlocks it at the end of the process in any case."""


class AsyncLedger:
    """The ledger for one event loop, and a thread for its file.

    The loop waits shortly for what need not be synced, which is written by a call that the kernel keeps in memory: with
    four pods at once on two busy cores the way back from a thread took longer than the rest of an Unprepare. Operations
    that arrive during a commit are committed together afterwards.

    Where the file system does not answer, what is asked fails after DEADLINE, and at once from then on, until it has
    answered. What the thread was at may be recorded all the same: a grant without a pod, which evidence ends.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Final = ledger
        self.changes = Changes()
        self.looks: Final = Looks(ledger.path, threads=1)
        self.copy_looks: Final = Looks(ledger.copy or "no copy", threads=1)
        """Of the copy of the allocations, which lies in another file system."""
        self.lost = asyncio.Event()
        """Set when the ledger grants nothing any more and the process has to begin again."""
        self.write_failures = 0
        """How often something could not be recorded."""
        self._asked: list[_Asked] = []
        self._batch: list[_Asked] = []
        """What the thread carries out now."""
        self._first: Look[Decision[Any] | None] | None = None
        """The look that carries out the batch, if that need not be synced."""
        self._answering: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None

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
        asked = operation, answered
        if self.looks.hanging:
            self._fail([asked], self._unanswered(self.looks.hanging))
        elif self._asked or self._batch:
            # Not before what came earlier: an Unprepare must find what its claim's Prepare has recorded.
            self._asked.append(asked)
        else:
            look = self.looks.begin("record", self.ledger.do_at_once, operation)
            if not self.looks.ended_at_once(look) or not self._decided(asked, look):
                self._batch, self._first = [asked], look
        self._go_on()
        return answered

    async def close(self) -> None:
        """Answer what was asked, then close the ledger, in so far as the file system answers."""
        going = [
            task
            for task, looks in ((self._answering, self.looks), (self._copying, self.copy_looks))
            if task is not None and not looks.hanging
        ]
        if going:
            await asyncio.wait(going, timeout=DEADLINE + CLOSING)
        with contextlib.suppress(LookTimeoutError):
            await self.looks.at("record", self.ledger.close, timeout=CLOSING)

    def _go_on(self) -> None:
        """Carry out what is to be done, if nothing does so already."""
        if (self._batch or self.ledger.must_tidy) and (self._answering is None or self._answering.done()):
            self._answering = asyncio.create_task(self._answer())
        if self.ledger.copy_is_old and (self._copying is None or self._copying.done()):
            self._copying = asyncio.create_task(self._copy())

    async def _answer(self) -> None:
        """Carry out what is asked, together what came meanwhile, until there is nothing more."""
        try:
            while self._batch or self._asked or self.ledger.must_tidy:
                if (first := self._first) is not None:
                    if await self._ended(first):
                        self._first = None
                        if self._decided(self._batch[0], first):
                            self._batch = []
                    continue
                if not self._batch:
                    self._batch, self._asked = self._asked, []
                if not self._batch:
                    await self._ended(self.looks.begin("record", self.ledger.tidy))
                    continue
                operations = [operation for operation, _ in self._batch]
                look = self.looks.begin("record", self.ledger.do_all, operations)
                if await self._ended(look):
                    self._answer_batch(look)
                    self._batch = []
        finally:
            for _, answered in (*self._batch, *self._asked):  # this task was cancelled: nobody answers them any more
                answered.cancel()
            self._batch, self._asked, self._first = [], [], None
        self._go_on()  # with the copy

    async def _ended(self, look: Look[Any]) -> bool:
        """Wait for the thread; return whether it was in time. If it is not, what is asked fails, and this waits on."""
        if not (why := await self.looks.late(look, DEADLINE, give_up=False)):
            return True
        asked, self._batch, self._asked = [*self._batch, *self._asked], [], []
        if (first := self._first) is not None:
            self._first = None
            self.looks.give_up(first)
        self._fail(asked, self._unanswered(why))
        await self.looks.until_ended(look)
        self.changes.note()  # it may have been recorded all the same
        return False

    def _answer_batch(self, look: Look[list[Any]]) -> None:
        try:
            answers = look.result
        except Exception as error:  # a LedgerError for all of them
            self._fail(self._batch, error)
            return
        for (_, answered), answer in zip(self._batch, answers, strict=True):
            self._set(answered, answer)
        self.changes.note()

    def _decided(self, asked: _Asked, look: Look[Decision[Any] | None]) -> bool:
        """Answer by what was recorded at once; return False if nothing was, since it has to be synced."""
        try:
            decision = look.result
        except LedgerError as error:
            self._fail([asked], error)
            return True
        except Exception as error:  # a mistake of ours
            self._set(asked[1], error)
            return True
        if decision is not None:
            self._set(asked[1], decision.answer)
            if decision.changes:
                self.changes.note()
        return decision is not None

    async def _copy(self) -> None:
        """Copy the allocations after they were recorded: it counts only where ledger and checkpoint are lost."""
        while self.ledger.copy_is_old:
            await self.copy_looks.until_answered("copy", self.ledger.write_copy, timeout=DEADLINE, brief=True)

    def _unanswered(self, why: str) -> LedgerError:
        return LedgerError(f"the ledger cannot be written: {why}")

    def _fail(self, asked: list[_Asked], error: Exception) -> None:
        self.write_failures += bool(asked)
        for _, answered in asked:
            self._set(answered, error)

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
