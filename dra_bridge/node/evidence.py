"""Reads who holds devices, from all sources of evidence but the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from dra_bridge.driver import Driver
from dra_bridge.handover.evidence import held_ids
from dra_bridge.kube import RESOURCE_CLAIMS, Cluster, NotFoundError
from dra_bridge.ledger.records import State
from dra_bridge.ledger.rules import ClaimEvidence, Evidence


@dataclass(eq=False)
class EvidenceReader:
    """Reads the evidence about one driver's devices.

    driver: has its devices by their published names, its CDI files, and its ledger. agent: reads the kubelet's
    checkpoint and the pods. cluster: the API server.
    """

    driver: Driver
    agent: Agent
    cluster: Cluster

    async def read(self, service: Service, devices: Sequence[str]) -> Evidence:
        """Read from all but the ledger who holds these devices of a resource.

        Raises:
            CheckpointError: an own Allocate came in between, or the kubelet's checkpoint cannot be read.
            ClaimStateError: the kubelet's claim state cannot be read.
            ClusterError: the API server cannot be asked.

        """
        resource, ids, wanted = service.resource, service.endpoint.ids, frozenset(devices)
        now = await self.agent.scanner.scan({(resource, one) for device in devices for one in ids.ids_of(device)})
        if now is None:
            raise CheckpointError("an Allocate came in between")
        if now.registered is None:
            raise CheckpointError(now.problem)
        held = held_ids(now, resource, ids.device_id_of, self.agent.tracker.title)
        prepared = await asyncio.to_thread(claim_state.read, self.agent.paths.kubelet_root)
        files = await asyncio.to_thread(self.driver.cdi_evidence)
        found = (*self.driver.claim_evidence(prepared, resource), *files.get(resource, ()))
        claims = [replace(claim, devices=claim.devices & wanted) for claim in found if claim.devices & wanted]
        claims = [claim for claim in claims if not self._recorded(claim)]
        async_ledger = self.driver.records.ledger
        if (
            async_ledger.ledger.fresh
            or async_ledger.ledger.set_aside
            or any(async_ledger.snapshot.device(resource, name).state is State.QUARANTINED for name in devices)
        ):
            # What is allocated: a claim that the kubelet has not prepared yet keeps its device on the DRA side.
            async with asyncio.timeout(5.0):
                claims += await self._allocations(resource, wanted, {claim.uid for claim in claims})
        held = {device_id: one for device_id, one in held.items() if one.device in wanted}
        return Evidence(held, tuple(claims), awake=now.awake)

    def _recorded(self, claim: ClaimEvidence) -> bool:
        """Return whether the ledger has all of a claim. From evidence alone it learns one resource at a time."""
        known = self.driver.records.get(claim.uid)
        return known is not None and (known.result is not None or not known.durable)

    async def _allocations(self, resource: str, devices: frozenset[str], but: set[str]) -> list[ClaimEvidence]:
        found = []
        async for metadata, keys in self._listed():
            names = frozenset(device for of, device in keys if of == resource and device in devices)
            if names and metadata["uid"] not in but:
                evidence = ClaimEvidence(self.driver.name, metadata["uid"], names, False)
                found.append(replace(evidence, namespace=metadata["namespace"], name=metadata["name"]))
        return found

    async def _listed(self) -> AsyncIterator[tuple[Mapping[str, str], set[tuple[str, str]]]]:
        """List all claims, consistently; yield the metadata of each, and the devices that its allocation names."""
        for claim in (await self.cluster.list(RESOURCE_CLAIMS)).items:
            yield claim["metadata"], self._allocated(claim)

    def _allocated(self, claim: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Return (resource, device) of this node that a claim's allocation names, without administrative access."""
        results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
        devices = self.driver.devices.by_name
        return {
            (devices[name][0].source.resource, devices[name][1].id)
            for result in results
            if result.get("driver") == self.driver.name
            and result.get("pool") == self.driver.pool
            and not result.get("adminAccess")
            and (name := result.get("device", "")) in devices
        }

    async def allocated(self) -> Mapping[tuple[str, str], str]:
        """List all claims, consistently; return namespace/name by the (resource, device) allocated here."""
        return {key: f"{data['namespace']}/{data['name']}" async for data, keys in self._listed() for key in keys}

    async def allocates(self, claim: str, resource: str, device: str) -> bool:
        """Read one claim, by namespace/name; return whether its allocation names the device of this node."""
        namespace, _, name = claim.partition("/")
        try:
            found = await self.cluster.get(RESOURCE_CLAIMS, name, namespace)
        except NotFoundError:
            return False
        return (resource, device) in self._allocated(found)
