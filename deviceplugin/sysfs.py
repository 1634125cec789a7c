"""Reads sysfs: values, NUMA nodes, device nodes, and the USB device or PCI function of a device number.

The functions take paths, so that tests can use another directory tree. A missing value gives None, not an error,
because sysfs can change during a read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from deviceplugin import looked_at

ROOT: Final = "/sys"
PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SCSI_DEVICE: Final = re.compile(r"[0-9]+:[0-9]+:[0-9]+:[0-9]+")
_USB_NAME: Final = re.compile(r"usb[0-9]+|[0-9]+-[0-9]+(\.[0-9]+)*")
_COUNTED: Final = re.compile(r"(?<=^sd)[a-z]+|[0-9]+")
"""Matches the part of a name that counts devices in the order of their appearance: 0 in ttyUSB0, b in sdb."""
_PLACES: Final = ("port_number", "index", "partition")
"""Files in sysfs with the fixed number of a component of a device: of a serial adapter's port, of a camera's stream."""


def read(path: str) -> str | None:
    """Return the only line of a file, stripped; None if the file cannot be read."""
    looked_at.at(path)
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(4096).strip()
    except OSError:
        return None


def numa_node(directory: str) -> int | None:
    """Return the NUMA node of the device with this sysfs directory; None if the firmware states none (-1)."""
    text = read(f"{directory}/numa_node")
    return int(text) if text and text.isdecimal() else None


def numa_node_above(directory: str, within: str) -> int | None:
    """Return the NUMA node that a sysfs directory or its nearest ancestor states; None if there is none.

    within: a text that must be in an ancestor's path. Other ancestors are not read.
    """
    while within in directory:
        if (node := numa_node(directory)) is not None:
            return node
        directory = os.path.dirname(directory)
    return None


def link_name(path: str) -> str | None:
    """Return the last element of a symlink's target (a driver's name, a group's number); None if it is no symlink."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def nodes_below(directory: str, dev: str, depth: int = 8) -> Iterator[str]:
    """Yield the device nodes of the device with this sysfs directory, except those of PCI or USB devices below it."""
    for line in (read(f"{directory}/uevent") or "").splitlines():
        key, _, value = line.partition("=")
        if key == "DEVNAME" and value:
            yield os.path.join(dev, value)
    if not depth:
        return
    for name in _directories(directory):
        if name not in {"power", "msi_irqs", "link"} and not (PCI_ADDRESS.fullmatch(name) or _USB_NAME.fullmatch(name)):
            yield from nodes_below(f"{directory}/{name}", dev, depth - 1)


def directory_of(kind: str, number: str, root: str = ROOT) -> str | None:
    """Return the sysfs directory of a device node; None if there is none. kind: char or block. number: major:minor."""
    path = f"{root}/dev/{kind}/{number}"
    looked_at.at(path)
    try:
        return os.path.realpath(path, strict=True)
    except OSError:
        return None


def _around(directory: str) -> Iterator[str]:
    """Yield the sysfs directories in which `HardwareReader.containing` looks for nodes."""
    above = directory
    while not _is_device(above) and (above := os.path.dirname(above)) not in ("/", ""):
        yield above
        classes: list[str] = []
        if above == os.path.dirname(directory) and os.path.basename(above) == "drm":
            classes = [above]
        elif _SCSI_DEVICE.fullmatch(os.path.basename(above)):
            classes = [f"{above}/{name}" for name in _directories(above)]
        for of in classes:
            yield from (f"{of}/{name}" for name in _directories(of))


def device_above(directory: str) -> str | None:
    """Return the directory of the nearest USB device or PCI function at or above this one; None if there is none."""
    while directory not in ("/", ""):
        if _is_device(directory):
            return directory
        directory = os.path.dirname(directory)
    return None


def _is_device(directory: str) -> bool:
    """Return whether a sysfs directory is the one of a USB device or PCI function."""
    return os.path.exists(f"{directory}/idVendor") or bool(PCI_ADDRESS.fullmatch(os.path.basename(directory)))


@dataclass(frozen=True, slots=True)
class HardwarePart:
    """The hardware of a device node.

    devices: the names of the USB device or PCI function; each of the names identifies the hardware. place: the bus, and
    the USB port or PCI slot. part: the component of the hardware to which the device node leads, such as an interface
    or a partition.
    """

    devices: frozenset[str]
    place: str
    part: str


