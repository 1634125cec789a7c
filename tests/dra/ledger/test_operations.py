"""The ledger's operations and the rules that they obey."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra_bridge import ledger
from dra_bridge.ledger import (
    Claim,
    Evidence,
    KubeletEvidence,
    KubeletSnapshot,
    Ledger,
    ObservedAllocation,
    Refused,
    Side,
    State,
)
from dra_bridge.ledger.operations import Granted, identify
from tests.dra.ledger.samples import T0, D, R, claim, cluster, held_by, kubelet, seen, state, to_dra

# R1


def test_allocate_is_granted_on_the_plugins_side_and_recorded(book: Ledger, path: str) -> None:
    """A grant is in the file when it is answered."""
    assert isinstance(book.do(ledger.grant(R, {"a": "a"}, T0)), Granted)
    book.close()
    with Ledger(path) as again:
        assert [hold.device_id for hold in again.snapshot.allocations.values()] == ["a"]
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
        book.do(
            ledger.reconcile_evidence(R, Evidence({"a": ObservedAllocation("a", "default/p")}), ["a"], Side.PLUGIN, T0)
        )
    refusal = book.do(ledger.grant(R, {"b": "b", "a": "a"}, T0))
    assert isinstance(refusal, Refused)
    assert (refusal.device, refusal.state, refusal.since) == ("a", to, T0)
    assert "'a'" in refusal.message
    assert to.text in refusal.message
    assert "2023-11-14T22:13:20Z" in refusal.message
    assert not book.snapshot.allocations_on(R, ["b"]), "all or none"


def test_a_unit_given_again_is_a_new_grant(book: Ledger) -> None:
    """The kubelet takes devices back without a word and gives them to the next pod."""
    first = book.do(ledger.grant(R, {"a": "a"}, T0))
    second = book.do(ledger.grant(R, {"a": "a"}, T0 + 1))
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert second.sequence > first.sequence
    assert len(book.snapshot.allocations) == 1


def test_replicas_hold_one_device_together(book: Ledger) -> None:
    """The device moves as a whole: it is held until its last replica is free."""
    book.do(ledger.grant(R, {"a::0": "a"}, T0))
    book.do(ledger.grant(R, {"a::1": "a"}, T0))
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    held = {"a::1": ObservedAllocation("a", "default/two", holders=frozenset({("two", "main")}))}
    snapshot = KubeletSnapshot(book.snapshot.sequence, 3.0, True, held)
    book.do(ledger.observe(R, snapshot, T0))
    book.do(ledger.observe(R, replace(snapshot, at=63.0), T0))
    assert list(book.snapshot.allocations) == [(R, "a::1")]
    assert book.do(ledger.commit_to_dra(R, ["a"], kubelet(book, held=held), T0)).waiting == {"a": "pod default/two"}


# R2


def test_a_claim_is_prepared_once_and_answered_the_same_ever_after(book: Ledger, path: str) -> None:
    """Also after a restart, also if the driver asks with another result."""
    to_dra(book)
    first = book.do(ledger.prepare(claim("1", "a", result="first")))
    assert isinstance(first, Claim)
    book.close()
    with Ledger(path) as again:
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
    with Ledger(path) as again:
        assert not again.snapshot.claims


def test_a_durable_reservation_survives_and_can_be_completed(book: Ledger, path: str) -> None:
    """A driver whose hooks leave traces can undo them after a crash."""
    to_dra(book)
    book.do(ledger.reserve(claim("1", "a"), durable=False))
    book.do(ledger.reserve(claim("1", "a"), durable=True))
    book.close()
    with Ledger(path) as again:
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
        "pod default/p": replace(
            evidence, snapshot=replace(snapshot, held={"a": ObservedAllocation("a", "default/p")})
        ),
        "pod default/p (processes": replace(
            evidence,
            snapshot=replace(
                snapshot, held={"a": ObservedAllocation("a", "default/p", reason="processes of its pod run")}
            ),
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
    hold = book.snapshot.allocations[R, "a"]
    assert (hold.pod, hold.holders, hold.pending) == ("default/u1", frozenset({("u1", "main")}), False)
    assert book.do(ledger.observe(R, seen(book), T0)).released == ("a",)


def test_a_snapshot_from_before_a_grant_says_nothing_of_its_pod(book: Ledger) -> None:
    """It shows the pod before, which had the device, too; the new one is still to be seen."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    before = seen(book, a="former/main")
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, before, T0))
    assert book.snapshot.allocations[R, "a"].holders == frozenset()
    assert book.do(ledger.observe(R, seen(book, 2.0), T0)).released == ()


