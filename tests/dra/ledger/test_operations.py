"""The operations of the ledger, which records devices and their holders, and the rules of these operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from deviceplugin.register import identification, operations
from deviceplugin.register.question import part_of, takes_recorded, uses
from deviceplugin.register.records import (
    UNKNOWN,
    WHOLE,
    Amount,
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    FormerGrant,
    Operation,
    RegisterSnapshot,
    Side,
    State,
)
from deviceplugin.register.rules import (
    Evidence,
    KubeletEvidence,
    MoveWait,
    ObservedAllocation,
    Refused,
)
from tests.dra.ledger.samples import (
    T0,
    VIEW,
    D,
    DirectLedger,
    R,
    adopt,
    claim,
    cluster,
    grant,
    kubelet,
    prepare,
    reserve,
    seen,
    state,
    to_dra,
)
from tests.identities import seen_as

HALF = Amount("1/2")
N1, N2 = seen_as("1", "char:240:1"), seen_as("1", "char:240:2")
OTHER = "other.example.com"
Ask = Callable[..., Operation[Any]]

# Allocate


@pytest.mark.parametrize("to", [State.DRA, State.TO_PLUGIN, State.QUARANTINED])
def test_allocate_is_refused_elsewhere_and_says_which_device_where_since_when(store: DirectLedger, to: State) -> None:
    """Allocate fails as a whole if a device is not for limits; the refusal has the device, its state and since when."""
    to_dra(store)
    if to is State.TO_PLUGIN:
        store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0))
    if to is State.QUARANTINED:
        store.do(
            operations.reconcile_evidence(
                R, Evidence({"a": ObservedAllocation("a", "default/p")}), ["a"], Side.PLUGIN, T0
            )
        )
    refusal = store.do(grant(R, {"b": "b", "a": "a"}, T0))
    assert isinstance(refusal, Refused)
    assert (refusal.record.device, refusal.record.state, refusal.record.since) == ("a", to, T0)
    assert refusal.moving is (to is State.TO_PLUGIN)
    assert "'a'" in refusal.message
    assert to.text in refusal.message
    assert "2023-11-14T22:13:20Z" in refusal.message
    assert not store.snapshot.allocations_on(R, ["b"]), "all or none"


# Prepare


@pytest.mark.parametrize(("plugin", "dra"), [(True, True), (True, False), (False, True)])
def test_a_claim_pulls_nothing_beside_limits_of_both_sides(store: DirectLedger, plugin: bool, dra: bool) -> None:
    """While pods by limits have devices of plugin and DRA, a claim begins no move: a kubelet restart would end pods."""
    to_dra(store, "b")
    by_limits = claim("2", "b")
    one = by_limits.devices[0]
    by_limits = replace(by_limits, devices=(ClaimDevice(one.resource, one.device, limits=dra),))
    assert isinstance(store.do(prepare(by_limits)), Claim)
    if plugin:
        store.do(grant(R, {"c": "c"}, T0))
    refusal = store.do(reserve(claim("1", "a"), durable=True, move_idle=True))
    assert isinstance(refusal, Refused)
    assert (refusal.unmoved, refusal.moving) == (R if plugin and dra else "", not (plugin and dra))
    assert ("a kubelet restart would end some" in refusal.message) is (plugin and dra)
    assert state(store) is (State.PLUGIN if plugin and dra else State.TO_DRA)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("of_claim", [True, False])
def test_a_claim_pulls_all_of_its_devices_or_none(store: DirectLedger, of_claim: bool, both: bool) -> None:
    """If one of a claim's devices, or of the devices that move with them, may not move to DRA, none of them moves.

    The refusal names the resource whose pods have devices by limits through both plugin and DRA.
    """
    other = "example.com/other"
    store.do(adopt(other, ["c", "x", "y"], Side.PLUGIN, T0))
    store.do(operations.begin_move(other, ["y"], Side.DRA, T0))
    evidence = KubeletEvidence(store.snapshot.sequence, {"y": 1.0}, seen(store, 2.0))
    assert store.do(operations.commit_to_dra(other, ["y"], evidence, T0)).devices == ("y",)
    by_limits = replace(claim("2"), devices=(ClaimDevice(other, "y", limits=True),))
    assert isinstance(store.do(prepare(by_limits)), Claim)
    if both:
        store.do(grant(other, {"x": "x"}))
    asked = claim("1", "a")
    if of_claim:
        asked = replace(asked, devices=(*asked.devices, ClaimDevice(other, "c")))
    along = () if of_claim else ((R, "a"), (other, "c"))
    refusal = store.do(reserve(asked, durable=True, move_idle=True, along=along))
    assert isinstance(refusal, Refused)
    assert (refusal.moving, refusal.unmoved) == (not both, other if both else "")
    assert (f"it stays there while pods have devices of {other} by limits on both sides" in refusal.message) is both
    assert state(store) is (State.PLUGIN if both else State.TO_DRA)
    assert store.snapshot.device(other, "c").state is (State.TO_DRA if of_claim and not both else State.PLUGIN)


def test_a_durable_reservation_survives_and_can_be_completed(store: DirectLedger, path: str) -> None:
    """A claim's reservation on disk survives a restart.

    The claim can then be prepared, and be set back to a reservation.
    """
    to_dra(store)
    store.do(reserve(claim("1", "a"), durable=False))
    store.do(reserve(claim("1", "a"), durable=True))
    store.close()
    with DirectLedger(path) as again:
        assert again.snapshot.claims[D, "1"].result is None
        done = again.do(prepare(claim("1", "a")))
        assert isinstance(done, Claim)
        assert done.result == "ready"
        reopened = again.do(operations.reopen(D, "1"))
        assert reopened is not None
        assert reopened.result is None


# Commits, and grants without a pod


def broken(evidence: KubeletEvidence) -> dict[str, KubeletEvidence]:
    snapshot = evidence.snapshot
    return {
        "after the move": replace(evidence, sequence=0),
        "show it Unhealthy": replace(evidence, shown={}),
        "the kubelet to acknowledge": replace(evidence, snapshot=replace(snapshot, registered=frozenset({"a"}))),
        "to acknowledge": replace(evidence, snapshot=replace(snapshot, at=0.5)),
        "a checkpoint": replace(evidence, snapshot=replace(snapshot, current=False)),
        "(the disk is full)": replace(evidence, snapshot=replace(snapshot, current=False, problem="the disk is full")),
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
        "(not known: no cgroups": replace(
            evidence,
            snapshot=replace(
                snapshot, held={"a": ObservedAllocation("a", "default/p", sure=False, reason="not known: no cgroups")}
            ),
        ),
    }


def test_a_move_to_dra_ends_only_with_all_of_its_evidence_in_order(store: DirectLedger) -> None:
    """A move to DRA is committed only with proof that no pod holds the device; else the answer says what is missing."""
    store.do(operations.begin_move(R, ["a"], Side.DRA, T0))
    for what, evidence in broken(kubelet(store)).items():
        done = store.do(operations.commit_to_dra(R, ["a"], evidence, T0))
        assert done.devices == (), what
        assert what in done.waiting["a"].text
        # Only a wait for a known holder may take long.
        assert done.waiting["a"].on_holder is what.startswith("pod default/p")
    assert store.do(operations.commit_to_dra(R, ["a", "b"], kubelet(store), T0)).devices == ("a",)
    assert (state(store), state(store, "b")) == (State.DRA, State.PLUGIN)


def test_a_move_to_the_plugin_ends_only_with_all_of_its_evidence(store: DirectLedger) -> None:
    """A move to the plugin ends once the slice has lost the device, and neither ledger nor a later list has a claim."""
    to_dra(store)
    store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0))
    good = cluster(store)
    for what, evidence in {
        "after the move": replace(good, sequence=0),
        "accept the slice": replace(good, withdrawn={}),
        "a list": replace(good, listed_at=0.5),
        "claim default/x": replace(good, allocated={"a": "default/x"}),
    }.items():
        waits = store.do(operations.commit_to_plugin(R, ["a"], evidence, T0)).waiting["a"]
        assert what in waits.text
        assert waits.on_holder is what.startswith("claim ")
    store.do(reserve(claim("1", "a"), durable=False))
    done = store.do(operations.commit_to_plugin(R, ["a"], good, T0))
    assert done.waiting == {"a": MoveWait.for_claim("default/claim-1")}
    store.do(operations.unprepare(D, "1"))
    assert store.do(operations.commit_to_plugin(R, ["a"], good, T0)).devices == ("a",)


def test_a_move_turns_round_and_is_cancelled(store: DirectLedger) -> None:
    """A move of a device, to DRA or to the plugin, can be reversed until it is committed."""
    for to, begun in ((Side.DRA, State.TO_DRA), (Side.PLUGIN, State.PLUGIN)):
        assert store.do(operations.begin_move(R, ["a"], to, T0)) == {"a": begun}
    to_dra(store)
    assert store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0)) == {"a": State.TO_PLUGIN}
    assert store.do(operations.begin_move(R, ["a"], Side.DRA, T0)) == {"a": State.DRA}
    assert store.do(operations.begin_move(R, ["a"], Side.DRA, T0)) == {}


def test_devices_are_adopted_once_and_forgotten_when_free(store: DirectLedger) -> None:
    """A known device keeps its side (plugin or DRA) when the default side changes; only free devices are forgotten."""
    assert store.do(adopt(R, ["a", "c"], Side.DRA, T0)).changed == {"c": State.DRA}
    assert (state(store, "a"), state(store, "c")) == (State.PLUGIN, State.DRA)
    store.do(grant(R, {"a": "a"}, T0))
    assert store.do(operations.forget(R, ["a", "b", "x"])) == ("b",)
    store.do(grant(R, {"d": "d"}, T0))
    store.do(adopt(R, ["d"], Side.DRA, T0))
    assert state(store, "d") is State.PLUGIN, "somebody holds it there"


def test_a_setting_is_written_once(store: DirectLedger) -> None:
    """A setting that has its value already is not written; other settings are not set."""
    store.do(operations.set_setting("share", R, "all"))
    sequence = store.snapshot.sequence
    store.do(operations.set_setting("share", R, "all"))
    assert store.snapshot.sequence == sequence
    assert (store.snapshot.setting("share", R), store.snapshot.setting("share", "other")) == ("all", None)


# A device has one driver


def by(driver: str, one: Claim) -> Claim:
    """Return this claim as a claim of another driver."""
    return replace(one, driver=driver)


@pytest.mark.parametrize("ask", [prepare, partial(reserve, durable=True)])
def test_a_claim_gets_devices_of_its_own_driver_alone(store: DirectLedger, path: str, ask: Ask) -> None:
    """A claim of another driver is refused and begins no move, also after a restart; the refusal names the driver."""
    store.do(operations.begin_move(R, ["a"], Side.DRA, T0, driver=D))
    refusal = store.do(ask(by(OTHER, claim("1", "a")), move_idle=True))
    assert isinstance(refusal, Refused)
    assert not refusal.moving, "it does not come to that driver"
    assert store.do(operations.commit_to_dra(R, ["a"], kubelet(store), T0)).devices == ("a",)
    store.close()
    with DirectLedger(path) as again:
        refusal = again.do(ask(by(OTHER, claim("1", "a")), move_idle=True))
        assert isinstance(refusal, Refused)
        assert f"(driver {D})" in refusal.message
        assert state(again) is State.DRA
        assert isinstance(again.do(ask(claim("1", "a"))), Claim)


def test_a_device_goes_to_another_driver_by_way_of_the_plugins_side(store: DirectLedger) -> None:
    """A device of one DRA driver moves to the plugin before it can move to another driver."""
    store.do(operations.begin_move(R, ["a"], Side.DRA, T0, driver=D))
    assert store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0)) == {"a": State.PLUGIN}
    store.do(operations.begin_move(R, ["a"], Side.DRA, T0, driver=D))
    store.do(operations.commit_to_dra(R, ["a"], kubelet(store), T0))
    assert store.do(operations.begin_move(R, ["a"], Side.PLUGIN, T0)) == {"a": State.TO_PLUGIN}
    assert store.do(operations.begin_move(R, ["a"], Side.DRA, T0, driver=OTHER)) == {}, "it turns round for its own"
    assert store.snapshot.device(R, "a").driver == D
    store.do(operations.commit_to_plugin(R, ["a"], cluster(store), T0))
    assert store.snapshot.device(R, "a").driver == ""
    assert store.do(operations.begin_move(R, ["a"], Side.DRA, T0, driver=OTHER)) == {"a": State.TO_DRA}
    assert store.snapshot.device(R, "a").driver == OTHER


# The identities and the granted amounts of devices


def test_what_former_holders_have_survives_until_they_end(store: DirectLedger, path: str) -> None:
    """After new grants of a device, each former holder's device number and part stay recorded until it ends."""
    part, first, second = Amount("1/2", (("memory", "bytes", "5"),)), ("u1", "main"), ("u2", "main")
    numbers = [seen_as("1", "hardware:pci:0#tty", f"char:240:{number}") for number in (1, 2, 3)]
    store.do(grant(R, {"a": "a"}, amount=part, identity=numbers[0]))
    store.do(operations.observe(R, seen(store, a="u1/main"), T0))
    store.do(grant(R, {"a": "a"}, identity=numbers[1]))
    store.do(operations.observe(R, seen(store, a="u1/main u2/main"), T0))
    store.do(grant(R, {"a": "a"}, identity=numbers[2]))
    store.close()
    with DirectLedger(path) as again:
        record = again.snapshot.allocations[R, "a"]
        formers = (
            FormerGrant(frozenset({first}), numbers[0], part),
            FormerGrant(frozenset({first, second}), numbers[1], WHOLE),
        )
        assert (record.identity, record.amount, record.former) == (numbers[2], WHOLE, formers)
        tokens = [token for identity in numbers for token in identity.tokens]
        assert again.snapshot.index.keys() == {(R, "a"), *tokens, ("memory", "bytes")}
        for now, left in (("u1/main u2/main u3/main", formers), ("u2/main u3/main", formers[1:]), ("u3/main", ())):
            again.do(operations.observe(R, seen(again, a=now), T0))
            assert again.snapshot.allocations[R, "a"].former == left
        assert again.snapshot.index.keys() == {(R, "a"), *numbers[2].tokens}


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        (HALF, Amount("1/4"), HALF),
        (Amount("1/4"), HALF, HALF),
        (WHOLE, HALF, WHOLE),
        (UNKNOWN, HALF, UNKNOWN),
        (HALF, UNKNOWN, UNKNOWN),
        (Amount("1", (("m", "x", "9Mi"),)), Amount("1", (("m", "x", "5Gi"),)), Amount("1", (("m", "x", "5Gi"),))),
        (
            Amount("1", (("m", "x", "10"), ("m", "y", "1"))),
            Amount("1/2", (("m", "x", "9"), ("m", "z", "300m"))),
            Amount("1", (("m", "x", "10"), ("m", "y", "1"), ("m", "z", "300m"))),
        ),
    ],
)
def test_an_id_given_again_counts_as_its_larger_amount(
    store: DirectLedger, before: Amount, now: Amount, after: Amount
) -> None:
    """A plugin id that is granted again counts with the larger of both amounts until its earlier holder has ended."""
    store.do(grant(R, {"a": "a"}, amount=before, identity=N1))
    store.do(operations.observe(R, seen(store, a="u1/main"), T0))
    store.do(grant(R, {"a": "a"}, amount=now))
    record, (use,) = store.snapshot.allocations[R, "a"], uses(store.snapshot, [(R, "a")], VIEW)
    assert (record.amount, record.identity, record.holders) == (now, N1, frozenset({("u1", "main")}))
    assert (use.part, use.takes) == (part_of(after), takes_recorded(after, R))
    store.do(operations.observe(R, seen(store, a="u2/main"), T0))
    (use,) = uses(store.snapshot, [(R, "a")], VIEW)
    assert (use.part, use.takes) == (part_of(now), takes_recorded(now, R))


