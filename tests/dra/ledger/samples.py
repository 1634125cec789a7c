"""Helpers of the ledger's tests: claims, signs of holders, a ledger without an event loop, SQLite connections."""

from __future__ import annotations

import glob
import sqlite3
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar, cast

from deviceplugin.identity import UNIDENTIFIED, Identity, boot_id
from deviceplugin.register import copies, operations
from deviceplugin.register.copies import Copy
from deviceplugin.register.operations import Reconciled
from deviceplugin.register.question import View, Wanted
from deviceplugin.register.records import WHOLE, Amount, Claim, ClaimDevice, Operation, RecordKey, Side, State
from deviceplugin.register.rules import (
    ClusterEvidence,
    Evidence,
    Excluded,
    KubeletEvidence,
    KubeletSnapshot,
    ObservedAllocation,
    Refused,
)
from dra_bridge.ledger.store import Ledger, connected

_T = TypeVar("_T")
R = "example.com/fpga"
D = "fpga.example.com"
T0 = 1_700_000_000.0
VIEW = View("1")
"""A node in boot "1" whose hardware is known from the ledger's records only."""


class DirectLedger(Ledger):
    """The ledger without an event loop; closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def do(self, operation: Operation[_T]) -> _T:
        """Decide and record one operation; return its answer, or raise its error."""
        (answer,) = self.do_all([operation])
        self.tidy()
        if self.copy:
            copies.write(self.copy, Copy(boot_id(), self.snapshot.sequence, tuple(self.snapshot.allocations.values())))
        if isinstance(answer, Exception):
            raise answer
        return cast("_T", answer)


def put_aside(path: str) -> list[str]:
    """The ledger files that were put aside as unusable, without their journals, the oldest first."""
    return sorted(glob.glob(f"{path}.aside-*Z"))


def adopt(resource: str, devices: Collection[str], side: Side, now: float) -> Operation[Reconciled]:
    """Record devices that have no holder as devices of this side (plugin or DRA), unless the ledger has them."""
    return operations.reconcile_evidence(resource, Evidence(), devices, side, now)


def claim(
    uid: str,
    *devices: str,
    result: str | None = "ready",
    admin: bool = False,
    share: str = "",
    amount: Amount = WHOLE,
    identity: Identity = UNIDENTIFIED,
) -> Claim:
    listed = tuple(ClaimDevice(R, device, share, admin, identity, amount) for device in devices)
    return Claim(D, uid, "default", f"claim-{uid}", listed, result, T0)


def grant(
    resource: str, ids: Mapping[str, str], now: float = T0, *, amount: Amount = WHOLE, identity: Identity = UNIDENTIFIED
) -> Operation[Refused | Excluded | None]:
    """Grant devices to a container. ids: the device of each device plugin id that the kubelet asks for."""
    wanted = {name: Wanted((resource, device), identity, amount) for name, device in ids.items()}
    return operations.grant(resource, wanted, VIEW, now)


def reserve(
    claim: Claim, *, durable: bool, move_idle: bool = False, along: Collection[RecordKey] = ()
) -> Operation[Claim | Refused | Excluded]:
    """Reserve a claim's devices."""
    return operations.reserve(claim, VIEW, durable=durable, move_idle=move_idle, along=along)


def prepare(claim: Claim, *, move_idle: bool = False) -> Operation[Claim | Refused | Excluded]:
    """Give a claim its devices."""
    return operations.prepare(claim, VIEW, move_idle=move_idle)


def state(store: DirectLedger, device: str = "a") -> State:
    return store.snapshot.device(R, device).state


def kubelet(store: DirectLedger, *, held: dict[str, ObservedAllocation] | None = None) -> KubeletEvidence:
    """Return what shows that no pod holds the devices a and b, so that their moves to DRA can be committed."""
    sequence = store.snapshot.sequence
    return KubeletEvidence(sequence, {"a": 1.0, "b": 1.0}, KubeletSnapshot(sequence, 3.0, True, held or {}))


def seen(store: DirectLedger, at: float = 1.0, *, current: bool = True, **held: str) -> KubeletSnapshot:
    """Return which containers hold devices, by checkpoint and cgroups; a="u1/main u2/init": both hold device a."""
    return KubeletSnapshot(
        store.snapshot.sequence,
        at,
        current,
        {device_id: held_by(device_id, *them.split()) for device_id, them in held.items()},
    )


def held_by(device_id: str, *holders: str, sure: bool = True) -> ObservedAllocation:
    """Return what a checkpoint shows of a device that these containers hold, each given as pod/container."""
    pairs = frozenset((pod, container) for pod, container in (one.split("/") for one in holders))
    return ObservedAllocation(device_id, f"default/{holders[0].split('/')[0]}", sure, pairs)


def cluster(store: DirectLedger, allocated: dict[str, str] | None = None) -> ClusterEvidence:
    """Return what shows that no claim has the devices a and b, so that their moves to the plugin can be committed."""
    return ClusterEvidence(store.snapshot.sequence, {"a": 1.0, "b": 1.0}, 2.0, allocated or {})


def to_dra(store: DirectLedger, *devices: str) -> None:
    store.do(operations.begin_move(R, devices or ("a",), Side.DRA, T0))
    done = store.do(operations.commit_to_dra(R, devices or ("a",), kubelet(store), T0))
    assert done.devices == (devices or ("a",))


class Flaky:
    """A SQLite connection on which statements fail that begin with one of these words."""

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


class Watched:
    """A connection that calls `step` before each statement that changes the file, and after each commit."""

    def __init__(self, inner: Any, step: Callable[[str], None]) -> None:
        self._inner = inner
        self._step = step

    @classmethod
    def by(cls, step: Callable[[str], None], connect: Callable[[str], Any] = connected) -> Callable[[str], Any]:
        """Return a function that opens such a connection. step: a function that is called with each statement."""
        return lambda path: cls(connect(path), step)

    def execute(self, sql: str, *args: Any) -> Any:
        if sql.startswith(("BEGIN", "CREATE", "INSERT", "DELETE", "UPDATE", "COMMIT", "PRAGMA wal_checkpoint")):
            self._step(sql)
        answer = self._inner.execute(sql, *args)
        if sql == "COMMIT":
            self._step("COMMIT is done")
        return answer

    def close(self) -> None:
        self._inner.close()
