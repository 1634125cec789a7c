"""How a scan's result becomes a snapshot of one resource's holders for the register (the agent's record of them)."""

from __future__ import annotations

from deviceplugin.device import Device
from deviceplugin.identity import UNIDENTIFIED
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, holders, kubelet_snapshot
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, Allocation, Amount
from deviceplugin.register.rules import ObservedAllocation
from deviceplugin.source import DeviceSource
from tests.identities import seen_as

R = "example.com/gpu"
HALF = Amount("1/2")
RUNS = "the kubelet's checkpoint does not name it, but processes of its pod run"


class Gpus(DeviceSource):
    resource = R


def scanned(
    *named: Allocation, known: tuple[Allocation, ...] = (), runs: str = "", current: bool = True
) -> HolderSnapshot:
    """Return a scan's result. known: holders that the checkpoint lacks. runs: UIDs of pods whose processes run."""
    checkpoint = CheckpointVersion(frozenset(named), {R: frozenset({"gpu1", "gpu2::1"})})
    pods = PodProcesses(frozenset(runs.split()))
    return holders(known, HolderEvidence([checkpoint], current, pods, "" if current else "it was not written"), 5.0)


def test_replicas_from_before_sharing_ended_hold_their_device() -> None:
    """A pod that holds a replica holds its device, also after the device is no longer shared."""
    inventory = Inventory(R)
    inventory.publish([Device("gpu0"), Device("gpu1")])
    now = scanned(*(Allocation("u1", "main", R, name) for name in ("gpu0::3", "gpu1")))
    ids = kubelet_snapshot(1, now, R, DeviceIds(Gpus(), inventory).device_id_of).held
    assert {name: one.device for name, one in ids.items()} == {"gpu0::3": "gpu0", "gpu1": "gpu1"}


def test_all_holders_of_an_id_are_returned() -> None:
    """All holders of an id are returned; the title and reason of a certain holder are shown."""
    main, init = Allocation("u1", "main", R, "a"), Allocation("u2", "init", R, "a")
    hidden, other = Allocation("u3", "main", R, "b"), Allocation("u1", "main", "example.com/nic", "a")
    now = scanned(main, init, other, known=(hidden,), runs="u2 u3", current=False)
    titles = {"u1": "ml/one", "u2": "ml/two", "u3": "ml/three"}
    assert kubelet_snapshot(1, now, R, str, title=titles.__getitem__).held == {
        "a": ObservedAllocation("a", "ml/two", True, frozenset({("u1", "main"), ("u2", "init")})),
        "b": ObservedAllocation("b", "ml/three", True, frozenset({("u3", "main")}), RUNS, ending=True),
    }


def test_what_the_answer_to_allocate_said_is_returned() -> None:
    """A device's identity and amount come from the response to its holder's Allocate; without it they are unknown."""
    answers = {"a": Wanted((R, "device-a"), seen_as("1", "n1"), HALF)}
    now = scanned(Allocation("u1", "main", R, "a"), Allocation("u2", "main", R, "b"))
    held = kubelet_snapshot(1, now, R, str, lambda one: answers.get(one.device_id)).held
    found = [(one.device, one.identity, one.amount) for one in held.values()]
    assert found == [("device-a", seen_as("1", "n1"), HALF), ("b", UNIDENTIFIED, UNKNOWN)]


def test_what_only_an_old_checkpoint_says_is_not_sure() -> None:
    """A holder that only an old checkpoint names is not certain, unless its pod's processes run."""
    one = Allocation("u1", "main", R, "a")
    assert not kubelet_snapshot(1, scanned(one, current=False), R, str).held["a"].sure
    assert kubelet_snapshot(1, scanned(one, current=False, runs="u1"), R, str).held["a"].sure
    assert kubelet_snapshot(1, scanned(one), R, str).held["a"].sure


def test_a_scan_as_the_register_takes_it() -> None:
    """The snapshot has the devices whose ids the kubelet counts as healthy; for an unknown resource it has none."""
    now = scanned(current=False)
    seen = kubelet_snapshot(7, now, R, lambda name: name.partition("::")[0])
    assert (seen.sequence, seen.at, seen.current, seen.problem) == (7, 5.0, False, "it was not written")
    assert seen.registered == {"gpu1", "gpu2"}
    assert kubelet_snapshot(7, now, "example.com/nic", str).registered == frozenset()
    nothing = HolderSnapshot(problem="no checkpoint")
    assert kubelet_snapshot(7, nothing, R, str).registered == frozenset()
