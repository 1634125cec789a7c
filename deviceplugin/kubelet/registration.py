"""Keeps one resource registered with the kubelet, in a loop: serve the socket, register, watch the directory.

The kubelet loses registrations when it restarts, and sometimes without a restart. Every event wakes the same loop. The
next step is a pure function of the present state (`next_step`), so a restart of the kubelet needs no code of its own.

At its start, the kubelet (1.36.3) deletes every socket in the device plugin directory (kubelet.sock last), and then
creates kubelet.sock. The kubelet connects to the plugin before it answers Register. When an old ListAndWatch ends after
the same resource was registered again, the kubelet drops the new registration, so the agent ends the old stream first.
A recreated kubelet.sock does not prove that plugins' sockets were deleted. If a Register names a socket whose
disconnection kubelet 1.37.1 has not noticed, the kubelet refuses this socket for ever (handler.go, connectClient). So
each Register has a socket of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio

from deviceplugin import filewatch, looked_at
from deviceplugin.addresses import remove_abandoned, socket_path
from deviceplugin.backoff import Backoff
from deviceplugin.directory_watch import DirectoryReader, reading
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.kubelet.foreign_plugin import LATE, Finding, ForeignPluginWatch
from deviceplugin.kubelet.instance_lock import NEEDED, InstanceLock, RegistrationError, slug
from deviceplugin.kubelet.plugin_directory import KUBELET_SOCKET, DirectoryContents, PluginDirectory
from deviceplugin.kubelet.podresources import SERVER_OPTIONS, methods_by_name, unix_address
from deviceplugin.kubelet.servicer import Endpoint
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.tasks import Tasks
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import RegistrationStub

if TYPE_CHECKING:
    from deviceplugin.wire.deviceplugin_pb2_grpc import RegistrationAsyncStub

_LOG: Final = logging.getLogger(__name__)

VERSION: Final = "v1beta1"
LOOK: Final = 0.2
"""Minimum seconds between two checks for another plugin of the resource, which read the kubelet's checkpoint."""
LOOK_FOR_CLAIMS: Final = 0.02
"""Minimum seconds between two checks for another plugin while it might allocate devices of claims to pods."""
REST: Final = 1.0
"""Seconds between two reads of the plugin directory while a ListAndWatch is open. File events are not used then: the
end of the kubelet closes the stream, and each new checkpoint would cause three events or more."""


def socket_name(resource: str, directory: str, instance: str) -> str:
    """Return a socket's file name with the unique part `instance`. Raises RegistrationError if the path is too long."""
    try:
        return socket_path(directory, slug(resource), f"-{instance}.sock").name
    except ValueError as error:
        raise RegistrationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Seen:
    """The state from which `next_step` decides. ready: whether the resource has a device list.

    kubelet: the identity of kubelet.sock now. served: whether the agent's socket exists. live: whether a ListAndWatch
    stream is open. listened: whether a stream was opened since the last Register. registered: kubelet.sock's identity
    at the last Register. since: seconds since the last Register. foreign: evidence of another plugin's later Register.
    """

    kubelet: FileIdentity | None
    served: bool
    live: bool
    listened: bool
    registered: FileIdentity | None
    since: float
    ready: bool = True
    foreign: Finding = Finding()  # noqa: RUF009  # frozen


class Step(enum.Enum):
    """The next step of the loop that keeps a resource registered."""

    WAIT_FOR_DEVICES = "wait for the first list of devices"
    WAIT_FOR_KUBELET = "wait for the kubelet"
    REGISTER = "register"
    WAIT_FOR_STREAM = "wait for the kubelet to listen"
    REST = "rest"


def next_step(seen: Seen, patience: float) -> Step:
    """Return the next step. patience: seconds after Register within which the kubelet should open ListAndWatch."""
    if not seen.ready:
        return Step.WAIT_FOR_DEVICES
    if seen.kubelet is None:
        return Step.WAIT_FOR_KUBELET
    if not seen.served or seen.kubelet != seen.registered:
        return Step.REGISTER
    if seen.live:
        return Step.REGISTER if seen.foreign.reason else Step.REST
    return Step.REGISTER if seen.listened or seen.since >= patience else Step.WAIT_FOR_STREAM


