"""Reports the agent's DRA drivers for metrics and status pages: states of devices, claims, moves and slices."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from deviceplugin.device import counted
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.metrics.report import ClaimedDevice, DeviceLocation, Event, ProviderReport, ShareProgress
from deviceplugin.register.records import Claim, RegisterSnapshot, State
from dra_bridge.kube import Failing
from dra_bridge.node.resource import BridgeNode, qualifiers_of
from dra_bridge.slices import foreign

if TYPE_CHECKING:
    from dra_bridge.node.driver_runtime import DriverRuntime


MAX_SURGE: Final = "with maxSurge that one stays until this one is ready: set maxSurge to 0"
"""Advice for an update (maxSurge) in which the old agent's end and the new agent's start wait for each other."""
OUTAGE: Final = "pods that run keep their devices; no claim is prepared, and moves to the plugin side wait"
"""A text about the effect on pods while the API server cannot be reached."""
RENEW: Final = (
    "no claim is prepared, no slice is written. Replace the token or kubeconfig, whose files are read again; delete "
    "the agent's pod if its token is bound to a pod or Node that is gone"
)
"""Advice if the API server refuses the agent's credentials."""
OVERDUE: Final = (
    "it should have been renewed: for a systemd unit, see the timer dra-bridge-token and the log of its service; "
    "a pod's token is renewed by the kubelet"
)
"""Advice if the agent's token expires soon."""
APPLY: Final = "apply what `dra-bridge manifests` prints (roles, bindings and policies)"
"""Advice if the agent lacks a right at the API server."""
UNSEEN: Final = "changes by other programs are seen late, or not at all"
"""A text about the effect of a failing watch."""
NAMED: Final = 3
"""Maximum number of devices that an event lists by name. An event about more devices has only their number."""


