"""Manifests: what is applied to a cluster."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deviceplugin.config import Config, parse
from dra_bridge.manifests import Deployment, device_class_name, manifests, to_yaml

TEXT = """\
# the lab's devices
resources:
  - name: example.com/gpu
    driver: acc.example.com
    devices:
      - simulated: {count: 4}
  - name: example.com/fpga
    driver: acc.example.com
    devices:
      - path: /run/fpga/*/ctl
  - name: example.com/serial
    devices:
      - path: /dev/ttyUSB*
"""


@pytest.fixture
def config() -> Config:
    return parse(TEXT)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def test_everything_is_there_in_order(config: Config) -> None:
    """What others refer to comes before them."""
    kinds = [one["kind"] for one in manifests(config, TEXT)]
    assert kinds == [
        "Namespace",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "ClusterRole",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "DeviceClass",
        "DeviceClass",
        "ConfigMap",
        "DaemonSet",
    ]


def test_a_class_for_each_resource_with_a_driver(config: Config) -> None:
    """Each resource with a driver has a class that selects it alone and names the extended resource."""
    classes = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests(config, TEXT), "DeviceClass")}
    assert set(classes) == {"gpu.acc.example.com", "fpga.acc.example.com"}
    fpga = classes["fpga.acc.example.com"]
    assert fpga["extendedResourceName"] == "example.com/fpga"
    (selector,) = fpga["selectors"]
    assert selector["cel"]["expression"] == (
        'device.driver == "acc.example.com" && '
        'device.attributes["acc.example.com"].extendedResource == "example.com/fpga"'
    )


def test_only_resource_of_a_driver() -> None:
    """The class of a driver's only resource is called like the driver."""
    assert device_class_name("example.com/gpu", "gpu.example.com", ["example.com/gpu"]) == "gpu.example.com"


def test_older_servers(config: Config) -> None:
    """For servers before 1.34 the classes are in their version and without the field that these refuse."""
    old = Deployment(version="v1beta1", extended_resource=False)
    for one in of_kind(manifests(config, TEXT, old), "DeviceClass"):
        assert one["apiVersion"] == "resource.k8s.io/v1beta1"
        assert "extendedResourceName" not in one["spec"]


def test_no_right_to_write_nodes(config: Config) -> None:
    """No rule of the agent's allows to write Nodes or the claims themselves, and none has a wildcard."""
    role, operator = of_kind(manifests(config, TEXT), "ClusterRole")
    (binding,) = of_kind(manifests(config, TEXT), "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"] != operator["metadata"]["name"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if {"nodes", "resourceclaims"} & set(rule["resources"]):
            assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_config_travels_as_it_is(config: Config) -> None:
    """The ConfigMap has the file's own text, comments and all, and can be read back."""
    (config_map,) = of_kind(list(yaml.safe_load_all(to_yaml(manifests(config, TEXT)))), "ConfigMap")
    assert config_map["data"] == {"config.yaml": TEXT}


def test_directories_of_the_host(config: Config) -> None:
    """The DaemonSet has the kubelet's directories, /dev, and the ones that the configuration looks into."""
    (agent,) = of_kind(manifests(config, TEXT), "DaemonSet")
    pod = agent["spec"]["template"]["spec"]
    paths = {one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    assert paths == {
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/plugins",
        "/var/lib/kubelet/plugins_registry",
        "/var/lib/kubelet/pod-resources",
        "/var/run/cdi",
        "/dev",
        "/var/log/pods",
        "/run/fpga",
    }
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert pod["priorityClassName"] == "system-node-critical"


def test_other_roots_and_no_metrics(config: Config) -> None:
    """Another kubelet directory is passed on; without metrics there are no probes."""
    how = Deployment(kubelet_root="/var/lib/k0s/kubelet", metrics_port=0)
    (agent,) = of_kind(manifests(config, TEXT, how), "DaemonSet")
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert "--kubelet-root=/var/lib/k0s/kubelet" in container["args"]
    assert "livenessProbe" not in container


@pytest.mark.parametrize(("metrics", "scheme"), [("", None), ("metrics: {certificate: /tls/both.pem}\n", "HTTPS")])
def test_probes_speak_as_the_agent_does(metrics: str, scheme: str | None) -> None:
    """With a certificate the agent answers by TLS alone; a probe without it would have the pod killed."""
    (daemons,) = of_kind(manifests(parse(TEXT + metrics), TEXT + metrics), "DaemonSet")
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe.get("scheme") for probe in probes] == [scheme] * 3


@pytest.mark.parametrize("injection", ["env", "cdi"])
def test_nodes_with_nvidia_gpus(injection: str) -> None:
    """The agent's pod gets the driver's library from the runtime, and the GPUs' CDI spec where it needs the names."""
    text = f"resources: [{{name: nvidia.com/gpu, devices: [{{nvidia: {{injection: {injection}}}}}]}}]"
    (agent,) = of_kind(manifests(parse(text), text, Deployment(runtime_class="nvidia")), "DaemonSet")
    pod = agent["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert pod["runtimeClassName"] == "nvidia"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    paths = {one["mountPath"] for one in container["volumeMounts"]}
    assert ("/etc/cdi" in paths) is (injection == "cdi")


def test_other_nodes_need_no_runtime(config: Config) -> None:
    """Without such GPUs nothing speaks of them."""
    assert "nvidia" not in to_yaml(manifests(config, TEXT)).casefold()


def test_yaml_reads_back(config: Config) -> None:
    """What is printed are the same objects."""
    objects = manifests(config, TEXT)
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects
