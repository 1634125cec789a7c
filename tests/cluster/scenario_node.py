"""The real node for the shared scenarios: kubelet, scheduler, containers and device nodes of the cluster."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.cluster import isolate
from tests.cluster.node import Cluster, ClusterError, ExecError
from tests.cluster.node import Pod as ClusterPod
from tests.scenarios.fake import NodeWithAgents

__all__ = ["RealNode"]


class RealPod:
    """A pod on the real node."""

    def __init__(self, pod: ClusterPod) -> None:
        self.pod = pod

    def __repr__(self) -> str:
        return repr(self.pod)

    @property
    def name(self) -> str:
        return self.pod.name

    def wait_running(self) -> Self:
        self.pod.wait_running()
        return self

    def wait_unschedulable(self) -> None:
        self.pod.wait_unschedulable()

    def phase(self) -> str:
        return self.pod.phase

    def env(self) -> Mapping[str, str]:
        lines = self.pod.exec(["env"]).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def has(self, path: Path) -> bool:
        try:
            self.pod.exec(["ls", "-d", str(path)])
        except ExecError:
            return False
        return True

    def read(self, path: Path) -> str:
        return self.pod.exec(["cat", str(path)])

    def restart_container(self) -> None:
        self.pod.restart_container()

    def delete(self) -> None:
        self.pod.delete()
        self.pod.wait_gone()


class RealNode(NodeWithAgents):
    """The node of the session's cluster, with the directory and the agents of one scenario."""

    patience = 60.0

    def __init__(self, cluster: Cluster, directory: Path, program: Sequence[str]) -> None:
        super().__init__(directory, program, ["--cgroup-root", str(isolate.POD_CGROUPS)], forked=False)
        self.cluster = cluster

    @classmethod
    @contextmanager
    def running(cls, cluster: Cluster, program: Sequence[str] = ()) -> Iterator[RealNode]:
        """Yield the node of this cluster. At the end, end the agents and print their logs, and delete the pods.

        program: the arguments of Python for a program that runs agents.
        """
        directory = Path(tempfile.mkdtemp(dir=isolate.DEVICES))
        node = cls(cluster, directory, program)
        try:
            yield node
        finally:
            node.end_agents()
            for pod in cluster.pods("default"):
                pod.delete()
            for pod in cluster.pods("default"):
                pod.wait_gone()
            # The next scenario must not read the allocatable number that these agents left in the Node's status.
            cluster.wait_for(node.nothing_allocatable, 60.0, "nothing is allocatable any more")
            shutil.rmtree(directory, ignore_errors=True)

    def nothing_allocatable(self) -> bool:
        """Return True if the Node's allocatable of all extended resources of tests is 0. Raises ClusterError if not."""
        allocatable = self.cluster.node()["status"]["allocatable"]
        left = {name: count for name, count in allocatable.items() if name.startswith("example.") and count != "0"}
        if left:
            raise ClusterError(f"allocatable are still {left}")
        return True

    def start_pod(self, name: str, limits: Mapping[str, int]) -> RealPod:
        return RealPod(self.cluster.start_pod(name, limits))

    def allocatable(self, resource: str) -> int:
        return self.cluster.allocatable(resource)

    def wait_allocatable(self, resource: str, count: int) -> None:
        self.cluster.wait_allocatable(resource, count, self.patience)

    def restart_kubelet(self) -> None:
        self.cluster.restart_kubelet(reported=True)

    def make_device_node(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))

    def remove_device_node(self, path: Path) -> None:
        path.unlink()
