"""A minimal device plugin without this project's agent, for tests of the fake kubelet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc

RESOURCE = "example.com/thing"
DeviceSpec = str | tuple[str, str] | tuple[str, str, tuple[int, ...]]


def device(spec: DeviceSpec) -> pb.Device:
    """Return a device, given its id, or its id and health, or its id, health and NUMA nodes."""
    if isinstance(spec, str):
        return pb.Device(ID=spec, health="Healthy")
    made = pb.Device(ID=spec[0], health=spec[1])
    if len(spec) == 3:
        made.topology.nodes.extend(pb.NUMANode(ID=node) for node in spec[2])
    return made


class BarePlugin(pb_grpc.DevicePluginServicer):
    """A plugin that serves one resource on one socket, with the answers that a test sets, and records the requests."""

    def __init__(
        self,
        directory: Path,
        *devices: DeviceSpec,
        resource: str = RESOURCE,
        endpoint: str = "bare.sock",
        pre_start: bool = False,
        prefer: bool = False,
    ) -> None:
        self.resource = resource
        self.endpoint = endpoint
        self.options = pb.DevicePluginOptions(pre_start_required=pre_start, get_preferred_allocation_available=prefer)
        self.allocations: list[list[str]] = []
        self.preferences: list[pb.ContainerPreferredAllocationRequest] = []
        self.pre_starts: list[list[str]] = []
        self.before_answer: Callable[[str], None] = lambda method: None
        self.on_prefer: Callable[[pb.ContainerPreferredAllocationRequest], list[str]] = lambda request: []
        self.response: Callable[[list[str]], pb.AllocateResponse] = self._response
        self._directory = directory
        self._changed = threading.Condition()
        self._devices = [device(spec) for spec in devices]
        self._version = 0
        self._stopped = False
        self._ended_streams = 0
        self._server = grpc.server(ThreadPoolExecutor(16))
        pb_grpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{directory / endpoint}")
        self._server.start()

    def register(
        self, timeout: float = 30.0, version: str = "v1beta1", options: pb.DevicePluginOptions | None = None
    ) -> None:
        with grpc.insecure_channel(
            f"unix:{self._directory / 'kubelet.sock'}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            pb_grpc.RegistrationStub(channel).Register(
                pb.RegisterRequest(
                    version=version, endpoint=self.endpoint, resource_name=self.resource, options=options
                ),
                timeout=timeout,
            )

    def show(self, *devices: DeviceSpec) -> None:
        """Send a device list with these devices instead of the former list."""
        with self._changed:
            self._devices = [device(spec) for spec in devices]
            self._version += 1
            self._changed.notify_all()

    def end_streams(self) -> None:
        """End the open ListAndWatch streams; the plugin goes on to serve streams that open later."""
        with self._changed:
            self._ended_streams += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._server.stop(None).wait()

    def GetDevicePluginOptions(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:  # noqa: N802
        self.before_answer("GetDevicePluginOptions")
        return self.options

    def ListAndWatch(self, request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:  # noqa: N802
        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        context.add_callback(wake)
        self.before_answer("ListAndWatch")
        with self._changed:
            ended, sent = self._ended_streams, None

        def over() -> bool:
            return self._stopped or ended != self._ended_streams or not context.is_active()

        while True:
            with self._changed:
                while not over() and sent == self._version:
                    self._changed.wait()
                if over():
                    return
                response, sent = pb.ListAndWatchResponse(devices=self._devices), self._version
            yield response

    def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        asked = request.container_requests[0]
        self.preferences.append(asked)
        self.before_answer("GetPreferredAllocation")
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=self.on_prefer(asked))]
        )

    def Allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:  # noqa: N802
        ids = list(request.container_requests[0].devices_ids)
        self.allocations.append(ids)
        self.before_answer("Allocate")
        return self.response(ids)

    def PreStartContainer(  # noqa: N802
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        self.pre_starts.append(list(request.devices_ids))
        self.before_answer("PreStartContainer")
        return pb.PreStartContainerResponse()

    def _response(self, ids: list[str]) -> pb.AllocateResponse:
        answer = pb.ContainerAllocateResponse(
            envs={f"{self.resource.rpartition('/')[2].upper()}_IDS": ",".join(sorted(ids))},
            annotations={f"{self.resource}-ids": ",".join(sorted(ids))},
            mounts=[pb.Mount(container_path="/opt/lib", host_path=f"/srv/{self.endpoint}", read_only=True)],
            devices=[pb.DeviceSpec(container_path=f"/dev/{i}", host_path="/dev/null", permissions="rw") for i in ids],
            cdi_devices=[pb.CDIDevice(name=f"example.com/thing={i}") for i in ids],
        )
        return pb.AllocateResponse(container_responses=[answer])


class Hold:
    """Makes a plugin's calls of a method wait until a test sets `let_go`; `arrived` is set when a call arrives."""

    def __init__(self, plugin: BarePlugin, method: str, timeout: float = 30.0) -> None:
        self.arrived = threading.Event()
        self.let_go = threading.Event()

        def wait(called: str) -> None:
            if called == method and not self.let_go.is_set():
                self.arrived.set()
                assert self.let_go.wait(timeout)

        plugin.before_answer = wait


def fail(*methods: str, times: int = 10**6) -> Callable[[str], None]:
    """Return a `before_answer` that makes calls of these methods fail, at most `times` calls."""
    left = [times]

    def raise_for(called: str) -> None:
        if called in methods and left[0]:
            left[0] -= 1
            raise RuntimeError(f"{called} is broken")

    return raise_for
