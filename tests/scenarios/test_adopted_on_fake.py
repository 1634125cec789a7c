"""The scenarios of device plugins, with an agent between plugin and kubelet that adopts the plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.adopted import AdoptedScenarios, adopting
from tests.scenarios.fake import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    with (
        tempfile.TemporaryDirectory(prefix="adopt-") as where,
        FakeNode.running(tmp_path) as running,
        adopting(Path(where), running.kubelet.arguments) as options,
    ):
        running.options = options
        yield running
        assert not running.kubelet.crashes


class TestAdoptedOnFake(AdoptedScenarios):
    """Against the fake kubelet."""
