"""The register's immutable records, their snapshot, the changes that an operation makes, and the ledger's errors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from deviceplugin.identity import UNIDENTIFIED, Identity

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class LedgerError(Exception):
    """Raised when the ledger (the SQLite file of the records) could not record a change.

    The agent then refuses the grant.
    """


class LedgerLostError(LedgerError):
    """Raised when another program replaced the ledger's files, or the files have lost written records.

    After this error, the ledger refuses all grants. The process must restart, and rebuild the records from evidence.
    """


SideName = Literal["plugin", "dra", "none"]
"""The way to get a device: plugin (a pod's `limits`) or dra (a claim); none for a quarantined device, which no pod
gets."""


class Side(enum.Enum):
    """The two ways in which a node offers a device.

    PLUGIN: pods get the device by the `limits` of an extended resource. DRA: pods get the device by ResourceClaims.
    """

    PLUGIN = "plugin"
    DRA = "dra"

    @property
    def text(self) -> str:
        """The side as text, for messages."""
        return "DRA" if self is Side.DRA else "plugin"

    @property
    def title(self) -> str:
        """The side as text, for headings."""
        return "DRA" if self is Side.DRA else "device plugin"


class State(enum.Enum):
    """The states of a device: on a side (plugin or DRA), moving to the other side, or quarantined (on no side)."""

    PLUGIN = "plugin"
    TO_DRA = "to-dra"
    DRA = "dra"
    TO_PLUGIN = "to-plugin"
    QUARANTINED = "quarantined"

    @property
    def allocates(self) -> bool:
        """Whether Allocate may grant a device in this state."""
        return self in {State.PLUGIN, State.TO_DRA}

    @property
    def prepares(self) -> bool:
        """Whether Prepare may grant a device in this state to a claim."""
        return self in {State.DRA, State.TO_PLUGIN}

    @property
    def healthy(self) -> bool:
        """Whether ListAndWatch may report a device in this state as Healthy."""
        return self is State.PLUGIN

    @property
    def offered(self) -> bool:
        """Whether the driver's ResourceSlices contain a device in this state."""
        return self is State.DRA

    @property
    def side(self) -> SideName:
        """The side that grants a device in this state: plugin, dra, or none if the device is quarantined."""
        return "plugin" if self.allocates else "dra" if self.prepares else "none"

    @property
    def goal(self) -> Side | None:
        """The side on which the device is, or to which it is moving; None if the device is quarantined."""
        if self is State.QUARANTINED:
            return None
        return Side.DRA if self in {State.DRA, State.TO_DRA} else Side.PLUGIN

    @property
    def moves(self) -> bool:
        """Whether a device in this state is moving to the other side."""
        return self in {State.TO_DRA, State.TO_PLUGIN}

    @property
    def rests(self) -> bool:
        """Whether a device in this state is on one side (plugin or DRA) and is not moving to the other."""
        return self in {State.PLUGIN, State.DRA}

    @property
    def text(self) -> str:
        """The state as text, for messages."""
        return _WORDS[self]

    @property
    def short(self) -> str:
        """The state as text, for tables."""
        if self.goal is None:
            return "quarantined"
        return f"moving to {self.goal.title}" if self.moves else self.goal.title

    @property
    def reached(self) -> str:
        """The event that puts a device into this state, as text for messages."""
        if self.goal is None:
            return "quarantined"
        return f"{'moving' if self.moves else 'moved'} to the {self.goal.title} side"


class Outlook(enum.Enum):
    """The expectation whether a claim that was refused its devices may get them soon.

    FINAL: no event is expected that frees the devices. ENDING: the devices' holders are about to end. MOVING: the
    devices are moving to DRA, and have no holders. UNKNOWN: the agent does not know the devices' holders yet. FREE: the
    devices may be free now, or a further Prepare begins to move them to DRA.
    """

    FINAL = "final"
    ENDING = "ending"
    MOVING = "moving"
    UNKNOWN = "unknown"
    FREE = "free"

    @property
    def waits(self) -> bool:
        """Whether Prepare waits for the devices instead of failing at once."""
        return self in {Outlook.ENDING, Outlook.MOVING, Outlook.UNKNOWN}


_WORDS: Final = {
    State.PLUGIN: "on the device plugin's side",
    State.TO_DRA: "moving from the device plugin to DRA",
    State.DRA: "on the DRA side",
    State.TO_PLUGIN: "moving from DRA to the device plugin",
    State.QUARANTINED: "quarantined",
}

RecordKey = tuple[str, str]
"""The key of a record: of a device (resource, id), an allocation (resource, kubelet device id), a claim (driver, claim
UID) or a setting (section, key)."""
ContainerKey = tuple[str, str]
"""A container as (pod UID, container name)."""
Point = str | RecordKey
"""A key of the index of holders: a token of an identity (for example, a device number), (resource, device) or (counter
set, counter)."""


class Amount(msgspec.Struct, frozen=True, array_like=True):
    """The part of a device that one holder was granted.

    part: "1" for the whole device, "1/3" for one of three replicas, "0" for administrative access, "" if unknown.
    takes: (counter set, counter, quantity) for each counter that the device consumes. scope: the namespace in which the
    counters' names are unique: the resource's DRA driver, or the resource's name if the resource has no driver; "" if
    there are no counters or the scope is unknown.
    """

    part: str = ""
    takes: tuple[tuple[str, str, str], ...] = ()
    scope: str = ""


UNKNOWN: Final = Amount()
WHOLE: Final = Amount("1")


class FormerGrant(msgspec.Struct, frozen=True, array_like=True):
    """An earlier grant of a kubelet device id, kept if the id's last grant has another identity or amount.

    The earlier grant counts as held until its holders have ended.
    """

    holders: frozenset[ContainerKey]
    identity: Identity
    amount: Amount


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """The state of one device.

    since: the time at which the device got this state (Unix seconds). sequence: the register's sequence at that change.
    reason: why the state changed, for messages. driver: the DRA driver whose slices contain the device; "" on the
    plugin side. for_claim: whether the refused Prepare of a claim has begun the device's move to DRA.
    """

    resource: str
    device: str
    state: State
    since: float
    sequence: int = 0
    reason: str = ""
    driver: str = ""
    for_claim: bool = False

    @property
    def moves_for_claim(self) -> bool:
        """Whether the device is moving to DRA because a claim needs the device."""
        return self.state is State.TO_DRA and self.for_claim


class Allocation(NamedTuple):
    """One device id that one container has. device_id: the kubelet's id, perhaps the id of a replica of a device."""

    pod_uid: str
    container: str
    resource: str
    device_id: str


@dataclass(frozen=True, slots=True)
class AllocationRecord:
    """A kubelet device id (the device's own, or a replica's) that Allocate has granted to a container.

    holders: the containers that the kubelet's checkpoint has named since the grant. pending: whether the agent still
    waits for a checkpoint that names the container of the last grant. absent_since: the time at which the agent
    requested the first checkpoint without the id (monotonic seconds). pod: the namespace/name or UID of one holder, for
    messages. ending: whether the checkpoint no longer names the holders' pods, or the pods' processes have ended.
    absent_since, pod and ending are not stored on disk. identity: the device's identity at the last grant. amount: the
    granted part of the device. former: the earlier grants whose holders may still run. shown: (pod UID, directory) for
    each directory in which cgroups of a holder's pod were seen; the directory is "" if the pod ran and no cgroup was
    seen (`deviceplugin.kubelet.pod_evidence`).
    """

    resource: str
    device_id: str
    device: str
    since: float
    sequence: int
    holders: frozenset[ContainerKey] = frozenset()
    pending: bool = True
    absent_since: float | None = None
    pod: str = ""
    identity: Identity = UNIDENTIFIED
    amount: Amount = UNKNOWN
    ending: bool = False
    shown: frozenset[tuple[str, str]] = frozenset()
    former: tuple[FormerGrant, ...] = ()

    @property
    def holder(self) -> str:
        """One holder of the id, for messages."""
        return f"pod {self.pod}" if self.pod else "a pod"


class ClaimDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device of a claim. share: the share ID in the claim's allocation result, or "".

    admin: whether the claim has administrative access only. identity: the device's identity at the grant. amount: the
    granted part of the device. parameters: the claim's parameters for the device's setup, as JSON; "" for none. limits:
    whether the scheduler created the claim for a pod's `limits`, or the creator is unknown. The kubelet counts the
    device of such a claim for the extended resource.
    """

    resource: str
    device: str
    share: str = ""
    admin: bool = False
    identity: Identity = UNIDENTIFIED
    amount: Amount = UNKNOWN
    parameters: str = ""
    limits: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that the DRA driver has prepared or is preparing.

    result: the driver's response to Prepare, which the register does not interpret; None while the driver is preparing
    the claim. pods: UIDs of the pods for which the claim was reserved when it was prepared. durable: whether the record
    is on disk too, not only in this process.
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
    def held(self) -> frozenset[RecordKey]:
        """The devices that the claim holds, as (resource, device), without devices for administrative access."""
        held: set[RecordKey] = set()
        for device in self.devices:
            if not device.admin:
                held.add((device.resource, device.device))
        return frozenset(held)

    @property
    def title(self) -> str:
        """The claim's namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"

    @property
    def holder(self) -> str:
        """The claim as holder of its devices, for messages: by its UID if the name is not known."""
        return f"claim {self.title if self.name else self.uid}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A stored value that the agent needs after a restart. section, key: the two parts of the value's name."""

    section: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class EndedClaim:
    """A claim that this process has unprepared, remembered because older evidence may still show it as prepared."""

    driver: str
    uid: str


Record = DeviceRecord | AllocationRecord | Claim | Setting | EndedClaim
NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RegisterSnapshot:
    """All records of the register at one moment.

    sequence: the number of the last durable change, which only grows. ended: the claims that were unprepared last, the
    oldest first; not stored on disk. index: for each token, device and counter, the (table, key) of each allocation and
    claim that has the token, device or counter. Only `with_changes` builds the index.
    """

    sequence: int = 0
    devices: Mapping[RecordKey, DeviceRecord] = field(default_factory=lambda: NONE)
    allocations: Mapping[RecordKey, AllocationRecord] = field(default_factory=lambda: NONE)
    claims: Mapping[RecordKey, Claim] = field(default_factory=lambda: NONE)
    settings: Mapping[RecordKey, Setting] = field(default_factory=lambda: NONE)
    ended: Mapping[RecordKey, EndedClaim] = field(default_factory=lambda: NONE)
    index: Mapping[Point, frozenset[tuple[str, RecordKey]]] = field(default_factory=lambda: NONE)

    def setting(self, section: str, key: str) -> str | None:
        """Return the value that `set_setting` stored under this section and key; None if there is no such value."""
        setting = self.settings.get((section, key))
        return None if setting is None else setting.value

    def device(self, resource: str, device: str) -> DeviceRecord:
        """Return a device's record; a device without a record is on the plugin side."""
        return self.devices.get((resource, device)) or DeviceRecord(resource, device, State.PLUGIN, 0.0)

    def state(self, resource: str, device: str) -> State:
        """Return the recorded state of a device; a device without a record is on the plugin side."""
        record = self.devices.get((resource, device))
        return State.PLUGIN if record is None else record.state

    def of(self, resource: str) -> dict[str, DeviceRecord]:
        """Return, for each device id of a resource, the device's record."""
        return {record.device: record for record in self.devices.values() if record.resource == resource}

    def allocations_of(self, resource: str) -> list[AllocationRecord]:
        """Return the allocations of a resource."""
        return [allocation for allocation in self.allocations.values() if allocation.resource == resource]

    def serves_pods(self, resource: str) -> bool:
        """Return whether pods have, or may get, devices of a resource from the plugin.

        If the result is False, the plugin must not request PreStartContainer calls. Otherwise, the kubelet would call
        PreStartContainer for pods whose `limits` are satisfied by claims. The plugin has granted no devices to such a
        pod, so the call would fail, and the kubelet would start none of the pod's containers (kubelet 1.36.3 and
        1.37.1, devicemanager/manager.go: callPreStartContainerIfNeeded).
        """
        states = {record.state for record in self.of(resource).values()}
        # A device without a record is on the plugin side.
        return not states or not states <= {State.DRA, State.TO_PLUGIN}

    def allocations_on(self, resource: str, devices: Iterable[str]) -> list[AllocationRecord]:
        """Return the allocations of any of these devices."""
        entries = {entry for device in devices for entry in self.index.get((resource, device), ())}
        return [self.allocations[key] for table, key in sorted(entries) if table == "allocations"]

    def claims_on(self, resource: str, devices: Iterable[str]) -> list[Claim]:
        """Return the claims that hold any of these devices."""
        entries = {entry for device in devices for entry in self.index.get((resource, device), ())}
        return [self.claims[key] for table, key in sorted(entries) if table == "claims"]

    def following(self, decision: Decision[Any]) -> RegisterSnapshot:
        """Return the snapshot after a decision. The snapshot's sequence grows if any change is durable."""
        if not decision.changes:
            return self
        grows = False
        for change in decision.changes:
            grows = grows or change.durable
        return self.with_changes(decision.changes, self.sequence + grows)

    def with_changes(self, changes: Sequence[Change], sequence: int) -> RegisterSnapshot:
        """Return the snapshot with these changes. sequence: the new snapshot's `sequence`."""
        tables: dict[str, dict[RecordKey, Any]] = {}
        index: dict[Point, frozenset[tuple[str, RecordKey]]] | None = None
        for change in changes:
            if change.table not in tables:
                tables[change.table] = dict(getattr(self, change.table))
            before = tables[change.table].pop(change.key, None)
            if change.record is not None:
                tables[change.table][change.key] = change.record
            if change.table in ("allocations", "claims"):
                index = dict(self.index) if index is None else index
                entry = change.table, change.key
                old, new = _points(before), _points(change.record)
                for point in old - new:
                    index[point] -= {entry}
                    if not index[point]:
                        del index[point]
                for point in new - old:
                    index[point] = index.get(point, frozenset()) | {entry}
        return replace(self, sequence=sequence, index=self.index if index is None else index, **tables)


def _points(record: Record | None) -> set[Point]:
    """Return the keys under which `RegisterSnapshot.index` has an allocation or claim; no keys for other records."""
    points: set[Point] = set()
    granted: Sequence[AllocationRecord | FormerGrant | ClaimDevice] = ()
    if isinstance(record, AllocationRecord):
        points.add((record.resource, record.device))
        granted = (record, *record.former)
    elif isinstance(record, Claim):
        points |= record.held
        granted = [device for device in record.devices if not device.admin]
    for one in granted:
        points |= one.identity.tokens - one.identity.left
        points |= one.identity.reached
        points |= one.identity.within
        for counter_set, counter, _ in one.amount.takes:
            points.add((counter_set, counter))
    return points


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one record in a table of a snapshot. record: the new record; None removes the former record."""

    table: str
    key: RecordKey
    record: Record | None
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Decision(Generic[_T_co]):
    """The result of an operation, and the changes that a store must record before a caller uses the result."""

    answer: _T_co
    changes: tuple[Change, ...] = ()


Operation = Callable[[RegisterSnapshot], Decision[_T]]
"""A pure function that gets the register's snapshot and returns a decision. `Store.do` executes the function."""
