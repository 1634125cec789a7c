"""A real Prometheus scrapes the agent on the real node, while pods with devices start and end.

The series are compared with the devices that the pods' environments name. Requires Debian's packages prometheus and
chromium.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import isolate
from tests.cluster.bridge import Bridge, env_of
from tests.cluster.node import Cluster, Pod
from tests.cluster.prometheus import AGENT, Prometheus
from tests.metrics.test_monitoring import queries
from tests.metrics.test_page import Table

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from deviceplugin import ContainerEdits, Device, DeviceSource, Health
from deviceplugin.metrics import views
from dra_bridge import run
from dra_bridge.kube import liveness
from dra_bridge.node.status import BridgeStatus

ILL = Path(__file__).with_name("ill")
FAULTS = Path(__file__).with_name("faults")


def has(fault):
    return FAULTS.exists() and fault in FAULTS.read_text().split()


def fail_of(fault):
    if has(fault):
        raise RuntimeError("by the test")


def reported(status, report=BridgeStatus.report):
    fail_of("status")
    return report(status)


BridgeStatus.report = reported
views.HOLDERS_STALE = liveness.LOST = 10.0


class Simulated(DeviceSource):
    count = 4

    async def watch(self):
        while True:
            fail_of("source")
            ill = ILL.read_text().split() if ILL.exists() else []
            well = Health.UNKNOWN if has("unknown") else Health.HEALTHY
            yield [
                Device(
                    f"{self.kind}-{n}",
                    health=Health.UNHEALTHY if f"{self.kind}-{n}" in ill else well,
                    message="by the test" if f"{self.kind}-{n}" in ill else "",
                )
                for n in range(self.count)
            ]
            await asyncio.sleep(0.2)

    def edits(self, devices):
        fail_of(f"{self.kind}-edits")
        time.sleep(6 * has(f"{self.kind}-slow"))
        return ContainerEdits(env={self.kind.upper(): ",".join(device.id for device in devices)})

    def measure(self, devices):
        fail_of("measure")
        loads = {}
        for device in devices:
            n = int(device.id.rpartition("-")[2])
            loads[device.id] = {
                "utilization_ratio": n / 10,
                "memory_used_bytes": n * 2**30,
                "memory_total_bytes": 80 * 2**30,
                "temperature_celsius": {"gpu": 40 + n},
                "power_watts": 100 + n,
                "energy_joules_total": 100.0 * time.monotonic(),
                "throttled": {"power": n % 2},
                "pcie_bytes_per_second": {"receive": 1e6, "transmit": 2e6},
                "nvlink_bytes_total": {"receive": 0, "transmit": 0},
                "ecc_errors_total": {"corrected": 0, "uncorrected": int(has("memory"))},
                "xid_errors_total": ({"79": 1} if n == 3 else {}) | ({"48": 1} if has("xid") else {}),
            }
        return loads


class Gpu(Simulated):
    resource, driver, kind, count = "example.com/gpu", "gpu.example.com", "gpu", 6


class Card(Simulated):
    resource, driver, kind = "example.com/card", "card.example.com", "card"


class Shared(Simulated):
    resource, kind, replicas, count = "example.com/shared", "shared", 4, 1


run(Gpu(), Card(), Shared(), argv=[*sys.argv[1:], "--metrics-address=:9410"])
"""
RESOURCES: list[dict[str, Any]] = [
    {"name": "example.com/gpu", "driver": "gpu.example.com", "devices": [{"simulated": {"count": 6}}]},
    {"name": "example.com/card", "driver": "card.example.com", "devices": [{"simulated": {"count": 4}}]},
    {"name": "example.com/shared", "devices": [{"simulated": {"count": 1}}], "sharing": {"replicas": 4}},
]


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    with Bridge.running(cluster, *RESOURCES, script=SCRIPT) as running:
        node = {"metadata": {"annotations": {"card.example.com/dra-share": "all", "gpu.example.com/dra-share": "3"}}}
        cluster.api.patch("Node", cluster.node_name, node)
        running.wait_offered(4, "card.example.com")
        running.wait_offered(3, "gpu.example.com")
        for resource, count in (("example.com/gpu", 3), ("example.com/card", 0), ("example.com/shared", 4)):
            cluster.wait_allocatable(resource, count)
        yield running
        gone = {"metadata": {"annotations": {"card.example.com/dra-share": None, "gpu.example.com/dra-share": None}}}
        cluster.api.patch("Node", cluster.node_name, gone)


