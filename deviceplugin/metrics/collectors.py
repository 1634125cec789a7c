"""Makes the Prometheus metrics of an agent, and defines the routes of the agent's HTTP server.

The module is loaded only if metrics are served. For each scrape, this module converts the agent's state at that moment
(`AgentView`) to metric families. It counts nothing itself. The metrics `process_*` come from prometheus_client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from deviceplugin import looks
from deviceplugin.durations import BOUNDS, Durations
from deviceplugin.metrics import web
from deviceplugin.metrics.credentials import Certificate, Token
from deviceplugin.metrics.load import QUANTITIES
from deviceplugin.metrics.report import DEFAULT_LOCATION
from deviceplugin.metrics.views import AgentView, DeviceHolder, ObservedAgent, Observer, ResourceView
from deviceplugin.register.records import State
from deviceplugin.unwatched import UnwatchedCause
from deviceplugin.version import VERSION

if TYPE_CHECKING:
    from deviceplugin.config import MetricsConfig

_LOG: Final = logging.getLogger(__name__)
LOOP_TIMEOUT: Final = 2.0  # Seconds within which the event loop must execute a callback to count as working.
PYTHON: Final = ".".join(map(str, sys.version_info[:3]))
_BOUNDS: Final = (*map(str, BOUNDS), "+Inf")
OPEN_METRICS: Final = "application/openmetrics-text"
HEALTHS: Final = ("healthy", "unhealthy", "unknown")
WITHHELD: Final = ("excluded", "foreign", "held", "unknown", "unreleased")
_FAMILIES: Final[Mapping[Callable[..., Metric], Mapping[str, tuple[str, str]]]] = {
    GaugeMetricFamily: {
        "devices": (
            "resource side state health",
            "Devices by side and state of the handover (from the ledger) and health (from their source)",
        ),
        "device_health": (
            "resource device health",
            "1 for the current health of the device, 0 for the others (from its source)",
        ),
        "devices_gone": ("resource", "Devices that their source no longer lists but that may still be held"),
        "devices_withheld": (
            "resource reason",
            "Devices that are offered to no pod or claim, by reason. excluded: a holder under another id or on the "
            "other side leaves too little of it. foreign: a pod has it, or may have it, from another plugin of the "
            "resource. held: processes of its former pod run. unknown: its holder is not known. unreleased: `released` "
            "failed. /status has details",
        ),
        "device_replicas": ("resource device", "Containers that may share the device (from its source)"),
        "device_state": (
            "resource device state",
            "1 for the current handover state of the device, 0 for the others (from the ledger)",
        ),
        "device_state_since_timestamp_seconds": (
            "resource device",
            "Unix time at which the device entered its handover state (from the ledger)",
        ),
        "holders_known": ("", "1 while the kubelet's checkpoint can be read; at 0 the holders are unknown"),
        "device_holders": (
            "resource device",
            "Holders of the device: containers, pods of claims whose containers are not known; 0 if it is free",
        ),
        "device_held_twice": (
            "resource device",
            "1 while holders together have more of the device than there is, under whatever ids and resources; "
            "administrative access does not count (from the register)",
        ),
        "kubelet_answers": (
            "",
            "1 if the kubelet answered the last call of its PodResources service, 0 if not in time; absent without it",
        ),
        "registered": ("resource", "1 while the resource is registered with the kubelet"),
        "adopted_plugin_connected": (
            "resource",
            "1 while the vendor's plugin of an adopted resource is registered with the agent and lists its devices",
        ),
        "adopted_plugin_since_timestamp_seconds": (
            "resource",
            "Unix time since which that plugin is connected, or is not",
        ),
        "kubelet_listening": ("resource", "1 while the kubelet follows the list of devices"),
        "source_up": ("resource", "1 while the source of the devices works, 0 after it failed"),
        "source_listed": ("resource", "1 once the source has listed its devices"),
        "measured": ("resource", "1 while the source's measure hook reports the load of its devices"),
        "config_current": ("", "1 while the agent serves what its config file says, 0 after a change was refused"),
        "unwatched_directories": (
            "reason",
            "Directories without file events, which are read again and again instead, by reason. instances, watches: a "
            "limit of inotify. files: no file can be opened any more. silent: the file system does not answer. error: "
            "another error, which the log has",
        ),
        "provider_up": ("name", "1 while another part of the agent reports its status"),
    },
    CounterMetricFamily: {
        "kubelet_double_allocations": (
            "",
            "Devices that the kubelet gave to several pods at once (kubernetes#137534); must stay 0",
        ),
        "evidence_unknown": (
            "source",
            "Times that a source of evidence did not tell whether holders have ended, so that they count as held, or "
            "weaker evidence decides",
        ),
        "registrations": ("resource", "Registrations that the kubelet accepted"),
        "foreign_registrations": (
            "resource",
            "Times that another plugin registered the resource, and the agent registered it again",
        ),
        "registration_failures": ("resource", "Registrations that the kubelet refused or did not answer in time"),
        "kubelet_restarts": ("resource", "Restarts of the kubelet that the agent noticed"),
        "lists_sent": ("resource", "Lists of devices sent to the kubelet"),
        "allocations": ("resource", "Allocate calls granted by the plugin"),
        "allocated_devices": ("resource", "Devices granted by Allocate, each replica counted"),
        "allocation_refusals": ("resource reason", "Allocate calls refused by the plugin, by reason"),
        "hook_failures": ("resource hook", "Calls of the source's hooks that failed or timed out"),
        "look_timeouts": (
            "resource look",
            "Looks at a resource's hardware, or without a resource at other files, that did not end in time",
        ),
    },
    SummaryMetricFamily: {
        "preferred_allocation_duration_seconds": ("resource", "Time to answer GetPreferredAllocation"),
        "hook_duration_seconds": ("resource hook", "Time that the source's hooks took, by hook"),
    },
    InfoMetricFamily: {
        "build": ("version python", "Version of the agent, and of the Python that runs it"),
        "allocation": (
            "resource device side namespace pod container claim",
            "Holder of a device, one series per holder (from the kubelet's checkpoint and PodResources service, and "
            "the ledger)",
        ),
    },
    HistogramMetricFamily: {
        "allocation_duration_seconds": ("resource", "Time to answer Allocate, refusals included"),
        "allocation_wait_seconds": (
            "resource",
            "Time that Allocates waited for the ends of former holders, also in vain",
        ),
    },
}
"""For each type of metric, and each name of a metric (without `deviceplugin_`): the labels and the help text."""
_ABSENT_IF_EMPTY: Final = (
    *("device_state", "device_state_since_timestamp_seconds", "kubelet_answers", "measured", "provider_up"),
)


class AgentCollector:
    """Converts views of an agent to metric families.

    Any registry of prometheus_client accepts an instance.
    """

    def __init__(self, view: Callable[[], AgentView], *, dcgm: bool = False) -> None:
        self._view = view
        self._dcgm = dcgm

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families with the present values."""
        view = self._view()
        families: dict[str, Any] = {}
        for make, table in _FAMILIES.items():
            for name, (labels, about) in table.items():
                families[name] = make(f"deviceplugin_{name}", about, labels=labels.split())

        def add(name: str, labels: Sequence[str], *values: object) -> None:
            families[name].add_metric(labels, *values)

        add("build", (VERSION, PYTHON), {})
        add("holders_known", (), view.holders_known)
        if view.kubelet_answers is not None:
            add("kubelet_answers", (), view.kubelet_answers)
        add("kubelet_double_allocations", (), view.double_allocations)
        for source, times in view.unknown.items():
            add("evidence_unknown", (source,), times)
        add("config_current", (), not view.config_error)
        unwatched = Counter(one.failure.cause for one in view.unwatched for _ in one.directories)
        for cause in UnwatchedCause:
            add("unwatched_directories", (cause.value,), unwatched[cause])
        for resource in view.resources:
            _devices(resource, view.holders_known, add)
            _service(resource, add)
        for (name, device), holders in view.unserved.items():
            _holders(name, device, holders, view.holders_known, add)
        for name, number in Counter(name for name, _ in view.unserved).items():
            add("devices_gone", (name,), number)
        none = {(resource.name, "grant"): 0 for resource in view.resources}
        for key, count in sorted((none | looks.timeouts.copy()).items()):
            add("look_timeouts", key, count)
        for name in (*view.providers, *view.silent):
            add("provider_up", (name,), name in view.providers)
        yield from (family for name, family in families.items() if family.samples or name not in _ABSENT_IF_EMPTY)
        yield from _loads(view)
        if self._dcgm:
            from deviceplugin.metrics import dcgm

            yield from dcgm.families(view)
        for report in view.providers.values():
            yield from report.families


