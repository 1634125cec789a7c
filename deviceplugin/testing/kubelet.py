"""A fake kubelet for tests: sockets, faults, pods and a small scheduler around the device manager.

It serves `device-plugins/kubelet.sock` (v1beta1.Registration) and `pod-resources/kubelet.sock` (v1.PodResourcesLister)
under its root, calls plugins as the device manager of kubelet 1.36.3 does, and starts pods that are Python objects
without processes. All methods are synchronous and thread-safe. Threads of the fake kubelet call the plugin, so the
plugin may run in another thread of the test's process or in another process.

The fake kubelet leaves out the delay of up to 10 s between a change and the node's status, the node predicates after
Allocate (see `reject_next_pod`), and CPU and memory.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from deviceplugin.testing import claim_state
from deviceplugin.testing.devicemanager import ContainerSpec, DeviceState
from deviceplugin.testing.pods import Containers, FakePod, Lingering, PodFailedError, container_specs
from deviceplugin.testing.run import Run
from deviceplugin.testing.state import NodeState, Registration, Rpc, Update

if TYPE_CHECKING:
    from deviceplugin.kubelet.paths import Paths

__all__ = ["Damage", "FakeKubelet", "Registration", "Rpc", "Update"]

Damage = Literal["deleted", "empty", "torn", "unreadable"]
"""Kinds of damage to a file. torn: its last bytes are missing. unreadable: a directory is at the file's path, so that
the kubelet cannot replace the file either."""

_POLL: Final = 0.02
"""Seconds between two checks of `wait_until` while the fake node does not change, because a predicate may depend on
other state."""
_NO_DEVICES: Final = ("cpu", "memory", "ephemeral-storage", "hugepages-")


class FakeKubelet(NodeState):
    """A fake node with its kubelet and its pods. The kubelet can start and stop; the pods stay.

    The object is a context manager: entering starts the kubelet, leaving stops it. Its methods block, so a test with a
    plugin in the same event loop calls them through `asyncio.to_thread`.

    root: stands for /var/lib/kubelet; None creates a directory that `close` removes. topology_policy: the policy of the
    topology manager, whose scope is `container`, over `numa_nodes`. stop_grace: seconds after which the kubelet forgets
    a resource whose plugin has disconnected.
    dial_timeout: seconds for which Register tries to connect to the plugin. start_backoff: seconds between attempts to
    start a container (in a kubelet: 10 s and more). seed: the kubelet iterates over sets of devices in random order;
    the same seed gives the same order. pod_resources_qps, pod_resources_burst: the rate limit of PodResources.
    cgroup_root: the directory of the node's cgroups; None stands for `cgroup` under the root. cgroup_layout: the cgroup
    version, and the kubelet's cgroup driver. minor: the kubelet's minor version, 36, or 37 for a kubelet that
    distinguishes several plugins of one resource by their sockets.
    """

    _run: Run | None = None

    # Paths.

    @property
    def paths(self) -> Paths:
        """The paths of the fake node, as the argument of an agent."""
        from deviceplugin.kubelet.paths import Paths

        return Paths(
            kubelet_root=self.root,
            cgroup_root=self.cgroup_root,
            pod_log_dir=self.pod_logs,
            container_log_dir=self.container_logs,
            cdi_dir=self.root / "cdi",
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line options with which an agent uses this node."""
        options = {
            "--kubelet-root": self.root,
            "--cgroup-root": self.cgroup_root,
            "--pod-log-dir": self.pod_logs,
            "--container-log-dir": self.container_logs,
            "--cdi-dir": self.paths.cdi_dir,
        }
        return tuple(word for name, path in options.items() for word in (name, str(path)))

    @property
    def claim_state(self) -> Path:
        """The path of the DRA manager's checkpoint."""
        return self.root / claim_state.FILE_NAME

    # Start and stop.

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # This includes Ctrl-C, because no other code removes the temporary directory.
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
        """Whether the kubelet runs and receives its pods from the API server."""
        return self._run is not None and not (self.sources_held and not self._run.manager.sources_ready)

    def start(self, *, wipe: bool = True) -> None:
        """Start the kubelet: delete sockets, read the checkpoint, admit the existing pods again.

        Raises:
            ValueError: the claim state file is damaged; a real kubelet ends with an error then.
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
        """Stop the kubelet. Its connections break, its socket files stay, and containers continue to run."""
        with self.changed:
            run, self._run = self._run, None
            self.changed.notify_all()
        if run is not None:
            run.stop()

    def restart(self, *, wipe: bool = True, downtime: float = 0.0) -> None:
        """Stop the kubelet and start it again.

        wipe: whether to delete every socket in the device plugin directory, as a kubelet does at its start. If false,
        the other sockets stay, and only kubelet.sock is replaced.
        """
        self.stop()
        if downtime:
            time.sleep(downtime)
        self.start(wipe=wipe)

    def reboot(self) -> None:
        """Simulate a reboot of the node: all containers end, all cgroups disappear, and files on disk stay."""
        self.stop()
        with self.changed:
            for pod in (*self.pods.values(), *self.orphans.values()):
                pod.lingering = ""
                self.end_containers(pod)
                self.cgroups.remove_pod(pod.uid)
        self.start()

    def recreate_socket(self) -> None:
        """Replace kubelet.sock while the kubelet runs, as newer kubelets do after a failure of their server.

        ListAndWatch streams and other sockets stay.
        """
        self._up().serve_registration()

    def close(self) -> None:
        """Stop the kubelet, and remove the root directory if this object created it."""
        try:
            self.stop()
        finally:
            if self._own_root:
                shutil.rmtree(self.root, ignore_errors=True)

    # Faults.

    def drop_streams(self, resource: str | None = None) -> None:
        """Make the kubelet end the ListAndWatch streams of one or (None) all resources, as in kubernetes#125501."""
        self._up().drop_streams(resource)

    def freeze(self) -> None:
        """Make the kubelet hang until `thaw`: it accepts connections, but does not respond to calls or read streams."""
        self._up().thawed.clear()

    def thaw(self) -> None:
        """Let the kubelet continue after `freeze`."""
        self._up().thawed.set()

    def reject_registrations(self, count: int = 1, message: str = "registration refused by the test") -> None:
        """Refuse the next `count` calls of Register."""
        with self.changed:
            self._rejecting += [message] * count

    def reject_next_pod(self, reason: str = "OutOfcpu") -> None:
        """Reject the next pod, for this reason, after its devices were allocated, as the node predicates may."""
        with self.changed:
            self._rejecting_pods.append(reason)

    def hold_sources(self) -> None:
        """Separate the kubelet from the API server. From its next start on, the kubelet knows only static pods.

        Until `release_sources`, PodResources List is empty (v1PodResourcesServer.List does not wait for sources),
        UpdateAllocatedDevices does nothing, and no pod is cleaned up (sourcesReady.AllReady, kubelet 1.36.3). The
        device manager's checkpoint still names the pods.
        """
        with self.changed:
            self.sources_held = True

    def release_sources(self) -> None:
        """Let the kubelet reach the API server again."""
        with self.changed:
            self.sources_held = False
            self.changed.notify_all()

    def lose_network(self) -> None:
        """Make the node's network unready: pods are admitted and get devices, but are not started.

        Such pods have neither a cgroup nor a directory (Kubelet.SyncPod returns before it creates them, kubelet
        1.36.3). Running containers continue; a container that ends is not started again.
        """
        with self.changed:
            self.network_ready = False

    def restore_network(self) -> None:
        """Make the node's network ready."""
        with self.changed:
            self.network_ready = True
            self.changed.notify_all()

    def hold_checkpoint_writes(self, count: int = 1) -> None:
        """Hold back the next `count` writes of the device manager's checkpoint until `land_checkpoint_writes`.

        The kubelet computes the content under its mutex and writes it outside of the mutex
        (ManagerImpl.writeCheckpoint, kubelet 1.36.3), so an older state can replace a newer one.
        """
        with self.changed:
            manager = self._up().manager
            manager.hold_writes, manager.land_writes = count, False

    def land_checkpoint_writes(self) -> None:
        """From now on, let each write put the oldest delayed content into the checkpoint, instead of the newest."""
        with self.changed:
            self._up().manager.land_writes = True

    def damage_checkpoint(self, damage: Damage) -> None:
        """Damage the device manager's checkpoint, while the kubelet runs or is down.

        A running kubelet replaces the file at its next write, if the damage permits that. A kubelet that starts ignores
        a damaged checkpoint, and then knows no devices of running containers (ManagerImpl.Start, kubelet 1.36.3).
        """
        _damage(self.checkpoint, damage)

    def damage_claim_state(self, damage: Damage) -> None:
        """Damage the DRA manager's checkpoint, while the kubelet runs or is down.

        If the file is deleted, a kubelet that starts creates a new one, and then never unprepares the claims of running
        pods. With other damage, the kubelet does not start (newClaimInfoCache, kubelet 1.36.3).
        """
        _damage(self.claim_state, damage)

    # Pods.

    def withheld(self, resources: Collection[str]) -> str:
        """Return a text: why devices of these resources are not offered, and which devices slices lack; or ""."""
        reasons = [
            f"{device}: {why.reason}"
            for resource in itertools.chain.from_iterable(status() for status in self.statuses)
            if resource.resource in resources
            for device, why in sorted(resource.withheld.items())
        ]
        left_out = [one for those in self.left_out for one in those()]
        parts = {"withheld": reasons, "left out of the slices": left_out}
        return "".join(f"; {what}: {'; '.join(those)}" for what, those in parts.items() if those)

    def start_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Containers | None = None,
        init_containers: Containers | None = None,
        namespace: str = "default",
        uid: str = "",
    ) -> FakePod:
        """Create a pod.

        The pod stays Pending until the devices that it requests are allocatable and no other pod requests them.

        limits: the limits of the only container, which is named `main`; alternatively, give `containers`. uid: the
        pod's UID; "" for a new one.
        """
        return self._make_pod(name, limits, containers, init_containers, namespace, uid=uid)

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
        timeout: float = 30.0,
    ) -> FakePod:
        """Create a pod without the scheduler, and wait until it runs.

        static: whether the pod comes from a manifest on the node. check: whether to raise PodFailedError if the pod
        fails; otherwise the failed pod is returned with its `phase`, `reason` and `message`.

        Raises:
            PodFailedError: the pod has failed, or runs with fewer devices than it requests; or, even without `check`,
                the pod requests a resource that no plugin serves (a real kubelet's node predicates would fail the pod).
            KubeletCrashError: the pod's admission would have crashed a real kubelet.
            TimeoutError: the pod neither runs nor fails in time.
        """
        specs = [*_containers(limits, containers), *container_specs(init_containers)]
        asked = [resource for spec in specs for resource in spec.limits]
        served = self.resources()
        if self.is_up and (
            unknown := [
                resource for resource in asked if resource not in served and not resource.startswith(_NO_DEVICES)
            ]
        ):
            listed = ", ".join(sorted(served)) or "nothing"
            raise PodFailedError(f"pod {name} asks for {unknown[0]}, which no plugin serves; served here: {listed}")
        pod = self._make_pod(name, limits, containers, init_containers, namespace, bind=True, static=static)
        self.wait_until(lambda: pod.running or pod.terminal, timeout, lambda: f"{pod!r} to run or fail")
        pod.raise_crash()
        if check and pod.phase == "Failed":
            raise PodFailedError(f"{pod!r} has failed{self.withheld(asked)}")
        for container in pod.containers.values() if check and pod.running else ():
            for resource, number in container.spec.limits.items():
                if resource in served and len(container.devices.get(resource, ())) < number:
                    got = f"{len(container.devices.get(resource, ()))} of {number} {resource}"
                    raise PodFailedError(f"{pod!r} runs with {got}: the kubelet has no usable list of it; see the log")
        return pod

    def device_health(self, pod: FakePod, container: str | None = None) -> dict[str, dict[str, str]]:
        """Return a container's allocatedResourcesStatus: health by device id, for each resource."""
        return self._up().manager.health_of(pod.uid, pod.container(container).name)

    # State that tests can observe.

    def allocatable(self, resource: str) -> int:
        """Return how many devices of a resource are healthy; 0 while the kubelet is down."""
        return self._capacity()[1].get(resource, 0)

    def capacity(self, resource: str) -> int:
        """Return the number of devices of a resource."""
        return self._capacity()[0].get(resource, 0)

    def resources(self) -> set[str]:
        """Return the resources that the kubelet reports, including those with 0 devices."""
        return set(self._capacity()[0])

    def devices(self, resource: str) -> dict[str, DeviceState]:
        """Return the devices of a resource by id."""
        with self.changed:
            return {} if self._run is None else self._run.manager.devices(resource)

    def allocated(self, resource: str) -> set[str]:
        """Return the ids of a resource's devices that the kubelet counts as allocated."""
        return self._up().manager.allocated(resource)

    def updates(self, resource: str) -> list[Update]:
        """Return all ListAndWatch messages of a resource so far, also messages before restarts of the kubelet."""
        with self.changed:
            return list(self._updates.get(resource, ()))

    def streams(self, resource: str) -> int:
        """Return the number of open ListAndWatch streams of a resource."""
        with self.changed:
            return 0 if self._run is None else self._run.streams[resource]

    def rpcs(self, method: str, resource: str | None = None) -> list[Rpc]:
        """Return the finished calls of a gRPC method, of one resource or (None) of all."""
        with self.changed:
            return [
                r
                for r in self.rpc_log
                if r.method == method and r.done is not None and (resource is None or r.resource == resource)
            ]

    def wait_until(
        self, predicate: Callable[[], object], timeout: float = 30.0, what: str | Callable[[], str] = "a condition"
    ) -> None:
        """Wait until a condition is true.

        The condition may depend on this node, or on other objects such as the arguments of a hook.

        predicate: the condition, a plain function without arguments. It is called at each change of the fake node, and
        every 20 ms if nothing changes. It may block, and may call the kubelet. It cannot be a coroutine function,
        because `wait_until` blocks. A test that is a coroutine function uses `await
        asyncio.to_thread(fake_kubelet.wait_until, predicate)`. timeout: seconds. what: the text for the error; a
        function is called only in case of an error.

        Raises:
            TimeoutError: the condition does not become true in time.
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

    def wait_registered(self, resource: str, count: int = 1, timeout: float = 30.0) -> Registration:
        """Wait until a resource was registered `count` times; return the latest registration."""

        def those() -> list[Registration]:
            return [r for r in self.registrations if r.resource == resource]

        self.wait_until(lambda: len(those()) >= count, timeout, f"{count} registrations of {resource}")
        return those()[-1]

    def wait_devices(
        self,
        resource: str,
        want: int | Callable[[Mapping[str, DeviceState]], bool],
        timeout: float = 30.0,
    ) -> dict[str, DeviceState]:
        """Wait until `want` devices are healthy, or `want(devices)` is true; return the resource's devices by id."""

        def enough() -> bool:
            devices = self.devices(resource)
            return want(devices) if callable(want) else sum(d.health == "Healthy" for d in devices.values()) == want

        self.wait_until(enough, timeout, f"{want} devices of {resource}")
        return self.devices(resource)

    def wait_allocatable(self, resource: str, count: int, timeout: float = 30.0) -> None:
        """Wait until `count` devices of a resource are allocatable."""
        self.wait_until(lambda: self.allocatable(resource) == count, timeout, f"{count} allocatable {resource}")

    def wait_rpc(self, method: str, resource: str | None = None, count: int = 1, timeout: float = 30.0) -> Rpc:
        """Wait until `count` calls of a gRPC method have ended; return the latest call."""
        self.wait_until(lambda: len(self.rpcs(method, resource)) >= count, timeout, f"{count} calls of {method}")
        return self.rpcs(method, resource)[-1]

    # Internal methods.

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
            f"last refusals: {refused}, pods: {pods}, crashes: {self.crashes}{self.withheld(registered)}"
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
        uid: str = "",
    ) -> FakePod:
        specs = _containers(limits, containers)
        with self.changed:
            key = f"{namespace}/{name}"
            if key in self.pods:
                raise ValueError(f"there is a pod {key} already")
            pod = FakePod(uid or str(uuid.uuid4()), name, namespace, specs, container_specs(init_containers), self)
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
        """Bind the waiting pods for which enough devices are unallocated. Called after changes of devices and pods."""
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
        """Return the Node's allocatable by resource; 0 until a plugin registers again after the kubelet's restart."""
        return {} if self._run is None else self._run.manager.capacity()[1]

    def drop(self, pod: FakePod) -> None:
        """Remove a pod that is marked for deletion, if none of its processes runs. `FakePod.delete` calls this."""
        with self.changed:
            if not pod.bound or (pod.terminal and self.hears_of_pods):
                self.end_pod(pod, None)

    def remove_pod(self, pod: FakePod, lingering: Lingering) -> None:
        """Remove a pod from the kubelet's list, even if its processes run. `FakePod` calls this method."""
        with self.changed:
            over = not pod.bound or pod.terminal
            pod.deleting = pod.deleted = True
            pod.lingering = lingering
            self._forget(pod)
            self.orphans[pod.uid] = pod
            if over and self.hears_of_pods:
                self.end_pod(pod, None)
            self.changed.notify_all()


def _containers(limits: Mapping[str, int] | None, containers: Containers | None) -> list[ContainerSpec]:
    if limits is not None and containers is not None:
        raise ValueError("give limits or containers, not both")
    return container_specs(containers if containers is not None else {"main": {} if limits is None else limits})


def lacking(requests: Mapping[str, int], free: Mapping[str, int]) -> str:
    """Return the requests that exceed the free devices, such as "2 of example.com/fpga, 1 free"; "" if none does."""
    few = [(name, number, free.get(name, 0)) for name, number in requests.items()]
    return "; ".join(f"{number} of {name}, {left} free" for name, number, left in few if left < number)


def _damage(path: Path, damage: Damage) -> None:
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if damage == "unreadable":
        path.mkdir()
