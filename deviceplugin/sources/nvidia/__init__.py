"""NVIDIA GPUs and their MIG partitions, by way of NVML (nvidia-ml-py, the extra `nvidia`).

`nvml` is the library. `Session` makes its blocking calls. `driver` makes them in one thread, which all sources of a
loop share, with a deadline on each, because a driver may hang. `NvidiaSource` makes devices of its scans.

A function that the driver does not support says nothing about a GPU. A library or driver that is not there (not yet,
or while it is replaced) is waited for.
"""

from deviceplugin.sources.nvidia.devices import resource_of
from deviceplugin.sources.nvidia.nvml import Places
from deviceplugin.sources.nvidia.source import NvidiaSource

__all__ = ["NvidiaSource", "Places", "resource_of"]
