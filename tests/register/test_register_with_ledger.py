"""The register with a ledger as its store: what scans change, and what is known again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deviceplugin.identity import UNIDENTIFIED, boot_id
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, holders
from deviceplugin.node.scanning import HolderScanner
from deviceplugin.register import operations
from deviceplugin.register.operations import Observed
from deviceplugin.register.records import Allocation, Side, State
from dra_bridge.ledger.store import Ledger
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import T0, D, DirectLedger, Flaky, R, adopt, kubelet
from tests.identities import seen_as
from tests.register.resources import ListedResource, ListedResources

S = "example.com/other"


class RegisterOnDisk(ListedResources):
    """A register whose store is a ledger, with a scanner that records holders of its resources."""

    def __init__(self, ledger: AsyncLedger, *served: ListedResource) -> None:
        super().__init__(ledger, *served)
        self.ledger = ledger
        tracker = SimpleNamespace(granted=lambda one: None, title=str, observed=frozenset())
        services, wanted = cast("Any", self.services), asyncio.Event()
        self.scanner = HolderScanner(
            services, cast("Any", tracker), self.register, wanted, 1.0, cast("Any", None), always=True
        )
        self.scanner.observers.append(self.observed)
        self.seen: list[tuple[str, Observed]] = []

    def observed(self, done: Mapping[str, Observed]) -> None:
        self.seen += done.items()

    @property
    def allocations(self) -> dict[str, Any]:
        return {name: one for (_, name), one in self.register.snapshot.allocations.items()}

    async def state(self, device: str, to: State) -> None:
        """Move an idle device to this state."""
        direct = cast("DirectLedger", self.ledger.ledger)  # only its snapshot is needed
        await self.ledger.do(operations.begin_move(R, [device], Side.DRA, T0, driver=D))
        if to is not State.TO_DRA:
            await self.ledger.do(operations.commit_to_dra(R, [device], kubelet(direct), T0))
        if to is State.TO_PLUGIN:
            await self.ledger.do(operations.begin_move(R, [device], Side.PLUGIN, T0))


def listed(resource: str, replicas: int = 1, **tokens: str) -> ListedResource:
    return ListedResource(resource, driver=D, replicas=replicas, **tokens)


@asynccontextmanager
async def on_disk(path: str, *served: ListedResource, connect: Any = None) -> AsyncIterator[RegisterOnDisk]:
    ledger = AsyncLedger(Ledger(path, connect=connect) if connect else Ledger(path))
    here = RegisterOnDisk(ledger, *served)
    for resource, one in here.services.items():
        await ledger.do(adopt(resource, one.inventory.snapshot.devices, Side.PLUGIN, T0))
    try:
        yield here
    finally:
        await ledger.close()


@pytest.fixture
def path(tmp_path: Any) -> str:
    return str(tmp_path / "register.db")


def scanned(*named: Allocation, at: float = 1.0) -> HolderSnapshot:
    """Return the result of a scan in which a current checkpoint names these containers."""
    return holders((), HolderEvidence([CheckpointVersion(frozenset(named), {})], True, PodProcesses(frozenset())), at)


# Restarts.


async def test_what_is_adopted_is_on_disk(path: str) -> None:
    """A held device of unknown identity gets that of the first list that has it, and keeps it after a restart."""
    with DirectLedger(path) as before:
        before.do(operations.add_holders([("u1", "main", R, "a")], T0))
    async with on_disk(path, listed(R, a="", b="n2")) as here:
        await here.register.adopt()
        assert here.allocations["a"].identity == UNIDENTIFIED
        here.services[R].list(a="n1", b="n2")
        await here.register.adopt()
    async with on_disk(path, listed(R, a="n2", b="n1")) as here:
        await here.register.adopt()
        assert here.allocations["a"].identity == seen_as(boot_id(), "n1")
        assert here.register.withheld(R, "plugin").ids.keys() == {"a", "b"}


async def test_holders_are_known_again_after_a_restart(path: str) -> None:
    """After a restart the register knows its holders and its pending grants again."""
    async with on_disk(path, listed(R, 2, a="n1", b="n2")) as here:
        await here.register.grant(R, {"a::1": "a", "b::0": "b"})
    held = [Allocation("u1", "init", R, "a::1"), Allocation("u1", "main", R, "a::1")]
    async with on_disk(path, listed(R, 2, a="n1", b="n2")) as here:
        assert {name for name, one in here.allocations.items() if one.pending} == {"a::1", "b::0"}
        await here.scanner.observe(scanned(*held), here.register.snapshot.sequence)
        assert here.seen == [(R, Observed())]
    async with on_disk(path, listed(R, 2, a="n1", b="n2")) as here:
        assert here.allocations["a::1"].holders == {("u1", "init"), ("u1", "main")}
        assert {name for name, one in here.allocations.items() if one.pending} == {"b::0"}


# Scans.


async def test_a_resource_may_be_dropped_during_a_scan(path: str) -> None:
    """If resources are dropped while a scan's result is recorded, their allocations are recorded, and end later."""
    async with on_disk(path, listed(R, d="n1"), listed(S, e="n2")) as here:
        now = scanned(Allocation("u1", "main", R, "d"), Allocation("u1", "main", S, "e"))
        scan = asyncio.create_task(here.scanner.observe(now, here.register.snapshot.sequence))
        await asyncio.sleep(0)  # the ledger is recording the first resource
        del here.services[R], here.services[S]
        await scan
        assert here.allocations.keys() == {"d", "e"}
        await here.scanner.observe(scanned(at=100.0), here.register.snapshot.sequence)
        assert not here.allocations, "they are served no more, and their allocations end all the same"


async def test_a_scan_that_cannot_be_recorded_is_made_good_by_the_next(path: str) -> None:
    """A scan that the ledger cannot record changes nothing; the next scan records all resources in one change."""
    fails: set[str] = set()
    served = listed(R, a="n1"), listed(S, b="n2")
    async with on_disk(path, *served, connect=lambda where: Flaky(where, fails)) as here:
        await here.register.grant(R, {"a": "a"})
        await here.register.grant(S, {"b": "b"})
        named = scanned(Allocation("u1", "main", R, "a"), Allocation("u1", "main", S, "b"))
        fails.add("COMMIT")
        await here.scanner.observe(named, here.register.snapshot.sequence)
        assert all(one.pending for one in here.allocations.values())
        assert here.seen == []
        fails.clear()
        before = here.ledger.snapshot.sequence
        await here.scanner.observe(named, here.register.snapshot.sequence)
        assert not any(one.pending for one in here.allocations.values())
        assert here.ledger.snapshot.sequence == before + 1, "one change of the ledger for all resources"
        assert here.seen == [(R, Observed()), (S, Observed())]
