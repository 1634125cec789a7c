"""The agent as a whole, against the fake kubelet: sources that misbehave, releases, reloads, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import agent as agent_module
from deviceplugin import podresources
from deviceplugin import process as process_module
from deviceplugin.agent import Agent, AgentError, Paths
from deviceplugin.config import Config, load
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.source import DeviceSource
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, Served, serve

R = "example.com/r"
Serve = Callable[..., Served]


def source(count: int = 2, resource: str = R, prefix: str = "sim") -> SimulatedSource:
    return SimulatedSource(count, resource=resource, prefix=prefix)


def wait(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until something is so that nobody tells of; a look every ms."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.001)


# What cannot be.


def test_two_sources_for_one_resource_are_refused() -> None:
    """Two sources of one resource are an error that names it."""
    with pytest.raises(AgentError, match=f"two sources for one resource: {R}"):
        Agent([source(), source()])


def test_source_without_a_name_is_refused() -> None:
    """A source without a resource name is an error that says what to set."""
    with pytest.raises(AgentError, match="SimulatedSource has no resource name; set `resource`"):
        Agent([SimulatedSource(1)])


def test_places_follow_the_root_and_can_be_given() -> None:
    """The kubelet's places are below its root, and each can be given by itself."""
    assert Paths(Path("/k")).plugins == Path("/k/device-plugins")
    assert Paths(Path("/k")).pod_resources == Path("/k/pod-resources/kubelet.sock")
    given = Paths(Path("/k"), Path("/d"), Path("/p.sock"))
    assert (given.plugins, given.pod_resources) == (Path("/d"), Path("/p.sock"))


def test_agent_that_is_stopped_before_it_runs_does_not_run() -> None:
    """A signal that comes before the loop does not get lost."""

    async def run() -> None:
        agent = Agent([source()])
        agent.stop()
        async with asyncio.timeout(5):
            await agent.run()

    asyncio.run(run())


# Sources.


