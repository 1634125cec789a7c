"""Slices, classes and rights on a real API server and scheduler. Claims are allocated without a running driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.backoff import Backoff
from deviceplugin.config import parse
from deviceplugin.device import Device, Health, Version
from deviceplugin.inventory import InventorySnapshot, merged
from deviceplugin.naming import NUMA_NODE, PCIE_ROOT
from dra_bridge import kube
from dra_bridge.manifests import Deployment, manifests, to_yaml
from dra_bridge.slices.desired import Offer, Pool, slice_name
from dra_bridge.slices.publisher import Publisher, remove_slices
from tests.cluster import build
from tests.cluster.api import Api, ApiError
from tests.cluster.node import FEATURE_GATES, Cluster
from tests.dra.slices.test_publisher import became, running

DRIVER = "gpu.example.com"
NIC = "nic.example.com"
RESOURCE = "example.com/gpu"

CONFIG = """\
resources:
  - name: example.com/gpu
    driver: gpu.example.com
    devices:
      - simulated: {count: 4}
"""


@pytest.fixture
def cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster. At the end, pods are deleted by force.

    Kubelets before 1.34 may keep a pod whose claim has no driver (kubernetes#129402).
    """
    yield cluster
    for one in cluster.api.list("pods", "default"):
        cluster.api.delete("pod", one["metadata"]["name"], grace=0)


def snapshot(*devices: Device) -> InventorySnapshot:
    return merged(InventorySnapshot(RESOURCE), devices)


def pool(cluster: Cluster, *devices: Device, replicas: int = 1) -> Pool:
    shares = {device.id: replicas for device in devices}
    return Pool(DRIVER, cluster.node_name, (Offer(snapshot(*devices), replicas=shares),))


def many(count: int, **options: Any) -> list[Device]:
    return [Device(f"gpu{number}", numa=0, **options) for number in range(count)]


def writes_of(publisher: Publisher) -> int:
    """Return the number of requests so far that are not GET."""
    return sum(count for method, count in publisher.cluster.statistics.requests.items() if method != "GET")


@contextlib.asynccontextmanager
async def publishing(cluster: Cluster, *pools: Pool, kubeconfig: Path | None = None) -> AsyncIterator[Publisher]:
    """Run a publisher of these pools. The context begins when the API server has the pools' slices."""
    backoff = Backoff(0.1, 2.0)
    async with kube.Cluster.from_environment(kubeconfig or cluster.kubeconfig, backoff=backoff) as connection:
        publisher = Publisher(connection, cluster.node_name)
        async with running(publisher, *pools):
            yield publisher


def published(cluster: Cluster) -> list[dict[str, Any]]:
    selector = f"spec.driver={DRIVER},spec.nodeName={cluster.node_name}"
    found = cluster.api.list("resourceslices", field_selector=selector)
    return sorted(found, key=lambda one: str(one["metadata"]["name"]))


def devices_of(cluster: Cluster) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for body in published(cluster):
        for device in body["spec"].get("devices", ()):
            found[device["name"]] = device.get("basic", device)
    return found


def api_version(cluster: Cluster) -> str:
    return "resource.k8s.io/" + ("v1" if cluster.minor >= 34 else "v1beta2" if cluster.minor == 33 else "v1beta1")


def device_class(cluster: Cluster, driver: str = DRIVER) -> dict[str, Any]:
    expression = f'device.driver == "{driver}"'
    return {
        "apiVersion": api_version(cluster),
        "kind": "DeviceClass",
        "metadata": {"name": driver},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }


def claim(cluster: Cluster, name: str, selector: str = "", **exactly: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"deviceClassName": DRIVER, **exactly}
    if selector:
        request["selectors"] = [{"cel": {"expression": selector}}]
    whole = {"name": "gpu", **request} if cluster.minor < 33 else {"name": "gpu", "exactly": request}
    return {
        "apiVersion": api_version(cluster),
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [whole]}},
    }


def pod(name: str, claim_name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "c",
                    "image": "localhost/none",
                    "imagePullPolicy": "Never",
                    "resources": {"claims": [{"name": "x"}]},
                }
            ],
            "resourceClaims": [{"name": "x", "resourceClaimName": claim_name}],
        },
    }


