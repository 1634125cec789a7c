"""Claims, evidence and a failing connection that the tests of the ledger are written with."""

from __future__ import annotations

import sqlite3
from typing import Any

from dra_bridge import ledger
from dra_bridge.ledger import (
    Claim,
    ClaimDevice,
    ClusterEvidence,
    KubeletEvidence,
    KubeletSnapshot,
    Ledger,
    ObservedAllocation,
    Side,
    State,
)

R = "example.com/fpga"
D = "fpga.example.com"
T0 = 1_700_000_000.0


def claim(uid: str, *devices: str, result: str | None = "ready", admin: bool = False, share: str = "") -> Claim:
    listed = tuple(ClaimDevice(R, device, share, admin) for device in devices)
    return Claim(D, uid, "default", f"claim-{uid}", listed, result, T0)


def state(book: Ledger, device: str = "a") -> State:
    return book.snapshot.device(R, device).state


def kubelet(book: Ledger, *, held: dict[str, ObservedAllocation] | None = None) -> KubeletEvidence:
    """Evidence in which everything is as R5 wants it."""
    sequence = book.snapshot.sequence
    return KubeletEvidence(sequence, {"a": 1.0, "b": 1.0}, KubeletSnapshot(sequence, 3.0, True, held or {}))


def seen(book: Ledger, at: float = 1.0, *, awake: bool = True, **held: str) -> KubeletSnapshot:
    """What the witnesses say now; a="u1/main u2/init" is held by these containers."""
    return KubeletSnapshot(
        book.snapshot.sequence, at, awake, {unit: held_by(unit, *them.split()) for unit, them in held.items()}
    )


def held_by(unit: str, *holders: str, sure: bool = True) -> ObservedAllocation:
    """A device held by these containers, each pod/container."""
    pairs = frozenset((pod, container) for pod, container in (one.split("/") for one in holders))
    return ObservedAllocation(unit, f"default/{holders[0].split('/')[0]}", sure, pairs)


def cluster(book: Ledger, allocated: dict[str, str] | None = None) -> ClusterEvidence:
    """Evidence in which everything is as R6 wants it."""
    return ClusterEvidence(book.snapshot.sequence, {"a": 1.0, "b": 1.0}, 2.0, allocated or {})


def to_dra(book: Ledger, *devices: str) -> None:
    book.do(ledger.begin_move(R, devices or ("a",), Side.DRA, T0))
    done = book.do(ledger.commit_to_dra(R, devices or ("a",), kubelet(book), T0))
    assert done.devices == (devices or ("a",))


class Flaky:
    """A connection on which chosen statements fail."""

    def __init__(self, path: str, fails: set[str]) -> None:
        self._inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._fails = fails

    def execute(self, sql: str, *args: Any) -> Any:
        for word in self._fails:
            if sql.startswith(word):
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
        return self._inner.execute(sql, *args)

    def close(self) -> None:
        self._inner.close()
