"""Which devices exclude each other, whatever their ids and resources. Pure.

Two devices exclude each other as aliases if their identities have a token in common, and as parts if they consume the
same counters and these do not suffice for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from deviceplugin.device import Device, natural
from deviceplugin.identity import Tokens
from deviceplugin.naming import parse_quantity

DeviceKey = tuple[str, str]
"""(resource, device)."""
Counters = Mapping[str, Mapping[str, Fraction]]
"""Amounts by counter set and counter."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a device stands for: what decides whether it excludes others.

    scope: within which names of counter sets mean the same: the driver, or the resource if it has none.
    """

    tokens: Tokens = frozenset()
    scope: str = ""
    consumes: Counters = field(default_factory=dict)
    counters: Counters = field(default_factory=dict)


def hardware_of(device: Device, tokens: Tokens, scope: str) -> Hardware:
    """Return what a device stands for."""

    def amounts(counters: Mapping[str, Mapping[str, int | str]]) -> Counters:
        return {
            name: {counter: parse_quantity(value) for counter, value in values.items()}
            for name, values in counters.items()
        }

    return Hardware(tokens, scope, amounts(device.consumes), amounts(device.counters))


class DeviceConflictError(Exception):
    """Raised when a device cannot be given away beside what others hold, or is not what it was listed as."""


NO_TOKENS: Final[Tokens] = frozenset()


def titled(key: DeviceKey) -> str:
    """Return a device for messages."""
    return f"{key[1]} of {key[0]}"


def natural_key(key: DeviceKey) -> tuple[str, tuple[object, ...]]:
    """Return what sorts devices by resource and then as people do: 2 before 10."""
    return key[0], natural(key[1])


class HardwareIndex:
    """What all devices of this process stand for at one moment."""

    def __init__(self, hardware: Mapping[DeviceKey, Hardware]) -> None:
        self._hardware = hardware
        self._by_token: dict[str, set[DeviceKey]] = {}
        self._by_set: dict[tuple[str, str], set[DeviceKey]] = {}
        self._capacity: dict[tuple[str, str], Mapping[str, Fraction]] = {}
        for key, value in hardware.items():
            for token in value.tokens:
                self._by_token.setdefault(token, set()).add(key)
            for name in value.consumes:
                self._by_set.setdefault((value.scope, name), set()).add(key)
            for name, amounts in value.counters.items():
                if self._capacity.setdefault((value.scope, name), amounts) != amounts:
                    self._capacity[value.scope, name] = {}  # two devices disagree: not known
        together = [*self._by_token.values(), *self._by_set.values()]
        self.related = frozenset(key for keys in together if len(keys) > 1 for key in keys)
        """Devices that have peers."""
        self.tokens_by_device: Final = {key: value.tokens for key, value in hardware.items()}
        self.listed: Final = frozenset(self._by_token)
        """All tokens of all devices."""

    def tokens(self, key: DeviceKey) -> Tokens:
        """Return a device's tokens, none if they are not known."""
        return self.tokens_by_device.get(key, NO_TOKENS)

    def having(self, token: str) -> frozenset[DeviceKey]:
        """Return the devices that have a token."""
        return frozenset(self._by_token.get(token, ()))

    def limits(self) -> dict[tuple[str, str, str], Fraction]:
        """Return how much there is of each counter, by scope, counter set and counter; none of which devices differ."""
        return {(*of, counter): amount for of, amounts in self._capacity.items() for counter, amount in amounts.items()}

    def aliases(self, key: DeviceKey) -> frozenset[DeviceKey]:
        """Return the other devices that are the same hardware."""
        return frozenset(other for token in self.tokens(key) for other in self._by_token[token]) - {key}

    def peers(self, key: DeviceKey) -> frozenset[DeviceKey]:
        """Return the other devices that are the same hardware, or parts of it."""
        if key not in self.related:
            return frozenset()
        hardware = self._hardware[key]
        parts = (other for name in hardware.consumes for other in self._by_set[hardware.scope, name])
        return (self.aliases(key) | frozenset(parts)) - {key}

    def group(self, key: DeviceKey, within: Iterable[DeviceKey]) -> tuple[DeviceKey, ...]:
        """Return a device with its peers among `within`, their peers and so on."""
        allowed, group, new = frozenset(within), {key}, {key}
        while new:
            new = {peer for member in new for peer in self.peers(member)} & allowed - group
            group |= new
        return tuple(sorted(group, key=natural_key))
