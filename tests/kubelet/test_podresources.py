"""The kubelet's PodResources service, and when it may be asked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from deviceplugin.kubelet.podresources import (
    AllocationsInFlight,
    Holder,
    PodResources,
    PodResourcesError,
    PodResourcesReport,
    parse_list,
)
from deviceplugin.testing import FakeKubelet
from deviceplugin.wire import podresources_pb2 as pb

R = "example.com/r"


# The answer of List.


def test_list_is_read_per_container() -> None:
    """Devices of one resource in several entries (one per NUMA node) come together; a shared one has both holders."""
    devices = [
        pb.ContainerDevices(resource_name=R, device_ids=["a"]),
        pb.ContainerDevices(resource_name=R, device_ids=["b"]),
    ]
    pods = [
        pb.PodResources(name=name, namespace="ns", containers=[pb.ContainerResources(name="main", devices=devices)])
        for name in ("one", "two")
    ]
    parsed = parse_list(pb.ListPodResourcesResponse(pod_resources=pods))
    both = frozenset({Holder("ns", "one", "main"), Holder("ns", "two", "main")})
    assert parsed.held == {R: {"a": both, "b": both}}
    assert parsed.pods == {("ns", "one"), ("ns", "two")}


# When to ask.


async def test_quiet_waits_for_allocations_to_land() -> None:
    """Nobody asks `List` while an own Allocate is in flight or was a moment ago."""
    in_flight = AllocationsInFlight()
    await in_flight.wait()
    before = time.monotonic()
    assert in_flight.quiet_since(before)
    with in_flight.busy(0.02):
        with in_flight.busy(0.02):
            waiting = asyncio.create_task(in_flight.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        assert not in_flight.quiet_since(before)
        landed = time.monotonic()
    await waiting
    assert time.monotonic() >= landed + 0.02
    assert not in_flight.quiet_since(before)
    assert in_flight.quiet_since(time.monotonic())


# The service.


async def test_asking_a_kubelet(fake_kubelet: FakeKubelet) -> None:
    """`List` of a kubelet without pods answers with nothing."""
    service = PodResources(fake_kubelet.pod_resources_socket)
    assert await service.list() == PodResourcesReport({})


async def test_a_kubelet_that_others_ask_too_often(fake_kubelet: FakeKubelet) -> None:
    """The limit of 100 calls a second is shared by all clients; who hits it may try again."""
    fake_kubelet.pod_resources_refused = 1.0
    service = PodResources(fake_kubelet.pod_resources_socket)
    with pytest.raises(PodResourcesError, match="RESOURCE_EXHAUSTED") as refused:
        await service.list()
    assert refused.value.exhausted


async def test_kubelet_that_cannot_be_asked(tmp_path: Path) -> None:
    """A kubelet that is not there is an error that names the socket."""
    service = PodResources(tmp_path / "none.sock", timeout=1.0)
    with pytest.raises(PodResourcesError, match=r"none.sock: (UNAVAILABLE|DEADLINE_EXCEEDED)") as failed:
        await service.list()
    assert not failed.value.exhausted
