"""A kubelet for tests: sockets, faults, pods and a tiny scheduler around the device manager.

It serves `device-plugins/kubelet.sock` (v1beta1.Registration) and `pod-resources/kubelet.sock`
(v1.PodResourcesLister) under its root, calls plugins as the device manager of kubelet 1.36.3
does, and starts pods that are values. Everything is synchronous and thread-safe; own threads do
the work, so a plugin may live in this process (in another thread) or in another one.

What it leaves out: the delay of up to 10 s between a change and the node's status, the node
predicates after Allocate (see `reject_next_pod`), and CPU and memory.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import grpc

from deviceplugin.testing.devicemanager import (
    AdmissionError,
    DeviceManager,
    DeviceState,
    Endpoint,
    KubeletCrashError,
    Method,
    PluginCallError,
)
from deviceplugin.testing.numa import Policy
from deviceplugin.testing.pods import Containers, FakeContainer, FakePod, container_specs
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from deviceplugin.wire import podresources_pb2 as pr
from deviceplugin.wire import podresources_pb2_grpc as pr_grpc

__all__ = ["FakeKubelet", "Registration", "Rpc", "Update", "is_extended_resource_name"]

RECEIVE_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of one ListAndWatch message that the kubelet takes; grpc-go's default."""

_CHANNEL_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", RECEIVE_LIMIT),
    ("grpc.max_send_message_length", -1),
    # A connection of its own for every registration, as in the kubelet.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_SUN_PATH: Final = 107
_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class Registration:
    """One call of Register, times by the monotonic clock.

    options: what the plugin answered to GetDevicePluginOptions, which is what counts; the
    options in the request are only kept in `request`. error: why it was refused, if it was.
    """

    at: float
    answered: float
    resource: str
    endpoint: str
    options: pb.DevicePluginOptions | None
    request: pb.RegisterRequest
    error: str = ""


class Update(NamedTuple):
    """One ListAndWatch message: when it came, how many devices it had, how many of them healthy, bytes."""

    at: float
    total: int
    healthy: int
    size: int


@dataclass(slots=True)
class Rpc:
    """One call, by the kubelet or to it; `done` is None while it is under way. Times are monotonic."""

    at: float
    method: str
    resource: str
    request: Any
    response: Any = None
    error: str = ""
    done: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took; infinite while it is under way."""
        return float("inf") if self.done is None else self.done - self.at


def is_extended_resource_name(name: str) -> bool:
    """Whether the kubelet lets a plugin register under this name."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix, _, rest = f"requests.{name}".partition("/")
    return (
        len(prefix) <= 253
        and len(rest) <= 63
        and _SUBDOMAIN.fullmatch(prefix) is not None
        and _NAME.fullmatch(rest) is not None
    )


