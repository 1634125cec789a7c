"""Fixtures of the ledger's tests: a path, and an open ledger with two devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.register.records import Side
from tests.dra.ledger.samples import T0, DirectLedger, R, adopt


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "plugins" / "ledger.db")


@pytest.fixture
def store(path: str) -> Iterator[DirectLedger]:
    with DirectLedger(path) as opened:
        opened.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
        yield opened
