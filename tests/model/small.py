"""A node with two devices, two pods and two claims, small enough to see all that can happen to it.

A world is a tuple of small numbers; `successors` are all worlds that one step leads to: of the
kubelet, the scheduler, the API server, the agent, or of fate. Whatever can be late is a step of
its own, so that everything else may come in between. What the agent does is the real thing: the
ledger's operations, the handover's gathering of evidence and its plan; only their disk and their
sockets are missing.

What the model takes for granted, and nothing else: the kubelet writes down an answered Allocate
within the time that R7 waits (`tick`), or dies; a device that it has given out or is about to
give out it gives to nobody else; the scheduler gives a device to one claim at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from deviceplugin import ledger
from deviceplugin.agent import Look
from deviceplugin.ledger import (
    Claim,
    ClaimDevice,
    ClaimEvidence,
    DeviceRecord,
    Evidence,
    Held,
    Hold,
    KubeletSnapshot,
    Operation,
    Refused,
    Rules,
    Side,
    Snapshot,
    State,
)
from deviceplugin.podresources import Holder, Holdings
from dra_bridge.handover import Share, ToDra, ToPlugin, in_hands, plan
from dra_bridge.keeper import held_units

R: Final = "example.com/fpga"
D: Final = "fpga.example.com"
TWO: Final = (0, 1)
NAMES: Final = ("0", "1")
STATES: Final = tuple(State)
ALL: Final = Rules()
RECENT, OLD = 1000.0, 0.0
BEGUN, ASKED, FORMER, LATER, NOW = 2, 4, 1, 9, 10
"""Places of the ledger's sequence: a gathering began, the kubelet was asked; what was before and came after."""


class Device(NamedTuple):
    """A device in the ledger: its record, and its hold. new, fresh: since a gathering began, since it asked."""

    state: int
    new: bool = False
    pulled: bool = False
    hold: bool = False
    fresh: bool = False
    seen: bool = False
    absent: int = 0  # 1: missed by a snapshot, 2: and that is long ago


class Pod(NamedTuple):
    """A pod for the plugin door. at: 0 none, 1 device chosen, 2 Allocate answered, 3 written down."""

    at: int = 0
    device: int = -1


class Request(NamedTuple):
    """A claim. api: 0 nothing, 1 the scheduler chose, 2 allocated.

    node: 0 nothing, 1 reserved, 2 file written, 3 container runs, 4 container gone, 5 file gone.
    record: in the ledger: 0 no, 1 reserved in memory, 2 reserved on disk, 3 prepared.
    """

    api: int = 0
    device: int = -1
    node: int = 0
    file: bool = False
    record: int = 0


class Stage(NamedTuple):
    """How far the agent is in gathering evidence.

    what: 0 nothing; TO_DRA: 1 shown, 2 allocatable asked, 3 List answered, 4 ledger's keeper told;
    TO_PLUGIN: 5 begun, 6 claims listed. The rest are sets of devices, as pairs.
    """

    what: int = 0
    moving: tuple[bool, bool] = (False, False)
    shown: tuple[bool, bool] = (False, False)
    first: tuple[bool, bool] = (False, False)
    second: tuple[bool, bool] = (False, False)
    late: bool = False  # long ago that List answered


NOTHING: Final = (False, False)
IDLE: Final = Stage()


class World(NamedTuple):
    """All of it. sent: healthy devices as the agent said last, () without a listener. heard: as
    the kubelet knows. want: the slice that the agent wants (0 without, 1 tainted, 2 offered), ()
    before it has said. slice: as the API server has it.
    """

    devices: tuple[Device, ...]
    pods: tuple[Pod, ...]
    claims: tuple[Request, ...]
    sent: tuple[bool, bool] | tuple[()]
    heard: tuple[bool, bool]
    want: tuple[int, int] | tuple[()]
    slice: tuple[int, int]
    withdraw: tuple[bool, bool]
    stage: Stage
    alive: bool
    damaged: bool


def start(*states: State) -> World:
    """Return a quiet node."""
    one, *more = (Device(STATES.index(state)) for state in states)
    return World(
        (one, more[0] if more else Device(UNKNOWN)),
        (Pod(), Pod()),
        (Request(), Request()),
        (),
        NOTHING,
        (),
        (0, 0),
        NOTHING,
        IDLE,
        alive=True,
        damaged=False,
    )


