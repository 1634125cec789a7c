"""No device has two holders, whatever kubelet, API server and runtime do; for the fake and a real node.

In most scenarios resource a has devices that pods hold and that claims wait for (TO_DRA), resource b the other way
round (TO_PLUGIN), and a pod waits for each: whoever gives a device away too soon gives it to that one. Derive a test
class from `SidesScenarios` where there is a fixture `scene` that is a `Scene`. With CLUSTER_LONG in the environment all
combinations run, else some.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

LONG = bool(os.environ.get("CLUSTER_LONG"))
long = pytest.mark.skipif(not LONG, reason="CLUSTER_LONG is not set")


def named(letter: str) -> str:
    return f"example.net/{letter}"


def driver(letter: str) -> str:
    return f"{letter}.example.net"


class Scene(ABC):
    """A node with an agent of both sides, and pods that tell which devices they have.

    Resources are called by a letter; each names a driver of its own. A step that waits has a deadline and fails the
    test past it. The scenario fails if a device ever has two holders, or if `released` is called for one that is held.
    """

    before = 0
    """How many held devices at first, for the table of a run."""
    pace = 1.0
    """How many times sooner kubelet and agent do what those of a user do."""
    patient = LONG
    """Whether there is time for what takes the kubelet a minute."""

    # Devices, agent and pods.

    @abstractmethod
    def begin(self, **resources: tuple[int, str]) -> None:
        """Make so many devices of each resource; start the agent with these shares, wait until they are offered."""

    @abstractmethod
    def share(self, **shares: str | int) -> None:
        """Change shares in the config file."""

    @abstractmethod
    def slices(self, resource: str) -> Sequence[Mapping[str, Any]]:
        """Return the ResourceSlices of a resource's driver."""

    @abstractmethod
    def lease(self) -> Mapping[str, Any]:
        """Return the node's Lease; an object without annotations before there is one."""

    @abstractmethod
    def until(self, what: str, condition: Callable[[], object], limit: float = ...) -> None:
        """Wait until something is so."""

    @abstractmethod
    def pod(self, name: str, resource: str, **spec: Any) -> Any:
        """Start a pod that gets a device by its limits."""

    @abstractmethod
    def claimer(self, name: str, resource: str, **spec: Any) -> Any:
        """Start a pod that gets a device by a claim."""

    @abstractmethod
    def claim_user(self, name: str, resource: str) -> Any:
        """Start a pod with a claim that was not made for it."""

    @abstractmethod
    def joins(self, pod: Any, name: str) -> Any:
        """Start another pod with the claim of a `claim_user`, and wait until it runs."""

    @abstractmethod
    def init_pod(self, name: str, resource: str, *, sidecar: bool = False) -> Any:
        """Start a pod whose init container has a device, and is called as other pods' containers are; wait for it.

        It works until the pod is deleted. sidecar: the pod's container runs beside it.
        """

    @abstractmethod
    def running(self, *pods: Any) -> None:
        """Wait until these run and have their devices."""

    @abstractmethod
    def runs(self, uid: str) -> bool:
        """Whether a container of a pod runs."""

    @abstractmethod
    def wants(self, how: str, resource: str, name: str = "", *, scheduled: bool = False) -> None:
        """Start a pod for which there is no device now, `wants-RESOURCE`; how: by its limits (pod) or a claim.

        scheduled: the scheduler takes a device for free that is held, and sends the pod all the same.
        """

    @abstractmethod
    def delete(self, pod: Any) -> None:
        """Delete a pod."""

    def states(self, resource: str) -> Counter[str]:
        """Return how many devices of a resource are in which state, as the agent reports."""
        for text in (self.lease()["metadata"].get("annotations") or {}).values():
            if told := json.loads(text)["resources"].get(named(resource)):
                return Counter(device["state"] for device in told["devices"].values() if not device.get("gone"))
        return Counter()

    def wait_states(self, resource: str, limit: float = 30.0, /, **wanted: int) -> None:
        """Wait until so many devices of a resource are in these states (to_dra for to-dra)."""
        expected = Counter({state.replace("_", "-"): count for state, count in wanted.items()})
        self.until(f"{resource}: {dict(expected)}", lambda: self.states(resource) == expected, limit)

    def both(self) -> tuple[list[Any], list[Any]]:
        """Have two devices of a held by pods, two of b by claims, all to move, and a pod waiting for each kind."""
        self.begin(a=(2, "none"), b=(2, "all"))
        pods = [self.pod(f"a{number}", "a") for number in range(2)]
        users = [self.claimer(f"b{number}", "b") for number in range(2)]
        self.running(*pods, *users)
        self.share(a="all", b="none")
        self.wait_states("a", to_dra=2)
        self.wait_states("b", to_plugin=2)
        self.wants("claim", "a")
        self.wants("pod", "b")
        self.note_holders()
        return pods, users

    def one_each(self) -> list[Any]:
        """Have a device of a held by a pod and one of b by a claim, at rest."""
        self.begin(a=(1, "none"), b=(1, "all"))
        pods = [self.pod("a0", "a"), self.claimer("b0", "b")]
        self.running(*pods)
        return pods

    # What goes wrong.

    @abstractmethod
    def kill_agent(self) -> None:
        """Kill the agent."""

    @abstractmethod
    def start_agent(self) -> None:
        """Start it again, and wait until its drivers are registered."""

    @abstractmethod
    def end_kubelet(self, how: str) -> None:
        """End the kubelet by `sigterm` or `sigkill`; what runs goes on."""

    @abstractmethod
    def start_kubelet(self) -> None:
        """Start the kubelet."""

    @abstractmethod
    def lose_checkpoint(self) -> None:
        """Remove the device manager's checkpoint."""

    @abstractmethod
    def lose_ledger(self) -> None:
        """Remove the agent's ledger."""

    @abstractmethod
    def stop_api_server(self) -> None:
        """Keep the API server from the kubelet; a kubelet that starts knows of no pods."""

    @abstractmethod
    def start_api_server(self) -> None:
        """Let the API server answer again, and wait until a pod can run."""

    @abstractmethod
    def flooded(self) -> AbstractContextManager[None]:
        """Let other clients use up the rate limit of PodResources meanwhile."""

    @abstractmethod
    def hang(self, pod: Any) -> None:
        """Delete a pod by force, while the runtime cannot end its container."""

    @abstractmethod
    def thaw(self) -> None:
        """Let the runtime end what hangs."""

    @abstractmethod
    def static_pod(self, name: str, resource: str) -> Any:
        """Run a pod by a manifest on the node; its container ignores that it is to end."""

    @abstractmethod
    def remove_manifest(self, pod: Any) -> None:
        """Remove a static pod's manifest."""

    @abstractmethod
    def end_slow(self, pod: Any) -> None:
        """Let the container of a static pod without manifest end."""

    @abstractmethod
    def lose_network(self) -> None:
        """Make the node's network unready: pods are admitted and not started."""

    @abstractmethod
    def restore_network(self) -> None:
        """Make the node's network ready."""

    @abstractmethod
    def admitted(self, name: str, resource: str) -> Any:
        """Start a pod while the network is not ready; wait until the checkpoint names it."""

    @abstractmethod
    def take_claim(self, pod: Any) -> None:
        """Remove the claim of a `claim_user` from the API server, finalizers and all."""

    @abstractmethod
    def forget(self, pod: Any) -> None:
        """Have the kubelet forget that a pod which it does not know any more has used a claim."""

    @abstractmethod
    def end_container(self, pod: Any) -> None:
        """Have a pod's container end by itself; it is not started again."""

    @abstractmethod
    def kubelet_without_pods(self) -> AbstractContextManager[None]:
        """Start the kubelet; it hears of its pods only after this."""

    @contextlib.contextmanager
    def agent_killed(self, agent: str) -> Iterator[None]:
        """Have the agent killed before and started after, if it is `killed`."""
        if agent == "killed":
            self.kill_agent()
        yield
        if agent == "killed":
            self.start_agent()

    def restart_kubelet(self, how: str) -> None:
        """End the kubelet by `sigterm`, `sigkill` or that and the loss of its `checkpoint`; start it again."""
        self.end_kubelet(how)
        if how == "checkpoint":
            self.lose_checkpoint()
        self.start_kubelet()

    # What is seen.

    @abstractmethod
    def check(self) -> None:
        """Fail if a device had two holders by now."""

    @abstractmethod
    def urge(self) -> None:
        """Make pods again that the kubelet has refused, and have it try again what it could not prepare."""

    @abstractmethod
    def wipes(self) -> int:
        """Return for how many devices `released` was called."""

    @abstractmethod
    def note_holders(self) -> None:
        """Write down in `before` how many hold devices now."""

    @abstractmethod
    def handed_on(self, end: Callable[[], object], old: Iterable[str], *new: str, limit: float = ...) -> None:
        """End holders (their pods' UIDs) and wait until waiting pods have got their devices."""

    @abstractmethod
    def handed_to_anybody(self, pod: Any) -> None:
        """Delete a pod and wait until any other one has its device."""

    def observe(self, seconds: float) -> None:
        """Look on for so long, twice that with CLUSTER_LONG; it is how long the scenario lasts, not a wait."""
        deadline = time.monotonic() + (2 * seconds if LONG else seconds) / self.pace
        while time.monotonic() < deadline:
            self.check()
            self.urge()
            time.sleep(0.2 / self.pace)
        self.check()


