"""Moves of a whole agent's devices on the embedded node: shared devices, and moves that are cancelled on their way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.agent import Paths
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.ledger import State
from deviceplugin.source import DeviceSource
from dra_bridge.agent import Bridge, Terms
from dra_bridge.cluster import Cluster, ClusterError
from dra_bridge.fleet import share_patch
from dra_bridge.handover import parse_share
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from tests.dra.classes import device_class

R = "example.com/fpga"
D = "fpga.example.com"
NODE = "node"


class Source(DeviceSource):
    """Devices that say so in their container."""

    resource = R
    driver = D

    def __init__(self, count: int, replicas: int = 1) -> None:
        self.replicas = replicas
        self._names = [f"d{number}" for number in range(count)]

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(name, edits=ContainerEdits({f"FPGA_{name}": "1"})) for name in self._names]


class World:
    """An agent on a node."""

    def __init__(self, node: FakeNode, bridge: Bridge) -> None:
        self.node = node
        self.bridge = bridge

    def ask(self, share: str) -> None:
        """Annotate the Node."""
        node = self.node.server.get("nodes", NODE)
        node["metadata"].setdefault("annotations", {}).update(share_patch(D, share)["metadata"]["annotations"])
        self.node.server.replace(node)

    @property
    def states(self) -> dict[str, State]:
        if D not in self.bridge.drivers:
            return {}
        return {name: record.state for name, record in self.bridge.drivers[D].desk.snapshot.of(R).items()}

    @property
    def claims(self) -> set[str]:
        return {claim.title for claim in self.bridge.drivers[D].desk.snapshot.claims.values()}

    @property
    def published(self) -> list[Mapping[str, Any]]:
        return [device for one in self.node.server.objects() for device in one["spec"].get("devices") or ()]

    @property
    def waiting(self) -> dict[str, str]:
        return dict(self.bridge.drivers[D].handovers[R].waiting)

    @property
    def healthy(self) -> set[str]:
        return {name for name, one in self.node.devices(R).items() if one.health == "Healthy"}

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until something is so."""
        try:
            async with asyncio.timeout(60):
                while not what():  # noqa: ASYNC110  # what is waited for tells nobody
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"it does not come: {self.states}, waiting {self.waiting}, healthy {self.healthy}")

    async def settle(self, *states: State) -> None:
        await self.until(lambda: tuple(self.states.values()) == states)


@contextlib.asynccontextmanager
async def world(node: FakeNode, tmp_path: Path, source: Source) -> AsyncIterator[World]:
    bridge = Bridge(
        [source],
        {R: Terms(parse_share("none"))},
        Cluster.from_server(node.server.url),
        NODE,
        Paths(kubelet_root=node.root),
        cdi_directory=str(tmp_path / "cdi"),
        period=0.05,
    )
    task = asyncio.create_task(bridge.run())
    try:
        here = World(node, bridge)
        await here.until(lambda: len(here.healthy) > 0)
        yield here
    finally:
        bridge.agent.stop()
        async with asyncio.timeout(60):
            await task


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeApiServer() as server:
        server.create(device_class(D, R))
        with FakeNode(server, NODE) as made:
            yield made


