"""Stores the publisher's state of each driver: the slices that the API server has accepted, and a rate limit."""

from __future__ import annotations

import asyncio
import operator
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dra_bridge.kube import Failing, Object, WatchState
from dra_bridge.slices.desired import Feature, Pool
from dra_bridge.slices.foreign import ForeignKind, ForeignSlice, ForeignWrite
from dra_bridge.slices.mirror import Mirror, SliceScope
from dra_bridge.slices.observed import Comparison, ObservedPool, SeenSlices, compare


@dataclass(frozen=True, slots=True)
class PoolState:
    """The slices of a pool that the API server has accepted. `ObservedPool` has the slices that the server has now.

    wanted: the ticket of the newest call of `Publisher.want`. accepted: the ticket of the newest pool that the API
    server has accepted. generation, slices, devices: the accepted pool's generation, number of slices, and names of
    devices. unsupported: needed features that the server lacks. problems: sentences about items that the slices lack,
    and about the last failed write. writes: number of successful writes. foreign: foreign slices that are in the pool
    now. overcome: for each kind, the number of foreign writes that the agent has undone. recent: the foreign writes
    that the agent has undone lately.
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
    """Delays a driver's writes after too many recent rounds, so that conflicting agents do not flood the API server.

    The first round of writes for a ticket (a call of `Publisher.want`) publishes a change by this node itself, such as
    a move of a device. (A move takes two or three tickets.) So ten times as many first rounds as repeated rounds are
    permitted.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._ticket = 0
        self._rounds = deque[float](maxlen=burst), deque[float](maxlen=10 * burst)
        """Two deques with the start times of recent rounds: of repeated rounds (index False), and of the first round of
        each ticket (index True)."""

    async def round(self, ticket: int) -> bool:
        """Count a round of writes. If there were too many recent rounds, first wait, and return True."""
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
class SliceWatch:
    """A watch of slices.

    scope: the group of slices. title: the watched slices, for messages. selector: the watch's field selector. state:
    whether the watch is alive. bodies: for each slice name, the watched slice, if it names this node or if its pool has
    the node's name.
    """

    scope: SliceScope
    title: str
    selector: str
    state: WatchState = field(default_factory=WatchState)
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set once the watch has listed the slices."""
    bodies: dict[str, Object] = field(default_factory=dict)
    begun: bool = False

    @property
    def alive(self) -> bool:
        """Whether the watch is alive, so that `bodies` are the slices on the API server."""
        return self.listed.is_set() and self.state.lapse(time.monotonic()) is None


@dataclass(slots=True, eq=False)
class PublishedDriver:
    """The publisher's state of one driver.

    nodeless: the watch of the driver's slices without a node, which other drivers may share. left_out: the devices and
    fields that the slices lack, with reasons. failing: the failure of all tries since the last success; None after a
    success. failures: for each HTTP status (0 for no response), the number of failed tries. seen: the mirror's slices,
    for reads by other threads. compared: the input and the result of the last comparison of seen and wanted slices.
    """

    pool: Pool
    rate_limit: RateLimit
    mirror: Mirror
    nodeless: SliceWatch
    state: PoolState = field(default_factory=PoolState)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    warned: set[str] = field(default_factory=set)
    reported: dict[ForeignKind, float] = field(default_factory=dict)
    """For each kind of foreign write, when a line about it was last logged (monotonic seconds)."""
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    """For the UID of each foreign slice that could not be deleted: the reason, and when to try again (monotonic
    seconds)."""
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
        """Return the agent's present knowledge of the pool. watch: the state of the watch of slices that name the node.

        missing: features that the API server lacks.
        """
        of = (self.pool, self.seen, owner, missing)
        before, seen = self.compared
        if len(before) != len(of) or before[3] != of[3] or any(map(operator.is_not, before[:3], of)):
            seen = compare(*of)
            self.compared = of, seen
        return ObservedPool(seen, bool(self.state.accepted), self.lapse(watch, now), self.failing)

    def lapse(self, watch: WatchState, now: float) -> Failing | None:
        """Return why the mirror may be out of date; None if both watches are alive. watch: see `observed`."""
        return watch.lapse(now) or self.nodeless.state.lapse(now)
