"""NVIDIA GPUs and their MIG partitions, by way of NVML (nvidia-ml-py, the extra `nvidia`).

From the hardware up: `Session` is the library, blocking; `NvmlThread` is the one thread it is called in,
with a deadline on each call, because a driver may hang; `Driver` scans from time to time, listens for
XIDs in between, and is shared by all sources of a loop; `NvidiaSource` makes devices of what it hears
and judges their health by its own rules.

What the driver does not support is neither good nor bad. A library or driver that is not there (yet,
or for a while: it is being replaced) is waited for.
"""

from deviceplugin.sources.nvidia.driver import Driver
from deviceplugin.sources.nvidia.health import APPLICATION_XIDS
from deviceplugin.sources.nvidia.injection import CDI_KIND
from deviceplugin.sources.nvidia.mig import profile_of, resource_of
from deviceplugin.sources.nvidia.places import Places
from deviceplugin.sources.nvidia.session import Session
from deviceplugin.sources.nvidia.source import NvidiaSource
from deviceplugin.sources.nvidia.thread import NvmlThread
from deviceplugin.sources.nvidia.values import Gpu, NvmlError, NvmlScan, Partition, Xid

__all__ = [
    "APPLICATION_XIDS",
    "CDI_KIND",
    "Driver",
    "Gpu",
    "NvidiaSource",
    "NvmlError",
    "NvmlScan",
    "NvmlThread",
    "Partition",
    "Places",
    "Session",
    "Xid",
    "profile_of",
    "resource_of",
]
