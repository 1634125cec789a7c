"""Which devices move between the doors of a live node, and what each move needs to end.

Two layers: `plan` and its helpers are pure functions over what is known; `Handover` gathers the
evidence that the ledger's rules ask for and hands it in. Safety is not here: it lies in the
ledger, which refuses an Allocate or a Prepare on the wrong side however this room errs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

from deviceplugin import ledger
from deviceplugin.agent import Look
from deviceplugin.endpoint import Endpoint
from deviceplugin.inventory import Inventory
from deviceplugin.ledger import (
    ClusterEvidence,
    Desk,
    KubeletEvidence,
    KubeletSnapshot,
    LedgerError,
    Side,
    Snapshot,
    State,
)
from deviceplugin.podresources import CheckpointError, PodResourcesError
from deviceplugin.registration import Backoff
from deviceplugin.topology import natural
from dra_bridge.keeper import Behind, held_units

__all__ = [
    "Claims",
    "Handover",
    "Plan",
    "Share",
    "ShareError",
    "Slices",
    "Statistics",
    "ToDra",
    "ToPlugin",
    "in_hands",
    "parse_share",
    "plan",
]

_LOG: Final = logging.getLogger(__name__)

Drain = Literal["cordon", "wait"]


# What is asked for.


class ShareError(ValueError):
    """Raised when a share is not one."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a node's devices claims are to have: a count, or a part of all (0 to 1)."""

    count: int | None = None
    part: float = 0.0

    def of(self, total: int) -> int:
        """Return how many of `total` devices that is; parts are rounded to the nearest, halves up."""
        if self.count is not None:
            return min(self.count, total)
        return min(total, math.floor(self.part * total + 0.5))

    def __str__(self) -> str:
        if self.count is not None:
            return str(self.count) if self.count else "none"
        return "all" if self.part == 1 else f"{self.part:.0%}"


def parse_share(text: str | int) -> Share:
    """Read a share: none, all, a count, or a percentage.

    Raises:
        ShareError: it is none of them.

    """
    word = str(text).strip()
    if word == "none":
        return Share(0)
    if word == "all":
        return Share(part=1.0)
    if re.fullmatch(r"[0-9]{1,7}", word):
        return Share(int(word))
    if re.fullmatch(r"100%|[1-9]?[0-9]%", word):
        return Share(part=int(word[:-1]) / 100)
    raise ShareError(f"{word!r} is not a share; write none, all, a number of devices, or a percentage such as 50%")


# Which devices move.


def in_hands(now: Snapshot, resource: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the devices that a pod or a claim holds, and those that move because a claim came for them.

    One that a pod took while it moved is not expected any more: that claim waits for the pod.
    """
    records = now.of(resource)
    given = {hold.device for hold in now.holds_on(resource, records)}
    claimed = {name for claim in now.claims_on(resource, records) for of, name in claim.held if of == resource}
    pulled = {name for name, record in records.items() if record.pulled}
    return frozenset(given | claimed), frozenset(pulled - given)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to begin now; to turn round under way is to begin the other way.

    to_dra, to_plugin: devices whose move begins. steer: devices on the plugin's side that are to
    move once they are idle (drain: wait); new pods had better get others.
    """

    to_dra: tuple[str, ...] = ()
    to_plugin: tuple[str, ...] = ()
    steer: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.to_dra or self.to_plugin)


def plan(
    states: Mapping[str, State],
    held: Collection[str],
    share: Share,
    drain: Drain = "cordon",
    groups: Sequence[frozenset[str]] = (),
    expected: Collection[str] = frozenset(),
) -> Plan:
    """Choose the devices that move so that as many as `share` says are on, or on their way to, DRA.

    states: of every device that counts; quarantined ones are on no side and stay where they are.
    held: devices in the hands of a pod or a claim. groups: devices that belong together (links,
    a switch, a NUMA node), which move whole rather than in fragments. expected: devices on their
    way to DRA because a claim came for them (R2); those are not turned round, or no retry of that
    claim would ever find its device.

    Moves under way are kept where they serve the share: first those that ended on DRA, then those
    still moving. Idle devices move before held ones, and held ones only with `cordon`.
    """
    devices = sorted((name for name, state in states.items() if state is not State.QUARANTINED), key=natural)
    want = share.of(len(devices))
    bound = [name for name in devices if states[name] in (State.DRA, State.TO_DRA)]
    if len(bound) < want:
        rest = [name for name in devices if name not in set(bound)]
        chosen = _choose(rest, want - len(bound), bound, held, groups, turning=State.TO_PLUGIN, states=states)
        if drain == "cordon":
            return Plan(to_dra=chosen)
        now = tuple(name for name in chosen if name not in held or states[name] is State.TO_PLUGIN)
        return Plan(to_dra=now, steer=frozenset(chosen) - frozenset(now))
    if len(bound) > want:
        rest = [name for name in devices if name not in set(bound)]
        free = [name for name in bound if states[name] is not State.TO_DRA or name not in expected]
        count = min(len(bound) - want, len(free))
        back = _choose(free, count, rest, held, groups, turning=State.TO_DRA, states=states)
        if drain == "cordon":
            return Plan(to_plugin=back)
        return Plan(to_plugin=tuple(name for name in back if name not in held or states[name] is State.TO_DRA))
    return Plan()


