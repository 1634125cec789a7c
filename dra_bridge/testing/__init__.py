"""Fakes with which authors test claims without a cluster: a node that serves pods and claims, and an API server.

With pytest, no import is needed. The package registers the fixtures:

    def test_a_claim_gets_the_device(fake_node, bridged):
        bridged(Fpga(), share="all")
        pod = fake_node.start_pod("p", template={"fpga.example.com": 1}).wait_running()
        assert fake_node.devices_of(pod) == {"fpga0": "claim"}

Without pytest, `FakeApiServer`, `FakeNode` and `serve_both` do the same as context managers. The names of this package
are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dra_bridge.testing.apiserver import FakeApiServer, Fault
    from dra_bridge.testing.node import FakeNode, Holding, overlaps
    from dra_bridge.testing.serving import ServedBoth, serve_both

__all__ = ["FakeApiServer", "FakeNode", "Fault", "Holding", "ServedBoth", "overlaps", "serve_both"]

_HOMES = {
    "FakeApiServer": "apiserver",
    "FakeNode": "node",
    "Fault": "apiserver",
    "Holding": "node",
    "ServedBoth": "serving",
    "overlaps": "node",
    "serve_both": "serving",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
