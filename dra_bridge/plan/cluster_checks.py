"""Checks DeviceClasses, rights, quotas, autoscalers, and programs that count devices.

The checks are pure functions, one for each kind of finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dra_bridge.plan.findings import FindingKind, PlanFinding
from dra_bridge.plan.objects import Body, labels_of, name_of, part, title_of
from dra_bridge.plan.view import ClusterView, drivers_of, listed, minor_of

AGENT_RULES: Final = (
    ("", "nodes", ("get", "list", "watch")),
    ("", "nodes/status", ("patch",)),
    ("resource.k8s.io", "resourceslices", ("get", "list", "watch", "create", "update", "delete")),
    ("resource.k8s.io", "resourceclaims", ("get", "list")),
    ("", "events", ("create",)),
)
"""The rules (group, resource, verbs) of the agents' ClusterRole in `dra-bridge manifests`; a test compares them with
the manifests."""
OPERATOR_RIGHTS: Final = (("list", "nodes"), ("patch", "nodes"), ("list", "pods"), ("list", "resourceslices"))
"""The rights (verb, resource) that a user of `migrate` and `rollout` needs."""
GPU_LABELS: Final = ("cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator", "accelerator")
"""The labels by which the cluster autoscaler finds nodes with GPUs, on GKE, on EKS, and on Azure and others."""
SCALE_DOWN_DISABLED: Final = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
UNCHANGED: Final = 36
"""The first minor version of Kubernetes in which pods that keep their `limits` can get devices through DRA by
default."""


def no_class(view: ClusterView) -> Iterator[PlanFinding]:
    """Find resources to migrate that no DeviceClass names as its extendedResourceName."""
    for resource in view.targets:
        if not view.classes_of(resource):
            yield PlanFinding(FindingKind.NO_CLASS, resource, "no DeviceClass has it as extendedResourceName")


def two_classes(view: ClusterView) -> Iterator[PlanFinding]:
    """Find resources to migrate that several DeviceClasses name as their extendedResourceName."""
    for resource in view.targets:
        classes = view.classes_of(resource)
        if len(classes) > 1:
            named = (f"{name_of(one)} ({', '.join(sorted(drivers_of(one))) or 'any driver'})" for one in classes)
            yield PlanFinding(FindingKind.TWO_CLASSES, resource, f"DeviceClasses {listed(named)}")


def agent_rights(view: ClusterView) -> Iterator[PlanFinding]:
    """Find rights that the ServiceAccounts of the agents' DaemonSets lack."""
    roles = {name_of(one): one for one in view.objects.of("ClusterRole")}
    for agents in view.agents:
        account = (part(agents, "metadata", "namespace"), part(agents, "spec", "serviceAccountName") or "default")
        bound = [
            roles[name]
            for binding in view.objects.of("ClusterRoleBinding")
            for subject in part(binding, "subjects") or ()
            if (subject.get("kind"), subject.get("namespace"), subject.get("name")) == ("ServiceAccount", *account)
            and (name := part(binding, "roleRef", "name")) in roles
        ]
        rules = [rule for role in bound for rule in part(role, "rules") or ()]
        missing = [
            f"{verb} {resource}"
            for group, resource, verbs in AGENT_RULES
            for verb in verbs
            if not any(_allows(rule, group, resource, verb) for rule in rules)
        ]
        if missing:
            about = f"ServiceAccount {account[0]}/{account[1]}"
            yield PlanFinding(FindingKind.AGENT_RIGHTS, about, f"may not {listed(missing, 20)}")


def _allows(rule: Body, group: str, resource: str, verb: str) -> bool:
    return all(
        wanted in (rule.get(key) or ()) or "*" in (rule.get(key) or ())
        for key, wanted in (("apiGroups", group), ("resources", resource), ("verbs", verb))
    ) and not rule.get("resourceNames")


def operator_rights(view: ClusterView) -> Iterator[PlanFinding]:
    """Find rights for `migrate` and `rollout` that the user lacks."""
    missing = [f"{verb} {resource}" for (verb, resource), there in view.objects.rights.items() if not there]
    if missing:
        yield PlanFinding(FindingKind.OPERATOR_RIGHTS, "you", f"may not {listed(missing, 20)}")