def _choose(
    candidates: Sequence[str],
    count: int,
    there: Collection[str],
    held: Collection[str],
    groups: Sequence[frozenset[str]],
    *,
    turning: State,
    states: Mapping[str, State],
) -> tuple[str, ...]:
    """Choose `count` candidates to go where `there` are already.

    Devices whose own move is turned round by it go first (they are held by nobody on the other
    side), then whole groups: those begun already, then those that fit, idle ones before held ones.
    """
    at = {name: index for index, name in enumerate(candidates)}
    chosen: list[str] = [name for name in candidates if states[name] is turning][:count]
    groups = [group for group in groups if group & at.keys()] or []
    grouped = frozenset().union(*groups) if groups else frozenset()
    parts = [*groups, *(frozenset({name}) for name in candidates if name not in grouped)]
    while len(chosen) < count:
        missing = count - len(chosen)
        left = [members for group in parts if (members := [n for n in group if n in at and n not in chosen])]

        def price(members: list[str], missing: int = missing) -> tuple[bool, int, bool, int, int]:
            whole = next(group for group in parts if members[0] in group)
            begun = len(whole & set(there)) + len(whole & set(chosen))
            idle = [name for name in members if name not in held]
            return (
                not idle,  # something to be had at once
                -begun if len(whole) > 1 else 0,  # a group that is broken up already
                len(members) > missing,  # a group that would be broken up
                -min(len(idle), missing),  # much of it idle
                min(at[name] for name in members),
            )

        members = min(left, key=price)
        idle_first = sorted(members, key=lambda name: (name in held, at[name]))
        idle = [name for name in idle_first if name not in held]
        others_idle = any(name not in held for group in left if group is not members for name in group)
        take = idle if idle and others_idle else idle_first
        chosen.extend(take[:missing])
    return tuple(chosen)


# What a move needs to end, gathered in the rules' order.


@dataclass(frozen=True, slots=True)
class ToDra:
    """The evidence that R5 asks for, as far as it is gathered.

    The steps, each a method that returns what is known after it: `begun` (the moves under way now
    and where the ledger stands), `showing` (what ListAndWatch sent), `looking` (where the ledger
    stands before the kubelet is asked), `looked` (what it said). The evidence goes to
    `ledger.commit_to_dra`, which checks it against all that was granted meanwhile.
    """

    resource: str
    devices: tuple[str, ...]
    sequence: int
    shown: Mapping[str, float] = field(default_factory=dict)
    began: int = -1

    @classmethod
    def begun(cls, resource: str, now: Snapshot) -> ToDra:
        """Return the gathering for the devices that are moving as of now."""
        devices = (name for name, record in now.of(resource).items() if record.state is State.TO_DRA)
        return cls(resource, tuple(sorted(devices)), now.sequence)

    def showing(self, sent: tuple[float, frozenset[str]] | None, behind: Behind) -> ToDra:
        """Take in what ListAndWatch shows: when it was sent, and the healthy ids in it."""
        if sent is None:
            return replace(self, shown={})
        at, healthy = sent
        shown = set(map(behind, healthy))
        names = (name for name in self.devices if name not in shown)
        return replace(self, shown=dict.fromkeys(names, at))

    def looking(self, sequence: int) -> ToDra:
        """Remember where the ledger stands before the kubelet is asked who holds what."""
        return replace(self, began=sequence)

    def looked(self, seen: Look | None, behind: Behind) -> KubeletEvidence | None:
        """Return the evidence; None if an Allocate came in between."""
        if seen is None or seen.allocatable is None:
            return None
        units = seen.allocatable.get(self.resource, frozenset())
        held = held_units(seen.holdings.of(self.resource), behind)
        return KubeletEvidence(
            sequence=self.sequence,
            shown=self.shown,
            allocatable_at=seen.allocatable_at,
            allocatable=frozenset(map(behind, units)),
            snapshot=KubeletSnapshot(self.began, seen.at, quiet=True, held=held),
        )


