"""Writes and reads an agent's report on its devices, in the annotation `<driver>/handover` of the node's Lease.

The report is not on the Node, because the agent has no right to write annotations of Nodes. Older agents wrote the
report on one of their ResourceSlices, and kept a ResourceSlice for the report even without devices. The agent writes
the report at once when a device's state changes, but less often if only a holder changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.records import RegisterSnapshot, State

MAX_DEVICES: Final = 1024
"""If a resource has more devices than this number, the report has only the number of the resource's devices in each
state."""
MAX_BYTES: Final = 192 * 1024
"""Maximum bytes of a node's reports, because the API server accepts 256 KiB for all annotations of an object."""


class DeviceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device in a report.

    since: when the device entered `state` (Unix seconds). waits: the event for which the device's move between plugin
    and DRA waits.

    holder: the pod or claim that holds the device, as text. gone: whether the device source does not list the device
    any more; such a device is not counted in the comparison of the DRA devices with the share.
    """

    state: State
    since: int
    holder: str = ""
    waits: str = ""
    gone: bool = False


class ResourceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One resource in a report. share: the share that applies now.

    counts: for each state, the number of devices (without gone devices).
    """

    share: str
    counts: dict[str, int]
    devices: dict[str, DeviceProgress] = {}


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent's report on one driver on one node.

    requested: the share that the agent has read from the Node's annotation. If this share is "", the share `kept`
    applies, or else the config's share. kept: the share that a former Node object of this node had requested.
    qualifiers: for each resource, the prefix of its published device names; also for resources that the driver does not
    have any more.
    """

    resources: dict[str, ResourceProgress]
    requested: str = ""
    qualifiers: dict[str, str] = {}
    kept: str = ""


_DECODER: Final = msgspec.json.Decoder(Progress)


def annotation(driver: str) -> str:
    """Return the key of the annotation with the report. On a Lease, the annotation has the whole report.

    On a ResourceSlice, the annotation has only the report's qualifiers; older agents wrote the whole report there.
    """
    return f"{driver}/handover"


def share_annotation(driver: str) -> str:
    """Return the key of the Node annotation that requests a share."""
    return f"{driver}/dra-share"


def pool_annotation(driver: str) -> str:
    """Return the key of the Node annotation that requests a pool of the driver from the agent, even without devices."""
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
    """Return the agent's report.

    If the report would exceed `most` bytes, the report has for the largest resources only the number of devices in each
    state. shares: for each resource, the share that applies now. gone: devices that no device source lists now.
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
    """Return a report as JSON, the value of the annotation."""
    return msgspec.json.encode(report, order="deterministic").decode()


def without_holders(report: Progress) -> Progress:
    """Return the report without `holder` and `waits`, so that the result changes only if a device's state changes."""
    resources = {}
    for name, resource in report.resources.items():
        devices = {
            key: msgspec.structs.replace(device, holder="", waits="") for key, device in resource.devices.items()
        }
        resources[name] = msgspec.structs.replace(resource, devices=devices)
    return msgspec.structs.replace(report, resources=resources)


def read(driver: str, objects: Iterable[Mapping[str, Any]]) -> Progress | None:
    """Return the first report of a driver in the annotations of a node's Leases or ResourceSlices.

    The result is None if there is no report, or if the report cannot be parsed.
    """
    for body in objects:
        if text := ((body.get("metadata") or {}).get("annotations") or {}).get(annotation(driver)):
            try:
                return _DECODER.decode(text)
            except msgspec.MsgspecError:
                return None
    return None
