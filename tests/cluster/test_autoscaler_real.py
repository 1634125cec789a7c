"""A model of the cluster autoscaler judges the objects of a real API server in each state of a migration.

Agents and `dra-bridge rollout` are real; Nodes and kubelets are simulated (`tests.cluster.group`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dra_bridge.node.node_object import INITIALIZED, KARPENTER
from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED
from tests.autoscaler import Verdict, stops
from tests.cluster.former_agent import FormerAgent
from tests.cluster.group import DEVICES, Group
from tests.cluster.node import Cluster
from tests.cluster.test_handover import RESOURCE as CARD
from tests.cluster.test_handover import serving_cards, states

RESOURCE, DRIVER = "example.net/card", "card.example.net"
COUNT = 3
BUSY = [3] * COUNT
"""The number of devices and CPUs that pods use on each node; a node has four of both."""
MARKS = {SCALE_DOWN_DISABLED: "true", f"{DRIVER}/dra-scale-down": "disabled", f"{DRIVER}/dra-pool": "publish"}
ALL_USED, ALL_DISABLED = [Verdict.USED] * COUNT, [Verdict.DISABLED] * COUNT


@pytest.fixture
def group(cluster: Cluster) -> Iterator[Group]:
    """Three nodes, used at 75 % by pods with limits."""
    if cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    with Group.running(cluster, RESOURCE, DRIVER, COUNT) as running:
        running.start_pods(BUSY)
        yield running
        running.end_pods()


def test_an_autoscaler_drains_no_used_node_in_any_state(group: Group) -> None:
    """In no state of a migration does a used node count as idle or unready.

    The states of a node's devices: none is for claims (without slices and with empty slices), some are to move, some or
    all are for claims, and none again. In one state the nodes differ. In the end no annotation of a rollout is left.
    """
    names = [node.name for node in group.nodes]

    # No device is for claims, no slice exists: agents that serve no claims change nothing for the autoscaler.
    assert group.slices() == {}
    assert group.verdicts() == ALL_USED

    # The nodes differ: the first node's devices are to move and have holders; the other nodes have empty slices.
    status, out = group.rollout("--share", "2", "--timeout-per-node", "3")
    assert status == 1, out
    assert f"stopped: {names[0]}: not done after 3 s" in out
    assert group.annotations() == [MARKS] * COUNT
    assert set(group.slices()) == set(names)
    assert group.slices()[names[1]] == 0
    assert group.verdicts() == ALL_DISABLED

    # The stopped rollout is undone: no device is for claims again.
    status, out = group.rollout("--undo")
    assert status == 0, out
    group.until(lambda: not group.slices(), "no node has a slice")
    assert group.annotations() == [{}] * COUNT
    assert group.verdicts() == ALL_USED

    # One device of each node moves to claims; the pods keep the node's other devices.
    status, out = group.rollout("--share", "1", "--max-unavailable", str(COUNT))
    assert status == 0, out
    assert f"{COUNT} nodes stay marked {SCALE_DOWN_DISABLED}" in out
    group.until(lambda: group.slices() == dict.fromkeys(names, 1), "each slice has a device")
    assert group.annotations() == [MARKS] * COUNT
    assert group.verdicts() == ALL_DISABLED
    _, shown = group.run("status", "--driver", DRIVER)
    assert shown.count("It is never scaled down while it is so") == COUNT

    # All devices are for claims: pods use claims, and the autoscaler judges the nodes by the claims.
    group.end_pods()
    status, out = group.rollout("--share", "all", "--max-unavailable", str(COUNT), "--take-over")
    assert status == 0, out
    group.until(lambda: group.slices() == dict.fromkeys(names, DEVICES), "each slice has all devices")
    assert group.annotations() == [{}] * COUNT
    group.start_pods(BUSY, claims=True)
    assert group.verdicts() == ALL_USED

    # No device is for claims again.
    group.end_pods()
    status, out = group.rollout("--share", "none", "--max-unavailable", str(COUNT), "--take-over")
    assert status == 0, out
    assert group.slices() == {}
    assert group.annotations() == [{}] * COUNT


def test_what_the_model_warns_of_is_what_one_node_alone_does(group: Group) -> None:
    """After `migrate` of only one node of a group, the autoscaler's model counts the group's other nodes as unready."""
    status, out = group.run("migrate", group.nodes[0].name, "--driver", DRIVER, "--share", "1", "--wait")
    assert status == 0, out
    group.until(lambda: group.slices() == {group.nodes[0].name: 1}, "one node has a slice")
    assert group.verdicts() == [Verdict.IDLE, Verdict.UNREADY, Verdict.UNREADY]
    assert not stops(dict(zip([node.name for node in group.nodes], group.verdicts(), strict=True)))
    # A rollout with the same `--share` writes annotations that keep the autoscaler from scaling the nodes down.
    status, out = group.rollout("--share", "1", "--max-unavailable", str(COUNT))
    assert status == 0, out
    assert group.verdicts() == ALL_DISABLED


@pytest.mark.parametrize(
    ("ended", "next_run"),
    [(signal.SIGINT, ("--undo",)), (signal.SIGKILL, ("--share", "none", "--take-over"))],
    ids=["interrupted and undone", "killed and taken over"],
)
def test_a_rollout_that_was_ended_on_its_way(group: Group, ended: signal.Signals, next_run: tuple[str, ...]) -> None:
    """Nodes keep an ended rollout's annotations until another run removes them; an administrator's annotation stays."""
    theirs = {SCALE_DOWN_DISABLED: "true"}
    first, *_ = group.nodes
    group.cluster.api.patch("Node", first.name, {"metadata": {"annotations": theirs}})
    with group.rolling("--share", "all") as rollout:
        group.until(lambda: group.report(first.name)["resources"][RESOURCE]["counts"].get("to-dra"), "a device waits")
        rollout.send_signal(ended)
        rollout.wait(60)
    assert group.annotations() == [{**theirs, f"{DRIVER}/dra-pool": "publish"}, *[MARKS] * (COUNT - 1)]
    assert group.verdicts() == ALL_DISABLED
    status, out = group.rollout(*next_run)
    assert status == 0, out
    group.until(lambda: not group.slices(), "no node has a slice")
    assert group.annotations() == [theirs, *[{}] * (COUNT - 1)]
    assert group.verdicts() == [Verdict.DISABLED, *ALL_USED[1:]]


def test_agents_that_report_on_slices_are_replaced_one_by_one(cluster: Cluster) -> None:
    """`status` and `rollout` read older agents' reports; slices and annotations are gone with the last older agent."""
    if cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    everywhere = ("--max-unavailable", str(COUNT), "--take-over")
    with ExitStack() as stack:
        group = stack.enter_context(Group.running(cluster, RESOURCE, DRIVER, COUNT, agents=1))
        stack.callback(group.end_pods)
        _, *others = group.nodes
        names = [node.name for node in group.nodes]
        former = [stack.enter_context(FormerAgent.running(group, node)) for node in others]
        group.start_pods(BUSY)
        # Why nodes need the annotations: an empty slice hides the use by pods with limits from the autoscaler.
        assert group.slices() == {node.name: 0 for node in others}
        assert group.verdicts() == [Verdict.UNREADY, Verdict.IDLE, Verdict.IDLE]
        assert reported(group) == [{"plugin": DEVICES}] * COUNT

        status, out = group.rollout("--share", "1", *everywhere)
        assert status == 0, out
        assert f"{COUNT} nodes stay marked {SCALE_DOWN_DISABLED}" in out
        group.until(lambda: group.slices() == dict.fromkeys(names, 1), "each slice has a device")
        assert reported(group) == [{"dra": 1, "plugin": DEVICES - 1}] * COUNT
        assert group.annotations() == [MARKS] * COUNT
        assert group.verdicts() == ALL_DISABLED

        # No device is for claims: new agents keep their pools while an older agent has one; no node is idle or unready.
        for node, agent in (*zip(others, former, strict=True), (None, None)):
            status, out = group.rollout("--share", "none", *everywhere)
            assert status == 0, out
            assert reported(group) == [{"plugin": DEVICES}] * COUNT
            if node is None or agent is None:
                break
            assert f"{COUNT} nodes stay marked {SCALE_DOWN_DISABLED}" in out
            group.until(lambda: group.slices() == dict.fromkeys(names, 0), "each slice is empty")
            assert group.annotations() == [MARKS] * COUNT
            assert group.verdicts() == ALL_DISABLED
            agent.end()
            group.start_agent(node)
            group.until(lambda node=node: group.report(node.name), "the new agent reports")  # type: ignore[misc]
            group.until(agent.replaced, "the former slice is gone")
        assert group.slices() == {}
        assert group.annotations() == [{}] * COUNT
        assert group.verdicts() == ALL_USED


