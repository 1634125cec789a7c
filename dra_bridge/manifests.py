"""What to apply to a cluster so that the agent runs on its nodes, with no more rights than it needs.

`manifests` is a pure function of the configuration; `to_yaml` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import yaml

from deviceplugin.config import Config, ResourceConfig
from deviceplugin.naming import EXTENDED_RESOURCE, canonical_resource, class_name

__all__ = ["Deployment", "manifests", "to_yaml"]

Object = dict[str, Any]

NODE_NAME_KEY: Final = "authentication.kubernetes.io/node-name"
"""What a token bound to a pod says of its node (kube-apiserver, on by default since 1.32)."""

CONFIG_DIRECTORY: Final = "/etc/dra-bridge"
HOST: Final = "/host"
"""Where directories of the host are mounted that a container has its own of."""
CONFIG_FILE: Final = "config.yaml"


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the agent is to run; the defaults suit a cluster made by kubeadm.

    version: of resource.k8s.io for the DeviceClasses. extended_resource: whether these name the
    extended resource, so that unchanged pods get devices through DRA (servers before 1.34 refuse
    the field). claim_status: whether the agent writes status.devices of claims. metrics_port: 0 for
    none, and then there are no probes either. memory: the limit.
    runtime_class: of the agent's pod, none if empty; the agent gets NVIDIA's library from the runtime.
    """

    image: str = "deviceplugin:0.1.0"
    namespace: str = "dra-bridge"
    name: str = "dra-bridge"
    version: Literal["v1", "v1beta2", "v1beta1"] = "v1"
    extended_resource: bool = True
    kubelet_root: str = "/var/lib/kubelet"
    cdi_directory: str = "/var/run/cdi"
    claim_status: bool = False
    metrics_port: int = 9410
    memory: str = "128Mi"
    node_selector: Mapping[str, str] | None = None
    pull_policy: str = "IfNotPresent"
    runtime_class: str = ""


def manifests(config: Config, text: str, deployment: Deployment | None = None) -> list[Object]:
    """Return the objects to apply, in their order.

    config: the configuration. text: the same as it is in the file, for the ConfigMap.
    """
    how = deployment or Deployment()
    drivers = sorted({resource.driver for resource in config.resources if resource.driver})
    return [
        _namespace(how),
        _service_account(how),
        _cluster_role(how, drivers),
        _cluster_role_binding(how),
        _operator_role(how),
        *_policies(how, drivers),
        *_device_classes(how, config),
        _config_map(how, text),
        _daemon_set(how, config),
    ]


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return the objects as documents of one YAML text."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, explicit_start=True
    )


# --- who may do what ------------------------------------------------------------------------------


def _labels(how: Deployment) -> Object:
    return {"app.kubernetes.io/name": how.name, "app.kubernetes.io/managed-by": "dra-bridge"}


def _metadata(how: Deployment, name: str = "", *, namespaced: bool = False) -> Object:
    metadata: Object = {"name": name or how.name}
    if namespaced:
        metadata["namespace"] = how.namespace
    metadata["labels"] = _labels(how)
    return metadata


def _namespace(how: Deployment) -> Object:
    labels = {**_labels(how), "pod-security.kubernetes.io/enforce": "privileged"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": how.namespace, "labels": labels}}


def _service_account(how: Deployment) -> Object:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(how, namespaced=True)}


def _cluster_role(how: Deployment, drivers: Sequence[str]) -> Object:
    dra = ["resource.k8s.io"]
    rules: list[Object] = [
        # its own Node: the UID for the slices' owner, annotations that steer it. It never writes Nodes.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": dra,
            "resources": ["resourceslices"],
            "verbs": ["get", "list", "watch", "create", "update", "delete"],
        },
        {"apiGroups": dra, "resources": ["resourceclaims"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]
    if how.claim_status and drivers:
        rules += [
            {"apiGroups": dra, "resources": ["resourceclaims/status"], "verbs": ["patch"]},
            # Since 1.36 status.devices is guarded by driver, and by the node of the claim's allocation.
            {
                "apiGroups": dra,
                "resources": ["resourceclaims/driver"],
                "resourceNames": list(drivers),
                "verbs": ["associated-node:patch"],
            },
        ]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": _metadata(how),
        "rules": rules,
    }


def _operator_role(how: Deployment) -> Object:
    """The rights that `migrate`, `rollout` and `status` take, for who is to have them; bound to nobody here."""
    dra, reads = ["resource.k8s.io"], ["get", "list", "watch"]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": _metadata(how, f"{how.name}-operator"),
        "rules": [
            {"apiGroups": [""], "resources": ["nodes"], "verbs": [*reads, "patch"]},
            # pods in trouble, and why, stop a rollout
            {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]},
            {"apiGroups": dra, "resources": ["resourceslices"], "verbs": list(reads)},
            {"apiGroups": dra, "resources": ["resourceclaims"], "verbs": ["list"]},
        ],
    }


