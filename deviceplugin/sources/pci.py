"""Defines the source of PCI devices, which selects them by properties in sysfs: vendor, device, class and others.

If a device is bound to vfio-pci, its container gets /dev/vfio/<group> and /dev/vfio/vfio. Otherwise the container gets
the device nodes of the device's kernel driver, such as /dev/dri/renderD128. A network function has no device node. Its
PCI address is in an environment variable of the container.

New nodes under /dev cause inotify events, and each event causes a scan. Changes in sysfs cause no events, so only the
next periodic scan finds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from deviceplugin import looked_at, sysfs
from deviceplugin.config.types import PciConfig
from deviceplugin.device import NO_EDITS, ContainerEdits, Device, DeviceNode, Health
from deviceplugin.identity import PCI
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources import bus
from deviceplugin.sources.scanned import Scan

VFIO: Final = "vfio-pci"
_BRIDGE: Final = "0604"
"""The class of PCI bridges. A bridge may stay bound to a driver of the host, because bridge drivers do no DMA."""
_HARMLESS: Final = re.compile(r".*vfio.*|pci-stub")
"""Names of the drivers that other functions in an IOMMU group may have when the group is given to a virtual machine
(Linux, drivers/vfio)."""


@dataclass(frozen=True, slots=True)
class _Function:
    address: str
    directory: str
    vendor: str
    device: str
    class_: str
    driver: str | None
    parent: str | None


class PciSource(bus.SysfsSource[PciConfig]):
    """Lists the PCI devices that match a filter, with their addresses (0000:3b:00.0) as ids.

    resource: the resource's name, from which the name of the environment variable with the addresses is made.
    """

    BUS = "pci"
    IDS = bus.ids_files("pci", "pciutils")
    DEBOUNCE = 0.2

    def _scan(self) -> Scan:
        directories = {self.dev, f"{self.dev}/vfio"}
        looked_at.at(self.root)
        try:
            addresses = sorted(os.listdir(self.root))
        except OSError as error:
            return Scan([], directories, [f"{self.root} cannot be read: {error.strerror}"])
        functions = [
            candidate
            for address in addresses
            if (candidate := self._read(address)) is not None and self._fits(candidate)
        ]
        notes = [] if functions else [f"none of {len(addresses)} PCI devices has {bus.in_words(self.wanted)}"]
        names = self._names({(function.vendor, function.device) for function in functions})
        return Scan(
            [self._device(function, *names[function.vendor, function.device]) for function in functions],
            directories,
            notes,
        )

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return an environment variable with the devices' addresses: PCIDEVICE_EXAMPLE_COM_NIC=0000:3b:02.0,..."""
        name = "PCIDEVICE_" + re.sub(r"[^A-Z0-9]", "_", (self.resource or "pci").upper())
        # The addresses are sorted, because the order of `devices` is arbitrary, but the same devices should give the
        # same value.
        return ContainerEdits(env={name: ",".join(sorted(device.id for device in devices))})

    def _read(self, address: str) -> _Function | None:
        directory = os.path.realpath(f"{self.root}/{address}")
        values = (bus.hex_digits(sysfs.read(f"{directory}/{name}")) for name in ("vendor", "device", "class"))
        vendor, device, class_ = values
        if not (vendor and device and class_):
            return None  # The device was removed during the scan.
        driver, parent = sysfs.link_name(f"{directory}/driver"), sysfs.link_name(f"{directory}/physfn")
        return _Function(address, directory, vendor, device, class_, driver, parent)

    def _fits(self, function: _Function) -> bool:
        wanted = self.wanted
        return (
            bus.hex_digits(wanted.vendor) in (None, function.vendor)
            and bus.hex_digits(wanted.device) in (None, function.device)
            and function.class_.startswith(bus.hex_digits(wanted.class_) or "")
            and (wanted.driver is None or fnmatchcase(function.driver or "", wanted.driver))
            and (wanted.address is None or fnmatchcase(function.address, wanted.address))
            and (wanted.functions == "all" or (wanted.functions == "virtual") == (function.parent is not None))
        )

    def _device(self, function: _Function, vendor_name: str | None, product: str | None) -> Device:
        group = sysfs.link_name(f"{function.directory}/iommu_group")
        vfs = sysfs.read(f"{function.directory}/sriov_numvfs")
        if function.driver == VFIO and group is not None:
            own, common = [f"{self.dev}/vfio/{group}"], [f"{self.dev}/vfio/vfio"]
            problem = self._foreign(function, group) or bus.missing((*own, *common), "`modprobe vfio-pci`")
        else:
            own, common = sorted(sysfs.nodes_below(function.directory, self.dev)), []
            problem = bus.missing(own)
        attributes = {
            PCI_BUS_ID: function.address,
            PCIE_ROOT: bus.pcie_root(function.directory),
            "vendor": function.vendor,
            "device": function.device,
            "class": function.class_,
            "driver": function.driver,
            "vendorName": vendor_name,
            "product": product,
            "iommuGroup": int(group) if group and group.isdecimal() else None,
            "virtualFunction": function.parent is not None,
            "parent": function.parent,
            "virtualFunctions": int(vfs) if vfs and vfs.isdecimal() else None,
        }
        return Device(
            function.address,
            nodes=[DeviceNode(node, permissions=self.permissions) for node in own],
            numa=sysfs.numa_node(function.directory),
            attributes=bus.given(attributes),
            edits=ContainerEdits(nodes=common) if common else NO_EDITS,
            identity=f"{PCI}{function.address}",
            health=Health.UNHEALTHY if problem else Health.HEALTHY,
            message=problem,
        )

    def _foreign(self, function: _Function, group: str) -> str:
        """Return the reason why a virtual machine cannot get the IOMMU group of a function; "" if it can get the group.

        The kernel refuses to open a group if any function in the group, except a bridge, is bound to a driver of the
        host.
        """
        members = f"{function.directory}/iommu_group/devices"
        looked_at.at(members)
        try:
            addresses = sorted(os.listdir(members))
        except OSError:
            return ""
        for address in addresses:
            driver = sysfs.link_name(f"{members}/{address}/driver")
            class_ = bus.hex_digits(sysfs.read(f"{members}/{address}/class")) or ""
            if driver is not None and not _HARMLESS.fullmatch(driver) and not class_.startswith(_BRIDGE):
                how = f"bind it to {VFIO} as well, or to no driver"
                return f"{address} of the same IOMMU group {group} is bound to {driver} of the host; {how}"
        return ""
