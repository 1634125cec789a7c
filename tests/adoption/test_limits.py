"""Plugins that register with `deviceplugin run --adopt`: pods get the same as from the plugin alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.testing import FakeKubelet, FakePod, PodFailedError
from deviceplugin.wire import deviceplugin_pb2 as pb
from tests.adoption.behind import Adopted
from tests.scenarios.fake import AgentProcess
from tests.testing.vendor import RESOURCE, Vendor, resource


class Node(Adopted):
    """The fake kubelet, an agent, and a stand-in plugin in the agent's directory."""

    def __init__(self, kubelet: FakeKubelet, where: Path) -> None:
        super().__init__(where)
        self.kubelet = kubelet
        self.write_config({"name": RESOURCE, "devices": [{"plugin": {}}]})

    def agent(self) -> AgentProcess:
        """Start the agent, and wait until plugins can register with it."""
        return self.run_agent("deviceplugin", *self.kubelet.arguments)

    def adopt(self, *resources: dict[str, Any], count: int = 2, **quirks: Any) -> Vendor:
        """Start agent and plugin, and wait until the kubelet has `count` healthy devices of the plugin."""
        self.agent()
        vendor = self.vendor(*resources, **quirks)
        self.kubelet.wait_allocatable(RESOURCE, count)
        return vendor

    def run_second(self, first: FakePod) -> None:
        """Run a second pod, and check that it has another device than the first."""
        second = self.kubelet.run_pod("second", {RESOURCE: 1})
        assert {*first.device_ids, *second.device_ids} == {"g0", "g1"}


@pytest.fixture
def node(fake_kubelet: FakeKubelet) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="adopt-") as where:  # pytest's paths are too long for sockets
        made = Node(fake_kubelet, Path(where))
        try:
            yield made
        finally:
            made.end()


ANSWER: dict[str, Any] = {
    "env": {"GADGETS": "{ids}", "MODE": "fast"},
    "nodes": [["/dev/{id}", "/dev/inside-{id}", "rw"], ["/dev/same", "/dev/same", ""]],
    "control": [["/dev/ctl", "/dev/ctl", "rwm"]],
    "mounts": [["/opt/lib", "/opt/lib"]],
    "annotations": {"cdi.k8s.io/gadget": "vendor.example/gadget={ids}", "vendor.example/x": "y"},
    "cdi": ["vendor.example/gadget={id}"],
    "extra": "f80105",  # the bytes of a field that this version of the API lacks
}


def test_the_answer_is_the_plugins(node: Node) -> None:
    """The kubelet gets the plugin's AllocateResponse byte for byte, also with unknown fields and duplicates."""
    vendor = node.adopt(resource("g0", "g1", **ANSWER))
    (socket,) = node.kubelet.device_plugin_dir.glob("vendor.example_gadget-*.sock")
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["g1", "g0"])])
    with grpc.insecure_channel(f"unix:{socket}", (("grpc.default_authority", "localhost"),)) as channel:
        call: Any = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")  # type: ignore[call-arg]
        answer = call(request.SerializeToString(), timeout=10)
    assert answer.hex() == vendor.calls("answer")[0]["bytes"]
    assert vendor.calls("Allocate")[0]["ids"] == ["g1", "g0"]


def test_ids_are_the_vendors(node: Node) -> None:
    """Device ids of any form reach the plugin unchanged; the plugin gets no calls that its options do not announce."""
    ids = ["nvidia0/vgpu0", "a b", "x" * 100, "GPU-1::0", "GPU-1::1", "ü"]
    vendor = node.adopt(resource(*ids), count=6)
    node.kubelet.run_pod("p", {RESOURCE: 6})
    assert sorted(vendor.calls("Allocate")[0]["ids"]) == sorted(ids)
    assert not vendor.calls("PreStartContainer")
    assert not vendor.calls("GetPreferredAllocation")


@pytest.mark.parametrize("empty_last", [False, True])
def test_the_plugin_ends_and_comes_back(node: Node, empty_last: bool) -> None:
    """While the plugin is away, no device is offered and pods keep theirs; after its return devices are offered."""
    vendor = node.adopt(empty_last=empty_last)
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    vendor.stop(kill=not empty_last)
    node.kubelet.wait_allocatable(RESOURCE, 0)
    vendor.start()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.run_second(first)
    with pytest.raises(PodFailedError):
        node.kubelet.run_pod("third", {RESOURCE: 1})


