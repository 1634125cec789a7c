"""Writes how many devices the scheduler may count on this node: `status.allocatable` of the Node object.

The kubelet writes this number every 10 s by default, and only if something changed (tryUpdateNodeStatus, kubelet 1.36,
kubelet_node_status.go). Until this write, the scheduler still counts devices that have left the device plugin, and pods
fail (UnexpectedAdmissionError). The scheduler also does not yet count devices that have returned to the device plugin.
So the agent also writes `status.allocatable`. The agent lowers the number before devices leave the device plugin, and
raises the number once the kubelet counts the returned devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.podresources import PodResources
from deviceplugin.register.store import Changes
from deviceplugin.tasks import cancel_all

_LOG: Final = logging.getLogger(__name__)

GRACE: Final = 1.0
"""Seconds from the write of the lower number into `status.allocatable` until the devices leave the device plugin.

In these seconds the kubelet admits pods that the scheduler has already bound to the node. On an idle node, the
admission takes some ten milliseconds.
"""
LOWER_DEADLINE: Final = 3.0
"""Maximum seconds to lower the number in `status.allocatable`. Afterwards devices leave the device plugin even if the
kubelet keeps writing a larger number.
"""
LATE: Final = 2.0
"""Seconds for which the agent, after it has lowered the number, overwrites a larger number that the kubelet writes.

