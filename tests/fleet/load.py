"""Load as in ClusterLoader2's DRA tests: most devices filled, and short pods that come at a steady rate.

The API server, the scheduler and the claim controller are real, the kubelets are embedded. ClusterLoader2 starts 5 pods
a second that run for 30 s. That takes 150 free devices; a smaller fleet gets pods at the rate that its free devices
take.
"""

from __future__ import annotations

import heapq
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from tests.fleet import page
from tests.fleet.commands import operator
from tests.fleet.limits import CLAIM_READS, CLAIM_WRITES, Limit
from tests.fleet.parts import Counts, Measured, at_rest, each, show, wait_for
from tests.fleet.plane import DEVICES, DRIVER, RESOURCE

NAMESPACE: Final = "load"
TEMPLATE: Final = "one"
FILLED: Final = 0.9
LIFE: Final = 30.0
"""Seconds from a pod's creation to its deletion."""
MOST: Final = 5.0
"""The maximum number of short pods that start in a second."""
BUSY: Final = 0.75
"""The part of the devices without a long-running pod that short pods use at the same time."""
TIMEOUT: Final = 600.0


@dataclass
class Load:
    """A load's figures.

    filled: the number of pods that run all the time. rate: short pods that start in a second. seconds: the time during
    which short pods start. latency: seconds from a short pod's creation until it ran: median, 90th and 99th percentile.
    requests: the agents' requests for each short pod. cores: CPU cores that the API server used. moved: devices that a
    rollout moved meanwhile. failed: why pods did not run. overlaps: devices that two pods had at once.
    """

    name: str
    nodes: int
    filled: int
    rate: float
    seconds: float
    pods: int
    ran: int
    latency: tuple[float, float, float]
    requests: Counts
    cores: float
    moved: int
    failed: list[str]
    overlaps: list[str]


class Pods:
    """Makes and deletes pods at the API server."""

    def __init__(self, measured: Measured) -> None:
        self._api = measured.plane.api
        self._fleet = measured.fleet
        self.created: dict[str, float] = {}

    def prepare(self) -> None:
        """Make the namespace and the template of claims, and have the fleet's kubelets run its pods."""
        self._api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        requests = [{"name": "r", "exactly": {"deviceClassName": DRIVER}}]
        body: dict[str, Any] = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
        body |= {"metadata": {"name": TEMPLATE, "namespace": NAMESPACE}}
        self._api.create({**body, "spec": {"spec": {"devices": {"requests": requests}}}})
        for node in self._fleet.names:  # The controller that removes the taint of a new Node does not run.
            self._api.patch("Node", node, {"spec": {"taints": None}}, api_version="v1")
        wait_for(lambda: self._api.list("ServiceAccount", NAMESPACE), 120.0, f"a ServiceAccount of {NAMESPACE}")
        for worker in self._fleet.workers:
            worker.order("follow_pods", namespace=NAMESPACE).result(60)

    def create(self, name: str, *, claim: bool) -> None:
        """Create a pod that requests a device, by a claim or by limits."""
        container: dict[str, Any] = {"name": "main", "image": "none"}
        spec: dict[str, Any] = {"containers": [container], "automountServiceAccountToken": False}
        if claim:
            container["resources"] = {"claims": [{"name": "r"}]}
            spec["resourceClaims"] = [{"name": "r", "resourceClaimTemplateName": TEMPLATE}]
        else:
            container["resources"] = {"limits": {RESOURCE: "1"}}
        metadata = {"name": name, "namespace": NAMESPACE}
        self.created[name] = time.time()
        self._api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def delete(self, name: str) -> None:
        """Delete a pod; its kubelet ends it."""
        self._api.delete("Pod", name, NAMESPACE, "v1")

    def found(self) -> dict[str, Any]:
        """Return what the kubelets of all processes found: pods that ran, why pods failed, and overlaps of devices."""
        found: dict[str, Any] = {"ran": {}, "failed": [], "overlaps": []}
        for worker in self._fleet.workers:
            more = worker.order("pods_found").result(120)
            found["ran"] |= more["ran"]
            found["failed"] += more["failed"]
            found["overlaps"] += more["overlaps"]
        return found

    def wait(self, names: Sequence[str]) -> None:
        """Wait until the pods with these names have run."""
        wait_for(lambda: self.found()["ran"].keys() >= set(names), TIMEOUT, f"{len(names)} pods run")

    def wait_none(self, begin: str = "") -> None:
        """Wait until there are no pods whose names begin with `begin`."""

        def left() -> list[str]:
            names = [body["metadata"]["name"] for body in self._api.list("Pod", NAMESPACE, "v1")]
            return [name for name in names if name.startswith(begin)]

        wait_for(lambda: not left(), TIMEOUT, f"the pods {begin}* are gone")


