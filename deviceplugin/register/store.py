"""What keeps the register's records, and the store in memory."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from deviceplugin.register.records import Decision, Operation, RegisterSnapshot

_T = TypeVar("_T")


class Store(Protocol):
    """Carries out operations: in memory, or in a file (`dra_bridge.ledger`)."""

    @property
    def snapshot(self) -> RegisterSnapshot:
        """Everything as of the last operation."""

    def do(self, operation: Operation[_T]) -> Awaitable[_T]:
        """Decide and record."""


class MemoryStore:
    """A store for the plugin alone, whose durable record is the kubelet's checkpoint."""

    def __init__(self) -> None:
        self.snapshot = RegisterSnapshot()

    async def do(self, operation: Operation[_T]) -> _T:
        """Decide and record; nothing is awaited."""
        decision: Decision[_T] = operation(self.snapshot)
        if decision.changes:
            self.snapshot = self.snapshot.with_changes(decision.changes, self.snapshot.sequence + 1)
        return decision.answer
