"""All that can happen on a node of the model (`tests.model.small`), state by state; `tox -e model` visits more."""

from __future__ import annotations

import os
from typing import Any

import pytest

from deviceplugin.register.records import State
from tests.model.halves import Found, Half, Halves, Shared, joined, parted
from tests.model.mutations import BY_STATE, MUTATIONS, patched, without
from tests.model.small import Calm, Explored, Small, SystemState, explore, start

AT_LENGTH = os.environ.get("DEVICEPLUGIN_MODEL") == "long"
BOTH = (State.PLUGIN, State.DRA)
at_length = pytest.mark.skipif(not AT_LENGTH, reason="minutes; tox -e model")
exploration = pytest.mark.explore


def report(what: str, found: Explored) -> None:
    """Print how many states were visited (shown by pytest -s or tox -e model)."""
    print(f"{what}: {found.states} states, {'all there are' if found.whole else 'not all'}, {found.depth} steps deep")


def report_two(what: str, found: Found) -> None:
    """Print how many states of two devices were visited."""
    whole = "not all" if found.problem else "all there are"
    print(f"two devices, {what}: {found.states} states, {whole}, of {found.halves} halves")


def agree(halves: Halves, count: int) -> None:
    """Fail if steps of random states differ between `Halves` and `Small`, or depend on the devices' names."""
    for system in halves.some(count):
        here = parted(system)
        after = {parted(after) for _, after in halves.small.successors(system)} - {here}
        assert after == halves.after(system)
        other = {parted(after) for _, after in halves.small.successors(mirrored(*here))} - {parted(mirrored(*here))}
        assert other == {(shared, two, one) for shared, one, two in after}


def mirrored(shared: Shared, one: Half, two: Half) -> SystemState:
    """Return the state of these parts (halves: a device's part) with the devices' names exchanged."""
    return joined(shared, two, one)


QUICK = "one pod, one claim, no crashes"
ONE: list[tuple[str, State, dict[str, Any], bool]] = [
    (QUICK, State.PLUGIN, {"pods": 1, "claims": 1, "crashes": False}, False),
    ("two pods, one claim, no crashes", State.PLUGIN, {"claims": 1, "crashes": False}, False),
    ("two pods, no claims", State.PLUGIN, {"claims": 0}, False),
    ("two pods, no claims, cgroups may show nothing", State.PLUGIN, {"claims": 0, "blind": True}, False),
    ("one pod, one claim", State.DRA, {"pods": 1, "claims": 1}, True),
    ("two pods, one claim", State.PLUGIN, {"claims": 1}, True),
    ("two pods, two claims", State.DRA, {}, True),
]


@pytest.mark.parametrize(
    ("what", "state", "options", "long"),
    [pytest.param(*one, id=one[0], marks=() if one[0] == QUICK else exploration) for one in ONE],
)
def test_one_device_never_has_two_holders_whatever_happens(
    what: str, state: State, options: dict[str, Any], long: bool
) -> None:
    """With one device no reachable state is wrong; the long run also shows that each state comes to rest."""
    if long and not AT_LENGTH:
        pytest.skip("minutes; tox -e model")
    small = Small(devices=1, **options)
    found = explore(small, start(state), visit=Calm(small) if AT_LENGTH else lambda system: None)
    report(f"one device, {what}, from {state.value}", found)
    assert found.trace == ()
    assert found.whole


@exploration
def test_the_rules_without_their_second_net_suffice() -> None:
    """A device's state alone, without a check of holders of the other kind, keeps pods by limits and claims apart."""
    small = Small(devices=1, pods=2 if AT_LENGTH else 1, claims=2 if AT_LENGTH else 1, crashes=False)
    with patched(BY_STATE):
        found = explore(small, start(State.PLUGIN), wrong=small.through_both)
    report("one device, without the other side's holders", found)
    assert found.trace == ()
    assert found.whole


@exploration
@at_length
@pytest.mark.parametrize(
    ("what", "options"),
    [
        pytest.param("two pods, one claim, cgroups not visible", {"cgroups": False}, id="pod directories decide"),
        pytest.param("one pod, one claim, cgroups may show nothing", {"pods": 1, "blind": True}, id="blind cgroups"),
        pytest.param("one claim, moves turn round at any time", {"turns": True}, id="moves turn round"),
        # The kubelet composes a checkpoint under its lock and writes the file without the lock (1.36, writeCheckpoint).
        pytest.param("one pod, one claim, a late write", {"pods": 1, "faults": (), "slow": True}, id="late checkpoint"),
    ],
)
def test_one_device_without_crashes(what: str, options: dict[str, Any]) -> None:
    """No state is wrong if cgroups are not visible, moves are reversed at any time, or a checkpoint is written late."""
    small = Small(devices=1, claims=1, crashes=False, **options)
    found = explore(small, start(State.PLUGIN), wrong=small.doubled if "slow" in options else None)
    report(f"one device, {what}", found)
    assert found.trace == ()
    assert found.whole


@exploration
def test_a_lost_ledger_is_rebuilt_so_that_no_device_has_two_holders() -> None:
    """With one device no reachable state is wrong, also if the ledger is lost at any moment and is rebuilt."""
    small = Small(devices=1, pods=2 if AT_LENGTH else 1, claims=1, damage=True)
    found = explore(small, start(State.PLUGIN), most=10**9 if AT_LENGTH else 10_000, traced=False)
    report("one device, one claim, a lost ledger", found)
    assert found.trace == ()
    assert found.whole or not AT_LENGTH


