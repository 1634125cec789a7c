"""The servicer of one resource: the five calls of device plugin API v1beta1.

It reads the inventory, calls the source's hooks and has the allocation gate record what it allocates.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import grpc
import grpc.aio

from deviceplugin import hooks
from deviceplugin.device import MAX_ID, NO_EDITS, ContainerEdits, Device, EditConflictError, printable
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet import preference
from deviceplugin.kubelet.allocation_gate import AllocationGate, AllowAll, Refusal
from deviceplugin.kubelet.device_list import MAX_LIST_BYTES, DeviceIds, Entry, entries, rendered, too_large
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from deviceplugin.kubelet.granted import annotate
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.source import DeviceSource
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import DevicePluginServicer

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
SHOWN_IDS: Final = 8
"""Ids that an error names."""


class Holders(Protocol):
    """Knows who holds a resource's ids, as `HolderTracker` does. The bodies are the answers without a tracker."""

    def unnamed_reasons(self, resource: str) -> Mapping[str, str]:
        """Return ids that are held though the kubelet may give them away, and why; they are shown unhealthy."""
        return {}

    async def still_held(self, resource: str, device_ids: Collection[str]) -> Mapping[str, str]:
        """Return the ids that another pod still holds, and why."""
        return {}


class NoHolders(Holders):
    """Stands for a tracker where there is none."""


@dataclass(slots=True)
class ServicerStatistics:
    """What an endpoint has done so far; counters only grow. Durations in seconds."""

    allocations: int = 0
    devices_allocated: int = 0
    refusals: dict[str, int] = field(default_factory=partial(defaultdict, int))
    lists_sent: int = 0
    preferences: int = 0
    preference_seconds: float = 0.0
    hook_calls: dict[str, int] = field(default_factory=partial(defaultdict, int))
    hook_failures: dict[str, int] = field(default_factory=partial(defaultdict, int))
    hook_seconds: dict[str, float] = field(default_factory=partial(defaultdict, float))


def container_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    """Return the message that carries edits into a container."""
    return pb.ContainerAllocateResponse(
        envs=edits.env,
        mounts=[pb.Mount(container_path=m.container, host_path=m.host, read_only=m.readonly) for m in edits.mounts],
        devices=[
            pb.DeviceSpec(container_path=node.path, host_path=node.host, permissions=node.permissions)
            for node in edits.device_nodes
        ],
        annotations=edits.annotations,
        cdi_devices=[pb.CDIDevice(name=name) for name in edits.cdi],
    )


@dataclass(eq=False, slots=True)
class Stream:
    """One ListAndWatch. shown: when the last list was sent (monotonic seconds), and the healthy ids in it."""

    ending: bool = False
    shown: tuple[float, frozenset[str]] | None = None


