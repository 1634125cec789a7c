"""No device has two holders where the agent looks at cgroups in which this kubelet's pods are not, on the real node.

The kubelet was started anew with `cgroupsPerQOS: false`: the `kubepods` of the one before is there, empty, and its pods
lie beside it. The agent is a process of the host, so it has no pod of its own by which it could tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cluster import locks
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_witnesses_real import LIMIT, Agents, Scene

scene = witnesses.scene  # a fixture

ADDRESS = "127.0.0.1:9478"


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    make_cluster()  # it makes the tree
    return make_cluster(kubelet_config={"cgroupsPerQOS": False})


@pytest.fixture(autouse=True)
def _observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agents, "metrics", ADDRESS)


def problems(scene: Scene) -> list[str]:
    return list(json.loads(scene.agents.page("/status"))["problems"])


def said(scene: Scene, pod: Pod) -> bool:
    return any(pod.uid in problem and "cgroupsPerQOS" in problem for problem in problems(scene))


@pytest.mark.parametrize("how", ["limits", "claim"])
def test_a_pod_that_hangs_keeps_its_device(scene: Scene, how: str) -> None:
    """It was deleted by force, and only its directory and its process are left."""
    scene.begin(a=(1, "none" if how == "limits" else "all"))
    pod = scene.pod("a0", "a") if how == "limits" else scene.claimer("a0", "a")
    scene.running(pod)
    scene.before = len(locks.holders())
    if how == "limits":
        scene.until("it is said", lambda: said(scene, pod))
    scene.hang(pod)
    scene.wants("pod" if how == "limits" else "claim", "a", scheduled=True)
    scene.observe(15)
    assert [one.pod for one in locks.holders()] == ["a0"]
    scene.handed_on(scene.thaw, [pod.uid], "wants-a", limit=90)
