"""No device has two holders when components die or hang, shares change often, devices are plugged, or names are odd.

A share is the number of a resource's devices for claims. The fixture `scene` is that of
``tests.cluster.test_witnesses_real``; ``tests.cluster.locks`` notices two holders of one device. With CLUSTER_LONG in
the environment the scenarios last longer.
"""

from __future__ import annotations

import os
import random
import signal
import stat

import pytest

from tests.cluster import locks
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.test_witnesses_real import LIMIT, Scene, claimer, plain, resource
from tests.scenarios.sides import LONG, end_one_of_each, named

scene = witnesses.scene  # a fixture

ODD_NAMES = (
    *("UPPER", "upper", "with space", "two  spaces ", "tab\there", "line\nbreak", "ümlaut", "日本語", "e\u0301"),
    *("quote'", 'quote"', "back\\slash", "star*", "question?", "[abc]", "{a,b}", "$HOME", "`id`", "a;b", "#1", "%41"),
    *("-dash", "a:b", "a,b", "a=b", "a::3", "x" * 200),
)


# --- components that die or hang -------------------------------------------------------------------------------------


def test_components_are_killed_at_many_points(scene: Scene) -> None:
    """Agent, kubelet and containerd are killed while devices move and pods come and go: no device has two holders.

    In the end pods with limits and pods with claims get devices again.
    """
    cluster, chance = scene.cluster, random.Random(11)
    pods = [pod for kind in scene.both() for pod in kind]
    for number in range(2, 32 if LONG else 6):
        scene.share(a=chance.choice(("none", 1, "all")), b=chance.choice(("none", 1, "all")))
        pods.pop(chance.randrange(len(pods))).delete()
        make, letter = chance.choice(((scene.pod, "a"), (scene.claimer, "b")))
        pods.append(make(f"{letter}{number}", letter))
        scene.observe(chance.uniform(0, 1))
        victims = chance.sample(("agent", "kubelet", "containerd"), chance.choice((1, 1, 2, 3)))
        for name in victims:
            scene.agents.kill() if name == "agent" else cluster.kill(name)
        scene.observe(chance.uniform(0, 1))
        if "containerd" in victims:
            cluster.start_component("containerd")
            # A kubelet ends at once without containerd.
            cluster.wait_for(lambda: cluster._ctr("version").returncode == 0, LIMIT, "containerd answers")
        for name in victims:
            if name == "agent":
                scene.agents.start()
            elif name == "kubelet":
                cluster.start_kubelet()
    scene.share(a="none", b="all")
    for pod in pods:
        pod.delete()
    for name in scene.waiting:
        cluster.pod(name).delete()
    scene.waiting = {"last-a": plain("last-a", "a"), "last-b": claimer("last-b", "b")}
    for manifest in scene.waiting.values():
        scene.make(manifest)

    def served() -> bool:
        scene.check()
        scene.urge()
        return {one.pod for one in locks.holders()} == scene.waiting.keys()

    cluster.wait_for(served, 120, "pods of both kinds get devices again")


def test_containerd_is_killed(scene: Scene) -> None:
    """While containerd is dead, devices stay with their containers; the devices move once the containers have ended."""
    plains, claimers = scene.both()
    ending = [plains[0], claimers[0]]
    scene.cluster.kill("containerd")
    for pod in ending:
        pod.delete()
    scene.observe(5)
    assert all(locks.pids(pod.uid) for pod in ending)
    uids = [pod.uid for pod in ending]
    scene.handed_on(lambda: scene.cluster.start_component("containerd"), uids, "wants-a", "wants-b", limit=60)


def test_agent_hangs(scene: Scene) -> None:
    """An agent hangs while holders end and the kubelet restarts: once it continues, waiting pods get the devices."""
    plains, claimers = scene.both()
    agent = scene.agents.process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)
    scene.stack.callback(agent.send_signal, signal.SIGCONT)
    ending = [plains[0], claimers[0]]
    for pod in ending:
        pod.delete()
    scene.cluster.restart_kubelet()
    scene.observe(30 if LONG else 6)
    uids = [pod.uid for pod in ending]
    scene.handed_on(lambda: agent.send_signal(signal.SIGCONT), uids, "wants-a", "wants-b", limit=60)
    scene.observe(3)


def test_agents_overlap(scene: Scene) -> None:
    """A second agent waits for the first agent's end, then knows the held devices and moves them when free."""
    plains, claimers = scene.both()
    for end in ("killed", "terminated") if LONG else ("killed",):
        scene.agents.start_another()
        scene.cluster.wait_for(lambda: "standing by" in scene.agents.log(), LIMIT, "the second agent stands by")
        scene.observe(2)
        if end == "killed":
            scene.agents.former[0].kill()
        scene.agents.stop_former()
        scene.agents.wait_registered()
        scene.observe(3)
    end_one_of_each(scene, plains, claimers)


# --- shares and devices that change ----------------------------------------------------------------------------------


def test_share_flaps(scene: Scene) -> None:
    """No held device gets another holder while the share (devices for claims) changes often; the last share counts."""
    plains, claimers = scene.both()

    def annotate(letter: str, share: str | None) -> None:
        """Request a share (devices for claims) as `dra-bridge migrate` does."""
        body = {"metadata": {"annotations": {f"{letter}.example.net/dra-share": share}}}
        path = f"/api/v1/nodes/{scene.cluster.node_name}"
        scene.cluster.api.request("PATCH", path, body, content_type="application/merge-patch+json")

    for letter in "ab":
        scene.stack.callback(annotate, letter, None)
    ending, staying = [plains[0], claimers[0]], {plains[1].uid, claimers[1].uid}
    for number in range(120 if LONG else 24):
        annotate("a", ("none", "all")[number % 2])
        annotate("b", ("all", "none")[number % 2])
        scene.observe(0.25 if LONG else 0.5)
        if number == 11:
            for pod in ending:
                pod.delete()
    scene.handed_on(lambda: None, [pod.uid for pod in ending], "wants-a", "wants-b", limit=60)
    assert staying < {one.uid for one in locks.holders()}


