"""Who may have a device and who has it: the single authority of a node's agent, and durable.

Both doors ask here before they answer the kubelet, and what is granted is on disk before the
answer leaves. Three layers, to be read from top to bottom:

- frozen records and a frozen `Snapshot` of all of them;
- decisions: pure functions over a snapshot (`grant`, `prepare`, `commit_to_dra` and so on); each
  returns an operation, which, given a snapshot and the `Rules`, says the answer and the changes;
- `Ledger`, the only place with effects: it applies changes to one SQLite file, and `Desk`, its
  face for asyncio: one thread that commits together whatever is asked at the same time.

SQLite runs in WAL mode with synchronous=FULL: one fdatasync a commit, where a rollback journal
needs three or four; in exclusive locking mode, so that there is no shared memory file and three
descriptors suffice (database, WAL, lock). One agent at a time: a lock file with flock, which the
operating system frees whatever way its owner ends; a second agent (a rolling update) stands by.

A file that is damaged or of another schema is put aside and the ledger starts empty; `confront`
then rebuilds it from evidence. SQLite's own check does not see a changed byte in a row, so the
rows carry a common seal (the XOR of their digests), which has to fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import hashlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, Self, TypeVar, cast
from urllib.parse import quote

import msgspec

__all__ = [
    "Claim",
    "ClaimDevice",
    "ClaimEvidence",
    "ClusterEvidence",
    "Committed",
    "Confronted",
    "Decision",
    "Desk",
    "DeviceRecord",
    "Evidence",
    "Granted",
    "Held",
    "Hold",
    "KubeletEvidence",
    "KubeletSnapshot",
    "Ledger",
    "LedgerBusyError",
    "LedgerError",
    "Observed",
    "Operation",
    "Refused",
    "Rules",
    "Side",
    "Snapshot",
    "State",
    "adopt",
    "begin_move",
    "cancel_move",
    "commit_to_dra",
    "commit_to_plugin",
    "confront",
    "forget",
    "grant",
    "left_behind",
    "name",
    "observe",
    "prepare",
    "reopen",
    "reserve",
    "unprepare",
]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

SCHEMA: Final = 1
"""The schema's version (PRAGMA user_version); a file of any other is put aside."""
_APPLICATION: Final = 0x64706C67  # "dplg"
_KEEP_ASIDE: Final = 5
_BATCH: Final = 64

WELL_APART: Final = 10.0
"""Seconds between the two snapshots that release a grant whose pod was never seen (R7)."""


class LedgerError(Exception):
    """Raised when something could not be recorded; nothing was granted then."""


class LedgerBusyError(LedgerError):
    """Raised when another agent of this node holds the ledger."""


class Side(enum.Enum):
    """The two doors."""

    PLUGIN = "plugin"
    DRA = "dra"


class State(enum.Enum):
    """Where a device is; the states of the handover."""

    PLUGIN = "plugin"
    TO_DRA = "to-dra"
    DRA = "dra"
    TO_PLUGIN = "to-plugin"
    QUARANTINED = "quarantined"

    @property
    def allocates(self) -> bool:
        """Whether Allocate may be granted here (R1)."""
        return self in {State.PLUGIN, State.TO_DRA}

    @property
    def prepares(self) -> bool:
        """Whether claims may be prepared here (R2)."""
        return self in {State.DRA, State.TO_PLUGIN}

    @property
    def healthy(self) -> bool:
        """Whether ListAndWatch may show the device Healthy (R3)."""
        return self is State.PLUGIN

    @property
    def offered(self) -> bool:
        """Whether the slice offers the device without a taint (R4)."""
        return self is State.DRA

    @property
    def text(self) -> str:
        """The state in words, for messages."""
        return _WORDS[self]


_WORDS: Final = {
    State.PLUGIN: "on the device plugin's side",
    State.TO_DRA: "moving from the device plugin to DRA",
    State.DRA: "on the DRA side",
    State.TO_PLUGIN: "moving from DRA to the device plugin",
    State.QUARANTINED: "quarantined",
}
_PULLED: Final = "for claim "
_RESTING: Final = {Side.PLUGIN: State.PLUGIN, Side.DRA: State.DRA}
_LEAVING: Final = {State.PLUGIN: State.TO_DRA, State.DRA: State.TO_PLUGIN}
_ARRIVED: Final = {State.TO_DRA: State.DRA, State.TO_PLUGIN: State.PLUGIN}
_CANCELLED: Final = {State.TO_DRA: State.PLUGIN, State.TO_PLUGIN: State.DRA}
_GOAL: Final = {
    State.PLUGIN: Side.PLUGIN,
    State.TO_DRA: Side.DRA,
    State.DRA: Side.DRA,
    State.TO_PLUGIN: Side.PLUGIN,
}

Key = tuple[str, str]
"""(resource, device), (resource, unit) or (driver, claim UID)."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One physical device. `since`: Unix seconds; `sequence`: of the change that led here."""

    resource: str
    device: str
    state: State
    since: float
    sequence: int = 0
    reason: str = ""

    @property
    def pulled(self) -> bool:
        """Whether it moves to DRA because a claim came for it (R2)."""
        return self.state is State.TO_DRA and self.reason.startswith(_PULLED)


@dataclass(frozen=True, slots=True)
class Hold:
    """A unit (the device itself, or a replica of it) that Allocate gave away.

    pod: namespace/name once it was seen, "" before. absent_since: when the first snapshot without
    it began (monotonic seconds). Both are known to this process only.
    """

    resource: str
    unit: str
    device: str
    since: float
    sequence: int
    pod: str = ""
    absent_since: float | None = None


class ClaimDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device of a claim. admin: seen, not held. share: of consumable capacity, else ""."""

    resource: str
    device: str
    share: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that is prepared, or (result None) about to be.

    result: what the driver answers with, opaque here. durable: on disk, not only in this process.
    """

    driver: str
    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...]
    result: str | None
    since: float
    sequence: int = 0
    durable: bool = True

    @property
    def held(self) -> frozenset[Key]:
        """The devices it holds as (resource, device), those of administrative access not among them."""
        return frozenset((device.resource, device.device) for device in self.devices if not device.admin)

    @property
    def title(self) -> str:
        """Namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"


_Record = DeviceRecord | Hold | Claim
_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the ledger knows at one moment; never changed, replaced.

    sequence: of the last change; it only grows.
    """

    sequence: int = 0
    devices: Mapping[Key, DeviceRecord] = field(default_factory=lambda: _NONE)
    holds: Mapping[Key, Hold] = field(default_factory=lambda: _NONE)
    claims: Mapping[Key, Claim] = field(default_factory=lambda: _NONE)

    def device(self, resource: str, device: str) -> DeviceRecord:
        """Return the record of a device; an unknown one is on the plugin's side."""
        return self.devices.get((resource, device)) or DeviceRecord(resource, device, State.PLUGIN, 0.0)

    def of(self, resource: str) -> dict[str, DeviceRecord]:
        """Return the devices of a resource by id."""
        return {record.device: record for record in self.devices.values() if record.resource == resource}

    def holds_on(self, resource: str, devices: Iterable[str]) -> list[Hold]:
        """Return what Allocate gave away of these devices."""
        wanted = frozenset(devices)
        return [hold for hold in self.holds.values() if hold.device in wanted and hold.resource == resource]

    def claims_on(self, resource: str, devices: Iterable[str]) -> list[Claim]:
        """Return the claims that hold any of these devices."""
        wanted = frozenset((resource, device) for device in devices)
        return [claim for claim in self.claims.values() if not wanted.isdisjoint(claim.held)]

    def with_changes(self, changes: Sequence[Change], sequence: int) -> Snapshot:
        """Return the snapshot that follows."""
        tables: dict[str, dict[Key, Any]] = {}
        for change in changes:
            table = tables.get(change.table)
            if table is None:
                table = tables[change.table] = dict(getattr(self, change.table))
            if change.record is None:
                table.pop(change.key, None)
            else:
                table[change.key] = change.record
        return replace(self, sequence=sequence, **tables)


@dataclass(frozen=True, slots=True)
class Change:
    """One record put (or dropped, record None). durable False: in this process only."""

    table: str
    key: Key
    record: _Record | None
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Decision(Generic[_T_co]):
    """What a decision comes to: the answer, and the changes that must be on disk before it is given."""

    answer: _T_co
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the handover, each of which a test may switch off to see what it is good for.

    allocate: R1, Allocate only on the plugin's side. prepare: R2, claims only on the DRA side.
    to_dra: R5 and to_plugin: R6, moves end on evidence only. release: R7, two snapshots.
    holders: R1 and R2 look at the other side's holders too, not only at the state. It is a second
    net: a test that switches R5 or R6 off switches it off as well to see them matter.
    """

    allocate: bool = True
    prepare: bool = True
    to_dra: bool = True
    to_plugin: bool = True
    release: bool = True
    holders: bool = True


class Operation(Protocol[_T_co]):
    """A decision waiting for its snapshot; pure. Hand it to `Ledger.do` or `Desk.do`."""

    def __call__(self, now: Snapshot, rules: Rules, /) -> Decision[_T_co]:
        """Decide."""
        ...


# ---------------------------------------------------------------- the rules, as predicates


@dataclass(frozen=True, slots=True)
class Refused:
    """Why somebody does not get a device. `since`: Unix seconds, 0 if it was always so.

    moving: a move to the side that was asked for has begun or goes on; another try makes sense.
    """

    resource: str
    device: str
    state: State
    since: float
    holder: str = ""
    moving: bool = False

    @property
    def message(self) -> str:
        """The refusal for people: device, side, since when, held by whom."""
        text = f"device {self.device!r} of {self.resource} is {self.state.text}"
        if self.since:
            text += f" since {_utc(self.since)}"
        if self.holder:
            text += f", held by {self.holder}"
        if self.moving:
            text += "; it is being moved, another try will find it"
        return text


def r1_refusal(now: Snapshot, rules: Rules, resource: str, device: str) -> Refused | None:
    """R1: Allocate is granted in PLUGIN and TO_DRA; return the refusal elsewhere."""
    record = now.device(resource, device)
    if rules.allocate and not record.state.allocates:
        return Refused(resource, device, record.state, record.since, moving=record.state is State.TO_PLUGIN)
    if rules.allocate and rules.holders:
        for claim in now.claims_on(resource, (device,)):
            return Refused(resource, device, record.state, record.since, f"claim {claim.title}")
    return None


def r2_refusal(now: Snapshot, rules: Rules, resource: str, device: str) -> Refused | None:
    """R2: claims are prepared in DRA and TO_PLUGIN; return the refusal elsewhere."""
    record = now.device(resource, device)
    holder = next((hold.pod or "a pod" for hold in now.holds_on(resource, (device,))), "")
    if rules.prepare and not record.state.prepares:
        return Refused(resource, device, record.state, record.since, holder, record.state is State.TO_DRA)
    if rules.prepare and rules.holders and holder:
        return Refused(resource, device, record.state, record.since, holder)
    return None


def r5_waits_for(now: Snapshot, rules: Rules, record: DeviceRecord, evidence: KubeletEvidence) -> str:
    """R5: say what the commit of TO_DRA still waits for; "" if it may be."""
    if not rules.to_dra:
        return ""
    shown = evidence.shown.get(record.device)
    seen = evidence.snapshot
    if evidence.sequence < record.sequence:
        return "evidence from after the move began"
    if shown is None:
        return "ListAndWatch to show it Unhealthy"
    if evidence.allocatable_at < shown or record.device in evidence.allocatable:
        return "the kubelet to acknowledge that it is Unhealthy"
    if seen.at < evidence.allocatable_at or not seen.quiet or seen.sequence < evidence.sequence:
        return "a snapshot of the kubelet's holders"
    for held in seen.held.values():
        if held.device == record.device:
            return f"pod {held.pod}"
    for hold in now.holds_on(record.resource, (record.device,)):
        return f"pod {hold.pod}" if hold.pod else f"the pod it was allocated to at {_utc(hold.since)}"
    return ""


def r6_waits_for(now: Snapshot, rules: Rules, record: DeviceRecord, evidence: ClusterEvidence) -> str:
    """R6: say what the commit of TO_PLUGIN still waits for; "" if it may be."""
    if not rules.to_plugin:
        return ""
    accepted = evidence.withdrawn.get(record.device)
    if evidence.sequence < record.sequence:
        return "evidence from after the move began"
    if accepted is None:
        return "the API server to accept the slice without it"
    if evidence.listed_at < accepted:
        return "a list of claims"
    if record.device in evidence.allocated:
        return f"claim {evidence.allocated[record.device]}"
    for claim in now.claims_on(record.resource, (record.device,)):
        return f"claim {claim.title}"
    return ""


def r7_releases(rules: Rules, hold: Hold, snapshot: KubeletSnapshot, apart: float) -> bool:
    """R7: whether a hold that the snapshot does not show is over.

    One that was seen is over with the first snapshot without it; one never seen may still be on
    its way from Allocate to where the kubelet remembers it, so it takes two, well apart. What
    counts is when the snapshots were taken, not when they are looked at: that may be much later.
    """
    if not snapshot.quiet:
        return False
    if hold.pod or not rules.release:
        return True
    return hold.absent_since is not None and snapshot.at - hold.absent_since >= apart


# ---------------------------------------------------------------- what evidence looks like


@dataclass(frozen=True, slots=True)
class Held:
    """A unit in some container's hands, as the kubelet says. pod: namespace/name.

    sure: not only a checkpoint says so that may be older than the pod's end. What is not sure
    counts as held, and accuses nobody.
    """

    device: str
    pod: str
    sure: bool = True


@dataclass(frozen=True, slots=True)
class KubeletSnapshot:
    """Who holds what of one resource: the kubelet's checkpoint and PodResources List together.

    sequence: the ledger's before the snapshot began. at: when it began (monotonic seconds).
    quiet: no own Allocate was in flight meanwhile. held: by unit.
    """

    sequence: int
    at: float
    quiet: bool
    held: Mapping[str, Held] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class KubeletEvidence:
    """What R5 asks for; times are monotonic seconds of one process.

    sequence: the ledger's before any of it. shown: when the update with the device Unhealthy was
    sent, by device. allocatable: devices that GetAllocatableResources still lists, asked at
    `allocatable_at`. snapshot: taken after that.
    """

    sequence: int
    shown: Mapping[str, float]
    allocatable_at: float
    allocatable: frozenset[str]
    snapshot: KubeletSnapshot


@dataclass(frozen=True, slots=True)
class ClusterEvidence:
    """What R6 asks for; times are monotonic seconds of one process.

    sequence: the ledger's before any of it. withdrawn: when the API server accepted the slice
    without the device, by device. listed_at: when a consistent LIST of all claims began.
    allocated: namespace/name of a claim by the device that its allocation names, prepared or not.
    """

    sequence: int
    withdrawn: Mapping[str, float]
    listed_at: float
    allocated: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class ClaimEvidence:
    """A claim whose allocation names devices of this node, or whose CDI file lies here.

    prepared: there is a CDI file. Namespace and name may be unknown ("") then.
    """

    driver: str
    uid: str
    devices: frozenset[str]
    prepared: bool
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one resource's holders without the ledger (R8).

    held: by unit, from the kubelet's checkpoint. claims: from the API server and the CDI files.
    """

    held: Mapping[str, Held] = field(default_factory=lambda: _NONE)
    claims: Sequence[ClaimEvidence] = ()


