"""Containers and devices while a `reset` works on after its timeout; of claims see tests/dra/driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from deviceplugin.device import Device
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import BOTH, A, D, serving


class Overdue(Listed):
    """A device of which the first reset works on after its timeout, until a test lets it end."""

    hook_timeout = 0.3

    def __init__(self) -> None:
        super().__init__(A, D, "d0")
        self.ends = threading.Event()
        self.calls = self.now = self.most = 0
        self._lock = threading.Lock()

    def reset(self, devices: Sequence[Device]) -> None:
        with self._lock:
            self.calls += 1
            first = self.calls == 1
            self.now += 1
            self.most = max(self.most, self.now)
        if first:
            self.ends.wait(60)
        with self._lock:
            self.now -= 1


@pytest.fixture
def overdue() -> Iterator[Overdue]:
    source = Overdue()
    yield source
    source.ends.set()


@BOTH
async def test_no_container_starts_while_a_reset_works_on(node: FakeNode, overdue: Overdue, both: bool) -> None:
    """The kubelet asks again and again: there is one reset of the device at a time, and the pod runs after it."""
    async with serving(node, overdue, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        pod = node.start_pod("p", {A: 1})
        await here.until(lambda: pod.running or len(node.rpcs("PreStartContainer")) >= 3)
        assert not pod.running
        assert overdue.most == 1
        overdue.ends.set()
        await asyncio.to_thread(pod.wait_running, 15)
        assert overdue.most == 1


@BOTH
async def test_the_next_pod_gets_no_device_on_which_a_reset_works_on(
    node: FakeNode, overdue: Overdue, both: bool
) -> None:
    """The pod that it was for has ended: the device is given to the next one when the reset has ended, too."""
    async with serving(node, overdue, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        pod = node.start_pod("p", {A: 1})
        await here.until(lambda: node.rpcs("PreStartContainer"))
        await here.stopped(pod)
        await here.scans()
        follower = await here.run("q", {A: 1})
        assert not follower.running
        assert "reset" in here.withheld()["d0"]
        assert overdue.most == 1
        await here.stopped(follower)
        overdue.ends.set()
        await here.until(lambda: here.healthy() == {"d0"})
        assert (await here.run("r", {A: 1})).running
        assert overdue.most == 1
