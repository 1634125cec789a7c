"""ResourceSlices of other clients in the agent's pool: Events, reported problems, and moves that wait."""

from __future__ import annotations

from typing import Any

import pytest

from deviceplugin.register.records import State
from dra_bridge.node.status import BridgeStatus
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import NODE, AgentOnNode, D, R, fpgas, on_node

MOST = 2**63 - 1


def foreign(device: str, **metadata: Any) -> dict[str, Any]:
    """Return a slice of another client that offers a device on all nodes, in the highest generation."""
    pool = {"name": NODE, "generation": MOST, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "foreign", **metadata},
        "spec": {"driver": D, "allNodes": True, "pool": pool, "devices": [{"name": device}]},
    }


def events(here: AgentOnNode) -> list[str]:
    found = here.node.server.objects("events")
    return [event["message"] for event in found if event["reason"] == "PoolWrittenByOthers"]


def problems(here: AgentOnNode) -> list[str]:
    report = BridgeStatus(here.bridge.node, here.bridge.drivers).report()
    status: Any = report.status[D]
    assert set(status["problems"]) <= set(report.problems)
    return list(status["problems"])


async def test_one_event_says_it_and_the_pool_goes_on(node: FakeNode) -> None:
    """Another client's slice in the agent's pool is deleted three times; one Event names it, and devices still move."""
    async with on_node(node, fpgas(2)) as here:
        here.ask("1")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 1)
        for _ in range(3):
            node.server.create(foreign("ghost"))
            await here.until(lambda: {one["metadata"]["name"] for one in node.server.objects()}.isdisjoint({"foreign"}))
        await here.until(lambda: bool(events(here)))
        here.ask("all")
        await here.settle(State.DRA, State.DRA)
        await here.until(lambda: here.published == {"d0", "d1"})
        (text,) = events(here)
        assert text.startswith(f"driver {D}: slice foreign ")
        await here.until(lambda: problems(here) == [])


@pytest.mark.parametrize("mine", [True, False], ids=["its device", "another device"])
async def test_a_device_that_others_offer_stays_on_the_dra_side(node: FakeNode, *, mine: bool) -> None:
    """While another client's slice offers a device, its move to limits waits, with this reason; other devices move."""
    async with on_node(node, fpgas(2)) as here:
        here.ask("all")
        await here.settle(State.DRA, State.DRA)
        node.server.create(foreign("d1" if mine else "ghost", finalizers=["example.com/stays"]))
        await here.until(lambda: any("waits for its finalizers" in text for text in problems(here)))
        here.ask("none")
        await here.until(lambda: here.states["d0"] is State.PLUGIN)
        if mine:
            handover = here.bridge.drivers[D].resources[R].handover
            await here.until(lambda: "slice foreign of others" in str(handover.waiting.get("d1")))
            assert here.states["d1"] is State.TO_PLUGIN
        node.server.patch("resourceslices", "foreign", {"metadata": {"finalizers": None}})
        await here.settle(State.PLUGIN, State.PLUGIN)
        await here.until(lambda: problems(here) == [])
