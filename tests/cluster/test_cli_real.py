"""`dra-bridge` commands on a real node: their output is true, and devices move as the commands request.

The commands run with exactly the rights of the operator's role in the manifests.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.config import parse
from deviceplugin.sources.path import device_id
from dra_bridge.manifests import Deployment, manifests
from tests.cluster import isolate
from tests.cluster.api import Api, ApiError
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster, Pod

DRIVER = "board.example.net"
RESOURCE = "example.net/board"
SHARE = f"{DRIVER}/dra-share"
BEFORE = f"{DRIVER}/dra-share-before"
POOL = f"{DRIVER}/dra-pool"
RECORD = f"{DRIVER}/dra-scale-down"
MARK = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
DEVICES = Path(isolate.DEVICES) / "boards"
COUNT = 4
OPERATOR = "operator"
OTHER = "another-operator"


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    """The agent with four devices, none of which is for claims yet."""
    if cluster.minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    shutil.rmtree(DEVICES, ignore_errors=True)
    DEVICES.mkdir(parents=True)
    for number in range(COUNT):
        os.mknod(DEVICES / f"board{number}", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    resource = {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"path": f"{DEVICES}/*"}],
        "dra": {"share": "none"},
    }
    with Bridge.running(cluster, resource) as running:
        cluster.wait_allocatable(RESOURCE, COUNT)
        yield running
        annotate(cluster, dict.fromkeys((SHARE, BEFORE, POOL, RECORD, MARK)))


def annotate(cluster: Cluster, annotations: dict[str, str | None], labels: dict[str, str] | None = None) -> None:
    body = {"metadata": {"annotations": annotations, "labels": labels or {}}}
    path = f"/api/v1/nodes/{cluster.node_name}"
    cluster.api.request("PATCH", path, body, content_type="application/merge-patch+json")


CONFIG = f"resources: [{{name: {RESOURCE}, driver: {DRIVER}, devices: [path: /dev/x]}}]"


def operators(deployment: Deployment, config: str = CONFIG) -> list[dict[str, Any]]:
    """Return the operator's ClusterRole and the admission policy that restricts the role, from the manifests."""
    name = f"{deployment.name}-operator"
    found = [one for one in manifests(parse(config), config, deployment) if one["metadata"]["name"] == name]
    return [one for one in found if one["kind"] != "Role"]


