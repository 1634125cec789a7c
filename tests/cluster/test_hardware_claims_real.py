"""Claims whose sticks come back at numbers that other holders still reach, as kubelet, containerd and kernel see it.

The agent writes device numbers into the CDI files of claims. It must neither leave a number there that the claim's
stick no longer has, nor write one there that the container of another holder can still reach.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.cluster import locks
from tests.cluster.node import Pod
from tests.cluster.test_hardware_real import Sticks, kill, sticks, swap
from tests.cluster.test_hardware_shared_real import ID
from tests.cluster.test_witnesses_real import Scene, resource, scene
from tests.scenarios.sides import named

__all__ = ["scene", "sticks"]

CREATED = "unresolvable CDI devices"
"""What containerd says when it creates a container whose CDI device is in no file."""


def two(scene: Scene, sticks: Sticks, other: str) -> tuple[Pod, Pod]:
    """Run a pod with stick B at 2, by limits or claim, and the pod of a claim with stick A at 1; return both."""
    sticks.plug("A", 1)
    sticks.plug("B", 2)
    share = "all" if other == "claim" else "none"
    scene.serve(
        resource("a", share, devices=[{"path": f"{ID}/B"}]), resource("b", "all", devices=[{"path": f"{ID}/A"}])
    )
    scene.agents.wait_offered(1, "b.example.net")
    if other == "claim":
        scene.agents.wait_offered(1, "a.example.net")
    else:
        scene.cluster.wait_allocatable(named("a"), 1)
    pods = scene.claimer("other", "a") if other == "claim" else scene.pod("other", "a"), scene.claimer("user", "b")
    scene.running(*pods)
    scene.before = 2
    return pods


def key(minor: int) -> str:
    return f"{locks.MAJOR:x}.{minor:x}"


def until_held(scene: Scene, wanted: Mapping[Pod, int], limit: float = 120) -> None:
    """Wait until each pod has the stick with its number, and no pod has another."""

    def held() -> bool:
        scene.check()
        return {(one.uid, one.key) for one in locks.holders()} == {(pod.uid, key(at)) for pod, at in wanted.items()}

    scene.until(f"{[(pod.name, at) for pod, at in wanted.items()]}", held, limit)


def waits(scene: Scene, pod: Pod) -> None:
    """Wait until containerd does not create a pod's container because its CDI device is in no file."""

    def created() -> bool:
        states = [one["state"] for one in pod.status.get("containerStatuses", ())]
        return any(CREATED in state.get("waiting", {}).get("message", "") for state in states)

    scene.until(f"the container of {pod.name} is not created", created, 60)
    assert pod.uid not in {one.uid for one in locks.holders()}


@pytest.mark.parametrize("other", ["limits", "claim"])
def test_a_claims_stick_comes_to_a_number_that_another_container_reaches(
    scene: Scene, sticks: Sticks, other: str
) -> None:
    """The claim's container does not start until the other container has restarted at its stick's new number."""
    another, user = two(scene, sticks, other)
    sticks.pull("B")
    scene.observe(1)
    sticks.plug("B", 3)
    scene.observe(2)
    sticks.pull("A")
    scene.observe(1)
    sticks.plug("A", 2)
    scene.observe(3)
    kill(user)
    waits(scene, user)
    scene.observe(3)
    kill(another)
    until_held(scene, {another: 3, user: 2})
    scene.after = 2


@pytest.mark.parametrize("first", ["user", "other", "both"])
@pytest.mark.parametrize("other", ["limits", "claim"])
def test_the_stick_of_a_claim_swaps_its_number(scene: Scene, sticks: Sticks, other: str, first: str) -> None:
    """Each container has its own stick after both have restarted, in any order; none before the other has ended."""
    another, user = two(scene, sticks, other)
    swap(sticks)
    scene.observe(3)
    order = {"user": [user, another], "other": [another, user], "both": []}[first]
    if order:
        kill(order[0])
        scene.observe(5)
        assert {one.uid for one in locks.holders()} == {order[1].uid}
        kill(order[1])
    else:
        kill(another, user)
    until_held(scene, {another: 1, user: 2}, 180)
    scene.after = 2
