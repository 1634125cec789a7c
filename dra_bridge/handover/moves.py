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
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.exclusion import Key
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.servicer import Endpoint
from dra_bridge.handover.evidence import kubelet_snapshot, shown_unhealthy
from dra_bridge.handover.planner import Group, followers, held_and_expected, in_state, leading, plan
from dra_bridge.handover.share import Drain, Share
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import Claim, LedgerError, Side, Snapshot, State
from dra_bridge.ledger.rules import ClusterEvidence, KubeletEvidence
from dra_bridge.ledger.worker import AsyncLedger

_LOG: Final = logging.getLogger(__name__)

ReadClaim = Callable[[str, str, str], Awaitable[bool]]
"""Reads a claim, by namespace/name; returns whether its allocation names a device of this node (resource, id)."""


@dataclass(slots=True)
class _ClaimQuery:
    """Which claim's allocation names a device, "" if none is known, and when to ask again (monotonic seconds)."""

    waits: Backoff
    claim: str = ""
    due: float = 0.0


class _ClaimQueries:
    """Asks which claims' allocations name devices of one resource that move to the plugin side, as seldom as it can.

    A device costs one list of the claims once the API server has taken the slice without it (one list for all devices
    that wait then). While a claim's allocation names it, that claim is read after 0.5 s at first and 5 min at most, and
    the claims are listed again when it names it no longer. A list that fails is tried again after 30 s at most.
    """

    def __init__(self, resource: str, read_claim: ReadClaim, waits: Callable[[], Backoff]) -> None:
        self._resource = resource
        self._read_claim = read_claim
        self._waits = waits
        self._queries: dict[tuple[str, int], _ClaimQuery] = {}
        """By device and the sequence of its record: each move asks anew."""

    def of(self, now: Snapshot, devices: Iterable[str], prepared: Mapping[str, Claim]) -> dict[str, _ClaimQuery]:
        """Return what is known of the claims that name these devices. prepared: claims by device."""
        keys = {name: (name, now.device(self._resource, name).sequence) for name in devices}
        self._queries = {key: self._queries.get(key) or _ClaimQuery(self._waits()) for key in keys.values()}
        for name, key in keys.items():
            if (claim := prepared.get(name)) is not None:  # when it is unprepared, it is read first, and soon
                self._queries[key] = _ClaimQuery(self._waits(), claim.title if claim.name else "")
        return {name: self._queries[key] for name, key in keys.items()}

    async def read(self, queries: Mapping[str, _ClaimQuery], devices: Iterable[str]) -> bool:
        """Read the claims that are due; return whether it is time to list the claims.

        It is when no claim is known, or none any more, that names one of the devices that are due.
        """
        now = time.monotonic()
        due = {name: queries[name] for name in devices if queries[name].due <= now}
        for name, query in due.items():
            query.due = now + query.waits.next()  # also if the API server does not answer
            if query.claim and not await self._read_claim(query.claim, self._resource, name):
                query.claim = ""
        if all(query.claim for query in due.values()):
            return False
        unnamed = [queries[name] for name in devices if not queries[name].claim]
        again = min(max(query.due for query in unnamed), now + 30.0)
        for query in unnamed:
            query.due = again
        return True


@dataclass(slots=True)
class MoveStatistics:
    """What a handover has done so far, by direction; counters only grow. Seconds from begin to commit."""

    begun: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    finished: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"to-dra": 0.0, "to-plugin": 0.0})


