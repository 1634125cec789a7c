"""What the DRA bridge (the part of an agent that serves claims) reports to the agent's metrics and status page."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open

from deviceplugin.durations import Durations
from deviceplugin.hooks import HookStatistics
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.metrics.collectors import AgentCollector
from deviceplugin.metrics.report import ClaimedDevice, DeviceLocation
from deviceplugin.register.records import Claim, ClaimDevice, DeviceRecord, RegisterSnapshot, State
from deviceplugin.register.rules import MoveWait
from dra_bridge.driver import ClaimStatistics, registrar
from dra_bridge.driver.statistics import CallStatistics
from dra_bridge.handover.moves import MoveStatistics
from dra_bridge.handover.share import Share
from dra_bridge.kube import Failing, WatchState
from dra_bridge.kube.auth import TokenLife
from dra_bridge.kube.connection import RequestStatistics
from dra_bridge.kube.liveness import LOST
from dra_bridge.node.claim_lists import ClaimListStatistics
from dra_bridge.node.status import BridgeStatus
from dra_bridge.slices.observed import Comparison, ObservedPool
from dra_bridge.slices.publisher import PoolState
from tests.metrics.views import RESOURCE, Source, Still, resource
from tests.programs import promtool

DRIVER = "gpu.example.com"


def durations(*seconds: float) -> Durations:
    made = Durations()
    for one in seconds:
        made.add(one)
    return made


def service(*, live: bool = True, registrations: int = 1) -> Any:
    source = Source()
    source.driver = DRIVER
    return SimpleNamespace(
        source=source,
        endpoint=SimpleNamespace(streams=SimpleNamespace(live=live)),
        registration=SimpleNamespace(statistics=SimpleNamespace(registrations=registrations)),
        vendor=None,
    )


def claim(name: str, *devices: ClaimDevice, result: str | None = "{}") -> Claim:
    return Claim(DRIVER, f"uid-{name}", "team", name, devices, result, 1.0)


def status_of(made: Any) -> BridgeStatus:
    """Return the status that a bridge with these parts reports."""
    node = SimpleNamespace(
        name=made.node.name,
        agent=made.agent,
        cluster=made.cluster,
        publisher=made.publisher,
        claims=SimpleNamespace(statistics=ClaimListStatistics(durations(0.04), 3000, 2), failing=made.lists),
        watch=made.watch,
        watches={"resourceslices": made.publisher.watch, "nodes": made.watch.state},
        status_writer=made.status_writer,
        lease=SimpleNamespace(namespace="dra-bridge", failing=made.report),
    )
    return BridgeStatus(cast("Any", node), made.drivers)


def publisher(observed: ObservedPool | None = None, state: PoolState | None = None) -> Any:
    """Return what a report reads of a publisher; the publisher's watch is alive."""
    seen = observed or ObservedPool(Comparison(1, 7, frozenset({"a", "c"})), accepted=True)
    return SimpleNamespace(
        state=lambda name: state or PoolState(3, 3, 7, 1, frozenset({"a", "c"}), frozenset(), (), 9),
        observed=lambda name, now: seen,
        failures=lambda name: {403: 2},
        watch=watching(),
    )


def watching() -> WatchState:
    """Return the state of a watch that is alive."""
    state = WatchState()
    state.opened()
    return state


def failing(text: str, code: int = 0, since: float = 2 * LOST) -> Failing:
    """Return a failure that has lasted `since` seconds; without a code the API server did not answer."""
    return Failing(time.monotonic() - since, text, code, outage=not code)


def api_problems(made: Any) -> list[str]:
    """Return the reported problems, without the problem of pods that a kubelet restart would end."""
    return [problem for problem in status_of(made).report().problems if "kubelet restart" not in problem]


