"""A fake of vendors' device plugins: a process without code of the agents, with the quirks of vendors' plugins.

    python -m deviceplugin.testing.foreign FILE --directory /var/lib/kubelet/device-plugins

FILE is JSON: `{"resources": [...], ...}` with the fields of `Resource`, `AllocateAnswer` and `Quirks` below. The plugin
reads FILE again when FILE is replaced. Each quirk was read in a plugin's source, or seen when that plugin ran (NVIDIA,
AMD, Intel, SR-IOV, squat, GKE, the Kubernetes sample). With the default quirks, the fake behaves as most of these
plugins: its socket's name is constant, it registers again when kubelet.sock is created, and each update of the list
reaches only one of several ListAndWatch streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import grpc.aio
import msgspec
from watchdog import events
from watchdog.observers import Observer

from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import pluginregistration_pb2 as registration_pb
from deviceplugin.wire import pluginregistration_pb2_grpc as registration_grpc
from deviceplugin.wire.deviceplugin_pb2_grpc import (
    DevicePluginServicer,
    RegistrationStub,
    add_DevicePluginServicer_to_server,
)

_CHANNEL: Final = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
REGISTRY: Final = Path("/var/lib/kubelet/plugins_registry")
"""The registry's path, which is a constant in most plugins. Plugins use this path in their container, whatever
directory of the host is mounted there."""
PANIC: Final = 2
"""The exit status of a Go program that panics."""


class AllocateAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The AllocateResponse. `{id}` stands for each device's id, `{ids}` for all ids, `{random}` for a random number.

    nodes: device nodes for each id, as [host path, container path, permissions]. control: device nodes that are in each
    response once. mounts: [host path, container path] for each id. files: texts by path, which the plugin writes before
    it responds (Intel's CDI specs). extra: bytes, in hexadecimal, of fields that this version of the API lacks.
    """

    env: dict[str, str] = {}
    nodes: list[tuple[str, str, str]] = []
    control: list[tuple[str, str, str]] = []
    mounts: list[tuple[str, str]] = []
    annotations: dict[str, str] = {}
    cdi: list[str] = []
    files: dict[str, str] = {}
    extra: str = ""

    def message(self, ids: Sequence[str]) -> bytes:
        """Return the bytes of the AllocateResponse of one container."""
        number = secrets.token_hex(4)

        def put(text: str, device_id: str = "") -> str:
            return text.replace("{ids}", ",".join(ids)).replace("{id}", device_id).replace("{random}", number)

        response = pb.ContainerAllocateResponse(
            envs={name: put(value) for name, value in self.env.items()},
            mounts=[
                pb.Mount(host_path=put(host, name), container_path=put(inside, name), read_only=True)
                for name in ids
                for host, inside in self.mounts
            ],
            devices=[
                pb.DeviceSpec(host_path=put(host, name), container_path=put(inside, name), permissions=permissions)
                for nodes, names in ((self.control, ("",)), (self.nodes, ids))
                for name in names
                for host, inside, permissions in nodes
            ],
            annotations={put(name): put(value) for name, value in self.annotations.items()},
            cdi_devices=[pb.CDIDevice(name=put(name, device_id)) for device_id in ids for name in self.cdi],
        )
        with_extra = pb.ContainerAllocateResponse.FromString(response.SerializeToString() + bytes.fromhex(self.extra))
        return pb.AllocateResponse(container_responses=[with_extra]).SerializeToString()


class Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One resource. devices: health by device id, in the order of the list. numa: NUMA nodes by device id."""

    name: str
    devices: dict[str, str]
    numa: dict[str, list[int]] = {}
    answer: AllocateAnswer = AllocateAnswer()
    socket: str = ""

    @property
    def socket_name(self) -> str:
        """The file name of the resource's socket. The name is constant, as in most plugins."""
        return self.socket or f"{self.name.replace('/', '_')}-vendor.sock"


