"""No device has two holders although the agent reads a cgroup tree that does not contain this kubelet's pods.

The kubelet was restarted with `cgroupsPerQOS: false`: the former cgroup `kubepods` is left, empty, and the new pods'
cgroups are beside it. The agent is a process of the host, so it has no pod of its own that would show the right tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cluster import locks
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_witnesses_real import LIMIT, Agents, Scene, claimer, plain
from tests.scenarios.sides import named

scene = witnesses.scene  # a fixture

ADDRESS = "127.0.0.1:9478"


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    make_cluster()  # a kubelet with default options creates the cgroup tree
    return make_cluster(kubelet_config={"cgroupsPerQOS": False})


@pytest.fixture(autouse=True)
def _observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agents, "metrics", ADDRESS)


def problems(scene: Scene) -> list[str]:
    return list(json.loads(scene.agents.page("/status"))["problems"])


def said(scene: Scene, pod: Pod) -> bool:
    """Return whether the agent reports that it does not see the pod's cgroup, and names cgroupsPerQOS."""
    names = {pod.uid, f"default/{pod.name}"}
    return any("cgroupsPerQOS" in problem and any(name in problem for name in names) for problem in problems(scene))


@pytest.mark.parametrize("how", ["limits", "claim"])
def test_a_pod_that_hangs_keeps_its_device(scene: Scene, how: str) -> None:
    """A pod is deleted by force, but its process hangs: no other pod gets its device before the process ends."""
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


def test_a_pod_that_ends_gives_its_device_on(scene: Scene) -> None:
    """Deleted pods' devices go to waiting pods; a completed pod is reported and keeps its device until its deletion."""
    scene.begin(a=(1, "none"), b=(1, "all"))
    pod, user = scene.pod("a0", "a"), scene.claimer("b0", "b")
    scene.running(pod, user)
    scene.before = len(locks.holders())
    scene.wait(plain("wants-a", "a", restartPolicy="Never"))
    scene.wait(claimer("wants-b", "b"))
    scene.handed_on(pod.delete, [pod.uid], "wants-a")
    scene.handed_on(user.delete, [user.uid], "wants-b")
    last = scene.cluster.pod("wants-a")
    scene.wants("pod", "a", "later", scheduled=True)
    scene.end_container(last)
    scene.cluster.wait_for(lambda: scene.cluster.pod("wants-a").phase in ("Succeeded", "Failed"), LIMIT, "it is over")
    scene.until("it is said", lambda: said(scene, last))
    last.delete()

    def next_has_it() -> bool:
        scene.urge()
        return any(one.pod == "later" for one in locks.holders())

    scene.until("the next pod has it", next_has_it, 60)
    scene.waiting.clear()


def test_cgroups_end_while_pods_run_in_them(scene: Scene, make_cluster: Callable[..., Cluster]) -> None:
    """A pod in the cgroup tree ends: a waiting pod gets its device. A hanging pod outside the tree keeps its device."""
    make_cluster()
    scene.begin(a=(2, "none"))
    former = scene.pod("a0", "a")
    scene.running(former)
    make_cluster(kubelet_config={"cgroupsPerQOS": False})
    scene.cluster.wait_allocatable(named("a"), 2)
    pod = scene.pod("a1", "a")
    scene.running(pod)
    scene.before = len(locks.holders())
    scene.until("it is said", lambda: said(scene, pod))
    scene.hang(pod)
    scene.wants("pod", "a", scheduled=True)
    scene.observe(10)
    assert {one.pod for one in locks.holders()} == {"a0", "a1"}
    scene.handed_on(former.delete, [former.uid], "wants-a", limit=60)
    scene.thaw()


def test_a_cgroup_that_is_made_later_ends_no_pod(scene: Scene, make_cluster: Callable[..., Cluster]) -> None:
    """A pod outside the cgroup tree keeps its device after a kubelet restart creates an empty cgroup for the pod."""
    scene.begin(a=(1, "none"))
    pod = scene.make(plain("a0", "a", ignores_term=True, terminationGracePeriodSeconds=40))
    scene.running(pod)
    scene.before = len(locks.holders())
    scene.until("it is said", lambda: said(scene, pod))
    make_cluster()
    scene.cluster.wait_allocatable(named("a"), 1)
    scene.wants("pod", "a")
    scene.handed_on(lambda: pod.delete(0), [pod.uid], "wants-a", limit=90)
