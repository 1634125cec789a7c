"""What Prometheus gets of an agent, and the server that gives it, the status and the page.

One collector turns one view into families at each scrape; nothing is counted here, and nothing
is put into a registry of the process. Loaded only when metrics are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deviceplugin import exposition, page, web
from deviceplugin.exposition import Family
from deviceplugin.load import QUANTITIES, Quantity
from deviceplugin.observe import Observer, View
from deviceplugin.report import HERE

if TYPE_CHECKING:
    from deviceplugin.agent import Agent
    from deviceplugin.config import MetricsConfig

__all__ = ["AgentCollector", "Options", "serving"]

_LOG: Final = logging.getLogger(__name__)
LOOP_PATIENCE: Final = 2.0
"""Seconds within which a living loop answers /healthz."""
HEALTHS: Final = ("healthy", "unhealthy", "unknown")
STATES: Final = ("plugin", "to-dra", "dra", "to-plugin", "quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How metrics are served.

    certificate, key: PEM files for TLS, read again when they are renewed. token: a file with the
    bearer token that everybody but the kubelet's probes must bring. period: seconds between
    readings of the load. dcgm: whether the names of NVIDIA's DCGM exporter are given as well.
    """

    certificate: Path | None = None
    key: Path | None = None
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
            token=path(config.token),
            period=config.period,
            dcgm=config.dcgm,
        )


class AgentCollector:
    """Turns views of an agent into metric families; put it into any registry of the client library."""

    def __init__(self, view: Callable[[], View], *, dcgm: bool = False) -> None:
        self._view = view
        self._dcgm = dcgm

    def collect(self) -> Iterable[Any]:
        """Yield the families as of now."""
        view = self._view()
        yield from _devices(view)
        yield from _holders(view)
        yield from _doors(view)
        yield from _loads(view)
        if self._dcgm:
            from deviceplugin import dcgm

            yield from dcgm.families(view)
        yield from _providers(view)


def _devices(view: View) -> Iterable[Family]:
    count = Family(
        "deviceplugin_devices",
        "gauge",
        "Devices by side and state of the handover (the ledger says it) and health (their source says it)",
        ("resource", "side", "state", "health"),
    )
    health = Family(
        "deviceplugin_device_health",
        "gauge",
        "1 for the health that the device's source gives it, 0 for the others",
        ("resource", "device", "health"),
    )
    gone = Family(
        "deviceplugin_devices_gone", "gauge", "Devices that their source lists no more but may be held", ("resource",)
    )
    replicas = Family(
        "deviceplugin_device_replicas",
        "gauge",
        "Containers that may share the device (its source says it)",
        ("resource", "device"),
    )
    state = Family(
        "deviceplugin_device_state",
        "gauge",
        "1 for the state of the handover that the device is in (the ledger says it), 0 for the others",
        ("resource", "device", "state"),
    )
    since = Family(
        "deviceplugin_device_state_since_seconds",
        "gauge",
        "When the device came into its state of the handover, Unix time (the ledger says it)",
        ("resource", "device"),
    )
    for one in view.resources:
        name = one.name
        counts: dict[tuple[str, str, str], int] = {}
        for seen in one.devices:
            device, place = seen.device, seen.place
            key = (place.side, place.state, device.health.value)
            counts[key] = counts.get(key, 0) + 1
            replicas.add((name, device.id), seen.replicas)
            for word in HEALTHS:
                health.add((name, device.id, word), int(word == device.health.value))
            if place is not HERE:
                for word in STATES:
                    state.add((name, device.id, word), int(word == place.state))
                since.add((name, device.id), place.since)
        # The usual ones are there at 0, too, so that a sum never lacks its resource.
        for word in HEALTHS:
            counts.setdefault(("plugin", "plugin", word), 0)
        for (side, where, word), number in sorted(counts.items()):
            count.add((name, side, where, word), number)
        gone.add((name,), len(one.status.snapshot.gone))
    yield from (count, health, gone, replicas)
    if state.rows:
        yield from (state, since)


