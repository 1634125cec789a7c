"""The number of requests of `status`, and its output before it asks the agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from deviceplugin.register.records import State
from dra_bridge.kube import Cluster
from dra_bridge.rollout import progress
from dra_bridge.rollout.agents import AT_ONCE
from dra_bridge.rollout.display import FleetStatus
from dra_bridge.rollout.fleet import NodeView
from dra_bridge.rollout.pods import FEW
from dra_bridge.rollout.progress import DeviceProgress, Progress, ResourceProgress
from dra_bridge.rollout.status import read_status
from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import body, node_body
from tests.dra.rollout.nodes import agent_pod

D, R, NAMESPACE = "gpu.example.com", "example.com/gpu", "dra-bridge"
SIZES = (100, 400)


def populate(server: FakeApiServer, count: int) -> None:
    """Make Nodes, and Leases as agents write them.

    Each node has holders by limits and by claims, so `status` also needs its pods.
    """
    held = {"a": DeviceProgress(State.PLUGIN, 0, "pod ml/old"), "b": DeviceProgress(State.DRA, 0, "claim ml/c")}
    report = progress.encoded(Progress({R: ResourceProgress("50%", {"plugin": 1, "dra": 1}, held)}))
    labels = {"app.kubernetes.io/managed-by": "dra-bridge"}
    for number in range(count):
        name = f"n{number}"
        server.create(node_body(name, capacity={R: "2"}, allocatable={R: "1"}))
        meta = {"labels": labels, "annotations": {progress.annotation(D): report}}
        server.create(body("Lease", name, NAMESPACE, meta=meta, spec={}))


def user(name: str, node: str, **spec: Any) -> dict[str, Any]:
    whole = {"containers": [{"name": "main", "resources": {"limits": {R: "1"}}}], **spec}
    made = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    if not node:
        return body("Pod", name, "ml", meta=made, spec=whole, status={"phase": "Pending"})
    return body("Pod", name, "ml", meta=made, spec={**whole, "nodeName": node}, status={"phase": "Running"})


async def asked(server: FakeApiServer, names: Sequence[str] = ()) -> tuple[FleetStatus, Counter[str]]:
    """Return the status, and the number of requests by resource."""
    server.forget_log()
    async with Cluster.from_server(server.url) as cluster:
        found = await read_status(cluster, D, names, "")
    kinds = ("/proxy/", "/nodes", "/pods", "/leases", "/resourceslices", "/resourceclaims")
    made = Counter(next((kind for kind in kinds if kind in one.path), "others") for one in server.requests("GET"))
    return found, made


@pytest.mark.parametrize("pods", [True, False], ids=["pods of agents", "no agents"])
async def test_requests_do_not_grow_with_the_nodes(server: FakeApiServer, pods: bool) -> None:
    """Nodes, Leases and pods are read by lists, so the number of these requests hardly grows with the nodes.

    Pods wait, and nodes have holders by limits and by claims. Each agent is asked once. Where no agent answers, only
    some nodes are asked at the port of agents outside of pods.
    """
    made: dict[int, Counter[str]] = {}
    for size in SIZES:
        populate(server, size)
        for number in range(size if pods else 0):
            server.create(agent_pod(f"n{number}"))
        server.create(user("waits", ""))
        server.create(user("old", "n0"))
        server.proxied = lambda path: (503, "connection refused")
        found, made[size] = await asked(server)
        assert len(found.nodes) == size
        for plural in ("nodes", "leases", "pods"):
            for one in server.objects(plural):
                server.delete(plural, one["metadata"]["name"], one["metadata"].get("namespace", ""))
    small, large = (made[size] for size in SIZES)
    print({kind: f"{large[kind]} for {SIZES[1]} nodes, {small[kind]} for {SIZES[0]}" for kind in large})
    most = 2 * AT_ONCE
    assert large.pop("/proxy/") == (SIZES[1] if pods else most)
    assert small.pop("/proxy/") == (SIZES[0] if pods else 30)  # The nodes that are asked first are every seventh node.
    # The first page has at most 100 objects, the next 400.
    assert small.total() < 20
    assert large.total() <= small.total() + 6


async def test_few_nodes_are_read_alone(server: FakeApiServer) -> None:
    """The status of one node lists the pods of this node only."""
    populate(server, FEW + 1)
    server.proxied = lambda path: (503, "connection refused")
    server.create(user("old", "n3"))
    await asked(server, ["n3"])
    selectors = {one.query.get("fieldSelector") for one in server.requests("GET", "/api/v1/pods")}
    assert selectors == {"spec.nodeName=,status.phase=Pending", "spec.nodeName=n3"}
    assert {one.query.get("fieldSelector") for one in server.requests("GET", "/api/v1/nodes") if one.query} == {
        "metadata.name=n3"
    }


async def test_the_nodes_are_shown_before_agents_are_asked(server: FakeApiServer) -> None:
    """The listed nodes are passed to the caller before claims, pods and agents are read."""
    populate(server, 3)
    server.proxied = lambda path: (503, "connection refused")
    shown: list[int] = []
    paths: list[str] = []

    def listed(nodes: Sequence[NodeView]) -> None:
        shown.append(len(nodes))
        paths.extend(one.path for one in server.requests("GET"))

    async with Cluster.from_server(server.url) as cluster:
        await read_status(cluster, D, (), "", listed)
    assert shown == [3]
    assert not [path for path in paths if "/proxy/" in path or "/pods" in path or "/resourceclaims" in path]


async def test_agents_outside_of_pods_are_asked_in_the_way_in_which_one_answered(server: FakeApiServer) -> None:
    """If the first agents outside of pods answer with TLS, the other nodes are asked with TLS only."""
    populate(server, 40)
    answer = {"resources": [], "holdersKnown": True}
    server.proxied = lambda path: (200, answer) if "/https:" in path else (503, "EOF")
    found, made = await asked(server)
    assert made["/proxy/"] == 40 + 14  # The nodes that are asked first, both ways, are every third node.
    why = "its agent does not serve these devices now"
    assert found.unknown == [f"unknown holders or health (?) on n0, n1, n2, n3, n4 and 35 more: {why}"]


async def test_who_may_not_ask_nodes_asks_few(server: FakeApiServer) -> None:
    """Without the right to get nodes/proxy, only 14 requests are sent, and all nodes are reported with this reason."""
    populate(server, 40)
    forbidden = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "nodes/proxy is forbidden"}
    server.proxied = lambda path: (403, forbidden)
    found, made = await asked(server)
    assert made["/proxy/"] == 14
    (text,) = found.unknown
    assert "on n0, n1, n2, n3, n4 and 35 more: no pod" in text
    assert text.endswith("this needs the right to get nodes/proxy")
