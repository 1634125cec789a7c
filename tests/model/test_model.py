"""A node at random: the real ledger on its disk, the real handover and keeper, everything else as late as it likes.

What the agent does at the same time are coroutines that the machine takes forward one step at a
time, so that anything may come between any two of them. Who holds a device is judged by what
runs, never by the ledger.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin import ledger
from deviceplugin.agent import Look
from deviceplugin.device import Device
from deviceplugin.endpoint import Refusal
from deviceplugin.inventory import Inventory
from deviceplugin.ledger import (
    Claim,
    ClaimDevice,
    ClaimEvidence,
    Evidence,
    Ledger,
    LedgerError,
    Operation,
    Refused,
    Side,
    State,
)
from deviceplugin.podresources import CheckpointEntry, Holder, Holdings, Report, holdings, unlisted
from dra_bridge.handover import Drain, Handover, Share
from dra_bridge.keeper import Keeper, held_units, unsure_of

R: Final = "example.com/fpga"
D: Final = "fpga.example.com"
DEVICES: Final = ("a", "b")
MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the ledger lies: a walk commits thousands of times, and no machine loses its power here."""
AT_LENGTH: Final = os.environ.get("DEVICEPLUGIN_MODEL") == "long"


class ServerError(Exception):
    """Raised while the API server is away."""


class Pause:
    """A point at which anything else may happen."""

    def __await__(self) -> Generator[None]:
        yield


class SlowDesk:
    """The ledger's face without a loop: before and after each operation something else may come."""

    def __init__(self, book: Ledger) -> None:
        self.ledger = book

    @property
    def snapshot(self) -> ledger.Snapshot:
        return self.ledger.snapshot

    async def do(self, operation: Operation[Any]) -> Any:
        await Pause()
        answer = self.ledger.do(operation)
        await Pause()
        return answer


@dataclass
class Pod:
    """at: chosen (Allocate on its way), answered, written (in the kubelet's books), ended (the checkpoint lags)."""

    device: str
    uid: str
    at: str = "chosen"


@dataclass
class Request:
    """A claim. node: none, busy (Prepare or Unprepare at work), runs, stopped (container gone)."""

    uid: str
    device: str
    allocated: bool = False
    exists: bool = True
    node: str = "none"
    file: bool = False