def bound(role: str, **subject: str) -> dict[str, Any]:
    """Return a ClusterRoleBinding of a subject to a ClusterRole."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{subject['name']}-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    }


@pytest.fixture
def kubeconfig(cluster: Cluster) -> Path:
    """The kubeconfig of an operator with exactly the rights of the operator's role in the manifests."""
    deployment = Deployment()
    user = {"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}
    other = {**user, "name": OTHER}
    bindings = [bound(f"{deployment.name}-operator", **subject) for subject in (user, other)]
    cluster.api.apply([*operators(deployment), *bindings])
    return cluster.kubeconfig_for(OPERATOR)


@dataclass
class Command:
    """A running or ended command, and the lines of its output so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
        self.over.set()

    @property
    def out(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def started(kubeconfig: Path) -> Iterator[Callable[..., Command]]:
    """Return a function that starts a `dra-bridge` command."""
    running: list[tuple[Command, threading.Thread]] = []

    def start(*argv: str, access: Path = kubeconfig) -> Command:
        command = [sys.executable, "-u", "-m", "dra_bridge", *argv, "--kubeconfig", str(access)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        made = Command(process)
        reader = threading.Thread(target=made.read, daemon=True)
        reader.start()
        running.append((made, reader))
        return made

    yield start
    for made, reader in running:
        made.process.kill()
        made.process.wait()
        reader.join(10)
        assert made.process.stdout is not None
        made.process.stdout.close()
        print(f"--- {made.process.args!r}\n{made.out}")


@pytest.fixture
def ran(started: Callable[..., Command]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a `dra-bridge` command to its end and returns its exit status and output."""

    def run(*argv: str, **options: Path) -> tuple[int, str]:
        made = started(*argv, **options)
        return ended(made), made.out

    return run


def ended(command: Command, timeout: float = 60.0) -> int:
    """Wait until a command has ended and its output was read; return its exit status."""
    status = command.process.wait(timeout)
    assert command.over.wait(timeout)
    return status


def asked_of(cluster: Cluster) -> dict[str, str]:
    found = cluster.node()["metadata"].get("annotations") or {}
    return {key: text for key, text in found.items() if key.startswith(SHARE)}


def told(text: str) -> dict[str, Any]:
    """Return the only node in the output of `status -o json`."""
    (node,) = json.loads(text)["nodes"]
    assert isinstance(node, dict)
    return node


def held_by(pod: Pod) -> str:
    """Return the id of the device in a pod's container; the id is made from the device's path."""
    (path,) = (DEVICES / name for name in pod.exec(["ls", str(DEVICES)]).split())
    return device_id(str(path))


def test_migrate_waits_for_holders_there_and_back(
    bridge: Bridge, started: Callable[..., Command], ran: Callable[..., tuple[int, str]]
) -> None:
    """To claims and back, `migrate --wait` names the holder that it waits for, and exits with 0 once that has ended."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    pod = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
    device = held_by(pod)
    there = started("migrate", node, "--driver", DRIVER, "--share", "all", "--wait")
    cluster.wait_for(
        lambda: f"{node}: {device} (to-dra) waits for" in there.out and "default/holder" in there.out,
        60,
        "the holder is named",
    )
    assert there.process.poll() is None
    pod.delete()
    assert ended(there) == 0, there.out
    bridge.claim("mine")
    user = bridge.pod("user", {"board": "mine"}).wait_running()
    (claimed,) = bridge.allocated("mine")
    back = started("migrate", node, "--driver", DRIVER, "--share", "none", "--wait")
    cluster.wait_for(
        lambda: f"{node}: {claimed} (to-plugin) waits for" in back.out and "claim default/mine" in back.out,
        60,
        "the claim is named",
    )
    user.delete()
    user.wait_gone()
    cluster.api.delete("ResourceClaim", "mine", api_version=bridge.api_version)
    assert ended(back) == 0, back.out
    cluster.wait_allocatable(RESOURCE, COUNT)
    status, out = ran("migrate", node, "--driver", DRIVER, "--unset", "--wait", "--timeout", "30")
    assert status == 0, out
    assert asked_of(cluster) == {}


def test_pods_that_a_kubelet_restart_would_end(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """After a forced move, `status` names a pod that a kubelet restart would end, because an older pod has devices."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    first = cluster.start_pod("first", {RESOURCE: 2}).wait_running()
    waits = cluster.start_pod("waits", {RESOURCE: 3})
    waits.wait_unschedulable()
    cluster.start_pod("younger", {RESOURCE: 1}).wait_running()
    status, out = ran("migrate", node, "--driver", DRIVER, "--share", "all", "--force")
    assert (status, asked_of(cluster)) == (0, {SHARE: "all force"}), out
    # Before it withdraws devices, the agent writes the allocatable number; the kubelet writes its own number, until the
    # agent writes again.
    cluster.wait_for(lambda: "moved to the DRA side" in bridge.log(), 60, "the idle device has moved")
    cluster.wait_reported()
    assert cluster.allocatable(RESOURCE) == 0
    assert "a kubelet restart" not in ran("status", "--driver", DRIVER)[1]
    first.delete()
    waits.wait_running()
    status, out = ran("status", "--driver", DRIVER)
    assert status == 1
    assert f"{node}: a kubelet restart would end default/younger ({RESOURCE}): they are younger than pods" in out


def test_status_says_what_is_true(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """`status -o json` has exactly the slices' devices as devices for claims, and names the claim that holds one."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    status, out = ran("migrate", node, "--driver", DRIVER, "--share", "50%", "--wait", "--timeout", "30")
    assert status == 0, out
    cluster.wait_allocatable(RESOURCE, 2)
    pod = cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
    bridge.claim("mine")
    bridge.pod("user", {"board": "mine"}).wait_running()
    (claimed,) = bridge.allocated("mine")
    # `status` asks only agents that run in pods, and this agent is no pod: it does not know which pods hold by limits.
    held: dict[str, str | None] = dict.fromkeys(device_id(str(DEVICES / f"board{number}")) for number in range(COUNT))
    assert held_by(pod) in held
    held[claimed] = "claim default/mine"
    offered = bridge.offered()

    def shown() -> dict[str, Any]:
        return told(ran("status", "--driver", DRIVER, "-o", "json")[1])

    def holders(found: dict[str, Any]) -> dict[str, str | None]:
        (resource,) = found["resources"]
        return {one["name"]: one["holder"] for one in resource["devices"]}

    cluster.wait_for(lambda: holders(shown()) == held, 30, f"the holders are {held}")
    found = shown()
    (resource,) = found["resources"]
    assert (found["node"], found["requested"], found["done"], found["waitsFor"]) == (node, "50%", True, [])
    assert resource["counts"] == {"dra": 2, "plugin": 2}
    assert {one["name"] for one in resource["devices"] if one["side"] == "dra"} == set(offered)
    assert {one["name"] for one in resource["devices"]} == {
        device_id(str(DEVICES / f"board{number}")) for number in range(COUNT)
    }
    assert next(one["pods"] for one in resource["devices"] if one["name"] == claimed) == ["user"]
    table = ran("status")[1]
    assert f"{claimed}  dra     dra     claim default/mine for user" in table


def test_rollout_stalls_goes_on_and_is_undone(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """`rollout` stops at a node that stalls and says why; a second run goes on; --undo restores the former shares."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    annotate(cluster, {SHARE: "1"}, {"pool": "boards"})
    pod = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
    device = held_by(pod)
    command = ["rollout", "--driver", DRIVER, "--share", "all", "--selector", "pool=boards"]
    status, out = ran(*command, "--timeout-per-node", "4")
    assert status == 1, out
    assert f"stopped: {node}: not done after 4 s: {device} (to-dra) waits for" in out
    pod.delete()
    pod.wait_gone()
    status, out = ran(*command)
    assert status == 0, out
    assert "1 of 1 nodes done" in out
    found = told(ran("status", "-o", "json")[1])
    assert (found["requested"], found["before"], found["inRollout"], found["done"]) == ("all", "1", True, True)
    assert found["resources"][0]["counts"] == {"dra": COUNT}
    status, out = ran("rollout", "--driver", DRIVER, "--undo", "--selector", "pool=boards")
    assert status == 0, out
    assert asked_of(cluster) == {SHARE: "1"}
    found = told(ran("status", "-o", "json")[1])
    assert found["done"]
    assert found["resources"][0]["counts"] == {"dra": 1, "plugin": COUNT - 1}


def test_a_migration_outlasts_the_node_object(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """Devices for claims stay for claims after the Node object's deletion and recreation, until the next `migrate`."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    move = ("migrate", node, "--driver", DRIVER, "--wait", "--timeout", "60", "--share")
    assert ran(*move, "all")[0] == 0
    bridge.wait_offered(COUNT)
    cluster.api.delete("Node", node)
    gone = f"the Node object {node} is gone; the requested share stays"
    cluster.wait_for(lambda: gone in bridge.log(), 30, "it is noticed")
    cluster.restart_kubelet()
    cluster.wait_for(lambda: "the previous share all stays" in bridge.log(), 60, "the other Node is noticed")
    bridge.renew_token()  # The former token is of the former Node; the API server may accept it for some seconds.
    bridge.wait_offered(COUNT)
    bridge.stop()  # an agent's pod would be deleted with the Node, and the next pod be created with the next Node
    bridge.start()
    cluster.wait_for(lambda: "the previous share all stays" in bridge.log(), 60, "the next agent knows the share")

    def waits() -> bool:
        found = told(ran("status", "-o", "json")[1])
        (resource,) = found["resources"]
        assert resource["counts"] == {"dra": COUNT}
        return "its Node was recreated without the annotation" in "".join(found["waitsFor"])

    cluster.wait_for(waits, 30, "status says what stays")
    status, out = ran(*move, "2")
    assert status == 0, out
    cluster.wait_allocatable(RESOURCE, 2)
    annotate(cluster, {SHARE: None})  # the Node was not recreated after `migrate`, so the config file's share applies
    cluster.wait_allocatable(RESOURCE, COUNT)


def test_a_terminal_gets_no_control_characters(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """`status` and `rollout` print control characters in a Node's annotations escaped."""
    clear = "\x1b[2J"
    record = {"share": f"1{clear}", "owner": f"eve{clear}"}
    annotate(bridge.cluster, {SHARE: f"all{clear}", BEFORE: json.dumps(record)}, {"pool": "boards"})
    rollout = ("rollout", "--driver", DRIVER, "--share", "1", "--selector", "pool=boards")
    for command, result in ((("status",), 0), (rollout, 1)):
        status, out = ran(*command)
        assert status == result, out
        assert repr(clear)[1:-1] in out
        assert not {one for one in out if ord(one) < 32} - {"\n"}, out


def test_another_class_takes_the_extended_resource(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """`status` names another DeviceClass with the same extended resource, and the class that the scheduler uses."""
    selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    spec = {"selectors": [selector], "extendedResourceName": RESOURCE}
    kind = {"apiVersion": bridge.api_version, "kind": "DeviceClass"}
    (applied,) = bridge.cluster.api.apply([{**kind, "metadata": {"name": "zz-later"}, "spec": spec}])
    try:
        bridge.wait_offered(0)
        status, out = ran("status")
        assert status == 0, out
        ours = bridge.cluster.api.list("DeviceClass", api_version=bridge.api_version)
        times = {one["metadata"]["name"]: one["metadata"]["creationTimestamp"] for one in ours}
        newest = min(name for name in (DRIVER, "zz-later") if times[name] == max(times[DRIVER], times["zz-later"]))
        said = f"zz-later all name the extended resource {RESOURCE}: pods with limits for it get devices of class "
        assert f"{said}{newest}" in out
    finally:
        bridge.cluster.api.delete("DeviceClass", applied["metadata"]["name"], api_version=bridge.api_version)


def test_two_operators_do_not_fight(
    bridge: Bridge, started: Callable[..., Command], ran: Callable[..., tuple[int, str]]
) -> None:
    """Of two contradicting rollouts the second stops, or with --take-over the first; afterwards --undo works."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    other = cluster.kubeconfig_for(OTHER)
    annotate(cluster, {SHARE: "1"}, {"pool": "boards"})
    pod = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
    command = ["rollout", "--driver", DRIVER, "--selector", "pool=boards"]
    first = started(*command, "--share", "all")
    cluster.wait_for(lambda: asked_of(cluster)[SHARE] == "all", 30, "the first one has begun")
    status, out = ran(*command, "--share", "none", access=other)
    assert status == 1, out
    assert f"stopped: {node}: share all requested by the rollout of {OPERATOR} (share all); --take-over replaces" in out
    assert first.process.poll() is None
    status, out = ran(*command, "--share", "2", "--take-over", "--timeout-per-node", "20", access=other)
    assert status == 0, out
    assert ended(first) == 1, first.out
    assert f"stopped: {node}: share 2 requested by the rollout of {OTHER} (share 2); --take-over replaces" in first.out
    assert first.out.count("share all requested") == 1
    pod.delete()
    pod.wait_gone()
    status, out = ran(*command, "--undo")
    assert status == 0, out
    assert asked_of(cluster) == {SHARE: "1"}


def test_rollout_stops_when_a_pod_fails(
    bridge: Bridge, started: Callable[..., Command], ran: Callable[..., tuple[int, str]]
) -> None:
    """A pod that fails because its node's devices move stops the rollout, which prints the pod's reason."""
    cluster, node = bridge.cluster, bridge.cluster.node_name
    annotate(cluster, {}, {"pool": "boards"})
    holder = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
    rollout = started("rollout", "--driver", DRIVER, "--share", "all", "--selector", "pool=boards")
    bridge.wait_offered(COUNT - 1)  # the Node shows 0 allocatable a second before devices are withdrawn
    # nodeName bypasses the scheduler, which would not bind the pod: no device is free for limits.
    cluster.start_pod("hasty", {RESOURCE: 1}, nodeName=node, restartPolicy="Never").wait_phase("Failed")
    assert ended(rollout) == 1, rollout.out
    assert f"stopped: {node}: pod default/hasty has failed (UnexpectedAdmissionError" in rollout.out
    holder.delete()
    holder.wait_gone()
    status, out = ran("rollout", "--driver", DRIVER, "--undo", "--selector", "pool=boards")
    assert status == 0, out
    assert asked_of(cluster) == {}


def test_status_says_which_move_lets_a_waiting_pod_start(bridge: Bridge, ran: Callable[..., tuple[int, str]]) -> None:
    """A pod needs three devices by limits, of which two are for claims: a `migrate` command of `status` lets it run."""
    annotate(bridge.cluster, {SHARE: "2"})
    cluster = bridge.cluster
    cluster.wait_for(lambda: cluster.allocatable(RESOURCE) == 2 and len(bridge.offered()) == 2, 30, "two on each side")
    pod = cluster.start_pod("wants-three", {RESOURCE: 3})
    pod.wait_unschedulable()
    _, shown = ran("status")
    (hint,) = (line for line in shown.splitlines() if "would be enough" in line)
    words, _, command = hint.partition("dra-bridge ")
    assert "pod default/wants-three waits for 3 example.net/board; 2 are free on the plugin side and 2 on" in words
    assert ran(*command.split())[0] == 0
    pod.wait_running()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cordon": ({"spec": {"unschedulable": True}}, "nothing of a Node but"),
    "a taint": ({"spec": {"taints": [{"key": "x", "effect": "NoExecute"}]}}, "nothing of a Node but"),
    "a label": ({"metadata": {"labels": {"node-role.kubernetes.io/x": ""}}}, "nothing of a Node but"),
    "a finalizer": ({"metadata": {"finalizers": ["example.com/x"]}}, "nothing of a Node but"),
    "an owner": (
        {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}},
        "nothing of a Node but",
    ),
    "another annotation": ({"metadata": {"annotations": {"x": "y"}}}, "only the annotations DRIVER/dra-share"),
    "an annotation taken away": ({"metadata": {"annotations": {"there": None}}}, "only the annotations DRIVER/dra-sh"),
    "another driver's share": ({"metadata": {"annotations": {"a.b/dra-share": "1"}}}, "does not name each driver"),
    "a name of that kind": ({"metadata": {"annotations": {f"{DRIVER}/dra-share-x": "1"}}}, "only the annotations"),
    "no share but text": ({"metadata": {"annotations": {SHARE: 17 * "1"}}}, "more than 16 characters"),
    "more than a rollout writes": ({"metadata": {"annotations": {BEFORE: 4097 * "x"}}}, "more than 4096"),
    "the autoscaler's mark alone": ({"metadata": {"annotations": {MARK: "true"}}}, "only as a rollout does"),
    "the record of a mark alone": ({"metadata": {"annotations": {RECORD: "disabled"}}}, "only as a rollout does"),
    "something else than the mark": ({"metadata": {"annotations": {MARK: "x"}}}, "only as a rollout does"),
    "another driver's pool": ({"metadata": {"annotations": {"a.b/dra-pool": "publish"}}}, "does not name each driver"),
    "one of two drivers": (
        {"metadata": {"annotations": {SHARE: "1", "other.example.com/dra-share": "1"}}},
        "does not name each driver",
    ),
}
"""Changes to a Node that an operator may not make, and a part of the API server's error for each."""


def test_an_operator_changes_nothing_of_a_node_but_shares(cluster: Cluster) -> None:
    """The policy lets operators patch only annotations of `dra-bridge` on Nodes; other users' rights stay the same."""
    first, second = Deployment(name="first"), Deployment(name="second")
    other = CONFIG.replace(DRIVER, "other.example.com")
    patcher = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "patcher"},
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}],
    }
    accounts = {
        "one": ["first-operator"],
        "both": ["first-operator", "second-operator"],
        "daemon": ["patcher"],
        "boss": ["first-operator", "cluster-admin"],
    }
    applied = cluster.api.apply(
        [
            *operators(first),
            *operators(second, other),
            patcher,
            *({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}} for name in accounts),
            *(
                bound(role, kind="ServiceAccount", name=name, namespace="default")
                for name, roles in accounts.items()
                for role in roles
            ),
        ]
    )
    one, both, daemon, boss = (cluster.api_with_token(cluster.service_account_token(name)) for name in accounts)

    def answer(body: dict[str, Any], by: Api = one) -> str:
        try:
            path = f"/api/v1/nodes/{cluster.node_name}"
            by.request("PATCH", path, body, content_type="application/merge-patch+json", dryRun="All")
        except ApiError as error:
            if error.code not in (403, 422):
                raise
            return error.message
        return ""

    own = {"metadata": {"annotations": {SHARE: "2", BEFORE: "none"}}}
    theirs = {"metadata": {"annotations": {f"{name}/dra-share": "2" for name in (DRIVER, "other.example.com")}}}
    try:
        annotate(cluster, {"there": "x", SHARE: "1"})
        cordon, why = REFUSED["cordon"]
        # The policies take some time to be in force.
        cluster.wait_for(lambda: why in answer(cordon) and why in answer(cordon, both), 30, "the policy is in force")
        for what, (body, words) in REFUSED.items():
            said = answer(body)
            print(f"{what}: {said}")
            assert words in said, (what, said)
        assert answer(own) == ""
        assert answer({"metadata": {"annotations": {SHARE: None}}}) == ""
        assert answer(theirs, both) == ""
        assert answer({"metadata": {"annotations": {POOL: "publish"}}}) == ""
        marked = {"metadata": {"annotations": {MARK: "true", RECORD: "disabled"}}}
        unmarked = {"metadata": {"annotations": {MARK: None, RECORD: None, POOL: None}}}
        assert answer(marked) == ""
        annotate(cluster, {MARK: "true", RECORD: "disabled", POOL: "publish"})
        assert answer(unmarked) == ""
        assert "only as a rollout does" in answer({"metadata": {"annotations": {MARK: None}}})
        assert "only as a rollout does" in answer({"metadata": {"annotations": {RECORD: None}}})
        annotate(cluster, {RECORD: None, POOL: None})  # without the annotation RECORD, MARK is not from a rollout
        assert "only as a rollout does" in answer({"metadata": {"annotations": {MARK: None}}})
        assert "only as a rollout does" in answer(marked)
        annotate(cluster, {MARK: None})
        many = {"metadata": {"annotations": {**theirs["metadata"]["annotations"], BEFORE: "none"}}}
        assert "cost limit exceeded" in answer(many, both)
        # The policy does not restrict rights that come from another role.
        for body in (*(body for body, _ in REFUSED.values()), own, theirs):
            for by in (daemon, boss):
                assert "operator" not in answer(body, by)
        assert answer(cordon, daemon) == answer(cordon, boss) == ""
    finally:
        annotate(cluster, {"there": None, SHARE: None, MARK: None, RECORD: None, POOL: None})
        for object_ in reversed(applied):
            cluster.api.delete(object_["kind"], object_["metadata"]["name"], "default", object_["apiVersion"])


def test_kubectl_runs_it(bridge: Bridge, kubeconfig: Path) -> None:
    """`kubectl dra-bridge status` runs the plugin that `pip install` put beside Python; usage errors name kubectl."""
    programs = Path(sys.executable).parent
    assert (programs / "kubectl-dra_bridge").exists(), "installed before it was added: pip install -e '.[bridge,cli]'"
    bridge.wait_offered(0)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KUBECONFIG": str(kubeconfig)}
    command = [bridge.cluster.binaries.path("kubectl"), "dra-bridge", "status", "--driver", DRIVER, "-o", "json"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(done.stdout)["nodes"]
    assert node["node"] == bridge.cluster.node_name
    wrong = subprocess.run([command[0], "dra-bridge", "stat"], env=environment, capture_output=True, text=True)
    assert "usage: kubectl dra-bridge" in wrong.stderr
