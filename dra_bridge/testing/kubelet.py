"""The DRA manager of a fake kubelet, for tests: plugin watcher, registration, claims of pods, health.

The fake handles the sockets of `plugins_registry/` as kubelet 1.36.3 does (pkg/kubelet/pluginmanager,
pkg/kubelet/cm/dra), and has the same state: claims by namespace and name, the pods that use each claim, and the
drivers' responses. All methods are synchronous and thread-safe. Threads of the fake call the drivers.

The fake does not admit pods. Claims that the scheduler makes for `limits` are treated like all other claims here.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from deviceplugin.kubelet.podresources import unix_address
from deviceplugin.testing import claim_state
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim
from deviceplugin.wire import pluginregistration_pb2 as pb
from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationStub
from dra_bridge.wire import dra_health_v1_pb2 as health_pb
from dra_bridge.wire import dra_v1_pb2 as v1
from dra_bridge.wire import dra_v1beta1_pb2 as v1beta1
from dra_bridge.wire.dra_health_v1_pb2_grpc import DRAResourceHealthStub
from dra_bridge.wire.dra_health_v1alpha1_pb2_grpc import DRAResourceHealthStub as AlphaHealthStub
from dra_bridge.wire.dra_v1_pb2_grpc import DRAPluginStub
from dra_bridge.wire.dra_v1beta1_pb2_grpc import DRAPluginStub as BetaStub

__all__ = ["AnsweredDevice", "DevicesOfClaim", "FakeDraKubelet", "FakeDraPod", "Plugin", "PodError", "SeenHealth"]

SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The health services that kubelet 1.37.1 supports, in its order (dra_plugin.go, healthServicesSupportedByKubelet)."""
CALL_TIMEOUT: Final = 45.0
HEALTH_TIMEOUT: Final = 30.0
_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class PodError(Exception):
    """Raised when a pod's claims cannot be prepared or unprepared.

    The text is the message of the kubelet's event about the pod.
    """


@dataclass(frozen=True, slots=True)
class FakeDraPod:
    """A pod that uses claims.

    claims: names of ResourceClaims in the pod's namespace. containers: each container's requests by its name, as (claim
    name, request name); an empty request name stands for the whole claim.
    """

    name: str
    uid: str
    claims: Sequence[str]
    containers: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    namespace: str = "default"


@dataclass(frozen=True, slots=True)
class SeenHealth:
    """A device's health in the form of the pod's status: healthy, unhealthy or unknown."""

    health: str
    message: str = ""


@dataclass(slots=True)
class Plugin:
    """One registered instance of a driver.

    channel: never closed, because grpcio's thread that follows the channel's state would raise an error; the channel
    ends with that thread. told: whether the kubelet has notified the driver of its registration. follow: the function
    that is called with the channel's state. calls: gRPC calls in progress.
    """

    driver: str
    endpoint: str
    service: str
    socket: str
    channel: grpc.Channel
    connected: bool = False
    told: bool = False
    health_service: str = ""
    ended: bool = False
    follow: Callable[[grpc.ChannelConnectivity], None] = lambda state: None
    calls: set[Any] = field(default_factory=set)


@dataclass(slots=True)
class _Reported:
    health: int
    message: str
    at: float
    timeout: float