# ---------------------------------------------------------------- the operations


@dataclass(frozen=True, slots=True)
class Granted:
    """Allocate may answer. sequence: the ledger's with this grant."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What a snapshot led to, by unit: released ones, ones that the ledger did not know."""

    released: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Devices that arrived, and what each of the others waits for."""

    devices: tuple[str, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Confronted:
    """The devices of a resource after its evidence was looked at. changed: with a new state.

    doubtful: those that may have a holder on the other side; they must not be offered before
    better evidence is there.
    """

    changed: Mapping[str, State]
    quarantined: tuple[str, ...]
    doubtful: tuple[str, ...] = ()


def adopt(resource: str, devices: Iterable[str], side: Side, now: float) -> Operation[tuple[str, ...]]:
    """Take devices that the ledger does not know yet on a side; answer which those were.

    Args:
        resource: the extended resource's name.
        devices: physical devices' ids, known or not.
        side: where new ones begin, unless somebody holds them on the other.
        now: Unix seconds.

    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, _rules: Rules) -> Decision[tuple[str, ...]]:
        new = [device for device in ids if (resource, device) not in state.devices]
        if not new:
            return Decision(())
        held = {hold.device for hold in state.holds_on(resource, new)}
        claimed = {device for claim in state.claims_on(resource, new) for of, device in claim.held if of == resource}
        begins = {
            device: State.PLUGIN if device in held else State.DRA if device in claimed else _RESTING[side]
            for device in new
        }
        return Decision(tuple(new), _moved(state, resource, begins, now, ""))

    return decide


def forget(resource: str, devices: Iterable[str]) -> Operation[tuple[str, ...]]:
    """Drop devices that are no more; answer which. Held ones stay."""
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, _rules: Rules) -> Decision[tuple[str, ...]]:
        gone = tuple(
            device
            for device in ids
            if (resource, device) in state.devices
            and not state.holds_on(resource, (device,))
            and not state.claims_on(resource, (device,))
        )
        return Decision(gone, tuple(Change("devices", (resource, device), None) for device in gone))

    return decide


def grant(resource: str, units: Mapping[str, str], now: float) -> Operation[Granted | Refused]:
    """Give units to a container (R1), all or none.

    Args:
        resource: the extended resource's name.
        units: the physical device's id by unit, the id in Allocate (a replica's, or the device's
            own). A unit that was given before is given anew: the kubelet took it back unseen.
        now: Unix seconds.

    """

    def decide(state: Snapshot, rules: Rules) -> Decision[Granted | Refused]:
        for device in dict.fromkeys(units.values()):
            refusal = r1_refusal(state, rules, resource, device)
            if refusal is not None:
                return Decision(refusal)
        sequence = state.sequence + 1
        changes = [
            Change("holds", (resource, unit), Hold(resource, unit, device, now, sequence))
            for unit, device in units.items()
        ]
        return Decision(Granted(sequence), tuple(changes))

    return decide


