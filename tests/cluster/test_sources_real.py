"""Sources on a real node: PCI and path devices in real containers, aligned by NUMA node by the real kubelet.

The machine may have only one NUMA node. The kubelet reads NUMA nodes from /sys/devices/system/node, so the isolated run
mounts a directory with two NUMA nodes over it. The PCI devices are simulated by sysfs trees, with real device nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deviceplugin.config import parse
from deviceplugin.config.types import NvidiaConfig, PciConfig
from deviceplugin.device import Device
from deviceplugin.node.agent import Agent
from deviceplugin.source import DeviceSource
from deviceplugin.sources import ConfiguredSource
from deviceplugin.sources.nvidia import NvidiaSource
from deviceplugin.sources.path import PathSource
from deviceplugin.sources.pci import PciSource
from tests.cluster import isolate
from tests.cluster.node import Cluster, ExecError, Pod
from tests.nvml.gpus import DGX1V, FakeGpus, dgx_1v
from tests.nvml.gpus import build as build_library
from tests.sources.trees import Tree

NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def served(*sources: DeviceSource) -> Iterator[Agent]:
    """Run an agent in a thread while the context lasts."""
    agent = Agent(sources)
    thread = threading.Thread(target=lambda: asyncio.run(agent.run()), daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        agent.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory on a file system in which device nodes can be opened."""
    path = isolate.DEVICES / "sources"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def two_numa_nodes() -> Iterator[None]:
    """Mount two NUMA nodes, with half of the CPUs each, over the machine's."""
    cpus = sorted(path.name for path in NODES.glob("node*/cpu[0-9]*"))
    memory = (NODES / "node0/meminfo").read_text()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(NODES)], check=True)
    try:
        for number in (0, 1):
            node = NODES / f"node{number}"
            (node / "hugepages").mkdir(parents=True)
            (node / "meminfo").write_text(memory.replace("Node 0", f"Node {number}"))
            (node / "distance").write_text("10 20\n" if number == 0 else "20 10\n")
            for cpu in cpus[number::2]:
                (node / cpu).symlink_to(f"../../cpu/{cpu}")
        for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
            (NODES / name).write_text("0-1\n")
        yield
    finally:
        subprocess.run(["umount", str(NODES)], check=True)


