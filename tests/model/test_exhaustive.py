"""All that can happen on a small node, looked at one by one; `tox -e model` looks at more."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from deviceplugin.ledger import Rules, State
from tests.model.halves import Found, Half, Halves, Shared, joined, parted
from tests.model.small import Calm, Explored, Small, World, explore, start

AT_LENGTH = os.environ.get("DEVICEPLUGIN_MODEL") == "long"
BOTH = (State.PLUGIN, State.DRA)


def told(what: str, found: Explored) -> None:
    """Print how much was seen (pytest -s, or tox -e model)."""
    print(f"{what}: {found.worlds} states, {'all there are' if found.whole else 'not all'}, {found.depth} steps deep")


def told_of_two(what: str, found: Found) -> None:
    """Print how much of two devices was seen."""
    whole = "not all" if found.problem else "all there are"
    print(f"two devices, {what}: {found.worlds} states, {whole}, of {found.halves} halves")


def agree(halves: Halves, count: int) -> None:
    """Fail if the halves lead some world elsewhere than the model does, or devices' names matter; at random."""
    for world in halves.some(count):
        here = parted(world)
        after = {parted(after) for _, after in halves.small.successors(world)} - {here}
        assert after == halves.after(world)
        other = {parted(after) for _, after in halves.small.successors(mirrored(*here))} - {parted(mirrored(*here))}
        assert other == {(shared, two, one) for shared, one, two in after}


def mirrored(shared: Shared, one: Half, two: Half) -> World:
    """Return the world of two halves with the devices' names exchanged."""
    return joined(shared, two, one)


@pytest.mark.parametrize("state", BOTH)
def test_one_device_never_has_two_holders_whatever_happens(state: State) -> None:
    """One device, two pods, two claims, crashes: every state there is; nothing wrong, nothing lost for ever."""
    small = Small(devices=1)
    found = explore(small, start(state), visit=Calm(small) if AT_LENGTH or state is State.DRA else lambda world: None)
    told(f"one device, two pods, two claims, from {state.value}", found)
    assert found.trace == ()
    assert found.whole


def test_the_rules_without_their_second_net_suffice() -> None:
    """R1 to R6 alone keep the doors apart, without looking at the other side's holders."""
    small = Small(Rules(holders=False), devices=1, crashes=AT_LENGTH)
    found = explore(small, start(State.PLUGIN), wrong=small.through_both)
    told("one device, two pods, two claims, holders not looked at", found)
    assert found.trace == ()
    assert found.whole


def test_a_lost_ledger_is_rebuilt_so_that_no_device_has_two_holders() -> None:
    """One device, two pods, two claims, the ledger lost at any moment."""
    small = Small(devices=1, damage=True)
    found = explore(small, start(State.PLUGIN), most=10**9 if AT_LENGTH else 60_000, traced=False)
    told("one device, two pods, two claims, a lost ledger", found)
    assert found.trace == ()
    assert found.whole or not AT_LENGTH


def test_two_devices_never_go_wrong_whatever_happens() -> None:
    """Two devices, two pods; two claims and crashes at length, else one claim and none: every state there is.

    No device with two holders, none offered on both sides; none lost for ever either: whatever
    world is left alone comes to one where all has ended that was begun, and from each of these
    on to rest. That it comes there is shown at length, else tried with worlds at random.
    """
    small = Small() if AT_LENGTH else Small(claims=1, crashes=False)
    halves = Halves(small)
    found = halves.explore(start(*BOTH))
    told_of_two("two pods, two claims" if AT_LENGTH else "two pods, one claim, no crashes", found)
    assert found.problem == ""
    agree(halves, 20_000 if AT_LENGTH else 300)
    calm = Calm(small)
    ended: dict[bool, set[World]] = {serve: set(halves.ended(serve=serve)) for serve in (False, True)}
    for world in ended[False] | ended[True]:
        calm(world)
    for serve, worlds in ended.items():
        assert not AT_LENGTH or halves.endless(serve=serve) == ""
        for world in halves.some(1000 if AT_LENGTH else 100, seed=1):
            while after := next(small.ending(world, serve=serve), None):
                world = after
            assert joined(*parted(world)) in worlds or mirrored(*parted(world)) in worlds
    print(f"  left alone they come to {len(ended[False] | ended[True])} states, and on to rest")


@pytest.mark.skipif(not AT_LENGTH, reason="a minute or more; tox -e model")
def test_a_lost_ledger_of_two_devices_is_rebuilt_so_that_neither_has_two_holders() -> None:
    """Two devices, two pods, one claim, crashes, the ledger lost at any moment."""
    halves = Halves(Small(claims=1, damage=True))
    found = halves.explore(start(*BOTH))
    told_of_two("two pods, one claim, a lost ledger", found)
    assert found.problem == ""
    agree(halves, 2000)


@pytest.mark.skipif(not AT_LENGTH, reason="a minute or more; tox -e model")
def test_two_devices_are_kept_apart_without_the_second_net() -> None:
    """R1 to R6 alone keep the doors of two devices apart, without looking at the other side's holders."""
    small = Small(Rules(holders=False))
    halves = Halves(small, small.through_both)
    found = halves.explore(start(*BOTH))
    told_of_two("two pods, two claims, holders not looked at", found)
    assert found.problem == ""
    agree(halves, 2000)


SMALLER = [(0, 0, True, False), (1, 0, True, False), (0, 1, True, True), (1, 1, False, False)]


@pytest.mark.parametrize(("pods", "claims", "crashes", "damage"), SMALLER if AT_LENGTH else SMALLER[:1])
def test_halves_are_all_worlds_and_no_other(pods: int, claims: int, crashes: bool, damage: bool) -> None:
    """Of smaller nodes the halves make up the very worlds that are found when each is looked at."""
    small = Small(pods=pods, claims=claims, crashes=crashes, damage=damage)
    halves = Halves(small)
    found = halves.explore(start(*BOTH))
    first = start(*BOTH)

    def visit(world: World) -> None:
        assert halves.seen(world)

    plain = explore(small, first, visit=visit, traced=False)
    told(f"two devices, {pods} pods, {claims} claims, one by one", plain)
    assert plain.whole
    assert plain.worlds == found.worlds
    assert halves.seen(first)


@pytest.mark.parametrize("rule", ["allocate", "prepare", "to_dra", "to_plugin", "release"])
def test_without_a_rule_the_model_finds_the_double_allocation(rule: str) -> None:
    """R1, R2, R5, R6 and R7: each is needed, and the model would notice."""
    small = Small(replace(Rules(holders=False), **{rule: False}), devices=1, crashes=False)
    found = explore(small, start(State.PLUGIN), wrong=small.through_both)
    told(f"without {rule}", found)
    assert found.trace, "no harm without the rule: the model does not see it, or nobody needs it"
    assert found.trace[-1].endswith("is held through both doors")
    print("  " + ", ".join(found.trace))


@pytest.mark.parametrize("rule", ["release", "allocate", "prepare", "to_dra", "to_plugin"][: 5 if AT_LENGTH else 1])
def test_without_a_rule_two_devices_come_to_harm_too(rule: str) -> None:
    """Halves do not hide the double allocation."""
    small = Small(replace(Rules(holders=False), **{rule: False}), pods=1, claims=1, crashes=False)
    halves = Halves(small, small.through_both)
    found = halves.explore(start(*BOTH))
    told_of_two(f"without {rule}", found)
    assert found.problem.endswith("is held through both doors")
    agree(halves, 2000 if AT_LENGTH else 50)
