"""Class `AsyncLedger` is the ledger's interface for one event loop; slow writes run in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar

from deviceplugin.looks import Look, Looks, LookTimeoutError
from deviceplugin.register.records import Decision, LedgerError, LedgerLostError, Operation, RegisterSnapshot
from deviceplugin.register.store import Changes
from dra_bridge.ledger.store import Ledger, outlives_boot

_T = TypeVar("_T")
_Asked = tuple[Operation[Any], asyncio.Future[Any]]

DEADLINE: Final = 5.0
"""Maximum seconds to record an operation. A sync to a slow, busy disk takes one or two seconds."""
CLOSING: Final = 2.0
"""Maximum seconds to close the file. If the close takes longer, the process ends without it, and the kernel releases
the lock."""


class AsyncLedger:
    """The ledger for one event loop, with a thread for its file.

    An operation that changes nothing needs no thread. Changes that need no sync are written in the event loop. The loop
    blocks only for a short time, because the kernel keeps such a write in memory. (In a measurement with four pods at
    once on two busy cores, the return from a thread took longer than the rest of an Unprepare.) Operations that arrive
    during a commit are committed together afterwards.

    If the file system hangs, waiting operations fail after `DEADLINE` seconds, and new operations fail at once until
    the file system answers again. The operation that the thread was executing may still be recorded; the record of such
    a grant remains until evidence shows that the grant has no holder.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Final = ledger
        self.changes = Changes()
        self.looks: Final = Looks(ledger.path, threads=1)
        self.lost = asyncio.Event()
        """An event that is set when the ledger refuses all grants, so that the process has to start again."""
        self.write_failures = 0
        """Number of failed writes of the ledger."""
        self._asked: list[_Asked] = []
        self._batch: list[_Asked] = []
        """The operations that the thread is executing."""
        self._first: tuple[Decision[Any], Look[bool]] | None = None
        """The decision of the only operation in `_batch`, and the running call of `Ledger.record` for this decision.
        None if `do_all` executes the batch."""
        self.answering: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: str, copy: str = "") -> Self:
        """Open the ledger as `Ledger` does, without blocking the loop while another agent has the ledger."""
        opening: Future[Ledger] = Future()
        # A thread that waits for a lock cannot be cancelled. As a daemon thread, it does not keep the process alive.
        threading.Thread(target=_open, args=(path, copy, opening), name="ledger open", daemon=True).start()
        try:
            return cls(await asyncio.wrap_future(opening))
        except asyncio.CancelledError:
            if not opening.cancel() and not opening.exception():  # The ledger is already open.
                opening.result().close()
            raise

    @property
    def snapshot(self) -> RegisterSnapshot:
        """All records at the last commit."""
        return self.ledger.snapshot

    def do(self, operation: Operation[_T]) -> asyncio.Future[_T]:
        """Execute an operation.

        The future gets the operation's result once its changes survive the end of this process. The future gets a
        LedgerError if nothing could be recorded, for example after `close`. The cancellation of the future undoes
        nothing.
        """
        answered: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        asked = operation, answered
        if self.looks.hanging:
            self._fail([asked], self._unanswered(self.looks.hanging))
        elif self._asked or self._batch:
            # Operations keep their order, because an Unprepare must find the records of its claim's Prepare.
            self._asked.append(asked)
        else:
            self._decide(asked)
        self._go_on()
        return answered

    def _decide(self, asked: _Asked) -> None:
        """Execute an operation at once. No other operation may be pending."""
        operation, answered = asked
        try:
            decision = operation(self.snapshot)
        except Exception as error:  # An exception here is a bug in this code.
            self._set(answered, error)
            return
        if not decision.changes:
            self._set(answered, decision.answer)
        elif outlives_boot(decision.changes):
            self._batch = [asked]
        else:
            look = self.looks.begin("record", self.ledger.record, decision)
            if not self.looks.ended_at_once(look) or not self._recorded(asked, decision, look):
                self._batch, self._first = [asked], (decision, look)

    async def close(self) -> None:
        """Execute the pending operations, then close the ledger.

        Both steps have a time limit, because the file system may hang.
        """
        if self.answering is not None and not self.looks.hanging:
            await asyncio.wait({self.answering}, timeout=DEADLINE + CLOSING)
        with contextlib.suppress(LookTimeoutError):
            await self.looks.at("record", self.ledger.close, timeout=CLOSING)

    def _go_on(self) -> None:
        """Start a task for pending operations, unless such a task runs already."""
        if (self._batch or self.ledger.must_tidy) and (self.answering is None or self.answering.done()):
            self.answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        """Execute pending operations until there are none. Operations that arrive together share one commit."""
        try:
            while self._batch or self._asked or self.ledger.must_tidy:
                if (first := self._first) is not None:
                    if await self._ended(first[1]):
                        self._first = None
                        if self._recorded(self._batch[0], *first):
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
            # If this task was cancelled, no task executes the remaining operations, so their futures are cancelled.
            for _, answered in (*self._batch, *self._asked):
                answered.cancel()
            self._batch, self._asked, self._first = [], [], None

    async def _ended(self, look: Look[Any]) -> bool:
        """Wait for the end of a call in the thread. Return whether the call has ended within `DEADLINE` seconds.

        If the call has not ended by then, pending operations fail, and the method waits until the call ends.
        """
        if not (why := await self.looks.late(look, DEADLINE, give_up=False)):
            return True
        asked, self._batch, self._asked = [*self._batch, *self._asked], [], []
        if (first := self._first) is not None:
            self._first = None
            self.looks.give_up(first[1])
        self._fail(asked, self._unanswered(why))
        await self.looks.until_ended(look)
        self.changes.note()  # The late call may have recorded the changes of its operation.
        return False

    def _answer_batch(self, look: Look[list[Any]]) -> None:
        try:
            answers = look.result
        except Exception as error:  # All operations of the batch fail with this exception, a LedgerError.
            self._fail(self._batch, error)
            return
        for (_, answered), answer in zip(self._batch, answers, strict=True):
            self._set(answered, answer)
        self.changes.note()

    def _recorded(self, asked: _Asked, decision: Decision[Any], look: Look[bool]) -> bool:
        """End an operation's future with its result if the decision was recorded, or with the error of a failed write.

        Return False if nothing was written, because the operation needs `do_all`.
        """
        try:
            recorded = look.result
        except LedgerError as error:
            self._fail([asked], error)
            return True
        if recorded:
            self._set(asked[1], decision.answer)
            self.changes.note()
        return recorded

    def _unanswered(self, why: str) -> LedgerError:
        return LedgerError(f"the ledger cannot be written: {why}")

    def _fail(self, asked: list[_Asked], error: Exception) -> None:
        self.write_failures += bool(asked)
        for _, answered in asked:
            self._set(answered, error)

    def _set(self, answered: asyncio.Future[Any], answer: object) -> None:
        if isinstance(answer, LedgerLostError):
            self.lost.set()
        if answered.done():  # The caller has cancelled the operation.
            return
        if isinstance(answer, Exception):
            answered.set_exception(answer)
        else:
            answered.set_result(answer)


def _open(path: str, copy: str, opening: Future[Ledger]) -> None:
    """Open the ledger, and make it the result of `opening`. If `opening` was cancelled meanwhile, close the ledger."""
    try:
        ledger = Ledger(path, copy)
    except Exception as error:  # The caller of `open` gets the exception from the future `opening`.
        if opening.set_running_or_notify_cancel():
            opening.set_exception(error)
    else:
        if opening.set_running_or_notify_cancel():
            opening.set_result(ledger)
        else:
            ledger.close()
