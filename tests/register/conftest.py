"""A node with two drivers' DeviceClasses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from tests.dra.classes import device_class
from tests.register.node import NODE, D, E
from tests.scenarios.quick import hurry


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    hurry(monkeypatch.setattr)
    with FakeApiServer() as server:
        for driver in (D, E):
            server.create(device_class(driver))
        with FakeNode(server, NODE) as made:
            yield made
