"""The agent's status page and metrics while the real API server or kubelet deletes its slices, refuses it, or hangs."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.bridge import SERVICE_ACCOUNT, Bridge
from tests.cluster.node import Cluster

DRIVER, RESOURCE, COUNT = "board.example.com", "example.com/board", 4
SCRIPT = f"""
import asyncio
import sys
from deviceplugin import Device, DeviceSource
from dra_bridge import run
from dra_bridge.kube import Cluster

# A watch without anything in it is trusted for so many seconds; in production it is some minutes.
Cluster.__init__.__kwdefaults__["silence"] = (15.0, 20.0)


class Boards(DeviceSource):
    resource, driver = "{RESOURCE}", "{DRIVER}"

    async def watch(self):
        yield [Device(f"board-{{n}}") for n in range({COUNT})]
        await asyncio.Event().wait()


run(Boards(), share="all", argv=[*sys.argv[1:], "--metrics-address=127.0.0.1:9410"])
"""
NOTICED = 90.0
"""Maximum seconds until a problem is reported; problems that end within 30 s are not reported."""
HEALED = 120.0
"""Maximum seconds until the agent is healthy after a problem's end: its longest pause between retries is 30 s."""


def get(path: str) -> tuple[int, str]:
    """Return the status and the text of a page of the agent."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:9410{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get("/status")[1])
    return found


def metric(name: str) -> float:
    """Return the value of a metric that has one series."""
    (value,) = re.findall(rf"^deviceplugin_{name}(?:{{.*}})? (\S+)$", get("/metrics")[1], re.MULTILINE)
    return float(value)


def well() -> bool:
    """Return whether the agent is ready, reports no problem, and has published its slices."""
    found = status()
    return (found["ready"], found["problems"], metric("slices_published")) == (True, [], 1)


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    resources = {"name": RESOURCE, "driver": DRIVER, "devices": [{"simulated": {"count": COUNT}}]}
    with Bridge.running(cluster, resources, script=SCRIPT) as running:
        running.wait_offered(COUNT)
        cluster.wait_for(well, 30, "all is well")
        yield running


def wait_told(cluster: Cluster, *words: str) -> None:
    """Wait until the agent is not ready, a problem has all these words, and the slices do not count as published."""

    def told() -> bool:
        found = status()
        return (
            get("/readyz")[0] == 503
            and any(DRIVER in why and words[0] in why for why in found["unready"])
            and any(all(word in problem for word in words) for problem in found["problems"])
            and metric("slices_published") == 0
        )

    cluster.wait_for(told, NOTICED, f"{words} is told")
    assert get("/healthz")[0] == 200


def wait_well(bridge: Bridge) -> None:
    bridge.wait_offered(COUNT, timeout=HEALED)
    bridge.cluster.wait_for(well, HEALED, "all is well again")


def test_credentials_that_end_with_their_node(bridge: Bridge) -> None:
    """The Node is deleted, so its slices are deleted and the agent's token is refused: the agent reports both problems.

    With a new token, the agent publishes the slices again.
    """
    cluster = bridge.cluster
    agent = cluster.api_with_token((SERVICE_ACCOUNT / "token").read_text())

    def refused() -> bool:
        return agent.raw("GET", f"/api/v1/nodes/{cluster.node_name}")[0] == 401

    cluster.stop_kubelet()
    cluster.api.delete("Node", cluster.node_name)
    cluster.wait_for(lambda: not bridge.slices(), 60, "the slices are collected with their owner")
    cluster.wait_for(lambda: any("there is no Node" in problem for problem in status()["problems"]), 30, "it is told")
    cluster.wait_for(refused, 60, "the API server has forgotten that it took the token")
    cluster.start_kubelet()  # the kubelet creates another Node
    wait_told(cluster, "401", "refuses the agent's credentials", "Replace the token")
    assert metric("api_credentials_accepted") == 0
    assert not re.search(r"^deviceplugin_slices{.*} [1-9]", get("/metrics")[1], re.MULTILINE)
    bridge.renew_token()
    wait_well(bridge)
    assert metric("api_credentials_accepted") == 1


def test_rights_that_are_taken_and_given_back(bridge: Bridge) -> None:
    """A slice is deleted while the agent lacks rights: the agent reports this; with rights it restores the slice."""
    cluster = bridge.cluster
    binding = cluster.api.get("ClusterRoleBinding", "dra-bridge")
    cluster.api.delete("ClusterRoleBinding", "dra-bridge")
    for one in bridge.slices():
        cluster.api.delete("ResourceSlice", one["metadata"]["name"])
    wait_told(cluster, "403", "cannot be written", "manifests")
    for key in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
        binding["metadata"].pop(key, None)
    cluster.api.apply(binding)
    wait_well(bridge)


@contextmanager
def stopped(cluster: Cluster, component: str) -> Iterator[None]:
    """Stop a component's process (SIGSTOP): its sockets exist, but requests get no answer."""
    process = cluster.components[component].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_kubelet_that_falls_silent(bridge: Bridge) -> None:
    """A kubelet hangs: the agent reports this problem, stays ready, and does not register again."""
    cluster = bridge.cluster
    before = metric("registrations_total"), metric("dra_registrations_total")
    with stopped(cluster, "kubelet"):
        cluster.wait_for(
            lambda: any("the kubelet has not answered since" in problem for problem in status()["problems"]),
            NOTICED,
            "the silence is told",
        )
        assert metric("kubelet_answers") == 0
        assert get("/readyz")[0] == get("/healthz")[0] == 200
    wait_well(bridge)
    assert (metric("registrations_total"), metric("dra_registrations_total")) == before


def test_an_api_server_that_falls_silent(bridge: Bridge) -> None:
    """The API server hangs: the agent reports this problem, stays ready, and does not count slices as published."""
    cluster = bridge.cluster
    with stopped(cluster, "kube-apiserver"):

        def told() -> bool:
            return any("the API server is unreachable" in problem for problem in status()["problems"])

        cluster.wait_for(told, NOTICED, "the silence is told")
        assert get("/readyz")[0] == get("/healthz")[0] == 200
        assert metric("api_reachable") == 0
        cluster.wait_for(lambda: metric("slices_published") == 0, NOTICED, "nothing counts as published")
    wait_well(bridge)
