"""A node with two devices, two pods and two claims, small enough to see all that can happen to it.

A world is a tuple of small numbers; `successors` are all worlds that one step leads to: of the
kubelet, the scheduler, the API server, the agent, or of fate. Whatever can be late is a step of
its own, so that everything else may come in between. What the agent does is the real thing: the
ledger's operations, the decision who holds a device (`deviceplugin.kubelet.holders`), the
handover's evidence and its plan; only their disk and their sockets are missing.

Faults are steps like any other: the kubelet restarts with what its checkpoint says; the checkpoint
is lost or torn (a scan waits for the next one then); a pod is deleted by force while its container
runs, and the kubelet gives its device away again; the kubelet forgets a prepared claim whose
container runs. An ended pod stays in the checkpoint until the kubelet has forgotten it and then
written the file; that it forgets nobody before its sources are ready is covered, since it may
forget late at any time.

Who holds a device is judged by the containers that run.

What the model takes for granted:
- The kubelet records an answered Allocate within the time that a grant without a pod is kept (`tick`), or dies.
- The kubelet gives a device that it counts as allocated to nobody else; the scheduler gives a
  device to one claim at a time.
- A pod that ends or is deleted before it has a cgroup never starts; so does one whose allocation
  the kubelet lost before that.
- A scan has recorded a pod as a holder before the pod is deleted by force, and before the checkpoint
  that names it is lost (`Pod.recorded`). Until then nothing but the checkpoint tells whose device it is.
- The ledger is not lost while a container runs that the kubelet, or its checkpoint, has forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import Allocation, CheckpointVersion
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, kubelet_snapshot
from deviceplugin.register import operations
from deviceplugin.register.question import View, Wanted
from deviceplugin.register.records import (
    WHOLE,
    AllocationRecord,
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    Operation,
    Record,
    RegisterSnapshot,
    Side,
    State,
)
from deviceplugin.register.rules import ClaimEvidence, ClusterEvidence, Evidence, Excluded, KubeletEvidence, Refused
from dra_bridge.handover.ends import shown_unhealthy
from dra_bridge.handover.planner import Moving, held_and_expected, plan
from dra_bridge.handover.share import Share

R: Final = "example.com/fpga"
D: Final = "fpga.example.com"
TWO: Final = (0, 1)
NAMES: Final = ("0", "1")
STATES: Final = tuple(State)
MINE: Final = Moving(D)
ALONE: Final = View()
"""Nothing but the register's own records."""
CONTAINER: Final = "c"
SHOWN, OLD, RECENT = 1.0, 1000.0, 2000.0
BEGUN, FORMER, LATER, NOW = 2, 1, 9, 10
"""Places of the ledger's sequence: a gathering began; what was before and came after."""


class Device(NamedTuple):
    """A device in the ledger: its record, and what its hold has besides holders.

    new: the record changed since a gathering began. fresh: a grant since then. pending, absent: of the hold;
    absent 1: a scan missed its container, 2: and that is long ago.
    """

    state: int
    new: bool = False
    pulled: bool = False
    pending: bool = False
    fresh: bool = False
    absent: int = 0


class At(IntEnum):
    """How far a pod is: there is none, the kubelet chose a device, Allocate was granted, the device manager has it in
    memory, a process of it runs (also after it was deleted by force), it has ended.
    """

    NONE, CHOSEN, ANSWERED, ADMITTED, RUNS, OVER = range(6)


class InApi(IntEnum):
    """A claim on the API server: nothing, the scheduler chose a device, it is allocated."""

    NONE, CHOSEN, ALLOCATED = range(3)


class OnNode(IntEnum):
    """A claim on the node: nothing, reserved in the ledger, its file written, prepared, its container ended, its file
    removed, its container runs, its container runs and the kubelet's claim state does not name the claim.
    """

    NONE, RESERVED, WRITTEN, PREPARED, ENDED, REMOVED, RUNS, FORGOTTEN = range(8)

    @property
    def container_runs(self) -> bool:
        """Whether a container of it runs."""
        return self >= OnNode.RUNS


class InLedger(IntEnum):
    """A claim in the ledger: not there, reserved in memory, reserved on disk, prepared."""

    NONE, IN_MEMORY, ON_DISK, PREPARED = range(4)


class Step(IntEnum):
    """How far the agent is in gathering evidence.

    For moves to DRA: a checkpoint requested, the last one read, the first one read and another requested (only where a
    write may be late), the ledger has the result. For moves to the plugin: the slice is accepted without the devices,
    claims are listed.
    """

    NONE, REQUESTED, READ, READ_FIRST, OBSERVED, WITHDRAWN, LISTED = range(7)


