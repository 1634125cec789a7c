"""Reduces API objects to the fields that `plan` uses, so that a large cluster fits into memory. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from deviceplugin.naming import whole_quantity

Body = Mapping[str, Any]
"""An object of the API, as decoded from JSON."""

PLUGIN_DIRECTORY: Final = "device-plugins"
"""The name of the directory in which device plugins register. `plan` treats a pod that mounts this directory as a
device plugin."""
AGENT: Final = ("app.kubernetes.io/managed-by", "dra-bridge")
"""The label of all objects that `dra-bridge manifests` prints."""

FOR_LIMITS: Final = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of claims that the scheduler makes for the `limits` of a pod. This constant repeats the one in
`dra_bridge.kube`, because the import of `dra_bridge.kube` takes a second."""

NAMED: Final = (("kube-system", "cluster-autoscaler-status"), ("kueue-system", "kueue-manager-config"))
"""Namespace and name of the ConfigMaps with the status of the cluster autoscaler and the configuration of Kueue."""


@dataclass(frozen=True, slots=True)
class Unread:
    """An input of `plan` that could not be read. what: the input, such as the plural of a kind.

    reason: why the input could not be read. pods: whether the input may have pods.
    """

    what: str
    reason: str
    pods: bool = False


@dataclass(frozen=True, slots=True)
class ClusterObjects:
    """The objects that `plan` has read. by_kind: for each kind, its objects.

    now: the time of reading, in Unix seconds. kubelets: for each node name, the kubelet's configuration, if it could be
    read. rights: for each verb and resource, whether the user has the right.
    """

    by_kind: Mapping[str, tuple[Body, ...]]
    now: float
    unread: tuple[Unread, ...] = ()
    kubelets: Mapping[str, Body] = field(default_factory=dict)
    rights: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    def of(self, kind: str) -> tuple[Body, ...]:
        """Return the objects of a kind."""
        return self.by_kind.get(kind, ())


def part(body: Any, *keys: str) -> Any:
    """Return the value at a path of keys in an object; {} if there is no such value."""
    for key in keys:
        body = body.get(key) if isinstance(body, Mapping) else None
    return {} if body is None else body


def name_of(body: Body) -> str:
    """Return an object's name."""
    return str(part(body, "metadata", "name") or "?")


def title_of(body: Body) -> str:
    """Return an object's namespace/name, or its name alone."""
    namespace = part(body, "metadata", "namespace")
    return f"{namespace}/{name_of(body)}" if namespace else name_of(body)


def labels_of(body: Body) -> Mapping[str, str]:
    """Return an object's labels."""
    found: Mapping[str, str] = part(body, "metadata", "labels")
    return found


def seconds_of(text: object) -> float:
    """Return a time of the API as Unix seconds; 0 if the text is not a time."""
    if isinstance(text, datetime):
        return text.timestamp()
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _kept(body: Body, keys: Collection[str]) -> dict[str, Any]:
    return {key: body[key] for key in keys if key in body}


def _metadata(body: Body) -> dict[str, Any]:
    whole = part(body, "metadata")
    kept = _kept(whole, ("name", "namespace", "labels", "creationTimestamp", "deletionTimestamp"))
    kept["owners"] = [one.get("kind", "") + " " + one.get("name", "") for one in part(whole, "ownerReferences") or ()]
    # Only annotations of this project and of autoscalers are kept, because others can be large.
    annotations = part(whole, "annotations")
    kept["annotations"] = {
        key: value
        for key, value in annotations.items()
        if key.partition("/")[2] in ("dra-share", "dra-share-before", "handover", "extended-resource-claim")
        or key == "cluster-autoscaler.kubernetes.io/scale-down-disabled"
    }
    return kept


def _container(body: Body) -> dict[str, Any]:
    resources = part(body, "resources")
    return {
        **_kept(body, ("name", "image", "restartPolicy")),
        "limits": {name: value for name, value in part(resources, "limits").items() if "/" in name},
        "claims": len(part(resources, "claims") or ()),
    }


def _pod(body: Body) -> dict[str, Any]:
    spec = part(body, "spec")
    volumes = [part(one, "hostPath", "path") for one in part(spec, "volumes") or ()]
    kept = _kept(
        spec, ("nodeName", "nodeSelector", "priorityClassName", "priority", "preemptionPolicy", "resourceClaims")
    )
    return {
        "metadata": _metadata(body),
        "spec": {
            **kept,
            "containers": [_container(one) for one in part(spec, "containers") or ()],
            "initContainers": [_container(one) for one in part(spec, "initContainers") or ()],
            "plugin": any(str(path).rstrip("/").endswith(PLUGIN_DIRECTORY) for path in volumes if path),
        },
        "status": _kept(part(body, "status"), ("phase", "startTime", "extendedResourceClaimStatus")),
    }


def _node(body: Body) -> dict[str, Any]:
    """Return the used fields of a Node, without quantities of 0 and less.

    A kubelet reports 0 of each extended resource for which it once had a plugin, and never removes the entry (kubelet
    1.36, nodestatus/setters.go, MachineInfo; kubelet_node_status.go, reconcileExtendedResource).
    """
    status = part(body, "status")
    return {
        "metadata": _metadata(body),
        "spec": _kept(part(body, "spec"), ("taints", "unschedulable")),
        "status": {
            "version": part(status, "nodeInfo", "kubeletVersion") or "",
            **{
                key: {
                    name: value
                    for name, value in part(status, key).items()
                    if "/" in name and whole_quantity(value) > 0
                }
                for key in ("capacity", "allocatable")
            },
        },
    }


def _slice(body: Body) -> dict[str, Any]:
    spec = part(body, "spec")
    return {
        "metadata": _metadata(body),
        "spec": {**_kept(spec, ("driver", "nodeName", "pool")), "devices": len(part(spec, "devices") or ())},
    }


def _claim(body: Body) -> dict[str, Any]:
    # In a template, the claim's `spec` is nested in another `spec`.
    spec = part(body, "spec", "spec") or part(body, "spec")
    requests = part(spec, "devices", "requests") or []
    return {
        "metadata": _metadata(body),
        "requests": [part(one, "exactly") or _kept(one, ("name", "firstAvailable")) for one in requests],
        "reserved": [one.get("name") for one in part(body, "status", "reservedFor") or ()],
    }


def _daemon_set(body: Body) -> dict[str, Any]:
    spec = part(body, "spec", "template", "spec")
    return {
        "metadata": _metadata(body),
        "spec": _kept(spec, ("nodeSelector", "affinity", "tolerations", "serviceAccountName")),
    }


def _whole(body: Body) -> dict[str, Any]:
    return {"metadata": _metadata(body), **{key: body[key] for key in body if key not in ("metadata", "status")}}


CUT: Final[Mapping[str, Callable[[Body], dict[str, Any]]]] = {
    "Node": _node,
    "Pod": _pod,
    "DeviceClass": _whole,
    "ResourceSlice": _slice,
    "ResourceClaim": _claim,
    "ResourceClaimTemplate": _claim,
    "ResourceQuota": _whole,
    "PriorityClass": _whole,
    "DaemonSet": _daemon_set,
    "ClusterRole": _whole,
    "ClusterRoleBinding": _whole,
    "ConfigMap": _whole,
}
"""For each kind that `plan` uses, the function that returns the used fields of an object."""


def cut(kind: str, bodies: Iterable[Body]) -> list[Body]:
    """Return objects of a kind without their unused fields."""
    return [CUT[kind](body) for body in bodies]