def _quotas(view: ClusterView) -> Iterator[tuple[Body, str]]:
    for quota in view.objects.of("ResourceQuota"):
        if view.namespace in ("", part(quota, "metadata", "namespace")):
            for resource in view.targets:
                if f"requests.{resource}" in part(quota, "spec", "hard"):
                    yield quota, resource


def quota_two_keys(view: ClusterView) -> Iterator[PlanFinding]:
    """If a kubelet is older than 1.36, find quotas that limit a resource to migrate but not the resource's class."""
    minors = [minor for node in view.nodes if (minor := minor_of(node))]
    if not minors or min(minors) >= UNCHANGED:
        return
    for quota, resource in _quotas(view):
        class_name = view.class_names.get(resource, "CLASS")
        key = f"{class_name}.deviceclass.resource.k8s.io/devices"
        if key not in part(quota, "spec", "hard"):
            reason = f"limits requests.{resource}, and not {key}"
            yield PlanFinding(FindingKind.QUOTA_TWO_KEYS, f"ResourceQuota {title_of(quota)}", reason)


def quota_scoped(view: ClusterView) -> Iterator[PlanFinding]:
    """Find quotas with the scope PriorityClass that limit a resource to migrate or the resource's DeviceClass."""
    for quota in view.objects.of("ResourceQuota"):
        spec = part(quota, "spec")
        scopes = {
            *(spec.get("scopes") or ()),
            *(one.get("scopeName") for one in part(spec, "scopeSelector", "matchExpressions") or ()),
        }
        keys = {f"requests.{resource}" for resource in view.targets}
        keys |= {f"{name}.deviceclass.resource.k8s.io/devices" for name in view.class_names.values()}
        if "PriorityClass" in scopes and keys & part(spec, "hard").keys():
            yield PlanFinding(FindingKind.QUOTA_SCOPED, f"ResourceQuota {title_of(quota)}", "scope PriorityClass")


def _kueue(view: ClusterView) -> tuple[str, str]:
    """Return the name of a pod of Kueue, and the text of Kueue's configuration; "" for a value that is not found."""
    pod = view.program("kueue")
    texts = [
        str(text)
        for body in view.objects.of("ConfigMap")
        if name_of(body) == "kueue-manager-config"
        for text in part(body, "data").values()
    ]
    return pod, "\n".join(texts)


def kueue_unmapped(view: ClusterView) -> Iterator[PlanFinding]:
    """If Kueue runs, find DeviceClasses of resources to migrate for which Kueue's configuration has no mapping."""
    pod, text = _kueue(view)
    if not pod:
        return
    for resource in view.targets:
        class_name = view.class_names.get(resource, "")
        if "deviceClassMappings" not in text or (class_name and class_name not in text):
            reason = f"no mapping of {class_name or 'a class'} for {resource}"
            yield PlanFinding(FindingKind.KUEUE_UNMAPPED, f"pod {pod}", reason)


def kueue_selectors(view: ClusterView) -> Iterator[PlanFinding]:
    """If Kueue runs and no ResourceSlice has a device yet, find ResourceClaimTemplates with CEL selectors."""
    pod, _ = _kueue(view)
    if not pod or any(view.slices.values()):
        return
    names = set(view.class_names.values())
    for template in view.objects.of("ResourceClaimTemplate"):
        if any(one.get("selectors") and one.get("deviceClassName") in names for one in template["requests"]):
            yield PlanFinding(FindingKind.KUEUE_SELECTORS, f"ResourceClaimTemplate {title_of(template)}", f"pod {pod}")


def autoscaler_mixed(view: ClusterView) -> Iterator[PlanFinding]:
    """If the cluster autoscaler runs, find node groups in which only some nodes have ResourceSlices of a driver."""
    if not view.autoscaler:
        return
    for group, nodes in sorted(view.groups.items()):
        names = {name_of(node) for node in nodes}
        for driver in sorted({driver for node, driver in view.slices if node in names}):
            without = {name for name in names if (name, driver) not in view.slices}
            if without:
                reason = f"{driver}: no slice on {listed(without)}; {view.autoscaler}"
                yield PlanFinding(FindingKind.AUTOSCALER_MIXED, f"group {group}", reason)


