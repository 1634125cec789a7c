"""Moves from another vendor's plugin to this project and back, while pods run; see docs/existing-plugin.md.

The other plugin is `deviceplugin.testing.foreign`. Containers show which devices they hold by locks of the kernel
(``tests.cluster.locks``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import cdi
from deviceplugin.sources.path import device_id
from deviceplugin.testing import foreign
from dra_bridge.wire import dra_v1_pb2 as v1
from tests.cluster import locks
from tests.cluster.node import KUBELET_DIRECTORY, Pod
from tests.cluster.test_witnesses_real import LIMIT, Scene, claimer, plain, resource, scene
from tests.scenarios.sides import named
from tests.testing.bare_dra import BareDriver

__all__ = ["scene"]

CONTROL = locks.NODES.parent / "control"
"""A device node in each response of the plugin, as NVIDIA's /dev/nvidiactl is; it is not an allocatable device."""


class Vendor:
    """A vendor's plugin for the device nodes of a resource, as a process.

    answer: how containers get their devices: `nodes` as device nodes, `cdi` by the names of CDI devices in a static
    spec, `variables` by an environment variable and mounts. prefix: an id is this prefix and the node's name; if it is
    empty, the ids are those of a `path` source.
    """

    def __init__(self, scene: Scene, letter: str, answer: str = "nodes", prefix: str = "") -> None:
        self.scene = scene
        self.file = scene.cluster.logs / f"vendor-{time.monotonic_ns()}.json"
        self.log = self.file.with_suffix(".log")
        self.notes = self.file.with_suffix(".notes")
        directory = locks.NODES / letter
        if not CONTROL.exists():
            locks.make_node(CONTROL, 255)
        links = directory.parent.parent / "links"
        links.mkdir(exist_ok=True)
        ids = []
        for node in sorted(directory.iterdir()):
            ids.append(f"{prefix}{node.name}" if prefix else device_id(str(node)))
            (links / ids[-1]).unlink(missing_ok=True)
            (links / ids[-1]).symlink_to(node)
        path = f"{links}/{{id}}"
        how: dict[str, Any] = {"env": {"GADGETS": "{ids}"}}
        if answer == "nodes":
            how["nodes"] = [[path, f"{directory}/{{id}}", "rw"]]
            how["control"] = [[str(CONTROL), "/dev/gadgetctl", "rw"]]
        elif answer == "cdi":
            kind = f"{letter}.vendor.example/gadget"
            how["cdi"] = [f"{kind}={{id}}"]
            devices = [
                {"name": name, "containerEdits": {"deviceNodes": [{"path": str((links / name).resolve())}]}}
                for name in ids
            ]
            common = {"deviceNodes": [{"path": "/dev/gadgetctl", "hostPath": str(CONTROL)}]}
            spec = {"cdiVersion": "0.6.0", "kind": kind, "containerEdits": common, "devices": devices}
            file = Path(cdi.DIRECTORY) / f"vendor-{letter}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(spec))
            scene.stack.callback(file.unlink, missing_ok=True)
        else:
            how["mounts"] = [[path, f"{directory}/{{id}}"]]
        self.answer = how
        self.resources = [{"name": named(letter), "devices": dict.fromkeys(ids, "Healthy"), "answer": how}]
        self.directory: Path | None = None
        """The directory in which the plugin registers; None for the kubelet's own directory."""
        self.quirks: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        scene.stack.callback(self.stop, signal.SIGKILL)

    def start(self) -> None:
        foreign.write(self.file, self.resources, **self.quirks)
        command = [sys.executable, "-m", "deviceplugin.testing.foreign", str(self.file), "--notes", str(self.notes)]
        command += ["--directory", str(self.directory)] if self.directory else []
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Remove the plugin, as the deletion of its DaemonSet does."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(20)

    def move(self, directory: Path | None) -> None:
        """Restart the plugin so that it registers in another directory; None for the kubelet's own directory."""
        self.stop()
        self.directory = directory
        self.start()


def two_hold(scene: Scene) -> tuple[list[Pod], dict[str, str]]:
    """Start two pods that hold two of four devices; return the pods, and the keys of their locks by the pods' names."""
    scene.cluster.wait_allocatable(named("a"), 4)
    held = [scene.pod(f"before-{number}", "a") for number in range(2)]
    scene.running(*held)
    scene.before = len(locks.holders())
    return held, {pod.name: scene.key(pod) for pod in held}


