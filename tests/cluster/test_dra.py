"""ResourceClaims on a real node, served by an agent with exactly the rights that `dra-bridge manifests` gives it.

Two environment variables are in seconds. OUTAGE: how long the API server is away (5 by default, 60 in the long run).
QUIET: how long the agent must write nothing to the API server (12 by default).
"""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.naming import NUMA_NODE
from dra_bridge.manifests import Deployment
from tests.cluster.bridge import Bridge, env_of, seconds_until
from tests.cluster.node import PLUGINS, PLUGINS_REGISTRY, Cluster, Pod
from tests.programs import ANY_CONFIG

OUTAGE = float(os.environ.get("OUTAGE", "5"))
QUIET = float(os.environ.get("QUIET", "12"))
CDI = Path("/var/run/cdi")
ROOT = Path(__file__).parents[2]

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


def claimant(bridge: Bridge) -> Pod:
    """Create the claim "mine" and a pod with it, wait until the pod runs, and return the pod."""
    bridge.claim("mine")
    return bridge.pod("one", {"fpga": "mine"}).wait_running()


def test_a_claim_from_a_template(bridge: Bridge) -> None:
    """A pod with a claim template gets one device with the resource's variables; the claim ends with the pod."""
    bridge.template("fpgas")
    pod = bridge.pod("one", {"fpga": {"resourceClaimTemplateName": "fpgas"}}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
    claims = bridge.cluster.api.list("ResourceClaim", api_version=bridge.api_version)
    assert len(claims) == 1
    pod.delete()
    pod.wait_gone()
    bridge.cluster.wait_for(lambda: not list(CDI.glob("*.json")), 30, "the CDI file is gone")


def test_device_nodes_and_mounts(cluster: Cluster) -> None:
    """A claim's container gets the device node and the mount that an extended-resource pod would get."""
    directory = Path("/run/deviceplugin-cluster/devices/claims")
    (directory / "lib").mkdir(parents=True, exist_ok=True)
    (directory / "lib" / "hello").write_text("of the host")
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
    """Two pods share one claim; the claim's device stays prepared until the second pod has gone."""
    bridge.claim("shared")
    pods = [bridge.pod(name, {"fpga": "shared"}).wait_running() for name in ("first", "second")]
    assert [env_of(pod)["FPGA_MODE"] for pod in pods] == ["fast", "fast"]
    assert len(bridge.allocated("shared")) == 1
    pods[0].delete()
    pods[0].wait_gone()
    assert list(CDI.glob("*.json"))
    assert env_of(pods[1])["FPGA_MODE"] == "fast"


def waiting(name: str, *claims: dict[str, str]) -> dict[str, Any]:
    """Return a container that waits, with these claims."""
    return {
        "name": name,
        "image": "localhost/busybox:1",
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"],
        "resources": {"claims": list(claims)},
    }


def test_one_claim_for_two_containers(bridge: Bridge) -> None:
    """Two containers of a pod share one claim's device; a third container without the claim gets no device."""
    bridge.claim("shared")
    containers = [waiting("a", {"name": "c"}), waiting("b", {"name": "c"}), waiting("none")]
    pod = bridge.pod("both", {"c": "shared"}, containers=containers).wait_running()
    assert [env_of(pod, name).get("FPGA_MODE") for name in ("a", "b", "none")] == ["fast", "fast", None]
    assert len(bridge.allocated("shared")) == 1


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
            containers=[waiting(name, {"name": "both", "request": name}) for name in ("fpga", "card")],
        ).wait_running()
        fpga_env, card_env = env_of(pod, "fpga"), env_of(pod, "card")
        assert fpga_env.get("FPGA_MODE") == "fast"
        assert "CARD" not in fpga_env
        assert card_env.get("CARD") == "yes"
        assert "FPGA_MODE" not in card_env


