"""Which devices exclude each other, whatever their ids and resources. Pure.

Two devices exclude each other as aliases if their identities have a token in common, and as parts if they consume the
same counters and these do not suffice for both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from deviceplugin.device import Device
from deviceplugin.identity import Tokens, same_thing, shown
from deviceplugin.naming import parse_quantity
from deviceplugin.topology import natural

Key = tuple[str, str]
"""(resource, device)."""
Held = Mapping[Key, Tokens]
"""The devices that have holders, and their tokens when they were granted, as far as these are known."""
Counters = Mapping[str, Mapping[str, Fraction]]
"""Amounts by counter set and counter."""


@dataclass(frozen=True, slots=True)
class Thing:
    """What decides whether a device excludes others. shared: it is given to several holders at once.

    scope: within which names of counter sets mean the same: the driver, or the resource if it has none.
    """

    tokens: Tokens = frozenset()
    scope: str = ""
    consumes: Counters = field(default_factory=dict)
    counters: Counters = field(default_factory=dict)
    shared: bool = False


def thing_of(device: Device, tokens: Tokens, scope: str, *, shared: bool = False) -> Thing:
    """Return a device as the rules here see it."""

    def amounts(counters: Mapping[str, Mapping[str, int | str]]) -> Counters:
        return {
            name: {one: parse_quantity(value) for one, value in values.items()} for name, values in counters.items()
        }

    return Thing(tokens, scope, amounts(device.consumes), amounts(device.counters), shared)


_UNKNOWN: Final = Thing()


def titled(key: Key) -> str:
    """Return a device for messages."""
    return f"{key[1]} of {key[0]}"


def natural_key(key: Key) -> tuple[str, tuple[object, ...]]:
    """Return what sorts devices by resource and then as people do: 2 before 10."""
    return key[0], natural(key[1])


class Things:
    """All devices of this process at one moment."""

    def __init__(self, things: Mapping[Key, Thing]) -> None:
        self._things = things
        self._by_token: dict[str, set[Key]] = {}
        self._by_set: dict[tuple[str, str], set[Key]] = {}
        self._capacity: dict[tuple[str, str], Mapping[str, Fraction]] = {}
        for key, thing in things.items():
            for token in thing.tokens:
                self._by_token.setdefault(token, set()).add(key)
            for name in thing.consumes:
                self._by_set.setdefault((thing.scope, name), set()).add(key)
            for name, amounts in thing.counters.items():
                if self._capacity.setdefault((thing.scope, name), amounts) != amounts:
                    self._capacity[thing.scope, name] = {}  # two devices disagree: not known
        together = [*self._by_token.values(), *self._by_set.values()]
        self.related = frozenset(key for keys in together if len(keys) > 1 for key in keys)
        """Devices that have peers."""
        self.shared_tokens = frozenset(token for thing in things.values() if thing.shared for token in thing.tokens)

    def tokens(self, key: Key) -> Tokens:
        """Return a device's tokens, none if they are not known."""
        return self._things.get(key, _UNKNOWN).tokens

    def shared(self, key: Key) -> bool:
        """Return whether a device is given to several holders at once."""
        return self._things.get(key, _UNKNOWN).shared

    def excluded(self, key: Key, tokens: Tokens) -> bool:
        """Return whether a holder that got these tokens by this id excludes more than this id's next holder."""
        other = tokens - self.tokens(key)
        return not same_thing(tokens, self.tokens(key)) or any(token in self._by_token for token in other)

    def aliases(self, key: Key) -> frozenset[Key]:
        """Return the other devices that are the same thing."""
        return frozenset(other for token in self.tokens(key) for other in self._by_token[token]) - {key}

    def peers(self, key: Key) -> frozenset[Key]:
        """Return the other devices that are the same thing, or parts of the same thing."""
        if key not in self.related:
            return frozenset()
        thing = self._things[key]
        parts = (other for name in thing.consumes for other in self._by_set[thing.scope, name])
        return (self.aliases(key) | frozenset(parts)) - {key}

    def group(self, key: Key, within: Iterable[Key]) -> tuple[Key, ...]:
        """Return a device with its peers among `within`, their peers and so on."""
        allowed, found, new = frozenset(within), {key}, {key}
        while new:
            new = {peer for one in new for peer in self.peers(one)} & allowed - found
            found |= new
        return tuple(sorted(found, key=natural_key))

    def conflict(self, wanted: Iterable[Key], held: Held) -> str:
        """Return why devices cannot be given to one holder beside what is held; "" if they can.

        A device that is held already excludes itself only if it is not what its holder got.
        """
        beside = dict(held)
        taken = self._taken(held)
        for key in wanted:
            if reason := self._conflict(key, beside, taken, beside):
                return reason
            if key not in beside:
                beside[key] = frozenset()
                for token in self.tokens(key):
                    taken.setdefault(token, set()).add(key)
        return ""

    def conflicts(self, wanted: Iterable[Key], held: Held, counted: Collection[Key] | None = None) -> dict[Key, str]:
        """Return those that could not be granted now, each alone, and why. counted: whose counters count; None: all."""
        taken, counted = self._taken(held), held.keys() if counted is None else counted
        found = ((key, self._conflict(key, held, taken, counted)) for key in wanted)
        return {key: reason for key, reason in found if reason}

    def _taken(self, held: Held) -> dict[str, set[Key]]:
        """Return which held devices have a token, by the device's identity now or when it was granted."""
        taken: dict[str, set[Key]] = {}
        for key, granted in held.items():
            for token in granted | self.tokens(key):
                taken.setdefault(token, set()).add(key)
        return taken

    def _conflict(self, key: Key, held: Held, taken: Mapping[str, set[Key]], counted: Collection[Key]) -> str:
        thing, granted = self._things.get(key, _UNKNOWN), held.get(key, frozenset())
        if not same_thing(thing.tokens, granted):
            return f"{titled(key)} is held as {shown(granted)}, and is {shown(thing.tokens)} now"
        for token in thing.tokens:
            for other in sorted(taken.get(token, set()) - {key}):
                if not (thing.shared and self.shared(other)):
                    return f"{titled(key)} and {titled(other)}, which counts as held, are one thing ({shown({token})})"
        for name, amounts in thing.consumes.items():
            holders = [one for one in self._by_set[thing.scope, name] if one in counted and one != key]
            if holders and (counter := self._exceeded(thing.scope, name, amounts, holders)):
                others = ", ".join(titled(one) for one in sorted(holders)[:3])
                return f"{titled(key)} does not fit beside {others}, which counts as held (counter {counter} of {name})"
        return ""

    def _exceeded(self, scope: str, name: str, amounts: Mapping[str, Fraction], holders: Iterable[Key]) -> str:
        """Return a counter that does not suffice for a device and the holders of others; "" if all do."""
        capacity = self._capacity.get((scope, name), {})
        used = [amounts, *(self._things[one].consumes[name] for one in holders)]
        for counter in amounts:
            each = [one[counter] for one in used if counter in one]
            if len(each) > 1 and (min(each) < 0 or sum(each) > capacity.get(counter, -1)):
                return counter
        return ""
