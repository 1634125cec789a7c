"""One DRA driver on this node: its ledger, both its sides, its slices, and the moves between the sides."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deviceplugin import naming
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.kubelet.claim_state import ClaimStateError
from deviceplugin.kubelet.registration import Backoff
from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from dra_bridge import ledger
from dra_bridge.driver import ClaimRef, ClusterClaims, Driver, Registrar, ServedResource
from dra_bridge.handover import DeviceIdResolver, Handover, LedgerGate, Share, allocations_of
from dra_bridge.kube import (
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Cluster,
    ClusterError,
)
from dra_bridge.ledger import AsyncLedger, LedgerError, Side, State
from dra_bridge.node.claim_pods import ClaimPods
from dra_bridge.node.evidence import EvidenceReader
from dra_bridge.node.gates import DENY_ALL, ResourceGates
from dra_bridge.node.grouping import Order, groups
from dra_bridge.node.policies import HandoverPolicy
from dra_bridge.rollout import progress
from dra_bridge.slices import Offer, Pool, Publisher

__all__ = ["DriverRuntime", "Node"]

_LOG: Final = logging.getLogger(__name__)

RECONCILE: Final = 20.0
"""Seconds between two checks whether prepared claims are over; the API server is asked only of those that seem so."""
TELL: Final = 10.0
"""Seconds between two writes of the slices for a holder's sake alone."""
FIRST: Final = 5.0
"""Seconds that the first slices wait for the kubelet to take the driver's registration."""
RESOLVE: Final = 30.0
"""Seconds between two looks whether a quarantined device may leave."""

SHARE: Final = "share"
"""The section of the ledger's settings that has the last valid share of the Node's annotation, by driver."""
QUALIFIER: Final = "qualifier"
"""The section of the ledger's settings that has the qualifiers of published names, by resource."""


@dataclass(frozen=True, slots=True)
class Node:
    """What the drivers of a node share.

    name: the node's, which is the pool's. elsewhere: returns those of a resource's devices that claims of other drivers
    hold. freed: called when claims let go of devices. alarm: writes a warning Event about the node. annotations_read:
    waits until it is known what the Node asks for.
    """

    name: str
    agent: Agent
    cluster: Cluster
    claims: ClusterClaims
    publisher: Publisher
    gates: ResourceGates
    cdi_directory: str
    claim_status: bool
    elsewhere: Callable[[str, Iterable[str], str], Mapping[str, str]]
    freed: Callable[[], None]
    alarm: Callable[[str, str], Coroutine[Any, Any, None]]
    annotations_read: Callable[[], Awaitable[None]]


