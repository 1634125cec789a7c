"""Moves the devices of one resource between the sides of a live node.

Safety is not here: the ledger refuses an Allocate or a Prepare on the wrong side, whatever this module does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.registration import Backoff
from deviceplugin.kubelet.servicer import Endpoint
from dra_bridge import ledger
from dra_bridge.handover.evidence import ToDra, ToPlugin
from dra_bridge.handover.planner import Group, followers, in_hands, led, plan
from dra_bridge.handover.share import Drain, Share
from dra_bridge.ledger import (
    AsyncLedger,
    LedgerError,
    Side,
    Snapshot,
    State,
)

__all__ = ["AllocatedClaims", "Handover", "MoveStatistics", "Slices"]

_LOG: Final = logging.getLogger(__name__)


class Slices(Protocol):
    """What the publisher of slices tells and takes."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when (monotonic seconds) the API server has had slices without the device, if it has."""

    def publish(self) -> None:
        """Look again at what the slices should be."""


class AllocatedClaims(Protocol):
    """What the API server says of claims."""

    async def allocated(self) -> Mapping[tuple[str, str], str]:
        """List all claims, consistently; return namespace/name by the (resource, device) allocated on this node.

        Raises:
            ClusterError: the API server cannot be asked.

        """

    async def allocates(self, claim: str, resource: str, device: str) -> bool:
        """Read one claim, by namespace/name; return whether its allocation names the device of this node.

        Raises:
            ClusterError: the API server cannot be asked.

        """


@dataclass(slots=True)
class _Asked:
    """What the API server said last of a device that waits for claims (R6).

    claim: one whose allocation names it, "" if none is known. due: when to ask again (monotonic seconds).
    """

    waits: Backoff
    claim: str = ""
    due: float = 0.0


@dataclass(slots=True)
class MoveStatistics:
    """What a handover has done so far; counters only grow. Seconds from begin to commit."""

    begun: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    finished: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"to-dra": 0.0, "to-plugin": 0.0})


