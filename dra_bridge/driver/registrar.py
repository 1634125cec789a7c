"""Serves one DRA driver to the kubelet at a socket, and keeps the driver registered.

The kubelet finds a driver by its socket in `plugins_registry/`. At this socket, the kubelet asks for the driver's name
and endpoint (GetInfo, timeout 1 s), and reports whether it accepts the driver (NotifyRegistrationStatus, timeout 5 s).
The response to GetInfo names no endpoint, so the kubelet calls the driver's service at the same socket (1.32.2 to
1.37.2, operation_generator.go). A driver cannot call the kubelet; the driver can only make the socket, and replace this
socket after a failure.

Facts (kubelet 1.36.3, pluginmanager): the kubelet's watcher finds every socket whose name does not begin with a dot,
also sockets that exist at the kubelet's start, and passes the sockets to a reconciler that runs once a second. After a
failed registration, the kubelet tries the same path again after growing delays, but tries a socket with a new name at
once. The removal of a socket deregisters the driver. Several instances of one driver with different endpoints may be
registered together (in a rolling update); the kubelet calls the newest connected instance. An endpoint cannot be
registered twice, so each new registration has a new socket.

The supported versions in the response to GetInfo name all services of the driver. For claims, the kubelet uses the
first version in the driver's order that it knows (1.34.4, 1.36.3, 1.37.1; 1.32.2 uses its own order). For health, the
kubelet 1.37.1 prefers v1 to v1alpha1 in whatever order the response lists them, and opens no stream if the response
lists neither; 1.34.4 and 1.36.3 open v1alpha1 without reading the versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import operator
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio

from deviceplugin import addresses, filewatch
from deviceplugin.backoff import Backoff
from deviceplugin.directory_watch import POLL, DirectoryReader, DirectoryWatch, all_of, reading
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.filewatch import AT_ONCE
from deviceplugin.kubelet.plugin_directory import PluginDirectory, sockets_in
from deviceplugin.kubelet.podresources import SERVER_OPTIONS, methods_by_name, unix_address
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.register.store import Changes
from deviceplugin.tasks import Tasks
from deviceplugin.wire import pluginregistration_pb2 as pb
from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server
from dra_bridge.driver.driver import ClaimService, Driver
from dra_bridge.wire import dra_health_v1_pb2 as health_pb
from dra_bridge.wire import (
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)

_LOG: Final = logging.getLogger(__name__)

SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The gRPC services for claims and health. The kubelet chooses one version for claims, and one version for health."""

_MAX_MESSAGE: Final = 1000
_RANDOM: Final = "[0-9a-f]" * 8
"""A pattern of the random part of a socket's name."""


@dataclass(frozen=True, slots=True)
class RegistrarTiming:
    """Time limits and intervals, in seconds.

    patience: maximum wait for the kubelet to register the driver; afterwards the socket is made again. drain: maximum
    wait for running calls when a server stops. keep_alive: time between two reports of the devices' health; the kubelet
    forgets a device's health 30 s after its last report.
    """

    patience: float = 60.0
    drain: float = 5.0
    keep_alive: float = 14.0


@dataclass(slots=True)
class RegistrarStatistics:
    """Statistics of a driver's registration; counters only grow.

    registered: whether the kubelet has registered the driver. error: why the driver is not registered; "" if it is
    registered.
    """

    registered: bool = False
    registrations: int = 0
    failures: int = 0
    error: str = ""


def health_list(driver: Driver, now: float) -> health_pb.NodeWatchResourcesResponse:
    """Return the message of the health stream with the health of all devices of a driver. now: Unix seconds."""
    response = health_pb.NodeWatchResourcesResponse()
    for name, (_, device) in driver.devices.by_name.items():
        response.devices.add(
            device=health_pb.DeviceIdentifier(pool_name=driver.pool, device_name=name),
            health=health_pb.HealthStatus.Value(device.health.name),
            last_updated_time=int(now),
            message=device.message.encode(errors="replace")[:_MAX_MESSAGE].decode(errors="ignore"),
        )
    return response


