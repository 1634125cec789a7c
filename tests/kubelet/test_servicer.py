"""The five calls of the device plugin API for one resource, through a gRPC channel."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import identity
from deviceplugin.device import ContainerEdits, Device, DeviceNode, Health, Mount
from deviceplugin.identity import boot_id, identified
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import allocation_wait, device_list
from deviceplugin.kubelet.checkpoint import annotation, granted
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.kubelet.podresources import AllocationsInFlight, PodContainer
from deviceplugin.kubelet.preference import as_names
from deviceplugin.kubelet.servicer import Endpoint, EndpointHost, Refusal
from deviceplugin.register.question import Use, Wanted
from deviceplugin.register.records import (
    Allocation,
    AllocationRecord,
    Amount,
    Change,
    Decision,
    DeviceRecord,
    LedgerError,
    Operation,
    State,
)
from deviceplugin.register.register import Register, RegisterHost, ResourceDevices
from deviceplugin.register.store import MemoryStore
from deviceplugin.sharing import device_of, replicas_of, shares
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from tests.identities import seen_as
from tests.waits import until

R = "example.com/r"
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # unknown to grpc-stubs
OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
)

HANGS = 60.0
"""Seconds after which a call counts as hanging; on a busy machine any call takes seconds."""


class Source(DeviceSource):
    """A source without hooks."""

    resource = R

    def watch(self) -> Iterator[Sequence[Device]]:
        """Never called: the tests publish devices themselves."""
        yield []


class Shared(Source):
    """A source that offers each device as `replicas` replicas, records its resets, and fails for those in `errors`."""

    def __init__(self, replicas: int = 1) -> None:
        self.replicas = replicas
        self.resets: list[str] = []
        self.errors: dict[str, str] = {}

    def reset(self, devices: Sequence[Device]) -> None:
        self.resets += [device.id for device in devices]
        for device in devices:
            if device.id in self.errors:
                raise OSError(self.errors[device.id])


class Slow(Shared):
    """A source whose `edits` waits until a test sets `go_on`."""

    def __init__(self, replicas: int = 1) -> None:
        super().__init__(replicas)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        self.begun.set()
        await self.go_on.wait()
        return ContainerEdits()


class Changing(Slow):
    """A source whose number of replicas for each device a test can change."""

    now = 1

    def replicas_of(self, device: Device) -> int:
        return self.now


class Granting(MemoryStore):
    """A store of grants; a test can make it wait, by clearing `go_on`, or fail, by setting `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.error: Exception | None = None

    async def do(self, operation: Operation[Any]) -> Any:
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().do(operation)


class Served(RegisterHost, EndpointHost):
    """The agent's device plugin service of one resource behind a gRPC server, and a client that calls it."""

    def __init__(self, source: DeviceSource, stub: Any, avoided: Collection[str] = (), **options: Any) -> None:
        self.inventory = Inventory(R)
        self.store = Granting()
        self.unknown: dict[str, str] = {}
        self.files: tuple[Use, ...] = ()
        """What other drivers' claims hold, by the claims' files; the register of holders sees it after `reread`."""
        self.foreign: tuple[Use, ...] = ()
        self.services = {R: cast("ResourceDevices", self)}
        self.register = Register(self, self.store)
        self.in_flight = AllocationsInFlight()
        self.calls = 0
        self.avoided = avoided
        self.endpoint = Endpoint(source, self.inventory, self.in_flight, self, register=self.register, **options)
        self.stub = stub

    @property
    def source(self) -> DeviceSource:
        return self.endpoint.source

    def ids_now(self, device: Device) -> tuple[str, ...]:
        return self.endpoint.ids.names_of(device)

    def device_of(self, device_id: str) -> str:
        return self.endpoint.ids.device_id_of(device_id)

    def evidence_missing(self, resource: str, device: str) -> str:
        return self.unknown.get(device, "")

    def foreign_uses(self) -> tuple[Use, ...]:
        return self.foreign

    async def reread(self, *, checkpoint: bool = True) -> None:
        """Let the register of holders see what the files of other drivers' claims say."""
        self.foreign = self.files

    def draining(self) -> Collection[str]:
        return self.avoided

    def granted(self) -> None:
        """Count the calls of this method; the endpoint calls it after each grant."""
        self.calls += 1

    def forget_allocations(self) -> None:
        """Remove the records of all allocations, as if all pods had ended."""
        now = self.store.snapshot
        self.store.snapshot = now.with_changes([Change("allocations", key, None) for key in now.allocations], 1)

    @property
    def granted_ids(self) -> list[str]:
        """Return the granted device ids, in the order of the grants."""
        return [one.device_id for one in self.register.snapshot.allocations.values()]

    def publish(self, *devices: Device | str) -> None:
        listed = [Device(one) if isinstance(one, str) else one for one in devices]
        self.inventory.publish(listed, replicas=shares(self.source, listed))

    async def allocate(self, *containers: str) -> list[pb.ContainerAllocateResponse]:
        requests = [pb.ContainerAllocateRequest(devices_ids=names.split()) for names in containers]
        response = await self.stub.Allocate(pb.AllocateRequest(container_requests=requests), timeout=10)
        return list(response.container_responses)

    async def prefer(self, available: str, must: str, size: int) -> list[str]:
        request = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available.split(), must_include_deviceIDs=must.split(), allocation_size=size
        )
        response = await self.stub.GetPreferredAllocation(
            pb.PreferredAllocationRequest(container_requests=[request]), timeout=10
        )
        return list(response.container_responses[0].deviceIDs)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Lists]:
        call = self.stub.ListAndWatch(pb.Empty())
        try:
            yield Lists(call)
        finally:
            call.cancel()
            await until(lambda: not self.endpoint.streams.live)


class Lists:
    """The lists that one ListAndWatch stream sends."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def next(self) -> dict[str, str]:
        """Return the health of each device id in the next list."""
        async with asyncio.timeout(HANGS):
            message = await self.call.read()
        assert message is not EOF
        return {device.ID: device.health for device in message.devices}

    async def ended(self) -> bool:
        async with asyncio.timeout(HANGS):
            return await self.call.read() is EOF


Serve = Callable[..., Any]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Give a function that serves a source with the given devices."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(source: DeviceSource, *devices: Device | str, **options: Any) -> Served:
            address = f"unix:{tmp_path / source.resource.rpartition('/')[2]}.sock"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OPTIONS))
            served = Served(source, pb_grpc.DevicePluginStub(channel), **options)
            server = grpc.aio.server(options=(("grpc.max_send_message_length", -1),))
            pb_grpc.add_DevicePluginServicer_to_server(served.endpoint, server)
            server.add_insecure_port(address)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            if devices:
                served.publish(*devices)
            return served

        yield start


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *texts: str) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code
    for text in texts:
        assert text in (caught.value.details() or "")


# GetDevicePluginOptions.


LINK = Device("l", nodes=[DeviceNode("/dev/serial/by-id/l", target="/dev/ttyUSB0")])


@pytest.mark.parametrize(
    ("source", "device", "pre_start"),
    [(Source(), Device("a"), False), (Shared(), Device("a"), True), (Source(), LINK, True)],
    ids=["neither", "reset", "symlink"],
)
async def test_options_say_what_is_there(serve: Serve, source: Source, device: Device, pre_start: bool) -> None:
    """PreStartContainer is required if the source has `reset`, or a device's path is a symlink."""
    served = await serve(source, device)
    options = await served.stub.GetDevicePluginOptions(pb.Empty())
    assert (options.pre_start_required, options.get_preferred_allocation_available) == (pre_start, True)


async def test_a_held_stick_that_is_away_has_the_kubelet_ask_before_a_start(serve: Serve) -> None:
    """If a pod holds a device that the source does not list, PreStartContainer is required, and refused for it."""
    served = await serve(Source())
    stick = AllocationRecord(R, "a", "a", 1.0, 1, identity=seen_as(boot_id(), "char:240:1", "hardware:usb:A#"))
    await served.register.store.do(lambda _: Decision(None, (Change("allocations", (R, "a"), stick),)))
    assert not (await served.stub.GetDevicePluginOptions(pb.Empty())).pre_start_required, "nothing is listed yet"
    served.publish("b")
    assert (await served.stub.GetDevicePluginOptions(pb.Empty())).pre_start_required
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "a of example.com/r is away"):
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a"]))


# ListAndWatch.


async def test_every_change_is_sent_once(serve: Serve) -> None:
    """The list is sent at once, and again after each change of ids or health; after other changes it is not sent."""
    served = await serve(Source(), "a", "b")
    async with served.listening() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        served.publish("a", Device("b", health=Health.UNHEALTHY))
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
        served.publish("a", Device("b", health=Health.UNHEALTHY, message="another reason"))
        served.endpoint.refresh()
        served.publish("a", "b", "c")
        assert await lists.next() == {"a": "Healthy", "b": "Healthy", "c": "Healthy"}
    assert served.endpoint.statistics.lists_sent == 3


async def test_changes_are_coalesced(serve: Serve) -> None:
    """If devices change several times in quick succession, only the newest list is sent; what vanished is unhealthy."""
    served = await serve(Source(), "a")
    async with served.listening() as lists:
        await lists.next()
        for count in range(1, 50):
            served.publish(*(f"d{number}" for number in range(count)))
        newest = {"a": "Unhealthy", **{f"d{number}": "Healthy" for number in range(49)}}
        assert await lists.next() == newest
    assert served.endpoint.statistics.lists_sent == 2


async def test_nothing_is_sent_before_the_first_list(serve: Serve) -> None:
    """No list is sent before the source has given its first list; an empty first list is sent."""
    served = await serve(Source())
    async with served.listening() as lists:
        reading = asyncio.create_task(lists.next())
        await until(lambda: served.endpoint.streams.live)
        assert not reading.done()
        served.publish()
        served.inventory.publish([])
        assert await reading == {}


@pytest.mark.parametrize("topology", [True, False])
async def test_numa_nodes_are_sent_unless_left_out(serve: Serve, *, topology: bool) -> None:
    """The list has each device's NUMA nodes; with `topology = False` it has none."""
    source = Source()
    source.topology = topology
    served = await serve(source, Device("a", numa=1), Device("b", numa=(0, 1)), Device("c"))
    async with served.listening() as lists:
        message = await lists.call.read()
    sent = [[node.ID for node in one.topology.nodes] for one in message.devices]
    assert sent == ([[1], [0, 1], []] if topology else [[], [], []])


async def test_too_large_list_is_not_sent_and_said(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list above the size limit is not sent, and the log has an error; the next list below the limit is sent."""
    monkeypatch.setattr("deviceplugin.kubelet.device_list.MAX_LIST_BYTES", 100)
    served = await serve(Source(), "a")
    async with served.listening() as lists:
        await lists.next()
        served.publish(*(f"device-{number}" for number in range(10)))
        await until(lambda: "not sent" in caplog.text)
        served.endpoint.refresh()
        served.publish("a", "b")
        served.inventory.forget([f"device-{number}" for number in range(10)])
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
    (said,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "the list of 11 devices has" in said.getMessage()


async def test_four_mebibytes_are_the_limit(serve: Serve) -> None:
    """A list may have up to 4 MiB, gRPC's default limit; 50,000 devices with long ids fit into it."""
    served = await serve(Source(), *(Device(f"device-{number:050}", numa=0) for number in range(50_000)))
    async with served.listening() as lists:
        message = await lists.call.read()  # this call has no timeout: only the size is tested
        assert len(message.devices) == 50_000
        assert 3 << 20 < message.ByteSize() <= 4 << 20
    assert device_list.MAX_LIST_BYTES == 4 << 20


async def test_streams_end_when_told(serve: Serve) -> None:
    """`end` ends each stream; the last one's end calls the function given to `start`. No stream begins after `stop`."""
    served = await serve(Source(), "a")
    ends = []
    served.endpoint.streams.start(lambda: ends.append(served.endpoint.streams.live))
    async with served.listening() as one, served.listening() as two:
        await one.next()
        await two.next()
        assert served.endpoint.streams.live
        assert await served.endpoint.streams.end(5)
        assert await one.ended()
        assert await two.ended()
    assert ends == [False]
    assert not served.endpoint.streams.live
    served.endpoint.streams.stop()
    async with served.listening() as late:
        assert await late.ended()


async def test_kubelet_that_leaves_is_noticed(serve: Serve) -> None:
    """A ListAndWatch stream that the kubelet cancels ends at once, not only at the next change of devices."""
    served = await serve(Source(), "a")
    ended = asyncio.Event()
    served.endpoint.streams.start(ended.set)
    async with served.listening() as lists:
        await lists.next()
        lists.call.cancel()
        async with asyncio.timeout(5):
            await ended.wait()


# Allocate.


async def test_allocate_gives_everything_a_device_carries(serve: Serve) -> None:
    """The response has each container's edits: its devices' variables, nodes, mounts, annotations and CDI names."""
    edits = ContainerEdits({"A": "1"}, [], [Mount("/h", "/c"), Mount("/h2", "/c2", False)], {"k": "v"}, ["v.com/c=a"])
    served = await serve(Source(), Device("a", nodes=["/dev/a", DeviceNode("/dev/x", "/dev/y", "r")], edits=edits), "b")
    first, second = await served.allocate("a", "b")
    assert dict(first.envs) == {"A": "1"}
    assert [(n.host_path, n.container_path, n.permissions) for n in first.devices] == [
        ("/dev/a", "/dev/a", "rw"),
        ("/dev/x", "/dev/y", "r"),
    ]
    assert [(m.host_path, m.container_path, m.read_only) for m in first.mounts] == [
        ("/h", "/c", True),
        ("/h2", "/c2", False),
    ]
    assert first.annotations.pop(annotation(R))
    assert dict(first.annotations) == {"k": "v"}
    assert [device.name for device in first.cdi_devices] == ["v.com/c=a"]
    assert second.annotations.pop(annotation(R)), "the checkpoint says how much of the device it is"
    assert second == pb.ContainerAllocateResponse()
    assert served.granted_ids == ["a", "b"]
    assert (served.endpoint.statistics.allocations, served.endpoint.statistics.devices_allocated) == (1, 2)


@pytest.mark.parametrize(
    ("names", "code", "texts"),
    [
        ("a nobody", grpc.StatusCode.INVALID_ARGUMENT, [R, "nobody"]),
        ("a b a", grpc.StatusCode.INVALID_ARGUMENT, [R, "device a is requested twice"]),
        ("a sick", grpc.StatusCode.FAILED_PRECONDITION, [R, "sick is unhealthy: too hot"]),
    ],
    ids=["unknown", "duplicate", "unhealthy"],
)
async def test_ids_are_checked(serve: Serve, names: str, code: grpc.StatusCode, texts: list[str]) -> None:
    """Unknown, duplicate and unhealthy ids are refused with an error that names the id, and nothing is granted."""
    served = await serve(Source(), "a", "b", Device("sick", health=Health.UNHEALTHY, message="too hot"))
    with refused(code, *texts):
        await served.allocate("b", names)
    assert served.granted_ids == []
    assert sum(served.endpoint.statistics.refusals.values()) == 1


async def test_repeated_ids_are_found_in_linear_time(serve: Serve) -> None:
    """Finding repeated ids takes time linear in their number; the error names only a few of them."""
    compared = 0

    class Id(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)  # type: ignore[no-any-return,unused-ignore]

        __hash__ = str.__hash__

    served = await serve(Source(), "a")
    ids = [Id(f"id-{number % 1000}") for number in range(2000)]
    with pytest.raises(Refusal) as refusal:
        served.endpoint.checked(ids)
    assert compared < 20 * len(ids)
    assert "id-0, id-1, " in refusal.value.details
    assert len(refusal.value.details) < 300


async def test_ids_in_errors_are_printable(serve: Serve) -> None:
    """An error about a requested id escapes the id's control characters, and cuts a long id."""
    served = await serve(Source(), "a")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "there is no device x\\x1b[31m"):
        await served.allocate(f"x\x1b[31m{'y' * 9000}")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "device x\\x07 is requested twice"):
        await served.allocate("x\x07 x\x07")


async def test_replicas_lead_to_their_device(serve: Serve) -> None:
    """Two replicas of one device give the container the device once; an id that was never offered is refused."""
    served = await serve(Shared(2), Device("a", nodes=["/dev/a"]))
    (answer,) = await served.allocate("a::0 a::1")
    assert [node.host_path for node in answer.devices] == ["/dev/a"]
    for name in ("a::2", "a", "a::00", "a::"):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, name):
            await served.allocate(name)


async def test_edits_hook_adds_and_wins(serve: Serve) -> None:
    """The `edits` hook gets all devices of the container; variables that it returns replace those of the devices."""

    class Editing(Source):
        async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
            return ContainerEdits(env={"IDS": ",".join(device.id for device in devices)})

    def device(name: str) -> Device:
        return Device(name, edits=ContainerEdits(env={"IDS": name}))

    served = await serve(Editing(), device("a"), device("b"))
    (answer,) = await served.allocate("a b")
    assert dict(answer.envs) == {"IDS": "a,b"}


async def test_hooks_get_devices_in_natural_order(serve: Serve) -> None:
    """The hooks `edits`, `reset` and `prefer` get a request's devices sorted, with 9 before 10."""
    calls: list[list[str]] = []

    class Noting(Source):
        def edits(self, devices: Sequence[Device]) -> ContainerEdits:
            calls.append([device.id for device in devices])
            return ContainerEdits()

        def reset(self, devices: Sequence[Device]) -> None:
            calls.append([device.id for device in devices])

        def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> Sequence[Device]:
            calls.append([device.id for device in available])
            return available[:size]

    served = await serve(Noting(), "d10", "d9", "d1")
    ids = ["d10", "d1", "d9"]
    asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=1)
    await served.stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[asked]))
    await served.allocate(" ".join(ids))
    await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=ids))
    assert calls == [["d1", "d9", "d10"]] * 3


async def test_mounts_of_device_metadata_are_in_the_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `metadata` the response mounts the devices' metadata files; if writing them fails, nothing is granted."""

    class Described(Source):
        metadata = True

    async def files(devices: Sequence[Device]) -> ContainerEdits:
        return ContainerEdits(mounts=[Mount(f"/host/{device.id}", f"/in/{device.id}") for device in devices])

    async def full(devices: Sequence[Device]) -> ContainerEdits:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = Described()
    served = await serve(source, "a", "b")
    monkeypatch.setattr(served, "metadata", files)
    source.metadata = False
    assert not (await served.allocate("a"))[0].mounts
    source.metadata = True
    (answer,) = await served.allocate("a b")
    assert sorted(mount.container_path for mount in answer.mounts) == ["/in/a", "/in/b"]
    served.forget_allocations()
    monkeypatch.setattr(served, "metadata", full)
    with refused(grpc.StatusCode.INTERNAL, "the device metadata cannot be written", "No space left"):
        await served.allocate("a")
    assert not served.granted_ids


async def test_contradicting_devices_are_refused(serve: Serve) -> None:
    """A container cannot get two devices with different values of a variable; the error names devices and variable."""
    served = await serve(Source(), *(Device(name, edits=ContainerEdits(env={"ID": name})) for name in "ab"))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "a, b", "'ID'"):
        await served.allocate("a b")
    assert len(await served.allocate("a", "b")) == 2


class Hanging(Source):
    """A source whose `edits` hangs, raises or returns a wrong value, depending on the id of the device."""

    hook_timeout = 0.05

    def __init__(self) -> None:
        self.over = threading.Event()

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        if devices[0].id == "hangs":
            self.over.wait()
        if devices[0].id == "raises":
            raise OSError("no such hardware")
        if devices[0].id == "odd":
            return ContainerEdits(env={"A": "\ud800"})  # cannot be encoded as UTF-8
        if devices[0].id == "wrong":
            return {"A": "1"}  # type: ignore[return-value]
        return ContainerEdits()


async def test_failing_edits_cost_their_own_call(serve: Serve) -> None:
    """If `edits` hangs, raises or returns a wrong value, only this Allocate fails, with an error that says why."""
    source = Hanging()
    served = await serve(source, "hangs", "raises", "wrong", "odd", "good")
    try:
        hanging = asyncio.create_task(served.allocate("hangs"))
        with refused(grpc.StatusCode.INTERNAL, f"edits of {R} failed: OSError: no such hardware"):
            await served.allocate("raises")
        with refused(grpc.StatusCode.INTERNAL, f"{R}: the edits cannot be sent to the kubelet"):
            await served.allocate("odd")
        with refused(grpc.StatusCode.INTERNAL, "returned dict, not ContainerEdits"):
            await served.allocate("wrong")
        assert len(await served.allocate("good")) == 1
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "did not answer within 0.05 s"):
            await hanging
    finally:
        source.over.set()
    statistics = served.endpoint.statistics
    assert statistics.hooks.calls == {(R, "edits"): 5}
    assert statistics.hooks.failures == {(R, "edits"): 2}
    assert statistics.refusals == {"edits": 3, "timeout": 1}
    assert served.granted_ids == ["good"]


async def test_what_cannot_be_recorded_is_not_given_out(serve: Serve) -> None:
    """Allocate is refused if the ledger cannot record the grant, or a former holder found just before the grant."""
    served = await serve(Source(), "a", holders=(known := Known()))
    served.store.error = LedgerError("the disk is full")
    with refused(grpc.StatusCode.UNAVAILABLE, f"{R}: the disk is full"):
        await served.allocate("a")
    known.error = LedgerError("the disk is still full")
    with refused(grpc.StatusCode.UNAVAILABLE, f"{R}: the disk is still full"):
        await served.allocate("a")
    assert (served.granted_ids, served.calls) == ([], 0)
    assert served.endpoint.statistics.refusals == {"ledger": 2}


class Known:
    """Stands in for the tracker of holders: has the holders that a test sets."""

    def __init__(self, unnamed: Sequence[str] = (), runs: Mapping[str, str] | None = None) -> None:
        self.withheld = unnamed
        self.runs = dict(runs or {})
        self.error: Exception | None = None
        self.looked = asyncio.Event()

    def unnamed_reasons(self, resource: str) -> Mapping[str, str]:
        return dict.fromkeys(self.withheld, "")

    async def still_running(self, resource: str, device_ids: Collection[str]) -> Collection[str]:
        return self.runs.keys() & set(device_ids)

    async def still_held(self, resource: str, device_ids: Collection[str]) -> Mapping[str, str]:
        self.looked.set()
        if self.error is not None:
            raise self.error
        self.withheld = [*self.withheld, *(name for name in self.runs if name in device_ids)]
        return {name: pod for name, pod in self.runs.items() if name in device_ids}


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, f"device 'b' of {R} is on the DRA side", "side"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "the holder of device b is not known yet: no claim state",
            "starting",
        ),
        (grpc.StatusCode.FAILED_PRECONDITION, "device b is still held: processes of pod default/p run", "held"),
    ],
)
async def test_what_may_have_a_holder_is_not_given_out(
    serve: Serve, code: grpc.StatusCode, text: str, reason: str
) -> None:
    """The whole Allocate is refused if one of its devices is for claims, still held, or has an unknown holder."""
    known = Known(runs={"b": "processes of pod default/p run"} if reason == "held" else {})
    served = await serve(Source(), "a", "b", holders=known)
    if reason == "side":
        change = Change("devices", (R, "b"), DeviceRecord(R, "b", State.DRA, 0.0))
        served.store.snapshot = served.store.snapshot.with_changes([change], 1)
    elif reason == "starting":
        served.unknown = {"b": "no claim state"}
    if reason != "held":
        async with served.listening() as lists:
            assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
    with refused(code, text):
        await served.allocate("a", "b")
    assert (served.granted_ids, served.calls) == ([], 0)
    assert reason != "held" or not served.store.begun.is_set()
    assert served.endpoint.statistics.refusals == {reason: 1}
    await served.allocate("a")
    assert (served.granted_ids, served.calls) == (["a"], 1)
    if reason == "held":
        known.runs.clear()
        await served.allocate("b")


async def test_what_the_kubelet_would_give_away_while_it_is_held_is_shown_unhealthy(serve: Serve) -> None:
    """A held replica that the kubelet counts as free is listed as unhealthy until its holder ends."""
    known = Known(["a::1"])
    served = await serve(Shared(2), "a", holders=known)
    async with served.listening() as lists:
        assert await lists.next() == {"a::0": "Healthy", "a::1": "Unhealthy"}
        known.withheld = ()
        served.endpoint.refresh()
        assert await lists.next() == {"a::0": "Healthy", "a::1": "Healthy"}


async def test_a_refused_id_is_withheld_at_once(serve: Serve) -> None:
    """After an Allocate was refused for a device, the list with this device as unhealthy is sent at once."""
    served = await serve(Source(), "a", "b", holders=Known(runs={"a": "processes of pod default/p run"}))
    async with served.listening() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Healthy"}
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "device a is still held"):
            await served.allocate("a")
        assert await lists.next() == {"a": "Unhealthy", "b": "Healthy"}


def waits(served: Served) -> int:
    return sum(served.endpoint.statistics.waits.counts)


async def test_an_allocate_waits_for_a_holder_that_the_kubelet_does_not_count(serve: Serve) -> None:
    """Allocate waits for the end of a former holder that the kubelet no longer counts, and then succeeds."""
    known = Known(runs={"a": "processes of pod default/p run"})
    served = await serve(Source(), "a", holders=known)
    allocating = asyncio.create_task(served.allocate("a"))
    await known.looked.wait()
    known.runs.clear()
    await allocating
    assert waits(served) == 1
    assert served.endpoint.statistics.refusals == {}


async def test_a_device_that_a_claim_gets_while_an_allocate_waits_is_refused(serve: Serve) -> None:
    """If a claim gets the device while an Allocate waits for the former holder's end, the Allocate is refused."""
    known = Known(runs={"a": "processes of pod default/p run"})
    served = await serve(Source(), "a", holders=known)
    allocating = asyncio.create_task(served.allocate("a"))
    await known.looked.wait()
    served.files = (Use(("claim", "old.example.com", "u"), "claim ml/train", (R, "a"), frozenset(), None),)
    known.runs.clear()
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "claim ml/train"):
        await allocating
    assert served.granted_ids == []


async def test_an_allocate_waits_once_for_a_holder(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one Allocate has waited in vain for a holder, the next is refused at once, until the holder changes."""
    monkeypatch.setattr(allocation_wait, "PATIENCE", 0.2)
    known = Known(runs={"a": "processes of pod default/p run"})
    served = await serve(Source(), "a", "b", holders=known)
    for _ in range(2):
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "device a is still held"):
            await served.allocate("a")
        assert waits(served) == 1
    assert set(served.register.waits.devices) == {(R, "a")}
    known.runs.clear()
    await served.allocate("a")
    known.runs["a"] = "processes of pod default/q run"
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "processes of pod default/q run"):
        await served.allocate("a")
    assert waits(served) == 2, "the next holder of the id is waited for, too"


async def test_an_allocate_does_not_wait_for_a_pod_that_the_kubelet_counts(serve: Serve) -> None:
    """A holder that the kubelet still counts may run for long: Allocate is refused without a wait."""

    class Counted(Known):
        def unnamed_reasons(self, resource: str) -> Mapping[str, str]:
            return {}

    served = await serve(Source(), "a", holders=Counted(runs={"a": "pod default/p has not started a process yet"}))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "device a is still held"):
        await served.allocate("a")
    assert waits(served) == 0


async def test_a_device_whose_former_holder_runs_is_given_last(serve: Serve) -> None:
    """A device whose former holder still runs is preferred last, except if it must be included."""
    known = Known()
    served = await serve(Source(), "a", "b", holders=known)
    await served.allocate("a")
    known.runs["a"] = "processes of pod default/p run"
    assert await served.prefer("a b", "", 1) == ["b"]
    assert await served.prefer("a b", "a", 1) == ["a"], "a container of the same pod has it"
    known.runs.clear()
    assert await served.prefer("a b", "", 1) == ["a"]


async def test_a_withdrawal_waits_for_no_allocation(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an Allocate is in flight, a list in which a device becomes unhealthy is sent; others wait for its end."""
    monkeypatch.setattr(AllocationsInFlight, "LONGEST_PAUSE", 60.0)
    known = Known(["b"])
    served = await serve(Source(), "a", "b", holders=known)
    async with served.listening() as lists:
        assert await lists.next() == {"a": "Healthy", "b": "Unhealthy"}
        with served.in_flight.busy():
            known.withheld = ["a", "b"]
            served.endpoint.refresh()
            assert await lists.next() == {"a": "Unhealthy", "b": "Unhealthy"}
            await until(lambda: served.endpoint.streams.healthy() == set(), "the stream waits for the next change")
            known.withheld = []
            served.endpoint.refresh()
            later = asyncio.create_task(lists.next())
            await asyncio.wait({later}, timeout=0.05)
            assert not later.done()
        assert await later == {"a": "Healthy", "b": "Healthy"}


async def test_processes_are_looked_for_after_the_last_hook(serve: Serve) -> None:
    """After the last hook the agent looks for former holders' processes, also for those that began during `edits`."""
    known = Known()

    class Slow(Source):
        def released(self, devices: Sequence[Device]) -> None:
            """Exists so that the source has this hook; the test's `release_former` is called in its place."""

        def edits(self, devices: Sequence[Device]) -> ContainerEdits:
            known.runs = {"a": "processes of pod default/p run"}
            return ContainerEdits()

    async def release_former(names: Sequence[str]) -> None:
        assert not known.runs

    served = await serve(Slow(), "a", holders=known)
    served.release_former = release_former
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "device a is still held: processes of pod default/p run"):
        await served.allocate("a")
    assert served.granted_ids == []


@pytest.mark.parametrize("replicas", [1, 2])
async def test_devices_to_be_avoided_are_taken_last(serve: Serve, replicas: int) -> None:
    """Devices in `avoided`, for which a drain waits, are preferred last, except if they must be included."""
    served = await serve(Shared(replicas), "a", "b", "c", "d", avoided=("a", "b"))
    ids = {name: " ".join(replicas_of(name, replicas)) for name in "abcd"}
    every = " ".join(ids.values())
    chosen = await served.prefer(every, "", 2 * replicas)
    assert set(chosen) == {*ids["c"].split(), *ids["d"].split()}
    chosen = await served.prefer(every, "", 3 * replicas)
    assert {*ids["c"].split(), *ids["d"].split()} < set(chosen)
    assert len(chosen) == 3 * replicas
    chosen = await served.prefer(every, ids["b"], 2 * replicas)
    assert set(ids["b"].split()) < set(chosen)
    assert set(ids["a"].split()).isdisjoint(chosen)


async def test_list_is_kept_away_while_allocating(serve: Serve) -> None:
    """While an Allocate is in flight, PodResources `List` is not called."""
    source = Slow()
    served = await serve(source, "a")
    call = asyncio.create_task(served.allocate("a"))
    await source.begun.wait()
    waiting = asyncio.create_task(served.in_flight.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    source.go_on.set()
    await call
    await waiting


_ids = st.lists(
    st.sampled_from(["a", "b", "sick", "a::0", "a::1", "b::0", "", "::", "nobody", "\x00", "☃"]), max_size=4
)


@given(st.lists(_ids, max_size=3), st.sampled_from([1, 2]))
def test_no_request_breaks_allocate(containers: list[list[str]], replicas: int) -> None:
    """Any Allocate request is granted, with a response for each container, or refused with a code.

    A device of unknown health, here b, can be granted.
    """

    async def run() -> None:
        served = Served(Shared(replicas), None)
        served.publish("a", Device("b", health=Health.UNKNOWN), Device("sick", health=Health.UNHEALTHY))
        endpoint = served.endpoint
        good = {name for device in "ab" for name in replicas_of(device, replicas)}

        class Context:
            async def abort(self, code: grpc.StatusCode, details: str) -> None:
                raise Refusal(code, "", details)

        requests = [pb.ContainerAllocateRequest(devices_ids=names) for names in containers]
        try:
            response = await endpoint.Allocate(pb.AllocateRequest(container_requests=requests), Context())  # type: ignore[arg-type]
        except Refusal as refusal:
            assert refusal.code in (  # noqa: PT017
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
            )
            assert served.granted_ids == []
        else:
            assert len(response.container_responses) == len(containers)
            assert all(name in good for names in containers for name in names)
            assert served.granted_ids == list(dict.fromkeys(name for names in containers for name in names))

    asyncio.run(run())


# GetPreferredAllocation.


async def test_preference_is_numa_compact(serve: Serve) -> None:
    """Without the hook `prefer`, devices on one NUMA node are preferred, if possible on that of the required ids."""
    served = await serve(Source(), *(Device(f"d{number}", numa=number // 2) for number in range(4)))
    assert await served.prefer("d0 d2 d3", "", 2) == ["d2", "d3"]
    assert await served.prefer("d0 d1 d2 d3", "d3", 2) == ["d2", "d3"]
    assert served.endpoint.statistics.preferences == 2


class Preferring(Source):
    """A source whose `prefer` returns the `answer` that a test sets, or raises it if it is an exception."""

    answer: Any = ()

    def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_prefer_hook_decides(serve: Serve) -> None:
    """`prefer` may return devices or ids; the response has them and the ids that must be included."""
    source = Preferring()
    served = await serve(source, "a", "b", "c")
    source.answer = [Device("c")]
    assert await served.prefer("a b c", "", 1) == ["c"]
    source.answer = ["c", "a"]
    assert await served.prefer("a b c", "a", 2) == ["a", "c"]


@pytest.mark.parametrize("answer", [["nobody"], [], ["a", "b", "c"], None, 3, ValueError("no")])
async def test_wrong_preference_is_replaced(serve: Serve, answer: object, caplog: pytest.LogCaptureFixture) -> None:
    """If `prefer` raises or returns a wrong answer, the agent chooses the devices itself, and the call succeeds."""
    source = Preferring()
    source.answer = answer
    served = await serve(source, "a", "b", "c")
    assert await served.prefer("b c", "", 1) == ["b"]
    assert "choosing without it" in caplog.text


@pytest.mark.parametrize("plain", [True, False])
async def test_preference_that_hangs_is_done_without(serve: Serve, *, plain: bool) -> None:
    """A `prefer` that hangs is given up after `hook_timeout`, and the agent chooses the devices itself."""
    over = threading.Event()

    class Hangs(Source):
        hook_timeout = 0.05

        def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> Any:
            return over.wait() if plain else asyncio.Event().wait()

    served = await serve(Hangs(), "a", "b", "c")
    try:
        assert await served.prefer("b c", "c", 1) == ["c"]
    finally:
        over.set()


async def test_preference_for_unknown_devices_does_not_fail(serve: Serve) -> None:
    """GetPreferredAllocation succeeds also with unknown and unhealthy devices, since its failure would fail the pod."""
    served = await serve(Source(), "a", Device("sick", health=Health.UNHEALTHY))
    assert set(await served.prefer("nobody sick a", "gone", 3)) >= {"gone"}
    assert await served.prefer("", "", 2) == []


_names = st.lists(st.sampled_from(["a::0", "a::1", "b::0", "b::1", "a", "x::7"]), max_size=6, unique=True)


@given(_names, _names, st.lists(st.sampled_from(["a", "b", "a::1", "x", ""]), max_size=4))
def test_translated_wish_fits(available: list[str], must_include: list[str], wish: list[str]) -> None:
    """What `prefer` returns is translated to distinct available ids, the required ids included, or to None."""
    chosen = as_names(wish, available, must_include, partial(device_of, replicas=2))
    if chosen is not None:
        assert len(set(chosen)) == len(chosen)
        assert set(must_include) <= set(chosen) <= set(available) | set(must_include)
        for one in wish:
            assert any(name == one or device_of(name, 2) == one for name in chosen)


# PreStartContainer.


async def test_reset_is_called_with_the_devices(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """`reset` gets each device once, also for two replicas; if it fails, the start fails, and the log names the pod."""
    source = Shared(2)
    source.errors = {"b": "stuck"}
    named = {"b::0": frozenset({PodContainer("ml", "train", "main")})}

    async def begun(*_: object) -> frozenset[Allocation]:
        return frozenset()

    tracker = SimpleNamespace(holders=lambda _: named, unnamed_reasons=lambda _: {}, begun=begun)
    served = await serve(source, "a", "b", holders=cast("Any", tracker))
    await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a::0", "a::1"]))
    with refused(grpc.StatusCode.INTERNAL, f"reset of {R} failed: OSError: stuck"):
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["b::0"]))
    (said,) = [record for record in caplog.records if "cannot start" in record.getMessage()]
    assert (said.resource, said.device, said.pod) == (R, "b::0", "ml/train")  # type: ignore[attr-defined]
    assert "b::0" in said.getMessage()
    assert source.resets == ["a", "b"]


async def test_a_reset_that_goes_on_failing_is_logged_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """The same error of `reset` is logged once until a container starts; a different error is logged at once."""
    served = await serve(source := Shared(), "a", "b")
    said = []
    for error, ids in (("stuck", "ab"), ("stuck", "ba"), ("burnt", "ab"), ("", "ab"), ("burnt", "ba")):
        source.errors = {"a": error} if error else {}
        with contextlib.suppress(grpc.aio.AioRpcError):
            await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=list(ids)))
        said.append(sum("cannot start" in one.getMessage() for one in caplog.records if one.levelname == "WARNING"))
    assert said == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("plain", [True, False])
async def test_reset_that_hangs_is_given_up(serve: Serve, *, plain: bool) -> None:
    """A `reset` that hangs is given up after `hook_timeout`; while it still runs, only its device is refused."""
    over = threading.Event()

    class Resetting(Source):
        hook_timeout = 0.05

        def reset(self, devices: Sequence[Device]) -> Any:
            if devices[0].id == "good":
                return None
            return over.wait() if plain else asyncio.Event().wait()

    served = await serve(Resetting(), "a", "good")
    try:
        with refused(grpc.StatusCode.INTERNAL, f"reset of {R} did not answer within 0.05 s"):
            await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a"]))
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["good"]))
        if plain:  # the kubelet calls again
            with refused(grpc.StatusCode.INTERNAL, f"a of {R}: `reset` is still running on it, after its timeout"):
                await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a"]))
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "`reset` is still running on it"):
                await served.allocate("a")
    finally:
        over.set()


async def test_reset_without_a_device_is_not_called(serve: Serve) -> None:
    """`reset` is called with the known devices only; if all ids are unknown, PreStartContainer succeeds without it."""
    served = await serve(source := Shared(), "a")
    await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a", "lost"]))
    await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["lost"]))
    assert source.resets == ["a"]
    assert served.endpoint.statistics.hooks.calls == {(R, "reset"): 1}


async def test_a_device_is_checked_again_after_its_reset(serve: Serve, tmp_path: Path) -> None:
    """If a device's symlink names another device after `reset`, PreStartContainer is refused."""
    link = tmp_path / "link"
    link.symlink_to("/dev/tty")

    class Resetting(Source):
        def reset(self, devices: Sequence[Device]) -> None:
            link.unlink()
            link.symlink_to("/dev/ptmx")

    device = Device("a", nodes=[DeviceNode(str(link), target="/dev/tty")])
    served = await serve(source := Resetting())
    await identity.publish(served.inventory, [device], shares(source, [device]))
    await served.allocate("a")
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "char 5:2"):
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["a"]))


async def test_settled_when_no_call_is_in_flight(serve: Serve) -> None:
    """`calls_ended` waits until no call is in flight, so that the end of the plugin does not cut a call off."""
    served = await serve(source := Slow(), "a")
    assert await served.endpoint.calls_ended(0)
    call = asyncio.create_task(served.allocate("a"))
    await source.begun.wait()
    assert not await served.endpoint.calls_ended(0.01)
    source.go_on.set()
    assert await served.endpoint.calls_ended(10)
    await call


# A source is replaced by one with another number of replicas.


@pytest.mark.parametrize(
    ("before", "after", "gone", "stay", "meanwhile"),
    [
        (1, 2, {"a"}, {"a::0", "a::1"}, {"a::0": "Unhealthy", "a::1": "Unhealthy"}),
        (2, 1, {"a::0", "a::1"}, {"a"}, {"a": "Unhealthy"}),
        (3, 2, {"a::2"}, {"a::0", "a::1"}, {"a::0": "Healthy", "a::1": "Unhealthy"}),
        (2, 3, set(), {"a::0", "a::1", "a::2"}, {"a::0": "Healthy", "a::1": "Healthy", "a::2": "Unhealthy"}),
    ],
)
async def test_ids_from_before_a_change_of_replicas_are_not_dropped(
    serve: Serve, before: int, after: int, gone: set[str], stay: set[str], meanwhile: Mapping[str, str]
) -> None:
    """After a change of replicas, ids that are not offered any more stay listed as unhealthy until they are forgotten.

    A request for a new id is refused if the device's grants would exceed the whole device. Once the holders have ended,
    the new ids are healthy, and the former ids are no longer listed.
    """
    served = await serve(Shared(before), "a")
    async with served.listening() as lists:
        await lists.next()
        for name in sorted(gone or stay - {"a::2"}):
            await served.allocate(name)
        other = Shared(after)
        served.endpoint.replace(other)
        assert await lists.next() == dict.fromkeys(gone, "Unhealthy") | {name: meanwhile[name] for name in stay}
        for name in sorted(stay, key=lambda name: meanwhile[name] != "Healthy"):
            if meanwhile[name] == "Healthy":
                await served.allocate(name)
                continue
            with refused(grpc.StatusCode.FAILED_PRECONDITION, f"{name.partition('::')[0]} of {R} is held by a pod"):
                await served.allocate(name)
        for name in gone:
            with refused(grpc.StatusCode.INVALID_ARGUMENT, f"there is no device {name}"):
                await served.allocate(name)
            await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[name]))
        assert other.resets == ["a"] * len(gone)  # `reset` was called for pods that still hold the former ids
        served.forget_allocations()
        served.endpoint.ids.forget(gone | stay)
        served.endpoint.refresh()
        if gone or "Unhealthy" in meanwhile.values():
            assert await lists.next() == dict.fromkeys(stay, "Healthy")


async def test_replicas_changed_back_are_whole_again(serve: Serve) -> None:
    """After a change from 2 replicas to 1 and back, both are healthy once the holder of the whole device has ended."""
    served = await serve(Shared(2), "a")
    served.endpoint.replace(Shared(1))
    await served.allocate("a")
    served.endpoint.replace(Shared(2))
    async with served.listening() as lists:
        assert await lists.next() == dict.fromkeys(("a", "a::0", "a::1"), "Unhealthy")
        served.forget_allocations()
        served.endpoint.ids.forget({"a"})
        served.endpoint.refresh()
        assert await lists.next() == {"a::0": "Healthy", "a::1": "Healthy"}


async def test_replicas_that_nobody_has_change_at_once(serve: Serve) -> None:
    """If the replicas of a free device change, its new ids are healthy at once, and the former ids are unhealthy."""
    served = await serve(Shared(2), "a")
    served.endpoint.replace(Shared(1))
    async with served.listening() as lists:
        assert await lists.next() == {"a": "Healthy", "a::0": "Unhealthy", "a::1": "Unhealthy"}


async def test_a_device_that_is_held_keeps_its_number_of_replicas(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """If a source changes a held device's replicas, the ids stay until the holder ends, and the log says so."""
    source = Changing(3)
    source.now = 2
    source.go_on.set()
    served = await serve(source, "a")
    await served.allocate("a::0")
    async with served.listening() as lists:
        assert await lists.next() == {"a::0": "Healthy", "a::1": "Healthy"}
        for number in (1, 3):
            source.now = number
            served.publish("a", f"b{number}")
            assert {name for name in await lists.next() if name.startswith("a")} == {"a::0", "a::1"}
        said = [record.getMessage() for record in caplog.records if "as before" in record.getMessage()]
        text = "device a is offered 2 times as before, not %d times: a pod or claim has it"
        assert said == [text % 1, text % 3]
        served.forget_allocations()
        served.endpoint.refresh()
        assert {name for name in await lists.next() if name.startswith("a")} == {"a::0", "a::1", "a::2"}


async def test_each_input_of_the_device_list_is_compared(serve: Serve) -> None:
    """`list_inputs` changes with each event, such as a grant, after which a scan computes the device list again."""
    source = Slow(3)
    served = await serve(source, "a")
    seen = served.endpoint.list_inputs()

    def changed() -> bool:
        nonlocal seen
        before, seen = seen, served.endpoint.list_inputs()
        assert seen == served.endpoint.list_inputs()
        return bool(seen != before)

    assert not changed()
    allocation = asyncio.create_task(served.allocate("a::0"))
    await source.begun.wait()
    assert changed()
    source.go_on.set()
    await allocation
    assert changed()
    served.unknown["a"] = "the agent has just started"
    assert changed()
    served.foreign = (Use(("claim", "other.example.com", "u"), "claim x/y", (R, "a"), frozenset(), None),)
    assert changed()
    served.publish("a", "b")
    assert changed()
    served.endpoint.ids.keep(["c::0"])
    assert changed()
    served.forget_allocations()
    assert changed()


async def test_ids_that_pods_have_from_an_earlier_agent_count(serve: Serve) -> None:
    """Ids that an earlier agent with other replicas granted are known to this agent, except ids of unknown devices.

    Of each device as many replicas are healthy as its holders leave free, or none if the holders' part is not known.
    """
    served = await serve(Shared(2), "a", "b", "c", "d")
    for name, part in {"a": "1", "b::0": "1/2", "c::7": "1/8", "d::7": ""}.items():
        record = AllocationRecord(R, name, name[0], 0.0, 0, amount=Amount(part))
        change = Change("allocations", (R, name), record)
        served.store.snapshot = served.store.snapshot.with_changes([change], 0)
    adopted = served.endpoint.ids.adopt_existing(["a", "b::0", "c::7", "d::7", "stranger::1"])
    assert adopted == {"stranger::1"}
    async with served.listening() as lists:
        healthy = {name for name, health in (await lists.next()).items() if health == "Healthy"}
        assert healthy == {"b::0", "b::1", "c::0"}
        with refused(grpc.StatusCode.FAILED_PRECONDITION, f"a of {R} is held by a pod"):
            await served.allocate("a::1")
        assert await served.allocate("c::1")
        with refused(grpc.StatusCode.FAILED_PRECONDITION, f"c of {R} is held by a pod"):
            await served.allocate("c::0")


async def test_what_is_given_out_while_sharing_changes_is_recorded_by_its_device(serve: Serve) -> None:
    """If the replicas change during an Allocate, ids are recorded with the part of the device that they had before."""
    source = Slow(4)
    served = await serve(source, "a")
    call = asyncio.ensure_future(served.allocate("a::0 a::1"))
    await source.begun.wait()
    served.endpoint.replace(Slow(1))
    source.go_on.set()
    await call
    records = served.register.snapshot.allocations.values()
    assert [(one.device, one.amount) for one in records] == [("a", Amount("1/4"))] * 2


async def test_a_device_that_is_called_like_a_replica_keeps_its_former_id(serve: Serve) -> None:
    """If a held device with the id x::1 gets replicas, its holder keeps the whole device; replicas are unhealthy."""
    served = await serve(Shared(1), "x::1")
    async with served.listening() as lists:
        assert await lists.next() == {"x::1": "Healthy"}
        await served.allocate("x::1")
        for replicas in (2, 3):
            served.endpoint.replace(Shared(replicas))
            offered = [f"x::1::{number}" for number in range(replicas)]
            assert await lists.next() == dict.fromkeys(("x::1", *offered), "Unhealthy")
    assert served.endpoint.ids.device_id_of("x::1") == "x::1"


async def test_a_device_that_is_not_shared_among_others_keeps_its_id(serve: Serve) -> None:
    """Beside devices with replicas, a device without replicas keeps its id; a device named a::1 is no replica of a."""

    class Mixed(Shared):
        def replicas_of(self, device: Device) -> int:
            return self.replicas if device.id == "a" else 1

        def prefer(self, available: Sequence[Device], must_include: Sequence[Device], size: int) -> list[str]:
            return [device.id for device in available][-size:]

    source = Mixed(2)
    served = await serve(source, "a", "b", "a::1")
    async with served.listening() as lists:
        assert (await lists.next()).keys() == {"a::0", "a::1", "b", "a::1::0"}
    for name in ("b", "a::1::0", "a::1"):
        await served.allocate(name)
        await served.stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[name]))
    assert source.resets == ["b", "a::1", "a"]
    assert await served.prefer("a::0 b a::1::0", "", 2) == ["a::1::0", "b"]
    assert [served.endpoint.ids.device_id_of(name) for name in ("b", "a::1::0", "a::1")] == ["b", "a::1", "a"]


# The list computed from an inventory.


@given(
    st.lists(st.builds(Device, st.sampled_from("abc"), health=st.sampled_from(Health)), unique_by=lambda d: d.id),
    st.lists(st.builds(Device, st.sampled_from("abc"), health=st.sampled_from(Health)), unique_by=lambda d: d.id),
    st.integers(1, 3),
)
def test_list_never_shows_a_broken_device_healthy(one: list[Device], two: list[Device], replicas: int) -> None:
    """Every device that was ever listed stays listed; it is healthy only if it is usable in the newest source list."""
    inventory = Inventory(R)
    for listed in (one, two):
        inventory.publish(listed, replicas=shares(Shared(replicas), listed))
    lines = DeviceIds(Shared(replicas), inventory).entries(lambda device: True, ())
    shown = {entry.name: entry.healthy for entry in lines}
    newest = {device.id: device.health.usable for device in two}
    wanted = {device.id: newest.get(device.id, False) for device in (*one, *two)}
    assert shown == {name: so for device, so in wanted.items() for name in replicas_of(device, replicas)}


# The identity of devices.


async def test_an_answer_says_what_was_recorded(serve: Serve) -> None:
    """If a device's identity changes while its grant is recorded, the response has the recorded identity."""
    served = await serve(Source())
    served.inventory.publish([Device("a", identity="x")], {"a": frozenset({"x"})})
    served.store.go_on.clear()
    call = asyncio.create_task(served.allocate("a"))
    await served.store.begun.wait()
    served.inventory.publish([Device("a", identity="y")], {"a": frozenset({"y"})})
    served.store.go_on.set()
    (response,) = await call
    kept = base64.b64encode(response.SerializeToString()).decode()
    record = served.register.snapshot.allocations[R, "a"]
    assert record.identity == identified(frozenset({"x"}), served.register.boot)
    paths = frozenset[str]()
    wanted = Wanted((R, "a"), record.identity, record.amount, record.since, paths)
    assert granted(kept, R, "a", served.register.boot) == wanted
