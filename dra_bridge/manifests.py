"""Makes the manifests that deploy the agent on a cluster's nodes, with no more rights than the agent needs.

`manifests` is a pure function of the configuration: it fills in the template manifests.yaml. `to_yaml` returns the
result as text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import takewhile
from pathlib import PurePosixPath
from string import Template
from typing import Any, Final, Literal

import yaml

from deviceplugin import addresses, cdi, cdi_specs
from deviceplugin.config import ADOPTED, Config, ResourceConfig, needed
from deviceplugin.naming import EXTENDED_RESOURCE, canonical_resource, class_name
from deviceplugin.version import VERSION

Manifest = dict[str, Any]
KUEUE_MAPPINGS: Final = 16
"""Maximum number of deviceClassMappings that Kueue accepts in its configuration (0.19.2, pkg/config/validation.go)."""
_WIDE: Final = {"/etc", "/proc", "/root", "/run", "/var", "/var/lib", "/var/run"}


@dataclass(frozen=True, slots=True)
class Deployment:
    """The settings of the agent's deployment. The defaults suit a cluster made by kubeadm.

    version: the version of resource.k8s.io for the DeviceClasses. extended_resource: whether the DeviceClasses name the
    extended resource, so that unchanged pods get devices through DRA (servers before 1.34 refuse the field).
    metrics_port: the port of metrics and probes, 0 for neither. runtime_class: the RuntimeClass from which the agent's
    container gets NVIDIA's library, "" for none. device_plugin_directory, pod_resources_socket (if "",
    pod-resources/kubelet.sock in kubelet_root), cgroup_root, pod_log_directory: paths on the nodes, as in the options
    of `run`. own_command: the command of a Python program that calls `dra_bridge.run` and reads no config file; () for
    `dra-bridge run`. privileged: whether the agent's container is privileged; "auto": only if the configuration
    requires this (`privileges`). writable_sys: directories of sysfs to mount writable, for hooks in an `own_command`;
    the rest of a container's /sys is read-only. quota: number of devices of each resource that a namespace in `tenants`
    may have. tenants: the namespaces that get a ResourceQuota with the number `quota`. kubernetes: the API server's
    minor version; before 36, a quota counts claims apart from limits. kueue: whether to make a ConfigMap with Kueue's
    configuration for the DeviceClasses. parameters: for each driver, the CEL expression that checks the parameters of
    claims and classes (`parameters.expression`). An admission policy refuses claims and classes for which the
    expression returns a problem. The policy accepts any parameters of a driver without an expression. flow_schema:
    whether the agents' requests have a priority level of their own at the API server. plugin_only: whether to run
    `deviceplugin run`, which does not use the API server. Without a resource that names a driver, `deviceplugin run` is
    used in any case.
    """

    image: str = f"deviceplugin:{VERSION}"
    namespace: str = "dra-bridge"
    name: str = "dra-bridge"
    version: Literal["v1", "v1beta2", "v1beta1"] = "v1"
    extended_resource: bool = True
    kubelet_root: str = "/var/lib/kubelet"
    device_plugin_directory: str = "/var/lib/kubelet/device-plugins"
    pod_resources_socket: str = ""
    cgroup_root: str = "/sys/fs/cgroup"
    pod_log_directory: str = "/var/log/pods"
    cdi_directory: str = cdi.DIRECTORY
    claim_status: bool = False
    metrics_port: int = 9410
    memory: str = "128Mi"
    node_selector: Mapping[str, str] | None = None
    pull_policy: str = "IfNotPresent"
    runtime_class: str = ""
    own_command: tuple[str, ...] = ()
    privileged: Literal["auto", "always", "never"] = "auto"
    writable_sys: tuple[str, ...] = ()
    plugin_only: bool = False
    quota: int = 0
    tenants: tuple[str, ...] = ()
    kubernetes: int = 36
    kueue: bool = False
    parameters: Mapping[str, str] | None = None
    flow_schema: bool = False


def privileges(config: Config, deployment: Deployment) -> list[str]:
    """Return the reasons why the agent's container is privileged, as sentences; [] if it is not privileged.

    The device cgroup of an unprivileged container allows no process to open the host's device nodes, for any owner and
    mode of the nodes. The agent lists device nodes, watches them and gives them to containers without opening them. The
    NVIDIA runtime opens the nodes of the GPUs that exist when the container starts. The needs of an `own_command` are
    unknown, so its container is privileged only if `privileged` is "always".
    """
    if deployment.privileged != "auto":
        return ["the deployment asks for it"] if deployment.privileged == "always" else []
    reasons = []
    for resource in config.resources:
        entries, probe = resource.devices, resource.health.probe
        if probe == "open" and any(entry.simulated is None for entry in entries):
            reasons.append(f"{resource.name}: `health.probe: open` opens device nodes")
        elif not isinstance(probe, str):
            reasons.append(f"{resource.name}: the command of `health.probe` may open device nodes")
        wanted = [entry.nvidia for entry in entries if entry.nvidia]
        if any(gpus.mig != "none" or gpus.profile for gpus in wanted):
            reasons.append(f"{resource.name}: an unprivileged container may not see partitions that are made later")
        if any(gpus.library for gpus in wanted):
            reasons.append(f"{resource.name}: `library` opens the GPUs' nodes without the NVIDIA runtime")
    return reasons


def manifests(config: Config, text: str, deployment: Deployment | None = None) -> list[Manifest]:
    """Return the objects to apply to the cluster, in this order. text: the content of the config file, for a ConfigMap.

    If `text` is empty, there is no such ConfigMap. Raises ValueError if the path of a driver's socket would be too
    long, or if there are more resources than Kueue accepts.
    """
    how = deployment or Deployment()
    served = bridged(config, how)
    drivers = sorted({resource.driver or "" for resource in served})
    bridge = True if drivers else None
    nvidia = [entry.nvidia for resource in config.resources for entry in resource.devices if entry.nvidia]
    root = how.kubelet_root.rstrip("/")
    for driver in drivers:
        addresses.socket_path(f"{root}/plugins_registry", driver, "-0123456789ab-reg.sock")
    lock, reasons = needed(config), privileges(config, how)
    values = {
        **asdict(how),
        "affinity": None,
        "arguments": [*arguments(how, root, bool(bridge)), *([] if how.own_command else lock.arguments())],
        "bridge": bridge,
        "claim_status": how.claim_status and bridge,
        "flow_schema": how.flow_schema and bridge,
        "command": list(how.own_command) or ["dra-bridge" if bridge else "deviceplugin"],
        "config": text,
        "driver_list": json.dumps(drivers),
        "resource_list": json.dumps(sorted(resource.name for resource in served)),
        "container_resources": {"requests": {"cpu": "10m", "memory": "72Mi"}, "limits": {"memory": how.memory}},
        "drivers": drivers,
        "image_pull_secrets": None,
        "node_selector": {"kubernetes.io/os": "linux", **(how.node_selector or {})},
        "asks_agents": how.metrics_port and bridge,
        "kueue": how.kueue and _kueue(how, served),
        "nvidia": nvidia,
        "parameter_problem": _parameter_problem(how.parameters or {}) if served else "",
        "pod_resources_directory": str(PurePosixPath(how.pod_resources_socket or f"{root}/pod-resources/x").parent),
        "pod_annotations": {"dra-bridge/privileged-because": "; ".join(reasons)} if reasons else None,
        "pod_labels": {"app.kubernetes.io/name": how.name, "app.kubernetes.io/managed-by": "dra-bridge"},
        "port_capabilities": ["NET_BIND_SERVICE"] if 0 < how.metrics_port < 1024 else None,
        "priority_class": "system-node-critical",
        "privileged": True if reasons else None,
        "root": root,
        "runtime_class": how.runtime_class or None,
        "runs_programs": how.own_command or lock.commands,
        "scheme": None if config.metrics.certificate is None else "HTTPS",
        "service_account": how.name if bridge else "default",
        "token": None if bridge else False,
        "tolerations": [{"operator": "Exists"}],
        "unprivileged": not reasons,
        "update_strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "escalation": None if reasons else False,
    }
    *first, device_class, quota, config_map, daemon_set = _template()
    classes = [filled(device_class, {**values, **_class_values(how, resource)}) for resource in served]
    hard = {key: value for resource in config.resources for key, value in _hard(how, resource, served).items()}
    classes += [filled(quota, {**values, "tenant": tenant, "hard": hard}) for tenant in how.tenants]
    *first, daemon_set = filled([*first, config_map, daemon_set], values)
    last = [first.pop(), daemon_set] if text else [daemon_set]
    pod = daemon_set["spec"]["template"]["spec"]
    for number, (directory, kind) in enumerate(_directories(config).items()):
        _mount(pod, f"devices-{number}", directory, kind, mountPropagation="HostToContainer")
    for number, directory in enumerate(how.writable_sys):
        _mount(pod, f"sys-{number}", directory, "Directory", read_only=False)
    if lock.plugins:
        _mount(pod, "adopted", ADOPTED, "DirectoryOrCreate", read_only=False)
    for directory in cdi_specs.DIRECTORIES:
        if directory != how.cdi_directory:
            # Specs of NVIDIA's tools and of other drivers' claims may be here.
            _mount(pod, directory[1:].replace("/", "-"), directory, "DirectoryOrCreate")
    return [*first, *classes, *last]


def to_yaml(objects: Iterable[Any]) -> str:
    """Return objects as documents of one YAML text."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, explicit_start=True
    )


