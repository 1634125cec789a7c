"""Computes the waiting time before the next try after a failure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Backoff:
    """Computes the waiting times after failures: `first` seconds, doubled after each further failure, at most `most`.

    Each waiting time is multiplied by a random factor from 0.5 to 1. draw: a function that returns a random number
    between two bounds.
    """

    first: float = 0.25
    most: float = 30.0
    tries: int = 0
    draw: Callable[[float, float], float] = field(default=random.uniform, kw_only=True, repr=False)

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        whole = min(self.most, self.first * 2.0 ** min(self.tries, 32))
        self.tries += 1
        return self.draw(whole / 2, whole)

    def longest(self) -> float:
        """Return the longest waiting time (seconds), for an error that is expected to last.

        The call does not change the number of failures.
        """
        return self.draw(self.most / 2, self.most)

    def reset(self) -> None:
        """Begin again with the shortest waiting time. Call this after a success."""
        self.tries = 0

    def fresh(self) -> Backoff:
        """Return a new Backoff with the same bounds and without failures."""
        return replace(self, tries=0)
