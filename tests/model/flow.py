"""The agent's work on one node without sockets: the real register, DRA driver, CDI files, and moves of devices.

Grants, pods and claims, which outlive the agent's process, are recorded as they happen (`record`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self, cast

from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, Device
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion
from deviceplugin.kubelet.device_list import DeviceIds
from deviceplugin.kubelet.holders import HolderEvidence, kubelet_snapshot
from deviceplugin.node.scanning import HolderScanner
from deviceplugin.register import operations
from deviceplugin.register.records import Allocation, LedgerError, RegisterSnapshot, Side, State
from deviceplugin.register.register import Register, RegisterHost
from deviceplugin.register.rules import Evidence, KubeletSnapshot
from deviceplugin.register.store import Store
from deviceplugin.source import DeviceSource
from dra_bridge.driver import (
    ClaimError,
    ClaimRef,
    ClusterClaims,
    Driver,
    DriverHost,
    DriverNode,
    Prepared,
    ServedResource,
)
from dra_bridge.handover.moved import Allocated, MovedResource
from dra_bridge.handover.moves import Handover
from dra_bridge.handover.planner import Moving
from dra_bridge.handover.share import Share
from dra_bridge.ledger.store import Ledger, connected
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import Watched

R: Final = "example.com/fpga"
D: Final = "fpga.example.com"
NODE: Final = "node-1"
DEVICES: Final = ("a", "b")
Step = Callable[[str], None]


class Source(DeviceSource):
    """A source with hooks, so that a claim is reserved on disk before it is prepared."""

    resource = R
    driver = D

    def prepare(self, devices: Sequence[Device], config: object) -> ContainerEdits:
        """Return a variable for the container, and set no device up."""
        return ContainerEdits({"SET": "up"})

    def unprepare(self, devices: Sequence[Device]) -> None:
        """Do nothing."""


class Plain(DeviceSource):
    """A source without hooks, so that claims are reserved in memory only."""

    resource = R
    driver = D


@dataclass
class Outside(ClusterClaims):
    """Stands in for kubelet and API server, and has what they know.

    pods: the devices that pods hold by limits; a pod has the name of its device as UID. allocated: the device that each
    claim is allocated, by the claim's UID. running: the device that each claim's containers hold, by the claim's UID.
    """

    pods: set[str] = field(default_factory=set)
    allocated: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)

    def record(self, word: str, name: str) -> None:
        """Record an event."""
        if word == "granted":
            self.pods.add(name)
        elif word == "ended":
            self.pods.discard(name)
        elif word == "allocated":
            uid, device = name.split("=")
            self.allocated[uid] = device
        elif word == "prepared":
            self.running[name] = self.allocated[name]
        elif word == "stopped":
            self.running.pop(name, None)
        elif word == "deallocated":
            self.allocated.pop(name, None)

    def evidence(self) -> HolderEvidence:
        """Return what the kubelet's checkpoint (written at the agent's request) and the cgroups show about holders."""
        named = frozenset(Allocation(name, "c", R, name) for name in self.pods)
        return HolderEvidence(
            [CheckpointVersion(named, {})], current=True, pods=PodProcesses(running=frozenset(self.pods))
        )

    # Requests of the driver, and of the moves of devices, to the API server.

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a claim by its name, which is its UID here."""
        if name not in self.allocated:
            return None
        result = {"request": "fpga", "driver": D, "pool": NODE, "device": self.allocated[name]}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name, "uid": name},
            "status": {
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod"}],
                "allocation": {"devices": {"results": [result], "config": []}},
            },
        }

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing in place of writing a claim's status."""

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Do nothing in place of writing an Event."""

    async def listed(self) -> Allocated:
        """List all claims."""
        return Allocated(time.monotonic(), {(R, device): f"default/{uid}" for uid, device in self.allocated.items()})


class Served:
    """A resource's devices and their ids at the kubelet, as the register gets them from the agent."""

    def __init__(self, source: DeviceSource, inventory: Inventory, held: Callable[[str], bool]) -> None:
        self.source = source
        self.resource = source.resource
        self.inventory = inventory
        self.ids = DeviceIds(source, inventory, held)

    def ids_now(self, device: Device) -> tuple[str, ...]:
        """Return the current ids of a device at the kubelet."""
        return self.ids.names_of(device)

    def device_of(self, device_id: str) -> str:
        """Return the device of one of the kubelet's ids."""
        return self.ids.device_id_of(device_id)


