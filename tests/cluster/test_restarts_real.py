"""Kubelet restarts while devices move between device plugin and DRA, on the real node.

A restart ends no pod, except in two cases: after a forced move; and with `drain: cordon`, if DRA serves a pod that has
waited and is older than a pod that the device plugin serves.

At its start the kubelet admits the node's pods again, the oldest first (HandlePodAdditions, kubelet 1.36). It does not
count the devices that the admitted pod gets through DRA for its limits, but counts those of the other pods
(kubernetes#124586). It compares the sum with the larger of the Node's allocatable and the number of ids in its
checkpoint. `dra_bridge.handover.admission` describes the consequences.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime

import pytest

from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_handover import RESOURCE, annotate, at_rest, serving_cards, states

METRICS = "127.0.0.1:9477"
_CANARIES = itertools.count()


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    with serving_cards(cluster) as running:
        running.template("cards")
        yield running


def by_limits(bridge: Bridge, name: str) -> Pod:
    """Start a pod with one device by `limits`, and wait until it runs and later pods have a later creation time."""
    return older(bridge.cluster.start_pod(name, {RESOURCE: 1})).wait_running()


def older(pod: Pod) -> Pod:
    """Wait until new pods have a later creation time than this pod: the kubelet sorts pods by it, in seconds."""
    created = datetime.fromisoformat(pod.object["metadata"]["creationTimestamp"]).timestamp()
    pod.cluster.wait_for(lambda: time.time() >= created + 1, 10, "the next second")
    return pod


def by_claim(bridge: Bridge, name: str) -> Pod:
    """Start a pod with one device by a claim of its own, and wait until it runs."""
    return bridge.pod(name, {"card": {"resourceClaimTemplateName": "cards"}}).wait_running()


def through_dra(pod: Pod) -> bool:
    """Return whether a pod by limits got its devices through DRA."""
    return "extendedResourceClaimStatus" in pod.status


def restart_kubelet(bridge: Bridge, *, without_agent: bool = False) -> dict[str, str]:
    """Restart the kubelet, wait until it has admitted or denied each pod, and return the reasons of denials, by pod.

    The reasons are read from the kubelet's log, because the kubelet sets the phase of a denied pod some seconds later.
    without_agent: the agent is stopped during the restart.
    """
    cluster = bridge.cluster
    if without_agent:
        bridge.stop()
    log = cluster.components["kubelet"].log
    before = log.stat().st_size
    cluster.restart_kubelet(reported=True)
    # Pods are admitted one after the other, the oldest first. So if a new pod runs, the kubelet has admitted or denied
    # all other pods.
    canary = cluster.start_pod(f"canary-{next(_CANARIES)}").wait_running()
    canary.delete()
    canary.wait_gone()
    if without_agent:
        bridge.start()
        bridge.wait_registered()
    with log.open(errors="replace") as file:
        file.seek(before)
        lines = [line for line in file if "Pod admission denied" in line]
    return {re.findall(r'pod="([^"]*)"', line)[0]: line.partition("reason=")[2].strip() for line in lines}


def no_pod_ends(bridge: Bridge, *pods: Pod) -> None:
    """Restart the kubelet, first while the agent runs, then while it is stopped; check that all containers run on."""
    before = {pod.name: pod.container_id() for pod in pods}
    for without_agent in (False, True):
        assert restart_kubelet(bridge, without_agent=without_agent) == {}, f"{without_agent=}"
    assert {pod.name: (pod.phase, pod.container_id()) for pod in pods} == {
        name: ("Running", container) for name, container in before.items()
    }


def page(path: str) -> str:
    """Return the text of a page of the agent."""
    with urllib.request.urlopen(f"http://{METRICS}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def wait_states(bridge: Bridge, **wanted: int) -> None:
    """Wait until these numbers of devices are in these states; a state's name has _ for -."""
    counts = {name.replace("_", "-"): count for name, count in wanted.items()}
    bridge.cluster.wait_for(lambda: dict(states(bridge)) == counts, 60, f"the devices are {counts}")


