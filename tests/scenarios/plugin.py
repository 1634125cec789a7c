"""Scenarios of device plugins as users' pods see them, for the fake and a real kubelet.

Derive a test class from `PluginScenarios`, with a fixture `node`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.scenarios.node import Node, Pod, wait_for

__all__ = ["PluginScenarios"]

RESOURCE = "example.com/serial"

SCRIPT = """
import json
from deviceplugin import ContainerEdits, Device, DeviceSource, run

def note(hook, devices):
    with open(NOTES, "a") as notes:
        notes.write(json.dumps({"hook": hook, "devices": sorted(d.id for d in devices)}) + chr(10))

class Widgets(DeviceSource):
    resource = "example.com/serial"

    async def watch(self):
        yield [Device(f"w{number}") for number in range(4)]

    def edits(self, devices):
        return ContainerEdits(env={"WIDGETS": " ".join(sorted(d.id for d in devices))})

    def reset(self, devices):
        note("reset", devices)

    def prefer(self, available, must_include, size):
        note("prefer", available)
        return sorted(available, key=lambda device: device.id)[-size:]

    def released(self, devices):
        note("released", devices)

run(Widgets())
"""

SLOW = """
import glob
import os
import sys
import time
from deviceplugin import ContainerEdits, Device, DeviceSource, run

class Slow(DeviceSource):
    resource = "example.com/serial"

    async def watch(self):
        yield [Device("s0")]

    def edits(self, devices):
        open(BEGUN, "w").close()
        words = dict(zip(sys.argv, sys.argv[1:]))
        root = words.get("--kubelet-root", "/var/lib/kubelet")
        plugins = words.get("--device-plugin-dir", f"{root}/device-plugins")
        while glob.glob(f"{plugins}/example.com_serial*.sock"):  # until the agent is about to end
            time.sleep(0.001)
        return ContainerEdits(env={"LATE": "yes"})