def allocated(cluster: Cluster, name: str, seconds: float = 30.0) -> list[dict[str, Any]]:
    """Start a pod with a claim, wait until the claim is allocated, and return the allocation's results."""
    cluster.api.create(pod(f"pod-{name}", name))

    def results() -> list[dict[str, Any]]:
        status = cluster.api.get("resourceclaim", name).get("status") or {}
        return list(((status.get("allocation") or {}).get("devices") or {}).get("results") or ())

    return cluster.wait_for(results, seconds, f"claim {name} is allocated")


async def test_three_devices(cluster: Cluster) -> None:
    """A pool with three devices is one slice, owned by the Node. A second publisher of the same pool writes nothing."""
    wanted = pool(cluster, *many(3))
    async with publishing(cluster, wanted) as publisher:
        (body,) = published(cluster)
        assert body["metadata"]["name"] == slice_name(cluster.node_name, DRIVER, 0)
        assert body["metadata"]["ownerReferences"][0]["kind"] == "Node"
        assert publisher.state(DRIVER).devices == {"gpu0", "gpu1", "gpu2"}
    async with publishing(cluster, wanted) as publisher:
        assert writes_of(publisher) == 0
    assert published(cluster) == [body]


async def test_three_hundred_devices(cluster: Cluster) -> None:
    """A pool with 300 devices is five slices of one generation. A new taint changes one slice. Claims are allocated."""
    async with publishing(cluster, pool(cluster, *many(300))) as publisher:
        bodies = published(cluster)
        assert [len(body["spec"]["devices"]) for body in bodies] == [64, 64, 64, 64, 44]
        writes = writes_of(publisher)
        devices = many(300)
        devices[0] = devices[0].with_health(Health.UNHEALTHY)
        await became(publisher, pool(cluster, *devices))
        bodies = published(cluster)
        assert len({body["spec"]["pool"]["generation"] for body in bodies}) == 1
        # The dry run that shows whether the server keeps taints is a request of its own.
        assert writes_of(publisher) - writes <= 2
        sizes = [64 if cluster.minor >= 33 else 63, 64, 64, 64, 44]
        assert [len(body["spec"]["devices"]) for body in bodies] == sizes
        cluster.api.create(device_class(cluster))
        cluster.api.create(claim(cluster, "all", count=20))
        assert len(await asyncio.to_thread(allocated, cluster, "all")) == 20


async def test_selectors(cluster: Cluster) -> None:
    """A claim with selectors on attributes of each type, or on capacity, gets the device that matches."""
    devices = [
        Device("a", attributes={"family": "Arc", "lanes": 8, "firmware": Version("1.9.0")}, capacity={"memory": "8Gi"}),
        Device(
            "b", attributes={"family": "Arc", "lanes": 16, "firmware": Version("1.10.0")}, capacity={"memory": "16Gi"}
        ),
        Device("c", attributes={"family": "Max", "lanes": 16, "ecc": True}, capacity={"memory": "48Gi"}, numa=1),
    ]
    async with publishing(cluster, pool(cluster, *devices)):
        cluster.api.create(device_class(cluster))
        here = f'device.attributes["{DRIVER}"]'
        numa = 'device.attributes["resource.kubernetes.io"].numaNode'
        arc = f'{here}.family == "Arc" && device.capacity["{DRIVER}"].memory.compareTo(quantity("16Gi")) >= 0'
        cluster.api.create(claim(cluster, "arc", arc))
        cluster.api.create(claim(cluster, "ecc", f'"ecc" in {here} && {here}.ecc && {numa} == 1'))
        cluster.api.create(
            claim(
                cluster,
                "old",
                f'"firmware" in {here} && {here}.firmware.isLessThan(semver("1.10.0")) && {here}.lanes < 16',
            )
        )
        for name, device in (("arc", "b"), ("ecc", "c"), ("old", "a")):
            (result,) = await asyncio.to_thread(allocated, cluster, name)
            assert (result["driver"], result["pool"], result["device"]) == (DRIVER, cluster.node_name, device)


