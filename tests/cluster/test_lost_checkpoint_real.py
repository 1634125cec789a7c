"""Running pods run on and keep their devices after the kubelet has lost its checkpoint and restarts.

All devices are held, so the kubelet has no free device for a pod that it admits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import locks
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_witnesses_real import Scene, claimer, unbroken
from tests.scenarios.sides import named

LOG_LINKS = Path("/var/log/containers")


@pytest.fixture
def scene(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Scene]:
    yield from unbroken(Scene(cluster, request.node.name.removeprefix("test_")))


def restart(scene: Scene, agent: str, *, lost: bool) -> None:
    """Restart the kubelet. The agent runs on (`kept`), or starts `before` or `after` the kubelet."""
    line = f"{named('a')}: the kubelet listens"
    scene.end_kubelet("sigkill")
    if lost:
        scene.lose_checkpoint()
    if agent != "kept":
        scene.kill_agent()
    listened = scene.agents.log().count(line) if agent == "kept" else 0
    if agent == "before":
        scene.agents.start()
    scene.start_kubelet()
    if agent == "after":
        scene.agents.start()
    scene.until("the kubelet listens", lambda: scene.agents.log().count(line) > listened, 60)


@pytest.mark.parametrize("agent", ["kept", "before", "after"])
def test_running_pods_run_on(scene: Scene, agent: str) -> None:
    """After the checkpoint's loss pods run on; a new pod gets no device, although the kubelet counts all as free.

    With `kept`, the kubelet restarts twice more, with a new checkpoint that lacks the pods, and the pods still run on.
    If no agent ran, the kubelet would report no capacity, and end the pods at its next restart.
    """
    scene.begin(a=(2, "none"))
    pods = [scene.pod(f"a{number}", "a") for number in range(2)]
    scene.running(*pods)
    scene.note_holders()
    for turn in range(3 if agent == "kept" else 1):
        restart(scene, agent, lost=turn == 0)
        scene.observe(6)
        scene.cluster.wait_reported()
        assert [pod.phase for pod in pods] == ["Running"] * 2, "\n".join(map(Pod.explain, pods))
        assert all(locks.pids(pod.uid) for pod in pods)
        scene.cluster.wait_allocatable(named("a"), 2)
    new = scene.pod("new", "a", nodeName=scene.cluster.node_name)
    scene.until("the new pod is refused", lambda: new.phase == "Failed", 60)
    scene.observe(2)
    assert {one.uid for one in locks.holders()} == {pod.uid for pod in pods}


def test_a_pod_whose_log_link_lacks_the_container_id_keeps_its_device(scene: Scene) -> None:
    """No claim gets the device of a running container whose log link ends in text from the container's name."""
    scene.begin(a=(1, "none"))
    pod, container = "p" * 210, "c" * 15 + "-0123456789abcdef"
    held = scene.make(locks.pod(pod, locks.container(container, {named("a"): 1})))
    scene.running(held)
    assert (LOG_LINKS / f"{pod}_default_{container}.log").is_symlink()
    scene.note_holders()
    restart(scene, "kept", lost=True)
    scene.cluster.wait_reported()
    scene.share(a="all")
    scene.wait(claimer("claims", "a"))
    scene.observe(20)
    assert {one.uid for one in locks.holders()} == {held.uid}
    scene.handed_to_anybody(held)