@pytest.mark.lengthy
def test_a_kubelet_restart_after_each_step_ends_no_pod(bridge: Bridge) -> None:
    """While devices move from the device plugin to DRA and back, a kubelet restart after each step ends no pod."""
    cluster = bridge.cluster
    # Devices move to DRA. The first pod is older than all pods that DRA serves.
    first = by_limits(bridge, "first")
    annotate(cluster, "4")
    wait_states(bridge, plugin=4, dra=4)
    claim = by_claim(bridge, "claim")
    second = by_limits(bridge, "second")
    assert not any(map(through_dra, (first, second)))
    no_pod_ends(bridge, first, second, claim)
    annotate(cluster, "all")
    wait_states(bridge, dra=6, to_dra=2)
    cluster.wait_allocatable(RESOURCE, 0)
    unchanged = [by_limits(bridge, f"unchanged-{number}") for number in range(2)]
    assert all(map(through_dra, unchanged))
    no_pod_ends(bridge, first, second, claim, *unchanged)
    first.delete()
    first.wait_gone()
    wait_states(bridge, dra=7, to_dra=1)
    no_pod_ends(bridge, second, claim, *unchanged)
    # The devices are to move back while DRA serves pods by limits: no device moves, and a new pod by limits waits.
    annotate(cluster, "2")
    wait_states(bridge, to_plugin=7, to_dra=1)
    waits = cluster.start_pod("waits", {RESOURCE: 1})
    waits.wait_unschedulable()
    no_pod_ends(bridge, second, claim, *unchanged)
    wait_states(bridge, to_plugin=7, to_dra=1)
    for pod in unchanged:
        pod.delete()
        pod.wait_gone()
    wait_states(bridge, dra=1, to_dra=1, plugin=6)
    waits.wait_running()
    assert not through_dra(waits)
    younger = by_limits(bridge, "younger")
    no_pod_ends(bridge, second, claim, waits, younger)
    # Devices move to DRA again, while the device plugin serves older and younger pods.
    annotate(cluster, "all")
    wait_states(bridge, dra=5, to_dra=3)
    cluster.wait_allocatable(RESOURCE, 0)
    again = [by_limits(bridge, f"again-{number}") for number in range(2)]
    assert all(map(through_dra, again))
    no_pod_ends(bridge, second, claim, waits, younger, *again)
    for pod in (second, waits, younger):
        pod.delete()
        pod.wait_gone()
    wait_states(bridge, dra=8)
    no_pod_ends(bridge, claim, *again)
    # Devices move back once more, after all pods by limits have ended.
    for pod in again:
        pod.delete()
        pod.wait_gone()
    annotate(cluster, "1")
    wait_states(bridge, dra=1, plugin=7)
    last = by_limits(bridge, "last")
    no_pod_ends(bridge, claim, last)


def test_devices_leave_one_by_one_beside_pods_of_both_kinds(bridge: Bridge) -> None:
    """A move to DRA leaves as many devices as pods need at a kubelet restart; a forced move does not.

    Before, devices were forced back to the device plugin. After the forced move to DRA, the agent names the pod that a
    kubelet restart would end, and a restart ends this pod.
    """
    cluster = bridge.cluster
    annotate(cluster, "all")
    cluster.wait_for(lambda: at_rest(bridge, 8), 60, "all devices are on the DRA side")
    cluster.wait_allocatable(RESOURCE, 0)
    unchanged = [by_limits(bridge, f"unchanged-{number}") for number in range(2)]
    assert all(map(through_dra, unchanged))
    annotate(cluster, "4 force")
    wait_states(bridge, dra=4, plugin=4)
    cluster.wait_allocatable(RESOURCE, 4)
    younger = [by_limits(bridge, f"younger-{number}") for number in range(2)]
    assert not any(map(through_dra, younger))
    named = [f"a kubelet restart would end pod default/{pod.name}" for pod in younger]
    cluster.wait_for(lambda: all(text in bridge.log() for text in named), 30, "both are named")
    annotate(cluster, "6")
    cluster.wait_for(lambda: "waits for pods of one side to end" in bridge.log(), 30, "the move waits")
    wait_states(bridge, dra=4, plugin=4)
    cluster.wait_allocatable(RESOURCE, 4)
    younger[0].delete()
    younger[0].wait_gone()
    wait_states(bridge, dra=5, plugin=3)
    cluster.wait_allocatable(RESOURCE, 3)
    annotate(cluster, "all force")
    wait_states(bridge, dra=7, to_dra=1)
    cluster.wait_allocatable(RESOURCE, 0)
    # A restarted agent reports this pod, too.
    bridge.stop()
    bridge.start("--metrics-address", METRICS)
    bridge.wait_registered()
    metric = f'deviceplugin_kubelet_restart_ends_pod{{namespace="default",pod="younger-1",resource="{RESOURCE}"}} 1.0'
    cluster.wait_for(lambda: metric in page("/metrics"), 30, "the metric names it")
    (problem,) = json.loads(page("/status"))["problems"]
    assert problem.startswith(f"{RESOURCE}: a kubelet restart would end default/younger-1: ")
    assert list(restart_kubelet(bridge)) == ["default/younger-1"]


