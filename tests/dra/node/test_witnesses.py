"""A whole agent on the embedded node that errs as real ones do: no device ever has two holders.

What a real node is made to do as well is in tests/scenarios/sides.py. In each test `released` is called for no device
that a container has at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from deviceplugin import claim_files
from deviceplugin.device import Device
from deviceplugin.register.records import State
from deviceplugin.testing import Checkpoint, ContainerSpec, FakePod
from dra_bridge.driver import preparation
from dra_bridge.node import claim_reconciliation
from dra_bridge.testing.node import FakeNode, overlaps
from tests.dra.handover.test_moves import D, R, Source, World
from tests.dra.handover.test_moves import world as plain_world

ONE = {R: 1}


class Wiped(Source):
    """Devices that are wiped when they come free."""

    def __init__(self, count: int, node: FakeNode) -> None:
        super().__init__(count)
        self.wiped: list[str] = []
        self.wrong: list[str] = []
        self._node = node

    def released(self, devices: Sequence[Device]) -> None:
        self.wiped += [device.id for device in devices]
        self.wrong += [device.id for device in devices if device.id in in_use(self._node)]


def in_use(node: FakeNode) -> set[str]:
    """Return the devices of pods of which a container runs, or is about to."""
    with node.changed:
        pods = [*node.pods.values(), *node.orphans.values()]
        running = [pod for pod in pods if any(one.state == "running" for one in pod.all_containers.values())]
        return {device for pod in running for device in node.devices_of(pod)}


class Witnessed(World):
    """An agent on a node, and what it says of the witnesses."""

    def __init__(self, inner: World, source: Wiped) -> None:
        super().__init__(inner.node, inner.bridge)
        self.source = source

    async def scans(self, count: int = 5) -> None:
        """Wait for so many more scans, and what follows from them."""
        seen: set[float] = set()
        tracker = self.bridge.agent.tracker

        def enough() -> bool:
            seen.add(tracker.snapshot.at)
            return len(seen) > count

        await self.until(enough)

    async def listening(self) -> None:
        """Wait until a kubelet that has restarted listens to the plugin, and was scanned then."""
        endpoint = self.bridge.agent.services[R].endpoint
        await self.until(lambda: endpoint.streams.shown() is not None and bool(self.node.devices(R)))
        await self.scans()

    async def reconcile(self) -> None:
        await self.bridge.drivers[D].claims.reconcile(sweep=True)


@contextlib.asynccontextmanager
async def world(node: FakeNode, tmp_path: Path, count: int = 1, *, offered: bool = True) -> AsyncIterator[Witnessed]:
    source = Wiped(count, node)
    async with plain_world(node, tmp_path, source, offered=offered) as made:
        yield Witnessed(made, source)
        assert overlaps(node.holdings()) == []
        assert source.wrong == []


async def run(node: FakeNode, name: str = "p") -> FakePod:
    return await asyncio.to_thread(node.run_pod, name, ONE, check=False)


async def claimant(node: FakeNode, name: str = "c") -> FakePod:
    pod = node.start_pod(name, template={D: 1})
    return await asyncio.to_thread(pod.wait_running, 60)


def checkpointed(node: FakeNode) -> set[str]:
    """Return the UIDs of the pods that the checkpoint names."""
    return {entry.pod_uid for entry in Checkpoint.from_json(node.checkpoint.read_bytes()).entries or ()}


async def test_restarts_release_nothing_that_is_in_use(node: FakeNode, tmp_path: Path) -> None:
    """Neither the kubelet's restart nor the agent's calls `released` for devices of running pods and claims."""
    async with world(node, tmp_path, 3) as here:
        here.ask("1")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 1)
        pod, user = await run(node), await claimant(node)
        held = {*node.devices_of(pod), *node.devices_of(user)}
        node.hold_sources()
        await asyncio.to_thread(node.restart)
        await here.listening()
    async with world(node, tmp_path, 3) as here:
        await here.scans()
        assert here.source.wiped == []
        node.release_sources()
        await here.until(lambda: bool(here.source.wiped))
        assert held.isdisjoint(here.source.wiped)
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: pod.device_ids[0] in here.source.wiped)


async def test_devices_that_came_free_while_no_agent_ran_are_released_at_the_start(
    node: FakeNode, tmp_path: Path
) -> None:
    """Once, when it is known who holds what; of either side, and none that is held."""
    async with world(node, tmp_path, 4) as here:
        here.ask("2")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 2)
        users = {await run(node), await claimant(node)}
        held = {device for pod in users for device in node.devices_of(pod)}
    async with world(node, tmp_path, 4) as here:
        await here.until(lambda: bool(here.source.wiped))
        await here.scans()
        assert sorted(here.source.wiped) == sorted({"d0", "d1", "d2", "d3"} - held)


@pytest.mark.parametrize("own", [False, True], ids=["CDI file alone", "own file"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_ledger_and_claim_state_are_lost_and_a_claims_pod_hangs(
    node: FakeNode, tmp_path: Path, when: str, *, own: bool
) -> None:
    """The claim's files hold its device until the pod's processes end or, if the pod is unknown, the boot.

    after: the kubelet had listed the pod before, so no process runs whose claims are unknown: the files name the pod.
    """
    async with world(node, tmp_path) as here:
        here.ask("all")
        await here.settle(State.DRA)
        pod = await claimant(node)
        path, cdi = here.bridge.ledger_path, Path(here.bridge.node.drivers.cdi_directory)
    await asyncio.to_thread(node.stop)
    if when == "before":
        pod.force_delete(hang=True)
        assert node.server.objects("resourceclaims") == []
    node.damage_claim_state("deleted")
    for file in (*path.parent.glob(f"{path.name}*"), *(() if own else cdi.glob("*.claim"))):
        file.unlink()
    await asyncio.to_thread(node.start)
    async with world(node, tmp_path, offered=False) as again:
        again.ask("none")
        await again.until(lambda: again.states == {"d0": State.TO_PLUGIN} or bool(again.healthy))
        if when == "after":
            await again.reconcile()
            pods = again.bridge.drivers[D].claims.pods
            await again.until(lambda: pod.uid in pods.recorded)
            pod.force_delete(hang=True)
        for _ in range(3):
            await again.reconcile()
        assert again.states == {"d0": State.TO_PLUGIN}
        assert len(again.claims) == 1
        await asyncio.to_thread(pod.end_containers, 60)
        await again.reconcile()
        if own or when == "after":
            await again.settle(State.PLUGIN)
        else:
            assert len(again.claims) == 1


async def test_a_pod_that_joins_a_claim_is_in_the_claims_file(node: FakeNode, tmp_path: Path) -> None:
    """The kubelet does not tell the driver; the claim state does, before a lost ledger would need it."""
    async with plain_world(node, tmp_path, Wiped(1, node)) as here:
        here.ask("all")
        await here.settle(State.DRA)
        node.claim("mine", D)
        pods = [node.start_pod(name, claims=["mine"]) for name in ("first", "second")]
        for pod in pods:
            await asyncio.to_thread(pod.wait_running, 60)
        await here.bridge.drivers[D].claims.pods.running()
        (file,) = claim_files.read_all(here.bridge.node.drivers.cdi_directory)
        assert file.pods == {pod.uid for pod in pods}


async def test_a_claim_ends_soon_after_the_processes_that_outlive_it(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet was answered that it is unprepared; its device does not wait for the next regular reconciliation."""
    monkeypatch.setattr(preparation, "PATIENCE", 0.0)
    monkeypatch.setattr(claim_reconciliation, "RECONCILE", 3600.0)
    async with world(node, tmp_path) as here:
        here.ask("all")
        await here.settle(State.DRA)
        pod = await claimant(node)
        pod.force_delete(hang=True)
        await asyncio.to_thread(node.reconcile_claims)
        (claim,) = here.bridge.drivers[D].driver.records.all()
        assert claim.result is None
        await asyncio.to_thread(pod.end_containers, 60)
        await here.until(lambda: not here.claims)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_claims_second_pod_that_the_kubelet_has_forgotten(
    node: FakeNode, tmp_path: Path, restarted: bool
) -> None:
    """It joined the claim and was deleted by force before the agent knew of it, and its container hangs."""
    source = Wiped(1, node)
    async with contextlib.AsyncExitStack() as agents:
        here = await agents.enter_async_context(plain_world(node, tmp_path, source))
        here.ask("all")
        await here.settle(State.DRA)
        wiped = list(source.wiped)
        node.claim("mine", D)
        first = node.start_pod("first", claims=["mine"])
        await asyncio.to_thread(first.wait_running, 60)
        second = node.start_pod("second", claims=["mine"])
        await asyncio.to_thread(second.wait_running, 60)
        second.force_delete(hang=True)
        await asyncio.to_thread(node.reconcile_claims)
        assert second.uid not in (node.root / "dra_manager_state").read_text()
        if restarted:
            await agents.aclose()
            here = await agents.enter_async_context(plain_world(node, tmp_path, source, offered=False))
            await here.until(lambda: bool(here.bridge.drivers[D].registrar.statistics.registrations))
        bridge = here.bridge.drivers[D]
        assert second.uid not in next(iter(bridge.async_ledger.snapshot.claims.values())).pods
        ending = asyncio.create_task(asyncio.to_thread(first.delete, 60))
        await here.until(lambda: "unknown" in bridge.driver.statistics.unprepare.failures)
        await bridge.claims.reconcile(sweep=True)
        assert here.claims == {"default/mine"}
        assert source.wiped == wiped
        await asyncio.to_thread(second.end_containers, 60)
        await ending
        await here.until(lambda: source.wiped != wiped)
    assert source.wrong == []