def bridge(**changes: Any) -> Any:
    """Return the parts of a bridge that a report reads, with the given parts in place of the usual ones."""
    records = {
        (RESOURCE, name): DeviceRecord(RESOURCE, name, state, 5.0, reason="the share is 2", driver=DRIVER)
        for name, state in (("a", State.DRA), ("b", State.TO_DRA), ("c", State.TO_PLUGIN), ("d", State.QUARANTINED))
    }
    claims = [
        claim("mine", ClaimDevice(RESOURCE, "a"), ClaimDevice(RESOURCE, "c", admin=True)),
        claim("soon", ClaimDevice(RESOURCE, "c"), result=None),
    ]
    moves = MoveStatistics()
    moves.begun["to-dra"], moves.finished["to-dra"], moves.seconds["to-dra"] = 3, 2, 1.5
    moving = SimpleNamespace(
        statistics=moves,
        waiting={"b": MoveWait("team/train", on_holder=True), "c": MoveWait("a list of claims")},
        share=Share(2),
        denied=("young",),
    )
    ledger = SimpleNamespace(
        write_failures=2, snapshot=RegisterSnapshot(1, records, {}, {(DRIVER, one.uid): one for one in claims})
    )
    one = SimpleNamespace(
        name=DRIVER,
        async_ledger=ledger,
        driver=SimpleNamespace(
            records=SimpleNamespace(all=lambda: claims),
            statistics=ClaimStatistics(
                CallStatistics(5, Counter({"side": 2}), durations(0.04, 0.06, 0.6)),
                CallStatistics(failures=Counter({"running": 1})),
                prepared_again=1,
                hooks=HookStatistics(
                    Counter({(RESOURCE, "prepare"): 4}),
                    Counter({(RESOURCE, "prepare"): 1}),
                    {(RESOURCE, "prepare"): 0.5},
                ),
                claim_reads=6,
                claim_read_seconds=0.25,
                in_flight=1,
            ),
        ),
        registrar=SimpleNamespace(
            registered=True, statistics=registrar.RegistrarStatistics(registered=True, registrations=2)
        ),
        resources={RESOURCE: SimpleNamespace(handover=moving, leaving=False)},
    )
    parts: dict[str, Any] = {
        "drivers": {DRIVER: one},
        "agent": SimpleNamespace(
            services={RESOURCE: service()},
            register=ledger,  # a report reads only its snapshot
            tracker=SimpleNamespace(
                pods_named=lambda uids: tuple(PodContainer("team", f"pod-{uid}", uid=uid) for uid in uids)
            ),
        ),
        "node": SimpleNamespace(name="n8"),
        "publisher": publisher(),
        "watch": SimpleNamespace(gone=False, state=watching()),
        "status_writer": SimpleNamespace(refused=None),
        "lists": None,
        "report": None,
        "cluster": SimpleNamespace(
            statistics=RequestStatistics(Counter({"GET": 5, "PATCH": 2}), 1, 3, token=TokenLife(0.0, 4e9))
        ),
        **changes,
    }
    return SimpleNamespace(**parts)


def values(status: BridgeStatus) -> dict[str, float]:
    return {
        f"{sample.name.removeprefix('deviceplugin_')} {' '.join(sample.labels.values())}".strip(): sample.value
        for family in status.report().families
        for sample in family.samples
    }


def test_places_are_those_of_the_ledger() -> None:
    """A device's location has its state, side (plugin or DRA), since when, why, and for which holder its move waits."""
    places = status_of(bridge()).report().locations
    assert places[RESOURCE, "a"] == DeviceLocation(State.DRA, 5.0, "the share is 2")
    assert places[RESOURCE, "b"] == DeviceLocation(State.TO_DRA, 5.0, "the share is 2", "team/train")
    assert places[RESOURCE, "c"].side == "dra"
    assert places[RESOURCE, "d"] == DeviceLocation(State.QUARANTINED, 5.0, "the share is 2")


def test_claims_hold_devices_but_administrators_do_not() -> None:
    """A claim that is being prepared counts as holder of its devices; a claim with adminAccess holds no devices."""
    claims = status_of(bridge()).report().claims
    assert [one.claim for one in claims if one.admin]
    assert {one for one in claims if not one.admin} == {
        ClaimedDevice(RESOURCE, "a", "team", "mine"),
        ClaimedDevice(RESOURCE, "c", "team", "soon"),
    }


def test_claims_have_the_pods_that_they_were_prepared_for() -> None:
    """A claim is reported with the names of the pods that use the claim."""
    made = bridge()
    ledger = made.drivers[DRIVER].async_ledger
    claims = {key: replace(one, pods=frozenset({"1"})) for key, one in ledger.snapshot.claims.items()}
    ledger.snapshot = replace(ledger.snapshot, claims=claims)
    assert {one.pods for one in status_of(made).report().claims} == {(PodContainer("team", "pod-1", uid="1"),)}


