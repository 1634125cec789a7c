"""Decides whether a holder may get devices in addition to the devices of all present holders. Pure functions.

A use is the part of one device that one holder has. Two uses are of the same hardware if their identities share a token
(a device number, a PCI address or a UUID), or if their devices have the same name and one of the uses has no identity
of this boot. `refusal` refuses a request if all uses of a device together would exceed the device, or if the quantities
that uses take from a shared counter together would exceed the counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple

from deviceplugin.device import Device
from deviceplugin.exclusion import NO_TOKENS, DeviceKey, titled
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
"""The name of a shared counter: (scope, counter set, counter). The scope is the DRA driver of a resource, or the
resource's name if it has no driver."""
_ONE: Final = Fraction(1)
HOOK: Final = "hook"
"""The first element of `Use.unit` if the holder is a hook that still runs after its timeout."""
RELEASE: Final = "release"
"""The first element of `Use.unit` if the use stands for a failed hook `released`, which blocks its device."""
UNCERTAIN: Final = "uncertain"
"""The first element of `Use.unit` if the holder is a pod that got an unknown device from another plugin."""
_NO_HOLDERS: Final = frozenset({HOOK, RELEASE, UNCERTAIN})


class Use(NamedTuple):
    """The part of one device that one holder has.

    unit: the holder's key, made from a kubelet id, a claim, a hook, or an allocation of another plugin or driver.
    title: the holder as text, for messages. key: the device's (resource, id); None if only the device's tokens are
    known. tokens: the device's identity in this boot, empty if unknown. part: the fraction of the device that the
    holder has; None if unknown. takes: the quantity that the device takes from each counter. reached: tokens of further
    device nodes that the holder may open; these tokens do not identify the device. left: tokens of device nodes that
    the holder cannot open any more. within: the tokens of larger devices of which the device is a part.
    """

    unit: tuple[str, ...]
    title: str
    key: DeviceKey | None
    tokens: Tokens
    part: Fraction | None
    takes: Mapping[Counter, Fraction] = {}
    reached: Tokens = frozenset()
    left: Tokens = frozenset()
    within: Tokens = frozenset()

    @property
    def own(self) -> set[Point]:
        """The keys of the granted device in the index (`Point`): its tokens without `left`, and `key`."""
        tokens = self.tokens - self.left if self.left else self.tokens
        return {*tokens, self.key} if self.key else {*tokens}

    @property
    def points(self) -> set[Point]:
        """The keys of this use in the index of holders (`Point`): `own`, and the tokens in `reached` and `within`."""
        return self.own | self.reached | self.within if self.reached or self.within else self.own

    def concerns(self, points: Collection[Point]) -> bool:
        """Return whether one of these keys is a token, the device's (resource, id), or a counter of this use."""
        return not self.points.isdisjoint(points) or any(counter[1:] in points for counter in self.takes)


@dataclass(frozen=True, slots=True)
class View:
    """The facts by which `refusal` decides, besides the register's records.

    boot: the node's boot id. scopes: for each resource of this process, the scope of its counters (see `Counter`).
    limits: the size of each counter that devices declare. others: the uses that are not in the register: grants of
    other drivers and plugins, hooks that still run, and failed `released` hooks. unreleased: for each device whose hook
    `released` must succeed before the next grant, the reason. present: for each device, all its present tokens,
    including tokens that may change while the device has the same holder (`deviceplugin.identity.lasting`). listed: the
    tokens that stand for hardware (`HardwareIndex.listed`).
    """

    boot: str = ""
    scopes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[Counter, Fraction] = field(default_factory=dict)
    others: tuple[Use, ...] = ()
    unreleased: Mapping[DeviceKey, str] = field(default_factory=lambda: NONE)
    present: Mapping[DeviceKey, Tokens] = field(default_factory=lambda: NONE)
    listed: Tokens = frozenset()


class Wanted(NamedTuple):
    """A requested or granted device, with its identity and the amount at the request or grant.

    since: the time of the grant (Unix seconds); 0.0 before the grant, or if the time is unknown. paths: the host paths
    of device nodes and mounts in the AllocateResponse; None if they are not known.
    """

    key: DeviceKey
    identity: Identity
    amount: Amount
    since: float = 0.0
    paths: frozenset[str] | None = None


def allocation_unit(resource: str, device_id: str) -> tuple[str, ...]:
    """Return the key (`Use.unit`) of the holder of a kubelet device id."""
    return "id", resource, device_id


def claim_unit(driver: str, uid: str) -> tuple[str, ...]:
    """Return the key (`Use.unit`) of a claim."""
    return "claim", driver, uid


def takes_of(device: Device) -> tuple[tuple[str, str, str], ...]:
    """Return (counter set, counter, quantity) for each counter from which a device takes, sorted."""
    if not device.consumes:
        return ()
    taken = ((name, counter, str(value)) for name, of in device.consumes.items() for counter, value in of.items())
    return tuple(sorted(taken))


def part_of(amount: Amount) -> Fraction | None:
    """Return the fraction of the device in an amount; None if the fraction is unknown."""
    return _part(amount.part)