def test_selectors(bridge: Bridge) -> None:
    """Claims select devices by attributes and capacity; a claim that fits no device stays pending."""
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
    """A claim gets two devices of one NUMA node by matchAttribute, and all four devices by allocationMode All."""
    bridge.claim(
        "pair",
        bridge.one("a"),
        bridge.one("b"),
        constraints=[{"requests": ["a", "b"], "matchAttribute": NUMA_NODE}],
    )
    pod = bridge.pod("pair", {"fpga": "pair"}).wait_running()
    offered = bridge.offered()
    numa = {offered[name]["attributes"][NUMA_NODE]["int"] for name in bridge.allocated("pair")}
    assert len(bridge.allocated("pair")) == 2
    assert len(numa) == 1
    pod.delete()
    pod.wait_gone()
    bridge.cluster.api.delete("ResourceClaim", "pair", api_version=bridge.api_version)
    bridge.claim("all", bridge.one(allocationMode="All"))
    bridge.pod("all", {"fpga": "all"}).wait_running()
    assert len(bridge.allocated("all")) == 4


def test_first_available(bridge: Bridge) -> None:
    """The first available alternative of a request is allocated, and the container gets it under the request's name."""
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
    cluster.allow_admin_access()
    bridge.claim("all", bridge.one(allocationMode="All"))
    bridge.pod("holder", {"fpga": "all"}).wait_running()
    bridge.claim("admin", bridge.one(allocationMode="All", adminAccess=True))
    admin = bridge.pod("admin", {"fpga": "admin"}).wait_running()
    assert env_of(admin)["FPGA_MODE"] == "fast"
    assert len(bridge.allocated("admin")) == 4


