"""Chooses the devices that move next between plugin and DRA, by pure functions of the register's records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from deviceplugin.device import Device, natural
from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.records import NONE, DeviceRecord, RecordKey, RegisterSnapshot, Side, State
from deviceplugin.register.rules import kept_by_limits
from deviceplugin.register.waits import RefusedClaim
from dra_bridge.handover.share import Drain, Share


def held_and_expected(now: RegisterSnapshot) -> tuple[frozenset[DeviceKey], frozenset[DeviceKey]]:
    """Return two sets: devices that pods or claims hold, and devices that are moving to DRA because a claim needs them.

    A device that a pod got during the move to DRA is only in the first set, because the claim has to wait for the pod.
    """
    held: set[DeviceKey] = set()
    expected: set[DeviceKey] = set()
    for key, record in now.devices.items():
        if record.moves_for_claim:
            expected.add(key)
    for allocation in now.allocations.values():
        held.add((allocation.resource, allocation.device))
    expected -= held
    for claim in now.claims.values():
        held |= claim.held
    return frozenset(held), frozenset(expected)


def needed_by(
    now: RegisterSnapshot, refused: Mapping[RecordKey, RefusedClaim], driver: str, together: Together
) -> dict[DeviceKey, str]:
    """Return the devices that must begin or continue to move to DRA for a driver's refused claims, with reasons.

    Devices are included even if pods hold them. Otherwise a sequence of pods could hold a claim's device without a
    pause, and each Prepare would find it held. A device that has moved since the claim was refused does not have to
    move again.
    """
    needed: dict[DeviceKey, str] = {}
    for claim in (claim for (of, _), claim in refused.items() if of == driver):
        for key, sequence in claim.devices.items():
            record = now.device(*key)
            if record.state is State.PLUGIN:
                group = next((members for members in together.values() if key in members), (key,))
                if record.sequence != sequence or kept_by_limits(now, group):
                    continue
            elif record.state is not State.TO_DRA:
                continue
            needed[key] = f"for claim {claim.title}"
    return needed


@dataclass(frozen=True, slots=True)
class Moving:
    """Selects the devices that one handover moves: those in the slices of `driver`, and those in no driver's slices.

    leaving: whether to select only the devices in the slices of `driver`, because it is the resource's former driver.
    """

    driver: str = ""
    leaving: bool = False

    def of(self, now: RegisterSnapshot, resource: str) -> dict[str, DeviceRecord]:
        """Return, for the id of each selected device of a resource, the device's record."""
        moved: dict[str, DeviceRecord] = {}
        for (of, name), record in now.devices.items():
            if of == resource and (record.driver == self.driver or not (record.driver or self.leaving)):
                moved[name] = record
        return moved

    def in_state(self, now: RegisterSnapshot, resource: str, state: State) -> tuple[str, ...]:
        """Return the sorted ids of a resource's selected devices that are in one state."""
        found: list[str] = []
        for name, record in self.of(now, resource).items():
            if record.state is state:
                found.append(name)
        return tuple(sorted(found))


ALL: Final = Moving()
"""Selects all devices of a resource that are in no driver's slices."""


Together = Mapping[str, tuple[DeviceKey, ...]]
"""For each device, the group of devices of its driver that must move together (including the device), leader first."""


