"""The Helm chart on the real node: installed, upgraded, rolled back and removed while pods hold devices."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import build, isolate
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_daemonset_real import (
    COUNT,
    DRIVER,
    IMAGES,
    NAMESPACE,
    PATIENCE,
    RESOURCE,
    Deployed,
    deployment,
    held_by,
    ready,
)

CHART = Path(__file__).parents[2] / "charts" / "dra-bridge"
RELEASE = "dra-bridge"


class Released(Deployed):
    """A Bridge whose agent is a release of the chart."""

    def helm(self, *arguments: str) -> str:
        """Run a Helm command in the agent's namespace, which must succeed; return its output."""
        command = [str(build.ensure_tool("helm")), *arguments, f"--namespace={NAMESPACE}"]
        done = subprocess.run(
            [*command, f"--kubeconfig={self.cluster.kubeconfig}"],
            env={"HOME": str(self.directory), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def apply(self, *options: str) -> None:
        """Install the release, or upgrade it to the current config file."""
        values = {"config": json.loads(self.config.read_text()), **self.node_values()}
        said = self.upgrade(values, *options)
        assert f"DaemonSet {RELEASE} serves {RESOURCE}." in said
        assert f"`dra-bridge uninstall --driver {DRIVER}` removes" in said

    def node_values(self) -> dict[str, Any]:
        """Return the values that name the image and the pods' cgroups."""
        repository, _, tag = self.image.rpartition(":")
        # The host's cgroups also have the pods of other test runs.
        return {"image": {"repository": repository, "tag": tag}, "cgroupRoot": str(isolate.POD_CGROUPS)}

    def upgrade(self, values: dict[str, Any], *options: str) -> str:
        """Install the release with values, or upgrade it to these values; return Helm's output."""
        file = self.directory / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        # Objects of `dra-bridge manifests` may be left from another test; Helm takes these over.
        into = ["upgrade", "--install", "--take-ownership", "--create-namespace"]
        into += [RELEASE, str(CHART), f"--values={file}"]
        return self.helm(*into, *options)

    def uninstall(self) -> None:
        """Uninstall the release if it exists; wait until its pods are gone and RESOURCE has no allocatable device."""
        for pod in self.pods():
            print(f"--- {pod}\n{pod.logs()}")
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")
        self.cluster.wait_for(lambda: not self.pods(), PATIENCE, "the agent's pod is gone")
        self.cluster.wait_for(lambda: not self.cluster.allocatable(RESOURCE), 60, "nothing is allocatable")

    def pods(self) -> list[Pod]:
        """Return the agents' pods of all groups, terminating ones included."""
        return self.cluster.pods(NAMESPACE, "app.kubernetes.io/managed-by=dra-bridge")


@pytest.fixture
def released(node: Cluster) -> Iterator[Released]:
    """The chart's release with four devices, of which two are for claims."""
    with deployment(Released, node, [os.makedev(1, 5)] * COUNT) as made:
        yield made


def test_life_of_a_release(released: Released) -> None:
    """A pod by limits and a pod by a claim keep their devices during upgrade, rollback, removal and reinstallation."""
    cluster, agent = released.cluster, released.agent()
    plain, user, held = released.both_doors()
    containers = [pod.container_id() for pod in (plain, user)]

    def as_before() -> bool:
        return released.holders() == held

    # An upgrade changes the ConfigMap, which the running agent reads again; so does a rollback.
    released.share(1)
    released.apply()
    released.read_again(agent)
    released.wait_offered(1)
    cluster.wait_allocatable(RESOURCE, COUNT - 1)
    released.helm("rollback", RELEASE, "1")
    released.read_again(agent)
    released.wait_offered(2)
    assert released.agent().uid == agent.uid
    assert agent.restarts() == 0
    assert as_before()

    # An upgrade to another image replaces the pod.
    released.share("50%")
    released.image = IMAGES[1]
    released.apply()
    cluster.wait_for(lambda: released.agent(other_than=agent.uid), PATIENCE, "another pod is ready")
    cluster.wait_for(as_before, 60, f"the holders are {held}")

    # Pods with claims cannot end without the agent: `uninstall --check` says so.
    said = released.cli("uninstall", "--driver", DRIVER, "--check")
    assert (said[0], "claims have devices of these drivers: default/mine: " in said[1]) == (1, True), said
    released.uninstall()
    assert not [one for one in cluster.api.list("DeviceClass") if one["metadata"]["name"] == DRIVER]
    for kind in ("ValidatingAdmissionPolicy", "ClusterRole", "ClusterRoleBinding"):
        # Objects of this kind may be left from another test's manifests; they lack the release's annotation.
        found = [one["metadata"] for one in cluster.api.list(kind)]
        assert not [one["name"] for one in found if "meta.helm.sh/release-name" in one.get("annotations", {})], kind
    assert {held_by(plain), held_by(user)} == held.keys()

    released.apply()
    released.agent()
    cluster.wait_for(as_before, 60, f"the holders are {held}")
    hungry = cluster.start_pod("hungry", {RESOURCE: 1}).wait_running()
    assert held_by(hungry) not in held
    assert [pod.container_id() for pod in (plain, user)] == containers
    assert not plain.restarts() + user.restarts()
    for pod in (plain, user, hungry):
        pod.delete()
        pod.wait_gone()
    cluster.wait_for(lambda: not released.holders(), 60, "all devices are free")
    cluster.api.delete("ResourceClaim", "mine")
    cluster.wait_for(lambda: released.cli("uninstall", "--driver", DRIVER, "--check")[0] == 0, 60, "no claim has any")


def test_groups_by_label(released: Released) -> None:
    """A node's label selects which group's agent runs on the node; after another label, another group's agent runs."""
    cluster = released.cluster
    released.agent()

    def label(pool: str | None) -> None:
        cluster.api.patch("Node", cluster.node_name, {"metadata": {"labels": {"pool": pool}}}, "")

    def serving(group: str) -> bool:
        (name, *more) = [pod.object["metadata"]["labels"]["app.kubernetes.io/name"] for pod in released.pods()] or [""]
        return not more and name == f"{RELEASE}-{group}" and ready(released.pods()[0])

    shares = {"some": 1, "all": "all"}
    expression = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    linux = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    pods = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": linux}},
        "resources": {"requests": {"cpu": "5m"}},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "50%"}},
        "podLabels": {"team": "lab"},
        "podAnnotations": {"example.com/note": "none"},
        "extraArgs": ["--log-format=json"],
        "env": [{"name": "TZ", "value": "UTC"}],
    }
    groups = {
        pool: {
            **pods,
            "nodeSelector": {"pool": pool},
            "config": {"resources": [{**released.resources[0], "dra": {"share": share}}]},
        }
        for pool, share in shares.items()
    }
    try:
        label("some")
        released.upgrade({**released.node_values(), "groups": groups})
        cluster.wait_for(lambda: serving("some"), PATIENCE, "the first group's agent runs", log="kubelet")
        released.wait_offered(1)
        cluster.wait_allocatable(RESOURCE, COUNT - 1)
        (agent,) = released.pods()
        assert agent.object["metadata"]["labels"]["team"] == "lab"
        assert json.loads(agent.logs().splitlines()[0])["level"]
        plain = cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
        device = held_by(plain)
        label("all")
        cluster.wait_for(lambda: serving("all"), PATIENCE, "the second group's agent runs", log="kubelet")
        released.wait_offered(COUNT - 1)
        assert held_by(plain) == device
        plain.delete()
        released.wait_offered(COUNT)
    finally:
        label(None)


def test_plugin_alone(released: Released) -> None:
    """With `bridge: false` an agent without a token serves all devices by limits; an upgrade adds the bridge again."""
    cluster, both = released.cluster, released.agent()
    released.wait_offered(2)
    values = {"config": {"resources": released.resources}, **released.node_values()}
    released.upgrade({**values, "bridge": False})
    alone = released.agent(other_than=both.uid)
    cluster.wait_allocatable(RESOURCE, COUNT, 60)
    volumes = alone.object["spec"]["volumes"]
    assert not [one for one in volumes if "projected" in one], "a token of the API server"
    assert not [one for one in cluster.api.list("ClusterRole") if one["metadata"]["name"].startswith(RELEASE)]
    plain = cluster.start_pod("plain", {RESOURCE: 1}).wait_running()
    device = held_by(plain)
    released.upgrade(values)
    released.agent(other_than=alone.uid)
    cluster.wait_for(lambda: released.sides()[device][0] == "plugin", 60, "the pod's device is on the plugin's side")
    assert held_by(plain) == device
