"""The kubelet's device manager without its sockets: its state and its decisions.

A `DeviceManager` exists for one run of the kubelet; afterwards only the checkpoint file remains. The order of steps,
the use of the mutex, and the bugs are those of kubelet 1.36.3 (pkg/kubelet/cm/devicemanager/manager.go, endpoint.go,
pod_devices.go). The argument `lock` is the kubelet's mutex, which is never held during a call to a plugin.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Lock
from typing import Any, Final, Literal, NamedTuple, Protocol

from deviceplugin.testing.checkpoint import FILE_NAME, Checkpoint, PodDevicesEntry
from deviceplugin.testing.numa import Hint, TopologyPolicy, device_hints, merge
from deviceplugin.wire import deviceplugin_pb2 as pb

__all__ = [
    "AdmissionError",
    "Call",
    "ContainerOptions",
    "ContainerSpec",
    "DeviceManager",
    "DeviceState",
    "KubeletCrashError",
    "PluginCallError",
    "PluginEndpoint",
    "PodSpec",
]

WITHOUT_TOPOLOGY: Final = -1
PRE_START_TIMEOUT: Final = 30.0
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

Method = Literal["Allocate", "GetPreferredAllocation", "PreStartContainer"]


class AdmissionError(Exception):
    """Raised when the kubelet rejects a pod. reason: the reason in the pod's status."""

    def __init__(self, message: str, reason: str = "UnexpectedAdmissionError") -> None:
        super().__init__(message)
        self.reason = reason


class PluginCallError(Exception):
    """Raised when a call to a plugin fails."""


class KubeletCrashError(Exception):
    """Raised where a real kubelet would crash with a nil pointer dereference."""


class Call(Protocol):
    """A function that calls an endpoint's plugin."""

    def __call__(self, method: Method, request: Any, timeout: float | None = None) -> Any:
        """Send the request and return the response, or raise PluginCallError."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container in a pod's spec. limits: numbers of devices by resource.

    restartable: whether an init container keeps running beside the other containers (a sidecar). through_dra: resources
    in the limits whose devices come from the pod's extended resource claim. Admission ignores these resources, but the
    start of the container does not (kubelet 1.36.3). lasting: whether an init container runs until
    `FakePod.end_init_container`; otherwise it ends at once after its start.
    """

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    restartable: bool = False
    through_dra: Collection[str] = ()
    lasting: bool = False

    def __post_init__(self) -> None:
        numbers = isinstance(self.limits, Mapping) and all(type(number) is int for number in self.limits.values())
        if not numbers or not all(isinstance(name, str) for name in self.limits):
            raise TypeError(f"limits must be a dict such as {{'example.com/fpga': 1}}, not {self.limits!r}")


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The containers of a pod."""

    uid: str
    containers: Sequence[ContainerSpec]
    init_containers: Sequence[ContainerSpec] = ()


class DeviceState(NamedTuple):
    """A device as the kubelet counts it: "Healthy" or "Unhealthy", and its NUMA nodes."""

    health: str
    numa: tuple[int, ...]


@dataclass(slots=True)
class ContainerOptions:
    """The options that the runtime gets for a container's devices, for all resources together."""

    env: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For each path in the container, the host path and the permissions."""
    mounts: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """For each path in the container, the host path and whether the mount is read-only."""
    annotations: dict[str, str] = field(default_factory=dict)
    cdi: dict[str, None] = field(default_factory=dict)

    def add(self, response: pb.ContainerAllocateResponse) -> None:
        """Add the options in one resource's AllocateResponse.

        As in the kubelet, the added options do not replace existing options.
        """
        for key, value in response.envs.items():
            self.env.setdefault(key, value)
        for node in response.devices:
            self.nodes.setdefault(node.container_path, (node.host_path, node.permissions))
        for mount in response.mounts:
            self.mounts.setdefault(mount.container_path, (mount.host_path, mount.read_only))
        for key, value in response.annotations.items():
            self.annotations.setdefault(key, value)
        self.cdi.update(dict.fromkeys(device.name for device in response.cdi_devices))


class PluginEndpoint:
    """A plugin's registration for a resource; with `call` None, a registration known only from the checkpoint."""

    def __init__(
        self, resource: str, call: Call | None, options: pb.DevicePluginOptions | None, socket: str = ""
    ) -> None:
        self.resource = resource
        self.options = options
        self.socket = socket
        self.stopped_at: float | None = None if call else time.monotonic()
        self._call = call

    def allocate(self, ids: Sequence[str]) -> pb.AllocateResponse:
        """Send Allocate for these devices, without a deadline, as the kubelet does."""
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        response = self._send("Allocate", request)
        assert isinstance(response, pb.AllocateResponse)
        return response

    def prefer(self, available: Sequence[str], must_include: Sequence[str], size: int) -> set[str]:
        """Send GetPreferredAllocation; return the ids that the plugin prefers."""
        request = pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
                )
            ]
        )
        response = self._send("GetPreferredAllocation", request)
        return set(response.container_responses[0].deviceIDs) if response.container_responses else set()

    def pre_start(self, ids: Sequence[str]) -> None:
        """Call the plugin's PreStartContainer for these devices."""
        self._send("PreStartContainer", pb.PreStartContainerRequest(devices_ids=ids), PRE_START_TIMEOUT)

    def _send(self, method: Method, request: object, timeout: float | None = None) -> Any:
        if self.stopped_at is not None or self._call is None:
            raise PluginCallError(f"the endpoint of {self.resource} has stopped")
        return self._call(method, request, timeout)


