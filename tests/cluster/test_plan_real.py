"""What `dra-bridge plan` finds on the real API server: each finding where it is, and none where all is well."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_bridge.plan.findings import FindingKind
from tests.cluster.api import ApiError
from tests.cluster.node import Cluster
from tests.dra.plan.cases import BOARD, CALM, CASES, COUNT, DRIVER, Case, Object

CLUSTER_WIDE = ("Node", "PriorityClass", "DeviceClass", "ResourceSlice", "Namespace")


def plan(cluster: Cluster, *arguments: str, access: Path | None = None) -> dict[str, Any]:
    """Run the command on the cluster; return what it printed as JSON, with its status."""
    command = [sys.executable, "-m", "dra_bridge", "plan", "-o", "json", *arguments]
    command += ["--kubeconfig", str(access or cluster.kubeconfig)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 3, 4, 5), done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


def codes(found: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in found["findings"]}


def make(cluster: Cluster, body: Object) -> Object:
    """Create an object, and give it its status."""
    status = body.get("status")
    made = cluster.api.create({key: value for key, value in body.items() if key != "status"})
    if status is not None:
        name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "default")
        cluster.api.patch(body["kind"], name, {"status": status}, namespace, "status", body["apiVersion"])
    return made


def remove(cluster: Cluster, body: Object) -> None:
    with contextlib.suppress(ApiError):
        namespace = body["metadata"].get("namespace", "default")
        grace = 0 if body["kind"] == "Pod" else None
        cluster.api.delete(body["kind"], body["metadata"]["name"], namespace, body["apiVersion"], grace)


def offer(cluster: Cluster, count: int | None) -> None:
    """Have the node offer boards, as an administrator may without any plugin, or no more (None)."""
    value = None if count is None else str(count)
    body = {"status": {"capacity": {BOARD: value}, "allocatable": {BOARD: value}}}
    cluster.api.patch("node", cluster.node_name, body, "default", "status")


@pytest.fixture
def calm(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in which nothing is found."""
    if cluster.minor < 36:
        pytest.skip("unchanged pods through DRA, without which there are findings, came with 1.36")
    with offering(cluster):
        yield cluster


@contextlib.contextmanager
def offering(cluster: Cluster) -> Iterator[None]:
    offer(cluster, COUNT)
    for body in CALM:
        make(cluster, body)
    try:
        cluster.wait_allocatable(BOARD, COUNT)
        yield
    finally:
        for body in CALM:
            remove(cluster, body)
        offer(cluster, None)


def test_nothing_is_found_where_all_is_well(calm: Cluster) -> None:
    """All is read, the kubelet's configuration included, and the status is 0."""
    found = plan(calm)
    assert (found["findings"], found["unread"], found["status"]) == ([], [], 0)
    (use,) = found["resources"]
    assert (use["resource"], use["driver"], use["capacity"]) == (BOARD, DRIVER, COUNT)
    assert use["unchangedPodsThroughDRA"] is True


@pytest.mark.parametrize("case", CASES, ids=[case.kind.name for case in CASES])
def test_each_finding_is_found(calm: Cluster, case: Case) -> None:
    """The objects that show it, as the API server keeps them, give the finding, and nothing else gave it before."""
    assert case.kind.code not in codes(plan(calm, *case.arguments))
    made: list[Object] = []
    try:
        for body in case.objects:
            made.append(body)
            make(calm, body)
        found = plan(calm, *case.arguments)
        said = [f"{one['object']} {one['reason']}" for one in found["findings"] if one["code"] == case.kind.code]
        assert any(case.words in text for text in said), found
        assert (
            found["status"] in ({"blocker": {4}, "warning": {3, 4, 5}, "note": {0, 3, 4, 5}}[case.kind.severity.value])
        )
    finally:
        for body in reversed(made):
            remove(calm, body)


def test_the_topology_manager_is_found(make_cluster: Callable[..., Cluster]) -> None:
    """The kubelet's own configuration says its policy."""
    cluster = make_cluster(kubelet_config={"topologyManagerPolicy": "best-effort"})
    if cluster.minor < 36:
        pytest.skip("there are other findings before 1.36")
    with offering(cluster):
        (finding,) = plan(cluster)["findings"]
    assert finding["code"] == FindingKind.TOPOLOGY_MANAGER.code
    assert finding["object"] == "topologyManagerPolicy best-effort"


def test_rights_that_lack_are_said(calm: Cluster) -> None:
    """Who may read but not patch is warned; who may not read is told what was not read, and gets no 0."""
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}]
    subject = {"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
    head = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    role = {**head, "kind": "ClusterRole", "metadata": {"name": "reader"}, "rules": rules}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"}
    binding = {
        **head,
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": reference,
        "subjects": [subject],
    }
    access = calm.kubeconfig_for("reader")
    found = plan(calm, access=access)
    assert found["status"] == 5
    assert {one["what"] for one in found["unread"]} >= {"nodes", "pods", "deviceclasses", "resourceslices"}
    try:
        make(calm, role)
        make(calm, binding)
        calm.wait_for(lambda: plan(calm, access=access)["status"] == 3, 30, "the role is in force")
        found = plan(calm, access=access)
        assert found["unread"] == []
        (finding,) = found["findings"]
        assert (finding["code"], finding["reason"]) == (FindingKind.OPERATOR_RIGHTS.code, "may not patch nodes")
    finally:
        remove(calm, binding)
        remove(calm, role)


def test_dumps_say_what_the_cluster_says(calm: Cluster, tmp_path: Path) -> None:
    """What kubectl dumps in JSON and in YAML gives the same findings and numbers as the API server."""
    kinds = "nodes,pods,deviceclasses,resourceslices,resourceclaims,resourceclaimtemplates,resourcequotas,"
    kinds += "priorityclasses,daemonsets,clusterroles,clusterrolebindings"
    case = next(case for case in CASES if case.kind is FindingKind.RESTART_ENDS)
    try:
        for body in case.objects:
            make(calm, body)
        expected = plan(calm)
        for style in ("json", "yaml"):
            file = tmp_path / f"dump.{style}"
            file.write_text(calm.kubectl("get", kinds, "-A", "-o", style))
            found = plan(calm, "-f", str(file))
            assert found["findings"] == expected["findings"]
            assert found["resources"] == expected["resources"]
    finally:
        for body in reversed(case.objects):
            remove(calm, body)
