"""The scenarios of device plugin and DRA on the fake node; ``python -m tests.scenarios.fake_sides`` is their agent."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deviceplugin import naming, sources
from deviceplugin.device import Device
from deviceplugin.sources.path import device_id
from deviceplugin.testing import ContainerSpec, FakePod
from dra_bridge.driver import preparation
from dra_bridge.node import claim_checks
from dra_bridge.testing.node import FakeNode, Holding, overlaps
from tests import kubeconfigs
from tests.dra.objects import device_class
from tests.programs import ANY_CONFIG
from tests.register.node import lose_register
from tests.scenarios import quick
from tests.scenarios.fake import AgentProcess
from tests.scenarios.node import wait_for
from tests.scenarios.sides import Scene, driver, named

LIMIT = 120.0
"""Minimum seconds of each wait's deadline, because the machine may be busy."""


class WatchedNode(FakeNode):
    """A fake node that records when the containers of pods with claims ended, by the pod's UID (monotonic seconds)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.ended: dict[str, float] = {}
        super().__init__(*arguments, **options)

    def unprepare_pod(self, pod: FakePod) -> None:
        self.ended[pod.uid] = time.monotonic()
        super().unprepare_pod(pod)


class FakeScene(Scene):
    """The devices, agent and pods of one scenario."""

    pace = 10.0
    patient = True

    def __init__(self, node: WatchedNode, directory: Path) -> None:
        self.node = node
        self.stack = contextlib.ExitStack()
        self._directory = directory
        self._config, self._notes = directory / "config.yaml", directory / "released"
        self._kubeconfig = kubeconfigs.written(directory / "kubeconfig", node.server.url)
        self._shares: dict[str, str | int] = {}
        self._ids: dict[str, str] = {}
        """The id of each device, by the device's name in slices."""
        self._logs: list[Path] = []
        self._agent: AgentProcess | None = None
        self.program: tuple[str, ...] = ()
        """Python's arguments before `-m` in the agent's command line: a program that runs the agent."""
        self._waiting: dict[str, tuple[str, str]] = {}
        self._hanging: list[FakePod] = []
        self._joined: set[tuple[str, str]] = set()
        """Pairs of pods that share a device by one claim."""
        self._seen = 0
        """The number of `released` calls that were checked."""

    # Devices, agent and pods.

    def begin(self, **resources: tuple[int, str]) -> None:
        for letter, (count, share) in resources.items():
            (self._directory / letter).mkdir()
            for number in range(count):
                path = self._directory / letter / f"{letter}{number}"
                path.touch()
                self._ids[naming.device_name(device_id(str(path)))] = device_id(str(path))
            self._shares[letter] = share
            self.node.server.create(device_class(driver(letter)))
        self._write()
        self.start_agent()
        for letter, (count, share) in resources.items():
            self.wait_states(letter, **{"dra" if share == "all" else "plugin": count})

    def share(self, **shares: str | int) -> None:
        self._shares |= shares
        self._write()

    def slices(self, resource: str) -> Sequence[Mapping[str, Any]]:
        return [one for one in self.node.server.objects("resourceslices") if one["spec"]["driver"] == driver(resource)]

    def lease(self) -> Mapping[str, Any]:
        leases = self.node.server.objects("leases")
        return leases[0] if leases else {"metadata": {}}

    def until(self, what: str, condition: Callable[[], object], limit: float = LIMIT) -> None:
        wait_for(what, lambda: bool(condition()), max(limit, LIMIT))

    def pod(self, name: str, resource: str, **_: Any) -> FakePod:
        return self.node.start_pod(name, {named(resource): 1})

    def claimer(self, name: str, resource: str, **_: Any) -> FakePod:
        return self.node.start_pod(name, template={driver(resource): 1})

    def running(self, *pods: FakePod) -> None:
        for pod in pods:
            pod.wait_running(LIMIT)

    def runs(self, uid: str) -> bool:
        return any(one.uid == uid and one.end is None for one in self._holdings())

    def wants(self, how: str, resource: str, name: str = "", *, scheduled: bool = False) -> None:
        name = name or f"wants-{resource}"
        self._waiting[name] = how, resource
        self._make(name)

    def delete(self, pod: FakePod) -> None:
        pod.delete(LIMIT)

    def hang(self, pod: FakePod) -> None:
        pod.force_delete(hang=True)
        self._hanging.append(pod)

    def thaw(self) -> None:
        while self._hanging:
            self._hanging.pop().end_containers(LIMIT)

    # Faults.

    def end_kubelet(self, how: str) -> None:
        self.node.stop()

    def start_kubelet(self) -> None:
        self.node.start()

    def lose_checkpoint(self) -> None:
        self.node.damage_checkpoint("deleted")

    def lose_ledger(self) -> None:
        lose_register(self.node.root)

    def stop_api_server(self) -> None:
        self.node.hold_sources()

    def start_api_server(self) -> None:
        self.node.release_sources()

    @contextlib.contextmanager
    def flooded(self) -> Iterator[None]:
        self.node.pod_resources_refused = 0.9
        yield
        self.node.pod_resources_refused = 0.0

    def static_pod(self, name: str, resource: str) -> FakePod:
        pod = self.node.run_pod(name, {named(resource): 1}, static=True)
        return pod.wait_running(LIMIT)

    def remove_manifest(self, pod: FakePod) -> None:
        pod.remove_manifest()

    def end_slow(self, pod: FakePod) -> None:
        pod.end_containers(LIMIT)

    def lose_network(self) -> None:
        self.node.lose_network()

    def restore_network(self) -> None:
        self.node.restore_network()

    def admitted(self, name: str, resource: str) -> FakePod:
        pod = self.pod(name, resource)
        checkpoint = self.node.checkpoint
        self.until(f"{pod} to be admitted", lambda: checkpoint.exists() and pod.uid in checkpoint.read_text())
        return pod

    def wipes(self) -> int:
        return sum(len(names) for _, names in self._released())

    def claim_user(self, name: str, resource: str) -> FakePod:
        self.node.claim(f"of-{name}", driver(resource))
        return self.node.start_pod(name, claims=[f"of-{name}"])

    def take_claim(self, pod: FakePod) -> None:
        self.node.remove_claim(f"of-{pod.name}")

    def joins(self, pod: FakePod, name: str) -> FakePod:
        self._joined.add((pod.name, name))
        return self.node.start_pod(name, claims=[f"of-{pod.name}"]).wait_running(LIMIT)

    def forget(self, pod: FakePod) -> None:
        self.node.reconcile_claims()
        assert pod.uid not in self.node.claim_state.read_text()

    def init_pod(self, name: str, resource: str, *, sidecar: bool = False) -> FakePod:
        init = ContainerSpec("main", {named(resource): 1}, restartable=sidecar, lasting=not sidecar)
        pod = self.node.start_pod(name, containers={"later": {}}, init_containers=[init])
        self.until(f"{pod} to have its device", lambda: self.runs(pod.uid))
        return pod

    def end_container(self, pod: FakePod) -> None:
        pod.complete()

    @contextlib.contextmanager
    def kubelet_without_pods(self) -> Iterator[None]:
        self.node.hold_sources()
        self.node.start()
        yield
        self.node.release_sources()

    # Observations.

    def note_holders(self) -> None:
        """Wait until the agent has recorded all pods with devices; before, only the kubelet's checkpoint names them."""
        copy = self.node.cdi / "deviceplugin" / "allocations" / "dra-bridge.json"
        held = {one.uid for one in self._holdings() if one.side == "plugin" and one.end is None}
        known = lambda: not held or (copy.exists() and all(uid in copy.read_text() for uid in held))  # noqa: E731
        self.until("the agent to know who has devices", known)

    def check(self) -> None:
        """Fail if a device has had two holders, or if `released` was called for a device while it had a holder."""
        holdings = self._holdings()
        assert [pair for pair in overlaps(holdings) if (pair[0].pod, pair[1].pod) not in self._joined] == []
        released = self._released()
        new, self._seen = released[self._seen :], len(released)
        wrong = [
            one
            for at, names in new
            for one in holdings
            if one.device in names and one.begin < at and (one.end is None or at < one.end)
        ]
        assert not wrong, f"released while it was held: {wrong}"

    def handed_on(self, end: Callable[[], object], old: Iterable[str], *new: str, limit: float = LIMIT) -> None:
        uids = set(old)
        devices = {one.device for one in self._holdings() if one.uid in uids}
        end()
        self.until("the containers to end", lambda: not any(map(self.runs, uids)))

        def got() -> bool:
            self.check()
            self.urge()
            has = {one.pod for one in self._holdings() if one.device in devices and one.end is None}
            return has >= set(new)

        self.until(f"{', '.join(new)} to get what was held", got, limit)
        for name in new:
            del self._waiting[name]

    def handed_to_anybody(self, pod: FakePod) -> None:
        (device,) = {one.device for one in self._holdings() if one.uid == pod.uid}
        self.delete(pod)

        def got() -> bool:
            self.check()
            self.urge()
            return any(one.device == device and one.end is None for one in self._holdings())

        self.until("somebody to get what was held", got)

    def end(self) -> None:
        """End the agent; print its logs."""
        self.check()
        self.kill_agent()
        for log in self._logs:
            print(f"--- {log.name}\n{log.read_text()}")

    def _write(self) -> None:
        resources = [
            {
                "name": named(letter),
                "driver": driver(letter),
                "devices": [{"path": f"{self._directory}/{letter}/*"}],
                "dra": {"share": share},
            }
            for letter, share in self._shares.items()
        ]
        new = self._config.with_suffix(".new")
        new.write_text(json.dumps({"resources": resources}))
        new.replace(self._config)

    def start_agent(self) -> None:
        log = self._directory / f"agent-{len(self._logs)}.log"
        self._logs.append(log)
        where = ["--node-name", self.node.name, "--kubeconfig", str(self._kubeconfig)]
        program = [*self.program, "-m", "tests.scenarios.fake_sides", str(self._notes)]
        command = [*program, "run", "--config", str(self._config)]
        self._agent = AgentProcess([*command, *ANY_CONFIG, *self.node.arguments, *where], self._config, log)
        self.until("the agent to register", lambda: "registered as" in log.read_text())

    def kill_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.kill()

    def _make(self, name: str) -> None:
        how, resource = self._waiting[name]
        (self.pod if how == "pod" else self.claimer)(name, resource)

    def urge(self) -> None:
        """Create pods again that the kubelet has refused."""
        for name in self._waiting:
            found = self.node.pods.get(f"default/{name}")
            if found is not None and found.phase == "Failed":
                found.delete(LIMIT)
                self._make(name)

    def _holdings(self) -> list[Holding]:
        """Return which pod held which device when; a device of a claim is held until the pod's containers end."""
        return [
            replace(one, device=self._ids.get(one.device, one.device), end=self.node.ended.get(one.uid, one.end))
            for one in self.node.holdings()
        ]

    def _released(self) -> list[tuple[float, list[str]]]:
        if not self._notes.exists():
            return []
        return [(one["at"], one["devices"]) for one in map(json.loads, self._notes.read_text().splitlines())]


def main(notes: str, *arguments: str) -> int:
    """Run an agent with short periods whose sources record the calls of `released`."""

    class Recorded(sources.ConfiguredSource):
        def released(self, devices: Sequence[Device]) -> None:
            line = json.dumps({"at": time.monotonic(), "devices": [device.id for device in devices]})
            with open(notes, "a") as file:
                file.write(f"{line}\n")

        @property
        def hooks(self) -> frozenset[str]:
            return super().hooks | {"released"}

    sources.ConfiguredSource = Recorded  # type: ignore[misc]
    quick.scan_often()
    preparation.PATIENCE = 0.5  # type: ignore[misc]
    claim_checks.RECONCILE = 0.5  # type: ignore[misc]
    return kubeconfigs.main(arguments)


if __name__ == "__main__":
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)
    sys.exit(main(*sys.argv[1:]))