@functools.cache
def _template() -> list[Manifest]:
    """Return the objects of manifests.yaml. The result is cached, so the caller must not change it."""
    template: list[Manifest] = yaml.safe_load(resources.files(__package__).joinpath("manifests.yaml").read_bytes())
    return template


def filled(part: Any, values: Mapping[str, Any]) -> Any:
    """Return `part` of the template with each ${name} replaced by its value; None if the part's `when` is false.

    A part whose value is None or an empty list is left out of the object that contains it.
    """
    if isinstance(part, str):
        if whole := re.fullmatch(r"\$\{(\w+)\}", part):
            return values[whole[1]]
        return Template(part).substitute(values)
    if isinstance(part, list):
        return [one for element in part if (one := filled(element, values)) is not None]
    if isinstance(part, dict):
        if not filled(part.get("when", True), values):
            return None
        items = ((key, filled(value, values)) for key, value in part.items() if key != "when")
        return {key: value for key, value in items if value is not None and value != []}
    return part


def _mount(pod: Manifest, name: str, path: str, kind: str, *, read_only: bool = True, **more: str) -> None:
    """Add a directory of the host to the agent's pod, at the same path."""
    mount: Manifest = {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {}), **more}
    pod["volumes"].append({"name": name, "hostPath": {"path": path, "type": kind}})
    pod["containers"][0]["volumeMounts"].append(mount)


