"""Keeping one DRA driver registered with the kubelet: two sockets, and word of the devices' health.

The kubelet finds a driver by a socket in `plugins_registry/`, asks there who it is (GetInfo, 1 s),
says whether it took it (NotifyRegistrationStatus, 5 s), and then calls the service's own socket.
It has no Register to call: what can be done is to have the socket there, and to put a new one
there when something went wrong.

Facts (kubelet 1.36.3, pluginmanager): the watcher takes every socket that does not begin with a
dot, also those it finds at its start, and passes them to a reconciler that looks once a second. A
failed registration is tried again by the kubelet, ever more rarely, by the socket's path, so a new
try at once takes a new name. A removed socket deregisters. Instances of one driver with different
endpoints may be registered together (a rolling update), the newest that is connected is called; an
endpoint cannot be registered twice, so with a new registration comes a new endpoint.

The supported versions name all services of the endpoint. For claims the kubelet takes the first in
the driver's order that it knows, and ignores what it does not know (1.34.4, 1.36.3, 1.37.1; 1.32.2
in its own order). For health 1.37.1 takes v1 before v1alpha1 whatever the driver's order, and opens
no stream if neither is listed; 1.34.4 and 1.36.3 open v1alpha1 without having asked the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from deviceplugin import addresses, filewatch
from deviceplugin.backoff import Backoff
from deviceplugin.device import Health
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.kubelet.podresources import unix_address
from dra_bridge.driver.preparation import Driver
from dra_bridge.driver.services import add_to_server
from dra_bridge.wire import dra_health_v1_pb2 as health_pb
from dra_bridge.wire import dra_health_v1_pb2_grpc as health_v1
from dra_bridge.wire import dra_health_v1alpha1_pb2_grpc as health_v1alpha1
from dra_bridge.wire import pluginregistration_pb2 as pb
from dra_bridge.wire.pluginregistration_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server

__all__ = [
    "SERVICES",
    "HealthService",
    "Registrar",
    "RegistrarError",
    "RegistrarStatistics",
    "Timing",
    "health_list",
    "socket_path",
]

_LOG: Final = logging.getLogger(__name__)

PLUGIN_TYPE: Final = "DRAPlugin"
SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""What the kubelet chooses from, once for claims and once for health."""

