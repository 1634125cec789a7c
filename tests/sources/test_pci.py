"""PCI devices of made sysfs trees, and of this machine."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import config, naming, sources
from deviceplugin.config.types import PciConfig
from deviceplugin.device import ContainerEdits, Device, Health
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources import bus
from deviceplugin.sources.pci import PciSource
from tests.sources.trees import Tree

IDS = """
# a comment
8086  Intel Corporation
\t1572  Ethernet Controller X710 for 10GbE SFP+
\t\t8086 0001  Ethernet Converged Network Adapter X710-4
\t154c  Ethernet Virtual Function 700 Series
10de  NVIDIA Corporation
\t20b0  GA100 [A100 SXM4 40GB]
C 02  Network controller
\t00  Ethernet controller
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def found(tree: Tree, ids: tuple[str, ...] = (), **wanted: Any) -> dict[str, Device]:
    return {device.id: device for device in PciSource(PciConfig(**wanted), ids=ids, **tree.options).scan()}


def test_device_is_described_by_its_ids_place_and_names(tree: Tree, tmp_path: Path) -> None:
    """A device has vendor, device, class, driver, address, root, NUMA node and group, and names from pci.ids."""
    (tmp_path / "pci.ids").write_text(IDS)
    tree.pci("0000:3b:00.0", behind="0000:3a:00.0", numa=1, driver="i40e", group=7)
    device = found(tree, (str(tmp_path / "none"), str(tmp_path / "pci.ids")), vendor="8086")["0000:3b:00.0"]
    assert device.numa == 1
    assert dict(device.attributes) == {
        PCI_BUS_ID: "0000:3b:00.0",
        PCIE_ROOT: "pci0000:3b",
        "vendor": "8086",
        "device": "1572",
        "class": "020000",
        "driver": "i40e",
        "iommuGroup": 7,
        "vendorName": "Intel Corporation",
        "product": "Ethernet Controller X710 for 10GbE SFP+",
        "virtualFunction": False,
    }
    assert not list(naming.problems(device, "nic.example.com"))


def test_device_that_pci_ids_does_not_know_has_no_name(tree: Tree, tmp_path: Path) -> None:
    """Without a line in pci.ids, or without the file, a device has no names."""
    (tmp_path / "pci.ids").write_text(IDS)
    tree.pci("0000:01:00.0", "8086", "ffff")
    tree.pci("0000:02:00.0", "abcd", "0001")
    devices = found(tree, (str(tmp_path / "pci.ids"),), class_="02")
    assert devices["0000:01:00.0"].attributes["vendorName"] == "Intel Corporation"
    assert "product" not in devices["0000:01:00.0"].attributes
    assert "vendorName" not in devices["0000:02:00.0"].attributes
    assert "vendorName" not in found(tree, vendor="8086")["0000:01:00.0"].attributes