class HealthService(
    dra_health_v1_pb2_grpc.DRAResourceHealthServicer, dra_health_v1alpha1_pb2_grpc.DRAResourceHealthServicer
):
    """The gRPC services for health, v1 and v1alpha1.

    Each stream reports the health of the devices at its begin, after changes, and periodically.
    """

    def __init__(self, driver: Driver, keep_alive: float) -> None:
        self._driver = driver
        self._keep_alive = keep_alive
        self._changes = Changes()
        self._ended = False
        self._subscriptions = contextlib.ExitStack()
        self.follow()

    def follow(self) -> None:
        """Subscribe to the driver's present inventories, and report the health of their devices."""
        self._subscriptions.close()
        for served in self._driver.devices.resources:
            self._subscriptions.callback(served.inventory.subscribe(lambda _: self._changes.note()))
        self._changes.note()

    async def NodeWatchResources(self, request: object, context: object) -> AsyncIterator[Any]:  # noqa: N802
        """Report the health of all devices repeatedly, until the kubelet closes the stream or the service ends."""
        while not self._ended:
            count = self._changes.count
            yield health_list(self._driver, time.time())
            await self._changes.after(count, self._keep_alive)

    def end(self) -> None:
        """End all streams of the devices' health."""
        self._ended = True
        self._subscriptions.close()
        self._changes.note()


