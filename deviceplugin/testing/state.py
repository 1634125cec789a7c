"""The state of the fake node, which the runs of the fake kubelet read and change."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc

from deviceplugin.testing.cgroups import CgroupLayout, CgroupTree
from deviceplugin.testing.checkpoint import FILE_NAME as CHECKPOINT
from deviceplugin.testing.numa import TopologyPolicy
from deviceplugin.testing.pods import FakeContainer, FakePod
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import podresources_pb2 as pr

if TYPE_CHECKING:
    from deviceplugin.kubelet.status import ResourceStatus

_SUN_PATH: Final = 107


@dataclass(frozen=True, slots=True)
class Registration:
    """One call of Register. at, answered: when the call began and ended, by the monotonic clock.

    options: the plugin's response to GetDevicePluginOptions. The kubelet ignores the options in `request`. error: why
    the kubelet refused the call; "" if the call succeeded.
    """

    at: float
    answered: float
    resource: str
    endpoint: str
    options: pb.DevicePluginOptions | None
    request: pb.RegisterRequest
    error: str = ""


class Update(NamedTuple):
    """One ListAndWatch message. at: monotonic time. total, healthy: numbers of all and healthy devices. size: bytes."""

    at: float
    total: int
    healthy: int
    size: int


@dataclass(slots=True)
class Rpc:
    """One gRPC call by or to the kubelet. at, done: monotonic times of the call's begin and end (None until then)."""

    at: float
    method: str
    resource: str
    request: Any
    response: Any = None
    error: str = ""
    done: float | None = None

    @property
    def seconds(self) -> float:
        """The duration of the call; infinite until it ends."""
        return float("inf") if self.done is None else self.done - self.at


