"""The agent as users run it: in a DaemonSet's pod on a real node, from printed manifests and from examples/.

Other tests of this package run the agent as a process of the host. In a pod, the agent has the image's files, those
directories of the host that its manifest mounts, a PID namespace, and the rights and limits of its container. It uses
the pod's token for the API server. The kubelet and the DaemonSet controller decide when it starts and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deviceplugin.files import place_of
from deviceplugin.naming import class_name
from deviceplugin.sources.path import device_id
from tests.cluster import image, isolate
from tests.cluster.api import ApiError
from tests.cluster.bridge import Bridge
from tests.cluster.node import COPIES, DEVICE_PLUGINS, Cluster, ClusterError, Pod, remove_ledger

DRIVER = "board.example.net"
RENAMED = "card.example.net"
RESOURCE = "example.net/board"
NAMESPACE = "dra-bridge"
SHARE = f"{DRIVER}/dra-share"
BOARDS = Path(isolate.DEVICES) / "boards"
COUNT = 4
IMAGES = image.AGENTS
EXAMPLES = Path(__file__).parents[2] / "examples"
WRITABLE = [
    *(Path("/var/lib/kubelet") / name for name in ("device-plugins", "plugins_registry")),
    Path("/var/lib/kubelet/plugins/dra-bridge"),
    Path("/var/run/cdi"),
]
"""The host's directories that an agent in a pod may write to."""
PATIENCE = 120.0
"""Seconds that a container may take to come up on a busy machine."""


def ready(pod: Pod) -> bool:
    conditions = pod.status.get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def get(pod: Pod, path: str) -> str:
    """Return a pod's HTTP response from its metrics port."""
    with urllib.request.urlopen(f"http://{pod.status['podIP']}:9410{path}", timeout=10) as answer:
        return str(answer.read().decode())


def process_of(pod: Pod) -> int:
    """Return the PID, on the node, of the main process of a pod's container."""
    command = ["runc", "--root", "/run/containerd/runc/k8s.io", "state", pod.container_id()]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return int(json.loads(done.stdout)["pid"])


D = TypeVar("D", bound="Deployed")


