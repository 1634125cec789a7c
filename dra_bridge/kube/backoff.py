"""Random waits between tries, which grow with each failure."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Waits that double from `base` to `cap` seconds, each shortened at random to down to a half."""

    def __init__(
        self, base: float = 0.25, cap: float = 30.0, *, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self.base = base
        self.cap = cap
        self._draw = draw
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Backoff {self.base} to {self.cap} s, {self._failures} failures>"

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        longest = min(self.cap, self.base * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return self._draw(longest / 2, longest)

    def longest(self) -> float:
        """Return the seconds to wait where only time will help, or somebody else."""
        return self._draw(self.cap / 2, self.cap)

    def reset(self) -> None:
        """Begin anew: something went well."""
        self._failures = 0

    def fresh(self) -> Backoff:
        """Return another one of the same kind, without failures."""
        return Backoff(self.base, self.cap, draw=self._draw)