def bridged(config: Config, how: Deployment) -> list[ResourceConfig]:
    """Return the resources whose devices claims can get: the resources with a driver; [] if `plugin_only` is set."""
    return [] if how.plugin_only else [resource for resource in config.resources if resource.driver]


def arguments(
    how: Deployment,
    root: str,
    bridge: bool,
    config: str = "/etc/dra-bridge/config.yaml",
    cgroup_root: str = "/host/sys/fs/cgroup",
) -> list[str]:
    """Return the arguments of the agent's program.

    root: the kubelet's root. config, cgroup_root: paths as the program sees them, for example in its container.
    """
    given = [] if how.own_command else ["run", f"--config={config}"]
    if cgroup_root != "/sys/fs/cgroup":
        given.append(f"--cgroup-root={cgroup_root}")
    if how.claim_status and bridge:
        given.append("--claim-status")
    if root != "/var/lib/kubelet":
        given.append(f"--kubelet-root={root}")
    if how.device_plugin_directory != f"{root}/device-plugins":
        given.append(f"--device-plugin-dir={how.device_plugin_directory}")
    if how.pod_resources_socket:
        given.append(f"--pod-resources-socket={how.pod_resources_socket}")
    if how.pod_log_directory != "/var/log/pods":
        given.append(f"--pod-log-dir={how.pod_log_directory}")
    if how.cdi_directory != cdi.DIRECTORY:
        given.append(f"--cdi-dir={how.cdi_directory}")
    if how.metrics_port:
        given.append(f"--metrics-address=:{how.metrics_port}")
    return given


