"""Who still holds which device: what each kind of evidence proves, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.identity import UNIDENTIFIED
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion, shows_present
from deviceplugin.kubelet.holders import (
    HolderEvidence,
    HolderSnapshot,
    HoldReason,
    PendingGrants,
    holders,
    needs_request,
    pending_grants,
    possible_holders,
)
from deviceplugin.kubelet.pod_names import PodLogs
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import WHOLE, Allocation, AllocationRecord

R = "example.com/r"
A = Allocation("u1", "main", R, "a")
B = Allocation("u2", "main", R, "a")
RUNS = PodProcesses(frozenset({"u1"}))
ENDED = PodProcesses(frozenset())
BLIND = PodProcesses()
DIRECTORY = PodProcesses(None, frozenset({"u1"}))
NO_DIRECTORY = PodProcesses(None, frozenset())


def seen(*named: Allocation, current: bool = True, pods: PodProcesses = ENDED, problem: str = "") -> HolderEvidence:
    return HolderEvidence([CheckpointVersion(frozenset(named), {R: frozenset({"a"})})], current, pods, problem)


def grants(*named: Allocation, since: float, holders: frozenset[tuple[str, str]] = frozenset()) -> PendingGrants:
    """The pending grants of id a, granted at 2.0, in a checkpoint whose AllocateResponses are of the time `since`."""
    record = AllocationRecord(R, "a", "a", 2.0, 1, holders)
    answer = Wanted((R, "a"), UNIDENTIFIED, WHOLE, since)
    return pending_grants(
        [CheckpointVersion(frozenset(named), {})], {(R, "a"): record}, dict.fromkeys(named, ("", answer))
    )


def test_a_response_in_the_checkpoint_shows_the_container_of_a_grant() -> None:
    """Only the response of the last grant does, and only while the grant is pending."""
    assert grants(A, since=2.0) == (frozenset({A}), frozenset())
    assert grants(A, since=1.0) == grants(since=2.0) == (frozenset(), frozenset())
    known = {(R, "a"): AllocationRecord(R, "a", "a", 2.0, 1, pending=False)}
    answer = Wanted((R, "a"), UNIDENTIFIED, WHOLE, 2.0)
    assert not pending_grants([CheckpointVersion(frozenset({A}), {})], known, {A: ("", answer)}).begun


def test_a_later_grant_in_the_checkpoint_shows_the_end_of_the_former_holder() -> None:
    """The kubelet composed the checkpoint after the grant. While the former holder's processes run, it stays held."""
    found = grants(B, since=2.0, holders=frozenset({A[:2]}))
    for pods, held in ((ENDED, {B}), (RUNS, {A, B}), (BLIND, {A, B})):
        evidence = replace(seen(B, current=False, pods=pods), begun=found.begun, replaced=found.replaced)
        now = holders([A], evidence)
        assert now.held.keys() == held
        assert now.held[B] == HoldReason(True, True, "the kubelet's checkpoint names it", True)
    both = grants(A, B, since=2.0, holders=frozenset({A[:2]}))
    evidence = replace(seen(A, B, current=False), begun=both.begun, replaced=both.replaced)
    assert holders([A], evidence).held.keys() == {A, B}


POSSIBLE = {("u1", "init"), ("u1", "main"), ("u3", "")}


@pytest.mark.parametrize(
    ("since", "possible"),
    [
        (None, POSSIBLE),  # no allocation of the id is known
        (1.0, POSSIBLE),  # the checkpoint is older than the grant
        (5.0, set()),
        (0.0, set()),  # of an agent that wrote no times
    ],
)
def test_the_pods_that_may_have_a_grant_whose_checkpoint_was_lost(
    since: float | None, possible: set[tuple[str, str]]
) -> None:
    """These are the pods that began since the grant, unless a checkpoint names the grant's container."""
    record = AllocationRecord(R, "a", "a", 5.0, 1)
    answer = Wanted((R, "a"), UNIDENTIFIED, WHOLE, since or 0.0)
    named = [] if since is None else [B]
    pods = {"u1": PodLogs(4.5, ("init", "main")), "u2": PodLogs(3.0, ("main",)), "u3": PodLogs()}
    found = possible_holders([record], named, lambda _: answer, pods)
    assert found == {Allocation(*container, R, "a") for container in possible}
    assert not possible_holders([record], [B], lambda _: None, pods), "an adopted plugin's response has no time"


