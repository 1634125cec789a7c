"""The list of devices as the kubelet gets it (ListAndWatchResponse)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from deviceplugin.device import Device
from deviceplugin.inventory import Snapshot
from deviceplugin.wire import deviceplugin_pb2 as pb

__all__ = ["HEALTHY", "MAX_LIST_BYTES", "UNHEALTHY", "Entry", "entries", "rendered", "too_large"]

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"
MAX_LIST_BYTES: Final = 4 * 1024 * 1024
"""The kubelet takes no larger message and shows a capacity of 0 (kubernetes#109304)."""


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
    offers: Callable[[str], bool] | None = None,
) -> tuple[Entry, ...]:
    """Return what the kubelet is to see of a snapshot.

    names_of: under which ids the kubelet knows a device; several, if it is shared.
    A device of unknown health is shown healthy: only a device known to be broken is withdrawn.
    A device that the plugin side does not offer is shown unhealthy, never dropped.
    """
    return tuple(
        Entry(
            name,
            device.health.usable and (offers is None or offers(device.id)),
            device.numa_nodes if with_topology else (),
        )
        for device in snapshot.devices.values()
        for name in names_of(device)
    )


def rendered(lines: Iterable[Entry]) -> pb.ListAndWatchResponse:
    """Return the message of the list."""
    response = pb.ListAndWatchResponse()
    for line in lines:
        device = response.devices.add(ID=line.name, health=HEALTHY if line.healthy else UNHEALTHY)
        for node in line.numa:
            device.topology.nodes.add(ID=node)
    return response


def too_large(resource: str, count: int, size: int) -> str:
    """Return what to say of a list that the kubelet would not take."""
    return (
        f"{resource}: the list of {count} devices has {size} bytes, more than the {MAX_LIST_BYTES} that the kubelet "
        "takes; it is not sent. Use shorter device ids, fewer devices or replicas, or leave the topology out"
    )
