"""Decides whether a holder may get devices beside all present holdings. Pure functions.

Two uses are of the same hardware if their identities share a token, or if their devices have the same name and one of
the uses has no identity of this boot. The parts of a device never add up to more than the device, and the quantities
taken of a counter never to more than the counter has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey, titled
from deviceplugin.identity import Identity, Tokens, same_hardware, shown
from deviceplugin.naming import parse_quantity
from deviceplugin.register.records import (
    NONE,
    AllocationRecord,
    Amount,
    Claim,
    ClaimDevice,
    Point,
    RecordKey,
    RegisterSnapshot,
)

Counter = tuple[str, str, str]
"""(scope, counter set, counter). The scope is the driver of a resource, or the resource's name without a driver."""
_ONE: Final = Fraction(1)
HOOK: Final = "hook"
"""The first element of the unit of a hook that still runs after its timeout."""
RELEASE: Final = "release"
"""The first element of a unit for a device that has to be released before it is granted."""
UNCERTAIN: Final = "uncertain"
"""The first element of a possible holder's unit: a pod that got a device from another plugin, and it is not known
which device."""
_NO_HOLDERS: Final = frozenset({HOOK, RELEASE, UNCERTAIN})


class Use(NamedTuple):
    """The part of one device that one holder has.

    unit: identifies the holder: one of the kubelet's ids, a claim, a hook, or a holder of another plugin or driver.
    title: names the holder in messages. key: the device; None if only the device's tokens are known. tokens: the
    device's identity in this boot, empty if unknown. part: the fraction of the device; None if unknown. takes: the
    quantities taken of counters. reached: tokens of other nodes that the holder may reach, which do not identify the
    device. left: nodes that the holder does not reach any more.
    """

    unit: tuple[str, ...]
    title: str
    key: DeviceKey | None
    tokens: Tokens
    part: Fraction | None
    takes: Mapping[Counter, Fraction] = {}
    reached: Tokens = frozenset()
    left: Tokens = frozenset()

    @property
    def own(self) -> set[Point]:
        """The tokens of the granted device, and the device's name."""
        tokens = self.tokens - self.left if self.left else self.tokens
        return {*tokens, self.key} if self.key else {*tokens}

    @property
    def points(self) -> set[Point]:
        """The tokens and the device at which the parts of all holders are added up."""
        return self.own | self.reached if self.reached else self.own

    def concerns(self, points: Collection[Point]) -> bool:
        """Return whether this use has one of these points, or takes from one of these counters."""
        return not self.points.isdisjoint(points) or any(counter[1:] in points for counter in self.takes)


@dataclass(frozen=True, slots=True)
class View:
    """The input of the question besides the register's records.

    boot: the node's boot id. scopes: the scope of counters, by served resource. limits: the counters that listed
    devices declare. others: holdings that are not in the register: of other drivers, of hooks that still run, and of
    failed releases. unreleased: devices that are not granted to a first holder before they are released, with reasons.
    present: all tokens that listed devices have now, those that do not last included (`deviceplugin.identity.lasting`).
    """

    boot: str = ""
    scopes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[Counter, Fraction] = field(default_factory=dict)
    others: tuple[Use, ...] = ()
    unreleased: Mapping[DeviceKey, str] = field(default_factory=lambda: NONE)
    present: Mapping[DeviceKey, Tokens] = field(default_factory=lambda: NONE)


class Wanted(NamedTuple):
    """A requested device, the identity that it has now, and the requested amount."""

    key: DeviceKey
    identity: Identity
    amount: Amount


def allocation_unit(resource: str, device_id: str) -> tuple[str, ...]:
    """Return the unit of one of the kubelet's ids."""
    return "id", resource, device_id


def claim_unit(driver: str, uid: str) -> tuple[str, ...]:
    """Return the unit of a claim."""
    return "claim", driver, uid


def takes_of(device: Device) -> tuple[tuple[str, str, str], ...]:
    """Return the quantities that a device's holder takes of counters, sorted by their names."""
    taken = ((name, counter, str(value)) for name, of in device.consumes.items() for counter, value in of.items())
    return tuple(sorted(taken))


