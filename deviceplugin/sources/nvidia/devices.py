"""Makes devices from GPUs and MIG partitions.

Containers get these devices by environment variable, CDI name or device node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

from deviceplugin import sysfs
from deviceplugin.cdi_specs import names_of
from deviceplugin.device import AttributeValue, ContainerEdits, Device, DeviceNode, Health
from deviceplugin.identity import PCI, UUID, identity_of, node_token
from deviceplugin.sources import bus
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlScan, Partition, Places, version
from deviceplugin.topology import Link

CDI_KIND: Final = "nvidia.com/gpu"
NEEDED_NODES: Final = ("nvidiactl", "nvidia-uvm")
"""The device nodes that every program needs to compute on a GPU, and that the kernel modules do not create."""
COMMON_NODES: Final = (*NEEDED_NODES, "nvidia-uvm-tools", "nvidia-modeset")
_MAJOR: Final = 195
"""The major number of the GPUs' device nodes (Linux, Documentation/admin-guide/devices.txt)."""


def make_devices(
    listed: Iterable[tuple[Gpu, Partition | None]], scan: NvmlScan, places: Places, injection: str
) -> list[Device]:
    """Return a `Device` for each of these GPUs or partitions.

    The function blocks, because it reads CDI specs and /proc.
    Each returned device is healthy, unless a device node that its containers need is missing.
    """
    names = names_of(CDI_KIND, places.cdi) if injection == "cdi" else frozenset()
    made = []
    for gpu, partition in listed:
        nodes = _device_nodes(places, gpu, partition) if injection == "nodes" else ((), ())
        device = _make_device(gpu, partition, scan, nodes, _cdi_name_of(gpu, partition, names), _tokens(places, gpu))
        if injection == "nodes" and (why := _missing(device, places, partition)):
            device = device.with_health(Health.UNHEALTHY, why)
        made.append(device)
    return made


def _tokens(places: Places, gpu: Gpu) -> list[str]:
    """Return the tokens of a GPU's PCI function and device node, also if the node does not exist yet."""
    tokens = [f"{PCI}{gpu.address}"] if gpu.address else []
    if gpu.minor is not None:
        node = identity_of([f"{places.dev}/nvidia{gpu.minor}"], files=False)
        tokens += node or [node_token("char", _MAJOR, gpu.minor)]
    return tokens


def _missing(device: Device, places: Places, partition: Partition | None) -> str:
    """Return a message about a missing device node that containers with this device need; "" if no node is missing."""
    needed = [node.host for node in device.container_edits.device_nodes]
    needed += [f"{places.dev}/{name}" for name in NEEDED_NODES]
    makers = "`nvidia-modprobe -u -c 0`, nvidia-persistenced or a udev rule"
    if partition is not None and not device.nodes:
        return f"{places.proc}/driver/nvidia/capabilities names no device node of the partition"
    return bus.missing(needed, makers)


_OwnAndShared = tuple[Sequence[DeviceNode], Sequence[DeviceNode]]
"""A pair: the device nodes that belong to one device alone, and the device nodes that it shares with other devices."""


def _make_device(
    gpu: Gpu,
    partition: Partition | None,
    scan: NvmlScan,
    nodes: _OwnAndShared,
    cdi: str | None,
    larger: Sequence[str],
) -> Device:
    attributes: dict[str, AttributeValue | None] = {
        "type": "gpu",
        "uuid": gpu.uuid,
        **gpu.attributes,
        "driverVersion": version(re.findall(r"[0-9]+", scan.driver)),
        "cudaDriverVersion": version(re.findall(r"[0-9]+", scan.cuda)),
    }
    if partition is not None:
        start, size = partition.placement or (None, None)
        attributes |= {
            "type": "mig",
            "uuid": partition.uuid,
            "index": partition.index,
            "profile": partition.profile,
            "parentUUID": gpu.uuid,
            "parentIndex": gpu.index,
            "parentMinor": gpu.minor,
            "minor": None,
            "serial": None,
            "gpuInstance": partition.instance,
            "computeInstance": partition.compute,
            "placementStart": start,
            "placementSize": size,
        }
    described = gpu if partition is None else partition
    own, common = nodes
    return Device(
        described.uuid,
        nodes=own,
        numa=gpu.numa,
        attributes={key: value for key, value in attributes.items() if value not in (None, "")},
        capacity={"memory": f"{described.memory}Mi"} if described.memory else {},
        edits=ContainerEdits(nodes=common, cdi=[f"{CDI_KIND}={cdi}"] if cdi else ()),
        identity=f"{UUID}{described.uuid}",
        part_of=larger if partition is None else [f"{UUID}{gpu.uuid}", *larger],
    )


def position_of(device: Device) -> tuple[int, int]:
    """Return (index of a device's GPU, index of the partition on this GPU), as sort key."""
    index = int(device.attributes.get("index", 0))
    return (int(device.attributes["parentIndex"]), index) if "parentIndex" in device.attributes else (index, 0)


def resource_of(profile: str) -> str:
    """Return the name (without domain) of the resource for a MIG profile's partitions: mig-1g.10gb, mig-1g.10gb.me."""
    return "mig-" + profile.replace("+", ".")


def links_of_devices(
    between: Mapping[frozenset[str], float], made: Iterable[str], parents: Mapping[str, str]
) -> Mapping[frozenset[str], float]:
    """Return the link score of each pair of devices. made: the devices' UUIDs. between: the scores of pairs of GPUs.

    parents: for each partition, the GPU of the partition.
    """
    scores: dict[frozenset[str], float] = {}
    for uuid, other in combinations(made, 2):
        gpus = frozenset((parents.get(uuid, uuid), parents.get(other, other)))
        score = float(Link.SAME_BOARD) if len(gpus) == 1 else between.get(gpus, 0.0)
        if parents and len(gpus) == 2:
            # NVLink does not connect partitions, so only the score of the PCIe connection remains.
            score %= Link.NVLINK
        if score:
            scores[frozenset((uuid, other))] = score
    return scores


def _device_nodes(places: Places, gpu: Gpu, partition: Partition | None) -> _OwnAndShared:
    def node(name: str) -> DeviceNode:
        return DeviceNode(f"{places.dev}/{name}", f"/dev/{name}")

    whole = [] if gpu.minor is None else [node(f"nvidia{gpu.minor}")]
    common = [node(name) for name in COMMON_NODES if os.path.exists(f"{places.dev}/{name}")]
    if partition is None:
        return whole, common
    base = f"{places.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{partition.instance}"
    texts = (sysfs.read(f"{base}/access"), sysfs.read(f"{base}/ci{partition.compute}/access"))
    minors = [re.search(r"DeviceFileMinor:\s*([0-9]+)", text or "") for text in texts]
    nodes = [node(f"nvidia-caps/nvidia-cap{minor[1]}") for minor in minors if minor is not None]
    # `nodes` are the node of the GPU instance, which all its compute instances share, and this partition's own node.
    return nodes[-1:], [*whole, *common, *nodes[:-1]]


def _cdi_name_of(gpu: Gpu, partition: Partition | None, in_spec: Collection[str]) -> str | None:
    if partition is None:
        names = (gpu.uuid, str(gpu.index), f"gpu{gpu.index}")
    else:
        place = f"{gpu.index}:{partition.index}"
        names = (partition.uuid, place, f"mig{place}")
    return next(filter(in_spec.__contains__, names), None)
