"""How the agent keeps a resource registered with the kubelet: its decisions, and tests with a fake kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.addresses import MAX_SOCKET_PATH
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.directory_watch import all_of, reading
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.foreign_plugin import KubeletRecord
from deviceplugin.kubelet.instance_lock import InstanceLock, RegistrationError, slug
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.plugin_directory import PluginDirectory
from deviceplugin.kubelet.podresources import AllocationsInFlight, unix_address
from deviceplugin.kubelet.registration import (
    LOOK,
    PluginRegistration,
    RegistrationTiming,
    Seen,
    Step,
    next_step,
    socket_name,
)
from deviceplugin.kubelet.servicer import Endpoint, EndpointHost
from deviceplugin.looks import Looks
from deviceplugin.node.agent import Agent, AgentError
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, Served
from tests.waits import until, wait

R = "example.com/r"
OLD, NEW = FileIdentity(1, 2, 3), FileIdentity(1, 2, 4)

Serve = Callable[..., Served]


def source(count: int = 2, resource: str = R) -> SimulatedSource:
    return SimulatedSource(count, resource=resource)


def sockets(kubelet: FakeKubelet) -> set[str]:
    """Return the names of the plugins' sockets in the device plugin directory."""
    return {path.name for path in kubelet.device_plugin_dir.glob("*.sock")} - {"kubelet.sock"}


def registration_of(
    directory: Path | PluginDirectory, host: EndpointHost | None = None, **timing: float
) -> PluginRegistration:
    """Return the registration of R, with the device a, in a device plugin directory."""
    inventory = Inventory(R)
    inventory.publish([Device("a")])
    plugins = directory if isinstance(directory, PluginDirectory) else PluginDirectory(directory)
    endpoint = Endpoint(source(), inventory, AllocationsInFlight(), host or EndpointHost())
    return PluginRegistration(endpoint, plugins, RegistrationTiming(**timing))


def drop_stream(kubelet: FakeKubelet) -> None:
    """Wait until the ListAndWatch stream of the newest registration is open, and end the stream."""
    kubelet.wait_until(lambda: len(kubelet.updates(R)) == len(kubelet.registrations))
    kubelet.drop_streams(R)


@contextlib.asynccontextmanager
async def running(registration: PluginRegistration) -> AsyncIterator[None]:
    """Run a registration until the end of the block."""
    task = asyncio.create_task(registration.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_burst_of_allocations_is_one_look_for_another_plugin(fake_kubelet: FakeKubelet) -> None:
    """If a resource's loop is woken 200 times, it looks for another plugin at most once in `LOOK` seconds."""
    looks: list[float] = []

    class Host(EndpointHost):
        async def recorded(self) -> None:
            looks.append(time.monotonic())

    registration = registration_of(fake_kubelet.device_plugin_dir, Host())
    async with running(registration):
        await asyncio.to_thread(fake_kubelet.wait_devices, R, 1)
        began = len(looks)
        for _ in range(200):
            registration.wake()
            await asyncio.sleep(0.001)
        lasted = looks[-1] - looks[began] if len(looks) > began else 0.0
    assert 0 < len(looks) - began <= 2 + lasted / LOOK


async def test_sockets_of_this_agents_other_resources_wake_no_loop(fake_kubelet: FakeKubelet) -> None:
    """A new socket of another plugin wakes a resource's loop; a new socket of the agent's other resources does not."""
    looks = asyncio.Event()

    class Host(EndpointHost):
        async def recorded(self) -> None:
            looks.set()

    directory, woken = PluginDirectory(fake_kubelet.device_plugin_dir), list[str]()
    async with running(registration_of(directory, Host())):
        await asyncio.to_thread(fake_kubelet.wait_devices, R, 1)
        with reading({directory: all_of}) as watch:
            for name in ("other-0123abcd.sock", "foreign.sock"):
                while await watch.wait(2 * LOOK):  # wait until the directory has not changed for a while
                    pass
                looks.clear()
                with socket.socket(socket.AF_UNIX) as bound:
                    bound.bind(str(directory.path / name))
                while directory.latest is None or name not in directory.latest.sockets:
                    await watch.wait(10)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2 * LOOK if name == "other-0123abcd.sock" else 20):
                        await looks.wait()
                        woken.append(name)
    assert woken == ["foreign.sock"]


