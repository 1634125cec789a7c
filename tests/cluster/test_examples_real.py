"""The examples of claims, applied to a node that serves `10-both-sides.yaml`, with only the image changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import image
from tests.cluster.bridge import Bridge, env_of
from tests.cluster.node import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
CLAIMS = sorted((EXAMPLES / "claims").glob("*.yaml"))


def resources(share: str | int) -> dict[str, Any]:
    (resource,) = yaml.safe_load((EXAMPLES / "10-both-sides.yaml").read_text())["resources"]
    return {**resource, "dra": {"share": share}}


def containers(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the containers of the pods among some objects."""
    for body in objects:
        spec = body["spec"]["template"]["spec"] if "template" in body.get("spec", {}) else body.get("spec", {})
        yield from spec.get("containers", ())


@pytest.mark.parametrize("example", CLAIMS, ids=[path.stem for path in CLAIMS])
def test_example_runs(cluster: Cluster, example: Path) -> None:
    """The pods of each claim example start, with a device in each container."""
    if cluster.minor < 34:
        pytest.skip("the examples are written in resource.k8s.io/v1, which came with 1.34")
    with Bridge.running(cluster, resources("all")) as bridge:
        bridge.wait_offered(8)
        objects = list(yaml.safe_load_all(example.read_text()))
        for container in containers(objects):
            container["image"] = image.IMAGE  # no image can be pulled here
        cluster.api.apply(objects)
        for body in objects:
            if body["kind"] == "Pod":
                pod = cluster.pod(body["metadata"]["name"]).wait_running()
                for container in body["spec"]["containers"]:
                    assert env_of(pod, container["name"])["FPGA_MODE"] == "fast"


def test_half_of_the_devices_each(cluster: Cluster) -> None:
    """With `share: 50%` in the example, four devices are for limits and four for claims."""
    with Bridge.running(cluster, resources("50%")) as bridge:
        bridge.wait_offered(4)
        cluster.wait_allocatable("example.com/fpga", 4)
