"""Another plugin registers the agent's resource: how the agent notices and reacts, with kubelets 1.36 and 1.37."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.backoff import Backoff
from deviceplugin.device import Device
from deviceplugin.files import FileIdentity
from deviceplugin.kubelet import registration
from deviceplugin.kubelet.foreign_plugin import (
    LATE,
    LISTED,
    ForeignPluginWatch,
    KubeletRecord,
    SentList,
    Socket,
    contradiction,
)
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.kubelet.status import unready
from deviceplugin.register.records import Allocation
from deviceplugin.source import DeviceSource
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, Served, serve
from deviceplugin.wire import deviceplugin_pb2 as pb
from tests.testing.bare import BarePlugin, Hold

R = "example.com/r"
NOW = 1_000_000.0
OURS, THEIRS = frozenset({"sim-0", "sim-1"}), frozenset({"theirs"})
SOCKET: Socket = ("theirs.sock", FileIdentity(1, 1, int((NOW + 1) * 1e9)))


# How the agent notices another plugin.


def record(
    registered: frozenset[str] = OURS,
    *,
    written: float = NOW,
    others: dict[str, frozenset[str]] | None = None,
    foreign: frozenset[Allocation] = frozenset(),
) -> KubeletRecord:
    return KubeletRecord(written, registered, others or {}, foreign)


@pytest.mark.parametrize(
    ("registered", "written", "lists", "now", "known"),
    [
        (OURS, 0.1, [(0.0, OURS)], 0.2, True),
        (THEIRS, 1.0, [(0.0, OURS)], 1.1, False),
        (THEIRS, -1.0, [(0.0, OURS)], 9.0, None),  # the checkpoint was written before the agent's list was sent
        (OURS, 0.5, [(-60.0, OURS), (0.0, THEIRS)], 0.6, None),  # the kubelet is slow
        (OURS, 0.5, [(-60.0, OURS), (0.0, THEIRS)], LATE + 1, False),
        (OURS, 60.0, [(-60.0, OURS), (0.0, frozenset())], 60.1, False),  # the agent sent this list long ago
    ],
    ids=["the same", "others", "not written since", "the list before", "still the list before", "a former list"],
)
def test_the_kubelets_list_is_compared_with_ours(
    registered: frozenset[str],
    written: float,
    lists: list[tuple[float, frozenset[str]]],
    now: float,
    known: bool | None,
) -> None:
    """Another plugin is suspected if the checkpoint has ids that the agent never listed or removed long ago."""
    sent = [SentList(NOW + at, ids) for at, ids in lists]
    said = contradiction(record(registered, written=NOW + written), sent, NOW + now)
    assert said == "" if known else said is None if known is None else said


_ids = st.frozensets(st.sampled_from("abc"))


@given(st.lists(_ids, min_size=1, max_size=4), st.floats(0, 30), st.floats(0, 30))
def test_a_kubelet_that_takes_our_lists_never_contradicts(
    lists: list[frozenset[str]], pause: float, after: float
) -> None:
    """If the kubelet has a list that the agent sent within the last `LATE` seconds, no other plugin is suspected."""
    sent = [SentList(NOW + pause * number, ids) for number, ids in enumerate(lists)]
    now = sent[-1].at + after
    got_to = [one.ids for one, later in zip(sent, [*sent[1:], None], strict=True) if not later or later.at > now - LATE]
    for ids in got_to:
        if ids == lists[-1] or after < LATE:
            assert not contradiction(record(ids, written=now), sent, now)


def test_a_former_list_comes_again_only_from_another_plugin() -> None:
    """The kubelet had another plugin's list, then the agent's: if the former list comes back, a plugin has registered.

    After each registration of the agent, AMD's plugin restarts and registers with the same list as before.
    """
    watch, sent = ForeignPluginWatch(), [SentList(NOW, frozenset())]
    watch.begin(record(THEIRS), frozenset())
    late = record(THEIRS, written=NOW + 0.1)
    assert not watch.found(late, frozenset(), sent, NOW + 0.1).reason
    assert not watch.found(record(frozenset(), written=NOW + 0.2), frozenset(), sent, NOW + 0.2).reason
    again = record(THEIRS, written=NOW + 0.4)
    found = watch.found(again, frozenset(), sent, NOW + 0.4)
    assert found.reason.startswith("its checkpoint has 1 healthy devices (theirs)")
    assert found.sure
    watch.begin(again, frozenset())
    assert not watch.found(record(THEIRS, written=NOW + 0.6), frozenset(), sent, NOW + 0.6).reason


@given(st.lists(_ids, min_size=1, max_size=5), st.data())
def test_a_kubelet_that_lags_behind_is_no_other_plugin(lists: list[frozenset[str]], data: st.DataObject) -> None:
    """While the kubelet takes the agent's lists in order, each within `LATE` seconds, no other plugin is suspected."""
    watch, sent = ForeignPluginWatch(), []
    watch.begin(record(frozenset("z")), frozenset())
    got, now = -1, NOW
    for ids in lists:
        sent.append(SentList(now, ids))
        for pause in data.draw(st.lists(st.floats(0.1, 1.0), max_size=4)):
            now += pause
            overdue = max((number for number, one in enumerate(sent) if one.at <= now - LATE / 2), default=-1)
            got = data.draw(st.integers(max(got, overdue), len(sent) - 1))
            taken = record(frozenset("z") if got < 0 else sent[got].ids, written=now)
            assert not watch.found(taken, frozenset(), sent, now).reason


