"""A node at random: the real ledger on its disk, the real evidence and handover, everything else late at will.

What the agent does at the same time are coroutines that the machine takes forward one step at a
time, so that anything may come between any two of them. Who holds a device is judged by what
runs, never by the ledger. What is taken for granted is what `tests.model.small` takes for granted.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import Allocation, CheckpointVersion
from deviceplugin.kubelet.holders import HolderEvidence, HolderSnapshot, kubelet_snapshot
from deviceplugin.register import operations
from deviceplugin.register.records import (
    WHOLE,
    Claim,
    ClaimDevice,
    LedgerError,
    Operation,
    RegisterSnapshot,
    Side,
    State,
)
from deviceplugin.register.rules import ClaimEvidence, Evidence, Excluded, Refused
from deviceplugin.source import DeviceSource
from dra_bridge.handover.moved import Allocated, MovedResource
from dra_bridge.handover.moves import Handover
from dra_bridge.handover.planner import Moving
from dra_bridge.handover.share import Drain, Share
from tests.dra.ledger.samples import DirectLedger
from tests.model.flow import Grants, Served, allocations_of

R: Final = "example.com/fpga"
D: Final = "fpga.example.com"
DEVICES: Final = ("a", "b")
MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the ledger lies: a walk commits thousands of times, and no machine loses its power here."""
AT_LENGTH: Final = os.environ.get("DEVICEPLUGIN_MODEL") == "long"


class Source(DeviceSource):
    """A source that both sides serve."""

    resource = R
    driver = D


class ServerError(Exception):
    """Raised while the API server is away."""


class Pause:
    """A point at which anything else may happen."""

    def __await__(self) -> Generator[None]:
        yield


class SlowLedger:
    """`AsyncLedger` without an event loop: before and after each operation something else may come."""

    def __init__(self, store: DirectLedger) -> None:
        self.ledger = store

    @property
    def snapshot(self) -> RegisterSnapshot:
        return self.ledger.snapshot

    async def do(self, operation: Operation[Any]) -> Any:
        await Pause()
        answer = self.ledger.do(operation)
        await Pause()
        return answer


@dataclass
class Pod:
    """at: chosen (Allocate on its way), answered, admitted, runs, over. memory: the device manager knows it."""

    device: str
    uid: str
    at: str = "chosen"
    memory: bool = False

    @property
    def allocation(self) -> Allocation:
        return Allocation(self.uid, "c", R, self.device)


@dataclass
class Request:
    """A claim.

    node: none, busy (Prepare or Unprepare at work), prepared, runs, stopped (container gone). named: by the kubelet's
    claim state, unless node is none.
    """

    uid: str
    device: str
    allocated: bool = False
    exists: bool = True
    node: str = "none"
    file: bool = False
    named: bool = True


