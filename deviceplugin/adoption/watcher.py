"""Plugins that do not call Register: they have a socket in `plugins_registry`, and are found there and asked.

SR-IOV's and Mellanox's RDMA plugin do so where that directory is mounted into their container, the Kubernetes sample
where the file DEPRECATION is in the other one.

Facts (kubelet 1.36.3, pluginmanager): it takes every socket below the directory whose name does not begin with a dot,
those that it finds at its start, too, and removes none. It dials the socket (10 s), calls GetInfo (1 s), connects to
the endpoint, or to the same socket if there is none, and says by NotifyRegistrationStatus what came of it (5 s). What
fails is tried again, after 0.5 s to 2 min. A plugin that hears of a failure ends its server (RDMA) or starts it
again (SR-IOV). It hears of it here, as from the kubelet, each time that its registration is refused.

The endpoint is a path within the plugin's container. Here its last part counts: the socket lies where the one lies that
was asked, or among those of the plugins that call Register.
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
"""Seconds for GetInfo, from the moment the socket is there."""
TELL: Final = 5.0
"""Seconds for NotifyRegistrationStatus."""
CHECK: Final = 10.0
"""Seconds between two looks at the directory, should the file watch miss a change."""
Found = tuple[Path, FileIdentity]


class RefusedError(Exception):
    """Raised when a registration is refused, for a reason that the kubelet would have, too."""


class PluginWatcher:
    """Asks every socket below a directory for its plugin, once for each file.

    elsewhere: where else an endpoint's socket may lie. take: takes a plugin by its resource, the versions of the API
    that it supports and the socket of its service; raises RefusedError. looks: at the directory.
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
        """Follow the directory, which is there, until cancelled."""
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
        """Register a plugin, as often as it takes."""
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
        """Ask a plugin what it is, take it, and tell it. Raises RefusedError, grpc.aio.AioRpcError."""
        # Most nodes have no such plugin, and need not the memory for it.
        from deviceplugin.wire import pluginregistration_pb2 as pb
        from deviceplugin.wire.pluginregistration_pb2_grpc import RegistrationStub

        async with grpc.aio.insecure_channel(unix_address(socket), options=CHANNEL_OPTIONS) as channel:
            stub: Any = RegistrationStub(channel)  # its annotations are those of a channel that is not of asyncio
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
    """Return the first of these paths at which a socket is, else the first one. Blocks."""
    return next((place for place in places if place.is_socket()), places[0])


def _sockets(directory: Path) -> tuple[list[str], set[Found]]:
    """Return the directories at and below one, and the sockets in them."""
    directories, sockets = [], set()
    for where, below, names in os.walk(directory):
        directories.append(where)
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            path = os.path.join(where, name)
            try:
                status = os.lstat(path)
            except OSError:  # it has gone
                continue
            if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                sockets.add((Path(path), FileIdentity.of(status)))
    return directories, sockets
