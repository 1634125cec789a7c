"""The objects that `manifests` prints."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deviceplugin.config import Config, ResourceConfig, parse
from dra_bridge.manifests import Deployment, manifests, to_yaml
from tests.test_installers import UNPRIVILEGED

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


def class_names(*resources: str, driver: str = "gpu.example.com") -> dict[str, str]:
    """Return the names of the DeviceClasses that are printed for resources of a driver, by resource."""
    listed = (f"{{name: {name}, driver: {driver}, devices: [{{path: /dev/x}}]}}" for name in resources)
    text = f"resources: [{', '.join(listed)}]"
    classes = of_kind(manifests(parse(text), text), "DeviceClass")
    return {one["spec"]["extendedResourceName"]: one["metadata"]["name"] for one in classes}


def test_a_class_keeps_its_name_when_its_driver_gets_another_resource() -> None:
    """When another resource joins a driver, the names of the existing DeviceClasses stay, at any order in the file."""
    alone = class_names("example.com/gpu")
    assert alone == {"example.com/gpu": "gpu.example.com"}
    both = class_names("example.com/gpu", "example.com/half")
    assert both == {**alone, "example.com/half": "half.gpu.example.com"}
    assert class_names("example.com/half", "example.com/gpu") == both
    assert class_names("example.com/half") == {"example.com/half": both["example.com/half"]}


def test_no_right_to_write_nodes(config: Config) -> None:
    """The agent's role may not write Nodes and claims, apart from a Node's status, and has no wildcard."""
    role, operator = of_kind(manifests(config, TEXT), "ClusterRole")
    (binding,) = of_kind(manifests(config, TEXT), "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"] != operator["metadata"]["name"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if {"nodes", "resourceclaims"} & set(rule["resources"]):
            assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_the_right_to_ask_agents(config: Config) -> None:
    """Operators may only read pages of pods in the agents' namespace; without a metrics port they have no such role."""
    agents, role = of_kind(manifests(config, TEXT), "Role")
    assert {resource for rule in agents["rules"] for resource in rule["resources"]} == {"leases"}
    assert (role["metadata"]["name"], role["metadata"]["namespace"]) == ("dra-bridge-operator", "dra-bridge")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}]
    assert of_kind(manifests(config, TEXT, Deployment(metrics_port=0)), "Role") == [agents]


def test_config_travels_as_it_is(config: Config) -> None:
    """The ConfigMap has the config file's text unchanged, with its comments; the printed YAML has all objects."""
    objects = manifests(config, TEXT, Deployment(namespace="gpus"))
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects
    (config_map,) = of_kind(objects, "ConfigMap")
    assert config_map["data"] == {"config.yaml": TEXT}
    assert config_map["metadata"]["namespace"] == of_kind(objects, "DaemonSet")[0]["metadata"]["namespace"] == "gpus"


def test_the_daemon_set_does_not_depend_on_what_drivers_are_called(config: Config) -> None:
    """A renamed driver does not change the DaemonSet, because a running agent reads the changed ConfigMap."""
    other = TEXT.replace("acc.example.com", "renamed.example.com")
    assert other != TEXT
    (before,), (after,) = (of_kind(manifests(parse(text), text), "DaemonSet") for text in (TEXT, other))
    assert before == after


def agent_of(config: Config, text: str = "", **how: Any) -> dict[str, Any]:
    """Return the pod template of the agent."""
    (agent,) = of_kind(manifests(config, text, Deployment(**how)), "DaemonSet")
    template: dict[str, Any] = agent["spec"]["template"]
    return template


def test_an_own_agent_is_not_judged() -> None:
    """An author's own agent is unprivileged, has no --allow options, and has a volume at /tmp."""
    found = Config(resources=(ResourceConfig(name="a/b", driver="x.com", devices=()),))
    (container,) = agent_of(found, own_command=("agent",))["spec"]["containers"]
    assert container["securityContext"] == UNPRIVILEGED
    assert not [one for one in container["args"] if one.startswith("--allow")]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_directories_of_sysfs_that_a_hook_writes_to(config: Config) -> None:
    """Writable directories of sysfs are mounted at their own path."""
    pod = agent_of(config, TEXT, writable_sys=("/sys/devices", "/sys/module/x"))["spec"]
    found = {one["mountPath"]: one.get("readOnly", False) for one in pod["containers"][0]["volumeMounts"]}
    assert (found["/sys/devices"], found["/sys/module/x"]) == (False, False)
    paths = {one["hostPath"]["path"]: one["hostPath"]["type"] for one in pod["volumes"] if "hostPath" in one}
    assert (paths["/sys/devices"], paths["/sys/module/x"]) == ("Directory", "Directory")


def test_the_operator_may_patch_nodes_only_under_a_policy(config: Config) -> None:
    """The operator's right to patch Nodes has a verb of its own, which a policy checks; a rule names the drivers."""
    objects = manifests(config, TEXT)
    _, operator = of_kind(objects, "ClusterRole")
    (patching,) = (rule for rule in operator["rules"] if "patch" in rule["verbs"])
    (policy,) = (one for one in of_kind(objects, "ValidatingAdmissionPolicy") if "operator" in one["metadata"]["name"])
    (own, _) = (verb for verb in sorted(patching["verbs"], reverse=True))
    assert f'check("{own}")' in policy["spec"]["matchConditions"][0]["expression"]
    assert policy["spec"]["failurePolicy"] == "Fail"
    (shares,) = (rule for rule in operator["rules"] if rule["resources"] == ["shares"])
    assert shares == {
        "apiGroups": ["dra-bridge"],
        "resources": ["shares"],
        "resourceNames": ["acc.example.com"],
        "verbs": ["set"],
    }
