"""A fixture that makes DRA drivers, and ends them with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.dra.driver.served import Serve, ServedDriver, served_driver


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """A function that makes a driver as `served_driver` does; the driver ends with the test."""
    made: list[ServedDriver] = []

    async def serve(*arguments: Any, **options: Any) -> ServedDriver:
        made.append(await served_driver(tmp_path, *arguments, **options))
        return made[-1]

    yield serve
    for one in made:
        await one.end()
