"""The Prometheus metrics of an agent, and the server that gives them, the status and the page.

One collector turns one view into families at each scrape. Nothing is counted here, and no registry of the process
is used. Loaded only when metrics are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from deviceplugin.metrics import web
from deviceplugin.metrics.load import QUANTITIES
from deviceplugin.metrics.report import DEFAULT_LOCATION
from deviceplugin.metrics.views import ObservedAgent, Observer, View

if TYPE_CHECKING:
    from deviceplugin.config import MetricsConfig
    from deviceplugin.kubelet.status import ResourceStatus

_LOG: Final = logging.getLogger(__name__)
LOOP_TIMEOUT: Final = 2.0
"""Seconds within which a living loop answers /healthz."""
OPEN_METRICS: Final = "application/openmetrics-text"
HEALTHS: Final = ("healthy", "unhealthy", "unknown")
STATES: Final = ("plugin", "to-dra", "dra", "to-plugin", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How metrics are served; the fields of the config's `metrics`.

    certificate, key: PEM files for TLS, read again when they are renewed. client_ca: a PEM file
    with the authorities of client certificates, which all clients but the kubelet's probes must then
    have. min_version: of TLS. token: a file with the bearer token that all clients but the kubelet's
    probes must send. period: seconds between readings of the load. dcgm: whether the names of
    NVIDIA's DCGM exporter are given as well.
    """

    certificate: str | Path | None = None
    key: str | Path | None = None
    client_ca: str | Path | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"
    token: str | Path | None = None
    period: float = 10.0
    dcgm: bool = False

    @classmethod
    def of(cls, config: MetricsConfig) -> Options:
        """Return what a config file says."""
        return cls(**{name: getattr(config, name) for name in config.__struct_fields__})


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"deviceplugin_{name}", about, labels=labels)


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"deviceplugin_{name}", about, labels=labels)


def _summary(name: str, about: str, *labels: str) -> SummaryMetricFamily:
    return SummaryMetricFamily(f"deviceplugin_{name}", about, labels=labels)


class AgentCollector:
    """Turns views of an agent into metric families; put it into any registry of the client library."""

    def __init__(self, view: Callable[[], View], *, dcgm: bool = False) -> None:
        self._view = view
        self._dcgm = dcgm

    def collect(self) -> Iterable[Metric]:
        """Yield the families as of now."""
        view = self._view()
        yield from _devices(view)
        yield from _holders(view)
        yield from _services(view)
        yield from _loads(view)
        if self._dcgm:
            from deviceplugin.metrics import dcgm

            yield from dcgm.families(view)
        yield from _providers(view)


def _devices(view: View) -> Iterable[Metric]:
    count = _gauge(
        "devices",
        "Devices by side and state of the handover (from the ledger) and health (from their source)",
        "resource",
        "side",
        "state",
        "health",
    )
    health = _gauge(
        "device_health",
        "1 for the current health of the device, 0 for the others (from its source)",
        "resource",
        "device",
        "health",
    )
    gone = _gauge("devices_gone", "Devices that their source no longer lists but that may still be held", "resource")
    withheld = _gauge(
        "devices_withheld",
        "Devices that are offered to nobody because they may still be held (from the kubelet's files and pod cgroups); "
        "/status has the reasons",
        "resource",
    )
    replicas = _gauge("device_replicas", "Containers that may share the device (from its source)", "resource", "device")
    state = _gauge(
        "device_state",
        "1 for the current handover state of the device, 0 for the others (from the ledger)",
        "resource",
        "device",
        "state",
    )
    since = _gauge(
        "device_state_since_seconds",
        "Unix time at which the device entered its handover state (from the ledger)",
        "resource",
        "device",
    )
    for one in view.resources:
        name = one.name
        # Zeros for the usual combinations, so that a sum has every resource.
        counts = Counter(dict.fromkeys((("plugin", "plugin", word) for word in HEALTHS), 0))
        for seen in one.devices:
            device, location = seen.device, seen.location
            counts[location.side, location.state, device.health.value] += 1
            replicas.add_metric((name, device.id), seen.replicas)
            for word in HEALTHS:
                health.add_metric((name, device.id, word), int(word == device.health.value))
            if location is not DEFAULT_LOCATION:
                for word in STATES:
                    state.add_metric((name, device.id, word), int(word == location.state))
                since.add_metric((name, device.id), location.since)
        for key, number in sorted(counts.items()):
            count.add_metric((name, *key), number)
        gone.add_metric((name,), len(one.status.snapshot.gone))
        withheld.add_metric((name,), sum(bool(seen.withheld) for seen in one.devices))
    yield from (count, health, gone, withheld, replicas)
    if state.samples:
        yield from (state, since)


