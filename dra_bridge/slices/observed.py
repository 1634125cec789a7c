"""Compares the slices of a driver's pool, as the agent last saw them, with the wanted slices, for metrics and status.

Moves of devices do not use this comparison. A move needs slices that the API server accepted after the move began
(`PoolState`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

from dra_bridge.kube import Failing, Object
from dra_bridge.slices.desired import Feature, Pool, desired
from dra_bridge.slices.foreign import is_own
from dra_bridge.slices.mirror import Mirror
from dra_bridge.slices.plan import ServerMutations, Write, generation_of, plan


@dataclass(frozen=True, slots=True)
class SeenSlices:
    """A driver's slices as last seen in the watch or in responses to writes. See `Mirror` for the fields."""

    bodies: tuple[Object, ...] = ()
    generation: int = 0
    mutations: ServerMutations = field(default_factory=dict)
    taken: frozenset[str] = frozenset()

    @classmethod
    def of(cls, mirror: Mirror) -> Self:
        """Return a copy of a mirror's present content, for other threads."""
        return cls(tuple(mirror.bodies.values()), mirror.generation, dict(mirror.mutations), frozenset(mirror.taken))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The agent's existing slices of a pool, and their difference from the wanted slices.

    slices, generation, devices: number of the existing slices, their highest generation, and names of their devices.
    writes: number of missing, wrong or superfluous slices.
    """

    slices: int = 0
    generation: int = 0
    devices: frozenset[str] = frozenset()
    writes: int = 0


def compare(pool: Pool, seen: SeenSlices, owner: Object | None, missing: Collection[Feature]) -> Comparison:
    """Compare the slices that were last seen with the wanted slices. missing: features that the API server lacks.

    While a device source of the pool has not listed its devices, the wanted slices are unknown. In this case, the
    function reports no missing, wrong or superfluous slices.
    """
    wanted = desired(pool, without=missing, taken=seen.taken)
    own = [body for body in seen.bodies if is_own(body, pool.driver, pool.node)]
    writes: Sequence[Write] = ()
    if wanted is not None:
        pooled = [body for body in seen.bodies if body["spec"]["pool"]["name"] == pool.node]
        every = plan(wanted.slices, pooled, owner=owner, generation=seen.generation, mutations=seen.mutations)
        # Foreign slices in the pool have metrics of their own, so their deletion does not count here.
        writes = [write for write in every if write.verb != "delete" or is_own(write.body, pool.driver, pool.node)]
    devices = frozenset(device["name"] for body in own for device in body["spec"].get("devices") or ())
    return Comparison(len(own), max(map(generation_of, own), default=0), devices, len(writes))


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """The agent's present knowledge of a driver's pool.

    seen: the comparison of the last seen slices with the wanted slices. accepted: whether the API server has accepted
    any slices of this agent. lapse: why `seen` may be out of date; None if `seen` is current. failing: the failure that
    keeps slices from being written.
    """

    seen: Comparison
    accepted: bool
    lapse: Failing | None = None
    failing: Failing | None = None

    @property
    def published(self) -> bool:
        """Whether the API server is known to have exactly the wanted slices."""
        return self.lapse is None and self.accepted and not self.seen.writes

    @property
    def known(self) -> Comparison | None:
        """The comparison of the API server's slices with the wanted slices; None if `seen` may be out of date."""
        return self.seen if self.lapse is None else None

    def unready(self, now: float) -> str:
        """Return why the agent is not ready for this pool; "" if it is ready. now: monotonic seconds.

        The agent is ready while the API server has the wanted slices or does not respond. The agent stays ready for
        some time after the slices begin to differ, because most failures end by themselves.
        """
        if self.published:
            return ""
        if not self.accepted:
            return self.failing.text if self.failing is not None else "they were not written yet"
        if self.lapse is not None:
            return "" if self.lapse.outage else f"it is not known which ones the API server has: {self.lapse.text}"
        if self.failing is None or self.failing.outage or not self.failing.lasts(now):
            return ""
        return f"{self.seen.writes} are missing, or not as wanted: {self.failing.text}"