def autoscaler_idle(view: ClusterView) -> Iterator[PlanFinding]:
    """If the cluster autoscaler runs, find nodes that it may drain although pods use their devices.

    These nodes have ResourceSlices and pods with devices by `limits`, but not the annotation SCALE_DOWN_DISABLED.
    """
    if not view.autoscaler:
        return
    with_slices = {node for node, _ in view.slices}
    found = []
    for node in view.device_nodes:
        name = name_of(node)
        marked = part(node, "metadata", "annotations").get(SCALE_DOWN_DISABLED) == "true"
        by_limits = [pod for pod in view.pods_by_node.get(name, ()) if title_of(pod) not in view.by_dra]
        if name in with_slices and by_limits and not marked:
            found.append(name)
    if found:
        yield PlanFinding(FindingKind.AUTOSCALER_IDLE, f"nodes {listed(found)}", view.autoscaler)


def autoscaler_label(view: ClusterView) -> Iterator[PlanFinding]:
    """If the cluster autoscaler runs, find nodes with a label by which the autoscaler finds nodes with GPUs."""
    if not view.autoscaler:
        return
    found: dict[str, list[str]] = {}
    for node in view.device_nodes:
        labels = labels_of(node)
        label = next((one for one in GPU_LABELS if one in labels), "")
        if label and labels.get("cloud.google.com/gke-gpu-dra-driver") != "true":
            found.setdefault(label, []).append(name_of(node))
    for label, names in sorted(found.items()):
        yield PlanFinding(FindingKind.AUTOSCALER_LABEL, f"label {label}", f"nodes {listed(names)}; {view.autoscaler}")


def autoscaler_unchanged(view: ClusterView) -> Iterator[PlanFinding]:
    """If the cluster autoscaler runs, find pods that get the devices for their `limits` through DRA."""
    found = [title_of(pod) for pod in view.pods if title_of(pod) in view.by_dra]
    if view.autoscaler and found:
        yield PlanFinding(FindingKind.AUTOSCALER_UNCHANGED, f"pods {listed(found)}", view.autoscaler)


def karpenter(view: ClusterView) -> Iterator[PlanFinding]:
    """Yield a finding if Karpenter creates nodes with devices, and the migration will move devices to claims."""
    nodes = [name_of(node) for node in view.device_nodes if "karpenter.sh/nodepool" in labels_of(node)]
    pod = view.program("karpenter", "controller") if nodes else ""
    moving = [one.resource for one in view.targets.values() if one.share != "none"]
    if nodes and moving:
        reason = f"claims are to have {listed(moving)}" + (f"; pod {pod}" if pod else "")
        yield PlanFinding(FindingKind.KARPENTER, f"nodes {listed(nodes)}", reason)


def kube_state_metrics(view: ClusterView) -> Iterator[PlanFinding]:
    """Yield a finding if kube-state-metrics runs and there are resources to migrate."""
    return _counts(view, FindingKind.KUBE_STATE_METRICS, "kube-state-metrics")


def opencost(view: ClusterView) -> Iterator[PlanFinding]:
    """Yield a finding if OpenCost or Kubecost runs and there are resources to migrate."""
    return _counts(view, FindingKind.OPENCOST, "opencost", "kubecost-cost-model", "cost-model")


def dcgm_exporter(view: ClusterView) -> Iterator[PlanFinding]:
    """Yield a finding if dcgm-exporter runs, and the driver of the GPUs is not NVIDIA's gpu.nvidia.com."""
    gpus = {one.driver for one in view.targets.values() if one.resource.startswith("nvidia.com/")}
    if gpus - {"gpu.nvidia.com"}:
        yield from _counts(view, FindingKind.DCGM_EXPORTER, "dcgm-exporter")


def _counts(view: ClusterView, kind: FindingKind, *programs: str) -> Iterator[PlanFinding]:
    pod = view.program(*programs)
    if pod and view.targets:
        yield PlanFinding(kind, f"pod {pod}", f"resources {listed(view.targets)}")
