"""What the parts of the DRA side share: the node, a driver on it, and each of its resources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from dra_bridge.driver import ClusterClaims
from dra_bridge.handover.gate import LedgerGate
from dra_bridge.handover.moves import Handover
from dra_bridge.kube import Cluster, ClusterError
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.gates import ResourceGates
from dra_bridge.node.grouping import Order
from dra_bridge.node.policies import HandoverPolicy
from dra_bridge.node.share import DriverShare, NodeAnnotations
from dra_bridge.slices.publisher import Publisher

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ResourceRuntime:
    """One resource of a driver on this node.

    unsubscribe: ends the subscription of its inventory. changed: set when its devices may be other ones, or unknown to
    the ledger. reconciled: set once the evidence about all its devices was reconciled. task: runs while it is served.
    """

    service: Service
    policy: HandoverPolicy
    handover: Handover
    unsubscribe: Callable[[], None] = lambda: None
    order: Order = field(default_factory=Order)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reconciled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class DriverContext:
    """What the parts of one driver on this node share. resources: by name, as they are at any time."""

    name: str
    node: Node
    ledger: AsyncLedger
    gate: LedgerGate
    share: DriverShare
    resources: dict[str, ResourceRuntime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """What the drivers of a node share. name: the node's, which is the pool's.

    foreign_holder: says which claim of another driver than the third argument holds a device (resource, id), or may; ""
    if none does.
    """

    name: str
    agent: Agent
    cluster: Cluster
    claims: ClusterClaims
    publisher: Publisher
    gates: ResourceGates
    foreign_holder: Callable[[str, str, str | None], str]
    annotations: NodeAnnotations
    cdi_directory: str
    claim_status: bool

    def refresh_undriven(self) -> None:
        """Let the plugin side offer what claims let go of resources that have no driver any more."""
        for resource, service in self.agent.services.items():
            if resource not in self.gates.by_resource:
                service.endpoint.refresh()

    async def alarm(self, reason: str, message: str) -> None:
        """Write a warning Event about this node, if the API server takes it."""
        regarding = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "uid": self.name}}
        try:
            await self.cluster.event(regarding, reason, message, node=self.name)
        except ClusterError as error:
            _LOG.info("no Event could be written: %s", error)
