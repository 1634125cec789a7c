"""The examples of claims, applied as they lie there to a node that serves `10-both-sides.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.bridge import Bridge, env_of
from tests.cluster.node import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
CLAIMS = sorted((EXAMPLES / "claims").glob("*.yaml"))


def resources(share: str | int) -> dict[str, Any]:
    (resource,) = yaml.safe_load((EXAMPLES / "10-both-sides.yaml").read_text())["resources"]
    return {**resource, "dra": {"share": share}}


@pytest.mark.parametrize("example", CLAIMS, ids=[path.stem for path in CLAIMS])
def test_example_runs(cluster: Cluster, example: Path) -> None:
    """What an example of claims makes starts, with a device in each container."""
    if cluster.minor < 34:
        pytest.skip("the examples are written in resource.k8s.io/v1, which came with 1.34")
    with Bridge.running(cluster, resources("all")) as bridge:
        bridge.wait_offered(8)
        objects = list(yaml.safe_load_all(example.read_text()))
        cluster.apply(objects)
        for body in objects:
            if body["kind"] == "Pod":
                pod = cluster.pod(body["metadata"]["name"]).wait_running()
                for container in body["spec"]["containers"]:
                    assert env_of(pod, container["name"])["FPGA_MODE"] == "fast"


def test_half_of_the_devices_each(cluster: Cluster) -> None:
    """The example's share of 50% gives four devices to each side."""
    with Bridge.running(cluster, resources("50%")) as bridge:
        bridge.wait_offered(4)
        cluster.wait_allocatable("example.com/fpga", 4)