def _holders(view: View) -> Iterable[Metric]:
    known = _gauge("holders_known", "1 while the kubelet's checkpoint was read lately; at 0 the holders are unknown")
    known.add_metric((), int(view.holders_known))
    yield known
    info = InfoMetricFamily(
        "deviceplugin_allocation",
        "Holder of a device, one series per holder (from the kubelet's checkpoint and PodResources service, and the "
        "ledger)",
        labels=("resource", "device", "side", "namespace", "pod", "container", "claim"),
    )
    count = _gauge(
        "device_holders", "Containers and unused claims that hold the device; 0 if it is free", "resource", "device"
    )
    for one in view.resources:
        for seen in one.devices:
            device = seen.device.id
            rows = dict.fromkeys(
                (one.name, device, holder.side, holder.namespace, holder.pod, holder.container, holder.claim)
                for holder in seen.holders
            )
            for row in rows:
                info.add_metric(row, {})
            if view.holders_known:
                count.add_metric((one.name, device), len(seen.holders))
    yield from (info, count)
    doubles = _counter(
        "kubelet_double_allocations",
        "Devices that the kubelet gave to several pods at once (kubernetes#137534); must stay 0",
    )
    doubles.add_metric((), view.double_allocations)
    yield doubles


def _services(view: View) -> Iterable[Metric]:
    """Yield what the registration, the servicer and the source of each resource have done."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    refusals = _counter("allocation_refusals", "Allocate calls refused by the plugin, by reason", "resource", "reason")
    preferences = _summary("preferred_allocation_duration_seconds", "Time to answer GetPreferredAllocation", "resource")
    hooks = _summary("hook_duration_seconds", "Time that the source's hooks took, by hook", "resource", "hook")
    failed = _counter("hook_failures", "Calls of the source's hooks that failed or timed out", "resource", "hook")
    for one in view.resources:
        for make, name, about, value in _numbers(one.status):
            if name not in families:
                families[name] = make(name, about, "resource")
            families[name].add_metric((one.name,), value)
        servicer = one.status.endpoint
        for reason, count in sorted(dict(servicer.refusals).items()):
            refusals.add_metric((one.name, reason), count)
        preferences.add_metric((one.name,), servicer.preferences, servicer.preference_seconds)
        calls, seconds, bad = dict(servicer.hook_calls), dict(servicer.hook_seconds), dict(servicer.hook_failures)
        if (measured := one.measured) is not None:
            calls["measure"], seconds["measure"], bad["measure"] = measured.calls, measured.seconds, measured.failures
        for hook in sorted(calls):
            hooks.add_metric((one.name, hook), calls[hook], seconds.get(hook, 0.0))
            failed.add_metric((one.name, hook), bad.get(hook, 0))
    yield from (*families.values(), refusals, preferences, hooks, failed)


def _numbers(
    status: ResourceStatus,
) -> Iterable[tuple[Callable[..., GaugeMetricFamily | CounterMetricFamily], str, str, float]]:
    """Yield kind, name, help and value of the metrics that each resource has once."""
    servicer, registration = status.endpoint, status.registration
    yield _gauge, "registered", "1 while the resource is registered with the kubelet", status.registered
    yield _gauge, "kubelet_listening", "1 while the kubelet follows the list of devices", status.live
    yield _gauge, "source_up", "1 while the source of the devices works, 0 after it failed", not status.source_error
    yield _gauge, "source_listed", "1 once the source has listed its devices", status.snapshot.listed
    yield _counter, "registrations", "Registrations that the kubelet accepted", registration.registrations
    yield _counter, "registration_failures", "Registrations that the kubelet did not accept", registration.failures
    yield _counter, "kubelet_restarts", "Restarts of the kubelet that the agent noticed", registration.kubelet_restarts
    yield _counter, "lists_sent", "Lists of devices sent to the kubelet", servicer.lists_sent
    yield _counter, "allocations", "Allocate calls granted by the plugin", servicer.allocations
    about = "Devices granted by Allocate, each replica counted"
    yield _counter, "allocated_devices", about, servicer.devices_allocated


def _loads(view: View) -> Iterable[Metric]:
    measured = _gauge("measured", "1 while the source's measure hook reports the load of its devices", "resource")
    rows: dict[str, list[tuple[str, str, str, float]]] = {}
    for one in view.resources:
        if one.measured is not None:
            measured.add_metric((one.name,), int(one.measured.reading is not None))
        for seen in one.devices:
            for name, value in seen.load.items():
                parts = value if isinstance(value, dict) else {"": value}
                rows.setdefault(name, []).extend(
                    (one.name, seen.device.id, part, number) for part, number in parts.items()
                )
    if measured.samples:
        yield measured
    for name in sorted(rows):
        yield _load(name, rows[name])


def _load(name: str, rows: Iterable[tuple[str, str, str, float]]) -> Metric:
    known = QUANTITIES.get(name)
    about = f"{known.about} (from the source's measure hook)" if known else "A quantity of the source's measure hook"
    labels: tuple[str, ...] = ("resource", "device")
    if any(part for _, _, part, _ in rows):
        labels = (*labels, (known and known.label) or "part")
    family = (_counter if name.endswith("_total") else _gauge)(f"device_{name}", about, *labels)
    for *values, number in rows:
        family.add_metric(values[: len(labels)], number)
    return family


def _providers(view: View) -> Iterable[Metric]:
    up = _gauge("provider_up", "1 while another part of the agent reports its status", "name")
    for name in view.providers:
        up.add_metric((name,), 1)
    for name in view.silent:
        up.add_metric((name,), 0)
    if up.samples:
        yield up
    for report in view.providers.values():
        yield from report.families


class Pages:
    """The routes of the server."""

    def __init__(self, view: Callable[[], View], collector: AgentCollector, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
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
        from deviceplugin.metrics import page  # not loaded by an agent that is only scraped

        return web.Answer(page.status(self._view()), "application/json")

    def _page(self, _: object) -> web.Answer:
        from deviceplugin.metrics import page

        return web.Answer(page.html(self._view()), "text/html; charset=utf-8", headers=page.headers())

    def _healthz(self, _: object) -> web.Answer:
        """Answer 200 if the agent's loop runs."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return web.Answer(b"the loop has ended\n", status=503)
        if not turned.wait(LOOP_TIMEOUT):
            return web.Answer(f"the loop has not turned for {LOOP_TIMEOUT:g} s\n".encode(), status=503)
        return web.Answer(b"ok\n")

    def _readyz(self, _: object) -> web.Answer:
        """Answer 200 if all resources are registered with the kubelet, and all providers are ready."""
        reasons = self._view().unready
        return web.Answer("\n".join((*reasons, "")).encode() or b"ok\n", status=503 if reasons else 200)


