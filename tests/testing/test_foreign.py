"""The stand-in for a vendor's plugin, on the fake kubelet: it has the quirks that a test sets."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.testing import FakeKubelet
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import DevicePluginStub
from tests.scenarios.node import wait_for
from tests.testing.vendor import RESOURCE, Vendor, resource

Start = Callable[..., Vendor]


@pytest.fixture
def vendor(tmp_path: Path, fake_kubelet: FakeKubelet) -> Iterator[Start]:
    """Return a function that starts the stand-in plugin on the fake kubelet."""
    made: list[Vendor] = []

    def start(*resources: dict[str, Any], **quirks: Any) -> Vendor:
        made.append(Vendor(tmp_path, fake_kubelet.device_plugin_dir, *resources, **quirks))
        return made[-1].start()

    yield start
    for one in made:
        one.stop(kill=True)


def stub(vendor: Vendor) -> Any:
    """Return a client of the socket of a plugin's first resource."""
    path = vendor.directory / f"{vendor.resources[0]['name'].replace('/', '_')}-vendor.sock"
    return DevicePluginStub(grpc.insecure_channel(f"unix:{path}", (("grpc.default_authority", "localhost"),)))


def test_a_refusal_ends_it(fake_kubelet: FakeKubelet, vendor: Start) -> None:
    """With `exit`, the plugin's process ends with status 1 when a registration is refused."""
    fake_kubelet.reject_registrations()
    assert vendor(failed_register="exit").status() == 1


def test_a_refusal_stops_all_resources(fake_kubelet: FakeKubelet, vendor: Start) -> None:
    """With `stop-all`, a failed registration stops all resources of the plugin, which then register again."""
    fake_kubelet.reject_registrations()
    other = "vendor.example/other"
    plugin = vendor(resource(), resource("o0", name=other), failed_register="stop-all")
    plugin.wait("registered", 2)
    assert [one["resource"] for one in plugin.calls("Register failed")] == [RESOURCE]
    fake_kubelet.wait_allocatable(other, 1)


@pytest.mark.parametrize(("how", "status"), [("exit", 1), ("panic", 2), ("unnoticed", None)])
def test_the_end_of_a_stream(fake_kubelet: FakeKubelet, vendor: Start, how: str, status: int | None) -> None:
    """When the client ends a stream, the plugin's process ends, panics at the next update, or loses that update."""
    plugin = vendor(stream_end=how)
    fake_kubelet.wait_allocatable(RESOURCE, 2)
    fake_kubelet.drop_streams()
    if how != "exit":
        plugin.wait("stream ended")
        plugin.health(g0="Healthy", g1="Unhealthy")
    if status is not None:
        assert plugin.status() == status
    else:
        plugin.wait("update swallowed")
        assert fake_kubelet.updates(RESOURCE)[-1].healthy == 2


def read(stream: Iterator[pb.ListAndWatchResponse], lists: list[set[str]]) -> None:
    """Add the set of health values of each device list to `lists`, until the stream is cancelled."""
    with contextlib.suppress(grpc.RpcError):
        for one in stream:
            lists.append({device.health for device in one.devices})  # noqa: PERF401 another thread looks at each


@pytest.mark.parametrize("how", ["panic", "shared"])
def test_a_second_stream(fake_kubelet: FakeKubelet, vendor: Start, how: str) -> None:
    """A second ListAndWatch stream shares the updates with the first, or makes the plugin's process panic."""
    plugin = vendor(second_stream=how)
    fake_kubelet.wait_allocatable(RESOURCE, 2)
    plugin.wait("listed")  # the first stream waits for an update before the second opens
    stream = stub(plugin).ListAndWatch(pb.Empty())
    if how == "panic":
        assert plugin.status() == 2
        return
    lists: list[set[str]] = []
    reader = threading.Thread(target=read, args=(stream, lists))
    reader.start()
    wait_for("the second stream's first list", lambda: bool(lists), 10)

    def got() -> int:
        return len(fake_kubelet.updates(RESOURCE)) + len(lists) - 2

    # Each update comes on one of the two streams, by chance; none is lost.
    for number, health in enumerate(itertools.cycle(("Unhealthy", "Healthy")), 1):
        plugin.health(g0="Healthy", g1=health)
        wait_for("the update", lambda: got() >= number, 10)  # noqa: B023
        assert got() == number
        if len(lists) > 1 < len(fake_kubelet.updates(RESOURCE)):
            break
    stream.cancel()
    reader.join(10)