class Deployed(Bridge):
    """A Bridge whose agent runs in a DaemonSet: kubectl applies the manifests that `dra-bridge manifests` prints."""

    image = IMAGES[0]
    reloads = 0

    def _install(self) -> None:
        self.classes = {RESOURCE: DRIVER}
        self.apply()

    def apply(self, *options: str) -> None:
        """Print the manifests for the current config file, and apply them."""
        command = [sys.executable, "-m", "dra_bridge", "manifests", "--config", str(self.config)]
        # The host's cgroups also have the pods of other test runs.
        command += ["--resource-api", self.version, "--image", self.image, "--cgroup-root", str(isolate.POD_CGROUPS)]
        command += options
        printed = self.directory / "manifests.yaml"
        done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        printed.write_text(self.edited(done.stdout))
        self.cluster.kubectl("apply", "-f", str(printed))

    def edited(self, printed: str) -> str:
        """Return the manifests to apply, given the printed manifests; a subclass may change them."""
        return printed

    def pods(self) -> list[Pod]:
        """Return the agent's pods, terminating ones included."""
        return self.cluster.pods(NAMESPACE, "app.kubernetes.io/name=dra-bridge")

    def agent(self, other_than: str = "") -> Pod:
        """Wait until the agent has just one pod, which is ready; return it. other_than: the UID of a former pod."""

        def one() -> Pod | None:
            (pod,) = found if len(found := self.pods()) == 1 else (None,)
            return pod if pod is not None and pod.uid != other_than and ready(pod) else None

        pod = self.cluster.wait_for(one, PATIENCE, "the agent's pod is ready", log="kubelet")
        assert pod is not None
        pod.container_id()
        return pod

    def log(self) -> str:
        """Return the log of the agent's container since its start."""
        return self.agent().logs()

    def change(self, pod: Pod) -> None:
        """Annotate a pod: the kubelet updates a pod's volumes when the pod changes, else only from time to time."""
        changed = {"metadata": {"annotations": {"changed-at": str(int(time.monotonic()))}}}
        self.cluster.api.patch("Pod", pod.name, changed, NAMESPACE)

    def read_again(self, agent: Pod) -> None:
        """Wait until the agent logs that it has read its changed config file, once more than at the last call."""
        said = f"was read again: changed {RESOURCE}"

        def taken() -> bool:
            self.change(agent)
            return agent.logs().count(said) > self.reloads

        self.cluster.wait_for(taken, PATIENCE, "the agent has read the file again", log="kubelet")
        self.reloads += 1

    def rename(self, driver: str) -> None:
        """Write the config file with another driver name."""
        self.resources[0]["driver"] = driver
        self.classes = {RESOURCE: class_name(RESOURCE, driver)}
        self.write()

    def uninstall(self) -> None:
        """Delete the DaemonSet; wait until its pods are gone and the node has no allocatable device of its resource."""
        for pod in self.pods():
            with contextlib.suppress(ClusterError):  # the agent's container, or its pod, has just been replaced
                print(f"--- {pod}\n{pod.logs()}")
        self.cluster.api.delete("DaemonSet", "dra-bridge", NAMESPACE)
        self.cluster.wait_for(lambda: not self.pods(), PATIENCE, "the agent's pod is gone")
        self.cluster.wait_for(lambda: not self.cluster.allocatable(RESOURCE), 60, "nothing is allocatable")

    def holders(self) -> dict[str, str]:
        """Return the holder of each device that has one, by device."""
        return {name: holder for name, (_, _, holder) in self.sides().items() if holder}

    def both_doors(self) -> tuple[Pod, Pod, dict[str, str]]:
        """Start a pod with a device by limits and a pod with the claim "mine"; return the pods and the holders."""
        self.cluster.wait_allocatable(RESOURCE, 2)
        self.wait_offered(2)
        plain = self.cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
        self.claim("mine")
        user = self.pod("user", {"board": "mine"}).wait_running()
        held = {held_by(plain): "pod default/plain", held_by(user): "claim default/mine"}
        assert len(held) == 2
        self.cluster.wait_for(lambda: self.holders() == held, 60, f"the holders are {held}")
        return plain, user, held

    def run_cli(self, *argv: str) -> str:
        """Run a `dra-bridge` command as an administrator, which must succeed; return its output."""
        status, out = self.cli(*argv)
        assert status == 0, (argv, out)
        return out

    def cli(self, *argv: str) -> tuple[int, str]:
        """Run a `dra-bridge` command as an administrator; return its exit status and its output."""
        command = [sys.executable, "-m", "dra_bridge", argv[0], "--kubeconfig", str(self.cluster.kubeconfig), *argv[1:]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150)
        return done.returncode, done.stdout + done.stderr

    def migrate(self, share: str) -> None:
        """Request with `dra-bridge migrate` how many devices are for claims, and wait until the devices have moved."""
        self.run_cli(
            "migrate", self.cluster.node_name, "--driver", DRIVER, "--share", share, "--wait", "--timeout", "90"
        )

    def sides(self) -> dict[str, tuple[str, str, str]]:
        """Return each device's side (device plugin or DRA), state and holder, as `status` prints them."""
        (found,) = json.loads(self.run_cli("status", "--driver", DRIVER, "-o", "json"))["nodes"]
        devices = [device for resource in found["resources"] for device in resource["devices"]]
        return {one["name"]: (one["side"], one["state"], one["holder"]) for one in devices}


@contextlib.contextmanager
def deployment(kind: type[D], node: Cluster, numbers: Sequence[int], **fields: Any) -> Iterator[D]:
    """The agent's DaemonSet with a device node for each device number in numbers; half of the devices are for claims.

    fields: further fields of the resource in the config file.
    """
    shutil.rmtree(BOARDS, ignore_errors=True)
    BOARDS.mkdir(parents=True)
    for index, number in enumerate(numbers):
        os.mknod(BOARDS / f"board{index}", stat.S_IFCHR | 0o600, number)
    directory = Path(tempfile.mkdtemp(dir=isolate.DEVICES))
    resource = {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"path": f"{BOARDS}/*"}],
        "dra": {"share": "50%"},
        **fields,
    }
    made = kind(node, directory, [resource])
    try:
        made.agent()
        yield made
    finally:
        try:
            for pod in node.pods("default"):
                pod.delete()
            for pod in node.pods("default"):
                pod.wait_gone()
        finally:
            made.uninstall()
            node.api.patch("Node", node.node_name, {"metadata": {"annotations": {SHARE: None}}}, "")
            remove_ledger()
            shutil.rmtree(directory)


@pytest.fixture
def deployed(node: Cluster) -> Iterator[Deployed]:
    """The agent's DaemonSet with four devices, of which two are for claims."""
    with deployment(Deployed, node, [os.makedev(1, 5)] * COUNT) as made:
        yield made


def held_by(pod: Pod) -> str:
    """Return the id of the device in a pod's container, after the container has opened the device."""
    (name,) = pod.exec(["ls", str(BOARDS)]).split()
    pod.exec(["head", "-c", "1", f"{BOARDS}/{name}"])
    return device_id(str(BOARDS / name))


