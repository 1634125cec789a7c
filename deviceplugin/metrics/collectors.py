"""What Prometheus gets of an agent, and the server that gives it, the status and the page.

One collector turns one view into families at each scrape; nothing is counted here, and nothing
is put into a registry of the process. Loaded only when metrics are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
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

__all__ = ["AgentCollector", "Options", "serving"]

_LOG: Final = logging.getLogger(__name__)
LOOP_PATIENCE: Final = 2.0
"""Seconds within which a living loop answers /healthz."""
OPEN_METRICS: Final = "application/openmetrics-text"
HEALTHS: Final = ("healthy", "unhealthy", "unknown")
STATES: Final = ("plugin", "to-dra", "dra", "to-plugin", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How metrics are served.

    certificate, key: PEM files for TLS, read again when they are renewed. client_ca: a PEM file
    with the authorities of client certificates, which everybody but the kubelet's probes must then
    have. min_version: of TLS. token: a file with the bearer token that everybody but the kubelet's
    probes must bring. period: seconds between readings of the load. dcgm: whether the names of
    NVIDIA's DCGM exporter are given as well.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"
    token: Path | None = None
    period: float = 10.0
    dcgm: bool = False

    @classmethod
    def of(cls, config: MetricsConfig) -> Options:
        """Return what a config file says."""

        def path(text: str | None) -> Path | None:
            return Path(text) if text is not None else None

        return cls(
            certificate=path(config.certificate),
            key=path(config.key),
            client_ca=path(config.client_ca),
            min_version=config.min_version,
            token=path(config.token),
            period=config.period,
            dcgm=config.dcgm,
        )


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
    count = GaugeMetricFamily(
        "deviceplugin_devices",
        "Devices by side and state of the handover (from the ledger) and health (from their source)",
        labels=("resource", "side", "state", "health"),
    )
    health = GaugeMetricFamily(
        "deviceplugin_device_health",
        "1 for the current health of the device, 0 for the others (from its source)",
        labels=("resource", "device", "health"),
    )
    gone = GaugeMetricFamily(
        "deviceplugin_devices_gone",
        "Devices that their source no longer lists but that may still be held",
        labels=("resource",),
    )
    withheld = GaugeMetricFamily(
        "deviceplugin_devices_withheld",
        "Devices given to nobody because they may still be held (from the kubelet's files and pod cgroups); /status "
        "has the reasons",
        labels=("resource",),
    )
    replicas = GaugeMetricFamily(
        "deviceplugin_device_replicas",
        "Containers that may share the device (from its source)",
        labels=("resource", "device"),
    )
    state = GaugeMetricFamily(
        "deviceplugin_device_state",
        "1 for the current handover state of the device, 0 for the others (from the ledger)",
        labels=("resource", "device", "state"),
    )
    since = GaugeMetricFamily(
        "deviceplugin_device_state_since_seconds",
        "Unix time at which the device entered its handover state (from the ledger)",
        labels=("resource", "device"),
    )
    for one in view.resources:
        name = one.name
        counts: dict[tuple[str, str, str], int] = {}
        for seen in one.devices:
            device, place = seen.device, seen.place
            key = (place.side, place.state, device.health.value)
            counts[key] = counts.get(key, 0) + 1
            replicas.add_metric((name, device.id), seen.replicas)
            for word in HEALTHS:
                health.add_metric((name, device.id, word), int(word == device.health.value))
            if place is not DEFAULT_LOCATION:
                for word in STATES:
                    state.add_metric((name, device.id, word), int(word == place.state))
                since.add_metric((name, device.id), place.since)
        # Zeros for the usual combinations, so that a sum has every resource.
        for word in HEALTHS:
            counts.setdefault(("plugin", "plugin", word), 0)
        for (side, where, word), number in sorted(counts.items()):
            count.add_metric((name, side, where, word), number)
        gone.add_metric((name,), len(one.status.snapshot.gone))
        withheld.add_metric((name,), sum(bool(seen.withheld) for seen in one.devices))
    yield from (count, health, gone, withheld, replicas)
    if state.samples:
        yield from (state, since)


def _holders(view: View) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "deviceplugin_holders_known",
        "1 while the kubelet's checkpoint was read lately; at 0 the holders are unknown",
        value=int(view.holders_known),
    )
    info = InfoMetricFamily(
        "deviceplugin_allocation",
        "Holder of a device, one series per holder (from the kubelet's checkpoint and PodResources service, and the "
        "ledger)",
        labels=("resource", "device", "side", "namespace", "pod", "container", "claim"),
    )
    holders = GaugeMetricFamily(
        "deviceplugin_device_holders",
        "Containers and unused claims that hold the device; 0 if it is free",
        labels=("resource", "device"),
    )
    for one in view.resources:
        for seen in one.devices:
            device = seen.device.id
            rows = {
                (one.name, device, hold.side, hold.namespace, hold.pod, hold.container, hold.claim): None
                for hold in seen.holds
            }
            for row in rows:
                info.add_metric(row, {})
            if view.holders_known:
                holders.add_metric((one.name, device), len(seen.holds))
    yield from (info, holders)
    yield CounterMetricFamily(
        "deviceplugin_kubelet_double_allocations",
        "Devices that the kubelet gave to several pods at once (kubernetes#137534); must stay 0",
        value=view.double_allocations,
    )


def _services(view: View) -> Iterable[Metric]:
    """Yield what each resource's endpoint, registration and source have done."""

    def gauge(name: str, about: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"deviceplugin_{name}", about, labels=("resource",))

    def counter(name: str, about: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"deviceplugin_{name}", about, labels=("resource", *more))

    def summary(name: str, about: str, *more: str) -> SummaryMetricFamily:
        return SummaryMetricFamily(f"deviceplugin_{name}", about, labels=("resource", *more))

    registered = gauge("registered", "1 while the resource is registered with the kubelet")
    listening = gauge("kubelet_listening", "1 while the kubelet follows the list of devices")
    source = gauge("source_up", "1 while the source of the devices works, 0 after it failed")
    listed = gauge("source_listed", "1 once the source has listed its devices")
    registrations = counter("registrations", "Registrations that the kubelet accepted")
    failures = counter("registration_failures", "Registrations that the kubelet did not accept")
    restarts = counter("kubelet_restarts", "Restarts of the kubelet that the agent noticed")
    lists = counter("lists_sent", "Lists of devices sent to the kubelet")
    allocations = counter("allocations", "Allocate calls granted by the plugin")
    allocated = counter("allocated_devices", "Devices granted by Allocate, each replica counted")
    refusals = counter("allocation_refusals", "Allocate calls refused by the plugin, by reason", "reason")
    preferences = summary("preferred_allocation_duration_seconds", "Time to answer GetPreferredAllocation")
    hooks = summary("hook_duration_seconds", "Time that the source's hooks took, by hook", "hook")
    failed = counter("hook_failures", "Calls of the source's hooks that failed or timed out", "hook")
    for one in view.resources:
        key, status = (one.name,), one.status
        endpoint, registration = status.endpoint, status.registration
        registered.add_metric(key, int(status.registered))
        listening.add_metric(key, int(status.live))
        source.add_metric(key, int(not status.source_error))
        listed.add_metric(key, int(status.snapshot.listed))
        registrations.add_metric(key, registration.registrations)
        failures.add_metric(key, registration.failures)
        restarts.add_metric(key, registration.kubelet_restarts)
        lists.add_metric(key, endpoint.lists_sent)
        allocations.add_metric(key, endpoint.allocations)
        allocated.add_metric(key, endpoint.devices_allocated)
        for reason, count in sorted(dict(endpoint.refusals).items()):
            refusals.add_metric((one.name, reason), count)
        preferences.add_metric(key, endpoint.preferences, endpoint.preference_seconds)
        calls, seconds, bad = dict(endpoint.hook_calls), dict(endpoint.hook_seconds), dict(endpoint.hook_failures)
        if (measured := one.measured) is not None:
            calls["measure"], seconds["measure"], bad["measure"] = measured.calls, measured.seconds, measured.failures
        for hook in sorted(calls):
            hooks.add_metric((one.name, hook), calls[hook], seconds.get(hook, 0.0))
            failed.add_metric((one.name, hook), bad.get(hook, 0))
    yield from (registered, listening, source, listed, registrations, failures, restarts, lists)
    yield from (allocations, allocated, refusals, preferences, hooks, failed)