def test_shared_by_three_pods(cluster: Cluster) -> None:
    """Three pods share one device by its consumable capacity; a fourth pod waits until one of them ends."""
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
    """An unchanged pod with limits gets its devices through DRA while the device plugin offers none."""
    if bridge.cluster.minor < 35:
        # The scheduler of 1.34 leaves a resource to DRA only if the node does not list it, and 1.35 also if it lists 0.
        pytest.skip("the scheduler leaves to DRA what the plugin side offers 0 of since 1.35")
    bridge.cluster.wait_allocatable(RESOURCE, 0)
    pod = bridge.cluster.start_pod("unchanged", {RESOURCE: 2}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
    (claim,) = bridge.cluster.api.list("ResourceClaim", api_version=bridge.api_version)
    assert len(claim["status"]["allocation"]["devices"]["results"]) == 2


RESET = """
from pathlib import Path
from deviceplugin import Device, DeviceSource
from dra_bridge import run

class Fpga(DeviceSource):
    resource = "example.com/fpga"
    driver = "fpga.example.com"

    async def watch(self):
        yield [Device("sim-0")]

    def reset(self, devices):
        with Path(__file__).with_name("resets").open("a") as notes:
            notes.write("reset\\n")

run(Fpga(), share="all")
"""


def test_extended_resource_through_dra_of_a_source_with_reset(cluster: Cluster) -> None:
    """A pod with limits starts through DRA although the device's source has `reset`, which runs once for each pod.

    The pod's container can also restart while its device waits for the pod's end, to move to the device plugin.
    """
    if cluster.minor < 35:
        pytest.skip("1.34 leaves extended resources to DRA only where the node does not name them at all")

    def share(wanted: str | None) -> None:
        annotation = {"metadata": {"annotations": {f"{DRIVER}/dra-share": wanted}}}
        cluster.api.patch("Node", cluster.node_name, annotation)

    with Bridge.running(cluster, fpga(1), script=RESET) as bridge, ExitStack() as stack:
        bridge.wait_offered(1)
        resets = bridge.directory / "resets"
        for number in (1, 2):  # two pods: the kubelet would keep the options of an earlier registration
            pod = cluster.start_pod(f"through-dra-{number}", {RESOURCE: 1}).wait_running()
            assert "extendedResourceClaimStatus" in pod.status
            assert resets.read_text().splitlines() == ["reset"] * number
            if number == 2:
                share("none")
                stack.callback(share, None)
                cluster.wait_for(lambda: "the requested share of claims is none" in bridge.log(), 30, "it is heard")
                pod.restart_container()
            pod.delete()
            pod.wait_gone()
        cluster.wait_allocatable(RESOURCE, 1)
        pod = cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
        assert "extendedResourceClaimStatus" not in pod.status
        assert resets.read_text().splitlines() == ["reset"] * 3


def test_a_pod_bound_by_name(bridge: Bridge) -> None:
    """A pod with nodeName set, which bypasses the scheduler, gets the device of a claim that is already allocated."""
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
    """Parameters for a driver that accepts none are an error, which an Event of the pod reports."""
    opaque = {"driver": DRIVER, "parameters": {"apiVersion": "x/v1", "kind": "X", "mode": "turbo"}}
    bridge.claim("configured", config=[{"requests": ["one"], "opaque": opaque}])
    pod = bridge.pod("one", {"fpga": "configured"})
    assert "this driver accepts no parameters" in bridge.wait_event(pod, "parameters of the claim")
    assert not list(CDI.glob("*.json"))


def test_parameters(cluster: Cluster) -> None:
    """A source's `prepare` gets the claim's parameters, decoded; an unknown field is an error that names the field."""
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


def test_parameters_of_class_and_claim(cluster: Cluster) -> None:
    """A claim's parameters take precedence over its class's parameters, field by field."""
    with Bridge.running(cluster, fpga(), script=TUNED) as bridge:
        bridge.wait_offered(4)
        opaque = {"driver": DRIVER, "parameters": {"mode": "turbo", "volts": 7}}
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        cluster.api.apply(
            {
                "apiVersion": bridge.api_version,
                "kind": "DeviceClass",
                "metadata": {"name": "turbo"},
                "spec": {"selectors": [selector], "config": [{"opaque": opaque}]},
            }
        )
        mine = {"opaque": {"driver": DRIVER, "parameters": {"volts": 12}}}
        bridge.claim("plain", bridge.one(deviceClassName="turbo"))
        bridge.claim("mine", bridge.one(deviceClassName="turbo"), config=[mine])
        for name, tuning in (("plain", "turbo 7"), ("mine", "turbo 12")):
            assert env_of(bridge.pod(name, {"fpga": name}).wait_running())["TUNING"] == tuning


def test_conditions(cluster: Cluster) -> None:
    """With --claim-status, a claim's status says that each of its devices is prepared, and on which node."""
    with Bridge.running(cluster, fpga(), claim_status=True) as bridge:
        bridge.wait_offered(4)
        bridge.claim("mine", bridge.one(allocationMode="ExactCount", count=2))
        bridge.pod("one", {"fpga": "mine"}).wait_running()

        def told() -> list[dict[str, Any]]:
            return bridge.get_claim("mine")["status"].get("devices") or []

        bridge.cluster.wait_for(told, 10, "the claim's status tells of its devices")
        assert sorted(entry["device"] for entry in told()) == sorted(bridge.allocated("mine"))
        for entry in told():
            (condition,) = entry["conditions"]
            assert (entry["driver"], entry["pool"]) == (DRIVER, bridge.cluster.node_name)
            assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "True", "Prepared")


def test_a_claim_deleted_while_the_agent_is_down(bridge: Bridge) -> None:
    """The next agent cleans up after a pod and claim that were deleted while no agent ran."""
    pod = claimant(bridge)
    bridge.kill()
    pod.delete()
    bridge.start()
    pod.wait_gone(90)
    bridge.cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)
    bridge.cluster.wait_for(lambda: not list(CDI.glob("*.json")), 60, "the CDI file is gone")
    bridge.claim("next", bridge.one(allocationMode="All"))
    bridge.pod("next", {"fpga": "next"}).wait_running(90)