async def test_claims_end_while_other_pods_run(node: FakeNode, tmp_path: Path) -> None:
    """Pods that the kubelet lists, or did when they ran, keep no claim of others prepared."""
    async with world(node, tmp_path, 2) as here:
        other = await run(node, "other")
        here.ask("1")
        await here.until(lambda: list(here.states.values()).count(State.DRA) == 1)
        await here.reconcile()
        await asyncio.to_thread(other.force_delete, hang=True)
        pod = await claimant(node)
        bystander = node.start_pod("bystander")
        await asyncio.to_thread(bystander.wait_running, 60)
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: not here.claims)
        assert not here.bridge.drivers[D].driver.statistics.unprepare.failures
        await asyncio.to_thread(other.end_containers, 60)


async def test_an_init_container_named_like_an_earlier_pods_container(node: FakeNode, tmp_path: Path) -> None:
    """A holder is a pod's UID and a container, not a name: the ended pod's end is not the running pod's."""
    async with world(node, tmp_path) as here:
        ended = await asyncio.to_thread(node.run_pod, "ended", containers={"work": ONE})
        await here.scans(1)
        await asyncio.to_thread(ended.complete)
        await here.until(lambda: here.healthy == {"d0"})
        pod = node.start_pod("p", init_containers=[ContainerSpec("work", ONE, lasting=True)])
        await here.until(lambda: pod.container("work").state == "running")
        here.ask("all")
        await here.settle(State.TO_DRA)
        await here.scans()
        assert here.states == {"d0": State.TO_DRA}
        await asyncio.to_thread(pod.end_init_container, "work", 60)
        await asyncio.to_thread(pod.delete, 60)
        await here.settle(State.DRA)


