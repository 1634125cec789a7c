"""What the parts of the DRA side share: the node, a driver on it, and each of its resources."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deviceplugin import topology
from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from deviceplugin.register.records import RecordKey, Setting
from dra_bridge.driver import DriverDirectories, DriverHost, DriverNode, RunningPods
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.moves import Handover
from dra_bridge.kube import LEASES, NODES, Cluster, ClusterError, WatchState
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.claim_lists import ClaimLists
from dra_bridge.node.claim_pods import ClaimPods
from dra_bridge.node.lease import NodeLease
from dra_bridge.node.node_object import NodeStatusWriter, NodeWatch
from dra_bridge.node.pods_and_claims import PodsAndClaims
from dra_bridge.node.share import DriverShare, HandoverPolicy
from dra_bridge.slices.publisher import Publisher

_LOG: Final = logging.getLogger(__name__)
BYPASSED: Final = 60.0
"""Seconds without another finding after which a plugin that bypasses the agent gets no Allocate any more."""


def section(driver: str) -> str:
    """Return the section of the ledger's settings that has the qualifiers of a driver's published names."""
    return f"qualifier {driver}"


def qualifiers_of(settings: Mapping[RecordKey, Setting], driver: str) -> Mapping[str, str]:
    """Return what distinguishes a driver's resources in the names of published devices, by resource."""
    mine = section(driver)
    return {resource: kept.value for (of, resource), kept in settings.items() if of == mine}


@dataclass(slots=True, eq=False)
class Order:
    """The order in which a resource's devices are published; found anew only when they or their links change.

    The slices are made after each Prepare, and finding the order of 64 partitions takes longer than a Prepare.
    """

    _devices: frozenset[str] = frozenset()
    _links: Mapping[frozenset[str], float] = field(default_factory=dict)
    _order: tuple[str, ...] = ()

    def of(self, devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[str, ...]:
        """Return the devices as `topology.arranged` has them; () where no links are known."""
        if (ids := frozenset(devices)) != self._devices or links != self._links:
            self._devices, self._links = ids, dict(links)
            self._order = tuple(topology.arranged(devices, links)) if links else ()
        return self._order


@dataclass(slots=True, eq=False)
class ResourceRuntime:
    """One resource of a driver on this node.

    leaving: another driver is to have its devices, or none: those of this driver return to the plugin's side. changed:
    set when its devices may be other ones, or unknown to the ledger. reconciled: set once the evidence about all its
    devices was reconciled. bypassed_at: when its vendor's plugin was found to bypass this agent, by
    registering with the kubelet (monotonic seconds). task: runs while it is served.
    """

    service: Service
    policy: HandoverPolicy
    handover: Handover
    leaving: bool = False
    unsubscribe: Callable[[], None] = lambda: None
    order: Order = field(default_factory=Order)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)
    bypassed_at: float = -math.inf
    task: asyncio.Task[None] | None = None

    @property
    def listed(self) -> InventorySnapshot:
        """The resource's devices as of now."""
        return self.service.inventory.snapshot


@dataclass(eq=False)
class DriverContext(DriverHost):
    """What the parts of one driver on this node share. resources: by name, as they are at any time.

    reconciled: (resource, device) of those whose evidence this process has compared with the ledger. No other one
    is offered or granted: the ledger may have lost the last changes. reasons: by resource and device, why it is not
    known yet who holds it. pods: tell which pods use claims. claims: set when claims came or went, or a device begins
    to move for one.
    """

    name: str
    node: BridgeNode
    ledger: AsyncLedger
    share: DriverShare
    resources: dict[str, ResourceRuntime] = field(default_factory=dict)
    reconciled: set[DeviceKey] = field(default_factory=set)
    reasons: dict[str, Mapping[str, str]] = field(default_factory=dict)
    claims: asyncio.Event = field(default_factory=asyncio.Event)
    pods: ClaimPods = field(init=False)
    _names: tuple[object, Mapping[str, str]] = field(default=(None, {}), init=False)

    def qualifiers(self, resources: Sequence[str] = ()) -> Mapping[str, str]:
        """Return those that the ledger keeps; a resource has none before its names are decided."""
        settings = self.ledger.snapshot.settings
        if self._names[0] is not settings:
            self._names = settings, qualifiers_of(settings, self.name)
        return self._names[1]

    async def running_pods(self) -> RunningPods:
        """See `ClaimPods`."""
        return await self.pods.running()

    def last_running_pods(self) -> RunningPods:
        """See `ClaimPods`."""
        return self.pods.last

    def claims_changed(self) -> None:
        """Have the other parts take notice soon."""
        self.claims.set()

    def ready(self, resource: str, device: str) -> bool:
        """Return whether it is known who holds a device."""
        runtime = self.resources.get(resource)
        return runtime is not None and (runtime.leaving or (resource, device) in self.reconciled)

    def bypassed(self, resource: str) -> bool:
        """Return whether pods may just be given devices of an adopted resource by a plugin that bypasses this agent."""
        runtime = self.resources.get(resource)
        return runtime is not None and time.monotonic() < runtime.bypassed_at + BYPASSED

    def unknown(self, resource: str, device: str) -> str:
        """Return why it is not known yet who holds a device; "" if it is."""
        if self.ready(resource, device):
            return ""
        return self.reasons.get(resource, {}).get(device, "the agent has just started, or the device is new")


@dataclass(frozen=True, slots=True)
class BridgeNode:
    """What the runtimes of a node's drivers share."""

    drivers: DriverNode
    directories: DriverDirectories
    agent: Agent
    cluster: Cluster
    pods_and_claims: PodsAndClaims
    claims: ClaimLists
    publisher: Publisher
    watch: NodeWatch
    allocatable: AllocatableStatus
    status_writer: NodeStatusWriter
    lease: NodeLease

    @property
    def name(self) -> str:
        """The node's name, which is the pool's."""
        return self.drivers.pool

    @property
    def directory(self) -> Path:
        """The agent's own directory among the kubelet's plugins, with the ledger and the sockets of all drivers."""
        return self.directories.own

    @property
    def watches(self) -> Mapping[str, WatchState]:
        """Whether the watches of the API server are alive, by what they watch."""
        return {**self.publisher.watches, NODES.plural: self.watch.state, LEASES.plural: self.lease.state}

    async def alarm(self, reason: str, message: str) -> None:
        """Write a warning Event about this node, if the API server takes it."""
        try:
            await self.cluster.event(NODES, {"name": self.name, "uid": self.name}, reason, message, self.name)
        except ClusterError as error:
            _LOG.info("cannot write an Event: %s", error)
