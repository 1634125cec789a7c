"""The hardware behind a device number, as sysfs shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.sysfs import HardwarePart, HardwareReader
from tests.sources.trees import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def behind(tree: Tree, number: str, kind: str = "char") -> HardwarePart | None:
    return HardwareReader(str(tree.sys)).behind(kind, number)


def test_a_usb_device_is_known_by_its_serial_number_wherever_it_is_plugged_in(tree: Tree) -> None:
    """A USB device keeps the name with its serial number, and its `part`, at another port and with another number."""
    tree.number("188:0", tree.usb("1-2", 4, serial="A5"), "1-2:1.0/ttyUSB0/tty/ttyUSB0")
    before = behind(tree, "188:0")
    tree.pull("1-2")
    tree.number("188:1", tree.usb("1-3", 5, serial="A5"), "1-3:1.0/ttyUSB1/tty/ttyUSB1")
    after = behind(tree, "188:1")
    assert before is not None
    assert after is not None
    assert before.devices == {"usb:0403:6001:A5", "usb:0403:6001:A5@1-2"}
    assert before.devices & after.devices == {"usb:0403:6001:A5"}
    assert before.part == after.part == "1.0/ttyUSB/tty/ttyUSB"


@pytest.mark.parametrize("serial", ["", "0001"])
def test_usb_devices_without_a_serial_number_of_their_own_are_told_apart_by_the_port(tree: Tree, serial: str) -> None:
    """Two devices without a serial number, or with the same one, have no name in common: their names have the port."""
    for number, port in ((0, "1-2"), (1, "1-3")):
        tree.number(
            f"188:{number}", tree.usb(port, 4 + number, serial=serial), f"{port}:1.0/ttyUSB{number}/tty/ttyUSB{number}"
        )
    names = [found.devices for number in (0, 1) if (found := behind(tree, f"188:{number}")) is not None]
    assert names == [{f"usb:0403:6001:{serial}@1-2"}, {f"usb:0403:6001:{serial}@1-3"}]


@pytest.mark.parametrize(
    ("below", "part"),
    [
        ("", ""),
        ("1-2:1.0/tty/ttyACM7", "1.0/tty/ttyACM"),
        ("1-2:1.2/sound/card3/pcmC3D0c", "1.2/sound/card/pcmCDc"),
        ("1-2:1.0/host4/target4:0:0/4:0:0:0/block/sdc", "1.0/host/target::/:::"),
        ("1-2:1.0/0003:046D:C52B.0005/hidraw/hidraw3", "1.0/:D:CB./hidraw/hidraw"),
    ],
)
def test_a_part_has_no_number_that_the_kernel_counts_up(tree: Tree, below: str, part: str) -> None:
    """`part` has the numbers of USB interfaces, which are the device's own, and none that the kernel assigns."""
    tree.number("240:1", tree.usb("1-2", 4, serial="A5"), below)
    found = behind(tree, "240:1")
    assert found is not None
    assert found.part == part


def test_parts_of_a_device_are_told_apart(tree: Tree) -> None:
    """Parts of a device differ by the number that the driver gives each part for good, else by their names in sysfs."""
    usb = tree.usb("1-2", 4, serial="A5")
    for number in (0, 1):
        tree.number(f"188:{number}", usb, f"1-2:1.0/ttyUSB{number}/tty/ttyUSB{number}")
        (usb / f"1-2:1.0/ttyUSB{number}/port_number").write_text(f"{number}\n")
        tree.number(f"81:{number}", usb, f"1-2:1.2/video4linux/video{number + 2}")
        (usb / f"1-2:1.2/video4linux/video{number + 2}/index").write_text(f"{number}\n")
        tree.number(f"13:{number}", usb, f"1-2:1.3/input/input{number + 6}/event{number + 3}")
    parts = [found.part for major in (188, 81, 13) for n in (0, 1) if (found := behind(tree, f"{major}:{n}"))]
    assert parts == [
        "1.0/ttyUSB-0/tty/ttyUSB",
        "1.0/ttyUSB-1/tty/ttyUSB",
        "1.2/videolinux/video-0",
        "1.2/videolinux/video-1",
        "1.3/input/input6/event",
        "1.3/input/input7/event",
    ]


