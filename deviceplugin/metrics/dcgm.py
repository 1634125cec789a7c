"""Serves metrics also under the names of NVIDIA's DCGM exporter, for dashboards that use these names.

A metric without a measured value is left out. For a MIG partition, the label UUID is the UUID of the partition's GPU.
The labels namespace, pod and container are set only if exactly one container holds the device. If each holder of a
shared device had a series, sums would count the device's load several times. The metric `deviceplugin_allocation_info`
shows the holders of shared devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, Metric, UnknownMetricFamily

from deviceplugin.metrics.load import Value
from deviceplugin.metrics.views import AgentView, DeviceView

MIB: Final = 1024 * 1024


class Name(NamedTuple):
    """A metric of NVIDIA's exporter, and the quantity from which its value is computed.

    quantity: the name of the quantity in the result of the hook `measure`. unit: the number by which the measured value
    is divided. part: if the quantity has several numbers, the label value of the number to use.
    """

    name: str
    about: str
    quantity: str
    unit: float = 1.0
    part: str = ""


NAMES: Final = (
    Name("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", "utilization_ratio", 0.01),
    Name("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", "memory_utilization_ratio", 0.01),
    Name("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", "encoder_utilization_ratio", 0.01),
    Name("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", "decoder_utilization_ratio", 0.01),
    Name("DCGM_FI_DEV_FB_USED", "Memory in use (in MiB).", "memory_used_bytes", MIB),
    Name("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", "temperature_celsius", part="gpu"),
    Name("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).", "temperature_celsius", part="memory"),
    Name("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", "power_watts"),
    Name(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy since the driver was loaded (in mJ).",
        "energy_joules_total",
        0.001,
    ),
    Name("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", "clock_hertz", 1e6, "sm"),
    Name("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", "clock_hertz", 1e6, "memory"),
    Name("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Corrected memory errors.", "ecc_errors_total", part="corrected"),
    Name("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected memory errors.", "ecc_errors_total", part="uncorrected"),
    Name("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe retries.", "pcie_replays_total"),
)
FREE: Final = Name("DCGM_FI_DEV_FB_FREE", "Free memory (in MiB).", "memory_total_bytes", MIB)
# DCGM_FI_DEV_XID_ERRORS is not served, because its value in NVIDIA's exporter, the last XID code, is not a count.
XIDS: Final = Name("DCGM_EXP_XID_ERRORS_COUNT", "XID errors since the agent's start, by code.", "")


def families(view: AgentView) -> Iterable[Metric]:
    """Return the metric families for which at least one device has a value."""
    host = view.node
    made: dict[str, GaugeMetricFamily | UnknownMetricFamily] = {}

    def add(name: Name, labels: Mapping[str, str], value: float) -> None:
        if name.name not in made:
            # A counter of NVIDIA has no type here, because in OpenMetrics the name of a counter must end with _total.
            make = UnknownMetricFamily if name.quantity.endswith("_total") else GaugeMetricFamily
            made[name.name] = make(name.name, name.about, labels=tuple(labels))
        made[name.name].add_metric(tuple(labels.values()), value / name.unit)

    for resource in view.resources:
        for number, seen in enumerate(resource.devices):
            if not seen.load:
                continue
            labels = _labels(seen, number, host)
            for name in NAMES:
                if (value := _part(seen.load.get(name.quantity), name.part)) is not None:
                    add(name, labels, value)
            used, total = _part(seen.load.get("memory_used_bytes")), _part(seen.load.get("memory_total_bytes"))
            if used is not None and total is not None:
                add(FREE, labels, total - used)
            codes = seen.load.get("xid_errors_total")
            for code, count in codes.items() if isinstance(codes, dict) else ():
                add(XIDS, {**labels, "xid": code}, count)
    return made.values()


def _labels(seen: DeviceView, number: int, host: str) -> dict[str, str]:
    attributes = seen.device.attributes

    def attribute(*names: str) -> str:
        return next((str(attributes[name]) for name in names if name in attributes), "")

    part = "parentUUID" in attributes
    index = attribute("parentIndex") if part else attribute("index") or str(number)
    minor = attribute("parentMinor") if part else attribute("minor") or index
    instance = attribute("gpuInstance") or seen.device.id
    if attribute("computeInstance") not in ("", "0"):
        # Each GPU instance may have several compute instances, so the id names both instances.
        instance += f"/{attribute('computeInstance')}"
    holder = seen.holders[0] if len(seen.holders) == 1 else None
    return {
        "gpu": index,
        "UUID": attribute("parentUUID", "uuid") or seen.device.id,
        "device": f"nvidia{minor}" if minor else "",
        "modelName": attribute("productName", "model"),
        "Hostname": host,
        # Prometheus treats an empty label as a missing label.
        "GPU_I_PROFILE": attribute("profile") if part else "",
        "GPU_I_ID": instance if part else "",
        "namespace": holder.namespace if holder is not None else "",
        "pod": holder.pod if holder is not None else "",
        "container": holder.container if holder is not None else "",
    }


def _part(value: Value | None, part: str = "") -> float | None:
    if isinstance(value, dict):
        return value.get(part) if part else None
    return value if part in ("", "gpu") else None
