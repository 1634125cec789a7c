"""Each alert of the example rules fires in a real Prometheus for its cause on a real node, and ends with the cause.

The rules' times are shorter (`tests.cluster.prometheus`), and so is the time after which holders count as unknown. The
causes are real, with these exceptions: a script makes hooks, sources and the agent's status fail; the second node of
`test_an_agent_that_has_gone` is a Node without a kubelet, and an HTTP server answers scrapes in place of its agent;
`KubeState` has the metrics of kube-state-metrics.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from deviceplugin.sources.path import device_id
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import podresources_pb2, podresources_pb2_grpc
from tests.cluster import isolate, locks
from tests.cluster import test_daemonset_real as daemonset
from tests.cluster import test_metrics_real as metrics
from tests.cluster.bridge import Bridge, env_of
from tests.cluster.hanging import HangingFileSystem
from tests.cluster.node import DEVICE_PLUGINS, LEDGER, POD_RESOURCES_SOCKET, Cluster, ClusterTimeout, Pod
from tests.cluster.prometheus import AGENT, KubeState, Prometheus
from tests.cluster.test_daemonset_real import Deployed, deployment
from tests.cluster.test_metrics_real import RESOURCES
from tests.cluster.test_restarts_real import older
from tests.cluster.test_witnesses_real import CHECKPOINT, start_api_server
from tests.metrics.test_monitoring import rules
from tests.testing.bare import BarePlugin, Hold

bridge, prometheus = metrics.bridge, metrics.prometheus  # fixtures


# --- an agent whose sources have faults ------------------------------------------------------------------------------


def share(cluster: Cluster, wanted: str, driver: str = "gpu.example.com") -> None:
    """Request how many of a driver's devices are for claims (wanted), as `dra-bridge migrate` does."""
    annotation = {"metadata": {"annotations": {f"{driver}/dra-share": wanted}}}
    cluster.api.patch("Node", cluster.node_name, annotation)


def fires(prometheus: Prometheus, *alerts: str | tuple[str, str]) -> bool:
    """Return whether all these alerts fire, each given by its name, or by its name and its device or resource."""
    found = prometheus.firing()
    return {one for one in alerts if isinstance(one, tuple)} <= found and {
        one for one in alerts if isinstance(one, str)
    } <= {name for name, _ in found}


def wait_fires(prometheus: Prometheus, cluster: Cluster, *alerts: str | tuple[str, str]) -> None:
    cluster.wait_for(lambda: fires(prometheus, *alerts), 90, f"{alerts} fire")


def wait_ended(prometheus: Prometheus, cluster: Cluster, *alerts: str) -> None:
    """Wait until none of these alerts fires; without names, until no alert fires."""

    firing = set[str]()

    def over() -> bool:
        firing.clear()
        firing.update(name for name, _ in prometheus.firing() if name in alerts or not alerts)
        return not firing

    try:
        cluster.wait_for(over, 120, f"{alerts or 'all alerts'} have ended")
    except ClusterTimeout as error:
        raise AssertionError(f"these alerts have not ended: {sorted(firing)}") from error