class Handover:
    """Moves one resource's devices between the sides until their sides are as the share says.

    `_ClaimQueries` says what a device that moves to the plugin side costs the API server. One that moves to DRA costs
    it nothing.

    Args:
        scan: finds out who holds devices (`Agent.scan`); None if an Allocate came in between.
        list_claims: lists all claims, consistently; returns namespace/name by the device of this node that a claim's
            allocation names.
        withdrawn: returns since when (monotonic seconds) the API server has had slices without a device, if it has.
        publish: has the slices written again if they have changed.
        groups: returns the devices that had best move together.
        errors: what `list_claims` and `read_claim` raise when the API server cannot be asked.
        title: a pod's name by its UID, for people.
        waits: makes the delays between two reads of the claim that a device waits for.
        group: returns the devices that a device must move together with.
        moved: called after moves have begun or ended.

    Attributes:
        waiting: what moves wait for, by device.
        draining: devices on the plugin side that are to move once they are idle (drain: wait).

    """

    def __init__(
        self,
        endpoint: Endpoint,
        inventory: Inventory,
        async_ledger: AsyncLedger,
        scan: Callable[[Collection[Key]], Awaitable[HolderSnapshot | None]],
        *,
        list_claims: Callable[[], Awaitable[Mapping[Key, str]]],
        read_claim: ReadClaim,
        withdrawn: Callable[[str, str], float | None],
        publish: Callable[[], None],
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
        self.share = share
        self.waiting: Mapping[str, str] = {}
        self.draining: frozenset[str] = frozenset()
        self._endpoint = endpoint
        self._inventory = inventory
        self._ledger = async_ledger
        self._scan = scan
        self._list_claims = list_claims
        self._withdrawn = withdrawn
        self._publish = publish
        self._drain: Drain = drain
        self._groups = groups
        self._errors: tuple[type[Exception], ...] = (LedgerError, *errors)
        self._title = title
        self._queries = _ClaimQueries(self.resource, read_claim, waits)
        self._group: Group = group or (lambda name: ((self.resource, name),))
        self._moved = moved
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
        moved = await self._commit_to_plugin(waiting)
        moved = await self._commit_to_dra(waiting) or moved
        for name, what in waiting.items():
            if self.waiting.get(name) != what:
                _LOG.debug("%s: the move of %s waits for %s", self.resource, name, what)
        self.waiting = waiting
        return moved, bool(waiting)

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
            self._publish()
        over = [name for name, state in gone.items() if state in (State.PLUGIN, State.QUARANTINED)]
        if over and (forgotten := await self._ledger.do(operations.forget(self.resource, over))):
            _LOG.info("%s: unplugged devices that nobody holds are forgotten: %s", self.resource, ", ".join(forgotten))
            self._publish()

    async def _begin(self) -> None:
        """Begin the moves that the share asks for."""
        now, listed = self._ledger.snapshot, self._inventory.snapshot
        states = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name in listed.devices and name not in listed.gone
        }
        leaders, held, expected = leading(now, self.resource, states, self._group)
        wanted = plan(leaders, held, self.share, self._drain, self._groups(), expected)
        self.draining = frozenset(
            one for name in wanted.draining for of, one in self._group(name) if of == self.resource and one in states
        )
        for devices, side in ((wanted.to_dra, Side.DRA), (wanted.to_plugin, Side.PLUGIN)):
            if devices:
                await self._begin_move(devices, side, f"the share is {self.share}")
        following = followers(self._ledger.snapshot, self.resource, states, self._group)
        for name, side, reason in following:
            await self._begin_move((name,), side, reason)
        if wanted or following:
            self._notify()

    async def _begin_move(self, devices: Sequence[str], side: Side, reason: str) -> None:
        moves = await self._ledger.do(operations.begin_move(self.resource, devices, side, time.time(), reason))
        for state in moves.values():
            if state.value in self.statistics.begun:
                self.statistics.begun[state.value] += 1
        names = ", ".join(f"{name} ({state.text})" for name, state in moves.items())
        _LOG.info("%s: moves to the %s side begin (%s): %s", self.resource, side.value, reason, names)

    async def _commit_to_dra(self, waiting: dict[str, str]) -> bool:
        """Gather what R5 asks for, and commit; return whether a move ended."""
        before, device_id_of = self._ledger.snapshot, self._endpoint.ids.device_id_of
        devices = in_state(before, self.resource, State.TO_DRA)
        if not devices:
            return False
        self._endpoint.refresh()
        sent = self._endpoint.streams.shown()
        shown = shown_unhealthy(devices, sent, device_id_of)
        if not shown:
            missing = "the kubelet to listen" if sent is None else "ListAndWatch to show it Unhealthy"
            waiting.update(dict.fromkeys(devices, missing))
            return False
        ids = {(self.resource, one) for device in shown for one in self._endpoint.ids.ids_of(device)}
        scan = await self._scan(ids)
        if scan is None:
            waiting.update(dict.fromkeys(devices, "a moment without an Allocate in flight"))
            return False
        seen = kubelet_snapshot(before.sequence, scan, self.resource, device_id_of, self._title)
        evidence = KubeletEvidence(before.sequence, shown, seen)
        before = self._ledger.snapshot
        done = await self._ledger.do(operations.commit_to_dra(self.resource, devices, evidence, time.time()))
        waiting.update(done.waiting)
        return self._committed("to-dra", done.devices, before)

    async def _commit_to_plugin(self, waiting: dict[str, str]) -> bool:
        """Gather what R6 asks for, and commit; return whether a move ended."""
        before = self._ledger.snapshot
        devices = in_state(before, self.resource, State.TO_PLUGIN)
        claims = {name: one for one in before.claims.values() for of, name in one.held if of == self.resource}
        queries = self._queries.of(before, devices, claims)
        withdrawn = {}
        for name in devices:
            if name in claims:
                waiting[name] = "its claim"
            elif (at := self._withdrawn(self.resource, name)) is None:
                waiting[name] = "the API server to accept the slice without it"
            else:
                withdrawn[name] = at
        lists = await self._queries.read(queries, withdrawn)
        for name in withdrawn:
            waiting[name] = f"claim {queries[name].claim}" if queries[name].claim else "a list of claims"
        if not lists:
            return False
        at = time.monotonic()
        found = await self._list_claims()
        allocated = {device: claim for (resource, device), claim in found.items() if resource == self.resource}
        for name in withdrawn:
            queries[name].claim = allocated.get(name, "")
        evidence = ClusterEvidence(before.sequence, withdrawn, at, allocated)
        done = await self._ledger.do(operations.commit_to_plugin(self.resource, withdrawn, evidence, time.time()))
        waiting.update(done.waiting)
        return self._committed("to-plugin", done.devices, before)

    def _committed(self, way: str, devices: Sequence[str], before: Snapshot) -> bool:
        """Count and log the moves that ended; return whether any did."""
        if not devices:
            return False
        now = time.time()
        since = [before.device(self.resource, name).since for name in devices]
        self.statistics.seconds[way] += sum(max(0.0, now - one) for one in since)
        self.statistics.finished[way] += len(devices)
        _LOG.info("%s: moves have ended (%s): %s", self.resource, way, ", ".join(devices))
        self._notify()
        return True

    def _notify(self) -> None:
        self._endpoint.refresh()
        self._publish()
        self._moved()
