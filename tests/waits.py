"""Waits for conditions without a notification."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import pytest

PATIENCE: Final = 60.0
"""Seconds after which a wait fails; on a loaded machine any step takes seconds."""
PAUSE: Final = 0.005
"""Seconds between two evaluations of a condition."""


async def until(what: Callable[[], object], why: Callable[[], str] | str = "", timeout: float = PATIENCE) -> None:
    """Wait until a condition is true, while other tasks of the event loop run. why: printed after the timeout."""
    try:
        async with asyncio.timeout(timeout):
            while not what():  # noqa: ASYNC110  # nothing notifies of it
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        pytest.fail(_never(why))


def wait(condition: Callable[[], object], why: Callable[[], str] | str = "", timeout: float = PATIENCE) -> None:
    """Wait in this thread until a condition is true. why: printed after the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(_never(why))
        time.sleep(PAUSE)


def _never(why: Callable[[], str] | str) -> str:
    return f"it does not come: {why if isinstance(why, str) else why()}"
