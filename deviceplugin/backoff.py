"""Computes how long to wait between failed tries."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Backoff:
    """The waits between failed tries: they double from `first` to `most` seconds.

    Each wait is multiplied by a random factor from a half to one. draw: a function that returns a random number between
    two bounds.
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
        """Return the longest wait in seconds, for an error that will not end soon."""
        return self.draw(self.most / 2, self.most)

    def reset(self) -> None:
        """Begin again with the shortest wait; called after a success."""
        self.tries = 0

    def fresh(self) -> Backoff:
        """Return a Backoff with the same bounds that has counted no failures."""
        return replace(self, tries=0)
