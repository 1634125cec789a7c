"""A USB stick has one holder if the config names it by serial number and by port, and if sticks swap device numbers.

Links by serial number and by port appear at different times. A stick can move into a port that another pod holds.
"""

from __future__ import annotations

import signal

import pytest

from tests.cluster import locks
from tests.cluster.node import Pod
from tests.cluster.test_hardware_real import (
    FORMS,
    Sticks,
    await_file,
    has_own,
    holder,
    kill,
    sticks,
    swap,
    swapped,
    two_pods,
    until_taken,
)
from tests.cluster.test_witnesses_real import LIMIT, Scene, claimer, plain, resource, scene
from tests.scenarios.sides import named

__all__ = ["scene", "sticks"]

ID, PORT = (f"{locks.NODES}/{links}" for links in ("by-id", "by-path"))


def serve(scene: Scene, form: str, **paths: list[str]) -> None:
    """Serve resources with these paths, and wait until the agent is registered."""
    share = "all" if form == "claim" else "none"
    scene.serve(*(resource(letter, share, devices=[{"path": of} for of in each]) for letter, each in paths.items()))
    scene.agents.wait_registered()


def wants(scene: Scene, form: str, letter: str) -> None:
    """Start a pod for a device of a resource; the pod must not get a device while it is in `scene.waiting`."""
    manifest = claimer("wants", letter) if form == "claim" else plain("wants", letter)
    scene.waiting["wants"] = manifest
    scene.make(manifest)


def only_holder(name: str) -> None:
    assert {one.pod for one in locks.holders()} == {name}, locks.holders()


@pytest.mark.parametrize("first", ["both", "by-id", "by-path"])
@pytest.mark.parametrize("entries", ["of two resources", "of one resource"])
@pytest.mark.parametrize("form", FORMS)
def test_a_stick_with_two_names_comes_back(scene: Scene, sticks: Sticks, form: str, entries: str, first: str) -> None:
    """A USB stick with a by-id and a by-path name returns under another number: no other pod gets the stick.

    entries: one resource has both names, or each of two resources has one name. first: the link that udev makes first.
    """
    sticks.plug("A", 1)
    two = entries == "of two resources"
    serve(scene, form, **({"a": [f"{ID}/*"], "b": [f"{PORT}/*"]} if two else {"a": [f"{ID}/*", f"{PORT}/*"]}))
    holder(scene, form, "holder")
    scene.before = scene.after = 1
    wants(scene, form, "b" if two else "a")
    scene.observe(2)
    for minor in range(2, 5):
        sticks.pull("A")
        scene.observe(1.2 if minor % 2 else 0.2)
        sticks.plug("A", minor, links=("by-id", "by-path") if first == "both" else (first,))
        scene.observe(1.5)
        only_holder("holder")
        if first != "both":
            sticks.link("A", "by-path" if first == "by-id" else "by-id")
            scene.observe(1.0)
            only_holder("holder")


