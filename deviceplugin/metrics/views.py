"""What can be seen of an agent: devices with side, holders and load, what is wrong, what happened.

One view is put together at one moment from what others know; metrics, the status and the page
all show it. Nothing here asks the kubelet or the hardware: a look from outside costs no more than
putting together what is known, and what is known for too long counts as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from deviceplugin.metrics import load
from deviceplugin.metrics.report import DEFAULT_LOCATION, DeviceLocation, Event, Provider, ProviderReport
from deviceplugin.sharing import device_of

if TYPE_CHECKING:
    from deviceplugin.device import Device
    from deviceplugin.inventory import Inventory
    from deviceplugin.kubelet.podresources import Holder
    from deviceplugin.kubelet.servicer import Endpoint
    from deviceplugin.kubelet.status import ResourceStatus, Status
    from deviceplugin.source import DeviceSource

__all__ = [
    "DeviceView",
    "Hold",
    "ObservedAgent",
    "ObservedService",
    "Observer",
    "ResourceView",
    "View",
]

_LOG: Final = logging.getLogger(__name__)
HOLDERS_STALE: Final = 60.0
"""Seconds after the last look at the kubelet's checkpoint from which on nobody knows who holds what."""
SHOWN_EVENTS: Final = 100
PATIENCE: Final = 1.0
"""Seconds that a provider may take for its report."""


class ObservedService(Protocol):
    """One resource of an agent, as far as it is shown."""

    source: DeviceSource
    inventory: Inventory
    endpoint: Endpoint

    @property
    def resource(self) -> str:
        """The resource's name."""


class ObservedAgent(Protocol):
    """An agent, as far as it is shown."""

    providers: list[Provider]

    @property
    def services(self) -> Mapping[str, ObservedService]:
        """Its resources by name."""

    def status(self) -> Status:
        """Return what is known now; from any thread."""


# The view.


@dataclass(frozen=True, slots=True)
class Hold:
    """A container that holds a device, or a claim that does; what is not known is ""."""

    side: str
    namespace: str
    pod: str
    container: str
    claim: str = ""
    uid: str = ""

    @property
    def text(self) -> str:
        """The holder in words."""
        pod = f"{self.namespace}/{self.pod}" if self.pod else f"pod {self.uid}" if self.uid else ""
        inside = f"{pod} ({self.container})" if pod and self.container else pod
        claim = f"claim {self.namespace}/{self.claim}" if self.claim else ""
        return ", ".join(part for part in (inside, claim) if part)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as of now.

    replicas: how many containers may share it. withheld: why it is given to nobody for now, "" if it is not.
    """

    device: Device
    gone: bool
    place: DeviceLocation
    holds: tuple[Hold, ...]
    load: Mapping[str, load.Value]
    replicas: int = 1
    withheld: str = ""


@dataclass(frozen=True, slots=True)
class ResourceView:
    """One resource as of now. measured: its gauge, None if the source cannot measure."""

    status: ResourceStatus
    devices: tuple[DeviceView, ...]
    measured: load.Gauge | None

    @property
    def name(self) -> str:
        """The resource's name."""
        return self.status.resource


@dataclass(frozen=True, slots=True)
class View:
    """Everything at one moment.

    holders_known: whether the kubelet could be asked lately. providers: their reports by name.
    silent: why a provider has none, by its name. unready: why the agent is not ready.
    """

    at: float
    resources: tuple[ResourceView, ...]
    double_allocations: int
    holders_known: bool
    providers: Mapping[str, ProviderReport]
    silent: Mapping[str, str]
    unready: tuple[str, ...]
    events: tuple[Event, ...]


def unready(status: Status) -> Iterable[str]:
    """Say what keeps the plugin side from being ready."""
    if not status.resources:
        yield "no resource is served"
    for one in status.resources:
        if not one.snapshot.listed:
            yield f"{one.resource}: its source has not listed its devices" + (
                f" ({one.source_error})" if one.source_error else ""
            )
        elif not one.registered:
            yield f"{one.resource}: not registered with the kubelet"


