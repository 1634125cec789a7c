"""NVIDIA GPUs and their MIG partitions, by way of NVML (nvidia-ml-py, the extra `nvidia`).

`nvml` loads the library. `Session` makes its blocking calls. `driver` runs them in one thread, which all sources of a
loop share, with a deadline on each call, because a driver may hang. `NvidiaSource` makes devices from the scans.

An unsupported function of the driver does not make a GPU unhealthy. If the library or driver is missing (at the start,
or while it is replaced), the source waits for it.
"""

from deviceplugin.sources.nvidia.devices import resource_of
from deviceplugin.sources.nvidia.nvml import Places
from deviceplugin.sources.nvidia.source import NvidiaSource

__all__ = ["NvidiaSource", "Places", "resource_of"]
