"""Builds, runs and ends the agent of a node: the device plugin of each resource, and a runtime for each DRA driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.cdi import own_directory
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.node.claim_side import ClaimSide
from deviceplugin.node.service import Service
from deviceplugin.register import claim_files, copies, operations
from deviceplugin.register.records import LedgerError
from deviceplugin.source import DeviceSource
from dra_bridge.driver import ClusterClaims, DriverDirectories, DriverNode
from dra_bridge.driver.claim_files import is_deleted
from dra_bridge.driver.evidence import claim_of
from dra_bridge.handover.allocatable import GRACE, AllocatableStatus
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.claim_lists import ClaimLists
from dra_bridge.node.claim_pods import PodsAndClaims
from dra_bridge.node.driver_runtime import DriverRuntime
from dra_bridge.node.lease import NodeLease
from dra_bridge.node.node_object import NodeStatusWriter, NodeWatch
from dra_bridge.node.options import BridgeOptions
from dra_bridge.node.resource import BridgeNode
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.node.status import MAX_SURGE, BridgeStatus
from dra_bridge.slices.foreign import ForeignKind
from dra_bridge.slices.publisher import Publisher

_LOG: Final = logging.getLogger(__name__)

CDI_CHECK: Final = 5.0
"""Seconds between two checks whether the directory of CDI specs was deleted."""
STANDBY: Final = 2.0
"""Seconds after which the agent logs a warning that it still waits, because another agent has the ledger file open."""


class Bridge(ClaimSide):
    """The agent of a node that gives a resource's devices to pods by a device plugin, and to claims by DRA.

    sources: one device source for each resource. Claims can get a resource's devices if its source names a driver.
    policies: for each resource, its settings for DRA. For a resource without settings, the device plugin has all
    devices. grace: seconds that the kubelet has to admit pods that are bound already, before devices leave the device
    plugin. vendors, period: see `Agent`. agent: the agent for the device plugins of all resources. drivers: the runtime
    of each DRA driver; a driver stays even if no resource names it any more, because its claims must be unprepared.
    """

    serves_claims = True

    def __init__(
        self,
        sources: Sequence[DeviceSource],
        policies: Mapping[str, HandoverPolicy],
        options: BridgeOptions,
        vendors: VendorPlugins | None = None,
        *,
        period: float = 2.0,
        grace: float = GRACE,
    ) -> None:
        self.cluster = cluster = options.cluster
        self.agent_name, self.node_name = options.agent_name, options.node
        self.drivers: dict[str, DriverRuntime] = {}
        self._policies = dict(policies)
        self._parents: dict[str, str] = {}
        """For each resource that a source has added by `child_sources`, the resource of that source."""
        self._group: asyncio.TaskGroup | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self._ledger: AsyncLedger | None = None
        report_holders = options.metrics_address is not None
        self.agent = Agent(
            sources, options.paths, period=period, report_holders=report_holders, claim_side=self, vendors=vendors
        )
        self.publisher = Publisher(cluster, node := options.node, noticed=self._others_wrote)
        writer = NodeStatusWriter(cluster, node)
        self._allocatable = AllocatableStatus(writer.write, self.agent.tracker.pod_resources, grace=grace)
        self._watch = NodeWatch(cluster, node, self._read_shares, self._allocatable)
        shared = DriverNode(
            node,
            self.agent.register,
            ClusterClaims(cluster, node),
            str(options.paths.cdi_dir),
            options.agent_name,
            report=options.claim_status,
            cdi_looks=Looks(str(options.paths.cdi_dir), threads=1),
        )
        self._lease = NodeLease(cluster, options.namespace, self._watch)
        root = options.paths.kubelet_root
        directories = DriverDirectories(root / "plugins" / options.agent_name, root / "plugins_registry")
        pods = PodsAndClaims(self.agent.tracker, root)
        parts = (self.agent, cluster, pods, ClaimLists(cluster), self.publisher, self._watch, self._allocatable, writer)
        self.node = BridgeNode(shared, directories, *parts, self._lease)
        self.agent.providers.append(BridgeStatus(self.node, self.drivers))

    @property
    def ledger_path(self) -> Path:
        """The path of the ledger file. The path does not depend on the config."""
        return self.node.directory / "register.db"

    # The agent calls these methods (ClaimSide): `draining`, `brought`, `contested` and `end`.

    def draining(self, resource: str) -> Collection[str]:
        """Return the devices that will leave the device plugin. New pods should get other devices if possible."""
        serving = (runtime.resources[resource] for runtime in self.drivers.values() if resource in runtime.resources)
        return frozenset().union(*(runtime.handover.draining for runtime in serving))

    async def run(self) -> None:
        """Serve pods and claims until `agent.stop` is called; then wait for running calls, and clean up.

        The slices stay on the API server. Raises AgentError if a resource cannot be served on this node at all.
        """
        try:
            async with self.cluster, aclosing(self.node.claims), asyncio.TaskGroup() as group:
                self._group = group
                try:
                    if await self.agent.ended_before_stop(self._open_all()):
                        drivers = [runtime.run() for runtime in self.drivers.values()]
                        ends = self._end_with_ledger(), self._end_with_cdi_directory()
                        watches = (self.publisher.run(), self._watch.run(), self._lease.run())
                        for work in (*watches, *ends, *drivers):
                            self.tasks.append(group.create_task(work))
                        await self.agent.run()
                finally:
                    self._group = None
                    for task in self.tasks:
                        task.cancel()
        except* AgentError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._allocatable.close()
            if self._ledger is not None:
                await self._ledger.close()

    async def reconfigure(
        self, sources: Mapping[str, DeviceSource], policies: Mapping[str, HandoverPolicy], unchanged: Sequence[str]
    ) -> None:
        """Serve these sources with these policies from now on. Resources in `unchanged` keep their present sources.

        Pods and claims keep their devices. If a resource names another driver, its devices first leave the slices of
        the former driver.
        """
        await self.agent.begun.wait()
        self._policies = dict(policies)
        await self.agent.reconfigure(sources, unchanged)
        await self._adopt_claims()
        for runtime in self.drivers.values():
            for resource in runtime.resources.keys() - self.agent.services.keys():
                runtime.drop(resource)
        for service in self.agent.services.values():
            self._serve(service)

    async def _open_all(self) -> None:
        """Open the ledger file, and begin to serve claims. Raises AgentError if the file cannot be opened."""
        self._ledger = self.agent.register.store = await self._open_ledger()
        await self._adopt_claims()
        self.agent.keep_from_pods()
        for service in self.agent.services.values():
            self._serve(service)

    async def _adopt_claims(self) -> None:
        """Record claims that are only in claim files, not in the ledger file. Then run each claim's driver.

        A file is read if this agent wrote it, or if a resource names the file's driver, because the kubelet then asks
        this agent to unprepare the claim. Other files belong to another agent on the node. Raises AgentError if the
        claims cannot be recorded.
        """
        assert self._ledger is not None
        ours = {service.source.driver for service in self.agent.services.values()}
        try:
            # Files of drivers in `self.drivers` are not read, because their claims were recorded when the drivers were
            # added.
            looks, directory = self.node.drivers.cdi_looks, own_directory(self.node.drivers.cdi_directory)
            all_files = await looks.at("evidence", claim_files.read_all, directory, frozenset(self.drivers))
            files = [file for file in all_files if file.agent == self.agent_name or file.driver in ours]
            claims = [claim_of(file, time.time()) for file in files if file.devices is not None]
            for claim in await self._ledger.do(operations.adopt_claims(claims)):
                text = "claim %s of driver %s is not in the ledger; it is added from the claim's file"
                extra = {"claim": claim.title if claim.name else claim.uid, "driver": claim.driver}
                _LOG.warning(text, *extra.values(), extra=extra)
        except (LedgerError, OSError) as error:
            raise AgentError(f"cannot record the devices of claims: {error}") from error
        holding = {file.driver for file in files} | {claim.driver for claim in self._ledger.snapshot.claims.values()}
        for driver in sorted(holding):
            self._driver(driver, self._ledger)

    def _driver(self, name: str, ledger: AsyncLedger) -> DriverRuntime:
        """Return the runtime of a driver; make it if there is none.

        A runtime is also needed for a driver without resources, which may have claims to unprepare.
        """
        if name not in self.drivers:
            runtime = self.drivers[name] = DriverRuntime(self.node, name, ledger, self._left)
            self.agent.scanner.observers.append(runtime.observed)
            if self._group is not None and self.agent.begun.is_set():
                self.tasks.append(self._group.create_task(runtime.run()))
        return self.drivers[name]

    def _serve(self, service: Service) -> None:
        """Serve a resource's devices by the driver that the source names, after the devices have left other drivers."""
        assert self._ledger is not None
        resource, driver = service.resource, service.source.driver
        before = {record.driver for record in self._ledger.snapshot.of(resource).values()} - {"", driver}
        for name in sorted(before):
            self._driver(name, self._ledger).serve(service, HandoverPolicy(), leaving=True)
        for name, runtime in self.drivers.items():
            if name not in before and name != driver and resource in runtime.resources:
                runtime.drop(resource)
        if driver:
            runtime = self._driver(driver, self._ledger)
            runtime.read_share(self._watch.annotations, self._watch.uid)
            runtime.serve(service, self._policy(resource))
        service.endpoint.refresh()

    def brought(self, resource: str, parent: str) -> None:
        """Apply the policy of a source to a resource that this source has added (`child_sources`).

        parent: the resource of the source. `parent` is "" for the resource of a vendor's plugin that is in no config;
        the devices of such a resource leave their driver.
        """
        self._parents[resource] = parent
        self._serve(self.agent.services[resource])

    def contested(self, resource: str, reason: str) -> None:
        """Stop offering a resource's free devices by DRA: another plugin has registered the resource."""
        for runtime in self.drivers.values():  # The loop includes drivers that the config no longer names.
            runtime.contested(resource, reason)

    def _others_wrote(self, driver: str, kind: ForeignKind, what: str) -> None:
        if driver in self.drivers:
            self.drivers[driver].others_wrote(kind, what)

    def _policy(self, resource: str) -> HandoverPolicy:
        parent = self._parents.get(resource, "")
        return self._policies.get(resource) or self._policies.get(parent) or HandoverPolicy()

    def _left(self, resource: str) -> None:
        """Offer a resource's devices, which have left a driver's slices, to other drivers and to the device plugin."""
        for runtime in self.drivers.values():
            if resource in runtime.resources:
                runtime.resources[resource].handover.wake()
        if resource in self.agent.services:
            self.agent.services[resource].endpoint.refresh()

    async def _end_with_ledger(self) -> None:
        assert self._ledger is not None
        await self._ledger.lost.wait()
        self.agent.fail("the ledger was lost while it was in use")

    async def _end_with_cdi_directory(self) -> None:
        """End the agent once the directory of CDI specs was deleted on the host.

        The agent's mount still contains the deleted directory.
        """
        looks, directory = self.node.drivers.cdi_looks, self.node.drivers.cdi_directory
        deleted = False
        while not deleted:
            await asyncio.sleep(CDI_CHECK)
            # If the read times out, it is unknown whether the directory was deleted, so the next check reads again.
            with contextlib.suppress(LookTimeoutError):
                deleted = await looks.at("claim file", is_deleted, directory)
        what = f"{directory} was deleted on the host while it is mounted here"
        text = "%s, so no claim can be prepared; the agent ends, and its next container mounts the new directory"
        _LOG.error(text, what)
        self.agent.stop()

    async def _open_ledger(self) -> AsyncLedger:
        """Wait until no other agent has the ledger file open, then open it. Raises AgentError if this fails."""
        path = self.ledger_path
        copy = copies.path(self.node.drivers.cdi_directory, self.agent_name)
        opening = asyncio.create_task(AsyncLedger.open(str(path), copy))
        try:
            done, _ = await asyncio.wait({opening}, timeout=STANDBY)
            if not done:
                text = "another agent has the ledger %s; this agent is standing by until the other agent ends; %s"
                _LOG.warning(text, path, MAX_SURGE)
            return await opening
        except LedgerError as error:
            needs = (
                f"the agent needs write access to {path.parent}, and free space there; into a pod it is mounted "
                "by what `dra-bridge manifests` prints for this configuration"
            )
            raise AgentError(f"{error}; {needs}") from error
        finally:
            opening.cancel()

    def _read_shares(self) -> None:
        self._lease.write()
        for runtime in self.drivers.values():
            runtime.read_share(self._watch.annotations, self._watch.uid)

    async def end(self) -> None:
        """Accept no more claims. Afterwards the device plugin ends, and then another agent may serve the devices."""
        await asyncio.gather(*(runtime.end_claims() for runtime in self.drivers.values()), return_exceptions=True)
