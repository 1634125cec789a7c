"""Calls the kubelet's PodResources service, to get the names of pods, and to make the kubelet forget ended pods.

`List` proves nothing about the holders of devices, because its response lacks holders: it is empty after the kubelet's
start, and never contains pods that were deleted by force, or init containers that are not sidecars (kubelet 1.36,
apis/podresources/server_v1.go).

`List` makes the kubelet's device manager compute its set of allocated devices again. This set then lacks the devices
that a running Allocate has chosen, and the kubelet may allocate them twice (kubernetes#137534). So the agent calls
`List` only while no Allocate is running (`AllocationsInFlight`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import grpc.aio

from deviceplugin.wire import podresources_pb2 as pb
from deviceplugin.wire.podresources_pb2_grpc import PodResourcesListerStub

if TYPE_CHECKING:
    from deviceplugin.wire.podresources_pb2_grpc import PodResourcesListerAsyncStub

_LOG: Final = logging.getLogger(__name__)

LIST_TRIES: Final = 20
"""Maximum number of tries of one `List`. The kubelet refuses calls while all its clients together make over 100 calls a
second."""
CHANNEL_OPTIONS: Final = (
    # Without this option, a socket's path becomes a percent-encoded authority, which Go servers refuse.
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: Final = (("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True, slots=True)
class _MethodsByName:
    server: grpc.aio.Server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self.server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Do nothing: the service's generic handler has the same methods."""


def methods_by_name(server: grpc.aio.Server) -> grpc.aio.Server:
    """Return a wrapper of a server, as an argument for the generated functions that add services to a server.

    The generated functions also register each method with gRPC's core, and then grpcio 1.85 keeps a task and a prepared
    call for each method. The wrapper prevents this registration; the server then finds a method by its name.
    """
    return cast("grpc.aio.Server", _MethodsByName(server))


def unix_address(path: str | Path) -> str:
    """Return a Unix socket's address for gRPC. A percent sign in the path is encoded, as RFC 3986 demands."""
    return f"unix:{quote(str(path))}"


@dataclass(frozen=True, slots=True, order=True)
class PodContainer:
    """A container that holds devices. Unknown names are "": the kubelet's checkpoint has only the UIDs of pods."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A container's use of a device through a claim. device: the device's name, as the driver has published it."""

    driver: str
    pool: str
    device: str
    claim: str
    holder: PodContainer


@dataclass(frozen=True, slots=True)
class PodResourcesReport:
    """The content of one response of `List`.

    claims: the devices that containers use through claims, including claims that the scheduler makes for extended
    resources (kubelet feature KubeletPodResourcesDynamicResources, on since 1.34). pods: (namespace, name) of every pod
    in the response.
    """

    claims: frozenset[ClaimUse] = frozenset()
    pods: frozenset[tuple[str, str]] = frozenset()


def parse_list(response: pb.ListPodResourcesResponse) -> PodResourcesReport:
    """Convert a response of `List` to a report."""
    claims = frozenset(
        ClaimUse(device.driver_name, device.pool_name, device.device_name, used.claim_name, holder)
        for pod in response.pod_resources
        for container in pod.containers
        for holder in (PodContainer(pod.namespace, pod.name, container.name),)
        for used in container.dynamic_resources
        for device in used.claim_resources
    )
    return PodResourcesReport(claims, frozenset((pod.namespace, pod.name) for pod in response.pod_resources))