class Quirks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties in which plugins differ.

    trigger: the event after which the plugin registers again: kubelet.sock is created (NVIDIA, AMD), its own socket is
    removed (Intel), or its own socket is missing at a check every `poll` seconds (SR-IOV, squat). watcher: if
    plugins_registry is mounted, the plugin has its sockets there, waits for GetInfo, and names its sockets by their
    paths in its container. If the kubelet notifies the plugin that it is not registered, the plugin serves again
    (SR-IOV), or ends its servers for good (RDMA). once: the plugin never registers if kubelet.sock is missing at its
    start (GKE). failed_register: the plugin tries three times, `retry` seconds apart (AMD); or ends (Intel, SR-IOV); or
    stops all its resources and starts again after `retry` seconds (NVIDIA). stream_end: when the client ends a
    ListAndWatch stream, the stream's reader still takes the next update (most plugins), after which the process may
    panic (Intel); or the process ends at once (AMD). second_stream: if a second stream is open beside the first, each
    update reaches one of them, or the process panics (KubeVirt). empty_first: the first list is empty (Intel). repeat:
    seconds after which the same list is sent again (AMD). shuffled: each list has another order. unknown_ids: Allocate
    accepts unknown ids (AMD, SR-IOV). needs_list: until the first list was sent, all ids are unknown (AMD).
    minds_deprecation: the plugin does not register if the file DEPRECATION exists (the Kubernetes sample). pause:
    seconds from the trigger to the new start (10 in the Kubernetes sample). empty_last: the plugin sends an empty list
    before it stops (KubeVirt). hold: a path; the call that `held` names waits while this file exists. pre_start,
    preferred: whether the plugin has PreStartContainer and GetPreferredAllocation.
    """

    trigger: Literal["create", "own-socket", "poll"] = "create"
    watcher: Literal["", "restart", "stop"] = ""
    once: bool = False
    failed_register: Literal["retry", "exit", "stop-all"] = "retry"
    stream_end: Literal["unnoticed", "panic", "exit"] = "unnoticed"
    second_stream: Literal["shared", "panic"] = "shared"
    empty_first: bool = False
    repeat: float = 0.0
    shuffled: bool = False
    unknown_ids: bool = False
    needs_list: bool = False
    minds_deprecation: bool = False
    pause: float = 0.0
    empty_last: bool = False
    hold: str = ""
    held: Literal["Allocate", "GetPreferredAllocation", "PreStartContainer"] = "Allocate"
    pre_start: bool = False
    preferred: bool = False
    poll: float = 0.2
    retry: float = 0.2


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole content of the configuration file."""

    resources: list[Resource]
    quirks: Quirks = Quirks()


def write(path: Path, resources: Sequence[Mapping[str, Any]], **quirks: Any) -> None:
    """Write a configuration file; an existing file is replaced atomically. Raises msgspec.ValidationError."""
    content = {"resources": list(resources), "quirks": quirks}
    msgspec.convert(content, File)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content))
    new.replace(path)


def calls(notes: Path, call: str = "") -> list[dict[str, Any]]:
    """Return the recorded calls, each as `{"call": ..., "resource": ..., ...}`. call: only calls of this name."""
    if not notes.exists():
        return []
    calls_noted = [json.loads(line) for line in notes.read_text().splitlines()]
    return [noted for noted in calls_noted if not call or noted["call"] == call]


