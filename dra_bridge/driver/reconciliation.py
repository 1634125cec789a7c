"""Unprepares claims that no pod uses any more, and makes the claims' files match the ledger file's records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from deviceplugin import cdi
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.register import operations
from deviceplugin.register.records import NONE, Claim, LedgerError
from dra_bridge.driver.claim_api import ClusterClaims
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import ClaimError, ClaimRecords, ClaimRef, Reason, is_over, parse_allocation, prepared_of
from dra_bridge.driver.preparation import ClaimPreparation

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimReconciler:
    """Compares one driver's claims in the ledger file with evidence: claim state, processes, API server, files."""

    records: ClaimRecords
    api: ClusterClaims
    files: ClaimFiles
    preparation: ClaimPreparation

    async def reconcile(
        self, named: Collection[str], pods: PodProcesses, unlisted: Mapping[str, float] = NONE, *, sweep: bool = True
    ) -> dict[str, list[str]]:
        """Unprepare the claims that no pod uses, and write missing files of prepared claims again.

        A claim is unprepared only on three conditions: the kubelet's claim state does not name it, no process of its
        pods can run, and at the API server the claim is deleted or has another allocation. If a condition cannot be
        checked, the claim stays prepared.

        named: UIDs of the claims in the kubelet's claim state. pods: the pods whose processes run. unlisted: the
        running pods whose claims are not known, as `RunningPods.unlisted`. sweep: whether to remove files of claims
        that are not in the ledger file. The ledger may have lost claims, so a caller must first let the ledger adopt
        the claims in the files.

        Returns, for each action, the UIDs of claims. Actions: "unprepared"; "reopened": after a reboot, the next
        Prepare sets the claim's devices up again; "rewritten", "removed": files of the claim were written again or
        removed; "unknown": nothing was done, because a check or a write failed.
        """
        uids: dict[str, list[str]] = {}
        turns = asyncio.Semaphore(16)

        async def reconcile_one(claim: Claim) -> None:
            async with turns, self.records.locked(claim.uid):
                done = await self._reconcile_one(claim.uid, frozenset(named), pods, unlisted)
            if done:
                uids.setdefault(done, []).append(claim.uid)

        await asyncio.gather(*map(reconcile_one, self.records.all()))
        for uid in await self.files.claims() if sweep else ():
            if self.records.get(uid) is None and not self.preparation.prepares(uid) and uid not in named:
                async with self.records.locked(uid):
                    if self.records.get(uid) is None:
                        with contextlib.suppress(cdi.CdiError):
                            await self.files.remove(uid)
                            uids.setdefault("removed", []).append(uid)
        done = {what: sorted(of) for what, of in uids.items()}
        if done:
            words = "; ".join(f"{what}: {', '.join(of)}" for what, of in done.items())
            _LOG.info(
                "claims and their files were compared with evidence: %s", words, extra={"driver": self.records.driver}
            )
        return done

    async def _reconcile_one(
        self, uid: str, named: frozenset[str], pods: PodProcesses, unlisted: Mapping[str, float]
    ) -> str:
        """Compare one claim with the evidence. Return one of the actions that `reconcile` lists; "" for no action."""
        record = self.records.get(uid)
        if record is None:
            return ""
        prepared, extra = prepared_of(record), {"driver": self.records.driver, "claim": record.title}
        try:
            over = is_over(record, self.files.boot, named, pods, self.preparation.possible_users(uid, unlisted))
            if record.name and over and not await self._allocated(record):
                await self.preparation.end(uid)
                return "unprepared"
        except Exception as error:  # The API server, a hook or the disk failed; the next `reconcile` tries again.
            _LOG.info("claim %s is not unprepared yet: %s", record.title, error, extra=extra)
            return "unknown"
        if prepared is None:
            return ""
        try:
            if prepared.boot != self.files.boot:
                await self.records.ledger.do(operations.reopen(self.records.driver, uid))
                return "reopened"
            written = await self.files.write(record, prepared)
        except (cdi.CdiError, LedgerError) as error:
            _LOG.warning("cannot restore the files of claim %s: %s", record.title, error, extra=extra)
            return "unknown"
        return "rewritten" if written else ""

    async def _allocated(self, record: Claim) -> bool:
        """Return whether the claim still exists at the API server with an allocation of the recorded devices."""
        async with asyncio.timeout(self.preparation.deadline):
            claim = await self.api.get_claim(record.namespace, record.name)
        try:
            ref = ClaimRef(record.namespace, record.name, record.uid)
            allocation = parse_allocation(claim, ref, self.records.driver, self.records.pool)
        except ClaimError as error:
            if error.reason is Reason.MALFORMED:
                raise
            return False
        prepared = prepared_of(record)
        return prepared is None or prepared.named == allocation.named