def _format(request: web.Request) -> str:
    """Return one of the few known formats as an Accept header; a client may invent versions without end."""
    _, content_type = choose_encoder(request.headers.get("accept", ""))
    kind = OPEN_METRICS if content_type.startswith(OPEN_METRICS) else "text/plain"
    return f"{kind};version=1.0.0;escaping=allow-utf-8" if content_type.endswith("allow-utf-8") else kind


@contextlib.contextmanager
def serving(address: str, agent: ObservedAgent, options: Options | None = None) -> Iterator[web.Server]:
    """Serve an agent's metrics at `address` while the context lasts; to be entered in the agent's loop.

    address: host:port, [v6 address]:port, or :port for all addresses.

    Raises:
        OSError: it cannot listen there, or a certificate or token cannot be read.

    """
    options = options or Options()
    loop = asyncio.get_running_loop()
    certificate = None
    if options.certificate:
        certificate = web.Certificate(options.certificate, options.key, options.client_ca, options.min_version)
    token = web.Token(options.token) if options.token else None
    if token and not certificate:
        _LOG.warning("the token of the metrics crosses the network in clear text; set a certificate")
    observer = Observer(agent, options.period)
    pages = Pages(observer.view, AgentCollector(observer.view, dcgm=options.dcgm), loop)
    server = web.Server(web.listen(address), pages.routes, certificate=certificate, token=token)
    watching = loop.create_task(observer.watch(), name="observe")
    server.start()
    _LOG.info("metrics at %s://%s/metrics", "https" if certificate else "http", server.address)
    try:
        yield server
    finally:
        watching.cancel()
        server.close()
