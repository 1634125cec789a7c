"""Kubelet, scheduler, API server and containers of one node, around one process of the agent (`tests.model.life`).

Which hardware a container has is known from an environment variable in the agent's answer, not from the agent's
records. Which part of the hardware the container has is known from the device list or slice at the time of its request.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from deviceplugin import naming
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointError, CheckpointReader, CheckpointVersion
from deviceplugin.kubelet.podresources import PodResourcesReport
from deviceplugin.register.records import Allocation
from deviceplugin.testing import claim_state
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim
from dra_bridge.driver import Prepared
from dra_bridge.kube import LEASES, RESOURCE_CLAIMS, ClusterError, Kind, ListedClaim, NotFoundError
from dra_bridge.kube.forms import CLAIM, FOR_LIMITS, Form, Page
from dra_bridge.slices.desired import Pool, slice_name
from dra_bridge.slices.publisher import PoolState
from dra_bridge.testing.protobuf import encoded

R: Final = "example.com/fpga"
S: Final = "example.com/half"
D: Final = "fpga.example.com"
E: Final = "other.example.com"
FOREIGN: Final = "nic.example.net"
NODE: Final = "node-1"
Key = tuple[str, str]
LISTS: Final[Mapping[Key, str]] = {(R, "a"): "h0", (R, "b"): "h1", (S, "x"): "h0"}
"""The hardware of each device at first. S is a second resource with the hardware h0."""
TOKENS: Final = {f"h{number}": frozenset({f"uuid:h{number}", f"char:240:{number}"}) for number in (0, 1)}
_HARDWARE: Final = re.compile(r"HARDWARE=(\w+)")


@dataclass(eq=False)
class Pod:
    """A pod with a limit.

    at: chosen (the kubelet chose a device), busy (Allocate is called), answered, admitted, runs, over. memory: the
    kubelet's device manager knows the pod. hardware, part, response: what Allocate gave.
    """

    uid: str
    resource: str
    device_id: str
    at: str = "chosen"
    memory: bool = False
    hardware: str = ""
    part: Fraction = Fraction(1)
    response: str = ""

    @property
    def allocation(self) -> Allocation:
        """The pod's allocation, as the checkpoint names it."""
        return Allocation(self.uid, "c", self.resource, self.device_id)


@dataclass(frozen=True)
class Entry:
    """A device in an accepted slice. replicas: the number of claims that may share it."""

    key: Key
    replicas: int


@dataclass(eq=False)
class Claim:
    """A claim. driver, name, part: the allocated device. hardware: what that device was when the scheduler chose it.

    pod: the UID of the pod that may use the claim. limits: whether the claim stands for the limits of its pod. answer:
    the driver's latest answer, for the pod `answered`. node: none, busy (in Prepare or Unprepare), prepared, or stopped
    (the kubelet no longer knows the pod). named: whether the kubelet's claim state names the claim, with `pods`.
    """

    uid: str
    driver: str
    name: str
    entry: Entry
    hardware: str
    pod: str
    allocated: bool = False
    exists: bool = True
    node: str = "none"
    named: bool = False
    pods: set[str] = field(default_factory=set)
    answer: Prepared | None = None
    answered: str = ""
    limits: bool = False

    @property
    def part(self) -> Fraction:
        """The part of the device that the claim is allocated."""
        return Fraction(1, self.entry.replicas)

    def body(self) -> dict[str, Any]:
        """Return the ResourceClaim object as the API server has it."""
        result: dict[str, Any] = {"request": "r", "driver": self.driver, "pool": NODE, "device": self.name}
        if self.entry.replicas > 1:
            result |= {"shareID": f"share-{self.uid}", "consumedCapacity": {naming.SHARES: "1"}}
        status: dict[str, Any] = {"reservedFor": [{"resource": "pods", "name": "p", "uid": self.pod}]}
        status["allocation"] = {"devices": {"results": [result], "config": []}}
        metadata = {"namespace": "default", "name": self.uid, "uid": self.uid, "resourceVersion": "1"}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": metadata | ({"annotations": {FOR_LIMITS: "true"}} if self.limits else {}),
            "status": status if self.allocated else {},
        }


@dataclass(frozen=True)
class Container:
    """A running container of a pod with a claim, and the hardware that it has."""

    claim: str
    pod: str
    hardware: str
    part: Fraction


@dataclass(eq=False)
class Slices:
    """A driver's slices. ticket, pool: what the agent wants. accepted, there, annotations: what the API server has."""

    ticket: int = 0
    pool: Pool | None = None
    accepted: int = 0
    there: dict[str, Entry] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