@functools.lru_cache
def _part(text: str) -> Fraction | None:
    try:
        return Fraction(text) if text else None
    except (ValueError, ZeroDivisionError):
        return None


def larger(amount: Amount, other: Amount) -> Amount:
    """Return the amount with the larger fraction, and the larger quantity of each counter, of two amounts of one id."""
    first, second = part_of(amount), part_of(other)
    part = "" if first is None or second is None else str(max(first, second))
    takes: dict[tuple[str, str], str] = {}
    for counter_set, counter, value in (*amount.takes, *other.takes):
        takes[counter_set, counter] = max(takes.get((counter_set, counter), value), value, key=parse_quantity)
    return Amount(part, tuple((*counter, value) for counter, value in takes.items()), amount.scope or other.scope)


def takes_recorded(amount: Amount, scope: str = "") -> dict[Counter, Fraction]:
    """Return the recorded quantity of each counter. scope: replaces the recorded scope. Raises NamingError."""
    return {(scope or amount.scope, *taken[:2]): parse_quantity(taken[2]) for taken in amount.takes}


def in_scopes(use: Use, scopes: Mapping[str, str]) -> Use:
    """Return a use whose quantities count in the recorded scope and in the present scope of the use's resource.

    If neither scope is known, the quantities count in the scopes of all resources.
    """
    now = scopes.get(use.key[0], "") if use.key else ""
    takes: dict[Counter, Fraction] = {}
    for (scope, *counter), value in use.takes.items():
        counting = {name for name in (scope, now) if name} or {*(use.key[:1] if use.key else ()), *scopes.values()}
        takes |= {(name, *counter): value for name in sorted(counting)}  # type: ignore[misc]
    return use._replace(takes=takes)


def as_parts(uses: tuple[Use, ...], larger: Mapping[DeviceKey, Tokens]) -> tuple[Use, ...]:
    """Return uses with `within` set where a device is listed as a part. larger: see `HardwareIndex.larger`."""
    if not larger:
        return uses
    return tuple(use._replace(within=use.within | larger.get(use.key, NO_TOKENS)) if use.key else use for use in uses)


def _use(
    unit: tuple[str, ...], title: str, of: DeviceKey, identity: Identity, amount: Amount, view: View, scope: str = ""
) -> Use:
    part = _ONE if amount.part == "1" else part_of(amount)
    now = identity.valid_in(view.boot)
    use = Use(unit, title, of, now.tokens, part, {}, now.reached, now.left, now.within)
    return in_scopes(use._replace(takes=takes_recorded(amount, scope)), view.scopes) if amount.takes else use


def wanted_use(unit: tuple[str, ...], wanted: Wanted, view: View) -> Use:
    """Return a requested device as a `Use`, with the hardware that the device's name stands for now."""
    use = _use(unit, "", wanted.key, wanted.identity, wanted.amount, view)
    present = view.present.get(wanted.key)
    return use if present is None else use._replace(tokens=use.tokens | present)


def use_of_allocation(allocation: AllocationRecord, view: View) -> Use:
    """Return an allocation as one use. The use includes the devices of former grants, whose holders may still run."""
    key, unit = (allocation.resource, allocation.device), ("id", allocation.resource, allocation.device_id)
    identity, amount = allocation.identity, allocation.amount
    for former in allocation.former:
        identity, amount = identity.reaching(former.identity), larger(amount, former.amount)
    return _use(unit, allocation.holder, key, identity, amount, view)


def use_of_claim(claim: Claim, device: ClaimDevice, view: View) -> Use:
    """Return one device of a claim as a `Use` (the part of one device that one holder has).

    If the claim is known only from evidence, its part of the device is unknown.
    """
    key, unit = (device.resource, device.device), ("claim", claim.driver, claim.uid)
    return _use(unit, claim.holder, key, device.identity, device.amount, view, claim.driver)


def uses(state: RegisterSnapshot, points: Iterable[Point], view: View) -> list[Use]:
    """Return each use that has one of the keys `points`, from the register's records and from `view.others`."""
    points, entries = set(points), set[tuple[str, RecordKey]]()
    for point in points:
        entries |= state.index.get(point, frozenset())
    held: list[Use] = []
    for table, key in sorted(entries):
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
    """Return a use for each device that a pod may have got from another plugin of the same resource.

    If neither the id nor the AllocateResponse identifies the pod's device, the pod may have any device of the resource.
    records: the allocation records. boot: the node's boot id. devices: for each resource and device, the device's
    tokens. listed: see `View`.
    """
    possible: list[Use] = []
    for allocation in records:
        of, tokens = devices.get(allocation.resource, {}), allocation.identity.in_boot(boot)
        if is_given_by_others(allocation) and allocation.device not in of and tokens.isdisjoint(listed):
            what = f"pod {allocation.pod} has {allocation.device_id} of {allocation.resource} from another plugin"
            possible += uncertain_uses((allocation.resource, allocation.device_id), what, of)
    return tuple(possible)