class Handover:
    """Moves one resource's devices between the sides until their sides are as the share says.

    Args:
        endpoint, inventory: of the resource.
        async_ledger: the ledger.
        scan: asks the witnesses who holds what (`Agent.scan`).
        title: a pod's name by its UID, for people.
        slices, claims: the API server's side of it.
        groups: devices that belong together, as of now.
        errors: what `claims` may raise when the API server cannot be asked.
        waits: makes the waits between two questions about the claim that a device waits for.
        group: returns the devices that a device moves together with.
        moved: called after moves have begun or ended.

    Requests to the API server, whatever the size of the cluster, for each device that moves to the
    plugin's side: one list of the claims once the API server has taken the slice without it (one list
    for all devices that wait then); while a claim's allocation names it, one read of that claim after
    each wait, 0.5 s at first and 5 min at most; and one more list when that claim names it no longer.
    A list that fails is tried again after 30 s at most. Devices on the way to DRA cost none.

    """

    QUICK: Final = 0.02
    SLOW: Final = 2.0

    def __init__(
        self,
        endpoint: Endpoint,
        inventory: Inventory,
        async_ledger: AsyncLedger,
        scan: Callable[[Collection[tuple[str, str]]], Awaitable[HolderSnapshot | None]],
        slices: Slices,
        claims: AllocatedClaims,
        *,
        share: Share,
        drain: Drain = "cordon",
        groups: Callable[[], Sequence[frozenset[str]]] = tuple,
        errors: tuple[type[Exception], ...] = (),
        title: Callable[[str], str] = str,
        waits: Callable[[], Backoff] = lambda: Backoff(first=0.5, most=300.0),
        group: Group | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.resource = endpoint.resource
        self.statistics = MoveStatistics()
        self.waiting: Mapping[str, str] = {}
        self.draining: frozenset[str] = frozenset()
        self._endpoint = endpoint
        self._inventory = inventory
        self._ledger = async_ledger
        self._scan = scan
        self._title = title
        self._slices = slices
        self._claims = claims
        self._share = share
        self._drain: Drain = drain
        self._groups = groups
        self._group: Group = group or (lambda name: ((self.resource, name),))
        self._moved = moved
        self._errors: tuple[type[Exception], ...] = (LedgerError, *errors)
        self._wake = asyncio.Event()
        self._waits = waits
        self._asked: dict[tuple[str, int], _Asked] = {}
        """By device and the sequence of its record: of another move nothing was asked yet."""
        self._told: Mapping[str, str] = {}

    # What the others need to know.

    @property
    def share(self) -> Share:
        """The share that is asked for."""
        return self._share

    def ask(self, share: Share, drain: Drain | None = None) -> None:
        """Ask for another share from now on."""
        if (share, drain or self._drain) != (self._share, self._drain):
            _LOG.info("%s: claims are to have %s of the devices (before: %s)", self.resource, share, self._share)
            self._share, self._drain = share, drain or self._drain
        self.wake()

    def wake(self) -> None:
        """Look again soon: a device came free, the share or the devices changed."""
        self._wake.set()

    def offered(self, device: str) -> bool:
        """Return whether the slices have the device (R4)."""
        return self._ledger.snapshot.device(self.resource, device).state.offered

    # The loop.

    async def run(self) -> None:
        """Move devices until cancelled."""
        backoff = Backoff(first=self.QUICK, most=self.SLOW)
        unsubscribe = self._inventory.subscribe(lambda snapshot: self.wake())
        try:
            while True:
                self._wake.clear()
                try:
                    progress, moving = await self._step()
                except self._errors as error:
                    _LOG.info("%s: the handover waits: %s", self.resource, error)
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
        """Do what can be done now; return whether anything moved, and whether anything is under way."""
        waiting: dict[str, str] = {}
        await self._forget(waiting)
        await self._begin()
        # This side first: it does not need the kubelet, which may take long to answer.
        moved = await self._end_to_plugin(waiting)
        moved = await self._end_to_dra(waiting) or moved
        self._tell(waiting)
        return moved, bool(waiting)

    async def _forget(self, waiting: dict[str, str]) -> None:
        """Forget devices that are unplugged, once nobody holds them and no claim names them.

        One on the DRA side, or on its way, moves to the plugin's side first, which shows that no claim names it (R6).
        """
        now, devices = self._ledger.snapshot, self._inventory.snapshot.devices
        if not self._inventory.snapshot.listed:
            return
        if holds := now.allocations_on(self.resource, now.of(self.resource).keys() - devices.keys()):
            waiting.update({hold.device: "its pod" for hold in holds})
            await self._scan({(self.resource, hold.device_id) for hold in holds})
        now, devices = self._ledger.snapshot, self._inventory.snapshot.devices
        held, _ = in_hands(now, self.resource)
        gone = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name not in devices and name not in held
        }
        if leaving := [name for name, state in gone.items() if state in (State.DRA, State.TO_DRA)]:
            await self._ledger.do(
                ledger.begin_move(self.resource, leaving, Side.PLUGIN, time.time(), "it is unplugged")
            )
            self._slices.publish()
        if over := [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]:
            forgotten = await self._ledger.do(ledger.forget(self.resource, over))
            if forgotten:
                _LOG.info("%s: unplugged and forgotten: %s", self.resource, ", ".join(forgotten))
                self._slices.publish()

    async def _begin(self) -> None:
        """Begin the moves that the share asks for."""
        now = self._ledger.snapshot
        listed = self._inventory.snapshot
        states = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name in listed.devices and name not in listed.gone
        }
        leaders, held, expected = led(now, self.resource, states, self._group)
        wish = plan(leaders, held, self._share, self._drain, self._groups(), expected)
        self.draining = frozenset(
            one for name in wish.draining for of, one in self._group(name) if of == self.resource and one in states
        )
        for devices, side in ((wish.to_dra, Side.DRA), (wish.to_plugin, Side.PLUGIN)):
            if devices:
                await self._send(devices, side, f"the share is {self._share}")
        following = followers(self._ledger.snapshot, self.resource, states, self._group)
        for name, side, reason in following:
            await self._send((name,), side, reason)
        if wish or following:
            self._endpoint.refresh()
            self._slices.publish()
            self._moved()

    async def _send(self, devices: Sequence[str], side: Side, reason: str) -> None:
        moves = await self._ledger.do(ledger.begin_move(self.resource, devices, side, time.time(), reason))
        for state in moves.values():
            if state.value in self.statistics.begun:
                self.statistics.begun[state.value] += 1
        _LOG.info(
            "%s: %s to the %s side",
            self.resource,
            ", ".join(f"{name} ({state.text})" for name, state in moves.items()),
            side.value,
        )

    async def _end_to_dra(self, waiting: dict[str, str]) -> bool:
        """Gather what R5 asks for, and hand it in; return whether anything arrived."""
        device_id_of = self._endpoint.ids.device_id_of
        moving = ToDra.begun(self.resource, self._ledger.snapshot)
        if not moving.devices:
            return False
        self._endpoint.refresh()
        shown = self._endpoint.shown()
        moving = moving.showing(shown, device_id_of)
        if not moving.shown:
            what = "the kubelet to listen" if shown is None else "ListAndWatch to show it Unhealthy"
            waiting.update(dict.fromkeys(moving.devices, what))
            return False
        moving = moving.looking(self._ledger.snapshot.sequence)
        ids = {(self.resource, one) for device in moving.shown for one in self._endpoint.ids.ids_of(device)}
        evidence = moving.scanned(await self._scan(ids), device_id_of, self._title)
        if evidence is None:
            waiting.update(dict.fromkeys(moving.devices, "a moment without an Allocate in flight"))
            return False
        before = self._ledger.snapshot
        done = await self._ledger.do(ledger.commit_to_dra(self.resource, moving.devices, evidence, time.time()))
        waiting.update(done.waiting)
        self._finished("to-dra", done.devices, before)
        return bool(done.devices)

    async def _end_to_plugin(self, waiting: dict[str, str]) -> bool:
        """Gather what R6 asks for, and hand it in; return whether anything arrived."""
        before = self._ledger.snapshot
        moving = ToPlugin.begun(self.resource, before)
        waiting.update(dict.fromkeys(moving.held, "its claim"))
        moving = moving.withdrawing({n: self._slices.withdrawn(self.resource, n) for n in sorted(moving.free)})
        waiting.update(
            dict.fromkeys(moving.free - moving.withdrawn.keys(), "the API server to accept the slice without it")
        )
        asked = self._asked_of(before, moving)
        lists = await self._unnamed(asked, moving.withdrawn)
        waiting.update(
            {n: f"claim {asked[n].claim}" if asked[n].claim else "a list of claims" for n in moving.withdrawn}
        )
        if not lists:
            return False
        at = time.monotonic()
        allocated = await self._allocated()
        for name in moving.withdrawn:
            asked[name].claim = allocated.get(name, "")
        evidence = moving.listed(at, allocated)
        done = await self._ledger.do(
            ledger.commit_to_plugin(self.resource, sorted(moving.withdrawn), evidence, time.time())
        )
        waiting.update(done.waiting)
        self._finished("to-plugin", done.devices, before)
        return bool(done.devices)

    def _asked_of(self, now: Snapshot, moving: ToPlugin) -> dict[str, _Asked]:
        """Return what is known of the claims that name the devices, for this move of theirs."""
        keys = {name: (name, now.device(self.resource, name).sequence) for name in moving.devices}
        self._asked = {key: self._asked.get(key) or _Asked(self._waits()) for key in keys.values()}
        for claim in now.claims_on(self.resource, moving.held):
            for of, name in claim.held:
                if of == self.resource and name in keys:  # when it is unprepared, this claim is read first, and soon
                    self._asked[keys[name]] = _Asked(self._waits(), claim.title if claim.name else "")
        return {name: self._asked[key] for name, key in keys.items()}

    async def _unnamed(self, asked: Mapping[str, _Asked], devices: Iterable[str]) -> bool:
        """Read the claims that it is time to ask about; return whether it is time to list the claims.

        That is so if no claim is known, or none any more, that names one of the devices.
        """
        now = time.monotonic()
        due = [name for name in devices if asked[name].due <= now]
        for name in due:
            one = asked[name]
            one.due = now + one.waits.next()  # also if the API server does not answer
            if one.claim and not await self._claims.allocates(one.claim, self.resource, name):
                one.claim = ""
        unnamed = [asked[name] for name in devices if not asked[name].claim]
        lists = any(not asked[name].claim for name in due)
        if lists:
            again = min(max(one.due for one in unnamed), now + 30.0)
            for one in unnamed:
                one.due = again
        return lists

    async def _allocated(self) -> Mapping[str, str]:
        """List all claims; return namespace/name by this resource's device that its allocation names."""
        allocated = await self._claims.allocated()
        return {device: claim for (resource, device), claim in allocated.items() if resource == self.resource}

    def _finished(self, way: str, devices: Sequence[str], before: ledger.Snapshot) -> None:
        if not devices:
            return
        now = time.time()
        self.statistics.seconds[way] += sum(
            max(0.0, now - before.device(self.resource, name).since) for name in devices
        )
        self.statistics.finished[way] += len(devices)
        _LOG.info("%s: moved %s: %s", self.resource, way, ", ".join(devices))
        self._endpoint.refresh()
        self._slices.publish()
        self._moved()

    def _tell(self, waiting: Mapping[str, str]) -> None:
        for name, what in waiting.items():
            if self._told.get(name) != what:
                _LOG.debug("%s: the move of %s waits for %s", self.resource, name, what)
        self._told = self.waiting = waiting