# The ledger's own words and back.


def snapshot(world: World) -> Snapshot:
    """Return the world's ledger as the ledger knows it."""
    devices, holds, claims = {}, {}, {}
    for name, device in zip(NAMES, world.devices, strict=True):
        if device.state < len(STATES):
            reason = "for claim default/c" if device.pulled else ""
            sequence = LATER if device.new else FORMER
            devices[R, name] = DeviceRecord(R, name, STATES[device.state], 0.0, sequence, reason)
        if device.hold:
            absent = (None, RECENT, OLD)[device.absent]
            sequence = LATER if device.fresh else FORMER
            holds[R, name] = Hold(R, name, name, 0.0, sequence, "default/p" if device.seen else "", absent)
    for uid, claim in zip("01", world.claims, strict=True):
        if claim.record:
            claims[D, uid] = replace(claim_of(uid, claim), result="r" if claim.record == 3 else None)
            if claim.record == 1:
                claims[D, uid] = replace(claims[D, uid], durable=False)
    return Snapshot(NOW, devices, holds, claims)


def claim_of(uid: str, claim: Request) -> Claim:
    """Return a claim as the driver records it."""
    return Claim(D, uid, "default", f"c{uid}", (ClaimDevice(R, NAMES[claim.device]),), "r", 0.0)


UNKNOWN: Final = len(STATES)
"""The state of a device that the ledger does not know."""


def written(world: World, now: Snapshot) -> World:
    """Return the world with this ledger."""
    stage = world.stage.what
    devices = []
    for name in NAMES:
        record, hold = now.devices.get((R, name)), now.holds.get((R, name))
        device = Device(UNKNOWN)
        if record is not None:
            device = Device(STATES.index(record.state), bool(stage) and record.sequence > FORMER, record.pulled)
        if hold is not None:
            absent = {None: 0, RECENT: 1, OLD: 2}[hold.absent_since]
            fresh = 2 <= stage <= 4 and hold.sequence > FORMER
            device = device._replace(hold=True, fresh=fresh, seen=bool(hold.pod), absent=absent)
        devices.append(device)
    claims = []
    for uid, claim in zip("01", world.claims, strict=True):
        known = now.claims.get((D, uid))
        claims.append(
            claim._replace(record=0 if known is None else 3 if known.result is not None else 1 + known.durable)
        )
    return world._replace(devices=tuple(devices), claims=tuple(claims))


def flags(names: object) -> tuple[bool, bool]:
    """Return a set of devices as a pair."""
    return "0" in names, "1" in names  # type: ignore[operator]


def names(pair: tuple[bool, bool]) -> tuple[str, ...]:
    """Return a pair as names."""
    return tuple(name for name, there in zip(NAMES, pair, strict=True) if there)


def settled(world: World, what: Stage) -> World:
    """Return the world at another stage, what is remembered of the sequence made to fit."""
    stage = what.what
    devices = tuple(
        device._replace(
            new=device.new and bool(stage) and stage not in {1, 5},
            fresh=device.fresh and stage in {3, 4},
        )
        for device in world.devices
    )
    return world._replace(stage=what, devices=devices)


