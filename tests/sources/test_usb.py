"""USB devices of made sysfs trees, plugged in and pulled, and of this machine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import config, naming, sources
from deviceplugin.config.types import UsbConfig
from deviceplugin.device import Device
from deviceplugin.naming import PCIE_ROOT
from deviceplugin.sources.usb import UsbSource
from tests.sources.trees import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def usb(tree: Tree, *, rescan: float = 3600, ids: Sequence[str] = (), **wanted: Any) -> UsbSource:
    return UsbSource(UsbConfig(**wanted), rescan=rescan, ids=ids, **tree.options)


def found(tree: Tree, **wanted: Any) -> dict[str, Device]:
    return {device.id: device for device in usb(tree, **wanted).scan()}


def hosts(device: Device) -> list[str]:
    return [node.host for node in device.container_edits.device_nodes]


def test_device_is_described_by_its_ids_serial_number_and_names(tree: Tree, tmp_path: Path) -> None:
    """A device has vendor, product, serial number, port, root and NUMA node, and names from usb.ids."""
    (tmp_path / "usb.ids").write_text("0403  Future Technology Devices\n\t6001  FT232 Serial\n")
    tree.pci("0000:00:14.0", numa=1)
    tree.usb("1-2.1", 4, serial="A50285BI", name="own name", maker="own maker")
    device = found(tree, ids=[str(tmp_path / "usb.ids")])["0403-6001-A50285BI"]
    assert device.numa == 1
    assert dict(device.attributes) == {
        PCIE_ROOT: "pci0000:00",
        "controller": "0000:00:14.0",
        "vendor": "0403",
        "productID": "6001",
        "serial": "A50285BI",
        "port": "1-2.1",
        "vendorName": "Future Technology Devices",
        "product": "FT232 Serial",
    }
    assert not list(naming.problems(device, "usb.example.com"))


def test_names_are_the_devices_own_where_no_file_has_them(tree: Tree) -> None:
    """Without usb.ids the device's own strings are its names."""
    tree.usb("1-1", 2, serial="1", name="Stick", maker="Maker")
    attributes = found(tree)["0403-6001-1"].attributes
    assert (attributes["vendorName"], attributes["product"]) == ("Maker", "Stick")


def test_container_gets_the_bus_node_and_what_drivers_made(tree: Tree) -> None:
    """A container gets the device's bus node and the nodes of its interfaces, not those of devices behind it."""
    device = tree.usb("1-1", 2, serial="1")
    tree.node(device, "1-1:1.0/ttyUSB0/tty/ttyUSB0", "ttyUSB0")
    tree.node(device, "1-1.4/1-1.4:1.0/video4linux/video0", "video0")
    assert hosts(found(tree)["0403-6001-1"]) == [f"{tree.dev}/bus/usb/001/002", f"{tree.dev}/ttyUSB0"]


def test_hubs_are_no_devices(tree: Tree) -> None:
    """Hubs, root hubs and interfaces are not listed."""
    tree.usb("1-1", 2, serial="1", class_="09")
    tree.usb("1-1:1.0", 3, serial="2")
    tree.usb("1-1.1", 4, serial="3")
    assert set(found(tree)) == {"0403-6001-3"}


def test_device_that_goes_while_it_is_read_is_left_out(tree: Tree) -> None:
    """A device that is pulled while sysfs is read, or that lacks a file in sysfs, is left out."""
    tree.usb("1-1", 2, serial="1")
    (tree.sys / "bus/usb/devices/1-2").symlink_to(tree.sys / "devices/gone")
    for port, name in enumerate(("idVendor", "idProduct", "busnum", "devnum"), 3):
        (tree.usb(f"1-{port}", port, serial=str(port)) / name).unlink()
    (tree.usb("1-7", 7, serial="7") / "devnum").write_text("x\n")
    assert set(found(tree)) == {"0403-6001-1"}


def test_filter_takes_what_fits_in_all(tree: Tree) -> None:
    """A device must fit vendor, product and the serial number's pattern."""
    tree.usb("1-1", 2, "0403", "6001", "A1")
    tree.usb("1-2", 3, "0403", "6010", "A2")
    tree.usb("1-3", 4, "1a86", "7523", "B1")
    assert set(found(tree, vendor="0x0403")) == {"0403-6001-A1", "0403-6010-A2"}
    assert set(found(tree, vendor="1A86", product="7523")) == {"1a86-7523-B1"}
    assert set(found(tree, serial="A*")) == {"0403-6001-A1", "0403-6010-A2"}


