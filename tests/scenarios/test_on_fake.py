from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.adopted import AdoptedScenarios, adopting
from tests.scenarios.fake import FakeNode
from tests.scenarios.faults import FaultScenarios
from tests.scenarios.node import FaultyNode, Node, wait_for
from tests.scenarios.plugin import RESOURCE, PluginScenarios


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FaultyNode]:
    with FakeNode.running(tmp_path) as running:
        yield running
        assert not running.kubelet.crashes


class TestOnFake(PluginScenarios):
    """The scenarios of device plugins on the fake kubelet; each agent is a process of its own."""

    @pytest.mark.parametrize("kind", ["nodes", "links"])
    def test_a_reload_makes_a_group_and_ends_it(self, node: Node, kind: str) -> None:
        """A reload joins two held nodes and a free node into one device (group): restarted containers keep their nodes.

        After another reload that ends the group, the free node is a device of its own again.
        """
        paths = self.devices(node, 3)
        for number, path in enumerate(paths):
            if path.is_char_device():  # Each node gets a number of its own. A plain file has an inode of its own.
                path.unlink()
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(240, number))
        if kind == "links":
            links = [node.directory / "by-id" / path.name for path in paths]
            links[0].parent.mkdir()
            for link, path in zip(links, paths, strict=True):
                link.symlink_to(f"../dev/{path.name}")
            paths = links
        each = {"name": RESOURCE, "devices": [{"path": f"{paths[0].parent}/tty*"}]}
        spare = {"name": "example.com/spare", "devices": [{"simulated": {"count": 1}}]}
        agent = node.start_agent(config=self.config(node, each, spare))
        node.wait_allocatable(RESOURCE, 3)
        node.wait_allocatable("example.com/spare", 1)
        first, second = pods = [node.start_pod(name, {RESOURCE: 1}).wait_running() for name in ("first", "second")]
        wait_for("the pods' names", lambda: agent.log().count(" got 1 device") == 2, node.patience)
        held = [self.held(pod, paths) for pod in pods]
        # The group has the id of its first node.
        parts = [*held, *(path for path in paths if path not in held)]
        group = {"name": RESOURCE, "devices": [{"group": [{"path": str(path)} for path in parts]}]}
        agent.reload(self.config(node, group, spare))
        node.wait_allocatable(RESOURCE, 0)
        for pod in pods:
            pod.restart_container()
        assert [self.held(pod, paths) for pod in pods] == held
        # With each grant, the agent records the nodes that the holders can open now.
        node.start_pod("spare", {"example.com/spare": 1}).wait_running()
        agent.reload(self.config(node, each, spare))
        node.wait_allocatable(RESOURCE, 3)
        third = node.start_pod("third", {RESOURCE: 1}).wait_running()
        assert self.held(third, paths) == parts[2]
        second.delete()
        fourth = node.start_pod("fourth", {RESOURCE: 1}).wait_running()
        assert [self.held(pod, paths) for pod in (first, fourth)] == held


class TestUnwatchedOnFake(PluginScenarios):
    """The scenarios of device plugins while the user has no inotify instance left."""

    @pytest.fixture
    def node(self, tmp_path: Path) -> Iterator[FakeNode]:
        with FakeNode.running(tmp_path, "tests.scenarios.unwatched") as running:
            yield running


class TestFaultsOnFake(FaultScenarios):
    """The scenarios in which the kubelet, network or API server fails, on the fake kubelet."""


@pytest.fixture
def plugins() -> Iterator[Path]:
    """A directory for plugins' sockets; in pytest's temporary directory the sockets' paths would be too long."""
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:
        yield Path(where)


class TestAdoptedOnFake(AdoptedScenarios):
    """The scenarios of device plugins, with an agent between plugin and kubelet that adopts the plugin."""

    @pytest.fixture
    def node(self, plugins: Path, node: FakeNode) -> Iterator[FakeNode]:  # agents end before `plugins` is removed
        with adopting(plugins, node.kubelet.arguments) as options:
            node.options = options
            yield node
            node.end_agents()  # else running agents would create sockets again in this directory
