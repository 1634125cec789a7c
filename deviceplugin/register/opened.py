"""Finds the device nodes that the containers of allocations can open: those to which the granted paths lead now.

The AllocateResponse of a container names host paths, and the kubelet keeps the response until the pod ends. So a
container that restarts gets the nodes at these paths, not at the paths that the configuration has given to the device
since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from deviceplugin import identity
from deviceplugin.device import Device, DeviceNode
from deviceplugin.exclusion import DeviceConflictError, DeviceKey, titled
from deviceplugin.identity import UNIDENTIFIED, Identity, Tokens
from deviceplugin.inventory import Inventory
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register.records import Allocation, AllocationRecord, RegisterSnapshot

PathsOf = Callable[[Collection[Allocation]], frozenset[str] | None]
"""A function that returns the host paths in the AllocateResponses of allocations; None if these are not known."""


def granted_paths(
    record: AllocationRecord, paths_of: PathsOf, begun: Iterable[Allocation] = ()
) -> frozenset[str] | None:
    """Return the host paths that the containers of an id can have; None if they are not known.

    begun: the allocations in the kubelet's checkpoint that belong to a pending grant of the id.
    """
    named = {allocation for allocation in begun if allocation[2:] == (record.resource, record.device_id)}
    if record.former or (record.pending and not named):
        return None
    return paths_of({Allocation(*holder, record.resource, record.device_id) for holder in record.holders} | named)


async def tokens_at_paths(
    state: RegisterSnapshot,
    identities: Mapping[DeviceKey, Identity],
    inventories: Mapping[str, Inventory],
    paths_of: PathsOf,
) -> dict[AllocationRecord, Tokens]:
    """Return, for each allocation whose device has further paths now, the tokens at the granted paths.

    An allocation is left out if its granted paths are not known, or if a read of them hangs. identities: the devices'
    present identities. inventories: for each resource, the inventory of its devices.
    """
    found: dict[AllocationRecord, Tokens] = {}
    for record in state.allocations.values():
        key, before = (record.resource, record.device), record.identity
        if before.reaching(identities.get(key, UNIDENTIFIED)) == before or record.resource not in inventories:
            continue
        inventory = inventories[record.resource]
        device, paths = inventory.snapshot.devices.get(record.device), granted_paths(record, paths_of)
        if device is None or paths is None:
            continue
        if paths.issuperset((*device.hosts, *(mount.host for mount in device.edits.mounts))):
            continue
        with contextlib.suppress(LookTimeoutError):
            found[record] = await inventory.looks.at("adopt", identity.identity_of, paths, brief=True)
    return found


def started(device: Device, *, usb: bool, paths: frozenset[str] | None) -> Sequence[DeviceNode | str]:
    """Return those nodes of a device that a starting container gets, and whose numbers can change.

    usb: whether the device is a USB device. paths: the granted host paths; None if they are not known.
    """
    nodes = device.nodes if usb else device.links
    if paths is None or paths.isdisjoint(device.hosts):
        return nodes
    return [node for node in nodes if not (isinstance(node, DeviceNode) and node.target and node.host not in paths)]


async def check_away(inventory: Inventory, record: AllocationRecord | None, boot: str) -> None:
    """Raise DeviceConflictError if an unlisted device no longer has a device number that its grant recorded.

    record: the record of the device's id, if there is one. Raises LookTimeoutError if a read of sysfs hangs.
    """
    if record is None:
        return
    granted = record.identity.in_boot(boot)
    if lost := await inventory.looks.at("start", identity.moved, identity.reachable(granted), granted, brief=True):
        named = titled((record.resource, record.device))
        raise DeviceConflictError(f"{named} is away, and {identity.shown(lost)} is no longer its device number")
