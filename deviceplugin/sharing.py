"""Makes the ids of replicas, by which several containers can hold one device at the same time.

The kubelet gets the ids of replicas as `device::0`, `device::1` and so on. For a device that is not shared, the kubelet
gets the device's own id. So the kubelet's id shows whether the device is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from deviceplugin.device import Device
from deviceplugin.source import DeviceSource

_SEPARATOR: Final = "::"


def shares(source: DeviceSource, devices: Iterable[Device]) -> dict[str, int]:
    """Return, for each device id, the number of containers that may share the device: 1 to `source.replicas`.

    The result is empty if the source shares no device.
    """
    return {device.id: _shares(source, device) for device in devices} if source.replicas != 1 else {}


def _shares(source: DeviceSource, device: Device) -> int:
    try:
        return max(1, min(source.replicas, int(source.replicas_of(device))))
    # The error is ignored here, because `source_check` reports it when the source yields its device list.
    except Exception:
        return source.replicas


def replicas_of(device: str, replicas: int) -> tuple[str, ...]:
    """Return the kubelet ids of a device that `replicas` containers may share."""
    if replicas == 1:
        return (device,)
    return tuple(f"{device}{_SEPARATOR}{number}" for number in range(replicas))


def device_of(name: str, replicas: int) -> str:
    """Return the device id of a kubelet id: the text before `::` for a replica, else the same id."""
    if replicas == 1:
        return name
    device, separator, number = name.rpartition(_SEPARATOR)
    return device if separator and number.isdecimal() else name
