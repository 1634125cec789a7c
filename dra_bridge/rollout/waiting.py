"""Finds pods that wait although a node has enough free devices, because some are for `limits`, others for claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deviceplugin.naming import class_name, whole_quantity
from deviceplugin.register.records import NONE, State
from dra_bridge.kube import DEVICE_CLASSES, PODS, RESOURCE_CLAIMS, Cluster, ForbiddenError, Object
from dra_bridge.rollout.fleet import NodeView, shortened
from dra_bridge.rollout.pods import requests_of


@dataclass(frozen=True, slots=True)
class Wait:
    """An unscheduled pod, and the devices that the pod requests.

    resources: for each extended resource, the requested amount. classes: for each DeviceClass, the number of devices
    that the pod's claims request.
    """

    pod: str
    resources: Mapping[str, int]
    classes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Room:
    """The numbers of one resource's free devices and DRA devices on one node.

    free: the free amount of the extended resource, as the scheduler counts it. per_device: the amount of the extended
    resource that one device provides. dra: number of devices for claims. idle: number of these devices that have no
    holder.
    """

    free: int
    idle: int
    per_device: int
    dra: int


async def waits(cluster: Cluster, views: Sequence[NodeView]) -> list[Wait]:
    """Return the unscheduled pods that may wait for devices of these nodes. Raises ClusterError.

    The function lists claims only if an unscheduled pod requests a resource of these nodes or has claims.
    """
    waiting = (await cluster.list(PODS, field_selector="spec.nodeName=,status.phase=Pending")).items
    resources = {name for view in views if view.reported is not None for name in view.reported.resources}
    if not any(pod["spec"].get("resourceClaims") or resources & requests_of(pod).keys() for pod in waiting):
        return []
    claims = (await cluster.list(RESOURCE_CLAIMS)).items
    return [wait_of(pod, claims) for pod in waiting]


def hints(
    views: Iterable[NodeView],
    nodes: Mapping[str, Object],
    pods: Mapping[str, Sequence[Object]],
    waits: Sequence[Wait],
    taken: Mapping[str, str] = NONE,
) -> list[str]:
    """Return sentences that name moves of devices after which waiting pods could start.

    nodes, pods: for each node's name, the Node and the pods that are bound to the node. taken: see `hints_of`.
    """
    here = [view for view in views if view.node in nodes]
    return [text for view in here for text in hints_of(view, nodes[view.node], pods[view.node], waits, taken)]


async def other_classes(cluster: Cluster, views: Sequence[NodeView]) -> dict[str, tuple[str, str]]:
    """Return `contested_names` for the resources of these nodes. Raises ClusterError.

    If the user may not list DeviceClasses, the result is empty.
    """
    resources = [name for view in views if view.reported is not None for name in view.reported.resources]
    try:
        classes = (await cluster.list(DEVICE_CLASSES)).items
    except ForbiddenError:  # The roles of older manifests lack this right.
        return {}
    return contested_names(resources, classes)


def contested_names(resources: Iterable[str], classes: Sequence[Object]) -> dict[str, tuple[str, str]]:
    """Return, for each resource that several DeviceClasses name, the class that the scheduler uses, and a sentence.

    The scheduler uses the newest class. If classes have the same creation time, the scheduler uses the class whose name
    sorts first (extendedresourcecache.go, kube-scheduler 1.36).
    """
    contested = {}
    for resource in dict.fromkeys(resources):
        mine = [
            device_class["metadata"]
            for device_class in classes
            if device_class["spec"].get("extendedResourceName") == resource
        ]
        named = sorted(mine, key=lambda metadata: str(metadata["name"]))
        if len(named) > 1:
            taken = str(max(named, key=lambda metadata: str(metadata.get("creationTimestamp")))["name"])
            names = ", ".join(str(metadata["name"]) for metadata in named)
            text = f"DeviceClasses {names} all name the extended resource {resource}"
            contested[resource] = taken, f"{text}: pods with limits for it get devices of class {taken}"
    return contested


def hints_of(
    view: NodeView, node: Object, bound: Iterable[Object], waits: Iterable[Wait], taken: Mapping[str, str] = NONE
) -> list[str]:
    """Return a sentence for each resource and side (plugin, DRA) where more devices would let a waiting pod start.

    taken: for each resource that several DeviceClasses name, the class that the scheduler uses. If this is another
    driver's class, no move is named for pods with limits, because that class has to be deleted.
    """
    by_side: dict[tuple[str, bool], str] = {}
    bound = list(bound)
    for resource in view.reported.resources if view.reported is not None else ():
        own = class_name(resource, view.driver)
        room = room_of(view, resource, node, bound)
        for wait in waits:
            if wait.resources.get(resource) and taken.get(resource, own) != own:
                continue
            wanted = wait.resources.get(resource, 0), wait.classes.get(own, 0)
            if (moved := moves_for(room, *wanted)) and (resource, moved > 0) not in by_side:
                by_side[resource, moved > 0] = _hint(view, resource, room, wait.pod, max(wanted), moved)
    return list(by_side.values())


def _hint(view: NodeView, resource: str, room: Room, pod: str, wanted: int, moved: int) -> str:
    side = "DRA" if moved > 0 else "plugin"
    withheld = shortened(device.name for device in view.devices if device.resource == resource and device.withheld)
    withheld = f"; withheld: {withheld}" if withheld else ""
    more = "1 more device" if abs(moved) == 1 else f"{abs(moved)} more devices"
    return (
        f"{view.node}: pod {pod} waits for {wanted} {resource}; {room.free} are free on the plugin side and "
        f"{room.idle} on the DRA side{withheld}. {more} on the {side} side would be enough: "
        f"dra-bridge migrate {view.node} --driver {view.driver} --share {room.dra + moved}"
    )


def moves_for(room: Room, resource: int, devices: int) -> int:
    """Return how many devices would have to move to DRA so that a pod can start; negative for moves to the plugin.

    The result is 0 if no move helps the pod. resource: amount of the extended resource that the pod waits for. devices:
    number of devices that the pod waits for through claims.
    """
    if resource > room.free:
        moved = math.ceil((resource - room.free) / room.per_device)
        return -moved if not devices and moved <= room.idle else 0
    if devices > room.idle:
        moved = devices - room.idle
        return moved if not resource and moved * room.per_device <= room.free else 0
    return 0


def room_of(view: NodeView, resource: str, node: Object, bound: Iterable[Object]) -> Room:
    """Return the free devices of a resource on a node. bound: the pods that are bound to the node.

    The scheduler subtracts the requests of all pods, including pods that got devices through DRA (NodeInfo.update,
    kube-scheduler 1.36).
    """
    status = node.get("status") or {}
    capacity, allocatable = (
        whole_quantity((status.get(key) or {}).get(resource)) for key in ("capacity", "allocatable")
    )
    phases = ("Succeeded", "Failed")
    used = sum(
        requests_of(pod).get(resource, 0) for pod in bound if (pod.get("status") or {}).get("phase") not in phases
    )
    devices = [device for device in view.devices if device.resource == resource and not device.gone]
    dra = [device for device in devices if device.state is State.DRA]
    per_device = capacity // len(devices) if devices and capacity >= len(devices) else 1
    return Room(max(0, allocatable - used), sum(not device.holder for device in dra), per_device, len(dra))


def wait_of(pod: Object, claims: Iterable[Object]) -> Wait:
    """Return the devices for which a pod waits. claims: all claims of the cluster; allocated claims do not count."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    names = [status.get("resourceClaimName") for status in (pod.get("status") or {}).get("resourceClaimStatuses") or ()]
    names += [reference.get("resourceClaimName") for reference in pod["spec"].get("resourceClaims") or ()]
    classes: dict[str, int] = {}
    for claim in claims:
        metadata, allocated = claim["metadata"], (claim.get("status") or {}).get("allocation")
        if metadata["namespace"] != namespace or metadata["name"] not in names or allocated:
            continue
        for request in (claim["spec"].get("devices") or {}).get("requests") or ():
            # Before v1beta2, a request had the fields of `exactly` itself.
            exactly = request.get("exactly") or request
            device_class = exactly.get("deviceClassName", "")
            classes[device_class] = classes.get(device_class, 0) + int(exactly.get("count") or 1)
    return Wait(f"{namespace}/{name}", requests_of(pod), classes)