class FakeKubelet:
    """A node: its kubelet, which comes and goes, and its pods, which stay.

    A context manager; entering starts the kubelet, leaving stops it.

    root: stands for /var/lib/kubelet; None makes a directory that goes with the object.
    topology_policy: the topology manager's, with container scope, over `numa_nodes`.
    check_nodes: a container starts only if its device nodes exist on this machine.
    stop_grace: seconds after which a resource whose plugin went away is forgotten.
    dial_timeout: seconds that Register tries to reach the plugin.
    start_backoff: seconds between attempts to start a container (a kubelet: 10 s and more).
    seed: the kubelet walks sets of devices in random order; the same seed gives the same order.
    pod_resources_qps, pod_resources_burst: the rate limit of PodResources.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        numa_nodes: Sequence[int] = (0, 1),
        topology_policy: Policy = "none",
        check_nodes: bool = False,
        stop_grace: float = 300.0,
        dial_timeout: float = 10.0,
        start_backoff: float = 0.1,
        seed: int = 0,
        pod_resources_qps: float = 100.0,
        pod_resources_burst: int = 10,
    ) -> None:
        self._own_root = root is None
        self.root = Path(root).resolve() if root is not None else Path(tempfile.mkdtemp(prefix="dp-", dir=_short_tmp()))
        self.numa_nodes = tuple(numa_nodes)
        self.topology_policy: Policy = topology_policy
        self.check_nodes = check_nodes
        self.stop_grace = stop_grace
        self.dial_timeout = dial_timeout
        self.start_backoff = start_backoff
        self.seed = seed
        self.pod_resources_qps = pod_resources_qps
        self.pod_resources_burst = pod_resources_burst
        self.register_delay = 0.0
        """Seconds that Register waits before it does anything."""
        self.changed = threading.Condition()
        """Notified whenever anything changes that can be observed here."""
        self.pods: dict[str, FakePod] = {}
        """All pods that were not deleted, by namespace/name."""
        self.registrations: list[Registration] = []
        """The calls of Register that succeeded."""
        self.rejections: list[Registration] = []
        """The calls of Register that did not."""
        self.rpc_log: list[Rpc] = []
        """Every call to a plugin or to PodResources, in the order of their beginnings."""
        self.crashes: list[str] = []
        """Where a real kubelet would have crashed. A test that expects one clears it."""
        self._updates: dict[str, list[Update]] = {}
        self._rejecting: list[str] = []
        self._rejecting_pods: list[str] = []
        self._run: _Run | None = None
        self._sockets = itertools.count()
        longest = max(map(len, map(str, (self.socket, self.pod_resources_socket))))
        if longest > _SUN_PATH:
            raise ValueError(f"a unix socket's path has at most {_SUN_PATH} characters: {self.root} is too long")

    # Where things are.

    @property
    def device_plugin_dir(self) -> Path:
        """Where plugins put their sockets."""
        return self.root / "device-plugins"

    @property
    def socket(self) -> Path:
        """Where plugins register."""
        return self.device_plugin_dir / "kubelet.sock"

    @property
    def pod_resources_socket(self) -> Path:
        """Where PodResources is served."""
        return self.root / "pod-resources" / "kubelet.sock"

    # Its life.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_up(self) -> bool:
        """Whether the kubelet runs."""
        return self._run is not None

    def start(self, *, wipe: bool = True) -> None:
        """Start the kubelet: delete sockets, read the checkpoint, admit again the pods that are there."""
        with self.changed:
            if self._run is not None:
                raise RuntimeError("the kubelet runs already")
            for pod in list(self.pods.values()):
                if pod.deleting:
                    self._end(pod, None)
            self._run = run = _Run(self)
        run.start(wipe=wipe)

    def stop(self) -> None:
        """Let the kubelet die: connections break, its sockets stay behind dead, containers run on."""
        with self.changed:
            run, self._run = self._run, None
            self.changed.notify_all()
        if run is not None:
            run.stop()

    def restart(self, *, wipe: bool = True, downtime: float = 0.0) -> None:
        """Stop the kubelet and start it again.

        wipe: delete every socket in the device plugin directory, as a kubelet does at its start;
        otherwise only kubelet.sock is a new one.
        """
        self.stop()
        if downtime:
            time.sleep(downtime)
        self.start(wipe=wipe)

    def recreate_socket(self) -> None:
        """Serve on a new kubelet.sock in the same kubelet, as newer kubelets do after a failure of their server.

        Streams and other sockets are left alone.
        """
        self._up().serve_registration()

    def close(self) -> None:
        """Stop the kubelet and remove the directory, if it is its own."""
        self.stop()
        if self._own_root:
            shutil.rmtree(self.root, ignore_errors=True)

    # Faults.

    def drop_streams(self, resource: str | None = None) -> None:
        """End ListAndWatch streams from this side while everybody lives (kubernetes#125501)."""
        self._up().drop_streams(resource)

    def freeze(self) -> None:
        """Accept connections but answer nothing and take nothing from streams, until `thaw`."""
        self._up().thawed.clear()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._up().thawed.set()

    def reject_registrations(self, count: int = 1, message: str = "registration refused by the test") -> None:
        """Refuse the next calls of Register."""
        with self.changed:
            self._rejecting += [message] * count

    def reject_next_pod(self, reason: str = "OutOfcpu") -> None:
        """Reject the next pod after its devices were allocated, as the node predicates may."""
        with self.changed:
            self._rejecting_pods.append(reason)

    # Pods.

    def start_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Containers | None = None,
        init_containers: Containers | None = None,
        namespace: str = "default",
    ) -> FakePod:
        """Make a pod; it stays Pending until what is allocatable and not yet requested suffices for it.

        limits: those of a single container, `main`; or say `containers`.
        """
        return self._make_pod(name, limits, containers, init_containers, namespace, bind=False)

    def run_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Containers | None = None,
        init_containers: Containers | None = None,
        namespace: str = "default",
        timeout: float = 10.0,
    ) -> FakePod:
        """Make a pod past the scheduler and wait until it runs, or has failed (look at its phase).

        Raises:
            KubeletCrashError: its admission would have ended a real kubelet.
            TimeoutError: neither happens in time.

        """
        pod = self._make_pod(name, limits, containers, init_containers, namespace, bind=True)
        self.wait_until(lambda: pod.running or pod.terminal, timeout, lambda: f"{pod!r} to run or fail")
        pod.raise_crash()
        return pod

    def device_health(self, pod: FakePod, container: str | None = None) -> dict[str, dict[str, str]]:
        """Return allocatedResourcesStatus of a container: health by device id, by resource."""
        return self._up().manager.health_of(pod.uid, pod.container(container).name)

    def prepare_pod(self, pod: FakePod) -> None:
        """Do what comes before a pod's first container; here nothing. Raise PluginCallError to be called again."""

    def unprepare_pod(self, pod: FakePod) -> None:
        """Do what comes after a pod's last container; here nothing."""

    def cdi_devices(self, pod: FakePod, container: FakeContainer) -> Sequence[str]:
        """Return CDI devices that a container gets from elsewhere than device plugins; here none."""
        return ()

    def dynamic_resources(self, pod: FakePod, container: FakeContainer) -> Sequence[pr.DynamicResource]:
        """Return what PodResources says of a container's claims; here nothing."""
        return ()

    # What can be seen.

    def allocatable(self, resource: str) -> int:
        """Return how many devices of a resource are healthy; 0 while the kubelet is down."""
        return self._capacity()[1].get(resource, 0)

    def capacity(self, resource: str) -> int:
        """Return how many devices of a resource there are."""
        return self._capacity()[0].get(resource, 0)

    def resources(self) -> set[str]:
        """Return the resources that the kubelet reports, be it with 0 devices."""
        return set(self._capacity()[0])

    def devices(self, resource: str) -> dict[str, DeviceState]:
        """Return the devices of a resource by id."""
        with self.changed:
            return {} if self._run is None else self._run.manager.devices(resource)

    def allocated(self, resource: str) -> set[str]:
        """Return the ids that the kubelet holds for taken."""
        return self._up().manager.allocated(resource)

    def updates(self, resource: str) -> list[Update]:
        """Return the ListAndWatch messages of a resource so far, over all kubelet restarts."""
        with self.changed:
            return list(self._updates.get(resource, ()))

    def streams(self, resource: str) -> int:
        """Return how many ListAndWatch streams of a resource are open."""
        with self.changed:
            return 0 if self._run is None else self._run.streams[resource]

    def rpcs(self, method: str, resource: str | None = None) -> list[Rpc]:
        """Return the finished calls of a method."""
        with self.changed:
            return [
                r
                for r in self.rpc_log
                if r.method == method and r.done is not None and (resource is None or r.resource == resource)
            ]

    def wait_until(
        self, predicate: Callable[[], bool], timeout: float = 10.0, what: str | Callable[[], str] = "a condition"
    ) -> None:
        """Wait until something is true of this node.

        Raises:
            TimeoutError: it does not become true in time.

        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while not predicate():
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(
                        f"waited {timeout} s for {what if isinstance(what, str) else what()}; {self._state()}"
                    )
                expiry = self._run.manager.next_expiry() if self._run else None
                until = deadline if expiry is None or expiry <= now else min(deadline, expiry)
                self.changed.wait(max(until - now, 0.001))

    def notify(self) -> None:
        """Let everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def wait_registered(self, resource: str, count: int = 1, timeout: float = 10.0) -> Registration:
        """Wait until a resource was registered this many times; return the latest registration."""

        def those() -> list[Registration]:
            return [r for r in self.registrations if r.resource == resource]

        self.wait_until(lambda: len(those()) >= count, timeout, f"{count} registrations of {resource}")
        return those()[-1]

    def wait_devices(
        self,
        resource: str,
        want: int | Callable[[Mapping[str, DeviceState]], bool],
        timeout: float = 10.0,
    ) -> dict[str, DeviceState]:
        """Wait until so many devices are healthy, or a predicate over the devices is true; return the devices."""

        def enough() -> bool:
            devices = self.devices(resource)
            return want(devices) if callable(want) else sum(d.health == "Healthy" for d in devices.values()) == want

        self.wait_until(enough, timeout, f"{want} devices of {resource}")
        return self.devices(resource)

    def wait_allocatable(self, resource: str, count: int, timeout: float = 10.0) -> None:
        """Wait until so many devices are allocatable."""
        self.wait_until(lambda: self.allocatable(resource) == count, timeout, f"{count} allocatable {resource}")

    def wait_rpc(self, method: str, resource: str | None = None, count: int = 1, timeout: float = 10.0) -> Rpc:
        """Wait until a method was called and answered this many times; return the latest call."""
        self.wait_until(lambda: len(self.rpcs(method, resource)) >= count, timeout, f"{count} calls of {method}")
        return self.rpcs(method, resource)[-1]

    # Inside.

    def _up(self) -> _Run:
        run = self._run
        if run is None:
            raise RuntimeError("the kubelet is down")
        return run

    def _state(self) -> str:
        pods = list(self.pods.values())
        refused = [f"{r.resource}: {r.error}" for r in self.rejections[-3:]]
        registered = [r.resource for r in self.registrations[-5:]]
        return (
            f"up: {self.is_up}, capacity and allocatable: {self._capacity()}, last registrations: {registered}, "
            f"last refusals: {refused}, pods: {pods}, crashes: {self.crashes}"
        )

    def _capacity(self) -> tuple[dict[str, int], dict[str, int]]:
        with self.changed:
            return ({}, {}) if self._run is None else self._run.manager.capacity()

    def _make_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None,
        containers: Containers | None,
        init_containers: Containers | None,
        namespace: str,
        *,
        bind: bool,
    ) -> FakePod:
        if limits is not None and containers is not None:
            raise ValueError("give limits or containers, not both")
        specs = container_specs(containers if containers is not None else {"main": limits or {}})
        with self.changed:
            key = f"{namespace}/{name}"
            if key in self.pods:
                raise ValueError(f"there is a pod {key} already")
            pod = FakePod(str(uuid.uuid4()), name, namespace, specs, container_specs(init_containers), self)
            self.pods[key] = pod
            if bind:
                self._bind(pod)
            else:
                self.schedule()
        return pod

    def _bind(self, pod: FakePod) -> None:
        pod.bound = True
        if self._run is not None:
            self._run.queue.append(pod)
        self.changed.notify_all()

    def schedule(self) -> None:
        """Give pods to the kubelet that fit now; called whenever that may have changed."""
        with self.changed:
            run = self._run
            if run is None or not run.manager.sources_ready:
                return
            waiting = [p for p in self.pods.values() if not p.bound and not p.deleting]
            if not waiting:
                return
            _, free = run.manager.capacity()
            for pod in self.pods.values():
                if pod.bound and not pod.terminal:
                    for resource, number in pod.requests.items():
                        free[resource] = free.get(resource, 0) - number
            for pod in waiting:
                if all(free.get(resource, 0) >= number for resource, number in pod.requests.items()):
                    for resource, number in pod.requests.items():
                        free[resource] = free.get(resource, 0) - number
                    self._bind(pod)

    def active_pods(self) -> list[FakePod]:
        """Return the pods on this node that are not over."""
        with self.changed:
            return [pod for pod in self.pods.values() if pod.bound and not pod.terminal]

    def drop(self, pod: FakePod) -> None:
        """Forget a pod that is to be deleted, if nothing of it runs; called by `FakePod.delete`."""
        with self.changed:
            if not pod.bound or pod.terminal:
                self._end(pod, None)

    def _end(self, pod: FakePod, status: tuple[str, str, str] | None) -> None:
        with self.changed:
            for container in pod.all_containers.values():
                container.state = "terminated"
            if status is not None:
                pod.phase, pod.reason, pod.message = status  # type: ignore[assignment]
            if pod.deleting:
                pod.deleted = True
                self.pods.pop(f"{pod.namespace}/{pod.name}", None)
            self.changed.notify_all()
            self.schedule()

    def record_update(self, resource: str, update: Update) -> None:
        """Take note of a ListAndWatch message."""
        with self.changed:
            self._updates.setdefault(resource, []).append(update)
            self.changed.notify_all()
            self.schedule()

    def record_registration(self, registration: Registration) -> None:
        """Take note of a call of Register."""
        with self.changed:
            (self.rejections if registration.error else self.registrations).append(registration)
            self.changed.notify_all()

    @contextlib.contextmanager
    def recorded(self, method: str, resource: str, request: object) -> Iterator[Rpc]:
        """Log a call while it lasts; give the entry to put the response into."""
        rpc = Rpc(time.monotonic(), method, resource, request)
        with self.changed:
            self.rpc_log.append(rpc)
            self.changed.notify_all()
        try:
            yield rpc
        except Exception as error:
            rpc.error = _describe(error)
            raise
        finally:
            with self.changed:
                rpc.done = time.monotonic()
                self.changed.notify_all()

    def take_rejection(self) -> str | None:
        """Return why the next call of Register is to be refused, if it is."""
        with self.changed:
            return self._rejecting.pop(0) if self._rejecting else None

    def take_pod_rejection(self) -> str | None:
        """Return the reason to reject the next pod for, if it is to be."""
        with self.changed:
            return self._rejecting_pods.pop(0) if self._rejecting_pods else None

    def private_socket(self) -> Path:
        """Return a path to bind; it is linked to its public name, so that gRPC never unlinks that one."""
        directory = self.root / ".fake"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{next(self._sockets)}"


