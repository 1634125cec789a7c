"""Metrics with the names of the DCGM exporter."""

from __future__ import annotations

from typing import Any

from deviceplugin.device import Device
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.metrics import dcgm, load
from deviceplugin.metrics.views import AgentView
from tests.metrics.views import Still, resource

ATTRIBUTES: dict[str, str | int] = {"uuid": "GPU-1", "index": 3, "productName": "H200"}
FULL: dict[str, Any] = {
    "utilization_ratio": 0.5,
    "memory_used_bytes": 10 * 2**20,
    "memory_total_bytes": 100 * 2**20,
    "temperature_celsius": {"gpu": 40.0, "memory": 50.0},
    "energy_joules_total": 2.5,
    "clock_hertz": {"sm": 1.5e9},
    "ecc_errors_total": {"uncorrected": 2},
    "xid_errors_total": {"79": 1},
}


def view(*holders: PodContainer, load: Any = None) -> AgentView:
    still = Still(resource(Device("g", attributes=ATTRIBUTES), "h", held={"g": list(holders)}))
    return still.measured(g=FULL if load is None else load).view()


def values(seen: AgentView) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in dcgm.families(seen)}


def test_values_are_in_dcgm_s_units() -> None:
    """Values are in the units of DCGM: percent, MiB, MHz, mJ."""
    assert {name: rows[0][1] for name, rows in values(view()).items()} == {
        "DCGM_FI_DEV_GPU_UTIL": 50,
        "DCGM_FI_DEV_FB_USED": 10,
        "DCGM_FI_DEV_FB_FREE": 90,
        "DCGM_FI_DEV_GPU_TEMP": 40,
        "DCGM_FI_DEV_MEMORY_TEMP": 50,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 2500,
        "DCGM_FI_DEV_SM_CLOCK": 1500,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2,
        "DCGM_EXP_XID_ERRORS_COUNT": 1,
    }


def test_labels_are_dcgm_s() -> None:
    """Labels are those of DCGM: the device by its attributes, the node, and the container that holds it."""
    (labels, _), *more = values(view(PodContainer("team", "train", "main")))["DCGM_FI_DEV_GPU_UTIL"]
    assert not more
    assert labels.pop("Hostname")
    assert labels == {
        "gpu": "3",
        "UUID": "GPU-1",
        "device": "nvidia3",
        "modelName": "H200",
        "GPU_I_PROFILE": "",
        "GPU_I_ID": "",
        "namespace": "team",
        "pod": "train",
        "container": "main",
    }


def test_a_shared_device_stays_one_series() -> None:
    """A device with two holders has one series, without a pod."""
    (row,) = values(view(PodContainer("team", "one", "main"), PodContainer("team", "two", "main")))[
        "DCGM_FI_DEV_GPU_UTIL"
    ]
    assert row[0]["pod"] == ""


MIG: dict[str, str | int] = {
    "parentUUID": "GPU-1",
    "parentIndex": 2,
    "parentMinor": 5,
    "uuid": "MIG-7",
    "index": 0,
    "profile": "1g.18gb",
    "gpuInstance": 9,
    "computeInstance": 0,
}


def test_a_partition_has_its_own_labels() -> None:
    """A MIG partition has the number and UUID of its GPU, and labels for its profile and instance."""
    still = Still(resource(Device("MIG-7", attributes=MIG), Device("MIG-8", attributes={**MIG, "computeInstance": 1})))
    observer = still.measured(**{name: {"memory_used_bytes": 2**20} for name in ("MIG-7", "MIG-8")})
    (labels, value), (other, _) = values(observer.view())["DCGM_FI_DEV_FB_USED"]
    assert value == 1
    assert (labels["gpu"], labels["device"], labels["UUID"]) == ("2", "nvidia5", "GPU-1")
    assert (labels["GPU_I_PROFILE"], labels["GPU_I_ID"], other["GPU_I_ID"]) == ("1g.18gb", "9", "9/1")


def test_what_is_not_measured_is_absent() -> None:
    """Quantities that are not measured have no series, not 0; a temperature of no named part is the GPU's."""
    assert set(values(view(load={"temperature_celsius": 30, "clock_hertz": {"video": 1}}))) == {"DCGM_FI_DEV_GPU_TEMP"}


def test_every_name_has_a_known_quantity() -> None:
    """Every quantity with a DCGM name is a known quantity."""
    assert {name.quantity for name in dcgm.NAMES} <= load.QUANTITIES.keys()
