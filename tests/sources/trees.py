"""Makes sysfs trees with PCI and USB devices, as those of the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Tree:
    """A sysfs and a /dev below one directory."""

    def __init__(self, directory: Path) -> None:
        self.sys = directory / "sys"
        self.dev = directory / "dev"
        for name in (
            "sys/bus/pci/devices",
            "sys/bus/pci/drivers",
            "sys/bus/usb/devices",
            "sys/kernel/iommu_groups",
            "dev",
        ):
            (directory / name).mkdir(parents=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options with which a source reads this tree."""
        return {"sysfs_root": str(self.sys), "dev": str(self.dev)}

    def pci(
        self,
        address: str,
        vendor: str = "8086",
        device: str = "1572",
        class_: str = "020000",
        *,
        behind: str = "",
        numa: int = 0,
        driver: str = "",
        group: int | None = None,
        parent: str = "",
    ) -> Path:
        """Add a PCI device; behind: the bridge's address, parent: the physical function's."""
        root = self.sys / "devices" / f"pci{address[:7]}"
        directory = (root / behind if behind else root) / address
        directory.mkdir(parents=True)
        values = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{class_}", "numa_node": str(numa)}
        for name, value in values.items():
            (directory / name).write_text(f"{value}\n")
        (directory / "uevent").write_text(f"PCI_SLOT_NAME={address}\n")
        if driver:
            self.bind(directory, driver)
        if group is not None:
            members = self.sys / f"kernel/iommu_groups/{group}/devices"
            members.mkdir(parents=True, exist_ok=True)
            (members / address).symlink_to(directory)
            (directory / "iommu_group").symlink_to(self.sys / f"kernel/iommu_groups/{group}")
        if parent:
            (directory / "physfn").symlink_to(self.sys / "bus/pci/devices" / parent)
        (self.sys / "bus/pci/devices" / address).symlink_to(directory)
        return directory

    def bind(self, directory: Path, driver: str) -> None:
        """Bind a PCI device to another driver."""
        (self.sys / "bus/pci/drivers" / driver).mkdir(exist_ok=True)
        (directory / "driver").unlink(missing_ok=True)
        (directory / "driver").symlink_to(self.sys / "bus/pci/drivers" / driver)

    def node(self, directory: Path, below: str, name: str) -> None:
        """Make a device node of a device's driver."""
        place = directory / below
        place.mkdir(parents=True, exist_ok=True)
        (place / "uevent").write_text(f"MAJOR=1\nMINOR=3\nDEVNAME={name}\n")
        (self.dev / name).parent.mkdir(parents=True, exist_ok=True)
        (self.dev / name).touch()

    def number(self, number: str, directory: Path, below: str, kind: str = "char") -> None:
        """Give a device, or a directory below it, a device number."""
        (directory / below).mkdir(parents=True, exist_ok=True)
        (self.sys / "dev" / kind).mkdir(parents=True, exist_ok=True)
        link = self.sys / "dev" / kind / number
        link.unlink(missing_ok=True)
        link.symlink_to(directory / below)

    def usb(
        self,
        port: str,
        number: int,
        vendor: str = "0403",
        product: str = "6001",
        serial: str = "",
        *,
        controller: str = "0000:00:14.0",
        class_: str = "00",
        name: str = "",
        maker: str = "",
    ) -> Path:
        """Plug in a USB device. number: its number on the bus."""
        bus = int(port.partition("-")[0])
        directory = self.sys / f"devices/pci{controller[:7]}" / controller / f"usb{bus}" / port
        directory.mkdir(parents=True)
        values = {
            "idVendor": vendor, "idProduct": product, "busnum": str(bus), "devnum": str(number),
            "bDeviceClass": class_, "serial": serial, "product": name, "manufacturer": maker,
        }  # fmt: skip
        for key, value in values.items():
            if value:
                (directory / key).write_text(f"{value}\n")
        (directory / "uevent").write_text(f"DEVNAME=bus/usb/{bus:03}/{number:03}\n")
        (self.sys / "bus/usb/devices" / port).symlink_to(directory)
        node = self.dev / f"bus/usb/{bus:03}/{number:03}"
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()  # the node comes last, as from the kernel, and causes the event
        return directory

    def pull(self, port: str) -> None:
        """Pull a USB device."""
        link = self.sys / "bus/usb/devices" / port
        values = {name: (link / name).read_text().strip() for name in ("busnum", "devnum")}
        link.unlink()
        (self.dev / f"bus/usb/{int(values['busnum']):03}/{int(values['devnum']):03}").unlink()
