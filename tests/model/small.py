"""A model of a node with two devices, two pods and two claims, small enough to visit all its states.

A state is a tuple of small numbers. `Small.successors` returns all states that one step leads to: a step of the
kubelet, the scheduler, the API server or the agent, a crash, or time that passes. Whatever can be late is a step of its
own, so that every other step can come in between. The agent's part is the product's code: the ledger's operations, the
decision which pod or claim holds a device (`deviceplugin.kubelet.holders`), and the plan of moves between limits and
claims with the evidence that a move needs. Only disk and sockets are missing.

Faults are steps too: the kubelet restarts with the contents of its checkpoint; the checkpoint is lost or torn (a scan
then waits for the next one); a pod is deleted by force while its container runs, and the kubelet gives its device to
another pod; the kubelet forgets a prepared claim whose container runs. An ended pod stays in the checkpoint until the
kubelet has forgotten the pod and then written the file. The kubelet may forget a pod late at any time, which covers a
kubelet that forgets no pod before its sources are ready.

The holder of a device is the pod or claim whose container runs.

Assumptions of the model:
- The kubelet records an answered Allocate within the time that a grant without a pod is kept (`tick`), or dies.
- The kubelet gives a device that it counts as allocated to no second pod; the scheduler gives a device to one
  claim at a time.
- A pod that ends or is deleted before it has a cgroup never starts, nor does a pod whose allocation the kubelet
  lost before that.
- A scan has recorded a pod as a holder before the pod is deleted by force, and before the checkpoint that names it
  is lost (`Pod.recorded`). Until then only the checkpoint names the holder of the device.
- The ledger is not lost while a container runs that the kubelet, or its checkpoint, has forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

from deviceplugin.identity import UNIDENTIFIED
from deviceplugin.kubelet import checkpoint, holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, kubelet_snapshot
from deviceplugin.kubelet.pod_evidence import HIDDEN, PodsShown
from deviceplugin.register import operations
from deviceplugin.register.question import View, Wanted
from deviceplugin.register.records import (
    WHOLE,
    Allocation,
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
"""A `View` without any facts: a decision depends on the register's own records alone."""
CONTAINER: Final = "c"
VISIBLE: Final = frozenset({"kubepods"})
SHOWN, OLD, RECENT = 1.0, 1000.0, 2000.0
BEGUN, FORMER, LATER, NOW = 2, 1, 9, 10
"""Sequence numbers of the ledger: FORMER is before the agent begins to look for holders (BEGUN), LATER after that."""


class Device(NamedTuple):
    """A device in the ledger: its record, and its allocation record without the holders.

    new: the record has changed since the agent began to gather evidence. fresh: the device was granted since then.
    pending: the grant's container is not known yet. absent: 1 if a scan found no container, 2 if that was long ago.
    """

    state: int
    new: bool = False
    for_claim: bool = False
    pending: bool = False
    fresh: bool = False
    absent: int = 0


class At(IntEnum):
    """How far the start of a pod is, in this order.

    No pod, the kubelet chose a device, Allocate was granted, the device manager has the pod in memory, a process of the
    pod runs (also after the pod was deleted by force), the pod has ended.
    """

    NONE, CHOSEN, ANSWERED, ADMITTED, RUNS, OVER = range(6)


class InApi(IntEnum):
    """A claim on the API server: no claim, the scheduler chose a device, the claim is allocated."""

    NONE, CHOSEN, ALLOCATED = range(3)


class OnNode(IntEnum):
    """The state of a claim on the node, in this order.

    None, reserved in the ledger, its file written, prepared, its container ended, its file removed, granted with its
    answer and without a file (if no hook sets devices up), its container runs, its container runs and the kubelet's
    claim state does not name the claim.
    """

    NONE, RESERVED, WRITTEN, PREPARED, ENDED, REMOVED, GRANTED, RUNS, FORGOTTEN = range(9)

    @property
    def container_runs(self) -> bool:
        """Whether a container of the claim runs."""
        return self >= OnNode.RUNS


class InLedger(IntEnum):
    """A claim in the ledger: absent, reserved in memory, reserved on disk, prepared."""

    NONE, IN_MEMORY, ON_DISK, PREPARED = range(4)


class Step(IntEnum):
    """How far the agent is in gathering evidence about holders, which it needs before it moves devices.

    For moves to DRA: a checkpoint is requested, the last one was read, the first one was read and another requested
    (only if a write may be late), the ledger has the result. For moves to the plugin: the API server has accepted the
    slice without the devices, claims are listed.
    """

    NONE, REQUESTED, READ, READ_FIRST, OBSERVED, WITHDRAWN, LISTED = range(7)


class Pod(NamedTuple):
    """A pod with a limit of one device, as long as the kubelet, the checkpoint or the ledger names it.

    memory, file: the kubelet's device manager and its checkpoint name the pod. recorded: the pod is a holder in the
    ledger. seen: checkpoints that a scan has read name the pod: 1 some of them, 2 all of them; after the scan, the pod
    counts as a holder. draft: a checkpoint that a slow writer is about to write names the pod. elsewhere: the pod's
    processes are in no cgroup that the agent sees.
    """

    at: At = At.NONE
    device: int = -1
    memory: bool = False
    file: bool = False
    recorded: bool = False
    seen: int = 0
    draft: bool = False
    elsewhere: bool = False

    @property
    def runs(self) -> bool:
        """Whether a process of the pod runs."""
        return self.at == At.RUNS

    @property
    def unrecorded(self) -> bool:
        """Whether the pod may run without being a holder in the ledger."""
        return self.at in {At.ADMITTED, At.RUNS} and not self.recorded

    @property
    def forgotten(self) -> bool:
        """Whether the pod may run although the kubelet's memory or its checkpoint does not name it."""
        return self.at in {At.ADMITTED, At.RUNS} and not (self.memory and self.file)

    @property
    def unlisted(self) -> bool:
        """Whether the pod was granted its device, and neither checkpoint nor ledger names the pod yet."""
        return self.at == At.ANSWERED or (self.at == At.ADMITTED and not (self.file or self.recorded))