def test_a_kubelet_that_listens_late_is_no_other_plugin() -> None:
    """Until the kubelet takes the first list, it has no devices; after `LATE` seconds another plugin is suspected."""
    watch = ForeignPluginWatch()
    watch.begin(record(OURS), frozenset())
    now = time.time() + 3 * LATE
    sent = (SentList(now, OURS),)
    assert not watch.found(record(frozenset(), written=now + 0.01), frozenset(), sent, now + 0.02).reason
    assert watch.found(record(frozenset(), written=now + LATE), frozenset(), sent, now + LATE + 0.1).reason


def test_a_socket_counts_when_no_other_resource_explains_it() -> None:
    """A new socket means another plugin if after `LISTED` seconds no resource in the checkpoint has changed."""
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(others={"q": THEIRS}), frozenset())
    assert watch.found(record(others={"q": THEIRS}), frozenset({SOCKET}), sent, NOW + 1.1).reason == ""  # no list yet
    after = record(written=NOW + 1.2, others={"q": THEIRS})
    assert watch.found(after, frozenset({SOCKET}), sent, NOW + 1.3).reason == ""
    again = watch.found(after, frozenset({SOCKET}), sent, NOW + 1.3).again
    assert again == pytest.approx(LISTED - 0.3)
    found = watch.found(after, frozenset({SOCKET}), sent, NOW + 2.1)
    assert found.reason.startswith("the socket theirs.sock is new")
    assert not found.sure
    watch.begin(after, frozenset({SOCKET}))
    assert watch.found(after, frozenset({SOCKET}), sent, NOW + 60).reason == ""


@pytest.mark.parametrize(
    ("name", "registered", "known"),
    [
        ("theirs.sock", "theirs.sock", True),
        ("nvidiaGPU-1769000000.sock", "nvidiaGPU-1768000000.sock", True),  # GKE's plugin adds its start time
        ("theirs.sock", "", False),  # no plugin has registered with the agent
        ("theirs.sock", "others.sock", False),
        ("kubevirt-vfio1.sock", "kubevirt-vfio0.sock", False),
    ],
)
def test_a_socket_that_has_the_name_of_the_adopted_plugins_is_told(name: str, registered: str, *, known: bool) -> None:
    """A new socket that is named like the adopted plugin's, except for a start time, is certainly of this resource."""
    socket = (name, SOCKET[1])
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(), frozenset())
    after = record(written=NOW + 1.2)
    assert watch.found(after, frozenset({socket}), sent, NOW + 1.9, plugin=registered).reason == ""
    found = watch.found(after, frozenset({socket}), sent, NOW + 2.1, plugin=registered)
    assert found.reason.startswith(f"the socket {name} is new")
    assert found.sure is known


