"""Kubernetes device plugins in Python: an author describes devices, and the package registers and serves them.

The author of a source needs only the names in `__all__`. All other names are imported from the modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deviceplugin.device import ContainerEdits, Device, DeviceNode, Health, Mount, Version
from deviceplugin.source import DeviceSource

if TYPE_CHECKING:
    from deviceplugin.node.process import run

__all__ = ["ContainerEdits", "Device", "DeviceNode", "DeviceSource", "Health", "Mount", "Version", "run"]


def __getattr__(name: str) -> object:
    # `run` imports gRPC, which a tool that only describes devices does not need.
    if name == "run":
        from deviceplugin.node.process import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