async def test_agent_and_checkpoint_are_lost_soon_after_a_grant(node: FakeNode, tmp_path: Path) -> None:
    """The next agent knows the holder, though no process of it ran when the former agent last asked the witnesses."""
    async with world(node, tmp_path) as here:
        await here.until(lambda: here.source.wiped == ["d0"])
        here.bridge.agent.scanner.period = 1000.0  # from the next scan on there is only that after a grant
        here.bridge.agent.scanner.wanted.set()
        await here.scans(1)
        node.lose_network()
        pod = node.start_pod("p", ONE)
        async_ledger = here.bridge.drivers[D].async_ledger
        await here.until(
            lambda: any(pod.uid in dict(hold.holders) for hold in async_ledger.snapshot.allocations.values())
        )
    node.restore_network()
    await asyncio.to_thread(pod.wait_running, 60)
    await asyncio.to_thread(node.stop)
    node.damage_checkpoint("deleted")
    await asyncio.to_thread(node.start)
    async with world(node, tmp_path, offered=False) as again:
        await again.listening()
        assert not again.healthy
        assert again.source.wiped == []
        await asyncio.to_thread(pod.delete, 60)
        await again.until(lambda: again.healthy == {"d0"} and again.source.wiped == ["d0"])


async def test_a_pod_that_ended_by_a_reboot(node: FakeNode, tmp_path: Path) -> None:
    """Its move ends without its deletion: the kubelet is asked again until its checkpoint does not name the pod."""
    async with world(node, tmp_path, 2) as here:
        pod = await run(node)
        (device,) = pod.device_ids
        await here.scans(1)
        here.ask("all")
        await here.until(lambda: here.states[device] is State.TO_DRA)
        await asyncio.to_thread(node.reboot)
        await here.settle(State.DRA, State.DRA)
    assert "default/p" in node.pods


