"""What a cluster autoscaler finds on the real API server in each state of a migration: judged by its model.

Agents and `dra-bridge rollout` are real; Nodes and kubelets are not (`tests.cluster.group`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED
from tests.autoscaler import Verdict, stops
from tests.cluster.group import DEVICES, Group
from tests.cluster.node import Cluster

RESOURCE, DRIVER = "example.net/card", "card.example.net"
COUNT = 3
BUSY = [3] * COUNT
"""Of four devices and CPUs of each node, what its pods use."""
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
    """None without slices, none with empty ones, a mixed group, partial, moving, all, and back: no used node is idle or
    unready, and nothing is left of the marks."""
    names = [node.name for node in group.nodes]

    # None, without slices: agents that serve no claims change nothing for the autoscaler.
    assert group.slices() == {}
    assert group.verdicts() == ALL_USED

    # A mixed group, and moving: the first node holds its move up, the others have empty slices.
    status, out = group.rollout("--share", "2", "--timeout-per-node", "3")
    assert status == 1, out
    assert f"stopped: {names[0]}: not done after 3 s" in out
    assert group.annotations() == [MARKS] * COUNT
    assert set(group.slices()) == set(names)
    assert group.slices()[names[1]] == 0
    assert group.verdicts() == ALL_DISABLED

    # What a rollout that went on later finds: it is interrupted no more, and undone here. None again.
    status, out = group.rollout("--undo")
    assert status == 0, out
    group.until(lambda: not group.slices(), "no node has a slice")
    assert group.annotations() == [{}] * COUNT
    assert group.verdicts() == ALL_USED

    # Partial: one device of each node moves, the pods keep the others.
    status, out = group.rollout("--share", "1", "--max-unavailable", str(COUNT))
    assert status == 0, out
    assert f"{COUNT} nodes stay marked {SCALE_DOWN_DISABLED}" in out
    group.until(lambda: group.slices() == dict.fromkeys(names, 1), "each slice has a device")
    assert group.annotations() == [MARKS] * COUNT
    assert group.verdicts() == ALL_DISABLED
    _, shown = group.run("status", "--driver", DRIVER)
    assert shown.count("It is never scaled down while it is so") == COUNT

    # All: the pods use claims then, and the nodes are judged by them.
    group.end_pods()
    status, out = group.rollout("--share", "all", "--max-unavailable", str(COUNT), "--take-over")
    assert status == 0, out
    group.until(lambda: group.slices() == dict.fromkeys(names, DEVICES), "each slice has all devices")
    assert group.annotations() == [{}] * COUNT
    group.start_pods(BUSY, claims=True)
    assert group.verdicts() == ALL_USED

    # Back at none.
    group.end_pods()
    status, out = group.rollout("--share", "none", "--max-unavailable", str(COUNT), "--take-over")
    assert status == 0, out
    assert group.slices() == {}
    assert group.annotations() == [{}] * COUNT


def test_what_the_model_warns_of_is_what_one_node_alone_does(group: Group) -> None:
    """`migrate` moves devices of one node without its group: the others are unready, that one is judged by a slice."""
    status, out = group.run("migrate", group.nodes[0].name, "--driver", DRIVER, "--share", "1", "--wait")
    assert status == 0, out
    group.until(lambda: group.slices() == {group.nodes[0].name: 1}, "one node has a slice")
    assert group.verdicts() == [Verdict.IDLE, Verdict.UNREADY, Verdict.UNREADY]
    assert not stops(dict(zip([node.name for node in group.nodes], group.verdicts(), strict=True)))
    # A rollout of the same share puts that right.
    status, out = group.rollout("--share", "1", "--max-unavailable", str(COUNT))
    assert status == 0, out
    assert group.verdicts() == ALL_DISABLED
