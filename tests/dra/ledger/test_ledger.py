"""The ledger: its rules, its file, and what becomes of both when things break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra_bridge import ledger
from dra_bridge.ledger import (
    Claim,
    ClaimDevice,
    ClaimEvidence,
    ClusterEvidence,
    Desk,
    Evidence,
    Granted,
    Held,
    KubeletEvidence,
    KubeletSnapshot,
    Ledger,
    LedgerBusyError,
    LedgerError,
    LedgerLostError,
    Refused,
    Side,
    State,
)

R = "example.com/fpga"
D = "fpga.example.com"
T0 = 1_700_000_000.0


def claim(uid: str, *devices: str, result: str | None = "ready", admin: bool = False, share: str = "") -> Claim:
    listed = tuple(ClaimDevice(R, device, share, admin) for device in devices)
    return Claim(D, uid, "default", f"claim-{uid}", listed, result, T0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "plugins" / "ledger.db")


@pytest.fixture
def book(path: str) -> Iterator[Ledger]:
    with Ledger.open(path) as opened:
        opened.do(ledger.adopt(R, ["a", "b"], Side.PLUGIN, T0))
        yield opened


def state(book: Ledger, device: str = "a") -> State:
    return book.snapshot.device(R, device).state


def kubelet(book: Ledger, *, held: dict[str, Held] | None = None) -> KubeletEvidence:
    """Evidence in which everything is as R5 wants it."""
    sequence = book.snapshot.sequence
    return KubeletEvidence(sequence, {"a": 1.0, "b": 1.0}, KubeletSnapshot(sequence, 3.0, True, held or {}))


def seen(book: Ledger, at: float = 1.0, *, awake: bool = True, **held: str) -> KubeletSnapshot:
    """What the witnesses say now; a="u1/main u2/init" is held by these containers."""
    return KubeletSnapshot(
        book.snapshot.sequence, at, awake, {unit: held_by(unit, *them.split()) for unit, them in held.items()}
    )


def held_by(unit: str, *holders: str, sure: bool = True) -> Held:
    """A device held by these containers, each pod/container."""
    pairs = frozenset((pod, container) for pod, container in (one.split("/") for one in holders))
    return Held(unit, f"default/{holders[0].split('/')[0]}", sure, pairs)


def cluster(book: Ledger, allocated: dict[str, str] | None = None) -> ClusterEvidence:
    """Evidence in which everything is as R6 wants it."""
    return ClusterEvidence(book.snapshot.sequence, {"a": 1.0, "b": 1.0}, 2.0, allocated or {})


def to_dra(book: Ledger, *devices: str) -> None:
    book.do(ledger.begin_move(R, devices or ("a",), Side.DRA, T0))
    done = book.do(ledger.commit_to_dra(R, devices or ("a",), kubelet(book), T0))
    assert done.devices == (devices or ("a",))


# R1


def test_allocate_is_granted_on_the_plugins_side_and_recorded(book: Ledger, path: str) -> None:
    """A grant is in the file when it is answered."""
    assert isinstance(book.do(ledger.grant(R, {"a": "a"}, T0)), Granted)
    book.close()
    with Ledger.open(path) as again:
        assert [hold.unit for hold in again.snapshot.holds.values()] == ["a"]
        assert again.snapshot == replace(book.snapshot)


def test_allocate_is_granted_while_the_device_is_leaving_and_the_move_waits(book: Ledger) -> None:
    """R1 in TO_DRA: the grant makes the device held."""
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    evidence = kubelet(book)
    assert isinstance(book.do(ledger.grant(R, {"a": "a"}, T0)), Granted)
    done = book.do(ledger.commit_to_dra(R, ["a"], evidence, T0))
    assert done.devices == ()
    assert "allocated" in done.waiting["a"]


@pytest.mark.parametrize("to", [State.DRA, State.TO_PLUGIN, State.QUARANTINED])
def test_allocate_is_refused_elsewhere_and_says_which_device_where_since_when(book: Ledger, to: State) -> None:
    """The refusal names all that a reader of the pod's event wants to know."""
    to_dra(book)
    if to is State.TO_PLUGIN:
        book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0))
    if to is State.QUARANTINED:
        book.do(ledger.confront(R, Evidence({"a": Held("a", "default/p")}), ["a"], Side.PLUGIN, T0))
    refusal = book.do(ledger.grant(R, {"b": "b", "a": "a"}, T0))
    assert isinstance(refusal, Refused)
    assert (refusal.device, refusal.state, refusal.since) == ("a", to, T0)
    assert "'a'" in refusal.message
    assert to.text in refusal.message
    assert "2023-11-14T22:13:20Z" in refusal.message
    assert not book.snapshot.holds_on(R, ["b"]), "all or none"


def test_a_unit_given_again_is_a_new_grant(book: Ledger) -> None:
    """The kubelet takes devices back without a word and gives them to the next pod."""
    first = book.do(ledger.grant(R, {"a": "a"}, T0))
    second = book.do(ledger.grant(R, {"a": "a"}, T0 + 1))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.sequence > first.sequence
    assert len(book.snapshot.holds) == 1


def test_replicas_hold_one_device_together(book: Ledger) -> None:
    """The device moves as a whole: it is held until its last replica is free."""
    book.do(ledger.grant(R, {"a::0": "a"}, T0))
    book.do(ledger.grant(R, {"a::1": "a"}, T0))
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    held = {"a::1": Held("a", "default/two", holders=frozenset({("two", "main")}))}
    snapshot = KubeletSnapshot(book.snapshot.sequence, 3.0, True, held)
    book.do(ledger.observe(R, snapshot, T0))
    book.do(ledger.observe(R, replace(snapshot, at=63.0), T0))
    assert list(book.snapshot.holds) == [(R, "a::1")]
    assert book.do(ledger.commit_to_dra(R, ["a"], kubelet(book, held=held), T0)).waiting == {"a": "pod default/two"}


# R2


def test_a_claim_is_prepared_once_and_answered_the_same_ever_after(book: Ledger, path: str) -> None:
    """Also after a restart, also if the driver asks with another result."""
    to_dra(book)
    first = book.do(ledger.prepare(claim("1", "a", result="first")))
    assert isinstance(first, Claim)
    book.close()
    with Ledger.open(path) as again:
        second = again.do(ledger.prepare(claim("1", "a", result="second")))
        assert second == first


def test_a_claim_is_refused_on_the_plugins_side_and_pulls_an_idle_device(book: Ledger) -> None:
    """The kubelet tries again; by then the device may have moved."""
    assert isinstance(book.do(ledger.prepare(claim("1", "a"))), Refused)
    assert state(book) is State.PLUGIN
    refusal = book.do(ledger.prepare(claim("1", "a", "b"), pull=True))
    assert isinstance(refusal, Refused)
    assert refusal.moving
    assert (state(book, "a"), state(book, "b")) == (State.TO_DRA, State.TO_DRA)
    assert not book.snapshot.claims