class _Service(DevicePluginServicer, registration_grpc.RegistrationServicer):
    """The gRPC services of one resource on one socket."""

    def __init__(self, plugin: ForeignPlugin, resource: Resource) -> None:
        self.resource = resource
        self._plugin = plugin
        self._updates: asyncio.Queue[None] = asyncio.Queue()
        self._open = 0
        self._listed = False
        self._left: set[asyncio.Task[None]] = set()

    def update(self, resource: Resource) -> None:
        self.resource = resource
        self._updates.put_nowait(None)

    async def GetInfo(self, request: object, context: object) -> registration_pb.PluginInfo:  # noqa: N802
        self._plugin.note("GetInfo", self.resource)
        return registration_pb.PluginInfo(
            type="DevicePlugin",
            name=self.resource.name,
            endpoint=str(REGISTRY / self.resource.socket_name),
            supported_versions=["v1alpha1", "v1beta1"],
        )

    async def NotifyRegistrationStatus(  # noqa: N802
        self, request: registration_pb.RegistrationStatus, context: object
    ) -> registration_pb.RegistrationStatusResponse:
        if request.plugin_registered:
            self._plugin.note("registered", self.resource)
        else:
            self._plugin.note("Register failed", self.resource, why=request.error)
            self._plugin.refused()
        return registration_pb.RegistrationStatusResponse()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: object) -> pb.DevicePluginOptions:  # noqa: N802
        self._plugin.note("GetDevicePluginOptions", self.resource)
        return self._plugin.options

    async def ListAndWatch(  # noqa: N802
        self, request: pb.Empty, context: object
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        quirks, stopping = self._plugin.quirks, self._plugin.stopping
        self._plugin.note("ListAndWatch", self.resource, open=self._open)
        if self._open and quirks.second_stream == "panic":
            self._plugin.end("close of closed channel", PANIC)
        self._open += 1
        try:
            if quirks.empty_first:
                yield pb.ListAndWatchResponse()
            while not stopping.is_set():
                self._listed = True
                yield self._list()
                self._plugin.note("listed", self.resource)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(quirks.repeat or None):
                        await self._updates.get()
            if quirks.empty_last:
                yield pb.ListAndWatchResponse()
        except (asyncio.CancelledError, GeneratorExit):
            if not stopping.is_set():
                self._abandoned()
            raise
        finally:
            self._open -= 1

    def _list(self) -> pb.ListAndWatchResponse:
        lines = list(self.resource.devices.items())
        if self._plugin.quirks.shuffled:
            random.shuffle(lines)
        message = pb.ListAndWatchResponse()
        for name, health in lines:
            device = message.devices.add(ID=name, health=health)
            for node in self.resource.numa.get(name, ()):
                device.topology.nodes.add(ID=node)
        return message

    def _abandoned(self) -> None:
        """React to a client that ends the ListAndWatch stream, as the vendors' plugins do (`Quirks.stream_end`)."""
        self._plugin.note("stream ended", self.resource)
        how = self._plugin.quirks.stream_end
        if how == "exit":
            self._plugin.end("the kubelet closed the stream", 1)

        async def swallow() -> None:
            await self._updates.get()
            self._plugin.note("update swallowed", self.resource)
            if how == "panic":
                self._plugin.end("send on closed channel", PANIC)

        task = asyncio.get_running_loop().create_task(swallow())
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _hold(self, call: str) -> None:
        quirks = self._plugin.quirks
        while quirks.held == call and quirks.hold and os.path.exists(quirks.hold):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # Poll: no event reports the removal of this file.

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:  # noqa: N802
        ids = [name for container in request.container_requests for name in container.devices_ids]
        self._plugin.note("Allocate", self.resource, ids=ids, containers=len(request.container_requests))
        quirks = self._plugin.quirks
        await self._hold("Allocate")
        usable = self.resource.devices if self._listed or not quirks.needs_list else {}
        if not quirks.unknown_ids and (wrong := [name for name in ids if usable.get(name) != "Healthy"]):
            await context.abort(grpc.StatusCode.UNKNOWN, f"invalid allocation request: unknown device {wrong[0]!r}")
        for path, text in self.resource.answer.files.items():
            Path(path).write_text(text)
        answer = pb.AllocateResponse.FromString(self.resource.answer.message([name for name in ids if name in usable]))
        self._plugin.note("answer", self.resource, bytes=answer.SerializeToString().hex())
        return answer

    async def GetPreferredAllocation(self, request: pb.PreferredAllocationRequest, context: Any) -> Any:  # noqa: N802
        self._plugin.note("GetPreferredAllocation", self.resource)
        await self._hold("GetPreferredAllocation")
        response = pb.PreferredAllocationResponse()
        for container in request.container_requests:
            rest = sorted(set(container.available_deviceIDs) - set(container.must_include_deviceIDs), reverse=True)
            chosen = [*container.must_include_deviceIDs, *rest][: container.allocation_size]
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Any) -> Any:  # noqa: N802
        self._plugin.note("PreStartContainer", self.resource, ids=list(request.devices_ids))
        await self._hold("PreStartContainer")
        return pb.PreStartContainerResponse()


