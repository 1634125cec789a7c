"""The tracker, which finds the holders of devices, against the fake kubelet."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
from watchdog.observers.inotify_c import InotifyFD

from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import boot_id
from deviceplugin.kubelet import cgroups, podresources, tracker
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.pod_names import PodNames
from deviceplugin.kubelet.podresources import PodContainer, PodResources
from deviceplugin.kubelet.request_schedule import MOST_REQUEST
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.register.copies import AllocationCopies
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import Allocation, AllocationRecord, Amount, RegisterSnapshot
from deviceplugin.register.register import Register
from deviceplugin.register.store import MemoryStore
from deviceplugin.testing import FakeKubelet, FakePod
from deviceplugin.testing.devicemanager import PluginCallError
from deviceplugin.testing.kubelet import Damage
from deviceplugin.wire import podresources_pb2
from deviceplugin.wire.podresources_pb2_grpc import PodResourcesListerStub
from tests.identities import seen_as
from tests.scenarios import unwatched
from tests.testing.bare import RESOURCE as R
from tests.testing.bare import BarePlugin

ONE = {R: 1}
WRITES = 3
"""Checkpoints that a scan requests: two may be late, one of the resource and one of the node's status."""


class TrackedKubelet:
    """A fake kubelet with a plugin, and a tracker of the plugin's devices."""

    def __init__(self, kubelet: FakeKubelet, plugin: BarePlugin) -> None:
        self.kubelet = kubelet
        self.plugin = plugin
        self.requests = 0
        self.listens = True
        self.woken = 0
        self.copied: dict[Allocation, Wanted] = {}
        self.register = Register()
        self.tracker = self.made()

    def made(self, *, believe_checkpoint: bool = False) -> HolderTracker:
        copies, scan_wanted = cast("AllocationCopies", self), cast("asyncio.Event", self)
        return HolderTracker(
            self, self.kubelet.paths, self.register, scan_wanted, copies=copies, believe_checkpoint=believe_checkpoint
        )

    def set(self) -> None:
        """Count the calls of this method, by which the tracker asks for a scan."""
        self.woken += 1

    def adopted(self, resource: str) -> bool:
        return False

    def read(self) -> None:
        """Does nothing, since a test sets `copied` instead of files."""

    def changed(self) -> dict[Allocation, Wanted]:
        """Return the allocations that other agents' copies name since the last call."""
        found, self.copied = self.copied, {}
        return found

    def resend(self) -> bool:
        """Send the device list again, upon which the kubelet writes its checkpoint."""
        self.requests += 1
        if self.listens:
            self.plugin.show("a", "b")
        return self.listens

    async def scan(self, *wanted: str) -> HolderSnapshot:
        """Scan as `HolderScanner` does."""
        self.tracker.note_copies()
        now = await self.tracker.scan({(R, one) for one in wanted})
        assert now is not None
        return now

    async def still_held(self, resource: str, ids: Collection[str]) -> Mapping[str, str]:
        """Return which of the ids are still held, and why, as an Allocate asks for it."""
        return await self.tracker.still_held(resource, ids)

    async def run_pod(self, name: str = "p") -> FakePod:
        return await asyncio.to_thread(self.kubelet.run_pod, name, ONE)

    async def hold(self) -> FakePod:
        """Run a pod with a device, and scan."""
        pod = await self.run_pod()
        await self.scan()
        return pod

    async def waiting_pod(self, no_network: pytest.MonkeyPatch, name: str = "p") -> FakePod:
        """Start a pod that the kubelet admits, but whose sandbox it cannot create."""
        no_network.setattr(self.kubelet, "start_sandbox", fails)
        pod = await asyncio.to_thread(self.kubelet.start_pod, name, ONE)
        await asyncio.to_thread(self.kubelet.wait_until, lambda: pod.containers["main"].message == "no network", 10)
        return pod

    @property
    def lists(self) -> int:
        return len(self.kubelet.rpcs("List"))


@pytest.fixture
def tracked(fake_kubelet: FakeKubelet) -> Iterator[TrackedKubelet]:
    plugin = BarePlugin(fake_kubelet.device_plugin_dir, "a", "b")
    plugin.register()
    fake_kubelet.wait_devices(R, 2)
    try:
        yield TrackedKubelet(fake_kubelet, plugin)
    finally:
        plugin.stop()


def allocation(pod: FakePod, device_id: str | None = None, container: str = "main") -> Allocation:
    return Allocation(pod.uid, container, R, device_id or pod.device_ids[0])


