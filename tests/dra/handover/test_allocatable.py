"""The allocatable number of devices in a Node's status: lowered before devices leave, raised when they are back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.podresources import PodResources
from deviceplugin.register.records import State
from deviceplugin.testing.pods import FakePod
from dra_bridge.handover import allocatable
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.share import Share
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.node_object import numbers
from dra_bridge.rollout.fleet import share_patch
from dra_bridge.testing.apiserver import Fault, LoggedRequest
from dra_bridge.testing.node import FakeNode
from tests.dra import agents
from tests.dra.agents import NODE, D, R, fake_node, fpgas
from tests.waits import until


class FakeStatus:
    """The status of a Node. writes_back: after each write of the agent the kubelet writes its own number of devices."""

    def __init__(self, number: int | None = 8, *, takes: bool = True, writes_back: bool = False) -> None:
        self.writes: list[int] = []
        self.healthy = frozenset[str]()
        self.wrote = asyncio.Event()
        self._takes, self._writes_back = takes, writes_back
        self.status = AllocatableStatus(
            self.write, cast("PodResources", self), grace=0.05, pauses=lambda: Backoff(first=0.0, most=0.0)
        )
        self.status.observe({} if number is None else {R: number})

    async def write(self, resource: str, number: int) -> bool:
        assert resource == R
        self.writes.append(number)
        self.wrote.set()
        if self._writes_back:
            asyncio.get_running_loop().call_later(0.01, self.status.observe, {R: 8})
        return self._takes

    async def allocatable(self, resource: str) -> frozenset[str]:
        return self.healthy


async def test_a_lower_number_is_written_once_and_waited_for() -> None:
    """A lower allocatable number is written and awaited; a second call with the same number writes nothing."""
    cluster = FakeStatus()
    assert await cluster.status.lower(R, 5)
    assert not await cluster.status.lower(R, 5)
    assert cluster.writes == [5]


async def test_a_number_that_the_kubelet_writes_back_is_written_again() -> None:
    """If the kubelet writes its old allocatable number back, the agent writes the lower number again."""
    cluster = FakeStatus()
    lowering = asyncio.create_task(cluster.status.lower(R, 5))
    async with asyncio.timeout(10):
        await cluster.wrote.wait()
        cluster.wrote.clear()
        cluster.status.observe({R: 8})
        await cluster.wrote.wait()
        assert await lowering
    assert cluster.writes == [5, 5]


async def test_a_number_that_comes_late_is_written_over() -> None:
    """A late kubelet report with the old number is overwritten; a higher number stays once devices have come back."""
    cluster = FakeStatus()
    assert await cluster.status.lower(R, 5)
    cluster.wrote.clear()
    cluster.status.observe({R: 8})
    async with asyncio.timeout(10):
        await cluster.wrote.wait()
    assert cluster.writes == [5, 5]
    cluster.healthy = frozenset(f"d{number}" for number in range(6))
    cluster.status.taken_back(R, {"d5"})
    cluster.status.observe({R: 6})
    await asyncio.sleep(0)
    assert cluster.writes == [5, 5]
    await cluster.status.close()


async def test_a_number_that_comes_much_later_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet report with the old number that comes long after the devices were withdrawn is not overwritten."""
    monkeypatch.setattr(allocatable, "LATE", 0.0)
    cluster = FakeStatus()
    assert await cluster.status.lower(R, 5)
    cluster.status.observe({R: 8})
    await asyncio.sleep(0)
    assert cluster.writes == [5]
    await cluster.status.close()


async def test_without_the_right_nothing_is_waited_for() -> None:
    """An agent that may not write the Node's status tries once, and does not wait for the lower number."""
    cluster = FakeStatus(takes=False)
    assert not await cluster.status.lower(R, 5)
    assert cluster.writes == [5]


async def test_a_node_that_does_not_name_the_resource_needs_no_write() -> None:
    """If the Node's status does not list the resource, nothing is written."""
    cluster = FakeStatus(None)
    assert not await cluster.status.lower(R, 0)
    assert cluster.writes == []


async def test_a_kubelet_that_writes_its_number_all_the_time_does_not_stop_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kubelet restores its number after each write, the agent stops at a deadline, and the log says so."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(allocatable, "LOWER_DEADLINE", 0.3)
    cluster = FakeStatus(writes_back=True)
    assert not await cluster.status.lower(R, 5)
    assert len(cluster.writes) > 1
    assert "the Node shows more than 5 allocatable" in caplog.text