class DriverRuntime:
    """One DRA driver on this node: its ledger, both its sides, and the moves between them.

    Args:
        node: what all drivers of the node share.
        name: the driver's name.
        async_ledger: its ledger.

    """

    def __init__(self, node: Node, name: str, async_ledger: AsyncLedger) -> None:
        self.name = name
        self.async_ledger = async_ledger
        self.handovers: dict[str, Handover] = {}
        self.policies: dict[str, HandoverPolicy] = {}
        self._node = node
        self._services: dict[str, Service] = {}
        self._orders: dict[str, Order] = {}
        self._behind: dict[str, DeviceIdResolver] = {}
        node.agent.tracker.remember(allocations_of(async_ledger.snapshot))
        grants = {key: hold.since for key, hold in async_ledger.snapshot.holds.items() if hold.pending}
        node.agent.tracker.remember_grants(grants)
        guard = node.agent.guard
        self.ledger_gate = LedgerGate(
            async_ledger,
            self._behind,
            self._changed,
            self._quarantined,
            node.agent.tracker.title,
            guard,
            node.agent.tracker.allocated,
        )
        self.ledger_gate.draining = self._draining
        self._pods = ClaimPods(name, async_ledger, node.agent.tracker, node.agent.paths.kubelet_root)
        self.driver = Driver(
            name,
            node.name,
            (),
            async_ledger,
            node.claims,
            cdi_directory=node.cdi_directory,
            pull=True,
            report=node.claim_status,
            changed=self._changed,
            ready=lambda resource, device: (resource, device) in self.ledger_gate.reconciled,
            running_pods=self._pods.running,
            qualifiers=lambda resources: self.qualifiers,
            guard=guard,
        )
        self.evidence = EvidenceReader(self.driver, async_ledger, node.agent, node.cluster)
        self.registrar = Registrar(self.driver, node.agent.paths.kubelet_root, changed=self.publish)
        self._began: float | None = None
        self._node_share: Share | None = None
        self._asked = ""
        self.refused_share: str | None = None
        """The annotation's text that is not a share and was logged."""
        self._group: asyncio.TaskGroup | None = None
        self._registering: asyncio.Task[None] | None = None
        self._movers: dict[str, asyncio.Task[None]] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}
        self._reconciling: set[str] = set()
        self._without: dict[tuple[str, str], tuple[int, float | None]] = {}
        self._told: tuple[progress.Progress, str, float] | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._wants = asyncio.Event()
        self._reconciled: dict[str, asyncio.Event] = {}
        self._alarms: set[asyncio.Task[None]] = set()

    # What it serves.

    def serve(self, service: Service, policy: HandoverPolicy) -> None:
        """Serve a resource, or go on serving it under another policy or with another source."""
        resource = service.resource
        new = resource not in self.handovers
        self.policies[resource] = policy
        self._services[resource] = service
        self._behind[resource] = service.endpoint.ids.device_id_of
        self.driver.serve([ServedResource(one.source, one.inventory) for one in self._services.values()])
        self.registrar.follow()
        self._node.gates.by_resource[resource] = self.ledger_gate
        if new:
            holds = [
                one for one in self.async_ledger.snapshot.holds.values() if one.resource == resource and one.pending
            ]
            units = {one.unit for one in holds}
            held = [one for one in allocations_of(self.async_ledger.snapshot) if one.resource == resource]
            service.remember(units, [one for one in held if one.device_id in units])
            self.handovers[resource] = Handover(
                service.endpoint,
                service.inventory,
                self.async_ledger,
                self._node.agent.scanner.scan,
                self,
                self.evidence,
                share=self._share(resource),
                drain=policy.drain,
                groups=functools.partial(groups, service),
                errors=(ClusterError,),
                title=self._node.agent.tracker.title,
                group=functools.partial(self._node.agent.guard.group, resource),
                moved=self._moved,
            )
            self._reconciled[resource] = asyncio.Event()
            self._unsubscribe[resource] = service.inventory.subscribe(lambda _: self._listed(resource))
            self._move(resource)
            self._listed(resource)
        else:
            self.handovers[resource].ask(self._share(resource), policy.drain)
        self.publish()

    def drop(self, resource: str) -> None:
        """Serve a resource no more; its prepared claims can still be unprepared, nothing of it is given to pods."""
        self._services.pop(resource, None)
        self._behind.pop(resource, None)
        self._orders.pop(resource, None)
        self.policies.pop(resource, None)
        self.driver.serve([ServedResource(one.source, one.inventory) for one in self._services.values()])
        self.registrar.follow()
        self._node.gates.by_resource[resource] = DENY_ALL
        self._unsubscribe.pop(resource, lambda: None)()
        self.handovers.pop(resource, None)
        self._reconciled.pop(resource, asyncio.Event()).set()
        if (mover := self._movers.pop(resource, None)) is not None:
            mover.cancel()
        self.publish()

    def ask(self, share: Share | None, text: str = "") -> None:
        """Take the share that the Node asks for; None: the config's own. text: the annotation."""
        if share != self._node_share:
            self._node_share = share
            for resource, handover in self.handovers.items():
                handover.ask(self._share(resource), self.policies[resource].drain)
            self.publish()
        if text != self._asked:
            self._asked = text
            self.publish()

    def _share(self, resource: str) -> Share:
        return self._node_share if self._node_share is not None else self.policies[resource].share

    def keep_share(self, text: str | None) -> None:
        """Remember the annotation's share durably: an agent that starts beside an invalid one keeps it."""
        if self.async_ledger.snapshot.setting(SHARE, self.name) != text:
            task = asyncio.create_task(self._keep_share(text))
            self._alarms.add(task)
            task.add_done_callback(self._alarms.discard)

    async def _keep_share(self, text: str | None) -> None:
        try:
            await self.async_ledger.do(ledger.set_setting(SHARE, self.name, text))
        except LedgerError as error:
            _LOG.warning("%s: the share %s cannot be remembered: %s", self.name, text, error)

    # Names of published devices.

    @property
    def qualifiers(self) -> Mapping[str, str]:
        """What tells this driver's resources apart in the names of published devices, by resource."""
        settings = self.async_ledger.snapshot.settings
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
        services = self._node.agent.services.values()
        served = [service.resource for service in services if service.source.driver == self.name]
        if not kept:
            selector = f"spec.nodeName={self._node.name},spec.driver={self.name}"
            async with asyncio.timeout(5.0):
                slices = await self._node.cluster.list(RESOURCE_SLICES, field_selector=selector)
            before = progress.read(self.name, slices.items)
            known = [name for name in served if self.async_ledger.snapshot.of(name)]
            kept = before.words if before is not None else naming.qualifiers(known or served)
        for name, word in naming.kept_qualifiers(kept, served).items():
            await self.async_ledger.do(ledger.set_setting(QUALIFIER, name, word))
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
            self._node.cdi_directory,
        )
        self._node.agent.stop()

    async def _end_with_ledger(self) -> None:
        """End the agent when its ledger is lost; it begins again from evidence."""
        await self.async_ledger.lost.wait()
        self._node.agent.fail(f"{self.name}: the ledger was lost while it was in use")

    def _move(self, resource: str) -> None:
        if self._group is not None and resource not in self._movers:
            self._movers[resource] = self._group.create_task(
                self._keep_moving(resource, self.handovers[resource]), name=f"handover of {resource}"
            )

    async def _keep_moving(self, resource: str, handover: Handover) -> None:
        backoff = Backoff(first=1.0, most=30.0)
        while True:
            try:
                await self._reconcile_devices(resource)
                await self._reconciled[resource].wait()
                await self._node.annotations_read()  # what is asked for may be other than the config's share
                await handover.run()
            except Exception:
                _LOG.exception("%s: the handover failed; trying again", resource)
                await asyncio.sleep(backoff.next())

    def _listed(self, resource: str) -> None:
        """Note that the source listed other devices than before."""
        listed = self._services[resource].inventory.snapshot.devices
        # One that was unplugged may come back held by somebody: its evidence is heard anew then.
        self.ledger_gate.reconciled -= {
            key for key in self.ledger_gate.reconciled if key[0] == resource and key[1] not in listed
        }
        self._reconcile_devices_soon(resource)
        self.publish()

    def _reconcile_devices_soon(self, resource: str) -> None:
        waits = self._unreconciled(resource) or not self._reconciled[resource].is_set()
        if waits and self._group is not None and resource not in self._reconciling:
            self._reconciling.add(resource)
            self._group.create_task(self._reconcile_devices(resource), name=f"reconcile devices of {resource}")

    def _unreconciled(self, resource: str) -> list[str]:
        """Return the devices about which no evidence was reconciled yet."""
        listed = self._services[resource].inventory.snapshot.devices
        known = self.async_ledger.snapshot.devices
        return [
            name
            for name in listed
            if (resource, name) not in self.ledger_gate.reconciled or (resource, name) not in known
        ]

    async def _reconcile_devices(self, resource: str) -> None:
        """Confront the ledger with what is held, before anything is offered (R8).

        At each start all devices, for the ledger may have lost what came last; later those that
        are new.
        """
        backoff, told, tries = Backoff(first=0.1, most=5.0), "", 0
        self._reconciling.add(resource)
        try:
            while resource in self._services:
                tries += 1
                listed = self._services[resource].inventory.snapshot.listed
                if not (unreconciled := self._unreconciled(resource)) and (resource in self.qualifiers or not listed):
                    if listed and not self._reconciled[resource].is_set():
                        self._reconciled[resource].set()
                        self._services[resource].release_idle()
                    return
                elsewhere = self._node.elsewhere(resource, unreconciled, self.name)
                why = dict(elsewhere)
                try:
                    await self._decide_names(resource)
                    doubtful = await self._confront(resource, [name for name in unreconciled if name not in elsewhere])
                except (LedgerError, CheckpointError, ClaimStateError, ClusterError, OSError, TimeoutError) as error:
                    why |= dict.fromkeys(unreconciled, f"not known: {error or type(error).__name__}")
                else:
                    problem = self._node.agent.tracker.snapshot.problem
                    why |= dict.fromkeys(doubtful, f"not known: {problem}" if problem else "not known")
                    if not why:
                        backoff.reset()
                        continue
                self.ledger_gate.reasons[resource] = why
                text = "; ".join(f"{device}: {reason}" for device, reason in sorted(why.items()))
                # At the start the kubelet has not listened yet; that is soon over.
                if text != told and tries > 3:
                    told = text
                    _LOG.warning("%s: devices are withheld: %s", resource, text)
                await asyncio.sleep(backoff.next())
        finally:
            self.ledger_gate.reasons.pop(resource, None)
            self._reconciling.discard(resource)

    async def _confront(self, resource: str, devices: Sequence[str]) -> tuple[str, ...]:
        """Have the ledger hear the evidence about these devices; return those that it leaves in doubt."""
        if not devices:
            return ()
        service = self._services[resource]
        evidence = await self.evidence.read(service, devices)
        if self._services.get(resource) is not service:
            return ()  # it was dropped meanwhile
        count = len(service.inventory.snapshot.devices)
        side = Side.DRA if self._share(resource).of(count) == count else Side.PLUGIN
        done = await self.async_ledger.do(ledger.reconcile_evidence(resource, evidence, devices, side, time.time()))
        guard = self._node.agent.guard
        await self.async_ledger.identify({(resource, name): guard.identity(resource, name) for name in devices})
        self.ledger_gate.reconciled |= {(resource, name) for name in devices if name not in done.doubtful}
        for device, state in done.changed.items():
            if state is State.QUARANTINED:
                self._quarantined(resource, device)
            elif (resource, device) in self.ledger_gate.reconciled:
                _LOG.debug("%s: device %s is %s", resource, device, state.text)
        self._changed()
        return done.doubtful

    def _quarantined(self, resource: str, device: str) -> None:
        """Raise the alarm: in the log, and as an Event of the Node."""
        reason = self.async_ledger.snapshot.device(resource, device).reason
        message = f"device {device} of {resource} is quarantined: {reason}"
        _LOG.error("%s", message)
        alarm = asyncio.create_task(self._node.alarm("DeviceQuarantined", message))
        self._alarms.add(alarm)
        alarm.add_done_callback(self._alarms.discard)

    async def _keep_resolving(self) -> None:
        # Each look lists claims: of a device that stays quarantined it becomes rarer.
        backoff = Backoff(first=RESOLVE, most=10 * RESOLVE)
        while True:
            await asyncio.sleep(backoff.next())
            await self.resolve()
            if not any(record.state is State.QUARANTINED for record in self.async_ledger.snapshot.devices.values()):
                backoff.reset()

    async def resolve(self) -> None:
        """Look whether the evidence about quarantined devices is of one mind by now; done every `RESOLVE` seconds."""
        now = self.async_ledger.snapshot
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
                    state = self.async_ledger.snapshot.device(resource, name).state
                    if state is not State.QUARANTINED:
                        _LOG.warning("%s: device %s leaves quarantine; it is %s", resource, name, state.text)

    def _draining(self, resource: str) -> frozenset[str]:
        """Return the devices that new pods had better not get, since they are to move."""
        handover = self.handovers.get(resource)
        return frozenset() if handover is None else handover.draining

    async def _reconcile(self) -> None:
        """Compare what is prepared with what is wanted: at once, and from time to time."""
        backoff = Backoff(first=1.0, most=60.0)
        while True:
            try:
                # CDI files are evidence; they must not be swept away before they were heard.
                sweep = all(event.is_set() for event in self._reconciled.values())
                await self.reconcile(sweep=sweep)
            except (ClaimStateError, ClusterError, LedgerError, OSError) as error:
                _LOG.info("%s: prepared claims cannot be compared now: %s", self.name, error)
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()
                if not sweep:
                    for event in tuple(self._reconciled.values()):
                        await event.wait()
                    continue
                await asyncio.sleep(RECONCILE * (0.8 + random.random() * 0.4))  # noqa: S311  # jitter

    async def reconcile(self, *, sweep: bool) -> None:
        """End claims that all witnesses say are over (E2); write what is missing of the others.

        sweep: whether to remove CDI files of claims that the ledger does not know.

        Raises:
            ClaimStateError: the kubelet's claim state cannot be read; nothing is ended then.

        """
        unlisted = (await self._pods.running()).unlisted
        named = frozenset(claim.uid for claim in await self._pods.record())
        pods = await asyncio.to_thread(self._node.agent.tracker.pods)
        await self._name_from_server(named, pods)
        await self.driver.reconcile(named, pods, unlisted, sweep=sweep)

    async def _name_from_server(self, named: Collection[str], pods: PodProcesses) -> None:
        """Find out about claims that are known from their CDI files alone: whose they are, or that they are over."""
        nameless = [
            claim
            for claim in self.async_ledger.snapshot.claims.values()
            if claim.driver == self.name and not claim.name and claim.uid not in named
        ]
        if not nameless:
            return
        known = {
            claim["metadata"]["uid"]: claim["metadata"]
            for claim in (await self._node.cluster.list(RESOURCE_CLAIMS)).items
        }
        for claim in nameless:
            if metadata := known.get(claim.uid):
                await self.async_ledger.do(
                    ledger.describe(self.name, claim.uid, metadata["namespace"], metadata["name"])
                )
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
            # A device may be listed again in the moment in which it is forgotten.
            self._reconcile_devices_soon(resource)
        loop = asyncio.get_running_loop()
        self._began = self._began or loop.time()
        rest = self._began + FIRST - loop.time()
        reconciled = all(event.is_set() for event in self._reconciled.values())
        if not (self.registrar.statistics.registrations and reconciled) and rest > 0:
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
            known = self.async_ledger.snapshot.devices
            unlisted = (name for name in self.async_ledger.snapshot.of(resource) if name not in snapshot.devices)
            offered = frozenset(
                name
                for name in snapshot.devices
                if (resource, name) in self.ledger_gate.reconciled
                and (resource, name) in known
                and handover.offered(name)
            )
            offered -= self._node.agent.guard.withheld(resource, "dra").keys()
            without += [(resource, name) for name in (*snapshot.devices, *unlisted) if name not in offered]
            source = service.source
            replicas = {name: source.replicas_of(device) for name, device in snapshot.devices.items()}
            order = self._orders.setdefault(resource, Order()).of(snapshot.devices.keys(), source.links)
            offers.append(Offer(snapshot, offered, replicas, tuple(order), words.get(resource, "")))
        unhealthy = "NoExecute" if any(one.unhealthy == "NoExecute" for one in self.policies.values()) else "NoSchedule"
        ticket = self._node.publisher.want(
            Pool(self.name, self._node.name, tuple(offers), unhealthy, self._annotations())  # type: ignore[arg-type]
        )
        before = self._without
        self._without = {key: before.get(key, (ticket, None)) for key in without}
        self._wants.set()

    def _began_offering(self) -> bool:
        """Return whether the slices may be touched: what is in them from before stays until it is judged."""
        if not self.qualifiers:
            return False
        return any(
            (resource, name) in self.ledger_gate.reconciled
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
            for resource, device in self.async_ledger.snapshot.devices
            if (service := self._services.get(resource)) is not None
            and (device not in service.inventory.snapshot.devices or device in service.inventory.snapshot.gone)
        }
        told = progress.progress(
            self.async_ledger.snapshot, shares, waits, asked=self._asked, gone=gone, qualifiers=self.qualifiers
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
        if at is None and ticket and self._node.publisher.state(self.name).accepted >= ticket:
            at = time.monotonic()
            self._without[resource, device] = ticket, at
        return at

    async def _follow_slices(self) -> None:
        """Wake the handovers when the API server took what they wait for."""
        self.publish()
        publisher = self._node.publisher
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
        self._node.agent.guard.notify()

    def _changed(self) -> None:
        """Note that the ledger changed: who holds what, or on which side."""
        for resource, handover in self.handovers.items():
            handover.wake()
            self._services[resource].endpoint.refresh()
        self._node.freed()
        self._node.agent.guard.notify()
        self.publish()
