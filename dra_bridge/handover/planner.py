"""Which devices are to move next: pure functions over the ledger's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deviceplugin.exclusion import Key
from deviceplugin.topology import natural
from dra_bridge.handover.share import Drain, Share
from dra_bridge.ledger import (
    Side,
    Snapshot,
    State,
)

__all__ = ["Group", "Plan", "followers", "in_hands", "led", "plan"]


def in_hands(now: Snapshot, resource: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the devices that a pod or a claim holds, and those that move because a claim came for them.

    One that a pod took while it moved is not expected any more: that claim waits for the pod.
    """
    records = now.of(resource)
    given = {hold.device for hold in now.allocations_on(resource, records)}
    claimed = {name for claim in now.claims_on(resource, records) for of, name in claim.held if of == resource}
    pulled = {name for name, record in records.items() if record.pulled}
    return frozenset(given | claimed), frozenset(pulled - given)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to begin now; to turn round under way is to begin the other way.

    to_dra, to_plugin: devices whose move begins. draining: devices on the plugin's side that are to
    move once they are idle (drain: wait); new pods had better get others.
    """

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

    states: of every device that counts; quarantined ones are on no side and stay where they are.
    held: devices in the hands of a pod or a claim. groups: devices that belong together (links,
    a switch, a NUMA node), which move whole rather than in fragments. expected: devices on their
    way to DRA because a claim came for them (R2); those are not turned round, or no retry of that
    claim would ever find its device.

    Moves under way are kept where they serve the share: first those that ended on DRA, then those
    still moving. Idle devices move before held ones, and held ones only with `cordon`.
    """
    devices = sorted((name for name, state in states.items() if state is not State.QUARANTINED), key=natural)
    want = share.of(len(devices))
    bound = [name for name in devices if states[name] in (State.DRA, State.TO_DRA)]
    if len(bound) < want:
        rest = [name for name in devices if name not in set(bound)]
        chosen = _choose(rest, want - len(bound), bound, held, groups, turning=State.TO_PLUGIN, states=states)
        if drain == "cordon":
            return Plan(to_dra=chosen)
        now = tuple(name for name in chosen if name not in held or states[name] is State.TO_PLUGIN)
        return Plan(to_dra=now, draining=frozenset(chosen) - frozenset(now))
    if len(bound) > want:
        rest = [name for name in devices if name not in set(bound)]
        free = [name for name in bound if states[name] is not State.TO_DRA or name not in expected]
        count = min(len(bound) - want, len(free))
        back = _choose(free, count, rest, held, groups, turning=State.TO_DRA, states=states)
        if drain == "cordon":
            return Plan(to_plugin=back)
        return Plan(to_plugin=tuple(name for name in back if name not in held or states[name] is State.TO_DRA))
    return Plan()


def _choose(
    candidates: Sequence[str],
    count: int,
    there: Collection[str],
    held: Collection[str],
    groups: Sequence[frozenset[str]],
    *,
    turning: State,
    states: Mapping[str, State],
) -> tuple[str, ...]:
    """Choose `count` candidates to go where `there` are already.

    Devices whose own move is turned round by it go first (they are held by nobody on the other
    side), then whole groups: those begun already, then those that fit, idle ones before held ones.
    """
    at = {name: index for index, name in enumerate(candidates)}
    chosen: list[str] = [name for name in candidates if states[name] is turning][:count]
    groups = [group for group in groups if group & at.keys()] or []
    grouped = frozenset().union(*groups) if groups else frozenset()
    parts = [*groups, *(frozenset({name}) for name in candidates if name not in grouped)]
    while len(chosen) < count:
        missing = count - len(chosen)
        left = [members for group in parts if (members := [n for n in group if n in at and n not in chosen])]

        def price(members: list[str], missing: int = missing) -> tuple[bool, int, bool, int, int]:
            whole = next(group for group in parts if members[0] in group)
            begun = len(whole & set(there)) + len(whole & set(chosen))
            idle = [name for name in members if name not in held]
            return (
                not idle,  # something to be had at once
                -begun if len(whole) > 1 else 0,  # a group that is broken up already
                len(members) > missing,  # a group that would be broken up
                -min(len(idle), missing),  # much of it idle
                min(at[name] for name in members),
            )

        members = min(left, key=price)
        idle_first = sorted(members, key=lambda name: (name in held, at[name]))
        idle = [name for name in idle_first if name not in held]
        others_idle = any(name not in held for group in left if group is not members for name in group)
        take = idle if idle and others_idle else idle_first
        chosen.extend(take[:missing])
    return tuple(chosen)


Group = Callable[[str], tuple[Key, ...]]
"""Returns a device and those of its driver that move together with it, the one that leads first."""


def led(
    now: Snapshot, resource: str, states: Mapping[str, State], group: Group
) -> tuple[dict[str, State], frozenset[str], frozenset[str]]:
    """Return what `plan` decides about: the states of devices that lead or are by themselves, held and expected ones.

    The others follow (`followers`), so the parts of one device count as one. A leader is held, or expected, if any
    device of its group is.
    """
    held, expected = _hands(now)
    leaders, busy, awaited = {}, set(), set()
    for name, state in states.items():
        members = group(name)
        if members[0] == (resource, name):
            leaders[name] = state
            if not held.isdisjoint(members):
                busy.add(name)
            if not expected.isdisjoint(members):
                awaited.add(name)
                if state is State.DRA:  # it arrived before others that the claim waits for
                    leaders[name] = State.TO_DRA
    return leaders, frozenset(busy), frozenset(awaited)


def followers(now: Snapshot, resource: str, devices: Iterable[str], group: Group) -> list[tuple[str, Side, str]]:
    """Return the devices that are to move because of others that they belong together with: where to, and why.

    A device follows the one that leads its group. Where a claim came for one of them, all move to DRA.
    """
    _, expected = _hands(now)
    moves: list[tuple[str, Side, str]] = []
    for name in devices:
        members = group(name)
        awaited = next((now.device(*key) for key in members if key in expected), None)
        leader = now.device(*members[0])
        goal = Side.DRA if awaited is not None else leader.state.goal
        if len(members) > 1 and goal is not None and now.device(resource, name).state.goal not in (goal, None):
            moves.append((name, goal, awaited.reason if awaited is not None else f"it moves with {leader.device}"))
    return moves


def _hands(now: Snapshot) -> tuple[frozenset[Key], frozenset[Key]]:
    """Return what is held, and what a claim waits for, of all resources (`in_hands`)."""
    hands = {resource: in_hands(now, resource) for resource in {key[0] for key in now.devices}}
    return (
        frozenset((resource, name) for resource, (held, _) in hands.items() for name in held),
        frozenset((resource, name) for resource, (_, expected) in hands.items() for name in expected),
    )
