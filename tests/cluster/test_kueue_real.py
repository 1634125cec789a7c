"""Kueue counts devices by limits and by claims in one quota, with the configuration of `manifests --kueue`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deviceplugin.config import parse
from dra_bridge.manifests import Deployment, manifests
from tests.cluster import image, kueue
from tests.cluster.bridge import Bridge
from tests.cluster.conftest import Shared
from tests.cluster.kueue import Kueue
from tests.cluster.node import Cluster

RESOURCE, DRIVER = "example.net/slot", "slot.example.net"
SERVED: dict[str, Any] = {"name": RESOURCE, "driver": DRIVER, "devices": [{"simulated": {"count": 4}}]}
QUOTA = 2


def configuration() -> dict[str, Any]:
    """Return Kueue's configuration from the output of `manifests --kueue`."""
    text = yaml.safe_dump({"resources": [SERVED]})
    objects = manifests(parse(text), text, Deployment(kueue=True))
    (found,) = (one for one in objects if one["metadata"]["name"] == "dra-bridge-kueue")
    return dict(yaml.safe_load(found["data"]["controller_manager_config.yaml"]))


@pytest.fixture
def kueued(shared_cluster: Shared) -> Iterator[tuple[Cluster, Kueue]]:
    """A cluster with Kueue, and a quota of two devices."""
    if reason := kueue.missing():
        pytest.skip(reason)
    shared_cluster.stop()
    with Cluster() as cluster:
        if cluster.minor < 34:
            pytest.skip("Kueue 0.19 reads resource.k8s.io/v1, of 1.34")
        with Kueue.running(cluster, configuration(), {RESOURCE: QUOTA}) as running:
            yield cluster, running


def pod(claim: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the spec of a pod with one device: by limits, or by this claim."""
    main: dict[str, Any] = {"name": "main", "image": image.IMAGE, "imagePullPolicy": "Never"}
    main["command"] = ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep 2147483647 & wait"]
    main["resources"] = {"limits": {RESOURCE: "1"}} if claim is None else {"claims": [{"name": "device"}]}
    claims = {} if claim is None else {"resourceClaims": [{"name": "device", **claim}]}
    return {"containers": [main], "terminationGracePeriodSeconds": 1, **claims}


def until_it_runs(cluster: Cluster, job: str) -> None:
    """Wait until the pod of a job runs."""

    def runs() -> bool:
        return any(one.phase == "Running" for one in cluster.pods("default", f"job-name={job}"))

    cluster.wait_for(runs, 120, f"{job} runs")


def why_it_waits(cluster: Cluster, queue: Kueue, job: str) -> str:
    """Wait until Kueue has judged a job; return Kueue's reason for no admission, "" for an admitted job."""
    cluster.wait_for(lambda: queue.condition(job, "QuotaReserved")[0], 60, f"{job} is judged")
    status, message = queue.condition(job, "QuotaReserved")
    return message if status == "False" else ""


def test_limits_and_claims_share_one_quota(kueued: tuple[Cluster, Kueue]) -> None:
    """Jobs by limits and by claim share one quota: a job above the quota waits until another job ends."""
    cluster, queue = kueued
    template = {"resourceClaimTemplateName": "one"}
    with Bridge.running(cluster, {**SERVED, "dra": {"share": 2}}) as bridge:
        bridge.wait_offered(2)
        cluster.wait_for(lambda: cluster.allocatable(RESOURCE) == 2, 60, "two devices are on the plugin side")
        bridge.template("one")
        queue.job("by-limits", pod())
        queue.job("by-claim", pod(template))
        for job in ("by-limits", "by-claim"):
            until_it_runs(cluster, job)
        waiting = ("claim-too-many", "limit-too-many")
        queue.job(waiting[0], pod(template))
        queue.job(waiting[1], pod())
        for job in waiting:
            assert f"insufficient unused quota for {RESOURCE}" in why_it_waits(cluster, queue, job)
            assert not queue.admitted(job)
            assert not cluster.pods("default", f"job-name={job}")
        cluster.api.delete("Job", "by-limits")
        cluster.wait_for(lambda: any(map(queue.admitted, waiting)), 120, "a waiting job is admitted")
        assert not all(map(queue.admitted, waiting))  # either job may be admitted: both were created in the same second
        cluster.api.delete("Job", "by-claim")
        for job in waiting:
            until_it_runs(cluster, job)
        # Kueue does not admit a job with a named ResourceClaim, which several pods may share.
        bridge.claim("named")
        queue.job("by-name", pod({"resourceClaimName": "named"}))
        assert "does not support use of resource claims" in why_it_waits(cluster, queue, "by-name")


def test_a_claim_with_selectors_waits_until_devices_are_published(kueued: tuple[Cluster, Kueue]) -> None:
    """With `share: none`, a job whose claim has selectors waits, and is admitted when slices have devices.

    A job whose claim has no selectors is admitted at once.
    """
    cluster, queue = kueued
    template = {"resourceClaimTemplateName": "selecting"}
    with Bridge.running(cluster, {**SERVED, "dra": {"share": "none"}}) as bridge:
        cel = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        bridge.template("selecting", bridge.one(selectors=[cel]))
        bridge.template("plain")
        queue.job("selecting", pod(template))
        queue.job("plain", pod({"resourceClaimTemplateName": "plain"}))
        cluster.wait_for(lambda: queue.admitted("plain"), 60, "the job without selectors is admitted")
        cluster.wait_for(lambda: "insufficient matching devices" in log(cluster), 60, "Kueue says why the other waits")
        print(queue.workload("selecting").get("status"))
        assert not queue.admitted("selecting")
        bridge.share(2)
        bridge.wait_offered(2)
        cluster.wait_for(lambda: queue.admitted("selecting"), 120, "it is admitted when devices are published")
        until_it_runs(cluster, "selecting")


def log(cluster: Cluster) -> str:
    return (cluster.logs / "kueue.log").read_text(errors="replace")
