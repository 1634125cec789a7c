"""What the API server has of a driver's pool as it was seen last, beside what is wanted: this is what is shown.

It is not what handovers go by: a move needs slices that were accepted since it began (`PoolState`).
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
    """A driver's slices as the watch and the answers to writes have shown them last; fields as of `Mirror`."""

    bodies: tuple[Object, ...] = ()
    generation: int = 0
    mutations: ServerMutations = field(default_factory=dict)
    taken: frozenset[str] = frozenset()

    @classmethod
    def of(cls, mirror: Mirror) -> Self:
        """Return what a mirror has now."""
        return cls(tuple(mirror.bodies.values()), mirror.generation, dict(mirror.mutations), frozenset(mirror.taken))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pool's slices as they were seen last. writes: how many of them are missing, differ or are too many."""

    slices: int = 0
    generation: int = 0
    devices: frozenset[str] = frozenset()
    writes: int = 0


def compare(pool: Pool, seen: SeenSlices, owner: Object | None, missing: Collection[Feature]) -> Comparison:
    """Compare what was seen last with what is wanted. missing: features that the server lacks.

    While a source has listed nothing yet, nothing else is wanted than what there is.
    """
    wanted = desired(pool, without=missing, taken=seen.taken)
    own = [body for body in seen.bodies if is_own(body, pool.driver, pool.node)]
    writes: Sequence[Write] = ()
    if wanted is not None:
        pooled = [body for body in seen.bodies if body["spec"]["pool"]["name"] == pool.node]
        every = plan(wanted.slices, pooled, owner=owner, generation=seen.generation, mutations=seen.mutations)
        # What others have in the pool is told as such.
        writes = [write for write in every if write.verb != "delete" or is_own(write.body, pool.driver, pool.node)]
    devices = frozenset(device["name"] for body in own for device in body["spec"].get("devices") or ())
    return Comparison(len(own), max(map(generation_of, own), default=0), devices, len(writes))


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """What is known of a driver's pool now.

    seen: the slices as they were seen last. accepted: whether the API server has accepted any slices of this agent.
    lapse: why what was seen may be out of date, None if it is what the API server has. failing: what keeps slices from
    being written.
    """

    seen: Comparison
    accepted: bool
    lapse: Failing | None = None
    failing: Failing | None = None

    @property
    def published(self) -> bool:
        """Whether the slices at the API server are known to be the wanted ones."""
        return self.lapse is None and self.accepted and not self.seen.writes

    @property
    def known(self) -> Comparison | None:
        """What the API server has now; None if that is not known."""
        return self.seen if self.lapse is None else None

    def unready(self, now: float) -> str:
        """Return why the agent is not ready for this pool; "" if it is. now: monotonic seconds.

        It is ready while the slices are as wanted, while the API server does not answer, and while a difference is
        newer than a failure that passes by itself.
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
