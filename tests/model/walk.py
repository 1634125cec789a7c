"""A walk: steps of one node (requests, lists, changes of the config, losses, starts), random or chosen by a test.

Concurrent work of the agent runs in tasks. A task waits at each step of the ledger and of the API server until the walk
lets it go on. The holders of a device are the containers that run with it (`tests.model.outside`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deviceplugin.files import FileIdentity
from deviceplugin.kubelet.checkpoint import CheckpointVersion
from deviceplugin.register.records import LedgerError, State
from dra_bridge.driver import ClaimError
from dra_bridge.node.driver_runtime import DriverRuntime
from tests.model.life import BASE, Config, Life, RefusedError, Setting, modelled
from tests.model.outside import LISTS, Claim, Container, D, E, Outside, Pod, R, S, free_shares, hardware_of

MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
TURNS: Final = 60
"""The number of turns of the event loop after which every task certainly waits."""
SETTINGS: Final = st.builds(
    Setting,
    st.sampled_from([D, D, E, ""]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(["cordon", "wait"]),
    st.booleans(),
)
CONFIGS: Final = st.one_of(
    st.fixed_dictionaries({R: SETTINGS}),
    st.fixed_dictionaries({R: SETTINGS, S: SETTINGS}),
    st.fixed_dictionaries({S: SETTINGS}),
)
LOSSES: Final = st.sampled_from(
    [
        frozenset[str](),
        frozenset({"register"}),
        frozenset({"register", "slices"}),
        frozenset({"register", "state"}),
        frozenset({"register", "checkpoint"}),
        frozenset({"register", "copy"}),
    ]
)
"""Sets of records that are lost together while no agent runs; at least one record of each holder always remains."""
SOME: Final = st.integers(0, 5)


class Walk(RuleBasedStateMachine):
    """A random walk. life: the running agent (`tests.model.life.Life`), None while no agent runs."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir=MEMORY))
        self.outside = Outside(self.home)
        self.loop = asyncio.new_event_loop()
        vars(self.loop)["time"] = self.outside.steady
        self.stack = ExitStack()
        self.stack.enter_context(modelled(self.outside))
        self.config: Config = BASE
        self.life: Life | None = None
        self.work: list[tuple[str, asyncio.Task[None]]] = []
        self.sent: dict[str, dict[str, bool]] = {}
        self.problem = ""
        self.damaged = False
        self.begun = False

    def teardown(self) -> None:
        try:
            if self.begun and not self.wrong():
                self.leave_alone()
        finally:
            self.close()

    def close(self) -> None:
        """Stop the agent, cancel all tasks and remove the directory."""
        if self.life is not None:
            self.life.die()
        for _, done in self.outside.hooks:
            done.set()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        self.loop.close()
        self.stack.close()
        shutil.rmtree(self.home)

    # The tasks' turns.

    def turn(self) -> None:
        """Let every task run until it waits."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for what, task in self.work:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise AssertionError(f"{what} failed: {error!r}") from error
        self.work = [one for one in self.work if not one[1].done()]

    def begin(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin a task, unless a task with this name is running."""
        if any(name == what for name, _ in self.work):
            coroutine.close()
            return
        self.work.append((what, self.loop.create_task(coroutine)))
        self.turn()

    def finish(self) -> None:
        """Let all running tasks go on until they end."""
        for _ in range(500):
            if not self.outside.gate.waiting:
                self.turn()
                if not self.outside.gate.waiting:
                    break
            self.outside.gate.let(0)
            self.turn()

    def do(self, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin a task, and let all running tasks end."""
        self.begin(what, coroutine)
        self.finish()

    @property
    def here(self) -> Life:
        """The running agent."""
        assert self.life is not None
        return self.life

    def runtime(self, index: int) -> DriverRuntime | None:
        """Return one of the agent's DRA drivers, or None without drivers."""
        found = [self.here.drivers[name] for name in sorted(self.here.drivers)]
        return found[index % len(found)] if found else None

    # The agent.

    @initialize(config=CONFIGS)
    def first(self, config: Config) -> None:
        self.config = config
        self.start()

    def start(self) -> None:
        """Start an agent; until it serves, no other step comes in between."""
        self.begun = True
        self.outside.gate.open = True
        self.life = Life(self.outside, self.config)
        self.loop.run_until_complete(self.life.begin())
        self.turn()
        self.outside.gate.open = False

    @precondition(lambda self: self.life is not None and not self.unlisted())
    @rule()
    def agent_is_killed(self) -> None:
        self.here.die()
        self.life, self.work, self.outside.gate.waiting = None, [], []
        self.sent, self.outside.registered = {}, dict.fromkeys(self.outside.registered, frozenset[str]())
        for _, done in self.outside.hooks:  # the hooks end with the agent's process
            done.set()
        for pod in self.outside.pods:
            if pod.at == "busy":
                pod.at = "over"
        for claim in self.outside.claims.values():
            if claim.node == "busy":
                claim.node = "prepared" if claim.answer is not None else "none"
        self.outside.forget_pods()
        self.turn()

    @precondition(lambda self: self.life is None)
    @rule(losses=LOSSES, config=st.none() | CONFIGS)
    def agent_starts(self, losses: frozenset[str] = frozenset(), config: Config | None = None) -> None:
        outside = self.outside
        outside.disk_fails = 0
        there = [pod for pod in outside.pods if pod.at in {"admitted", "runs"}]
        if "copy" in losses and not all(pod.memory and outside.names(pod) for pod in there):
            losses = frozenset()
        if losses:
            self.damaged = True
            register = outside.root / "plugins" / "dra-bridge" / "register.db"
            for suffix in ("", "-wal"):
                register.with_name(register.name + suffix).unlink(missing_ok=True)
        if "copy" in losses:
            (self.home / "cdi" / "deviceplugin" / "allocations" / "dra-bridge.json").unlink(missing_ok=True)
        if "slices" in losses:
            for mine in outside.slices.values():
                mine.there, mine.annotations, mine.accepted = {}, {}, 0
            outside.lease = {}
        if "state" in losses:
            self.state_is_lost()
        if "checkpoint" in losses:
            outside.checkpoint = None
            outside.drafts.clear()
            outside.forget_pods()
        for mine in outside.slices.values():
            mine.ticket, mine.pool, mine.accepted = mine.ticket + 1, None, min(mine.accepted, 1)
        self.config = config or self.config
        self.start()

    @precondition(lambda self: self.life is not None)
    @rule(config=CONFIGS)
    def reload(self, config: Config) -> None:
        self.config = config
        self.do("reload", self.here.reload(config))
        self.sent = {name: lines for name, lines in self.sent.items() if name in config}
        for name in self.outside.registered.keys() - config.keys():
            self.outside.registered[name] = frozenset()  # the kubelet forgets a resource after five minutes

    @precondition(lambda self: self.life is not None and R in self.config)
    @rule(driver=st.sampled_from([D, E, ""]))
    def rename(self, driver: str) -> None:
        self.reload({**self.config, R: self.config[R]._replace(driver=driver)})

    @precondition(lambda self: self.life is not None)
    @rule(times=st.sampled_from([1, 2, 3]), name=st.sampled_from(["a", "b", "x"]))
    def list_says_other_replicas(self, name: str, times: int) -> None:
        self.outside.times[name] = times
        for resource in self.here.agent.services:
            self.here.list(resource)
        self.turn()

    @precondition(lambda self: self.life is not None)
    @rule(swapped=st.booleans())
    def list_names_other_hardware(self, swapped: bool) -> None:
        one, other = ("h1", "h0") if swapped else ("h0", "h1")
        self.outside.lists = {**LISTS, (R, "a"): one, (R, "b"): other}
        for resource in self.here.agent.services:
            self.here.list(resource)
        self.turn()

    @precondition(lambda self: self.life is not None)
    @rule(key=st.sampled_from(sorted(LISTS)), there=st.booleans())
    def device_is_plugged(self, key: tuple[str, str], there: bool) -> None:
        """The device is unplugged if `there` is false."""
        self.outside.lists.pop(key, None)
        if there:
            self.outside.lists[key] = LISTS[key]
        if key[0] in self.here.agent.services:
            self.here.list(key[0])
        self.turn()

    @precondition(lambda self: self.outside.gate.waiting)
    @rule(index=SOME, steps=st.integers(1, 6))
    def proceed(self, index: int, steps: int) -> None:
        for _ in range(steps):
            if self.outside.gate.waiting:
                self.outside.gate.let(index)
                self.turn()

    @precondition(lambda self: self.life is not None)
    @rule(end=st.booleans())
    def agent_scans(self, end: bool = True) -> None:
        self.begin("scan", self.here.scan())
        if end:
            self.finish()

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME, resource=st.sampled_from([R, S]), end=st.booleans())
    def agent_compares(self, index: int = 0, resource: str = R, end: bool = True) -> None:
        if (runtime := self.runtime(index)) is not None:
            self.begin(f"compare {resource} {runtime.name}", self.here.compare(runtime, resource))
            if end:
                self.finish()

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME, resource=st.sampled_from([R, R, S]), end=st.booleans())
    def agent_moves(self, index: int = 0, resource: str = R, end: bool = True) -> None:
        if (runtime := self.runtime(index)) is not None:
            self.begin(f"move {resource} {runtime.name}", self.here.move(runtime, resource))
            if end:
                self.finish()

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME)
    def agent_settles_claims(self, index: int = 0) -> None:
        if (runtime := self.runtime(index)) is not None:
            self.do(f"settle {runtime.name}", self.here.settle_claims(runtime))

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME, accepted=st.booleans())
    def agent_publishes(self, index: int = 0, accepted: bool = True) -> None:
        if (runtime := self.runtime(index)) is not None:
            self.here.publish(runtime)
            if accepted:
                self.slices_are_accepted(runtime.name)

    @rule(driver=st.sampled_from([D, E]))
    def slices_are_accepted(self, driver: str) -> None:
        if self.outside.server_up and driver in self.outside.slices:
            self.outside.accept(driver)

    @precondition(lambda self: self.life is not None)
    @rule(rounds=st.integers(1, 3))
    def all_goes_well_for_a_while(self, rounds: int = 3) -> None:
        """The agent does all its periodic work `rounds` times, while pods and claims do not change."""
        self.outside.prompt = True
        for _ in range(rounds):
            self.finish()
            for index in range(len(self.here.drivers)):
                for resource in sorted(self.here.agent.services):
                    self.agent_compares(index, resource)
                    self.list_is_sent(resource)
                    self.agent_moves(index, resource)
                self.agent_publishes(index)
            for resource in sorted(self.here.agent.services):
                self.list_is_sent(resource)
        self.outside.prompt = False

    # The kubelet and its pods with limits.

    @precondition(lambda self: self.life is not None)
    @rule(resource=st.sampled_from([R, S]), received=st.booleans())
    def list_is_sent(self, resource: str, received: bool = True) -> None:
        if resource in self.here.agent.services:
            self.sent[resource] = self.here.send(resource)
            service = self.here.agent.services[resource]
            held = {
                pod.device_id
                for pod in self.outside.pods
                if pod.resource == resource and (pod.memory or pod.at in {"busy", "answered"})
                if service.device_of(pod.device_id) in service.inventory.snapshot.devices
            }
            if missing := held - self.sent[resource].keys():
                self.problem = f"the list of {resource} has no {', '.join(sorted(missing))} any more, which pods hold"
            if received:
                self.list_is_received(resource)

    @rule(resource=st.sampled_from([R, S]))
    def list_is_received(self, resource: str) -> None:
        if resource in self.sent:
            self.outside.registered[resource] = frozenset(one for one, good in self.sent[resource].items() if good)

    @rule(resource=st.sampled_from([R, R, S]), index=SOME)
    def kubelet_chooses(self, resource: str = R, index: int = 0) -> None:
        pods = [pod for pod in self.outside.pods if pod.resource == resource]
        taken = {pod.device_id for pod in pods if pod.at in {"chosen", "busy", "answered"} or pod.memory}
        if free := sorted(self.outside.registered.get(resource, frozenset()) - taken):
            self.outside.pods.append(Pod(self.outside.new_pod(), resource, free[index % len(free)]))

    @precondition(lambda self: self.life is not None)
    @rule(end=st.booleans())
    def allocate_arrives(self, end: bool = True) -> None:
        for pod in self.outside.pods:
            if pod.at == "chosen" and pod.resource in self.here.agent.services:
                pod.at = "busy"
                self.begin(f"allocate {pod.uid}", self.allocate(pod))
                if end:
                    self.finish()
                return

    async def allocate(self, pod: Pod) -> None:
        """Call Allocate for a pod's device, as the kubelet does."""
        try:
            await self.here.allocate(pod)
        except (RefusedError, LedgerError):
            pod.at = "over"
            self.outside.forget_pods()
        else:
            if pod.at == "busy":
                pod.at = "answered"

    @rule(written=st.booleans())
    def kubelet_admits(self, written: bool = True) -> None:
        for pod in self.outside.pods:
            if pod.at == "answered":
                pod.at, pod.memory = "admitted", True
        if written:
            self.checkpoint_is_written()

    @rule()
    def checkpoint_is_written(self) -> None:
        self.outside.write_checkpoint()

    @precondition(lambda self: len(self.outside.drafts) < 2)
    @rule()
    def checkpoint_is_made_up(self) -> None:
        """The kubelet composes the contents of a checkpoint now, and writes the file later."""
        self.outside.drafts.append(self.outside.made_up())

    @precondition(lambda self: self.outside.drafts)
    @rule(index=st.integers(0, 1))
    def checkpoint_is_written_late(self, index: int) -> None:
        draft = self.outside.drafts[index % len(self.outside.drafts)]
        there = [pod for pod in self.outside.pods if pod.at in {"admitted", "runs"}]
        if all(self.recorded(pod) or pod.allocation in draft.allocations for pod in there):
            self.outside.drafts.remove(draft)
            self.outside.write_checkpoint(draft)

    @rule(index=SOME)
    def pod_runs(self, index: int = 0) -> None:
        there = [
            one for one in self.outside.pods if one.at == "admitted" and (self.outside.names(one) or self.recorded(one))
        ]
        if there:
            there[index % len(there)].at = "runs"

    @precondition(lambda self: self.life is not None)
    @rule(resource=st.sampled_from([R, R, S]), index=SOME)
    def pod_starts_well(self, resource: str = R, index: int = 0) -> None:
        """A pod with a limit starts, and no other step comes in between."""
        self.list_is_sent(resource)
        self.kubelet_chooses(resource, index)
        self.allocate_arrives()
        self.kubelet_admits()
        self.pod_runs()

    @rule(index=SOME, forgotten=st.booleans())
    def pod_ends(self, index: int = 0, forgotten: bool = True) -> None:
        there = [pod for pod in self.outside.pods if pod.at in {"admitted", "runs"}]
        if there:
            pod = there[index % len(there)]
            pod.at, pod.memory = "over", pod.memory and not forgotten
            self.outside.forget_pods()

    @rule(index=SOME)
    def pod_is_deleted_by_force(self, index: int = 0) -> None:
        """The pod's container runs on, and the kubelet counts its device as free."""
        there = [pod for pod in self.outside.pods if pod.at == "runs" and self.recorded(pod)]
        if there:
            there[index % len(there)].memory = False

    def recorded(self, pod: Pod) -> bool:
        """Return whether the ledger has a pod as a holder, because a scan has found it."""
        if self.life is None or self.life.ledger is None:
            return False
        one = self.life.ledger.snapshot.allocations.get((pod.resource, pod.device_id))
        return one is not None and (pod.uid, "c") in one.holders

    def unlisted(self) -> bool:
        """Return whether there is a pod that was granted a device and that neither checkpoint nor ledger names yet."""
        return any(
            pod.at in {"busy", "answered"}
            or (pod.at == "admitted" and not (self.outside.names(pod) or self.recorded(pod)))
            for pod in self.outside.pods
        )

    @precondition(lambda self: not self.unlisted())
    @rule()
    def time_passes(self) -> None:
        self.outside.later += 20.0

    @rule(prompt=st.booleans())
    def kubelet_writes_when_asked(self, prompt: bool) -> None:
        self.outside.prompt = prompt

    @rule(times=st.integers(1, 3))
    def disk_fails_for_a_while(self, times: int) -> None:
        self.outside.disk_fails = times

    @precondition(lambda self: not self.unlisted())
    @rule()
    def kubelet_restarts(self) -> None:
        self.outside.drafts.clear()
        for pod in self.outside.pods:
            pod.memory = self.outside.names(pod)
            if pod.at == "chosen" or (pod.at == "admitted" and not pod.memory):
                pod.at = "over"
        self.outside.forget_pods()
        self.sent, self.outside.registered = {}, dict.fromkeys(self.outside.registered, frozenset[str]())
        if self.life is not None:
            self.life.hang_up()

    def kubelet_loses_its_checkpoint(self) -> None:
        """The kubelet restarts without its checkpoint, and the agent registers again, perhaps before its next scan."""
        self.outside.checkpoint = CheckpointVersion(frozenset(), {})
        for pod in self.outside.pods:
            pod.memory = False
        self.kubelet_restarts()
        kubelet = FileIdentity(0, len(self.outside.pods), 0)
        self.do("kubelet", self.here.agent.tracker.kubelet_started(kubelet))

    # Claims.

    @rule(driver=st.sampled_from([D, D, E]), index=SOME, limits=st.booleans())
    def scheduler_chooses(self, driver: str = D, index: int = 0, *, limits: bool = False) -> None:
        claims = self.outside.claims
        there = self.outside.slices[driver].there if driver in self.outside.slices else {}
        if free := [name for name in sorted(there) if free_shares(there[name], name, driver, claims.values())]:
            name, uid = free[index % len(free)], f"claim-{self.outside.number()}"
            hardware = self.outside.lists.get(there[name].key, "")
            claims[uid] = Claim(uid, driver, name, there[name], hardware, self.outside.new_pod(), limits=limits)

    @precondition(lambda self: self.outside.server_up)
    @rule()
    def scheduler_writes(self) -> None:
        for claim in self.outside.claims.values():
            claim.allocated = claim.exists

    @precondition(lambda self: self.outside.server_up)
    @rule(index=SOME, driver=st.sampled_from([D, D, E]), device=SOME)
    def claim_is_allocated_elsewhere(self, index: int = 0, driver: str = D, device: int = 0) -> None:
        """A claim is allocated another device for a new pod, while its old pod may still run on this node."""
        there = self.outside.slices[driver].there if driver in self.outside.slices else {}
        claims = [one for one in self.outside.claims.values() if one.allocated and one.node != "busy"]
        if not claims:
            return
        claim = claims[index % len(claims)]
        others = [one for one in self.outside.claims.values() if one is not claim]
        names = [one for one in sorted(there) if free_shares(there[one], one, driver, others)]
        if names and claim.driver == driver:
            claim.name = names[device % len(names)]
            claim.entry = there[claim.name]
            claim.hardware, claim.pod = self.outside.lists.get(claim.entry.key, ""), self.outside.new_pod()

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME, end=st.booleans())
    def kubelet_prepares(self, index: int = 0, end: bool = True) -> None:
        """The kubelet prepares a claim, or prepares it again, as after a restart, for the pod that uses it now."""
        nodes = {"none", "prepared", "stopped"}
        ready = [one for one in self.outside.claims.values() if one.allocated and one.node in nodes]
        if ready:
            claim = ready[index % len(ready)]
            if claim.driver in self.here.drivers:
                before, claim.node, claim.named = claim.node, "busy", True
                self.begin(f"claim {claim.uid}", self.prepare(claim, before))
                if end:
                    self.finish()

    async def prepare(self, claim: Claim, before: str) -> None:
        """Call NodePrepareResources for a claim, as the kubelet does."""
        asked = claim.pod
        claim.pods.add(asked)
        self.outside.write_state()
        try:
            answer = await self.here.prepare(claim)
        except ClaimError:
            claim.node = before if claim.node == "busy" else claim.node
        else:
            if claim.node == "busy":
                claim.node, claim.answer = ("prepared" if claim.pod == asked else before), answer
                claim.answered = asked
                names = {one.device for one in answer.devices}
                if claim.pod == asked and claim.allocated and names != {claim.name}:
                    self.problem = f"claim {claim.uid} is allocated {claim.name}, and its pod got {names}"
        self.outside.write_state()

    @rule(index=SOME)
    def container_with_claim_runs(self, index: int = 0) -> None:
        ready = [one for one in self.outside.claims.values() if one.node == "prepared" and one.answer is not None]
        if ready:
            self.run_container(ready[index % len(ready)])

    @precondition(lambda self: self.life is not None and self.outside.server_up)
    @rule(driver=st.sampled_from([D, D, E]), index=SOME)
    def claim_starts_well(self, driver: str = D, index: int = 0, *, limits: bool = False) -> None:
        """A pod with a claim starts, and no other step comes in between."""
        before = set(self.outside.claims)
        self.scheduler_chooses(driver, index, limits=limits)
        self.scheduler_writes()
        for uid in self.outside.claims.keys() - before:
            if driver in self.here.drivers:
                claim = self.outside.claims[uid]
                claim.node, claim.named = "busy", True
                self.do(f"claim {claim.uid}", self.prepare(claim, "none"))
                self.run_container(claim)

    def run_container(self, claim: Claim) -> None:
        """Start a container of a claim's pod, if the claim is prepared for it."""
        if claim.node == "prepared" and claim.answer is not None and claim.pod == claim.answered:
            hardware = hardware_of(claim.answer.spec)
            self.outside.containers.add(Container(claim.uid, claim.pod, hardware, claim.part))

    @rule(index=SOME)
    def container_with_claim_ends(self, index: int = 0) -> None:
        if there := sorted(self.outside.containers, key=str):
            one = there[index % len(there)]
            self.outside.containers.discard(one)
            claim = self.outside.claims.get(one.claim)
            if claim is not None and claim.pod == one.pod and claim.node == "prepared":
                claim.node = "stopped"

    @rule(index=SOME)
    def pod_with_claim_is_deleted_by_force(self, index: int = 0) -> None:
        """The kubelet forgets a pod with a claim, whose container runs on; later it unprepares the claim."""
        there = [one for one in self.outside.claims.values() if one.node == "prepared"]
        if there:
            there[index % len(there)].pods.clear()
            there[index % len(there)].node = "stopped"
            self.outside.write_state()

    @precondition(lambda self: self.life is not None)
    @rule()
    def kubelet_wipes_slices(self) -> None:
        """The kubelet deletes the slices of drivers that are no longer registered (kubelet 1.36, cm/dra/plugin)."""
        for driver in self.outside.slices.keys() - self.here.drivers.keys():
            del self.outside.slices[driver]

    def state_is_lost(self) -> None:
        """Lose the kubelet's claim state; the kubelet begins with an empty one."""
        for claim in self.outside.claims.values():
            if claim.node != "busy":
                claim.named, claim.node, claim.answer = False, "none", None
                claim.pods.clear()
        self.outside.write_state()

    @precondition(lambda self: self.life is not None)
    @rule(index=SOME, end=st.booleans())
    def kubelet_unprepares(self, index: int = 0, end: bool = True) -> None:
        ended = [one for one in self.outside.claims.values() if one.node == "stopped"]
        if ended:
            claim = ended[index % len(ended)]
            if claim.driver in self.here.drivers:
                claim.node = "busy"
                self.begin(f"claim {claim.uid}", self.unprepare(claim))
                if end:
                    self.finish()

    async def unprepare(self, claim: Claim) -> None:
        """Call NodeUnprepareResources for a claim, as the kubelet does."""
        try:
            await self.here.unprepare(claim)
        except ClaimError:
            claim.node = "stopped"
        else:
            claim.node, claim.named, claim.answer = "none", False, None
            claim.pods.clear()
        self.outside.write_state()

    @precondition(lambda self: self.outside.server_up)
    @rule(index=SOME)
    def claim_goes(self, index: int = 0) -> None:
        """A claim is deleted in any state, even while a container with it runs (after a deletion by force)."""
        there = [claim for claim in self.outside.claims.values() if claim.exists]
        if there:
            claim = there[index % len(there)]
            claim.exists = claim.allocated = False
            if claim.node == "prepared":
                claim.node = "stopped"

    @rule(up=st.booleans())
    def api_server(self, up: bool) -> None:
        self.outside.server_up = up

    # Claims of another vendor's driver, and hooks that hang.

    @rule(hardware=st.sampled_from(["", "", "h0", "h1"]))
    def foreign_claim(self, hardware: str = "") -> None:
        """Another vendor's driver prepares a claim for a device named like the agent's, perhaps the same hardware."""
        if len(self.outside.foreign) > 1 or (hardware and (self.work or self.asked_for(hardware))):
            return
        self.outside.foreign[self.outside.new_pod(old=True)] = hardware
        self.outside.foreign_files(self.home / "cdi")
        self.outside.write_state()

    def asked_for(self, hardware: str) -> bool:
        """Return whether a pod, claim or hook of the agent has this hardware, or may be about to get it."""
        held = any(of == hardware for of, _, _ in self.outside.holders())
        pods = any(pod.at != "over" for pod in self.outside.pods)
        return (
            held or pods or bool(self.outside.hooks) or any(one.node != "none" for one in self.outside.claims.values())
        )

    @rule(only_ours=st.booleans())
    def foreign_claims_end(self, only_ours: bool = False) -> None:
        self.outside.foreign = {uid: what for uid, what in self.outside.foreign.items() if only_ours and not what}
        self.outside.foreign_files(self.home / "cdi")
        self.outside.write_state()

    @rule(stuck=st.booleans())
    def hooks_hang(self, stuck: bool) -> None:
        self.outside.stuck = stuck
        if self.life is not None:
            for service in self.life.agent.services.values():
                service.source.hook_timeout = 0.0 if stuck else 60.0

    @rule()
    def hooks_end(self) -> None:
        for _, done in self.outside.hooks:
            done.set()
        self.outside.hooks = []
        self.turn()

    # What must never happen.

    def wrong(self) -> str:
        """Return what is wrong; "" if nothing is."""
        return self.outside.wrong() or self.problem or self.doubled_offer()

    def doubled_offer(self) -> str:
        """Return which device is offered twice, "" if none is; after a loss of the ledger this is not checked."""
        if self.damaged:
            return ""
        shown: dict[tuple[str, str], list[str]] = {}
        for driver, mine in self.outside.slices.items():
            for entry in mine.there.values():
                shown.setdefault(entry.key, []).append(driver)
        for resource, lines in self.sent.items():
            ids = self.outside.registered.get(resource, frozenset()) | {one for one, good in lines.items() if good}
            for name in {one.partition("::")[0] for one in ids}:
                shown.setdefault((resource, name), []).append("the kubelet")
        return next((f"{key} is offered by {by}" for key, by in shown.items() if len(by) > 1), "")

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert not self.wrong(), self.wrong()

    @invariant()
    def no_device_is_quarantined_without_damage(self) -> None:
        if not self.damaged and self.life is not None and self.life.ledger is not None:
            for record in self.life.ledger.snapshot.devices.values():
                assert record.state is not State.QUARANTINED, record

    # What must happen in the end.

    def leave_alone(self) -> None:
        """End all pods, claims and faults, and set a plain config; then all devices must come to be offered again."""
        self.outside.server_up, self.outside.prompt, self.outside.disk_fails = True, True, 0
        self.outside.drafts.clear()
        self.hooks_hang(stuck=False)
        self.hooks_end()
        self.finish()
        self.kubelet_admits()
        if self.life is None:
            self.agent_starts(frozenset(), None)
        self.outside.times, self.outside.lists = {}, dict(LISTS)
        self.foreign_claims_end(only_ours=True)
        share = self.config.get(R, Setting()).share
        self.reload({R: Setting(D, 1, share)})
        self.kubelet_wipes_slices()
        for _ in range(14):
            self.outside.pods = [replace_ended(pod) for pod in self.outside.pods]
            self.outside.containers.clear()
            self.outside.write_checkpoint()
            for claim in self.outside.claims.values():
                claim.exists = claim.allocated = False
                claim.node = "stopped" if claim.named and claim.node != "busy" else claim.node
            steps: list[Callable[[], None]] = [self.kubelet_unprepares] * len(self.outside.claims)
            for step in [*steps, self.agent_scans]:
                step()
            for index in range(len(self.here.drivers)):
                self.agent_settles_claims(index)
                if (runtime := self.runtime(index)) is not None:
                    self.do("resolve", self.here.resolve(runtime))
            self.all_goes_well_for_a_while(2)
            self.time_passes()
            for uid, claim in list(self.outside.claims.items()):
                unknown = claim.answer is None and claim.driver not in self.here.drivers
                if claim.node == "none" or unknown:  # its driver never prepared this claim, and nothing names it
                    del self.outside.claims[uid]
            self.nothing_is_wrong()
            if not (what := self.unrested(share)):
                return
            self.outside.prompt = True
        raise AssertionError(f"not at rest: {what}: {self.here.agent.register.snapshot}")

    def unrested(self, share: int) -> str:
        """Return which device is not offered as configured, or which claim or allocation is left; "" if none."""
        slices = {
            driver: sorted(entry.key[1] for entry in mine.there.values())
            for driver, mine in self.outside.slices.items()
        }
        mine = slices.pop(D, [])
        healthy = self.outside.registered.get(R, frozenset())
        now = self.here.agent.register.snapshot
        if sorted([*mine, *healthy]) != ["a", "b"] or len(mine) != share:
            waiting = {
                name: one.resources[R].handover.waiting for name, one in self.here.drivers.items() if R in one.resources
            }
            return f"share {share}: claims may have {mine}, pods {sorted(healthy)}; waiting {waiting}"
        if any(slices.values()):
            return f"offered by former drivers: {slices}"
        if now.allocations or now.claims or self.outside.claims:
            return f"held: {now.allocations}, {now.claims}, {self.outside.claims}"
        return ""


def replace_ended(pod: Pod) -> Pod:
    """Return the pod as one that has ended and that the kubelet has forgotten."""
    return replace(pod, at="over", memory=False)