class Small:
    """The steps of such a node under some rules, and what may go wrong with it."""

    def __init__(
        self,
        rules: Rules = ALL,
        *,
        devices: int = 2,
        pods: int = 2,
        claims: int = 2,
        crashes: bool = True,
        damage: bool = False,
    ) -> None:
        self.rules = rules
        self.names = NAMES[:devices]
        self.pods = pods
        self.claims = claims
        self.crashes = crashes
        self.damage = damage
        self._known: dict[Hashable, tuple[object, World]] = {}

    def do(self, world: World, key: Hashable, operation: Callable[[], Operation[object]]) -> tuple[object, World]:
        """Let the ledger decide what it has not decided yet. key: tells the operation from others."""
        asked = (world.devices, world.claims, world.stage.what, key)
        known = self._known.get(asked)
        if known is None:
            now = snapshot(world)
            decision = operation()(now, self.rules)
            after = world
            if decision.changes:
                after = written(world, now.with_changes(decision.changes, NOW + 1))
            known = self._known[asked] = decision.answer, after
        answer, after = known
        if after.devices == world.devices and after.claims == world.claims:
            return answer, world
        return answer, world._replace(devices=after.devices, claims=after.claims)

    # All that may come next.

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """Return every step that is possible, and where it leads."""
        yield from self.kubelet(world)
        yield from self.scheduler(world)
        if world.alive:
            yield from self.door(world)
            yield from self.driver(world)
            yield from self.offering(world)
            yield from self.gathering(world)
            if world.stage is IDLE or world.stage == IDLE:
                yield from self.moves(world)
        yield from self.fate(world)

    def kubelet(self, world: World) -> Iterator[tuple[str, World]]:
        """Choose devices, write down what was given, end pods; take in the list."""
        taken = {pod.device for pod in world.pods if pod.at}
        more = sum(pod.at > 0 for pod in world.pods) < self.pods
        for number, pod in enumerate(world.pods):
            if pod.at == 0:
                for device in TWO if more else ():
                    if world.heard[device] and device not in taken:
                        yield f"choose p{number} {device}", with_pod(world, number, Pod(1, device))
            elif pod.at == 2:
                yield f"write down p{number}", with_pod(world, number, pod._replace(at=3))
            elif pod.at == 3:
                yield f"end p{number}", with_pod(world, number, Pod())
        if world.sent and world.heard != world.sent:
            yield "hear", world._replace(heard=world.sent)
        for number, claim in enumerate(world.claims):
            if claim.node == 3:
                yield f"end c{number}", with_claim(world, number, claim._replace(node=4))

    def scheduler(self, world: World) -> Iterator[tuple[str, World]]:
        """Choose devices for claims from the slice, write it down however late; take claims away."""
        given = {claim.device for claim in world.claims if claim.api}
        more = sum(claim != Request() for claim in world.claims) < self.claims
        for number, claim in enumerate(world.claims):
            if claim.api == 0 and not claim.node and not claim.file and not claim.record:
                for device in TWO if more else ():
                    if world.slice[device] == 2 and device not in given:
                        yield f"pick c{number} {device}", with_claim(world, number, Request(1, device))
            elif claim.api == 1:
                yield f"allocate c{number}", with_claim(world, number, claim._replace(api=2))
            elif claim.api == 2:
                # In whatever state it is here: a pod may be deleted by force.
                yield f"deallocate c{number}", with_claim(world, number, gone(claim._replace(api=0)))

    def door(self, world: World) -> Iterator[tuple[str, World]]:
        """Answer Allocate; send the list."""
        for number, pod in enumerate(world.pods):
            if pod.at == 1:
                name = NAMES[pod.device]
                answer, after = self.do(world, ("grant", name), partial(ledger.grant, R, {name: name}, 0.0))
                then = Pod() if isinstance(answer, Refused) else pod._replace(at=2)
                yield f"grant p{number}", with_pod(after, number, then)
        healthy = self.healthy(world)
        if world.sent != healthy:
            yield "send", world._replace(sent=healthy)

    def healthy(self, world: World) -> tuple[bool, bool]:
        """Return what ListAndWatch shows (R3)."""
        one, two = (d.state < UNKNOWN and STATES[d.state].healthy for d in world.devices)
        return one, two

    def driver(self, world: World) -> Iterator[tuple[str, World]]:
        """Prepare and unprepare, in the driver's steps; clear up what nobody wants."""
        for number, claim in enumerate(world.claims):
            uid = "01"[number]
            if claim.node == 0 and claim.api == 2:
                _, after = self.do(
                    world,
                    ("reserve", uid),
                    partial(ledger.reserve, claim_of(uid, claim), durable=False, pull=True),
                )
                if after.claims[number].record:
                    yield f"reserve c{number}", with_claim(after, number, after.claims[number]._replace(node=1))
                elif after != world:
                    yield f"pull c{number}", after
            elif claim.node == 1:
                yield f"file c{number}", with_claim(world, number, claim._replace(node=2, file=True))
            elif claim.node == 2:
                answer, after = self.do(
                    world, ("prepare", uid), partial(ledger.prepare, claim_of(uid, claim), pull=True)
                )
                if isinstance(answer, Refused):
                    undone = with_claim(after, number, after.claims[number]._replace(node=0, file=False))
                    _, after = self.do(undone, ("unprepare", uid), partial(ledger.unprepare, D, uid))
                    yield f"undo c{number}", with_claim(after, number, gone(after.claims[number]))
                else:
                    yield f"record c{number}", with_claim(after, number, after.claims[number]._replace(node=3))
            elif claim.node == 4:
                yield f"unfile c{number}", with_claim(world, number, claim._replace(node=5, file=False))
            elif claim.node == 5:
                _, after = self.do(world, ("unprepare", uid), partial(ledger.unprepare, D, uid))
                yield f"unprepare c{number}", with_claim(after, number, gone(after.claims[number]._replace(node=0)))
            if claim.node in {0, 4} and claim.api == 0 and claim.record:
                # The claim is gone, the kubelet does not use it: reconciled.
                cleared = with_claim(world, number, claim._replace(file=False))
                _, after = self.do(cleared, ("unprepare", uid), partial(ledger.unprepare, D, uid))
                yield f"reconcile c{number}", with_claim(after, number, gone(after.claims[number]))
            if claim.node == 0 and claim.file and not claim.record:
                yield f"sweep c{number}", with_claim(world, number, gone(claim._replace(file=False)))

    def offering(self, world: World) -> Iterator[tuple[str, World]]:
        """Say what the slice is to be; have it accepted."""
        want = self.wanted(world)
        if world.want != want:
            yield "want", world._replace(want=want)
        if world.want and world.slice != world.want:
            yield "accept", world._replace(slice=world.want)

    def wanted(self, world: World) -> tuple[int, int]:
        """Return what the slice is to be (R4)."""

        def level(device: Device, withdraw: bool) -> int:
            state = STATES[device.state] if device.state < UNKNOWN else None
            if state is State.DRA:
                return 2
            return int(state is State.TO_PLUGIN and not withdraw)

        one, two = (level(d, w) for d, w in zip(world.devices, world.withdraw, strict=True))
        return one, two

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Begin a move, or turn one round."""
        for name in self.names:
            for side in Side:
                answer, after = self.do(world, ("move", name, side), partial(ledger.begin_move, R, [name], side, 0.0))
                if answer:
                    yield f"begin {name} {side.value}", after

    def gathering(self, world: World) -> Iterator[tuple[str, World]]:
        """The handover's steps, one after the other."""
        stage = world.stage
        if stage.what == 0:
            if world.sent:
                moving = ToDra.begun(R, snapshot(world)).showing((1.0, frozenset(names(world.sent))), str)
                shown = flags(moving.shown)
                if moving.shown or not moving.devices:
                    yield "look", settled(world, Stage(1, flags(moving.devices), shown))
            free = ToPlugin.begun(R, snapshot(world))
            if free.free:
                yield "withdraw", self.withdrawing(world, free)
        elif stage.what == 1:
            yield "ask allocatable", settled(world, stage._replace(what=2, first=world.heard))
        elif stage.what == 2:
            held = [False, False]
            for pod in world.pods:
                if pod.at == 3:
                    held[pod.device] = True
            yield "list pods", settled(world, stage._replace(what=3, second=(held[0], held[1])))
        elif stage.what == 3:
            units = held_units(self.holdings(stage).of(R), str)
            seen = KubeletSnapshot(ASKED, OLD if stage.late else RECENT, quiet=True, held=units)
            _, after = self.do(world, ("observe", stage), partial(ledger.observe, R, seen, 0.0))
            yield "observe", settled(after, IDLE if stage.moving == NOTHING else stage._replace(what=4))
        elif stage.what == 4:
            moving = ToDra(R, names(stage.moving), BEGUN, dict.fromkeys(names(stage.shown), 1.0))
            look = Look(self.holdings(stage), 3.0, {R: frozenset(names(stage.first))}, 2.0)
            evidence = moving.looking(BEGUN).looked(look, str)
            assert evidence is not None
            _, after = self.do(
                world, ("to dra", stage), partial(ledger.commit_to_dra, R, moving.devices, evidence, 0.0)
            )
            yield "commit to dra", settled(after, IDLE)
        elif stage.what == 5:
            allocated = self.allocated(world)
            yield "list claims", settled(world, stage._replace(what=6, second=flags(allocated)))
        else:
            listed = ToPlugin(R, names(stage.moving), frozenset(), BEGUN, dict.fromkeys(names(stage.first), 1.0))
            proof = listed.listed(2.0, dict.fromkeys(names(stage.second), "default/c"))
            _, after = self.do(
                world, ("to plugin", stage), partial(ledger.commit_to_plugin, R, sorted(listed.withdrawn), proof, 0.0)
            )
            yield "commit to plugin", settled(after._replace(withdraw=NOTHING), IDLE)

    def withdrawing(self, world: World, moving: ToPlugin) -> World:
        """List the claims, and withdraw what none of them names; go on if the API server has taken that."""
        withdraw = frozenset(names(world.withdraw)) & moving.free
        if moving.free - withdraw:
            withdraw |= moving.expecting(self.allocated(world))
        after = world._replace(withdraw=flags(withdraw))
        taken = bool(world.want) and world.want == world.slice
        accepted = {n: 1.0 if taken and world.slice[int(n)] == 0 else None for n in sorted(withdraw)}
        moving = moving.withdrawing(accepted)
        if not moving.withdrawn:
            return after
        return settled(after, Stage(5, flags(moving.devices), first=flags(moving.withdrawn)))

    def allocated(self, world: World) -> Mapping[str, str]:
        """Return what a list of claims says now."""
        return {NAMES[claim.device]: "default/c" for claim in world.claims if claim.api == 2}

    def holdings(self, stage: Stage) -> Holdings:
        """Return what the kubelet's books said."""
        return Holdings({R: {name: frozenset({Holder("default", "p", "c")}) for name in names(stage.second)}})

    # What befalls them.

    def fate(self, world: World) -> Iterator[tuple[str, World]]:
        """Time passes; somebody dies."""
        if any(d.absent == 1 for d in world.devices) and not any(pod.at == 2 for pod in world.pods):
            devices = tuple(d._replace(absent=2 if d.absent else 0) for d in world.devices)
            late = world.stage._replace(late=world.stage.what == 3)
            yield "tick", world._replace(devices=devices, stage=late)
        if not self.crashes:
            return
        if any(pod.at in {1, 2} for pod in world.pods) or world.sent:
            pods = tuple(pod if pod.at == 3 else Pod() for pod in world.pods)
            yield "kubelet restarts", world._replace(pods=pods, sent=(), heard=NOTHING)
        if world.alive:
            yield "agent dies", died(world)
            if self.damage and not world.damaged:
                dead = died(world)
                lost = tuple(claim._replace(record=0) for claim in dead.claims)
                yield (
                    "agent dies, ledger lost",
                    dead._replace(devices=(Device(UNKNOWN), Device(UNKNOWN)), claims=lost, damaged=True),
                )
        elif not (world.damaged and any(pod.at == 2 for pod in world.pods)):
            yield "agent starts", self.started(world)

    def started(self, world: World) -> World:
        """Confront the ledger with what is held."""
        held = {NAMES[pod.device]: Held(NAMES[pod.device], "default/p") for pod in world.pods if pod.at == 3}
        fresh = all(device.state == UNKNOWN for device in world.devices)
        claims = [
            ClaimEvidence(D, uid, frozenset({NAMES[claim.device]}), prepared=claim.file)
            for uid, claim in zip("01", world.claims, strict=True)
            if (claim.file and not claim.record) or (fresh and claim.api == 2 and not claim.file)
        ]
        _, after = self.do(
            world,
            ("confront", tuple(held), *((claim.uid, claim.prepared) for claim in claims)),
            partial(ledger.confront, R, Evidence(held, claims), self.names, Side.PLUGIN, 0.0),
        )
        return after._replace(alive=True)

    # What must never be, and what must come.

    def wrong(self, world: World) -> str:
        """Say what is wrong with a world; "" if nothing is."""
        for device in range(len(self.names)):
            holders = sum(pod.at >= 2 and pod.device == device for pod in world.pods)
            holders += sum(claim.node == 3 and claim.device == device for claim in world.claims)
            if holders > 1:
                return f"device {device} has {holders} holders"
            if not world.damaged:
                if (world.heard[device] or (world.sent and world.sent[device])) and world.slice[device]:
                    return f"device {device} is offered on both sides"
                if STATES[world.devices[device].state] is State.QUARANTINED:
                    return f"device {device} is quarantined without a reason"
        return ""

    def through_both(self, world: World) -> str:
        """Say which device a pod and a claim hold at the same time; "" if there is none."""
        given = {pod.device for pod in world.pods if pod.at >= 2}
        given &= {claim.device for claim in world.claims if claim.node == 3}
        return f"device {min(given)} is held through both doors" if given else ""

    def ending(self, world: World, *, serve: bool = False) -> Iterator[World]:
        """Return what comes next until all has ended that was begun, whatever share is asked for.

        serve: claims that are allocated stay, and the kubelet tries to prepare them.
        """
        if not world.alive:
            pods = tuple(pod._replace(at=3) if pod.at == 2 else pod for pod in world.pods)
            yield self.started(world._replace(pods=pods))
            return
        stays = {f"c{number}" for number, claim in enumerate(world.claims) if serve and claim.api == 2}
        steps = [*self.kubelet(world), *self.scheduler(world), *self.door(world), *self.offering(world)]
        steps += self.driver(world)
        for what, after in steps:
            word, who, *_ = *what.split(), ""
            if word in {"end", "deallocate"} and who in stays:
                continue
            if word in {"choose", "pick"} or (word in {"reserve", "pull"} and who not in stays):
                continue
            yield after
        if world.stage != IDLE:
            yield from (after for _, after in self.gathering(world))

    def calming(self, world: World, share: Share, *, serve: bool = False) -> Iterator[World]:
        """Return what comes next when nobody dies and nothing new comes, most urgent first.

        Pods and claims end, and the agent goes on until it has nothing to do.
        """
        yield from self.ending(world, serve=serve)
        if not world.alive:
            return
        now = snapshot(world)
        held, expected = in_hands(now, R)
        states = {name: record.state for name, record in now.of(R).items()}
        wish = plan(states, held, share, "cordon", (), expected)
        for devices, side in ((wish.to_dra, Side.DRA), (wish.to_plugin, Side.PLUGIN)):
            if devices:
                yield self.do(world, ("moves", devices, side), partial(ledger.begin_move, R, devices, side, 0.0))[1]
        yield from (after for what, after in self.fate(world) if what == "tick")
        yield from (after for what, after in self.gathering(world) if what == "withdraw" and after != world)
        if any(device.hold or device.state == STATES.index(State.TO_DRA) for device in world.devices):
            yield from (after for what, after in self.gathering(world) if what == "look")
        if any(device.state == STATES.index(State.QUARANTINED) for device in world.devices):
            yield self.started(world)

    def lost(self, world: World, share: Share) -> str:
        """Say what is lost for ever when all is calm; "" if nothing is."""
        for device in range(len(self.names)):
            plugin, dra = world.heard[device], world.slice[device] == 2
            if plugin == dra:
                return f"device {device} is offered on {'both sides' if plugin else 'no side'}"
        if world.slice.count(2) != share.of(len(self.names)):
            return f"the share is {share}, but the slice has {world.slice}"
        return ""

    def unserved(self, world: World) -> str:
        """Say which claim waits for ever for a device that nobody has; "" if none does."""
        for number, claim in enumerate(world.claims):
            if claim.api == 2 and claim.node != 3:
                return f"claim {number} is not prepared"
        return ""


