"""Moves the devices of one resource between the device plugin and DRA on a live node.

This module cannot cause a double allocation: the register refuses an Allocate of a device on the DRA side, and a
Prepare of a device on the plugin side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.device import counted
from deviceplugin.register.records import LedgerError, RegisterSnapshot, Side, State
from deviceplugin.register.rules import MoveWait
from deviceplugin.register.waits import PROMPT
from deviceplugin.tasks import in_time
from dra_bridge.handover.admission import denied_now
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.handover.ends import MovesToPlugin, end_moves_to_dra, forget_unplugged
from dra_bridge.handover.moved import MovedResource
from dra_bridge.handover.share import Drain, Share
from dra_bridge.handover.start import MoveStarter

_LOG: Final = logging.getLogger(__name__)
_WAYS: Final = (State.TO_DRA.value, State.TO_PLUGIN.value)


@dataclass(slots=True)
class MoveStatistics:
    """Statistics of one resource's moves, one value for each direction. Counters only grow.

    seconds: the total duration of the finished moves, from begin to commit.
    """

    begun: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_WAYS, 0.0))


class Handover:
    """Moves one resource's devices between the device plugin and DRA until DRA has as many as requested (the share).

    allocatable: the writer of the Node's number of allocatable devices; None if only the kubelet writes this number.
    waiting: for each device whose move waits, the reason. denied: UIDs of the pods that a kubelet restart would have
    ended at the last check; "" for a pod whose UID is not known yet.
    """

    def __init__(
        self, moved: MovedResource, share: Share, drain: Drain = "cordon", allocatable: AllocatableStatus | None = None
    ) -> None:
        self.resource = moved.name
        self.waiting: Mapping[str, MoveWait] = {}
        self.denied: tuple[str, ...] = ()
        self._moved = moved
        self._allocatable = allocatable
        self._errors: tuple[type[Exception], ...] = (LedgerError, *moved.evidence.errors)
        self._starter = MoveStarter(moved, share, drain, allocatable)
        self.statistics = MoveStatistics(self._starter.begun)
        self.to_plugin = MovesToPlugin(moved)
        self._wake = asyncio.Event()
        self._looked: tuple[object, object] = (None, None)
        """The register's allocations and claims at the last check for pods that a kubelet restart would end."""

    @property
    def share(self) -> Share:
        """The requested share: how many of the resource's devices should be for claims."""
        return self._starter.share

    @property
    def draining(self) -> frozenset[str]:
        """The devices that will leave the device plugin; see `MoveStarter`."""
        return self._starter.draining

    @property
    def driver(self) -> str:
        """The driver whose claims get the devices that move to DRA."""
        return self._moved.moving.driver

    def takes(self, leaving: Collection[str]) -> Collection[str]:
        """Return the devices to take over from a former driver; see `Successor`."""
        return self._starter.takes(leaving)

    def passed_on(self, devices: Collection[str]) -> None:
        """Continue the moves of devices that a former driver has passed on; see `Successor`."""
        self.statistics.begun[State.TO_DRA.value] += len(devices)
        text, extra = "%s of a former driver move on to driver %s", {"resource": self.resource}
        _LOG.info(text, counted(len(devices)), self.driver, extra=extra)
        self.wake()

    def publish(self) -> None:
        """Write the report again, because the waits of a former driver's devices have changed."""
        self._moved.slices.publish()

    def ask(self, share: Share, drain: Drain | None = None) -> None:
        """Request another share for DRA. drain: see `Drain`; None keeps the present value."""
        self._starter.ask(share, drain)
        self.wake()

    def wake(self) -> None:
        """Make `run` execute the next step of the moves now, instead of after its pause."""
        self._wake.set()

    def look(self) -> None:
        """Find the pods that a kubelet restart would end now.

        Log a warning for each pod that the last check did not find. The agent calls this method after holders may have
        changed.
        """
        now, before = self._moved.register.snapshot, self.denied
        if now.allocations is self._looked[0] and now.claims is self._looked[1]:
            return
        self._looked = now.allocations, now.claims
        self.denied = denied_now(now, self.resource)
        for uid in sorted(set(self.denied).difference(before)):
            title = self._moved.evidence.title(uid) if uid else "(its name is not known yet)"
            text = "a kubelet restart would end pod %s, since DRA serves older pods by limits"
            _LOG.warning(text, title, extra={"resource": self.resource, "pod": title})

    async def run(self) -> None:
        """Begin and complete moves until cancelled."""
        backoff = Backoff(first=0.02, most=2.0)
        unsubscribe = self._moved.inventory.subscribe(lambda snapshot: self.wake())
        try:
            while True:
                self._wake.clear()
                try:
                    progress, moving = await self._step()
                except self._errors as error:
                    _LOG.info(
                        "moves of devices are delayed, trying again: %s", error, extra={"resource": self.resource}
                    )
                    progress, moving = False, True
                if progress:
                    backoff.reset()
                    await asyncio.sleep(0)  # Let other tasks update device lists (`DriverSide.moved`).
                    continue
                if await in_time(self._wake.wait(), self._pause(backoff) if moving else 60.0):
                    backoff.reset()
        finally:
            unsubscribe()

    def _pause(self, backoff: Backoff) -> float:
        """Return the seconds until the next step; at most `PROMPT` while a claim waits for the resource's devices."""
        pause = backoff.next()
        for of, _ in self._moved.register.waits.devices:
            if of == self.resource:
                return min(pause, PROMPT)
        return pause

    async def _step(self) -> tuple[bool, bool]:
        """Execute all steps that are possible now. Return whether to call again at once, and whether moves wait."""
        waiting: dict[str, MoveWait] = {}
        await forget_unplugged(self._moved, waiting)
        limited = self.to_plugin.limited
        if await self._starter.begin(limited=limited):
            self._moved.side.moved(self.resource)
        waiting.update(self._starter.blocked)
        # Moves to the device plugin are completed first, because they do not wait for the kubelet, which may be slow.
        before = self._moved.register.snapshot
        if returned := await self.to_plugin.commit(before, waiting, lambda: self.share.forced, self._starter.kept):
            self._committed(Side.PLUGIN, returned, before)
            if self._allocatable is not None:
                devices = [self._moved.inventory.devices.get(name) for name in returned]
                usable = [device for device in devices if device is not None and device.health.usable]
                offered = {device_id for device in usable for device_id in self._moved.endpoint.ids.names_of(device)}
                self._allocatable.taken_back(self.resource, offered)
        before = self._moved.register.snapshot
        if arrived := await end_moves_to_dra(self._moved, before, waiting):
            self._committed(Side.DRA, arrived, before)
        if waiting != self.waiting:
            self._log_waits(waiting)
            self.waiting = waiting
            self._moved.slices.publish()
            if self._moved.moving.leaving and (successor := self._moved.side.successor(self.resource)) is not None:
                successor.publish()
        return bool(returned or arrived or limited > self.to_plugin.limited), bool(waiting)

    def _log_waits(self, waits: Mapping[str, MoveWait]) -> None:
        """Log new reasons why moves wait: holders at INFO; other reasons at DEBUG, because most of them end soon."""
        for name, what in waits.items():
            if self.waiting.get(name) == what:
                continue
            level = logging.INFO if what.on_holder else logging.DEBUG
            holder = {key: title for key, title in (("pod", what.pod), ("claim", what.claim)) if title}
            extra = {"resource": self.resource, "device": name, **holder}
            _LOG.log(level, "the move of device %s waits for %s", name, what.text, extra=extra)

    def _committed(self, side: Side, devices: Sequence[str], before: RegisterSnapshot) -> None:
        """Count and log the completed moves of these devices. before: the register's records before the commit."""
        now, extra = time.time(), {"resource": self.resource}
        way = (State.TO_DRA if side is Side.DRA else State.TO_PLUGIN).value
        self.statistics.finished[way] += len(devices)
        present = 0  # Unplugged devices are not counted, because their records are deleted soon.
        for name in devices:
            self.statistics.seconds[way] += max(0.0, now - before.device(self.resource, name).since)
            if name in self._moved.inventory.snapshot.devices:
                present += 1
                _LOG.debug("device %s has moved to the %s side", name, side.text, extra={**extra, "device": name})
        if present:
            _LOG.info("%s moved to the %s side", counted(present), side.text, extra=extra)
        self._moved.side.moved(self.resource)
