"""The publisher's state of each driver: how far the writes of the slices are, and the limit of their rate."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dra_bridge.kube import Failing, Object, WatchState
from dra_bridge.slices.desired import Feature, Pool
from dra_bridge.slices.foreign import ForeignKind, ForeignSlice, ForeignWrite
from dra_bridge.slices.mirror import Mirror
from dra_bridge.slices.observed import Comparison, ObservedPool, SeenSlices, compare


@dataclass(frozen=True, slots=True)
class PoolState:
    """How far the writes of a driver's pool are. `ObservedPool` has the API server's present slices.

    wanted, accepted: the tickets of the newest `want`, and of the newest pool that the API server has accepted.
    generation, slices, devices: of the accepted pool, its generation, the number of its slices and the names of its
    devices. unsupported: needed features that the server lacks. problems: what was left out and why, or what keeps the
    server from accepting the pool. writes: number of successful writes. foreign: foreign slices that are in the pool
    now. overcome: number of foreign writes that were undone, by kind. recent: the last of these foreign writes.
    """

    wanted: int = 0
    accepted: int = 0
    generation: int = 0
    slices: int = 0
    devices: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    writes: int = 0
    foreign: tuple[ForeignSlice, ...] = ()
    overcome: Mapping[ForeignKind, int] = field(default_factory=dict)
    recent: tuple[ForeignWrite, ...] = ()


class RateLimit:
    """Delays rounds of writes after too many recent rounds, so that two conflicting agents do not flood the server.

    The first round for a ticket writes a change that this node itself wants, such as a move of a device, which takes
    two or three rounds. Ten times as many of these rounds are allowed.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._ticket = 0
        self._rounds = deque[float](maxlen=burst), deque[float](maxlen=10 * burst)
        """Start times of recent rounds: of further rounds for the same ticket, and of the first round for each ticket.
        """

    async def round(self, ticket: int) -> bool:
        """Count a round of writes. If there were too many recent rounds, first wait and return True."""
        now = asyncio.get_running_loop().time()
        first = ticket != self._ticket
        self._ticket = ticket
        rounds, times = self._rounds[first], 10 if first else 1
        many = len(rounds) == rounds.maxlen and now - rounds[0] < self._burst / self._per_second
        if many:
            await asyncio.sleep(1.0 / (self._per_second * times))
        rounds.append(now)
        return many


@dataclass(slots=True, eq=False)
class PublishedDriver:
    """The publisher's state of one driver.

    left_out: what is not in the slices and why. failing: the failure that has repeated since the slices were last the
    wanted ones. failures: number of failed tries by HTTP status, 0 for tries without an answer. seen: the mirror's
    slices, for other threads. compared: the input of the last comparison, and its result.
    """

    pool: Pool
    rate_limit: RateLimit
    mirror: Mirror
    state: PoolState = field(default_factory=PoolState)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    watched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the watch of slices without a node has listed them."""
    warned: set[str] = field(default_factory=set)
    reported: dict[ForeignKind, float] = field(default_factory=dict)
    """By kind of foreign write, when the last line about it was logged (monotonic seconds)."""
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By UID, why a foreign slice could not be deleted, and when to try again (monotonic seconds)."""
    nodeless: WatchState = field(default_factory=WatchState)
    """Whether the watch of slices without a node is alive."""
    left_out: tuple[str, ...] = ()
    failing: Failing | None = None
    failures: Counter[int] = field(default_factory=Counter)
    seen: SeenSlices = field(default_factory=SeenSlices)
    # The default can be shared, because a Comparison is frozen.
    compared: tuple[tuple[object, ...], Comparison] = ((), Comparison())

    def show(self) -> None:
        """Copy the mirror's present slices to `seen`, which other threads read."""
        self.seen = SeenSlices.of(self.mirror)

    def failed(self, error: Exception) -> None:
        """Record a failed try to write the slices."""
        self.failing = Failing.after(self.failing, error)
        self.failures[self.failing.code] += 1

    def observed(
        self, watch: WatchState, owner: Object | None, missing: Collection[Feature], now: float
    ) -> ObservedPool:
        """See `Publisher.observed`. watch: the state of the watch of slices that name the node.

        missing: features that the API server lacks.
        """
        of = (self.pool, self.seen, owner, missing)
        before, seen = self.compared
        if len(before) != len(of) or before[3] != of[3] or any(map(operator.is_not, before[:3], of)):
            seen = compare(*of)
            self.compared = of, seen
        lapse = watch.lapse(now) or self.nodeless.lapse(now)
        return ObservedPool(seen, bool(self.state.accepted), lapse, self.failing)
