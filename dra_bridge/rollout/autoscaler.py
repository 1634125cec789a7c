"""What a rollout writes on Nodes so that a cluster autoscaler drains none that pods use: pure functions.

The autoscaler (33c3f97b) has two rules. A node with any slice is judged by its slices alone: CPU and memory do not
count, an empty pool is idle (pkg/simulator/utilization/info.go). A node that has fewer complete pools than the first
good node of its group is unready (pkg/processors/customresources/dra_processor.go). So all nodes of a group have a pool
or none has, and those whose slices do not stand for their use are marked: then they are not drained.
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
"""The annotation, "true", of Nodes that the autoscaler does not drain."""
_RECORD: Final = "/dra-scale-down"
PUBLISH: Final = "publish"
"""The value of the annotation that asks for a pool."""


def mark_annotation(driver: str) -> str:
    """Return the key of the annotation on Nodes by which a rollout of this driver knows the mark as its own."""
    return driver + _RECORD


@dataclass(frozen=True, slots=True)
class Marks:
    """What a Node says to the autoscaler and to the agent.

    disabled: it is not drained. own: a rollout of this driver has set that. others: one of another driver has. pool:
    the agent is asked for a pool.
    """

    disabled: bool = False
    own: bool = False
    others: bool = False
    pool: bool = False


UNMARKED: Final = Marks()


def marks_of(driver: str, annotations: Mapping[str, str]) -> Marks:
    """Return the marks of a Node."""
    own = mark_annotation(driver)
    others = any(key.endswith(_RECORD) and key != own for key in annotations)
    disabled = annotations.get(SCALE_DOWN_DISABLED) == "true"
    return Marks(disabled, own in annotations, others, pool_annotation(driver) in annotations)


class Placement(enum.Enum):
    """Where a node's devices are. PARTIAL: on both sides, between them, or not known."""

    NONE = "none"
    PARTIAL = "partial"
    ALL = "all"


def placement(reported: Progress | None) -> Placement:
    """Return where a node's devices are; NONE if it has none."""
    counts = [resource.counts for resource in reported.resources.values()] if reported is not None else []
    states = {State(state) for each in counts for state, number in each.items() if number}
    if states == {State.DRA}:
        return Placement.ALL
    return Placement.NONE if states <= {State.PLUGIN} else Placement.PARTIAL


@dataclass(frozen=True, slots=True)
class MarkedNode:
    """A node of a rollout.

    served: whether its agent reports. settled: whether nothing of it is left to move. sliced: whether it has slices of
    the driver. former: its agent keeps an empty slice, whether it is asked to or not. ready: whether its kubelet says
    so; the autoscaler takes it for unready otherwise, whatever its pools.
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
    """The next writes of marks, nodes by name.

    mark, publish: nodes to mark, and then to ask for pools. withdraw, release: nodes whose pools are not asked for any
    more, and whose marks go. kept: all whose marks stay. unpublished: nodes whose pools are waited for. leaving: nodes
    whose slices are waited for to go.
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
        """Whether devices may begin to move."""
        return not (self.mark or self.publish or self.unpublished)

    @property
    def waits(self) -> tuple[str, ...]:
        """The nodes whose pools are waited for: to come, or to go."""
        return self.unpublished or self.leaving

    @property
    def over(self) -> bool:
        """Whether nothing is to be written or waited for."""
        return self.ready and not (self.withdraw or self.release or self.leaving)


def next_marks(nodes: Sequence[MarkedNode], *, ignore: bool = False) -> MarkStep:
    """Return the next writes. nodes: all of the rollout. ignore: the cluster has no autoscaler.

    All are marked before the first pool is asked for. A node at `all` is judged rightly by its slices. One at `none` is
    once no node of the group has a slice.
    """
    served = [node for node in nodes if node.served]
    at_none = all(node.settled and node.placement is Placement.NONE for node in served)
    rightly = {node.node for node in served if node.settled and node.placement is Placement.ALL}
    kept = [] if ignore or at_none else [node for node in served if node.node not in rightly]
    names = {node.node for node in kept}
    mark = [node for node in kept if not node.marks.disabled or (node.marks.others and not node.marks.own)]
    publish = [node for node in kept if not node.marks.pool and not mark]
    withdraw = [node for node in nodes if node.marks.pool and node.node not in names]
    owned = [node for node in nodes if node.marks.own and node.node not in names]
    anywhere = any(node.sliced or node.marks.pool for node in nodes)
    release = [node for node in owned if ignore or node.node in rightly or not anywhere]
    leaving = [node for node in served if at_none and not ignore and node.sliced and not node.former]
    if not (withdraw or leaving):  # slices stay that no agent takes away
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
    """Return the merge patch that marks a Node, None if it is marked: what others have set stays theirs."""
    marks = marks_of(driver, node["metadata"].get("annotations") or {})
    if marks.disabled and (marks.own or not marks.others):
        return None
    return guarded_patch(node, {SCALE_DOWN_DISABLED: "true", mark_annotation(driver): "disabled"})


def publish_patch(driver: str, node: Object) -> dict[str, Any] | None:
    """Return the merge patch that asks for a pool, None if it is asked for."""
    if marks_of(driver, node["metadata"].get("annotations") or {}).pool:
        return None
    return guarded_patch(node, {pool_annotation(driver): PUBLISH})


def release_patch(driver: str, node: Object, step: MarkStep) -> dict[str, Any] | None:
    """Return the merge patch that takes back what is to go, None for nothing.

    The mark stays where a rollout of another driver has set it, too.
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
    """Return a merge patch that the API server refuses if the node has changed meanwhile."""
    version = node["metadata"].get("resourceVersion")
    return {"metadata": {"annotations": dict(annotations), "resourceVersion": version}}


def sentences(marks: Marks, where: Placement) -> list[str]:
    """Return what a rollout's mark means for a node; nothing without one."""
    if not marks.own:
        return []
    if where is Placement.PARTIAL:
        why = "an autoscaler would judge it by the devices of the DRA side alone"
        return [f"a rollout has marked it {SCALE_DOWN_DISABLED}: {why}. It is never scaled down while it is so"]
    again = "the same rollout again, or --undo, takes that back once all of its nodes are at rest"
    return [f"a rollout has marked it {SCALE_DOWN_DISABLED}, so it is not scaled down; {again}"]


def in_words(kept: Collection[str]) -> str:
    """Return what is said at the end of a rollout that leaves marks, "" if it leaves none."""
    if not kept:
        return ""
    many = f"{len(kept)} nodes stay" if len(kept) > 1 else f"{next(iter(kept))} stays"
    why = "in this group of nodes devices are on both sides, or slices are left without an agent that takes them away"
    return f"{many} marked {SCALE_DOWN_DISABLED}, and so never scaled down: {why}"