class Pod(NamedTuple):
    """A pod of the plugin side, for as long as anything names it.

    memory, file: the kubelet's device manager and its checkpoint name it. recorded: it is
    a holder in the ledger. seen: checkpoints that a scan has read name it: 1 some of them, 2 all; after the scan, it
    counts as held. draft: what a slow writer of the checkpoint is about to write names it.
    """

    at: At = At.NONE
    device: int = -1
    memory: bool = False
    file: bool = False
    recorded: bool = False
    seen: int = 0
    draft: bool = False

    @property
    def runs(self) -> bool:
        """Whether a process of it runs."""
        return self.at == At.RUNS

    @property
    def unrecorded(self) -> bool:
        """Whether it may run and the ledger does not know it."""
        return self.at in {At.ADMITTED, At.RUNS} and not self.recorded

    @property
    def forgotten(self) -> bool:
        """Whether it may run, and the kubelet does not know of its device or its checkpoint does not."""
        return self.at in {At.ADMITTED, At.RUNS} and not (self.memory and self.file)

    @property
    def unlisted(self) -> bool:
        """Whether it was granted its device and the kubelet has not written it to the checkpoint yet."""
        return self.at == At.ANSWERED or (self.at == At.ADMITTED and not (self.file or self.recorded))


class Request(NamedTuple):
    """A claim, and whether its file is there."""

    api: InApi = InApi.NONE
    device: int = -1
    node: OnNode = OnNode.NONE
    file: bool = False
    record: InLedger = InLedger.NONE


class Stage(NamedTuple):
    """How far the agent is in gathering evidence, and what it has found.

    moving: the devices that move; of those in TO_DRA the ones that are shown Unhealthy. written: the kubelet has
    written its checkpoint since the request. late: the scan began long ago. The rest are sets of devices, as pairs.
    """

    step: Step = Step.NONE
    moving: tuple[bool, bool] = (False, False)
    first: tuple[bool, bool] = (False, False)
    second: tuple[bool, bool] = (False, False)
    written: bool = False
    late: bool = False


NOTHING: Final = (False, False)
IDLE: Final = Stage()
SCAN: Final = frozenset({Step.REQUESTED, Step.READ, Step.READ_FIRST, Step.OBSERVED})
WAITING: Final = frozenset({Step.REQUESTED, Step.READ_FIRST})
"""The steps of a scan, and those at which it waits for the kubelet to write its checkpoint."""
UNDONE: Final = {OnNode.RESERVED: OnNode.NONE, OnNode.WRITTEN: OnNode.NONE, OnNode.REMOVED: OnNode.ENDED}
"""Where a claim is on the node after the agent was killed in the middle of a call."""


class World(NamedTuple):
    """All of it. sent: healthy devices as the agent said last, () without a listener. received: as
    the kubelet has them. want: the devices in the slice that the agent wants, () before it has said.
    slice: as the API server has it. writing: a slow writer of the checkpoint is at work.
    """

    devices: tuple[Device, ...]
    pods: tuple[Pod, ...]
    claims: tuple[Request, ...]
    sent: tuple[bool, bool] | tuple[()]
    received: tuple[bool, bool]
    want: tuple[bool, bool] | tuple[()]
    slice: tuple[bool, bool]
    stage: Stage
    alive: bool
    damaged: bool
    writing: bool = False


def start(*states: State) -> World:
    """Return a node on which nothing has happened."""
    one, *more = (Device(STATES.index(state)) for state in states)
    return World(
        (one, more[0] if more else Device(UNKNOWN)),
        (Pod(), Pod()),
        (Request(), Request()),
        (),
        NOTHING,
        (),
        NOTHING,
        IDLE,
        alive=True,
        damaged=False,
    )


# The ledger's own words and back.


def snapshot(world: World) -> RegisterSnapshot:
    """Return the world's ledger as the ledger knows it."""
    devices: dict[tuple[str, str], DeviceRecord] = {}
    held: list[tuple[str, tuple[str, str], Record]] = []
    for name, device in zip(NAMES, world.devices, strict=True):
        if device.state < len(STATES):
            reason = "for claim default/c" if device.pulled else ""
            sequence = LATER if device.new else FORMER
            state = STATES[device.state]
            driver = "" if state is State.PLUGIN else D
            devices[R, name] = DeviceRecord(R, name, state, 0.0, sequence, reason, driver)
        recorded = frozenset(
            (str(uid), CONTAINER) for uid, pod in enumerate(world.pods) if pod.recorded and NAMES[pod.device] == name
        )
        if recorded or device.pending:
            absent = (None, RECENT, OLD)[device.absent]
            sequence = LATER if device.fresh else FORMER
            one = AllocationRecord(R, name, name, 0.0, sequence, recorded, device.pending, absent, amount=WHOLE)
            held.append(("allocations", (R, name), one))
    for uid, claim in zip("01", world.claims, strict=True):
        if claim.record:
            result = "r" if claim.record is InLedger.PREPARED else None
            durable = claim.record is not InLedger.IN_MEMORY
            held.append(
                (
                    "claims",
                    (D, uid),
                    replace(claim_of(uid, claim), result=result, durable=durable),
                )
            )
    return RegisterSnapshot(NOW, devices).with_changes([Change(*one) for one in held], NOW)


