"""After faults (restarts, deletions by force, lost files) the fake kubelet behaves like kubelet 1.36.3."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from deviceplugin.testing import Checkpoint, FakeKubelet, FakePod
from deviceplugin.testing.kubelet import Damage
from deviceplugin.wire import podresources_pb2 as pr
from deviceplugin.wire import podresources_pb2_grpc as pr_grpc
from tests.scenarios.node import wait_for
from tests.testing.bare import RESOURCE, BarePlugin

Plugins = Callable[..., BarePlugin]
ONE = {RESOURCE: 1}


def checkpointed(kubelet: FakeKubelet) -> dict[str, set[str]]:
    """Return the devices that the checkpoint names, by pod uid."""
    named: dict[str, set[str]] = {}
    for entry in Checkpoint.from_json(kubelet.checkpoint.read_bytes()).entries or ():
        named.setdefault(entry.pod_uid, set()).update(*(ids or () for ids in (entry.device_ids or {}).values()))
    return named


def runs(pod: FakePod) -> bool:
    return pod.running


def cgroup(kubelet: FakeKubelet, pod: FakePod) -> bool:
    (path,) = kubelet.cgroups.pod(pod.uid)
    return path.exists()


def again(kubelet: FakeKubelet, plugin: BarePlugin, count: int) -> None:
    """Register a plugin again, and wait until the kubelet has its list with `count` healthy devices."""
    before = len(kubelet.updates(plugin.resource))
    plugin.register()
    kubelet.wait_until(lambda: len(kubelet.updates(plugin.resource)) > before)
    kubelet.wait_devices(plugin.resource, count)


@pytest.fixture
def listed(fake_kubelet: FakeKubelet) -> Callable[[], set[str]]:
    """Return a function that returns the names of the pods in PodResources List."""

    def names() -> set[str]:
        with grpc.insecure_channel(
            f"unix:{fake_kubelet.pod_resources_socket}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            response = pr_grpc.PodResourcesListerStub(channel).List(pr.ListPodResourcesRequest(), timeout=10)
        return {pod.name for pod in response.pod_resources}

    return names


Listed = Callable[[], set[str]]


class TestSources:
    def test_a_kubelet_without_pods(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A restarted kubelet without the API server lists no pods, but its checkpoint names them, and they run on."""
        plugin = plugins(fake_kubelet, "a", "b")
        pod = fake_kubelet.run_pod("p", ONE)
        ended = fake_kubelet.run_pod("ended", ONE)
        ended.complete()
        fake_kubelet.hold_sources()
        fake_kubelet.restart(wipe=False)
        again(fake_kubelet, plugin, 2)
        assert listed() == set()
        # Neither List nor a device list removes an ended pod: UpdateAllocatedDevices waits until the pods are known.
        assert fake_kubelet.allocated(RESOURCE) == {"a", "b"}
        assert checkpointed(fake_kubelet) == {pod.uid: set(pod.device_ids), ended.uid: set(ended.device_ids)}
        assert pod.running
        assert cgroup(fake_kubelet, pod)
        fake_kubelet.release_sources()
        wait_for("the list", lambda: listed() == {"p"}, 10)
        after = fake_kubelet.run_pod("next", ONE)
        assert checkpointed(fake_kubelet) == {pod.uid: set(pod.device_ids), after.uid: set(ended.device_ids)}