def _devices(resource: ResourceView, holders_known: bool, add: Callable[..., None]) -> None:
    name = resource.name
    # Each resource has a series for each usual combination of label values, even if no device has these values.
    counts = Counter(dict.fromkeys((("plugin", "plugin", word) for word in HEALTHS), 0))
    for seen in resource.devices:
        device, location, health = seen.device.id, seen.location, seen.device.health.value
        counts[location.side, location.state.value, health] += 1
        add("device_replicas", (name, device), seen.replicas)
        for word in HEALTHS:
            add("device_health", (name, device, word), word == health)
        if location is not DEFAULT_LOCATION:
            for state in State:
                add("device_state", (name, device, state.value), state is location.state)
            add("device_state_since_timestamp_seconds", (name, device), location.since)
        _holders(name, device, seen.holders, holders_known, add)
        add("device_held_twice", (name, device), device in resource.status.held_twice)
    for unlisted in resource.unlisted:
        if unlisted.holders:
            _holders(name, unlisted.id, unlisted.holders, holders_known, add)
    for key, number in sorted(counts.items()):
        add("devices", (name, *key), number)
    add("devices_gone", (name,), len(resource.status.snapshot.gone))
    withheld = Counter(seen.withheld.kind for seen in resource.devices if seen.withheld)
    for kind in WITHHELD:
        add("devices_withheld", (name, kind), withheld[kind])
    if resource.measured is not None:
        add("measured", (name,), resource.measured.reading is not None)