KUBELET = [
    pytest.param(how, api, agent, marks=() if (how, api, agent) in often else long, id=f"{how}-{api}-{agent}")
    for often in [{("sigterm", "up", "kept"), ("sigkill", "down", "killed"), ("checkpoint", "up", "kept")}]
    for how in ("sigterm", "sigkill", "checkpoint")
    for api in ("up", "down", "minute")
    for agent in ("kept", "killed")
]
AGENT = pytest.mark.parametrize("agent", ["kept", pytest.param("killed", marks=long)])


def end_one_of_each(scene: Scene, pods: Sequence[Any], users: Sequence[Any]) -> None:
    """Delete a pod of each kind: its device goes to the pod that waits."""
    for holders, wants in ((pods, "wants-a"), (users, "wants-b")):
        if holders:
            scene.handed_on(partial(scene.delete, holders[0]), [holders[0].uid], wants)


def delete_all(scene: Scene, pods: Sequence[Any]) -> None:
    """Delete pods."""
    for pod in pods:
        scene.delete(pod)


class SidesScenarios:
    """Each scenario has devices, an agent and pods of its own."""

    @pytest.mark.parametrize(("how", "api", "agent"), KUBELET)
    def test_kubelet_restarts(self, scene: Scene, how: str, api: str, agent: str) -> None:
        """Held devices on their way to either side stay with their holders while the kubelet is restarted."""
        pods, users = scene.both()
        if api != "up":
            scene.stop_api_server()
        with scene.agent_killed(agent):
            scene.restart_kubelet(how)
        if api != "up":
            scene.observe(30 if api == "minute" else 3)
            scene.start_api_server()
        # Unknown is not to become "nobody" with time.
        scene.observe(18 if how == "checkpoint" and LONG else 5)
        # A kubelet that has lost its checkpoint admits running pods anew. Those whose devices move to DRA fail.
        if failed := [pod.uid for pod in pods if not scene.runs(pod.uid)]:
            assert how == "checkpoint"
            scene.handed_on(lambda: None, failed, "wants-a")
            pods = []
        end_one_of_each(scene, pods, users)

    @AGENT
    def test_checkpoint_is_lost_at_rest(self, scene: Scene, agent: str) -> None:
        """A device that the kubelet has forgotten with its checkpoint goes to no other pod while its container runs."""
        scene.begin(a=(2, "none"))
        pods = [scene.pod(f"a{number}", "a") for number in range(2)]
        scene.running(*pods)
        wanting = ["wants-0", "wants-1"]
        for name in wanting:
            scene.wants("pod", "a", name)
        scene.note_holders()
        with scene.agent_killed(agent):
            scene.restart_kubelet("checkpoint")
        scene.observe(5)
        # Both: the scheduler goes on counting a pod whose device the kubelet has forgotten.
        scene.handed_on(lambda: delete_all(scene, pods), [pod.uid for pod in pods], *wanting)

    def test_ledger_and_checkpoint_are_lost(self, scene: Scene) -> None:
        """After the loss of ledger and checkpoint, the copy of the ledger's allocations still names the holders."""
        scene.begin(a=(2, "none"))
        pods = [scene.pod(f"a{number}", "a") for number in range(2)]
        scene.running(*pods)
        scene.note_holders()
        scene.end_kubelet("sigkill")
        scene.kill_agent()
        scene.lose_ledger()
        scene.lose_checkpoint()
        scene.start_kubelet()
        scene.start_agent()
        wanting = ["wants-0", "wants-1"]
        for name in wanting:
            scene.wants("claim", "a", name)
        scene.share(a="all")
        scene.observe(8)
        scene.handed_on(lambda: delete_all(scene, pods), [pod.uid for pod in pods], *wanting)

    @AGENT
    def test_containers_outlive_their_pods(self, scene: Scene, agent: str) -> None:
        """Containers that the runtime cannot end keep their devices after their pods were deleted by force."""
        pods, users = scene.both()
        ending = [pods[0], users[0]]
        for pod in ending:
            scene.hang(pod)
        with scene.agent_killed(agent):
            pass
        scene.observe(8)
        scene.handed_on(scene.thaw, [pod.uid for pod in ending], "wants-a", "wants-b")

    @AGENT
    def test_containers_outlive_their_pods_at_rest(self, scene: Scene, agent: str) -> None:
        """Without any move, a device goes to no other user of its side while a container of a deleted pod has it."""
        pods = scene.one_each()
        scene.wants("pod", "a")
        scene.wants("claim", "b")
        scene.note_holders()
        for pod in pods:
            scene.hang(pod)
        with scene.agent_killed(agent):
            pass
        scene.observe(8)
        scene.handed_on(scene.thaw, [pod.uid for pod in pods], "wants-a", "wants-b", limit=60)

    def test_static_pod_ends_slowly(self, scene: Scene) -> None:
        """A static pod whose manifest is removed keeps its device until its container has ended."""
        scene.begin(a=(1, "none"))
        pod = scene.static_pod("slow", "a")
        scene.note_holders()
        scene.remove_manifest(pod)
        scene.share(a="all")
        scene.wants("claim", "a")
        scene.observe(5)
        scene.handed_on(lambda: scene.end_slow(pod), [pod.uid], "wants-a")

    @pytest.mark.parametrize("agent", [pytest.param("kept", marks=long), "killed"])
    def test_network_is_not_ready(self, scene: Scene, agent: str) -> None:
        """An admitted pod holds its device before the node's network is ready: it has no sandbox, no pod directory and
        no cgroup, and PodResources List does not name it.
        """
        scene.begin(a=(1, "none"))
        scene.lose_network()
        pod = scene.admitted("admitted", "a")
        wipes = scene.wipes()
        scene.share(a="all")
        scene.wants("claim", "a")
        with scene.agent_killed(agent):
            pass
        scene.observe(12)
        scene.restore_network()
        scene.until("the admitted pod to run", lambda: scene.runs(pod.uid))
        scene.note_holders()
        assert scene.wipes() == wipes, "`released` was called for the device of an admitted pod"
        scene.handed_on(lambda: scene.delete(pod), [pod.uid], "wants-a")

    def test_claim_loses_its_finalizers(self, scene: Scene) -> None:
        """A claim that is deleted while its pod runs keeps its device, through restarts of agent and kubelet."""
        scene.begin(b=(1, "all"))
        user = scene.claim_user("user", "b")
        scene.running(user)
        scene.note_holders()
        scene.wants("pod", "b", "wants-plain")
        scene.take_claim(user)
        scene.wants("claim", "b", "wants-claim", scheduled=True)
        scene.observe(1)
        # The agent asks as soon as the kubelet answers, which then knows no pod yet.
        with scene.agent_killed("killed"):
            scene.restart_kubelet("sigterm")
        scene.observe(11)
        scene.share(b="none")
        scene.observe(3)
        scene.share(b="all")
        # The scheduler took the device for free when the claim was gone, and allocated it to either of the two.
        scene.handed_to_anybody(user)

    @AGENT
    def test_second_pod_of_a_claim_is_forgotten(self, scene: Scene, agent: str) -> None:
        """A pod that joined a claim and outlives its forced deletion keeps the device after the first pod's end."""
        if not scene.patient:
            pytest.skip("CLUSTER_LONG is not set")
        scene.begin(b=(1, "all"))
        first = scene.claim_user("first", "b")
        scene.running(first)
        with scene.agent_killed(agent):
            second = scene.joins(first, "second")
            scene.hang(second)
            scene.forget(second)
        scene.note_holders()
        scene.wants("claim", "b")
        scene.delete(first)
        scene.until("the first pod to end", lambda: not scene.runs(first.uid))
        scene.take_claim(first)
        scene.observe(15)
        scene.handed_on(scene.thaw, [second.uid], "wants-b", limit=120)

    @AGENT
    def test_init_containers_and_sidecars(self, scene: Scene, agent: str) -> None:
        """An init container named like an earlier pod's container is a holder of its own; so is a sidecar."""
        scene.begin(a=(1, "none"), b=(1, "none"))
        first, sidecar = scene.pod("first", "a"), scene.init_pod("sidecar", "b", sidecar=True)
        scene.running(first, sidecar)
        scene.delete(first)
        second = scene.init_pod("second", "a")
        scene.note_holders()
        scene.share(a="all", b="all")
        scene.wants("claim", "a")
        scene.wants("claim", "b")
        with scene.agent_killed(agent):
            scene.observe(2 if agent == "killed" else 13)
            scene.restart_kubelet("sigterm")
        scene.observe(4)
        scene.handed_on(lambda: scene.delete(sidecar), [sidecar.uid], "wants-b")
        scene.handed_on(lambda: scene.delete(second), [second.uid], "wants-a")

    @pytest.mark.parametrize("asked", [pytest.param("before", marks=long), "after"])
    def test_job_ends_while_nobody_sees_it(self, scene: Scene, asked: str) -> None:
        """The device of a pod that ended while kubelet and agent were away moves, by an earlier or a later share,
        though the kubelet knew no pod when the agent first asked it.
        """
        scene.begin(a=(2, "none"))
        ending, other = (scene.pod(f"a{number}", "a", restartPolicy="Never") for number in range(2))
        scene.running(ending, other)
        scene.note_holders()
        if asked == "before":
            scene.share(a="all")
            scene.wait_states("a", to_dra=2)
        scene.wants("claim", "a")
        scene.kill_agent()
        scene.end_kubelet("sigterm")
        scene.end_container(ending)

        def come_back() -> None:
            with scene.kubelet_without_pods():
                scene.start_agent()
                scene.share(a="all")
                scene.observe(5)

        scene.handed_on(come_back, [ending.uid], "wants-a", limit=60)

    def test_pod_resources_is_flooded(self, scene: Scene) -> None:
        """Devices move while another client uses up all calls that the kubelet answers."""
        pods, users = scene.both()
        with scene.flooded():
            end_one_of_each(scene, pods, users)