def test_devices_that_no_serial_number_tells_apart_are_named_by_their_port(tree: Tree) -> None:
    """A device without a serial number, or with that of another device, has an id with its port."""
    tree.usb("1-1", 2)
    tree.usb("1-2", 3, serial="0001")
    tree.usb("1-3", 4, serial="0001")
    assert set(found(tree)) == {f"0403-6001-port-1-{port}" for port in range(1, 4)}


def test_serial_number_may_be_anything(tree: Tree) -> None:
    """In ids with serial numbers, invalid characters are replaced; attributes are cut to the allowed length."""
    tree.usb("1-1", 2, serial="AB /\u00e9 \u20ac 1", name="\u00e9" * 50)
    (device,) = found(tree).values()
    assert device.id == "0403-6001-AB-1"
    assert not list(naming.problems(device, "usb.example.com"))


async def test_plugging_in_and_pulling_are_seen_by_their_events(tree: Tree) -> None:
    """Kernel events change the list when devices are plugged in or pulled; one that returns has its former id."""
    tree.usb("1-1", 2, serial="1")
    async with asyncio.timeout(20), aclosing(cast("Any", usb(tree).watch())) as lists:
        assert [device.id for device in await anext(lists)] == ["0403-6001-1"]
        tree.usb("2-1", 2, serial="2")  # a device on a new bus
        assert [device.id for device in await anext(lists)] == ["0403-6001-1", "0403-6001-2"]
        tree.pull("1-1")
        assert [device.id for device in await anext(lists)] == ["0403-6001-2"]
        shutil.rmtree(tree.sys / "devices/pci0000:00/0000:00:14.0/usb1/1-1")
        tree.usb("1-1", 9, serial="1")
        devices = {device.id: device for device in await anext(lists)}
        assert hosts(devices["0403-6001-1"]) == [f"{tree.dev}/bus/usb/001/009"]


def test_device_keeps_its_id_when_another_one_with_its_serial_number_comes(tree: Tree) -> None:
    """A device keeps its id while others with its serial number or port name come and go."""
    source = usb(tree)

    def listed() -> dict[str, str]:
        return {device.id: hosts(device)[0][-3:] for device in source.scan()}

    tree.usb("1-2", 2, serial="00000001")
    assert listed() == {"0403-6001-00000001": "002"}
    tree.usb("1-1", 3, serial="00000001")
    assert listed() == {"0403-6001-00000001": "002", "0403-6001-port-1-1": "003"}
    (tree.sys / "bus/usb/devices/1-2/serial").rename(tree.sys / "serial")  # the serial number is unreadable
    assert listed() == {"0403-6001-00000001": "002", "0403-6001-port-1-1": "003"}
    tree.pull("1-2")
    assert listed() == {"0403-6001-port-1-1": "003"}
    tree.usb("1-3", 4, serial="port-1-1")
    assert listed() == {"0403-6001-port-1-1": "003", "0403-6001-port-1-3": "004"}


def test_long_serial_number_is_part_of_the_id(tree: Tree) -> None:
    """A long serial number is shortened with a hash in the id; the id does not depend on the port."""
    tree.usb("1-1", 2, serial="A" * 60 + "1")
    tree.usb("1-2", 3, serial="A" * 60 + "2")
    first = {device.id for device in usb(tree).scan()}
    assert all(name.startswith("0403-6001-AAAA") and len(name) <= 52 for name in first)
    assert {name.split("-")[-2][-1] for name in first} == {"1", "2"}
    tree.pull("1-1")
    tree.usb("1-3", 4, serial="A" * 60 + "1")
    assert {device.id for device in usb(tree).scan()} == first


