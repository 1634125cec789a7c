"""The devices for which an Allocate or Prepare waits, and the claims that were refused devices of the plugin side.

While an Allocate or Prepare waits, the agent reads the evidence of the devices' holders more often.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.records import RecordKey

PROMPT: Final = 0.3
"""Seconds between two reads of the evidence about awaited devices, so that a waiting call ends soon."""

RETRIED: Final = 120.0
"""The kubelet repeats a refused Prepare within this number of seconds, if the claim's pod still waits for the claim.

The kubelet usually repeats the Prepare after 60 to 90 s (`dra_bridge.driver.waiting`).
"""


class RefusedClaim(NamedTuple):
    """A claim whose Prepare was refused because devices of the claim are on the plugin side, or are moving to DRA.

    title: the claim's namespace/name. devices: for each of the claim's devices, the `sequence` of the device's record
    at the refusal.
    """

    title: str
    devices: Mapping[DeviceKey, int]


class Waits:
    """The devices for which an Allocate or Prepare waits now. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: Counter[DeviceKey] = Counter()
        self._subscribers: list[Callable[[], None]] = []
        self.refused: Final[dict[RecordKey, RefusedClaim]] = {}
        """For each (driver, claim UID) that was refused in the last `RETRIED` seconds: the claim. Callers remove ended
        claims."""

    @property
    def devices(self) -> Collection[DeviceKey]:
        """The devices for which an Allocate or Prepare waits, or is expected to wait soon (`expect`)."""
        return self._waiting.keys()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever an Allocate or Prepare begins to wait for a device."""
        self._subscribers.append(callback)

    def expect(self, keys: Collection[DeviceKey], seconds: float) -> None:
        """Treat these devices as awaited for `seconds` seconds, because the caller that was refused will try again.

        This method must be called in the event loop.
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

    def refuse(self, claim: RecordKey, refused: RefusedClaim) -> None:
        """Keep a refused claim in the mapping `refused` for `RETRIED` seconds.

        This method must be called in the event loop.
        """

        def expire() -> None:
            if self.refused.get(claim) is refused:
                del self.refused[claim]

        self.refused[claim] = refused
        asyncio.get_running_loop().call_later(RETRIED, expire)