The kubelet may have computed the larger number just before the devices left the device plugin, and would correct this
number only 10 s later.
"""
TAKEN: Final = 5.0
"""Maximum seconds to wait until the kubelet counts devices that have returned to the device plugin. Afterwards only the
kubelet raises the number in `status.allocatable`."""


class AllocatableStatus:
    """Reads (from a watch) and writes the numbers in this Node's `status.allocatable`.

    write: a function that writes a resource's number there, and returns False if the write is impossible or forbidden
    (`dra_bridge.node.node_object.NodeStatusWriter.write`).

    Before devices leave the device plugin, the agent writes the lower number. If the kubelet then writes a larger
    number, the agent writes the lower number again (`LOWER_DEADLINE`, `LATE`). While devices return to the device
    plugin, the agent writes larger numbers, at first at most once in 0.5 s, later at most once in 10 s.
    """

    def __init__(
        self,
        write: Callable[[str, int], Awaitable[bool]],
        pod_resources: PodResources,
        *,
        grace: float = GRACE,
        pauses: Callable[[], Backoff] = lambda: Backoff(first=0.5, most=10.0),
    ) -> None:
        self._write = write
        self._pod_resources = pod_resources
        self._grace = grace
        self._pauses = pauses
        self._numbers: Mapping[str, int] = {}
        self._since: dict[str, float] = {}
        """For each resource, when the watch first showed the present number (monotonic seconds)."""
        self._changes = Changes()
        """Wakes tasks that wait for a change of the numbers in the Node's status."""
        self._writing = asyncio.Lock()
        self._most: dict[str, int] = {}
        """For each resource, the largest number that the agent may write: the last lowered number plus the devices that
        have returned since then."""
        self._returning: dict[str, set[str]] = {}
        self._raising: dict[str, asyncio.Task[None]] = {}
        self._lowering: dict[str, asyncio.Task[None]] = {}

    def observe(self, numbers: Mapping[str, int]) -> None:
        """Store each resource's number in the Node's `status.allocatable`, and when this number last changed."""
        now = time.monotonic()
        self._since = {
            name: self._since[name] if self._numbers.get(name) == number else now for name, number in numbers.items()
        }
        self._numbers = dict(numbers)
        self._changes.note()

    async def lower(self, resource: str, number: int) -> bool:
        """Lower a resource's number in the Node; wait at most 3 s until no new pod can get devices beyond this number.

        Returns True if the method had to wait: the scheduler then counts at most this number, and the kubelet has
        admitted the pods that were bound before. Returns False if no wait was needed, if the number cannot be written,
        or if `LOWER_DEADLINE` was exceeded.
        """
        if (lowering := self._lowering.pop(resource, None)) is not None:
            lowering.cancel()
        async with self._writing:  # Another task may be writing a larger number, so this task waits for the lock.
            self._most[resource] = number
        waited = lowered = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOWER_DEADLINE):
                began = time.monotonic()
                while (rest := self._until_lowered(resource, number, began)) > 0:
                    seen = self._changes.count
                    if rest == math.inf and not await self._put(resource, number):
                        return False
                    waited = True
                    await self._changes.after(seen, min(rest, self._grace))
                lowered = True
        self._lowering[resource] = asyncio.create_task(self._keep_low(resource), name=f"allocatable of {resource}")
        if not lowered:
            text = "the Node shows more than %d allocatable devices; the agent withdraws devices nevertheless"
            _LOG.info(text, number, extra={"resource": resource})
        return waited and lowered

    async def _keep_low(self, resource: str) -> None:
        """Overwrite, for `LATE` seconds, larger numbers that the kubelet computed before devices left the plugin."""
        until = time.monotonic() + LATE
        while (rest := until - time.monotonic()) > 0:
            seen, number = self._changes.count, self._most[resource]
            if self._numbers.get(resource, 0) > number:
                await self._put(resource, number)
            await self._changes.after(seen, rest)

    async def _put(self, resource: str, number: int) -> bool:
        """Write the smaller of `number` and the number in `_most` into the Node. Return whether the write succeeded."""
        async with self._writing:
            number = min(number, self._most.get(resource, number))
            if not await self._write(resource, number):
                return False
            self.observe({**self._numbers, resource: number})
            return True

    def _until_lowered(self, resource: str, number: int, began: float) -> float:
        """Return for how many seconds the kubelet may still admit pods that need the larger number.

        The result is infinite while the Node shows a larger number, and 0 or less once no such pod can arrive.

        began: when the lowering began (monotonic seconds). If the kubelet writes its own number every second, the lower
        number never stays for `GRACE` seconds. So after `2 * GRACE` seconds since `began`, half of `GRACE` is enough.
        """
        shown = self._numbers.get(resource)
        if shown is None:
            return 0.0  # The Node has no such number, so the scheduler places no pods with this resource here.
        if shown > number:
            return math.inf
        now = time.monotonic()
        grace = self._grace if now < began + 2 * self._grace else self._grace / 2
        return self._since[resource] + grace - now

    def taken_back(self, resource: str, device_ids: Collection[str]) -> None:
        """Begin to raise the resource's number, because these ids have returned from DRA to the device plugin."""
        if resource in self._most:
            self._most[resource] += len(device_ids)
        self._returning.setdefault(resource, set()).update(device_ids)
        if resource not in self._raising:
            self._raising[resource] = asyncio.create_task(self._raise(resource), name=f"allocatable of {resource}")

    async def _raise(self, resource: str) -> None:
        try:
            pauses = self._pauses()
            while returning := self._returning.pop(resource, None):
                number = await self._counted(resource, returning)
                if self._numbers.get(resource, 0) < number and not await self._put(resource, number):
                    return
                await asyncio.sleep(pauses.next())
        finally:
            del self._raising[resource]

    async def _counted(self, resource: str, device_ids: Collection[str]) -> int:
        """Wait until the kubelet counts these ids as healthy, at most `TAKEN` seconds.

        Return the number of all ids of the resource that the kubelet counts as healthy, or 0 if the wait takes longer
        than `TAKEN` seconds.
        """
        backoff = Backoff(first=0.02, most=0.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN):
                while True:
                    if (healthy := await self._pod_resources.allocatable(resource)).issuperset(device_ids):
                        return len(healthy)
                    await asyncio.sleep(backoff.next())
        return 0

    async def close(self) -> None:
        """Cancel the tasks that write numbers."""
        await cancel_all([*self._raising.values(), *self._lowering.values()])
