"""Quotas of a tenant that changes from limits to claims, on the real API server.

The quota key `requests.NAME` counts claims since Kubernetes 1.35 if the feature gate DRAExtendedResource is on, which
is the default from 1.36 (1.35.4, pkg/quota/v1/evaluator/core/resource_claims.go). In 1.34 the key counts no claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deviceplugin.config import parse
from dra_bridge.manifests import Deployment, manifests
from tests.cluster import build
from tests.cluster.api import ApiError, Object
from tests.cluster.node import Cluster

RESOURCE, DRIVER, TEAM = "example.net/slot", "slot.example.net", "team"
CONFIG = f"resources: [{{name: {RESOURCE}, driver: {DRIVER}, devices: [path: /dev/x]}}]"
QUOTA = 2


GATE = "DRAExtendedResource"


@pytest.fixture(params=[True, False], ids=[f"{GATE} on", f"{GATE} off"])
def gate(request: pytest.FixtureRequest) -> bool:
    """Whether the feature gate is on."""
    return bool(request.param)


@pytest.fixture
def team(make_cluster: Callable[..., Cluster], gate: bool) -> Iterator[Cluster]:
    """A cluster with the namespace `team`, in which the quota of `manifests --quota 2 --tenant team` is in force."""
    minor = int(build.default_version().split(".")[1])
    if minor < 34:
        pytest.skip("extended resources through DRA came with 1.34")
    if minor > 35 and not gate:
        pytest.skip(f"{GATE} is on by default from 1.36, and cannot be off from 1.37")
    cluster = make_cluster(feature_gates=None if gate else {GATE: False})
    how = Deployment(quota=QUOTA, tenants=(TEAM,), kubernetes=cluster.minor)
    wanted = [one for one in manifests(parse(CONFIG), CONFIG, how) if one["kind"] in ("DeviceClass", "ResourceQuota")]
    api = cluster.api
    api.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}, *wanted])
    (quota,) = (one for one in wanted if one["kind"] == "ResourceQuota")
    hard = quota["spec"]["hard"]
    assert len(hard) == (1 if cluster.minor >= 36 else 2)
    cluster.wait_for(lambda: counted(cluster).keys() == hard.keys(), 60, "the quota is in force")
    cluster.wait_for(lambda: api.list("ServiceAccount", TEAM), 60, "pods can be made")
    yield cluster
    api.delete("Namespace", TEAM)
    api.delete("DeviceClass", DRIVER)


def counted(cluster: Cluster) -> dict[str, str]:
    """Return the quota's present usage, by key."""
    return dict(cluster.api.get("ResourceQuota", "dra-bridge-devices", TEAM).get("status", {}).get("used") or {})


def pod(name: str) -> Object:
    container = {"name": "main", "image": "none", "resources": {"limits": {RESOURCE: "1"}}}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": TEAM}, "spec": spec}


def claim(name: str) -> Object:
    requests = [{"name": "one", "exactly": {"deviceClassName": DRIVER}}]
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
    return {**kind, "metadata": {"name": name, "namespace": TEAM}, "spec": {"devices": {"requests": requests}}}


def refused(cluster: Cluster, body: Object) -> str:
    """Create an object; return the message if it is forbidden, else ""."""
    try:
        cluster.api.create(body, TEAM)
    except ApiError as error:
        if error.code != 403:
            raise
        return error.message
    return ""


def test_a_tenant_stays_limited_over_the_way_from_limits_to_claims(team: Cluster, gate: bool) -> None:
    """From 1.35, with the gate, a quota limits the sum of devices by limits and claims; otherwise each number alone."""
    assert [refused(team, pod(f"pod-{number}")) for number in range(QUOTA)] == [""] * QUOTA
    assert "exceeded quota: dra-bridge-devices" in refused(team, pod("one-too-many"))
    if team.minor >= 35 and gate:
        assert f"requests.{RESOURCE}=1" in refused(team, claim("too-early"))
        team.api.delete("Pod", "pod-0", TEAM, grace=0)
        team.wait_for(lambda: refused(team, claim("first")) == "", 60, "the pod's device is free for a claim")
        assert "exceeded quota" in refused(team, pod("pod-0"))
    else:
        assert [refused(team, claim(f"claim-{number}")) for number in range(QUOTA)] == [""] * QUOTA
        print(f"counted apart: {counted(team)}")
    assert "exceeded quota" in refused(team, claim("one-too-many"))
    assert "exceeded quota" in refused(team, pod("one-too-many"))
