"""Which evidence proves that a pod still holds a device, and which does not."""

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
    """Return the pending grants of id a, granted at 2.0; `since` is the time in the checkpoint's AllocateResponses."""
    record = AllocationRecord(R, "a", "a", 2.0, 1, holders)
    answer = Wanted((R, "a"), UNIDENTIFIED, WHOLE, since)
    return pending_grants(
        [CheckpointVersion(frozenset(named), {})], {(R, "a"): record}, dict.fromkeys(named, ("", answer))
    )


def test_a_response_in_the_checkpoint_shows_the_container_of_a_grant() -> None:
    """A checkpoint's AllocateResponse names the container of a grant only if the grant is the last one and pending."""
    assert grants(A, since=2.0) == (frozenset({A}), frozenset())
    assert grants(A, since=1.0) == grants(since=2.0) == (frozenset(), frozenset())
    known = {(R, "a"): AllocationRecord(R, "a", "a", 2.0, 1, pending=False)}
    answer = Wanted((R, "a"), UNIDENTIFIED, WHOLE, 2.0)
    assert not pending_grants([CheckpointVersion(frozenset({A}), {})], known, {A: ("", answer)}).begun


def test_a_later_grant_in_the_checkpoint_shows_the_end_of_the_former_holder() -> None:
    """A later grant's response in the checkpoint proves that the former holder has ended, unless its processes run."""
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
        (None, POSSIBLE),  # the checkpoint names no allocation of the id
        (1.0, POSSIBLE),  # the checkpoint is older than the grant
        (5.0, set()),
        (0.0, set()),  # the response is of an agent that wrote no times
    ],
)
def test_the_pods_that_may_have_a_grant_whose_checkpoint_was_lost(
    since: float | None, possible: set[tuple[str, str]]
) -> None:
    """If no checkpoint names a grant's container, all pods that began since the grant are possible holders."""
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
        # The checkpoint names the holder: held. This is certain if the checkpoint is current or the pod runs.
        ([], seen(A, current=True), HoldReason(True, True, "the kubelet's checkpoint names it")),
        ([], seen(A, current=False), HoldReason(True, False, "the kubelet's checkpoint names it")),
        ([], seen(A, current=False, pods=RUNS), HoldReason(True, True, "the kubelet's checkpoint names it")),
        # An admitted pod that has not started has neither a cgroup nor a directory (network not ready).
        ([A], seen(A, current=True, pods=NO_DIRECTORY), HoldReason(True, True, "the kubelet's checkpoint names it")),
        # A current checkpoint does not name the holder, and the pod's cgroup is gone.
        ([A], seen(current=True), None),
        ([A], seen(current=True, pods=NO_DIRECTORY), None),
        # A pod that was deleted by force still runs.
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
        # A checkpoint that is missing or not current does not prove an end.
        (
            [A],
            seen(current=False, problem="not written since"),
            HoldReason(False, False, "not known: not written since"),
        ),
        # The pod's processes run: this is the reason, whether a newer checkpoint was requested or not.
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
    """By checkpoint and processes an allocation counts as held for a reason (`holding`), or as ended (None)."""
    assert holders(known, evidence, 1.0).held.get(A) == holding


def test_a_holder_is_a_pod_and_a_container_and_an_id() -> None:
    """A holder is one container of one pod with one device id: the same container name in another pod is another."""
    now = holders([A], seen(B, current=True, pods=PodProcesses(frozenset({"u2"}))))
    assert set(now.held) == {B}
    both = holders([A], seen(B, current=True, pods=PodProcesses(frozenset({"u1", "u2"}))))
    assert set(both.held) == {A, B}
    alone = holders([A], seen(current=True, pods=RUNS))
    assert alone.unnamed(R) == {"a"}
    assert alone.unnamed("example.com/other") == frozenset()


def test_an_allocation_that_is_over_stays_over() -> None:
    """An allocation that a scan found ended does not count as held in the next scan."""
    held = holders([], seen(A, pods=RUNS)).held
    held = holders(held, seen()).held
    assert holders(held, seen(current=False)).held == {}


def test_what_a_scan_knows_of_the_checkpoint() -> None:
    """The result of a scan is current only with a checkpoint that was written after the scan's request."""
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
    """A newer checkpoint is requested for each allocation, unless the checkpoint names it and its pod runs."""
    held = holders(known, evidence).held
    assert needs_request(held, evidence.pods) == (frozenset({A}) if asks else frozenset())


def test_an_allocation_that_one_of_the_checkpoints_names_is_held() -> None:
    """An allocation that any of several checkpoints names is held; this is certain only if all of them name it."""
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
    """A scan's checkpoints are current if there are more than can be late: one per resource and one for the status."""
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
    """A holder ends only if the checkpoints are current and do not name it, and no process of its pod runs."""
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
    """An id whose holder the checkpoint names is not shown as unhealthy, even if a former holder may still run."""
    assert holders([A], seen(B, current=False)).unnamed(R) == frozenset()
    assert set(holders([A], seen(B, current=False)).held) == {A, B}
    assert holders([A], seen(current=False, pods=RUNS)).unnamed(R) == {"a"}
    assert holders([A], seen(current=False)).unnamed(R) == frozenset(), "not proved to have ended, and no process runs"


def test_an_id_of_a_pod_that_the_kubelet_counts_is_not_shown_unhealthy() -> None:
    """An id whose pod the kubelet counts as active is not shown as unhealthy, unless a second pod holds the id."""
    runs = PodProcesses(frozenset({"u1", "u2"}))
    alone, both = (holders(held, seen(pods=runs)) for held in ([A], [A, B]))
    assert replace(alone, active=frozenset({"u1"})).unnamed(R) == frozenset()
    assert replace(both, active=frozenset({"u1"})).unnamed(R) == {"a"}
