"""The fake kubelet behaves like kubelet 1.36.3; the tests use a minimal plugin (`BarePlugin`)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from deviceplugin.testing import (
    ContainerSpec,
    FakeContainer,
    FakeKubelet,
    FakePod,
    KubeletCrashError,
    PluginCallError,
    PodFailedError,
)
from deviceplugin.testing.run import Run, is_extended_resource_name
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import podresources_pb2 as pr
from deviceplugin.wire import podresources_pb2_grpc as pr_grpc
from tests.testing.bare import RESOURCE, BarePlugin, Hold, fail

Plugins = Callable[..., BarePlugin]
Kubelets = Callable[..., FakeKubelet]
ONE = {RESOURCE: 1}


def healthy(kubelet: FakeKubelet, resource: str = RESOURCE) -> set[str]:
    return {i for i, state in kubelet.devices(resource).items() if state.health == "Healthy"}


def background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def taken(kubelet: FakeKubelet, *pods: FakePod) -> set[str]:
    ids = [i for pod in pods for i in pod.device_ids]
    assert len(ids) == len(set(ids))
    return set(ids)


class TestRegistration:
    def test_dial_back_comes_before_the_answer(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """The kubelet answers Register only after the plugin has answered GetDevicePluginOptions."""
        plugin = plugins(fake_kubelet, "a", register=False)
        hold = Hold(plugin, "GetDevicePluginOptions")
        registering = background(plugin.register)
        assert hold.arrived.wait(10)
        assert not fake_kubelet.registrations
        hold.let_go.set()
        registering.join(10)
        assert fake_kubelet.wait_registered(RESOURCE).endpoint == "bare.sock"

    def test_options_are_those_the_plugin_serves(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """The options in the Register request are ignored; the options of GetDevicePluginOptions count."""
        plugin = plugins(fake_kubelet, "a", register=False)
        plugin.register(options=pb.DevicePluginOptions(pre_start_required=True))
        fake_kubelet.wait_devices(RESOURCE, 1)
        assert fake_kubelet.run_pod("p", ONE).running
        assert plugin.pre_starts == []
        assert fake_kubelet.registrations[0].options == pb.DevicePluginOptions()

    def test_version_is_checked(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A Register with another version than v1beta1 is refused with code UNKNOWN."""
        plugin = plugins(fake_kubelet, "a", register=False)
        with pytest.raises(grpc.RpcError) as failure:
            plugin.register(version="v1alpha1")
        assert failure.value.code() is grpc.StatusCode.UNKNOWN
        assert "v1alpha1" in fake_kubelet.rejections[0].error
        assert not fake_kubelet.registrations

    @pytest.mark.parametrize(
        ("name", "good"),
        [
            ("example.com/thing", True),
            ("example.com/Thing_1.x", True),
            ("thing", False),
            ("kubernetes.io/thing", False),
            ("x.kubernetes.io/thing", False),
            ("requests.example.com/thing", False),
            ("example.com/", False),
            ("Example.com/thing", False),
            ("example.com/a/b", False),
            ("example.com/" + "x" * 63, True),
            ("example.com/" + "x" * 64, False),
            ("a" * 63 + "/x", True),
            (".".join(["a" * 50] * 4) + "." + "b" * 40 + "/x", True),
            (".".join(["a" * 50] * 4) + "." + "b" * 41 + "/x", False),
        ],
    )
    def test_names(self, name: str, good: bool) -> None:
        """Only valid names of extended resources are accepted as resource names."""
        assert is_extended_resource_name(name) is good

    def test_register_before_serving(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """Register of a plugin that does not serve yet is refused after the dial timeout."""
        kubelet = kubelets(dial_timeout=0.3)
        plugin = plugins(kubelet, "a", register=False)
        plugin.endpoint = "other.sock"
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError):
            plugin.register()
        assert time.monotonic() - begin >= 0.3
        assert RESOURCE not in kubelet.resources()

    def test_a_plugin_that_accepts_and_hangs(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """The kubelet's GetDevicePluginOptions call has no deadline: a plugin that answers late is registered."""
        kubelet = kubelets(dial_timeout=0.1)
        plugin = plugins(kubelet, "a", register=False)
        hold = Hold(plugin, "GetDevicePluginOptions")
        registering = background(plugin.register)
        assert hold.arrived.wait(10)
        with pytest.raises(TimeoutError):
            kubelet.wait_until(lambda: bool(kubelet.rejections), 0.3)
        hold.let_go.set()
        registering.join(10)
        kubelet.wait_registered(RESOURCE)

    def test_a_caller_that_gives_up_ends_the_dial(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """The kubelet stops dialing the plugin at the deadline of the Register call, before the dial timeout."""
        plugin = plugins(fake_kubelet, "a", register=False)
        plugin.endpoint = "other.sock"
        # The error is that of the plugin's call or of the kubelet's call to the plugin; both have the same deadline.
        with pytest.raises(grpc.RpcError, match="Deadline Exceeded"):
            plugin.register(timeout=0.2)
        fake_kubelet.wait_until(lambda: len(fake_kubelet.rejections) == 1, 5)


class TestStreams:
    def test_resource_is_forgotten(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """A resource whose plugin has stopped is forgotten after the grace period, not before."""
        kubelet = kubelets(stop_grace=0.3)
        plugins(kubelet, "a").stop()
        kubelet.wait_devices(RESOURCE, 0)
        assert RESOURCE in kubelet.resources()
        kubelet.wait_until(lambda: RESOURCE not in kubelet.resources(), 5)
        assert kubelet.devices(RESOURCE) == {}

    def test_register_again_before_the_end(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """In kubelet 1.36.3 the end of the old stream disconnects a new registration of the same resource."""
        old = plugins(fake_kubelet, "a")
        new = plugins(fake_kubelet, "b", endpoint="new.sock")
        fake_kubelet.wait_devices(RESOURCE, lambda devices: set(devices) == {"b"})
        assert fake_kubelet.streams(RESOURCE) == 2
        old.stop()
        fake_kubelet.wait_devices(RESOURCE, 0)
        fake_kubelet.wait_until(lambda: fake_kubelet.streams(RESOURCE) == 0, 5)
        new.show("b", "c")
        pod = fake_kubelet.run_pod("p", ONE, check=False)
        assert pod.reason == "UnexpectedAdmissionError"

    def test_old_stream_still_counts(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """While two streams of one resource are open, the latest list counts, whichever stream it came on."""
        old = plugins(fake_kubelet, "a")
        plugins(fake_kubelet, "b", endpoint="new.sock")
        old.show("a", "x")
        fake_kubelet.wait_devices(RESOURCE, lambda devices: set(devices) == {"a", "x"})

    def test_failed_registration_hides_the_old_one(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """After a failed second registration, the end of the first stream leaves the devices healthy."""
        kubelet = kubelets(dial_timeout=0.2)
        plugin = plugins(kubelet, "a")
        plugin.endpoint = "missing.sock"
        with pytest.raises(grpc.RpcError):
            plugin.register()
        plugin.stop()
        kubelet.wait_until(lambda: kubelet.streams(RESOURCE) == 0, 5)
        assert healthy(kubelet) == {"a"}

    def test_a_list_over_4_mib(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A device list over 4 MiB ends the ListAndWatch stream (kubernetes#109304)."""
        plugin = plugins(fake_kubelet, "a")
        plugin.show(*(f"{n:060}" for n in range(60_000)))
        fake_kubelet.wait_devices(RESOURCE, 0, timeout=20)
        assert (fake_kubelet.capacity(RESOURCE), fake_kubelet.allocatable(RESOURCE)) == (1, 0)
        fake_kubelet.wait_rpc("ListAndWatch")
        assert "RESOURCE_EXHAUSTED" in fake_kubelet.rpcs("ListAndWatch")[0].error


class TestAllocation:
    def test_unknown_resource(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod with a resource that no plugin serves fails; the error names the served resources."""
        with pytest.raises(PodFailedError, match=r"asks for example\.com/thing, which no plugin serves; .*: nothing"):
            fake_kubelet.run_pod("p", ONE)
        plugins(fake_kubelet, "a")
        with pytest.raises(PodFailedError, match=r"for example\.com/tihng, .* served here: example\.com/thing"):
            fake_kubelet.run_pod("p", containers={"one": ONE, "two": {"example.com/tihng": 1}})
        with pytest.raises(PodFailedError, match=r"for example\.com/tihng"):
            fake_kubelet.run_pod("p", ONE, init_containers={"first": {"example.com/tihng": 1}})
        assert not fake_kubelet.pods
        assert fake_kubelet.run_pod("p", {**ONE, "cpu": 1, "hugepages-2Mi": 1}).running

    def test_no_list(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod with a limit of a resource without a device list fails, as it would run with 0 of 1 devices."""
        plugin = plugins(fake_kubelet, "a", register=False)
        plugin.before_answer = fail("ListAndWatch")
        plugin.register()
        fake_kubelet.wait_until(lambda: RESOURCE in fake_kubelet.resources())
        with pytest.raises(PodFailedError, match=f"runs with 0 of 1 {RESOURCE}"):
            fake_kubelet.run_pod("p", ONE)

    def test_admission_is_serial(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """While one Allocate hangs, no other pod is admitted (kubernetes#117435)."""
        plugin = plugins(fake_kubelet, "a", "b")
        hold = Hold(plugin, "Allocate")
        first = fake_kubelet.start_pod("first", ONE)
        second = fake_kubelet.start_pod("second", ONE)
        other = fake_kubelet.start_pod("no-devices")
        assert hold.arrived.wait(10)
        with pytest.raises(TimeoutError):
            other.wait_running(0.2)
        assert len(plugin.allocations) == 1
        hold.let_go.set()
        for pod in (first, second, other):
            pod.wait_running()

    def test_device_vanishes_in_flight(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A device that leaves the list during its Allocate would crash the kubelet: KubeletCrashError is raised."""
        plugin = plugins(fake_kubelet, "a")
        hold = Hold(plugin, "Allocate")
        pod = fake_kubelet.start_pod("p", ONE)
        assert hold.arrived.wait(10)
        plugin.show("b")
        fake_kubelet.wait_devices(RESOURCE, lambda devices: set(devices) == {"b"})
        hold.let_go.set()
        with pytest.raises(KubeletCrashError, match="'a'"):
            pod.wait_running()
        assert len(fake_kubelet.crashes) == 1
        fake_kubelet.crashes.clear()

    def test_device_gets_sick_in_flight(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A device that becomes unhealthy during its Allocate is allocated."""
        plugin = plugins(fake_kubelet, "a")
        hold = Hold(plugin, "Allocate")
        pod = fake_kubelet.start_pod("p", ONE)
        assert hold.arrived.wait(10)
        plugin.show(("a", "Unhealthy"))
        fake_kubelet.wait_devices(RESOURCE, 0)
        hold.let_go.set()
        assert pod.wait_running().device_ids == ("a",)
        assert fake_kubelet.device_health(pod) == {RESOURCE: {"a": "Unhealthy"}}

    def test_init_containers_hand_on(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A sidecar reuses the device of the init container before it; the main container does not get that device."""
        plugin = plugins(fake_kubelet, "a", "b", "c")
        pod = fake_kubelet.run_pod(
            "p",
            containers={"x": {RESOURCE: 2}},
            init_containers=[ContainerSpec("init", ONE), ContainerSpec("side", ONE, restartable=True)],
        )
        init, side, x = (set(pod.container(name).device_ids) for name in ("init", "side", "x"))
        # The sidecar starts after the init container and keeps its device.
        assert side == init
        assert x == {"a", "b", "c"} - side
        assert pod.requests == {RESOURCE: 3}
        assert len(plugin.allocations) == 3

    def test_a_claim_serves_the_limit(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A limit that a claim serves causes no Allocate, but the scheduler still counts it as used."""
        plugin = plugins(fake_kubelet, "a")
        spec = ContainerSpec("main", ONE, through_dra=[RESOURCE])
        pod = fake_kubelet.start_pod("claims", containers=[spec]).wait_running()
        assert (pod.device_ids, plugin.allocations) == ((), [])
        assert not fake_kubelet.start_pod("plugin", ONE).bound

    def test_a_claim_and_pre_start(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """With PreStartContainer, a container whose limit a claim serves does not start, as in kubelet 1.36.3."""
        kubelet = kubelets(start_backoff=0.01)
        plugins(kubelet, "a", pre_start=True)
        pod = kubelet.start_pod("p", containers=[ContainerSpec("main", ONE, through_dra=[RESOURCE])])
        kubelet.wait_until(lambda: "holds no devices" in pod.container().message)

    def test_nodes_are_looked_for(self, kubelets: Kubelets, plugins: Plugins, tmp_path: Path) -> None:
        """A container starts only if its device node exists: not with a plain file, but with a symlink to a node."""
        kubelet = kubelets(start_backoff=0.01)
        plugin = plugins(kubelet, "a")
        node = tmp_path / "node"
        answer = pb.ContainerAllocateResponse(devices=[pb.DeviceSpec(container_path="/dev/x", host_path=str(node))])
        plugin.response = lambda ids: pb.AllocateResponse(container_responses=[answer])
        pod = kubelet.start_pod("p", ONE)
        kubelet.wait_until(lambda: "No such file" in pod.container().message)
        node.touch()
        kubelet.wait_until(lambda: "neither a device node nor" in pod.container().message)
        node.unlink()
        node.symlink_to("/dev/null")
        pod.wait_running()


class TestPreference:
    def test_the_plugin_is_asked(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A plugin with GetPreferredAllocation is asked for its preference among the free healthy devices."""
        plugin = plugins(fake_kubelet, *"abcd", ("e", "Unhealthy"), prefer=True)
        plugin.on_prefer = lambda request: ["c"]
        first = fake_kubelet.run_pod("first", ONE)
        assert first.device_ids == ("c",)
        plugin.on_prefer = lambda request: ["b", "d"]
        assert fake_kubelet.run_pod("second", {RESOURCE: 2}).device_ids == ("b", "d")
        asked = plugin.preferences
        assert [set(r.available_deviceIDs) for r in asked] == [set("abcd"), set("abd")]
        assert [r.allocation_size for r in asked] == [1, 2]

    @pytest.mark.parametrize("answer", [[], ["nonsense"], ["a"], ["taken"]])
    def test_bad_answers_are_filled_up(self, fake_kubelet: FakeKubelet, plugins: Plugins, answer: list[str]) -> None:
        """If the preferred allocation is incomplete or has invalid devices, the kubelet chooses the missing devices."""
        plugin = plugins(fake_kubelet, "taken", prefer=True)
        fake_kubelet.run_pod("holder", ONE)
        plugin.show("taken", "a", "b", "c")
        fake_kubelet.wait_devices(RESOURCE, 4)
        plugin.on_prefer = lambda request: answer
        pod = fake_kubelet.run_pod("p", {RESOURCE: 2})
        assert len(pod.device_ids) == 2
        assert "taken" not in pod.device_ids
        assert "a" not in answer or "a" in pod.device_ids

    def test_a_failing_answer_fails_the_pod(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """An error from GetPreferredAllocation fails the pod (NVIDIA#2038)."""
        plugin = plugins(fake_kubelet, "a", "b", prefer=True)
        plugin.before_answer = fail("GetPreferredAllocation")
        assert fake_kubelet.run_pod("p", ONE, check=False).reason == "UnexpectedAdmissionError"

    def test_must_include_are_reusable_devices(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """In the request for the next container, must_include_deviceIDs has the devices of the init container."""
        plugin = plugins(fake_kubelet, "a", "b", "c", prefer=True)
        plugin.on_prefer = lambda request: [*request.must_include_deviceIDs, "c"][: request.allocation_size]
        pod = fake_kubelet.run_pod("p", {RESOURCE: 2}, init_containers={"init": ONE})
        init = pod.container("init").device_ids
        assert list(plugin.preferences[1].must_include_deviceIDs) == list(init)
        assert set(init) < set(pod.device_ids)


class TestTopology:
    DEVICES = (("a", "Healthy", (0,)), ("b", "Healthy", (1,)), ("c", "Healthy", (1,)))

    def test_single_numa_node(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """With the policy single-numa-node a pod gets two devices of one NUMA node; the third goes to the next pod."""
        kubelet = kubelets(topology_policy="single-numa-node")
        plugins(kubelet, *self.DEVICES)
        assert kubelet.run_pod("two", {RESOURCE: 2}).device_ids == ("b", "c")
        assert kubelet.run_pod("one", ONE).device_ids == ("a",)

    def test_no_node_has_enough(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """With single-numa-node a pod that needs devices of two NUMA nodes fails with TopologyAffinityError."""
        kubelet = kubelets(topology_policy="single-numa-node")
        plugins(kubelet, *self.DEVICES)
        pod = kubelet.run_pod("three", {RESOURCE: 3}, check=False)
        assert (pod.phase, pod.reason) == ("Failed", "TopologyAffinityError")

    def test_best_effort(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """With the policy best-effort the plugin is not asked for a preference if only one aligned choice is left."""
        kubelet = kubelets(topology_policy="best-effort")
        plugin = plugins(kubelet, *self.DEVICES, prefer=True)
        assert kubelet.run_pod("one", ONE).device_ids == ("a",)
        assert plugin.preferences == []
        assert kubelet.run_pod("two", ONE).running
        assert set(plugin.preferences[0].available_deviceIDs) == {"b", "c"}


class TestScheduler:
    def test_a_waiting_pod_can_be_deleted(self, fake_kubelet: FakeKubelet) -> None:
        """A pod that is not scheduled can be deleted, and its name is free at once."""
        fake_kubelet.start_pod("p", ONE).delete()
        assert fake_kubelet.start_pod("p").wait_running().running

    def test_limits_or_containers(self, fake_kubelet: FakeKubelet) -> None:
        """`limits` and `containers` cannot be given together."""
        with pytest.raises(ValueError, match="not both"):
            fake_kubelet.start_pod("p", ONE, containers={"main": ONE})

    def test_names_are_unique(self, fake_kubelet: FakeKubelet) -> None:
        """Pod names are unique within their namespace."""
        fake_kubelet.start_pod("p")
        fake_kubelet.start_pod("p", namespace="other")
        with pytest.raises(ValueError, match="default/p"):
            fake_kubelet.start_pod("p")


class TestPreStart:
    def test_without_the_plugin(self, kubelets: Kubelets, plugins: Plugins) -> None:
        """While the plugin is stopped, a container whose device needs PreStartContainer does not restart."""
        kubelet = kubelets(start_backoff=0.01)
        plugin = plugins(kubelet, "a", pre_start=True)
        pod = kubelet.run_pod("p", ONE)
        plugin.stop()
        kubelet.wait_devices(RESOURCE, 0)
        with pytest.raises(TimeoutError):
            pod.restart_container(timeout=0.2)
        assert "stopped" in pod.container().message
        plugins(kubelet, "a", pre_start=True)
        kubelet.wait_until(lambda: pod.running)


class TestRestart:
    def test_sockets_are_deleted(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A kubelet that starts deletes every socket in the device plugin directory, and no other file."""
        plugins(fake_kubelet, "a")
        other = fake_kubelet.device_plugin_dir / "DEPRECATION"
        other.touch()
        fake_kubelet.restart()
        assert {p.name for p in fake_kubelet.device_plugin_dir.iterdir()} == {
            "DEPRECATION",
            "kubelet.sock",
            "kubelet_internal_checkpoint",
        }
        assert fake_kubelet.capacity(RESOURCE) == 0
        assert RESOURCE in fake_kubelet.resources()

    def test_a_dead_kubelet_leaves_its_socket(self, fake_kubelet: FakeKubelet) -> None:
        """While the kubelet is down, its sockets exist and refuse connections."""
        fake_kubelet.stop()
        for path in (fake_kubelet.socket, fake_kubelet.pod_resources_socket):
            with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
                client.connect(str(path))
        assert fake_kubelet.allocatable(RESOURCE) == 0

    def test_a_dead_container_fails_its_pod(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod whose container is down while the kubelet restarts fails, as the kubelet has no healthy devices yet."""
        plugins(fake_kubelet, "a")
        pod = fake_kubelet.run_pod("p", ONE)
        pod.crash_container()
        fake_kubelet.restart()
        pod.wait_phase("Failed")
        assert pod.reason == "UnexpectedAdmissionError"

    def test_restart_during_allocate(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A pod whose Allocate is in flight at a kubelet restart fails: it is admitted before the plugin is back."""
        plugin = plugins(fake_kubelet, "a")
        hold = Hold(plugin, "Allocate")
        pod = fake_kubelet.start_pod("p", ONE)
        assert hold.arrived.wait(10)
        fake_kubelet.restart()
        hold.let_go.set()
        pod.wait_phase("Failed")

    def test_new_socket_in_the_same_kubelet(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A test can have the kubelet make a new socket: streams go on, and plugins register on the new socket."""
        plugin = plugins(fake_kubelet, "a")
        before = fake_kubelet.socket.stat()
        fake_kubelet.recreate_socket()
        assert (fake_kubelet.socket.stat().st_ino, fake_kubelet.socket.stat().st_ctime_ns) != (
            before.st_ino,
            before.st_ctime_ns,
        )
        plugin.show("a", "b")
        fake_kubelet.wait_devices(RESOURCE, 2)
        plugins(fake_kubelet, "x", resource="example.com/other", endpoint="other.sock")

    def test_freeze(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A frozen kubelet accepts connections, but answers no call and takes no device list until it is thawed."""
        plugin = plugins(fake_kubelet, "a")
        fake_kubelet.freeze()
        plugin.show("a", "b")
        with pytest.raises(grpc.RpcError) as failure:
            plugin.register(timeout=0.3)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert set(fake_kubelet.devices(RESOURCE)) == {"a"}
        fake_kubelet.thaw()
        fake_kubelet.wait_devices(RESOURCE, lambda devices: set(devices) == {"a", "b"})

    def test_a_frozen_kubelet_can_be_stopped(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """A frozen kubelet can be restarted; the calls that hung in it end."""
        plugin = plugins(fake_kubelet, "a")
        fake_kubelet.freeze()
        plugin.show("b")
        pod = fake_kubelet.start_pod("p", ONE)
        fake_kubelet.restart(wipe=False)
        plugin.register()
        pod.wait_phase("Failed")

    def test_it_starts_once(self, fake_kubelet: FakeKubelet) -> None:
        """A running kubelet cannot be started again, and a stopped one cannot be frozen."""
        with pytest.raises(RuntimeError, match="runs already"):
            fake_kubelet.start()
        fake_kubelet.stop()
        with pytest.raises(RuntimeError, match="down"):
            fake_kubelet.freeze()


class TestPodResources:
    @pytest.fixture
    def stub(self, fake_kubelet: FakeKubelet) -> Iterator[pr_grpc.PodResourcesListerStub]:
        with grpc.insecure_channel(f"unix:{fake_kubelet.pod_resources_socket}") as channel:
            yield pr_grpc.PodResourcesListerStub(channel)

    @staticmethod
    def held(pod: pr.PodResources) -> dict[str, list[tuple[str, list[str], list[int]]]]:
        return {
            c.name: sorted((d.resource_name, list(d.device_ids), [n.ID for n in d.topology.nodes]) for d in c.devices)
            for c in pod.containers
        }

    def test_list(self, fake_kubelet: FakeKubelet, plugins: Plugins, stub: pr_grpc.PodResourcesListerStub) -> None:
        """List shows pods with their devices, one entry for each NUMA node, and omits finished init containers."""
        plugins(fake_kubelet, ("a", "Healthy", (0, 1)), "b")
        pod = fake_kubelet.run_pod(
            "p",
            {RESOURCE: 2},
            init_containers=[ContainerSpec("init", ONE), ContainerSpec("side", restartable=True)],
            namespace="n",
        )
        (entry,) = stub.List(pr.ListPodResourcesRequest()).pod_resources
        assert (entry.name, entry.namespace) == ("p", "n")
        assert self.held(entry) == {
            "side": [],
            "main": [(RESOURCE, ["a"], [0]), (RESOURCE, ["a"], [1]), (RESOURCE, ["b"], [])],
        }
        pod.complete()
        assert not stub.List(pr.ListPodResourcesRequest()).pod_resources

    def test_get(self, fake_kubelet: FakeKubelet, plugins: Plugins, stub: pr_grpc.PodResourcesListerStub) -> None:
        """Get shows one pod, and fails for a pod that does not exist."""
        plugins(fake_kubelet, "a")
        fake_kubelet.run_pod("p", ONE)
        entry = stub.Get(pr.GetPodResourcesRequest(pod_name="p", pod_namespace="default")).pod_resources
        assert self.held(entry) == {"main": [(RESOURCE, ["a"], [])]}
        with pytest.raises(grpc.RpcError, match="other/p"):
            stub.Get(pr.GetPodResourcesRequest(pod_name="p", pod_namespace="other"))

    def test_allocatable(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, stub: pr_grpc.PodResourcesListerStub
    ) -> None:
        """GetAllocatableResources shows healthy devices, allocated or free."""
        plugins(fake_kubelet, "a", ("b", "Unhealthy"), ("c", "Healthy", (0,)))
        fake_kubelet.run_pod("p", ONE)
        devices = stub.GetAllocatableResources(pr.AllocatableResourcesRequest()).devices
        assert sorted((list(d.device_ids), [n.ID for n in d.topology.nodes]) for d in devices) == [
            (["a"], []),
            (["c"], [0]),
        ]

    def test_rate_limit(self, kubelets: Kubelets) -> None:
        """PodResources calls beyond the rate limit are refused with RESOURCE_EXHAUSTED."""
        kubelet = kubelets(pod_resources_qps=0.001, pod_resources_burst=2)
        with grpc.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel:
            stub = pr_grpc.PodResourcesListerStub(channel)
            stub.List(pr.ListPodResourcesRequest())
            stub.GetAllocatableResources(pr.AllocatableResourcesRequest())
            with pytest.raises(grpc.RpcError) as failure:
                stub.List(pr.ListPodResourcesRequest())
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def test_list_drops_a_choice_in_flight(
        self, fake_kubelet: FakeKubelet, plugins: Plugins, stub: pr_grpc.PodResourcesListerStub
    ) -> None:
        """A List during an Allocate, after another pod's end, makes the kubelet give one device twice (#137534)."""
        plugin = plugins(fake_kubelet, "a", "b")
        ended = fake_kubelet.run_pod("ended", ONE)
        hold = Hold(plugin, "Allocate")
        pod = fake_kubelet.start_pod("p", ONE)
        assert hold.arrived.wait(10)
        ended.complete()
        assert len(fake_kubelet.allocated(RESOURCE)) == 2
        stub.GetAllocatableResources(pr.AllocatableResourcesRequest())
        assert len(fake_kubelet.allocated(RESOURCE)) == 2
        stub.List(pr.ListPodResourcesRequest())
        assert fake_kubelet.allocated(RESOURCE) == set()
        hold.let_go.set()
        pod.wait_running()
        (mine,) = pod.device_ids
        plugin.show(mine)
        fake_kubelet.wait_devices(RESOURCE, 1)
        assert fake_kubelet.run_pod("twin", ONE).device_ids == (mine,)


class Claims(FakeKubelet):
    """A subclass of the fake kubelet that overrides the methods for claims; the first preparation fails."""

    failures = 1
    done: tuple[str, ...] = ()

    def prepare_pod(self, pod: FakePod) -> None:
        self.done = (*self.done, f"prepare {pod.name}")
        if self.failures:
            self.failures -= 1
            raise PluginCallError("not yet")

    def unprepare_pod(self, pod: FakePod) -> None:
        self.done = (*self.done, f"unprepare {pod.name}")

    def cdi_devices(self, pod: FakePod, container: FakeContainer) -> list[str]:
        return [f"example.com/claim={container.name}"]

    def dynamic_resources(self, pod: FakePod, container: FakeContainer) -> list[pr.DynamicResource]:
        return [pr.DynamicResource(claim_name=f"{pod.name}-claim")]


class TestExtension:
    def test_claims_can_be_added(self) -> None:
        """A subclass can prepare a pod before its first container, add CDI devices, and unprepare it at the end."""
        with Claims(start_backoff=0.01) as kubelet:
            pod = kubelet.run_pod("p")
            assert pod.container().cdi_devices == ("example.com/claim=main",)
            with grpc.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel:
                listed = pr_grpc.PodResourcesListerStub(channel).List(pr.ListPodResourcesRequest())
            assert listed.pod_resources[0].containers[0].dynamic_resources[0].claim_name == "p-claim"
            pod.delete()
            assert kubelet.done == ("prepare p", "prepare p", "unprepare p")


class TestObservation:
    def test_rpc_log(self, fake_kubelet: FakeKubelet, plugins: Plugins) -> None:
        """`rpc_log` has every call with its times, request and response, in the order in which the calls began."""
        plugins(fake_kubelet, "a", prefer=True, pre_start=True)
        fake_kubelet.run_pod("p", ONE)
        assert [r.method for r in fake_kubelet.rpc_log] == [
            "GetDevicePluginOptions",
            "ListAndWatch",
            "GetPreferredAllocation",
            "Allocate",
            "PreStartContainer",
        ]
        call = fake_kubelet.wait_rpc("Allocate", RESOURCE)
        assert call.request.container_requests[0].devices_ids == ["a"]
        assert call.response.container_responses[0].envs == {"THING_IDS": "a"}
        assert 0 < call.seconds < 5
        assert fake_kubelet.rpcs("ListAndWatch") == []

    def test_waiting_has_an_end(self, fake_kubelet: FakeKubelet) -> None:
        """A method that waits raises TimeoutError after its timeout; the error shows the state of the fake kubelet."""
        fake_kubelet.start_pod("p", ONE)
        with pytest.raises(TimeoutError, match="default/p Pending"):
            fake_kubelet.wait_registered(RESOURCE, timeout=0.05)
        with pytest.raises(TimeoutError):
            fake_kubelet.wait_devices(RESOURCE, 1, timeout=0.05)

    def test_a_root_that_is_too_long(self, tmp_path: Path) -> None:
        """A root directory whose socket paths would be too long is refused at once."""
        with pytest.raises(ValueError, match="107"):
            FakeKubelet(tmp_path / ("x" * 90))

    def test_a_root_of_the_caller_stays(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The fake kubelet removes a root directory that it has made itself, not one that a test has given."""
        with FakeKubelet() as own:
            root = own.root
            with FakeKubelet(root / "given") as given:
                assert given.is_up
            assert (root / "given" / "device-plugins").is_dir()
        assert not root.exists()

    def test_a_start_that_is_interrupted_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If KeyboardInterrupt ends the start of a fake kubelet, its root directory is removed."""

        def interrupted(run: Run) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Run, "serve_registration", interrupted)
        kubelet = FakeKubelet()
        with pytest.raises(KeyboardInterrupt), kubelet:
            pytest.fail("it did not start")
        assert not kubelet.root.exists()
        assert not kubelet.is_up