@pytest.mark.parametrize("lists", [False, True])
async def test_devices_of_two_drivers_that_are_close(make_cluster: Callable[..., Cluster], lists: bool) -> None:
    """A claim with `matchAttribute` gets devices of two drivers with the same NUMA node, or the same PCIe root.

    A device without a NUMA node matches no other device. lists: one device lists two NUMA nodes.
    """
    if lists and int(build.default_version().split(".")[1]) < 37:
        pytest.skip("the scheduler of 1.36 matches no lists: AllocatorFeatures lacks DRAListTypeAttributes")
    cluster = make_cluster(feature_gates={"DRAListTypeAttributes": True} if lists else None)
    near, far = ({PCIE_ROOT: root} for root in ("pci0000:3a", "pci0000:80"))
    gpus = [Device("none", numa=-1), Device("gpu0", numa=0, attributes=near), Device("gpu1", numa=1, attributes=far)]
    nics = [Device("none", numa=-1), Device("nic0", attributes=near), Device("both", numa=[1, 2])]
    nics += [] if lists else [Device("nic1", numa=1)]
    of_nics = Offer(merged(InventorySnapshot("example.com/nic"), nics))
    async with publishing(cluster, pool(cluster, *gpus), Pool(NIC, cluster.node_name, (of_nics,))) as publisher:
        assert publisher.state(NIC).unsupported == (set() if lists else {"lists"})
        assert NUMA_NODE not in devices_of(cluster)["none"]["attributes"]
        for driver in (DRIVER, NIC):
            cluster.api.create(device_class(cluster, driver))
        for attribute, names in ((NUMA_NODE, {"gpu1", "both" if lists else "nic1"}), (PCIE_ROOT, {"gpu0", "nic0"})):
            name = attribute.partition("/")[2].lower()
            body = claim(cluster, name)
            (asked,) = body["spec"]["devices"]["requests"]
            other = json.loads(json.dumps(asked).replace(DRIVER, NIC)) | {"name": "nic"}
            body["spec"]["devices"] = {"requests": [asked, other], "constraints": [{"matchAttribute": attribute}]}
            cluster.api.create(body)
            results = await asyncio.to_thread(allocated, cluster, name)
            assert {result["device"] for result in results} == names
            assert {result["driver"] for result in results} == {DRIVER, NIC}


async def test_unhealthy_devices_are_not_allocated(cluster: Cluster) -> None:
    """An unhealthy device is not allocated; the waiting claim gets the device when it is healthy again."""
    async with publishing(cluster, pool(cluster, Device("a", health=Health.UNHEALTHY))) as publisher:
        if cluster.minor >= 33:
            (device,) = devices_of(cluster).values()
            assert device["taints"][0]["timeAdded"]
        else:
            assert publisher.state(DRIVER).unsupported == {"taints"}
            assert devices_of(cluster) == {}
        cluster.api.create(device_class(cluster))
        cluster.api.create(claim(cluster, "waits"))
        cluster.api.create(pod("waits", "waits"))
        await asyncio.to_thread(cluster.pod("waits").wait_unschedulable)
        await became(publisher, pool(cluster, Device("a")))
        await asyncio.to_thread(
            cluster.wait_for,
            lambda: (cluster.api.get("resourceclaim", "waits").get("status") or {}).get("allocation"),
            30.0,
            "the claim is allocated",
        )


async def test_shared_device(cluster: Cluster) -> None:
    """A device with three replicas is allocated to three claims, each with a third of its memory; a fourth waits."""
    if cluster.minor < 34:
        pytest.skip("consumable capacity came with 1.34")
    shared = pool(cluster, Device("a", capacity={"memory": "12Gi"}), replicas=3)
    async with publishing(cluster, shared):
        cluster.api.create(device_class(cluster))
        for name in ("one", "two", "three", "four"):
            cluster.api.create(claim(cluster, name))
        for name in ("one", "two", "three"):
            (result,) = await asyncio.to_thread(allocated, cluster, name)
            assert result["device"] == "a"
            assert result["consumedCapacity"] == {"memory": "4Gi", "shares": "1"}
        cluster.api.create(pod("four", "four"))
        await asyncio.to_thread(cluster.pod("four").wait_unschedulable)


