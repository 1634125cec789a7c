"""Moves the devices of one resource between the sides of a live node.

Safety is not here: the ledger refuses an Allocate or a Prepare on the wrong side, whatever this module does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.servicer import Endpoint
from dra_bridge.handover.allocatable import Announcer
from dra_bridge.handover.planner import Group, Plan, followers, held_and_expected, leading, plan
from dra_bridge.handover.share import Drain, Share
from dra_bridge.handover.to_dra import MovesToDra, Scan
from dra_bridge.handover.to_plugin import ListClaims, MovesToPlugin, ReadClaim, Withdrawn
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import LedgerError, Side, Snapshot, State
from dra_bridge.ledger.worker import AsyncLedger

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class MoveStatistics:
    """What a handover has done so far, by direction; counters only grow. Seconds from begin to commit."""

    begun: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    finished: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"to-dra": 0.0, "to-plugin": 0.0})


class Handover:
    """Moves one resource's devices between the sides until their sides are as the share says.

    Args:
        scan: finds out who holds devices; None if an Allocate came in between.
        list_claims, read_claim, withdrawn: the evidence for moves to the plugin side.
        announcer: makes the number of devices known to the scheduler; None to leave that to the kubelet.
        notify: called after moves have begun or ended: lists and slices may be other ones.
        groups: returns the devices that had best move together.
        errors: what `list_claims` and `read_claim` raise when the API server cannot be asked.
        title: a pod's name by its UID, for people.
        waits: makes the delays between two reads of the claim that a device waits for.
        group: returns the devices that a device must move together with.

    Attributes:
        waiting: what moves wait for, by device.
        draining: devices on the plugin side that are to move once they are idle (drain: wait).

    """

    def __init__(
        self,
        endpoint: Endpoint,
        inventory: Inventory,
        async_ledger: AsyncLedger,
        scan: Scan,
        *,
        list_claims: ListClaims,
        read_claim: ReadClaim,
        withdrawn: Withdrawn,
        notify: Callable[[], None],
        share: Share,
        drain: Drain = "cordon",
        announcer: Announcer | None = None,
        groups: Callable[[], Sequence[frozenset[str]]] = tuple,
        errors: tuple[type[Exception], ...] = (),
        title: Callable[[str], str] = str,
        waits: Callable[[], Backoff] = lambda: Backoff(first=0.5, most=300.0),
        group: Group | None = None,
    ) -> None:
        self.resource = endpoint.resource
        self.statistics = MoveStatistics()
        self.share = share
        self.waiting: Mapping[str, str] = {}
        self.draining: frozenset[str] = frozenset()
        self._endpoint = endpoint
        self._inventory = inventory
        self._ledger = async_ledger
        self._scan = scan
        self._notify = notify
        self._drain: Drain = drain
        self._announcer = announcer
        self._groups = groups
        self._errors: tuple[type[Exception], ...] = (LedgerError, *errors)
        self._group: Group = group or (lambda name: ((self.resource, name),))
        self._to_dra = MovesToDra(endpoint, async_ledger, scan, title)
        self._to_plugin = MovesToPlugin(self.resource, async_ledger, list_claims, read_claim, withdrawn, waits)
        self._wake = asyncio.Event()

    def ask(self, share: Share, drain: Drain | None = None) -> None:
        """Ask for another share from now on."""
        if (share, drain or self._drain) != (self.share, self._drain):
            _LOG.info("%s: claims are to have %s of the devices (before: %s)", self.resource, share, self.share)
            self.share, self._drain = share, drain or self._drain
        self.wake()

    def wake(self) -> None:
        """Have the next step done soon."""
        self._wake.set()

    async def run(self) -> None:
        """Move devices until cancelled."""
        backoff = Backoff(first=0.02, most=2.0)
        unsubscribe = self._inventory.subscribe(lambda snapshot: self.wake())
        try:
            while True:
                self._wake.clear()
                try:
                    progress, moving = await self._step()
                except self._errors as error:
                    _LOG.info("%s: moves of devices are delayed, trying again: %s", self.resource, error)
                    progress, moving = False, True
                if progress:
                    backoff.reset()
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next() if moving else 60.0):
                        await self._wake.wait()
                        backoff.reset()
        finally:
            unsubscribe()

    async def _step(self) -> tuple[bool, bool]:
        """Do what can be done now; return whether a move ended, and whether any is under way."""
        waiting: dict[str, str] = {}
        await self._forget(waiting)
        await self._begin()
        # This side first: it does not need the kubelet, which may take long to answer.
        before = self._ledger.snapshot
        if returned := await self._to_plugin.commit(waiting):
            self._committed("to-plugin", returned, before)
            if self._announcer is not None:
                devices = [self._inventory.snapshot.devices.get(name) for name in returned]
                usable = [device for device in devices if device is not None and device.health.usable]
                offered = {one for device in usable for one in self._endpoint.ids.names_of(device)}
                self._announcer.taken_back(self.resource, offered)
        before = self._ledger.snapshot
        if arrived := await self._to_dra.commit(waiting):
            self._committed("to-dra", arrived, before)
        for name, what in waiting.items():
            if self.waiting.get(name) != what:
                _LOG.debug("%s: the move of %s waits for %s", self.resource, name, what)
        self.waiting = waiting
        return bool(returned or arrived), bool(waiting)

    async def _forget(self, waiting: dict[str, str]) -> None:
        """Forget devices that are unplugged, once nobody holds them and no claim names them.

        One on the DRA side, or on its way, moves to the plugin's side first, which shows that no claim names it (R6).
        """
        if not self._inventory.snapshot.listed:
            return
        now = self._ledger.snapshot
        unplugged = now.of(self.resource).keys() - self._inventory.snapshot.devices.keys()
        if allocations := now.allocations_on(self.resource, unplugged):
            waiting.update({one.device: "its pod" for one in allocations})
            await self._scan({(self.resource, one.device_id) for one in allocations})
        now, devices = self._ledger.snapshot, self._inventory.snapshot.devices
        held, _ = held_and_expected(now)
        gone = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name not in devices and (self.resource, name) not in held
        }
        if leaving := [name for name, state in gone.items() if state in (State.DRA, State.TO_DRA)]:
            back = operations.begin_move(self.resource, leaving, Side.PLUGIN, time.time(), "it is unplugged")
            await self._ledger.do(back)
            self._notify()
        over = [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]
        if over and (forgotten := await self._ledger.do(operations.forget(self.resource, over))):
            _LOG.info("%s: unplugged devices that nobody holds are forgotten: %s", self.resource, ", ".join(forgotten))
            self._notify()

    async def _begin(self) -> None:
        """Begin the moves that the share asks for, once the scheduler knows how many devices stay."""
        wanted = self._planned()
        while await self._announced(wanted.to_dra):
            wanted = self._planned()  # meanwhile pods may have got other devices
        self.draining = self._followed(wanted.draining)
        for devices, side in ((wanted.to_dra, Side.DRA), (wanted.to_plugin, Side.PLUGIN)):
            if devices:
                await self._begin_move(devices, side, f"the share is {self.share}")
        following = self._followers()
        while await self._announced([name for name, side, _ in following if side is Side.DRA]):
            following = self._followers()
        for name, side, reason in following:
            await self._begin_move((name,), side, reason)
        if wanted or following:
            self._notify()

    def _listed(self) -> dict[str, State]:
        """Return the states of the devices that count."""
        listed = self._inventory.snapshot
        return {
            name: record.state
            for name, record in self._ledger.snapshot.of(self.resource).items()
            if name in listed.devices and name not in listed.gone
        }

    def _planned(self) -> Plan:
        leaders, held, expected = leading(self._ledger.snapshot, self.resource, self._listed(), self._group)
        return plan(leaders, held, self.share, self._drain, self._groups(), expected)

    def _followers(self) -> list[tuple[str, Side, str]]:
        return followers(self._ledger.snapshot, self.resource, self._listed(), self._group)

    def _followed(self, leaders: Iterable[str]) -> frozenset[str]:
        """Return these devices and those of this resource that move with them."""
        listed = self._listed()
        return frozenset(
            one for name in leaders for of, one in self._group(name) if of == self.resource and one in listed
        )

    async def _announced(self, leaving: Collection[str]) -> bool:
        """Let the scheduler know how many devices stay on the plugin side; return whether it had to be waited for."""
        if self._announcer is None or not leaving or (healthy := self._endpoint.streams.healthy()) is None:
            return False
        staying = healthy - {one for name in leaving for one in self._endpoint.ids.ids_of(name)}
        if staying == healthy:
            return False
        self.draining |= self._followed(leaving)  # until then new pods had better get others
        return await self._announcer.lower(self.resource, len(staying))

    async def _begin_move(self, devices: Sequence[str], side: Side, reason: str) -> None:
        moves = await self._ledger.do(operations.begin_move(self.resource, devices, side, time.time(), reason))
        for state in moves.values():
            if state.value in self.statistics.begun:
                self.statistics.begun[state.value] += 1
        names = ", ".join(f"{name} ({state.text})" for name, state in moves.items())
        _LOG.info("%s: moves to the %s side begin (%s): %s", self.resource, side.value, reason, names)

    def _committed(self, way: str, devices: Sequence[str], before: Snapshot) -> None:
        """Count and log the moves that ended."""
        now = time.time()
        since = [before.device(self.resource, name).since for name in devices]
        self.statistics.seconds[way] += sum(max(0.0, now - one) for one in since)
        self.statistics.finished[way] += len(devices)
        _LOG.info("%s: moves have ended (%s): %s", self.resource, way, ", ".join(devices))
        self._notify()
