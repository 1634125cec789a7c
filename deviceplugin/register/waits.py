"""The devices for which an Allocate or Prepare waits.

While calls wait, the agent reads the evidence of the devices' holders more often.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from deviceplugin.exclusion import DeviceKey

PROMPT: Final = 0.3
"""Seconds between two reads of the evidence about awaited devices, so that a waiting call ends soon."""


class Waits:
    """The devices for which a call waits now. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: Counter[DeviceKey] = Counter()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def devices(self) -> Collection[DeviceKey]:
        """The devices for which a call waits, or is expected to wait soon."""
        return self._waiting.keys()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a call begins to wait for a device."""
        self._subscribers.append(callback)

    def expect(self, keys: Collection[DeviceKey], seconds: float) -> None:
        """Treat these devices as awaited for `seconds` seconds, because a refused caller will try again.

        Must be called in the event loop.
        """
        ending = ExitStack()
        ending.enter_context(self.waiting(keys))
        asyncio.get_running_loop().call_later(seconds, ending.close)

    @contextmanager
    def waiting(self, keys: Collection[DeviceKey]) -> Iterator[None]:
        """Treat these devices as awaited while the context manager is active."""
        self._waiting.update(keys)
        for callback in self._subscribers:
            callback()
        try:
            yield
        finally:
            self._waiting -= Counter(keys)  # The subtraction drops devices with a count of 0.
