"""A config file that cannot be used when the bridge starts, as with a new image at the same time, on the real node."""

from __future__ import annotations

import pytest

from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.test_witnesses_real import LIMIT, Agents, Scene, resource
from tests.scenarios.sides import named

scene = witnesses.scene  # a fixture


def test_a_broken_file_at_a_start(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent serves both sides as the one before, is not ready and says why, until the file is mended."""
    cluster = scene.cluster
    monkeypatch.setattr(Agents, "metrics", "127.0.0.1:9410")
    scene.nodes("a", 2)
    scene.nodes("b", 2)
    scene.serve(resource("a", "none"), resource("b", "all"))
    cluster.wait_allocatable(named("a"), 2)
    scene.agents.wait_offered(2, "b.example.net")
    scene.running(scene.pod("a0", "a"), scene.claimer("b0", "b"))
    scene.agents.stop()
    scene.agents.config.write_text("resources: [}")
    scene.agents.start()
    scene.agents.wait_registered()
    cluster.wait_for(
        lambda: "the last good one is served: " in scene.agents.lacks(), LIMIT, "it is not ready, and says why"
    )
    assert f"{scene.agents.config}:1" in scene.agents.lacks()
    assert "deviceplugin_config_current 0.0" in scene.agents.page("/metrics")
    cluster.wait_allocatable(named("a"), 2)
    scene.running(scene.pod("a1", "a"), scene.claimer("b1", "b"))
    scene.before = scene.after = 4
    scene.agents.write()
    cluster.wait_for(lambda: not scene.agents.lacks(), LIMIT, "it is ready")
    assert "was read again: it is valid again, and nothing changed" in scene.agents.log()
    scene.check()
