"""USB devices, by what sysfs says of them: vendor, product, serial number.

What a container gets: the device's own node, /dev/bus/usb/001/004, and the nodes that its drivers made
(/dev/ttyUSB0, /dev/video0). A device that is pulled and plugged in again gets another number, not
another id: the id is made of vendor, product and serial number, or of the port where there is no
serial number, or where two devices claim the same. Of these the one that was found first keeps its id
as long as it is plugged in, for a pod may have it: under another name it would be given away twice.
(Of two that are there when an agent starts nobody knows which was first, and both are called by their
ports.)

Plugging makes nodes come and go under /dev/bus/usb, which is watched; sysfs itself makes no events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from deviceplugin import filewatch, hooks
from deviceplugin.device import AttributeValue, Device, DeviceNode
from deviceplugin.naming import PCIE_ROOT
from deviceplugin.source import DeviceSource
from deviceplugin.sources import sysfs
from deviceplugin.sources.path import LONGEST_ID

__all__ = ["UsbFilter", "UsbSource"]

_LOG: Final = logging.getLogger(__name__)
RESCAN: Final = 10.0
SCAN_TIMEOUT: Final = 60.0
SETTLE: Final = 0.1
"""Seconds from a node's coming to a look: sysfs has the device first, its drivers make their nodes after."""
_HUB: Final = "09"
_ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class UsbFilter:
    """Which USB devices; what is None does not matter.

    vendor, product: four hexadecimal digits, with or without 0x. serial: a pattern as in a shell.
    """

    vendor: str | None = None
    product: str | None = None
    serial: str | None = None

    @property
    def text(self) -> str:
        """What is wanted, as a config file says it."""
        return sysfs.told({"vendor": self.vendor, "product": self.product, "serial": self.serial})


