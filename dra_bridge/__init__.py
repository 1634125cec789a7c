"""A bridge from device plugins to Dynamic Resource Allocation (DRA): pods get the same devices by `limits` or claims.

A Python program with a device source calls `dra_bridge.run(Source())` to serve `limits` and claims, or
`deviceplugin.run(Source())` to serve only `limits`. A user with a config file runs `dra-bridge run --config FILE`.
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
