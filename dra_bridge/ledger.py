"""Who may have a device and who has it: the single authority of a node's agent, and durable.

Both doors ask here before they answer the kubelet, and what is granted is on disk before the
answer leaves. Three layers, to be read from top to bottom:

- frozen records and a frozen `Snapshot` of all of them;
- decisions: pure functions over a snapshot (`grant`, `prepare`, `commit_to_dra` and so on); each
  returns an operation, which, given a snapshot, says the answer and the changes;
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
from typing import Any, Final, Generic, Self, TypeVar, cast

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
    "LedgerLostError",
    "Observed",
    "Operation",
    "Refused",
    "Side",
    "Snapshot",
    "State",
    "adopt",
    "begin_move",
    "cancel_move",
    "commit_to_dra",
    "commit_to_plugin",
    "confront",
    "describe",
    "forget",
    "grant",
    "identify",
    "observe",
    "prepare",
    "reopen",
    "reserve",
    "set_setting",
    "unprepare",
]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

SCHEMA: Final = 2
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


class LedgerLostError(LedgerError):
    """Raised when the files are not those that were opened, or have lost what was written; nothing is granted any more.

    The process must begin again: what is held is found out from evidence then.
    """


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
    def goal(self) -> Side | None:
        """The side where a device is or moves to; None if it is quarantined."""
        return _GOAL.get(self)

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

Holder = tuple[str, str]
"""(pod UID, container)."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One physical device. `since`: Unix seconds; `sequence`: of the change that led here.

    identity: what it was when it was given to those that hold it, or when it was last listed, in words
    (`deviceplugin.identity.recorded`); "" if that is not known.
    """

    resource: str
    device: str
    state: State
    since: float
    sequence: int = 0
    reason: str = ""
    identity: str = ""

    @property
    def pulled(self) -> bool:
        """Whether it moves to DRA because a claim came for it (R2)."""
        return self.state is State.TO_DRA and self.reason.startswith(_PULLED)


@dataclass(frozen=True, slots=True)
class Hold:
    """A kubelet device id (the device's own, or a replica's) that Allocate gave away.

    holders: (pod UID, container) of those that the kubelet's checkpoint named since. pending: the container of the
    last grant has not been named yet. absent_since: when the first checkpoint without it was asked for (monotonic
    seconds), known to this process only. pod: namespace/name or UID of a holder, for people; likewise.
    """

    resource: str
    unit: str
    device: str
    since: float
    sequence: int
    holders: frozenset[Holder] = frozenset()
    pending: bool = True
    absent_since: float | None = None
    pod: str = ""


class ClaimDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device of a claim. admin: seen, not held. share: of consumable capacity, else ""."""

    resource: str
    device: str
    share: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that is prepared, or (result None) about to be.

    result: what the driver answers with, opaque here. pods: UIDs of the pods that it was reserved for when it was
    prepared. durable: on disk, not only in this process.
    """

    driver: str
    uid: str
    namespace: str
    name: str
    devices: tuple[ClaimDevice, ...]
    result: str | None
    since: float
    sequence: int = 0
    pods: frozenset[str] = frozenset()
    durable: bool = True

    @property
    def held(self) -> frozenset[Key]:
        """The devices it holds as (resource, device), those of administrative access not among them."""
        return frozenset((device.resource, device.device) for device in self.devices if not device.admin)

    @property
    def title(self) -> str:
        """Namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that must survive restarts, by section and key."""

    section: str
    key: str
    value: str


_Record = DeviceRecord | Hold | Claim | Setting
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
    settings: Mapping[Key, Setting] = field(default_factory=lambda: _NONE)

    def setting(self, section: str, key: str) -> str | None:
        """Return a value that was kept by `set_setting`; None if there is none."""
        found = self.settings.get((section, key))
        return None if found is None else found.value

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


Operation = Callable[[Snapshot], Decision[_T]]
"""A decision waiting for its snapshot; pure. Hand it to `Ledger.do` or `Desk.do`."""


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


def r1_refusal(now: Snapshot, resource: str, device: str) -> Refused | None:
    """R1: Allocate is granted in PLUGIN and TO_DRA; return the refusal elsewhere."""
    record = now.device(resource, device)
    if not record.state.allocates:
        return Refused(resource, device, record.state, record.since, moving=record.state is State.TO_PLUGIN)
    for claim in now.claims_on(resource, (device,)):
        return Refused(resource, device, record.state, record.since, f"claim {claim.title}")
    return None


def r2_refusal(now: Snapshot, resource: str, device: str) -> Refused | None:
    """R2: claims are prepared in DRA and TO_PLUGIN; return the refusal elsewhere."""
    record = now.device(resource, device)
    holder = next((hold.pod or "a pod" for hold in now.holds_on(resource, (device,))), "")
    if not record.state.prepares:
        return Refused(resource, device, record.state, record.since, holder, record.state is State.TO_DRA)
    if holder:
        return Refused(resource, device, record.state, record.since, holder)
    return None


def r5_waits_for(now: Snapshot, record: DeviceRecord, evidence: KubeletEvidence) -> str:
    """R5: say what the commit of TO_DRA still waits for; "" if it may be."""
    shown = evidence.shown.get(record.device)
    seen = evidence.snapshot
    if evidence.sequence < record.sequence:
        return "evidence from after the move began"
    if shown is None:
        return "ListAndWatch to show it Unhealthy"
    for held in seen.held.values():
        if held.device == record.device:
            return f"pod {held.pod} ({held.reason})" if held.reason else f"pod {held.pod}"
    if not seen.awake:
        return f"a checkpoint that the kubelet has written since ({seen.problem or 'not asked for yet'})"
    if seen.at < shown or record.device in seen.registered:
        return "the kubelet to acknowledge that it is Unhealthy"
    if seen.sequence < evidence.sequence:
        return "a snapshot of the kubelet's holders"
    for hold in now.holds_on(record.resource, (record.device,)):
        return f"pod {hold.pod}" if hold.pod else f"the pod it was allocated to at {_utc(hold.since)}"
    return ""


def r6_waits_for(now: Snapshot, record: DeviceRecord, evidence: ClusterEvidence) -> str:
    """R6: say what the commit of TO_PLUGIN still waits for; "" if it may be."""
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


def r7_releases(hold: Hold, snapshot: KubeletSnapshot, apart: float) -> bool:
    """R7: whether a grant whose pod no checkpoint has ever named is over.

    Its pod may still be on its way from Allocate to the kubelet's checkpoint, so it takes two checkpoints without
    it, each written at our request, well apart. What counts is when they were asked for, not when they are judged.
    """
    return snapshot.awake and hold.absent_since is not None and snapshot.at - hold.absent_since >= apart


# ---------------------------------------------------------------- what evidence looks like


@dataclass(frozen=True, slots=True)
class Held:
    """A kubelet device id in some container's hands, as the witnesses say.

    holders: (pod UID, container) of each. pod: one of them for people. sure: not only an old checkpoint says so;
    what is not sure counts as held, and proves nobody wrong. reason: why it counts as held, for people.
    """

    device: str
    pod: str
    sure: bool = True
    holders: frozenset[Holder] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KubeletSnapshot:
    """Who holds what of one resource, by the witnesses (`deviceplugin.kubelet.holders`).

    sequence: the ledger's before they were asked. at: when they began to be asked (monotonic seconds). awake: the
    checkpoint was written after that; no own Allocate was in flight meanwhile. held: by the kubelet's id.
    registered: devices that the kubelet counts as healthy. problem: why it is not awake.
    """

    sequence: int
    at: float
    awake: bool
    held: Mapping[str, Held] = field(default_factory=lambda: _NONE)
    registered: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KubeletEvidence:
    """What R5 asks for; times are monotonic seconds of one process.

    sequence: the ledger's before any of it. shown: when the update with the device Unhealthy was sent, by device.
    snapshot: begun after that.
    """

    sequence: int
    shown: Mapping[str, float]
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

    prepared: there is a CDI file, or the kubelet counts it as prepared. Namespace and name may be unknown ("") then.
    pods: UIDs of its pods, as far as they are known. shares: by device, the part of it that the claim has, or "";
    what is not in it is not known.
    """

    driver: str
    uid: str
    devices: frozenset[str]
    prepared: bool
    namespace: str = ""
    name: str = ""
    pods: frozenset[str] = frozenset()
    shares: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one resource's holders without the ledger (R8).

    held: by unit, from the kubelet's checkpoint. claims: from the API server, the kubelet's claim state and the CDI
    files. awake: the checkpoint was written at our own request; if not, it proves nothing by what it does not name.
    """

    held: Mapping[str, Held] = field(default_factory=lambda: _NONE)
    claims: Sequence[ClaimEvidence] = ()
    awake: bool = True


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

    def decide(state: Snapshot) -> Decision[tuple[str, ...]]:
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

    def decide(state: Snapshot) -> Decision[tuple[str, ...]]:
        gone = tuple(
            device
            for device in ids
            if (resource, device) in state.devices
            and not state.holds_on(resource, (device,))
            and not state.claims_on(resource, (device,))
        )
        return Decision(gone, tuple(Change("devices", (resource, device), None) for device in gone))

    return decide


def identify(identities: Mapping[Key, str]) -> Operation[None]:
    """Record what devices are; one that somebody holds keeps the identity that its holder got, until a reboot."""

    def decide(state: Snapshot) -> Decision[None]:
        changes = []
        for key, identity in identities.items():
            record = state.devices.get(key)
            if record is None or not identity or record.identity == identity:
                continue
            same_boot = record.identity.split(" ")[0] == identity.split(" ")[0]
            if same_boot and (state.holds_on(key[0], key[1:]) or state.claims_on(key[0], key[1:])):
                continue
            changes.append(Change("devices", key, replace(record, identity=identity)))
        return Decision(None, tuple(changes))

    return decide


def grant(resource: str, units: Mapping[str, str], now: float) -> Operation[Granted | Refused]:
    """Give units to a container (R1), all or none.

    Args:
        resource: the extended resource's name.
        units: the physical device's id by unit, the id in Allocate (a replica's, or the device's
            own). A unit that was given before is given anew: the kubelet took it back unseen.
        now: Unix seconds.

    """

    def decide(state: Snapshot) -> Decision[Granted | Refused]:
        for device in dict.fromkeys(units.values()):
            refusal = r1_refusal(state, resource, device)
            if refusal is not None:
                return Decision(refusal)
        sequence = state.sequence + 1
        changes = []
        for unit, device in units.items():
            before = state.holds.get((resource, unit))
            # Its earlier holders stay in the record until the witnesses say that they are gone.
            holders = before.holders if before is not None else frozenset()
            pod = before.pod if before is not None else ""
            changes.append(
                Change("holds", (resource, unit), Hold(resource, unit, device, now, sequence, holders, pod=pod))
            )
        return Decision(Granted(sequence), tuple(changes))

    return decide


def observe(resource: str, snapshot: KubeletSnapshot, now: float, *, apart: float = WELL_APART) -> Operation[Observed]:
    """Compare the holds of a resource with what the witnesses say: release what is over (E2, R7).

    A hold is over when none of its holders is left, and no grant of it waits for its container to be named. An id
    that is held and that the ledger does not know becomes a hold; if its device is on the DRA side, the two
    contradict each other and the device is quarantined.

    Args:
        resource: the extended resource's name.
        snapshot: what the witnesses say of all of the resource's ids.
        now: Unix seconds.
        apart: seconds between the two checkpoints of R7.

    """

    def decide(state: Snapshot) -> Decision[Observed]:
        changes: list[Change] = []
        released: list[str] = []
        for key, hold in state.holds.items():
            if hold.resource != resource or snapshot.sequence < hold.sequence:
                continue  # given out, perhaps anew, after the witnesses were asked
            after = _observed(hold, snapshot, apart)
            if after is None:
                released.append(hold.unit)
                changes.append(Change("holds", key, None))
            elif after != hold:
                durable = (after.holders, after.pending) != (hold.holders, hold.pending)
                changes.append(Change("holds", key, after, durable=durable))
        found, quarantined = _found(state, resource, snapshot.held, now, changes)
        return Decision(Observed(tuple(released), found, quarantined), tuple(changes))

    return decide


def _observed(hold: Hold, snapshot: KubeletSnapshot, apart: float) -> Hold | None:
    """Return a hold as the witnesses leave it; None if it is over."""
    held = snapshot.held.get(hold.unit)
    holders = held.holders if held is not None else frozenset()
    pod = held.pod if held is not None else hold.pod
    if held is not None and held.sure and holders - hold.holders:
        return replace(hold, holders=holders, pending=False, absent_since=None, pod=pod)
    if not hold.pending:
        return replace(hold, holders=holders, pod=pod) if holders else None
    # A new name that only an old checkpoint has may be that of a pod that ended before this grant.
    holders &= hold.holders
    if r7_releases(hold, snapshot, apart):
        return replace(hold, holders=holders, pending=False, absent_since=None, pod=pod) if holders else None
    absent = snapshot.at if hold.absent_since is None and snapshot.awake else hold.absent_since
    return replace(hold, holders=holders, absent_since=absent, pod=pod)


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
        changes.append(Change("holds", (resource, unit), _seen_hold(state, resource, unit, holder, now)))
        if record.state.prepares and holder.device not in quarantined:
            quarantined[holder.device] = None
            reason = f"{record.state.text}, but the kubelet says that pod {holder.pod} holds it"
            record = DeviceRecord(resource, holder.device, State.QUARANTINED, now, reason=reason)
            changes.append(_put_device(record, state))
    return tuple(found), tuple(quarantined)


def _seen_hold(state: Snapshot, resource: str, unit: str, held: Held, now: float) -> Hold:
    """Return the record of an id that is held and was granted by an agent before, or by a ledger that is lost."""
    return Hold(
        resource, unit, held.device, now, state.sequence + 1, held.holders, pending=not held.holders, pod=held.pod
    )


def reserve(claim: Claim, *, durable: bool, pull: bool = False) -> Operation[Claim | Refused]:
    """Reserve a claim's devices (R2) while its driver works on them; `prepare` completes it.

    Answers the claim as the ledger has it already, if it has (a `result` of None: not completed),
    else the reservation. Without `durable` a crash forgets it; a driver whose work leaves traces
    on the device wants it durable, so that an Unprepare after a crash can undo them.

    pull: where a device is on the plugin's side and idle, begin its move to DRA.
    """

    def decide(state: Snapshot) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        same = known is not None and (known.durable, known.devices) == (durable, claim.devices)
        if known is not None and (same or known.result is not None):
            return Decision(known)
        refusal = _claim_refusal(state, claim)
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

    def decide(state: Snapshot) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        if known is not None and known.result is not None:
            return Decision(known)
        refusal = _claim_refusal(state, claim)
        if refusal is not None:
            return _pulled(state, claim, refusal) if pull else Decision(refusal)
        record = replace(claim, sequence=state.sequence + 1, durable=True)
        return Decision(record, (Change("claims", key, record),))

    return decide


def _claim_refusal(state: Snapshot, claim: Claim) -> Refused | None:
    for device in claim.devices:
        if not device.admin:
            refusal = r2_refusal(state, device.resource, device.device) or _taken(state, claim, device)
            if refusal is not None:
                return refusal
    return None


def _taken(state: Snapshot, claim: Claim, wanted: ClaimDevice) -> Refused | None:
    """R2 between claims: a device that is not shared has one claim, however the second came by it.

    The scheduler sees to it, too, but of a pod that is deleted by force the API server forgets
    the claim while its container still runs.
    """
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

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None or known.result is None:
            return Decision(known)
        record = replace(known, result=None, sequence=state.sequence + 1)
        return Decision(record, (Change("claims", (driver, uid), record),))

    return decide


def describe(driver: str, uid: str, namespace: str, name: str, pods: Iterable[str] = ()) -> Operation[Claim | None]:
    """Add what is known of a claim: its name, where only its CDI file was known, and pods that share it."""
    more = frozenset(pods)

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None:
            return Decision(None)
        named = known if known.name else replace(known, namespace=namespace, name=name)
        record = replace(named, pods=known.pods | more)
        if record == known:
            return Decision(known)
        return Decision(record, (Change("claims", (driver, uid), record, durable=known.durable),))

    return decide


def unprepare(driver: str, uid: str) -> Operation[Claim | None]:
    """Take back a claim's devices; answer the record that was there, None for an unknown claim."""

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None:
            return Decision(None)
        return Decision(known, (Change("claims", (driver, uid), None, durable=known.durable),))

    return decide