def _cluster_role_binding(how: Deployment) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": _metadata(how),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": how.name},
        "subjects": [{"kind": "ServiceAccount", "name": how.name, "namespace": how.namespace}],
    }


def _policies(how: Deployment, drivers: Sequence[str]) -> list[Object]:
    """What RBAC cannot tell apart: another node's slices, and the parts of a claim's status.

    The node is the one that a token is bound to. Since 1.36 the API server guards the parts of a
    claim's status by itself.
    """
    known = "[" + ", ".join(f'"{driver}"' for driver in drivers) + "]"
    slices = _policy(
        how,
        f"{how.name}-own-slices",
        "resourceslices",
        ["CREATE", "UPDATE", "DELETE"],
        {
            "userNode": f'request.userInfo.extra[?"{NODE_NAME_KEY}"][0].orValue("")',
            "slice": 'request.operation == "DELETE" ? oldObject : object',
            "sliceNode": 'variables.slice.spec.?nodeName.orValue("")',
        },
        [
            {
                "expression": 'variables.userNode != ""',
                "message": "the token is not bound to a node; only pods on a node may write ResourceSlices",
            },
            {
                "expression": "variables.sliceNode == variables.userNode",
                "messageExpression": '"the agent on node " + variables.userNode '
                '+ " may not write ResourceSlices of node " + variables.sliceNode',
            },
            {
                "expression": f"variables.slice.spec.driver in {known}",
                "messageExpression": '"driver " + variables.slice.spec.driver + " is not in the configuration"',
            },
        ],
    )
    if not how.claim_status:
        return slices
    claims = _policy(
        how,
        f"{how.name}-own-device-status",
        "resourceclaims/status",
        ["UPDATE"],
        {
            "others": f"object.?status.?devices.orValue([]).filter(d, !(d.driver in {known}))",
            "othersBefore": f"oldObject.?status.?devices.orValue([]).filter(d, !(d.driver in {known}))",
        },
        [
            {
                "expression": "object.?status.?allocation == oldObject.?status.?allocation",
                "message": "the agent may not change status.allocation",
            },
            {
                "expression": "object.?status.?reservedFor.orValue([]) == oldObject.?status.?reservedFor.orValue([])",
                "message": "the agent may not change status.reservedFor",
            },
            {
                "expression": "variables.others == variables.othersBefore",
                "message": "the agent may not change the status of other drivers' devices",
            },
        ],
    )
    return [*slices, *claims]


def _policy(
    how: Deployment,
    name: str,
    resource: str,
    operations: Sequence[str],
    variables: Mapping[str, str],
    validations: Sequence[Mapping[str, str]],
) -> list[Object]:
    rule = {
        "apiGroups": ["resource.k8s.io"],
        "apiVersions": ["*"],
        "operations": list(operations),
        "resources": [resource],
    }
    agent = f'request.userInfo.username == "system:serviceaccount:{how.namespace}:{how.name}"'
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": _metadata(how, name),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule]},
                "matchConditions": [{"name": "is-the-agent", "expression": agent}],
                "variables": [{"name": key, "expression": expression} for key, expression in variables.items()],
                "validations": [dict(one) for one in validations],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": _metadata(how, name),
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


# --- classes --------------------------------------------------------------------------------------


def _device_classes(how: Deployment, config: Config) -> list[Object]:
    return [_device_class(how, resource, resource.driver) for resource in config.resources if resource.driver]


def _device_class(how: Deployment, resource: ResourceConfig, driver: str) -> Object:
    expression = (
        f'device.driver == "{driver}" && '
        f'device.attributes["{driver}"].{EXTENDED_RESOURCE} == "{canonical_resource(resource.name)}"'
    )
    spec: Object = {"selectors": [{"cel": {"expression": expression}}]}
    if how.extended_resource:
        spec["extendedResourceName"] = resource.name
    return {
        "apiVersion": f"resource.k8s.io/{how.version}",
        "kind": "DeviceClass",
        "metadata": _metadata(how, class_name(resource.name, driver)),
        "spec": spec,
    }


# --- the agent ------------------------------------------------------------------------------------


def _config_map(how: Deployment, text: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(how, namespaced=True),
        "data": {CONFIG_FILE: text},
    }


