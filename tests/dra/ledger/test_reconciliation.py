"""The reconciliation of the ledger with what checkpoint, claims and files show about holders of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deviceplugin.register import operations
from deviceplugin.register.records import Amount, ClaimDevice, Side, State
from deviceplugin.register.rules import ClaimEvidence, Evidence, Excluded, KubeletSnapshot, ObservedAllocation
from tests.dra.ledger.samples import (
    T0,
    D,
    DirectLedger,
    R,
    claim,
    cluster,
    held_by,
    prepare,
    reserve,
    seen,
    state,
    to_dra,
)
from tests.identities import seen_as


def test_an_empty_ledger_is_rebuilt_from_evidence(path: str) -> None:
    """An empty ledger takes from files whether each device is for claims (DRA) or for limits (the plugin).

    A claim or a CDI file has the device: DRA. The checkpoint has it: the plugin. Both have it: quarantine, until the
    checkpoint's holder is gone. Neither has it: the default.
    """
    evidence = Evidence(
        {"p": held_by("p", "u1/main"), "both": held_by("both", "u1/main")},
        [
            ClaimEvidence(D, "1", frozenset({"allocated"}), prepared=False),
            ClaimEvidence(D, "2", frozenset({"filed", "both"}), prepared=True),
        ],
    )
    with DirectLedger(path) as store:
        assert store.fresh
        done = store.do(operations.reconcile_evidence(R, evidence, ["idle"], Side.DRA, T0))
        assert {name: record.state for name, record in store.snapshot.of(R).items()} == {
            "p": State.PLUGIN,
            "allocated": State.DRA,
            "filed": State.DRA,
            "both": State.QUARANTINED,
            "idle": State.DRA,
        }
        assert done.changed["both"] is State.QUARANTINED
        assert store.snapshot.claims[D, "2"].held == {(R, "filed"), (R, "both")}
        assert list(store.snapshot.allocations) == [(R, "p"), (R, "both")]
        later = replace(evidence, held={})
        assert store.do(operations.reconcile_evidence(R, later, [], Side.DRA, T0)).changed == {}, (
            "the ledger has an allocation of it"
        )
        empty = seen(store)
        assert store.do(operations.observe(R, empty, T0)).released == ("p", "both")
        assert store.do(operations.reconcile_evidence(R, later, [], Side.DRA, T0)).changed == {"both": State.DRA}


def test_a_quarantined_device_stays_while_others_are_reconciled(store: DirectLedger) -> None:
    """A device that a pod and a claim hold stays quarantined until the claim ends, also while others are reconciled."""
    evidence = Evidence(
        {"a": ObservedAllocation("a", "default/p")}, [ClaimEvidence(D, "1", frozenset({"a"}), prepared=True)]
    )
    found = store.do(operations.reconcile_evidence(R, evidence, ["a"], Side.PLUGIN, T0))
    assert found.changed == {"a": State.QUARANTINED}
    store.do(operations.reconcile_evidence(R, Evidence(), ["new"], Side.PLUGIN, T0))
    assert state(store) is State.QUARANTINED
    pod_only = replace(evidence, claims=())
    assert store.do(operations.reconcile_evidence(R, pod_only, ["a"], Side.PLUGIN, T0)).changed == {}
    assert state(store) is State.QUARANTINED
    store.do(operations.unprepare(D, "1"))
    assert store.do(operations.reconcile_evidence(R, pod_only, ["a"], Side.PLUGIN, T0)).changed == {"a": State.PLUGIN}


def test_a_checkpoint_that_may_be_old_accuses_nobody(store: DirectLedger) -> None:
    """A holder in a checkpoint that may be old quarantines no device; a holder that is certain does.

    With an uncertain holder, a device for claims counts as uncertain, and a device for limits as held.
    """
    to_dra(store, "b")
    held = {device_id: held_by(device_id, f"uid-{device_id}/main", sure=False) for device_id in ("a", "b")}
    found = store.do(operations.reconcile_evidence(R, Evidence(held), ["a", "b"], Side.PLUGIN, T0))
    assert (found.changed, found.uncertain) == ({}, ("b",))
    assert [record.device_id for record in store.snapshot.allocations.values()] == ["a"]
    snapshot = KubeletSnapshot(store.snapshot.sequence, 0.0, True, held)
    again = store.do(operations.observe(R, snapshot, T0))
    assert (again.found, again.quarantined) == ((), ())
    sure = {"b": replace(held["b"], sure=True)}
    found = store.do(operations.reconcile_evidence(R, Evidence(sure), ["b"], Side.PLUGIN, T0))
    assert found.changed == {"b": State.QUARANTINED}


def test_evidence_of_a_sleeping_checkpoint_puts_no_new_device_anywhere(store: DirectLedger) -> None:
    """Without a current checkpoint, a new device without a holder is not recorded, and one for claims is uncertain."""
    to_dra(store, "b")
    done = store.do(operations.reconcile_evidence(R, Evidence(current=False), ["a", "b", "new"], Side.DRA, T0))
    assert (done.changed, done.uncertain) == ({}, ("b", "new"))
    assert (R, "new") not in store.snapshot.devices
    held = Evidence({"held": held_by("held", "u1/main")}, current=False)
    done = store.do(operations.reconcile_evidence(R, held, ["held"], Side.DRA, T0))
    assert (done.changed, done.uncertain) == ({"held": State.PLUGIN}, ()), "whoever it names has it"
    done = store.do(operations.reconcile_evidence(R, Evidence(), ["b", "new"], Side.DRA, T0))
    assert (done.changed, done.uncertain) == ({"new": State.DRA}, ())


def test_a_claim_known_from_its_file_gets_its_name_once(store: DirectLedger) -> None:
    """A claim that is known only by its file gets a name once and keeps it; pods that share the claim are added."""
    file = ClaimEvidence(D, "1", frozenset({"new"}), prepared=True)
    store.do(operations.reconcile_evidence(R, Evidence({}, [file]), ["new"], Side.PLUGIN, T0))
    for name, pod in (("first", "u1"), ("second", "u2")):
        named = store.do(operations.describe(D, "1", "default", name, [pod]))
        assert named is not None
        assert named.title == "default/first"
    assert store.snapshot.claims[D, "1"].pods == {"u1", "u2"}
    before = store.snapshot
    store.do(operations.describe(D, "1", "default", "third", ["u1"]))
    assert store.snapshot is before, "nothing new is not written"
    assert store.do(operations.describe(D, "unknown", "default", "x")) is None


def test_a_claim_over_two_resources_is_found_once_for_each_of_them(store: DirectLedger, path: str) -> None:
    """If files show a claim with devices of two resources, a lost ledger gets one record with both devices."""
    other = "example.com/nic"
    granted = (ClaimDevice(R, "a", "share-1"),)
    state_file = ClaimEvidence(D, "1", frozenset({"a"}), True, "ml", "train", frozenset({"u1"}), granted)
    store.do(operations.forget(R, ["a"]))
    store.do(operations.reconcile_evidence(R, Evidence(claims=[state_file]), ["a"], Side.PLUGIN, T0))
    second = replace(state_file, devices=frozenset({"n"}), pods=frozenset({"u2"}), granted=())
    for _ in range(2):
        store.do(operations.reconcile_evidence(other, Evidence(claims=[second]), ["n"], Side.PLUGIN, T0))
    store.close()
    with DirectLedger(path) as again:
        record = again.snapshot.claims[D, "1"]
        assert record.devices == (ClaimDevice(R, "a", "share-1"), ClaimDevice(other, "n", limits=True))
        assert (record.title, record.pods) == ("ml/train", frozenset({"u1", "u2"}))
        assert again.snapshot.device(other, "n").state is State.DRA
        assert isinstance(again.do(prepare(claim("2", "a", amount=Amount("1/8")))), Excluded), "it may have all of it"


def test_a_claim_that_is_found_twice_is_one_claim(store: DirectLedger) -> None:
    """If several files show the same claim, the ledger has one record of it; for each device the first file counts."""
    store.do(operations.forget(R, ["a"]))
    granted = (
        ClaimDevice(R, "a", "s", identity=seen_as("b", "uuid:1"), amount=Amount("1/2")),
        ClaimDevice(R, "b", admin=True),
    )
    more = ClaimDevice(R, "a"), ClaimDevice(R, "c", "t")
    found = [
        ClaimEvidence(D, "1", frozenset({"a"}), True, pods=frozenset({"u1"}), granted=granted),
        ClaimEvidence(D, "1", frozenset({"a", "c"}), False, "ml", "train", frozenset({"u2"}), more),
        ClaimEvidence(D, "2", frozenset({"a"}), True),
    ]
    for _ in range(2):
        done = store.do(operations.reconcile_evidence(R, Evidence(claims=found), ["a", "b", "c"], Side.PLUGIN, T0))
        record = store.snapshot.claims[D, "1"]
        assert record.devices == (*granted, ClaimDevice(R, "c", "t"))
        assert (record.title, record.pods) == ("ml/train", frozenset({"u1", "u2"}))
        assert store.snapshot.claims[D, "2"].devices == (ClaimDevice(R, "a", limits=True),)
    assert done.changed == {}
    assert store.snapshot.device(R, "a").state is State.DRA


def test_a_claims_file_names_devices_that_a_ledger_from_before_lacks(store: DirectLedger) -> None:
    """A claim's file adds a device that an older, restored ledger lacks; the recorded answer to the claim is dropped.

    The file of a claim that was unprepared does not restore the claim's record.
    """
    to_dra(store, "a", "b")
    store.do(prepare(claim("1", "a")))
    files = [replace(claim("1", "b"), pods=frozenset({"u1"})), claim("2", "x")]
    assert [one.uid for one in store.do(operations.adopt_claims(files))] == ["1", "2"]
    known = store.snapshot.claims[D, "1"]
    assert known.held == {(R, "a"), (R, "b")}
    assert known.result is None
    assert known.pods == {"u1"}
    assert store.do(operations.adopt_claims(files)) == ()
    store.do(operations.unprepare(D, "1"))
    assert store.do(operations.adopt_claims(files)) == (), "its file may be older than that"


def test_evidence_does_not_bring_back_a_claim_that_was_unprepared(store: DirectLedger) -> None:
    """Files that show an unprepared claim do not restore its record; only a new Prepare does."""
    to_dra(store)
    old = Evidence(claims=[ClaimEvidence(D, "1", frozenset({"a"}), prepared=True)])
    for prepared in (claim("1", "a"), replace(claim("1", "a"), result=None, durable=False)):
        store.do(prepare(prepared) if prepared.result else reserve(prepared, durable=False))
        store.do(operations.unprepare(D, "1"))
        assert store.do(operations.reconcile_evidence(R, old, ["a"], Side.PLUGIN, T0)).changed == {}
        assert store.snapshot.claims == {}
    store.do(prepare(claim("1", "a")))
    store.do(operations.reconcile_evidence(R, old, ["a"], Side.PLUGIN, T0))
    assert store.snapshot.claims[D, "1"].result == "ready", "it was prepared again"
    store.do(operations.unprepare(D, "1"))
    store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0))
    store.do(operations.commit_to_plugin(R, ["a"], cluster(store), T0))
    assert store.do(operations.reconcile_evidence(R, old, ["a"], Side.PLUGIN, T0)).changed == {}
    other = Evidence(claims=[ClaimEvidence(D, "2", frozenset({"a"}), prepared=True)])
    found = store.do(operations.reconcile_evidence(R, other, ["a"], Side.PLUGIN, T0))
    assert found.changed == {"a": State.QUARANTINED}


def test_only_the_last_unprepared_claims_are_remembered(store: DirectLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger remembers the last unprepared claims (here 2); files about an earlier claim restore its record."""
    monkeypatch.setattr(operations, "KEEP_ENDED", 2)
    to_dra(store)
    for uid in ("1", "2", "3"):
        store.do(prepare(claim(uid, "a")))
        store.do(operations.unprepare(D, uid))
    assert list(store.snapshot.ended) == [(D, "2"), (D, "3")]
    found = [ClaimEvidence(D, uid, frozenset({"a"}), prepared=True) for uid in ("1", "2", "3")]
    store.do(operations.reconcile_evidence(R, Evidence(claims=found), ["a"], Side.PLUGIN, T0))
    assert list(store.snapshot.claims) == [(D, "1")]