@dataclass(slots=True)
class RegistrationStatistics:
    """Statistics of one resource's registration with the kubelet. Counters only grow."""

    registrations: int = 0
    failures: int = 0
    kubelet_restarts: int = 0
    foreign: int = 0
    """How often the agent has found proof that another plugin had registered the resource."""
    registered: bool = False
    awaits_kubelet: bool = False
    """Whether device list and socket are ready, and only the kubelet is missing for the registration."""
    contested: str = ""
    """The evidence that another plugin has registered the resource; "" after this agent has registered again."""
    error: str = ""
    """Why the resource is not registered: an error of the last Register, or the lack of kubelet.sock; else ""."""


@dataclass(slots=True)
class RegistrationTiming:
    """Time limits of a registration, in seconds; tests shorten them."""

    poll: float = 10.0  # Time between two checks of kubelet.sock without a file event.
    patience: float = 5.0  # Maximum time from Register until the kubelet calls ListAndWatch.
    register: float = 15.0  # Deadline of one Register. The kubelet tries to connect for up to 10 s.
    stream: float = 1.0  # Maximum wait for the end of the old ListAndWatch stream.
    calls: float = 15.0  # Maximum wait for running calls before their stream is ended.
    drain: float = 5.0  # Maximum wait for running calls of a stopped server.
    takeover: float = 5.0  # Maximum wait for another process to release the resource's lock.


def _bound(server: grpc.aio.Server, path: Path) -> FileIdentity | None:
    """Make a server's socket, and return its identity. Blocks. Raises RuntimeError if the socket cannot be made."""
    server.add_insecure_port(unix_address(path))
    return file_identity(path)


class SocketServer:
    """Serves an endpoint on a socket in the device plugin directory while this process has the resource's lock.

    No two sockets have the same name, so that a server's stop() cannot unlink another server's socket.
    """

    def __init__(self, endpoint: Endpoint, directory: Path, timing: RegistrationTiming, looks: Looks) -> None:
        self._looks = looks
        self.lock = InstanceLock(directory, endpoint.resource)
        self._endpoint = endpoint
        self._directory = directory
        self._timing = timing
        self._server: grpc.aio.Server | None = None
        self._socket = directory
        self._identity: FileIdentity | None = None
        self.used = False
        """Whether a Register may have named this socket to the kubelet."""
        self._swept = False
        self._stopping = Tasks()

    def is_in(self, contents: DirectoryContents) -> bool:
        """Return whether a server runs and its own socket was in the directory when `contents` was read."""
        return self._identity is not None and self._identity == contents.sockets.get(self._socket.name)

    def in_place(self) -> bool:
        """Return whether a server runs and its own socket is still at its path. Blocks."""
        return self._identity is not None and self._identity == file_identity(self._socket)

    async def _locked(self) -> bool:
        return await self._looks.at("socket", self.lock.acquire, brief=True)

    async def lock_resource(self) -> None:
        """Lock the resource for this process. If another process has the lock, wait `takeover` s for the lock.

        Raises RegistrationError if the other process does not end.
        """
        if await self._locked():
            return
        served = f"{self._endpoint.resource} is served on this node by another process already"
        owner = await self._looks.at("socket", self.lock.owner)
        _LOG.warning("%s (%s); waiting for it to end", served, owner)
        until = time.monotonic() + self._timing.takeover
        while time.monotonic() < until:
            await asyncio.sleep(0.1)  # The loop tries again, because flock cannot wait with a deadline.
            if await self._locked():
                return
        owner = f"{await self._looks.at('socket', self.lock.owner)}, which has locked {self.lock.path}"
        raise RegistrationError(f"{served} ({owner}); stop that process, or give this resource another name")

    async def serve(self, *, in_place: bool = False) -> str:
        """Return the name of a served socket that no Register has named yet. Start a server if there is no such socket.

        in_place: whether `in_place` has just returned True. Raises RegistrationError.
        """
        if in_place and not self.used:
            return self._socket.name
        await self.lock_resource()
        if not self.used and await self._looks.at("socket", self.in_place, brief=True):
            return self._socket.name
        self.retire()
        if not self._swept:
            await self._looks.at("socket", self._remove_stale_sockets)
            self._swept = True
        path = self._directory / socket_name(self._endpoint.resource, str(self._directory), os.urandom(4).hex())
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self._endpoint.add_to(methods_by_name(server))
        try:
            identity = await self._looks.at("socket", _bound, server, path, brief=True)
            await server.start()
        except RuntimeError as error:
            raise RegistrationError(f"{self._directory}: cannot make a socket there: {error}; {NEEDED}") from error
        except BaseException:
            self._stopping.start(server.stop(None))
            raise
        self._server, self._socket, self._identity, self.used = server, path, identity, False
        return path.name

    def _remove_stale_sockets(self) -> None:
        """Remove sockets of killed processes. This process has the lock, so no other process serves these sockets."""
        tail = "x" * 8 + ".sock"
        prefix = socket_name(self._endpoint.resource, str(self._directory), "x" * 8).removesuffix(tail)
        remove_abandoned(self._directory.glob(f"{prefix}{'[0-9a-f]' * 8}.sock"))

    def retire(self) -> None:
        """Stop the server, but let its running calls go on for up to `drain` seconds."""
        if self._server is not None:
            self._stopping.start(self._server.stop(self._timing.drain))
            self._server = self._identity = None

    async def remove_socket(self) -> None:
        """Remove the socket, so that no client can connect any more."""
        with contextlib.suppress(OSError):
            await self._looks.at("socket", self._remove_socket, brief=True)

    def _remove_socket(self) -> None:
        if self.in_place():
            self._socket.unlink()

    async def end(self) -> None:
        """Wait for all stopped servers to end, and release the lock."""
        self.retire()
        await self._stopping.wait(self._timing.drain + 1.0)
        self.lock.release()


