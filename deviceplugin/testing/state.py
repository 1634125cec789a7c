"""The state of the fake node: what a run of its kubelet finds, asks and changes, and what outlives it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def describe(error: Exception) -> str:
    """Return an error in words, a gRPC status with its code."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


class NodeState:
    """A node without its kubelet: its files, its pods and their processes, and what was called."""

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        numa_nodes: Sequence[int] = (0, 1),
        topology_policy: TopologyPolicy = "none",
        check_nodes: bool = False,
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
        self.check_nodes = check_nodes
        self.stop_grace = stop_grace
        self.dial_timeout = dial_timeout
        self.start_backoff = start_backoff
        self.seed = seed
        self.minor = minor
        self.pod_resources_qps = pod_resources_qps
        self.pod_resources_burst = pod_resources_burst
        self.cgroups = CgroupTree(cgroup_root or self.root / "cgroup", cgroup_layout)
        self.register_delay = 0.0
        """Seconds that Register waits before it does anything."""
        self.pod_resources_refused = 0.0
        """The share of the calls of PodResources that is refused with RESOURCE_EXHAUSTED.

        The limit is the server's, one for all its clients (LimiterUnaryServerInterceptor, kubelet 1.36.3).
        """
        self.changed = threading.Condition()
        """Notified whenever anything changes that can be observed here."""
        self.pods: dict[str, FakePod] = {}
        """All pods that were not deleted, by namespace/name."""
        self.orphans: dict[str, FakePod] = {}
        """Pods that were removed while something of them was on the node, by uid, until it is gone."""
        self.sources_held = False
        self.network_ready = True
        self.registrations: list[Registration] = []
        """The calls of Register that succeeded."""
        self.rejections: list[Registration] = []
        """The calls of Register that did not."""
        self.rpc_log: list[Rpc] = []
        """Every call to a plugin or to PodResources, in the order of their beginnings."""
        self.crashes: list[str] = []
        """Where a real kubelet would have crashed. A test that expects one clears it."""
        self.statuses: list[Callable[[], Sequence[ResourceStatus]]] = []
        """Of the agents of `serve`: they know why a device is withheld; a kubelet is not told."""
        self._updates: dict[str, list[Update]] = {}
        self._rejecting: list[str] = []
        self._rejecting_pods: list[str] = []
        self._sockets = itertools.count()
        longest = max(map(len, map(str, (self.socket, self.pod_resources_socket))))
        if longest > _SUN_PATH:
            raise ValueError(f"a unix socket's path has at most {_SUN_PATH} characters: {self.root} is too long")

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

    @property
    def cgroup_root(self) -> Path:
        """The root of the cgroup filesystem."""
        return self.cgroups.root

    def pod_directory(self, pod: FakePod) -> Path:
        """Return where a pod's volumes are; it is there from the pod's first sync until it was cleaned up."""
        return self.root / "pods" / pod.uid

    @property
    def pod_logs(self) -> Path:
        """Where pods have log directories, named namespace_name_uid."""
        return self.root / "pod-logs"

    @property
    def container_logs(self) -> Path:
        """Where containers that have started have links to their logs."""
        return self.root / "container-logs"

    @property
    def checkpoint(self) -> Path:
        """The device manager's checkpoint."""
        return self.device_plugin_dir / CHECKPOINT

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

    def schedule(self) -> None:
        """Give pods to the kubelet that fit now; called whenever that may have changed."""
        raise NotImplementedError

    def node_allocatable(self) -> Mapping[str, int]:
        """Return what the Node says is allocatable; 0 of what has not registered again after a restart."""
        raise NotImplementedError

    def notify(self) -> None:
        """Let everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def assigned_pods(self) -> list[FakePod]:
        """Return the pods that the API server, or a manifest, gives to this node and that are not over."""
        with self.changed:
            return [pod for pod in self.pods.values() if pod.bound and not pod.terminal]

    def end_pod(self, pod: FakePod, status: tuple[str, str, str] | None) -> None:
        """End a pod with this phase, reason and message, and forget it if it is to be deleted.

        Its cgroup goes in any case (Kubelet.SyncTerminatedPod, kubelet 1.36.3), its directory only
        with the pod (Kubelet.cleanupOrphanedPodDirs, which a kubelet runs every 2 s).
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
        """Make a pod's cgroup, then its directory, as a sync of the pod begins (Kubelet.SyncPod, kubelet 1.36.3)."""
        with self.changed:
            self.cgroups.add_pod(pod.uid)
            for name in ("volumes", "plugins"):
                (self.pod_directory(pod) / name).mkdir(parents=True, exist_ok=True)

    def start_sandbox(self, pod: FakePod) -> None:
        """Start a pod's sandbox, a process of its own which lasts as long as the pod, and make its log directory.

        Source: kubeGenericRuntimeManager.createPodSandbox, kubelet 1.36.3. The pod's claims are prepared before.
        """
        with self.changed:
            self._log_directory(pod).mkdir(parents=True, exist_ok=True)
            pod.sandbox = _container_id()
            self.cgroups.add_container(pod.uid, pod.sandbox)

    def start_container(self, pod: FakePod, container: FakeContainer) -> None:
        """Start a container's process; that of an init container ends at once."""
        with self.changed:
            container.id = _container_id()
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
        """Remove all but the last links: a container that has ended is removed after the next one (kuberuntime_gc.go).

        The link comes with the start (kuberuntime_container.go: startContainer, kubelet 1.36.3).
        """
        while len(container.log_links) > count:
            container.log_links.pop(0).unlink(missing_ok=True)

    def end_container(self, pod: FakePod, container: FakeContainer) -> None:
        """End a container's process."""
        with self.changed:
            container.state = "terminated"
            self.cgroups.remove_container(pod.uid, container.id)

    def end_containers(self, pod: FakePod) -> None:
        """End every process of a pod, its sandbox as well; its cgroup stays."""
        with self.changed:
            for container in pod.all_containers.values():
                container.state = "terminated"
            pod.sandbox = ""
            self.cgroups.remove_containers(pod.uid)
            self.changed.notify_all()

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
            rpc.error = describe(error)
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


def _container_id() -> str:
    return uuid.uuid4().hex * 2


def _short_tmp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 30 else "/tmp"  # noqa: S108  # a long TMPDIR leaves no room for a socket's path