def _holders(view: View) -> Iterable[Family]:
    yield _single(
        "deviceplugin_holders_known",
        "gauge",
        "1 while the kubelet's PodResources service and checkpoint can be read; at 0 nobody knows who holds what",
        int(view.holders_known),
    )
    info = Family(
        "deviceplugin_allocation",
        "info",
        "Who holds which device, one series a holder (the kubelet's PodResources service and checkpoint, and the "
        "ledger, say it)",
        ("resource", "device", "side", "namespace", "pod", "container", "claim"),
    )
    holders = Family(
        "deviceplugin_device_holders",
        "gauge",
        "Containers and unused claims that hold the device, 0 if it is free",
        ("resource", "device"),
    )
    for one in view.resources:
        for seen in one.devices:
            device = seen.device.id
            rows = {
                (one.name, device, hold.side, hold.namespace, hold.pod, hold.container, hold.claim): None
                for hold in seen.holds
            }
            for row in rows:
                info.add(row, 1)
            if view.holders_known:
                holders.add((one.name, device), len(seen.holds))
    yield from (info, holders)
    yield _single(
        "deviceplugin_kubelet_double_allocations",
        "counter",
        "Devices that the kubelet gave to several pods at once (kubernetes#137534); must stay 0",
        view.double_allocations,
    )


def _doors(view: View) -> Iterable[Family]:
    """Yield what each resource's endpoint, registration and source have done."""

    def by_resource(name: str, kind: str, about: str, *more: str) -> Family:
        return Family(f"deviceplugin_{name}", kind, about, ("resource", *more))

    registered = by_resource("registered", "gauge", "1 while the kubelet has taken the registration")
    listening = by_resource("kubelet_listening", "gauge", "1 while the kubelet follows the list of devices")
    source = by_resource("source_up", "gauge", "1 while the source of the devices works, 0 after it failed")
    listed = by_resource("source_listed", "gauge", "1 once the source has listed its devices")
    registrations = by_resource("registrations", "counter", "Registrations that the kubelet took")
    failures = by_resource("registration_failures", "counter", "Registrations that the kubelet did not take")
    restarts = by_resource("kubelet_restarts", "counter", "Times that the kubelet was seen to have restarted")
    lists = by_resource("lists_sent", "counter", "Lists of devices sent to the kubelet")
    allocations = by_resource("allocations", "counter", "Allocate calls granted by the plugin")
    allocated = by_resource("allocated_devices", "counter", "Devices given out by Allocate, replicas counted singly")
    refusals = by_resource(
        "allocation_refusals", "counter", "Allocate calls refused by the plugin, by reason", "reason"
    )
    preferences = by_resource(
        "preferred_allocation_duration_seconds", "summary", "Time to answer GetPreferredAllocation"
    )
    hooks = by_resource("hook_duration_seconds", "summary", "Time that the source's hooks took, by hook", "hook")
    failed = by_resource("hook_failures", "counter", "Calls of the source's hooks that failed or took too long", "hook")
    for one in view.resources:
        key, status = (one.name,), one.status
        door, desk = status.endpoint, status.registration
        registered.add(key, int(status.registered))
        listening.add(key, int(status.live))
        source.add(key, int(not status.source_error))
        listed.add(key, int(status.snapshot.listed))
        registrations.add(key, desk.registrations)
        failures.add(key, desk.failures)
        restarts.add(key, desk.kubelet_restarts)
        lists.add(key, door.lists_sent)
        allocations.add(key, door.allocations)
        allocated.add(key, door.devices_allocated)
        for reason, count in sorted(dict(door.refusals).items()):
            refusals.add((one.name, reason), count)
        preferences.add(key, door.preferences, "_count")
        preferences.add(key, door.preference_seconds, "_sum")
        calls, seconds, bad = dict(door.hook_calls), dict(door.hook_seconds), dict(door.hook_failures)
        if (gauge := one.measured) is not None:
            calls["measure"], seconds["measure"], bad["measure"] = gauge.calls, gauge.seconds, gauge.failures
        for hook in sorted(calls):
            hooks.add((one.name, hook), calls[hook], "_count")
            hooks.add((one.name, hook), seconds.get(hook, 0.0), "_sum")
            failed.add((one.name, hook), bad.get(hook, 0))
    yield from (registered, listening, source, listed, registrations, failures, restarts, lists)
    yield from (allocations, allocated, refusals, preferences, hooks, failed)