@dataclass(frozen=True, slots=True)
class Movable:
    """The devices of a resource that one handover can move, in one snapshot of the register.

    states: the states of these devices. together: the groups of these devices. held: the held devices of all resources;
    see `held_and_expected`. needed: see `needed_by`. expected: the devices of all resources that move to DRA for claims
    (`held_and_expected`) or must do so (`needed`).
    """

    now: RegisterSnapshot
    resource: str
    states: Mapping[str, State]
    together: Together
    held: frozenset[DeviceKey]
    expected: frozenset[DeviceKey]
    needed: Mapping[DeviceKey, str]

    @classmethod
    def of(
        cls,
        now: RegisterSnapshot,
        resource: str,
        states: Mapping[str, State],
        together: Together,
        refused: Mapping[RecordKey, RefusedClaim],
        driver: str,
    ) -> Self:
        """Compute `held`, `expected` and `needed` from the register's snapshot `now`, and return the object.

        refused: the claims whose last Prepare was refused. driver: only claims of this driver make devices needed.
        """
        held, expected = held_and_expected(now)
        needed = needed_by(now, refused, driver, together) if refused else NONE
        return cls(now, resource, states, together, held, expected | needed.keys(), needed)

    def with_groups(self, devices: Iterable[str]) -> frozenset[str]:
        """Return these devices, and the other devices of this resource that must move together with one of them."""
        names: set[str] = set()
        for device in devices:
            for of, name in self.together[device]:
                if of == self.resource and name in self.states:
                    names.add(name)
        return frozenset(names)


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves to begin now. draining: devices that leave the device plugin once they are idle (`drain` is "wait").

    blocked: devices whose moves must not begin, because a kubelet restart would then end pods.
    """

    to_dra: tuple[str, ...] = ()
    to_plugin: tuple[str, ...] = ()
    draining: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()


def plan(
    states: Mapping[str, State],
    held: Collection[str],
    share: Share,
    drain: Drain = "cordon",
    groups: Callable[[], Sequence[frozenset[str]]] = tuple,
    expected: Collection[str] = frozenset(),
) -> Plan:
    """Choose the devices to move, so that as many devices as `share` requires are on the DRA side or moving there.

    Moves in progress continue if the share still requires them. Devices whose present move can be reversed are chosen
    first, then idle devices, then held devices. With `drain` "wait", a chosen held device does not begin a move; a
    chosen held device of the device plugin becomes `draining`.

    states: the state of each device to choose from; quarantined devices do not count and do not move. held: devices
    that a pod or a claim holds. groups: a function that returns sets of devices that belong together (by links, a
    switch, a NUMA node). If possible, all devices of a group move together. expected: devices that move to DRA for a
    claim. These moves are not reversed, because the claim's next Prepare must find the device on the DRA side.
    """
    dra: list[str] = []
    leaving_dra: list[str] = []
    plugin: list[str] = []
    for name in sorted(states, key=natural):
        state = states[name]
        if state in (State.DRA, State.TO_DRA):
            dra.append(name)
            if state is State.DRA or name not in expected:
                leaving_dra.append(name)
        elif state is not State.QUARANTINED:
            plugin.append(name)
    missing = share.of(len(dra) + len(plugin)) - len(dra)
    if missing > 0:
        turning, candidates, there = State.TO_PLUGIN, plugin, dra
    else:
        turning, candidates, there = State.TO_DRA, leaving_dra, plugin
    count = min(abs(missing), len(candidates))
    chosen = _choose(candidates, count, there, held, groups(), turning, states) if count else ()
    begin = [name for name in chosen if drain == "cordon" or name not in held or states[name] is turning]
    if missing > 0:
        return Plan(tuple(begin), (), frozenset(chosen).difference(begin))
    return Plan((), tuple(begin))


def exchanged(states: Mapping[str, State], held: Collection[str], expected: Collection[str]) -> Plan:
    """Choose idle devices to move instead of held devices whose moves wait for their holders.

    The number of devices on each side stays as planned. The moves of the held devices are reversed. Parameters: see
    `plan`; the moves of `expected` devices are not reversed.
    """
    of: dict[State, list[str]] = {State.PLUGIN: [], State.TO_DRA: [], State.DRA: [], State.TO_PLUGIN: []}
    for name in sorted(states, key=natural):
        state = states[name]
        waits = name in held and name not in expected and state in (State.TO_DRA, State.TO_PLUGIN)
        if waits or (name not in held and state in (State.PLUGIN, State.DRA)):
            of[state].append(name)
    there = min(len(of[State.TO_DRA]), len(of[State.PLUGIN]))
    back = min(len(of[State.TO_PLUGIN]), len(of[State.DRA]))
    to_dra = *of[State.PLUGIN][:there], *of[State.TO_PLUGIN][:back]
    return Plan(to_dra, (*of[State.TO_DRA][:there], *of[State.DRA][:back]))


def _choose(
    candidates: Sequence[str],
    count: int,
    there: Collection[str],
    held: Collection[str],
    groups: Sequence[frozenset[str]],
    turning: State,
    states: Mapping[str, State],
) -> tuple[str, ...]:
    """Choose `count` of the candidates to move to a side. there: the devices that are already on this side.

    Devices in the state `turning` are chosen first (the held ones before the idle ones), because for them it is enough
    to reverse the present move. Then groups are chosen, in this order of preference: groups with an idle device; groups
    of which some devices are already on this side or chosen; groups that are not larger than the number that is still
    to be chosen.
    """
    at: dict[str, int] = {}
    held_back: list[str] = []
    idle_back: list[str] = []
    for name in candidates:
        at[name] = len(at)
        if states[name] is turning:
            (held_back if name in held else idle_back).append(name)
    chosen = [*held_back, *idle_back][:count]
    parts = [(group, sorted(at.keys() & group, key=at.__getitem__)) for group in groups]
    single = sorted(at.keys() - frozenset().union(*groups), key=at.__getitem__)
    parts += [(frozenset({name}), [name]) for name in single]
    while len(chosen) < count:
        missing, idle_names, taken = count - len(chosen), 0, frozenset(chosen)
        best: tuple[tuple[bool, int, bool, int, int], list[str], list[str]] | None = None
        for group, members in parts:
            idle: list[str] = []
            in_use: list[str] = []
            for name in members:
                if name not in taken:
                    (in_use if name in held else idle).append(name)
            rest, begun = [*idle, *in_use], len(group.intersection(there)) + len(group & taken)
            if not rest:
                continue
            idle_names += len(idle)
            price = (
                not idle,  # Prefer groups with an idle device, because an idle device can move at once.
                -begun if len(group) > 1 else 0,  # Prefer groups of which some devices have already moved.
                len(rest) > missing,  # Prefer groups of which all devices can be chosen.
                -min(len(idle), missing),  # Prefer groups of which most devices move at once.
                min(map(at.__getitem__, rest)),
            )
            if best is None or price < best[0]:
                best = price, idle, rest
        assert best is not None  # There are at least `count` candidates.
        _, idle, rest = best
        chosen.extend((idle if idle and idle_names > len(idle) else rest)[:missing])
    return tuple(chosen)


def leading(movable: Movable) -> tuple[dict[str, State], frozenset[str], frozenset[str]]:
    """Return the input of `plan`: states of the devices to choose from, held devices, and devices expected by claims.

    `plan` chooses from the leaders of groups and the devices without a group. Other devices follow their leader
    (`followers`). A leader counts as held (or expected) if any device of its group is held (or expected).
    """
    leaders: dict[str, State] = {}
    in_use: set[str] = set()
    awaited: set[str] = set()
    for name, state in movable.states.items():
        members = movable.together[name]
        if members[0] != (movable.resource, name):
            continue
        leaders[name] = state
        if not movable.held.isdisjoint(members):
            in_use.add(name)
        if not movable.expected.isdisjoint(members):
            awaited.add(name)
            # A claim waits for devices of this group that are still moving, so the leader counts as moving as well.
            if state is State.DRA:
                leaders[name] = State.TO_DRA
    return leaders, frozenset(in_use), frozenset(awaited)


class FollowingMove(NamedTuple):
    """The move of a device that must move together with other devices.

    for_claim: whether the devices move to DRA because a claim needs one of them.
    """

    device: str
    side: Side
    reason: str
    for_claim: bool = False


def followers(movable: Movable) -> list[FollowingMove]:
    """Return the moves to begin for refused claims, and the moves that bring all devices of a group to one side.

    A device moves to the side of its group's leader. If one device of a group moves to DRA for a claim, all devices of
    the group move to DRA.
    """
    now = movable.now
    moves: list[FollowingMove] = []
    for name, state in movable.states.items():
        members = movable.together[name]
        if len(members) == 1 and members[0] not in movable.needed:
            continue
        leader = now.device(*members[0])
        goal, reason, for_claim = leader.state.goal, f"it moves with {leader.device}", False
        for key in members:
            if key in movable.expected:
                goal, reason, for_claim = Side.DRA, movable.needed.get(key) or now.device(*key).reason, True
                break
        if goal is not None and state.goal not in (goal, None):
            moves.append(FollowingMove(name, goal, reason, for_claim))
    return moves


def groups(devices: Mapping[str, Device], links: Mapping[frozenset[str], float]) -> Sequence[frozenset[str]]:
    """Return groups of devices that are linked, or if links give no groups, of devices with the same NUMA nodes."""
    if links and (linked := link_groups(devices, links)):
        return linked
    by_numa: dict[tuple[int, ...], set[str]] = {}
    for name, device in devices.items():
        if device.numa_nodes:
            by_numa.setdefault(device.numa_nodes, set()).add(name)
    return tuple(frozenset(names) for names in by_numa.values()) if len(by_numa) > 1 else ()


def link_groups(devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[frozenset[str], ...]:
    """Return the groups of devices that are connected by links with at least a minimum score.

    The minimum is the highest score that gives two or more groups of linked devices. The result is () if no score gives
    two groups. links: for each pair of devices, the score that the source returns; a higher score means a closer
    connection.
    """
    pairs = {pair: score for pair, score in links.items() if len(pair) == 2 and pair <= set(devices)}
    for level in sorted(set(pairs.values()), reverse=True):
        group = {name: frozenset({name}) for name in devices}
        for pair, score in pairs.items():
            if score >= level:
                first, other = pair
                together = group[first] | group[other]
                group.update(dict.fromkeys(together, together))
        tied = {names for names in group.values() if len(names) > 1}
        if len(tied) > 1:
            return tuple(sorted(tied, key=min))
    return ()
