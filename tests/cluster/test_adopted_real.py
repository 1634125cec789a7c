"""Vendors' plugins that `deviceplugin run --adopt` adopts on the real node: allocations, restarts, adoption's end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import build, isolate
from tests.cluster.node import DEVICE_PLUGINS, PLUGINS_REGISTRY, Cluster
from tests.cluster.scenario_node import RealNode
from tests.cluster.test_existing_plugin_real import Vendor, restart_container, two_hold
from tests.cluster.test_witnesses_real import LIMIT, Scene, plain, scene
from tests.scenarios.adopted import AdoptedScenarios, adopting
from tests.scenarios.sides import named

__all__ = ["scene"]

DIRECTORY = isolate.DEVICES / "adopted"
"""The directory in which plugins register with the agent."""


@pytest.fixture
def node(cluster: Cluster) -> Iterator[RealNode]:
    arguments = ("--cgroup-root", str(isolate.POD_CGROUPS))
    with (
        tempfile.TemporaryDirectory(prefix="adopt-", dir=isolate.DEVICES) as where,
        RealNode.running(cluster) as running,
        adopting(Path(where), arguments) as options,
    ):
        running.options = options
        yield running


class TestAdoptedOnRealNode(AdoptedScenarios):
    """The scenarios of adopted plugins with a real kubelet, containers and device nodes."""


class Adopter:
    """`deviceplugin run --adopt` for one resource."""

    def __init__(self, scene: Scene, letter: str) -> None:
        self.scene = scene
        self.config = scene.cluster.logs / f"adopter-{time.monotonic_ns()}.json"
        self.log = self.config.with_suffix(".log")
        self.config.write_text(json.dumps({"resources": [{"name": named(letter), "devices": [{"plugin": {}}]}]}))
        self.process: subprocess.Popen[bytes] | None = None
        scene.stack.callback(self.stop, signal.SIGKILL)
        scene.stack.callback(lambda: print(self.log.read_text(errors="replace")))

    def start(self) -> None:
        """Start the agent, and wait until plugins can register."""
        options = ["--config", str(self.config), "--adopt", str(DIRECTORY), "--log-level", "debug"]
        options += ["--cgroup-root", str(isolate.POD_CGROUPS)]
        before = self.log.read_text().count(READY) if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deviceplugin", "run", *options], stdout=output, stderr=output
            )
        self.scene.cluster.wait_for(lambda: self.log.read_text().count(READY) > before, 60, "the agent is there")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the agent."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(20)


READY = "plugins can register"


def test_adoption_and_the_way_back(scene: Scene) -> None:
    """A plugin whose pods hold devices is adopted, and later serves without the agent; no device has two holders."""
    cluster = scene.cluster
    scene.nodes("a", 4)
    vendor, agent = Vendor(scene, "a"), Adopter(scene, "a")
    vendor.start()
    held, keys = two_hold(scene)

    # Adoption: first the agent starts, then the plugin registers in the agent's directory.
    agent.start()
    vendor.stop()
    cluster.wait_allocatable(named("a"), 0)
    vendor.directory = DIRECTORY
    vendor.start()
    cluster.wait_allocatable(named("a"), 4)
    after = [scene.pod(f"after-{number}", "a") for number in range(2)]
    scene.running(*after)
    scene.wait(plain("wants-plain", "a"))

    def again(what: str) -> None:
        if what == "kubelet":
            scene.restart_kubelet("sigterm")
            return
        one: Any = vendor if what == "plugin" else agent
        one.stop(signal.SIGKILL)
        one.start()

    orders = list(itertools.permutations(("kubelet", "plugin", "agent")))
    for order in orders:
        for what in order:
            again(what)
        cluster.wait_allocatable(named("a"), 4)
        scene.check()
    restart_container(scene, held[0])
    assert {pod.name: scene.key(pod) for pod in held} == keys
    scene.handed_on(held[0].delete, [held[0].uid], "wants-plain")

    # The way back: first the plugin registers with the kubelet, as after a reverted hostPath, then the agent ends.
    scene.wait(plain("wants-more", "a"))
    vendor.move(None)
    cluster.wait_for(
        lambda: "the vendor's plugin has disconnected" in agent.log.read_text(), LIMIT, "the agent has noticed"
    )
    cluster.wait_allocatable(named("a"), 4)
    scene.restart_kubelet("sigterm")
    cluster.wait_allocatable(named("a"), 4)
    agent.stop()
    scene.observe(3)
    assert scene.key(held[1]) == keys[held[1].name]
    scene.handed_on(held[1].delete, [held[1].uid], "wants-more", limit=LIMIT)


needs_sample = pytest.mark.skipif(
    not build.sample_plugin().exists(), reason=f"`python -m tests.cluster.build {build.SAMPLE_PLUGIN}` builds it"
)


@needs_sample
@pytest.mark.parametrize("how", ["registers", "is asked", "both"])
def test_the_sample_plugin_of_kubernetes(scene: Scene, how: str) -> None:
    """The agent adopts the Kubernetes sample plugin, whose fixed paths are mounts of the agent's directories.

    The plugin calls Register unless its directory has a file DEPRECATION (kubelet 1.36.3 makes none), and the agent
    asks a plugin whose socket is in plugins_registry. Pods get devices, also after restarts of kubelet and agent.
    """
    cluster = scene.cluster
    resource = "example.com/resource"
    agent = Adopter(scene, "a")  # the agent's config does not name the resource, but its plugin is adopted
    agent.start()
    registry, environment = DIRECTORY / "plugins_registry", dict(os.environ)
    directory, mounts = DIRECTORY, []
    if how != "registers":
        mounts.append(f"mount --bind {registry} {PLUGINS_REGISTRY}")
        environment["PLUGIN_SOCK_DIR"] = str(PLUGINS_REGISTRY)
    if how == "is asked":
        directory = isolate.DEVICES / "deprecated"
        directory.mkdir(exist_ok=True)
        (directory / "DEPRECATION").touch()
    mounts.append(f"mount --bind {directory} {DEVICE_PLUGINS}")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    with (cluster.logs / f"sample-plugin-{time.monotonic_ns()}.log").open("wb") as log:
        plugin = scene.stack.enter_context(
            subprocess.Popen(
                [*command, " && ".join((*mounts, f"exec {build.sample_plugin()}"))],
                stdout=log,
                stderr=log,
                env=environment,
            )
        )
    scene.stack.callback(plugin.kill)
    cluster.wait_allocatable(resource, 2)
    assert bool(list(registry.glob("dp.*"))) is (how != "registers")
    first = cluster.start_pod("first", {resource: 1}).wait_running()
    assert [name for name in first.exec(["ls", "/tmp"]).split() if name.startswith("Dev-")]
    scene.restart_kubelet("sigterm")
    cluster.wait_allocatable(resource, 2)
    agent.stop(signal.SIGKILL)
    cluster.wait_allocatable(resource, 0)
    agent.start()
    cluster.wait_allocatable(resource, 2)
    second = cluster.start_pod("second", {resource: 1}).wait_running()
    seen = [name for pod in (first, second) for name in pod.exec(["ls", "/tmp"]).split() if name.startswith("Dev-")]
    assert sorted(seen) == ["Dev-1", "Dev-2"]
    assert plugin.poll() is None