def _loads(view: View) -> Iterable[Metric]:
    measured = GaugeMetricFamily(
        "deviceplugin_measured",
        "1 while the source's measure hook reports the load of its devices",
        labels=("resource",),
    )
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
    make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = make(f"deviceplugin_device_{name}", about, labels=labels)
    for *values, number in rows:
        family.add_metric(values[: len(labels)], number)
    return family


def _providers(view: View) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "deviceplugin_provider_up",
        "1 while another part of the agent reports its status",
        labels=("name",),
    )
    for name in view.providers:
        up.add_metric((name,), 1)
    for name in view.silent:
        up.add_metric((name,), 0)
    if up.samples:
        yield up
    for report in view.providers.values():
        yield from report.families


# The server.


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
        from deviceplugin.metrics import page  # only where people or programs ask for it

        return web.Answer(page.status(self._view()), "application/json")

    def _page(self, _: object) -> web.Answer:
        from deviceplugin.metrics import page

        return web.Answer(page.html(self._view()), "text/html; charset=utf-8", headers=page.headers())

    def _healthz(self, _: object) -> web.Answer:
        """Answer 200 if the agent's loop still turns."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return web.Answer(b"the loop has ended\n", status=503)
        if not turned.wait(LOOP_PATIENCE):
            return web.Answer(f"the loop has not turned for {LOOP_PATIENCE:g} s\n".encode(), status=503)
        return web.Answer(b"ok\n")

    def _readyz(self, _: object) -> web.Answer:
        """Answer 200 if everything that the agent serves is known to the kubelet (and the API server)."""
        reasons = self._view().unready
        return web.Answer("\n".join((*reasons, "")).encode() or b"ok\n", status=503 if reasons else 200)


def _format(request: web.Request) -> str:
    """Return one of the few formats that there are as an Accept header; a client may invent versions without end."""
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