@pytest.mark.parametrize("ends", ["plugin", "both"])
def test_a_device_under_another_id_is_not_given_again(node: Node, ends: str) -> None:
    """If a restarted plugin gives its devices other ids, no id is granted that may be a running pod's device."""
    vendor = node.adopt()
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    vendor.stop()
    if ends == "both":
        node.agents[-1].kill()
        node.agent()
    vendor.show(resource("x0", "x1"))
    vendor.start()
    node.wait_log("device x1 is not offered on the plugin side: ")
    with pytest.raises(PodFailedError):
        node.kubelet.run_pod("second", {RESOURCE: 1})
    assert node.kubelet.allocatable(RESOURCE) == 0
    first.delete()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.kubelet.run_pod("third", {RESOURCE: 2})


def test_a_device_that_was_listed_beside_a_held_one_is_another(node: Node) -> None:
    """If a held device vanishes, a new id may be that device and is withheld; an id that was listed before is not."""
    vendor = node.adopt()
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    (other,) = {"g0", "g1"}.difference(first.device_ids)
    vendor.health(**{other: "Healthy", "x": "Healthy"})
    node.wait_log("device x is not offered on the plugin side: ")
    assert node.kubelet.run_pod("second", {RESOURCE: 1}).device_ids == (other,)
    vendor.health(g0="Healthy", g1="Healthy", x="Healthy")
    node.kubelet.wait_allocatable(RESOURCE, 3)
    assert node.kubelet.run_pod("third", {RESOURCE: 1}).device_ids == ("x",)


OTHER = "example.com/terminal"
SHARED: dict[str, Any] = {"nodes": [["/dev/tty", "/dev/tty", "rw"]], "control": [["/dev/ptmx", "/dev/ptmx", "rw"]]}
SPEC = """
kind: vendor.example/gadget
containerEdits: {deviceNodes: [{path: /dev/ptmx}]}
devices:
- {name: g0, containerEdits: {deviceNodes: [{path: /dev/tty}]}}
- {name: g1, containerEdits: {deviceNodes: [{path: /dev/tty}]}}
"""
FORMS: dict[str, dict[str, Any]] = {
    "nodes": SHARED,
    "cdi": {"cdi": ["vendor.example/gadget={id}"]},
    "annotation": {"annotations": {"cdi.k8s.io/vendor": "vendor.example/gadget={ids}"}},
}


@pytest.fixture(params=FORMS)
def listed_twice(node: Node, request: pytest.FixtureRequest) -> Node:
    """A fixture in which another resource of the agent has the same device node as the plugin's devices g0 and g1.

    The plugin's responses name the device node by its path, or by a CDI device of a static spec.
    """
    node.write_config(
        {"name": RESOURCE, "devices": [{"plugin": {}}]}, {"name": OTHER, "devices": [{"path": "/dev/tty"}]}
    )
    directory = node.kubelet.paths.cdi_dir
    directory.mkdir(exist_ok=True)
    (directory / "vendor.yaml").write_text(SPEC)
    node.adopt(resource(**FORMS[request.param]))
    node.kubelet.wait_allocatable(OTHER, 1)
    return node


@pytest.mark.parametrize("restart", [False, True])
def test_a_node_that_another_resource_lists_as_well(listed_twice: Node, restart: bool) -> None:
    """While a pod has a device node from an adopted plugin, no pod gets this device node through another resource."""
    kubelet = listed_twice.kubelet
    first, second = (kubelet.run_pod(name, {RESOURCE: 1}) for name in ("first", "second"))
    kubelet.wait_allocatable(OTHER, 0)
    if restart:
        listed_twice.agents[-1].kill()
        listed_twice.agent()
        listed_twice.wait_log(f"{OTHER}: registered as")
    with pytest.raises(PodFailedError):
        kubelet.run_pod("third", {OTHER: 1})
    first.delete()
    with pytest.raises(PodFailedError):
        kubelet.run_pod("fourth", {OTHER: 1})
    second.delete()
    kubelet.wait_allocatable(OTHER, 1)
    kubelet.run_pod("fifth", {OTHER: 1})


