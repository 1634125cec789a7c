"""No device has two holders after faults of kubelet, API server, runtime or operator, as the kernel's locks show.

``tests.cluster.locks`` describes how an overlap is detected. In most scenarios, pods by limits hold the devices of
resource a, which have to move to claims (state to-dra). Claims hold the devices of resource b, which have to move to
the plugin (to-plugin). A pod waits for a device of each resource, so a device that is granted too early goes to this
pod, which is then a second holder. With CLUSTER_LONG in the environment all combinations of parameters run, otherwise
some of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cluster import isolate, locks
from tests.cluster.api import ApiError
from tests.cluster.bridge import Bridge, ClaimPod
from tests.cluster.conftest import Shared
from tests.cluster.node import (
    COMPONENTS,
    DEVICE_PLUGINS,
    KUBELET_DIRECTORY,
    LEDGER,
    POD_RESOURCES_SOCKET,
    Cluster,
    ClusterError,
    ClusterTimeout,
    Pod,
    remove_ledger,
)
from tests.programs import ANY_CONFIG
from tests.scenarios import sides
from tests.scenarios.sides import SidesScenarios, long, named
from tests.service_manager import service_manager
from tests.waits import wait

LIMIT = 30.0
"""Maximum seconds until a device has moved or another condition is true."""
CHECKPOINT = DEVICE_PLUGINS / "kubelet_internal_checkpoint"
CDI = Path("/var/run/cdi")


# --- one scenario ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    scenario: str
    before: int
    after: int
    overlaps: int
    released: int
    seconds: str

    def cells(self) -> list[str]:
        return [self.scenario, str(self.before), str(self.after), str(self.overlaps), str(self.released), self.seconds]


class Agents(Bridge):
    """`dra-bridge run` and `deviceplugin run` with one config file, and a `released` hook that tries the locks."""

    metrics = ""
    """The address of an agent's metrics; "" for no metrics, since two agents cannot serve at one address."""

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "tests.cluster.locks", "bridge", "--config", str(self.config), *ANY_CONFIG]
        return [*command, *(["--metrics-address", self.metrics] if self.metrics else [])]

    def page(self, path: str) -> str:
        """Return the text of a page of the agent, also if the HTTP status is an error."""
        try:
            with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def lacks(self) -> str:
        """Return why the agent is not ready; "" if it is ready."""
        return "" if (page := self.page("/readyz")).strip() == "ok" else page

    def start_plugin(self) -> subprocess.Popen[bytes]:
        """Start `deviceplugin run`, without a check whether another agent runs."""
        log = self.cluster.logs / f"plugin-{time.monotonic_ns()}.log"
        self._logs.append(log)
        command = [sys.executable, "-m", "tests.cluster.locks", "plugin", "--config", str(self.config), *ANY_CONFIG]
        with log.open("wb") as output:
            return subprocess.Popen(
                [*command, "--log-level", "debug"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )


class Scene(sides.Scene):
    """The devices, agents and pods of one scenario, and the scenario's results."""

    kind = Agents

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.after: int | None = None
        self.seconds: list[float] = []
        self.stack = contextlib.ExitStack()
        self.waiting: dict[str, dict[str, Any]] = {}
        """The manifests of pods that wait for a device, by name; a pod that the kubelet refuses is made again."""
        self._minors = iter(range(1, 256))
        self._without_network: dict[str, Any] = {}
        """The fields of a pod's spec with which it is scheduled while the node's network is not ready."""

    # Devices and agents.

    def nodes(self, directory: str, count: int) -> list[str]:
        """Make device nodes; return their keys."""
        return [
            locks.make_node(locks.NODES / directory / f"{directory}{number}", next(self._minors))
            for number in range(count)
        ]

    def serve(self, *resources: Mapping[str, Any]) -> Agents:
        """Start an agent for these resources; the scene's end stops the agent and its pods."""
        self.agents = self.stack.enter_context(self.kind.running(self.cluster, *resources))
        self.stack.callback(self.restore)
        for name in self.agents.classes:
            self.agents.template(name.rpartition("/")[2], self.agents.one(resource=name))
        return self.agents

    def share(self, **shares: str | int) -> None:
        for index, resource in enumerate(self.agents.resources):
            letter = str(resource["name"]).rpartition("/")[2]
            if letter in shares:
                self.agents.resources[index] = {**resource, "dra": {"share": shares[letter]}}
        self.agents.write()

    def begin(self, **resources: tuple[int, str]) -> None:
        for letter, (count, _) in resources.items():
            self.nodes(letter, count)
        self.serve(*(resource(letter, share) for letter, (_, share) in resources.items()))
        for letter, (count, share) in resources.items():
            if share == "all":
                self.agents.wait_offered(count, f"{letter}.example.net")
            else:
                self.cluster.wait_allocatable(named(letter), count)

    # Pods.

    def make(self, manifest: Mapping[str, Any]) -> Pod:
        """Create a pod."""
        created = self.cluster.api.create(manifest)
        return ClaimPod(self.cluster, created) if created["spec"].get("resourceClaims") else Pod(self.cluster, created)

    def remake(self, pod: Pod, manifest: Mapping[str, Any]) -> Pod:
        """Delete a pod that the kubelet has refused, and create it again."""
        pod.delete(0)
        pod.wait_gone()
        return self.make(manifest)

    def pod(self, name: str, resource: str, **spec: Any) -> Pod:
        return self.make(plain(name, resource, **spec))

    def claimer(self, name: str, resource: str, **spec: Any) -> Pod:
        return self.make(claimer(name, resource, **spec))

    def wants(self, how: str, resource: str, name: str = "", *, scheduled: bool = False) -> None:
        make = plain if how == "pod" else claimer
        manifest = make(name or f"wants-{resource}", resource, **self._without_network)
        if scheduled:
            self.waiting[manifest["metadata"]["name"]] = manifest
            self.make(manifest)
        else:
            self.wait(manifest)

    def wait(self, manifest: Mapping[str, Any]) -> None:
        """Start a pod for which there is no device now, and wait until the pod is unschedulable.

        The kubelet may report the number of devices from before a move once more. Then the scheduler binds the pod, the
        kubelet refuses the pod, and this method makes the pod again.
        """
        name = manifest["metadata"]["name"]
        self.waiting[name] = dict(manifest)
        pod = self.make(manifest)

        def settled() -> bool:
            nonlocal pod
            if pod.phase == "Failed":
                pod = self.remake(pod, manifest)
            return bool(pod.unschedulable())

        self.cluster.wait_for(settled, LIMIT, f"{name} is unschedulable")

    def running(self, *pods: Pod) -> None:
        for pod in pods:
            pod.wait_running()
        self.cluster.wait_for(lambda: {one.uid for one in pods} <= {one.uid for one in locks.holders()}, 10, "locks")

    def key(self, pod: Pod) -> str:
        """Return the key of the device that a pod has locked."""
        return next(one.key for one in locks.holders() if one.uid == pod.uid)

    def claimed(self, letter: str) -> Pod:
        """Serve one device, which is for claims, and start a pod that holds it by a claim; return the pod."""
        self.nodes(letter, 1)
        self.serve(resource(letter, "all"))
        self.agents.wait_offered(1)
        user = self.claimer("user", letter)
        self.running(user)
        self.note_holders()
        return user

    def claim_user(self, name: str, resource: str) -> Pod:
        self.agents.claim(f"of-{name}", self.agents.one(resource=named(resource)))
        return self.make(self.user(name, name))

    def user(self, name: str, claim: str) -> dict[str, Any]:
        """Return the manifest of a pod with the claim of a `claim_user`."""
        claims = {"device": {"resourceClaimName": f"of-{claim}"}}
        return locks.pod(name, locks.container(claims=["device"]), claims=claims)

    def joins(self, pod: Pod, name: str) -> Pod:
        joining = self.user(name, pod.name)
        main = joining["spec"]["containers"][0]
        main["command"] = [part.replace("flock -n", "flock") for part in main["command"]]  # it waits for `pod`'s lock
        return self.make(joining).wait_running()

    def forget(self, pod: Pod) -> None:
        state = KUBELET_DIRECTORY / "dra_manager_state"
        self.cluster.wait_for(lambda: pod.uid not in state.read_text(), 90, f"the kubelet forgets {pod}")

    def init_pod(self, name: str, resource: str, *, sidecar: bool = False) -> Pod:
        more: dict[str, Any] = {"restartPolicy": "Always"} if sidecar else {}
        init = locks.container("main", {named(resource): 1}, **more)
        pod = self.make(locks.pod(name, locks.container("later"), initContainers=[init]))
        self.until(f"{pod} has its device", lambda: pod.uid in {one.uid for one in locks.holders()})
        return pod

    def take_claim(self, pod: Pod) -> None:
        name, body = f"of-{pod.name}", {"metadata": {"finalizers": None}}
        self.cluster.api.patch("ResourceClaim", name, body, api_version=self.agents.api_version)
        self.cluster.api.delete("ResourceClaim", name)

    def delete(self, pod: Pod) -> None:
        pod.delete()

    def runs(self, uid: str) -> bool:
        return bool(locks.pids(uid))

    def slices(self, resource: str) -> list[dict[str, Any]]:
        return self.agents.slices(next(str(o["driver"]) for o in self.agents.resources if o["name"] == named(resource)))

    def lease(self) -> dict[str, Any]:
        return self.agents.lease()

    def until(self, what: str, condition: Callable[[], object], limit: float = LIMIT) -> None:
        self.cluster.wait_for(condition, limit, what)

    # Faults.

    def kill_agent(self) -> None:
        self.agents.kill()

    def start_agent(self) -> None:
        self.agents.start()
        self.agents.wait_registered()

    def end_kubelet(self, how: str) -> None:
        if how == "sigterm":
            self.cluster.stop_kubelet()
        else:
            self.cluster.kill("kubelet")

    def start_kubelet(self) -> None:
        self.cluster.start_kubelet()

    def lose_checkpoint(self) -> None:
        CHECKPOINT.unlink()

    def lose_ledger(self) -> None:
        damage("removed")

    def end_container(self, pod: Pod) -> None:
        for pid in locks.pids(pod.uid):
            os.kill(pid, signal.SIGTERM)
        self.cluster.wait_for(lambda: not locks.pids(pod.uid), LIMIT, "the job has ended")

    @contextlib.contextmanager
    def kubelet_without_pods(self) -> Iterator[None]:
        """Start the kubelet without a reachable API server; the end of the context makes the server reachable."""
        config = self.cluster.directory / "kubelet.kubeconfig"
        text = config.read_text()
        address = ["10.96.0.2/32", "dev", "lo"]
        self.stack.callback(self.cluster.restart_kubelet)
        self.stack.callback(config.write_text, text)
        self.stack.callback(subprocess.run, ["ip", "address", "del", *address])
        body = json.loads(text)
        body["clusters"][0]["cluster"] |= {"server": "https://10.96.0.2:443", "tls-server-name": "localhost"}
        config.write_text(json.dumps(body))
        self.cluster.start_kubelet()
        yield
        subprocess.run(["ip", "address", "add", *address], check=True)

    def stop_api_server(self) -> None:
        self.cluster.stop_apiserver()

    def start_api_server(self) -> None:
        start_api_server(self.cluster)

    @contextlib.contextmanager
    def flooded(self) -> Iterator[None]:
        with locks.flooded(POD_RESOURCES_SOCKET) as counts:
            self.cluster.wait_for(lambda: counts[1] > 50, LIMIT, "the kubelet refuses calls")
            yield

    def static_pod(self, name: str, resource: str) -> locks.Holder:
        """Run a static pod, whose container ignores SIGTERM; return it as the holder of its device."""
        manifest = self.cluster.directory / "static" / f"{name}.json"
        manifest.parent.mkdir(exist_ok=True)
        self.cluster.kubelet_config["staticPodPath"] = str(manifest.parent)
        self.cluster.restart_kubelet()
        self.cluster.wait_reported()  # the kubelet refuses a static pod for good if the plugin is not registered yet
        self.cluster.wait_allocatable(named(resource), 1)
        body = plain(name, resource, ignores_term=True, terminationGracePeriodSeconds=60)
        manifest.with_suffix(".new").write_text(json.dumps(body))
        manifest.with_suffix(".new").rename(manifest)
        self.cluster.wait_for(locks.holders, LIMIT, "the static pod runs")
        (holder,) = locks.holders()
        self._manifest = manifest
        self.stack.callback(self.end_static, manifest, holder.uid)
        return holder

    def remove_manifest(self, pod: locks.Holder) -> None:
        self._manifest.unlink()

    def end_slow(self, pod: locks.Holder) -> None:
        os.kill(pod.pid, signal.SIGKILL)

    def lose_network(self) -> None:
        self._cni = self.cluster.directory / "cni" / "10-pods.conflist"
        self._network = self._cni.read_text()
        self._cni.unlink()
        self.stack.callback(self._cni.write_text, self._network)
        self.cluster.wait_for(lambda: not self.cluster.ready(), 60, "the node is not ready")
        self._without_network = {"hostNetwork": True, "tolerations": [{"operator": "Exists"}]}

    def restore_network(self) -> None:
        """Make the network ready. The file is written, because containerd ignores a renamed file."""
        self._cni.write_text(self._network)

    def admitted(self, name: str, resource: str) -> Pod:
        """Start a pod whose init container has the device, without a ready network; wait until the pod is admitted."""
        init = [locks.container("init", {named(resource): 1})]
        spec: dict[str, Any] = {
            "nodeName": self.cluster.node_name,
            "tolerations": [{"operator": "Exists"}],
            "initContainers": init,
        }
        pod = self.make(locks.pod(name, locks.container(), **spec))
        self.cluster.wait_for(lambda: pod.uid in CHECKPOINT.read_text(), LIMIT, "the pod is admitted")
        return pod

    def wipes(self) -> int:
        return sum(one.what in ("free", "held") for one in locks.notes())

    def hang(self, pod: Pod) -> None:
        self.freeze(pod)
        pod.delete(0)
        pod.wait_gone()

    def freeze(self, pod: Pod) -> None:
        """Stop a pod's shim processes (SIGSTOP), so that the runtime cannot end the pod's containers."""
        for shim in {locks.parent(pid) for pid in locks.pids(pod.uid)}:
            os.kill(shim, signal.SIGSTOP)

    def restore(self) -> None:
        """Start stopped components and continue stopped shims, so that the pods can end."""
        for name in COMPONENTS:
            if not self.cluster.components[name].running:
                self.cluster.start_component(name)
        self.thaw()

    def thaw(self) -> None:
        for pid, _ in locks.containers():
            os.kill(locks.parent(pid), signal.SIGCONT)

    def end_static(self, manifest: Path, uid: str) -> None:
        """End a static pod at once."""
        manifest.unlink(missing_ok=True)

        def ended() -> bool:
            for pid in locks.pids(uid):
                os.kill(pid, signal.SIGKILL)
            return not any(pod.name.startswith(manifest.stem) for pod in self.cluster.pods("default"))

        self.cluster.wait_for(ended, 60, "the static pod has ended")

    # What the tests observe.

    def note_holders(self) -> None:
        self.before = len(locks.holders())

    def overlaps(self) -> list[str]:
        """Return each container that did not get the lock of a device that it has, with the key of the device."""
        return [f"{one.pod}/{one.container}: {one.key}" for one in locks.notes() if one.what == "failed"]

    def released(self) -> list[str]:
        """Return calls of `released` for a device whose lock was held."""
        return [f"{one.container}: {one.key}" for one in locks.notes() if one.what == "held"]

    def check(self) -> None:
        assert not self.overlaps(), f"holders now: {[(one.key, one.pod) for one in locks.holders()]}"

    def urge(self) -> None:
        """Make pods again that the kubelet has refused, and make the kubelet retry the preparation of claims.

        A kubelet that has lost its checkpoint lets pods run without a device until the plugin is registered again. Such
        pods are made again, too.
        """
        with contextlib.suppress(ApiError, OSError, ClusterError):
            self._urge()

    def _urge(self) -> None:
        without = {one.uid for one in locks.notes() if one.what == "without"}
        for name, manifest in self.waiting.items():
            found = self.cluster.pod(name)
            if found.phase == "Failed" or found.uid in without:
                self.remake(found, manifest)
            elif "resourceClaims" in manifest["spec"] or "extendedResourceClaimStatus" in found.status:
                # Any change of the pod makes the kubelet retry at once.
                annotations = {"retry": str(int(time.monotonic()))}
                self.cluster.api.patch("Pod", name, {"metadata": {"annotations": annotations}})

    def handed_on(self, end: Callable[[], object], old: Iterable[str], *new: str, limit: float = LIMIT) -> None:
        """Call `end`, which ends the pods `old` (UIDs), and wait until the pods `new` have the devices of these pods.

        Add the seconds from the end of the last old container until the last new pod has its device to `seconds`.
        """
        uids = set(old)

        def noted() -> list[locks.Note]:
            return [note for note in locks.notes() if note.what == "got" and note.uid in uids]

        # A container that has just started may not have noted its lock yet.
        self.cluster.wait_for(lambda: {note.uid for note in noted()} == uids, LIMIT, "the holders have their locks")
        keys = {note.key for note in noted()}
        end()
        self.cluster.wait_for(lambda: not any(map(locks.pids, uids)), LIMIT, "the containers have ended")
        ended = time.clock_gettime(time.CLOCK_BOOTTIME)

        def got() -> bool:
            self.check()
            self.urge()
            times.update((one.pod, one.at) for one in locks.notes() if one.what == "got" and one.key in keys)
            return times.keys() >= set(new)

        times: dict[str, float] = {}
        try:
            self.cluster.wait_for(got, limit, f"{', '.join(new)} have got what was held")
        except ClusterTimeout as error:
            offered = [self.agents.offered(driver) for driver in self.agents.drivers]
            explained = "\n".join(self.cluster.pod(name).explain() for name in new)
            raise ClusterTimeout(f"{error}\nslices: {offered}\n{explained}") from None
        for name in new:
            self.waiting.pop(name, None)
        self.seconds.append(max(0.0, max(times[name] for name in new) - ended))

    def handed_to_anybody(self, pod: Pod, limit: float = 60) -> None:
        """Delete a pod and wait until any other pod has got its device."""
        uid, key = pod.uid, self.key(pod)
        pod.delete()
        self.cluster.wait_for(lambda: not locks.pids(uid), LIMIT, "the container has ended")

        def got() -> bool:
            self.check()
            self.urge()
            return any(one.key == key for one in locks.holders())

        self.cluster.wait_for(got, limit, "somebody has got what was held")
        self.check()

    def row(self) -> Row:
        """Return the scenario's row of the table of holders."""
        after = self.after if self.after is not None else len(locks.holders())
        seconds = " ".join(f"{one:.1f}" for one in self.seconds) or "-"
        return Row(self.name, self.before, after, len(self.overlaps()), len(self.released()), seconds)


def resource(letter: str, share: str | int, **more: Any) -> dict[str, Any]:
    return {
        "name": named(letter),
        "driver": f"{letter}.example.net",
        "devices": [{"path": f"{locks.NODES}/{letter}/*"}],
        "dra": {"share": share},
        **more,
    }


def plain(name: str, resource: str, *, ignores_term: bool = False, **spec: Any) -> dict[str, Any]:
    return locks.pod(name, locks.container(limits={named(resource): 1}, ignores_term=ignores_term), **spec)


def claimer(name: str, resource: str, *, ignores_term: bool = False, **spec: Any) -> dict[str, Any]:
    main = locks.container(claims=["device"], ignores_term=ignores_term)
    return locks.pod(name, main, claims={"device": {"resourceClaimTemplateName": resource}}, **spec)


S = TypeVar("S", bound=Scene)


def unbroken(made: S) -> Iterator[S]:
    """Yield a scene. At its end, check that no device had two holders, and `released` was called for no held device."""
    locks.prepare()
    with made.stack:
        yield made
    made.check()
    assert not made.released()


@pytest.fixture
def scene(
    cluster: Cluster, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Scene]:
    locks.prepare()
    made = Scene(cluster, request.node.name.removeprefix("test_"))
    row: Row | None = None
    with made.stack:
        try:
            yield made
        finally:
            row = made.row()
            record_property("holders", json.dumps(row.cells()))
    assert (row.released, row.overlaps) == (0, 0), (made.released(), made.overlaps())


# --- faults ----------------------------------------------------------------------------------------------------------


def start_api_server(cluster: Cluster) -> None:
    """Start the API server again and wait until a new pod can run."""
    cluster.start_apiserver()
    for name in ("kube-controller-manager", "kube-scheduler"):
        cluster.kill(name)  # a running component may wait for a minute before it connects again
        cluster.start_component(name)
    cluster.start_pod("canary").wait_running()


class TestSides(SidesScenarios):
    """The scenarios that the fake node runs, too."""


@pytest.mark.parametrize("count", [1, 2])
def test_a_container_restarts_after_the_checkpoint_was_lost(scene: Scene, count: int) -> None:
    """A container that restarts after the loss of the kubelet's checkpoint gets a device that no other pod gets."""
    scene.begin(a=(count, "none"))
    pod = scene.pod("a0", "a", restartPolicy="Always")
    scene.running(pod)
    scene.before = len(locks.holders())
    line = f"{named('a')}: the kubelet listens"
    listened = scene.agents.log().count(line)
    scene.restart_kubelet("checkpoint")
    # A kubelet that knows neither plugin nor allocation starts the container without a device.
    scene.until("the new kubelet listens", lambda: scene.agents.log().count(line) > listened, 120)
    scene.observe(5)
    assert locks.pids(pod.uid), "the kubelet has admitted the pod anew, and failed it"
    restarts = pod.restarts()
    got = len([one for one in locks.notes() if one.what == "got" and one.uid == pod.uid])
    for pid in locks.pids(pod.uid):
        os.kill(pid, signal.SIGKILL)
    scene.cluster.wait_for(
        lambda: len([one for one in locks.notes() if one.what == "got" and one.uid == pod.uid]) > got,
        LIMIT,
        "the container has a device again",
    )
    scene.cluster.wait_for(lambda: pod.restarts() > restarts, LIMIT, "the kubelet reports the restart")
    if count > 1:
        scene.wants("pod", "a", scheduled=True)

        def both_held() -> bool:
            scene.urge()
            return len(locks.holders()) == count

        scene.cluster.wait_for(both_held, LIMIT, "another pod has the other device")
        scene.waiting.pop("wants-a")
    assert len({one.key for one in locks.holders()}) == len(locks.holders()) == count


def test_log_of_the_ledger_is_lost(scene: Scene) -> None:
    """The log file of the agent's SQLite ledger and the kubelet's checkpoint are lost: a copy file names the holder."""
    scene.begin(a=(1, "none"))
    scene.agents.stop()
    scene.agents.start()
    scene.agents.wait_registered()
    scene.cluster.wait_allocatable(named("a"), 1)
    pod = scene.pod("a0", "a")
    scene.running(pod)
    scene.before = len(locks.holders())
    copy = CDI / "deviceplugin" / "allocations" / "dra-bridge.json"
    scene.cluster.wait_for(lambda: pod.uid in copy.read_text(), LIMIT, "the copy names it")
    scene.cluster.kill("kubelet")
    scene.agents.kill()
    LEDGER.with_name(f"{LEDGER.name}-wal").unlink()
    CHECKPOINT.unlink()
    scene.cluster.start_kubelet()
    scene.agents.start()
    scene.agents.wait_registered()
    assert "is from before" in scene.agents.log()
    scene.wait(claimer("wants-a", "a"))
    scene.share(a="all")
    scene.observe(8)
    scene.handed_on(pod.delete, [pod.uid], "wants-a")


# --- agents of other names -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End an agent's process at the end of the context."""
    yield
    process.terminate()
    process.wait(20)


def forgotten(scene: Scene) -> tuple[Pod, Pod]:
    """Force-delete a pod whose container hangs, and wait until the kubelet's checkpoint no longer names the pod.

    The kubelet writes its checkpoint when a second pod starts. Return the hanging pod and the second pod.
    """
    pod = scene.pod("a0", "a")
    scene.running(pod)
    scene.before = len(locks.holders())
    scene.freeze(pod)
    pod.delete(0)
    pod.wait_gone()
    other = scene.pod("a1", "a")  # the start of this pod makes the kubelet write its checkpoint
    scene.cluster.wait_for(lambda: other.phase in ("Running", "Failed"), LIMIT, "the kubelet has decided about it")
    scene.cluster.wait_for(lambda: pod.uid not in CHECKPOINT.read_text(), 60, "the kubelet has forgotten it")
    return pod, other


def handed_on_at_its_end(scene: Scene, pod: Pod, other: Pod) -> None:
    """Start two pods for the two devices; both pods have a device only after the hanging container has ended."""
    other.delete(0)
    other.wait_gone()
    for name in ("wants-0", "wants-1"):
        scene.waiting[name] = plain(name, "a")
        scene.make(scene.waiting[name])
    scene.observe(10)
    scene.thaw()
    scene.cluster.wait_for(lambda: not locks.pids(pod.uid), LIMIT, "the container has ended")

    def all_run() -> bool:
        scene.check()
        scene.urge()
        return len(locks.holders()) == 2

    scene.cluster.wait_for(all_run, 60, "what it had is given to the next pod")


@pytest.mark.parametrize("how", ["limits", "claim"])
def test_an_idle_device_moves_instead_of_a_held_one(scene: Scene, how: str) -> None:
    """While the move of a held device waits, another device becomes idle: it moves, and its next holder gets it.

    The pod with the held device keeps it.
    """
    scene.begin(a=(2, "none" if how == "limits" else "all"))
    pods = [scene.pod(name, "a") if how == "limits" else scene.claimer(name, "a") for name in ("p0", "p1")]
    scene.running(*pods)
    scene.before = 2
    scene.share(a=1)
    waits = re.compile(r"the move of device \S+ waits for (?:pod|claim) default/(p[01])")
    scene.until("a move waits", lambda: waits.search(scene.agents.log()))
    (name,) = set(waits.findall(scene.agents.log()))
    (kept,) = (pod for pod in pods if pod.name == name)
    (other,) = (pod for pod in pods if pod is not kept)
    manifest = (claimer if how == "limits" else plain)("wants-a", "a")
    scene.wait(manifest)
    scene.handed_on(other.delete, [other.uid], "wants-a", limit=60)
    assert kept.phase == "Running"
    assert {one.pod for one in locks.holders()} == {kept.name, "wants-a"}


@contextlib.contextmanager
def pod_of_another_kubelet() -> Iterator[None]:
    """Run a process in a cgroup as a pod of kind has it: in a tree `kubepods` of its own."""
    (hierarchy,) = isolate.POD_CGROUPS.iterdir()
    group = hierarchy / "docker" / ("ab" * 32) / "kubelet/kubepods/burstable" / f"pod{uuid.uuid4()}" / "container"
    group.mkdir(parents=True)
    with subprocess.Popen(["sleep", "infinity"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        try:
            yield
        finally:
            process.kill()
    for directory in (group, *group.parents):
        if directory == hierarchy:
            break
        wait(lambda: removed(directory))  # noqa: B023


def removed(cgroup: Path) -> bool:
    """Remove a cgroup; return whether that was possible, because its processes have left it."""
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


@pytest.mark.parametrize("how", ["limits", "claim"])
def test_a_pod_of_another_kubelet_keeps_no_device(scene: Scene, how: str) -> None:
    """While a pod of another kubelet (kind) runs on the machine, a device whose pod has ended gets its next holder."""
    scene.begin(a=(1, "none" if how == "limits" else "all"))
    pod = scene.pod("a0", "a") if how == "limits" else scene.claimer("a0", "a")
    scene.running(pod)
    scene.before = 1
    with pod_of_another_kubelet():
        scene.wants("pod" if how == "limits" else "claim", "a")
        scene.observe(2)
        scene.handed_on(pod.delete, [pod.uid], "wants-a", limit=60)


@pytest.mark.parametrize("successor", ["bridge", "plugin"])
def test_an_agent_of_another_name_knows_what_hangs(scene: Scene, successor: str) -> None:
    """A pod was deleted by force but still runs: another agent knows the pod from the former agent's copy file."""
    scene.nodes("a", 2)
    scene.stack.callback(remove_ledger, "other")
    scene.serve(resource("a", "none"))
    scene.cluster.wait_allocatable(named("a"), 2)
    pod, other = forgotten(scene)
    scene.agents.stop()
    if successor == "bridge":
        scene.agents.start("--agent-name", "other")
    else:
        scene.stack.enter_context(ended(scene.agents.start_plugin()))
    handed_on_at_its_end(scene, pod, other)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
def test_a_plugin_alone_knows_what_hangs_after_its_restart(scene: Scene, how: signal.Signals) -> None:
    """A pod was deleted by force but still runs: a restarted plugin without a ledger knows it from a copy file."""
    scene.nodes("a", 2)
    scene.serve(resource("a", "none"))
    scene.agents.stop()
    remove_ledger()
    plugin = scene.agents.start_plugin()
    scene.stack.callback(plugin.kill)
    scene.cluster.wait_allocatable(named("a"), 2)
    pod, other = forgotten(scene)
    plugin.send_signal(how)
    plugin.wait(20)
    scene.stack.enter_context(ended(scene.agents.start_plugin()))
    handed_on_at_its_end(scene, pod, other)


def test_a_second_agent_of_another_name(scene: Scene) -> None:
    """A second agent, with its own resource and driver, does not change how the first agent serves claims."""
    scene.nodes("a", 2)
    scene.nodes("b", 1)
    scene.stack.callback(remove_ledger, "two")
    agents = scene.serve(resource("a", "all"), resource("b", "all"))
    one, two = agents.resources
    agents.resources = [one]
    agents.write()
    agents.stop()
    agents.start()
    agents.wait_registered()
    agents.wait_offered(2, "a.example.net")
    user = scene.claimer("user", "a")
    scene.running(user)
    first, config = agents.process, agents.config
    agents.config, agents.resources = config.with_name("two.yaml"), [two]
    agents.write()
    agents.start("--agent-name", "two")
    second = agents.process
    assert second is not None
    scene.stack.enter_context(ended(second))
    agents.process, agents.config, agents.resources = first, config, [one, two]
    agents.wait_offered(1, "b.example.net")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        assert len(agents.offered("a.example.net")) == 2
        scene.check()
        time.sleep(0.2)
    scene.running(scene.claimer("other", "a"))
    scene.before = len(locks.holders())
    scene.wait(claimer("wants-a", "a"))
    scene.handed_on(user.delete, [user.uid], "wants-a")


# --- agents that follow each other -----------------------------------------------------------------------------------


def test_the_runtime_has_forgotten_a_process(scene: Scene) -> None:
    """A process left in the cgroup of a claim's pod holds the claim's device until the kubelet kills the process.

    Such a process may be the `runc init` of a container that containerd was creating when the kubelet ended.
    """
    user = scene.claimed("a")
    left = subprocess.Popen(["sleep", "1000"])
    scene.stack.callback(left.wait)
    scene.stack.callback(left.kill)
    names = (f"pod{user.uid}", f"pod{user.uid.replace('-', '_')}.slice")
    groups = [one for one in isolate.cgroup_directories(isolate.cgroup().lstrip("/")) if one.name.endswith(names)]
    for group in groups:
        child = group / "left"
        child.mkdir()
        with contextlib.suppress(OSError):  # a new cgroup of cgroup v1's cpuset has no CPUs
            (child / "cgroup.procs").write_text(str(left.pid))
    scene.wait(claimer("wants-claim", "a"))
    seen: list[tuple[bool, bool]] = []

    def end() -> None:
        user.delete()
        scene.cluster.wait_for(lambda: "its devices are held until they end" in scene.agents.log(), LIMIT, "a refusal")
        seen.append((left.poll() is None, scene.cluster.pod("wants-claim").phase == "Pending"))

    scene.handed_on(end, [user.uid], "wants-claim", limit=90)
    assert seen == [(True, True)]
    assert left.wait(0) == -signal.SIGKILL


def one_of_each(scene: Scene) -> tuple[Pod, Pod]:
    """Start a pod by limits and a pod by claim, which hold the two devices of resource a; return both."""
    scene.nodes("a", 2)
    scene.serve(resource("a", 1))
    scene.cluster.wait_allocatable(named("a"), 1)
    scene.agents.wait_offered(1)
    pod, user = scene.pod("plain", "a"), scene.claimer("user", "a")
    scene.running(pod, user)
    scene.before = len(locks.holders())
    return pod, user


@pytest.mark.parametrize("how", ["overlapping", pytest.param("killed", marks=long)])
def test_plugin_follows_bridge(scene: Scene, how: str) -> None:
    """`deviceplugin run` follows `dra-bridge run`, and vice versa: no held device is granted to another pod."""
    scene.nodes("a", 3)
    scene.serve(resource("a", 2))
    agents = scene.agents
    scene.cluster.wait_allocatable(named("a"), 1)
    agents.wait_offered(2)
    pod, user = scene.pod("plain", "a"), scene.claimer("user", "a")
    scene.running(pod, user)
    scene.wait(plain("wants-plain", "a"))

    def late() -> None:
        """Start a pod by claim that holds the third device."""
        scene.running(scene.claimer("late", "a"))
        scene.before = len(locks.holders())

    if how == "killed":
        late()
        agents.kill()
    plugin = agents.start_plugin()
    scene.stack.callback(plugin.kill)
    if how == "overlapping":
        scene.cluster.wait_for(lambda: "waiting for it to end" in agents.log(), LIMIT, "the plugin waits")
        late()
        agents.stop()
    scene.observe(6)
    assert plugin.poll() is None
    scene.share(a="all")
    if how == "killed":
        plugin.kill()
        plugin.wait()
    agents.start()
    agents.wait_registered(resources=how == "killed")
    if how == "overlapping":
        scene.cluster.wait_for(lambda: "waiting for it to end" in agents.log(), LIMIT, "the bridge waits")
        plugin.terminate()
        plugin.wait(20)
    # While the device plugin has no device, DRA serves a pod by limits, too.
    del scene.waiting["wants-plain"]
    scene.cluster.pod("wants-plain").delete(0)
    scene.wait(claimer("wants-claim", "a"))
    scene.observe(5)
    scene.handed_on(pod.delete, [pod.uid], "wants-claim")


def damage(how: str) -> None:
    """Damage all files of the agent's ledger. how: removed, zero (emptied), truncated, or garbage (random bytes)."""
    for file in LEDGER.parent.glob(f"{LEDGER.name}*"):
        if how == "removed":
            file.unlink()
        elif how == "zero":
            os.truncate(file, 0)
        elif how == "truncated":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "garbage" and file.stat().st_size:
            file.write_bytes(os.urandom(file.stat().st_size))


DAMAGED = [
    pytest.param(how, successor, marks=() if (how, successor) in often else long, id=f"{how}-{successor}")
    for often in [{("removed", "bridge"), ("zero", "plugin"), ("locked", "plugin"), ("garbage", "bridge")}]
    for how in ("removed", "zero", "truncated", "garbage", "locked")
    for successor in ("bridge", "plugin")
]


@pytest.mark.parametrize(("how", "successor"), DAMAGED)
def test_ledger_is_damaged(scene: Scene, how: str, successor: str) -> None:
    """An agent that starts with a damaged ledger (its file of holders) grants no device that a pod or claim holds."""
    pod, user = one_of_each(scene)
    scene.wait(plain("wants-plain", "a"))
    scene.wait(claimer("wants-claim", "a"))
    former = scene.agents.process
    assert former is not None
    if how == "locked":  # the former agent hangs, and keeps the ledger's lock
        former.send_signal(signal.SIGSTOP)
        scene.stack.callback(former.wait)
        scene.stack.callback(former.kill)
        scene.agents.process = None
    else:
        scene.agents.kill()
        damage(how)
    if successor == "plugin":
        plugin = scene.agents.start_plugin()
        scene.stack.callback(plugin.kill)
        scene.observe(5)
        plugin.kill()
        plugin.wait()
    scene.agents.start()
    scene.observe(5)
    former.kill()
    former.wait()
    scene.agents.wait_registered()
    scene.handed_on(pod.delete, [pod.uid], "wants-plain")
    scene.handed_on(user.delete, [user.uid], "wants-claim")


@pytest.mark.parametrize("how", ["reload", pytest.param("restart", marks=long)])
def test_driver_is_renamed(scene: Scene, how: str) -> None:
    """A driver is renamed: devices that its claims hold go neither to pods nor to claims of the new driver."""
    pod, _ = one_of_each(scene)
    before = scene.agents.resources[:]
    scene.wait(plain("wants-plain", "a"))
    if how == "restart":
        scene.agents.kill()
    scene.agents.resources[:] = [resource("a", 1, driver="renamed.example.net")]
    scene.agents.write()
    scene.agents._install()
    if how == "restart":
        scene.agents.start()
    scene.agents.template("renamed", scene.agents.one())
    scene.wait(claimer("wants-claim", "renamed"))
    try:
        scene.observe(6)
        # One of the two waiting pods gets the device, which may be for limits or for claims now.
        scene.handed_to_anybody(pod)
    finally:
        scene.after = len(locks.holders())
        scene.agents.resources[:] = before  # only the former driver can unprepare its claims
        scene.agents.write()
        if how == "restart":
            scene.agents.kill()
            scene.agents.start()


def test_driver_is_renamed_beside_pods_by_limits(scene: Scene) -> None:
    """A driver is renamed while DRA serves three pods by limits: a new pod gets the device of the first pod that ends.

    A kubelet restart then ends no pod.
    """
    if scene.cluster.minor < 35:
        pytest.skip("1.34 leaves extended resources to DRA only where the node does not name them at all")
    scene.nodes("a", 3)
    scene.serve(resource("a", "all"))
    scene.agents.wait_offered(3)
    scene.cluster.wait_allocatable(named("a"), 0)
    first, *others = [scene.pod(f"user-{number}", "a") for number in range(3)]
    scene.running(first, *others)
    scene.agents.resources[:] = [resource("a", "all", driver="renamed.example.net")]
    scene.agents.write()
    scene.agents._install()
    key = scene.key(first)
    first.delete()
    new = scene.pod("new", "a")
    scene.running(new, *others)
    assert scene.key(new) == key
    scene.cluster.restart_kubelet()
    scene.agents.wait_registered()
    scene.observe(6)
    assert {one.phase for one in (new, *others)} == {"Running"}
    for one in others:
        one.delete()
    scene.agents.wait_offered(3, "renamed.example.net")


@pytest.mark.parametrize("share", ["none", "all"])
def test_resource_and_driver_are_renamed(scene: Scene, share: str) -> None:
    """Resource and driver are renamed, and a held device has another id: no other pod gets it while it is held."""
    scene.nodes("a", 1)
    agents = scene.serve(resource("a", share))
    if share == "none":
        scene.cluster.wait_allocatable(named("a"), 1)
        holder = scene.pod("holder", "a")
    else:
        agents.wait_offered(1)
        holder = scene.claimer("holder", "a")
    scene.running(holder)
    (locks.NODES / "links").mkdir()
    (locks.NODES / "links" / "other").symlink_to(locks.NODES / "a" / "a0")
    before = agents.resources[:]
    agents.stop()
    agents.resources[:] = [resource("c", "none", devices=[{"path": f"{locks.NODES}/links/*"}])]
    agents.write()
    agents._install()
    agents.start()
    scene.wait(plain("wants", "c"))
    scene.observe(10)
    assert [one.pod for one in locks.holders()] == ["holder"]
    if share == "none":
        scene.handed_on(holder.delete, [holder.uid], "wants")
    else:  # only the former driver can unprepare the claim
        agents.stop()
        agents.resources[:] = before
        agents.write()
        agents.start()
        scene.after = len(locks.holders())


@pytest.mark.parametrize("how", ["resource", "node"])
def test_plugin_alone_has_another_name_for_a_device(scene: Scene, how: str) -> None:
    """A plugin that starts with another resource or node name neither grants nor releases a held device."""
    scene.nodes("a", 2)
    agents = scene.serve(resource("a", "none"))
    agents.stop()
    scene.cluster.wait_allocatable(named("a"), 0)
    agents.resources[:] = [{"name": named("a"), "devices": [{"path": f"{locks.NODES}/a/*"}]}]
    agents.write()
    plugin = agents.start_plugin()
    try:
        scene.cluster.wait_allocatable(named("a"), 2)
        holder = scene.pod("holder", "a")
        scene.running(holder)
        plugin.terminate()
        plugin.wait(20)
        held = scene.key(holder)
        if how == "resource":
            agents.resources[0]["name"] = named("c")
            agents.write()
        else:
            node = next(one for one in (locks.NODES / "a").iterdir() if locks.key_of(one) == held)
            node.rename(node.with_name("zed"))
        plugin = agents.start_plugin()
        wanted = "c" if how == "resource" else "a"
        for name in ("wants-1", "wants-2"):
            scene.waiting[name] = plain(name, wanted)
            scene.make(scene.waiting[name])
        scene.observe(15)
        assert [one.pod for one in locks.holders() if one.key == held] == ["holder"]
        scene.check()
        scene.after = len(locks.holders())
    finally:
        plugin.kill()
        plugin.wait()


# --- names of devices ------------------------------------------------------------------------------------------------


def test_aliases_of_a_node(scene: Scene) -> None:
    """A device with several names has one holder, before and after its links change."""
    directory = locks.NODES

    def link(path: str, target: str) -> None:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        new = directory / "new"
        new.symlink_to(directory / target)
        new.rename(directory / path)

    scene.nodes("targets", 3)
    scene.nodes("s", 1)
    scene.nodes("t", 1)
    link("r/x", "targets/targets0")
    link("w/l0", "targets/targets1")
    link("w/l1", "targets/targets2")
    same = {"driver": "alias.example.net"}
    scene.serve(
        *(resource(letter, "none", **same) for letter in "rswt"),
        resource("u", "none", devices=[{"path": f"{directory}/t/*"}]),
    )
    for letter, count in (("r", 1), ("s", 1), ("w", 2), ("t", 1)):
        scene.cluster.wait_allocatable(named(letter), count)
    pods = [scene.pod(f"{letter}0", letter) for letter in "rswt"]
    scene.running(*pods)
    scene.before = len(locks.holders())
    link("r/y", "targets/targets0")
    (directory / "r" / "x").unlink()
    link("s/a0", "s/s0")
    link("w/l0", "targets/targets2")
    link("w/l1", "targets/targets1")
    for letter in "rswu":
        scene.waiting[f"wants-{letter}"] = plain(f"wants-{letter}", letter)
        scene.make(scene.waiting[f"wants-{letter}"])
    scene.observe(3)
    with scene.agent_killed("killed"):
        pass
    scene.observe(9)
    for pod, wants in ((pods[0], "wants-r"), (pods[1], "wants-s"), (pods[3], "wants-u")):
        scene.handed_on(pod.delete, [pod.uid], wants)


# --- the node, the control plane, and files --------------------------------------------------------------------------


def reboot(scene: Scene, agent: str = "after the kubelet") -> None:
    """Simulate a reboot: end the node's programs and containers, empty directories of /run, and change the boot id.

    agent: when the agent starts: `after the kubelet`, `before the kubelet`, `plugin before the kubelet` (`deviceplugin
    run`), or `later`, by the caller. With `before`, the kubelet starts after the agent's READY notification.
    """
    cluster = scene.cluster
    scene.agents.kill()
    cluster.kill("kubelet")
    cluster.kill("containerd")
    group = isolate.cgroup().lstrip("/")
    shims = {locks.parent(pid) for pid, _ in locks.containers()}

    def dead() -> bool:
        isolate.kill_cgroup(group)
        for shim in shims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(shim, signal.SIGKILL)
        for directory in isolate.cgroup_directories(group):
            if directory.name != group:
                directory.rmdir()
        return not any(locks.containers())

    cluster.wait_for(dead, LIMIT, "everything has ended")
    state = cluster.directory / "containerd-state"
    wiped = [Path("/run/containerd"), Path("/run/netns"), CDI.resolve(), state, KUBELET_DIRECTORY / "pods"]
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split()[4]
        if any(point.startswith(f"{path}/") for path in wiped):
            subprocess.run(["umount", "--lazy", point], check=True)
    for path in wiped[:-1]:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    isolate.BOOT_ID.write_text(f"{uuid.uuid4()}\n")
    cluster.start_component("containerd")
    cluster.wait_for(lambda: cluster._ctr("version").returncode == 0, LIMIT, "containerd answers", log="containerd")
    if "before the kubelet" in agent:
        with service_manager() as manager:
            if agent.startswith("plugin"):
                scene.stack.enter_context(ended(scene.agents.start_plugin()))
            else:
                scene.agents.start()
            manager.wait_for("READY=")
    cluster.start_kubelet()
    if agent == "after the kubelet":
        scene.agents.start()


@pytest.mark.parametrize("agent", ["before the kubelet", "plugin before the kubelet", "later"])
def test_pods_by_limits_after_a_reboot(scene: Scene, agent: str) -> None:
    """After a reboot, a pod by limits runs again if the agent was ready before the kubelet started; else it fails."""
    scene.begin(a=(1, "none"))
    pod = scene.pod("a0", "a")
    scene.running(pod)
    reboot(scene, agent)
    if agent == "later":
        pod.wait_phase("Failed", timeout=60)
        assert pod.status["reason"] == "UnexpectedAdmissionError"
        assert "no healthy devices present" in pod.status["message"]
        scene.agents.start()
    else:
        scene.cluster.wait_for(lambda: locks.pids(pod.uid), 60, "the pod runs again")
        scene.running(pod)


@pytest.mark.parametrize("api", ["up", "down"])
def test_node_reboots(scene: Scene, api: str) -> None:
    """After a reboot, no device has two holders, and the device of a failed pod goes to the waiting pod."""
    plains, claimers = scene.both()
    if api == "down":
        scene.cluster.stop_apiserver()
    reboot(scene)
    if api == "down":
        scene.observe(5)  # meanwhile the kubelet lists no pod, as the API server is stopped
        start_api_server(scene.cluster)

    def over() -> bool:
        scene.check()
        return bool(locks.holders()) and all(pod.phase == "Failed" or locks.pids(pod.uid) for pod in plains)

    scene.cluster.wait_for(over, 60, "the kubelet has decided about the pods")
    scene.observe(5)
    if failed := [pod for pod in plains if pod.phase == "Failed"]:
        began = time.monotonic()
        scene.cluster.wait_for(
            lambda: any(one.pod == "wants-a" for one in locks.holders()),
            LIMIT,
            f"the device of {failed} has moved though nobody deletes them",
        )
        scene.seconds.append(time.monotonic() - began)
    scene.running(*claimers)
    scene.handed_on(claimers[0].delete, [claimers[0].uid], "wants-b")


def test_cdi_directory_is_wiped(scene: Scene) -> None:
    """A container of a claim starts again though the CDI directory was wiped."""
    user = scene.claimed("b")
    began = time.monotonic()
    for path in CDI.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (pid,) = locks.pids(user.uid)
    os.kill(pid, signal.SIGKILL)
    scene.cluster.wait_for(lambda: user.restarts() and locks.pids(user.uid), LIMIT, "the container runs again")
    scene.running(user)
    scene.seconds.append(time.monotonic() - began)
    scene.check()


@pytest.fixture
def last_cluster(shared_cluster: Shared) -> Iterator[None]:
    """Stop the cluster at the end: some components watch from resource versions that the restored etcd lacks."""
    yield
    shared_cluster.stop()


@pytest.mark.usefixtures("last_cluster")
def test_etcd_is_restored(scene: Scene) -> None:
    """etcd is restored from an older copy: the agent takes held devices out of the slices, and later moves devices."""
    cluster = scene.cluster
    data, copy = cluster.directory / "etcd", cluster.directory / "etcd-copy"
    control_plane = ("kube-controller-manager", "kube-scheduler", "kube-apiserver", "etcd")

    def stopped(do: Callable[[], object]) -> None:
        for name in control_plane:
            cluster.kill(name)
        do()
        for name in reversed(control_plane):
            cluster.start_component(name)

    scene.nodes("a", 2)
    scene.serve(resource("a", 1))
    cluster.wait_allocatable(named("a"), 1)
    scene.agents.wait_offered(1)
    scene.stack.callback(shutil.rmtree, copy, ignore_errors=True)
    stopped(lambda: shutil.copytree(data, copy))
    scene.share(a="none")
    cluster.wait_allocatable(named("a"), 2)
    spec: dict[str, Any] = {"ignores_term": True, "terminationGracePeriodSeconds": 25}
    pods = [scene.pod(f"a{number}", "a", **spec) for number in range(2)]
    scene.running(*pods)
    scene.before = len(locks.holders())

    def restore() -> None:
        shutil.rmtree(data)
        copy.rename(data)

    stopped(restore)
    scene.waiting["wants-a"] = claimer("wants-a", "a")
    scene.make(scene.waiting["wants-a"])
    began = time.monotonic()

    def mended() -> bool:
        scene.check()
        return not scene.agents.offered()

    cluster.wait_for(mended, LIMIT, "no slice offers what pods hold")
    scene.seconds.append(time.monotonic() - began)
    path, key = f"/api/v1/nodes/{cluster.node_name}", "a.example.net/dra-share"

    def annotate(share: str | None) -> None:
        body = {"metadata": {"annotations": {key: share}}}
        cluster.api.request("PATCH", path, body, content_type="application/merge-patch+json")

    scene.stack.callback(annotate, None)
    annotate("all")
    began = time.monotonic()
    cluster.wait_for(lambda: scene.states("a")["plugin"] == 0, LIMIT, "the new share is heard")
    scene.seconds.append(time.monotonic() - began)
    cluster.restart_kubelet()  # the kubelet, too, watches from a resource version that the restored etcd lacks
    cluster.wait_for(lambda: any(one.pod == "wants-a" for one in locks.holders()), 60, "the device has moved")
    scene.check()
