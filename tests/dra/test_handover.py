"""Which devices move, and what a move is told to wait for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from deviceplugin import ledger
from deviceplugin.ledger import Ledger, Side, State
from deviceplugin.sharing import device_of
from dra_bridge.handover import Share, ToDra, ToPlugin, in_hands, plan
from tests.model.flow import DEVICES, Flow, Outside, R, Source


async def test_a_device_stays_in_the_slice_until_no_claim_is_expected(tmp_path: Path) -> None:
    """R4: with its taint, while a claim is allocated that is not prepared yet; then it leaves, then it moves."""
    outside = Outside()
    flow = await Flow.begin(tmp_path, outside, Source())
    await flow.move(2)
    outside.say("allocated", "1=a")
    await flow.move(0, lambda: flow.state("b") is State.PLUGIN)
    assert flow.state("a") is State.TO_PLUGIN
    assert flow.handover.offered("a")
    assert flow.handover.leaving("a")
    assert flow.handover.waiting["a"] == "claim default/1"
    await flow.prepare("1")
    await flow.unprepare("1")
    outside.say("deallocated", "1")
    await flow.move(0)
    assert flow.slice() == []
    await flow.end()


async def test_a_claim_that_comes_late_finds_its_device_at_another_try(tmp_path: Path) -> None:
    """R2: an idle device moves to DRA for it and is not turned round by the share before it is there."""
    outside = Outside()
    flow = await Flow.begin(tmp_path, outside, Source())
    outside.say("allocated", "1=a")
    await flow.prepare("1")
    assert flow.state("a") in {State.DRA, State.TO_PLUGIN}
    await flow.unprepare("1")
    outside.say("deallocated", "1")
    await flow.move(0)
    await flow.end()


def test_devices_that_a_claim_came_for_are_not_turned_round() -> None:
    """Unless a pod has taken them meanwhile."""
    states = {"a": State.TO_DRA, "b": State.DRA, "c": State.PLUGIN}
    assert plan(states, (), Share(0)).to_plugin == ("a", "b")
    assert plan(states, (), Share(0), expected={"a"}).to_plugin == ("b",)
    assert plan(states, (), Share(1), expected={"a"}).to_plugin == ("b",)


def test_what_is_in_hands_is_not_expected(tmp_path: Path) -> None:
    """A pod that was given the device while it moved makes the claim wait."""
    claim = ledger.Claim("d", "1", "default", "c", (ledger.ClaimDevice(R, "a"),), None, 1.0)
    with Ledger.open(str(tmp_path / "ledger.db")) as book:
        book.do(ledger.adopt(R, DEVICES, Side.PLUGIN, 1.0))
        book.do(ledger.reserve(claim, durable=True, pull=True))
        assert in_hands(book.snapshot, R) == (frozenset(), frozenset("a"))
        book.do(ledger.grant(R, {"a": "a"}, 1.0))
        assert in_hands(book.snapshot, R) == (frozenset("a"), frozenset())


@pytest.mark.parametrize("replicas", [1, 2])
def test_evidence_is_gathered_in_the_order_of_the_rule(tmp_path: Path, replicas: int) -> None:
    """R5: a device counts as shown only with none of its ids healthy; without a listener none does."""
    with Ledger.open(str(tmp_path / "ledger.db")) as book:
        book.do(ledger.adopt(R, DEVICES, Side.PLUGIN, 1.0))
        book.do(ledger.begin_move(R, DEVICES, Side.DRA, 1.0))
        moving = ToDra.begun(R, book.snapshot)
        behind = partial(device_of, replicas=replicas)
        assert moving.devices == DEVICES
        assert moving.showing(None, behind).shown == {}
        healthy = frozenset({"b" if replicas == 1 else "b::1"})
        assert moving.showing((3.0, healthy), behind).shown == {"a": 3.0}
        assert moving.looking(5).looked(None, behind) is None
        assert ToPlugin.begun(R, book.snapshot).devices == ()