def claim_of(uid: str, claim: Request) -> Claim:
    """Return a claim as the driver records it."""
    devices = (ClaimDevice(R, NAMES[claim.device], amount=WHOLE),)
    return Claim(D, uid, "default", f"c{uid}", devices, "r", 0.0, pods=frozenset({f"c{uid}"}))


UNKNOWN: Final = len(STATES)
"""The state of a device that the ledger does not know."""


def written(world: World, now: RegisterSnapshot) -> World:
    """Return the world with this ledger."""
    scanning = world.stage.step in SCAN
    devices = []
    for name, moving in zip(NAMES, world.stage.moving, strict=True):
        record, hold = now.devices.get((R, name)), now.allocations.get((R, name))
        device = Device(UNKNOWN)
        if record is not None:
            device = Device(STATES.index(record.state), moving and record.sequence > FORMER, record.pulled)
        if hold is not None:
            absent = {None: 0, RECENT: 1, OLD: 2}[hold.absent_since] if hold.pending else 0
            fresh = scanning and hold.sequence > FORMER
            device = device._replace(pending=hold.pending, fresh=fresh, absent=absent)
        devices.append(device)
    pods = [pod._replace(recorded=named(now, str(uid), pod)) for uid, pod in enumerate(world.pods)]
    claims = []
    for uid, claim in zip("01", world.claims, strict=True):
        claims.append(claim._replace(record=in_ledger(now.claims.get((D, uid)))))
    return world._replace(devices=tuple(devices), pods=(pods[0], pods[1]), claims=tuple(claims))


def in_ledger(claim: Claim | None) -> InLedger:
    """Return how far the ledger has a claim."""
    if claim is None:
        return InLedger.NONE
    if claim.result is not None:
        return InLedger.PREPARED
    return InLedger.ON_DISK if claim.durable else InLedger.IN_MEMORY


def named(now: RegisterSnapshot, uid: str, pod: Pod) -> bool:
    """Return whether the ledger names a pod as a holder, be it by its container's name alone (a mutation)."""
    hold = now.allocations.get((R, NAMES[pod.device])) if pod.at else None
    return hold is not None and not hold.holders.isdisjoint({(uid, CONTAINER), ("", CONTAINER)})


def kept(pod: Pod) -> Pod:
    """Return the pod, or none where nothing names an ended one any more."""
    return Pod() if pod.at is At.OVER and not any(pod[2:]) else pod


def flags(names: object) -> tuple[bool, bool]:
    """Return a set of devices as a pair."""
    return "0" in names, "1" in names  # type: ignore[operator]


def names(pair: tuple[bool, bool]) -> tuple[str, ...]:
    """Return a pair as names."""
    return tuple(name for name, there in zip(NAMES, pair, strict=True) if there)


def at_stage(world: World, stage: Stage) -> World:
    """Return the world at another stage, what is remembered of the sequence and of a scan made to fit."""
    begins = stage.step in {Step.NONE, Step.REQUESTED, Step.WITHDRAWN}
    has_read = stage.step in {Step.READ, Step.READ_FIRST, Step.OBSERVED}
    devices = tuple(
        device._replace(new=device.new and not begins, fresh=device.fresh and has_read) for device in world.devices
    )
    one, two = (pod if has_read else kept(pod._replace(seen=0)) for pod in world.pods)
    return world._replace(stage=stage, devices=devices, pods=(one, two))


ANY_FILE: Final = CheckpointVersion(frozenset(), {})
"""Names no resource: of the kubelet's writers one is slow here."""
FAULTS: Final = frozenset({"force", "lose", "claims"})
"""Faults: pods deleted by force, the checkpoint lost, the kubelet's claim state lost."""


