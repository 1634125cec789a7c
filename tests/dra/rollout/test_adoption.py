"""The check of a vendor's DaemonSet, and its printed commands, applied to objects."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_bridge import cli
from dra_bridge.rollout import adoption
from dra_bridge.rollout.adoption import AgentPod, adopt, agent_of, in_use, undo
from dra_bridge.rollout.agents import Answers, DeviceNow
from dra_bridge.testing.apiserver import FakeApiServer
from tests.dra.objects import body
from tests.dra.rollout import nodes
from tests.kubeconfigs import written

PLUGINS, REGISTRY = "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/plugins_registry"
OURS = "/run/deviceplugin/plugins"
AGENT = AgentPod("n1", OURS, mounted=True, ready=True, plugins=PLUGINS, registry=REGISTRY, claims=True)
Object = dict[str, Any]


def daemon_set(*paths: str, metadata: Mapping[str, Any] | None = None, **spec: Any) -> Object:
    """Return a vendor's DaemonSet with these hostPaths."""
    volumes: list[Object] = [{"name": "config", "configMap": {"name": "c"}}]
    volumes += [{"name": f"v{number}", "hostPath": {"path": path, "type": ""}} for number, path in enumerate(paths)]
    mounts = [{"name": f"v{number}", "mountPath": path} for number, path in enumerate(paths)]
    template = {"spec": {"containers": [{"name": "plugin", "volumeMounts": mounts}], "volumes": volumes}}
    whole = {"selector": {"matchLabels": {"app": "gadgets"}}, "template": template, **spec}
    return body("DaemonSet", "gadgets", "vendor", meta={"uid": "u-1", **(metadata or {})}, spec=whole)


def agent_pod(node: str = "n1", *arguments: str, path: str = OURS, program: str = "deviceplugin") -> Object:
    """Return an agent's pod that is ready and has no metrics port."""
    more = {"command": [program], "args": ["run", *(arguments or (f"--adopt={OURS}",))]}
    made = nodes.agent_pod(node, None, **more, volumeMounts=[{"name": "adopted", "mountPath": OURS}])
    made["spec"]["volumes"] = [{"name": "adopted", "hostPath": {"path": path}}]
    made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return made


def plugin_pod(server: FakeApiServer) -> Object:
    """Return a pod of the vendor's DaemonSet on node n1."""
    uid = server.get("daemonsets", "gadgets", "vendor")["metadata"]["uid"]
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "gadgets", "uid": uid}
    spec = {"nodeName": "n1", "containers": [{"name": "plugin"}]}
    return body("Pod", "gadgets-n1", "vendor", meta={"ownerReferences": [owner]}, spec=spec)


def applied(vendors: Object, command: str) -> Object:
    """Return an object after a printed `kubectl patch --type=json` (RFC 6902); a failed test operation raises."""
    words = shlex.split(command)
    assert words[:6] == ["kubectl", "patch", "daemonset", "gadgets", "-n", "vendor"]
    assert words[6:8] == ["--type=json", "-p"]
    made = copy.deepcopy(vendors)
    for one in json.loads(words[8]):
        *way, last = [step.replace("~1", "/").replace("~0", "~") for step in one["path"].split("/")[1:]]
        at: Any = made
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        match one["op"]:
            case "test":
                assert at[last] == one["value"]
            case "remove":
                del at[last]
            case "replace":
                assert last in at
                at[last] = one["value"]
            case _:
                at[last] = one["value"]
    return made


def paths(vendors: Object) -> list[Object]:
    return [one["hostPath"] for one in vendors["spec"]["template"]["spec"]["volumes"] if "hostPath" in one]


def test_one_host_path_there_and_back() -> None:
    """Adoption changes only the hostPath of the kubelet's directory in a DaemonSet; undo restores all of it."""
    vendors = daemon_set("/dev", f"{PLUGINS}/", metadata={"annotations": {"a": "b"}})
    found = adopt(vendors, [AGENT], {"n1"})
    assert not found.problems
    patch, wait = found.commands
    made = applied(vendors, patch)
    assert paths(made) == [{"path": "/dev", "type": ""}, {"path": OURS, "type": "Directory"}]
    assert wait == "kubectl rollout status daemonset/gadgets -n vendor"
    again = adopt(made, [AGENT], {"n1"})
    assert (again.done, again.commands) == (True, ())
    back, _ = undo(made, [AGENT], []).commands
    assert applied(made, back) == vendors
    assert undo(vendors, [AGENT], []).done


def test_two_host_paths_of_the_plugin_watcher() -> None:
    """The hostPaths of the device plugins and of the plugin watcher change in one patch."""
    vendors = daemon_set(PLUGINS, REGISTRY)
    made = applied(vendors, adopt(vendors, [AGENT], {"n1"}).commands[0])
    assert [one["path"] for one in paths(made)] == [OURS, f"{OURS}/plugins_registry"]
    assert paths(applied(made, undo(made, [AGENT], []).commands[0])) == paths(vendors)


