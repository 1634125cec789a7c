"""Defines the kinds of findings, each with a stable code, a severity, an explanation and a remedy.

docs/plan-findings.md is generated from this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The importance of a finding."""

    BLOCKER = "blocker"
    WARNING = "warning"
    NOTE = "note"


class FindingKind(Enum):
    """A kind of finding: its code, its severity, a sentence that explains the finding, and a sentence of advice."""

    FITS_NOWHERE = (
        "DB101",
        Severity.BLOCKER,
        "a pod asks for more devices than any node has",
        "ask for fewer: neither side can ever serve it",
    )
    ABOVE_32 = (
        "DB102",
        Severity.BLOCKER,
        "a pod asks for more than 32 devices, which is the most that one claim gets",
        "write several claims for it, or leave its nodes with the plugin side",
    )
    PREEMPTS = (
        "DB103",
        Severity.WARNING,
        "pods with a priority that preempts ask for devices; pods with claims preempt no other pod for them",
        "keep devices free for them, or leave them with the plugin side",
    )
    INIT_REUSES = (
        "DB104",
        Severity.WARNING,
        "an init container asks for another number than the containers; limits reuse devices, claims add up",
        "ask for the same number in both, or write the claims by hand",
    )
    NO_DRA = (
        "DB201",
        Severity.BLOCKER,
        "the nodes' Kubernetes has no DRA that this project serves (1.32 and newer)",
        "upgrade, or leave these nodes with the plugin side",
    )
    DRA_OFF = (
        "DB202",
        Severity.WARNING,
        "DRA is off by default in 1.32 and 1.33",
        "switch DynamicResourceAllocation and resource.k8s.io/v1beta1 on",
    )
    UNCHANGED_PODS = (
        "DB203",
        Severity.WARNING,
        "unchanged pods get no devices through DRA: DRAExtendedResource is on by default from 1.36",
        "convert the manifests before all devices of a node move (dra-bridge convert), or upgrade",
    )
    FEATURES_OFF = (
        "DB204",
        Severity.NOTE,
        "taints of devices, shared devices and parts of devices are on by default from 1.36",
        "unhealthy devices are left out of slices instead, and a shared device goes to one claim",
    )
    TOPOLOGY_MANAGER = (
        "DB205",
        Severity.WARNING,
        "the Topology Manager aligns devices of the plugin side with CPUs, and ignores devices of claims",
        "select devices by `numaNode` in claims, or leave pods that need the alignment with limits",
    )
    NO_CLASS = (
        "DB301",
        Severity.WARNING,
        "no DeviceClass names the resource, so unchanged pods get nothing through DRA, and quotas count claims apart",
        "apply what dra-bridge manifests prints",
    )
    TWO_CLASSES = (
        "DB302",
        Severity.BLOCKER,
        "several DeviceClasses name the same extended resource; the scheduler takes the newest",
        "remove extendedResourceName from all but one",
    )
    AGENT_RIGHTS = (
        "DB401",
        Severity.BLOCKER,
        "the agents' ServiceAccount lacks rights",
        "apply the ClusterRole and the binding that dra-bridge manifests prints",
    )
    OPERATOR_RIGHTS = (
        "DB402",
        Severity.WARNING,
        "you may not do what migrate and rollout do",
        "have yourself bound to the ClusterRole NAME-operator",
    )
    AGENTS_KEPT_AWAY = (
        "DB403",
        Severity.BLOCKER,
        "nodes with the devices get no agent: the DaemonSet's node selector or tolerations do not fit them",
        "give the agents' DaemonSet tolerations for all taints, and a selector that these nodes have",
    )
    OTHER_PLUGIN = (
        "DB404",
        Severity.WARNING,
        "the plugin of another vendor, or of an operator, serves devices on the nodes",
        "replace it or adopt it, see docs/existing-plugin.md; an operator puts back what is changed",
    )
    QUOTA_TWO_KEYS = (
        "DB501",
        Severity.WARNING,
        "below 1.36 a quota of the resource does not count claims: a tenant gets the sum of both",
        "add CLASS.deviceclass.resource.k8s.io/devices to the quota, and lower both",
    )
    QUOTA_SCOPED = (
        "DB502",
        Severity.WARNING,
        "a quota with scopes of PriorityClasses never counts claims",
        "limit claims by a quota without scopes",
    )
    KUEUE_UNMAPPED = (
        "DB601",
        Severity.WARNING,
        "Kueue runs without deviceClassMappings for the class, and does not count claims",
        "add the mapping of the class to its configuration, with the resource's name, and restart it",
    )
    KUEUE_SELECTORS = (
        "DB602",
        Severity.WARNING,
        "Kueue admits jobs whose claims have CEL selectors only while enough devices are published; there are none yet",
        "move devices before such jobs are submitted",
    )
    AUTOSCALER_MIXED = (
        "DB701",
        Severity.BLOCKER,
        "in a node group only some nodes have slices of a driver; the cluster autoscaler takes the others for unready",
        "publish a slice on all nodes of a group, and mark them cluster-autoscaler.kubernetes.io/scale-down-disabled",
    )
    AUTOSCALER_IDLE = (
        "DB702",
        Severity.BLOCKER,
        "pods by limits run on nodes with slices whose devices idle; the cluster autoscaler counts only these, and "
        "removes the nodes",
        "mark the nodes cluster-autoscaler.kubernetes.io/scale-down-disabled while pods by limits use them",
    )
    AUTOSCALER_LABEL = (
        "DB703",
        Severity.WARNING,
        "nodes have the provider's GPU label; without allocatable GPUs the cluster autoscaler takes them for unready",
        "do not move all devices of such nodes; on GKE set cloud.google.com/gke-gpu-dra-driver=true",
    )
    AUTOSCALER_UNCHANGED = (
        "DB704",
        Severity.NOTE,
        "unchanged pods that DRA serves count 0 for the cluster autoscaler: their nodes look idle, and stay",
        "convert the manifests before all devices of such nodes move",
    )
    KARPENTER = (
        "DB705",
        Severity.WARNING,
        "Karpenter creates no node for a pod with a claim, unless its option for DRA is on",
        "run Karpenter with `--ignore-dra-requests=false` (from 1.14), or leave pods that need new nodes with limits",
    )
    KUBE_STATE_METRICS = (
        "DB801",
        Severity.NOTE,
        "series of kube-state-metrics that count limits have no claims (kube_pod_container_resource_limits)",
        "use deviceplugin_allocation_info of the agents, which counts both sides; a recording rule is in alerts.yaml",
    )
    OPENCOST = (
        "DB802",
        Severity.WARNING,
        "OpenCost and Kubecost bill limits: devices of claims cost nothing there",
        "bill by the recorded series container:deviceplugin_devices:count",
    )
    DCGM_EXPORTER = (
        "DB803",
        Severity.WARNING,
        "dcgm-exporter names the pods of claims of the driver gpu.nvidia.com alone",
        "use the agents' `metrics.dcgm`, which has the same series for both sides",
    )
    MIXED_SHARES = (
        "DB901",
        Severity.WARNING,
        "nodes of one group have different shares: what a pod can get there depends on the node",
        "finish the rollout, or undo it: dra-bridge rollout",
    )
    RESTART_ENDS = (
        "DB902",
        Severity.BLOCKER,
        "a restart of the kubelet would end pods that run (kubernetes#124586)",
        "do not restart these kubelets before the younger pods that are named have ended",
    )

    def __init__(self, code: str, severity: Severity, text: str, remedy: str) -> None:
        self.code = code
        self.severity = severity
        self.text = text
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """One finding. object: the object that the finding concerns. reason: the observed fact."""

    kind: FindingKind
    object: str
    reason: str
