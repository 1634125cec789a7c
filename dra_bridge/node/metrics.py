"""What the bridge tells those who look at the agent: places of devices, claims, moves, slices.

Nothing is counted here, and nothing asked: one report puts together what the parts count. The
client library is loaded with the first report, so an agent without metrics does not pay for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from deviceplugin.metrics.report import DeviceLocation, PreparedClaim, ProviderReport
from dra_bridge.ledger import Side, State

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

    from dra_bridge.node.bridge import Bridge
    from dra_bridge.node.driver_runtime import DriverRuntime

__all__ = ["Told"]

LOST: Final = 30.0
"""Seconds without an answer after which the API server counts as out of reach."""
_SIDES: Final[Mapping[State, str]] = {
    State.PLUGIN: Side.PLUGIN.value,
    State.TO_DRA: Side.PLUGIN.value,
    State.DRA: Side.DRA.value,
    State.TO_PLUGIN: Side.DRA.value,
    State.QUARANTINED: "none",
}


class Told:
    """The bridge as a provider of the agent's status."""

    name = "dra-bridge"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def report(self) -> ProviderReport:
        """Tell what is known now."""
        drivers = list(self._bridge.drivers.values())
        return ProviderReport(
            families=[
                *_drivers(drivers),
                *_slices(self._bridge, drivers),
                *_handovers(drivers),
                *_server(self._bridge),
            ],
            status={one.name: self._status(one) for one in drivers},
            unready=list(self._unready(drivers)),
            locations={key: location for one in drivers for key, location in _locations(one).items()},
            claims=[claim for one in drivers for claim in _claims(one)],
            qualifiers={name: word for one in drivers for name, word in one.qualifiers.items()},
        )

    def _unready(self, drivers: Iterable[DriverRuntime]) -> Iterable[str]:
        waited_for = {
            service.source.driver for service in list(self._bridge.agent.services.values()) if service.source.driver
        }
        for one in drivers:
            waited_for.discard(one.name)
            state = self._bridge.publisher.state(one.name)
            if not one.registrar.statistics.registered:
                error = one.registrar.statistics.error
                yield f"driver {one.name} is not registered with the kubelet" + (f": {error}" if error else "")
            if not state.accepted:
                problem = f": {state.problems[0]}" if state.problems else ""
                yield f"slices of driver {one.name} are not published{problem}"
        for name in sorted(waited_for):
            yield f"driver {name} has not started: another agent may have its ledger"

    def _status(self, one: DriverRuntime) -> dict[str, object]:
        state, made = self._bridge.publisher.state(one.name), one.driver.statistics
        return {
            "registered": one.registrar.statistics.registered,
            "slices": state.slices,
            "generation": state.generation,
            "published": state.accepted >= state.wanted > 0,
            "problems": list(state.problems),
            "unsupported": sorted(map(str, state.unsupported)),
            "preparedClaims": sum(claim.driver == one.name for claim in one.async_ledger.snapshot.claims.values()),
            "prepareFailures": dict(made.prepare_failures),
            "shares": {resource: str(handover.share) for resource, handover in list(one.handovers.items())},
            "waiting": {
                resource: dict(handover.waiting)
                for resource, handover in list(one.handovers.items())
                if handover.waiting
            },
        }


def _locations(one: DriverRuntime) -> dict[tuple[str, str], DeviceLocation]:
    waits = {
        (resource, device): f"waits for {what}"
        for resource, handover in list(one.handovers.items())
        for device, what in dict(handover.waiting).items()
    }
    return {
        key: DeviceLocation(_SIDES[record.state], record.state.value, record.since, waits.get(key) or record.reason)
        for key, record in one.async_ledger.snapshot.devices.items()
    }


def _claims(one: DriverRuntime) -> Iterable[PreparedClaim]:
    for claim in one.async_ledger.snapshot.claims.values():
        for resource, device in sorted(claim.held):
            yield PreparedClaim(resource, device, claim.namespace, claim.name)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    from prometheus_client.metrics_core import GaugeMetricFamily

    return GaugeMetricFamily(f"deviceplugin_{name}", about, labels=labels)


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    from prometheus_client.metrics_core import CounterMetricFamily

    return CounterMetricFamily(f"deviceplugin_{name}", about, labels=labels)


def _summary(name: str, about: str, *labels: str) -> SummaryMetricFamily:
    from prometheus_client.metrics_core import SummaryMetricFamily

    return SummaryMetricFamily(f"deviceplugin_{name}", about, labels=labels)


