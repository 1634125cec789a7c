"""Devices move between device plugin and DRA on the real node while pods with limits and with claims come and go.

Each container writes into files which device it holds and when, by the clock that all containers share (/proc/uptime).
The tests check that no two containers held one device at the same time. The environment variable CHURN_SECONDS is the
duration in seconds; its default is longer if CLUSTER_LONG is set.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from tests.cluster import image, isolate
from tests.cluster.bridge import Bridge, seconds_until
from tests.cluster.node import Cluster, ClusterError
from tests.scenarios.sides import LONG

DRIVER = "card.example.net"
RESOURCE = "example.net/card"
DEVICES = Path(isolate.DEVICES) / "handover"
NOTES = Path(isolate.DEVICES) / "notes"
CHURN_SECONDS = float(os.environ.get("CHURN_SECONDS", "75" if LONG else "45"))

# Writes the device and the time of the start, and then the device and the time every 50 ms until the end.
WORKER = f"""
read now rest < /proc/uptime
device=$(ls {DEVICES} | head -n 1)
echo "$device $now" > /notes/$POD.$$.begin
trap 'exit 0' TERM
while true; do
  read now rest < /proc/uptime
  echo "$device $now" > /notes/$POD.$$.beat
  sleep 0.05
done
"""


def card(share: str | int = "none") -> dict[str, Any]:
    return {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"path": f"{DEVICES}/*"}],
        "dra": {"share": share},
    }


@contextlib.contextmanager
def serving_cards(cluster: Cluster, share: str = "none", **options: Any) -> Iterator[Bridge]:
    """Run the agent with eight devices, none of which is for claims yet. options: those of `Bridge.running`."""
    for directory in (DEVICES, NOTES):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    for number in range(8):
        os.mknod(DEVICES / f"card{number}", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    with Bridge.running(cluster, card(share), **options) as running:
        cluster.wait_allocatable(RESOURCE, 8)
        try:
            yield running
        finally:
            annotate(cluster, None)


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    with serving_cards(cluster) as running:
        yield running


def worker(**resources: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "image": image.IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", WORKER],
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "volumeMounts": [{"name": "notes", "mountPath": "/notes"}],
        "resources": resources,
    }


def deployment(name: str, replicas: int, container: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": "notes", "hostPath": {"path": str(NOTES)}}],
                    "terminationGracePeriodSeconds": 1,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    **spec,
                },
            },
        },
    }


def annotate(cluster: Cluster, share: str | None) -> None:
    """Request a share (devices for claims) as `dra-bridge migrate` does; None removes the request."""
    path = f"/api/v1/nodes/{cluster.node_name}"
    body = {"metadata": {"annotations": {f"{DRIVER}/dra-share": share}}}
    cluster.api.request("PATCH", path, body, content_type="application/merge-patch+json")


def states(bridge: Bridge) -> Counter[str]:
    """Return the number of devices in each state, as the agent reports them."""
    devices = bridge.report(DRIVER).get("resources", {}).get(RESOURCE, {}).get("devices", {})
    return Counter(device["state"] for device in devices.values())


@dataclass
class Holding:
    """A device that a container held at least from begin to end (seconds of uptime), as the container's file says."""

    container: str
    device: str
    begin: float
    end: float


def holdings() -> list[Holding]:
    """Read the files that the containers wrote."""
    found = []
    for begin in NOTES.glob("*.begin"):
        device, since = [*begin.read_text().split(), "", ""][:2]
        beat = begin.with_suffix(".beat")
        last = beat.read_text().split() if beat.exists() else []
        if device and since:
            found.append(Holding(begin.stem, device, float(since), float(last[1]) if len(last) == 2 else float(since)))
    return found


