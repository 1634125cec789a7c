"""Decides which Nodes a rollout marks, so that a cluster autoscaler does not drain nodes in use.

All functions are pure. The autoscaler (commit 33c3f97b) has two rules. First, the ResourceSlices alone decide whether a
node with ResourceSlices is idle: CPU and memory do not count, and a node with an empty pool is idle
(pkg/simulator/utilization/info.go). Second, a node with fewer complete pools than the first good node of its group
counts as unready (pkg/processors/customresources/dra_processor.go). So either all nodes of a group should have a pool,
or no node of the group. The rollout marks the nodes whose ResourceSlices do not show that pods use the node, and the
autoscaler does not drain marked nodes.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deviceplugin.register.records import State
from dra_bridge.kube import Object
from dra_bridge.rollout.progress import Progress, pool_annotation

SCALE_DOWN_DISABLED: Final = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
"""With this annotation set to "true", the autoscaler does not drain the Node."""
_RECORD: Final = "/dra-scale-down"
PUBLISH: Final = "publish"
"""The value of the annotation `pool_annotation`, by which a Node requests a pool from the agent."""


def mark_annotation(driver: str) -> str:
    """Return the key of the annotation by which a rollout of this driver records that it has marked a Node."""
    return driver + _RECORD


@dataclass(frozen=True, slots=True)
class Marks:
    """The annotations of a Node for the autoscaler and the agent.

    disabled: whether the annotation SCALE_DOWN_DISABLED is set. own: whether a rollout of this driver has set this
    annotation. others: whether a rollout of another driver has set this annotation. pool: whether the Node requests a
    pool from the agent.
    """

    disabled: bool = False
    own: bool = False
    others: bool = False
    pool: bool = False


UNMARKED: Final = Marks()


def marks_of(driver: str, annotations: Mapping[str, str]) -> Marks:
    """Return the marks in a Node's annotations, from the view of a rollout of this driver."""
    own = mark_annotation(driver)
    others = any(key.endswith(_RECORD) and key != own for key in annotations)
    disabled = annotations.get(SCALE_DOWN_DISABLED) == "true"
    return Marks(disabled, own in annotations, others, pool_annotation(driver) in annotations)


class Placement(enum.Enum):
    """Whether all, none or some of a node's devices are on the DRA side.

    PARTIAL also stands for a node with devices that are moving or quarantined.
    """

    NONE = "none"
    PARTIAL = "partial"
    ALL = "all"


def placement(reported: Progress | None) -> Placement:
    """Return whether all, none or some of a node's devices are on the DRA side; NONE for a node without devices."""
    counts = [resource.counts for resource in reported.resources.values()] if reported is not None else []
    states = {State(state) for each in counts for state, number in each.items() if number}
    if states == {State.DRA}:
        return Placement.ALL
    return Placement.NONE if states <= {State.PLUGIN} else Placement.PARTIAL


@dataclass(frozen=True, slots=True)
class MarkedNode:
    """A node of a rollout.

    served: whether the node's agent has written a report. settled: whether all moves on the node are done. sliced:
    whether the node has ResourceSlices of the driver. former: whether the node's agent is of an older version, which
    always has a ResourceSlice, even an empty one. ready: whether the kubelet reports the node as ready. If not, the
    autoscaler treats the node as unready, with or without a pool.
    """

    node: str
    marks: Marks
    placement: Placement
    served: bool = True
    settled: bool = False
    sliced: bool = False
    former: bool = False
    ready: bool = True