def prober(cluster: Cluster, pod: Pod) -> dict[tuple[str, str], int]:
    """Return the kubelet's counts of a pod's probes by type and result, such as (Liveness, successful)."""
    found = re.findall(
        rf'^prober_probe_total{{.*pod="{pod.name}".*probe_type="(\w+)",result="(\w+)"}} (\d+)$',
        cluster.metrics("/metrics/probes"),
        re.MULTILINE,
    )
    return {(kind, result): int(count) for kind, result, count in found}


def measured(pod: Pod, name: str, /, **labels: str) -> list[float]:
    """Return the values of a pod's metric, of the samples that have at least these labels."""
    families = text_string_to_metric_families(get(pod, "/metrics"))
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return [sample.value for sample in samples if labels.items() <= sample.labels.items()]


def test_both_doors_of_a_pod(deployed: Deployed) -> None:
    """Pods get a device by limits and by a claim from an agent in a pod with the rights of its manifest."""
    agent = deployed.agent()
    _, user, _ = deployed.both_doors()
    assert held_by(user) in deployed.allocated("mine")
    assert "devices" not in deployed.get_claim("mine")["status"], "written only with --claim-status"
    assert agent.restarts() == 0
    for line in agent.logs().splitlines():
        assert not re.search(r" (WARNING|ERROR) |forbidden|denied", line), line


CONFINED = """
import json, os, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
said = {name: status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")}
for path in sys.argv[1:]:
    try:
        flags = os.O_RDWR if os.path.exists(path) else os.O_WRONLY | os.O_CREAT
        os.close(os.open(path, flags))
        said[path] = "opened"
    except OSError as error:
        said[path] = error.strerror
print(json.dumps(said))
"""
"""Prints a process's rights, and for each path the result of opening it for writing; a missing file is created."""


def tried(agent: Pod, *paths: str | Path) -> dict[str, str]:
    """Return the rights of a process in the agent's container and, by path, the result of opening it for writing."""
    found: dict[str, str] = json.loads(agent.exec(["python", "-c", CONFINED, *map(str, paths)]))
    return found


def test_unprivileged_agent_has_what_it_needs_and_no_more(deployed: Deployed) -> None:
    """The agent's container has no capability, and can write only to its own directories and the kubelet's sockets.

    `test_both_doors_of_a_pod` shows that these rights are enough to serve pods with limits and pods with claims.
    """
    agent = deployed.agent()
    kubelet = Path("/var/lib/kubelet")
    forbidden: list[str | Path] = [
        *("/x", "/tmp/x", "/etc/x", "/dev/x", "/host/sys/fs/cgroup/x"),
        *(kubelet / "x", kubelet / "plugins/x", kubelet / "pods/x", kubelet / "pod-resources/x", BOARDS / "x"),
    ]
    allowed = [directory / "x" for directory in WRITABLE]
    guarded = Path("/dev/loop-control")
    os.close(os.open(guarded, os.O_RDWR))  # root outside of the pod may open this device
    try:
        found = tried(agent, *forbidden, *allowed, guarded)
    finally:
        for path in allowed:
            path.unlink(missing_ok=True)
    none = f"{0:016x}"
    rights = {"CapEff": none, "CapPrm": none, "CapBnd": none, "NoNewPrivs": "1", "Seccomp": "2"}
    assert found == {
        **rights,
        **dict.fromkeys(map(str, forbidden), "Read-only file system"),
        **dict.fromkeys(map(str, allowed), "opened"),
        str(guarded): "Operation not permitted",
    }
    assert (
        "annotations"
        not in deployed.cluster.api.get("DaemonSet", "dra-bridge", NAMESPACE)["spec"]["template"]["metadata"]
    )


