"""A node with the fake kubelet and with agents that are real processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from deviceplugin.testing import FakeKubelet, FakePod
from tests.forks import Forked
from tests.programs import ANY_CONFIG

__all__ = ["AgentProcess", "FakeNode", "FakeNodePod", "NodeWithAgents"]


class AgentProcess:
    """An agent as a process, with its log in a file; forked, or started as users do."""

    def __init__(self, arguments: list[str], config: Path | None, log: Path, *, forked: bool = True) -> None:
        self._config = config
        self._log = log
        self.process: Forked | subprocess.Popen[bytes]
        if forked:
            self.process = Forked(arguments, log)
            return
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) == 0, self.log()

    def reload(self, config: str) -> None:
        assert self._config is not None
        new = self._config.with_suffix(".new")
        new.write_text(config)
        new.replace(self._config)

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class FakeNodePod:
    def __init__(self, pod: FakePod, patience: float) -> None:
        self.pod = pod
        self._patience = patience

    def __repr__(self) -> str:
        return repr(self.pod)

    @property
    def name(self) -> str:
        return self.pod.name

    def wait_running(self) -> Self:
        self.pod.wait_running(self._patience)
        return self

    def wait_unschedulable(self) -> None:
        # The fake scheduler decided about the pod before start_pod returned.
        assert not self.pod.bound

    def phase(self) -> str:
        return self.pod.phase

    def env(self) -> Mapping[str, str]:
        return self.pod.env

    def has(self, path: Path) -> bool:
        return any(Path(node.container) == path for node in self.pod.nodes) or self._host(path) is not None

    def read(self, path: Path) -> str:
        host = self._host(path)
        assert host is not None, f"{path} is not in {self}"
        return host.read_text()

    def restart_container(self) -> None:
        self.pod.restart_container(timeout=self._patience)

    def delete(self) -> None:
        self.pod.delete(self._patience)

    def runs(self) -> bool:
        return self.pod.container().state == "running"

    def complete(self) -> None:
        self.pod.complete(timeout=self._patience)

    def force_delete(self, *, hang: bool = False) -> None:
        self.pod.force_delete(hang=hang, timeout=self._patience)

    def remove_manifest(self) -> None:
        self.pod.remove_manifest()

    def end_containers(self) -> None:
        self.pod.end_containers(self._patience)

    def _host(self, path: Path) -> Path | None:
        for mount in self.pod.mounts:
            if path.is_relative_to(mount.container):
                host = Path(mount.host, path.relative_to(mount.container))
                return host if host.exists() else None
        return None


class NodeWithAgents:
    """A node with a directory and agents. program, arguments: what each agent's command line begins and ends with."""

    def __init__(self, directory: Path, program: Sequence[str], arguments: Sequence[str], *, forked: bool) -> None:
        self.directory = directory
        self.agents: list[AgentProcess] = []
        self.options: tuple[str, ...] = ()
        """Options that are added to the command line of each agent."""
        self._program, self._arguments, self._forked = program, arguments, forked

    def start_agent(self, *, config: str = "", script: str = "") -> AgentProcess:
        number = len(self.agents)
        file = self.directory / f"agent-{number}.{'py' if script else 'yaml'}"
        file.write_text(script or config)
        run = [str(file)] if script else ["-m", "deviceplugin", "run", "--config", str(file), *ANY_CONFIG]
        agent = AgentProcess(
            [*self._program, *run, *self._arguments, *self.options],
            None if script else file,
            self.directory / f"agent-{number}.log",
            forked=self._forked,
        )
        self.agents.append(agent)
        return agent

    def end_agents(self) -> None:
        """Kill the running agents, and print the log of each agent."""
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.kill()
            print(f"--- agent {agent.process.pid}: {agent.process.returncode}\n{agent.log()}")


class FakeNode(NodeWithAgents):
    patience = 20.0

    def __init__(self, kubelet: FakeKubelet, directory: Path, program: str) -> None:
        super().__init__(directory, ["-m", program], kubelet.arguments, forked=True)
        self.kubelet = kubelet

    @classmethod
    @contextmanager
    def running(cls, directory: Path, program: str = "tests.scenarios.quick") -> Iterator[FakeNode]:
        """Run a node; at the end its agents are ended, and their logs printed. program: a module that runs agents."""
        with FakeKubelet() as kubelet:
            node = cls(kubelet, directory, program)
            try:
                yield node
            finally:
                node.end_agents()

    def start_pod(self, name: str, limits: Mapping[str, int]) -> FakeNodePod:
        return FakeNodePod(self.kubelet.start_pod(name, limits), self.patience)

    def start_static_pod(self, name: str, limits: Mapping[str, int]) -> FakeNodePod:
        return FakeNodePod(self.kubelet.run_pod(name, limits, static=True), self.patience).wait_running()

    def stop_kubelet(self) -> None:
        self.kubelet.stop()

    def start_kubelet(self) -> None:
        self.kubelet.start()

    def cut_off(self) -> None:
        self.kubelet.hold_sources()

    def reconnect(self) -> None:
        self.kubelet.release_sources()

    def lose_network(self) -> None:
        self.kubelet.lose_network()

    def restore_network(self) -> None:
        self.kubelet.restore_network()

    def flood_pod_resources(self) -> None:
        self.kubelet.pod_resources_refused = 0.9

    @property
    def checkpoint(self) -> Path:
        return self.kubelet.checkpoint

    def allocatable(self, resource: str) -> int:
        return self.kubelet.allocatable(resource)

    def wait_allocatable(self, resource: str, count: int) -> None:
        self.kubelet.wait_allocatable(resource, count, self.patience)

    def restart_kubelet(self) -> None:
        self.kubelet.restart(downtime=0.1)

    def make_device_node(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            path.touch()

    def remove_device_node(self, path: Path) -> None:
        path.unlink()