def test_alerts_fire_for_what_happened(bridge: Bridge, prometheus: Prometheus) -> None:
    """Alerts fire for an unhealthy device, a lost kubelet, a stalled move or a dead agent, and end with the cause."""
    cluster = bridge.cluster
    (group,) = prometheus.get("rules")["groups"]
    cluster.wait_for(
        lambda: all(rule["health"] == "ok" for rule in prometheus.get("rules")["groups"][0]["rules"]),
        30,
        "all rules were evaluated",
    )
    alerts = {rule["name"] for rule in group["rules"] if rule["type"] == "alerting"}
    assert alerts == {rule["alert"] for rule in rules()}
    quiet = {("DeviceDriverError", "gpu-3"), ("DeviceDriverError", "card-3")}  # alerts for the script's recent XID
    cluster.wait_for(lambda: prometheus.firing() <= quiet, 60, "all is well")

    assert bridge.script is not None
    ill = bridge.script.with_name("ill")
    ill.write_text("gpu-1")
    cluster.wait_for(lambda: ("DeviceUnhealthy", "gpu-1") in prometheus.firing(), 30, "the ill device is told")
    ill.write_text("")

    def stuck() -> set[str]:
        return {device for name, device in prometheus.firing() if name == "HandoverStuck"}

    # A held device cannot move to claims: a move that waits for the device's pod raises no alert.
    before = cluster.allocatable("example.com/gpu")
    holder = cluster.start_pod("holder", {"example.com/gpu": 1}).wait_running()
    device = env_of(holder)["GPU"]
    share(cluster, "all")
    moving = f'deviceplugin_handover_waits{{for="holder",device="{device}"}}'
    since = f'deviceplugin_device_state_since_timestamp_seconds{{device="{device}"}}'
    old = f"({moving} == 1) and on (device) (time() - {since} > 8)"
    cluster.wait_for(lambda: prometheus.query(old), 60, "the device waits for its pod")
    assert prometheus.query('deviceplugin_devices{state="to-dra"}') != {}
    assert not stuck()
    holder.delete()
    holder.wait_gone()
    share(cluster, "3")
    cluster.wait_allocatable("example.com/gpu", before)

    # Without a kubelet the agent cannot know that the devices are free.
    cluster.stop_kubelet()
    cluster.wait_for(
        lambda: (
            {("DevicePluginNotRegistered", name["name"]) for name in RESOURCES} <= prometheus.firing()
            and prometheus.told("DRADriverNotRegistered", "driver") == {"gpu.example.com", "card.example.com"}
        ),
        60,
        "the lost kubelet is told",
    )
    share(cluster, "all")
    cluster.wait_for(stuck, 60, "the stuck handover is told")
    cluster.start_kubelet()
    cluster.wait_for(lambda: prometheus.firing() <= quiet, 90, "all is well again")

    bridge.kill()
    cluster.wait_for(lambda: ("DevicePluginAgentDown", "") in prometheus.firing(), 30, "the dead agent is told")
    bridge.start()
    cluster.wait_for(lambda: prometheus.firing() <= quiet, 60, "all is well with the new agent")
    assert "DeviceHeldTwice" not in {name for name, _ in prometheus.firing()}


CAUSES: list[tuple[str, set[tuple[str, str]]]] = [
    (
        "unknown measure status",
        {
            ("DeviceHealthUnknown", "gpu-0"),
            ("DeviceHealthUnknown", "card-0"),
            *(("DeviceLoadUnknown", one["name"]) for one in RESOURCES),
            ("AgentStatusIncomplete", ""),
        },
    ),
    (
        "source memory xid",
        {
            *(("DeviceSourceFailing", one["name"]) for one in RESOURCES),
            ("DeviceMemoryErrors", "gpu-0"),
            ("DeviceDriverError", "gpu-0"),
        },
    ),
]
"""Words that make the script fail, and the alerts that each of these faults raises."""


@pytest.fixture
def small_disk(cluster: Cluster) -> Iterator[Path]:
    """Mount a small file system for the agent's ledger; return the path of a file that can fill the file system."""
    directory = LEDGER.parent
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "ledger", str(directory)], check=True)
    filler = directory / "filler"
    yield filler
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(path: Path) -> None:
    """Write into this file until its file system is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def covered_checkpoint(directory: Path) -> Iterator[None]:
    """Mount an unreadable file over the kubelet's checkpoint, as a wrong mount does."""
    other = directory / "no-checkpoint"
    other.write_text("{")
    subprocess.run(["mount", "--bind", str(other), str(CHECKPOINT)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(CHECKPOINT)], check=True)


@contextlib.contextmanager
def without_slices(bridge: Bridge) -> Iterator[None]:
    """Remove the right to write slices from the agent's role, until the end of the context."""
    role = bridge.cluster.api.get("ClusterRole", "dra-bridge", api_version="rbac.authorization.k8s.io/v1")
    patch = {"rules": [rule for rule in role["rules"] if "resourceslices" not in rule["resources"]]}
    assert patch["rules"] != role["rules"]
    change = ("ClusterRole", "dra-bridge")
    bridge.cluster.api.patch(*change, patch, api_version="rbac.authorization.k8s.io/v1")
    try:
        yield
    finally:
        bridge.cluster.api.patch(*change, {"rules": role["rules"]}, api_version="rbac.authorization.k8s.io/v1")


