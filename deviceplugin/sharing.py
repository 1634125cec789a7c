"""Replicas of a device, which several containers may have at once.

The kubelet knows them as `device::0`, `device::1` and so on. A device that is not shared keeps its own id: an id tells
whether its holder has the device alone.
"""

from __future__ import annotations

from typing import Final

from deviceplugin.device import Device
from deviceplugin.source import DeviceSource

_SEPARATOR: Final = "::"


def times_offered(source: DeviceSource, device: Device) -> int:
    """Return how many containers may share a device: 1 to `replicas`, also if `replicas_of` has begun to fail."""
    if source.replicas == 1:
        return 1
    try:
        return max(1, min(source.replicas, int(source.replicas_of(device))))
    except Exception:  # the author's code; when a device is listed `source_check` raises what is wrong with it
        return source.replicas


def replicas_of(device: str, replicas: int) -> tuple[str, ...]:
    """Return the kubelet's ids for a device that is offered `replicas` times."""
    if replicas == 1:
        return (device,)
    return tuple(f"{device}{_SEPARATOR}{number}" for number in range(replicas))


def device_of(name: str, replicas: int) -> str:
    """Return the device of an id of the kubelet's; the id itself if it is not of a replica."""
    if replicas == 1:
        return name
    device, separator, number = name.rpartition(_SEPARATOR)
    return device if separator and number.isdecimal() else name
