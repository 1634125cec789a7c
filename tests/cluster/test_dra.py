"""Claims on the real node: what a user of ResourceClaims gets through the DRA door.

The agent runs under exactly the rights that `dra-bridge manifests` gives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.bridge import Bridge, env_of, seconds_until
from tests.cluster.node import Cluster

DRIVER = "fpga.example.com"
RESOURCE = "example.com/fpga"


def fpga(count: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"simulated": {"count": count, "numa": 2}}],
        "env": {"FPGA_MODE": "fast"},
        "attributes": {"family": "Arc", "speed": 3},
        "capacity": {"memory": "16Gi"},
        "dra": {"share": "all"},
        **more,
    }


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    with Bridge.running(cluster, fpga()) as running:
        running.wait_offered(4)
        yield running


def test_a_claim_from_a_template(bridge: Bridge) -> None:
    """A pod with a claim template gets one device with the resource's variables; the claim ends with the pod."""
    bridge.template("fpgas")
    pod = bridge.pod("one", {"fpga": {"resourceClaimTemplateName": "fpgas"}}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
    claims = bridge.cluster.list("ResourceClaim", api_version=bridge.api_version)
    assert len(claims) == 1
    pod.delete()
    pod.wait_gone()
    bridge.cluster.wait_for(lambda: not list(Path("/var/run/cdi").glob("*.json")), 30, "the CDI file is gone")


def test_device_nodes_and_mounts(cluster: Cluster) -> None:
    """A claim's container gets the device node and the mount that an extended-resource pod would get."""
    directory = Path("/run/deviceplugin-cluster/devices/claims")
    (directory / "lib").mkdir(parents=True, exist_ok=True)
    (directory / "lib" / "hello").write_text("of the host")
    import os
    import stat

    for number in range(2):
        path = directory / f"fpga{number}"
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    resource = fpga(
        devices=[{"path": f"{directory}/fpga*"}],
        mounts=[{"host": str(directory / "lib"), "container": "/opt/fpga"}],
    )
    with Bridge.running(cluster, resource) as bridge:
        names = bridge.wait_offered(2)
        bridge.claim("mine")
        pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
        (device,) = bridge.allocated("mine")
        assert device in names
        listed = pod.exec(["ls", str(directory)]).split()
        assert len(listed) == 1
        assert pod.exec(["head", "-c", "4", str(directory / listed[0])]) == "\0\0\0\0"
        assert pod.exec(["cat", "/opt/fpga/hello"]) == "of the host"


def test_one_claim_for_two_pods(bridge: Bridge) -> None:
    """Two pods share one claim; its device stays prepared until the second one has gone."""
    bridge.claim("shared")
    pods = [bridge.pod(name, {"fpga": "shared"}).wait_running() for name in ("first", "second")]
    assert [env_of(pod)["FPGA_MODE"] for pod in pods] == ["fast", "fast"]
    assert len(bridge.allocated("shared")) == 1
    pods[0].delete()
    pods[0].wait_gone()
    assert list(Path("/var/run/cdi").glob("*.json"))
    assert env_of(pods[1])["FPGA_MODE"] == "fast"


def test_two_requests_two_containers(cluster: Cluster) -> None:
    """Each container of a pod gets the device of its own request only."""
    card = {
        "name": "example.com/card",
        "driver": DRIVER,
        "devices": [{"simulated": {"count": 2}}],
        "env": {"CARD": "yes"},
        "dra": {"share": "all"},
    }
    with Bridge.running(cluster, fpga(), card) as bridge:
        bridge.wait_offered(6)
        bridge.claim("both", bridge.one("fpga"), bridge.one("card", resource="example.com/card"))
        pod = bridge.pod(
            "two",
            {"both": "both"},
            containers=[
                {
                    "name": name,
                    "image": "localhost/busybox:1",
                    "imagePullPolicy": "Never",
                    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"],
                    "resources": {"claims": [{"name": "both", "request": name}]},
                }
                for name in ("fpga", "card")
            ],
        ).wait_running()
        fpga_env, card_env = env_of(pod, "fpga"), env_of(pod, "card")
        assert fpga_env.get("FPGA_MODE") == "fast"
        assert "CARD" not in fpga_env
        assert card_env.get("CARD") == "yes"
        assert "FPGA_MODE" not in card_env


def test_selectors(bridge: Bridge) -> None:
    """Claims select on attributes and capacity as a user writes them; what fits nowhere stays pending."""
    family = f'device.attributes["{DRIVER}"].family == "Arc"'
    memory = f'device.capacity["{DRIVER}"].memory.compareTo(quantity("16Gi")) >= 0'
    more = f'device.capacity["{DRIVER}"].memory.compareTo(quantity("32Gi")) >= 0'

    def selecting(*expressions: str) -> list[dict[str, Any]]:
        return [{"cel": {"expression": expression}} for expression in expressions]

    bridge.claim("fits", bridge.one(selectors=selecting(family, memory)))
    bridge.claim("too-much", bridge.one(selectors=selecting(family, more)))
    good = bridge.pod("good", {"fpga": "fits"}).wait_running()
    bridge.pod("bad", {"fpga": "too-much"}).wait_unschedulable()
    assert env_of(good)["FPGA_MODE"] == "fast"


def test_match_attribute_and_counts(bridge: Bridge) -> None:
    """Two devices of one NUMA node are found by matchAttribute, all devices by allocationMode All."""
    bridge.claim(
        "pair",
        bridge.one("a"),
        bridge.one("b"),
        constraints=[{"requests": ["a", "b"], "matchAttribute": f"{DRIVER}/numa"}],
    )
    pod = bridge.pod("pair", {"fpga": "pair"}).wait_running()
    offered = bridge.offered()
    numa = {offered[name]["attributes"]["numa"]["int"] for name in bridge.allocated("pair")}
    assert len(bridge.allocated("pair")) == 2
    assert len(numa) == 1
    pod.delete()
    pod.wait_gone()
    bridge.cluster.delete("ResourceClaim", "pair", api_version=bridge.api_version)
    bridge.claim("all", bridge.one(allocationMode="All"))
    bridge.pod("all", {"fpga": "all"}).wait_running()
    assert len(bridge.allocated("all")) == 4


def test_first_available(bridge: Bridge) -> None:
    """Of alternatives the first that can be had is taken, and the container gets it under the request's name."""
    if bridge.cluster.minor < 33:
        pytest.skip("prioritized lists came with 1.33")
    better = {"cel": {"expression": f'device.attributes["{DRIVER}"].speed > 10'}}
    wanted = [
        {"name": "better", "deviceClassName": bridge.classes[RESOURCE], "selectors": [better]},
        {"name": "any", "deviceClassName": bridge.classes[RESOURCE]},
    ]
    bridge.claim("choosy", {"name": "fpga", "firstAvailable": wanted})
    pod = bridge.pod(
        "choosy",
        {},
        resourceClaims=[{"name": "c", "resourceClaimName": "choosy"}],
        container={"resources": {"claims": [{"name": "c", "request": "fpga"}]}},
    ).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"


def test_admin_access(bridge: Bridge) -> None:
    """A claim with administrative access sees a device that another claim holds, without holding it."""
    cluster = bridge.cluster
    label = "resource.kubernetes.io/admin-access" if cluster.minor >= 34 else "resource.k8s.io/admin-access"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": {label: "true"}}})
    bridge.claim("all", bridge.one(allocationMode="All"))
    bridge.pod("holder", {"fpga": "all"}).wait_running()
    bridge.claim("admin", bridge.one(allocationMode="All", adminAccess=True))
    admin = bridge.pod("admin", {"fpga": "admin"}).wait_running()
    assert env_of(admin)["FPGA_MODE"] == "fast"
    assert len(bridge.allocated("admin")) == 4


def test_shared_by_three_pods(cluster: Cluster) -> None:
    """Three pods share one device by its consumable capacity, a fourth waits."""
    if cluster.minor < 34:
        pytest.skip("consumable capacity came with 1.34")
    with Bridge.running(cluster, fpga(1, sharing={"replicas": 3}, capacity={})) as bridge:
        bridge.wait_offered(1)
        bridge.template("fpgas")
        pods = [bridge.pod(f"p{n}", {"fpga": {"resourceClaimTemplateName": "fpgas"}}) for n in range(3)]
        for pod in pods:
            assert env_of(pod.wait_running())["FPGA_MODE"] == "fast"
        fourth = bridge.pod("p3", {"fpga": {"resourceClaimTemplateName": "fpgas"}})
        fourth.wait_unschedulable()
        pods[0].delete()
        fourth.wait_running()


def test_extended_resource_through_dra(bridge: Bridge) -> None:
    """An unchanged extended-resource pod runs through DRA while the plugin side offers nothing."""
    if bridge.cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    bridge.cluster.wait_allocatable(RESOURCE, 0)
    pod = bridge.cluster.start_pod("unchanged", {RESOURCE: 2}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
    (claim,) = bridge.cluster.list("ResourceClaim", api_version=bridge.api_version)
    assert len(claim["status"]["allocation"]["devices"]["results"]) == 2


def test_a_pod_bound_by_name(bridge: Bridge) -> None:
    """A pod that names its node itself gets an allocated claim's device; no scheduler looked at it."""
    bridge.claim("mine")
    first = bridge.pod("first", {"fpga": "mine"}).wait_running()
    second = bridge.pod("second", {"fpga": "mine"}, nodeName=bridge.cluster.node_name)
    # The kubelet wants the pod in the claim's reservedFor, which the scheduler or the claim controller writes.
    assert env_of(second.wait_running(60))["FPGA_MODE"] == "fast"
    assert first.phase == "Running"


TUNED = """
import msgspec
from deviceplugin import ContainerEdits, Device, DeviceSource
from dra_bridge import run

class Tuning(msgspec.Struct, kw_only=True):
    mode: str = "slow"
    volts: int = 5

class Fpga(DeviceSource):
    resource = "example.com/fpga"
    driver = "fpga.example.com"
    config_type = Tuning

    async def watch(self):
        yield [Device(f"sim-{n}") for n in range(4)]

    def prepare(self, devices, config):
        config = config or Tuning()
        return ContainerEdits(env={"TUNING": f"{config.mode} {config.volts}"})

run(Fpga(), share="all")
"""


def test_parameters_are_refused(bridge: Bridge) -> None:
    """Parameters for a driver that takes none are an error that the pod's events tell."""
    opaque = {"driver": DRIVER, "parameters": {"apiVersion": "x/v1", "kind": "X", "mode": "turbo"}}
    bridge.claim("configured", config=[{"requests": ["one"], "opaque": opaque}])
    pod = bridge.pod("one", {"fpga": "configured"})
    assert "this driver takes none" in bridge.wait_event(pod, "parameters of the claim")
    assert not list(Path("/var/run/cdi").glob("*.json"))


def test_parameters(cluster: Cluster) -> None:
    """An author's `prepare` gets its parameters, decoded; an unknown field is an error that names it."""
    with Bridge.running(cluster, fpga(), script=TUNED) as bridge:
        bridge.wait_offered(4)

        def tuned(name: str, **parameters: Any) -> Any:
            opaque = {"driver": DRIVER, "parameters": parameters}
            return bridge.claim(name, config=[{"requests": ["one"], "opaque": opaque}])

        tuned("good", mode="turbo", volts=9)
        tuned("bad", mode="turbo", bolts=9)
        assert env_of(bridge.pod("good", {"fpga": "good"}).wait_running())["TUNING"] == "turbo 9"
        pod = bridge.pod("bad", {"fpga": "bad"})
        assert "bolts" in bridge.wait_event(pod, "parameters of the claim")


def test_a_claim_deleted_while_the_agent_is_down(bridge: Bridge) -> None:
    """A pod and its claim can go while the agent is away; the next agent cleans up after them."""
    bridge.claim("mine")
    pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
    bridge.kill()
    pod.delete()
    bridge.start()
    pod.wait_gone(90)
    bridge.cluster.delete("ResourceClaim", "mine", api_version=bridge.api_version)
    bridge.cluster.wait_for(lambda: not list(Path("/var/run/cdi").glob("*.json")), 60, "the CDI file is gone")
    bridge.claim("next", bridge.one(allocationMode="All"))
    bridge.pod("next", {"fpga": "next"}).wait_running(90)


def test_the_agent_is_killed(bridge: Bridge) -> None:
    """Pods run on when the agent is killed; the next one knows their claims and serves others."""
    bridge.claim("mine")
    pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
    bridge.kill()
    for file in Path("/var/run/cdi").glob("*.json"):
        file.unlink()
    bridge.start()
    bridge.wait_registered()
    bridge.cluster.wait_for(lambda: list(Path("/var/run/cdi").glob("*.json")), 30, "the CDI file is back")
    assert env_of(pod)["FPGA_MODE"] == "fast"
    bridge.claim("other")
    bridge.pod("other", {"fpga": "other"}).wait_running(90)
    assert set(bridge.allocated("mine")).isdisjoint(bridge.allocated("other"))


def test_the_kubelet_restarts(bridge: Bridge) -> None:
    """The kubelet deletes the node's slices when it starts; they are back within 2 s, and pods run on."""
    bridge.claim("mine")
    pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
    known = {one["metadata"]["uid"] for one in bridge.slices()}
    gone: list[float] = []
    back: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set() and not back:
            now = {one["metadata"]["uid"] for one in bridge.slices()}
            if not gone and not now & known:
                gone.append(time.monotonic())
            if gone and now - known:
                back.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        bridge.cluster.restart_kubelet()
        bridge.cluster.wait_for(lambda: bool(back), 60, "the slices are back")
    finally:
        over.set()
        watcher.join()
    assert back[0] - gone[0] <= 2.0
    assert env_of(pod)["FPGA_MODE"] == "fast"
    bridge.claim("other")
    bridge.pod("other", {"fpga": "other"}).wait_running(90)


def test_the_api_server_is_away(bridge: Bridge) -> None:
    """An API server that is away during Prepare costs a wait, nothing else."""
    bridge.claim("mine")
    bridge.pod("warm", {"fpga": "mine"}).wait_running()
    bridge.claim("other")
    pod = bridge.pod("one", {"fpga": "other"})
    bridge.cluster.stop_apiserver()
    time.sleep(5)  # how long it is away, not something that is waited for
    bridge.cluster.start_apiserver()
    pod.wait_running(120)
    assert env_of(pod)["FPGA_MODE"] == "fast"


def test_an_unhealthy_device(cluster: Cluster) -> None:
    """A device that turns unhealthy carries a taint, its pod's status says so, and it recovers."""
    sick = Path("/run/deviceplugin-cluster/devices/sick-fpga")
    sick.write_text("")
    resource = fpga(devices=[{"simulated": {"count": 2, "unhealthy_file": str(sick)}}])
    with Bridge.running(cluster, resource) as bridge:
        bridge.wait_offered(2)
        bridge.claim("mine")
        pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
        (device,) = bridge.allocated("mine")
        sick.write_text(f"{device} smells of smoke\n")
        if cluster.minor >= 33:
            bridge.wait_offered(1)
            (taint,) = bridge.offered()[device]["taints"]
            assert taint["key"] == f"{DRIVER}/unhealthy"

        def health() -> str:
            for status in pod.status["containerStatuses"]:
                for entry in status.get("allocatedResourcesStatus") or ():
                    for one in entry.get("resources") or ():
                        if one["resourceID"].endswith(device) or device in one["resourceID"]:
                            return str(one["health"])
            return ""

        if cluster.minor >= 34:
            cluster.wait_for(lambda: health() == "Unhealthy", 60, "the pod's status says Unhealthy")
        sick.write_text("")
        bridge.wait_offered(2)
        if cluster.minor >= 34:
            cluster.wait_for(lambda: health() == "Healthy", 60, "the pod's status says Healthy")


def test_three_hundred_devices(cluster: Cluster) -> None:
    """300 devices make several slices of one generation, and any of them can be had."""
    with Bridge.running(cluster, fpga(300)) as bridge:
        bridge.wait_offered(300)
        slices = bridge.slices()
        assert len(slices) == 3
        assert len({one["spec"]["pool"]["generation"] for one in slices}) == 1
        assert {one["spec"]["pool"]["resourceSliceCount"] for one in slices} == {3}
        bridge.claim("many", bridge.one(allocationMode="ExactCount", count=20))
        bridge.pod("one", {"fpga": "many"}).wait_running()
        assert len(bridge.allocated("many")) == 20


def test_two_drivers(cluster: Cluster) -> None:
    """One process serves two drivers; a pod has a device of each."""
    card = {
        "name": "example.org/card",
        "driver": "card.example.org",
        "devices": [{"simulated": {"count": 2}}],
        "env": {"CARD": "yes"},
        "dra": {"share": "all"},
    }
    with Bridge.running(cluster, fpga(), card) as bridge:
        bridge.wait_offered(4, DRIVER)
        bridge.wait_offered(2, "card.example.org")
        bridge.claim("both", bridge.one("fpga"), bridge.one("card", resource="example.org/card"))
        pod = bridge.pod("one", {"both": "both"}).wait_running()
        assert env_of(pod)["FPGA_MODE"] == "fast"
        assert env_of(pod)["CARD"] == "yes"


def test_speed_memory_and_writes(bridge: Bridge, record_property: Any) -> None:
    """Forty claims come and go; the agent is quiet afterwards. The figures are printed, not judged."""
    cluster = bridge.cluster
    bridge.template("fpgas")
    for number in range(40):
        pod = bridge.pod(f"p{number}", {"fpga": {"resourceClaimTemplateName": "fpgas"}}).wait_running()
        pod.delete()
        pod.wait_gone()

    def mean(method: str) -> float:
        labels = {"driver_name": DRIVER, "method_name": f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}"}
        total = cluster.metric("dra_grpc_operations_duration_seconds_sum", **labels)
        return 1000 * total / cluster.metric("dra_grpc_operations_duration_seconds_count", **labels)

    if cluster.minor >= 34:
        print(f"Prepare {mean('NodePrepareResources'):.1f} ms, Unprepare {mean('NodeUnprepareResources'):.1f} ms")
    print(f"resident {bridge.rss() / 1024:.1f} MB")


def test_extended_and_claims_agree(bridge: Bridge) -> None:
    """The share's change moves devices to the plugin side, and what a pod gets there is the same."""
    bridge.share("none")
    bridge.cluster.wait_allocatable(RESOURCE, 4)
    assert seconds_until(bridge.cluster, lambda: not bridge.offered(), 30, "nothing is offered to claims") < 30
    pod = bridge.cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
