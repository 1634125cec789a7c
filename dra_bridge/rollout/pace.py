"""Limits how fast a rollout begins with nodes whose devices return from DRA to the device plugin.

Before a device returns to the device plugin, its node's agent reads a consistent list of all claims of the cluster. No
other request of an agent grows with the size of the cluster. So a rollout limits how many bytes of claims all agents
together list in a second.
"""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Final

from deviceplugin.register.records import State
from dra_bridge.handover.share import ShareError, parse_requested
from dra_bridge.kube import CLAIMS, RESOURCE_CLAIMS, Cluster, ForbiddenError, GoneError
from dra_bridge.rollout.fleet import Goal, NodeView

BYTES_A_SECOND: Final = 50e6
"""Maximum bytes of claims that all agents together list in a second because of a rollout."""
UNKNOWN: Final = 100e6
"""Bytes that a rollout assumes for a list of all claims if it cannot read such a list."""
BURST: Final = 10.0
"""The rollout may begin at once with as many nodes as the average pace allows in this number of seconds."""


def returns(goal: Goal, view: NodeView) -> bool:
    """Return whether devices of a node may return to the device plugin when the rollout begins with this node."""
    if view.reported is None:
        return True
    try:
        share = parse_requested(goal.wanted(view.before) or "")
    except ShareError:
        # If no annotation requests a share, the share in the agent's config applies, which only the agent knows.
        share = None
    for resource in view.reported.resources.values():
        on_dra = sum(resource.counts.get(state.value, 0) for state in (State.DRA, State.TO_PLUGIN))
        if on_dra > (share.of(sum(resource.counts.values())) if share is not None else 0):
            return True
    return False


async def read_pace(cluster: Cluster) -> Pace:
    """List all claims, and return the pace for a list of this size; for `UNKNOWN` bytes if the list fails.

    Raises ClusterError.
    """
    size = 0
    try:
        async with aclosing(cluster.pages(RESOURCE_CLAIMS, CLAIMS)) as pages:
            async for page in pages:
                size += page.size
    except (ForbiddenError, GoneError):
        return Pace(UNKNOWN)
    return Pace(size)


class Pace:
    """Decides when a rollout may begin with a node whose devices return to the plugin.

    size: bytes of the list of all claims.

    interval: average seconds from the begin with one such node to the begin with the next.
    """

    def __init__(self, size: float) -> None:
        self.interval = size / BYTES_A_SECOND
        self._until = -math.inf
        """The time (monotonic seconds) when the lists of claims for all counted nodes are complete at
        BYTES_A_SECOND."""

    def take(self, now: float) -> bool:
        """Return whether the rollout may begin now with a node whose devices return; if so, count the node.

        now: monotonic seconds.
        """
        until = max(self._until, now - max(BURST, self.interval)) + self.interval
        if until > now:
            return False
        self._until = until
        return True
