"""Replicas of a device, which several containers may have at once.

The kubelet knows them as `device::0`, `device::1` and so on. A device that is not shared keeps its own id: an id tells
whether its holder has the device alone.
"""

from __future__ import annotations

from typing import Final

_SEPARATOR: Final = "::"


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
