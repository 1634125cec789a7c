from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from tests.scenarios.fake_sides import FakeScene, WatchedNode
from tests.scenarios.sides import SidesScenarios, end_one_of_each


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[FakeScene]:
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
    """The scenarios of device plugin and DRA on the fake node; each agent is a process of its own."""


def test_no_inotify_instance_is_left(scene: FakeScene) -> None:
    """Without an inotify instance, devices move to DRA and back when holders end, also after a kubelet restart."""
    scene.program = ("-m", "tests.scenarios.unwatched")
    pods, users = scene.both()
    scene.end_kubelet("sigterm")
    scene.start_kubelet()
    end_one_of_each(scene, pods, users)
