"""The limit on a driver's rounds of writes, so that agents which disagree do not flood the API server."""

from __future__ import annotations

import asyncio

__all__ = ["RateLimit"]


class RateLimit:
    """Counts rounds of writes and makes them wait when there were too many lately."""

    def __init__(self, burst: int, per_second: float) -> None:
        """Count none yet; burst: rounds that may be made at once, per_second: how fast that is regained."""
        self._burst = burst
        self._per_second = per_second
        self._ticket = 0
        self._rounds: tuple[list[float], list[float]] = ([], [])
        """When rounds of writes began: again for the same ticket, and the first for each."""

    async def round(self, ticket: int) -> bool:
        """Count a round of writes; wait first, and return True, if there were too many lately.

        The first round for a ticket is what this node itself wants (each device that moves takes
        two or three): ten times as many are spared for it as for disagreements.
        """
        now = asyncio.get_running_loop().time()
        first = ticket != self._ticket
        self._ticket = ticket
        rounds, times = self._rounds[first], 10 if first else 1
        window = self._burst / self._per_second if self._per_second else 0.0
        rounds[:] = [at for at in rounds if now - at < window]
        many = len(rounds) >= self._burst * times
        if many and self._per_second:
            await asyncio.sleep(1.0 / (self._per_second * times))
        rounds.append(now)
        return many