def add_to_server(driver: Driver, health: HealthService, server: grpc.aio.Server) -> None:
    """Add a driver's gRPC services for claims and health, in all versions of the kubelet's API, to a server."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(ClaimService(driver, dra_v1_pb2), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(ClaimService(driver, dra_v1beta1_pb2), server)
    dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health, server)
    dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(health, server)


@dataclass(frozen=True, slots=True)
class _RegistrationService(RegistrationServicer):
    """The gRPC service for the driver's registration.

    info: the response to GetInfo. answered: a function that is called with the kubelet's result: whether the driver is
    registered, and the error.
    """

    info: pb.PluginInfo
    answered: Callable[[bool, str], Awaitable[None]]

    async def GetInfo(self, request: object, context: object) -> pb.PluginInfo:  # noqa: N802  # the API's name
        return self.info

    async def NotifyRegistrationStatus(self, request: pb.RegistrationStatus, context: object) -> Any:  # noqa: N802
        await self.answered(request.plugin_registered, request.error)
        return pb.RegistrationStatusResponse()  # An error as response would deregister the driver.


@dataclass(slots=True)
class _Socket:
    """A gRPC server and its socket file, whose name is never used again. own: the identity of the socket file."""

    path: Path
    server: grpc.aio.Server
    own: FileIdentity | None

    def is_in(self, sockets: Mapping[str, FileIdentity]) -> bool:
        """Return whether the socket file still exists and is the file that this server made.

        sockets: for the path of each socket file, the file's identity.
        """
        return self.own is not None and self.own == sockets.get(str(self.path))

    def remove(self) -> None:
        """Remove the socket file if it is the file that this server made. Blocks."""
        with contextlib.suppress(OSError):
            if self.own is not None and file_identity(self.path) == self.own:
                self.path.unlink()


class DriverDirectories(DirectoryWatch[Mapping[str, FileIdentity]]):
    """The kubelet's directory `plugins_registry`, which is read once for all drivers of this process.

    own: the agent's directory with the ledger file. instance: the beginning of the random part of the sockets' names.
    The agent computes `instance` from `own`, so that it finds the sockets of its former processes.
    """

    def __init__(self, own: Path, registry: Path, poll: float = POLL) -> None:
        super().__init__(Looks(str(registry)), self._sockets, (registry,), AT_ONCE, poll)
        self.own: Final = own
        self.registry: Final = registry
        self.instance: Final = hashlib.sha256(os.fsencode(own)).hexdigest()[:4]
        self._sweeping = threading.Lock()
        self._swept = False

    def _sockets(self) -> Mapping[str, FileIdentity]:
        """Return, for the path of each socket in `plugins_registry`, the identity of the socket file. Blocks."""
        return {f"{self.registry}/{name}": identity for name, identity in sockets_in(self.registry).items()}

    def prepare(self) -> None:
        """Create `plugins_registry`. The first call also removes the sockets of this agent's killed processes.

        A socket is removed only if no process listens at it. Sockets of drivers that this agent does not have any more
        are removed too. In earlier versions, an agent had a second socket for each driver in `own` (the endpoint);
        these sockets are also removed. Blocks.
        """
        self.registry.mkdir(parents=True, exist_ok=True)
        with self._sweeping:
            if not self._swept:
                endpoints = list(self.own.glob(f"dra-{_RANDOM}.sock"))
                sockets = list(self.registry.glob(f"*-{self.instance}{_RANDOM}-reg.sock"))
                for endpoint in endpoints:
                    sockets += self.registry.glob(f"*{endpoint.stem.removeprefix('dra')}-reg.sock")
                addresses.remove_abandoned((*sockets, *endpoints))
                self._swept = True


class Registrar:
    """Serves one driver's gRPC API to the kubelet, and keeps the driver registered.

    kubelet: the device plugin directory, in which a starting kubelet makes a new socket before it looks for drivers
    (kubelet.go, initializeRuntimeDependentModules, 1.36). changed: a function that is called when the driver was
    registered or deregistered.
    """

    def __init__(
        self,
        driver: Driver,
        directories: DriverDirectories,
        *,
        kubelet: PluginDirectory | None = None,
        timing: RegistrarTiming | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.driver = driver
        self.statistics = RegistrarStatistics()
        self._directories = directories
        self._kubelet = kubelet
        self._registered_by: FileIdentity | None = None
        """The identity of kubelet.sock when the kubelet registered the driver."""
        self._looks = directories.looks
        self._timing = timing or RegistrarTiming()
        self._changed = changed
        self.backoff = Backoff(first=0.5, most=60.0)
        self._health: HealthService | None = None
        self._socket: _Socket | None = None
        self._refused = False
        self._stopping = Tasks()

    @property
    def registered(self) -> bool:
        """Whether the running kubelet has registered the driver. Any thread may read this property.

        A restarted kubelet counts as another kubelet, because it may not find the driver or may refuse the driver.
        """
        present = self._kubelet.kubelet if self._kubelet is not None else None
        return self.statistics.registered and self._registered_by == present

    def follow(self) -> None:
        """Report the health of the driver's present devices; to be called when the driver's resources have changed."""
        if self._health is not None:
            self._health.follow()

    async def run(self) -> None:
        """Serve and stay registered until cancelled. Then wait for running calls, and remove this registrar's socket.

        Raises ValueError if the path of `plugins_registry` is too long for a socket in it.
        """
        try:
            watched: dict[DirectoryWatch[Any], Callable[[Any], object]] = {self._directories: all_of}
            if self._kubelet is not None:
                watched[self._kubelet] = operator.attrgetter("kubelet")
            with reading(watched) as watch:
                while True:
                    try:
                        await self._serve(watch)
                        await self._keep(watch)
                    except OSError as error:
                        reason, wait = self._cannot_serve(error), self.backoff.next()
                        if self.statistics.error != reason:
                            _LOG.error("%s; trying again in %.1f s", reason, wait, extra={"driver": self.driver.name})
                        self._fail(reason)
                        await watch.wait(wait)
                    finally:
                        self._retire()
        finally:
            await self._stopping.wait(self._timing.drain + 1.0)

    def _cannot_serve(self, error: OSError) -> str:
        needs = "in a pod, it is mounted by the manifests that `dra-bridge manifests` prints for this configuration"
        return f"cannot serve in {self._directories.registry}: {error}; {needs}"

    async def _keep(self, watch: DirectoryReader) -> None:
        """Return when a new socket is needed.

        A new socket is needed if the socket was removed, if the kubelet has refused the driver, or if the kubelet does
        not register the driver.
        """
        made_at = time.monotonic()
        while await self._in_place():
            if self._refused:
                await self.pause()
                # If the driver is registered now, the kubelet has tried this socket again, and has accepted the driver.
                if not self.statistics.registered:
                    return
            wait = math.inf
            if self.statistics.registered and not self.registered:
                # A new kubelet looks for drivers at its start. If the new kubelet does not register this driver within
                # `patience`, a new socket lets the kubelet find the driver.
                self.statistics.registered, made_at = False, time.monotonic()
                self.statistics.error = "the kubelet was restarted, and has not registered the driver since"
                self._changed()
            if not self.statistics.registered:
                wait = made_at + self._timing.patience - time.monotonic()
                if wait <= 0:
                    return
            # While the driver is registered, this loop needs no file events of the kubelet's directory. When the
            # kubelet ends, it closes the ListAndWatch streams, and then `PluginRegistration` requests these events.
            polled = (self._kubelet,) if self._kubelet is not None and self.statistics.registered else ()
            await watch.wait(wait, filewatch.AT_REST, polled=polled)
        _LOG.warning(
            "the socket of driver %s was removed; the driver gets a new socket",
            self.driver.name,
            extra={"driver": self.driver.name},
        )

    async def _in_place(self) -> bool:
        """Return whether the socket exists; also True if the directory cannot be read in time."""
        try:
            there = await self._directories.now()
            return self._socket is not None and self._socket.is_in(there)
        except LookTimeoutError as error:
            _LOG.warning("cannot see whether the driver's socket exists: %s", error, extra={"driver": self.driver.name})
            return True

    async def pause(self) -> None:
        """Wait after a refusal by the kubelet, longer after each further refusal."""
        self._refused, delay = False, self.backoff.next()
        reason = f"the kubelet refused the registration: {self.statistics.error}"
        _LOG.error("%s; trying again in %.1f s", reason, delay, extra={"driver": self.driver.name})
        await asyncio.sleep(delay)

    async def _serve(self, watch: DirectoryReader) -> None:
        """Start a server for the driver, at a socket with a new name. Raises OSError if the socket cannot be made."""
        there, name = self._directories, self.driver.name
        await self._looks.at("socket", there.prepare)
        self._health = HealthService(self.driver, self._timing.keep_alive)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_to_server(self.driver, self._health, services := methods_by_name(server))
        info = pb.PluginInfo(type="DRAPlugin", name=name, supported_versions=list(SERVICES))
        registration = _RegistrationService(info, functools.partial(self._answered, watch))
        add_RegistrationServicer_to_server(registration, services)
        path = addresses.socket_path(there.registry, name, f"-{there.instance}{os.urandom(4).hex()}-reg.sock")
        await self.bind(server, path)
        _LOG.debug(
            "driver %s has the socket %s, and waits for the kubelet to register it", name, path, extra={"driver": name}
        )

    async def bind(self, server: grpc.aio.Server, path: Path) -> None:
        """Start a server at a new socket. Raises OSError if the socket cannot be made."""
        try:
            await self._looks.at("socket", server.add_insecure_port, unix_address(path), place=str(path))
            await server.start()
            identity = await self._looks.at("socket", file_identity, path)
        except RuntimeError as error:
            raise OSError(f"cannot make the socket {path}: {error}") from error
        except BaseException:
            self._stopping.start(server.stop(None))
            raise
        self._socket = _Socket(path, server, identity)

    async def _answered(self, watch: DirectoryReader, registered: bool, error: str) -> None:
        if registered:
            self.backoff.reset()
            if self._kubelet is not None:
                with contextlib.suppress(LookTimeoutError):
                    self._registered_by = (await self._kubelet.now()).kubelet
            self.statistics.registered = True
            self.statistics.registrations += 1
            self.statistics.error = ""
            _LOG.info("driver %s is registered with the kubelet", self.driver.name, extra={"driver": self.driver.name})
            self._changed()
        else:
            self._refused = True
            self._fail(error or "no reason was given")
            watch.wake()

    def _fail(self, error: str) -> None:
        self.statistics.registered = False
        self.statistics.failures += 1
        self.statistics.error = error
        self._changed()

    def _retire(self) -> None:
        """Remove the socket, and accept no new calls. Running calls have `drain` seconds to complete."""
        if self.statistics.registered:
            self.statistics.registered = False
            self._changed()
        if self._health is not None:
            self._health.end()
            self._health = None
        self.driver.end_waits()
        if self._socket is not None:
            self._stopping.start(self._end(self._socket))
            self._socket = None

    async def _end(self, retired: _Socket) -> None:
        """Remove a socket, then stop its server."""
        with contextlib.suppress(LookTimeoutError):
            await self._looks.at("socket", retired.remove)
        await retired.server.stop(self._timing.drain)
