"""Compares the time and CPU of the kubelet's calls with other programs: `python -m tests.bench.peers`, `tox -e peers`.

The agent is compared with the Go example driver (kubernetes-sigs/dra-example-driver), with squat's
generic-device-plugin, and with `tests.bench.empty`, a driver and a plugin in Python with minimal handlers. All programs
serve one real kubelet at the same time. In a round, pods with devices of one program start at the same time, and are
then deleted at the same time. Rounds of all programs follow each other in a random order, because work that remains
after one program's round slows down the next round. The order is the same in each run. The times are means from the
kubelet's own histograms (sum and count over the rounds). The CPU seconds are those of the program's process. The limits
apply to the medians, over several runs, of ratios within one run. So the machine need not be idle.

`tests.cluster.build.PEERS` states how the other programs are built. A program that cannot be built is reported and left
out. The exit status is 1 if a limit is exceeded. A run needs root, Go and half an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import stat
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import build, isolate
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster
from tests.programs import ANY_CONFIG, image_environment

DEVICES = Path("/dev/peers")
"""The directory of the device nodes, in the node's own /dev as usual."""
EACH = 32
"""Number of devices of each program for limits, and for claims.

The number is so large that a round never needs devices of the previous round.
"""
SIZES = (4, 16)
"""Numbers of pods that start at the same time."""
MAJOR = 240
"""The major number of the device nodes. Linux has no driver for this number."""
MINOR = {"both": 0, "alone": 100, "squat": 200, "empty": 300}
BOTH_CLAIMS, BOTH_PLUGIN, ALONE = "both sides, claims", "both sides, plugin", "plugin alone"
GO, SQUAT = "Go example driver", "squat's plugin"
EMPTY_CLAIMS, EMPTY_PLUGIN = "empty handler, claims", "empty handler, plugin"
GO_DRIVER, EMPTY_DRIVER = "peer.example.com", "empty.example.com"

_HISTOGRAM = re.compile(r"(dra_grpc_operations|kubelet_device_plugin_alloc)_duration_seconds_(sum|count)\{(.*)\} ")

Times = dict[str, tuple[float, float]]
"""For each driver and method, or resource: the sum of the durations in a histogram (seconds), and their count."""


@dataclass
class Side:
    """The measured calls of one agent, for limits or for claims.

    process: the agent's process id. pod: the limits or claims of the pods. operations: for each operation, the
    histogram's key in `Times`. seconds: for each operation and number of pods, the sum of durations and the number of
    calls. cpu: CPU seconds of the agent, by number of pods.
    """

    name: str
    process: int
    pod: Mapping[str, Any]
    operations: Mapping[str, str]
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    cpu: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def spent(self, size: int) -> float:
        """Return the agent's mean CPU milliseconds for a pod, over all rounds with `size` pods."""
        count = max(self.seconds[operation, size][1] for operation in self.operations)
        return 1000 * self.cpu[size] / count if count else float("nan")

    def mean(self, operation: str, size: int) -> float:
        """Return the mean duration of an operation in milliseconds, over all rounds with `size` pods."""
        total, count = self.seconds[operation, size]
        return 1000 * total / count if count else float("nan")


def times(text: str) -> Times:
    """Read the durations of calls of drivers and plugins from the kubelet's metrics."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in text.splitlines():
        if match := _HISTOGRAM.match(line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[3]))
            method = labels.get("method_name", "").rpartition("/")[2]
            key = f"{labels['driver_name']} {method}" if method else labels["resource_name"]
            found[key][match[2] == "count"] += float(line.rpartition(" ")[2])
    return {key: (total, count) for key, (total, count) in found.items()}


def cpu_of(process: int) -> float:
    """Return the CPU seconds that a process has used so far, ended threads included.

    The times in /proc/PID/stat are too coarse, because a small program uses less than two ticks in a round. So this
    function reads the CPU clock of the other process (Linux, clock_getcpuclockid(3)), in nanoseconds.
    """
    return time.clock_gettime((~process << 3) | 2)


class ImageBridge(Bridge):
    """The agent with device plugin and DRA driver, with its image's environment variables and without a debug log."""

    def start(self, *arguments: str) -> None:
        """Start the agent."""
        os.environ.update(image_environment())
        super().start("--log-level", "info", *arguments)

    def wait_registered(self, *, resources: bool = True) -> None:
        """Wait only for the drivers, because the kubelet's ListAndWatch calls are only in the debug log."""
        super().wait_registered(resources=False)


