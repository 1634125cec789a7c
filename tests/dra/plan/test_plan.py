"""`plan`: its findings in dumps of clusters, its output, and its exit status."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin import config
from dra_bridge import cli
from dra_bridge.kube import FOR_LIMITS
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.plan import cluster_checks, objects
from dra_bridge.plan.checks import CHECKS, MigrationPlan, migration_plan
from dra_bridge.plan.dumps import DumpError, by_kind, objects_of
from dra_bridge.plan.findings import FindingKind
from dra_bridge.plan.objects import ClusterObjects, Unread
from dra_bridge.plan.view import ClusterView, Target
from dra_bridge.rollout.pods import requests_of
from tests.dra.plan.cases import (
    AUTOSCALER,
    BOARD,
    CALM,
    CASES,
    DRIVER,
    Case,
    Object,
    agents,
    claim,
    config_map,
    in_group,
    node,
    pod,
    resource_slice,
)

KINDS = ("ResourceSlice", "ResourceClaim", "ResourceClaimTemplate", "ResourceQuota", "PriorityClass", "DaemonSet")
ROLES = ("ClusterRole", "ClusterRoleBinding")
WITHOUT = [word for kind in (*KINDS, *ROLES, "ConfigMap", "kubelets") for word in ("--without", kind)]


def dump(*objects: Object, style: str = "json") -> str:
    """Return the output of `kubectl get -o json` or `-o yaml` for these objects, completed as in a cluster."""
    whole = {"apiVersion": "v1", "kind": "List", "items": [completed(one) for one in objects]}
    return json.dumps(whole) if style == "json" else yaml.safe_dump(whole)


def completed(body: Object) -> Object:
    """Return the object with a creation time added; if it is a pod with a PriorityClass, also with a priority."""
    ages = {"calm": "2026-11-26T08:00:00Z", "younger": "2026-11-26T11:00:00Z"}
    made = ages.get(body["metadata"]["name"], "2026-11-26T10:00:00Z")
    body = {**body, "metadata": {**body["metadata"], "creationTimestamp": made}}
    if body["kind"] == "Pod" and body["spec"].get("priorityClassName"):
        body = {**body, "spec": {**body["spec"], "priority": 1000}}
    return body


def planned(*objects: Object, given: tuple[Target, ...] = (), **more: Any) -> MigrationPlan:
    found = by_kind(objects_of(dump(*objects).encode()))
    return migration_plan(ClusterView(ClusterObjects(found, 1_800_000_000.0, **more), given))


@pytest.mark.parametrize("case", CASES, ids=[case.kind.name for case in CASES])
def test_each_finding_is_found(case: Case) -> None:
    """With the objects of a case, a cluster has the case's finding, with object and reason; without them it has not."""
    given = (Target(BOARD, DRIVER, "all"),) if case.arguments else ()
    found = [one for one in planned(node("n1"), *CALM, *case.objects, given=given).findings if one.kind is case.kind]
    assert any(case.words in f"{one.object} {one.reason}" for one in found), found
    assert not [one for one in planned(node("n1"), *CALM, given=given).findings if one.kind is case.kind]


def test_nothing_is_found_where_all_is_well() -> None:
    """A node of 1.36 with a DeviceClass for its devices and a pod with limits has no finding, and the status 0."""
    plan = planned(node("n1"), *CALM)
    assert (plan.findings, plan.status) == ((), 0)


def test_kubelets_say_more_than_versions() -> None:
    """Feature gates and the Topology Manager's policy come from the kubelets' configurations, not from versions."""
    old, new = node("old", "v1.35.1"), node("new", "v1.36.3")
    kubelets = {
        "old": {"featureGates": {"DRAExtendedResource": True}},
        "new": {"featureGates": {"DRAExtendedResource": False}, "topologyManagerPolicy": "restricted"},
    }
    found = {one.kind: one for one in planned(old, new, *CALM, kubelets=kubelets).findings}
    assert found[FindingKind.UNCHANGED_PODS].object == "nodes of v1.36.3"
    assert found[FindingKind.TOPOLOGY_MANAGER].reason == "nodes new"
    calm = {"new": {"topologyManagerPolicy": "none"}}
    assert planned(new, *CALM, kubelets=calm).findings == ()