def refused(pod: Pod, text: str) -> bool:
    """Return whether a container of a pod waits to start, with a message that contains this text."""
    return any(
        text in one["state"].get("waiting", {}).get("message", "") for one in pod.status.get("containerStatuses", ())
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_stick_moves_into_the_port_of_another_pod(scene: Scene, sticks: Sticks, form: str) -> None:
    """A held USB stick moves into a port that another pod holds: neither pod gets it there; each gets its own back."""
    sticks.plug("A", 1)
    sticks.plug("T", 2)
    serve(scene, form, a=[f"{ID}/A"], b=[f"{PORT}/port-T"])
    one = holder(scene, form, "one")
    two = scene.claimer("two", "b") if form == "claim" else scene.pod("two", "b")
    scene.running(one, two)
    scene.before = 2
    sticks.pull("A", "T")
    sticks.plug("A", 3, "port-T")
    kill(one, two)
    scene.observe(5)
    if form == "limits":
        scene.until("neither starts", lambda: all(refused(pod, "are the same hardware") for pod in (one, two)), 60)
    assert f"{locks.MAJOR:x}.3" not in {each.key for each in locks.holders()}
    sticks.pull("A")
    sticks.plug("A", 4)
    sticks.plug("T", 5)
    for pod, minor in ((one, 4), (two, 5)):
        await_file(scene, form, pod, minor)
        if form == "claim":
            kill(pod)
        wanted = f"{locks.MAJOR:x}.{minor:x}", pod.uid

        def has(wanted: tuple[str, str] = wanted) -> bool:
            return wanted in {(each.key, each.uid) for each in locks.holders()}

        scene.until(f"{pod.name} has its device again", has, 120)
    scene.check()
    scene.after = 2


def test_one_of_two_containers_restarts_whose_sticks_have_swapped(scene: Scene, sticks: Sticks) -> None:
    """Two held USB sticks swap their numbers: a killed container starts again only after the other one has ended."""
    pods, had = swapped(scene, sticks, "limits")
    kill(pods[0])
    scene.until("the container does not start", lambda: refused(pods[0], "are the same hardware"), 60)
    scene.observe(3)
    assert {one.uid for one in locks.holders()} == {pods[1].uid}
    kill(pods[1])

    scene.until("each pod has its own stick", lambda: has_own(pods, had), 120)
    scene.after = 2


@pytest.mark.parametrize("after", ["by-path", "by-id"])
@pytest.mark.parametrize("form", FORMS)
def test_the_config_names_a_held_stick_anew_while_it_is_away(
    scene: Scene, sticks: Sticks, form: str, after: str
) -> None:
    """The config renames a held USB stick that is away: after its return no other pod gets it until its holder ends."""
    names = {"by-id": f"{ID}/*", "by-path": f"{PORT}/*"}
    sticks.plug("A", 1)
    serve(scene, form, a=[names["by-id" if after == "by-path" else "by-path"]])
    pod = holder(scene, form, "holder")
    scene.before = 1
    sticks.pull("A")
    scene.observe(1)
    scene.agents.resources[0] = {**scene.agents.resources[0], "devices": [{"path": names[after]}]}
    scene.agents.write()
    scene.until("the agent has the new path", lambda: "was read again: changed" in scene.agents.log(), LIMIT)
    sticks.plug("A", 2)
    wants(scene, form, "a")
    scene.observe(6)
    only_holder("holder")
    pod.delete()
    until_taken(scene)
    scene.after = 1


def with_init(scene: Scene, form: str, name: str) -> Pod:
    """Start a pod with limits whose init container has the device before its main container."""
    limits = {named("a"): 1}
    init = {**locks.container("init", limits), "command": ["/bin/true"]}
    pod = scene.make(locks.pod(name, locks.container(limits=limits), initContainers=[init]))
    scene.running(pod)
    return pod


def test_sticks_of_init_containers_swap(scene: Scene, sticks: Sticks) -> None:
    """Init and main containers of a pod share a USB stick; after a swap of numbers each pod has its own stick again."""
    pods, had = two_pods(scene, sticks, "limits", start=with_init)
    swap(sticks)
    kill(*pods)
    scene.until("each pod has its own stick", lambda: has_own(pods, had), 120)
    scene.after = 2


def test_sticks_with_plain_numbers_swap(scene: Scene, sticks: Sticks) -> None:
    """USB sticks that the config names by ttyUSB nodes swap: a restarted container fails; it gets no other stick."""
    pods, _ = two_pods(scene, sticks, "limits", "ttyUSB*")
    swap(sticks)
    kill(pods[0])
    scene.until("the container does not start", lambda: refused(pods[0], "is not what its holder was given"), 60)
    assert {one.uid for one in locks.holders()} == {pods[1].uid}
    scene.after = 1


def test_an_agent_starts_with_other_names_and_sticks_swap(scene: Scene, sticks: Sticks) -> None:
    """The config renames two held USB sticks, which then swap: a killed container waits for the other one's end."""
    pods, had = two_pods(scene, sticks, "limits")
    scene.agents.stop()
    scene.agents.resources[0] = {**scene.agents.resources[0], "devices": [{"path": f"{PORT}/*"}]}
    scene.agents.write()
    scene.agents.start()
    scene.agents.wait_registered()
    swap(sticks)
    kill(pods[0])
    scene.until("the container does not start", lambda: refused(pods[0], "are the same hardware"), 60)
    kill(pods[1])
    scene.until("each pod has its own stick", lambda: has_own(pods, had), 120)
    scene.after = 2


@pytest.mark.parametrize("agent", ["killed", "stopped"])
def test_an_agent_that_has_not_seen_the_sticks_yet_does_not_answer(scene: Scene, sticks: Sticks, agent: str) -> None:
    """While an agent that started without the held USB sticks is killed or hangs, no killed container starts again.

    The sticks return with swapped numbers, and one of two containers is killed. The kubelet calls the agent's
    PreStartContainer before each start of a container. After the agent runs again, each container gets its own stick.
    """
    pods, had = two_pods(scene, sticks, "limits")
    scene.agents.kill()
    sticks.pull("A", "B")
    scene.agents.start()
    scene.agents.wait_registered()
    scene.observe(2)
    process = scene.agents.process
    assert process is not None
    if agent == "killed":
        scene.agents.kill()
    else:
        process.send_signal(signal.SIGSTOP)
    sticks.plug("B", 1)
    sticks.plug("A", 2)
    kill(pods[0])
    scene.observe(12)
    assert {one.uid for one in locks.holders()} == {pods[1].uid}
    if agent == "killed":
        scene.agents.start()
        scene.agents.wait_registered()
    else:
        process.send_signal(signal.SIGCONT)
    kill(pods[1])
    scene.until("each pod has its own stick", lambda: has_own(pods, had), 120)
    scene.after = 2
