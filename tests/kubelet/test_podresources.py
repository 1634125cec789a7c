"""The kubelet's PodResources service, and when the agent calls it."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from deviceplugin.kubelet import podresources
from deviceplugin.kubelet.podresources import (
    AllocationsInFlight,
    ClaimUse,
    PodContainer,
    PodResources,
    PodResourcesReport,
    methods_by_name,
    parse_list,
    unix_address,
)
from deviceplugin.testing import FakeKubelet
from deviceplugin.wire import podresources_pb2 as pb
from deviceplugin.wire.podresources_pb2_grpc import (
    PodResourcesListerServicer,
    PodResourcesListerStub,
    add_PodResourcesListerServicer_to_server,
)

# The answer of `List`.


def test_list_names_pods_and_the_use_of_claims() -> None:
    """The parsed `List` has each pod, and each device that a container uses through a claim, with the container."""
    used = pb.DynamicResource(
        claim_name="c",
        claim_resources=[pb.ClaimResource(driver_name="d", pool_name="p", device_name=one) for one in ("a", "b")],
    )
    container = pb.ContainerResources(name="main", dynamic_resources=[used])
    pods = [pb.PodResources(name="one", namespace="ns", containers=[container]), pb.PodResources(name="two")]
    parsed = parse_list(pb.ListPodResourcesResponse(pod_resources=pods))
    holder = PodContainer("ns", "one", "main")
    assert parsed.claims == {ClaimUse("d", "p", one, "c", holder) for one in ("a", "b")}
    assert parsed.pods == {("ns", "one"), ("", "two")}


# When `List` is called.


async def test_list_waits_for_allocations_in_flight() -> None:
    """The agent waits with `List` while it answers an Allocate, and for a moment after that."""
    in_flight = AllocationsInFlight()
    await in_flight.wait()
    before = time.monotonic()
    assert in_flight.none_since(before)
    with in_flight.busy(0.02):
        with in_flight.busy(0.02):
            waiting = asyncio.create_task(in_flight.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        assert not in_flight.none_since(before)
        ended = time.monotonic()
    await waiting
    assert time.monotonic() >= ended + 0.02
    assert not in_flight.none_since(before)
    assert in_flight.none_since(time.monotonic())


async def test_other_work_lets_allocations_in_flight_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pause` waits, for a limited time, until no Allocate is in flight and none has followed for a moment."""
    in_flight = AllocationsInFlight()
    await in_flight.pause()
    monkeypatch.setattr(AllocationsInFlight, "LONGEST_PAUSE", 60.0)
    with in_flight.busy():
        pausing = asyncio.create_task(in_flight.pause())
        await asyncio.wait({pausing}, timeout=2 * in_flight.BETWEEN_CALLS)
        assert not pausing.done()
    ended = time.monotonic()
    await pausing
    assert time.monotonic() >= ended + in_flight.BETWEEN_CALLS
    monkeypatch.setattr(AllocationsInFlight, "LONGEST_PAUSE", 0.01)
    with in_flight.busy():
        await in_flight.pause()


# The service.


async def test_calls_share_a_connection_until_the_kubelet_ends(
    fake_kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive `List` calls share one connection; after a kubelet restart the first call succeeds on a new one."""
    made: list[Any] = []
    channel = grpc.aio.insecure_channel

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(channel(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(grpc.aio, "insecure_channel", counted)
    service = PodResources(fake_kubelet.pod_resources_socket)
    for _ in range(3):
        assert await service.list() == PodResourcesReport()
    assert len(made) == 1
    assert set(await asyncio.gather(service.list(), service.list())) == {PodResourcesReport()}
    assert len(made) == 2, "calls beside each other have channels of their own"
    await asyncio.to_thread(fake_kubelet.restart)
    for one in made:
        while (state := one.get_state()) is grpc.ChannelConnectivity.READY:
            await one.wait_for_state_change(state)
    assert await service.list() == PodResourcesReport()
    assert len(made) == 3


async def test_a_kubelet_that_others_ask_too_often(
    fake_kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the kubelet's limit of 100 calls a second, shared by all clients, `List` is given up after some tries."""
    caplog.set_level("INFO")
    fake_kubelet.pod_resources_refused = 1.0
    monkeypatch.setattr(podresources, "LIST_TRIES", 3)
    assert await PodResources(fake_kubelet.pod_resources_socket).list() is None
    assert not [one for one in caplog.records if one.name == podresources.__name__]


async def test_a_kubelet_that_hangs(fake_kubelet: FakeKubelet, tmp_path: Path) -> None:
    """While a kubelet accepts connections but does not answer, `list` returns None; later it returns a report."""
    service = PodResources(tmp_path / "hangs.sock", timeout=0.2)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(service.socket))
        bound.listen()
        assert await service.list() is None
        since = service.silent_since
        assert await service.list() is None
        assert (service.answers, service.silent_since) == (False, since)
        assert since is not None
    service.socket = fake_kubelet.pod_resources_socket
    assert await service.list() == PodResourcesReport()
    assert (service.answers, service.silent_since) == (True, None)


async def test_kubelet_that_cannot_be_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the kubelet cannot be reached, `list` returns None, and the log names the socket and the error."""
    caplog.set_level("INFO")
    service = PodResources(tmp_path / "none.sock", timeout=1.0)
    assert await service.list() is None
    logged = [one.getMessage() for one in caplog.records if one.name == podresources.__name__]
    assert re.search(r"none.sock: (UNAVAILABLE|DEADLINE_EXCEEDED)", "".join(logged))


class Lister(PodResourcesListerServicer):
    """A PodResources service that has only one of the three methods: `List` returns an empty message."""

    async def List(self, request: object, context: object) -> Any:  # noqa: N802  # the API's name
        return pb.ListPodResourcesResponse()


async def test_a_server_keeps_no_task_for_each_method(tmp_path: Path) -> None:
    """A gRPC server keeps no task per method: an agent with 64 resources has over 800 methods, few of them in use."""
    server, address = grpc.aio.server(), unix_address(tmp_path / "s")
    add_PodResourcesListerServicer_to_server(Lister(), methods_by_name(server))  # type: ignore[abstract]
    server.add_insecure_port(address)
    before = len(asyncio.all_tasks())
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        stub: Any = PodResourcesListerStub(channel)
        await stub.List(pb.ListPodResourcesRequest())
        while len(asyncio.all_tasks()) - before > 3:  # noqa: ASYNC110 - the tasks of the call end
            await asyncio.sleep(0.01)
    await server.stop(None)