async def test_partitions(cluster: Cluster) -> None:
    """A claim for a partition waits if an allocated partition has left too little of their shared counter."""
    sets = {"card0": {"memory": "80Gi"}}
    devices = [
        Device(name, counters=sets, consumes={"card0": {"memory": size}}, attributes={"size": size})
        for name, size in (("half0", "40Gi"), ("half1", "40Gi"), ("whole", "80Gi"))
    ]
    async with publishing(cluster, pool(cluster, *devices)) as publisher:
        if cluster.minor < 35:  # Kubernetes before 1.35 requires counters and devices in one slice
            assert publisher.state(DRIVER).unsupported == {"counters"}
            assert devices_of(cluster) == {}
            return
        assert "sharedCounters" in published(cluster)[0]["spec"]
        cluster.api.create(device_class(cluster))
        cluster.api.create(claim(cluster, "half", f'device.attributes["{DRIVER}"].size == "40Gi"'))
        cluster.api.create(claim(cluster, "whole", f'device.attributes["{DRIVER}"].size == "80Gi"'))
        (result,) = await asyncio.to_thread(allocated, cluster, "half")
        assert result["device"] in {"half0", "half1"}
        cluster.api.create(pod("whole", "whole"))
        await asyncio.to_thread(cluster.pod("whole").wait_unschedulable)


async def test_apiserver_restart(cluster: Cluster) -> None:
    """A pool that is requested while the API server is stopped, and a deleted slice, are written after its start."""
    async with publishing(cluster, pool(cluster, *many(3))) as publisher:
        await asyncio.to_thread(cluster.stop_apiserver)
        ticket = publisher.want(pool(cluster, *many(5)))
        await asyncio.to_thread(cluster.start_apiserver)
        await publisher.accepted(DRIVER, ticket)
        assert len(devices_of(cluster)) == 5
        assert await asyncio.to_thread(remove_all, cluster) == 1
        await asyncio.to_thread(cluster.wait_for, lambda: len(devices_of(cluster)) == 5, 10.0, "the slices are back")


def remove_all(cluster: Cluster) -> int:
    async def go() -> int:
        async with kube.Cluster.from_environment(cluster.kubeconfig) as connection:
            return await remove_slices(connection, [DRIVER], cluster.node_name)

    return asyncio.run(go())


@pytest.mark.parametrize("gate", ["DRADeviceTaints", "DRAConsumableCapacity", "DRAPartitionableDevices"])
async def test_dropped_fields(make_cluster: Callable[..., Cluster], gate: str) -> None:
    """While a feature gate is off, the publisher reports the missing feature, and publishes nothing that needs it."""
    minor = int(build.default_version().split(".")[1])
    if FEATURE_GATES[gate] > minor:
        pytest.skip(f"{gate} came with 1.{FEATURE_GATES[gate]}")
    gates = {gate: False}
    # The server does not start if an enabled gate depends on a disabled one.
    if gate == "DRADeviceTaints" and minor >= FEATURE_GATES["DRADeviceTaintRules"]:
        gates["DRADeviceTaintRules"] = False
    if gate == "DRAConsumableCapacity" and minor >= 37:
        gates["DRAFractionalCapacityRange"] = False
    cluster = make_cluster(feature_gates=gates)
    sets = {"card0": {"memory": "80Gi"}}
    devices = [
        Device("bad", health=Health.UNHEALTHY),
        Device("part", counters=sets, consumes={"card0": {"memory": "40Gi"}}),
        Device("good"),
    ]
    wanted = pool(cluster, *devices, replicas=2)
    feature = {"DRADeviceTaints": "taints", "DRAConsumableCapacity": "sharing", "DRAPartitionableDevices": "counters"}
    missing = {feature[gate]}
    missing |= {what for what, since in (("taints", 33), ("sharing", 34), ("counters", 35)) if minor < since}
    async with publishing(cluster, wanted) as publisher:
        assert publisher.state(DRIVER).unsupported == missing
        found = devices_of(cluster)
        assert ("bad" in found) == ("taints" not in missing)
        assert ("part" in found) == ("counters" not in missing)
        assert ("allowMultipleAllocations" in found["good"]) == ("sharing" not in missing)
        writes = publisher.state(DRIVER).writes
        assert writes == len(published(cluster))


