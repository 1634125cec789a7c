"""Reads, for `status` and `rollout`, which resources pods request and which pods failed because of devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from deviceplugin.naming import pod_amounts, whole_quantity
from dra_bridge.kube import EVENTS, NODES, PODS, Cluster, Kind, Object

FEW: Final = 12
"""For at most this number of nodes, each Node and each node's pods are read by separate requests. For more nodes, all
Nodes and all pods of the cluster are listed."""
_UNWELL: Final = ("status.phase=Pending,spec.nodeName!=", "status.phase=Failed")
"""Field selectors of pods that do not run. Pending pods are listed first, so that a pending pod that fails between the
two lists is in the second list."""
_UNPREPARED: Final = "involvedObject.kind=Pod,reason=FailedPrepareDynamicResources"
UID_LENGTH: Final = 8
"""Number of characters of a pod's UID that are kept: enough to distinguish the pods of one node."""


async def read_failing(cluster: Cluster, nodes: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    """Return, for each node, its failing pods in the form of `failing_pods`. Raises ClusterError.

    nodes: for each node, the resources that its agent reports. For more than FEW nodes, the failed and the pending pods
    of the whole cluster are listed.
    """
    if not nodes:
        return {}

    def wanted(pod: Object) -> bool:
        return pod["spec"].get("nodeName") in nodes and may_fail(pod, nodes[pod["spec"]["nodeName"]])

    pods: dict[str, list[Object]] = {node: [] for node in nodes}
    for selector in [f"spec.nodeName={node}" for node in nodes] if len(nodes) <= FEW else _UNWELL:
        for pod in (await cluster.list(PODS, field_selector=selector, keep=wanted)).items:
            pods[pod["spec"]["nodeName"]].append(pod)
    events: Sequence[Object] = ()
    if any((pod.get("status") or {}).get("phase") == "Pending" for of_node in pods.values() for pod in of_node):
        events = (await cluster.list(EVENTS, field_selector=_UNPREPARED)).items
    return {node: failing_pods(of_node, events, nodes[node]) for node, of_node in pods.items()}


def may_fail(pod: Object, resources: Collection[str]) -> bool:
    """Return whether a pod requests one of the resources or has claims, and has failed or does not run yet."""
    status = pod.get("status") or {}
    claims = pod["spec"].get("resourceClaims") or status.get("extendedResourceClaimStatus")
    needs = claims or not requests_of(pod).keys().isdisjoint(resources)
    return bool(needs) and status.get("phase") in ("Failed", "Pending")


def failing_pods(pods: Iterable[Object], events: Iterable[Object], resources: Collection[str]) -> dict[str, str]:
    """Return the failing pods of a node, as {shortened UID: text}.

    A pod is failing if it requests one of the resources or has claims, and is Failed (as after
    UnexpectedAdmissionError) or cannot start, as an Event FailedPrepareDynamicResources shows.
    """
    unprepared = {
        (event.get("involvedObject") or {}).get("uid"): str(event.get("message", ""))
        for event in events
        if event.get("reason") == "FailedPrepareDynamicResources"
    }
    failing = {}
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        uid, name = str(metadata["uid"]), f"{metadata.get('namespace', '')}/{metadata['name']}"
        if not may_fail(pod, resources):
            continue
        if status["phase"] == "Failed":
            reason = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
            failing[uid[:UID_LENGTH]] = f"pod {name} has failed{f' ({reason})' if reason else ''}"
        elif uid in unprepared:
            failing[uid[:UID_LENGTH]] = f"pod {name} cannot start ({unprepared[uid]})"
    return failing


async def list_each(
    cluster: Cluster, kind: Kind, selectors: Iterable[str], keep: Callable[[Object], bool] | None = None
) -> list[Object]:
    """List objects once for each field selector, all in parallel, and return the objects of all these lists.

    Raises ClusterError.
    """
    lists = await asyncio.gather(*(cluster.list(kind, field_selector=selector, keep=keep) for selector in selectors))
    return [body for listed in lists for body in listed.items]


async def pods_by_node(cluster: Cluster, nodes: Collection[str], resources: Collection[str]) -> dict[str, list[Object]]:
    """Return, for each of these nodes, its pods that request any of these resources. Raises ClusterError.

    For more than FEW nodes, all pods of the cluster are listed once.
    """
    if not nodes:
        return {}

    def wanted(pod: Object) -> bool:
        return pod["spec"].get("nodeName") in found and not requests_of(pod).keys().isdisjoint(resources)

    found: dict[str, list[Object]] = {node: [] for node in nodes}
    selectors = [f"spec.nodeName={node}" for node in found] if len(found) <= FEW else ["spec.nodeName!="]
    for pod in await list_each(cluster, PODS, selectors, wanted):
        found[pod["spec"]["nodeName"]].append(pod)
    return found


async def nodes_by_name(cluster: Cluster, names: Collection[str]) -> dict[str, Object]:
    """Return the existing Nodes with these names, as {name: Node}. Raises ClusterError.

    For more than FEW names, the result has all Nodes of the cluster.
    """
    if not names:
        return {}
    selectors = [f"metadata.name={name}" for name in names] if len(names) <= FEW else [""]
    return {node["metadata"]["name"]: node for node in await list_each(cluster, NODES, selectors)}


def requests_of(pod: Object) -> dict[str, int]:
    """Return the amount of each extended resource that a pod requests (see `pod_amounts`)."""

    def amounts(container: Object) -> dict[str, int]:
        resources = container.get("resources") or {}
        given = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        return {name: whole_quantity(amount) for name, amount in given.items() if "/" in name}

    return pod_amounts(pod["spec"], amounts)
