"""The objects of a cluster without findings, and for each finding the objects that cause it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dra_bridge.plan.findings import FindingKind
from tests.dra.objects import body

Object = dict[str, Any]
BOARD = "example.net/board"
DRIVER = "board.example.net"
GROUP = "eks.amazonaws.com/nodegroup"
COUNT = 4


def device_class(name: str = DRIVER, driver: str = DRIVER, resource: str = BOARD) -> Object:
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return body("DeviceClass", name, spec={"selectors": [selector], "extendedResourceName": resource})


def container(name: str = "main", **limits: int) -> Object:
    """Return a container; in the keys of its limits `_` stands for `.` and `__` for `/`."""
    named = {key.replace("__", "/").replace("_", "."): str(count) for key, count in limits.items()}
    return {"name": name, "image": "registry.example/none:1", "resources": {"limits": named} if named else {}}


def pod(name: str, count: int = 1, node: str = "", *, status: Object | None = None, **spec: Any) -> Object:
    """Return a pod with a limit for the resource BOARD; its scheduler does not exist, so nothing changes the pod."""
    whole = {"schedulerName": "nobody", "containers": [container(example_net__board=count)] if count else [], **spec}
    if node:
        whole["nodeName"] = node
    return body("Pod", name, "default", spec=whole, **({"status": status} if status else {}))


def program(image: str) -> Object:
    """Return a pod with this image."""
    return pod(image.rpartition("/")[2], 0, containers=[{"name": "main", "image": f"{image}:v1"}])


def node(
    name: str, version: str = "v1.36.3", count: int = COUNT, *, resource: str = BOARD, labels: Object | None = None
) -> Object:
    """Return a Node with devices."""
    quantities = {resource: str(count), "cpu": "8", "memory": "8Gi", "pods": "110"}
    info = dict.fromkeys(
        ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion",
         "kubeProxyVersion", "operatingSystem", "architecture"), "x",
    )  # fmt: skip
    status = {"capacity": quantities, "allocatable": quantities, "nodeInfo": {**info, "kubeletVersion": version}}
    return body("Node", name, meta={"labels": labels or {}}, status=status)


def resource_slice(node_name: str, *devices: str) -> Object:
    pool = {"name": node_name, "generation": 1, "resourceSliceCount": 1}
    listed = [{"name": name} for name in devices]
    spec = {"driver": DRIVER, "nodeName": node_name, "pool": pool, "devices": listed}
    return body("ResourceSlice", f"{node_name}-slice", spec=spec)


def claim(name: str, pod_name: str, node_name: str) -> Object:
    """Return a claim as the scheduler makes it for the limits of a pod."""
    request = {"name": "r", "exactly": {"deviceClassName": DRIVER, "count": 1}}
    result = {"request": "r", "driver": DRIVER, "pool": node_name, "device": "d0"}
    users = [{"resource": "pods", "name": pod_name, "uid": "u"}]
    return body(
        "ResourceClaim",
        name,
        "default",
        meta={"annotations": {"resource.kubernetes.io/extended-resource-claim": "true"}},
        spec={"devices": {"requests": [request]}},
        status={"allocation": {"devices": {"results": [result]}}, "reservedFor": users},
    )


def agents(**spec: Any) -> list[Object]:
    """Return the agents' DaemonSet, with a selector that matches no pods, and its ServiceAccount without rights."""
    meta = {"labels": {"app.kubernetes.io/managed-by": "dra-bridge"}}
    pod_spec = {"serviceAccountName": "agents", "containers": [container()], **spec}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod_spec}
    whole = {"selector": {"matchLabels": {"a": "b"}}, "template": template}
    return [body("ServiceAccount", "agents", "default"), body("DaemonSet", "agents", "default", meta=meta, spec=whole)]


def quota(*keys: str, **more: Any) -> Object:
    return body("ResourceQuota", "q", "default", spec={"hard": dict.fromkeys(keys, "9"), **more})


def config_map(namespace: str, name: str, **data: str) -> Object:
    return body("ConfigMap", name, namespace, data=data or {"x": "y"})


CALM: tuple[Object, ...] = (device_class(), pod("calm"))
"""Objects that cause no finding in a cluster with a node of Kubernetes 1.36 that has devices."""
AUTOSCALER = config_map("kube-system", "cluster-autoscaler-status")
HIGH = body("PriorityClass", "high", value=1000)
PICKY = {"name": "r", "exactly": {"deviceClassName": DRIVER, "selectors": [{"cel": {"expression": "true"}}]}}
TEMPLATE = body("ResourceClaimTemplate", "picky", "default", spec={"spec": {"devices": {"requests": [PICKY]}}})


@dataclass(frozen=True)
class Case:
    """Objects that are added to CALM, and words of the finding that they cause. arguments: for the command line."""

    kind: FindingKind
    objects: tuple[Object, ...]
    words: str
    arguments: tuple[str, ...] = ()


def in_group(name: str, group: str, **more: Any) -> Object:
    made = node(name, labels={GROUP: group})
    made["metadata"].update(more)
    return made