class BridgeStatus:
    """Provides the state of the DRA drivers for the agent's status. drivers: for each driver's name, its runtime."""

    name = "dra-bridge"

    def __init__(self, node: BridgeNode, drivers: Mapping[str, DriverRuntime]) -> None:
        self._node, self._agent = node, node.agent
        self._drivers = drivers
        self._seen: RegisterSnapshot | None = None
        """The register's records at the last call of `events`."""
        self._unreachable = False

    def events(self) -> list[Event]:
        """Return an event for each move and claim that has begun or ended since the last call."""
        new_events: list[Event] = []
        now = self._agent.register.snapshot
        before = self._seen if self._seen is not None and self._seen.sequence else now
        # The records that the ledger has when it is opened cause no events.
        new_events += events(before, now, time.time())
        self._seen = now
        since = self._node.cluster.statistics.unreachable_since()
        if (since is not None) != self._unreachable:
            self._unreachable = since is not None
            text = "the API server answers again" if since is None else "the API server is unreachable"
            new_events.append(Event(since or time.time(), "", text, self._unreachable))
        return new_events

    def report(self) -> ProviderReport:
        """Return the present state of the DRA drivers."""
        # The module is imported here, because it loads the Prometheus client, which an agent without metrics does not
        # need.
        from dra_bridge.node import metrics

        drivers, listens = list(self._drivers.values()), self._kubelet_listens()
        now = self._agent.register.snapshot
        claims = list(now.claims.values())
        uids: frozenset[str] = frozenset().union(*(claim.pods for claim in claims))
        resources = [item for driver in drivers for item in list(driver.resources.items()) if not item[1].leaving]
        denied = {name: runtime.handover.denied for name, runtime in resources}
        pods = {pod.uid: pod for pod in self._agent.tracker.pods_named(uids.union(*denied.values()))}
        ends = {
            name: tuple(pods.get(uid, PodContainer(uid=uid)) for uid in holders) for name, holders in denied.items()
        }
        return ProviderReport(
            families=list(metrics.families(drivers, self._node, ends, kubelet_listens=listens)),
            status={driver.name: self._status(driver, listens) for driver in drivers},
            unready=list(self._unready(drivers)),
            locations=_locations(now, drivers),
            claims=[
                ClaimedDevice(
                    *(*key, claim.namespace, claim.name),
                    tuple(pods[uid] for uid in sorted(claim.pods)),
                    admin=key not in claim.held,
                )
                for claim in claims
                for key in sorted({(device.resource, device.device) for device in claim.devices})
            ],
            qualifiers={
                name: qualifier
                for driver in drivers
                for name, qualifier in qualifiers_of(now.settings, driver.name).items()
            },
            shares={name: share for driver in drivers for name, share in _shares(driver).items()},
            problems=[
                *self._api_problems(drivers, time.monotonic()),
                *(text for driver in drivers for text in self._others(driver.name)),
                *_ends(ends),
            ],
            node=self._node.name,
        )

    def _kubelet_listens(self) -> bool:
        """Return whether the kubelet has a ListAndWatch stream of any resource open, or has never had one.

        The end of all streams shows that the kubelet has ended. A DRA driver alone does not notice the kubelet's end.
        """
        services = list(self._agent.services.values())
        begun = any(service.registration.statistics.registrations for service in services)
        return not begun or any(service.endpoint.streams.live for service in services)

    def _unready(self, drivers: list[DriverRuntime]) -> Iterator[str]:
        for runtime in drivers:
            registration = runtime.registrar.statistics
            if not (runtime.resources or runtime.driver.records.all()):
                continue  # No resource names the driver any more, and it has no claim to unprepare.
            if not runtime.registrar.registered:
                error = f": {registration.error}" if registration.error else ""
                yield f"driver {runtime.name} is not registered with the kubelet{error}"
            now = time.monotonic()
            why = self._node.publisher.observed(runtime.name, now).unready(now)
            if why and runtime.resources and not self._waits_for_plugins(runtime):
                yield f"slices of driver {runtime.name} are not published: {why}"
        named = {service.source.driver or "" for service in list(self._agent.services.values())}
        for name in sorted(named - {"", *(driver.name for driver in drivers)}):
            yield f"driver {name} has not started: another agent may have the ledger; {MAX_SURGE}"

    def _others(self, driver: str) -> Iterator[str]:
        """Yield a sentence for each write of another program into a driver's pool."""
        state = self._node.publisher.state(driver)
        return foreign.problems(driver, state.foreign, state.recent)

    def _api_problems(self, drivers: list[DriverRuntime], now: float) -> Iterator[str]:
        """Yield sentences on problems with the API server, one for each cause. now: monotonic seconds."""
        node, statistics = self._node, self._node.cluster.statistics
        if (since := statistics.unreachable_since()) is not None:
            yield f"the API server is unreachable since {_clock(since)}: {OUTAGE}"
        if (token := statistics.token) is not None and token.overdue <= time.time() and statistics.refused is None:
            yield f"the token for the API server expires at {_clock(token.expires)}: {OVERDUE}"
        if statistics.refused is not None:
            yield f"the API server refuses the agent's credentials {_told(statistics.refused, now)}; {RENEW}"
        if node.watch.gone and node.watch.state.lapse(now) is None:
            yield f"there is no Node {node.name}: no slice can be written, and the API server removes those of before"
        for kind, watch in node.watches.items():
            lapse = watch.lapse(now)
            if lapse is None or lapse.code == 401 or (lapse.outage and statistics.lost_since is not None):
                continue  # A sentence about another watch or request already reports this problem.
            if lapse.lasts(now):
                yield f"{kind} cannot be watched {_told(lapse, now)}; {APPLY if lapse.code == 403 else UNSEEN}"
        for driver in drivers:
            failing = node.publisher.observed(driver.name, now).failing
            if failing is not None and failing.lasts(now) and not failing.outage and failing.code != 401:
                advice = f"; {APPLY}" if failing.code == 403 else ""
                yield f"the slices of driver {driver.name} cannot be written {_told(failing, now)}{advice}"
        report = node.lease.failing
        if report is not None and report.lasts(now) and not report.outage and report.code != 401:
            where = f"Lease {node.lease.namespace}/{node.name}"
            advice = f"; {APPLY}" if report.code == 403 else ""
            yield f"{where}, by which `dra-bridge status` knows devices, cannot be written {_told(report, now)}{advice}"
        if (lists := node.claims.failing) is not None and lists.lasts(now) and not lists.outage and lists.code != 401:
            advice = f"; {APPLY}" if lists.code == 403 else ""
            yield f"claims cannot be listed, so no device returns to the plugin side {_told(lists, now)}{advice}"
        if (refused := node.status_writer.refused) is not None:
            yield f"the status of node {node.name} cannot be written {_told(refused, now)}; {APPLY}"

    def _waits_for_plugins(self, driver: DriverRuntime) -> bool:
        """Return whether all of a driver's devices belong to vendors' plugins that are not connected.

        In this case, the driver has no slice to publish.
        """
        services = self._agent.services
        vendors = [services[name].vendor if name in services else None for name in list(driver.resources)]
        return all(vendor is not None and not vendor.connected for vendor in vendors)

    def _status(self, driver: DriverRuntime, kubelet_listens: bool) -> dict[str, object]:
        publisher = self._node.publisher
        state, observed = publisher.state(driver.name), publisher.observed(driver.name, time.monotonic())
        handovers = {resource: runtime.handover for resource, runtime in list(driver.resources.items())}
        return {
            "registered": driver.registrar.registered and kubelet_listens,
            "slices": observed.known and observed.known.slices,
            "generation": observed.known and observed.known.generation,
            "published": observed.published,
            "problems": [*state.problems, *self._others(driver.name)],
            "unsupported": sorted(map(str, state.unsupported)),
            "preparedClaims": len(driver.driver.records.all()),
            "prepareFailures": dict(driver.driver.statistics.prepare.failures),
            "shares": {resource: str(handover.share) for resource, handover in handovers.items()},
            "waiting": {
                resource: {device: what.text for device, what in handover.waiting.items()}
                for resource, handover in handovers.items()
                if handover.waiting
            },
        }