def test_a_claim_does_not_pull_a_held_device(book: Ledger) -> None:
    """A pod has it; the claim waits for a person or the pod."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    refusal = book.do(ledger.reserve(claim("1", "a"), durable=True, pull=True))
    assert isinstance(refusal, Refused)
    assert refusal.holder == "a pod"
    assert state(book) is State.PLUGIN


def test_administrative_access_sees_without_holding(book: Ledger) -> None:
    """Whatever side the device is on, and the device may move meanwhile."""
    assert isinstance(book.do(ledger.prepare(claim("admin", "a", admin=True))), Claim)
    assert isinstance(book.do(ledger.grant(R, {"a": "a"}, T0)), Granted)
    assert book.snapshot.claims_on(R, ["a"]) == []


def test_several_claims_may_share_a_device_on_the_dra_side(book: Ledger) -> None:
    """Consumable capacity: the scheduler sees to the amounts."""
    to_dra(book)
    for uid in "12":
        assert isinstance(book.do(ledger.prepare(claim(uid, "a", share=f"share-{uid}"))), Claim)
    book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0))
    book.do(ledger.unprepare(D, "1"))
    assert book.do(ledger.commit_to_plugin(R, ["a"], cluster(book), T0)).waiting == {"a": "claim default/claim-2"}
    book.do(ledger.unprepare(D, "2"))
    assert book.do(ledger.commit_to_plugin(R, ["a"], cluster(book), T0)).devices == ("a",)


def test_unprepare_of_an_unknown_claim_changes_nothing(book: Ledger) -> None:
    """The kubelet asks for claims that never got as far as here."""
    before = book.snapshot
    assert book.do(ledger.unprepare(D, "nobody")) is None
    assert book.snapshot is before


def test_a_reservation_in_memory_holds_until_the_process_ends(book: Ledger, path: str) -> None:
    """It keeps a move from ending under a driver's feet, and costs no fsync."""
    to_dra(book)
    sequence = book.snapshot.sequence
    assert isinstance(book.do(ledger.reserve(claim("1", "a"), durable=False)), Claim)
    assert book.snapshot.sequence == sequence
    book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0))
    assert book.do(ledger.commit_to_plugin(R, ["a"], cluster(book), T0)).waiting == {"a": "claim default/claim-1"}
    book.close()
    with Ledger.open(path) as again:
        assert not again.snapshot.claims


def test_a_durable_reservation_survives_and_can_be_completed(book: Ledger, path: str) -> None:
    """A driver whose hooks leave traces can undo them after a crash."""
    to_dra(book)
    book.do(ledger.reserve(claim("1", "a"), durable=False))
    book.do(ledger.reserve(claim("1", "a"), durable=True))
    book.close()
    with Ledger.open(path) as again:
        assert again.snapshot.claims[D, "1"].result is None
        done = again.do(ledger.prepare(claim("1", "a")))
        assert isinstance(done, Claim)
        assert done.result == "ready"
        reopened = again.do(ledger.reopen(D, "1"))
        assert reopened is not None
        assert reopened.result is None


# R5, R6, R7


def broken(evidence: KubeletEvidence) -> dict[str, KubeletEvidence]:
    snapshot = evidence.snapshot
    return {
        "after the move": replace(evidence, sequence=0),
        "show it Unhealthy": replace(evidence, shown={}),
        "the kubelet to acknowledge": replace(evidence, snapshot=replace(snapshot, registered=frozenset({"a"}))),
        "to acknowledge": replace(evidence, snapshot=replace(snapshot, at=0.5)),
        "a checkpoint": replace(evidence, snapshot=replace(snapshot, awake=False)),
        "(the disk is full)": replace(evidence, snapshot=replace(snapshot, awake=False, problem="the disk is full")),
        "a snapshot of": replace(evidence, snapshot=replace(snapshot, sequence=evidence.sequence - 1)),
        "pod default/p": replace(evidence, snapshot=replace(snapshot, held={"a": Held("a", "default/p")})),
        "pod default/p (processes": replace(
            evidence, snapshot=replace(snapshot, held={"a": Held("a", "default/p", reason="processes of its pod run")})
        ),
    }


def test_a_move_to_dra_ends_only_with_all_of_its_evidence_in_order(book: Ledger) -> None:
    """Every single piece is needed, and the answer says which one is missing."""
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    for what, evidence in broken(kubelet(book)).items():
        done = book.do(ledger.commit_to_dra(R, ["a"], evidence, T0))
        assert done.devices == (), what
        assert what in done.waiting["a"]
    assert book.do(ledger.commit_to_dra(R, ["a", "b"], kubelet(book), T0)).devices == ("a",)
    assert (state(book), state(book, "b")) == (State.DRA, State.PLUGIN)


def test_a_move_to_the_plugin_ends_only_with_all_of_its_evidence(book: Ledger) -> None:
    """The slice accepted, then a list without an allocation, and nothing prepared."""
    to_dra(book)
    book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0))
    good = cluster(book)
    for what, evidence in {
        "after the move": replace(good, sequence=0),
        "accept the slice": replace(good, withdrawn={}),
        "a list": replace(good, listed_at=0.5),
        "claim default/x": replace(good, allocated={"a": "default/x"}),
    }.items():
        assert what in book.do(ledger.commit_to_plugin(R, ["a"], evidence, T0)).waiting["a"]
    assert book.do(ledger.commit_to_plugin(R, ["a"], good, T0)).devices == ("a",)


def test_a_grant_never_seen_takes_two_snapshots_well_apart(book: Ledger) -> None:
    """The pod may be on its way from Allocate to where the kubelet remembers it."""
    before = seen(book, 0.0)
    book.do(ledger.grant(R, {"a": "a"}, T0))
    empty = seen(book)
    for snapshot, at, released in (
        (before, 1.0, ()),  # began before the grant: says nothing
        (replace(empty, awake=False), 1.0, ()),
        (empty, 1.0, ()),
        (empty, 2.0, ()),
        (replace(empty, awake=False), 12.0, ()),
        (empty, 12.0, ("a",)),
    ):
        assert book.do(ledger.observe(R, replace(snapshot, at=at), T0)).released == released