def test_a_prepared_claim_reaches_the_nodes_in_its_cdi_file(store: DirectLedger) -> None:
    """When a device gets a new device number, a reserved claim gets it, too; a prepared claim keeps the old number."""
    to_dra(store, "a", "b")
    store.do(reserve(claim("1", "a"), durable=True))
    store.do(prepare(claim("2", "b")))
    for number in ("1", "2"):
        seen = {(R, name): f"char:24{major}:{number}" for major, name in enumerate("ab")}
        now = {key: seen_as("1", f"hardware:{key[1]}", node) for key, node in seen.items()}
        store.do(identification.adopt(now, "1"))
    (reserved,), (prepared,) = (store.snapshot.claims[D, uid].devices for uid in ("1", "2"))
    assert reserved.identity.reached == {"char:240:2"}
    assert prepared.identity.tokens == {"hardware:b", "char:241:1"}
    assert not prepared.identity.reached


def test_a_reservation_that_was_durable_stays_so(store: DirectLedger, path: str) -> None:
    """A claim's reservation on disk stays there if the claim is reserved again in memory, also with more devices."""
    to_dra(store, "a", "b")
    store.do(reserve(claim("1", "a"), durable=True))
    for again in (claim("1", "a"), claim("1", "a", "b")):
        answer = store.do(reserve(again, durable=False))
        assert isinstance(answer, Claim)
        assert answer.durable
    store.close()
    with DirectLedger(path) as opened:
        assert opened.snapshot.claims[D, "1"].held == {(R, "a"), (R, "b")}


@pytest.mark.parametrize(
    ("states", "serves"),
    [
        ((), True),
        ((State.DRA, State.TO_PLUGIN), False),
        ((State.DRA, State.PLUGIN), True),
        ((State.TO_DRA,), True),
        ((State.DRA, State.QUARANTINED), True),
    ],
)
def test_the_plugin_serves_pods_of_the_states_in_which_they_may_have_devices(
    states: tuple[State, ...], serves: bool
) -> None:
    """The plugin serves a resource to pods unless all its devices are for claims or are still to return from claims."""
    changes = [Change("devices", (R, str(n)), DeviceRecord(R, str(n), state, T0)) for n, state in enumerate(states)]
    assert RegisterSnapshot().with_changes(changes, 1).serves_pods(R) is serves
