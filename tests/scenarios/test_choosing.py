"""The choice of devices for a pod, the number of replicas, and child resources of a source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from deviceplugin.device import Device
from deviceplugin.source import DeviceSource
from deviceplugin.testing import FakeKubelet
from deviceplugin.testing.plugin import Served
from tests.nvml.gpus import DGX1V

Serve = Callable[..., Served]


class Boards(DeviceSource):
    """Eight devices that are linked by NVLink as the GPUs in a DGX-1V are."""

    resource = "example.com/gpu"

    def __init__(self, policy: str = "links", replicas: int = 1, *, linked: bool = True) -> None:
        self.policy, self.replicas, self.linked = policy, replicas, linked

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(f"gpu{number}", numa=number // 4) for number in range(8)]

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        if not self.linked:
            return {}
        return {
            frozenset((f"gpu{one}", f"gpu{other}")): 100 * DGX1V[one][other] + 10
            for one in range(8)
            for other in range(one)
        }


def given(kubelet: FakeKubelet, size: int, name: str = "pod") -> list[str]:
    pod = kubelet.run_pod(name, {"example.com/gpu": size})
    return sorted(pod.devices["example.com/gpu"])


def test_pod_gets_devices_that_are_closely_linked(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """By default, links decide which devices a pod gets: two pods with two devices each get pairs with two NVLinks."""
    served(Boards())
    for name in ("one", "two"):
        first, second = (int(device[3:]) for device in given(fake_kubelet, 2, name))
        assert DGX1V[first][second] == 2


def test_without_links_numa_nodes_decide(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If devices have no links, the devices of a pod come from one NUMA node."""
    served(Boards(linked=False))
    assert len({int(device[3:]) // 4 for device in given(fake_kubelet, 3)}) == 1


@pytest.mark.parametrize(("policy", "devices"), [("links", 4), ("packed", 1), ("distributed", 4), ("none", 1)])
@pytest.mark.parametrize("linked", [True, False])
def test_replicas_are_chosen_by_policy(
    fake_kubelet: FakeKubelet, served: Serve, policy: str, devices: int, linked: bool
) -> None:
    """With `links` and `distributed` a pod's four replicas belong to four devices, with `packed` and `none` to one."""
    served(Boards(policy, 4, linked=linked))
    chosen = given(fake_kubelet, 4)
    assert len({name.partition("::")[0] for name in chosen}) == devices


def test_distributed_counts_what_is_in_use(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """With the policy `distributed`, a second pod gets replicas of devices that the first pod does not use."""
    served(Boards("distributed", 4))
    first, second = given(fake_kubelet, 4, "one"), given(fake_kubelet, 4, "two")
    assert not {name.partition("::")[0] for name in first} & {name.partition("::")[0] for name in second}


class Uneven(Boards):
    """Devices with different numbers of replicas."""

    def replicas_of(self, device: Device) -> int:
        return 3 if device.id == "gpu0" else 1


def test_replicas_may_differ_from_device_to_device(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """Devices may have different numbers of replicas, and a pod can have all of them."""
    served(Uneven("none", 3))
    fake_kubelet.wait_allocatable("example.com/gpu", 10)
    assert set(given(fake_kubelet, 10)) == {"gpu0::0", "gpu0::1", "gpu0::2"} | {f"gpu{n}" for n in range(1, 8)}


class Leaf(DeviceSource):
    """A source that `Stem` has as a child source."""

    def __init__(self, resource: str, device: str) -> None:
        self.resource, self.device = resource, device

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(self.device)]


class Stem(Leaf):
    """A source with child sources, whose resources are served together with its own."""

    def __init__(self, resource: str, *names: str) -> None:
        super().__init__(resource, "stem")
        self.names = list(names)
        self.more = asyncio.Event()

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        yield [Leaf(name, "one") for name in self.names[:1]]
        await self.more.wait()
        yield [Leaf(name, "one") for name in self.names]


def test_resources_that_a_source_brings_along_are_served_with_it(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """The resources of a source's child sources are served once the children are known, and end with the source."""
    stem = Stem("example.com/gpu", "example.com/mig-a", "example.com/mig-b")
    agent = served(stem).agent
    fake_kubelet.wait_allocatable("example.com/mig-a", 1)
    assert "example.com/mig-b" not in fake_kubelet.resources()
    assert agent.loop is not None
    agent.loop.call_soon_threadsafe(stem.more.set)
    fake_kubelet.wait_allocatable("example.com/mig-b", 1)
    assert {status.resource for status in agent.status().resources} == {
        "example.com/gpu",
        "example.com/mig-a",
        "example.com/mig-b",
    }
    other = Leaf("example.com/other", "x")
    asyncio.run_coroutine_threadsafe(agent.reconfigure({other.resource: other}), agent.loop).result(20)
    fake_kubelet.wait_allocatable("example.com/other", 1)
    fake_kubelet.wait_until(lambda: not fake_kubelet.streams("example.com/mig-a"), 10, "the branch to end")
    assert {status.resource for status in agent.status().resources} == {"example.com/other"}


def test_branches_follow_their_stem_through_a_reload(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A source that a reload leaves unchanged keeps its child sources; a new source replaces them without a break."""
    agent = served(Stem("example.com/gpu", "example.com/mig-a")).agent
    fake_kubelet.wait_allocatable("example.com/mig-a", 1)

    def reload(*sources: DeviceSource, unchanged: Sequence[str] = ()) -> None:
        assert agent.loop is not None
        wanted = {source.resource: source for source in sources}
        asyncio.run_coroutine_threadsafe(agent.reconfigure(wanted, unchanged), agent.loop).result(20)

    reload(unchanged=["example.com/gpu"])
    assert "example.com/mig-a" in agent.services
    before = agent.services["example.com/mig-a"]
    old = before.source
    reload(Stem("example.com/gpu", "example.com/mig-a"))
    fake_kubelet.wait_until(lambda: before.source is not old, 10, "the branch to be replaced")
    assert agent.services["example.com/mig-a"] is before
    assert fake_kubelet.streams("example.com/mig-a") == 1


def test_resource_of_its_own_is_not_replaced_by_a_branch(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A resource that is configured itself is not replaced by a child source."""
    agent = served(Stem("example.com/gpu", "example.com/mig-a"), Leaf("example.com/mig-a", "own")).agent
    fake_kubelet.wait_allocatable("example.com/mig-a", 1)
    assert set(agent.services["example.com/mig-a"].inventory.snapshot.devices) == {"own"}