def observe(resource: str, snapshot: KubeletSnapshot, now: float, *, apart: float = WELL_APART) -> Operation[Observed]:
    """Compare the holds of a resource with a snapshot of the kubelet's: release what is over (R7).

    A unit that the kubelet says is held and that the ledger does not know becomes a hold; if its
    device is on the DRA side, the two contradict each other and the device is quarantined.

    Args:
        resource: the extended resource's name.
        snapshot: complete, taken while the kubelet was reachable.
        now: Unix seconds.
        apart: seconds between the beginnings of the two snapshots of R7.

    """

    def decide(state: Snapshot, rules: Rules) -> Decision[Observed]:
        changes: list[Change] = []
        released: list[str] = []
        for key, hold in state.holds.items():
            if hold.resource != resource:
                continue
            held = snapshot.held.get(hold.unit)
            if snapshot.sequence < hold.sequence:
                continue  # it was given out, perhaps anew, after the kubelet was asked
            if held is not None:
                if hold.pod != held.pod or hold.absent_since is not None:
                    record = replace(hold, pod=held.pod, absent_since=None)
                    changes.append(Change("holds", key, record, durable=False))
            elif r7_releases(rules, hold, snapshot, apart):
                released.append(hold.unit)
                changes.append(Change("holds", key, None))
            elif hold.absent_since is None and snapshot.quiet:
                changes.append(Change("holds", key, replace(hold, absent_since=snapshot.at), durable=False))
        found, quarantined = _found(state, resource, snapshot.held, now, changes)
        return Decision(Observed(tuple(released), found, quarantined), tuple(changes))

    return decide


