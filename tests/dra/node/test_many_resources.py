"""The work of an agent with many resources and drivers, while nothing changes on the node."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from deviceplugin.kubelet import plugin_directory, registration
from dra_bridge.handover.share import Share
from dra_bridge.node.bridge import Bridge
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed, bridge, fake_node, healthy, running, sliced
from tests.waits import PATIENCE, until

NEVER = 1000.0


class Calls:
    """Counts the calls of functions, including built-in functions."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call (for `sys.setprofile`)."""
        self.count += event in ("call", "c_call")


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of this thread until the end of the block."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@contextlib.asynccontextmanager
async def many(count: int, *, alike: bool) -> AsyncIterator[tuple[FakeNode, Bridge]]:
    """Run an agent with `count` resources; the block begins when each resource and each driver offers two devices.

    alike: whether the devices of all resources are the same hardware.
    """
    sources = [
        Listed(f"example.com/many-{number}", f"many-{number}.example.com", "d0", "d1", "d2", "d3", tokens=alike)
        for number in range(count)
    ]
    with fake_node() as node:
        async with running(bridge(node, sources, Share(part=0.5), period=NEVER)) as agent:
            await until(
                lambda: all(
                    len(healthy(node, source.resource)) == len(sliced(node, source.driver or "")) == 2
                    for source in sources
                ),
                "each resource, and each driver, to offer two devices",
            )
            yield node, agent


async def calls_of_a_scan(count: int) -> int:
    """Return how many functions a scan, and the tasks that it wakes, call on a node with `count` resources."""
    async with many(count, alike=True) as (node, agent):
        pod = node.start_pod("held", {"example.com/many-0": 1})
        await asyncio.to_thread(pod.wait_running, PATIENCE)
        counts = list[int]()
        while len(counts) < 10:
            with counted() as calls:
                assert await agent.agent.scanner.scan() is not None
                for _ in range(5):  # Tasks that the scan has woken run in these steps.
                    await asyncio.sleep(0)
            counts.append(calls.count)
        return min(counts)


async def work_of_a_restart(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Return how many decisions and directory reads each resource's registration takes when the kubelet starts."""
    work = Counter[str]()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            work[name] += 1
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(registration, "LOOK", 60.0)  # On a busy machine a restart takes many of the usual intervals.
        patch.setattr(registration, "next_step", noted("steps", registration.next_step))
        patch.setattr(plugin_directory, "sockets_in", noted("reads", plugin_directory.sockets_in))
        async with many(count, alike=False) as (node, _):
            await asyncio.to_thread(node.stop)
            registered = len(node.registrations)
            work.clear()
            await asyncio.to_thread(node.start)
            await until(lambda: len(node.registrations) >= registered + count, "each resource to register again")
            return work["steps"] / count, work["reads"] / count


async def test_a_scan_calls_fewer_than_twice_the_functions_for_twice_the_resources() -> None:
    """A scan for holders of 16 resources calls fewer than twice as many functions as a scan of 8 resources."""
    few, many = [await calls_of_a_scan(count) for count in (8, 16)]
    assert many < 2 * few, (few, many)


async def test_a_restart_of_the_kubelet_wakes_a_resource_rarely_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kubelet restart, each of 32 resources registers with fewer than 6 decisions and 5 directory reads."""
    steps, reads = await work_of_a_restart(32, monkeypatch)
    assert steps < 6, steps
    assert reads < 5, reads