def _class_values(how: Deployment, resource: ResourceConfig) -> Manifest:
    return {
        "attribute": EXTENDED_RESOURCE,
        "canonical": canonical_resource(resource.name),
        "class_name": class_name(resource.name, resource.driver or ""),
        "driver": resource.driver,
        "extended_resource_name": resource.name if how.extended_resource and how.version == "v1" else None,
    }


def _hard(how: Deployment, resource: ResourceConfig, served: Collection[ResourceConfig]) -> dict[str, str]:
    """Return a resource's entries in the field `hard` of a ResourceQuota: for each key, the value.

    Since Kubernetes 1.36, the key `requests.` also counts claims of the DeviceClass that names the resource. Older
    versions count claims by a separate key (pkg/quota/v1/evaluator/core/resource_claims.go).
    """
    hard, values = {f"requests.{resource.name}": str(how.quota)}, _class_values(how, resource)
    if resource in served and (how.kubernetes < 36 or not values["extended_resource_name"]):
        hard[f"{values['class_name']}.deviceclass.resource.k8s.io/devices"] = str(how.quota)
    return hard


def _kueue(how: Deployment, served: Collection[ResourceConfig]) -> str:
    """Return a configuration for Kueue, as YAML, by which Kueue counts `limits` and claims under one resource name."""
    if len(served) > KUEUE_MAPPINGS:
        raise ValueError(
            f"Kueue takes at most {KUEUE_MAPPINGS} deviceClassMappings, but {len(served)} resources need one"
        )
    lines = ["apiVersion: config.kueue.x-k8s.io/v1beta2", "kind: Configuration", "resources:", "  deviceClassMappings:"]
    for resource in served:
        class_name = _class_values(how, resource)["class_name"]
        lines.append(f'  - {{name: "{resource.name}", deviceClassNames: ["{class_name}"]}}')
    return "\n".join([*lines, ""]) if served else ""


def _parameter_problem(expressions: Mapping[str, str]) -> str:
    """Return the policy's CEL expression, whose value is the first problem in parameters; "" if nothing is checked."""
    if not expressions:
        return ""
    chosen = "".join(
        f'p.driver == "{driver}" ? [{found}].filter(t, t != "").map(t, "parameters of {driver}: " + t) : '
        for driver, found in sorted(expressions.items())
    )
    pieces = "variables.config.filter(c, has(c.opaque)).map(c, c.opaque)"
    return f'{pieces}.map(p, {chosen}[]).filter(t, t.size() > 0).map(t, t[0])[?0].orValue("")'


def wide_mounts(config: Config) -> list[str]:
    """Return the mounted directories that contain sockets of container runtimes, or secrets of the node."""
    return [directory for directory in _directories(config) if directory in _WIDE]


def _directories(config: Config) -> dict[str, str]:
    """Return the host directories where the agent looks for devices: for each path, the type of its hostPath volume.

    /dev is not included. The directory of a file that lists unhealthy simulated devices is created if it is missing.
    """
    directories: dict[PurePosixPath, str] = {}
    for resource in config.resources:
        globs = list(resource.nodes)
        for entry in resource.devices:
            globs += entry.globs
            if entry.simulated is not None and entry.simulated.unhealthy_file:
                directories.setdefault(_fixed(entry.simulated.unhealthy_file), "DirectoryOrCreate")
        directories |= {_fixed(glob): "Directory" for glob in globs}
    wanted = sorted(path for path in directories if path != PurePosixPath("/") and not path.is_relative_to("/dev"))
    return {str(path): directories[path] for path in wanted if not any(other in path.parents for other in wanted)}


def _fixed(glob: str) -> PurePosixPath:
    """Return the directory that contains all matches of a glob: the part of the glob before the first wildcard."""
    steps = PurePosixPath(glob).parent.parts
    return PurePosixPath(*takewhile(lambda step: not re.search(r"[*?\[]", step), steps))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as YAML blocks, and repeated values in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
