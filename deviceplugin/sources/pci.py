"""PCI devices, chosen by what sysfs says of them: vendor, device, class, driver, address.

A device bound to vfio-pci gives a container /dev/vfio/<group> and /dev/vfio/vfio. Any other device gives the nodes that
its driver made (/dev/dri/renderD128). A network function has no node: the container finds its address in a variable.

sysfs makes no inotify events. New nodes under /dev do; other changes are found by the next scan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from deviceplugin.config.types import PciConfig
from deviceplugin.device import NO_EDITS, ContainerEdits, Device, DeviceNode
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources import sysfs
from deviceplugin.sources.scanned import Scan

VFIO: Final = "vfio-pci"


@dataclass(frozen=True, slots=True)
class _Function:
    address: str
    directory: str
    vendor: str
    device: str
    class_: str
    driver: str | None
    parent: str | None


class PciSource(sysfs.SysfsSource[PciConfig]):
    """The PCI devices that a filter lets through; ids are addresses, 0000:3b:00.0. `resource` names their variable."""

    BUS = "pci"
    IDS = sysfs.ids_files("pci", "pciutils")
    SETTLE = 0.2

    def _scan(self) -> Scan:
        directories = {self._dev, f"{self._dev}/vfio"}
        try:
            addresses = sorted(os.listdir(self._root))
        except OSError as error:
            return Scan([], directories, [f"{self._root} cannot be read: {error.strerror}"])
        found = [one for address in addresses if (one := self._read(address)) is not None and self._fits(one)]
        notes = [] if found else [f"none of {len(addresses)} PCI devices has {sysfs.in_words(self.wanted)}"]
        names = self._names({(one.vendor, one.device) for one in found})
        return Scan([self._device(one, *names[one.vendor, one.device]) for one in found], directories, notes)

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the variable with the addresses: PCIDEVICE_EXAMPLE_COM_NIC=0000:3b:02.0,0000:3b:02.1."""
        name = "PCIDEVICE_" + re.sub(r"[^A-Z0-9]", "_", (self.resource or "pci").upper())
        # The kubelet passes devices in any order.
        return ContainerEdits(env={name: ",".join(sorted(device.id for device in devices))})

    def _read(self, address: str) -> _Function | None:
        directory = os.path.realpath(f"{self._root}/{address}")
        values = (sysfs.hex_digits(sysfs.read(f"{directory}/{name}")) for name in ("vendor", "device", "class"))
        vendor, device, class_ = values
        if not (vendor and device and class_):
            return None  # gone meanwhile
        driver, parent = sysfs.link_name(f"{directory}/driver"), sysfs.link_name(f"{directory}/physfn")
        return _Function(address, directory, vendor, device, class_, driver, parent)

    def _fits(self, one: _Function) -> bool:
        wanted = self.wanted
        return (
            sysfs.hex_digits(wanted.vendor) in (None, one.vendor)
            and sysfs.hex_digits(wanted.device) in (None, one.device)
            and one.class_.startswith(sysfs.hex_digits(wanted.class_) or "")
            and (wanted.driver is None or fnmatchcase(one.driver or "", wanted.driver))
            and (wanted.address is None or fnmatchcase(one.address, wanted.address))
            and (wanted.functions == "all" or (wanted.functions == "virtual") == (one.parent is not None))
        )

    def _device(self, one: _Function, vendor_name: str | None, product: str | None) -> Device:
        group = sysfs.link_name(f"{one.directory}/iommu_group")
        vfs = sysfs.read(f"{one.directory}/sriov_numvfs")
        if one.driver == VFIO and group is not None:
            own, common = [f"{self._dev}/vfio/{group}"], [f"{self._dev}/vfio/vfio"]
        else:
            own, common = sorted(sysfs.nodes_below(one.directory, self._dev)), []
        attributes = {
            PCI_BUS_ID: one.address,
            PCIE_ROOT: sysfs.pcie_root(one.directory),
            "vendor": one.vendor,
            "device": one.device,
            "class": one.class_,
            "driver": one.driver,
            "vendorName": vendor_name,
            "product": product,
            "iommuGroup": int(group) if group and group.isdecimal() else None,
            "virtualFunction": one.parent is not None,
            "parent": one.parent,
            "virtualFunctions": int(vfs) if vfs and vfs.isdecimal() else None,
        }
        return Device(
            one.address,
            nodes=[DeviceNode(node, permissions=self.permissions) for node in own],
            numa=sysfs.numa_node(one.directory),
            attributes=sysfs.given(attributes),
            edits=ContainerEdits(nodes=common) if common else NO_EDITS,
            identity=f"pci:{one.address}",
        )