def describe(error: Exception) -> str:
    """Return an error's text; for a gRPC error, the status code and the details."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


class NodeState:
    """A node without its kubelet: its files, its pods and their processes, and the recorded calls."""

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        numa_nodes: Sequence[int] = (0, 1),
        topology_policy: TopologyPolicy = "none",
        stop_grace: float = 300.0,
        dial_timeout: float = 10.0,
        start_backoff: float = 0.1,
        seed: int = 0,
        pod_resources_qps: float = 100.0,
        pod_resources_burst: int = 10,
        cgroup_root: Path | None = None,
        cgroup_layout: CgroupLayout = "v2",
        minor: int = 36,
    ) -> None:
        self._own_root = root is None
        self.root = Path(root).resolve() if root is not None else Path(tempfile.mkdtemp(prefix="dp-", dir=_short_tmp()))
        self.numa_nodes = tuple(numa_nodes)
        self.topology_policy: TopologyPolicy = topology_policy
        self.stop_grace = stop_grace
        self.dial_timeout = dial_timeout
        self.start_backoff = start_backoff
        self.seed = seed
        self.minor = minor
        self.pod_resources_qps = pod_resources_qps
        self.pod_resources_burst = pod_resources_burst
        self.cgroups = CgroupTree(cgroup_root or self.root / "cgroup", cgroup_layout)
        self.register_delay = 0.0
        """Seconds by which the kubelet delays its response to each Register call, before it connects to the plugin."""
        self.pod_resources_refused = 0.0
        """The fraction of PodResources calls that is refused with RESOURCE_EXHAUSTED.

        In a real kubelet, one rate limit is common to all clients (LimiterUnaryServerInterceptor, kubelet 1.36.3).
        """
        self.changed = threading.Condition()
        """A condition that is notified at each change of the fake node that a test can observe."""
        self.pods: dict[str, FakePod] = {}
        """All pods that are not deleted, by namespace/name."""
        self.orphans: dict[str, FakePod] = {}
        """Removed pods by uid, as long as the node has processes or files of these pods."""
        self.sources_held = False
        self.network_ready = True
        self.registrations: list[Registration] = []
        """The calls of Register that succeeded."""
        self.rejections: list[Registration] = []
        """The calls of Register that failed."""
        self.rpc_log: list[Rpc] = []
        """All calls to plugins or to PodResources, in the order in which they began."""
        self.crashes: list[str] = []
        """The errors at which a real kubelet would have crashed. A test that expects a crash clears this list."""
        self.statuses: list[Callable[[], Sequence[ResourceStatus]]] = []
        """For each agent of `serve`, a function that returns why devices are not offered, which a kubelet cannot
        know."""
        self.left_out: list[Callable[[], Iterable[str]]] = []
        """For each agent of `serve_both`, a function that returns sentences: what its ResourceSlices lack, and why."""
        self._updates: dict[str, list[Update]] = {}
        self._rejecting: list[str] = []
        self._rejecting_pods: list[str] = []
        self._sockets = itertools.count()
        longest = max(map(len, map(str, (self.socket, self.pod_resources_socket))))
        if longest > _SUN_PATH:
            raise ValueError(f"a unix socket's path has at most {_SUN_PATH} characters: {self.root} is too long")

    @property
    def device_plugin_dir(self) -> Path:
        """The directory that contains the sockets of plugins."""
        return self.root / "device-plugins"

    @property
    def socket(self) -> Path:
        """The path of the socket at which plugins register."""
        return self.device_plugin_dir / "kubelet.sock"

    @property
    def pod_resources_socket(self) -> Path:
        """The path of the socket of PodResources."""
        return self.root / "pod-resources" / "kubelet.sock"

    @property
    def cgroup_root(self) -> Path:
        """The root of the cgroup filesystem."""
        return self.cgroups.root

    def pod_directory(self, pod: FakePod) -> Path:
        """Return the directory of a pod's volumes, which exists from the pod's first sync until the pod's cleanup."""
        return self.root / "pods" / pod.uid

    @property
    def pod_logs(self) -> Path:
        """The directory that contains the pods' log directories, which are named namespace_name_uid."""
        return self.root / "pod-logs"

    @property
    def container_logs(self) -> Path:
        """The directory that contains symbolic links to the logs of started containers."""
        return self.root / "container-logs"

    @property
    def checkpoint(self) -> Path:
        """The path of the device manager's checkpoint."""
        return self.device_plugin_dir / CHECKPOINT

    def prepare_pod(self, pod: FakePod) -> None:
        """Prepare a pod before its first container starts; in this class nothing.

        After a PluginCallError, the kubelet calls the method again.
        """

    def unprepare_pod(self, pod: FakePod) -> None:
        """Clean up after a pod's last container has ended; in this class nothing."""

    def cdi_devices(self, pod: FakePod, container: FakeContainer) -> Sequence[str]:
        """Return the CDI devices that a container gets from DRA drivers; in this class there are none."""
        return ()

    def dynamic_resources(self, pod: FakePod, container: FakeContainer) -> Sequence[pr.DynamicResource]:
        """Return the entries in PodResources for a container's claims; in this class there are none."""
        return ()

    def schedule(self) -> None:
        """Bind the waiting pods for which enough devices are unallocated.

        Changes of devices and pods call this method.
        """
        raise NotImplementedError

    def node_allocatable(self) -> Mapping[str, int]:
        """Return the Node's allocatable by resource; 0 until a plugin registers again after the kubelet's restart."""
        raise NotImplementedError

    def notify(self) -> None:
        """Wake all threads that wait for `changed`."""
        with self.changed:
            self.changed.notify_all()

    def assigned_pods(self) -> list[FakePod]:
        """Return the pods that are bound to this node, by the API server or a manifest, and have not ended."""
        with self.changed:
            return [pod for pod in self.pods.values() if pod.bound and not pod.terminal]

    def end_pod(self, pod: FakePod, status: tuple[str, str, str] | None) -> None:
        """End a pod, and remove it from the node if it is marked for deletion.

        status: the pod's final phase, reason and message; None keeps the present values. The pod's cgroup is removed in
        any case (Kubelet.SyncTerminatedPod, kubelet 1.36.3), its directory only with the pod
        (Kubelet.cleanupOrphanedPodDirs, which a kubelet runs every 2 s).
        """
        with self.changed:
            self.end_containers(pod)
            self.cgroups.remove_pod(pod.uid)
            if status is not None:
                pod.phase, pod.reason, pod.message = status  # type: ignore[assignment]
            if pod.deleting:
                pod.deleted = pod.gone = True
                self._forget(pod)
                self.orphans.pop(pod.uid, None)
                shutil.rmtree(self.pod_directory(pod), ignore_errors=True)
                shutil.rmtree(self._log_directory(pod), ignore_errors=True)
                for container in pod.all_containers.values():
                    self._keep_log_links(container, 0)
            self.changed.notify_all()
            self.schedule()

    def _log_directory(self, pod: FakePod) -> Path:
        """Return the directory of a pod's logs (BuildPodLogsDirectory, kubelet 1.36.3)."""
        return self.pod_logs / f"{pod.namespace}_{pod.name}_{pod.uid}"

    def _forget(self, pod: FakePod) -> None:
        key = f"{pod.namespace}/{pod.name}"
        if self.pods.get(key) is pod:
            del self.pods[key]

    def make_pod_files(self, pod: FakePod) -> None:
        """Create a pod's cgroup, then its directory, as at the start of Kubelet.SyncPod (kubelet 1.36.3)."""
        with self.changed:
            self.cgroups.add_pod(pod.uid)
            for name in ("volumes", "plugins"):
                (self.pod_directory(pod) / name).mkdir(parents=True, exist_ok=True)

    def start_sandbox(self, pod: FakePod) -> None:
        """Start a pod's sandbox, a process that lasts as long as the pod, and create its log directory.

        Source: kubeGenericRuntimeManager.createPodSandbox, kubelet 1.36.3, which prepares the pod's claims first.
        """
        with self.changed:
            self._log_directory(pod).mkdir(parents=True, exist_ok=True)
            pod.sandbox = _container_id()
            self.cgroups.add_container(pod.uid, pod.sandbox)

    def start_container(self, pod: FakePod, container: FakeContainer) -> None:
        """Start a container's process. The process of an init container ends at once."""
        with self.changed:
            container.id = _container_id()
            # For the termination message (kuberuntime_container.go: makeMounts, kubelet 1.36.3).
            begun = self.pod_directory(pod) / "containers" / container.name / container.id[:8]
            begun.parent.mkdir(parents=True, exist_ok=True)
            begun.touch()
            self.cgroups.add_container(pod.uid, container.id)
            log = self._log_directory(pod) / container.name / f"{len(container.starts)}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
            link = self.container_logs / f"{pod.name}_{pod.namespace}_{container.name}-{container.id}.log"
            link.symlink_to(log)
            container.log_links.append(link)
            self._keep_log_links(container, 2)
            if container.state != "running":
                self.cgroups.remove_container(pod.uid, container.id)

    @staticmethod
    def _keep_log_links(container: FakeContainer, count: int) -> None:
        """Remove a container's links to its logs, except the last `count`.

        The kubelet creates a link at the start of a container (kuberuntime_container.go: startContainer, kubelet
        1.36.3), and removes an ended container after the next one (kuberuntime_gc.go).
        """
        while len(container.log_links) > count:
            container.log_links.pop(0).unlink(missing_ok=True)

    def end_container(self, pod: FakePod, container: FakeContainer) -> None:
        """End a container's process."""
        with self.changed:
            container.state = "terminated"
            self.cgroups.remove_container(pod.uid, container.id)

    def end_containers(self, pod: FakePod) -> None:
        """End all processes of a pod, including its sandbox. The pod's cgroup stays."""
        with self.changed:
            for container in pod.all_containers.values():
                container.state = "terminated"
            pod.sandbox = ""
            self.cgroups.remove_containers(pod.uid)
            self.changed.notify_all()

    def record_update(self, resource: str, update: Update) -> None:
        """Record a ListAndWatch message."""
        with self.changed:
            self._updates.setdefault(resource, []).append(update)
            self.changed.notify_all()
            self.schedule()

    def record_registration(self, registration: Registration) -> None:
        """Record a call of Register."""
        with self.changed:
            (self.rejections if registration.error else self.registrations).append(registration)
            self.changed.notify_all()

    @contextlib.contextmanager
    def recorded(self, method: str, resource: str, request: object) -> Iterator[Rpc]:
        """Record a call, its end and its error in `rpc_log`.

        Yields the record, into which the caller puts the response.
        """
        rpc = Rpc(time.monotonic(), method, resource, request)
        with self.changed:
            self.rpc_log.append(rpc)
            self.changed.notify_all()
        try:
            yield rpc
        except Exception as error:
            rpc.error = describe(error)
            raise
        finally:
            with self.changed:
                rpc.done = time.monotonic()
                self.changed.notify_all()

    def take_rejection(self) -> str | None:
        """Return, and remove, the message for a refusal of a Register call; None if the call should not be refused."""
        with self.changed:
            return self._rejecting.pop(0) if self._rejecting else None

    def take_pod_rejection(self) -> str | None:
        """Return, and remove, the reason for a rejection of a pod; None if the pod should not be rejected."""
        with self.changed:
            return self._rejecting_pods.pop(0) if self._rejecting_pods else None

    def private_socket(self) -> Path:
        """Return a new path to which a gRPC server binds its socket.

        The caller links the public name to this path, so that gRPC never unlinks the public name.
        """
        directory = self.root / ".fake"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{next(self._sockets)}"


def _container_id() -> str:
    return uuid.uuid4().hex * 2


def _short_tmp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 30 else "/tmp"  # noqa: S108  # a long TMPDIR leaves no room for a socket's path