@given(st.text(alphabet=st.characters(exclude_characters="\r"), max_size=400))
def test_any_file_of_names_can_be_read(text: str) -> None:
    """Any contents of pci.ids give names of at most 64 bytes, or none."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(f"8086  {text}\n\t1572 {text}\n")
        file.flush()
        names = bus.ids_names(file.name, {("8086", "1572")})
    assert names is not None
    assert all(name is None or len(name.encode()) <= 64 for pair in names.values() for name in pair)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"vendor": "8086"}, "abv"),
        ({"vendor": "0x8086", "device": "0X1572".lower()}, "ab"),
        ({"class_": "03"}, "g"),
        ({"class_": "0x0302"}, "g"),
        ({"class_": "0300"}, ""),
        ({"driver": "vfio-*"}, "b"),
        ({"driver": "*"}, "abgv"),
        ({"address": "0000:01:*"}, "av"),
        ({"vendor": "8086", "functions": "virtual"}, "v"),
        ({"vendor": "8086", "functions": "physical"}, "ab"),
        ({"vendor": "10DE"}, "g"),
    ],
)
def test_filter_takes_what_fits_in_all(tree: Tree, wanted: dict[str, Any], fits: str) -> None:
    """A device must fit all of the filter: vendor, device, class prefix, driver, address pattern and function kind."""
    addresses = {"a": "0000:01:00.0", "b": "0000:02:00.0", "g": "0000:03:00.0", "v": "0000:01:02.0"}
    tree.pci(addresses["a"], driver="i40e")
    tree.pci(addresses["b"], driver="vfio-pci", group=2)
    tree.pci(addresses["g"], "10de", "20b0", "030200")
    tree.pci(addresses["v"], "8086", "154c", driver="iavf", parent=addresses["a"])
    assert set(found(tree, **wanted)) == {addresses[key] for key in fits}


def test_virtual_functions_know_their_parent(tree: Tree) -> None:
    """A virtual function has the address of its physical function, which has the number of its virtual functions."""
    parent = tree.pci("0000:01:00.0")
    (parent / "sriov_numvfs").write_text("1\n")
    tree.pci("0000:01:02.0", "8086", "154c", parent="0000:01:00.0")
    devices = found(tree, vendor="8086")
    assert devices["0000:01:02.0"].attributes["parent"] == "0000:01:00.0"
    assert devices["0000:01:02.0"].attributes["virtualFunction"] is True
    assert devices["0000:01:00.0"].attributes["virtualFunctions"] == 1
    assert "parent" not in devices["0000:01:00.0"].attributes


@pytest.mark.parametrize(
    ("class_", "driver", "usable"),
    [
        ("040300", "snd_hda_intel", False),
        ("040300", "", True),
        ("040300", "vfio-pci", True),
        ("040300", "mlx5_vfio_pci", True),
        ("040300", "pci-stub", True),
        ("060400", "pcieport", True),
        ("060100", "lpc_ich", False),
    ],
)
def test_a_vfio_group_with_a_function_of_the_host_is_unhealthy(
    tree: Tree, class_: str, driver: str, usable: bool
) -> None:
    """A device is unhealthy if a host driver has another function of its VFIO group; PCI bridges do not matter."""
    tree.pci("0000:01:00.0", driver="vfio-pci", group=12)
    tree.pci("0000:01:00.1", class_=class_, driver=driver, group=12)
    (tree.dev / "vfio").mkdir()
    for name in ("12", "vfio"):
        (tree.dev / "vfio" / name).touch()
    device = found(tree, address="0000:01:00.0")["0000:01:00.0"]
    assert device.health.usable is usable
    expected = f"0000:01:00.1 of the same IOMMU group 12 is bound to {driver} of the host; bind it to vfio-pci as well"
    assert device.message.startswith(expected) is not usable


def test_a_device_whose_nodes_are_not_there_is_unhealthy(tree: Tree) -> None:
    """A device without its nodes is unhealthy; the message names the path and what makes it."""
    tree.pci("0000:01:00.0", driver="vfio-pci", group=12)
    directory = tree.pci("0000:02:00.0")
    tree.node(directory, "drm/card0", "dri/card0")
    (tree.dev / "dri/card0").unlink()
    vfio, card = found(tree).values()
    assert vfio.message == f"{tree.dev}/vfio/12 is not there, and its container needs it; `modprobe vfio-pci` makes it"
    assert card.message == f"{tree.dev}/dri/card0 is not there, and its container needs it; udev makes it"
    assert vfio.health is card.health is Health.UNHEALTHY
    (tree.dev / "dri/card0").touch()
    assert found(tree)["0000:02:00.0"].health is Health.HEALTHY


def test_vfio_gives_the_group_and_the_container(tree: Tree) -> None:
    """A device bound to vfio-pci gives its group's node and /dev/vfio/vfio."""
    tree.pci("0000:01:00.0", driver="vfio-pci", group=12)
    tree.pci("0000:02:00.0", driver="vfio-pci", group=13)
    devices = list(found(tree, driver="vfio-pci").values())
    merged = ContainerEdits.merge(device.container_edits for device in devices)
    vfio = f"{tree.dev}/vfio"
    assert [node.host for node in merged.device_nodes] == [f"{vfio}/12", f"{vfio}/vfio", f"{vfio}/13"]


def test_other_drivers_nodes_are_found_below_the_device(tree: Tree) -> None:
    """The nodes of other drivers are those below the device itself, not below a bridge."""
    gpu = tree.pci("0000:01:00.0", "1002", "73bf", "030000", driver="amdgpu")
    tree.node(gpu, "drm/card0", "dri/card0")
    tree.node(gpu, "drm/renderD128", "dri/renderD128")
    bridge = tree.pci("0000:02:00.0", "8086", "ffff", "060400")
    disk = tree.pci("0000:02:01.0", "144d", "a808", "010802", behind="0000:02:00.0")
    tree.node(disk, "nvme/nvme0/nvme0n1", "nvme0n1")
    devices = found(tree, address="*")
    nodes = {name: [node.host for node in device.container_edits.device_nodes] for name, device in devices.items()}
    assert nodes["0000:01:00.0"] == [f"{tree.dev}/dri/card0", f"{tree.dev}/dri/renderD128"]
    assert nodes["0000:02:00.0"] == []
    assert nodes["0000:02:01.0"] == [f"{tree.dev}/nvme0n1"]
    assert bridge.is_dir()


async def test_addresses_are_in_a_variable_of_the_container(tree: Tree) -> None:
    """One variable, named after the resource, has the addresses of all of a container's devices."""
    for number in (1, 2, 3):
        tree.pci(f"0000:0{number}:00.0")
    source = PciSource(PciConfig(vendor="8086"), resource="example.com/nic-10g", **tree.options)
    edits = source.edits(source.scan()[1::-1])  # the kubelet gives them in any order
    assert dict(edits.env) == {"PCIDEVICE_EXAMPLE_COM_NIC_10G": "0000:01:00.0,0000:02:00.0"}


