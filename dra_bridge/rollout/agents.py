"""The agents' own pods, as `manifests` labels them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dra_bridge.kube import PODS, Cluster, Object

LABEL: Final = "app.kubernetes.io/managed-by=dra-bridge"
"""Which all objects of `manifests` have, the agents' pods included."""


async def running_agents(cluster: Cluster, node: str = "") -> Mapping[str, Object]:
    """Return the running pods of agents by node, those of one node or of all. Raises ClusterError."""
    selector = "status.phase=Running" + (f",spec.nodeName={node}" if node else "")
    pods = (await cluster.list(PODS, field_selector=selector, label_selector=LABEL)).items
    return {pod["spec"].get("nodeName", ""): pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}
