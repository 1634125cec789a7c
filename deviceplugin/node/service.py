"""The services of a node's resources, including the resources of child sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from deviceplugin import cdi, device_metadata
from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.adoption.source import AdoptedEndpoint, AdoptedSource
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.exclusion import DeviceKey, titled
from deviceplugin.files import FileIdentity
from deviceplugin.hook_runs import DeviceBusyError
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.foreign_plugin import KubeletRecord
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.instance_lock import RegistrationError
from deviceplugin.kubelet.plugin_directory import PluginDirectory
from deviceplugin.kubelet.registration import PluginRegistration, RegistrationTiming
from deviceplugin.kubelet.servicer import Endpoint, EndpointHost, Refusal
from deviceplugin.kubelet.status import ResourceStatus, VendorConnection, Withheld
from deviceplugin.kubelet.tracker import HolderTracker, is_recent
from deviceplugin.naming import device_name, node_name
from deviceplugin.node.claim_side import ClaimSide
from deviceplugin.node.device_log import InventoryLog
from deviceplugin.node.following import SourceFollower
from deviceplugin.register.question import allocation_unit
from deviceplugin.register.records import Allocation
from deviceplugin.register.register import SIDES, Register
from deviceplugin.register.rules import KubeletSnapshot
from deviceplugin.source import DeviceSource
from deviceplugin.source_check import checked_children, overlong
from deviceplugin.tasks import cancel_all

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The objects that all services of a node share.

    plugins: the device plugin directory. claim_side: the part of this process that gives devices to claims.
    scan_wanted: an event that is set to request a scan soon. cdi_directory: the directory of CDI specs; the agent's own
    files are in a subdirectory of it.
    """

    plugins: PluginDirectory
    tracker: HolderTracker
    register: Register
    claim_side: ClaimSide
    vendors: VendorPlugins
    timing: RegistrationTiming | None
    scan_wanted: asyncio.Event
    cdi_directory: str = cdi.DIRECTORY