def restart_container(scene: Scene, pod: Pod) -> None:
    """Kill a pod's container, and wait until it runs again with its lock."""
    before = pod.restarts()
    for pid in locks.pids(pod.uid):
        os.kill(pid, signal.SIGKILL)
    scene.cluster.wait_for(lambda: pod.restarts() > before, 60, f"{pod.name} runs again")
    scene.running(pod)


@pytest.mark.parametrize("answer", ["nodes", "variables"])
def test_another_plugin_is_replaced(scene: Scene, answer: str) -> None:
    """If resource name and device ids stay the same, the former plugin's pods run on, and keep their devices.

    No other pod gets these devices, because the kubelet's checkpoint has their ids. Agent, kubelet and container
    restart, and the devices move to claims. answer: what the former plugin's Allocate responses give to a container,
    either device nodes, or only variables and mounts.
    """
    cluster = scene.cluster
    scene.nodes("a", 4)
    vendor = Vendor(scene, "a", answer)
    vendor.start()
    held, keys = two_hold(scene)
    vendor.stop()
    cluster.wait_allocatable(named("a"), 0)
    if answer == "variables":
        scene.restart_kubelet("sigterm")
    agents = scene.serve(resource("a", "none"))
    cluster.wait_allocatable(named("a"), 4)
    after = [scene.pod(f"after-{number}", "a") for number in range(2)]
    scene.running(*after)
    scene.wait(plain("wants-plain", "a"))
    scene.restart_kubelet("sigkill")
    agents.kill()
    agents.start()
    agents.wait_registered()
    cluster.wait_allocatable(named("a"), 4)
    scene.observe(5)
    assert {pod.name: scene.key(pod) for pod in held} == keys
    restart_container(scene, held[0])
    assert scene.key(held[0]) == keys[held[0].name]
    # A pod that waits gets the device of a pod that the former plugin served.
    scene.handed_on(held[0].delete, [held[0].uid], "wants-plain")
    scene.share(a="all")
    scene.wait_states("a", to_dra=4)
    scene.wait(claimer("wants-claim", "a"))
    scene.restart_kubelet("sigterm")
    scene.observe(5)
    scene.handed_on(held[1].delete, [held[1].uid], "wants-claim")


def held_from_another_plugin(scene: Scene, gives: str) -> Pod:
    """Let another plugin give a pod a device under another id, then replace the plugin by the agent. Return the pod."""
    scene.nodes("a", 3)
    vendor = Vendor(scene, "a", gives, prefix="gadget-")
    vendor.start()
    scene.cluster.wait_allocatable(named("a"), 3)
    held = scene.pod("before", "a")
    scene.running(held)
    scene.before = len(locks.holders())
    vendor.stop()
    scene.serve(resource("a", "none"))
    return held


@pytest.mark.parametrize("answer", ["nodes", "cdi"])
def test_another_plugin_had_other_ids(scene: Scene, answer: str) -> None:
    """If device ids change, the agent finds the devices of the former plugin's pods by device nodes or CDI names."""
    cluster = scene.cluster
    held = held_from_another_plugin(scene, answer)
    cluster.wait_allocatable(named("a"), 2)
    scene.running(scene.pod("after", "a"))
    # No pod gets the idle third device: the scheduler subtracts the request of the former plugin's pod as well.
    scene.wait(plain("wants-plain", "a"))
    scene.observe(5)
    key, wants = scene.key(held), scene.waiting.pop("wants-plain")
    held.delete()
    scene.running(cluster.pod(wants["metadata"]["name"]), last := scene.pod("last", "a"))
    assert {scene.key(last), scene.key(cluster.pod("wants-plain"))} >= {key}
    scene.check()


def test_another_plugin_had_other_ids_and_gave_no_nodes(scene: Scene) -> None:
    """If device ids change, no pod gets a device while a former plugin's pod has devices that cannot be identified.

    The former plugin gave these devices by variables and mounts, which name no device node.
    """
    cluster = scene.cluster
    held = held_from_another_plugin(scene, "variables")
    cluster.wait_allocatable(named("a"), 0)
    scene.wait(plain("wants-plain", "a"))
    scene.observe(5)
    scene.waiting.pop("wants-plain")
    held.delete()
    cluster.wait_allocatable(named("a"), 3)
    scene.running(cluster.pod("wants-plain"))


# --- away from this project -------------------------------------------------------------------------------------------