class Node(RuleBasedStateMachine):
    """Kubelet, scheduler, API server and agent of a node with two devices."""

    obeyed = ledger.Rules()

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=MEMORY))
        self.later = 0.0
        self.numbers = 0
        self.pods: list[Pod] = []
        self.claims: dict[str, Request] = {}
        self.heard: frozenset[str] = frozenset()
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
            self.book.close()
            shutil.rmtree(self.home)

    def number(self) -> str:
        self.numbers += 1
        return str(self.numbers)

    def clock(self) -> float:
        return time.monotonic() + self.later

    # The agent.

    def start_agent(self) -> None:
        """Start it: the ledger as it is on disk, the evidence heard before anything is offered."""
        self.book = Ledger.open(str(self.home / "ledger.db"), rules=self.obeyed, connect=self.connect)
        self.desk = SlowDesk(self.book)
        self.work: list[tuple[str, Coroutine[Any, Any, None]]] = []
        self.sent: tuple[float, frozenset[str]] | None = None
        self.want: frozenset[str] | None = None
        self.accepted: dict[str, float] = {}
        self.known = Holdings()
        self.flying, self.disturbed, self.looking = 0, False, False
        inventory = Inventory(R)
        inventory.publish([Device(name) for name in DEVICES])
        self.keeper = Keeper(cast("Any", self.desk), {R: str})
        endpoint = SimpleNamespace(resource=R, behind=str, refresh=lambda: None, shown=lambda: self.sent)
        self.handover = Handover(
            cast("Any", endpoint),
            inventory,
            cast("Any", self.desk),
            self.look,
            cast("Any", SimpleNamespace(withdrawn=self.withdrawn, publish=lambda: None)),
            cast("Any", SimpleNamespace(allocated=self.list_claims)),
            share=self.share,
            drain=self.drain,
            errors=(ServerError,),
        )
        self.alive = True
        self.confront()

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

    def confront(self) -> None:
        """Hear the evidence (R8): what the kubelet says, and the CDI files that the ledger does not know."""
        seen = self.books()
        held = held_units(seen.holdings.of(R), str, unsure_of(seen, R))
        snapshot = self.book.snapshot
        files = [claim for claim in self.claims.values() if claim.file and (D, claim.uid) not in snapshot.claims]
        evidence = [ClaimEvidence(D, claim.uid, frozenset({claim.device}), prepared=True) for claim in files]
        quarantined = any(record.state is State.QUARANTINED for record in snapshot.devices.values())
        if self.book.fresh or self.book.set_aside or quarantined:
            evidence += [
                ClaimEvidence(D, claim.uid, frozenset({claim.device}), prepared=False)
                for claim in self.claims.values()
                if claim.allocated and not claim.file
            ]
        try:
            done = self.book.do(ledger.confront(R, Evidence(held, evidence), DEVICES, Side.PLUGIN, time.time()))
        except LedgerError:
            return
        self.keeper.heard |= {(R, name) for name in DEVICES if name not in done.doubtful}

    def books(self) -> Look:
        """Look at the kubelet's books at one moment; the checkpoint shows ended pods until it is written anew."""
        at = self.clock()
        listed = {
            pod.device: frozenset({Holder("default", f"p{pod.uid}", "c")}) for pod in self.pods if pod.at == "written"
        }
        entries = [
            CheckpointEntry(pod.uid, "c", R, frozenset({pod.device}))
            for pod in self.pods
            if pod.at in {"written", "ended"}
        ]
        now = holdings(Report({R: listed}), entries, self.known, frozenset())
        self.known = now
        unsure = frozenset((resource, name) for resource, name, _ in unlisted(now))
        return Look(now, at, {R: self.heard}, at, unsure)

    async def look(self) -> Look | None:
        """Look at the kubelet's books in steps, as the agent does."""
        while self.looking or self.flying:
            await Pause()
        self.looking = True
        try:
            before = self.keeper.before_look()
            asked_at, allocatable = self.clock(), self.heard
            await Pause()
            self.disturbed = False
            seen = self.books()
            await Pause()
            if self.disturbed or self.flying:
                return None
            await self.keeper.after_look(before, seen)
            return Look(seen.holdings, seen.at, {R: allocatable}, asked_at, seen.unsure)
        finally:
            self.looking = False

    def withdrawn(self, resource: str, device: str) -> float | None:
        return self.accepted.get(device)

    async def list_claims(self) -> Mapping[tuple[str, str], str]:
        await Pause()
        if not self.server_up:
            raise ServerError
        found = {(R, claim.device): f"default/{claim.uid}" for claim in self.claims.values() if claim.allocated}
        await Pause()
        return found

    async def move(self) -> None:
        try:
            await self.handover._step()
        except (LedgerError, ServerError):
            pass

    async def watch_books(self) -> None:
        await self.look()

    async def allocate(self, pod: Pod) -> None:
        self.flying, self.disturbed = self.flying + 1, True
        try:
            await self.keeper.grant(R, [pod.device], [pod.device])
        except Refusal:
            if pod in self.pods:
                self.pods.remove(pod)
        else:
            if pod.at == "chosen" and pod in self.pods:
                pod.at = "answered"
        finally:
            self.flying, self.disturbed = self.flying - 1, True

    async def prepare(self, claim: Request, *, durable: bool) -> None:
        record = Claim(D, claim.uid, "default", claim.uid, (ClaimDevice(R, claim.device),), "ready", time.time())
        claim.node = "busy"
        answered = False
        try:
            if (R, claim.device) not in self.keeper.heard:
                return
            answer = await self.desk.do(ledger.reserve(record, durable=durable, pull=True))
            if isinstance(answer, Refused):
                return
            claim.file = True
            await Pause()
            if not isinstance(await self.desk.do(ledger.prepare(record, pull=True)), Refused):
                claim.node, answered = "runs", True
                return
            claim.file = False
            await self.desk.do(ledger.unprepare(D, claim.uid))
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
            await self.desk.do(ledger.unprepare(D, claim.uid))
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
            self.kubelet_hears()
            if not any(what == "move" for what, _ in self.work):
                self.handover_begins()
            self.finish("move")
            self.slice_is_written()
            if self.server_up:
                self.slice_is_accepted()

    @precondition(lambda self: self.alive)
    @rule(device=st.sampled_from(DEVICES), written=st.booleans())
    def pod_starts_well(self, device: str, written: bool) -> None:
        """All of a pod's start without anything in between."""
        self.list_is_sent()
        self.kubelet_hears()
        self.kubelet_chooses(device)
        self.allocate_arrives()
        self.finish("allocate")
        if written:
            self.kubelet_writes_down(0)

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
    def agent_looks(self) -> None:
        if not any(what == "look" for what, _ in self.work):
            self.begin("look", self.watch_books())

    @precondition(lambda self: self.alive)
    @rule()
    def list_is_sent(self) -> None:
        self.sent = self.clock(), frozenset(name for name in DEVICES if self.keeper.offers(R, name))

    @rule()
    def kubelet_hears(self) -> None:
        if self.sent is not None:
            self.heard = self.sent[1]

    @precondition(lambda self: self.alive)
    @rule()
    def slice_is_written(self) -> None:
        self.want = frozenset(
            name for name in DEVICES if (R, name) in self.keeper.heard and self.handover.offered(name)
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

    def tainted(self) -> frozenset[str]:
        return frozenset(name for name in DEVICES if self.alive and self.handover.leaving(name))

    @rule(device=st.sampled_from(DEVICES))
    def kubelet_chooses(self, device: str) -> None:
        taken = {pod.device for pod in self.pods if pod.at != "ended"}
        if device in self.heard and device not in taken:
            self.pods.append(Pod(device, self.number()))

    @precondition(lambda self: self.alive)
    @rule()
    def allocate_arrives(self) -> None:
        for pod in self.pods:
            if pod.at == "chosen" and not any(what == f"allocate {pod.uid}" for what, _ in self.work):
                self.begin(f"allocate {pod.uid}", self.allocate(pod))
                return

    @rule(index=st.integers(0, 5))
    def kubelet_writes_down(self, index: int) -> None:
        answered = [pod for pod in self.pods if pod.at == "answered"]
        if answered:
            answered[index % len(answered)].at = "written"

    @rule(index=st.integers(0, 5))
    def pod_ends(self, index: int) -> None:
        written = [pod for pod in self.pods if pod.at == "written"]
        if written:
            written[index % len(written)].at = "ended"

    @rule()
    def checkpoint_is_written_anew(self) -> None:
        self.pods = [pod for pod in self.pods if pod.at != "ended"]

    @rule(device=st.sampled_from(DEVICES))
    def scheduler_chooses(self, device: str) -> None:
        given = {claim.device for claim in self.claims.values() if claim.exists}
        if device in self.slice - self.tainted() and device not in given:
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
    def container_with_claim_ends(self, index: int) -> None:
        running = [claim for claim in self.claims.values() if claim.node == "runs"]
        if running:
            running[index % len(running)].node = "stopped"

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
            if uid in busy or claim.node == "runs":
                continue
            known = (D, uid) in self.book.snapshot.claims
            if (known and not claim.allocated) or (claim.file and not known):
                claim.file = False
                try:
                    self.book.do(ledger.unprepare(D, uid))
                except LedgerError:
                    return
            left = claim.exists or claim.file or (D, uid) in self.book.snapshot.claims
            if not left and claim.node in {"none", "stopped"}:
                del self.claims[uid]

    @precondition(lambda self: not any(pod.at == "answered" for pod in self.pods))
    @rule()
    def time_passes(self) -> None:
        """By then the kubelet has written down what was answered, or is dead."""
        self.later += 20.0

    @rule()
    def kubelet_restarts(self) -> None:
        self.pods = [pod for pod in self.pods if pod.at in {"written", "ended"}]
        self.sent, self.heard = None, frozenset()

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
        self.book.close()
        self.sent, self.heard, self.want = None, frozenset(), None

    @precondition(lambda self: not self.alive and not any(pod.at == "answered" for pod in self.pods))
    @rule(damage=st.sampled_from(["", "", "", "lost"]))
    def agent_starts(self, damage: str) -> None:
        if damage:
            self.damaged = True
            for suffix in ("", "-wal"):
                (self.home / f"ledger.db{suffix}").unlink(missing_ok=True)
        self.disk_fails = 0
        self.start_agent()

    @precondition(lambda self: self.alive)
    @rule()
    def doubt_is_resolved(self) -> None:
        """Look again at devices in doubt or in quarantine."""
        quarantined = any(record.state is State.QUARANTINED for record in self.book.snapshot.devices.values())
        if quarantined or len(self.keeper.heard) < len(DEVICES):
            self.confront()

    # What must be.

    @invariant()
    def no_device_has_two_holders(self) -> None:
        for device in DEVICES:
            holders = [pod.uid for pod in self.pods if pod.device == device and pod.at in {"answered", "written"}]
            holders += [claim.uid for claim in self.claims.values() if claim.device == device and claim.node == "runs"]
            assert len(holders) <= 1, f"device {device} is held by {holders}"

    @invariant()
    def no_device_is_offered_on_both_sides(self) -> None:
        if not self.damaged:
            shown = self.heard | (self.sent[1] if self.sent is not None else frozenset())
            assert not shown & self.slice

    @invariant()
    def no_device_is_quarantined_without_damage(self) -> None:
        if not self.damaged and self.alive:
            for record in self.book.snapshot.devices.values():
                assert record.state is not State.QUARANTINED, record

    def leave_alone(self) -> None:
        """Let everything end and nothing fail; then nothing may be lost, and no move still wait."""
        self.server_up, self.disk_fails = True, 0
        for pod in self.pods:
            if pod.at == "answered":
                pod.at = "written"
        if not self.alive:
            self.start_agent()
        quiet: list[Callable[[], Any]] = [
            lambda: self.pods.clear(),
            self.agent_looks,
            self.doubt_is_resolved,
            self.list_is_sent,
            self.kubelet_hears,
            self.handover_begins,
            self.slice_is_written,
            self.slice_is_accepted,
            self.agent_reconciles,
            self.time_passes,
        ]
        for _ in range(60):
            for claim in self.claims.values():
                claim.exists = claim.allocated = False
                if claim.node == "runs":
                    claim.node = "stopped"
                if claim.node == "stopped":
                    self.begin(f"unprepare {claim.uid}", self.unprepare(claim))
            for what in quiet:
                what()
                for number in range(400):
                    if self.work:
                        self.forward(number)
                assert not self.work, [what for what, _ in self.work]
            if self.at_rest():
                return
        raise AssertionError(
            f"not at rest: {self.book.snapshot}, heard {self.heard}, slice {self.slice}, {self.claims}, "
            f"share {self.share}, waiting {self.handover.waiting}"
        )

    def at_rest(self) -> bool:
        return (
            len(self.slice) == self.share.of(len(DEVICES))
            and self.heard == frozenset(DEVICES) - self.slice
            and not self.book.snapshot.claims
            and not self.book.snapshot.holds
        )


Node.TestCase.settings = settings(
    max_examples=3000 if AT_LENGTH else 40,
    stateful_step_count=150 if AT_LENGTH else 80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestNode = Node.TestCase
