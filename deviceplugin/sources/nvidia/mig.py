"""MIG partitions: what NVML tells of them, how their profiles are called, and which have been seen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from deviceplugin.sources.nvidia.library import optional, text
from deviceplugin.sources.nvidia.values import Gpu, Partition


def resource_of(profile: str) -> str:
    """Return what users know partitions of a profile by, behind the domain: mig-1g.10gb, mig-1g.10gb.me."""
    return "mig-" + profile.replace("+", ".")


def profile_of(compute: int, slices: int, memory: int, whole: int) -> str:
    """Return a MIG profile's name from its slices and its memory and the GPU's, both in MiB.

    NVIDIA names the memory by eighths of the GPU's, rounded up, in whole GiB. A compute instance that is
    a part of its GPU instance carries its own slices in front.
    """
    gib = -(-whole // 1024)
    eighths = -(-memory * 8 // whole) if whole else 0
    size = round(eighths * gib / 8) if whole else round(memory / 1024)
    return f"{slices}g.{size}gb" if compute == slices else f"{compute}c.{slices}g.{size}gb"


class PartitionReader:
    """Reads the partitions of GPUs; one that is known is not asked again what it is."""

    def __init__(self) -> None:
        self._known: dict[str, Partition] = {}

    def clear(self) -> None:
        """Forget all partitions."""
        self._known.clear()

    def read(self, nv: Any, handle: Any, gpu: Gpu, handles: dict[str, Any]) -> Gpu:
        """Return the GPU with the partitions that it has now."""
        mode = optional(nv, nv.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != 1:
            return gpu if gpu.partitions is None else replace(gpu, partitions=None)
        found = []
        for index in range(optional(nv, nv.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            mig = optional(nv, nv.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if mig is None:
                continue
            uuid = text(optional(nv, nv.nvmlDeviceGetUUID, mig))
            if not uuid:
                continue
            handles[uuid] = mig
            known = self._known.get(uuid)
            if known is None or known.index != index:
                known = self._known[uuid] = _read_partition(nv, handle, mig, uuid, index, gpu)
            found.append(known)
        partitions = tuple(found)
        return gpu if gpu.partitions == partitions else replace(gpu, partitions=partitions)


def _read_partition(nv: Any, parent: Any, mig: Any, uuid: str, index: int, gpu: Gpu) -> Partition:
    instance = optional(nv, nv.nvmlDeviceGetGpuInstanceId, mig)
    compute = optional(nv, nv.nvmlDeviceGetComputeInstanceId, mig)
    attributes = optional(nv, nv.nvmlDeviceGetAttributes_v2, mig)
    name = text(optional(nv, nv.nvmlDeviceGetName, mig))
    memory = int(attributes.memorySizeMB) if attributes is not None else 0
    named = re.search(r" MIG (\S+)$", name)
    if named:
        profile = named[1]
    elif attributes is not None:
        slices = (int(attributes.computeInstanceSliceCount), int(attributes.gpuInstanceSliceCount))
        profile = profile_of(*slices, memory, gpu.memory)
    else:
        profile = "unknown"
    placement = None
    if instance is not None and (held := optional(nv, nv.nvmlDeviceGetGpuInstanceById, parent, instance)) is not None:
        info = optional(nv, nv.nvmlGpuInstanceGetInfo, held)
        if info is not None:
            placement = (int(info.placement.start), int(info.placement.size))
    return Partition(
        uuid,
        index,
        profile,
        instance if instance is not None else -1,
        compute if compute is not None else -1,
        memory,
        placement,
    )


class SeenProfiles:
    """The MIG profiles that have been seen so far."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._changed = asyncio.Event()

    def add(self, profile: str) -> None:
        """Note a profile, if it is new."""
        if profile not in self._names:
            self._names.append(profile)
            self._changed.set()

    async def watch(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield all of them, whenever there is one more."""
        while True:
            self._changed.clear()
            if self._names:
                yield tuple(self._names)
            await self._changed.wait()
