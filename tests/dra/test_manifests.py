"""Manifests: what is applied to a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.config import Config, ResourceConfig, parse
from deviceplugin.node.options import add_run_options
from dra_bridge.manifests import Deployment, manifests, to_yaml

CONFIG_ARGUMENT = "--config=/etc/dra-bridge/config.yaml"

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
        "Role",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
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


def class_names(*resources: str, driver: str = "gpu.example.com") -> dict[str, str]:
    """Return the names of the DeviceClasses that are printed for resources of a driver, by resource."""
    listed = (f"{{name: {name}, driver: {driver}, devices: [{{path: /dev/x}}]}}" for name in resources)
    text = f"resources: [{', '.join(listed)}]"
    classes = of_kind(manifests(parse(text), text), "DeviceClass")
    return {one["spec"]["extendedResourceName"]: one["metadata"]["name"] for one in classes}


def test_a_class_keeps_its_name_when_its_driver_gets_another_resource() -> None:
    """What was applied before the other resource joined the driver, at whatever place of the file, stays as it is."""
    alone = class_names("example.com/gpu")
    assert alone == {"example.com/gpu": "gpu.example.com"}
    both = class_names("example.com/gpu", "example.com/half")
    assert both == {**alone, "example.com/half": "half.gpu.example.com"}
    assert class_names("example.com/half", "example.com/gpu") == both
    assert class_names("example.com/half") == {"example.com/half": both["example.com/half"]}


def test_older_servers(config: Config) -> None:
    """For servers before 1.34 the classes are in their version and without the field that these refuse."""
    old = Deployment(version="v1beta1")
    for one in of_kind(manifests(config, TEXT, old), "DeviceClass"):
        assert one["apiVersion"] == "resource.k8s.io/v1beta1"
        assert "extendedResourceName" not in one["spec"]


def test_no_right_to_write_nodes(config: Config) -> None:
    """No rule of the agent's allows to write Nodes or claims but a Node's status, and none has a wildcard."""
    role, operator = of_kind(manifests(config, TEXT), "ClusterRole")
    (binding,) = of_kind(manifests(config, TEXT), "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"] != operator["metadata"]["name"]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if {"nodes", "resourceclaims"} & set(rule["resources"]):
            assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_the_right_to_ask_agents(config: Config) -> None:
    """Operators may read the pages of pods in the agent's namespace alone, where agents have pages."""
    (role,) = of_kind(manifests(config, TEXT), "Role")
    assert (role["metadata"]["name"], role["metadata"]["namespace"]) == ("dra-bridge-operator", "dra-bridge")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}]
    assert not of_kind(manifests(config, TEXT, Deployment(metrics_port=0)), "Role")


def test_the_right_to_patch_claims_is_given_only_if_it_is_used(config: Config) -> None:
    """Without `claim_status` there is no rule, no policy and no option for the status of claims."""
    text = to_yaml(manifests(config, TEXT))
    assert "resourceclaims/" not in text
    assert "--claim-status" not in text
    objects = manifests(config, TEXT, Deployment(claim_status=True))
    (rules, _) = (one["rules"] for one in of_kind(objects, "ClusterRole"))
    rights = {resource: rule["verbs"] for rule in rules for resource in rule["resources"]}
    assert rights["resourceclaims/status"] == ["patch"]
    assert rights["resourceclaims/driver"] == ["associated-node:patch"]
    assert len(of_kind(objects, "ValidatingAdmissionPolicy")) == 4
    (agent,) = of_kind(objects, "DaemonSet")
    assert "--claim-status" in agent["spec"]["template"]["spec"]["containers"][0]["args"]


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
        "/var/lib/kubelet",
        "/sys/fs/cgroup",
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/plugins/dra-bridge",
        "/var/lib/kubelet/plugins_registry",
        "/var/lib/kubelet/pod-resources",
        "/var/run/cdi",
        "/dev",
        "/var/log/pods",
        "/var/log/containers",
        "/run/fpga",
    }
    (container,) = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    assert {one["mountPath"] for one in mounts.values() if not one.get("readOnly")} == {
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/plugins/dra-bridge",
        "/var/lib/kubelet/plugins_registry",
        "/var/run/cdi",
    }
    # A pod's volume that the agent's mount kept busy could not be detached.
    assert mounts["kubelet"]["mountPropagation"] == "HostToContainer"
    assert f"--cgroup-root={mounts['cgroup']['mountPath']}" in container["args"]
    assert pod["priorityClassName"] == "system-node-critical"


def test_the_daemon_set_does_not_depend_on_what_drivers_are_called(config: Config) -> None:
    """A renamed, added or removed driver needs no other pod: the agent takes the ConfigMap's change as it runs."""
    other = TEXT.replace("acc.example.com", "renamed.example.com")
    assert other != TEXT
    (before,), (after,) = (of_kind(manifests(parse(text), text), "DaemonSet") for text in (TEXT, other))
    assert before == after