def test_an_api_server_out_of_reach_is_a_problem_and_an_event() -> None:
    """If the API server is long out of reach, this is a problem with a start time and an event; the agent stays ready.

    The return of the API server is an event, too. A short outage is neither a problem nor an event.
    """
    made = bridge()
    made.drivers[DRIVER].resources[RESOURCE].handover.denied = ()
    status, statistics = status_of(made), made.cluster.statistics
    statistics.lost_since = time.monotonic() - LOST / 2
    assert (status.report().problems, status.events()) == ([], [])
    statistics.lost_since = time.monotonic() - LOST - 10
    (problem,) = status.report().problems
    assert re.match(r"the API server is unreachable since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: ", problem)
    assert problem.endswith("pods that run keep their devices; no claim is prepared, and moves to the plugin side wait")
    assert status.report().unready == []
    assert values(status)["api_reachable"] == 0
    (event,) = status.events()
    assert (event.text, event.bad) == ("the API server is unreachable", True)
    assert abs(event.at - (time.time() - LOST - 10)) < 5
    statistics.lost_since = None
    assert [(one.text, one.bad) for one in status.events()] == [("the API server answers again", False)]
    assert status.report().problems == []


def test_credentials_that_are_refused_are_one_problem() -> None:
    """Refused credentials are one problem, with the API server's answer and a remedy.

    Watches and writes that fail for the same reason are no further problems.
    """
    refused = failing("401 Unauthorized: node UID does not match", 401, 1.0)
    made = bridge(publisher=publisher(ObservedPool(Comparison(writes=1), accepted=True, failing=refused)))
    made.cluster.statistics.refused = made.watch.state.failing = replace(refused, since=refused.since - LOST)
    made.watch.state.heard_at = None
    (problem,) = api_problems(made)
    assert problem.startswith("the API server refuses the agent's credentials since ")
    assert "401 Unauthorized: node UID does not match; no claim is prepared" in problem
    assert "Replace the token or kubeconfig" in problem
    found = values(status_of(made))
    assert (found["api_credentials_accepted"], found["api_watching nodes"]) == (0, 0)


def test_a_token_that_is_not_renewed_is_a_problem() -> None:
    """A token at 99 % of its life is a problem, and at 50 % it is none; the token's expiry is a metric."""
    made, now = bridge(), time.time()
    made.cluster.statistics.token = TokenLife(now - 50, now + 50)
    assert api_problems(made) == []
    assert values(status_of(made))["api_token_expiry_timestamp_seconds"] == now + 50
    made.cluster.statistics.token = TokenLife(now - 99, now + 1)
    (problem,) = api_problems(made)
    assert problem.startswith("the token for the API server expires at ")
    assert "the timer dra-bridge-token" in problem


def test_writes_that_are_refused_are_a_problem() -> None:
    """Refused writes of slices are a problem with a remedy once they have lasted for a while."""
    seen = ObservedPool(Comparison(writes=1), accepted=True, failing=failing("403 Forbidden: no", 403))
    (problem,) = api_problems(bridge(publisher=publisher(seen)))
    assert re.fullmatch(
        f"the slices of driver {DRIVER} cannot be written since .*: 403 Forbidden: no; apply what .*manifests.*",
        problem,
    )
    short = replace(seen, failing=failing("403 Forbidden: no", 403, LOST / 2))
    assert api_problems(bridge(publisher=publisher(short))) == []


def test_claims_that_cannot_be_listed_are_a_problem() -> None:
    """Refused lists of claims or writes of the Lease are a problem once they last; an outage is not such a problem."""
    (problem,) = api_problems(bridge(report=failing("403 Forbidden: no", 403)))
    assert problem.startswith("Lease dra-bridge/n8, by which `dra-bridge status` knows devices, cannot be written")
    (problem,) = api_problems(bridge(lists=failing("403 Forbidden: no", 403)))
    assert re.match(r"claims cannot be listed, so no device returns .*: 403 Forbidden: no; apply what", problem)
    assert api_problems(bridge(lists=failing("403 Forbidden: no", 403, LOST / 2))) == []
    assert api_problems(bridge(lists=failing("no answer"))) == []


def test_slices_that_are_not_known_have_no_figures() -> None:
    """If the API server's slices are not known, they count as not published, and their figures are missing."""
    seen = ObservedPool(Comparison(1, 7, frozenset({"a"})), accepted=True, lapse=failing("no answer"))
    status = status_of(bridge(publisher=publisher(seen)))
    found = values(status)
    assert found[f"slices_published {DRIVER}"] == 0
    assert not {f"slices {DRIVER}", f"slice_devices {DRIVER}"} & found.keys()
    shown: Any = status.report().status[DRIVER]
    assert (shown["published"], shown["slices"], shown["generation"]) == (False, None, None)


