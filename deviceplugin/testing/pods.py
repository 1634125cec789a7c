"""The pods and containers of the fake kubelet, as objects that tests read and change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from deviceplugin.testing.devicemanager import ContainerOptions, ContainerSpec, KubeletCrashError, PodSpec

__all__ = ["ContainerMount", "ContainerNode", "FakeContainer", "FakePod", "Lingering", "PodFailedError"]

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed"]
ContainerState = Literal["waiting", "running", "terminated"]
Lingering = Literal["", "grace", "hang"]
"""Why containers of a removed pod still run: "grace" (their grace period) or "hang" (the container runtime hangs)."""
Containers = Mapping[str, Mapping[str, int]] | Sequence[ContainerSpec]
"""The containers of a pod: their limits by container name, or their complete specs."""


class PodFailedError(Exception):
    """Raised when a pod has failed instead of running."""


class ContainerNode(NamedTuple):
    """A device node that a container got."""

    host: str
    container: str
    permissions: str


class ContainerMount(NamedTuple):
    """A mount that a container got."""

    host: str
    container: str
    readonly: bool


class FakeContainer:
    """A container: the options of its last start, and the times of its starts.

    state: "waiting" before its first start, "terminated" after its end. message: why the container does not start.
    starts: times by the monotonic clock. id: the container runtime's id, a new one at each start; "" before the first
    start. log_links: the kubelet's symbolic links to the logs of the last starts.
    """

    def __init__(self, spec: ContainerSpec, *, init: bool) -> None:
        self.spec = spec
        self.init = init
        self.state: ContainerState = "waiting"
        self.id = ""
        self.message = ""
        self.starts: list[float] = []
        self.log_links: list[Path] = []
        self.devices: dict[str, tuple[str, ...]] = {}
        self.env: dict[str, str] = {}
        self.nodes: tuple[ContainerNode, ...] = ()
        self.mounts: tuple[ContainerMount, ...] = ()
        self.annotations: dict[str, str] = {}
        self.cdi_devices: tuple[str, ...] = ()
        self.held_down = False

    def __repr__(self) -> str:
        return f"<FakeContainer {self.name} {self.state}{': ' + self.message if self.message else ''}>"

    @property
    def name(self) -> str:
        """The container's name in the pod."""
        return self.spec.name

    @property
    def restarts(self) -> int:
        """The number of the container's starts after its first."""
        return max(0, len(self.starts) - 1)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The ids of the container's devices, of all resources."""
        return tuple(device for ids in self.devices.values() for device in ids)

    @property
    def stays(self) -> bool:
        """Whether this container runs as long as its pod: true for app containers and sidecars."""
        return not self.init or self.spec.restartable

    def started(self, options: ContainerOptions, devices: Mapping[str, Iterable[str]]) -> None:
        """Record a start of the container. The fake kubelet calls this method."""
        self.devices = {resource: tuple(sorted(ids)) for resource, ids in devices.items()}
        self.env = dict(options.env)
        self.nodes = tuple(ContainerNode(host, path, rights) for path, (host, rights) in options.nodes.items())
        self.mounts = tuple(ContainerMount(host, path, readonly) for path, (host, readonly) in options.mounts.items())
        self.annotations = dict(options.annotations)
        self.cdi_devices = tuple(options.cdi)
        self.message = ""
        self.starts.append(time.monotonic())
        self.state = "running" if self.stays or self.spec.lasting else "terminated"


class Node(Protocol):
    """The methods of the fake kubelet that its pods call."""

    changed: threading.Condition

    @property
    def hears_of_pods(self) -> bool:
        """Whether the kubelet runs and receives its pods from the API server."""

    def drop(self, pod: FakePod) -> None:
        """Remove a pod that is marked for deletion, if none of its processes runs."""

    def remove_pod(self, pod: FakePod, lingering: Lingering) -> None:
        """Remove a pod from the kubelet's list, even if its processes run."""

    def end_container(self, pod: FakePod, container: FakeContainer) -> None:
        """End a container's process."""

    def withheld(self, resources: Collection[str]) -> str:
        """Return which devices of these resources are not offered and why, for messages; "" if there are none."""