def _holders(
    name: str, device: str, holders: Sequence[DeviceHolder], holders_known: bool, add: Callable[..., None]
) -> None:
    """Add the metrics of one device's holders. name: the resource."""
    for row in dict.fromkeys((one.side, one.namespace, one.pod, one.container, one.claim) for one in holders):
        add("allocation", (name, device, *row), {})
    if holders_known:
        add("device_holders", (name, device), len(holders))


def _service(resource: ResourceView, add: Callable[..., None]) -> None:
    """Add the metrics of a resource's registration, of its gRPC server and of its hooks."""
    key, status = (resource.name,), resource.status
    servicer, registration = status.endpoint, status.registration
    add("registered", key, status.registered)
    add("kubelet_listening", key, status.live)
    if status.vendor is not None:
        add("adopted_plugin_connected", key, status.vendor.connected and status.vendor.lists)
        add("adopted_plugin_since_timestamp_seconds", key, status.vendor.since)
    add("source_up", key, not status.source_error)
    add("source_listed", key, status.snapshot.listed)
    add("registrations", key, registration.registrations)
    add("foreign_registrations", key, registration.foreign)
    add("registration_failures", key, registration.failures)
    add("kubelet_restarts", key, registration.kubelet_restarts)
    add("lists_sent", key, servicer.lists_sent)
    add("allocations", key, servicer.allocations)
    add("allocation_duration_seconds", key, *buckets(servicer.allocation_durations))
    add("allocation_wait_seconds", key, *buckets(servicer.waits))
    add("allocated_devices", key, servicer.devices_allocated)
    for reason, count in sorted(dict(servicer.refusals).items()):
        add("allocation_refusals", (resource.name, reason), count)
    add("preferred_allocation_duration_seconds", key, servicer.preferences, servicer.preference_seconds)
    made = servicer.hooks
    calls, seconds, failures = dict(made.calls), dict(made.seconds), dict(made.failures)
    if (measured := resource.measured) is not None:
        hook = (resource.name, "measure")
        calls[hook], seconds[hook], failures[hook] = measured.calls, measured.seconds, measured.failures
    for hook in sorted(calls):
        add("hook_duration_seconds", hook, calls[hook], seconds.get(hook, 0.0))
        add("hook_failures", hook, failures.get(hook, 0))


def buckets(durations: Durations) -> tuple[list[tuple[str, float]], float]:
    """Return the arguments of a HistogramMetricFamily: bounds with cumulated counts, and the sum in seconds."""
    return list(zip(_BOUNDS, accumulate(tuple(durations.counts)), strict=True)), durations.seconds