class TestRemovedPods:
    def test_forced_deletion_with_a_hung_runtime(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed
    ) -> None:
        """List omits a pod that is deleted by force, and another pod gets its device while its containers run."""
        plugin = plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        pod.force_delete(hang=True)
        assert "default/p" not in fake_kubelet.pods
        assert set(checkpointed(fake_kubelet)) == {pod.uid}
        assert listed() == set()
        plugin.show("a", "b")
        fake_kubelet.wait_devices(RESOURCE, 2)
        fake_kubelet.wait_until(lambda: checkpointed(fake_kubelet) == {})
        plugin.show("a")
        fake_kubelet.wait_devices(RESOURCE, 1)
        twin = fake_kubelet.run_pod("p", ONE)
        assert twin.device_ids == pod.device_ids
        assert runs(pod)
        assert cgroup(fake_kubelet, pod)
        assert fake_kubelet.pod_directory(pod).exists()
        pod.end_containers()
        assert not runs(pod)
        assert not cgroup(fake_kubelet, pod)
        assert not fake_kubelet.pod_directory(pod).exists()
        assert twin.running

    def test_a_manifest_is_removed(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """When a static pod's manifest is removed, List omits the pod at once, and it runs on for its grace period."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("static", ONE, static=True)
        assert listed() == {"static"}
        pod.remove_manifest()
        assert listed() == set()
        assert fake_kubelet.allocated(RESOURCE) == set()
        assert pod.running
        assert cgroup(fake_kubelet, pod)
        pod.end_containers()
        assert not cgroup(fake_kubelet, pod)
        with pytest.raises(ValueError, match="no manifest"):
            fake_kubelet.run_pod("p").remove_manifest()


class TestNetwork:
    def test_admitted_and_not_started(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """Without a network a pod has devices in List and in the checkpoint, but no cgroup and no pod directory."""
        plugins(fake_kubelet, "a")
        fake_kubelet.lose_network()
        pod = fake_kubelet.start_pod("p", ONE)
        fake_kubelet.wait_until(lambda: checkpointed(fake_kubelet) == {pod.uid: {"a"}})
        assert listed() == {"p"}
        # Pods are admitted one after the other: when q is listed, the admission of p is over.
        fake_kubelet.start_pod("q")
        wait_for("the list", lambda: listed() == {"p", "q"}, 10)
        assert not cgroup(fake_kubelet, pod)
        assert not fake_kubelet.pod_directory(pod).exists()
        fake_kubelet.restore_network()
        pod.wait_running()
        assert cgroup(fake_kubelet, pod)
        assert fake_kubelet.pod_directory(pod).exists()


class TestLateCheckpoint:
    def test_ended_pods_stay_until_a_write(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A checkpoint names an ended pod until UpdateAllocatedDevices, which the pod's end alone does not cause."""
        plugin = plugins(fake_kubelet, "a", "b")
        pod = fake_kubelet.run_pod("p", ONE)
        pod.complete()
        plugin.show("a", "b", "c")
        fake_kubelet.wait_devices(RESOURCE, 3)
        fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(RESOURCE)) == 2)
        assert set(checkpointed(fake_kubelet)) == {pod.uid}
        assert listed() == set()
        assert set(checkpointed(fake_kubelet)) == {pod.uid}
        plugin.show("a", "b")
        fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(RESOURCE)) == 3)
        assert checkpointed(fake_kubelet) == {}

    def test_an_older_state_replaces_a_newer_one(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed
    ) -> None:
        """If two writes of the checkpoint come in the wrong order, it lacks a running pod until the next write."""
        plugin = plugins(fake_kubelet, "a", "b")
        fake_kubelet.hold_checkpoint_writes()
        plugin.show("a", "b", "c")
        fake_kubelet.wait_devices(RESOURCE, 3)
        fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(RESOURCE)) == 2)
        fake_kubelet.land_checkpoint_writes()
        pod = fake_kubelet.run_pod("p", ONE)
        assert pod.running
        assert checkpointed(fake_kubelet) == {}
        assert listed() == {"p"}
        plugin.show("a", "b")
        fake_kubelet.wait_until(lambda: set(checkpointed(fake_kubelet)) == {pod.uid})


class TestDamagedFiles:
    @pytest.mark.parametrize("damage", ["deleted", "empty", "torn"])
    def test_a_running_kubelet_writes_it_anew(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, damage: Damage
    ) -> None:
        """A checkpoint that is damaged while the kubelet runs is valid again after the next write."""
        plugin = plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        fake_kubelet.damage_checkpoint(damage)
        with pytest.raises((FileNotFoundError, ValueError)):
            checkpointed(fake_kubelet)
        plugin.show("a", "b")
        fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(RESOURCE)) == 2)
        assert set(checkpointed(fake_kubelet)) == {pod.uid}

    def test_a_checkpoint_that_cannot_be_replaced(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """If the checkpoint cannot be written, the kubelet accepts device lists, but a pod with a limit fails."""
        plugin = plugins(fake_kubelet, "a")
        fake_kubelet.damage_checkpoint("unreadable")
        plugin.show("a", "b")
        fake_kubelet.wait_devices(RESOURCE, 2)
        pod = fake_kubelet.run_pod("p", ONE, check=False)
        assert (pod.phase, pod.reason) == ("Failed", "UnexpectedAdmissionError")
        assert "checkpoint" in pod.message

    @pytest.mark.parametrize("damage", ["deleted", "empty", "torn", "unreadable"])
    def test_a_restarted_kubelet_gives_devices_away(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, damage: Damage, listed: Listed
    ) -> None:
        """A kubelet that starts without a valid checkpoint gives a running container's device to another pod."""
        plugin = plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        fake_kubelet.stop()
        fake_kubelet.damage_checkpoint(damage)
        fake_kubelet.start(wipe=False)
        again(fake_kubelet, plugin, 1)
        wait_for("the list", lambda: listed() == {"p"}, 10)
        assert fake_kubelet.allocated(RESOURCE) == set()
        if damage == "unreadable":
            fake_kubelet.checkpoint.rmdir()
        assert fake_kubelet.run_pod("twin", ONE).device_ids == pod.device_ids
        assert pod.running
