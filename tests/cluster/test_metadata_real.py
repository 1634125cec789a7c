"""Device metadata (KEP-5304) on the real node: a program in a container reads the metadata of its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.device_metadata import BY_LIMITS, DIRECTORY, VERSIONS
from tests.cluster import locks
from tests.cluster.node import Pod
from tests.cluster.test_existing_plugin_real import restart_container
from tests.cluster.test_hardware_real import holder, wait_offered
from tests.cluster.test_witnesses_real import CDI, LIMIT, Scene, resource, scene
from tests.scenarios.sides import named

__all__ = ["scene"]


def read(pod: Pod) -> tuple[str, list[dict[str, Any]]]:
    """Return the path of the only metadata file in a container, and the file's objects."""
    (path,) = pod.exec(["find", DIRECTORY, "-type", "f"]).split()
    return path, [json.loads(line) for line in pod.exec(["cat", path]).splitlines()]


def on_the_host() -> list[Path]:
    return sorted((CDI / "deviceplugin").glob("*metadata*"))


@pytest.mark.parametrize("form", ["limits", "template", "claim"])
def test_a_program_reads_what_its_device_is(scene: Scene, form: str) -> None:
    """A container has its device's metadata file, also after a restart of the agent and the container."""
    locks.make_node(locks.NODES / "a" / "a0", 1)
    by_limits = form == "limits"
    more: dict[str, Any] = {"attributes": {"model": "u280"}, "metadata": True}
    agents = scene.serve(resource("a", "none" if by_limits else "all", **more))
    wait_offered(scene, "limits" if by_limits else "claim", 1)
    assert not on_the_host()
    if form == "claim":
        pod = scene.claim_user("reader", "a")
        scene.running(pod)
    else:
        pod = holder(scene, "limits" if by_limits else "claim", "reader")
    scene.before = 1
    path, objects = read(pod)
    assert [one["apiVersion"] for one in objects] == [f"metadata.resource.k8s.io/{version}" for version in VERSIONS]
    (request,) = objects[0]["requests"]
    assert objects[1]["requests"] == [request]
    (device,) = request["devices"]
    assert (device["driver"], device["pool"]) == ("a.example.net", scene.cluster.node_name)
    assert by_limits or device["name"] in agents.offered()
    assert device["attributes"]["model"] == {"string": "u280"}
    if by_limits:
        assert path == f"{DIRECTORY}/{BY_LIMITS}/{named('a')}/{device['name']}/a.example.net-metadata.json"
    else:
        kind, claim = ("resourceclaims", "of-reader") if form == "claim" else ("resourceclaimtemplates", "device")
        assert path == f"{DIRECTORY}/{kind}/{claim}/{request['name']}/a.example.net-metadata.json"
    agents.kill()
    agents.start()
    agents.wait_registered()
    restart_container(scene, pod)
    assert read(pod) == (path, objects)
    (file,) = on_the_host()
    pod.delete()
    scene.cluster.wait_for(lambda: not locks.pids(pod.uid), LIMIT, "the container has ended")
    if by_limits:
        assert file.exists(), "it is the device's, not the pod's"
        file.unlink()
    else:
        scene.cluster.wait_for(lambda: not on_the_host(), LIMIT, "the claim's file is gone")
    scene.after = 0