class Node(RuleBasedStateMachine):
    """Kubelet, scheduler, API server and agent of a node with two devices."""

    errors: ClassVar[tuple[type[Exception], ...]] = (ServerError,)

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=MEMORY))
        self.later = 0.0
        self.numbers = 0
        self.pods: list[Pod] = []
        self.claims: dict[str, Request] = {}
        self.received: frozenset[str] = frozenset()
        self.checkpoint: CheckpointVersion | None = CheckpointVersion(frozenset(), {})
        self.written = False
        self.drafts: list[CheckpointVersion] = []
        self.prompt = False
        self.slice: frozenset[str] = frozenset()
        self.server_up = True
        self.damaged = False
        self.disk_fails = 0
        self.share = Share(0)
        self.drain: Drain = "cordon"
        self.alive = False
        self.start_agent()

    def teardown(self) -> None:
        try:
            self.leave_alone()
        finally:
            self.store.close()
            shutil.rmtree(self.home)

    def number(self) -> str:
        self.numbers += 1
        return str(self.numbers)

    def clock(self) -> float:
        return time.monotonic() + self.later

    # The agent.

    def start_agent(self) -> None:
        """Start it: the ledger as it is on disk, the evidence reconciled before anything is offered."""
        self.store = DirectLedger(str(self.home / "ledger.db"), connect=self.connect)
        self.async_ledger = SlowLedger(self.store)
        self.work: list[tuple[str, Coroutine[Any, Any, None]]] = []
        self.sent: tuple[float, frozenset[str]] | None = None
        self.want: frozenset[str] | None = None
        self.accepted: dict[str, float] = {}
        self.scanned = self.checkpoint.allocations if self.checkpoint is not None else frozenset()
        self.flying, self.disturbed, self.scanning = 0, False, False
        inventory = Inventory(R)
        inventory.publish([Device(name) for name in DEVICES])
        served = Served(Source(), inventory, lambda device: self.register.is_held((R, device)))
        self.grants = Grants(cast("Any", self.async_ledger), {R: served}, bridged=(R,))
        self.register = self.grants.register
        streams = SimpleNamespace(shown=lambda: self.sent, staying=lambda: self.staying)
        endpoint = SimpleNamespace(resource=R, source=Source(), ids=served.ids, refresh=lambda: None, streams=streams)
        moved = MovedResource(cast("Any", endpoint), inventory, self.register, self, self, Moving(D))
        self.handover = Handover(moved, self.share, self.drain)
        self.handover._to_plugin.waits = lambda: Backoff(first=0.0, most=0.0)
        self.alive = True
        self.reconcile()

    def connect(self, path: str) -> Any:
        inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        node = self

        class Connection:
            def execute(self, sql: str, *args: Any) -> Any:
                if sql.startswith("COMMIT") and node.disk_fails:
                    node.disk_fails -= 1
                    if node.disk_fails % 2:
                        inner.execute(sql)
                    raise sqlite3.OperationalError("disk I/O error")
                return inner.execute(sql, *args)

            def close(self) -> None:
                inner.close()

        return Connection()

    def reconcile(self, *, current: bool = False) -> None:
        """Reconcile the evidence: the checkpoint, the processes and unknown CDI files."""
        if self.checkpoint is None:
            return
        now = holders.holders(self.known, HolderEvidence([self.checkpoint], current, self.processes()), self.clock())
        held = kubelet_snapshot(0, now, R, str).held
        snapshot = self.store.snapshot
        files = [claim for claim in self.claims.values() if claim.file and (D, claim.uid) not in snapshot.claims]
        evidence = [ClaimEvidence(D, claim.uid, frozenset({claim.device}), prepared=True) for claim in files]
        quarantined = any(record.state is State.QUARANTINED for record in snapshot.devices.values())
        if self.store.fresh or quarantined:
            evidence += [
                ClaimEvidence(D, claim.uid, frozenset({claim.device}), prepared=False)
                for claim in self.claims.values()
                if claim.allocated and not claim.file
            ]
        try:
            done = self.store.do(
                operations.reconcile_evidence(
                    R, Evidence(held, evidence, now.current), DEVICES, Side.PLUGIN, time.time(), D
                )
            )
        except LedgerError:
            return
        self.grants.reconciled |= {(R, name) for name in DEVICES if name not in done.uncertain}

    @property
    def known(self) -> frozenset[Allocation]:
        """The allocations that the register knows, and those of the last scan."""
        return allocations_of(self.store.snapshot) | self.scanned

    def processes(self) -> PodProcesses:
        running = {pod.uid for pod in self.pods if pod.at == "runs"}
        running |= {f"pod of {claim.uid}" for claim in self.claims.values() if claim.node == "runs"}
        return PodProcesses(frozenset(running))

    async def scan(self, wanted: object = None) -> HolderSnapshot | None:
        """Scan for holders in steps, as the agent does."""
        while self.scanning or self.flying:
            await Pause()
        self.scanning = True
        try:
            before, at = self.store.snapshot.sequence, self.clock()
            self.disturbed = False
            files: list[CheckpointVersion] = []
            while not holders.shows_present(files) and await self.is_written() and self.checkpoint is not None:
                files.append(self.checkpoint)
            current = holders.shows_present(files)
            if not current:
                files = [self.checkpoint] if self.checkpoint is not None else []
            await Pause()
            now = holders.holders(self.known, HolderEvidence(files, current, self.processes(), "late"), at)
            if self.disturbed or self.flying:
                return None
            self.scanned = frozenset(now.held)
            await self.grants.scanner.observe(now, before)
            return now
        finally:
            self.scanning = False

    async def is_written(self) -> bool:
        """Request a checkpoint; return whether there is another one in time."""
        self.written = False
        for _ in range(3):
            if self.prompt:
                self.checkpoint_is_written()
            await Pause()
            if self.written:
                break
        return self.written

    def title(self, pod_uid: str) -> str:
        return pod_uid

    def endpoint(self, resource: str) -> None:
        """Return no servicer of another resource."""

    def moved(self, resource: str) -> None:
        """Tell nobody."""

    def publish(self) -> None:
        """Tell nobody."""

    def withdrawn(self, resource: str, device: str) -> float | None:
        return self.accepted.get(device)

    async def allocated(self) -> Allocated:
        await Pause()
        if not self.server_up:
            raise ServerError
        found = {(R, claim.device): f"default/{claim.uid}" for claim in self.claims.values() if claim.allocated}
        await Pause()
        return Allocated(found)

    async def allocates(self, title: str, resource: str, device: str) -> bool:
        await Pause()
        if not self.server_up:
            raise ServerError
        claim = self.claims.get(title.partition("/")[2])
        return claim is not None and claim.allocated and claim.device == device

    @property
    def staying(self) -> frozenset[str] | None:
        return self.sent[1] if self.sent is not None else None

    async def move(self) -> None:
        try:
            await self.handover._step()
        except (LedgerError, ServerError):
            pass

    async def watch_holders(self) -> None:
        await self.scan()

    async def allocate(self, pod: Pod) -> None:
        self.flying, self.disturbed = self.flying + 1, True
        try:
            if holders.running(self.known, R, [pod.device], self.processes().running or ()):
                raise DeviceConflictError("held")
            await Pause()
            await self.register.grant(R, {pod.device: pod.device})
        except (DeviceConflictError, LedgerError):
            if pod in self.pods:
                self.pods.remove(pod)
        else:
            if pod.at == "chosen" and pod in self.pods:
                pod.at = "answered"
        finally:
            self.flying, self.disturbed = self.flying - 1, True

    async def prepare(self, claim: Request, *, durable: bool) -> None:
        devices, pods = (ClaimDevice(R, claim.device, amount=WHOLE),), frozenset({f"pod of {claim.uid}"})
        record = Claim(D, claim.uid, "default", claim.uid, devices, "ready", time.time(), pods=pods)
        claim.node, claim.named = "busy", True
        answered = False
        try:
            if (R, claim.device) not in self.grants.reconciled:
                return
            view = self.register.view()
            answer = await self.async_ledger.do(operations.reserve(record, view, durable=durable, pull=True))
            if isinstance(answer, Refused | Excluded):
                return
            claim.file = True
            await Pause()
            answer = await self.async_ledger.do(operations.prepare(record, self.register.view(), pull=True))
            if not isinstance(answer, Refused | Excluded):
                claim.node, answered = "prepared", True
                return
            claim.file = False
            await self.async_ledger.do(operations.unprepare(D, claim.uid))
        except LedgerError:
            pass
        finally:
            if not answered and claim.node == "busy":
                claim.node = "none"

    async def unprepare(self, claim: Request) -> None:
        before, claim.node = claim.node, "busy"
        try:
            claim.file = False
            await Pause()
            await self.async_ledger.do(operations.unprepare(D, claim.uid))
            before = "none"
        except LedgerError:
            pass
        finally:
            if claim.node == "busy":
                claim.node = before

    def begin(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        self.work.append((what, coroutine))

    def forward(self, index: int) -> None:
        """Take one of the agent's coroutines one step forward."""
        index %= len(self.work)
        try:
            self.work[index][1].send(None)
        except StopIteration:
            del self.work[index]

    # What may happen.

    @initialize(share=st.integers(0, 2))
    def first_share(self, share: int) -> None:
        self.ask(share, "cordon")

    @rule(share=st.integers(0, 2), drain=st.sampled_from(["cordon", "wait"]))
    def ask(self, share: int, drain: Drain) -> None:
        self.share, self.drain = Share(share), drain
        self.handover.ask(self.share, drain)

    @precondition(lambda self: self.work)
    @rule(index=st.integers(0, 9), steps=st.integers(1, 6))
    def proceed(self, index: int, steps: int) -> None:
        for _ in range(steps):
            if self.work:
                self.forward(index)

    @precondition(lambda self: self.alive)
    @rule(rounds=st.integers(1, 3), share=st.none() | st.integers(0, 2))
    def all_goes_well_for_a_while(self, rounds: int, share: int | None) -> None:
        """The agent's moves, the list and the slices go their way, while what pods and claims do stands still."""
        if share is not None:
            self.ask(share, "cordon")
        for _ in range(rounds):
            self.list_is_sent()
            self.kubelet_receives_list()
            if not any(what == "move" for what, _ in self.work):
                self.handover_begins()
            self.prompt = True
            self.finish("move")
            self.prompt = False
            self.slice_is_written()
            if self.server_up:
                self.slice_is_accepted()

    @precondition(lambda self: self.alive)
    @rule(device=st.sampled_from(DEVICES), written=st.booleans())
    def pod_starts_well(self, device: str, written: bool) -> None:
        """All of a pod's start without anything in between."""
        self.list_is_sent()
        self.kubelet_receives_list()
        self.kubelet_chooses(device)
        self.allocate_arrives()
        self.finish("allocate")
        if written:
            self.kubelet_admits(0)
            self.checkpoint_is_written()
            self.pod_runs(0)

    @precondition(lambda self: self.alive and self.server_up)
    @rule(device=st.sampled_from(DEVICES), durable=st.booleans())
    def claim_starts_well(self, device: str, durable: bool) -> None:
        """All of a claim's start without anything in between."""
        self.slice_is_written()
        self.slice_is_accepted()
        self.scheduler_chooses(device)
        self.scheduler_writes(0)
        self.kubelet_prepares(0, durable)
        self.finish("prepare")
        self.container_with_claim_runs(0)

    def finish(self, what: str) -> None:
        """Take a kind of work to its end, if the others let it."""
        for _ in range(60):
            for index, (name, _coroutine) in enumerate(self.work):
                if name.startswith(what):
                    self.forward(index)
                    break

    @precondition(lambda self: self.alive)
    @rule()
    def handover_begins(self) -> None:
        if not any(what == "move" for what, _ in self.work):
            self.begin("move", self.move())

    @precondition(lambda self: self.alive)
    @rule()
    def agent_scans(self) -> None:
        if not any(what == "scan" for what, _ in self.work):
            self.begin("scan", self.watch_holders())

    @precondition(lambda self: self.alive)
    @rule()
    def list_is_sent(self) -> None:
        self.sent = self.clock(), frozenset(name for name in DEVICES if self.register.offers(R, name))

    @rule()
    def kubelet_receives_list(self) -> None:
        if self.sent is not None:
            self.received = self.sent[1]

    @precondition(lambda self: self.alive)
    @rule()
    def slice_is_written(self) -> None:
        self.want = frozenset(
            name
            for name in DEVICES
            if (R, name) in self.grants.reconciled and self.store.snapshot.device(R, name).state.offered
        )
        for name in self.want:
            self.accepted.pop(name, None)

    @precondition(lambda self: self.server_up and self.want is not None)
    @rule()
    def slice_is_accepted(self) -> None:
        assert self.want is not None
        self.slice = self.want
        for name in DEVICES:
            if name not in self.want:
                self.accepted.setdefault(name, time.monotonic())

    @rule(device=st.sampled_from(DEVICES))
    def kubelet_chooses(self, device: str) -> None:
        taken = {pod.device for pod in self.pods if pod.at in {"chosen", "answered"} or pod.memory}
        if device in self.received and device not in taken:
            self.pods.append(Pod(device, self.number()))

    @precondition(lambda self: self.alive)
    @rule()
    def allocate_arrives(self) -> None:
        for pod in self.pods:
            if pod.at == "chosen" and not any(what == f"allocate {pod.uid}" for what, _ in self.work):
                self.begin(f"allocate {pod.uid}", self.allocate(pod))
                return

    @rule(index=st.integers(0, 5))
    def kubelet_admits(self, index: int) -> None:
        answered = [pod for pod in self.pods if pod.at == "answered"]
        if answered:
            pod = answered[index % len(answered)]
            pod.at, pod.memory = "admitted", True

    @rule()
    def checkpoint_is_written(self) -> None:
        self.checkpoint, self.written = self.made_up(), True
        self.forget_pods()

    def made_up(self) -> CheckpointVersion:
        return CheckpointVersion(frozenset(pod.allocation for pod in self.pods if pod.memory), {R: self.received})

    @precondition(lambda self: len(self.drafts) < 2)
    @rule()
    def checkpoint_is_made_up(self) -> None:
        """A writer has made up its contents and writes the file late; the kubelet has two writers."""
        self.drafts.append(self.made_up())

    @precondition(lambda self: self.drafts)
    @rule(index=st.integers(0, 1))
    def checkpoint_is_written_late(self, index: int) -> None:
        draft = self.drafts[index % len(self.drafts)]
        there = (pod for pod in self.pods if pod.at in {"admitted", "runs"})
        if all(self.recorded(pod) or pod.allocation in draft.allocations for pod in there):
            self.drafts.remove(draft)
            self.checkpoint, self.written = draft, True
            self.forget_pods()

    def forget_pods(self) -> None:
        """Drop the pods that nobody names and that do not run."""
        self.pods = [pod for pod in self.pods if pod.at != "over" or pod.memory or self.in_checkpoint(pod)]

    def in_checkpoint(self, pod: Pod) -> bool:
        return self.checkpoint is not None and pod.allocation in self.checkpoint.allocations

    def recorded(self, pod: Pod) -> bool:
        """Return whether the ledger knows a pod as a holder."""
        hold = self.store.snapshot.allocations.get((R, pod.device))
        return hold is not None and (pod.uid, "c") in hold.holders

    def unlisted(self) -> bool:
        """Return whether a pod was granted its device and is not in the checkpoint yet."""
        return any(
            pod.at == "answered" or (pod.at == "admitted" and not (self.in_checkpoint(pod) or self.recorded(pod)))
            for pod in self.pods
        )

    @rule(index=st.integers(0, 5))
    def pod_runs(self, index: int) -> None:
        admitted = [
            pod for pod in self.pods if pod.at == "admitted" and (self.in_checkpoint(pod) or self.recorded(pod))
        ]
        if admitted:
            admitted[index % len(admitted)].at = "runs"

    @rule(index=st.integers(0, 5), forgotten=st.booleans())
    def pod_ends(self, index: int, forgotten: bool) -> None:
        there = [pod for pod in self.pods if pod.at in {"admitted", "runs"}]
        if there:
            pod = there[index % len(there)]
            pod.at, pod.memory = "over", pod.memory and not forgotten
            self.forget_pods()

    @rule()
    def kubelet_forgets_ended_pods(self) -> None:
        for pod in self.pods:
            pod.memory = pod.memory and pod.at != "over"
        self.forget_pods()

    @rule(index=st.integers(0, 5))
    def pod_is_deleted_by_force(self, index: int) -> None:
        """Its container runs on, and the kubelet counts its device as free."""
        running = [pod for pod in self.pods if pod.at == "runs" and self.recorded(pod)]
        if running:
            running[index % len(running)].memory = False

    @rule()
    def checkpoint_is_lost(self) -> None:
        if all(self.recorded(pod) for pod in self.pods if pod.at in {"admitted", "runs"}):
            self.checkpoint, self.written = None, False
            self.forget_pods()

    @rule(device=st.sampled_from(DEVICES))
    def scheduler_chooses(self, device: str) -> None:
        given = {claim.device for claim in self.claims.values() if claim.exists}
        if device in self.slice and device not in given:
            uid = self.number()
            self.claims[uid] = Request(uid, device)

    @precondition(lambda self: self.server_up)
    @rule(index=st.integers(0, 5))
    def scheduler_writes(self, index: int) -> None:
        waiting = [claim for claim in self.claims.values() if claim.exists and not claim.allocated]
        if waiting:
            waiting[index % len(waiting)].allocated = True

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5), durable=st.booleans())
    def kubelet_prepares(self, index: int, durable: bool) -> None:
        ready = [claim for claim in self.claims.values() if claim.allocated and claim.node == "none"]
        if ready:
            claim = ready[index % len(ready)]
            claim.node = "busy"
            self.begin(f"prepare {claim.uid}", self.prepare(claim, durable=durable))

    @rule(index=st.integers(0, 5))
    def container_with_claim_runs(self, index: int) -> None:
        prepared = [claim for claim in self.claims.values() if claim.node == "prepared"]
        if prepared:
            prepared[index % len(prepared)].node = "runs"

    @rule(index=st.integers(0, 5))
    def container_with_claim_ends(self, index: int) -> None:
        there = [claim for claim in self.claims.values() if claim.node in {"prepared", "runs"}]
        if there:
            claim = there[index % len(there)]
            claim.node = "stopped" if claim.named else "none"

    @rule()
    def claim_state_is_lost(self) -> None:
        for claim in self.claims.values():
            if claim.node in {"prepared", "runs"}:
                claim.node, claim.named = "runs" if claim.node == "runs" else "none", False

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 5))
    def kubelet_unprepares(self, index: int) -> None:
        ended = [claim for claim in self.claims.values() if claim.node == "stopped"]
        if ended:
            claim = ended[index % len(ended)]
            self.begin(f"unprepare {claim.uid}", self.unprepare(claim))

    @precondition(lambda self: self.server_up)
    @rule(index=st.integers(0, 5))
    def claim_goes(self, index: int) -> None:
        """Deleted in whatever state it is in: also by force, while its container runs."""
        there = [claim for claim in self.claims.values() if claim.exists]
        if there:
            claim = there[index % len(there)]
            claim.exists = claim.allocated = False

    @precondition(lambda self: self.alive and self.server_up)
    @rule()
    def agent_reconciles(self) -> None:
        """Unprepare claims that are gone and that no container uses; sweep files that belong to nothing."""
        busy = {what.split()[1] for what, _ in self.work if " " in what}
        for uid, claim in list(self.claims.items()):
            if uid in busy:
                continue
            known = self.store.snapshot.claims.get((D, uid))
            states = {uid} if claim.named and claim.node != "none" else set()
            pods = known.pods if known is not None else frozenset()
            over = holders.claim_is_over(uid, pods, states, self.processes())
            if over and (claim.file if known is None else not claim.allocated):
                claim.file = False
                try:
                    self.store.do(operations.unprepare(D, uid))
                except LedgerError:
                    return
            left = claim.exists or claim.file or (D, uid) in self.store.snapshot.claims
            if not left and claim.node in {"none", "stopped"}:
                del self.claims[uid]

    @precondition(lambda self: not self.unlisted())
    @rule()
    def time_passes(self) -> None:
        """By then the kubelet has written down what was answered, or is dead."""
        self.later += 20.0

    @rule()
    def kubelet_restarts(self) -> None:
        for pod in self.pods:
            pod.memory = self.in_checkpoint(pod)
            if pod.at in {"chosen", "answered"} or (pod.at == "admitted" and not pod.memory):
                pod.at = "over"
        self.forget_pods()
        self.sent, self.received, self.drafts = None, frozenset(), []

    @rule(up=st.booleans())
    def api_server(self, up: bool) -> None:
        self.server_up = up

    @rule(times=st.integers(1, 3))
    def disk_fails_for_a_while(self, times: int) -> None:
        self.disk_fails = times

    @precondition(lambda self: self.alive)
    @rule()
    def agent_is_killed(self) -> None:
        self.alive = False
        for _, coroutine in self.work:
            coroutine.close()
        self.work = []
        for claim in self.claims.values():
            if claim.node == "busy":
                claim.node = "none"
        self.store.close()
        self.sent, self.received, self.want = None, frozenset(), None

    @precondition(lambda self: not self.alive and not self.unlisted())
    @rule(damage=st.sampled_from(["", "", "", "lost"]))
    def agent_starts(self, damage: str) -> None:
        forgotten = (pod for pod in self.pods if pod.at in {"admitted", "runs"})
        if damage and all(pod.memory and self.in_checkpoint(pod) for pod in forgotten):
            self.damaged = True
            for suffix in ("", "-wal"):
                (self.home / f"ledger.db{suffix}").unlink(missing_ok=True)
        self.disk_fails = 0
        self.start_agent()

    @precondition(lambda self: self.alive)
    @rule()
    def doubt_is_resolved(self) -> None:
        """Reconcile devices in doubt or in quarantine again."""
        quarantined = any(record.state is State.QUARANTINED for record in self.store.snapshot.devices.values())
        if quarantined or len(self.grants.reconciled) < len(DEVICES):
            self.checkpoint_is_written()
            self.reconcile(current=True)

    # What must be.

    @invariant()
    def no_device_has_two_holders(self) -> None:
        for device in DEVICES:
            running = [pod.uid for pod in self.pods if pod.device == device and pod.at == "runs"]
            running += [claim.uid for claim in self.claims.values() if claim.device == device and claim.node == "runs"]
            assert len(running) <= 1, f"device {device} is held by {running}"

    @invariant()
    def no_device_is_offered_on_both_sides(self) -> None:
        if not self.damaged:
            shown = self.received | (self.sent[1] if self.sent is not None else frozenset())
            assert not shown & self.slice

    @invariant()
    def no_device_is_quarantined_without_damage(self) -> None:
        if not self.damaged and self.alive:
            for record in self.store.snapshot.devices.values():
                assert record.state is not State.QUARANTINED, record

    def leave_alone(self) -> None:
        """Let everything end and nothing fail; then nothing may be lost, and no move still wait."""
        self.server_up, self.disk_fails = True, 0
        self.prompt = True
        for pod in self.pods:
            if pod.at == "answered":
                pod.at, pod.memory = "admitted", True
        self.checkpoint_is_written()
        if not self.alive:
            self.start_agent()
        in_flight: list[Callable[[], Any]] = [
            lambda: self.pods.clear(),
            self.agent_scans,
            self.doubt_is_resolved,
            self.list_is_sent,
            self.kubelet_receives_list,
            self.handover_begins,
            self.slice_is_written,
            self.slice_is_accepted,
            self.agent_reconciles,
            self.time_passes,
        ]
        for _ in range(60):
            for claim in self.claims.values():
                claim.exists = claim.allocated = False
                if claim.node in {"prepared", "runs"}:
                    claim.node = "stopped" if claim.named else "none"
                if claim.node == "stopped":
                    self.begin(f"unprepare {claim.uid}", self.unprepare(claim))
            for what in in_flight:
                what()
                for number in range(400):
                    if self.work:
                        self.forward(number)
                assert not self.work, [what for what, _ in self.work]
            if self.at_rest():
                return
        raise AssertionError(
            f"not at rest: {self.store.snapshot}, received {self.received}, slice {self.slice}, {self.claims}, "
            f"share {self.share}, waiting {self.handover.waiting}"
        )

    def at_rest(self) -> bool:
        return (
            len(self.slice) == self.share.of(len(DEVICES))
            and self.received == frozenset(DEVICES) - self.slice
            and not self.store.snapshot.claims
            and not self.store.snapshot.allocations
        )


Node.TestCase.settings = settings(
    max_examples=3000 if AT_LENGTH else 40,
    stateful_step_count=150 if AT_LENGTH else 80,
    suppress_health_check=list(HealthCheck),
)
TestNode = pytest.mark.explore(Node.TestCase)