def test_rights_of_the_caller_are_findings() -> None:
    """A right that the API server denies the caller is a finding."""
    rights = {("list", "nodes"): True, ("patch", "nodes"): False}
    (found,) = planned(node("n1"), *CALM, rights=rights).findings
    assert (found.kind, found.reason) == (FindingKind.OPERATOR_RIGHTS, "may not patch nodes")


def test_the_agents_rights_are_those_of_the_manifests() -> None:
    """The roles of `manifests` have all rights of agents, under any name; without bindings there is a finding."""
    text = f"resources: [{{name: {BOARD}, driver: {DRIVER}, devices: [path: /dev/x]}}]"
    for how in (Deployment(), Deployment(name="other", namespace="elsewhere", claim_status=True)):
        objects = [one for one in manifests(config.parse(text), text, how) if one["kind"] != "DeviceClass"]
        plan = planned(node("n1", labels={"kubernetes.io/os": "linux"}), *CALM, *objects)
        assert plan.findings == ()
    lacking = [one for one in objects if one["kind"] != "ClusterRoleBinding"]
    (found,) = planned(node("n1", labels={"kubernetes.io/os": "linux"}), *CALM, *lacking).findings
    assert found.kind is FindingKind.AGENT_RIGHTS
    assert len(cluster_checks.AGENT_RULES) == 5


def test_taints_that_are_tolerated_keep_no_agent_away() -> None:
    """A taint that the agents do not tolerate is a finding; a toleration of the taint or of all taints is enough."""
    tainted = node("n1")
    tainted["spec"] = {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}
    kind = FindingKind.AGENTS_KEPT_AWAY
    for tolerations, away in (
        ([], True),
        ([{"operator": "Exists"}], False),
        ([{"key": "gpu", "value": "yes"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], True),
    ):
        plan = planned(tainted, *CALM, *agents(tolerations=tolerations))
        assert any(one.kind is kind for one in plan.findings) == away, tolerations


def test_a_group_with_whole_slices_is_no_mixed_group() -> None:
    """Node groups in which all or no nodes have slices are no finding, nor is a node marked against scale-down."""
    marked = node("n2")
    marked["metadata"]["annotations"] = {cluster_checks.SCALE_DOWN_DISABLED: "true"}
    whole = [in_group(name, "g") for name in ("n3", "n4")]
    slices = [resource_slice(name, "d0") for name in ("n2", "n3", "n4")]
    assert planned(node("n1"), *CALM, AUTOSCALER, *whole).findings == ()
    assert planned(node("n1"), *CALM, AUTOSCALER, *whole, marked, *slices, pod("u", 1, "n2")).findings == ()


def test_the_status_says_the_worst() -> None:
    """The exit status is 4 for blockers, 5 for kinds that were not read, 3 for warnings, and 0 for notes."""
    blocker, warning, note = (
        next(case for case in CASES if case.kind is kind)
        for kind in (FindingKind.TWO_CLASSES, FindingKind.OPENCOST, FindingKind.KUBE_STATE_METRICS)
    )
    unread = (Unread("pods", "forbidden"),)
    base = (node("n1"), *CALM)
    assert planned(*base, *blocker.objects, unread=unread).status == 4
    assert planned(*base, *warning.objects, unread=unread).status == 5
    assert planned(*base, *warning.objects).status == 3
    assert planned(*base, *note.objects).status == 0
    assert planned(*base, unread=unread).status == 5


def test_each_kind_has_a_check() -> None:
    """Each kind of finding has a check, a test and a code of its own."""
    assert CHECKS.keys() == set(FindingKind)
    here = {FindingKind.TOPOLOGY_MANAGER, FindingKind.OPERATOR_RIGHTS}
    assert {case.kind for case in CASES} == set(FindingKind) - here
    assert len({kind.code for kind in FindingKind}) == len(FindingKind)


def test_uses_and_drain_are_counted() -> None:
    """Pods are counted by how many devices they have, devices by limits and DRA; drain time follows from pods' ages."""
    start = {"phase": "Running", "startTime": "2027-01-15T07:00:00Z"}  # an hour before now
    older = {"phase": "Running", "startTime": "2027-01-15T04:00:00Z"}
    plan = planned(
        node("n1"),
        node("n2"),
        *CALM,
        pod("a", 2, "n1", status=start),
        pod("b", 1, "n2", status=older),
        claim("c", "b", "n2"),
        pod("done", 1, "n2", status={"phase": "Succeeded"}),
    )
    (use,) = plan.uses
    assert (use.nodes, use.capacity, use.by_count, use.waiting) == (2, 8, {1: 2, 2: 1}, 1)
    assert (use.by_limits, use.by_dra, use.unchanged) == (2, 1, True)
    assert plan.drain is not None
    assert (plan.drain.nodes, plan.drain.half, plan.drain.most) == (2, 2.5 * 3600, 4 * 3600)


def test_former_resources_do_not_count() -> None:
    """A resource with 0 devices on all nodes and no pod is in no finding, and nodes with 0 devices do not count."""
    former = node("n2", "v1.30.0", 0)
    whole = planned(node("n1", resource="example.net/former", count=0), former, *CALM)
    assert [use.resource for use in whole.uses] == [BOARD]  # CALM has a pod with this resource.
    without = planned(former, *(one for one in CALM if one["kind"] != "Pod"))
    assert (without.uses, without.findings) == ((), ())
    offering = planned(node("n1"), former, node("n3", "v1.30.0", -1), *CALM)
    assert [(use.nodes, use.capacity) for use in offering.uses] == [(1, 4)]
    assert offering.findings == ()
    held = planned(node("n1"), former, *CALM, pod("a", 1, "n2", status={"phase": "Running"}))
    assert {one.kind for one in held.findings} >= {FindingKind.NO_DRA}


def test_dumps_need_no_client() -> None:
    """`plan` with dumps loads no client of the API server."""
    code = "import sys, dra_bridge.cli_plan, dra_bridge.plan.checks, dra_bridge.plan.dumps; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"aiohttp", "grpc", "kubernetes_asyncio"}.isdisjoint(loaded)
    assert objects.FOR_LIMITS == FOR_LIMITS


# Dumps, and the command line.


@pytest.mark.parametrize("style", ["json", "yaml"])
def test_dumps_of_both_styles_say_the_same(style: str) -> None:
    """JSON, YAML, streams of documents and lists of one kind give the same objects."""
    made = [completed(one) for case in CASES for one in (node("n1"), *CALM, *case.objects)]
    expected = by_kind(objects_of(dump(*made).encode()))
    assert by_kind(objects_of(dump(*made, style=style).encode())) == expected
    stream = yaml.safe_dump_all([completed(one) for one in made])
    assert by_kind(objects_of(stream.encode())) == expected
    nodes = [{key: value for key, value in one.items() if key != "kind"} for one in made if one["kind"] == "Node"]
    whole = {"items": nodes, "kind": "NodeList"}
    text = json.dumps(whole) if style == "json" else yaml.safe_dump(whole)
    assert by_kind(objects_of(text.encode())) == {"Node": expected["Node"]}


def test_charts_count_by_their_templates() -> None:
    """If a dump has no nodes, as that of a chart, the pod templates of its workloads are checked; else they are not."""
    template = {"spec": {"containers": [{"name": "a", "resources": {"limits": {BOARD: 33}}}]}}
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "app"}}
    workload: Object = {**head, "spec": {"template": template}}
    (found,) = planned(*CALM, workload).findings
    assert (found.kind, found.object) == (FindingKind.ABOVE_32, "pod app (Deployment)")
    assert planned(node("n1", count=64), *CALM, workload).findings == ()


