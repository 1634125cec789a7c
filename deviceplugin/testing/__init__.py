"""Fakes with which authors test device plugins: a kubelet that needs no cluster.

With pytest, no import is needed. The package registers the fixtures:

    def test_a_pod_gets_the_device(fake_kubelet, served):
        served(Fpga())
        pod = fake_kubelet.run_pod("p", {"example.com/fpga": 1})
        assert pod.nodes[0].container == "/dev/fpga0"

Without pytest, `FakeKubelet` and `serve` do the same as context managers. The names of this package are imported on
first use, so that gRPC is loaded only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deviceplugin.blocking import BlockedLoopError
    from deviceplugin.testing.checkpoint import Checkpoint
    from deviceplugin.testing.devicemanager import ContainerSpec, DeviceState, KubeletCrashError, PluginCallError
    from deviceplugin.testing.kubelet import FakeKubelet, Registration, Rpc, Update
    from deviceplugin.testing.pods import FakeContainer, FakePod, PodFailedError
    from deviceplugin.testing.serving import Served, serve

__all__ = [
    "BlockedLoopError",
    "Checkpoint",
    "ContainerSpec",
    "DeviceState",
    "FakeContainer",
    "FakeKubelet",
    "FakePod",
    "KubeletCrashError",
    "PluginCallError",
    "PodFailedError",
    "Registration",
    "Rpc",
    "Served",
    "Update",
    "serve",
]

_HOMES = {
    "BlockedLoopError": "..blocking",
    "Checkpoint": ".checkpoint",
    "ContainerSpec": ".devicemanager",
    "DeviceState": ".devicemanager",
    "FakeContainer": ".pods",
    "FakeKubelet": ".kubelet",
    "FakePod": ".pods",
    "KubeletCrashError": ".devicemanager",
    "PluginCallError": ".devicemanager",
    "PodFailedError": ".pods",
    "Registration": ".kubelet",
    "Rpc": ".kubelet",
    "Served": ".serving",
    "Update": ".kubelet",
    "serve": ".serving",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
