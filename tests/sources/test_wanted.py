"""Settings for all devices of a resource: filters, replicas and hooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest

from deviceplugin.config import ConfigError, parse
from deviceplugin.device import ContainerEdits, Device, DeviceNode
from deviceplugin.naming import PCI_BUS_ID
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources import ConfiguredSource


class Entry(DeviceSource):
    """An entry with these devices."""

    def __init__(self, *devices: Device) -> None:
        self.listed = devices
        self.asked: list[list[str]] = []

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield self.listed


class Hooked(Entry):
    """An entry with hooks, which records the devices that `edits` gets."""

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        self.asked.append([device.id for device in devices])
        return ContainerEdits(env={"IDS": ",".join(device.id for device in devices), "MINE": "1"})

    async def measure(self, devices: Sequence[Device]) -> Measured:
        return {device.id: {"power_watts": 1.0} for device in devices}

    @property
    def links(self) -> dict[frozenset[str], float]:
        return {frozenset(device.id for device in self.listed): 100.0}


async def configured(fields: str, *entries: DeviceSource) -> tuple[ConfiguredSource, list[Device]]:
    """Return a resource with these fields and entries, and its first list."""
    source = ConfiguredSource(
        parse(f"resources: [{{name: example.com/a, devices: [path: /dev/null], {fields}}}]").resources[0]
    )
    source.entries = entries
    async with aclosing(cast("Any", source.watch())) as lists:
        return source, list(await anext(lists))


DEVICES = (
    Device("one", attributes={"productName": "NVIDIA A100-SXM4-40GB", PCI_BUS_ID: "0000:3b:00.0"}),
    Device("two", nodes=[DeviceNode("/dev/ttyUSB1", "/dev/serial/by-id/usb-x")], attributes={"model": "T4"}),
    Device("three"),
)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ("include: [one]", ["one"]),
        ('include: ["t*"]', ["two", "three"]),
        ('exclude: ["t*"]', ["one"]),
        ('include: ["*"], exclude: [two]', ["one", "three"]),
        ('include: ["0000:3b:*"]', ["one"]),
        ("exclude: [/dev/ttyUSB1]", ["one", "three"]),
        ("include: [/dev/serial/by-id/*]", ["two"]),
        ("include: [none]", []),
    ],
)
async def test_devices_are_included_and_excluded_by_what_users_call_them(fields: str, left: list[str]) -> None:
    """Patterns match ids, PCI addresses, and paths on the host and in the container; exclude wins over include."""
    _, devices = await configured(fields, Entry(*DEVICES))
    assert [device.id for device in devices] == left


@pytest.mark.parametrize(
    ("replicas", "counts"),
    [
        ("4", [4, 4, 4]),
        ("{a100: 4}", [4, 1, 1]),
        ("{A100: 4, t4: 2}", [4, 2, 1]),
        ('{"*100*": 3}', [3, 1, 1]),
        ('{"0000:3b:00.0": 2, two: 5, "*": 7}', [2, 5, 7]),
        ('{"*": 7, two: 5}', [7, 7, 7]),
        ("{a10: 4}", [1, 1, 1]),
    ],
)
async def test_replicas_by_name_take_the_first_that_fits(replicas: str, counts: list[int]) -> None:
    """The first matching pattern gives the replicas: by id, address or word of the product, in any case."""
    source, devices = await configured(f"sharing: {{replicas: {replicas}}}", Entry(*DEVICES))
    assert [source.replicas_of(device) for device in devices] == counts
    assert source.replicas == source.config.sharing.most >= max(counts)


def test_order_of_replicas_by_name_is_a_change() -> None:
    """Another order of the patterns is a change of the resource."""
    one, other = (
        parse(f"resources: [{{name: example.com/a, devices: [path: /x], sharing: {{replicas: {replicas}}}}}]")
        for replicas in ("{a: 2, b: 3}", "{b: 3, a: 2}")
    )
    assert one.resources != other.resources


async def test_hooks_are_asked_of_each_entry_for_its_own_devices() -> None:
    """The `edits` of an entry get the container's devices of this entry; the resource's settings win."""
    hooked = Hooked(Device("a"), Device("b"))
    source, devices = await configured("env: {MINE: '2'}", hooked, Entry(Device("c")))
    assert source.hooks == {"edits", "measure"}
    edits = await source.edits(devices)
    assert hooked.asked == [["a", "b"]]
    assert dict(edits.env) == {"IDS": "a,b", "MINE": "2"}
    assert await source.measure(devices) == {"a": {"power_watts": 1.0}, "b": {"power_watts": 1.0}}
    assert dict(source.links) == {frozenset("ab"): 100.0}
    assert await source.edits(devices[2:]) == ContainerEdits()


async def test_resource_whose_entries_have_no_hooks_has_none() -> None:
    """A resource whose entries have no hooks has no hooks."""
    source, _ = await configured("", Entry(*DEVICES))
    assert source.hooks == frozenset()


@pytest.mark.parametrize(
    ("entries", "advice"),
    [
        ("[{pci: {}}]", "would be every PCI device; give vendor, device, class, driver, address or functions"),
        ("[{usb: {}}]", "would be every USB device; give vendor, product or serial"),
        ('[{pci: {vendor: "808"}}]', "not an id of four hexadecimal digits"),
        ('[{pci: {class: "3"}}]', "not a PCI class"),
        ("[{usb: {vendor: 1027}}]", 'write "1027" in quotes'),
        ("[{nvidia: {profile: 10gb}}]", "not a MIG profile"),
        ("[{nvidia: {}}, {nvidia: {mig: single}}]", "a resource has one nvidia entry"),
        ("[{nvidia: {injection: volume}}]", "is not one of"),
        (
            "[{nvidia: {recovery: nevr}}]",
            "expected a whole number or never, got the text 'nevr'; did you mean 'never'?",
        ),
        ("[{nvidia: {ignore_xids: [x]}}]", "expected a whole number"),
    ],
)
def test_entry_that_cannot_be_meant_is_refused_with_advice(entries: str, advice: str) -> None:
    """A filter that matches everything, invalid ids and unknown words are errors with advice."""
    with pytest.raises(ConfigError) as raised:
        parse(f"resources: [{{name: example.com/a, devices: {entries}}}]")
    assert advice in str(raised.value)
