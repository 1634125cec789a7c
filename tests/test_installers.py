"""The objects of `dra-bridge manifests` and of the Helm chart, for one table of options and values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin import cli as plugin_cli
from deviceplugin.node.options import add_run_options
from dra_bridge import cli
from dra_bridge.parameters import TAKES_NONE
from tests.test_chart import EXAMPLES, TEXT, Object, by_name, helm_is_there, rendered

CONFIG_ARGUMENT = "--config=/etc/dra-bridge/config.yaml"
PLAIN = "devices: [{path: /dev/x}]"
CLAIMED = f"{PLAIN}, driver: x.example.com"
UNPRIVILEGED = {
    "runAsUser": 0,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
PRIVILEGED = {"runAsUser": 0, "readOnlyRootFilesystem": True, "privileged": True}
BECAUSE = "dra-bridge/privileged-because"


class Installed:
    """The objects that `manifests` or the chart makes, and parts of them."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.kinds = [one["kind"] for one in objects]
        self.daemon_set = self.of("DaemonSet")[0]
        self.template: Object = self.daemon_set["spec"]["template"]
        self.pod: Object = self.template["spec"]
        (self.container,) = self.pod["containers"]
        self.arguments: list[str] = self.container["args"]
        self.writable = {one["mountPath"]: not one.get("readOnly") for one in self.container["volumeMounts"]}
        """By path of a mount in the container: whether the mount is writable."""
        self.hosts = {
            one["hostPath"]["path"]: one["hostPath"]["type"] for one in self.pod["volumes"] if "hostPath" in one
        }
        """By path of the host that the pod mounts: the type of its volume."""

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    @property
    def locks(self) -> list[str]:
        return [one for one in self.arguments if one.startswith("--allow")]


Facts = Callable[[Installed], None]


@dataclass(frozen=True)
class Case:
    """A config, options of `manifests`, values of the chart with the same meaning, and checks of the objects."""

    name: str
    text: str
    options: tuple[str, ...]
    values: Mapping[str, Any]
    facts: Facts


CASES: list[Case] = []


def case(*options: str, text: str = TEXT, fields: str = "", **values: Any) -> Callable[[Facts], Facts]:
    """Add a case. fields: the fields of one resource a.example.com/b, instead of a whole text."""

    def add(facts: Facts) -> Facts:
        whole = f"resources: [{{name: a.example.com/b, {fields}}}]\n" if fields else text
        more = "-".join(filter(None, (fields, *options)))
        CASES.append(Case(f"{facts.__name__}[{more}]", whole, options, values, facts))
        return facts

    return add


def printed(one: Case, directory: Path, capsys: pytest.CaptureFixture[str]) -> list[Object]:
    """Return what `dra-bridge manifests` prints."""
    file = directory / "config.yaml"
    file.write_text(one.text)
    named = ("--name=dra-bridge", "--namespace=dra-bridge")  # the names with which the chart is installed
    assert cli.main(["manifests", f"--config={file}", *named, *one.options]) == 0
    return list(yaml.load_all(capsys.readouterr().out, yaml.CSafeLoader))


