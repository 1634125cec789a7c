"""`dra-bridge plan` on the real API server reports each finding if its cause exists, and only then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dra_bridge import cli
from dra_bridge.plan.findings import FindingKind, Severity
from tests.cluster.api import ApiError
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster
from tests.dra.conftest import read_here
from tests.dra.plan.cases import BOARD, CALM, CASES, COUNT, DRIVER, Object

__all__ = ["read_here"]

Plan = Callable[..., dict[str, Any]]
NAME = "example.net/former"


@pytest.fixture
def plan(read_here: None, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that runs `plan` in this process, and returns its JSON output with the exit status."""

    def run(cluster: Cluster, *arguments: str, access: Path | None = None) -> dict[str, Any]:
        capsys.readouterr()
        status = cli.main(["plan", "-o", "json", *arguments, "--kubeconfig", str(access or cluster.kubeconfig)])
        out, error = capsys.readouterr()
        assert status in (0, 3, 4, 5), error
        return {**json.loads(out), "status": status}

    return run


def codes(found: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in found["findings"]}


def created(cluster: Cluster, body: Object) -> Object | None:
    """Create an object; return None if the API server does not know its PriorityClass or namespace yet."""
    try:
        return cluster.api.create(body)
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        return None


def make(cluster: Cluster, body: Object) -> None:
    """Create an object, and write its status."""
    status = body.get("status")
    without = {key: value for key, value in body.items() if key != "status"}
    for pod in (status or {}).get("reservedFor", ()):
        # The controller removes the reservation of a pod with another UID.
        pod["uid"] = cluster.api.get("pod", pod["name"])["metadata"]["uid"]
    cluster.wait_for(lambda: created(cluster, without), 30, f"{body['kind']} {body['metadata']['name']}")
    if status is not None:
        name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "default")
        cluster.api.patch(body["kind"], name, {"status": status}, namespace, "status", body["apiVersion"])


def remove(cluster: Cluster, body: Object) -> None:
    with contextlib.suppress(ApiError):
        namespace = body["metadata"].get("namespace", "default")
        grace = 0 if body["kind"] == "Pod" else None
        cluster.api.delete(body["kind"], body["metadata"]["name"], namespace, body["apiVersion"], grace)


def offer(cluster: Cluster, count: int | None) -> None:
    """Set capacity and allocatable of the boards' resource in the Node's status, without plugin; None removes both."""
    value = None if count is None else str(count)
    body = {"status": {"capacity": {BOARD: value}, "allocatable": {BOARD: value}}}
    cluster.api.patch("node", cluster.node_name, body, "default", "status")


@pytest.fixture
def calm(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in which `plan` has no findings."""
    if cluster.minor < 36:
        pytest.skip("unchanged pods through DRA, without which there are findings, came with 1.36")
    with offering(cluster):
        yield cluster


@contextlib.contextmanager
def offering(cluster: Cluster) -> Iterator[None]:
    cluster.restart_kubelet(reported=True)  # The new kubelet reports 0 for resources of other tests.
    offer(cluster, COUNT)
    for body in CALM:
        make(cluster, body)
    try:
        cluster.wait_for(lambda: cluster.allocatable(BOARD) == COUNT, 30.0, f"{BOARD} is offered")
        yield
    finally:
        for body in CALM:
            remove(cluster, body)
        offer(cluster, None)


def test_a_former_plugin_is_not_found(cluster: Cluster, plan: Plan) -> None:
    """`plan` lists an ended plugin's resource while the Node's capacity of the resource is above 0, and not at 0."""
    if cluster.minor < 36:
        pytest.skip("there are other findings before 1.36")
    resource = {"name": NAME, "driver": "former.example.net", "devices": [{"simulated": {"count": 2}}]}
    with Bridge.running(cluster, {**resource, "dra": {"share": "none"}}):
        cluster.wait_allocatable(NAME, 2)
    cluster.wait_allocatable(NAME, 0)
    assert cluster.capacity(NAME) == 2
    uses = {use["resource"]: (use["capacity"], use["allocatable"]) for use in plan(cluster)["resources"]}
    assert uses[NAME] == (2, 0)
    with offering(cluster):
        assert cluster.node()["status"]["capacity"][NAME] == "0"
        assert [one["resource"] for one in plan(cluster)["resources"]] == [BOARD]


def test_nothing_is_found_where_all_is_well(calm: Cluster, plan: Plan) -> None:
    """`plan` reads all objects and the kubelet's configuration, has no findings, and exits with 0."""
    found = plan(calm)
    assert (found["findings"], found["unread"], found["status"]) == ([], [], 0)
    (use,) = found["resources"]
    assert (use["resource"], use["driver"], use["capacity"]) == (BOARD, DRIVER, COUNT)
    assert use["unchangedPodsThroughDRA"] is True


STATUSES = {Severity.BLOCKER: {4}, Severity.WARNING: {3, 4, 5}, Severity.NOTE: {0, 3, 4, 5}}


def test_each_finding_is_found(calm: Cluster, plan: Plan) -> None:
    """`plan` reports each finding when the finding's objects exist, and not after these objects were deleted."""
    wrong: dict[str, Any] = {}
    for case in CASES:
        made: list[Object] = []
        try:
            for body in case.objects:
                made.append(body)
                make(calm, body)
            found = plan(calm, *case.arguments)
            said = [f"{one['object']} {one['reason']}" for one in found["findings"] if one["code"] == case.kind.code]
            if not any(case.words in text for text in said) or found["status"] not in STATUSES[case.kind.severity]:
                wrong[case.kind.name] = found
        finally:
            for body in reversed(made):
                remove(calm, body)
        calm.wait_for(lambda: not left(calm, made), 60, f"the objects of {case.kind.name} are gone")  # noqa: B023
        if case.kind.code in codes(plan(calm, *case.arguments)):
            wrong[f"{case.kind.name}, when its objects are gone"] = plan(calm, *case.arguments)
    assert wrong == {}


def left(cluster: Cluster, bodies: Sequence[Object]) -> list[str]:
    """Return the objects that still exist, without namespaces, which end much later and do no harm."""
    found = []
    for body in bodies:
        with contextlib.suppress(ApiError):
            metadata = body["metadata"]
            cluster.api.get(body["kind"], metadata["name"], metadata.get("namespace", "default"), body["apiVersion"])
            found.append(f"{body['kind']} {metadata['name']}")
    return [one for one in found if not one.startswith("Namespace")]


def test_the_topology_manager_is_found(make_cluster: Callable[..., Cluster], plan: Plan) -> None:
    """`plan` reports a topology manager policy in the kubelet's configuration as the only finding."""
    cluster = make_cluster(kubelet_config={"topologyManagerPolicy": "best-effort"})
    if cluster.minor < 36:
        pytest.skip("there are other findings before 1.36")
    with offering(cluster):
        (finding,) = plan(cluster)["findings"]
    assert finding["code"] == FindingKind.TOPOLOGY_MANAGER.code
    assert finding["object"] == "topologyManagerPolicy best-effort"


def test_rights_that_lack_are_said(calm: Cluster, plan: Plan) -> None:
    """For a user without rights, `plan` lists the kinds that it cannot read; a user with only read rights is warned."""
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


def test_dumps_say_what_the_cluster_says(calm: Cluster, plan: Plan, tmp_path: Path) -> None:
    """`plan` on a dump that kubectl wrote, in JSON or YAML, has the same findings and numbers as on the API server."""
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
