"""The agent as a whole, against the fake kubelet: sources that misbehave, releases, reloads, signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from deviceplugin.config import OPEN, Config, ConfigError, Lock, load
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.identity import UNIDENTIFIED, boot_id, identified
from deviceplugin.kubelet import allocation_wait, tracker
from deviceplugin.kubelet.checkpoint import annotate
from deviceplugin.kubelet.device_list import Stream
from deviceplugin.kubelet.holders import HolderSnapshot, HoldReason
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.status import unready
from deviceplugin.node import following, scanning
from deviceplugin.node import process as process_module
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.node.options import add_run_options, run_options
from deviceplugin.node.service import Service
from deviceplugin.register import rules as grants
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import WHOLE, Allocation, AllocationRecord, LedgerError
from deviceplugin.sharing import shares
from deviceplugin.source import DeviceSource
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, FakePod, PodFailedError, Served, serve
from deviceplugin.testing import checkpoint as written
from deviceplugin.wire import deviceplugin_pb2 as pb
from tests.config.files import bombs as config_bombs
from tests.kubelet.test_tracker import fails
from tests.waits import until, wait

R = "example.com/r"
Serve = Callable[..., Served]


def source(count: int = 2, resource: str = R, prefix: str = "sim") -> SimulatedSource:
    return SimulatedSource(count, resource=resource, prefix=prefix)


# Errors and options.


def test_two_sources_for_one_resource_are_refused() -> None:
    """Two sources of one resource are an error that names it."""
    with pytest.raises(AgentError, match=f"two sources for one resource: {R}"):
        Agent([source(), source()])


def test_source_without_a_name_is_refused() -> None:
    """A source without a resource name is an error that says what to set."""
    with pytest.raises(AgentError, match="SimulatedSource has no resource name; set `resource`"):
        Agent([SimulatedSource(1)])


def test_every_path_that_can_be_given_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path option of the command line reaches the agent."""
    monkeypatch.setattr("deviceplugin.node.logs.setup", lambda *_: None)
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    names = (
        "kubelet_root",
        "device_plugin_dir",
        "pod_resources_socket",
        "cgroup_root",
        "pod_log_dir",
        "container_log_dir",
    )
    given = {name: Path("/given", name) for name in names}
    words = [word for name, path in given.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    assert run_options(parser.parse_args(words)).paths == Paths(**given)


def test_agent_that_is_stopped_before_it_runs_does_not_run() -> None:
    """An agent that is stopped before `run` ends at once."""

    async def run() -> None:
        agent = Agent([source()])
        agent.stop()
        async with asyncio.timeout(5):
            await agent.run()

    asyncio.run(run())


# Sources.


@pytest.mark.parametrize("name", ["a%2Fb", "100%", "a b#c?d", "ä"])
def test_sockets_may_lie_anywhere(name: str) -> None:
    """Special characters in the kubelet's directory do not change the address of a socket."""
    # Not tmp_path: a socket's path has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory() as directory,
        FakeKubelet(Path(directory, name)) as kubelet,
        serve([source(1)], kubelet),
    ):
        kubelet.wait_allocatable(R, 1)
        assert kubelet.run_pod("p", {R: 1}).device_ids


def test_source_that_ends_stays_true(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """The last list of a source that ends stays served; a source that ends without a list has no devices."""

    class Silent(DeviceSource):
        resource = "example.com/silent"

        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            for nothing in list[Sequence[Device]]():
                yield nothing

    class Once(DeviceSource):
        resource = R

        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("a")]

    served(Once(), Silent())
    fake_kubelet.wait_allocatable(R, 1)
    assert "example.com/silent" in fake_kubelet.resources()
    fake_kubelet.restart()
    fake_kubelet.wait_registered(R, 2)
    fake_kubelet.wait_allocatable(R, 1)


@pytest.mark.parametrize(
    ("plain", "error"),
    [(True, OSError("unplugged")), (False, OSError("unplugged")), (True, SystemExit(3))],
    ids=["plain", "async", "SystemExit"],
)
def test_source_that_fails_is_started_again(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture, plain: bool, error: BaseException
) -> None:
    """A source that raises is started again after at least 0.2 s; its last list stays served, and the log says so."""
    starts = []

    class Failing(DeviceSource):
        resource = R

        def lists(self) -> Iterator[Sequence[Device]]:
            starts.append(time.monotonic())
            yield [Device(f"d{number}") for number in range(len(starts))]
            if len(starts) < 2:
                raise error

    class Plain(Failing):
        def watch(self) -> Iterator[Sequence[Device]]:
            return self.lists()

    class Coroutine(Failing):
        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            for devices in self.lists():
                yield devices

    agent = served(Plain() if plain else Coroutine())
    fake_kubelet.wait_allocatable(R, 2)
    assert starts[1] - starts[0] >= 0.2
    assert "its last list of 1 devices stays" in caplog.text
    wait(lambda: agent.agent.status().resources[0].source_error == "")