def test_a_pci_function_is_known_by_its_address(tree: Tree) -> None:
    """A node's hardware is the nearest PCI function or USB device; block devices have numbers of their own.

    The two nodes of a GPU have the same hardware.
    """
    gpu = tree.pci("0000:01:00.0")
    tree.number("226:128", gpu, "drm/renderD128")
    tree.number("226:0", gpu, "drm/card0")
    disk = tree.pci("0000:02:00.0")
    tree.number("259:0", disk, "nvme/nvme0/nvme0n1", kind="block")
    assert behind(tree, "226:128") == HardwarePart(frozenset({"pci:0000:01:00.0"}), "pci:0000:01:00.0", "drm")
    assert behind(tree, "226:0") == HardwarePart(frozenset({"pci:0000:01:00.0"}), "pci:0000:01:00.0", "drm")
    assert behind(tree, "259:0", "block") == HardwarePart(
        frozenset({"pci:0000:02:00.0"}), "pci:0000:02:00.0", "nvme/nvme/nvmen"
    )
    assert behind(tree, "259:0") is None


def numbered(tree: Tree, kind: str, directory: Path, numbers: dict[str, str]) -> None:
    """Give directories below `directory` these device numbers, as the kernel does. numbers: for a number, the path."""
    for number, below in numbers.items():
        tree.number(number, directory, below, kind)
        (directory / below / "dev").write_text(f"{number}\n")
        if kind == "block":
            (tree.sys / "class/block").mkdir(parents=True, exist_ok=True)
            (directory / below / "subsystem").symlink_to(tree.sys / "class/block")


def test_a_node_is_contained_in_the_nodes_that_give_all_of_it(tree: Tree) -> None:
    """A disk contains its partitions, and a USB device its interfaces; the nodes of a GPU contain each other.

    So do the nodes of a SCSI device. The parts of a device do not contain each other, and a hub not its devices.
    """
    usb = tree.usb("1-2", 4, serial="A5")
    numbered(tree, "char", usb.parent, {"189:0": ""})
    numbered(tree, "char", usb, {"189:3": ""} | {f"188:{n}": f"1-2:1.{n}/ttyUSB{n}/tty/ttyUSB{n}" for n in (0, 1)})
    numbered(tree, "char", tree.pci("0000:01:00.0"), {"226:0": "drm/card0", "226:128": "drm/renderD128"})
    unit = tree.pci("0000:02:00.0") / "host0/target0:0:0/0:0:0:0"
    numbered(tree, "char", unit, {"21:0": "scsi_generic/sg0"})
    numbered(tree, "block", unit, {"8:0": "block/sda", "8:1": "block/sda/sda1", "8:2": "block/sda/sda2"})
    loop = tree.sys / "devices/virtual/block"
    numbered(tree, "block", loop, {"7:0": "loop0", "259:9": "loop0/loop0p1"})
    expected = {
        "char:189:3": [],
        "char:188:0": ["char:189:3"],
        "char:226:0": ["char:226:0", "char:226:128"],
        "char:226:128": ["char:226:0", "char:226:128"],
        "block:8:0": ["block:8:0", "char:21:0"],
        "block:8:2": ["block:8:0", "block:8:0", "char:21:0"],
        "char:21:0": ["block:8:0", "char:21:0"],
        "block:259:9": ["block:7:0"],
    }
    found = {token: sorted(HardwareReader(str(tree.sys)).containing(token)) for token in expected}
    assert found == expected
    assert list(HardwareReader(str(tree.sys)).containing("char:1:1")) == []


def test_a_node_without_a_bus_has_no_hardware(tree: Tree) -> None:
    """A node that is on no bus, such as /dev/kvm, and a number that sysfs does not have, have no hardware."""
    tree.number("10:232", tree.sys / "devices/virtual/misc", "kvm")
    assert behind(tree, "10:232") is None
    assert behind(tree, "10:233") is None