def test_plain_generator_may_block(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A plain generator runs in a thread of its own: while it blocks, its last list is served."""
    go = threading.Event()

    class Blocking(DeviceSource):
        resource = R

        def watch(self) -> Iterator[Sequence[Device]]:
            yield [Device("a")]
            go.wait()
            yield [Device("a"), Device("b")]

    served(Blocking(), source(1, "example.com/s"))
    fake_kubelet.wait_allocatable(R, 1)
    fake_kubelet.wait_allocatable("example.com/s", 1)
    go.set()
    fake_kubelet.wait_allocatable(R, 2)


@pytest.mark.parametrize("name", ["a%2Fb", "100%", "a b#c?d", "ä"])
def test_sockets_may_lie_anywhere(tmp_path: Path, name: str) -> None:
    """No character of the kubelet's directory means something else in a socket's address."""
    with FakeKubelet(tmp_path / name) as kubelet, serve([source(1)], kubelet):
        kubelet.wait_allocatable(R, 1)
        assert kubelet.run_pod("p", {R: 1}).device_ids


def test_source_that_ends_stays_true(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A source that ends after a list means that it stays true; one that never listed has no devices."""

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
    """A source that raises is started again after a while, with its last list served meanwhile, and said."""
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
    """Nonsense from a source (duplicates, strings, None) is its own error; the last good list stays."""

    class Wrong(DeviceSource):
        resource = R

        async def watch(self) -> AsyncIterator[Sequence[Device]]:
            yield [Device("good")]
            yield listed

    agent = served(Wrong(), source(1, "example.com/s"))
    wait(lambda: agent.agent.status().resources[0].source_error)
    assert fake_kubelet.allocatable(R) == 1
    assert fake_kubelet.allocatable("example.com/s") == 1
    assert f"{R}: the source failed" in caplog.text


def test_watch_that_is_no_generator_is_said(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A `watch` that returns a list instead of yielding one is an error that says so."""

    class NoGenerator(DeviceSource):
        resource = R

        def watch(self) -> Any:
            return [Device("a")]

    agent = served(NoGenerator(), timeout=None)
    wait(lambda: agent.agent.services)
    wait(lambda: agent.agent.status().resources[0].source_error)
    assert "NoGenerator.watch must yield lists of devices" in agent.agent.status().resources[0].source_error


# Releases.


class Releasing(SimulatedSource):
    """Takes note of its releases."""

    resource = R

    def __init__(self, count: int, notify: Callable[[], None]) -> None:
        super().__init__(count)
        self.released_ids: list[str] = []
        self._notify = notify

    def released(self, devices: Sequence[Device]) -> None:
        self.released_ids += [device.id for device in devices]
        self._notify()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, float]:
    """Options with which looks at the books follow each other at once."""
    monkeypatch.setattr(podresources, "WELL_APART", 0.1)
    return {"period": 0.05}


def test_released_after_the_last_pod(fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]) -> None:
    """A device's release is told after its pod is gone, not before, and again for the next pod."""
    devices = Releasing(1, fake_kubelet.notify)
    agent = served(devices, **soon)
    fake_kubelet.wait_until(lambda: devices.released_ids == ["sim-0"])  # at the start: who knows who had it before
    for count in (2, 3):
        pod = fake_kubelet.run_pod(f"p{count}", {R: 1})
        wait(lambda: agent.agent.status().resources[0].holders)
        assert len(devices.released_ids) == count - 1
        pod.delete()
        fake_kubelet.wait_until(lambda: len(devices.released_ids) == count)  # noqa: B023


@pytest.mark.parametrize("how", ["raises", "hangs", "hangs in the loop"])
def test_released_that_fails_costs_nothing_else(
    fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A `released` that raises or hangs is said; pods go on coming and going, and the next release is told."""
    over = threading.Event()

    class Failing(Releasing):
        hook_timeout = 0.05

        def released(self, devices: Sequence[Device]) -> Any:
            super().released(devices)
            if how == "raises":
                raise OSError("no such hardware")
            if how == "hangs":
                over.wait()
                return None
            return asyncio.Event().wait()

    devices = Failing(1, fake_kubelet.notify)
    try:
        served(devices, **soon)
        for count in (1, 2, 3):
            fake_kubelet.wait_until(lambda: len(devices.released_ids) == count)  # noqa: B023
            fake_kubelet.run_pod(f"p{count}", {R: 1}).delete()
        wait(lambda: caplog.text.count(f"released of {R}") >= 3)
    finally:
        over.set()
    assert ("OSError: no such hardware" if how == "raises" else "did not answer within 0.05 s") in caplog.text


def test_released_for_a_pod_that_never_ran(fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]) -> None:
    """A pod that the kubelet rejects after Allocate never shows up in its books; its device is released."""
    devices = Releasing(1, fake_kubelet.notify)
    served(devices, **soon)
    fake_kubelet.wait_until(lambda: len(devices.released_ids) == 1)
    fake_kubelet.reject_next_pod()
    assert fake_kubelet.run_pod("rejected", {R: 1}).phase == "Failed"
    fake_kubelet.wait_until(lambda: len(devices.released_ids) == 2, 20)


def test_held_devices_are_not_released_at_the_start(
    fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]
) -> None:
    """An agent that starts beside running pods tells the release of idle devices only."""
    first = served(source(2))
    pod = fake_kubelet.run_pod("p", {R: 1})
    first.stop()
    devices = Releasing(2, fake_kubelet.notify)
    served(devices, **soon)
    fake_kubelet.wait_until(lambda: bool(devices.released_ids))
    assert set(devices.released_ids) == {"sim-0", "sim-1"} - set(pod.device_ids)
    pod.delete()
    fake_kubelet.wait_until(lambda: set(pod.device_ids) <= set(devices.released_ids))


def test_vanished_device_is_forgotten_when_nobody_holds_it(
    fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]
) -> None:
    """A device that vanishes stays, unhealthy, while a pod has it, and is dropped from the list after that."""
    devices = source(2)
    served(devices, **soon)
    pod = fake_kubelet.run_pod("p", {R: 1})
    (held,) = pod.device_ids
    (idle,) = {"sim-0", "sim-1"} - {held}
    devices.remove("sim-0")
    devices.remove("sim-1")
    fake_kubelet.wait_devices(R, lambda devices: idle not in devices)
    assert fake_kubelet.devices(R)[held].health == "Unhealthy"
    pod.delete()
    fake_kubelet.wait_devices(R, lambda devices: held not in devices)


class Answers(podresources.PodResources):
    """Says what the test says."""

    def __init__(self, *reports: podresources.Report) -> None:
        super().__init__(Path("/nowhere"))
        self.reports = list(reports)

    async def list(self) -> podresources.Report:
        return self.reports.pop(0)


async def test_device_that_two_pods_hold_is_said_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet's own double allocation is an error with the device and the pods, once for as long as it lasts."""
    pods = [podresources.Holder("default", name, "main") for name in ("one", "two")]
    single = podresources.Report({R: {"d0": frozenset(pods[:1])}})
    double = podresources.Report({R: {"d0": frozenset(pods)}})
    books = agent_module.Books(Answers(single, double, double, single, double))
    counts = []
    for _ in range(5):
        assert await books.look(Paths(tmp_path), podresources.Quiet(), lambda: False, allocatable=False)
        counts.append(books.double)
    assert counts == [0, 1, 1, 1, 2]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert f"device d0 of {R} to several pods: default/one, default/two" in said[0]


# Reloads.


async def test_metrics_are_read_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A change of how metrics are served is not taken by a reload, and that is said."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=1))
    first = load(config)
    config.write_text(text(a=1) + "metrics: {period: 5}\n")

    async def take(*_: object) -> None:
        pytest.fail("no resource changed")

    await process_module._reload(take, config, first)
    assert "`metrics` is read at the start" in caplog.text


async def test_a_file_that_changes_while_the_agent_starts_is_taken(tmp_path: Path) -> None:
    """What was written between the first reading and the first watch counts."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=1))
    file = process_module.read(config)
    config.write_text(text(a=2))
    taken = asyncio.get_running_loop().create_future()

    async def take(now: Config, *_: object) -> None:
        taken.set_result(now)

    following = asyncio.create_task(process_module._follow_config(take, *file, asyncio.Event()))
    async with asyncio.timeout(20):
        assert await taken == load(config)
    following.cancel()


async def test_reload_that_fails_half_way_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever goes wrong while a changed file is taken, the file is followed on, and the log says what it was."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=1))
    first = load(config)
    config.write_text(text(a=2))

    async def take(*_: object) -> None:
        raise OSError("no room for another socket")

    assert await process_module._reload(take, config, first) == load(config)
    assert "not all of it is served" in caplog.text
    assert "no room for another socket" in caplog.text


def in_loop(agent: Served, change: Callable[[], Any]) -> None:
    """Have the agent's own loop do something, and wait for it."""
    loop = agent.agent._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(change(), loop).result(10)


def test_reconfigure_touches_only_what_changed(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A resource that is left alone is not registered again; one that is gone ends; a new one is served."""
    names = ["example.com/stays", "example.com/goes", "example.com/changes"]
    agent = served(*(source(1, name) for name in names))
    wanted = {"example.com/changes": source(3, "example.com/changes"), "example.com/new": source(1, "example.com/new")}
    in_loop(agent, lambda: agent.agent.reconfigure(wanted, ["example.com/stays"]))
    fake_kubelet.wait_allocatable("example.com/new", 1)
    fake_kubelet.wait_allocatable("example.com/changes", 3)
    fake_kubelet.wait_until(lambda: fake_kubelet.streams("example.com/goes") == 0)
    counts = [sum(one.resource == name for one in fake_kubelet.registrations) for name in names]
    assert counts == [1, 1, 1]
    assert set(agent.agent.services) == {"example.com/stays", "example.com/changes", "example.com/new"}
    assert len(fake_kubelet.updates("example.com/stays")) == 1


def test_replaced_source_keeps_vanished_devices(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """Devices that the new source does not know become unhealthy instead of vanishing from under their holders."""
    agent = served(source(2, prefix="old"))
    pod = fake_kubelet.run_pod("p", {R: 1})
    in_loop(agent, lambda: agent.agent.reconfigure({R: source(1, prefix="new")}))
    fake_kubelet.wait_devices(R, lambda devices: "new-0" in devices)
    assert fake_kubelet.devices(R)[pod.device_ids[0]].health == "Unhealthy"
    assert fake_kubelet.allocatable(R) == 1


class Marked(DeviceSource):
    """Says in `edits` which source answered; lists its device when it may."""

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
    """Until a new source has listed its devices the old one's hooks answer; one that never lists takes over in time."""
    agent = served(Marked("old"))
    loop = agent.agent._loop
    assert loop is not None
    new, mute = Marked("new", lists=False), Marked("mute", lists=False)
    taken = asyncio.run_coroutine_threadsafe(agent.agent.reconfigure({R: new}), loop)
    assert fake_kubelet.run_pod("before", {R: 1}).env["MARK"] == "old"
    assert not taken.done()
    new.may_list.set()
    taken.result(10)
    assert fake_kubelet.run_pod("after", {R: 1}).env["MARK"] == "new"
    monkeypatch.setattr(agent_module, "TAKE_OVER", 0.01)
    in_loop(agent, lambda: agent.agent.reconfigure({R: mute}))
    assert fake_kubelet.run_pod("later", {R: 1}).env["MARK"] == "mute"
    mute.may_list.set()


class Shared(SimulatedSource):
    """One device for so many containers."""

    resource = R

    def __init__(self, replicas: int) -> None:
        super().__init__(1)
        self.replicas = replicas


@pytest.fixture
async def service(tmp_path: Path) -> agent_module.Service:
    """A service of a shared device to which a kubelet listens; its books are what a test says."""
    made = agent_module.Service(Shared(2), Paths(tmp_path), podresources.Quiet(), asyncio.Lock())
    made.inventory.publish(made.source.devices)  # type: ignore[attr-defined]
    made.endpoint._streams[object()] = asyncio.Event()
    return made


HELD = {"sim-0::1": frozenset({podresources.Holder("default", "p", "main")})}


@pytest.mark.parametrize(
    ("held", "offered", "stays"),
    [
        ({}, frozenset(), set()),
        (HELD, frozenset(), {"sim-0::1"}),
        ({}, frozenset({"sim-0::0"}), {"sim-0::0"}),
    ],
)
async def test_an_id_from_before_is_forgotten_when_nobody_has_or_gets_it(
    service: agent_module.Service, held: Mapping[str, Any], offered: frozenset[str], stays: set[str]
) -> None:
    """That takes two looks in which no pod has it and the kubelet would not give it out: one may overlook a grant."""
    service.replace(Shared(1))
    assert set(service.endpoint.former) == {"sim-0::0", "sim-0::1"}
    service.look(held, 1.0, offered)
    assert set(service.endpoint.former) == {"sim-0::0", "sim-0::1"}
    service.look(held, 2.0, None)
    assert set(service.endpoint.former) == {"sim-0::0", "sim-0::1"}
    service.look(held, 3.0, offered)
    assert set(service.endpoint.former) == stays


@pytest.mark.parametrize(
    ("held", "offered", "stays"),
    [({}, frozenset(), False), (HELD, frozenset(), True), ({}, frozenset({"sim-0::0"}), True)],
)
async def test_a_gone_device_is_forgotten_when_nobody_has_or_gets_it(
    service: agent_module.Service, held: Mapping[str, Any], offered: frozenset[str], stays: bool
) -> None:
    """The same holds for devices; a replica is its device's."""
    service.inventory.publish(())
    service.look(held, 1.0, offered)
    assert service.inventory.snapshot.gone == {"sim-0"}
    service.look(held, 2.0, offered)
    assert service.inventory.snapshot.gone == ({"sim-0"} if stays else frozenset())


async def test_what_ended_before_its_device_came_is_not_inherited(service: agent_module.Service) -> None:
    """A pod had a device that was away when the agent began, and has ended since: nobody has to be waited for."""
    service._inherited = frozenset({"late", "later"})
    service.look({"later": HELD["sim-0::1"]}, 1.0, None)
    service.inventory.publish([Device(name) for name in ("sim-0", "late", "later")])
    service._inherit()
    assert set(service.endpoint.former) == {"later"}


def test_change_of_replicas_spares_who_has_the_device(
    fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]
) -> None:
    """A pod that had a device alone goes on having it alone, and is waited for, also by another agent."""
    devices = Releasing(1, fake_kubelet.notify)
    agent = served(devices, **soon)
    fake_kubelet.wait_until(lambda: devices.released_ids == ["sim-0"])
    pod = fake_kubelet.run_pod("p", {R: 1})
    shared = Releasing(1, fake_kubelet.notify)
    shared.replicas = 2
    in_loop(agent, lambda: agent.agent.reconfigure({R: shared}))

    def look_again() -> None:
        asked = len(fake_kubelet.rpcs("List"))
        fake_kubelet.wait_until(lambda: len(fake_kubelet.rpcs("List")) > asked + 5)

    withdrawn = dict.fromkeys(("sim-0", "sim-0::0", "sim-0::1"), "Unhealthy")
    for later in (agent, None):
        if later is None:  # nothing of it is in memory
            agent.stop()
            later = served(shared, **soon)
        fake_kubelet.wait_devices(R, lambda devices: {name: one.health for name, one in devices.items()} == withdrawn)
        look_again()
        assert {name: one.health for name, one in fake_kubelet.devices(R).items()} == withdrawn
        assert shared.released_ids == []
    pod.delete()
    fake_kubelet.wait_until(lambda: shared.released_ids == ["sim-0"])
    fake_kubelet.wait_devices(R, lambda devices: devices.keys() == {"sim-0::0", "sim-0::1"})
    assert fake_kubelet.allocatable(R) == 2


def test_a_device_that_comes_back_is_still_its_holders(
    fake_kubelet: FakeKubelet, served: Serve, soon: Mapping[str, float]
) -> None:
    """It was away when the agent began, whose sharing is another: the pod that has it alone goes on having it alone."""
    before = served(source(2), **soon)
    fake_kubelet.wait_allocatable(R, 2)
    pod = fake_kubelet.run_pod("p", {R: 2})
    before.stop()
    fewer, all_of_them = source(1), source(2)
    fewer.replicas = all_of_them.replicas = 2
    after = served(fewer, **soon)
    fake_kubelet.wait_devices(R, lambda devices: devices.keys() == {"sim-0", "sim-0::0", "sim-0::1"})
    in_loop(after, lambda: after.agent.reconfigure({R: all_of_them}))
    fake_kubelet.wait_devices(R, lambda devices: {"sim-1", "sim-1::0"} <= devices.keys())
    assert {one.health for one in fake_kubelet.devices(R).values()} == {"Unhealthy"}
    pod.delete()
    fake_kubelet.wait_allocatable(R, 4)


def test_replaced_source_with_other_hooks_is_registered_again(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """The kubelet asks for the options once, at Register: a new source with a `reset` is announced anew."""

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
            self.child = subprocess.Popen([*command, "--kubelet-root", str(kubelet.root)], stderr=stderr)

    def said(self, text: str) -> bool:
        """Whether it has said that."""
        return text in self.log.read_text()

    def end(self) -> int:
        """End it by SIGTERM and return its status."""
        self.child.terminate()
        return self.child.wait(20)


@pytest.fixture
def process(fake_kubelet: FakeKubelet, tmp_path: Path) -> Iterator[Callable[[Path], Process]]:
    """Run agents as processes; their logs are shown when a test fails."""
    started: list[Process] = []

    def start(config: Path) -> Process:
        started.append(Process(fake_kubelet, config, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield start
    for one in started:
        if one.child.poll() is None:
            one.child.kill()
            one.child.wait(20)
        sys.stdout.write(one.log.read_text())


def text(**counts: int) -> str:
    """A config file: so many devices by resource."""
    return "resources:\n" + "".join(
        f"  - {{name: example.com/{name}, devices: [{{simulated: {{count: {count}}}}}]}}\n"
        for name, count in counts.items()
    )


def test_file_that_changes_is_taken(
    fake_kubelet: FakeKubelet, process: Callable[[Path], Process], tmp_path: Path
) -> None:
    """A file that is written anew is taken without a signal; a bad one changes nothing and is said, with its place."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=1, b=1))
    agent = process(config)
    fake_kubelet.wait_allocatable("example.com/a", 1)
    fake_kubelet.wait_allocatable("example.com/b", 1)
    config.write_text(text(a=1, b=2, c=3))
    fake_kubelet.wait_allocatable("example.com/b", 2)
    fake_kubelet.wait_allocatable("example.com/c", 3)
    wait(lambda: agent.said("was read again: new example.com/c; changed example.com/b\n"))
    config.write_text("resources:\n  - {name: nonsense}\n")
    wait(lambda: agent.said("everything goes on as it was"))
    assert agent.said(f"{config}:2")
    config.write_text(text(a=1))
    fake_kubelet.wait_until(lambda: fake_kubelet.streams("example.com/c") == 0)
    assert [one.resource for one in fake_kubelet.registrations].count("example.com/a") == 1
    assert len(fake_kubelet.updates("example.com/a")) == 1
    assert agent.end() == 0
    assert not [path for path in fake_kubelet.device_plugin_dir.glob("*.sock") if path.name != "kubelet.sock"]


def test_configmap_swap_is_taken(fake_kubelet: FakeKubelet, process: Callable[[Path], Process], tmp_path: Path) -> None:
    """A ConfigMap's update, which replaces the link `..data` beside the file, is taken."""
    volume = tmp_path / "volume"

    def publish(name: str, content: str) -> None:
        (volume / name).mkdir(parents=True)
        (volume / name / "config.yaml").write_text(content)
        (volume / "..tmp").symlink_to(name)
        os.replace(volume / "..tmp", volume / "..data")

    publish("..2026_1", text(a=1))
    (volume / "config.yaml").symlink_to("..data/config.yaml")
    process(volume / "config.yaml")
    fake_kubelet.wait_allocatable("example.com/a", 1)
    publish("..2026_2", text(a=2))
    fake_kubelet.wait_allocatable("example.com/a", 2)
    publish("..2026_3", text(a=3))
    fake_kubelet.wait_allocatable("example.com/a", 3)


def test_sighup_reads_the_file_again(
    fake_kubelet: FakeKubelet, process: Callable[[Path], Process], tmp_path: Path
) -> None:
    """SIGHUP reads the file again and says what came of it, also that nothing changed."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=1))
    agent = process(config)
    fake_kubelet.wait_allocatable("example.com/a", 1)
    agent.child.send_signal(signal.SIGHUP)
    wait(lambda: agent.said("nothing changed"))
    config.unlink()
    agent.child.send_signal(signal.SIGHUP)
    wait(lambda: agent.said("everything goes on as it was"))
    assert fake_kubelet.allocatable("example.com/a") == 1
    assert agent.end() == 0


def test_killed_agent_leaves_nothing_that_stops_the_next(
    fake_kubelet: FakeKubelet, process: Callable[[Path], Process], tmp_path: Path
) -> None:
    """After SIGKILL the next agent serves at once and sweeps the dead socket; pods keep their devices."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=2))
    agent = process(config)
    fake_kubelet.wait_allocatable("example.com/a", 2)
    pod = fake_kubelet.run_pod("p", {"example.com/a": 1})
    agent.child.kill()
    agent.child.wait()
    fake_kubelet.wait_allocatable("example.com/a", 0)
    process(config)
    fake_kubelet.wait_allocatable("example.com/a", 2)
    other = fake_kubelet.run_pod("q", {"example.com/a": 1})
    assert pod.running
    assert set(pod.device_ids).isdisjoint(other.device_ids)
    assert len(list(fake_kubelet.device_plugin_dir.glob("example.com_a*.sock"))) == 1


def test_second_process_for_a_resource_ends_with_a_clear_error(
    fake_kubelet: FakeKubelet, process: Callable[[Path], Process], tmp_path: Path
) -> None:
    """Two agents for one resource: the second ends with 1 and names the first; the first goes on."""
    config = tmp_path / "config.yaml"
    config.write_text(text(a=2))
    first = process(config)
    fake_kubelet.wait_allocatable("example.com/a", 2)
    second = process(config)
    assert second.child.wait(20) == 1
    assert second.said(f"served on this node by another process already (pid {first.child.pid}")
    assert not second.said("Traceback")
    assert fake_kubelet.allocatable("example.com/a") == 2
    assert len(fake_kubelet.registrations) == 1


def test_status_is_safe_from_any_thread(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """Status can be asked for while everything changes."""
    devices = source(4)
    agent = served(devices)
    over = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not over.is_set():
                (one,) = agent.agent.status().resources
                assert one.resource == R
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(over.set)
        for turn in range(20):
            devices.set_health("sim-0", Health.HEALTHY if turn % 2 else Health.UNHEALTHY)
            fake_kubelet.wait_allocatable(R, 4 if turn % 2 else 3)
    assert not errors
