"""Both doors of one node: the plugin agent, and beside it a bridge for each DRA driver.

A resource that names a driver is decided about by that driver's ledger, through either door. What
is here only puts rooms together: the ledger's keeper at the plugin door, the driver and its
registrar at the other, the slices between, and the handover that moves devices.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc

from deviceplugin import naming, topology
from deviceplugin.config import Config, ResourceConfig
from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens
from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.kubelet.claim_state import ClaimStateError, PreparedClaim
from deviceplugin.kubelet.exclusion_guard import Side as ExclusionSide
from deviceplugin.kubelet.orphaned_claims import OrphanedClaimGate, OrphanedClaims
from deviceplugin.kubelet.registration import Backoff
from deviceplugin.kubelet.servicer import Doorkeeper, Refusal
from deviceplugin.node.agent import Agent, AgentError, Paths, Service
from deviceplugin.source import DeviceSource
from dra_bridge import ledger
from dra_bridge.driver.driver import ClaimRef, ClusterClaims, Driver, RunningPods, Served
from dra_bridge.driver.registrar import Registrar
from dra_bridge.handover.gate import Behind, Keeper, allocations_of, held_units
from dra_bridge.handover.handover import Drain, Handover, Share, ShareError, parse_share
from dra_bridge.kube.client import (
    NODES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Cluster,
    ClusterError,
    Listed,
    NotFoundError,
)
from dra_bridge.ledger import AsyncLedger, ClaimEvidence, Evidence, LedgerError, Side, State
from dra_bridge.node.metrics import Told
from dra_bridge.rollout import progress
from dra_bridge.slices.publisher import Offer, Pool, Publisher

__all__ = ["Bridge", "DriverBridge", "Terms", "terms_of"]

_LOG: Final = logging.getLogger(__name__)

RECONCILE: Final = 20.0
"""Seconds between two checks whether prepared claims are over; the API server is asked only of those that seem so."""
TELL: Final = 10.0
"""Seconds between two writes of the slices for a holder's sake alone."""
FIRST: Final = 5.0
"""Seconds that the first slices wait for the kubelet to take the driver's registration."""
RESOLVE: Final = 30.0
"""Seconds between two looks whether a quarantined device may leave."""
STANDBY: Final = 2.0
"""Seconds after which is said that another agent has the ledger."""


SHARE: Final = "share"
"""The section of the ledger's settings that has the last valid share of the Node's annotation, by driver."""
QUALIFIER: Final = "qualifier"
"""The section of the ledger's settings that has the qualifiers of published names, by resource."""

NONE: Final = Share(0)


@dataclass(frozen=True, slots=True)
class Terms:
    """How a resource's devices are divided. unhealthy: the effect of the taint on broken devices."""

    share: Share = NONE
    drain: Drain = "cordon"
    unhealthy: str = "NoSchedule"

    @classmethod
    def of(cls, resource: ResourceConfig) -> Terms:
        """Return the terms that a config file gives a resource."""
        return cls(parse_share(resource.dra.share), resource.dra.drain, resource.dra.unhealthy)


class Closed:
    """The doorkeeper of a resource whose ledger is not open yet, or not for it any more."""

    def offers(self, resource: str, device: str) -> bool:
        """Offer nothing."""
        return False

    def avoids(self, resource: str) -> Collection[str]:
        """Avoid nothing."""
        return ()

    def claimed(self, resource: str, device: str) -> bool:
        """Count everything as held: nothing is known."""
        return True

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Name no device of its own."""
        return {}

    def held(self) -> Mapping[Key, Tokens]:
        """Leave that to `claimed`."""
        return {}

    def side(self, resource: str, device: str) -> ExclusionSide:
        """Return no side."""
        return ""

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Refuse."""
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", f"{resource}: its ledger is not open now")


CLOSED: Final = Closed()


class Doors:
    """The plugin door's doorkeeper for the whole node: each resource's own keeper decides.

    free: decides about resources that have no driver. ledgers: returns the keepers of all drivers, also of those that
    no resource names any more.
    """

    def __init__(self, free: Doorkeeper, ledgers: Callable[[], Iterable[Doorkeeper]] = tuple) -> None:
        self.keepers: dict[str, Doorkeeper] = {}
        self._free = free
        self._ledgers = ledgers

    def _of(self, resource: str) -> Doorkeeper:
        return self.keepers.get(resource, self._free)

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side offers the device."""
        return self._of(resource).offers(resource, device)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self._of(resource).avoids(resource)

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device, or may."""
        return self._of(resource).claimed(resource, device)

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices that are offered to nobody for now, and why."""
        return self._of(resource).withheld(resource)

    def held(self) -> Mapping[Key, Tokens]:
        """Return what any ledger counts as held, and what it was when it was granted."""
        found: dict[Key, Tokens] = {}
        for keeper in self._ledgers():
            for key, tokens in keeper.held().items():
                found[key] = found.get(key, frozenset()) | tokens
        return found

    def side(self, resource: str, device: str) -> ExclusionSide:
        """Return on which side the device is."""
        return self._of(resource).side(resource, device)

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that the ids are given out, or raise Refusal."""
        await self._of(resource).grant(resource, names, devices)