class Service(EndpointHost):
    """Serves one resource: reads the source's device lists, registers with the kubelet, calls the hook `released`."""

    def __init__(self, source: DeviceSource, context: ServiceContext) -> None:
        self.source = source
        self.resource = source.resource
        self._register = context.register
        if problem := overlong(source):
            what = "devices of a hook that overruns are unavailable until it ends"
            _LOG.warning("%s; %s", problem, what, extra={"resource": source.resource})
        self.inventory = Inventory(source.resource)
        self.inventory.subscribe(InventoryLog(source.resource, self._holder))
        self.follower = SourceFollower(source, self.inventory, self)
        self.endpoint = (AdoptedEndpoint if isinstance(source, AdoptedSource) else Endpoint)(
            source, self.inventory, context.tracker.in_flight, self, context.tracker, context.register
        )
        self.registration = PluginRegistration(self.endpoint, context.plugins, context.timing)
        self._context = context
        self._released: frozenset[Allocation] = frozenset()
        """The ended allocations for whose devices the hook `released` was called before a new grant. An allocation
        stays here until a scan no longer finds it."""
        context.register.releases.statistics[source.resource] = self.endpoint.statistics.hooks
        self.existing: frozenset[str] = frozenset()
        """The ids that pods got before this process started and whose devices the source has not listed yet."""
        self._held_twice: frozenset[str] = frozenset()
        self._elsewhere: Mapping[str, frozenset[DeviceKey]] = {}
        self._list_inputs: object = None
        """The inputs of the device list (`Endpoint.list_inputs`) at the last scan."""
        self._forgettable: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        """The devices that had vanished, and the legacy ids (of a former configuration), at the last scan. If such a
        device or id has no holder at the next scan, it is forgotten."""

    async def run(self) -> None:
        """Serve the resource until cancelled.

        Raises RegistrationError if the resource cannot be served on this node at all.
        """
        context = self._context
        self.inventory.subscribe(lambda snapshot: context.scan_wanted.set() if snapshot.gone else None)
        self.inventory.subscribe(lambda _: context.register.notify())
        self.existing = frozenset(context.tracker.snapshot.of(self.resource)) | self._ids
        self.follower.start()
        try:
            await self.registration.run()
        finally:
            await self.follower.end()

    # The endpoint and its registration call the following methods (see EndpointHost).

    def granted(self) -> None:
        """Request a scan, to find out which pod got the granted ids."""
        self._context.scan_wanted.set()

    def draining(self) -> Collection[str]:
        """Return the devices that will move to DRA as soon as they are free, because the configuration has changed."""
        return self._context.claim_side.draining(self.resource)

    async def recorded(self) -> KubeletRecord | None:
        """Return the resource's entries in the kubelet's checkpoint; None if the checkpoint cannot be read."""
        return await self._context.tracker.recorded(self.resource, self._register.listed.served)

    async def kubelet_started(self, kubelet: FileIdentity | None) -> None:
        """If the kubelet is new, record the pods that may hold devices: it may have lost its checkpoint."""
        await self._context.tracker.kubelet_started(kubelet)

    def contested(self, reason: str) -> None:
        """Tell the other parts of the agent that another plugin has registered the resource with the kubelet.

        reason: the evidence.
        """
        self._context.scan_wanted.set()
        self._context.vendors.bypassed(self.resource)
        self._context.claim_side.contested(self.resource, reason)

    async def metadata(self, devices: Sequence[Device]) -> ContainerEdits:
        """Write the files that describe a container's devices; return edits that mount these files."""
        names = [(device_name(device.id), device) for device in devices]
        driver = self.source.driver or self.resource.partition("/")[0]
        where, pool = (
            (self._context.cdi_directory, self.resource, driver),
            self._context.claim_side.node_name or node_name(),
        )
        by_limits = device_metadata.by_limits
        return await self.inventory.looks.at("metadata", by_limits, *where, pool, names, brief=True)

    # The object that reads the source's device lists calls the following methods (see ListReceiver).

    def take_source(self, source: DeviceSource) -> None:
        """Use the hooks and settings of another source."""
        former, self.source = self.source, source
        self.endpoint.replace(source)
        if source.hooks != former.hooks:
            self.registration.wake()
        self._context.scan_wanted.set()

    def listed(self) -> None:
        """If ids that pods got before the agent's start are not offered now, list these ids as unhealthy."""
        if self.existing:
            before, self.existing = self.existing, self.endpoint.ids.adopt_existing(self.existing)
            self.endpoint.refresh()
            if before != self.existing:
                self._context.scan_wanted.set()

    def release_idle(self) -> None:
        """Request a scan if the hook `released` must still be called for a device of this resource without a holder."""
        if any(of == self.resource for of, _ in self._register.releases.pending()):
            self._context.scan_wanted.set()

    @property
    def _ids(self) -> frozenset[str]:
        """The ids of this resource that pods hold according to the register."""
        return frozenset(allocation.device_id for allocation in self._register.snapshot.allocations_of(self.resource))

    def _holder(self, device: str) -> str:
        """Return a device's holders as text, from the last scan or from the register; "" if there are none."""
        tracker = self._context.tracker
        held = [allocation for allocation in tracker.snapshot.held if allocation.resource == self.resource]
        if pods := {
            tracker.title(allocation.pod_uid) for allocation in held if self.device_of(allocation.device_id) == device
        }:
            return f"pod {', '.join(sorted(pods))}"
        now, key = self._register.snapshot, (self.resource, device)
        named = {f"claim {claim.title}" for claim in now.claims_on(self.resource, {device})}
        named |= {
            f"pod {allocation.pod or 'of a name not known yet'}"
            for allocation in now.allocations_on(self.resource, {device})
        }
        return ", ".join(sorted(named)) or ("a pod or claim" if self._register.is_held(key) else "")

    def ids_now(self, device: Device) -> tuple[str, ...]:
        """Return the ids under which the kubelet knows a device now."""
        return self.endpoint.ids.names_of(device)

    def device_of(self, device_id: str) -> str:
        """Return the device of an id that the kubelet knows."""
        return self.endpoint.ids.device_id_of(device_id)

    def awaited(self, unreleased: Collection[DeviceKey]) -> frozenset[str]:
        """Return the kubelet ids for which the agent has work to do as soon as they have no holder.

        Ids of vanished devices, and ids of a former configuration, are then removed from the device list. For devices
        that wait for the hook `released`, the hook is then called. unreleased: the devices of all resources that wait
        for `released`.
        """
        snapshot, ids_now = self.inventory.snapshot, self.endpoint.ids
        devices = snapshot.gone.union(device for of, device in unreleased if of == self.resource)
        ids = frozenset(name for device in devices for name in ids_now.names_of(snapshot.devices[device]))
        return ids | ids_now.legacy.keys()

    def observe(self, now: HolderSnapshot, seen: KubeletSnapshot, held_twice: Collection[str]) -> None:
        """Apply a scan's result: call `released` for free devices, and forget vanished devices without a holder.

        seen: the part of the result that is about this resource. held_twice: see `ResourceStatus`.
        """
        ids, register = self.endpoint.ids, self._register
        in_use = self._ids | seen.held.keys()
        self._released &= now.held.keys()
        self.existing &= in_use
        snapshot = self.inventory.snapshot
        if "released" in self.source.hooks:
            register.releases.look(self.resource, all_known=self._context.tracker.all_pods_listed)
        if now.current and now.registered is not None and self.endpoint.streams.live:
            # Forget only devices that had vanished at the previous scan already, because the register knows every grant
            # of such a device by now.
            registered = now.registered.get(self.resource, frozenset())
            gone_before, legacy_before = self._forgettable
            legacy = ids.legacy.keys() & legacy_before
            # Until the resource has a device list, the ids in the checkpoint may be those of another plugin.
            if self.endpoint.ready:
                ids.forget(legacy - in_use - registered)
            held = {name for name in snapshot.gone if register.is_held((self.resource, name))}
            held |= set(map(ids.device_id_of, in_use | registered))
            held |= {name for name in snapshot.gone if register.evidence_missing(self.resource, name)}
            self.inventory.forget((snapshot.gone & gone_before) - held)
        self._forgettable = snapshot.gone, frozenset(ids.legacy)
        self._held_twice = frozenset(held_twice)
        unlisted = (device_id for device_id in seen.held if ids.device_id_of(device_id) not in snapshot.devices)
        self._elsewhere = {
            device_id: same for device_id in unlisted if (same := register.same_as(self.resource, device_id))
        }
        before, self._list_inputs = self._list_inputs, self.endpoint.list_inputs()
        if self._list_inputs != before:
            self.endpoint.refresh()

    async def release_former(self, names: Sequence[str]) -> None:
        """Before a grant of these ids, run `released` to its end for their devices whose holders have ended.

        The kubelet may allocate an id to the next pod before a scan notices the end of the id's holder. Raises Refusal
        if `released` failed, or is still running for one of the devices.
        """
        register, listed, resolver = self._register, self.inventory.devices, self.endpoint.ids
        ids = {device: resolver.ids_of(device) for device in map(resolver.device_id_of, names) if device in listed}
        keys = [(self.resource, device) for device in ids]
        try:
            await register.hooks.wait(keys, resets=False)
            every = [name for those in ids.values() for name in those]
            ended, others = await self._context.tracker.ended(self.resource, every)
            former = {allocation.device_id for allocation in ended - self._released}
            allocations = register.snapshot.allocations_of(self.resource)
            # No evidence names a pod that ended so early that the kubelet dropped it from the checkpoint before any
            # scan. So a pending grant without any holder counts as a former holder.
            named = {allocation.device_id for allocation in ended | others}
            for record in allocations:
                if record.pending and not (record.holders or record.device_id in named or is_recent(record)):
                    former.add(record.device_id)
            recorded = {allocation.device_id for allocation in allocations}
            in_use = {allocation.device_id for allocation in others}
            in_use |= {allocation.device_id for allocation in allocations if allocation.pending} - set(names)
            in_use |= recorded - former
            free = {device: those for device, those in ids.items() if in_use.isdisjoint(those)}
            units = {allocation_unit(self.resource, name) for those in free.values() for name in those}
            await register.release([(self.resource, device) for device in free], units)
            await register.hooks.wait(keys, resets=False)
        except DeviceBusyError as error:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "excluded", f"{self.resource}: {error}") from error
        for key in keys:
            if (failure := register.releases.failed.get(key)) is not None:
                details = f"{titled(key)} is not granted before `released` succeeds: {failure.error}"
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "released", details)
        released = {name for those in free.values() for name in those}
        self._released |= {allocation for allocation in ended if allocation.device_id in released}

    @property
    def vendor(self) -> VendorConnection | None:
        """The connection to the vendor's plugin that lists the devices; None if the resource has no vendor's plugin."""
        return self.source.plugins.connection(self.resource) if isinstance(self.source, AdoptedSource) else None

    def status(self) -> ResourceStatus:
        """Return the present status of the resource. Any thread may call this method."""
        name, context = self.resource, self._context
        register, withheld = context.register, {}
        for side in SIDES:
            last = register.last_withheld(name, side)
            for device, why in last.devices.items():
                if side == "plugin" or device in last.by_others:
                    withheld[device] = Withheld("foreign" if device in last.by_others else "excluded", why)
        withheld |= {
            device: Withheld("unreleased", failure.reason, register.snapshot.state(name, device).healthy)
            for (of, device), failure in tuple(register.releases.failed.items())
            if of == name
        }
        withheld |= {
            device: Withheld("unknown", why, register.snapshot.state(name, device).healthy)
            for device in self.inventory.devices
            if (why := register.evidence_missing(name, device))
        }
        for device_id, reason in context.tracker.unnamed_reasons(name).items():
            withheld.setdefault(self.endpoint.ids.device_id_of(device_id), Withheld("held", reason))
        return ResourceStatus(
            name,
            self.inventory.snapshot,
            self.source.replicas,
            self.registration.statistics.registered,
            self.endpoint.streams.live,
            context.tracker.holders(name),
            self.endpoint.statistics,
            self.registration.statistics,
            self.follower.error,
            withheld,
            self._held_twice,
            self._elsewhere,
            self.vendor,
        )


