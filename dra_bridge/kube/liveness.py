"""What is known now of the API server: what goes on failing there, and whether a watch is alive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

from dra_bridge.kube.api import ApiError, UnavailableError

LOST: Final = 30.0
"""Seconds after which what fails at every try counts as failing: an answer that does not come, a refusal."""


@dataclass(frozen=True, slots=True)
class Failing:
    """Something that has failed at each try since a moment, and how the last try ended.

    since: of the first of these tries (monotonic seconds). text: of the last error. code: the HTTP status of the last
    answer, 0 for an error without one. outage: the API server did not answer the last try.
    """

    since: float
    text: str
    code: int = 0
    outage: bool = False

    @classmethod
    def after(cls, before: Failing | None, error: Exception, now: float | None = None) -> Self:
        """Return the state after another try has failed. before: the state before it, None if none failed."""
        since = before.since if before is not None else time.monotonic() if now is None else now
        code = error.code if isinstance(error, ApiError) else 0
        return cls(since, str(error), code, isinstance(error, UnavailableError) and not code)

    def lasts(self, now: float) -> bool:
        """Return whether it is more than a failure that passes by itself. now: monotonic seconds."""
        return now - self.since >= LOST


@dataclass(slots=True, eq=False)
class WatchState:
    """Whether a watch is known to be alive; `Cluster.follow` keeps it.

    patience: seconds without anything from the server after which nothing is known. heard_at: when the server last sent
    something for it: a list, an event, a bookmark (monotonic seconds), None before. failing: what keeps the watch from
    being open.
    """

    patience: float = float("inf")
    heard_at: float | None = None
    failing: Failing | None = None

    @property
    def begun(self) -> bool:
        """Whether the watch was tried at all: an agent that stands by for another one does not."""
        return self.heard_at is not None or self.failing is not None

    def heard(self) -> None:
        """Take note that the server has sent something."""
        self.heard_at = time.monotonic()

    def opened(self) -> None:
        """Take note that the server has opened the watch."""
        self.heard()
        self.failing = None

    def failed(self, error: Exception) -> None:
        """Take note that the watch broke off, or could not be opened."""
        self.failing = Failing.after(self.failing, error)

    def lapse(self, now: float) -> Failing | None:
        """Return why what the watch has shown may be out of date, None if it is alive. now: monotonic seconds."""
        failing, heard_at = self.failing, self.heard_at
        if failing is not None and (heard_at is None or failing.lasts(now)):
            return failing
        if heard_at is None:
            return Failing(now, "nothing was read yet", outage=True)
        if now - heard_at > self.patience:
            return Failing(heard_at, "the API server sends nothing", outage=True)
        return None