def test_a_node_that_a_pod_has_from_another_resource(listed_twice: Node) -> None:
    """While a pod has a device node through another resource, the plugin's ids with this node are refused."""
    kubelet = listed_twice.kubelet
    first = kubelet.run_pod("first", {OTHER: 1})
    for count, name in ((1, "second"), (0, "third")):
        with pytest.raises(PodFailedError, match="are the same hardware"):
            kubelet.run_pod(name, {RESOURCE: 1})
        kubelet.wait_allocatable(RESOURCE, count)
    listed_twice.wait_log(f"is held by pod default/first, as tty of {OTHER}")
    first.delete()
    kubelet.wait_allocatable(RESOURCE, 2)
    kubelet.run_pod("fourth", {RESOURCE: 2})


def test_a_node_that_exists_only_after_allocate(node: Node) -> None:
    """If the plugin's response names a device node that does not exist yet, the pod holds the node once it exists."""
    late, kubelet = node.where / "late", node.kubelet
    node.write_config(
        {"name": RESOURCE, "devices": [{"plugin": {}}]}, {"name": OTHER, "devices": [{"path": "/dev/tty"}]}
    )
    node.adopt(resource("g0", nodes=[[str(late), "/dev/tty", "rw"]]), count=1)
    kubelet.wait_allocatable(OTHER, 1)
    first = kubelet.start_pod("first", {RESOURCE: 1})
    node.wait_log("pod default/first got 1 device")
    late.symlink_to("/dev/tty")
    with pytest.raises(PodFailedError):
        kubelet.run_pod("second", {OTHER: 1})
    first.wait_running()
    first.delete()
    kubelet.wait_allocatable(OTHER, 1)


@pytest.mark.parametrize("unlisted", ["dropped", "restart", "another agent"])
def test_a_node_that_a_pod_has_from_a_resource_that_the_agent_does_not_list(node: Node, unlisted: str) -> None:
    """If a pod has a device node by a resource that the agent does not serve, the plugin's id with it is refused."""
    kubelet, terminal = node.kubelet, {"name": OTHER, "devices": [{"path": "/dev/tty"}]}
    adopted = {"name": RESOURCE, "devices": [{"plugin": {}}]}
    node.write_config(*([adopted] if unlisted == "another agent" else [adopted, terminal]))
    node.adopt(resource("g0", **SHARED), count=1)
    if unlisted == "another agent":
        adopting, node.config = node.config, node.where / "other.yaml"
        node.write_config(terminal)
        node.run_agent("deviceplugin", *kubelet.arguments, adopts=False)
        node.config = adopting
    kubelet.wait_allocatable(OTHER, 1)
    first = kubelet.run_pod("first", {OTHER: 1})
    if unlisted != "another agent":
        node.write_config(adopted)
        kubelet.wait_allocatable(OTHER, 0)
    if unlisted == "restart":
        node.agents[-1].kill()
        node.agent()
        kubelet.wait_allocatable(RESOURCE, 1)
    with pytest.raises(PodFailedError, match="are the same hardware"):
        kubelet.run_pod("second", {RESOURCE: 1})
    kubelet.wait_allocatable(RESOURCE, 0)
    first.delete()
    kubelet.wait_allocatable(RESOURCE, 1)
    kubelet.run_pod("third", {RESOURCE: 1})


def test_the_plugin_goes_back_to_the_kubelet(node: Node) -> None:
    """If a plugin registers with the kubelet while the agent runs, the plugin serves alone, and pods keep devices."""
    vendor = node.adopt()
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    vendor.stop()
    node.kubelet.wait_until(lambda: not node.kubelet.streams(RESOURCE))
    vendor.directory = node.kubelet.device_plugin_dir
    vendor.start()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.run_second(first)
    node.kubelet.restart()
    node.kubelet.wait_registered(RESOURCE, 3)
    node.kubelet.wait_allocatable(RESOURCE, 2)
    vendor.wait("registered", 3)  # the fake kubelet takes the list before it answers Register
    assert len(vendor.calls("registered")) == 3


@pytest.mark.parametrize(
    ("quirks", "ends"),
    [
        ({"trigger": "create"}, None),
        ({"trigger": "own-socket"}, None),
        ({"trigger": "poll"}, None),
        ({"stream_end": "exit"}, 1),
        ({"stream_end": "panic"}, 2),
        ({"second_stream": "panic"}, None),
        ({"failed_register": "exit"}, None),
        ({"failed_register": "stop-all"}, None),
        ({"needs_list": True, "unknown_ids": True}, None),
        ({"minds_deprecation": True}, None),
        ({"pause": 0.5}, None),
        ({"once": True}, None),
        ({"watcher": "restart"}, None),
        ({"watcher": "stop"}, None),
    ],
    ids=str,
)
def test_the_agent_restarts(node: Node, quirks: Mapping[str, Any], ends: int | None) -> None:
    """After a restart of the agent the plugin registers with the next agent, and pods keep their devices."""
    agent = node.agent()
    # The plugin tries to register three times, as the agent's kubelet.sock may not be back yet.
    vendor = node.vendor(**{"retry": 1.0, **quirks})
    node.kubelet.wait_allocatable(RESOURCE, 2)
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    agent.kill()
    node.kubelet.wait_allocatable(RESOURCE, 0)
    node.agent()
    if ends is not None:
        assert vendor.status() == ends
        vendor.start()  # the container of the plugin starts again
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.run_second(first)