def test_a_stolen_token(deployed: Deployed) -> None:
    """A stolen token of an agent's pod gives no rights to other nodes or pods, and is valid only while the pod runs.

    `tests.cluster.test_slices_real` has more tests of these rights.
    """
    cluster, agent = deployed.cluster, deployed.agent()
    plain, _, held = deployed.both_doors()
    token = Path(f"/proc/{process_of(agent)}/root/run/secrets/kubernetes.io/serviceaccount/token").read_text()
    thief = cluster.api_with_token(token)
    (slice_,) = deployed.slices(DRIVER)
    core, group = "/api/v1", f"/apis/{deployed.api_version}"
    metadata = {"name": "stolen"}
    spec = slice_["spec"]
    elsewhere = {**spec, "nodeName": "node2", "pool": {**spec["pool"], "name": "node2"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    me = {"kind": "ServiceAccount", "name": "dra-bridge", "namespace": NAMESPACE}
    claim = f"{group}/namespaces/default/resourceclaims/mine"
    count = {"status": {"allocatable": {RESOURCE: "0"}}}
    misuses: dict[str, tuple[str, str, object]] = {
        "devices of another node": (
            "POST",
            f"{group}/resourceslices",
            {**slice_, "metadata": metadata, "spec": elsewhere},
        ),
        "devices of another driver": (
            "POST",
            f"{group}/resourceslices",
            {**slice_, "metadata": metadata, "spec": {**spec, "driver": "other.example.net"}},
        ),
        "another node's report": (
            "POST",
            f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases",
            {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "node2"}, "spec": {}},
        ),
        "a report of another driver": (
            "PATCH",
            f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{cluster.node_name}",
            {"metadata": {"annotations": {"other.example.net/handover": "{}"}}},
        ),
        "what another node has": ("PATCH", f"{core}/nodes/node2/status", count),
        "the share of its node": (
            "PATCH",
            f"{core}/nodes/{cluster.node_name}",
            {"metadata": {"annotations": {SHARE: "all"}}},
        ),
        "a claim's holder": ("PATCH", f"{claim}/status", {"status": {"allocation": None, "reservedFor": None}}),
        "a claim": ("DELETE", claim, None),
        "a pod": ("DELETE", f"{core}/namespaces/default/pods/plain", None),
        "the agents": ("DELETE", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/dra-bridge", None),
        "their configuration": ("PATCH", f"{core}/namespaces/{NAMESPACE}/configmaps/dra-bridge", {"data": {}}),
        "secrets": ("GET", f"{core}/secrets", None),
        "another token": (
            "POST",
            f"{core}/namespaces/{NAMESPACE}/serviceaccounts/dra-bridge/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
        ),
        "more rights": (
            "POST",
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": metadata,
                "roleRef": role,
                "subjects": [me],
            },
        ),
    }

    def refused(method: str, path: str, body: object) -> str:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            thief.request(method, path, body, kind, dryRun="All")
        except ApiError as error:
            return str(error) if error.code in (403, 422) else ""
        return ""

    cluster.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node2"}})
    try:
        for what, misuse in misuses.items():
            # The policies take some time to be in force.
            said = cluster.wait_for(lambda misuse=misuse: refused(*misuse), 30, f"{what}: refused")  # type: ignore[misc]
            print(f"{what}: {said}")
    finally:
        cluster.api.delete("Node", "node2")
    assert deployed.holders() == held
    assert thief.raw("GET", f"{group}/resourceslices")[0] == 200
    agent.delete()
    deployed.agent(other_than=agent.uid)
    cluster.wait_for(lambda: thief.raw("GET", f"{group}/resourceslices")[0] == 401, 30, "the token is refused")
    assert plain.phase == "Running"


def test_hooks_write_to_sysfs_only_where_asked_for(deployed: Deployed) -> None:
    """In a pod /sys is read-only; `--writable-sys` makes only the devices' directories writable, also through links."""
    device, link, other = (
        "/sys/devices/virtual/mem/null/uevent",
        "/sys/class/mem/null/uevent",
        "/sys/kernel/uevent_helper",
    )
    agent = deployed.agent()
    refused = "Read-only file system"
    found = tried(agent, device, link, other)
    assert [found[one] for one in (device, link, other)] == [refused] * 3
    deployed.apply("--writable-sys")
    agent = deployed.agent(other_than=agent.uid)
    found = tried(agent, device, link, other)
    deployed.apply()
    deployed.agent(other_than=agent.uid)
    assert [found[one] for one in (device, link, other)] == ["opened", "opened", refused]
    assert (found["CapEff"], found["NoNewPrivs"]) == (f"{0:016x}", "1")


def test_privileged_agent_opens_devices_for_both_sides(node: Cluster) -> None:
    """With `probe: open` the manifest makes the agent privileged and says why; else the devices' health is unknown."""
    numbers = [os.stat(path).st_rdev for path in ("/dev/fuse", "/dev/loop-control")]
    with deployment(Deployed, node, numbers, health={"probe": "open", "period": 1}) as deployed:
        agent = deployed.agent()
        reason = f"{RESOURCE}: `health.probe: open` opens device nodes"
        assert agent.object["metadata"]["annotations"]["dra-bridge/privileged-because"] == reason
        found = tried(agent, "/x", "/var/lib/kubelet/plugins/x", "/dev/loop-control")
        assert set(map(found.get, ("/x", "/var/lib/kubelet/plugins/x"))) == {"Read-only file system"}
        assert found["/dev/loop-control"] == "opened"

        def with_health(health: str) -> float:
            return sum(measured(deployed.agent(), "deviceplugin_devices", resource=RESOURCE, health=health))

        node.wait_for(lambda: with_health("healthy") == 2, 30, "both devices open")
        node.wait_allocatable(RESOURCE, 1)
        deployed.wait_offered(1)
        plain = node.start_pod("plain", {RESOURCE: 1}).wait_running()
        deployed.claim("mine")
        user = deployed.pod("user", {"board": "mine"}).wait_running()
        names = [pod.exec(["ls", str(BOARDS)]).strip() for pod in (plain, user)]
        assert sorted(names) == ["board0", "board1"]
        for pod, name in zip((plain, user), names, strict=True):
            pod.exec(["sh", "-c", f"exec 3<{BOARDS}/{name}"])

        deployed.apply("--privileged", "never")
        confined = deployed.agent(other_than=agent.uid)
        assert tried(confined, "/dev/loop-control")["/dev/loop-control"] == "Operation not permitted"
        node.wait_for(lambda: with_health("unknown") == 2, 30, "nothing is known of the devices")
        holders = {device_id(f"{BOARDS}/{names[0]}"): "pod default/plain"}
        holders[device_id(f"{BOARDS}/{names[1]}")] = "claim default/mine"
        node.wait_for(
            lambda: {name: holder for name, (_, _, holder) in deployed.sides().items()} == holders,
            60,
            "the holders are the same",
        )


def test_probes_and_metrics_of_a_pod(deployed: Deployed) -> None:
    """The manifest's probes succeed, the metrics are right, and the agent stays far below its memory limit."""
    cluster, agent = deployed.cluster, deployed.agent()
    deployed.wait_offered(2)
    wanted = {("Startup", "successful"), ("Readiness", "successful"), ("Liveness", "successful")}
    cluster.wait_for(lambda: wanted <= prober(cluster, agent).keys(), 60, "each kind of probe was made")
    assert not any(result == "failed" and kind == "Liveness" for kind, result in prober(cluster, agent))
    (port,) = agent.object["spec"]["containers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == ("metrics", 9410)
    for side in ("plugin", "dra"):
        labels = {"resource": RESOURCE, "side": side, "state": side, "health": "healthy"}
        assert measured(agent, "deviceplugin_devices", **labels) == [2]
    # The metrics name the pod of an init container, although no service of the kubelet lists init containers' devices.
    waits: dict[str, Any] = {
        "name": "prepare",
        "image": image.IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sleep", "300"],
        "resources": {"limits": {RESOURCE: "1"}},
    }
    cluster.start_pod("staged", initContainers=[waits])
    holder = {"side": "plugin", "namespace": "default", "pod": "staged", "container": "prepare"}
    cluster.wait_for(
        lambda: measured(agent, "deviceplugin_allocation_info", **holder),
        60,
        "the init container is a holder by its name",
    )
    (used,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process_of(agent)}/status").read_text())
    (container,) = agent.object["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "128Mi"}
    print(f"both sides in their pod: {int(used) * 1024 / 1e6:.1f} MB resident")
    assert int(used) < 72 * 1024, "more than it asks the scheduler for"
    assert get(agent, "/readyz").strip() == "ok"


def test_an_operator_is_told_no_lies(deployed: Deployed) -> None:
    """An operator's `status` asks only the agents' pods, and not another pod that has the agents' label."""
    cluster = deployed.cluster
    _, _, held = deployed.both_doors()
    labels = {"app.kubernetes.io/managed-by": "dra-bridge"}
    forged = cluster.start_pod("forged", {})
    forged.wait_running()
    cluster.api.patch("Pod", "forged", {"metadata": {"labels": labels}}, "default")
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "User", "name": "watcher", "apiGroup": group}
    bindings: list[dict[str, Any]] = [
        {
            "apiVersion": f"{group}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": "watcher", **metadata},
            "roleRef": {"apiGroup": group, "kind": kind, "name": "dra-bridge-operator"},
            "subjects": [subject],
        }
        for kind, metadata in (("ClusterRole", {}), ("Role", {"namespace": NAMESPACE}))
    ]
    cluster.api.apply(bindings)
    kubeconfig = str(cluster.kubeconfig_for("watcher"))

    def told(*more: str) -> tuple[dict[str, str], list[str]]:
        found = json.loads(deployed.run_cli("status", "-o", "json", *more, "--kubeconfig", kubeconfig))
        devices = [device for resource in found["nodes"][0]["resources"] for device in resource["devices"]]
        return {one["name"]: one["holder"] for one in devices if one["holder"]}, found["unknown"]

    cluster.wait_for(lambda: told() == (held, []), 30, f"the holders are {held}")
    assert told("-n", "default") == ({}, []), "no agent has a Lease there, so no pod is asked"


def test_status_begins_with_what_is_wrong_with_the_agent(deployed: Deployed) -> None:
    """While the kubelet is stopped, `status` begins with the problem that the agent is not ready, and exits with 1."""
    cluster, problem = deployed.cluster, f"it is not ready: {RESOURCE}: not registered with the kubelet"
    deployed.wait_offered(2)
    assert deployed.cli("status")[0] == 0
    cluster.stop_kubelet()

    def told() -> bool:
        status, out = deployed.cli("status")
        return status == 1 and out.startswith(f"the agent of {cluster.node_name}: {problem}")

    try:
        cluster.wait_for(told, 60, "the problem is told")
    finally:
        cluster.start_kubelet()
    cluster.wait_for(lambda: deployed.cli("status")[0] == 0, 60, "all is well")


def test_what_a_move_waits_for_outlasts_the_agent(deployed: Deployed) -> None:
    """`status` and `migrate` name the pod for which a device's move waits, also after the agent's pod is replaced."""
    cluster, agent = deployed.cluster, deployed.agent()
    cluster.wait_allocatable(RESOURCE, 2)
    cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
    ask = ("migrate", cluster.node_name, "--driver", DRIVER, "--share", "all")
    deployed.run_cli(*ask)
    deployed.wait_offered(COUNT - 1)
    waits = "(to-dra) waits for pod default/plain"
    cluster.wait_for(lambda: waits in deployed.cli("status")[1], 30, "status names the pod")
    delete(deployed, agent)
    cluster.wait_for(lambda: waits in deployed.cli("status")[1], 30, "status names the pod again")
    cluster.wait_for(lambda: waits in deployed.cli(*ask, "--wait", "--timeout", "1")[1], 30, "so does migrate")


def test_the_page_names_pods_after_restarts(deployed: Deployed) -> None:
    """After restarts of agent and kubelet, the agent's web page names the pod with limits and the pod with a claim."""
    plain, user, _ = deployed.both_doors()
    delete(deployed, deployed.agent())
    deployed.cluster.restart_kubelet()
    text = ""

    def named() -> bool:
        nonlocal text
        text = get(deployed.agent(), "/").replace("<wbr>", "")  # <wbr> is where a long name may break
        return "default/plain" in text and "default/user" in text

    deployed.cluster.wait_for(named, 60, "both pods are named")
    assert plain.uid not in text
    assert user.uid not in text


def test_changed_config_map_is_taken(deployed: Deployed) -> None:
    """A running agent reads its changed config file after the printed manifests were applied again."""
    cluster, agent = deployed.cluster, deployed.agent()
    deployed.wait_offered(2)
    deployed.share(1)
    deployed.apply()
    deployed.read_again(agent)
    deployed.wait_offered(1)
    cluster.wait_allocatable(RESOURCE, COUNT - 1)
    assert deployed.agent().uid == agent.uid
    assert agent.restarts() == 0


@pytest.mark.parametrize("how", ["reload", "rollout"])
def test_driver_is_renamed(node: Cluster, how: str) -> None:
    """After a driver is renamed, a former claim keeps its device until its pod ends; then a new claim gets the device.

    The manifests are applied again: with another image, which replaces the agent's pod (rollout), or with the former
    image, so that the running agent reads the changed config file (reload).
    """
    if node.minor < 35:
        pytest.skip("1.34 leaves extended resources to DRA only where the node does not name them at all")
    with deployment(Deployed, node, [os.makedev(1, 5)] * 2, dra={"share": "all"}) as deployed:
        agent = deployed.agent()
        deployed.wait_offered(2)
        deployed.claim("former")
        user = deployed.pod("user", {"board": "former"}).wait_running()
        held = held_by(user)
        images = itertools.cycle(reversed(IMAGES))
        for driver, former in ((RENAMED, DRIVER), (DRIVER, RENAMED)):
            deployed.rename(driver)
            if how == "rollout":
                deployed.image = next(images)
            deployed.apply()
            if how == "rollout":
                agent = deployed.agent(other_than=agent.uid)
            else:
                deployed.read_again(agent)
            deployed.cluster.wait_for(lambda: not deployed.slices(former), 60, f"{former} has no slices")  # noqa: B023
            deployed.wait_offered(1, driver)
            deployed.template(f"of-{driver}")
            claims = {"board": {"resourceClaimTemplateName": f"of-{driver}"}}
            other = deployed.pod(f"other-{driver}", claims).wait_running()
            hungry = [deployed.pod(f"hungry-{driver}", claims), node.start_pod(f"plain-{driver}", {RESOURCE: 1})]
            for pod in hungry:
                pod.wait_unschedulable()
            assert held_by(user) == held != held_by(other)
            assert user.restarts() == 0
            hungry.pop().delete()
            # The agent still serves the former driver's Unprepare: the kubelet removes a pod only after Unprepare.
            user.delete()
            user.wait_gone(20)
            (pod,) = hungry
            pod.wait_running()
            assert held_by(pod) == held
            other.delete()
            other.wait_gone(20)
            user = pod


def delete(deployed: Deployed, agent: Pod) -> None:
    """Delete the agent's pod, and wait for the next one of the DaemonSet."""
    deployed.cluster.kubectl("delete", "pod", agent.name, f"--namespace={NAMESPACE}", "--wait=false")
    deployed.agent(other_than=agent.uid)


def update(deployed: Deployed, agent: Pod) -> None:
    """Roll another image out as a user does."""
    deployed.image = IMAGES[1]
    deployed.apply()
    deployed.cluster.kubectl(
        "rollout", "status", "daemonset/dra-bridge", f"--namespace={NAMESPACE}", f"--timeout={PATIENCE:g}s"
    )
    (container,) = deployed.agent(other_than=agent.uid).object["spec"]["containers"]
    assert container["image"] == IMAGES[1]


def privilege(deployed: Deployed, agent: Pod) -> None:
    """Make the agent privileged, and mount the whole of /var/lib/kubelet/plugins, as older manifests did."""
    deployed.apply("--privileged", "always")
    mount = {"name": "plugins", "mountPath": "/var/lib/kubelet/plugins"}
    volume = {"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/plugins"}}
    spec = {"containers": [{"name": "agent", "volumeMounts": [mount]}], "volumes": [volume]}
    patch = json.dumps({"spec": {"template": {"spec": spec}}})
    deployed.cluster.kubectl("patch", "daemonset", "dra-bridge", f"--namespace={NAMESPACE}", "--patch", patch)
    deployed.cluster.kubectl(
        "rollout", "status", "daemonset/dra-bridge", f"--namespace={NAMESPACE}", f"--timeout={PATIENCE:g}s"
    )
    deployed.agent(other_than=agent.uid)