def test_an_object_in_several_dumps_counts_once() -> None:
    """Of objects with the same kind, namespace and name, the last counts; objects without a name all count."""
    nameless = pod("x", 1, "n1")
    nameless["metadata"] = {"namespace": "default", "generateName": "x-"}
    other = pod("a", 1, "n1")
    other["metadata"] = {**other["metadata"], "namespace": "other"}
    objects = (node("n1", count=2), pod("a", 2, "n1"), node("n1"), pod("a", 1, "n1"), other, nameless, nameless)
    text = json.dumps({"kind": "List", "items": objects})
    (use,) = migration_plan(ClusterView(ClusterObjects(by_kind(objects_of(text.encode())), 0.0))).uses
    assert (use.nodes, use.capacity, use.by_count, use.by_limits) == (1, 4, {1: 4}, 4)


def test_merge_keys_of_yaml() -> None:
    """A merge key adds keys of mappings, the first before the later, and the mapping's own keys before both."""
    text = f"""
x-a: &a {{limits: {{{BOARD}: 2}}}}
x-b: &b {{limits: {{{BOARD}: 9}}, claims: []}}
apiVersion: apps/v1
kind: Deployment
metadata: {{name: app}}
spec:
  template:
    spec:
      containers:
      - {{name: m, resources: {{<<: *a}}}}
      - {{name: n, resources: {{<<: [*a, *b]}}}}
      - {{name: o, resources: {{<<: *b, limits: {{{BOARD}: 3}}}}}}
      - &c {{name: p, resources: *a}}
      - {{<<: *c, name: q}}
---
base: &pod
  {{kind: Pod, metadata: {{name: b}}, spec: {{containers: [{{name: a, resources: {{limits: {{{BOARD}: 1}}}}}}]}}}}
<<: *pod
"""
    (use,) = migration_plan(ClusterView(ClusterObjects(by_kind(objects_of(text.encode())), 0.0))).uses
    assert use.by_count == {1: 1, 11: 1}
    for wrong, words in (("{kind: Pod, <<: 3}", "merge key"), ("{kind: Pod, spec: *a}", "undefined alias 'a'")):
        with pytest.raises(DumpError, match=words):
            list(objects_of(f"---\n{wrong}".encode()))


