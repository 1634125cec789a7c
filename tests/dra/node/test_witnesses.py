"""An agent on the fake node with failures as on real nodes: no device ever has two holders.

Failures that tests also cause on real nodes are in tests/scenarios/sides.py. In each test, the hook `released` is never
called for a device that a container has at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from deviceplugin.cdi import own_directory
from deviceplugin.device import Device
from deviceplugin.register import claim_files
from deviceplugin.register.records import State
from dra_bridge.driver import preparation
from dra_bridge.node import claim_checks
from dra_bridge.testing.node import FakeNode, overlaps
from tests.dra.agents import AgentOnNode, D, Listed, R, on_node

ONE = {R: 1}


class Wiped(Listed):
    """A source that notes for which devices `released` is called. wrong: devices that a container had then."""

    def __init__(self, count: int, node: FakeNode) -> None:
        super().__init__(R, D, *(f"d{number}" for number in range(count)))
        self.wiped: list[str] = []
        self.wrong: list[str] = []
        self._node = node

    def released(self, devices: Sequence[Device]) -> None:
        self.wiped += [device.id for device in devices]
        self.wrong += [device.id for device in devices if device.id in in_use(self._node)]


def in_use(node: FakeNode) -> set[str]:
    """Return the devices of pods with a running container."""
    with node.changed:
        pods = [*node.pods.values(), *node.orphans.values()]
        running = [pod for pod in pods if any(one.state == "running" for one in pod.all_containers.values())]
        return {device for pod in running for device in node.devices_of(pod)}


@contextlib.asynccontextmanager
async def witnessed(
    node: FakeNode, count: int = 1, *, offered: bool = True
) -> AsyncIterator[tuple[AgentOnNode, Wiped]]:
    source = Wiped(count, node)
    async with on_node(node, source, offered=offered) as here:
        yield here, source
        assert overlaps(node.holdings()) == []
        assert source.wrong == []


async def reconcile(here: AgentOnNode) -> None:
    await here.bridge.drivers[D].claims.reconcile(sweep=True)


async def test_devices_that_came_free_while_no_agent_ran_are_released_at_the_start(node: FakeNode) -> None:
    """At the agent's start, `released` is called once for each device without a holder, be it for limits or claims.

    It is not called for held devices.
    """
    async with witnessed(node, 4) as (here, source):
        here.ask("2")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 2)
        users = {await here.run("p", ONE), await here.claimant("c")}
        held = {device for pod in users for device in node.devices_of(pod)}
    async with witnessed(node, 4) as (here, source):
        await here.until(lambda: bool(source.wiped))
        await here.scans()
        assert sorted(source.wiped) == sorted({"d0", "d1", "d2", "d3"} - held)


@pytest.mark.parametrize("own", [False, True], ids=["CDI file alone", "own file"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_ledger_and_claim_state_are_lost_and_a_claims_pod_hangs(node: FakeNode, when: str, *, own: bool) -> None:
    """A claim's files keep its device held until the pod's processes end, and longer if no file names the pod.

    before: the pod is deleted by force while kubelet and agent are down, so only the agent's own file names the pod.
    after: the agent learns from the kubelet which pod has the claim, before the pod is deleted by force.
    """
    async with witnessed(node) as (here, _):
        here.ask("all")
        await here.settle(State.DRA)
        pod = await here.claimant("c")
        path, cdi = here.bridge.ledger_path, Path(here.bridge.node.drivers.cdi_directory)
    await asyncio.to_thread(node.stop)
    if when == "before":
        pod.force_delete(hang=True)
        assert node.server.objects("resourceclaims") == []
    node.damage_claim_state("deleted")
    for file in (*path.parent.glob(f"{path.name}*"), *(() if own else cdi.glob("*/*.claim"))):
        file.unlink()
    await asyncio.to_thread(node.start)
    async with witnessed(node, offered=False) as (again, _):
        again.ask("none")
        await again.until(lambda: again.states == {"d0": State.TO_PLUGIN} or bool(again.healthy()))
        if when == "after":
            await reconcile(again)
            pods = again.bridge.drivers[D].claims.pods
            await again.until(lambda: pod.uid in pods.recorded)
            pod.force_delete(hang=True)
        for _ in range(3):
            await reconcile(again)
        assert again.states == {"d0": State.TO_PLUGIN}
        assert len(again.claims) == 1
        await asyncio.to_thread(pod.end_containers, 60)
        await reconcile(again)
        if own or when == "after":
            await again.settle(State.PLUGIN)
        else:
            assert len(again.claims) == 1


async def test_a_pod_that_joins_a_claim_is_in_the_claims_file(node: FakeNode) -> None:
    """A second pod of a prepared claim is added to the claim's file, as the kubelet's claim state names that pod."""
    async with on_node(node, Wiped(1, node)) as here:
        here.ask("all")
        await here.settle(State.DRA)
        node.claim("mine", D)
        pods = [node.start_pod(name, claims=["mine"]) for name in ("first", "second")]
        for pod in pods:
            await asyncio.to_thread(pod.wait_running, 60)
        await here.bridge.drivers[D].claims.pods.running()
        (file,) = claim_files.read_all(own_directory(here.bridge.node.drivers.cdi_directory))
        assert file.pods == {pod.uid for pod in pods}


async def test_a_pod_is_recorded_before_its_claim_ends(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim's pod is recorded soon after the pod runs, before the next regular reconciliation."""
    monkeypatch.setattr(claim_checks, "RECONCILE", 3600.0)
    async with witnessed(node) as (here, _):
        here.ask("all")
        await here.settle(State.DRA)
        pod = await here.claimant("c")
        await here.until(lambda: pod.uid in here.bridge.drivers[D].claims.pods.recorded)


