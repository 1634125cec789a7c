"""What the ledger knows: frozen records of devices, holds, claims and settings, and a snapshot of all of them.

It also defines what an operation returns (its answer and its changes) and the errors of the ledger.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import msgspec

__all__ = [
    "NONE",
    "PULLED",
    "RESTING",
    "Change",
    "Claim",
    "ClaimDevice",
    "Decision",
    "DeviceRecord",
    "Hold",
    "Holder",
    "Key",
    "LedgerBusyError",
    "LedgerError",
    "LedgerLostError",
    "Operation",
    "Record",
    "Setting",
    "Side",
    "Snapshot",
    "State",
]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class LedgerError(Exception):
    """Raised when something could not be recorded; nothing was granted then."""


class LedgerBusyError(LedgerError):
    """Raised when another agent of this node holds the ledger."""


class LedgerLostError(LedgerError):
    """Raised when the files are not those that were opened, or have lost what was written; nothing is granted any more.

    The process must begin again: what is held is found out from evidence then.
    """


class Side(enum.Enum):
    """The two sides."""

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
PULLED: Final = "for claim "
RESTING: Final = {Side.PLUGIN: State.PLUGIN, Side.DRA: State.DRA}
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
        return self.state is State.TO_DRA and self.reason.startswith(PULLED)


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


Record = DeviceRecord | Hold | Claim | Setting
NONE: Final[Mapping[Any, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the ledger knows at one moment; never changed, replaced.

    sequence: of the last change; it only grows.
    """

    sequence: int = 0
    devices: Mapping[Key, DeviceRecord] = field(default_factory=lambda: NONE)
    holds: Mapping[Key, Hold] = field(default_factory=lambda: NONE)
    claims: Mapping[Key, Claim] = field(default_factory=lambda: NONE)
    settings: Mapping[Key, Setting] = field(default_factory=lambda: NONE)

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
    record: Record | None
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Decision(Generic[_T_co]):
    """What a decision comes to: the answer, and the changes that must be on disk before it is given."""

    answer: _T_co
    changes: tuple[Change, ...] = ()


Operation = Callable[[Snapshot], Decision[_T]]
"""A decision waiting for its snapshot; pure. Hand it to `Ledger.do` or `AsyncLedger.do`."""