class Request(NamedTuple):
    """A claim: its state in the API, its device, its state on the node, whether it has a file, and its ledger state."""

    api: InApi = InApi.NONE
    device: int = -1
    node: OnNode = OnNode.NONE
    file: bool = False
    record: InLedger = InLedger.NONE


class Stage(NamedTuple):
    """How far the agent is in gathering evidence about holders, and what evidence it has.

    moving: the moving devices; of devices in TO_DRA only the ones that are shown Unhealthy. written: the kubelet has
    written its checkpoint since the request. late: the scan began long ago. The other fields are sets of devices, each
    as a pair of flags.
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
"""The steps of a scan, and the steps at which a scan waits for the kubelet to write its checkpoint."""
UNDONE: Final = {
    OnNode.RESERVED: OnNode.NONE,
    OnNode.WRITTEN: OnNode.NONE,
    OnNode.GRANTED: OnNode.NONE,
    OnNode.REMOVED: OnNode.ENDED,
}
"""Where a claim is on the node after the agent was killed in the middle of a call."""


class SystemState(NamedTuple):
    """The state of the whole system.

    sent: the healthy devices of the agent's last list, () without a listener. received: the healthy devices that the
    kubelet knows. want: the devices in the slice that the agent wants, () before the agent has decided. slice: the
    devices in the slice of the API server. writing: a slow writer of the checkpoint is at work.
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