def run(
    measured: Measured, pods: Pods, name: str, seconds: float, claims: Iterator[bool], beside: Callable[[], int]
) -> Load:
    """Fill the fleet, then start short pods for this number of seconds. claims: whether the next pod has a claim.

    beside: runs at the same time, and returns the number of devices that it has moved.
    """
    nodes = measured.fleet.names
    devices = DEVICES * len(nodes)
    fill = [f"{name}-fill-{number}" for number in range(round(FILLED * devices))]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: pods.create(one, claim=next(claims)), fill))
    pods.wait(fill)
    measured.quiet()
    measured.requests()
    rate = min(MOST, BUSY * (devices - len(fill)) / LIFE)
    before, began = measured.plane.usage(), time.monotonic()
    moved: list[int] = []
    thread = threading.Thread(target=lambda: moved.append(beside()))
    thread.start()
    short = _short(pods, name, rate, seconds, claims)
    took = time.monotonic() - began
    cores = (measured.plane.usage().cpu - before.cpu) / took
    pods.wait_none(f"{name}-short")
    thread.join(TIMEOUT)
    requests = [one for one in measured.requests() if not at_rest(one)]
    found = pods.found()
    latencies = sorted(found["ran"][one] - pods.created[one] for one in short if one in found["ran"])
    parts = quantiles(latencies, n=100, method="inclusive") if len(latencies) > 1 else [0.0] * 99
    for one in fill:
        pods.delete(one)
    pods.wait_none()
    return Load(
        name,
        len(nodes),
        len(fill),
        rate,
        took,
        len(short),
        len(latencies),
        (parts[49], parts[89], parts[98]),
        each(requests, len(short)),
        cores,
        sum(moved),
        found["failed"],
        found["overlaps"],
    )


def _short(pods: Pods, name: str, rate: float, seconds: float, claims: Iterator[bool]) -> list[str]:
    """Start pods at a rate, and delete each after LIFE seconds; return their names after the last deletion."""
    ends: list[tuple[float, str]] = []
    begun: list[str] = []
    began = time.monotonic()
    while begun == [] or ends:
        due = began + len(begun) / rate
        if due < began + seconds and (not ends or due <= ends[0][0]):
            time.sleep(max(0.0, due - time.monotonic()))  # waits until the rate allows the next pod
            begun.append(f"{name}-short-{len(begun)}")
            pods.create(begun[-1], claim=next(claims))
            heapq.heappush(ends, (time.monotonic() + LIFE, begun[-1]))
        else:
            at, ended = heapq.heappop(ends)
            time.sleep(max(0.0, at - time.monotonic()))  # waits until LIFE seconds after the pod's creation
            pods.delete(ended)
    return begun


