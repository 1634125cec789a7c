"""Finds plugins that do not call Register, from the sockets in `plugins_registry`, and registers these plugins.

The plugins of SR-IOV and of Mellanox's RDMA register this way if `plugins_registry` is mounted into their container.
The Kubernetes sample plugin registers this way if the file DEPRECATION is in the device plugin directory.

The agent acts as the kubelet does (1.36.3, pluginmanager). The kubelet uses every socket below the directory, including
sockets that exist at its start, unless the socket's name begins with a dot; it removes no socket. It connects to the
socket (timeout 10 s) and calls GetInfo (1 s). Then it connects to the endpoint in the response, or to the same socket
if the response names no endpoint, and reports the result by NotifyRegistrationStatus (5 s). It repeats failed steps
after 0.5 to 120 s. A plugin to which a failure is reported ends its server (RDMA) or starts its server again (SR-IOV).

The endpoint in the response to GetInfo is a path within the plugin's container, so the agent uses only the path's last
element. The agent searches a socket with this name in the directory of the socket at which it called GetInfo, then in
the directory of plugins that call Register.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from deviceplugin import filewatch
from deviceplugin.backoff import Backoff
from deviceplugin.files import FileIdentity
from deviceplugin.kubelet.podresources import CHANNEL_OPTIONS, unix_address
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.tasks import cancel_all

_LOG: Final = logging.getLogger(__name__)

TYPE: Final = "DevicePlugin"
ASK: Final = 10.0
"""Seconds within which a plugin must accept the agent's connection and respond to GetInfo."""
TELL: Final = 5.0
"""Seconds within which a plugin must respond to NotifyRegistrationStatus."""
CHECK: Final = 10.0
"""Maximum seconds between two reads of the directory, in case a change causes no file event."""
Found = tuple[Path, FileIdentity]


class RefusedError(Exception):
    """Raised when the agent refuses a plugin's registration, for a reason for which the kubelet would refuse it too."""


class PluginWatcher:
    """Calls GetInfo at every socket below a directory, once for each socket file, and registers the plugin.

    elsewhere: another directory in which an endpoint's socket may be. take: a function that registers a plugin, or
    raises RefusedError; its arguments are the resource, the API versions, and the socket of the plugin's service.
    looks: the threads for reads of the directory.
    """

    def __init__(
        self,
        directory: Path,
        elsewhere: Path,
        take: Callable[[str, Sequence[str], Path], Coroutine[Any, Any, None]],
        looks: Looks,
    ) -> None:
        self._looks = looks
        self.directory = directory
        self._elsewhere = elsewhere
        self._take = take
        self._asked: dict[Found, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Find and register plugins until cancelled. The directory of the plugins' sockets must exist."""
        with filewatch.shared().watch([str(self.directory)]) as watch:
            try:
                while True:
                    try:
                        directories, sockets = await self._looks.at("sockets", _sockets, self.directory)
                    except LookTimeoutError as error:
                        _LOG.warning("cannot see whether plugins register: %s", error)
                        await watch.wait(CHECK)
                        continue
                    for gone in self._asked.keys() - sockets:
                        self._asked.pop(gone).cancel()
                    for new in sorted(sockets - self._asked.keys()):
                        self._asked[new] = asyncio.create_task(self._register(new[0]), name=f"ask {new[0]}")
                    watch.set(directories)
                    await watch.wait(CHECK, unwatched=filewatch.AT_REST)
            finally:
                await cancel_all(self._asked.values())

    async def _register(self, socket: Path) -> None:
        """Register the plugin at this socket; try again until this succeeds."""
        backoff, logged = Backoff(first=0.5, most=120.0), ""
        while True:
            try:
                await self._try(socket)
                return
            except Exception as error:
                why = str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
                unexpected = None if isinstance(error, RefusedError | grpc.aio.AioRpcError) else error
            wait = backoff.next()
            if why != logged:
                text = "the plugin at %s is not registered: %s; trying again in %.1f s"
                _LOG.warning(text, socket, why, wait, exc_info=unexpected)
                logged = why
            await asyncio.sleep(wait)

    async def _try(self, socket: Path) -> None:
        """Call GetInfo, register the plugin, and notify the plugin of the result.

        Raises RefusedError if the agent refuses the plugin, grpc.aio.AioRpcError if GetInfo fails.
        """
        # The next two modules are imported only when a plugin is found, to save memory: most nodes have no such plugin.
        from deviceplugin.wire import pluginregistration_pb2 as pb
        from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationStub

        async with grpc.aio.insecure_channel(unix_address(socket), options=CHANNEL_OPTIONS) as channel:
            stub: Any = RegistrationStub(channel)  # The stub's type annotations are for channels without asyncio.
            info = await stub.GetInfo(pb.InfoRequest(), timeout=ASK, wait_for_ready=True)
            try:
                if info.type != TYPE:
                    raise RefusedError(f"no handler registered for plugin type: {info.type}")
                await self._take(info.name, info.supported_versions, await self._endpoint(socket, info.endpoint))
            except RefusedError as error:
                await stub.NotifyRegistrationStatus(pb.RegistrationStatus(error=str(error)), timeout=TELL)
                raise
            try:
                await stub.NotifyRegistrationStatus(pb.RegistrationStatus(plugin_registered=True), timeout=TELL)
            except grpc.aio.AioRpcError as error:
                _LOG.warning("cannot notify the plugin at %s of its registration: %s", socket, error.details())

    async def _endpoint(self, socket: Path, endpoint: str) -> Path:
        name = os.path.basename(endpoint)
        places = [socket.parent / name, self._elsewhere / name] if name else [socket]
        return await self._looks.at("sockets", first_socket, places)


def first_socket(places: Sequence[Path]) -> Path:
    """Return the first of these paths that is a socket; if there is none, the first path. Blocks."""
    return next((place for place in places if place.is_socket()), places[0])


def _sockets(directory: Path) -> tuple[list[str], set[Found]]:
    """Return a directory with all directories below it, and the sockets in them. Blocks."""
    directories, sockets = [], set()
    for where, below, names in os.walk(directory):
        directories.append(where)
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            path = os.path.join(where, name)
            try:
                status = os.lstat(path)
            except OSError:  # The directory no longer exists.
                continue
            if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                sockets.add((Path(path), FileIdentity.of(status)))
    return directories, sockets