async def test_manifests_are_accepted(cluster: Cluster) -> None:
    """The printed manifests can be applied; their class has the extended resource, and selects the driver's devices."""
    text = to_yaml(manifests(parse(CONFIG), CONFIG, deployment(cluster)))
    applied = cluster.api.apply(text)
    assert [one["kind"] for one in applied][-1] == "DaemonSet"
    (made,) = [one for one in applied if one["kind"] == "DeviceClass"]
    assert made["spec"].get("extendedResourceName") == (RESOURCE if cluster.minor >= 34 else None)
    try:
        async with publishing(cluster, pool(cluster, *many(2))):
            cluster.api.create(claim(cluster, "one"))
            (result,) = await asyncio.to_thread(allocated, cluster, "one")
            assert result["driver"] == DRIVER
    finally:
        remove(cluster, applied)


def deployment(cluster: Cluster, namespace: str = "dra-bridge") -> Deployment:
    version: Any = api_version(cluster).rpartition("/")[2]
    return Deployment(
        image="localhost/none",
        namespace=namespace,
        name="agent",
        version=version,
        extended_resource=cluster.minor >= 34,
        claim_status=True,
    )


def remove(cluster: Cluster, applied: list[dict[str, Any]]) -> None:
    for one in reversed(applied):
        metadata = one["metadata"]
        cluster.api.delete(one["kind"], metadata["name"], metadata.get("namespace", "default"), one["apiVersion"])