def test_a_socket_of_unknown_resource_does_not_hide_that_of_the_adopted_plugin() -> None:
    """A new socket of unknown resource comes before the adopted plugin's socket: the plugin's socket is reported."""
    first = ("another.sock", FileIdentity(1, 2, int((NOW + 0.5) * 1e9)))
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(), frozenset())
    after, both = record(written=NOW + 1.2), frozenset({first, SOCKET})
    found = watch.found(after, both, sent, NOW + 1.6, plugin=SOCKET[0])
    assert found.reason == ""
    assert found.again == pytest.approx(LISTED - 0.6)
    found = watch.found(after, both, sent, NOW + 2.1, plugin=SOCKET[0])
    assert found.reason.startswith("the socket theirs.sock is new")
    assert found.sure


def test_the_adopted_plugins_socket_is_told_though_another_resource_changes() -> None:
    """The adopted plugin's new socket is reported although another resource changed at the same time."""
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(), frozenset())
    watch.found(record(), frozenset({SOCKET}), sent, NOW + 1.3, plugin=SOCKET[0])
    after = record(written=NOW + 1.5, others={"other.example/gadget": frozenset({"o0"})})
    assert watch.found(after, frozenset({SOCKET}), sent, NOW + 2.1, plugin=SOCKET[0]).sure
    assert watch.found(after, frozenset({SOCKET}), sent, NOW + 2.1, plugin=SOCKET[0]).reason


def test_the_adopted_plugins_socket_is_waited_for_before_another_is_told() -> None:
    """The adopted plugin's socket comes after an unknown socket: the report waits a limited time for the former."""
    first = ("another.sock", FileIdentity(1, 2, int((NOW + 0.5) * 1e9)))
    late = ("theirs.sock", FileIdentity(1, 3, int((NOW + 1.4) * 1e9)))
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(), frozenset())
    before, both = record(written=NOW + 1.2), frozenset({first, late})
    assert watch.found(before, both, sent, NOW + 1.6, plugin=late[0]).reason == ""
    found = watch.found(record(written=NOW + 2.0), both, sent, NOW + 2.5, plugin=late[0])
    assert found.reason.startswith("the socket theirs.sock is new")
    assert found.sure
    assert not watch.found(before, both, sent, NOW + 6.5, plugin=late[0]).sure


def test_a_socket_of_another_resource_is_nothing() -> None:
    """A new socket that appears with a change of another resource is that resource's, and is never reported."""
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(), frozenset())
    explained = record(written=NOW + 1.2, others={"q": THEIRS})
    for later in (1.3, 5.0):
        assert watch.found(explained, frozenset({SOCKET}), sent, NOW + later).reason == ""


def test_an_allocation_that_another_plugin_answered_counts_once() -> None:
    """A new allocation of an id that the agent does not know is reported once; an earlier one is not reported."""
    before, new = Allocation("u1", "c", R, "theirs"), Allocation("u2", "c", R, "theirs")
    watch, sent = ForeignPluginWatch(), [SentList(NOW, OURS)]
    watch.begin(record(foreign=frozenset({before})), frozenset())
    assert watch.found(record(foreign=frozenset({before})), frozenset(), sent, NOW).reason == ""
    now = record(foreign=frozenset({before, new}))
    assert watch.found(now, frozenset(), sent, NOW).reason == "the kubelet gave theirs of it to the pod with UID u2"
    watch.begin(now, frozenset())
    assert watch.found(now, frozenset(), sent, NOW).reason == ""