class Order:
    """The order in which a resource's devices are published; found anew only when they or their links change.

    Each Prepare looks at the slices again, and the order of 64 partitions takes longer than a Prepare.
    """

    def __init__(self) -> None:
        self._devices: frozenset[str] = frozenset()
        self._links: Mapping[frozenset[str], float] = {}
        self._order: tuple[str, ...] = ()

    def of(self, devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[str, ...]:
        """Return the devices as `topology.arranged` has them; () where no links are known."""
        if (ids := frozenset(devices)) != self._devices or links != self._links:
            self._devices, self._links = ids, dict(links)
            self._order = tuple(topology.arranged(devices, links)) if links else ()
        return self._order


class DriverBridge:
    """One DRA driver on this node: ledger, both its doors, and the moves between them."""

    def __init__(self, bridge: Bridge, name: str, desk: AsyncLedger) -> None:
        self.name = name
        self.desk = desk
        self.handovers: dict[str, Handover] = {}
        self.terms: dict[str, Terms] = {}
        self._bridge = bridge
        self._services: dict[str, Service] = {}
        self._orders: dict[str, Order] = {}
        self._behind: dict[str, Behind] = {}
        bridge.agent.tracker.remember(allocations_of(desk.snapshot))
        grants = {key: hold.since for key, hold in desk.snapshot.holds.items() if hold.pending}
        bridge.agent.tracker.remember_grants(grants)
        guard = bridge.agent.guard
        self.keeper = Keeper(
            desk,
            self._behind,
            self._changed,
            self._quarantined,
            bridge.agent.tracker.title,
            guard,
            bridge.agent.tracker.allocated,
        )
        self.keeper.steer = self._steer
        self.driver = Driver(
            name,
            bridge.node,
            (),
            desk,
            bridge.claims,
            cdi_directory=bridge.cdi_directory,
            pull=True,
            report=bridge.claim_status,
            changed=self._changed,
            ready=lambda resource, device: (resource, device) in self.keeper.heard,
            running_pods=self._running_pods,
            qualifiers=lambda resources: self.qualifiers,
            guard=guard,
        )
        self.registrar = Registrar(self.driver, bridge.paths.kubelet_root, changed=self.publish)
        self._began: float | None = None
        self._node_share: Share | None = None
        self._asked = ""
        self.refused_share: str | None = None
        """The annotation's text that is not a share and was logged."""
        self._group: asyncio.TaskGroup | None = None
        self._registering: asyncio.Task[None] | None = None
        self._movers: dict[str, asyncio.Task[None]] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}
        self._placing: set[str] = set()
        self._without: dict[tuple[str, str], tuple[int, float | None]] = {}
        self._told: tuple[progress.Progress, str, float] | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._wants = asyncio.Event()
        self._heard: dict[str, asyncio.Event] = {}
        self._alarms: set[asyncio.Task[None]] = set()
        self._recorded: frozenset[str] = frozenset()
        """UIDs of running pods of which the ledger has all claims of this driver."""

    # What it serves.

    def serve(self, service: Service, terms: Terms) -> None:
        """Serve a resource, or go on serving it on other terms or with another source."""
        resource = service.resource
        new = resource not in self.handovers
        self.terms[resource] = terms
        self._services[resource] = service
        self._behind[resource] = service.endpoint.behind
        self.driver.served = tuple(Served(one.source, one.inventory) for one in self._services.values())
        self.registrar.follow()
        self._bridge.doors.keepers[resource] = self.keeper
        if new:
            holds = [one for one in self.desk.snapshot.holds.values() if one.resource == resource and one.pending]
            units = {one.unit for one in holds}
            held = [one for one in allocations_of(self.desk.snapshot) if one.resource == resource]
            service.remember(units, [one for one in held if one.device_id in units])
            self.handovers[resource] = Handover(
                service.endpoint,
                service.inventory,
                self.desk,
                self._bridge.agent.scan,
                self,
                self,
                share=self._share(resource),
                drain=terms.drain,
                groups=functools.partial(groups, service),
                errors=(ClusterError,),
                title=self._bridge.agent.tracker.title,
                group=functools.partial(self._bridge.agent.guard.group, resource),
                moved=self._moved,
            )
            self._heard[resource] = asyncio.Event()
            self._unsubscribe[resource] = service.inventory.subscribe(lambda _: self._listed(resource))
            self._move(resource)
            self._listed(resource)
        else:
            self.handovers[resource].ask(self._share(resource), terms.drain)
        self.publish()

    def drop(self, resource: str) -> None:
        """Serve a resource no more; its prepared claims can still be unprepared, its plugin door is closed."""
        self._services.pop(resource, None)
        self._behind.pop(resource, None)
        self._orders.pop(resource, None)
        self.terms.pop(resource, None)
        self.driver.served = tuple(Served(one.source, one.inventory) for one in self._services.values())
        self.registrar.follow()
        self._bridge.doors.keepers[resource] = CLOSED
        self._unsubscribe.pop(resource, lambda: None)()
        self.handovers.pop(resource, None)
        self._heard.pop(resource, asyncio.Event()).set()
        if (mover := self._movers.pop(resource, None)) is not None:
            mover.cancel()
        self.publish()

    def ask(self, share: Share | None, text: str = "") -> None:
        """Take the share that the Node asks for; None: the config's own. text: the annotation."""
        if share != self._node_share:
            self._node_share = share
            for resource, handover in self.handovers.items():
                handover.ask(self._share(resource), self.terms[resource].drain)
            self.publish()
        if text != self._asked:
            self._asked = text
            self.publish()

    def _share(self, resource: str) -> Share:
        return self._node_share if self._node_share is not None else self.terms[resource].share

    def keep_share(self, text: str | None) -> None:
        """Remember the annotation's share durably: an agent that starts beside an invalid one keeps it."""
        if self.desk.snapshot.setting(SHARE, self.name) != text:
            task = asyncio.create_task(self._keep_share(text))
            self._alarms.add(task)
            task.add_done_callback(self._alarms.discard)

    async def _keep_share(self, text: str | None) -> None:
        try:
            await self.desk.do(ledger.set_setting(SHARE, self.name, text))
        except LedgerError as error:
            _LOG.warning("%s: the share %s cannot be remembered: %s", self.name, text, error)

    # Names of published devices.

    @property
    def qualifiers(self) -> Mapping[str, str]:
        """What tells this driver's resources apart in the names of published devices, by resource."""
        settings = self.desk.snapshot.settings
        return {resource: kept.value for (section, resource), kept in settings.items() if section == QUALIFIER}

    async def _decide_names(self, resource: str) -> None:
        """Decide how a resource's devices are named in slices, once and durably.

        What is published or allocated keeps its name. If the ledger does not know the names, it was lost or
        is new: the slices that the API server has tell how devices were named before.

        Raises:
            LedgerError, ClusterError, TimeoutError: it cannot be decided now.

        """
        kept = self.qualifiers
        if resource in kept:
            return
        services = self._bridge.agent.services.values()
        served = [service.resource for service in services if service.source.driver == self.name]
        if not kept:
            selector = f"spec.nodeName={self._bridge.node},spec.driver={self.name}"
            async with asyncio.timeout(5.0):
                slices = await self._bridge.cluster.list(RESOURCE_SLICES, field_selector=selector)
            before = progress.read(self.name, slices.items)
            known = [name for name in served if self.desk.snapshot.of(name)]
            kept = before.words if before is not None else naming.qualifiers(known or served)
        for name, word in naming.kept_qualifiers(kept, served).items():
            await self.desk.do(ledger.set_setting(QUALIFIER, name, word))
        self.registrar.follow()  # the kubelet knows the health of devices by their names

    # Running.

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._registering = group.create_task(self.registrar.run(), name=f"registrar of {self.name}")
                group.create_task(self._reconcile(), name=f"reconcile {self.name}")
                group.create_task(self._follow_slices(), name=f"slices of {self.name}")
                group.create_task(self._keep_files(), name=f"CDI files of {self.name}")
                group.create_task(self._end_with_ledger(), name=f"ledger of {self.name}")
                for resource in self.handovers:
                    self._move(resource)
                try:
                    await self._keep_resolving()
                finally:
                    self._group = None  # a group that is ending takes no more tasks
        finally:
            for alarm in self._alarms:
                alarm.cancel()
            await self.driver.close()
            if self._publishing is not None:
                self._publishing.cancel()

    async def _running_pods(self) -> RunningPods:
        """Record in the ledger which pods use which claims; return the pods whose processes run.

        The kubelet drops a pod that was deleted by force from the claim state. So the claim state tells of all claims
        of a pod only if the kubelet counts the pod as active after the file was read, and if the pod's processes ran
        before: its claims are in the file by then.

        Raises:
            ClaimStateError: the kubelet's claim state cannot be read.
            LedgerError: the pods cannot be recorded.
            OSError: cgroups were visible before, and cannot be read now.

        """
        tracker = self._bridge.agent.tracker
        running = await asyncio.to_thread(tracker.running_pods)
        prepared = await self._record_pods()
        if running - self._recorded:
            known = self.desk.snapshot.claims
            lost = {pod for claim in prepared if (self.name, claim.uid) not in known for pod in claim.pod_uids}
            self._recorded |= await tracker.listed(running) - lost
        self._recorded &= running
        return RunningPods(running, running - self._recorded)

    async def _record_pods(self) -> list[PreparedClaim]:
        """Record the pods that came to share a claim after it was prepared, and names that CDI files do not tell.

        Returns this driver's claims in the kubelet's claim state.
        """
        prepared = await asyncio.to_thread(claim_state.read, self._bridge.paths.kubelet_root)
        mine = [claim for claim in prepared if self.name in claim.devices]
        for claim in mine:
            known = self.desk.snapshot.claims.get((self.name, claim.uid))
            if known is not None and not (known.name and claim.pod_uids <= known.pods):
                await self.desk.do(ledger.describe(self.name, claim.uid, claim.namespace, claim.name, claim.pod_uids))
        return mine

    async def end_claims(self) -> None:
        """Take no more claims, and wait for those that are being prepared."""
        if (task := self._registering) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _keep_files(self) -> None:
        """Have missing CDI files written again; end the agent where only a new mount of their directory helps."""
        await self.driver.keep_files()
        _LOG.error(
            "%s was deleted on the host while it is mounted here, no claim can be prepared; the agent ends, "
            "so that its next container mounts the directory that is there then",
            self._bridge.cdi_directory,
        )
        self._bridge.agent.stop()

    async def _end_with_ledger(self) -> None:
        """End the agent when its ledger is lost; it begins again from evidence."""
        await self.desk.lost.wait()
        self._bridge.agent.fail(AgentError(f"{self.name}: the ledger was lost while it was in use"))

    def _move(self, resource: str) -> None:
        if self._group is not None and resource not in self._movers:
            self._movers[resource] = self._group.create_task(
                self._keep_moving(resource, self.handovers[resource]), name=f"handover of {resource}"
            )

    async def _keep_moving(self, resource: str, handover: Handover) -> None:
        backoff = Backoff(first=1.0, most=30.0)
        while True:
            try:
                await self._place(resource)
                await self._heard[resource].wait()
                await self._bridge.node_read()  # what is asked for may be other than the config's share
                await handover.run()
            except Exception:
                _LOG.exception("%s: the handover failed; trying again", resource)
                await asyncio.sleep(backoff.next())

    def _listed(self, resource: str) -> None:
        """Note that the source listed other devices than before."""
        listed = self._services[resource].inventory.snapshot.devices
        # One that was unplugged may come back held by somebody: its evidence is heard anew then.
        self.keeper.heard -= {key for key in self.keeper.heard if key[0] == resource and key[1] not in listed}
        self._place_soon(resource)
        self.publish()

    def _place_soon(self, resource: str) -> None:
        waits = self._unheard(resource) or not self._heard[resource].is_set()
        if waits and self._group is not None and resource not in self._placing:
            self._placing.add(resource)
            self._group.create_task(self._place(resource), name=f"place {resource}")

    def _unheard(self, resource: str) -> list[str]:
        """Return the devices about which no evidence was heard yet."""
        listed = self._services[resource].inventory.snapshot.devices
        known = self.desk.snapshot.devices
        return [name for name in listed if (resource, name) not in self.keeper.heard or (resource, name) not in known]

    async def _place(self, resource: str) -> None:
        """Confront the ledger with what is held, before anything is offered (R8).

        At each start all devices, for the ledger may have lost what came last; later those that
        are new.
        """
        backoff, told, tries = Backoff(first=0.1, most=5.0), "", 0
        self._placing.add(resource)
        try:
            while resource in self._services:
                tries += 1
                listed = self._services[resource].inventory.snapshot.listed
                if not (unheard := self._unheard(resource)) and (resource in self.qualifiers or not listed):
                    if listed and not self._heard[resource].is_set():
                        self._heard[resource].set()
                        self._services[resource].release_idle()
                    return
                elsewhere = self._bridge.elsewhere(resource, unheard, self.name)
                why = dict(elsewhere)
                try:
                    await self._decide_names(resource)
                    doubtful = await self._confront(resource, [name for name in unheard if name not in elsewhere])
                except (LedgerError, CheckpointError, ClaimStateError, ClusterError, OSError, TimeoutError) as error:
                    why |= dict.fromkeys(unheard, f"not known: {error or type(error).__name__}")
                else:
                    problem = self._bridge.agent.tracker.snapshot.problem
                    why |= dict.fromkeys(doubtful, f"not known: {problem}" if problem else "not known")
                    if not why:
                        backoff.reset()
                        continue
                self.keeper.reasons[resource] = why
                text = "; ".join(f"{device}: {reason}" for device, reason in sorted(why.items()))
                # At the start the kubelet has not listened yet; that is soon over.
                if text != told and tries > 3:
                    told = text
                    _LOG.warning("%s: devices are withheld: %s", resource, text)
                await asyncio.sleep(backoff.next())
        finally:
            self.keeper.reasons.pop(resource, None)
            self._placing.discard(resource)

    async def _confront(self, resource: str, devices: Sequence[str]) -> tuple[str, ...]:
        """Have the ledger hear the evidence about these devices; return those that it leaves in doubt."""
        if not devices:
            return ()
        service = self._services[resource]
        evidence = await self._evidence(service, devices)
        if self._services.get(resource) is not service:
            return ()  # it was dropped meanwhile
        count = len(service.inventory.snapshot.devices)
        side = Side.DRA if self._share(resource).of(count) == count else Side.PLUGIN
        done = await self.desk.do(ledger.reconcile_evidence(resource, evidence, devices, side, time.time()))
        guard = self._bridge.agent.guard
        await self.desk.identify({(resource, name): guard.identity(resource, name) for name in devices})
        self.keeper.heard |= {(resource, name) for name in devices if name not in done.doubtful}
        for device, state in done.changed.items():
            if state is State.QUARANTINED:
                self._quarantined(resource, device)
            elif (resource, device) in self.keeper.heard:
                _LOG.debug("%s: device %s is %s", resource, device, state.text)
        self._changed()
        return done.doubtful

    def _quarantined(self, resource: str, device: str) -> None:
        """Raise the alarm: in the log, and as an Event of the Node."""
        reason = self.desk.snapshot.device(resource, device).reason
        message = f"device {device} of {resource} is quarantined: {reason}"
        _LOG.error("%s", message)
        alarm = asyncio.create_task(self._bridge.alarm("DeviceQuarantined", message))
        self._alarms.add(alarm)
        alarm.add_done_callback(self._alarms.discard)

    async def _keep_resolving(self) -> None:
        # Each look lists claims: of a device that stays quarantined it becomes rarer.
        backoff = Backoff(first=RESOLVE, most=10 * RESOLVE)
        while True:
            await asyncio.sleep(backoff.next())
            await self.resolve()
            if not any(record.state is State.QUARANTINED for record in self.desk.snapshot.devices.values()):
                backoff.reset()

    async def resolve(self) -> None:
        """Look whether the evidence about quarantined devices is of one mind by now; done every `RESOLVE` seconds."""
        now = self.desk.snapshot
        for resource, service in tuple(self._services.items()):
            listed = service.inventory.snapshot.devices
            names = [
                name
                for name, record in now.of(resource).items()
                if record.state is State.QUARANTINED and name in listed
            ]
            if not names:
                continue
            try:
                await self._confront(resource, names)
            except (LedgerError, CheckpointError, ClaimStateError, ClusterError, OSError, TimeoutError) as error:
                _LOG.info("%s: quarantined devices stay so for now: %s", resource, error)
            else:
                for name in names:
                    state = self.desk.snapshot.device(resource, name).state
                    if state is not State.QUARANTINED:
                        _LOG.warning("%s: device %s leaves quarantine; it is %s", resource, name, state.text)

    def _steer(self, resource: str) -> frozenset[str]:
        """Return the devices that new pods had better not get, since they are to move."""
        handover = self.handovers.get(resource)
        return frozenset() if handover is None else handover.steer

    async def _evidence(self, service: Service, devices: Sequence[str]) -> Evidence:
        """Ask every witness but the ledger who holds these devices.

        Raises:
            CheckpointError: an own Allocate came in between, or the kubelet's checkpoint cannot be read.
            ClaimStateError: the kubelet's claim state cannot be read.
            ClusterError: the API server cannot be asked.

        """
        resource, behind = service.resource, service.endpoint.behind
        wanted = frozenset(devices)
        ids = {(resource, one) for device in devices for one in service.endpoint.ids_of(device)}
        now = await self._bridge.agent.scan(ids)
        if now is None:
            raise CheckpointError("an Allocate came in between")
        if now.registered is None:
            raise CheckpointError(now.problem)
        held = held_units(now, resource, behind, self._bridge.agent.tracker.title)
        prepared = await asyncio.to_thread(claim_state.read, self._bridge.paths.kubelet_root)
        files = await asyncio.to_thread(self.driver.cdi_evidence)
        claims = [
            replace(claim, devices=claim.devices & wanted)
            for claim in (*self.driver.claim_evidence(prepared, resource), *files.get(resource, ()))
            if claim.devices & wanted
        ]
        known = self.desk.snapshot
        claims = [claim for claim in claims if (self.name, claim.uid) not in known.claims or self._incomplete(claim)]
        if (
            self.desk.ledger.fresh
            or self.desk.ledger.set_aside
            or any(known.device(resource, name).state is State.QUARANTINED for name in devices)
        ):
            # What is allocated: a claim that the kubelet has not prepared yet keeps its device on the DRA side.
            async with asyncio.timeout(5.0):
                claims += await self._allocations(resource, wanted, {claim.uid for claim in claims})
        held = {unit: one for unit, one in held.items() if one.device in wanted}
        return Evidence(held, tuple(claims), awake=now.awake)

    def _incomplete(self, claim: ClaimEvidence) -> bool:
        """Return whether the ledger knows a claim from evidence alone, which is heard one resource at a time."""
        known = self.desk.snapshot.claims.get((self.name, claim.uid))
        return known is not None and known.result is None and known.durable

    async def _allocations(self, resource: str, devices: frozenset[str], but: set[str]) -> list[ClaimEvidence]:
        found = []
        for claim in (await self._bridge.cluster.list(RESOURCE_CLAIMS)).items:
            metadata = claim["metadata"]
            names = {device for of, device in self._allocated(claim) if of == resource and device in devices}
            if names and metadata["uid"] not in but:
                found.append(
                    ClaimEvidence(
                        self.name, metadata["uid"], frozenset(names), False, metadata["namespace"], metadata["name"]
                    )
                )
        return found

    def _allocated(self, claim: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Return (resource, device) of this node's devices that a claim's allocation names, seen ones not."""
        results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
        devices = self.driver.devices
        return {
            (devices[name][0].source.resource, devices[name][1].id)
            for result in results
            if result.get("driver") == self.name
            and result.get("pool") == self._bridge.node
            and not result.get("adminAccess")
            and (name := result.get("device", "")) in devices
        }

    async def allocated(self) -> Mapping[tuple[str, str], str]:
        """List all claims, consistently; return namespace/name by the (resource, device) allocated here."""
        return {
            key: f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
            for claim in (await self._bridge.cluster.list(RESOURCE_CLAIMS)).items
            for key in self._allocated(claim)
        }

    async def allocates(self, claim: str, resource: str, device: str) -> bool:
        """Read one claim, by namespace/name; return whether its allocation names the device of this node."""
        namespace, _, name = claim.partition("/")
        try:
            found = await self._bridge.cluster.get(RESOURCE_CLAIMS, name, namespace)
        except NotFoundError:
            return False
        return (resource, device) in self._allocated(found)

    async def _reconcile(self) -> None:
        """Compare what is prepared with what is wanted: at once, and from time to time."""
        backoff = Backoff(first=1.0, most=60.0)
        while True:
            try:
                # CDI files are evidence; they must not be swept away before they were heard.
                sweep = all(event.is_set() for event in self._heard.values())
                await self.reconcile(sweep=sweep)
            except (ClaimStateError, ClusterError, LedgerError, OSError) as error:
                _LOG.info("%s: prepared claims cannot be compared now: %s", self.name, error)
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()
                if not sweep:
                    for event in tuple(self._heard.values()):
                        await event.wait()
                    continue
                await asyncio.sleep(RECONCILE * (0.8 + random.random() * 0.4))  # noqa: S311  # jitter

    async def reconcile(self, *, sweep: bool) -> None:
        """End claims that all witnesses say are over (E2); write what is missing of the others.

        sweep: whether to remove CDI files of claims that the ledger does not know.

        Raises:
            ClaimStateError: the kubelet's claim state cannot be read; nothing is ended then.

        """
        unlisted = (await self._running_pods()).unlisted
        named = frozenset(claim.uid for claim in await self._record_pods())
        pods = await asyncio.to_thread(self._bridge.agent.tracker.pods)
        await self._name_from_server(named, pods)
        await self.driver.reconcile(named, pods, unlisted, sweep=sweep)

    async def _name_from_server(self, named: Collection[str], pods: PodProcesses) -> None:
        """Find out about claims that are known from their CDI files alone: whose they are, or that they are over."""
        nameless = [
            claim
            for claim in self.desk.snapshot.claims.values()
            if claim.driver == self.name and not claim.name and claim.uid not in named
        ]
        if not nameless:
            return
        known = {
            claim["metadata"]["uid"]: claim["metadata"]
            for claim in (await self._bridge.cluster.list(RESOURCE_CLAIMS)).items
        }
        for claim in nameless:
            if metadata := known.get(claim.uid):
                await self.desk.do(ledger.describe(self.name, claim.uid, metadata["namespace"], metadata["name"]))
            elif not any(pods.may_run(uid) for uid in claim.pods):
                _LOG.info("%s: claim %s, known from its CDI file, is no more", self.name, claim.uid)
                await self.driver.unprepare([ClaimRef("", "", claim.uid)])

    # Slices.

    def publish(self) -> None:
        """Look again at what the slices should be, soon; many changes make one look."""
        if self._publishing is not None and self._publishing.when() - asyncio.get_running_loop().time() > 0.01:
            self._publishing.cancel()
            self._publishing = None
        if self._publishing is None and self._group is not None:
            self._publishing = asyncio.get_running_loop().call_later(0.002, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        for resource in self._services:
            self._place_soon(resource)  # a device may be listed again in the moment in which it is forgotten
        loop = asyncio.get_running_loop()
        self._began = self._began or loop.time()
        rest = self._began + FIRST - loop.time()
        heard = all(event.is_set() for event in self._heard.values())
        if not (self.registrar.statistics.registrations and heard) and rest > 0:
            # Pods that come before the driver is registered fail first and are tried again a minute later;
            # and what is in the slices from before stays until the evidence was heard.
            self._publishing = loop.call_later(rest, self._publish)
            return
        if not self._began_offering():
            return
        offers, without, words = [], [], self.qualifiers
        for resource, handover in self.handovers.items():
            service = self._services[resource]
            snapshot = service.inventory.snapshot
            known = self.desk.snapshot.devices
            unlisted = (name for name in self.desk.snapshot.of(resource) if name not in snapshot.devices)
            offered = frozenset(
                name
                for name in snapshot.devices
                if (resource, name) in self.keeper.heard and (resource, name) in known and handover.offered(name)
            )
            offered -= self._bridge.agent.guard.withheld(resource, "dra").keys()
            without += [(resource, name) for name in (*snapshot.devices, *unlisted) if name not in offered]
            source = service.source
            replicas = {name: source.replicas_of(device) for name, device in snapshot.devices.items()}
            order = self._orders.setdefault(resource, Order()).of(snapshot.devices.keys(), source.links)
            offers.append(Offer(snapshot, offered, replicas, tuple(order), words.get(resource, "")))
        unhealthy = "NoExecute" if any(one.unhealthy == "NoExecute" for one in self.terms.values()) else "NoSchedule"
        ticket = self._bridge.publisher.want(
            Pool(self.name, self._bridge.node, tuple(offers), unhealthy, self._annotations())  # type: ignore[arg-type]
        )
        before = self._without
        self._without = {key: before.get(key, (ticket, None)) for key in without}
        self._wants.set()

    def _began_offering(self) -> bool:
        """Return whether the slices may be touched: what is in them from before stays until it is judged."""
        if not self.qualifiers:
            return False
        return any(
            (resource, name) in self.keeper.heard
            for resource, service in self._services.items()
            for name in service.inventory.snapshot.devices
        ) or all(
            service.inventory.snapshot.listed and not service.inventory.snapshot.devices
            for service in self._services.values()
        )

    def _annotations(self) -> Mapping[str, str]:
        """Return what is told of the devices: at once when a side changed, later for holders alone."""
        shares = {resource: str(handover.share) for resource, handover in self.handovers.items()}
        waits = {
            (resource, device): what
            for resource, handover in self.handovers.items()
            for device, what in handover.waiting.items()
        }
        gone = {
            (resource, device)
            for resource, device in self.desk.snapshot.devices
            if (service := self._services.get(resource)) is not None
            and (device not in service.inventory.snapshot.devices or device in service.inventory.snapshot.gone)
        }
        told = progress.progress(
            self.desk.snapshot, shares, waits, asked=self._asked, gone=gone, qualifiers=self.qualifiers
        )
        sides, now = progress.encoded(progress.without_holders(told)), time.monotonic()
        if self._told is not None and self._told[1] == sides and self._told[0] != told:
            rest = self._told[2] + TELL - now
            if rest > 0:
                told = self._told[0]
                if self._publishing is None:
                    self._publishing = asyncio.get_running_loop().call_later(rest, self._publish)
        if self._told is None or self._told[0] != told:
            self._told = (told, sides, now)
        return {progress.annotation(self.name): progress.encoded(told)}

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when the API server has had slices without the device, if it has."""
        ticket, at = self._without.get((resource, device), (0, None))
        if at is None and ticket and self._bridge.publisher.state(self.name).accepted >= ticket:
            at = time.monotonic()
            self._without[resource, device] = ticket, at
        return at

    async def _follow_slices(self) -> None:
        """Wake the handovers when the API server took what they wait for."""
        self.publish()
        publisher = self._bridge.publisher
        while True:
            self._wants.clear()
            ticket = publisher.state(self.name).wanted
            if publisher.state(self.name).accepted < ticket:
                await publisher.accepted(self.name, ticket)
                for handover in self.handovers.values():
                    handover.wake()
            else:
                await self._wants.wait()

    def _moved(self) -> None:
        """Note that sides changed: devices of other resources may move along, or be offered now."""
        for handover in self.handovers.values():
            handover.wake()
        self._bridge.agent.guard.notify()

    def _changed(self) -> None:
        """Note that the ledger changed: who holds what, or on which side."""
        for resource, handover in self.handovers.items():
            handover.wake()
            self._services[resource].endpoint.refresh()
        self._bridge.freed()
        self._bridge.agent.guard.notify()
        self.publish()


def groups(service: Service) -> Sequence[frozenset[str]]:
    """Return devices that belong together: by their closest links, else by NUMA node, where that tells them apart."""
    devices = service.inventory.snapshot.devices
    linked = link_groups(devices, service.source.links)
    if linked:
        return linked
    by_numa: dict[tuple[int, ...], set[str]] = {}
    for name, device in devices.items():
        if device.numa_nodes:
            by_numa.setdefault(device.numa_nodes, set()).add(name)
    return tuple(frozenset(names) for names in by_numa.values()) if len(by_numa) > 1 else ()


def link_groups(devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[frozenset[str], ...]:
    """Return what the closest links tie together, if that are several groups; () if it is one, or nothing is tied.

    links: as of a source, higher is closer. Pairs on one board make groups of two; where every
    device has the same links to every other, nothing belongs together more than all.
    """
    pairs = {pair: score for pair, score in links.items() if len(pair) == 2 and pair <= set(devices)}
    for level in sorted(set(pairs.values()), reverse=True):
        group = {name: frozenset({name}) for name in devices}
        for pair, score in pairs.items():
            if score >= level:
                one, other = pair
                together = group[one] | group[other]
                group.update(dict.fromkeys(together, together))
        found = {names for names in group.values() if len(names) > 1}
        if len(found) > 1:
            return tuple(sorted(found, key=min))
    return ()


class Bridge:
    """The agent with both doors.

    Args:
        sources: one for each resource; those with a driver are bridged.
        terms: by resource; the default is the plugin side alone.
        cluster: the API server.
        node: this node's name, which is the pool's.
        cdi_directory: where the runtime looks for CDI files.
        claim_status: whether to write `status.devices` of prepared claims.
        period: seconds between looks at the kubelet's books while they matter.

    """

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        terms: Mapping[str, Terms],
        cluster: Cluster,
        node: str,
        paths: Paths | None = None,
        *,
        cdi_directory: str = "/var/run/cdi",
        claim_status: bool = False,
        period: float = 2.0,
        keep_books: bool = False,
    ) -> None:
        self.paths = paths or Paths()
        self.cluster = cluster
        self.node = node
        self.cdi_directory = cdi_directory
        self.claim_status = claim_status
        self.orphaned = OrphanedClaims(self.paths.kubelet_root, lambda: self.drivers.keys(), cdi_directory)
        gate = OrphanedClaimGate(self, lambda resource: None)
        self.doors = Doors(gate, lambda: [bridge.keeper for bridge in self.drivers.values()])
        self.claims = ClusterClaims(cluster, node)
        self.publisher = Publisher(cluster, node)
        self.drivers: dict[str, DriverBridge] = {}
        self._terms = dict(terms)
        doorkeeper: Doorkeeper = self.doors
        self.agent = Agent(
            sources,
            self.paths,
            period=period,
            keep_books=keep_books,
            doorkeeper=doorkeeper,
            observers=[gate],
            before_end=self._end_claims,
            believe_checkpoint=False,
            orphaned=self.orphaned.held,
        )
        self.agent.providers.append(Told(self))
        self.agent.guard.subscribe(self._publish)
        self._node_annotations: Mapping[str, str] = {}
        self._node_known = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def ledger_path(self, driver: str) -> Path:
        """Return where a driver's ledger lies."""
        return self.paths.kubelet_root / "plugins" / driver / "ledger.db"

    async def run(self) -> None:
        """Serve both doors until `agent.stop`, then drain and clean up; slices stay.

        Raises:
            AgentError: a resource cannot be served on this node at all.

        """
        try:
            async with self.cluster, asyncio.TaskGroup() as group:
                self._group = group
                try:
                    if await self._opened():
                        self._tasks = [
                            group.create_task(self.publisher.run(), name="slices"),
                            group.create_task(self._follow_node(), name="node"),
                        ]
                        self._tasks += [group.create_task(one.run(), name=one.name) for one in self.drivers.values()]
                        await self.agent.run()
                finally:
                    self._group = None
                    for task in self._tasks:
                        task.cancel()
        except* AgentError as errors:
            raise errors.exceptions[0] from None
        finally:
            for bridge in self.drivers.values():
                await bridge.desk.close()

    async def _opened(self) -> bool:
        """Bridge what is to be served; return whether that is done, False if it is to stop before."""

        async def every() -> None:
            for service in self.agent.services.values():
                await self._open(service)

        stopping, opening = asyncio.create_task(self.agent.stopping()), asyncio.create_task(every())
        try:
            await asyncio.wait({stopping, opening}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
        finally:
            for task in (stopping, opening):
                task.cancel()
            await asyncio.wait({stopping, opening})
        return not opening.cancelled()

    async def _open(self, service: Service) -> None:
        """Bridge a resource, if it names a driver.

        Raises:
            AgentError: the ledger cannot be opened.

        """
        name = service.source.driver
        if not name:
            if self.doors.keepers.pop(service.resource, None) is not None:
                service.endpoint.refresh()
            return
        if name not in self.drivers:
            path = self.ledger_path(name)
            opening = asyncio.ensure_future(AsyncLedger.open(str(path)))
            try:
                done, _ = await asyncio.wait({opening}, timeout=STANDBY)
                if not done:
                    _LOG.warning(
                        "%s: another agent on this node has the ledger %s; standing by until it goes", name, path
                    )
                desk = await opening
            except LedgerError as error:
                raise AgentError(
                    f"{name}: {error}; the agent needs write access to {path.parent}, and free space there"
                ) from error
            finally:
                opening.cancel()
            if desk.ledger.set_aside:
                _LOG.error(
                    "%s: the ledger could not be used and lies at %s; rebuilding it from what is held",
                    name,
                    desk.ledger.set_aside,
                )
            self.drivers[name] = DriverBridge(self, name, desk)
            self.agent.observers.append(self.drivers[name].keeper)
        self._ask(self.drivers[name])
        self.drivers[name].serve(service, self._terms.get(service.resource, Terms()))

    def elsewhere(self, resource: str, devices: Iterable[str], driver: str) -> dict[str, str]:
        """Return those of a resource's devices that claims of other drivers than this one hold, and the holders.

        There are some after the resource's driver was renamed or taken away.
        """
        held = ((device, self.holder(resource, device, driver)) for device in devices)
        return {device: holder for device, holder in held if holder}

    def holder(self, resource: str, device: str, driver: str | None) -> str:
        """Say which claim of another driver holds a device, or why that is not known; "" if none does."""
        for name, bridge in self.drivers.items():
            if name != driver:
                for claim in bridge.desk.snapshot.claims_on(resource, (device,)):
                    return f"claim {claim.title} through driver {name}"
        return self.orphaned.holder(resource, device, driver)

    def _publish(self) -> None:
        for bridge in self.drivers.values():
            bridge.publish()

    def freed(self) -> None:
        """Let the plugin side offer what claims let go of resources that have no driver any more."""
        for resource, service in self.agent.services.items():
            if resource not in self.doors.keepers:
                service.endpoint.refresh()

    async def _end_claims(self) -> None:
        """Take no more claims; another agent may serve the devices as soon as the plugin side has ended."""
        await asyncio.gather(*(bridge.end_claims() for bridge in self.drivers.values()), return_exceptions=True)

    async def reconfigure(
        self, sources: Mapping[str, DeviceSource], terms: Mapping[str, Terms], unchanged: Sequence[str]
    ) -> None:
        """Serve these sources from now on, those of `unchanged` resources as they are, all on these terms."""
        await self.agent.begun()
        self._terms = dict(terms)
        drivers = {name: service.source.driver for name, service in self.agent.services.items()}
        kept = {*sources, *unchanged}
        for name, driver in drivers.items():
            if driver and (name not in kept or (name in sources and sources[name].driver != driver)):
                self.drivers[driver].drop(name)
        for name, source in sources.items():
            if source.driver:  # closed until its ledger is asked
                self.doors.keepers.setdefault(name, CLOSED)
        await self.agent.reconfigure(sources, unchanged)
        for name in self.doors.keepers.keys() - self.agent.services.keys():
            del self.doors.keepers[name]
        errors: list[AgentError] = []
        for name in kept & self.agent.services.keys():
            there = set(self.drivers)
            try:
                await self._open(self.agent.services[name])
            except AgentError as error:  # the others are served all the same
                errors.append(error)
            for driver in self.drivers.keys() - there:
                if self._group is not None:
                    self._tasks.append(self._group.create_task(self.drivers[driver].run(), name=driver))
        if errors:
            raise AgentError("; ".join(dict.fromkeys(map(str, errors))))

    async def alarm(self, reason: str, message: str) -> None:
        """Write a warning Event about this node, if the API server takes it."""
        regarding = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node, "uid": self.node}}
        try:
            await self.cluster.event(regarding, reason, message, node=self.node)
        except ClusterError as error:
            _LOG.info("no Event could be written: %s", error)

    # The Node.

    async def _follow_node(self) -> None:
        """Follow the Node's annotations, which ask for shares."""
        async with aclosing(self.cluster.follow(NODES, field_selector=f"metadata.name={self.node}")) as events:
            async for event in events:
                if isinstance(event, Listed):
                    found = event.items[0] if event.items else {}
                else:
                    found = event.object if event.type != "DELETED" else {}
                annotations = (found.get("metadata") or {}).get("annotations") or {}
                if annotations != self._node_annotations or not self._node_known.is_set():
                    self._node_annotations = annotations
                    self._node_known.set()
                    for bridge in self.drivers.values():
                        self._ask(bridge)

    async def node_read(self) -> None:
        """Wait until it is known what the Node asks for: an agent that starts in an outage moves nothing back."""
        if not self._node_known.is_set():
            try:
                async with asyncio.timeout(FIRST):
                    await self._node_known.wait()
            except TimeoutError:
                _LOG.warning("node %s cannot be read yet; no device moves until its annotations are known", self.node)
                await self._node_known.wait()

    def _ask(self, bridge: DriverBridge) -> None:
        key = progress.share_annotation(bridge.name)
        before = bridge.desk.snapshot.setting(SHARE, bridge.name)
        if not self._node_known.is_set():
            bridge.ask(parse_share(before) if before is not None else None, before or "")
            return
        text = self._node_annotations.get(key)
        try:
            share = parse_share(text) if text is not None else None
        except ShareError as error:
            if text != bridge.refused_share:
                bridge.refused_share = text
                stays = f"the share {before} from before" if before is not None else "the configuration's share"
                _LOG.error("node %s: annotation %s: %s; %s stays", self.node, key, error, stays)
            bridge.ask(parse_share(before) if before is not None else None, text or "")
        else:
            bridge.refused_share = None
            bridge.keep_share(text)
            bridge.ask(share, text or "")


def terms_of(config: Config) -> dict[str, Terms]:
    """Return the terms of a config file's resources."""
    return {resource.name: Terms.of(resource) for resource in config.resources}
