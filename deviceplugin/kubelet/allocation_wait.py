"""Decides how long Allocate waits for a former holder of an id. The kubelet no longer counts the holder's pod.

The kubelet admits pods one after another in its main loop, and calls Allocate from there (kubelet 1.36, kubelet.go:
HandlePodAdditions). So a wait delays the starts of all pods of the node. A refusal fails the pod, and its controller
creates the next one at once. This one fails as well, until the holder has ended or the scheduler knows of it; the
kubelet reports every 10 s by default.

Measured on a real node (kubelet 1.36.3, two cores) with a Deployment of one pod that is deleted by force again and
again: without the wait, each deletion left 6 to 13 failed pods; with the wait, none. The kubelet ends such a pod within
3 s, even if the pod ignores SIGTERM. Other pods of the node started after 1 s, and after up to 3.7 s during a wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Final

PATIENCE: Final = 4.0
"""Seconds for which all Allocates together wait for one holder."""

LOOK: Final = 0.1
"""Seconds between two looks at the holder's processes."""

EXPECTED: Final = 40.0
"""Seconds after a refusal in which the next pod is expected. During that time, the end of the holder is noticed soon.
"""


class EndingHolders:
    """The ids of one resource whose former holders Allocate has waited for."""

    def __init__(self) -> None:
        self.since: Mapping[str, float] = {}
        """When an Allocate first found each id held (monotonic seconds), until an Allocate finds it free."""

    def waits(self, held: Collection[str], dropped: Collection[str], names: Collection[str]) -> bool:
        """Return whether to wait: all held ids will soon be free, and the wait for them was not too long yet.

        held: those of the requested ids that are held. dropped: ids whose holders the kubelet no longer counts.
        """
        now = time.monotonic()
        waiting = {name: since for name, since in self.since.items() if name in held or name not in names}
        self.since = dict.fromkeys(held, now) | waiting
        return bool(held) and all(name in dropped and now < self.since[name] + PATIENCE for name in held)