@dataclass(frozen=True, slots=True)
class ToPlugin:
    """The evidence that R6 asks for, as far as it is gathered.

    The steps: `begun` (the moves under way now; claims that are prepared hold some), `expecting`
    (the devices that no claim names any more: these leave the slices, R4), `withdrawing` (which of
    them the API server has no more), `listed` (a list of claims begun after that).
    """

    resource: str
    devices: tuple[str, ...]
    held: frozenset[str]
    sequence: int
    withdrawn: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def begun(cls, resource: str, now: Snapshot) -> ToPlugin:
        """Return the gathering for the devices that are moving as of now."""
        devices = tuple(sorted(name for name, record in now.of(resource).items() if record.state is State.TO_PLUGIN))
        claimed = {name for claim in now.claims_on(resource, devices) for of, name in claim.held if of == resource}
        return cls(resource, devices, frozenset(claimed) & frozenset(devices), now.sequence)

    @property
    def free(self) -> frozenset[str]:
        """The devices that no prepared claim holds."""
        return frozenset(self.devices) - self.held

    def expecting(self, allocated: Mapping[str, str]) -> frozenset[str]:
        """Return the devices that no claim can be expected for: neither prepared nor allocated ones (R4)."""
        return self.free - allocated.keys()

    def withdrawing(self, accepted: Mapping[str, float | None]) -> ToPlugin:
        """Take in since when the API server has had slices without a device; None where it has one with it."""
        return replace(self, withdrawn={name: at for name, at in accepted.items() if at is not None})

    def listed(self, at: float, allocated: Mapping[str, str]) -> ClusterEvidence:
        """Return the evidence with a list of claims that was begun at `at`."""
        return ClusterEvidence(self.sequence, self.withdrawn, at, allocated)


# Making it so.


class Slices(Protocol):
    """What the publisher of slices tells and takes."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when (monotonic seconds) the API server has had slices without the device, if it has."""

    def publish(self) -> None:
        """Look again at what the slices should be."""


class Claims(Protocol):
    """What the API server says of claims."""

    async def allocated(self) -> Mapping[tuple[str, str], str]:
        """List all claims, consistently; return namespace/name by the (resource, device) allocated on this node.

        Raises:
            ClusterError: the API server cannot be asked.

        """


@dataclass(slots=True)
class Statistics:
    """What a handover has done so far; counters only grow. Seconds from begin to commit."""

    begun: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    finished: dict[str, int] = field(default_factory=lambda: {"to-dra": 0, "to-plugin": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"to-dra": 0.0, "to-plugin": 0.0})


