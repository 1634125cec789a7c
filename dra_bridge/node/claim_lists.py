"""Lists all claims of the cluster, with one list for all drivers and all waiting devices of a node."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.durations import Durations
from deviceplugin.tasks import Tasks
from dra_bridge.kube import (
    CLAIMS,
    RESOURCE_CLAIMS,
    ApiError,
    Cluster,
    ClusterError,
    Failing,
    ListedClaim,
    UnavailableError,
)

Visit = Callable[[ListedClaim], None]

DEADLINE: Final = 240.0
"""Maximum seconds to list all claims: less than the 300 s for which etcd keeps the revision of the list's first page
(kube-apiserver compacts)."""
REST: Final = 1.0
"""Maximum pause after a list of claims, as a multiple of the list's duration. The pause limits the load, because each
list transfers all claims."""
LONGEST_REST: Final = 60.0


@dataclass(slots=True)
class ClaimListStatistics:
    """Statistics of the lists of claims, also of failed lists. Counters only grow. bytes: the size of all pages."""

    durations: Durations = field(default_factory=Durations)
    bytes: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Next:
    """The next list of all claims, which has not begun yet. visits: the functions to call with each claim."""

    reading: asyncio.Task[float | ClusterError]
    visits: list[Visit] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ClaimLists:
    """Reads consistent lists of all claims, one at a time.

    A page is not kept after the callers have visited its claims. backoff: the waits after failed lists. failing: the
    failure of all lists since the last success. _next: the list that has not begun yet; callers that arrive before it
    begins share this list. _due: when the next list may begin (monotonic seconds). _failure: the error of the last
    list, None if the list succeeded.
    """

    cluster: Cluster
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.5, most=15.0))
    statistics: ClaimListStatistics = field(default_factory=ClaimListStatistics)
    failing: Failing | None = None
    _next: _Next | None = None
    _due: float = 0.0
    _failure: ClusterError | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: Tasks = field(default_factory=Tasks)

    async def read(self, visit: Visit) -> float:
        """Call `visit` with each claim of a list that begins after this call.

        Return when the list's first request was sent (monotonic seconds).

        If this method raises an exception, the visited claims are incomplete and must not be used. Raises ClusterError
        if the list fails; during the wait after a failed list, the method raises the last error at once.
        """
        if self._failure is not None and time.monotonic() < self._due:
            raise self._failure.with_traceback(None)
        if self._next is None:
            self._next = _Next(self._tasks.start(self._read()))
        following = self._next
        following.visits.append(visit)
        done = await asyncio.shield(following.reading)
        if isinstance(done, ClusterError):
            raise done
        return done

    async def aclose(self) -> None:
        """Stop reading lists, and cancel calls of `read`."""
        await self._tasks.close()

    async def _read(self) -> float | ClusterError:
        async with self._turn:
            await asyncio.sleep(self._due - time.monotonic())
            assert self._next is not None
            visits, self._next = self._next.visits, None
            began = time.monotonic()
            try:
                await self._visited(visits)
            except ClusterError as error:
                self.statistics.failures += 1
                self._failure, self.failing = error, Failing.after(self.failing, error)
                asked = error.retry_after if isinstance(error, ApiError) else 0.0
                self._due = time.monotonic() + max(self.backoff.next(), min(asked, self.backoff.most))
                return error
            finally:
                took = time.monotonic() - began
                self.statistics.durations.add(took)
            self._failure = self.failing = None
            self.backoff.reset()
            rest = min(REST * took, LONGEST_REST)
            self._due = time.monotonic() + random.uniform(rest / 2, rest)  # noqa: S311  # jitter
            return began

    async def _visited(self, visits: list[Visit]) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                async with aclosing(self.cluster.pages(RESOURCE_CLAIMS, CLAIMS)) as pages:
                    async for page in pages:
                        self.statistics.bytes += page.size
                        for claim in page.items:
                            for visit in visits:
                                visit(claim)
        except TimeoutError as error:
            raise UnavailableError(f"the list of claims has not ended within {DEADLINE:g} s") from error
