"""Views of nodes, how many devices have to move, what prevents moves, and which nodes a rollout starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.naming import device_name
from deviceplugin.register.records import AllocationRecord, DeviceRecord, RegisterSnapshot, State
from dra_bridge.kube import ClaimResult, ListedClaim
from dra_bridge.kube.forms import ReservedPod
from dra_bridge.rollout import fleet, progress
from dra_bridge.rollout.fleet import Before, Goal, NodeView, Phase, RolloutLimits
from dra_bridge.rollout.pods import failing_pods
from dra_bridge.rollout.progress import DeviceProgress, Progress, ResourceProgress
from tests.dra.objects import node_body
from tests.dra.rollout import nodes as simulated

D = "gpu.example.com"
R = "example.com/gpu"
SHARE = progress.share_annotation(D)
BEFORE = fleet.before_annotation(D)


def report(counts: Mapping[str, int], requested: str = "", share: str = "none", **devices: DeviceProgress) -> Progress:
    return Progress({R: ResourceProgress(share, dict(counts), devices)}, requested, {R: ""})


def view(
    node: str = "n1", requested: str | None = None, counts: Mapping[str, int] | None = None, **more: Any
) -> NodeView:
    known = report(counts or {"plugin": 4}, requested or "", requested or "none")
    return NodeView(node, D, requested, reported=known, **more)


@pytest.mark.parametrize(
    ("requested", "counts", "left"),
    [
        ("all", {"plugin": 4}, 4),
        ("all", {"dra": 3, "to-dra": 1}, 1),
        ("all", {"dra": 3, "quarantined": 1}, 0),
        ("50%", {"dra": 2, "plugin": 2}, 0),
        ("9", {"dra": 4}, 0),
        ("none", {"dra": 1, "to-plugin": 2, "plugin": 1}, 3),
        ("1", {"dra": 1, "to-dra": 1, "to-plugin": 1, "plugin": 1}, 2),
        (None, {"plugin": 4}, 0),
        ("nonsense", {"plugin": 4}, 0),
    ],
)
def test_distance(requested: str | None, counts: Mapping[str, int], left: int) -> None:
    """A node's distance is how many of its devices have to move between limits and claims, without quarantined ones."""
    assert fleet.distance(view(requested=requested, counts=counts)) == left


def test_settled_only_once_the_agent_knows() -> None:
    """A node is finished only after its agent has read the requested share, even if its devices are there already."""
    at_rest = view(requested="all", counts={"dra": 4})
    assert fleet.finished(at_rest)
    assert at_rest.reported is not None
    assert not fleet.finished(replace(at_rest, reported=msgspec.structs.replace(at_rest.reported, requested="none")))
    assert not fleet.finished(replace(at_rest, requested=None))
    assert not fleet.finished(NodeView("n1", D, "all"))
    kept = msgspec.structs.replace(report({"dra": 4}, share="all"), kept="all")
    assert not fleet.finished(NodeView("n1", D, reported=kept))


def test_gone_devices_do_not_count() -> None:
    """A device that its source no longer lists is shown as gone, and its node is finished without the device."""
    device = DeviceProgress(State.PLUGIN, 1, gone=True)
    slices = [slice_of("n1", report({"dra": 1}, "all", "all", a=DeviceProgress(State.DRA, 1), b=device))]
    (found,) = fleet.views(D, [node("n1", {SHARE: "all"})], slices)
    assert fleet.finished(found)
    assert [(one.name, one.gone) for one in found.devices] == [("a", False), ("b", True)]


def node(name: str, annotations: Mapping[str, str] | None = None, ready: str = "True") -> dict[str, Any]:
    made = node_body(name, annotations=annotations, conditions=[{"type": "Ready", "status": ready}])
    return {**made, "metadata": {**made["metadata"], "resourceVersion": "7"}}


