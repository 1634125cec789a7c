"""Reads properties of GPUs from NVML: MIG partitions, links between GPUs, and load."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from deviceplugin.sources.nvidia.nvml import ANY, Gpu, Partition, field_value, optional, pci_address, text
from deviceplugin.topology import Link

_LEVELS: Final = {
    0: Link.SAME_BOARD,
    10: Link.ONE_SWITCH,
    20: Link.SEVERAL_SWITCHES,
    30: Link.HOST_BRIDGE,
    40: Link.SAME_CPU,
    50: Link.CROSS_CPU,
}
"""The link score for each of NVML's PCIe topology levels."""
_SWITCH: Final = 2
_THROTTLED: Final = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
_CLOCKS: Final = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}


def profile_of(compute: int, slices: int, memory: int, whole: int) -> str:
    """Return a MIG profile's name. compute, slices: the slices of the compute instance and of the GPU instance.

    memory, whole: the memory of the partition and of the GPU (MiB). The name contains the partition's memory in whole
    GiB, after rounding up to eighths of the GPU's memory. If a compute instance has fewer slices than its GPU instance,
    the name begins with the number of the compute instance's slices.
    """
    gib = -(-whole // 1024)
    eighths = -(-memory * 8 // whole) if whole else 0
    size = round(eighths * gib / 8) if whole else round(memory / 1024)
    return f"{slices}g.{size}gb" if compute == slices else f"{compute}c.{slices}g.{size}gb"


def with_partitions(nv: Any, handle: Any, gpu: Gpu, handles: dict[str, Any], partitions: dict[str, Partition]) -> Gpu:
    """Return the GPU with its present partitions. handles: a mapping to which the handle of each partition is added.

    partitions: for each UUID, the partition from an earlier call, which is not read again.
    """
    mode = optional(nv, nv.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != 1:
        return replace(gpu, partitions=None)
    present = []
    for index in range(optional(nv, nv.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        mig = optional(nv, nv.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if mig is None:
            continue
        uuid = text(optional(nv, nv.nvmlDeviceGetUUID, mig))
        if not uuid:
            continue
        handles[uuid] = mig
        if uuid not in partitions or partitions[uuid].index != index:
            partitions[uuid] = _read_partition(nv, handle, mig, uuid, index, gpu)
        present.append(partitions[uuid])
    return replace(gpu, partitions=tuple(present))


def _read_partition(nv: Any, parent: Any, mig: Any, uuid: str, index: int, gpu: Gpu) -> Partition:
    instance = optional(nv, nv.nvmlDeviceGetGpuInstanceId, mig)
    compute = optional(nv, nv.nvmlDeviceGetComputeInstanceId, mig)
    attributes = optional(nv, nv.nvmlDeviceGetAttributes_v2, mig)
    memory = int(attributes.memorySizeMB) if attributes is not None else 0
    profile = "unknown"
    if named := re.search(r" MIG (\S+)$", text(optional(nv, nv.nvmlDeviceGetName, mig))):
        profile = named[1]
    elif attributes is not None:
        slices = (int(attributes.computeInstanceSliceCount), int(attributes.gpuInstanceSliceCount))
        profile = profile_of(*slices, memory, gpu.memory)
    placement = info = None
    if instance is not None and (own := optional(nv, nv.nvmlDeviceGetGpuInstanceById, parent, instance)) is not None:
        info = optional(nv, nv.nvmlGpuInstanceGetInfo, own)
    if info is not None:
        placement = (int(info.placement.start), int(info.placement.size))
    instance, compute = (-1 if number is None else number for number in (instance, compute))
    return Partition(uuid, index, profile, instance, compute, memory, placement)


def read_links(nv: Any, gpus: Sequence[Gpu], handles: Mapping[str, Any]) -> Mapping[frozenset[str], float]:
    """Return the link score of each pair of GPUs with a link. A pair whose link NVML cannot read is left out."""
    direct: Counter[frozenset[str]] = Counter()
    switched: Counter[str] = Counter()
    by_address = {gpu.address: gpu.uuid for gpu in gpus if gpu.address}
    for gpu in gpus:
        if (handle := handles.get(gpu.uuid)) is None:
            continue
        with contextlib.suppress(nv.NVMLError):
            for address in _nvlink_peers(nv, handle):
                if address is None:
                    switched[gpu.uuid] += 1
                elif (peer := by_address.get(address)) is not None and peer != gpu.uuid:
                    direct[frozenset((gpu.uuid, peer))] += 1
    scores: dict[frozenset[str], float] = {}
    for uuid, other in combinations((gpu.uuid for gpu in gpus), 2):
        pair = frozenset((uuid, other))
        # A direct link is counted at both of its GPUs, so the count is halved. Links to an NVLink switch connect each
        # pair of GPUs at the switch.
        count = -(-direct[pair] // 2) + min(switched[uuid], switched[other])
        level = -1
        # A KeyError means that a GPU has no handle, because the GPU could not be read.
        with contextlib.suppress(nv.NVMLError, KeyError):
            level = nv.nvmlDeviceGetTopologyCommonAncestor(handles[uuid], handles[other])
        if score := Link.NVLINK * count + _LEVELS.get(level, 0):
            scores[pair] = float(score)
    return scores


def _nvlink_peers(nv: Any, handle: Any) -> Iterator[str | None]:
    """Yield the PCI address of the other end of each active NVLink, or None for a switch."""
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        if not optional(nv, nv.nvmlDeviceGetNvLinkState, handle, link):
            continue
        if optional(nv, nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _SWITCH:
            yield None
        elif (pci := optional(nv, nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
            yield pci_address(text(pci.busId))


def measure_memory(nv: Any, handle: Any) -> dict[str, Any]:
    """Return the total and used memory of a GPU or partition, in bytes."""
    memory = optional(nv, nv.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return {}
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def measure_gpu(nv: Any, handle: Any) -> dict[str, Any]:
    """Return the load of a GPU in base units (such as bytes); None for a value that the GPU does not report."""

    def scaled(factor: float, function: Callable[..., Any], *arguments: Any) -> float | None:
        value = optional(nv, function, handle, *arguments)
        value = value[0] if isinstance(value, list) else value
        return None if value is None else value * factor

    def nvlink_bytes(field: int) -> float | None:
        kib = field_value(nv, handle, field, ANY)  # ANY requests the sum over all links.
        return None if kib is None else kib * 1024

    values = measure_memory(nv, handle)
    if (busy := optional(nv, nv.nvmlDeviceGetUtilizationRates, handle)) is not None:
        values |= {"utilization_ratio": busy.gpu / 100, "memory_utilization_ratio": busy.memory / 100}
    values |= {
        "encoder_utilization_ratio": scaled(0.01, nv.nvmlDeviceGetEncoderUtilization),
        "decoder_utilization_ratio": scaled(0.01, nv.nvmlDeviceGetDecoderUtilization),
        "temperature_celsius": {
            "gpu": scaled(1, nv.nvmlDeviceGetTemperature, 0),
            "memory": field_value(nv, handle, nv.NVML_FI_DEV_MEMORY_TEMP) or None,
        },
        "power_watts": scaled(0.001, nv.nvmlDeviceGetPowerUsage),
        "power_limit_watts": scaled(0.001, nv.nvmlDeviceGetEnforcedPowerLimit),
        "energy_joules_total": scaled(0.001, nv.nvmlDeviceGetTotalEnergyConsumption),
        "clock_hertz": {name: scaled(1e6, nv.nvmlDeviceGetClockInfo, kind) for kind, name in _CLOCKS.items()},
        "ecc_errors_total": {
            "corrected": scaled(1, nv.nvmlDeviceGetTotalEccErrors, 0, 1),
            "uncorrected": scaled(1, nv.nvmlDeviceGetTotalEccErrors, 1, 1),
        },
        "pcie_bytes_per_second": {
            "transmit": scaled(1000, nv.nvmlDeviceGetPcieThroughput, 0),
            "receive": scaled(1000, nv.nvmlDeviceGetPcieThroughput, 1),
        },
        "pcie_replays_total": scaled(1, nv.nvmlDeviceGetPcieReplayCounter),
        "nvlink_bytes_total": {
            "transmit": nvlink_bytes(nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            "receive": nvlink_bytes(nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        },
        "fan_ratio": scaled(0.01, nv.nvmlDeviceGetFanSpeed),
    }
    if (reasons := optional(nv, nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle)) is not None:
        values["throttled"] = {name: int(bool(reasons & bit)) for bit, name in _THROTTLED.items()}
    return values
