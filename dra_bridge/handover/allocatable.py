"""How many devices of each resource the scheduler counts on this node: `status.allocatable` of its Node.

The kubelet writes its own number every 10 s by default, and only if something changed (tryUpdateNodeStatus, kubelet
1.36, kubelet_node_status.go). Until then the scheduler sends pods to devices that were withdrawn, which fail
(UnexpectedAdmissionError), and none to devices that came back. So the agent writes the number itself: before it
withdraws devices, and once the kubelet has them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Protocol

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.podresources import PodResources
from deviceplugin.register.store import Changes
from deviceplugin.tasks import cancel_all

_LOG: Final = logging.getLogger(__name__)

GRACE: Final = 1.0
"""Seconds from the moment that the Node shows the lower number until devices are withdrawn.

The scheduler binds pods that it chose before, and the kubelet admits them: some ten milliseconds on an idle node.
"""
LOWER_DEADLINE: Final = 3.0
"""Seconds after which devices are withdrawn although the kubelet writes its own number back again and again."""
LATE: Final = 2.0
"""Seconds after a number was lowered in which a larger one is the kubelet's from before, and is written over.

The kubelet may have made it up just before devices were withdrawn; its next report is one of its periods later.
"""
TAKEN: Final = 5.0
"""Seconds in which the kubelet counts devices that are offered again; after that the number is left to it."""


class StatusWriter(Protocol):
    """Writes the Node's status (`dra_bridge.node.node_object.NodeStatusWriter`)."""

    async def write(self, resource: str, number: int) -> bool:
        """Write a resource's number; return False if that is not possible now, or not allowed."""


class AllocatableStatus:
    """The numbers of this node's Node, as its watch shows them, and how they are written.

    A change of share costs one write before devices leave the plugin side, up to five if the kubelet writes its own
    number meanwhile. While devices come back there is at most one write in 0.5 s at first and in 10 s later.
    """

    def __init__(
        self,
        status: StatusWriter,
        pod_resources: PodResources,
        *,
        grace: float = GRACE,
        pauses: Callable[[], Backoff] = lambda: Backoff(first=0.5, most=10.0),
    ) -> None:
        self._status = status
        self._pod_resources = pod_resources
        self._grace = grace
        self._pauses = pauses
        self._numbers: Mapping[str, int] = {}
        self._since: dict[str, float] = {}
        """When the watch showed each resource's number for the first time (monotonic seconds)."""
        self._changes = Changes()
        """Of the numbers."""
        self._writing = asyncio.Lock()
        self._most: dict[str, int] = {}
        """The largest number that may be written: the last lower one, and what came back since."""
        self._returning: dict[str, set[str]] = {}
        self._raising: dict[str, asyncio.Task[None]] = {}
        self._lowering: dict[str, asyncio.Task[None]] = {}

    def observe(self, numbers: Mapping[str, int]) -> None:
        """Take what the Node shows now."""
        now = time.monotonic()
        self._since = {
            name: self._since[name] if self._numbers.get(name) == number else now for name, number in numbers.items()
        }
        self._numbers = dict(numbers)
        self._changes.note()

    async def lower(self, resource: str, number: int) -> bool:
        """Wait until no pod comes any more for devices beyond this number, 3 s at most.

        The scheduler counts at most so many then, and pods that it had bound before had time to be admitted. Returns
        whether it was waited for; False also if the number cannot be written.
        """
        if (lowering := self._lowering.pop(resource, None)) is not None:
            lowering.cancel()
        async with self._writing:  # a larger number may be on its way
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
            text = "the Node shows more than %d allocatable; devices are withdrawn all the same"
            _LOG.info(text, number, extra={"resource": resource})
        return waited and lowered

    async def _keep_low(self, resource: str) -> None:
        """Write over larger numbers of the kubelet's that are from before devices were withdrawn."""
        until = time.monotonic() + LATE
        while (rest := until - time.monotonic()) > 0:
            seen, number = self._changes.count, self._most[resource]
            if self._numbers.get(resource, 0) > number:
                await self._put(resource, number)
            await self._changes.after(seen, rest)

    async def _put(self, resource: str, number: int) -> bool:
        """Write a number, no larger one than the last that was lowered allows; return whether the Node has it."""
        async with self._writing:
            number = min(number, self._most.get(resource, number))
            if not await self._status.write(resource, number):
                return False
            self.observe({**self._numbers, resource: number})
            return True

    def _until_lowered(self, resource: str, number: int, began: float) -> float:
        """Return for how many seconds pods may still come for more devices; infinite while the Node shows more.

        A kubelet that reports every second leaves no whole second without its own number: then half of it must do.
        """
        shown = self._numbers.get(resource)
        if shown is None:
            return 0.0  # the scheduler sends nothing here
        if shown > number:
            return math.inf
        now = time.monotonic()
        grace = self._grace if now < began + 2 * self._grace else self._grace / 2
        return self._since[resource] + grace - now

    def taken_back(self, resource: str, device_ids: Collection[str]) -> None:
        """Raise the number soon: these ids are offered to pods again."""
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
        """Return how many devices the kubelet counts as healthy once these are among them; 0 if it does not in time."""
        backoff = Backoff(first=0.02, most=0.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN):
                while True:
                    if (healthy := await self._pod_resources.allocatable(resource)).issuperset(device_ids):
                        return len(healthy)
                    await asyncio.sleep(backoff.next())
        return 0

    async def close(self) -> None:
        """End what is under way."""
        await cancel_all([*self._raising.values(), *self._lowering.values()])
