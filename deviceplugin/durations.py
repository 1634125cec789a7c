"""Durations counted in buckets, as a histogram of Prometheus wants them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets, in seconds; one more bucket has no bound."""


@dataclass(slots=True)
class Durations:
    """How long calls took so far; counters only grow. Added to by one thread, read by any.

    counts: calls by bucket, not cumulated, the one without a bound last. seconds: their sum.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