class Calm:
    """Asks of each world what becomes of it when it is left alone, whatever share is asked for."""

    def __init__(self, small: Small) -> None:
        self.small = small
        self._fine: set[tuple[Hashable, ...]] = set()

    def __call__(self, world: World) -> None:
        """Fail if something is lost for ever, or nothing ever comes to rest."""
        for count in range(len(self.small.names) + 1):
            for serve in (False, True):
                self._rest(world, Share(count), serve=serve)

    def _rest(self, world: World, share: Share, *, serve: bool) -> None:
        way: list[tuple[Hashable, ...]] = []
        first = world
        alike = len(self.small.names) == 2
        while True:
            here = (hash(canonical(world, alike=alike)), share, serve)
            if here in self._fine:
                break
            assert len(way) < 300, f"{first} never rests"
            way.append(here)
            step = next(self.small.calming(world, share, serve=serve), None)
            if step is None:
                problem = self.small.unserved(world) if serve else self.small.lost(world, share)
                assert not problem, f"{problem}\n{first}\n{world}"
                break
            world = step
        self._fine.update(way)


def died(world: World) -> World:
    """Return the world after the agent was killed: what is on disk stays, what was answered was."""
    devices = tuple(d._replace(new=False, fresh=False, seen=False, absent=0) for d in world.devices)
    claims = []
    for claim in world.claims:
        record = 0 if claim.record == 1 else claim.record
        node = {1: 0, 2: 0, 5: 4}.get(claim.node, claim.node)
        claims.append(gone(claim._replace(record=record, node=node)))
    return world._replace(
        devices=devices,
        claims=tuple(claims),
        sent=(),
        heard=NOTHING,
        want=(),
        withdraw=NOTHING,
        stage=IDLE,
        alive=False,
    )