MISSING = HolderEvidence((), False, ENDED, "kubelet_internal_checkpoint: No such file or directory")


@pytest.mark.parametrize(
    ("known", "evidence", "holding"),
    [
        # The checkpoint names it: held, whatever else is seen. It is certain if current or if the pod runs.
        ([], seen(A, current=True), HoldReason(True, True, "the kubelet's checkpoint names it")),
        ([], seen(A, current=False), HoldReason(True, False, "the kubelet's checkpoint names it")),
        ([], seen(A, current=False, pods=RUNS), HoldReason(True, True, "the kubelet's checkpoint names it")),
        # A pod that was admitted and not started yet has neither a cgroup nor a directory (network not ready).
        ([A], seen(A, current=True, pods=NO_DIRECTORY), HoldReason(True, True, "the kubelet's checkpoint names it")),
        # A current checkpoint does not name it and its pod's cgroup is gone.
        ([A], seen(current=True), None),
        ([A], seen(current=True, pods=NO_DIRECTORY), None),
        # A pod that was deleted by force runs on.
        (
            [A],
            seen(current=True, pods=RUNS),
            HoldReason(False, True, "the kubelet's checkpoint does not name it, but processes of its pod run"),
        ),
        (
            [A],
            seen(current=True, pods=DIRECTORY),
            HoldReason(
                False,
                True,
                "the kubelet's checkpoint does not name it, but cgroups are not visible, "
                "and its pod's directory exists",
            ),
        ),
        (
            [A],
            seen(current=True, pods=BLIND),
            HoldReason(
                False,
                True,
                "the kubelet's checkpoint does not name it, but neither cgroups nor pod directories are visible",
            ),
        ),
        # A checkpoint that is not current, or missing, proves nothing by what it does not name.
        (
            [A],
            seen(current=False, problem="not written since"),
            HoldReason(False, False, "not known: not written since"),
        ),
        # Its processes are reason enough, whether a newer one was asked for or not: the reason does not alternate.
        (
            [A],
            seen(current=False, pods=RUNS, problem="not written since"),
            HoldReason(False, True, "the kubelet's checkpoint does not name it, but processes of its pod run"),
        ),
        ([A], MISSING, HoldReason(False, False, f"not known: {MISSING.problem}")),
    ],
)
def test_whether_an_allocation_counts_as_held(
    known: list[Allocation], evidence: HolderEvidence, holding: HoldReason | None
) -> None:
    """Unknown counts as held, and says why."""
    assert holders(known, evidence, 1.0).held.get(A) == holding


def test_a_holder_is_a_pod_and_a_container_and_an_id() -> None:
    """Another pod's container of the same name on the same id is another holder."""
    now = holders([A], seen(B, current=True, pods=PodProcesses(frozenset({"u2"}))))
    assert set(now.held) == {B}
    both = holders([A], seen(B, current=True, pods=PodProcesses(frozenset({"u1", "u2"}))))
    assert set(both.held) == {A, B}
    alone = holders([A], seen(current=True, pods=RUNS))
    assert alone.unnamed(R) == {"a"}
    assert alone.unnamed("example.com/other") == frozenset()


def test_an_allocation_that_is_over_stays_over() -> None:
    """What ended is forgotten: the next scan starts from what was held in this one."""
    held = holders([], seen(A, pods=RUNS)).held
    held = holders(held, seen()).held
    assert holders(held, seen(current=False)).held == {}


def test_what_a_scan_knows_of_the_checkpoint() -> None:
    """A snapshot is current only with a checkpoint that was written after the request."""
    now = holders([], seen(A, current=True), 7.0)
    assert (now.at, now.current, now.registered, now.problem) == (7.0, True, {R: frozenset({"a"})}, "")
    assert now.of(R) == {"a": {A: now.held[A]}}
    assert now.of("example.com/other") == {}
    missing = holders([A], HolderEvidence((), True, ENDED, "why"))
    assert (missing.current, missing.registered, missing.problem) == (False, None, "why")
    assert not HolderSnapshot().current


