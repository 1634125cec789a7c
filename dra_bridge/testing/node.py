"""A fake node for tests: a kubelet for device plugins and DRA drivers, a scheduler, and the claims of the pods.

    with FakeApiServer() as server, FakeNode(server, "n1") as node, serve_both(Gpus(), node, share="all"):
        pod = node.start_pod("train", {"example.com/gpu": 1}).wait_running()
        other = node.start_pod("infer", template={"gpu.example.com": 1}).wait_running()
        assert not overlaps(node.holdings())

`deviceplugin.testing.FakeKubelet` calls device plugins, `FakeDraKubelet` calls DRA drivers, and
`dra_bridge.testing.scheduler` allocates claims. The scheduler uses changed ResourceSlices at once, and changed
allocatable numbers at once unless there is a `status_period`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deviceplugin.device import ContainerEdits, DeviceNode, Mount
from deviceplugin.naming import published_names
from deviceplugin.testing.devicemanager import ContainerSpec, PluginCallError, PodSpec
from deviceplugin.testing.kubelet import FakeKubelet, lacking
from deviceplugin.testing.pods import Containers, FakeContainer, FakePod, Lingering
from deviceplugin.wire import podresources_pb2 as pr
from dra_bridge.kube.api import Object
from dra_bridge.rollout import fleet, progress
from dra_bridge.testing import scheduler
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.kubelet import FakeDraKubelet, FakeDraPod, PodError

__all__ = ["FakeNode", "Holding", "overlaps"]

_EXTENDED: Final = "extended-resources"


@dataclass(frozen=True, slots=True)
class Holding:
    """The time in which a container had a device (monotonic seconds). end: None while the container has the device.

    side: "plugin" or "claim", by which the container got the device. uid: the pod's UID, because two pods of one name
    can run at once if one was deleted by force.
    """

    device: str
    pod: str
    side: str
    begin: float
    end: float | None = None
    uid: str = ""


def overlaps(holdings: Iterable[Holding]) -> list[tuple[Holding, Holding]]:
    """Return all pairs of holdings in which two pods had the same device at the same time."""
    pairs = []
    by_device: dict[str, list[Holding]] = {}
    for holding in sorted(holdings, key=lambda holding: holding.begin):
        pairs += [
            (other, holding)
            for other in by_device.get(holding.device, ())
            if (other.pod, other.uid) != (holding.pod, holding.uid) and (other.end is None or holding.begin < other.end)
        ]
        by_device.setdefault(holding.device, []).append(holding)
    return pairs


@dataclass(slots=True)
class _Wants:
    """The claims that a pod requests: names of claims, and devices by DeviceClass for a claim made for the pod.

    made: names of the claims that were made for the pod. given: published names of the devices that the pod's
    containers got through claims. held: the pod's holdings from the end of its containers until the end of the pod.
    """

    claims: tuple[str, ...] = ()
    template: Mapping[str, int] | None = None
    made: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    held: list[Holding] | None = None


class FakeNode(FakeKubelet):
    """A fake node for device plugins and DRA drivers. Its start creates the Node object if there is none.

    Args:
        server: the API server.
        name: the node's name.
        root: stands for /var/lib/kubelet; None creates a directory that `close` removes.
        status_period: seconds between two reports of the Node's status, which the scheduler uses (10 on a real node);
            None: the scheduler knows the kubelet's numbers at once.
        socket_period: seconds between two scans for sockets of DRA drivers.
        options: further options of FakeKubelet.
    """

    def __init__(
        self,
        server: FakeApiServer,
        name: str = "node",
        root: Path | None = None,
        *,
        status_period: float | None = None,
        socket_period: float = 0.02,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self._status_period = status_period
        self.server = server
        self.name = name
        self.dra = FakeDraKubelet(self.root, self._get_claim, period=socket_period, wipe=self._wipe)
        self._wants: dict[str, _Wants] = {}
        self._wants_of_orphans: dict[str, _Wants] = {}
        self._past: list[Holding] = []
        self._recorded: set[str] = set()
        self._unwiped: set[str] = set()
        self._over = threading.Event()
        self._watch: threading.Thread | None = None

    def start(self, *, wipe: bool = True) -> None:
        """Start the kubelet. It deletes all ResourceSlices of the node, as a real kubelet does at every start."""
        try:
            self.server.get("nodes", self.name)
        except KeyError:
            self.server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}})
        super().start(wipe=wipe)
        self.dra.start()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._follow, args=(self._over,), name="fake scheduler", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """Stop the kubelet. The containers continue to run."""
        if self.is_up:
            self._over.set()
            self.dra.stop()
        super().stop()
        if self._watch is not None:
            self._watch.join(10)
            self._watch = None

    @property
    def cdi(self) -> Path:
        """The directory of CDI files, for a driver of this node."""
        return self.root / "cdi"

    # Pods and claims.

    def claim(
        self,
        name: str,
        device_class: str,
        count: int = 1,
        *,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        selectors: Sequence[str] = (),
        namespace: str = "default",
    ) -> Object:
        """Create a ResourceClaim for devices of a class.

        parameters: for each driver, the `config` that its `prepare` hook gets. selectors: CEL expressions that each
        device satisfies, such as 'device.attributes["fpga.example.com"].family == "Arc"'. Raises UnknownSelectorError
        for a selector that the fake scheduler does not support; the message lists the supported selectors.
        """
        if isinstance(selectors, str):
            raise TypeError(f"selectors must be CEL expressions such as [{selectors!r}], not a string")
        for driver, said in (parameters or {}).items():
            if not isinstance(said, Mapping):
                raise TypeError(
                    f"parameters must be by driver such as {{'fpga.example.com': {{...}}}}, not {driver!r}: {said!r}"
                )
        body = _claim(name, namespace, {device_class: count})
        (request,) = body["spec"]["devices"]["requests"]
        request["exactly"]["selectors"] = [{"cel": {"expression": expression}} for expression in selectors]
        scheduler.check(body)
        if parameters:
            opaque = [{"driver": driver, "parameters": dict(said)} for driver, said in parameters.items()]
            body["spec"]["devices"]["config"] = [{"opaque": configuration} for configuration in opaque]
        return self.server.create(body)

    def start_pod(
        self,
        name: str,
        limits: Mapping[str, int] | None = None,
        *,
        containers: Containers | None = None,
        init_containers: Containers | None = None,
        namespace: str = "default",
        claims: Sequence[str] = (),
        template: Mapping[str, int] | None = None,
        uid: str = "",
    ) -> FakePod:
        """Create a pod. It stays Pending until its requested devices are free.

        claims: names of ResourceClaims. template: number of devices by DeviceClass, for a claim that is created and
        deleted with the pod. Each container of the pod gets all devices of its claims. uid: the pod's UID; "" for a new
        one.
        """
        if isinstance(claims, str):
            raise TypeError(f"claims must be names of ResourceClaims such as [{claims!r}], not the string {claims!r}")
        if template is not None and not isinstance(template, Mapping):
            raise TypeError(f"template must be numbers by DeviceClass such as {{{template!r}: 1}}, not {template!r}")
        for claim in filter(None, (self._get_claim(namespace, one) for one in claims)):
            scheduler.check(claim)
        with self.changed:
            self._wants[f"{namespace}/{name}"] = _Wants(tuple(claims), template)
            return super().start_pod(
                name, limits, containers=containers, init_containers=init_containers, namespace=namespace, uid=uid
            )

    def claims_of(self, pod: FakePod) -> tuple[str, ...]:
        """Return the names of a pod's claims, including claims that were made for the pod."""
        wants = self._wants_of(pod)
        return (*wants.claims, *wants.made)

    def devices_of(self, pod: FakePod) -> dict[str, str]:
        """Return, for each device id of a running pod, how the pod got the device: "plugin" or "claim"."""
        devices = {device: "plugin" for container in _lasting(pod) for device in container.device_ids}
        ids = self._ids()
        return {**devices, **{ids.get(name, name): "claim" for name in self._wants_of(pod).given}}

    def _ids(self) -> dict[str, str]:
        """Return, for each published name in ResourceSlices, the device id, from the node's Lease."""
        leases = [body for body in self.server.objects("leases") if body["metadata"]["name"] == self.name]
        ids: dict[str, str] = {}
        for driver in fleet.drivers_of((), leases):
            if (reported := progress.read(driver, leases)) is not None:
                devices = {resource: one.devices for resource, one in reported.resources.items()}
                names = published_names(reported.qualifiers, devices)
                ids |= {name: device for name, (_, device) in names.items()}
        return ids

    def edits_of(self, pod: FakePod, container: str | None = None) -> ContainerEdits:
        """Return the CDI edits (such as device nodes) that a container got from plugins and from its claims' files.

        container: the container's name; None for the pod's first container.
        """
        got = pod.container(container)
        by_id = {}
        for file in self.cdi.glob("*.json"):
            spec = json.loads(file.read_bytes())
            by_id.update({f"{spec['kind']}={device['name']}": device["containerEdits"] for device in spec["devices"]})
        named = [name for name in got.cdi_devices if name in by_id]
        listed = ContainerEdits(
            dict(got.env),
            [DeviceNode(*node) for node in got.nodes],
            [Mount(*mount) for mount in got.mounts],
            dict(got.annotations),
            [name for name in got.cdi_devices if name not in by_id],
        )
        return ContainerEdits.merge([listed, *(_edits(by_id[name]) for name in named)])

    def holdings(self) -> list[Holding]:
        """Return all past and present holdings, sorted by when they began."""
        with self.changed:
            pods = [pod for pod in (*self.pods.values(), *self.orphans.values()) if pod.uid not in self._recorded]
            now = [holding for pod in pods for holding in self._held(pod, None)]
            return sorted([*self._past, *now], key=lambda holding: holding.begin)

    def _held(self, pod: FakePod, end: float | None) -> list[Holding]:
        wants = self._wants_of(pod)
        if wants.held is not None:
            return [replace(holding, end=end) for holding in wants.held]
        starts = [container.starts[0] for container in _lasting(pod) if container.starts]
        if not starts:
            return []
        return [Holding(name, pod.name, side, min(starts), end, pod.uid) for name, side in self.devices_of(pod).items()]

    # What the kubelet does with claims.

    def prepare_pod(self, pod: FakePod) -> None:
        """Prepare a pod's claims. Raises PluginCallError, so that the pod's start is tried again."""
        try:
            self.dra.prepare_pod(self._dra_pod(pod))
        except PodError as error:
            raise PluginCallError(str(error)) from error

    def unprepare_pod(self, pod: FakePod) -> None:
        """Unprepare a pod's claims; try again after each failure, until the kubelet stops."""
        with self.changed:
            wants = self._wants_of(pod)
            wants.held = self._held(pod, None)
        while not self._over.is_set():
            try:
                self.dra.unprepare_pod(self._dra_pod(pod))
            except PodError:
                self._over.wait(self.start_backoff)
            else:
                return

    def end_pod(self, pod: FakePod, status: tuple[str, str, str] | None) -> None:
        """End a pod and release its claims."""
        with self.changed:
            if pod.uid not in self._recorded:
                # Record the end of the holdings before `_give_back`, because afterwards another pod can get the
                # devices.
                self._past += self._held(pod, time.monotonic())
                self._recorded.add(pod.uid)
            if pod.uid not in self.orphans:
                self._give_back(pod)
                self._wants.pop(f"{pod.namespace}/{pod.name}", None)
            super().end_pod(pod, status)

    def remove_pod(self, pod: FakePod, lingering: Lingering) -> None:
        """Remove a pod from the kubelet's list, even if its processes run. The pod's claims are released at once."""
        with self.changed:
            self._wants_of_orphans[pod.uid] = self._wants.pop(f"{pod.namespace}/{pod.name}", _Wants())
            self._give_back(pod)
            super().remove_pod(pod, lingering)

    def end_container(self, pod: FakePod, container: FakeContainer) -> None:
        """End a container's process. Record the holdings of an ordinary init container, which end with the process."""
        with self.changed:
            if container.init and not container.stays and container.state == "running":
                ids = container.device_ids
                self._past += [
                    Holding(device_id, pod.name, "plugin", container.starts[-1], time.monotonic(), pod.uid)
                    for device_id in ids
                ]
            super().end_container(pod, container)

    def reconcile_claims(self) -> None:
        """Unprepare the claims of pods that are not active, as a kubelet with ready sources does every 60 s."""
        run = self._up()
        if run.manager.sources_ready:
            self.dra.reconcile_claims({pod.uid for pod in run.active_pods()})

    def remove_claim(self, name: str, namespace: str = "default") -> None:
        """Delete a claim in use, as if its finalizers were removed. The kubelet's claim state still names the claim."""
        self.server.delete("resourceclaims", name, namespace)

    def start_container(self, pod: FakePod, container: FakeContainer) -> None:
        """Start a container's process. Record the devices of its claims, because the kubelet may forget the claims."""
        with self.changed:
            infos = [self.dra.claim(pod.namespace, claim) for claim in self.claims_of(pod)]
            listed = [devices for info in infos if info is not None for devices in info.drivers.values()]
            wants = self._wants_of(pod)
            wants.given |= {answered.device for devices in listed for answered in devices}
            super().start_container(pod, container)

    def cdi_devices(self, pod: FakePod, container: FakeContainer) -> Sequence[str]:
        """Return the CDI devices that a container gets from its claims."""
        return self.dra.cdi_ids(self._dra_pod(pod), container.name) if self.claims_of(pod) else ()

    def dynamic_resources(self, pod: FakePod, container: FakeContainer) -> Sequence[pr.DynamicResource]:
        """Return the entries of PodResources for a container's claims."""
        resources_of_claims = []
        for claim in self.claims_of(pod):
            info = self.dra.claim(pod.namespace, claim)
            if info is None:
                continue
            resources = [
                pr.ClaimResource(
                    driver_name=driver,
                    pool_name=answered.pool,
                    device_name=answered.device,
                    cdi_devices=[pr.CDIDevice(name=name) for name in answered.cdi_ids],
                )
                for driver, listed in info.drivers.items()
                for answered in listed
            ]
            resources_of_claims.append(
                pr.DynamicResource(claim_name=claim, claim_namespace=pod.namespace, claim_resources=resources)
            )
        return resources_of_claims

    def _dra_pod(self, pod: FakePod) -> FakeDraPod:
        claims = self.claims_of(pod)
        everything = [(claim, "") for claim in claims]
        return FakeDraPod(pod.name, pod.uid, claims, dict.fromkeys(pod.all_containers, everything), pod.namespace)

    def _get_claim(self, namespace: str, name: str) -> Object | None:
        try:
            return self.server.get("resourceclaims", name, namespace)
        except KeyError:
            return None

    def release_sources(self) -> None:
        """Let the kubelet reach the API server again, and delete the ResourceSlices that it could not delete before."""
        super().release_sources()
        while self._unwiped:
            self._wipe(self._unwiped.pop())

    def _wipe(self, driver: str) -> None:
        if self.sources_held:
            self._unwiped.add(driver)
            return
        for body in self.server.objects():
            if body["spec"].get("nodeName") == self.name and driver in ("", body["spec"]["driver"]):
                with contextlib.suppress(Exception):  # Another program may have deleted the slice.
                    self.server.delete("resourceslices", body["metadata"]["name"])

    # The scheduler.

    def _follow(self, over: threading.Event) -> None:
        seen, due = -1, 0.0
        while not over.is_set():
            if self._status_period is not None and time.monotonic() >= due:
                self.report()
                due = time.monotonic() + self._status_period
            seen = self.server.wait_changed(seen, 0.2)
            self.schedule()

    def report(self) -> None:
        """Write the kubelet's capacity and allocatable into the Node's status, over the changes of other programs."""
        with self.changed:
            if (run := self._run) is None:
                return
            capacity, allocatable = run.manager.capacity()
        before = self.server.get("nodes", self.name).get("status") or {}
        patch: Object = {}
        for part, numbers in (("capacity", capacity), ("allocatable", allocatable)):
            shown = before.get(part) or {}
            now = {name: str(number) for name, number in numbers.items()}
            if now != shown:
                patch[part] = {**dict.fromkeys(shown), **now}
        if patch:
            self.server.patch("nodes", self.name, {"status": patch}, subresource="status")

    def node_allocatable(self) -> Mapping[str, int]:
        """Return the Node's allocatable number of each resource, as the kubelet reads it when it admits a pod."""
        return self._reported(super().node_allocatable())

    def _reported(self, allocatable: Mapping[str, int]) -> Mapping[str, int]:
        """Return the allocatable numbers that the scheduler uses. allocatable: the kubelet's numbers."""
        if self._status_period is None:
            return allocatable
        status = self.server.get("nodes", self.name).get("status") or {}
        return {name: int(number) for name, number in (status.get("allocatable") or {}).items()}

    def schedule(self) -> None:
        """Bind the waiting pods for which enough devices are free, and allocate their claims."""
        with self.changed:
            run = self._run
            if run is None or not run.manager.sources_ready:
                return
            waiting = [pod for pod in self.pods.values() if not pod.bound and not pod.deleting]
            if not waiting:
                return
            allocatable = self._reported(run.manager.capacity()[1])
            free = dict(allocatable)
            for pod in self.pods.values():
                # The `limits` of pods that got their devices through DRA count as well (kube-scheduler 1.36).
                if pod.bound and not pod.terminal:
                    for resource, number in pod.requests.items():
                        free[resource] = free.get(resource, 0) - number
            classes, slices = self.server.objects("deviceclasses"), self.server.objects()
            for pod in waiting:
                through = {
                    resource: device_class
                    for resource in pod.requests
                    if (device_class := scheduler.through(resource, allocatable.get(resource, 0), classes))
                }
                plugin = {resource: number for resource, number in pod.requests.items() if resource not in through}
                pod.waits_for = lacking(plugin, free) or self._allocate(pod, through, classes, slices)
                if pod.waits_for:
                    continue
                for resource, number in pod.requests.items():
                    free[resource] = free.get(resource, 0) - number
                _serve_through(pod, through)
                self._bind(pod)

    def _allocate(
        self, pod: FakePod, through: Mapping[str, str], classes: Sequence[Object], slices: Sequence[Object]
    ) -> str:
        """Allocate all claims of a pod and return "", or allocate no claim and return what is missing."""
        wants = self._wants.setdefault(f"{pod.namespace}/{pod.name}", _Wants())
        made: list[Object] = []
        if wants.template:
            made.append(_claim(f"{pod.name}-{uuid.uuid4().hex[:5]}", pod.namespace, wants.template))
        if through:
            devices: dict[str, int] = {}
            for resource, device_class in through.items():
                devices[device_class] = devices.get(device_class, 0) + pod.requests[resource]
            claim = _claim(f"{pod.name}-{_EXTENDED}-{uuid.uuid4().hex[:5]}", pod.namespace, devices)
            claim["metadata"]["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
            made.append(claim)
        bodies: list[Object] = []
        for name in wants.claims:
            if (existing := self._get_claim(pod.namespace, name)) is None:
                return f"no claim {name} in namespace {pod.namespace}"
            bodies.append(existing)
        bodies += made
        everything = self.server.objects("resourceclaims")
        for body in bodies:
            status = body.setdefault("status", {})
            if not status.get("allocation"):
                allocation = scheduler.allocate(body, classes, slices, everything, self.name)
                if allocation is None:
                    return scheduler.waits_for(body, classes, slices, everything, self.name)
                status["allocation"] = allocation
                everything.append(body)
            users = status.setdefault("reservedFor", [])
            if all(user["uid"] != pod.uid for user in users):
                users.append({"resource": "pods", "name": pod.name, "uid": pod.uid})
        for body in bodies:
            if any(body is created for created in made):
                self.server.create(body)
            else:
                self.server.replace(body)
        wants.made = tuple(body["metadata"]["name"] for body in made)
        return ""

    def _wants_of(self, pod: FakePod) -> _Wants:
        orphaned = self._wants_of_orphans.get(pod.uid)
        return self._wants.setdefault(f"{pod.namespace}/{pod.name}", _Wants()) if orphaned is None else orphaned

    def _give_back(self, pod: FakePod) -> None:
        """Release a pod's claims as the claim controller does.

        Claims that were made for the pod are deleted, and other claims that no other pod uses are deallocated.
        """
        wants = self._wants_of(pod)
        for name in wants.made:
            if self._get_claim(pod.namespace, name) is not None:
                self.server.delete("resourceclaims", name, pod.namespace)
        for name in wants.claims:
            claim = self._get_claim(pod.namespace, name)
            status = (claim or {}).get("status") or {}
            if claim is None or not any(user["uid"] == pod.uid for user in status.get("reservedFor") or ()):
                continue
            status["reservedFor"] = [user for user in status["reservedFor"] if user["uid"] != pod.uid]
            if not status["reservedFor"]:
                claim["status"] = {}
            self.server.replace(claim)


def _lasting(pod: FakePod) -> list[FakeContainer]:
    """Return a pod's containers, and those of its init containers that run now."""
    init = [container for container in pod.init_containers.values() if container.state == "running"]
    return [*pod.containers.values(), *init]


def _edits(listed: Object) -> ContainerEdits:
    """Return the edits in a CDI device that `dra_bridge.driver.claim_files` has written."""
    return ContainerEdits(
        dict(variable.split("=", 1) for variable in listed.get("env", ())),
        [
            DeviceNode(node.get("hostPath", node["path"]), node["path"], node["permissions"])
            for node in listed.get("deviceNodes", ())
        ],
        [
            Mount(mount["hostPath"], mount["containerPath"], "ro" in mount["options"])
            for mount in listed.get("mounts", ())
        ],
    )


def _claim(name: str, namespace: str, devices: Mapping[str, int]) -> Object:
    requests = [
        {"name": f"r{number}", "exactly": {"deviceClassName": device_class, "count": count}}
        for number, (device_class, count) in enumerate(devices.items())
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": requests}},
    }


def _serve_through(pod: FakePod, through: Mapping[str, str]) -> None:
    """Make the kubelet ignore the resources in a pod's limits whose devices come from a claim."""

    def fitted(spec: ContainerSpec) -> ContainerSpec:
        return replace(spec, through_dra=frozenset(spec.limits) & through.keys())

    if through:
        pod.spec = PodSpec(
            pod.uid, tuple(map(fitted, pod.spec.containers)), tuple(map(fitted, pod.spec.init_containers))
        )
        for container in pod.all_containers.values():
            container.spec = fitted(container.spec)
