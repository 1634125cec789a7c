"""Defines the base class of the sources for PCI and USB devices, and reads the names of vendors and products."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Final, Generic, TypeVar

import msgspec

from deviceplugin import looked_at, sysfs
from deviceplugin.device import AttributeValue
from deviceplugin.sources.scanned import ScannedSource

_Filter = TypeVar("_Filter", bound=msgspec.Struct)

_PCIE_ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
LONGEST_VALUE: Final = 64
"""Maximum bytes of an attribute's value."""
_NamesById = dict[tuple[str, str], tuple[str | None, str | None]]
"""For each (vendor id, device id), both as four lower-case hex digits: (vendor's name, device's name). An unknown name
is None."""


class SysfsSource(ScannedSource, Generic[_Filter]):
    """Lists those devices of one bus (PCI or USB) that match a filter.

    wanted: the filter; a field with None allows any value. sysfs_root, dev: the directories of sysfs and of device
    nodes. ids: paths of files with the names of vendors and products; the first existing file is used. permissions,
    resource, rescan: see `ScannedSource`.
    """

    BUS: ClassVar[str]
    IDS: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        wanted: _Filter,
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs_root: str = "/sys",
        dev: str = "/dev",
        ids: Collection[str] | None = None,
        rescan: float = 10.0,
    ) -> None:
        super().__init__(permissions, resource, rescan)
        self.wanted = wanted
        self.root = f"{sysfs_root}/bus/{self.BUS}/devices"
        self.dev = dev
        self._ids_files = self.IDS if ids is None else ids
        self._known: _NamesById = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wanted})"

    def _names(self, wanted: Collection[tuple[str, str]]) -> _NamesById:
        """Return the names for each pair (vendor id, device id) of `wanted` and of earlier calls.

        The file of names is read only if `wanted` has a pair that no earlier call had.
        """
        if fresh := set(wanted) - self._known.keys():
            self._known |= dict.fromkeys(fresh, (None, None))
            self._known |= next(
                (names for file in self._ids_files if (names := ids_names(file, fresh)) is not None), {}
            )
        return self._known


def missing(nodes: Iterable[str], maker: str = "udev") -> str:
    """Return a message about the first of these device nodes that does not exist; "" if all exist. Blocks.

    maker: the program that should create the nodes, for the message.
    """
    for node in nodes:
        looked_at.at(node)
        if not os.path.exists(node):
            return f"{node} is not there, and its container needs it; {maker} makes it"
    return ""


def ids_files(bus: str, package: str) -> tuple[str, ...]:
    """Return the paths at which distributions install the names of a bus's vendors and products.

    package: the package with the program that updates the names; the updated file is in /var/lib/<package>.
    """
    directories = ("/usr/share/misc", "/usr/share/hwdata", "/usr/share", f"/var/lib/{package}")
    return tuple(f"{directory}/{bus}.ids" for directory in directories)


def hex_digits(text: str | None) -> str | None:
    """Convert hexadecimal digits to the form in sysfs: lower case, without 0x."""
    return text.lower().removeprefix("0x") if text is not None else None


def pcie_root(directory: str) -> str | None:
    """Return the PCIe root complex, such as pci0000:3a, of the device with this sysfs directory; None if unknown."""
    return next(filter(_PCIE_ROOT.fullmatch, directory.split("/")), None)


def pci_address(directory: str) -> str | None:
    """Return the PCI address of the device with this sysfs directory, or of the nearest PCI function above it."""
    return next(filter(sysfs.PCI_ADDRESS.fullmatch, reversed(directory.split("/"))), None)


def given(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Return a copy of a mapping of attributes without those whose value is None."""
    return {name: value for name, value in attributes.items() if value is not None}


def ids_names(file: str, wanted: Collection[tuple[str, str]]) -> _NamesById | None:
    """Read the names for these pairs (vendor id, device id) from a file like pci.ids; None if it cannot be read.

    In such a file, a line without a tab is a vendor, a line with one tab is a device of this vendor, and a line with
    two tabs is a subsystem. After the vendors, the file has other lists, whose lines begin with a capital letter and a
    space. These are not read.
    """
    vendors = {vendor for vendor, _ in wanted}
    names: _NamesById = {}
    vendor, name = "", None
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line[:1] in "#\n":
                    continue
                if line[:1] != "\t":
                    if line[1:2] == " ":
                        break
                    vendor, name = line[:4].lower(), attribute_text(line[4:])
                    if vendor in vendors:
                        names.update({pair: (name, None) for pair in wanted if pair[0] == vendor})
                elif line[1:2] != "\t" and vendor in vendors and (pair := (vendor, line[1:5].lower())) in wanted:
                    names[pair] = (name, attribute_text(line[5:]))
    except OSError:
        return None
    return names


def in_words(wanted: msgspec.Struct) -> str:
    """Return a filter as text for messages, with the keys of the config file: vendor 8086, class 02."""
    fields = [(field, getattr(wanted, field.name)) for field in msgspec.structs.fields(wanted)]
    return ", ".join(f"{field.encode_name} {value}" for field, value in fields if value != field.default) or "anything"


def attribute_text(text: str) -> str | None:
    """Return a text, shortened to the 64 bytes that an attribute's value may have; None for an empty text."""
    return text.strip().encode()[:LONGEST_VALUE].decode(errors="ignore").strip() or None
