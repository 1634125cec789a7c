"""Reads the cluster's objects and the kubelets' configurations for `dra-bridge plan`, with the user's rights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from deviceplugin.device import some
from dra_bridge.kube import (
    CLUSTER_ROLE_BINDINGS,
    DAEMON_SETS,
    DEVICE_CLASSES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    ApiError,
    Cluster,
    ForbiddenError,
    Kind,
    NotFoundError,
    UnsupportedError,
)
from dra_bridge.kube.api import GROUP
from dra_bridge.kube.forms import page_of
from dra_bridge.plan.cluster_checks import OPERATOR_RIGHTS
from dra_bridge.plan.objects import CUT, NAMED, Body, ClusterObjects, Unread, cut, name_of, part

TEMPLATES: Final = Kind(GROUP, "", "resourceclaimtemplates", "ResourceClaimTemplate")
QUOTAS: Final = Kind("", "v1", "resourcequotas", "ResourceQuota")
CLUSTER_ROLES: Final = Kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole")
CONFIG_MAPS: Final = Kind("", "v1", "configmaps", "ConfigMap")
ACCESS_REVIEWS: Final = Kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview")
LISTED: Final = (
    NODES,
    PODS,
    DEVICE_CLASSES,
    RESOURCE_SLICES,
    RESOURCE_CLAIMS,
    TEMPLATES,
    QUOTAS,
    DAEMON_SETS,
    CLUSTER_ROLES,
    CLUSTER_ROLE_BINDINGS,
)
"""The kinds of objects of which `plan` reads all objects in the cluster."""
TIMEOUT: Final = 5.0
"""Seconds within which a kubelet must respond; otherwise its configuration counts as unread."""
AT_ONCE: Final = 32
"""Maximum number of simultaneous requests to kubelets."""


class _ConfigZ(msgspec.Struct):
    """A kubelet's response to a request for /configz."""

    kubeletconfig: dict[str, Any]


_DECODER: Final = msgspec.json.Decoder(_ConfigZ)


async def read_cluster(cluster: Cluster, selector: str) -> tuple[ClusterObjects, frozenset[str] | None]:
    """Return the objects of the cluster that `plan` uses, and the selected nodes' names (None without a selector).

    `ClusterObjects.unread` has the kinds of objects that the user may not read, and the kubelets that do not respond.
    """
    unread: list[Unread] = []
    read = await asyncio.gather(*(_list(cluster, kind, unread) for kind in LISTED))
    found = dict(zip((kind.kind for kind in LISTED), read, strict=True))
    selected = None
    if selector:
        listed = await cluster.list(NODES, label_selector=selector)
        selected = frozenset(name_of(one) for one in listed.items)
    maps = [body for each in NAMED if (body := await _config_map(cluster, *each, unread)) is not None]
    found["ConfigMap"] = tuple(cut("ConfigMap", maps))
    with_devices = [node for node in found["Node"] if any("/" in name for name in part(node, "status", "capacity"))]
    names = [name_of(node) for node in with_devices if selected is None or name_of(node) in selected]
    kubelets = await _kubelets(cluster, names, unread)
    rights = await _rights(cluster, unread)
    return ClusterObjects(found, time.time(), tuple(unread), kubelets, rights), selected


async def _list(cluster: Cluster, kind: Kind, unread: list[Unread]) -> tuple[Body, ...]:
    bodies: list[Body] = []
    try:
        async for page in cluster.pages(kind, page_of(kind)):
            bodies += map(CUT[kind.kind], page.items)
    except UnsupportedError:
        return ()  # The cluster has no DRA; the findings about the nodes' versions report that.
    except ForbiddenError as error:
        unread.append(Unread(kind.plural, error.message, kind is PODS))
    except ApiError as error:
        unread.append(Unread(kind.plural, str(error), kind is PODS))
    return tuple(bodies)


async def _config_map(cluster: Cluster, namespace: str, name: str, unread: list[Unread]) -> Body | None:
    try:
        return await cluster.get(CONFIG_MAPS, name, namespace)
    except NotFoundError:
        return None
    except ApiError as error:
        unread.append(Unread(f"configmap {namespace}/{name}", error.message))
        return None


async def _kubelets(cluster: Cluster, names: list[str], unread: list[Unread]) -> Mapping[str, Body]:
    """Return each node's kubelet configuration, if the kubelet responds, and add the other nodes to `unread`.

    The user needs the right to get nodes/proxy for these requests.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    found: dict[str, Body] = {}
    failed: dict[str, list[str]] = {}

    async def ask(name: str) -> None:
        async with slots:
            try:
                answer = _DECODER.decode(await cluster.ask_node(name, "/configz", timeout=TIMEOUT))
                found[name] = answer.kubeletconfig
            except ForbiddenError:
                failed.setdefault("forbidden", []).append(name)
            except ApiError:
                failed.setdefault("no answer", []).append(name)
            except msgspec.MsgspecError:
                failed.setdefault("it is no configuration", []).append(name)

    await asyncio.gather(*map(ask, names))
    for reason, nodes in sorted(failed.items()):
        unread.append(Unread("nodes/proxy (the kubelets' configz)", f"{reason}: {some(sorted(nodes), 3)}"))
    return found


async def _rights(cluster: Cluster, unread: list[Unread]) -> dict[tuple[str, str], bool]:
    found = {}
    for verb, resource in OPERATOR_RIGHTS:
        group = GROUP if resource == RESOURCE_SLICES.plural else ""
        spec = {"resourceAttributes": {"verb": verb, "resource": resource, "group": group}}
        try:
            body: Any = await cluster.create(ACCESS_REVIEWS, {"metadata": {}, "spec": spec})
            found[verb, resource] = part(body, "status", "allowed") is True
        except ApiError as error:
            unread.append(Unread(f"whether you may {verb} {resource}", error.message))
    return found