class Gate:
    """Stops the agent's work at each step until a test lets it go on."""

    def __init__(self) -> None:
        self.open = True
        self.waiting: list[asyncio.Future[None]] = []

    async def passed(self) -> None:
        """Wait until a test lets this step go on (`let`), unless the gate is open."""
        if not self.open:
            step = asyncio.get_running_loop().create_future()
            self.waiting.append(step)
            try:
                await step
            finally:
                if step in self.waiting:  # The agent has cancelled its work.
                    self.waiting.remove(step)

    def let(self, index: int) -> None:
        """Let one waiting step go on."""
        self.waiting.pop(index % len(self.waiting)).set_result(None)


class Outside:
    """The node without the agent; methods have the names of the real methods that they replace."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "kubelet"
        self.logs = home / "logs"
        for path in (self.root / "device-plugins", self.logs, home / "cdi"):
            path.mkdir(parents=True)
        self.gate = Gate()
        self.later = 0.0
        self.readings = 1_000_000_000
        """The number of readings of the clock."""
        self.began = time.time() - self.readings / 1_000_000
        """The time that makes the first reading of `wall` the present time, like the times of the model's files."""
        self.numbers = 0
        self.lists = dict(LISTS)
        self.times: dict[str, int] = {}
        self.pods: list[Pod] = []
        self.claims: dict[str, Claim] = {}
        self.containers: set[Container] = set()
        self.foreign: dict[str, str] = {}
        """The claims of another vendor's driver: for each the hardware, or "" if it is not hardware of the agent."""
        self.hooks: list[tuple[str, asyncio.Event]] = []
        """The hooks that hang, each with its hardware and the event that ends it."""
        self.stuck = False
        self.registered: dict[str, frozenset[str]] = {}
        self.checkpoint: CheckpointVersion | None = CheckpointVersion(frozenset(), {})
        self.drafts: list[CheckpointVersion] = []
        """Checkpoints whose contents the kubelet has composed, and that it will write later."""
        self.prompt = False
        self.slices: dict[str, Slices] = {}
        self.lease: Mapping[str, str] = {}
        self.lease_wanted: Mapping[str, str] = {}
        """The annotations of the node's Lease: those that the API server has, and those that the agent wants."""
        self.server_up = True
        self.disk_fails = 0
        """The number of commits of the ledger that will fail; every second one is on disk in spite of its error."""
        self.write_state()

    def number(self) -> str:
        """Return a number that was not used before."""
        self.numbers += 1
        return str(self.numbers)

    def clock(self) -> float:
        """Return the seconds of the model's monotonic clock, which the time that a walk takes does not move."""
        return self.steady() + self.later

    def steady(self) -> float:
        """Return the seconds of `clock` without those that a walk lets pass: each reading is a microsecond later."""
        self.readings += 1
        return self.readings / 1_000_000

    def wall(self) -> float:
        """Return the seconds of the model's clock of the day."""
        return self.began + self.clock()

    def devices(self, resource: str) -> list[Device]:
        """Return the list of a resource's devices."""
        return [
            Device(name, identity=f"uuid:{what}", edits=ContainerEdits({"HARDWARE": what}))
            for (of, name), what in self.lists.items()
            if of == resource
        ]

    # The kubelet.

    def new_pod(self, *, old: bool = False) -> str:
        """Return a new pod's UID and make its log directory. old: the directory is older than all others."""
        uid = f"pod-{self.number()}"
        logs = self.logs / f"default_{uid}_{uid}"
        logs.mkdir()
        if old:
            os.utime(logs, (0, 0))
        return uid

    def connect(self, path: str) -> Any:
        """Open the ledger's database on a disk that may fail."""
        return FailingDisk(self, path)

    def made_up(self) -> CheckpointVersion:
        """Return a checkpoint with what the kubelet's device manager has in memory now."""
        answers = {pod.allocation: pod.response for pod in self.pods if pod.memory}
        file: Any = object()  # each checkpoint is a file of its own
        return CheckpointVersion(frozenset(answers), dict(self.registered), file, answers)

    def write_checkpoint(self, draft: CheckpointVersion | None = None) -> None:
        """Write the device manager's checkpoint: what it has in memory now, or an earlier draft."""
        self.checkpoint = draft or self.made_up()
        self.forget_pods()

    def names(self, pod: Pod) -> bool:
        """Return whether the checkpoint names a pod."""
        return self.checkpoint is not None and pod.allocation in self.checkpoint.allocations

    def forget_pods(self) -> None:
        """Remove the ended pods that neither the kubelet's memory nor its checkpoint names."""
        self.pods = [pod for pod in self.pods if pod.at != "over" or pod.memory or self.names(pod)]

    def write_state(self) -> None:
        """Write the kubelet's claim state."""
        found = []
        for claim in self.claims.values():
            if claim.named:
                listed = [
                    AnsweredDevice((one.request,), one.pool, one.device, one.cdi_ids, one.share or None)
                    for one in (claim.answer.devices if claim.answer is not None else ())
                ]
                found.append(DevicesOfClaim("default", claim.uid, claim.uid, {claim.driver: listed}, set(claim.pods)))
        for uid in self.foreign:
            # The other vendor's device has the name of one of the agent's devices.
            device = AnsweredDevice(("r",), NODE, "a", (f"{FOREIGN}/claim={uid}",), None)
            found.append(DevicesOfClaim("default", uid, uid, {FOREIGN: [device]}, {uid}))
        claim_state.write(self.root, found)

    def foreign_files(self, cdi_directory: Path) -> None:
        """Write CDI files for the other vendor's claims; a claim with the agent's hardware has its device numbers."""
        for path in cdi_directory.glob(f"{FOREIGN}-*"):
            path.unlink()
        for uid, hardware in self.foreign.items():
            node = {"path": "/dev/nic", "type": "c", "major": 240, "minor": int(hardware[1:])} if hardware else None
            edits = {"deviceNodes": [node]} if node is not None else {"env": ["NIC=1"]}
            text = json.dumps({"kind": f"{FOREIGN}/claim", "devices": [{"name": uid, "containerEdits": edits}]})
            (cdi_directory / f"{FOREIGN}-claim_{uid}.json").write_text(text)

    def running(self) -> frozenset[str]:
        """Return the UIDs of the pods with running processes."""
        pods = {pod.uid for pod in self.pods if pod.at == "runs"}
        return frozenset(pods | {one.pod for one in self.containers} | self.foreign.keys())

    def read(self, named: Collection[str] = ()) -> PodProcesses:
        """Return the pods with processes, as the agent reads them from cgroups."""
        return PodProcesses(self.running())

    async def list_pods(self) -> PodResourcesReport:
        """Answer `List` of PodResources with the pods that the kubelet counts as active."""
        active = {pod.uid for pod in self.pods if pod.memory and pod.at in {"admitted", "runs"}}
        active |= {uid for claim in self.claims.values() if claim.named for uid in claim.pods}
        active |= self.foreign.keys()
        return PodResourcesReport(frozenset(), frozenset(("default", uid) for uid in active))

    # Requests of the agent's client, and of its publisher of slices, to the API server.

    async def ask(self) -> None:
        """Wait until the test lets the request go on. Raises ClusterError if the API server is away."""
        await self.gate.passed()
        if not self.server_up:
            raise ClusterError("the API server is away")

    async def list(self, kind: Kind, **selected: str) -> Any:
        """List a driver's slices."""
        await self.ask()
        driver = selected["field_selector"].rpartition("=")[2]
        found = self.slices.get(driver, Slices())
        metadata = {"name": slice_name(NODE, driver, 0), "annotations": dict(found.annotations)}
        spec = {"driver": driver, "nodeName": NODE, "pool": {"name": NODE}}
        return SimpleNamespace(items=[{"metadata": metadata, "spec": spec}] if found.there else [])

    async def get(self, kind: Kind, name: str, namespace: str) -> Mapping[str, Any]:
        """Return a claim or the node's Lease."""
        await self.ask()
        if kind is LEASES:
            return {"metadata": {"annotations": dict(self.lease)}}
        if name not in self.claims or not self.claims[name].exists:
            raise NotFoundError(name)
        return self.claims[name].body()

    async def pages(self, kind: Kind, form: Form[Page[ListedClaim]]) -> AsyncIterator[Page[ListedClaim]]:
        """Yield all claims, as one page."""
        await self.ask()
        items = [one.body() for one in self.claims.values() if one.exists]
        listed = {"kind": f"{kind.kind}List", "metadata": {"resourceVersion": "1"}, "items": items}
        yield form.decode(encoded(listed))

    async def claim(self, name: str, namespace: str) -> ListedClaim:
        """Return a claim with what it is allocated."""
        return CLAIM.decode(encoded({"kind": "ResourceClaim", **await self.get(RESOURCE_CLAIMS, name, namespace)}))

    async def event(self, *_: object) -> None:
        """Do nothing in place of writing an Event."""

    def want(self, pool: Pool) -> int:
        """Record the slices that the agent wants for a driver, and return their ticket."""
        mine = self.slices.setdefault(pool.driver, Slices())
        if mine.pool != pool:
            mine.ticket, mine.pool = mine.ticket + 1, pool
        return mine.ticket

    def state(self, driver: str) -> PoolState:
        """Return the tickets of a driver's slices: of the wanted ones and of the accepted ones."""
        mine = self.slices.get(driver, Slices())
        return PoolState(mine.ticket, mine.accepted)

    async def listed(self, driver: str, seconds: float) -> None:
        """Do nothing: there is no watch here, and the agent lists the slices."""

    def withdrawn(self, driver: str, device: str) -> float | None:
        """Return since when no slice offers a device, or None if a slice offers it."""
        return None if device in self.slices.get(driver, Slices()).there else 0.0

    def offering(self, driver: str, device: str) -> str:
        """Return "", which means that no other slice offers the device."""
        return ""

    def accept(self, driver: str) -> None:
        """Have the API server accept the slices that the agent wants for a driver."""
        mine = self.slices[driver]
        if mine.pool is None:
            return
        mine.accepted, mine.annotations, mine.there = mine.ticket, mine.pool.annotations, {}
        self.lease = dict(self.lease_wanted)
        for offer in mine.pool.offers:
            resource, words = offer.snapshot.resource, {offer.snapshot.resource: offer.qualifier}
            for name, key in naming.published_names(words, {resource: offer.snapshot.devices}).items():
                if offer.offered is None or key[1] in offer.offered:
                    mine.there[name] = Entry(key, offer.replicas.get(key[1], 1))

    # Checks that no hardware has too many holders.

    def holders(self) -> Iterator[tuple[str, str, Fraction]]:
        """Yield for each holder the hardware, the holder's name and the held part."""
        for pod in self.pods:
            if pod.at == "runs":
                yield pod.hardware, f"pod {pod.uid} ({pod.device_id})", pod.part
        for claim, hardware, part in {(one.claim, one.hardware, one.part) for one in self.containers}:
            yield hardware, f"claim {claim}", part
        for uid, hardware in self.foreign.items():
            if hardware:
                yield hardware, uid, Fraction(1)
        for hardware, work in self.hooks:
            if not work.is_set():
                yield hardware, "a hook", Fraction(1)

    def wrong(self) -> str:
        """Return which hardware has holders whose parts are more than the whole; "" if there is none."""
        found = list(self.holders())
        for hardware in TOKENS:
            if sum(part for of, _, part in found if of == hardware) > 1:
                return f"{hardware} has too many holders: {[one[1:] for one in found if one[0] == hardware]}"
        return ""


