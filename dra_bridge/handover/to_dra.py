"""The end of moves to the DRA side: gathers what rule R5 asks for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from deviceplugin.exclusion import Key
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.servicer import Endpoint
from dra_bridge.handover.evidence import kubelet_snapshot, shown_unhealthy
from dra_bridge.handover.planner import in_state
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import State
from dra_bridge.ledger.rules import KubeletEvidence
from dra_bridge.ledger.worker import AsyncLedger

Scan = Callable[[Collection[Key]], Awaitable[HolderSnapshot | None]]
"""Finds out who holds devices (`HolderScanner.scan`); None if an Allocate came in between."""


@dataclass(frozen=True, slots=True)
class MovesToDra:
    """Ends moves of one resource's devices to the DRA side. They cost the API server nothing."""

    endpoint: Endpoint
    ledger: AsyncLedger
    scan: Scan
    title: Callable[[str], str]

    async def commit(self, waiting: dict[str, str]) -> tuple[str, ...]:
        """Commit the moves that can end; return their devices. waiting: what the others wait for is added."""
        resource, device_id_of = self.endpoint.resource, self.endpoint.ids.device_id_of
        before = self.ledger.snapshot
        devices = in_state(before, resource, State.TO_DRA)
        if not devices:
            return ()
        self.endpoint.refresh()
        sent = self.endpoint.streams.shown()
        shown = shown_unhealthy(devices, sent, device_id_of)
        if not shown:
            missing = "the kubelet to listen" if sent is None else "ListAndWatch to show it Unhealthy"
            waiting.update(dict.fromkeys(devices, missing))
            return ()
        ids = {(resource, one) for device in shown for one in self.endpoint.ids.ids_of(device)}
        scan = await self.scan(ids)
        if scan is None:
            waiting.update(dict.fromkeys(devices, "a moment without an Allocate in flight"))
            return ()
        seen = kubelet_snapshot(before.sequence, scan, resource, device_id_of, self.title)
        evidence = KubeletEvidence(before.sequence, shown, seen)
        done = await self.ledger.do(operations.commit_to_dra(resource, devices, evidence, time.time()))
        waiting.update(done.waiting)
        return done.devices
