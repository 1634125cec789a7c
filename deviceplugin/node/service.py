"""Serves one resource: follows its source, registers it, and has `released` called for devices that come free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import grpc

from deviceplugin import hooks, identity
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.allocation_gate import AllocationGate, Refusal
from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.ids_in_use import IdsInUse
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.kubelet.registration import Registration, Timing
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.kubelet.status import ResourceStatus
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.node.listings import listings
from deviceplugin.node.paths import Paths
from deviceplugin.source import DeviceSource

__all__ = ["Service"]

_LOG: Final = logging.getLogger(__name__)

TAKE_OVER: Final = 3.0
"""Seconds that a new source has to list its devices while the old one's hooks still answer."""


class Service:
    """One resource: its source followed, its endpoint registered, its releases told."""

    def __init__(
        self,
        source: DeviceSource,
        paths: Paths,
        in_flight: AllocationsInFlight,
        turn: asyncio.Lock,
        tracker: HolderTracker,
        guard: ExclusionGuard,
        *,
        allocation_gate: AllocationGate | None,
        timing: Timing | None,
        wake_scan: Callable[[], None],
    ) -> None:
        self.source = source
        self.inventory = Inventory(source.resource)
        self._allocation_gate = allocation_gate
        self._tracker = tracker
        self._guard = guard
        self.endpoint = Endpoint(
            source,
            self.inventory,
            in_flight,
            granted=self._granted,
            release_former=self._release_former,
            allocation_gate=allocation_gate,
            holders=tracker,
            guard=guard,
        )
        self.registration = Registration(self.endpoint, paths.plugins, turn, timing)
        self.source_error = ""
        self._in_use = IdsInUse()
        self._released: frozenset[Allocation] = frozenset()
        """Allocations that have ended, and whose devices were released before a grant; they are not forgotten yet."""
        self._first_release_due = True
        self._release_later: frozenset[str] = frozenset()
        """Devices that came free while somebody holds them under another id."""
        self._inherited: frozenset[str] = frozenset()
        self._gone_before: frozenset[str] = frozenset()
        self._former_before: frozenset[str] = frozenset()
        self._taken = asyncio.Event()
        self._wake_scan = wake_scan
        self._follower: asyncio.Task[None] | None = None

    @property
    def resource(self) -> str:
        """The resource's name."""
        return self.source.resource

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            RegistrationError: it cannot be served on this node at all.

        """
        self.inventory.subscribe(lambda snapshot: self._wake_scan() if snapshot.gone else None)
        self.inventory.subscribe(lambda snapshot: self._guard.notify())
        self._inherited = frozenset(self._tracker.snapshot.of(self.resource))
        self._follower = asyncio.create_task(self._follow(self.source), name=f"follow {self.resource}")
        try:
            await self.registration.run()
        finally:
            self._follower.cancel()
            await asyncio.wait((self._follower,), timeout=1.0)

    def replace(self, source: DeviceSource) -> None:
        """Take another source for the same resource; what is served and registered goes on.

        The old source's hooks answer until the new one has listed its devices: it cannot speak of them
        before. The inventory stays, so that devices the new source does not know become unhealthy
        instead of vanishing from under their holders.
        """
        if self._follower is None:
            self._take(source)
            return
        self._taken.clear()
        self._follower.cancel()
        self._follower = asyncio.create_task(self._follow(source), name=f"follow {self.resource}")

    async def replaced(self, source: DeviceSource) -> None:
        """Wait until this source, given to `replace`, has taken over; one that does not list in time takes over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKE_OVER):
                await self._taken.wait()
        if source is not self.source:
            self._take(source)

    def _take(self, source: DeviceSource) -> None:
        """Ask this source's hooks from now on."""
        self._taken.set()
        before, self.source = self.source, source
        self.endpoint.replace(source)
        if source.hooks != before.hooks:
            self.registration.wake()
        self._wake_scan()

    async def _follow(self, source: DeviceSource) -> None:
        """Take a source's lists for as long as it lives, and begin again when it fails."""
        backoff = Backoff(first=0.5, most=60.0)
        while True:
            try:
                async for devices in listings(source):
                    if source is not self.source:
                        self._take(source)
                    await identity.publish(self.inventory, devices)
                    self._inherit()
                    self.source_error = ""
                    backoff.reset()
            except Exception as error:
                self.source_error = f"{type(error).__name__}: {error}"
                delay = backoff.next()
                _LOG.exception(
                    "%s: the source failed; its last list of %d devices stays, trying again in %.1f s",
                    self.resource,
                    len(self.inventory.snapshot.devices),
                    delay,
                )
                await asyncio.sleep(delay)
            else:
                if source is not self.source:
                    self._take(source)
                if not self.inventory.snapshot.listed:
                    self.inventory.publish(())
                return

    def _inherit(self) -> None:
        """Take over the ids that pods have from before; sharing may have changed while no agent ran."""
        if self._inherited:
            before, self._inherited = self._inherited, self.endpoint.adopt_existing(self._inherited)
            if before != self._inherited:
                self._wake_scan()

    # Who holds what.

    def release_idle(self) -> None:
        """Have `released` called of all idle devices, as after the start: only now all holders are known."""
        self._first_release_due = True
        self._wake_scan()

    def _granted(self, names: Sequence[str]) -> None:
        self._in_use = self._in_use.granted(names)
        self._wake_scan()

    def remember(self, pending: Collection[str], held: Collection[Allocation]) -> None:
        """Count ids as pending that a former process granted.

        held: their holders from before the grant; these are not whom it was for.
        """
        self._in_use = replace(self._in_use, held=self._in_use.held | set(held)).granted(pending)

    @property
    def in_use(self) -> bool:
        """Whether anything of this resource is held or given out."""
        return bool(self._in_use.ids)

    @property
    def held_devices(self) -> frozenset[str]:
        """The devices that pods hold or were just given."""
        ids = self._in_use.ids | self._tracker.snapshot.of(self.resource).keys()
        return frozenset(map(self.endpoint.ids.device_id_of, ids))

    def device_of(self, device_id: str) -> str:
        """Return the device of one of the kubelet's ids."""
        return self.endpoint.ids.device_id_of(device_id)

    @property
    def awaited(self) -> frozenset[str]:
        """The kubelet's ids about which something is to be done once nobody holds them.

        Those of gone devices and of former sharing are forgotten; after the start, all idle ones are released; grants
        whose container is not named are over after a while.
        """
        snapshot = self.inventory.snapshot
        first = self._first_release_due and "released" in self.source.hooks
        devices = snapshot.devices if first else snapshot.gone
        ids = (name for one in devices for name in self.endpoint.ids.names_of(snapshot.devices[one]))
        return frozenset(self.endpoint.ids.legacy) | frozenset(ids) | self._in_use.pending.keys()

    def take_holders(self, now: HolderSnapshot) -> None:
        """Take in who holds what; first of all services, since a device may be held under another resource's id."""
        held = [one for one in now.held if one.resource == self.resource]
        self._in_use = self._in_use.observed(held, now.at, awake=now.awake)
        self._released &= now.held.keys()

    def observe(self, now: HolderSnapshot) -> None:
        """Draw the conclusions of a scan: what came free, and what may be forgotten."""
        device_id_of = self.endpoint.ids.device_id_of
        in_use = self._in_use.ids
        self._inherited &= in_use
        snapshot = self.inventory.snapshot
        busy = set(map(device_id_of, in_use))
        if (gate := self._allocation_gate) is not None:
            busy |= {device for device in snapshot.devices if gate.claimed(self.resource, device)}
        freed = set(map(device_id_of, self._in_use.freed)) - busy
        if self._first_release_due and snapshot.listed and self._tracker.all_pods_listed:
            # What was given back while no agent ran is not known one by one.
            self._first_release_due = False
            freed = snapshot.devices.keys() - busy
        freed |= self._release_later - busy
        used = self._guard.in_use((self.resource, name) for name in freed) if freed else frozenset()
        self._release_later = frozenset(name for _, name in used)
        devices = [
            device for name, device in snapshot.devices.items() if name in freed and (self.resource, name) not in used
        ]
        if devices and "released" in self.source.hooks:
            self._release(devices)
        if now.awake and now.registered is not None and self.endpoint.live:
            # Gone at the scan before, too: a grant between would be known by now.
            registered = now.registered.get(self.resource, frozenset())
            former = self.endpoint.ids.legacy.keys() & self._former_before
            self.endpoint.forget(former - in_use - registered)
            self.inventory.forget((snapshot.gone & self._gone_before) - busy - set(map(device_id_of, registered)))
        self._gone_before, self._former_before = snapshot.gone, frozenset(self.endpoint.ids.legacy)
        self.endpoint.refresh()

    def _release(self, devices: Sequence[Device]) -> asyncio.Task[str]:
        source = self.source
        work = hooks.call(f"released of {self.resource}", source.released, devices, timeout=source.hook_timeout)
        return self._guard.release([(self.resource, device.id) for device in devices], work)

    async def _release_former(self, names: Sequence[str]) -> None:
        """Have `released` called of devices whose holders have ended, before these ids are granted.

        The kubelet may give an id to the next pod before a scan sees that its holder has ended.

        Raises:
            Refusal: `released` failed, or still works on one of the devices.

        """
        if "released" not in self.source.hooks:
            return
        known = self.inventory.snapshot.devices
        ids = {
            device: self.endpoint.ids.ids_of(device)
            for device in map(self.endpoint.ids.device_id_of, names)
            if device in known
        }
        keys = {(self.resource, device) for device in ids}
        try:
            await self._guard.wait_released(keys)
            ended, others = await self._tracker.ended(self.resource, [name for those in ids.values() for name in those])
            in_use = {one.device_id for one in others} | (self._in_use.pending.keys() - set(names))
            former = {one.device_id for one in ended - self._released}
            gate = self._allocation_gate
            idle = keys - self._guard.in_use(keys) if former else keys
            devices = [
                known[device]
                for device, those in ids.items()
                if not former.isdisjoint(those)
                and in_use.isdisjoint(those)
                and (self.resource, device) in idle
                and not (gate is not None and gate.claimed(self.resource, device))
            ]
            # The hook goes on though the kubelet may give up the call.
            if devices and (error := await asyncio.shield(self._release(devices))):
                details = f"{self.resource}: it is not granted before `released` of its former holder succeeds: {error}"
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "released", details)
            released = {name for device in devices for name in ids[device.id]}
            self._released |= {one for one in ended if one.device_id in released}
        except ConflictError as error:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "excluded", f"{self.resource}: {error}") from error

    def status(self) -> ResourceStatus:
        """Return what is known now."""
        holders = self._tracker.holders(self.resource)
        return ResourceStatus(
            self.resource,
            self.inventory.snapshot,
            self.source.replicas,
            self.registration.statistics.registered,
            self.endpoint.live,
            holders,
            self.endpoint.statistics,
            self.registration.statistics,
            self.source_error,
            self.withheld(),
        )

    def withheld(self) -> dict[str, str]:
        """Return the devices that are given to nobody for now though their source lists them healthy, and why."""
        reasons = dict(self._guard.last_withheld(self.resource))
        if self._allocation_gate is not None:
            reasons |= self._allocation_gate.withheld(self.resource)
        for device_id, reason in self._tracker.unnamed_reasons(self.resource).items():
            reasons.setdefault(self.endpoint.ids.device_id_of(device_id), reason)
        return reasons