class Small:
    """The steps of such a node, and what may go wrong with it.

    crashes: kubelet and agent may die. damage: the ledger may be lost. faults: see `FAULTS`. turns: moves may turn
    round while evidence is gathered, though the handover does one after the other. cgroups: the tree is visible.
    slow: the kubelet may write a checkpoint that it made up before others were written. reasons: why devices move is
    remembered, which only the plan of moves asks for.
    """

    def __init__(
        self,
        *,
        devices: int = 2,
        pods: int = 2,
        claims: int = 2,
        crashes: bool = True,
        damage: bool = False,
        faults: Collection[str] = FAULTS,
        turns: bool = False,
        cgroups: bool = True,
        slow: bool = False,
        reasons: bool = True,
    ) -> None:
        self.names = NAMES[:devices]
        self.pods = pods
        self.claims = claims
        self.crashes = crashes
        self.damage = damage
        self.faults = frozenset(faults)
        self.turns = turns
        self.cgroups = cgroups
        self.slow = slow
        self.reasons = reasons
        self._known: dict[Hashable, tuple[object, World]] = {}

    def do(self, world: World, key: Hashable, operation: Callable[[], Operation[object]]) -> tuple[object, World]:
        """Let the ledger decide what it has not decided yet. key: tells the operation from others."""
        holders_known = tuple((pod.device, pod.recorded) for pod in world.pods)
        asked = (world.devices, holders_known, world.claims, world.stage.step, world.stage.moving, key)
        known = self._known.get(asked)
        if known is None:
            now = snapshot(world)
            decision = operation()(now)
            after = world
            if decision.changes:
                after = written(world, now.with_changes(decision.changes, NOW + 1))
                if not self.reasons:
                    after = after._replace(devices=tuple(device._replace(pulled=False) for device in after.devices))
            if len(self._known) > 300_000:
                self._known.clear()
            known = self._known[asked] = decision.answer, after
        answer, after = known
        if after.devices == world.devices and after.pods == world.pods and after.claims == world.claims:
            return answer, world
        one, two = (
            kept(pod._replace(recorded=then.recorded)) for pod, then in zip(world.pods, after.pods, strict=True)
        )
        return answer, world._replace(devices=after.devices, pods=(one, two), claims=after.claims)

    # All that may come next.

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """Return every step that is possible, and where it leads."""
        yield from self.kubelet(world)
        yield from self.scheduler(world)
        if world.alive:
            yield from self.side(world)
            yield from self.driver(world)
            yield from self.offering(world)
            yield from self.gathering(world)
            if self.turns or world.stage == IDLE:
                yield from self.moves(world)
        yield from self.fate(world)

    def kubelet(self, world: World) -> Iterator[tuple[str, World]]:
        """Choose devices, keep what was given in memory and in the checkpoint, run pods; take in the list."""
        taken = {pod.device for pod in world.pods if pod.at in {At.CHOSEN, At.ANSWERED} or pod.memory}
        more = sum(pod.at is not At.NONE for pod in world.pods) < self.pods
        for number, pod in enumerate(world.pods):
            if pod.at is At.NONE:
                for device in TWO if more else ():
                    if world.received[device] and device not in taken:
                        yield f"choose p{number} {device}", with_pod(world, number, Pod(At.CHOSEN, device))
            elif pod.at is At.ANSWERED:
                yield f"insert p{number}", with_pod(world, number, pod._replace(at=At.ADMITTED, memory=True))
            elif pod.at is At.ADMITTED and not pod.unlisted:
                yield f"start p{number}", with_pod(world, number, pod._replace(at=At.RUNS))
            if pod.at in {At.ADMITTED, At.RUNS}:
                yield f"end p{number}", with_pod(world, number, kept(pod._replace(at=At.OVER)))
            if pod.at is At.RUNS and pod.memory and pod.recorded and "force" in self.faults:
                yield f"delete p{number}", with_pod(world, number, pod._replace(memory=False))
            if pod.at is At.OVER and pod.memory:
                yield f"forget p{number}", with_pod(world, number, kept(pod._replace(memory=False)))
        if world.sent and world.received != world.sent:
            yield "receive", world._replace(received=world.sent)
        after = self.filed(world, *(pod.memory for pod in world.pods))
        if after != world:
            yield "write", after
        if self.slow:
            if world.writing:
                yield "write late", drafted(self.filed(world, *(pod.draft for pod in world.pods)))
            else:
                yield "draft", drafted(world, *(pod.memory for pod in world.pods))
        for number, claim in enumerate(world.claims):
            if claim.node is OnNode.PREPARED:
                yield f"start c{number}", changed(world, number, node=OnNode.RUNS)
            if claim.node in {OnNode.PREPARED, OnNode.RUNS}:
                yield f"end c{number}", changed(world, number, node=OnNode.ENDED)
            elif claim.node is OnNode.FORGOTTEN:
                yield f"end c{number}", changed(world, number, node=OnNode.NONE)
            if claim.node in {OnNode.PREPARED, OnNode.RUNS} and "claims" in self.faults:
                yield (
                    f"lose c{number}",
                    with_claim(
                        world,
                        number,
                        claim._replace(node=OnNode.FORGOTTEN if claim.node is OnNode.RUNS else OnNode.NONE),
                    ),
                )
        if "lose" in self.faults and not any(pod.unrecorded for pod in world.pods):
            after = world._replace(
                stage=world.stage._replace(written=world.stage.written and world.stage.step not in WAITING)
            )
            one, two = (kept(pod._replace(file=False)) for pod in world.pods)
            after = after._replace(pods=(one, two))
            if after != world:
                yield "lose checkpoint", after

    def filed(self, world: World, *names: bool) -> World:
        """Return the world with a checkpoint that names these pods."""
        one, two = (kept(pod._replace(file=name)) for pod, name in zip(world.pods, names, strict=True))
        stage = world.stage._replace(written=True) if world.stage.step in WAITING else world.stage
        return world._replace(pods=(one, two), stage=stage)

    def scheduler(self, world: World) -> Iterator[tuple[str, World]]:
        """Choose devices for claims from the slice, write it down however late; take claims away."""
        given = {claim.device for claim in world.claims if claim.api}
        more = sum(claim != Request() for claim in world.claims) < self.claims
        for number, claim in enumerate(world.claims):
            if claim.api is InApi.NONE and not claim.node and not claim.file and not claim.record:
                for device in TWO if more else ():
                    if world.slice[device] and device not in given:
                        yield f"pick c{number} {device}", with_claim(world, number, Request(InApi.CHOSEN, device))
            elif claim.api is InApi.CHOSEN:
                yield f"allocate c{number}", changed(world, number, api=InApi.ALLOCATED)
            elif claim.api is InApi.ALLOCATED:
                # In whatever state it is here: a pod may be deleted by force.
                yield f"deallocate c{number}", with_claim(world, number, gone(claim._replace(api=InApi.NONE)))

    def side(self, world: World) -> Iterator[tuple[str, World]]:
        """Answer Allocate, unless a known holder runs; send the list."""
        for number, pod in enumerate(world.pods):
            if pod.at is At.CHOSEN:
                name = NAMES[pod.device]
                known, processes = [*recorded(world), *allocations(world, "file")], self.processes(world)
                if holders.running(known, R, [name], {one.pod_uid for one in known if processes.may_run(one.pod_uid)}):
                    yield f"refuse p{number}", with_pod(world, number, Pod())
                    continue
                wanted = {name: Wanted((R, name), "", WHOLE)}
                answer, after = self.do(world, ("grant", name), partial(operations.grant, R, wanted, ALONE, 0.0))
                then = Pod() if isinstance(answer, Refused | Excluded) else after.pods[number]._replace(at=At.ANSWERED)
                yield f"grant p{number}", with_pod(after, number, then)
        healthy = self.healthy(world)
        if world.sent != healthy:
            yield "send", world._replace(sent=healthy)

    def healthy(self, world: World) -> tuple[bool, bool]:
        """Return what ListAndWatch shows."""
        one, two = (d.state < UNKNOWN and STATES[d.state].healthy for d in world.devices)
        return one, two

    def driver(self, world: World) -> Iterator[tuple[str, World]]:
        """Prepare and unprepare, in the driver's steps; clear up what nobody wants."""
        for number, claim in enumerate(world.claims):
            uid = "01"[number]
            if claim.node is OnNode.NONE and claim.api is InApi.ALLOCATED:
                _, after = self.do(
                    world,
                    ("reserve", uid),
                    partial(operations.reserve, claim_of(uid, claim), ALONE, durable=False, pull=True),
                )
                if after.claims[number].record:
                    yield (
                        f"reserve c{number}",
                        changed(after, number, node=OnNode.RESERVED),
                    )
                elif after != world:
                    yield f"pull c{number}", after
            elif claim.node is OnNode.RESERVED:
                yield f"file c{number}", changed(world, number, node=OnNode.WRITTEN, file=True)
            elif claim.node is OnNode.WRITTEN:
                answer, after = self.do(
                    world, ("prepare", uid), partial(operations.prepare, claim_of(uid, claim), ALONE, pull=True)
                )
                if isinstance(answer, Refused | Excluded):
                    undone = changed(after, number, node=OnNode.NONE, file=False)
                    _, after = self.do(undone, ("unprepare", uid), partial(operations.unprepare, D, uid))
                    yield f"undo c{number}", with_claim(after, number, gone(after.claims[number]))
                else:
                    yield (
                        f"record c{number}",
                        changed(after, number, node=OnNode.PREPARED),
                    )
            elif claim.node is OnNode.ENDED:
                yield f"unfile c{number}", changed(world, number, node=OnNode.REMOVED, file=False)
            elif claim.node is OnNode.REMOVED:
                _, after = self.do(world, ("unprepare", uid), partial(operations.unprepare, D, uid))
                yield (
                    f"unprepare c{number}",
                    with_claim(after, number, gone(after.claims[number]._replace(node=OnNode.NONE))),
                )
            over = claim.api is InApi.NONE and claim.record and claim.node not in UNDONE
            states = [uid] if claim.node in {OnNode.PREPARED, OnNode.ENDED, OnNode.RUNS} else []
            if over and holders.claim_is_over(uid, [f"c{uid}"], states, self.processes(world)):
                cleared = changed(world, number, file=False)
                _, after = self.do(cleared, ("unprepare", uid), partial(operations.unprepare, D, uid))
                yield f"reconcile c{number}", with_claim(after, number, gone(after.claims[number]))
            if claim.node is OnNode.NONE and claim.file and not claim.record:
                yield f"sweep c{number}", with_claim(world, number, gone(claim._replace(file=False)))

    def offering(self, world: World) -> Iterator[tuple[str, World]]:
        """Say what the slice is to be; have it accepted."""
        want = self.wanted(world)
        if world.want != want:
            yield "want", world._replace(want=want)
        if world.want and world.slice != world.want:
            yield "accept", world._replace(slice=world.want)

    def wanted(self, world: World) -> tuple[bool, bool]:
        """Return what the slice is to be."""
        one, two = (d.state < UNKNOWN and STATES[d.state].offered for d in world.devices)
        return one, two

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Begin a move, or turn one round."""
        for name in self.names:
            for side in Side:
                answer, after = self.do(
                    world, ("move", name, side), partial(operations.begin_move, R, [name], side, 0.0, driver=D)
                )
                if answer:
                    yield f"begin {name} {side.value}", after

    def gathering(self, world: World) -> Iterator[tuple[str, World]]:
        """The handover's steps, one after the other."""
        stage = world.stage
        if stage.step is Step.NONE:
            if world.sent:
                moving = MINE.in_state(snapshot(world), R, State.TO_DRA)
                shown = shown_unhealthy(moving, (1.0, frozenset(names(world.sent))), str)
                if shown or not moving:
                    yield "request", at_stage(world, Stage(Step.REQUESTED, flags(shown)))
            now = snapshot(world)
            moving = MINE.in_state(now, R, State.TO_PLUGIN)
            if free := [name for name in moving if not now.claims_on(R, (name,))]:
                yield "withdrawn", self.withdrawn(world, moving, free)
        elif stage.step is Step.REQUESTED:
            pods = [pod._replace(seen=2 * pod.file) for pod in world.pods]
            read = world._replace(pods=(pods[0], pods[1]))
            one, two = (received and moved for received, moved in zip(world.received, stage.moving, strict=True))
            stage = stage._replace(step=Step.READ, first=(one, two))
            if self.slow and stage.written and not holders.shows_present([ANY_FILE]):
                stage = stage._replace(step=Step.READ_FIRST, written=False)
            yield "read checkpoint", at_stage(read, stage)
        elif stage.step is Step.READ_FIRST:
            pods = [pod._replace(seen=(pod.seen + 2 * pod.file) // 2) for pod in world.pods]
            yield "read another", at_stage(world._replace(pods=(pods[0], pods[1])), stage._replace(step=Step.READ))
        elif stage.step is Step.READ:
            scan = self.scanned(world)
            seen = kubelet_snapshot(BEGUN, scan, R, str)
            asked = ("observe", scan.at, scan.current, *scan.held.items())
            _, after = self.do(world, asked, partial(operations.observe, R, seen, 0.0))
            held = {one.pod_uid for one in scan.held}
            pods = [
                kept(pod._replace(seen=2 * (str(uid) in held and stage.moving[pod.device])))
                for uid, pod in enumerate(after.pods)
            ]
            after = after._replace(pods=(pods[0], pods[1]))
            goes_on = scan.current and stage.moving != NOTHING
            yield (
                "observe",
                at_stage(after, stage._replace(step=Step.OBSERVED, written=True, late=False) if goes_on else IDLE),
            )
        elif stage.step is Step.OBSERVED:
            moving = names(stage.moving)
            still = dict.fromkeys(allocations(world, "seen"), holders.HoldReason(named=True, certain=True, reason=""))
            scan = HolderSnapshot(RECENT, True, still, {R: frozenset(names(stage.first))})
            seen = kubelet_snapshot(BEGUN, scan, R, str)
            evidence = KubeletEvidence(BEGUN, dict.fromkeys(moving, SHOWN), seen)
            _, after = self.do(
                world, ("to dra", stage, *still), partial(operations.commit_to_dra, R, moving, evidence, 0.0)
            )
            yield "commit to dra", at_stage(after, IDLE)
        elif stage.step is Step.WITHDRAWN:
            yield "list claims", at_stage(world, stage._replace(step=Step.LISTED, second=flags(self.allocated(world))))
        else:
            withdrawn = names(stage.first)
            allocated = dict.fromkeys(names(stage.second), "default/c")
            proof = ClusterEvidence(BEGUN, dict.fromkeys(withdrawn, 1.0), 2.0, allocated)
            _, after = self.do(
                world, ("to plugin", stage), partial(operations.commit_to_plugin, R, withdrawn, proof, 0.0)
            )
            yield "commit to plugin", at_stage(after, IDLE)

    def withdrawn(self, world: World, moving: Collection[str], free: Collection[str]) -> World:
        """Go on if the API server has taken the slice that the agent wants, without the devices."""
        taken = bool(world.want) and world.want == world.slice
        accepted = [name for name in free if taken and not world.slice[int(name)]]
        return at_stage(world, Stage(Step.WITHDRAWN, flags(moving), first=flags(accepted))) if accepted else world

    def allocated(self, world: World) -> Mapping[str, str]:
        """Return what a list of claims says now."""
        return {NAMES[claim.device]: "default/c" for claim in world.claims if claim.api is InApi.ALLOCATED}

    def processes(self, world: World) -> PodProcesses:
        """Return of which pods processes run; pods of claims are named after these."""
        running = {str(uid) for uid, pod in enumerate(world.pods) if pod.runs}
        running |= {f"c{uid}" for uid, claim in enumerate(world.claims) if claim.node.container_runs}
        return PodProcesses(frozenset(running)) if self.cgroups else PodProcesses(directories=frozenset(running))

    def scanned(self, world: World) -> HolderSnapshot:
        """Return what a scan comes to: the checkpoint as it was read, the processes as of now."""
        stage = world.stage
        registered = {R: frozenset(names(stage.first))}
        checkpoints = [
            CheckpointVersion(
                frozenset(one for one in allocations(world, "seen") if seen_in(world, one) >= count), registered
            )
            for count in (1, 2)
        ]
        seen = HolderEvidence(checkpoints, stage.written, self.processes(world))
        return holders.holders(recorded(world), seen, OLD if stage.late else RECENT)

    # What befalls them.

    def fate(self, world: World) -> Iterator[tuple[str, World]]:
        """Time passes; somebody dies."""
        if any(d.absent == 1 for d in world.devices) and not any(pod.unlisted for pod in world.pods):
            devices = tuple(d._replace(absent=2 if d.absent else 0) for d in world.devices)
            late = world.stage._replace(late=world.stage.step in {Step.REQUESTED, Step.READ, Step.READ_FIRST})
            yield "tick", world._replace(devices=devices, stage=late)
        if not self.crashes:
            return
        after = restarted(world)
        if after != world:
            yield "kubelet restarts", after
        if world.alive:
            yield "agent dies", died(world)
            if self.damage and not world.damaged and not any(pod.forgotten for pod in world.pods):
                dead = died(world)
                lost = tuple(claim._replace(record=InLedger.NONE) for claim in dead.claims)
                one, two = (kept(pod._replace(recorded=False)) for pod in dead.pods)
                yield (
                    "agent dies, ledger lost",
                    dead._replace(
                        devices=(Device(UNKNOWN), Device(UNKNOWN)), pods=(one, two), claims=lost, damaged=True
                    ),
                )
        elif not (world.damaged and any(pod.unlisted for pod in world.pods)):
            yield "agent starts", self.started(world)

    def started(self, world: World) -> World:
        """Compare the ledger with what is held, by a checkpoint written at the agent's request."""
        world = self.filed(world, *(pod.memory for pod in world.pods))
        checkpoint = CheckpointVersion(frozenset(allocations(world, "file")), {})
        now = holders.holders(recorded(world), HolderEvidence([checkpoint], True, self.processes(world)), RECENT)
        held = kubelet_snapshot(0, now, R, str).held
        fresh = all(device.state == UNKNOWN for device in world.devices)
        claims = [
            ClaimEvidence(D, uid, frozenset({NAMES[claim.device]}), prepared=claim.file)
            for uid, claim in zip("01", world.claims, strict=True)
            if (claim.file and not claim.record) or (fresh and claim.api is InApi.ALLOCATED and not claim.file)
        ]
        _, after = self.do(
            world,
            ("reconcile", *now.held.items(), *((claim.uid, claim.prepared) for claim in claims)),
            partial(
                operations.reconcile_evidence, R, Evidence(held, claims, now.current), self.names, Side.PLUGIN, 0.0, D
            ),
        )
        return after._replace(alive=True)

    # What must never be, and what must come.

    def wrong(self, world: World) -> str:
        """Say what is wrong with a world; "" if nothing is."""
        if problem := self.doubled(world):
            return problem
        for device in range(len(self.names)):
            if not world.damaged:
                if (world.received[device] or (world.sent and world.sent[device])) and world.slice[device]:
                    return f"device {device} is offered on both sides"
                if STATES[world.devices[device].state] is State.QUARANTINED:
                    return f"device {device} is quarantined without a reason"
        return ""

    def doubled(self, world: World) -> str:
        """Say which device containers of two holders have at the same time; "" if there is none."""
        for device in range(len(self.names)):
            running = sum(pod.runs and pod.device == device for pod in world.pods)
            running += sum(claim.node.container_runs and claim.device == device for claim in world.claims)
            if running > 1:
                return f"device {device} has {running} holders"
        return ""

    def through_both(self, world: World) -> str:
        """Say which device a pod and a claim hold at the same time; "" if there is none."""
        given = {pod.device for pod in world.pods if pod.runs}
        given &= {claim.device for claim in world.claims if claim.node.container_runs}
        return f"device {min(given)} is held on both sides" if given else ""

    def ending(self, world: World, *, serve: bool = False) -> Iterator[World]:
        """Return what comes next until all has ended that was begun, whatever share is asked for.

        serve: claims that are allocated stay, and the kubelet tries to prepare them.
        """
        if not world.alive:
            pods = (pod._replace(at=At.ADMITTED, memory=True) if pod.at is At.ANSWERED else pod for pod in world.pods)
            one, two = pods
            yield self.started(world._replace(pods=(one, two)))
            return
        stays = {f"c{number}" for number, claim in enumerate(world.claims) if serve and claim.api is InApi.ALLOCATED}
        steps = [*self.kubelet(world), *self.scheduler(world), *self.side(world), *self.offering(world)]
        steps += self.driver(world)
        for what, after in steps:
            word, who, *_ = *what.split(), ""
            if word in {"end", "deallocate"} and who in stays:
                continue
            if word in {"choose", "pick", "delete", "lose", "draft"}:
                continue
            if word in {"reserve", "pull"} and who not in stays:
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
        in_use, expected = (frozenset(name for _, name in keys) for keys in held_and_expected(now))
        states = {name: record.state for name, record in now.of(R).items()}
        wish = plan(states, in_use, share, "cordon", (), expected)
        for devices, side in ((wish.to_dra, Side.DRA), (wish.to_plugin, Side.PLUGIN)):
            if devices:
                yield self.do(
                    world, ("moves", devices, side), partial(operations.begin_move, R, devices, side, 0.0, driver=D)
                )[1]
        yield from (after for what, after in self.fate(world) if what == "tick")
        yield from (after for what, after in self.gathering(world) if what == "withdrawn" and after != world)
        held = any(device.pending or device.state == STATES.index(State.TO_DRA) for device in world.devices)
        if held or any(pod.recorded for pod in world.pods):
            yield from (after for what, after in self.gathering(world) if what == "request")
        if any(device.state == STATES.index(State.QUARANTINED) for device in world.devices):
            yield self.started(world)

    def lost(self, world: World, share: Share) -> str:
        """Say what is lost for ever when all is calm; "" if nothing is."""
        for device in range(len(self.names)):
            plugin, dra = world.received[device], world.slice[device]
            if plugin == dra:
                return f"device {device} is offered on {'both sides' if plugin else 'no side'}"
        if world.slice.count(True) != share.of(len(self.names)):
            return f"the share is {share}, but the slice has {world.slice}"
        return ""

    def unserved(self, world: World) -> str:
        """Say which claim waits for ever for a device that nobody has; "" if none does."""
        for number, claim in enumerate(world.claims):
            if claim.api is InApi.ALLOCATED and claim.node not in {OnNode.PREPARED, OnNode.RUNS, OnNode.FORGOTTEN}:
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
    devices = tuple(d._replace(new=False, fresh=False, absent=0) for d in world.devices)
    one, two = (kept(pod._replace(seen=0)) for pod in world.pods)
    claims = []
    for claim in world.claims:
        record = InLedger.NONE if claim.record is InLedger.IN_MEMORY else claim.record
        node = UNDONE.get(claim.node, claim.node)
        claims.append(gone(claim._replace(record=record, node=node)))
    return world._replace(
        devices=devices,
        pods=(one, two),
        claims=tuple(claims),
        sent=(),
        received=NOTHING,
        want=(),
        stage=IDLE,
        alive=False,
    )


def restarted(world: World) -> World:
    """Return the world after the kubelet was restarted: it knows what its checkpoint names."""
    pods = []
    for pod in world.pods:
        after = pod._replace(memory=pod.file, draft=False)
        if pod.at in {At.CHOSEN, At.ANSWERED} or (pod.at is At.ADMITTED and not pod.file):
            after = after._replace(at=At.OVER)
        pods.append(kept(after))
    return world._replace(pods=(pods[0], pods[1]), sent=(), received=NOTHING, writing=False)


def drafted(world: World, *names: bool) -> World:
    """Return the world with a writer that has made up a checkpoint of these pods; with none if there are no names."""
    one, two = (kept(pod._replace(draft=name)) for pod, name in zip(world.pods, names or (False, False), strict=True))
    return world._replace(pods=(one, two), writing=bool(names))


def allocations(world: World, of: str) -> list[Allocation]:
    """Return the allocations of the pods of which something is so."""
    return [
        Allocation(str(uid), CONTAINER, R, NAMES[pod.device])
        for uid, pod in enumerate(world.pods)
        if pod.at and getattr(pod, of)
    ]


def seen_in(world: World, allocation: Allocation) -> int:
    """Return in how many of the checkpoints an allocation was seen."""
    return world.pods[int(allocation.pod_uid)].seen


def recorded(world: World) -> list[Allocation]:
    """Return the allocations that the ledger knows; the tracker counts them as held."""
    return allocations(world, "recorded")


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


def changed(world: World, number: int, **fields: Any) -> World:
    """Return the world with other fields of a claim."""
    return with_claim(world, number, world.claims[number]._replace(**fields))


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
        swap(world.received),
        swap(world.want) if world.want else (),
        swap(world.slice),
        Stage(
            stage.step,
            swap(stage.moving),
            swap(stage.first),
            swap(stage.second),
            stage.written,
            stage.late,
        ),
        world.alive,
        world.damaged,
        world.writing,
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
    """Visit all worlds, breadth first, until `most` are known or the time is over.

    wrong: what must not be, `Small.wrong` unless given. traced: remember the way to each world,
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
