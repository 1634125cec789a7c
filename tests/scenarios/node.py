"""The interface of a node for scenarios; the fake kubelet and a real one implement it.

Each wait has a deadline, by default of `patience` seconds; past the deadline, the test fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

__all__ = ["Agent", "FaultyNode", "FaultyPod", "Node", "Pod", "wait_for"]


class Pod(Protocol):
    """A pod of one container."""

    @property
    def name(self) -> str:
        """The pod's name."""

    def wait_running(self) -> Self:
        """Wait until the pod's container runs; fail if the container ends first."""

    def wait_unschedulable(self) -> None:
        """Wait until the scheduler has marked the pod as unschedulable."""

    def phase(self) -> str:
        """Return Pending, Running, Succeeded or Failed."""

    def env(self) -> Mapping[str, str]:
        """Return the container's environment, at least what plugins put there."""

    def has(self, path: Path) -> bool:
        """Return whether the container has this path."""

    def read(self, path: Path) -> str:
        """Return the contents of a file as the container sees it."""

    def restart_container(self) -> None:
        """End the container, and wait until it runs again in the same pod."""

    def delete(self) -> None:
        """Delete the pod and wait until it is gone."""


class Agent(Protocol):
    """A node agent, which runs as a process."""

    def kill(self) -> None:
        """End the agent with SIGKILL."""

    def terminate(self) -> None:
        """End the agent with SIGTERM and wait; fail unless it exits with 0."""

    def reload(self, config: str) -> None:
        """Replace the agent's config file."""

    def log(self) -> str:
        """Return the agent's output."""


class Node(Protocol):
    """A node with a kubelet and a scheduler."""

    @property
    def patience(self) -> float:
        """The limit of each wait in seconds."""

    @property
    def directory(self) -> Path:
        """A directory on the node for the scenario's device nodes, libraries and notes."""

    def start_agent(self, *, config: str = "", script: str = "") -> Agent:
        """Start an agent with this config text, or with a script that is an author's agent; do not wait for it."""

    def start_pod(self, name: str, limits: Mapping[str, int]) -> Pod:
        """Make a pod; it starts when the scheduler finds room for it."""

    def allocatable(self, resource: str) -> int:
        """Return the allocatable number of a resource in the node's status."""

    def wait_allocatable(self, resource: str, count: int) -> None:
        """Wait until this number of devices is allocatable."""

    def restart_kubelet(self) -> None:
        """Restart the kubelet; return when the new kubelet has written the node's status."""

    def make_device_node(self, path: Path) -> None:
        """Make a device node, or a file in place of one."""

    def remove_device_node(self, path: Path) -> None:
        """Remove a device node."""


class FaultyPod(Pod, Protocol):
    """A pod whose end the kubelet may not see."""

    def runs(self) -> bool:
        """Return whether the container's process exists, whatever the pod's status is."""

    def complete(self) -> None:
        """Make the container end by itself; the kubelet does not restart it."""

    def force_delete(self, *, hang: bool = False) -> None:
        """Delete the pod with a grace period of 0; hang: the runtime does not end the pod's container."""

    def remove_manifest(self) -> None:
        """Remove a static pod's manifest; the pod's container ignores SIGTERM, and so runs on for a while."""

    def end_containers(self) -> None:
        """Make the runtime answer again, or the grace period end; wait until no process of the pod runs."""


class FaultyNode(Node, Protocol):
    """A node whose kubelet, network and API server can fail."""

    def start_pod(self, name: str, limits: Mapping[str, int]) -> FaultyPod:
        """Make a pod; it starts when the scheduler finds room for it."""

    def start_static_pod(self, name: str, limits: Mapping[str, int]) -> FaultyPod:
        """Start a static pod by a manifest on the node, and wait until it runs."""

    def stop_kubelet(self) -> None:
        """Kill the kubelet; containers go on."""

    def start_kubelet(self) -> None:
        """Start the kubelet and return when it answers."""

    def cut_off(self) -> None:
        """Make the API server unreachable for the kubelet; a kubelet that starts then knows only static pods."""

    def reconnect(self) -> None:
        """Let the API server reach the kubelet again."""

    def lose_network(self) -> None:
        """Make the node's network unready: pods are admitted and not started."""

    def restore_network(self) -> None:
        """Make the node's network ready."""

    def flood_pod_resources(self) -> None:
        """Let other clients use up the rate limit of PodResources, except for a few calls."""

    @property
    def checkpoint(self) -> Path:
        """The device manager's checkpoint."""


def wait_for(what: str, condition: Callable[[], bool], timeout: float) -> None:
    """Check a condition again and again until it is true; fail after the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)
