"""Uses of the package by authors, only for mypy --strict: no code here is run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import assert_type

from deviceplugin import ContainerEdits, Device, DeviceNode, DeviceSource, Health, Mount, Version, run
from deviceplugin.testing import FakeKubelet, FakePod, Served
from dra_bridge.testing import FakeNode, ServedBoth


class Plain(DeviceSource):
    """A source with plain functions; its generator may block."""

    resource = "example.com/plain"

    def watch(self) -> Iterator[Sequence[Device]]:
        """Yield lists."""
        yield [Device("a", nodes=["/dev/a", DeviceNode("/dev/b", permissions="r")], numa=0)]
        yield (Device("a", health=Health.UNHEALTHY, message="hot"),)

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return edits of every kind."""
        assert_type(devices[0].numa_nodes, tuple[int, ...])
        return ContainerEdits({"A": "1"}, ["/dev/c"], [Mount("/a", "/b", readonly=False)], {"x": "y"}, ["v.com/c=d"])

    def reset(self, devices: Sequence[Device]) -> None:
        """Block the thread, as a plain function may."""

    def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> Sequence[Device]:
        """Choose devices."""
        return [*must_include, *available][:size]

    def released(self, devices: Sequence[Device]) -> None:
        """Take note of the released devices."""


class Coroutines(DeviceSource):
    """A source with coroutine functions."""

    resource = "example.com/coroutines"
    driver = "coroutines.example.com"
    replicas = 2

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield lists."""
        yield [Device("a", attributes={"model": "x", "cores": 4, "ecc": True, "firmware": Version("1.2.3")})]
        yield [Device("a", capacity={"memory": "16Gi", "slots": 2})]

    async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the edits of all devices."""
        return ContainerEdits.merge(device.container_edits for device in devices)

    async def reset(self, devices: Sequence[Device]) -> None:
        """Do nothing, as a coroutine function."""

    async def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> list[str]:
        """Choose ids."""
        return [device.id for device in available][:size]

    async def released(self, devices: Sequence[Device]) -> None:
        """Do nothing, as a coroutine function."""


def main() -> None:
    """Run both sources."""
    assert_type(run(Plain(), Coroutines(), argv=["--kubelet-root", "/k"]), None)
    assert_type(run(Plain(), metrics_address=":9410", certificate=Path("/tls/both.pem"), token="/tls/token"), None)


def test(fake_kubelet: FakeKubelet, served: Callable[..., Served]) -> None:
    """Use the fixtures `fake_kubelet` and `served`."""
    pod = fake_kubelet.run_pod("p", {"example.com/plain": 1})
    assert_type(pod, FakePod)
    assert_type(pod.device_ids, tuple[str, ...])
    assert_type(served(Plain()).alive, bool)


def test_claims(fake_node: FakeNode, bridged: Callable[..., ServedBoth]) -> None:
    """Use the fixtures for claims."""
    pod = fake_node.start_pod("p", template={"coroutines.example.com": 1}).wait_running()
    assert_type(fake_node.devices_of(pod), dict[str, str])
    assert_type(fake_node.edits_of(pod), ContainerEdits)
    assert_type(bridged(Coroutines(), share="50%").drivers, list[str])
