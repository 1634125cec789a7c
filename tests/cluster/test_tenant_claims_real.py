"""Claims of an unprivileged tenant that are large, many or malformed do not stop the moves of devices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import pytest

from deviceplugin.config.types import Config, ResourceConfig
from dra_bridge.kube import FOR_LIMITS
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.wire import objects_pb2 as pb
from tests.cluster.api import Api
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster
from tests.cluster.test_handover import RESOURCE, serving_cards
from tests.scenarios.sides import LONG

TENANT: Final = "tenant"
MANY: Final = 200
WEIGHT: Final = 500_000
"""Bytes of one heavy claim; etcd accepts 1.5 MiB."""


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    with serving_cards(cluster) as running:
        yield running


@contextmanager
def tenant(bridge: Bridge) -> Iterator[Api]:
    """A client of a user who may create claims in one namespace. At the end, the claims are deleted."""
    cluster = bridge.cluster
    place = {"name": TENANT, "namespace": TENANT}
    rule = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["create"]}
    group = "rbac.authorization.k8s.io"
    cluster.api.apply(
        [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": place},
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": place, "rules": [rule]},
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": place,
                "roleRef": {"apiGroup": group, "kind": "Role", "name": TENANT},
                "subjects": [{"kind": "ServiceAccount", **place}],
            },
        ]
    )
    try:
        yield cluster.api_with_token(cluster.service_account_token(TENANT, TENANT))
    finally:
        answer = b""
        while b'"items":[]' not in answer:  # the answer is not decoded, as parameters may nest too deep
            code, answer = cluster.api.raw("DELETE", claims_path(bridge) + "?limit=1000")
            assert code == 200, answer[:500]


def claims_path(bridge: Bridge) -> str:
    return f"/apis/{bridge.api_version}/namespaces/{TENANT}/resourceclaims"


def claim(bridge: Bridge, name: str, annotation: str = "", parameters: str = "{}", times: int = 1) -> bytes:
    """Return a claim that no device fits, as JSON."""
    opaque = {"opaque": {"driver": "none.example.com", "parameters": {}}}
    spec = bridge.claim_spec(
        {"name": "none", "exactly": {"deviceClassName": "none.example.com"}}, config=[opaque] * times
    )
    metadata = {"name": name, "annotations": {"note": annotation}}
    body = {"apiVersion": bridge.api_version, "kind": "ResourceClaim", "metadata": metadata, "spec": spec}
    return json.dumps(body).replace('"parameters": {}', f'"parameters": {parameters}').encode()


def heavy(bridge: Bridge, api: Api) -> None:
    """Make 200 claims of about WEIGHT bytes; JSON encodes each < of their annotations in six bytes."""
    text = "<" * 170_000
    parameters = json.dumps({"text": "x" * 10_200})

    def make(number: int) -> None:
        made(api, claims_path(bridge), claim(bridge, f"heavy-{number}", text, parameters, 32))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(MANY)))


def ordinary(bridge: Bridge, api: Api) -> None:
    """Make 3,000 small claims; with CLUSTER_LONG 30,000, as many as large clusters have."""
    note, names = "x" * 1_500, (f"ordinary-{number}" for number in range(30_000 if LONG else 3_000))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: made(api, claims_path(bridge), claim(bridge, name, note)), names))


def deep(bridge: Bridge, api: Api) -> None:
    """Make a claim whose parameters nest deeper than Python's JSON decoder can decode."""
    made(api, claims_path(bridge), claim(bridge, "deep", parameters='{"a":' + "[" * 4000 + "]" * 4000 + "}"))


def letters(bridge: Bridge, api: Api) -> None:
    """Make a claim whose annotation is not UTF-8, which is possible only in protobuf."""
    code, template = api.raw(
        "POST",
        claims_path(bridge) + "?dryRun=All",
        claim(bridge, "letters", "note"),
        {"Content-Type": "application/json", "Accept": "application/vnd.kubernetes.protobuf"},
    )
    assert code == 201, template
    envelope = pb.Envelope.FromString(template[4:])
    body = pb.Claim.FromString(envelope.raw)
    body.metadata.annotations[0].value = b"\xff\xfe"
    envelope.raw = body.SerializeToString()
    made(api, claims_path(bridge), b"k8s\0" + envelope.SerializeToString(), "application/vnd.kubernetes.protobuf")


def made(api: Api, path: str, body: bytes, content_type: str = "application/json") -> None:
    code, answer = api.raw("POST", path, body, {"Content-Type": content_type})
    assert code == 201, answer[:500]


def highest(bridge: Bridge) -> int:
    """Return the agent's peak resident memory in MiB."""
    assert bridge.process is not None
    with open(f"/proc/{bridge.process.pid}/status") as status:
        return int(re.findall(r"VmHWM:\s+(\d+)", status.read())[0]) // 1024


@pytest.mark.parametrize("make", [heavy, ordinary, deep, letters])
def test_devices_return_to_the_plugin_side_beside_claims_of_a_tenant(
    bridge: Bridge, make: Callable[[Bridge, Api], None]
) -> None:
    """Devices still move back from DRA after a tenant has made such claims, and the agent logs no lost API server.

    The agent's peak memory grows by less than 64 MiB.
    """
    bridge.share("all")
    bridge.wait_offered(8)
    bridge.cluster.wait_allocatable(RESOURCE, 0)
    before = highest(bridge)
    with tenant(bridge) as api:
        make(bridge, api)
        bridge.share("none")
        bridge.cluster.wait_allocatable(RESOURCE, 8, timeout=60)
        print(f"highest resident memory before and after: {before} and {highest(bridge)} MiB")
        assert "is lost" not in bridge.log()
        assert highest(bridge) - before < 64


def test_only_a_scheduler_marks_a_claim_as_made_for_limits(bridge: Bridge) -> None:
    """With the policy, a tenant cannot make a claim with the scheduler's annotation, and the scheduler can."""
    cluster, driver = bridge.cluster, ResourceConfig(name=RESOURCE, driver="dra.example.com", devices=())
    installed = manifests(Config(resources=(driver,)), "", Deployment(name="policy"))
    policy = [one for one in installed if one["metadata"]["name"] == "policy-claims-for-limits"]
    assert [one["kind"] for one in policy] == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    body = json.loads(claim(bridge, "marked"))
    body["metadata"] |= {"namespace": TENANT, "annotations": {FOR_LIMITS: "true"}}

    def refused(api: Api) -> bool:
        code, answer = api.raw("POST", claims_path(bridge) + "?dryRun=All", json.dumps(body).encode())
        return code != 201 and b"only a scheduler may set the annotation" in answer

    cluster.api.apply(policy)
    try:
        with tenant(bridge) as api:
            cluster.wait_for(lambda: refused(api), 30, "the policy is in force")
            made(api, claims_path(bridge), claim(bridge, "plain"))
            patch = json.dumps({"metadata": {"annotations": {FOR_LIMITS: "true"}}}).encode()
            kind = {"Content-Type": "application/merge-patch+json"}
            code, answer = cluster.api.raw("PATCH", f"{claims_path(bridge)}/plain?dryRun=All", patch, kind)
            assert code == 200, f"an administrator may bind pods, so the policy lets him: {answer!r}"
        if cluster.minor >= 35:
            bridge.share("all")
            bridge.wait_offered(8)
            cluster.start_pod("by-limits", {RESOURCE: 1}).wait_running(60)
    finally:
        for one in policy:
            cluster.api.delete(one["kind"], one["metadata"]["name"])
