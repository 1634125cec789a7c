"""Decides how long a Prepare waits for devices whose holders are about to end.

After a refused Prepare, the kubelet tries again only when it next synchronises the pod, 60 to 90 s later (kubelet 1.32
to 1.37, pod_workers.go: completeWork; kuberuntime_manager.go: SyncPod returns no error for it). So Prepare waits if the
reason of a refusal will soon pass, until shortly before the deadline of the kubelet's call, which is 45 s (the same
versions, cm/dra/plugin). The wait delays no other pod: only the worker of the pod makes the call, without any lock.

The kubelet does not cancel the call when the pod should end (kubelet.go: SyncPod calls the runtime with
`context.WithoutCancel`): it ends the pod after the answer. So Prepare reads the claim again every few seconds, and
stops waiting once the claim is deleted or no longer reserved for the pod. A pod that is deleted with a grace period
keeps its reservation, so it ends only when the wait ends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from deviceplugin.register.register import Register
from dra_bridge.driver.claims import Awaited

MARGIN: Final = 5.0
"""Seconds between the last wait and the deadline of the kubelet's call. In this time, the devices are set up."""

REREAD: Final = 5.0
"""Seconds of waiting after which a claim is read again, because its pod may be deleted."""

PACE: Final = 0.1
"""Minimum seconds between two tries to prepare a claim, because each try reads the claim from the API server."""


@dataclass(slots=True, eq=False)
class WaitLimit:
    """Until when the claims of one call may wait, in monotonic seconds. Set to 0.0 to end all waits of the call."""

    until: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the call's claims may not wait any longer."""
        return time.monotonic() >= self.until


async def wait(register: Register, awaited: Awaited, limit: WaitLimit, seen: int) -> None:
    """Wait until a refused claim may be granted its devices, is due to be read again, or may wait no longer.

    seen: the register's number of changes before the refused try.
    """
    changes, began = register.store.changes, time.monotonic()
    with register.waits.waiting(awaited.devices):
        while (rest := min(limit.until, began + REREAD) - time.monotonic()) > 0:
            await changes.after(seen, rest)
            seen = changes.count
            if not awaited.outlook().waits:
                break
        await asyncio.sleep(began + PACE - time.monotonic())