def test_a_snapshot_that_is_looked_at_late_is_as_old_as_it_is(book: Ledger) -> None:
    """R7: a slow disk between two snapshots close together does not set them apart."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    empty = seen(book)
    book.do(ledger.observe(R, empty, T0))
    assert book.do(ledger.observe(R, replace(empty, at=2.0), T0 + 3600)).released == ()


def test_a_file_that_can_only_be_read_is_put_aside(path: str) -> None:
    """Its header says that a newer SQLite wrote it: every write would fail, for ever."""
    filled(path)
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\3")
    with Ledger.open(path) as again:
        assert again.set_aside is not None
        again.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))


def test_a_device_that_is_not_shared_has_one_claim(book: Ledger) -> None:
    """The API server forgets the claim of a pod that is deleted by force; its container may still run."""
    to_dra(book)
    assert isinstance(book.do(ledger.prepare(claim("1", "a"))), Claim)
    for other in (claim("2", "a"), claim("2", "a", share="s")):
        for operation in (ledger.prepare(other), ledger.reserve(other, durable=False)):
            refusal = book.do(operation)
            assert isinstance(refusal, Refused)
            assert refusal.holder == "claim default/claim-1"
    assert isinstance(book.do(ledger.prepare(claim("2", "a", admin=True))), Claim)
    book.do(ledger.unprepare(D, "1"))
    assert isinstance(book.do(ledger.prepare(claim("3", "a"))), Claim)


def test_a_grant_that_was_seen_is_released_with_the_first_snapshot_without_it(book: Ledger) -> None:
    """A pod that is gone frees its device at once, so that moves are quick."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, a="u1/main"), T0))
    hold = book.snapshot.holds[R, "a"]
    assert (hold.pod, hold.holders, hold.pending) == ("default/u1", frozenset({("u1", "main")}), False)
    assert book.do(ledger.observe(R, seen(book), T0)).released == ("a",)


def test_a_snapshot_from_before_a_grant_says_nothing_of_its_pod(book: Ledger) -> None:
    """It shows the pod before, which had the device, too; the new one is still to be seen."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    before = seen(book, a="former/main")
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, before, T0))
    assert book.snapshot.holds[R, "a"].holders == frozenset()
    assert book.do(ledger.observe(R, seen(book, 2.0), T0)).released == ()


def test_a_grant_to_the_next_pod_waits_though_the_former_pod_has_ended(book: Ledger) -> None:
    """Its own container is still to be named; that the former one is named no more proves nothing of it."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/main"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    for snapshot in (seen(book, 2.0, a="u1/main"), seen(book, 3.0)):
        assert book.do(ledger.observe(R, snapshot, T0)).released == ()
    hold = book.snapshot.holds[R, "a"]
    assert (hold.holders, hold.pending) == (frozenset(), True)
    book.do(ledger.observe(R, seen(book, 4.0, a="u2/main"), T0))
    assert book.do(ledger.observe(R, seen(book, 5.0), T0)).released == ("a",)


def test_an_init_container_named_like_an_earlier_pods_container_holds(book: Ledger) -> None:
    """A holder is a pod's UID and a container, never a name alone (E0)."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/main"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 2.0, a="u1/main u2/main"), T0))
    assert book.do(ledger.observe(R, seen(book, 3.0, a="u2/main"), T0)).released == ()
    assert book.snapshot.holds[R, "a"].holders == {("u2", "main")}
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    done = book.do(ledger.commit_to_dra(R, ["a"], kubelet(book, held={"a": held_by("a", "u2/main")}), T0))
    assert done.waiting == {"a": "pod default/u2"}


def test_init_and_app_container_of_a_pod_hold_one_id_one_after_the_other(book: Ledger) -> None:
    """The kubelet calls Allocate for each; the id is free when the checkpoint names neither."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/init"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 2.0, a="u1/init u1/main"), T0))
    assert not book.snapshot.holds[R, "a"].pending
    assert book.do(ledger.observe(R, seen(book, 3.0, a="u1/main"), T0)).released == ()
    assert book.do(ledger.observe(R, seen(book, 4.0), T0)).released == ("a",)


def test_a_grant_whose_pod_was_refused_is_over_while_an_old_holder_stays(book: Ledger) -> None:
    """R7 ends the grant only; who held the id before holds it for as long as the witnesses say so."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/main"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    for at in (2.0, 12.0):
        assert book.do(ledger.observe(R, seen(book, at, a="u1/main"), T0)).released == ()
    hold = book.snapshot.holds[R, "a"]
    assert (hold.holders, hold.pending) == (frozenset({("u1", "main")}), False)
    assert book.do(ledger.observe(R, seen(book, 13.0), T0)).released == ("a",)


def test_holders_and_whether_a_grant_waits_survive_a_restart(book: Ledger, path: str) -> None:
    """The next agent goes on with (pod UID, container) of each holder, which the witnesses are asked about."""
    book.do(ledger.grant(R, {"a": "a", "b": "b"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/init u1/main"), T0))
    book.close()
    with Ledger.open(path) as again:
        holds = {unit: (hold.holders, hold.pending) for (_, unit), hold in again.snapshot.holds.items()}
        assert holds == {"a": ({("u1", "init"), ("u1", "main")}, False), "b": (frozenset(), True)}


def test_a_pod_that_the_ledger_does_not_know_becomes_a_holder_or_an_alarm(book: Ledger) -> None:
    """A ledger younger than its pods learns of them; on the DRA side they are a contradiction."""
    to_dra(book, "b")
    found = book.do(ledger.observe(R, seen(book, a="u1/main", b="u2/main"), T0))
    assert (found.found, found.quarantined) == (("a", "b"), ("b",))
    assert book.snapshot.holds[R, "a"].holders == {("u1", "main")}
    assert not book.snapshot.holds[R, "a"].pending
    assert state(book, "b") is State.QUARANTINED
    assert "default/u2" in book.snapshot.device(R, "b").reason


def test_a_move_turns_round_and_is_cancelled(book: Ledger) -> None:
    """Before its commit nothing is final."""
    for to, begun in ((Side.DRA, State.TO_DRA), (Side.PLUGIN, State.PLUGIN)):
        assert book.do(ledger.begin_move(R, ["a"], to, T0)) == {"a": begun}
    to_dra(book)
    assert book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0)) == {"a": State.TO_PLUGIN}
    assert book.do(ledger.cancel_move(R, ["a", "b"], T0)) == {"a": State.DRA}
    assert book.do(ledger.begin_move(R, ["a"], Side.DRA, T0)) == {}


def test_devices_are_adopted_once_and_forgotten_when_free(book: Ledger) -> None:
    """A new default does not move what is known; a held device is not forgotten."""
    assert book.do(ledger.adopt(R, ["a", "c"], Side.DRA, T0)) == ("c",)
    assert (state(book, "a"), state(book, "c")) == (State.PLUGIN, State.DRA)
    book.do(ledger.grant(R, {"a": "a"}, T0))
    assert book.do(ledger.forget(R, ["a", "b", "x"])) == ("b",)
    book.do(ledger.grant(R, {"d": "d"}, T0))
    book.do(ledger.adopt(R, ["d"], Side.DRA, T0))
    assert state(book, "d") is State.PLUGIN, "somebody holds it there"


# R8


def test_an_empty_ledger_is_rebuilt_from_evidence(path: str) -> None:
    """A claim or CDI file: DRA; the checkpoint: plugin; both: quarantine; neither: the default."""
    evidence = Evidence(
        {"p": held_by("p", "u1/main"), "both": held_by("both", "u1/main")},
        [
            ClaimEvidence(D, "1", frozenset({"allocated"}), prepared=False),
            ClaimEvidence(D, "2", frozenset({"filed", "both"}), prepared=True),
        ],
    )
    with Ledger.open(path) as book:
        assert book.fresh
        done = book.do(ledger.confront(R, evidence, ["idle"], Side.DRA, T0))
        assert {name: record.state for name, record in book.snapshot.of(R).items()} == {
            "p": State.PLUGIN,
            "allocated": State.DRA,
            "filed": State.DRA,
            "both": State.QUARANTINED,
            "idle": State.DRA,
        }
        assert done.quarantined == ("both",)
        assert book.snapshot.claims[D, "2"].held == {(R, "filed"), (R, "both")}
        assert list(book.snapshot.holds) == [(R, "p"), (R, "both")]
        later = replace(evidence, held={})
        assert book.do(ledger.confront(R, later, [], Side.DRA, T0)).changed == {}, "the ledger has a hold of it"
        empty = seen(book)
        assert book.do(ledger.observe(R, empty, T0)).released == ("p", "both")
        assert book.do(ledger.confront(R, later, [], Side.DRA, T0)).changed == {"both": State.DRA}


def test_a_quarantined_device_stays_while_others_are_confronted(book: Ledger) -> None:
    """A device that is plugged in brings no evidence about the others; the ledger's claim counts, too."""
    evidence = Evidence({"a": Held("a", "default/p")}, [ClaimEvidence(D, "1", frozenset({"a"}), prepared=True)])
    assert book.do(ledger.confront(R, evidence, ["a"], Side.PLUGIN, T0)).quarantined == ("a",)
    book.do(ledger.confront(R, Evidence(), ["new"], Side.PLUGIN, T0))
    assert state(book) is State.QUARANTINED
    pod_only = replace(evidence, claims=())
    assert book.do(ledger.confront(R, pod_only, ["a"], Side.PLUGIN, T0)).quarantined == ("a",)
    book.do(ledger.unprepare(D, "1"))
    assert book.do(ledger.confront(R, pod_only, ["a"], Side.PLUGIN, T0)).changed == {"a": State.PLUGIN}