@contextlib.contextmanager
def a_slice_that_stays(bridge: Bridge) -> Iterator[None]:
    """Add a foreign slice to the pool of gpu.example.com; a finalizer keeps the slice from being deleted."""
    api, node = bridge.cluster.api, bridge.cluster.node_name
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    metadata = {"name": "stays", "finalizers": ["example.com/stays"]}
    spec = {"driver": "gpu.example.com", "allNodes": True, "pool": pool}
    api.create({"apiVersion": bridge.api_version, "kind": "ResourceSlice", "metadata": metadata, "spec": spec})
    try:
        yield
    finally:
        api.patch("resourceslice", "stays", {"metadata": {"finalizers": None}})


@contextlib.contextmanager
def without_account(bridge: Bridge) -> Iterator[None]:
    """Delete the agent's ServiceAccount, which makes its token invalid; at the end create the account and a token."""
    account = bridge.cluster.api.get("ServiceAccount", "dra-bridge", "dra-bridge")
    bridge.cluster.api.delete("ServiceAccount", "dra-bridge", "dra-bridge")
    try:
        yield
    finally:
        for key in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
            account["metadata"].pop(key, None)
        bridge.cluster.api.apply(account)
        bridge.renew_token()


@pytest.mark.lengthy
def test_alerts_about_sources_and_others(small_disk: Path, bridge: Bridge, prometheus: Prometheus) -> None:
    """Alerts fire for failing sources and hooks, another plugin, a full disk, an unreadable checkpoint, lost rights."""
    cluster = bridge.cluster
    assert bridge.script is not None
    faults, ill = bridge.script.with_name("faults"), bridge.script.with_name("ill")
    for words, alerts in CAUSES:
        faults.write_text(words)
        wait_fires(prometheus, cluster, *alerts)

    # A hook fails: pods with limits are refused, claims are tried again. The hook of another driver is slow.
    faults.write_text("gpu-edits card-slow")
    bridge.claim("mine", bridge.one(resource="example.com/gpu"))
    bridge.claim("slow", bridge.one(resource="example.com/card"))
    user, slow = bridge.pod("claim", {"gpu": "mine"}), bridge.pod("slow", {"card": "slow"})
    numbers, seen = itertools.count(), 0
    refused = ("DeviceAllocationsRefused", "example.com/gpu"), ("DeviceHooksFail", "example.com/gpu")

    def told() -> bool:
        nonlocal seen
        seen = user.retry(seen)
        cluster.start_pod(f"refused-{next(numbers)}", {"example.com/gpu": 1}).wait_phase("Failed")
        return fires(prometheus, *refused, "ClaimPreparesFail")

    cluster.wait_for(told, 120, "refusals and failures are told")
    cluster.wait_for(
        lambda: prometheus.told("ClaimPreparesSlow", "driver") == {"card.example.com"}, 60, "the slow hook is told"
    )
    faults.write_text("")
    slow.wait_running()
    user.wait_running()

    plugin = BarePlugin(DEVICE_PLUGINS, "theirs", resource="example.com/shared", endpoint="vendor.sock")
    try:
        plugin.register()
        wait_fires(prometheus, cluster, ("ForeignDevicePlugin", "example.com/shared"))
    finally:
        plugin.stop()

    fill(small_disk)
    bridge.claim("late", bridge.one(resource="example.com/gpu"))
    late = bridge.pod("late", {"gpu": "late"})
    wait_fires(prometheus, cluster, "LedgerWritesFail")
    with without_slices(bridge):
        ill.write_text("gpu-0 gpu-1 gpu-2 gpu-3 gpu-4 gpu-5")
        cluster.wait_for(
            lambda: prometheus.told("ResourceSlicesNotPublished", "driver") == {"gpu.example.com"}, 60, "it is told"
        )
    ill.write_text("")
    small_disk.unlink()
    late.wait_running()
    with a_slice_that_stays(bridge):
        cluster.wait_for(
            lambda: prometheus.told("PoolWrittenByOthers", "driver") == {"gpu.example.com"}, 60, "it is told"
        )

    with covered_checkpoint(bridge.directory):
        cluster.stop_apiserver()
        wait_fires(prometheus, cluster, "DeviceHoldersUnknown", "EvidenceUnknown", "APIServerUnreachable")
        start_api_server(cluster)
    with HangingFileSystem(bridge.directory / "cdi", Path("/run/cdi")) as specs:
        specs.hang()
        wait_fires(prometheus, cluster, "FilesDoNotAnswer")
    wait_ended(prometheus, cluster)

    # The watches end with the API server, and the next watches are refused.
    canary = cluster.pod("canary")
    canary.delete()
    canary.wait_gone()
    with without_slices(bridge):
        cluster.stop_apiserver()
        start_api_server(cluster)
        wait_fires(prometheus, cluster, "APIWatchFailing")
        with without_account(bridge):
            wait_fires(prometheus, cluster, "APICredentialsRefused")
    wait_ended(prometheus, cluster)