class FakePod:
    """A pod on the fake node.

    phase, reason and message are those of a pod's status. bound: whether the scheduler bound the pod to this node.
    waits_for: the requests of an unbound pod for which too few devices are free. A pod stays in the kubelet's `pods`
    until it is deleted. sandbox: the id of the pod's running sandbox, otherwise "". static: whether the pod comes from
    a manifest on the node. lingering: why the pod's containers still run although the pod is deleted. gone: whether the
    node has no process and no file of the pod any more.
    """

    def __init__(
        self,
        uid: str,
        name: str,
        namespace: str,
        containers: Sequence[ContainerSpec],
        init_containers: Sequence[ContainerSpec],
        node: Node,
    ) -> None:
        self.uid = uid
        self.name = name
        self.namespace = namespace
        self.spec = PodSpec(uid, tuple(containers), tuple(init_containers))
        self.init_containers = {spec.name: FakeContainer(spec, init=True) for spec in init_containers}
        self.containers = {spec.name: FakeContainer(spec, init=False) for spec in containers}
        self.phase: PodPhase = "Pending"
        self.reason = ""
        self.message = ""
        self.bound = False
        self.waits_for = ""
        self.sandbox = ""
        self.static = False
        self.lingering: Lingering = ""
        self.gone = False
        self.deleting = False
        self.deleted = False
        self.completing: PodPhase | None = None
        self.crash: KubeletCrashError | None = None
        self.created = time.monotonic()
        self._node = node
        self._changed = node.changed

    def __repr__(self) -> str:
        why = f" {self.reason}: {self.message}" if self.reason else ""
        if not self.bound and self.waits_for:
            why = f"; it waits for {self.waits_for}{self._node.withheld(self.requests)}"
        return f"<FakePod {self.namespace}/{self.name} {self.phase}{why} {list(self.all_containers.values())}>"

    @property
    def all_containers(self) -> dict[str, FakeContainer]:
        """Init containers and containers, by name."""
        return {**self.init_containers, **self.containers}

    @property
    def terminal(self) -> bool:
        """Whether the pod is deleted, Succeeded or Failed."""
        return self.deleted or self.phase in ("Succeeded", "Failed")

    @property
    def running(self) -> bool:
        """Whether the pod and all its containers run."""
        return self.phase == "Running" and all(c.state == "running" for c in self.containers.values())

    @property
    def requests(self) -> dict[str, int]:
        """The numbers of devices that the scheduler counts for the pod, by resource.

        Later containers reuse the devices of init containers that end before them.
        """
        lasting: dict[str, int] = {}
        peak: dict[str, int] = {}
        for container in self.all_containers.values():
            for resource, number in container.spec.limits.items():
                if container.stays:
                    lasting[resource] = lasting.get(resource, 0) + number
                else:
                    peak[resource] = max(peak.get(resource, 0), lasting.get(resource, 0) + number)
        return {r: max(lasting.get(r, 0), peak.get(r, 0)) for r in lasting.keys() | peak.keys()}

    def container(self, name: str | None = None) -> FakeContainer:
        """Return the pod's container with this name; without a name, the first container."""
        return self.all_containers[name] if name else next(iter(self.containers.values()))

    @property
    def devices(self) -> dict[str, tuple[str, ...]]:
        """The device ids of the first container, by resource."""
        return self.container().devices

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The device ids of the first container."""
        return self.container().device_ids

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that plugins set in the first container."""
        return self.container().env

    @property
    def nodes(self) -> tuple[ContainerNode, ...]:
        """The device nodes of the first container."""
        return self.container().nodes

    @property
    def mounts(self) -> tuple[ContainerMount, ...]:
        """The mounts that plugins gave to the first container."""
        return self.container().mounts

    def wait_running(self, timeout: float = 30.0) -> FakePod:
        """Wait until all containers of the pod run.

        Raises:
            PodFailedError: the pod failed or ended first.
            KubeletCrashError: the pod's admission would have crashed the kubelet.
            TimeoutError: the pod does not run in time.
        """
        self._wait(lambda: self.running or self.terminal, timeout, "to run")
        self.raise_crash()
        if not self.running:
            raise PodFailedError(f"{self!r} ended before it ran")
        return self

    def wait_phase(self, phase: PodPhase, timeout: float = 30.0) -> FakePod:
        """Wait until the pod is in this phase."""
        self._wait(lambda: self.phase == phase, timeout, f"to be {phase}")
        return self

    def delete(self, timeout: float = 30.0) -> None:
        """End the pod and remove it from the node. While the kubelet is down, only mark the pod for deletion."""
        with self._changed:
            self.deleting = True
            self._node.drop(self)
            self._changed.notify_all()
        self._wait(lambda: self.gone or not self._node.hears_of_pods, timeout, "to be gone")

    def force_delete(self, *, hang: bool = False, timeout: float = 30.0) -> None:
        """Delete the pod with a grace period of 0, as `kubectl delete --force` does.

        For the kubelet the pod is gone at once (Kubelet.HandlePodRemoves, kubelet 1.36.3): PodResources List omits it,
        and UpdateAllocatedDevices frees its devices, even if its processes still run (kubernetes#104824). The kubelet
        then kills the pod's containers. hang: whether the container runtime delays their end until `end_containers`.
        """
        self._node.remove_pod(self, "hang" if hang else "")
        if not hang:
            self._wait(lambda: self.gone or not self._node.hears_of_pods, timeout, "to be gone")

    def remove_manifest(self) -> None:
        """Remove a static pod's manifest.

        For the kubelet the pod is gone at once, as after `force_delete`. The pod's containers still run for their grace
        period, which ends when `end_containers` is called.
        """
        if not self.static:
            raise ValueError(f"{self!r} has no manifest")
        self._node.remove_pod(self, "grace")

    def end_containers(self, timeout: float = 30.0) -> None:
        """End the containers that still run after `force_delete` or `remove_manifest`."""
        with self._changed:
            self.lingering = ""
            self._changed.notify_all()
        self._wait(lambda: self.gone or not self._node.hears_of_pods, timeout, "to be gone")

    def end_init_container(self, name: str, timeout: float = 30.0) -> None:
        """End an init container whose spec is `lasting`, and wait until the pod's containers run."""
        container = self.init_containers[name]
        with self._changed:
            self._node.end_container(self, container)
            self._changed.notify_all()
        self._wait(lambda: self.running or self.terminal or not self._node.hears_of_pods, timeout, "to run")

    def complete(self, phase: Literal["Succeeded", "Failed"] = "Succeeded", timeout: float = 30.0) -> None:
        """End the pod's containers as if they had exited. The pod's devices become free; the pod object stays.

        While the kubelet is down, the pod's sandbox stays. A kubelet that starts admits the pod again, and fails it if
        its devices belong to a plugin that has not registered yet (ManagerImpl.devicesToAllocate, 1.36.3).
        """
        with self._changed:
            self.completing = phase
            for container in self.containers.values():
                if container.state == "running":
                    self._node.end_container(self, container)
            self._changed.notify_all()
        self._wait(lambda: self.terminal or not self._node.hears_of_pods, timeout, "to end")

    def restart_container(self, name: str | None = None, timeout: float = 30.0) -> None:
        """End a container and wait until it runs again. The kubelet calls PreStartContainer, but not Allocate."""
        container = self.container(name)
        with self._changed:
            before = len(container.starts)
            container.held_down = False
            self._node.end_container(self, container)
            self._changed.notify_all()
        self._wait(lambda: len(container.starts) > before or self.terminal, timeout, f"to restart {container.name}")
        if self.terminal:
            raise PodFailedError(f"{self!r} ended before {container.name} ran again")

    def crash_container(self, name: str | None = None) -> None:
        """End a container, and keep it from starting, as in a crash loop, until `restart_container`."""
        with self._changed:
            container = self.container(name)
            container.held_down = True
            self._node.end_container(self, container)
            self._changed.notify_all()

    def raise_crash(self) -> None:
        """Raise KubeletCrashError if the pod's admission would have crashed a real kubelet."""
        if self.crash is not None:
            raise self.crash

    def _wait(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(done, timeout):
                raise TimeoutError(f"waited {timeout} s for {self!r} {what}")


def container_specs(containers: Containers | None) -> list[ContainerSpec]:
    """Return the complete specs of containers."""
    if isinstance(containers, Mapping):
        return [ContainerSpec(name, limits) for name, limits in containers.items()]
    return list(containers or ())
