"""examples/own-plugin on the real node: its image is built by its Dockerfile, and installed as its page describes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster import image, isolate
from tests.cluster.bridge import env_of
from tests.cluster.node import Cluster, remove_ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-plugin"
IMAGE = "localhost/toys:1"
TOY, CLASS = "example.com/toy", "toy.example.com"


def test_the_example_of_an_own_plugin(node: Cluster, archive: Path, tmp_path: Path) -> None:
    """A pod by limits, and a pod by a claim with parameters, get a device from the DaemonSet of `manifests`."""
    if node.minor < 34:
        pytest.skip("the example is installed with resource.k8s.io/v1, which came with 1.34")
    image.write_derived(archive, tmp_path / "toys.tar", EXAMPLE, IMAGE)
    node.import_image(tmp_path / "toys.tar")
    command = yaml.safe_load((EXAMPLE / "values.yaml").read_text())["command"]
    printing = [sys.executable, "-m", "dra_bridge", "manifests", "--source", str(EXAMPLE / "toys.py"), "--image", IMAGE]
    printing += ["--command", " ".join(command), "--cgroup-root", str(isolate.POD_CGROUPS)]
    printed = tmp_path / "toys.yaml"
    with printed.open("wb") as file:
        subprocess.run(printing, check=True, stdin=subprocess.DEVNULL, stdout=file)
    node.kubectl("apply", "-f", str(printed))
    try:
        node.wait_allocatable(TOY, 1, 120)
        config = [{"opaque": {"driver": CLASS, "parameters": {"mode": "fast"}}}]
        request = {"name": "toy", "exactly": {"deviceClassName": CLASS}}
        spec = {"devices": {"requests": [request], "config": config}}
        metadata = {"name": "toy", "namespace": "default"}
        node.api.apply(
            {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata, "spec": spec}
        )
        by_limits = node.start_pod("plain", {TOY: 1}).wait_running()
        by_claim = node.start_pod("user", claims={"toy": "toy"}).wait_running()
        found = [env_of(pod) for pod in (by_limits, by_claim)]
        assert {one["TOYS"] for one in found} == {"full", "zero"}
        assert [one.get("TOY_MODE") for one in found] == [None, "fast"]
        for pod, name in ((by_limits, found[0]["TOYS"]), (by_claim, found[1]["TOYS"])):
            pod.exec(["head", "-c", "1", f"/dev/{name}"])
    finally:
        for pod in node.pods("default"):
            pod.delete()
        for pod in node.pods("default"):
            pod.wait_gone()
        for pod in node.pods("dra-bridge"):
            print(pod.logs())
        node.api.delete("DaemonSet", "dra-bridge", "dra-bridge")
        node.wait_for(lambda: not node.pods("dra-bridge"), 120, "the agent's pod is gone")
        node.wait_for(lambda: not node.allocatable(TOY), 60, "nothing is allocatable")
        remove_ledger()
