"""The kubelet's topology manager for devices: hints and their merge.

Pure functions over sets of NUMA nodes. The scope is `container`, and only devices provide hints. Source of the facts:
kubelet 1.36.3, pkg/kubelet/cm/topologymanager and devicemanager/topology_hints.go.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Hint", "TopologyPolicy", "device_hints", "merge"]

TopologyPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]
"""The kubelet's --topology-manager-policy."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A set of NUMA nodes that satisfies a request. nodes: None stands for any NUMA nodes.

    preferred: whether no smaller set of NUMA nodes has enough devices (free and allocated devices together).
    """

    nodes: frozenset[int] | None
    preferred: bool

    @property
    def width(self) -> int:
        """The number of NUMA nodes in the set."""
        return len(self.nodes or ())


def device_hints(
    devices: Mapping[str, Collection[int]],
    available: Collection[str],
    reusable: Collection[str],
    request: int,
    numa_nodes: Sequence[int],
) -> list[Hint] | None:
    """Return the hints of one resource for a request; None if its devices have no NUMA nodes.

    devices: all devices of the resource with their NUMA nodes. The run time is exponential in the number of NUMA nodes
    that have devices of the resource, here as in the kubelet (kubernetes#135541).
    """
    if not any(devices.values()):
        return None
    if len({*available, *reusable}) < request:
        return []
    with_devices = {node for nodes in devices.values() for node in nodes}
    nodes = sorted(with_devices & set(numa_nodes)) or list(numa_nodes)
    smallest = len(nodes)
    masks: list[frozenset[int]] = []
    for size in range(1, len(nodes) + 1):
        for mask in map(frozenset, itertools.combinations(nodes, size)):
            if sum(not mask.isdisjoint(near) for near in devices.values()) >= request:
                smallest = min(smallest, size)
            tied = [devices[d] for d in reusable if devices[d]]
            if any(mask.isdisjoint(near) for near in tied):
                continue
            fitting = len(tied) + sum(not mask.isdisjoint(devices[d]) for d in available)
            if fitting >= request:
                masks.append(mask)
    return [Hint(mask, len(mask) == smallest) for mask in masks]


def merge(
    policy: TopologyPolicy, hints: Iterable[Sequence[Hint] | None], numa_nodes: Sequence[int]
) -> tuple[frozenset[int] | None, bool]:
    """Merge the hints of all resources of a container.

    Returns the NUMA nodes whose devices to use (None: any), and whether the container may run.
    """
    if policy == "none":
        return None, True
    offered: list[Sequence[Hint]] = []
    for of_resource in hints:
        if of_resource is None:
            offered.append([Hint(None, preferred=True)])
        else:
            offered.append(of_resource or [Hint(None, preferred=False)])
    offered = offered or [[Hint(None, preferred=True)]]
    if policy == "single-numa-node":
        offered = [
            [h for h in of_resource if h.preferred and (h.nodes is None or h.width == 1)] for of_resource in offered
        ]
    everything = frozenset(numa_nodes)
    target = max(
        (min((h.width for h in of_resource if h.nodes is not None), default=0) for of_resource in offered), default=0
    )
    best: Hint | None = None
    for combination in itertools.product(*offered):
        candidate = _intersect(combination, everything)
        if candidate.nodes:
            best = candidate if best is None else _better(best, candidate, target)
    if best is None:
        best = Hint(everything, preferred=False)
    nodes = None if policy == "single-numa-node" and best.nodes == everything else best.nodes
    return nodes, policy == "best-effort" or best.preferred


def _intersect(hints: Sequence[Hint], everything: frozenset[int]) -> Hint:
    masks = [h.nodes for h in hints if h.nodes is not None]
    preferred = all(h.preferred for h in hints) and len(set(masks)) <= 1
    return Hint(everything.intersection(*masks), preferred)


def _better(current: Hint, candidate: Hint, target: int) -> Hint:
    if current.preferred != candidate.preferred:
        return current if current.preferred else candidate
    if not current.preferred:
        # Neither hint is preferred. Choose the hint whose number of NUMA nodes is nearest to `target`, the number that
        # the resource with the widest hints needs.
        if current.width == target and candidate.width != target:
            return current
        if current.width < target and candidate.width != current.width:
            return candidate if current.width < candidate.width <= target else current
    return min(current, candidate, key=_narrowness)


def _narrowness(hint: Hint) -> tuple[int, int]:
    return hint.width, sum(1 << node for node in hint.nodes or ())
