"""What the bridge reports to metrics and status pages: states of devices, claims, moves and slices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deviceplugin.metrics.report import DeviceLocation, Event, PreparedClaim, ProviderReport, ShareProgress
from dra_bridge.ledger.records import Snapshot, State
from dra_bridge.node.events import events
from dra_bridge.node.slice_feed import qualifiers_of

if TYPE_CHECKING:
    from dra_bridge.node.bridge import Bridge
    from dra_bridge.node.driver_runtime import DriverRuntime


class BridgeStatus:
    """The bridge as a provider of the agent's status. It puts together what the parts count."""

    name = "dra-bridge"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._seen: dict[str, Snapshot] = {}
        """The ledgers as of the last call of `events`, by driver."""

    def events(self) -> list[Event]:
        """Return the moves and claims that began or ended since the last call."""
        found: list[Event] = []
        for name, one in list(self._bridge.drivers.items()):
            now = one.async_ledger.snapshot
            found += events(self._seen.get(name, now), now, time.time())
            self._seen[name] = now
        return found

    def report(self) -> ProviderReport:
        """Report what is known now."""
        from dra_bridge.node import metrics  # with the client library, which an agent without metrics does not load

        drivers = list(self._bridge.drivers.values())
        return ProviderReport(
            families=list(metrics.families(drivers, self._bridge.publisher, self._bridge.cluster)),
            status={one.name: self._status(one) for one in drivers},
            unready=list(self._unready(drivers)),
            locations={key: location for one in drivers for key, location in _locations(one).items()},
            claims=[
                PreparedClaim(resource, device, claim.namespace, claim.name)
                for one in drivers
                for claim in one.async_ledger.snapshot.claims.values()
                for resource, device in sorted(claim.held)
            ],
            qualifiers={
                name: qualifier
                for one in drivers
                for name, qualifier in qualifiers_of(one.async_ledger.snapshot).items()
            },
            shares={name: share for one in drivers for name, share in _shares(one).items()},
        )

    def _unready(self, drivers: list[DriverRuntime]) -> Iterator[str]:
        for one in drivers:
            state, registration = self._bridge.publisher.state(one.name), one.registrar.statistics
            if not registration.registered:
                error = f": {registration.error}" if registration.error else ""
                yield f"driver {one.name} is not registered with the kubelet{error}"
            if not state.accepted:
                problem = f": {state.problems[0]}" if state.problems else ""
                yield f"slices of driver {one.name} are not published{problem}"
        named = {service.source.driver or "" for service in list(self._bridge.agent.services.values())}
        for name in sorted(named - {"", *(one.name for one in drivers)}):
            yield f"driver {name} has not started: another agent may have its ledger"

    def _status(self, driver: DriverRuntime) -> dict[str, object]:
        state = self._bridge.publisher.state(driver.name)
        handovers = {resource: one.handover for resource, one in list(driver.resources.items())}
        return {
            "registered": driver.registrar.statistics.registered,
            "slices": state.slices,
            "generation": state.generation,
            "published": state.accepted >= state.wanted > 0,
            "problems": list(state.problems),
            "unsupported": sorted(map(str, state.unsupported)),
            "preparedClaims": len(driver.driver.records.all()),
            "prepareFailures": dict(driver.driver.statistics.prepare.failures),
            "shares": {resource: str(one.share) for resource, one in handovers.items()},
            "waiting": {
                resource: {device: str(what) for device, what in one.waiting.items()}
                for resource, one in handovers.items()
                if one.waiting
            },
        }


def _shares(one: DriverRuntime) -> dict[str, ShareProgress]:
    found = {}
    for resource, runtime in list(one.resources.items()):
        states = Counter(record.state for record in one.async_ledger.snapshot.of(resource).values())
        found[resource] = ShareProgress(
            str(runtime.handover.share),
            states.total(),
            states[State.DRA],
            states[State.TO_DRA],
            states[State.TO_PLUGIN],
        )
    return found


def _locations(one: DriverRuntime) -> dict[tuple[str, str], DeviceLocation]:
    waits = {
        (resource, device): f"waits for {what}"
        for resource, runtime in list(one.resources.items())
        for device, what in dict(runtime.handover.waiting).items()
    }
    return {
        key: DeviceLocation(record.state.side, record.state.value, record.since, waits.get(key) or record.reason)
        for key, record in one.async_ledger.snapshot.devices.items()
    }
