"""Claims for devices of an adopted plugin: `dra-bridge run --adopt` with a stand-in plugin, on the fake node."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.testing import FakePod, PodFailedError
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class
from tests.adoption.behind import Adopted
from tests.adoption.test_limits import FORMS, SPEC
from tests.kubeconfigs import written
from tests.scenarios.fake import AgentProcess
from tests.scenarios.node import wait_for
from tests.testing.vendor import RESOURCE, Vendor, resource

D = "gadget.vendor.example"
NODE = "node"


class Scene(Adopted):
    """The fake node, an agent that serves limits and claims, and a stand-in plugin in the agent's directory."""

    def __init__(self, node: FakeNode, where: Path) -> None:
        super().__init__(where)
        self.node = node
        self.kubeconfig = written(where / "kubeconfig", node.server.url)
        self.write()

    def write(self, plugin: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Write the config of the adopted resource. plugin: keys under `plugin` beside `claims`. more: other keys."""
        one = {"name": RESOURCE, "driver": D, "devices": [{"plugin": {"claims": True, **(plugin or {})}}]}
        self.write_config({**one, "dra": {"share": "all"}, **more})

    def agent(self, *more: str, adopts: bool = True) -> AgentProcess:
        """Start the agent; if it adopts plugins, wait until they can register with it. more: further options."""
        options = [*self.node.arguments, "--kubeconfig", str(self.kubeconfig)]
        return self.run_agent("tests.kubeconfigs", *options, "--node-name", self.node.name, *more, adopts=adopts)

    def wait_offered(self, count: int) -> list[dict[str, Any]]:
        """Wait until ResourceSlices offer `count` devices, and return these devices."""

        def offered() -> list[dict[str, Any]]:
            slices = self.node.server.objects("resourceslices")
            return [one for slice_ in slices for one in slice_["spec"].get("devices", ()) if not one.get("taints")]

        wait_for(f"{count} devices in slices", lambda: len(offered()) == count, 20)
        return offered()

    def claimed(self) -> tuple[AgentProcess, Vendor, FakePod]:
        """Start agent, plugin and a pod; the pod's claim has one of the plugin's two devices."""
        agent, vendor = self.agent(), self.vendor(resource("g0", "g1", env={"GADGETS": "{ids}"}))
        self.wait_offered(2)
        return agent, vendor, self.pod().wait_running()

    def pod(self, name: str = "p", count: int = 1) -> FakePod:
        """Start a pod with a claim of its own for `count` devices."""
        return self.node.start_pod(name, template={D: count})


@pytest.fixture
def scene() -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory(prefix="adopt-") as where,  # pytest's paths are too long for sockets
        FakeApiServer() as server,
    ):
        server.create(device_class(RESOURCE, D))
        with FakeNode(server, NODE) as node:
            made = Scene(node, Path(where))
            try:
                yield made
            finally:
                made.end()


def test_the_agent_is_ready_before_its_plugin(scene: Scene) -> None:
    """An agent without its plugin is ready; /status has a problem that names the missing plugin."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    scene.agent("--metrics-address", address)

    def ready() -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://{address}/readyz", timeout=10).status == 200)
        except OSError:
            return False

    wait_for("the agent to be ready", ready, 20)
    with urllib.request.urlopen(f"http://{address}/status", timeout=10) as answer:
        (problem,) = json.load(answer)["problems"]
    assert problem.startswith(f"{RESOURCE}: the vendor's plugin is not registered with the agent since ")
    scene.vendor()
    scene.wait_offered(2)
    wait_for("the agent to be ready with it", ready, 20)


def test_a_claim_gets_what_the_plugin_says(scene: Scene) -> None:
    """A claim gets the variables, nodes, mounts and CDI devices that the plugin's Allocate gives for its devices."""
    scene.agent()
    answer: dict[str, Any] = {
        "env": {"GADGETS": "{ids}"},
        "nodes": [["/dev/null", "/dev/inside-{id}", "rw"]],
        "control": [["/dev/zero", "/dev/ctl", "r"]],
        "mounts": [[str(scene.where), "/opt/lib"]],
        "annotations": {"cdi.k8s.io/{random}": "vendor.example/gadget=all"},
        "cdi": ["vendor.example/gadget={id}"],
    }
    vendor = scene.vendor(resource("g0", "GPU-1::0", **answer))
    scene.wait_offered(2)
    pod = scene.pod(count=2).wait_running()
    (call,) = vendor.calls("Allocate")
    assert call["containers"] == 1
    assert sorted(call["ids"]) == ["GPU-1::0", "g0"]
    edits = scene.node.edits_of(pod)
    assert dict(edits.env) == {"GADGETS": ",".join(call["ids"])}
    assert {one.container for one in edits.device_nodes} == {"/dev/inside-g0", "/dev/inside-GPU-1::0", "/dev/ctl"}
    assert [(one.host, one.container, one.readonly) for one in edits.mounts] == [(str(scene.where), "/opt/lib", True)]
    assert set(edits.cdi) == {f"vendor.example/gadget={name}" for name in ("g0", "GPU-1::0", "all")}


OTHER, OTHER_D = "example.com/terminal", "terminal.example.com"


@pytest.mark.parametrize("form", ["nodes", "cdi"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_node_that_another_resource_lists_as_well(scene: Scene, restart: bool, form: str) -> None:
    """While a claim has a device node through the plugin, no other resource gives this node to a pod or claim."""
    scene.node.server.create(device_class(OTHER, OTHER_D))
    adopted = {"name": RESOURCE, "driver": D, "devices": [{"plugin": {"claims": True}}], "dra": {"share": "all"}}
    other = {"name": OTHER, "driver": OTHER_D, "devices": [{"path": "/dev/tty"}]}
    scene.write_config(adopted, other)
    agent = scene.agent()
    directory = scene.node.cdi
    directory.mkdir(exist_ok=True)
    (directory / "vendor.yaml").write_text(SPEC)
    scene.vendor(resource(**FORMS[form]))
    scene.wait_offered(2)
    scene.node.wait_allocatable(OTHER, 1)
    first, second = scene.pod("first").wait_running(), scene.pod("second").wait_running()
    scene.node.wait_allocatable(OTHER, 0)
    if restart:
        agent.kill()
        scene.agent()
        scene.wait_log(f"{OTHER}: registered as")
    with pytest.raises(PodFailedError):
        scene.node.run_pod("third", {OTHER: 1})
    first.delete()
    scene.write_config(adopted, {**other, "dra": {"share": "all"}})
    waiting = scene.node.start_pod("fourth", template={OTHER_D: 1})
    scene.wait_log("are the same hardware")
    assert waiting.phase == "Pending"
    second.delete()
    waiting.wait_running()


def test_a_node_that_a_pod_has_from_another_resource(scene: Scene) -> None:
    """While a pod has a device node through another resource, a claim for the plugin's device with this node waits."""
    adopted = {"name": RESOURCE, "driver": D, "devices": [{"plugin": {"claims": True}}], "dra": {"share": "all"}}
    scene.write_config(adopted, {"name": OTHER, "devices": [{"path": "/dev/tty"}]})
    scene.agent()
    scene.vendor(resource("g0", nodes=[["/dev/tty", "/dev/tty", "rw"]]))
    scene.wait_offered(1)
    first = scene.node.run_pod("first", {OTHER: 1})
    second = scene.pod("second")
    scene.wait_log("are the same hardware")
    scene.wait_offered(0)
    assert second.phase == "Pending"
    first.delete()
    second.wait_running()


def test_slices_have_what_consumers_look_for(scene: Scene) -> None:
    """Slices have the attributes and the capacity of the config, with the plugin's device id in place of {id}."""
    name = {"k8s.cni.cncf.io/deviceID": "{id}", "k8s.cni.cncf.io/resourceName": RESOURCE}
    scene.write(attributes={**name, "model": "g1"}, capacity={"memory": "1Gi"})
    scene.agent()
    scene.vendor(resource("0000:3b:00.1"))
    (device,) = scene.wait_offered(1)
    assert device["name"].startswith("0000-3b-00-1--")
    assert device["capacity"]["memory"]["value"] == "1Gi"
    attributes = {key: value.get("string") for key, value in device["attributes"].items()}
    assert attributes["k8s.cni.cncf.io/deviceID"] == "0000:3b:00.1"
    assert (attributes["k8s.cni.cncf.io/resourceName"], attributes["model"]) == (RESOURCE, "g1")


def test_sides(scene: Scene) -> None:
    """If one of two devices is for claims, a claim gets one device, and a pod with limits gets the other."""
    scene.write(dra={"share": 1})
    scene.agent()
    scene.vendor(resource("g0", "g1", env={"GADGETS": "{ids}"}))
    scene.wait_offered(1)
    scene.node.wait_allocatable(RESOURCE, 1)
    claimed, limited = scene.pod().wait_running(), scene.node.run_pod("q", {RESOURCE: 1})
    held = {scene.node.edits_of(claimed).env["GADGETS"], limited.env["GADGETS"]}
    assert held == {"g0", "g1"}


@pytest.mark.parametrize("reload", [False, True])
def test_devices_of_a_resource_that_is_passed_through_return(scene: Scene, *, reload: bool) -> None:
    """If the config no longer names the resource when its plugin registers, all its devices are for limits again."""
    agent = scene.agent()
    vendor = scene.vendor(resource("g0", "g1"))
    scene.wait_offered(2)
    vendor.stop()
    scene.wait_log("the vendor's plugin has disconnected")
    new = {"resources": [{"name": "example.com/sim", "devices": [{"simulated": {"count": 1}}]}]}
    if reload:
        agent.reload(json.dumps(new))
        scene.wait_log("was read again")
    else:
        agent.terminate()
        scene.config.write_text(json.dumps(new))
        scene.agent()
    vendor.start()
    scene.wait_log("its plugin serves pods by limits only")
    scene.wait_offered(0)
    scene.node.wait_allocatable(RESOURCE, 2)


# The patch of the plugin's hostPath is reverted, so that the plugin registers with the kubelet, not with the agent.


def events(scene: Scene) -> list[str]:
    return [one["reason"] for one in scene.node.server.objects("events")]


def kept_from_pods(scene: Scene, past: Vendor) -> None:
    """Check that a pod with limits fails at admission, since claims have devices, and the plugin gets no Allocate."""
    before = len(past.calls("Allocate"))
    pod = scene.node.run_pod("limited", {RESOURCE: 1}, check=False)
    assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")
    assert len(past.calls("Allocate")) == before


def test_a_reverted_path_of_a_plugin_that_lists_what_the_agent_lists(scene: Scene) -> None:
    """If a plugin registers the agent's devices with the kubelet, the agent registers again, and writes an Event."""
    _, vendor, claimed = scene.claimed()
    vendor.stop()
    scene.wait_log("the vendor's plugin has disconnected")
    vendor.health(g0="Unhealthy", g1="Unhealthy")
    vendor.directory = scene.node.device_plugin_dir
    vendor.start()
    scene.wait_log("another plugin has registered this resource with the kubelet: the socket")
    scene.wait_log("instead of this agent, while claims have devices")
    scene.wait_log("registered again")
    wait_for("the Event", lambda: "AdoptedPluginBypassed" in events(scene), 10)
    kept_from_pods(scene, vendor)
    assert len(vendor.calls("Allocate")) == 1
    assert claimed.running


def test_a_plugin_of_another_resource_comes_back_while_the_adopted_one_is_away(scene: Scene) -> None:
    """Another resource's plugin restarts while the adopted one is away: the agent registers again, without an Event."""
    other = scene.vendor(resource("o0", name="other.example/gadget"))
    other.move(scene.node.device_plugin_dir)
    scene.node.wait_allocatable("other.example/gadget", 1)
    _, vendor, claimed = scene.claimed()
    vendor.stop()
    scene.wait_log("the vendor's plugin has disconnected")
    other.stop()
    other.start()
    scene.wait_log("another plugin may have registered this resource: the socket")
    scene.wait_log("registered again")
    assert "instead of this agent" not in scene.agents[-1].log()
    assert "AdoptedPluginBypassed" not in events(scene)
    assert claimed.running


def test_an_agent_that_starts_after_the_path_was_reverted(scene: Scene) -> None:
    """If the plugin is registered with the kubelet when the agent starts, the agent registers; pods get no device."""
    agent, vendor, claimed = scene.claimed()
    agent.terminate()
    vendor.move(scene.node.device_plugin_dir)
    scene.node.wait_allocatable(RESOURCE, 2)
    scene.agent()
    scene.wait_log("another plugin has registered this resource with the kubelet: its checkpoint has g0")
    scene.wait_offered(0)
    scene.node.wait_allocatable(RESOURCE, 0)
    kept_from_pods(scene, vendor)
    # The plugin sends a new list, and a pod is admitted before the agent notices: the agent gets the Allocate call.
    agent = scene.agents[-1]
    agent.process.send_signal(signal.SIGSTOP)
    vendor.health(g0="Healthy", g1="Healthy", g2="Healthy")
    scene.node.wait_allocatable(RESOURCE, 3)
    pod = scene.node.start_pod("scheduled", {RESOURCE: 3})
    scene.node.wait_until(lambda: any(one.method == "Allocate" and one.done is None for one in scene.node.rpc_log))
    agent.process.send_signal(signal.SIGCONT)
    scene.node.wait_until(lambda: pod.terminal)  # Allocate is refused, or not called if the agent was faster
    assert not pod.running
    assert len(vendor.calls("Allocate")) == 1
    assert claimed.running
    # No claim is left, so the agent does not register again, and the kubelet counts the plugin as stopped.
    claimed.delete()
    scene.wait_log("restart the plugin's pod")
    scene.node.wait_until(lambda: scene.node.streams(RESOURCE) == 1)
    assert scene.node.allocatable(RESOURCE) == 0
    vendor.stop()
    vendor.start()
    scene.node.wait_allocatable(RESOURCE, 3)


@pytest.mark.parametrize(
    "how", ["reload", "two reloads", "restart", "restart that adopts nothing", "restart without ledger"]
)
def test_a_reverted_path_after_the_config_has_dropped_the_resource(scene: Scene, how: str) -> None:
    """The config has dropped a resource, and its plugin registers with the kubelet: pods get no device of a claim.

    Unless the ledger is lost, the agent writes an Event, as if the config still named the resource. "adopts nothing":
    the agent has no `--adopt`, as in manifests without an adopted resource.
    """
    adopts = how != "restart that adopts nothing"
    agent, vendor, claimed = scene.claimed()
    other = {"name": "example.com/sim", "devices": [{"simulated": {"count": 1}}]}
    if how.startswith("restart"):
        agent.terminate()
        scene.write_config(other)
        if how == "restart without ledger":
            shutil.rmtree(scene.node.root / "plugins" / "dra-bridge")
    else:
        agent.reload(json.dumps({"resources": [other]}))
        scene.wait_log("was read again")
    vendor.stop()
    if how == "two reloads":
        scene.wait_log("the vendor's plugin has disconnected")
        agent.reload(json.dumps({"resources": [{**other, "name": "example.com/other"}]}))
        scene.wait_log("was read again", 2)
    vendor.directory = scene.node.device_plugin_dir
    vendor.start()
    if how.startswith("restart"):
        scene.node.wait_allocatable(RESOURCE, 2)
        agent = scene.agent(adopts=adopts)
    if not adopts:
        scene.wait_log("instead of this agent, while claims have devices")
        agent.reload(json.dumps({"resources": [{**other, "name": "example.com/other"}]}))
        scene.wait_log("was read again")
    scene.wait_log("another plugin has registered this resource with the kubelet")
    scene.node.wait_allocatable(RESOURCE, 0)
    kept_from_pods(scene, vendor)
    if how != "restart without ledger":  # without the ledger no driver of the resource is known
        wait_for("the Event", lambda: "AdoptedPluginBypassed" in events(scene), 10)
        scene.wait_log("instead of this agent, while claims have devices")
    if not adopts:  # without --adopt the plugin may serve the kubelet
        claimed.delete()
        scene.node.wait_until(lambda: scene.node.streams(RESOURCE) == 1)
        return
    # The plugin comes back to the agent's directory: its free device is for limits.
    vendor.move(scene.directory)
    scene.node.wait_allocatable(RESOURCE, 1)
    claimed.delete()
    scene.node.wait_allocatable(RESOURCE, 2)


def test_an_agent_that_starts_while_a_plugin_past_it_allocates(scene: Scene) -> None:
    """If an agent starts while a plugin answers the kubelet's Allocate, the agent's list has all ids of the plugin.

    Kubelet 1.36.3 crashes if the list lacks an id in allocation (devicemanager/manager.go:923).
    """
    scene.write(dra={"share": 1})
    agent = scene.agent()
    vendor = scene.vendor(resource("g0", "g1"))
    scene.wait_offered(1)
    scene.pod().wait_running()
    agent.terminate()
    vendor.stop()
    # g2 is new: the agent has no record of it.
    (hold := scene.where / "hold").touch()
    past = Vendor(scene.where, scene.node.device_plugin_dir, resource("g0", "g1", "g2"), hold=str(hold))
    scene.vendors.append(past.start())
    scene.node.wait_allocatable(RESOURCE, 3)
    pod = scene.node.start_pod("q", {RESOURCE: 3})
    past.wait("Allocate")
    scene.agent()
    scene.wait_log("registered as")
    scene.node.wait_allocatable(RESOURCE, 0)
    assert set(scene.node.devices(RESOURCE)) == {"g0", "g1", "g2"}
    hold.unlink()
    scene.node.wait_until(lambda: pod.running or pod.terminal)
    assert not scene.node.crashes


def test_an_agent_that_starts_without_its_plugin_waits_for_it(scene: Scene) -> None:
    """If an agent starts without its plugin, it does not take the former agent's device list for another plugin's."""
    agent, vendor, _ = scene.claimed()
    agent.kill()
    vendor.stop(kill=True)
    scene.agent()
    scene.wait_log("waiting for the vendor's plugin")
    vendor.start()
    scene.wait_log("registered as")
    scene.wait_offered(2)
    assert "another plugin" not in scene.agents[-1].log()


def test_two_instances_while_nothing_is_for_claims(scene: Scene) -> None:
    """If a second plugin registers with the kubelet while no device is for claims, the agent registers again.

    The agent writes no Event.
    """
    scene.write(dra={"share": "none"})
    scene.agent()
    scene.vendor(resource("g0", "g1"))
    scene.node.wait_allocatable(RESOURCE, 2)
    other = scene.vendor(resource("g0", "g1", "g2"))
    other.move(scene.node.device_plugin_dir)
    scene.wait_log("another plugin has registered this resource with the kubelet")
    scene.wait_log("registered again")
    assert "instead of this agent" not in scene.agents[-1].log()
    assert "AdoptedPluginBypassed" not in events(scene)