def _loads(view: View) -> Iterable[Family]:
    measured = Family(
        "deviceplugin_measured",
        "gauge",
        "1 while the source's measure hook gives the load of its devices",
        ("resource",),
    )
    families: dict[str, Family] = {}
    for one in view.resources:
        if one.measured is not None:
            measured.add((one.name,), int(one.measured.reading is not None))
        for seen in one.devices:
            key = (one.name, seen.device.id)
            for name, value in seen.load.items():
                family = families.get(name)
                if family is None:
                    family = families[name] = _family(name)
                if isinstance(value, dict):
                    label = QUANTITIES[name].label if name in QUANTITIES else ""
                    for part, number in value.items():
                        family.add((*key, part), number, more=label or "part")
                else:
                    family.add(key, value)
    if measured.rows:
        yield measured
    for name in sorted(families):
        yield families[name]


@functools.cache
def _describe(name: str) -> tuple[str, str, str]:
    known = QUANTITIES.get(name, Quantity(name, "As its source's measure hook says"))
    about = f"{known.about} (the source's measure hook says it)" if name in QUANTITIES else known.about
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"deviceplugin_device_{name.removesuffix('_total')}", kind, about


def _family(name: str) -> Family:
    return Family(*_describe(name), ("resource", "device"))


def _providers(view: View) -> Iterable[Any]:
    up = Family(
        "deviceplugin_provider_up",
        "gauge",
        "1 while a part of the agent beside the plugin tells about itself",
        ("name",),
    )
    for name in view.providers:
        up.add((name,), 1)
    for name in view.silent:
        up.add((name,), 0)
    if up.rows:
        yield up
    for report in view.providers.values():
        yield from report.families


def _single(name: str, kind: str, about: str, value: float) -> Family:
    family = Family(name, kind, about)
    family.add((), value)
    return family


# The server.


class Pages:
    """The routes of the server."""

    OPEN: Final = frozenset({"/healthz", "/readyz"})

    def __init__(self, view: Callable[[], View], collector: AgentCollector, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._collector = collector
        self._loop = loop
        self.routes: dict[str, web.Route] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/status": self._status,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }

    def _metrics(self, request: web.Request) -> web.Answer:
        content_type = exposition.negotiate(request.headers.get("accept", ""))
        return web.Answer(exposition.render(self._collector, content_type), content_type)

    def _status(self, request: web.Request) -> web.Answer:
        return web.Answer(page.status(self._view()), "application/json")

    def _page(self, request: web.Request) -> web.Answer:
        return web.Answer(page.html(self._view()), "text/html; charset=utf-8", headers=page.headers())

    def _healthz(self, request: web.Request) -> web.Answer:
        """Answer 200 if the agent's loop still turns."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return web.Answer(b"the loop has ended\n", status=503)
        if not turned.wait(LOOP_PATIENCE):
            return web.Answer(f"the loop has not turned for {LOOP_PATIENCE:g} s\n".encode(), status=503)
        return web.Answer(b"ok\n")

    def _readyz(self, request: web.Request) -> web.Answer:
        """Answer 200 if everything that the agent serves is known to the kubelet (and the API server)."""
        reasons = self._view().unready
        return web.Answer("\n".join((*reasons, "")).encode() or b"ok\n", status=503 if reasons else 200)


@contextlib.contextmanager
def serving(address: str, agent: Agent, options: Options | None = None) -> Iterator[web.Server]:
    """Serve an agent's metrics at `address` while the context lasts; to be entered in the agent's loop.

    address: host:port, [v6 address]:port, or :port for all addresses.

    Raises:
        OSError: it cannot listen there, or a certificate or token cannot be read.

    """
    options = options or Options()
    loop = asyncio.get_running_loop()
    certificate = web.Certificate(options.certificate, options.key) if options.certificate else None
    token = web.Token(options.token) if options.token else None
    observer = Observer(agent, options.period)
    pages = Pages(observer.view, AgentCollector(observer.view, dcgm=options.dcgm), loop)
    server = web.Server(web.listen(address), pages.routes, certificate=certificate, token=token, open_routes=Pages.OPEN)
    watching = loop.create_task(observer.watch(), name="observe")
    server.start()
    _LOG.info("metrics at %s://%s/metrics", "https" if certificate else "http", server.address)
    try:
        yield server
    finally:
        watching.cancel()
        server.close()