class FakeDraKubelet:
    """A kubelet's DRA manager with its files under `root`.

    Args:
        root: the kubelet's root directory; `plugins_registry/` and `plugins/` are created there.
        get_claim: stands for the API server: returns the claim of a namespace and a name as JSON, or None.
        services: the versions of the driver API that the kubelet supports.
        health_services: the versions of the health service that the kubelet supports, in its order. The kubelet opens a
            health stream only to drivers that list one of these, as since 1.37 (pickHealthService). None: a health
            stream of v1alpha1 to every driver, as until 1.36.
        period: seconds between two scans of `plugins_registry/` for sockets (a real kubelet: 1).
        backoff: seconds until a failed registration is tried again (a real kubelet: 0.5), doubled at each failure.
        wipe: a function that deletes the ResourceSlices of a driver, "" for all drivers.
        wiping_delay: seconds between the end of a driver's last endpoint and the deletion of its slices (a real
            kubelet: 30).
    """

    def __init__(
        self,
        root: Path,
        get_claim: Callable[[str, str], Mapping[str, Any] | None],
        *,
        services: Sequence[str] = SERVICES,
        health_services: Sequence[str] | None = None,
        period: float = 0.02,
        backoff: float = 0.05,
        wipe: Callable[[str], None] | None = None,
        wiping_delay: float = 30.0,
    ) -> None:
        self.root = root
        self.registry = root / "plugins_registry"
        self._get_claim = get_claim
        self._services = tuple(services)
        self._health_services = health_services
        self._period, self._backoff = period, backoff
        self._wipe = wipe or (lambda driver: None)
        self._wiping_delay = wiping_delay
        self._condition = threading.Condition(threading.RLock())
        self._store: dict[str, list[Plugin]] = {}
        self._actual: dict[str, tuple[tuple[int, int, int], Plugin]] = {}
        self._tries: dict[str, tuple[float, float]] = {}
        self._claims: dict[tuple[str, str], DevicesOfClaim] = {}
        self._health: dict[str, dict[tuple[str, str], _Reported]] = {}
        self._wipes: dict[str, float] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[str] = []
        self.updates: list[tuple[str, int]] = []
        self.calls: list[tuple[str, str, float]] = []
        self.refuse: str = ""

    # Start and stop.

    def start(self) -> Self:
        """Start as a kubelet does: read the claim state, delete all ResourceSlices, then find the drivers' sockets.

        Raises:
            ValueError: the claim state file is damaged; a real kubelet ends with an error then.
        """
        self.registry.mkdir(parents=True, exist_ok=True)
        claims = claim_state.read_or_create(self.root)
        with self._condition:
            self._claims = {(claim.namespace, claim.name): claim for claim in claims}
        (self.root / "plugins").mkdir(parents=True, exist_ok=True)
        self._stop = threading.Event()
        self._wipe("")
        thread = threading.Thread(target=self._reconcile, args=(self._stop,), name="fake kubelet", daemon=True)
        self._threads = [thread]
        thread.start()
        return self

    def stop(self) -> None:
        """Stop the DRA manager without notice to the drivers, as a kubelet does."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)
        with self._condition:
            plugins = [plugin for listed in self._store.values() for plugin in listed]
            self._store.clear()
            self._actual.clear()
            self._tries.clear()
            self._health.clear()
            self._wipes.clear()
        for plugin in plugins:
            self._close(plugin)

    def restart(self) -> None:
        """Stop and start the DRA manager. It reads the claims and their devices from the claim state file."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for(self, what: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait until a condition is met.

        Raises:
            TimeoutError: the condition is not met after `timeout` seconds.
        """
        with self._condition:
            if not self._condition.wait_for(what, timeout):
                raise TimeoutError(f"the condition was not met within {timeout:g} s; failures so far: {self.failures}")

    # State that tests can observe.

    def plugins(self, driver: str) -> list[Plugin]:
        """Return the registered instances of a driver, the oldest first."""
        with self._condition:
            return list(self._store.get(driver, ()))

    def wait_registered(self, driver: str, count: int = 1, timeout: float = 30.0) -> list[Plugin]:
        """Wait until exactly `count` instances of a driver are registered and connected."""
        self.wait_for(lambda: [p.connected and p.told for p in self._store.get(driver, ())] == [True] * count, timeout)
        return self.plugins(driver)

    def claim(self, namespace: str, name: str) -> DevicesOfClaim | None:
        """Return the kubelet's record of a claim; None if the kubelet has no record."""
        with self._condition:
            return self._claims.get((namespace, name))

    def health(self, driver: str, pool: str, device: str, *, later: float = 0.0) -> SeenHealth:
        """Return a device's health now, or `later` seconds from now if the driver sends nothing until then."""
        with self._condition:
            reported = self._health.get(driver, {}).get((pool, device))
            if reported is None or time.monotonic() + later - reported.at > reported.timeout:
                return SeenHealth("unknown")
            names: dict[int, str] = {int(health_pb.HEALTHY): "healthy", int(health_pb.UNHEALTHY): "unhealthy"}
            message = reported.message if len(reported.message) <= 1024 else f"{reported.message[:1021]}..."
            return SeenHealth(names.get(reported.health, "unknown"), message)

    # Pods.

    def prepare_pod(self, pod: FakeDraPod) -> dict[str, list[str]]:
        """Prepare a pod's claims; return the CDI ids that each of the pod's containers gets.

        Raises:
            PodError: a claim cannot be prepared; the kubelet would try again.
        """
        wanted: list[tuple[Mapping[str, Any], DevicesOfClaim, dict[str, Plugin]]] = []
        for name in pod.claims:
            claim = self._get_claim(pod.namespace, name)
            if claim is None:
                raise PodError(f'fetch ResourceClaim {name}: resourceclaims "{name}" not found')
            status = claim.get("status") or {}
            if not any(entry.get("uid") == pod.uid for entry in status.get("reservedFor") or ()):
                raise PodError(f"pod {pod.name} ({pod.uid}) is not allowed to use ResourceClaim {name}")
            allocation = status.get("allocation")
            if allocation is None:
                raise PodError(f"ResourceClaim {name}: not allocated")
            drivers = dict.fromkeys(result["driver"] for result in allocation["devices"]["results"])
            info = DevicesOfClaim(pod.namespace, name, claim["metadata"]["uid"], {driver: [] for driver in drivers})
            wanted.append((claim, info, {driver: self.plugin(driver) for driver in drivers}))
        batches: dict[str, tuple[Plugin, list[DevicesOfClaim]]] = {}
        fresh: list[DevicesOfClaim] = []
        with self._condition:
            for _, info, plugins in wanted:
                recorded = self._claims.setdefault((info.namespace, info.name), info)
                if recorded.uid != info.uid:
                    raise PodError(
                        f"old ResourceClaim with same name {info.name} and different UID {recorded.uid} still exists"
                    )
                recorded.pods.add(pod.uid)
                self._write()
                if not recorded.prepared:
                    fresh.append(recorded)
                    for driver, plugin in plugins.items():
                        batches.setdefault(driver, (plugin, []))[1].append(recorded)
        for driver, (plugin, claims) in batches.items():
            answers = self._call(plugin, "NodePrepareResources", claims)
            by_uid = {claim.uid: claim for claim in claims}
            for uid, answer in answers.items():
                if uid not in by_uid:
                    raise PodError(f"NodePrepareResources returned result for unknown claim UID {uid}")
                if answer.error:
                    raise PodError(f"NodePrepareResources failed for ResourceClaim {by_uid[uid].name}: {answer.error}")
                with self._condition:
                    for device in answer.devices:
                        # The device is appended each time, also when a restarted kubelet prepares again
                        # (ClaimInfo.addDevice).
                        by_uid[uid].drivers.setdefault(driver, []).append(_device(device))
            if len(answers) != len(claims):
                raise PodError(f"NodePrepareResources skipped {len(claims) - len(answers)} ResourceClaims")
        with self._condition:
            for claim_info in fresh:
                claim_info.prepared = True
            self._write()
        return {container: self.cdi_ids(pod, container) for container in pod.containers}

    def cdi_ids(self, pod: FakeDraPod, container: str) -> list[str]:
        """Return the CDI ids that a container gets for the devices of its requests."""
        ids: list[str] = []
        with self._condition:
            for name, request in pod.containers[container]:
                for devices in self._claims[pod.namespace, name].drivers.values():
                    for device in devices:
                        if not request or not device.requests or request in device.requests:
                            ids += device.cdi_ids
        return ids

    def unprepare_pod(self, pod: FakeDraPod) -> None:
        """Unprepare a pod's claims, except claims that another pod uses.

        Raises:
            PodError: a driver's Unprepare failed. A real kubelet would try again; this method does not.
        """
        self._unprepare(pod.uid, pod.namespace, pod.claims)

    def reconcile_claims(self, active: Collection[str]) -> None:
        """Unprepare the claims of pods that are not active (Manager.reconcileLoop, kubelet 1.36.3).

        active: UIDs of the active pods. A kubelet does this every 60 s once its pod sources are ready. A pod that was
        deleted by force is not active, even if its processes run.
        """
        with self._condition:
            claims: dict[tuple[str, str], list[str]] = {}
            for claim in self._claims.values():
                for uid in claim.pods - set(active):
                    claims.setdefault((uid, claim.namespace), []).append(claim.name)
        for (uid, namespace), names in claims.items():
            with contextlib.suppress(PodError):  # The next call of `reconcile_claims` tries again.
                self._unprepare(uid, namespace, names)

    def _unprepare(self, pod: str, namespace: str, names: Sequence[str]) -> None:
        batches: dict[str, list[DevicesOfClaim]] = {}
        ending: list[tuple[str, str]] = []
        with self._condition:
            for name in names:
                info = self._claims.get((namespace, name))
                if info is None:
                    continue
                if len(info.pods) > 1:
                    info.pods.discard(pod)
                    continue
                ending.append((namespace, name))
                for driver in info.drivers:
                    batches.setdefault(driver, []).append(info)
        for driver, claims in batches.items():
            answers = self._call(self.plugin(driver), "NodeUnprepareResources", claims)
            for claim in claims:
                answer = answers.get(claim.uid)
                if answer is None:
                    raise PodError("NodeUnprepareResources skipped a ResourceClaim")
                if answer.error:
                    raise PodError(f"NodeUnprepareResources failed for ResourceClaim {claim.name}: {answer.error}")
        with self._condition:
            for key in ending:
                self._claims.pop(key, None)
            self._write()

    def _write(self) -> None:
        claim_state.write(self.root, self._claims.values())

    def call(self, driver: str, method: str, claims: Sequence[Any], timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """Call a driver's method for any claims (`namespace`, `name`, `uid`); return the responses by claim UID."""
        return self._call(self.plugin(driver), method, claims, timeout)

    def plugin(self, driver: str) -> Plugin:
        """Return the instance of a driver that the kubelet calls. Raises PodError if no instance is registered."""
        with self._condition:
            listed = self._store.get(driver)
            if not listed:
                raise PodError(f"DRA driver {driver} is not registered")
            return next((plugin for plugin in reversed(listed) if plugin.connected), listed[-1])

    def _call(
        self, plugin: Plugin, method: str, claims: Sequence[Any], timeout: float = CALL_TIMEOUT
    ) -> dict[str, Any]:
        messages: Any = v1 if plugin.service == SERVICES[0] else v1beta1
        stub: Any = DRAPluginStub(plugin.channel) if plugin.service == SERVICES[0] else BetaStub(plugin.channel)
        request = getattr(messages, f"{method}Request")(
            claims=[messages.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid) for claim in claims]
        )
        began = time.monotonic()
        try:
            with self._calling(plugin, lambda: getattr(stub, method).future(request, timeout=timeout)) as call:
                response = call.result()
        except grpc.FutureCancelledError as error:
            raise PodError(f"{method}: the connection is closed") from error
        except grpc.RpcError as error:
            raise PodError(f"{method}: {error}") from error
        finally:
            with self._condition:
                self.calls.append((plugin.driver, method, time.monotonic() - began))
        return dict(response.claims)

    @contextlib.contextmanager
    def _calling(self, plugin: Plugin, begin: Callable[[], Any]) -> Iterator[Any]:
        """Start a gRPC call that `_close` can cancel. Raises grpc.FutureCancelledError if the connection is closed."""
        with self._condition:
            if plugin.ended:
                raise grpc.FutureCancelledError
            call = begin()
            plugin.calls.add(call)
        try:
            yield call
        finally:
            with self._condition:
                plugin.calls.discard(call)

    # Plugin watcher and reconciler.

    def _reconcile(self, stop: threading.Event) -> None:
        while not stop.wait(self._period):
            desired = self._sockets()
            with self._condition:
                gone = [path for path, (seen, _) in self._actual.items() if desired.get(path) != seen]
            for path in gone:
                self._deregister(path)
            for path, seen in desired.items():
                with self._condition:
                    due = self._tries.get(path, (0.0, 0.0))[0] <= time.monotonic()
                    is_registered = path in self._actual
                if due and not is_registered:
                    self._try(path, seen)
            self._wipe_due()

    def _sockets(self) -> dict[str, tuple[int, int, int]]:
        sockets = {}
        for directory, _, names in os.walk(self.registry):
            for name in names:
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    if not name.startswith(".") and stat.S_ISSOCK(status.st_mode):
                        sockets[path] = status.st_dev, status.st_ino, status.st_mtime_ns
        return sockets

    def _try(self, path: str, seen: tuple[int, int, int]) -> None:
        try:
            with grpc.insecure_channel(unix_address(path), options=_OPTIONS) as channel:
                self._register(RegistrationStub(channel), path, seen)
        except (grpc.RpcError, ValueError) as error:
            with self._condition:
                delay = min(120.0, self._tries.get(path, (0.0, self._backoff / 2))[1] * 2)
                self._tries[path] = time.monotonic() + delay, delay
                self.failures.append(str(error))
                self._condition.notify_all()

    def _register(self, stub: RegistrationStub, path: str, seen: tuple[int, int, int]) -> None:
        info = stub.GetInfo(pb.InfoRequest(), timeout=1.0)
        error = self._problem(info)
        if error:
            stub.NotifyRegistrationStatus(pb.RegistrationStatus(plugin_registered=False, error=error), timeout=5.0)
            raise ValueError(error)
        service = next(name for name in info.supported_versions if name in self._services)
        endpoint = info.endpoint or path
        channel = grpc.insecure_channel(unix_address(endpoint), options=_OPTIONS)
        health = HEALTH_SERVICES[1]
        if self._health_services is not None:
            health = next((name for name in self._health_services if name in info.supported_versions), "")
        plugin = Plugin(info.name, endpoint, service, path, channel, health_service=health)
        with self._condition:
            self._store.setdefault(info.name, []).append(plugin)
            self._actual[path] = seen, plugin
            self._tries.pop(path, None)
        plugin.follow = lambda state: self._connectivity(plugin, state)
        channel.subscribe(plugin.follow, try_to_connect=True)
        if plugin.health_service:
            threading.Thread(
                target=self._follow_health, args=(plugin,), name="fake kubelet health", daemon=True
            ).start()
        try:
            stub.NotifyRegistrationStatus(pb.RegistrationStatus(plugin_registered=True), timeout=5.0)
        except grpc.RpcError:
            self._deregister(path)
            raise
        with self._condition:
            plugin.told = True
            self._condition.notify_all()

    def _problem(self, info: pb.PluginInfo) -> str:
        if self.refuse:
            return f"RegisterPlugin error -- plugin validation failed with err: {self.refuse}"
        if info.type != "DRAPlugin":
            return f"RegisterPlugin error -- no handler registered for plugin type: {info.type}"
        if not set(info.supported_versions) & set(self._services):
            return (
                f"RegisterPlugin error -- plugin validation failed with err: none of services supported by the plugin "
                f"({list(info.supported_versions)}) are supported by the kubelet ({list(self._services)})"
            )
        with self._condition:
            if any(plugin.endpoint == info.endpoint for plugin in self._store.get(info.name, ())):
                return f"endpoint {info.endpoint} already registered for DRA driver plugin {info.name}"
        return ""

    def _deregister(self, path: str) -> None:
        with self._condition:
            _, plugin = self._actual.pop(path)
            self._store[plugin.driver].remove(plugin)
            if not self._store[plugin.driver]:
                del self._store[plugin.driver]
            self._synchronise(plugin.driver)
            self._condition.notify_all()
        self._close(plugin)

    def _close(self, plugin: Plugin) -> None:
        plugin.channel.unsubscribe(plugin.follow)
        with self._condition:
            plugin.ended, calls = True, list(plugin.calls)
        for call in calls:
            call.cancel()

    def _connectivity(self, plugin: Plugin, state: grpc.ChannelConnectivity) -> None:
        with self._condition:
            plugin.connected = state is grpc.ChannelConnectivity.READY
            self._synchronise(plugin.driver)
            self._condition.notify_all()

    def _synchronise(self, driver: str) -> None:
        if any(plugin.connected for plugin in self._store.get(driver, ())):
            self._wipes.pop(driver, None)
        else:
            self._wipes.setdefault(driver, time.monotonic() + self._wiping_delay)

    def _wipe_due(self) -> None:
        with self._condition:
            due = [driver for driver, at in self._wipes.items() if at <= time.monotonic()]
            for driver in due:
                del self._wipes[driver]
        for driver in due:
            self._wipe(driver)

    # Health.

    def _follow_health(self, plugin: Plugin) -> None:
        service: Any = DRAResourceHealthStub if plugin.health_service == HEALTH_SERVICES[0] else AlphaHealthStub
        watch, request = service(plugin.channel).NodeWatchResources, health_pb.NodeWatchResourcesRequest()
        while not plugin.ended and not self._stop.is_set():
            with (
                # The driver's health stream has failed or was closed.
                contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError),
                self._calling(plugin, lambda: watch(request, wait_for_ready=True)) as responses,
            ):
                for response in responses:
                    self._hear(plugin, response)
            with self._condition:
                self._health.pop(plugin.driver, None)
                self._condition.notify_all()
                self._condition.wait_for(lambda: plugin.ended, 0.05)

    def _hear(self, plugin: Plugin, response: health_pb.NodeWatchResourcesResponse) -> None:
        now = time.monotonic()
        with self._condition:
            if plugin.ended:
                return
            self.updates.append((plugin.driver, len(response.devices)))
            reported = self._health.setdefault(plugin.driver, {})
            for entry in response.devices:
                reported[entry.device.pool_name, entry.device.device_name] = _Reported(
                    entry.health, entry.message, now, float(entry.health_check_timeout_seconds or HEALTH_TIMEOUT)
                )
            self._condition.notify_all()


def _device(device: Any) -> AnsweredDevice:
    share = device.share_id if isinstance(device, v1.Device) and device.HasField("share_id") else None
    return AnsweredDevice(
        tuple(device.request_names), device.pool_name, device.device_name, tuple(device.cdi_device_ids), share
    )