def test_without_drivers_nothing_of_dra_is_written() -> None:
    """An agent of the plugin side alone writes to the device plugin directory, and nowhere else on the host."""
    text = "resources: [{name: a/b, devices: [path: /dev/x]}]"
    objects = manifests(parse(text), text)
    (agent,) = of_kind(objects, "DaemonSet")
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    writable = [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
    assert writable == ["/var/lib/kubelet/device-plugins"]
    assert [one["kind"] for one in objects] == ["Namespace", "ConfigMap", "DaemonSet"]
    assert container["command"] == ["deviceplugin"]
    pod = agent["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "default"


def test_a_plugin_alone_by_the_administrator(config: Config) -> None:
    """What names drivers is served to limits alone if the deployment says so, with nothing of the API server."""
    objects = manifests(config, TEXT, Deployment(plugin_only=True, claim_status=True))
    assert [one["kind"] for one in objects] == ["Namespace", "ConfigMap", "DaemonSet"]
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["deviceplugin"]
    assert not [one for one in container["args"] if one.startswith(("--cdi-dir", "--claim-status"))]
    assert not [one for one in container["volumeMounts"] if "/plugins" in one["mountPath"]]


def agent_of(fields: str, entry: str = "path: /dev/x", **how: Any) -> dict[str, Any]:
    """Return the pod template of the agent that serves one resource with these fields."""
    text = f"resources: [{{name: a/b, devices: [{entry}], {fields}}}]"
    (agent,) = of_kind(manifests(parse(text), text, Deployment(**how)), "DaemonSet")
    template: dict[str, Any] = agent["spec"]["template"]
    return template


UNPRIVILEGED = {
    "runAsUser": 0,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
PRIVILEGED = {"runAsUser": 0, "readOnlyRootFilesystem": True, "privileged": True}


@pytest.mark.parametrize(
    ("fields", "entry", "reason"),
    [
        ("", "path: /dev/x", ""),
        ("driver: a.b, dra: {share: all}", "path: /dev/x", ""),
        ("", "pci: {driver: vfio-pci}", ""),
        ("", "usb: {vendor: '0403'}", ""),
        ("", "nvidia: {}", ""),
        ("health: {probe: open}", "simulated: {count: 1}", ""),
        ("health: {probe: open}", "path: /dev/x", "`health.probe: open` opens device nodes"),
        ("health: {probe: {command: [x]}}", "path: /dev/x", "the command of `health.probe` may open device nodes"),
        ("", "nvidia: {mig: single}", "may not see partitions that are made later"),
        ("", "nvidia: {profile: 1g.10gb}", "may not see partitions that are made later"),
        ("", "nvidia: {library: /x.so}", "`library` opens the GPUs' nodes"),
    ],
)
def test_privileged_only_with_a_reason(fields: str, entry: str, reason: str) -> None:
    """A container is privileged where the configuration opens devices, and an annotation of its pod says why."""
    template = agent_of(fields, entry)
    (container,) = template["spec"]["containers"]
    assert container["securityContext"] == (PRIVILEGED if reason else UNPRIVILEGED)
    annotations = template["metadata"].get("annotations", {})
    assert annotations.keys() == ({"dra-bridge/privileged-because"} if reason else set())
    assert reason in annotations.get("dra-bridge/privileged-because", "")


def test_privileged_by_the_administrator() -> None:
    """What the deployment says wins over what the configuration seems to need; an own agent is not judged."""
    (container,) = agent_of("health: {probe: open}", privileged="never")["spec"]["containers"]
    assert container["securityContext"] == UNPRIVILEGED
    template = agent_of("", privileged="always")
    assert template["spec"]["containers"][0]["securityContext"] == PRIVILEGED
    assert template["metadata"]["annotations"] == {"dra-bridge/privileged-because": "the deployment asks for it"}
    own = Deployment(own_command=("agent",))
    found = Config(resources=(ResourceConfig(name="a/b", driver="x.com", devices=()),))
    (agent,) = of_kind(manifests(found, "", own), "DaemonSet")
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"] == UNPRIVILEGED
    assert not [one for one in container["args"] if one.startswith("--allow")]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def test_directories_of_sysfs_that_a_hook_writes_to() -> None:
    """They are mounted at their own path and writable; by default the runtime's /sys is all there is, read-only."""
    pod = agent_of("", writable_sys=("/sys/devices", "/sys/module/x"))["spec"]
    found = {one["mountPath"]: one.get("readOnly", False) for one in pod["containers"][0]["volumeMounts"]}
    assert (found["/sys/devices"], found["/sys/module/x"]) == (False, False)
    paths = {one["hostPath"]["path"]: one["hostPath"]["type"] for one in pod["volumes"] if "hostPath" in one}
    assert (paths["/sys/devices"], paths["/sys/module/x"]) == ("Directory", "Directory")
    assert not [
        one for one in agent_of("")["spec"]["containers"][0]["volumeMounts"] if one["mountPath"].startswith("/sys")
    ]


def test_a_low_port_takes_a_capability() -> None:
    """Without it an unprivileged container may not bind the port where the runtime does not allow all."""
    (container,) = agent_of("", metrics_port=443)["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}


def test_the_lock_is_what_the_configuration_needs() -> None:
    """The agent's arguments allow what the configuration names, and nothing else that it may name later."""
    fields = "health: {probe: {command: [x]}}, mounts: [{host: /opt/x, container: /x}, {host: /dev/shm, container: /y}]"
    template = agent_of(fields, "path: /run/x/*/y")
    (container,) = template["spec"]["containers"]
    locks = [one for one in container["args"] if one.startswith("--allow")]
    assert locks == ["--allow-commands", "--allow-host-path=/opt/x", "--allow-host-path=/run/x/*/y"]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    (container,) = agent_of("nodes: [/dev/control]")["spec"]["containers"]
    assert not [one for one in container["args"] if one.startswith("--allow")]
    assert "tmp" not in {one["name"] for one in container["volumeMounts"]}


def test_the_operator_may_patch_nodes_only_under_a_policy(config: Config) -> None:
    """The role that may patch Nodes has the verb by which the policy knows it, and the drivers it may ask for."""
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


def test_the_directory_of_a_file_is_made() -> None:
    """A node on which nobody has written the file of unhealthy devices yet starts the agent all the same."""
    template = agent_of("", "simulated: {count: 1, unhealthy_file: /run/x/unhealthy}")
    assert {"name": "devices-0", "hostPath": {"path": "/run/x", "type": "DirectoryOrCreate"}} in template["spec"][
        "volumes"
    ]


def test_shared_nodes_are_visible_to_the_agent() -> None:
    """It looks at them when it writes a claim's CDI file, and opens them as a probe."""
    text = "resources: [{name: a/b, devices: [path: /dev/x], nodes: [/dev/control, /run/ctl/node]}]"
    (agent,) = of_kind(manifests(parse(text), text), "DaemonSet")
    paths = {one["hostPath"]["path"] for one in agent["spec"]["template"]["spec"]["volumes"] if "hostPath" in one}
    assert "/run/ctl" in paths


def test_other_roots_and_no_metrics(config: Config) -> None:
    """Another kubelet directory is passed on; without metrics there are no probes."""
    how = Deployment(kubelet_root="/var/lib/k0s/kubelet", metrics_port=0)
    (agent,) = of_kind(manifests(config, TEXT, how), "DaemonSet")
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert "--kubelet-root=/var/lib/k0s/kubelet" in container["args"]
    assert "livenessProbe" not in container


def test_places_of_the_nodes() -> None:
    """Where nodes have things elsewhere, the agent is told, and sees each at the path that it is told."""
    config = parse("resources: [{name: a/b, devices: [path: /dev/x]}]")
    how = Deployment(
        kubelet_root="/k",
        device_plugin_directory="/plugins",
        pod_resources_socket="/run/k/p.sock",
        cgroup_root="/cgroup",
        pod_log_directory="/logs",
    )
    (agent,) = of_kind(manifests(config, "", how), "DaemonSet")
    pod = agent["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    hosts = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    seen = {hosts[one["name"]]: one["mountPath"] for one in container["volumeMounts"]}
    assert seen == {
        "/k": "/k",
        "/plugins": "/plugins",
        "/run/k": "/run/k",
        "/cgroup": "/host/sys/fs/cgroup",
        "/var/log/containers": "/var/log/containers",
        "/logs": "/logs",
        "/var/run/cdi": "/var/run/cdi",
        "/dev": "/dev",
    }
    options = argparse.ArgumentParser()
    add_run_options(options)
    found = options.parse_args([one for one in container["args"] if one not in ("run", CONFIG_ARGUMENT)])
    assert (found.kubelet_root, found.device_plugin_dir) == (Path("/k"), Path("/plugins"))
    assert (found.pod_resources_socket, found.pod_log_dir) == (Path("/run/k/p.sock"), Path("/logs"))
    assert found.cgroup_root == Path("/host/sys/fs/cgroup")


def test_usual_places_are_not_said() -> None:
    """The agent is told of what is elsewhere alone, so that an upgrade of most installations changes no argument."""
    config = parse("resources: [{name: a/b, devices: [path: /dev/x]}]")
    (agent,) = of_kind(manifests(config, ""), "DaemonSet")
    arguments = agent["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments == ["run", CONFIG_ARGUMENT, "--cgroup-root=/host/sys/fs/cgroup", "--metrics-address=:9410"]
    how = Deployment(kubelet_root="/k", device_plugin_directory="/k/device-plugins")
    (agent,) = of_kind(manifests(config, "", how), "DaemonSet")
    arguments = agent["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [one for one in arguments if "/k" in one] == ["--kubelet-root=/k"]


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
