"""Makes the view of an agent (`AgentView`): its whole state at one moment, for metrics, /status and the page.

The view is made of the present state of other objects, without calls to the kubelet or reads of hardware. Values that
are too old are treated as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from deviceplugin import device_links, inventory, naming
from deviceplugin.device import Device, Health
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.holders import EvidenceSource
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.kubelet.status import AgentStatus, ResourceStatus, VendorConnection, Withheld, unready
from deviceplugin.metrics import load
from deviceplugin.metrics.report import (
    DEFAULT_LOCATION,
    DeviceLocation,
    Event,
    EventSource,
    Provider,
    ProviderReport,
    ShareProgress,
)
from deviceplugin.sharing import device_of
from deviceplugin.source import DeviceSource
from deviceplugin.unwatched import Unwatched

_LOG: Final = logging.getLogger(__name__)
# If the last read of the kubelet's checkpoint is older than this number of seconds, holders are treated as unknown.
HOLDERS_STALE: Final = 60.0
SHOWN_EVENTS: Final = 100
UNANSWERED: Final = 30.0  # Seconds without a response after which a call to a vendor's plugin is reported as a problem.
REPORT_TIMEOUT: Final = 1.0  # Seconds within which a `Provider` must return its report.


class ObservedService(Protocol):
    """The properties of a resource's service from which a view is made."""

    source: DeviceSource
    inventory: Inventory
    endpoint: Endpoint


class ObservedAgent(Protocol):
    """The properties of an agent from which a view is made."""

    providers: list[Provider]

    @property
    def services(self) -> Mapping[str, ObservedService]:
        """For each resource name, the resource's service."""

    def status(self) -> AgentStatus:
        """Return the agent's present status. Any thread may call this method."""


@dataclass(frozen=True, slots=True)
class DeviceHolder:
    """The holder of a device: a container, a pod with a claim, or a claim whose pod is unknown.

    An unknown field is "".
    """

    side: str
    namespace: str
    pod: str
    container: str
    claim: str = ""
    uid: str = ""

    @property
    def text(self) -> str:
        """The holder in words, for messages."""
        pod = f"{self.namespace}/{self.pod}" if self.pod else f"pod {self.uid}" if self.uid else ""
        container = f"{pod} ({self.container})" if pod and self.container else pod
        claim = f"claim {self.namespace}/{self.claim}" if self.claim else ""
        return ", ".join(part for part in (container, claim) if part)


