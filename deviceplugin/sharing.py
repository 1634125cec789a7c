"""Replicas of a device: one physical device offered to several containers at once.

The kubelet sees `device::0`, `device::1`, ...; hooks and containers see the device. A device that is not shared keeps
its own id, so that an id says whether its holder has the device alone.
"""

from __future__ import annotations

from typing import Final

SEPARATOR: Final = "::"


def replicas_of(device: str, replicas: int) -> tuple[str, ...]:
    """Return the ids under which the kubelet knows a device that is offered `replicas` times."""
    if replicas == 1:
        return (device,)
    return tuple(f"{device}{SEPARATOR}{number}" for number in range(replicas))


def device_of(name: str, replicas: int) -> str:
    """Return the device behind an id of the kubelet's; the id itself if it is none of a replica."""
    if replicas == 1:
        return name
    device, separator, number = name.rpartition(SEPARATOR)
    return device if separator and number.isdecimal() else name