def hardware_of(text: str) -> str:
    """Return the hardware that an answer gives to a container."""
    (found,) = set(_HARDWARE.findall(text))
    return str(found)


class Checkpoints(CheckpointReader):
    """A reader of checkpoints that reads the one of `Outside`."""

    outside: Outside

    def newest(self, *, nodes: bool = False) -> CheckpointVersion:
        """Return the current checkpoint."""
        last = self.known.last
        return last if last is self.outside.checkpoint else self.read()

    def read(self) -> CheckpointVersion:
        """Read the checkpoint now. Raises CheckpointError if there is none."""
        if self.outside.checkpoint is None:
            raise CheckpointError("it is not there")
        self.take([self.outside.checkpoint])
        return self.outside.checkpoint

    async def _rewritten(self, before: object, patience: float) -> CheckpointVersion | None:
        await self.outside.gate.passed()
        if not self.outside.prompt:
            return None
        self.outside.write_checkpoint()
        return self.outside.checkpoint


class FailingDisk:
    """A database connection whose commits fail while `disk_fails` is above 0."""

    def __init__(self, outside: Outside, path: str) -> None:
        self._outside = outside
        self._inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def execute(self, sql: str, *args: Any) -> Any:
        """Execute a statement, or raise an error if it is a commit that is to fail."""
        if sql.startswith("COMMIT") and self._outside.disk_fails:
            self._outside.disk_fails -= 1
            if self._outside.disk_fails % 2:
                self._inner.execute(sql)
            raise sqlite3.OperationalError("disk I/O error")
        return self._inner.execute(sql, *args)

    def close(self) -> None:
        """Close the connection."""
        self._inner.close()


def free_shares(entry: Entry, name: str, driver: str, claims: Collection[Claim]) -> bool:
    """Return whether the scheduler can allocate the device, or a replica of it, to one more claim."""
    taken = sum(one.exists and (one.driver, one.name) == (driver, name) for one in claims)
    whole = any(one.exists and (one.driver, one.name, one.entry.replicas) == (driver, name, 1) for one in claims)
    return taken < entry.replicas and not whole
