"""Keeps the inventory, the present devices of one resource. The device plugin and the DRA driver subscribe to changes.

A device that vanishes from the source's list may still have a holder, or an Allocate of the device may be running. The
kubelet crashes if a device disappears during its Allocate (kubelet 1.36.3, devicemanager). So the device stays in the
inventory, unhealthy and marked as gone, until the resource's service finds no holder and calls `forget`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from deviceplugin.device import Device, Health
from deviceplugin.looks import Looks

_T = TypeVar("_T")

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
GONE: Final = "the device is gone"


class DuplicateDeviceError(ValueError):
    """Raised when a device list has the same device id twice."""


@dataclass(frozen=True, slots=True)
class InventorySnapshot:
    """The devices of a resource at one moment.

    version: 0 before the source's first list, then one more after each change. devices: for each device id, the device,
    in the source's order; gone devices are last. gone: the ids of devices that the source does not list any more.
    identities: for each device id, the known identity tokens. replicas: for each device id, the number of containers
    that may share the device; empty if the source shares no device. larger: for each device that is a part of larger
    devices, as its source or sysfs shows, the tokens of the larger devices.
    """

    resource: str
    version: int = 0
    devices: Mapping[str, Device] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    identities: Mapping[str, frozenset[str]] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    larger: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def listed(self) -> bool:
        """Whether the source has yielded its first device list."""
        return self.version > 0


def by_id(listed: Iterable[Device], what: str) -> dict[str, Device]:
    """Return a dict from device id to device. what: the list's name in messages. Raises DuplicateDeviceError."""
    devices: dict[str, Device] = {}
    for device in listed:
        if device.id in devices:
            raise DuplicateDeviceError(f"{what}: device id {device.id!r} is listed twice")
        devices[device.id] = device
    return devices


def merged(
    before: InventorySnapshot,
    listed: Iterable[Device],
    identities: Mapping[str, frozenset[str]] = _NONE,
    replicas: Mapping[str, int] = _NONE,
    containing: Mapping[str, frozenset[str]] = _NONE,
) -> InventorySnapshot:
    """Return the snapshot after a new list of the source; `before` if nothing changed. Raises DuplicateDeviceError.

    containing: see `deviceplugin.identity.Identified`.
    """
    devices = by_id(listed, before.resource)
    wholes = {name: containing.get(name, frozenset()).union(device.part_of) for name, device in devices.items()}
    gone = frozenset(before.devices.keys() - devices.keys())
    for name, device in before.devices.items():
        if name in gone:
            devices[name] = device.with_health(Health.UNHEALTHY, GONE)

    def kept(former: Mapping[str, _T], now: Mapping[str, _T]) -> dict[str, _T]:
        return {name: former[name] for name in gone & former.keys()} | {name: of for name, of in now.items() if of}

    its, times = kept(before.identities, identities), kept(before.replicas, replicas)
    larger = kept(before.larger, wholes)
    same = (gone, its, times, larger) == (before.gone, before.identities, before.replicas, before.larger)
    if before.listed and same and list(devices.items()) == list(before.devices.items()):
        return before
    return InventorySnapshot(before.resource, before.version + 1, devices, gone, its, times, larger)


def without(before: InventorySnapshot, forgotten: Iterable[str]) -> InventorySnapshot:
    """Return the snapshot without those devices of `forgotten` that are marked as gone."""
    drop = before.gone.intersection(forgotten)
    if not drop:
        return before

    def rest(of: Mapping[str, _T]) -> dict[str, _T]:
        return {name: value for name, value in of.items() if name not in drop}

    kept = rest(before.identities), rest(before.replicas), rest(before.larger)
    return InventorySnapshot(before.resource, before.version + 1, rest(before.devices), before.gone - drop, *kept)


class DeviceChange(NamedTuple):
    """A change of a device. text: a description for messages. bad: whether the change makes the device unusable."""

    device: str
    text: str
    bad: bool = False