def test_a_watch_that_fails_is_a_problem() -> None:
    """A failing or silent watch of the Node is a problem; an outage and the agent's start are not."""
    made = bridge()
    made.watch.state.failing = failing("403 Forbidden: no", 403)
    (problem,) = api_problems(made)
    assert problem.startswith("nodes cannot be watched since ")
    assert values(status_of(made))["api_watching nodes"] == 0
    made.watch.state.failing = failing("no answer")
    made.cluster.statistics.lost_since = time.monotonic()
    assert api_problems(made) == []
    made.cluster.statistics.lost_since = None
    made.watch.state = WatchState()
    assert api_problems(made) == []
    assert "api_watching nodes" not in values(status_of(made))
    made.watch.state = WatchState(patience=60.0, heard_at=time.monotonic() - 90.0)
    (problem,) = api_problems(made)
    assert "the API server sends nothing" in problem


def test_a_node_that_is_gone_is_a_problem() -> None:
    """A missing Node is a problem, as slices need it as owner; so is a Node whose status may not be written."""
    made = bridge()
    made.watch.gone = True
    made.status_writer.refused = failing("403 Forbidden: no", 403, 1.0)
    gone, status = api_problems(made)
    assert gone.startswith("there is no Node n8: no slice can be written")
    assert status.startswith("the status of node n8 cannot be written since ")


@pytest.mark.parametrize(
    ("one", "registered"),
    [(service(), True), (service(live=False), False), (service(live=False, registrations=0), True)],
)
def test_a_driver_is_not_registered_with_a_kubelet_that_is_gone(one: Any, registered: bool) -> None:
    """If the plugin has registered and its streams to the kubelet have ended, the driver counts as not registered."""
    made = bridge()
    made.agent.services = {RESOURCE: one}
    status = status_of(made)
    assert values(status)[f"dra_registered {DRIVER}"] == registered
    assert status.report().status[DRIVER]["registered"] is registered  # type: ignore[index]


def test_figures_are_those_of_the_parts() -> None:
    """The metrics of claims, hooks, moves, slices and the API server have the values of the agent's parts."""
    status = status_of(bridge())
    assert status.report().node == "n8"
    found = values(status)
    assert {
        f"dra_registered {DRIVER}": 1,
        f"dra_prepared_claims {DRIVER}": 1,
        f"dra_claims_in_flight {DRIVER}": 1,
        f"dra_prepare_duration_seconds_count {DRIVER}": 3,
        f"dra_prepare_duration_seconds_bucket {DRIVER} 0.05": 1,
        f"dra_prepare_duration_seconds_bucket {DRIVER} 0.1": 2,
        f"dra_prepare_duration_seconds_bucket {DRIVER} +Inf": 3,
        f"dra_prepare_duration_seconds_sum {DRIVER}": 0.7,
        f"dra_prepare_failures_total {DRIVER} side": 2,
        f"dra_unprepare_duration_seconds_count {DRIVER}": 0,
        f"dra_hook_duration_seconds_count {DRIVER} {RESOURCE} prepare": 4,
        f"dra_hook_duration_seconds_sum {DRIVER} {RESOURCE} prepare": 0.5,
        f"dra_hook_failures_total {DRIVER} {RESOURCE} prepare": 1,
        f"dra_claim_read_duration_seconds_count {DRIVER}": 6,
        f"dra_claim_read_duration_seconds_sum {DRIVER}": 0.25,
        f"handover_begun_total {RESOURCE} to-dra": 3,
        f"handover_duration_seconds_count {RESOURCE} to-dra": 2,
        f"handover_duration_seconds_sum {RESOURCE} to-dra": 1.5,
        f"handover_waits {RESOURCE} b holder": 1,
        f"handover_waits {RESOURCE} b evidence": 0,
        f"handover_waits {RESOURCE} c holder": 0,
        f"handover_waits {RESOURCE} c evidence": 1,
        f"kubelet_restart_ends_pod {RESOURCE} team pod-young": 1,
        "dra_ledger_write_failures_total": 2,
        f"slices_published {DRIVER}": 1,
        f"slice_devices {DRIVER}": 2,
        f"slice_writes_total {DRIVER}": 9,
        f"slice_write_failures_total {DRIVER} 403": 2,
        "api_requests_total PATCH": 2,
        "api_errors_total": 1,
        "api_watches_total": 3,
        "api_reachable": 1,
        "claim_list_duration_seconds_count": 1,
        "claim_list_failures_total": 2,
        "claim_list_bytes_total": 3000,
        "api_credentials_accepted": 1,
        "api_token_expiry_timestamp_seconds": 4e9,
        "api_watching resourceslices": 1,
        "api_watching nodes": 1,
    }.items() <= found.items()
    assert not any(name.startswith(f"handover_waits {RESOURCE} a") for name in found)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"publisher": publisher(ObservedPool(Comparison(), accepted=False))},
            "slices of driver .* not published: they were not written yet",
        ),
        (
            {"publisher": publisher(ObservedPool(Comparison(), accepted=False, failing=failing("forbidden", 403, 0)))},
            "not published: forbidden",
        ),
        (
            {"publisher": publisher(ObservedPool(Comparison(writes=2), accepted=True, failing=failing("no", 403)))},
            "not published: 2 are missing, or not as wanted: no",
        ),
        (
            {"publisher": publisher(ObservedPool(Comparison(), accepted=True, lapse=failing("no", 401)))},
            "not published: it is not known which ones the API server has: no",
        ),
        ({"drivers": {}}, "another agent may have the ledger; with maxSurge that one stays until this one is ready"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, Any], why: str) -> None:
    """Slices that are not published, or a ledger that another agent has, make the agent unready, with a reason."""
    (reason,) = status_of(bridge(**changes)).report().unready
    assert re.search(why, reason)