class Handover:
    """Moves one resource's devices between the doors until their sides are as the share says.

    Args:
        endpoint, inventory: of the resource.
        desk: the ledger's face.
        look: a look at the kubelet's books, with what it would give out (`Agent.look`).
        slices, claims: the API server's side of it.
        groups: devices that belong together, as of now.
        errors: what `claims` may raise when the API server cannot be asked.

    """

    QUICK: Final = 0.02
    SLOW: Final = 2.0

    def __init__(
        self,
        endpoint: Endpoint,
        inventory: Inventory,
        desk: Desk,
        look: Callable[[], Awaitable[Look | None]],
        slices: Slices,
        claims: Claims,
        *,
        share: Share,
        drain: Drain = "cordon",
        groups: Callable[[], Sequence[frozenset[str]]] = tuple,
        errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self.resource = endpoint.resource
        self.statistics = Statistics()
        self.waiting: Mapping[str, str] = {}
        self.steer: frozenset[str] = frozenset()
        self._endpoint = endpoint
        self._inventory = inventory
        self._desk = desk
        self._look = look
        self._slices = slices
        self._claims = claims
        self._share = share
        self._drain: Drain = drain
        self._groups = groups
        self._errors: tuple[type[Exception], ...] = (LedgerError, PodResourcesError, CheckpointError, *errors)
        self._wake = asyncio.Event()
        self._withdraw: frozenset[str] = frozenset()
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
        """Return whether the slices have the device at all (R4)."""
        state = self._desk.snapshot.device(self.resource, device).state
        return state is State.DRA or (state is State.TO_PLUGIN and device not in self._withdraw)

    def leaving(self, device: str) -> bool:
        """Return whether the slices have the device with a taint, since it is to leave (R4)."""
        return self._desk.snapshot.device(self.resource, device).state is State.TO_PLUGIN

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
        await self._begin()
        waiting: dict[str, str] = {}
        moved = await self._end_to_dra(waiting)
        moved = await self._end_to_plugin(waiting) or moved
        self._tell(waiting)
        return moved, bool(waiting)

    async def _begin(self) -> None:
        """Begin the moves that the share asks for."""
        now = self._desk.snapshot
        listed = self._inventory.snapshot
        states = {
            name: record.state
            for name, record in now.of(self.resource).items()
            if name in listed.devices and name not in listed.gone
        }
        held, expected = in_hands(now, self.resource)
        wish = plan(states, held, self._share, self._drain, self._groups(), expected)
        self.steer = wish.steer
        for devices, side in ((wish.to_dra, Side.DRA), (wish.to_plugin, Side.PLUGIN)):
            if devices:
                reason = f"the share is {self._share}"
                moves = await self._desk.do(ledger.begin_move(self.resource, devices, side, time.time(), reason))
                for state in moves.values():
                    if state.value in self.statistics.begun:
                        self.statistics.begun[state.value] += 1
                _LOG.info(
                    "%s: %s to the %s side",
                    self.resource,
                    ", ".join(f"{name} ({state.text})" for name, state in moves.items()),
                    side.value,
                )
        if wish:
            self._endpoint.refresh()
            self._slices.publish()

    async def _end_to_dra(self, waiting: dict[str, str]) -> bool:
        """Gather what R5 asks for, and hand it in; return whether anything arrived."""
        behind = self._endpoint.behind
        moving = ToDra.begun(self.resource, self._desk.snapshot)
        if not moving.devices:
            return False
        self._endpoint.refresh()
        shown = self._endpoint.shown()
        moving = moving.showing(shown, behind)
        if not moving.shown:
            what = "the kubelet to listen" if shown is None else "ListAndWatch to show it Unhealthy"
            waiting.update(dict.fromkeys(moving.devices, what))
            return False
        moving = moving.looking(self._desk.snapshot.sequence)
        evidence = moving.looked(await self._look(), behind)
        if evidence is None:
            waiting.update(dict.fromkeys(moving.devices, "a moment without an Allocate in flight"))
            return False
        before = self._desk.snapshot
        done = await self._desk.do(ledger.commit_to_dra(self.resource, moving.devices, evidence, time.time()))
        waiting.update(done.waiting)
        self._finished("to-dra", done.devices, before)
        return bool(done.devices)

    async def _end_to_plugin(self, waiting: dict[str, str]) -> bool:
        """Withdraw devices that no claim names, gather what R6 asks for, and hand it in."""
        moving = ToPlugin.begun(self.resource, self._desk.snapshot)
        self._withdraw &= moving.free
        waiting.update(dict.fromkeys(moving.held, "its claim"))
        if not moving.free:
            return False
        if staying := moving.free - self._withdraw:
            # R4: with its taint it stays in the slice until no claim can be expected.
            allocated = await self._allocated()
            waiting.update({name: f"claim {allocated[name]}" for name in staying & allocated.keys()})
            leaving = moving.expecting(allocated)
            if leaving - self._withdraw:
                self._withdraw |= leaving
                self._slices.publish()
        moving = moving.withdrawing({n: self._slices.withdrawn(self.resource, n) for n in sorted(self._withdraw)})
        waiting.update(
            dict.fromkeys(self._withdraw - moving.withdrawn.keys(), "the API server to accept the slice without it")
        )
        if not moving.withdrawn:
            return False
        listed_at = time.monotonic()
        evidence = moving.listed(listed_at, await self._allocated())
        before = self._desk.snapshot
        done = await self._desk.do(
            ledger.commit_to_plugin(self.resource, sorted(moving.withdrawn), evidence, time.time())
        )
        waiting.update(done.waiting)
        self._finished("to-plugin", done.devices, before)
        return bool(done.devices)

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
        self._withdraw -= frozenset(devices)
        self.statistics.finished[way] += len(devices)
        _LOG.info("%s: moved %s: %s", self.resource, way, ", ".join(devices))
        self._endpoint.refresh()
        self._slices.publish()

    def _tell(self, waiting: Mapping[str, str]) -> None:
        for name, what in waiting.items():
            if self._told.get(name) != what:
                _LOG.debug("%s: the move of %s waits for %s", self.resource, name, what)
        self._told = self.waiting = waiting
