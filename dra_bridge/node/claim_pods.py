"""Finds out which pods run on the node, and which claims of a driver these pods use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.register import operations
from deviceplugin.tasks import SharedCall
from dra_bridge.driver import RunningPods
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.ledger.worker import AsyncLedger


class PodsAndClaims:
    """Reads the running pods, then the kubelet's claim state. Simultaneous calls of all drivers share one reading.

    kubelet_root: the directory with the kubelet's claim state.
    """

    def __init__(self, tracker: HolderTracker, kubelet_root: Path) -> None:
        self._tracker = tracker
        self._kubelet_root = kubelet_root
        self.read: Final = SharedCall(self._read)

    async def _read(self) -> tuple[PodProcesses, Sequence[PreparedClaim]]:
        """Read the running pods, then the claim state.

        Raises ClaimStateError if the claim state cannot be read, OSError if the cgroups can no longer be read.
        """
        pods, root = self._tracker.pods, self._kubelet_root
        return await self._tracker.looks.at("claim state", lambda: (pods.running(), claim_state.read(root)), brief=True)


@dataclass(slots=True, eq=False)
class ClaimPods:
    """Records in the ledger file which pods use the claims of one driver, before the kubelet forgets these pods.

    tracker: the object that finds the pods' processes, and asks the kubelet for its active pods. node: see
    `PodsAndClaims`. files: the files of the claims, which are written again after a claim's record in the ledger has
    changed. recorded: UIDs of the running pods whose claims from this driver are all in the ledger. last: the last
    result of `running`.
    """

    driver: str
    ledger: AsyncLedger
    tracker: HolderTracker
    node: PodsAndClaims
    files: ClaimFiles
    recorded: frozenset[str] = frozenset()
    last: RunningPods = field(default_factory=RunningPods)
    _running: SharedCall[RunningPods] = field(init=False)

    def __post_init__(self) -> None:
        self._running = SharedCall(self._read)

    async def running(self) -> RunningPods:
        """Record in the ledger file which pods use which claims. Return the pods whose processes run.

        The pods and the claim state are read after the call has begun. Simultaneous calls share one reading.

        The claim state certainly names all claims of a pod only if both conditions are true: the pod's processes ran
        before the claim state was read, and the kubelet counted the pod as active after this read. Otherwise the
        kubelet may not have added the pod's claims yet, or may have dropped a pod that was deleted by force.

        Raises ClaimStateError if the kubelet's claim state cannot be read, LedgerError if the pods cannot be recorded,
        OSError if cgroups were visible before and cannot be read now.
        """
        return await self._running()

    async def _read(self) -> RunningPods:
        tracker, unlisted = self.tracker, dict[str, float]()
        pods, claims = await self.node.read()
        running = pods.may_be_ours
        prepared = self._mine(claims)
        await self._record(prepared)
        if not running <= self.recorded:
            lost: set[str] = set()
            for claim in prepared:
                if (self.driver, claim.uid) not in self.ledger.snapshot.claims:
                    lost |= claim.pod_uids
            self.recorded |= await tracker.listed(running) - lost
        self.recorded &= running
        for uid in running - self.recorded:
            unlisted[uid] = tracker.pods.seen.get(uid, math.inf)
        before, self.last = self.last, RunningPods(pods.running or frozenset(), unlisted)
        if self.last != before:
            self.ledger.changes.note()  # This call wakes Prepares that wait until pods have ended.
        return self.last

    async def record(self) -> list[PreparedClaim]:
        """Record the pods that use prepared claims, and the names of claims that are known only from CDI files.

        Return this driver's claims in the kubelet's claim state.
        """
        mine = self._mine((await self.node.read())[1])
        await self._record(mine)
        return mine

    def _mine(self, claims: Sequence[PreparedClaim]) -> list[PreparedClaim]:
        return [claim for claim in claims if self.driver in claim.devices]

    async def _record(self, claims: Sequence[PreparedClaim]) -> None:
        for claim in claims:
            recorded = self.ledger.snapshot.claims.get((self.driver, claim.uid))
            if recorded is not None and not (recorded.name and claim.pod_uids <= recorded.pods):
                names = claim.namespace, claim.name, claim.pod_uids
                await self.ledger.do(operations.describe(self.driver, claim.uid, *names))
                await self.files.describe(claim.uid)