def part_of(amount: Amount) -> Fraction | None:
    """Return an amount as a fraction of the device; None if it is unknown."""
    return _part(amount.part)


@functools.lru_cache
def _part(text: str) -> Fraction | None:
    try:
        return Fraction(text) if text else None
    except (ValueError, ZeroDivisionError):
        return None


def larger(amount: Amount, other: Amount) -> Amount:
    """Return the larger of two amounts of one id, of each counter, too."""
    first, second = part_of(amount), part_of(other)
    part = "" if first is None or second is None else str(max(first, second))
    takes: dict[tuple[str, str], str] = {}
    for counter_set, counter, value in (*amount.takes, *other.takes):
        takes[counter_set, counter] = max(takes.get((counter_set, counter), value), value, key=parse_quantity)
    return Amount(part, tuple((*counter, value) for counter, value in takes.items()), amount.scope or other.scope)


def takes_recorded(amount: Amount, scope: str = "") -> dict[Counter, Fraction]:
    """Return the recorded takes of counters in their scope. Raises NamingError for an invalid quantity."""
    return {(scope or amount.scope, *taken[:2]): parse_quantity(taken[2]) for taken in amount.takes}


def in_scopes(use: Use, scopes: Mapping[str, str]) -> Use:
    """Return a use whose counters count in the recorded scope, and in the present scope of its resource.

    If neither scope is known, the counters count in the scopes of all resources.
    """
    now = scopes.get(use.key[0], "") if use.key else ""
    takes: dict[Counter, Fraction] = {}
    for (scope, *counter), value in use.takes.items():
        counting = {name for name in (scope, now) if name} or {*(use.key[:1] if use.key else ()), *scopes.values()}
        takes |= {(name, *counter): value for name in counting}  # type: ignore[misc]
    return use._replace(takes=takes)


def _use(
    unit: tuple[str, ...], title: str, of: DeviceKey, identity: Identity, amount: Amount, view: View, scope: str = ""
) -> Use:
    part = _ONE if amount.part == "1" else part_of(amount)
    use = Use(unit, title, of, identity.in_boot(view.boot), part, {}, identity.reaches(view.boot), identity.left)
    return in_scopes(use._replace(takes=takes_recorded(amount, scope)), view.scopes) if amount.takes else use


def wanted_use(unit: tuple[str, ...], wanted: Wanted, view: View) -> Use:
    """Return a requested device as a use, with the hardware and the place that the device has now."""
    use = _use(unit, "", wanted.key, wanted.identity, wanted.amount, view)
    present = view.present.get(wanted.key)
    return use if present is None else use._replace(tokens=use.tokens | present)


def use_of_allocation(allocation: AllocationRecord, view: View) -> Use:
    """Return an allocation as a use, together with the devices of former holders that have not ended."""
    title = f"pod {allocation.pod}" if allocation.pod else "a pod"
    key, unit = (allocation.resource, allocation.device), ("id", allocation.resource, allocation.device_id)
    identity, amount = allocation.identity, allocation.amount
    for former in allocation.former:
        identity, amount = identity.reaching(former.identity), larger(amount, former.amount)
    return _use(unit, title, key, identity, amount, view)


def use_of_claim(claim: Claim, device: ClaimDevice, view: View) -> Use:
    """Return one device of a claim as a use.

    If the claim is known only from evidence, its part of the device is unknown.
    """
    title = f"claim {claim.title}" if claim.name else f"claim {claim.uid}"
    key, unit = (device.resource, device.device), ("claim", claim.driver, claim.uid)
    return _use(unit, title, key, device.identity, device.amount, view, claim.driver)


def uses(state: RegisterSnapshot, points: Iterable[Point], view: View) -> list[Use]:
    """Return the uses at any of these points: from the register's records, and from `view.others`."""
    points, entries = set(points), set[tuple[str, RecordKey]]()
    for point in points:
        entries |= state.index.get(point, frozenset())
    held: list[Use] = []
    for table, key in entries:
        if table == "allocations":
            held.append(use_of_allocation(state.allocations[key], view))
            continue
        claim = state.claims[key]
        held += [use_of_claim(claim, device, view) for device in claim.devices if not device.admin]
    if view.others:
        held += [use for use in view.others if use.concerns(points)]
    return held


