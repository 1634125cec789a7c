"""Which devices go best together: pure functions over sets of ids, NUMA nodes and link scores.

The endpoint asks this room what to prefer, the DRA side in which order to publish. Nothing here
does I/O or knows a Device; what is not known about an id costs that id its place, never an error.
Ids are compared naturally: "sim-2" comes before "sim-10".
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

__all__ = ["natural", "numa_compact"]

_DIGITS: Final = re.compile(r"([0-9]+)")


def natural(device: str) -> tuple[object, ...]:
    """Return a sort key that compares runs of digits by value: sim-2, sim-02, sim-10."""
    parts: list[object] = _DIGITS.split(device)
    for at in range(1, len(parts), 2):
        number = str(parts[at]).lstrip("0")
        parts[at] = (len(number), number)
    return (*parts, device)


def _given(must_include: Iterable[str]) -> list[str]:
    return sorted(set(must_include), key=natural)


def numa_compact(
    devices: Mapping[str, Sequence[int]], available: Collection[str], must_include: Collection[str], size: int
) -> list[str]:
    """Choose `size` of the `available` ids on as few NUMA nodes as possible; O(n log n).

    devices: id to its NUMA nodes, empty (or no entry) if unknown; a device near several nodes
    counts for each of them. The nodes of `must_include` come first; one of them that can hold all
    that is missing is enough. Otherwise they are emptied, and what is still missing comes from the
    node with the fewest free devices that holds it all, or, while there is none, from the node with
    the most. Devices of unknown NUMA come last. Ties: the lower node, then the smaller id.

    `must_include` is always kept, even if it is longer than `size` or not `available`; if there are
    too few devices, all of them are returned. The list is in the natural order of the ids.
    """
    taken = set(must_include)
    free = set(available) - taken
    missing = min(size - len(taken), len(free))
    if missing <= 0:
        return _given(taken)
    nodes: dict[int, set[str]] = {}
    for device in free:
        for node in devices.get(device, ()):
            nodes.setdefault(node, set()).add(device)
    opened: dict[int, int] = {}
    for device in taken:
        for node in set(devices.get(device, ())):
            opened[node] = opened.get(node, 0) + 1

    def take(candidates: Iterable[str], count: int) -> None:
        nonlocal missing
        for device in heapq.nsmallest(count, candidates, key=natural):
            for node in set(devices.get(device, ())):
                nodes[node].discard(device)
            taken.add(device)
            free.discard(device)
            missing -= 1

    holding = [node for node in opened if len(nodes.get(node, ())) >= missing]
    if holding:
        take(nodes[min(holding, key=lambda node: (-opened[node], len(nodes[node]), node))], missing)
    for node in sorted(opened, key=lambda node: (-opened[node], node)):
        if node in nodes:
            take(set(nodes[node]), missing)
    # Sizes only shrink (by devices near several nodes), so a stale entry is put back with its true size.
    largest = [(-len(members), node) for node, members in nodes.items()]
    heapq.heapify(largest)
    while missing and largest:
        stale, node = heapq.heappop(largest)
        members = nodes[node]
        if len(members) < -stale:
            if members:
                heapq.heappush(largest, (-len(members), node))
            continue
        if len(members) >= missing:
            node = min((n for n in nodes if len(nodes[n]) >= missing), key=lambda n: (len(nodes[n]), n))
        take(set(nodes[node]), missing)
    take(free, missing)
    return _given(taken)