def changes(before: InventorySnapshot, now: InventorySnapshot) -> Iterator[DeviceChange]:
    """Yield the changes of devices between two snapshots. For the source's first list, yield only unusable devices."""
    for name, device in now.devices.items():
        old = before.devices.get(name)
        why = f": {device.message}" if device.message else ""
        health = "of unknown health" if device.health is Health.UNKNOWN else device.health.value
        if name in now.gone:
            if name not in before.gone:
                yield DeviceChange(name, "vanished", bad=True)
        elif old is None or name in before.gone:
            if before.listed:
                yield DeviceChange(name, "appeared" if old is None else "appeared again")
            if not device.health.usable or (old is not None and device.health is Health.UNKNOWN):
                yield DeviceChange(name, f"is {health}{why}", bad=not device.health.usable)
        elif old.health is not device.health:
            recovered = device.health is Health.HEALTHY
            yield DeviceChange(name, "recovered" if recovered else f"is {health}{why}", not device.health.usable)
    for name in sorted(before.devices.keys() - now.devices.keys()):
        # A device without a holder may be removed so soon that no snapshot of this subscriber has marked it as gone.
        if name not in before.gone:
            yield DeviceChange(name, "vanished", bad=True)
        else:
            yield DeviceChange(name, "is removed: it is unlisted and has no holder")


def blamed(listed: InventorySnapshot, message: str, version: int) -> InventorySnapshot:
    """Return a snapshot in which all devices are unhealthy for the same reason.

    message: the reason; if it is "", the devices have the health that the source has listed.
    """
    devices = listed.devices
    if message:
        devices = {
            name: device if name in listed.gone else device.with_health(Health.UNHEALTHY, message)
            for name, device in devices.items()
        }
    return dataclasses.replace(listed, version=version, devices=devices)


class Inventory:
    """Holds one resource's present devices, and calls subscribers after each change.

    An instance belongs to one event loop. looks: the thread pool for all reads of the devices' paths. While such a read
    hangs, all devices of the resource are marked as unhealthy.
    """

    def __init__(self, resource: str) -> None:
        self.snapshot = InventorySnapshot(resource)
        """The present devices, as the subscribers got them last."""
        self.looks: Final = Looks(resource, resource=resource)
        self.looks.changed = self._looked
        self._listed = self.snapshot
        """The devices with the health that the source has listed, even while a read hangs."""
        self._subscribers: dict[object, Callable[[InventorySnapshot], None]] = {}

    @property
    def devices(self) -> Mapping[str, Device]:
        """For each device id, the device, including gone devices, which the source does not list any more."""
        return self.snapshot.devices

    def __repr__(self) -> str:
        now = self.snapshot
        return f"<Inventory {now.resource} version {now.version}: {len(now.devices)} devices, {len(now.gone)} gone>"

    def publish(
        self,
        listed: Iterable[Device],
        identities: Mapping[str, frozenset[str]] = _NONE,
        replicas: Mapping[str, int] = _NONE,
        containing: Mapping[str, frozenset[str]] = _NONE,
    ) -> bool:
        """Store the source's list; return whether anything changed.

        Raises DuplicateDeviceError, and stores nothing, if the list has an id twice.
        """
        return self._replace(merged(self._listed, listed, identities, replicas, containing))

    def share(self, replicas: Mapping[str, int]) -> None:
        """Set, for each device id, the number of containers that may share the device."""
        if replicas != (now := self._listed).replicas:
            self._replace(dataclasses.replace(now, version=now.version + 1, replicas=replicas))

    def forget(self, ids: Iterable[str]) -> bool:
        """Remove these devices, if they are marked as gone; return whether anything changed."""
        return self._replace(without(self._listed, ids))

    def subscribe(self, callback: Callable[[InventorySnapshot], None]) -> Callable[[], None]:
        """Call `callback` in the event loop with each new snapshot; return a function that ends the subscription."""
        key = object()
        self._subscribers[key] = callback
        return lambda: self._subscribers.pop(key, None) and None

    def _replace(self, listed: InventorySnapshot) -> bool:
        if listed is self._listed:
            return False
        self._listed = listed
        self._show(blamed(listed, self.looks.hanging, self.snapshot.version + 1))
        return True

    def _looked(self) -> None:
        """Publish a snapshot after a read of the devices' paths began or ceased to hang.

        While a read hangs, all devices are unhealthy. Otherwise they have the health that the source has listed.
        """
        if self._listed.listed:
            self._show(blamed(self._listed, self.looks.hanging, self.snapshot.version + 1))

    def _show(self, snapshot: InventorySnapshot) -> None:
        self.snapshot = snapshot
        for callback in tuple(self._subscribers.values()):
            callback(snapshot)
