"""The agent in the kubelet's place for adopted plugins: registrations, ListAndWatch streams and device lists."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from deviceplugin.adoption import plugins
from deviceplugin.adoption.plugins import AdoptionError, VendorList, VendorPlugin, VendorPlugins
from deviceplugin.adoption.watcher import PluginWatcher
from deviceplugin.kubelet.paths import Paths
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import pluginregistration_pb2 as registration_pb
from deviceplugin.wire.deviceplugin_pb2_grpc import (
    DevicePluginServicer,
    RegistrationStub,
    add_DevicePluginServicer_to_server,
)
from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server
from tests.waits import until

RESOURCE = "vendor.example/gadget"
OPTIONS = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))


class Plugin(DevicePluginServicer):
    """A plugin of one resource, which sends the device lists that a test gives."""

    def __init__(self, directory: Path, socket: str = "vendor.sock") -> None:
        self.directory, self.socket = directory, socket
        self.streams = 0
        self.lists: asyncio.Queue[list[str]] = asyncio.Queue()
        self.server = grpc.aio.server()
        add_DevicePluginServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{directory / socket}")

    async def register(self, resource: str = RESOURCE, version: str = "v1beta1", where: Path | None = None) -> None:
        target = f"unix:{where or self.directory}/kubelet.sock"
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            request = pb.RegisterRequest(version=version, endpoint=self.socket, resource_name=resource)
            await RegistrationStub(channel).Register(request, timeout=5)  # type: ignore[misc]

    def show(self, *ids: str) -> None:
        self.lists.put_nowait(list(ids))

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: N802
        return pb.DevicePluginOptions(pre_start_required=True)

    async def ListAndWatch(  # noqa: N802
        self, request: pb.Empty, context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        self.streams += 1
        while True:
            ids = await self.lists.get()
            yield pb.ListAndWatchResponse(devices=[pb.Device(ID=one, health="Healthy") for one in ids])


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:  # pytest's paths are too long for sockets
        yield Path(where)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[VendorPlugins]:
    """Serve the directory in which plugins register, until the end of the block."""
    vendors = VendorPlugins(directory)
    task = asyncio.create_task(vendors.run())
    await until(lambda: (directory / "kubelet.sock").exists() or task.done())
    try:
        yield vendors
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def plugin(
    directory: Path, socket: str = "vendor.sock", kind: Callable[[Path, str], Plugin] | None = None
) -> AsyncIterator[Plugin]:
    """Run a plugin until the end of the block."""
    made = (kind or Plugin)(directory, socket)
    await made.server.start()
    try:
        yield made
    finally:
        await made.server.stop(0)


async def following(vendors: VendorPlugins, into: list[VendorList]) -> None:
    async for one in vendors.lists(RESOURCE):
        into.append(one)  # noqa: PERF401 - other tasks read it meanwhile


def healthy(one: VendorList) -> list[str]:
    return [name for name, device in one.items() if not device.problem]


async def test_one_stream_for_an_endpoint(directory: Path) -> None:
    """A plugin that registers the same endpoint again keeps its ListAndWatch stream; the next list on it counts."""
    async with serving(directory) as vendors, plugin(directory) as vendor:
        await vendor.register()
        vendor.show("a")
        await until(lambda: (one := vendors.plugin(RESOURCE)) and one.devices)
        await vendor.register()
        vendor.show("a", "b")
        await until(lambda: (one := vendors.plugin(RESOURCE)) and len(one.devices or ()) == 2)
        assert vendor.streams == 1
        assert (found := vendors.plugin(RESOURCE)) is not None
        assert found.options.pre_start_required


async def test_an_agent_that_ends_says_nothing_of_plugins(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An agent that ends does not warn that its plugins have disconnected."""
    async with contextlib.AsyncExitStack() as stack:
        async with serving(directory):
            vendor = await stack.enter_async_context(plugin(directory))
            await vendor.register()
            await until(lambda: vendor.streams)
        assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_the_newest_endpoint_counts(directory: Path) -> None:
    """After a registration with a new endpoint, lists of the former endpoint are ignored; its stream stays open."""
    seen: list[VendorList] = []
    async with (
        serving(directory) as vendors,
        plugin(directory) as old,
        plugin(directory, "new.sock") as new,
    ):
        task = asyncio.create_task(following(vendors, seen))
        await old.register()
        old.show("a")
        await until(lambda: seen)
        await new.register()
        new.show("a", "b")
        await until(lambda: healthy(seen[-1]) == ["a", "b"])
        old.show("c")
        await until(old.lists.empty)
        new.show("a")
        await until(lambda: healthy(seen[-1]) == ["a"])
        assert not any("c" in one for one in seen)
        assert (old.streams, new.streams) == (1, 1)
        task.cancel()


