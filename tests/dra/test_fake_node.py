"""The fake node: its scheduler decides like kube-scheduler, and its kubelet prepares allocated claims."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.demo import Printer
from deviceplugin.naming import NUMA_NODE
from deviceplugin.testing import claim_state
from dra_bridge import demo
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode, Holding, overlaps
from dra_bridge.testing.scheduler import (
    UnknownSelectorError,
    allocate,
    check,
    class_of,
    offered,
    selected,
    through,
    waits_for,
)
from tests.testing.bare import BarePlugin

CLAIMS = Path(__file__).parents[2] / "examples" / "claims"
Object = dict[str, Any]
D = "gpu.example.com"
R = "example.com/gpu"


def device(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def pool(*devices: dict[str, Any], generation: int = 1, count: int = 1, name: str = "s", node: str = "n") -> Any:
    spec = {
        "driver": D,
        "nodeName": node,
        "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
        "devices": list(devices),
    }
    return {"metadata": {"name": name}, "spec": spec}


def device_class(expression: str = f'device.driver == "{D}"', name: str = "c", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}], **spec}}


def claim(**exactly: Any) -> dict[str, Any]:
    request = {"name": "r", "exactly": {"deviceClassName": "c", **exactly}}
    return {"metadata": {"name": "x"}, "spec": {"devices": {"requests": [request]}}}


def given(wanted: dict[str, Any], *slices: dict[str, Any], taken: tuple[dict[str, Any], ...] = ()) -> list[str] | None:
    """Return the devices that the scheduler allocates to a claim."""
    found = allocate(wanted, [device_class()], slices, taken, "n")
    return None if found is None else [one["device"] for one in found["devices"]["results"]]


def allocated(*names: str, **more: Any) -> dict[str, Any]:
    results = [{"driver": D, "pool": "n", "device": name, **more} for name in names]
    return {"status": {"allocation": {"devices": {"results": results}}}}


def test_a_device_is_given_once() -> None:
    """A device that another claim is allocated is not allocated again, unless one of the claims has admin access."""
    slices = pool(device("a"), device("b"))
    assert given(claim(), slices) == ["a"]
    assert given(claim(), slices, taken=(allocated("a"),)) == ["b"]
    assert given(claim(), slices, taken=(allocated("a", "b"),)) is None
    assert given(claim(), slices, taken=(allocated("a", adminAccess=True),)) == ["a"]
    assert given(claim(adminAccess=True), slices, taken=(allocated("a"),)) == ["a"]


def test_counts_and_modes() -> None:
    """A claim gets exactly `count` devices, or with the mode All every matching device; else none."""
    slices = pool(device("a"), device("b"))
    assert given(claim(count=2), slices) == ["a", "b"]
    assert given(claim(count=3), slices) is None
    assert given(claim(allocationMode="All"), slices) == ["a", "b"]
    assert given(claim(allocationMode="All"), slices, taken=(allocated("a"),)) is None
    assert given(claim(allocationMode="All"), pool()) is None


def test_taints_repel() -> None:
    """A tainted device is not allocated unless the request tolerates the taint."""
    slices = pool(device("a", taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}]))
    assert given(claim(), slices) is None
    assert given(claim(tolerations=[{"key": "k", "operator": "Exists"}]), slices) == ["a"]
    assert given(claim(tolerations=[{"operator": "Exists", "effect": "NoExecute"}]), slices) is None
    assert given(claim(tolerations=[{"key": "k", "value": "v", "effect": "NoSchedule"}]), slices) == ["a"]
    assert given(claim(tolerations=[{"key": "k", "value": "w"}]), slices) is None


def test_pools_count_only_when_complete() -> None:
    """An incomplete pool is ignored as a whole, and slices of older generations do not count."""
    halves = [pool(device("a"), generation=2, count=2, name="s1"), pool(device("b"), generation=2, count=2, name="s2")]
    old = pool(device("z"), name="s0")
    assert [one[2]["name"] for one in offered([old, *halves], "n")] == ["a", "b"]
    assert offered([old, halves[0]], "n") == []
    assert offered(halves, "elsewhere") == []


def test_shared_devices() -> None:
    """A device with allowMultipleAllocations is allocated until its capacity is used up."""
    capacity = {"shares": {"value": "2", "requestPolicy": {"default": "1"}}}
    slices = pool(device("a", allowMultipleAllocations=True, capacity=capacity))
    assert given(claim(), slices, taken=(allocated("a"),)) == ["a"]
    assert given(claim(), slices, taken=(allocated("a"), allocated("a"))) is None
    assert given(claim(), pool(device("a", allowMultipleAllocations=True)), taken=(allocated("a"),)) == ["a"]
    odd = {"none": {"value": "500m", "requestPolicy": {"default": "0"}}, **capacity}
    assert given(claim(), pool(device("a", allowMultipleAllocations=True, capacity=odd)), taken=(allocated("a"),))
    whole = {"memory": {"value": "1Gi"}}
    assert not given(claim(), pool(device("a", allowMultipleAllocations=True, capacity=whole)), taken=(allocated("a"),))


def test_each_part_of_a_shared_device_has_a_name() -> None:
    """Each allocation of a shared device has a share ID and the consumed capacity; other allocations have neither."""
    capacity = {"shares": {"value": "2", "requestPolicy": {"default": "1"}}}
    slices = pool(device("a", allowMultipleAllocations=True, capacity=capacity))
    first, second = (allocate(claim(), [device_class()], [slices], (), "n") for _ in range(2))
    assert first is not None
    assert second is not None
    (one,), (other,) = first["devices"]["results"], second["devices"]["results"]
    assert one["shareID"] != other["shareID"]
    assert one["consumedCapacity"] == {"shares": "1"}
    alone = allocate(claim(), [device_class()], [pool(device("a"))], (), "n")
    assert alone is not None
    assert not {"shareID", "consumedCapacity"} & alone["devices"]["results"][0].keys()


@pytest.mark.parametrize(
    ("expression", "so"),
    [
        (f'device.driver == "{D}"', True),
        (f'device.driver != "{D}"', False),
        (f'device.attributes["{D}"].family == "Arc" && device.driver == "{D}"', True),
        ('device.attributes["other.org"].index == 3', True),
        (f'(device.attributes["{D}"].fast)', True),
        (f'device.attributes["{D}"].fast == false', False),
        (f'device.attributes["{D}"].missing == "x"', False),
        (f'device.capacity["{D}"].memory.compareTo(quantity("16Gi")) >= 0', True),
        (f'device.capacity["{D}"].memory.compareTo(quantity("32Gi")) > 0', False),
        (f"device.driver == '{D}' && device.attributes['{D}'].family == 'Arc'", True),
        (f"device.attributes['{D}'].family == 'It\"s'", False),
        (f"device.capacity['{D}'].memory.compareTo(quantity('16Gi')) >= 0", True),
        (f'device.capacity["{D}"].memory.isLessThan(quantity("16Gi"))', False),
        (f'device.attributes["{D}"].firmware.isGreaterThan(semver("2.0.0"))', True),
        (f'device.attributes["{D}"].firmware.isGreaterThan(semver("2.10.0"))', False),
        (f'device.attributes["{D}"].firmware.isLessThan(semver("2.9.1"))', True),
        (f'device.attributes["{D}"].firmware.compareTo(semver("2.9.1-rc.1")) == 0', True),
    ],
)
def test_selectors(expression: str, so: bool) -> None:
    """Selectors with comparisons of driver, attributes and capacity, joined by &&, are evaluated."""
    one = device(
        "a",
        attributes={
            "family": {"string": "Arc"},
            "fast": {"bool": True},
            "firmware": {"version": "2.9.1-rc.1"},
            "other.org/index": {"int": 3},
        },
        capacity={"memory": {"value": "16Gi"}},
    )
    assert selected(expression, D, one) is so


def test_more_than_is_understood() -> None:
    """Other CEL expressions and requests with alternatives raise UnknownSelectorError."""
    with pytest.raises(UnknownSelectorError, match="matches"):
        selected('device.driver.matches("x")', D, device("a"))
    wanted = {"spec": {"devices": {"requests": [{"name": "r", "firstAvailable": []}]}}}
    with pytest.raises(UnknownSelectorError, match="exactly"):
        allocate(wanted, [], [], [], "n")


@pytest.mark.parametrize("path", sorted(CLAIMS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_projects_own_claims(path: Path) -> None:
    """The example claims are accepted; those with firstAvailable raise UnknownSelectorError."""
    listed = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"].startswith("ResourceClaim")]
    for one in listed:
        body = one if one["kind"] == "ResourceClaim" else one["spec"]
        if "firstAvailable" in path.read_text():
            with pytest.raises(UnknownSelectorError, match="the fake scheduler understands"):
                check(body)
        else:
            check(body)


def test_devices_of_one_value() -> None:
    """With `matchAttribute` all devices of the requests have one common value of the attribute."""
    numa = [device(name, attributes={NUMA_NODE: {"int": node}}) for name, node in (("a", 0), ("b", 1), ("c", 1))]
    wanted = claim(count=2)
    wanted["spec"]["devices"]["constraints"] = [{"matchAttribute": NUMA_NODE}]
    assert given(wanted, pool(*numa)) == ["b", "c"]
    assert given(wanted, pool(*numa), taken=(allocated("c"),)) is None
    numa.append(device("d", attributes={NUMA_NODE: {"ints": [2, 0]}}))
    assert given(wanted, pool(*numa), taken=(allocated("c"),)) == ["a", "d"]


def test_parts_of_a_device() -> None:
    """A device that consumes counters is allocated as long as the counters suffice beside other allocations."""

    def part(name: str, memory: str) -> Object:
        return device(name, consumesCounters=[{"counterSet": "card", "counters": {"memory": {"value": memory}}}])

    slices = pool(part("whole", "16Gi"), part("half-a", "8Gi"), part("half-b", "8Gi"))
    slices["spec"]["sharedCounters"] = [{"name": "card", "counters": {"memory": {"value": "16Gi"}}}]
    assert given(claim(), slices) == ["whole"]
    assert given(claim(), slices, taken=(allocated("half-a"),)) == ["half-b"]
    assert given(claim(), slices, taken=(allocated("whole"),)) is None


def test_what_a_claim_waits_for() -> None:
    """A message names the first cause why a claim waits, such as its class, slices, selectors, taints or counters."""

    def why(wanted: Object, *slices: Object, taken: tuple[Object, ...] = ()) -> str:
        assert given(wanted, *slices, taken=taken) is None
        return waits_for(wanted, [device_class()], slices, taken, "n")

    plain, taint = device("a"), {"key": "sick", "effect": "NoSchedule"}
    assert why(claim(deviceClassName="d"), pool(plain)) == "no DeviceClass d; there are c"
    assert why(claim()) == "1 of DeviceClass c: no ResourceSlice is of node n"
    incomplete = "1 of DeviceClass c: the ResourceSlices of node n are empty or incomplete"
    assert why(claim(), pool(plain, count=2)) == incomplete
    selector = {"cel": {"expression": f'device.attributes["{D}"].model == "x"'}}
    unlike = "1 of DeviceClass c: 0 of the 1 devices in the slices match its selectors"
    assert why(claim(selectors=[selector]), pool(plain)) == unlike
    tainted = "1 of DeviceClass c: 1 match, 0 of them without a taint that it does not tolerate (sick)"
    assert why(claim(), pool(device("a", taints=[taint]))) == tainted
    used = "1 of DeviceClass c: 1 match, 0 of them not allocated to other claims"
    assert why(claim(), pool(plain), taken=(allocated("a"),)) == used
    consumes = [{"counterSet": "card", "counters": {"memory": {"value": "8Gi"}}}]
    slices = pool(device("a", consumesCounters=consumes), device("b", consumesCounters=consumes))
    slices["spec"]["sharedCounters"] = [{"name": "card", "counters": {"memory": {"value": "8Gi"}}}]
    short = "1 of DeviceClass c: 1 match and are not allocated, but too little of the shared counters is left"
    assert why(claim(), slices, taken=(allocated("a"),)) == short
    numa = [device(name, attributes={NUMA_NODE: {"int": node}}) for name, node in (("a", 0), ("b", 1))]
    wanted = claim(count=2)
    wanted["spec"]["devices"]["constraints"] = [{"matchAttribute": NUMA_NODE}]
    assert why(wanted, pool(*numa)) == f"free devices for all of its requests with one value of {NUMA_NODE}"


def test_config_of_class_and_claim() -> None:
    """Opaque parameters are in the allocation, first those of the class; without its class a claim waits."""
    wanted = claim()
    wanted["spec"]["devices"]["config"] = [{"opaque": {"driver": D, "parameters": 2}}]
    classes = [device_class(config=[{"opaque": {"driver": D, "parameters": 1}}])]
    found = allocate(wanted, classes, [pool(device("a"))], [], "n")
    assert found is not None
    assert [(one["source"], one["opaque"]["parameters"]) for one in found["devices"]["config"]] == [
        ("FromClass", 1),
        ("FromClaim", 2),
    ]
    assert allocate(claim(), [], [pool(device("a"))], [], "n") is None


def test_extended_resources_go_one_way() -> None:
    """A resource with allocatable devices comes from the plugin; with none, from the newest DeviceClass for it."""
    older = {**device_class(name="old", extendedResourceName=R)}
    newer = {**device_class(name="new", extendedResourceName=R)}
    newer["metadata"] = {**newer["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
    assert through(R, 1, [older]) is None
    assert through(R, 0, [older, newer]) == "new"
    assert through("example.com/other", 0, [older]) is None
    assert class_of("deviceclass.resource.kubernetes.io/mine", []) == "mine"


def test_overlaps() -> None:
    """Two pods that have one device at the same time overlap; otherwise there is no overlap."""
    one = Holding("a", "p", "plugin", 1.0, 2.0)
    assert overlaps([one, Holding("a", "q", "claim", 2.0)]) == []
    assert overlaps([one, Holding("b", "q", "claim", 1.5)]) == []
    assert overlaps([one, Holding("a", "p", "claim", 1.5)]) == []
    late = Holding("a", "q", "claim", 1.5)
    assert overlaps([late, one]) == [(one, late)]


@pytest.fixture
def node() -> Iterator[FakeNode]:
    """A node with a driver of two devices, and a DeviceClass for them."""
    with open("/dev/null", "w") as nowhere, demo.scene(Printer(nowhere)) as scene:
        gpus = demo.DemoGpus(2)
        with demo.in_background("plain driver", lambda: demo.plain_driver(scene, gpus)):
            scene.node.dra.wait_registered(D)
            scene.wait(lambda: len(offered(scene.server.objects(), demo.NODE)) == 2, "the slice")
            yield scene.node


def test_pods_with_claims_run_and_give_back(node: FakeNode) -> None:
    """A named claim is deallocated after its last pod; a claim from a template is deleted with its pod."""
    server = node.server
    node.claim("mine", D)
    first = node.start_pod("first", claims=["mine"]).wait_running()
    second = node.start_pod("second", claims=["mine"]).wait_running()
    third = node.start_pod("third", template={D: 1}).wait_running()
    waiting = node.start_pod("waiting", template={D: 1})
    assert node.devices_of(first) == node.devices_of(second) == {"gpu-0": "claim"}
    assert node.devices_of(third) == {"gpu-1": "claim"}
    assert waiting.phase == "Pending"
    (made,) = node.claims_of(third)
    third.delete()
    waiting.wait_running()
    assert made not in {one["metadata"]["name"] for one in server.objects("resourceclaims")}
    first.delete()
    assert server.get("resourceclaims", "mine", "default")["status"]["allocation"]
    second.complete()
    assert server.get("resourceclaims", "mine", "default")["status"] == {}
    assert [(one.pod, one.device) for one in overlaps(node.holdings())[0]] == [("first", "gpu-0"), ("second", "gpu-0")]


def test_a_claim_with_a_selector(node: FakeNode) -> None:
    """`claim` takes CEL selectors, and raises for expressions that the fake scheduler does not understand."""
    node.claim("mine", D, selectors=[f'device.driver == "{D}"'])
    node.start_pod("pod", claims=["mine"]).wait_running()
    with pytest.raises(UnknownSelectorError, match="the fake scheduler understands"):
        node.claim("other", D, selectors=["device.driver.matches('x')"])
    with pytest.raises(TypeError, match="selectors must be CEL expressions"):
        node.claim("other", D, selectors="device.driver == 'x'")


@contextlib.contextmanager
def naive(node: FakeNode, *devices: str) -> Iterator[None]:
    """Run a plugin that offers devices which claims may have, as an agent would not do."""
    plugin = BarePlugin(node.device_plugin_dir, *devices, resource=R)
    try:
        plugin.register()
        yield
    finally:
        plugin.stop()


def test_an_unchanged_pod_runs_through_dra(node: FakeNode) -> None:
    """If no plugin offers a resource, a pod with a limit gets a claim, which counts as requested on the node."""
    pod = node.start_pod("pod", {R: 1}).wait_running()
    assert node.devices_of(pod) == {"gpu-0": "claim"}
    assert pod.container().cdi_devices
    with naive(node, "gpu-0"):
        node.wait_allocatable(R, 1)
        other = node.start_pod("other", {R: 1})
        assert other.phase == "Pending"
        pod.delete()
        other.wait_running()
        assert node.devices_of(other) == {"gpu-0": "plugin"}


def test_forced_deletion_with_a_hung_runtime(node: FakeNode) -> None:
    """The claim of a pod that was deleted by force is free and unprepared while the pod's container runs."""
    pod = node.start_pod("pod", template={D: 2}).wait_running()
    pod.force_delete(hang=True)
    assert pod.running
    assert node.server.objects("resourceclaims") == []
    twin = node.start_pod("pod", template={D: 2})
    node.wait_until(lambda: bool(node.claims_of(twin)))
    (named,) = [one.name for one in claim_state.from_json(node.claim_state.read_bytes()) if pod.uid in one.pods]
    assert named not in node.claims_of(twin)
    node.reconcile_claims()
    assert not any(pod.uid in one.pods for one in claim_state.from_json(node.claim_state.read_bytes()))
    twin.wait_running()
    assert {(one.device, one.end) for one in node.holdings() if one.side == "claim"} == {
        ("gpu-0", None),
        ("gpu-1", None),
    }
    assert len(overlaps(node.holdings())) == 2
    pod.end_containers()
    assert len([one for one in node.holdings() if one.end is None]) == 2


def test_the_node_is_made_once() -> None:
    """A Node object that exists is not changed."""
    with FakeApiServer() as server:
        server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {"a": "b"}}})
        with FakeNode(server, "n"):
            assert server.get("nodes", "n")["metadata"]["labels"] == {"a": "b"}


def test_a_restarted_kubelet_counts_what_dra_serves(node: FakeNode) -> None:
    """After a restart the kubelet counts devices by DRA of other pods as used plugin devices (kubernetes#124586)."""
    older = node.start_pod("older", {R: 1}).wait_running()
    with naive(node, "gpu-0", "gpu-1"):
        node.wait_allocatable(R, 2)
        younger = node.start_pod("younger", {R: 1}).wait_running()
        assert set(node.devices_of(younger).values()) == {"plugin"}
        node.restart()
        node.wait_until(lambda: younger.terminal)
        assert younger.reason == f"OutOf{R}"
        assert younger.message == f"Node didn't have enough resource: {R}, requested: 1, used: 1, capacity: 1"
        assert older.running
