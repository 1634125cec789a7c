"""The device source for NVIDIA GPUs and MIG partitions. It uses NVML (nvidia-ml-py, the extra `nvidia`).

`nvml` loads the library. `Session` makes the blocking calls of the library. `driver` runs these calls in one thread,
which all sources of an event loop share. Each call has a deadline, because a driver may hang. `NvidiaSource` makes
devices from the results.

A GPU does not become unhealthy if its driver merely lacks a function of NVML. If the library or driver is missing (at
the start, or while it is replaced), the source waits for it.
"""

from deviceplugin.sources.nvidia.devices import resource_of
from deviceplugin.sources.nvidia.nvml import Places
from deviceplugin.sources.nvidia.source import NvidiaSource

__all__ = ["NvidiaSource", "Places", "resource_of"]
