"""Defines the source of USB devices, which selects them by properties in sysfs: vendor, product, serial number.

A container gets the USB device's own node (/dev/bus/usb/001/004) and the nodes of its kernel drivers (/dev/ttyUSB0).
When a device is plugged in again, its device number changes, but its id stays, because the id consists of vendor,
product and serial number. If the serial number is missing, the id contains the port instead. If a second device with
the same serial number is plugged in, only the id of the second device contains the port. The first device keeps its id,
because a pod may hold the device, and under a new id it could be allocated again. If both devices exist when the agent
starts, both ids contain the port.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from deviceplugin import identity, looked_at, sysfs
from deviceplugin.config.types import UsbConfig
from deviceplugin.device import Device, DeviceNode, Health
from deviceplugin.naming import PCIE_ROOT
from deviceplugin.sources import bus
from deviceplugin.sources.path import LONGEST_ID, digest, plain_text, shortened
from deviceplugin.sources.scanned import Scan

_HUB: Final = "09"
_Plugged = tuple[str, str, str, str]
"""The port, node, vendor and product of a device, which do not change while the device is plugged in."""


@dataclass(frozen=True, slots=True)
class _Usb:
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
        # The serial number is left out, because a read of it sometimes fails.
        return self.port, self.node, self.vendor, self.product


class UsbSource(bus.SysfsSource[UsbConfig]):
    """Lists the USB devices, except hubs, that match a filter.

    wanted: the filter. Give several filters for a device that changes its vendor or product id. All devices that appear
    in one port are then treated as the same device, and the port is this device's id and identity. options: further
    arguments, passed to `SysfsSource`.
    """

    BUS = "usb"
    IDS = bus.ids_files("usb", "usbutils")
    DEBOUNCE = 0.1

    _ids: Mapping[_Plugged, str] = MappingProxyType({})

    def __init__(self, *wanted: UsbConfig, **options: Any) -> None:
        super().__init__(wanted[0], **options)
        self._filters = wanted

    def _scan(self) -> Scan:
        buses = f"{self.dev}/bus/usb"
        directories = {self.dev, buses, *map(str, Path(buses).glob("*/"))}
        looked_at.at(self.root)
        try:
            ports = sorted(os.listdir(self.root))
        except FileNotFoundError:
            ports = []  # A node without a USB controller has no directory of USB devices.
        except OSError as error:
            return Scan([], directories, [f"{self.root} cannot be read: {error.strerror}"])
        there = [device for port in ports if ":" not in port and (device := self._read(port)) is not None]
        fitting = [usb for usb in there if self._fits(usb)]
        wanted = " or ".join(map(bus.in_words, self._filters))
        notes = [] if fitting else [f"none of {len(there)} USB devices has {wanted}; plugged in later it is found"]
        names = self._names({(usb.vendor, usb.product) for usb in fitting})
        self._ids = _ids(there, self._ids)
        return Scan([self._device(usb, *names[usb.vendor, usb.product]) for usb in fitting], directories, notes)

    def _read(self, port: str) -> _Usb | None:
        directory = os.path.realpath(f"{self.root}/{port}")
        names = ("idVendor", "idProduct", "busnum", "devnum", "serial", "manufacturer", "product", "bDeviceClass")
        vendor, product, busnum, number, serial, maker, name, class_ = (
            sysfs.read(f"{directory}/{name}") or "" for name in names
        )
        if not (vendor and product and busnum.isdecimal() and number.isdecimal()) or class_ == _HUB:
            return None
        node = f"{self.dev}/bus/usb/{int(busnum):03}/{int(number):03}"
        return _Usb(port, directory, node, vendor.lower(), product.lower(), serial, maker, name)

    def _fits(self, usb: _Usb) -> bool:
        return any(
            bus.hex_digits(wanted.vendor) in (None, usb.vendor)
            and bus.hex_digits(wanted.product) in (None, usb.product)
            and (wanted.serial is None or fnmatchcase(usb.serial, wanted.serial))
            for wanted in self._filters
        )

    def _device(self, usb: _Usb, vendor_name: str | None, product_name: str | None) -> Device:
        attributes = {
            PCIE_ROOT: bus.pcie_root(usb.directory),
            "controller": bus.pci_address(usb.directory),
            "vendor": usb.vendor,
            "productID": usb.product,
            "serial": bus.attribute_text(usb.serial),
            "port": usb.port,
            "vendorName": vendor_name or bus.attribute_text(usb.maker),
            "product": product_name or bus.attribute_text(usb.name),
        }
        nodes = dict.fromkeys([usb.node, *sorted(sysfs.nodes_below(usb.directory, self.dev))])
        by_port, missing = len(self._filters) > 1, bus.missing(nodes)
        return Device(
            f"port-{usb.port}" if by_port else self._ids[usb.plugged],
            nodes=[DeviceNode(node, permissions=self.permissions) for node in nodes],
            numa=sysfs.numa_node_above(usb.directory, "/pci"),
            attributes=bus.given(attributes),
            identity=identity.port(f"usb:{usb.port}") if by_port else "",
            health=Health.UNHEALTHY if missing else Health.HEALTHY,
            message=missing,
        )


def _ids(there: Collection[_Usb], before: Mapping[_Plugged, str]) -> dict[_Plugged, str]:
    """Return the id of each device. A device keeps its id from the last scan while it is plugged in."""
    ids = {usb.plugged: before[usb.plugged] for usb in there if usb.plugged in before}
    taken = set(ids.values())
    plain = Counter(_plain_id(usb) for usb in there)
    for usb in there:
        if usb.plugged not in ids:
            name = _plain_id(usb)
            if plain[name] > 1 or name in taken:
                name = _port_id(usb)
            if name in taken:  # Another device already has this id.
                name += f"-{usb.node[-3:]}"
            ids[usb.plugged] = name
            taken.add(name)
    return ids


def _plain_id(usb: _Usb) -> str:
    """Return an id made from vendor, product and serial number, or from the port if the serial number is unusable."""
    serial = plain_text(usb.serial)
    if len(serial) > (most := LONGEST_ID - len(f"{usb.vendor}-{usb.product}-")):
        serial = f"{shortened(serial, most - 9)}-{digest(usb.serial)}"
    return f"{usb.vendor}-{usb.product}-{serial}" if serial else _port_id(usb)


def _port_id(usb: _Usb) -> str:
    return f"{usb.vendor}-{usb.product}-port-{usb.port}"
