"""Scans for the holders of devices, and passes the result to the services and to the observers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.node.device_log import HolderLog
from deviceplugin.node.service import Service

_LOG: Final = logging.getLogger(__name__)

_FIELDS: Final = ("resource", "device")
SOON: Final = 0.3
"""Seconds from a grant to the scan that finds out which pod it was for."""
BURST: Final = 0.9
"""Seconds from the first of several grants after which that scan does not wait for more of them."""


class HolderObserver(Protocol):
    """Another part of the process that is given each scan's result; the ledger, by way of its gate."""

    def awaited(self) -> Collection[tuple[str, str]]:
        """Return (resource, the kubelet's id) of which it matters whether they are free."""

    def before_scan(self) -> object:
        """Return what `after_scan` needs from before the evidence is read."""

    async def after_scan(self, before: object, now: HolderSnapshot) -> None:
        """Take the result; `before` is what `before_scan` returned."""


@dataclass(eq=False)
class HolderScanner:
    """Scans from time to time while holders matter, and soon after a grant.

    also_awaited: returns (resource, the kubelet's id) that matter as what observers await does. wanted: set when a scan
    should come soon. period: seconds between two scans. always: scan also while nothing is held or awaited.
    """

    services: Mapping[str, Service]
    tracker: HolderTracker
    guard: ExclusionGuard
    also_awaited: Callable[[], Collection[tuple[str, str]]]
    wanted: asyncio.Event
    period: float
    always: bool
    observers: list[HolderObserver] = field(default_factory=list, init=False)
    _scanning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.log = ScanLog(self.tracker)

    async def scan(self, wanted: Collection[tuple[str, str]] | None = None) -> HolderSnapshot | None:
        """Find the holders now (`HolderTracker.scan`), pass them to services and observers, and return them."""
        async with self._scanning:
            remembered = [(observer, observer.before_scan()) for observer in self.observers]
            now = await self.tracker.scan(wanted)
            if now is None:
                return None
            self.log.holders(now.held)
            self.log.count_double_allocations()
            services = tuple(self.services.values())
            for service in services:
                service.take_holders(now)
            self.guard.notify(scanned=True)
            for service in services:
                service.observe(now)
            self.log.withheld(self.services)
            for observer, before in remembered:
                await observer.after_scan(before, now)
            self.guard.notify()
            return now

    async def run(self) -> None:
        """Scan until cancelled."""
        backoff = Backoff(first=1.0, most=30.0)
        while True:
            awaited = self._awaited() | {
                (name, one) for name, service in self.services.items() for one in service.awaited
            }
            in_use = any(service.in_use for service in self.services.values())
            if not (self.always or awaited or in_use or self.tracker.snapshot.held or self.guard.unsettled):
                await self.wanted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.period * random.uniform(0.9, 1.1)):  # noqa: S311  # jitter
                    await self.wanted.wait()
                    # The kubelet writes its checkpoint some milliseconds after Allocate was answered.
                    until = time.monotonic() + BURST - SOON
                    while self.wanted.is_set() and time.monotonic() <= until:
                        self.wanted.clear()
                        await asyncio.sleep(SOON)
                    # Before its processes run, only a checkpoint that was asked for proves which pod a grant was for. A
                    # ledger is to have it at once: agent and checkpoint may be lost together.
                    awaited = self._awaited()
            self.wanted.clear()
            try:
                now = await self.scan(awaited)
            except Exception:
                _LOG.exception("the scan for the holders of devices failed; trying again")
                await asyncio.sleep(backoff.next())
            else:
                self.log.problem(now)
                backoff.reset()

    def _awaited(self) -> frozenset[tuple[str, str]]:
        return frozenset(self.also_awaited()).union(*(observer.awaited() for observer in self.observers))


class ScanLog:
    """Logs what scans find out, each thing once for as long as it lasts."""

    def __init__(self, tracker: HolderTracker) -> None:
        self.double_allocations = 0
        self.holders = HolderLog(lambda pod_uid: tracker.title(pod_uid))
        self._tracker = tracker
        self._doubled: frozenset[tuple[str, str]] = frozenset()
        self._withheld: dict[tuple[str, str], set[str]] = {}
        self._problem = ""
        self._problem_before = False

    def withheld(self, resources: Iterable[str]) -> None:
        """Log each reason once for which an id is withheld that the kubelet may give away though it is held."""
        now = {(name, one): why for name in resources for one, why in self._tracker.unnamed_reasons(name).items()}
        for key, why in now.items():
            # Between two requests for a checkpoint the reason is another one each time.
            if why not in (logged := self._withheld.setdefault(key, set())):
                logged.add(why)
                _LOG.warning("%s: device %s is withheld: %s", *key, why, extra=dict(zip(_FIELDS, key, strict=True)))
        for key in self._withheld.keys() - now.keys():
            del self._withheld[key]
            _LOG.info("%s: device %s is not withheld any more", *key, extra=dict(zip(_FIELDS, key, strict=True)))

    def problem(self, now: HolderSnapshot | None) -> None:
        """Log why the kubelet's checkpoint cannot be read, if two scans in a row could not.

        The kubelet of a new node has none until the first plugin has registered.
        """
        problem = now.problem if now is not None and now.registered is None else ""
        first, self._problem_before = bool(problem) and not self._problem_before, bool(problem)
        if problem != self._problem and not first:
            self._problem = problem
            if problem:
                _LOG.warning("devices that may be held count as held: %s", problem)
            else:
                _LOG.info("the kubelet's checkpoint can be read again")

    def count_double_allocations(self) -> None:
        """Count and log devices that the kubelet gave to several pods."""
        doubled = self._tracker.double_held()
        for resource, device in doubled.keys() - self._doubled:
            self.double_allocations += 1
            pods = ", ".join(doubled[resource, device])
            message = "the kubelet gave device %s of %s to several pods: %s (kubernetes#137534)"
            _LOG.error(message, device, resource, pods, extra={"resource": resource, "device": device, "pod": pods})
        self._doubled = frozenset(doubled)
