"""No agent makes file operations in its event loop: a file system that hangs would stop the agent."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from tests.event_loop import ALLOWED, OUTPUT
from tests.scenarios.adopted import adopting
from tests.scenarios.fake import FakeNode
from tests.scenarios.fake_sides import FakeScene, WatchedNode
from tests.scenarios.plugin import PluginScenarios
from tests.scenarios.sides import SidesScenarios


@pytest.fixture(autouse=True)
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file to which agents write file operations in their event loops; at the end it may have only ALLOWED ones."""
    monkeypatch.setenv(OUTPUT, str(path := tmp_path / "found"))
    path.touch()
    yield path
    places = [line for line in path.read_text().splitlines() if not any(place in line for place in ALLOWED)]
    assert not places, "\n".join(sorted(places))


@pytest.mark.parametrize(
    "scenario",
    [
        PluginScenarios.test_a_pod_gets_its_device,
        PluginScenarios.test_the_kubelet_restarts,
        PluginScenarios.test_a_device_comes_and_goes,
        PluginScenarios.test_hooks_are_called,
        PluginScenarios.test_reload,
    ],
)
@pytest.mark.parametrize("adopted", [False, True], ids=["own", "adopted"])
def test_pods_with_limits(tmp_path: Path, scenario: object, *, adopted: bool) -> None:
    """Agents make no file operation in an event loop during Allocate, hooks, device changes, restarts and reloads."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(FakeNode.running(tmp_path))
        if adopted:
            plugins = stack.enter_context(tempfile.TemporaryDirectory(prefix="adopt-"))
            node.options = stack.enter_context(adopting(Path(plugins), node.kubelet.arguments))
            stack.callback(node.end_agents)
        scenario(PluginScenarios(), node)  # type: ignore[operator]


@pytest.mark.parametrize(
    "scenario", [SidesScenarios.test_ledger_and_checkpoint_are_lost, SidesScenarios.test_static_pod_ends_slowly]
)
def test_both_sides(tmp_path: Path, scenario: object) -> None:
    """Agents make no file operation in an event loop while claims are prepared, devices move, and a ledger is lost."""
    with FakeApiServer() as server, WatchedNode(server) as node:
        scene = FakeScene(node, tmp_path)
        try:
            scenario(SidesScenarios(), scene)  # type: ignore[operator]
            scene.check()
        finally:
            scene.end()
            node.release_sources()