run(Slow())
"""


class PluginScenarios:
    """Each scenario starts its own agents and pods on the node of the test."""

    @staticmethod
    def devices(node: Node, count: int, name: str = "tty") -> list[Path]:
        """Make device nodes."""
        paths = [node.directory / "dev" / f"{name}{number}" for number in range(count)]
        for path in paths:
            node.make_device_node(path)
        return paths

    @staticmethod
    def config(node: Node, *resources: dict[str, Any]) -> str:
        """Return a config file, as JSON. Without resources, it has one resource with all `tty` devices."""
        return json.dumps({"resources": resources or [serial(node)]})

    @staticmethod
    def held(pod: Pod, paths: Sequence[Path]) -> Path:
        """Return the one of these paths that the pod's container has; fail unless it has just one."""
        (path,) = [path for path in paths if pod.has(path)]
        return path

    def test_a_pod_gets_its_device(self, node: Node) -> None:
        """A pod with a limit gets one device node, the variables and the mount of its resource."""
        paths = self.devices(node, 2)
        library = node.directory / "lib"
        library.mkdir()
        (library / "hello").write_text("of the host")
        mount = {"host": str(library), "container": "/opt/scenario", "readonly": True}
        node.start_agent(config=self.config(node, serial(node, env={"GREETING": "hello there"}, mounts=[mount])))
        node.wait_allocatable(RESOURCE, 2)
        pod = node.start_pod("one", {RESOURCE: 1}).wait_running()
        assert self.held(pod, paths)
        assert pod.env()["GREETING"] == "hello there"
        assert pod.read(Path("/opt/scenario/hello")) == "of the host"

    def test_links_keep_their_names(self, node: Node) -> None:
        """A device that was found by a link has the link's path in the container, not the path of its node."""
        (path,) = self.devices(node, 1)
        link = node.directory / "by-id" / "usb-port"
        link.parent.mkdir()
        link.symlink_to(f"../dev/{path.name}")
        node.start_agent(
            config=self.config(node, {"name": RESOURCE, "devices": [{"path": f"{link.parent}/*"}], "permissions": "r"})
        )
        pod = node.start_pod("linked", {RESOURCE: 1}).wait_running()
        assert pod.has(link)
        assert not pod.has(path)

    def test_plain_files_are_mounted(self, node: Node) -> None:
        """A file that is no device node is mounted into the container."""
        license_ = node.directory / "licenses" / "seat-1"
        license_.parent.mkdir()
        license_.write_text("valid for one")
        node.start_agent(config=self.config(node, {"name": RESOURCE, "devices": [{"path": f"{license_.parent}/*"}]}))
        node.wait_allocatable(RESOURCE, 1)
        pod = node.start_pod("licensed", {RESOURCE: 1}).wait_running()
        assert pod.read(license_) == "valid for one"

    def test_a_pod_gets_two_devices(self, node: Node) -> None:
        """A pod with a limit of two gets two different devices."""
        paths = self.devices(node, 3)
        node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 3)
        pod = node.start_pod("two", {RESOURCE: 2}).wait_running()
        assert sum(map(pod.has, paths)) == 2

    def test_pods_take_turns(self, node: Node) -> None:
        """Two pods get different devices; a third pod waits, and starts when one of these pods ends."""
        paths = self.devices(node, 2)
        node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 2)
        first, second = (node.start_pod(name, {RESOURCE: 1}).wait_running() for name in ("first", "second"))
        assert {self.held(first, paths), self.held(second, paths)} == set(paths)
        third = node.start_pod("third", {RESOURCE: 1})
        third.wait_unschedulable()
        freed = self.held(first, paths)
        first.delete()
        assert self.held(third.wait_running(), paths) == freed
        assert second.phase() == "Running"

    def test_the_kubelet_restarts(self, node: Node) -> None:
        """Pods run on while the kubelet restarts, their containers can restart, and new pods get other devices."""
        paths = self.devices(node, 3)
        node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 3)
        first = node.start_pod("first", {RESOURCE: 1}).wait_running()
        node.restart_kubelet()
        node.wait_allocatable(RESOURCE, 3)
        second = node.start_pod("second", {RESOURCE: 1}).wait_running()
        assert first.phase() == "Running"
        first.restart_container()
        node.restart_kubelet()
        node.wait_allocatable(RESOURCE, 3)
        third = node.start_pod("third", {RESOURCE: 1}).wait_running()
        assert {self.held(pod, paths) for pod in (first, second, third)} == set(paths)

    def test_the_agent_is_killed(self, node: Node) -> None:
        """Pods run on when the agent is killed; the next agent gives the free devices to new pods."""
        paths = self.devices(node, 2)
        agent = node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 2)
        first = node.start_pod("first", {RESOURCE: 1}).wait_running()
        agent.kill()
        node.wait_allocatable(RESOURCE, 0)
        assert first.phase() == "Running"
        second = node.start_pod("second", {RESOURCE: 1})
        second.wait_unschedulable()
        node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 2)
        assert {self.held(first, paths), self.held(second.wait_running(), paths)} == set(paths)
        first.restart_container()
        assert first.phase() == "Running"

    def test_the_agent_is_stopped(self, node: Node) -> None:
        """An agent that gets SIGTERM ends, and removes its socket for the next agent."""
        self.devices(node, 1)
        for _ in range(2):
            agent = node.start_agent(config=self.config(node))
            node.wait_allocatable(RESOURCE, 1)
            agent.terminate()
            node.wait_allocatable(RESOURCE, 0)

    def test_the_agent_is_stopped_while_a_pod_is_made(self, node: Node) -> None:
        """An Allocate that is running when the agent gets SIGTERM is answered, and the pod runs."""
        begun = node.directory / "begun"
        agent = node.start_agent(script=f"BEGUN = {str(begun)!r}\n{SLOW}")
        node.wait_allocatable(RESOURCE, 1)
        pod = node.start_pod("late", {RESOURCE: 1})
        wait_for("Allocate", begun.exists, node.patience)
        agent.terminate()
        assert pod.wait_running().env()["LATE"] == "yes"

    def test_a_device_comes_and_goes(self, node: Node) -> None:
        """The allocatable number follows device nodes that are removed and added; pods with devices keep running."""
        paths = self.devices(node, 2)
        node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 2)
        pod = node.start_pod("holder", {RESOURCE: 1}).wait_running()
        held = self.held(pod, paths)
        node.remove_device_node(held)
        node.wait_allocatable(RESOURCE, 1)
        assert pod.phase() == "Running"
        node.make_device_node(held)
        node.wait_allocatable(RESOURCE, 2)
        other = node.directory / "dev" / "tty7"
        node.make_device_node(other)
        node.wait_allocatable(RESOURCE, 3)
        others = [node.start_pod(name, {RESOURCE: 1}).wait_running() for name in ("second", "third")]
        assert {self.held(p, [*paths, other]) for p in (pod, *others)} == {*paths, other}
        node.remove_device_node(other)
        node.wait_allocatable(RESOURCE, 2)
        assert [p.phase() for p in (pod, *others)] == ["Running"] * 3

    def test_a_device_gets_sick_and_well(self, node: Node) -> None:
        """An unhealthy device stays with its holder, and new pods get it only after it is healthy again."""
        sick = node.directory / "sick"
        simulated = {"count": 2, "unhealthy_file": str(sick)}
        node.start_agent(config=self.config(node, {"name": RESOURCE, "devices": [{"simulated": simulated}]}))
        node.wait_allocatable(RESOURCE, 2)
        holder = node.start_pod("holder", {RESOURCE: 1}).wait_running()
        write(sick, "sim-0 smells of smoke\nsim-1 hums\n")
        node.wait_allocatable(RESOURCE, 0)
        waiting = node.start_pod("waiting", {RESOURCE: 1})
        waiting.wait_unschedulable()
        assert holder.phase() == "Running"
        write(sick, "")
        node.wait_allocatable(RESOURCE, 2)
        waiting.wait_running()
        assert holder.phase() == "Running"

    def test_hooks_are_called(self, node: Node) -> None:
        """The agent calls the hook `prefer`, and the hook `reset` before each start of a container."""
        notes = node.directory / "notes"
        node.start_agent(script=f"NOTES = {str(notes)!r}\n{SCRIPT}")
        node.wait_allocatable(RESOURCE, 4)
        pod = node.start_pod("one", {RESOURCE: 1}).wait_running()
        assert pod.env()["WIDGETS"] == "w3"
        assert hook_calls(notes, "prefer")[0] == ["w0", "w1", "w2", "w3"]
        assert hook_calls(notes, "reset") == [["w3"]]
        two = node.start_pod("two", {RESOURCE: 2}).wait_running()
        assert two.env()["WIDGETS"] == "w1 w2"
        assert hook_calls(notes, "reset") == [["w3"], ["w1", "w2"]]
        pod.restart_container()
        assert hook_calls(notes, "reset") == [["w3"], ["w1", "w2"], ["w3"]]

    def test_released_is_called(self, node: Node) -> None:
        """After a pod has ended, and not before, the agent calls an author's hook `released` with the pod's devices."""
        notes = node.directory / "notes"
        node.start_agent(script=f"NOTES = {str(notes)!r}\n{SCRIPT}")
        node.wait_allocatable(RESOURCE, 4)
        # At its start the agent calls `released` with all devices that no pod holds.
        wait_for("the first released", lambda: bool(hook_calls(notes, "released")), node.patience)
        assert hook_calls(notes, "released") == [["w0", "w1", "w2", "w3"]]
        one, two = (node.start_pod(name, {RESOURCE: 1}).wait_running() for name in ("one", "two"))
        assert (one.env()["WIDGETS"], two.env()["WIDGETS"]) == ("w3", "w2")
        one.delete()
        wait_for("released after the pod's end", lambda: len(hook_calls(notes, "released")) > 1, node.patience)
        assert hook_calls(notes, "released")[1:] == [["w3"]]
        assert two.phase() == "Running"

    def test_two_resources(self, node: Node) -> None:
        """One agent serves two resources, and a pod can have devices of both."""
        serial_paths, other_paths = self.devices(node, 2), self.devices(node, 1, "card")
        card = {"name": "example.com/card", "devices": [{"path": f"{node.directory}/dev/card*"}]}
        node.start_agent(config=self.config(node, serial(node), card))
        node.wait_allocatable(RESOURCE, 2)
        node.wait_allocatable("example.com/card", 1)
        pod = node.start_pod("both", {RESOURCE: 1, "example.com/card": 1}).wait_running()
        assert self.held(pod, serial_paths)
        assert self.held(pod, other_paths)

    def test_reload(self, node: Node) -> None:
        """A changed config adds and removes resources; unchanged resources and their pods are not affected."""
        paths = self.devices(node, 2)
        spare = {"name": "example.com/spare", "devices": [{"simulated": {"count": 3}}]}
        more = {"name": "example.com/more", "devices": [{"simulated": {"count": 4}}]}
        agent = node.start_agent(config=self.config(node, serial(node), spare))
        node.wait_allocatable("example.com/spare", 3)
        pod = node.start_pod("holder", {RESOURCE: 1}).wait_running()
        agent.reload(self.config(node, serial(node), more))
        node.wait_allocatable("example.com/more", 4)
        node.wait_allocatable("example.com/spare", 0)
        assert node.allocatable(RESOURCE) == 2
        agent.reload("resources: [}")
        wait_for("a word on the bad file", lambda: "the config file is refused" in agent.log(), node.patience)
        agent.reload(self.config(node, serial(node), spare))
        node.wait_allocatable("example.com/spare", 3)
        node.wait_allocatable("example.com/more", 0)
        assert node.allocatable(RESOURCE) == 2
        assert pod.phase() == "Running"
        second = node.start_pod("second", {RESOURCE: 1}).wait_running()
        assert {self.held(p, paths) for p in (pod, second)} == set(paths)

    def test_sharing(self, node: Node) -> None:
        """A shared device serves as many pods as it has replicas, and the next pod waits."""
        (path,) = self.devices(node, 1)
        node.start_agent(config=self.config(node, serial(node, sharing={"replicas": 2})))
        node.wait_allocatable(RESOURCE, 2)
        pods = [node.start_pod(name, {RESOURCE: 1}).wait_running() for name in ("first", "second")]
        assert [pod.has(path) for pod in pods] == [True, True]
        third = node.start_pod("third", {RESOURCE: 1})
        third.wait_unschedulable()
        pods[0].delete()
        assert third.wait_running().has(path)

    def test_sharing_is_switched_on_and_off(self, node: Node) -> None:
        """A reload that changes the sharing of a device does not affect pods that have the device."""
        (path,) = self.devices(node, 1)
        agent = node.start_agent(config=self.config(node))
        node.wait_allocatable(RESOURCE, 1)
        alone = node.start_pod("alone", {RESOURCE: 1}).wait_running()
        agent.reload(self.config(node, serial(node, sharing={"replicas": 3})))
        node.wait_allocatable(RESOURCE, 0)
        alone.restart_container()
        pods = [node.start_pod(name, {RESOURCE: 1}) for name in ("first", "second")]
        pods[0].wait_unschedulable()
        alone.delete()
        assert [pod.wait_running().has(path) for pod in pods] == [True, True]
        agent.reload(self.config(node))
        node.wait_allocatable(RESOURCE, 0)
        third = node.start_pod("third", {RESOURCE: 1})
        for pod in pods:
            third.wait_unschedulable()
            assert pod.phase() == "Running"
            pod.delete()
        assert third.wait_running().has(path)


def serial(node: Node, **more: Any) -> dict[str, Any]:
    """Return a resource with all `tty` devices of the node's directory."""
    return {"name": RESOURCE, "devices": [{"path": f"{node.directory}/dev/tty*"}], **more}


def hook_calls(notes: Path, hook: str) -> list[list[str]]:
    """Return the devices that a hook was called with, call by call."""
    if not notes.exists():
        return []
    calls = [json.loads(line) for line in notes.read_text().splitlines()]
    return [call["devices"] for call in calls if call["hook"] == hook]


def write(path: Path, text: str) -> None:
    """Replace a file's contents in one step."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
