"""Claims, evidence and a failing connection that the tests of the ledger are written with."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import Any

from dra_bridge.ledger import operations
from dra_bridge.ledger.operations import Reconciled
from dra_bridge.ledger.records import Claim, ClaimDevice, Operation, Side, State
from dra_bridge.ledger.rules import ClusterEvidence, Evidence, KubeletEvidence, KubeletSnapshot, ObservedAllocation
from dra_bridge.ledger.store import Ledger

R = "example.com/fpga"
D = "fpga.example.com"
T0 = 1_700_000_000.0


def adopt(resource: str, devices: Collection[str], side: Side, now: float) -> Operation[Reconciled]:
    """Record devices that nobody holds on this side, unless they are known."""
    return operations.reconcile_evidence(resource, Evidence(), devices, side, now)


def claim(uid: str, *devices: str, result: str | None = "ready", admin: bool = False, share: str = "") -> Claim:
    listed = tuple(ClaimDevice(R, device, share, admin) for device in devices)
    return Claim(D, uid, "default", f"claim-{uid}", listed, result, T0)


def state(store: Ledger, device: str = "a") -> State:
    return store.snapshot.device(R, device).state


def kubelet(store: Ledger, *, held: dict[str, ObservedAllocation] | None = None) -> KubeletEvidence:
    """Evidence in which everything is as R5 wants it."""
    sequence = store.snapshot.sequence
    return KubeletEvidence(sequence, {"a": 1.0, "b": 1.0}, KubeletSnapshot(sequence, 3.0, True, held or {}))


def seen(store: Ledger, at: float = 1.0, *, awake: bool = True, **held: str) -> KubeletSnapshot:
    """What checkpoint and cgroups say now; a="u1/main u2/init" is held by these containers."""
    return KubeletSnapshot(
        store.snapshot.sequence,
        at,
        awake,
        {device_id: held_by(device_id, *them.split()) for device_id, them in held.items()},
    )


def held_by(device_id: str, *holders: str, sure: bool = True) -> ObservedAllocation:
    """A device held by these containers, each pod/container."""
    pairs = frozenset((pod, container) for pod, container in (one.split("/") for one in holders))
    return ObservedAllocation(device_id, f"default/{holders[0].split('/')[0]}", sure, pairs)


def cluster(store: Ledger, allocated: dict[str, str] | None = None) -> ClusterEvidence:
    """Evidence in which everything is as R6 wants it."""
    return ClusterEvidence(store.snapshot.sequence, {"a": 1.0, "b": 1.0}, 2.0, allocated or {})


def to_dra(store: Ledger, *devices: str) -> None:
    store.do(operations.begin_move(R, devices or ("a",), Side.DRA, T0))
    done = store.do(operations.commit_to_dra(R, devices or ("a",), kubelet(store), T0))
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
