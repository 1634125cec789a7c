"""Guarantees for the author of a device plugin while the kubelet fails; for the fake and a real kubelet.

`released` is not called for a device while a container has it, no other pod gets the device, and `released` is called
afterwards. Derive a test class from `FaultScenarios`, with a fixture `node` that is a `FaultyNode`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.scenarios.node import FaultyNode, FaultyPod, wait_for
from tests.scenarios.plugin import RESOURCE, SCRIPT, hook_calls

__all__ = ["FaultScenarios"]

COUNT = 4


class Plugin:
    """An author's plugin with four devices, which notes the devices of each call of `released`."""

    def __init__(self, node: FaultyNode) -> None:
        self._node = node
        self._notes = node.directory / "notes"
        self._script = f"NOTES = {str(self._notes)!r}\n{SCRIPT}"
        self._probes = itertools.count()
        self.agent = node.start_agent(script=self._script)
        node.wait_allocatable(RESOURCE, COUNT)

    def restart(self) -> None:
        """Start the plugin again, after its end."""
        self.agent = self._node.start_agent(script=self._script)
        self._node.wait_allocatable(RESOURCE, COUNT)

    def released(self, device: str) -> int:
        """Return how often `released` was called for a device."""
        return sum(call.count(device) for call in hook_calls(self._notes, "released"))

    def wait_released(self, device: str, before: int) -> None:
        """Wait until `released` was called for a device more often than `before`."""
        wait_for(f"{device} to be released", lambda: self.released(device) > before, self._node.patience)

    def wait_scanned(self, held: str) -> None:
        """Wait until the agent has scanned for pods with devices: until it calls `released` after the end of a new pod.

        held: a device that the new pod must not get. If the kubelet chooses this device, the pod fails, and the agent
        withholds the device from the kubelet from then on.
        """
        probe = self._node.start_pod(f"probe-{next(self._probes)}", {RESOURCE: 1})
        wait_for(f"{probe} to start", lambda: probe.phase() in ("Running", "Failed"), self._node.patience)
        if probe.phase() == "Failed":
            probe.delete()
            self._node.wait_allocatable(RESOURCE, COUNT - 1)
            probe = self._node.start_pod(f"probe-{next(self._probes)}", {RESOURCE: 1})
        device = probe.wait_running().env()["WIDGETS"]
        assert device != held
        before = self.released(device)
        probe.delete()
        self.wait_released(device, before)


class FaultScenarios:
    """Each scenario has a plugin and pods of its own on the node of the test."""

    @pytest.fixture
    def plugin(self, node: FaultyNode) -> Plugin:
        """Start the plugin on the node of the test."""
        return Plugin(node)

    @staticmethod
    def hold(plugin: Plugin, pod: FaultyPod) -> tuple[str, int]:
        """Wait until the agent has seen a pod with its device; return the device and its number of `released` calls."""
        device = pod.wait_running().env()["WIDGETS"]
        plugin.wait_scanned(device)
        return device, plugin.released(device)

    def test_a_kubelet_without_its_api_server(self, node: FaultyNode, plugin: Plugin) -> None:
        """A restarted kubelet lists no pods while the API server is unreachable; devices of running pods stay held."""
        pod = node.start_pod("holder", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        node.cut_off()
        node.stop_kubelet()
        node.start_kubelet()
        node.wait_allocatable(RESOURCE, COUNT)
        node.reconnect()
        plugin.wait_scanned(device)
        assert plugin.released(device) == before
        pod.delete()
        plugin.wait_released(device, before)

    def test_a_pod_deleted_by_force(self, node: FaultyNode, plugin: Plugin) -> None:
        """A container that outlives its pod holds its device until the container has ended."""
        pod = node.start_pod("holder", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        pod.force_delete(hang=True)
        plugin.wait_scanned(device)
        assert pod.runs()
        assert plugin.released(device) == before
        pod.end_containers()
        plugin.wait_released(device, before)

    def test_a_manifest_is_removed(self, node: FaultyNode, plugin: Plugin) -> None:
        """After a static pod's manifest is removed, the device stays held until the slow container has ended."""
        pod = node.start_static_pod("static", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        pod.remove_manifest()
        plugin.wait_scanned(device)
        assert pod.runs()
        assert plugin.released(device) == before
        pod.end_containers()
        plugin.wait_released(device, before)

    def test_a_network_that_is_not_ready(self, node: FaultyNode, plugin: Plugin) -> None:
        """An admitted pod that has not started yet, and has no cgroup, holds its device."""
        running = node.start_pod("running", {RESOURCE: 1})
        other, before = self.hold(plugin, running)
        node.lose_network()
        pod = node.start_pod("waiting", {RESOURCE: 1})
        wait_for("the allocation", lambda: node.checkpoint.read_bytes().count(b'"PodUID"') == 2, node.patience)
        running.delete()
        plugin.wait_released(other, before)
        calls = [plugin.released(f"w{number}") for number in range(COUNT)]
        node.restore_network()
        device = pod.wait_running().env()["WIDGETS"]
        plugin.wait_scanned(device)
        assert plugin.released(device) == calls[int(device[1:])]
        pod.delete()
        plugin.wait_released(device, calls[int(device[1:])])

    def test_a_lost_checkpoint(self, node: FaultyNode, plugin: Plugin) -> None:
        """A container that the agent has seen with a device keeps the device after the kubelet's checkpoint is lost."""
        pod = node.start_pod("holder", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        node.stop_kubelet()
        node.checkpoint.unlink()
        node.start_kubelet()
        node.wait_allocatable(RESOURCE, COUNT)
        plugin.wait_scanned(device)
        assert pod.runs()
        assert plugin.released(device) == before
        pod.delete()
        plugin.wait_released(device, before)

    def test_a_pod_that_ends_without_kubelet_and_agent(self, node: FaultyNode, plugin: Plugin) -> None:
        """After a pod ended, undeleted, while kubelet and agent were stopped, `released` is called for its device."""
        pod = node.start_pod("holder", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        node.stop_kubelet()
        plugin.agent.kill()
        pod.complete()
        node.start_kubelet()
        plugin.restart()
        plugin.wait_released(device, before)

    def test_a_flooded_kubelet(self, node: FaultyNode, plugin: Plugin) -> None:
        """The agent notices a pod's end although other clients use up the rate limit of PodResources."""
        pod = node.start_pod("holder", {RESOURCE: 1})
        device, before = self.hold(plugin, pod)
        node.flood_pod_resources()
        pod.delete()
        plugin.wait_released(device, before)
