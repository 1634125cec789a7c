"""The interface of the store that keeps the register's records, and the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from deviceplugin.register.records import Decision, Operation, RegisterSnapshot
from deviceplugin.tasks import in_time

_T = TypeVar("_T")


class Changes:
    """Counts the register's changes, and lets callers wait for the next change.

    An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        """Count a change, and wake all callers of `after`."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int, timeout: float) -> None:
        """Wait until more than `count` changes have been counted, or `timeout` seconds are over."""
        if self.count == count and timeout > 0:
            await in_time(self._next.wait(), timeout)


class Store(Protocol):
    """Keeps the register's records: in memory, or in a file (`dra_bridge.ledger`).

    changes: counts the changes of the records, and of other facts on which the register's decisions depend.
    """

    changes: Changes

    @property
    def snapshot(self) -> RegisterSnapshot:
        """All records after the last operation."""

    def do(self, operation: Operation[_T]) -> Awaitable[_T]:
        """Execute an operation on the snapshot, record its changes, then return its result."""


class MemoryStore:
    """A store in memory, for an agent without DRA. After a restart, the kubelet's checkpoint replaces the records."""

    def __init__(self) -> None:
        self.snapshot = RegisterSnapshot()
        self.changes = Changes()

    async def do(self, operation: Operation[_T]) -> _T:
        """Execute an operation on the snapshot, record its changes, then return its result. Never waits."""
        decision: Decision[_T] = operation(self.snapshot)
        if decision.changes:
            self.snapshot = self.snapshot.following(decision)
            self.changes.note()
        return decision.answer