class _Names(events.FileSystemEventHandler):
    """Reports names that appear or disappear in a directory, as Go's fsnotify does. A rename creates the new name."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[tuple[str, str]]) -> None:
        self._loop = loop
        self._queue = queue

    def dispatch(self, event: events.FileSystemEvent) -> None:
        changes = []
        if event.event_type in (events.EVENT_TYPE_DELETED, events.EVENT_TYPE_MOVED):
            changes.append(("removed", os.path.basename(os.fsdecode(event.src_path))))
        if event.event_type in (events.EVENT_TYPE_CREATED, events.EVENT_TYPE_MOVED):
            changes.append(("made", os.path.basename(os.fsdecode(event.dest_path or event.src_path))))
        for change in changes:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._queue.put_nowait, change)


class ForeignPlugin:
    """The vendor's process. It serves the configured resources on sockets in a directory until it gets a signal."""

    def __init__(self, path: Path, directory: Path, registry: Path, notes: Path | None = None) -> None:
        self.file = _read(path)
        self.quirks = self.file.quirks
        self.stopping = asyncio.Event()
        """An event that is set while the servers are being stopped, so that the ListAndWatch streams end by
        themselves."""
        self._path = path
        self._directory = directory
        self._watched = bool(self.quirks.watcher) and registry.is_dir()
        self._sockets = registry if self._watched else directory
        self._notes = notes
        self._servers: list[grpc.aio.Server] = []
        self._services: list[_Service] = []
        self._names: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    @property
    def options(self) -> pb.DevicePluginOptions:
        """The response to GetDevicePluginOptions.

        A Register request contains no options, because the kubelet ignores options in this request.
        """
        quirks = self.quirks
        return pb.DevicePluginOptions(
            pre_start_required=quirks.pre_start, get_preferred_allocation_available=quirks.preferred
        )

    def note(self, call: str, resource: Resource, **more: object) -> None:
        """Print an event as JSON, and append it to the file of notes, if any."""
        line = json.dumps({"call": call, "resource": resource.name, **more})
        _say(line)
        if self._notes is not None:
            with self._notes.open("a") as file:
                file.write(f"{line}\n")

    def end(self, why: str, status: int) -> None:
        """Print the reason, and end the process at once with an exit status. The sockets' files stay."""
        _say(f"panic: {why}" if status == PANIC else f"fatal: {why}")
        os._exit(status)

    def refused(self) -> None:
        """Wake the main loop because the kubelet has notified the plugin that it is not registered."""
        self._names.put_nowait(("refused", ""))

    async def run(self) -> None:
        """Serve and register all resources, again at each trigger, until cancelled."""
        observer = Observer()
        handler = _Names(asyncio.get_running_loop(), self._names)
        for directory in {str(self._directory), str(self._path.parent)}:
            observer.schedule(handler, directory)
        observer.start()
        try:
            kubelet_was_there = (self._directory / "kubelet.sock").exists()
            while True:
                await self._serve()
                registers = not self._watched and (kubelet_was_there or not self.quirks.once)
                if not registers or await self._register_all():
                    await self._wait_for_trigger()
                    await asyncio.sleep(self.quirks.pause)  # Some vendors' plugins sleep here, too.
                else:
                    await asyncio.sleep(self.quirks.retry)  # The vendor's own pause.
                await self._stop()
        finally:
            observer.stop()
            await self._stop()

    async def _serve(self) -> None:
        self.stopping = asyncio.Event()
        for resource in self.file.resources:
            server, service = grpc.aio.server(), _Service(self, resource)
            add_DevicePluginServicer_to_server(service, server)
            if self._watched:
                registration_grpc.add_RegistrationServicer_to_server(service, server)
            path = self._sockets / resource.socket_name
            path.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)
            self._services.append(service)
        while not self._names.empty():  # These events come from the plugin's own sockets.
            self._names.get_nowait()

    async def _stop(self) -> None:
        self.stopping.set()
        for service in self._services:
            service.update(service.resource)
        await asyncio.gather(*(server.stop(0.5) for server in self._servers))
        self._servers, self._services = [], []

    async def _register_all(self) -> bool:
        """Register all resources. Return True to wait for the trigger, False to serve again after a pause."""
        if self.quirks.minds_deprecation and (self._directory / "DEPRECATION").exists():
            _say("DEPRECATION is there: not registered")
            return True
        for resource in self.file.resources:
            for left in (2, 1, 0):
                if await self._register(resource):
                    break
                if self.quirks.failed_register == "stop-all":
                    return False
                if left:
                    await asyncio.sleep(self.quirks.retry)  # The vendor's own pause.
        return True

    async def _register(self, resource: Resource) -> bool:
        request = pb.RegisterRequest(version="v1beta1", endpoint=resource.socket_name, resource_name=resource.name)
        target = f"unix:{self._directory / 'kubelet.sock'}"
        try:
            # Vendors' plugins connect for each attempt. For a second after a failed connection, calls on the same
            # channel would fail at once.
            async with grpc.aio.insecure_channel(target, options=_CHANNEL) as channel:
                await RegistrationStub(channel).Register(request, timeout=10)  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            self.note("Register failed", resource, why=f"{error.details()}")
            if self.quirks.failed_register == "exit" and error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.end(f"could not register: {error.details()}", 1)
            return False
        self.note("registered", resource)
        return True

    def _read_again(self) -> None:
        self.file = _read(self._path)
        for service in self._services:
            for resource in self.file.resources:
                if resource.name == service.resource.name and resource != service.resource:
                    service.update(resource)

    async def _wait_for_trigger(self) -> None:
        quirks, own = self.quirks, {resource.socket_name for resource in self.file.resources}
        while True:
            try:
                polls = quirks.trigger == "poll" and not self._watched
                async with asyncio.timeout(quirks.poll if polls else None):
                    what, name = await self._names.get()
            except TimeoutError:
                if not all((self._directory / socket_name).exists() for socket_name in own):
                    return
                continue
            if name == self._path.name and what == "made":
                self._read_again()
            elif what == "refused":
                if quirks.watcher == "stop":
                    await self._stop()
                    await asyncio.Event().wait()
                return
            elif self._watched:
                continue
            elif (quirks.trigger, what, name) == ("create", "made", "kubelet.sock") or (
                quirks.trigger == "own-socket" and name in own and not (self._directory / name).exists()
            ):
                return


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _read(path: Path) -> File:
    return msgspec.json.decode(path.read_bytes(), type=File)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plugin until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--directory", type=Path, default=Path("/var/lib/kubelet/device-plugins"), metavar="DIR")
    parser.add_argument("--registry", type=Path, default=REGISTRY, metavar="DIR", help="plugins_registry")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="what it was asked, a line of JSON for each call")
    options = parser.parse_args(argv)

    async def serve() -> None:
        plugin = ForeignPlugin(options.file.absolute(), options.directory, options.registry, options.notes)
        task = asyncio.create_task(plugin.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
