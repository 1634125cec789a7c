"""Hints at moves of devices between limits and claims that would let waiting pods start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deviceplugin.naming import class_name
from deviceplugin.register.records import State
from dra_bridge.kube import Cluster
from dra_bridge.rollout import waiting
from dra_bridge.rollout.fleet import NodeView, ReportedDevice
from dra_bridge.rollout.pods import nodes_by_name, pods_by_node
from dra_bridge.rollout.progress import Progress, ResourceProgress
from dra_bridge.rollout.waiting import Room, contested_names, moves_for
from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import body, claim_body, node_body

D = "gpu.example.com"
R = "example.com/gpu"
NODE = "n1"


@pytest.mark.parametrize(
    ("room", "resource", "devices", "moved"),
    [
        (Room(3, 3, 1, 4), 4, 0, -1),
        (Room(3, 3, 1, 4), 6, 0, -3),
        (Room(3, 3, 1, 4), 7, 0, 0),
        (Room(3, 3, 1, 4), 3, 0, 0),
        (Room(3, 3, 1, 4), 0, 5, 2),
        (Room(3, 3, 1, 4), 0, 7, 0),
        (Room(3, 3, 1, 4), 4, 4, 0),
        (Room(2, 1, 4, 1), 3, 0, -1),
        (Room(2, 1, 4, 1), 0, 2, 0),
        (Room(4, 1, 4, 1), 0, 2, 1),
    ],
)
def test_moves_for(room: Room, resource: int, devices: int, moved: int) -> None:
    """A hint moves only the devices that a pod lacks, and none if they are too few or other pods need them."""
    assert moves_for(room, resource, devices) == moved


def pod(name: str, count: int = 0, node: str = "", claim: str = "", **status: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "main", "resources": {"limits": {R: str(count)} if count else {}}}]}
    if node:
        spec["nodeName"] = node
    if claim:
        spec["resourceClaims"] = [{"name": "c", "resourceClaimName": claim}]
    return body("Pod", name, "default", spec=spec, status={"phase": "Pending"} | status)


def view(**states: State) -> NodeView:
    devices = tuple(
        ReportedDevice(resource=R, name=name, state=state, since=0, holder="claim x/y" if name == "held" else "")
        for name, state in states.items()
    )
    return NodeView(NODE, D, reported=Progress({R: ResourceProgress("4", {})}), devices=devices)


FOUR_EACH = {f"d{number}": State.PLUGIN for number in range(4)} | {f"e{number}": State.DRA for number in range(3)}


def node(number: int) -> dict[str, Any]:
    return node_body(NODE, capacity={R: "8"}, allocatable={R: str(number)})


async def hints(cluster: Cluster, here: NodeView) -> list[str]:
    """Read from the API server what hints need, and return the hints."""
    waits = await waiting.waits(cluster, [here])
    found = await nodes_by_name(cluster, [NODE]), await pods_by_node(cluster, [NODE], [R])
    return waiting.hints([here], *found, waits)


async def test_a_pod_that_asks_for_more_than_either_side_has() -> None:
    """A pod asks for four devices, three are free for limits and three for claims: the hint is to move one device."""
    with FakeApiServer() as server:
        server.create(node(4))
        server.create(pod("runs", 1, NODE, phase="Running"))
        server.create(pod("over", 1, NODE, phase="Succeeded"))
        server.create(pod("waits", 4))
        here = view(**FOUR_EACH, held=State.DRA)
        async with Cluster.from_server(server.url) as cluster:
            (hint,) = await hints(cluster, here)
    assert hint == (
        f"n1: pod default/waits waits for 4 {R}; 3 are free on the plugin side and 3 on the DRA side. "
        f"1 more device on the plugin side would be enough: dra-bridge migrate n1 --driver {D} --share 3"
    )


def test_devices_that_are_withheld_explain_why_none_is_free() -> None:
    """A withheld device is not allocatable, although its pod's request still counts, so hints name the device."""
    first, *others = view(a=State.PLUGIN, b=State.PLUGIN, c=State.DRA).devices
    withheld = msgspec.structs.replace(first, withheld="not known")
    here = replace(view(), devices=(withheld, *others))
    waits = [waiting.wait_of(pod("waits", 1), ())]
    (hint,) = waiting.hints_of(here, node(1), [pod("runs", 1, NODE, phase="Running")], waits)
    assert "; 0 are free on the plugin side and 1 on the DRA side; withheld: a. 1 more device on the plugin" in hint
    assert "withheld" not in waiting.hints_of(view(c=State.DRA), node(0), [], waits)[0]


async def test_a_pod_whose_claim_asks_for_more_than_is_idle() -> None:
    """If a pod's claim waits, a hint says how many devices to move to DRA; an allocated claim has no hint."""
    with FakeApiServer() as server:
        server.create(node(4))
        server.create(pod("waits", claim="c"))
        server.create(claim_body("c", D, count=5))
        here = view(**FOUR_EACH, held=State.DRA)
        async with Cluster.from_server(server.url) as cluster:
            (hint,) = await hints(cluster, here)
            assert "2 more devices on the DRA side would be enough" in hint
            assert hint.endswith("--share 6")
            server.replace({**server.get("resourceclaims", "c", "default"), "status": {"allocation": {"devices": {}}}})
            assert await hints(cluster, here) == []


async def test_where_no_pod_waits_one_list_is_read() -> None:
    """If no pod waits, the hints about moves cost one list of pods."""
    with FakeApiServer() as server:
        server.create(node(4))
        async with Cluster.from_server(server.url) as cluster:
            assert await waiting.waits(cluster, [view(**FOUR_EACH)]) == []
        assert [one.path for one in server.requests("GET") if "pods" in one.path or "nodes" in one.path] == [
            "/api/v1/pods"
        ]


def device_class(name: str, at: str, resource: str | None = R) -> dict[str, Any]:
    spec = {"extendedResourceName": resource} if resource else {}
    return {"metadata": {"name": name, "creationTimestamp": f"2026-01-{at}T00:00:00Z"}, "spec": spec}


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (
            [
                device_class("ours", "01"),
                device_class("other", "02", "example.com/other"),
                device_class("x", "03", None),
            ],
            [],
        ),
        ([device_class("ours", "01"), device_class("theirs", "02")], ["theirs"]),
        ([device_class("ours", "03"), device_class("theirs", "02")], ["ours"]),
        ([device_class("b", "01"), device_class("a", "01"), device_class("c", "01")], ["a"]),
    ],
)
def test_classes_that_name_one_extended_resource(classes: list[dict[str, Any]], said: list[str]) -> None:
    """If several DeviceClasses name a resource, the newest is used; at equal age, the first by name."""
    names = ", ".join(sorted(one["metadata"]["name"] for one in classes))
    text = f"DeviceClasses {names} all name the extended resource {R}: pods with limits for it get devices of class "
    assert [*contested_names([R, R], classes).items()] == [(R, (one, text + one)) for one in said]


@pytest.mark.parametrize("taken", [{}, {R: class_name(R, D)}, {R: "former"}])
def test_no_move_is_named_while_pods_get_devices_of_another_class(taken: dict[str, str]) -> None:
    """If pods get devices by a former driver's DeviceClass, this class has to be deleted, so hints name no move."""
    waits = [waiting.wait_of(pod("waits", 1), ())]
    found = waiting.hints_of(view(c=State.DRA), node(0), [], waits, taken)
    assert bool(found) is (taken != {R: "former"})
