"""Chooses, for GetPreferredAllocation, the devices that a container should get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

from deviceplugin.inventory import InventorySnapshot
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.source import DeviceSource

MANY: Final = 64
"""If more than this number of devices have no links, `choice` compares NUMA nodes instead of pairs of devices."""


def avoiding(
    avoided: Collection[str], ids: DeviceIds, available: list[str], must_include: list[str], size: int
) -> tuple[list[str], list[str]]:
    """Return (available, must_include), changed so that avoided devices are chosen only if there are too few others.

    avoided: the devices' ids. available, must_include: kubelet device ids. size: the number of ids that the container
    gets.
    """
    if not avoided:
        return available, must_include
    first = [name for name in available if name in must_include or ids.offered_as(name) not in avoided]
    if len({*first, *must_include}) >= size:
        return first, must_include
    return available, list(dict.fromkeys((*must_include, *first)))


def choice(
    source: DeviceSource,
    snapshot: InventorySnapshot,
    ids: DeviceIds,
    available: list[str],
    must_include: list[str],
    size: int,
) -> list[str]:
    """Return the ids that the source's policy chooses for a container. size: the number of ids to choose."""
    # `topology` is imported only when it is needed: an agent with vendors' plugins alone does not need the module.
    from deviceplugin import topology

    devices = snapshot.devices
    physical = {name: ids.offered_as(name) for name in (*available, *must_include)}
    numa = {name: devices[name].numa_nodes for name in set(physical.values()) if name in devices and source.topology}
    score = source.links if source.policy == "links" else {}
    if source.policy == "links" and not score:
        if source.replicas == 1 or len(numa) > MANY:
            nodes = {name: numa.get(device, ()) for name, device in physical.items()}
            return topology.numa_compact(nodes, available, must_include, size)
        score = topology.numa_scores(numa)
    if source.policy == "distributed":  # The policy `distributed` also counts ids in use.
        physical = {name: device.id for device in devices.values() for name in ids.names_of(device)}
    return topology.choose(source.policy, available, must_include, size, score=score, physical=physical)


def as_names(
    ids: Iterable[str], available: Iterable[str], must_include: Iterable[str], device_of: Callable[[str], str]
) -> list[str] | None:
    """Convert the device ids from the hook `prefer` to available kubelet ids; None if a device is not available."""
    chosen = list(dict.fromkeys(must_include))
    free: dict[str, list[str]] = {}
    for name in available:
        if name not in chosen:
            for device_id in {name, device_of(name)}:
                free.setdefault(device_id, []).append(name)
    included = Counter(map(device_of, chosen))
    for device_id in ids:
        if device_id in chosen:
            continue
        if included[device_id] > 0:  # An id of this device is already in must_include.
            included[device_id] -= 1
            continue
        first = next((name for name in free.get(device_id, ()) if name not in chosen), None)
        if first is None:
            return None
        chosen.append(first)
    return chosen
