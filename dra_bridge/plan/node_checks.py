"""Checks nodes, kubelets and agents. The checks are pure functions, one for each kind of finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from dra_bridge.plan.findings import FindingKind, PlanFinding
from dra_bridge.plan.objects import AGENT, Body, labels_of, name_of, part, title_of
from dra_bridge.plan.view import ClusterView, listed, minor_of

FIRST = 32
"""The first minor version of Kubernetes whose DRA the agent supports (resource.k8s.io/v1beta1)."""


def _by_version(
    view: ClusterView, kind: FindingKind, lacks: Callable[[int, Mapping[str, bool]], bool]
) -> Iterator[PlanFinding]:
    """Yield a finding for each kubelet version for which nodes with devices have a kubelet that lacks a feature.

    lacks: a function that returns whether the feature is missing. Its arguments are the kubelet's minor version and
    feature gates.
    """
    found = defaultdict(list)
    for node in view.device_nodes:
        minor = minor_of(node)
        gates = part(view.objects.kubelets.get(name_of(node), {}), "featureGates")
        if minor and lacks(minor, gates):
            found[part(node, "status", "version")].append(name_of(node))
    for version, names in sorted(found.items()):
        yield PlanFinding(kind, f"nodes of {version}", listed(names))


def no_dra(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes whose kubelet is older than 1.32."""
    return _by_version(view, FindingKind.NO_DRA, lambda minor, _: minor < FIRST)


def dra_off(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes whose kubelet has DRA off: by its version's default, or by a feature gate."""
    return _by_version(
        view,
        FindingKind.DRA_OFF,
        lambda minor, gates: not gates.get("DynamicResourceAllocation", not FIRST <= minor < 34),
    )


def unchanged_pods(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes on which pods with `limits` cannot get devices through DRA, because DRAExtendedResource is off."""
    return _by_version(
        view,
        FindingKind.UNCHANGED_PODS,
        lambda minor, gates: minor >= FIRST and not gates.get("DRAExtendedResource", minor >= 36),
    )


def features_off(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes whose kubelet has device taints, shared devices or partitions off, by default or by a feature gate."""
    names = ("DRADeviceTaints", "DRAConsumableCapacity", "DRAPartitionableDevices")
    return _by_version(
        view,
        FindingKind.FEATURES_OFF,
        lambda minor, gates: minor >= FIRST and not all(gates.get(name, minor >= 36) for name in names),
    )


def topology_manager(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes whose kubelet has another Topology Manager policy than `none`."""
    found = defaultdict(list)
    for node in view.device_nodes:
        policy = part(view.objects.kubelets.get(name_of(node), {}), "topologyManagerPolicy")
        if policy and policy != "none":
            found[policy].append(name_of(node))
    for policy, names in sorted(found.items()):
        yield PlanFinding(FindingKind.TOPOLOGY_MANAGER, f"topologyManagerPolicy {policy}", f"nodes {listed(names)}")


def agents_kept_away(view: ClusterView) -> Iterator[PlanFinding]:
    """Find nodes with devices that the pods of all agents' DaemonSets avoid because of node selectors or taints."""
    if not view.agents:
        return
    away = defaultdict(list)
    for node in view.device_nodes:
        reasons = [_keeps_away(one, node) for one in view.agents]
        if all(reasons):
            away[reasons[0]].append(name_of(node))
    for reason, names in sorted(away.items()):
        yield PlanFinding(
            FindingKind.AGENTS_KEPT_AWAY, f"DaemonSet {title_of(view.agents[0])}", f"{reason}: nodes {listed(names)}"
        )


def _keeps_away(daemon_set: Body, node: Body) -> str:
    """Return the node selector or taint that keeps a DaemonSet's pods off a node; "" if nothing does.

    Taints by Kubernetes itself (node.kubernetes.io/) are skipped, because Kubernetes adds tolerations of such taints to
    a DaemonSet's pods (pkg/controller/daemon, 1.36).
    """
    spec, labels = part(daemon_set, "spec"), labels_of(node)
    for key, value in part(spec, "nodeSelector").items():
        if labels.get(key) != value:
            return f"nodeSelector {key}={value}"
    for taint in part(node, "spec", "taints") or ():
        if taint.get("effect") == "PreferNoSchedule" or str(taint.get("key")).startswith("node.kubernetes.io/"):
            continue
        if not any(_tolerates(one, taint) for one in part(spec, "tolerations") or ()):
            return f"taint {taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
    return ""


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def other_plugin(view: ClusterView) -> Iterator[PlanFinding]:
    """Find pods, other than this project's agents, that mount the device plugin directory of a node with devices."""
    names = {name_of(node) for node in view.device_nodes}
    found = defaultdict(set)
    for pod in view.all_pods:
        node = part(pod, "spec", "nodeName")
        if pod["spec"]["plugin"] and node in names and labels_of(pod).get(AGENT[0]) != AGENT[1]:
            owner = (part(pod, "metadata", "owners") or ["pod " + name_of(pod)])[0]
            found[f"{owner} in {part(pod, 'metadata', 'namespace')}"].add(node)
    for owner, nodes in sorted(found.items()):
        yield PlanFinding(FindingKind.OTHER_PLUGIN, owner, f"nodes {listed(nodes)}")


def mixed_shares(view: ClusterView) -> Iterator[PlanFinding]:
    """Find node groups in which annotations of nodes request different shares for the same driver."""
    for group, nodes in sorted(view.groups.items()):
        keys = {key for node in nodes for key in part(node, "metadata", "annotations") if key.endswith("/dra-share")}
        for key in sorted(keys):
            shares = defaultdict(list)
            for node in nodes:
                shares[part(node, "metadata", "annotations").get(key, "default")].append(name_of(node))
            if len(shares) > 1:
                reason = "; ".join(f"{share}: {listed(names)}" for share, names in sorted(shares.items()))
                yield PlanFinding(FindingKind.MIXED_SHARES, f"group {group}", f"{key}: {reason}")