def test_hot_plug(scene: Scene) -> None:
    """Held devices that are unplugged and plugged in again stay with their holders, also if they are to move."""
    plains, claimers = scene.both()
    numbers = {path: path.stat().st_rdev for letter in "ab" for path in sorted((locks.NODES / letter).iterdir())}

    def unplug() -> None:
        for path in numbers:
            path.unlink()

    def plug() -> None:
        for path, number in numbers.items():
            os.mknod(path, stat.S_IFCHR | 0o600, number)

    def plugged(**states: int) -> None:
        unplug()
        scene.cluster.wait_for(lambda: not (scene.states("a") or scene.states("b")), LIMIT, "the devices are gone")
        scene.observe(3)
        plug()
        for letter, state in zip("ab", states, strict=True):
            scene.wait_states(letter, **{state: states[state]})

    plugged(to_dra=2, to_plugin=2)
    scene.share(a="none", b="all")
    scene.wait_states("a", plugin=2)
    scene.wait_states("b", dra=2)
    plugged(plugin=2, dra=2)
    scene.observe(2)
    scene.share(a="all", b="none")
    scene.wait_states("a", to_dra=2)
    scene.wait_states("b", to_plugin=2)
    unplug()
    ending = [plains[0], claimers[0]]

    def end() -> None:
        for pod in ending:
            pod.delete()
        plug()

    scene.handed_on(end, [pod.uid for pod in ending], "wants-a", "wants-b", limit=60)
    scene.observe(3)


@pytest.mark.parametrize("moving", [False, True], ids=["at-rest", "moving"])
def test_replicas_change_while_held(scene: Scene, moving: bool) -> None:
    """A config change adds replicas to a held device: the device goes to no other pod before its holder ends."""
    pods = scene.one_each()
    scene.before = len(locks.holders())
    shares: list[tuple[str, str | int]] = [("a", "all"), ("b", "none")] if moving else [("a", "none"), ("b", "all")]
    scene.agents.resources[:] = [resource(letter, share, sharing={"replicas": 3}) for letter, share in shares]
    scene.agents.write()
    make = {"none": plain, "all": claimer}
    for letter, share in shares:
        name = f"wants-{letter}"
        scene.waiting[name] = make[str(share)](name, letter)
        scene.make(scene.waiting[name])
    scene.observe(6)
    with scene.agent_killed("killed"):
        pass
    scene.observe(6)
    for pod, wants in zip(pods, ("wants-a", "wants-b"), strict=True):
        scene.handed_on(pod.delete, [pod.uid], wants, limit=60)


def test_admin_access_holds_nothing(scene: Scene) -> None:
    """A device moves to the device plugin when its holder ends, although a claim with `adminAccess` still has it."""
    cluster = scene.cluster
    cluster.allow_admin_access()
    user = scene.claimed("b")
    scene.agents.claim("admin", scene.agents.one(allocationMode="All", adminAccess=True))
    admin = scene.agents.pod("admin", {"device": "admin"}).wait_running()  # this pod takes no lock
    scene.share(b="none")
    scene.wait_states("b", to_plugin=1)
    scene.wait(plain("wants-b", "b"))
    scene.observe(3)
    scene.handed_on(user.delete, [user.uid], "wants-b")
    assert admin.phase == "Running"


# --- names and numbers of devices ------------------------------------------------------------------------------------


def many(scene: Scene, devices: int, each: int) -> None:
    """Let a pod and a claim get `each` of `devices` devices; idle ones move to claims, the pod's when it ends."""
    cluster, half = scene.cluster, devices // 2
    scene.serve(resource("a", half))
    cluster.wait_allocatable(named("a"), devices - half)
    scene.agents.wait_offered(half)
    scene.agents.template("many", scene.agents.one(allocationMode="ExactCount", count=each))
    pod = scene.make(locks.pod("plain", locks.container(limits={named("a"): each})))
    user = scene.claimer("user", "many")
    scene.running(pod, user)
    cluster.wait_for(lambda: len(locks.holders()) == 2 * each, LIMIT, "all locks are taken")
    scene.before = 2 * each
    with scene.agent_killed("killed"):
        pass
    scene.share(a="all")
    scene.wait_states("a", 60, dra=devices - each, to_dra=each)
    scene.observe(2)
    pod.delete()
    scene.wait_states("a", 60, dra=devices)
    scene.check()
    assert len(locks.holders()) == each


def test_odd_names(scene: Scene) -> None:
    """Devices with unusual names are allocated by limits and by claims, and move to claims."""
    for minor, name in enumerate(ODD_NAMES, 1):
        locks.make_node(locks.NODES / "a" / name, minor)
    many(scene, len(ODD_NAMES), len(ODD_NAMES) // 2)


def test_three_hundred_devices(scene: Scene) -> None:
    """Of 300 devices a pod and a claim hold 24 each; the others move to claims, and the pod's devices when it ends."""
    for minor in range(1, 301):
        locks.make_node(locks.NODES / "a" / f"a{minor}", minor)
    many(scene, 300, 24)
