"""Finds the claims of a driver that have ended, and unprepares them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.claim_state import ClaimStateError
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError
from deviceplugin.register.waits import PROMPT
from dra_bridge.driver import ClaimRef, Driver
from dra_bridge.driver.claims import is_over
from dra_bridge.kube import ClusterError, ListedClaim
from dra_bridge.node.claim_lists import ClaimLists
from dra_bridge.node.claim_pods import ClaimPods
from dra_bridge.node.device_reconciliation import sources_of
from dra_bridge.node.resource import ResourceRuntime

_LOG: Final = logging.getLogger(__name__)

RECONCILE: Final = 20.0
"""Seconds between two checks whether prepared claims have ended. Only claims that have probably ended are read from the
API server."""

_PHASE: Final = random.uniform(0.0, RECONCILE)  # noqa: S311  # no secret
"""The random offset of this process's checks from multiples of `RECONCILE`. All drivers of the process use the same
offset. So one read of the kubelet's checkpoint, the claim state and the cgroups serves the checks of all drivers.
"""

NOTICE: Final = 1.0
"""Seconds between two readings of the processes of pods with prepared claims."""


@dataclass(frozen=True, slots=True)
class ClaimChecks:
    """Unprepares the claims of one driver that no pod uses any more, and restores missing CDI files."""

    driver: Driver
    pods: ClaimPods
    tracker: HolderTracker
    lists: ClaimLists

    async def run(self, resources: Mapping[str, ResourceRuntime]) -> None:
        """Check the claims at once, and then every `RECONCILE` seconds or earlier, until cancelled."""
        backoff = Backoff(first=1.0, most=60.0)
        ending = Backoff(first=1.0, most=RECONCILE)
        while True:
            # CDI files are evidence of holders, so they must not be removed before the ledger file has recorded their
            # content.
            waits = [runtime.reconciled for runtime in resources.values() if not runtime.reconciled.is_set()]
            try:
                await self.reconcile(sweep=not waits)
            except (ClaimStateError, ClusterError, LedgerError, OSError) as error:
                self.tracker.unknown.update(sources_of(error))
                _LOG.info(
                    "cannot compare prepared claims with evidence now: %s", error, extra={"driver": self.driver.name}
                )
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            for reconciled in waits:
                await reconciled.wait()
            if not waits:
                await self._pause(ending)

    async def _pause(self, ending: Backoff) -> None:
        """Wait until the next check of claims is due, at most `RECONCILE` seconds.

        The wait is shorter if a claim's record has no Prepare response, for example because processes of the claim's
        pods still ran at its Unprepare. During the wait, record pods that begin to run with a claim, so that an
        Unprepare need not ask the kubelet for pods.
        """
        begun = time.monotonic() - _PHASE
        until = _PHASE + (begun // RECONCILE + 1) * RECONCILE
        changes = self.driver.records.ledger.changes
        while (rest := until - time.monotonic()) > 0:
            count, claims, waits = changes.count, self.driver.records.all(), self.driver.waits.devices
            if not claims:
                await changes.after(count, rest)
                continue
            awaited = any(not claim.held.isdisjoint(waits) for claim in claims)
            if any(claim.result is None for claim in claims):
                await asyncio.sleep(min(rest, PROMPT if awaited else ending.next()))
                return
            ending.reset()
            since = time.time() - RECONCILE
            if awaited or any(claim.since > since and not claim.pods <= self.pods.recorded for claim in claims):
                # The error is not logged here, because the next check logs it.
                with contextlib.suppress(ClaimStateError, LedgerError, OSError):
                    await self.pods.running()
            await asyncio.sleep(min(rest, PROMPT if awaited else NOTICE))

    async def reconcile(self, *, sweep: bool) -> None:
        """Check the driver's claims once.

        sweep: whether to remove CDI files of claims that are not in the ledger file. Raises ClaimStateError, and
        unprepares no claim, if the kubelet's claim state cannot be read.
        """
        unlisted = (await self.pods.running()).unlisted
        named = frozenset(claim.uid for claim in await self.pods.record())
        processes = await self.tracker.looks.at("evidence", self.tracker.pods.read)
        await self._name_from_server(named, processes, unlisted)
        await self.driver.reconciler.reconcile(named, processes, unlisted, sweep=sweep)

    async def _name_from_server(
        self, named: Collection[str], processes: PodProcesses, unlisted: Mapping[str, float]
    ) -> None:
        """Record the names of the claims that are known only from CDI files, or unprepare these claims.

        A CDI file does not have the claim's name, so the names are read from a list of all claims. Claims that are not
        in this list no longer exist, and are unprepared.
        """
        records = self.driver.records
        nameless = [claim for claim in records.all() if not claim.name and claim.uid not in named]
        if not nameless:
            return
        wanted, by_uid = {claim.uid for claim in nameless}, dict[str, ListedClaim]()

        def visit(claim: ListedClaim) -> None:
            if claim.uid in wanted:
                by_uid[claim.uid] = claim

        await self.lists.read(visit)
        for claim in nameless:
            if (listed := by_uid.get(claim.uid)) is not None:
                names = listed.namespace, listed.name, [pod.uid for pod in listed.pods]
                await records.ledger.do(operations.describe(records.driver, claim.uid, *names))
            elif is_over(claim, self.driver.files.boot, named, processes, unlisted):
                extra = {"driver": records.driver, "claim": claim.uid}
                _LOG.info("claim %s, known from its CDI file, does not exist", claim.uid, extra=extra)
                await self.driver.unprepare([ClaimRef("", "", claim.uid)])
