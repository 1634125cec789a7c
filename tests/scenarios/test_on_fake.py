from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.adopted import AdoptedScenarios, adopting
from tests.scenarios.fake import FakeNode
from tests.scenarios.faults import FaultScenarios
from tests.scenarios.node import FaultyNode
from tests.scenarios.plugin import PluginScenarios


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FaultyNode]:
    with FakeNode.running(tmp_path) as running:
        yield running
        assert not running.kubelet.crashes


class TestOnFake(PluginScenarios):
    """The scenarios with agents as processes of their own, against the fake kubelet."""


class TestUnwatchedOnFake(PluginScenarios):
    """The same while the user has no inotify instance left."""

    @pytest.fixture
    def node(self, tmp_path: Path) -> Iterator[FakeNode]:
        with FakeNode.running(tmp_path, "tests.scenarios.unwatched") as running:
            yield running


class TestFaultsOnFake(FaultScenarios):
    """The scenarios in which the kubelet errs, on the fake kubelet."""


@pytest.fixture
def plugins() -> Iterator[Path]:
    """A directory for plugins' sockets, whose paths in pytest's own would be too long."""
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:
        yield Path(where)


class TestAdoptedOnFake(AdoptedScenarios):
    """The scenarios of device plugins, with an agent between plugin and kubelet that adopts the plugin."""

    @pytest.fixture
    def node(self, plugins: Path, node: FakeNode) -> Iterator[FakeNode]:  # its agents end before the directory goes
        with adopting(plugins, node.kubelet.arguments) as options:
            node.options = options
            yield node
            node.end_agents()  # they make their sockets anew in a directory that is being removed
