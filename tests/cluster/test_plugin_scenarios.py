"""The scenarios of device plugins on the real node; the same scenarios run with the fake kubelet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.node import Cluster
from tests.cluster.scenario_node import RealNode
from tests.scenarios.plugin import PluginScenarios


@pytest.fixture
def node(cluster: Cluster) -> Iterator[RealNode]:
    with RealNode.running(cluster) as running:
        yield running


class TestOnRealNode(PluginScenarios):
    """The scenarios with each agent in its own process, and a real kubelet with containers and device nodes."""
