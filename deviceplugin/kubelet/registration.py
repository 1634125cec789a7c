"""Keeping one resource registered with the kubelet: serve, register, watch, and again.

The kubelet forgets everything at its restart, and sometimes without one. What must be done is a
pure function of what is seen (`next_step`); everything that can happen wakes the same loop, so
a restart takes the same path as the start.

Facts (kubelet 1.36.3): at its start the kubelet deletes every socket in the directory, its own
last, then makes kubelet.sock; it dials back before it answers Register; when an old ListAndWatch
ends after the same name was registered again, it drops the new registration, so the old stream
is ended first. A recreated kubelet.sock need not mean that plugins' sockets were wiped.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio

from deviceplugin import filewatch
from deviceplugin.addresses import is_abandoned, socket_path
from deviceplugin.backoff import Backoff
from deviceplugin.files import FileIdentity, file_identity, leads_to, locked
from deviceplugin.kubelet.podresources import CHANNEL_OPTIONS, unix_address
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import RegistrationStub, add_DevicePluginServicer_to_server

if TYPE_CHECKING:
    from deviceplugin.wire.deviceplugin_pb2_grpc import RegistrationAsyncStub

__all__ = [
    "DirectoryError",
    "InstanceError",
    "Registration",
    "RegistrationError",
    "Seen",
    "Step",
    "next_step",
    "socket_name",
]

_LOG: Final = logging.getLogger(__name__)

KUBELET_SOCKET: Final = "kubelet.sock"
VERSION: Final = "v1beta1"
_NEEDS: Final = "the agent needs write access to the kubelet's device plugin directory, and free space there"


class RegistrationError(Exception):
    """Raised when a resource cannot be served, whatever the kubelet does."""


class DirectoryError(RegistrationError):
    """Raised when the device plugin directory cannot be used."""


class InstanceError(RegistrationError):
    """Raised when another process on this node serves the same resource."""


# Names.


def slug(resource: str) -> str:
    """Return a name for files made from a resource's, unique and readable: example.com_fpga-1a2b3c."""
    digest = hashlib.sha256(resource.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', resource)}-{digest}"


def socket_name(resource: str, directory: str, instance: str) -> str:
    """Return the file name of an instance's socket, such that the path fits.

    Raises:
        DirectoryError: the directory's own path is too long for any socket in it.

    """
    try:
        return socket_path(directory, slug(resource), f"-{instance}.sock").name
    except ValueError as error:
        raise DirectoryError(str(error)) from None


# What to do next.


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen at one moment.

    kubelet: kubelet.sock. served: own server's socket is in its place. live: a ListAndWatch is
    under way. listened: there was one since the last Register that succeeded. registered: the
    kubelet.sock of that Register. since: seconds since then. ready: there is a list to serve.
    """

    kubelet: FileIdentity | None
    served: bool
    live: bool
    listened: bool
    registered: FileIdentity | None
    since: float
    ready: bool = True


class Step(enum.Enum):
    """What to do next."""

    WAIT_FOR_DEVICES = "wait for the first list of devices"
    WAIT_FOR_KUBELET = "wait for the kubelet"
    REGISTER = "register"
    WAIT_FOR_STREAM = "wait for the kubelet to listen"
    REST = "rest"


def next_step(seen: Seen, patience: float) -> Step:
    """Decide what to do; `patience` is how many seconds after Register the kubelet may take to listen."""
    if not seen.ready:
        return Step.WAIT_FOR_DEVICES
    if seen.kubelet is None:
        return Step.WAIT_FOR_KUBELET
    if not seen.served or seen.kubelet != seen.registered:
        return Step.REGISTER
    if seen.live:
        return Step.REST
    return Step.REGISTER if seen.listened or seen.since >= patience else Step.WAIT_FOR_STREAM


# One instance a node.


class InstanceLock:
    """Says on this node that this process serves a resource; the kernel takes it back when it dies.

    A lock on a file in the device plugin directory, which all instances share, in containers or
    not. The kubelet deletes only sockets there.
    """

    def __init__(self, directory: Path, resource: str) -> None:
        self.path = directory / f".{slug(resource)}.lock"
        self._resource = resource
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock on the file that is there now."""
        return self._fd is not None and leads_to(self.path, self._fd)

    def acquire(self) -> bool:
        """Try to take the lock; return whether it is held now.

        Raises:
            DirectoryError: the file cannot be made.

        """
        if self.held:
            return True
        self.release()
        try:
            fd = self._fd = locked(self.path)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DirectoryError(f"{self.path}: cannot lock it: {os.strerror(error.errno or 0)}; {_NEEDS}") from error
        with contextlib.suppress(OSError):  # the text is for people; the lock holds without it, on a full disk too
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    def owner(self) -> str:
        """Return what the holder wrote about itself."""
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace").strip() or "unknown"
        return "unknown"

    def release(self) -> None:
        """Give the lock back; the file stays (removing it would race with the next instance)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(slots=True)
class RegistrationStatistics:
    """What a registration has done so far; counters only grow."""

    registrations: int = 0
    failures: int = 0
    kubelet_restarts: int = 0
    registered: bool = False


@dataclass(slots=True)
class Timing:
    """Waits of a registration, in seconds; tests make them short."""

    look: float = 10.0  # the slow look at inodes, should every hint be lost
    patience: float = 5.0  # from Register to ListAndWatch
    register: float = 15.0  # deadline of one Register; the kubelet dials back for up to 10 s
    stream: float = 1.0  # for the old stream to end
    calls: float = 15.0  # for calls in flight to end before the stream is; hooks have a deadline of their own
    drain: float = 5.0  # for a server to end
    takeover: float = 5.0  # for another instance to go


class Registration:
    """Keeps one endpoint served and registered until it is cancelled.

    turn: serialises Register between the resources of a process: the kubelet dials back during
    the call, and leaks memory when it is hurried (kubernetes#124716).
    """

    def __init__(
        self, endpoint: Endpoint, directory: Path, turn: asyncio.Lock | None = None, timing: Timing | None = None
    ) -> None:
        self.endpoint = endpoint
        self.statistics = RegistrationStatistics()
        self._directory = directory
        self._timing = timing or Timing()
        self._turn = turn or asyncio.Lock()
        self._backoff = Backoff(first=0.01, most=10.0)
        self._listened_before = 0
        self._server: grpc.aio.Server | None = None
        self._socket: Path | None = None
        self._own: FileIdentity | None = None
        self._registered: FileIdentity | None = None
        self._last: FileIdentity | None = None  # of the last Register that succeeded, ever
        self._registered_at = 0.0
        self._options: pb.DevicePluginOptions | None = None
        self._lock = InstanceLock(directory, endpoint.resource)
        self._told: str = ""
        self._stopping: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Registration of {self.endpoint.resource} in {self._directory}>"

    async def run(self) -> None:
        """Serve and register until cancelled, then drain and remove the own socket.

        Raises:
            DirectoryError: the directory may not be written.
            InstanceError: another process serves this resource on this node.

        """
        self.endpoint.serving = True
        try:
            with filewatch.shared().watch([str(self._directory)]) as watch:
                self.endpoint.on_stream_end = watch.wake
                forget = self.endpoint.inventory.subscribe(
                    lambda snapshot: None if self._told != "devices" else watch.wake()
                )
                try:
                    await self._loop(watch)
                finally:
                    forget()
                    self.endpoint.on_stream_end = lambda: None
        finally:
            await self._close()

    def wake(self) -> None:
        """Look again now (after the source's hooks changed, say)."""
        self.endpoint.on_stream_end()

    async def _loop(self, watch: filewatch.Watch) -> None:
        timing = self._timing
        if self._directory.exists():
            if not self._directory.is_dir():
                raise DirectoryError(
                    f"{self._directory} is not a directory; the kubelet's device plugin directory is meant"
                )
            await self._own_the_resource()  # say at once what no kubelet will mend
        while True:
            seen = self._look()
            step = next_step(seen, timing.patience)
            if step is Step.REST and self._options != self.endpoint.options:
                step = Step.REGISTER  # the hooks changed with the source: the kubelet asks once, at Register
            if step is Step.WAIT_FOR_DEVICES:
                self._tell("devices", "waiting for the first list of devices")
                await watch.wait(timing.look)
            elif step is Step.WAIT_FOR_KUBELET:
                self.statistics.registered = False
                self._tell("kubelet", f"waiting for the kubelet ({self._directory / KUBELET_SOCKET} is not there)")
                self._backoff.reset()
                if not seen.served and self._directory.is_dir():
                    await self._be_served()  # a head start: the kubelet deletes sockets before it makes its own
                await watch.wait(timing.look)
            elif step is Step.WAIT_FOR_STREAM:
                await watch.wait(max(0.01, timing.patience - seen.since))
            elif step is Step.REST:
                if seen.since >= timing.patience:
                    self._backoff.reset()
                await watch.wait(timing.look)
            else:
                if seen.registered is not None and seen.kubelet == seen.registered and seen.served:
                    _LOG.log(
                        logging.INFO if seen.listened else logging.WARNING,
                        "%s: the kubelet %s; registering again",
                        self.endpoint.resource,
                        "listens no more" if seen.listened else "took the registration but does not listen",
                    )
                if not await self._register(watch) or self._backoff.tries:
                    await self._pause(watch, self._backoff.next(), seen.kubelet)
                elif seen.kubelet == seen.registered:
                    self._backoff.tries = 1  # one more without a pause, then ever slower until it holds

    async def _pause(self, watch: filewatch.Watch, delay: float, kubelet: FileIdentity | None) -> None:
        """Wait before the next try, but not if the kubelet is another one meanwhile."""
        until = time.monotonic() + delay
        while (rest := until - time.monotonic()) > 0:
            if file_identity(self._directory / KUBELET_SOCKET) != kubelet:
                self._backoff.reset()
                return
            await watch.wait(rest)

    def _look(self) -> Seen:
        return Seen(
            kubelet=file_identity(self._directory / KUBELET_SOCKET),
            served=self._in_place(),
            live=self.endpoint.live,
            listened=self.endpoint.streams_begun > self._listened_before,
            registered=self._registered,
            since=time.monotonic() - self._registered_at,
            ready=self.endpoint.inventory.snapshot.listed,
        )

    async def _register(self, watch: filewatch.Watch) -> bool:
        """Serve if need be, end the old stream, register once; return whether the kubelet took it."""
        resource, timing = self.endpoint.resource, self._timing
        again = self.statistics.registrations > 0
        if self.endpoint.live and self._registered == file_identity(self._directory / KUBELET_SOCKET):
            await self.endpoint.settled(timing.calls)  # the kubelet ends them with the stream
        self._registered = None
        self.statistics.registered = False
        if not await self.endpoint.end_streams(timing.stream):
            _LOG.warning("%s: an old ListAndWatch would not end; starting a new server", resource)
            self._retire()
        await self._be_served()
        options = self.endpoint.options
        try:
            async with self._turn:
                # In this order: a kubelet deletes sockets before it makes its own, and may have
                # done so while another resource had its turn. It would dial a lost one for 10 s.
                kubelet = file_identity(self._directory / KUBELET_SOCKET)
                await self._be_served()
                assert self._socket is not None
                self._listened_before = self.endpoint.streams_begun
                request = pb.RegisterRequest(
                    version=VERSION, endpoint=self._socket.name, resource_name=resource, options=options
                )
                async with self._channel() as channel:
                    stub: RegistrationAsyncStub = RegistrationStub(channel)  # type: ignore[assignment]
                    call = asyncio.ensure_future(_answer(stub.Register(request, timeout=timing.register)))
                    if not await self._answered(call, watch, kubelet):
                        return False
        except grpc.aio.AioRpcError as error:
            self.statistics.failures += 1
            gone = error.code() is grpc.StatusCode.UNAVAILABLE
            self._tell(
                f"refused {error.code().name} {error.details()}",
                f"the kubelet does not answer at {self._directory / KUBELET_SOCKET}; trying again"
                if gone
                else f"the kubelet refused the registration ({error.code().name}: {error.details()}); trying again",
                logging.INFO if gone else logging.ERROR,
            )
            return False
        self.statistics.registrations += 1
        self.statistics.kubelet_restarts += self._last not in (None, kubelet)
        self.statistics.registered = True
        self._registered = self._last = kubelet
        self._registered_at, self._options = time.monotonic(), options
        self._told = ""
        _LOG.info("%s: registered%s as %s", resource, " again" if again else "", self._socket.name)
        return True

    async def _answered(
        self, call: asyncio.Task[pb.Empty], watch: filewatch.Watch, kubelet: FileIdentity | None
    ) -> bool:
        """Wait for the answer to Register; return False as soon as whoever was asked is not the kubelet any more.

        Raises:
            grpc.aio.AioRpcError: the answer is an error.

        """
        try:
            while file_identity(self._directory / KUBELET_SOCKET) == kubelet:
                hint = asyncio.create_task(watch.wait(self._timing.look))
                await asyncio.wait({call, hint}, return_when=asyncio.FIRST_COMPLETED)
                hint.cancel()
                if call.done():
                    await call
                    return True
            return False
        finally:
            call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        # A fresh one each time: a channel that failed for long took 3 s to recover, a fresh one 1 ms.
        return grpc.aio.insecure_channel(unix_address(self._directory / KUBELET_SOCKET), options=CHANNEL_OPTIONS)

    async def _own_the_resource(self) -> None:
        """Take the lock of this resource on this node; wait a little for another instance to go."""
        if self._lock.acquire():
            return
        _LOG.warning(
            "%s is served on this node by another process (%s); waiting for it to go",
            self.endpoint.resource,
            self._lock.owner(),
        )
        until = time.monotonic() + self._timing.takeover
        while time.monotonic() < until:
            await asyncio.sleep(0.1)  # flock has no wait with a deadline
            if self._lock.acquire():
                return
        raise InstanceError(
            f"{self.endpoint.resource} is served on this node by another process already ({self._lock.owner()}, "
            f"which holds {self._lock.path}); stop it, or give this one another resource name"
        )

    async def _be_served(self) -> None:
        """Have a server whose socket is in its place."""
        await self._own_the_resource()
        if not self._in_place():
            self._retire()
            await self._serve()

    def _in_place(self) -> bool:
        return self._socket is not None and self._own is not None and file_identity(self._socket) == self._own

    async def _serve(self) -> None:
        """Start a server on a socket of a name of its own."""
        self._sweep()
        path = self._directory / socket_name(self.endpoint.resource, str(self._directory), secrets.token_hex(4))
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)))
        add_DevicePluginServicer_to_server(self.endpoint, server)
        try:
            server.add_insecure_port(unix_address(path))
        except RuntimeError as error:
            raise DirectoryError(f"{self._directory}: cannot make a socket there: {error}; {_NEEDS}") from error
        await server.start()
        self._server, self._socket, self._own = server, path, file_identity(path)

    def _sweep(self) -> None:
        """Remove sockets that earlier instances of this resource left behind when they were killed.

        This process holds the resource's lock, and nobody answers there: they are nobody's.
        """
        prefix = socket_name(self.endpoint.resource, str(self._directory), "x" * 8).removesuffix("x" * 8 + ".sock")
        for path in self._directory.glob(f"{glob_escape(prefix)}*.sock"):
            if (
                path != self._socket
                and re.fullmatch(r"[0-9a-f]{8}\.sock", path.name.removeprefix(prefix))
                and is_abandoned(path)
            ):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _retire(self) -> None:
        """Let the server go whose socket is lost; calls in flight may end."""
        server, self._server, self._socket, self._own = self._server, None, None, None
        if server is not None:
            # Its socket's name is never used again, so that its stop() unlinks nobody's socket.
            task = asyncio.create_task(server.stop(self._timing.drain))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _close(self) -> None:
        """Remove the own socket, let calls in flight end, end the streams.

        In this order: with the stream the kubelet closes its connection, and fails pods whose Allocate is in flight.
        """
        self.statistics.registered = False
        if self._socket is not None and self._in_place():
            with contextlib.suppress(OSError):
                self._socket.unlink()
        if self.endpoint.live:
            await self.endpoint.settled(self._timing.calls)
        self.endpoint.serving = False  # a stream that the kubelet is just beginning would be waited for
        await self.endpoint.end_streams(self._timing.stream)
        self._retire()
        if self._stopping:
            await asyncio.wait(self._stopping, timeout=self._timing.drain + 1.0)
        self._lock.release()

    def _tell(self, key: str, message: str, level: int = logging.INFO) -> None:
        """Say something once, until something else is to be said."""
        if self._told != key:
            self._told = key
            _LOG.log(level, "%s: %s", self.endpoint.resource, message)


async def _answer(call: Awaitable[pb.Empty]) -> pb.Empty:
    return await call


def glob_escape(text: str) -> str:
    """Return a glob pattern that matches just this text."""
    return re.sub(r"([*?[])", r"[\1]", text)
