"""Metrics of a running agent, from the kubelet's checkpoint to the text that Prometheus reads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

import deviceplugin
import dra_bridge
from deviceplugin import config
from deviceplugin.config import MetricsConfig
from deviceplugin.device import Device, Health
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.status import Withheld
from deviceplugin.metrics import collectors as metrics
from deviceplugin.metrics import load, web
from deviceplugin.metrics.collectors import AgentCollector
from deviceplugin.metrics.report import ClaimedDevice, DeviceLocation, ProviderReport
from deviceplugin.metrics.views import AgentView, DeviceHolder
from deviceplugin.node.agent import Agent
from deviceplugin.node.process import Program, serve
from deviceplugin.register.records import State
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.testing.plugin import Served
from deviceplugin.unwatched import Unwatched, UnwatchedCause, WatchFailure
from deviceplugin.version import VERSION
from tests.metrics.test_web import get, make_certificate
from tests.metrics.views import RESOURCE, Still, resource
from tests.programs import promtool, running
from tests.waits import wait

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Gpus(DeviceSource):
    resource = RESOURCE

    def __init__(self, count: int = 4, replicas: int = 1) -> None:
        self.count = count
        self.replicas = replicas
        self.measured: Callable[[Sequence[Device]], Measured] = lambda devices: {
            device.id: {"utilization_ratio": 0.5, "power_watts": None} for device in devices
        }

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(f"gpu-{number}") for number in range(self.count)]

    def measure(self, devices: Sequence[Device]) -> Measured:
        return self.measured(devices)


class Chips(DeviceSource):
    """Two devices whose hardware (identity) is the same whatever the resource's name is."""

    def __init__(self, name: str = RESOURCE) -> None:
        self.resource = name

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(name, identity=f"uuid:{name}") for name in ("c0", "c1")]


class Seen:
    """The web server of an agent, and its answers."""

    def __init__(self, server: web.Server) -> None:
        self.server = server

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        status, answer, _ = get(self.server, path, None, "GET", **headers)
        return status, answer.decode()

    def metrics(self) -> Samples:
        status, text = self.get("/metrics")
        assert status == 200, text
        return {
            (sample.name.removeprefix("deviceplugin_"), frozenset(sample.labels.items())): sample.value
            for family in read_plain(text)
            for sample in family.samples
        }

    def value(self, metric: str, /, **labels: str) -> float | None:
        """The one series with these labels, or None."""
        found = [
            value
            for (one, has), value in self.metrics().items()
            if one == metric and labels.items() <= dict(has).items()
        ]
        assert len(found) <= 1, f"{metric} {labels}: {found}"
        return found[0] if found else None

    def events(self) -> list[str]:
        """The events in /status."""
        return [event["text"] for event in json.loads(self.get("/status")[1])["events"]]

    def holders(self) -> set[tuple[str, str, str, str]]:
        """Device, namespace, pod and container of each holder."""
        return {
            (labels["device"], labels["namespace"], labels["pod"], labels["container"])
            for (name, has), value in self.metrics().items()
            if name == "allocation_info" and value == 1 and (labels := dict(has))
        }

    def wait(self, condition: Callable[[], object], timeout: float = 15.0) -> None:
        """Wait until a condition is true; print the metrics if it never is."""
        wait(condition, lambda: self.get("/metrics")[1], timeout)


