from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from tests.scenarios.fake_sides import FakeScene, WatchedNode
from tests.scenarios.sides import Scene, SidesScenarios


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with FakeApiServer() as server, WatchedNode(server) as node:
        made = FakeScene(node, tmp_path)
        try:
            yield made
            made.check()
        finally:
            made.end()
            node.release_sources()
        assert not node.crashes


class TestSidesOnFake(SidesScenarios):
    """The scenarios of both sides with agents as processes of their own, on the fake node."""
