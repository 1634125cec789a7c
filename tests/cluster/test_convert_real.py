"""A real API server accepts the output of `dra-bridge convert`; converted pods get the devices that limits gave."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import build, isolate
from tests.cluster.bridge import Bridge, env_of
from tests.cluster.image import IMAGE
from tests.cluster.node import Cluster, Pod
from tests.dra.convert.test_convert import KINDS
from tests.dra.objects import body

RESOURCE = "example.net/board"
DRIVER = "board.example.net"
DEVICES = Path(isolate.DEVICES) / "convert"
COUNT = 4


def convert(text: str, *arguments: str) -> str:
    """Return the output of `dra-bridge convert` for a text on its standard input; the command must succeed."""
    command = [sys.executable, "-m", "dra_bridge", "convert", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources(count: int) -> dict[str, Any]:
    return {"limits": {RESOURCE: count, "memory": "64Mi"}, "requests": {RESOURCE: count}}


def pod_template(kind: str) -> dict[str, Any]:
    """Return a pod template that is valid in objects of a kind."""
    policy = "OnFailure" if kind in ("Job", "CronJob") else "Always"
    containers = [{"name": name, "image": IMAGE, "resources": resources(count)} for name, count in (("a", 1), ("b", 2))]
    return {"metadata": {"labels": {"app": "w"}}, "spec": {"restartPolicy": policy, "containers": containers}}


def workload(kind: str) -> dict[str, Any]:
    """Return a complete object of a kind."""
    spec: dict[str, Any] = {"template": pod_template(kind)}
    if kind == "ReplicationController":
        spec["selector"] = {"app": "w"}
    elif kind not in ("Job", "CronJob"):
        spec["selector"] = {"matchLabels": {"app": "w"}}
    if kind == "CronJob":
        spec = {"schedule": "1 1 1 1 1", "jobTemplate": {"spec": spec}}
    return body(kind, f"w-{kind.lower()}", spec=spec)


def bare(name: str) -> dict[str, Any]:
    spec = pod_template("Pod")["spec"]
    first = {"name": "first", "image": IMAGE, "resources": resources(1), "command": ["true"]}
    return body("Pod", name, spec={**spec, "initContainers": [first]})


def objects() -> list[dict[str, Any]]:
    """Return an object of each kind, a Pod with an init container, a List and a PodTemplate."""
    items = {"apiVersion": "v1", "kind": "List", "items": [bare("listed"), workload("Deployment")]}
    template = body("PodTemplate", "t", template=pod_template("Pod"))
    return [*map(workload, KINDS), bare("bare"), items, template]


def kubectl(cluster: Cluster, *arguments: str, text: str = "") -> str:
    command = [str(cluster.binaries.path("kubectl")), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def test_the_api_server_takes_each_kind(cluster: Cluster) -> None:
    """Converted manifests of each kind pass strict validation, in block style, flow style and JSON."""
    if cluster.minor < 34:
        pytest.skip("resource.k8s.io/v1 came with 1.34")
    strict = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    texts = [
        *(
            # kubectl does not accept a document that begins on the line of `---`.
            "---\n".join(yaml.safe_dump(one, sort_keys=False, default_flow_style=style, width=1e6) for one in objects())
            for style in (False, None, True)
        ),
        "\n---\n".join(json.dumps(one, indent=2) for one in objects()),
    ]
    for text in texts:
        made = kubectl(cluster, *strict, text=text).split("\n")
        converted = convert(text, "--class", f"{RESOURCE}={DRIVER}")
        assert RESOURCE not in "".join(line for line in converted.splitlines() if "# dra-bridge: was" not in line)
        said = kubectl(cluster, *strict, text=converted).split("\n")
        templates = [line for line in said if "resourceclaimtemplate" in line]
        assert len(templates) == 2
        assert [line for line in said if line not in templates] == made


def test_older_versions_are_taken(cluster: Cluster) -> None:
    """Converted templates of v1beta1 and v1beta2 are valid on servers that serve these versions."""
    text = yaml.safe_dump(workload("Deployment"))
    for version, since in (("v1beta1", 32), ("v1beta2", 33)):
        if cluster.minor >= since:
            converted = convert(text, "--class", f"{RESOURCE}={DRIVER}", "--resource-api", version)
            kubectl(cluster, "create", "--dry-run=server", "--validate=strict", "-f", "-", text=converted)


@pytest.fixture
def bridge(cluster: Cluster) -> Iterator[Bridge]:
    """An agent whose devices have nodes, variables and mounts; none of the devices is for claims yet."""
    if cluster.minor < 34:
        pytest.skip("resource.k8s.io/v1 came with 1.34")
    shutil.rmtree(DEVICES, ignore_errors=True)
    DEVICES.mkdir(parents=True)
    (DEVICES / "lib").mkdir()
    (DEVICES / "lib" / "library").write_text("of the host\n")
    for number in range(COUNT):
        os.mknod(DEVICES / f"board{number}", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    resource = {
        "name": RESOURCE,
        "driver": DRIVER,
        "devices": [{"path": f"{DEVICES}/board*"}],
        "env": {"BOARD_MODE": "fast"},
        "mounts": [{"host": str(DEVICES / "lib"), "container": "/opt/board"}],
        "dra": {"share": "none"},
    }
    with Bridge.running(cluster, resource) as running:
        cluster.wait_allocatable(RESOURCE, COUNT)
        yield running


def got(pod: Pod, container: str) -> dict[str, Any]:
    """Return what a container has by its devices: device nodes and their kind, variables, and the mount's content."""
    listed = pod.exec(["sh", "-c", f"ls -l {DEVICES}/board* 2>/dev/null || true"], container).splitlines()
    mounts = pod.exec(["sh", "-c", "grep /opt/board /proc/self/mountinfo | cut -d' ' -f 4-6"], container)
    opened = pod.exec(["sh", "-c", f"for d in {DEVICES}/board*; do head -c 2 $d | wc -c; done"], container)
    return {
        "nodes": sorted(line[0] + " ".join(line.split()[4:6]) for line in listed),
        "modes": {line.split()[0] for line in listed},
        "opened": opened.split(),
        "variables": {key: text for key, text in env_of(pod, container).items() if key != "HOSTNAME"},
        "mounts": mounts,
        "library": pod.exec(["cat", "/opt/board/library"], container),
    }