def slice_of(name: str, said: Progress | None) -> dict[str, Any]:
    annotations = {progress.annotation(D): progress.encoded(said)} if said is not None else {}
    return {"metadata": {"name": f"{name}-s", "annotations": annotations}, "spec": {"driver": D, "nodeName": name}}


def claim(
    name: str, *, namespace: str = "ns", pods: Sequence[str] = (), device: str = "a", admin: bool = False, **of: str
) -> ListedClaim:
    result = ClaimResult(of.get("driver", D), of.get("pool", "n1"), device, admin)
    return ListedClaim(name, namespace, name, False, (result,), tuple(ReservedPod(pod, pod) for pod in pods))


def test_holders_are_found_by_the_names_that_the_agent_kept() -> None:
    """With two resources of one driver, the holders by claim are found by the published names of the devices."""
    other = "example.com/fpga"
    resources = {name: ResourceProgress("all", {"dra": 1}, {"0": DeviceProgress(State.DRA, 1)}) for name in (R, other)}
    claims = [
        claim(name, device=device_name("0", word), namespace="team")
        for name, word in (("first", ""), ("second", "fpga--"))
    ]
    said = Progress(resources, qualifiers={R: "", other: "fpga--"})
    (found,) = fleet.views(D, [node("n1")], [slice_of("n1", said)], claims)
    assert {one.resource: one.holder for one in found.devices} == {R: "claim team/first", other: "claim team/second"}


def test_views_read_what_the_server_has() -> None:
    """A node's view has its annotations, readiness and report; annotations and reports that are invalid are ignored."""
    nodes = [node("n10", {SHARE: "1", BEFORE: '{"share":null}'}), node("n9", {BEFORE: "garbage"}, "False"), node("n8")]
    broken = slice_of("n9", None)
    broken["metadata"]["annotations"] = {progress.annotation(D): "garbage"}
    found = fleet.views(D, nodes, [slice_of("n10", report({"plugin": 1})), broken])
    assert [(one.node, one.requested, one.before, one.ready, one.serves, one.reported is None) for one in found] == [
        ("n8", None, None, True, False, True),
        ("n9", None, None, False, True, True),
        ("n10", "1", Before(None), True, True, False),
    ]
    assert fleet.drivers_of([slice_of("n1", report({})), slice_of("n2", None)], []) == [D]


def test_claims_name_holders_of_a_shared_device() -> None:
    """A shared device has all its claims and their pods as holders; admin access is no holder."""
    claims = [
        *(claim(name, pods=(f"pod-{name}",)) for name in "xy"),
        claim("z", admin=True, pods=("pod-z",)),
        *(claim("w", pool="n2"), claim("v", driver="other")),
    ]
    said = report({"dra": 1}, a=DeviceProgress(State.DRA, 1, "claim ns/earlier"))
    (found,) = fleet.views(D, [node("n1")], [slice_of("n1", said)], claims)
    assert found.devices[0].holder == "claim ns/x, claim ns/y"
    assert found.devices[0].pods == ("pod-x", "pod-y")
    assert fleet.administrative(found) == ["claim ns/z has administrative access to a, without holding it"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (NodeView("n1", D), "its agent reports no moves"),
        (NodeView("n1", D, serves=False), f"no agent of {D} reports its devices"),
        (view(requested="half"), f"its annotation {SHARE}: 'half' is not a share"),
        (replace(view(), requested="all"), "its agent has not read the requested share yet; is it running?"),
        (replace(view(), requested="all", ready=False), "(the node is not Ready)"),
        (view(requested="all", counts={"plugin": 1}), "its agent has not begun to move devices"),
        (
            NodeView("n1", D, reported=msgspec.structs.replace(report({"dra": 4}, share="all"), kept="all")),
            "its Node was recreated without the annotation; the share all stays until another is requested",
        ),
    ],
)
def test_obstacles_of_a_node(found: NodeView, said: str) -> None:
    """`obstacles` explains why none of a node's devices moves."""
    (line,) = fleet.obstacles(found)
    assert said in line


