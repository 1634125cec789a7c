"""Moves of an agent's devices on the fake node: shared devices, cancelled moves, unplugged devices."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from deviceplugin.node import logs
from deviceplugin.register import waits
from deviceplugin.register.records import State
from deviceplugin.testing import FakePod
from dra_bridge.kube import ClusterError
from dra_bridge.node import slice_feed
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import D, R, fpgas, on_node


async def test_what_a_move_waits_for_is_reported_after_a_restart(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, the agent and its report say again that a device's move to DRA waits for the device's pod."""
    monkeypatch.setattr(slice_feed, "HOLDERS", 0.1)
    async with on_node(node, fpgas(1)) as here:
        await here.run("p", {R: 1})
        here.ask("all")
        await here.settle(State.TO_DRA)
        await here.until(lambda: [one.waits for one in here.told.values()] == ["pod default/p"])
    async with on_node(node, fpgas(1), offered=False) as here:
        await here.until(lambda: here.waiting.get("d0") == "pod default/p")
        await here.until(lambda: [one.waits for one in here.told.values()] == ["pod default/p"])


async def test_a_shared_device_moves_as_a_whole(node: FakeNode) -> None:
    """A shared device moves to DRA after its last pod has ended, serves two claims, and returns after both end."""
    async with on_node(node, fpgas(1, replicas=2)) as here:
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})
        plain = [await asyncio.to_thread(node.run_pod, name, {R: 1}) for name in ("p0", "p1")]
        here.ask("all")
        await here.settle(State.TO_DRA)
        await here.until(lambda: not here.healthy())
        await here.stopped(plain[0])
        await here.until(lambda: here.waiting.get("d0") == "pod default/p1")
        assert here.states == {"d0": State.TO_DRA}
        await here.stopped(plain[1])
        await here.settle(State.DRA)
        claimed = [node.start_pod(name, template={D: 1}) for name in ("c0", "c1")]
        for pod in claimed:
            await asyncio.to_thread(pod.wait_running, 60)
        assert [node.devices_of(pod) for pod in claimed] == [{"d0": "claim"}] * 2
        here.ask("none")
        await here.settle(State.TO_PLUGIN)
        await here.stopped(claimed[0])
        await here.until(lambda: len(here.claims) == 1 and here.waiting.get("d0", "").startswith("claim default/"))
        assert here.waits["d0"].on_holder
        assert here.states == {"d0": State.TO_PLUGIN}
        assert not here.healthy()
        await here.stopped(claimed[1])
        await here.settle(State.PLUGIN)
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})


async def test_a_move_that_waits_is_given_to_a_device_that_becomes_idle(node: FakeNode) -> None:
    """While the move of a held device waits, another device becomes idle: it moves, and the held device stays.

    The same holds on the way back to the plugin.
    """
    async with on_node(node, fpgas(2)) as here:

        async def one_moves(pods: Sequence[FakePod], before: State, moving: State, after: State) -> None:
            held = {next(iter(node.devices_of(pod))): pod for pod in pods}
            here.ask("1")
            await here.until(lambda: set(here.states.values()) == {before, moving})
            (waits,) = (name for name, state in here.states.items() if state is moving)
            (other,) = {"d0", "d1"} - {waits}
            await here.stopped(held[other])
            await here.until(lambda: here.states == {waits: before, other: after})
            await here.stopped(held[waits])

        pods = [await here.run(name, {R: 1}) for name in ("p0", "p1")]
        await one_moves(pods, State.PLUGIN, State.TO_DRA, State.DRA)
        here.ask("all")
        await here.until(lambda: set(here.states.values()) == {State.DRA})
        claims = [await here.claimant(name) for name in ("c0", "c1")]
        await one_moves(claims, State.DRA, State.TO_PLUGIN, State.PLUGIN)