def test_numa_node_that_the_firmware_does_not_know_is_unknown(tree: Tree) -> None:
    """The NUMA node -1 in sysfs is unknown."""
    tree.pci("0000:01:00.0", numa=-1)
    assert found(tree, vendor="8086")["0000:01:00.0"].numa is None


def test_function_that_goes_while_it_is_read_is_left_out(tree: Tree) -> None:
    """A PCI function that is removed while sysfs is read is left out."""
    tree.pci("0000:01:00.0")
    (tree.sys / "bus/pci/devices/0000:02:00.0").symlink_to(tree.sys / "devices/gone")
    for number, name in enumerate(("vendor", "device", "class"), 3):
        (tree.pci(f"0000:0{number}:00.0") / name).unlink()
    (tree.pci("0000:06:00.0") / "uevent").unlink()
    (tree.pci("0000:07:00.0") / "numa_node").unlink()
    assert set(found(tree, vendor="8086")) == {"0000:01:00.0", "0000:06:00.0", "0000:07:00.0"}


async def test_driver_that_is_bound_later_is_seen(tree: Tree) -> None:
    """A device that is bound to vfio-pci later is listed, since its new node causes a scan."""
    (tree.dev / "vfio").mkdir()
    directory = tree.pci("0000:01:00.0", driver="i40e", group=12)
    source = PciSource(PciConfig(driver="vfio-pci"), rescan=3600, **tree.options)
    async with asyncio.timeout(20), aclosing(cast("Any", source.watch())) as lists:
        assert await anext(lists) == []
        assert list(source.notes) == ["none of 1 PCI devices has driver vfio-pci"]
        tree.bind(directory, "vfio-pci")
        (tree.dev / "vfio/12").touch()
        assert [device.id for device in await anext(lists)] == ["0000:01:00.0"]
        assert not source.notes


async def test_device_that_is_hot_plugged_is_seen_at_the_next_look(tree: Tree) -> None:
    """A device without a node is found by the next rescan."""
    source = PciSource(PciConfig(vendor="8086"), rescan=0.05, **tree.options)
    async with asyncio.timeout(20), aclosing(cast("Any", source.watch())) as lists:
        assert await anext(lists) == []
        tree.pci("0000:01:00.0")
        assert [device.id for device in await anext(lists)] == ["0000:01:00.0"]


def test_without_a_pci_bus_there_are_no_devices(tmp_path: Path) -> None:
    """A machine without a PCI bus has no devices and a note."""
    source = PciSource(PciConfig(vendor="8086"), sysfs_root=str(tmp_path))
    assert source.scan() == []
    assert "cannot be read" in source.notes[0]


async def test_entry_of_the_config_file_gives_each_vfio_device(tree: Tree) -> None:
    """A config entry gives both vfio devices, which share /dev/vfio/vfio."""
    tree.pci("0000:01:00.0", driver="vfio-pci", group=12)
    tree.pci("0000:02:00.0", driver="vfio-pci", group=13)
    text = 'resources: [{name: example.com/nic, devices: [{pci: {class: "02"}}], exclude: ["0000:03:*"]}]'
    source = sources.ConfiguredSource(config.parse(text).resources[0])
    entry = source.entries[0]
    assert isinstance(entry, PciSource)
    entry.root, entry.dev = f"{tree.sys}/bus/pci/devices", str(tree.dev)
    async with asyncio.timeout(20), aclosing(cast("Any", source.watch())) as lists:
        devices = await anext(lists)
        assert [device.id for device in devices] == ["0000:01:00.0", "0000:02:00.0"]
        assert source.hooks == {"edits"}
        edits = await source.edits(devices)
        assert dict(edits.env) == {"PCIDEVICE_EXAMPLE_COM_NIC": "0000:01:00.0,0000:02:00.0"}


def test_devices_of_this_machine_are_read_as_they_are() -> None:
    """The PCI devices of this machine are found with their addresses and ids, and can be published."""
    here = Path("/sys/bus/pci/devices")
    addresses = sorted(os.listdir(here)) if here.is_dir() else []
    devices = {device.id: device for device in PciSource(PciConfig(address="*")).scan()}
    assert sorted(devices) == addresses
    for address, device in devices.items():
        assert not list(naming.problems(device, "pci.example.com"))
        assert f"0x{device.attributes['vendor']}" == (here / address / "vendor").read_text().strip()
        assert str(device.attributes[PCIE_ROOT]) in os.path.realpath(here / address)
        for node in device.container_edits.device_nodes:
            assert node.host.startswith("/dev/")