async def test_rights(cluster: Cluster) -> None:
    """A token bound to a node may write this node's slices and the status of devices in claims, and nothing else."""
    applied = cluster.api.apply(manifests(parse(CONFIG), CONFIG, deployment(cluster, "rights")))
    node = cluster.node_name
    try:
        cluster.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node2"}})
        bound = cluster.service_account_kubeconfig("agent", "rights", ("Node", node))
        api = cluster.api_with_token(cluster.service_account_token("agent", "rights", ("Node", node)))
        loose = cluster.api_with_token(cluster.service_account_token("agent", "rights"))

        # The policy is in force some seconds after it was applied.
        def foreign(driver: str = DRIVER, at: str = "node2") -> dict[str, Any]:
            return {
                "apiVersion": api_version(cluster),
                "kind": "ResourceSlice",
                "metadata": {"name": f"foreign-{at}"},
                "spec": {
                    "driver": driver,
                    "nodeName": at,
                    "pool": {"name": at, "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "x", "basic": {}} if cluster.minor < 33 else {"name": "x"}],
                },
            }

        def denied(call: Callable[[], object]) -> str:
            try:
                call()
            except ApiError as error:
                return error.message if error.code in (403, 422) else ""
            return ""

        dry = {"dryRun": "All"}
        path = f"/apis/{api_version(cluster)}/resourceslices"
        await asyncio.to_thread(
            cluster.wait_for,
            lambda: (
                "may not write ResourceSlices of node node2"
                in denied(lambda: api.request("POST", path, foreign(), **dry))
            ),
            30.0,
            "the policy is in force",
        )
        assert "not bound to a node" in denied(lambda: loose.request("POST", path, foreign(at=node), **dry))
        assert "not in the configuration" in denied(
            lambda: api.request("POST", path, foreign("other.example.com", node), **dry)
        )
        other_pool = foreign(at=node)
        other_pool["spec"]["pool"]["name"] = "node2"
        assert "may not write the pool node2" in denied(lambda: api.request("POST", path, other_pool, **dry))
        cluster.api.create(foreign())
        assert "node2" in denied(lambda: api.delete("resourceslice", "foreign-node2"))
        changed = {**cluster.api.get("resourceslice", "foreign-node2")}
        changed["spec"]["devices"][0]["name"] = "y"
        assert "node2" in denied(lambda: api.request("PUT", f"{path}/foreign-node2", changed))
        assert denied(lambda: api.patch("node", node, {"metadata": {"annotations": {"x": "y"}}}))
        assert denied(lambda: api.create(claim(cluster, "mine")))
        assert denied(lambda: api.list("secrets"))
        assert denied(lambda: api.list("pods"))

        wanted = pool(cluster, *many(2), Device("bad", health=Health.UNHEALTHY))
        async with publishing(cluster, wanted, kubeconfig=bound) as publisher:
            await became(publisher, pool(cluster, *many(70), Device("bad", health=Health.UNHEALTHY)))
            await became(publisher, pool(cluster, *many(4)))
            assert len(devices_of(cluster)) == 4
            cluster.api.create(claim(cluster, "c"))
            (result,) = await asyncio.to_thread(allocated, cluster, "c")
            async with kube.Cluster.from_environment(bound) as connection:
                found = await connection.get(kube.RESOURCE_CLAIMS, "c", "default")
                assert (await connection.list(kube.RESOURCE_CLAIMS)).items
                await connection.event(kube.RESOURCE_CLAIMS, found["metadata"], "Test", "an event", node)
                device = {key: result[key] for key in ("driver", "pool", "device")}
                condition = {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Test",
                    "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
                patch = {"status": {"devices": [{**device, "conditions": [condition]}]}}
                done = await connection.patch(kube.RESOURCE_CLAIMS, "c", patch, "default", subresource="status")
                assert done["status"]["devices"][0]["conditions"][0]["type"] == "Ready"
                theirs = {"status": {"devices": [{**device, "driver": "other.example.com"}]}}
                nothing = {"status": {"allocation": None, "reservedFor": None}}
                elsewhere = {"status": {"devices": [{**device, "pool": "node2"}]}}
                wrongs: tuple[Any, ...] = ({"status": {"reservedFor": []}}, nothing, theirs, elsewhere)
                for wrong in wrongs:
                    with pytest.raises((kube.ForbiddenError, kube.InvalidError)):
                        await connection.patch(kube.RESOURCE_CLAIMS, "c", wrong, "default", subresource="status")
                await remove_slices(connection, [DRIVER], node)
    finally:
        remove(cluster, applied)
        for kind, name in (("resourceslice", "foreign-node2"), ("node", "node2")):
            cluster.api.delete(kind, name)


MERGE = "application/merge-patch+json"


def status_patch(allocatable: Mapping[str, str | None], **more: Any) -> dict[str, Any]:
    return {"status": {"allocatable": allocatable, **more}}


FORBIDDEN = {
    "another resource": (status_patch({"example.com/other": "1"}), "resources in its configuration only"),
    "the cores": (status_patch({"cpu": "1"}), "resources in its configuration only"),
    "no number": (status_patch({RESOURCE: None}), "resources in its configuration only"),
    "more than is served": (status_patch({RESOURCE: "9"}), "a larger number than status.capacity"),
    "the capacity": (status_patch({RESOURCE: "8"}, capacity={RESOURCE: "16"}), "nothing of a Node but"),
    "a condition": (
        {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "x", "message": ""}]}},
        "nothing of a Node but",
    ),
    "an address": ({"status": {"addresses": [{"type": "Hostname", "address": "x"}]}}, "nothing of a Node but"),
    "a label": ({"metadata": {"labels": {"x": "y"}}}, "nothing of a Node but"),
    "an annotation": ({"metadata": {"annotations": {"x": "y"}}}, "nothing of a Node but"),
    "an owner": (
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}},
        "nothing of a Node but",
    ),
    "a finalizer": ({"metadata": {"finalizers": ["example.com/x"]}}, "nothing of a Node but"),
}
"""Patches of the status of its Node that an agent may not make, each with a part of the API server's message."""


