"""How a container gets a GPU: its names in CDI specs, and its device nodes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Final, Literal

from deviceplugin.device import DeviceNode
from deviceplugin.sources.nvidia.places import Places
from deviceplugin.sources.nvidia.values import Gpu, Partition

_LOG: Final = logging.getLogger(__name__)

CDI_KIND: Final = "nvidia.com/gpu"
COMMON_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

Injection = Literal["env", "cdi", "nodes"]


def device_nodes(places: Places, gpu: Gpu, partition: Partition | None) -> tuple[list[DeviceNode], list[DeviceNode]]:
    """Return the device nodes that are a device's own, and those that it shares with others."""
    dev = places.dev
    whole = [] if gpu.minor is None else [DeviceNode(f"{dev}/nvidia{gpu.minor}", f"/dev/nvidia{gpu.minor}")]
    common = [DeviceNode(f"{dev}/{name}", f"/dev/{name}") for name in COMMON_NODES if os.path.exists(f"{dev}/{name}")]
    if partition is None:
        return whole, common
    base = f"{places.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{partition.instance}"
    caps = [_capability(f"{base}/access"), _capability(f"{base}/ci{partition.compute}/access")]
    nodes = [
        DeviceNode(f"{dev}/nvidia-caps/nvidia-cap{cap}", f"/dev/nvidia-caps/nvidia-cap{cap}")
        for cap in caps
        if cap is not None
    ]
    # Compute instances of one GPU instance share the first; the last is the partition's own.
    return nodes[-1:], [*whole, *common, *nodes[:-1]]


def _capability(path: str) -> int | None:
    """Return the minor number of the node that gives a MIG capability."""
    found = re.search(r"DeviceFileMinor:\s*([0-9]+)", _whole(path))
    return int(found[1]) if found else None


def _whole(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


class CdiSpecs:
    """The names of nvidia.com/gpu that CDI specs know; read again when a file changes."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._names: frozenset[str] = frozenset()
        self._directories = directories
        self._seen: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}

    def read(self) -> None:
        """Look at the files; blocks."""
        seen: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}
        for directory in self._directories:
            try:
                files = [f"{directory}/{name}" for name in sorted(os.listdir(directory))]
            except OSError:
                continue
            for file in files:
                if file.endswith((".json", ".yaml", ".yml")):
                    with contextlib.suppress(OSError):
                        status = os.stat(file)
                        state = (status.st_ino, status.st_mtime_ns, status.st_size)
                        known = self._seen.get(file)
                        seen[file] = known if known is not None and known[0] == state else (state, _spec_names(file))
        self._seen = seen
        self._names = frozenset(name for _, names in seen.values() for name in names)

    def name_of(self, gpu: Gpu, partition: Partition | None) -> str | None:
        """Return the name under which a GPU or a partition is known, as of the last `read`."""
        if partition is None:
            names = (gpu.uuid, str(gpu.index), f"gpu{gpu.index}")
        else:
            place = f"{gpu.index}:{partition.index}"
            names = (partition.uuid, place, f"mig{place}")
        return next((name for name in names if name in self._names), None)


def _spec_names(file: str) -> frozenset[str]:
    import yaml

    text = _whole(file)
    if CDI_KIND not in text:
        return frozenset()
    try:
        spec = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
        if spec.get("kind") != CDI_KIND:
            return frozenset()
        return frozenset(str(device["name"]) for device in spec.get("devices", ()))
    except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        _LOG.warning("%s is no CDI spec: %s", file, error)
        return frozenset()
