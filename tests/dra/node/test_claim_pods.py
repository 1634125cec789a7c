"""Which pods use which claims, and how often the agent reads this for calls at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.looks import Looks
from deviceplugin.register import operations
from deviceplugin.register.records import Claim
from deviceplugin.testing import claim_state as written
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.ledger.worker import AsyncLedger
from dra_bridge.node.claim_pods import ClaimPods, PodsAndClaims
from tests.dra.ledger.samples import D


class Tracker:
    """Counts how often the running pods are read; a list of the pods ends only when `let` is set."""

    def __init__(self) -> None:
        self.readings = 0
        self.looks = Looks("no files")
        self.listing, self.let = asyncio.Event(), asyncio.Event()
        self.pods = SimpleNamespace(running=self.running, seen={})

    def running(self) -> PodProcesses:
        self.readings += 1
        return PodProcesses(frozenset({"pod"}))

    async def listed(self, running: Collection[str]) -> frozenset[str]:
        self.listing.set()
        await self.let.wait()
        return frozenset(running)


class Files:
    """Stands for the files of claims; has none and writes none."""

    async def describe(self, uid: str) -> None:
        """Write no file."""


async def test_calls_at_once_share_a_reading_that_begins_after_them(tmp_path: Path) -> None:
    """Four calls share one read of the running pods; calls that come during this read share the next one."""
    (tmp_path / claim_state.FILE_NAME).write_bytes(written.to_json([]))
    tracker = Tracker()
    async_ledger = await AsyncLedger.open(str(tmp_path / "register.db"))
    seen = cast(HolderTracker, tracker)
    pods = ClaimPods(D, async_ledger, seen, PodsAndClaims(seen, tmp_path), cast(ClaimFiles, Files()))
    async with asyncio.timeout(60):
        first = [asyncio.create_task(pods.running()) for _ in range(4)]
        await tracker.listing.wait()
        assert tracker.readings == 1
        later = [asyncio.create_task(pods.running()) for _ in range(4)]
        await asyncio.sleep(0)
        tracker.let.set()
        found = await asyncio.gather(*first, *later)
    assert tracker.readings == 2
    assert {one.running for one in found} == {frozenset({"pod"})}
    await async_ledger.close()


async def test_pods_of_claims_that_the_ledger_lacks_may_use_any_claim(tmp_path: Path) -> None:
    """A running pod of a claim that the ledger lacks counts as unlisted: the pod may use any claim."""
    named = written.AnsweredDevice(("r",), "node", "d0", (), None)
    state = [written.DevicesOfClaim("default", "c", "1", {D: [named]}, {"pod"})]
    (tmp_path / claim_state.FILE_NAME).write_bytes(written.to_json(state))
    tracker = Tracker()
    tracker.let.set()
    async_ledger = await AsyncLedger.open(str(tmp_path / "ledger.db"))
    seen = cast(HolderTracker, tracker)
    pods = ClaimPods(D, async_ledger, seen, PodsAndClaims(seen, tmp_path), cast(ClaimFiles, Files()))
    assert (await pods.running()).unlisted.keys() == {"pod"}
    await async_ledger.do(operations.adopt_claims([Claim(D, "1", "default", "c", (), None, 0.0)]))
    assert not (await pods.running()).unlisted
    assert async_ledger.snapshot.claims[D, "1"].pods == {"pod"}
    await async_ledger.close()