def _daemon_set(how: Deployment, config: Config) -> Object:
    root = how.kubelet_root.rstrip("/")
    # The device plugin directory is where it is whatever the kubelet's --root-dir says.
    directories = {
        # All of it, for the kubelet's claim state: a file there is replaced by renaming, so it cannot be mounted alone.
        "kubelet": root,
        "device-plugins": "/var/lib/kubelet/device-plugins",
        "plugins": f"{root}/plugins",
        "plugins-registry": f"{root}/plugins_registry",
        "pod-resources": f"{root}/pod-resources",
        "cdi": how.cdi_directory,
        "dev": "/dev",
        # Which pods' processes run, and the pods' names by their UIDs.
        "cgroup": "/sys/fs/cgroup",
        "pod-logs": "/var/log/pods",
    }
    for number, directory in enumerate(_directories(config)):
        directories[f"devices-{number}"] = directory
    volumes: list[Object] = [{"name": "config", "configMap": {"name": how.name}}]
    mounts: list[Object] = [{"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True}]
    for name, path in directories.items():
        made = "DirectoryOrCreate" if name in {"cdi", "plugins", "plugins-registry", "pod-logs"} else "Directory"
        volumes.append({"name": name, "hostPath": {"path": path, "type": made}})
        mount: Object = {"name": name, "mountPath": f"{HOST}{path}" if name == "cgroup" else path}
        if name in {"pod-logs", "pod-resources"}:
            mount |= {"readOnly": True}
        elif name in {"kubelet", "cgroup"} or name.startswith("devices-"):
            # What the host unmounts must not stay mounted here: the volumes of pods are below the kubelet's root.
            mount |= {"readOnly": True, "mountPropagation": "HostToContainer"}
        mounts.append(mount)
    environment: list[Object] = [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    nvidia = [entry.nvidia for resource in config.resources for entry in resource.devices if entry.nvidia]
    if nvidia:
        # The container runtime brings the driver's library along; no image can have it.
        environment += [
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
        ]
    if any(one.injection == "cdi" for one in nvidia) and how.cdi_directory != "/etc/cdi":
        # The names of GPUs are in a spec that NVIDIA's own tools wrote.
        volumes.append({"name": "etc-cdi", "hostPath": {"path": "/etc/cdi", "type": "DirectoryOrCreate"}})
        mounts.append({"name": "etc-cdi", "mountPath": "/etc/cdi", "readOnly": True})
    arguments = [
        "run",
        f"--config={CONFIG_DIRECTORY}/{CONFIG_FILE}",
        f"--cdi-dir={how.cdi_directory}",
        f"--cgroup-root={HOST}/sys/fs/cgroup",
    ]
    if how.claim_status:
        arguments.append("--claim-status")
    if root != "/var/lib/kubelet":
        arguments += [f"--kubelet-root={root}", "--device-plugin-dir=/var/lib/kubelet/device-plugins"]
    container: Object = {
        "name": "agent",
        "image": how.image,
        "imagePullPolicy": how.pull_policy,
        "command": ["dra-bridge"],
        "args": arguments,
        "env": environment,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": how.memory}},
        # Not where the default is: a file would be left in the host's /dev.
        "terminationMessagePath": "/run/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # It makes sockets in the kubelet's directories and opens whatever devices there are.
        "securityContext": {"privileged": True},
        "volumeMounts": mounts,
    }
    if how.metrics_port:
        arguments.append(f"--metrics-address=:{how.metrics_port}")
        container["ports"] = [{"name": "metrics", "containerPort": how.metrics_port}]
        tls = config.metrics.certificate is not None
        container["startupProbe"] = _probe("/healthz", period=2, failures=60, tls=tls)
        container["livenessProbe"] = _probe("/healthz", period=20, failures=3, tls=tls)
        container["readinessProbe"] = _probe("/readyz", period=10, failures=3, tls=tls)
    labels = {"app.kubernetes.io/name": how.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _metadata(how, namespaced=True),
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": _labels(how)},
                "spec": {
                    "serviceAccountName": how.name,
                    "priorityClassName": "system-node-critical",
                    **({"runtimeClassName": how.runtime_class} if how.runtime_class else {}),
                    "nodeSelector": {"kubernetes.io/os": "linux", **(how.node_selector or {})},
                    "tolerations": [{"operator": "Exists"}],
                    "terminationGracePeriodSeconds": 30,
                    # The pod's first process buries what the commands of health probes leave behind.
                    "shareProcessNamespace": True,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def _probe(path: str, *, period: int, failures: int, tls: bool) -> Object:
    return {
        "httpGet": {"path": path, "port": "metrics", **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _directories(config: Config) -> list[str]:
    """The host's directories, other than /dev, in which the configuration looks for devices."""
    found: set[str] = set()
    for resource in config.resources:
        found.update(map(_fixed, resource.nodes))
        for entry in resource.devices:
            globs = [*([entry.path] if entry.path else []), *(entry.group or ())]
            if entry.simulated is not None and entry.simulated.unhealthy_file:
                globs.append(entry.simulated.unhealthy_file)
            found.update(_fixed(glob) for glob in globs)
    wanted = sorted(directory for directory in found if directory != "/" and not _within(directory, "/dev"))
    return [one for one in wanted if not any(other != one and _within(one, other) for other in wanted)]


def _fixed(glob: str) -> str:
    """The directory of a glob down to where its wildcards begin."""
    directory = glob.rpartition("/")[0]
    steps: list[str] = []
    for step in directory.split("/"):
        if re.search(r"[*?\[]", step):
            break
        steps.append(step)
    return "/".join(steps) or "/"


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