def test_a_token_that_is_not_renewed(bridge: Bridge, prometheus: Prometheus) -> None:
    """An alert fires for an agent with a token of 10 minutes, and ends after a start with a token of an hour."""
    for seconds, wait in ((600, wait_fires), (3600, wait_ended)):
        bridge.renew_token(seconds)
        bridge.stop()
        bridge.start()
        wait(prometheus, bridge.cluster, "APITokenNotRenewed")


# --- agents with device nodes ----------------------------------------------------------------------------------------

BOARDS = isolate.DEVICES / "boards"
ADOPTED = isolate.DEVICES / "adopted-boards"
"""The directory in which a vendor's plugin registers with the agent."""


def board(letter: str, share: str | int, **more: Any) -> dict[str, Any]:
    return {
        "name": f"example.net/{letter}",
        "driver": f"{letter}.example.net",
        "devices": [{"path": f"{BOARDS}/{letter}/*"}],
        "dra": {"share": share},
        **more,
    }


class Watched(Bridge):
    """A bridge whose agent serves its metrics and adopts plugins."""

    def command(self) -> list[str]:
        return [*super().command(), "--metrics-address", AGENT, "--adopt", str(ADOPTED)]

    def wait_registered(self, *, resources: bool = False) -> None:
        """Wait for the drivers only: an adopted resource is registered after its plugin has started."""
        super().wait_registered(resources=resources)


@contextlib.contextmanager
def watched(cluster: Cluster, counts: Mapping[str, int], *resources: Mapping[str, Any]) -> Iterator[Watched]:
    """Run the agent with device nodes. counts: the number of device nodes, by the resource's letter."""
    for directory in (BOARDS, ADOPTED):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    minors = itertools.count(1)
    for letter, count in counts.items():
        for number in range(count):
            locks.make_node(BOARDS / letter / f"{letter}{number}", next(minors))
    with Watched.running(cluster, *resources) as running:
        try:
            yield running
        finally:
            for driver in running.drivers:
                cluster.api.patch(
                    "Node", cluster.node_name, {"metadata": {"annotations": {f"{driver}/dra-share": None}}}
                )


def node_of(pod: Pod) -> Path:
    """Return the path of the device node in a pod's container."""
    (path,) = pod.exec(["find", str(BOARDS), "-type", "c"]).split()
    return Path(path)


def list_pod_resources() -> None:
    """Call `List` of the kubelet's PodResources service, as a monitoring agent does."""
    with grpc.insecure_channel(f"unix:{POD_RESOURCES_SOCKET}", (("grpc.default_authority", "localhost"),)) as channel:
        podresources_pb2_grpc.PodResourcesListerStub(channel).List(
            podresources_pb2.ListPodResourcesRequest(), timeout=5
        )


@contextlib.contextmanager
def their_plugin(letter: str, *ids: str, node: Path) -> Iterator[BarePlugin]:
    """Register another plugin for a resource; each container gets the same device node from the plugin."""
    plugin = BarePlugin(
        DEVICE_PLUGINS, *ids, resource=f"example.net/{letter}", endpoint=f"theirs-{letter}.sock", prefer=True
    )
    one = pb.ContainerAllocateResponse(
        devices=[pb.DeviceSpec(container_path=str(node), host_path=str(node), permissions="rw")]
    )
    plugin.response = lambda names: pb.AllocateResponse(container_responses=[one])
    plugin.on_prefer = lambda request: sorted(request.available_deviceIDs)[: request.allocation_size]
    try:
        plugin.register(options=plugin.options)
        yield plugin
    finally:
        plugin.stop()