def reported(group: Group) -> list[dict[str, int]]:
    """Return how many devices `status` finds in each state, for each node."""
    _, out = group.run("status", "--driver", DRIVER, "-o", "json")
    found, _ = json.JSONDecoder().raw_decode(out)
    counts = {node["node"]: node["resources"][0]["counts"] for node in found["nodes"]}
    return [counts[node.name] for node in group.nodes]


def test_a_new_node_of_karpenter_serves_its_first_pods_by_limits(cluster: Cluster) -> None:
    """With `share: all`, a new node's devices move to claims once Karpenter has initialized the node.

    Until then the node's pool has no devices. Karpenter with its DRA option waits for a complete pool such as this.
    """
    if cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")

    def label(value: str | None, key: str) -> None:
        cluster.api.patch("Node", cluster.node_name, {"metadata": {"labels": {key: value}}})

    label("cards", KARPENTER)
    try:
        with serving_cards(cluster, "all") as bridge:
            pod = cluster.start_pod("first", {CARD: 1}).wait_running()
            cluster.wait_for(bridge.slices, 60, "there is a pool")
            assert not any(one["spec"].get("devices") for one in bridge.slices())
            assert states(bridge) == {"plugin": 8}
            label("true", INITIALIZED)
            cluster.wait_for(lambda: states(bridge) == {"dra": 7, "to-dra": 1}, 60, "all but the held one have moved")
            pod.delete()
            cluster.wait_for(lambda: states(bridge) == {"dra": 8}, 60, "the last one moves when its pod has ended")
    finally:
        label(None, KARPENTER)
        label(None, INITIALIZED)