async def test_what_vanishes_is_forgotten_after_the_grace(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that the plugin no longer lists are unhealthy at once, and are removed after the grace period."""
    monkeypatch.setattr(plugins, "GRACE", 0.3)
    seen: list[VendorList] = []
    async with serving(directory) as vendors:
        task = asyncio.create_task(following(vendors, seen))
        async with plugin(directory) as vendor:
            await vendor.register()
            vendor.show("a", "b")
            await until(lambda: seen)
            vendor.show("a")
            await until(lambda: len(seen) > 2)
            assert [healthy(one) for one in seen[:3]] == [["a", "b"], ["a"], ["a"]]
            assert [len(one) for one in seen[:3]] == [2, 2, 1]
            assert seen[1]["b"].problem == "the vendor's plugin no longer lists it"
        await until(lambda: seen[-1] == {})
        assert {one["a"].problem for one in seen[3:-1]} == {"the vendor's plugin has disconnected"}
        task.cancel()


async def test_an_empty_first_list_is_waited_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty first list of a plugin counts only if no other list follows within the grace period."""
    monkeypatch.setattr(plugins, "GRACE", 0.3)
    seen: list[VendorList] = []
    async with serving(directory) as vendors, plugin(directory) as vendor:
        task = asyncio.create_task(following(vendors, seen))
        await vendor.register()
        vendor.show()
        vendor.show("a")
        await until(lambda: seen)
        assert healthy(seen[0]) == ["a"]
        task.cancel()
        empty: list[VendorList] = []
        other = asyncio.create_task(following(VendorPlugins(directory), empty))
        await until(lambda: empty)
        assert empty == [{}]
        other.cancel()


@pytest.mark.parametrize(
    ("resource", "version", "words"),
    [(RESOURCE, "v1alpha1", "API version 'v1alpha1' is not v1beta1"), ("gadget", "v1beta1", "gadget")],
)
async def test_what_the_kubelet_refuses_is_refused(directory: Path, resource: str, version: str, words: str) -> None:
    """Register is refused for another API version or an invalid resource name, as by the kubelet."""
    async with serving(directory), plugin(directory) as vendor:
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            await vendor.register(resource, version)


async def test_an_endpoint_that_is_not_there_is_refused(directory: Path) -> None:
    """Register with an endpoint that cannot be reached fails, and the plugin's former endpoint stays registered."""
    async with serving(directory) as vendors, plugin(directory) as vendor:
        await vendor.register()
        vendor.socket = "nowhere.sock"
        with pytest.raises(grpc.aio.AioRpcError, match="did not answer GetDevicePluginOptions"):
            await vendor.register()
        assert (found := vendors.plugin(RESOURCE)) is not None
        assert found.socket.name == "vendor.sock"


async def test_a_successor_keeps_its_socket(directory: Path) -> None:
    """An agent serves the plugins' directory after the former agent's end, and removes old sockets, not other files."""
    (directory / "notes").touch()
    async with contextlib.AsyncExitStack() as stack:
        first = stack.enter_async_context(serving(directory))
        await first
        async with plugin(directory) as vendor:
            before = (directory / "kubelet.sock").stat().st_ino
            async with serving(directory) as vendors:
                await stack.aclose()
                await until(lambda: (directory / "kubelet.sock").stat().st_ino != before)
                assert not (directory / "vendor.sock").exists()
                assert (directory / "notes").exists()
                async with plugin(directory) as again:
                    await again.register()
                    assert vendors.plugin(RESOURCE) is not None
            assert vendor.streams == 0


async def test_a_directory_that_cannot_be_used(directory: Path) -> None:
    """A directory whose path is too long, or that cannot be created, is an error that names the cause."""
    for path, words in ((directory / ("x" * 90), "too long"), (directory / "file" / "below", "Not a directory")):
        (directory / "file").touch()
        with pytest.raises(AdoptionError, match=words):
            await VendorPlugins(path).run()


async def test_an_agent_that_no_plugin_can_register_with_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the agent's server for plugins fails, the agent ends with the error in the log, so that it is restarted."""

    async def lost(self: PluginWatcher) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(PluginWatcher, "run", lost)
    agent = Agent([SimulatedSource(1, resource=RESOURCE)], Paths(directory), vendors=VendorPlugins(directory / "p"))
    with pytest.raises(AgentError, match=r"--adopt: .*Too many open files"):
        async with asyncio.timeout(10):
            await agent.run()
    assert "Traceback" in caplog.text


def test_lists_are_compared_as_sets() -> None:
    """Device lists are equal whatever the order of their devices."""
    devices = [pb.Device(ID=name, health="Healthy") for name in "abc"]
    for one in devices:
        one.topology.nodes.extend([pb.NUMANode(ID=1), pb.NUMANode(ID=0)])
    every = [plugins.listed(pb.ListAndWatchResponse(devices=order)) for order in itertools.permutations(devices)]
    assert all(list(one.items()) == list(every[0].items()) for one in every)
    assert every[0]["a"].numa == (0, 1)


class Watched(RegistrationServicer):
    """A plugin that waits to be asked by GetInfo. info: its answers, of which the last repeats."""

    def __init__(self, plugin: Plugin, *info: registration_pb.PluginInfo) -> None:
        self.plugin = plugin
        self.told: list[tuple[bool, str]] = []
        add_RegistrationServicer_to_server(self, plugin.server)
        self._info = list(info)

    async def GetInfo(self, request: object, context: Any) -> registration_pb.PluginInfo:  # noqa: N802
        return self._info.pop(0) if len(self._info) > 1 else self._info[0]

    async def NotifyRegistrationStatus(self, request: registration_pb.RegistrationStatus, context: Any) -> Any:  # noqa: N802
        self.told.append((request.plugin_registered, request.error))
        return registration_pb.RegistrationStatusResponse()


def info(endpoint: str = "/var/lib/kubelet/plugins_registry/vendor.sock", **more: Any) -> registration_pb.PluginInfo:
    return registration_pb.PluginInfo(
        **{"type": "DevicePlugin", "name": RESOURCE, "supported_versions": ["v1alpha1", "v1beta1"], **more},
        endpoint=endpoint,
    )


@asynccontextmanager
async def watched(
    directory: Path, *infos: registration_pb.PluginInfo, socket: str = "vendor.sock"
) -> AsyncIterator[Watched]:
    """Run a plugin with its socket in the agent's plugins_registry until the end of the block."""
    (registry := directory / plugins.REGISTRY).mkdir(exist_ok=True)
    (registry / socket).parent.mkdir(exist_ok=True)
    made = Plugin(registry, socket)  # type: ignore[abstract]  # these calls are enough
    asked = Watched(made, *(infos or (info(),)))
    await made.server.start()
    made.show("a")
    try:
        yield asked
    finally:
        await made.server.stop(0)


async def listed_by(vendors: VendorPlugins) -> None:
    await until(lambda: (one := vendors.plugin(RESOURCE)) and one.devices)


@pytest.mark.parametrize("endpoint", ["/var/lib/kubelet/plugins_registry/vendor.sock", "", "vendor.sock"])
@pytest.mark.parametrize("before", [True, False])
async def test_plugins_that_wait_to_be_asked(directory: Path, endpoint: str, before: bool) -> None:
    """The agent asks each socket in plugins_registry for a plugin, also those from before the agent's start."""
    async with contextlib.AsyncExitStack() as stack:
        if before:
            one = await stack.enter_async_context(watched(directory, info(endpoint)))
        vendors = await stack.enter_async_context(serving(directory))
        if not before:
            one = await stack.enter_async_context(watched(directory, info(endpoint)))
        await listed_by(vendors)
        await until(lambda: one.told)
        assert one.told == [(True, "")]
        assert one.plugin.streams == 1


async def test_a_socket_below_the_registry(directory: Path) -> None:
    """A socket in a new subdirectory of plugins_registry is found; a name that begins with a dot is ignored."""
    async with (
        serving(directory) as vendors,
        watched(directory, socket=".hidden.sock") as hidden,
        watched(directory, socket="own/vendor.sock"),
    ):
        await listed_by(vendors)
        assert not hidden.told


async def test_the_service_may_be_among_the_others(directory: Path) -> None:
    """A plugin with a socket in plugins_registry may have its endpoint in the device plugin directory."""
    async with (
        serving(directory) as vendors,
        plugin(directory, "service.sock") as service,
        watched(directory, info("/var/lib/kubelet/device-plugins/service.sock")) as one,
    ):
        service.show("b")
        await listed_by(vendors)
        assert (service.streams, one.plugin.streams) == (1, 0)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"type": "CSIPlugin"}, "no handler registered for plugin type: CSIPlugin"),
        ({"supported_versions": ["v1alpha1"]}, "API version 'v1alpha1' is not v1beta1"),
        ({"name": "gadget"}, "gadget"),
        ({"endpoint": "/nowhere.sock"}, "did not answer GetDevicePluginOptions"),
    ],
)
async def test_a_refused_plugin_is_told_and_asked_again(directory: Path, first: dict[str, Any], words: str) -> None:
    """A plugin that the agent refuses gets the reason in NotifyRegistrationStatus, and is asked again later."""
    async with serving(directory) as vendors, watched(directory, info(**first), info()) as one:
        await listed_by(vendors)
        await until(lambda: len(one.told) == 2)
        assert not one.told[0][0]
        assert words in one.told[0][1]
        assert one.told[1] == (True, "")


