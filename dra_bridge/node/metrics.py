"""Makes the Prometheus metric families about an agent's DRA drivers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.metrics.collectors import buckets
from deviceplugin.register.records import State
from dra_bridge.slices.foreign import ForeignKind
from dra_bridge.slices.publisher import Publisher

if TYPE_CHECKING:
    from dra_bridge.node.claim_lists import ClaimListStatistics
    from dra_bridge.node.driver_runtime import DriverRuntime
    from dra_bridge.node.resource import BridgeNode

_GAUGES: Final = {
    "dra_registered": "1 while the DRA driver is registered with a kubelet that follows a list of devices",
    "dra_prepared_claims": "Claims prepared on this node (from the ledger)",
    "dra_claims_in_flight": "Claims that are being prepared or unprepared",
    "slices_published": "1 while the slices that the API server has are known, and are those that the agent wants",
    "slices": "ResourceSlices of this node that the API server has; absent while that is not known",
    "slice_devices": "Devices in the slices of this node; absent while they are not known",
    "slices_foreign": "ResourceSlices of others that are in the driver's pool of this node",
    "slice_problems": "Devices left out of the slices, and why the last write of them was refused",
}
_COUNTERS: Final = {
    "dra_registrations": "Registrations of the driver that the kubelet accepted",
    "dra_registration_failures": "Registrations of the driver that the kubelet refused, or that had no socket",
    "dra_prepared_again": "Prepares of claims that were prepared already",
    "slice_writes": "Writes of slices that the API server accepted",
}


def families(
    drivers: Sequence[DriverRuntime],
    node: BridgeNode,
    ends: Mapping[str, Sequence[PodContainer]],
    *,
    kubelet_listens: bool,
) -> Iterator[Metric]:
    """Yield all metric families about DRA. ends: for each resource, the pods that a kubelet restart would end."""
    now = time.monotonic()
    figures = {driver.name: _figures(driver, node.publisher, now, kubelet_listens) for driver in drivers}
    for family, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, about in names.items():
            made = family(f"deviceplugin_{name}", about, labels=("driver",))
            for driver, values in figures.items():
                if (value := values[name]) is not None:
                    made.add_metric((driver,), value)
            yield made
    about = "Tries to write slices that failed, by the HTTP status of the answer (0: there was none)"
    failed = CounterMetricFamily("deviceplugin_slice_write_failures", about, labels=("driver", "code"))
    for driver in figures:
        for code, count in sorted(node.publisher.failures(driver).items()):
            failed.add_metric((driver, str(code)), count)
    yield failed
    about = "Times that the ledger could not record something; nothing was granted then"
    # All drivers use the same ledger, so the first driver's count is enough.
    failures = drivers[0].async_ledger.write_failures if drivers else 0
    yield CounterMetricFamily("deviceplugin_dra_ledger_write_failures", about, value=failures)
    about = "Writes of others into the driver's pool of this node that were undone, by kind"
    undone = CounterMetricFamily("deviceplugin_slice_foreign_writes", about, labels=("driver", "kind"))
    for runtime in drivers:
        overcome = node.publisher.state(runtime.name).overcome
        for kind in ForeignKind:
            undone.add_metric((runtime.name, kind.value), overcome.get(kind, 0))
    yield undone
    yield from _calls(drivers)
    yield from _hooks(drivers)
    yield from _moves(drivers)
    about = "1 for a pod by limits of the plugin side that a kubelet restart would end now (kubernetes#124586)"
    ended = GaugeMetricFamily("deviceplugin_kubelet_restart_ends_pod", about, labels=("resource", "namespace", "pod"))
    for resource, pods in ends.items():
        for pod in pods:
            ended.add_metric((resource, pod.namespace, pod.pod or pod.uid), 1)
    if ended.samples:
        yield ended
    yield from _requests(node, now)
    yield from _lists(node.claims.statistics)


def _figures(
    runtime: DriverRuntime, publisher: Publisher, now: float, kubelet_listens: bool
) -> Mapping[str, float | None]:
    state, observed = publisher.state(runtime.name), publisher.observed(runtime.name, now)
    known = observed.known
    statistics, registration = runtime.driver.statistics, runtime.registrar.statistics
    return {
        "dra_registered": runtime.registrar.registered and kubelet_listens,
        "dra_registrations": registration.registrations,
        "dra_registration_failures": registration.failures,
        "dra_prepared_claims": sum(claim.result is not None for claim in runtime.driver.records.all()),
        "dra_claims_in_flight": statistics.in_flight,
        "dra_prepared_again": statistics.prepared_again,
        "slices_published": observed.published,
        "slices": known.slices if known is not None else None,
        "slices_foreign": sum(one.kind is not ForeignKind.POOL for one in state.foreign),
        "slice_devices": len(known.devices) if known is not None else None,
        "slice_writes": state.writes,
        "slice_problems": len(state.problems),
    }


def _calls(drivers: Sequence[DriverRuntime]) -> Iterator[Metric]:
    for verb in ("prepare", "unprepare"):
        prefix = f"deviceplugin_dra_{verb}"
        about = f"Time to {verb} a claim, failures included" + (", waits not" if verb == "prepare" else "")
        duration = HistogramMetricFamily(f"{prefix}_duration_seconds", about, labels=("driver",))
        about = f"Claims that could not be {verb}d, by reason"
        failed = CounterMetricFamily(f"{prefix}_failures", about, labels=("driver", "reason"))
        for runtime in drivers:
            statistics = runtime.driver.statistics
            calls = statistics.prepare if verb == "prepare" else statistics.unprepare
            failures = dict(calls.failures)
            duration.add_metric((runtime.name,), *buckets(calls.durations))
            for reason, count in sorted(failures.items()):
                failed.add_metric((runtime.name, reason), count)
        yield from (duration, failed)
    about = "Time that claims waited in Prepare for holders that were about to end, or for a move, also in vain"
    waits = HistogramMetricFamily("deviceplugin_dra_prepare_wait_seconds", about, labels=("driver",))
    for runtime in drivers:
        waits.add_metric((runtime.name,), *buckets(runtime.driver.statistics.waits))
    yield waits


def _hooks(drivers: Sequence[DriverRuntime]) -> Iterator[Metric]:
    """Yield the families `hook_*` for claims. Unlike the families for pods, they have the label `driver`."""
    labels = ("driver", "resource", "hook")
    about = "Time that the source's hooks took for claims, by hook"
    duration = SummaryMetricFamily("deviceplugin_dra_hook_duration_seconds", about, labels=labels)
    about = "Calls of the source's hooks for claims that failed or timed out"
    failed = CounterMetricFamily("deviceplugin_dra_hook_failures", about, labels=labels)
    about = "Time that reads of claims from the API server took"
    reads = SummaryMetricFamily("deviceplugin_dra_claim_read_duration_seconds", about, labels=("driver",))
    for runtime in drivers:
        statistics = runtime.driver.statistics
        for key, calls in sorted(statistics.hooks.calls.copy().items()):
            duration.add_metric((runtime.name, *key), calls, statistics.hooks.seconds.get(key, 0.0))
            failed.add_metric((runtime.name, *key), statistics.hooks.failures[key])
        reads.add_metric((runtime.name,), statistics.claim_reads, statistics.claim_read_seconds)
    yield from (duration, failed, reads)


def _moves(drivers: Sequence[DriverRuntime]) -> Iterator[Metric]:
    labels = ("resource", "direction")
    begun = CounterMetricFamily("deviceplugin_handover_begun", "Moves of devices begun, by direction", labels=labels)
    about = "Time from the begin of a move to its commit"
    duration = SummaryMetricFamily("deviceplugin_handover_duration_seconds", about, labels=labels)
    for resource, runtime in [
        item for driver in drivers for item in list(driver.resources.items()) if not item[1].leaving
    ]:
        statistics = runtime.handover.statistics
        for way in ("to-dra", "to-plugin"):
            begun.add_metric((resource, way), statistics.begun[way])
            duration.add_metric((resource, way), statistics.finished[way], statistics.seconds[way])
    yield from (begun, duration)
    about = "1 for what the move of a device waits for: a holder (pod or claim), which may run for long, or evidence"
    waits = GaugeMetricFamily("deviceplugin_handover_waits", about, labels=("resource", "device", "for"))
    for driver in drivers:
        resources = driver.resources.copy()
        for (resource, device), record in driver.async_ledger.snapshot.devices.items():
            if record.state in (State.TO_DRA, State.TO_PLUGIN) and record.driver == driver.name:
                what = resources[resource].handover.waiting.get(device) if resource in resources else None
                holder = what is not None and what.on_holder
                waits.add_metric((resource, device, "holder"), holder)
                waits.add_metric((resource, device, "evidence"), not holder)
    if waits.samples:
        yield waits


def _requests(node: BridgeNode, now: float) -> Iterator[Metric]:
    made, about = node.cluster.statistics, "Requests to the API server, by method"
    requests = CounterMetricFamily("deviceplugin_api_requests", about, labels=("method",))
    for method, count in sorted(made.requests.items()):
        requests.add_metric((method,), count)
    yield requests
    about = "Requests to the API server without an answer, or answered with 429 or 5xx"
    yield CounterMetricFamily("deviceplugin_api_errors", about, value=made.failures)
    yield CounterMetricFamily("deviceplugin_api_watches", "Watches opened at the API server", value=made.watches)
    about, reached = "1 while the API server answers; 0 after half a minute without", made.unreachable_since() is None
    yield GaugeMetricFamily("deviceplugin_api_reachable", about, value=int(reached))
    about = "1 while the API server takes the agent's credentials, 0 while it refuses them (401)"
    yield GaugeMetricFamily("deviceplugin_api_credentials_accepted", about, value=int(made.refused is None))
    if made.token is not None:
        about = "When the token of the agent expires (Unix seconds); with a request, a newer one is read once a minute"
        yield GaugeMetricFamily("deviceplugin_api_token_expiry_timestamp_seconds", about, value=made.token.expires)
    about = "1 while the watch is known to be alive, 0 if the API server refuses it, does not answer or sends nothing"
    watching = GaugeMetricFamily("deviceplugin_api_watching", about, labels=("kind",))
    for kind, watch in node.watches.items():
        if watch.begun:
            watching.add_metric((kind,), int(watch.lapse(now) is None))
    yield watching


def _lists(made: ClaimListStatistics) -> Iterator[Metric]:
    about = "Time that lists of all claims took, those that failed included"
    duration = HistogramMetricFamily("deviceplugin_claim_list_duration_seconds", about, labels=())
    duration.add_metric((), *buckets(made.durations))
    yield duration
    about = "Lists of all claims that failed; devices on their way to the plugin side wait for the next"
    yield CounterMetricFamily("deviceplugin_claim_list_failures", about, value=made.failures)
    about = "Bytes of all claims of the cluster, as they came in lists"
    yield CounterMetricFamily("deviceplugin_claim_list_bytes", about, value=made.bytes)