def happened(before: ResourceStatus | None, now: ResourceStatus, at: float) -> Iterable[Event]:
    """Say what changed between two looks at a resource."""
    name = now.resource
    if before is None:
        return
    if now.snapshot is not before.snapshot:
        yield from _devices_changed(name, before, now, at)
    if now.registered != before.registered:
        text = "registered with the kubelet" if now.registered else "not registered with the kubelet any more"
        yield Event(at, name, text, bad=not now.registered)
    if (restarts := now.registration.kubelet_restarts) > before.registration.kubelet_restarts:
        yield Event(at, name, f"the kubelet restarted ({restarts} times so far)")
    if now.source_error != before.source_error:
        text = f"its source failed: {now.source_error}" if now.source_error else "its source works again"
        yield Event(at, name, text, bad=bool(now.source_error))
    for reason, count in dict(now.endpoint.refusals).items():
        if more := count - before.endpoint.refusals.get(reason, 0):
            yield Event(at, name, f"{more} allocations refused: {reason}", bad=True)
    if now.holders != before.holders:
        yield from _holders_changed(name, before, now, at)


def _devices_changed(name: str, before: ResourceStatus, now: ResourceStatus, at: float) -> Iterable[Event]:
    known = before.snapshot.devices
    for one, device in now.snapshot.devices.items():
        old = known.get(one)
        if old is None:
            if before.snapshot.listed:
                yield Event(at, name, f"{one} appeared")
        elif old.health is not device.health:
            said = f"{one} is {device.health.value}" + (f": {device.message}" if device.message else "")
            yield Event(at, name, said, bad=not device.health.usable)
    for one in known:
        if one not in now.snapshot.devices:
            yield Event(at, name, f"{one} was forgotten")


def _holders_changed(name: str, before: ResourceStatus, now: ResourceStatus, at: float) -> Iterable[Event]:
    for one in sorted(now.holders.keys() | before.holders.keys()):
        new, old = now.holders.get(one, frozenset()), before.holders.get(one, frozenset())
        for holder in sorted(new - old):
            yield Event(at, name, f"{one} went to {_hold(holder).text}")
        if old and not new:
            yield Event(at, name, f"{one} came free")


def _hold(holder: Holder) -> Hold:
    return Hold("plugin", holder.namespace, holder.pod, holder.container, "", holder.uid)


class _Asked:
    """Asks one provider, with patience that ends, and never twice at once."""

    def __init__(self) -> None:
        self.error = ""
        self._busy: threading.Thread | None = None

    def report(self, provider: Provider) -> ProviderReport | None:
        if self._busy is not None and self._busy.is_alive():
            self._failed(provider, "still hangs")
            return None
        answers: list[ProviderReport] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(provider.report())
            except BaseException as error:  # a thread is no place for any
                errors.append(error)

        thread = self._busy = threading.Thread(target=ask, name=f"report of {provider.name}", daemon=True)
        thread.start()
        thread.join(PATIENCE)
        if errors:
            self._failed(provider, f"failed: {type(errors[0]).__name__}: {errors[0]}")
            return None
        if not answers:
            self._failed(provider, f"did not answer within {PATIENCE:g} s")
            return None
        self.error = ""
        return answers[0]

    def _failed(self, provider: Provider, error: str) -> None:
        if self.error != error:
            _LOG.warning("%s %s; what it knows is not shown", provider.name, error)
        self.error = error


