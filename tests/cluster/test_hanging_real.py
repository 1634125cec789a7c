"""A file system of a real node hangs, with device paths, sysfs, CDI specs or the agent's ledger: other pods start.

`tests.cluster.hanging` is the file system. The kubelet allocates for one pod at a time, so an Allocate call that hangs
would keep all other pods Pending, also pods without devices.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import isolate
from tests.cluster.bridge import Bridge, ClaimPod
from tests.cluster.hanging import HangingFileSystem
from tests.cluster.node import LEDGER, Cluster, Pod
from tests.sources.trees import Tree

SLOW, QUICK, CARD = "example.com/slow", "example.com/quick", "example.com/card"
METRICS = "127.0.0.1:9418"
LIMIT = 40.0
"""Seconds in which a pod must run; it takes a few. The kubelet has no timeout for a plugin's call that hangs."""


class MeasuredBridge(Bridge):
    """A bridge that serves metrics."""

    def command(self) -> list[str]:
        return [*super().command(), "--metrics-address", METRICS]


def get(path: str) -> str:
    """Return the agent's response to an HTTP request."""
    with urllib.request.urlopen(f"http://{METRICS}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def simulated(name: str, letter: str, count: int = 4, share: int = 2) -> dict[str, Any]:
    """Return a resource with simulated devices. share: the number of devices for claims."""
    devices = [{"simulated": {"count": count}}]
    return {"name": name, "driver": f"{letter}.example.net", "devices": devices, "dra": {"share": share}}


@pytest.fixture
def files() -> Iterator[contextlib.ExitStack]:
    """A stack of callbacks that run after the agent has ended."""
    with contextlib.ExitStack() as stack:
        yield stack


def hanging(files: contextlib.ExitStack, point: Path) -> HangingFileSystem:
    """Mount a file system that can hang at a path, until the test's end; return it."""
    backing = isolate.DEVICES / f"backing-{point.name}"
    files.callback(shutil.rmtree, backing, ignore_errors=True)
    return files.enter_context(HangingFileSystem(backing, point))


def others_go_on(bridge: Bridge, *, claims: bool = True) -> None:
    """Check that pods start without a device, and with one of the resource QUICK by limits and claim; check metrics."""
    cluster = bridge.cluster
    pods: list[Pod] = [cluster.start_pod("plain"), cluster.start_pod("quick", {QUICK: 1})]
    if claims:
        bridge.claim("quick", bridge.one(resource=QUICK))
        pods.append(bridge.pod("quick-claim", {"x": "quick"}))
    for pod in pods:
        pod.wait_running(LIMIT)
    assert "deviceplugin_devices" in get("/metrics")
    get("/healthz")
    end(*pods)
    if claims:
        cluster.api.delete("ResourceClaim", "quick", api_version=bridge.api_version)


def end(*pods: Pod) -> None:
    for pod in pods:
        pod.delete()
    for pod in pods:
        pod.wait_gone()


def why(pod: Pod) -> str:
    """Return the kubelet's reason for rejecting a pod."""
    return str(pod.status.get("message", ""))


def rejected(cluster: Cluster, name: str, resource: str, words: str) -> None:
    """Check that the kubelet rejects a new pod within LIMIT seconds, with these words in the pod's status."""
    pod = cluster.start_pod(name, {resource: 1}, nodeName=cluster.node_name, restartPolicy="Never")
    cluster.wait_for(lambda: pod.phase == "Failed", LIMIT, f"pod {name} is rejected: {pod.status}")
    assert words in why(pod), pod.status
    end(pod)


def timeouts(resource: str = "") -> float:
    """Return how many file accesses have timed out for a resource's devices, by default for other files."""
    lines = (line for line in get("/metrics").splitlines() if line.startswith("deviceplugin_look_timeouts_total{"))
    return sum(float(line.split()[-1]) for line in lines if f'resource="{resource}"' in line)


def test_device_paths_hang(cluster: Cluster, files: contextlib.ExitStack) -> None:
    """While device paths hang, a pod is rejected with the path, a claim waits, and the devices are not allocatable."""
    system = hanging(files, isolate.DEVICES / "paths")
    for name in ("a0", "a1", "a2", "a3"):
        os.mknod(system.point / name, stat.S_IFCHR | 0o600, os.makedev(240, int(name[1])))
    slow = simulated(SLOW, "slow") | {"devices": [{"path": f"{system.point}/a*"}]}
    with MeasuredBridge.running(cluster, slow, simulated(QUICK, "quick")) as bridge:
        cluster.wait_allocatable(SLOW, 2)
        cluster.wait_allocatable(QUICK, 2)
        bridge.wait_offered(2, "slow.example.net")
        bridge.claim("slow", bridge.one(resource=SLOW))
        system.hang()
        try:
            rejected(cluster, "slow", SLOW, f"{system.point}/a")
            waiting: ClaimPod = bridge.pod("slow-claim", {"x": "slow"})
            others_go_on(bridge)
            cluster.wait_allocatable(SLOW, 0)
            assert "did not answer within" in bridge.log()
            assert timeouts(SLOW) > 0
            others_go_on(bridge)
            assert waiting.phase == "Pending"
        finally:
            system.answer()
        cluster.wait_allocatable(SLOW, 2)
        cluster.start_pod("slow", {SLOW: 1}).wait_running(LIMIT)
        waiting.wait_running()


AGENT = """
import sys
from dra_bridge import run
from deviceplugin.config.types import PciConfig
from deviceplugin.sources.pci import PciSource
from deviceplugin.sources.simulated import SimulatedSource

class Quick(SimulatedSource):
    resource, driver = "example.com/quick", "quick.example.net"

class Card(PciSource):
    resource, driver = "example.com/card", "card.example.net"

run(Quick(4), Card(PciConfig(), sysfs_root={sys!r}, dev={dev!r}, rescan=1.0), share=2,
    argv=[*sys.argv[1:], "--metrics-address", {metrics!r}])
"""


def test_sysfs_hangs(cluster: Cluster, files: contextlib.ExitStack) -> None:
    """While sysfs hangs, its devices are not allocatable, and other pods start; then a pod gets a device again."""
    system = hanging(files, isolate.DEVICES / "sysfs")
    tree = Tree(system.point)
    for number in range(4):
        tree.pci(f"0000:3b:00.{number}")
    script = AGENT.format(**tree.options, sys=tree.options["sysfs_root"], metrics=METRICS)
    resources = simulated(QUICK, "quick"), simulated(CARD, "card")
    with Bridge.running(cluster, *resources, script=script) as bridge:
        cluster.wait_allocatable(CARD, 2)
        cluster.wait_allocatable(QUICK, 2)
        system.hang()
        try:
            cluster.wait_allocatable(CARD, 0, LIMIT)
            others_go_on(bridge)
            assert f"{system.point}/" in bridge.log()
            assert timeouts(CARD) > 0
        finally:
            system.answer()
        cluster.wait_allocatable(CARD, 2)
        cluster.start_pod("card", {CARD: 1}).wait_running(LIMIT)


def test_the_directory_of_cdi_specs_hangs(cluster: Cluster, files: contextlib.ExitStack) -> None:
    """While the CDI directory hangs, a claim fails in time and other pods start; afterwards the claim is prepared."""

    def restart_containerd() -> None:
        cluster.kill("containerd")
        cluster.start_component("containerd")

    # containerd watches the directory that it found at its start, so it restarts after the mount and the unmount.
    files.callback(restart_containerd)
    system = hanging(files, Path("/run/cdi"))
    restart_containerd()
    with MeasuredBridge.running(cluster, simulated(QUICK, "quick")) as bridge:
        cluster.wait_allocatable(QUICK, 2)
        bridge.wait_offered(2)
        system.hang()
        try:
            bridge.claim("slow", bridge.one(resource=QUICK))
            waiting: ClaimPod = bridge.pod("slow-claim", {"x": "slow"})
            refused = re.compile(r"/cdi\S* did not answer within")
            cluster.wait_for(lambda: bool(refused.search(bridge.log())), LIMIT, "the claim is refused")
            others_go_on(bridge, claims=False)
            assert timeouts() > 0
        finally:
            system.answer()
        waiting.wait_running()
        end(waiting)


def test_the_ledgers_directory_hangs(cluster: Cluster, files: contextlib.ExitStack) -> None:
    """While the directory of the agent's ledger hangs, pods with devices are rejected with the reason; others start."""
    system = hanging(files, LEDGER.parent)
    with MeasuredBridge.running(cluster, simulated(QUICK, "quick")) as bridge:
        cluster.wait_allocatable(QUICK, 2)
        first = cluster.start_pod("first", {QUICK: 1}).wait_running(LIMIT)
        system.hang()
        try:
            rejected(cluster, "refused", QUICK, "the ledger cannot be written")
            rejected(cluster, "refused-again", QUICK, "the ledger cannot be written")
            plain = cluster.start_pod("plain").wait_running(LIMIT)
            assert "deviceplugin_devices" in get("/metrics")
            get("/healthz")
            assert timeouts() > 0
        finally:
            system.answer()
        end(first, plain)

        def runs() -> bool:
            """Return whether a pod gets both devices. A refused pod's record ends once checkpoints lack the pod."""
            pod = cluster.start_pod("next", {QUICK: 2})
            try:
                pod.wait_running(LIMIT)
            except Exception:
                end(pod)
                return False
            return True

        cluster.wait_for(runs, 120, "a pod gets both devices")
        system.hang()
        assert bridge.process is not None
        bridge.process.terminate()
        bridge.process.wait(60)
        system.answer()
        bridge.start()
        bridge.wait_registered()
