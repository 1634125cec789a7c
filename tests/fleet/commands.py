"""Measures `status` and `rollout` for many nodes, with Leases and slices as agents write them, without agents."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from deviceplugin.register.records import State
from dra_bridge.rollout import progress
from dra_bridge.rollout.progress import DeviceProgress, Progress, ResourceProgress
from tests.cluster.api import ApiError
from tests.fleet.audit import of_user
from tests.fleet.parts import Counts, by_driver, each, show
from tests.fleet.plane import DEVICES, DRIVER, NAMESPACE, RESOURCE, ControlPlane, Usage, names_of

OPERATOR: Final = "default:operator"
ROLE: Final = "dra-bridge-operator"
IMAGES: Final = [
    {"names": [f"registry.example.com/team/image-{number}@sha256:{number:064x}", f"image-{number}:v1"], "sizeBytes": 1}
    for number in range(50)
]
"""The images in a Node's status: as many as a kubelet reports (nodeStatusMaxImages)."""


SLICES: Final = "resource.k8s.io/v1"
PUBLISHED: Final = [
    {"name": f"fpga-sim-{number}", "attributes": {"fpga.example.com/model": {"string": "simulated"}}}
    for number in range(DEVICES)
]
TRIES: Final = 4
"""Number of runs of `status`, of which the fastest counts, as the first run compiles modules."""


@dataclass
class Command:
    """The figures of a command's run.

    first: seconds until its first line. cpu: CPU seconds until its first line. seconds: until its end. mb: its peak
    resident memory. requests: their number by verb and resource. line: the first line.
    """

    name: str
    first: float
    cpu: float
    seconds: float
    mb: float
    status: int
    lines: int
    line: str
    requests: Counts


def report(share: str, requested: str) -> str:
    """Return the report of an agent whose devices are all for claims, or all for limits."""
    state = State.DRA if share == "all" else State.PLUGIN
    devices = {f"sim-{number}": DeviceProgress(state, int(time.time())) for number in range(DEVICES)}
    resources = {RESOURCE: ResourceProgress(share, {state.value: DEVICES}, devices)}
    return progress.encoded(Progress(resources, requested, {RESOURCE: ""}))


class Wanted(NamedTuple):
    """A Node's annotations for its agent.

    share: the devices that are to be for claims; "" without this annotation. pool: whether the agent publishes a slice
    even without devices for claims.
    """

    share: str = ""
    pool: bool = False

    @property
    def sliced(self) -> bool:
        """Whether the agent publishes a slice, because it has devices for claims or because one is requested."""
        return self.pool or self.share not in ("", "none")


class Reports:
    """A stand-in for the agents: soon after a Node's annotation requests devices for claims, it writes their report.

    The report, in the Node's Lease, is that all devices have moved. The stand-in also makes and deletes the slice.
    """

    def __init__(self, plane: ControlPlane, names: Sequence[str]) -> None:
        self._plane = plane
        self._names = set(names)
        self._done: dict[str, Wanted] = {}
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(4)

    def make(self) -> None:
        """Make the objects of all nodes, and on each node a pod that does not run yet, which costs a rollout most."""
        list(self._pool.map(self._make, sorted(self._names)))

    def _make(self, name: str) -> None:
        api = self._plane.api
        numbers = {RESOURCE: str(DEVICES), "cpu": "8", "memory": "32Gi", "pods": "110"}
        status: dict[str, Any] = {"capacity": numbers, "allocatable": numbers, "images": IMAGES}
        status["conditions"] = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        node = {"name": name, "labels": {"pool": "fpga"}}
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": node, "status": status})
        labels = {"app.kubernetes.io/managed-by": "dra-bridge"}
        annotations = {progress.annotation(DRIVER): report("none", "")}
        lease = {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": annotations}
        api.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": lease, "spec": {}})
        container = {"name": "c", "image": "none", "resources": {"limits": {RESOURCE: "1"}}}
        account = {"serviceAccountName": OPERATOR.partition(":")[2], "automountServiceAccountToken": False}
        spec = {"nodeName": name, **account, "containers": [container]}
        metadata = {"name": name, "namespace": "default"}
        api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self._done[name] = Wanted()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Answer Nodes' requests for devices for claims while the context lasts."""
        thread = threading.Thread(target=self._keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(30)

    def _keep(self) -> None:
        while not self._over.wait(0.5):
            try:
                nodes = self._plane.api.list("Node", None, "v1")
            except (OSError, ApiError):
                continue  # the API server is being restarted
            wanted = {}
            for body in nodes:
                of_node = body["metadata"].get("annotations") or {}
                share = of_node.get(progress.share_annotation(DRIVER), "")
                wanted[body["metadata"]["name"]] = Wanted(share, progress.pool_annotation(DRIVER) in of_node)
            late = [name for name, done in self._done.items() if wanted.get(name, Wanted()) != done]
            list(self._pool.map(self._answer, late, [wanted[name] for name in late]))

    def _answer(self, name: str, wanted: Wanted) -> None:
        annotations = {progress.annotation(DRIVER): report(wanted.share or "none", wanted.share)}
        patch, api = {"metadata": {"annotations": annotations}}, self._plane.api
        try:
            if wanted.sliced and not self._done[name].sliced:
                pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
                spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": PUBLISHED}
                api.apply({"apiVersion": SLICES, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec})
            elif not wanted.sliced and self._done[name].sliced:
                api.delete("ResourceSlice", name, api_version=SLICES)
            if wanted.share != self._done[name].share:
                api.patch("Lease", name, patch, NAMESPACE, api_version="coordination.k8s.io/v1")
        except (OSError, ApiError):
            return  # `_keep` calls this method again.
        self._done[name] = wanted


def operator(plane: ControlPlane) -> Path:
    """Make an operator with the role of the manifests; return its kubeconfig."""
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": "default"}
    plane.api.apply(
        [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}},
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "operator"},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": ROLE},
                "subjects": [subject],
            },
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": "operator", "namespace": NAMESPACE},
                "roleRef": {"apiGroup": group, "kind": "Role", "name": ROLE},
                "subjects": [subject],
            },
        ]
    )
    return plane.service_account_kubeconfig("operator")