@pytest.fixture
def prometheus(bridge: Bridge, tmp_path: Path) -> Iterator[Prometheus]:
    with Prometheus(tmp_path) as running:
        bridge.cluster.wait_for(lambda: running.value('up{job="device-plugin"}') == 1, 30, "the agent is scraped")
        yield running


def agent(path: str, accept: str = "*/*") -> str:
    request = urllib.request.Request(f"http://{AGENT}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def said(pod: Pod, kind: str, side: str, container: str = "main") -> set[tuple[str, ...]]:
    """Return the devices that a container's environment names, as tuples like those of `Prometheus.holders`."""
    devices = env_of(pod, container)[kind.upper()].split(",")
    return {(f"example.com/{kind}", device, side, pod.name, container) for device in devices}


def start_all(bridge: Bridge) -> dict[str, Pod]:
    """Start pods by limits (one through DRA, two with replicas) and by a claim; return the running pods by name."""
    cluster = bridge.cluster
    pods = {
        "plugin": cluster.start_pod("plugin", {"example.com/gpu": 2}),
        "extended": cluster.start_pod("extended", {"example.com/card": 1}),
        "share-a": cluster.start_pod("share-a", {"example.com/shared": 1}),
        "share-b": cluster.start_pod("share-b", {"example.com/shared": 2}),
    }
    bridge.claim("mine", bridge.one(resource="example.com/gpu"))
    pods["claim"] = bridge.pod("claim", {"gpu": "mine"})
    for pod in pods.values():
        pod.wait_running()
    return pods


def test_holders_are_what_the_pods_say(bridge: Bridge, prometheus: Prometheus) -> None:
    """Each container with a device has a series: by limits, by claim, with a replica, and an init container."""
    cluster = bridge.cluster
    pods = start_all(bridge)
    wanted = (
        said(pods["plugin"], "gpu", "plugin")
        | said(pods["extended"], "card", "dra")
        | said(pods["share-a"], "shared", "plugin")
        | said(pods["share-b"], "shared", "plugin")
        | said(pods["claim"], "gpu", "dra")
    )
    assert len(wanted) == 6
    cluster.wait_for(lambda: prometheus.holders() == wanted, 30, "the holders are those who say so")
    claims = {dict(labels)["claim"] for labels in prometheus.query('deviceplugin_allocation_info{pod="claim"}')}
    assert claims == {"mine"}
    # An alert recognises a pod with limits that DRA serves by the name of the claim.
    (by_limits,) = {
        dict(labels)["claim"] for labels in prometheus.query('deviceplugin_allocation_info{pod="extended"}')
    }
    assert by_limits.startswith("extended-extended-resources-")
    ids = {dict(labels)["device"] for labels in prometheus.query("deviceplugin_device_holders > 0")}
    assert ids == {holder[1] for holder in wanted}

    # Joined with the holders, each load is that of the holder's own device.
    by_holder = prometheus.query(
        "deviceplugin_allocation_info * on (job, instance, resource, device) group_left () "
        "deviceplugin_device_utilization_ratio"
    )
    assert {(dict(labels)["pod"], dict(labels)["device"]): value for labels, value in by_holder.items()} == {
        (holder[3], holder[1]): pytest.approx(int(holder[1].rpartition("-")[2]) / 10) for holder in wanted
    }

    # While an init container runs, it is the holder.
    release = isolate.DEVICES / "release"
    release.unlink(missing_ok=True)
    busy: dict[str, Any] = {
        "name": "prepare",
        "image": "localhost/busybox:1",
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "while [ ! -e /gate/release ]; do sleep 0.1; done"],
        "resources": {"limits": {"example.com/gpu": "1"}},
        "volumeMounts": [{"name": "gate", "mountPath": "/gate"}],
    }
    pod = cluster.start_pod(
        "staged",
        initContainers=[busy],
        volumes=[{"name": "gate", "hostPath": {"path": str(isolate.DEVICES)}}],
    )
    cluster.wait_for(
        lambda: ("staged", "prepare") in {holder[3:] for holder in prometheus.holders()}, 30, "the init container holds"
    )
    release.touch()
    pod.wait_running()

    # After the pods' end, no series of a holder is left; the devices' series stay.
    devices = prometheus.query("deviceplugin_device_utilization_ratio").keys()
    for one in (*pods.values(), pod):
        one.delete()
    for one in (*pods.values(), pod):
        one.wait_gone()
    cluster.wait_for(lambda: not prometheus.holders(), 60, "nobody holds anything")
    assert prometheus.query("deviceplugin_device_utilization_ratio").keys() == devices
    assert prometheus.value("sum(deviceplugin_kubelet_double_allocations_total)") == 0
    assert len(prometheus.query("deviceplugin_device_utilization_ratio")) == 11


