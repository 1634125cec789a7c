"""The devices made of GPUs and partitions, and how a container gets them: by variable, CDI name or device node."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Final

from deviceplugin.device import AttributeValue, ContainerEdits, Device, DeviceNode
from deviceplugin.sources.nvidia.nvml import Gpu, NvmlScan, Partition, Places, version
from deviceplugin.sources.nvidia.readings import NVLINK, SAME_BOARD

_LOG: Final = logging.getLogger(__name__)

CDI_KIND: Final = "nvidia.com/gpu"
COMMON_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class DeviceMaker:
    """Makes devices; one of which no fact has changed is made once."""

    def __init__(self, places: Places, injection: str) -> None:
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
            uuid = gpu.uuid if partition is None else partition.uuid
            cdi = self._specs.name_of(gpu, partition) if self._injection == "cdi" else None
            facts = (gpu, partition, scan.driver, scan.cuda, cdi)
            known = self._made.get(uuid)
            if known is None or known[0] != facts:
                known = facts, self._describe(uuid, gpu, partition, scan, cdi)
            made[uuid] = known
        self._made = made
        return {uuid: device for uuid, (_, device) in made.items()}

    def _describe(self, uuid: str, gpu: Gpu, partition: Partition | None, scan: NvmlScan, cdi: str | None) -> Device:
        attributes: dict[str, AttributeValue | None] = {
            "type": "gpu" if partition is None else "mig",
            "uuid": uuid,
            **gpu.attributes,
            "driverVersion": version(re.findall(r"[0-9]+", scan.driver)),
            "cudaDriverVersion": version(re.findall(r"[0-9]+", scan.cuda)),
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
            uuid,
            nodes=own,
            numa=gpu.numa,
            attributes={key: value for key, value in attributes.items() if value not in (None, "")},
            capacity={"memory": f"{memory}Mi"} if memory else {},
            edits=ContainerEdits(nodes=common, cdi=[f"{CDI_KIND}={cdi}"] if cdi else ()),
            identity=f"uuid:{uuid}",
        )


def position_of(device: Device) -> tuple[int, int]:
    """Return the index of a device's GPU, and of the partition on it."""
    index = int(device.attributes.get("index", 0))
    return (int(device.attributes["parentIndex"]), index) if "parentIndex" in device.attributes else (index, 0)


def resource_of(profile: str) -> str:
    """Return the name of a profile's resource without the domain: mig-1g.10gb, mig-1g.10gb.me."""
    return "mig-" + profile.replace("+", ".")


def links_of_devices(
    between: Mapping[frozenset[str], float], made: Iterable[str], parents: Mapping[str, str]
) -> Mapping[frozenset[str], float]:
    """Return the link scores of the devices that are listed.

    between: scores of pairs of GPUs. made: UUIDs of the devices. parents: UUIDs of partitions' GPUs.
    """
    scores: dict[frozenset[str], float] = {}
    for one, other in combinations(made, 2):
        gpus = frozenset((parents.get(one, one), parents.get(other, other)))
        score = SAME_BOARD if len(gpus) == 1 else between.get(gpus, 0.0)
        if parents and len(gpus) == 2:
            score %= NVLINK  # NVLink does not connect partitions; the PCIe level remains
        if score:
            scores[frozenset((one, other))] = score
    return MappingProxyType(scores)


def device_nodes(places: Places, gpu: Gpu, partition: Partition | None) -> tuple[list[DeviceNode], list[DeviceNode]]:
    """Return the device nodes that are a device's own, and those that it shares with others."""

    def node(name: str) -> DeviceNode:
        return DeviceNode(f"{places.dev}/{name}", f"/dev/{name}")

    whole = [] if gpu.minor is None else [node(f"nvidia{gpu.minor}")]
    common = [node(name) for name in COMMON_NODES if os.path.exists(f"{places.dev}/{name}")]
    if partition is None:
        return whole, common
    base = f"{places.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{partition.instance}"
    texts = (_read(f"{base}/access"), _read(f"{base}/ci{partition.compute}/access"))
    minors = [re.search(r"DeviceFileMinor:\s*([0-9]+)", text) for text in texts]
    nodes = [node(f"nvidia-caps/nvidia-cap{minor[1]}") for minor in minors if minor is not None]
    # Compute instances of one GPU instance share the first; the last is the partition's own.
    return nodes[-1:], [*whole, *common, *nodes[:-1]]


class CdiSpecs:
    """The names that CDI specs have for devices of nvidia.com/gpu; a file is read again when it has changed."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories
        self._files: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}

    def read(self) -> None:
        """Read the files that have changed; blocks."""
        files: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}
        for directory in self._directories:
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(directory)):
                    file = f"{directory}/{name}"
                    if name.endswith((".json", ".yaml", ".yml")) and (state := _state_of(file)) is not None:
                        known = self._files.get(file)
                        files[file] = known if known and known[0] == state else (state, _names_in_spec(file))
        self._files = files

    def name_of(self, gpu: Gpu, partition: Partition | None) -> str | None:
        """Return the name of a GPU or a partition, as of the last `read`."""
        if partition is None:
            names = (gpu.uuid, str(gpu.index), f"gpu{gpu.index}")
        else:
            place = f"{gpu.index}:{partition.index}"
            names = (partition.uuid, place, f"mig{place}")
        return next((name for name in names if any(name in known for _, known in self._files.values())), None)


def _state_of(file: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _names_in_spec(file: str) -> frozenset[str]:
    import yaml

    text = _read(file)
    if CDI_KIND not in text:
        return frozenset()
    try:
        spec = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
        if spec.get("kind") != CDI_KIND:
            return frozenset()
        return frozenset(str(device["name"]) for device in spec.get("devices", ()))
    except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        _LOG.warning("%s cannot be read as a CDI spec: %s", file, error)
        return frozenset()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