def test_a_checkpoint_that_may_be_old_accuses_nobody(book: Ledger) -> None:
    """It shows ended pods: on the DRA side the device is doubtful, on the plugin's side held."""
    to_dra(book, "b")
    held = {unit: held_by(unit, f"uid-{unit}/main", sure=False) for unit in ("a", "b")}
    found = book.do(ledger.confront(R, Evidence(held), ["a", "b"], Side.PLUGIN, T0))
    assert (found.changed, found.quarantined, found.doubtful) == ({}, (), ("b",))
    assert [hold.unit for hold in book.snapshot.holds.values()] == ["a"]
    snapshot = KubeletSnapshot(book.snapshot.sequence, 0.0, True, held)
    again = book.do(ledger.observe(R, snapshot, T0))
    assert (again.found, again.quarantined) == ((), ())
    sure = {"b": replace(held["b"], sure=True)}
    assert book.do(ledger.confront(R, Evidence(sure), ["b"], Side.PLUGIN, T0)).quarantined == ("b",)


def test_evidence_of_a_sleeping_checkpoint_puts_no_new_device_anywhere(book: Ledger) -> None:
    """A pod that it does not name yet may have it; one that is on the plugin's side is safe there."""
    to_dra(book, "b")
    done = book.do(ledger.confront(R, Evidence(awake=False), ["a", "b", "new"], Side.DRA, T0))
    assert (done.changed, done.doubtful) == ({}, ("b", "new"))
    assert (R, "new") not in book.snapshot.devices
    held = Evidence({"held": held_by("held", "u1/main")}, awake=False)
    done = book.do(ledger.confront(R, held, ["held"], Side.DRA, T0))
    assert (done.changed, done.doubtful) == ({"held": State.PLUGIN}, ()), "whoever it names has it"
    done = book.do(ledger.confront(R, Evidence(), ["b", "new"], Side.DRA, T0))
    assert (done.changed, done.doubtful) == ({"new": State.DRA}, ())


def test_a_claim_known_from_its_file_gets_its_name_once(book: Ledger) -> None:
    """So that it can be asked about; what has a name keeps it, and pods that come to share it are added."""
    file = ClaimEvidence(D, "1", frozenset({"new"}), prepared=True)
    book.do(ledger.confront(R, Evidence({}, [file]), ["new"], Side.PLUGIN, T0))
    for name, pod in (("first", "u1"), ("second", "u2")):
        named = book.do(ledger.describe(D, "1", "default", name, [pod]))
        assert named is not None
        assert named.title == "default/first"
    assert book.snapshot.claims[D, "1"].pods == {"u1", "u2"}
    before = book.snapshot
    book.do(ledger.describe(D, "1", "default", "third", ["u1"]))
    assert book.snapshot is before, "nothing new is not written"
    assert book.do(ledger.describe(D, "unknown", "default", "x")) is None


def test_a_claim_over_two_resources_is_found_once_for_each_of_them(book: Ledger, path: str) -> None:
    """The ledger is lost: both resources' evidence goes into one record, which holds and unprepares all of it."""
    other = "example.com/nic"
    state_file = ClaimEvidence(D, "1", frozenset({"a"}), True, "ml", "train", frozenset({"u1"}), {"a": "share-1"})
    book.do(ledger.forget(R, ["a"]))
    book.do(ledger.confront(R, Evidence(claims=[state_file]), ["a"], Side.PLUGIN, T0))
    second = replace(state_file, devices=frozenset({"n"}), pods=frozenset({"u2"}), shares={"n": ""})
    for _ in range(2):
        book.do(ledger.confront(other, Evidence(claims=[second]), ["n"], Side.PLUGIN, T0))
    book.close()
    with Ledger.open(path) as again:
        record = again.snapshot.claims[D, "1"]
        assert record.devices == (ClaimDevice(R, "a", "share-1"), ClaimDevice(other, "n"))
        assert (record.title, record.pods) == ("ml/train", frozenset({"u1", "u2"}))
        assert again.snapshot.device(other, "n").state is State.DRA
        assert isinstance(again.do(ledger.prepare(claim("2", "a"))), Refused)