def rollout(kubeconfig: Path, measured: Measured, nodes: Sequence[str]) -> int:
    """Move one device of each of these nodes to DRA by the command `rollout`; return how many devices have moved.

    The rollout goes on with the next node if pods hold a node's devices.
    """
    for node in nodes:
        measured.plane.api.patch("Node", node, {"metadata": {"labels": {"moves": "one"}}}, api_version="v1")
    command = [sys.executable, "-m", "dra_bridge", "rollout", "--driver", DRIVER, "--share", "1"]
    command += ["--selector", "moves=one", "--max-unavailable", "5", "--timeout-per-node", "20", "--continue-when-held"]
    with (measured.plane.logs / "rollout.log").open("ab") as log:
        done = subprocess.run(
            [*command, "--kubeconfig", str(kubeconfig)], stdout=log, stderr=log, timeout=TIMEOUT, env=dict(os.environ)
        )
    if done.returncode:
        raise RuntimeError(f"the rollout ended with {done.returncode}")
    views = measured.views(measured.fleet.names)
    counts = [one.counts for view in views if view.reported is not None for one in view.reported.resources.values()]
    return sum(count.get("dra", 0) for count in counts)


def measure(measured: Measured, seconds: float) -> list[Load]:
    """Run the load by limits, by limits and claims while a rollout moves devices, and by claims."""
    pods, kubeconfig = Pods(measured), operator(measured.plane)
    pods.prepare()
    names = measured.fleet.names
    found = [run(measured, pods, "limits", seconds, itertools.repeat(False), lambda: 0)]
    show(found[-1])
    mixed = itertools.chain(
        itertools.repeat(False, round(FILLED * DEVICES * len(names))), itertools.cycle((False, True))
    )
    found.append(run(measured, pods, "rollout", seconds, mixed, lambda: rollout(kubeconfig, measured, names[::2])))
    show(found[-1])
    measured.move(names, "all")
    found.append(run(measured, pods, "claims", seconds, itertools.repeat(True), lambda: 0))
    show(found[-1])
    return found


def limits(found: Sequence[Load]) -> list[Limit]:
    """Return the limits of loads. A load with a rollout has no limits for requests and for pods that never ran."""
    every: list[Limit] = []
    for one in found:
        every.append(Limit(f"load by {one.name}: pods that failed", len(one.failed), 0))
        every.append(Limit(f"load by {one.name}: devices that two pods had at once", len(one.overlaps), 0))
        reads = sum(number for what, number in one.requests.items() if what.startswith(("get ", "list ")))
        writes = sum(one.requests.values()) - reads
        if not one.moved:
            every.append(Limit(f"load by {one.name}: pods that never ran", one.pods - one.ran, 0))
            every.append(Limit(f"load by {one.name}: reads of agents for a pod", reads, CLAIM_READS))
            every.append(Limit(f"load by {one.name}: writes of agents for a pod", writes, CLAIM_WRITES))
    return every


def section(found: Sequence[Load]) -> str:
    """Return the section of docs/scale.md about the loads."""
    head = ("load", "pods", "a second", "s until a pod runs: median", "90 %", "99 %", "requests of agents for a pod")
    rows = [
        (
            one.name,
            one.pods,
            one.rate,
            *one.latency,
            ", ".join(f"{page.cell(number)} {what}" for what, number in one.requests.items()) or "none",
        )
        for one in found
    ]
    first, moved = found[0], sum(one.moved for one in found)
    return "\n".join(
        (
            f"{first.nodes} nodes with {DEVICES} devices each. {first.filled} pods have {FILLED:.0%} of them all the "
            f"time; beside them come short pods of {LIFE:g} s, so many that they need {BUSY:.0%} of the devices "
            "that are left. With 250 nodes these would be ClusterLoader2's 5 pods a second. The API server, the "
            "scheduler and the claim controller are real, the kubelets are embedded.\n",
            "The load `rollout` takes devices by limits and by claims in turn, while a rollout moves "
            f"{moved} devices on half of the nodes; a pod may wait until one of its side is free. "
            f"The machine did other work: {page.cell(os.getloadavg()[1])} programs waited for its two cores.\n",
            page.table(head, rows),
            page.of_limits(limits(found)),
        )
    )