class Grants(RegisterHost):
    """The register (who holds which device) of one process of the agent, and the scanner that looks for holders.

    reconciled: the (resource, device) pairs whose holders in checkpoint, cgroups and claim files were compared with the
    ledger. bridged: the resources whose devices are granted only after this comparison.
    """

    def __init__(self, store: Store, served: Mapping[str, Served], *, bridged: Collection[str]) -> None:
        self.reconciled: set[tuple[str, str]] = set()
        self.services, self._bridged = served, bridged
        self.register = Register(self, store)
        tracker: Any = SimpleNamespace(granted=lambda one: None, title=str, observed=frozenset())
        services: Any = served
        self.scanner = HolderScanner(
            services, tracker, self.register, cast("Any", None), 0.0, cast("Any", None), always=True
        )

    def evidence_missing(self, resource: str, device: str) -> str:
        known = resource not in self._bridged or (resource, device) in self.reconciled
        return "" if known else "the agent has just started"


def allocations_of(now: RegisterSnapshot) -> frozenset[Allocation]:
    """Return the allocations whose containers the register knows."""
    records = now.allocations.values()
    return frozenset(Allocation(*who, one.resource, one.device_id) for one in records for who in one.holders)


class Flow(DriverHost):
    """One process of the agent, from its start to its end."""

    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(
        self, directory: Path, async_ledger: AsyncLedger, outside: Outside, source: DeviceSource, step: Step
    ) -> None:
        self.directory = directory
        self.async_ledger = async_ledger
        self.outside = outside
        self.step = step
        self.inventory = Inventory(R)
        self.inventory.publish([Device(name, nodes=["/dev/null"]) for name in DEVICES])
        served = Served(source, self.inventory, lambda device: self.register.is_held((R, device)))
        self.grants = Grants(async_ledger, {R: served}, bridged=(R,))
        self.register = self.grants.register
        self.driver = Driver(
            D,
            DriverNode(NODE, self.register, outside, str(directory / "cdi"), boot="1"),
            [ServedResource(source, self.inventory)],
            self,
        )
        streams = SimpleNamespace(shown=self._shown, staying=lambda: self._shown()[1], refresh=lambda: None)
        endpoint = SimpleNamespace(resource=R, source=source, ids=served.ids, streams=streams)
        moved = MovedResource(cast("Any", endpoint), self.inventory, self.register, self, self, self, Moving(D))
        self.handover = Handover(moved, Share(0))
        self.handover.to_plugin.waits = lambda: Backoff(first=0.0, most=0.0)
        self._clock = itertools.count(11, 11)
        self._names = {name: device.id for name, (_, device) in self.driver.devices.by_name.items()}

    @classmethod
    async def begin(
        cls,
        directory: Path,
        outside: Outside,
        source: DeviceSource,
        step: Step = lambda name: None,
        connect: Callable[[str], Any] = connected,
    ) -> Self:
        """Start the agent: open the ledger, compare it with the holders on the node, and offer devices."""
        async_ledger = AsyncLedger(Ledger(str(directory / "ledger.db"), connect=Watched.by(step, connect)))
        flow = cls(directory, async_ledger, outside, source, step)
        await flow.patiently(flow.place)
        flow.publish()
        return flow

    async def end(self) -> None:
        """Close driver and ledger."""
        await self.driver.close()
        await self.async_ledger.close()

    async def place(self) -> None:
        """Compare the ledger with the holders that checkpoint, cgroups and claim files show."""
        held = kubelet_snapshot(0, holders.holders((), self.outside.evidence()), R, str).held
        claims = [
            claim
            for claim in self.driver.claim_evidence((), R)
            if (D, claim.uid) not in self.async_ledger.snapshot.claims
        ]
        evidence = Evidence(held, claims)
        await self.async_ledger.do(operations.reconcile_evidence(R, evidence, DEVICES, Side.PLUGIN, time.time(), D))
        self.grants.reconciled |= {(R, name) for name in DEVICES}

    # Methods that the DRA driver calls.

    def ready(self, resource: str, device: str) -> bool:
        """Return whether a device's holders on the node were compared with the ledger."""
        return (resource, device) in self.grants.reconciled

    # Methods that the moves of devices call.

    def _shown(self) -> tuple[float, frozenset[str]]:
        return 0.0, frozenset(name for name in DEVICES if self.register.offers(R, name))

    async def scan(self, resource: str, device_ids: Collection[str]) -> KubeletSnapshot:
        """Scan for the holders of devices."""
        before = self.async_ledger.snapshot.sequence
        known = allocations_of(self.async_ledger.snapshot)
        now = holders.holders(known, self.outside.evidence(), float(next(self._clock)))
        return (await self.grants.scanner.observe(now, before))[resource]

    def title(self, pod_uid: str) -> str:
        """Return a pod's name, here its UID."""
        return pod_uid

    def endpoint(self, resource: str) -> None:
        """Return no endpoint, since there is no other resource."""

    def successor(self, resource: str) -> None:
        """Return no driver, since there is no other driver to which a device could go."""

    def moved(self, resource: str) -> None:
        """Write the slice, since devices were moved."""
        self.publish()

    async def allocated(self) -> Allocated:
        """Return the devices that claims are allocated."""
        return await self.outside.listed()

    async def allocates(self, claim: str, resource: str, device: str | None) -> bool:
        """Return whether a claim is allocated this device at present."""
        return self.outside.allocated.get(claim.partition("/")[2], "") == device

    def publish(self) -> None:
        """Write the slice: one atomic write, as the API server takes it."""
        body = json.dumps([name for name in DEVICES if self.state(name).offered])
        path = self.directory / "slice.json"
        if not path.exists() or path.read_text() != body:
            self.step("slice")
            path.with_suffix(".new").write_text(body)
            os.replace(path.with_suffix(".new"), path)
            self.step("slice accepted")

    def slice(self) -> list[str]:
        """Return the devices in the slice that the API server has."""
        path = self.directory / "slice.json"
        found: list[str] = json.loads(path.read_text()) if path.exists() else []
        return found

    def withdrawn(self, resource: str, device: str) -> float | None:
        """Return since when the slice is without a device; None if the slice has it."""
        return None if device in self.slice() else 0.0

    def offering(self, resource: str, device: str) -> str:
        """Return "", which means that no other slice offers the device."""
        return ""

    # Requests of the kubelet for pods and claims; the kubelet retries each request that fails.

    async def patiently(self, work: Callable[[], Any]) -> Any:
        """Call `work` until a call succeeds, at most 21 times."""
        for last in (*[False] * 20, True):
            try:
                return await work()
            except (LedgerError, DeviceConflictError, ClaimError):
                if last:
                    raise
        raise AssertionError

    async def allocate(self, device: str) -> None:
        """Allocate a device of the plugin to a pod."""
        await self.patiently(lambda: self.register.grant(R, {device: device}))

    async def prepare(self, uid: str) -> Prepared:
        """Prepare a claim, as the kubelet does."""

        async def once() -> Prepared:
            answer = (await self.driver.prepare([ClaimRef("default", uid, uid)]))[uid]
            if isinstance(answer, ClaimError):
                await self.handover._step()
                raise answer
            return answer

        return cast("Prepared", await self.patiently(once))

    async def unprepare(self, uid: str) -> None:
        """Unprepare a claim, as the kubelet does."""

        async def once() -> None:
            answer = (await self.driver.unprepare([ClaimRef("default", uid, uid)]))[uid]
            if answer is not None:
                raise answer

        await self.patiently(once)

    async def advance(self) -> None:
        """Make the steps of devices' moves that are possible now, and write the slice."""
        await self.handover._step()
        self.publish()

    async def move(self, share: int, until: Callable[[], bool] | None = None) -> None:
        """Request `share` devices for claims, and move devices until claims have that number or `until` is true."""
        self.handover.ask(Share(share))
        for _ in range(40):
            with contextlib.suppress(LedgerError):
                await self.advance()
            states = [self.state(name) for name in DEVICES]
            resting = states.count(State.DRA) == share and states.count(State.PLUGIN) == len(DEVICES) - share
            if until() if until is not None else resting:
                self.publish()
                return
        raise AssertionError(f"the move to {share} never ends: {self.async_ledger.snapshot}, {self.handover.waiting}")

    def state(self, device: str) -> State:
        """Return the state of a device."""
        return self.async_ledger.snapshot.device(R, device).state


