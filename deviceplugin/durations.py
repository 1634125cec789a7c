"""Counts durations in buckets, for Prometheus histograms."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The upper bounds of the buckets of `Durations`, in seconds. A further, last bucket has no upper bound."""


@dataclass(slots=True)
class Durations:
    """Statistics of the durations of calls. Counters only grow. Only one thread may add; any thread may read.

    counts: the number of calls in each bucket, not cumulated. The bucket without an upper bound is last. seconds: the
    sum of the durations.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one call with this duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
