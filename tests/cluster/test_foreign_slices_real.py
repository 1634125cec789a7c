"""Other clients write slices into the pool of a real agent: the agent reports these writes and undoes them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from dra_bridge.slices.desired import slice_name
from tests.cluster.api import ApiError
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster

DRIVER = "fake.example.com"
RESOURCE = "example.com/fake"
METRICS = 19476
MOST = 2**63 - 1
"""The highest generation that the API server accepts."""


class BridgeWithStatus(Bridge):
    """A bridge whose agent serves its status page and metrics."""

    def command(self) -> list[str]:
        """Return the agent's command line."""
        return [*super().command(), "--metrics-address", f"127.0.0.1:{METRICS}"]


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    resource = {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"simulated": {"count": 3}}],
        "dra": {"share": 2},
    }
    with BridgeWithStatus.running(cluster, resource) as running:
        running.wait_offered(2)
        yield running
        for one in running.slices():
            with contextlib.suppress(ApiError):
                cluster.api.patch("resourceslice", one["metadata"]["name"], {"metadata": {"finalizers": None}})
                cluster.api.delete("resourceslice", one["metadata"]["name"])


def foreign(
    bridge: Bridge, name: str = "foreign", generation: int = 1, count: int = 1, device: str = "ghost", **spec: Any
) -> dict[str, Any]:
    """Return a foreign slice in the node's pool, with one device that does not exist."""
    node = bridge.cluster.node_name
    per_device = {"allNodes": True} if spec.get("perDeviceNodeSelection") else {}
    attributes = {"extendedResource": {"string": RESOURCE}}
    body = {"attributes": attributes}
    return {
        "apiVersion": bridge.api_version,
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": DRIVER,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": [{"name": device, **({"basic": body} if bridge.version == "v1beta1" else body), **per_device}],
            **(spec or {"nodeName": node}),
        },
    }


def get(path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def own(bridge: Bridge) -> dict[str, Any]:
    found: dict[str, Any] = bridge.cluster.api.get("resourceslice", slice_name(bridge.cluster.node_name, DRIVER, 0))
    return found


def status(bridge: Bridge) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get("/status"))
    return found


def overcome(bridge: Bridge) -> dict[str, float]:
    """Return the number of other clients' writes that the agent has undone, by kind, from the agent's metrics."""
    found = {}
    for line in get("/metrics").splitlines():
        if line.startswith("deviceplugin_slice_foreign_writes_total{"):
            count = float(line.rpartition(" ")[2])
            if count:
                found[line.partition('kind="')[2].partition('"')[0]] = count
    return found


def events(bridge: Bridge) -> list[str]:
    found = bridge.cluster.api.list("Event", api_version="v1")
    return [event["message"] for event in found if event["reason"] == "PoolWrittenByOthers"]


def healed(bridge: Bridge, *, counted: dict[str, float] | None) -> None:
    """Wait until the pool has only the agent's slice; then check that a claim gets a device and that devices move."""
    cluster, name = bridge.cluster, slice_name(bridge.cluster.node_name, DRIVER, 0)

    def alone() -> bool:
        names = [one["metadata"]["name"] for one in bridge.slices()]
        return names == [name] and set(bridge.offered()) == {"sim-0", "sim-1"}

    cluster.wait_for(alone, 30.0, "the pool has the agent's slice alone")
    if counted is not None:
        cluster.wait_for(lambda: overcome(bridge) == counted, 10.0, f"{counted} is counted")
        named = f"driver {DRIVER}: slice"
        cluster.wait_for(lambda: any(named in text for text in events(bridge)), 10.0, "an Event says it")
        assert status(bridge)["providers"]["dra-bridge"][DRIVER]["problems"] == []
    bridge.claim("after", bridge.one())
    bridge.pod("after", {"fake": "after"}).wait_running()
    bridge.share("all")
    bridge.wait_offered(3)
    cluster.wait_allocatable(RESOURCE, 0)


