"""Finds devices that exclude each other because of their hardware, also devices of different resources.

All functions are pure.

Two devices exclude each other if they are the same hardware: their identities have a token (such as a device number) in
common. A device and its parts exclude each other. Two partitions also exclude each other if they consume the same
counters, and the counters do not suffice for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from deviceplugin.device import Device, natural
from deviceplugin.identity import Tokens, agree, identified, shown
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.naming import parse_quantity

NO_TOKENS: Final[Tokens] = frozenset()
DeviceKey = tuple[str, str]
"""The key of a device: (resource, device id)."""
Counters = Mapping[str, Mapping[str, Fraction]]
"""A mapping from the name of each counter set to a mapping from the name of each counter in the set to its amount."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of a device: its identity tokens and its counters.

    scope: the driver, or the resource if it has no driver. Equal names of counter sets mean the same counter set only
    within one scope. within: the tokens of larger devices of which the device is a part.
    """

    tokens: Tokens = frozenset()
    scope: str = ""
    consumes: Counters = field(default_factory=dict)
    counters: Counters = field(default_factory=dict)
    within: Tokens = frozenset()


def hardware_of(device: Device, tokens: Tokens, scope: str, within: Tokens = NO_TOKENS) -> Hardware:
    """Return the hardware of a device. tokens: the device's identity tokens. scope, within: as in `Hardware`."""

    def amounts(counters: Mapping[str, Mapping[str, int | str]]) -> Counters:
        return {
            name: {counter: parse_quantity(value) for counter, value in values.items()}
            for name, values in counters.items()
        }

    return Hardware(tokens, scope, amounts(device.consumes), amounts(device.counters), within)


def hardware_in(now: InventorySnapshot, scope: str) -> dict[DeviceKey, Hardware]:
    """Return the hardware of the devices of a resource, except devices of which no hardware is known.

    scope: as in `Hardware`.
    """
    hardware: dict[DeviceKey, Hardware] = {}
    for device in now.devices.values():
        its = hardware_of(device, now.identities.get(device.id, NO_TOKENS), scope, now.larger.get(device.id, NO_TOKENS))
        if its.tokens or its.consumes or its.counters or its.within:
            hardware[now.resource, device.id] = its
    return hardware


class DeviceConflictError(Exception):
    """Raised when a device cannot be granted because of other holders, or because its hardware was replaced."""


def titled(key: DeviceKey) -> str:
    """Return a text that names a device, for messages."""
    return f"{key[1]} of {key[0]}"


def other_hardware(key: DeviceKey, granted: Tokens, now: Tokens) -> str:
    """Return an error text if a device key stands now for other hardware than at the grant to its holder, else ""."""
    if agree(now, granted):
        return ""
    return f"{titled(key)} is not what its holder was given: {shown(granted)}, now {shown(now)}"


def natural_key(key: DeviceKey) -> tuple[str, tuple[object, ...]]:
    """Return a sort key for devices: by resource, then by device id in natural order (2 before 10)."""
    return key[0], natural(key[1])


class HardwareIndex:
    """Has the hardware of all devices of this process at one moment, and finds the devices that exclude each other.

    boot: the id of the node's boot.
    """

    def __init__(self, hardware: Mapping[DeviceKey, Hardware], boot: str = "") -> None:
        self._hardware = hardware
        self._by_token: dict[str, set[DeviceKey]] = {}
        self._by_any_token: dict[str, set[DeviceKey]] = {}
        self._by_set: dict[tuple[str, str], set[DeviceKey]] = {}
        self._capacity: dict[tuple[str, str], Mapping[str, Fraction]] = {}
        for key, value in hardware.items():
            for token in value.tokens:
                self._by_token.setdefault(token, set()).add(key)
            for token in value.tokens | value.within:
                self._by_any_token.setdefault(token, set()).add(key)
            for name in value.consumes:
                self._by_set.setdefault((value.scope, name), set()).add(key)
            for name, amounts in value.counters.items():
                if self._capacity.setdefault((value.scope, name), amounts) != amounts:
                    # Two devices declare this counter set with different contents, so its capacity is unknown.
                    self._capacity[value.scope, name] = {}
        together = [*self._by_token.values(), *self._by_set.values()]
        self.related = frozenset(key for keys in together if len(keys) > 1 for key in keys)
        """Each of these devices has peers: other devices with the same hardware or counter set."""
        owned = (keys for token, keys in self._by_any_token.items() if token in self._by_token)
        self.touched = self.related.union(*(keys for keys in owned if len(keys) > 1))
        """Each of these devices touches another device (`touching`)."""
        self.tokens_by_device: Final = {key: value.tokens for key, value in hardware.items()}
        self.identities: Final = {
            key: identified(value.tokens, boot, within=value.within) for key, value in hardware.items()
        }
        """For each device, the identity that is recorded for a holder."""
        self.larger: Final = {key: value.within for key, value in hardware.items() if value.within}
        """For each device that is a part of larger devices (`InventorySnapshot.larger`), their tokens."""
        self.listed: Final = frozenset(self._by_any_token)
        """The identity tokens of all devices, and of the larger devices of which they are parts."""

    def tokens(self, key: DeviceKey) -> Tokens:
        """Return a device's identity tokens; an empty set if they are unknown."""
        return self.tokens_by_device.get(key, NO_TOKENS)

    def having_any(self, tokens: Iterable[str]) -> frozenset[DeviceKey]:
        """Return the keys of the devices that have one of these identity tokens, or are parts of such a device."""
        return frozenset(key for token in tokens for key in self._by_any_token.get(token, ()))

    def limits(self) -> dict[tuple[str, str, str], Fraction]:
        """Return, for each (scope, counter set, counter), the capacity of the counter.

        If two devices declare a counter set with different contents, the result does not contain this counter set.
        """
        return {(*of, counter): amount for of, amounts in self._capacity.items() for counter, amount in amounts.items()}

    def aliases(self, key: DeviceKey) -> frozenset[DeviceKey]:
        """Return the other devices, listed under other ids or resources, that are the same hardware as a device."""
        return frozenset(other for token in self.tokens(key) for other in self._by_token[token]) - {key}

    def peers(self, key: DeviceKey) -> frozenset[DeviceKey]:
        """Return the other devices that are the same hardware as a device, or consume one of its counter sets."""
        if key not in self.related:
            return frozenset()
        hardware = self._hardware[key]
        parts = (other for name in hardware.consumes for other in self._by_set[hardware.scope, name])
        return (self.aliases(key) | frozenset(parts)) - {key}

    def touching(self, key: DeviceKey) -> frozenset[DeviceKey]:
        """Return the peers of a device, its parts, and the devices of which it is a part."""
        if key not in self.touched:
            return frozenset()
        wholes = (other for token in self.larger.get(key, ()) for other in self._by_token.get(token, ()))
        return self.peers(key).union(wholes, self.having_any(self.tokens(key))) - {key}

    def group(self, key: DeviceKey, within: Iterable[DeviceKey]) -> tuple[DeviceKey, ...]:
        """Return a device, its peers among `within`, the peers of these peers among `within`, and so on."""
        allowed, group, new = frozenset(within), {key}, {key}
        while new:
            new = {peer for member in new for peer in self.peers(member)} & allowed - group
            group |= new
        return tuple(sorted(group, key=natural_key))