@dataclass(eq=False)
class Supervisor:
    """Starts, replaces and ends the services of resources, and restarts failed services.

    services: for each resource, its service; only this class changes the mapping while the agent runs. fail: a function
    that is called with the reason if a resource cannot be served on this node at all.
    """

    services: dict[str, Service]
    context: ServiceContext
    fail: Callable[[str], None]
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _child_tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _parents: dict[str, str] = field(default_factory=dict, init=False)
    """For the resource of each child source, the resource of its parent source."""

    def start(self, service: Service, *, fatal: bool = True) -> None:
        """Start a resource's service. fatal: whether the agent ends if the first registration fails."""
        name = service.resource
        self._tasks[name] = asyncio.create_task(self._supervise(service, fatal=fatal), name=f"serve {name}")
        self._follow_child_sources(service.source)
        self.context.scan_wanted.set()

    async def end(self) -> None:
        """End all services."""
        await cancel_all((*self._child_tasks.values(), *self._tasks.values()))

    async def reconfigure(self, wanted: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
        """Serve these sources. End the services of resources that are neither in `wanted` nor in `unchanged`.

        The resource of a child source (`DeviceSource.child_sources`) is also served while the parent source's resource
        is in `wanted` or `unchanged`.
        """
        kept = {*wanted, *unchanged}
        gone = [name for name in self._tasks if name not in kept and self._parents.get(name) not in kept]
        # An endpoint either calls a source's hooks or forwards calls to a vendor's plugin. So a change between the two
        # needs a new service.
        for name, source in wanted.items():
            if name in self._tasks and self._adopted(name) is not isinstance(source, AdoptedSource):
                gone.append(name)
        await cancel_all([self._tasks[name] for name in gone])
        replaced = [(self.services[name], source) for name, source in wanted.items() if name in self.services]
        for name, source in wanted.items():
            self._parents.pop(name, None)
            self.serve(source)
        await asyncio.gather(*(service.follower.replaced(source) for service, source in replaced))

    def _adopted(self, name: str) -> bool:
        return name in self.services and isinstance(self.services[name].source, AdoptedSource)

    def serve(self, source: DeviceSource) -> None:
        """Serve a source: start a service, or replace the source of the resource's service."""
        name = source.resource
        if name in self.services:
            self.services[name].follower.replace(source)
            self._follow_child_sources(source)
        else:
            self.services[name] = Service(source, self.context)
            self.start(self.services[name], fatal=False)

    def _follow_child_sources(self, source: DeviceSource) -> None:
        """Begin to read the child sources of this source; stop reading those of the replaced source."""
        name = source.resource
        if (before := self._child_tasks.pop(name, None)) is not None:
            before.cancel()
        if type(source).child_sources is DeviceSource.child_sources:
            self._end_children(name, ())
        else:
            work = self._serve_child_sources(source)
            self._child_tasks[name] = asyncio.create_task(work, name=f"child sources of {name}")

    def _end_children(self, parent: str, kept: Collection[str]) -> None:
        """End the child resources of the replaced source, except `kept`, which the new source yields as well."""
        for name in [name for name, of in self._parents.items() if of == parent and name not in kept]:
            self._tasks[name].cancel()

    async def _serve_child_sources(self, parent: DeviceSource) -> None:
        served: set[str] = set()
        backoff = Backoff(first=0.5, most=60.0)
        while True:
            try:
                async for children in parent.child_sources():
                    checked = checked_children(parent, children)
                    if not served:
                        self._end_children(parent.resource, [child.resource for child in checked])
                    for child in checked:
                        name = child.resource
                        if name in served:
                            continue
                        served.add(name)
                        if name in self.services and self._parents.get(name) != parent.resource:
                            text = "%s has a source of its own; the child source of %s is not served"
                            _LOG.info(text, name, parent.resource)
                            continue
                        self._parents[name] = parent.resource
                        self.serve(child)
                        self.context.claim_side.brought(name, parent.resource)
                    backoff.reset()
                return
            except Exception:
                delay = backoff.next()
                message = "child_sources failed; the previous ones stay, trying again in %.1f s"
                _LOG.exception(message, delay, extra={"resource": parent.resource})
                await asyncio.sleep(delay)

    async def _supervise(self, service: Service, *, fatal: bool) -> None:
        """Run a service, and restart it after an error.

        fatal: whether the agent ends if the service's first registration fails.
        """
        backoff = Backoff(first=1.0, most=30.0)
        name = service.resource
        try:
            while True:
                try:
                    await service.run()
                except RegistrationError as error:
                    if fatal and not service.registration.statistics.registrations:
                        self.fail(str(error))
                        return
                    # The error is logged without a traceback, because the user must correct its cause.
                    _LOG.error("%s; trying again", error)
                except Exception:
                    _LOG.exception("the resource's service failed; trying again", extra={"resource": name})
                await asyncio.sleep(backoff.next())
        finally:
            if self.services.get(name) is service:
                del self.services[name]
                self._tasks.pop(name, None)
                self._parents.pop(name, None)
                if (child_task := self._child_tasks.pop(name, None)) is not None:
                    child_task.cancel()