class _Run:
    """One run of the kubelet, from its start to its end; what happens after its end touches nothing."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self.kubelet = kubelet
        self.changed = kubelet.changed
        self.over = threading.Event()
        self.thawed = threading.Event()
        self.thawed.set()
        self.queue: collections.deque[FakePod] = collections.deque()
        self.streams: collections.Counter[str] = collections.Counter()
        self.clients: dict[str, _Client] = {}
        self._all_clients: list[_Client] = []
        self._threads: list[threading.Thread] = []
        self._servers: list[grpc.Server] = []
        self._registration_server: grpc.Server | None = None
        kubelet.device_plugin_dir.mkdir(parents=True, exist_ok=True)
        self.manager = DeviceManager(
            kubelet.device_plugin_dir,
            self.changed,
            lambda: {pod.uid for pod in kubelet.active_pods()},
            numa_nodes=kubelet.numa_nodes,
            policy=kubelet.topology_policy,
            stop_grace=kubelet.stop_grace,
            seed=kubelet.seed,
        )

    def start(self, *, wipe: bool) -> None:
        with contextlib.suppress(ValueError):  # a damaged checkpoint is left out, as in the kubelet
            self.manager.read_checkpoint()
        pods = sorted(self.kubelet.active_pods(), key=lambda pod: pod.created)
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
        self.over.set()
        self.thawed.set()
        stopping = [server.stop(None) for server in self._servers]
        for client in list(self._all_clients):
            client.close()
        for stopped in stopping:
            stopped.wait(10)
        with self.changed:
            self.changed.notify_all()
        for thread in list(self._threads):
            thread.join(10)

    def thread(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self.changed:
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    # Serving.

    def serve_registration(self) -> None:
        old = self._registration_server
        self._registration_server = self._serve(
            lambda server: pb_grpc.add_RegistrationServicer_to_server(_Registration(self), server), self.kubelet.socket
        )
        if old is not None:
            old.stop(None)

    def _serve(self, add: Callable[[grpc.Server], None], public: Path) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(64, thread_name_prefix="kubelet-rpc"))
        add(server)
        private = self.kubelet.private_socket()
        server.add_insecure_port(f"unix:{private}")
        server.start()
        public.parent.mkdir(parents=True, exist_ok=True)
        public.unlink(missing_ok=True)
        os.link(private, public)
        self._servers.append(server)
        return server

    # Plugins.

    def register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        """Do what Register does; return the plugin's options or raise PluginCallError."""
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
            self.clients[resource] = client
        try:
            options = client.connect(context)
        except PluginCallError:
            # Whoever was connected before is not put back: its end will go unnoticed.
            with self.changed:
                self.clients.pop(resource, None)
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
            # Whoever is registered now is disconnected, not the one whose stream has ended.
            current = self.clients.pop(resource, None)
        if current is not None:
            current.disconnect()
            self.manager.disconnected(resource)
        self.kubelet.notify()

    def drop_streams(self, resource: str | None) -> None:
        with self.changed:
            clients = [c for c in self._all_clients if resource is None or c.resource == resource]
        for client in clients:
            client.cancel()

    # Pods.

    def _admit_all(self, restored: Sequence[FakePod]) -> None:
        for pod in restored:
            self._admit(pod)
        with self.changed:
            self.manager.sources_ready = True
            self.kubelet.schedule()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue or self.over.is_set())
                if self.over.is_set():
                    return
                pod = self.queue.popleft()
            if pod not in restored:
                self._admit(pod)

    def _admit(self, pod: FakePod) -> None:
        self.thawed.wait()
        if self.over.is_set() or pod.terminal:
            return
        if pod.deleting:
            self._end(pod, None)
            return
        try:
            self.manager.admit(pod.spec)
            if pod.phase == "Pending" and (reason := self.kubelet.take_pod_rejection()) is not None:
                raise AdmissionError("rejected by the test after its devices were allocated", reason)
        except AdmissionError as error:
            self._end(pod, ("Failed", error.reason, str(error)))
        except KubeletCrashError as error:
            self._crash(pod, error)
        else:
            self.thread(lambda: self._keep(pod), f"kubelet-pod-{pod.name}")

    def _keep(self, pod: FakePod) -> None:
        """Start the containers of a pod, again where they ended, until the pod is over."""
        prepared = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.over.is_set() or pod.deleting or pod.completing or self._next(pod))
                if self.over.is_set():
                    return
                container = None if pod.deleting or pod.completing else self._next(pod)
            self.thawed.wait()
            if container is None:
                self.kubelet.unprepare_pod(pod)
                self._end(pod, (pod.completing, "", "") if pod.completing else None)
                return
            try:
                if not prepared:
                    self.kubelet.prepare_pod(pod)
                    prepared = True
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
    def _next(pod: FakePod) -> FakeContainer | None:
        for container in pod.init_containers.values():
            if container.state == "waiting" or (container.stays and container.state != "running"):
                return None if container.held_down else container
        for container in pod.containers.values():
            if container.state != "running" and not container.held_down:
                return container
        return None

    def _start(self, pod: FakePod, container: FakeContainer) -> None:
        options = self.manager.run_options(pod.spec, container.spec)
        options.cdi.update(dict.fromkeys(self.kubelet.cdi_devices(pod, container)))
        if self.kubelet.check_nodes:
            for host, _ in options.nodes.values():
                if not Path(host).exists():
                    raise PluginCallError(f"the device node {host} does not exist")
        held = {
            resource: {device for ids in by_node.values() for device in ids}
            for resource, by_node in self.manager.container_devices(pod.uid, container.name).items()
        }
        with self.changed:
            if self.over.is_set():
                return
            container.started(options, held)
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
                self.kubelet._end(pod, status)  # noqa: SLF001  # two halves of one thing


