from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

import pytest

from deviceplugin import topology
from deviceplugin.device import Device
from deviceplugin.inventory import InventorySnapshot
from dra_bridge.handover.planner import link_groups
from dra_bridge.node.resource import Order
from dra_bridge.slices.desired import Offer, Pool, desired

GPUS = [f"gpu{number}" for number in range(4)]


def links(pairs: dict[tuple[int, int], float], rest: float) -> dict[frozenset[str], float]:
    return {
        frozenset({GPUS[one], GPUS[other]}): pairs.get((one, other), rest) for one, other in combinations(range(4), 2)
    }


def test_pairs_are_groups() -> None:
    """Devices that are linked in pairs are groups of two."""
    tied = links({(0, 2): 200.0, (1, 3): 200.0}, 10.0)
    assert link_groups(GPUS, tied) == (frozenset({"gpu0", "gpu2"}), frozenset({"gpu1", "gpu3"}))


def test_a_full_mesh_is_no_group() -> None:
    """Devices that are all linked with each other alike, or that have no links, form no groups."""
    assert link_groups(GPUS, links({}, 1200.0)) == ()
    assert link_groups(GPUS, {}) == ()


def test_a_slice_offers_linked_devices_side_by_side() -> None:
    """A slice lists linked devices next to each other, because the scheduler takes devices from its front."""
    snapshot = InventorySnapshot("example.com/gpu", 1, {name: Device(name) for name in GPUS})
    order = ("gpu0", "gpu2", "gpu1", "gpu3")
    wanted = desired(Pool("gpu.example.com", "node", (Offer(snapshot, order=order),)))
    assert wanted is not None
    assert tuple(device["name"] for device in wanted.slices[0]["spec"]["devices"]) == order


def test_devices_shared_differently() -> None:
    """Only a device with replicas is published with shares and `allowMultipleAllocations`."""
    snapshot = InventorySnapshot("example.com/gpu", 1, {name: Device(name) for name in GPUS[:2]})
    wanted = desired(Pool("gpu.example.com", "node", (Offer(snapshot, replicas={"gpu0": 3}),)))
    assert wanted is not None
    first, second = wanted.slices[0]["spec"]["devices"]
    assert first["allowMultipleAllocations"]
    assert first["capacity"]["shares"]["value"] == "3"
    assert "allowMultipleAllocations" not in second


def test_order_is_found_again_only_when_devices_or_links_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of devices by their links is computed again only when devices or links have changed."""
    tied = links({(0, 2): 200.0, (1, 3): 200.0}, 10.0)
    found = topology.arranged(GPUS, tied)
    asked: list[set[str]] = []

    def note(devices: Collection[str], score: Mapping[frozenset[str], float]) -> list[str]:
        if len(devices) > 2:  # `arranged` calls itself for the halves
            asked.append(set(devices))
        return arranged(devices, score)

    arranged = topology.arranged
    monkeypatch.setattr(topology, "arranged", note)
    order = Order()
    assert order.of(GPUS, {}) == ()
    for _ in range(3):
        assert order.of(GPUS, dict(tied)) == tuple(found)
    assert order.of(GPUS, links({(0, 1): 200.0, (2, 3): 200.0}, 10.0)) == ("gpu0", "gpu1", "gpu2", "gpu3")
    assert set(order.of(GPUS[1:], tied)) == set(GPUS[1:])
    assert [len(devices) for devices in asked] == [4, 4, 3]