def set_setting(section: str, key: str, value: str | None) -> Operation[None]:
    """Keep a value, or drop it (None)."""

    def decide(state: Snapshot) -> Decision[None]:
        if state.setting(section, key) == value:
            return Decision(None)
        record = None if value is None else Setting(section, key, value)
        return Decision(None, (Change("settings", (section, key), record),))

    return decide


def begin_move(
    resource: str, devices: Iterable[str], to: Side, now: float, reason: str = ""
) -> Operation[Mapping[str, State]]:
    """Send devices towards a side; answer the new state of those that changed.

    One that is moving the other way turns round. Quarantined devices stay.
    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Mapping[str, State]]:
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

    def decide(state: Snapshot) -> Decision[Mapping[str, State]]:
        at = {device: state.device(resource, device).state for device in ids}
        moves = {device: _CANCELLED[where] for device, where in at.items() if where in _CANCELLED}
        return Decision(moves, _moved(state, resource, moves, now, "cancelled"))

    return decide


def commit_to_dra(resource: str, devices: Iterable[str], evidence: KubeletEvidence, now: float) -> Operation[Committed]:
    """End moves to DRA for which the evidence suffices (R5)."""
    return _commit(resource, devices, State.TO_DRA, lambda state, record: r5_waits_for(state, record, evidence), now)


def commit_to_plugin(
    resource: str, devices: Iterable[str], evidence: ClusterEvidence, now: float
) -> Operation[Committed]:
    """End moves to the plugin for which the evidence suffices (R6)."""
    return _commit(resource, devices, State.TO_PLUGIN, lambda state, record: r6_waits_for(state, record, evidence), now)


def _commit(
    resource: str,
    devices: Iterable[str],
    at: State,
    waits_for: Callable[[Snapshot, DeviceRecord], str],
    now: float,
) -> Operation[Committed]:
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Committed]:
        moves: dict[str, State] = {}
        waiting: dict[str, str] = {}
        for device in ids:
            record = state.device(resource, device)
            if record.state is at:
                reason = waits_for(state, record)
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

    def decide(state: Snapshot) -> Decision[Confronted]:
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
            if pod is None and not evidence.awake and (known is None or not known.state.allocates):
                # It may have been given to a pod that the checkpoint does not name yet.
                doubtful.append(device)
                continue
            at, reason = _proven(known, pod.pod if pod else None, claim, prepared.get(device), side)
            if known is None or at is not known.state:
                changed[device] = at
                changes.append(_put_device(DeviceRecord(resource, device, at, now, reason=reason), state))
            if at is State.QUARANTINED:
                quarantined.append(device)
        for unit, holder in evidence.held.items():
            if (resource, unit) not in state.holds and holder.device not in doubtful:
                changes.append(Change("holds", (resource, unit), _seen_hold(state, resource, unit, holder, now)))
        for claim in evidence.claims:
            key = (claim.driver, claim.uid)
            record = state.claims.get(key)
            if not claim.prepared or (record is not None and record.result is not None):
                continue
            # A claim over several resources is found once for each of them.
            known_devices = record.devices if record is not None else ()
            devices = (
                *known_devices,
                *(
                    ClaimDevice(resource, device, claim.shares.get(device, ""))
                    for device in sorted(claim.devices)
                    if not any((one.resource, one.device) == (resource, device) for one in known_devices)
                ),
            )
            if record is None:
                record = Claim(claim.driver, claim.uid, claim.namespace, claim.name, (), None, now)
            pods = record.pods | claim.pods
            if (devices, pods) != (known_devices, record.pods):
                record = replace(record, devices=devices, pods=pods, sequence=state.sequence + 1)
                changes.append(Change("claims", key, record, durable=record.durable))
        return Decision(Confronted(changed, tuple(quarantined), tuple(dict.fromkeys(doubtful))), tuple(changes))

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
    identity = record.identity or state.device(record.resource, record.device).identity
    record = replace(record, sequence=state.sequence + 1, identity=identity)
    return Change("devices", (record.resource, record.device), record)


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


# ---------------------------------------------------------------- rows


_TABLES: Final = {
    "devices": ("resource", "device", "state", "since", "sequence", "reason", "identity"),
    "holds": ("resource", "unit", "device", "since", "sequence", "holders", "pending"),
    "claims": ("driver", "uid", "namespace", "name", "devices", "result", "since", "sequence", "pods"),
    "settings": ("section", "key", "value"),
}
_CREATE: Final = (
    *(
        f"CREATE TABLE {table} ({', '.join(columns)}, PRIMARY KEY ({columns[0]}, {columns[1]})) WITHOUT ROWID"
        for table, columns in _TABLES.items()
    ),
    "CREATE TABLE seal (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, seal INTEGER NOT NULL)",
    "INSERT INTO seal VALUES (1, 0, 0)",
)
_FORMER_COLUMNS: Final = {"devices": 6, "holds": 5, "claims": 8}
"""How many of the columns a database of schema 1 has."""
_FROM_FORMER: Final = (
    "ALTER TABLE devices ADD COLUMN identity DEFAULT ''",
    "ALTER TABLE holds ADD COLUMN holders DEFAULT '[]'",
    "ALTER TABLE holds ADD COLUMN pending DEFAULT 1",
    "ALTER TABLE claims ADD COLUMN pods DEFAULT '[]'",
    "CREATE TABLE settings (section, key, value, PRIMARY KEY (section, key)) WITHOUT ROWID",
)
"""What makes a database of schema 1 one of schema 2."""
_PUT: Final = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(columns))})"  # noqa: S608  # our own names
    for table, columns in _TABLES.items()
}
_DROP: Final = {
    table: f"DELETE FROM {table} WHERE {columns[0]} = ? AND {columns[1]} = ?"  # noqa: S608
    for table, columns in _TABLES.items()
}
_SELECT: Final = {table: f"SELECT {', '.join(columns)} FROM {table}" for table, columns in _TABLES.items()}  # noqa: S608

_Row = tuple[str | int | float | None, ...]


def _row(record: _Record) -> _Row:
    if isinstance(record, DeviceRecord):
        at = (record.resource, record.device, record.state.value)
        return *at, record.since, record.sequence, record.reason, record.identity
    if isinstance(record, Hold):
        holders = msgspec.json.encode(sorted(record.holders)).decode()
        return record.resource, record.unit, record.device, record.since, record.sequence, holders, int(record.pending)
    if isinstance(record, Setting):
        return record.section, record.key, record.value
    devices = msgspec.json.encode(record.devices).decode()
    pods = msgspec.json.encode(sorted(record.pods)).decode()
    first = (record.driver, record.uid, record.namespace, record.name)
    return *first, devices, record.result, record.since, record.sequence, pods


def _record(table: str, row: Sequence[Any]) -> _Record:
    if table == "devices":
        return DeviceRecord(row[0], row[1], State(row[2]), *row[3:])
    if table == "holds":
        holders = msgspec.json.decode(row[5], type=frozenset[Holder])
        resource, unit, device, since, sequence = row[:5]
        return Hold(resource, unit, device, since, sequence, holders, pending=bool(row[6]))
    if table == "settings":
        return Setting(*row)
    devices = msgspec.json.decode(row[4], type=tuple[ClaimDevice, ...])
    driver, uid, namespace, name = row[:4]
    result, since, sequence = row[5:8]
    pods = msgspec.json.decode(row[8], type=frozenset[str])
    return Claim(driver, uid, namespace, name, devices, result, since, sequence, pods)


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
        step: Callable[[str], None] | None,
        connect: Callable[[str], sqlite3.Connection],
    ) -> None:
        """Do not call it, use `open`."""
        self.path: Final = path
        self.set_aside: str | None = None
        self.fresh = False
        self._lock_file = lock
        self._connect = connect
        self._guard = threading.RLock()
        self._step = step or _no_step
        self._connection: sqlite3.Connection | None = None
        self._snapshot = Snapshot()
        self._seal = 0
        self._files: tuple[_File | None, ...] = ()
        self._lost = ""
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str,
        *,
        wait: bool = False,
        step: Callable[[str], None] | None = None,
        connect: Callable[[str], sqlite3.Connection] | None = None,
    ) -> Self:
        """Open the ledger, or make it; put aside what cannot be used.

        Args:
            path: the database; `path + ".lock"` is the lock. Missing directories are made.
            wait: stand by while another agent has it.
            step: called before and after each durable step with its name, for tests.
            connect: opens the database, for tests.

        Raises:
            LedgerBusyError: another agent has it, and `wait` is False.
            LedgerError: the directory or the disk does not let us; another try may.

        """
        ledger = cls(path, _locked(path, wait=wait), step, connect or _connected)
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
            LedgerLostError: the files were removed, replaced or damaged; nothing is granted any more.

        """
        with self._guard:
            if self._closed:
                raise LedgerError(f"the ledger {self.path} is closed")
            if not self._lost and not self._in_place():
                self._lose("its files were removed or replaced while it was in use")
            if self._lost:
                raise LedgerLostError(self._lost)
            if self._connection is None:
                self._load_again()
            before, after = self._snapshot, self._snapshot
            answers: list[Any] = []
            changes: list[Change] = []
            for operation in operations:
                try:
                    decision = operation(after)
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
        """Return whether what is written is found again by the next agent; SQLite removes the log with a connection."""
        count = 2 if self._connection is None else 3
        return all(file == _file(path) for path, file in list(zip(self._paths, self._files, strict=True))[:count])

    @property
    def _paths(self) -> tuple[str, ...]:
        """The files that make up the ledger, its lock first."""
        return f"{self.path}.lock", self.path, f"{self.path}-wal"

    def _lose(self, why: str) -> None:
        """Grant nothing any more: what is on disk is not what this process has written."""
        self._lost = f"the ledger {self.path} cannot be used any more: {why}; the agent has to be restarted"
        _LOG.error("%s", self._lost)
        self._disconnect()

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
        known, files = self._snapshot, self._files
        try:
            self._load()
        except LedgerError:
            self._snapshot = known
            raise
        found = self._snapshot
        if self._files[:2] != files[:2] or found.sequence < known.sequence:
            self._snapshot = known
            self._lose("it has lost what was written to it")
            raise LedgerLostError(self._lost)
        holds = {
            key: replace(hold, absent_since=old.absent_since, pod=old.pod)
            if (old := known.holds.get(key)) is not None and old.sequence == hold.sequence
            else hold
            for key, hold in found.holds.items()
        }
        reserved = {key: claim for key, claim in known.claims.items() if not claim.durable}
        self._snapshot = replace(found, holds=holds, claims={**reserved, **found.claims})

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
        elif version not in {1, SCHEMA}:
            raise _DamagedError(f"its schema is {version}, this agent's is {SCHEMA}")
        elif connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise _DamagedError("it is another program's database")
        elif version == 1:
            self._upgrade(connection)
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

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        """Make a database of schema 1 one of this schema, if its seal fits."""
        connection.execute("BEGIN IMMEDIATE")
        former = 0
        for table, count in _FORMER_COLUMNS.items():
            columns = ", ".join(_TABLES[table][:count])
            for row in connection.execute(f"SELECT {columns} FROM {table}"):  # noqa: S608  # our own names
                former ^= _digest(table, row)
        found = connection.execute("SELECT seal FROM seal WHERE id = 1").fetchone()
        if found is None or found[0] != former:
            raise _DamagedError("the seal does not fit the rows")
        for statement in _FROM_FORMER:
            connection.execute(statement)
        seal = 0
        for table, statement in _SELECT.items():
            for row in connection.execute(statement):
                seal ^= _digest(table, row)
        connection.execute("UPDATE seal SET seal = ? WHERE id = 1", (seal,))
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

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
        self.lost = asyncio.Event()
        """Set when the ledger grants nothing any more and the process has to begin again."""
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, path: str) -> Self:
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
                ledger = Ledger.open(path, wait=True)
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

    async def identify(self, identities: Mapping[Key, str]) -> None:
        """Record what devices are, as `identify` does, if that is anything new.

        Raises:
            LedgerError: it could not be recorded.

        """
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
            if isinstance(error, LedgerLostError):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self.lost.set)
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
