"""Which pods use which claims of a driver, recorded before the kubelet forgets it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.tracker import HolderTracker
from dra_bridge import ledger
from dra_bridge.driver import RunningPods
from dra_bridge.ledger import AsyncLedger

__all__ = ["ClaimPods"]


class ClaimPods:
    """Records in a ledger which pods use the claims of one driver.

    Args:
        driver: its name.
        async_ledger: the driver's ledger.
        tracker: sees the pods' processes, and asks the kubelet for its active pods.
        kubelet_root: where the kubelet's claim state lies.

    """

    def __init__(self, driver: str, async_ledger: AsyncLedger, tracker: HolderTracker, kubelet_root: Path) -> None:
        self._driver = driver
        self._ledger = async_ledger
        self._tracker = tracker
        self._kubelet_root = kubelet_root
        self._recorded: frozenset[str] = frozenset()
        """UIDs of running pods of which the ledger has all claims of this driver."""

    async def running(self) -> RunningPods:
        """Record in the ledger which pods use which claims; return the pods whose processes run.

        The kubelet drops a pod that was deleted by force from the claim state. So the claim state tells of all claims
        of a pod only if the kubelet counts the pod as active after the file was read, and if the pod's processes ran
        before: its claims are in the file by then.

        Raises:
            ClaimStateError: the kubelet's claim state cannot be read.
            LedgerError: the pods cannot be recorded.
            OSError: cgroups were visible before, and cannot be read now.

        """
        tracker = self._tracker
        running = await asyncio.to_thread(tracker.pods.running)
        prepared = await self.record()
        if running - self._recorded:
            known = self._ledger.snapshot.claims
            lost = {pod for claim in prepared if (self._driver, claim.uid) not in known for pod in claim.pod_uids}
            self._recorded |= await tracker.listed(running) - lost
        self._recorded &= running
        return RunningPods(running, running - self._recorded)

    async def record(self) -> list[PreparedClaim]:
        """Record the pods that came to share a claim after it was prepared, and names that CDI files do not tell.

        Returns this driver's claims in the kubelet's claim state.
        """
        prepared = await asyncio.to_thread(claim_state.read, self._kubelet_root)
        mine = [claim for claim in prepared if self._driver in claim.devices]
        for claim in mine:
            known = self._ledger.snapshot.claims.get((self._driver, claim.uid))
            if known is not None and not (known.name and claim.pod_uids <= known.pods):
                await self._ledger.do(
                    ledger.describe(self._driver, claim.uid, claim.namespace, claim.name, claim.pod_uids)
                )
        return mine