_MAX_MESSAGE: Final = 1000
_HEALTH: Final = {
    Health.HEALTHY: health_pb.HEALTHY,
    Health.UNHEALTHY: health_pb.UNHEALTHY,
    Health.UNKNOWN: health_pb.UNKNOWN,
}
_SERVER_OPTIONS: Final = (("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))


class RegistrarError(Exception):
    """Raised when the kubelet's directories cannot be used."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Waits, in seconds; tests make them short.

    look: the slow look at the sockets, should every hint be lost. patience: without word from the
    kubelet before the sockets are made anew. drain: for calls in flight at the end. keep_alive:
    between two lists of the devices' health (after 30 without one the kubelet forgets them).
    """

    look: float = 10.0
    patience: float = 60.0
    drain: float = 5.0
    keep_alive: float = 10.0


@dataclass(frozen=True, slots=True)
class RegistrarStatistics:
    """A registration so far; counters only grow. error: the kubelet's last refusal, "" if none since."""

    registered: bool = False
    registrations: int = 0
    failures: int = 0
    error: str = ""
    health_streams: int = 0
    health_lists: int = 0


def socket_path(directory: Path, name: str, tail: str) -> Path:
    """Return directory/name+tail, the name shortened (and made unique by a hash) where it is too long.

    Raises:
        RegistrarError: the directory's own path leaves no room.

    """
    try:
        return addresses.socket_path(directory, name, tail)
    except ValueError as error:
        raise RegistrarError(str(error)) from None


def health_list(driver: Driver, now: float) -> health_pb.NodeWatchResourcesResponse:
    """Return the complete list of the devices' health. now: Unix seconds."""
    response = health_pb.NodeWatchResourcesResponse()
    for name, (_, device) in driver.devices.items():
        response.devices.add(
            device=health_pb.DeviceIdentifier(pool_name=driver.pool, device_name=name),
            health=_HEALTH[device.health],
            last_updated_time=int(now),
            message=device.message.encode(errors="replace")[:_MAX_MESSAGE].decode(errors="ignore"),
        )
    return response


class HealthService(health_v1.DRAResourceHealthServicer, health_v1alpha1.DRAResourceHealthServicer):
    """DRAResourceHealth, v1 and v1alpha1: the list now, with each change, and now and then to keep it alive."""

    def __init__(self, driver: Driver, keep_alive: float, sent: Callable[[int, int], None]) -> None:
        """Make one. sent: called with (streams begun, lists sent) to count."""
        self._driver = driver
        self._keep_alive = keep_alive
        self._sent = sent
        self._changed = asyncio.Event()
        self._ended = False
        self._unsubscribe: list[Callable[[], None]] = []
        self.follow()

    def follow(self) -> None:
        """Follow the inventories that the driver serves now, and send their lists."""
        self._leave()
        self._unsubscribe = [served.inventory.subscribe(lambda _: self._wake()) for served in self._driver.served]
        self._wake()

    async def NodeWatchResources(  # noqa: N802  # the API's name
        self, request: health_pb.NodeWatchResourcesRequest, context: object
    ) -> AsyncIterator[health_pb.NodeWatchResourcesResponse]:
        """Send lists until the kubelet goes or the service ends."""
        self._sent(1, 0)
        while not self._ended:
            changed = self._changed
            self._sent(0, 1)
            yield health_list(self._driver, time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._keep_alive):
                    await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """End all streams."""
        self._ended = True
        self._leave()
        self._wake()

    def _leave(self) -> None:
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []


class _Registration(RegistrationServicer):
    """What the kubelet asks at the registration socket."""

    def __init__(self, info: pb.PluginInfo, told: Callable[[bool, str], None]) -> None:
        self._info = info
        self._told = told

    async def GetInfo(self, request: pb.InfoRequest, context: object) -> pb.PluginInfo:  # noqa: N802
        """Say who this is."""
        return self._info

    async def NotifyRegistrationStatus(  # noqa: N802
        self, request: pb.RegistrationStatus, context: object
    ) -> pb.RegistrationStatusResponse:
        """Hear whether the kubelet took it; an error here would deregister."""
        self._told(request.plugin_registered, request.error)
        return pb.RegistrationStatusResponse()


@dataclass(slots=True)
class _Socket:
    """A server and the file that is its socket. The name is never used again."""

    path: Path
    server: grpc.aio.Server
    own: FileIdentity | None

    @property
    def in_place(self) -> bool:
        """Whether the file is there and still this server's."""
        return self.own is not None and file_identity(self.path) == self.own

    def unlink(self) -> None:
        """Remove the file if it is this server's."""
        if self.in_place:
            with contextlib.suppress(OSError):
                self.path.unlink()


class Registrar:
    """Serves one driver and keeps it registered until it is cancelled.

    Args:
        driver: whom.
        kubelet_root: the kubelet's --root-dir.
        plugins, registry: its directories, where they lie elsewhere.
        timing: waits.
        changed: called when the registration came or went.

    """

    def __init__(
        self,
        driver: Driver,
        kubelet_root: Path = Path("/var/lib/kubelet"),
        *,
        plugins: Path | None = None,
        registry: Path | None = None,
        timing: Timing | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.driver = driver
        self._registry = registry or kubelet_root / "plugins_registry"
        self._plugins = plugins or kubelet_root / "plugins"
        self._timing = timing or Timing()
        self._changed = changed or (lambda: None)
        self._statistics = RegistrarStatistics()
        self._backoff = Backoff(first=0.5, most=60.0)
        self._health: HealthService | None = None
        self._service: _Socket | None = None
        self._registration: _Socket | None = None
        self._made_at = 0.0
        self._refused = False
        self._watch: filewatch.Watch | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        state = "registered" if self._statistics.registered else "not registered"
        return f"<Registrar of {self.driver.name} in {self._registry}: {state}>"

    @property
    def statistics(self) -> RegistrarStatistics:
        """The registration so far."""
        return self._statistics

    @property
    def directory(self) -> Path:
        """The driver's own directory among the kubelet's plugins."""
        return socket_path(self._plugins, self.driver.name, "/dra-12345678.sock").parent

    def follow(self) -> None:
        """Tell of the health of the resources that the driver serves now; call it when they are other ones."""
        if self._health is not None:
            self._health.follow()

    async def run(self) -> None:
        """Serve and be registered until cancelled, then end calls in flight and remove the own sockets.

        Raises:
            RegistrarError: the kubelet's root has a path too long for any socket.

        """
        directories = [str(self._registry), str(self.directory)]
        try:
            with filewatch.shared().watch(directories) as self._watch:
                while True:
                    try:
                        wait = await self._step()
                    except OSError as error:
                        wait = self._backoff.next()
                        self._fail(f"cannot serve in {self._registry}: {error}; trying again in {wait:.1f} s")
                    await self._watch.wait(wait)
        finally:
            self._watch = None
            await self._close()

    async def _step(self) -> float:
        """Do what is to be done now; return how many seconds to wait for a hint."""
        service, registration = self._service, self._registration
        whole = service is not None and service.in_place and registration is not None and registration.in_place
        waited = time.monotonic() - self._made_at
        if whole and self._refused:
            # Once a refusal: the next try is later each time.
            self._refused = False
            delay = self._backoff.next()
            _LOG.error(
                "%s: the kubelet refused the registration: %s; trying again in %.1f s",
                self.driver.name,
                self._statistics.error,
                delay,
            )
            await asyncio.sleep(delay)
            if self._statistics.registered:  # the kubelet's own next try was sooner
                return self._timing.look
        elif whole and (self._statistics.registered or waited < self._timing.patience):
            return min(self._timing.look, max(0.05, self._timing.patience - waited))
        elif service is not None and not whole:
            _LOG.warning("%s: a socket was removed; making new ones", self.driver.name)
        self._retire()
        await self._serve()
        return self._timing.look

    async def _serve(self) -> None:
        """Make both sockets, the service's first; their names are new."""
        name, instance = self.driver.name, secrets.token_hex(4)
        self._registry.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._sweep()
        self._health = HealthService(self.driver, self._timing.keep_alive, self._count_health)
        service = grpc.aio.server(options=_SERVER_OPTIONS)
        add_to_server(self.driver, service)
        health_v1.add_DRAResourceHealthServicer_to_server(self._health, service)
        health_v1alpha1.add_DRAResourceHealthServicer_to_server(self._health, service)
        self._service = await self._bound(service, self.directory / f"dra-{instance}.sock")
        info = pb.PluginInfo(
            type=PLUGIN_TYPE, name=name, endpoint=str(self._service.path), supported_versions=list(SERVICES)
        )
        registration = grpc.aio.server(options=_SERVER_OPTIONS)
        add_RegistrationServicer_to_server(_Registration(info, self._told), registration)
        path = socket_path(self._registry, name, f"-{instance}-reg.sock")
        self._registration = await self._bound(registration, path)
        self._made_at = time.monotonic()
        _LOG.debug("%s: serving at %s, waiting for the kubelet", name, self._service.path)

    @staticmethod
    async def _bound(server: grpc.aio.Server, path: Path) -> _Socket:
        try:
            server.add_insecure_port(unix_address(path))
        except RuntimeError as error:
            raise OSError(f"cannot make the socket {path}: {error}") from error
        await server.start()
        return _Socket(path, server, file_identity(path))

    def _told(self, registered: bool, error: str) -> None:
        """Take note of what the kubelet says of the registration."""
        now = self._statistics
        if registered:
            self._backoff.reset()
            self._statistics = replace(now, registered=True, registrations=now.registrations + 1, error="")
            _LOG.info("%s: registered with the kubelet", self.driver.name)
        else:
            self._refused = True
            self._statistics = replace(
                now, registered=False, failures=now.failures + 1, error=error or "no reason was given"
            )
            if self._watch is not None:
                self._watch.wake()
        self._changed()

    def _fail(self, message: str) -> None:
        now = self._statistics
        if now.error != message.partition(";")[0]:
            _LOG.error("%s: %s", self.driver.name, message)
        self._statistics = replace(now, registered=False, failures=now.failures + 1, error=message.partition(";")[0])
        self._changed()

    def _count_health(self, streams: int, lists: int) -> None:
        now = self._statistics
        self._statistics = replace(
            now, health_streams=now.health_streams + streams, health_lists=now.health_lists + lists
        )

    def _sweep(self) -> None:
        """Remove sockets of instances of this driver that were killed: nobody answers there."""
        tail = "-12345678-reg.sock"
        prefix = socket_path(self._registry, self.driver.name, tail).name.removesuffix(tail)
        kinds = (
            (self._registry, re.compile(rf"{re.escape(prefix)}-[0-9a-f]{{8}}-reg\.sock")),
            (self.directory, re.compile(r"dra-[0-9a-f]{8}\.sock")),
        )
        for directory, pattern in kinds:
            for path in directory.iterdir():
                if pattern.fullmatch(path.name) and addresses.is_abandoned(path):
                    with contextlib.suppress(OSError):
                        path.unlink()

    def _retire(self) -> None:
        """Let the servers go; calls in flight may end."""
        if self._statistics.registered:
            self._statistics = replace(self._statistics, registered=False)
            self._changed()
        sockets = [bound for bound in (self._registration, self._service) if bound is not None]
        self._registration = self._service = None
        if self._health is not None:
            self._health.end()
            self._health = None
        for bound in sockets:
            bound.unlink()
            task = asyncio.create_task(bound.server.stop(self._timing.drain))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _close(self) -> None:
        self._retire()
        if self._stopping:
            await asyncio.wait(self._stopping, timeout=self._timing.drain + 1.0)