def with_pod(world: World, number: int, pod: Pod) -> World:
    """Return the world with another pod."""
    pods = list(world.pods)
    pods[number] = pod
    return world._replace(pods=(pods[0], pods[1]))


def with_claim(world: World, number: int, claim: Request) -> World:
    """Return the world with another claim."""
    claims = list(world.claims)
    claims[number] = claim
    return world._replace(claims=(claims[0], claims[1]))


def gone(claim: Request) -> Request:
    """Return the claim, or a new one where nothing is left of it."""
    return Request() if not (claim.api or claim.node or claim.file or claim.record) else claim


def canonical(world: World, *, alike: bool = True) -> World:
    """Return the same for worlds that differ in names only. alike: devices' names count as such."""
    one, two = world.devices
    if one > two and alike:
        return swapped(world)
    pods, claims = world.pods, world.claims
    if pods[0] > pods[1] or claims[0] > claims[1]:
        world = world._replace(pods=tuple(sorted(pods)), claims=tuple(sorted(claims)))
    return min(world, swapped(world)) if alike and one == two else world


def swapped(world: World) -> World:
    """Return the world with its devices' names exchanged."""

    def swap(pair: tuple[bool, bool]) -> tuple[bool, bool]:
        return pair[1], pair[0]

    pods = sorted(pod._replace(device=1 - pod.device) if pod.at else pod for pod in world.pods)
    claims = sorted(c._replace(device=1 - c.device) if c.device >= 0 else c for c in world.claims)
    stage = world.stage
    return World(
        (world.devices[1], world.devices[0]),
        (pods[0], pods[1]),
        (claims[0], claims[1]),
        swap(world.sent) if world.sent else (),
        swap(world.heard),
        world.want[::-1],
        (world.slice[1], world.slice[0]),
        swap(world.withdraw),
        Stage(
            stage.what,
            swap(stage.moving),
            swap(stage.shown),
            swap(stage.first),
            swap(stage.second),
            stage.late,
        ),
        world.alive,
        world.damaged,
    )