def test_a_checkpoint_that_cannot_be_read_says_nothing() -> None:
    """Without a checkpoint, before the agent's first list, and with a new empty one, no other plugin is reported."""
    watch = ForeignPluginWatch()
    watch.begin(None, frozenset())
    now = time.time()
    empty = record(frozenset(), written=now)
    assert watch.found(empty, frozenset(), [SentList(now, OURS)], now).reason == ""
    assert watch.found(None, frozenset({SOCKET}), [SentList(NOW, OURS)], NOW).reason == ""
    assert watch.found(record(THEIRS), frozenset(), [], NOW).reason == ""


# Tests with a fake kubelet.


@pytest.fixture(params=[36, 37])
def kubelet(request: pytest.FixtureRequest) -> Iterator[FakeKubelet]:
    with FakeKubelet(minor=request.param) as kubelet:
        yield kubelet
        assert not kubelet.crashes


@contextlib.contextmanager
def another_plugin(kubelet: FakeKubelet, *ids: str) -> Iterator[BarePlugin]:
    """Have another plugin register the resource; after the `with` block the plugin stops as a killed process does."""
    plugin = BarePlugin(kubelet.device_plugin_dir, *ids, resource=R)
    try:
        plugin.register()
        yield plugin
    finally:
        plugin.stop()


def foreign(agent: Served) -> int:
    return agent.agent.status().resources[0].registration.foreign


@pytest.mark.parametrize("ids", [("theirs",), ("sim-0", "sim-1")], ids=["other ids", "the same ids"])
def test_a_plugin_that_comes_and_goes_costs_no_pod(
    kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture, ids: tuple[str, ...]
) -> None:
    """Another plugin registers and stops: during and after that, pods get the agent's devices, and the log has a line.

    A plugin with the same ids might be a restarted plugin of another resource: the line is no warning in this case.
    """
    caplog.set_level(logging.INFO, "deviceplugin")
    with serve(SimulatedSource(2, resource=R), kubelet, period=0.1) as agent:
        kubelet.wait_allocatable(R, 2)
        with another_plugin(kubelet, *ids) as plugin:
            kubelet.wait_until(lambda: agent.agent.status().resources[0].registration.registrations == 2)
            kubelet.wait_until(lambda: set(kubelet.devices(R)) == OURS and kubelet.allocatable(R) == 2)
            assert kubelet.run_pod("during", {R: 1}).running
        kubelet.wait_until(lambda: set(kubelet.devices(R)) == OURS and kubelet.allocatable(R) == 2)
        assert kubelet.run_pod("after", {R: 1}).running
        assert not plugin.allocations
        kubelet.wait_until(lambda: len(agent.agent.status().resources[0].holders) == 2)
        sure = ids == ("theirs",)
        assert foreign(agent) == sure
    said = [one.levelname for one in caplog.records if "registered this resource" in one.getMessage()]
    assert said == ["WARNING" if sure else "INFO"]


def test_a_directory_of_another_plugin_names_no_device(kubelet: FakeKubelet) -> None:
    """A former plugin gave a pod a directory, which may have any device: all are withheld until the pod ends."""
    with another_plugin(kubelet, "theirs-0", "theirs-1") as plugin:
        spec = pb.DeviceSpec(container_path="/dev/snd", host_path="/dev", permissions="rw")
        answer = pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(devices=[spec])])
        plugin.response = lambda ids: answer
        kubelet.wait_allocatable(R, 2)
        pod = kubelet.start_pod("before", {R: 1})
        kubelet.wait_until(lambda: bool(plugin.allocations))
    with serve(SimulatedSource(2, resource=R), kubelet, period=0.1):
        kubelet.wait_until(lambda: [one.health for one in kubelet.devices(R).values()] == ["Unhealthy"] * 2)
        assert kubelet.allocatable(R) == 0
        pod.delete()
        kubelet.wait_allocatable(R, 2)


def insist(kubelet: FakeKubelet, agent: Served, stack: contextlib.ExitStack) -> None:
    """Have four other plugins register, each after the agent has registered again; they stop at the stack's end."""
    for number in range(4):
        plugin = BarePlugin(kubelet.device_plugin_dir, "theirs", resource=R, endpoint=f"theirs-{number}.sock")
        stack.callback(plugin.stop)
        plugin.register()
        kubelet.wait_until(lambda: agent.agent.status().resources[0].registration.registrations == number + 2)  # noqa: B023