async def test_a_claim_ends_soon_after_the_processes_that_outlive_it(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that was unprepared while its pod's processes hang ends soon after these processes have ended."""
    monkeypatch.setattr(preparation, "PATIENCE", 0.0)
    monkeypatch.setattr(claim_checks, "RECONCILE", 3600.0)
    async with witnessed(node) as (here, _):
        here.ask("all")
        await here.settle(State.DRA)
        pod = await here.claimant("c")
        pod.force_delete(hang=True)
        await asyncio.to_thread(node.reconcile_claims)
        (claim,) = here.bridge.drivers[D].driver.records.all()
        assert claim.result is None
        await asyncio.to_thread(pod.end_containers, 60)
        await here.until(lambda: not here.claims)


async def test_devices_move_to_the_plugin_side_without_a_kubelet(node: FakeNode) -> None:
    """Without a kubelet, devices move from claims to limits; moves from limits to claims wait for the kubelet."""
    async with witnessed(node, 2) as (here, _):
        here.ask("1")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 1)
        await asyncio.to_thread(node.stop)
        here.ask("none")
        await here.settle(State.PLUGIN, State.PLUGIN)
        here.ask("all")
        await here.settle(State.TO_DRA, State.TO_DRA)
        await here.until(lambda: len(here.waiting) == 2)
        assert set(here.states.values()) == {State.TO_DRA}
        here.ask("none")
        await here.settle(State.PLUGIN, State.PLUGIN)
        await asyncio.to_thread(node.start)
        await here.until(lambda: here.healthy() == {"d0", "d1"})


async def never(wanted: object = ()) -> None:
    """Wait for ever, in place of a scan."""
    await asyncio.Event().wait()


async def test_the_agent_dies_before_it_learns_the_pod_and_the_checkpoint_is_lost(node: FakeNode) -> None:
    """If the agent dies before it learns a grant's pod, and the checkpoint is lost, the device counts as held.

    The device is neither released nor moved until the pod has ended.
    """
    async with witnessed(node, 2) as (here, source):
        await here.until(lambda: sorted(source.wiped) == ["d0", "d1"])
        await here.bridge.agent.scanner.scan()  # wait for a scan that is running
        here.bridge.agent.tracker.scan = never  # type: ignore[method-assign]
        pod = await here.run("p", ONE)
        (held,) = pod.device_ids
        assert [hold.pending for hold in here.bridge.drivers[D].async_ledger.snapshot.allocations.values()] == [True]
    await asyncio.to_thread(node.stop)
    node.damage_checkpoint("deleted")
    await asyncio.to_thread(node.start)
    async with witnessed(node, 2) as (here, source):
        here.ask("all")
        (idle,) = {"d0", "d1"} - {held}
        await here.until(lambda: here.states[idle] is State.DRA)
        await here.until(lambda: idle in source.wiped)
        async_ledger = here.bridge.drivers[D].async_ledger
        await here.until(
            lambda: [hold.holders for hold in async_ledger.snapshot.allocations.values()] == [{(pod.uid, "main")}]
        )
        assert here.states[held] is State.TO_DRA
        await here.stopped(pod)
        await here.until(lambda: held in source.wiped)
        await here.until(lambda: here.states[held] is State.DRA)
