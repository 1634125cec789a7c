"""Runs an agent that serves pods and claims, in its own thread, for tests. The module does not need pytest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deviceplugin.naming import EXTENDED_RESOURCE, canonical_resource, class_name
from deviceplugin.testing.serving import Served, running_while

if TYPE_CHECKING:
    from deviceplugin.node.process import Program
    from deviceplugin.source import DeviceSource
    from dra_bridge.handover.share import Drain
    from dra_bridge.kube.api import Object
    from dra_bridge.node.bridge import Bridge
    from dra_bridge.testing.node import FakeNode

__all__ = ["ServedBoth", "device_class", "serve_both"]


class ServedBoth(Served):
    """A bridge that runs in its own thread and event loop. The arguments are those of `serve_both`."""

    def __init__(
        self, sources: Sequence[DeviceSource], node: FakeNode, share: str | int, drain: Drain, **options: Any
    ) -> None:
        self._node = node
        self._share = share
        self._drain: Drain = drain
        self._bridge: Bridge | None = None
        super().__init__(sources, node, **options)
        node.left_out.append(self._left_out)

    @property
    def drivers(self) -> list[str]:
        """The names of the DRA drivers that the sources name."""
        return sorted({source.driver for source in self._sources if source.driver})

    def wait_registered(self, timeout: float = 20.0) -> None:
        """Wait until all sources and drivers are registered, and as many devices are for claims as the share demands.

        Raises:
            RuntimeError: a source's `watch` failed before its first list, or the agent ended; the error is the cause.
            TimeoutError: a registration or a device is missing after `timeout` seconds.
        """
        super().wait_registered(timeout)
        self._node.wait_until(
            lambda: not self.alive or all(map(self._arrived, self.drivers)),
            timeout,
            lambda: f"the devices of {[name for name in self.drivers if not self._arrived(name)]} to be on their sides",
        )
        self._raise_end()

    def _arrived(self, driver: str) -> bool:
        from dra_bridge.rollout import fleet

        server = self._node.server
        node, leases = server.get("nodes", self._node.name), server.objects("leases")
        (view,) = fleet.views(driver, [node], server.objects(), leases=leases)
        registered = any(plugin.connected and plugin.told for plugin in self._node.dra.plugins(driver))
        published = self._bridge is not None and self._bridge.publisher.observed(driver, time.monotonic()).published
        return registered and published and view.reported is not None and fleet.finished(view)

    def _left_out(self) -> list[str]:
        """Return the problems of the sources' ResourceSlices as sentences: what the slices leave out, and why."""
        if self._bridge is None or not self.alive:
            return []
        return [problem for driver in self.drivers for problem in self._bridge.publisher.state(driver).problems]

    def _program(self) -> Program:
        from dra_bridge.handover.share import parse_share
        from dra_bridge.kube import Cluster
        from dra_bridge.node.bridge import Bridge
        from dra_bridge.node.options import BridgeOptions
        from dra_bridge.node.process import BridgeProgram
        from dra_bridge.node.share import HandoverPolicy

        policy = HandoverPolicy(parse_share(self._share), self._drain)
        self._bridge = Bridge(
            self._sources,
            {source.resource: policy for source in self._sources},
            BridgeOptions(self._node.paths, None, Cluster.from_server(self._node.server.url), self._node.name),
            **self._options,
        )
        return BridgeProgram(self._bridge)


@contextlib.contextmanager
def serve_both(
    sources: DeviceSource | Sequence[DeviceSource],
    node: FakeNode,
    *,
    share: str | int = "none",
    drain: Drain = "cordon",
    timeout: float | None = 20.0,
    period: float = 0.2,
    **options: Any,
) -> Iterator[ServedBoth]:
    """Run a bridge with these sources against a fake node while the context lasts; create the sources' DeviceClasses.

    An existing DeviceClass stays as it is. If a driver has one resource, such as example.com/fpga for fpga.example.com,
    the DeviceClass has the name of the driver; see `deviceplugin.naming.class_name`.

    share: the share of devices for claims: none (the default of `dra_bridge.run`), all, a number or a percentage.
    drain: see `dra_bridge.run`. timeout: seconds to wait until as many devices are for claims as the share demands;
    None does not wait. period: seconds between two scans for the holders of devices. options: further arguments of
    `Bridge`.

    Raises what `ServedBoth.wait_registered` raises; TypeError or NamingError if a source cannot be served at all;
    ShareError if `share` or `drain` is invalid; ValueError if claims have a share and no source has a driver.
    """
    from deviceplugin.source_check import check_sources
    from dra_bridge.handover.share import parse_share
    from dra_bridge.node.share import HandoverPolicy

    listed = [*sources] if isinstance(sources, Sequence) else [sources]
    check_sources(listed)
    policy = HandoverPolicy(parse_share(share), drain)
    if policy.share != parse_share("none") and not any(source.driver for source in listed):
        raise ValueError(f"no source has a `driver`, so claims cannot have a share of {share}")
    names = {body["metadata"]["name"] for body in node.server.objects("deviceclasses")}
    for source in listed:
        if source.driver and class_name(source.resource, source.driver) not in names:
            node.server.create(device_class(source.resource, source.driver))
    with running_while(ServedBoth(listed, node, share, drain, period=period, **options), timeout) as running:
        yield running


def device_class(resource: str, driver: str) -> Object:
    """Return the DeviceClass of a resource as `dra-bridge manifests` prints it."""
    is_driver, its = f'device.driver == "{driver}"', f'device.attributes["{driver}"].{EXTENDED_RESOURCE}'
    expression = f'{is_driver} && {its} == "{canonical_resource(resource)}"'
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": class_name(resource, driver)},
        "spec": {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": resource},
    }