def test_serial_number_that_reads_like_a_port_takes_no_other_devices_id(tree: Tree) -> None:
    """Two devices have different ids also if one's serial number looks like the other's port."""
    source = usb(tree)
    tree.usb("1-2", 2, serial="port-1-1")
    assert [device.id for device in source.scan()] == ["0403-6001-port-1-1"]
    tree.usb("1-1", 3)
    assert {device.id for device in source.scan()} == {"0403-6001-port-1-1", "0403-6001-port-1-1-003"}


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["", "A", "B", "C"])), max_size=30))
def test_any_row_of_plugging_and_pulling_leaves_what_is_plugged_in(steps: list[tuple[int, str]]) -> None:
    """After any steps there is one device for each occupied port, with its last number and its first id.

    The id has the serial number if that was unique when the device came, else the port.
    """
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        source = usb(tree)
        there: dict[int, tuple[str, str, int]] = {}
        for number, (port, serial) in enumerate(steps, 2):
            if port in there:
                tree.pull(f"1-{port}")
                shutil.rmtree(tree.sys / f"devices/pci0000:00/0000:00:14.0/usb1/1-{port}")
                del there[port]
            else:
                tree.usb(f"1-{port}", number, serial=serial)
                apart = serial and all(serial != other for _, other, _ in there.values())
                there[port] = f"0403-6001-{serial}" if apart else f"0403-6001-port-1-{port}", serial, number
            expected = {name: number for name, _, number in there.values()}
            assert {device.id: int(hosts(device)[0][-3:]) for device in source.scan()} == expected


async def test_first_device_on_a_machine_without_usb_is_seen(tmp_path: Path) -> None:
    """Without USB in sysfs and /dev there is a note; a device of a later controller is listed."""
    tree = Tree(tmp_path)
    (tree.sys / "bus/usb/devices").rmdir()
    source = usb(tree, vendor="0403")
    async with asyncio.timeout(20), aclosing(cast("Any", source.watch())) as lists:
        assert await anext(lists) == []
        assert source.notes == ("none of 0 USB devices has vendor 0403; plugged in later it is found",)
        (tree.sys / "bus/usb/devices").mkdir()
        tree.usb("1-1", 2, serial="1")
        assert [device.id for device in await anext(lists)] == ["0403-6001-1"]


async def test_entry_of_the_config_file_gives_usb_devices(tree: Tree) -> None:
    """A resource with `usb:`, include and replicas by name lists the devices."""
    for number in (1, 2, 3):
        tree.usb(f"1-{number}", number + 1, serial=f"A{number}", name="Coral Accelerator" if number == 1 else "")
    text = """
        resources:
        - name: example.com/tpu
          devices: [{usb: {vendor: "0403"}}]
          include: ["*-A1", "*/bus/usb/001/003"]
          sharing: {replicas: {coral: 4, "*-A?": 2}}
    """
    source = sources.ConfiguredSource(config.parse(text).resources[0])
    entry = source.entries[0]
    assert isinstance(entry, UsbSource)
    entry.root, entry.dev = f"{tree.sys}/bus/usb/devices", str(tree.dev)
    async with asyncio.timeout(20), aclosing(cast("Any", source.watch())) as lists:
        devices = await anext(lists)
        assert {device.id: source.replicas_of(device) for device in devices} == {"0403-6001-A1": 4, "0403-6001-A2": 2}
        assert source.replicas == 4


def test_devices_of_this_machine_can_be_published() -> None:
    """The USB devices of this machine can be read and published."""
    for device in UsbSource(UsbConfig()).scan():
        assert not list(naming.problems(device, "usb.example.com"))


def test_a_device_that_changes_its_ids_is_one_device_of_its_port(tree: Tree) -> None:
    """A device that returns at its port with other ids keeps its id and identity if the source has all its ids."""
    ids = UsbConfig(vendor="1a6e", product="089a"), UsbConfig(vendor="18d1")
    source = UsbSource(*ids, ids=[], **tree.options)
    first = tree.usb("1-2", 4, "1a6e", "089a")
    tree.usb("1-3", 7, "18d1", "9302")
    tree.usb("1-4", 8, "18d2", "9302")
    before = {device.id: device for device in source.scan()}
    assert before.keys() == {"port-1-2", "port-1-3"}
    tree.pull("1-2")
    shutil.rmtree(first)
    tree.usb("1-2", 5, "18d1", "9302")
    after = {device.id: device for device in source.scan()}
    assert after.keys() == before.keys()
    assert before["port-1-2"].identity == after["port-1-2"].identity != after["port-1-3"].identity
    assert hosts(after["port-1-2"]) == [f"{tree.dev}/bus/usb/001/005"]


def test_what_is_looked_for_is_named(tree: Tree) -> None:
    """The note about devices that are not found names all wanted ids."""
    source = UsbSource(UsbConfig(vendor="1a6e"), UsbConfig(product="9302"), **tree.options)
    assert source.scan() == []
    assert source.notes == ("none of 0 USB devices has vendor 1a6e or product 9302; plugged in later it is found",)
