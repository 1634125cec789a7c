"""The list of devices as the kubelet gets it, and the ids in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from deviceplugin.device import Device
from deviceplugin.inventory import Inventory, Snapshot
from deviceplugin.sharing import device_of, replicas_of
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb

MAX_LIST_BYTES: Final = 4 * 1024 * 1024
"""The kubelet takes no larger message and shows a capacity of 0 (kubernetes#109304)."""
ANY_REPLICAS: Final = 2
"""As good as any number above 1 for telling which device a replica belongs to."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list that the kubelet gets."""

    name: str
    healthy: bool
    numa: tuple[int, ...]


def entries(
    snapshot: Snapshot,
    *,
    names_of: Callable[[Device], Iterable[str]],
    with_topology: bool = True,
    offers: Callable[[str], bool] = lambda device: True,
    withheld: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Return what the kubelet is to see of a snapshot.

    names_of: under which ids the kubelet knows a device; several, if it is shared.
    offers: whether the plugin side offers a device. withheld: ids that are not offered.
    A device of unknown health is shown healthy: only a device known to be broken is withdrawn.
    A device that is not offered is shown unhealthy, never dropped.
    """
    return tuple(
        Entry(
            name,
            device.health.usable and offers(device.id) and name not in withheld,
            device.numa_nodes if with_topology else (),
        )
        for device in snapshot.devices.values()
        for name in names_of(device)
    )


def rendered(lines: Iterable[Entry]) -> pb.ListAndWatchResponse:
    """Return the message of the list."""
    response = pb.ListAndWatchResponse()
    for line in lines:
        device = response.devices.add(ID=line.name, health="Healthy" if line.healthy else "Unhealthy")
        for node in line.numa:
            device.topology.nodes.add(ID=node)
    return response


def too_large(resource: str, count: int, size: int) -> str:
    """Return the error of a list that the kubelet would not take."""
    return (
        f"{resource}: the list of {count} devices has {size} bytes, more than the {MAX_LIST_BYTES} that the kubelet "
        "takes; it is not sent. Use shorter device ids, fewer devices or replicas, or leave the topology out"
    )


class DeviceIds:
    """The ids under which the kubelet knows the devices of one resource.

    A legacy id is one from before the number of replicas changed: a pod may have it. While there is one, its device
    is not allocated if the id stands for the whole device, or if the device is not shared now.
    """

    def __init__(self, source: DeviceSource, inventory: Inventory) -> None:
        self._source = source
        self._inventory = inventory
        self.legacy: Mapping[str, str] = {}
        """The legacy ids and their devices."""

    def offered(self) -> tuple[str, ...]:
        """Return the ids under which the devices are offered now."""
        return tuple(name for device in self._inventory.snapshot.devices.values() for name in self.names_of(device))

    def replace(self, source: DeviceSource) -> None:
        """Use the ids of another source from now on; those that it would not offer become legacy ids."""
        before = {**{name: self.device_id_of(name) for name in self.offered()}, **self.legacy}
        self._source = source
        now = frozenset(self.offered())
        self.legacy = {name: device for name, device in before.items() if name not in now}

    def forget(self, names: Iterable[str]) -> None:
        """Forget legacy ids."""
        drop = set(names)
        self.legacy = {name: device for name, device in self.legacy.items() if name not in drop}

    def adopt_existing(self, names: Iterable[str]) -> frozenset[str]:
        """Make legacy ids of those that pods have from before this agent began.

        Returns those of devices that are not listed: they may be plugged in again, and are not shown until then.
        """
        known, offered = self._inventory.snapshot.devices, {*self.offered(), *self.legacy}
        ids = {name: self.device_id_of(name) for name in names if name not in offered}
        adopted = {name: device for name, device in ids.items() if device in known}
        self.legacy = {**self.legacy, **adopted}
        return frozenset(ids.keys() - adopted.keys())

    def device_id_of(self, name: str) -> str:
        """Return the device of one of the kubelet's ids, also of one from before sharing changed."""
        known = self._inventory.snapshot.devices.get(self.offered_as(name))
        if name in self.legacy and (known is None or name not in self.names_of(known)):
            return self.legacy[name]
        return known.id if known is not None else device_of(name, ANY_REPLICAS)

    def names_of(self, device: Device) -> tuple[str, ...]:
        """Return the ids under which the kubelet knows a device now."""
        if self._source.replicas == 1:
            return (device.id,)
        names = replicas_of(device.id, self._source.replicas_of(device))
        if len(names) == 1 and device_of(device.id, ANY_REPLICAS) != device.id:
            return replicas_of(device.id, ANY_REPLICAS)[:1]  # it is called like another one's replica
        return names

    def ids_of(self, device: str) -> tuple[str, ...]:
        """Return all ids under which the kubelet may know a device, those from before sharing changed included."""
        known = self._inventory.snapshot.devices.get(device)
        now = self.names_of(known) if known is not None else (device,)
        return (*now, *(name for name, one in self.legacy.items() if one == device))

    def offered_as(self, name: str) -> str:
        """Return the device of an id that the kubelet may know now; the id itself if there is none."""
        known = self._inventory.snapshot.devices.get(name)
        if known is not None and self.names_of(known) == (name,):
            return name
        return device_of(name, self._source.replicas)

    def kept(self) -> Mapping[str, str]:
        """Return the devices that a pod may have alone though they are shared now, or the reverse, and such an id."""
        kept: dict[str, str] = {}
        for name, device in self.legacy.items():
            known = self._inventory.snapshot.devices.get(device)
            if known is not None and (name == device or self.names_of(known) == (device,)):
                kept.setdefault(device, name)
        return kept