def overlaps(found: list[Holding]) -> list[str]:
    """Return every pair of containers that held one device at the same time."""
    wrong = []
    by_device: dict[str, list[Holding]] = {}
    for one in found:
        by_device.setdefault(one.device, []).append(one)
    for device, holders in by_device.items():
        holders.sort(key=lambda one: one.begin)
        for index, one in enumerate(holders):
            wrong += [
                f"{device}: {one.container} until {one.end} and {other.container} from {other.begin}"
                for other in holders[index + 1 :]
                if other.begin <= one.end
            ]
    return wrong


@dataclass
class Churn:
    """Deletes random pods, which their Deployments replace, and notes pods that failed.

    every: mean seconds between two deletions. ending: no pod is deleted while this many pods are terminating.
    """

    cluster: Cluster
    every: float = 0.4
    ending: float = math.inf
    failed: dict[str, tuple[float, str]] = field(default_factory=dict)
    deleted: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for loop in (self._delete, self._notice):
            thread = threading.Thread(target=loop, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(30)

    def _delete(self) -> None:
        chance = random.Random(7)
        while not self.over.wait(chance.uniform(self.every / 2, self.every * 1.5)):
            with contextlib.suppress(ClusterError, OSError, KeyError):
                pods = self.cluster.api.list("Pod", "default", "v1")
                left = [one for one in pods if "deletionTimestamp" not in one["metadata"]]
                running = [one for one in left if one["status"]["phase"] == "Running"]
                if running and len(pods) - len(left) < self.ending:
                    victim = chance.choice(running)["metadata"]["name"]
                    self.cluster.api.delete("Pod", victim, "default", "v1", grace=1)
                    self.deleted += 1

    def _notice(self) -> None:
        while not self.over.wait(0.2):
            with contextlib.suppress(ClusterError, OSError, KeyError):
                for one in self.cluster.api.list("Pod", "default", "v1"):
                    # A deleted pod that does not end on SIGTERM in time (a busy machine) fails without a reason.
                    ended = "deletionTimestamp" in one["metadata"] and not one["status"].get("reason")
                    if one["status"]["phase"] == "Failed" and not ended:
                        said = f"{one['status'].get('reason', '')}: {one['status'].get('message', '')}"
                        self.failed.setdefault(one["metadata"]["name"], (time.monotonic(), said))


def start_churn(bridge: Bridge, replicas: int = 6) -> None:
    """Start this number (`replicas`) of pods with limits, and as many pods with claims."""
    bridge.template("cards")
    claims = {"resourceClaims": [{"name": "card", "resourceClaimTemplateName": "cards"}]}
    bridge.cluster.api.apply(
        [
            deployment("plain", replicas, worker(limits={RESOURCE: "1"})),
            deployment("claims", replicas, worker(claims=[{"name": "card"}]), **claims),
        ]
    )


def stop_churn(bridge: Bridge, *names: str) -> None:
    for name in names or ("plain", "claims"):
        bridge.cluster.api.delete("Deployment", name, "default", "apps/v1")


def at_rest(bridge: Bridge, dra: int) -> bool:
    """Return whether no device is to move, `dra` of the eight devices are for claims, and the others for limits."""
    return states(bridge) == Counter({side: n for side, n in (("dra", dra), ("plugin", 8 - dra)) if n})


def wait_at_rest(bridge: Bridge, dra: int, timeout: float = 30.0) -> float:
    """Wait until no device is to move and `dra` devices are for claims; return the seconds that this took."""
    return seconds_until(bridge.cluster, lambda: at_rest(bridge, dra), timeout, f"{dra} devices are on the DRA side")


def test_idle_devices_move_fast(bridge: Bridge) -> None:
    """One or all idle devices move to claims, or back to limits, within 30 s. The times are printed."""
    cluster = bridge.cluster
    figures = []
    for share, dra in (("1", 1), ("all", 8), ("7", 7), ("none", 0)):
        before = states(bridge)
        annotate(cluster, share)
        took = wait_at_rest(bridge, dra)
        cluster.wait_allocatable(RESOURCE, 8 - dra)
        figures.append(f"{before['dra']} -> {dra}: {took:.2f} s")
    print("idle devices moved:", ", ".join(figures))


def test_a_held_device_moves_with_its_holder(bridge: Bridge) -> None:
    """A held device that is to move is offered to no new pod, and moves when its holder, a pod or a claim, ends."""
    cluster = bridge.cluster
    pod = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
    annotate(cluster, "all")
    cluster.wait_for(lambda: states(bridge) == Counter({"dra": 7, "to-dra": 1}), 30, "all but one are moved")
    pod.exec(["true"])
    cluster.wait_allocatable(RESOURCE, 0)
    bridge.claim("mine")
    user = bridge.pod("user", {"card": "mine"}).wait_running()
    pod.delete()
    pod.wait_gone()
    cluster.wait_for(lambda: at_rest(bridge, 8), 30, "the last one is moved")
    annotate(cluster, "none")
    cluster.wait_for(lambda: states(bridge) == Counter({"plugin": 7, "to-plugin": 1}), 30, "all but one are back")
    user.exec(["true"])
    user.delete()
    user.wait_gone()
    cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)
    cluster.wait_for(lambda: at_rest(bridge, 0), 30, "the last one is back")
    cluster.wait_allocatable(RESOURCE, 8)


