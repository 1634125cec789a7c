"""Devices that are the same hardware, or parts of one device, served by device plugins alone, on the fake kubelet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deviceplugin.device import Device
from deviceplugin.source import DeviceSource
from deviceplugin.sources.path import PathSource
from deviceplugin.testing import FakeKubelet
from deviceplugin.testing.plugin import Served, serve
from tests.scenarios.quick import hurry

pytestmark = pytest.mark.usefixtures("hurried")
Serve = Callable[..., Served]
A, B = "example.com/a", "example.com/b"


class Listed(DeviceSource):
    """A source whose device list a test sets, also from another thread."""

    def __init__(self, resource: str, *devices: Device) -> None:
        self.resource = resource
        self._devices: Sequence[Device] = devices
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            yield self._devices
            await self._changed.wait()

    def list(self, *devices: Device) -> None:
        self._devices = devices
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._changed.set)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch.setattr)


def healthy(kubelet: FakeKubelet, resource: str) -> set[str]:
    return {name for name, one in kubelet.devices(resource).items() if one.health == "Healthy"}


def wait_healthy(kubelet: FakeKubelet, resource: str, *names: str) -> None:
    kubelet.wait_until(lambda: healthy(kubelet, resource) == set(names), 10.0, f"{names} to be healthy")


def test_two_resources_over_one_node_give_it_away_once(
    fake_kubelet: FakeKubelet, served: Serve, tmp_path: Path
) -> None:
    """A link and its target are one device: while a pod has it by one resource, another resource does not offer it."""
    (tmp_path / "node").touch()
    (tmp_path / "link").symlink_to(tmp_path / "node")
    served(PathSource(f"{tmp_path}/node", resource=A), PathSource(f"{tmp_path}/link", resource=B), period=0.05)
    fake_kubelet.wait_allocatable(A, 1)
    fake_kubelet.wait_allocatable(B, 1)
    pod = fake_kubelet.run_pod("first", {A: 1})
    fake_kubelet.wait_allocatable(B, 0)
    pod.delete()
    fake_kubelet.wait_allocatable(B, 1)
    fake_kubelet.run_pod("second", {B: 1})
    fake_kubelet.wait_allocatable(A, 0)


def test_an_agent_that_starts_after_a_link_was_added_knows_the_holder(
    fake_kubelet: FakeKubelet, tmp_path: Path
) -> None:
    """An agent that starts after a link was added does not offer the new id while a pod holds the device."""
    (tmp_path / "b").touch()
    source = f"{tmp_path}/*"
    with serve(PathSource(source, resource=A), fake_kubelet, period=0.05):
        fake_kubelet.wait_allocatable(A, 1)
        pod = fake_kubelet.run_pod("first", {A: 1})
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "c").touch()
    with serve(PathSource(source, resource=A), fake_kubelet, period=0.05):
        (held,) = pod.devices[A]
        fake_kubelet.wait_until(lambda: fake_kubelet.capacity(A) == 3, 10.0, "three ids")
        (c,) = healthy(fake_kubelet, A) - {held}
        wait_healthy(fake_kubelet, A, held, c)
        pod.delete()
        fake_kubelet.wait_until(lambda: held not in healthy(fake_kubelet, A), 10.0, "the first id to be offered")
        assert len(healthy(fake_kubelet, A)) == 2, "the same hardware is counted once"


@contextlib.contextmanager
def another_boot() -> Iterator[None]:
    """Make agents record another boot id in this block: for an agent after the block, the node has rebooted."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("deviceplugin.identity", "deviceplugin.kubelet.tracker"):
            patch.setattr(f"{place}.boot_id", lambda: "an earlier boot")
        yield


def test_after_a_reboot_a_device_is_what_it_is_listed_as(fake_kubelet: FakeKubelet) -> None:
    """After a reboot a pod in the checkpoint still holds its device; other ids of this device are not offered."""
    sources = [Listed(A, Device("a", identity="uuid:1")), Listed(B, Device("b", identity="uuid:1"), Device("c"))]
    with another_boot(), serve(sources, fake_kubelet, period=0.05):
        fake_kubelet.wait_allocatable(A, 1)
        pod = fake_kubelet.run_pod("first", {A: 1})
    sources = [Listed(A, Device("a", identity="uuid:1")), Listed(B, Device("b", identity="uuid:1"), Device("c"))]
    with serve(sources, fake_kubelet, period=0.05):
        wait_healthy(fake_kubelet, B, "c")
        assert healthy(fake_kubelet, A) == {"a"}
        pod.delete()
        wait_healthy(fake_kubelet, B, "b", "c")


def test_after_a_reboot_the_devices_of_one_container_are_told_apart(fake_kubelet: FakeKubelet) -> None:
    """After a reboot, the device list says which device each node of a container is; the AllocateResponse does not."""
    nodes = {"a": "/dev/tty", "b": "/dev/ptmx"}
    devices = [Device(name, nodes=[node]) for name, node in nodes.items()]
    with another_boot(), serve(Listed(A, *devices), fake_kubelet, period=0.05):
        fake_kubelet.wait_allocatable(A, 2)
        pod = fake_kubelet.run_pod("first", {A: 2})
    with serve((Listed(A, *devices), Listed(B, *devices)), fake_kubelet, period=0.05):
        fake_kubelet.wait_until(lambda: fake_kubelet.capacity(B) == 2, 10.0, "the other names")
        wait_healthy(fake_kubelet, B)
        wait_healthy(fake_kubelet, A, "a", "b")
        pod.delete()
        wait_healthy(fake_kubelet, B, "a", "b")


