"""Checks pods that request devices. The checks are pure functions, one for each kind of finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from deviceplugin.naming import whole_quantity
from dra_bridge.convert.pods import MAX_DEVICES
from dra_bridge.handover.admission import AdmittedPod, denied
from dra_bridge.plan.findings import FindingKind, PlanFinding
from dra_bridge.plan.objects import name_of, part, seconds_of, title_of
from dra_bridge.plan.view import ClusterView, asked_of, listed


def fits_nowhere(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods that request more devices of a resource than any node has, by the device plugin and DRA together."""
    if not view.nodes:
        return  # Without nodes, as in the dump of a chart, the check is impossible.
    most: dict[str, int] = defaultdict(int)
    for node in view.nodes:
        published = sum(count for (name, _), count in view.slices.items() if name == name_of(node))
        for resource in view.targets:
            capacity = whole_quantity(part(node, "status", "capacity").get(resource, 0))
            # While an agent runs, capacity includes the devices for claims, so `published` is not added.
            most[resource] = max(most[resource], capacity, published if view.targets[resource].driver else 0)
    for pod in view.pods:
        for resource, count in asked_of(pod).items():
            if resource in view.targets and count > most[resource]:
                reason = f"asks for {count} {resource}; the largest node has {most[resource]}"
                yield PlanFinding(FindingKind.FITS_NOWHERE, f"pod {title_of(pod)}", reason)


def above_32(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods that request more devices of a resource than one claim can have."""
    for pod in view.pods:
        for resource, count in asked_of(pod).items():
            if resource in view.targets and count > MAX_DEVICES:
                yield PlanFinding(FindingKind.ABOVE_32, f"pod {title_of(pod)}", f"asks for {count} {resource}")


def preempts(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods that may preempt other pods, because their priority is above 0 (the default priority)."""
    found = defaultdict(list)
    for pod in view.pods:
        spec = pod["spec"]
        if int(spec.get("priority") or 0) > 0 and spec.get("preemptionPolicy") != "Never":
            found[spec.get("priorityClassName") or f"priority {spec['priority']}"].append(title_of(pod))
    for priority, pods in sorted(found.items()):
        yield PlanFinding(FindingKind.PREEMPTS, f"PriorityClass {priority}", f"pods {listed(pods)}")


def init_reuses(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods whose containers request a resource, but none requests the same number of it as an init container."""
    for pod in view.pods:
        spec = pod["spec"]
        for container in spec["initContainers"]:
            if container.get("restartPolicy") == "Always":
                continue
            for resource, value in container["limits"].items():
                others = [one["limits"].get(resource) for one in spec["containers"]]
                counts = [whole_quantity(one) for one in others if one is not None]
                if resource in view.targets and any(counts) and whole_quantity(value) not in (0, *counts):
                    reason = f"{container['name']} asks for {value} {resource}, beside {', '.join(map(str, counts))}"
                    yield PlanFinding(FindingKind.INIT_REUSES, f"pod {title_of(pod)}", reason)


def restart_ends(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods that a restart of their node's kubelet would end now (`dra_bridge.handover.admission`)."""
    for node in view.device_nodes:
        pods = view.pods_by_node.get(name_of(node), [])
        for resource in view.targets:
            asking = [(pod, asked_of(pod).get(resource, 0)) for pod in pods]
            admitted = [
                AdmittedPod(
                    title_of(pod),
                    seconds_of(part(pod, "metadata", "creationTimestamp")),
                    count,
                    by_dra=title_of(pod) in view.by_dra,
                )
                for pod, count in asking
                if count
            ]
            if not any(one.by_dra for one in admitted):
                continue
            capacity = whole_quantity(part(node, "status", "allocatable").get(resource, 0))
            if ended := denied(admitted, capacity):
                reason = f"{resource}: {capacity} allocatable; would end {listed(ended)}"
                yield PlanFinding(FindingKind.RESTART_ENDS, f"node {name_of(node)}", reason)
