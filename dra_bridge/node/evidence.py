"""Reads who holds devices, from all that knows of it but the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from dra_bridge.driver import Driver
from dra_bridge.handover import held_units
from dra_bridge.kube import RESOURCE_CLAIMS, Cluster, NotFoundError
from dra_bridge.ledger import AsyncLedger, ClaimEvidence, Evidence, State

__all__ = ["EvidenceReader"]


class EvidenceReader:
    """Reads the evidence about one driver's devices.

    Args:
        driver: knows its devices by their published names, and its CDI files.
        async_ledger: the driver's ledger.
        agent: sees the kubelet's checkpoint and the pods.
        cluster: the API server.

    """

    def __init__(self, driver: Driver, async_ledger: AsyncLedger, agent: Agent, cluster: Cluster) -> None:
        self._driver = driver
        self._ledger = async_ledger
        self._agent = agent
        self._cluster = cluster

    async def read(self, service: Service, devices: Sequence[str]) -> Evidence:
        """Ask all but the ledger who holds these devices of a resource.

        Raises:
            CheckpointError: an own Allocate came in between, or the kubelet's checkpoint cannot be read.
            ClaimStateError: the kubelet's claim state cannot be read.
            ClusterError: the API server cannot be asked.

        """
        resource, device_id_of = service.resource, service.endpoint.ids.device_id_of
        wanted = frozenset(devices)
        ids = {(resource, one) for device in devices for one in service.endpoint.ids.ids_of(device)}
        now = await self._agent.scanner.scan(ids)
        if now is None:
            raise CheckpointError("an Allocate came in between")
        if now.registered is None:
            raise CheckpointError(now.problem)
        held = held_units(now, resource, device_id_of, self._agent.tracker.title)
        prepared = await asyncio.to_thread(claim_state.read, self._agent.paths.kubelet_root)
        files = await asyncio.to_thread(self._driver.cdi_evidence)
        claims = [
            replace(claim, devices=claim.devices & wanted)
            for claim in (*self._driver.claim_evidence(prepared, resource), *files.get(resource, ()))
            if claim.devices & wanted
        ]
        known = self._ledger.snapshot
        claims = [
            claim for claim in claims if (self._driver.name, claim.uid) not in known.claims or self._incomplete(claim)
        ]
        if (
            self._ledger.ledger.fresh
            or self._ledger.ledger.set_aside
            or any(known.device(resource, name).state is State.QUARANTINED for name in devices)
        ):
            # What is allocated: a claim that the kubelet has not prepared yet keeps its device on the DRA side.
            async with asyncio.timeout(5.0):
                claims += await self._allocations(resource, wanted, {claim.uid for claim in claims})
        held = {unit: one for unit, one in held.items() if one.device in wanted}
        return Evidence(held, tuple(claims), awake=now.awake)

    def _incomplete(self, claim: ClaimEvidence) -> bool:
        """Return whether the ledger knows a claim from evidence alone, which is heard one resource at a time."""
        known = self._ledger.snapshot.claims.get((self._driver.name, claim.uid))
        return known is not None and known.result is None and known.durable

    async def _allocations(self, resource: str, devices: frozenset[str], but: set[str]) -> list[ClaimEvidence]:
        found = []
        for claim in (await self._cluster.list(RESOURCE_CLAIMS)).items:
            metadata = claim["metadata"]
            names = {device for of, device in self._allocated(claim) if of == resource and device in devices}
            if names and metadata["uid"] not in but:
                found.append(
                    ClaimEvidence(
                        self._driver.name,
                        metadata["uid"],
                        frozenset(names),
                        False,
                        metadata["namespace"],
                        metadata["name"],
                    )
                )
        return found

    def _allocated(self, claim: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Return (resource, device) of this node's devices that a claim's allocation names, seen ones not."""
        results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
        devices = self._driver.devices
        return {
            (devices[name][0].source.resource, devices[name][1].id)
            for result in results
            if result.get("driver") == self._driver.name
            and result.get("pool") == self._driver.pool
            and not result.get("adminAccess")
            and (name := result.get("device", "")) in devices
        }

    async def allocated(self) -> Mapping[tuple[str, str], str]:
        """List all claims, consistently; return namespace/name by the (resource, device) allocated here."""
        return {
            key: f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
            for claim in (await self._cluster.list(RESOURCE_CLAIMS)).items
            for key in self._allocated(claim)
        }

    async def allocates(self, claim: str, resource: str, device: str) -> bool:
        """Read one claim, by namespace/name; return whether its allocation names the device of this node."""
        namespace, _, name = claim.partition("/")
        try:
            found = await self._cluster.get(RESOURCE_CLAIMS, name, namespace)
        except NotFoundError:
            return False
        return (resource, device) in self._allocated(found)