def _found(
    state: Snapshot, resource: str, held: Mapping[str, Held], now: float, changes: list[Change]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found: list[str] = []
    quarantined: dict[str, None] = {}
    for unit, holder in held.items():
        record = state.device(resource, holder.device)
        if (resource, unit) in state.holds or (record.state.prepares and not holder.sure):
            continue
        found.append(unit)
        hold = Hold(resource, unit, holder.device, now, state.sequence + 1, holder.pod)
        changes.append(Change("holds", (resource, unit), hold))
        if record.state.prepares and holder.device not in quarantined:
            quarantined[holder.device] = None
            reason = f"{record.state.text}, but the kubelet says that pod {holder.pod} holds it"
            record = DeviceRecord(resource, holder.device, State.QUARANTINED, now, reason=reason)
            changes.append(_put_device(record, state))
    return tuple(found), tuple(quarantined)


def reserve(claim: Claim, *, durable: bool, pull: bool = False) -> Operation[Claim | Refused]:
    """Reserve a claim's devices (R2) while its driver works on them; `prepare` completes it.

    Answers the claim as the ledger has it already, if it has (a `result` of None: not completed),
    else the reservation. Without `durable` a crash forgets it; a driver whose work leaves traces
    on the device wants it durable, so that an Unprepare after a crash can undo them.

    pull: where a device is on the plugin's side and idle, begin its move to DRA.
    """

    def decide(state: Snapshot, rules: Rules) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        same = known is not None and (known.durable, known.devices) == (durable, claim.devices)
        if known is not None and (same or known.result is not None):
            return Decision(known)
        refusal = _claim_refusal(state, rules, claim)
        if refusal is not None:
            return _pulled(state, claim, refusal) if pull else Decision(refusal)
        durably = durable or (known is not None and known.durable)
        record = replace(claim, result=None, sequence=state.sequence + 1, durable=durably)
        return Decision(record, (Change("claims", key, record, durable=durably),))

    return decide


def prepare(claim: Claim, *, pull: bool = False) -> Operation[Claim | Refused]:
    """Give a claim its devices for good (R2); idempotent by driver and UID.

    Devices of administrative access are seen, not held, and need no side. A claim that is
    prepared already is answered as it was.

    Args:
        claim: with its result, which restarts answer with.
        pull: where a device is on the plugin's side and idle, begin its move to DRA.

    """

    def decide(state: Snapshot, rules: Rules) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        if known is not None and known.result is not None:
            return Decision(known)
        refusal = _claim_refusal(state, rules, claim)
        if refusal is not None:
            return _pulled(state, claim, refusal) if pull else Decision(refusal)
        record = replace(claim, sequence=state.sequence + 1, durable=True)
        return Decision(record, (Change("claims", key, record),))

    return decide


def _claim_refusal(state: Snapshot, rules: Rules, claim: Claim) -> Refused | None:
    for device in claim.devices:
        if not device.admin:
            refusal = r2_refusal(state, rules, device.resource, device.device) or _taken(state, rules, claim, device)
            if refusal is not None:
                return refusal
    return None


def _taken(state: Snapshot, rules: Rules, claim: Claim, wanted: ClaimDevice) -> Refused | None:
    """R2 between claims: a device that is not shared has one claim, however the second came by it.

    The scheduler sees to it, too, but of a pod that is deleted by force the API server forgets
    the claim while its container still runs.
    """
    if not rules.prepare:
        return None
    for other in state.claims_on(wanted.resource, (wanted.device,)):
        if (other.driver, other.uid) == (claim.driver, claim.uid):
            continue
        # Of a claim that is known from its CDI file alone nobody knows whether it shares.
        known = bool(other.name) or not wanted.share
        if known and any(
            not (wanted.share and one.share)
            for one in other.devices
            if (one.resource, one.device, one.admin) == (wanted.resource, wanted.device, False)
        ):
            record = state.device(wanted.resource, wanted.device)
            return Refused(wanted.resource, wanted.device, record.state, record.since, f"claim {other.title}")
    return None


def _pulled(state: Snapshot, claim: Claim, refusal: Refused) -> Decision[Claim | Refused]:
    changes = []
    for resource, device in sorted(claim.held):
        record = state.device(resource, device)
        if record.state is State.PLUGIN and not state.holds_on(resource, (device,)):
            moved = replace(record, state=State.TO_DRA, since=claim.since, reason=f"{_PULLED}{claim.title}")
            changes.append(_put_device(moved, state))
            if (resource, device) == (refusal.resource, refusal.device):
                refusal = replace(refusal, state=State.TO_DRA, since=claim.since, moving=True)
    return Decision(refusal, tuple(changes))


def reopen(driver: str, uid: str) -> Operation[Claim | None]:
    """Make a prepared claim one that is about to be again, its devices still held (after a reboot)."""

    def decide(state: Snapshot, _rules: Rules) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None or known.result is None:
            return Decision(known)
        record = replace(known, result=None, sequence=state.sequence + 1)
        return Decision(record, (Change("claims", (driver, uid), record),))

    return decide


def name(driver: str, uid: str, namespace: str, name: str) -> Operation[Claim | None]:
    """Give a claim that is known from its CDI file alone the name that the API server knows it by."""

    def decide(state: Snapshot, _rules: Rules) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None or known.name:
            return Decision(known)
        record = replace(known, namespace=namespace, name=name)
        return Decision(record, (Change("claims", (driver, uid), record, durable=known.durable),))

    return decide


def unprepare(driver: str, uid: str) -> Operation[Claim | None]:
    """Take back a claim's devices; answer the record that was there, None for an unknown claim."""

    def decide(state: Snapshot, _rules: Rules) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None:
            return Decision(None)
        return Decision(known, (Change("claims", (driver, uid), None, durable=known.durable),))

    return decide


def begin_move(
    resource: str, devices: Iterable[str], to: Side, now: float, reason: str = ""
) -> Operation[Mapping[str, State]]:
    """Send devices towards a side; answer the new state of those that changed.

    One that is moving the other way turns round. Quarantined devices stay.
    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, _rules: Rules) -> Decision[Mapping[str, State]]:
        moves: dict[str, State] = {}
        for device in ids:
            at = state.device(resource, device).state
            if at is not State.QUARANTINED and _GOAL[at] is not to:
                moves[device] = _CANCELLED.get(at) or _LEAVING[at]
        return Decision(moves, _moved(state, resource, moves, now, reason))

    return decide


def cancel_move(resource: str, devices: Iterable[str], now: float) -> Operation[Mapping[str, State]]:
    """Send moving devices back where they came from; answer the new state of those that changed."""
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, _rules: Rules) -> Decision[Mapping[str, State]]:
        at = {device: state.device(resource, device).state for device in ids}
        moves = {device: _CANCELLED[where] for device, where in at.items() if where in _CANCELLED}
        return Decision(moves, _moved(state, resource, moves, now, "cancelled"))

    return decide


def commit_to_dra(resource: str, devices: Iterable[str], evidence: KubeletEvidence, now: float) -> Operation[Committed]:
    """End moves to DRA for which the evidence suffices (R5)."""
    return _commit(resource, devices, State.TO_DRA, lambda s, r, d: r5_waits_for(s, r, d, evidence), now)


def commit_to_plugin(
    resource: str, devices: Iterable[str], evidence: ClusterEvidence, now: float
) -> Operation[Committed]:
    """End moves to the plugin for which the evidence suffices (R6)."""
    return _commit(resource, devices, State.TO_PLUGIN, lambda s, r, d: r6_waits_for(s, r, d, evidence), now)


def _commit(
    resource: str,
    devices: Iterable[str],
    at: State,
    waits_for: Callable[[Snapshot, Rules, DeviceRecord], str],
    now: float,
) -> Operation[Committed]:
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, rules: Rules) -> Decision[Committed]:
        moves: dict[str, State] = {}
        waiting: dict[str, str] = {}
        for device in ids:
            record = state.device(resource, device)
            if record.state is at:
                reason = waits_for(state, rules, record)
                if reason:
                    waiting[device] = reason
                else:
                    moves[device] = _ARRIVED[at]
        return Decision(Committed(tuple(moves), waiting), _moved(state, resource, moves, now, ""))

    return decide


def confront(
    resource: str, evidence: Evidence, devices: Iterable[str], side: Side, now: float
) -> Operation[Confronted]:
    """Compare the ledger with evidence, or build it from evidence where it is empty (R8).

    A device that the ledger does not know goes to DRA if a claim's allocation or a CDI file names
    it, to the plugin if the kubelet's checkpoint does, to quarantine if both do, to `side` if
    neither. One that it knows stays, unless a holder on the other side proves it wrong (a mere
    allocation does not: the scheduler writes some minutes late; neither does what is not sure: it
    makes the device doubtful). A quarantined one leaves as soon as the evidence and the ledger's
    own holders are of one mind.

    Args:
        resource: the extended resource's name.
        evidence: of all holders of `devices`.
        devices: the physical devices in question.
        side: where those go that nobody holds.
        now: Unix seconds.

    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot, _rules: Rules) -> Decision[Confronted]:
        held = sorted(evidence.held.values(), key=lambda one: one.sure)  # sure ones last: they count
        plugin = {one.device: one for one in held}
        prepared = {d: c for c in evidence.claims if c.prepared for d in c.devices}
        claimed = {d: c for c in evidence.claims for d in c.devices}
        changes: list[Change] = []
        changed: dict[str, State] = {}
        quarantined: list[str] = []
        doubtful: list[str] = []
        for device in dict.fromkeys((*ids, *plugin, *claimed)):
            known = state.devices.get((resource, device))
            pod, claim = plugin.get(device), claimed.get(device)
            if known is None or known.state is State.QUARANTINED:
                for hold in state.holds_on(resource, (device,)):
                    pod = pod or Held(device, hold.pod or "unknown")
                for one in state.claims_on(resource, (device,)):
                    claim = claim or ClaimEvidence(one.driver, one.uid, frozenset((device,)), prepared=True)
            elif known.state.prepares and pod is not None and not pod.sure:
                doubtful.append(device)
                pod = None
            at, reason = _proven(known, pod.pod if pod else None, claim, prepared.get(device), side)
            if known is None or at is not known.state:
                changed[device] = at
                changes.append(_put_device(DeviceRecord(resource, device, at, now, reason=reason), state))
            if at is State.QUARANTINED:
                quarantined.append(device)
        for unit, holder in evidence.held.items():
            if (resource, unit) not in state.holds and holder.device not in doubtful:
                hold = Hold(resource, unit, holder.device, now, state.sequence + 1, holder.pod)
                changes.append(Change("holds", (resource, unit), hold))
        for claim in evidence.claims:
            key = (claim.driver, claim.uid)
            if claim.prepared and key not in state.claims:
                record = Claim(
                    claim.driver,
                    claim.uid,
                    claim.namespace,
                    claim.name,
                    tuple(ClaimDevice(resource, device) for device in sorted(claim.devices)),
                    None,
                    now,
                    state.sequence + 1,
                )
                changes.append(Change("claims", key, record))
        return Decision(Confronted(changed, tuple(quarantined), tuple(doubtful)), tuple(changes))

    return decide