@dataclass(frozen=True, slots=True)
class MarkStep:
    """The next changes of marks (the annotation SCALE_DOWN_DISABLED) and of requests for pools on Nodes.

    Each field is a tuple of node names. mark: nodes to mark. publish: marked nodes on which to request a pool next.
    withdraw: nodes on which to remove the request for a pool. release: nodes on which to remove the mark. kept: all
    nodes that stay marked. unpublished: nodes whose agents have not published their pools yet. leaving: nodes whose
    agents have not removed their slices yet.
    """

    mark: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    withdraw: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether all required marks and pools exist, so that devices may begin to move."""
        return not (self.mark or self.publish or self.unpublished)

    @property
    def waits(self) -> tuple[str, ...]:
        """The nodes for which the rollout waits: their agents have not published or not removed their pools yet."""
        return self.unpublished or self.leaving

    @property
    def over(self) -> bool:
        """Whether there is nothing to write and nothing to wait for."""
        return self.ready and not (self.withdraw or self.release or self.leaving)


def next_marks(nodes: Sequence[MarkedNode], *, ignore: bool = False) -> MarkStep:
    """Return the next changes of the Nodes' marks and requests for pools. nodes: all nodes of the rollout.

    ignore: whether to ignore cluster autoscalers, because the cluster has none; then no node needs a mark. All nodes
    are marked before the first pool is requested. A node with all devices on the DRA side needs no mark, because its
    ResourceSlices show which devices are in use. Other nodes need no mark once all nodes have no device on the DRA side
    and no ResourceSlice. An agent of an older version always has a ResourceSlice. So if the rollout has such an agent,
    these nodes stay marked and have pools, because nodes without a pool would count as unready.
    """
    served = [node for node in nodes if node.served]
    at_none = all(node.settled and node.placement is Placement.NONE and not node.former for node in served)
    rightly = {node.node for node in served if node.settled and node.placement is Placement.ALL}
    kept = [] if ignore or at_none else [node for node in served if node.node not in rightly]
    names = {node.node for node in kept}
    mark = [node for node in kept if not node.marks.disabled or (node.marks.others and not node.marks.own)]
    publish = [node for node in kept if not node.marks.pool and not mark]
    withdraw = [node for node in nodes if node.marks.pool and node.node not in names]
    owned = [node for node in nodes if node.marks.own and node.node not in names]
    anywhere = any(node.sliced or node.marks.pool for node in nodes)
    release = [node for node in owned if ignore or node.node in rightly or not anywhere]
    leaving = [node for node in served if at_none and not ignore and node.sliced]
    if not (withdraw or leaving):  # No agent will remove the remaining ResourceSlices, so these nodes stay marked.
        kept += [node for node in owned if node not in release]
    unpublished = [node for node in kept if node.node in names and node.ready and not node.sliced]
    return MarkStep(
        _names(mark),
        _names(publish),
        _names(withdraw),
        _names(release),
        _names(kept),
        _names(unpublished) if not (mark or publish) else (),
        _names(leaving),
    )


def _names(nodes: Sequence[MarkedNode]) -> tuple[str, ...]:
    return tuple(node.node for node in nodes)


def mark_patch(driver: str, node: Object) -> dict[str, Any] | None:
    """Return the merge patch that marks a Node; None if a user or a rollout of this driver has marked the Node already.

    The records of rollouts of other drivers stay.
    """
    marks = marks_of(driver, node["metadata"].get("annotations") or {})
    if marks.disabled and (marks.own or not marks.others):
        return None
    return guarded_patch(node, {SCALE_DOWN_DISABLED: "true", mark_annotation(driver): "disabled"})


def publish_patch(driver: str, node: Object) -> dict[str, Any] | None:
    """Return the merge patch that adds a request for a pool to a Node; None if the Node has the request already."""
    if marks_of(driver, node["metadata"].get("annotations") or {}).pool:
        return None
    return guarded_patch(node, {pool_annotation(driver): PUBLISH})


def release_patch(driver: str, node: Object, step: MarkStep) -> dict[str, Any] | None:
    """Return the merge patch that removes a Node's mark or its request for a pool; None if there is nothing to remove.

    The mark stays if a rollout of another driver has marked the Node as well.
    """
    name, changes = node["metadata"]["name"], dict[str, str | None]()
    marks = marks_of(driver, node["metadata"].get("annotations") or {})
    if marks.pool and name in step.withdraw:
        changes[pool_annotation(driver)] = None
    if marks.own and name in step.release:
        changes[mark_annotation(driver)] = None
        if not marks.others:
            changes[SCALE_DOWN_DISABLED] = None
    return guarded_patch(node, changes) if changes else None


def guarded_patch(node: Object, annotations: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a merge patch of a Node's annotations.

    The API server refuses the patch if the Node has changed meanwhile.
    """
    version = node["metadata"].get("resourceVersion")
    return {"metadata": {"annotations": dict(annotations), "resourceVersion": version}}


def sentences(marks: Marks, where: Placement) -> list[str]:
    """Return sentences that explain to the user why a rollout has marked a Node; [] if it has not marked the Node."""
    if not marks.own:
        return []
    if where is Placement.PARTIAL:
        why = "an autoscaler would judge it by the devices of the DRA side alone"
        return [f"a rollout has marked it {SCALE_DOWN_DISABLED}: {why}. It is never scaled down while it is so"]
    again = "the same rollout again, or --undo, takes that back once all of its nodes are at rest"
    return [f"a rollout has marked it {SCALE_DOWN_DISABLED}, so it is not scaled down; {again}"]


def in_words(kept: Collection[str]) -> str:
    """Return a text about the marks that a finished rollout leaves on nodes; "" if no node stays marked."""
    if not kept:
        return ""
    many = f"{len(kept)} nodes stay" if len(kept) > 1 else f"{next(iter(kept))} stays"
    why = "in this group of nodes devices are on both sides, or slices are left without an agent that takes them away"
    return f"{many} marked {SCALE_DOWN_DISABLED}, and so never scaled down: {why}"
