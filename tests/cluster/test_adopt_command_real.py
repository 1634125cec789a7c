"""`dra-bridge adopt` on the real node: the commands that it prints adopt a vendor's DaemonSet, and give it back."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import isolate
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_daemonset_real import (
    BOARDS,
    COUNT,
    DRIVER,
    IMAGES,
    PATIENCE,
    RESOURCE,
    Deployed,
    deployment,
    held_by,
    ready,
)

DIRECTORY = isolate.DEVICES / "plugins"
"""The directory in which plugins register with the agent, instead of the default in /run, which the host uses."""
VENDOR = "vendor"
NODES = Path("/dev/boards")
"""The directory of the plugin's device nodes; an agent in a container must see the nodes to serve claims."""


class Adopting(Deployed):
    """The agent's DaemonSet, which adopts the plugin of the resource."""

    def edited(self, printed: str) -> str:
        """Return the manifests with DIRECTORY in place of the default directory for plugins."""
        assert "/run/deviceplugin/plugins" in printed
        return printed.replace("/run/deviceplugin/plugins", str(DIRECTORY))

    def adopt(self, *options: str) -> tuple[int, list[str], str]:
        """Run `dra-bridge adopt`; return its exit status, the kubectl commands that it prints, and its output."""
        status, said = self.cli("adopt", "gadgets", "-n", VENDOR, *options)
        return status, [line for line in said.splitlines() if line.startswith("kubectl ")], said

    def run(self, commands: list[str]) -> None:
        """Run these kubectl commands."""
        for command in commands:
            self.cluster.kubectl(*shlex.split(command)[1:])


def vendor_objects(cluster: Cluster) -> list[dict[str, object]]:
    """Return a vendor's DaemonSet, whose plugin registers with the kubelet, with its Namespace and ConfigMap."""
    answer = {"nodes": [[f"{NODES}/{{id}}", f"{BOARDS}/{{id}}", "rw"]]}
    devices = {f"board{number}": "Healthy" for number in range(COUNT)}
    file = json.dumps({"resources": [{"name": RESOURCE, "devices": devices, "answer": answer}]})
    labels = {"app": "gadgets"}
    container = {
        "name": "plugin",
        "image": IMAGES[0],
        "command": ["python", "-m", "deviceplugin.testing.foreign", "/etc/vendor/vendor.json"],
        "volumeMounts": [
            {"name": "file", "mountPath": "/etc/vendor"},
            {"name": "device-plugin", "mountPath": "/var/lib/kubelet/device-plugins"},
        ],
    }
    volumes = [
        {"name": "file", "configMap": {"name": "gadgets"}},
        {"name": "device-plugin", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}},
    ]
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    spec = {"selector": {"matchLabels": labels}, "template": pod, "updateStrategy": strategy}
    metadata = {"name": "gadgets", "namespace": VENDOR}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": VENDOR}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"vendor.json": file}},
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec},
    ]


@pytest.fixture
def adopting(node: Cluster) -> Iterator[Adopting]:
    """A vendor's DaemonSet that serves four devices, and agents that can adopt its plugin."""
    NODES.mkdir()
    for number in range(COUNT):
        os.mknod(NODES / f"board{number}", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    node.api.apply(vendor_objects(node))
    try:
        node.wait_allocatable(RESOURCE, COUNT, PATIENCE)
        with deployment(Adopting, node, [os.makedev(1, 5)] * COUNT, devices=[{"plugin": {"claims": True}}]) as made:
            yield made
            for pod in node.pods(VENDOR):
                print(f"--- {pod}\n{pod.logs()}")
            node.api.delete("DaemonSet", "gadgets", VENDOR)
            node.wait_for(lambda: not node.pods(VENDOR), PATIENCE, "the plugin is gone")
    finally:
        for one in (DIRECTORY, NODES):
            shutil.rmtree(one, ignore_errors=True)


def vendor_pod(node: Cluster, other_than: str = "") -> Pod:
    """Wait until the plugin has just one pod, which is ready; return it. other_than: the UID of a former pod."""

    def one() -> Pod | None:
        (pod,) = found if len(found := node.pods(VENDOR)) == 1 else (None,)
        return pod if pod is not None and pod.uid != other_than and ready(pod) else None

    pod = node.wait_for(one, PATIENCE, "the plugin's pod is there", log="kubelet")
    assert pod is not None
    return pod


def test_a_daemonset_is_adopted_and_given_back(adopting: Adopting) -> None:
    """The printed commands adopt a vendor's plugin and undo its adoption: pods keep their devices.

    `adopt --undo` refuses while claims have devices or devices are for claims.
    """
    node = adopting.cluster
    before = [node.start_pod(f"before-{number}", {RESOURCE: 1}).wait_running() for number in range(2)]
    held = {pod.name: (held_by(pod), pod.container_id()) for pod in before}
    first = vendor_pod(node)

    status, commands, said = adopting.adopt()
    assert status == 0, said
    assert "maxSurge becomes 0" in said
    adopting.run(commands)
    second = vendor_pod(node, first.uid)
    node.wait_for(lambda: "a plugin registered at" in adopting.log(), PATIENCE, "the plugin has registered")
    assert "is adopted already" in adopting.adopt()[2]
    adopting.migrate("1")
    node.wait_allocatable(RESOURCE, COUNT - 1, 60)
    adopting.wait_offered(1)
    after = node.start_pod("after", {RESOURCE: 1}).wait_running()
    adopting.claim("mine")
    user = adopting.pod("user", {"board": "mine"}).wait_running()
    assert len({held_by(pod) for pod in (*before, after, user)}) == COUNT

    status, commands, said = adopting.adopt("--undo")
    assert (status, commands) == (1, [])
    assert f"claims have devices of {RESOURCE}: default/mine" in said
    user.delete()
    user.wait_gone()
    node.api.delete("ResourceClaim", "mine")
    status, commands, said = adopting.adopt("--undo")
    assert (status, commands) == (1, [])
    assert f"devices of {RESOURCE} are for claims on {node.node_name}" in said
    adopting.migrate("none")
    status, commands, said = adopting.adopt("--undo")
    assert status == 0, said
    adopting.run(commands)
    vendor_pod(node, second.uid)
    node.wait_allocatable(RESOURCE, COUNT, 60)
    spec = node.api.get("DaemonSet", "gadgets", VENDOR)["spec"]
    (path,) = (one["hostPath"]["path"] for one in spec["template"]["spec"]["volumes"] if "hostPath" in one)
    assert path == "/var/lib/kubelet/device-plugins"
    assert spec["updateStrategy"]["rollingUpdate"]["maxSurge"] == 1
    assert {pod.name: (held_by(pod), pod.container_id()) for pod in before} == held
    last = node.start_pod("last", {RESOURCE: 1}).wait_running()
    assert len({held_by(pod) for pod in (*before, after, last)}) == COUNT
    assert DRIVER in adopting.drivers