@pytest.mark.parametrize("trigger", ["create", "own-socket", "poll"])
def test_a_second_agent_of_the_directory_takes_no_plugin(node: Node, trigger: str) -> None:
    """A second agent with the same --adopt directory ends with an error, and the first agent keeps its plugins."""
    first = node.agent()
    vendor = node.vendor(trigger=trigger)
    node.kubelet.wait_allocatable(RESOURCE, 2)
    other = node.where / "other.yaml"
    other.write_text(json.dumps({"resources": [{"name": "example.com/sim", "devices": [{"simulated": {"count": 1}}]}]}))
    arguments = ["-m", "deviceplugin", "run", "--config", str(other), "--adopt", str(node.directory)]
    second = AgentProcess([*arguments, *node.kubelet.arguments], other, node.where / "second.log")
    assert second.process.wait(20) == 1
    assert f"--adopt: plugins register in {node.directory} with another agent (pid " in second.log()
    assert node.kubelet.allocatable(RESOURCE) == 2
    assert len(vendor.calls("ListAndWatch")) == 1
    first.kill()
    node.agent()
    node.kubelet.wait_allocatable(RESOURCE, 2)


def test_the_kubelet_restarts(node: Node) -> None:
    """After a kubelet restart the agent registers again; the plugin does not, and its stream to the agent goes on."""
    vendor = node.adopt(stream_end="panic", second_stream="panic")
    first = node.kubelet.run_pod("first", {RESOURCE: 1})
    node.kubelet.restart()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.run_second(first)
    vendor.health(g0="Healthy", g1="Unhealthy")
    node.kubelet.wait_allocatable(RESOURCE, 1)
    assert (len(vendor.calls("registered")), len(vendor.calls("ListAndWatch"))) == (1, 1)


def test_optional_calls_are_passed_on(node: Node) -> None:
    """The agent passes GetPreferredAllocation and PreStartContainer to a plugin whose options announce them."""
    vendor = node.adopt(pre_start=True, preferred=True)
    pod = node.kubelet.run_pod("p", {RESOURCE: 1})
    assert pod.device_ids == ("g1",)
    assert vendor.calls("PreStartContainer")[0]["ids"] == ["g1"]


def test_a_plugin_of_the_plugin_watcher(node: Node) -> None:
    """The agent registers a plugin that has its socket in the agent's plugins_registry, as the kubelet would."""
    other = "vendor.example/other"
    vendor = node.adopt(resource(), resource("o0", name=other), watcher="stop")
    node.kubelet.wait_allocatable(other, 1)
    node.kubelet.run_pod("p", {RESOURCE: 1, other: 1})
    assert [one["resource"] for one in vendor.calls("GetInfo")].count(RESOURCE) == 1
    assert not list(node.directory.glob("*-vendor.sock"))
    vendor.stop()
    node.kubelet.wait_allocatable(RESOURCE, 0)
    vendor.start()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    assert not vendor.calls("Register failed")


