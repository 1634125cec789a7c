"""The interface of a node for scenarios; the fake kubelet and a real one implement it.

Each wait has a deadline of `patience` seconds, unless it is given another, and fails the test past it.
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
        """Wait until its container runs; fail if it ends first."""

    def wait_unschedulable(self) -> None:
        """Wait until the scheduler has found no place for it."""

    def phase(self) -> str:
        """Return Pending, Running, Succeeded or Failed."""

    def env(self) -> Mapping[str, str]:
        """Return the container's environment, at least what plugins put there."""

    def has(self, path: Path) -> bool:
        """Whether the container has this path."""

    def read(self, path: Path) -> str:
        """Return the contents of a file as the container sees it."""

    def restart_container(self) -> None:
        """Let the container end and wait until it runs again, in the same pod."""

    def delete(self) -> None:
        """Delete the pod and wait until it is gone."""


class Agent(Protocol):
    """A node agent, a process of its own."""

    def kill(self) -> None:
        """End it with SIGKILL."""

    def terminate(self) -> None:
        """End it with SIGTERM and wait; fail unless it exits with 0."""

    def reload(self, config: str) -> None:
        """Replace its config file."""

    def log(self) -> str:
        """Return the container's output."""


class Node(Protocol):
    """A node with a kubelet and a scheduler."""

    @property
    def patience(self) -> float:
        """Seconds after which something that should have happened counts as not happening."""

    @property
    def directory(self) -> Path:
        """A directory on the node, for device nodes, libraries and notes of the scenario's own."""

    def start_agent(self, *, config: str = "", script: str = "") -> Agent:
        """Start an agent with a config file of this text, or an author's own script; do not wait for it."""

    def start_pod(self, name: str, limits: Mapping[str, int]) -> Pod:
        """Make a pod; it starts when the scheduler finds room for it."""

    def allocatable(self, resource: str) -> int:
        """Return the allocatable number in the node's status."""

    def wait_allocatable(self, resource: str, count: int) -> None:
        """Wait until this number of devices is allocatable."""

    def restart_kubelet(self) -> None:
        """Restart the kubelet; return when the new kubelet has written the node's status."""

    def make_device_node(self, path: Path) -> None:
        """Make a device node, or a file in place of one."""

    def remove_device_node(self, path: Path) -> None:
        """Remove it."""


class FaultyPod(Pod, Protocol):
    """A pod whose end the kubelet may not see."""

    def runs(self) -> bool:
        """Whether the container's process exists, whatever the pod's status is."""

    def complete(self) -> None:
        """Let the container end by itself; it is not restarted."""

    def force_delete(self, *, hang: bool = False) -> None:
        """Delete the pod with a grace period of 0; hang: the runtime does not end its container."""

    def remove_manifest(self) -> None:
        """Remove a static pod's manifest; its container ignores that it is to end."""

    def end_containers(self) -> None:
        """Let the runtime answer again, or the grace period end; wait until no process of the pod runs."""


class FaultyNode(Node, Protocol):
    """A node whose kubelet can be made to err."""

    def start_pod(self, name: str, limits: Mapping[str, int]) -> FaultyPod:
        """Make a pod; it starts when the scheduler finds room for it."""

    def start_static_pod(self, name: str, limits: Mapping[str, int]) -> FaultyPod:
        """Make a pod by a manifest on the node, and wait until it runs."""

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
        """Let other clients use up the rate limit of PodResources, all but a few calls."""

    @property
    def checkpoint(self) -> Path:
        """The device manager's checkpoint."""


def wait_for(what: str, condition: Callable[[], bool], timeout: float) -> None:
    """Check a condition without a notification until it is true; fail after the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)
