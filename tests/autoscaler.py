"""A small model of the cluster autoscaler: which nodes it counts as unready or drains, and whether it stops scaling.

The model follows the autoscaler's code (commit 33c3f97b: pkg/simulator/utilization/info.go,
pkg/processors/customresources/dra_processor.go, pkg/clusterstate) and its observed behaviour, which
tests/dra/rollout/test_autoscaler.py has as a table.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from deviceplugin.naming import parse_quantity

Object = Mapping[str, Any]
THRESHOLD: Final = 0.5
"""The utilization below which a node is drained (--scale-down-utilization-threshold)."""
OK_UNREADY: Final = 3
"""The value of the option --ok-total-unready-count."""
MOST_UNREADY: Final = 0.45
"""The value of the option --max-total-unready-percentage, as a ratio."""


class Verdict(enum.Enum):
    """The autoscaler's verdict on a node.

    USED: the node stays. IDLE: it is drained. DISABLED: it stays because of its annotation scale-down-disabled.
    UNREADY: it counts as unready.
    """

    USED = "used"
    IDLE = "idle"
    DISABLED = "disabled"
    UNREADY = "unready"


def judge(
    nodes: Sequence[Object], slices: Iterable[Object], claims: Iterable[Object] = (), pods: Iterable[Object] = ()
) -> dict[str, Verdict]:
    """Return the verdict on each node of a group; UNREADY if another node has more pools of a driver's slices."""
    by_node: dict[str, list[Object]] = {node["metadata"]["name"]: [] for node in nodes}
    for body in slices:
        if (name := body["spec"].get("nodeName", "")) in by_node:
            by_node[name].append(body)
    pools = {name: _complete_pools(found) for name, found in by_node.items()}
    most: Counter[str] = Counter()
    for counts in pools.values():
        most |= counts
    claims, pods = list(claims), list(pods)
    verdicts = {}
    for node in nodes:
        name = node["metadata"]["name"]
        disabled = (node["metadata"].get("annotations") or {}).get(
            "cluster-autoscaler.kubernetes.io/scale-down-disabled"
        )
        if any(pools[name][driver] < count for driver, count in most.items()):
            verdicts[name] = Verdict.UNREADY
        elif disabled == "true":
            verdicts[name] = Verdict.DISABLED
        else:
            used = _utilization(node, by_node[name], claims, pods)
            verdicts[name] = Verdict.USED if used >= THRESHOLD else Verdict.IDLE
    return verdicts


def stops(verdicts: Mapping[str, Verdict]) -> bool:
    """Return whether the autoscaler stops scaling in both directions."""
    unready = sum(verdict is Verdict.UNREADY for verdict in verdicts.values())
    return unready > OK_UNREADY and unready > MOST_UNREADY * len(verdicts)


def _complete_pools(slices: Iterable[Object]) -> Counter[str]:
    """Return the number of complete pools of each driver; an empty pool counts."""
    found: dict[tuple[str, str], list[Object]] = {}
    for body in slices:
        found.setdefault((body["spec"]["driver"], body["spec"]["pool"]["name"]), []).append(body["spec"]["pool"])
    complete: Counter[str] = Counter()
    for (driver, _), pools in found.items():
        newest = max(pool["generation"] for pool in pools)
        current = [pool for pool in pools if pool["generation"] == newest]
        complete[driver] += len(current) == current[0]["resourceSliceCount"]
    return complete


def _utilization(node: Object, slices: Sequence[Object], claims: Iterable[Object], pods: Iterable[Object]) -> float:
    name = node["metadata"]["name"]
    if not slices:
        here = [pod for pod in pods if pod["spec"].get("nodeName") == name]
        containers = [container for pod in here for container in pod["spec"]["containers"]]
        parts = []
        for resource in ("cpu", "memory"):
            requested = [(one.get("resources") or {}).get("requests", {}).get(resource, 0) for one in containers]
            allocatable = parse_quantity(node["status"]["allocatable"][resource])
            parts.append(float(sum(map(parse_quantity, requested)) / allocatable))
        return max(parts)
    taken = {
        (result["driver"], result["pool"], result["device"])
        for claim in claims
        if (claim.get("status") or {}).get("reservedFor")
        for result in claim["status"]["allocation"]["devices"]["results"]
    }
    devices: dict[tuple[str, str], set[str]] = {}
    for body in slices:
        key = body["spec"]["driver"], body["spec"]["pool"]["name"]
        devices.setdefault(key, set()).update(device["name"] for device in body["spec"].get("devices") or ())
    return max(
        sum((*key, name) in taken for name in names) / len(names) if names else 0.0 for key, names in devices.items()
    )
