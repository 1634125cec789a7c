"""The current devices of a resource."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deviceplugin.device import Device, Health
from deviceplugin.inventory import GONE, DuplicateDeviceError, Inventory, InventorySnapshot, merged, without

R = "example.com/r"


def test_first_list_counts_even_when_empty() -> None:
    """After an empty first list, the resource's devices count as listed."""
    first = merged(InventorySnapshot(R), [])
    assert not InventorySnapshot(R).listed
    assert first.listed
    assert first.version == 1


def test_same_list_is_no_change() -> None:
    """A list with the same devices leaves the snapshot unchanged; another order or health makes a new snapshot."""
    first = merged(InventorySnapshot(R), [Device("a"), Device("b")])
    assert merged(first, [Device("a"), Device("b")]) is first
    assert merged(first, [Device("b"), Device("a")]).version == 2
    assert merged(first, [Device("a"), Device("b", health=Health.UNKNOWN)]).version == 2


def test_vanished_device_stays_unhealthy() -> None:
    """A device that is no longer listed stays, as unhealthy and gone, after the listed devices."""
    first = merged(InventorySnapshot(R), [Device("a"), Device("b")])
    second = merged(first, [Device("b")])
    assert list(second.devices) == ["b", "a"]
    assert (second.devices["a"].health, second.devices["a"].message) == (Health.UNHEALTHY, GONE)
    assert second.gone == {"a"}
    assert merged(second, [Device("b")]) is second


def test_duplicate_id_changes_nothing() -> None:
    """A list that names an id twice is refused whole, with the resource and the id in the error."""
    inventory = Inventory(R)
    inventory.publish([Device("a")])
    before = inventory.snapshot
    with pytest.raises(DuplicateDeviceError, match=r"example.com/r: device id 'x' is listed twice"):
        inventory.publish([Device("x"), Device("x", numa=1)])
    assert inventory.snapshot is before


def test_subscribers_hear_of_each_change_until_they_leave() -> None:
    """Each subscriber gets each newer snapshot once until it leaves; an unchanged list gives none."""
    inventory, reconciled = Inventory(R), list[int]()
    leave = inventory.subscribe(lambda snapshot: reconciled.append(snapshot.version))
    assert inventory.publish([Device("a")])
    assert not inventory.publish([Device("a")])
    assert inventory.publish([])
    assert inventory.forget(["a"])
    leave()
    leave()
    inventory.publish([Device("b")])
    assert reconciled == [1, 2, 3]
    assert "version 4: 1 devices, 0 gone" in repr(inventory)


def test_subscriber_may_leave_while_told() -> None:
    """A subscriber may leave in its callback; other subscribers still get the snapshot."""
    inventory, reconciled = Inventory(R), list[str]()

    def once(snapshot: InventorySnapshot) -> None:
        reconciled.append("one")
        leave()

    leave = inventory.subscribe(once)
    inventory.subscribe(lambda snapshot: reconciled.append("two"))
    inventory.publish([Device("a")])
    inventory.publish([])
    assert reconciled == ["one", "two", "two"]


class Lists(RuleBasedStateMachine):
    """Publishes and forgets devices in any sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = InventorySnapshot(R)
        self.listed: set[str] = set()
        self.ever: set[str] = set()

    @rule(ids=st.lists(st.sampled_from("abcdef"), unique=True))
    def list(self, ids: list[str]) -> None:
        before = self.snapshot
        self.snapshot = merged(before, [Device(name) for name in ids])
        assert self.snapshot.version in (before.version, before.version + 1)
        self.listed = set(ids)
        self.ever |= set(ids)

    @rule(ids=st.sets(st.sampled_from("abcdef")))
    def forget(self, ids: set[str]) -> None:
        self.snapshot = without(self.snapshot, ids)
        self.ever -= ids - self.listed

    @invariant()
    def nothing_is_dropped_unasked(self) -> None:
        assert set(self.snapshot.devices) == self.ever
        assert self.snapshot.gone == self.ever - self.listed
        for name, device in self.snapshot.devices.items():
            assert device.health.usable == (name in self.listed)


TestLists = Lists.TestCase


@given(st.lists(st.sampled_from("abc"), unique=True), st.lists(st.sampled_from("abc"), unique=True))
def test_order_is_the_sources_with_the_gone_last(one: list[str], two: list[str]) -> None:
    """Devices have the order of the source's list, and gone devices come last."""
    snapshot = merged(merged(InventorySnapshot(R), map(Device, one)), map(Device, two))
    assert list(snapshot.devices)[: len(two)] == two
