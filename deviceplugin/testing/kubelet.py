"""A kubelet for tests: sockets, faults, pods and a tiny scheduler around the device manager.

It serves `device-plugins/kubelet.sock` (v1beta1.Registration) and `pod-resources/kubelet.sock`
(v1.PodResourcesLister) under its root, calls plugins as the device manager of kubelet 1.36.3
does, and starts pods that are values. Everything is synchronous and thread-safe; own threads do
the work, so a plugin may live in this process (in another thread) or in another one.

What it leaves out: the delay of up to 10 s between a change and the node's status, the node
predicates after Allocate (see `reject_next_pod`), and CPU and memory.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from deviceplugin.testing import claim_state
from deviceplugin.testing.cgroups import CgroupLayout, CgroupTree
from deviceplugin.testing.checkpoint import FILE_NAME as CHECKPOINT
from deviceplugin.testing.devicemanager import ContainerSpec, DeviceState
from deviceplugin.testing.numa import Policy
from deviceplugin.testing.pods import Containers, FakeContainer, FakePod, Lingering, PodFailedError, container_specs
from deviceplugin.testing.run import Registration, Rpc, Run, Update, describe
from deviceplugin.wire import podresources_pb2 as pr

if TYPE_CHECKING:
    from deviceplugin.kubelet.status import ResourceStatus
    from deviceplugin.node.options import Paths

__all__ = ["Damage", "FakeKubelet", "Registration", "Rpc", "Update"]

Damage = Literal["deleted", "empty", "torn", "unreadable"]
"""What can happen to a file. unreadable: there is a directory of its name, which cannot be replaced either."""

_SUN_PATH: Final = 107
_POLL: Final = 0.02
"""Seconds after which `wait_until` asks again though nothing has changed here."""
_NO_DEVICES: Final = ("cpu", "memory", "ephemeral-storage", "hugepages-")


class FakeKubelet:
    """A node: its kubelet, which comes and goes, and its pods, which stay.

    A context manager; entering starts the kubelet, leaving stops it. Its methods block: beside a
    plugin in the same event loop, call them through `asyncio.to_thread`.

    root: stands for /var/lib/kubelet; None makes a directory that goes with the object.
    topology_policy: the topology manager's, with container scope, over `numa_nodes`.
    check_nodes: a container starts only if its device nodes exist on this machine.
    stop_grace: seconds after which a resource whose plugin went away is forgotten.
    dial_timeout: seconds that Register tries to reach the plugin.
    start_backoff: seconds between attempts to start a container (a kubelet: 10 s and more).
    seed: the kubelet walks sets of devices in random order; the same seed gives the same order.
    pod_resources_qps, pod_resources_burst: the rate limit of PodResources.
    cgroup_root: where the node's cgroups are; None is `cgroup` under the root.
    cgroup_layout: the cgroups' version and naming.
    minor: 36, or 37 for a kubelet that tells several plugins of one resource apart by their sockets.
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
        cgroup_root: Path | None = None,
        cgroup_layout: CgroupLayout = "v2",
        minor: int = 36,
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
        self._run: Run | None = None
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

    @property
    def cgroup_root(self) -> Path:
        """The root of the cgroup filesystem."""
        return self.cgroups.root

    def pod_directory(self, pod: FakePod) -> Path:
        """Return where a pod's volumes are; it is there from the pod's first sync until it was cleaned up."""
        return self.root / "pods" / pod.uid

    @property
    def paths(self) -> Paths:
        """The paths of the node, for an agent."""
        from deviceplugin.node.options import Paths

        return Paths(
            kubelet_root=self.root,
            cgroup_root=self.cgroup_root,
            pod_log_dir=self.pod_logs,
            container_log_dir=self.container_logs,
        )

    @property
    def pod_logs(self) -> Path:
        """Where pods have log directories, named namespace_name_uid."""
        return self.root / "pod-logs"

    @property
    def container_logs(self) -> Path:
        """Where containers that have started have links to their logs."""
        return self.root / "container-logs"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line options that point an agent at this node."""
        options = {
            "--kubelet-root": self.root,
            "--cgroup-root": self.cgroup_root,
            "--pod-log-dir": self.pod_logs,
            "--container-log-dir": self.container_logs,
        }
        return tuple(word for name, path in options.items() for word in (name, str(path)))

    @property
    def checkpoint(self) -> Path:
        """The device manager's checkpoint."""
        return self.device_plugin_dir / CHECKPOINT

    @property
    def claim_state(self) -> Path:
        """The DRA manager's checkpoint."""
        return self.root / claim_state.FILE_NAME

    # Its life.

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C as well: nobody else knows of the directory
            with contextlib.suppress(Exception):
                self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_up(self) -> bool:
        """Whether the kubelet runs."""
        return self._run is not None

    @property
    def hears_of_pods(self) -> bool:
        """Whether the kubelet runs and the API server reaches it."""
        return self._run is not None and not (self.sources_held and not self._run.manager.sources_ready)

    def start(self, *, wipe: bool = True) -> None:
        """Start the kubelet: delete sockets, read the checkpoint, admit again the pods that are there.

        Raises:
            ValueError: the claim state is damaged; a kubelet ends with that error.

        """
        with self.changed:
            if self._run is not None:
                raise RuntimeError("the kubelet runs already")
            (self.root / "pods").mkdir(parents=True, exist_ok=True)
            claim_state.read_or_create(self.root)
            self.cgroups.create()
            for logs in (self.pod_logs, self.container_logs):
                logs.mkdir(parents=True, exist_ok=True)
            self._run = run = Run(self)
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

    def reboot(self) -> None:
        """Restart the whole node: every container ends, every cgroup is gone, what is on disk stays."""
        self.stop()
        with self.changed:
            for pod in (*self.pods.values(), *self.orphans.values()):
                pod.lingering = ""
                self.end_containers(pod)
                self.cgroups.remove_pod(pod.uid)
        self.start()

    def recreate_socket(self) -> None:
        """Serve on a new kubelet.sock in the same kubelet, as newer kubelets do after a failure of their server.

        Streams and other sockets are left alone.
        """
        self._up().serve_registration()

    def close(self) -> None:
        """Stop the kubelet and remove the directory, if it is its own."""
        try:
            self.stop()
        finally:
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

    def hold_sources(self) -> None:
        """Keep the API server from the kubelet: from its next start it knows of no pods but static ones.

        Until `release_sources` PodResources List is empty (v1PodResourcesServer.List does not wait for
        sources), UpdateAllocatedDevices does nothing, and no pod is cleaned up (sourcesReady.AllReady,
        kubelet 1.36.3). The checkpoint names the pods as before.
        """
        with self.changed:
            self.sources_held = True

    def release_sources(self) -> None:
        """Let the API server reach the kubelet again."""
        with self.changed:
            self.sources_held = False
            self.changed.notify_all()

    def lose_network(self) -> None:
        """Make the node's network unready: pods are admitted and get devices, but are not started.

        They have neither cgroup nor directory (Kubelet.SyncPod returns before it makes them, kubelet
        1.36.3). Containers that run are left alone, and not started again when they end.
        """
        with self.changed:
            self.network_ready = False

    def restore_network(self) -> None:
        """Make the node's network ready."""
        with self.changed:
            self.network_ready = True
            self.changed.notify_all()

    def hold_checkpoint_writes(self, count: int = 1) -> None:
        """Hold up the next writes of the checkpoint after their contents were made up.

        The kubelet gathers the contents under its mutex and writes them outside of it
        (ManagerImpl.writeCheckpoint, kubelet 1.36.3), so an older state can replace a newer one.
        """
        with self.changed:
            manager = self._up().manager
            manager.hold_writes, manager.land_writes = count, False

    def land_checkpoint_writes(self) -> None:
        """Let the writes that are held up replace newer ones, the oldest first, one at each write from now on."""
        with self.changed:
            self._up().manager.land_writes = True

    def damage_checkpoint(self, damage: Damage) -> None:
        """Damage the device manager's checkpoint, while the kubelet runs or is down.

        A running kubelet replaces the file at its next write, if it can. One that starts goes on
        without it: it knows no devices of running containers (ManagerImpl.Start, kubelet 1.36.3).
        """
        _damage(self.checkpoint, damage)

    def damage_claim_state(self, damage: Damage) -> None:
        """Damage the DRA manager's checkpoint, while the kubelet runs or is down.

        A kubelet that starts makes a new one if it is deleted, and then never unprepares the claims
        of running pods; otherwise it does not start (newClaimInfoCache, kubelet 1.36.3).
        """
        _damage(self.claim_state, damage)

    # Pods.

    def withheld(self, resources: Collection[str]) -> str:
        """Return why the agents of `serve` withhold devices of these resources, for a message; "" if they do not."""
        reasons = [
            f"{device}: {why.reason}"
            for resource in itertools.chain.from_iterable(status() for status in self.statuses)
            if resource.resource in resources
            for device, why in sorted(resource.withheld.items())
        ]
        return "; withheld: " + "; ".join(reasons) if reasons else ""

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
        return self._make_pod(name, limits, containers, init_containers, namespace)

    def run_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Containers | None = None,
        init_containers: Containers | None = None,
        namespace: str = "default",
        static: bool = False,
        check: bool = True,
        timeout: float = 10.0,
    ) -> FakePod:
        """Make a pod past the scheduler and wait until it runs.

        static: it comes from a manifest on the node. check: raise if it fails; otherwise it is returned with its
        `phase`, `reason` and `message`.

        Raises:
            PodFailedError: it has failed, or runs with fewer devices than it asks for; it asks for a resource that
                nobody serves (a real kubelet's node predicates fail it), also without `check`.
            KubeletCrashError: its admission would have ended a real kubelet.
            TimeoutError: neither happens in time.

        """
        specs = [*_containers(limits, containers), *container_specs(init_containers)]
        asked = [resource for spec in specs for resource in spec.limits]
        served = self.resources()
        if self.is_up and (unknown := [one for one in asked if one not in served and not one.startswith(_NO_DEVICES)]):
            known = ", ".join(sorted(served)) or "nothing"
            raise PodFailedError(f"pod {name} asks for {unknown[0]}, which nobody serves; served here: {known}")
        pod = self._make_pod(name, limits, containers, init_containers, namespace, bind=True, static=static)
        self.wait_until(lambda: pod.running or pod.terminal, timeout, lambda: f"{pod!r} to run or fail")
        pod.raise_crash()
        if check and pod.phase == "Failed":
            raise PodFailedError(f"{pod!r} has failed{self.withheld(asked)}")
        for one in pod.containers.values() if check and pod.running else ():
            for resource, number in one.spec.limits.items():
                if resource in served and len(one.devices.get(resource, ())) < number:
                    got = f"{len(one.devices.get(resource, ()))} of {number} {resource}"
                    raise PodFailedError(f"{pod!r} runs with {got}: the kubelet has no usable list of it; see the log")
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
        self, predicate: Callable[[], object], timeout: float = 10.0, what: str | Callable[[], str] = "a condition"
    ) -> None:
        """Wait until something is true: of this node, or of anything else, such as what a source's hook was given.

        predicate: a plain function without arguments, called whenever something changes here and every 20 ms without
            that. It may block, and may call what needs the kubelet. It cannot be a coroutine function, since this
            blocks: a test that is one says `await asyncio.to_thread(fake_kubelet.wait_until, predicate)`.
        timeout: seconds. what: what is waited for, for the error; a function is called only then.

        Raises:
            TimeoutError: it does not become true in time.
            TypeError: the predicate is a coroutine function.

        """
        if not callable(predicate):
            raise TypeError(f"wait_until takes a function such as lambda: ..., not {predicate!r}")
        deadline = time.monotonic() + timeout
        while not (met := predicate()):
            if (rest := deadline - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"waited {timeout} s for {what if isinstance(what, str) else what()}; {self._state()}"
                )
            with self.changed:
                self.changed.wait(min(rest, _POLL))
        if inspect.isawaitable(met):
            if inspect.iscoroutine(met):
                met.close()
            raise TypeError("wait_until takes a plain function; of a coroutine function it would wait for nothing")

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

    def _up(self) -> Run:
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
        bind: bool = False,
        static: bool = False,
    ) -> FakePod:
        specs = _containers(limits, containers)
        with self.changed:
            key = f"{namespace}/{name}"
            if key in self.pods:
                raise ValueError(f"there is a pod {key} already")
            pod = FakePod(str(uuid.uuid4()), name, namespace, specs, container_specs(init_containers), self)
            pod.static = static
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
                pod.waits_for = lacking(pod.requests, free)
                if not pod.waits_for:
                    for resource, number in pod.requests.items():
                        free[resource] = free.get(resource, 0) - number
                    self._bind(pod)

    def node_allocatable(self) -> Mapping[str, int]:
        """Return what the Node says is allocatable; 0 of what has not registered again after a restart."""
        return {} if self._run is None else self._run.manager.capacity()[1]

    def assigned_pods(self) -> list[FakePod]:
        """Return the pods that the API server, or a manifest, gives to this node and that are not over."""
        with self.changed:
            return [pod for pod in self.pods.values() if pod.bound and not pod.terminal]

    def drop(self, pod: FakePod) -> None:
        """Forget a pod that is to be deleted, if nothing of it runs; called by `FakePod.delete`."""
        with self.changed:
            if not pod.bound or (pod.terminal and self.hears_of_pods):
                self.end_pod(pod, None)

    def remove_pod(self, pod: FakePod, lingering: Lingering) -> None:
        """Take a pod from the kubelet's list, whatever of it runs; called by `FakePod`."""
        with self.changed:
            over = not pod.bound or pod.terminal
            pod.deleting = pod.deleted = True
            pod.lingering = lingering
            self._forget(pod)
            self.orphans[pod.uid] = pod
            if over and self.hears_of_pods:
                self.end_pod(pod, None)
            self.changed.notify_all()

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


def _containers(limits: Mapping[str, int] | None, containers: Containers | None) -> list[ContainerSpec]:
    if limits is not None and containers is not None:
        raise ValueError("give limits or containers, not both")
    return container_specs(containers if containers is not None else {"main": {} if limits is None else limits})


def lacking(requests: Mapping[str, int], free: Mapping[str, int]) -> str:
    """Return what there is too little of for a pod, such as "2 of example.com/fpga, 1 free"; "" if it fits."""
    few = [(name, number, free.get(name, 0)) for name, number in requests.items()]
    return "; ".join(f"{number} of {name}, {left} free" for name, number, left in few if left < number)


def _container_id() -> str:
    return uuid.uuid4().hex * 2


def _damage(path: Path, damage: Damage) -> None:
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if damage == "unreadable":
        path.mkdir()


def _short_tmp() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 30 else "/tmp"  # noqa: S108  # a long TMPDIR leaves no room for a socket's path
