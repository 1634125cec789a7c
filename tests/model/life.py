"""One process of the agent (a `Life`): the real code, without sockets and threads, and with the model's clock.

Each piece of the agent's periodic work (scan, move, compare, publish) is a method, so that a test can set the order.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar, cast
from unittest.mock import patch

from deviceplugin import hook_runs, looks
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.kubelet import allocation_wait
from deviceplugin.kubelet.device_list import Stream
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.node.service import Service
from deviceplugin.register import copies
from deviceplugin.register.records import LedgerError, Operation, RegisterSnapshot
from deviceplugin.register.store import Changes
from deviceplugin.sharing import shares
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb
from dra_bridge.driver import ClaimError, ClaimRef, Prepared, preparation
from dra_bridge.handover import ends
from dra_bridge.handover.share import Drain, Share
from dra_bridge.kube import ClusterError
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node import claim_lists
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.device_reconciliation import EVIDENCE_ERRORS
from dra_bridge.node.driver_runtime import DriverRuntime
from dra_bridge.node.options import AGENT, BridgeOptions
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.node.slice_feed import decide_names
from tests.dra.ledger.samples import DirectLedger
from tests.model.outside import NODE, TOKENS, Checkpoints, Claim, D, Outside, Pod, R

_T = TypeVar("_T")


class Setting(NamedTuple):
    """The configuration of a resource.

    driver: "" for none. share: the number of devices for claims. prepares: whether the source has a `prepare` hook; if
    so, claims are reserved on disk before they are prepared.
    """

    driver: str = D
    replicas: int = 1
    share: int = 0
    drain: Drain = "cordon"
    prepares: bool = False


Config = Mapping[str, Setting]
BASE: Final[Config] = {R: Setting()}


class Cards(DeviceSource):
    """A source whose number of replicas a test can change for each device, and whose hook `released` may hang."""

    def __init__(self, resource: str, setting: Setting, outside: Outside) -> None:
        self.resource = resource
        self.driver = setting.driver or None
        self.replicas = setting.replicas
        self.hook_timeout = 60.0
        self.outside = outside
        self.dead = False

    def watch(self) -> AsyncIterator[Sequence[Device]]:
        """The model publishes the device lists itself."""
        raise NotImplementedError

    def replicas_of(self, device: Device) -> int:
        """Return the number of replicas of a device, at most `replicas`."""
        return min(self.replicas, self.outside.times.get(device.id, self.replicas))

    async def released(self, devices: Sequence[Device]) -> None:
        """End at once; while `outside.stuck` is set, ignore cancellation and hang until the model ends the hook."""
        if not self.outside.stuck or self.dead:
            return
        done = asyncio.Event()
        self.outside.hooks += [(what, done) for what in sorted({device.edits.env["HARDWARE"] for device in devices})]
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                continue


class PreparedCards(Cards):
    """A source with a `prepare` hook. Its hooks are coroutines, because the agent calls plain functions in threads."""

    async def prepare(self, devices: Sequence[Device], config: object) -> None:
        """Do nothing."""

    async def unprepare(self, devices: Sequence[Device]) -> None:
        """Do nothing."""


def _sources(config: Config, outside: Outside) -> dict[str, Cards]:
    return {
        name: (PreparedCards if setting.prepares else Cards)(name, setting, outside) for name, setting in config.items()
    }


class SlowLedger:
    """Stands in for `AsyncLedger`, without a thread: other steps may come before and after each operation."""

    def __init__(self, ledger: DirectLedger, outside: Outside) -> None:
        self.ledger, self.outside = ledger, outside
        self.lost = asyncio.Event()
        self.write_failures = 0
        self.changes = Changes()

    @property
    def snapshot(self) -> RegisterSnapshot:
        """The contents of the ledger after the last operation."""
        return self.ledger.snapshot

    async def do(self, operation: Operation[_T]) -> _T:
        """Apply an operation to the ledger, and wait before and after it until the test lets it go on."""
        await self.outside.gate.passed()
        answer = self.ledger.do(operation)
        self.changes.note()
        await self.outside.gate.passed()
        return answer


class InFlight(AllocationsInFlight):
    """The Allocate calls in flight, without the pause that follows each call in the real agent."""

    def busy(self, pause: float = 0.0) -> Any:
        """Count an Allocate call as in flight while the context is open."""
        return super().busy(0.0)

    async def wait(self) -> None:
        """Wait until the Allocate calls in flight have ended."""
        await self._idle.wait()


class RefusedError(Exception):
    """Raised where the real agent answers the kubelet with an error."""


class Context:
    """Stands in for the gRPC context of a call by the kubelet."""

    async def abort(self, code: object, details: str) -> None:
        """Raise RefusedError."""
        raise RefusedError(details)


async def _at_once(_looks: looks.Looks, _kind: str, function: Callable[..., _T], *args: object, **_: object) -> _T:
    return function(*args)


def _briefly(_looks: looks.Looks, _kind: str, function: Callable[..., object], *args: object) -> object:
    return SimpleNamespace(result=function(*args))


def _begun(_looks: looks.Looks, kind: str, function: Callable[..., _T], *args: object) -> looks.Look[_T]:
    look = looks.Look(kind, function, args, "")
    look.run(threading.Lock())
    return look


def _within(_looks: looks.Looks, _seconds: float, _kind: str, function: Callable[..., _T], *args: object) -> _T:
    return function(*args)


@cache
def _modules_with_clock() -> list[ModuleType]:
    """Return the modules of the product that read the time."""
    loaded = [module for name, module in sys.modules.items() if name.startswith(("deviceplugin.", "dra_bridge."))]
    return [module for module in loaded if vars(module).get("time") is time]


@contextmanager
def modelled(outside: Outside) -> Iterator[None]:
    """While the context is open, the agent has no threads and makes no pauses, and its clock is that of the model."""
    clock = SimpleNamespace(**{**vars(time), "monotonic": outside.clock, "time": outside.wall})
    with ExitStack() as stack:
        for module in _modules_with_clock():
            stack.enter_context(patch.object(module, "time", clock))
        for where, name, what in (
            (looks.Looks, "at", _at_once),
            (looks.Looks, "begin", _begun),
            (looks.Looks, "until_answered", _at_once),
            (looks.Looks, "brief", _briefly),
            (looks.Looks, "within", _within),
            (hook_runs, "CANCELLED", 0.0),
            (claim_lists, "Backoff", lambda **_: Backoff(first=0.0, most=0.0)),
            (ends, "Backoff", lambda **_: Backoff(first=0.0, most=0.0)),
            (preparation, "PATIENCE", 0.0),
            (allocation_wait, "PATIENCE", 0.0),
        ):
            stack.enter_context(patch.object(where, name, what))
        yield


class Life(Bridge):
    """One process of the agent, from its start to its end."""

    def __init__(self, outside: Outside, config: Config) -> None:
        paths = Paths(outside.root, cgroup_root=outside.home, pod_log_dir=outside.logs, cdi_dir=outside.home / "cdi")
        self.outside = outside
        self.ledger: DirectLedger | None = None
        self.sources = sources = [*_sources(config, outside).values()]
        super().__init__(sources, _policies(config), BridgeOptions(paths, None, cast("Any", outside), NODE))
        self.node.watch.allocatable = cast("Any", SimpleNamespace(observe=lambda numbers: None))
        self.node.watch.observe({"metadata": {"name": NODE, "uid": NODE}})
        outside.lease_wanted = self.node.lease.reports
        self.publisher = cast("Any", outside)
        self.node = replace(self.node, publisher=self.publisher, allocatable=cast("Any", None))
        node_agent: Any = self.agent
        node_agent.tracker.in_flight.__class__ = InFlight
        node_agent.tracker.pods = SimpleNamespace(
            read=outside.read,
            running=outside.read,
            own_pod="",
            seen={},
            cgroups="",
            is_in_kubelets_root=True,
        )
        node_agent.tracker.pods.known = lambda *_: None
        node_agent.claims.pods = node_agent.tracker.pods
        node_agent.tracker.pods.kubelet_root = outside.root
        node_agent.tracker.pods.may_exist = lambda uid: bool(outside.read().may_run(uid))
        node_agent.tracker.pods.containers = lambda uid: None  # it is known whether a pod runs, not which containers
        node_agent.tracker._checkpoint.__class__ = Checkpoints
        node_agent.tracker._checkpoint.outside = outside
        node_agent.tracker.pod_resources = SimpleNamespace(list=outside.list_pods)
        node_agent.supervisor.start = self._started

    async def _open_ledger(self) -> AsyncLedger:
        path = self.ledger_path
        self.ledger = DirectLedger(
            str(path), copies.path(self.node.drivers.cdi_directory, AGENT), connect=self.outside.connect
        )
        return cast("AsyncLedger", SlowLedger(self.ledger, self.outside))

    async def begin(self) -> None:
        """Start the agent, up to the point at which it would offer devices."""
        await self._open_all()
        agent = self.agent
        await agent.evidence.read_others()
        await agent.tracker.start()
        await agent.scanner.observe(agent.tracker.snapshot, agent.register.snapshot.sequence)
        for service in agent.services.values():
            self._started(service)
        agent.begun.set()
        self._scans = asyncio.create_task(self._make_scans())

    def _started(self, service: Service, *, fatal: bool = True) -> None:
        service.existing = frozenset(self.agent.tracker.snapshot.of(service.resource)) | service._ids
        service.inventory.subscribe(lambda _: self.agent.register.notify())
        self.list(service.resource)

    def list(self, resource: str) -> None:
        """Give the agent a resource's list of devices, as its source does."""
        service = self.agent.services[resource]
        devices = self.outside.devices(resource)
        tokens = {one.id: TOKENS[one.edits.env["HARDWARE"]] for one in devices}
        service.inventory.publish(devices, tokens, shares(service.source, devices))
        service.listed()

    async def reload(self, config: Config) -> None:
        """Apply another configuration, as a reload of the config file does."""
        services = self.agent.services
        for name in services.keys() - config.keys():
            del services[name]
        sources = _sources(config, self.outside)
        self.sources += sources.values()
        await self.reconfigure(cast("Any", sources), _policies(config), ())
        for name in config:
            self.list(name)

    def die(self) -> None:
        """End the agent as SIGKILL does: it writes nothing after this."""
        if self.ledger is not None:
            self.ledger.close()
        for source in self.sources:
            source.dead = True
        for one in self.drivers.values():
            files: Any = one.driver.files
            files.remove = _nothing

    # Calls of the kubelet.

    def lines(self, resource: str) -> dict[str, bool]:
        """Return the device ids that the agent would list to the kubelet now, and whether each is healthy."""
        lines = self.agent.services[resource].endpoint._lines_if_listed()
        return {one.name: one.healthy for one in lines or ()}

    def send(self, resource: str) -> dict[str, bool]:
        """Send the device list to the kubelet, and return it."""
        streams, lines = self.agent.services[resource].endpoint.streams, self.lines(resource)
        shown = self.outside.clock(), frozenset(name for name, healthy in lines.items() if healthy)
        streams.open.clear()
        streams.open.add(Stream(shown=shown))
        return lines

    def hang_up(self) -> None:
        """Close all ListAndWatch streams to the kubelet."""
        for service in self.agent.services.values():
            service.endpoint.streams.open.clear()

    async def allocate(self, pod: Pod) -> None:
        """Call Allocate for a pod's device, and record in the pod what it got."""
        service = self.agent.services[pod.resource]
        device = service.inventory.snapshot.devices.get(service.device_of(pod.device_id))
        parts = len(service.ids_now(device)) if device is not None else 1
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[pod.device_id])])
        answer = await service.endpoint.Allocate(request, cast("Any", Context()))
        (response,) = answer.container_responses
        pod.response, pod.part = _base64(response), Fraction(1, parts)
        pod.hardware = response.envs["HARDWARE"]

    async def prepare(self, claim: Claim) -> Prepared:
        """Prepare a claim, and return the driver's answer. Raises ClaimError."""
        ref = ClaimRef("default", claim.uid, claim.uid)
        answer = (await self.drivers[claim.driver].driver.prepare([ref]))[claim.uid]
        if isinstance(answer, ClaimError):
            raise answer
        return answer

    async def unprepare(self, claim: Claim) -> None:
        """Unprepare a claim. Raises ClaimError."""
        ref = ClaimRef("default", claim.uid, claim.uid)
        if (error := (await self.drivers[claim.driver].driver.unprepare([ref]))[claim.uid]) is not None:
            raise error

    # Work of the agent's tasks.

    async def scan(self) -> None:
        """Scan for holders, as the agent does periodically."""
        await self.agent.scanner.scan()

    async def _make_scans(self) -> None:
        """Make the scans that the agent requests; its periodic scans are steps of the walk."""
        scanner = self.agent.scanner
        while True:
            await scanner._requested.wait()
            await scanner.read()

    async def compare(self, runtime: DriverRuntime, resource: str) -> None:
        """Compare the ledger once with the holders of a resource's devices on the node (`DeviceReconciler.keep`)."""
        one, context = runtime.resources.get(resource), runtime.context
        if one is None or one.leaving:
            return
        one.changed.clear()
        known = context.ledger.snapshot
        certain = context.evidence.reconciled & known.devices.keys()
        unreconciled = [name for name in one.service.inventory.snapshot.devices if (resource, name) not in certain]
        try:
            await decide_names(context, resource)
            if not await runtime.devices.reconcile(one, unreconciled):
                one.reconciled.set()
                one.service.release_idle()
        except (*EVIDENCE_ERRORS, LedgerError):
            return

    async def resolve(self, runtime: DriverRuntime) -> None:
        """Compare the ledger again with the holders of quarantined devices."""
        await runtime.devices.resolve()

    async def move(self, runtime: DriverRuntime, resource: str) -> None:
        """Make one step of the moves of a resource's devices between limits and claims."""
        one = runtime.resources.get(resource)
        if one is not None and (one.leaving or one.reconciled.is_set()):
            try:
                await one.handover._step()
            except (LedgerError, ClusterError):
                return

    async def settle_claims(self, runtime: DriverRuntime) -> None:
        """End the claims whose pods have ended, as the driver does periodically."""
        sweep = all(one.reconciled.is_set() or one.leaving for one in runtime.resources.values())
        try:
            await runtime.claims.reconcile(sweep=sweep)
        except (*EVIDENCE_ERRORS, LedgerError):
            return

    def publish(self, runtime: DriverRuntime) -> None:
        """Decide on the slices that a driver wants (`SliceFeed.run`)."""
        if runtime.feed._may_publish():
            runtime.feed._pass_on()


async def _nothing(uid: str) -> None:
    """Stand in for the removal of a file, since the agent's process is dead."""


def _policies(config: Config) -> dict[str, HandoverPolicy]:
    return {name: HandoverPolicy(Share(setting.share), setting.drain) for name, setting in config.items()}


def _base64(message: pb.ContainerAllocateResponse) -> str:
    return base64.b64encode(message.SerializeToString()).decode()
