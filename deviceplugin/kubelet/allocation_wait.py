"""How long Allocate waits for a former holder of an id: one whose pod the kubelet does not count any more.

The kubelet admits one pod after the other in its main loop, and calls Allocate from there (kubelet 1.36, kubelet.go:
HandlePodAdditions). So a wait holds up the starts of all pods of the node. A refusal fails the pod, and its controller
makes the next one at once, which fails as well, until the holder has ended or the scheduler knows: the kubelet reports
every 10 s by default.

Figures of the real node (kubelet 1.36.3, two cores), a Deployment of one pod which is deleted by force again and again:
without a wait each deletion left 6 to 13 failed pods; with it none. The kubelet ends such a pod within 3 s, also one
that ignores SIGTERM. Other pods of the node started after 1 s, and after up to 3.7 s during a wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

PATIENCE: Final = 4.0
"""Seconds for which Allocates wait for one holder, all of them together."""

LOOK: Final = 0.1
"""Seconds between two looks at the holder's processes."""

EXPECTED: Final = 40.0
"""Seconds for which the next pod is expected after a refusal: until then the end of the holder is noticed soon."""


class EndingHolders:
    """The ids of one resource whose former holders Allocate has waited for."""

    def __init__(self) -> None:
        self.since: Mapping[str, float] = {}
        """When an Allocate found each id held first (monotonic seconds), until one finds it free."""

    def waits(self, held: Collection[str], dropped: Collection[str], names: Collection[str]) -> bool:
        """Return whether to wait: all that is held is about to come free, and was not waited for long enough yet.

        held: those of the requested ids that are held. dropped: ids whose holders the kubelet does not count any more.
        """
        now = time.monotonic()
        waiting = {name: since for name, since in self.since.items() if name in held or name not in names}
        self.since = dict.fromkeys(held, now) | waiting
        return bool(held) and all(name in dropped and now < self.since[name] + PATIENCE for name in held)
