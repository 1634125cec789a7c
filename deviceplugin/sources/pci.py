"""PCI devices, by what sysfs says of them: vendor, device, class, driver, address.

What a container gets: of a device bound to vfio-pci its group, /dev/vfio/<group>, and /dev/vfio/vfio;
of any other one the nodes that its driver made (/dev/dri/renderD128, /dev/nvme0n1). Network functions
have none: their address in a variable is what the software in the container looks for.

sysfs makes no inotify events. New nodes under /dev do (a driver that is bound, a group that comes), and
all else is found by looking again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from deviceplugin import filewatch, hooks
from deviceplugin.device import NO_EDITS, AttributeValue, ContainerEdits, Device, DeviceNode
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.source import DeviceSource
from deviceplugin.sources import sysfs

__all__ = ["PciFilter", "PciSource"]

_LOG: Final = logging.getLogger(__name__)
RESCAN: Final = 10.0
SCAN_TIMEOUT: Final = 60.0
SETTLE: Final = 0.2
"""Seconds between two looks at the least; a driver that is bound makes several nodes."""
VFIO: Final = "vfio-pci"
_ROOT: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class PciFilter:
    """Which PCI devices; what is None does not matter.

    vendor, device: four hexadecimal digits, with or without 0x. class_: two, four or six of them.
    driver, address: patterns as in a shell. functions: "all", "physical" (no virtual functions of
    SR-IOV), or "virtual" (nothing else).
    """

    vendor: str | None = None
    device: str | None = None
    class_: str | None = None
    driver: str | None = None
    address: str | None = None
    functions: str = "all"

    @property
    def text(self) -> str:
        """What is wanted, as a config file says it."""
        functions = self.functions if self.functions != "all" else None
        return sysfs.told(
            {
                "vendor": self.vendor,
                "device": self.device,
                "class": self.class_,
                "driver": self.driver,
                "address": self.address,
                "functions": functions,
            }
        )


class PciSource(DeviceSource):
    """The PCI devices that a filter lets through; ids are their addresses, 0000:3b:00.0.

    Args:
        wanted: which ones.
        permissions: what a container may do with their nodes, of r, w and m.
        resource: the resource's name; the variable with the addresses is named after it.
        sysfs_root, dev: where sysfs and the device nodes are.
        ids: files with the names of vendors and devices, the first that is there counts.
        rescan: seconds after which is looked again without any hint.

    """

    def __init__(
        self,
        wanted: PciFilter,
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs_root: str = "/sys",
        dev: str = "/dev",
        ids: Collection[str] = sysfs.PCI_IDS,
        rescan: float = RESCAN,
    ) -> None:
        if resource:
            self.resource = resource
        self.wanted = wanted
        self.permissions = permissions
        self.notes: tuple[str, ...] = ()
        self._vendor = _hex(wanted.vendor)
        self._device = _hex(wanted.device)
        self._class = _hex(wanted.class_) or ""
        self._root = f"{sysfs_root}/bus/pci/devices"
        self._dev = dev
        self._names = sysfs.Names(ids)
        self._rescan = rescan

    def __repr__(self) -> str:
        return f"PciSource({self.wanted})"

    def look(self) -> list[Device]:
        """Return the devices that are there now; blocks."""
        try:
            addresses = sorted(os.listdir(self._root))
        except OSError as error:
            self.notes = (f"{self._root} cannot be read: {error.strerror}",)
            return []
        found = [one for address in addresses if (one := self._read(address)) is not None and self._fits(one)]
        self.notes = () if found else (f"none of {len(addresses)} PCI devices has {self.wanted.text}",)
        names = self._names.of({(one.vendor, one.device) for one in found})
        return [self._made(one, *names[one.vendor, one.device]) for one in found]

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices now and whenever one comes, goes, or gets another driver."""
        listed: list[Device] | None = None
        told: tuple[str, ...] = ()
        with filewatch.shared().watch([self._dev, f"{self._dev}/vfio"]) as watch:
            while True:
                devices = await hooks.call("looking for PCI devices", self.look, timeout=SCAN_TIMEOUT)
                if self.notes != told:
                    told = self.notes
                    for note in told:
                        _LOG.info("%s", note)
                if devices != listed:
                    listed = devices
                    yield listed
                if await watch.wait(self._rescan * random.uniform(0.8, 1.2)):  # noqa: S311  # no secret
                    await asyncio.sleep(SETTLE)

    def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the variable with the addresses: PCIDEVICE_EXAMPLE_COM_NIC=0000:3b:02.0,0000:3b:02.1."""
        name = "PCIDEVICE_" + re.sub(r"[^A-Z0-9]", "_", (self.resource or "pci").upper())
        # The kubelet names them in any order.
        return ContainerEdits(env={name: ",".join(sorted(device.id for device in devices))})

    def _read(self, address: str) -> _Function | None:
        directory = os.path.realpath(f"{self._root}/{address}")
        vendor, device, class_ = (_hex(sysfs.read(f"{directory}/{name}")) for name in ("vendor", "device", "class"))
        if not (vendor and device and class_):
            return None  # gone meanwhile
        return _Function(
            address,
            directory,
            vendor,
            device,
            class_,
            sysfs.link_name(f"{directory}/driver"),
            sysfs.link_name(f"{directory}/physfn"),
        )

    def _fits(self, one: _Function) -> bool:
        wanted = self.wanted
        return (
            self._vendor in (None, one.vendor)
            and self._device in (None, one.device)
            and one.class_.startswith(self._class)
            and (wanted.driver is None or fnmatchcase(one.driver or "", wanted.driver))
            and (wanted.address is None or fnmatchcase(one.address, wanted.address))
            and (wanted.functions == "all" or (wanted.functions == "virtual") == (one.parent is not None))
        )

    def _made(self, one: _Function, vendor_name: str | None, product: str | None) -> Device:
        group = sysfs.link_name(f"{one.directory}/iommu_group")
        vfs = sysfs.read(f"{one.directory}/sriov_numvfs")
        root = next((step for step in one.directory.split("/") if _ROOT.fullmatch(step)), None)
        attributes: dict[str, AttributeValue | None] = {
            PCI_BUS_ID: one.address,
            PCIE_ROOT: root,
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
        own, common = self._nodes(one, group)
        return Device(
            one.address,
            nodes=[DeviceNode(node, permissions=self.permissions) for node in own],
            numa=sysfs.numa_node(one.directory),
            attributes={name: value for name, value in attributes.items() if value is not None},
            edits=ContainerEdits(nodes=[DeviceNode(node) for node in common]) if common else NO_EDITS,
            identity=f"pci:{one.address}",
        )

    def _nodes(self, one: _Function, group: str | None) -> tuple[list[str], list[str]]:
        """Return the nodes that are the device's own, and those that all like it have in common."""
        if one.driver == VFIO and group is not None:
            return [f"{self._dev}/vfio/{group}"], [f"{self._dev}/vfio/vfio"]
        return sysfs.nodes_below(one.directory, self._dev), []


@dataclass(frozen=True, slots=True)
class _Function:
    """A PCI function as sysfs has it."""

    address: str
    directory: str
    vendor: str
    device: str
    class_: str
    driver: str | None
    parent: str | None


def _hex(text: str | None) -> str | None:
    return text.lower().removeprefix("0x") if text is not None else None