def test_surge_is_taken_away_and_put_back_last() -> None:
    """Adoption sets maxSurge to 0, because two plugin pods would register at once; undo restores maxSurge last."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "20%", "maxUnavailable": 0}}
    vendors = daemon_set(PLUGINS, metadata={"annotations": {"a": "b"}}, updateStrategy=strategy)
    made = applied(vendors, adopt(vendors, [AGENT], {"n1"}).commands[0])
    assert made["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    back, wait, last = undo(made, [AGENT], []).commands
    first = applied(made, back)
    assert first["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert "rollout status" in wait
    assert applied(first, last) == vendors


def test_pods_that_nobody_replaces_are_deleted() -> None:
    """If the DaemonSet's update strategy is OnDelete, a second command deletes its pods."""
    vendors = daemon_set(PLUGINS, updateStrategy={"type": "OnDelete"})
    assert adopt(vendors, [AGENT], {"n1"}).commands[1] == "kubectl delete pods -n vendor -l app=gadgets"


def test_a_patch_fails_where_somebody_has_changed_it_meanwhile() -> None:
    """The patch for an adoption tests the values that it replaces, and fails if the volumes have changed."""
    vendors = daemon_set(PLUGINS)
    patch = adopt(vendors, [AGENT], {"n1"}).commands[0]
    vendors["spec"]["template"]["spec"]["volumes"].insert(0, {"name": "new", "hostPath": {"path": "/new"}})
    with pytest.raises(AssertionError):
        applied(vendors, patch)


def test_the_way_back_of_a_change_by_hand() -> None:
    """Without the annotation of the former paths, undo sets the kubelet's directories, and a note says so."""
    vendors = daemon_set(OURS, f"{OURS}/plugins_registry", "/dev")
    found = undo(vendors, [AGENT], [])
    made = applied(vendors, found.commands[0])
    assert [one["path"] for one in paths(made)] == [PLUGINS, REGISTRY, "/dev"]
    assert "what volume v0 was before is not kept" in found.notes[0]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"labels": {"app.kubernetes.io/managed-by": "Helm"}}, "Helm manages it"),
        ({"labels": {"app.kubernetes.io/managed-by": "someone"}}, "someone manages it"),
        ({"labels": {"app.kubernetes.io/managed-by": "dra-bridge"}}, "this is an agent"),
        ({"labels": {"addonmanager.kubernetes.io/mode": "Reconcile"}}, "the addon manager manages it"),
        ({"labels": {"kustomize.toolkit.fluxcd.io/name": "x"}}, "Flux manages it"),
        ({"annotations": {"argocd.argoproj.io/tracking-id": "x"}}, "Argo CD manages it"),
        (
            {"ownerReferences": [{"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "name": "p"}]},
            "ClusterPolicy p (nvidia.com/v1) owns it and puts it back: set devicePlugin.enabled=false",
        ),
        (
            {"ownerReferences": [{"apiVersion": "x.example.com/v1", "kind": "Thing", "name": "p"}]},
            "Thing p (x.example.com/v1) owns it",
        ),
    ],
)
def test_what_others_put_back_is_refused(metadata: Mapping[str, Any], words: str) -> None:
    """A DaemonSet that another manager would restore is refused; the problem names the manager."""
    found = adopt(daemon_set(PLUGINS, metadata=metadata), [AGENT], {"n1"})
    (problem,) = found.problems
    assert words in problem
    assert not found.commands


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"labels": {"addonmanager.kubernetes.io/mode": "EnsureExists"}}, "recreates a deleted DaemonSet"),
        ({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"}}, "kubectl apply of its manifest"),
    ],
)
def test_what_may_restore_it_later_is_noted(metadata: Mapping[str, Any], words: str) -> None:
    """A DaemonSet that an addon manager or `kubectl apply` may restore later is accepted, with a note."""
    found = adopt(daemon_set(PLUGINS, metadata=metadata), [AGENT], {"n1"})
    assert not found.problems
    assert any(words in note for note in found.notes)


@pytest.mark.parametrize(
    ("agents", "vendors", "words"),
    [
        ([], daemon_set(PLUGINS), "no agent runs on n1"),
        ([AGENT], daemon_set("/dev"), f"it has no hostPath {PLUGINS}"),
        ([AGENT], daemon_set("/var/lib/kubelet"), "it mounts all of /var/lib/kubelet"),
        ([agent_of(agent_pod("n1", "--x"))], daemon_set(PLUGINS), "agents on n1 have no --adopt"),
        ([agent_of(agent_pod(path="/else"))], daemon_set(PLUGINS), "agents on n1 do not mount"),
    ],
)
def test_what_would_not_work_is_refused(agents: list[AgentPod], vendors: Object, words: str) -> None:
    """Adoption is refused if the vendor's plugin would find no kubelet.sock, or one that is not the agent's."""
    found = adopt(vendors, agents, {"n1"})
    assert any(words in one for one in found.problems), found
    assert not found.commands


