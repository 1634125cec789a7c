"""What Prometheus gets of an agent: one collector over one snapshot, served beside the loop.

Loaded only when metrics are wanted: an agent without them does not pay for the client library.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from deviceplugin.agent import Agent

__all__ = ["AgentCollector", "serving"]

IDLE: Final = 30.0
"""Seconds after which a client that says nothing is let go."""


class AgentCollector:
    """Turns an agent's status into metric families, anew at each scrape."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        """Yield the families as of now."""
        status = self._agent.status()
        devices = GaugeMetricFamily(
            "deviceplugin_devices", "Devices by health, as their source says", labels=("resource", "health")
        )
        registered = GaugeMetricFamily(
            "deviceplugin_registered", "1 while the kubelet has taken the registration", labels=("resource",)
        )
        allocations = CounterMetricFamily(
            "deviceplugin_allocations", "Allocate calls that the plugin granted", labels=("resource",)
        )
        for one in status.resources:
            healths: dict[str, int] = {}
            for device in one.snapshot.devices.values():
                healths[device.health.value] = healths.get(device.health.value, 0) + 1
            for health, count in healths.items():
                devices.add_metric((one.resource, health), count)
            registered.add_metric((one.resource,), one.registered)
            allocations.add_metric((one.resource,), one.endpoint.allocations)
        yield from (devices, registered, allocations)
        yield CounterMetricFamily(
            "deviceplugin_kubelet_double_allocations",
            "Devices that the kubelet gave to several pods at once",
            value=status.double_allocations,
        )


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE
    protocol_version = "HTTP/1.1"
    registry: CollectorRegistry

    def do_GET(self) -> None:
        """Answer /metrics and /healthz."""
        if self.path == "/metrics":
            encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encoder(self.registry))
        elif self.path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing of requests."""


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port`; raises OSError if it is none."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise OSError(f"{address!r} is not host:port, [v6 address]:port or :port")
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextlib.contextmanager
def serving(address: str, agent: Agent) -> Iterator[str]:
    """Serve the agent's metrics at `address` in threads of its own; gives the address it listens at.

    Raises:
        OSError: it cannot listen there.

    """
    host, port = parse_address(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(agent))
    handler = type("Handler", (_Handler,), {"registry": registry})
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    server_type = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
    server: ThreadingHTTPServer = server_type((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