async def test_a_socket_that_is_made_again_before_register_counts_as_served(fake_kubelet: FakeKubelet) -> None:
    """If a socket is deleted while its resource waits to register, it is made again, and Register is called once."""

    class Unwatched(PluginDirectory):
        def add(self, reader: object) -> None:
            pass

    directory = Unwatched(fake_kubelet.device_plugin_dir)
    registration = registration_of(directory)
    async with running(registration):
        async with directory.turn:
            await until(lambda: sockets(fake_kubelet))
            for _ in range(20):
                await asyncio.sleep(0.01)  # the resource waits for its turn to register
            for name in sockets(fake_kubelet):
                (directory.path / name).unlink()
        await asyncio.to_thread(fake_kubelet.wait_devices, R, 1)
        for _ in range(20):
            registration.wake()
            await asyncio.sleep(0.01)
    assert registration.statistics.registrations == 1


async def test_resources_share_a_read_of_the_checkpoint(
    fake_kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 resources that look at the checkpoint at the same moment share one or two reads of it."""
    kinds: list[str] = []
    begin = Looks.begin

    def note(looks: Looks, kind: str, *arguments: Any, **options: Any) -> Any:
        kinds.append(kind)
        return begin(looks, kind, *arguments, **options)

    tracker = Agent([source()], Paths(fake_kubelet.root)).tracker
    monkeypatch.setattr(Looks, "begin", note)
    found = await asyncio.gather(*(tracker.recorded(f"example.com/r{number}", {R}) for number in range(64)))
    assert len(found) == 64
    assert 1 <= kinds.count("checkpoint") <= 2


async def test_a_list_that_is_sent_while_the_checkpoint_is_read_is_no_other_plugins(fake_kubelet: FakeKubelet) -> None:
    """A checkpoint with a list that the agent sent while it read the checkpoint is no sign of another plugin."""
    looked = asyncio.Event()

    class Host(EndpointHost):
        said = ""
        named = frozenset[str]()

        async def recorded(self) -> KubeletRecord | None:
            if registration.endpoint.streams.sent and not self.named:
                registration.endpoint.inventory.publish([Device("a"), Device("b")])
                await asyncio.to_thread(fake_kubelet.wait_devices, R, 2)
                self.named = frozenset("ab")
            if self.named:
                looked.set()
            return KubeletRecord(time.time(), self.named, {}, frozenset())

        def contested(self, reason: str) -> None:
            self.said = reason

    registration = registration_of(fake_kubelet.device_plugin_dir, host := Host())
    async with running(registration), asyncio.timeout(20):
        await looked.wait()
        looked.clear()
        await looked.wait()
    assert host.said == ""


# The next step of a registration, by the observed situation.


def seen(
    *,
    kubelet: FileIdentity | None = NEW,
    served: bool = True,
    live: bool = True,
    listened: bool = True,
    registered: FileIdentity | None = NEW,
    since: float = 1.0,
    ready: bool = True,
) -> Seen:
    return Seen(kubelet, served, live, listened, registered, since, ready)


@pytest.mark.parametrize(
    ("now", "step"),
    [
        (seen(), Step.REST),
        (seen(ready=False, kubelet=None), Step.WAIT_FOR_DEVICES),
        (seen(kubelet=None), Step.WAIT_FOR_KUBELET),
        (seen(registered=None, live=False), Step.REGISTER),
        (seen(registered=OLD), Step.REGISTER),
        (seen(served=False), Step.REGISTER),
        (seen(live=False), Step.REGISTER),
        (seen(live=False, listened=False, since=4.9), Step.WAIT_FOR_STREAM),
        (seen(live=False, listened=False, since=5.0), Step.REGISTER),
    ],
    ids=[
        "all is well",
        "no list yet",
        "no kubelet",
        "never registered",
        "kubelet.sock is another one",
        "own socket is gone",
        "the stream ended",
        "the kubelet has not listened yet",
        "the kubelet does not listen",
    ],
)
def test_each_situation_has_its_step(now: Seen, step: Step) -> None:
    """The step is REST if the present kubelet serves the resource; each other situation has one next step."""
    assert next_step(now, 5.0) is step


_identities = st.sampled_from([None, OLD, NEW])
_seen = st.builds(Seen, _identities, *[st.booleans()] * 3, _identities, st.floats(0, 10), st.booleans())


@given(_seen)
def test_rests_only_when_the_kubelet_can_use_it(now: Seen) -> None:
    """The step is REST only with an open stream of the present kubelet, REGISTER only with kubelet and device list."""
    step = next_step(now, 5.0)
    if step is Step.REST:
        assert now.kubelet == now.registered is not None
        assert now.served
        assert now.live
    if step is Step.REGISTER:
        assert now.kubelet is not None
        assert now.ready


def test_backoff_doubles_with_jitter_up_to_its_most() -> None:
    """The upper bound of a delay doubles up to a maximum; the delay is between half of the bound and the bound."""
    backoff = Backoff(first=1.0, most=8.0)
    for whole in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert whole / 2 <= backoff.next() <= whole
    backoff.tries = 10_000
    assert 4.0 <= backoff.next() <= 8.0
    backoff.reset()
    assert backoff.next() <= 1.0


# Names of sockets.

_labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", fullmatch=True)
_resources = st.builds("{}.com/{}".format, _labels, st.from_regex(r"[A-Za-z0-9][\w.-]{0,62}", fullmatch=True))


@given(_resources, st.sampled_from(["/var/lib/kubelet/device-plugins", "/d", "/" + "x" * 80]))
def test_socket_path_always_fits(resource: str, directory: str) -> None:
    """For any resource name the socket's path has at most 107 bytes, and its file name only plain characters."""
    name = socket_name(resource, directory, "0" * 8)
    assert len(f"{directory}/{name}".encode()) <= MAX_SOCKET_PATH
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.sock", name)


@given(st.lists(_resources, min_size=2, max_size=2, unique=True))
def test_two_resources_never_share_a_name(resources: list[str]) -> None:
    """Two resources never have the same socket name, also if a long name is cut or a character is replaced."""
    one, two = resources
    assert slug(one) != slug(two)
    directory = "/" + "x" * 79
    assert socket_name(one, directory, "0" * 8) != socket_name(two, directory, "0" * 8)


def test_directory_without_room_is_an_error_that_names_it() -> None:
    """If a directory's path is too long for a socket in the directory, an error says so."""
    directory = "/" + "x" * 90
    with pytest.raises(RegistrationError, match="too long for a unix socket"):
        socket_name(R, directory, "0" * 8)


# The lock, which lets one process at a time serve a resource.


def test_lock_is_held_by_one(tmp_path: Path) -> None:
    """A second instance of a resource's lock gets the owner's pid, and the lock only when the first has released it."""
    one, two = InstanceLock(tmp_path, R), InstanceLock(tmp_path, R)
    assert one.acquire()
    assert one.acquire()
    assert not two.acquire()
    assert f"pid {os.getpid()}" in two.owner()
    one.release()
    assert not one.held
    assert two.acquire()
    two.release()


def test_lock_on_a_removed_file_is_taken_again(tmp_path: Path) -> None:
    """If the lock file is removed, the lock counts as lost and can be taken again."""
    lock = InstanceLock(tmp_path, R)
    assert lock.acquire()
    lock.path.unlink()
    assert not lock.held
    assert lock.acquire()
    assert lock.path.exists()
    lock.release()
    lock.path.unlink()
    assert lock.owner() == "unknown"


def test_lock_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    """If the lock file cannot be created, an error names the file and says what is needed."""
    lock = InstanceLock(tmp_path / "missing", R)
    with pytest.raises(RegistrationError, match=rf"^{re.escape(str(lock.path))}: .*needs write access.*free space"):
        lock.acquire()


def test_full_disk_at_the_first_start(
    fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is too full for the lock file's text, the resource is registered, and the lock still works."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    served(source())
    fake_kubelet.wait_allocatable(R, 2)
    second = InstanceLock(fake_kubelet.device_plugin_dir, R)
    assert second.path.read_text() == ""
    assert not second.acquire()


def test_identity_tells_a_new_file_of_the_same_name(tmp_path: Path) -> None:
    """A new file of the same name has another file identity, even on the same inode."""
    path = tmp_path / "f"
    assert file_identity(path) is None
    path.touch()
    before = file_identity(path)
    path.unlink()
    path.touch()
    os.utime(path, ns=(1, 1))
    assert file_identity(path) not in (None, before)


# Tests with a fake kubelet.


def test_directory_that_is_none_is_said(tmp_path: Path) -> None:
    """A file in place of the device plugin directory ends the agent with an error."""
    (tmp_path / "device-plugins").touch()
    agent = Agent([source()], Paths(tmp_path))
    with pytest.raises(AgentError, match="is not a directory"):
        asyncio.run(agent.run())


def test_dead_socket_of_before_a_reboot_is_replaced(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A kubelet.sock that no kubelet listens on is logged once and tried again; the next kubelet is found."""
    caplog.set_level(logging.INFO, "deviceplugin")
    fake_kubelet.stop()
    fake_kubelet.socket.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(fake_kubelet.socket))
    agent = served(source(), timeout=None)
    wait(lambda: R in agent.agent.services and agent.agent.services[R].registration.backoff.tries > 3)
    assert agent.agent.services[R].registration.statistics.failures == 0  # without a kubelet no call fails
    fake_kubelet.start()
    agent.wait_registered()
    assert caplog.text.count("does not answer") == 1


def test_directory_that_is_made_anew_is_served_in(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If the device plugin directory is removed and created again, the resource is registered again."""
    served(source())
    fake_kubelet.stop()
    while fake_kubelet.device_plugin_dir.exists():  # the agent may create its socket there meanwhile
        shutil.rmtree(fake_kubelet.device_plugin_dir, ignore_errors=True)
    fake_kubelet.start()
    again = fake_kubelet.wait_registered(R, 2)
    fake_kubelet.wait_allocatable(R, 2)
    assert sockets(fake_kubelet) == {again.endpoint}


def test_serves_and_then_registers(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """Register has the API version, the socket's file name and the options; by then the plugin serves on the socket."""
    served(source())
    registration = fake_kubelet.wait_registered(R)
    assert registration.request.version == "v1beta1"
    assert "/" not in registration.endpoint
    assert sockets(fake_kubelet) == {registration.endpoint}
    assert registration.request.options == registration.options
    assert not registration.request.options.pre_start_required
    fake_kubelet.wait_allocatable(R, 2)


def test_waits_for_a_kubelet_that_is_not_there_and_says_so_once(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a kubelet the agent waits, logs that once, and registers as soon as there is a kubelet."""
    caplog.set_level(logging.INFO, "deviceplugin")
    fake_kubelet.stop()
    fake_kubelet.socket.unlink()
    agent = served(source(), timeout=None, timing=RegistrationTiming(poll=0.01))
    wait(lambda: "waiting for the kubelet" in caplog.text)
    for _ in range(3):
        agent.agent.services[R].registration.wake()
    fake_kubelet.start()
    agent.wait_registered()
    (said,) = [one.getMessage() for one in caplog.records if "waiting for the kubelet" in one.getMessage()]
    assert "kubelet.sock is not there" in said


def test_waits_for_a_directory_that_is_not_there(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """If the device plugin directory is missing, the log names it and the options for it, and the agent waits."""
    fake_kubelet.stop()
    shutil.rmtree(fake_kubelet.device_plugin_dir)
    agent = served(source(), timeout=None)
    wait(lambda: f"no directory {fake_kubelet.device_plugin_dir}; --kubelet-root and " in caplog.text)
    fake_kubelet.start()
    agent.wait_registered()


def test_registers_again_when_its_own_socket_is_gone(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If the plugin's socket is deleted, the plugin serves on a new one and registers again."""
    served(source())
    first = fake_kubelet.wait_registered(R)
    (fake_kubelet.device_plugin_dir / first.endpoint).unlink()
    second = fake_kubelet.wait_registered(R, 2)
    assert second.endpoint != first.endpoint
    fake_kubelet.wait_allocatable(R, 2)


def test_registers_again_when_a_stream_is_dropped(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """If ListAndWatch ends, the resource is registered again on a new socket, and the log says so."""
    caplog.set_level(logging.INFO, "deviceplugin")
    served(source())
    first = fake_kubelet.wait_registered(R)
    drop_stream(fake_kubelet)
    assert fake_kubelet.wait_registered(R, 2).endpoint != first.endpoint
    fake_kubelet.wait_allocatable(R, 2)
    assert "the kubelet no longer listens; registering again" in caplog.text


def test_streams_that_drop_for_ever_are_not_hurried(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If the kubelet drops every stream, the agent registers more and more slowly (kubernetes#124716)."""
    served(source())
    for count in range(2, 8):
        drop_stream(fake_kubelet)
        fake_kubelet.wait_registered(R, count)
    times = [registration.at for registration in fake_kubelet.registrations]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[-1] > 0.05, gaps


def test_kubelet_that_takes_the_registration_but_does_not_listen(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kubelet does not call ListAndWatch within `patience` after Register, the resource is registered again."""
    agent = served(source(), timing=RegistrationTiming(patience=0.1))
    fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(R)) == 1)
    agent.agent.services[R].endpoint.streams.begun = 0  # like a kubelet that has not called ListAndWatch
    drop_stream(fake_kubelet)
    fake_kubelet.wait_registered(R, 2)
    assert "accepted the registration but does not listen" in caplog.text


def test_refused_registration_is_said_and_tried_again(
    fake_kubelet: FakeKubelet, served: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused registration is logged once with its reason, and tried again with growing delays."""
    fake_kubelet.reject_registrations(4, "not today")
    agent = served(source())
    assert len(fake_kubelet.rejections) == 4
    said = [record for record in caplog.records if "refused the registration" in record.getMessage()]
    assert len(said) == 1
    assert "not today" in said[0].getMessage()
    assert said[0].levelno == logging.ERROR
    statistics = agent.agent.services[R].registration.statistics
    fake_kubelet.wait_until(lambda: statistics.registered)  # the kubelet calls ListAndWatch before it answers Register
    assert statistics.error == ""
    times = [rejection.at for rejection in fake_kubelet.rejections]
    assert times[3] - times[2] >= 0.02  # half of the third delay; the first is 0.01 at the most


def test_frozen_kubelet_costs_nobody_else_anything(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A Register call without an answer is given up; the resource is registered once the kubelet answers again."""
    agent = served(source(), timing=RegistrationTiming(register=0.1, stream=0.1))
    fake_kubelet.freeze()
    fake_kubelet.recreate_socket()
    statistics = agent.agent.services[R].registration.statistics
    wait(lambda: statistics.failures >= 2)
    assert not statistics.registered
    assert "DEADLINE_EXCEEDED" in statistics.error
    fake_kubelet.thaw()
    fake_kubelet.wait_registered(R, 2)
    fake_kubelet.wait_allocatable(R, 2)


def test_many_resources_register_one_after_another(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """The resources of a process call Register one after the other."""
    names = [f"example.com/r{number}" for number in range(8)]
    fake_kubelet.register_delay = 0.01
    served(*(source(1, name) for name in names))
    fake_kubelet.wait_until(lambda: len(fake_kubelet.registrations) == 8)  # a call is noted once it is answered
    calls = sorted((r.at, r.answered) for r in fake_kubelet.registrations)
    for (_, answered), (at, _) in itertools.pairwise(calls):
        assert at >= answered - 0.005
    fake_kubelet.restart()
    for name in names:
        fake_kubelet.wait_allocatable(name, 1)


def test_registers_without_a_pause_share_a_channel_until_one_fails(
    fake_kubelet: FakeKubelet, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a new kubelet socket the resources share few channels; after a failed Register a new channel is made."""
    made: list[str] = []
    channel = grpc.aio.insecure_channel

    def note(address: str, **options: Any) -> grpc.aio.Channel:
        made.append(address)
        return channel(address, **options)

    names = [f"example.com/r{number}" for number in range(8)]
    served(*(source(1, name) for name in names))
    fake_kubelet.register_delay = 0.05  # all other resources wait while the first registers
    monkeypatch.setattr(grpc.aio, "insecure_channel", note)
    for refused in (0, 1):
        for name in names:
            fake_kubelet.wait_allocatable(name, 1)
        made.clear()
        fake_kubelet.reject_registrations(refused)
        fake_kubelet.recreate_socket()
        fake_kubelet.wait_until(lambda: len(fake_kubelet.registrations) == 16 + 8 * refused)  # noqa: B023
        assert refused < made.count(unix_address(fake_kubelet.socket)) < 8


def test_kubelet_restart_while_others_wait_for_their_turn(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If the kubelet restarts while resources wait to register, the sockets that it deleted are not registered.

    The kubelet would dial a deleted socket for 10 s, and all other resources would wait for as long.
    """
    names = [f"example.com/r{number}" for number in range(8)]
    served(*(source(1, name) for name in names))
    for _ in range(3):
        fake_kubelet.register_delay = 0.02
        fake_kubelet.recreate_socket()
        fake_kubelet.wait_until(lambda: len(fake_kubelet.registrations) % 8 == 2)
        fake_kubelet.register_delay = 0.0
        fake_kubelet.restart()
        for name in names:
            fake_kubelet.wait_allocatable(name, 1, timeout=3.0)
        fake_kubelet.registrations.clear()


def test_register_at_a_kubelet_that_is_replaced_meanwhile_is_given_up(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """If a kubelet that hangs in Register restarts, the resource is registered with the new kubelet within 3 s."""
    agent = served(source())
    fake_kubelet.register_delay = 60.0
    fake_kubelet.recreate_socket()
    wait(lambda: not agent.agent.status().resources[0].registered)
    fake_kubelet.register_delay = 0.0
    fake_kubelet.restart()
    fake_kubelet.wait_allocatable(R, 2, timeout=3.0)


def test_second_instance_takes_over_when_the_first_ends(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """A second agent of a resource registers when the first agent ends, as in a rolling update."""
    first = served(source())
    second = served(source(3), timeout=None)
    first.stop()
    second.wait_registered()
    fake_kubelet.wait_allocatable(R, 3)


def test_foreign_sockets_are_never_touched(fake_kubelet: FakeKubelet, served: Serve) -> None:
    """The agent removes the dead socket of an earlier agent of its resource, and no socket of another plugin."""
    directory = fake_kubelet.device_plugin_dir
    own = socket_name(R, str(directory), "0" * 8)
    names = {
        "other.sock": False,
        own.replace("-00000000", "-0000"): False,
        own.replace("-00000000", "-notahexa"): False,
        socket_name(R + "x", str(directory), "0" * 8): False,
        own.replace("00000000", "11111111"): True,  # a process listens on this socket
        own: False,
    }
    with contextlib.ExitStack() as stack:
        for name, listening in names.items():
            made = socket.socket(socket.AF_UNIX)
            made.bind(str(directory / name))
            if listening:
                made.listen()
                stack.enter_context(made)
            else:
                made.close()
        served(source()).stop()
        assert sockets(fake_kubelet) == names.keys() - {own}


async def test_directory_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    """If the lock file cannot be written in the device plugin directory, the registration raises RegistrationError."""
    InstanceLock(tmp_path, R).path.mkdir()
    with pytest.raises(RegistrationError, match="needs write access to the kubelet's device plugin directory"):
        async with asyncio.timeout(5):
            await registration_of(tmp_path).run()


async def test_lock_of_another_process_is_said_with_its_owner(tmp_path: Path) -> None:
    """If another process keeps the lock for `takeover` seconds, the registration raises RegistrationError."""
    other = InstanceLock(tmp_path, R)
    assert other.acquire()
    with pytest.raises(RegistrationError, match=r"stop that process, or give this resource another name"):
        await registration_of(tmp_path, takeover=0.05).run()
    other.release()
