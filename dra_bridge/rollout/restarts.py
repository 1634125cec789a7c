"""Finds the pods that a restart of their node's kubelet would end. Pure functions.

The pods are found here and not by the agents, because the result depends on the pods' ages, which agents do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from dra_bridge.handover.admission import AdmittedPod, denied
from dra_bridge.kube import Object
from dra_bridge.rollout.fleet import NodeView, shortened
from dra_bridge.rollout.pods import requests_of


def mixed(view: NodeView) -> list[str]:
    """Return the resources of which pods on this node have, or may have, devices both by the plugin and by DRA."""
    return [name for name in (view.reported.resources if view.reported is not None else ()) if _both(view, name)]


def ended_by_restart(
    views: Iterable[NodeView], pods: Mapping[str, Sequence[Object]], said: Sequence[str] = ()
) -> list[str]:
    """Return a sentence for each node and resource for which a restart of the kubelet would end pods.

    pods: for each node with such a resource (`mixed`), all its pods. said: sentences of the agents; the function does
    not repeat the pods that these sentences name.
    """
    sentences = []
    for view in views:
        for resource in mixed(view):
            names = [name for name in denied_pods(pods[view.node], resource) if not any(name in text for text in said)]
            if names:
                why = "they are younger than pods that DRA serves by limits (kubernetes#124586)"
                sentences.append(f"{view.node}: a kubelet restart would end {shortened(names)} ({resource}): {why}")
    return sentences


def _both(view: NodeView, resource: str) -> bool:
    """Return whether devices of a resource have, or may have, holders on the plugin side and on the DRA side."""
    mine = [device for device in view.devices if device.resource == resource and (device.holder or not device.known)]
    return any(device.state.allocates for device in mine) and any(device.state.prepares for device in mine)


def denied_pods(pods: Iterable[Object], resource: str) -> tuple[str, ...]:
    """Return the pods (namespace/name) that their node's kubelet would reject after a restart because of this resource.

    pods: all pods of the node.
    """
    admitted = [admitted_pod for pod in pods if (admitted_pod := _admitted(pod, resource)) is not None]
    return denied(admitted, sum(pod.asks for pod in admitted if not pod.by_dra))


def _admitted(pod: Object, resource: str) -> AdmittedPod | None:
    metadata, status = pod["metadata"], pod.get("status") or {}
    asks = requests_of(pod).get(resource, 0)
    if not asks or status.get("phase") in ("Succeeded", "Failed"):
        return None
    mappings = (status.get("extendedResourceClaimStatus") or {}).get("requestMappings") or ()
    created = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
    by_dra = any(mapping.get("resourceName") == resource for mapping in mappings)
    return AdmittedPod(f"{metadata['namespace']}/{metadata['name']}", created, asks, by_dra)