def test_devices_return_when_unchanged_pods_have_ended(bridge: Bridge) -> None:
    """While DRA serves a pod with limits, no device moves back to the device plugin; all do after the pod's end."""
    cluster = bridge.cluster
    if cluster.minor < 35:
        pytest.skip("1.34 leaves extended resources to DRA only where the node does not name them at all")
    annotate(cluster, "all")
    wait_at_rest(bridge, 8)
    cluster.wait_allocatable(RESOURCE, 0)
    unchanged = cluster.start_pod("unchanged", {RESOURCE: 1}).wait_running()
    annotate(cluster, "none")
    cluster.wait_for(lambda: states(bridge) == Counter({"to-plugin": 8}), 30, "all leave the slices")
    cluster.wait_for(lambda: "its pod has a device by limits" in bridge.log(), 30, "they wait for the pod")
    assert cluster.allocatable(RESOURCE) == 0
    unchanged.exec(["true"])
    unchanged.delete()
    unchanged.wait_gone()
    cluster.wait_for(lambda: at_rest(bridge, 0), 30, "all are back")
    cluster.wait_allocatable(RESOURCE, 8)


@pytest.mark.lengthy
def test_a_claim_gets_its_device_under_churn_by_limits(bridge: Bridge) -> None:
    """Pods with limits come and go, and wait for each free device: a claim that has a held device still gets it."""
    cluster = bridge.cluster
    cluster.api.apply(deployment("plain", 11, worker(limits={RESOURCE: "1"})))
    cluster.wait_for(lambda: len({one.device for one in holdings()}) == 8, 60, "pods have all devices")
    claim = bridge.claim("late")
    device = sorted(bridge.report(DRIVER)["resources"][RESOURCE]["devices"])[3]
    # Write the allocation that the scheduler writes if it has an older slice in its cache.
    (request,) = claim["spec"]["devices"]["requests"]
    result = {"request": request["name"], "driver": DRIVER, "pool": cluster.node_name, "device": device}
    path = f"/apis/{bridge.api_version}/namespaces/default/resourceclaims/late/status"
    allocation = {"devices": {"results": [result]}}
    cluster.api.request("PUT", path, {**claim, "status": {"allocation": allocation}})
    with Churn(cluster, every=1.0) as churn:
        user = bridge.pod("user", {"card": "late"}, nodeName=cluster.node_name)
        cluster.wait_for(lambda: "cannot prepare claim default/late" in bridge.log(), 60, "its device is held")
        user.wait_running(150)
    stop_churn(bridge, "plain")
    assert overlaps(holdings()) == []
    print(f"{churn.deleted} pods deleted, {len(churn.failed)} failed")
    # The scheduler may have bound a pod just before the claim's device left the device plugin (see `LATE`).
    late = [said for _, said in churn.failed.values() if said.startswith(LATE)]
    assert len(churn.failed) == len(late) <= 1, churn.failed


