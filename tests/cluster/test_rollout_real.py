"""`dra-bridge rollout` over a group of nodes of the real API server: kills after each write, and an API server restart.

Agents and `rollout` are real. Nodes and kubelets are simulated (`tests.cluster.group`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED
from dra_bridge.rollout.progress import share_annotation
from tests.cluster.group import DEVICES, LABEL, Group
from tests.cluster.node import Cluster

RESOURCE, DRIVER = "example.net/card", "card.example.net"
COUNT = 3
SHARE = share_annotation(DRIVER)
MOST = 40
"""Maximum runs of a rollout that is killed after each write: many more than the rollout's writes."""
FORMER: tuple[dict[str, str], ...] = (
    {SCALE_DOWN_DISABLED: "true", "example.net/note": "of an administrator"},
    {SHARE: "none"},
    {},
)
"""The annotations of three Nodes before the rollout: an administrator's, a request of no devices for claims, none."""


@pytest.fixture
def group(cluster: Cluster) -> Iterator[Group]:
    """Nodes with the annotations of FORMER, whose agents have read them."""
    if cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    with Group.running(cluster, RESOURCE, DRIVER, COUNT) as running:
        for node, annotations in zip(running.nodes, FORMER, strict=True):
            cluster.api.patch("Node", node.name, {"metadata": {"annotations": annotations, "labels": {"of": "them"}}})
        name = running.nodes[1].name
        running.until(lambda: running.report(name).get("requested") == "none", "the agent knows the requested share")
        yield running


def metadata(group: Group) -> list[dict[str, Any]]:
    """Return labels and annotations of all nodes, without those of Kubernetes' own controllers."""
    kept = ("labels", "annotations")
    return [
        {
            part: {
                key: text for key, text in (node["metadata"].get(part) or {}).items() if ".alpha.kubernetes" not in key
            }
            for part in kept
        }
        for node in group.objects()
    ]


def started(group: Group, *arguments: str) -> subprocess.Popen[str]:
    """Start a rollout over the group."""
    command = [sys.executable, "-m", "dra_bridge", "rollout", "--driver", DRIVER, "-l", f"{LABEL}={group.label}"]
    command += [*arguments, "--kubeconfig", str(group.cluster.kubeconfig)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a rollout; return its status and output."""
    try:
        out, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    print(f"--- {process.args!r}: {process.returncode}\n{out}")
    return process.returncode, out


def killed_again_and_again(group: Group, look: Callable[[], None], *arguments: str) -> int:
    """Run a rollout again and again, and kill it after its first change of a Node, until it succeeds.

    Call `look` after each run. Return the number of runs.
    """
    for number in range(1, MOST):
        before = metadata(group)
        process = started(group, *arguments)

        def over(process: subprocess.Popen[str] = process, before: list[dict[str, Any]] = before) -> bool:
            return process.poll() is not None or metadata(group) != before

        group.until(over, "the rollout writes or ends", 120)
        process.kill()
        status, out = result(process)
        look()
        if status >= 0:
            assert status == 0, out
            return number
    raise AssertionError(f"the rollout did not end in {MOST} runs")


def test_a_rollout_that_is_killed_after_each_write(group: Group) -> None:
    """A rollout that is killed after each write continues when it is run again, one node at a time.

    `--undo`, killed in the same way, restores the labels and annotations of every node.
    """
    former = metadata(group)
    names = [node.name for node in group.nodes]

    def look() -> None:
        """Check that at most one node has begun to move devices and has not finished."""
        wanted = [(node["metadata"].get("annotations") or {}).get(SHARE) for node in group.objects()]
        moving = [
            name
            for name, share in zip(names, wanted, strict=True)
            if share == "all" and group.report(name)["resources"][RESOURCE]["counts"] != {"dra": DEVICES}
        ]
        assert len(moving) <= 1, moving

    runs = killed_again_and_again(group, look, "--share", "all")
    assert runs > COUNT  # The rollout was killed at least once for each node.
    group.until(lambda: group.slices() == dict.fromkeys(names, DEVICES), "each slice has all devices")
    administrators = {SCALE_DOWN_DISABLED: "true"}
    assert group.annotations() == [administrators, {}, {}]
    assert killed_again_and_again(group, lambda: None, "--undo") > COUNT
    assert metadata(group) == former
    group.until(lambda: group.slices() == {}, "the devices are where they were")


def test_a_rollout_outlasts_a_restart_of_the_api_server(group: Group) -> None:
    """The API server restarts after the first node has begun: the rollout still succeeds, and can be undone."""
    former = metadata(group)
    names = [node.name for node in group.nodes]
    process = started(group, "--share", "all")
    try:

        def begun() -> bool:
            return any((node["metadata"].get("annotations") or {}).get(SHARE) == "all" for node in group.objects())

        group.until(begun, "a node has begun")
        group.cluster.stop_apiserver()
        line = next((text for text in process.stdout or () if "the API server does not answer" in text), "")
        assert line, "the rollout did not notice it"
        group.cluster.start_apiserver()
    finally:
        status, out = result(process)
    assert status == 0, out
    group.until(lambda: group.slices() == dict.fromkeys(names, DEVICES), "each slice has all devices")
    status, out = group.rollout("--undo")
    assert status == 0, out
    assert metadata(group) == former
