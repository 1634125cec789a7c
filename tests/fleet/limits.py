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
"""Of an agent at rest in a minute, beside its watches."""
MOVE_REQUESTS = 10.0
"""Of an agent for all 8 devices of its node that move."""
CLAIM_READS = 1.0
"""Of an agent for a claim that is prepared and unprepared: the GET of it."""
CLAIM_WRITES = 2.0
"""Of an agent for such a claim: its Lease names the claim, and then no more."""
GROWTH = 1.25
"""How many times as much an agent may ask, be sent and use in the largest fleet as in the smallest."""
IN_STEP = 60.0
"""Seconds after which all agents have all their watches again, from the start of the API server's process."""
SPREAD = 20.0
"""Seconds between the first and the last list after a restart."""
BUSIEST = 0.15
"""Part of these lists that may be made in one second."""
FIRST_OUTPUT = 2.0
"""Seconds until `status` and `rollout` show something, on a machine that does no other work."""
COMMAND_MB = 150.0
"""Resident MB of these commands at the most."""
POD_LISTS = 0.5
"""Lists of pods that a rollout makes, for each node."""
NODE_MB = 100.0
"""Resident MB of an agent with 300 devices and 110 pods, 100 of them with claims."""
NODE_GROWTH = 1.1
"""How many times as much memory and ledger an agent may have after 10,000 pods as after the first tenth of them."""
NODE_FILES = 2
"""Open files and threads that it may have more."""