@pytest.mark.lengthy
def test_no_pod_fails_where_there_is_room(bridge: Bridge) -> None:
    """No pod fails while devices move, if enough devices stay for the pods with limits and for the pods with claims."""
    start_churn(bridge, replicas=2)
    annotate(bridge.cluster, "2")
    wait_at_rest(bridge, 2)
    moves = []
    # Two pods with limits run and at most two more are terminating; at least five devices stay for pods with limits.
    with Churn(bridge.cluster, every=1.5, ending=2) as churn:
        for dra in (3, 1, 2, 3, 1, 2):
            annotate(bridge.cluster, str(dra))
            moves.append(f"-> {dra}: {wait_at_rest(bridge, dra, 120):.2f} s")
            bridge.cluster.wait_for(lambda seen=churn.deleted + 2: churn.deleted >= seen, 120, "some more churn")  # type: ignore[misc]
            assert not overlaps(holdings())
    stop_churn(bridge)
    found = holdings()
    print(f"{len(found)} containers, {churn.deleted} pods deleted, moves {', '.join(moves)}")
    assert overlaps(found) == []
    assert churn.failed == {}


# The kubelet writes its own allocatable number back every second here (every 10 s by default). A pod that the scheduler
# binds by this number may reach a busy kubelet after the devices have left the device plugin. The pod fails and its
# controller creates another: with OutOf and the resource's name if the kubelet's own number is smaller already (kubelet
# 1.36, lifecycle/predicate.go), else with UnexpectedAdmissionError (devicemanager/manager.go).
# `test_no_waiting_pod_fails_when_devices_move` counts such pods with a kubelet's default periods.
REPORTING = 10.0
LATE = ("UnexpectedAdmissionError:", f"OutOf{RESOURCE}:")