@pytest.fixture
def restricted(two_numa_nodes: None, make_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster whose kubelet refuses pods whose devices cannot be on one NUMA node."""
    cluster = make_cluster(kubelet_config={"topologyManagerPolicy": "restricted", "topologyManagerScope": "pod"})
    assert cluster.kubelet_get("/healthz")[0] == 200
    return cluster


def null(path: Path) -> Path:
    """Make a device node with the numbers of /dev/null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    return path


def pci_source(tree: Tree, name: str, class_: str) -> PciSource:
    return PciSource(PciConfig(class_=class_), resource=name, **tree.options)


def pci(tree: Tree, address: str, numa: int, class_: str = "03") -> None:
    """Add a PCI device with a real device node."""
    made = tree.pci(address, "10de", "20b0", f"{class_}0200", numa=numa)
    tree.node(made, "drm/renderD128", f"dri/by-{address[5:7]}")
    path = tree.dev / f"dri/by-{address[5:7]}"
    path.unlink()
    null(path)


def refused(pod: Pod) -> str:
    pod.wait_phase("Failed")
    return str(pod.status["reason"])


def address_of(pod: Pod, name: str = "PCIDEVICE_EXAMPLE_COM_GPU") -> str:
    return pod.exec(["sh", "-c", f"echo ${name}"]).strip()


def test_pod_gets_the_pci_device_of_the_numa_node_where_the_other_device_is(
    restricted: Cluster, directory: Path
) -> None:
    """A pod with a GPU and a network card on NUMA node 1 gets the GPU of NUMA node 1, with the policy `restricted`.

    Its container has the device nodes of these two devices only. A second pod with two GPUs gets those of NUMA node 0.
    """
    tree = Tree(directory)
    for bus, numa in (("01", 0), ("02", 0), ("81", 1)):
        pci(tree, f"0000:{bus}:00.0", numa)
    pci(tree, "0000:82:00.0", 1, "02")
    with served(pci_source(tree, "example.com/gpu", "03"), pci_source(tree, "example.com/nic", "02")):
        restricted.wait_allocatable("example.com/gpu", 3)
        restricted.wait_allocatable("example.com/nic", 1)
        pod = restricted.start_pod("both", {"example.com/gpu": 1, "example.com/nic": 1}).wait_running()
        assert address_of(pod) == "0000:81:00.0"
        assert address_of(pod, "PCIDEVICE_EXAMPLE_COM_NIC") == "0000:82:00.0"
        assert pod.exec(["ls", f"{tree.dev}/dri"]).split() == ["by-81", "by-82"]
        pod.exec(["sh", "-c", f"echo x > {tree.dev}/dri/by-81"])
        second = restricted.start_pod("second", {"example.com/gpu": 2}).wait_running()
        assert address_of(second) == "0000:01:00.0,0000:02:00.0"


def test_pod_whose_devices_are_on_different_numa_nodes_is_refused(restricted: Cluster, directory: Path) -> None:
    """With the policy `restricted`, a pod whose devices are on two NUMA nodes fails; a pod with one device runs."""
    tree = Tree(directory)
    pci(tree, "0000:01:00.0", 0)
    pci(tree, "0000:82:00.0", 1, "02")
    with served(pci_source(tree, "example.com/gpu", "03"), pci_source(tree, "example.com/nic", "02")):
        restricted.wait_allocatable("example.com/gpu", 1)
        restricted.wait_allocatable("example.com/nic", 1)
        pod = restricted.start_pod("across", {"example.com/gpu": 1, "example.com/nic": 1}, restartPolicy="Never")
        assert refused(pod) == "TopologyAffinityError"
        assert address_of(restricted.start_pod("one", {"example.com/gpu": 1}).wait_running()) == "0000:01:00.0"


def test_numa_node_that_the_machine_has_not_is_refused_and_can_be_left_out(
    restricted: Cluster, directory: Path
) -> None:
    """The policy `restricted` refuses a device on a missing NUMA node; with `topology: false` a pod gets the device."""
    tree = Tree(directory)
    pci(tree, "0000:01:00.0", 7)
    anywhere = pci_source(tree, "example.com/anywhere", "03")
    anywhere.topology = False
    with served(pci_source(tree, "example.com/gpu", "03"), anywhere):
        restricted.wait_allocatable("example.com/gpu", 1)
        restricted.wait_allocatable("example.com/anywhere", 1)
        pod = restricted.start_pod("nowhere", {"example.com/gpu": 1}, restartPolicy="Never")
        assert refused(pod) == "TopologyAffinityError"
        other = restricted.start_pod("there", {"example.com/anywhere": 1}).wait_running()
        assert address_of(other, "PCIDEVICE_EXAMPLE_COM_ANYWHERE") == "0000:01:00.0"


class NumaPaths(PathSource):
    """Path devices whose NUMA node is the last digit of their name, since sysfs has none for made device nodes."""

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        from dataclasses import replace

        async for devices in super().watch():
            yield [replace(device, numa=int(device.container_edits.device_nodes[0].host[-1])) for device in devices]


def test_path_devices_are_aligned_with_each_other(restricted: Cluster, directory: Path) -> None:
    """The kubelet allocates path devices of two resources from one NUMA node."""
    for name in ("in-0", "in-1", "out-1"):
        null(directory / name)
    entries = [NumaPaths(f"{directory}/{kind}-*", resource=f"example.com/{kind}") for kind in ("in", "out")]
    with served(*entries):
        restricted.wait_allocatable("example.com/in", 2)
        restricted.wait_allocatable("example.com/out", 1)
        pod = restricted.start_pod("both", {"example.com/in": 1, "example.com/out": 1}).wait_running()
        assert pod.exec(["ls", str(directory)]).split() == ["in-1", "out-1"]


def test_pci_device_of_this_machine_reaches_a_container(cluster: Cluster) -> None:
    """A container gets the address of a PCI device of this machine in its environment, and the device nodes."""
    devices = PciSource(PciConfig(address="*")).scan()
    assert devices, "this machine has no PCI bus"
    device = min(devices, key=lambda one: len(one.container_edits.device_nodes))
    vendor, address = device.attributes["vendor"], device.id
    text = f"""
        resources:
        - name: example.com/real
          permissions: r
          devices: [{{pci: {{vendor: "{vendor}", address: "{address}"}}}}]
    """
    with served(ConfiguredSource(parse(text).resources[0])):
        cluster.wait_allocatable("example.com/real", 1)
        pod = cluster.start_pod("real", {"example.com/real": 1}).wait_running()
        assert address_of(pod, "PCIDEVICE_EXAMPLE_COM_REAL") == address
        for node in device.container_edits.device_nodes:
            pod.exec(["test", "-e", node.path])


def test_probe_withdraws_a_device_of_the_real_node_and_gives_it_back(cluster: Cluster, directory: Path) -> None:
    """A failed health probe lowers the node's allocatable, not its capacity, until the probe succeeds again."""
    null(directory / "a")
    null(directory / "b")
    bad = directory / "bad"
    text = f"""
        resources:
        - name: example.com/probed
          devices: [{{path: "{directory}/[ab]"}}]
          health:
            probe: {{command: [/bin/sh, -c, "! grep -q {{node}} {bad}"]}}
            period: 1
            failures: 2
            successes: 2
    """
    with served(ConfiguredSource(parse(text).resources[0])):
        cluster.wait_allocatable("example.com/probed", 2)
        bad.write_text(f"{directory}/b\n")
        cluster.wait_allocatable("example.com/probed", 1)
        assert cluster.capacity("example.com/probed") == 2
        pod = cluster.start_pod("one", {"example.com/probed": 1}).wait_running()
        assert pod.exec(["ls", str(directory)]).split() == ["a"]
        with pytest.raises(ExecError):
            pod.exec(["test", "-e", str(directory / "b")])
        bad.unlink()
        cluster.wait_allocatable("example.com/probed", 2)


def test_gpus_of_a_made_library_reach_containers_with_their_numa_nodes(
    restricted: Cluster, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod gets a pair of GPUs with NVLink on one NUMA node, and the GPUs' device nodes; the NVML library is fake.

    The GPUs are allocatable only when /dev/nvidia-uvm exists. An XID (a GPU's error) lowers allocatable by one.
    """
    machine = FakeGpus(directory / "machine", build_library(tmp_path))
    monkeypatch.setenv("FAKE_NVML", str(machine.state))
    dgx_1v(machine)
    dev = Path(machine.places.dev)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(8))):
        (dev / name).unlink(missing_ok=True)
        null(dev / name)
    gpus = NvidiaSource(NvidiaConfig(injection="nodes"), places=machine.places, resource="nvidia.com/gpu", period=1)
    (dev / "nvidia-uvm").unlink()  # on a headless machine, programs make this device node only later
    with served(gpus):
        restricted.wait_for(lambda: restricted.capacity("nvidia.com/gpu") == 8, 30, "the GPUs are listed")
        assert restricted.allocatable("nvidia.com/gpu") == 0
        null(dev / "nvidia-uvm")
        restricted.wait_allocatable("nvidia.com/gpu", 8)
        pod = restricted.start_pod("pair", {"nvidia.com/gpu": 2}).wait_running()
        nodes = pod.exec(["sh", "-c", "cd /dev; ls -d nvidia*"]).split()
        assert {"nvidiactl", "nvidia-uvm"} <= set(nodes)
        assert len(nodes) == 4
        one, other = (int(name.removeprefix("nvidia")) for name in nodes if name.removeprefix("nvidia").isdecimal())
        assert one // 4 == other // 4
        assert DGX1V[one][other] == 2
        assert address_of(pod, "NVIDIA_VISIBLE_DEVICES") == "void"
        machine.xid(7 if 7 not in (one, other) else 0, 79)
        restricted.wait_allocatable("nvidia.com/gpu", 7)
        assert restricted.capacity("nvidia.com/gpu") == 8