def kill(deployed: Deployed, agent: Pod) -> None:
    """Kill the agent's process; the kubelet starts its container again."""
    os.kill(process_of(agent), signal.SIGKILL)
    deployed.cluster.wait_for(lambda: agent.restarts() == 1 and ready(agent), PATIENCE, "the container is there again")


@pytest.mark.parametrize("again", [delete, update, privilege, kill])
def test_nothing_is_lost_with_a_pod(deployed: Deployed, again: Callable[[Deployed, Pod], None]) -> None:
    """After the agent's pod or its container is replaced, pods keep their devices, and no device gets two holders."""
    cluster, agent = deployed.cluster, deployed.agent()
    cluster.wait_allocatable(RESOURCE, 2)
    deployed.wait_offered(2)
    deployed.template("board")
    claims = {"board": {"resourceClaimTemplateName": "board"}}
    plain = [cluster.start_pod(f"plain-{number}", {RESOURCE: 1}) for number in range(2)]
    for pod in plain:
        pod.wait_running()
    users = [deployed.pod(f"user-{number}", claims) for number in range(2)]
    for pod in users:
        pod.wait_running()
    held = {held_by(pod): pod for pod in (*plain, *users)}
    assert len(held) == COUNT
    containers = {pod.name: pod.container_id() for pod in held.values()}
    cluster.wait_for(lambda: all(holder for _, _, holder in deployed.sides().values()), 60, "all holders are known")
    before = deployed.sides()

    again(deployed, agent)
    hungry = [cluster.start_pod("hungry-plain", {RESOURCE: 1}), deployed.pod("hungry-user", claims)]
    cluster.wait_for(lambda: deployed.sides() == before, 60, f"sides and holders are {before}")
    for pod in hungry:
        pod.wait_unschedulable()
    for device, pod in held.items():
        assert (held_by(pod), pod.container_id(), pod.restarts()) == (device, containers[pod.name], 0)

    for leaving, waiting in zip((plain[0], users[0]), hungry, strict=True):
        freed = held_by(leaving)
        leaving.delete()
        waiting.wait_running()
        assert held_by(waiting) == freed
    assert len({held_by(pod) for pod in (plain[1], users[1], *hungry)}) == COUNT


