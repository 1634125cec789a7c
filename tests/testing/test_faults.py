"""How the fake kubelet errs: as kubelet 1.36.3 does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from deviceplugin.testing import Checkpoint, ContainerSpec, FakeKubelet, FakePod
from deviceplugin.testing.kubelet import Damage
from deviceplugin.wire import podresources_pb2 as pr
from deviceplugin.wire import podresources_pb2_grpc as pr_grpc
from tests.scenarios.node import wait_for
from tests.testing.bare import RESOURCE, BarePlugin

Plugins = Callable[..., BarePlugin]
Kubelets = Callable[..., FakeKubelet]
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
    """Register a plugin again, and wait until the kubelet has written its devices down."""
    before = len(kubelet.updates(plugin.resource))
    plugin.register()
    kubelet.wait_until(lambda: len(kubelet.updates(plugin.resource)) > before)
    kubelet.wait_devices(plugin.resource, count)


@pytest.fixture
def listed(fake_kubelet: FakeKubelet) -> Callable[[], set[str]]:
    """Return the names of the pods that PodResources lists."""

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
        """A kubelet that the API server does not reach lists no pods; its checkpoint names them, and they run."""
        plugin = plugins(fake_kubelet, "a", "b")
        pod = fake_kubelet.run_pod("p", ONE)
        ended = fake_kubelet.run_pod("ended", ONE)
        ended.complete()
        fake_kubelet.hold_sources()
        fake_kubelet.restart(wipe=False)
        again(fake_kubelet, plugin, 2)
        assert listed() == set()
        # Neither List nor an update drops a pod that is over: UpdateAllocatedDevices waits for the sources.
        assert fake_kubelet.allocated(RESOURCE) == {"a", "b"}
        assert checkpointed(fake_kubelet) == {pod.uid: set(pod.device_ids), ended.uid: set(ended.device_ids)}
        assert pod.running
        assert cgroup(fake_kubelet, pod)
        fake_kubelet.release_sources()
        wait_for("the list", lambda: listed() == {"p"}, 10)
        after = fake_kubelet.run_pod("next", ONE)
        assert checkpointed(fake_kubelet) == {pod.uid: set(pod.device_ids), after.uid: set(ended.device_ids)}

    def test_static_pods_are_known(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A kubelet that the API server does not reach knows the pods of its manifests."""
        plugins(fake_kubelet, "a", "b")
        fake_kubelet.run_pod("p", ONE)
        fake_kubelet.run_pod("static", ONE, static=True)
        fake_kubelet.hold_sources()
        fake_kubelet.restart()
        wait_for("the list", lambda: listed() == {"static"}, 10)

    def test_pods_that_were_deleted_meanwhile(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """What was deleted while the kubelet heard of nothing runs until it hears again."""
        plugins(fake_kubelet, "a", "b")
        pod, completed = (fake_kubelet.run_pod(name, ONE) for name in ("p", "completed"))
        completed.complete()
        fake_kubelet.hold_sources()
        fake_kubelet.restart()
        pod.delete()
        completed.delete()
        assert pod.running
        assert fake_kubelet.pod_directory(completed).exists()
        fake_kubelet.release_sources()
        fake_kubelet.wait_until(lambda: pod.gone and completed.gone)
        assert not cgroup(fake_kubelet, pod)
        assert list((fake_kubelet.root / "pods").iterdir()) == []


class TestRemovedPods:
    def test_forced_deletion_with_a_hung_runtime(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed
    ) -> None:
        """A pod that is deleted by force leaves List at once; its device is given away while its containers run."""
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

    def test_forced_deletion(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """Where the runtime answers, the containers of a pod that is deleted by force are killed."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        pod.force_delete()
        assert not pod.running
        assert not cgroup(fake_kubelet, pod)
        assert set(checkpointed(fake_kubelet)) == {pod.uid}

    def test_a_hung_pod_over_a_restart(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A hung container outlives kubelets that never knew its pod; it is killed when the runtime answers."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        pod.force_delete(hang=True)
        fake_kubelet.restart()
        wait_for("the list", lambda: listed() == set(), 10)
        fake_kubelet.run_pod("other")
        assert pod.running
        pod.end_containers()
        assert pod.gone
        assert not cgroup(fake_kubelet, pod)

    def test_forced_deletion_while_the_kubelet_is_down(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod that is deleted by force while the kubelet is down runs on until the kubelet has found it."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        fake_kubelet.stop()
        pod.force_delete()
        assert pod.running
        fake_kubelet.hold_sources()
        fake_kubelet.start()
        fake_kubelet.run_pod("static", static=True)
        assert pod.running
        assert cgroup(fake_kubelet, pod)
        fake_kubelet.release_sources()
        fake_kubelet.wait_until(lambda: pod.gone)
        assert not cgroup(fake_kubelet, pod)

    def test_a_manifest_is_removed(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A static pod leaves List when its manifest is removed, and runs on for its grace period."""
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

    def test_a_restart_cuts_the_grace_period_short(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A kubelet that starts kills containers of pods that it never knew, whatever their grace period was."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("static", ONE, static=True)
        pod.remove_manifest()
        fake_kubelet.restart()
        fake_kubelet.wait_until(lambda: pod.gone)
        assert not cgroup(fake_kubelet, pod)


class TestNetwork:
    def test_admitted_and_not_started(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """Without a network a pod has devices, in List and checkpoint, and neither cgroup nor directory."""
        plugins(fake_kubelet, "a")
        fake_kubelet.lose_network()
        pod = fake_kubelet.start_pod("p", ONE)
        fake_kubelet.wait_until(lambda: checkpointed(fake_kubelet) == {pod.uid: {"a"}})
        assert listed() == {"p"}
        # Pods are admitted one after the other: the first one's admission is over.
        fake_kubelet.start_pod("q")
        wait_for("the list", lambda: listed() == {"p", "q"}, 10)
        assert not cgroup(fake_kubelet, pod)
        assert not fake_kubelet.pod_directory(pod).exists()
        fake_kubelet.restore_network()
        pod.wait_running()
        assert cgroup(fake_kubelet, pod)
        assert fake_kubelet.pod_directory(pod).exists()

    def test_such_a_pod_can_be_deleted(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod that waits for the network can be deleted; one that runs goes on without it."""
        plugins(fake_kubelet, "a", "b")
        running = fake_kubelet.run_pod("running", ONE)
        fake_kubelet.lose_network()
        pod = fake_kubelet.start_pod("p", ONE)
        fake_kubelet.wait_until(lambda: pod.uid in checkpointed(fake_kubelet))
        pod.delete()
        assert pod.gone
        assert running.running
        with pytest.raises(TimeoutError):
            running.restart_container(timeout=0.1)


class TestLateCheckpoint:
    def test_ended_pods_stay_until_a_write(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A write names an ended pod until UpdateAllocatedDevices ran, and no write comes of that alone."""
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
        """Two writes can take place in the wrong order: the checkpoint misses a pod that runs, until the next write."""
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
        """A checkpoint that is damaged while the kubelet runs is whole after the next write."""
        plugin = plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        fake_kubelet.damage_checkpoint(damage)
        with pytest.raises((FileNotFoundError, ValueError)):
            checkpointed(fake_kubelet)
        plugin.show("a", "b")
        fake_kubelet.wait_until(lambda: len(fake_kubelet.updates(RESOURCE)) == 2)
        assert set(checkpointed(fake_kubelet)) == {pod.uid}

    def test_a_checkpoint_that_cannot_be_replaced(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """Lists are taken although they cannot be written down; a pod that needs devices fails."""
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
        """A kubelet that starts without a checkpoint knows no devices of running containers."""
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

    @pytest.mark.parametrize("damage", ["empty", "torn", "unreadable"])
    def test_a_damaged_claim_state_keeps_the_kubelet_down(self, fake_kubelet: FakeKubelet, damage: Damage) -> None:
        """A kubelet with a damaged claim state does not start."""
        fake_kubelet.stop()
        fake_kubelet.damage_claim_state(damage)
        with pytest.raises((ValueError, OSError)):
            fake_kubelet.start()
        assert not fake_kubelet.is_up


class TestRateLimit:
    def test_a_share_is_refused(self, fake_kubelet: FakeKubelet) -> None:
        """A test can have a share of the calls of PodResources refused, as if other clients used the limit up."""
        fake_kubelet.pod_resources_refused = 0.5
        codes = []
        with grpc.insecure_channel(f"unix:{fake_kubelet.pod_resources_socket}") as channel:
            stub = pr_grpc.PodResourcesListerStub(channel)
            for _ in range(2):
                codes.append(stub.List.future(pr.ListPodResourcesRequest()).code())
                codes.append(stub.GetAllocatableResources.future(pr.AllocatableResourcesRequest()).code())
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 2
        assert codes.count(grpc.StatusCode.OK) == 2


class TestInitContainers:
    def test_named_like_an_ended_one(self, fake_kubelet: FakeKubelet, plugins: Plugins, listed: Listed) -> None:
        """A lasting init container is in the checkpoint under its own pod, and not in List."""
        plugins(fake_kubelet, "a")
        ended = fake_kubelet.run_pod("ended", containers={"work": ONE})
        ended.complete()
        pod = fake_kubelet.start_pod("p", init_containers=[ContainerSpec("work", ONE, lasting=True)])
        fake_kubelet.wait_until(lambda: pod.container("work").state == "running")
        assert pod.phase == "Pending"
        assert checkpointed(fake_kubelet) == {pod.uid: {"a"}}
        (path,) = fake_kubelet.cgroups.container(pod.uid, pod.container("work").id)
        assert path.exists()
        pod.end_init_container("work")
        assert pod.running
        assert not path.exists()

    def test_devices_are_allocated_again(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A container that takes over its init container's device is a second Allocate and a second entry."""
        plugin = plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE, init_containers=[ContainerSpec("init", ONE)])
        assert plugin.allocations == [["a"], ["a"]]
        entries = Checkpoint.from_json(fake_kubelet.checkpoint.read_bytes()).entries or ()
        assert [(entry.pod_uid, entry.container) for entry in entries] == [(pod.uid, "init"), (pod.uid, "main")]


class TestCompletion:
    def test_while_the_kubelet_is_down(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod that ends without its kubelet keeps a sandbox until the kubelet is back, which fails the pod."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        fake_kubelet.stop()
        pod.complete()
        (path,) = fake_kubelet.cgroups.pod(pod.uid)
        assert {one.name for one in path.iterdir() if one.is_dir()} == {pod.sandbox}
        fake_kubelet.start()
        pod.wait_phase("Failed")
        assert pod.reason == "UnexpectedAdmissionError"
        assert not path.exists()
        assert fake_kubelet.pod_directory(pod).exists()
        assert set(checkpointed(fake_kubelet)) == {pod.uid}

    def test_reboot(self, kubelets: Kubelets, plugins: Plugins, tmp_path: Path) -> None:
        """After a reboot no cgroup is left, pods with devices fail, others start again."""
        kubelet = kubelets(cgroup_root=tmp_path)
        plugins(kubelet, "a")
        pod, plain = kubelet.run_pod("p", ONE), kubelet.run_pod("plain")
        hung = kubelet.run_pod("hung")
        hung.force_delete(hang=True)
        kubelet.reboot()
        pod.wait_phase("Failed")
        kubelet.wait_until(lambda: hung.gone and plain.running)
        assert plain.container().restarts == 1
        (parent,) = {path.parent for path in kubelet.cgroups.pod(plain.uid)}
        assert {one.name for one in parent.iterdir() if one.is_dir()} == {f"pod{plain.uid}"}