def test_a_claim_recreated_under_its_name(bridge: Bridge) -> None:
    """A claim that was replaced by a claim of the same name, while no agent ran, counts as another claim."""
    if bridge.cluster.minor < 34:
        pytest.skip("kubelets before 1.34 start the pod with the CDI devices of the claim's former namesake")
    pod = claimant(bridge)
    old = bridge.get_claim("mine")["metadata"]["uid"]
    bridge.kill()
    pod.delete(0)
    bridge.cluster.wait_for(pod.gone, 30, "the pod is gone")
    bridge.cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)

    def recreated() -> str:
        found = bridge.cluster.api.list("ResourceClaim", api_version=bridge.api_version)
        return "" if found else str(bridge.claim("mine")["metadata"]["uid"])

    new = bridge.cluster.wait_for(recreated, 30, "the claim is made again")
    bridge.start()
    bridge.wait_registered()
    assert env_of(bridge.pod("two", {"fpga": "mine"}).wait_running(90))["FPGA_MODE"] == "fast"

    def only_the_new() -> bool:
        files = "".join(path.name + path.read_text() for path in CDI.glob("*.json"))
        return new in files and old not in files

    bridge.cluster.wait_for(only_the_new, 60, "nothing is left of the first claim")


def test_a_late_prepare(bridge: Bridge) -> None:
    """A Prepare for a claim that was deleted, or replaced under the same name, is refused and leaves no files."""
    pod = claimant(bridge)
    uid = bridge.get_claim("mine")["metadata"]["uid"]
    assert bridge.call("Prepare", "mine", uid) == ""
    pod.delete()
    pod.wait_gone()
    bridge.cluster.wait_for(lambda: not list(CDI.glob("*.json")), 30, "the CDI file is gone")
    assert "not reserved" in bridge.call("Prepare", "mine", uid) or "not allocated" in bridge.call(
        "Prepare", "mine", uid
    )
    bridge.cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)
    bridge.cluster.wait_for(
        lambda: not bridge.cluster.api.list("ResourceClaim", api_version=bridge.api_version), 30, "the claim is gone"
    )
    assert "does not exist" in bridge.call("Prepare", "mine", uid)
    bridge.claim("mine")
    assert "was recreated" in bridge.call("Prepare", "mine", uid)
    assert bridge.call("Unprepare", "mine", uid) == ""
    assert bridge.call("Unprepare", "never-seen", "11111111-2222-3333-4444-555555555555") == ""
    assert not list(CDI.glob("*.json"))


def test_the_agent_is_killed(bridge: Bridge) -> None:
    """Pods run on when the agent is killed; the next agent knows their claims and serves new ones."""
    pod = claimant(bridge)
    bridge.kill()
    for file in CDI.glob("*.json"):
        file.unlink()
    bridge.start()
    bridge.wait_registered()
    bridge.cluster.wait_for(lambda: list(CDI.glob("*.json")), 30, "the CDI file is back")
    assert env_of(pod)["FPGA_MODE"] == "fast"
    bridge.claim("other")
    bridge.pod("other", {"fpga": "other"}).wait_running(90)
    assert set(bridge.allocated("mine")).isdisjoint(bridge.allocated("other"))


def test_a_rolling_update(bridge: Bridge) -> None:
    """A second agent waits until the first has ended; claims and slices stay, and new pods are served meanwhile."""
    pod = claimant(bridge)
    slices = {one["metadata"]["uid"] for one in bridge.slices()}
    bridge.start_another()
    bridge.cluster.wait_for(lambda: "standing by" in bridge.log(), 30, "the second agent stands by")
    bridge.claim("between")
    bridge.pod("two", {"fpga": "between"}).wait_running()
    bridge.stop_former()
    bridge.wait_registered()
    bridge.claim("after")
    bridge.pod("three", {"fpga": "after"}).wait_running(90)
    assert env_of(pod)["FPGA_MODE"] == "fast"
    if bridge.cluster.minor >= 33:  # before 1.33, the kubelet deletes the slices when a registration ends
        assert {one["metadata"]["uid"] for one in bridge.slices()} == slices
    devices = [bridge.allocated(name) for name in ("mine", "between", "after")]
    assert len({name for names in devices for name in names}) == 3