def test_obstacles_of_devices() -> None:
    """`obstacles` names what moving devices wait for, and all holders if devices only move when they are idle."""
    moving = report(
        {"to-dra": 1, "plugin": 1}, "all", "all", a=DeviceProgress(State.TO_DRA, 1, "pod d/p", "its holder")
    )
    (found,) = fleet.views(D, [node("n1", {SHARE: "all"})], [slice_of("n1", moving)])
    assert fleet.obstacles(found) == ["a (to-dra) waits for its holder, held by pod d/p"]
    many = {f"d{number}": DeviceProgress(State.TO_DRA, 1, "", "the kubelet to listen") for number in range(32)}
    (found,) = fleet.views(
        D, [node("n1", {SHARE: "all"})], [slice_of("n1", report({"to-dra": 32}, "all", "all", **many))]
    )
    assert fleet.obstacles(found) == ["d0, d1, d2, d3, d4 and 27 more (to-dra) wait for the kubelet to listen"]
    waiting = report({"plugin": 1}, "all", "all", a=DeviceProgress(State.PLUGIN, 1, "pod d/p"))
    (found,) = fleet.views(D, [node("n1", {SHARE: "all"})], [slice_of("n1", waiting)])
    assert fleet.obstacles(found) == ["devices move when they are idle: a held by pod d/p"]
    assert fleet.obstacles(view(requested="all", counts={"dra": 4})) == []


@pytest.mark.parametrize(
    ("waits", "users", "said"),
    [
        ("claim ns/c", (), "claim ns/c"),
        ("claim ns/c", ("q",), "claim ns/c, which q uses"),
        ("claim ns/c", ("q", "r"), "claim ns/c, which q, r use"),
        ("claim ns/c (processes of pod ns/q run)", ("q",), "claim ns/c (processes of pod ns/q run)"),
        ("a list of claims", ("q",), "a list of claims, held by claim ns/c for q"),
    ],
)
def test_obstacles_do_not_repeat_themselves(waits: str, users: Sequence[str], said: str) -> None:
    """The holder of a device is named once, also if its move waits for this holder."""
    moving = report({"to-plugin": 1}, "none", "none", a=DeviceProgress(State.TO_PLUGIN, 1, "", waits))
    (found,) = fleet.views(D, [node("n1", {SHARE: "none"})], [slice_of("n1", moving)], [claim("c", pods=users)])
    assert fleet.obstacles(found) == [f"a (to-plugin) waits for {said}"]


def pod(name: str, phase: str = "Failed", limits: Mapping[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "d", "name": name, "uid": f"{name}-uid-and-more"},
        "spec": {"containers": [{"resources": {"limits": dict(limits or {})}}], **spec},
        "status": {"phase": phase, "reason": "UnexpectedAdmissionError" if phase == "Failed" else ""},
    }


def test_failing_pods_are_those_of_devices() -> None:
    """Of pods that use the resources or claims, a rollout counts the failed ones and those that cannot be prepared."""
    pods = [
        pod("a", limits={R: "1"}),
        pod("b", limits={"cpu": "1"}),
        pod("c", "Pending", resourceClaims=[{"name": "x"}]),
        pod("e", "Running", resourceClaims=[{"name": "x"}]),
        pod("f", "Pending", limits={R: "1"}),
        {**pod("g"), "spec": {"initContainers": [{"resources": {"requests": {R: "1"}}}]}},
    ]
    events = [
        {"reason": "FailedPrepareDynamicResources", "involvedObject": {"uid": f"{name}-uid-and-more"}, "message": "no"}
        for name in ("c", "e")
    ] + [{"reason": "Pulled", "involvedObject": {"uid": "f-uid-and-more"}}]
    assert failing_pods(pods, events, [R]) == {
        "a-uid-an": "pod d/a has failed (UnexpectedAdmissionError)",
        "c-uid-an": "pod d/c cannot start (no)",
        "g-uid-an": "pod d/g has failed (UnexpectedAdmissionError)",
    }


# Decisions of a rollout.


