"""The limits of a run; the run fails if one is missed."""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """A figure and its limit. least: whether the limit is the minimum, not the maximum."""

    what: str
    value: float
    bound: float
    unit: str = ""
    least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.value >= self.bound if self.least else self.value <= self.bound

    @property
    def text(self) -> str:
        """The limit and whether it is kept, for people."""
        return f"{'at least' if self.least else 'at most'} {self.bound:g}{self.unit and f' {self.unit}'}"


REST_REQUESTS = 1.0
"""Requests of an agent in a minute in which nothing changes, without its watches."""
MOVE_REQUESTS = 10.0
"""Requests of an agent when all 8 devices of its node move from the plugin to DRA."""
CLAIM_READS = 1.0
"""Reads of an agent for a claim that is prepared and unprepared: one GET of the claim."""
CLAIM_WRITES = 2.0
"""Writes of an agent for a claim: its Lease names the claim while it is prepared, and then no longer does."""
GROWTH = 1.25
"""Ratio of an agent's requests, received bytes and CPU time in the largest fleet to those in the smallest."""
IN_STEP = 60.0
"""Seconds from the start of the API server's process until all agents have all their watches again."""
SPREAD = 20.0
"""Minimum seconds between the first and the last of the agents' lists after a restart of the API server."""
BUSIEST = 0.15
"""Maximum part of the agents' lists after a restart of the API server that come in one second."""
FIRST_OUTPUT = 2.0
"""Seconds until `status` and `rollout` show something, on a machine that does no other work."""
COMMAND_MB = 150.0
"""Maximum resident MB of `status` and of `rollout`."""
POD_LISTS = 0.5
"""Lists of pods that a rollout makes, for each node."""
NODE_MB = 100.0
"""Resident MB of an agent with 300 devices and 110 pods, 100 of them with claims."""
NODE_GROWTH = 1.1
"""Ratio of an agent's memory and ledger after 10,000 pods to those after the first tenth of the pods."""
NODE_FILES = 2
"""Open files, and threads, that an agent may have more after 10,000 pods than after the first tenth of them."""