def _drivers(drivers: Iterable[DriverRuntime]) -> Iterable[Metric]:
    registered = _gauge("dra_registered", "1 while the DRA driver is registered with the kubelet", "driver")
    registrations = _counter("dra_registrations", "Registrations of the driver that the kubelet accepted", "driver")
    refused = _counter(
        "dra_registration_failures", "Registrations of the driver that the kubelet did not accept", "driver"
    )
    claims = _gauge("dra_prepared_claims", "Claims prepared on this node (from the ledger)", "driver")
    flying = _gauge("dra_claims_in_flight", "Claims that are being prepared or unprepared", "driver")
    again = _counter("dra_prepared_again", "Prepares of claims that were prepared already", "driver")
    hooks = _counter("dra_hook_seconds", "Time that the source's hooks took while claims were prepared", "driver")
    reads = _counter("dra_claim_read_seconds", "Time that reads of claims from the API server took", "driver")
    families = [registered, registrations, refused, claims, flying, again, hooks, reads]
    durations = {
        what: _summary(f"dra_{what}_duration_seconds", f"Time to {what} a claim, failures included", "driver")
        for what in ("prepare", "unprepare")
    }
    failures = {
        what: _counter(f"dra_{what}_failures", f"Claims that could not be {what}d, by reason", "driver", "reason")
        for what in ("prepare", "unprepare")
    }
    for one in drivers:
        key, made, registration = (one.name,), one.driver.statistics, one.registrar.statistics
        prepared = sum(c.driver == one.name and c.result is not None for c in one.async_ledger.snapshot.claims.values())
        registered.add_metric(key, int(registration.registered))
        registrations.add_metric(key, registration.registrations)
        refused.add_metric(key, registration.failures)
        claims.add_metric(key, prepared)
        flying.add_metric(key, made.in_flight)
        again.add_metric(key, made.prepared_again)
        hooks.add_metric(key, made.hook_seconds)
        reads.add_metric(key, made.api_seconds)
        for what, done, seconds, failed in (
            ("prepare", made.prepared + made.prepared_again, made.prepare_seconds, made.prepare_failures),
            ("unprepare", made.unprepared, made.unprepare_seconds, made.unprepare_failures),
        ):
            durations[what].add_metric(key, done + sum(failed.values()), seconds)
            for reason, count in sorted(failed.items()):
                failures[what].add_metric((one.name, reason), count)
    return [*families, *durations.values(), *failures.values()]


def _slices(bridge: Bridge, drivers: Iterable[DriverRuntime]) -> Iterable[Metric]:
    published = _gauge("slices_published", "1 while the slices at the API server are as wanted", "driver")
    slices = _gauge("slices", "ResourceSlices of this node (from the API server)", "driver")
    devices = _gauge("slice_devices", "Devices in the slices of this node", "driver")
    writes = _counter("slice_writes", "Writes of slices that the API server accepted", "driver")
    problems = _gauge(
        "slice_problems", "Devices left out of the slices, and reasons why the API server rejects them", "driver"
    )
    for one in drivers:
        key, state = (one.name,), bridge.publisher.state(one.name)
        published.add_metric(key, int(state.accepted >= state.wanted > 0))
        slices.add_metric(key, state.slices)
        devices.add_metric(key, len(state.devices))
        writes.add_metric(key, state.writes)
        problems.add_metric(key, len(state.problems))
    return (published, slices, devices, writes, problems)


def _handovers(drivers: Iterable[DriverRuntime]) -> Iterable[Metric]:
    begun = _counter("handover_begun", "Moves of devices begun, by direction", "resource", "direction")
    duration = _summary(
        "handover_duration_seconds", "Time from the begin of a move to its commit", "resource", "direction"
    )
    for one in drivers:
        for resource, handover in list(one.handovers.items()):
            made = handover.statistics
            for way in ("to-dra", "to-plugin"):
                begun.add_metric((resource, way), made.begun[way])
                duration.add_metric((resource, way), made.finished[way], made.seconds[way])
    return (begun, duration)


def _server(bridge: Bridge) -> Iterable[Metric]:
    made = bridge.cluster.statistics
    requests = _counter("api_requests", "Requests to the API server, by method", "method")
    for method, count in sorted(made.requests.items()):
        requests.add_metric((method,), count)
    failures = _counter("api_errors", "Requests to the API server without an answer, or answered with 429 or 5xx")
    failures.add_metric((), made.failures)
    watches = _counter("api_watches", "Watches opened at the API server")
    watches.add_metric((), made.watches)
    reached = _gauge("api_reachable", "1 while the API server answers")
    reached.add_metric((), int(made.lost_since is None or time.monotonic() - made.lost_since < LOST))
    return (requests, failures, watches, reached)