def test_evidence_adds_nothing_to_a_claim_that_is_prepared(book: Ledger) -> None:
    """Its record says itself what it holds; seen devices among it."""
    to_dra(book)
    book.do(ledger.prepare(claim("1", "a")))
    known = book.snapshot.claims[D, "1"]
    found = ClaimEvidence(D, "1", frozenset({"b"}), prepared=True)
    book.do(ledger.confront(R, Evidence(claims=[found]), [], Side.PLUGIN, T0))
    assert book.snapshot.claims[D, "1"] == known


def test_settings_survive(book: Ledger, path: str) -> None:
    """A value is there after a restart, until it is replaced or dropped; the same value costs no write."""
    book.do(ledger.set_setting("share", R, "all"))
    sequence = book.snapshot.sequence
    book.do(ledger.set_setting("share", R, "all"))
    assert book.snapshot.sequence == sequence
    assert book.snapshot.setting("share", "other") is None
    book.close()
    with Ledger.open(path) as again:
        assert again.snapshot.setting("share", R) == "all"
        again.do(ledger.set_setting("share", R, "none"))
        again.do(ledger.set_setting("share", "x", "1"))
        again.do(ledger.set_setting("share", "x", None))
    with Ledger.open(path) as again:
        assert {key: one.value for key, one in again.snapshot.settings.items()} == {("share", R): "none"}


def test_a_ledger_that_is_whole_is_corrected_by_holders_only(book: Ledger) -> None:
    """An allocation is a scheduler's wish and may be late; a CDI file is a holder."""
    wish = ClaimEvidence(D, "1", frozenset({"a"}), prepared=False)
    assert book.do(ledger.confront(R, Evidence({}, [wish]), [], Side.PLUGIN, T0)).changed == {}
    filed = replace(wish, prepared=True)
    assert book.do(ledger.confront(R, Evidence({}, [filed]), [], Side.PLUGIN, T0)).quarantined == ("a",)


# The file.


def test_a_second_agent_stands_by_until_the_first_ends(path: str) -> None:
    """A rolling update: the next agent has the ledger the moment the old one lets go."""
    first = Ledger.open(path)
    with pytest.raises(LedgerBusyError):
        Ledger.open(path)

    async def second() -> int:
        opening = asyncio.create_task(Desk.open(path))
        await asyncio.sleep(0)
        first.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))
        first.close()
        desk = await opening
        count = len(desk.snapshot.devices)
        await desk.close()
        return count

    assert asyncio.run(second()) == 1


@pytest.mark.parametrize("removed", ["ledger.db", "ledger.db-wal", "ledger.db.lock", "."])
def test_a_ledger_removed_under_an_agent_grants_nothing_any_more(path: str, removed: str) -> None:
    """Not even when the files are back: another agent may have had the ledger meanwhile."""
    with Ledger.open(path) as book:
        book.do(ledger.adopt(R, ["a", "b"], Side.PLUGIN, T0))
        book.do(ledger.grant(R, {"a": "a"}, T0))
        gone = Path(path).parent / removed
        kept = gone.rename(gone.parent.parent / "kept")
        for _ in range(2):
            with pytest.raises(LedgerLostError, match="has to be restarted"):
                book.do(ledger.grant(R, {"b": "b"}, T0))
            if kept.exists():
                kept.rename(gone)
        assert not book.snapshot.holds_on(R, ["b"])


def test_a_ledger_that_another_agent_made_anew_grants_nothing_to_the_first(path: str) -> None:
    """With its directory the first one lost its lock."""
    with Ledger.open(path) as book:
        book.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))
        shutil.rmtree(Path(path).parent)
        with Ledger.open(path) as other:
            other.do(ledger.adopt(R, ["a"], Side.DRA, T0))
            with pytest.raises(LedgerLostError):
                book.do(ledger.grant(R, {"a": "a"}, T0))
            assert not book.snapshot.holds


def test_a_disk_that_loses_what_was_written_ends_the_ledger(path: str) -> None:
    """After a failed write the file is read again; if it is older than what was answered, nothing is granted."""
    failing: list[str] = []

    def step(name: str) -> None:
        if name in failing:
            raise OSError(28, "No space left on device")

    with Ledger.open(path, step=step) as book:
        book.do(ledger.adopt(R, ["a", "b"], Side.PLUGIN, T0))
        old = {suffix: Path(path + suffix).read_bytes() for suffix in ("", "-wal")}
        book.do(ledger.grant(R, {"a": "a"}, T0))
        failing.append("commit")
        with pytest.raises(LedgerError):
            book.do(ledger.grant(R, {"b": "b"}, T0))
        failing.clear()
        for suffix, content in old.items():
            Path(path + suffix).write_bytes(content)
        with pytest.raises(LedgerLostError, match="has lost what was written"):
            book.do(ledger.grant(R, {"b": "b"}, T0))


async def test_a_lost_ledger_is_reported_to_its_owner(path: str) -> None:
    """The desk's event is set with the first answer that fails so."""
    desk = await Desk.open(path)
    await desk.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))
    assert not desk.lost.is_set()
    shutil.rmtree(Path(path).parent)
    with pytest.raises(LedgerLostError):
        await desk.do(ledger.grant(R, {"a": "a"}, T0))
    async with asyncio.timeout(60):
        await desk.lost.wait()
    await desk.close()


SYNCS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
static void note(void) {
    int fd = open(getenv("SYNCS"), O_WRONLY | O_APPEND);
    if (fd >= 0) { write(fd, "s", 1); close(fd); }
}
int fdatasync(int fd) { note(); return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd); }
int fsync(int fd) { note(); return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd); }
"""
"""Notes each sync of the process that it is loaded into."""


def test_an_answer_comes_after_the_disk_was_told_to_keep_it(tmp_path: Path) -> None:
    """A grant must survive a power failure: the process syncs its log between the call and the answer."""
    source, library, notes = tmp_path / "syncs.c", tmp_path / "syncs.so", tmp_path / "notes"
    source.write_text(SYNCS)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source), "-ldl"], check=True, timeout=60
    )
    notes.touch()
    script = f"""
from pathlib import Path
from dra_bridge import ledger
from tests.dra.ledger.test_ledger import R, T0
notes = Path({str(notes)!r})
book = ledger.Ledger.open({str(tmp_path / "l.db")!r})
book.do(ledger.adopt(R, ["a"], ledger.Side.PLUGIN, T0))
for operation in (ledger.grant(R, {{"a": "a"}}, T0), ledger.begin_move(R, ["a"], ledger.Side.DRA, T0)):
    before = len(notes.read_text())
    book.do(operation)
    print(len(notes.read_text()) > before)
