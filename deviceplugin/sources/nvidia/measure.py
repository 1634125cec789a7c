"""The load of GPUs and partitions as NVML tells it, in base units."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

from deviceplugin.sources.nvidia.library import ANY, field_value, optional

_LOG: Final = logging.getLogger(__name__)

_THROTTLED: Final = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
_CLOCKS: Final = {0: "graphics", 1: "sm", 2: "memory", 3: "video"}


def measure(nv: Any, handles: Mapping[str, Any], gpus: Container[str], ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how busy GPUs and partitions are, by UUID; what one cannot tell is left out.

    handles: of GPUs and partitions, gpus: which of them are GPUs.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in ids:
        handle = handles.get(name)
        if handle is None:
            continue
        try:
            whole = name in gpus
            found[name] = _measure_gpu(nv, handle) if whole else _measure_memory(nv, handle)
        except nv.NVMLError as error:
            _LOG.debug("%s cannot be measured: %s", name, error)
    return found


def _measure_memory(nv: Any, handle: Any) -> dict[str, Any]:
    memory = optional(nv, nv.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return {}
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _measure_gpu(nv: Any, handle: Any) -> dict[str, Any]:
    def scaled(factor: float, function: Callable[..., Any], *arguments: Any) -> float | None:
        value = optional(nv, function, handle, *arguments)
        value = value[0] if isinstance(value, list) else value
        return None if value is None else value * factor

    values = _measure_memory(nv, handle)
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
            "transmit": _bytes_of_kib(nv, handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            "receive": _bytes_of_kib(nv, handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        },
        "fan_ratio": scaled(0.01, nv.nvmlDeviceGetFanSpeed),
    }
    if (reasons := optional(nv, nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle)) is not None:
        values["throttled"] = {name: int(bool(reasons & bit)) for bit, name in _THROTTLED.items()}
    return values


def _bytes_of_kib(nv: Any, handle: Any, wanted: int) -> float | None:
    value = field_value(nv, handle, wanted, ANY)  # of all links together
    return None if value is None else value * 1024
