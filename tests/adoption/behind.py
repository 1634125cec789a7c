"""Runs agents that adopt vendors' plugins (plugins register with the agent), and stand-in plugins, as processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.scenarios.fake import AgentProcess
from tests.scenarios.node import wait_for
from tests.testing.vendor import Vendor


class Adopted:
    """Agents and plugins as processes; plugins register in the directory `adopted`."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.directory = where / "adopted"
        self.vendors: list[Vendor] = []
        self.agents: list[AgentProcess] = []
        self.config = where / "config.yaml"

    def write_config(self, *resources: Mapping[str, Any]) -> None:
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps({"resources": resources}))
        new.replace(self.config)

    def run_agent(self, module: str, *options: str, adopts: bool = True) -> AgentProcess:
        """Start the agent (`MODULE run`); if it adopts plugins, wait until plugins can register with it."""
        arguments = ["-m", module, "run", "--config", str(self.config), *options]
        arguments += ["--adopt", str(self.directory)] if adopts else []
        self.agents.append(AgentProcess(arguments, self.config, self.where / f"agent-{len(self.agents)}.log"))
        if adopts:
            self.wait_log("plugins can register")
        return self.agents[-1]

    def vendor(self, *resources: Mapping[str, Any], **quirks: Any) -> Vendor:
        """Start a stand-in plugin in the agent's directory."""
        (where := self.where / f"vendor-{len(self.vendors)}").mkdir()
        self.vendors.append(Vendor(where, self.directory, *resources, **quirks).start())
        return self.vendors[-1]

    def wait_log(self, text: str, count: int = 1) -> None:
        """Wait until the log of the newest agent has this text `count` times."""
        wait_for(f"{text!r} in the log", lambda: self.agents[-1].log().count(text) >= count, 120)

    def end(self) -> None:
        for vendor in self.vendors:
            vendor.stop(kill=True)
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.kill()
            print(agent.log())
        for vendor in self.vendors:
            print(vendor.log.read_text())
