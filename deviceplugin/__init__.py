"""Kubernetes device plugins in Python: a Python class lists devices, and the package offers them to the kubelet.

The author of a `DeviceSource` needs only the names in `__all__`. Import all other names from their own modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deviceplugin.device import ContainerEdits, Device, DeviceNode, Health, Mount, Version
from deviceplugin.source import DeviceSource

if TYPE_CHECKING:
    from deviceplugin.node.process import run

__all__ = ["ContainerEdits", "Device", "DeviceNode", "DeviceSource", "Health", "Mount", "Version", "run"]


def __getattr__(name: str) -> object:
    # `run` is imported only on demand, because it loads gRPC, which a program that only defines devices does not need.
    if name == "run":
        from deviceplugin.node.process import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