@dataclass(frozen=True, slots=True)
class Explored:
    """What an exploration found. whole: nothing is left to be seen. trace: the shortest way to harm."""

    worlds: int
    depth: int
    whole: bool
    trace: tuple[str, ...] = ()


def explore(
    small: Small,
    first: World,
    *,
    most: int = 10**9,
    seconds: float = 1e9,
    wrong: Callable[[World], str] | None = None,
    visit: Callable[[World], None] = lambda world: None,
    traced: bool = True,
) -> Explored:
    """Look at all worlds, breadth first, until `most` are known or the time is over.

    wrong: what must not be, `Small.wrong` unless told. traced: remember the way to each world,
    which takes much memory; else a world is remembered by 64 bits.
    """
    wrong = wrong or small.wrong
    until = time.monotonic() + seconds
    alike = len(small.names) == 2
    root = canonical(first, alike=alike)
    parents: dict[World, tuple[World, str]] = {}
    seen = {hash(root)}
    frontier, depth = [root], 0
    while frontier:
        if time.monotonic() > until or len(seen) > most:
            return Explored(len(seen), depth, whole=False)
        depth += 1
        following = []
        for world in frontier:
            for what, after in small.successors(world):
                key = canonical(after, alike=alike)
                number = hash(key)
                if number in seen:
                    continue
                seen.add(number)
                if traced:
                    parents[key] = world, what
                if problem := wrong(key):
                    steps = [problem]
                    at: World | None = key
                    while at is not None and at in parents:
                        at, step = parents[at]
                        steps.append(step)
                    return Explored(len(seen), depth, whole=False, trace=tuple(reversed(steps)))
                visit(key)
                following.append(key)
            if len(seen) > most:
                break
        frontier = following
    return Explored(len(seen), depth, whole=True)