def test_links_that_swap_while_one_is_held(fake_kubelet: FakeKubelet, served: Serve, tmp_path: Path) -> None:
    """After two links swap their targets, both ids are withheld until the pod that holds a device ends."""
    for name in ("x", "y", "z"):
        (tmp_path / name).touch()
    links = tmp_path / "by-id"
    links.mkdir()

    def link(**targets: str) -> None:
        for name, target in targets.items():
            (links / "new").symlink_to(tmp_path / target)
            (links / "new").rename(links / name)

    link(a="x", b="y")
    served(PathSource(f"{links}/*", resource=A), period=0.05)
    fake_kubelet.wait_allocatable(A, 2)
    pod = fake_kubelet.run_pod("first", {A: 1})
    (links / "a").unlink()
    link(b="x", a="y")
    fake_kubelet.wait_until(lambda: not healthy(fake_kubelet, A), 10.0, "both ids to be withheld")
    pod.delete()
    fake_kubelet.wait_allocatable(A, 2)
    link(b="z")
    fake_kubelet.wait_allocatable(A, 2)


def test_a_reload_that_renames_a_resource_knows_who_holds_its_devices(
    fake_kubelet: FakeKubelet, served: Serve, tmp_path: Path
) -> None:
    """After a reload with a new resource name, a device that a pod has by the former name is not offered."""
    (tmp_path / "node").touch()
    agent = served(PathSource(f"{tmp_path}/node", resource=A), period=0.05).agent
    fake_kubelet.wait_allocatable(A, 1)
    pod = fake_kubelet.run_pod("first", {A: 1})
    (tmp_path / "second").touch()
    new = PathSource(f"{tmp_path}/*", resource=B)
    assert agent.loop is not None
    asyncio.run_coroutine_threadsafe(agent.reconfigure({B: new}), agent.loop).result(10)
    fake_kubelet.wait_until(lambda: fake_kubelet.capacity(B) == 2, 10.0, "two devices")
    fake_kubelet.wait_allocatable(B, 1)
    pod.delete()
    fake_kubelet.wait_allocatable(B, 2)


def test_a_device_that_is_another_thing_than_listed_is_refused(
    fake_kubelet: FakeKubelet, served: Serve, tmp_path: Path
) -> None:
    """A grant is refused if the device's path now leads to other hardware than the hardware that was listed."""
    (tmp_path / "node").touch()
    source = PathSource(f"{tmp_path}/node", resource=A)
    (device,) = source.scan()
    served(Listed(A, device))
    fake_kubelet.wait_allocatable(A, 1)
    (tmp_path / "other").touch()
    (tmp_path / "other").rename(tmp_path / "node")
    pod = fake_kubelet.start_pod("first", {A: 1})
    pod.wait_phase("Failed")
    assert "is not what it was listed as: file " in pod.message


def test_a_container_starts_only_with_the_device_that_it_was_given(
    fake_kubelet: FakeKubelet, served: Serve, tmp_path: Path
) -> None:
    """A held device whose node was replaced is neither reset nor given to a restarted container."""
    resets: list[str] = []

    class Resetting(PathSource):
        def reset(self, devices: Sequence[Device]) -> None:
            resets.extend(device.id for device in devices)

    (tmp_path / "node").touch()
    served(Resetting(f"{tmp_path}/node", resource=A), period=0.05)
    fake_kubelet.wait_allocatable(A, 1)
    pod = fake_kubelet.run_pod("first", {A: 1})
    pod.restart_container()
    assert len(resets) == 2
    (tmp_path / "node").rename(tmp_path / "former")
    (tmp_path / "node").touch()
    container = pod.container()
    with ThreadPoolExecutor() as pool:
        restarting = pool.submit(pod.restart_container, timeout=30.0)
        refusal = "is not what its holder was given: file "
        fake_kubelet.wait_until(lambda: refusal in container.message, 10.0, "a refusal")
        assert len(resets) == 2
        (tmp_path / "former").rename(tmp_path / "node")
        restarting.result()
    assert len(resets) == 3


def test_a_whole_and_its_half_have_one_holder_each_in_turn(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """Pods can hold two halves of a device at the same time; the whole device is offered when both pods have ended."""
    counters = {"gpu": {"slices": 2}}
    whole = Device("whole", consumes={"gpu": {"slices": 2}}, counters=counters)
    halves = [Device(f"half{n}", consumes={"gpu": {"slices": 1}}, counters=counters) for n in range(2)]

    class OfDriver(Listed):
        driver = "gpu.example.com"

    served(OfDriver(A, whole), OfDriver(B, *halves), period=0.05)
    fake_kubelet.wait_allocatable(A, 1)
    pods = [fake_kubelet.run_pod(f"half{n}", {B: 1}) for n in range(2)]
    fake_kubelet.wait_allocatable(A, 0)
    pods[0].delete()
    fake_kubelet.wait_allocatable(B, 2)
    assert fake_kubelet.allocatable(A) == 0
    pods[1].delete()
    fake_kubelet.wait_allocatable(A, 1)
    fake_kubelet.run_pod("whole", {A: 1})
    fake_kubelet.wait_allocatable(B, 0)