def test_a_grant_to_the_next_pod_waits_though_the_former_pod_has_ended(book: Ledger) -> None:
    """Its own container is still to be named; that the former one is named no more proves nothing of it."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/main"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    for snapshot in (seen(book, 2.0, a="u1/main"), seen(book, 3.0)):
        assert book.do(ledger.observe(R, snapshot, T0)).released == ()
    hold = book.snapshot.allocations[R, "a"]
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
    assert book.snapshot.allocations[R, "a"].holders == {("u2", "main")}
    book.do(ledger.begin_move(R, ["a"], Side.DRA, T0))
    done = book.do(ledger.commit_to_dra(R, ["a"], kubelet(book, held={"a": held_by("a", "u2/main")}), T0))
    assert done.waiting == {"a": "pod default/u2"}


def test_init_and_app_container_of_a_pod_hold_one_id_one_after_the_other(book: Ledger) -> None:
    """The kubelet calls Allocate for each; the id is free when the checkpoint names neither."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/init"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 2.0, a="u1/init u1/main"), T0))
    assert not book.snapshot.allocations[R, "a"].pending
    assert book.do(ledger.observe(R, seen(book, 3.0, a="u1/main"), T0)).released == ()
    assert book.do(ledger.observe(R, seen(book, 4.0), T0)).released == ("a",)


def test_a_grant_whose_pod_was_refused_is_over_while_an_old_holder_stays(book: Ledger) -> None:
    """R7 ends the grant only; who held the id before holds it for as long as the witnesses say so."""
    book.do(ledger.grant(R, {"a": "a"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/main"), T0))
    book.do(ledger.grant(R, {"a": "a"}, T0))
    for at in (2.0, 12.0):
        assert book.do(ledger.observe(R, seen(book, at, a="u1/main"), T0)).released == ()
    hold = book.snapshot.allocations[R, "a"]
    assert (hold.holders, hold.pending) == (frozenset({("u1", "main")}), False)
    assert book.do(ledger.observe(R, seen(book, 13.0), T0)).released == ("a",)


def test_holders_and_whether_a_grant_waits_survive_a_restart(book: Ledger, path: str) -> None:
    """The next agent goes on with (pod UID, container) of each holder, which the witnesses are asked about."""
    book.do(ledger.grant(R, {"a": "a", "b": "b"}, T0))
    book.do(ledger.observe(R, seen(book, 1.0, a="u1/init u1/main"), T0))
    book.close()
    with Ledger(path) as again:
        holds = {unit: (hold.holders, hold.pending) for (_, unit), hold in again.snapshot.allocations.items()}
        assert holds == {"a": ({("u1", "init"), ("u1", "main")}, False), "b": (frozenset(), True)}


def test_a_pod_that_the_ledger_does_not_know_becomes_a_holder_or_an_alarm(book: Ledger) -> None:
    """A ledger younger than its pods learns of them; on the DRA side they are a contradiction."""
    to_dra(book, "b")
    found = book.do(ledger.observe(R, seen(book, a="u1/main", b="u2/main"), T0))
    assert (found.found, found.quarantined) == (("a", "b"), ("b",))
    assert book.snapshot.allocations[R, "a"].holders == {("u1", "main")}
    assert not book.snapshot.allocations[R, "a"].pending
    assert state(book, "b") is State.QUARANTINED
    assert "default/u2" in book.snapshot.device(R, "b").reason


def test_a_move_turns_round_and_is_cancelled(book: Ledger) -> None:
    """Before its commit nothing is final."""
    for to, begun in ((Side.DRA, State.TO_DRA), (Side.PLUGIN, State.PLUGIN)):
        assert book.do(ledger.begin_move(R, ["a"], to, T0)) == {"a": begun}
    to_dra(book)
    assert book.do(ledger.begin_move(R, ["a"], Side.PLUGIN, T0)) == {"a": State.TO_PLUGIN}
    assert book.do(ledger.begin_move(R, ["a"], Side.DRA, T0)) == {"a": State.DRA}
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


def test_settings_survive(book: Ledger, path: str) -> None:
    """A value is there after a restart, until it is replaced or dropped; the same value costs no write."""
    book.do(ledger.set_setting("share", R, "all"))
    sequence = book.snapshot.sequence
    book.do(ledger.set_setting("share", R, "all"))
    assert book.snapshot.sequence == sequence
    assert book.snapshot.setting("share", "other") is None
    book.close()
    with Ledger(path) as again:
        assert again.snapshot.setting("share", R) == "all"
        again.do(ledger.set_setting("share", R, "none"))
        again.do(ledger.set_setting("share", "x", "1"))
        again.do(ledger.set_setting("share", "x", None))
    with Ledger(path) as again:
        assert {key: one.value for key, one in again.snapshot.settings.items()} == {("share", R): "none"}


# R10


def test_a_device_is_recorded_as_what_it_is(book: Ledger, path: str) -> None:
    """Moves keep it, a restart too; an unknown device has none."""
    book.do(identify({(R, "a"): "boot:1 n1", (R, "z"): "boot:1 n2", (R, "b"): ""}))
    to_dra(book, "a")
    book.close()
    with Ledger(path) as again:
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
        book.do(identify({(R, "a"): identity}))
        assert book.snapshot.device(R, "a").identity.endswith(after)
    if side is Side.PLUGIN:
        book.do(ledger.observe(R, seen(book, 1.0), T0))
        book.do(ledger.observe(R, seen(book, 100.0), T0))
    else:
        book.do(ledger.unprepare(D, "1"))
    book.do(identify({(R, "a"): "boot:2 n4"}))
    assert book.snapshot.device(R, "a").identity == "boot:2 n4"