_Holders = Mapping[tuple[str, str], tuple[DeviceHolder, ...]]
"""For each (resource, device id), the device's holders: first containers with `limits`, then holders with claims."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The state of one device. replicas: the number of containers that may share the device.

    withheld: the reason why the device is not offered, or None. admins: the claims with administrative access to the
    device, which do not hold it. since: the time at which this agent found that the device was no longer healthy (Unix
    seconds); None for a healthy device.
    """

    device: Device
    gone: bool
    location: DeviceLocation
    holders: tuple[DeviceHolder, ...]
    load: Mapping[str, load.Value]
    replicas: int = 1
    withheld: Withheld | None = None
    since: float | None = None
    admins: tuple[DeviceHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class UnlistedDevice:
    """A device that its source no longer lists, but that has a holder or is not on the plugin side (`Side`)."""

    id: str
    location: DeviceLocation
    holders: tuple[DeviceHolder, ...]


@dataclass(frozen=True, slots=True)
class ResourceView:
    """The state of one resource. measured: the `Gauge` that measures the devices' load; None if the source has none.

    share: how many devices are on each side (`ShareProgress`); None without a DRA driver. unlisted: see
    `UnlistedDevice`. While a vendor's plugin is disconnected, `unlisted` contains all held devices of the plugin.
    """

    name: str
    status: ResourceStatus
    devices: tuple[DeviceView, ...]
    measured: load.Gauge | None
    share: ShareProgress | None = None
    unlisted: tuple[UnlistedDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentView:
    """The state of the whole agent at one moment.

    at: that moment (Unix seconds). unready: the reasons why the agent is not ready. problems: the problems that do not
    make the agent unready. holders_known: whether the kubelet's checkpoint was read recently. kubelet_answers: whether
    the kubelet responded to the last call of its PodResources API. providers: for each provider that returned a report
    (by name), the report. silent: for each provider that returned no report (by name), the reason. unknown: for each
    kind of evidence, how often the evidence did not show whether a holder had ended. unserved: for each (resource,
    device id) that pods or claims still have from a resource that is not served any more, the holders.
    """

    at: float
    resources: tuple[ResourceView, ...]
    double_allocations: int
    holders_known: bool
    kubelet_answers: bool | None
    providers: Mapping[str, ProviderReport]
    silent: Mapping[str, str]
    unready: tuple[str, ...]
    events: tuple[Event, ...]
    problems: tuple[str, ...] = ()
    node: str = ""
    config_error: str = ""
    unknown: Mapping[str, int] = field(default_factory=dict)
    unwatched: tuple[Unwatched, ...] = ()
    unserved: _Holders = field(default_factory=dict)


def unanswered(status: AgentStatus, now: float) -> Iterable[str]:
    """Yield a sentence about each peer of the agent that does not respond: the kubelet, and vendors' plugins.

    now: the time (Unix seconds).
    """
    if status.kubelet_silent is not None:
        yield f"the kubelet has not answered since {iso(status.kubelet_silent)}; the node starts and ends no pods"
    for resource in status.resources:
        since = resource.vendor.unanswered if resource.vendor is not None else None
        if since is not None and now - since >= UNANSWERED:
            yield f"{resource.resource}: the vendor's plugin has not answered a call since {iso(since)}"


def unlinked(status: AgentStatus) -> Iterable[str]:
    """Yield a message for each resource with devices that containers lose after a reload of systemd. Blocks."""
    if status.cgroup_root is None or not device_links.reload_matters(status.cgroup_root):
        return
    for resource in status.resources:
        if missing := device_links.unlinked(resource.snapshot.devices.values()):
            yield f"{resource.resource}: {device_links.warning(missing)}"


def iso(at: float) -> str:
    """Return a time (Unix seconds) as text in the form of RFC 3339."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def no_plugin(vendor: VendorConnection) -> str:
    """Return a text with the time since which a vendor's plugin has not been connected to the agent."""
    return f"the vendor's plugin is not registered with the agent since {iso(vendor.since)}"


def events_between(before: ResourceStatus | None, now: ResourceStatus, at: float) -> list[Event]:
    """Return the events between two statuses of a resource; no events if `before` is None."""
    changes = _changes(before, now) if before is not None else ()
    return [Event(at, now.resource, text, bad) for text, bad in changes]


def _changes(before: ResourceStatus, now: ResourceStatus) -> Iterable[tuple[str, bool]]:
    if now.snapshot is not before.snapshot:
        for change in inventory.changes(before.snapshot, now.snapshot):
            yield f"{change.device} {change.text}", change.bad
    if now.registered != before.registered:
        text = "registered with the kubelet" if now.registered else "not registered with the kubelet any more"
        yield text, not now.registered
    if now.vendor is not None and before.vendor is not None and now.vendor.connected != before.vendor.connected:
        text = "the vendor's plugin has connected" if now.vendor.connected else "the vendor's plugin has disconnected"
        yield text, not now.vendor.connected
    if (restarts := now.registration.kubelet_restarts) > before.registration.kubelet_restarts:
        yield f"the kubelet restarted ({restarts} times so far)", False
    if now.source_error != before.source_error:
        text = f"its source failed: {now.source_error}" if now.source_error else "its source works again"
        yield text, bool(now.source_error)
    for reason, count in dict(now.endpoint.refusals).items():
        if more := count - before.endpoint.refusals.get(reason, 0):
            yield f"{more} allocations refused: {reason}", True
    for device_id in sorted(now.holders.keys() | before.holders.keys()):
        new, old = now.holders.get(device_id, frozenset()), before.holders.get(device_id, frozenset())
        for holder in sorted(new - old):
            yield f"{device_id} went to {_plugin_holder(holder).text}", False
        if old and not new:
            yield f"{device_id} came free", False


def _plugin_holder(holder: PodContainer) -> DeviceHolder:
    return DeviceHolder("plugin", holder.namespace, holder.pod, holder.container, "", holder.uid)


class _ProviderCalls:
    """Calls one provider with a timeout, one call at a time.

    error: the reason why the last call returned no report, or "".
    """

    def __init__(self, provider: Provider) -> None:
        self.error = ""
        self._provider = provider
        self._call: Future[ProviderReport] | None = None

    def report(self) -> ProviderReport | None:
        if self._call is not None and not self._call.done():
            error = "still hangs"
        else:
            call: Future[ProviderReport] = Future()
            name = f"report of {self._provider.name}"
            threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()
            self._call = call
            try:
                raised = call.exception(REPORT_TIMEOUT)
                error = f"failed: {type(raised).__name__}: {raised}" if raised is not None else ""
            except TimeoutError:
                error = f"did not answer within {REPORT_TIMEOUT:g} s"
        if error and error != self.error:
            _LOG.warning("%s %s; its status and metrics are not shown", self._provider.name, error)
        self.error = error
        return None if error else self._call.result()

    def _run(self, call: Future[ProviderReport]) -> None:
        try:
            call.set_result(self._provider.report())
        except BaseException as error:  # Even SystemExit is caught, because the thread must not end without a result.
            call.set_exception(error)


class Observer:
    """Makes views of an agent. Any thread may call `view`. All other methods run in the agent's event loop.

    period: seconds between two measurements of the devices' load.
    """

    TICK: Final = 1.0

    def __init__(self, agent: ObservedAgent, period: float = 10.0) -> None:
        self._agent = agent
        self._period = period
        self._gauges: dict[str, load.Gauge] = {}
        self._events: tuple[Event, ...] = ()
        self._before: dict[str, ResourceStatus] = {}
        self._config_error = ""
        self._ill: dict[tuple[str, str, Health], float] = {}
        self._published: dict[str, tuple[object, dict[str, tuple[str, str]]]] = {}
        self._calls: dict[int, _ProviderCalls] = {}
        self._reporting = threading.Lock()

    async def watch(self) -> None:
        """Measure the load of devices, and record events, until cancelled."""
        measuring = asyncio.create_task(load.measure_for_ever(self.due, self._period), name="measure")
        try:
            while True:
                try:
                    self.note(self._agent.status())
                except Exception:
                    _LOG.exception("the events of the resources could not be recorded")
                await asyncio.sleep(self.TICK)
        finally:
            measuring.cancel()

    def due(self) -> Sequence[tuple[load.Gauge, Sequence[Device]]]:
        """Return, for each source with the hook `measure`, its `load.Gauge` and the listed devices to measure."""
        due = []
        gauges = {}
        for name, service in self._agent.services.items():
            if "measure" not in service.source.hooks:
                continue
            gauge = self._gauges.get(name)
            if gauge is None or gauge.source is not service.source:
                gauge = load.Gauge(service.source, self._period)
            gauges[name] = gauge
            snapshot = service.inventory.snapshot
            due.append(
                (gauge, [device for device_id, device in snapshot.devices.items() if device_id not in snapshot.gone])
            )
        self._gauges = gauges
        return due

    def note(self, status: AgentStatus) -> None:
        """Record the events since the previous call. status: the present status."""
        now = time.time()
        new: list[Event] = []
        for resource in status.resources:
            # The statistics objects go on counting, so copies are kept for the comparison at the next call.
            endpoint = replace(resource.endpoint, refusals=dict(resource.endpoint.refusals))
            kept = replace(resource, endpoint=endpoint, registration=replace(resource.registration))
            new += events_between(self._before.get(resource.resource), kept, now)
            self._before[resource.resource] = kept
        devices = (
            (resource.resource, device)
            for resource in status.resources
            for device in resource.snapshot.devices.values()
        )
        ill = [(name, device.id, device.health) for name, device in devices if device.health is not Health.HEALTHY]
        self._ill = {key: self._ill.get(key, now) for key in ill}
        for gone in self._before.keys() - {resource.resource for resource in status.resources}:
            del self._before[gone]
        if status.config_error != self._config_error:
            self._config_error = status.config_error
            new.append(
                Event(now, "", self._config_error or "the config file is accepted again", bool(self._config_error))
            )
        for provider in tuple(self._agent.providers):
            if isinstance(provider, EventSource):
                new += provider.events()
        self._events = (*self._events, *sorted(new, key=lambda event: event.at))[-SHOWN_EVENTS:]

    def view(self) -> AgentView:
        """Return the view of the agent at this moment."""
        status = self._agent.status()
        reports, silent = self._reports()
        holders_known = status.scanned_at is not None and time.monotonic() - status.scanned_at < HOLDERS_STALE
        holders, admins = self._holders(status, reports, known=holders_known)
        locations = {key: location for report in reports.values() for key, location in report.locations.items()}
        served = {resource.resource for resource in status.resources}
        shares = {resource: share for report in reports.values() for resource, share in report.shares.items()}
        return AgentView(
            time.time(),
            tuple(
                self._resource(resource, locations, holders, admins, shares.get(resource.resource))
                for resource in status.resources
            ),
            status.double_allocations,
            holders_known,
            status.kubelet_answers,
            reports,
            silent,
            (
                *unready(status),
                *(f"{name}: {reason}" for name, report in reports.items() for reason in report.unready),
                *(f"{name} {error}" for name, error in silent.items()),
            ),
            self._events,
            (
                *(problem for report in reports.values() for problem in report.problems),
                *status.blind,
                *([status.config_error] if status.config_error and not status.former_config else ()),
                *unanswered(status, time.time()),
                *map(str, status.unwatched),
                *unlinked(status),
                *(
                    f"{resource.resource}: {no_plugin(resource.vendor)}"
                    for resource in status.resources
                    if resource.vendor is not None and not resource.vendor.connected
                ),
            ),
            next((report.node for report in reports.values() if report.node), "") or naming.node_name(),
            status.config_error,
            {source.value: status.unknown.get(source, 0) for source in EvidenceSource},
            status.unwatched,
            {key: those for key, those in sorted(holders.items()) if key[0] not in served},
        )

    def _resource(
        self,
        resource: ResourceStatus,
        locations: Mapping[tuple[str, str], DeviceLocation],
        holders: _Holders,
        admins: _Holders,
        share: ShareProgress | None,
    ) -> ResourceView:
        gauge = self._gauges.get(resource.resource)
        reading = (gauge.reading if gauge is not None else None) or {}
        devices = (
            DeviceView(
                device,
                name in resource.snapshot.gone,
                locations.get((resource.resource, name), DEFAULT_LOCATION),
                holders.get((resource.resource, name), ()),
                reading.get(name, {}),
                resource.snapshot.replicas.get(name, 1),
                resource.withheld.get(name),
                self._ill.get((resource.resource, name, device.health)),
                admins.get((resource.resource, name), ()),
            )
            for name, device in resource.snapshot.devices.items()
        )
        away = {*holders, *(key for key, place in locations.items() if place.side != "plugin")}
        names = sorted(name for of, name in away if of == resource.resource and name not in resource.snapshot.devices)
        unlisted = [
            UnlistedDevice(
                name,
                locations.get((resource.resource, name), DEFAULT_LOCATION),
                holders.get((resource.resource, name), ()),
            )
            for name in names
        ]
        return ResourceView(resource.resource, resource, tuple(devices), gauge, share, tuple(unlisted))

    def _holders(
        self, status: AgentStatus, reports: Mapping[str, ProviderReport], *, known: bool
    ) -> tuple[_Holders, _Holders]:
        """Return for each device the holders and, in a second mapping, the claims with administrative access.

        known: whether the kubelet's checkpoint was read recently, so that the containers with devices are known.
        """
        held: dict[tuple[str, str], set[DeviceHolder]] = defaultdict(set)
        admins: dict[tuple[str, str], set[DeviceHolder]] = defaultdict(set)
        claims = [claim for report in reports.values() for claim in report.claims]
        admin = {
            (claimed.resource, claimed.device, claimed.namespace, claimed.claim) for claimed in claims if claimed.admin
        }
        for resource in status.resources if known else ():
            service = self._agent.services.get(resource.resource)
            for kubelet_id, holders in resource.holders.items():
                if service is None:
                    device = device_of(kubelet_id, resource.replicas)
                else:
                    device = service.endpoint.ids.device_id_of(kubelet_id)
                for place in resource.elsewhere.get(kubelet_id, ((resource.resource, device),)):
                    held[place].update(map(_plugin_holder, holders))
        for place, containers in status.unserved.items() if known else ():
            held[place].update(map(_plugin_holder, containers))
        if known and status.claims:
            published = self._published_names(reports)
            for use in status.claims:
                if (key := published.get((use.driver, use.device))) is not None:
                    holder = use.holder
                    those = (admins if (*key, holder.namespace, use.claim) in admin else held)[key]
                    those.add(DeviceHolder("dra", holder.namespace, holder.pod, holder.container, use.claim))
        for claim in claims:
            those = (admins if claim.admin else held)[claim.resource, claim.device]
            prepared = ("dra", claim.namespace, claim.claim)
            if all((holder.side, holder.namespace, holder.claim) != prepared for holder in those):
                for pod in claim.pods or (PodContainer(claim.namespace),):
                    those.add(DeviceHolder("dra", claim.namespace, pod.pod, "", claim.claim, pod.uid))
        return _sorted(held), _sorted(admins)

    def _published_names(self, reports: Mapping[str, ProviderReport]) -> Mapping[tuple[str, str], tuple[str, str]]:
        """Return, for each (driver, published name of a device), the device's (resource, device id)."""
        qualifiers = {name: word for report in reports.values() for name, word in report.qualifiers.items()}
        by_driver: dict[str, dict[str, ObservedService]] = defaultdict(dict)
        for resource, service in list(self._agent.services.items()):
            if service.source.driver:
                by_driver[service.source.driver][resource] = service
        ids: dict[tuple[str, str], tuple[str, str]] = {}
        for driver, services in by_driver.items():
            words = naming.qualifiers(list(services)) | qualifiers
            for resource, service in services.items():
                snapshot = service.inventory.snapshot
                state = (id(snapshot), snapshot.version, driver, words[resource])
                key, names = self._published.get(resource, (None, {}))
                if key != state:
                    names = naming.published_names(words, {resource: snapshot.devices})
                    self._published[resource] = (state, names)
                ids.update({(driver, name): device for name, device in names.items()})
        return ids

    def _reports(self) -> tuple[dict[str, ProviderReport], dict[str, str]]:
        reports: dict[str, ProviderReport] = {}
        silent: dict[str, str] = {}
        with self._reporting:
            for provider in tuple(self._agent.providers):
                calls = self._calls.setdefault(id(provider), _ProviderCalls(provider))
                report = calls.report()
                if report is None:
                    silent[provider.name] = calls.error
                else:
                    reports[provider.name] = report
        return reports, silent


def _sorted(by_device: Mapping[tuple[str, str], set[DeviceHolder]]) -> _Holders:
    return {key: tuple(sorted(those, key=_order)) for key, those in by_device.items()}


def _order(holder: DeviceHolder) -> tuple[object, ...]:
    return (holder.side == "dra", holder.namespace, holder.pod, holder.container, holder.claim, holder.uid)