class AllocationsInFlight:
    """Counts the kubelet's running calls about pods, such as Allocate, so that other work can wait for their end."""

    # Seconds for which a GetPreferredAllocation still counts as running after its end, because the kubelet calls
    # Allocate some milliseconds after the response.
    AFTER_PREFERENCE: Final = 0.5
    # Seconds for which an Allocate still counts as running after its end, because the kubelet records the allocation
    # some milliseconds after the response.
    AFTER_ALLOCATE: Final = 0.05
    # When pods start together, their calls follow each other within milliseconds. `pause` waits BETWEEN_CALLS seconds
    # for the next call, and LONGEST_PAUSE seconds in all.
    BETWEEN_CALLS: Final = 0.02
    LONGEST_PAUSE: Final = 0.1

    def __init__(self) -> None:
        self._calls = 0
        self._last = -float("inf")
        self._until = -float("inf")
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def busy(self, pause: float = AFTER_ALLOCATE) -> Iterator[None]:
        """Return a context manager for one call of the kubelet, which counts as running within the context.

        pause: seconds after the call for which `wait` still waits.
        """
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            self._last = time.monotonic()
            self._until = self._last + pause
            if not self._calls:
                self._idle.set()

    def none_since(self, moment: float) -> bool:
        """Return whether no call that `busy` counts was running since `moment` (monotonic seconds)."""
        return not self._calls and self._last < moment

    async def pause(self) -> None:
        """Wait until no call has run for BETWEEN_CALLS seconds, but for at most LONGEST_PAUSE seconds.

        Callers whose work can wait use this method, so that their work does not delay the calls of the kubelet.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.LONGEST_PAUSE):
                while (rest := self._last + self.BETWEEN_CALLS - time.monotonic()) > 0 or self._calls:
                    await (self._idle.wait() if self._calls else asyncio.sleep(rest))

    async def wait(self) -> None:
        """Wait until no call that `busy` counts is running, and the pause after the last such call is over."""
        while True:
            await self._idle.wait()
            rest = self._until - time.monotonic()
            if rest <= 0:
                return
            await asyncio.sleep(rest)


class PodResources:
    """Calls the kubelet's PodResources service. After a failed call, the next call opens a new gRPC channel."""

    def __init__(self, socket: Path, timeout: float = 10.0) -> None:
        self.socket = socket
        self._timeout = timeout
        self._last_logged = ""
        self.answers: bool | None = None
        """Whether the kubelet answered the last `List`; None if the socket does not exist, or no call was made yet."""
        self.silent_since: float | None = None
        """The time at which the first unanswered `List` began (Unix seconds); None if the last call was answered."""
        self._idle: list[grpc.aio.Channel] = []

    async def list(self) -> PodResourcesReport | None:
        """Call `List`, which makes the kubelet forget ended pods, and return the response.

        The result is None if the call fails. The caller may go on, because no decision about holders depends on the
        response.
        """
        for _ in range(LIST_TRIES):
            began = time.time()
            try:
                async with self._stub() as stub:
                    report = parse_list(await stub.List(pb.ListPodResourcesRequest(), timeout=self._timeout))
            except grpc.aio.AioRpcError as error:
                self._answered(error.code(), began)
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await asyncio.sleep(random.uniform(0.02, 0.1))  # noqa: S311  # jitter
                    continue
                why = f"{self.socket}: {error.code().name}: {error.details()}"
                if self._last_logged != why:
                    self._last_logged = why
                    _LOG.info("PodResources List failed; devices of ended pods come free later than usual: %s", why)
                return None
            self._last_logged = ""
            self._answered(grpc.StatusCode.OK, began)
            return report
        return None

    def _answered(self, code: grpc.StatusCode, began: float) -> None:
        """Record the result of a `List`. A hanging kubelet accepts connections, but its calls exceed their deadline."""
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED
        self.answers = None if code is grpc.StatusCode.UNAVAILABLE else not late
        self.silent_since = (self.silent_since or began) if late else None

    async def allocatable(self, resource: str) -> frozenset[str]:
        """Return the ids of a resource that the kubelet counts as healthy; empty if the kubelet does not answer.

        `GetAllocatableResources` changes nothing in the device manager (kubelet 1.36, devicemanager/manager.go).
        """
        with suppress(grpc.aio.AioRpcError):
            async with self._stub() as stub:
                answer = await stub.GetAllocatableResources(pb.AllocatableResourcesRequest(), timeout=self._timeout)
            return frozenset(
                device_id
                for devices in answer.devices
                if devices.resource_name == resource
                for device_id in devices.device_ids
            )
        return frozenset()

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[PodResourcesListerAsyncStub]:
        if self._idle and self._idle[0].get_state() is not grpc.ChannelConnectivity.READY:  # The kubelet has ended.
            await self._idle.pop().close(None)
        if self._idle:
            channel = self._idle.pop()
        else:
            channel = grpc.aio.insecure_channel(unix_address(self.socket), options=CHANNEL_OPTIONS)
        try:
            yield PodResourcesListerStub(channel)  # type: ignore[misc]
        except BaseException:
            await channel.close(None)
            raise
        if self._idle:  # A simultaneous call has already returned a channel.
            await channel.close(None)
        else:
            self._idle.append(channel)