@pytest.mark.lengthy
def test_no_device_ever_has_two_holders(bridge: Bridge) -> None:
    """No device has two holders while devices move and pods come and go, with restarts, kills and an API outage."""
    cluster = bridge.cluster
    start_churn(bridge)
    phase = CHURN_SECONDS / 5
    faults: list[tuple[float, float, str]] = []
    withdrawn: list[float] = []
    moves: list[str] = []

    @contextlib.contextmanager
    def fault(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        faults.append((began, time.monotonic(), name))

    def kubelet_restart() -> None:
        with fault("kubelet restart"):
            cluster.restart_kubelet()

    def agent_kill() -> None:
        with fault("agent killed"):
            bridge.kill()
            bridge.start()
            bridge.wait_registered()

    def outage() -> None:
        with fault("API server away"):
            cluster.stop_apiserver()
            time.sleep(3)  # the outage lasts this long; no condition is awaited
            cluster.start_apiserver()

    with Churn(cluster) as churn:
        for dra, break_it in ((0, None), (8, None), (3, kubelet_restart), (8, agent_kill), (0, outage)):
            ends = time.monotonic() + phase
            withdrawn.append(time.monotonic())
            annotate(cluster, str(dra) if dra < 8 else "all")
            if break_it is not None:
                break_it()
            moves.append(f"-> {dra}: {wait_at_rest(bridge, dra, 180):.1f} s")
            while time.monotonic() < ends and not churn.over.wait(0.5):
                assert not overlaps(holdings())
    stop_churn(bridge)
    found = holdings()
    assert overlaps(found) == []
    assert len({one.device for one in found}) == 8
    explained = Counter[str]()
    unexplained = {}
    for name, (at, said) in churn.failed.items():
        if any(began - 1 <= at <= ended + 30 for began, ended, _ in faults):
            explained["a fault"] += 1
        elif said.startswith(LATE) and any(began <= at <= began + REPORTING for began in withdrawn):
            explained["the kubelet's reporting period"] += 1
        else:
            unexplained[name] = said
    logs = bridge.logs()
    print(
        f"{len(found)} containers held 8 devices, {churn.deleted} pods deleted, 0 overlaps; moves {', '.join(moves)}; "
        f"pods failed: {dict(explained)} explained, {len(unexplained)} others; "
        f"{logs.count('Allocate refused')} Allocates and {logs.count('cannot prepare claim')} Prepares refused; "
        f"faults: {', '.join(name for _, _, name in faults)}"
    )
    assert unexplained == {}


def moves_while_pods_wait(bridge: Bridge, changes: int) -> tuple[Churn, list[Holding]]:
    """Change the number of devices for claims `changes` times while pods wait; return the `Churn` and all holdings."""
    start_churn(bridge, replicas=13)
    chance = random.Random(11)
    with Churn(bridge.cluster, every=0.8) as churn:
        for _ in range(changes):
            annotate(bridge.cluster, str(chance.choice((1, 2, 3, 5, 6, 7))))
            churn.over.wait(chance.uniform(8, 10))  # the pause between two changes by an administrator
            assert not overlaps(holdings())
    stop_churn(bridge)
    return churn, holdings()


# The kubelet's default periods; other tests here use shorter periods.
AS_BY_DEFAULT = {"nodeStatusUpdateFrequency": "10s", "syncFrequency": "1m"}


@pytest.mark.lengthy
@pytest.mark.parametrize("may_write", [False, True], ids=["kubelet-reports", "agent-reports"])
def test_no_waiting_pod_fails_when_devices_move(make_cluster: Callable[..., Cluster], may_write: bool) -> None:
    """While pods wait, at most 0.1 pods fail per `migrate` of the node if the agent may write the Node's status.

    Each `migrate` changes the number of devices for claims. With CLUSTER_LONG there are 20 changes with this right and
    6 without it, otherwise half as many.
    """
    cluster = make_cluster(kubelet_config=AS_BY_DEFAULT)
    with serving_cards(cluster, node_status=may_write) as bridge:
        changes = (10 if may_write else 3) * (1 + LONG)
        churn, found = moves_while_pods_wait(bridge, changes)
        refused = bridge.logs().count("the status of node")
        why = Counter(said.partition(":")[0] for _, said in churn.failed.values())
        plain = sum(one.container.startswith("plain") for one in found)
        print(
            f"{'the agent' if may_write else 'only the kubelet'} writes the node's status: {changes} share changes, "
            f"{plain} pods by resource and {len(found) - plain} by claim ran, {len(churn.failed)} failed: {dict(why)}, "
            f"{len(churn.failed) / changes:.2f} a share change"
        )
        assert overlaps(found) == []
        assert refused == (0 if may_write else 1)
        if may_write:
            assert len(churn.failed) <= 0.1 * changes, churn.failed


def test_waiting_pods_start_when_devices_come_back(make_cluster: Callable[..., Cluster]) -> None:
    """When devices move back to limits, waiting pods run before the kubelet's next report. The times are printed."""
    cluster = make_cluster(kubelet_config={"nodeStatusUpdateFrequency": "20s"})
    with serving_cards(cluster) as bridge:
        annotate(cluster, "6")
        wait_at_rest(bridge, 6)
        pods = [cluster.start_pod(f"p{number}", {RESOURCE: 2}) for number in range(4)]
        cluster.wait_for(lambda: sum(pod.phase == "Running" for pod in pods) == 1, 30, "one pod runs")
        annotate(cluster, "none")
        moved = wait_at_rest(bridge, 0)
        began = time.monotonic()
        for pod in pods:
            pod.wait_running(20)
        print(f"devices came back after {moved:.2f} s, all pods ran {time.monotonic() - began:.2f} s later")
