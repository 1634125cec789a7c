"""Ends claims that are over by all evidence, and compares CDI files with the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

from deviceplugin import cdi
from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from dra_bridge import ledger
from dra_bridge.driver.claim_api import ClaimApi
from dra_bridge.driver.claim_files import ClaimFiles, prepared_of
from dra_bridge.driver.claims import ClaimError, ClaimRef, parse_allocation
from dra_bridge.driver.turns import Turns
from dra_bridge.ledger import AsyncLedger, Claim, LedgerError

__all__ = ["ClaimReconciler", "Reconciled"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a look at the API server led to, by claim UID (files: by claim UID, too).

    unknown: could not be asked about; they stay as they are.
    """

    unprepared: tuple[str, ...] = ()
    reopened: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class ClaimReconciler:
    """Reconciles the claims of one driver.

    Args:
        driver: its name.
        pool: its pool's name, which is the node's.
        async_ledger: the ledger.
        claims: the API server.
        files: the claims' CDI files.
        turns: of the claims.
        unprepare: unprepares a claim, by UID, in its turn.
        preparing: the claims that are being prepared now.
        deadline: seconds for one request to the API server.

    """

    def __init__(
        self,
        driver: str,
        pool: str,
        async_ledger: AsyncLedger,
        claims: ClaimApi,
        files: ClaimFiles,
        turns: Turns,
        *,
        unprepare: Callable[[str], Awaitable[None]],
        preparing: Collection[str],
        deadline: float,
    ) -> None:
        self._driver = driver
        self._pool = pool
        self._ledger = async_ledger
        self._claims = claims
        self._files = files
        self._turns = turns
        self._unprepare = unprepare
        self._preparing = preparing
        self._deadline = deadline

    async def reconcile(
        self, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = (), *, sweep: bool = True
    ) -> Reconciled:
        """End claims that are over by all witnesses (E2), and compare the CDI files with the ledger.

        A claim ends with NodeUnprepareResources. It ends here only when the kubelet does not count it as prepared,
        no process of its pods can run, and the API server, naming the claim, says that it is deleted or allocated
        elsewhere. What cannot be asked about stays.

        Args:
            named: UIDs of the claims in the kubelet's claim state.
            pods: which pods' processes run.
            unlisted: pods of which it is not known which claims they use.
            sweep: whether to remove CDI files of claims that the ledger does not know. Not before
                they were heard as evidence: the ledger may be the one that is wrong.

        """
        lists: dict[str, list[str]] = {item.name: [] for item in dataclasses.fields(Reconciled)}

        async def look(claim: Claim) -> None:
            async with self._turns.of(claim.uid):
                said = await self._reconcile_one(claim, frozenset(named), pods, frozenset(unlisted))
            if said:
                lists[said].append(claim.uid)

        mine = [claim for claim in self._ledger.snapshot.claims.values() if claim.driver == self._driver]
        for batch in (mine[at : at + 16] for at in range(0, len(mine), 16)):
            await asyncio.gather(*(look(claim) for claim in batch))
        for uid in await self._files.claims() if sweep else ():
            if self._known(uid) is None and uid not in self._preparing and uid not in named:
                async with self._turns.of(uid):
                    if self._known(uid) is None:
                        with contextlib.suppress(cdi.CdiError):
                            await self._files.remove(uid)
                            lists["removed"].append(uid)
        done = Reconciled(**{name: tuple(sorted(uids)) for name, uids in lists.items()})
        if done != Reconciled():
            _LOG.info("%s: claims reconciled: %s", self._driver, done)
        return done

    async def _reconcile_one(
        self, claim: Claim, named: frozenset[str], pods: PodProcesses, unlisted: frozenset[str]
    ) -> str:
        known = self._known(claim.uid)
        if known is None:
            return ""
        prepared = prepared_of(known)
        # A ledger of schema 1 has no pods: whether containers of this boot use the claim is not known.
        unknown = not known.pods and prepared is not None and prepared.boot == self._files.boot
        try:
            users = known.pods | unlisted
            over = known.name and not unknown and holders.claim_is_over(known.uid, users, named, pods)
            if over and not await self._still(known):
                await self._unprepare(known.uid)
                return "unprepared"
        except Exception as error:  # the API server's, a hook's, the disk's: another time
            _LOG.info("%s: claim %s stays as it is for now: %s", self._driver, known.title, error)
            return "unknown"
        if prepared is None:
            return ""
        try:
            if prepared.boot != self._files.boot:
                await self._ledger.do(ledger.reopen(self._driver, known.uid))
                return "reopened"
            written = await self._files.write(known.uid, prepared)
        except (cdi.CdiError, LedgerError) as error:
            _LOG.warning("%s: claim %s: %s", self._driver, known.title, error)
            return "unknown"
        return "rewritten" if written else ""

    async def _still(self, known: Claim) -> bool:
        """Whether the API server still has this claim, allocated to the same devices."""
        ref = ClaimRef(known.namespace, known.name, known.uid)
        async with asyncio.timeout(self._deadline):
            claim = await self._claims.get_claim(known.namespace, known.name)
        try:
            allocation = parse_allocation(claim, ref, self._driver, self._pool)
        except ClaimError as error:
            if error.reason == "malformed":
                raise
            return False
        prepared = prepared_of(known)
        allocated = {(result.device, result.share_id or "") for result in allocation.results}
        return prepared is None or allocated == {(device.device, device.share) for device in prepared.devices}

    def _known(self, uid: str) -> Claim | None:
        return self._ledger.snapshot.claims.get((self._driver, uid))