def test_alerts_about_holders(cluster: Cluster, tmp_path: Path) -> None:
    """Alerts fire for a device that the kubelet gave to two pods while another plugin served the resource.

    The kubelet gives it twice if a client calls `List` during an Allocate, after a pod's end (kubernetes#137534). The
    agent would refuse the second pod.
    """
    with (
        watched(cluster, {"a": 2, "b": 1}, board("a", "none"), board("b", "all")) as agent,
        Prometheus(tmp_path) as prometheus,
    ):
        cluster.wait_allocatable("example.net/a", 2)
        agent.wait_offered(1, "b.example.net")
        cluster.wait_for(lambda: prometheus.value('up{job="device-plugin"}') == 1, 30, "the agent is scraped")
        ours = cluster.start_pod("ours", {"example.net/a": 1})
        gate = isolate.DEVICES / "gate"
        gate.mkdir(exist_ok=True)
        (gate / "open").unlink(missing_ok=True)
        waits = "trap 'until [ -e /gate/open ]; do sleep 0.1; done; exit 0' TERM; sleep 3600 & wait"
        ending = cluster.start_pod(
            "ending",
            {"example.net/a": 1},
            command=["/bin/sh", "-c", waits],
            container={"volumeMounts": [{"name": "gate", "mountPath": "/gate"}]},
            volumes=[{"name": "gate", "hostPath": {"path": str(gate)}}],
        )
        agent.claim("mine", agent.one(resource="example.net/b"))
        user = agent.pod("user", {"board": "mine"})
        for pod in (ours, ending, user):
            pod.wait_running()
        agent.kill()
        with (
            their_plugin("a", *(f"theirs-{n}" for n in range(4)), node=node_of(ours)) as theirs,
            their_plugin("b", device_id(str(node_of(user))), node=node_of(user)),
        ):
            cluster.wait_allocatable("example.net/a", 4)
            cluster.wait_allocatable("example.net/b", 1)
            taker = cluster.start_pod("taker", {"example.net/b": 1}).wait_running()
            hold = Hold(theirs, "Allocate", 60)
            ending.delete(60)
            first = cluster.start_pod("first", {"example.net/a": 1})
            assert hold.arrived.wait(30)
            (gate / "open").touch()

            def ended() -> bool:
                list_pod_resources()
                return ending.gone()

            cluster.wait_for(ended, 30, "the other pod has ended")
            list_pod_resources()
            hold.let_go.set()
            first.wait_running()
            twin = cluster.start_pod("twin", {"example.net/a": 1}).wait_running()
            assert theirs.allocations == [["theirs-0"]] * 2
        agent.start()
        agent.wait_registered()
        names = ("DeviceAllocatedTwice", "DeviceHeldTwice", "DeviceQuarantined")
        wait_fires(prometheus, cluster, *names)
        by_claim = device_id(str(node_of(user)))
        held_twice = {device_id(str(node_of(ours))), by_claim}
        cluster.wait_for(lambda: prometheus.told("DeviceHeldTwice", "device") == held_twice, 30, "both are told")
        cluster.wait_for(lambda: prometheus.told("DeviceQuarantined", "device") == {by_claim}, 30, "one of both")
        for pod in (ours, twin, taker):
            pod.delete()
        wait_fires(prometheus, cluster, ("DevicesWithheld", "example.net/a"))
        wait_ended(prometheus, cluster, *names)
        cluster.wait_for(lambda: prometheus.told("DevicesWithheld", "reason") == {"foreign"}, 30, "one reason is left")
        first.delete()
        wait_ended(prometheus, cluster)