@pytest.mark.parametrize("rename", [False, True])
def test_the_socket_of_a_killed_agent(cluster: Cluster, rename: bool) -> None:
    """The next agent removes the sockets that a killed agent and a former version left; the pod with a claim ends.

    rename: the driver's name changes between the two agents.
    """
    with Bridge.running(cluster, fpga(1)) as bridge:
        bridge.wait_offered(1)
        bridge.claim("mine")
        pod = bridge.pod("user", {"fpga": "mine"}).wait_running()
        bridge.kill()
        (left,) = PLUGINS_REGISTRY.glob(f"{DRIVER}-*")
        two = (PLUGINS_REGISTRY / f"{DRIVER}-0123abcd-reg.sock", PLUGINS / "dra-bridge" / "dra-0123abcd.sock")
        for path in two:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        if rename:
            bridge.resources[0]["driver"] = "renamed.example.com"
            bridge.write()
            bridge._install()
        bridge.start()
        bridge.wait_registered()
        (now,) = PLUGINS_REGISTRY.glob(f"{DRIVER}-*")
        assert now != left
        assert not two[1].exists()
        pod.delete()
        pod.wait_gone(20)
        bridge.wait_offered(1)
        cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)
        bridge.claim("next")
        bridge.pod("other", {"fpga": "next"}).wait_running()


def test_a_driver_with_many_slices_is_renamed(cluster: Cluster) -> None:
    """After a driver with three slices is renamed, the agent deletes all slices with the former name."""
    with Bridge.running(cluster, fpga(130)) as bridge:
        bridge.wait_offered(130)
        assert len(bridge.slices()) == 3
        bridge.resources[0]["driver"] = other = "renamed.example.com"
        bridge.write()
        bridge._install()
        bridge.wait_offered(130, other, 60)
        assert not bridge.slices(DRIVER)


def test_the_registry_is_recreated(bridge: Bridge) -> None:
    """A driver registers again when the kubelet's directory for registrations was removed and created again."""
    bridge.cluster.stop_kubelet()
    # A rename removes the directory at once: the agent could make a new socket in it while its entries are removed.
    shutil.rmtree(PLUGINS_REGISTRY.rename(PLUGINS_REGISTRY.with_name("former_registry")))
    bridge.cluster.start_kubelet()
    bridge.claim("mine")
    assert env_of(bridge.pod("one", {"fpga": "mine"}).wait_running(90))["FPGA_MODE"] == "fast"


def test_the_kubelet_restarts(bridge: Bridge) -> None:
    """The node's slices, which the kubelet deletes at its start, are back within 2 s, and pods run on."""
    pod = claimant(bridge)
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


SLOW = """
import pathlib, time
from deviceplugin import ContainerEdits, Device, DeviceSource
from dra_bridge import run

class Fpga(DeviceSource):
    resource = "example.com/fpga"
    driver = "fpga.example.com"
    hook_timeout = 25.0

    async def watch(self):
        yield [Device(f"sim-{n}") for n in range(4)]

    def prepare(self, devices, config):
        here = pathlib.Path(__file__).parent
        (here / "begun").touch()
        while not (here / "gate").exists():
            time.sleep(0.05)
        return ContainerEdits(env={"SLOW": "yes"})

run(Fpga(), share="all")
"""