@dataclass(frozen=True, slots=True)
class Accepted:
    """A Register accepted at the time `at` (monotonic seconds), after `streams` calls of ListAndWatch."""

    kubelet: FileIdentity | None
    at: float
    options: pb.DevicePluginOptions
    streams: int


class PluginRegistration:
    """Keeps one resource's endpoint served and registered until `run` is cancelled.

    directory: the device plugin directory, common to all resources of the process.
    """

    def __init__(
        self, endpoint: Endpoint, directory: PluginDirectory, timing: RegistrationTiming | None = None
    ) -> None:
        self._looks = directory.looks
        self._directory = directory
        self._foreign = ForeignPluginWatch()
        self.endpoint = endpoint
        self.statistics = RegistrationStatistics()
        self._kubelet = directory.path / KUBELET_SOCKET
        self._timing = timing or RegistrationTiming()
        self.backoff = Backoff(first=0.01, most=10.0)
        self._server = SocketServer(endpoint, directory.path, self._timing, self._looks)
        self._accepted: Accepted | None = None
        self._next_look = 0.0
        self._last_kubelet: FileIdentity | None = None  # The file kubelet.sock at the last successful Register.
        self._last_logged = ""
        self.wake: Callable[[], None] = lambda: None
        """A function that makes the loop decide its next step now, for example after a change of the source's hooks."""
        endpoint.inventory.subscribe(lambda snapshot: self.wake())

    async def run(self) -> None:
        """Serve and register until cancelled, then remove the socket and wait for calls. Raises RegistrationError."""
        try:
            with reading({self._directory: self._part}) as watch:
                self.wake = self.endpoint.wake = watch.wake
                self.endpoint.streams.start(watch.wake)
                await self._loop(watch)
        finally:
            await self._close()

    def _part(self, contents: DirectoryContents) -> object:
        """Return those contents of the directory on which the next step depends, without other resources' sockets."""
        written = None if self.endpoint.ready and not self.endpoint.streams.live else contents.checkpoint
        return contents.kubelet, written, contents.foreign, self._server.is_in(contents)

    async def _loop(self, watch: DirectoryReader) -> None:
        locked = False
        while True:
            try:
                if not locked and await self._has_directory():
                    await self._server.lock_resource()  # Fails while another process has the lock.
                locked = True
                await self._next(watch)
            except LookTimeoutError as error:
                # While reads of the directory hang, the socket stays served and registered.
                self._log_once(str(error), f"cannot see whether the kubelet is there: {error}", logging.WARNING)
                await watch.wait(self._timing.poll)

    async def _next(self, watch: DirectoryReader) -> None:
        """Execute the next step, then wait for a change. Raises LookTimeoutError if a read of the directory hangs."""
        timing = self._timing
        kubelet, served = await self._sockets_now()
        seen = self._seen(kubelet, served, await self._look())
        step = next_step(seen, timing.patience)
        self.statistics.awaits_kubelet &= step is not Step.WAIT_FOR_DEVICES
        if step is Step.REST and self._accepted is not None and self._accepted.options != self.endpoint.options:
            # The options have changed, for example because of new hooks. The kubelet reads options only at Register.
            step = Step.REGISTER
        if step is Step.REGISTER:
            await self._register_or_pause(watch, seen)
            return
        if step is Step.WAIT_FOR_DEVICES:
            await self._unregister()
            self._log_once("devices", f"waiting for {self.endpoint.awaits}")
        elif step is Step.WAIT_FOR_KUBELET:
            self.statistics.registered = False
            self.backoff.reset()
            self.statistics.error = f"{self._kubelet} is not there"
            if has_directory := await self._has_directory():
                self._log_once("kubelet", f"waiting for the kubelet ({self.statistics.error})")
            else:
                hint = "--kubelet-root and --device-plugin-dir say where it is"
                missing = f"waiting for the kubelet: no directory {self._kubelet.parent}; {hint}"
                self._log_once("directory", missing, logging.WARNING)
            if not seen.served and has_directory:
                try:
                    # Serve the socket already, so that Register can follow at once when the kubelet creates
                    # kubelet.sock.
                    await self._server.serve()
                except RegistrationError:
                    if await self._has_directory():
                        raise
                    return  # The directory was removed while the server was started.
            self.statistics.awaits_kubelet = True
        elif step is Step.REST and seen.since >= timing.patience:
            self.backoff.reset()
        due = max(0.01, timing.patience - seen.since) if step is Step.WAIT_FOR_STREAM else seen.foreign.again
        kept_back = bool(self.endpoint.kept_back)
        unwatched = filewatch.SOON if step is Step.WAIT_FOR_KUBELET else LOOK if kept_back else REST
        rests = step is Step.REST and not kept_back
        await watch.wait(due, unwatched, polled=(self._directory,) * rests, interval=LOOK * rests)

    async def _sockets_now(self) -> tuple[FileIdentity | None, bool]:
        """Return the identity of kubelet.sock, and then whether the agent's own socket is in place."""
        return await self._looks.at(
            "socket", lambda: (file_identity(self._kubelet), self._server.in_place()), brief=True
        )

    async def _look(self) -> Finding:
        """Return the evidence that another plugin has registered the resource after this agent."""
        if self._accepted is None and not self.endpoint.ready and (kept_back := self.endpoint.kept_back):
            if (record := await self.endpoint.host.recorded()) is None:
                return Finding(again=LATE)
            taken = record.registered & kept_back
            return Finding(f"its checkpoint has {min(taken)}, which is for claims, as healthy") if taken else Finding()
        if self._accepted is None or not self.endpoint.streams.live:
            return Finding()
        now = time.monotonic()
        if now < self._next_look:
            return Finding(again=self._next_look - now)
        self._next_look = now + (LOOK_FOR_CLAIMS if self.endpoint.kept_back else LOOK)
        there, record = (await self._directory.seen()).foreign, await self.endpoint.host.recorded()
        # `sent` is read last, because the record may contain a list that was sent while the record was read.
        sent = self.endpoint.streams.sent
        return self._foreign.found(record, there, sent, plugin=self.endpoint.plugin_socket)

    async def _kubelet_now(self) -> FileIdentity | None:
        return await self._looks.at("socket", file_identity, self._kubelet, brief=True)

    async def _has_directory(self) -> bool:
        """Return whether the device plugin directory exists.

        Raises RegistrationError if the path is no directory, or unreadable.
        """
        directory = self._kubelet.parent
        try:
            mode = (await self._looks.at("socket", looked_at.stat, directory, brief=True)).st_mode
        except LookTimeoutError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise RegistrationError(f"{directory}: {error.strerror}; {NEEDED}") from error
        if not stat.S_ISDIR(mode):
            raise RegistrationError(f"{directory} is not a directory; use the kubelet's device plugin directory")
        return True

    async def _register_or_pause(self, watch: DirectoryReader, seen: Seen) -> None:
        again = seen.registered is not None and seen.kubelet == seen.registered
        if seen.foreign.reason:
            self._tell(seen.foreign)
        elif again and seen.served:
            why = "no longer listens" if seen.listened else "accepted the registration but does not listen"
            level = logging.INFO if seen.listened else logging.WARNING
            _LOG.log(level, "the kubelet %s; registering again", why, extra={"resource": self.endpoint.resource})
        registered = await self._register(watch)
        if not registered or self.backoff.tries:
            delay = self.backoff.next()
            if registered and seen.foreign.reason and self.endpoint.kept_back:
                delay = min(delay, LOOK_FOR_CLAIMS)
            await self._pause(watch, delay, seen.kubelet)
        elif again:
            self.backoff.tries = 1  # This Register causes no pause. Each further Register causes a longer pause.

    def _tell(self, finding: Finding) -> None:
        """Log, and report to the host, that another plugin has registered the resource or may have registered it."""
        extra = {"resource": self.endpoint.resource}
        if not finding.sure:
            why = f"registering again because another plugin may have registered this resource: {finding.reason}"
            _LOG.info("%s", why, extra=extra)
            return
        self.statistics.foreign += 1
        self.statistics.contested = finding.reason
        text = "another plugin has registered this resource with the kubelet: %s; registering again"
        _LOG.warning(text, finding.reason, extra=extra)
        self.endpoint.host.contested(finding.reason)

    async def _pause(self, watch: DirectoryReader, delay: float, kubelet: FileIdentity | None) -> None:
        """Wait `delay` seconds before the next Register; return early if the kubelet has restarted."""
        until = time.monotonic() + delay
        while await self._kubelet_now() == kubelet:
            if (rest := until - time.monotonic()) <= 0:
                return
            await watch.wait(rest, unwatched=filewatch.SOON)
        self.backoff.reset()

    def _seen(self, kubelet: FileIdentity | None, served: bool, foreign: Finding) -> Seen:
        accepted = self._accepted
        return Seen(
            kubelet=kubelet,
            served=served,
            live=self.endpoint.streams.live,
            listened=accepted is not None and self.endpoint.streams.begun > accepted.streams,
            registered=accepted.kubelet if accepted is not None else None,
            since=time.monotonic() - accepted.at if accepted is not None else 0.0,
            ready=self.endpoint.ready or (bool(foreign.reason or accepted) and bool(self.endpoint.kept_back)),
            foreign=foreign,
        )

    async def _register(self, watch: DirectoryReader) -> bool:
        """Serve a socket if there is none, end the old ListAndWatch stream, and call Register once.

        Return whether the kubelet accepted the registration.
        """
        resource, timing = self.endpoint.resource, self._timing
        accepted, self._accepted = self._accepted, None
        if self.endpoint.streams.live and accepted is not None and accepted.kubelet == await self._kubelet_now():
            await self.endpoint.calls_ended(timing.calls)  # The kubelet ends running calls together with the stream.
        self.statistics.registered = False
        if not await self.endpoint.streams.end(timing.stream):
            _LOG.warning("an old ListAndWatch did not end in time; starting a new server", extra={"resource": resource})
            self._server.retire()
        await self._server.serve()
        self.endpoint.streams.sent = ()
        there, record = (await self._directory.now()).foreign, await self.endpoint.host.recorded()
        self.endpoint.keep_registered(record.registered if record is not None else ())
        self._foreign.begin(record, there)
        options = self.endpoint.options
        try:
            async with self._directory.turn as turn:
                # Check the agent's socket just before Register: a starting kubelet deletes all sockets, perhaps while
                # this coroutine waited for `turn`. The kubelet would try for 10 s to connect to a deleted socket.
                kubelet, in_place = await self._sockets_now()
                name = await self._server.serve(in_place=in_place)
                await self.endpoint.host.kubelet_started(kubelet)
                streams = self.endpoint.streams.begun
                request = pb.RegisterRequest(version=VERSION, endpoint=name, resource_name=resource, options=options)
                stub: RegistrationAsyncStub = RegistrationStub(await turn.channel(kubelet))  # type: ignore[assignment]
                self._server.used = True
                call = asyncio.ensure_future(stub.Register(request, timeout=timing.register))
                if not await self._answered(call, watch, kubelet):
                    return False
        except grpc.aio.AioRpcError as error:
            gone = error.code() is grpc.StatusCode.UNAVAILABLE
            self._server.used = not gone
            self.statistics.failures += not gone
            self.statistics.awaits_kubelet = gone  # No kubelet listens on a kubelet.sock from before a reboot.
            why = f"{error.code().name}: {error.details()}"
            text = f"does not answer at {self._kubelet}" if gone else f"refused the registration ({why})"
            self.statistics.error = f"the kubelet {text}"
            self._log_once(why, f"the kubelet {text}; trying again", logging.INFO if gone else logging.ERROR)
            return False
        again, self.statistics.registrations = self.statistics.registrations, self.statistics.registrations + 1
        self.statistics.kubelet_restarts += self._last_kubelet not in (None, kubelet)
        self.statistics.registered, self.statistics.awaits_kubelet = True, False
        self.statistics.contested = self.statistics.error = ""
        self._last_kubelet, self._last_logged = kubelet, ""
        self._accepted = Accepted(kubelet, time.monotonic(), options, streams)
        _LOG.info("registered%s as %s with the kubelet", " again" if again else "", name, extra={"resource": resource})
        return True

    async def _answered(
        self, call: asyncio.Task[pb.Empty], watch: DirectoryReader, kubelet: FileIdentity | None
    ) -> bool:
        """Wait for Register's response; return False if the kubelet restarts or ends meanwhile. Raises AioRpcError."""
        try:
            while not call.done():
                hint = asyncio.create_task(watch.wait(self._timing.poll, unwatched=filewatch.SOON))
                await asyncio.wait({call, hint}, return_when=asyncio.FIRST_COMPLETED)
                hint.cancel()
                if not call.done() and await self._kubelet_now() != kubelet:
                    return False
            return await call is not None
        finally:
            call.cancel()

    async def _unregister(self) -> None:
        """End an open ListAndWatch stream: the kubelet then offers no devices, and another plugin may register."""
        self.statistics.registered, self._accepted = False, None
        if self.endpoint.streams.live:
            await self.endpoint.calls_ended(self._timing.calls)
            await self.endpoint.streams.end(self._timing.stream)

    async def _close(self) -> None:
        """Remove the socket, wait for running calls, then end the streams.

        The streams end last, because at their end the kubelet closes its connection, and fails pods with a running
        Allocate.
        """
        self.statistics.registered = False
        await self._server.remove_socket()
        if self.endpoint.streams.live:
            await self.endpoint.calls_ended(self._timing.calls)
        self.endpoint.streams.stop()  # So `end` waits for no stream that the kubelet is beginning.
        await self.endpoint.streams.end(self._timing.stream)
        await self._server.end()

    def _log_once(self, key: str, message: str, level: int = logging.INFO) -> None:
        """Log a message unless the last logged message had the same key."""
        if self._last_logged != key:
            self._last_logged = key
            _LOG.log(level, "%s", message, extra={"resource": self.endpoint.resource})