def test_example_of_a_plugin_alone(node: Cluster) -> None:
    """The agent of examples/daemonset.yaml serves, without capabilities, a device that is plugged in later."""
    objects = list(yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text()))
    (agent,) = (one for one in objects if one["kind"] == "DaemonSet")
    agent["spec"]["template"]["spec"]["containers"][0]["image"] = IMAGES[0]
    before = set(os.listdir("/dev"))
    port = Path("/dev/ttyUSB0")
    if not Path("/dev/kvm").exists():
        # Its number differs from the port's: two paths with one device number would be one device with one holder.
        os.mknod("/dev/kvm", stat.S_IFCHR | 0o600, os.makedev(1, 3))

    def pod(other_than: str = "") -> Pod | None:
        found = node.pods("kube-system", "app.kubernetes.io/name=deviceplugin")
        return found[0] if len(found) == 1 and found[0].uid != other_than and ready(found[0]) else None

    try:
        node.api.apply(objects)
        first = node.wait_for(pod, PATIENCE, "the plugin's pod is ready", log="kubelet")
        assert first is not None
        node.wait_allocatable("example.com/kvm", 100, 60)
        os.mknod(port, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        node.wait_allocatable("example.com/serial", 1, 60)
        reader = node.start_pod("reader", {"example.com/serial": 1, "example.com/kvm": 1}).wait_running()
        assert len(reader.exec(["head", "-c", "1", str(port)])) == 1
        (copy,) = node.wait_for(
            lambda: [copy for copy in COPIES.glob("example.com_serial@*") if reader.uid in copy.read_text()],
            10,
            "the copy of the plugin's allocations names the pod",
        )
        assert json.loads(copy.read_text())["plugins"] == place_of(DEVICE_PLUGINS), "an agent on the host ignores it"
        first.delete(grace=30)
        second = node.wait_for(lambda: pod(first.uid), PATIENCE, "another pod is ready", log="kubelet")
        assert second is not None
        assert reader.restarts() == 0
        assert len(reader.exec(["head", "-c", "1", str(port)])) == 1
        holder = {"resource": "example.com/serial", "device": port.name}
        node.wait_for(
            lambda: measured(second, "deviceplugin_allocation_info", **holder), 60, "the holder is in the metrics"
        )
        print(second.logs())
        node.wait_allocatable("example.com/serial", 1)
        assert set(os.listdir("/dev")) - before <= {port.name, "kvm"}, "the plugin leaves something on the host"
    finally:
        for one in node.pods("kube-system", "app.kubernetes.io/name=deviceplugin"):
            print(f"--- {one.explain()}\n{one.logs()}")
        node.clean()
        port.unlink(missing_ok=True)


def test_orphans_of_probes_are_buried(node: Cluster) -> None:
    """Processes that a health probe leaves behind do not stay as zombies in the plugin's pod."""
    map_, agent = yaml.safe_load_all((EXAMPLES / "daemonset.yaml").read_text())
    orphan = "open('/tmp/orphans', 'a').write('x')"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    probe = {"command": ["python", "-c", leave]}
    resource = {"name": RESOURCE, "devices": [{"path": "/dev/full"}], "health": {"probe": probe, "period": 1}}
    map_["data"]["config.yaml"] = yaml.safe_dump({"resources": [resource]})
    spec = agent["spec"]["template"]["spec"]
    spec["containers"][0]["image"] = IMAGES[0]
    spec["containers"][0]["args"].append("--allow-commands")
    spec["containers"][0]["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
    spec["volumes"].append({"name": "tmp", "emptyDir": {}})
    node.api.apply([map_, agent])
    node.wait_allocatable(RESOURCE, 1, PATIENCE)
    (pod,) = node.pods("kube-system", "app.kubernetes.io/name=deviceplugin")
    look = """
import glob, os
print(os.stat('/tmp/orphans').st_size, sum(') Z ' in open(one).read() for one in glob.glob('/proc/[0-9]*/stat')))
"""

    def seen() -> tuple[int, int]:
        orphans, zombies = pod.exec(["python", "-c", look]).split()
        return int(orphans), int(zombies)

    node.wait_for(lambda: seen()[0] >= 5, 60, "some looks were made")
    node.wait_for(lambda: seen()[1] == 0, 60, "no zombie is there")