def test_a_driver_that_is_not_registered_is_said_while_it_has_something_to_do() -> None:
    """A driver that is not registered makes the agent unready, with the reason.

    A former config's driver does so only while it has claims to unprepare.
    """
    made = bridge()
    one = made.drivers[DRIVER]
    one.registrar = SimpleNamespace(registered=False, statistics=registrar.RegistrarStatistics(error="not mounted"))
    unready = [f"driver {DRIVER} is not registered with the kubelet: not mounted"]
    assert status_of(made).report().unready == unready
    one.resources = {}
    assert status_of(made).report().unready == unready
    one.driver.records.all = list
    assert status_of(made).report().unready == []


def test_pods_that_a_kubelet_restart_would_end_are_a_problem() -> None:
    """Pods that a kubelet restart would end are a problem that names them; without such pods there is none."""
    made = bridge()
    (problem,) = status_of(made).report().problems
    assert problem.startswith(
        f"{RESOURCE}: a kubelet restart would end team/pod-young: they have devices of the plugin"
    )
    made.drivers[DRIVER].resources[RESOURCE].handover.denied = ()
    assert status_of(made).report().problems == []


def test_status_is_made_for_json() -> None:
    """The agent's status can be written as JSON: why moves wait, how many devices claims get, published slices."""
    status = json.loads(json.dumps(status_of(bridge()).report().status))
    assert status[DRIVER]["waiting"] == {RESOURCE: {"b": "team/train", "c": "a list of claims"}}
    assert status[DRIVER]["shares"] == {RESOURCE: "2"}
    assert status[DRIVER]["published"] is True


@promtool
def test_promtool_finds_nothing_wrong() -> None:
    """`promtool check metrics` finds nothing wrong in the agent's metrics."""
    still = Still(resource("a", "b", "c", "d"))
    still.providers.append(status_of(bridge()))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(still.observer().view))
    text = generate_latest(registry)
    assert b"deviceplugin_dra_hook_duration_seconds_sum" in text
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_all_of_it_is_valid_text() -> None:
    """The bridge's and the agent's metrics together are valid OpenMetrics text."""
    still = Still(resource("a", "b", "c", "d"))
    still.providers.append(status_of(bridge()))
    text = generate_open(AgentCollector(still.observer().view)).decode()  # type: ignore[no-untyped-call]
    names = {family.name for family in read_open(text)}  # type: ignore[no-untyped-call]
    assert {"deviceplugin_dra_prepare_duration_seconds", "deviceplugin_slice_writes"} <= names
    assert 'deviceplugin_devices{health="healthy",resource="example.com/gpu",side="dra",state="to-plugin"} 1' in text