def edit(bridge: Bridge, change: dict[str, Any]) -> None:
    bridge.cluster.api.patch("resourceslice", own(bridge)["metadata"]["name"], {"spec": change})


@pytest.mark.parametrize(
    ("where", "generation"),
    [("nodeName", 9), ("nodeName", MOST), ("allNodes", 9), ("allNodes", MOST), ("nodeSelector", MOST)],
    ids=["nodeName-high", "nodeName-highest", "allNodes-high", "allNodes-highest", "nodeSelector-highest"],
)
def test_a_slice_in_the_pool(bridge: Bridge, where: str, generation: int) -> None:
    """A foreign slice in the pool is deleted, whatever its generation and node selection; claims and moves go on."""
    hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [bridge.cluster.node_name]}
    wheres: dict[str, dict[str, Any]] = {
        "nodeName": {},
        "allNodes": {"allNodes": True},
        "nodeSelector": {"nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
    }
    bridge.cluster.api.create(foreign(bridge, generation=generation, **wheres[where]))
    kind = "generation" if generation == MOST else "slice" if where == "nodeName" else "nodeless"
    healed(bridge, counted={kind: 1.0})


def test_a_slice_that_selects_nodes_for_each_device(bridge: Bridge) -> None:
    """A slice with perDeviceNodeSelection in the pool is deleted."""
    if bridge.cluster.minor < 35:
        pytest.skip("perDeviceNodeSelection is alpha")
    bridge.cluster.api.create(foreign(bridge, generation=9, perDeviceNodeSelection=True))
    healed(bridge, counted={"nodeless": 1.0})


def test_another_count(bridge: Bridge) -> None:
    """A foreign slice of the pool's generation is deleted; the agent publishes a higher generation meanwhile."""
    generation = own(bridge)["spec"]["pool"]["generation"]
    bridge.cluster.api.create(foreign(bridge, generation=generation, count=7))
    healed(bridge, counted={"slice": 1.0})


@pytest.mark.parametrize("what", ["generation", "count", "devices", "all"])
def test_the_own_slice_is_edited(bridge: Bridge, what: str) -> None:
    """After another client has edited generation, count or devices of the agent's slice, the agent restores it."""
    changes = {
        "generation": {"pool": {"generation": MOST}},
        "count": {"pool": {"resourceSliceCount": 7}},
        "devices": {"devices": foreign(bridge)["spec"]["devices"]},
        "all": {"pool": {"generation": MOST}, "devices": foreign(bridge)["spec"]["devices"]},
    }
    edit(bridge, changes[what])
    healed(bridge, counted={"generation" if what in ("generation", "all") else "edited": 1.0})


def test_what_is_written_while_no_agent_runs(bridge: Bridge) -> None:
    """The next agent removes foreign slices, and replaces an own slice that was edited to the highest generation."""
    bridge.kill()
    edit(bridge, {"pool": {"generation": MOST}})
    bridge.cluster.api.create(foreign(bridge, "one", MOST))
    bridge.cluster.api.create(foreign(bridge, "two", MOST, allNodes=True))
    bridge.start()
    bridge.wait_registered()
    healed(bridge, counted={"generation": 3.0})
    assert own(bridge)["spec"]["pool"]["generation"] < 100


def test_the_name_is_taken(bridge: Bridge) -> None:
    """If another driver's slice has the name of the agent's slice, the agent publishes under another name."""
    bridge.kill()
    body = foreign(bridge, own(bridge)["metadata"]["name"])
    body["spec"]["driver"] = "other.example.com"
    bridge.cluster.api.delete("resourceslice", body["metadata"]["name"])
    bridge.cluster.api.create(body)
    try:
        bridge.start()
        bridge.wait_registered()
        bridge.wait_offered(2)
        assert overcome(bridge) == {"name": 1.0}
        bridge.claim("mine", bridge.one())
        bridge.pod("mine", {"fake": "mine"}).wait_running()
    finally:
        bridge.cluster.api.delete("resourceslice", body["metadata"]["name"])


def test_a_claim_for_a_device_that_does_not_exist(bridge: Bridge) -> None:
    """A claim for a device that only a foreign slice has fails; an Event names the device. Later claims are served."""
    cluster = bridge.cluster
    with stopped(bridge):
        cluster.api.create(foreign(bridge, generation=MOST))
        bridge.claim("ghost", bridge.one())
        pod = bridge.pod("ghost", {"fake": "ghost"})

        def results() -> list[dict[str, Any]]:
            claim = cluster.api.get("resourceclaim", "ghost")
            found = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
            return list(found.get("results") or ())

        (result,) = cluster.wait_for(results, 30.0, "the scheduler allocates the device")
        assert result["device"] == "ghost"

    def words() -> str:
        failed = [event for event in pod.events() if event.get("reason") == "FailedPrepareDynamicResources"]
        return " ".join(event["message"] for event in failed if "ghost" in event["message"])

    text = cluster.wait_for(words, 60.0, "the pod's Event has the driver's words")
    print(text)
    assert "ghost" in text
    healed(bridge, counted=None)


@contextlib.contextmanager
def stopped(bridge: Bridge) -> Iterator[None]:
    """Send SIGSTOP to the agent, as if the node had no CPU time left for it, and SIGCONT at the end of the block."""
    assert bridge.process is not None
    os.kill(bridge.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(bridge.process.pid, signal.SIGCONT)


def test_a_device_of_a_slice_of_others_does_not_return(bridge: Bridge) -> None:
    """While a foreign slice has a device, the device does not move back to the device plugin; afterwards it does."""
    cluster = bridge.cluster
    body = foreign(bridge, generation=MOST, device="sim-1")
    body["metadata"]["finalizers"] = ["example.com/stays"]
    cluster.api.create(body)
    bridge.share("none")

    def waits() -> bool:
        waiting = status(bridge)["providers"]["dra-bridge"][DRIVER]["waiting"].get(RESOURCE, {})
        return "slice foreign of others" in waiting.get("sim-1", "") and "sim-0" not in waiting

    cluster.wait_for(waits, 30.0, "one device waits for the slice of others, the other has returned")
    cluster.wait_allocatable(RESOURCE, 2)
    problems = status(bridge)["providers"]["dra-bridge"][DRIVER]["problems"]
    print(problems)
    assert any("waits for its finalizers: example.com/stays" in text for text in problems)
    cluster.api.patch("resourceslice", "foreign", {"metadata": {"finalizers": None}})
    cluster.wait_allocatable(RESOURCE, 3)


def test_somebody_who_writes_again_and_again(bridge: Bridge) -> None:
    """If a client writes foreign slices again and again, `problems` says so, one Event is written, and devices move."""
    cluster, end, written = bridge.cluster, threading.Event(), 0
    before = len(events(bridge))

    def fight() -> None:
        nonlocal written
        while not end.wait(0.2):
            with contextlib.suppress(ApiError):
                cluster.api.create(foreign(bridge, generation=MOST))
                written += 1

    fighter = threading.Thread(target=fight)
    fighter.start()
    try:

        def said() -> list[str]:
            found = status(bridge)["providers"]["dra-bridge"][DRIVER]["problems"]
            return [text for text in found if "again and again" in text]

        (text,) = cluster.wait_for(said, 60.0, "the problem is named")
        print(text)
        assert "slice foreign" in text
        assert text in status(bridge)["problems"]
        cluster.wait_for(lambda: written >= 13, 60.0, "the fight goes on")
        bridge.share("none")
        cluster.wait_allocatable(RESOURCE, 3)
    finally:
        end.set()
        fighter.join()
    undone = overcome(bridge)["generation"]
    print(f"{written} slices written, {undone} deleted, {len(events(bridge)) - before} Events")
    assert len(events(bridge)) - before == 1
    bridge.share(2)
    healed(bridge, counted=None)
