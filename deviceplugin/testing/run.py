"""One run of the fake kubelet: its servers, its connections to plugins, and the start and end of its pods.

A run reads and changes the node (`NodeState`), which exists longer than the run. Events after the end of a run change
nothing. Source of the facts: kubelet 1.36.3, devicemanager/plugin/v1beta1 and apis/podresources.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from deviceplugin.cdi import CdiError, described
from deviceplugin.device import DeviceNode
from deviceplugin.kubelet.podresources import unix_address
from deviceplugin.testing.devicemanager import (
    AdmissionError,
    DeviceManager,
    KubeletCrashError,
    Method,
    PluginCallError,
    PluginEndpoint,
)
from deviceplugin.testing.state import NodeState, Registration, Rpc, Update, describe
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from deviceplugin.wire import podresources_pb2 as pr
from deviceplugin.wire import podresources_pb2_grpc as pr_grpc

if TYPE_CHECKING:
    from deviceplugin.testing.pods import FakeContainer, FakePod

__all__ = ["Run", "is_extended_resource_name"]

RECEIVE_LIMIT: Final = 4 * 1024 * 1024
"""Maximum bytes of one ListAndWatch message in the kubelet (grpc-go's default)."""

_GRACE: Final = 0.5
"""Seconds that a stopped server gives to calls in progress. Without this time, gRPC clients log an error about the
frame GOAWAY."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", RECEIVE_LIMIT),
    ("grpc.max_send_message_length", -1),
    # Each registration has its own connection, as in the kubelet; otherwise gRPC shares connections to a socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")


def is_extended_resource_name(name: str) -> bool:
    """Return whether the kubelet lets a plugin register under this name."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix, _, rest = f"requests.{name}".partition("/")
    return (
        len(prefix) <= 253
        and len(rest) <= 63
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and _NAME.fullmatch(rest) is not None
    )


class Run:
    """One run of the kubelet, from its start to its end. Events after the end of the run change nothing."""

    def __init__(self, kubelet: NodeState) -> None:
        self.kubelet = kubelet
        self.changed = kubelet.changed
        self.over = threading.Event()
        self.thawed = threading.Event()
        self.thawed.set()
        self._known: set[str] = set()
        self.queue: collections.deque[FakePod] = collections.deque()
        self.streams: collections.Counter[str] = collections.Counter()
        self.clients: dict[str, list[_Client]] = {}
        self._all_clients: list[_Client] = []
        self._threads: list[threading.Thread] = []
        self._servers: list[grpc.Server] = []
        self._registration_server: grpc.Server | None = None
        kubelet.device_plugin_dir.mkdir(parents=True, exist_ok=True)
        self.manager = DeviceManager(
            kubelet.device_plugin_dir,
            self.changed,
            lambda: {pod.uid for pod in self.active_pods()},
            numa_nodes=kubelet.numa_nodes,
            policy=kubelet.topology_policy,
            stop_grace=kubelet.stop_grace,
            seed=kubelet.seed,
            by_socket=kubelet.minor >= 37,
        )

    def start(self, *, wipe: bool) -> None:
        """Start the run: read the checkpoint, delete plugins' sockets (wipe), serve, and admit existing pods again."""
        with contextlib.suppress(ValueError, OSError):  # A damaged checkpoint is ignored, as in the kubelet.
            self.manager.read_checkpoint()
        pods = self._assigned_pods()
        self.manager.running_containers = frozenset(
            (pod.uid, c.name) for pod in pods for c in pod.all_containers.values() if c.state == "running"
        )
        if wipe:
            for path in self.kubelet.device_plugin_dir.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISSOCK(path.stat().st_mode):
                        path.unlink()
        self.serve_registration()
        self._serve(
            lambda server: pr_grpc.add_PodResourcesListerServicer_to_server(_PodResources(self), server),
            self.kubelet.pod_resources_socket,
        )
        self.thread(lambda: self._admit_all(pods), "kubelet-admission")

    def stop(self) -> None:
        """End the run as if the kubelet's process were killed, and wait for the run's threads."""
        self.over.set()
        self.thawed.set()
        stopping = [server.stop(_GRACE) for server in self._servers]
        for client in list(self._all_clients):
            client.close()
        for stopped in stopping:
            stopped.wait(10)
        with self.changed:
            self.changed.notify_all()
        with self.changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(10)

    def thread(self, target: Callable[[], None], name: str) -> None:
        """Run a function in a thread until this run ends."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self.changed:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
            thread.start()  # Start the thread under the lock, because `stop` joins all threads of the list.

    # Serving.

    def serve_registration(self) -> None:
        """Serve Registration on a new socket, which replaces the former socket."""
        old = self._registration_server
        self._registration_server = self._serve(
            lambda server: pb_grpc.add_RegistrationServicer_to_server(_Registration(self), server), self.kubelet.socket
        )
        if old is not None:
            old.stop(_GRACE)

    def _serve(self, add: Callable[[grpc.Server], None], public: Path) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(64, thread_name_prefix="kubelet-rpc"))
        add(server)
        private = self.kubelet.private_socket()
        server.add_insecure_port(unix_address(private))
        server.start()
        public.parent.mkdir(parents=True, exist_ok=True)
        public.unlink(missing_ok=True)
        os.link(private, public)
        self._servers.append(server)
        return server

    # Plugins.

    def register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        """Handle a Register call; return the plugin's options or raise PluginCallError."""
        if self.kubelet.register_delay:
            self.over.wait(self.kubelet.register_delay)
        if (refusal := self.kubelet.take_rejection()) is not None:
            raise PluginCallError(refusal)
        if request.version != "v1beta1":
            raise PluginCallError(f"API version {request.version!r} is not v1beta1")
        if not is_extended_resource_name(request.resource_name):
            raise PluginCallError(f"{request.resource_name!r} is not the name of an extended resource")
        resource = request.resource_name
        client = _Client(self, resource, self.kubelet.device_plugin_dir / request.endpoint.lstrip("/"))
        with self.changed:
            self._all_clients.append(client)
            before = self.clients.get(resource, ()) if self.kubelet.minor >= 37 else ()
            self.clients[resource] = [*before, client]
        try:
            options = client.connect(context)
        except PluginCallError:
            # The kubelet does not restore the resource's former client, so it never notices the end of that client's
            # stream. Since 1.37, only a former client of the same socket is not restored.
            with self.changed:
                self._deregister(client)
            raise
        with self.changed:
            self.streams[resource] += 1
        self.thread(lambda: self._watch(client), f"kubelet-watch-{resource}")
        return options

    def _watch(self, client: _Client) -> None:
        resource = client.resource
        client.watch()
        with self.changed:
            self.streams[resource] -= 1
            if self.over.is_set():
                return
            # Before 1.37, the kubelet disconnects the client that is registered now, instead of the client whose stream
            # has ended.
            current = next(iter(self._deregister(client)), None)
        if current is not None:
            current.disconnect()
            self.manager.disconnected(resource, str(current.path))
        self.kubelet.notify()

    def _deregister(self, client: _Client) -> list[_Client]:
        """Forget and return all clients of a client's resource; since 1.37, only the clients of its socket."""
        clients = self.clients.pop(client.resource, [])
        kept = [other for other in clients if other.path != client.path] if self.kubelet.minor >= 37 else []
        if kept:
            self.clients[client.resource] = kept
        return [other for other in clients if other not in kept]

    def drop_streams(self, resource: str | None) -> None:
        """End the kubelet's ListAndWatch streams of a resource, or (None) of all resources."""
        with self.changed:
            clients = [c for c in self._all_clients if resource is None or c.resource == resource]
        for client in clients:
            client.cancel()

    # Pods.

    def active_pods(self) -> list[FakePod]:
        """Return the pods that this run knows and that have not ended (Kubelet.GetActivePods, kubelet 1.36.3).

        After a start, the kubelet gets its pods one by one. Removed pods are left out, even if their processes run.
        """
        with self.changed:
            return [pod for pod in self.kubelet.assigned_pods() if pod.uid in self._known]

    def _assigned_pods(self) -> list[FakePod]:
        return sorted(self.kubelet.assigned_pods(), key=lambda pod: pod.created)

    def _new_static_pods(self) -> list[FakePod]:
        return [pod for pod in self._assigned_pods() if pod.static and pod.uid not in self._known]

    def _admit_all(self, restored: Sequence[FakePod]) -> None:
        if self.kubelet.sources_held:
            while not self.over.is_set() and self.kubelet.sources_held:
                with self.changed:
                    self.changed.wait_for(
                        lambda: not self.kubelet.sources_held or self.over.is_set() or self._new_static_pods()
                    )
                    static = self._new_static_pods()
                for pod in static:
                    self._admit(pod)
            restored = self._assigned_pods()
        for pod in restored:
            if pod.uid not in self._known:
                self._admit(pod)
        with self.changed:
            if self.over.is_set():
                return
            self.manager.sources_ready = True
            for pod in list(self.kubelet.pods.values()):
                if pod.deleting and pod.terminal:
                    self.kubelet.end_pod(pod, None)
            orphans = [pod for pod in self.kubelet.orphans.values() if pod.uid not in self._known]
            self.kubelet.schedule()
        for orphan in orphans:
            self.thread(partial(self._end_orphan, orphan), f"kubelet-orphan-{orphan.name}")
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue or self.over.is_set())
                if self.over.is_set():
                    return
                pod = self.queue.popleft()
            if pod.uid not in self._known:
                self._admit(pod)

    def _end_orphan(self, pod: FakePod) -> None:
        """Kill the containers of a removed pod that this run never knew (Kubelet.SyncTerminatingRuntimePod, 1.36.3).

        The kubelet gives the containers 1 s, whatever the pod's grace period, and does not unprepare the pod's claims.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.over.is_set() or pod.lingering != "hang")
            if not self.over.is_set():
                self.kubelet.end_pod(pod, None)

    def _admit(self, pod: FakePod) -> None:
        self.thawed.wait()
        with self.changed:
            if self.over.is_set():
                return
            self._known.add(pod.uid)
            if pod.terminal and not pod.deleting:
                return
        if pod.deleting:
            self.thread(lambda: self._keep(pod), f"kubelet-pod-{pod.name}")
            return
        try:
            self.manager.admit(pod.spec)
            self._check_fits(pod)
            if pod.phase == "Pending" and (reason := self.kubelet.take_pod_rejection()) is not None:
                raise AdmissionError("rejected by the test after its devices were allocated", reason)
        except AdmissionError as error:
            self._end(pod, ("Failed", error.reason, str(error)))
        except KubeletCrashError as error:
            self._crash(pod, error)
        else:
            self.thread(lambda: self._keep(pod), f"kubelet-pod-{pod.name}")

    def _check_fits(self, pod: FakePod) -> None:
        """Check that a pod fits in addition to pods with limits through DRA (removeMissingExtendedResources, 1.36.3).

        Limits whose devices come from DRA are ignored for the pod under admission, but not for the pods admitted before
        (lifecycle/predicate.go; kubernetes#124586). If no earlier pod has such limits, this check refuses no pod that
        the device manager has accepted. Raises AdmissionError.
        """
        with self.changed:
            others = [each for each in self.kubelet.pods.values() if each.uid in self._known and not each.terminal]
            number = self.kubelet.node_allocatable()
        served = frozenset[str]().union(*(spec.through_dra for other in others for spec in other.spec.containers))
        own = frozenset[str]().union(*(spec.through_dra for spec in pod.spec.containers))
        for resource in served & pod.requests.keys() - own:
            asked = pod.requests[resource]
            used = sum(other.requests.get(resource, 0) for other in others if other is not pod)
            capacity = max(number.get(resource, 0), len(self.manager.allocated(resource)))
            if asked + used > capacity:
                text = f"requested: {asked}, used: {used}, capacity: {capacity}"
                raise AdmissionError(f"Node didn't have enough resource: {resource}, {text}", f"OutOf{resource}")

    def _keep(self, pod: FakePod) -> None:
        """Start the containers of a pod, and start ended containers again, until the pod has ended.

        The order is that of kubelet 1.36.3. SyncPod creates the cgroup and the directory, prepares claims, and starts
        sandbox and containers. SyncTerminatingPod stops the containers, and unprepares claims. SyncTerminatedPod
        removes the cgroup.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.over.is_set() or self._ends(pod) or self._next(pod))
            self.thawed.wait()
            with self.changed:
                if self.over.is_set():
                    return
                container = None if self._ends(pod) else self._next(pod)
                if container is not None:
                    self.kubelet.make_pod_files(pod)
                elif self._ends(pod):
                    self.kubelet.end_containers(pod)
                else:
                    continue
            if container is None:
                self.kubelet.unprepare_pod(pod)
                self._end(pod, (pod.completing, "", "") if pod.completing else None)
                return
            try:
                if not pod.sandbox:
                    self.kubelet.prepare_pod(pod)
                    with self.changed:
                        if self.over.is_set():
                            return
                        self.kubelet.start_sandbox(pod)
                self._start(pod, container)
            except (PluginCallError, AdmissionError) as error:
                with self.changed:
                    if not self.over.is_set():
                        container.message = str(error)
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: self.over.is_set() or pod.deleting, self.kubelet.start_backoff)
            except KubeletCrashError as error:
                self._crash(pod, error)
                return

    @staticmethod
    def _ends(pod: FakePod) -> bool:
        return bool((pod.deleting or pod.completing) and not pod.lingering)

    def _next(self, pod: FakePod) -> FakeContainer | None:
        """Return the container of a pod that starts next; None if no container may start now."""
        if pod.deleting or not self.kubelet.network_ready:
            return None
        for container in pod.init_containers.values():
            if container.state == "waiting" or (container.stays and container.state != "running"):
                return None if container.held_down else container
            if container.state == "running" and not container.stays:
                return None
        for container in pod.containers.values():
            if container.state != "running" and not container.held_down:
                return container
        return None

    def _start(self, pod: FakePod, container: FakeContainer) -> None:
        options = self.manager.run_options(pod.spec, container.spec)
        options.cdi.update(dict.fromkeys(self.kubelet.cdi_devices(pod, container)))
        try:
            described([DeviceNode(host) for host, _ in options.nodes.values()])
        except CdiError as error:
            raise PluginCallError(str(error)) from error
        held = {
            resource: {device for ids in by_node.values() for device in ids}
            for resource, by_node in self.manager.container_devices(pod.uid, container.name).items()
        }
        with self.changed:
            if self.over.is_set():
                return
            container.started(options, held)
            self.kubelet.start_container(pod, container)
            if all(c.starts for c in pod.all_containers.values()):
                pod.phase = "Running"
            self.changed.notify_all()

    def _crash(self, pod: FakePod, error: KubeletCrashError) -> None:
        with self.changed:
            pod.crash = error
            self.kubelet.crashes.append(str(error))
        self._end(pod, ("Failed", "KubeletCrash", str(error)))

    def _end(self, pod: FakePod, status: tuple[str, str, str] | None) -> None:
        with self.changed:
            if not self.over.is_set():
                self.kubelet.end_pod(pod, status)


