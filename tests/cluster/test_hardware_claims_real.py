"""USB sticks of claims return with device numbers that other holders' containers can still open, on a real node.

The agent writes device numbers into the CDI files of claims. A file must not keep a number that the claim's USB stick
no longer has, and must not get a number that the container of another holder can still open.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import locks
from tests.cluster.node import Pod
from tests.cluster.test_hardware_real import Sticks, kill, sticks, swap
from tests.cluster.test_hardware_shared_real import ID
from tests.cluster.test_witnesses_real import Scene, claimer, resource, scene
from tests.scenarios.sides import named

__all__ = ["scene", "sticks"]

CREATED = "unresolvable CDI devices"
"""A part of containerd's error for a container whose CDI device is in no file."""


def two(scene: Scene, sticks: Sticks, other: str) -> tuple[Pod, Pod]:
    """Run a pod with USB stick B (minor number 2) and a pod with a claim of stick A (minor number 1); return both pods.

    other: whether the first pod has its stick by limits or by a claim.
    """
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
    """Wait until each pod holds the USB stick with its minor number in `wanted`, and no pod holds another stick."""

    def held() -> bool:
        scene.check()
        return {(one.uid, one.key) for one in locks.holders()} == {(pod.uid, key(at)) for pod, at in wanted.items()}

    scene.until(f"{[(pod.name, at) for pod, at in wanted.items()]}", held, limit)


def waits(scene: Scene, pod: Pod) -> None:
    """Wait until containerd refuses to create a pod's container, because the container's CDI device is in no file."""

    def created() -> bool:
        states = [one["state"] for one in pod.status.get("containerStatuses", ())]
        return any(CREATED in state.get("waiting", {}).get("message", "") for state in states)

    scene.until(f"the container of {pod.name} is not created", created, 60)
    assert pod.uid not in {one.uid for one in locks.holders()}


@pytest.mark.parametrize("other", ["limits", "claim"])
def test_a_claims_stick_comes_to_a_number_that_another_container_reaches(
    scene: Scene, sticks: Sticks, other: str
) -> None:
    """A claim's USB stick gets a number that another container can open: the claim's container waits for its end."""
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
    """The USB sticks of a claim and of another pod swap device numbers, and the containers are killed.

    A killed container starts only after the other container was killed. In the end each container has its own stick.
    first: the pod whose container is killed first, or both.
    """
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


def kill_sandbox(pod: Pod) -> None:
    """Kill the pause process of a pod's sandbox, which ends all the pod's containers."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (directory / "comm").read_text() == "pause\n" and pod.uid.replace("-", "_") in (
                directory / "cgroup"
            ).read_text().replace("-", "_"):
                os.kill(int(directory.name), signal.SIGKILL)


@pytest.mark.parametrize("what", ["agent", "kubelet", "sandbox"])
def test_what_runs_a_claims_container_is_killed_while_sticks_swap(scene: Scene, sticks: Sticks, what: str) -> None:
    """USB sticks swap numbers while agent, kubelet or sandboxes are killed: in the end each pod has its own stick."""
    another, user = two(scene, sticks, "claim")
    chance = random.Random(what)
    swap(sticks)
    kill(another, user)
    for _ in range(5):
        scene.observe(chance.choice([0.3, 1.0, 2.0, 3.0]))
        if what == "agent":
            scene.agents.kill()
            scene.agents.start()
        elif what == "kubelet":
            scene.end_kubelet("sigkill")
            scene.start_kubelet()
        else:
            kill_sandbox(user)
            kill_sandbox(another)
    until_held(scene, {another: 1, user: 2}, 240)
    scene.after = 2


def test_three_sticks_change_places(scene: Scene, sticks: Sticks) -> None:
    """Three held USB sticks exchange their numbers in a circle: each restarted container gets its own stick."""
    for minor, serial in enumerate("ABC", 1):
        sticks.plug(serial, minor)
    shares = {"a": "all", "b": "all", "c": "none"}
    scene.serve(*(resource(of, share, devices=[{"path": f"{ID}/{of.upper()}"}]) for of, share in shares.items()))
    for of in "ab":
        scene.agents.wait_offered(1, f"{of}.example.net")
    scene.cluster.wait_allocatable(named("c"), 1)
    pods = [scene.claimer("one", "a"), scene.claimer("two", "b"), scene.pod("three", "c")]
    scene.running(*pods)
    scene.before = 3
    sticks.pull(*"ABC")
    for minor, serial in enumerate("CAB", 1):
        sticks.plug(serial, minor)
    for pod in pods:
        scene.observe(2)
        kill(pod)
    until_held(scene, dict(zip(pods, (2, 3, 1), strict=True)), 240)
    scene.after = 3


def with_init(name: str, letter: str) -> dict[str, Any]:
    """Return a pod whose init container has the claim's device before its main container."""
    manifest = claimer(name, letter)
    (main,) = manifest["spec"]["containers"]
    manifest["spec"]["initContainers"] = [{**main, "name": "init", "command": ["/bin/true"]}]
    return manifest


def crashing(name: str, letter: str) -> dict[str, Any]:
    """Return a pod whose container ends by itself after some seconds."""
    manifest = claimer(name, letter)
    command = manifest["spec"]["containers"][0]["command"]
    command[2] = command[2].replace("while :; do sleep 2147483647 & wait $!; done", "sleep 4")
    assert "sleep 4" in command[2]
    return manifest


@pytest.mark.parametrize("kind", [with_init, crashing], ids=["init", "crashing"])
def test_sticks_swap_of_pods_with_other_containers(scene: Scene, sticks: Sticks, kind: Any) -> None:
    """After two USB sticks have swapped their device numbers, each pod gets its own stick again.

    init: the pods have init containers. crashing: the pods' containers end by themselves again and again.
    """
    sticks.plug("A", 1)
    sticks.plug("B", 2)
    scene.serve(*(resource(of, "all", devices=[{"path": f"{ID}/{of.upper()}"}]) for of in "ab"))
    for of in "ab":
        scene.agents.wait_offered(1, f"{of}.example.net")
    one, two = (scene.make(kind(name, of)) for name, of in (("one", "a"), ("two", "b")))
    scene.running(one, two)
    scene.before = 2
    swap(sticks)
    scene.observe(2)
    if kind is with_init:
        kill(one, two)
    until_own(scene, {one: 2, two: 1})
    scene.after = len(locks.holders())


def until_own(scene: Scene, wanted: Mapping[Pod, int]) -> None:
    """Wait until each pod has noted, since this call's begin, a lock on its minor number; no stick has two holders."""
    seen: set[str] = set()
    begun = len(locks.notes())

    def own() -> bool:
        scene.check()
        for note in locks.notes()[begun:]:
            for pod, at in wanted.items():
                if note.uid == pod.uid and note.key == key(at):
                    seen.add(note.uid)
        return seen == {pod.uid for pod in wanted}

    scene.until("each pod has its own stick", own, 400)