def test_a_part_of_the_directory_is_refused() -> None:
    """Adoption is refused if a container mounts only a part (subPath) of the kubelet's directory."""
    vendors = daemon_set(PLUGINS)
    vendors["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = "x"
    (problem,) = adopt(vendors, [AGENT], {"n1"}).problems
    assert "container plugin mounts a part" in problem


def test_options_of_agents() -> None:
    """The kubelet's directories come from the agent's arguments, as `--option value` or `--option=value`."""
    one = agent_of(agent_pod("n1", "--adopt", f"{OURS}/", "--kubelet-root=/k", "--device-plugin-dir=/d/"))
    assert one == AgentPod(
        "n1", OURS, mounted=True, ready=True, plugins="/d", registry="/k/plugins_registry", claims=False
    )


def test_claims_are_in_the_way_back() -> None:
    """Undo of an adoption is refused while claims have devices or may get some, or while an agent does not answer."""
    devices = {
        ("n1", "a/x", "g0"): DeviceNow("Healthy", holder="claim ml/c", state="dra", claims=("ml/c",)),
        ("n1", "a/x", "g1"): DeviceNow("Healthy", holder="", state="dra"),
        ("n1", "a/y", "g0"): DeviceNow("Healthy", holder="pod ml/p", state="plugin"),
        ("n1", "a/own", "g0"): DeviceNow("Healthy", holder="claim ml/d", state="dra", claims=("ml/d",)),
    }
    other, limits = replace(AGENT, node="n2"), replace(AGENT, node="n3", claims=False)
    answers = Answers(devices, {"n2": "no page"}, adopted={("n1", "a/x"): True, ("n1", "a/y"): True})
    assert in_use(answers, [AGENT, other, limits], {"n1", "n2", "n3"}) == [
        "it is not known whether claims have devices on n2: no page",
        "claims have devices of a/x: ml/c; end their pods first",
        "devices of a/x are for claims on n1; bring them back first: dra-bridge rollout --share none",
    ]
    assert in_use(answers, [AGENT, limits], {"n1", "n2", "n3"})[0] == (
        "no agent runs on n2: it is not known whether claims have devices there"
    )
    made = applied(daemon_set(PLUGINS), adopt(daemon_set(PLUGINS), [AGENT], {"n1"}).commands[0])
    assert undo(made, [AGENT], ["no"]) == adoption.Advice(("no",))


# The command.


@pytest.fixture
def command(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], logs_restored: None, read_here: None
) -> Callable[..., tuple[int, str, str]]:
    file = written(tmp_path / "kubeconfig", server.url)

    def run(*argv: str) -> tuple[int, str, str]:
        status = cli.main(["adopt", "gadgets", "-n", "vendor", *argv, "--kubeconfig", str(file)])
        return status, *capsys.readouterr()

    return run


def test_it_prints_and_changes_nothing(server: FakeApiServer, command: Callable[..., tuple[int, str, str]]) -> None:
    """The commands are printed with comments, and the DaemonSet is not changed; JSON has the same commands."""
    server.create(daemon_set(PLUGINS))
    before = server.get("daemonsets", "gadgets", "vendor")
    server.create(plugin_pod(server))
    assert command() == (
        1,
        "",
        "no agent runs on n1: its plugin would find no kubelet.sock there\nno agent adopts plugins\n",
    )
    server.create(agent_pod())
    status, out, err = command()
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert "nothing was changed: run these commands, in this order" in out
    made = applied(before, lines[0])
    assert server.get("daemonsets", "gadgets", "vendor") == before
    assert {request.method for request in server.log} == {"GET"}
    server.replace(made)
    status, out, err = command("--undo")
    assert (status, err) == (0, "")
    status, out, _ = command("--undo", "-o", "json")
    found = json.loads(out)
    assert (status, found["problems"], found["done"]) == (0, [], False)
    assert paths(applied(server.get("daemonsets", "gadgets", "vendor"), found["commands"][0])) == paths(before)


@pytest.mark.parametrize("option", [f"--adopt={OURS}", "--config=/etc/dra-bridge/config.yaml"])
def test_the_way_back_asks_the_agents(
    server: FakeApiServer, command: Callable[..., tuple[int, str, str]], option: str
) -> None:
    """Undo is refused if an agent that serves claims has no metrics port, also an agent without `--adopt`."""
    before = {"hostPaths": {"v0": {"path": PLUGINS, "type": ""}}}
    server.create(daemon_set(OURS, metadata={"annotations": {adoption.BEFORE: json.dumps(before)}}))
    server.create(plugin_pod(server))
    server.create(agent_pod("n1", option, program="dra-bridge"))
    status, out, err = command("--undo")
    assert (status, out) == (1, "")
    assert err.startswith("it is not known whether claims have devices on n1: its pod has no port named metrics")


def test_what_is_not_there(server: FakeApiServer, command: Callable[..., tuple[int, str, str]]) -> None:
    """A missing DaemonSet, and an unknown namespace of the agents, are errors with status 2."""
    assert command()[::2] == (2, "there is no DaemonSet gadgets in namespace vendor\n")
    server.create(daemon_set(PLUGINS))
    server.delete("clusterrolebindings", "dra-bridge")
    status, _, err = command()
    assert status == 2
    assert err.endswith("name the namespace by --agents\n")
    server.create(agent_pod())
    assert command("--agents", "dra-bridge")[0] == 0