def uncertain_uses(held: DeviceKey, what: str, devices: Mapping[str, Tokens]) -> list[Use]:
    """Return a use for each device of a resource that a holder may have.

    held: the resource, and the id of the holder's device. what: the holder and the id, for messages. devices: for each
    possible device, the device's tokens.
    """
    title, unit = f"{what}, and it is not known which device that is", (UNCERTAIN, *held)
    return [Use(unit, title, (held[0], device), its, None) for device, its in devices.items()]


def is_given_by_others(allocation: AllocationRecord) -> bool:
    """Return whether another plugin, not this agent, granted an allocation; then the record has no amount."""
    return not (allocation.amount.part or allocation.pending)


def held_twice(wanted: Wanted, times: int, state: RegisterSnapshot, view: View) -> bool:
    """Return whether all holders of a device together have more than the whole device.

    Running hooks do not count as holders. times: the number of containers that may share the device. A holder of an
    unknown amount counts as one container.
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
    """Return why a holder must not get the devices `wanted` in addition to all present uses; "" if it may get them.

    Present uses by the same holder (equal `unit`) are ignored. Several requests for one device are added up. beside:
    further uses that count as present uses. own: a function that returns True for another holder's use that is to be
    ignored as well. counted: a function that returns False for a use whose quantities of counters are to be ignored.
    """
    points, count = set[Point](), 0
    for use in wanted:
        points |= use.points
        count += len(use.points)
        for counter in use.takes:
            points.add(counter[1:])
            count += 2  # Then `count` exceeds `len(points)`, so the sums of counters are checked.
    held = uses(state, points, view)
    if view.unreleased:
        held += _unreleased(wanted, held, view)
    if not held and not beside and count == len(points):
        return ""  # In this usual case, no device has a holder or is requested twice.
    units = {use.unit for use in wanted}
    wanted = [use for use in wanted if use.part != 0]
    held = [use for use in (*held, *beside) if use.part != 0]
    others = [use for use in held if use.unit not in units and not own(use)]
    # The same question has the same answer.
    others.sort(key=lambda use: (use.unit[0] in _NO_HOLDERS, use.unit, use.key or ()))
    for use in wanted:
        for other in held:
            if use.key == other.key and not same_hardware(use.tokens, other.tokens):
                return f"{_titled(use)} is held as {shown(other.tokens)}, and is {shown(use.tokens)} now"
        for other in others:
            if (common := _common(use, other, view.listed)) and None in (use.part, other.part):
                return _excluded(use, other, common)
    for use in wanted:
        for point in sorted(use.points, key=str):
            of_point = [each for each in others if point in _common(use, each, view.listed)]
            same = [each for each in wanted if each is use or point in _common(use, each, view.listed)]
            parts = (*(_part_beside(each, use) for each in of_point), *(each.part or _ONE for each in same))
            if len(parts) > 1 and sum(parts) > 1:
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


def _common(use: Use, other: Use, listed: Tokens) -> Collection[Point]:
    """Return the points of a requested use that the device of another use has. listed: see `opened`."""
    common = use.own & other.points
    if use.within:
        common |= use.within & (other.own | other.reached)
    if use.reached and use.key is not None:
        return common | opened(use.reached, use.key[0], other, listed)
    return common


def opened(nodes: Tokens, resource: str, other: Use, listed: Tokens) -> Tokens:
    """Return those of the device nodes of a holder that identify the device of another use.

    A vendor's plugin gives its holders nodes of devices, and control nodes, which identify no device. Two holders that
    only reach a node (`Use.reached`) do not exclude each other, and neither do holders of one resource of such a
    plugin. resource: the holder's resource. listed: see `View`. If the other use is known by tokens alone, these can be
    of control nodes too, and only tokens in `listed` count.
    """
    if other.key is None:
        return nodes & listed & other.tokens - other.left
    return nodes & (other.tokens - other.left | other.within) if other.key[0] != resource else frozenset()


def _unreleased(wanted: Collection[Use], held: Sequence[Use], view: View) -> list[Use]:
    """Return the requested devices (as uses) that have no holder, and whose hook `released` must succeed first."""
    due: list[Use] = []
    for use in wanted:
        key = use.key
        if key in view.unreleased and key is not None and all(use.points.isdisjoint(one.points) for one in held):
            due.append(Use((RELEASE, *key), view.unreleased[key], key, frozenset(), None))
    return due


def _part_beside(use: Use, wanted: Use) -> Fraction:
    """Return the part that a present use takes of a device node that a request needs as well.

    The part is the whole node if the use is of another device than the request.
    """
    if use.key != wanted.key and not same_hardware(use.tokens, wanted.tokens):
        return _ONE
    return use.part or _ONE


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
    named = other.key is not None and other.title and other.unit[0] not in _NO_HOLDERS
    held = f"held by {other.title}" if named else "held"
    text = f"{_titled(use)} and {_titled(other)}, which counts as {held}, are the same hardware ({shown(tokens)})"
    parts = use.tokens - other.tokens and other.tokens - use.tokens
    if (
        parts
        and tokens & use.tokens & other.tokens
        and use.key is not None
        and other.key is not None
        and use.key[0] != other.key[0]
    ):
        text += "; if one pod needs both, which share a node, put them into one resource"
    return text