def _proven(
    known: DeviceRecord | None,
    pod: str | None,
    claimed: ClaimEvidence | None,
    prepared: ClaimEvidence | None,
    side: Side,
) -> tuple[State, str]:
    """Return the state that the evidence leaves a device in, and why if it is not as it was."""
    if known is None or known.state is State.QUARANTINED:
        if pod is not None and claimed is not None:
            return State.QUARANTINED, f"held by pod {pod} and allocated to claim {claimed.uid}"
        if pod is not None:
            return State.PLUGIN, f"held by pod {pod}"
        if claimed is not None:
            return State.DRA, f"allocated to claim {claimed.uid}"
        return _RESTING[side], ""
    if pod is not None and (known.state.prepares or prepared is not None):
        return State.QUARANTINED, f"{known.state.text}, but pod {pod} holds it"
    if prepared is not None and known.state.allocates:
        return State.QUARANTINED, f"{known.state.text}, but claim {prepared.uid} is prepared with it"
    return known.state, known.reason


def _moved(state: Snapshot, resource: str, moves: Mapping[str, State], now: float, reason: str) -> tuple[Change, ...]:
    return tuple(
        _put_device(DeviceRecord(resource, device, to, now, reason=reason), state) for device, to in moves.items()
    )


def _put_device(record: DeviceRecord, state: Snapshot) -> Change:
    return Change("devices", (record.resource, record.device), replace(record, sequence=state.sequence + 1))


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


# ---------------------------------------------------------------- rows


_TABLES: Final = {
    "devices": ("resource", "device", "state", "since", "sequence", "reason"),
    "holds": ("resource", "unit", "device", "since", "sequence"),
    "claims": ("driver", "uid", "namespace", "name", "devices", "result", "since", "sequence"),
}
_CREATE: Final = (
    *(
        f"CREATE TABLE {table} ({', '.join(columns)}, PRIMARY KEY ({columns[0]}, {columns[1]})) WITHOUT ROWID"
        for table, columns in _TABLES.items()
    ),
    "CREATE TABLE seal (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, seal INTEGER NOT NULL)",
    "INSERT INTO seal VALUES (1, 0, 0)",
)
_PUT: Final = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  # our own names
    for table, columns in _TABLES.items()
}
_DROP: Final = {
    table: f"DELETE FROM {table} WHERE {columns[0]} = ? AND {columns[1]} = ?"  # noqa: S608
    for table, columns in _TABLES.items()
}
_SELECT: Final = {table: f"SELECT {', '.join(columns)} FROM {table}" for table, columns in _TABLES.items()}  # noqa: S608

_Row = tuple[str | float | None, ...]


def _row(record: _Record) -> _Row:
    if isinstance(record, DeviceRecord):
        return record.resource, record.device, record.state.value, record.since, record.sequence, record.reason
    if isinstance(record, Hold):
        return record.resource, record.unit, record.device, record.since, record.sequence
    devices = msgspec.json.encode(record.devices).decode()
    first = (record.driver, record.uid, record.namespace, record.name)
    return *first, devices, record.result, record.since, record.sequence


def _record(table: str, row: Sequence[Any]) -> _Record:
    if table == "devices":
        return DeviceRecord(row[0], row[1], State(row[2]), *row[3:])
    if table == "holds":
        return Hold(*row)
    devices = msgspec.json.decode(row[4], type=tuple[ClaimDevice, ...])
    driver, uid, namespace, name = row[:4]
    return Claim(driver, uid, namespace, name, devices, *row[5:])


def _digest(table: str, row: _Row) -> int:
    data = msgspec.msgpack.encode((table, *row))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class _DamagedError(Exception):
    """Raised when the file is not a ledger of this schema in good order."""


# SQLite's answers that speak of the file and not of the disk or the permissions.
_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # no such table
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_READONLY,  # the header says a newer writer made it; the directory is writable, we hold the lock
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_NOMEM,  # a length field that claims gigabytes
    }
)


def _speaks_of_damage(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        return code is None or (code & 0xFF) in _DAMAGE
    return True


# ---------------------------------------------------------------- effects

_File = tuple[int, int]
"""What a path led to: device and inode."""


def _file(path: str) -> _File | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _locked(path: str, *, wait: bool = False) -> int:
    """Lock the ledger at this path; return the open lock.

    Raises:
        LedgerBusyError: another agent has it, and `wait` is False.
        LedgerError: the directory or the disk does not let us.

    """
    while True:
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o750, exist_ok=True)
            lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise LedgerBusyError(f"another agent holds the ledger {path}") from error
            raise LedgerError(f"cannot lock the ledger {path}: {error}") from error
        held = os.fstat(lock)
        if _file(path + ".lock") == (held.st_dev, held.st_ino):
            return lock
        os.close(lock)  # it was removed while we waited: whoever held it may have made itself another one


def left_behind(path: str) -> tuple[Claim, ...]:
    """Return the claims in a ledger that no agent has; () if one has it, or it is none of ours.

    Whatever there is stays as it is.
    """
    try:
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=0)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
                return ()
            return tuple(cast("Claim", _record("claims", row)) for row in connection.execute(_SELECT["claims"]))
    except (OSError, sqlite3.Error, ValueError, TypeError) as error:
        _LOG.info("the ledger %s is left alone: %s", path, error)
        return ()
    finally:
        os.close(lock)