"""
    environment = {**os.environ, "LD_PRELOAD": str(library), "SYNCS": str(notes)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert done.stdout.split() == ["True", "True"]


def blocked_at(inode: int) -> None:
    """Wait until somebody waits for the lock of this file."""
    until = time.monotonic() + 60
    while not any("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_is_closed_answers_with_an_error(path: str) -> None:
    """Nobody gets a grant from a ledger that another agent may have by now."""
    book = Ledger.open(path)
    book.close()
    with pytest.raises(LedgerError):
        book.do(ledger.grant(R, {"a": "a"}, T0))


@pytest.mark.parametrize("version", [0, 3, 99])
def test_a_file_of_another_schema_is_put_aside(book: Ledger, path: str, version: int) -> None:
    """Older or newer: never a reason to stay down, never lost."""
    book.close()
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")
    with Ledger.open(path) as again:
        assert again.fresh
        assert again.set_aside is not None
        assert os.path.exists(again.set_aside)
        again.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))


FORMER = """
CREATE TABLE devices (resource, device, state, since, sequence, reason, PRIMARY KEY (resource, device)) WITHOUT ROWID;
CREATE TABLE holds (resource, unit, device, since, sequence, PRIMARY KEY (resource, unit)) WITHOUT ROWID;
CREATE TABLE claims (driver, uid, namespace, name, devices, result, since, sequence, PRIMARY KEY (driver, uid))
    WITHOUT ROWID;
CREATE TABLE seal (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, seal INTEGER NOT NULL);
PRAGMA application_id = 1685089383;
PRAGMA user_version = 1;
"""
FORMER_ROWS: dict[str, list[tuple[object, ...]]] = {
    "devices": [(R, "a", "plugin", T0, 1, ""), (R, "b", "dra", T0, 2, "the share is 1")],
    "holds": [(R, "a", "a", T0, 3)],
    "claims": [(D, "1", "ml", "train", f'[["{R}","b","",false]]', "ready", T0, 4)],
}


def former_ledger(path: str, *, seal: int = 0) -> None:
    """Write a ledger as an agent of schema 1 left it; `seal` other than 0 damages it."""
    os.makedirs(os.path.dirname(path))
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.executescript(FORMER)
        for table, rows in FORMER_ROWS.items():
            for row in rows:
                raw.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                digest = hashlib.blake2b(msgspec.msgpack.encode((table, *row)), digest_size=8).digest()
                seal ^= int.from_bytes(digest, "big", signed=True)
        raw.execute("INSERT INTO seal VALUES (1, 4, ?)", (seal,))
        raw.commit()


def test_a_ledger_of_schema_1_is_upgraded(path: str) -> None:
    """Nothing is lost; grants of then wait for their container to be named, and claims' pods are not known."""
    former_ledger(path)
    for _ in range(2):  # upgraded, and then as it is
        with Ledger.open(path) as book:
            assert (book.set_aside, book.fresh, book.snapshot.sequence) == (None, False, 4)
            assert (state(book, "a"), state(book, "b")) == (State.PLUGIN, State.DRA)
            hold = book.snapshot.holds[R, "a"]
            assert (hold.device, hold.holders, hold.pending) == ("a", frozenset(), True)
            record = book.snapshot.claims[D, "1"]
            assert (record.title, record.held, record.pods) == ("ml/train", frozenset({(R, "b")}), frozenset())
    with Ledger.open(path) as book:
        book.do(ledger.observe(R, seen(book, a="u1/main"), T0))
        book.do(ledger.set_setting("share", R, "1"))
    with Ledger.open(path) as book:
        assert book.set_aside is None
        assert book.snapshot.holds[R, "a"].holders == {("u1", "main")}


def test_a_damaged_ledger_of_schema_1_is_put_aside(path: str) -> None:
    """Its seal is checked before anything of it is taken over."""
    former_ledger(path, seal=1)
    with Ledger.open(path) as book:
        assert book.set_aside is not None
        assert book.fresh
        assert not book.snapshot.devices


def test_only_the_latest_damaged_files_are_kept(path: str) -> None:
    """A disk that eats ledgers does not fill up with them."""
    os.makedirs(os.path.dirname(path))
    for _ in range(8):
        Path(path).write_bytes(b"not a database at all, by any measure" * 100)
        with Ledger.open(path) as opened:
            assert opened.set_aside is not None
    assert sum(".aside-" in name for name in os.listdir(os.path.dirname(path))) == 5


def filled(path: str) -> bytes:
    with Ledger.open(path) as opened:
        opened.do(ledger.adopt(R, [f"device-{n}" for n in range(8)], Side.DRA, T0))
        for number in range(6):
            opened.do(ledger.prepare(claim(str(number), f"device-{number}")))
        opened.do(ledger.adopt(R, ["p"], Side.PLUGIN, T0))
        opened.do(ledger.grant(R, {"p": "p"}, T0))
    return Path(path).read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_noticed_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Truncated or with changed bytes: the ledger opens, and is either as it was or put aside and empty."""
    directory = tmp_path_factory.mktemp("damage")
    path = str(directory / "ledger.db")
    whole = filled(path)
    with Ledger.open(path) as opened:
        before = opened.snapshot
    damaged = bytearray(whole)
    if data.draw(st.booleans(), "truncate"):
        del damaged[data.draw(st.integers(0, len(whole) - 1), "at") :]
    else:
        for _ in range(data.draw(st.integers(1, 4), "changes")):
            damaged[data.draw(st.integers(0, len(whole) - 1), "at")] = data.draw(st.integers(0, 255), "to")
    Path(path).write_bytes(damaged)
    with Ledger.open(path) as opened:
        assert opened.snapshot == before or opened.fresh
        assert opened.fresh or opened.set_aside is None
        opened.do(ledger.adopt(R, ["new"], Side.PLUGIN, T0))
    with Ledger.open(path) as opened:
        assert (R, "new") in opened.snapshot.devices


def test_a_damaged_write_ahead_log_ends_where_it_is_damaged(tmp_path: Path) -> None:
    """SQLite's own checksums: what follows the damage never happened, what precedes it did."""
    path = str(tmp_path / "ledger.db")
    opened = Ledger.open(path)
    opened.do(ledger.adopt(R, ["a"], Side.PLUGIN, T0))
    first = opened.snapshot
    size = os.path.getsize(path + "-wal")
    opened.do(ledger.grant(R, {"a": "a"}, T0))
    copies = {suffix: Path(path + suffix).read_bytes() for suffix in ("", "-wal")}
    both = opened.snapshot
    opened.close()
    wal = copies["-wal"]
    for at in range(0, len(wal), 97):
        Path(path).write_bytes(copies[""])
        Path(path + "-wal").write_bytes(wal[:at] + bytes([wal[at] ^ 0x55]) + wal[at + 1 :])
        with Ledger.open(path) as again:
            assert again.snapshot in (first, both) or again.fresh or again.snapshot.sequence < first.sequence
            if at >= size:
                assert again.snapshot in (first, both)


# Crashes and full disks.


