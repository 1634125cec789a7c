"""A bridge from device plugins to Dynamic Resource Allocation. Pods get the same devices by `limits` or by claims.

An author serves pods and claims by `dra_bridge.run(Source())`; `deviceplugin.run(Source())` serves `limits` alone. A
user with a config file serves pods and claims by `dra-bridge run --config FILE`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dra_bridge.node.process import run

__all__ = ["run"]


def __getattr__(name: str) -> object:
    if name == "run":
        from dra_bridge.node.process import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
