"""Annotations of a rollout that forbid the cluster autoscaler to remove nodes (marks): no used node is drained.

A model of the autoscaler judges the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_bridge.rollout import autoscaler, fleet, progress
from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED, MarkedNode, Marks, MarkStep, Placement, next_marks
from dra_bridge.rollout.fleet import Goal, Phase, RolloutLimits
from dra_bridge.rollout.progress import Progress, ResourceProgress
from tests.autoscaler import Verdict, judge, stops
from tests.dra.rollout.nodes import BUSY, IDLE, LOW, POOL, RECORD, UNREADY, D, Group, R, node, pods_of, slice_of

USED, DISABLED = Verdict.USED, Verdict.DISABLED


@pytest.mark.parametrize(
    ("slices", "annotations", "expected", "halted"),
    [
        ({}, {}, [USED] * 4 + [IDLE] * 2, False),
        (dict.fromkeys(range(6), 0), {}, [IDLE] * 6, False),
        (dict.fromkeys(range(3), 0), {}, [IDLE] * 3 + [UNREADY] * 3, False),
        (dict.fromkeys(range(2), 0), {}, [IDLE] * 2 + [UNREADY] * 4, True),
        (dict.fromkeys(range(6), 1), {}, [IDLE] * 6, False),
        (dict.fromkeys(range(6), 0), {SCALE_DOWN_DISABLED: "true"}, [DISABLED] * 6, False),
    ],
    ids=["no slice", "an empty one each", "on 3 of 6", "on 2 of 6", "one device each", "marked"],
)
def test_the_model_says_what_the_autoscaler_did(
    slices: Mapping[int, int], annotations: Mapping[str, str], expected: Sequence[Verdict], halted: bool
) -> None:
    """The model judges six nodes, four used at 75 % and two at 25 %, as the real autoscaler has judged them."""
    nodes = [node(f"n{number}", annotations) for number in range(6)]
    pods = [pod for number in range(6) for pod in pods_of(f"n{number}", BUSY if number < 4 else LOW)]
    verdicts = judge(nodes, [slice_of(f"n{number}", devices) for number, devices in slices.items()], pods=pods)
    assert list(verdicts.values()) == expected
    assert stops(verdicts) is halted


SHARES = st.sampled_from(["none", "2", "all"])


@given(
    shares=st.lists(SHARES, min_size=1, max_size=3),
    count=st.integers(1, 6),
    most=st.integers(1, 3),
    choices=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    interrupted=st.integers(0, 30),
    foreign=st.frozensets(st.integers(0, 5)),
)
def test_no_used_node_is_drained_while_a_rollout_runs(
    shares: Sequence[str],
    count: int,
    most: int,
    choices: Sequence[int],
    interrupted: int,
    foreign: frozenset[int],
) -> None:
    """While rollouts run, are interrupted and undone, the autoscaler drains no used node.

    After each rollout no node counts as unready. This holds for any requested numbers of devices for
    claims, and for slow nodes. After the undo all annotations are as before.
    """
    theirs = {SCALE_DOWN_DISABLED: "true"}
    first = {f"n{number}": dict(theirs) if number in foreign else {} for number in range(count)}
    group = Group({name: dict(found) for name, found in first.items()})
    limits = RolloutLimits(most)
    for share in shares:
        goal = Goal(share, owner=f"me (share {share})", take_over=True)
        if not group.roll(goal, limits, choices, interrupted):
            assert group.roll(goal, limits, choices)
        verdicts = group.verdicts()
        assert set(verdicts.values()) <= {USED, DISABLED}
        for name, found in group.annotations.items():
            assert (RECORD in found) is (share == "2" and first[name] != theirs)
            assert (POOL in found) is (share == "2")
    assert group.roll(Goal(undo=True, owner="me (undo)"), limits, choices)
    assert group.annotations == first
    assert not any(group.sliced.values())


@given(share=SHARES, count=st.integers(1, 4), former=st.frozensets(st.integers(0, 3), min_size=1))
def test_nodes_of_former_agents_stay_marked(share: str, count: int, former: frozenset[int]) -> None:
    """Nodes of older agents, which keep empty slices, stay marked against scale-down; no rollout waits for them."""
    names = [f"n{number}" for number in range(count)]
    old = frozenset(name for number, name in enumerate(names) if number in former)
    group = Group({name: {} for name in names}, old)
    assert group.roll(Goal(share, owner="me"), RolloutLimits(2), [0])
    assert group.roll(Goal("none", owner="me", take_over=True), RolloutLimits(2), [0])
    kept = bool(old)
    assert all((RECORD in found, POOL in found) == (kept, kept) for found in group.annotations.values())
    assert set(group.verdicts().values()) == {DISABLED if kept else USED}
    # Once newer agents run, the same rollout removes mark and request.
    group.former = frozenset()
    assert group.roll(Goal("none", owner="me", take_over=True), RolloutLimits(2), [0])
    assert set(group.verdicts().values()) == {USED}
    assert not any({SCALE_DOWN_DISABLED, POOL, RECORD} & found.keys() for found in group.annotations.values())


def test_without_an_autoscaler_nothing_is_marked() -> None:
    """With --autoscaler ignore nodes are not marked against scale-down, and marks of an earlier run are removed."""
    group = Group({"n1": {}, "n2": {}})
    assert group.roll(Goal("2", owner="me"), RolloutLimits(2), [0])
    assert all(SCALE_DOWN_DISABLED in found for found in group.annotations.values())
    ignoring = RolloutLimits(2, ignore_autoscaler=True)
    step = fleet.next_marks(Goal("2", owner="me"), group.views(), ignoring)
    group.write(step)
    assert not any({SCALE_DOWN_DISABLED, POOL, RECORD} & found.keys() for found in group.annotations.values())
    assert fleet.next_marks(Goal("2", owner="me"), group.views(), ignoring).over


def test_the_mark_is_shared_by_drivers() -> None:
    """A node's mark against scale-down is removed by the rollout of the last driver that has set it."""
    other = "gpu.example.com"
    found: dict[str, str] = {}
    for driver in (D, other):
        patch = autoscaler.mark_patch(driver, node("n1", found))
        assert patch is not None
        found |= patch["metadata"]["annotations"]
    step = MarkStep(withdraw=("n1",), release=("n1",))
    first = autoscaler.release_patch(D, node("n1", found), step)
    assert first is not None
    assert first["metadata"]["annotations"] == {RECORD: None}
    del found[RECORD]
    last = autoscaler.release_patch(other, node("n1", found), step)
    assert last is not None
    assert last["metadata"]["annotations"] == {autoscaler.mark_annotation(other): None, SCALE_DOWN_DISABLED: None}