def test_the_plugins_error_is_the_answer(node: Node) -> None:
    """A pod whose Allocate the plugin refuses fails with the plugin's error; the next pod gets the device."""
    vendor = node.adopt(resource("g0"), hold=str(node.where / "hold"), count=1)
    (node.where / "hold").touch()
    pod = node.kubelet.start_pod("p", {RESOURCE: 1})
    vendor.wait("Allocate")
    vendor.health(g0="Unhealthy")
    node.kubelet.wait_until(lambda: node.kubelet.updates(RESOURCE)[-1].healthy == 0)
    (node.where / "hold").unlink()
    node.kubelet.wait_until(lambda: pod.phase == "Failed")
    assert "unknown device 'g0'" in pod.message
    vendor.health(g0="Healthy")
    node.kubelet.wait_allocatable(RESOURCE, 1)
    node.kubelet.run_pod("q", {RESOURCE: 1})


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("call", ["GetPreferredAllocation", "Allocate"])
def test_a_plugin_that_ends_while_it_is_asked(node: Node, call: str, *, kill: bool) -> None:
    """If a plugin ends during a call, the pod's message names plugin and call; a later pod gets the device."""
    (hold := node.where / "hold").touch()
    vendor = node.adopt(resource("g0"), hold=str(hold), held=call, preferred=True, count=1)
    pod = node.kubelet.start_pod("p", {RESOURCE: 1})
    vendor.wait(call)
    vendor.stop(kill=kill)
    node.kubelet.wait_until(lambda: pod.phase == "Failed")
    where = node.directory / "vendor.example_gadget-vendor.sock"
    assert f"{RESOURCE}: the vendor's plugin at {where} ended, or cannot be reached, during {call}" in pod.message
    hold.unlink()
    node.kubelet.wait_allocatable(RESOURCE, 0)  # otherwise the wait below would take the former list for the new one
    vendor.start()
    node.kubelet.wait_allocatable(RESOURCE, 1)
    node.kubelet.run_pod("q", {RESOURCE: 1})


@pytest.mark.parametrize("kill", [True, False])
def test_a_plugin_that_ends_before_a_container_starts(node: Node, *, kill: bool) -> None:
    """If a plugin ends during PreStartContainer, the error names it; the container starts when the plugin is back."""
    (hold := node.where / "hold").touch()
    vendor = node.adopt(resource("g0"), hold=str(hold), held="PreStartContainer", pre_start=True, count=1)
    pod = node.kubelet.start_pod("p", {RESOURCE: 1})
    vendor.wait("PreStartContainer")
    vendor.stop(kill=kill)
    where = node.directory / "vendor.example_gadget-vendor.sock"
    text = f"{RESOURCE}: the vendor's plugin at {where} ended, or cannot be reached, during PreStartContainer"
    assert text in node.kubelet.wait_rpc("PreStartContainer").error
    hold.unlink()
    vendor.start()
    node.kubelet.wait_until(lambda: pod.running)
    assert len(vendor.calls("Allocate")) == 1


def test_a_reload_takes_a_resource_away_from_its_plugin(node: Node) -> None:
    """A reload can replace a resource's plugin by devices of the config, and a further reload does the reverse."""
    agent = node.agent()
    node.vendor()
    node.kubelet.wait_allocatable(RESOURCE, 2)
    agent.reload(json.dumps({"resources": [{"name": RESOURCE, "devices": [{"simulated": {"count": 3}}]}]}))
    node.kubelet.wait_allocatable(RESOURCE, 3)
    agent.reload(json.dumps({"resources": [{"name": RESOURCE, "devices": [{"plugin": {}}]}]}))
    node.kubelet.wait_allocatable(RESOURCE, 2)


def test_a_reload_keeps_what_is_passed_through(node: Node) -> None:
    """A resource that no config names, or no longer names, is served from its plugin, and the log says so."""
    other = "vendor.example/other"
    agent = node.agent()
    vendor = node.vendor(resource(), resource("o0", name=other), failed_register="exit")
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.kubelet.wait_allocatable(other, 1)
    node.wait_log(f"{other}: the config does not name it")
    agent.reload(json.dumps({"resources": [{"name": "example.com/x", "devices": [{"simulated": {"count": 3}}]}]}))
    node.kubelet.wait_allocatable("example.com/x", 3)
    node.kubelet.wait_allocatable(RESOURCE, 2)
    node.kubelet.run_pod("p", {RESOURCE: 1, other: 1})
    assert len(vendor.calls("ListAndWatch")) == 2
    assert vendor.process is not None
    assert vendor.process.poll() is None


def test_the_config_needs_the_option(tmp_path: Path, fake_kubelet: FakeKubelet) -> None:
    """A config that names a plugin is refused without `--adopt`; the error names the option."""
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"resources": [{"name": RESOURCE, "devices": [{"plugin": {}}]}]}))
    arguments = ["-m", "deviceplugin", "run", "--config", str(config), *fake_kubelet.arguments]
    agent = AgentProcess(arguments, config, tmp_path / "log")
    assert agent.process.wait(20) == 2
    assert "config.yaml:1: $.resources[0].devices[0].plugin: a vendor's plugin chooses" in agent.log()
    assert "`run --adopt=/run/deviceplugin/plugins` allows it" in agent.log()