async def test_a_running_pod_costs_no_request(tracked: TrackedKubelet) -> None:
    """While the checkpoint names a pod and its processes run, a scan requests neither `List` nor a checkpoint."""
    pod = await tracked.run_pod()
    for _ in range(3):
        now = await tracked.scan()
        assert set(now.held) == {allocation(pod)}
    assert await tracked.scan(*pod.device_ids) == tracked.tracker.snapshot
    assert (tracked.requests, tracked.lists) == (0, 0)
    assert tracked.tracker.holders(R) == {pod.device_ids[0]: {PodContainer("default", "p", "main", pod.uid)}}
    assert tracked.tracker.snapshot.at


async def test_a_pod_that_ended_is_let_go_with_the_next_scan(tracked: TrackedKubelet) -> None:
    """After a pod has completed, the next scan calls `List` and requests checkpoints; then the device is free."""
    pod = await tracked.hold()
    await asyncio.to_thread(pod.complete)
    now = await tracked.scan()
    assert (now.current, dict(now.held)) == (True, {})
    assert (tracked.requests, tracked.lists) == (WRITES, 1)
    assert tracked.tracker.holders(R) == {}
    await tracked.scan()
    assert (tracked.requests, tracked.lists) == (WRITES, 1)


@pytest.mark.parametrize("lacking", ["instances", "events"])
async def test_a_checkpoint_is_noticed_without_file_events(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """A new checkpoint is noticed also if no inotify instance is left or no file event arrives."""
    if lacking == "instances":
        monkeypatch.setattr(InotifyFD, "__init__", unwatched.refuse)
    else:
        monkeypatch.setattr(InotifyFD, "handle_event", lambda instance, event: None)
    pod = await tracked.hold()
    await asyncio.to_thread(pod.complete)
    now = await tracked.scan()
    assert (now.current, dict(now.held)) == (True, {})


async def test_what_another_agents_copy_names_is_held_while_its_pod_runs(tracked: TrackedKubelet) -> None:
    """A pod that another agent's copy names holds its device at once, until a scan finds no process of the pod."""
    pod = await tracked.hold()
    other = "example.com/other"
    hangs, over = Allocation(pod.uid, "main", other, "d0"), Allocation("gone", "main", other, "d1")
    what = {one: Wanted((other, one.device_id), seen_as(boot_id(), "n1"), Amount("1")) for one in (hangs, over)}

    def held() -> set[str]:
        return {one.unit[2] for one in tracked.tracker.foreign()}

    assert held() == set()
    for _ in range(2):
        tracked.tracker.observed = frozenset({other})
        tracked.copied = dict(what)
        assert tracked.tracker.note_copies()
        assert held() == {"d0", "d1"}
        assert (await tracked.scan("a")).current
        assert tracked.tracker.granted(hangs) == what[hangs]
        assert {one for one in tracked.tracker.snapshot.held if one.resource == other} == {hangs}
        tracked.tracker.observed = frozenset()
        assert held() == {"d0"}
    await asyncio.to_thread(pod.complete)
    await tracked.scan("a")
    assert not tracked.tracker.snapshot.held
    assert tracked.tracker.granted(hangs) is None


async def test_what_the_register_forgets_between_two_scans_is_held_at_once(tracked: TrackedKubelet) -> None:
    """If the agent's register loses the record of a pod's device, the device counts as held at once, without a scan."""
    pod = await tracked.run_pod()
    other = "example.com/other"
    one = Allocation(pod.uid, "main", other, "d0")
    tracked.copied = {one: Wanted((other, "d0"), seen_as(boot_id(), "n1"), Amount("1"))}
    await tracked.scan()
    record = AllocationRecord(
        other, "d0", "d0", 0.0, 1, identity=seen_as(boot_id(), "n1"), holders=frozenset({one[:2]})
    )
    known: tuple[dict[tuple[str, str], AllocationRecord], ...] = ({}, {(other, "d0"): record}, {})
    for records in known:
        tracked.register.store = store = MemoryStore()
        store.snapshot = RegisterSnapshot(allocations=records)
        assert [use.key for use in tracked.tracker.foreign()] == [(other, "d0")] * (not records)


async def test_a_free_device_is_asked_about(tracked: TrackedKubelet) -> None:
    """A scan that asks about a free device gets a checkpoint that the kubelet wrote after the scan began."""
    before = time.monotonic()
    now = await tracked.scan("a")
    assert now.current
    assert now.at >= before
    assert now.registered is not None
    assert now.registered[R] == {"a", "b"}
    assert tracked.requests == WRITES


async def test_requests_about_the_same_holders_grow_rarer(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the kubelet writes no checkpoint, scans request one less and less often, up to every `MOST_REQUEST` s."""
    clock = 1000.0
    monkeypatch.setattr("deviceplugin.kubelet.tracker.time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(tracked.tracker.in_flight, "none_since", lambda moment: True)
    tracked.listens = False
    await tracked.register.add_holders([Allocation("ended", "main", R, "a")])
    asked = []
    for _ in range(600):
        before = tracked.requests
        await tracked.scan()
        if tracked.requests > before:
            asked.append(clock)
        clock += 0.1
    gaps = [second - first for first, second in itertools.pairwise(asked)]
    assert asked[0] == 1000.0, "what the kubelet has dropped is asked about at once"
    assert gaps[0] < 1.0
    assert max(gaps) <= 1.2 * MOST_REQUEST + 0.1
    assert max(gaps) >= 0.8 * MOST_REQUEST - 0.1
    assert len(asked) < 15
    assert set(tracked.tracker.snapshot.held) == {Allocation("ended", "main", R, "a")}


async def test_a_plugin_that_nobody_listens_to_cannot_ask(tracked: TrackedKubelet) -> None:
    """If the kubelet does not listen to the plugin, no holder counts as ended, and `problem` says why."""
    pod = await tracked.hold()
    await asyncio.to_thread(pod.delete)
    tracked.listens = False
    now = await tracked.scan()
    assert not now.current
    assert "does not listen" in now.problem
    assert set(now.held) == {allocation(pod)}
    requests = tracked.requests
    again = await tracked.scan()
    assert tracked.requests == requests, "it asks more and more rarely"
    assert again.problem == now.problem, "a scan that does not ask gives the same reason"


async def test_others_use_up_the_limit_of_pod_resources(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `List` that PodResources' rate limit refuses is tried again; a scan is current also without its answer."""
    tries = []

    def counted(channel: grpc.aio.Channel) -> object:
        tries.append(1)
        if len(tries) == 3:
            tracked.kubelet.pod_resources_refused = 0.0
        return PodResourcesListerStub(channel)

    monkeypatch.setattr(podresources, "PodResourcesListerStub", counted)
    pod = await tracked.hold()
    tracked.kubelet.pod_resources_refused = 1.0
    await asyncio.to_thread(pod.complete)
    assert dict((await tracked.scan()).held) == {}
    assert len(tries) == 3
    tracked.kubelet.pod_resources_refused = 1.0
    monkeypatch.setattr(podresources, "LIST_TRIES", 3)
    now = await tracked.scan("a", "b")
    assert now.current, "nothing safe depends on List"


async def test_a_kubelet_that_is_away(tracked: TrackedKubelet, caplog: pytest.LogCaptureFixture) -> None:
    """While the kubelet is away, held devices stay held, and the log has one line about `List`."""
    caplog.set_level("INFO")
    pod = await tracked.hold()
    await asyncio.to_thread(tracked.kubelet.stop)
    tracked.listens = False
    tracked.kubelet.cgroups.remove_pod(pod.uid)
    for _ in range(3):
        now = await tracked.scan("a", "b")
        assert not now.current
        assert set(now.held) == {allocation(pod)}
    assert sum("List failed" in record.getMessage() for record in caplog.records) == 1
    assert not tracked.tracker.all_pods_listed


@pytest.mark.parametrize("damage", ["deleted", "empty", "torn", "unreadable"])
async def test_a_checkpoint_that_cannot_be_read(tracked: TrackedKubelet, damage: Damage) -> None:
    """While the checkpoint cannot be read, held devices stay held, with this reason; the next readable one counts."""
    pod = await tracked.hold()
    tracked.kubelet.damage_checkpoint(damage)
    tracked.listens = False  # so that the kubelet writes no checkpoint
    now = await tracked.scan("a", "b")
    assert (now.current, now.registered) == (False, None)
    assert set(now.held) == {allocation(pod)}
    assert "kubelet_internal_checkpoint" in now.held[allocation(pod)].reason
    assert not tracked.tracker.snapshot.unnamed(R), "the kubelet counts its pod as active"
    if damage == "unreadable":
        tracked.kubelet.checkpoint.rmdir()
    tracked.listens = True
    now = await tracked.scan("a", "b")
    assert now.current
    assert dict(tracked.tracker.unnamed_reasons(R)) == {}
    assert set(now.held) == {allocation(pod)}


async def test_no_cgroup_is_searched_for_the_id_of_a_pod_that_is_gone(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cgroup tree is searched only for pods that the kubelet still has, not for a pod that was deleted."""
    walks = 0
    walk = cgroups.pod_cgroups

    def counted(trees: Sequence[str], boot: str) -> PodProcesses | None:
        nonlocal walks
        walks += 1
        return walk(trees, boot)

    former, beside = await tracked.run_pod(), await tracked.run_pod("beside")
    await tracked.scan()
    await asyncio.to_thread(former.delete)
    monkeypatch.setattr(cgroups, "pod_cgroups", counted)
    assert await tracked.still_held(R, former.device_ids) == {}
    assert not walks
    assert set(await tracked.still_held(R, beside.device_ids)) == set(beside.device_ids)
    assert walks


async def test_a_pod_that_is_about_to_start_holds_its_device(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is admitted but has not started holds its device, as the kubelet's checkpoint names the pod."""
    with monkeypatch.context() as no_network:
        pod = await tracked.waiting_pod(no_network)
        (mine,) = tracked.kubelet.allocated(R)
        found = await tracked.still_held(R, ["a", "b"])
        assert found == {mine: f"pod {pod.uid} has not started a process yet and is named in the kubelet's checkpoint"}
        tracked.listens = False
        (why,) = (await tracked.still_held(R, [mine])).values()
        assert "cannot be asked" in why
        tracked.listens = True
    await asyncio.to_thread(pod.wait_running)
    assert await tracked.still_held(R, ["a", "b"]) == {mine: f"processes of pod {pod.uid} run"}
    await asyncio.to_thread(pod.complete)
    assert await tracked.still_held(R, ["a", "b"]) == {}


async def test_a_grant_waits_longer_for_the_checkpoint_than_a_scan(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Allocate waits for a late checkpoint, which shows that the former pod has ended, so its device is free.

    The former pod's empty cgroup stays for some time, and looks like the cgroup of a pod that is about to start.
    """
    monkeypatch.setattr(tracked.kubelet.cgroups, "remove_pod", lambda uid: None)
    pod = await tracked.hold()
    await asyncio.to_thread(pod.complete)
    with grpc.insecure_channel(f"unix:{tracked.kubelet.pod_resources_socket}") as channel:
        # `List` makes the kubelet drop pods that have ended, as Allocate does.
        await asyncio.to_thread(PodResourcesListerStub(channel).List, podresources_pb2.ListPodResourcesRequest())
    monkeypatch.setattr("deviceplugin.kubelet.checkpoint.REWRITE", 0.0)
    assert await tracked.still_held(R, pod.device_ids) == {}


async def test_the_cgroup_of_a_former_holder_hides_no_other_one(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While cgroups of former pods still exist, only the pods that are about to start are found as holders."""
    monkeypatch.setattr(tracked.kubelet.cgroups, "remove_pod", lambda uid: None)
    former = [await tracked.run_pod(f"former-{number}") for number in range(2)]
    for pod in former:
        await asyncio.to_thread(pod.complete)
    for number in range(2):
        await tracked.waiting_pod(monkeypatch, f"p-{number}")
    found = await tracked.still_held(R, ["a", "b"])
    assert found.keys() == {"a", "b"}
    assert not any(pod.uid in why for pod in former for why in found.values())


async def test_a_pod_that_the_kubelet_dropped_before_it_started_holds_nothing(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that was deleted before it started holds no device, even if its cgroup exists: no checkpoint names it."""
    monkeypatch.setattr(tracked.kubelet.cgroups, "remove_pod", lambda uid: None)
    with monkeypatch.context() as no_network:
        pod = await tracked.waiting_pod(no_network)
        assert len(await tracked.still_held(R, ["a", "b"])) == 1
        await asyncio.to_thread(pod.delete)
    await asyncio.to_thread(tracked.kubelet.run_pod, "q", ONE)  # the kubelet drops pods that have ended
    assert pod.uid not in "".join((await tracked.still_held(R, ["a", "b"])).values())


def fails(pod: FakePod) -> None:
    """Raise an error, as if the sandbox of a pod could not be created."""
    raise PluginCallError("no network")


async def test_what_the_kubelet_would_give_away_is_withheld_from_it_soon(tracked: TrackedKubelet) -> None:
    """If a pod deleted by force still runs when the kubelet drops it, the next Allocate makes its device withheld."""
    pod = await tracked.hold()
    await asyncio.to_thread(pod.force_delete, hang=True)
    await tracked.scan()
    assert not tracked.tracker.snapshot.unnamed(R), "no request is made for a holder whose processes run"
    await PodResources(tracked.kubelet.paths.pod_resources).list()  # makes the kubelet drop the pod
    assert set(await tracked.still_held(R, pod.device_ids)) == set(pod.device_ids)
    assert tracked.woken
    assert tracked.tracker.unnamed_reasons(R).keys() == set(pod.device_ids), "the next list is without it"
    assert tracked.tracker.unnamed_reasons("example.com/other") == {}
    await tracked.scan()
    assert tracked.tracker.snapshot.unnamed(R) == set(pod.device_ids)
    await asyncio.to_thread(pod.delete)
    await tracked.scan(*pod.device_ids)
    assert tracked.tracker.unnamed_reasons(R) == {}


async def test_a_kubelet_without_its_checkpoint_admits_the_pods_again(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kubelet restart without its checkpoint, ids of pods that it may admit again are not withheld.

    The device of a hanging pod that the kubelet does not list is withheld after `READMISSION` seconds.
    """
    pod, hangs = await tracked.hold(), await tracked.run_pod("hangs")
    await tracked.scan()
    kubelet = tracked.kubelet
    await asyncio.to_thread(kubelet.stop)
    kubelet.damage_checkpoint("deleted")
    await asyncio.to_thread(hangs.force_delete, hang=True)
    kubelet.hold_sources()
    await asyncio.to_thread(partial(kubelet.start, wipe=False))
    await tracked.tracker.kubelet_started(file_identity(kubelet.socket))
    tracked.plugin.register()
    for limit in (30.0, 0.0):
        monkeypatch.setattr(tracker, "READMISSION", limit)
        now = await tracked.scan("a", "b")
        assert {held.pod_uid for held, of in now.held.items() if not of.named} == {pod.uid, hangs.uid}
        assert not now.unnamed(R), "the kubelet has not got its pods from the API server"
    monkeypatch.setattr(tracker, "READMISSION", 30.0)
    kubelet.release_sources()
    await asyncio.to_thread(kubelet.wait_until, lambda: kubelet.hears_of_pods, 10)
    assert not (await tracked.scan("a", "b")).unnamed(R)
    assert set(await tracked.still_held(R, pod.device_ids)) == set(pod.device_ids), "another pod gets none"
    assert set(tracked.tracker.unnamed_reasons(R)) == set(pod.device_ids)
    await tracked.scan("a", "b")
    assert set(tracked.tracker.unnamed_reasons(R)) == set(pod.device_ids), "the kubelet might choose it again"
    monkeypatch.setattr(tracker, "READMISSION", 0.0)
    assert (await tracked.scan("a", "b")).unnamed(R) == set(hangs.device_ids)


async def test_a_pod_that_a_restarted_kubelet_knows_is_withheld_when_the_kubelet_drops_it(
    tracked: TrackedKubelet,
) -> None:
    """If a pod is deleted by force after a kubelet restart, its device is withheld once the kubelet drops the pod."""
    pod = await tracked.hold()
    await tracked.tracker.kubelet_started(file_identity(tracked.kubelet.socket))
    await tracked.tracker.kubelet_started(FileIdentity(0, 0, 0))
    await tracked.scan()
    await asyncio.to_thread(pod.force_delete, hang=True)
    await asyncio.to_thread(tracked.kubelet.run_pod, "other", {})
    await PodResources(tracked.kubelet.paths.pod_resources).list()  # makes the kubelet drop the pod
    assert (await tracked.scan("a", "b")).unnamed(R) == set(pod.device_ids)


async def test_an_allocate_in_between_makes_a_scan_worthless(tracked: TrackedKubelet) -> None:
    """If an Allocate comes during a scan, the scan returns None, and the former result stays."""
    pod = await tracked.hold()
    before = tracked.tracker.snapshot
    original = tracked.resend

    def resend() -> bool:
        with tracked.tracker.in_flight.busy():
            pass
        return original()

    tracked.resend = resend  # type: ignore[method-assign]
    assert await tracked.tracker.scan({(R, "a"), (R, "b")}) is None
    assert tracked.tracker.snapshot is before
    assert set(before.held) == {allocation(pod)}


async def test_what_is_known_from_before_a_restart(tracked: TrackedKubelet) -> None:
    """A restarted agent reads holders from checkpoint and ledger; a scan removes a holder that only the ledger has."""
    pod = await tracked.run_pod()
    ended = Allocation("ended", "main", R, "b")
    again = tracked.made()
    await tracked.register.add_holders([ended])
    await again.start()
    assert set(again.snapshot.held) == {allocation(pod), ended}
    assert not again.snapshot.current
    assert again.title(pod.uid) == "default/p"
    assert again.title("ended") == "ended"
    now = await again.scan({(R, "b")})
    assert now is not None
    assert set(now.held) == {allocation(pod)}


async def test_cgroups_without_the_agents_own_pod_are_not_believed(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the agent's own pod is not among the visible cgroups, they are not used, and pod directories decide."""
    monkeypatch.setattr(cgroups, "own_pod", lambda kubelet_root: "own")
    (tracked.kubelet.root / "pods" / "own").mkdir()
    tracked.tracker = tracked.made()
    pod = await tracked.run_pod()
    await asyncio.to_thread(pod.complete)
    (path,) = tracked.kubelet.cgroups.pod(pod.uid)
    await asyncio.to_thread(tracked.kubelet.wait_until, lambda: not path.exists(), 10)
    now = await tracked.scan(*pod.device_ids)
    assert set(now.held) == {allocation(pod)}
    assert any("not all, this kubelet's: they do not show pod own" in problem for problem in tracked.tracker.problems)
    await asyncio.to_thread(pod.delete)
    assert not (await tracked.scan(*pod.device_ids)).held
    assert not tracked.tracker.all_pods_listed, "an empty list is not compared with cgroups that may hide a pod"


async def test_cgroups_that_cannot_be_read_any_more_prove_nothing(
    tracked: TrackedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cgroups cannot be read, a held device stays held."""
    pod = await tracked.hold()
    monkeypatch.setattr(cgroups, "pod_cgroups", lambda trees, boot: None)
    assert set(await tracked.still_held(R, pod.device_ids)) == set(pod.device_ids)
    with pytest.raises(OSError, match="cannot be read now"):
        tracked.tracker.pods.running()


async def test_of_two_pods_of_one_name_a_list_does_not_tell_which(tracked: TrackedKubelet) -> None:
    """If two pods have one name, as after a deletion by force, `List` cannot tell them apart, so neither is listed."""
    first = await tracked.run_pod()
    await asyncio.to_thread(first.force_delete, hang=True)
    second = await tracked.run_pod()
    assert (first.namespace, first.name) == (second.namespace, second.name)
    await tracked.scan("a", "b")
    assert not tracked.tracker.all_pods_listed
    other = await tracked.run_pod("other")
    assert await tracked.tracker.listed(tracked.tracker.pods.running().may_be_ours) == {other.uid}


async def test_pods_are_listed_while_the_kubelet_counts_them_as_active(tracked: TrackedKubelet) -> None:
    """`listed` returns running pods that the kubelet counts as active; without kubelet or pod logs it returns none."""
    pods = [await tracked.run_pod(name) for name in ("p", "q")]
    running = tracked.tracker.pods.running().running
    assert running is not None
    assert running == {pod.uid for pod in pods}
    assert await tracked.tracker.listed(running) == running
    await asyncio.to_thread(pods[0].force_delete, hang=True)
    assert tracked.tracker.pods.running().running == running
    assert await tracked.tracker.listed(running) == {pods[1].uid}
    logs = tracked.kubelet.pod_logs
    logs.rename(logs.with_name("elsewhere"))
    assert not await tracked.tracker.listed(running)
    logs.with_name("elsewhere").rename(logs)
    await asyncio.to_thread(tracked.kubelet.stop)
    assert not await tracked.tracker.listed(running)


def test_pod_names_are_found_by_uid(tmp_path: Path) -> None:
    """Pod names are read from the names of log directories (namespace_name_uid); other directories are ignored."""
    for name in ("ns_pod-a_u1", "ns_pod-b_u2", "other", "a_b_c_d"):
        (tmp_path / name).mkdir()
    assert PodNames(tmp_path).read(["u1", "u3"]) == {"u1": ("ns", "pod-a")}
    named = PodNames(tmp_path).pods(["u3", "u1"])
    assert named == (PodContainer("ns", "pod-a", uid="u1"), PodContainer(uid="u3"))
    assert PodNames(tmp_path / "none").read(["u1"]) == {}