async def test_devices_move_to_the_plugin_side_without_a_kubelet(node: FakeNode, tmp_path: Path) -> None:
    """That side's evidence comes from the API server alone; moves to DRA wait for the kubelet."""
    async with world(node, tmp_path, 2) as here:
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
        await here.until(lambda: here.healthy == {"d0", "d1"})


async def test_a_checkpoint_that_is_written_late(node: FakeNode, tmp_path: Path) -> None:
    """It was made up while a device was with DRA, and misses a pod that has no process yet; the device is held."""
    async with world(node, tmp_path) as here:
        here.ask("all")
        await here.settle(State.DRA)
        await here.until(lambda: not here.healthy)
        node.hold_checkpoint_writes()
        before = len(node.updates(R))
        here.bridge.agent.services[R].endpoint.streams.resend()
        await here.until(lambda: len(node.updates(R)) > before)
        here.ask("none")
        await here.until(lambda: here.healthy == {"d0"})
        node.lose_network()
        pod = node.start_pod("p", ONE)
        await here.until(lambda: pod.uid in checkpointed(node))
        here.ask("all")
        await here.settle(State.TO_DRA)
        await here.scans()
        node.land_checkpoint_writes()
        await here.scans()
        assert here.states == {"d0": State.TO_DRA}
        node.restore_network()
        await asyncio.to_thread(pod.wait_running, 60)
        await asyncio.to_thread(pod.delete, 60)
        await here.settle(State.DRA)


async def test_the_agent_dies_before_it_learns_the_pod_and_the_checkpoint_is_lost(
    node: FakeNode, tmp_path: Path
) -> None:
    """A grant that the ledger records without a holder counts as in use: its device is neither released nor moved."""
    async with world(node, tmp_path, 2) as here:
        await here.until(lambda: sorted(here.source.wiped) == ["d0", "d1"])
        await here.bridge.agent.scanner._scanning.acquire()  # no scan learns the pod
        pod = await run(node)
        (held,) = pod.device_ids
        assert [hold.pending for hold in here.bridge.drivers[D].async_ledger.snapshot.allocations.values()] == [True]
    await asyncio.to_thread(node.stop)
    node.damage_checkpoint("deleted")
    await asyncio.to_thread(node.start)
    async with world(node, tmp_path, 2) as here:
        here.ask("all")
        (idle,) = {"d0", "d1"} - {held}
        await here.until(lambda: here.states[idle] is State.DRA)
        await here.until(lambda: idle in here.source.wiped)
        async_ledger = here.bridge.drivers[D].async_ledger
        await here.until(
            lambda: [hold.holders for hold in async_ledger.snapshot.allocations.values()] == [{(pod.uid, "")}]
        )
        assert here.states[held] is State.TO_DRA
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: held in here.source.wiped)
        await here.until(lambda: here.states[held] is State.DRA)
