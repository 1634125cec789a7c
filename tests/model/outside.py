"""Kubelet, scheduler, API server and containers of one node, beside a life of the agent (`tests.model.life`).

The hardware of a container comes from an environment variable in the agent's answer, not from the agent's records. The
container's part of the hardware is that of the list or slice at the time of its request.
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
    """A pod of the plugin side. at: chosen, busy (in Allocate), answered, admitted, runs, over."""

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
        """The allocation in the checkpoint."""
        return Allocation(self.uid, "c", self.resource, self.device_id)


@dataclass(frozen=True)
class Entry:
    """A device in an accepted slice. replicas: the number of claims that may share it."""

    key: Key
    replicas: int


@dataclass(eq=False)
class Claim:
    """A claim. driver, name, part: of its allocation. pod: the UID of the pod that may use it. limits: for its limits.

    answer: the latest answer, for the pod `answered`. node: none, busy (in Prepare or Unprepare), prepared, stopped
    (the kubelet no longer knows its pod). named: the kubelet's claim state names the claim, with `pods`. hardware: the
    one that the scheduler allocated.
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
        """The part of the device that the claim has."""
        return Fraction(1, self.entry.replicas)

    def body(self) -> dict[str, Any]:
        """Return the object at the API server."""
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
    """A container that runs with a claim."""

    claim: str
    pod: str
    hardware: str
    part: Fraction


@dataclass(eq=False)
class Slices:
    """A driver's slices. ticket, pool: as the agent wants them. accepted: the ticket that the API server has."""

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
        """Wait until `let` is called for this step."""
        if not self.open:
            step = asyncio.get_running_loop().create_future()
            self.waiting.append(step)
            await step

    def let(self, index: int) -> None:
        """Let one waiting step go on."""
        self.waiting.pop(index % len(self.waiting)).set_result(None)