async def test_an_unexpected_failure_is_logged_and_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If GetDevicePluginOptions has an invalid answer, the log has the error, and the agent tries the plugin again."""

    async def garbage(self: VendorPlugin, *request: object) -> bytes:
        return b"\xff\xff\xff"

    call = VendorPlugin.call
    monkeypatch.setattr(VendorPlugin, "call", garbage)
    async with serving(directory) as vendors, watched(directory) as one:
        await until(lambda: "is not registered" in caplog.text)
        assert "Traceback" in caplog.text
        assert not one.told
        monkeypatch.setattr(VendorPlugin, "call", call)
        await listed_by(vendors)
        await until(lambda: one.told)
        assert one.told == [(True, "")]


class SilentPlugin(Plugin):
    """A plugin that registers, sends a list only when a test says so, and never answers Allocate."""

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:  # noqa: N802
        await asyncio.Event().wait()
        raise AssertionError("not reached")


async def test_a_plugin_that_falls_silent(directory: Path) -> None:
    """The state of a plugin's connection shows whether it has sent a list, and whether a call has no answer yet."""
    async with serving(directory) as vendors, plugin(directory, kind=SilentPlugin) as silent:
        await silent.register()
        connection = vendors.connection(RESOURCE)
        assert (connection.connected, connection.lists, connection.unanswered) == (True, False, None)
        silent.show("a")
        await listed_by(vendors)
        assert vendors.connection(RESOURCE).lists
        one = vendors.plugin(RESOURCE)
        assert one is not None
        call = asyncio.create_task(one.allocate(["a"]))
        await until(lambda: vendors.connection(RESOURCE).unanswered)
        call.cancel()
        await asyncio.wait({call})
        assert vendors.connection(RESOURCE).unanswered is None


async def test_a_plugin_serves_anew(directory: Path) -> None:
    """A plugin's new socket of the same name replaces the former; a socket that nothing listens on is not removed."""
    async with serving(directory) as vendors:
        assert not vendors.connection(RESOURCE).connected
        async with watched(directory):
            await listed_by(vendors)
            connected = vendors.connection(RESOURCE)
            assert connected.connected
        left = directory / plugins.REGISTRY / "left.sock"
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(left))
        await until(lambda: not vendors.connection(RESOURCE).connected)
        assert vendors.connection(RESOURCE).since > connected.since
        async with watched(directory) as again:
            await until(lambda: (one := vendors.plugin(RESOURCE)) and one.alive and one.devices)
            assert again.plugin.streams == 1
            assert left.is_socket()


async def test_a_plugin_may_register_in_both_ways(directory: Path) -> None:
    """A plugin that registers through plugins_registry and by Register has only one ListAndWatch stream."""
    async with serving(directory) as vendors, watched(directory) as one:
        await listed_by(vendors)
        await one.plugin.register(where=directory)
        assert one.plugin.streams == 1