def scraped(command: Sequence[str], certificate: Path | None) -> bytes:
    """Run an agent; return its metrics once it has devices. certificate: if given, use TLS and a token."""
    with running(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        found = (re.search(r"metrics at \w+://(\S+/metrics)", line) for line in process.stderr)
        page = next(one[1] for one in found if one)
        request = urllib.request.Request(f"{'https' if certificate else 'http'}://{page}")
        tls = ssl.create_default_context(cafile=certificate) if certificate else None
        if certificate:
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(request, timeout=10, context=tls)
            refused.value.close()
            request.add_header("Authorization", "Bearer s3cret")
        answer, deadline = b"", time.monotonic() + 15.0
        while b"deviceplugin_devices{" not in answer:
            assert time.monotonic() < deadline, answer
            with urllib.request.urlopen(request, timeout=10, context=tls) as read:
                answer = read.read()
        process.terminate()
    return answer


def samples(view: AgentView, name: str = "") -> list[Any]:
    """Return the samples of a view, of one metric or of all."""
    families = AgentCollector(lambda: view).collect()
    return [one for family in families for one in family.samples if name in ("", one.name)]


def placed(view: AgentView) -> AgentView:
    """Return a view of one device, after the device has moved to claims at the time 1.7e9."""
    (one,) = view.resources
    (seen,) = one.devices
    return replace(view, resources=(replace(one, devices=(replace(seen, location=DeviceLocation(State.DRA, 1.7e9)),)),))


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self._entered: list[contextlib.AbstractContextManager[Any]] = []

    def serving(self, agent: Agent, options: MetricsConfig | None = None, loop: Any = None) -> Seen:
        async def enter() -> web.Server:
            context = metrics.serving("127.0.0.1:0", agent, options)
            self._entered.append(context)
            return context.__enter__()

        return Seen(asyncio.run_coroutine_threadsafe(enter(), loop or self.loop).result(10))

    def close(self) -> None:
        async def leave() -> None:
            for context in self._entered:
                context.__exit__(None, None, None)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(leave(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(autouse=True)
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the reuse of answers: the server renders an answer for each request."""
    monkeypatch.setattr(web, "LIFETIME", 0.0)
    monkeypatch.setattr(web, "LIFETIME_FACTOR", 0)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with contextlib.closing(Loop()) as running:
        yield running


@pytest.fixture
def watched(
    fake_kubelet: FakeKubelet, served: Callable[..., Served], loop: Loop
) -> Callable[..., tuple[FakeKubelet, Seen]]:
    """Run an agent against the fake kubelet and serve its metrics."""

    def start(*sources: DeviceSource, **options: Any) -> tuple[FakeKubelet, Seen]:
        agent = served(*sources, report_holders=True, period=0.1).agent
        # The kubelet knows the resource before the agent has read the answer to Register.
        wait(lambda: all(one.registered for one in agent.status().resources), "the agent is registered")
        # The metrics are served in the agent's own loop, since /healthz tests that loop.
        assert agent.loop is not None
        return fake_kubelet, loop.serving(agent, MetricsConfig(**options), agent.loop)

    return start


class TestRunningAgent:
    """Metrics of an agent that runs against the fake kubelet."""

    def test_resource_is_shown(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """Devices, registration and lists are in the metrics as soon as the kubelet knows the resource."""
        kubelet, seen = watched(Gpus())
        assert seen.value("devices", health="healthy", side="plugin", state="plugin") == 4
        assert seen.value("devices", health="unhealthy") == 0
        assert seen.value("registered", resource=RESOURCE) == 1
        assert seen.value("kubelet_listening") == 1
        assert seen.value("registrations_total") == 1
        assert seen.value("device_health", device="gpu-2", health="healthy") == 1
        assert seen.get("/readyz") == (200, "ok\n")
        assert seen.get("/healthz") == (200, "ok\n")
        assert "<title>Devices of" in seen.get("/")[1]
        kubelet.restart()
        seen.wait(lambda: seen.value("kubelet_restarts_total") == 1)

    def test_build_and_process_are_shown(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """Version, start time and memory of the process are in the metrics."""
        _, seen = watched(Gpus())
        python = ".".join(map(str, sys.version_info[:3]))
        assert seen.value("build_info", version=VERSION, python=python) == 1
        assert (seen.value("process_resident_memory_bytes") or 0) > 2**20
        assert time.time() - (seen.value("process_start_time_seconds") or 0) < 86_400 * 30
        assert (seen.value("process_open_fds") or 0) > 3

    def test_withheld_devices_are_counted_by_reason(self) -> None:
        """Withheld devices are counted by reason."""
        withheld = {"a": Withheld("unknown", "no claim state"), "b": Withheld("held", "a process runs")}
        view = Still(replace(resource("a", "b", "c"), withheld=withheld)).observer().view()
        withheld_now = samples(view, "deviceplugin_devices_withheld")
        assert {sample.labels["reason"]: sample.value for sample in withheld_now} == {
            "excluded": 0,
            "foreign": 0,
            "held": 1,
            "unknown": 1,
            "unreleased": 0,
        }

    def test_directories_without_file_events_are_counted_by_reason(self) -> None:
        """Directories that cannot be watched for file events are counted by cause, with a series for each cause."""
        still = Still(resource("a"))
        still.unwatched = (Unwatched(WatchFailure(UnwatchedCause.INSTANCES), ("/dev", "/sys")),)
        found = samples(still.observer().view(), "deviceplugin_unwatched_directories")
        counted = {sample.labels["reason"]: sample.value for sample in found}
        assert counted == {"instances": 2, "watches": 0, "files": 0, "silent": 0, "error": 0}

    def test_points_in_time_are_named_so(self) -> None:
        """A metric with Unix seconds ends with `_timestamp_seconds`."""
        view = placed(Still(resource("a")).observer().view())
        times = {sample.name for sample in samples(view) if sample.value > 1e9}
        assert times == {"deviceplugin_device_state_since_timestamp_seconds"}

    def test_holders_come_and_go(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """Each holder is a series of value 1 while it holds the device; other series do not change."""
        kubelet, seen = watched(Gpus())
        series = {key for key in seen.metrics() if "allocation_info" not in key[0]}
        pod = kubelet.run_pod("train", {RESOURCE: 2}, namespace="team")
        wanted = {(device, "team", "train", "main") for device in pod.device_ids}
        seen.wait(lambda: seen.holders() == wanted)
        assert seen.value("device_holders", device=pod.device_ids[0]) == 1
        assert seen.value("allocations_total") == 1
        assert seen.value("allocated_devices_total") == 2
        assert seen.value("allocation_duration_seconds_count") == 1
        assert seen.value("allocation_duration_seconds_bucket", le="+Inf") == 1
        assert 0 < (seen.value("allocation_duration_seconds_sum") or 0) < 5
        now = {key for key in seen.metrics() if "allocation_info" not in key[0]}
        assert {key for key in now if key[0].startswith("device_")} >= {
            key for key in series if key[0].startswith("device_")
        }
        assert "train" not in str(now)
        pod.delete()
        seen.wait(lambda: not seen.holders())
        assert seen.value("kubelet_double_allocations_total") == 0

    @pytest.mark.parametrize("way", ["reload", "restart"])
    def test_holders_by_a_former_resource_stay_visible(
        self, fake_kubelet: FakeKubelet, served: Callable[..., Served], loop: Loop, way: str
    ) -> None:
        """A resource is renamed while a pod has its device: metrics and /status name the pod until it ends."""
        before, other = served(Chips(), report_holders=True, period=0.1), "example.com/chip"
        fake_kubelet.wait_allocatable(RESOURCE, 2)
        pod = fake_kubelet.run_pod("train", {RESOURCE: 1}, namespace="team")
        (device,) = pod.device_ids
        if way == "restart":
            before.stop()
            agent = served(Chips(other), report_holders=True, period=0.1).agent
        else:
            agent = before.agent
            assert agent.loop is not None
            asyncio.run_coroutine_threadsafe(agent.reconfigure({other: Chips(other)}), agent.loop).result(10)
        fake_kubelet.wait_allocatable(other, 1)
        assert agent.loop is not None
        seen = loop.serving(agent, MetricsConfig(), agent.loop)
        named = {"resource": RESOURCE, "device": device}
        seen.wait(lambda: seen.value("allocation_info", **named, pod="train", namespace="team", side="plugin") == 1)
        assert seen.value("device_holders", **named) == 1
        assert seen.value("devices_gone", resource=RESOURCE) == 1
        said = json.loads(seen.get("/status")[1])
        (holding,) = said["unserved"]
        assert (holding["resource"], holding["id"]) == (RESOURCE, device)
        assert [one["pod"] for one in holding["holders"]] == ["train"]
        withheld = {one["id"]: one["withheld"] for one in said["resources"][0]["devices"]}
        assert f"{device} of {RESOURCE}, which counts as held by pod team/train," in withheld[device]
        pod.delete()
        seen.wait(lambda: not seen.holders())
        assert seen.value("devices_gone", resource=RESOURCE) is None
        assert json.loads(seen.get("/status")[1])["unserved"] == []
        fake_kubelet.wait_allocatable(other, 2)

    def test_load_is_measured_in_the_background(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """A measured quantity is a metric; one that is not measured is absent, not 0."""
        source = Gpus()
        _, seen = watched(source, period=0.1)
        seen.wait(lambda: seen.value("device_utilization_ratio", device="gpu-1") == 0.5)
        assert seen.value("measured") == 1
        assert not any(name.startswith("device_power") for name, _ in seen.metrics())
        assert (seen.value("hook_duration_seconds_count", hook="measure") or 0) >= 1

    def test_a_scrape_waits_for_no_hardware(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """While `measure` hangs a scrape is answered at once, without the old values."""
        source, released = Gpus(), threading.Event()
        _, seen = watched(source, period=0.1)
        seen.wait(lambda: seen.value("measured") == 1)
        source.hook_timeout = 0.1

        def hang(devices: Sequence[Device]) -> Measured:
            released.wait()
            return {}

        source.measured = hang
        # The old reading expires before the hook's timeout, after which the page names the hook.
        seen.wait(lambda: "measure of example.com/gpu" in seen.get("/")[1])
        began = time.monotonic()
        assert seen.value("measured") == 0
        assert seen.value("device_utilization_ratio", device="gpu-1") is None
        assert time.monotonic() - began < 5
        released.set()
        source.hook_timeout, source.measured = 10, lambda devices: {"gpu-1": {"utilization_ratio": 1}}
        seen.wait(lambda: seen.value("device_utilization_ratio", device="gpu-1") == 1)

    def test_losing_the_kubelet_is_seen(self, watched: Callable[..., tuple[FakeKubelet, Seen]]) -> None:
        """Without the kubelet the agent is alive and not ready."""
        kubelet, seen = watched(Gpus())
        # An event is a difference to the previous status, which is noted once the loop has run.
        assert seen.get("/healthz")[0] == 200
        kubelet.stop()
        words = re.compile(rf"{RESOURCE}: not registered with the kubelet: .*kubelet\.sock")
        seen.wait(lambda: words.match(seen.get("/readyz")[1]))
        assert seen.get("/readyz")[0] == 503
        assert seen.get("/healthz")[0] == 200
        assert seen.value("registered") == 0
        seen.wait(lambda: "not registered with the kubelet any more" in seen.events())
        kubelet.start()
        seen.wait(lambda: seen.get("/readyz")[0] == 200)
        seen.wait(lambda: "registered with the kubelet" in seen.events())

    def test_a_loop_that_has_ended_is_not_alive(self) -> None:
        """/healthz of a server whose loop has ended is 503."""
        ended = asyncio.new_event_loop()
        ended.close()
        still = Still(resource("a")).observer()
        pages = metrics.Pages(still.view, AgentCollector(still.view), ended)
        answer = pages.routes["/healthz"].answer(web.Request("/healthz", "", Message()))
        assert (answer.status, answer.body) == (503, b"the loop has ended\n")

    def test_a_loop_that_stands_still_is_not_alive(
        self, watched: Callable[..., tuple[FakeKubelet, Seen]], monkeypatch: pytest.MonkeyPatch, served: Any
    ) -> None:
        """While the loop is blocked /healthz is 503, and /metrics is served from other threads."""
        monkeypatch.setattr(metrics, "LOOP_TIMEOUT", 0.2)
        source, registered, stuck, released = Gpus(), threading.Event(), threading.Event(), threading.Event()

        async def watch() -> AsyncIterator[Sequence[Device]]:
            yield [Device("a")]
            await asyncio.to_thread(registered.wait, 60)
            stuck.set()
            released.wait()

        source.watch = watch  # type: ignore[method-assign]
        _, seen = watched(source)
        registered.set()
        assert stuck.wait(10)
        assert seen.get("/healthz") == (503, "the event loop has been blocked for 0.2 s\n")
        assert seen.value("devices", health="healthy") == 1
        released.set()
        seen.wait(lambda: seen.get("/healthz")[0] == 200)


class Bridge:
    """A provider (a component that reports its state) with metric families from a registry and of its own."""

    name = "bridge"
    fails = False

    def report(self) -> ProviderReport:
        if self.fails:
            raise RuntimeError("no")
        registry = CollectorRegistry()
        Gauge("bridge_slices", "Slices", registry=registry).set(2)
        own = CounterMetricFamily("bridge_moves", "Moves", value=3)
        return ProviderReport(
            families=[*registry.collect(), own],
            unready=["slices are not published"],
            locations={(RESOURCE, "a"): DeviceLocation(State.TO_PLUGIN, 12.0)},
            claims=[ClaimedDevice(RESOURCE, "a", "team", "mine")],
        )


class TestCollector:
    """The metrics that are made of a view, which is a snapshot of the agent's state."""

    def test_a_report_of_the_bridge_is_shown(self, loop: Loop) -> None:
        """Metrics show what another component, such as the DRA bridge, reports: device states, claims, own metrics."""
        still = Still(resource("a", "b"))
        bridge = Bridge()
        still.providers.append(bridge)
        seen = loop.serving(still.agent)
        assert seen.value("devices", side="dra", state="to-plugin", health="healthy") == 1
        assert seen.value("devices", side="plugin", health="healthy") == 1
        assert seen.value("device_state", device="a", state="to-plugin") == 1
        assert seen.value("device_state", device="a", state="dra") == 0
        assert seen.value("device_state_since_timestamp_seconds", device="a") == 12
        assert seen.value("allocation_info", side="dra", namespace="team", claim="mine", pod="") == 1
        assert seen.value("bridge_slices") == 2
        assert seen.value("bridge_moves_total") == 3
        assert seen.value("provider_up", name="bridge") == 1
        assert seen.get("/readyz") == (503, "bridge: slices are not published\n")
        bridge.fails = True
        assert seen.value("provider_up", name="bridge") == 0
        assert seen.value("bridge_slices") is None
        assert seen.value("devices", side="plugin", health="healthy") == 2

    def test_both_formats_are_read_by_the_client_library(self, loop: Loop) -> None:
        """Prometheus' client library reads both formats of /metrics, which have the same metrics."""
        still = Still(resource(Device("a", health=Health.UNKNOWN), held={"a": [PodContainer("n", "p", "c")]}))
        still.providers.append(Bridge())
        seen = loop.serving(still.agent)
        opened = seen.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]
        plain = seen.get("/metrics")[1]

        def lines(families: Iterable[Any]) -> set[str]:
            return {sample.name for family in families for sample in family.samples}

        assert lines(read_open(opened)) == lines(read_plain(plain))  # type: ignore[no-untyped-call]

    def test_a_name_that_is_no_text_does_not_fail_the_scrape(self, loop: Loop) -> None:
        """If the name of a device's measured part is not UTF-8, the metric's label has a question mark in it."""
        still = Still(resource("a"))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(still.measured(a={"lanes": {"tty\udcff": 1}}).view))
        assert b'deviceplugin_device_lanes{device="a",part="tty?",resource=' in generate_latest(registry)

    @pytest.mark.parametrize(
        ("accept", "content_type"),
        [
            ("", "text/plain; version=0.0.4"),
            ("*/*", "text/plain; version=0.0.4"),
            ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
            ("application/openmetrics-text;version=1.9.7", "application/openmetrics-text; version=1.0.0"),
            ("application/openmetrics-text;version=0.0.1,*/*;q=0.1", "text/plain; version=0.0.4"),
        ],
    )
    def test_format_is_negotiated(self, accept: str, content_type: str, loop: Loop) -> None:
        """A client gets one of the known formats, whatever it asks for."""
        _, _, headers = get(loop.serving(Still(resource("a")).agent).server, "/metrics", Accept=accept)
        assert headers["Content-Type"].partition("; charset")[0] == content_type

    @promtool
    def test_promtool_finds_nothing_wrong(self, loop: Loop) -> None:
        """promtool accepts names, types, help and units."""
        still = Still(resource("a", held={"a": [PodContainer("n", "p", "c")]}, refusals={"unhealthy": 1}))
        still.providers.append(Bridge())
        quantities: dict[str, Any] = {
            name: {"x": 1} if quantity.label else 1 for name, quantity in load.QUANTITIES.items()
        }
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentCollector(still.measured(a=quantities).view))
        text = generate_latest(registry)
        assert text.count(b"# TYPE deviceplugin_device_") >= len(load.QUANTITIES)
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_own_quantities_become_metrics(self, loop: Loop) -> None:
        """A source may measure quantities of its own; the parts of a quantity have the label `part`."""
        observer = Still(resource("a")).measured(a={"packets_total": 3, "lane_errors": {"0": 1}})
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): (family.type, sample.value)
            for family in AgentCollector(observer.view).collect()
            for sample in family.samples
        }
        key = (("device", "a"), ("resource", RESOURCE))
        assert samples[("deviceplugin_device_packets_total", key)] == ("counter", 3)
        assert samples[("deviceplugin_device_lane_errors", (key[0], ("part", "0"), key[1]))] == ("gauge", 1)

    def test_no_source_can_give_a_metric_that_is_there_already(self) -> None:
        """A measured quantity cannot have the name of another metric."""
        view = placed(Still(resource("a")).observer().view())
        names = {family.name for family in AgentCollector(lambda: view).collect()}
        assert {name.removeprefix("deviceplugin_device_") for name in names if "_device_" in name} == load.TAKEN

    def test_equal_holders_are_one_series(self) -> None:
        """Two holders with equal labels are one series."""
        held = {"a::0": [PodContainer(container="init", uid="1")], "a::1": [PodContainer(container="init", uid="2")]}
        view = Still(resource("a", held=held, replicas=2)).observer().view()
        assert view.resources[0].devices[0].holders == (
            DeviceHolder("plugin", "", "", "init", "", "1"),
            DeviceHolder("plugin", "", "", "init", "", "2"),
        )
        assert len(samples(view, "deviceplugin_allocation_info")) == 1

    def test_holders_of_devices_that_are_not_listed_are_shown(self) -> None:
        """A pod or claim that has a device which the source does not list, for example after a restart, is a series."""
        still = Still(resource("b", held={"a": [PodContainer("team", "train", "main")]}))
        still.providers.append(Bridge())
        view = still.observer().view()
        labels = [one.labels for one in samples(view, "deviceplugin_allocation_info")]
        assert {(one["device"], one["pod"], one["claim"]) for one in labels} == {("a", "train", ""), ("a", "", "mine")}
        counts = {one.labels["device"]: one.value for one in samples(view, "deviceplugin_device_holders")}
        assert counts == {"a": 2, "b": 0}

    def test_holders_are_absent_when_they_are_unknown(self, loop: Loop) -> None:
        """Without the kubelet's checkpoint there are no holder counts, rather than 0."""
        still = Still(resource("a", held={"a": [PodContainer("n", "p", "c")]}))
        still.scanned_at = None
        seen = loop.serving(still.agent)
        assert seen.value("holders_known") == 0
        assert seen.value("device_holders") is None
        assert seen.holders() == set()

    def test_dcgm_names_are_there_on_demand(self, loop: Loop) -> None:
        """DCGM names are present only if configured."""
        still = Still(resource("a"))
        source = Gpus()
        source.measured = lambda devices: {"a": {"utilization_ratio": 0.5}}
        still.sources = {RESOURCE: source}
        seen = loop.serving(still.agent, MetricsConfig(dcgm=True))
        seen.wait(lambda: seen.value("DCGM_FI_DEV_GPU_UTIL", UUID="a") == 50)
        assert loop.serving(still.agent).value("DCGM_FI_DEV_GPU_UTIL") is None