@contextmanager
def program(cluster: Cluster, name: str, command: Sequence[str], **environment: str) -> Iterator[int]:
    """Run an agent while the context is active; yield its process id."""
    with (cluster.logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(20)


def resource(name: str, **more: Any) -> dict[str, Any]:
    """Return the entry of a resource in the agent's config file."""
    return {"name": f"example.com/{name}", "devices": [{"path": f"{DEVICES}/{name}/*"}], **more}


def rights() -> list[dict[str, Any]]:
    """Return the Go driver's service account and its rights, as in the driver's own chart."""
    group, named = "rbac.authorization.k8s.io", {"metadata": {"name": "peer"}}
    rules = [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        {
            "apiGroups": ["resource.k8s.io"],
            "resources": ["resourceslices"],
            "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
        },
    ]
    subject = {"kind": "ServiceAccount", "name": "peer", "namespace": "default"}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": "peer"}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **named},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", **named, "rules": rules},
        {"apiVersion": f"{group}/v1", "kind": "ClusterRoleBinding", **named, "roleRef": role, "subjects": [subject]},
    ]


def class_of(name: str, driver: str) -> dict[str, Any]:
    """Return a DeviceClass for all devices of a driver."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


def slice_of_empty(cluster: Cluster) -> dict[str, Any]:
    """Return the ResourceSlice of the driver in `tests.bench.empty`, which publishes no slice itself."""
    pool = {"name": cluster.node_name, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": f"d{number}"} for number in range(EACH)]
    spec = {"driver": EMPTY_DRIVER, "nodeName": cluster.node_name, "pool": pool, "devices": devices}
    api = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    return {**api, "metadata": {"name": "empty"}, "spec": spec}


@contextmanager
def agents(cluster: Cluster) -> Iterator[list[Side]]:
    """Run all programs that are compared; yield a `Side` for each program and kind of request."""
    shutil.rmtree(DEVICES, ignore_errors=True)
    for name, minor in MINOR.items():
        (DEVICES / name).mkdir(parents=True)
        for number in range(2 * EACH if name == "both" else EACH):
            numbers = os.makedev(MAJOR, minor + number)
            os.mknod(DEVICES / name / f"{number:02}", stat.S_IFCHR | 0o666, numbers)
    with ExitStack() as stack:
        both = resource("both", driver="both.example.com", dra={"share": "50%"})
        bridge = stack.enter_context(ImageBridge.running(cluster, both))
        config = cluster.directory / "alone.json"
        config.write_text(json.dumps({"resources": [resource("alone")]}))
        ours = [sys.executable, "-m", "deviceplugin", "run", "--config", str(config), *ANY_CONFIG]
        ours += ["--cgroup-root", str(isolate.POD_CGROUPS)]
        alone = stack.enter_context(program(cluster, "alone", ours, **image_environment()))
        device = json.dumps({"name": "squat", "groups": [{"paths": [{"path": f"{DEVICES}/squat/*"}]}]})
        squat = peer("generic-device-plugin")
        if squat is not None:
            arguments = [squat, "--domain", "example.com", "--device", device]
            plugin = stack.enter_context(program(cluster, "squat", arguments))
        # The Go driver uses a service account like the agent, because the API server treats an administrator's requests
        # differently. The driver's default limit of 5 requests a second would delay its calls, so the limit is raised.
        cluster.api.apply(rights())
        kubeconfig = cluster.service_account_kubeconfig("peer", bound_to=("Node", cluster.node_name))
        go = [peer("dra-example-kubeletplugin") or "", "--node-name", cluster.node_name]
        go += ["--driver-name", GO_DRIVER, "--num-devices", str(EACH), "--cdi-root", "/var/run/cdi"]
        go += ["--kubeconfig", str(kubeconfig), "--kube-api-qps", "500", "--kube-api-burst", "500"]
        if go[0]:
            driver = stack.enter_context(program(cluster, "go-driver", go))
        empty = [sys.executable, "-m", "tests.bench.empty", EMPTY_DRIVER, "example.com/empty", str(DEVICES / "empty")]
        server = {"KUBERNETES_SERVICE_HOST": isolate.SERVICE_IP, "KUBERNETES_SERVICE_PORT": "443"}
        least = stack.enter_context(program(cluster, "empty", empty, **image_environment(), **server))
        classes = [class_of("peer", GO_DRIVER), class_of("empty", EMPTY_DRIVER)]
        cluster.api.apply([*classes, slice_of_empty(cluster)])
        claims = {"devices": bridge.classes["example.com/both"], "peer": "peer", "empty": "empty"}
        for name, device_class in claims.items():
            request = {"name": "one", "exactly": {"deviceClassName": device_class}}
            bridge.template(name, request)
        for name in MINOR:
            if name != "squat" or squat is not None:
                cluster.wait_allocatable(f"example.com/{name}", EACH, 120.0)
        for one in ("both.example.com", *([GO_DRIVER] if go[0] else ())):
            cluster.wait_for(lambda one=one: bridge.offered(one), 60.0, f"{one} offers devices")  # type: ignore[misc]
        bridge.wait_offered(EACH)

        def claim_side(name: str, process: int, template: str, of: str) -> Side:
            methods = {"Prepare": f"{of} NodePrepareResources", "Unprepare": f"{of} NodeUnprepareResources"}
            return Side(name, process, {"claims": {"one": {"resourceClaimTemplateName": template}}}, methods)

        def plugin_side(name: str, process: int, of: str) -> Side:
            return Side(name, process, {"limits": {f"example.com/{of}": 1}}, {"Allocate": f"example.com/{of}"})

        assert bridge.process is not None
        sides = [
            claim_side(BOTH_CLAIMS, bridge.process.pid, "devices", "both.example.com"),
            plugin_side(BOTH_PLUGIN, bridge.process.pid, "both"),
            plugin_side(ALONE, alone, "alone"),
            claim_side(EMPTY_CLAIMS, least, "empty", EMPTY_DRIVER),
            plugin_side(EMPTY_PLUGIN, least, "empty"),
        ]
        if go[0]:
            sides.append(claim_side(GO, driver, "peer", GO_DRIVER))
        if squat is not None:
            sides.append(plugin_side(SQUAT, plugin, "squat"))
        yield sides
        for pod in cluster.pods("default"):
            pod.delete()
            pod.wait_gone(60.0)


def measure(cluster: Cluster, side: Side, size: int, title: str) -> None:
    """Start `size` pods at the same time, then delete them together, and add their calls' durations to a `Side`.

    title: the beginning of the pods' names.
    """
    before, cpu = times(cluster.metrics()), cpu_of(side.process)
    pods = [cluster.start_pod(f"{title}-{number}", **side.pod) for number in range(size)]
    for pod in pods:
        pod.wait_running(180.0)
    for pod in pods:
        pod.delete()
    for pod in pods:
        pod.wait_gone(180.0)
    # Wait until the controllers have deleted the claims, because this work would slow down the next round.
    cluster.wait_for(lambda: not cluster.api.list("ResourceClaim", "default"), 60.0, "no claim is left")
    after = times(cluster.metrics())
    side.cpu[size] += cpu_of(side.process) - cpu
    for operation, key in side.operations.items():
        was, now = before.get(key, (0.0, 0.0)), after.get(key, (0.0, 0.0))
        total = side.seconds[operation, size]
        total[0] += now[0] - was[0]
        total[1] += now[1] - was[1]


@dataclass(frozen=True)
class Limit:
    """The maximum ratio of a `Side`'s mean to another `Side`'s mean, with SIZES[0] pods.

    operation: the operation whose duration is compared; "" for the CPU seconds. beside: the name of the other `Side`.
    most: the maximum ratio.
    """

    operation: str
    side: str
    beside: str
    most: float

    @property
    def what(self) -> str:
        """A text that states the compared values."""
        return f"{self.operation or 'CPU'} of {self.side}, against {self.beside}"


LIMITS = (
    Limit("", BOTH_CLAIMS, EMPTY_CLAIMS, 2.5),
    Limit("", BOTH_PLUGIN, EMPTY_PLUGIN, 2.5),
    Limit("", ALONE, EMPTY_PLUGIN, 2.5),
    Limit("Prepare", BOTH_CLAIMS, EMPTY_CLAIMS, 1.2),
    Limit("Unprepare", BOTH_CLAIMS, EMPTY_CLAIMS, 1.6),
    Limit("Allocate", BOTH_PLUGIN, EMPTY_PLUGIN, 1.1),
    Limit("Allocate", ALONE, EMPTY_PLUGIN, 1.1),
    Limit("Prepare", BOTH_CLAIMS, GO, 1.2),
    Limit("Unprepare", BOTH_CLAIMS, GO, math.inf),
    Limit("Allocate", ALONE, SQUAT, 1.3),
    Limit("Allocate", BOTH_PLUGIN, SQUAT, 1.5),
    Limit("Prepare", EMPTY_CLAIMS, GO, math.inf),
    Limit("Unprepare", EMPTY_CLAIMS, GO, math.inf),
    Limit("Allocate", EMPTY_PLUGIN, SQUAT, math.inf),
)


def ratios(sides: Mapping[str, Side], size: int) -> dict[Limit, float]:
    """Return the ratios of one run, for each limit of which both `Side`s were measured."""

    def of(side: Side, operation: str) -> float:
        return side.mean(operation, size) if operation else side.spent(size)

    there = [limit for limit in LIMITS if {limit.side, limit.beside} <= sides.keys()]
    return {one: of(sides[one.side], one.operation) / of(sides[one.beside], one.operation) for one in there}


def inside(runs: int, rounds: int) -> int:
    """Run all measurements on a node and print them; return 1 if a limit is exceeded."""
    order, found = random.Random(1), defaultdict[tuple[Limit, int], list[float]](list)
    with Cluster() as cluster, agents(cluster) as sides:
        for side in order.sample(sides, len(sides)):  # the first round is a warm-up, which also opens connections
            measure(cluster, side, SIZES[0], f"w{sides.index(side)}")
        for run in range(runs):
            for side in sides:
                side.seconds.clear()
                side.cpu.clear()
            for size in SIZES:
                for number in range(rounds):
                    for side in order.sample(sides, len(sides)):
                        measure(cluster, side, size, f"p{run}-{size}-{number}-{sides.index(side)}")
                shown = [f"{one} {side.mean(one, size):.1f}" for side in sides for one in side.operations]
                print(f"run {run}, {size} pods, load {os.getloadavg()[0]:.1f}: {', '.join(shown)} ms", flush=True)
                for limit, ratio in ratios({side.name: side for side in sides}, size).items():
                    found[limit, size].append(ratio)
            show(sides)
    print(f"\nmedian of {runs} runs")
    missed = 0
    for limit in LIMITS:
        for size in SIZES:
            if not (measured := found.get((limit, size))):
                print(f"{limit.what:<64} not measured")
                break
            ratio, most = statistics.median(measured), limit.most if size == SIZES[0] else math.inf
            missed += ratio > most
            limited = "" if most == math.inf else f"   <= {most:g}{'   MISSED' if ratio > most else ''}"
            print(f"{limit.what:<64} {size:>2} pods {ratio:6.2f}{limited}")
    print(f"{missed} limits missed")
    return 1 if missed else 0


def show(sides: Sequence[Side]) -> None:
    """Print the results of a run."""
    head = "mean of the calls in ms (CPU ms of the agent per pod)"
    print(f"\n{head:<56}" + "".join(f"{n:>14} pods" for n in SIZES))
    for side in sides:
        for operation in side.operations:
            cells = [f"{side.mean(operation, size):.2f} ({side.spent(size):.0f})".rjust(19) for size in SIZES]
            print(f"{side.name + ', ' + operation:<56}" + "".join(cells), flush=True)


def peer(name: str) -> str | None:
    """Return the path of another program's executable; None if it cannot be built here."""
    try:
        return str(build.ensure_peer(name))
    except build.BuildError as error:
        print(f"measured without {name}: {error}", flush=True)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Build the missing programs, then run the measurements in an isolated node."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the medians count (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each agent and size in a run (%(default)s)")
    options = parser.parse_args(argv)
    if isolate.inside():
        return inside(options.runs, options.rounds)
    try:
        build.ensure()
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for name in build.PEERS:
        peer(name)
    command = [sys.executable, "-m", "tests.bench.peers", "--runs", str(options.runs), "--rounds", str(options.rounds)]
    return isolate.run(command)


if __name__ == "__main__":
    sys.exit(main())
