"""What goes to the API server: counts of requests and failures, and since when it does not answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["RequestStatistics", "Traffic"]

logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """What went to the API server so far; never changed, replaced.

    requests: answered or not, by HTTP method. failures: those not answered, or with a 429 or 5xx.
    watches: streams opened. lost_since: time.monotonic() of the first failure since the last
    answer, None while the server answers. version: of resource.k8s.io, empty if not chosen yet.
    """

    requests: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    watches: int = 0
    lost_since: float | None = None
    version: str = ""

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(count for method, count in self.requests.items() if method != "GET")


class Traffic:
    """Counts requests and failures, and logs once when the API server is lost or back."""

    def __init__(self) -> None:
        self.lost_since: float | None = None
        """time.monotonic() of the first failure since the last answer, None while the server answers."""
        self.recoveries = 0
        """How often the server answered again after it was lost."""
        self._requests: dict[str, int] = {}
        self._failures = 0
        self._watches = 0
        self._back = asyncio.Event()

    def statistics(self, version: str) -> RequestStatistics:
        """Return the counts so far; version: of resource.k8s.io."""
        return RequestStatistics(dict(self._requests), self._failures, self._watches, self.lost_since, version)

    def asked(self, method: str) -> None:
        """Count a request."""
        self._requests[method] = self._requests.get(method, 0) + 1

    def streamed(self) -> None:
        """Count the opening of a watch, which is a request too."""
        self._watches += 1
        self.asked("GET")

    def failed(self) -> None:
        """Count a request that the server could not serve now."""
        self._failures += 1

    def unanswered(self, server: str, why: str) -> None:
        """Count a request without an answer: the server is lost from the first one on."""
        self._failures += 1
        if self.lost_since is None:
            self.lost_since = time.monotonic()
            self._back.clear()
            logger.warning("the API server %s is lost: %s", server, why)

    def answered(self, server: str) -> None:
        """Note an answer: the server is there."""
        if self.lost_since is not None:
            seconds = time.monotonic() - self.lost_since
            self.lost_since = None
            self._back.set()
            self.recoveries += 1
            logger.info("the API server %s is back after %.1f s", server, seconds)

    async def pause(self, seconds: float) -> None:
        """Wait before trying again: some seconds, or less if the server is lost and another request finds it back."""
        if self.lost_since is None:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._back.wait()
        except TimeoutError:
            pass