OF_HIGH = {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
MOUNT = {"name": "p", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
K = FindingKind
CASES = (
    Case(K.FITS_NOWHERE, (pod("giant", 5),), "pod default/giant asks for 5 example.net/board; the largest node has 4"),
    Case(K.ABOVE_32, (node("big", count=64), pod("many", 33)), "pod default/many asks for 33"),
    Case(K.PREEMPTS, (HIGH, pod("urgent", priorityClassName="high")), "PriorityClass high pods default/urgent"),
    Case(
        K.INIT_REUSES,
        (pod("two", 2, initContainers=[container("first", example_net__board=1)]),),
        "first asks for 1 example.net/board, beside 2",
    ),
    Case(K.NO_DRA, (node("old", "v1.31.9"),), "nodes of v1.31.9 old"),
    Case(K.DRA_OFF, (node("off", "v1.33.2"),), "nodes of v1.33.2 off"),
    Case(K.UNCHANGED_PODS, (node("plain", "v1.35.1"),), "nodes of v1.35.1 plain"),
    Case(K.FEATURES_OFF, (node("plain", "v1.34.0"),), "nodes of v1.34.0 plain"),
    Case(
        K.NO_CLASS, (pod("other", 0, containers=[container(example_net__other=1)]),), "example.net/other no DeviceClass"
    ),
    Case(K.TWO_CLASSES, (device_class("second", "x.example.net"),), "board.example.net (board.example.net), second"),
    Case(K.AGENT_RIGHTS, tuple(agents()), "default/agents may not create events, create resourceslices"),
    Case(
        K.AGENTS_KEPT_AWAY, tuple(agents(nodeSelector={"no": "node"})), "DaemonSet default/agents nodeSelector no=node"
    ),
    Case(
        K.OTHER_PLUGIN,
        (node("n2"), pod("vendor", 0, "n2", containers=[container()], volumes=[MOUNT])),
        "pod vendor in default nodes n2",
    ),
    Case(
        K.QUOTA_TWO_KEYS,
        (node("plain", "v1.35.1"), quota(f"requests.{BOARD}")),
        f"ResourceQuota default/q limits requests.{BOARD}, and not {DRIVER}.deviceclass.resource.k8s.io/devices",
    ),
    Case(
        K.QUOTA_SCOPED,
        (HIGH, quota(f"requests.{BOARD}", scopeSelector={"matchExpressions": [OF_HIGH]})),
        "ResourceQuota default/q scope PriorityClass",
    ),
    Case(
        K.KUEUE_UNMAPPED,
        (
            body("Namespace", "kueue-system"),
            program("registry.k8s.io/kueue/kueue"),
            config_map("kueue-system", "kueue-manager-config", config="kind: Configuration"),
        ),
        f"no mapping of {DRIVER} for {BOARD}",
    ),
    Case(K.KUEUE_SELECTORS, (program("registry.k8s.io/kueue/kueue"), TEMPLATE), "default/picky"),
    Case(
        K.AUTOSCALER_MIXED,
        (AUTOSCALER, in_group("n2", "g"), in_group("n3", "g"), resource_slice("n2")),
        f"group {GROUP}=g {DRIVER}: no slice on n3",
    ),
    Case(
        K.AUTOSCALER_IDLE,
        (
            program("registry.k8s.io/autoscaling/cluster-autoscaler"),
            node("n2"),
            resource_slice("n2"),
            pod("u", 1, "n2"),
        ),
        "nodes n2 pod default/cluster-autoscaler",
    ),
    Case(K.AUTOSCALER_LABEL, (AUTOSCALER, node("n2", labels={"cloud.google.com/gke-accelerator": "x"})), "nodes n2"),
    Case(
        K.AUTOSCALER_UNCHANGED,
        (AUTOSCALER, node("n2"), pod("unchanged", 1, "n2"), claim("c", "unchanged", "n2")),
        "pods default/unchanged",
    ),
    Case(
        K.KARPENTER,
        (node("n2", labels={"karpenter.sh/nodepool": "boards"}),),
        f"nodes n2 claims are to have {BOARD}",
        ("--driver", DRIVER, "--share", "all"),
    ),
    Case(K.KUBE_STATE_METRICS, (program("registry.k8s.io/kube-state-metrics/kube-state-metrics"),), "kube-state"),
    Case(K.OPENCOST, (program("ghcr.io/opencost/opencost"),), "pod default/opencost"),
    Case(
        K.DCGM_EXPORTER,
        (
            program("nvcr.io/nvidia/k8s/dcgm-exporter"),
            node("n2", resource="nvidia.com/gpu"),
            device_class("gpus", "gpu.example.com", "nvidia.com/gpu"),
        ),
        "pod default/dcgm-exporter",
    ),
    Case(
        K.MIXED_SHARES,
        (in_group("n2", "g", annotations={f"{DRIVER}/dra-share": "all"}), in_group("n3", "g")),
        f"group {GROUP}=g {DRIVER}/dra-share: all: n2; default: n3",
    ),
    Case(
        K.RESTART_ENDS,
        (
            node("n2", count=1),
            pod("by-claim", 1, "n2", status={"phase": "Running"}),
            claim("c", "by-claim", "n2"),
            pod("younger", 1, "n2", status={"phase": "Running"}),
        ),
        f"node n2 {BOARD}: 1 allocatable; would end default/younger",
    ),
)
"""A case for each finding, except the findings about kubelets and the caller's rights."""