def operations() -> Sequence[Any]:
    """A life of a device in durable steps."""
    sequence = 1 << 40
    evidence = KubeletEvidence(sequence, {"a": 1.0}, KubeletSnapshot(sequence, 3.0, True))
    return (
        ledger.adopt(R, ["a", "b"], Side.PLUGIN, T0),
        ledger.grant(R, {"b": "b"}, T0),
        ledger.begin_move(R, ["a"], Side.DRA, T0),
        ledger.commit_to_dra(R, ["a"], evidence, T0),
        ledger.reserve(claim("1", "a"), durable=True),
        ledger.prepare(claim("1", "a")),
        ledger.begin_move(R, ["a"], Side.PLUGIN, T0),
        ledger.unprepare(D, "1"),
        ledger.commit_to_plugin(R, ["a"], ClusterEvidence(sequence, {"a": 1.0}, 2.0), T0),
        ledger.grant(R, {"a": "a"}, T0),
        ledger.forget(R, ["b"]),
    )


def scenario(path: str, die_at: int) -> None:
    """Run the operations; die at the given step. Each answer is told as soon as it is given."""
    count = 0

    def step(_name: str) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with Ledger.open(path, step=step) as opened:
        for number, operation in enumerate(operations()):
            opened.do(operation)
            os.write(1, b"%d\n" % number)


def states(path: str) -> list[ledger.Snapshot]:
    with Ledger.open(path) as opened:
        found = [opened.snapshot]
        for operation in operations():
            opened.do(operation)
            found.append(opened.snapshot)
    return found


def kill_everywhere(directory: str) -> None:
    """Fork a child for each step and let it die there; runs in a process without threads."""
    for die_at in range(1, 1000):
        path = os.path.join(directory, f"{die_at}.db")
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writer, 1)
            scenario(path, die_at)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            answered = len(told.read().split())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(die_at, answered, status)
        if status == 0:
            return


def test_a_kill_at_any_step_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    """Every durable step and every gap between two, enumerated: the file holds what was answered, or one more."""
    expected = states(str(tmp_path / "expected.db"))
    script = f"from tests.dra.ledger.test_ledger import kill_everywhere; kill_everywhere({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) > 50
    for die_at, answered, status in lines:
        assert status == (0 if die_at == len(lines) else -signal.SIGKILL)
        with Ledger.open(str(tmp_path / f"{die_at}.db")) as again:
            assert again.set_aside is None
            assert again.snapshot in expected[answered : answered + 2], die_at


