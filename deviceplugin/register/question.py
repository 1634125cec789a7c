"""The one question: may a holder have devices beside all that others hold? Pure.

Two uses are of the same hardware if their identities share a token, or if they have one name and either has no
identity of this boot. The parts of it, and what is taken of a counter, never add up to more than there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple

from deviceplugin import identity
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey, titled
from deviceplugin.identity import Tokens, same_hardware, shown
from deviceplugin.naming import parse_quantity
from deviceplugin.register.records import AllocationRecord, Amount, Claim, ClaimDevice, Point, RegisterSnapshot

Counter = tuple[str, str, str]
"""(scope, counter set, counter). The scope is the driver of a resource, or its name if it has none."""
_ONE: Final = Fraction(1)
UNCERTAIN: Final = "uncertain"
"""Begins the unit of what a pod has by another plugin, while it is not known which device that is."""


class Use(NamedTuple):
    """What one holder has of one device.

    unit: of one holder: an id of the kubelet's, a claim, a hook, or something of another plugin or driver. title: the
    holder, for messages. key: None if only its tokens are known. tokens: of this boot, none if they are not known.
    part: None if it is not known. takes: what is taken of counters.
    """

    unit: tuple[str, ...]
    title: str
    key: DeviceKey | None
    tokens: Tokens
    part: Fraction | None
    takes: Mapping[Counter, Fraction] = {}

    @property
    def points(self) -> set[Point]:
        """What may have no other holders than there is room for."""
        return {*self.tokens, *((self.key,) if self.key else ())}

    def concerns(self, points: Collection[Point]) -> bool:
        """Whether it is of any of these points, counters included."""
        return not self.points.isdisjoint(points) or any(counter[1:] in points for counter in self.takes)


@dataclass(frozen=True, slots=True)
class View:
    """What the question needs beside the register's own records.

    boot: the node's. scopes: of counters, by resource that is served now. limits: of counters that a listed device
    declares. others: what is held and is not in the register: by other drivers, and by hooks that work on.
    """

    boot: str = ""
    scopes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[Counter, Fraction] = field(default_factory=dict)
    others: tuple[Use, ...] = ()


class Wanted(NamedTuple):
    """A device that somebody is to get, as it is now."""

    key: DeviceKey
    identity: str
    amount: Amount


def allocation_unit(resource: str, device_id: str) -> tuple[str, ...]:
    """Return what the kubelet counts as one: an id of a resource."""
    return "id", resource, device_id


def claim_unit(driver: str, uid: str) -> tuple[str, ...]:
    """Return the unit of a claim."""
    return "claim", driver, uid


def takes_of(device: Device) -> tuple[tuple[str, str, str], ...]:
    """Return what whoever has a device takes of counters, in the order of their names."""
    taken = ((name, counter, str(value)) for name, of in device.consumes.items() for counter, value in of.items())
    return tuple(sorted(taken))


def part_of(amount: Amount) -> Fraction | None:
    """Return which part of the device an amount is; None if that is not known."""
    return _part(amount.part)


@functools.lru_cache
def _part(text: str) -> Fraction | None:
    try:
        return Fraction(text) if text else None
    except (ValueError, ZeroDivisionError):
        return None


def takes_recorded(amount: Amount, scope: str = "") -> dict[Counter, Fraction]:
    """Return what is taken of counters, in the scope that was recorded. Raises NamingError: a quantity is none."""
    return {(scope or amount.scope, *taken[:2]): parse_quantity(taken[2]) for taken in amount.takes}


def in_scopes(use: Use, scopes: Mapping[str, str]) -> Use:
    """Return a use whose takes count in the scope that was recorded, and in that of its resource now.

    Where neither is known they count in the scopes of all resources.
    """
    now = scopes.get(use.key[0], "") if use.key else ""
    takes: dict[Counter, Fraction] = {}
    for (scope, *counter), value in use.takes.items():
        counting = {name for name in (scope, now) if name} or {*(use.key[:1] if use.key else ()), *scopes.values()}
        takes |= {(name, *counter): value for name in counting}  # type: ignore[misc]
    return use._replace(takes=takes)


def wanted_use(unit: tuple[str, ...], wanted: Wanted, view: View) -> Use:
    """Return what a holder is to get as a use."""
    tokens = identity.tokens_of(wanted.identity, view.boot)
    takes = takes_recorded(wanted.amount)
    return in_scopes(Use(unit, "", wanted.key, tokens, part_of(wanted.amount), takes), view.scopes)


def use_of_allocation(allocation: AllocationRecord, view: View) -> Use:
    """Return an allocation as a use."""
    tokens = identity.tokens_of(allocation.identity, view.boot)
    title = f"pod {allocation.pod}" if allocation.pod else "a pod"
    unit = allocation_unit(allocation.resource, allocation.device_id)
    takes = takes_recorded(allocation.amount)
    return in_scopes(
        Use(unit, title, (allocation.resource, allocation.device), tokens, part_of(allocation.amount), takes),
        view.scopes,
    )


def use_of_claim(claim: Claim, device: ClaimDevice, view: View) -> Use:
    """Return one device of a claim as a use; a claim that is known from evidence alone may have any part of it."""
    tokens = identity.tokens_of(device.identity, view.boot)
    title = f"claim {claim.title}" if claim.name else f"claim {claim.uid}"
    unit = claim_unit(claim.driver, claim.uid)
    takes = takes_recorded(device.amount, claim.driver)
    return in_scopes(
        Use(unit, title, (device.resource, device.device), tokens, part_of(device.amount), takes), view.scopes
    )


def uses(state: RegisterSnapshot, points: Iterable[Point], view: View) -> list[Use]:
    """Return what is held of any of these points: by the register's records, and by others."""
    points = set(points)
    held: list[Use] = []
    for table, key in {entry for point in points for entry in state.index.get(point, ())}:
        if table == "allocations":
            held.append(use_of_allocation(state.allocations[key], view))
        else:
            claim = state.claims[key]
            held += [use_of_claim(claim, device, view) for device in claim.devices if not device.admin]
    held += [use for use in view.others if use.concerns(points)]
    return held


