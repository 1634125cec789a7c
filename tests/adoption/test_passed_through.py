"""Resources of adopted plugins that the config does not name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.kubelet.paths import Paths
from deviceplugin.node.agent import Agent
from deviceplugin.node.claim_side import ClaimSide

R = "vendor.example/gadget"


class Plugins(VendorPlugins):
    """Adopted plugins whose registered resources a test sets."""

    names: frozenset[str] = frozenset()

    @property
    def registered_resources(self) -> set[str]:
        return set(self.names)

    async def run(self) -> None:
        await asyncio.Event().wait()


class Side(ClaimSide):
    """Stands in for the part of the agent that serves claims: records the resources that the agent adds."""

    def __init__(self) -> None:
        self.resources: list[tuple[str, str]] = []

    def brought(self, resource: str, parent: str) -> None:
        self.resources.append((resource, parent))


async def test_a_plugin_registers_while_its_resource_is_ended(tmp_path: Path) -> None:
    """If a plugin registers while a reload ends its resource, the resource is served again afterwards."""
    plugins = Plugins(tmp_path)
    side = Side()
    agent = Agent([AdoptedSource(R, plugins)], Paths(tmp_path), claim_side=side, vendors=plugins)
    running = asyncio.create_task(agent.run())
    await agent.begun.wait()
    former = agent.services[R]
    end = former.follower.end

    async def register_and_end() -> None:
        plugins.names = frozenset({R})
        plugins.registered(R)
        await end()

    former.follower.end = register_and_end  # type: ignore[method-assign]
    await agent.reconfigure({})
    assert agent.services.get(R) not in (None, former)
    assert side.resources == [(R, "")]
    agent.stop()
    await running