class UsbSource(DeviceSource):
    """The USB devices that a filter lets through, hubs left out.

    Args:
        wanted: which ones.
        permissions: what a container may do with their nodes, of r, w and m.
        resource: the resource's name, where the source is used by itself.
        sysfs_root, dev: where sysfs and the device nodes are.
        ids: files with the names of vendors and products, the first that is there counts.
        rescan: seconds after which is looked again without any hint.

    """

    def __init__(
        self,
        wanted: UsbFilter,
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs_root: str = "/sys",
        dev: str = "/dev",
        ids: Collection[str] = sysfs.USB_IDS,
        rescan: float = RESCAN,
    ) -> None:
        if resource:
            self.resource = resource
        self.wanted = wanted
        self.permissions = permissions
        self.notes: tuple[str, ...] = ()
        self._vendor = _hex(wanted.vendor)
        self._product = _hex(wanted.product)
        self._root = f"{sysfs_root}/bus/usb/devices"
        self._dev = dev
        self._names = sysfs.Names(ids)
        self._given: dict[_Plugged, str] = {}
        self._rescan = rescan

    def __repr__(self) -> str:
        return f"UsbSource({self.wanted})"

    def look(self) -> list[Device]:
        """Return the devices that are there now; blocks."""
        try:
            ports = sorted(os.listdir(self._root))
        except FileNotFoundError:
            ports = []  # no USB at all, until a controller is plugged in
        except OSError as error:
            self.notes = (f"{self._root} cannot be read: {error.strerror}",)
            return []
        there = [one for port in ports if ":" not in port and (one := self._read(port)) is not None]
        found = [one for one in there if self._fits(one)]
        self.notes = (
            () if found else (f"none of {len(there)} USB devices has {self.wanted.text}; plugged in later it is found",)
        )
        names = self._names.of({(one.vendor, one.product) for one in found})
        self._given = _given(there, self._given)
        return [self._made(one, self._given[one.plugged], *names[one.vendor, one.product]) for one in found]

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices now and whenever one is plugged in or pulled."""
        listed: list[Device] | None = None
        told: tuple[str, ...] = ()
        buses = f"{self._dev}/bus/usb"
        with filewatch.shared().watch([buses]) as watch:
            watched: list[str] = []
            while True:
                directories = await asyncio.to_thread(_directories, buses)
                if directories != watched:
                    watched = directories
                    watch.set([self._dev, *directories])
                devices = await hooks.call("looking for USB devices", self.look, timeout=SCAN_TIMEOUT)
                if self.notes != told:
                    told = self.notes
                    for note in told:
                        _LOG.info("%s", note)
                if devices != listed:
                    listed = devices
                    yield listed
                if await asyncio.to_thread(_directories, buses) != watched:
                    continue
                if await watch.wait(self._rescan * random.uniform(0.8, 1.2)):  # noqa: S311  # no secret
                    await asyncio.sleep(SETTLE)

    def _read(self, port: str) -> _Usb | None:
        directory = os.path.realpath(f"{self._root}/{port}")
        values = {
            name: sysfs.read(f"{directory}/{name}")
            for name in (
                "idVendor",
                "idProduct",
                "busnum",
                "devnum",
                "bDeviceClass",
                "serial",
                "product",
                "manufacturer",
            )
        }
        vendor, product, bus, number = (values[name] for name in ("idVendor", "idProduct", "busnum", "devnum"))
        if not (vendor and product and bus and number) or values["bDeviceClass"] == _HUB:
            return None
        if not (bus.isdecimal() and number.isdecimal()):
            return None
        node = f"{self._dev}/bus/usb/{int(bus):03}/{int(number):03}"
        return _Usb(
            port, directory, node, vendor.lower(), product.lower(), values["serial"] or "",
            values["manufacturer"] or "", values["product"] or "",
        )  # fmt: skip

    def _fits(self, one: _Usb) -> bool:
        return (
            self._vendor in (None, one.vendor)
            and self._product in (None, one.product)
            and (self.wanted.serial is None or fnmatchcase(one.serial, self.wanted.serial))
        )

    def _made(self, one: _Usb, name: str, vendor_name: str | None, product_name: str | None) -> Device:
        root = next((step for step in one.directory.split("/") if _ROOT.fullmatch(step)), None)
        attributes: dict[str, AttributeValue | None] = {
            PCIE_ROOT: root,
            "vendor": one.vendor,
            "productID": one.product,
            "serial": _text(one.serial),
            "port": one.port,
            "vendorName": vendor_name or _text(one.maker),
            "product": product_name or _text(one.name),
        }
        nodes = dict.fromkeys([one.node, *sysfs.nodes_below(one.directory, self._dev)])
        return Device(
            name,
            nodes=[DeviceNode(node, permissions=self.permissions) for node in nodes],
            numa=_numa(one.directory),
            attributes={key: value for key, value in attributes.items() if value is not None},
        )


_Plugged = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class _Usb:
    """A USB device as sysfs has it."""

    port: str
    directory: str
    node: str
    vendor: str
    product: str
    serial: str
    maker: str
    name: str

    @property
    def plugged(self) -> _Plugged:
        """What stays as long as it is plugged in; a string that cannot be read for once is not among it."""
        return self.port, self.node, self.vendor, self.product


def _given(there: Collection[_Usb], before: Mapping[_Plugged, str]) -> dict[_Plugged, str]:
    """Return the devices' ids; one that was there before keeps its own."""
    given = {one.plugged: before[one.plugged] for one in there if one.plugged in before}
    taken = set(given.values())
    plain = Counter(_plain_id(one) for one in there)
    for one in there:
        if one.plugged not in given:
            name = _plain_id(one)
            if plain[name] > 1 or name in taken:
                name = _port_id(one)
            if name in taken:  # as another one's serial number
                name += f"-{one.node[-3:]}"
            given[one.plugged] = name
            taken.add(name)
    return given


def _plain_id(one: _Usb) -> str:
    """Return the id that a device has if no other one has the same."""
    serial = re.sub(r"[^A-Za-z0-9_.]+", "-", one.serial).strip("-")
    name = f"{one.vendor}-{one.product}-{serial}"
    # A serial number that is too long, or says nothing, does not tell devices apart.
    return name if serial and len(name) <= LONGEST_ID else _port_id(one)


def _port_id(one: _Usb) -> str:
    return f"{one.vendor}-{one.product}-port-{one.port}"


def _numa(directory: str) -> int | None:
    """Return the NUMA node of the controller that a device hangs on."""
    while "/pci" in directory:
        node = sysfs.numa_node(directory)
        if node is not None:
            return node
        directory = os.path.dirname(directory)
    return None


def _directories(buses: str) -> list[str]:
    """Return the directories in which the devices' nodes come and go."""
    try:
        with os.scandir(buses) as entries:
            return [buses, *sorted(entry.path for entry in entries if entry.is_dir())]
    except OSError:
        return [buses]


def _text(text: str) -> str | None:
    """Return a device's own words as an attribute takes them; None if there are none."""
    return text.encode()[: sysfs.LONGEST_NAME].decode(errors="ignore").strip() or None


def _hex(text: str | None) -> str | None:
    return text.lower().removeprefix("0x") if text is not None else None