async def test_moves_and_claims_are_in_the_log(node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    """The log has lines about moves and claims, with fields for resource, device, pod and claim."""
    caplog.set_level(logging.DEBUG)
    async with on_node(node, fpgas(1)) as here:
        pod = await here.run("p", {R: 1})
        here.ask("all")
        await here.until(lambda: here.waiting.get("d0") == "pod default/p")
        await here.stopped(pod)
        await here.settle(State.DRA)
        user = await here.claimant("c")
        (claim,) = here.claims
        await here.stopped(user)
        await here.until(lambda: "was unprepared: 1 device" in caplog.text)
    lines = {line["msg"]: line for line in map(json.loads, map(logs.JsonFormatter().format, caplog.records))}
    leaves, arrived = (
        "1 device begins to move to the DRA side (the share is all)",
        "1 device moved to the DRA side",
    )
    assert lines[leaves]["level"] == lines[arrived]["level"] == "info"
    assert lines[leaves]["resource"] == lines[arrived]["resource"] == R
    waits = lines["the move of device d0 waits for pod default/p"]
    assert [waits[name] for name in ("level", "resource", "device", "pod")] == ["info", R, "d0", "default/p"]
    prepared = next(line for text, line in lines.items() if text.endswith("was prepared: 1 device"))
    assert (prepared["level"], prepared["driver"], prepared["claim"]) == ("info", D, claim)
    named = next(line for text, line in lines.items() if text.endswith(f"has device d0 of {R}"))
    assert [named[name] for name in ("resource", "device", "claim")] == [R, "d0", claim]


async def test_a_move_to_the_plugin_is_cancelled_after_the_slice_has_lost_the_device(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move to the plugin is cancelled when the slice has lost the device: the device is published and claimed again.

    A later move to the plugin waits for that claim.
    """
    async with on_node(node, fpgas(1)) as here:
        here.ask("all")
        await here.settle(State.DRA)
        driver, asked = here.bridge.drivers[D], asyncio.Event()
        allocated = driver.devices.evidence.allocated

        async def away() -> object:
            # The first list of claims lets the device leave the slices; the second list would end the move.
            if driver.feed.withdrawn(R, "d0") is not None:
                asked.set()
                raise ClusterError("the API server is away")
            return await allocated()

        with monkeypatch.context() as outage:
            outage.setattr(driver.devices.evidence, "allocated", away)
            here.ask("none")
            async with asyncio.timeout(60):
                await asked.wait()
            assert not here.published
            assert here.states == {"d0": State.TO_PLUGIN}
            here.ask("all")
            await here.settle(State.DRA)
        pod = await here.claimant("c")
        assert node.devices_of(pod) == {"d0": "claim"}
        assert not here.healthy()
        here.ask("none")
        await here.settle(State.TO_PLUGIN)
        await here.until(lambda: here.waiting.get("d0", "").startswith("claim default/") and not here.published)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("share", ["none", "all"])
async def test_an_unplugged_device_is_forgotten_once_nobody_holds_it(
    node: FakeNode, share: str, held: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The records of an unplugged device are deleted once it has no holder; when it is back, it is offered again.

    The log warns if the device had a holder. It says that the device's records are deleted, not that the device has
    moved.
    """
    caplog.set_level(logging.INFO)
    source = fpgas(2)
    async with on_node(node, source) as here:
        here.ask(share)
        await here.settle(*[State.DRA if share == "all" else State.PLUGIN] * 2)
        pod = None
        if held:
            asked: dict[str, Any] = {"limits": {R: 2}} if share == "none" else {"template": {D: 2}}
            pod = node.start_pod("p", **asked)
            await asyncio.to_thread(pod.wait_running, 60)
        source.list("d0")
        if pod is not None:
            await here.until(lambda: "d1" in here.told and here.told["d1"].gone)
            await here.stopped(pod)
        await here.until(lambda: set(here.told) == {"d0"} == set(here.states))
        await here.until(lambda: "without a holder are deleted: d1" in caplog.text)  # logged after the deletion
        lines = {line["msg"]: line for line in map(json.loads, map(logs.JsonFormatter().format, caplog.records))}
        (vanished,) = (line for text, line in lines.items() if text.startswith("device d1 vanished"))
        assert (vanished["level"], vanished["device"]) == ("warning" if held else "info", "d1")
        assert vanished["msg"].endswith("has it") is held  # the line names the pod if a scan has seen it
        forgotten = lines["the records of unplugged devices without a holder are deleted: d1"]
        assert (forgotten["resource"], forgotten["device"]) == (R, "d1")
        assert "moved to the plugin side" not in caplog.text
        source.list("d0", "d1")
        await here.until(lambda: {"d0", "d1"} == (here.published if share == "all" else here.healthy()))
        await here.until(lambda: set(here.told) == {"d0", "d1"})


async def test_a_device_that_is_unplugged_on_its_way_to_the_plugin_does_not_wait_for_ever(node: FakeNode) -> None:
    """If a claimed device is unplugged while it moves to the plugin, its records are deleted when the claim ends."""
    source = fpgas(2)
    async with on_node(node, source) as here:
        here.ask("all")
        await here.settle(State.DRA, State.DRA)
        pod = await here.claimant("c", template={D: 2})
        here.ask("none")
        await here.settle(State.TO_PLUGIN, State.TO_PLUGIN)
        source.list("d0")
        await here.until(lambda: "d1" in here.told and here.told["d1"].gone)
        await here.stopped(pod)
        await here.until(lambda: here.states == {"d0": State.PLUGIN} and set(here.told) == {"d0"})


async def test_a_claim_gets_the_device_that_pods_by_limits_would_have_without_a_pause(node: FakeNode) -> None:
    """A refused claim gets the device of a pod when that pod ends, before another pod with limits that waits for it.

    Meanwhile the device is withheld from pods; it returns to the plugin when the claim has ended.
    """
    async with on_node(node, fpgas(1)) as here:
        holder = await here.run("p0", {R: 1})
        following = node.start_pod("p1", {R: 1})
        claim = here.allocate("c", D, here.names["d0"])
        assert "held by" in await here.prepare(D, claim)
        await here.settle(State.TO_DRA)
        await here.until(lambda: not here.healthy())
        await here.scans()
        assert here.states == {"d0": State.TO_DRA}
        assert holder.running
        await here.stopped(holder)
        await here.settle(State.TO_PLUGIN)
        assert await here.prepare(D, claim) == ""
        assert not following.running
        assert await here.unprepare(D, claim) == ""
        node.remove_claim("c")
        await asyncio.to_thread(following.wait_running, 60)


@pytest.mark.parametrize("end", ["unprepared", "not tried again"])
async def test_a_withheld_device_returns_when_its_claim_is_gone(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A device withheld for a refused claim returns to limits when the claim is unprepared, or is not tried again.

    The device's holder still runs. A later refusal withholds the device again.
    """
    async with on_node(node, fpgas(1)) as here:
        holder = await here.run("p0", {R: 1})
        claim = here.allocate("c", D, here.names["d0"])
        for _ in range(2):
            with monkeypatch.context() as soon:
                soon.setattr(waits, "RETRIED", 120.0 if end == "unprepared" else 2.0)
                assert "held by" in await here.prepare(D, claim)
            await here.settle(State.TO_DRA)
            if end == "unprepared":
                assert await here.unprepare(D, claim) == ""
            await here.settle(State.PLUGIN)
            await here.until(lambda: here.healthy() == {"d0"})
        assert holder.running
