"""The ledger between the endpoint and the scans of who holds what."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dra_bridge.handover.evidence import DeviceIdResolver, allocations_of, held_ids, kubelet_snapshot
from dra_bridge.handover.gate import LedgerGate

from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import Allocation, Checkpoint
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, holders
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.register import operations
from deviceplugin.register.records import Side
from deviceplugin.register.rules import ObservedAllocation
from deviceplugin.source import DeviceSource
from dra_bridge.ledger.store import Ledger
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import DirectLedger, adopt

R = "example.com/gpu"


class Gpus(DeviceSource):
    resource = R


def scanned(
    *named: Allocation, known: tuple[Allocation, ...] = (), runs: str = "", awake: bool = True
) -> HolderSnapshot:
    """What a scan says: containers that the checkpoint names, others that are known, pods whose processes run."""
    checkpoint = Checkpoint(frozenset(named), {R: frozenset({"gpu1", "gpu2::1"})})
    pods = PodProcesses(frozenset(runs.split()))
    return holders(known, HolderEvidence([checkpoint], awake, pods, "" if awake else "it was not written"), 5.0)


async def test_replicas_from_before_sharing_ended_hold_their_device() -> None:
    """A pod that holds a replica of a device that is shared no more still holds that device."""
    inventory = Inventory(R)
    inventory.publish([Device("gpu0"), Device("gpu1")])
    endpoint = Endpoint(Gpus(), inventory, AllocationsInFlight())
    now = scanned(*(Allocation("u1", "main", R, name) for name in ("gpu0::3", "gpu1")))
    ids = held_ids(now, R, endpoint.ids.device_id_of)
    assert {name: one.device for name, one in ids.items()} == {"gpu0::3": "gpu0", "gpu1": "gpu1"}


def test_all_holders_of_an_id_are_returned() -> None:
    """Of several, one that is certain is shown to people; the reason says why it counts if no checkpoint names it."""
    main, init = Allocation("u1", "main", R, "a"), Allocation("u2", "init", R, "a")
    hidden, other = Allocation("u3", "main", R, "b"), Allocation("u1", "main", "example.com/nic", "a")
    now = scanned(main, init, other, known=(hidden,), runs="u2 u3", awake=False)
    ids = held_ids(now, R, str, {"u1": "ml/one", "u2": "ml/two", "u3": "ml/three"}.__getitem__)
    assert ids == {
        "a": ObservedAllocation("a", "ml/two", True, frozenset({("u1", "main"), ("u2", "init")})),
        "b": ObservedAllocation("b", "ml/three", True, frozenset({("u3", "main")}), "not known: it was not written"),
    }


def test_what_only_an_old_checkpoint_says_is_not_sure() -> None:
    """Its pod may have ended since, unless its processes are seen to run."""
    one = Allocation("u1", "main", R, "a")
    assert not held_ids(scanned(one, awake=False), R, str)["a"].sure
    assert held_ids(scanned(one, awake=False, runs="u1"), R, str)["a"].sure
    assert held_ids(scanned(one), R, str)["a"].sure


def test_a_scan_as_the_ledger_takes_it() -> None:
    """Ids that the kubelet counts as healthy become devices; of a resource that it does not know there are none."""
    now = scanned(awake=False)
    seen = kubelet_snapshot(7, now, R, lambda name: name.partition("::")[0])
    assert (seen.sequence, seen.at, seen.awake, seen.problem) == (7, 5.0, False, "it was not written")
    assert seen.registered == {"gpu1", "gpu2"}
    assert kubelet_snapshot(7, now, "example.com/nic", str).registered == frozenset()
    nothing = HolderSnapshot(problem="no checkpoint")
    assert kubelet_snapshot(7, nothing, R, str).registered == frozenset()


async def test_a_resource_may_be_dropped_during_a_scan(tmp_path: Path) -> None:
    """The ledger takes its time for each of them, and a reload does not wait for it."""
    async_ledger = AsyncLedger(Ledger(str(tmp_path / "ledger.db")))
    resources: dict[str, DeviceIdResolver] = {"example.com/a": str, "example.com/b": str}
    ledger_gate = LedgerGate(async_ledger, resources)
    now = scanned(*(Allocation("u1", "main", name, "d") for name in resources))
    scan = asyncio.create_task(ledger_gate.after_scan(async_ledger.snapshot.sequence, now))
    await asyncio.sleep(0)  # the ledger is asked about the first
    del resources["example.com/a"]
    await scan
    assert [hold.resource for hold in async_ledger.snapshot.allocations.values()] == ["example.com/a", "example.com/b"]
    await async_ledger.close()


async def test_holders_are_known_again_after_a_restart(tmp_path: Path) -> None:
    """The ledger tells the next process which allocations it has to go on scanning for."""
    path = str(tmp_path / "ledger.db")
    with DirectLedger(path) as store:
        store.do(adopt(R, ["a", "b"], Side.PLUGIN, 1.0))
        store.do(operations.grant(R, {"a::1": "a", "b": "b"}, 1.0))
    async_ledger = AsyncLedger(Ledger(path))
    changes: list[str] = []
    ledger_gate = LedgerGate(async_ledger, {R: lambda name: name.partition("::")[0]}, lambda: changes.append("changed"))
    assert set(ledger_gate.awaited()) == {(R, "a::1"), (R, "b")}
    held = {Allocation("u1", "init", R, "a::1"), Allocation("u1", "main", R, "a::1")}
    await ledger_gate.after_scan(ledger_gate.before_scan(), scanned(*held))
    await async_ledger.close()
    with DirectLedger(path) as store:
        assert set(allocations_of(store.snapshot)) == held
    assert set(ledger_gate.awaited()) == {(R, "b")}
    assert changes == []
