"""What the bridge tells those who look at the agent: places of devices, claims, moves, slices.

Nothing is counted here, and nothing asked: one report puts together what the rooms count. The
text's writer is loaded with the first report, so an agent without metrics does not pay for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from deviceplugin.ledger import Side, State
from deviceplugin.report import Place, PreparedClaim, Report

if TYPE_CHECKING:
    from deviceplugin.exposition import Family
    from dra_bridge.agent import Bridge, DriverBridge

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

    def report(self) -> Report:
        """Tell what is known now."""
        drivers = list(self._bridge.drivers.values())
        return Report(
            families=[
                *_drivers(drivers),
                *_slices(self._bridge, drivers),
                *_handovers(drivers),
                *_server(self._bridge),
            ],
            status={one.name: self._status(one) for one in drivers},
            unready=list(self._unready(drivers)),
            places={key: place for one in drivers for key, place in _places(one).items()},
            claims=[claim for one in drivers for claim in _claims(one)],
        )

    def _unready(self, drivers: Iterable[DriverBridge]) -> Iterable[str]:
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

    def _status(self, one: DriverBridge) -> dict[str, object]:
        state, made = self._bridge.publisher.state(one.name), one.driver.statistics
        return {
            "registered": one.registrar.statistics.registered,
            "slices": state.slices,
            "generation": state.generation,
            "published": state.accepted >= state.wanted > 0,
            "problems": list(state.problems),
            "unsupported": sorted(map(str, state.unsupported)),
            "preparedClaims": sum(claim.driver == one.name for claim in one.desk.snapshot.claims.values()),
            "prepareFailures": dict(made.prepare_failures),
            "shares": {resource: str(handover.share) for resource, handover in list(one.handovers.items())},
            "waiting": {
                resource: dict(handover.waiting)
                for resource, handover in list(one.handovers.items())
                if handover.waiting
            },
        }


def _places(one: DriverBridge) -> dict[tuple[str, str], Place]:
    waits = {
        (resource, device): f"waits for {what}"
        for resource, handover in list(one.handovers.items())
        for device, what in dict(handover.waiting).items()
    }
    return {
        key: Place(_SIDES[record.state], record.state.value, record.since, waits.get(key) or record.reason)
        for key, record in one.desk.snapshot.devices.items()
    }


def _claims(one: DriverBridge) -> Iterable[PreparedClaim]:
    for claim in one.desk.snapshot.claims.values():
        for resource, device in sorted(claim.held):
            yield PreparedClaim(resource, device, claim.namespace, claim.name)


def _family(name: str, kind: str, about: str, *labels: str) -> Family:
    from deviceplugin.exposition import Family

    return Family(f"deviceplugin_{name}", kind, about, labels)


def _drivers(drivers: Iterable[DriverBridge]) -> Iterable[Any]:
    registered = _family(
        "dra_registered", "gauge", "1 while the kubelet has taken the DRA driver's registration", "driver"
    )
    registrations = _family(
        "dra_registrations", "counter", "Registrations of the driver that the kubelet took", "driver"
    )
    refused = _family(
        "dra_registration_failures", "counter", "Registrations of the driver that the kubelet did not take", "driver"
    )
    claims = _family("dra_prepared_claims", "gauge", "Claims prepared on this node (the ledger says it)", "driver")
    flying = _family("dra_claims_in_flight", "gauge", "Claims being prepared or unprepared now", "driver")
    again = _family("dra_prepared_again", "counter", "Prepares of claims that were prepared already", "driver")
    hooks = _family("dra_hook_seconds", "counter", "Time that the source's hooks took in claims' prepares", "driver")
    reads = _family("dra_claim_read_seconds", "counter", "Time that reading claims from the API server took", "driver")
    families = [registered, registrations, refused, claims, flying, again, hooks, reads]
    durations = {
        what: _family(f"dra_{what}_duration_seconds", "summary", f"Time to {what} a claim, failures included", "driver")
        for what in ("prepare", "unprepare")
    }
    failures = {
        what: _family(
            f"dra_{what}_failures", "counter", f"Claims that could not be {what}d, by reason", "driver", "reason"
        )
        for what in ("prepare", "unprepare")
    }
    for one in drivers:
        key, made, desk = (one.name,), one.driver.statistics, one.registrar.statistics
        registered.add(key, int(desk.registered))
        registrations.add(key, desk.registrations)
        refused.add(key, desk.failures)
        claims.add(key, sum(c.driver == one.name and c.result is not None for c in one.desk.snapshot.claims.values()))
        flying.add(key, made.in_flight)
        again.add(key, made.prepared_again)
        hooks.add(key, made.hook_seconds)
        reads.add(key, made.api_seconds)
        for what, done, seconds, failed in (
            ("prepare", made.prepared + made.prepared_again, made.prepare_seconds, made.prepare_failures),
            ("unprepare", made.unprepared, made.unprepare_seconds, made.unprepare_failures),
        ):
            durations[what].add(key, done + sum(failed.values()), "_count")
            durations[what].add(key, seconds, "_sum")
            for reason, count in sorted(failed.items()):
                failures[what].add((one.name, reason), count)
    return [*families, *durations.values(), *failures.values()]


def _slices(bridge: Bridge, drivers: Iterable[DriverBridge]) -> Iterable[Any]:
    published = _family(
        "slices_published", "gauge", "1 while the API server has the slices as they should be", "driver"
    )
    count = _family("slices", "gauge", "ResourceSlices of this node (the API server says it)", "driver")
    devices = _family("slice_devices", "gauge", "Devices in the slices of this node", "driver")
    writes = _family("slice_writes", "counter", "Writes of slices that the API server took", "driver")
    problems = _family(
        "slice_problems", "gauge", "What was left out of the slices, or keeps the API server from taking them", "driver"
    )
    for one in drivers:
        key, state = (one.name,), bridge.publisher.state(one.name)
        published.add(key, int(state.accepted >= state.wanted > 0))
        count.add(key, state.slices)
        devices.add(key, len(state.devices))
        writes.add(key, state.writes)
        problems.add(key, len(state.problems))
    return (published, count, devices, writes, problems)


def _handovers(drivers: Iterable[DriverBridge]) -> Iterable[Any]:
    begun = _family(
        "handover_begun", "counter", "Moves of devices begun, by where to (to-dra, to-plugin)", "resource", "direction"
    )
    duration = _family(
        "handover_duration_seconds", "summary", "Time from a move's begin to its commit", "resource", "direction"
    )
    for one in drivers:
        for resource, handover in list(one.handovers.items()):
            made = handover.statistics
            for way in ("to-dra", "to-plugin"):
                begun.add((resource, way), made.begun[way])
                duration.add((resource, way), made.finished[way], "_count")
                duration.add((resource, way), made.seconds[way], "_sum")
    return (begun, duration)


def _server(bridge: Bridge) -> Iterable[Any]:
    made = bridge.cluster.statistics
    requests = _family("api_requests", "counter", "Requests to the API server, by method", "method")
    for method, count in sorted(made.requests.items()):
        requests.add((method,), count)
    failures = _family("api_errors", "counter", "Requests that the API server did not answer, or with 429 or 5xx")
    failures.add((), made.failures)
    watches = _family("api_watches", "counter", "Watches opened at the API server")
    watches.add((), made.watches)
    reached = _family("api_reachable", "gauge", "1 while the API server answers")
    reached.add((), int(made.lost_since is None or time.monotonic() - made.lost_since < LOST))
    return (requests, failures, watches, reached)
