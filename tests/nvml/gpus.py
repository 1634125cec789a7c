"""A machine with GPUs of the fake NVML library, and common topologies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from deviceplugin.sources.nvidia import Places

SOURCE = Path(__file__).with_name("fake.c")
DRIVER = "535.104.05"
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def build(directory: Path, driver: str = DRIVER) -> Path:
    """Compile the fake NVML library of a driver's version; a missing compiler is an error."""
    path = directory / "libnvidia-ml.so.1"
    made = directory / "new.so"
    flags = [*FLAGS, "-Wl,-soname,libnvidia-ml.so.1", f'-DVERSION="{driver}"']
    subprocess.run([os.environ.get("CC", "gcc"), *flags, "-o", str(made), str(SOURCE)], check=True)
    made.replace(path)
    return path


class FakeGpus:
    """The values that the fake NVML library returns; a change counts after `write`, which the methods call."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.values: dict[str, object] = {"driver": DRIVER, "cuda": 12020, "count": 0}
        for name in ("sys/bus/pci/devices", "sys/devices", "proc/driver/nvidia/gpus", "dev", "cdi"):
            (directory / name).mkdir(parents=True)
        self.places = Places(
            str(library),
            str(directory / "sys"),
            str(directory / "proc"),
            str(directory / "dev"),
            (str(directory / "cdi"),),
        )
        self.write()

    def write(self, **values: object) -> None:
        """Set values (None removes one; `__` stands for a dot), and let the library read them."""
        for key, value in values.items():
            self.set(key.replace("__", "."), value)
        made = self.state.with_suffix(".new")
        made.write_text("".join(f"{key}={value}\n" for key, value in self.values.items()))
        made.replace(self.state)

    def set(self, key: str, value: object) -> None:
        """Set a value, which counts after `write`."""
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def xid(self, gpu: int, code: int, instance: int = -1, compute: int = -1) -> None:
        """Make the driver report an XID; the code -1 is a change of partitions."""
        with open(f"{self.state}.events", "a") as events:
            events.write(f"{gpu} {code} {instance} {compute}\n")

    def gpu(
        self, index: int, name: str = "NVIDIA A100-SXM4-40GB", *, memory: int = 40960, node: int = 0, **values: object
    ) -> str:
        """Plug a GPU in and return its UUID."""
        uuid = f"GPU-{index:08x}-0000-4000-8000-000000000000"
        bus = f"0000:{7 + index:02x}:00.0"
        facts: dict[str, object] = {
            "uuid": uuid, "name": name, "bus": bus, "minor": index, "memory": memory, "brand": 2, "arch": 7,
            "major": 8, "minor_cc": 0, "temp": 40, "mig": 0, "events": 0x108, "serial": f"S{index}", **values,
        }  # fmt: skip
        for key, value in facts.items():
            self.set(f"gpu{index}.{key}", value)
        self.values["count"] = max(int(str(self.values["count"])), index + 1)
        real = self.directory / f"sys/devices/pci0000:{index // 2:02x}/{bus}"
        real.mkdir(parents=True, exist_ok=True)
        (real / "numa_node").write_text(f"{node}\n")
        link = self.directory / "sys/bus/pci/devices" / bus
        if not link.is_symlink():
            link.symlink_to(real)
        (self.directory / "proc/driver/nvidia/gpus" / bus).mkdir(exist_ok=True)
        (self.directory / f"dev/nvidia{index}").touch()
        self.write()
        return uuid

    def unplug(self, index: int) -> None:
        """Remove the last GPU."""
        self.values["count"] = index
        (self.directory / "proc/driver/nvidia/gpus" / f"0000:{7 + index:02x}:00.0").rmdir()
        self.write()
        (self.directory / f"dev/nvidia{index}").unlink()

    def partition(self, gpu: int, index: int, profile: str, *, instance: int | None = None, compute: int = 0) -> str:
        """Make a partition of a GPU, which puts the GPU into MIG mode, and return its UUID."""
        slices, size = profile.partition("g.")[::2]
        uuid = f"MIG-{gpu:08x}-{index:04x}-4000-8000-000000000000"
        facts: dict[str, object] = {
            "uuid": uuid, "gi": index + 1 if instance is None else instance, "ci": compute, "g": slices,
            "c": slices, "memory": int(size.partition("gb")[0]) * 1024 - 100, "start": index, "size": slices,
            "name": f"NVIDIA A100-SXM4-40GB MIG {profile}",
        }  # fmt: skip
        for key, value in facts.items():
            self.set(f"gpu{gpu}.mig{index}.{key}", value)
        self.set(f"gpu{gpu}.mig", 1)
        self.write()
        return uuid

    def link(self, one: int, other: int, count: int) -> None:
        """Add NVLinks between two GPUs."""
        self.set(f"link.{min(one, other)}.{max(one, other)}", count)

    def level(self, one: int, other: int, level: int) -> None:
        """Set the PCIe level of two GPUs: 0 board, 10 one switch, 20 several, 30 host bridge, 40 CPU, 50 system."""
        self.set(f"level.{min(one, other)}.{max(one, other)}", level)


DGX1V = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""Numbers of NVLinks between the V100 GPUs of a DGX-1V, six for each GPU."""


def _levels(gpus: FakeGpus, switch: int) -> None:
    """Set the levels of eight GPUs: two behind each switch, two switches at a CPU's bridges, two CPUs."""
    for one in range(8):
        for other in range(one + 1, 8):
            same = 50 if one // 4 != other // 4 else 40 if one // 2 != other // 2 else switch
            gpus.level(one, other, same)


def dgx_1v(gpus: FakeGpus) -> list[str]:
    """Eight V100s in a hybrid cube mesh."""
    uuids = [
        gpus.gpu(n, "Tesla V100-SXM2-32GB", memory=32768, node=n // 4, arch=5, major=7, mig=None) for n in range(8)
    ]
    for one in range(8):
        for other in range(one + 1, 8):
            if DGX1V[one][other]:
                gpus.link(one, other, DGX1V[one][other])
    _levels(gpus, 10)
    gpus.write()
    return uuids


def dgx_a100(gpus: FakeGpus) -> list[str]:
    """Eight A100s, each with twelve NVLinks to switches."""
    uuids = [gpus.gpu(n, node=n // 4, switch=12) for n in range(8)]
    _levels(gpus, 20)
    gpus.write()
    return uuids


def hgx_h100(gpus: FakeGpus) -> list[str]:
    """Eight H100s, each with eighteen NVLinks to switches."""
    uuids = [
        gpus.gpu(n, "NVIDIA H100 80GB HBM3", memory=81559, node=n // 4, arch=9, major=9, switch=18) for n in range(8)
    ]
    _levels(gpus, 40)
    gpus.write()
    return uuids