class Endpoint(DevicePluginServicer):
    """The servicer of one resource; survives servers, registrations and changes of its source.

    release_former: has `released` called of devices whose former holders have ended, before these ids are granted.
    """

    def __init__(
        self,
        source: DeviceSource,
        inventory: Inventory,
        in_flight: AllocationsInFlight,
        *,
        granted: Callable[[Sequence[str]], None] | None = None,
        release_former: Callable[[Sequence[str]], Awaitable[None]] | None = None,
        allocation_gate: AllocationGate | None = None,
        holders: Holders | None = None,
        guard: ExclusionGuard | None = None,
    ) -> None:
        self.resource = source.resource
        self.source = source
        self.inventory = inventory
        self.statistics = ServicerStatistics()
        self.streams_begun = 0
        self.ids = DeviceIds(source, inventory)
        self._allocations = in_flight
        self._calls = AllocationsInFlight()
        """Calls of the kubelet that it should not be cut off from."""
        self._granted = granted or (lambda names: None)
        self._release_former = release_former
        self._allocation_gate: AllocationGate = allocation_gate or AllowAll()
        self._holders: Holders = holders or NoHolders()
        self._guard = guard or ExclusionGuard()
        self._serving = True
        self._on_stream_end: Callable[[], None] = lambda: None
        self._streams: set[Stream] = set()
        self._streams_gone = asyncio.Event()
        self._streams_gone.set()
        self._refresh = asyncio.Event()
        self._again = 0
        inventory.subscribe(lambda snapshot: self.refresh())

    def start(self, on_stream_end: Callable[[], None]) -> None:
        """Let streams begin. on_stream_end: called when a ListAndWatch ends and no other one is live."""
        self._serving, self._on_stream_end = True, on_stream_end

    def stop(self) -> None:
        """Let every ListAndWatch end at its next list, and those that only begin."""
        self._serving, self._on_stream_end = False, lambda: None

    @property
    def options(self) -> pb.DevicePluginOptions:
        """What this resource announces: only hooks that are really there."""
        reset = "reset" in self.source.hooks
        return pb.DevicePluginOptions(pre_start_required=reset, get_preferred_allocation_available=True)

    @property
    def live(self) -> bool:
        """Whether a ListAndWatch of the kubelet is open."""
        return bool(self._streams)

    def shown(self) -> tuple[float, frozenset[str]] | None:
        """Return when the kubelet was last sent the list (monotonic seconds) and the healthy ids in it.

        None without a stream, or before its first list was sent. With several streams the ids of all of them count.
        """
        shown = [stream.shown for stream in self._streams if stream.shown is not None]
        if not shown or len(shown) < len(self._streams):
            return None
        return max(at for at, _ in shown), frozenset().union(*(ids for _, ids in shown))

    async def end_streams(self, timeout: float) -> bool:
        """End every ListAndWatch; return whether all were gone within `timeout` seconds."""
        for stream in self._streams:
            stream.ending = True
        self.refresh()
        return await _in_time(self._streams_gone.wait(), timeout)

    async def settled(self, timeout: float) -> bool:
        """Wait until no Allocate or PreStartContainer is in flight; return whether that was within `timeout` seconds.

        When the stream ends the kubelet closes their connection (kubelet 1.36.3, devicemanager).
        """
        return await _in_time(self._calls.wait(), timeout)

    def replace(self, source: DeviceSource) -> None:
        """Use another source from now on.

        Ids that it would not offer are shown, unhealthy, until they are forgotten: a pod may have them or get them.
        """
        self.source = source
        self.ids.replace(source)
        self.refresh()

    def forget(self, names: Iterable[str]) -> None:
        """Stop showing these legacy ids."""
        self.ids.forget(names)
        self.refresh()

    def adopt_existing(self, names: Iterable[str]) -> frozenset[str]:
        """Show these ids, which pods have from before this agent began; return those of devices that are not listed."""
        unlisted = self.ids.adopt_existing(names)
        self.refresh()
        return unlisted

    def refresh(self) -> None:
        """Have every stream send the list again if it has changed."""
        self._refresh.set()
        self._refresh = asyncio.Event()

    def resend(self) -> bool:
        """Send the list once more though nothing changed; return whether the kubelet listens.

        With each list the kubelet writes its checkpoint anew (kubelet 1.36.3, devicemanager).
        """
        self._again += 1
        self.refresh()
        return any(stream.shown is not None for stream in self._streams)

    async def GetDevicePluginOptions(  # noqa: N802  # the API's name, as below
        self, request: pb.Empty, context: object
    ) -> pb.DevicePluginOptions:
        """Answer which of the optional calls this plugin wants."""
        return self.options

    async def ListAndWatch(  # noqa: N802
        self, request: pb.Empty, context: object
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the list now and after each change, until the kubelet goes or the stream is ended."""
        stream = Stream()
        self._streams.add(stream)
        self._streams_gone.clear()
        self.streams_begun += 1
        _LOG.debug("%s: the kubelet listens", self.resource)
        try:
            sent: tuple[Entry, ...] | None = None
            refused: tuple[Entry, ...] | None = None
            again = self._again
            while self._serving and not stream.ending:
                refresh = self._refresh
                lines = self.lines()
                if again != self._again:
                    again, sent = self._again, None
                if lines in (sent, refused) or not self.inventory.snapshot.listed:
                    await refresh.wait()
                    continue
                message = rendered(lines)  # whatever changes until it is sent is sent as one list after it
                if (size := message.ByteSize()) <= MAX_LIST_BYTES:
                    self.statistics.lists_sent += 1
                    yield message
                    sent = lines
                    stream.shown = (time.monotonic(), frozenset(line.name for line in lines if line.healthy))
                else:
                    refused = lines
                    _LOG.error("%s", too_large(self.resource, len(lines), size))
                del message
        finally:
            self._streams.discard(stream)
            if not self._streams:
                self._streams_gone.set()
                _LOG.debug("%s: the kubelet does not listen any more", self.resource)
                self._on_stream_end()

    async def Allocate(  # noqa: N802
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Allocate devices to containers: all of the request or nothing."""
        with self._calls.busy(0.0), self._allocations.busy():
            try:
                wanted = [tuple(container.devices_ids) for container in request.container_requests]
                names = [name for container in wanted for name in container]
                await self._refuse_held(names)
                if self._release_former is not None:
                    await self._release_former(names)
                responses = [await self._response(ids) for ids in wanted]
                await self._refuse_held(names)
                await self._grant(names)
                for response, ids in zip(responses, wanted, strict=True):
                    now = {name: self._guard.granted(self.resource, self.ids.device_id_of(name)) for name in ids}
                    annotate(response, self.resource, now, self._guard.boot)
            except Refusal as refusal:
                self.statistics.refusals[refusal.reason] += 1
                _LOG.warning("%s: Allocate refused: %s", self.resource, refusal.details)
                await context.abort(refusal.code, refusal.details)
            self.statistics.allocations += 1
            self.statistics.devices_allocated += len(names)
            return pb.AllocateResponse(container_responses=responses)

    async def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: object
    ) -> pb.PreferredAllocationResponse:
        """Answer which devices go well together; never fails (an error here fails every pod of the node)."""
        began = time.perf_counter()
        response = pb.PreferredAllocationResponse()
        with self._allocations.busy(AllocationsInFlight.AFTER_PREFERENCE):
            for one in request.container_requests:
                available, must_include = list(one.available_deviceIDs), list(one.must_include_deviceIDs)
                chosen = await self._preferred(available, must_include, one.allocation_size)
                response.container_responses.add(deviceIDs=chosen)
        self.statistics.preferences += 1
        self.statistics.preference_seconds += time.perf_counter() - began
        return response

    async def PreStartContainer(  # noqa: N802
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """Reset the devices of a container that is about to start, unless one is another thing than was granted."""
        known = self.inventory.snapshot.devices
        names = dict.fromkeys(map(self.ids.device_id_of, request.devices_ids))
        devices = [known[name] for name in names if name in known]
        try:
            if devices:
                with self._calls.busy(0.0):
                    await self._guard.verify_granted((self.resource, device.id) for device in devices)
                    await self._hook("reset", self.source.reset, devices)
        except ConflictError as error:
            _LOG.warning("%s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except hooks.HookError as error:
            _LOG.warning("%s", error)
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return pb.PreStartContainerResponse()

    def lines(self) -> tuple[Entry, ...]:
        """Return the list as the kubelet is to see it now."""
        withheld = self.ids.kept().keys() | self._guard.withheld(self.resource, "plugin").keys()
        lines = entries(
            self.inventory.snapshot,
            names_of=self.ids.names_of,
            with_topology=self.source.topology,
            offers=lambda device: device not in withheld and self._allocation_gate.offers(self.resource, device),
            withheld=self._holders.unnamed_reasons(self.resource),
        )
        known, wanted = self.inventory.snapshot.devices, self.source.topology
        return lines + tuple(
            Entry(name, healthy=False, numa=known[device].numa_nodes if wanted and device in known else ())
            for name, device in self.ids.legacy.items()
        )

    def _check(self, names: Sequence[str]) -> list[Device]:
        """Return the devices of one container's ids. Raises Refusal: one is named twice, unknown or not available."""
        if len(set(names)) != len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            shown = ", ".join(printable(name[:MAX_ID]) for name in twice[:SHOWN_IDS])
            more = ", ..." if len(twice) > SHOWN_IDS else ""
            raise self._refusal("duplicate", f"device {shown}{more} is asked for twice", _INVALID)
        known, kept = self.inventory.snapshot.devices, self.ids.kept()
        devices: dict[str, Device] = {}
        for name in names:
            device = known.get(self.ids.offered_as(name))
            if device is None or name not in self.ids.names_of(device):
                raise self._refusal("unknown", f"there is no device {printable(name[:MAX_ID])}", _INVALID)
            if not device.health.usable:
                why = f": {device.message}" if device.message else ""
                raise self._refusal("unhealthy", f"device {name} is unhealthy{why}")
            if device.id in kept:
                text = f"device {name} is given out only when no pod has {kept[device.id]} any more, "
                raise self._refusal("sharing", f"{text}an id from before its sharing changed")
            devices[device.id] = device
        return list(devices.values())

    async def _refuse_held(self, names: Sequence[str]) -> None:
        """Raise Refusal for ids that the kubelet counts as free while another pod still holds them."""
        for name, why in (await self._holders.still_held(self.resource, names)).items():
            raise self._refusal("held", f"device {name} is still held: {why}")

    async def _grant(self, names: Sequence[str]) -> None:
        """Have a grant recorded. Raises Refusal: what others hold excludes it, or the allocation gate refuses."""
        devices = list(dict.fromkeys(map(self.ids.device_id_of, names)))
        keys = [(self.resource, device) for device in devices]
        try:
            await self._guard.verify(keys)
            with self._guard.reserve(keys):
                await self._allocation_gate.grant(self.resource, names, devices)
                self._granted(names)
        except ConflictError as error:
            raise self._refusal("excluded", str(error)) from error

    async def _response(self, names: Sequence[str]) -> pb.ContainerAllocateResponse:
        """Return what a container gets for these ids. Raises Refusal."""
        devices = self._check(names)
        extra: object = NO_EDITS
        try:
            if "edits" in self.source.hooks:
                extra = await self._hook("edits", self.source.edits, devices)
        except hooks.HookTimeoutError as error:
            raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "timeout", str(error)) from error
        except hooks.HookError as error:
            raise Refusal(grpc.StatusCode.INTERNAL, "edits", str(error)) from error
        if not isinstance(extra, ContainerEdits):
            details = f"edits of {self.resource} returned {type(extra).__name__}, not ContainerEdits"
            raise Refusal(grpc.StatusCode.INTERNAL, "edits", details)
        try:
            return container_response(ContainerEdits.merge((one.container_edits for one in devices), winner=extra))
        except EditConflictError as error:
            text = f"the edits of {', '.join(names)} contradict each other: {error}"
            raise self._refusal("conflict", text) from error
        except (TypeError, ValueError, AttributeError) as error:  # a number for a variable, say
            text = f"the edits cannot be sent to the kubelet: {error}"
            raise self._refusal("edits", text, grpc.StatusCode.INTERNAL) from error

    def _refusal(self, reason: str, text: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> Refusal:
        return Refusal(code, reason, f"{self.resource}: {text}")

    async def _preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        try:
            avoided = frozenset(self._allocation_gate.avoids(self.resource))
            available, must_include = preference.avoiding(avoided, self.ids, available, must_include, size)
            if "prefer" in self.source.hooks:
                chosen = await self._preferred_by_hook(available, must_include, size)
                if chosen is not None:
                    return chosen
            return preference.choice(self.source, self.inventory.snapshot, self.ids, available, must_include, size)
        except Exception:  # whatever it is, it must not fail the pods
            _LOG.exception("%s: no preference could be found", self.resource)
            return [*must_include, *(name for name in available if name not in must_include)][:size]

    async def _preferred_by_hook(self, available: list[str], must_include: list[str], size: int) -> list[str] | None:
        known = self.inventory.snapshot.devices

        def devices(names: Iterable[str]) -> list[Device]:
            return [known[name] for name in dict.fromkeys(map(self.ids.offered_as, names)) if name in known]

        try:
            preferred = await self._hook("prefer", self.source.prefer, devices(available), devices(must_include), size)
            ids = [one.id if isinstance(one, Device) else str(one) for one in preferred]
        except (hooks.HookError, TypeError) as error:
            _LOG.warning("%s; choosing without it", error)
            return None
        chosen = preference.as_names(ids, available, must_include, self.ids.offered_as)
        if chosen is None or len(chosen) != size:
            _LOG.warning(
                "prefer of %s answered %s for %d of %s; choosing without it", self.resource, ids, size, available
            )
            return None
        return chosen

    async def _hook(self, name: str, hook: Callable[..., _T | Awaitable[_T]], *args: object) -> _T:
        statistics, began = self.statistics, time.perf_counter()
        statistics.hook_calls[name] += 1
        try:
            return await hooks.call(f"{name} of {self.resource}", hook, *args, timeout=self.source.hook_timeout)
        except hooks.HookError:
            statistics.hook_failures[name] += 1
            raise
        finally:
            statistics.hook_seconds[name] += time.perf_counter() - began


async def _in_time(work: Awaitable[object], timeout: float) -> bool:
    """Wait for something; return whether it came within `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            await work
    except TimeoutError:
        return False
    return True