def test_alerts_about_what_an_operator_did(cluster: Cluster, tmp_path: Path) -> None:
    """Alerts fire for moves after which a kubelet restart ends pods, for an invalid config file and a lost plugin."""
    if cluster.minor < 35:
        pytest.skip("1.34 leaves extended resources to DRA only where the node does not name them at all")
    adopted = {"name": "example.net/v", "devices": [{"plugin": {}}]}
    with (
        watched(cluster, {"d": 3, "e": 4}, board("d", "none"), board("e", "all"), adopted) as agent,
        their_vendor("v") as vendor,
        KubeState(cluster),
        Prometheus(tmp_path) as prometheus,
    ):
        # Resource d: DRA will serve the pod `waits`, which is older than `younger`, a pod of the device plugin.
        cluster.wait_allocatable("example.net/d", 3)
        first = cluster.start_pod("first", {"example.net/d": 2}).wait_running()
        waits = older(cluster.start_pod("waits", {"example.net/d": 2}))
        waits.wait_unschedulable()
        younger = cluster.start_pod("younger", {"example.net/d": 1}).wait_running()
        share(cluster, "all", "d.example.net")
        # Resource e: devices are forced to move from claims to the device plugin, and back.
        agent.wait_offered(4, "e.example.net")
        cluster.wait_allocatable("example.net/e", 0)
        older(cluster.start_pod("unchanged", {"example.net/e": 1})).wait_running()
        share(cluster, "2 force", "e.example.net")
        cluster.wait_allocatable("example.net/e", 2)
        forced = cluster.start_pod("forced", {"example.net/e": 1}).wait_running()
        share(cluster, "all force", "e.example.net")
        cluster.wait_for(lambda: "waits for pod default/younger" in agent.log(), 60, "the devices of d are withdrawn")
        cluster.wait_reported()
        cluster.wait_allocatable("example.net/d", 0)
        first.delete()
        waits.wait_running()
        vendor.stop()
        agent.config.write_text("resources: [}")
        wait_fires(prometheus, cluster, "AgentConfigRefused", ("AdoptedPluginGone", "example.net/v"))
        cluster.wait_for(
            lambda: prometheus.told("KubeletRestartEndsPods", "pod") == {"younger", "forced"}, 60, "both are told"
        )
        agent.write()
        for pod in (younger, forced):
            pod.delete()
        with their_vendor("v"):
            wait_ended(prometheus, cluster)


@contextlib.contextmanager
def their_vendor(letter: str) -> Iterator[BarePlugin]:
    """Register a vendor's plugin with the agent."""
    plugin = BarePlugin(ADOPTED, "theirs", resource=f"example.net/{letter}", endpoint="vendor.sock")
    try:
        plugin.register()
        yield plugin
    finally:
        plugin.stop()


# --- agents of two nodes ---------------------------------------------------------------------------------------------


FORGED = 'deviceplugin_devices{resource="example.com/a\x1b[2J"} 1\ndeviceplugin_devices{resource="example.com/b"} 1\n'
"""Metrics of the other node's agent; the name of one resource has a control sequence for terminals."""


@contextlib.contextmanager
def answering(address: str, port: int) -> Iterator[None]:
    """Answer scrapes with `FORGED`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(FORGED)))
            self.end_headers()
            self.wfile.write(FORGED.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address, port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


OTHER = "node2"
OTHER_ADDRESS = "127.0.0.2"
_AGENTS = "example.net/agents"


@contextlib.contextmanager
def other_node(cluster: Cluster) -> Iterator[None]:
    """Create a second Node without a kubelet, with the capacity for an agent's pod."""
    there = {"cpu": "4", "memory": "4Gi", "pods": "10"}
    info = cluster.node()["status"]["nodeInfo"]
    labels = {_AGENTS: "yes", "kubernetes.io/os": "linux"}
    cluster.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER, "labels": labels}})
    status = {"status": {"capacity": there, "allocatable": there, "nodeInfo": info}}
    cluster.api.patch("Node", OTHER, status, subresource="status")
    try:
        yield
    finally:
        cluster.api.delete("Node", OTHER)
        for pod in cluster.pods():
            if pod.object["spec"].get("nodeName") == OTHER:
                pod.delete(0)


