"""Finds obstacles to the removal of the agents' ResourceSlices, and annotations that rollouts have left on Nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from dra_bridge.kube import NODES, Cluster, ForbiddenError
from dra_bridge.rollout.agents import LABEL, namespaces_of_agents, running_agents
from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED, mark_annotation
from dra_bridge.rollout.fleet import shortened

_LEFT_BEHIND: Final = """\
not removed: created objects and share annotations; to remove those of all agents:
  kubectl delete -A -l {label} daemonset,configmap,serviceaccount,role,rolebinding,lease
  kubectl delete -l {label} deviceclass,clusterrole,clusterrolebinding
  kubectl delete -l {label} validatingadmissionpolicy,validatingadmissionpolicybinding
  kubectl delete -l {label} namespace  # with all that is in it
  kubectl annotate nodes --all {annotations}
on each node the ledger stays: plugins/dra-bridge in the kubelet's directory"""
_KEYS: Final = ("dra-share", "dra-share-before", "dra-pool", "dra-scale-down")


def left_behind(drivers: Collection[str]) -> str:
    """Return a text with the objects that `uninstall` does not remove, and with the commands that remove them."""
    annotations = " ".join(f"{driver}/{key}-" for driver in sorted(drivers) for key in _KEYS)
    return _LEFT_BEHIND.format(label=LABEL, annotations=annotations)


async def obstacles(
    cluster: Cluster, drivers: Collection[str], node: str, namespace: str, *, before: bool = False
) -> list[str]:
    """Return a sentence for each reason why the ResourceSlices of these drivers cannot be removed. Raises ClusterError.

    node: the node with the ResourceSlices; "" for all nodes. namespace: the agents' namespace; "" for the namespaces
    that the agents' ClusterRoleBindings name. before: whether the check is made before the agents are removed, so that
    running agents are no obstacle.
    """
    try:
        namespaces = [namespace] if namespace else await namespaces_of_agents(cluster)
        agents = [] if before else await running_agents(cluster, namespaces, node)
        claims = await cluster.allocated_claims()
    except ForbiddenError as error:
        return [f"it is not known whether agents run or claims are in use: {error.message}"]
    nodes = shortened(pod["spec"].get("nodeName", "") for pod in agents)
    used = shortened(
        claim.title
        for claim in claims
        for result in claim.results
        if not result.admin and result.driver in drivers and node in ("", result.pool)
    )
    running = f"agents run on {nodes}: they publish slices again; delete the DaemonSet first"
    in_use = f"claims have devices of these drivers: {used}: their pods cannot end without the driver's agent"
    return [*([running] if nodes else []), *([in_use] if used else [])]


async def remaining_marks(cluster: Cluster, drivers: Collection[str]) -> list[str]:
    """Return a sentence with the command that removes the marks of rollouts from Nodes. Raises ClusterError.

    The marks tell the cluster autoscaler not to drain the Nodes. Without marked Nodes, the result is empty.
    """
    keys = {mark_annotation(driver) for driver in drivers}
    nodes = (await cluster.list(NODES)).items
    names = [one["metadata"]["name"] for one in nodes if keys & (one["metadata"].get("annotations") or {}).keys()]
    them = f"kubectl annotate nodes {' '.join(names)} {SCALE_DOWN_DISABLED}-"
    return [f"a rollout has marked nodes for the cluster autoscaler; to take that back: {them}"] if names else []
