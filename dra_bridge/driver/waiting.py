"""Decides how long a Prepare waits for devices whose holders are about to end.

After a refused Prepare, the kubelet tries again only when it next synchronises the pod, 60 to 90 s later (kubelet 1.32
to 1.37, pod_workers.go: completeWork; kuberuntime_manager.go: SyncPod returns no error for it). So Prepare waits if the
reason of a refusal will soon pass, until shortly before the deadline of the kubelet's call, which is 45 s (the same
versions, cm/dra/plugin). Only the worker of that pod makes the call, without any lock.

The kubelet does not cancel the call when the pod should end (kubelet.go: SyncPod calls the runtime with
`context.WithoutCancel`): it ends the pod after the answer. So Prepare reads the claim again every few seconds. The wait
is over once the claim is deleted or no longer reserved for the pod. A pod that is deleted with a grace period keeps its
reservation, and ends when the wait ends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from deviceplugin.register.register import Register
from dra_bridge.driver.claims import Awaited

MARGIN: Final = 5.0
"""Seconds between the end of waits and the deadline of the kubelet's call. They are for the rest of the work."""

REREAD: Final = 5.0
"""Seconds after which a waiting claim is read again, because its pod may be deleted."""

PACE: Final = 0.1
"""Minimum seconds between two tries of a claim. Each try reads the claim from the API server."""


@dataclass(slots=True, eq=False)
class WaitLimit:
    """The time until which the claims of one call may wait, in monotonic seconds. It may be set to 0.0 meanwhile."""

    until: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no claim of the call may wait any more."""
        return time.monotonic() >= self.until


async def wait(register: Register, awaited: Awaited, limit: WaitLimit, seen: int) -> None:
    """Wait until a refused claim is worth another try, or until its call may wait no longer.

    seen: number of changes of the register before the refused try.
    """
    changes, began = register.store.changes, time.monotonic()
    with register.waits.waiting(awaited.devices):
        while (rest := min(limit.until, began + REREAD) - time.monotonic()) > 0:
            await changes.after(seen, rest)
            seen = changes.count
            if not awaited.outlook().waits:
                break
        await asyncio.sleep(began + PACE - time.monotonic())