def test_the_api_server_is_away(cluster: Cluster) -> None:
    """The agent finishes a Prepare although the API server goes away meanwhile; later claims are served again."""
    with Bridge.running(cluster, fpga(), script=SLOW) as bridge:
        bridge.wait_offered(4)
        bridge.claim("mine")
        pod = bridge.pod("one", {"fpga": "mine"})
        seen = 0
        while not (bridge.directory / "begun").exists():
            seen = pod.retry(seen)
        cluster.stop_apiserver()
        gone = time.monotonic()
        (bridge.directory / "gate").touch()
        cluster.wait_for(lambda: list(CDI.glob("*.json")), 30, "the claim is prepared without an API server")
        time.sleep(max(0.0, gone + OUTAGE - time.monotonic()))  # the outage lasts this long; no condition is awaited
        cluster.start_apiserver()
        pod.wait_running(120)
        assert env_of(pod)["SLOW"] == "yes"
        bridge.claim("other")
        assert env_of(bridge.pod("two", {"fpga": "other"}).wait_running(90))["SLOW"] == "yes"


def test_an_unhealthy_device(cluster: Cluster) -> None:
    """An unhealthy device has a taint, and its health is in its pod's status, until the device recovers."""
    sick = Path("/run/deviceplugin-cluster/devices/sick-fpga")
    sick.write_text("")
    resource = fpga(devices=[{"simulated": {"count": 2, "unhealthy_file": str(sick)}}])
    with Bridge.running(cluster, resource) as bridge:
        bridge.wait_offered(2)
        # A kubelet of 1.34 reports health only for claims whose name in the pod is the claim's own name, a kubelet of
        # 1.35 only for claims from templates (dra/manager.go, UpdateAllocatedResourcesStatus).
        if cluster.minor == 35:
            bridge.template("mine")
            pod = bridge.pod("one", {"mine": {"resourceClaimTemplateName": "mine"}}).wait_running()
        else:
            bridge.claim("mine")
            pod = bridge.pod("one", {"mine": "mine"}).wait_running()
        (claim,) = cluster.api.list("ResourceClaim", api_version=bridge.api_version)
        (device,) = bridge.allocated(claim["metadata"]["name"])
        sick.write_text(f"{device} smells of smoke\n")
        if cluster.minor >= 33:
            bridge.wait_offered(1)
            (taint,) = bridge.offered()[device]["taints"]
            assert (taint["key"], taint["effect"]) == (f"{DRIVER}/unhealthy", "NoSchedule")

        def health() -> tuple[str, str]:
            for status in pod.status["containerStatuses"]:
                for entry in status.get("allocatedResourcesStatus") or ():
                    for one in entry.get("resources") or ():
                        if claim["metadata"]["uid"] in one["resourceID"]:  # the CDI device's name
                            return str(one["health"]), str(one.get("message", ""))
            return "", ""

        if cluster.minor >= 34:
            cluster.wait_for(lambda: health()[0] == "Unhealthy", 60, "the pod's status says Unhealthy")
        if cluster.minor >= 36:  # ResourceHealthStatusMessage
            assert "smells of smoke" in health()[1]
        if cluster.minor >= 33:
            bridge.stop()
            bridge.start()
            bridge.wait_registered()
            bridge.wait_offered(1)
            assert bridge.offered()[device]["taints"] == [taint]  # the taint still has the same timeAdded
        sick.write_text("")
        bridge.wait_offered(2)
        if cluster.minor >= 34:
            cluster.wait_for(lambda: health()[0] == "Healthy", 60, "the pod's status says Healthy")


def test_no_execute(cluster: Cluster) -> None:
    """With `unhealthy: NoExecute` a pod is deleted when its device becomes unhealthy."""
    if cluster.minor < 33:
        pytest.skip("device taints came with 1.33")
    sick = Path("/run/deviceplugin-cluster/devices/sick-fpga")
    sick.write_text("")
    devices = [{"simulated": {"count": 2, "unhealthy_file": str(sick)}}]
    with Bridge.running(cluster, fpga(devices=devices, dra={"share": "all", "unhealthy": "NoExecute"})) as bridge:
        bridge.wait_offered(2)
        bridge.claim("mine")
        pod = bridge.pod("one", {"fpga": "mine"}).wait_running()
        sick.write_text(f"{bridge.allocated('mine')[0]} smells of smoke\n")
        pod.wait_gone(60)


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


