"""Scans for the holders of devices, and passes the results to the services of resources and to observers.

One task makes all scans. Other tasks ask for a scan, and wait for its result.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deviceplugin.backoff import Backoff
from deviceplugin.exclusion import DeviceKey
from deviceplugin.kubelet.holders import HolderSnapshot, kubelet_snapshot
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.node.device_log import HolderLog
from deviceplugin.node.evidence import NodeEvidence
from deviceplugin.node.service import Service
from deviceplugin.register.operations import Observed
from deviceplugin.register.records import LedgerError
from deviceplugin.register.register import Register
from deviceplugin.register.rules import KubeletSnapshot
from deviceplugin.register.waits import PROMPT

_LOG: Final = logging.getLogger(__name__)

_FIELDS: Final = ("resource", "device")
SOON: Final = 0.3
"""Seconds between a grant and the scan that should find the pod of the grant."""
BURST: Final = 0.9
"""Maximum seconds between the first of several grants and the scan for their pods, even if further grants follow."""


class ScanResult(NamedTuple):
    """The result of a scan.

    holders: the allocations that count as held. resources: for each resource, the same allocations in the form that the
    register compares with its records.
    """

    holders: HolderSnapshot
    resources: Mapping[str, KubeletSnapshot]


@dataclass(eq=False)
class HolderScanner:
    """Scans for holders of devices: periodically while there may be holders, and soon after each grant.

    wanted: an event that is set to request a scan soon. period: seconds between two scans. always: whether to scan
    periodically even if no device may have a holder. evidence: the reader of the files of other agents and drivers.
    observers: functions that are called after a scan with, for each resource, the changed ids and devices.
    """

    services: Mapping[str, Service]
    tracker: HolderTracker
    register: Register
    wanted: asyncio.Event
    period: float
    evidence: NodeEvidence
    always: bool
    observers: list[Callable[[Mapping[str, Observed]], None]] = field(default_factory=list, init=False)
    _asked: set[DeviceKey] = field(default_factory=set, init=False)
    """The (resource, id) pairs that callers have passed to `scan` since the last scan began."""
    _next: asyncio.Future[ScanResult | None] | None = field(default=None, init=False)
    """The future for the result of the scan that begins next; None if no caller waits for this scan."""
    _requested: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.log = ScanLog(self.tracker)
        self.register.waits.subscribe(lambda: self.wanted.set() if self._is_awaited else None)

    async def scan(self, wanted: Collection[DeviceKey] = ()) -> ScanResult | None:
        """Request a scan at once; return its result (see `read`) or raise its exception.

        The task of `run` must be running. wanted: the (resource, device id) pairs that the caller needs without a
        holder. The scan reads all its evidence after this call.
        """
        self._asked |= set(wanted)
        self._requested.set()
        self._next = self._next or asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    async def read(self) -> ScanResult | None:
        """Find the holders of devices (`HolderTracker.scan`), compare the register with them, and return the result.

        Returns None if an Allocate ran meanwhile. All tasks that wait in `scan` get the same result or exception.
        """
        answer, self._next = self._next or asyncio.get_running_loop().create_future(), None
        self._requested.clear()
        try:
            answer.set_result(await self._read())
        except Exception as error:
            answer.set_exception(error)
        finally:
            answer.cancel()  # If this task was cancelled, the tasks that wait are cancelled too.
        return answer.result()

    async def _read(self) -> ScanResult | None:
        wanted, self._asked = self._asked | self._awaited, set()
        sequence = self.register.snapshot.sequence
        await self.evidence.read_others()
        now = await self.tracker.scan(wanted)
        if now is None:
            return None
        self.tracker.unknown.update(self.evidence.claims.unknown())
        self.log.holders(now.held)
        doubled = self.tracker.double_held()
        self.log.count_double_allocations(doubled)
        resources = await self.observe(now, sequence)
        twice = self.register.held_twice()
        for resource, service in tuple(self.services.items()):
            if (seen := resources.get(resource)) is not None:
                ids = {device_id for of, device_id in doubled if of == resource}
                devices = {device for of, device in twice if of == resource}
                service.observe(now, seen, devices.union(map(service.device_of, ids)))
        self.log.withheld(self.services)
        self.register.notify_changes()
        return ScanResult(now, resources)

    async def observe(self, now: HolderSnapshot, sequence: int) -> Mapping[str, KubeletSnapshot]:
        """Compare the register's allocations with the holders that a scan has found, and record the changes.

        Returns the holders of each resource. sequence: the register's sequence before the scan.
        """
        tracker, services, records = self.tracker, self.services, self.register.snapshot.allocations
        resources = {allocation.resource for allocation in records.values()} | services.keys()
        tracker.observed &= resources
        seen: dict[str, KubeletSnapshot] = {}
        for resource in sorted(resources):

            def unserved(name: str, of: str = resource) -> str:
                allocation = records.get((of, name))
                return allocation.device if allocation is not None else name

            device_of = services[resource].device_of if resource in services else unserved
            seen[resource] = kubelet_snapshot(sequence, now, resource, device_of, tracker.granted, tracker.title)
        try:
            observed = await self.register.observe(seen)
            tracker.observed |= observed.keys()
            for resource, done in observed.items():
                for name in done.found:
                    pod = seen[resource].held[name].pod
                    text = "pod %s holds %s, which the register did not know"
                    _LOG.info(text, pod, name, extra={"resource": resource, "pod": pod})
            for observer in self.observers:
                observer(observed)
            await self.register.adopt()
        except LedgerError as error:
            _LOG.warning("the ledger cannot be written: %s", error)
        return seen

    @property
    def _awaited(self) -> set[DeviceKey]:
        """The (resource, id) pairs for which each scan requests a new checkpoint (`wanted` of `HolderTracker.scan`).

        These are the ids of `Service.awaited`, and ids with a grant whose container is in no checkpoint yet. The
        register must learn soon which pod got such a grant, because records and checkpoint may be lost together. If
        there is no such pod, the grant must end, even if this process no longer serves the resource.
        """
        register = self.register
        pending = register.view().unreleased.keys() - register.snapshot.index.keys() - register.releases.failed.keys()
        services = self.services.items()
        awaited = {(name, device_id) for name, service in services for device_id in service.awaited(pending)}
        return awaited.union(key for key, held in register.snapshot.allocations.items() if held.pending)

    @property
    def _is_awaited(self) -> bool:
        """Whether an Allocate or Prepare waits for a device that a pod holds by `limits`."""
        register = self.register
        return any(register.snapshot.allocations_on(of, (device,)) for of, device in register.waits.devices)

    async def run(self) -> None:
        """Scan for holders until cancelled: periodically, at each request, and soon after each grant."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_grants())
                await self._run()
        finally:
            if self._next is not None:
                self._next.cancel()

    async def _follow_grants(self) -> None:
        """Request a scan soon after each grant, when the kubelet has written its checkpoint with the grant."""
        while True:
            await self.wanted.wait()
            until = time.monotonic() + BURST - SOON
            while self.wanted.is_set() and time.monotonic() <= until:
                self.wanted.clear()
                await asyncio.sleep(SOON)
            self.wanted.clear()
            self._requested.set()

    async def _run(self) -> None:
        backoff, pause = Backoff(first=1.0, most=30.0), 0.0
        while True:
            period = PROMPT if self._is_awaited else self.period * random.uniform(0.9, 1.1)  # noqa: S311  # jitter
            try:
                async with asyncio.timeout(max(period, pause)):
                    await self._requested.wait()
            except TimeoutError:
                held = self.register.snapshot.allocations or self.register.view().others or self.tracker.snapshot.held
                if not (self.always or held or self._awaited or await self._others_hold()):
                    continue
            is_asked = self._next is not None
            try:
                result = await self.read()
            except Exception:
                _LOG.exception("the scan for the holders of devices failed; trying again")
                pause = backoff.next()
            else:
                if not is_asked:  # Callers of `scan` report problems themselves.
                    self.log.problem(result.holders if result is not None else None)
                backoff.reset()
                pause = 0.0

    async def _others_hold(self) -> bool:
        """Read the files of other agents and drivers; return whether holders outside this process have devices."""
        await self.evidence.read_others()
        return bool(self.register.view().others)


