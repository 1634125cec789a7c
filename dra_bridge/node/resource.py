"""Defines the state that the objects for DRA on a node share: of the node, each driver, and each driver's resource."""

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
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.kubelet.containers import Starts
from deviceplugin.node.agent import Agent
from deviceplugin.node.evidence import DriverEvidence
from deviceplugin.node.service import Service
from deviceplugin.register.records import RecordKey, Setting
from dra_bridge.driver import DriverDirectories, DriverHost, DriverNode, RunningPods
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.moves import Handover
from dra_bridge.kube import LEASES, NODES, Cluster, ClusterError, WatchState
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.claim_lists import ClaimLists
from dra_bridge.node.claim_pods import ClaimPods, PodsAndClaims
from dra_bridge.node.lease import NodeLease
from dra_bridge.node.node_object import NodeStatusWriter, NodeWatch
from dra_bridge.node.share import DriverShare, HandoverPolicy
from dra_bridge.slices.publisher import Publisher

_LOG: Final = logging.getLogger(__name__)
BYPASSED: Final = 60.0
"""Seconds for which a plugin that bypasses the agent may still get an Allocate after its last known registration."""


def section(driver: str) -> str:
    """Return the name of the ledger file's section with the qualifiers (name prefixes) of a driver's resources."""
    return f"qualifier {driver}"


def qualifiers_of(settings: Mapping[RecordKey, Setting], driver: str) -> Mapping[str, str]:
    """Return, for each resource of a driver, its qualifier: the prefix of the published names of its devices."""
    mine = section(driver)
    return {resource: kept.value for (of, resource), kept in settings.items() if of == mine}


@dataclass(slots=True, eq=False)
class Order:
    """The order of a resource's devices in the slices, which is computed only when the devices or their links change.

    The slices are computed after each Prepare, but computing the order of 64 partitions takes longer than a Prepare.
    """

    _devices: frozenset[str] = frozenset()
    _links: Mapping[frozenset[str], float] = field(default_factory=dict)
    _order: tuple[str, ...] = ()

    def of(self, devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[str, ...]:
        """Return the devices in the order that `topology.arranged` gives them; () if no links are known."""
        if (ids := frozenset(devices)) != self._devices or links != self._links:
            self._devices, self._links = ids, dict(links)
            self._order = tuple(topology.arranged(devices, links)) if links else ()
        return self._order


@dataclass(slots=True, eq=False)
class ResourceRuntime:
    """One resource of a driver on this node.

    leaving: whether the resource names another driver now, so that its devices in this driver's slices return to the
    device plugin. changed: an event, set when the resource's devices may have changed, or may be missing in the ledger
    file. reconciled: an event, set once the ledger's records of all devices of the resource were compared with
    evidence.
    bypassed_at: when a vendor's plugin of the resource last bypassed this agent by registering with the kubelet
    (monotonic seconds). task: the task that serves the resource.
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
        """The present devices of the resource."""
        return self.service.inventory.snapshot


@dataclass(eq=False)
class DriverContext(DriverHost):
    """The common state of the objects of one driver on this node.

    resources: for each name, the driver's present resource. evidence: the devices of the driver that were compared with
    evidence of holders, and the reasons why others were not. pods: the object that finds the pods that use claims.
    claims: an event, set when a claim was prepared or unprepared, or when a device begins to move to DRA for a claim.
    """

    name: str
    node: BridgeNode
    ledger: AsyncLedger
    share: DriverShare
    resources: dict[str, ResourceRuntime] = field(default_factory=dict)
    claims: asyncio.Event = field(default_factory=asyncio.Event)
    evidence: DriverEvidence = field(init=False)
    pods: ClaimPods = field(init=False)
    _names: tuple[object, Mapping[str, str]] = field(default=(None, {}), init=False)

    def __post_init__(self) -> None:
        self.node.contexts[self.name] = self
        self.evidence = self.node.agent.evidence.drivers.setdefault(self.name, DriverEvidence())

    def qualifiers(self, resources: Sequence[str] = ()) -> Mapping[str, str]:
        """Return, for each resource with a recorded qualifier (prefix of published names), this qualifier."""
        settings = self.ledger.snapshot.settings
        if self._names[0] is not settings:
            self._names = settings, qualifiers_of(settings, self.name)
        return self._names[1]

    async def running_pods(self) -> RunningPods:
        """Return the pods whose processes run; see `ClaimPods.running`."""
        return await self.pods.running()

    def last_running_pods(self) -> RunningPods:
        """Return the last result of `ClaimPods.running`."""
        return self.pods.last

    async def starts(self, pods: Collection[str]) -> Starts:
        """Return how often the kubelet has begun to start each container of these pods. Raises OSError."""
        tracker = self.node.agent.tracker
        return await tracker.looks.at("container starts", tracker.starts.read, pods)

    async def restarted(self, before: Starts, pods: Collection[str], waited: float) -> bool:
        """Return whether the former containers of these pods have ended; see `ContainerStarts.restarted`."""
        tracker = self.node.agent.tracker
        return await tracker.looks.at("container starts", tracker.starts.restarted, before, pods, waited)

    def claims_changed(self) -> None:
        """Make `DriverRuntime` update device lists, moves and slices, because claims have changed."""
        self.claims.set()

    def ready(self, resource: str, device: str) -> bool:
        """Return whether claims may get a device: its holders are known, or its resource is leaving the driver."""
        runtime = self.resources.get(resource)
        return runtime is not None and (runtime.leaving or (resource, device) in self.evidence.reconciled)

    def bypassed(self, resource: str) -> bool:
        """Return whether the vendor's plugin of an adopted resource may be allocating devices without this agent."""
        runtime = self.resources.get(resource)
        return runtime is not None and time.monotonic() < runtime.bypassed_at + BYPASSED


@dataclass(frozen=True, slots=True)
class BridgeNode:
    """The objects of a node that the runtimes of all DRA drivers use.

    contexts: for the name of each driver, also of former drivers that still serve claims, the driver's context.
    """

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
    contexts: dict[str, DriverContext] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the node, which is also the name of its pools."""
        return self.drivers.pool

    @property
    def directory(self) -> Path:
        """The agent's directory in the kubelet's directory `plugins`, which contains the ledger file."""
        return self.directories.own

    @property
    def watches(self) -> Mapping[str, WatchState]:
        """The state of each watch at the API server; the key is the plural of the watched kind."""
        return {**self.publisher.watches, NODES.plural: self.watch.state, LEASES.plural: self.lease.state}

    async def alarm(self, reason: str, message: str) -> None:
        """Write a warning Event about this node; a failed write is only logged."""
        try:
            await self.cluster.event(NODES, {"name": self.name, "uid": self.name}, reason, message, self.name)
        except ClusterError as error:
            _LOG.info("cannot write an Event: %s", error)