def test_all_are_marked_before_the_first_pool() -> None:
    """Slices are requested only once all nodes are marked, and devices move only once all these slices are there."""
    bare, marked = Marks(), Marks(disabled=True, own=True)
    asked = Marks(disabled=True, own=True, pool=True)
    nodes = [MarkedNode("n1", bare, Placement.NONE), MarkedNode("n2", marked, Placement.NONE)]
    assert next_marks(nodes) == MarkStep(mark=("n1",), kept=("n1", "n2"))
    nodes = [MarkedNode("n1", marked, Placement.NONE), MarkedNode("n2", marked, Placement.NONE)]
    assert next_marks(nodes).publish == ("n1", "n2")
    nodes = [MarkedNode("n1", asked, Placement.NONE), MarkedNode("n2", asked, Placement.NONE, sliced=True)]
    step = next_marks(nodes)
    assert (step.ready, step.unpublished) == (False, ("n1",))
    stalled = fleet.with_marks(fleet.RolloutStep(begin=("n1",)), step, RolloutLimits(1, 10.0), 11.0)
    assert stalled.begin == ()
    assert stalled.stop[0].startswith("n1: the agent's pool is not published")


def test_what_status_says_of_marks() -> None:
    """`status` explains a mark against scale-down that a rollout has set, and does not mention marks of others."""
    own = Marks(disabled=True, own=True)
    assert "never scaled down" in autoscaler.sentences(own, Placement.PARTIAL)[0]
    assert "the same rollout again" in autoscaler.sentences(own, Placement.ALL)[0]
    assert not autoscaler.sentences(Marks(disabled=True), Placement.PARTIAL)


def test_a_lease_has_the_report() -> None:
    """A node's report is read from its Lease, or from a ResourceSlice of an older agent, which takes precedence."""
    report = Progress({R: ResourceProgress("none", {"plugin": 4})}, qualifiers={R: ""})
    names = Progress({}, qualifiers={R: ""})
    lease = {"metadata": {"name": "n1", "annotations": {progress.annotation(D): progress.encoded(report)}}}
    body = slice_of("n1", 1)
    body["metadata"]["annotations"] = {progress.annotation(D): progress.encoded(names)}
    (view,) = fleet.views(D, [node("n1")], [body], leases=[lease])
    assert (view.reported, view.sliced, view.former) == (report, True, False)
    (view,) = fleet.views(D, [node("n1")], [], leases=[lease])
    assert (view.reported, view.sliced, fleet.phase(Goal("none"), view)) == (report, False, Phase.WAITING)
    former = Progress({R: ResourceProgress("all", {"dra": 4})})
    body["metadata"]["annotations"] = {progress.annotation(D): progress.encoded(former)}
    (view,) = fleet.views(D, [node("n1")], [body], leases=[lease])
    assert (view.reported, view.former) == (former, True)
    assert fleet.drivers_of([], [lease]) == [D]