def test_administrative_access_is_no_holder(bridge: Bridge, prometheus: Prometheus) -> None:
    """A claim with `adminAccess` to all devices is shown at each device, but is the holder of none."""
    cluster = bridge.cluster
    cluster.allow_admin_access()
    bridge.claim("mine", bridge.one(resource="example.com/gpu"))
    user = bridge.pod("claim", {"gpu": "mine"}).wait_running()
    bridge.claim("watch", bridge.one(resource="example.com/gpu", allocationMode="All", adminAccess=True))
    watching = bridge.pod("watching", {"gpu": "watch"}).wait_running()
    (held,) = env_of(user)["GPU"].split(",")
    seen = set(env_of(watching)["GPU"].split(","))
    assert held in seen
    assert len(seen) == 3

    def shown() -> set[str]:
        devices = [one for resource in json.loads(agent("/status"))["resources"] for one in resource["devices"]]
        return {one["id"] for one in devices if [by["pod"] for by in one["administrativeAccess"]] == ["watching"]}

    cluster.wait_for(lambda: shown() == seen, 30, "its devices are shown")
    cluster.wait_for(lambda: {one[1] for one in prometheus.holders()} == {held}, 30, "one device has a holder")
    assert prometheus.value("sum(deviceplugin_device_holders)") == 1
    assert prometheus.value("sum(deviceplugin_device_held_twice)") == 0
    command = [sys.executable, "-m", "dra_bridge", "status", "--driver", "gpu.example.com"]
    done = subprocess.run(
        [*command, "--kubeconfig", str(cluster.kubeconfig)], capture_output=True, text=True, timeout=60
    )
    line = f"  claim default/watch has administrative access to {', '.join(sorted(seen))}, without holding them"
    assert line in done.stdout.splitlines(), done.stdout + done.stderr
    assert [held] == re.findall(r"(\S+) +dra +dra +claim default/mine", done.stdout)
    assert "claim default/watch for" not in done.stdout
    since = prometheus.evaluated() + timedelta(seconds=3)  # with the shortened times, an alert would fire by then
    cluster.wait_for(lambda: prometheus.evaluated() > since, 60, "the rules are evaluated")
    assert not [name for name, _ in prometheus.firing() if name == "DeviceHeldTwice"]


