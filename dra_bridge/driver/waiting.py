"""How long a Prepare waits for devices whose holders are about to end.

After a Prepare that is refused the kubelet tries again only when it synchronises the pod the next time, 60 to 90 s
later (kubelet 1.32 to 1.37, pod_workers.go: completeWork; kuberuntime_manager.go: SyncPod returns no error for it). So
a refusal that will soon be over is waited for, until shortly before the deadline of the kubelet's call, which is 45 s
(the same versions, cm/dra/plugin). The call is made by the worker of that pod alone, without any lock.

The kubelet does not cancel the call when it is to end the pod (kubelet.go: SyncPod calls the runtime with
`context.WithoutCancel`): it ends the pod after our answer. So the claim is read again every few seconds: once it is
gone, or is not reserved for the pod any more, the wait is over. A pod that is deleted with a grace period keeps its
reservation, and ends when the wait does.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from deviceplugin.register.register import Register
from dra_bridge.driver.claims import Awaited

MARGIN: Final = 5.0
"""Seconds before the deadline of the kubelet's call when waits end: for the rest of the work and the answer."""

REREAD: Final = 5.0
"""Seconds after which a claim that waits is read again: its pod may be gone."""

PACE: Final = 0.1
"""Seconds between two tries of a claim, at the least: each reads the claim from the API server."""


@dataclass(slots=True, eq=False)
class WaitLimit:
    """Until when the claims of one call may wait, in monotonic seconds; it may be set to 0.0 meanwhile."""

    until: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no claim of the call may wait any more."""
        return time.monotonic() >= self.until


async def wait(register: Register, awaited: Awaited, limit: WaitLimit, seen: int) -> None:
    """Wait until a refused claim is worth another try, or until the waits of its call are over.

    seen: how many changes the register had before the try that was refused.
    """
    changes, began = register.store.changes, time.monotonic()
    with register.waits.waiting(awaited.devices):
        while (rest := min(limit.until, began + REREAD) - time.monotonic()) > 0:
            await changes.after(seen, rest)
            seen = changes.count
            if not awaited.outlook().waits:
                break
        await asyncio.sleep(began + PACE - time.monotonic())
