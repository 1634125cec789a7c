"""Finds the pods, nodes, DeviceClasses and node groups of the resources to migrate in a cluster's objects. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from deviceplugin.device import some
from deviceplugin.naming import RESOURCE, pod_amounts, whole_quantity
from dra_bridge.plan.objects import (
    AGENT,
    FOR_LIMITS,
    Body,
    ClusterObjects,
    labels_of,
    name_of,
    part,
    title_of,
)

GROUP_LABELS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    "kubernetes.azure.com/agentpool",
    "karpenter.sh/nodepool",
    "doks.digitalocean.com/node-pool",
    "node.openshift.io/nodepool",
)
"""Labels in which cloud providers write the name of a node's group."""
ENDED: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Target:
    """A resource to migrate. driver: the DRA driver of the resource, "" if unknown.

    share: the number or percentage of the resource's devices that claims will get, "" if unknown.
    """

    resource: str
    driver: str = ""
    share: str = ""


@dataclass(frozen=True)
class ClusterView:
    """A cluster's objects, and facts derived from these objects.

    namespace: the namespace of the pods that the checks consider; "" for all namespaces. given: the resources to
    migrate (targets); if empty, all extended resources. selected: names of the selected nodes; None for all nodes.
    """

    objects: ClusterObjects
    given: tuple[Target, ...] = ()
    namespace: str = ""
    selected: frozenset[str] | None = None

    @cached_property
    def nodes(self) -> tuple[Body, ...]:
        """The Node objects of the selected nodes."""
        nodes = self.objects.of("Node")
        return tuple(node for node in nodes if self.selected is None or name_of(node) in self.selected)

    @cached_property
    def targets(self) -> Mapping[str, Target]:
        """The resources to migrate: those in `given`, or else all extended resources of nodes and pods."""
        if self.given:
            return {one.resource: one for one in self.given}
        names = {name for node in self.nodes for name in part(node, "status", "capacity")}
        names |= {name for pod in self.all_pods for name in asked_of(pod)}
        return {name: Target(name, self._driver_of(name)) for name in sorted(names) if re.fullmatch(RESOURCE, name)}

    def _driver_of(self, resource: str) -> str:
        drivers = {driver for one in self.classes_of(resource) for driver in drivers_of(one)}
        return drivers.pop() if len(drivers) == 1 else ""

    @cached_property
    def drivers(self) -> frozenset[str]:
        """The known drivers of the targets."""
        return frozenset(one.driver for one in self.targets.values() if one.driver)

    @cached_property
    def all_pods(self) -> tuple[Body, ...]:
        """All pods that have not ended."""
        return tuple(pod for pod in self.objects.of("Pod") if part(pod, "status", "phase") not in ENDED)

    @cached_property
    def pods(self) -> tuple[Body, ...]:
        """The pods of `namespace` with `limits` of a resource to migrate, on selected nodes or without a node yet."""
        names = {name_of(node) for node in self.nodes}
        return tuple(
            pod
            for pod in self.all_pods
            if self.namespace in ("", part(pod, "metadata", "namespace"))
            and (part(pod, "spec", "nodeName") or "") in {"", *names}
            and asked_of(pod).keys() & self.targets.keys()
        )

    @cached_property
    def pods_by_node(self) -> Mapping[str, list[Body]]:
        """For each node, the pods that request resources to migrate by `limits`."""
        found: dict[str, list[Body]] = defaultdict(list)
        for pod in self.pods:
            if node := part(pod, "spec", "nodeName"):
                found[node].append(pod)
        return found

    @cached_property
    def device_nodes(self) -> tuple[Body, ...]:
        """The nodes that have a resource to migrate in their capacity or ResourceSlices, or whose pods request one."""
        others = {node for node, _ in self.slices} | self.pods_by_node.keys()
        return tuple(
            node
            for node in self.nodes
            if part(node, "status", "capacity").keys() & self.targets.keys() or name_of(node) in others
        )

    @cached_property
    def slices(self) -> Mapping[tuple[str, str], int]:
        """For each node and driver of a resource to migrate, the number of devices in ResourceSlices."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        names = {name_of(node) for node in self.nodes}
        for body in self.objects.of("ResourceSlice"):
            spec = part(body, "spec")
            if spec.get("nodeName") in names and (not self.drivers or spec.get("driver") in self.drivers):
                found[str(spec["nodeName"]), str(spec["driver"])] += spec["devices"]
        return found

    def classes_of(self, resource: str) -> list[Body]:
        """Return the DeviceClasses that name a resource as their extended resource."""
        return [one for one in self.objects.of("DeviceClass") if part(one, "spec", "extendedResourceName") == resource]

    @cached_property
    def class_names(self) -> Mapping[str, str]:
        """For each resource to migrate, the name of the first DeviceClass that names the resource."""
        found = {name: self.classes_of(name) for name in self.targets}
        return {name: name_of(classes[0]) for name, classes in found.items() if classes}

    @cached_property
    def by_dra(self) -> frozenset[str]:
        """The pods (namespace/name) that get the devices for their `limits` through DRA."""
        return frozenset(
            f"{part(claim, 'metadata', 'namespace')}/{pod}"
            for claim in self.objects.of("ResourceClaim")
            if part(claim, "metadata", "annotations").get(FOR_LIMITS) == "true"
            for pod in claim["reserved"]
        )

    @cached_property
    def groups(self) -> Mapping[str, list[Body]]:
        """For each node group, the group's nodes with a resource to migrate.

        Nodes without a group's label are left out.
        """
        found: dict[str, list[Body]] = defaultdict(list)
        for node in self.device_nodes:
            labels = labels_of(node)
            if label := next((one for one in GROUP_LABELS if one in labels), ""):
                found[f"{label}={labels[label]}"].append(node)
        return found

    @cached_property
    def agents(self) -> tuple[Body, ...]:
        """The DaemonSets that run agents."""
        return tuple(one for one in self.objects.of("DaemonSet") if labels_of(one).get(AGENT[0]) == AGENT[1])

    @cached_property
    def images(self) -> Mapping[str, str]:
        """For each image (by its name without registry and tag), the name of a pod that runs the image.

        The checks identify the program in a pod by the name of the image.
        """
        found: dict[str, str] = {}
        for pod in self.all_pods:
            for container in pod["spec"]["containers"]:
                image = re.split(r"[@:](?!.*/)", str(container.get("image", "")))[0]
                found.setdefault(image.rpartition("/")[2], title_of(pod))
        return found

    def program(self, *names: str) -> str:
        """Return the name of a pod that runs one of these programs; "" if no pod does."""
        return next((self.images[name] for name in names if name in self.images), "")

    @cached_property
    def autoscaler(self) -> str:
        """The name of an object whose existence shows that the cluster autoscaler runs; "" if there is none.

        The object is the autoscaler's status ConfigMap, which exists even if the cloud provider runs the autoscaler.
        Without this ConfigMap, the object is a pod of the autoscaler.
        """
        for body in self.objects.of("ConfigMap"):
            if name_of(body) == "cluster-autoscaler-status":
                return f"ConfigMap {title_of(body)}"
        pod = self.program("cluster-autoscaler")
        return f"pod {pod}" if pod else ""


def asked_of(pod: Body) -> dict[str, int]:
    """Return, for each resource, the number of devices that a pod requests by `limits` (see `pod_amounts`)."""
    return pod_amounts(pod["spec"], lambda one: {name: whole_quantity(value) for name, value in one["limits"].items()})


def drivers_of(device_class: Body) -> set[str]:
    """Return the drivers whose names the CEL expressions of a DeviceClass compare with `device.driver`."""
    expressions = [part(one, "cel", "expression") for one in part(device_class, "spec", "selectors") or ()]
    pattern = r"""device\.driver\s*==\s*["']([^"']+)["']"""
    return {name for text in expressions for name in re.findall(pattern, str(text))}


def minor_of(node: Body) -> int:
    """Return the minor version of a node's kubelet; 0 if the version is not known."""
    match = re.match(r"v?1\.(\d+)", str(part(node, "status", "version")))
    return int(match[1]) if match else 0


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return a text with at most `most` names, and the number of the other names."""
    return some(sorted(names), most)


def resources_of(objects: ClusterObjects, driver: str) -> list[str]:
    """Return the resources that the DeviceClasses of a driver name as their extended resources."""
    classes = [one for one in objects.of("DeviceClass") if driver in drivers_of(one)]
    return sorted({name for one in classes if (name := str(part(one, "spec", "extendedResourceName") or ""))})


def matching(objects: ClusterObjects, selector: str) -> frozenset[str] | None:
    """Return the names of the nodes that match a label selector; None without a selector. Raises ValueError.

    selector: terms KEY=VALUE, KEY!=VALUE, KEY or !KEY, joined by commas.
    """
    if not selector:
        return None
    found = []
    for node in objects.of("Node"):
        labels = labels_of(node)
        if all(_matches(labels, term.strip()) for term in selector.split(",")):
            found.append(name_of(node))
    return frozenset(found)


def _matches(labels: Mapping[str, str], term: str) -> bool:
    match = re.fullmatch(r"(!?)([^!=\s]+)(?:\s*(==?|!=)\s*([^=\s]*))?", term)
    if match is None or (match[1] and match[3]):
        raise ValueError(f"{term!r} is not KEY=VALUE, KEY!=VALUE, KEY or !KEY")
    absent, key, operator, value = match.groups()
    if not operator:
        return (key in labels) != bool(absent)
    return (labels.get(key) == value) != (operator == "!=")
