"""What scans and ListAndWatch say, in the form that the rules of the ledger ask for. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.register.records import Snapshot
from deviceplugin.register.rules import KubeletSnapshot, ObservedAllocation

DeviceIdResolver = Callable[[str], str]
"""Returns the device of one of the kubelet's ids, also of one from before sharing changed (`DeviceIds`)."""


def held_ids(
    scan: HolderSnapshot, resource: str, device_id_of: DeviceIdResolver, title: Callable[[str], str] = str
) -> dict[str, ObservedAllocation]:
    """Return a resource's ids that are held, and by whom. title: a pod's name by its UID, for people."""
    found = {}
    for device_id, allocations in scan.of(resource).items():
        # The most certain holder is shown; what the checkpoint names needs no further reason.
        shown, holding = min(allocations.items(), key=lambda item: (not item[1].certain, item[0]))
        found[device_id] = ObservedAllocation(
            device_id_of(device_id),
            title(shown.pod_uid),
            any(each.certain for each in allocations.values()),
            frozenset((one.pod_uid, one.container) for one in allocations),
            "" if holding.named else holding.reason,
        )
    return found


def kubelet_snapshot(
    sequence: int,
    scan: HolderSnapshot,
    resource: str,
    device_id_of: DeviceIdResolver,
    title: Callable[[str], str] = str,
) -> KubeletSnapshot:
    """Return what a scan found of one resource. sequence: the ledger's before the scan."""
    registered = (scan.registered or {}).get(resource, frozenset())
    return KubeletSnapshot(
        sequence,
        scan.at,
        scan.awake,
        held_ids(scan, resource, device_id_of, title),
        frozenset(map(device_id_of, registered)),
        scan.problem,
    )


def allocations_of(now: Snapshot) -> list[Allocation]:
    """Return the allocations that the ledger knows; after a restart the tracker goes on counting them as held."""
    return [
        Allocation(pod_uid, container, one.resource, one.device_id)
        for one in now.allocations.values()
        for pod_uid, container in one.holders
    ]


def shown_unhealthy(
    devices: Iterable[str], sent: tuple[float, frozenset[str]] | None, device_id_of: DeviceIdResolver
) -> dict[str, float]:
    """Return since when (monotonic seconds) ListAndWatch shows each of these devices with no id Healthy.

    sent: when the last update was sent, and its healthy ids; None if the kubelet does not listen.
    """
    if sent is None:
        return {}
    at, healthy_ids = sent
    healthy = set(map(device_id_of, healthy_ids))
    return {device: at for device in devices if device not in healthy}