def test_a_full_disk_grants_nothing_and_heals(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: an error each time, the record as before, and all well afterwards."""
    script = f"""
import resource, signal, sys
from dra_bridge import ledger
from tests.dra.ledger.test_ledger import R, T0
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
book = ledger.Ledger.open({str(tmp_path / "l.db")!r})
book.do(ledger.adopt(R, ["a", "b"], ledger.Side.PLUGIN, T0))
before = book.snapshot
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for _ in range(3):
    try:
        book.do(ledger.grant(R, {{"a": "a"}}, T0))
    except ledger.LedgerError as error:
        print("refused", error)
    assert book.snapshot == before, book.snapshot
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert isinstance(book.do(ledger.grant(R, {{"a": "a"}}, T0)), ledger.Granted)
after = book.snapshot
book.close()
again = ledger.Ledger.open({str(tmp_path / "l.db")!r})
assert again.set_aside is None and again.snapshot == after
print("healed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.count("refused") == 3, done.stdout + done.stderr
    assert "healed" in done.stdout


def test_a_full_disk_at_the_first_start_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """RLIMIT_FSIZE again: the ledger cannot be made; nothing is put aside, and with room it is made."""
    path = tmp_path / "l.db"
    script = f"""
import resource, signal
from dra_bridge import ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
try:
    ledger.Ledger.open({str(path)!r})
except ledger.LedgerError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
with ledger.Ledger.open({str(path)!r}) as book:
    assert book.set_aside is None and book.fresh
print("made")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    said, made = done.stdout.splitlines()
    assert said.startswith(f"cannot open the ledger {path}: ")
    assert made == "made"
    assert not [*tmp_path.glob("*aside*")]


class Flaky:
    """A connection on which chosen statements fail."""

    def __init__(self, path: str, fails: set[str]) -> None:
        self._inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._fails = fails

    def execute(self, sql: str, *args: Any) -> Any:
        for word in self._fails:
            if sql.startswith(word):
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
        return self._inner.execute(sql, *args)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("word", ["BEGIN", "INSERT", "UPDATE", "COMMIT"])
def test_a_write_that_fails_refuses_and_the_next_one_looks_at_the_disk(tmp_path: Path, word: str) -> None:
    """An fsync that fails says nothing about what is on disk: it is read again before anything is granted."""
    fails: set[str] = set()
    path = str(tmp_path / "l.db")
    with Ledger.open(path, connect=lambda where: Flaky(where, fails)) as book:  # type: ignore[arg-type,return-value]
        book.do(ledger.adopt(R, ["a", "b"], Side.DRA, T0))
        book.do(ledger.reserve(claim("0", "b"), durable=False))
        fails.add(word)
        for _ in range(2):
            with pytest.raises(LedgerError):
                book.do(ledger.prepare(claim("1", "a")))
        fails.add("PRAGMA")
        with pytest.raises(LedgerError):
            book.do(ledger.prepare(claim("1", "a")))
        fails.clear()
        assert set(book.snapshot.claims) == {(D, "0")}
        assert isinstance(book.do(ledger.prepare(claim("1", "a"))), Claim)
        assert set(book.snapshot.claims) == {(D, "0"), (D, "1")}
        kept = book.snapshot.devices
    with Ledger.open(path) as again:
        assert again.snapshot.devices == kept


def test_a_file_that_goes_bad_while_it_is_in_use_ends_the_ledger(tmp_path: Path) -> None:
    """It is put aside; nothing is granted until a new process has found out from evidence what is held."""
    fails: set[str] = set()
    path = str(tmp_path / "l.db")
    with Ledger.open(path, connect=lambda where: Flaky(where, fails)) as book:  # type: ignore[arg-type,return-value]
        book.do(ledger.adopt(R, ["a", "b"], Side.PLUGIN, T0))
        fails.add("COMMIT")
        with pytest.raises(LedgerError):
            book.do(ledger.grant(R, {"b": "b"}, T0))
        fails.clear()
        Path(path).write_bytes(b"\xff" * 8192)
        for _ in range(2):
            with pytest.raises(LedgerLostError):
                book.do(ledger.grant(R, {"b": "b"}, T0))
        assert book.set_aside is not None


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Not damage: nothing is put aside."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        Ledger.open(str(tmp_path / "file" / "ledger.db"))


def test_an_operation_that_fails_costs_its_own_caller_only(book: Ledger) -> None:
    """One mistake of ours in a batch does not refuse the pods beside it."""

    def mistaken(_now: ledger.Snapshot) -> ledger.Decision[None]:
        raise ZeroDivisionError

    answers = book.do_all([mistaken, ledger.grant(R, {"a": "a"}, T0)])
    assert isinstance(answers[0], ZeroDivisionError)
    assert isinstance(answers[1], Granted)
    with pytest.raises(ZeroDivisionError):
        book.do(mistaken)


# The desk.


async def test_what_is_asked_together_is_committed_together(path: str) -> None:
    """Eight Allocates at once do not wait for eight disks."""
    commits: list[str] = []
    begun, held = threading.Event(), threading.Event()

    def step(name: str) -> None:
        if name == "commit":
            commits.append(name)
            begun.set()
            held.wait(10)

    book = Ledger.open(path, step=step)
    held.set()
    desk = Desk(book)
    await desk.do(ledger.adopt(R, [str(n) for n in range(9)], Side.PLUGIN, T0))
    held.clear()
    begun.clear()
    commits.clear()
    first = asyncio.create_task(desk.do(ledger.grant(R, {"8": "8"}, T0)))
    await asyncio.to_thread(begun.wait, 10)
    others = [asyncio.create_task(desk.do(ledger.grant(R, {str(n): str(n)}, T0))) for n in range(8)]
    await asyncio.sleep(0)
    held.set()
    assert all(isinstance(answer, Granted) for answer in await asyncio.gather(first, *others))
    assert len(commits) == 2
    with pytest.raises(ZeroDivisionError):
        await desk.do(lambda now: 1 // 0)  # type: ignore[arg-type, return-value]
    await desk.close()
    with pytest.raises(LedgerError):
        await desk.do(ledger.grant(R, {"1": "1"}, T0))


async def test_the_desk_passes_on_that_a_write_failed(path: str) -> None:
    """Each caller of the batch gets the error."""
    fails: set[str] = set()
    book = Ledger.open(path, connect=lambda where: Flaky(where, fails))  # type: ignore[arg-type,return-value]
    desk = Desk(book)
    fails.add("COMMIT")
    answers = await asyncio.gather(
        *(desk.do(ledger.grant(R, {unit: unit}, T0)) for unit in "ab"), return_exceptions=True
    )
    assert all(isinstance(answer, LedgerError) for answer in answers)
    fails.clear()
    await desk.close()


async def test_a_desk_that_nobody_waits_for_gives_the_lock_back(path: str) -> None:
    """Standing by is cancelled when the process is told to stop."""
    first = Ledger.open(path)
    opening = asyncio.create_task(Desk.open(path))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    first.close()
    second = await Desk.open(path)
    await second.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_memory_and_file_never_differ(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is asked in whatever order, a ledger opened again knows the same."""
    path = str(tmp_path_factory.mktemp("same") / "l.db")
    device, uid = st.sampled_from("abc"), st.sampled_from("123")
    operation = st.one_of(
        st.builds(lambda d, s: ledger.adopt(R, [d], s, T0), device, st.sampled_from(Side)),
        st.builds(lambda d: ledger.grant(R, {d: d}, T0), device),
        st.builds(lambda d, s: ledger.begin_move(R, [d], s, T0), device, st.sampled_from(Side)),
        st.builds(lambda u, d: ledger.prepare(claim(u, d), pull=True), uid, device),
        st.builds(lambda u, d, k: ledger.reserve(claim(u, d), durable=k), uid, device, st.booleans()),
        st.builds(lambda u: ledger.unprepare(D, u), uid),
        st.builds(lambda u: ledger.reopen(D, u), uid),
        st.builds(lambda d: ledger.forget(R, [d]), device),
        st.builds(
            lambda d, held: ledger.observe(
                R, KubeletSnapshot(1 << 40, 0.0, True, {d: held_by(d, held)} if held else {}), T0, apart=0.0
            ),
            device,
            st.sampled_from(["", "u1/main", "u1/init", "u2/main"]),
        ),
        st.builds(lambda u, d: ledger.describe(D, u, "n", "c", [d]), uid, device),
        st.builds(lambda d, v: ledger.set_setting("s", d, v), device, st.sampled_from([None, "1", "2"])),
        st.builds(
            lambda d, held: ledger.confront(
                R,
                Evidence(
                    {d: held_by(d, "u3/main")} if held else {}, [ClaimEvidence(D, "9", frozenset({d}), prepared=held)]
                ),
                [d],
                Side.DRA,
                T0,
            ),
            device,
            st.booleans(),
        ),
    )
    with Ledger.open(path) as opened:
        for batch in data.draw(st.lists(st.lists(operation, min_size=1, max_size=3), max_size=10)):
            opened.do_all(batch)
        known = opened.snapshot
    with Ledger.open(path) as again:
        assert again.set_aside is None
        assert again.snapshot.sequence == known.sequence
        assert again.snapshot.devices == known.devices
        assert again.snapshot.claims == {key: value for key, value in known.claims.items() if value.durable}
        assert again.snapshot.holds == {
            key: replace(hold, pod="", absent_since=None) for key, hold in known.holds.items()
        }
        assert again.snapshot.settings == known.settings


# R10


def test_a_device_is_recorded_as_what_it_is(book: Ledger, path: str) -> None:
    """Moves keep it, a restart too; an unknown device has none."""
    book.do(ledger.identify({(R, "a"): "boot:1 n1", (R, "z"): "boot:1 n2", (R, "b"): ""}))
    to_dra(book, "a")
    book.close()
    with Ledger.open(path) as again:
        assert {name: record.identity for name, record in again.snapshot.of(R).items()} == {"a": "boot:1 n1", "b": ""}


@pytest.mark.parametrize("side", list(Side))
def test_a_held_device_is_recorded_as_what_its_holder_got(book: Ledger, side: Side) -> None:
    """Until nobody holds it, or the node was booted since."""
    if side is Side.PLUGIN:
        book.do(ledger.grant(R, {"a": "a"}, T0))
    else:
        to_dra(book, "a")
        book.do(ledger.prepare(claim("1", "a")))
    for identity, after in (("boot:1 n1", "n1"), ("boot:1 n2", "n1"), ("boot:2 n3", "n3"), ("boot:2 n4", "n3")):
        book.do(ledger.identify({(R, "a"): identity}))
        assert book.snapshot.device(R, "a").identity.endswith(after)
    if side is Side.PLUGIN:
        book.do(ledger.observe(R, seen(book, 1.0), T0))
        book.do(ledger.observe(R, seen(book, 100.0), T0))
    else:
        book.do(ledger.unprepare(D, "1"))
    book.do(ledger.identify({(R, "a"): "boot:2 n4"}))
    assert book.snapshot.device(R, "a").identity == "boot:2 n4"
