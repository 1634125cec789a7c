"""Which of one resource's ids are in use: those that a container holds, and grants that no checkpoint names yet.

Allocate carries no pod. A grant is pending until the kubelet's checkpoint names a container for it that it did not
name before, or until two checkpoints, each written at our request and well apart, name none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from deviceplugin.kubelet.checkpoint import Allocation

WELL_APART: Final = 4.0
"""Seconds between the two checkpoints after which a grant whose container no checkpoint names is over."""


@dataclass(frozen=True, slots=True)
class IdsInUse:
    """Ids in use as of the last observation. freed: those that came free with it.

    pending: ids of grants whose container is not named yet, with when a checkpoint without it was first asked for.
    """

    held: frozenset[Allocation] = frozenset()
    pending: Mapping[str, float | None] = field(default_factory=dict)
    freed: frozenset[str] = frozenset()

    @property
    def ids(self) -> frozenset[str]:
        """All ids that a container holds or may be about to get."""
        return frozenset(one.device_id for one in self.held) | self.pending.keys()

    def granted(self, ids: Collection[str]) -> IdsInUse:
        """Return what is known after an own Allocate granted these ids."""
        return replace(self, pending={**self.pending, **dict.fromkeys(ids)}, freed=frozenset())

    def observed(self, held: Collection[Allocation], at: float, *, awake: bool) -> IdsInUse:
        """Return what is known after a scan. at: when it began (monotonic seconds). awake: as in `HolderSnapshot`."""
        now = frozenset(held)
        named = {one.device_id for one in now - self.held}
        pending = {name: since for name, since in self.pending.items() if name not in named}
        if awake:
            over = {name for name, since in pending.items() if since is not None and at - since >= WELL_APART}
            pending = {name: at if since is None else since for name, since in pending.items() if name not in over}
        after = IdsInUse(now, pending)
        return replace(after, freed=self.ids - after.ids)