def test_phases() -> None:
    """A node's phase in a rollout follows from how many devices are requested for claims, and how many moved."""
    goal, undo = Goal("all"), Goal(undo=True)
    assert fleet.phase(goal, view()) is Phase.WAITING
    assert fleet.phase(goal, view(requested="all", counts={"dra": 1, "to-dra": 3})) is Phase.MOVING
    assert fleet.phase(goal, view(requested="all", counts={"dra": 4})) is Phase.DONE
    assert fleet.phase(goal, NodeView("n1", D)) is Phase.UNSERVED
    assert fleet.phase(undo, view(requested="all")) is Phase.UNTOUCHED
    assert fleet.phase(undo, view(requested="all", counts={"dra": 4}, before=Before("1"))) is Phase.WAITING
    assert fleet.phase(undo, NodeView("n1", D, "1", Before("1"))) is Phase.DONE


def test_nodes_that_are_not_ready_are_not_begun() -> None:
    """A node that is not Ready does not start; if no other node is left, the rollout stops and names it."""
    nodes = [view("n1", ready=False), view("n2")]
    assert fleet.decide(Goal("all"), nodes, RolloutLimits()).begin == ("n2",)
    assert fleet.decide(Goal("all"), nodes[:1], RolloutLimits()).stop == ("n1: the node is not Ready",)


def test_a_node_under_way_elsewhere_counts() -> None:
    """A node whose devices move for another request counts as a moving node, and the rollout starts it first."""
    nodes = [view("n1"), view("n2", requested="2", counts={"to-dra": 2, "plugin": 2})]
    assert fleet.decide(Goal("all"), nodes, RolloutLimits(1)).begin == ("n2",)
    assert fleet.decide(Goal("all"), nodes, RolloutLimits(2)).begin == ("n2", "n1")


def test_a_stalled_node_stops_it() -> None:
    """A node that exceeds the time per node stops the rollout with a reason; no other node starts."""
    nodes = [view("n1", requested="all", counts={"to-dra": 4}), view("n2")]
    patient = fleet.decide(Goal("all"), nodes, RolloutLimits(2, 10.0), ages={"n1": 9.0})
    assert patient.begin == ("n2",)
    stalled = fleet.decide(Goal("all"), nodes, RolloutLimits(2, 10.0), ages={"n1": 20.0})
    assert stalled.begin == ()
    assert stalled.stop[0].startswith("n1: not done after 10 s")


def test_begin_keeps_the_first_record() -> None:
    """The first of several rollouts records a node's former number of devices for claims; each records failing pods."""
    first = fleet.begin_patch(Goal("all"), D, node("n1", {SHARE: "2"}), ["b", "a"])
    assert first is not None
    kept = first["metadata"]["annotations"]
    assert msgspec.json.decode(kept[BEFORE], type=Before) == Before("2", ("a", "b"))
    second = fleet.begin_patch(Goal("none"), D, node("n1", kept), [])
    assert second is not None
    assert second["metadata"]["resourceVersion"] == "7"
    assert msgspec.json.decode(second["metadata"]["annotations"][BEFORE], type=Before) == Before("2")
    assert fleet.begin_patch(Goal("all"), D, node("n1", {SHARE: "all"}), []) is None
    assert fleet.begin_patch(Goal(undo=True), D, node("n1", {SHARE: "all"}), []) is None


