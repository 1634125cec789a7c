"""The devices that GPUs and partitions become."""

from __future__ import annotations

import re
from collections.abc import Iterable

from deviceplugin.device import AttributeValue, ContainerEdits, Device, Version
from deviceplugin.naming import PCI_BUS_ID, PCIE_ROOT
from deviceplugin.sources.nvidia.injection import CDI_KIND, CdiSpecs, Injection, device_nodes
from deviceplugin.sources.nvidia.places import Places
from deviceplugin.sources.nvidia.values import Gpu, NvmlScan, Partition


class DeviceMaker:
    """Makes devices; one of which nothing has changed is made once."""

    def __init__(self, places: Places, injection: Injection) -> None:
        self._places = places
        self._injection = injection
        self._specs = CdiSpecs(places.cdi)
        self._made: dict[str, tuple[tuple[object, ...], Device]] = {}

    def make(self, listed: Iterable[tuple[Gpu, Partition | None]], scan: NvmlScan) -> dict[str, Device]:
        """Return the devices of these GPUs or partitions of them, by UUID; reads CDI specs and proc, blocks."""
        if self._injection == "cdi":
            self._specs.read()
        made: dict[str, tuple[tuple[object, ...], Device]] = {}
        for gpu, partition in listed:
            name = gpu.uuid if partition is None else partition.uuid
            cdi = self._specs.name_of(gpu, partition) if self._injection == "cdi" else None
            facts = (gpu.uuid if partition is None else partition, gpu, scan.driver, scan.cuda, cdi)
            known = self._made.get(name)
            if known is not None and known[0] == facts:
                made[name] = known
            else:
                made[name] = facts, self._describe(gpu, partition, scan, cdi)
        self._made = made
        return {name: device for name, (_, device) in made.items()}

    def _describe(self, gpu: Gpu, partition: Partition | None, scan: NvmlScan, cdi: str | None) -> Device:
        attributes: dict[str, AttributeValue | None] = {
            "type": "gpu" if partition is None else "mig",
            "uuid": gpu.uuid if partition is None else partition.uuid,
            "index": gpu.index,
            "minor": gpu.minor,
            PCI_BUS_ID: gpu.address,
            PCIE_ROOT: gpu.root,
            "numaNode": gpu.numa,
            "productName": gpu.product,
            "brand": gpu.brand,
            "serial": gpu.serial,
            "architecture": gpu.architecture,
            "cudaComputeCapability": _version(*gpu.capability) if gpu.capability else None,
            "driverVersion": _version(*re.findall(r"[0-9]+", scan.driver)),
            "cudaDriverVersion": _version(*re.findall(r"[0-9]+", scan.cuda)),
        }
        memory = gpu.memory
        if partition is not None:
            memory = partition.memory
            start, size = partition.placement or (None, None)
            attributes |= {
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
        own, common = device_nodes(self._places, gpu, partition) if self._injection == "nodes" else ([], [])
        return Device(
            str(attributes["uuid"]),
            nodes=own,
            numa=gpu.numa,
            attributes={key: value for key, value in attributes.items() if value not in (None, "")},
            capacity={"memory": f"{memory}Mi"} if memory else {},
            edits=ContainerEdits(nodes=common, cdi=[f"{CDI_KIND}={cdi}"] if cdi else ()),
            identity=f"uuid:{attributes['uuid']}",
        )


def place_of(device: Device) -> tuple[int, int]:
    """Return where a GPU, or a partition of it, stands among the others."""
    index = int(device.attributes.get("index", 0))
    return (int(device.attributes["parentIndex"]), index) if "parentIndex" in device.attributes else (index, 0)


def _version(*numbers: int | str) -> Version | None:
    """Return up to three numbers as a semantic version: 535.104.05 is 535.104.5, 12.2 is 12.2.0."""
    parts = [str(int(number)) for number in numbers[:3]]
    return Version(".".join((*parts, "0", "0")[:3])) if parts else None
