"""The fake node of the tests of agents with both sides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deviceplugin.register import rules
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class as class_of_resource
from tests.dra.classes import device_class


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A node with the classes of the drivers that these tests have."""
    monkeypatch.setattr(rules, "WELL_APART", 0.2)  # a pod that the agent has not learned of holds its device so long
    with FakeApiServer() as server:
        server.create(class_of_resource("example.com/fpga", "fpga.example.com"))
        for driver in ("d.example.com", "gpu.example.com", "other.example.com"):
            server.create(device_class(driver))
        with FakeNode(server, "node") as made:
            yield made