@given(
    before=st.lists(st.sampled_from(["", "none", "1", "50%", "all"]), min_size=1, max_size=6),
    shares=st.lists(st.sampled_from([None, "none", "2", "all"]), min_size=1, max_size=3),
    most=st.integers(1, 3),
    choices=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    crash=st.integers(0, 30),
)
def test_rollouts_end_and_undo_restores(
    before: list[str], shares: list[str | None], most: int, choices: list[int], crash: int
) -> None:
    """After a rollout each node has the requested share (devices for claims); undo restores all annotations.

    This holds whatever the shares were before, for slow nodes, and for commands that die and run again. At most N nodes
    move at once.
    """
    at_first = {f"n{number}": {simulated.SHARE: text} if text else {} for number, text in enumerate(before)}
    group = simulated.Group({name: dict(found) for name, found in at_first.items()})
    limits = RolloutLimits(most, ignore_autoscaler=True)
    goals = [Goal(share, owner=f"me (share {share})", take_over=True) for share in shares]
    for goal in (*goals, Goal(undo=True, owner="me (undo)")):
        assert group.roll(goal, limits, choices, crash) or group.roll(goal, limits, choices)
        assert not group.moving()
        assert goal.undo or all(found.get(simulated.SHARE) == goal.share for found in group.annotations.values())
    assert group.annotations == at_first


ALICE, BOB = Goal("all", owner="alice (share all)"), Goal("none", owner="bob (share none)")


def owned(share: str | None, goal: Goal, **more: Any) -> NodeView:
    """Return a node that the rollout of a goal has started. share: the requested number of devices for claims."""
    return view("n1", requested=share, counts={"plugin": 4}, before=Before("2", owner=goal.owner), **more)


@pytest.mark.parametrize(
    ("goal", "found", "own", "said"),
    [
        (
            BOB,
            owned("all", ALICE),
            (),
            "n1: share all requested by the rollout of alice (share all); --take-over replaces",
        ),
        (replace(BOB, take_over=True), owned("all", ALICE), (), ""),
        (replace(BOB, take_over=True), owned("all", ALICE), ("n1",), "n1: share all requested by the rollout of alice"),
        (ALICE, owned("all", ALICE), (), ""),
        (ALICE, owned("all", BOB), (), ""),  # another rollout that requests the same is no contradiction
        (ALICE, owned("none", BOB), ("n1",), "n1: share none requested by the rollout of bob (share none)"),
        (ALICE, owned("1", ALICE), (), "n1: share 1 requested by somebody else since this rollout has begun it"),
        (ALICE, owned(None, ALICE), ("n1",), "n1: no share requested by somebody else"),
        (ALICE, view("n1", requested="2"), ("n1",), "n1: share 2 requested by somebody else"),  # n1 was undone
        (ALICE, view("n1", requested="2"), (), ""),
        (ALICE, owned("none", Goal()), (), ""),  # the record of an older version has no owner
        (Goal(undo=True, owner="bob (undo)"), owned("all", ALICE), (), ""),
        (
            Goal(undo=True, owner="bob (undo)"),
            owned("all", ALICE),
            ("n1",),
            "n1: share all requested by the rollout of al",
        ),
    ],
)
def test_contradicting_rollouts(goal: Goal, found: NodeView, own: Sequence[str], said: str) -> None:
    """A rollout stops at a node with another rollout's request; --take-over replaces that request once."""
    decision = fleet.decide(goal, [found, view("n2")], RolloutLimits(2), own=own)
    assert bool(decision.stop) is bool(said)
    assert "".join(decision.stop).startswith(said)
    assert not (said and decision.begin)
    annotations = {SHARE: found.requested, BEFORE: msgspec.json.encode(found.before).decode() if found.before else None}
    now = node("n1", {key: text for key, text in annotations.items() if text is not None})
    if said and not own:  # another run started the node between the decision and the patch
        assert fleet.begin_patch(goal, D, now, []) is None


def test_contradictions_of_many_nodes_are_one_sentence() -> None:
    """If a rollout stops because many nodes have another rollout's request, one message stands for these nodes."""
    found = [replace(owned("all", ALICE), node=f"n{number}") for number in range(8)]
    said = "n0, n1, n2, n3, n4 and 3 more: share all requested by the rollout of alice (share all)"
    assert fleet.decide(BOB, found, RolloutLimits()).stop == (f"{said}; --take-over replaces it",)