def test_of_a_node_the_agent_writes_only_how_many_of_its_devices_are_allocatable(cluster: Cluster) -> None:
    """The agent may set its own resources' allocatable on its own Node, up to the capacity; the rest is refused."""
    applied = cluster.api.apply(manifests(parse(CONFIG), CONFIG, deployment(cluster, "node-status")))
    node = cluster.node_name
    numbers = {RESOURCE: "8", "example.com/other": "8"}
    try:
        cluster.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node2"}})
        for name in (node, "node2"):  # as if devices were served; a kubelet keeps resources that it does not know
            body = status_patch(numbers, capacity=numbers)
            cluster.api.request("PATCH", f"/api/v1/nodes/{name}/status", body, content_type=MERGE)
        api = cluster.api_with_token(cluster.service_account_token("agent", "node-status", ("Node", node)))
        loose = cluster.api_with_token(cluster.service_account_token("agent", "node-status"))

        def answer(body: Mapping[str, Any], at: str = node, by: Api = api) -> str:
            try:
                by.request("PATCH", f"/api/v1/nodes/{at}/status", body, content_type=MERGE, dryRun="All")
            except ApiError as error:
                if error.code not in (403, 422):
                    raise
                return error.message
            return ""

        allowed = status_patch({RESOURCE: "5"})
        # The policy is in force some seconds after it was applied.
        cluster.wait_for(lambda: "may not write" in answer(allowed, "node2"), 30.0, "the policy is in force")
        assert answer(allowed) == ""
        assert answer(status_patch({RESOURCE: "8"})) == ""
        assert answer(status_patch({RESOURCE: "0"})) == ""
        assert "may not write the status of node" in answer(allowed, by=loose)
        for what, (body, words) in FORBIDDEN.items():
            said = answer(body)
            print(f"{what}: {said}")
            assert words in said, (what, said)
        with pytest.raises(ApiError):
            api.patch("node", node, {"spec": {"unschedulable": True}})
    finally:
        remove(cluster, applied)
        cluster.api.delete("node", "node2")
        gone = status_patch(dict.fromkeys(numbers), capacity=dict.fromkeys(numbers))
        cluster.api.request("PATCH", f"/api/v1/nodes/{node}/status", gone, content_type=MERGE)


def test_of_leases_the_agent_writes_only_its_own_nodes(cluster: Cluster) -> None:
    """An agent may write its drivers' reports in its node's Lease, but no other Lease, and may not delete Leases."""
    namespace, node, report = "leases", cluster.node_name, f"{DRIVER}/handover"
    applied = cluster.api.apply(manifests(parse(CONFIG), CONFIG, deployment(cluster, namespace)))

    def lease(name: str, *annotations: str) -> dict[str, Any]:
        metadata = {"name": name, "annotations": dict.fromkeys(annotations, "{}")}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}

    def refused(by: Api, body: Mapping[str, Any], where: str = namespace, method: str = "POST") -> str:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{where}/leases"
        path += "" if method == "POST" else f"/{body['metadata']['name']}"
        kind = "application/json" if method != "PATCH" else MERGE
        try:
            by.request(method, path, None if method == "DELETE" else body, kind, dryRun="All")
        except ApiError as error:
            if error.code not in (403, 422):
                raise
            return error.message
        return ""

    try:
        cluster.api.create(lease("node2", report), namespace)
        api = cluster.api_with_token(cluster.service_account_token("agent", namespace, ("Node", node)))
        loose = cluster.api_with_token(cluster.service_account_token("agent", namespace))
        foreign = "may not write Lease node"
        cluster.wait_for(lambda: foreign in refused(api, lease("node3")), 30.0, "the policy is in force")
        assert refused(api, lease(node, report)) == ""
        assert foreign in refused(loose, lease(node, report))
        assert foreign in refused(api, lease("node2", report), method="PATCH")
        others = "drivers of its configuration only"
        assert others in refused(api, lease(node, "other.example.com/handover"))
        cluster.api.create(lease(node, report, "other.example.com/handover"), namespace)
        assert refused(api, {"metadata": {"name": node, "annotations": {report: "new"}}}, method="PATCH") == ""
        for wrong in ("other.example.com/handover", "example.com/anything"):
            body = {"metadata": {"name": node, "annotations": {wrong: "new"}}}
            assert others in refused(api, body, method="PATCH"), wrong
        for name in (node, "node2"):
            assert "cannot delete resource" in refused(api, lease(name), method="DELETE")
        for where in ("default", "kube-node-lease"):
            assert "cannot create resource" in refused(api, lease(node, report), where)
    finally:
        remove(cluster, applied)
