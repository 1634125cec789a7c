"""A fixture of the tests of slices: an API server that has the node of the slices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import node_body
from tests.dra.slices.test_publisher import NODE


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as running:
        running.create(node_body(NODE))
        running.forget_log()
        yield running
