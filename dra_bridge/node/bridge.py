"""Both sides of one node: the plugin agent, and beside it a bridge for each DRA driver.

A resource that names a driver is decided about by that driver's ledger, on either side. What
is here puts the parts of the node together and reads the Node's annotations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from deviceplugin.kubelet.allocation_gate import AllocationGate
from deviceplugin.kubelet.orphaned_claims import OrphanedClaimGate, OrphanedClaims
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.node.paths import Paths
from deviceplugin.node.service import Service
from deviceplugin.source import DeviceSource
from dra_bridge.driver import ClusterClaims
from dra_bridge.handover import ShareError, parse_share
from dra_bridge.kube import (
    NODES,
    Cluster,
    ClusterError,
    Listed,
)
from dra_bridge.ledger import AsyncLedger, LedgerError
from dra_bridge.node.driver_runtime import SHARE, DriverRuntime, Node
from dra_bridge.node.gates import DENY_ALL, ResourceGates
from dra_bridge.node.metrics import Told
from dra_bridge.node.policies import HandoverPolicy
from dra_bridge.rollout import progress
from dra_bridge.slices import Publisher

__all__ = ["Bridge"]

_LOG: Final = logging.getLogger(__name__)

NODE_READ: Final = 5.0
"""Seconds after which is said that the Node's annotations are not known yet."""
STANDBY: Final = 2.0
"""Seconds after which is said that another agent has the ledger."""


class Bridge:
    """The agent with both sides.

    Args:
        sources: one for each resource; those with a driver are bridged.
        policies: by resource; the default is the plugin side alone.
        cluster: the API server.
        node: this node's name, which is the pool's.
        cdi_directory: where the runtime looks for CDI files.
        claim_status: whether to write `status.devices` of prepared claims.
        period: seconds between reads of the kubelet's checkpoint while they matter.

    """

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        policies: Mapping[str, HandoverPolicy],
        cluster: Cluster,
        node: str,
        paths: Paths | None = None,
        *,
        cdi_directory: str = "/var/run/cdi",
        claim_status: bool = False,
        period: float = 2.0,
        report_holders: bool = False,
    ) -> None:
        self.paths = paths or Paths()
        self.cluster = cluster
        self.node = node
        self.cdi_directory = cdi_directory
        self.claim_status = claim_status
        self.orphaned = OrphanedClaims(self.paths.kubelet_root, lambda: self.drivers.keys(), cdi_directory)
        gate = OrphanedClaimGate(self, lambda resource: None)
        self.gates = ResourceGates(gate, lambda: [bridge.ledger_gate for bridge in self.drivers.values()])
        self.claims = ClusterClaims(cluster, node)
        self.publisher = Publisher(cluster, node)
        self.drivers: dict[str, DriverRuntime] = {}
        self._policies = dict(policies)
        allocation_gate: AllocationGate = self.gates
        self.agent = Agent(
            sources,
            self.paths,
            period=period,
            report_holders=report_holders,
            allocation_gate=allocation_gate,
            observers=[gate],
            believe_checkpoint=False,
            orphaned=self.orphaned.held,
        )
        self.agent.providers.append(Told(self))
        self.agent.guard.subscribe(self._publish)
        self._shared = Node(
            node,
            self.agent,
            cluster,
            self.claims,
            self.publisher,
            self.gates,
            cdi_directory,
            claim_status,
            self.elsewhere,
            self._freed,
            self._alarm,
            self._node_read,
        )
        self._node_annotations: Mapping[str, str] = {}
        self._node_known = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def ledger_path(self, driver: str) -> Path:
        """Return where a driver's ledger lies."""
        return self.paths.kubelet_root / "plugins" / driver / "ledger.db"

    async def run(self) -> None:
        """Serve both sides until `agent.stop`, then drain and clean up; slices stay.

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
                        await self.agent.run(before_end=self._end_claims)
                finally:
                    self._group = None
                    for task in self._tasks:
                        task.cancel()
        except* AgentError as errors:
            raise errors.exceptions[0] from None
        finally:
            for bridge in self.drivers.values():
                await bridge.async_ledger.close()

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
            if self.gates.by_resource.pop(service.resource, None) is not None:
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
                async_ledger = await opening
            except LedgerError as error:
                raise AgentError(
                    f"{name}: {error}; the agent needs write access to {path.parent}, and free space there"
                ) from error
            finally:
                opening.cancel()
            if async_ledger.ledger.set_aside:
                _LOG.error(
                    "%s: the ledger could not be used and lies at %s; rebuilding it from what is held",
                    name,
                    async_ledger.ledger.set_aside,
                )
            self.drivers[name] = DriverRuntime(self._shared, name, async_ledger)
            self.agent.scanner.observers.append(self.drivers[name].ledger_gate)
        self._ask(self.drivers[name])
        self.drivers[name].serve(service, self._policies.get(service.resource, HandoverPolicy()))

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
                for claim in bridge.async_ledger.snapshot.claims_on(resource, (device,)):
                    return f"claim {claim.title} through driver {name}"
        return self.orphaned.holder(resource, device, driver)

    def _publish(self) -> None:
        for bridge in self.drivers.values():
            bridge.publish()

    def _freed(self) -> None:
        """Let the plugin side offer what claims let go of resources that have no driver any more."""
        for resource, service in self.agent.services.items():
            if resource not in self.gates.by_resource:
                service.endpoint.refresh()

    async def _end_claims(self) -> None:
        """Take no more claims; another agent may serve the devices as soon as the plugin side has ended."""
        await asyncio.gather(*(bridge.end_claims() for bridge in self.drivers.values()), return_exceptions=True)

    async def reconfigure(
        self, sources: Mapping[str, DeviceSource], policies: Mapping[str, HandoverPolicy], unchanged: Sequence[str]
    ) -> None:
        """Serve these sources from now on, those of `unchanged` resources as they are, all on these terms."""
        await self.agent.begun.wait()
        self._policies = dict(policies)
        drivers = {name: service.source.driver for name, service in self.agent.services.items()}
        kept = {*sources, *unchanged}
        for name, driver in drivers.items():
            if driver and (name not in kept or (name in sources and sources[name].driver != driver)):
                self.drivers[driver].drop(name)
        for name, source in sources.items():
            if source.driver:  # closed until its ledger is asked
                self.gates.by_resource.setdefault(name, DENY_ALL)
        await self.agent.reconfigure(sources, unchanged)
        for name in self.gates.by_resource.keys() - self.agent.services.keys():
            del self.gates.by_resource[name]
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

    async def _alarm(self, reason: str, message: str) -> None:
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

    async def _node_read(self) -> None:
        """Wait until it is known what the Node asks for: an agent that starts in an outage moves nothing back."""
        if not self._node_known.is_set():
            try:
                async with asyncio.timeout(NODE_READ):
                    await self._node_known.wait()
            except TimeoutError:
                _LOG.warning("node %s cannot be read yet; no device moves until its annotations are known", self.node)
                await self._node_known.wait()

    def _ask(self, bridge: DriverRuntime) -> None:
        key = progress.share_annotation(bridge.name)
        before = bridge.async_ledger.snapshot.setting(SHARE, bridge.name)
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