def start(*states: State) -> SystemState:
    """Return the state of a node on which nothing has happened, with devices in these states."""
    one, *more = (Device(STATES.index(state)) for state in states)
    return SystemState(
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


# Conversion between states and the ledger's records.


def snapshot(system: SystemState) -> RegisterSnapshot:
    """Return the ledger of a state as a snapshot of the register."""
    devices: dict[tuple[str, str], DeviceRecord] = {}
    held: list[tuple[str, tuple[str, str], Record]] = []
    for name, device in zip(NAMES, system.devices, strict=True):
        if device.state < len(STATES):
            sequence = LATER if device.new else FORMER
            state = STATES[device.state]
            driver = "" if state is State.PLUGIN else D
            devices[R, name] = DeviceRecord(R, name, state, 0.0, sequence, driver=driver, for_claim=device.for_claim)
        recorded = frozenset(
            (str(uid), CONTAINER) for uid, pod in enumerate(system.pods) if pod.recorded and NAMES[pod.device] == name
        )
        if recorded or device.pending:
            absent = (None, RECENT, OLD)[device.absent]
            sequence = LATER if device.fresh else FORMER
            one = AllocationRecord(R, name, name, 0.0, sequence, recorded, device.pending, absent, amount=WHOLE)
            held.append(("allocations", (R, name), one))
    for uid, claim in zip("01", system.claims, strict=True):
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


def written(system: SystemState, now: RegisterSnapshot) -> SystemState:
    """Return the state with the contents of the ledger replaced by `now`."""
    scanning = system.stage.step in SCAN
    devices = []
    for name, moving in zip(NAMES, system.stage.moving, strict=True):
        record, hold = now.devices.get((R, name)), now.allocations.get((R, name))
        device = Device(UNKNOWN)
        if record is not None:
            device = Device(STATES.index(record.state), moving and record.sequence > FORMER, record.moves_for_claim)
        if hold is not None:
            absent = {None: 0, RECENT: 1, OLD: 2}[hold.absent_since] if hold.pending else 0
            fresh = scanning and hold.sequence > FORMER
            device = device._replace(pending=hold.pending, fresh=fresh, absent=absent)
        devices.append(device)
    pods = [pod._replace(recorded=named(now, str(uid), pod)) for uid, pod in enumerate(system.pods)]
    claims = []
    for uid, claim in zip("01", system.claims, strict=True):
        claims.append(claim._replace(record=in_ledger(now.claims.get((D, uid)))))
    return system._replace(devices=tuple(devices), pods=(pods[0], pods[1]), claims=tuple(claims))


def in_ledger(claim: Claim | None) -> InLedger:
    """Return whether the ledger's claim is reserved in memory, reserved on disk or prepared; NONE without a claim."""
    if claim is None:
        return InLedger.NONE
    if claim.result is not None:
        return InLedger.PREPARED
    return InLedger.ON_DISK if claim.durable else InLedger.IN_MEMORY


def named(now: RegisterSnapshot, uid: str, pod: Pod) -> bool:
    """Return whether the ledger names a pod as a holder; in a mutation a holder has no pod UID."""
    hold = now.allocations.get((R, NAMES[pod.device])) if pod.at else None
    return hold is not None and not hold.holders.isdisjoint({(uid, CONTAINER), ("", CONTAINER)})


def kept(pod: Pod) -> Pod:
    """Return the pod, or an empty one if the pod has ended and neither kubelet, checkpoint nor ledger names it."""
    return Pod() if pod.at is At.OVER and not any(pod[2:-1]) else pod


def flags(names: object) -> tuple[bool, bool]:
    """Return a set of devices' names as a pair of flags, one for each device."""
    return "0" in names, "1" in names  # type: ignore[operator]


def names(pair: tuple[bool, bool]) -> tuple[str, ...]:
    """Return the names of the devices whose flags are true."""
    return tuple(name for name, there in zip(NAMES, pair, strict=True) if there)


def at_stage(system: SystemState, stage: Stage) -> SystemState:
    """Return the state at another stage; marks from an earlier search for evidence about holders are cleared."""
    begins = stage.step in {Step.NONE, Step.REQUESTED, Step.WITHDRAWN}
    has_read = stage.step in {Step.READ, Step.READ_FIRST, Step.OBSERVED}
    devices = tuple(
        device._replace(new=device.new and not begins, fresh=device.fresh and has_read) for device in system.devices
    )
    one, two = (pod if has_read else kept(pod._replace(seen=0)) for pod in system.pods)
    return system._replace(stage=stage, devices=devices, pods=(one, two))


ANY_FILE: Final = CheckpointVersion(frozenset(), {})
"""A checkpoint without resources, which the kubelet may have written late."""
FAULTS: Final = frozenset({"force", "lose", "claims"})
"""Faults: pods deleted by force, the checkpoint lost, the kubelet's claim state lost."""


class Small:
    """The steps of the small node of this module, and its possible faults.

    crashes: kubelet and agent may die. damage: the ledger may be lost. faults: see `FAULTS`. turns: moves may begin or
    be reversed while evidence is gathered, though the real agent does one after the other. cgroups: the cgroup tree is
    visible. blind: the agent sees the cgroups of only some of the kubelet's pods. slow: the kubelet may write a
    checkpoint whose contents are older than those of a checkpoint already written. reasons: the state has the reason of
    a move, which only the plan of moves uses.
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
        blind: bool = False,
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
        self.blind = blind
        self.slow = slow
        self.reasons = reasons
        self._known: dict[Hashable, tuple[object, SystemState]] = {}

    def do(
        self, system: SystemState, key: Hashable, operation: Callable[[], Operation[object]]
    ) -> tuple[object, SystemState]:
        """Apply an operation of the ledger; the results are cached. key: identifies the operation."""
        holders_known = tuple((pod.device, pod.recorded) for pod in system.pods)
        asked = (system.devices, holders_known, system.claims, system.stage.step, system.stage.moving, key)
        known = self._known.get(asked)
        if known is None:
            now = snapshot(system)
            decision = operation()(now)
            after = system
            if decision.changes:
                after = written(system, now.with_changes(decision.changes, NOW + 1))
                if not self.reasons:
                    after = after._replace(devices=tuple(device._replace(for_claim=False) for device in after.devices))
            if len(self._known) > 300_000:
                self._known.clear()
            known = self._known[asked] = decision.answer, after
        answer, after = known
        if after.devices == system.devices and after.pods == system.pods and after.claims == system.claims:
            return answer, system
        one, two = (
            kept(pod._replace(recorded=then.recorded)) for pod, then in zip(system.pods, after.pods, strict=True)
        )
        return answer, system._replace(devices=after.devices, pods=(one, two), claims=after.claims)

    # All possible steps.

    def successors(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Yield every possible step with the state that it leads to."""
        yield from self.kubelet(system)
        yield from self.scheduler(system)
        if system.alive:
            yield from self.side(system)
            yield from self.driver(system)
            yield from self.offering(system)
            yield from self.gathering(system)
            if self.turns or system.stage == IDLE:
                yield from self.moves(system)
        yield from self.fate(system)

    def kubelet(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Steps of the kubelet: choose devices, record allocations, write checkpoints, run pods, receive the list."""
        taken = {pod.device for pod in system.pods if pod.at in {At.CHOSEN, At.ANSWERED} or pod.memory}
        more = sum(pod.at is not At.NONE for pod in system.pods) < self.pods
        for number, pod in enumerate(system.pods):
            if pod.at is At.NONE:
                for device in TWO if more else ():
                    if system.received[device] and device not in taken:
                        yield f"choose p{number} {device}", with_pod(system, number, Pod(At.CHOSEN, device))
            elif pod.at is At.ANSWERED:
                yield f"insert p{number}", with_pod(system, number, pod._replace(at=At.ADMITTED, memory=True))
            elif pod.at is At.ADMITTED and not pod.unlisted:
                yield f"start p{number}", with_pod(system, number, pod._replace(at=At.RUNS))
                if self.blind:
                    elsewhere = pod._replace(at=At.RUNS, elsewhere=True)
                    yield f"start p{number} elsewhere", with_pod(system, number, elsewhere)
            if pod.at in {At.ADMITTED, At.RUNS}:
                yield f"end p{number}", with_pod(system, number, kept(pod._replace(at=At.OVER, elsewhere=False)))
            if pod.at is At.RUNS and pod.memory and pod.recorded and "force" in self.faults:
                yield f"delete p{number}", with_pod(system, number, pod._replace(memory=False))
            if pod.at is At.OVER and pod.memory:
                yield f"forget p{number}", with_pod(system, number, kept(pod._replace(memory=False)))
        if system.sent and system.received != system.sent:
            yield "receive", system._replace(received=system.sent)
        after = self.filed(system, *(pod.memory for pod in system.pods))
        if after != system:
            yield "write", after
        if self.slow:
            if system.writing:
                yield "write late", drafted(self.filed(system, *(pod.draft for pod in system.pods)))
            else:
                yield "draft", drafted(system, *(pod.memory for pod in system.pods))
        for number, claim in enumerate(system.claims):
            if claim.node is OnNode.PREPARED:
                yield f"start c{number}", changed(system, number, node=OnNode.RUNS)
            if claim.node in {OnNode.PREPARED, OnNode.RUNS}:
                yield f"end c{number}", changed(system, number, node=OnNode.ENDED)
            elif claim.node is OnNode.FORGOTTEN:
                yield f"end c{number}", changed(system, number, node=OnNode.NONE)
            if claim.node in {OnNode.PREPARED, OnNode.RUNS} and "claims" in self.faults:
                yield (
                    f"lose c{number}",
                    with_claim(
                        system,
                        number,
                        claim._replace(node=OnNode.FORGOTTEN if claim.node is OnNode.RUNS else OnNode.NONE),
                    ),
                )
        if "lose" in self.faults and not any(pod.unrecorded for pod in system.pods):
            after = system._replace(
                stage=system.stage._replace(written=system.stage.written and system.stage.step not in WAITING)
            )
            one, two = (kept(pod._replace(file=False)) for pod in system.pods)
            after = after._replace(pods=(one, two))
            if after != system:
                yield "lose checkpoint", after

    def filed(self, system: SystemState, *names: bool) -> SystemState:
        """Return the state with a checkpoint that names these pods."""
        one, two = (kept(pod._replace(file=name)) for pod, name in zip(system.pods, names, strict=True))
        stage = system.stage._replace(written=True) if system.stage.step in WAITING else system.stage
        return system._replace(pods=(one, two), stage=stage)

    def scheduler(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Steps of the scheduler: choose devices from the slice, write allocations however late, deallocate claims."""
        given = {claim.device for claim in system.claims if claim.api}
        more = sum(claim != Request() for claim in system.claims) < self.claims
        for number, claim in enumerate(system.claims):
            if claim.api is InApi.NONE and not claim.node and not claim.file and not claim.record:
                for device in TWO if more else ():
                    if system.slice[device] and device not in given:
                        yield f"pick c{number} {device}", with_claim(system, number, Request(InApi.CHOSEN, device))
            elif claim.api is InApi.CHOSEN:
                yield f"allocate c{number}", changed(system, number, api=InApi.ALLOCATED)
            elif claim.api is InApi.ALLOCATED:
                # In any state of the claim on this node, as a pod may be deleted by force.
                yield f"deallocate c{number}", with_claim(system, number, gone(claim._replace(api=InApi.NONE)))

    def side(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Steps for limits: the agent answers Allocate (refused if a recorded holder may run) and sends the list."""
        for number, pod in enumerate(system.pods):
            if pod.at is At.CHOSEN:
                name = NAMES[pod.device]
                known, processes = [*recorded(system), *allocations(system, "file")], self.processes(system)
                if holders.running(known, R, [name], {one.pod_uid for one in known if processes.may_run(one.pod_uid)}):
                    yield f"refuse p{number}", with_pod(system, number, Pod())
                    continue
                wanted = {name: Wanted((R, name), UNIDENTIFIED, WHOLE)}
                answer, after = self.do(system, ("grant", name), partial(operations.grant, R, wanted, ALONE, 0.0))
                then = Pod() if isinstance(answer, Refused | Excluded) else after.pods[number]._replace(at=At.ANSWERED)
                yield f"grant p{number}", with_pod(after, number, then)
        healthy = self.healthy(system)
        if system.sent != healthy:
            yield "send", system._replace(sent=healthy)

    def healthy(self, system: SystemState) -> tuple[bool, bool]:
        """Return the devices that ListAndWatch shows as healthy."""
        one, two = (d.state < UNKNOWN and STATES[d.state].healthy for d in system.devices)
        return one, two

    def driver(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Steps of the DRA driver: prepare and unprepare claims, and remove ended claims and their files."""
        for number, claim in enumerate(system.claims):
            uid = "01"[number]
            if claim.node is OnNode.NONE and claim.api is InApi.ALLOCATED:
                _, after = self.do(
                    system,
                    ("reserve", uid),
                    partial(operations.reserve, claim_of(uid, claim), ALONE, durable=False, move_idle=True),
                )
                if after.claims[number].record:
                    yield (
                        f"reserve c{number}",
                        changed(after, number, node=OnNode.RESERVED),
                    )
                elif after != system:
                    yield f"move_idle c{number}", after
                if not claim.record:
                    grant = partial(operations.prepare, claim_of(uid, claim), ALONE, move_idle=True)
                    _, after = self.do(system, ("prepare", uid), grant)
                    if after.claims[number].record:
                        yield f"grant c{number}", changed(after, number, node=OnNode.GRANTED)
            elif claim.node is OnNode.GRANTED:
                yield f"file c{number}", changed(system, number, node=OnNode.PREPARED, file=True)
            elif claim.node is OnNode.RESERVED:
                yield f"file c{number}", changed(system, number, node=OnNode.WRITTEN, file=True)
            elif claim.node is OnNode.WRITTEN:
                answer, after = self.do(
                    system, ("prepare", uid), partial(operations.prepare, claim_of(uid, claim), ALONE, move_idle=True)
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
                yield f"unfile c{number}", changed(system, number, node=OnNode.REMOVED, file=False)
            elif claim.node is OnNode.REMOVED:
                _, after = self.do(system, ("unprepare", uid), partial(operations.unprepare, D, uid))
                yield (
                    f"unprepare c{number}",
                    with_claim(after, number, gone(after.claims[number]._replace(node=OnNode.NONE))),
                )
            over = claim.api is InApi.NONE and claim.record and claim.node not in UNDONE
            states = [uid] if claim.node in {OnNode.PREPARED, OnNode.ENDED, OnNode.RUNS} else []
            if over and holders.claim_is_over(uid, [f"c{uid}"], states, self.processes(system)):
                cleared = changed(system, number, file=False)
                _, after = self.do(cleared, ("unprepare", uid), partial(operations.unprepare, D, uid))
                yield f"reconcile c{number}", with_claim(after, number, gone(after.claims[number]))
            if claim.node is OnNode.NONE and claim.file and not claim.record:
                yield f"sweep c{number}", with_claim(system, number, gone(claim._replace(file=False)))

    def offering(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Steps with the slice: the agent decides on its contents, and the API server accepts it."""
        want = self.wanted(system)
        if system.want != want:
            yield "want", system._replace(want=want)
        if system.want and system.slice != system.want:
            yield "accept", system._replace(slice=system.want)

    def wanted(self, system: SystemState) -> tuple[bool, bool]:
        """Return the devices that the agent wants in the slice."""
        one, two = (d.state < UNKNOWN and STATES[d.state].offered for d in system.devices)
        return one, two

    def moves(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Begin or reverse a move of a device between limits and claims."""
        for name in self.names:
            for side in Side:
                answer, after = self.do(
                    system, ("move", name, side), partial(operations.begin_move, R, [name], side, 0.0, driver=D)
                )
                if answer:
                    yield f"begin {name} {side.value}", after

    def gathering(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """The agent's steps, one after the other, to gather evidence about holders and to complete moves of devices."""
        stage = system.stage
        if stage.step is Step.NONE:
            if system.sent:
                moving = MINE.in_state(snapshot(system), R, State.TO_DRA)
                shown = shown_unhealthy(moving, (1.0, frozenset(names(system.sent))), str)
                if shown or not moving:
                    yield "request", at_stage(system, Stage(Step.REQUESTED, flags(shown)))
            now = snapshot(system)
            moving = MINE.in_state(now, R, State.TO_PLUGIN)
            if free := [name for name in moving if not now.claims_on(R, (name,))]:
                yield "withdrawn", self.withdrawn(system, moving, free)
        elif stage.step is Step.REQUESTED:
            pods = [pod._replace(seen=2 * pod.file) for pod in system.pods]
            read = system._replace(pods=(pods[0], pods[1]))
            one, two = (received and moved for received, moved in zip(system.received, stage.moving, strict=True))
            stage = stage._replace(step=Step.READ, first=(one, two))
            if self.slow and stage.written and not checkpoint.shows_present([ANY_FILE]):
                stage = stage._replace(step=Step.READ_FIRST, written=False)
            yield "read checkpoint", at_stage(read, stage)
        elif stage.step is Step.READ_FIRST:
            pods = [pod._replace(seen=(pod.seen + 2 * pod.file) // 2) for pod in system.pods]
            yield "read another", at_stage(system._replace(pods=(pods[0], pods[1])), stage._replace(step=Step.READ))
        elif stage.step is Step.READ:
            scan = self.scanned(system)
            seen = kubelet_snapshot(BEGUN, scan, R, str)
            asked = ("observe", scan.at, scan.current, *scan.held.items())
            _, after = self.do(system, asked, partial(operations.observe, R, seen, 0.0))
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
            still = dict.fromkeys(allocations(system, "seen"), holders.HoldReason(named=True, certain=True, reason=""))
            scan = HolderSnapshot(RECENT, True, still, {R: frozenset(names(stage.first))})
            seen = kubelet_snapshot(BEGUN, scan, R, str)
            evidence = KubeletEvidence(BEGUN, dict.fromkeys(moving, SHOWN), seen)
            _, after = self.do(
                system, ("to dra", stage, *still), partial(operations.commit_to_dra, R, moving, evidence, 0.0)
            )
            yield "commit to dra", at_stage(after, IDLE)
        elif stage.step is Step.WITHDRAWN:
            yield (
                "list claims",
                at_stage(system, stage._replace(step=Step.LISTED, second=flags(self.allocated(system)))),
            )
        else:
            withdrawn = names(stage.first)
            allocated = dict.fromkeys(names(stage.second), "default/c")
            proof = ClusterEvidence(BEGUN, dict.fromkeys(withdrawn, 1.0), 2.0, allocated)
            _, after = self.do(
                system, ("to plugin", stage), partial(operations.commit_to_plugin, R, withdrawn, proof, 0.0)
            )
            yield "commit to plugin", at_stage(after, IDLE)

    def withdrawn(self, system: SystemState, moving: Collection[str], free: Collection[str]) -> SystemState:
        """Return the state at the next stage if the API server has the slice without the devices, else `system`."""
        taken = bool(system.want) and system.want == system.slice
        accepted = [name for name in free if taken and not system.slice[int(name)]]
        return at_stage(system, Stage(Step.WITHDRAWN, flags(moving), first=flags(accepted))) if accepted else system

    def allocated(self, system: SystemState) -> Mapping[str, str]:
        """Return the devices that a list of claims shows as allocated now."""
        return {NAMES[claim.device]: "default/c" for claim in system.claims if claim.api is InApi.ALLOCATED}

    def processes(self, system: SystemState) -> PodProcesses:
        """Return the pods with processes; the pod of claim N is called cN."""
        running = {str(uid) for uid, pod in enumerate(system.pods) if pod.runs}
        running |= {f"c{uid}" for uid, claim in enumerate(system.claims) if claim.node.container_runs}
        if not self.cgroups:
            return PodProcesses(directories=frozenset(running))
        if not self.blind:
            return PodProcesses(frozenset(running))
        # A scan that has recorded a pod knows whether the pod is in a visible cgroup; of other pods nothing is known.
        pods = {str(uid): pod for uid, pod in enumerate(system.pods)}
        places = {uid: HIDDEN if pod.elsewhere else VISIBLE for uid, pod in pods.items() if pod.recorded}
        there = frozenset(uid for uid in running if uid not in pods or not pods[uid].elsewhere)
        shown = PodsShown(places, directories=True)
        return PodProcesses(there, frozenset(running), visible=dict.fromkeys(VISIBLE, "kubepods"), shown=shown)

    def scanned(self, system: SystemState) -> HolderSnapshot:
        """Return the result of a scan, from the checkpoint as it was read and the processes that run now."""
        stage = system.stage
        registered = {R: frozenset(names(stage.first))}
        checkpoints = [
            CheckpointVersion(
                frozenset(one for one in allocations(system, "seen") if seen_in(system, one) >= count), registered
            )
            for count in (1, 2)
        ]
        seen = HolderEvidence(checkpoints, stage.written, self.processes(system))
        return holders.holders(recorded(system), seen, OLD if stage.late else RECENT)

    # Crashes and time.

    def fate(self, system: SystemState) -> Iterator[tuple[str, SystemState]]:
        """Time passes, the kubelet restarts, or the agent dies or starts."""
        if any(d.absent == 1 for d in system.devices) and not any(pod.unlisted for pod in system.pods):
            devices = tuple(d._replace(absent=2 if d.absent else 0) for d in system.devices)
            late = system.stage._replace(late=system.stage.step in {Step.REQUESTED, Step.READ, Step.READ_FIRST})
            yield "tick", system._replace(devices=devices, stage=late)
        if not self.crashes:
            return
        after = restarted(system)
        if after != system:
            yield "kubelet restarts", after
        if system.alive:
            yield "agent dies", died(system)
            if self.damage and not system.damaged and not any(pod.forgotten for pod in system.pods):
                dead = died(system)
                lost = tuple(claim._replace(record=InLedger.NONE) for claim in dead.claims)
                one, two = (kept(pod._replace(recorded=False)) for pod in dead.pods)
                yield (
                    "agent dies, ledger lost",
                    dead._replace(
                        devices=(Device(UNKNOWN), Device(UNKNOWN)), pods=(one, two), claims=lost, damaged=True
                    ),
                )
        elif not (system.damaged and any(pod.unlisted for pod in system.pods)):
            yield "agent starts", self.started(system)

    def started(self, system: SystemState) -> SystemState:
        """Start the agent: it compares the ledger with the holders in a checkpoint that was written at its request."""
        system = self.filed(system, *(pod.memory for pod in system.pods))
        checkpoint = CheckpointVersion(frozenset(allocations(system, "file")), {})
        now = holders.holders(recorded(system), HolderEvidence([checkpoint], True, self.processes(system)), RECENT)
        held = kubelet_snapshot(0, now, R, str).held
        fresh = all(device.state == UNKNOWN for device in system.devices)
        claims = [
            ClaimEvidence(D, uid, frozenset({NAMES[claim.device]}), prepared=claim.file)
            for uid, claim in zip("01", system.claims, strict=True)
            if (claim.file and not claim.record) or (fresh and claim.api is InApi.ALLOCATED and not claim.file)
        ]
        _, after = self.do(
            system,
            ("reconcile", *now.held.items(), *((claim.uid, claim.prepared) for claim in claims)),
            partial(
                operations.reconcile_evidence, R, Evidence(held, claims, now.current), self.names, Side.PLUGIN, 0.0, D
            ),
        )
        return after._replace(alive=True)

    # What must never happen, and what must happen in the end.

    def wrong(self, system: SystemState) -> str:
        """Return what is wrong with a state; "" if nothing is."""
        if problem := self.doubled(system):
            return problem
        for device in range(len(self.names)):
            if not system.damaged:
                if (system.received[device] or (system.sent and system.sent[device])) and system.slice[device]:
                    return f"device {device} is offered on both sides"
                if STATES[system.devices[device].state] is State.QUARANTINED:
                    return f"device {device} is quarantined without a reason"
        return ""

    def doubled(self, system: SystemState) -> str:
        """Return which device has two holders with running containers; "" if none has."""
        for device in range(len(self.names)):
            running = sum(pod.runs and pod.device == device for pod in system.pods)
            running += sum(claim.node.container_runs and claim.device == device for claim in system.claims)
            if running > 1:
                return f"device {device} has {running} holders"
        return ""

    def through_both(self, system: SystemState) -> str:
        """Return which device a pod by limits and a claim hold at the same time; "" if there is none."""
        given = {pod.device for pod in system.pods if pod.runs}
        given &= {claim.device for claim in system.claims if claim.node.container_runs}
        return f"device {min(given)} is held on both sides" if given else ""

    def ending(self, system: SystemState, *, serve: bool = False) -> Iterator[SystemState]:
        """Yield the next states while everything that was begun ends, whatever number of devices is to be for claims.

        serve: claims that are allocated stay, and the kubelet tries to prepare them.
        """
        if not system.alive:
            pods = (pod._replace(at=At.ADMITTED, memory=True) if pod.at is At.ANSWERED else pod for pod in system.pods)
            one, two = pods
            yield self.started(system._replace(pods=(one, two)))
            return
        stays = {f"c{number}" for number, claim in enumerate(system.claims) if serve and claim.api is InApi.ALLOCATED}
        steps = [*self.kubelet(system), *self.scheduler(system), *self.side(system), *self.offering(system)]
        steps += self.driver(system)
        for what, after in steps:
            word, who, *_ = *what.split(), ""
            if word in {"end", "deallocate"} and who in stays:
                continue
            if word in {"choose", "pick", "delete", "lose", "draft"}:
                continue
            if word in {"reserve", "move_idle"} and who not in stays:
                continue
            yield after
        if system.stage != IDLE:
            yield from (after for _, after in self.gathering(system))

    def calming(self, system: SystemState, share: Share, *, serve: bool = False) -> Iterator[SystemState]:
        """Yield the next states without crashes and without new pods and claims, the most urgent state first.

        Pods and claims end, and the agent goes on until it has nothing to do.
        """
        yield from self.ending(system, serve=serve)
        if not system.alive:
            return
        now = snapshot(system)
        in_use, expected = (frozenset(name for _, name in keys) for keys in held_and_expected(now))
        states = {name: record.state for name, record in now.of(R).items()}
        wish = plan(states, in_use, share, "cordon", expected=expected)
        for devices, side in ((wish.to_dra, Side.DRA), (wish.to_plugin, Side.PLUGIN)):
            if devices:
                yield self.do(
                    system, ("moves", devices, side), partial(operations.begin_move, R, devices, side, 0.0, driver=D)
                )[1]
        yield from (after for what, after in self.fate(system) if what == "tick")
        yield from (after for what, after in self.gathering(system) if what == "withdrawn" and after != system)
        held = any(device.pending or device.state == STATES.index(State.TO_DRA) for device in system.devices)
        if held or any(pod.recorded for pod in system.pods):
            yield from (after for what, after in self.gathering(system) if what == "request")
        if any(device.state == STATES.index(State.QUARANTINED) for device in system.devices):
            yield self.started(system)

    def lost(self, system: SystemState, share: Share) -> str:
        """Return which device is not offered to limits or claims as requested, in a state at rest; "" if none."""
        for device in range(len(self.names)):
            plugin, dra = system.received[device], system.slice[device]
            if plugin == dra:
                return f"device {device} is offered on {'both sides' if plugin else 'no side'}"
        if system.slice.count(True) != share.of(len(self.names)):
            return f"the share is {share}, but the slice has {system.slice}"
        return ""

    def unserved(self, system: SystemState) -> str:
        """Return which allocated claim is never prepared; "" if there is none."""
        for number, claim in enumerate(system.claims):
            if claim.api is InApi.ALLOCATED and claim.node not in {OnNode.PREPARED, OnNode.RUNS, OnNode.FORGOTTEN}:
                return f"claim {number} is not prepared"
        return ""


class Calm:
    """Checks that each state comes to rest, with all devices offered, for every number of devices for claims."""

    def __init__(self, small: Small) -> None:
        self.small = small
        self._fine: set[tuple[Hashable, ...]] = set()

    def __call__(self, system: SystemState) -> None:
        """Fail if the system never comes to rest from this state, or if a device is not offered then."""
        for count in range(len(self.small.names) + 1):
            for serve in (False, True):
                self._rest(system, Share(count), serve=serve)

    def _rest(self, system: SystemState, share: Share, *, serve: bool) -> None:
        way: list[tuple[Hashable, ...]] = []
        first = system
        alike = len(self.small.names) == 2
        while True:
            here = (hash(canonical(system, alike=alike)), share, serve)
            if here in self._fine:
                break
            assert len(way) < 300, f"{first} never rests"
            way.append(here)
            step = next(self.small.calming(system, share, serve=serve), None)
            if step is None:
                problem = self.small.unserved(system) if serve else self.small.lost(system, share)
                assert not problem, f"{problem}\n{first}\n{system}"
                break
            system = step
        self._fine.update(way)


def died(system: SystemState) -> SystemState:
    """Return the state after the agent was killed: the records on disk and the answers given remain."""
    devices = tuple(d._replace(new=False, fresh=False, absent=0) for d in system.devices)
    one, two = (kept(pod._replace(seen=0)) for pod in system.pods)
    claims = []
    for claim in system.claims:
        record = InLedger.NONE if claim.record is InLedger.IN_MEMORY else claim.record
        node = UNDONE.get(claim.node, claim.node)
        claims.append(gone(claim._replace(record=record, node=node)))
    return system._replace(
        devices=devices,
        pods=(one, two),
        claims=tuple(claims),
        sent=(),
        received=NOTHING,
        want=(),
        stage=IDLE,
        alive=False,
    )


def restarted(system: SystemState) -> SystemState:
    """Return the state after a restart of the kubelet, which then knows the pods of its checkpoint."""
    pods = []
    for pod in system.pods:
        after = pod._replace(memory=pod.file, draft=False)
        if pod.at in {At.CHOSEN, At.ANSWERED} or (pod.at is At.ADMITTED and not pod.file):
            after = after._replace(at=At.OVER)
        pods.append(kept(after))
    return system._replace(pods=(pods[0], pods[1]), sent=(), received=NOTHING, writing=False)


def drafted(system: SystemState, *names: bool) -> SystemState:
    """Return the state with a slow writer whose checkpoint names these pods, or without a slow writer."""
    one, two = (kept(pod._replace(draft=name)) for pod, name in zip(system.pods, names or (False, False), strict=True))
    return system._replace(pods=(one, two), writing=bool(names))


def allocations(system: SystemState, of: str) -> list[Allocation]:
    """Return the allocations of the pods for which the field `of` is set."""
    return [
        Allocation(str(uid), CONTAINER, R, NAMES[pod.device])
        for uid, pod in enumerate(system.pods)
        if pod.at and getattr(pod, of)
    ]


def seen_in(system: SystemState, allocation: Allocation) -> int:
    """Return in how many of the checkpoints an allocation was seen."""
    return system.pods[int(allocation.pod_uid)].seen


def recorded(system: SystemState) -> list[Allocation]:
    """Return the allocations that the ledger has, which a scan counts as held unless evidence shows their end."""
    return allocations(system, "recorded")


def with_pod(system: SystemState, number: int, pod: Pod) -> SystemState:
    """Return the state with one pod replaced."""
    pods = list(system.pods)
    pods[number] = pod
    return system._replace(pods=(pods[0], pods[1]))


def with_claim(system: SystemState, number: int, claim: Request) -> SystemState:
    """Return the state with one claim replaced."""
    claims = list(system.claims)
    claims[number] = claim
    return system._replace(claims=(claims[0], claims[1]))


def changed(system: SystemState, number: int, **fields: Any) -> SystemState:
    """Return the state with these fields of one claim changed."""
    return with_claim(system, number, system.claims[number]._replace(**fields))


def gone(claim: Request) -> Request:
    """Return the claim, or an empty one if the claim is on neither the API server nor the node nor in the ledger."""
    return Request() if not (claim.api or claim.node or claim.file or claim.record) else claim


def canonical(system: SystemState, *, alike: bool = True) -> SystemState:
    """Return the same state for all states that differ only in names: of pods and claims, if alike also of devices."""
    one, two = system.devices
    if one > two and alike:
        return swapped(system)
    pods, claims = system.pods, system.claims
    if pods[0] > pods[1] or claims[0] > claims[1]:
        system = system._replace(pods=tuple(sorted(pods)), claims=tuple(sorted(claims)))
    return min(system, swapped(system)) if alike and one == two else system


def swapped(system: SystemState) -> SystemState:
    """Return the state with its devices' names exchanged."""

    def swap(pair: tuple[bool, bool]) -> tuple[bool, bool]:
        return pair[1], pair[0]

    pods = sorted(pod._replace(device=1 - pod.device) if pod.at else pod for pod in system.pods)
    claims = sorted(c._replace(device=1 - c.device) if c.device >= 0 else c for c in system.claims)
    stage = system.stage
    return SystemState(
        (system.devices[1], system.devices[0]),
        (pods[0], pods[1]),
        (claims[0], claims[1]),
        swap(system.sent) if system.sent else (),
        swap(system.received),
        swap(system.want) if system.want else (),
        swap(system.slice),
        Stage(
            stage.step,
            swap(stage.moving),
            swap(stage.first),
            swap(stage.second),
            stage.written,
            stage.late,
        ),
        system.alive,
        system.damaged,
        system.writing,
    )


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of an exploration. whole: all states were visited. trace: the shortest way to a wrong state."""

    states: int
    depth: int
    whole: bool
    trace: tuple[str, ...] = ()


def explore(
    small: Small,
    first: SystemState,
    *,
    most: int = 10**9,
    seconds: float = 1e9,
    wrong: Callable[[SystemState], str] | None = None,
    visit: Callable[[SystemState], None] = lambda system: None,
    traced: bool = True,
) -> Explored:
    """Visit all states, breadth first, until `most` are known or the time is over.

    wrong: returns what is wrong with a state, `Small.wrong` unless given. traced: remember the way to each state, which
    takes much memory; else each state is remembered by its 64-bit hash.
    """
    wrong = wrong or small.wrong
    until = time.monotonic() + seconds
    alike = len(small.names) == 2
    root = canonical(first, alike=alike)
    parents: dict[SystemState, tuple[SystemState, str]] = {}
    seen = {hash(root)}
    frontier, depth = [root], 0
    while frontier:
        if time.monotonic() > until or len(seen) > most:
            return Explored(len(seen), depth, whole=False)
        depth += 1
        following = []
        for system in frontier:
            for what, after in small.successors(system):
                key = canonical(after, alike=alike)
                number = hash(key)
                if number in seen:
                    continue
                seen.add(number)
                if traced:
                    parents[key] = system, what
                if problem := wrong(key):
                    steps = [problem]
                    at: SystemState | None = key
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