def possible_uses(
    records: Iterable[AllocationRecord], boot: str, devices: Mapping[str, Mapping[str, Tokens]], listed: Tokens
) -> tuple[Use, ...]:
    """Return uses of every device that a pod may have got from another plugin under its resource's name.

    Any device of the resource may be meant, if neither the id nor the answer to Allocate says which. devices: tokens by
    resource and device. listed: tokens of all devices.
    """
    possible: list[Use] = []
    for allocation in records:
        of, tokens = devices.get(allocation.resource, {}), identity.tokens_of(allocation.identity, boot)
        if is_given_by_others(allocation) and allocation.device not in of and tokens.isdisjoint(listed):
            what = f"pod {allocation.pod} has {allocation.device_id} of {allocation.resource} from another plugin"
            title = f"{what}, and it is not known which device that is"
            unit = UNCERTAIN, allocation.resource, allocation.device_id
            possible += [Use(unit, title, (allocation.resource, device), its, None) for device, its in of.items()]
    return tuple(possible)


def is_given_by_others(allocation: AllocationRecord) -> bool:
    """Return whether another plugin made an allocation: its record does not say how much of the device it has."""
    return not (allocation.amount.part or allocation.pending)


def held_twice(wanted: Wanted, times: int, state: RegisterSnapshot, view: View) -> bool:
    """Return whether holders have more of a device, whatever they call it, than there is; hooks do not count.

    times: how often it is offered; what is held of it without a known amount counts as one of these.
    """
    points: set[Point] = {wanted.key, *identity.tokens_of(wanted.identity, view.boot)}
    held = [use for use in uses(state, points, view) if use.part != 0 and use.unit[0] not in ("hook", UNCERTAIN)]
    for point in points:
        of_point = [use for use in held if point in use.points]
        units = {use.unit for use in of_point}
        if len(units) > 1 and sum(use.part or Fraction(1, times) for use in of_point) > 1:
            return True
    return False


def refusal(
    wanted: Collection[Use],
    state: RegisterSnapshot,
    view: View,
    beside: Collection[Use] = (),
    *,
    own: Callable[[Use], bool] = lambda use: False,
    counted: Callable[[Use], bool] = lambda use: True,
) -> str:
    """Return why a holder may not have these devices beside what all others hold; "" if it may.

    What the holder has already, by its units, does not count; what it asks for adds up. beside: what counts as held
    besides. own: tells what else does not count. counted: tells of which uses it counts what they take of counters.
    """
    units = {use.unit for use in wanted}
    wanted = [use for use in wanted if use.part != 0]
    points: set[Point] = {point for use in wanted for point in use.points}
    points.update(counter[1:] for use in wanted for counter in use.takes)
    held = [use for use in (*uses(state, points, view), *beside) if use.part != 0]
    others = [use for use in held if use.unit not in units and not own(use)]
    for use in wanted:
        for other in held:
            if use.key == other.key and not same_hardware(use.tokens, other.tokens):
                return f"{_titled(use)} is held as {shown(other.tokens)}, and is {shown(use.tokens)} now"
        for other in others:
            if (common := use.points & other.points) and None in (use.part, other.part):
                return _excluded(use, other, common)
    for use in wanted:
        for point in use.points:
            of_point = [each for each in others if point in each.points]
            same = [each for each in wanted if point in each.points]
            if len(of_point) + len(same) > 1 and sum(each.part or _ONE for each in (*of_point, *same)) > 1:
                return _excluded(use, of_point[0], {point}) if of_point else _twice(same[0], same[1], point)
        for counter in use.takes:
            of_counter = [each for each in others if counter in each.takes and counted(each)]
            same = [each for each in wanted if counter in each.takes]
            taken = [each.takes[counter] for each in (*of_counter, *same)]
            if len(taken) > 1 and (min(taken) < 0 or sum(taken) > view.limits.get(counter, Fraction(-1))):
                takers = of_counter or [each for each in same if each is not use]
                names = ", ".join(sorted({_titled(each) for each in takers})[:3])
                counts = ", which counts as held" if of_counter else ", requested with it"
                return f"{_titled(use)} does not fit beside {names}{counts} (counter {counter[2]} of {counter[1]})"
    return ""


def _titled(use: Use) -> str:
    return titled(use.key) if use.key else f"what {use.title} has"


def _twice(use: Use, other: Use, point: Point) -> str:
    if use.key == other.key:
        return f"more of {_titled(use)} is requested than there is"
    return f"{_titled(use)} and {_titled(other)}, requested with it, are the same hardware ({shown({str(point)})})"


def _excluded(use: Use, other: Use, common: Collection[Point]) -> str:
    tokens = {point for point in common if isinstance(point, str)}
    if other.key == use.key:
        return other.title if other.unit[0] in ("hook", UNCERTAIN) else f"{_titled(use)} is held by {other.title}"
    text = f"{_titled(use)} and {_titled(other)}, which counts as held"
    return f"{text}, are the same hardware ({shown(tokens)})"
