"""A client of the fake API server, with short waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deviceplugin.backoff import Backoff
from dra_bridge.kube import Cluster
from dra_bridge.testing.apiserver import FakeApiServer


@asynccontextmanager
async def connected(server: FakeApiServer, **options: Any) -> AsyncIterator[Cluster]:
    async with Cluster.from_server(server.url, **{"backoff": Backoff(0.01, 0.05), "deadline": 2.0, **options}) as one:
        async with asyncio.timeout(20):
            yield one


@pytest.fixture
async def cluster(server: FakeApiServer) -> AsyncIterator[Cluster]:
    async with connected(server) as one:
        yield one