@dataclass(frozen=True, slots=True)
class _ContainerAllocation:
    by_node: dict[int, list[str]]
    response: pb.ContainerAllocateResponse

    @property
    def ids(self) -> set[str]:
        return {device for ids in self.by_node.values() for device in ids}


class DeviceManager:
    """The device state of one run of the kubelet.

    lock: the kubelet's mutex. active_pods: returns the uids of pods that have not ended. seed: sets are iterated in
    random order as in Go, but one seed always gives the same order. by_socket: whether several plugins of one resource
    are distinguished by their sockets, as since kubelet 1.37 (kubernetes#135437).
    """

    def __init__(
        self,
        directory: Path,
        lock: Condition,
        active_pods: Callable[[], Collection[str]],
        *,
        numa_nodes: Sequence[int] = (0, 1),
        policy: TopologyPolicy = "none",
        stop_grace: float = 300.0,
        seed: int = 0,
        by_socket: bool = False,
    ) -> None:
        self.endpoints: dict[str, PluginEndpoint] = {}
        self._connected: dict[str, dict[str, PluginEndpoint]] = {}
        self._by_socket = by_socket
        self.sources_ready = False
        self.running_containers: frozenset[tuple[str, str]] = frozenset()
        """The (pod uid, container name) of each container that was running when this kubelet started."""
        self._path = directory / FILE_NAME
        self._lock = lock
        self._active_pods = active_pods
        self._numa_nodes = tuple(numa_nodes)
        self._policy: TopologyPolicy = policy
        self._stop_grace = stop_grace
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self._all: dict[str, dict[str, pb.Device]] = {}
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._allocated: dict[str, set[str]] = {}
        self._pods: dict[str, dict[str, dict[str, _ContainerAllocation]]] = {}
        self._reuse: dict[str, dict[str, set[str]]] = {}
        self._affinity: dict[tuple[str, str], frozenset[int] | None] = {}
        self._writing = Lock()
        self._version = self._written = 0
        self.hold_writes = 0
        """The number of following checkpoints whose content is computed, but whose write is delayed."""
        self.land_writes = False
        """Whether each further write puts the oldest delayed checkpoint into the file."""
        self._held_writes: list[Checkpoint] = []

    # Registration and lists of plugins.

    def connected(self, endpoint: PluginEndpoint) -> None:
        """Record a plugin's registration. The kubelet sends Allocate to the plugin that registered last.

        Raises:
            PluginCallError: a plugin is connected on the same socket already (kubelet 1.37).
        """
        with self._lock:
            if self._by_socket:
                connected = self._connected.setdefault(endpoint.resource, {})
                if endpoint.socket in connected:
                    raise PluginCallError(f"device plugin already connected: {endpoint.socket}")
                connected[endpoint.socket] = endpoint
            self.endpoints[endpoint.resource] = endpoint
            self._lock.notify_all()

    def disconnected(self, resource: str, socket: str = "") -> None:
        """Mark all devices of a resource as unhealthy, and its present endpoint as stopped.

        If plugins are distinguished by sockets, only the endpoint of `socket` stops. If the resource has another
        endpoint, this other endpoint replaces the stopped one, and the devices keep their health.
        """
        with self._lock:
            if self._by_socket:
                if (ended := self._connected.get(resource, {}).pop(socket, None)) is None:
                    return
                ended.stopped_at = time.monotonic()
                if others := list(self._connected[resource].values()):
                    self.endpoints[resource] = self._random.choice(others)
                    self._lock.notify_all()
                    return
            if endpoint := self.endpoints.get(resource):
                self._unhealthy.setdefault(resource, set()).update(self._healthy.get(resource, ()))
                if resource in self._healthy:
                    self._healthy[resource] = set()
                endpoint.stopped_at = time.monotonic()
                self._lock.notify_all()

    def update(self, resource: str, devices: Iterable[pb.Device]) -> None:
        """Replace the resource's devices by a plugin's list."""
        with self._lock:
            by_id = self._all[resource] = {device.ID: device for device in devices}
            self._healthy[resource] = {i for i, device in by_id.items() if device.health == HEALTHY}
            self._unhealthy[resource] = by_id.keys() - self._healthy[resource]
            self._lock.notify_all()
        with contextlib.suppress(OSError):  # The kubelet only logs this error.
            self.write_checkpoint()

    # The following methods return state that tests can read.

    def capacity(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the numbers of all and of healthy devices by resource. Forget resources whose grace period is over."""
        with self._lock:
            gone = set()
            capacity: dict[str, int] = {}
            allocatable: dict[str, int] = {}
            for resource in self._healthy.keys() | self._unhealthy.keys():
                endpoint = self.endpoints.get(resource)
                if endpoint is None or (
                    endpoint.stopped_at is not None and time.monotonic() - endpoint.stopped_at > self._stop_grace
                ):
                    gone.add(resource)
                    continue
                allocatable[resource] = len(self._healthy.get(resource, ()))
                capacity[resource] = allocatable[resource] + len(self._unhealthy.get(resource, ()))
            for resource in gone:
                for table in (self.endpoints, self._healthy, self._unhealthy):
                    table.pop(resource, None)
        if gone:
            with contextlib.suppress(OSError):
                self.write_checkpoint()
        return capacity, allocatable

    def devices(self, resource: str) -> dict[str, DeviceState]:
        """Return the present devices of a resource."""
        with self._lock:
            healthy = self._healthy.get(resource, set())
            return {
                i: DeviceState(HEALTHY if i in healthy else UNHEALTHY, _numa(self._all.get(resource, {}).get(i)))
                for i in sorted(healthy | self._unhealthy.get(resource, set()))
            }

    def allocatable_devices(self) -> dict[str, dict[str, pb.Device]]:
        """Return the healthy devices, in the form of PodResources."""
        with self._lock:
            return {
                resource: {i: device for i, device in self._all[resource].items() if i in healthy}
                for resource, healthy in self._healthy.items()
                if resource in self._all
            }

    def container_devices(self, uid: str, container: str) -> dict[str, dict[int, list[str]]]:
        """Return the ids of the devices that the kubelet has allocated to a container, by resource and NUMA node."""
        with self._lock:
            held = self._pods.get(uid, {}).get(container, {})
            return {r: {node: list(ids) for node, ids in a.by_node.items()} for r, a in held.items()}

    def health_of(self, uid: str, container: str) -> dict[str, dict[str, str]]:
        """Return the health of a container's devices, in the form of the pod's status.

        A device that the plugin no longer lists counts as healthy, and so do the devices of a plugin that ended without
        a last list.
        """
        with self._lock:
            result = {}
            for resource, allocation in self._pods.get(uid, {}).get(container, {}).items():
                devices = self._all.get(resource, {})
                result[resource] = {i: devices[i].health if i in devices else HEALTHY for i in sorted(allocation.ids)}
            return result

    def allocated(self, resource: str) -> set[str]:
        """Return the ids of a resource's devices that the kubelet counts as allocated."""
        with self._lock:
            return set(self._allocated.get(resource, ()))

    def is_plugin_resource(self, resource: str) -> bool:
        """Return whether the kubelet knows that a plugin has, or had, registered this resource."""
        with self._lock:
            return resource in self._healthy or resource in self._allocated

    def update_allocated(self) -> None:
        """Free the devices of pods that have ended.

        If such pods exist, the allocated ids are computed again from `podDevices`. An allocation in progress then loses
        the devices that it has chosen (kubernetes#137534).
        """
        with self._lock:
            if not self.sources_ready:
                return
            over = self._pods.keys() - set(self._active_pods())
            if over:
                for uid in over:
                    del self._pods[uid]
                self._allocated = self._held()

    # Allocation.

    def admit(self, pod: PodSpec) -> None:
        """Allocate devices for every container of a pod, init containers first.

        Raises:
            AdmissionError: the kubelet must reject the pod.
            KubeletCrashError: a real kubelet would crash now.
        """
        for container in (*pod.init_containers, *pod.containers):
            if self._policy != "none":
                self._align(pod, container)
            try:
                self.allocate(pod, container)
            except PluginCallError as error:
                raise AdmissionError(f"Allocate failed: {error}") from error

    def allocate(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Allocate devices for one container of a pod; `admit` calls this for each container."""
        with self._lock:
            reusable = self._reuse.setdefault(pod.uid, {})
            for uid in self._reuse.keys() - {pod.uid}:
                del self._reuse[uid]
        self._allocate(pod, container, reusable)
        with self._lock:
            is_init = any(container.name == c.name for c in pod.init_containers)
            for resource, allocation in self._pods.get(pod.uid, {}).get(container.name, {}).items():
                if is_init and not container.restartable:
                    reusable[resource] = reusable.get(resource, set()) | allocation.ids
                else:
                    reusable[resource] = reusable.get(resource, set()) - allocation.ids

    def run_options(self, pod: PodSpec, container: ContainerSpec) -> ContainerOptions:
        """Return the options with which a container starts.

        Calls PreStartContainer, and Allocate if it was never called.

        Raises:
            PluginCallError, AdmissionError: the container cannot start now; the kubelet tries again.
            KubeletCrashError: a real kubelet would crash now.
        """
        again = False
        for resource, number in container.limits.items():
            if not self.is_plugin_resource(resource) or number == 0:
                continue
            self._pre_start(pod.uid, container.name, resource)
            if pod.uid not in self._active_pods():
                continue
            again = again or self._ids(pod.uid, container.name, resource) is None
        if again:
            self.allocate(pod, container)
        options = ContainerOptions()
        with self._lock:
            for allocation in self._pods.get(pod.uid, {}).get(container.name, {}).values():
                options.add(allocation.response)
        return options

    def _allocate(self, pod: PodSpec, container: ContainerSpec, reusable: Mapping[str, set[str]]) -> None:
        collected = write = False
        for resource, number in container.limits.items():
            if resource in container.through_dra or not self.is_plugin_resource(resource):
                continue
            if not collected:
                self.update_allocated()
                collected = True
            chosen = self._choose(pod.uid, container.name, resource, number, reusable.get(resource, set()))
            if not chosen:
                continue
            write = True
            with self._lock:
                endpoint = self.endpoints.get(resource)
                if endpoint is None:
                    self._allocated = self._held()
                    raise AdmissionError(f"no plugin is known for {resource}")
            try:
                response = endpoint.allocate(self._shuffled(chosen))
            except PluginCallError:
                with self._lock:
                    self._allocated = self._held()
                raise
            if not response.container_responses:
                raise AdmissionError(f"the plugin of {resource} answered Allocate for no container")
            with self._lock:
                by_node: dict[int, list[str]] = {}
                for device in sorted(chosen):
                    for node in _numa(self._device(resource, device)) or (WITHOUT_TOPOLOGY,):
                        by_node.setdefault(node, []).append(device)
                held = self._pods.setdefault(pod.uid, {}).setdefault(container.name, {})
                held[resource] = _ContainerAllocation(by_node, response.container_responses[0])
                self._lock.notify_all()
        if write:
            try:
                self.write_checkpoint()
            except OSError as error:
                raise AdmissionError(f"failed to write checkpoint file: {error}") from error

    def _choose(self, uid: str, container: str, resource: str, required: int, reusable: set[str]) -> set[str]:
        chosen: set[str] = set()

        def take(devices: Iterable[str]) -> bool:
            taken = self._allocated.setdefault(resource, set())
            for device in self._shuffled(set(devices) - chosen):
                taken.add(device)
                chosen.add(device)
                if len(chosen) == required:
                    return True
            return False

        with self._lock:
            before = self._ids(uid, container, resource)
            if before is not None and len(before) != required:
                raise AdmissionError(f"{container} held {len(before)} of {resource} and now wants {required}")
            if not self.sources_ready and (uid, container) in self.running_containers:
                return set()
            if resource not in self._healthy:
                raise AdmissionError(f"{resource} is not registered")
            if not self._healthy[resource]:
                raise AdmissionError(f"{resource} has no healthy devices")
            if before is not None and not self._healthy[resource] >= before:
                raise AdmissionError(f"{container} held devices of {resource} that are no longer healthy")
            if before is not None or required == 0:
                return set()
            if take(reusable):
                return chosen
            needed = required - len(chosen)
            available = self._healthy[resource] - self._allocated.get(resource, set())
            if len(available) < needed:
                raise AdmissionError(f"{needed} of {resource} are needed, {len(available)} are free")
            aligned, unaligned, unplaced = self._by_affinity(uid, container, resource, available)
            if needed < len(aligned):
                candidates, fallbacks, asked = aligned, [aligned], aligned | chosen
            else:
                if take(aligned):
                    return chosen
                candidates, fallbacks, asked = available, [unaligned, unplaced], available | chosen
            endpoint = self.endpoints.get(resource)
            if endpoint is None:
                raise AdmissionError(f"no plugin is known for {resource}")
            must_include = self._shuffled(chosen)
            asked_in_order = self._shuffled(asked)
        preferred: set[str] = set()
        if endpoint.options is not None and endpoint.options.get_preferred_allocation_available:
            preferred = endpoint.prefer(asked_in_order, must_include, required)
        with self._lock:
            for devices in (preferred & candidates, *fallbacks):
                if take(devices):
                    return chosen
        raise AdmissionError(f"{required} of {resource} are needed, {len(chosen)} were found")

    def _by_affinity(
        self, uid: str, container: str, resource: str, available: set[str]
    ) -> tuple[set[str], set[str], set[str]]:
        affinity = self._affinity.get((uid, container))
        if affinity is None or not any(_numa(device) for device in self._all.get(resource, {}).values()):
            return set(), set(), set(available)
        places = {device: _numa(self._device(resource, device)) for device in available}
        aligned = {device for device, near in places.items() if not affinity.isdisjoint(near)}
        unplaced = {device for device, near in places.items() if not near}
        return aligned, available - aligned - unplaced, unplaced

    def _align(self, pod: PodSpec, container: ContainerSpec) -> None:
        self.update_allocated()
        hints: list[Sequence[Hint] | None] = []
        with self._lock:
            for resource, number in container.limits.items():
                if not self.is_plugin_resource(resource):
                    continue
                devices = {i: _numa(device) for i, device in self._all.get(resource, {}).items()}
                held = self._ids(pod.uid, container.name, resource)
                reusable = self._reuse.get(pod.uid, {}).get(resource, set())
                available = self._healthy.get(resource, set()) - self._allocated.get(resource, set())
                if held:
                    available, reusable = held, set()
                for device in available | reusable if any(devices.values()) else ():
                    self._device(resource, device)
                hints.append(device_hints(devices, available, reusable, number, self._numa_nodes))
            nodes, fits = merge(self._policy, hints, self._numa_nodes)
            if not fits:
                raise AdmissionError(f"{container.name} does not fit the NUMA nodes", "TopologyAffinityError")
            self._affinity[pod.uid, container.name] = nodes

    def _pre_start(self, uid: str, container: str, resource: str) -> None:
        with self._lock:
            endpoint = self.endpoints.get(resource)
            if endpoint is None:
                raise PluginCallError(f"no plugin is known for {resource}")
            if endpoint.options is None or not endpoint.options.pre_start_required:
                return
            ids = self._ids(uid, container, resource)
            if ids is None:
                raise PluginCallError(f"{container} holds no devices of {resource}")
            ordered = self._shuffled(ids)
        endpoint.pre_start(ordered)

    def _device(self, resource: str, device: str) -> pb.Device:
        try:
            return self._all.get(resource, {})[device]
        except KeyError:
            raise KubeletCrashError(
                f"device {device!r} of {resource} left the plugin's list while the kubelet was giving it away"
            ) from None

    def _ids(self, uid: str, container: str, resource: str) -> set[str] | None:
        with self._lock:
            allocation = self._pods.get(uid, {}).get(container, {}).get(resource)
            return None if allocation is None else allocation.ids

    def _held(self) -> dict[str, set[str]]:
        held: dict[str, set[str]] = {}
        for containers in self._pods.values():
            for resources in containers.values():
                for resource, allocation in resources.items():
                    held.setdefault(resource, set()).update(allocation.ids)
        return held

    def _shuffled(self, devices: Iterable[str]) -> list[str]:
        ordered = sorted(devices)
        self._random.shuffle(ordered)
        return ordered

    # The checkpoint.

    def write_checkpoint(self) -> None:
        """Write the checkpoint: which containers hold which devices, and which devices are healthy.

        Raises:
            OSError: the file cannot be replaced.
        """
        with self._lock:
            self._version += 1
            version = self._version
            entries = [
                PodDevicesEntry(uid, container, resource, allocation.by_node, allocation.response.SerializeToString())
                for uid, containers in self._pods.items()
                for container, resources in containers.items()
                for resource, allocation in resources.items()
            ]
            registered = {resource: sorted(healthy) for resource, healthy in self._healthy.items()}
            checkpoint = Checkpoint(entries or None, registered)
            late = self.hold_writes > 0
            self.hold_writes -= late
        # While it holds `_writing`, a thread must not wait for the kubelet's mutex: the mutex's holder may wait for
        # `_writing`.
        with self._writing:
            if late:
                self._held_writes.append(checkpoint)
            elif version > self._written:
                # Write only the delayed checkpoint: no reader can see the newer file between the kubelet's two renames.
                overtaken = self.land_writes and self._held_writes
                (self._held_writes.pop(0) if overtaken else checkpoint).write(self._path)
                self._written = version
        with self._lock:
            self._lock.notify_all()  # A waiter's condition may depend on the file.

    def read_checkpoint(self) -> None:
        """Read the last run's checkpoint. The resources in it are restored without devices and with stopped endpoints.

        Raises:
            ValueError, OSError: the file is damaged or cannot be read; the kubelet continues without it.
        """
        try:
            blob = self._path.read_bytes()
        except FileNotFoundError:
            return
        checkpoint = Checkpoint.from_json(blob)
        with self._lock:
            for entry in checkpoint.entries or ():
                by_node = {node: list(ids or ()) for node, ids in (entry.device_ids or {}).items()}
                response = pb.ContainerAllocateResponse.FromString(entry.alloc_resp or b"")
                held = self._pods.setdefault(entry.pod_uid, {}).setdefault(entry.container, {})
                held[entry.resource] = _ContainerAllocation(by_node, response)
            self._allocated = self._held()
            for resource in checkpoint.registered or {}:
                self._healthy[resource] = set()
                self._unhealthy[resource] = set()
                self.endpoints[resource] = PluginEndpoint(resource, None, None)


def _numa(device: pb.Device | None) -> tuple[int, ...]:
    return () if device is None else tuple(node.ID for node in device.topology.nodes)