def _told(failing: Failing, now: float) -> str:
    """Return a part of a sentence: since when a request has failed, and why. now: monotonic seconds."""
    return f"since {_clock(time.time() - (now - failing.since))}: {failing.text}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _ends(pods: Mapping[str, Sequence[PodContainer]]) -> Iterator[str]:
    """Yield, for each resource with pods that a kubelet restart would end, a sentence on these pods."""
    for resource, ended in pods.items():
        if ended:
            names = ", ".join(f"{pod.namespace}/{pod.pod}" if pod.pod else pod.uid or "?" for pod in ended)
            why = "they have devices of the plugin side beside older pods that DRA serves by limits (kubernetes#124586)"
            yield f"{resource}: a kubelet restart would end {names}: {why}"


def _shares(driver: DriverRuntime) -> dict[str, ShareProgress]:
    progress = {}
    for resource, runtime in list(driver.resources.items()):
        if runtime.leaving:
            continue
        states = Counter(record.state for record in driver.async_ledger.snapshot.of(resource).values())
        progress[resource] = ShareProgress(
            str(runtime.handover.share),
            states.total(),
            states[State.DRA],
            states[State.TO_DRA],
            states[State.TO_PLUGIN],
        )
    return progress


def _locations(now: RegisterSnapshot, drivers: Sequence[DriverRuntime]) -> dict[tuple[str, str], DeviceLocation]:
    waits = {
        (resource, device): what.text
        for driver in drivers
        for resource, runtime in list(driver.resources.items())
        for device, what in dict(runtime.handover.waiting).items()
    }
    return {
        key: DeviceLocation(record.state, record.since, record.reason, waits.get(key, ""))
        for key, record in now.devices.items()
    }


def events(before: RegisterSnapshot, now: RegisterSnapshot, at: float) -> list[Event]:
    """Return an event for each move and claim that began or ended between two states of the register, oldest first.

    at: Unix seconds, the time of events whose own time is not recorded.
    """
    if before is now:
        return []
    return sorted((*_moves(before, now), *_claims(before, now, at)), key=lambda event: event.at)


def _moves(before: RegisterSnapshot, now: RegisterSnapshot) -> Iterator[Event]:
    together: dict[tuple[float, str, State, str], list[str]] = defaultdict(list)
    for key, record in now.devices.items():
        old = before.devices.get(key)
        if old is not None and old.state is not record.state:
            together[record.since, record.resource, record.state, record.reason].append(record.device)
    for (since, resource, state, reason), names in together.items():
        what = ", ".join(names) if len(names) <= NAMED else counted(len(names))
        text = f"{state.reached}: {what}" + (f" ({reason})" if reason else "")
        yield Event(since, resource, text, state is State.QUARANTINED)


def _claims(before: RegisterSnapshot, now: RegisterSnapshot, at: float) -> Iterator[Event]:
    for key in {**before.claims, **now.claims}:
        old, new = before.claims.get(key), now.claims.get(key)
        if new is not None and new.result is not None and (old is None or old.result is None):
            yield _claim_event(new, "prepared", at)
        elif new is None and old is not None and old.result is not None:
            yield _claim_event(old, "unprepared", at)


def _claim_event(claim: Claim, verb: str, at: float) -> Event:
    names = [device.device for device in claim.devices]
    what = ", ".join(names) if len(names) <= NAMED else counted(len(names))
    resource = claim.devices[0].resource if claim.devices else claim.driver
    return Event(at, resource, f"claim {claim.title} {verb}: {what}")
