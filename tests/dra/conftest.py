"""Fixtures: a fake node for agents that serve limits and claims, a fake API server, and kubeconfigs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dra_bridge.kube import auth, kubeconfig
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import fake_node
from tests.scenarios.quick import hurry


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A fake node; agents in this process often make its kubelet write the checkpoint (which pod has which device)."""
    hurry(monkeypatch.setattr)
    with fake_node() as made:
        yield made


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """An API server without objects."""
    with FakeApiServer() as running:
        yield running


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeconfigs are read in this process."""
    monkeypatch.setattr(auth, "read_apart", kubeconfig.read)
