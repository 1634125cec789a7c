"""All that can happen on a small node, looked at one by one; `tox -e model` looks at more."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from deviceplugin.ledger import Rules, State
from tests.model.small import Calm, Explored, Small, explore, start

AT_LENGTH = os.environ.get("DEVICEPLUGIN_MODEL") == "long"
BOTH = (State.PLUGIN, State.DRA)


def told(what: str, found: Explored) -> None:
    """Print how much was seen (pytest -s, or tox -e model)."""
    print(f"{what}: {found.worlds} states, {'all there are' if found.whole else 'not all'}, {found.depth} steps deep")


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


def test_two_devices_two_pods_and_two_claims_never_go_wrong() -> None:
    """Every state within the bound: no device with two holders, none offered on both sides, none lost for ever."""
    small = Small()
    calm = Calm(small)
    count = 0

    def visit(world: object) -> None:
        nonlocal count
        count += 1
        if AT_LENGTH or count % 50 == 0:
            calm(world)  # type: ignore[arg-type]

    most = int(os.environ.get("DEVICEPLUGIN_MODEL_STATES", "3000000")) if AT_LENGTH else 60_000
    found = explore(small, start(*BOTH), most=most, visit=visit, traced=False)
    told("two devices, two pods, two claims", found)
    assert found.trace == ()


@pytest.mark.parametrize("rule", ["allocate", "prepare", "to_dra", "to_plugin", "release"])
def test_without_a_rule_the_model_finds_the_double_allocation(rule: str) -> None:
    """R1, R2, R5, R6 and R7: each is needed, and the model would notice."""
    small = Small(replace(Rules(holders=False), **{rule: False}), devices=1, crashes=False)
    found = explore(small, start(State.PLUGIN), wrong=small.through_both)
    told(f"without {rule}", found)
    assert found.trace, "no harm without the rule: the model does not see it, or nobody needs it"
    assert found.trace[-1].endswith("is held through both doors")
    print("  " + ", ".join(found.trace))