@pytest.mark.parametrize(
    ("init", "counted"), [("S", 2), ("S2", 3), ("2S", 2), ("SS1", 3), ("S2S", 3), ("4", 4), ("S3S9", 11), ("", 1)]
)
def test_a_pods_devices_are_counted_as_the_scheduler_does(init: str, counted: int) -> None:
    """An init container adds to the sidecars (S) that start before it."""
    body = pod("a", 1, "n1")
    body["spec"]["initContainers"] = [
        {
            "name": f"i{number}",
            "resources": {"limits": {BOARD: 1 if kind == "S" else int(kind)}},
            **({"restartPolicy": "Always"} if kind == "S" else {}),
        }
        for number, kind in enumerate(init)
    ]
    (use,) = planned(node("n1"), body).uses
    assert use.by_count == {counted: 1}
    assert requests_of(body) == {BOARD: counted}


IDLE = "nodes move at once"


def test_pods_that_were_not_read_may_have_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only if all pods were read, and of all namespaces, the plan states that no pod has a device."""
    idle = pod("calm")
    run(monkeypatch, text=dump(node("n1"), idle))
    assert IDLE in capsys.readouterr().out
    run(monkeypatch, text=dump(node("n1")))
    assert IDLE not in capsys.readouterr().out
    run(monkeypatch, "--without", "Pod", text=dump(node("n1")))
    assert IDLE in capsys.readouterr().out
    run(monkeypatch, text=dump(node("n1"), idle) + "{")
    assert IDLE not in capsys.readouterr().out
    run(monkeypatch, "-n", "nope", text=dump(node("n1"), idle))
    out, err = capsys.readouterr()
    assert IDLE not in out
    assert "no pod that was read is in the namespace nope" in err
    run(monkeypatch, text="kind: List\nitems: []")
    assert IDLE not in capsys.readouterr().out


def run(monkeypatch: pytest.MonkeyPatch, *argv: str, text: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return cli.main(["plan", "-f", "-", *argv])


def test_output_formats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, JSON and Markdown have the same findings; --ignore leaves out a code."""
    case = next(case for case in CASES if case.kind is FindingKind.TWO_CLASSES)
    text = dump(node("n1"), *CALM, *case.objects)
    assert run(monkeypatch, *WITHOUT, text=text) == 4
    table = capsys.readouterr().out
    assert "BLOCKER DB302: several DeviceClasses name the same extended resource" in table
    assert "example.net/board: DeviceClasses board.example.net (board.example.net), second (x.example.net)" in table
    assert table.endswith("1 blocker\n")
    assert run(monkeypatch, *WITHOUT, "-o", "json", text=text) == 4
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["object"]) == ("DB302", BOARD)
    assert run(monkeypatch, *WITHOUT, "-o", "markdown", text=text) == 4
    assert "| blocker | DB302 | example.net/board | DeviceClasses" in capsys.readouterr().out
    assert run(monkeypatch, *WITHOUT, "--ignore", "DB302", text=text) == 0
    assert capsys.readouterr().out.endswith("no findings\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    """No line is longer than the terminal; if the table does not fit, names are on lines of their own."""
    case = next(case for case in CASES if case.kind is FindingKind.TWO_CLASSES)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(monkeypatch, *WITHOUT, text=dump(node("n1"), *CALM, *case.objects)) == 4
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert f"{BOARD}  -" in lines
    assert any(line.split() == ["1", "4", "4", "0", "0", "0", "1", "yes", "1x1"] for line in lines)


def test_what_no_dump_has_is_not_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kind that is in no dump counts as not read, unless `--without` names it."""
    text = dump(node("n1"), *CALM)
    assert run(monkeypatch, text=text) == 5
    assert re.search(r"NOT READ: .*PriorityClass, .*ResourceQuota, .*: no dump has one", capsys.readouterr().out)
    assert run(monkeypatch, *WITHOUT, text=text) == 0


def test_a_config_map_that_no_dump_has_is_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ConfigMaps of Kueue and of the cluster autoscaler count as not read if no dump has them."""
    given = [word for word in WITHOUT if word not in ("--without", "ConfigMap")]
    without = [word for kind in given for word in ("--without", kind)]
    maps = (config_map("kube-system", "cluster-autoscaler-status"), config_map("kueue-system", "kueue-manager-config"))
    assert run(monkeypatch, *without, text=dump(node("n1"), *CALM)) == 5
    out = capsys.readouterr().out
    assert "kube-system/cluster-autoscaler-status" in out
    assert "kueue-system/kueue-manager-config" in out
    assert run(monkeypatch, *without, text=dump(node("n1"), *CALM, maps[0])) == 5
    out = capsys.readouterr().out
    assert "NOT READ: ConfigMap kueue-system/kueue-manager-config: no dump has one" in out
    assert "cluster-autoscaler-status" not in out
    assert run(monkeypatch, *without, text=dump(node("n1"), *CALM, *maps)) == 0


def test_the_driver_and_the_config_choose_resources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--driver` or `--config` limits the findings to the resources of the driver or of the config file."""
    other = pod("other", 0, containers=[{"name": "a", "resources": {"limits": {"example.net/other": "1"}}}])
    text = dump(node("n1"), *CALM, other)
    assert run(monkeypatch, *WITHOUT, text=text) == 4
    assert run(monkeypatch, *WITHOUT, "--driver", DRIVER, "--share", "50%", text=text) == 0
    file = tmp_path / "config.yaml"
    file.write_text(f"resources: [{{name: {BOARD}, driver: {DRIVER}, devices: [path: /dev/x]}}]")
    assert run(monkeypatch, *WITHOUT, "--config", str(file), text=text) == 0
    file.write_text(f"resources: [{{name: {BOARD}, devices: [path: /dev/x]}}]")
    assert run(monkeypatch, *WITHOUT, "--config", str(file), text=text) == 2
    assert "config.yaml: no resource names a driver" in capsys.readouterr().err
    assert run(monkeypatch, *WITHOUT, "--driver", "none.example.net", text=text) == 2
    assert "give --config FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("selector", "status"), [("pool=a", 0), ("pool!=a", 4), ("pool", 0), ("!pool", 4)])
def test_a_selector_chooses_nodes(monkeypatch: pytest.MonkeyPatch, selector: str, status: int) -> None:
    """Findings are about the selected nodes and their pods only."""
    text = dump(node("n1", labels={"pool": "a"}), node("n2", "v1.31.0"), *CALM)
    assert run(monkeypatch, *WITHOUT, "-l", selector, text=text) == status


WRONG = {
    "no such code": (("--ignore", "DB999"), "DB999: no finding has this code"),
    "no such kind": (("--without", "pods"), "--without pods: no such kind; the kinds are kubelets, Node, Pod, "),
    "no node": (("-l", "pool=nope"), "--selector pool=nope: no node has these labels"),
    "no share": (("--share", "some"), "is not a share"),
    "no selector": (("-l", "a in (b)"), "is not KEY=VALUE"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_end_with_2(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong arguments are an error with status 2."""
    argv, words = WRONG[case]
    assert run(monkeypatch, *argv, text=dump(node("n1"))) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: [", "{", '{"kind": "Pod", "spec": 3}', "kind: Node\nstatus: {capacity: [1]}"])
def test_a_dump_that_is_none_is_not_read(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A text that is no dump is reported as not read, and the other dumps count."""
    file = tmp_path / "dump.json"
    file.write_text(dump(node("n1"), *CALM))
    assert run(monkeypatch, *WITHOUT, "-f", str(file), text=text) == 5
    out = capsys.readouterr().out
    assert "NOT READ: <stdin>: " in out
    assert BOARD in out