@dataclass(slots=True)
class HardwareReader:
    """Finds the hardware of device numbers.

    A reader lists the USB devices only once, so each scan needs a new reader.
    """

    root: str = ROOT
    _serials: list[tuple[str, ...]] | None = field(default=None, init=False)

    def behind(self, kind: str, number: str) -> HardwarePart | None:
        """Return the hardware of a device node; None if sysfs shows no USB or PCI device for the node. Blocks.

        A USB device's name consists of vendor, product and serial number, and does not depend on the port. If the
        serial number is missing, the name contains the port instead. If another device has the same serial number, the
        name contains the port too.
        """
        directory = directory_of(kind, number, self.root)
        device = device_above(directory) if directory is not None else None
        if directory is None or device is None:
            return None
        port, plugged = os.path.basename(device), _usb(device)
        if plugged is None:
            place = f"pci:{port}"
            return HardwarePart(frozenset({place}), place, _part(device, directory))
        return HardwarePart(self._names(port, plugged), f"usb:{port}", _part(device, directory))

    def containing(self, token: str) -> Iterator[str]:
        """Yield the tokens of device nodes through which a program gets all hardware of another device node. Blocks.

        These are the disk of a partition, the USB device of an interface (Linux, drivers/usb/core/devio.c), the other
        node of a GPU (card0 and renderD128), and the other nodes of a SCSI device (sda and sg0, st0 and nst0).
        The node itself can be among them. token: the node's token, such as `block:8:1`.
        """
        kind, _, number = token.partition(":")
        if (directory := directory_of(kind, number, self.root)) is not None:
            for other in _around(directory):
                if found := read(f"{other}/dev"):
                    kind = "block" if link_name(f"{other}/subsystem") == "block" else "char"
                    yield f"{kind}:{found}"

    def _names(self, port: str, plugged: tuple[str, ...]) -> frozenset[str]:
        vendor, product, serial = (re.sub(r"[^A-Za-z0-9_.-]+", "_", text) for text in plugged)
        name = f"usb:{vendor}:{product}:{serial}"
        if not serial or self._listed().count(plugged) > 1:
            return frozenset({f"{name}@{port}"})
        return frozenset({name, f"{name}@{port}"})

    def _listed(self) -> list[tuple[str, ...]]:
        if self._serials is None:
            buses = f"{self.root}/bus/usb/devices"
            try:
                names = [name for name in os.listdir(buses) if ":" not in name]
            except OSError:
                names = []
            self._serials = [plugged for name in names if (plugged := _usb(f"{buses}/{name}")) is not None]
        return self._serials


def _usb(directory: str) -> tuple[str, ...] | None:
    """Return vendor, product and serial number of the USB device with this sysfs directory; None if there is none."""
    vendor, product, serial = (read(f"{directory}/{name}") or "" for name in ("idVendor", "idProduct", "serial"))
    return (vendor, product, serial) if vendor and product else None


def _part(device: str, directory: str) -> str:
    """Return a text for the component of a device to which a sysfs directory belongs, without the kernel's counters.

    The nodes of a GPU (card0, renderD128) have the same text, and so have those of a SCSI device (sda, sg0; st0, nst0).
    """
    names = [name for name in directory.removeprefix(device).split("/") if name]
    if names[-2:-1] == ["drm"]:
        del names[-1]
    elif len(names) > 2 and _SCSI_DEVICE.fullmatch(names[-3]):
        del names[-2:]
    steps, above = [], device
    for name in names:
        steps.append(_step(above, name))
        above = f"{above}/{name}"
    return "/".join(steps)


def _step(above: str, name: str) -> str:
    """Return a directory's name without the kernel's counters (the 0 in ttyUSB0).

    If a file in the directory has the fixed number of the component (`_PLACES`), append this number. Otherwise, if
    several names in `above` would be equal without counters, return the whole name.
    """
    if name.startswith(f"{os.path.basename(above)}:"):
        return name.partition(":")[2]  # This text is the configuration and the number of a USB interface, such as 1.0.
    plain = _COUNTED.sub("", name)
    for place in _PLACES:
        if (value := read(f"{above}/{name}/{place}")) is not None:
            return f"{plain}-{value}"
    alike = sum(_COUNTED.sub("", other) == plain for other in _directories(above))
    return plain if alike <= 1 else name


def _directories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
