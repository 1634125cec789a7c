"""Handles the vendors' plugins that register in the agent's directory: their sockets, device lists, and calls to them.

The agent acts as the kubelet does (1.36.3, cm/devicemanager/plugin/v1beta1): at its start the kubelet removes the
sockets in its directory, then creates kubelet.sock. During Register the kubelet connects to the plugin's endpoint and
calls GetDevicePluginOptions; it ignores the options in the Register request. The endpoint that registered last for a
resource replaces the former endpoints. A plugin supports only one reader of its device list: a second ListAndWatch
stream takes updates from the first, or ends the plugin's process (NVIDIA, AMD, Intel, KubeVirt and others). So the
agent opens one stream for each endpoint, and keeps it open as long as the plugin runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc.aio

from deviceplugin import cdi_specs, naming
from deviceplugin.addresses import MAX_SOCKET_PATH
from deviceplugin.adoption.watcher import PluginWatcher, RefusedError, first_socket
from deviceplugin.device import printable
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.instance_lock import InstanceLock, RegistrationError
from deviceplugin.kubelet.plugin_directory import KUBELET_SOCKET
from deviceplugin.kubelet.podresources import CHANNEL_OPTIONS, SERVER_OPTIONS, unix_address
from deviceplugin.kubelet.registration import VERSION
from deviceplugin.kubelet.status import VendorConnection
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.tasks import cancel_all, in_time
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server

_LOG: Final = logging.getLogger(__name__)

REGISTRY: Final = "plugins_registry"
"""The subdirectory of the agent's directory in which plugins that do not call Register create their sockets."""
DIAL: Final = 10.0
"""Maximum seconds to wait for GetDevicePluginOptions during Register. The kubelet waits equally long."""
PRE_START: Final = 30.0
"""Maximum seconds to wait for PreStartContainer. The kubelet waits equally long."""
TURN: Final = 20.0
"""Maximum seconds for which a hanging call to one plugin delays calls to other plugins. The number is less than the
seconds for which a claim waits for a response."""
KEPT: Final = 45.0
"""Seconds for which a plugin's unused response for a claim is kept for the claim's next Prepare. The kubelet waits
equally long for a Prepare."""
GRACE: Final = 300.0
"""Seconds for which devices stay in the agent's list as Unhealthy after the vendor's plugin has removed them, or has
ended."""
TAKEOVER: Final = 5.0
"""Maximum seconds for which an agent waits for the end of another agent with the same directory."""
_SERVICE: Final = "/v1beta1.DevicePlugin/"


class ListedDevice(NamedTuple):
    """A device in the device list of a vendor's plugin. problem: why the device is not healthy, "" if it is healthy."""

    problem: str
    numa: tuple[int, ...]


VendorList = Mapping[str, ListedDevice]


def listed(message: pb.ListAndWatchResponse) -> VendorList:
    """Return, for each id in a plugin's list, the device; sorted, so that repeated or reordered lists are equal."""
    devices = {
        device.ID: ListedDevice(
            "" if device.health == "Healthy" else "the vendor's plugin lists it as unhealthy",
            tuple(sorted({node.ID for node in device.topology.nodes})),
        )
        for device in message.devices
    }
    return dict(sorted(devices.items()))


_UNANSWERED: Final = {
    grpc.StatusCode.UNAVAILABLE: "ended, or cannot be reached, during",
    grpc.StatusCode.DEADLINE_EXCEEDED: "takes too long to answer",
}


