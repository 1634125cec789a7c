"""Which devices belong together, and in which order they are published."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deviceplugin import topology
from deviceplugin.node.service import Service


class Order:
    """The order in which a resource's devices are published; found anew only when they or their links change.

    The slices are made anew after each Prepare, and the order of 64 partitions takes longer than a Prepare.
    """

    def __init__(self) -> None:
        self._devices: frozenset[str] = frozenset()
        self._links: Mapping[frozenset[str], float] = {}
        self._order: tuple[str, ...] = ()

    def of(self, devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[str, ...]:
        """Return the devices as `topology.arranged` has them; () where no links are known."""
        if (ids := frozenset(devices)) != self._devices or links != self._links:
            self._devices, self._links = ids, dict(links)
            self._order = tuple(topology.arranged(devices, links)) if links else ()
        return self._order


def groups(service: Service) -> Sequence[frozenset[str]]:
    """Return devices that belong together: by their closest links, else by NUMA node, where there are several."""
    devices = service.inventory.snapshot.devices
    linked = link_groups(devices, service.source.links)
    if linked:
        return linked
    by_numa: dict[tuple[int, ...], set[str]] = {}
    for name, device in devices.items():
        if device.numa_nodes:
            by_numa.setdefault(device.numa_nodes, set()).add(name)
    return tuple(frozenset(names) for names in by_numa.values()) if len(by_numa) > 1 else ()


def link_groups(devices: Collection[str], links: Mapping[frozenset[str], float]) -> tuple[frozenset[str], ...]:
    """Return what the closest links tie together, if that are several groups; () if it is one, or nothing is tied.

    links: as of a source, higher is closer. Pairs on one board make groups of two; where every
    device has the same links to every other, nothing belongs together more than all.
    """
    pairs = {pair: score for pair, score in links.items() if len(pair) == 2 and pair <= set(devices)}
    for level in sorted(set(pairs.values()), reverse=True):
        group = {name: frozenset({name}) for name in devices}
        for pair, score in pairs.items():
            if score >= level:
                one, other = pair
                together = group[one] | group[other]
                group.update(dict.fromkeys(together, together))
        found = {names for names in group.values() if len(names) > 1}
        if len(found) > 1:
            return tuple(sorted(found, key=min))
    return ()