def test_who_takes_over_keeps_what_was_before() -> None:
    """A takeover of another rollout's node keeps the record of what was requested before both; the owner is new."""
    found = node("n1", {SHARE: "all", BEFORE: '{"share":"2","owner":"alice (share all)"}'})
    patch = fleet.begin_patch(replace(BOB, take_over=True), D, found, [])
    assert patch is not None
    record = patch["metadata"]["annotations"][BEFORE]
    assert msgspec.json.decode(record, type=Before) == Before("2", owner="bob (share none)")


def test_a_node_that_is_gone_is_waited_for() -> None:
    """A started node without a Node object counts as moving, and stops the rollout after the time per node."""
    rest = [view("n2")]
    asked: dict[str, Any] = {"own": {"n1"}, "gone": ["n1"]}
    assert fleet.decide(Goal("all"), (), RolloutLimits(), **asked) == fleet.RolloutStep()
    assert fleet.decide(Goal("all"), rest, RolloutLimits(1), **asked) == fleet.RolloutStep()
    assert fleet.decide(Goal("all"), rest, RolloutLimits(2), **asked).begin == ("n2",)
    assert fleet.decide(Goal("all"), rest, RolloutLimits(2, pause=True), **asked) == fleet.RolloutStep()
    assert fleet.decide(Goal("all"), [view("n2", ready=False)], RolloutLimits(2), **asked) == fleet.RolloutStep()
    stopped = fleet.decide(Goal("all"), rest, RolloutLimits(2, 10.0), ages={"n1": 20.0}, **asked)
    said = "n1: not done after 10 s: there is no such node with these labels any more"
    assert stopped == fleet.RolloutStep(stop=(said,))


def test_a_record_is_removed_only_where_its_share_is_restored() -> None:
    """The record of a Node's former share (devices for claims) is removed only if the Node has that share again."""
    undo = Goal(undo=True, owner="bob (undo)")
    record = '{"share":"2","owner":"bob (undo)"}'
    assert fleet.forget_patch(undo, D, node("n1", {SHARE: "2", BEFORE: record})) is not None
    assert fleet.forget_patch(undo, D, node("n1", {SHARE: "all", BEFORE: record})) is None
    assert fleet.forget_patch(undo, D, node("n1", {SHARE: "2"})) is None


def test_pause_ends_after_the_first_nodes() -> None:
    """With pause, no node starts after the first nodes of this run; the run is over when these nodes are done."""
    moving = [view("n1", requested="all", counts={"to-dra": 4}), view("n2")]
    limits = RolloutLimits(1, pause=True)
    assert fleet.decide(Goal("all"), moving, limits, own={"n1"}) == fleet.RolloutStep()
    done = [view("n1", requested="all", counts={"dra": 4}), view("n2")]
    assert fleet.decide(Goal("all"), done, limits, own={"n1"}).over
    assert fleet.decide(Goal("all"), done, limits).begin == ("n2",)


def test_the_report_of_many_devices_fits_into_an_annotation() -> None:
    """If a report is too long for an annotation, the resource with the most devices has counts only."""
    resources = {"example.com/many": 1000, "example.com/more": 1020, "example.com/few": 3}
    devices = {
        (resource, name): DeviceRecord(resource, name, State.PLUGIN, 1.7e9)
        for resource, count in resources.items()
        for name in (f"GPU-{number:036}" for number in range(count))
    }
    holds = {
        key: AllocationRecord(*key, key[1], 1.7e9, 1, pod=f"a-namespace/a-training-job-with-a-long-name-{key[1]}")
        for key in devices
    }
    now = RegisterSnapshot(1, devices, holds)
    reported = progress.progress(now, dict.fromkeys(resources, "none"), {}, requested="", gone=(), qualifiers={})
    assert len(progress.encoded(reported).encode()) <= 192 * 1024
    assert {name: len(one.devices) for name, one in reported.resources.items()} == {
        "example.com/many": 1000,
        "example.com/more": 0,
        "example.com/few": 3,
    }
    assert [one.counts for one in reported.resources.values()] == [{"plugin": count} for count in resources.values()]
