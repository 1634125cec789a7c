"""What an agent tells of its devices on its own slice, and how it is read back.

The agent may not write to Nodes, and nobody needs access to the agent: which side each device is
on, who holds it and how far a move is stands in one annotation of the node's own ResourceSlice,
`<driver>/handover`. It changes when a side does, and seldom for a holder alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from deviceplugin import naming
from dra_bridge.ledger import Snapshot, State

__all__ = ["DeviceProgress", "Progress", "ResourceProgress", "annotation", "progress", "read", "share_annotation"]

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
MAX_DEVICES: Final = 1024
"""Devices of a resource that are told one by one."""
MAX_BYTES: Final = 192 * 1024
"""Bytes that all of it may have: an object's annotations may have 256 KiB together, or none of it is taken."""


class DeviceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device. since: Unix seconds. holder: pod or claim as namespace/name. waits: for what.

    gone: the source lists it no more; it counts in no share.
    """

    state: State
    since: int
    holder: str = ""
    waits: str = ""
    gone: bool = False


class ResourceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One resource. share: that is striven for. counts: devices by state, those that are gone not among them."""

    share: str
    counts: dict[str, int]
    devices: dict[str, DeviceProgress] = {}


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One driver on one node.

    asked: the Node's annotation as the agent knows it; "": the config's shares apply. qualifiers: in
    the names of published devices, by resource, also of resources that the driver has no longer.
    """

    resources: dict[str, ResourceProgress]
    asked: str = ""
    qualifiers: dict[str, str] = {}

    @property
    def words(self) -> Mapping[str, str]:
        """The qualifiers; of an agent that does not tell them yet those that its resources had."""
        return self.qualifiers or naming.qualifiers(self.resources)


def annotation(driver: str) -> str:
    """Return the key of the annotation on slices."""
    return f"{driver}/handover"


def share_annotation(driver: str) -> str:
    """Return the key of the annotation on Nodes that asks for a share."""
    return f"{driver}/dra-share"


def progress(
    now: Snapshot,
    resources: Mapping[str, str],
    waits: Mapping[tuple[str, str], str] | None = None,
    *,
    asked: str = "",
    gone: Collection[tuple[str, str]] = (),
    qualifiers: Mapping[str, str] = _NONE,
) -> Progress:
    """Return what is to be told; of resources with too many devices only how many of them are where.

    resources: the share that is striven for by resource. waits: what moves wait for by
    (resource, device). asked: the Node's annotation. gone: devices that no source lists now.
    qualifiers: of published names.
    """
    told = {resource: _resource(now, resource, share, waits or {}, gone) for resource, share in resources.items()}
    while len(encoded(Progress(told, asked, dict(qualifiers))).encode()) > MAX_BYTES:
        name = max(told, key=lambda name: len(told[name].devices))
        if not told[name].devices:
            break
        told[name] = msgspec.structs.replace(told[name], devices={})
    return Progress(told, asked, dict(qualifiers))


def _resource(
    now: Snapshot,
    resource: str,
    share: str,
    waits: Mapping[tuple[str, str], str],
    gone: Collection[tuple[str, str]],
) -> ResourceProgress:
    records = now.of(resource)
    holders: dict[str, str] = {}
    for claim in now.claims.values():
        for of, device in claim.held:
            if of == resource:
                holders[device] = f"claim {claim.title}"
    for hold in now.allocations.values():
        if hold.resource == resource:
            holders[hold.device] = f"pod {hold.pod}" if hold.pod else "a pod"
    counts: dict[str, int] = {}
    for name, record in records.items():
        if (resource, name) not in gone:
            counts[record.state.value] = counts.get(record.state.value, 0) + 1
    devices = {
        name: DeviceProgress(
            record.state,
            int(record.since),
            holders.get(name, ""),
            waits.get((resource, name), ""),
            (resource, name) in gone,
        )
        for name, record in sorted(records.items())
    }
    return ResourceProgress(share, counts, devices if len(devices) <= MAX_DEVICES else {})


def encoded(told: Progress) -> str:
    """Return the annotation's value."""
    return msgspec.json.encode(told, order="deterministic").decode()


def without_holders(told: Progress) -> Progress:
    """Return what changes only with sides and moves, not with each pod."""
    return msgspec.structs.replace(
        told,
        resources={
            name: msgspec.structs.replace(
                resource,
                devices={
                    key: msgspec.structs.replace(one, holder="", waits="") for key, one in resource.devices.items()
                },
            )
            for name, resource in told.resources.items()
        },
    )


def read(driver: str, slices: Iterable[Mapping[str, Any]]) -> Progress | None:
    """Return what a node's slices of a driver tell; None if they tell nothing that can be read."""
    for body in slices:
        metadata = body.get("metadata") or {}
        text = (metadata.get("annotations") or {}).get(annotation(driver))
        if text:
            try:
                return msgspec.json.decode(text, type=Progress)
            except msgspec.MsgspecError:
                return None
    return None