@exploration
def test_two_devices_never_go_wrong_whatever_happens() -> None:
    """Two devices reach no wrong state: with one pod and all faults, or (long) with two pods, two claims and crashes.

    A state is wrong if a device has two holders, is offered to limits and claims, or is lost for good. From each state
    the system comes to a state in which everything that was begun has ended, and from there to rest. The long run
    (`tox -e model`) shows this for all states, other runs for random states.
    """
    small = Small() if AT_LENGTH else Small(pods=1, claims=0, crashes=False)
    halves = Halves(small)
    found = halves.explore(start(*BOTH))
    report_two("two pods, two claims, all faults and crashes" if AT_LENGTH else "one pod, no crashes", found)
    assert found.problem == ""
    agree(halves, 20_000 if AT_LENGTH else 100)
    calm = Calm(small)
    ended: dict[bool, set[SystemState]] = {serve: set(halves.ended(serve=serve)) for serve in (False, True)}
    for system in ended[False] | ended[True]:
        calm(system)
    for serve, states in ended.items():
        assert not AT_LENGTH or halves.endless(serve=serve) == ""
        for system in halves.some(1000 if AT_LENGTH else 50, seed=1):
            while after := next(small.ending(system, serve=serve), None):
                system = after
            assert joined(*parted(system)) in states or mirrored(*parted(system)) in states
    print(f"  left alone they come to {len(ended[False] | ended[True])} states, and on to rest")


@exploration
@at_length
def test_a_lost_ledger_of_two_devices_is_rebuilt_so_that_neither_has_two_holders() -> None:
    """With two devices, one pod, one claim and all faults, no state is wrong, also if the ledger is lost."""
    halves = Halves(Small(pods=1, claims=1, damage=True, reasons=False))
    found = halves.explore(start(*BOTH))
    report_two("one pod, one claim, all faults and crashes, a lost ledger", found)
    assert found.problem == ""
    agree(halves, 2000)


@exploration
@at_length
def test_two_devices_are_kept_apart_by_the_states_alone() -> None:
    """Two devices' states alone, without a check of holders of the other kind, keep pods by limits and claims apart."""
    small = Small(claims=1, reasons=False)
    with patched(BY_STATE):
        halves = Halves(small, small.through_both)
        found = halves.explore(start(*BOTH))
        report_two("two pods, one claim, all faults and crashes, without the other side's holders", found)
        assert found.problem == ""
        agree(halves, 2000)


SMALLER = [(0, 0, True, False), (1, 0, True, False), (0, 1, True, True), (1, 1, False, False)]


@exploration
@pytest.mark.parametrize(("pods", "claims", "crashes", "damage"), SMALLER if AT_LENGTH else SMALLER[:1])
def test_halves_are_all_states_and_no_other(pods: int, claims: int, crashes: bool, damage: bool) -> None:
    """For smaller nodes `Halves` finds exactly the states that `explore` finds by a visit of each."""
    small = Small(pods=pods, claims=claims, crashes=crashes, damage=damage)
    halves = Halves(small)
    found = halves.explore(start(*BOTH))
    first = start(*BOTH)

    def visit(system: SystemState) -> None:
        assert halves.seen(system)

    plain = explore(small, first, visit=visit, traced=False)
    report(f"two devices, {pods} pods, {claims} claims, one by one", plain)
    assert plain.whole
    assert plain.states == found.states
    assert halves.seen(first)


SMALLEST: dict[str, dict[str, Any]] = {
    "the question, between claims": {"pods": 0, "claims": 2, "faults": ()},
    "the checkpoint must be current": {"pods": 1, "faults": ("lose",)},
    "more checkpoints than writers": {"pods": 1, "slow": True},
    "processes": {"pods": 2, "claims": 0, "faults": ("force",)},
    "processes at a grant": {"pods": 2, "claims": 0, "faults": ("force",)},
    "cgroups count where they would show the pod": {"pods": 2, "claims": 0, "faults": ("force",), "blind": True},
    "holder: pod UIDs": {"pods": 2, "claims": 0, "faults": ("force",)},
    "claims: processes": {"pods": 1, "faults": ("claims",)},
}
"""What a node must have so that a mutation does harm; if not given, one pod, one claim and no faults."""


@exploration
@pytest.mark.parametrize("what", MUTATIONS)
def test_without_a_rule_or_some_evidence_the_model_finds_the_double_allocation(what: str) -> None:
    """Without a rule or kind of evidence the model finds a device with two holders, or offered to limits and claims."""
    options: dict[str, Any] = {"pods": 1, "claims": 1, "faults": (), **SMALLEST.get(what, {})}
    side = State.DRA if what.startswith(("Prepare", "commit to the plugin", "claims", "the question")) else State.PLUGIN
    old = what.endswith("after the move began")
    small = Small(devices=1, crashes=False, turns=old, **options)
    with without(what):
        found = explore(small, start(side), wrong=None if old else small.doubled)
    report(f"without {what}", found)
    assert found.trace, "no harm without it: the model does not see it, or nobody needs it"
    assert found.trace[-1].endswith("is offered on both sides" if old else "has 2 holders")
    print("  " + ", ".join(found.trace))


RULES = ["grant without a pod", "Allocate", "Prepare", "commit to DRA", "commit to the plugin"]


@exploration
@pytest.mark.parametrize("what", RULES if AT_LENGTH else RULES[:1])
def test_without_a_rule_two_devices_come_to_harm_too(what: str) -> None:
    """If a rule is switched off, the exploration by halves finds the double allocation, too."""
    small = Small(pods=1, claims=1, crashes=False, faults=())
    with without(what):
        halves = Halves(small, small.through_both)
        found = halves.explore(start(*BOTH))
        report_two(f"without {what}", found)
        assert found.problem.endswith("is held on both sides")
        agree(halves, 2000 if AT_LENGTH else 50)