def one_waits(bridge: Bridge) -> tuple[Pod, Pod, Pod]:
    """Start a pod, a second pod that waits for the first pod's devices, and a third pod that runs; return the three.

    Then request `share: all`.
    """
    cluster = bridge.cluster
    first = older(cluster.start_pod("first", {RESOURCE: 2})).wait_running()
    waits = older(cluster.start_pod("waits", {RESOURCE: 7}))
    waits.wait_unschedulable()
    younger = by_limits(bridge, "younger")
    annotate(cluster, "all")
    return first, waits, younger


def test_a_pod_that_waited_is_older_than_those_that_came_after_it(bridge: Bridge) -> None:
    """With `drain: cordon`, DRA serves a waiting pod, and a kubelet restart ends the device plugin's younger pod."""
    first, waits, younger = one_waits(bridge)
    wait_states(bridge, dra=5, to_dra=3)
    first.delete()
    waits.wait_running()
    assert through_dra(waits)
    assert list(restart_kubelet(bridge)) == [f"default/{younger.name}"]


def test_with_wait_dra_serves_pods_by_limits_when_the_plugin_side_is_empty(bridge: Bridge) -> None:
    """With `drain: wait`, DRA serves a waiting pod by limits only after the device plugin's last pod has ended."""
    cluster = bridge.cluster
    bridge.resources[0]["dra"] = {"share": "none", "drain": "wait"}
    bridge.write()
    cluster.wait_for(lambda: "was read again" in bridge.log(), 60, "it is taken")
    first, waits, younger = one_waits(bridge)
    wait_states(bridge, dra=5, plugin=3)
    first.delete()
    wait_states(bridge, dra=7, plugin=1)
    # No restart here: while allocatable is 0, the scheduler gives the waiting pod devices through DRA.
    assert waits.unschedulable()
    younger.delete()
    waits.wait_running()
    assert through_dra(waits)
    no_pod_ends(bridge, waits)


def test_with_wait_devices_go_on_being_offered_beside_pods_that_dra_serves_by_limits(bridge: Bridge) -> None:
    """With `drain: wait`, no device moves to the device plugin while DRA serves a pod by limits; claims get devices."""
    cluster = bridge.cluster
    bridge.resources[0]["dra"] = {"share": "all", "drain": "wait"}
    bridge.write()
    cluster.wait_for(lambda: at_rest(bridge, 8), 60, "all devices are on the DRA side")
    cluster.wait_allocatable(RESOURCE, 0)
    unchanged = by_limits(bridge, "unchanged")
    assert through_dra(unchanged)
    annotate(cluster, "none")
    cluster.wait_for(lambda: "the requested share of claims is none" in bridge.log(), 30, "it is heard")
    claim = by_claim(bridge, "claim")
    assert (len(bridge.offered()), dict(states(bridge))) == (8, {"dra": 8})
    no_pod_ends(bridge, unchanged, claim)
    unchanged.delete()
    wait_states(bridge, plugin=7, dra=1)
    cluster.wait_allocatable(RESOURCE, 7)
    claim.delete()
    wait_states(bridge, plugin=8)
    cluster.wait_allocatable(RESOURCE, 8)
