"""Nodes whose plugins register with an agent that adopts them, not with the kubelet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scenarios.fake import AgentProcess
from tests.scenarios.node import Node, wait_for
from tests.scenarios.plugin import PluginScenarios

CONFIG = {"resources": [{"name": "example.com/serial", "devices": [{"plugin": {}}]}]}


@contextmanager
def adopting(where: Path, arguments: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Run an agent that adopts plugins; yield the options with which a plugin registers with this agent.

    where: a directory with a short path. arguments: the agent's options for the kubelet's paths. The plugins are agents
    of this project that do not know that they are adopted.
    """
    directory, file = where / "plugins", where / "config.yaml"
    file.write_text(json.dumps(CONFIG))
    options = ["--config", str(file), "--adopt", str(directory), "--log-level", "debug", *arguments]
    agent = AgentProcess(["-m", "deviceplugin", "run", *options], file, where / "log")
    try:
        ready: Callable[[], bool] = lambda: "plugins can register" in agent.log()  # noqa: E731
        wait_for("the agent that adopts plugins", ready, 30)
        yield "--device-plugin-dir", str(directory)
        assert agent.process.poll() is None
    finally:
        agent.kill()
        print(f"--- the agent that adopts\n{agent.log()}")


class AdoptedScenarios(PluginScenarios):
    """The scenarios of device plugins, with an adopting agent between the plugin and the kubelet."""

    NO_CHECKPOINT = "a plugin that reads the kubelet's checkpoint in its own directory does not find it there"

    @pytest.mark.skip(reason=NO_CHECKPOINT)
    def test_released_is_called(self, node: Node) -> None:
        """Skipped: an adopted plugin of this project cannot know when a pod has ended."""

    @pytest.mark.skip(reason=NO_CHECKPOINT)
    def test_sharing_is_switched_on_and_off(self, node: Node) -> None:
        """Skipped: an adopted plugin of this project cannot know when the pods that share a device have ended."""
