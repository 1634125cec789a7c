"""Chooses the devices that move next: pure functions of the register's snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from deviceplugin.device import Device, natural
from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.records import DeviceRecord, RegisterSnapshot, Side, State
from dra_bridge.handover.share import Drain, Share


def held_and_expected(now: RegisterSnapshot) -> tuple[frozenset[DeviceKey], frozenset[DeviceKey]]:
    """Return the devices that a pod or a claim holds, and those that move to DRA because a claim needs them.

    A device that a pod got during its move is only in the first set: the claim waits for the pod.
    """
    by_pods = frozenset((allocation.resource, allocation.device) for allocation in now.allocations.values())
    by_claims = frozenset().union(*(claim.held for claim in now.claims.values()))
    for_claims = frozenset(key for key, record in now.devices.items() if record.moves_for_claim)
    return by_pods | by_claims, for_claims - by_pods


@dataclass(frozen=True, slots=True)
class Moving:
    """Selects the devices that a handover moves: those published under a driver, and those of no driver.

    leaving: only those published under the driver, which is to lose them.
    """

    driver: str = ""
    leaving: bool = False

    def of(self, now: RegisterSnapshot, resource: str) -> dict[str, DeviceRecord]:
        """Return the records of a resource's devices that are moved, by device."""
        drivers = {self.driver} if self.leaving else {"", self.driver}
        return {name: record for name, record in now.of(resource).items() if record.driver in drivers}

    def in_state(self, now: RegisterSnapshot, resource: str, state: State) -> tuple[str, ...]:
        """Return those that are in a state."""
        return tuple(sorted(name for name, record in self.of(now, resource).items() if record.state is state))


ALL: Final = Moving()
"""The devices of a resource without regard to drivers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The moves to begin now. draining: devices that leave the plugin side once they are idle (drain: wait)."""

    to_dra: tuple[str, ...] = ()
    to_plugin: tuple[str, ...] = ()
    draining: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.to_dra or self.to_plugin)


def plan(
    states: Mapping[str, State],
    held: Collection[str],
    share: Share,
    drain: Drain = "cordon",
    groups: Sequence[frozenset[str]] = (),
    expected: Collection[str] = frozenset(),
) -> Plan:
    """Choose the devices that move so that as many as `share` says are on, or on their way to, DRA.

    Moves in progress continue if the share still needs them. Idle devices move before held ones, and held ones only
    with `cordon`.

    states: of every device that counts; quarantined ones stay where they are. held: devices that a pod or a claim
    holds. groups: devices that belong together (links, a switch, a NUMA node) and move whole rather than in fragments.
    expected: devices that move to DRA for a claim. These moves are not reversed, or no retry of the claim would find
    its device.
    """
    devices = sorted((name for name, state in states.items() if state is not State.QUARANTINED), key=natural)
    dra = [name for name in devices if states[name] in (State.DRA, State.TO_DRA)]
    plugin = [name for name in devices if states[name] not in (State.DRA, State.TO_DRA)]
    missing = share.of(len(devices)) - len(dra)
    if missing > 0:
        turning, candidates, there = State.TO_PLUGIN, plugin, dra
    else:
        turning, there = State.TO_DRA, plugin
        candidates = [name for name in dra if states[name] is not State.TO_DRA or name not in expected]
    chosen = _choose(candidates, min(abs(missing), len(candidates)), there, held, groups, turning, states)
    begin = tuple(name for name in chosen if drain == "cordon" or name not in held or states[name] is turning)
    return Plan(begin, (), frozenset(chosen) - frozenset(begin)) if missing > 0 else Plan((), begin)