class Observer:
    """Looks at an agent: `view` for any thread, `watch` for its loop.

    period: seconds between readings of the load.
    """

    TICK: Final = 1.0

    def __init__(self, agent: ObservedAgent, period: float = 10.0) -> None:
        self._agent = agent
        self._period = period
        self._gauges: dict[str, load.Gauge] = {}
        self._events: tuple[Event, ...] = ()
        self._before: dict[str, ResourceStatus] = {}
        self._named: dict[str, tuple[object, dict[str, tuple[str, str]]]] = {}
        self._asked: dict[int, _Asked] = {}
        self._asking = threading.Lock()

    # In the loop.

    async def watch(self) -> None:
        """Take readings and note what happens, until cancelled."""
        measuring = asyncio.create_task(load.measure_for_ever(self.due, self._period), name="measure")
        try:
            while True:
                try:
                    await self.note(self._agent.status())
                except Exception:
                    _LOG.exception("what happened could not be noted")
                await asyncio.sleep(self.TICK)
        finally:
            measuring.cancel()

    def due(self) -> Sequence[tuple[load.Gauge, Sequence[Device]]]:
        """Return whom to measure now; a resource whose source was replaced gets a new gauge."""
        due = []
        services = self._agent.services
        gauges = {}
        for name, service in services.items():
            if "measure" not in service.source.hooks:
                continue
            gauge = self._gauges.get(name)
            if gauge is None or gauge.source is not service.source:
                gauge = load.Gauge(service.source, self._period)
            gauges[name] = gauge
            snapshot = service.inventory.snapshot
            due.append((gauge, [device for one, device in snapshot.devices.items() if one not in snapshot.gone]))
        self._gauges = gauges
        return due

    async def note(self, status: Status) -> None:
        """Note what happened since the last look."""
        now = time.time()
        for one in status.resources:
            # Statistics go on counting: keep them as they are now.
            kept = _frozen(one)
            if new := tuple(happened(self._before.get(one.resource), kept, now)):
                self._events = (*self._events, *new)[-SHOWN_EVENTS:]
            self._before[one.resource] = kept
        for gone in self._before.keys() - {one.resource for one in status.resources}:
            del self._before[gone]

    # In any thread.

    def view(self) -> View:
        """Put together what is known now."""
        status = self._agent.status()
        reports, silent = self._reports()
        places: dict[tuple[str, str], DeviceLocation] = {}
        for report in reports.values():
            places.update(report.places)
        looked = status.scanned_at
        known = looked is not None and time.monotonic() - looked < HOLDERS_STALE
        by_claim = self._by_claim(status, reports)
        resources = []
        for one in status.resources:
            gauge = self._gauges.get(one.resource)
            reading = gauge.reading if gauge is not None else None
            resources.append(
                ResourceView(
                    one,
                    tuple(
                        DeviceView(
                            device,
                            name in one.snapshot.gone,
                            places.get((one.resource, name), DEFAULT_LOCATION),
                            holds,
                            reading.values.get(name, {}) if reading is not None else {},
                            self._replicas(one, device),
                            one.withheld.get(name, ""),
                        )
                        for name, device, holds in self._held(one, by_claim, known=known)
                    ),
                    gauge,
                )
            )
        reasons = [*unready(status)]
        for name, report in reports.items():
            reasons.extend(f"{name}: {reason}" for reason in report.unready)
        reasons.extend(f"{name} {error}" for name, error in silent.items())
        return View(
            time.time(),
            tuple(resources),
            status.double_allocations,
            known,
            reports,
            silent,
            tuple(reasons),
            tuple(sorted(self._all_events(reports), key=lambda event: event.at)[-SHOWN_EVENTS:]),
        )

    def _all_events(self, reports: Mapping[str, ProviderReport]) -> Iterable[Event]:
        yield from self._events
        for report in reports.values():
            yield from report.events

    def _replicas(self, status: ResourceStatus, device: Device) -> int:
        if status.replicas == 1 or (service := self._agent.services.get(status.resource)) is None:
            return status.replicas
        try:
            return service.source.replicas_of(device)
        except Exception:  # an author's code; who serves the list says what is wrong with it
            return status.replicas

    def _held(
        self, status: ResourceStatus, by_claim: Mapping[tuple[str, str], Sequence[Hold]], *, known: bool
    ) -> Iterable[tuple[str, Device, tuple[Hold, ...]]]:
        holders: dict[str, dict[Hold, None]] = {}
        service = self._agent.services.get(status.resource)
        if known:
            for unit, those in status.holders.items():
                name = device_of(unit, status.replicas) if service is None else service.endpoint.ids.device_id_of(unit)
                into = holders.setdefault(name, {})
                into.update(dict.fromkeys(map(_hold, those)))
        for name, device in status.snapshot.devices.items():
            held = holders.get(name)
            claims = by_claim.get((status.resource, name), ())
            yield name, device, (*sorted(held, key=_order), *claims) if held else tuple(claims)

    def _by_claim(
        self, status: Status, reports: Mapping[str, ProviderReport]
    ) -> Mapping[tuple[str, str], Sequence[Hold]]:
        """Return who holds devices through claims: containers that use them, and claims that nobody uses yet."""
        found: dict[tuple[str, str], dict[Hold, None]] = {}
        used: set[tuple[str, str, str, str]] = set()
        if status.claims and status.scanned_at is not None and time.monotonic() - status.scanned_at < HOLDERS_STALE:
            ids = self._ids({name: word for report in reports.values() for name, word in report.qualifiers.items()})
            for use in status.claims:
                key = ids.get((use.driver, use.device))
                if key is None:
                    continue
                holder = use.holder
                used.add((*key, holder.namespace, use.claim))
                hold = Hold("dra", holder.namespace, holder.pod, holder.container, use.claim)
                found.setdefault(key, {})[hold] = None
        for report in reports.values():
            for claim in report.claims:
                key = (claim.resource, claim.device)
                if (*key, claim.namespace, claim.claim) not in used:
                    found.setdefault(key, {})[Hold("dra", claim.namespace, "", "", claim.claim)] = None
        return {key: sorted(holds, key=_order) for key, holds in found.items()}

    def _ids(self, qualifiers: Mapping[str, str]) -> Mapping[tuple[str, str], tuple[str, str]]:
        """Return (resource, device id) by (driver, the device's name in slices).

        qualifiers: by resource, as the bridge keeps them.
        """
        from deviceplugin import naming  # only where there are claims

        services = list(self._agent.services.values())
        by_driver: dict[str, list[str]] = {}
        for service in services:
            if service.source.driver:
                by_driver.setdefault(service.source.driver, []).append(service.resource)
        ids: dict[tuple[str, str], tuple[str, str]] = {}
        for service in services:
            driver = service.source.driver
            if not driver:
                continue
            words = naming.qualifiers(by_driver[driver]) | dict(qualifiers)
            qualifier = words[service.resource]
            snapshot = service.inventory.snapshot
            key, named = self._named.get(service.resource, (None, {}))
            if key != (id(snapshot), snapshot.version, driver, qualifier):
                named = naming.published_names(words, {service.resource: snapshot.devices})
                self._named[service.resource] = ((id(snapshot), snapshot.version, driver, qualifier), named)
            ids.update({(driver, name): key for name, key in named.items()})
        return ids

    def _reports(self) -> tuple[dict[str, ProviderReport], dict[str, str]]:
        reports: dict[str, ProviderReport] = {}
        silent: dict[str, str] = {}
        with self._asking:
            for provider in tuple(self._agent.providers):
                asked = self._asked.setdefault(id(provider), _Asked())
                report = asked.report(provider)
                if report is None:
                    silent[provider.name] = asked.error
                else:
                    reports[provider.name] = report
        return reports, silent


def _order(hold: Hold) -> tuple[str, ...]:
    return (hold.namespace, hold.pod, hold.container, hold.claim, hold.uid)


def _frozen(status: ResourceStatus) -> ResourceStatus:
    """Return the status with its counters as they are now."""
    endpoint = replace(status.endpoint, refusals=dict(status.endpoint.refusals))
    return replace(status, endpoint=endpoint, registration=replace(status.registration))