def _loads(view: AgentView) -> Iterable[Metric]:
    rows: dict[str, list[tuple[str, str, str, float]]] = defaultdict(list)
    for resource in view.resources:
        for seen in resource.devices:
            for name, value in seen.load.items():
                parts = value if isinstance(value, dict) else {"": value}
                rows[name] += ((resource.name, seen.device.id, part, number) for part, number in parts.items())
    for name in sorted(rows):
        quantity = QUANTITIES.get(name)
        about = quantity.about if quantity else "A quantity of the source's measure hook"
        labels = ["resource", "device"]
        if any(part for _, _, part, _ in rows[name]):
            labels.append((quantity and quantity.label) or "part")
        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = make(f"deviceplugin_device_{name}", about, labels=labels)
        for *values, number in rows[name]:
            family.add_metric(values[: len(labels)], number)
        yield family


class Pages:
    """The routes of the agent's HTTP server: the page, metrics, status and probes."""

    def __init__(
        self, view: Callable[[], AgentView], collector: AgentCollector, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._view = view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._loop = loop
        lock = threading.Lock()
        self.routes = {
            "/": web.Route(self._page, lock=lock),
            "/metrics": web.Route(self._metrics, key=_format, lock=lock),
            "/status": web.Route(self._status, lock=lock),
            "/healthz": web.Route(self._healthz, public=True),
            "/readyz": web.Route(self._readyz, public=True),
        }

    def _metrics(self, accept: str) -> web.Answer:
        encode, content_type = choose_encoder(accept)
        return web.Answer(encode(self._registry), content_type)

    def _status(self, _: object) -> web.Answer:
        # The module `page` is imported only when a client requests the page or /status.
        from deviceplugin.metrics import page

        return web.Answer(page.status(self._view()), "application/json")

    def _page(self, _: object) -> web.Answer:
        from deviceplugin.metrics import page

        return web.Answer(page.html(self._view()), "text/html; charset=utf-8", headers=page.headers())

    def _healthz(self, _: object) -> web.Answer:
        """Return 200 if the agent's event loop executes a callback within LOOP_TIMEOUT seconds, otherwise 503."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return web.Answer(b"the loop has ended\n", status=503)
        if not turned.wait(LOOP_TIMEOUT):
            return web.Answer(f"the event loop has been blocked for {LOOP_TIMEOUT:g} s\n".encode(), status=503)
        return web.Answer(b"ok\n")

    def _readyz(self, _: object) -> web.Answer:
        """Return 200 if the agent is ready to give devices to pods and each `Provider` is ready, otherwise 503."""
        reasons = self._view().unready
        return web.Answer("\n".join((*reasons, "")).encode() or b"ok\n", status=503 if reasons else 200)


def _format(request: web.Request) -> str:
    """Return the metrics format that the Accept header requests. Each format has its own cached response."""
    _, content_type = choose_encoder(request.headers.get("accept", ""))
    kind = OPEN_METRICS if content_type.startswith(OPEN_METRICS) else "text/plain"
    return f"{kind};version=1.0.0;escaping=allow-utf-8" if content_type.endswith("allow-utf-8") else kind


@contextlib.contextmanager
def serving(address: str, agent: ObservedAgent, config: MetricsConfig | None = None) -> Iterator[web.Server]:
    """While the context is active, serve an agent's metrics at `address`.

    The context must be entered in the agent's event loop. address: host:port, [v6 address]:port, or :port for all
    addresses. config: the settings, None for the defaults. Raises OSError if the server cannot listen at the address,
    or a certificate or token cannot be read.
    """
    loop = asyncio.get_running_loop()
    observer, certificate, token = Observer(agent), None, None
    if config is not None:
        observer = Observer(agent, config.period)
        if config.certificate:
            certificate = Certificate(config.certificate, config.key, config.client_ca, config.min_version)
        token = Token(config.token) if config.token else None
    if token and not certificate:
        _LOG.warning("the token of the metrics crosses the network in clear text; set a certificate")
    dcgm = config is not None and config.dcgm
    pages = Pages(observer.view, AgentCollector(observer.view, dcgm=dcgm), loop)
    server = web.Server(web.listen(address), pages.routes, certificate=certificate, token=token)
    watching = loop.create_task(observer.watch(), name="observe")
    server.start()
    _LOG.info("serving metrics at %s://%s/metrics", "https" if certificate else "http", server.address)
    try:
        yield server
    finally:
        watching.cancel()
        server.close()
