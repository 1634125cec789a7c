"""The work of an agent with many resources, each with a driver of its own, while nothing changes on the node."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

from dra_bridge.handover.share import Share
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


async def calls_of_a_scan(count: int) -> int:
    """Return how many functions a scan calls on a node with so many resources, and in tasks that the scan wakes."""
    sources = [
        Listed(f"example.com/many-{number}", f"many-{number}.example.com", "d0", "d1", "d2", "d3", tokens=True)
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
            pod = node.start_pod("held", {sources[0].resource: 1})
            await asyncio.to_thread(pod.wait_running, PATIENCE)
            counts = list[int]()
            while len(counts) < 10:
                with counted() as calls:
                    assert await agent.agent.scanner.scan() is not None
                    for _ in range(5):  # Tasks that the scan has woken run now.
                        await asyncio.sleep(0)
                counts.append(calls.count)
    return min(counts)


async def test_a_scan_calls_fewer_than_twice_the_functions_for_twice_the_resources() -> None:
    """Nothing that a scan computes for one resource, or wakes, depends on the number of the other resources."""
    few, many = [await calls_of_a_scan(count) for count in (8, 16)]
    assert many < 2 * few, (few, many)