class _Client:
    """The kubelet's connection to one registration of a plugin."""

    def __init__(self, run: Run, resource: str, path: Path) -> None:
        self.resource = resource
        self._run = run
        self.path = path
        self._channel = grpc.insecure_channel(unix_address(path), options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.DevicePluginStub(self._channel)
        self._stream: Any = None
        self._dialled = False

    def connect(self, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        """Connect to the plugin, read its options, and become the endpoint of the resource.

        `dial_timeout` limits only the time to connect; the deadline of Register limits the call for the options, as in
        the kubelet.
        """
        woken = threading.Event()
        try:
            with self._run.kubelet.recorded("GetDevicePluginOptions", self.resource, pb.Empty()) as rpc:
                call: Any = self._stub.GetDevicePluginOptions.future(
                    pb.Empty(), timeout=context.time_remaining(), wait_for_ready=True
                )
                call.add_done_callback(lambda _: woken.set())
                if not context.add_callback(woken.set):  # The plugin's Register call has already ended.
                    woken.set()
                if not woken.wait(self._run.kubelet.dial_timeout) and _accepts(self.path):
                    woken.wait()
                if not call.done():
                    call.cancel()
                    raise PluginCallError(f"no plugin answers on {self.path}")
                rpc.response = options = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            self.close()
            raise PluginCallError(f"{self.resource} on {self.path}: {describe(error)}") from error
        except PluginCallError:
            self.close()
            raise
        assert isinstance(options, pb.DevicePluginOptions)
        self._dialled = True
        self._run.manager.connected(PluginEndpoint(self.resource, self.call, options, str(self.path)))
        return options

    def call(self, method: Method | str, request: Any, timeout: float | None = None) -> Any:
        """Call a method of the plugin and record the call in `rpc_log`."""
        self._run.thawed.wait()
        try:
            with self._run.kubelet.recorded(method, self.resource, request) as rpc:
                rpc.response = getattr(self._stub, method)(request, timeout=timeout)
                return rpc.response
        except (grpc.RpcError, ValueError) as error:
            raise PluginCallError(f"{method} of {self.resource}: {describe(error)}") from error

    def watch(self) -> None:
        """Read device lists from the plugin until the ListAndWatch stream ends."""
        with contextlib.suppress(grpc.RpcError, ValueError):
            request = pb.Empty()
            with self._run.kubelet.recorded("ListAndWatch", self.resource, request):
                self._stream = self._stub.ListAndWatch(request)
                for response in self._stream:
                    self._run.thawed.wait()
                    if self._run.over.is_set():
                        return
                    at = time.monotonic()
                    self._run.manager.update(self.resource, response.devices)
                    healthy = sum(device.health == "Healthy" for device in response.devices)
                    self._run.kubelet.record_update(
                        self.resource, Update(at, len(response.devices), healthy, response.ByteSize())
                    )

    def cancel(self) -> None:
        """End the stream, as the kubelet does; the plugin's connection stays open."""
        if self._stream is not None:
            self._stream.cancel()

    def disconnect(self) -> None:
        """Close the connection. A connection that is still being established stays open, but is not used any more."""
        if self._dialled:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class _Registration(pb_grpc.RegistrationServicer):
    def __init__(self, run: Run) -> None:
        self._run = run

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:  # noqa: N802
        at = time.monotonic()
        self._run.thawed.wait()
        options, error = None, ""
        try:
            options = self._run.register(request, context)
        except PluginCallError as failure:
            error = str(failure)
        if not self._run.over.is_set():
            self._run.kubelet.record_registration(
                Registration(at, time.monotonic(), request.resource_name, request.endpoint, options, request, error)
            )
        if error:
            context.abort(grpc.StatusCode.UNKNOWN, error)
        return pb.Empty()


class _PodResources(pr_grpc.PodResourcesListerServicer):
    def __init__(self, run: Run) -> None:
        self._run = run
        self._kubelet = run.kubelet
        self._tokens = float(run.kubelet.pod_resources_burst)
        self._refilled = time.monotonic()
        self._refused = 0.0
        self._lock = threading.Lock()

    def List(  # noqa: N802
        self, request: pr.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.ListPodResourcesResponse:
        with self._served("List", request, context) as rpc, self._run.changed:
            pods = self._run.active_pods()
            self._run.manager.update_allocated()
            rpc.response = response = pr.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in pods])
            return response

    def Get(  # noqa: N802
        self, request: pr.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.GetPodResourcesResponse:
        with self._served("Get", request, context) as rpc, self._run.changed:
            pod = self._kubelet.pods.get(f"{request.pod_namespace}/{request.pod_name}")
            if pod is None or pod not in self._run.active_pods():
                context.abort(grpc.StatusCode.UNKNOWN, f"no pod {request.pod_namespace}/{request.pod_name} here")
            rpc.response = response = pr.GetPodResourcesResponse(pod_resources=self._pod(pod))
            return response

    def GetAllocatableResources(  # noqa: N802
        self, request: pr.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> pr.AllocatableResourcesResponse:
        with self._served("GetAllocatableResources", request, context) as rpc:
            devices = self._run.manager.allocatable_devices()
            rpc.response = response = pr.AllocatableResourcesResponse(
                devices=[
                    entry
                    for resource, listed in devices.items()
                    for device in listed.values()
                    for entry in _container_devices(
                        resource,
                        device.ID,
                        [node.ID for node in device.topology.nodes] if device.HasField("topology") else None,
                    )
                ]
            )
            return response

    @contextlib.contextmanager
    def _served(self, method: str, request: object, context: grpc.ServicerContext) -> Iterator[Rpc]:
        self._run.thawed.wait()
        if not self._allowed():
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        with self._kubelet.recorded(method, "", request) as rpc:
            yield rpc

    def _allowed(self) -> bool:
        with self._lock:
            now = time.monotonic()
            gained = (now - self._refilled) * self._kubelet.pod_resources_qps
            self._refilled = now
            self._tokens = min(self._tokens + gained, float(self._kubelet.pod_resources_burst))
            self._refused += self._kubelet.pod_resources_refused
            if self._refused >= 1:
                self._refused -= 1
                return False
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def _pod(self, pod: FakePod) -> pr.PodResources:
        return pr.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[self._container(pod, c) for c in pod.all_containers.values() if c.stays],
        )

    def _container(self, pod: FakePod, container: FakeContainer) -> pr.ContainerResources:
        entries = []
        for resource, by_node in self._run.manager.container_devices(pod.uid, container.name).items():
            nodes: dict[str, list[int] | None] = {}
            for node, ids in by_node.items():
                for device in ids:
                    nodes[device] = None if node == -1 else [node, *(nodes.get(device) or ())]
            for device, near in nodes.items():
                entries += _container_devices(resource, device, near)
        return pr.ContainerResources(
            name=container.name,
            devices=entries,
            dynamic_resources=self._kubelet.dynamic_resources(pod, container),
        )


def _container_devices(resource: str, device: str, nodes: Sequence[int] | None) -> list[pr.ContainerDevices]:
    """Return a device's PodResources entries as the kubelet does: one for each NUMA node of its topology.

    nodes: None stands for no topology, which gives one entry. A topology without nodes gives no entry.
    """
    if nodes is None:
        return [pr.ContainerDevices(resource_name=resource, device_ids=[device])]
    return [
        pr.ContainerDevices(
            resource_name=resource,
            device_ids=[device],
            topology=pr.TopologyInfo(nodes=[pr.NUMANode(ID=node)]),
        )
        for node in nodes
    ]


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
