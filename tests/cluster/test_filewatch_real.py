"""Agents without file events: their user has no inotify instance left, or the kernel has dropped the events."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import inotify_limits
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.node import DEVICE_PLUGINS, Cluster
from tests.cluster.scenario_node import RealNode
from tests.cluster.test_witnesses_real import Agents, Scene
from tests.scenarios.plugin import PluginScenarios
from tests.scenarios.sides import end_one_of_each, long, named

scene = witnesses.scene  # a fixture


def none_left(what: str) -> list[str]:
    """Return Python's arguments to run a Python program without inotify instances or watches."""
    return ["-m", "tests.cluster.inotify_limits", what, "0", sys.executable]


class WithoutInstances(Agents):
    """Agents whose user has no inotify instance left."""

    metrics = "127.0.0.1:9419"
    lacking = "instances"

    def command(self) -> list[str]:
        return [sys.executable, *none_left(self.lacking), *super().command()[1:]]


class WithoutWatches(WithoutInstances):
    """Agents whose user has no inotify watch left."""

    lacking = "watches"


@pytest.mark.parametrize("kind", [WithoutInstances, pytest.param(WithoutWatches, marks=long)])
def test_nothing_can_be_watched(scene: Scene, kind: type[WithoutInstances]) -> None:
    """Without file events, pods get devices by limits and claims, and devices move, also after a kubelet restart.

    The agent logs why it reads the files periodically.
    """
    scene.kind = kind
    plains, claimers = scene.both()
    assert f"left (user.max_inotify_{kind.lacking} is 0)" in " ".join(problems(scene))
    scene.cluster.restart_kubelet(reported=True)
    end_one_of_each(scene, plains, claimers)
    scene.share(a="none", b="all")
    scene.cluster.pod("wants-b").delete()
    scene.running(scene.claimer("again", "b"))
    assert scene.agents.process is not None
    inotify_limits.allow(scene.agents.process.pid, kind.lacking, 1000)
    scene.cluster.wait_for(lambda: not problems(scene), 90, "the agent watches again")


def problems(scene: Scene) -> list[str]:
    """Return the agent's problems about watches of files."""
    return [problem for problem in json.loads(scene.agents.page("/status"))["problems"] if "watch" in problem]


def test_events_of_a_kubelet_restart_are_lost(scene: Scene) -> None:
    """The kernel drops the file events of a kubelet restart: the agent still registers again, and devices move."""
    plains, claimers = scene.both()
    agent = scene.agents.process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)
    scene.stack.callback(agent.send_signal, signal.SIGCONT)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(limit // 2 + 100):
        (file := DEVICE_PLUGINS / f"{number}").touch()
        file.unlink()
    scene.cluster.restart_kubelet()
    agent.send_signal(signal.SIGCONT)
    scene.cluster.wait_allocatable(named("b"), 0)
    end_one_of_each(scene, plains, claimers)


@pytest.fixture
def node(cluster: Cluster) -> Iterator[RealNode]:
    """A node whose agents have no inotify instance."""
    with RealNode.running(cluster, none_left("instances")) as running:
        yield running


@pytest.mark.parametrize(
    "scenario",
    [
        PluginScenarios.test_released_is_called,
        PluginScenarios.test_the_kubelet_restarts,
        PluginScenarios.test_a_device_comes_and_goes,
    ],
)
def test_the_plugin_alone(node: RealNode, scenario: Callable[[PluginScenarios, RealNode], None]) -> None:
    """Without any inotify instance, `deviceplugin run` passes these scenarios of pods with limits."""
    scenario(PluginScenarios(), node)