def test_speed_and_memory(cluster: Cluster) -> None:
    """From ten to forty claims the agent's memory grows by less than 10 %; memory and duration of calls are printed."""
    # Compile the modules first, as the image does: to compile them at the agent's start costs 4 MB that stay in use.
    for directory in (ROOT / "deviceplugin", ROOT / "dra_bridge", Path(sysconfig.get_path("purelib"))):
        compileall.compile_dir(directory, quiet=2)
    with Bridge.running(cluster, fpga()) as bridge:
        bridge.wait_offered(4)
        _forty_claims(bridge)


def _forty_claims(bridge: Bridge) -> None:
    cluster = bridge.cluster

    def total(method: str, what: str) -> float:
        version = "v1" if cluster.minor >= 34 else "v1beta1"
        labels = {"driver_name": DRIVER, "method_name": f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/{method}"}
        return cluster.metric(f"dra_grpc_operations_duration_seconds_{what}", **labels)

    methods = ("NodePrepareResources", "NodeUnprepareResources")
    before = {method: (total(method, "sum"), total(method, "count")) for method in methods}
    bridge.template("fpgas")
    memory = []
    for ten in range(4):
        claims = {"fpga": {"resourceClaimTemplateName": "fpgas"}}
        pods = [bridge.pod(f"p{ten}{number}", claims) for number in range(10)]
        waiting = pods[:]
        while waiting:  # only four pods have devices at a time
            cluster.wait_for(lambda: any(pod.phase == "Running" for pod in waiting), 120, "a pod runs")  # noqa: B023
            for pod in [one for one in waiting if one.phase == "Running"]:
                pod.delete()
                waiting.remove(pod)
        for pod in pods:
            pod.wait_gone()
        memory.append(bridge.rss() / 1024)
    figures = {"resident MiB": round(memory[-1], 1), "after ten claims": round(memory[0], 1)}
    for method in methods:
        count = total(method, "count") - before[method][1]
        figures[f"{method} ms"] = round(1000 * (total(method, "sum") - before[method][0]) / max(count, 1), 1)
        figures[f"{method} calls"] = count
    print(figures)
    assert figures["NodePrepareResources calls"] >= 40
    assert memory[-1] < 1.1 * memory[0]


def test_steady_state(bridge: Bridge) -> None:
    """While nothing changes, the agent writes nothing and has four watches: slices (two), its Node, its Lease."""
    cluster = bridge.cluster

    def counts(name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric of the API server, by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for line in cluster.api.raw("GET", "/metrics")[1].decode().splitlines():
            if line.startswith(f"{name}{{"):
                has = dict(re.findall(r'(\w+)="([^"]*)"', line))
                key = tuple(has.get(label, "") for label in labels)
                found[key] = found.get(key, 0.0) + float(line.rpartition(" ")[2])
        return found

    def writes() -> dict[tuple[str, ...], float]:
        """Return counts of writes that only the agent makes while no pod and no claim is created or deleted."""
        found: dict[tuple[str, ...], float] = {
            (resource, verb): count
            for (resource, verb), count in counts("apiserver_request_total", "resource", "verb").items()
            if resource in ("resourceslices", "resourceclaims") and verb not in ("GET", "LIST", "WATCH")
        }
        lease = cluster.api.get("Lease", cluster.node_name, Deployment().namespace)["metadata"]
        found |= {
            ("its Lease", lease["resourceVersion"]): 1.0,
        }
        # The kubelet deletes the slices of drivers that have been gone for 30 s, such as those of earlier tests.
        swept = (cluster.logs / "kubelet.log").read_text(errors="replace").count('"Deleted ResourceSlices"')
        found["resourceslices", "DELETE"] = found.get(("resourceslices", "DELETE"), 0.0) - swept
        events = cluster.api.list("Event", api_version="v1")
        found["its events",] = sum(e.get("count") or 1 for e in events if e["source"].get("component") == "dra-bridge")
        return found

    def watches() -> dict[str, float]:
        found = counts("apiserver_longrunning_requests", "resource", "verb")
        kinds = ("resourceslices", "resourceclaims", "nodes", "pods", "deviceclasses", "leases")
        return {resource: found.get((resource, "WATCH"), 0.0) for resource in kinds}

    bridge.claim("mine")
    bridge.pod("one", {"fpga": "mine"}).wait_running()
    cluster.wait_for(
        lambda: "claim default/mine" in json.dumps(bridge.report(DRIVER)),
        30,
        "the Lease tells who holds the device",
    )
    last: list[tuple[float, object]] = []

    def settled() -> bool:
        last.append((time.monotonic(), writes()))
        last[:] = [one for one in last if one[1] == last[-1][1]]
        return last[-1][0] - last[0][0] > 3.0

    cluster.wait_for(settled, 60, "what came with the pod is written")
    before = writes()
    with_agent = watches()
    time.sleep(QUIET)  # the observation lasts this long; there is no condition to wait for
    cluster.wait_for(lambda: writes() == before, 5, f"nothing was written since {before}")  # kubelet.log may be late
    bridge.stop()

    def cost() -> dict[str, float]:
        return {resource: count - watches()[resource] for resource, count in with_agent.items()}

    four = {
        "resourceslices": 2.0,
        "nodes": 1.0,
        "leases": 1.0,
        "resourceclaims": 0.0,
        "pods": 0.0,
        "deviceclasses": 0.0,
    }
    cluster.wait_for(lambda: cost() == four, 20, "the agent had two watches of slices, of its Node and of its Lease")
    bridge.start()
    bridge.wait_registered()


def test_plugin_only(cluster: Cluster) -> None:
    """`deviceplugin run` with the config of `dra-bridge run` serves only pods with limits, and loads no API client.

    Although `dra-bridge run` has ended, no pod gets the device that a running container holds by a claim.
    """
    with Bridge.running(cluster, fpga()) as bridge:
        bridge.wait_offered(4)
        bridge.claim("mine")
        claimant = bridge.pod("claimant", {"fpga": "mine"}).wait_running()
        bridge.stop()
        for one in bridge.slices():
            cluster.api.delete("ResourceSlice", one["metadata"]["name"], api_version=bridge.api_version)
        log = (cluster.logs / "plugin-only.log").open("wb")
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(bridge.config), *ANY_CONFIG]
        with log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
            try:
                cluster.wait_allocatable(RESOURCE, 3)
                pods = [cluster.start_pod(f"plain-{number}", {RESOURCE: 1}).wait_running() for number in range(3)]
                pods.append(cluster.start_pod("one-more", {RESOURCE: 1}))
                pods[-1].wait_unschedulable()
                assert env_of(pods[0])["FPGA_MODE"] == "fast"
                assert not bridge.slices()
                assert "aiohttp" not in Path(f"/proc/{process.pid}/maps").read_text()
                assert claimant.restarts() == 0
                for pod in pods:
                    pod.delete()
                for pod in pods:
                    pod.wait_gone()
            finally:
                process.send_signal(signal.SIGTERM)
        bridge.start()
        bridge.wait_registered()
        claimant.delete()
        claimant.wait_gone()


def test_extended_and_claims_agree(bridge: Bridge) -> None:
    """After all devices moved to the device plugin, a pod with limits gets the same variable as pods with claims."""
    bridge.share("none")
    bridge.cluster.wait_allocatable(RESOURCE, 4)
    assert seconds_until(bridge.cluster, lambda: not bridge.offered(), 30, "nothing is offered to claims") < 30
    pod = bridge.cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
    assert env_of(pod)["FPGA_MODE"] == "fast"