class VendorCallError(Exception):
    """Raised when a plugin refuses a call (with the plugin's message) or does not respond (with the agent's message).

    code: the gRPC status code for the kubelet; UNAVAILABLE after a lost connection. unanswered: True if the plugin did
    not respond, False if it refused the call. details: the text of the gRPC error.
    """

    def __init__(self, plugin: VendorPlugin, method: str, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details, self.unanswered = code, details, code in _UNANSWERED
        text = f"the vendor's plugin at {plugin.socket} {_UNANSWERED.get(code)} {method}: {details}"
        super().__init__(text if self.unanswered else details)


class AdoptionError(Exception):
    """Raised when no plugin can be adopted on this node, because the agent's directory is unusable."""


@dataclass(eq=False)
class VendorPlugin:
    """An endpoint that a vendor's plugin has registered. devices: the plugin's last device list.

    alive: whether the plugin's ListAndWatch stream is open. since: the time at which the plugin registered, or at which
    the plugin's stream ended (Unix seconds).
    """

    resource: str
    socket: Path
    file: FileIdentity | None
    channel: grpc.aio.Channel
    options: pb.DevicePluginOptions
    devices: VendorList | None = None
    alive: bool = True
    since: float = field(default_factory=time.time)
    claimed: dict[tuple[str, tuple[str, ...]], asyncio.Task[bytes]] = field(default_factory=dict)
    """For each (claim UID, device ids), the running or ended Allocate of `VendorPlugins.allocate_claim`. The entry is
    removed when the response is used or dropped."""
    opens: dict[str, Tokens] = field(default_factory=dict)
    """For each device id, the tokens of the device nodes in the plugin's last response for the id."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A lock that a call to this plugin holds until the plugin has responded, even if the plugin hangs."""
    pending: dict[object, float] = field(default_factory=dict)
    """For each running call, the time at which the call began (Unix seconds)."""
    _calls: dict[str, Any] = field(default_factory=dict)

    async def call(self, method: str, request: bytes, timeout: float | None = None) -> bytes:
        """Forward a call of the kubelet to the plugin; return the response unchanged. Raises VendorCallError."""
        if method not in self._calls:
            # Without serializers, requests and responses stay bytes.
            self._calls[method] = self.channel.unary_unary(_SERVICE + method)  # type: ignore[call-arg]
        this = object()
        self.pending[this] = time.time()
        try:
            return await self._calls[method](request, timeout=timeout)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise VendorCallError(self, method, error.code(), f"{error.details()}") from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # The call was cancelled because `_follow` has closed the channel. The kubelet must get a response, so this
            # handler must not end as cancelled.
            raise VendorCallError(
                self, method, grpc.StatusCode.UNAVAILABLE, "the plugin has ended its ListAndWatch stream"
            ) from error
        finally:
            del self.pending[this]

    async def call_in_turn(self, method: str, request: bytes) -> bytes:
        """Wait for the end of earlier calls, but at most `TURN` seconds, then call the plugin. Raises VendorCallError.

        The wait is limited, because the plugin may hang in an Allocate for a claim, and the kubelet admits no other pod
        before it has the response to this call.
        """
        async with contextlib.AsyncExitStack() as stack:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN):
                    await stack.enter_async_context(self.turn)
            return await self.call(method, request)

    async def allocate(self, ids: Sequence[str]) -> bytes:
        """Allocate devices to one container; return the AllocateResponse unchanged. Raises VendorCallError."""
        self._drop({key for key, task in self.claimed.items() if task.done()}, ids)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        return await self.call("Allocate", request.SerializeToString())

    def listed(self, devices: VendorList) -> None:
        """Store the plugin's new device list.

        Drop the responses for claims with an id that has left or joined the list. An id that has left the list and
        returned may stand for other hardware, so such a response is out of date.
        """
        self._drop(set(self.claimed), devices.keys() ^ (self.devices or {}).keys())
        self.opens = {name: nodes for name, nodes in self.opens.items() if name in devices}
        self.devices = devices

    def forget(self, uid: str) -> None:
        """Drop the plugin's responses for a claim that has ended."""
        for key in [key for key in self.claimed if key[0] == uid]:
            del self.claimed[key]

    def _drop(self, keys: Collection[tuple[str, tuple[str, ...]]], ids: Collection[str]) -> None:
        """Drop the responses that have one of these keys and are for any of these device ids."""
        for key in keys:
            if not set(key[1]).isdisjoint(ids):
                del self.claimed[key]

    def lists(self) -> Any:
        """Open a ListAndWatch stream; called once for each endpoint."""
        call = self.channel.unary_stream(
            _SERVICE + "ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        return call(pb.Empty())


class VendorPlugins(RegistrationServicer):
    """Serves a kubelet.sock in a directory of the agent, and follows the plugins that register there.

    The subdirectory `plugins_registry` stands for the kubelet's directory with that name. registered: a function that
    is called with the name of a resource whenever a plugin has registered the resource. cdi_directories: the node's
    directories of CDI specs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._looks = Looks(str(directory))
        self.registered: Callable[[str], None] = lambda resource: None
        self.cdi_directories: Sequence[str] = cdi_specs.DIRECTORIES
        self._turn = asyncio.Lock()
        """A lock that an Allocate of any plugin holds, but for at most `TURN` seconds.

        The kubelet calls only one plugin at a time, and a plugin process with several endpoints relies on that. The
        agent cannot find out which endpoints belong to one process: in a pod, SO_PEERCRED has no pid for a process of
        another pod. So the lock is for all plugins together.
        """
        self._plugins: dict[str, VendorPlugin] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._bypassed: set[str] = set()
        self._together: dict[str, dict[str, Collection[str]]] = {}
        """For each resource and each device id, the ids in the last list of a plugin that had the device id."""
        self._began = time.time()

    def connection(self, resource: str) -> VendorConnection:
        """Return the state of the connection to a resource's plugin. Any thread may call this method."""
        plugin = self._plugins.get(resource)
        if plugin is None:
            return VendorConnection(False, self._began)
        unanswered = min(plugin.pending.copy().values(), default=None)
        return VendorConnection(plugin.alive, plugin.since, plugin.devices is not None, unanswered)

    def plugin(self, resource: str) -> VendorPlugin | None:
        """Return the plugin with the newest endpoint of a resource; None if no plugin has registered the resource."""
        return self._plugins.get(resource)

    @property
    def registered_resources(self) -> set[str]:
        """The resources of the plugins whose streams are open."""
        return {resource for resource, plugin in self._plugins.items() if plugin.alive}

    def bypassed(self, resource: str) -> None:
        """Record that a vendor's plugin has registered a resource with the kubelet instead of the agent.

        The agent does not wait for this plugin any more, until the plugin registers with the agent.
        """
        self._bypassed.add(resource)
        self._notify()

    def registered_elsewhere(self, resource: str) -> bool:
        """Return whether the last registration of a resource's plugin was with the kubelet, not with the agent."""
        return resource in self._bypassed

    async def allocate(self, plugin: VendorPlugin, wanted: Sequence[Sequence[str]]) -> bytes:
        """Let the plugin allocate devices to one container after another.

        Return the plugin's responses, joined into one. wanted: the device ids of each container. Raises VendorCallError
        if the plugin refuses, or is gone.
        """

        async def work() -> bytes:
            return b"".join([await plugin.allocate(ids) for ids in wanted])

        return await self._in_turn(plugin, work)

    async def _in_turn(self, plugin: VendorPlugin, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Run `work`, which calls a plugin, while no other plugin is called.

        A hanging call delays the calls to all plugins for `TURN` seconds. After that it delays only calls to the same
        plugin.
        """
        ended = False

        def end_turn() -> None:
            nonlocal ended
            ended = True
            self._turn.release()
            text = "the vendor's plugin has not answered Allocate for %g s; other plugins are asked meanwhile"
            _LOG.warning(text, TURN, extra={"resource": plugin.resource})

        async with plugin.turn:
            await self._turn.acquire()
            timer = asyncio.get_running_loop().call_later(TURN, end_turn)
            try:
                return await work()
            finally:
                timer.cancel()
                if not ended:
                    self._turn.release()

    async def allocate_claim(self, plugin: VendorPlugin, uid: str, ids: Sequence[str], timeout: float) -> bytes:
        """Let the plugin allocate devices to a claim, and call PreStartContainer if required; return the response.

        The plugin's Allocate has no deadline: it continues after the caller of this method has timed out. If the same
        claim needs the same devices again within `KEPT` seconds, it gets the response of that Allocate. The response is
        dropped as out of date if the claim has ended, a device was allocated to another holder, or a device has left
        the list. uid: the claim's UID. ids: the device ids.

        Raises VendorCallError if the plugin refuses or is gone, TimeoutError if there is no response within `timeout`
        seconds, ConnectionError if the agent ends, LookupError if the response is out of date.
        """
        key, claimed = (uid, tuple(ids)), plugin.claimed
        if (task := claimed.get(key)) is None:
            task = claimed[key] = asyncio.create_task(self._allocate_claim(plugin, key), name="allocate to a claim")
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._allocated(plugin, key, done))
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise ConnectionError
        answer = task.result()
        if claimed.get(key) is not task:
            raise LookupError
        del claimed[key]
        return answer

    def _allocated(self, plugin: VendorPlugin, key: tuple[str, tuple[str, ...]], task: asyncio.Task[bytes]) -> None:
        """Keep a plugin's response until a caller uses it, for at most `KEPT` seconds. A failed call is not kept."""
        self._tasks.discard(task)

        def drop() -> None:
            if plugin.claimed.get(key) is task:
                del plugin.claimed[key]

        if task.cancelled() or task.exception() is not None:
            drop()
        else:
            asyncio.get_running_loop().call_later(KEPT, drop)

    async def _allocate_claim(self, plugin: VendorPlugin, key: tuple[str, tuple[str, ...]]) -> bytes:
        _, ids = key
        mine = asyncio.current_task()

        async def work() -> bytes:
            if plugin.claimed.get(key) is not mine:
                # No caller needs the response any more, or the response would be out of date.
                raise LookupError
            answer = await plugin.allocate(ids)
            if plugin.options.pre_start_required:
                request = pb.PreStartContainerRequest(devices_ids=ids)
                await plugin.call("PreStartContainer", request.SerializeToString(), PRE_START)
            return answer

        return await self._in_turn(plugin, work)

    async def run(self) -> None:
        """Serve kubelet.sock in the agent's directory until cancelled.

        Raises AdoptionError if plugins cannot register on this node.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_RegistrationServicer_to_server(self, server)
        lock = InstanceLock(self.directory, KUBELET_SOCKET)
        try:
            await self._serve(server, lock)
            await PluginWatcher(self.directory / REGISTRY, self.directory, self._take, self._looks).run()
        finally:
            await server.stop(0)
            await cancel_all(self._tasks)
            lock.release()

    async def _lock(self, lock: InstanceLock) -> None:
        """Lock the agent's directory, which only one agent can use; wait up to `TAKEOVER` seconds for the lock."""
        until = time.monotonic() + TAKEOVER
        while not await self._looks.at("sockets", lock.acquire):
            if time.monotonic() > until:
                owner = f"another agent ({lock.owner()}, which has locked {lock.path})"
                raise AdoptionError(f"--adopt: plugins register in {self.directory} with {owner}; stop one of them")
            await asyncio.sleep(0.1)  # The loop tries again, because flock cannot wait with a deadline.

    async def _serve(self, server: grpc.aio.Server, lock: InstanceLock) -> None:
        """Remove the plugins' sockets, then create kubelet.sock, as a kubelet does at its start.

        When a gRPC server stops, it unlinks the path of its socket, and the path may belong to a newer server by then.
        So the server's socket has a path of its own, and kubelet.sock is a hard link to it. The link replaces a former
        kubelet.sock by a rename, which plugins see as a creation of kubelet.sock (inotify).
        """
        name = f"kubelet-{os.urandom(4).hex()}.sock"
        own, link, public = (self.directory / file_name for file_name in (name, f"{name}.link", KUBELET_SOCKET))
        if len(os.fsencode(own)) > MAX_SOCKET_PATH:
            raise AdoptionError(f"--adopt: {self.directory} is too long for a socket in it; use a shorter directory")

        def clear() -> None:
            (self.directory / REGISTRY).mkdir(mode=0o750, exist_ok=True)
            for path in self.directory.iterdir():
                if path.is_socket() and path.name != KUBELET_SOCKET:
                    path.unlink(missing_ok=True)

        def publish() -> None:
            os.link(own, link)
            link.replace(public)

        try:
            await self._looks.at("sockets", lambda: self.directory.mkdir(mode=0o750, parents=True, exist_ok=True))
            await self._lock(lock)
            await self._looks.at("sockets", clear)
            await self._looks.at("sockets", server.add_insecure_port, unix_address(own))
            await server.start()
            await self._looks.at("sockets", publish)
        except (OSError, RuntimeError, RegistrationError) as error:
            why = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else error
            raise AdoptionError(f"--adopt: plugins cannot register in {self.directory}: {why}") from error
        _LOG.info("plugins can register in %s", self.directory)

    # The name of the following method is that of the kubelet's API.

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:  # noqa: N802
        """Register a plugin's endpoint as the kubelet does, with the same refusals.

        The plugin's socket is searched in the agent's directory and in `plugins_registry`, because the request need not
        contain the directory: if the file DEPRECATION does not exist, the Kubernetes sample plugin registers only the
        socket's name.
        """
        places = [directory / request.endpoint.lstrip("/") for directory in (self.directory, self.directory / REGISTRY)]
        try:
            socket = await self._looks.at("sockets", first_socket, places)
            await self._take(request.resource_name, [request.version], socket)
        except (RefusedError, LookTimeoutError) as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return pb.Empty()

    async def _take(self, resource: str, versions: Sequence[str], socket: Path) -> None:
        """Use the plugin at this socket for the resource, instead of the resource's former plugin or socket.

        Raises RefusedError.
        """
        extra = {"resource": printable(resource)}
        if VERSION not in versions:
            raise RefusedError(f"API version {', '.join(versions)!r} is not {VERSION}")
        try:
            naming.check_resource(resource)
        except naming.NamingError as error:
            raise RefusedError(str(error)) from error
        file, former = await self._looks.at("sockets", file_identity, socket), self._plugins.get(resource)
        if former is not None and former.alive and (former.socket, former.file) == (socket, file):
            # The same server of the plugin has registered again, so the open stream of its device lists stays open.
            former.options = await self._options(former)
            _LOG.info("the vendor's plugin registered again at %s", socket.name, extra=extra)
        else:
            channel = grpc.aio.insecure_channel(unix_address(socket), options=CHANNEL_OPTIONS)
            plugin = VendorPlugin(resource, socket, file, channel, pb.DevicePluginOptions())
            try:
                plugin.options = await self._options(plugin)
            except BaseException:
                await channel.close(None)
                raise
            self._plugins[resource] = plugin
            task = asyncio.create_task(self._follow(plugin), name=f"lists of {resource}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            _LOG.info("a plugin registered at %s", socket.name, extra=extra)
        self._bypassed.discard(resource)
        self._notify()
        self.registered(resource)

    async def _options(self, plugin: VendorPlugin) -> pb.DevicePluginOptions:
        """Return a plugin's options. Raises RefusedError if the plugin does not respond."""
        try:
            answer = await plugin.call("GetDevicePluginOptions", b"", DIAL)
        except VendorCallError as error:
            text = f"the endpoint {plugin.socket} did not answer GetDevicePluginOptions: {error.details}"
            _LOG.warning("%s", text, extra={"resource": plugin.resource})
            raise RefusedError(f"{plugin.resource}: {text}") from error
        return pb.DevicePluginOptions.FromString(answer)

    async def _follow(self, plugin: VendorPlugin) -> None:
        """Read a plugin's device lists until its stream ends. Ignore the lists after the plugin has been replaced."""
        why = "ended the stream"
        try:
            async for message in plugin.lists():
                plugin.listed(listed(message))
                if self._plugins.get(plugin.resource) is plugin:
                    self._notify()
        except grpc.aio.AioRpcError as error:
            why = f"{error.details() or error.code()}"
        except asyncio.CancelledError:
            why = ""  # The task is cancelled only when the agent ends, which needs no log line.
            raise
        finally:
            plugin.alive, plugin.since = False, time.time()
            if why and self._plugins.get(plugin.resource) is plugin:
                _LOG.warning("the vendor's plugin has disconnected: %s", why, extra={"resource": plugin.resource})
                self._notify()
            await plugin.channel.close(None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def doubtful(self, resource: str, held: Collection[str]) -> Mapping[str, frozenset[str]]:
        """Return, for each of these held ids that the plugin does not list, the listed ids that may be its device.

        A plugin that restarts may give its devices other ids. An id that a list had together with the held id belongs
        to another device. The lists from before this process's start are not known.
        """
        plugin, together = self._plugins.get(resource), self._together.get(resource, {})
        listed = frozenset(plugin.devices or ()) if plugin is not None and plugin.alive else frozenset()
        return {name: listed.difference(together.get(name, ())) for name in held if name not in listed}

    async def lists(self, resource: str) -> AsyncGenerator[VendorList]:
        """Yield the devices of a resource's plugin now and after each change.

        Devices that have left the plugin's list, and all devices of a plugin that has ended, are yielded as Unhealthy
        for `GRACE` seconds. An empty first list does not prove that there are no devices: the method waits up to
        `GRACE` seconds for the next list, unless the plugin registers with the kubelet itself (`bypassed`).
        """
        absent: dict[str, float] = {}
        shown: VendorList | None = None
        began = time.monotonic()
        while True:
            changed, plugin, now = self._changed, self._plugins.get(resource), time.monotonic()
            present = plugin.devices if plugin is not None and plugin.alive and plugin.devices is not None else {}
            self._together.setdefault(resource, {}).update(dict.fromkeys(present, present.keys()))
            for name in {*(shown or ()), *absent} - present.keys():
                absent.setdefault(name, now)
            absent = {name: at for name, at in absent.items() if name not in present and now - at < GRACE}
            before = shown or {}
            why = (
                "the vendor's plugin no longer lists it"
                if plugin is not None and plugin.alive
                else "the vendor's plugin has disconnected"
            )
            gone = {name: before[name]._replace(problem=why) for name in absent if name in before}
            wanted = dict(sorted({**present, **gone}.items()))
            waits = now - began < GRACE and resource not in self._bypassed
            if wanted != shown and (wanted or shown is not None or not waits):
                shown = wanted
                yield wanted
            due = [at + GRACE - now for at in absent.values()] + ([began + GRACE - now] if shown is None else [])
            await in_time(changed.wait(), max(0.0, min(due)) if due else None)