def uninstall(scene: Scene, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `dra-bridge uninstall` for the drivers of the config file."""
    config, kubeconfig = str(scene.agents.config), str(scene.cluster.kubeconfig)
    command = [sys.executable, "-m", "dra_bridge", "uninstall", "--config", config, "--kubeconfig", kubeconfig]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_back_to_the_former_plugin(scene: Scene) -> None:
    """Once no claim has a device, a plugin with the same name and ids replaces the agent; pods with limits run on."""
    cluster = scene.cluster
    scene.nodes("a", 3)
    agents = scene.serve(resource("a", 1))
    cluster.wait_allocatable(named("a"), 2)
    agents.wait_offered(1)
    kept, user = scene.pod("kept", "a"), scene.claimer("user", "a")
    scene.running(kept, user)
    scene.before = len(locks.holders())
    key = scene.key(kept)
    scene.share(a="none")
    scene.wait_states("a", plugin=2, to_plugin=1)
    refused = uninstall(scene)
    assert refused.returncode == 1
    assert "claims have devices of these drivers: default/user-device-" in refused.stderr
    user.delete()
    scene.wait_states("a", plugin=3)
    agents.stop()
    # Wait for the kubelet's next report: until then the Node shows former numbers, and new pods are refused.
    cluster.wait_allocatable(named("a"), 0)
    done = uninstall(scene)
    assert (done.returncode, agents.slices()) == (0, []), done.stderr
    vendor = Vendor(scene, "a")
    vendor.start()
    cluster.wait_allocatable(named("a"), 3)
    others = [scene.pod(f"after-{number}", "a") for number in range(2)]
    scene.running(*others)
    scene.wait(plain("wants-plain", "a"))
    scene.restart_kubelet("sigterm")
    cluster.wait_allocatable(named("a"), 3)
    scene.observe(3)
    assert scene.key(kept) == key
    scene.handed_on(kept.delete, [kept.uid], "wants-plain")


class OtherDriver(BareDriver):
    """Another vendor's DRA driver for the same device nodes, independent of this project's driver."""

    NAME = "other.example.org"

    def __init__(self, scene: Scene, letter: str) -> None:
        self._cluster = scene.cluster
        paths = sorted((locks.NODES / letter).iterdir())
        spec: dict[str, Any] = {
            "cdiVersion": "0.5.0",
            "kind": f"{self.NAME}/card",
            "devices": [
                {"name": path.name, "containerEdits": {"deviceNodes": [{"path": str(path), "type": "c"}]}}
                for path in paths
            ],
        }
        self.spec = Path("/var/run/cdi/other.json")
        self.spec.parent.mkdir(parents=True, exist_ok=True)
        self.spec.write_text(json.dumps(spec))
        super().__init__(Path("/var/lib/kubelet"), self.NAME)
        node = scene.cluster.node_name
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": path.name} for path in paths]
        spec = {"driver": self.NAME, "nodeName": node, "pool": pool, "devices": devices}
        self._apply(scene, "ResourceSlice", f"{node}-other", spec)

    @classmethod
    def make_class(cls, scene: Scene) -> None:
        """Create this driver's DeviceClass; a claim that names a missing class is not allocated."""
        cls._apply(
            scene,
            "DeviceClass",
            cls.NAME,
            {"selectors": [{"cel": {"expression": f'device.driver == "{cls.NAME}"'}}]},
        )

    @staticmethod
    def _apply(scene: Scene, kind: str, name: str, spec: dict[str, Any]) -> None:
        version = scene.agents.api_version
        scene.cluster.api.apply({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})

    def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the CDI devices of each claim's allocated devices."""
        response = v1.NodePrepareResourcesResponse()
        for claim in request.claims:
            status = self._cluster.api.get("ResourceClaim", claim.name, claim.namespace)["status"]
            for result in status["allocation"]["devices"]["results"]:
                name = result["device"]
                device = response.claims[claim.uid].devices.add(pool_name=result["pool"], device_name=name)
                device.cdi_device_ids.append(f"{self.NAME}/card={name}")
                device.request_names.append(result["request"])
        return response

    def stop(self) -> None:
        """Stop the driver, and remove its CDI spec."""
        super().stop()
        self.spec.unlink(missing_ok=True)


def test_to_another_vendors_driver(scene: Scene) -> None:
    """Claims accept the classes of two drivers: after this project's agents are removed, another driver serves pods."""
    cluster = scene.cluster
    if cluster.minor < 34:
        pytest.skip("a prioritized list came with 1.34")
    scene.nodes("a", 2)
    agents = scene.serve(resource("a", "all"))
    agents.wait_offered(2)
    OtherDriver.make_class(scene)
    ours = {"name": "ours", "deviceClassName": agents.classes[named("a")]}
    other = {"name": "other", "deviceClassName": OtherDriver.NAME}
    agents.template("either", {"name": "device", "firstAvailable": [ours, other]})
    pods = [scene.claimer(f"user-{number}", "either") for number in range(2)]
    scene.running(*pods)
    scene.before = len(locks.holders())
    scene.share(a="none")
    scene.wait_states("a", to_plugin=2)
    for pod in pods:  # the pods are deleted one after the other, as in a rolling update
        pod.delete()
        pod.wait_gone()
    scene.wait_states("a", plugin=2)
    pods = [scene.claimer(f"next-{number}", "either") for number in range(2)]
    cluster.wait_for(lambda: all(pod.unschedulable() for pod in pods), LIMIT, "nobody offers a device to claims")
    agents.stop()
    assert uninstall(scene).returncode == 0
    driver = OtherDriver(scene, "a")
    scene.stack.callback(driver.stop)
    try:
        scene.running(*pods)
        scene.after = len(locks.holders())
    finally:
        for pod in cluster.pods("default"):  # the pods end while their driver still runs
            pod.delete()
        for pod in cluster.pods("default"):
            pod.wait_gone()


def test_a_claim_of_another_vendors_driver_has_a_device(scene: Scene) -> None:
    """A claim holds the device by another driver's CDI spec, also if the spec is absent for a time: no pod gets it."""
    cluster = scene.cluster
    if cluster.minor < 34:
        pytest.skip("the other driver speaks a version of the API that came with 1.34")
    scene.nodes("a", 1)
    agents = scene.serve(resource("a", "none"))
    cluster.wait_allocatable(named("a"), 1)
    OtherDriver.make_class(scene)
    driver = OtherDriver(scene, "a")
    scene.stack.callback(driver.stop)
    agents.template("other", {"name": "device", "exactly": {"deviceClassName": OtherDriver.NAME}})
    held = scene.claimer("held", "other")
    scene.running(held)
    scene.before = len(locks.holders())
    cluster.wait_allocatable(named("a"), 0)
    scene.wait(plain("wants-plain", "a"))
    scene.observe(5)
    spec = driver.spec.read_text()
    agents.stop()
    driver.spec.unlink()
    agents.start()
    agents.wait_registered()
    scene.observe(5)
    driver.spec.write_text(spec)
    scene.observe(5)
    del scene.waiting["wants-plain"]
    held.delete()
    held.wait_gone()
    scene.running(cluster.pod("wants-plain"))


def test_agents_are_just_deleted(scene: Scene) -> None:
    """Pods run on and restart without agents; pods with claims cannot end until an agent runs again."""
    cluster = scene.cluster
    scene.nodes("a", 3)
    agents = scene.serve(resource("a", 2))
    cluster.wait_allocatable(named("a"), 1)
    agents.wait_offered(2)
    kept = scene.pod("kept", "a")
    users = [scene.claimer(f"user-{number}", "a") for number in range(2)]
    scene.running(kept, *users)
    scene.before = len(locks.holders())
    agents.stop()
    restart_container(scene, kept)
    scene.restart_kubelet("sigterm")
    # A restarted kubelet deletes the slices of drivers that have not registered: no more devices are allocated here.
    cluster.wait_for(lambda: not agents.slices(), 60, "the kubelet deletes the slices")
    restart_container(scene, users[0])
    scene.wait(claimer("wants-claim", "a"))
    users[0].delete()
    scene.cluster.wait_for(lambda: not locks.pids(users[0].uid), LIMIT, "the container has ended")
    users[1].delete(0)
    users[1].wait_gone()
    scene.cluster.wait_for(lambda: not locks.pids(users[1].uid), LIMIT, "the container has ended")

    def claims() -> list[str]:
        found = cluster.api.list("ResourceClaim", "default", api_version=agents.api_version)
        return sorted(one["metadata"]["name"].partition("-device")[0] for one in found)

    cluster.wait_for(lambda: claims() == ["user-0", "wants-claim"], LIMIT, "the claim of the pod has gone with it")
    scene.observe(5)
    state = (KUBELET_DIRECTORY / "dra_manager_state").read_text()
    assert state.count("a.example.net") >= 2
    assert cluster.pod("user-0").object["metadata"]["deletionTimestamp"]
    del scene.waiting["wants-claim"]
    agents.start()
    agents.wait_registered()
    users[0].wait_gone(120)
    scene.running(cluster.pod("wants-claim"))
    scene.check()
