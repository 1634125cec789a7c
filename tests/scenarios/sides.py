"""No device has two holders, after any faults of kubelet, API server and runtime; for the fake and a real node.

In most scenarios pods hold the devices of resource a, which are to move to DRA (TO_DRA), and claims hold the devices of
resource b, which are to move to the device plugin (TO_PLUGIN). A pod waits for each resource: a device that is granted
too early goes to this pod. Derive a test class from `SidesScenarios` and add a fixture `scene` that returns a `Scene`.
With CLUSTER_LONG in the environment all combinations of parameters run, else some of them.
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
    """A node with an agent that is device plugin and DRA driver, and pods that report their devices.

    Resources are named by a letter, and each has a driver of its own. A step that waits has a deadline, after which the
    test fails. The test also fails if a device ever has two holders, or if `released` is called for a held device.
    """

    before = 0
    """The number of held devices before the faults, for the table that a test run prints."""
    pace = 1.0
    """The factor by which kubelet and agent are faster than with the default settings."""
    patient = LONG
    """Whether scenarios may have steps for which the kubelet needs a minute."""

    # Devices, agent and pods.

    @abstractmethod
    def begin(self, **resources: tuple[int, str]) -> None:
        """Start the agent; wait until it offers each resource's devices, of which `none` or `all` are for claims."""

    @abstractmethod
    def share(self, **shares: str | int) -> None:
        """Change in the config file how many devices of resources are for claims. shares: by the resource's letter."""

    @abstractmethod
    def slices(self, resource: str) -> Sequence[Mapping[str, Any]]:
        """Return the ResourceSlices of a resource's driver."""

    @abstractmethod
    def lease(self) -> Mapping[str, Any]:
        """Return the node's Lease; an object without annotations before there is one."""

    @abstractmethod
    def until(self, what: str, condition: Callable[[], object], limit: float = ...) -> None:
        """Wait until the condition is true."""

    @abstractmethod
    def pod(self, name: str, resource: str, **spec: Any) -> Any:
        """Start a pod with a device by its limits."""

    @abstractmethod
    def claimer(self, name: str, resource: str, **spec: Any) -> Any:
        """Start a pod with a device by a claim."""

    @abstractmethod
    def claim_user(self, name: str, resource: str) -> Any:
        """Start a pod with a claim that exists without the pod: a ResourceClaim, not a template."""

    @abstractmethod
    def joins(self, pod: Any, name: str) -> Any:
        """Start another pod with the claim of a `claim_user`, and wait until it runs."""

    @abstractmethod
    def init_pod(self, name: str, resource: str, *, sidecar: bool = False) -> Any:
        """Start a pod whose init container has a device, and wait until the init container runs.

        The init container has the name of other pods' containers, and runs until the pod is deleted. sidecar: the main
        container of the pod runs beside the init container.
        """

    @abstractmethod
    def running(self, *pods: Any) -> None:
        """Wait until these pods run and have their devices."""

    @abstractmethod
    def runs(self, uid: str) -> bool:
        """Return whether a container of a pod runs."""

    @abstractmethod
    def wants(self, how: str, resource: str, name: str = "", *, scheduled: bool = False) -> None:
        """Start the pod `wants-RESOURCE`, for which no device is free. how: `pod` (by limits) or `claim`.

        scheduled: the scheduler counts a held device as free, and binds the pod to the node.
        """

    @abstractmethod
    def delete(self, pod: Any) -> None:
        """Delete a pod."""

    def states(self, resource: str) -> Counter[str]:
        """Return the number of devices of a resource in each state, as the agent reports the states in the Lease."""
        for text in (self.lease()["metadata"].get("annotations") or {}).values():
            if told := json.loads(text)["resources"].get(named(resource)):
                return Counter(device["state"] for device in told["devices"].values() if not device.get("gone"))
        return Counter()

    def wait_states(self, resource: str, limit: float = 30.0, /, **wanted: int) -> None:
        """Wait until these numbers of a resource's devices are in these states (`to_dra` for to-dra)."""
        expected = Counter({state.replace("_", "-"): count for state, count in wanted.items()})
        self.until(f"{resource}: {dict(expected)}", lambda: self.states(resource) == expected, limit)

    def both(self) -> tuple[list[Any], list[Any]]:
        """Start two pods with devices of a and two claims with devices of b, and let all devices wait to move.

        A further pod waits for a device of a, and one for a device of b. Return the pods of a and the pods with claims.
        """
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
        """Start a pod with a device of a by limits and a pod with a device of b by a claim; no device is to move."""
        self.begin(a=(1, "none"), b=(1, "all"))
        pods = [self.pod("a0", "a"), self.claimer("b0", "b")]
        self.running(*pods)
        return pods

    # Faults.

    @abstractmethod
    def kill_agent(self) -> None:
        """Kill the agent."""

    @abstractmethod
    def start_agent(self) -> None:
        """Start the agent again, and wait until its drivers are registered."""

    @abstractmethod
    def end_kubelet(self, how: str) -> None:
        """End the kubelet by `sigterm` or `sigkill`; containers go on."""

    @abstractmethod
    def start_kubelet(self) -> None:
        """Start the kubelet."""

    @abstractmethod
    def lose_checkpoint(self) -> None:
        """Remove the device manager's checkpoint."""

    @abstractmethod
    def lose_ledger(self) -> None:
        """Remove the agent's ledger, which names the pods and claims that hold devices."""

    @abstractmethod
    def stop_api_server(self) -> None:
        """Make the API server unreachable for the kubelet; a kubelet that starts then knows no pods."""

    @abstractmethod
    def start_api_server(self) -> None:
        """Let the API server answer again, and wait until a pod can run."""

    @abstractmethod
    def flooded(self) -> AbstractContextManager[None]:
        """While the context is open, other clients use up the rate limit of PodResources."""

    @abstractmethod
    def hang(self, pod: Any) -> None:
        """Delete a pod by force, while the runtime cannot end its container."""

    @abstractmethod
    def thaw(self) -> None:
        """Let the runtime end the containers that hang."""

    @abstractmethod
    def static_pod(self, name: str, resource: str) -> Any:
        """Run a static pod from a manifest on the node; its container ignores SIGTERM."""

    @abstractmethod
    def remove_manifest(self, pod: Any) -> None:
        """Remove a static pod's manifest."""

    @abstractmethod
    def end_slow(self, pod: Any) -> None:
        """Let the container of a static pod end whose manifest was removed."""

    @abstractmethod
    def lose_network(self) -> None:
        """Make the node's network unready: pods are admitted and not started."""

    @abstractmethod
    def restore_network(self) -> None:
        """Make the node's network ready."""

    @abstractmethod
    def admitted(self, name: str, resource: str) -> Any:
        """Start a pod while the network is not ready; wait until the kubelet's checkpoint names the pod."""

    @abstractmethod
    def take_claim(self, pod: Any) -> None:
        """Remove the claim of a `claim_user` from the API server, finalizers and all."""

    @abstractmethod
    def forget(self, pod: Any) -> None:
        """Make the kubelet forget that a pod which was deleted by force used a claim."""

    @abstractmethod
    def end_container(self, pod: Any) -> None:
        """Make a pod's container end by itself; it is not restarted."""

    @abstractmethod
    def kubelet_without_pods(self) -> AbstractContextManager[None]:
        """Start the kubelet, which learns only after the context's end which pods the node has."""

    @contextlib.contextmanager
    def agent_killed(self, agent: str) -> Iterator[None]:
        """Kill the agent at the context's begin and start it at the context's end, if `agent` is `killed`."""
        if agent == "killed":
            self.kill_agent()
        yield
        if agent == "killed":
            self.start_agent()

    def restart_kubelet(self, how: str) -> None:
        """Restart the kubelet by `sigterm` or `sigkill`; `checkpoint`: kill it and remove its checkpoint."""
        self.end_kubelet(how)
        if how == "checkpoint":
            self.lose_checkpoint()
        self.start_kubelet()

    # Observations.

    @abstractmethod
    def check(self) -> None:
        """Fail if a device has had two holders so far."""

    @abstractmethod
    def urge(self) -> None:
        """Create pods again that the kubelet has refused, and make the kubelet retry failed preparations of claims."""

    @abstractmethod
    def wipes(self) -> int:
        """Return the number of devices for which `released` was called."""

    @abstractmethod
    def note_holders(self) -> None:
        """Record in `before` the number of devices held now."""

    @abstractmethod
    def handed_on(self, end: Callable[[], object], old: Iterable[str], *new: str, limit: float = ...) -> None:
        """Call `end`, which ends the pods `old` (UIDs), and wait until the pods `new` have got their devices."""

    @abstractmethod
    def handed_to_anybody(self, pod: Any) -> None:
        """Delete a pod and wait until any other pod has its device."""

    def observe(self, seconds: float) -> None:
        """Check for this number of seconds, or twice as many with CLUSTER_LONG, that no device has two holders."""
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
    """Delete one pod by limits and one pod with a claim: the pod that waits for its device gets the device."""
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
        """Held devices that are to move (to DRA, or back) stay with their holders while the kubelet restarts."""
        pods, users = scene.both()
        if api != "up":
            scene.stop_api_server()
        with scene.agent_killed(agent):
            scene.restart_kubelet(how)
        if api != "up":
            scene.observe(30 if api == "minute" else 3)
            scene.start_api_server()
        # A held device must not become free only because time passes, even if the kubelet's checkpoint lacks its
        # holder.
        scene.observe(18 if how == "checkpoint" and LONG else 5)
        # A kubelet without its checkpoint admits running pods again. Pods whose devices move to DRA then fail.
        if failed := [pod.uid for pod in pods if not scene.runs(pod.uid)]:
            assert how == "checkpoint"
            scene.handed_on(lambda: None, failed, "wants-a")
            pods = []
        end_one_of_each(scene, pods, users)

    @AGENT
    def test_checkpoint_is_lost_at_rest(self, scene: Scene, agent: str) -> None:
        """After the loss of the kubelet's checkpoint, a device goes to no other pod while its container runs."""
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
        # Both pods are deleted: the scheduler still counts a pod whose device the kubelet has forgotten.
        scene.handed_on(lambda: delete_all(scene, pods), [pod.uid for pod in pods], *wanting)

    def test_ledger_and_checkpoint_are_lost(self, scene: Scene) -> None:
        """After the loss of the agent's ledger and the kubelet's checkpoint, the ledger's copy names the holders."""
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
        """A device that is not to move goes to no other pod or claim while a container of a deleted pod has it."""
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
        """An admitted pod holds its device while the node's network is not ready.

        The pod has no sandbox, no pod directory and no cgroup, and PodResources List does not name it.
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
        """A claim that is deleted while its pod runs keeps its device, after restarts of agent and kubelet."""
        scene.begin(b=(1, "all"))
        user = scene.claim_user("user", "b")
        scene.running(user)
        scene.note_holders()
        scene.wants("pod", "b", "wants-plain")
        scene.take_claim(user)
        scene.wants("claim", "b", "wants-claim", scheduled=True)
        scene.observe(1)
        # The agent first asks the kubelet for its pods when the kubelet does not know them yet.
        with scene.agent_killed("killed"):
            scene.restart_kubelet("sigterm")
        scene.observe(11)
        scene.share(b="none")
        scene.observe(3)
        scene.share(b="all")
        # After the claim was deleted, the scheduler counted the device as free, and allocated it to one of the two
        # pods.
        scene.handed_to_anybody(user)

    @AGENT
    def test_second_pod_of_a_claim_is_forgotten(self, scene: Scene, agent: str) -> None:
        """A claim's second pod is deleted by force and hangs: this pod keeps the device after the first pod's end."""
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
        """An init container and a sidecar hold their devices, even if an earlier pod's container has the same name."""
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
        """The device of a pod that ended while kubelet and agent were stopped moves to DRA.

        asked: whether the move to DRA is requested before or after the stop. When the new agent first asks the kubelet,
        the kubelet does not know its pods yet.
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
        """When holders end, their devices move though another client uses up the rate limit of PodResources."""
        pods, users = scene.both()
        with scene.flooded():
            end_one_of_each(scene, pods, users)