def test_a_plugin_that_insists_is_answered_ever_more_slowly(kubelet: FakeKubelet) -> None:
    """If other plugins register again and again, the agent registers more and more slowly (kubernetes#124716)."""
    with serve(SimulatedSource(2, resource=R), kubelet) as agent, contextlib.ExitStack() as stack:
        insist(kubelet, agent, stack)
        times = [one.at for one in kubelet.registrations if one.endpoint.startswith("example.com_r")]
        assert times[-1] - times[-2] > 0.05


def test_one_that_insists_while_claims_have_devices_is_answered_at_once(
    kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While claims hold devices, the agent registers again at once: else the other plugin could give them to pods."""

    def next_pause(backoff: Backoff) -> float:
        backoff.tries += 1
        return 3600.0

    monkeypatch.setattr(Backoff, "next", next_pause)
    monkeypatch.setattr(registration, "LOOK", 3600.0)
    monkeypatch.setattr(Endpoint, "kept_back", frozenset({"sim-0"}))
    with serve(SimulatedSource(2, resource=R), kubelet) as agent, contextlib.ExitStack() as stack:
        insist(kubelet, agent, stack)


def test_while_it_is_not_registered_again_the_agent_is_not_ready(kubelet: FakeKubelet) -> None:
    """Until the kubelet takes the agent's registration again, the agent is not ready, and names the other plugin."""
    with serve(SimulatedSource(2, resource=R), kubelet) as agent:
        plugin = BarePlugin(kubelet.device_plugin_dir, "theirs", resource=R)
        hold = Hold(plugin, "ListAndWatch")
        plugin.register()
        kubelet.reject_registrations(8, "not now")
        hold.let_go.set()
        kubelet.wait_until(lambda: len(kubelet.rejections) > 5)
        assert not agent.agent.status().resources[0].registered
        (why,) = unready(agent.agent.status())
        assert why.startswith(f"{R}: not registered with the kubelet: another plugin has registered it (its checkpoint")
        kubelet.wait_until(lambda: not list(unready(agent.agent.status())))
        plugin.stop()


def test_a_registration_never_uses_a_socket_twice(kubelet: FakeKubelet) -> None:
    """Each registration of the agent has a new socket name, since kubelet 1.37 refuses a known one, and one stream."""
    with serve(SimulatedSource(2, resource=R), kubelet):
        for count in range(2, 6):
            kubelet.wait_until(lambda: len(kubelet.updates(R)) == len(kubelet.registrations))
            kubelet.recreate_socket()
            kubelet.wait_registered(R, count)
            kubelet.wait_allocatable(R, 2)
            kubelet.wait_until(lambda: kubelet.streams(R) == 1)
    assert len({one.endpoint for one in kubelet.registrations}) == 5
    assert not kubelet.rejections


def test_nothing_is_said_of_an_agent_alone(kubelet: FakeKubelet, caplog: pytest.LogCaptureFixture) -> None:
    """A change of health, a pod, a plugin of another resource and a kubelet restart are no signs of another plugin."""
    caplog.set_level(logging.INFO, "deviceplugin")
    source = SimulatedSource(2, resource=R)
    with serve(source, kubelet, period=0.1) as agent:
        kubelet.wait_allocatable(R, 2)
        pod = kubelet.run_pod("p", {R: 1})
        source.remove("sim-1")
        kubelet.wait_until(lambda: kubelet.allocatable(R) < 2)
        other = BarePlugin(kubelet.device_plugin_dir, "q", resource="example.com/q")
        other.register()
        kubelet.wait_allocatable("example.com/q", 1)
        source.add("sim-1")
        kubelet.wait_allocatable(R, 2)
        pod.delete()
        kubelet.restart()
        kubelet.wait_allocatable(R, 2)
        kubelet.wait_until(lambda: not agent.agent.status().resources[0].holders)
        kubelet.wait_until(lambda: not list(unready(agent.agent.status())))
        other.stop()
        assert foreign(agent) == 0
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


# Devices that another plugin gave to pods.


class Cards(DeviceSource):
    """A source that lists a and b of the three cards a, b and c."""

    resource = R

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def watch(self) -> Iterator[list[Device]]:
        yield [Device(name, [f"{self.directory}/{name}"]) for name in "ab"]


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    """Three device nodes that belong to no hardware of this machine."""
    for number, name in enumerate("abc"):
        try:  # major 60 is for local experiments: devices.txt of Linux
            os.mknod(tmp_path / name, 0o600 | stat.S_IFCHR, os.makedev(60, number))
        except PermissionError:
            pytest.skip("device nodes cannot be made here")
    return tmp_path


def answer(*paths: Path) -> Callable[[list[str]], pb.AllocateResponse]:
    """Return the other plugin's answer to Allocate: an environment variable, and nodes for the given paths."""
    nodes = [pb.DeviceSpec(container_path=str(path), host_path=str(path), permissions="rw") for path in paths]
    one = pb.ContainerAllocateResponse(devices=nodes, envs={"CARD": "something"})
    return lambda ids: pb.AllocateResponse(container_responses=[one])


def withheld(agent: Served) -> dict[str, str]:
    return {name: one.kind for name, one in agent.agent.status().resources[0].withheld.items()}


@pytest.mark.parametrize(
    ("given", "kinds"),
    [("b", {"b": "foreign"}), ("", {"a": "foreign", "b": "foreign"}), ("c", {"a": "foreign", "b": "foreign"})],
    ids=["a device of ours", "not known which", "none of ours"],
)
def test_what_it_gave_is_withheld_until_its_pod_ends(
    kubelet: FakeKubelet, cards: Path, given: str, kinds: dict[str, str]
) -> None:
    """A device that another plugin gave to a pod is withheld until the pod ends; if it is unknown, all devices are."""
    with another_plugin(kubelet, "theirs") as plugin:
        plugin.response = answer(*(cards / name for name in given))
        kubelet.wait_allocatable(R, 1)
        pod = kubelet.run_pod("their-pod", {R: 1})
    with serve(Cards(cards), kubelet, period=0.1) as agent:
        kubelet.wait_until(lambda: withheld(agent) == kinds)
        kubelet.wait_until(lambda: kubelet.allocatable(R) == 2 - len(kinds))
        known = {"theirs": {(R, "b")}} if given == "b" else {}
        kubelet.wait_until(lambda: agent.agent.status().resources[0].elsewhere == known)
        if given != "b":
            waiting = kubelet.start_pod("p", {R: 1})
            assert not waiting.running
            why = agent.agent.status().resources[0].withheld["a"].reason
            assert f"has theirs of {R} from another plugin, and it is not known which device that is" in why
        pod.delete()
        kubelet.wait_until(lambda: withheld(agent) == {} and kubelet.allocatable(R) == 2)


def test_a_device_with_two_holders_is_told_whatever_its_ids(kubelet: FakeKubelet, cards: Path) -> None:
    """One pod has a device from the agent, another has the same from another plugin: it is reported as held twice."""
    with serve(Cards(cards), kubelet, period=0.1) as agent:
        (held,) = kubelet.run_pod("ours", {R: 1}).device_ids
        plugin = BarePlugin(kubelet.device_plugin_dir, "theirs", resource=R)
        plugin.response = answer(cards / held)
        hold = Hold(plugin, "ListAndWatch")
        plugin.register()
        pod = kubelet.run_pod("theirs", {R: 1})
        assert plugin.allocations == [list(pod.device_ids)] != [[held]]
        kubelet.wait_until(lambda: foreign(agent) == 1)  # seen by the allocation: that plugin has sent no list
        kubelet.wait_until(lambda: agent.agent.status().resources[0].held_twice == {held})
        hold.let_go.set()
        plugin.stop()
        pod.delete()
        kubelet.wait_until(lambda: not agent.agent.status().resources[0].held_twice)
