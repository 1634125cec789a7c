"""Decides how long a Prepare waits for devices whose holders are about to end.

After a refused Prepare, the kubelet tries again only when it next synchronises the pod, 60 to 90 s later (kubelet 1.32
to 1.37, pod_workers.go: completeWork; kuberuntime_manager.go: SyncPod returns no error). So if the reason of a refusal
will soon end, Prepare waits for this end, at most until shortly before the deadline of the kubelet's call, 45 s after
its begin (the same versions, cm/dra/plugin). The wait delays no other pod: the kubelet's worker for the pod makes the
call, and holds no lock.

The kubelet does not cancel the call when the pod should end (kubelet.go: SyncPod calls the runtime with
`context.WithoutCancel`): the kubelet ends the pod after the response. So Prepare reads the claim again every few
seconds, and stops waiting once the claim is deleted or no longer reserved for the pod. A claim stays reserved for a pod
that is deleted with a grace period, so such a pod ends only when the wait ends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from deviceplugin.register.register import Register
from dra_bridge.driver.claims import Awaited

MARGIN: Final = 5.0
"""Seconds between the end of the waits and the deadline of the kubelet's call. In this time, the devices are set up."""

REREAD: Final = 5.0
"""Seconds between two reads of a waiting claim from the API server. The claim's pod may have been deleted."""

PACE: Final = 0.1
"""Minimum seconds between two tries to prepare a claim, because each try reads the claim from the API server."""


@dataclass(slots=True, eq=False)
class WaitLimit:
    """The time until which the claims of one call may wait (monotonic seconds).

    The value 0.0 ends all waits of the call.
    """

    until: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time until which the call's claims may wait is over."""
        return time.monotonic() >= self.until


async def wait(register: Register, awaited: Awaited, limit: WaitLimit, seen: int) -> None:
    """Wait for a refused claim's devices, at most `REREAD` seconds and at most until the limit of the call.

    The function returns earlier if the outlook of `awaited` shows that the claim need not wait any more.

    seen: the number of changes of the register (`changes.count`) before the try that was refused.
    """
    changes, began = register.store.changes, time.monotonic()
    with register.waits.waiting(awaited.devices):
        while (rest := min(limit.until, began + REREAD) - time.monotonic()) > 0:
            await changes.after(seen, rest)
            seen = changes.count
            if not awaited.outlook().waits:
                break
        await asyncio.sleep(began + PACE - time.monotonic())