async def test_the_number_rises_when_the_kubelet_has_the_devices() -> None:
    """The allocatable number rises in one write once the kubelet counts all returned devices as healthy."""
    cluster = FakeStatus(5)
    cluster.healthy = frozenset({"d0", "d1"})
    cluster.status.taken_back(R, {"d5", "d6"})
    cluster.status.taken_back(R, {"d7"})
    await asyncio.sleep(0)
    assert cluster.writes == []
    cluster.healthy = frozenset(f"d{number}" for number in range(8))
    async with asyncio.timeout(10):
        await cluster.wrote.wait()
    assert cluster.writes == [8]
    await cluster.status.close()


async def test_the_number_does_not_rise_above_what_stays() -> None:
    """The allocatable number rises only by the number of returned devices, although the kubelet still counts more."""
    cluster = FakeStatus(8)
    cluster.healthy = frozenset(f"d{number}" for number in range(8))
    assert await cluster.status.lower(R, 3)
    cluster.status.observe({R: 2})
    cluster.wrote.clear()
    cluster.status.taken_back(R, {"d7"})
    async with asyncio.timeout(10):
        await cluster.wrote.wait()
    assert cluster.writes == [3, 4]
    await cluster.status.close()


def test_quantities_are_read() -> None:
    """A quantity such as 1k is 1000 devices; a quantity that cannot be parsed is left out."""
    assert numbers({R: "8", "a": "1k", "b": "x"}) == {R: 8, "a": 1000}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    """A node whose kubelet reports once a minute: in a test only the agent's own writes are seen."""
    with fake_node(status_period=60.0) as made:
        yield made


@contextlib.asynccontextmanager
async def running(node: FakeNode, count: int) -> AsyncIterator[Bridge]:
    bridge = agents.bridge(node, [fpgas(count)], Share(0), grace=0.2)
    async with agents.running(bridge):
        await until(lambda: node.allocatable(R) == count)
        node.report()
        yield bridge


def ask(node: FakeNode, share: str) -> None:
    node.server.patch("nodes", NODE, share_patch(D, share))


async def settled(bridge: Bridge, dra: int, total: int) -> None:
    """Wait until `dra` of `total` devices are for claims and the others are for limits."""
    wanted = [State.DRA] * dra + [State.PLUGIN] * (total - dra)

    def states() -> list[State]:
        now = bridge.drivers[D].async_ledger.snapshot if D in bridge.drivers else None
        return [] if now is None else sorted((one.state for one in now.devices.values()), key=lambda one: one.value)

    await until(lambda: states() == wanted)


def forbid(node: FakeNode) -> None:
    """Have the API server refuse all patches of the Node's status."""

    def writes(request: LoggedRequest) -> bool:
        return request.method == "PATCH" and request.path.endswith("/status")

    node.server.fail(writes, Fault(403, message="nodes/status: no right to patch"), times=1000)


@pytest.mark.parametrize("allowed", [True, False])
async def test_pods_that_come_while_devices_leave(
    node: FakeNode, allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler counts no devices that move to DRA; if the agent may not write the Node's status, pods fail."""
    caplog.set_level(logging.WARNING)
    if not allowed:
        forbid(node)
    async with running(node, 4) as bridge:
        ask(node, "3")
        await settled(bridge, 3, 4)
        ask(node, "2")
        await settled(bridge, 2, 4)
        ask(node, "3")
        await settled(bridge, 3, 4)
        pods = [await asyncio.to_thread(node.start_pod, f"p{number}", {R: 1}) for number in range(3)]

        def decided() -> list[FakePod]:
            return [pod for pod in pods if pod.phase in ("Running", "Failed")]

        await until(lambda: len(decided()) == (1 if allowed else 3))
        failed = [pod.reason for pod in pods if pod.phase == "Failed"]
        assert failed == ([] if allowed else ["UnexpectedAdmissionError"] * 2)
        assert caplog.text.count("may fail while devices move") == (0 if allowed else 1)


async def test_pods_that_wait_start_when_devices_are_back(node: FakeNode) -> None:
    """A pod starts with returned devices before the kubelet's next status report, as the agent raises the number."""
    async with running(node, 4) as bridge:
        ask(node, "all")
        await settled(bridge, 4, 4)
        ask(node, "none")
        await settled(bridge, 0, 4)
        await until(lambda: node.server.get("nodes", NODE)["status"]["allocatable"][R] == "4")
        pod = await asyncio.to_thread(node.start_pod, "p", {R: 4})
        await asyncio.to_thread(pod.wait_running, 10)


async def test_a_share_change_costs_few_writes(node: FakeNode) -> None:
    """A move of 8 devices to DRA and back takes at most 3 writes of the Node's status."""
    async with running(node, 8) as bridge:
        for share, count in (("all", 8), ("none", 0)):
            ask(node, share)
            await settled(bridge, count, 8)
        await until(lambda: node.server.get("nodes", NODE)["status"]["allocatable"][R] == "8")
        assert len(node.server.requests("PATCH", f"/api/v1/nodes/{NODE}/status")) <= 3
