"""Decides how long Allocate waits if a pod that the kubelet counts as ended still holds a requested device id.

The kubelet admits pods one after another in its main loop, and calls Allocate from there (kubelet 1.36, kubelet.go:
HandlePodAdditions). So a wait in Allocate delays the starts of all pods of the node. If the agent refuses an Allocate,
the kubelet fails the pod, and the pod's controller creates the next pod at once. The next pods fail as well, until the
holder has ended, or the scheduler knows from the node's status (reported every 10 s by default) that the device is
unhealthy.

On a real node (kubelet 1.36.3, two cores), the only pod of a Deployment was deleted by force repeatedly. Without the
wait, each deletion left 6 to 13 failed pods; with the wait, none. The kubelet ends a pod that was deleted by force
within 3 s, even if the pod ignores SIGTERM. Other pods of the node started after 1 s without a wait, and after up to
3.7 s during a wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

PATIENCE: Final = 4.0
"""Maximum seconds, in all Allocates together, to wait for the end of an id's former holder. After that, Allocate
refuses the id."""

LOOK: Final = 0.1
"""Seconds between two checks, during a wait, of whether the holder's processes still run."""

EXPECTED: Final = 40.0
"""After a refused Allocate, the agent checks the holder's state often for this number of seconds, because the pod's
controller creates the next pod at once."""


class EndingHolders:
    """Records, for each device id of a resource, when Allocates began to wait for the end of the id's former holder."""

    def __init__(self) -> None:
        self.since: Mapping[str, float] = {}
        """For each device id, the time (monotonic seconds) at which an Allocate first found a former holder of the id.
        An Allocate that finds no holder removes the entry."""

    def waits(self, held: Collection[str], dropped: Collection[str], names: Collection[str]) -> bool:
        """Return whether Allocate waits: the kubelet counts all the holders as ended, and no wait has reached PATIENCE.

        held: the requested ids that have a holder. dropped: the ids whose holders the kubelet counts as ended. names:
        all requested ids.
        """
        now = time.monotonic()
        waiting = {name: since for name, since in self.since.items() if name in held or name not in names}
        self.since = dict.fromkeys(held, now) | waiting
        return bool(held) and all(name in dropped and now < self.since[name] + PATIENCE for name in held)
