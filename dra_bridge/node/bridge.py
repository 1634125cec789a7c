"""Makes, runs and ends both sides of one node: the plugin agent, and beside it a runtime for each DRA driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deviceplugin.kubelet.orphaned_claims import OrphanedClaimGate, OrphanedClaims
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.node.options import Paths
from deviceplugin.node.service import Service
from deviceplugin.register.records import LedgerError
from deviceplugin.source import DeviceSource
from dra_bridge.driver import ClusterClaims
from dra_bridge.handover.allocatable import GRACE, AllocatableStatus
from dra_bridge.kube import Cluster
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.driver_runtime import DriverRuntime
from dra_bridge.node.gates import DENY_ALL, ResourceGates
from dra_bridge.node.node_object import NodeStatusWriter, NodeWatch
from dra_bridge.node.resource import Node
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.node.status import BridgeStatus
from dra_bridge.slices.publisher import Publisher

_LOG: Final = logging.getLogger(__name__)

STANDBY: Final = 2.0
"""Seconds after which a warning is logged that another agent has the ledger."""


class Bridge:
    """The agent with both sides.

    sources: one for each resource; those with a driver are bridged. policies: by resource; the default is the plugin
    side alone. node: this node's name, which is the pool's. claim_status: whether to write `status.devices` of prepared
    claims. grace: seconds that bound pods have to be admitted before devices are withdrawn. period, report_holders: see
    `Agent`. agent: the plugin side, and what both sides share. drivers: the DRA side, by driver. A driver stays when no
    resource names it any more: it has claims to unprepare.
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
        grace: float = GRACE,
        report_holders: bool = False,
    ) -> None:
        self.cluster = cluster
        self.drivers: dict[str, DriverRuntime] = {}
        self._policies = dict(policies)
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        paths = paths or Paths()
        self._orphaned = OrphanedClaims(
            paths.kubelet_root, self.drivers.keys, cdi_directory, lambda: self.agent.tracker.pods.read()
        )
        undriven = OrphanedClaimGate(self.holder, self._orphaned.reread)
        self.gates = ResourceGates(undriven, lambda: [one.ledger_gate for one in self.drivers.values()])
        self.agent = Agent(
            sources,
            paths,
            period=period,
            report_holders=report_holders,
            allocation_gate=self.gates,
            awaited=undriven.awaited,
            believe_checkpoint=False,
            orphaned=self._orphaned.held,
        )
        self.agent.providers.append(BridgeStatus(self))
        self.publisher = Publisher(cluster, node)
        self._allocatable = AllocatableStatus(
            NodeStatusWriter(cluster, node).write, self.agent.pod_resources.allocatable, grace=grace
        )
        self._watch = NodeWatch(cluster, node, self._read_shares, self._allocatable.observe)
        self.node = Node(
            node,
            self.agent,
            cluster,
            ClusterClaims(cluster, node),
            self.publisher,
            self.gates,
            self.holder,
            self._watch,
            self._allocatable,
            cdi_directory,
            claim_status,
        )

    def ledger_path(self, driver: str) -> Path:
        """Return where a driver's ledger lies."""
        return self.agent.paths.kubelet_root / "plugins" / driver / "ledger.db"

    async def run(self) -> None:
        """Serve both sides until `agent.stop`, then drain and clean up; slices stay.

        Raises AgentError: a resource cannot be served on this node at all.
        """
        try:
            async with self.cluster, asyncio.TaskGroup() as group:
                self._group = group
                try:
                    if await self._opened():
                        drivers = [one.run() for one in self.drivers.values()]
                        for work in (self.publisher.run(), self._watch.run(), *drivers):
                            self._tasks.append(group.create_task(work))
                        await self.agent.run(before_end=self._end_claims)
                finally:
                    self._group = None
                    for task in self._tasks:
                        task.cancel()
        except* AgentError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._allocatable.close()
            for one in self.drivers.values():
                await one.async_ledger.close()

    async def reconfigure(
        self, sources: Mapping[str, DeviceSource], policies: Mapping[str, HandoverPolicy], unchanged: Sequence[str]
    ) -> None:
        """Serve these sources from now on, those of `unchanged` resources as they are, all under these policies.

        Raises AgentError: a ledger cannot be opened; the other resources are served all the same.
        """
        await self.agent.begun.wait()
        self._policies = dict(policies)
        kept = {*sources, *unchanged}
        for name, service in self.agent.services.items():
            driver = service.source.driver
            if driver and (name not in kept or (name in sources and sources[name].driver != driver)):
                self.drivers[driver].drop(name)
        for name, source in sources.items():
            if source.driver:  # nothing is given out until its ledger is open
                self.gates.by_resource.setdefault(name, DENY_ALL)
        await self.agent.reconfigure(sources, unchanged)
        for name in self.gates.by_resource.keys() - self.agent.services.keys():
            del self.gates.by_resource[name]
        errors: list[str] = []
        for name in kept & self.agent.services.keys():
            there = set(self.drivers)
            try:
                await self._open(self.agent.services[name])
            except AgentError as error:
                errors.append(str(error))
            for driver in self.drivers.keys() - there:
                if self._group is not None:
                    self._tasks.append(self._group.create_task(self.drivers[driver].run()))
        if errors:
            raise AgentError("; ".join(dict.fromkeys(errors)))

    async def _opened(self) -> bool:
        """Bridge what is to be served; return False if the agent is stopped before that is done."""
        stopping, opening = asyncio.create_task(self.agent.stopping()), asyncio.create_task(self._open_all())
        try:
            await asyncio.wait({stopping, opening}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
        finally:
            for task in (stopping, opening):
                task.cancel()
            await asyncio.wait({stopping, opening})
        return not opening.cancelled()

    async def _open_all(self) -> None:
        for service in self.agent.services.values():
            await self._open(service)

    async def _open(self, service: Service) -> None:
        """Bridge a resource, if it names a driver. Raises AgentError: the ledger cannot be opened."""
        name = service.source.driver
        if not name:
            if self.gates.by_resource.pop(service.resource, None) is not None:
                service.endpoint.refresh()
            return
        if name not in self.drivers:
            self.drivers[name] = DriverRuntime(self.node, name, await self._open_ledger(name))
            self.agent.scanner.observers.append(self.drivers[name].ledger_gate)
        driver = self.drivers[name]
        driver.read_share(self._watch.annotations)
        driver.serve(service, self._policies.get(service.resource, HandoverPolicy()))

    async def _open_ledger(self, driver: str) -> AsyncLedger:
        """Open a driver's ledger, as soon as no other agent has it any more."""
        path = self.ledger_path(driver)
        copy = f"{self.node.cdi_directory}/{driver}.allocations"
        opening = asyncio.create_task(AsyncLedger.open(str(path), copy))
        try:
            done, _ = await asyncio.wait({opening}, timeout=STANDBY)
            if not done:
                _LOG.warning("%s: another agent has the ledger %s; standing by until it ends", driver, path)
            return await opening
        except LedgerError as error:
            needs = (
                f"the agent needs write access to {path.parent}, and free space there; into a pod it is mounted "
                "by what `dra-bridge manifests` prints for this configuration"
            )
            raise AgentError(f"{driver}: {error}; {needs}") from error
        finally:
            opening.cancel()

    def holder(self, resource: str, device: str, driver: str | None = None) -> str:
        """Return which claim of another driver than this one holds a device, or why that is not known; "" if none does.

        There are such claims after the resource's driver was renamed or taken away.
        """
        for name, one in self.drivers.items():
            if name != driver:
                for claim in one.async_ledger.snapshot.claims_on(resource, (device,)):
                    return f"claim {claim.title} through driver {name}"
        return self._orphaned.holder(resource, device, driver)

    def _read_shares(self) -> None:
        for one in self.drivers.values():
            one.read_share(self._watch.annotations)

    async def _end_claims(self) -> None:
        """Take no more claims; another agent may serve the devices as soon as the plugin side has ended."""
        await asyncio.gather(*(one.end_claims() for one in self.drivers.values()), return_exceptions=True)
