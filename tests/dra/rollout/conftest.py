"""Fixtures: an API server for tests that ask agents."""

from __future__ import annotations

import pytest

from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.rollout.nodes import binding


@pytest.fixture
def server(server: FakeApiServer) -> FakeApiServer:
    """An API server with the ClusterRoleBinding of the agents' ServiceAccount."""
    server.create(binding())
    return server
