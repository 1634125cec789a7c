"""Runs one DRA driver on this node: its devices, its slices, and the moves of devices to and from the device plugin."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.node.service import Service
from deviceplugin.register import operations
from deviceplugin.tasks import Tasks
from dra_bridge.driver import Driver, Registrar, ServedResource
from dra_bridge.handover.moved import MovedResource, Successor
from dra_bridge.handover.moves import Handover
from dra_bridge.handover.planner import Moving
from dra_bridge.handover.share import Share
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.claim_checks import ClaimChecks
from dra_bridge.node.claim_pods import ClaimPods
from dra_bridge.node.device_reconciliation import DeviceReconciler, EvidenceReader
from dra_bridge.node.resource import BYPASSED, BridgeNode, DriverContext, ResourceRuntime
from dra_bridge.node.share import NO_DEVICES, DriverShare, HandoverPolicy
from dra_bridge.node.slice_feed import SliceFeed
from dra_bridge.slices.foreign import ForeignKind

_LOG: Final = logging.getLogger(__name__)

DEBOUNCE: Final = 0.2
"""Seconds from a change of claims to the update of device lists, moves and slices. Because of this delay, pods that
start together cause only one update."""
ALARMS: Final = 600.0
"""Minimum seconds between two Events about one kind of writes by other programs into the driver's pool."""