def _choose(
    candidates: Sequence[str],
    count: int,
    there: Collection[str],
    held: Collection[str],
    groups: Sequence[frozenset[str]],
    turning: State,
    states: Mapping[str, State],
) -> tuple[str, ...]:
    """Choose `count` candidates to go to the side where `there` are already.

    Devices in the state `turning` come first, those with a holder on this side before others: they move back, and have
    no holder on the other side. Then come whole groups: first groups that have begun, then groups that fit, idle ones
    before held ones.
    """
    at = {name: index for index, name in enumerate(candidates)}
    returning = [name for name in candidates if states[name] is turning]
    chosen = sorted(returning, key=lambda name: name not in held)[:count]
    parts = [group for group in groups if group & at.keys()]
    grouped = frozenset().union(*parts)
    parts += [frozenset({name}) for name in candidates if name not in grouped]
    while len(chosen) < count:
        missing = count - len(chosen)
        left = [(group, rest) for group in parts if (rest := [n for n in group if n in at and n not in chosen])]

        def price(part: tuple[frozenset[str], list[str]], missing: int = missing) -> tuple[bool, int, bool, int, int]:
            group, rest = part
            begun = len(group & set(there)) + len(group & set(chosen))
            idle = sum(name not in held for name in rest)
            return (
                not idle,  # at least one device moves at once
                -begun if len(group) > 1 else 0,  # the group is broken up already
                len(rest) > missing,  # the group would be broken up
                -min(idle, missing),  # most devices move at once
                min(at[name] for name in rest),
            )

        best, rest = min(left, key=price)
        rest.sort(key=lambda name: (name in held, at[name]))
        idle = [name for name in rest if name not in held]
        idle_elsewhere = any(name not in held for group, others in left if group is not best for name in others)
        chosen.extend((idle if idle and idle_elsewhere else rest)[:missing])
    return tuple(chosen)


Together = Mapping[str, tuple[DeviceKey, ...]]
"""By device: it and those of its driver that must move together with it, the one that leads first."""


def leading(
    now: RegisterSnapshot, resource: str, states: Mapping[str, State], together: Together
) -> tuple[dict[str, State], frozenset[str], frozenset[str]]:
    """Return what `plan` decides about: the states of devices that lead or are by themselves, held and expected ones.

    The other devices follow their leaders (`followers`). A leader counts as held, or expected, if any device of its
    group is.
    """
    held, expected = held_and_expected(now)
    groups = {name: members for name in states if (members := together[name])[0] == (resource, name)}
    awaited = frozenset(name for name, members in groups.items() if not expected.isdisjoint(members))
    leaders = {
        # A leader that has arrived before others that the claim waits for counts as moving.
        name: State.TO_DRA if name in awaited and states[name] is State.DRA else states[name]
        for name in groups
    }
    return leaders, frozenset(name for name, members in groups.items() if not held.isdisjoint(members)), awaited


class FollowingMove(NamedTuple):
    """The move of a device that follows others. for_claim: whether they move to DRA because a claim needs one."""

    device: str
    side: Side
    reason: str
    for_claim: bool = False


def followers(now: RegisterSnapshot, resource: str, devices: Iterable[str], together: Together) -> list[FollowingMove]:
    """Return the moves of the devices that follow others of their group.

    A device follows the leader of its group. If one of them moves to DRA for a claim, all do.
    """
    _, expected = held_and_expected(now)
    moves: list[FollowingMove] = []
    for name in devices:
        members = together[name]
        awaited = next((now.device(*key) for key in members if key in expected), None)
        leader = now.device(*members[0])
        goal, reason = leader.state.goal, f"it moves with {leader.device}"
        if awaited is not None:
            goal, reason = Side.DRA, awaited.reason
        if len(members) > 1 and goal is not None and now.state(resource, name).goal not in (goal, None):
            moves.append(FollowingMove(name, goal, reason, awaited is not None))
    return moves


def groups(devices: Mapping[str, Device], links: Mapping[frozenset[str], float]) -> Sequence[frozenset[str]]:
    """Return groups of devices that belong together: by their closest links, else by NUMA node."""
    if linked := link_groups(devices, links):
        return linked
    by_numa: dict[tuple[int, ...], set[str]] = {}
    for name, device in devices.items():
        if device.numa_nodes:
            by_numa.setdefault(device.numa_nodes, set()).add(name)
    return tuple(frozenset(names) for names in by_numa.values()) if len(by_numa) > 1 else ()


def link_groups(devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[frozenset[str], ...]:
    """Return what the closest links tie together, if that are several groups; () if it is one, or nothing is tied.

    links: as of a source, higher is closer.
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