class Peak:
    """The most memory of a process. It reads the kernel's high-water mark while the process runs.

    The process's `ru_maxrss` is not used: it also counts the memory that this program had when it started the process.
    """

    def __init__(self, pid: int) -> None:
        self.mb = 0.0
        self._status = Path(f"/proc/{pid}/status")
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            while found := re.search(r"VmHWM:\s*(\d+) kB", self._status.read_text()):
                self.mb = int(found[1]) * 1024 / 1e6
                time.sleep(0.02)


def run(plane: ControlPlane, kubeconfig: Path, *arguments: str) -> Command:
    """Run a command to its end and measure it. Its modules are compiled, as pip leaves them."""
    log = plane.audit
    log.more()
    command = [sys.executable, "-m", "dra_bridge", *arguments, "--kubeconfig", str(kubeconfig)]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(plane.directory / "compiled")}
    began = time.monotonic()
    with (plane.logs / f"{arguments[0]}.log").open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **compiled}
        )
    peak = Peak(process.pid)
    assert process.stdout is not None
    lines: list[str] = []
    first = cpu = 0.0
    for line in process.stdout:
        if not lines:
            first, cpu = time.monotonic() - began, Usage.of(process.pid).cpu
        lines.append(line)
    status = process.wait()
    return Command(
        " ".join(one for one in arguments if one in ("status", "rollout", "--undo")),
        first,
        cpu,
        time.monotonic() - began,
        peak.mb,
        status,
        len(lines),
        lines[0].rstrip() if lines else "",
        each(of_user(log.more(), OPERATOR), 1),
    )


def measure(plane: ControlPlane, count: int) -> tuple[list[Command], tuple[int, float, int]]:
    """Run `status` and `rollout` with `count` nodes; return their figures, and the figures of a list of all slices."""
    names = names_of(count)
    reports = Reports(plane, names)
    began = time.monotonic()
    kubeconfig = operator(plane)
    reports.make()
    print(f"{count} nodes after {time.monotonic() - began:.0f} s", flush=True)
    many = ("--driver", DRIVER, "--selector", "pool=fpga", "--max-unavailable", str(max(1, count // 4)))
    tried = [run(plane, kubeconfig, "status", "--driver", DRIVER) for _ in range(TRIES)]
    found = [min(tried, key=lambda one: one.first)]
    show(found[-1])
    with reports.kept():
        found.append(run(plane, kubeconfig, "rollout", *many, "--share", "all"))
        show(found[-1])
        scan = by_driver(plane)
        found.append(run(plane, kubeconfig, "rollout", *many, "--undo"))
        show(found[-1])
    return found, scan


def unrestored(plane: ControlPlane) -> list[str]:
    """Return each annotation that an undone rollout has left, with the name of its Node."""
    left: list[str] = []
    for body in plane.api.list("Node", None, "v1"):
        annotations: dict[str, Any] = body["metadata"].get("annotations") or {}
        left += [f"{body['metadata']['name']}: {key}" for key in annotations]
    return left
