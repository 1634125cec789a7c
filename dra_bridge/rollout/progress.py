"""The agent's report on its devices, an annotation (`<driver>/handover`) of its node's Lease, and how it is read back.

The agent may not write to Nodes. Former agents wrote it on a slice of theirs, which they kept without devices.
The report is written at once when a state changes, and seldom for a holder alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.records import RegisterSnapshot, State

MAX_DEVICES: Final = 1024
"""Of a resource with more devices only their numbers are reported."""
MAX_BYTES: Final = 192 * 1024
"""Of a node's reports: the API server takes 256 KiB for all annotations of an object, and none of them beyond that."""


class DeviceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device. since: Unix seconds. holder: pod or claim as namespace/name. waits: what its move waits for.

    gone: the source does not list it any more, so it counts in no share.
    """

    state: State
    since: int
    holder: str = ""
    waits: str = ""
    gone: bool = False


class ResourceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One resource. share: the one that is in force. counts: devices by state, without those that are gone."""

    share: str
    counts: dict[str, int]
    devices: dict[str, DeviceProgress] = {}


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One driver on one node.

    requested: the share in the Node's annotation as the agent knows it; "": the config's shares apply, or `kept`, which
    was requested on the Node object before this one. qualifiers: in the names of published devices, by resource, also
    of resources that the driver has no longer.
    """

    resources: dict[str, ResourceProgress]
    requested: str = ""
    qualifiers: dict[str, str] = {}
    kept: str = ""


def annotation(driver: str) -> str:
    """Return the key of the annotation on Leases. On slices it has the qualifiers alone; a former agent's has all."""
    return f"{driver}/handover"


def share_annotation(driver: str) -> str:
    """Return the key of the annotation on Nodes that asks for a share."""
    return f"{driver}/dra-share"


def pool_annotation(driver: str) -> str:
    """Return the key of the annotation on Nodes that asks for a pool of the driver also while it has no device."""
    return f"{driver}/dra-pool"


def progress(
    now: RegisterSnapshot,
    shares: Mapping[str, str],
    waits: Mapping[DeviceKey, str],
    *,
    requested: str,
    kept: str = "",
    gone: Collection[DeviceKey],
    qualifiers: Mapping[str, str],
    most: int = MAX_BYTES,
) -> Progress:
    """Return the report, of at most so many bytes. shares: those in force, by resource.

    gone: devices that no source lists now.
    """
    holders = {key: f"claim {claim.title}" for claim in now.claims.values() for key in claim.held}
    for allocation in now.allocations.values():
        holders[allocation.resource, allocation.device] = f"pod {allocation.pod}" if allocation.pod else "a pod"
    resources: dict[str, ResourceProgress] = {}
    for resource, share in shares.items():
        devices = {}
        for name, record in sorted(now.of(resource).items()):
            key = (resource, name)
            devices[name] = DeviceProgress(
                record.state, int(record.since), holders.get(key, ""), waits.get(key, ""), key in gone
            )
        counts = Counter(device.state.value for device in devices.values() if not device.gone)
        resources[resource] = ResourceProgress(share, dict(counts), devices if len(devices) <= MAX_DEVICES else {})
    while len(encoded(report := Progress(resources, requested, dict(qualifiers), kept)).encode()) > most:
        name = max(resources, key=lambda name: len(resources[name].devices))
        if not resources[name].devices:
            break
        resources[name] = msgspec.structs.replace(resources[name], devices={})
    return report


def encoded(report: Progress) -> str:
    """Return the annotation's value."""
    return msgspec.json.encode(report, order="deterministic").decode()


def without_holders(report: Progress) -> Progress:
    """Return the part that changes only with states, not with each pod."""
    resources = {}
    for name, resource in report.resources.items():
        devices = {
            key: msgspec.structs.replace(device, holder="", waits="") for key, device in resource.devices.items()
        }
        resources[name] = msgspec.structs.replace(resource, devices=devices)
    return msgspec.structs.replace(report, resources=resources)


def read(driver: str, objects: Iterable[Mapping[str, Any]]) -> Progress | None:
    """Return the first report of a driver in a node's objects; None if there is none, or it cannot be read."""
    for body in objects:
        if text := ((body.get("metadata") or {}).get("annotations") or {}).get(annotation(driver)):
            try:
                return msgspec.json.decode(text, type=Progress)
            except msgspec.MsgspecError:
                return None
    return None