class Outside:
    """The node without the agent; methods have the names of the real ones that they replace."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "kubelet"
        self.logs = home / "logs"
        for path in (self.root / "device-plugins", self.logs, home / "cdi"):
            path.mkdir(parents=True)
        self.gate = Gate()
        self.later = 0.0
        self.numbers = 0
        self.lists = dict(LISTS)
        self.times: dict[str, int] = {}
        self.pods: list[Pod] = []
        self.claims: dict[str, Claim] = {}
        self.containers: set[Container] = set()
        self.foreign: dict[str, str] = {}
        """Claims of another vendor's driver with running containers, and their hardware if it is one of the agent's."""
        self.hooks: list[tuple[str, asyncio.Event]] = []
        """Running hooks, with their hardware."""
        self.stuck = False
        self.registered: dict[str, frozenset[str]] = {}
        self.checkpoint: CheckpointVersion | None = CheckpointVersion(frozenset(), {})
        self.drafts: list[CheckpointVersion] = []
        """Checkpoints that writers of the kubelet have composed and will write later."""
        self.prompt = False
        self.slices: dict[str, Slices] = {}
        self.lease: Mapping[str, str] = {}
        self.lease_wanted: Mapping[str, str] = {}
        """The annotations of the node's Lease: those on the API server, and those that the agent wants."""
        self.server_up = True
        self.disk_fails = 0
        """The number of commits that will fail; every second one of them is on disk all the same."""
        self.write_state()

    def number(self) -> str:
        """Return a number that was not used yet."""
        self.numbers += 1
        return str(self.numbers)

    def clock(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic() + self.later

    def devices(self, resource: str) -> list[Device]:
        """Return a resource's list."""
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
        """Open the register's database on a disk that may fail."""
        return FailingDisk(self, path)

    def made_up(self) -> CheckpointVersion:
        """Return the current contents for the device manager's checkpoint."""
        answers = {pod.allocation: pod.response for pod in self.pods if pod.memory}
        file: Any = object()  # each is another file
        return CheckpointVersion(frozenset(answers), dict(self.registered), file, answers)

    def write_checkpoint(self, draft: CheckpointVersion | None = None) -> None:
        """Write the device manager's checkpoint, with its current contents or those of a draft."""
        self.checkpoint = draft or self.made_up()
        self.forget_pods()

    def names(self, pod: Pod) -> bool:
        """Return whether the checkpoint names a pod."""
        return self.checkpoint is not None and pod.allocation in self.checkpoint.allocations

    def forget_pods(self) -> None:
        """Drop ended pods that neither the kubelet nor the checkpoint names."""
        self.pods = [pod for pod in self.pods if pod.at != "over" or pod.memory or self.names(pod)]

    def write_state(self) -> None:
        """Write the claim state."""
        found = []
        for claim in self.claims.values():
            if claim.named:
                listed = [
                    AnsweredDevice((one.request,), one.pool, one.device, one.cdi_ids, one.share or None)
                    for one in (claim.answer.devices if claim.answer is not None else ())
                ]
                found.append(DevicesOfClaim("default", claim.uid, claim.uid, {claim.driver: listed}, set(claim.pods)))
        for uid in self.foreign:
            # Its device has the name of one of the agent's devices.
            device = AnsweredDevice(("r",), NODE, "a", (f"{FOREIGN}/claim={uid}",), None)
            found.append(DevicesOfClaim("default", uid, uid, {FOREIGN: [device]}, {uid}))
        claim_state.write(self.root, found)

    def foreign_files(self, cdi_directory: Path) -> None:
        """Write the other vendor's CDI files, with the device numbers of the agent's hardware if a claim has it."""
        for path in cdi_directory.glob(f"{FOREIGN}-*"):
            path.unlink()
        for uid, hardware in self.foreign.items():
            node = {"path": "/dev/nic", "type": "c", "major": 240, "minor": int(hardware[1:])} if hardware else None
            edits = {"deviceNodes": [node]} if node is not None else {"env": ["NIC=1"]}
            text = json.dumps({"kind": f"{FOREIGN}/claim", "devices": [{"name": uid, "containerEdits": edits}]})
            (cdi_directory / f"{FOREIGN}-claim_{uid}.json").write_text(text)

    def running(self) -> frozenset[str]:
        """Return the pods with running processes."""
        pods = {pod.uid for pod in self.pods if pod.at == "runs"}
        return frozenset(pods | {one.pod for one in self.containers} | self.foreign.keys())

    def read(self, named: Collection[str] = ()) -> PodProcesses:
        """Return the pods with processes in cgroups."""
        return PodProcesses(self.running())

    def in_cgroups(self) -> frozenset[str]:
        """Return the pods that have cgroups."""
        return self.running()

    async def list_pods(self) -> PodResourcesReport:
        """Answer PodResources `List`."""
        active = {pod.uid for pod in self.pods if pod.memory and pod.at in {"admitted", "runs"}}
        active |= {uid for claim in self.claims.values() if claim.named for uid in claim.pods}
        active |= self.foreign.keys()
        return PodResourcesReport(frozenset(), frozenset(("default", uid) for uid in active))

    # The API server: for the cluster's client, and for the publisher.

    async def ask(self) -> None:
        """Wait for the API server. Raises ClusterError."""
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
        """Read a claim, or the node's Lease."""
        await self.ask()
        if kind is LEASES:
            return {"metadata": {"annotations": dict(self.lease)}}
        if name not in self.claims or not self.claims[name].exists:
            raise NotFoundError(name)
        return self.claims[name].body()

    async def pages(self, kind: Kind, form: Form[Page[ListedClaim]]) -> AsyncIterator[Page[ListedClaim]]:
        """List all claims, in one part."""
        await self.ask()
        items = [one.body() for one in self.claims.values() if one.exists]
        listed = {"kind": f"{kind.kind}List", "metadata": {"resourceVersion": "1"}, "items": items}
        yield form.decode(encoded(listed))

    async def claim(self, name: str, namespace: str) -> ListedClaim:
        """Read what a claim is allocated."""
        return CLAIM.decode(encoded({"kind": "ResourceClaim", **await self.get(RESOURCE_CLAIMS, name, namespace)}))

    async def event(self, *_: object) -> None:
        """Write no Event."""

    def want(self, pool: Pool) -> int:
        """Set the wanted slices of a driver."""
        mine = self.slices.setdefault(pool.driver, Slices())
        if mine.pool != pool:
            mine.ticket, mine.pool = mine.ticket + 1, pool
        return mine.ticket

    def state(self, driver: str) -> PoolState:
        """Return the wanted and the accepted ticket of a driver's slices."""
        mine = self.slices.get(driver, Slices())
        return PoolState(mine.ticket, mine.accepted)

    async def listed(self, driver: str, seconds: float) -> None:
        """There is no watch: the agent lists the slices."""

    def withdrawn(self, driver: str, device: str) -> float | None:
        """Return since when no slice offers a device; None if one does."""
        return None if device in self.slices.get(driver, Slices()).there else 0.0

    def offering(self, driver: str, device: str) -> str:
        """Return that no other slice offers a device."""
        return ""

    def accept(self, driver: str) -> None:
        """Let the API server accept the wanted slices."""
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

    # What must be true.

    def holders(self) -> Iterator[tuple[str, str, Fraction]]:
        """Yield the holders: hardware, holder, and the held part."""
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
        """Return which hardware has holders of more than one whole; "" if none has."""
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
    """Reads the checkpoint of `Outside`."""

    outside: Outside

    def newest(self, *, nodes: bool = False) -> CheckpointVersion:
        """Return the current checkpoint."""
        last = self.known.last
        return last if last is self.outside.checkpoint else self.read()

    def read(self) -> CheckpointVersion:
        """Read the file now."""
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
    """A database connection whose next `disk_fails` commits fail."""

    def __init__(self, outside: Outside, path: str) -> None:
        self._outside = outside
        self._inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def execute(self, sql: str, *args: Any) -> Any:
        """Execute a statement, or raise."""
        if sql.startswith("COMMIT") and self._outside.disk_fails:
            self._outside.disk_fails -= 1
            if self._outside.disk_fails % 2:
                self._inner.execute(sql)
            raise sqlite3.OperationalError("disk I/O error")
        return self._inner.execute(sql, *args)

    def close(self) -> None:
        """Close it."""
        self._inner.close()


def free_shares(entry: Entry, name: str, driver: str, claims: Collection[Claim]) -> bool:
    """Return whether the scheduler finds a free share of a device."""
    taken = sum(one.exists and (one.driver, one.name) == (driver, name) for one in claims)
    whole = any(one.exists and (one.driver, one.name, one.entry.replicas) == (driver, name, 1) for one in claims)
    return taken < entry.replicas and not whole