class TestStart:
    """Start and end of the metrics."""

    @pytest.mark.parametrize(
        ("code", "late"),
        [
            (
                "import sys, deviceplugin.node.agent, deviceplugin.cli",
                "prometheus_client http.server deviceplugin.metrics.collectors deviceplugin.metrics.views",
            ),
            (
                "import sys, deviceplugin.metrics.collectors; deviceplugin.metrics.web.listen('127.0.0.1:0').close()",
                "deviceplugin.metrics.page encodings.idna",
            ),
        ],
        ids=["without metrics", "with metrics"],
    )
    def test_what_is_not_needed_is_not_loaded(self, code: str, late: str) -> None:
        """Without metrics no client library and web server are loaded; with metrics no page and codec of host names."""
        code = f"{code}; print([m for m in {late!r}.split() if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_a_process_with_metrics_is_set_up_for_short_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With metrics, threads switch every 0.5 ms; garbage collections skip objects of the start in any case."""
        intervals: list[float] = []
        frozen: list[bool] = []
        monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
        monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
        monkeypatch.setattr("deviceplugin.metrics.collectors.serving", lambda *_: contextlib.nullcontext())

        class Ended(Program):
            async def run(self) -> None:
                """Serve no requests."""

        assert serve(lambda: Ended(Mock())) == 0
        assert (intervals, frozen) == ([], [True])
        assert serve(lambda: Ended(Mock()), metrics_address=":0") == 0
        assert (intervals, frozen) == ([0.0005], [True, True])

    def test_an_address_in_use_ends_the_start_with_a_word(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An address in use ends the start with an error."""
        with contextlib.closing(web.listen("127.0.0.1:0")) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            code = serve(lambda: Program(Agent([Gpus()], Paths(tmp_path))), metrics_address=address)
        assert code == 1
        assert f"cannot serve metrics at {address}: Address already in use" in caplog.text

    async def test_an_unreadable_certificate_ends_the_start_with_a_word(self, tmp_path: Path) -> None:
        """An unreadable certificate ends the start: metrics are never served in plain text instead."""
        options = MetricsConfig(certificate=str(tmp_path / "no.crt"))
        with (
            pytest.raises(OSError, match=r"no\.crt: No such file"),
            metrics.serving("127.0.0.1:0", Agent([Gpus()], Paths(tmp_path)), options),
        ):
            pass

    async def test_the_token_leaves_the_probes_open(self, tmp_path: Path) -> None:
        """Probes need no token, all other pages do."""
        (tmp_path / "token").write_text("s3cret")
        with metrics.serving(
            "127.0.0.1:0", Agent([Gpus()], Paths(tmp_path)), MetricsConfig(token=str(tmp_path / "token"))
        ) as server:
            seen = Seen(server)
            answers = {path: (await asyncio.to_thread(seen.get, path))[0] for path in ("/", "/metrics", "/status")}
            assert answers == {"/": 401, "/metrics": 401, "/status": 401}
            assert (await asyncio.to_thread(seen.get, "/healthz"))[0] == 200
            assert (await asyncio.to_thread(seen.get, "/readyz"))[0] == 503
            assert (await asyncio.to_thread(seen.get, "/metrics", Authorization="Bearer s3cret"))[0] == 200
        await asyncio.sleep(0)

    @pytest.mark.parametrize("secured", [False, True])
    async def test_a_token_in_clear_text_is_warned_of(
        self, secured: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A token without a certificate is logged as a warning; with a certificate it is not."""
        (tmp_path / "token").write_text("s3cret")
        certificate, key = map(str, make_certificate(tmp_path, "node")) if secured else (None, None)
        options = MetricsConfig(certificate=certificate, key=key, token=str(tmp_path / "token"))
        with metrics.serving("127.0.0.1:0", Agent([Gpus()], Paths(tmp_path)), options):
            assert ("in clear text" in caplog.text) is not secured
        await asyncio.sleep(0)

    def test_a_config_file_says_how(self) -> None:
        """The key `metrics` of a config file sets the options of metrics, none of which is required."""
        head = "resources: [{name: example.com/a, devices: [{path: /dev/null}]}]\n"
        assert config.parse(head).metrics == MetricsConfig()
        text = "metrics: {certificate: /c/tls.crt, key: /c/tls.key, token: /t, period: 5, dcgm: true}"
        assert config.parse(head + text).metrics == MetricsConfig(
            certificate="/c/tls.crt", key="/c/tls.key", token="/t", period=5, dcgm=True
        )
        text = "metrics: {certificate: /c/tls.crt, client_ca: /c/ca.crt, min_version: '1.3'}"
        assert config.parse(head + text).metrics == MetricsConfig(
            certificate="/c/tls.crt", client_ca="/c/ca.crt", min_version="1.3"
        )
        for alone in ("key: /k", "client_ca: /c"):
            with pytest.raises(config.ConfigError, match="there is no TLS without `certificate`"):
                config.parse(f"{head}metrics: {{{alone}}}")
        with pytest.raises(config.ConfigError, match="period"):
            config.parse(head + "metrics: {period: 0}")

    @pytest.mark.parametrize("secured", [False, True], ids=["plain", "with TLS and token"])
    def test_the_program_serves_what_its_config_says(
        self, secured: bool, fake_kubelet: FakeKubelet, tmp_path: Path
    ) -> None:
        """`deviceplugin run` serves metrics in plain text, or with TLS and a token."""
        file = tmp_path / "config.yaml"
        text = "resources: [{name: example.com/sim, devices: [{simulated: {count: 2}}]}]\n"
        certificate, key = make_certificate(tmp_path, "node")
        (tmp_path / "token").write_text("s3cret")
        if secured:
            text += f"metrics: {{certificate: {certificate}, key: {key}, token: {tmp_path}/token, dcgm: true}}\n"
        file.write_text(text)
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(file), "--metrics-address=127.0.0.1:0"]
        command += fake_kubelet.arguments
        answer = scraped(command, certificate if secured else None)
        assert b'deviceplugin_devices{health="healthy",resource="example.com/sim"' in answer

    def test_an_own_agent_serves_as_it_says(self, fake_kubelet: FakeKubelet, tmp_path: Path) -> None:
        """`run` in an author's file has address, certificate and token as parameters; --metrics-address overrides."""
        certificate, key = make_certificate(tmp_path, "node")
        (tmp_path / "token").write_text("s3cret")
        program = f"""
from pathlib import Path
from deviceplugin import Device, DeviceSource, run
class Toys(DeviceSource):
    resource = "example.com/toy"
    async def watch(self):
        yield [Device("a")]
run(Toys(), metrics_address="192.0.2.1:9", token={str(tmp_path / "token")!r}, certificate={str(certificate)!r},
    key=Path({str(key)!r}))
"""
        command = [sys.executable, "-c", program, "--metrics-address=127.0.0.1:0", *fake_kubelet.arguments]
        assert b'resource="example.com/toy"' in scraped(command, certificate)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"token": "tokens/toys"}, "token must be an absolute path, not 'tokens/toys'"),
            ({"certificate": b"/x"}, "certificate must be an absolute path, not b'/x'"),
            ({"key": "/x"}, "key: there is no TLS without `certificate`"),
            ({"client_ca": "/x", "token": "/y"}, "client_ca: there is no TLS without `certificate`"),
        ],
    )
    def test_what_protects_nothing_is_refused(self, fields: dict[str, Any], message: str) -> None:
        """`run` of both packages raises for a path that is not absolute, and for a key without a certificate."""
        for start in (deviceplugin.run, dra_bridge.run):
            with pytest.raises(ValueError, match=re.escape(message)):
                start(Gpus(), argv=[], **fields)