@pytest.mark.parametrize(
    ("known", "evidence", "asks"),
    [
        ([A], seen(A, current=False, pods=RUNS), False),
        ([A], seen(A, current=False), True),
        ([A], seen(current=False, pods=RUNS), True),
        ([A], MISSING, True),
        ([], seen(current=False), False),
    ],
)
def test_of_which_allocations_a_newer_checkpoint_is_asked_for(
    known: list[Allocation], evidence: HolderEvidence, asks: bool
) -> None:
    """Not of one that is named and whose pod runs: nothing about it can change by a write."""
    held = holders(known, evidence).held
    assert needs_request(held, evidence.pods) == (frozenset({A}) if asks else frozenset())


def test_an_allocation_that_one_of_the_checkpoints_names_is_held() -> None:
    """Any of them may be the newest; it is certain only if all name it, since an older one may name an ended pod."""
    files = [
        CheckpointVersion(frozenset({A}), {R: frozenset({"a"})}),
        CheckpointVersion(frozenset({A, B}), {R: frozenset({"b"})}),
    ]
    for order in (files, files[::-1]):
        now = holders([A, B], HolderEvidence(order, True, ENDED))
        assert {one: holding.certain for one, holding in now.held.items()} == {A: True, B: False}
        assert now.registered == {R: frozenset("ab")}


@given(st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.sampled_from("abcd"))), st.booleans())
def test_more_checkpoints_than_may_be_late_show_the_present(streams: dict[str, frozenset[str]], status: bool) -> None:
    """Each resource's stream has one late write at most, which names that resource, and the node's status has one."""
    late = [
        CheckpointVersion(frozenset(), dict.fromkeys(others | {name}, frozenset())) for name, others in streams.items()
    ]
    late += [CheckpointVersion(frozenset(), {})] * status
    for count in range(len(late) + 1):
        assert not shows_present(late[:count])
    present = CheckpointVersion(frozenset(), dict.fromkeys("abcd", frozenset()))
    assert not shows_present([present] * 5)
    assert shows_present([present] * 6)


_allocations = st.sets(
    st.builds(
        Allocation, st.sampled_from(["u1", "u2"]), st.sampled_from(["main", "init"]), st.just(R), st.sampled_from("ab")
    )
)
_uids = st.frozensets(st.sampled_from(["u1", "u2"]))
_evidence = st.builds(
    HolderEvidence,
    st.lists(_allocations.map(lambda named: CheckpointVersion(frozenset(named), {})), max_size=3),
    st.booleans(),
    st.builds(PodProcesses, st.none() | _uids, st.none() | _uids),
)


@given(_allocations, st.lists(_evidence, max_size=6))
def test_nothing_ends_without_proof(known: set[Allocation], scans: list[HolderEvidence]) -> None:
    """Whatever is seen, a holder ends only if no current checkpoint names it and no process of its pod runs."""
    held = frozenset(known)
    for evidence in scans:
        after = holders(held, evidence).held
        for ended in held - after.keys():
            assert evidence.current
            assert evidence.checkpoints
            assert not any(ended in one.allocations for one in evidence.checkpoints)
            assert not evidence.pods.may_run(ended.pod_uid)
        assert after.keys() - held <= frozenset().union(*(one.allocations for one in evidence.checkpoints))
        held = frozenset(after)


def test_an_id_of_which_the_kubelet_names_a_holder_is_not_shown_unhealthy() -> None:
    """It is taken in any case: the pod before may have ended a moment ago, or run on."""
    assert holders([A], seen(B, current=False)).unnamed(R) == frozenset()
    assert set(holders([A], seen(B, current=False)).held) == {A, B}
    assert holders([A], seen(current=False, pods=RUNS)).unnamed(R) == {"a"}
    assert holders([A], seen(current=False)).unnamed(R) == frozenset(), "not proved to have ended, and no process runs"


def test_an_id_of_a_pod_that_the_kubelet_counts_is_not_shown_unhealthy() -> None:
    """The scheduler counts the pod as well, and a restarted kubelet needs the capacity to admit the pod again."""
    runs = PodProcesses(frozenset({"u1", "u2"}))
    alone, both = (holders(held, seen(pods=runs)) for held in ([A], [A, B]))
    assert replace(alone, active=frozenset({"u1"})).unnamed(R) == frozenset()
    assert replace(both, active=frozenset({"u1"})).unnamed(R) == {"a"}