SLEEP = ["sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait"]


def test_a_converted_pod_gets_what_limits_gave(bridge: Bridge) -> None:
    """A converted pod's containers get the same nodes, variables and mounts as with limits, and share no device."""
    cluster = bridge.cluster
    user = bare("user")
    for container in user["spec"]["containers"]:
        container["command"] = SLEEP
    text = yaml.safe_dump(user, sort_keys=False)
    kubectl(cluster, "create", "-f", "-", text=text)
    pod = cluster.pod("user").wait_running()
    before = {name: got(pod, name) for name in "ab"}
    assert [len(before[name]["nodes"]) for name in "ab"] == [1, 2]
    pod.delete()
    pod.wait_gone()
    bridge.share("all")
    bridge.wait_offered(COUNT)
    kubectl(cluster, "create", "-f", "-", text=convert(text, "--class", f"{RESOURCE}={bridge.classes[RESOURCE]}"))
    pod = cluster.pod("user").wait_running()
    after = {name: got(pod, name) for name in "ab"}
    # With limits a node has the mode of the host's node (containerd, oci.DeviceFromPath), with CDI runc's default mode.
    assert [before[name].pop("modes") for name in "ab"] == [{"crw-r--r--"}] * 2
    assert [after[name].pop("modes") for name in "ab"] == [{"crw-rw-rw-"}] * 2
    assert after == before
    allocated = [
        result["device"]
        for claim in cluster.api.list("ResourceClaim", api_version=bridge.api_version)
        for result in claim["status"]["allocation"]["devices"]["results"]
    ]
    assert len(allocated) == len(set(allocated)) == 3  # the init container has used the device of `a`


def test_kustomize_takes_the_patches(cluster: Cluster, tmp_path: Path) -> None:
    """The Kustomize component changes a base as `convert` changes its manifests, except for empty limits."""
    base, component = tmp_path / "base", tmp_path / "component"
    base.mkdir()
    component.mkdir()
    text = yaml.safe_dump_all([workload("Deployment"), workload("Job")], sort_keys=False)
    (base / "all.yaml").write_text(text)
    (base / "kustomization.yaml").write_text("resources: [all.yaml]\ncomponents: [../component]\n")
    classes = ("--class", f"{RESOURCE}={DRIVER}")
    (component / "kustomization.yaml").write_text(convert(text, *classes, "--patch", "kustomize"))
    (component / "claim-templates.yaml").write_text(convert(text, *classes, "--patch", "templates"))

    def plain(stream: str) -> list[str]:
        bodies = [one for one in yaml.safe_load_all(stream) if one]
        for one in bodies:
            spec = one["spec"]["template"]["spec"] if "template" in one["spec"] else {}
            for container in spec.get("containers", ()):
                kept = {key: value for key, value in container["resources"].items() if value}
                container["resources"] = kept
        return sorted(map(str, (sorted(map(str, one.items())) for one in bodies)))

    made = kubectl(cluster, "kustomize", str(base))
    assert plain(yaml.safe_dump_all(yaml.safe_load_all(made))) == plain(
        yaml.safe_dump_all(yaml.safe_load_all(convert(text, *classes)))
    )


def test_helm_takes_it_as_post_renderer(tmp_path: Path) -> None:
    """With `convert` as post-renderer, `helm template` renders a chart's pods with limits as pods with claims."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: boards\nversion: 1.0.0\n")
    (chart / "templates" / "deployment.yaml").write_text(yaml.safe_dump(workload("Deployment")))
    (chart / "templates" / "NOTES.txt").write_text("done\n")
    renderer = tmp_path / "to-claims"
    renderer.write_text(f"#!/bin/sh\nexec {sys.executable} -m dra_bridge convert --class {RESOURCE}={DRIVER}\n")
    renderer.chmod(0o755)
    command = [str(build.ensure_tool("helm")), "template", "r", str(chart), "--post-renderer", str(renderer)]
    done = subprocess.run(
        command, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}
    assert kinds.keys() == {"ResourceClaimTemplate", "Deployment"}
    assert "resourceClaims" in kinds["Deployment"]["spec"]["template"]["spec"]
