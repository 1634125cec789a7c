"""Whole agents with both sides on the fake node, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.source import DeviceSource
from dra_bridge.handover.share import Share
from dra_bridge.kube import Cluster
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import BridgeOptions
from dra_bridge.node.share import NONE, HandoverPolicy
from dra_bridge.testing.node import FakeNode


def bridge(
    node: FakeNode,
    sources: Sequence[DeviceSource],
    share: Share = NONE,
    cdi: Path | None = None,
    *,
    claim_status: bool = False,
    **options: Any,
) -> Bridge:
    """Return an agent that scans often. share: of each resource. cdi: else the node's CDI directory."""
    paths = replace(node.paths, cdi_dir=cdi) if cdi is not None else node.paths
    return Bridge(
        sources,
        {source.resource: HandoverPolicy(share) for source in sources},
        BridgeOptions(paths, None, Cluster.from_server(node.server.url), node.name, claim_status),
        period=0.05,
        **options,
    )


@contextlib.asynccontextmanager
async def running(bridge: Bridge) -> AsyncIterator[Bridge]:
    """Run an agent until the end of the block; it has to end by itself when it is stopped."""
    task = asyncio.create_task(bridge.run())
    try:
        yield bridge
    finally:
        bridge.agent.stop()
        async with asyncio.timeout(60):
            await task


async def until(what: Callable[[], object], why: Callable[[], str] | str = "") -> None:
    """Wait until something is so. why: what is said if it does not come."""
    try:
        async with asyncio.timeout(60):
            while not what():  # noqa: ASYNC110  # what is waited for tells nobody
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"it does not come: {why if isinstance(why, str) else why()}")