class Ledger:
    """The file. Synchronous and thread-safe; `Desk` is for event loops.

    Attributes:
        set_aside: where a file went that could not be used, None if there was none. The ledger is
            empty then, and `confront` must rebuild it before anything is granted.
        fresh: the ledger was empty when it was opened.

    """

    def __init__(
        self,
        path: str,
        lock: int,
        rules: Rules,
        step: Callable[[str], None] | None,
        connect: Callable[[str], sqlite3.Connection],
    ) -> None:
        """Do not call it, use `open`."""
        self.path: Final = path
        self.set_aside: str | None = None
        self.fresh = False
        self._rules = rules
        self._lock_file = lock
        self._connect = connect
        self._guard = threading.RLock()
        self._step = step or _no_step
        self._connection: sqlite3.Connection | None = None
        self._snapshot = Snapshot()
        self._seal = 0
        self._files: tuple[_File | None, ...] = ()
        self._lost = False
        """The lock was lost for a while, and nobody has looked yet what another agent may have written."""
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str,
        *,
        wait: bool = False,
        rules: Rules = Rules(),
        step: Callable[[str], None] | None = None,
        connect: Callable[[str], sqlite3.Connection] | None = None,
    ) -> Self:
        """Open the ledger, or make it; put aside what cannot be used.

        Args:
            path: the database; `path + ".lock"` is the lock. Missing directories are made.
            wait: stand by while another agent has it.
            rules: for tests.
            step: called before and after each durable step with its name, for tests.
            connect: opens the database, for tests.

        Raises:
            LedgerBusyError: another agent has it, and `wait` is False.
            LedgerError: the directory or the disk does not let us; another try may.

        """
        ledger = cls(path, _locked(path, wait=wait), rules, step, connect or _connected)
        try:
            ledger._load()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        now = self._snapshot
        what = f"{len(now.devices)} devices, {len(now.holds)} holds, {len(now.claims)} claims"
        return f"<Ledger {self.path} at {now.sequence}: {what}>"

    @property
    def snapshot(self) -> Snapshot:
        """Everything as of the last commit."""
        return self._snapshot

    def do(self, operation: Operation[_T]) -> _T:
        """Decide and record; the answer is durable when it is returned.

        Raises:
            LedgerError: it could not be recorded, nothing was granted.

        """
        answer = self.do_all([operation])[0]
        if isinstance(answer, BaseException):
            raise answer
        return cast("_T", answer)

    def do_all(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Decide one after the other and record all in one transaction.

        Returns:
            An answer each, or the exception that its operation raised (a mistake of ours).

        Raises:
            LedgerError: it could not be recorded, nothing was granted.

        """
        with self._guard:
            if self._closed:
                raise LedgerError(f"the ledger {self.path} is closed")
            if self._connection is not None and not self._in_place():
                _LOG.error("the ledger %s was removed under a running agent; it is written anew", self.path)
                self._disconnect()
            if self._connection is None:
                self._lock_again()
                self._load_again()
            before, after = self._snapshot, self._snapshot
            answers: list[Any] = []
            changes: list[Change] = []
            for operation in operations:
                try:
                    decision = operation(after, self._rules)
                except Exception as error:  # costs its own caller only
                    answers.append(error)
                    continue
                answers.append(decision.answer)
                if decision.changes:
                    grows = any(change.durable for change in decision.changes)
                    after = after.with_changes(decision.changes, after.sequence + grows)
                    changes += decision.changes
            if after.sequence != before.sequence:
                self._write(before, after, changes)
            self._snapshot = after
            return answers

    def close(self) -> None:
        """Close the file and let go of the lock."""
        with self._guard:
            self._closed = True
            self._disconnect()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _in_place(self) -> bool:
        """Return whether what is written is found again by the next agent."""
        return all(file is None or file == _file(path) for path, file in zip(self._paths, self._files, strict=True))

    @property
    def _paths(self) -> tuple[str, ...]:
        """The files that make up the ledger, its lock first."""
        return f"{self.path}.lock", self.path, f"{self.path}-wal"

    def _lock_again(self) -> None:
        """See to it that the lock is one that the next agent meets, too.

        Raises:
            LedgerError: it is not to be had; LedgerBusyError: another agent has made itself one.

        """
        held = os.fstat(self._lock_file)
        if _file(self._paths[0]) != (held.st_dev, held.st_ino):
            lock = _locked(self.path)
            os.close(self._lock_file)
            self._lock_file, self._lost = lock, True

    def _write(self, before: Snapshot, after: Snapshot, changes: Sequence[Change]) -> None:
        connection = self._connection
        assert connection is not None
        # The last word on each durable record, and the seal that belongs to all of them.
        last = {(change.table, change.key): change.record for change in changes if change.durable}
        seal = self._seal
        try:
            self._step("begin")
            connection.execute("BEGIN IMMEDIATE")
            for (table, key), record in last.items():
                self._step(f"{'drop' if record is None else 'put'} {table}")
                old = getattr(before, table).get(key)
                if old is not None and getattr(old, "durable", True):
                    seal ^= _digest(table, _row(old))
                if record is None:
                    connection.execute(_DROP[table], key)
                else:
                    row = _row(record)
                    seal ^= _digest(table, row)
                    connection.execute(_PUT[table], row)
            self._step("seal")
            connection.execute("UPDATE seal SET sequence = ?, seal = ? WHERE id = 1", (after.sequence, seal))
            self._step("commit")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            # What is on disk now is not certain; the next call looks.
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            self._disconnect()
            raise LedgerError(f"cannot write the ledger {self.path}: {error}") from error
        self._seal = seal
        self._step("committed")

    def _load_again(self) -> None:
        """Go on after a failed write: what is on disk counts, what only this process knows stays."""
        known = self._snapshot
        try:
            self._load()
        except LedgerError:
            self._snapshot = known
            raise
        found = self._snapshot
        if self._lost and found.sequence:
            # Another agent may have had the ledger in between: what either of us gave away is held.
            # Where devices are it knew better, having heard the evidence after us.
            both = Snapshot(
                max(known.sequence, found.sequence) + 1,
                {**known.devices, **found.devices},
                {**known.holds, **found.holds},
                {**known.claims, **found.claims},
            )
            self._snapshot = known
            self._write(found, both, _changes(found, both))
            self._snapshot, self._lost = both, False
            return
        if found.sequence < known.sequence:
            # The file went bad under us; all that was ever recorded is in memory.
            self._snapshot = known
            self._write(found, known, _changes(found, known))
            self._lost = False
            return
        holds = {
            key: replace(hold, pod=old.pod, absent_since=old.absent_since)
            if (old := known.holds.get(key)) is not None and old.sequence == hold.sequence
            else hold
            for key, hold in found.holds.items()
        }
        reserved = {key: claim for key, claim in known.claims.items() if not claim.durable}
        self._snapshot, self._lost = replace(found, holds=holds, claims={**reserved, **found.claims}), False

    def _load(self) -> None:
        """Open the database and read all of it; put it aside if that is not possible."""
        for last in (False, True):
            try:
                self._snapshot, self._seal = self._read()
            except (sqlite3.Error, _DamagedError, ValueError, TypeError, OverflowError, MemoryError) as error:
                self._disconnect()
                if last or not _speaks_of_damage(error):
                    raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error
                self.set_aside = self._put_aside()
                _LOG.error(
                    "the ledger %s cannot be used (%s); it is now %s, and a new one is built from what kubelet, "
                    "API server and CDI files say",
                    self.path,
                    error,
                    self.set_aside,
                )
            else:
                return

    def _read(self) -> tuple[Snapshot, int]:
        self._step("open")
        connection = self._connection = self._connect(self.path)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -256")
        connection.execute("PRAGMA wal_autocheckpoint = 256")
        connection.execute("PRAGMA journal_size_limit = 2097152")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._create(connection)
        elif version != SCHEMA:
            raise _DamagedError(f"its schema is {version}, this agent's is {SCHEMA}")
        elif connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise _DamagedError("it is another program's database")
        check = connection.execute("PRAGMA quick_check(1)").fetchone()
        if check is None or check[0] != "ok":
            raise _DamagedError(str(check[0] if check else "no answer from quick_check"))
        loaded = self._rows(connection)
        # A header that says a newer SQLite wrote it can be read and not be written: better known now.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE seal SET id = 1 WHERE id = 1")
        connection.execute("ROLLBACK")
        # A commit whose fsync failed may lie in the page cache as if it had been written; copying
        # it into the database writes it once more.
        self._step("checkpoint")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._files = tuple(map(_file, self._paths))
        self._step("opened")
        return loaded

    def _create(self, connection: sqlite3.Connection) -> None:
        self._step("create")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _CREATE:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        self._step("create commit")
        connection.execute("COMMIT")
        self._step("created")

    def _rows(self, connection: sqlite3.Connection) -> tuple[Snapshot, int]:
        tables: dict[str, dict[Key, Any]] = {}
        seal = 0
        for table, statement in _SELECT.items():
            records = tables[table] = {}
            for row in connection.execute(statement):
                record = _record(table, row)
                if _row(record) != row or not isinstance(row[0], str) or not isinstance(row[1], str):
                    raise _DamagedError(f"a row of {table} is not in order")
                seal ^= _digest(table, row)
                records[row[0], row[1]] = record
        row = connection.execute("SELECT sequence, seal FROM seal WHERE id = 1").fetchone()
        if row is None or row[1] != seal or not isinstance(row[0], int):
            raise _DamagedError("the seal does not fit the rows")
        self.fresh = row[0] == 0
        return Snapshot(row[0], **tables), seal

    def _put_aside(self) -> str:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = f"{self.path}.aside-{stamp}"
        try:
            # The database first: without it nobody takes its journals for anything.
            for suffix in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path + suffix, aside + suffix)
        except OSError as error:
            raise LedgerError(f"cannot put the damaged ledger {self.path} aside: {error}") from error
        self._remove_old()
        return aside

    def _remove_old(self) -> None:
        directory, name = os.path.split(self.path)
        with contextlib.suppress(OSError):
            old = sorted(n for n in os.listdir(directory or ".") if n.startswith(name + ".aside-") and n.endswith("Z"))
            for gone in old[:-_KEEP_ASIDE]:
                for suffix in ("", "-wal", "-shm", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(os.path.join(directory, gone + suffix))


def _changes(before: Snapshot, after: Snapshot) -> list[Change]:
    """Return what makes one snapshot of the other."""
    return [
        Change(table, key, getattr(after, table).get(key), getattr(record, "durable", True))
        for table in _TABLES
        for key, record in {**getattr(before, table), **getattr(after, table)}.items()
    ]


def _no_step(_name: str) -> None:
    pass


def _connected(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False, cached_statements=32)


_Asked = tuple[Operation[Any], "asyncio.Future[Any]"]


class Desk:
    """The ledger for one event loop: a thread of its own, so that a slow disk blocks nobody else.

    What is asked while a commit is under way is decided and committed together afterwards, so
    many pods that start at once share their fsyncs.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger: Final = ledger
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, path: str, *, rules: Rules = Rules()) -> Self:
        """Open the ledger; stand by as long as another agent of this node has it.

        Raises:
            LedgerError: see `Ledger.open`.

        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Ledger] = loop.create_future()

        def answer(ledger: Ledger | None, error: Exception | None) -> None:
            if opened.done():  # nobody waits any more
                if ledger is not None:
                    ledger.close()
            elif ledger is not None:
                opened.set_result(ledger)
            elif error is not None:
                opened.set_exception(error)

        def work() -> None:
            ledger: Ledger | None = None
            failure: Exception | None = None
            try:
                ledger = Ledger.open(path, wait=True, rules=rules)
            except Exception as error:  # passed on
                failure = error
            try:
                loop.call_soon_threadsafe(answer, ledger, failure)
            except RuntimeError:  # the loop is closed
                if ledger is not None:
                    ledger.close()

        # A thread that waits for a lock cannot be cancelled; a daemon one does not keep the process.
        threading.Thread(target=work, name="ledger open", daemon=True).start()
        return cls(await opened)

    @property
    def snapshot(self) -> Snapshot:
        """Everything as of the last commit."""
        return self.ledger.snapshot

    async def do(self, operation: Operation[_T]) -> _T:
        """Decide and record; the answer is durable when it is returned.

        A caller that is cancelled may find the operation done all the same.

        Raises:
            LedgerError: it could not be recorded, nothing was granted.

        """
        if self._closed:
            raise LedgerError(f"the ledger {self.ledger.path} is closed")
        answered: asyncio.Future[_T] = self._loop.create_future()
        self._asked.put((operation, answered))
        return await answered

    async def close(self) -> None:
        """Answer what was asked, then close the ledger."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
            await self._loop.run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while True:
            batch: list[_Asked] = []
            asked = self._asked.get()
            while asked is not None:
                batch.append(asked)
                if len(batch) == _BATCH:
                    break
                try:
                    asked = self._asked.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._answer(batch)
            if asked is None:
                self.ledger.close()
                return

    def _answer(self, batch: Sequence[_Asked]) -> None:
        answers: Sequence[Any]
        try:
            answers = self.ledger.do_all([operation for operation, _ in batch])
        except Exception as error:  # a LedgerError for all of them
            answers = [error] * len(batch)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_deliver, batch, answers)


def _deliver(batch: Sequence[_Asked], answers: Sequence[Any]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