class ScanLog:
    """Logs the findings of scans for holders; each finding is logged once while it lasts."""

    def __init__(self, tracker: HolderTracker) -> None:
        self.double_allocations = 0
        self.holders = HolderLog(tracker.title)
        self._tracker = tracker
        self._doubled: frozenset[tuple[str, str]] = frozenset()
        self._withheld: dict[tuple[str, str], set[str]] = {}
        self._problem = ""
        self._problem_before = False

    def withheld(self, resources: Iterable[str]) -> None:
        """For each id that is not offered although the kubelet counts it as free, log once why the id is held."""
        now = {
            (name, device_id): why
            for name in resources
            for device_id, why in self._tracker.unnamed_reasons(name).items()
        }
        for key, why in now.items():
            # All logged reasons of an id are remembered, because the reason changes with each request for a checkpoint,
            # and may change back.
            if why not in (logged := self._withheld.setdefault(key, set())):
                logged.add(why)
                _LOG.warning("device %s is withheld: %s", key[1], why, extra=dict(zip(_FIELDS, key, strict=True)))
        for key in sorted(self._withheld.keys() - now.keys()):
            del self._withheld[key]
            _LOG.info("device %s is no longer withheld", key[1], extra=dict(zip(_FIELDS, key, strict=True)))

    def problem(self, now: HolderSnapshot | None) -> None:
        """Log why the kubelet's checkpoint cannot be read, if two scans in a row failed to read it.

        One failure is no problem: the kubelet of a new node has no checkpoint until the first plugin has registered. A
        problem is logged again only if its text before the first "; " changes, because the text after it changes with
        each request for a checkpoint.
        """
        problem = now.problem.partition("; ")[0] if now is not None and now.registered is None else ""
        first, self._problem_before = bool(problem) and not self._problem_before, bool(problem)
        if problem != self._problem and not first:
            self._problem = problem
            if problem:
                _LOG.warning(
                    "cannot read the kubelet checkpoint; devices possibly in use stay unavailable: %s", problem
                )
            else:
                _LOG.info("the kubelet's checkpoint can be read again")

    def count_double_allocations(self, doubled: Mapping[DeviceKey, Sequence[str]]) -> None:
        """Count and log ids that the kubelet has allocated to several pods. doubled: for each id, the pods' names."""
        for resource, device in sorted(doubled.keys() - self._doubled):
            self.double_allocations += 1
            pods = ", ".join(doubled[resource, device])
            message = "the kubelet gave device %s to several pods: %s (kubernetes#137534)"
            _LOG.error(message, device, pods, extra={"resource": resource, "device": device, "pod": pods})
        self._doubled = frozenset(doubled)