async def story(flow: Flow, record: Callable[[str, str], None]) -> None:
    """Grant devices to pods, prepare and unprepare a claim, and move devices from limits to claims and back."""
    await flow.allocate("a")
    record("granted", "a")
    await flow.move(1)
    record("allocated", "1=b")
    await flow.prepare("1")
    record("prepared", "1")
    await flow.move(0, lambda: flow.state("b") is State.TO_PLUGIN)
    record("stopped", "1")
    await flow.unprepare("1")
    record("deallocated", "1")
    await flow.move(0)
    await flow.allocate("b")
    record("granted", "b")
    await flow.move(2, lambda: flow.state("a") is State.TO_DRA)
    record("ended", "a")
    await flow.move(2, lambda: flow.state("a") is State.DRA)
    await flow.move(0, lambda: flow.state("a") is State.PLUGIN)


async def aftermath(directory: Path, outside: Outside, source: DeviceSource) -> None:
    """Start the agent again, check that held devices are refused, and that all can move between limits and claims."""
    flow = await Flow.begin(directory, outside, source)
    try:
        for device in DEVICES:
            assert flow.state(device) is not State.QUARANTINED, flow.async_ledger.snapshot
            assert not (flow.register.offers(R, device) and device in flow.slice())
        for device in sorted(outside.pods):
            outside.record("allocated", f"late-{device}={device}")
            late = ClaimRef("default", f"late-{device}", f"late-{device}")
            assert isinstance((await flow.driver.prepare([late]))[late.uid], ClaimError)
            outside.record("deallocated", f"late-{device}")
        for uid, device in sorted(outside.running.items()):
            try:
                await flow.register.grant(R, {device: device})
            except DeviceConflictError:
                pass
            else:
                raise AssertionError(f"device {device} was given to a pod while claim {uid} has it")
        # The kubelet retries preparations that were not answered.
        for uid in sorted(outside.allocated.keys() - {"late"}):
            if outside.allocated[uid] not in outside.pods:
                await flow.prepare(uid)
        for uid in sorted(outside.allocated):
            outside.record("stopped", uid)
            await flow.unprepare(uid)
            outside.record("deallocated", uid)
        outside.pods.clear()
        await flow.driver.reconciler.reconcile((), PodProcesses(running=frozenset()))
        await flow.move(2)
        assert flow.slice() == list(DEVICES)
        await flow.move(0)
        assert flow.slice() == []
        assert not flow.async_ledger.snapshot.claims
        assert not flow.driver.claim_evidence((), R)
    finally:
        await flow.end()


