"""Runs all checks on a `ClusterView`, and computes the numbers that `dra-bridge plan` shows. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from deviceplugin.naming import whole_quantity
from dra_bridge.plan import cluster_checks, node_checks, pod_checks
from dra_bridge.plan.findings import FindingKind, PlanFinding, Severity
from dra_bridge.plan.objects import Unread, name_of, part, seconds_of, title_of
from dra_bridge.plan.view import ClusterView, asked_of, minor_of

Check = Callable[[ClusterView], Iterator[PlanFinding]]

CHECKS: Final[Mapping[FindingKind, Check]] = {
    FindingKind.FITS_NOWHERE: pod_checks.fits_nowhere,
    FindingKind.ABOVE_32: pod_checks.above_32,
    FindingKind.PREEMPTS: pod_checks.preempts,
    FindingKind.INIT_REUSES: pod_checks.init_reuses,
    FindingKind.NO_DRA: node_checks.no_dra,
    FindingKind.DRA_OFF: node_checks.dra_off,
    FindingKind.UNCHANGED_PODS: node_checks.unchanged_pods,
    FindingKind.FEATURES_OFF: node_checks.features_off,
    FindingKind.TOPOLOGY_MANAGER: node_checks.topology_manager,
    FindingKind.NO_CLASS: cluster_checks.no_class,
    FindingKind.TWO_CLASSES: cluster_checks.two_classes,
    FindingKind.AGENT_RIGHTS: cluster_checks.agent_rights,
    FindingKind.OPERATOR_RIGHTS: cluster_checks.operator_rights,
    FindingKind.AGENTS_KEPT_AWAY: node_checks.agents_kept_away,
    FindingKind.OTHER_PLUGIN: node_checks.other_plugin,
    FindingKind.QUOTA_TWO_KEYS: cluster_checks.quota_two_keys,
    FindingKind.QUOTA_SCOPED: cluster_checks.quota_scoped,
    FindingKind.KUEUE_UNMAPPED: cluster_checks.kueue_unmapped,
    FindingKind.KUEUE_SELECTORS: cluster_checks.kueue_selectors,
    FindingKind.AUTOSCALER_MIXED: cluster_checks.autoscaler_mixed,
    FindingKind.AUTOSCALER_IDLE: cluster_checks.autoscaler_idle,
    FindingKind.AUTOSCALER_LABEL: cluster_checks.autoscaler_label,
    FindingKind.AUTOSCALER_UNCHANGED: cluster_checks.autoscaler_unchanged,
    FindingKind.KARPENTER: cluster_checks.karpenter,
    FindingKind.KUBE_STATE_METRICS: cluster_checks.kube_state_metrics,
    FindingKind.OPENCOST: cluster_checks.opencost,
    FindingKind.DCGM_EXPORTER: cluster_checks.dcgm_exporter,
    FindingKind.MIXED_SHARES: node_checks.mixed_shares,
    FindingKind.RESTART_ENDS: pod_checks.restart_ends,
}
"""For each kind of finding, the function that yields the findings of this kind."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The pods and devices of one resource. capacity, allocatable: the sums over all nodes with the resource.

    published: number of devices in ResourceSlices. by_count: for each number of requested devices, the number of pods
    that request this number by `limits`. by_limits: number of devices that scheduled pods have through the device
    plugin. by_dra: number of devices that scheduled pods with `limits` have through DRA. waiting: number of pods that
    request the resource and are not scheduled yet.
    """

    resource: str
    driver: str
    nodes: int
    capacity: int
    allocatable: int
    published: int
    by_count: Mapping[int, int]
    by_limits: int
    by_dra: int
    waiting: int
    unchanged: bool
    """Whether pods that keep their `limits` can get their devices through DRA on all nodes of the resource."""


@dataclass(frozen=True, slots=True)
class DrainTime:
    """Estimated seconds until all pods with devices have ended on half of the nodes (half), and on all nodes (most).

    nodes: number of nodes with such pods. The estimate is made from the ages of the running pods. The estimate assumes
    a steady state, in which the remaining times of the pods are distributed like their ages. Pods that never end by
    themselves (services) end when they are replaced.
    """

    nodes: int
    half: float
    most: float


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """The result of `plan`. unread: inputs that could not be read, so that findings may be missing.

    idle: whether the plan has nodes, and no pod of the cluster holds a device of them.
    """

    uses: tuple[ResourceUse, ...]
    idle: bool
    drain: DrainTime | None
    findings: tuple[PlanFinding, ...]
    unread: tuple[Unread, ...]

    @property
    def status(self) -> int:
        """The exit status: 4 for blockers, else 5 if inputs could not be read, else 3 for warnings, else 0."""
        severities = {finding.kind.severity for finding in self.findings}
        if Severity.BLOCKER in severities:
            return 4
        if self.unread:
            return 5
        return 3 if Severity.WARNING in severities else 0


def migration_plan(view: ClusterView, ignored: frozenset[str] = frozenset()) -> MigrationPlan:
    """Run all checks and return the plan. ignored: codes of findings to leave out."""
    found = [finding for kind, check in CHECKS.items() if kind.code not in ignored for finding in check(view)]
    order = list(Severity)
    found.sort(key=lambda one: (order.index(one.kind.severity), one.kind.code, one.object))
    uses, unread = tuple(_uses(view)), view.objects.unread
    unknown = view.namespace or any(one.pods for one in unread) or any(one.by_limits or one.by_dra for one in uses)
    return MigrationPlan(uses, bool(view.device_nodes) and not unknown, _drain(view), tuple(found), unread)


def _uses(view: ClusterView) -> Iterator[ResourceUse]:
    for resource, target in view.targets.items():
        nodes = [node for node in view.device_nodes if resource in part(node, "status", "capacity")]
        counts: dict[int, int] = {}
        devices = {True: 0, False: 0}
        waiting = 0
        for pod in view.pods:
            count = asked_of(pod).get(resource, 0)
            if not count:
                continue
            counts[count] = counts.get(count, 0) + 1
            waiting += not part(pod, "spec", "nodeName")
            if part(pod, "spec", "nodeName"):
                devices[title_of(pod) in view.by_dra] += count
        yield ResourceUse(
            resource,
            target.driver,
            len(nodes),
            sum(whole_quantity(part(node, "status", "capacity").get(resource)) for node in nodes),
            sum(whole_quantity(part(node, "status", "allocatable").get(resource, 0)) for node in nodes),
            sum(count for (_, driver), count in view.slices.items() if driver == target.driver),
            dict(sorted(counts.items())),
            devices[False],
            devices[True],
            waiting,
            bool(view.classes_of(resource)) and all(minor_of(node) >= cluster_checks.UNCHANGED for node in nodes),
        )


def _drain(view: ClusterView) -> DrainTime | None:
    times = [
        max(view.objects.now - seconds_of(part(pod, "status", "startTime")) for pod in pods)
        for node in view.device_nodes
        if (pods := [pod for pod in view.pods_by_node.get(name_of(node), ()) if part(pod, "status", "startTime")])
    ]
    return DrainTime(len(times), statistics.median(times), max(times)) if times else None