class Discovery:
    """Gives Prometheus the addresses of the agents' pods, as its service discovery of Kubernetes does."""

    def __init__(self, deployed: Deployed, prometheus: Prometheus) -> None:
        self.deployed = deployed
        self.prometheus = prometheus

    def pod_of(self, node: str) -> Pod | None:
        """Return the agent's pod that is bound to a node, or None."""
        found = [pod for pod in self.deployed.pods() if pod.object["spec"].get("nodeName") == node]
        return found[0] if found else None

    def nodes(self) -> set[str]:
        """Tell Prometheus the addresses of all agent pods that have one; return the nodes of these pods."""
        found = [pod.object for pod in self.deployed.pods()]
        found = [pod for pod in found if pod["status"].get("podIP")]
        agents = [(f"{pod['status']['podIP']}:9410", pod["spec"]["nodeName"]) for pod in found]
        self.prometheus.discover(*agents)
        return {node for _, node in agents}

    def wait(self, *nodes: str) -> None:
        """Wait until agents' pods have addresses on exactly these nodes."""
        self.deployed.cluster.wait_for(lambda: self.nodes() == {*nodes}, daemonset.PATIENCE, f"agents are on {nodes}")


class Labelled(Deployed):
    """A deployed agent whose DaemonSet has a node selector."""

    def apply(self, *options: str) -> None:
        super().apply(f"--node-selector={_AGENTS}=yes", *options)


def label(cluster: Cluster, value: str | None) -> None:
    """Set the node's label that the DaemonSet selects, or remove the label if value is None."""
    cluster.api.patch("Node", cluster.node_name, {"metadata": {"labels": {_AGENTS: value}}})


@pytest.fixture
def labelled(node: Cluster) -> Iterator[Labelled]:
    label(node, "yes")
    with deployment(Labelled, node, [os.makedev(1, 5)]) as made:
        yield made
    label(node, None)


def test_an_agent_that_has_gone(labelled: Labelled, tmp_path: Path) -> None:
    """A removed agent raises an alert until it is back, unless its Node is gone or it was the last agent."""
    cluster = labelled.cluster
    with (
        answering(OTHER_ADDRESS, 9410),
        other_node(cluster),
        Prometheus(tmp_path) as prometheus,
        contextlib.ExitStack() as kube_state,
    ):
        kube_state.enter_context(KubeState(cluster))
        discovery = Discovery(labelled, prometheus)

        def gone() -> set[str]:
            return prometheus.told("DevicePluginAgentGone", "node")

        other = cluster.wait_for(lambda: discovery.pod_of(OTHER), 60, "the other node has an agent's pod")
        assert other is not None
        running = {"status": {"phase": "Running", "podIP": OTHER_ADDRESS, "podIPs": [{"ip": OTHER_ADDRESS}]}}
        cluster.api.patch("Pod", other.name, running, other.namespace, "status")
        discovery.wait(cluster.node_name, OTHER)
        cluster.wait_for(lambda: prometheus.value('sum(up{job="device-plugin"})') == 2, 30, "both are scraped")
        kept = prometheus.query(f'deviceplugin_devices{{node="{OTHER}"}}')
        assert kept.keys() == {frozenset({("resource", "example.com/b")})}, "control characters are dropped"
        label(cluster, None)
        discovery.wait(OTHER)
        cluster.wait_for(lambda: gone() == {cluster.node_name}, 30, "the agent that has gone is told")
        label(cluster, "yes")
        discovery.wait(cluster.node_name, OTHER)
        cluster.wait_for(lambda: not prometheus.firing(), 60, "it is back")

        # A node leaves the cluster together with its pod.
        cluster.api.delete("Node", OTHER)
        other.delete(0)
        discovery.wait(cluster.node_name)
        left = f'max_over_time(up{{node="{OTHER}"}}[6h]) unless on (node) kube_node_info unless on (node) up'
        cluster.wait_for(lambda: prometheus.query(left), 30, "Prometheus knows that it is gone")
        since = prometheus.evaluated()
        cluster.wait_for(lambda: prometheus.evaluated() > since + timedelta(seconds=3), 30, "the rules were evaluated")
        assert gone() == set()
        kube_state.close()  # without these metrics a deleted Node cannot be distinguished from a removed agent
        cluster.wait_for(lambda: gone() == {OTHER}, 60, "the other node's agent is told")
        labelled.uninstall()
        discovery.wait()
        wait_ended(prometheus, cluster)