@pytest.mark.parametrize("listed", [[Device("a"), Device("a")], None, ["a"], 3])
def test_list_that_is_none_costs_the_source_only(
    fake_kubelet: FakeKubelet, served: Serve, listed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A source that yields a wrong list gets an error; its last good list stays, and other sources are not affected."""

    class Wrong(DeviceSource):
        resource = R

        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("good")]
            yield listed

    agent = served(Wrong(), source(1, "example.com/s"))
    wait(lambda: agent.agent.status().resources[0].source_error)
    assert fake_kubelet.allocatable(R) == 1
    assert fake_kubelet.allocatable("example.com/s") == 1
    assert "the source failed" in caplog.text


def test_watch_that_is_no_generator_is_said(served: Serve) -> None:
    """A `watch` that returns a list instead of yielding lists is an error of its source that says so."""

    class NoGenerator(DeviceSource):
        resource = R

        def watch(self) -> Any:
            return [Device("a")]

    with pytest.raises(RuntimeError, match="must yield lists of devices, not return one"):
        served(NoGenerator())


# Releases.


class Releasing(SimulatedSource):
    """Records the devices that `released` gets."""

    resource = R

    def __init__(self, count: int, notify: Callable[[], None]) -> None:
        super().__init__(count)
        self.released_ids: list[str] = []
        self._notify = notify

    def released(self, devices: Sequence[Device]) -> None:
        self.released_ids += [device.id for device in devices]
        self._notify()


@pytest.fixture
def prompt(served: Serve, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Give a function that serves sources with a scan every 0.05 s."""
    monkeypatch.setattr(grants, "WELL_APART", 0.1)
    return partial(served, period=0.05)


SELDOM: Mapping[str, float] = {"period": 300.0}
"""Options with which scans follow grants only: the period is 300 s."""


def named(agent: Served, pod: FakePod) -> None:
    """Wait until a scan has found the pod as a holder."""
    wait(lambda: {one.pod_uid for one in agent.agent.tracker.snapshot.held} >= {pod.uid})


def test_released_between_two_pods_that_follow_each_other(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """`released` runs before the next pod gets the device, without a scan; once for a pod with an init container."""
    devices = Releasing(1, fake_kubelet.notify)
    agent = served(devices, **SELDOM)
    pod = fake_kubelet.run_pod("p0", {R: 1})
    containers = {"main": {R: 1}}
    for count in (1, 2):
        named(agent, pod)
        pod.delete()
        pod = fake_kubelet.run_pod(f"p{count}", containers=containers, init_containers={"init": {R: 1}})
        assert pod.running
        assert len(fake_kubelet.rpcs("Allocate", R)) == 1 + 2 * count
        assert devices.released_ids == ["sim-0"] * (1 + count)  # `released` is also called before the first grant
    named(agent, pod)
    assert devices.released_ids == ["sim-0"] * 3


def test_a_grants_pod_is_found_without_a_request(
    fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan finds a grant's pod by the AllocateResponse in the checkpoint, before the pod runs, without `List`."""
    agent = served(source(1), **SELDOM)
    former = fake_kubelet.run_pod("former", {R: 1})
    named(agent, former)
    former.delete()
    monkeypatch.setattr(fake_kubelet, "start_sandbox", fails)
    pod = fake_kubelet.start_pod("pod", {R: 1})
    named(agent, pod)
    wait(lambda: record(agent).holders == {(pod.uid, "main")})
    assert not record(agent).pending
    assert not fake_kubelet.rpcs("List")


def test_a_restarted_agent_knows_a_pod_that_the_kubelet_has_forgotten(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A pod that was deleted by force hangs: restarted agents without a ledger keep its device held until it ends."""
    agent = served(source(1), source(1, "example.com/s"), **SELDOM)
    pod = fake_kubelet.run_pod("hangs", {R: 1})
    named(agent, pod)
    pod.force_delete(hang=True)
    fake_kubelet.run_pod("next", {"example.com/s": 1})
    assert pod.uid not in fake_kubelet.checkpoint.read_text()
    for name in ("third", "fourth"):
        agent.stop()
        agent = served(source(1), period=0.1)
        named(agent, pod)
        with pytest.raises(PodFailedError):
            fake_kubelet.run_pod(name, {R: 1})
    pod.end_containers()
    fake_kubelet.wait_allocatable(R, 1)
    assert fake_kubelet.run_pod("last", {R: 1}).running


def record(agent: Served) -> AllocationRecord:
    (only,) = agent.agent.register.snapshot.allocations.values()
    return only


@pytest.fixture
def no_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off scans after grants, and let no grant count as recent: the fake's pods end soon after their admission."""
    monkeypatch.setattr(scanning, "SOON", 300.0)
    monkeypatch.setattr(scanning, "BURST", 600.0)
    monkeypatch.setattr(tracker, "ADMISSION", 0.0)


@pytest.mark.usefixtures("no_scans")
@pytest.mark.parametrize("dropped", [False, True])
def test_released_after_a_pod_that_no_scan_has_seen(fake_kubelet: FakeKubelet, served: Serve, *, dropped: bool) -> None:
    """A pod ends before any scan: `released` is called before the next grant, also if no checkpoint names the pod."""
    devices = Releasing(1, fake_kubelet.notify)
    served(devices, source(1, "example.com/s"), **SELDOM)
    fake_kubelet.run_pod("short", {R: 1}).delete()
    if dropped:  # for the next pod the kubelet drops pods that have ended
        fake_kubelet.run_pod("between", {"example.com/s": 1})
    assert fake_kubelet.run_pod("next", {R: 1}).running
    assert devices.released_ids == ["sim-0"] * 2


@pytest.mark.usefixtures("no_scans")
@pytest.mark.parametrize("how", ["deleted", "empty", "old"])
def test_a_pod_keeps_its_device_if_the_checkpoint_is_lost_before_a_scan(
    fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If the checkpoint is lost after a grant, the device is withheld while a pod runs that began after the grant."""
    monkeypatch.setattr(grants, "WELL_APART", 0.1)
    devices = Releasing(1, fake_kubelet.notify)
    agent = served(devices, **SELDOM)
    wait(fake_kubelet.checkpoint.exists)
    before = fake_kubelet.checkpoint.read_bytes()
    pod = fake_kubelet.run_pod("p", {R: 1})
    assert record(agent).pending
    assert not record(agent).holders
    fake_kubelet.stop()
    if how == "deleted":
        fake_kubelet.damage_checkpoint("deleted")
    else:
        empty = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {}}, "Checksum": 0}
        fake_kubelet.checkpoint.write_bytes(json.dumps(empty).encode() if how == "empty" else before)
    fake_kubelet.start()
    wait(lambda: fake_kubelet.streams(R) == 1)
    for number in range(3):
        in_loop(agent, agent.agent.scanner.scan)
        assert not fake_kubelet.run_pod(f"other{number}", {R: 1}, check=False).running
    assert pod.running
    assert devices.released_ids == ["sim-0"]
    pod.delete()

    def ended() -> bool:
        in_loop(agent, agent.agent.scanner.scan)
        return not agent.agent.register.snapshot.allocations

    wait(ended)
    assert fake_kubelet.run_pod("next", {R: 1}).running
    assert devices.released_ids == ["sim-0"] * 2


@pytest.mark.usefixtures("no_scans")
def test_a_pod_that_was_deleted_by_force_before_a_scan_keeps_its_device(
    fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is deleted by force before a scan, and the new checkpoint does not name it: its device stays withheld."""
    monkeypatch.setattr(allocation_wait, "PATIENCE", 0.0)
    devices = Releasing(2, fake_kubelet.notify)
    agent = served(devices, **SELDOM)
    hung = fake_kubelet.run_pod("hung", {R: 1})
    hung.force_delete(hang=True)
    between = fake_kubelet.run_pod("between", {R: 1})
    assert between.running
    assert hung.uid not in fake_kubelet.checkpoint.read_text()
    for number in range(2):
        assert not fake_kubelet.run_pod(f"other{number}", {R: 1}, check=False).running
        in_loop(agent, agent.agent.scanner.scan)
    assert sorted(devices.released_ids) == ["sim-0", "sim-1"]


def test_a_device_is_not_granted_before_released_succeeds(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If `released` fails between two pods, the second pod is refused with the reason until a later call succeeds."""
    fails = threading.Event()

    class Failing(Releasing):
        def released(self, devices: Sequence[Device]) -> None:
            super().released(devices)
            if fails.is_set():
                raise OSError("no such hardware")

    devices = Failing(1, fake_kubelet.notify)
    agent = served(devices, period=1.0)
    pod = fake_kubelet.run_pod("p", {R: 1})
    named(agent, pod)
    fails.set()
    pod.delete()
    refused = fake_kubelet.run_pod("refused", {R: 1}, check=False)
    assert refused.phase == "Failed"
    assert "before `released` succeeds: released of" in refused.message
    assert agent.agent.status().resources[0].endpoint.refusals == {"released": 1}
    fake_kubelet.wait_allocatable(R, 0)
    withheld = agent.agent.status().resources[0].withheld["sim-0"]
    assert (withheld.kind, "OSError: no such hardware" in withheld.reason) == ("unreleased", True)
    fails.clear()
    fake_kubelet.wait_allocatable(R, 1)
    assert fake_kubelet.run_pod("next", {R: 1}).running
    assert not agent.agent.status().resources[0].withheld


class Named(Releasing):
    """Lists one device with the identity uuid:1 under the given id."""

    def __init__(self, name: str, changed: Callable[[], None], resource: str = R) -> None:
        super().__init__(1, changed)
        self.name, self.resource = name, resource

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device(self.name, identity="uuid:1")]


class Renamed(DeviceSource):
    """Lists one device with the identity uuid:1 under the id d, and has no hooks."""

    def __init__(self, resource: str) -> None:
        self.resource = resource

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device("d", identity="uuid:1")]


@pytest.mark.parametrize("learns", ["allocate", "kubelet-restart"])
def test_what_another_agent_gave_is_offered_again_after_its_end(
    fake_kubelet: FakeKubelet, prompt: Serve, learns: str
) -> None:
    """Of two agents of one device, the agent that did not grant it offers it again when the holder has ended."""
    other = "example.com/other"
    agent, _ = (prompt(Renamed(resource)) for resource in (R, other))
    for resource in (R, other):
        fake_kubelet.wait_allocatable(resource, 1)
    wait(lambda: agent.agent.tracker.snapshot.at and not agent.agent.scanner.wanted.is_set())
    pod = fake_kubelet.run_pod("p", {other: 1})
    if learns == "allocate":
        assert "counts as held" in fake_kubelet.run_pod("q", {R: 1}, check=False).message
    else:
        fake_kubelet.restart()
        fake_kubelet.wait_registered(R)
        fake_kubelet.wait_registered(other)
    fake_kubelet.wait_allocatable(R, 0)
    pod.delete()
    fake_kubelet.wait_allocatable(R, 1)


async def test_what_a_pod_has_counts_before_its_resource_is_compared(tmp_path: Path) -> None:
    """A pod holds a device by a resource that a reload adds: another resource never grants it before the pod ends."""
    other, paths = "example.com/b", Paths(tmp_path)
    agent = Agent([Named("b", lambda: None, other)], paths)
    device, hardware = Device("b", identity="uuid:1"), frozenset({"uuid:1"})
    agent.services[other].inventory.publish([device], {"b": hardware})
    answer = pb.ContainerAllocateResponse()
    annotate(answer, R, {"a": Wanted((R, "a"), identified(hardware, boot_id()), WHOLE)}, boot_id(), 0.0)
    entry = written.PodDevicesEntry("u1", "main", R, {-1: ["a"]}, answer.SerializeToString())
    paths.plugins.mkdir(parents=True)
    (paths.plugins / written.FILE_NAME).write_bytes(written.Checkpoint([entry]).to_json())
    await agent.tracker.start()
    await agent.scanner.observe(agent.tracker.snapshot, 0)
    refused = f"b of {other} and a of {R}, which counts as held by pod u1, are the same hardware"
    with pytest.raises(DeviceConflictError, match=refused):
        await agent.register.grant(other, {"b": "b"})
    service = Service(Named("a", lambda: None), agent.supervisor.context)
    agent.supervisor.services[R] = service
    service.inventory.publish([Device("a", identity="uuid:1")], {"a": hardware})
    for compared in (False, True):
        assert ((R, "a") in agent.register.snapshot.allocations) is compared
        with pytest.raises(DeviceConflictError, match="the same hardware"):
            await agent.register.grant(other, {"b": "b"})
        assert agent.register.withheld(R, "plugin").ids == {}, "to its own id the kubelet keeps"
        await agent.scanner.observe(agent.tracker.snapshot, agent.register.snapshot.sequence)
    (paths.plugins / written.FILE_NAME).write_bytes(written.Checkpoint([]).to_json())
    await taken(agent, scan(1.0))
    await agent.register.grant(other, {"b": "b"})


@pytest.mark.parametrize("healthy", [True, False])
async def test_a_holder_is_shown_by_the_process_that_serves_its_resource(tmp_path: Path, *, healthy: bool) -> None:
    """`status` shows the holder of a resource that is not served here, unless another process serves the resource."""
    paths, container = Paths(tmp_path), pb.ContainerAllocateResponse()
    agent = Agent([Named("b", lambda: None, "example.com/b")], paths)
    annotate(container, R, {"a::0": Wanted((R, "a"), UNIDENTIFIED, WHOLE)}, boot_id(), 0.0)
    ours = written.PodDevicesEntry("u1", "main", R, {-1: ["a::0"]}, container.SerializeToString())
    foreign = written.PodDevicesEntry("u1", "main", "example.com/foreign", {-1: ["f"]}, b"")
    paths.plugins.mkdir(parents=True)
    checkpoint = written.Checkpoint([ours, foreign], {R: ["a::0"] if healthy else [], "example.com/foreign": []})
    (paths.plugins / written.FILE_NAME).write_bytes(checkpoint.to_json())
    await agent.tracker.start()
    held = {(R, "a"): frozenset({PodContainer("", "", "main", "u1")})}
    assert agent.status().unserved == ({} if healthy else held)


def test_device_that_two_pods_hold_is_said_and_counted_once(
    fake_kubelet: FakeKubelet, prompt: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that the checkpoint names for two running pods is logged and counted once for each double allocation."""
    agent = prompt(source(1))
    fake_kubelet.wait_allocatable(R, 1)
    one = fake_kubelet.run_pod("one", {R: 1})
    wait(lambda: agent.agent.tracker.snapshot.held)
    checkpoint = written.Checkpoint.from_json(fake_kubelet.checkpoint.read_bytes())
    (entry,) = checkpoint.entries or ()
    fake_kubelet.stop()  # from now on only the test writes the checkpoint
    other = "7c1d4e9a-2b7f-4f63-8a3e-54a9d0f7c222"
    (fake_kubelet.pod_logs / f"default_two_{other}").mkdir()
    for number in (1, 2):
        replace(checkpoint, entries=[entry, replace(entry, pod_uid=other)]).write(fake_kubelet.checkpoint)
        fake_kubelet.cgroups.add_pod(other)
        fake_kubelet.cgroups.add_container(other, "c")
        wait(agent.agent.tracker.double_held)
        scanned(agent, 3)
        assert agent.agent.status().double_allocations == number
        checkpoint.write(fake_kubelet.checkpoint)
        fake_kubelet.cgroups.remove_pod(other)
        # Only a current checkpoint ends a holder, and a remembered holder does not prove a double allocation.
        wait(lambda: not agent.agent.tracker.double_held())
        scanned(agent, 2)
    said = [record.getMessage() for record in caplog.records if "to several pods" in record.getMessage()]
    assert len(said) == 2
    assert "device sim-0 to several pods: " in said[0]
    assert {"default/one", "default/two"} <= set(said[0].replace(",", "").split())
    fake_kubelet.start()
    assert one.running


def test_an_old_checkpoint_shows_no_device_that_two_pods_hold(fake_kubelet: FakeKubelet, prompt: Serve) -> None:
    """If an old checkpoint names the device's former pod, and a scan its present pod, this is no double allocation."""
    agent = prompt(source(1))
    former = fake_kubelet.run_pod("former", {R: 1})
    named(agent, former)
    old = fake_kubelet.checkpoint.read_bytes()
    former.delete()
    pod = fake_kubelet.run_pod("pod", {R: 1})
    named(agent, pod)
    fake_kubelet.stop()
    fake_kubelet.checkpoint.write_bytes(old)
    fake_kubelet.hold_sources()  # until `release_sources` the kubelet does not drop pods that have ended
    fake_kubelet.start()
    tracker = agent.agent.tracker
    wait(lambda: tracker.snapshot.current and {one.pod_uid for one in tracker.snapshot.held} == {former.uid, pod.uid})
    scanned(agent, 3)
    assert not agent.agent.status().double_allocations
    fake_kubelet.release_sources()
    wait(lambda: {one.pod_uid for one in tracker.snapshot.held} == {pod.uid})
    assert pod.running


def scanned(agent: Served, count: int = 1) -> None:
    """Wait for `count` more scans."""
    seen = {agent.agent.tracker.snapshot.at}

    def enough() -> bool:
        seen.add(agent.agent.tracker.snapshot.at)
        return len(seen) > count

    wait(enough)


# Reloads.


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file of one resource."""
    file = tmp_path / "config.yaml"
    file.write_text(text(a=1))
    return file


class Taking(process_module.Program):
    """A program that calls a function with each changed config."""

    def __init__(self, taken: Callable[[Config], object], agent: Agent | None = None) -> None:
        super().__init__(cast("Agent", agent))
        self.taken = taken

    async def take(self, config: Config, *_: object) -> None:
        self.taken(config)


async def test_a_profile_of_a_resource_is_not_served_by_mixed(tmp_path: Path) -> None:
    """A reload that adds or removes the resource of one MIG profile also changes the resource with `mig: mixed`."""
    mixed = "resources:\n- {name: example.com/a, devices: [{nvidia: {mig: mixed}}]}\n"
    one = "- {name: example.com/small, devices: [{nvidia: {profile: 1g.10gb}}]}\n"
    config, taken = tmp_path / "config.yaml", list[tuple[str, ...]]()

    class Changing(process_module.Program):
        async def take(self, config: Config, changed: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
            taken.append(tuple(changed))

    config.write_text(mixed)
    file = process_module.ConfigFile.read(config, OPEN)
    for content in (mixed + one, mixed + one + one.replace("small", "more"), mixed):
        config.write_text(content)
        file = await process_module.take_changed(Changing(cast("Agent", None)), file)
    assert taken == [("example.com/a", "example.com/small"), ("example.com/more",), ("example.com/a",)]


async def test_metrics_are_read_at_the_start(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A change of `metrics` in the config file is not applied by a reload, and the log says so."""
    first = process_module.ConfigFile.read(config, OPEN)
    config.write_text(text(a=1) + "metrics: {period: 5}\n")

    await process_module.take_changed(Taking(lambda _: pytest.fail("no resource changed")), first)
    assert "`metrics` is read at the start" in caplog.text


async def test_a_file_that_changes_while_the_agent_starts_is_taken(config: Path, tmp_path: Path) -> None:
    """A config file that changes between its first reading and the start of the watch is applied."""
    file = process_module.ConfigFile.read(config, OPEN)
    config.write_text(text(a=2))
    taken = asyncio.get_running_loop().create_future()

    agent = Agent([source(1, "example.com/a")], Paths(tmp_path))
    agent.config_error = "from before"
    program = Taking(taken.set_result, agent)
    following = asyncio.create_task(process_module.follow_config(program, file, asyncio.Event()))
    async with asyncio.timeout(20):
        assert await taken == load(config)
    await until(lambda: not agent.config_error)
    following.cancel()


async def test_a_start_with_a_broken_file_serves_the_last_good_one(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an invalid file the saved last good config is served, and the agent is not ready, until a file is valid."""
    kept = tmp_path / "plugins" / "kept.yaml"
    config.write_text("resources: [}")
    with pytest.raises(ConfigError):
        process_module.ConfigFile.read(config, OPEN, kept)
    config.write_text(text(a=1))
    await process_module.ConfigFile.read(config, OPEN, kept).keep()
    config.write_text("resources: [}")
    file = process_module.ConfigFile.read(config, OPEN, kept)
    assert [one.name for one in file.config.resources] == ["example.com/a"]
    assert f"{config}:1" in file.refused
    assert caplog.records[-1].getMessage() == file.refused
    await file.keep()
    assert kept.read_text() == text(a=1)

    agent = Agent(file.sources(), Paths(tmp_path))
    taken: list[Config] = []

    program = Taking(taken.append, agent)
    following = asyncio.create_task(process_module.follow_config(program, file, asyncio.Event()))
    await until(lambda: agent.config_error)
    assert file.refused in unready(agent.status())
    config.write_text(text(a=1, b=1))
    await until(lambda: not agent.config_error and kept.read_text() == text(a=1, b=1))
    assert len(taken) == 1
    assert file.refused not in unready(agent.status())
    following.cancel()


def test_a_kept_file_that_is_not_allowed_is_not_served(config: Path) -> None:
    """The saved config is served only if this start allows all that it uses; else the config file's error is raised."""
    kept = config.with_name("kept.yaml")
    config.write_text("resources: [}")
    kept.write_text(
        "resources: [{name: example.com/a, devices: [{path: /dev/fpga*}], env: {A: b}, mounts: [{host: /x}]}]"
    )
    with pytest.raises(ConfigError, match=re.escape(f"{config}:1")):
        process_module.ConfigFile.read(config, Lock(), kept)


def test_a_file_that_cannot_be_kept_is_warned_of(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a config cannot be saved, here because a directory has the file's name, there is one warning."""
    kept = config.with_name("kept.yaml")
    kept.mkdir()
    asyncio.run(process_module.ConfigFile.read(config, OPEN, kept).keep())
    assert "cannot save the config file for a start with an invalid file" in caplog.text


async def test_a_file_that_is_refused_is_known_until_it_is_mended(
    config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused config file is named in the agent's status and in one log line; a valid file clears the status."""
    first = process_module.ConfigFile.read(config, OPEN)
    taken: list[Config] = []

    taking = Taking(taken.append)
    config.write_text("resources: [}")
    refused = await process_module.take_changed(taking, first)
    assert refused.config is first.config
    (record,) = caplog.records
    assert record.getMessage() == refused.refused
    assert f"{config}:1" in refused.refused
    assert "\n" not in refused.refused
    config.write_text(text(a=1))
    assert (await process_module.take_changed(taking, refused)).refused == ""
    config.write_text(text(a=2))
    assert (await process_module.take_changed(taking, refused)).refused == ""
    assert taken == [load(config)]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
async def test_a_pipe_in_the_place_of_the_file_is_refused(config: Path, tmp_path: Path, kind: str) -> None:
    """A pipe, socket or device in place of the config file is refused unopened; the last config is served meanwhile."""
    file, taken = process_module.ConfigFile.read(config, OPEN), list[Config]()
    program = Taking(taken.append, agent := Agent([source()], Paths(tmp_path)))
    following = asyncio.create_task(process_module.follow_config(program, file, asyncio.Event()))
    config.unlink()
    with contextlib.ExitStack() as stack:
        if kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(config))
        elif kind == "device":
            config.symlink_to("/dev/null")
        else:
            os.mkfifo(config)
            stack.callback(lambda: os.close(os.open(tmp_path / "opened", os.O_RDWR)))  # A waiting `open` then ends.
            os.link(config, tmp_path / "opened")
        why = f"{config}: is a {kind}, which an agent cannot read again; write the config into a regular file"
        await until(lambda: agent.config_error == f"the config file is refused, nothing is changed: {why}")
        with pytest.raises(ConfigError, match=re.escape(why)):
            process_module.ConfigFile.read(config, OPEN)
        config.unlink()
        config.write_text(text(a=2))
        await until(lambda: taken == [load(config)])
        assert agent.config_error == ""
        following.cancel()


async def test_a_file_that_takes_long_to_read_is_taken(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file that takes longer than `LONG` to read is reported as late, and is applied in the end."""
    first = process_module.ConfigFile.read(config, OPEN)
    config.write_text(text(a=2))
    go, late, taken = threading.Event(), asyncio.Event(), list[Config]()
    first.looks.changed = late.set

    def slow(*arguments: Any) -> Config:
        assert go.wait(30)
        return load(*arguments)

    monkeypatch.setattr("deviceplugin.config.load", slow)
    monkeypatch.setattr(process_module, "LONG", 0.05)
    taking = asyncio.create_task(process_module.take_changed(Taking(taken.append), first))
    await asyncio.wait_for(late.wait(), 30)
    go.set()
    assert (await asyncio.wait_for(taking, 30)).refused == ""
    assert taken == [load(config)]


async def test_reload_that_fails_half_way_is_said(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a changed file cannot be served in full, the log says so once, and the next attempt may succeed."""
    first = process_module.ConfigFile.read(config, OPEN)
    config.write_text(text(a=2))

    def take(_: Config) -> None:
        raise OSError("no room for another socket")

    now = await process_module.take_changed(Taking(take), first)
    assert now.config == load(config)
    assert now.unserved == f"{config} was read again, but not all of it is served: no room for another socket"
    again = await process_module.take_changed(Taking(take), now)
    assert again.unserved == now.unserved
    assert [one.levelname for one in caplog.records if "not all of it is served" in one.getMessage()] == ["ERROR"]
    assert "no room for another socket" in caplog.text
    taken: list[Config] = []
    mended = await process_module.take_changed(Taking(taken.append), again)
    assert (mended.unserved, taken) == ("", [load(config)])


@pytest.mark.parametrize("passes", [True, False])
async def test_a_part_that_could_not_be_served_is_served_later(config: Path, tmp_path: Path, *, passes: bool) -> None:
    """The agent tries a config again after an error that may pass, not after one that the user must correct."""
    file = process_module.ConfigFile.read(config, OPEN)
    agent = Agent([source(1, "example.com/a")], Paths(tmp_path))
    tries: list[Mapping[str, object]] = []

    class Failing(process_module.Program):
        async def take(self, config: Config, changed: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
            tries.append(changed)
            if not passes:
                raise AgentError("it cannot be served")
            if len(tries) < 3:
                raise LedgerError("the disk hangs")

    config.write_text(text(a=1, b=1))
    following = asyncio.create_task(process_module.follow_config(Failing(agent), file, asyncio.Event()))
    await until(lambda: tries and bool(agent.config_error) is not passes)
    every = ["example.com/a", "example.com/b"]
    assert [sorted(each) for each in tries] == ([["example.com/b"], every, every] if passes else [["example.com/b"]])
    following.cancel()


def in_loop(agent: Served, change: Callable[[], Any]) -> None:
    """Run a coroutine function in the agent's own loop, and wait for its result."""
    loop = agent.agent.loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(change(), loop).result(10)


class Marked(DeviceSource):
    """Sets a variable in `edits` that names the source; lists its devices once a test allows it."""

    resource = R

    def __init__(self, mark: str, *, lists: bool = True) -> None:
        self.mark = mark
        self.may_list = threading.Event()
        if lists:
            self.may_list.set()

    def watch(self) -> Iterator[Sequence[Device]]:
        self.may_list.wait()
        yield [Device("d0"), Device("d1"), Device("d2")]

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        return ContainerEdits(env={"MARK": self.mark})


def test_hooks_change_with_the_list(fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old source's hooks answer until the new source has listed, or until `TAKE_OVER` seconds are over."""
    agent = served(Marked("old"))
    loop = agent.agent.loop
    assert loop is not None
    new, mute = Marked("new", lists=False), Marked("mute", lists=False)
    taken = asyncio.run_coroutine_threadsafe(agent.agent.reconfigure({R: new}), loop)
    assert fake_kubelet.run_pod("before", {R: 1}).env["MARK"] == "old"
    assert not taken.done()
    new.may_list.set()
    taken.result(10)
    assert fake_kubelet.run_pod("after", {R: 1}).env["MARK"] == "new"
    monkeypatch.setattr(following, "TAKE_OVER", 0.01)
    in_loop(agent, lambda: agent.agent.reconfigure({R: mute}))
    assert fake_kubelet.run_pod("later", {R: 1}).env["MARK"] == "mute"
    mute.may_list.set()


class Shared(SimulatedSource):
    """One device with the given number of replicas."""

    resource = R

    def __init__(self, replicas: int) -> None:
        super().__init__(1)
        self.replicas = replicas


async def test_why_a_device_is_withheld_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reasons for withholding a device that alternate between scans are logged once each until the device is free."""
    caplog.set_level("INFO")
    agent = Agent([source(1)], Paths(tmp_path))
    said = []
    for reason in ("unasked", "running", "unasked", "running", "", "running"):
        holding = {Allocation("u1", "main", R, "sim-0"): HoldReason(False, True, reason)} if reason else {}
        agent.tracker.snapshot = HolderSnapshot(held=holding)
        agent.scanner.log.withheld(agent.services)
        said.append([record.getMessage().rpartition(": ")[2].partition(" (")[0] for record in caplog.records])
        caplog.clear()
    assert said == [["unasked"], ["running"], [], [], ["device sim-0 is no longer withheld"], ["running"]]


async def test_an_unreadable_checkpoint_is_warned_of_once_it_lasts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint missing at one scan is not logged; from the second scan in a row on there is one warning."""
    agent = Agent([source(1)], Paths(tmp_path))
    lost, there = HolderSnapshot(problem="no such file"), HolderSnapshot(registered={})
    said = []
    for now in (lost, there, lost, lost, lost, there):
        with caplog.at_level("INFO"):
            agent.scanner.log.problem(now)
        said.append([record.levelname for record in caplog.records])
        caplog.clear()
    assert said == [[], [], [], ["WARNING"], [], ["INFO"]]


async def test_an_unreadable_checkpoint_is_warned_of_once_for_a_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same cause is warned of once though its details alternate; another cause is warned of again."""
    agent = Agent([source(1)], Paths(tmp_path))
    torn = [HolderSnapshot(problem=f"the file is torn{more}") for more in ("", "; the kubelet does not listen")]
    for now in (*torn * 15, HolderSnapshot(problem="no such file"), *torn):
        agent.scanner.log.problem(now)
    causes = ("the file is torn", "no such file", "the file is torn")
    assert [record.args for record in caplog.records] == [(cause,) for cause in causes]


def test_holders_are_unknown_while_the_checkpoint_cannot_be_read(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """With a torn checkpoint and no kubelet, scans go on, but the time of the last complete scan stays."""
    agent = served(source(1), period=0.05, report_holders=True).agent
    fake_kubelet.run_pod("p", {R: 1})
    wait(lambda: agent.status().resources[0].holders)
    fake_kubelet.stop()
    fake_kubelet.damage_checkpoint("torn")
    wait(lambda: agent.tracker.snapshot.registered is None)
    before, known = agent.tracker.snapshot.at, agent.status().scanned_at
    wait(lambda: agent.tracker.snapshot.at > before + 0.1)
    assert agent.status().scanned_at == known
    fake_kubelet.start()
    wait(lambda: (agent.status().scanned_at or 0) > before)


@pytest.fixture
async def alone(tmp_path: Path) -> Agent:
    """An agent of one device with 2 replicas and an open stream; a test sets the scans' results."""
    agent = Agent([Shared(2)], Paths(tmp_path))
    made = agent.services[R]
    devices = made.source.devices  # type: ignore[attr-defined]
    made.inventory.publish(devices, replicas=shares(made.source, devices))
    made.endpoint.streams.open.add(Stream())
    return agent


async def taken(agent: Agent, now: HolderSnapshot) -> None:
    """Have the agent take this result of a scan."""

    async def scanned(wanted: object = None) -> HolderSnapshot:
        agent.tracker.snapshot = now
        return now

    agent.tracker.scan = scanned  # type: ignore[method-assign]
    await agent.scanner.read()


def scan(
    at: float, *held: str, registered: frozenset[str] | None = frozenset(), current: bool = True
) -> HolderSnapshot:
    """The result of a scan: ids that a pod holds, and ids that the kubelet counts as healthy."""
    holding = HoldReason(True, True, "the kubelet's checkpoint names it")
    of = {Allocation("u1", "main", R, name): holding for name in held}
    return HolderSnapshot(at, current, of, None if registered is None else {R: registered})


@pytest.mark.parametrize(
    ("held", "registered", "stays"),
    [
        ((), frozenset(), set()),
        (("sim-0::1",), frozenset(), {"sim-0::1"}),
        ((), frozenset({"sim-0::0"}), {"sim-0::0"}),
    ],
)
async def test_an_id_from_before_is_forgotten_when_nobody_has_or_gets_it(
    alone: Agent, held: tuple[str, ...], registered: frozenset[str], stays: set[str]
) -> None:
    """A former id is forgotten after two current scans in which no pod holds it and the kubelet cannot grant it."""
    service = alone.services[R]
    service.follower.replace(Shared(1))
    assert set(service.endpoint.ids.legacy) == {"sim-0::0", "sim-0::1"}
    for at, known, current in ((1.0, registered, True), (2.0, None, False), (3.0, registered, False)):
        await taken(alone, scan(at, *held, registered=known, current=current))
        assert set(service.endpoint.ids.legacy) == {"sim-0::0", "sim-0::1"}
    await taken(alone, scan(4.0, *held, registered=registered))
    assert set(service.endpoint.ids.legacy) == stays


@pytest.mark.parametrize(
    ("held", "registered", "stays"),
    [((), frozenset(), False), (("sim-0::1",), frozenset(), True), ((), frozenset({"sim-0::0"}), True)],
)
async def test_a_gone_device_is_forgotten_when_nobody_has_or_gets_it(
    alone: Agent, held: tuple[str, ...], registered: frozenset[str], stays: bool
) -> None:
    """A gone device is forgotten after two scans in which no pod holds its ids and the kubelet cannot grant one."""
    service = alone.services[R]
    service.inventory.publish(())
    await taken(alone, scan(1.0, *held, registered=registered))
    assert service.inventory.snapshot.gone == {"sim-0"}
    await taken(alone, scan(2.0, *held, registered=registered))
    assert service.inventory.snapshot.gone == ({"sim-0"} if stays else frozenset())


async def test_what_ended_before_its_device_came_is_not_inherited(alone: Agent) -> None:
    """When a device is listed late, an id from before is kept only if a pod still holds it."""
    service = alone.services[R]
    service.existing = frozenset({"late", "later"})
    await taken(alone, scan(1.0, "later"))
    devices = [Device(name) for name in ("sim-0", "late", "later")]
    service.inventory.publish(devices, replicas=shares(service.source, devices))
    service.listed()
    assert set(service.endpoint.ids.legacy) == {"later"}


def test_a_device_that_comes_back_is_still_its_holders(fake_kubelet: FakeKubelet, prompt: Serve) -> None:
    """If a held device is listed late, with other replicas, none of its ids is healthy before its pod ends."""
    before = prompt(source(2))
    fake_kubelet.wait_allocatable(R, 2)
    pod = fake_kubelet.run_pod("p", {R: 2})
    before.stop()
    fewer, all_of_them = source(1), source(2)
    fewer.replicas = all_of_them.replicas = 2
    after = prompt(fewer)
    fake_kubelet.wait_devices(R, lambda devices: devices.keys() == {"sim-0", "sim-0::0", "sim-0::1"})
    in_loop(after, lambda: after.agent.reconfigure({R: all_of_them}))
    fake_kubelet.wait_devices(R, lambda devices: {"sim-1", "sim-1::0"} <= devices.keys())
    assert {one.health for one in fake_kubelet.devices(R).values()} == {"Unhealthy"}
    pod.delete()
    fake_kubelet.wait_allocatable(R, 4)


def test_replaced_source_with_other_hooks_is_registered_again(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A reload to a source with `reset` registers the resource again: the kubelet reads options at Register."""

    class Resetting(SimulatedSource):
        resource = R

        def reset(self, devices: Sequence[Device]) -> None: ...

    agent = served(source(1))
    in_loop(agent, lambda: agent.agent.reconfigure({R: Resetting(1)}))
    again = fake_kubelet.wait_registered(R, 2)
    assert again.options is not None
    assert again.options.pre_start_required


# As a process, with a file.


class Process:
    """`deviceplugin run` with a config file."""

    def __init__(self, kubelet: FakeKubelet, config: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(config)]
        with log.open("w") as stderr:
            self.child = subprocess.Popen([*command, *kubelet.arguments], stderr=stderr)

    def said(self, text: str, count: int = 1) -> bool:
        """Whether the log has this text at least so often."""
        return self.log.read_text().count(text) >= count

    def end(self) -> int:
        """End the process by SIGTERM and return its exit status."""
        self.child.terminate()
        return self.child.wait(20)


class Processes:
    """Agents as processes, which share one config file."""

    def __init__(self, kubelet: FakeKubelet, config: Path) -> None:
        self.kubelet, self.config = kubelet, config
        self.started: list[Process] = []

    def start(self) -> Process:
        """Start an agent."""
        log = self.config.with_name(f"log{len(self.started)}")
        self.started.append(Process(self.kubelet, self.config, log))
        return self.started[-1]

    def begin(self, **counts: int) -> Process:
        """Write a config with the number of devices of each resource, start an agent, and wait until it serves them."""
        self.config.write_text(text(**counts))
        agent = self.start()
        self.wait(**counts)
        return agent

    def wait(self, **counts: int) -> None:
        """Wait until each resource has the given number of allocatable devices.

        A process starts in about 1 s, and takes much longer on a busy machine.
        """
        for name, count in counts.items():
            self.kubelet.wait_allocatable(f"example.com/{name}", count, timeout=120.0)


@pytest.fixture
def processes(fake_kubelet: FakeKubelet, config: Path) -> Iterator[Processes]:
    """Run agents as processes; their logs are shown when a test fails."""
    made = Processes(fake_kubelet, config)
    yield made
    for one in made.started:
        if one.child.poll() is None:
            one.child.kill()
            one.child.wait(20)
        sys.stdout.write(one.log.read_text())


def text(**counts: int) -> str:
    """A config file with the given number of devices of each resource."""
    return "resources:\n" + "".join(
        f"  - {{name: example.com/{name}, devices: [{{simulated: {{count: {count}}}}}]}}\n"
        for name, count in counts.items()
    )


def test_file_that_changes_is_taken(processes: Processes) -> None:
    """A changed config file is applied without a signal; an invalid one changes nothing, and the log has its line."""
    kubelet, config = processes.kubelet, processes.config
    agent = processes.begin(a=1, b=1)
    config.write_text(text(a=1, b=2, c=3))
    processes.wait(b=2, c=3)
    wait(lambda: agent.said("was read again: new example.com/c; changed example.com/b\n"))
    config.write_text("resources:\n  - {name: nonsense}\n")
    wait(lambda: agent.said(f"nothing is changed: {config}:2"))  # the agent may first find the file empty
    config.write_text(text(a=1))
    kubelet.wait_until(lambda: kubelet.streams("example.com/c") == 0)
    assert [one.resource for one in kubelet.registrations].count("example.com/a") == 1
    assert len(kubelet.updates("example.com/a")) == 1
    assert agent.end() == 0
    assert not [path for path in kubelet.device_plugin_dir.glob("*.sock") if path.name != "kubelet.sock"]


def test_file_that_names_what_is_not_allowed_changes_nothing(processes: Processes) -> None:
    """A changed file cannot make a running agent run a command or mount a host path that its start did not allow."""
    config, proof = processes.config, processes.config.with_name("proof")
    agent = processes.begin(a=1)
    code = f"    health: {{probe: {{command: [touch, {proof}]}}}}"
    mount = "    mounts: [{host: /etc, container: /x}]"
    for number, (line, flag) in enumerate([(code, "--allow-commands"), (mount, "--allow-host-path=/etc")], 1):
        config.write_text(f"resources:\n  - name: example.com/a\n    devices: [{{simulated: {{count: 2}}}}]\n{line}\n")
        wait(lambda flag=flag: agent.said(f"`run {flag}` allows it"))  # type: ignore[misc]
        assert agent.said(f"nothing is changed: {config}:4: $.resources[0].", number)
    assert processes.kubelet.run_pod("p", {"example.com/a": 1}).device_ids == ("sim-0",)
    assert len(processes.kubelet.updates("example.com/a")) == 1
    assert agent.end() == 0
    assert not proof.exists()


def test_hostile_files_do_not_harm_a_running_agent(processes: Processes) -> None:
    """Files made to use up memory are refused; the agent grows by at most 64 MB, and applies the next valid file."""
    agent = processes.begin(a=1)

    def most() -> int:
        status = Path(f"/proc/{agent.child.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))

    before = most()
    bombs = [bomb for bomb, _ in config_bombs().values()] + ["x" * (64 << 20)]
    for number, bomb in enumerate(bombs, 1):
        processes.config.write_text(bomb)
        wait(lambda number=number: agent.said("nothing is changed", number))  # type: ignore[misc]
    processes.wait(a=1)
    assert most() - before <= 64e6
    processes.config.write_text(text(a=2))
    processes.wait(a=2)
    assert len([one for one in processes.kubelet.registrations if one.resource == "example.com/a"]) == 1
    assert agent.end() == 0


def test_configmap_swap_is_taken(processes: Processes, tmp_path: Path) -> None:
    """A ConfigMap update, which replaces the symlink `..data`, is applied."""
    volume = tmp_path / "volume"
    processes.config = volume / "config.yaml"

    def publish(count: int) -> None:
        name = f"..2026_{count}"
        (volume / name).mkdir(parents=True)
        (volume / name / "config.yaml").write_text(text(a=count))
        (volume / "..tmp").symlink_to(name)
        (volume / "..tmp").replace(volume / "..data")

    publish(1)
    processes.config.symlink_to("..data/config.yaml")
    processes.start()
    for count in (1, 2, 3):
        processes.wait(a=count)
        publish(count + 1)


def test_sighup_reads_the_file_again(processes: Processes) -> None:
    """SIGHUP reads the file again, and the log has the outcome, also if nothing changed."""
    agent = processes.begin(a=1)
    agent.child.send_signal(signal.SIGHUP)
    wait(lambda: agent.said("nothing changed"))
    processes.config.unlink()
    agent.child.send_signal(signal.SIGHUP)
    wait(lambda: agent.said("nothing is changed"))
    processes.config.write_text(text(a=1))
    wait(lambda: agent.said("it is valid again, and nothing changed"))
    assert processes.kubelet.allocatable("example.com/a") == 1
    assert agent.end() == 0


def test_second_process_for_a_resource_ends_with_a_clear_error(processes: Processes) -> None:
    """A second agent for one resource exits with 1 and names the first agent's pid; the first agent goes on."""
    first, second = processes.begin(a=2), processes.start()
    assert second.child.wait(20) == 1
    assert second.said(f"served on this node by another process already (pid {first.child.pid}")
    assert not second.said("Traceback")
    assert processes.kubelet.allocatable("example.com/a") == 2
    assert len(processes.kubelet.registrations) == 1


def test_status_is_safe_from_any_thread(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """`status` can be called from another thread while devices change."""
    devices = source(4)
    agent = served(devices)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            (one,) = agent.agent.status().resources
            assert one.resource == R

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(over.set)
        asking = pool.submit(ask)
        for turn in range(20):
            devices.set_health("sim-0", Health.HEALTHY if turn % 2 else Health.UNHEALTHY)
            fake_kubelet.wait_allocatable(R, 4 if turn % 2 else 3)
    asking.result()