class _Client:
    """The kubelet's connection to one registration of a plugin."""

    def __init__(self, run: _Run, resource: str, path: Path) -> None:
        self.resource = resource
        self._run = run
        self._path = path
        self._channel = grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.DevicePluginStub(self._channel)
        self._stream: Any = None
        self._dialled = False

    def connect(self, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        """Dial, ask for the options and become the endpoint of the resource.

        The dial has its own deadline; the options have only the caller's, as in the kubelet.
        """
        woken = threading.Event()
        try:
            with self._run.kubelet.recorded("GetDevicePluginOptions", self.resource, pb.Empty()) as rpc:
                call: Any = self._stub.GetDevicePluginOptions.future(
                    pb.Empty(), timeout=context.time_remaining(), wait_for_ready=True
                )
                call.add_done_callback(lambda _: woken.set())
                if not context.add_callback(woken.set):  # the caller has gone already
                    woken.set()
                if not woken.wait(self._run.kubelet.dial_timeout) and _accepts(self._path):
                    woken.wait()
                if not call.done():
                    call.cancel()
                    raise PluginCallError(f"no plugin answers on {self._path}")
                rpc.response = options = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            self.close()
            raise PluginCallError(f"{self.resource} on {self._path}: {_describe(error)}") from error
        except PluginCallError:
            self.close()
            raise
        assert isinstance(options, pb.DevicePluginOptions)
        self._dialled = True
        self._run.manager.connected(Endpoint(self.resource, self.call, options))
        return options

    def call(self, method: Method | str, request: Any, timeout: float | None = None) -> Any:
        """Call the plugin and log it."""
        self._run.thawed.wait()
        try:
            with self._run.kubelet.recorded(method, self.resource, request) as rpc:
                rpc.response = getattr(self._stub, method)(request, timeout=timeout)
                return rpc.response
        except (grpc.RpcError, ValueError) as error:
            raise PluginCallError(f"{method} of {self.resource}: {_describe(error)}") from error

    def watch(self) -> None:
        """Take lists from the plugin until its stream ends."""
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
        """End the stream from this side."""
        if self._stream is not None:
            self._stream.cancel()

    def disconnect(self) -> None:
        """Close the connection, unless it is only being made: then it comes up and nobody knows of it."""
        if self._dialled:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class _Registration(pb_grpc.RegistrationServicer):
    def __init__(self, run: _Run) -> None:
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
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._kubelet = run.kubelet
        self._tokens = float(run.kubelet.pod_resources_burst)
        self._refilled = time.monotonic()
        self._lock = threading.Lock()

    def List(  # noqa: N802
        self, request: pr.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.ListPodResourcesResponse:
        with self._served("List", request, context) as rpc, self._run.changed:
            pods = self._kubelet.active_pods()
            self._run.manager.update_allocated()
            rpc.response = response = pr.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in pods])
            return response

    def Get(  # noqa: N802
        self, request: pr.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.GetPodResourcesResponse:
        with self._served("Get", request, context) as rpc, self._run.changed:
            pod = self._kubelet.pods.get(f"{request.pod_namespace}/{request.pod_name}")
            if pod is None or not pod.bound:
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
                    for resource, known in devices.items()
                    for device in known.values()
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
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "more calls than the rate limit allows")
        with self._kubelet.recorded(method, "", request) as rpc:
            yield rpc

    def _allowed(self) -> bool:
        with self._lock:
            now = time.monotonic()
            gained = (now - self._refilled) * self._kubelet.pod_resources_qps
            self._refilled = now
            self._tokens = min(self._tokens + gained, float(self._kubelet.pod_resources_burst))
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
    """One entry a NUMA node, one entry without a topology; none for a topology without nodes (as in the kubelet)."""
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


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _short_tmp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 30 else "/tmp"  # noqa: S108  # a long TMPDIR leaves no room for a socket's path