async def test_a_shared_device_moves_as_a_whole(node: FakeNode, tmp_path: Path) -> None:
    """It waits for all of its pods, goes to as many claims, waits for all of these, and comes back whole."""
    async with world(node, tmp_path, Source(1, replicas=2)) as here:
        await here.until(lambda: here.healthy == {"d0::0", "d0::1"})
        plain = [await asyncio.to_thread(node.run_pod, name, {R: 1}) for name in ("p0", "p1")]
        here.ask("all")
        await here.settle(State.TO_DRA)
        await here.until(lambda: not here.healthy)
        await asyncio.to_thread(plain[0].delete, 60)
        await here.until(lambda: here.waiting.get("d0") == "pod default/p1")
        assert here.states == {"d0": State.TO_DRA}
        await asyncio.to_thread(plain[1].delete, 60)
        await here.settle(State.DRA)
        claimed = [node.start_pod(name, template={D: 1}) for name in ("c0", "c1")]
        for pod in claimed:
            await asyncio.to_thread(pod.wait_running, 60)
        assert [node.devices_of(pod) for pod in claimed] == [{"d0": "claim"}] * 2
        here.ask("none")
        await here.settle(State.TO_PLUGIN)
        await asyncio.to_thread(claimed[0].delete, 60)
        await here.until(lambda: len(here.claims) == 1 and here.waiting.get("d0") == "its claim")
        assert here.states == {"d0": State.TO_PLUGIN}
        assert not here.healthy
        await asyncio.to_thread(claimed[1].delete, 60)
        await here.settle(State.PLUGIN)
        await here.until(lambda: here.healthy == {"d0::0", "d0::1"})


async def test_a_move_to_dra_is_cancelled_while_a_pod_holds_the_device(node: FakeNode, tmp_path: Path) -> None:
    """It is offered to pods as before; the pod goes on, and claims never see the device."""
    async with world(node, tmp_path, Source(1)) as here:
        pod = await asyncio.to_thread(node.run_pod, "p", {R: 1})
        here.ask("all")
        await here.until(lambda: here.waiting.get("d0") == "pod default/p" and not here.healthy)
        here.ask("none")
        await here.settle(State.PLUGIN)
        await here.until(lambda: here.healthy == {"d0"})
        assert pod.running
        await asyncio.to_thread(pod.delete, 60)
        await asyncio.to_thread(node.run_pod, "q", {R: 1})


async def test_a_move_to_the_plugin_is_cancelled_while_a_claim_holds_the_device(node: FakeNode, tmp_path: Path) -> None:
    """It is offered to claims again without its taint; the next claim gets it."""
    async with world(node, tmp_path, Source(1)) as here:
        here.ask("all")
        await here.settle(State.DRA)
        pod = node.start_pod("c", template={D: 1})
        await asyncio.to_thread(pod.wait_running, 60)
        here.ask("none")
        await here.settle(State.TO_PLUGIN)
        await here.until(lambda: bool(here.waiting))
        here.ask("all")
        await here.settle(State.DRA)
        await asyncio.to_thread(pod.delete, 60)
        again = node.start_pod("d", template={D: 1})
        await asyncio.to_thread(again.wait_running, 60)
        assert not here.healthy


async def test_a_move_to_the_plugin_is_cancelled_after_the_slice_has_lost_the_device(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was withdrawn is published again; evidence of the cancelled move counts for no later one."""
    async with world(node, tmp_path, Source(1)) as here:
        here.ask("all")
        await here.settle(State.DRA)
        driver = here.bridge.drivers[D]
        allocated, asked = driver.allocated, asyncio.Event()

        async def away() -> object:
            # The first list lets the device leave the slices, the second one would end the move.
            if driver.withdrawn(R, "d0") is not None:
                asked.set()
                raise ClusterError("the API server is away")
            return await allocated()

        with monkeypatch.context() as outage:
            outage.setattr(driver, "allocated", away)
            here.ask("none")
            async with asyncio.timeout(60):
                await asked.wait()
            assert not here.published
            assert here.states == {"d0": State.TO_PLUGIN}
            here.ask("all")
            await here.settle(State.DRA)
        pod = node.start_pod("c", template={D: 1})
        await asyncio.to_thread(pod.wait_running, 60)
        assert node.devices_of(pod) == {"d0": "claim"}
        assert not here.healthy
        # That the slice was without it once counts no more: now it stays there, with a taint, for its claim (R4).
        here.ask("none")
        await here.settle(State.TO_PLUGIN)
        await here.until(lambda: here.waiting.get("d0") == "its claim")
        await here.until(lambda: [bool(one.get("taints")) for one in here.published] == [True])