class DriverRuntime:
    """Builds and runs the objects that make up one DRA driver on this node.

    resources: the resources whose source names this driver, or has named it before. left: a function that is called
    with a resource after devices of the resource have left this driver.
    """

    def __init__(
        self,
        node: BridgeNode,
        name: str,
        async_ledger: AsyncLedger,
        left: Callable[[str], None] = lambda resource: None,
    ) -> None:
        self.name = name
        self.async_ledger = async_ledger
        self._left = left
        self._group: asyncio.TaskGroup | None = None
        self._registering: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self._alarmed: dict[ForeignKind, float] = {}
        self._changed = asyncio.Event()
        """An event that requests an update: holders or states of devices have changed since the last update."""
        self._node = node
        self._register = register = node.agent.register
        tracker = node.agent.tracker
        share = DriverShare(name, async_ledger, self._tasks)
        self.context = context = DriverContext(name, node, async_ledger, share)
        self.resources = context.resources
        self.driver = Driver(name, node.drivers, host=context)
        context.pods = pods = ClaimPods(name, async_ledger, tracker, node.pods_and_claims, self.driver.files)
        kubelet = node.agent.plugin_directory
        self.registrar = Registrar(self.driver, node.directories, kubelet=kubelet, changed=self.publish)
        self.feed = SliceFeed(context, self.registrar)
        register.subscribe(self.publish)
        self.claims = ClaimChecks(self.driver, pods, tracker, node.claims)
        evidence = EvidenceReader(self.driver, node.agent, node.cluster, node.claims)
        self.devices = DeviceReconciler(context, evidence, self)

    def serve(self, service: Service, policy: HandoverPolicy, *, leaving: bool = False) -> None:
        """Let this driver serve a resource, or use a new source and policy for a resource that it serves already.

        leaving: whether the resource names another driver now, so that this driver's devices of the resource return to
        the device plugin.
        """
        resource = service.resource
        runtime = self.resources.get(resource)
        if runtime is not None and runtime.leaving is leaving:
            runtime.service, runtime.policy = service, policy
            runtime.handover.ask(self._share_of(runtime), policy.drain)
        else:
            if runtime is not None:
                self.drop(resource)
            handover = self._handover(service, policy, Moving(self.name, leaving))
            runtime = self.resources[resource] = ResourceRuntime(service, policy, handover, leaving)
            runtime.unsubscribe = service.inventory.subscribe(lambda _, runtime=runtime: self._listed(runtime))  # type: ignore[misc]
            self._start(runtime)
            self._listed(runtime)
        self._serve_claims()
        self.publish()

    def _share_of(self, runtime: ResourceRuntime) -> Share:
        asked = self.context.share.of(runtime.policy)
        return replace(NO_DEVICES, forced=asked.forced) if runtime.leaving else asked

    def _handover(self, service: Service, policy: HandoverPolicy, moving: Moving) -> Handover:
        evidence, endpoint = self.devices.evidence, service.endpoint
        moved = MovedResource(endpoint, service.inventory, self._register, evidence, self, self.feed, moving)
        share = NO_DEVICES if moving.leaving else self.context.share.of(policy)
        return Handover(moved, share, policy.drain, self._node.allocatable)

    # Handovers call these methods (DriverSide): `successor`, `endpoint` and `moved`.

    def successor(self, resource: str) -> Successor | None:
        """Return the moves of the driver that a resource names now; None if the resource names no driver."""
        for context in self._node.contexts.values():
            if resource in context.resources and not context.resources[resource].leaving:
                return context.resources[resource].handover
        return None

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the device plugin's servicer of a resource; None if this driver does not serve the resource."""
        runtime = self.resources.get(resource)
        return None if runtime is None else runtime.service.endpoint

    def moved(self, resource: str) -> None:
        """Request an update (`changed`), because moves of a resource's devices have begun or ended.

        If the resource names another driver now, stop serving it once its devices have left this driver's slices.
        """
        self.changed()
        if (mine := self.resources.get(resource)) is not None and mine.leaving:
            self._tasks.start(self._let_go(resource))

    def drop(self, resource: str) -> None:
        """Stop serving a resource.

        Afterwards claims get no device of the resource, but prepared claims can still be unprepared.
        """
        reconciled = self.context.evidence.reconciled
        reconciled.difference_update([key for key in reconciled if key[0] == resource])
        if runtime := self.resources.pop(resource, None):
            runtime.unsubscribe()
            runtime.reconciled.set()
            if runtime.task is not None:
                runtime.task.cancel()
        self._serve_claims()
        self.publish()

    def _serve_claims(self) -> None:
        services = [runtime.service for runtime in self.resources.values()]
        self.driver.devices.replace([ServedResource(service.source, service.inventory) for service in services])
        self.registrar.follow()

    def read_share(self, annotations: Mapping[str, str] | None, node: str) -> None:
        """Read the share of devices for claims that the Node's annotations request; see `DriverShare`.

        The slices are computed again, because the annotations may also request an empty pool.
        """
        if self.context.share.read(annotations, node):
            for runtime in self.resources.values():
                runtime.handover.ask(self._share_of(runtime), runtime.policy.drain)
        self.publish()

    async def run(self) -> None:
        """Run all objects of the driver until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._registering = group.create_task(self.registrar.run())
                group.create_task(self.claims.run(self.resources))
                group.create_task(self.feed.run())
                group.create_task(self.feed.follow_accepted())
                group.create_task(self.driver.files.keep())
                group.create_task(self.driver.renewal.keep())
                group.create_task(self._follow_claims())
                group.create_task(self._follow_changes())
                for runtime in self.resources.values():
                    self._start(runtime)
                try:
                    await self.devices.keep_resolving()
                finally:
                    self._group = None  # The task group is ending now, and accepts no new tasks.
        finally:
            await self._tasks.close()
            await self.driver.close()

    async def end_claims(self) -> None:
        """Accept no more claims, and wait for the claims that are being prepared."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait({self._registering})

    async def _follow_claims(self) -> None:
        """Request an update (`changed`) after claims were prepared or unprepared, until cancelled."""
        while True:
            await self.context.claims.wait()
            await asyncio.sleep(DEBOUNCE)
            self.context.claims.clear()
            self.changed()

    async def _follow_changes(self) -> None:
        """Update device lists, moves and slices after holders or states of devices have changed, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                self._notify()
            except Exception:  # A failed update must not end the driver.
                _LOG.exception("not all components were notified of a change of devices", extra={"driver": self.name})

    def _notify(self) -> None:
        """Send new device lists and slices. Wake the moves, because other devices may have to move now."""
        for runtime in self.resources.values():
            runtime.service.endpoint.refresh()
            runtime.handover.look()
            runtime.handover.wake()
        self._register.notify()
        self.publish()

    def _start(self, runtime: ResourceRuntime) -> None:
        if self._group is not None and runtime.task is None:
            name = f"moves of {runtime.service.resource}"
            runtime.task = self._group.create_task(self._run_resource(runtime), name=name)

    async def _run_resource(self, runtime: ResourceRuntime) -> None:
        resource = runtime.service.resource
        async with asyncio.TaskGroup() as group:
            if runtime.leaving:
                runtime.reconciled.set()
            else:
                group.create_task(_again(f"{resource}: comparing devices with evidence", self.devices.keep, runtime))
            group.create_task(_again(f"{resource}: moving devices", self._move, runtime))

    async def _move(self, runtime: ResourceRuntime) -> None:
        await runtime.reconciled.wait()
        # The Node's annotations may request another share than the config, so the moves wait for the annotations.
        await self._node.watch.known()
        await runtime.handover.run()

    def _listed(self, runtime: ResourceRuntime) -> None:
        self.devices.forget_unlisted(runtime)
        runtime.changed.set()
        self.publish()

    # `DeviceReconciler` and the agent call these methods.

    def devices_named(self) -> None:
        """Report the health of the driver's devices to the kubelet, each under its published name."""
        self.registrar.follow()

    def quarantined(self, resource: str, device: str) -> None:
        """Log an error and write an Event about a device that was quarantined."""
        reason = self.async_ledger.snapshot.device(resource, device).reason
        _LOG.error("device %s is quarantined: %s", device, reason, extra={"resource": resource, "device": device})
        message = f"device {device} of {resource} is quarantined: {reason}"
        self._tasks.start(self._node.alarm("DeviceQuarantined", message))

    def others_wrote(self, kind: ForeignKind, what: str) -> None:
        """Write an Event about another program's write into the pool, at most one in `ALARMS` seconds for each kind."""
        now = time.monotonic()
        if now - self._alarmed.get(kind, -math.inf) >= ALARMS:
            self._alarmed[kind] = now
            self._tasks.start(self._node.alarm("PoolWrittenByOthers", f"driver {self.name}: {what}"))
        for runtime in self.resources.values():
            runtime.handover.wake()

    def contested(self, resource: str, reason: str) -> None:
        """Stop offering free devices of an adopted resource whose plugin bypasses this agent. Write an Event."""
        runtime = self.resources.get(resource)
        if runtime is None or runtime.service.vendor is None or not runtime.service.endpoint.kept_back:
            return
        again = self.context.bypassed(resource)
        runtime.bypassed_at = time.monotonic()
        asyncio.get_running_loop().call_later(BYPASSED + 1.0, self.publish)
        self.publish()
        if not again:
            what = f"a plugin of {resource} has registered with the kubelet"
            text = (
                f"{what} instead of this agent, while claims have devices: {reason}; "
                "was the hostPath of its DaemonSet reverted?"
            )
            _LOG.error("%s", text, extra={"resource": resource})
            self._tasks.start(self.context.node.alarm("AdoptedPluginBypassed", text))

    async def _let_go(self, resource: str) -> None:
        """Stop serving a resource if none of its devices is in this driver's slices any more."""
        if not any(record.driver == self.name for record in self.async_ledger.snapshot.of(resource).values()):
            self.drop(resource)
        self._left(resource)

    def observed(self, done: Mapping[str, operations.Observed]) -> None:
        """Process the result of a scan for holders: report quarantined devices, and update device lists."""
        for resource, runtime in self.resources.items():
            if (seen := done.get(resource)) is not None:
                for device in seen.quarantined:
                    self.quarantined(resource, device)
                runtime.handover.look()
                if seen.released or seen.found or seen.quarantined:
                    self.changed()

    def changed(self) -> None:
        """Request an update of device lists, moves and slices: holders or states of devices have changed."""
        self._changed.set()

    def publish(self) -> None:
        """Make `SliceFeed` compute and publish the driver's slices again."""
        self.feed.publish()


async def _again(what: str, work: Callable[[ResourceRuntime], Awaitable[None]], resource: ResourceRuntime) -> None:
    """Run `work` for a resource until cancelled, again after each failure. what: the work's name, for the log."""
    backoff = Backoff(first=1.0, most=30.0)
    while True:
        try:
            await work(resource)
        except Exception:
            _LOG.exception("%s failed; trying again", what)
        await asyncio.sleep(backoff.next())
