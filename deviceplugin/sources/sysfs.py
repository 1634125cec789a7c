"""What sysfs says of PCI and USB devices, read plainly: values, names, device nodes.

Functions over paths, so that they work on a made tree as on the real one. What is not there is None:
sysfs changes under the reader's hands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

__all__ = ["PCI_IDS", "USB_IDS", "Names", "ids_names", "link_name", "nodes_below", "numa_node", "read", "told"]

PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
PCI_IDS: Final = (
    "/usr/share/misc/pci.ids",
    "/usr/share/hwdata/pci.ids",
    "/usr/share/pci.ids",
    "/var/lib/pciutils/pci.ids",
)
USB_IDS: Final = (
    "/usr/share/misc/usb.ids",
    "/usr/share/hwdata/usb.ids",
    "/usr/share/usb.ids",
    "/var/lib/usbutils/usb.ids",
)
LONGEST_NAME: Final = 64
"""Bytes of an attribute's value."""


def read(path: str) -> str | None:
    """Return a file's one line, stripped; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(4096).strip()
    except OSError:
        return None


def numa_node(directory: str) -> int | None:
    """Return the NUMA node of the device with this sysfs directory; None if the firmware did not say (-1)."""
    text = read(f"{directory}/numa_node")
    return int(text) if text and text.isdecimal() else None


def link_name(path: str) -> str | None:
    """Return the last step of what a symlink leads to: a driver's name, a group's number."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def nodes_below(directory: str, dev: str = "/dev", depth: int = 8) -> list[str]:
    """Return the device nodes that a device's drivers made, of it and of all below it, in order.

    Other PCI devices and USB devices behind it (a bridge, a hub) are devices of their own and left out.
    """
    return sorted(_nodes_below(directory, dev, depth))


def _nodes_below(directory: str, dev: str, depth: int) -> Iterator[str]:
    for line in (read(f"{directory}/uevent") or "").splitlines():
        key, _, value = line.partition("=")
        if key == "DEVNAME" and value:
            yield os.path.join(dev, value)
    if not depth:
        return
    try:
        with os.scandir(directory) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in below:
        if name not in {"power", "msi_irqs", "link"} and not PCI_ADDRESS.fullmatch(name) and not _is_usb(name):
            yield from _nodes_below(f"{directory}/{name}", dev, depth - 1)


def _is_usb(name: str) -> bool:
    return re.fullmatch(r"usb[0-9]+|[0-9]+-[0-9]+(\.[0-9]+)*", name) is not None


class Names:
    """Vendors' and devices' names as pci.ids and usb.ids have them; what is not there has no name."""

    def __init__(self, files: Collection[str]) -> None:
        self._files = files
        self._known: dict[tuple[str, str], tuple[str | None, str | None]] = {}

    def of(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], tuple[str | None, str | None]]:
        """Return (vendor's name, device's name) of pairs of ids, four lower-case digits each; blocks."""
        fresh = {pair for pair in wanted if pair not in self._known}
        if fresh:
            found = next((found for file in self._files if (found := ids_names(file, fresh)) is not None), {})
            self._known.update({pair: found.get(pair, (None, None)) for pair in fresh})
        return {pair: self._known[pair] for pair in wanted}


def ids_names(
    file: str, wanted: Collection[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str | None, str | None]] | None:
    """Read the names of these (vendor, device) out of a file in the form of pci.ids; None if there is no such file.

    A line without a tab is a vendor, one with a tab a device of it, one with two a subsystem; after the
    vendors come other lists, whose lines begin with a capital letter and a space.
    """
    vendors = {vendor for vendor, _ in wanted}
    found: dict[tuple[str, str], tuple[str | None, str | None]] = {}
    vendor, name = "", None
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line[:1] in "#\n":
                    continue
                if line[:1] != "\t":
                    if line[1:2] == " ":
                        break
                    vendor, name = line[:4].lower(), _cut(line[4:])
                    if vendor in vendors:
                        found.update({pair: (name, None) for pair in wanted if pair[0] == vendor})
                elif line[1:2] != "\t" and vendor in vendors and (pair := (vendor, line[1:5].lower())) in wanted:
                    found[pair] = (name, _cut(line[5:]))
    except OSError:
        return None
    return found


def told(wanted: Mapping[str, str | None]) -> str:
    """Return a filter's parts that matter, in words: vendor 8086, class 02."""
    return ", ".join(f"{name} {value}" for name, value in wanted.items() if value is not None) or "anything"


def _cut(name: str) -> str:
    """Return a name as an attribute takes it, 64 bytes at the most."""
    return name.strip().encode()[:LONGEST_NAME].decode(errors="ignore").strip()