def watched(step: Step, directory: str) -> Iterator[None]:
    """Call `step` also at each change of CDI files. This is a generator for contextlib."""
    from deviceplugin import files

    draft, rename, remove = files._draft, os.rename, os.remove

    def drafted(path: str, data: bytes, mode: int) -> None:
        step("draft")
        draft(path, data[: len(data) // 2], mode)
        step("half a draft")
        Path(path).write_bytes(data)
        step("drafted")

    def renamed(source: Any, target: Any, **options: Any) -> None:
        ours = str(target).startswith(directory)
        if ours:
            step("rename")
        rename(source, target, **options)
        if ours:
            step("renamed")

    def removed(path: Any, **options: Any) -> None:
        ours = str(path).startswith(directory)
        if ours:
            step("remove")
        remove(path, **options)
        if ours:
            step("removed")

    files._draft = drafted
    os.rename, os.remove = renamed, removed  # type: ignore[assignment]
    try:
        yield
    finally:
        files._draft = draft
        os.rename, os.remove = rename, remove


watching = contextlib.contextmanager(watched)


def replayed(lines: Iterable[str]) -> Outside:
    """Return kubelet and API server as they are after these recorded events."""
    outside = Outside()
    for line in lines:
        word, name = line.split()
        outside.record(word, name)
    return outside
