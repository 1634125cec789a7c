"""The fake node of the tests of agents with both sides, and a cheap reader of kubeconfigs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dra_bridge.kube import auth
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class as class_of_resource
from tests import kubeconfigs
from tests.dra.classes import device_class
from tests.scenarios.quick import hurry


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A node with the classes of the drivers that these tests have."""
    hurry(monkeypatch.setattr)
    with FakeApiServer() as server:
        server.create(class_of_resource("example.com/fpga", "fpga.example.com"))
        for driver in ("d.example.com", "gpu.example.com", "other.example.com"):
            server.create(device_class(driver))
        with FakeNode(server, "node") as made:
            yield made


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeconfigs are read in this process."""
    monkeypatch.setattr(auth._KubeConfig, "_read", kubeconfigs.read_here)