def possible_uses(
    records: Iterable[AllocationRecord], boot: str, devices: Mapping[str, Mapping[str, Tokens]], listed: Tokens
) -> tuple[Use, ...]:
    """Return uses of every device that a pod may have got from another plugin under its resource's name.

    Every device of the resource is possible if neither the id nor the answer to Allocate identifies the device.
    devices: tokens by resource and device. listed: tokens of all devices.
    """
    possible: list[Use] = []
    for allocation in records:
        of, tokens = devices.get(allocation.resource, {}), allocation.identity.in_boot(boot)
        if is_given_by_others(allocation) and allocation.device not in of and tokens.isdisjoint(listed):
            what = f"pod {allocation.pod} has {allocation.device_id} of {allocation.resource} from another plugin"
            title = f"{what}, and it is not known which device that is"
            unit = UNCERTAIN, allocation.resource, allocation.device_id
            possible += [Use(unit, title, (allocation.resource, device), its, None) for device, its in of.items()]
    return tuple(possible)


def is_given_by_others(allocation: AllocationRecord) -> bool:
    """Return whether another plugin made an allocation: its record has no amount."""
    return not (allocation.amount.part or allocation.pending)


def held_twice(wanted: Wanted, times: int, state: RegisterSnapshot, view: View) -> bool:
    """Return whether the holders of all ids of a device together have more than the whole device.

    Hooks do not count. times: how many containers may share the device. A holding of unknown amount counts as the part
    of one container.
    """
    points: set[Point] = {wanted.key, *wanted.identity.in_boot(view.boot)}
    held = [use for use in uses(state, points, view) if use.part != 0 and use.unit[0] not in _NO_HOLDERS]
    for point in points:
        of_point = [use for use in held if point in use.own]
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
    """Return why a holder may not have these devices beside all present holdings; "" if it may.

    Present holdings of the same units do not count, and requests for one device add up. beside: further holdings that
    count. own: returns True for a use of another unit that does not count either. counted: returns whether the
    quantities that a use takes of counters count.
    """
    points, count = set[Point](), 0
    for use in wanted:
        points |= use.points
        count += len(use.points)
        for counter in use.takes:
            points.add(counter[1:])
            count += 2  # Several uses may take from one counter.
    held = uses(state, points, view)
    held += _unreleased(wanted, held, view)
    if not held and not beside and count == len(points):
        return ""  # This is the usual case: the devices are different and have no holders.
    units = {use.unit for use in wanted}
    wanted = [use for use in wanted if use.part != 0]
    held = [use for use in (*held, *beside) if use.part != 0]
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


def _unreleased(wanted: Collection[Use], held: Sequence[Use], view: View) -> list[Use]:
    """Return, as uses, the requested devices without a holder for which `released` must succeed first."""
    due: list[Use] = []
    for use in wanted if view.unreleased else ():
        key = use.key
        if key in view.unreleased and key is not None and all(use.points.isdisjoint(one.points) for one in held):
            due.append(Use((RELEASE, *key), view.unreleased[key], key, frozenset(), None))
    return due


def _titled(use: Use) -> str:
    return titled(use.key) if use.key else f"what {use.title} has"


def _twice(use: Use, other: Use, point: Point) -> str:
    if use.key == other.key:
        return f"more of {_titled(use)} is requested than there is"
    return f"{_titled(use)} and {_titled(other)}, requested with it, are the same hardware ({shown({str(point)})})"


def _excluded(use: Use, other: Use, common: Collection[Point]) -> str:
    tokens = {point for point in common if isinstance(point, str)}
    if other.unit[0] == RELEASE:
        return f"{_titled(other)}: {other.title}"
    if other.key == use.key:
        return other.title if other.unit[0] in _NO_HOLDERS else f"{_titled(use)} is held by {other.title}"
    text = f"{_titled(use)} and {_titled(other)}, which counts as held, are the same hardware ({shown(tokens)})"
    parts = use.tokens - other.tokens and other.tokens - use.tokens
    if parts and use.key is not None and other.key is not None and use.key[0] != other.key[0]:
        text += "; if one pod needs both, which share a node, put them into one resource"
    return text