def test_every_query_of_the_dashboard_is_answered(bridge: Bridge, prometheus: Prometheus) -> None:
    """Each query of the dashboard returns data, except for events that did not happen; values fit the node's state."""
    cluster = bridge.cluster
    pods = start_all(bridge)
    cluster.wait_for(lambda: len(prometheus.holders()) == 6, 30, "all holders are seen")
    # Queries of events that did not happen on this node, such as moves, refusals, and long idle times.
    allowed = (
        'state=~"to-dra|to-plugin"',
        "deviceplugin_registered",
        "allocation_refusals_total",
        "[30m]) < 0.01",
        "preferred_allocation_duration",
        "deviceplugin_handover_waits",
        "prepare_failures_total",
    )

    def answered() -> bool:
        return all(prometheus.query(text) for text in queries() if not any(part in text for part in allowed))

    cluster.wait_for(answered, 60, "all queries are answered")  # Rates need some scrapes.
    assert prometheus.value("sum(deviceplugin_devices)") == 11
    assert prometheus.value('sum(deviceplugin_devices{state="dra"})') == 7
    assert prometheus.value('deviceplugin_dra_prepared_claims{driver="gpu.example.com"}') == 1
    assert prometheus.value('deviceplugin_dra_prepared_claims{driver="card.example.com"}') == 1
    assert prometheus.value('deviceplugin_handover_duration_seconds_count{direction="to-dra", resource=~".*gpu"}') == 3
    took = prometheus.value('deviceplugin_handover_duration_seconds_sum{direction="to-dra", resource=~".*gpu"}')
    assert took is not None
    assert 0 < took < 60
    assert prometheus.value('deviceplugin_slice_devices{driver="gpu.example.com"}') == 3
    assert (prometheus.value("sum(deviceplugin_slice_writes_total)") or 0) >= 2
    assert prometheus.value('deviceplugin_allocations_total{resource="example.com/gpu"}') == 1
    assert prometheus.value('deviceplugin_allocated_devices_total{resource="example.com/shared"}') == 3
    status = json.loads(agent("/status"))
    assert status["ready"] is True
    assert status["providers"]["dra-bridge"]["gpu.example.com"]["preparedClaims"] == 1
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        assert "deviceplugin_allocation_info{" in agent("/metrics", accept)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=agent("/metrics").encode(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert set(pods) == {"plugin", "extended", "share-a", "share-b", "claim"}


def chromium(url: str, directory: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            f"--user-data-dir={directory}", *arguments, url,
        ],
        capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"Refused to" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("script", [True, False], ids=["with a script", "without"])
def test_page_in_a_browser_shows_what_the_pods_hold(bridge: Bridge, tmp_path: Path, script: bool) -> None:
    """The table of the agent's page names the right holder of each device, in a browser with and without scripts."""
    cluster = bridge.cluster
    pods = start_all(bridge)
    wanted = {
        env_of(pods["claim"])["GPU"]: "default/claim (main), claim default/mine",
        env_of(pods["share-a"])["SHARED"]: "default/share-a (main) default/share-b (main)",
        **dict.fromkeys(env_of(pods["plugin"])["GPU"].split(","), "default/plugin (main)"),
    }

    def shown() -> Mapping[str, str]:
        rows = Table(agent("/").encode()).rows
        return {row[0]: row[3] for row in rows if row[0] in wanted}

    cluster.wait_for(lambda: shown() == wanted, 30, "the page shows them")
    url = f"http://{AGENT}/"
    if not script:  # --dump-dom needs scripts, so the browser gets a copy of the page without its script
        url = (tmp_path / "page.html").as_uri()
        (tmp_path / "page.html").write_text(re.sub(r"(?s)<script>.*</script>", "", agent("/")))
    # Eight seconds of the browser's virtual time, in which the page's script updates the page.
    dom = chromium(url, tmp_path / "a", "--virtual-time-budget=8000", "--dump-dom")
    rows = Table(dom).rows
    assert {row[0]: row[3] for row in rows if row[0] in wanted} == wanted
    assert len([row for row in rows if row[0] != "Device"]) == 11
    assert b'id="late" class="dim"' in dom
    keep = cluster.logs / "page"
    keep.mkdir(exist_ok=True)
    for width, height in ((1280, 1200), (390, 2400)):
        picture = keep / f"{'page' if script else 'no-script'}-{width}.png"
        chromium(
            url, tmp_path / "b", "--virtual-time-budget=8000", "--hide-scrollbars",
            f"--window-size={width},{height}", f"--screenshot={picture}",
        )  # fmt: skip
        assert picture.stat().st_size > 20_000