@case()
def nothing_said(made: Installed) -> None:
    """Without options, only the directories that device plugin and DRA driver write to are mounted writable.

    Objects come before the objects that refer to them.
    """
    assert made.kinds == [
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
        *("ClusterRole", "Role"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding") * 5,
        *("DeviceClass", "DeviceClass", "DeviceClass", "ConfigMap", "DaemonSet"),
    ]
    kubelet = "/var/lib/kubelet"
    own = {f"{kubelet}/device-plugins", f"{kubelet}/plugins/dra-bridge", f"{kubelet}/plugins_registry", "/var/run/cdi"}
    read = {kubelet, "/sys/fs/cgroup", f"{kubelet}/pod-resources", "/dev", "/etc/cdi"}
    read |= {"/var/log/pods", "/var/log/containers"}
    assert made.hosts.keys() == own | read | {"/run/fpga", "/srv/x"}
    assert {path for path, writable in made.writable.items() if writable} == own
    assert [one["name"] for one in made.container["volumeMounts"]] == [one["name"] for one in made.pod["volumes"]]
    mounts = {one["name"]: one for one in made.container["volumeMounts"]}
    # A pod's volume could not be detached while the agent's mount keeps it busy.
    assert mounts["kubelet"]["mountPropagation"] == "HostToContainer"
    assert f"--cgroup-root={mounts['cgroup']['mountPath']}" in made.arguments
    assert made.pod["priorityClassName"] == "system-node-critical"
    probes = [made.container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert not any("scheme" in probe for probe in probes)
    assert not [path for path in made.writable if path.startswith("/sys")]
    text = json.dumps(made.objects).casefold()
    assert not [word for word in ("resourceclaims/", "claim-status", "nvidia") if word in text]


def said(text: str, *options: str, **values: Any) -> None:
    """Add a case of an option whose value is in the DaemonSet."""

    def is_said(made: Installed) -> None:
        assert text in json.dumps(made.daemon_set)

    case(*options, **values)(is_said)


said('"image": "r.example.com/x:2"', "--image=r.example.com/x:2", image={"repository": "r.example.com/x", "tag": "2"})
said('"imagePullPolicy": "Always"', "--pull-policy=Always", image={"pullPolicy": "Always"})
said('"memory": "1Gi"', "--memory=1Gi", memory="1Gi")
said('"pool": "a"', "--node-selector=pool=a", "--node-selector=gpu=true", nodeSelector={"pool": "a", "gpu": "true"})
said('"name": "lab"', "--name=lab", fullnameOverride="lab")
said('"--kubelet-root=/var/lib/k0s"', "--kubelet-root=/var/lib/k0s", kubeletRoot="/var/lib/k0s")
said('"path": "/plugins"', "--device-plugin-dir=/plugins", devicePluginDir="/plugins")
said('"path": "/run/k"', "--pod-resources-socket=/run/k/p.sock", podResourcesSocket="/run/k/p.sock")
said('"path": "/cgroup"', "--cgroup-root=/cgroup", "--pod-log-dir=/logs", cgroupRoot="/cgroup", podLogDir="/logs")
said('"path": "/etc/cdi"', "--cdi-dir=/etc/cdi", cdiDir="/etc/cdi")


@case("--resource-api=v1beta1", "--no-extended-resource", resourceApi="v1beta1", extendedResource=False)
def older_servers(made: Installed) -> None:
    """For servers before 1.34 the DeviceClasses have no extendedResourceName."""
    for one in made.of("DeviceClass"):
        assert one["apiVersion"] == "resource.k8s.io/v1beta1"
        assert "extendedResourceName" not in one["spec"]


@case("--claim-status", claimStatus=True)
def claim_status(made: Installed) -> None:
    """--claim-status adds the rights to patch claims, and a policy."""
    rights = {resource: rule["verbs"] for rule in made.of("ClusterRole")[0]["rules"] for resource in rule["resources"]}
    assert rights["resourceclaims/status"] == ["patch"]
    assert rights["resourceclaims/driver"] == ["associated-node:patch"]
    assert len(made.of("ValidatingAdmissionPolicy")) == 6
    assert "--claim-status" in made.arguments


@case("--flow-schema", flowSchema=True)
def flow_schema(made: Installed) -> None:
    """--flow-schema gives a priority level to the requests of the agents alone."""
    (schema,), (level,) = made.of("FlowSchema"), made.of("PriorityLevelConfiguration")
    assert schema["spec"]["priorityLevelConfiguration"]["name"] == level["metadata"]["name"]
    (rule,) = schema["spec"]["rules"]
    (account,) = made.of("ServiceAccount")
    (subject,) = rule["subjects"]
    assert subject["serviceAccount"] == {key: account["metadata"][key] for key in ("name", "namespace")}


@case("--quota=2", "--tenant=team", "--tenant=other", quota={"devices": 2, "namespaces": ["team", "other"]})
def quota(made: Installed) -> None:
    """--quota makes a ResourceQuota for each tenant with one key per resource, for limits and claims together."""
    quotas = made.of("ResourceQuota")
    assert [one["metadata"]["namespace"] for one in quotas] == ["team", "other"]
    resources = {one["name"] for one in yaml.safe_load(TEXT)["resources"]}
    assert all(one["spec"]["hard"] == {f"requests.{name}": "2" for name in resources} for one in quotas)


@case("--kueue", kueue=True)
@case("--kueue", kueue=True, fields="devices: [{path: /dev/x}], driver: '1.2'")
def kueue(made: Installed) -> None:
    """--kueue maps the DeviceClass of each resource to the resource's own name in Kueue's quotas."""
    (found,) = (one for one in made.of("ConfigMap") if one["metadata"]["name"] == "dra-bridge-kueue")
    configuration = yaml.safe_load(found["data"]["controller_manager_config.yaml"])
    classes = {one["spec"]["extendedResourceName"]: one["metadata"]["name"] for one in made.of("DeviceClass")}
    assert configuration["resources"]["deviceClassMappings"] == [
        {"name": name, "deviceClassNames": [classes[name]]} for name in classes
    ]


@case("--check-parameters", checkParameters={"fpga.example.com": f'"{TAKES_NONE}"'})
def parameters(made: Installed) -> None:
    """--check-parameters adds a policy that refuses parameters; the driver of a config file takes none."""
    (policy,) = (one for one in made.of("ValidatingAdmissionPolicy") if one["metadata"]["name"].endswith("-parameters"))
    problem = policy["spec"]["variables"][-1]["expression"]
    assert all(text in problem for text in ("fpga.example.com", TAKES_NONE))


@case("--kueue", "--check-parameters", fields=PLAIN, kueue=True)
def nothing_for_claims(made: Installed) -> None:
    """Without drivers there are no DeviceClasses for Kueue and no policy for parameters."""
    assert made.kinds == ["Namespace", "ConfigMap", "DaemonSet"]


@case("--metrics-port=0", metricsPort=0)
def no_metrics(made: Installed) -> None:
    """Without a metrics port there are no probes, and no Role for operators."""
    assert not {"ports", "livenessProbe", "startupProbe", "readinessProbe"} & made.container.keys()
    assert [one["metadata"]["name"] for one in made.of("Role")] == ["dra-bridge"]


@case("--metrics-port=443", metricsPort=443)
def a_low_port(made: Installed) -> None:
    """A metrics port below 1024 needs the capability NET_BIND_SERVICE."""
    assert made.container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}


@case(text=f"{TEXT}metrics: {{certificate: /tls/both.pem}}\n")
def probes_by_tls(made: Installed) -> None:
    """With a certificate for the metrics the probes use HTTPS."""
    probes = [made.container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe.get("scheme") for probe in probes] == ["HTTPS"] * 3


@case(fields=PLAIN)
@case("--plugin-only", bridge=False)
@case("--plugin-only", "--claim-status", bridge=False, claimStatus=True)
def limits_alone(made: Installed) -> None:
    """Without drivers, or with --plugin-only, there are no objects for DRA and no rights at the API server."""
    assert made.kinds == ["Namespace", "ConfigMap", "DaemonSet"]
    writable = {path for path, writable in made.writable.items() if writable}
    assert writable == {"/var/lib/kubelet/device-plugins", "/var/run/cdi"}
    assert made.container["command"] == ["deviceplugin"]
    assert (made.pod["automountServiceAccountToken"], made.pod["serviceAccountName"]) == (False, "default")
    assert not [one for one in made.arguments if one.startswith(("--cdi-dir", "--claim-status"))]


def taken(made: Installed) -> argparse.Namespace:
    """Return the options of `deviceplugin run` in the agent's arguments, parsed by the program."""
    options = argparse.ArgumentParser()
    add_run_options(options)
    assert made.arguments[0] == "run"
    return options.parse_args([one for one in made.arguments[1:] if one != CONFIG_ARGUMENT])


@case(
    *("--kubelet-root=/k", "--device-plugin-dir=/plugins", "--pod-resources-socket=/run/k/p.sock"),
    *("--cgroup-root=/cgroup", "--pod-log-dir=/logs"),
    fields=PLAIN,
    kubeletRoot="/k",
    devicePluginDir="/plugins",
    podResourcesSocket="/run/k/p.sock",
    cgroupRoot="/cgroup",
    podLogDir="/logs",
)
def places_of_the_nodes(made: Installed) -> None:
    """Paths that differ from the defaults are arguments of the agent, and are mounted at the same path."""
    hosts = {one["name"]: one["hostPath"]["path"] for one in made.pod["volumes"] if "hostPath" in one}
    cdi = ("/var/run/cdi", "/etc/cdi")
    same = {path: path for path in ("/k", "/plugins", "/run/k", "/var/log/containers", "/logs", *cdi, "/dev")}
    mounts = {hosts[one["name"]]: one["mountPath"] for one in made.container["volumeMounts"] if one["name"] in hosts}
    assert mounts == {**same, "/cgroup": "/host/sys/fs/cgroup"}
    found = taken(made)
    assert (found.kubelet_root, found.device_plugin_dir) == (Path("/k"), Path("/plugins"))
    assert (found.pod_resources_socket, found.pod_log_dir) == (Path("/run/k/p.sock"), Path("/logs"))
    assert found.cgroup_root == Path("/host/sys/fs/cgroup")


@case(fields=PLAIN)
@case(
    "--kubelet-root=/k",
    "--device-plugin-dir=/k/device-plugins",
    fields=PLAIN,
    kubeletRoot="/k",
    devicePluginDir="/k/device-plugins",
)
def usual_places_are_not_said(made: Installed) -> None:
    """Default paths are not arguments of the agent."""
    root = ["--kubelet-root=/k"] if "/k" in made.hosts else []
    usual = ["run", CONFIG_ARGUMENT, "--cgroup-root=/host/sys/fs/cgroup", "--metrics-address=:9410"]
    assert sorted(made.arguments) == sorted([*usual, *root])


@case("--privileged=never", fields=f"{PLAIN}, health: {{probe: open}}", privileged="never")
@case(fields=PLAIN)
@case(fields=f"{CLAIMED}, dra: {{share: all}}")
@case(fields="devices: [{pci: {driver: vfio-pci}}]")
@case(fields="devices: [{usb: {vendor: '0403'}}]")
@case(fields="devices: [{nvidia: {}}]")
@case(fields="devices: [{simulated: {count: 1}}], health: {probe: open}")
def unprivileged(made: Installed) -> None:
    """The agent is unprivileged if it opens no device, or if the deployment requests it."""
    assert made.container["securityContext"] == UNPRIVILEGED
    assert BECAUSE not in made.template["metadata"].get("annotations", {})


def privileged(why: str, *options: str, fields: str = PLAIN, **values: Any) -> None:
    """Add a case of a privileged agent, with the reason in an annotation of its pod."""

    def privileged_because(made: Installed) -> None:
        assert made.container["securityContext"] == PRIVILEGED
        assert why in made.template["metadata"]["annotations"][BECAUSE]

    case(*options, fields=fields, **values)(privileged_because)


privileged("the deployment asks for it", "--privileged=always", privileged="always")
for fields, why in (
    ("devices: [{path: /dev/x}, {simulated: {count: 1}}], health: {probe: open}", "`health.probe: open` opens device"),
    (f"{PLAIN}, health: {{probe: {{command: [/bin/look]}}}}", "the command of `health.probe` may open device nodes"),
    ("devices: [{nvidia: {mig: single, injection: cdi}}]", "may not see partitions that are made later"),
    ("devices: [{nvidia: {profile: 1g.10gb}}]", "may not see partitions that are made later"),
    ("devices: [{nvidia: {library: /opt/libnvidia-ml.so.1}}]", "`library` opens the GPUs' nodes"),
):
    privileged(why, fields=fields)


@case(
    fields="devices: [{path: /run/x/*/y}], health: {probe: {command: [x]}}, "
    "mounts: [{host: /opt/x, container: /x}, {host: /dev/shm, container: /y}]"
)
def locks(made: Installed) -> None:
    """The agent's arguments allow the commands and host paths of this config, and no others."""
    assert made.locks == ["--allow-commands", "--allow-host-path=/opt/x", "--allow-host-path=/run/x/*/y"]
    assert made.writable["/tmp"]


@case(fields=f"{PLAIN}, nodes: [/dev/control, /run/ctl/node]")
def shared_nodes(made: Installed) -> None:
    """Nodes under `nodes` are mounted and allowed, as the agent reads them for a claim's CDI file."""
    assert "/run/ctl" in made.hosts
    assert made.locks == ["--allow-host-path=/run/ctl/node"]
    assert "/tmp" not in made.writable


@case(fields="devices: [{simulated: {count: 1, unhealthy_file: /run/down/all}}], health: {probe: open}")
def the_directory_of_a_file_is_made(made: Installed) -> None:
    """The directory of `unhealthy_file` is created if the node does not have it."""
    assert made.hosts["/run/down"] == "DirectoryOrCreate"


@case(fields="devices: [{simulated: {count: 1, unhealthy_file: /a/x}}, {path: /a/y*}]")
@case(fields="devices: [{simulated: {count: 1, unhealthy_file: /a/b/x}}, {path: /a/y*}]")
@case(fields="devices: [{path: /a/b-c/x}, {path: /a/b/x}, {path: /a/b/c/x*}, {path: /a/b*/c}], nodes: [/dev.d/x]")
def directories_within_another(made: Installed) -> None:
    """A directory below a mounted directory is not mounted again."""
    assert [path for path in made.hosts if path.startswith("/a")] == ["/a"]


@case("--runtime-class=nvidia", fields="devices: [{nvidia: {injection: env}}]", runtimeClass="nvidia")
@case("--runtime-class=nvidia", fields="devices: [{nvidia: {injection: cdi}}]", runtimeClass="nvidia")
def nvidia(made: Installed) -> None:
    """With a RuntimeClass, the NVIDIA container runtime gives the agent's pod the library of the driver."""
    environment = {one["name"]: one.get("value") for one in made.container["env"]}
    assert made.pod["runtimeClassName"] == "nvidia"
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"


@case()
@case("--cdi-dir=/etc/cdi", cdiDir="/etc/cdi")
def both_directories_of_cdi_specs(made: Installed) -> None:
    """The agent sees the specs in both directories of the CDI specification, and writes only to its own directory."""
    assert {made.writable["/etc/cdi"], made.writable["/var/run/cdi"]} == {True, False}


@case(fields="devices: [{plugin: {}}]")
@case(fields="devices: [{plugin: {claims: true}}], driver: b.example.com")
def adopted_plugins(made: Installed) -> None:
    """An agent that adopts plugins has the option --adopt and a writable directory for them, also with claims."""
    where = "/run/deviceplugin/plugins"
    assert f"--adopt={where}" in made.arguments
    assert made.writable[where]
    assert made.hosts[where] == "DirectoryOrCreate"


@case(fields=f"{PLAIN}, driver: {'d' * 59}.com")
@case(fields=f"{PLAIN}, driver: dra-bridge")
@case(
    text="\n".join(
        [
            "resources:",
            *(
                f"- {{name: {domain}/{name}, {CLAIMED}}}"
                for name in ("Example.B", "a" * 63, "x--y", "very-long-name-of-a-thing")
                for domain in ("example.com", "other.example.org", f"{'d' * 60}.example.com")
            ),
        ]
    )
)
def names_of_classes(made: Installed) -> None:
    """DeviceClasses have unique names of at most 253 characters, also for long resource names."""
    names = [one["metadata"]["name"] for one in made.of("DeviceClass")]
    assert len(set(names)) == len(names) > 0
    assert max(map(len, names)) <= 253


def example(made: Installed) -> None:
    """Each example config file is a case without checks of its own."""


CASES += [Case(path.name, path.read_text(), (), {}, example) for path in EXAMPLES]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_manifests(
    one: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of `manifests` pass the checks of the case, and the program takes the agent's arguments."""
    made = Installed(printed(one, tmp_path, capsys))
    one.facts(made)
    (command,) = made.container["command"]
    program, package = {"deviceplugin": (plugin_cli, "deviceplugin"), "dra-bridge": (cli, "dra_bridge")}[command]
    monkeypatch.setattr(f"{package}.node.process.run_config", lambda *_: 7)
    monkeypatch.setattr(cli, "run_options", lambda _: None)  # `run_options` would read the access to an API server
    assert program.main(made.arguments) == 7


@helm_is_there
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_chart(one: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chart makes the same objects as `manifests`, without the Namespace."""
    found, wanted = by_name(rendered({"config": one.text, **one.values})), by_name(printed(one, tmp_path, capsys))
    assert found.keys() == wanted.keys()
    for name, body in wanted.items():
        assert found[name] == body, name
