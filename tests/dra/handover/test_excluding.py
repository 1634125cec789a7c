"""Devices that are the same hardware, or parts of the same hardware, given to pods and claims on the fake node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from deviceplugin.device import Device
from deviceplugin.kubelet.status import Withheld
from deviceplugin.register import operations
from deviceplugin.register.records import RecordKey, State
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import AgentOnNode, D, Listed, R, on_node

A, B = R, "example.com/half"
E = "other.example.com"


def part(name: str, slices: int) -> Device:
    return Device(name, consumes={"gpu": {"slices": slices}}, counters={"gpu": {"slices": 2}})


def parts() -> tuple[Listed, Listed]:
    """Return a source with a whole device, and a source with the device's two halves; both have the same driver."""
    return Listed(A, D, part("w", 2)), Listed(B, D, part("h0", 1), part("h1", 1))


async def settle(here: AgentOnNode, state: State) -> None:
    await here.until(lambda: here.states == dict.fromkeys(("h0", "h1", "w"), state))


async def test_parts_of_one_device_move_together(node: FakeNode) -> None:
    """If one part of a device moves, all parts move, and no part is offered before all have arrived."""
    async with on_node(node, *parts()) as here:
        await here.until(lambda: here.healthy() == {"w", "h0", "h1"})
        pod = await here.run("p", {B: 1})
        (held,) = pod.devices[B]
        here.ask("1")
        await here.until(lambda: sorted(state.value for state in here.states.values()) == ["dra", "dra", "to-dra"])
        assert here.states[held] is State.TO_DRA
        assert not here.published & {"w", "h0", "h1"}
        assert not here.healthy()
        await here.stopped(pod)
        await settle(here, State.DRA)
        await here.until(lambda: len(here.published) == 3)
        here.ask("none")
        await settle(here, State.PLUGIN)
        await here.until(lambda: here.healthy() == {"w", "h0", "h1"})


async def test_a_claim_that_comes_for_a_part_has_all_of_them_move(node: FakeNode) -> None:
    """For a claim for one part of a device, all parts move to DRA; the plugin offers none until the claim has ended."""
    async with on_node(node, *parts()) as here:
        await here.until(lambda: here.healthy() == {"w", "h0", "h1"})
        claim = here.allocate("c", D, here.names["h1"])
        while error := await here.prepare(D, claim):
            assert "moved" in error
        await here.until(lambda: here.states == {"h0": State.PLUGIN, "h1": State.TO_PLUGIN, "w": State.PLUGIN})
        assert not here.healthy()
        assert not await here.unprepare(D, claim)
        here.node.server.delete("resourceclaims", "c", "default")
        await settle(here, State.PLUGIN)
        await here.until(lambda: here.healthy() == {"w", "h0", "h1"})


async def test_a_claim_is_decided_with_what_moves_along(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare gives the ledger all devices, of both resources, that would move together with the claim's device."""
    told: list[object] = []
    prepare = operations.prepare

    def spied(*of: Any, along: Collection[RecordKey] = (), **more: Any) -> Any:
        told.append(along)
        return prepare(*of, along=along, **more)

    monkeypatch.setattr(operations, "prepare", spied)
    async with on_node(node, *parts()) as here:
        await here.until(lambda: here.healthy() == {"w", "h0", "h1"})
        assert not await here.prepare(D, here.allocate("c", D, here.names["h1"]))
        assert set(told) == {frozenset({(A, "w"), (B, "h0"), (B, "h1")})}


async def test_a_device_of_two_drivers_has_one_holder(node: FakeNode) -> None:
    """Devices of two drivers are the same hardware: if one is for limits and one for claims, neither is offered.

    While a pod holds one of the two, claims for the other are refused.
    """
    async with on_node(
        node, Listed(A, D, Device("one", identity="x")), Listed(B, E, Device("two", identity="x"))
    ) as here:
        await here.until(lambda: here.healthy() == {"one", "two"})
        here.ask("all", E)
        await here.until(lambda: here.states.get("two") is State.DRA and not here.healthy())
        assert not here.published & {"one", "two"}
        reason = f"overlaps two of {B}, which is for claims"
        advice = "; give both resources the share none, or both the share all"
        withheld = {"one": Withheld("excluded", reason + advice)}
        await here.until(lambda: here.bridge.agent.services[A].status().withheld == withheld)
        here.ask("none", E)
        await here.until(lambda: here.healthy() == {"one", "two"})
        pod = await here.run("p", {A: 1})
        await here.until(lambda: here.healthy() == {"one"})
        here.ask("all", E)
        await here.until(lambda: here.states["two"] is State.DRA)
        assert "the same hardware" in await here.prepare(E, here.allocate("c", E, here.names["two"]))
        await here.stopped(pod)
