"""Keeps the state of the connection to the API server: which failures last, and whether a watch is alive."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Self

from dra_bridge.kube.api import ApiError, UnavailableError

LOST: Final = 30.0
"""Seconds after which a failure (no response, or a refusal) that repeats at each try counts as lasting."""


@dataclass(frozen=True, slots=True)
class Failing:
    """A failure that has repeated at each try, with the result of the last try.

    since: time of the first failed try (monotonic seconds). text: the message of the last error. code: the HTTP status
    of the last response, 0 for an error without a response. outage: whether the API server did not respond to the last
    try.
    """

    since: float
    text: str
    code: int = 0
    outage: bool = False

    @classmethod
    def after(cls, before: Failing | None, error: Exception, now: float | None = None) -> Self:
        """Return the failure after another failed try. before: the previous failure; None if the last try succeeded."""
        since = before.since if before is not None else time.monotonic() if now is None else now
        code = error.code if isinstance(error, ApiError) else 0
        return cls(since, str(error), code, isinstance(error, UnavailableError) and not code)

    def lasts(self, now: float) -> bool:
        """Return whether the failure has lasted so long that it will probably not end by itself.

        now: monotonic seconds.
        """
        return now - self.since >= LOST


@dataclass(slots=True, eq=False)
class WatchState:
    """The known state of a watch. `Cluster.follow` keeps this state up to date.

    patience: the watch's data may be out of date after this number of seconds without data from the server. heard_at:
    when the server last sent a list, an event or a bookmark (monotonic seconds), None if the server never did. failing:
    the failure because of which the watch is not open, None if there is no such failure.
    """

    patience: float = float("inf")
    heard_at: float | None = None
    failing: Failing | None = None

    @property
    def begun(self) -> bool:
        """Whether the client has tried to open the watch.

        An agent does not try while another agent on its node runs.
        """
        return self.heard_at is not None or self.failing is not None

    def heard(self) -> None:
        """Record that the server has sent data on the watch."""
        self.heard_at = time.monotonic()

    def opened(self) -> None:
        """Record that the server has opened the watch."""
        self.heard()
        self.failing = None

    def failed(self, error: Exception) -> None:
        """Record that the watch ended with an error, or could not be opened."""
        self.failing = Failing.after(self.failing, error)

    def lapse(self, now: float) -> Failing | None:
        """Return why the watch's data may be out of date; None if the watch is alive. now: monotonic seconds."""
        failing, heard_at = self.failing, self.heard_at
        if failing is not None and (heard_at is None or failing.lasts(now)):
            return failing
        if heard_at is None:
            return Failing(now, "nothing was read yet", outage=True)
        if now - heard_at > self.patience:
            return Failing(heard_at, "the API server sends nothing", outage=True)
        return None
