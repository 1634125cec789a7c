"""Answers the five calls of the device plugin API v1beta1 for one resource."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import operator
import time
from collections import ChainMap, Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, TypeVar

import grpc.aio

from deviceplugin import hooks
from deviceplugin.device import MAX_ID, NO_EDITS, ContainerEdits, Device, EditConflictError, in_order, printable
from deviceplugin.durations import Durations
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.files import FileIdentity
from deviceplugin.hooks import HookStatistics
from deviceplugin.identity import numbers_change
from deviceplugin.inventory import Inventory, InventorySnapshot
from deviceplugin.kubelet import preference
from deviceplugin.kubelet.allocation_wait import EXPECTED, LOOK, EndingHolders
from deviceplugin.kubelet.checkpoint import annotate
from deviceplugin.kubelet.device_list import DeviceIds, Entry, ListStreams
from deviceplugin.kubelet.foreign_plugin import KubeletRecord
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.looks import LookTimeoutError
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import LedgerError
from deviceplugin.register.register import OtherSideError, Register, UnknownHolderError
from deviceplugin.source import DeviceSource
from deviceplugin.tasks import in_time
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import DevicePluginServicer, add_DevicePluginServicer_to_server

_T = TypeVar("_T")
_LOG: Final = logging.getLogger(__name__)

_EDITS: Final = operator.attrgetter("container_edits")
_INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT
_INTERNAL: Final = grpc.StatusCode.INTERNAL
SHOWN_IDS: Final = 8  # Maximum number of ids in one error message.
KEPT_FAILURES: Final = 256  # Number of containers whose failed start is remembered, so that each error is logged once.


@dataclass(slots=True)
class ServicerStatistics:
    """Statistics of one resource's endpoint. Counters only grow. Durations are in seconds.

    waits: the durations for which Allocates have waited for the end of former holders.
    """

    allocations: int = 0
    allocation_durations: Durations = field(default_factory=Durations)
    waits: Durations = field(default_factory=Durations)
    devices_allocated: int = 0
    refusals: dict[str, int] = field(default_factory=partial(defaultdict, int))
    lists_sent: int = 0
    preferences: int = 0
    preference_seconds: float = 0.0
    hooks: HookStatistics = field(default_factory=HookStatistics)


def container_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    """Convert a container's edits to a message of the device plugin API."""
    response = pb.ContainerAllocateResponse(envs=edits.env, annotations=edits.annotations)
    for mount in edits.mounts:
        response.mounts.add(container_path=mount.container, host_path=mount.host, read_only=mount.readonly)
    for node in edits.device_nodes:
        response.devices.add(container_path=node.path, host_path=node.host, permissions=node.permissions)
    for name in edits.cdi:
        response.cdi_devices.add(name=name)
    return response


class Refusal(Exception):  # noqa: N818  # a refusal is an answer to the kubelet, not a fault
    """Raised when the agent refuses a call of the kubelet.

    code: the gRPC status code. reason: the label `reason` in the metric of refusals. details: the text of the gRPC
    status.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.reason = reason
        self.details = details


class EndpointHost:
    """The operations of a resource's service that the resource's endpoint needs. The default methods do nothing."""

    def granted(self) -> None:
        """Note that device ids were granted to a container; called after each grant."""

    async def release_former(self, names: Sequence[str]) -> None:
        """Before a grant of these ids, run the hook `released` to its end for the devices whose holders have ended."""

    def draining(self) -> Collection[str]:
        """Return the ids of devices that new pods should get only if there are not enough other devices."""
        return ()

    async def recorded(self) -> KubeletRecord | None:
        """Return the resource's entries in the kubelet's checkpoint; None if the checkpoint cannot be read."""
        return None

    async def kubelet_started(self, kubelet: FileIdentity | None) -> None:
        """Before a Register, record the pods that may hold devices, if a new kubelet may have lost its checkpoint.

        kubelet: kubelet.sock's identity.
        """

    def contested(self, reason: str) -> None:
        """Note that another plugin has certainly registered the resource. reason: the evidence."""

    async def metadata(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the mounts of the files that describe a container's devices.

        Raises LookTimeoutError if the write of a file hangs, OSError if the write fails.
        """
        return NO_EDITS


class Endpoint(DevicePluginServicer):
    """The gRPC servicer of one resource. The object outlives its server, its registration and its source."""

    IDS: ClassVar[type[DeviceIds]] = DeviceIds

    def __init__(
        self,
        source: DeviceSource,
        inventory: Inventory,
        in_flight: AllocationsInFlight,
        host: EndpointHost | None = None,
        holders: HolderTracker | None = None,
        register: Register | None = None,
    ) -> None:
        self.resource = source.resource
        self.source = source
        self.inventory = inventory
        self.statistics = ServicerStatistics()
        self.ids = self.IDS(source, inventory, self._is_held)
        self.streams = ListStreams(source.resource, self._lines_if_listed, in_flight)
        self._allocations = in_flight
        self._calls = AllocationsInFlight()
        """The kubelet's running calls of this resource, which fail if a ListAndWatch stream of the resource ends."""
        self._asked_for: Counter[str] = Counter()
        """For each device with a running Allocate, the number of requested ids. The kubelet would crash if a device
        list lacked these ids."""
        self._announced: pb.DevicePluginOptions | None = None
        """The options in this resource's last response to GetDevicePluginOptions."""
        self.wake: Callable[[], None] = lambda: None
        """A function that makes the resource's registration decide its next step now."""
        self._failed_starts: dict[frozenset[str], str] = {}
        """For each container (by its ids), why its last start failed."""
        self.host: Final = host or EndpointHost()
        self._holders = holders
        self._ending = EndingHolders()
        self._register = register or Register()
        self._numbers_change = False
        """Whether any device, listed or held now or before, is a USB device or has a symlink as path. A restarted
        container may get another device node of such a device."""
        self._listed(inventory.snapshot)
        inventory.subscribe(self._listed)

    def _listed(self, snapshot: InventorySnapshot) -> None:
        allocations = self._register.snapshot.allocations_of(self.resource)
        tokens = (*snapshot.identities.values(), *(allocation.identity.tokens for allocation in allocations))
        self._numbers_change = (
            self._numbers_change
            or any(device.links for device in snapshot.devices.values())
            or any(map(numbers_change, tokens))
        )
        self.refresh()

    @property
    def options(self) -> pb.DevicePluginOptions:
        """The plugin's options for the kubelet.

        They request PreStartContainer only while pods have, or may get, devices from the plugin, and only if the source
        has the hook `reset`, USB devices, or devices behind symlinks.
        """
        needed = "reset" in self.source.hooks or self._numbers_change
        starts = needed and self._register.snapshot.serves_pods(self.resource)
        return pb.DevicePluginOptions(pre_start_required=starts, get_preferred_allocation_available=True)

    @property
    def ready(self) -> bool:
        """Whether there is a device list, so that the resource can be registered."""
        return self.inventory.snapshot.listed

    @property
    def awaits(self) -> str:
        """The event for which this resource waits while it is not `ready`, for messages."""
        return "the first list of devices"

    @property
    def kept_back(self) -> frozenset[str]:
        """The ids of devices for claims, which stay registered as unhealthy while the vendor's plugin is away.

        If this agent did not register them, another plugin could register them and allocate them to pods.
        """
        return frozenset()

    @property
    def plugin_socket(self) -> str:
        """The name of the socket of the adopted plugin that was registered last; "" for none."""
        return ""

    def keep_registered(self, registered: Collection[str]) -> None:
        """Prepare the device list for a Register. registered: the ids that the kubelet counts as healthy now."""

    async def calls_ended(self, timeout: float) -> bool:
        """Wait until no kubelet call about a pod is running; return whether all calls ended within `timeout` seconds.

        When a ListAndWatch stream ends, the kubelet (1.36.3) also closes the connection on which it makes such calls.
        """
        return await in_time(self._calls.wait(), timeout)

    def replace(self, source: DeviceSource) -> None:
        """Replace the resource's source.

        An id that does not exist with the new source stays in the device list as unhealthy until no pod has the id.
        """
        self.source = source
        self.ids.replace(source)
        self.refresh()

    def refresh(self) -> None:
        """Send the device list to the kubelet if the list has changed; register again if the options have changed."""
        if self._announced is not None and self._announced != self.options:
            self.wake()
        self.streams.refresh()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this servicer's calls at a gRPC server."""
        add_DevicePluginServicer_to_server(self, server)

    # The names of the methods below are those of the kubelet's API.

    async def GetDevicePluginOptions(self, request: pb.Empty, context: object) -> pb.DevicePluginOptions:  # noqa: N802
        """Return the optional calls that the kubelet should make."""
        self._announced = self.options
        return self._announced

    async def ListAndWatch(  # noqa: N802
        self, request: pb.Empty, context: object
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the device list now and after each change, until the kubelet or the agent ends the stream."""
        async with contextlib.aclosing(self.streams.lists()) as lists:
            async for message in lists:
                self.statistics.lists_sent += 1
                yield message
                del message  # Free the memory: a message may have megabytes, and the next may follow hours later.

    async def Allocate(  # noqa: N802
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Allocate devices to containers: all devices of the request, or none."""
        return await self.allocate(request, context, self._answer)

    async def allocate(
        self,
        request: pb.AllocateRequest,
        context: grpc.aio.ServicerContext[pb.AllocateRequest, _T],
        answer: Callable[[Sequence[tuple[str, ...]], Mapping[str, str]], Awaitable[_T]],
    ) -> _T:
        """Check and count an Allocate; return the response of `answer`, which grants all devices or none.

        answer: a function that grants the devices and returns the response. Its arguments are the ids of each
        container, and the device of each id.
        """
        began = time.perf_counter()
        with self._calls.busy(0.0), self._allocations.busy():
            wanted: list[tuple[str, ...]] = []
            ids: dict[str, str] = {}
            for container in request.container_requests:
                wanted.append(tuple(container.devices_ids))
                for name in wanted[-1]:
                    ids[name] = self.ids.device_id_of(name)
            names, devices = list(ids), Counter(ids.values())
            self._asked_for += devices
            try:
                if "released" in self.source.hooks:
                    await self._refuse_held(names)
                    await self.host.release_former(names)
                answered = await answer(wanted, ids)
            except (Refusal, LookTimeoutError) as error:
                refusal = error if isinstance(error, Refusal) else self._unanswered(error)
                self.statistics.refusals[refusal.reason] += 1
                extra = {"resource": self.resource, "device": ", ".join(map(printable, names[:SHOWN_IDS]))}
                _LOG.warning("Allocate refused: %s", refusal.details, extra=extra)
                await context.abort(refusal.code, refusal.details)
            finally:
                self._asked_for -= devices
                self.statistics.allocation_durations.add(time.perf_counter() - began)
            self.statistics.allocations += 1
            self.statistics.devices_allocated += len(names)
            return answered

    async def _answer(self, wanted: Sequence[tuple[str, ...]], ids: Mapping[str, str]) -> pb.AllocateResponse:
        """Grant the ids of each container; return the response with the containers' edits. Raises Refusal."""
        asked: list[dict[str, Wanted]] = []
        response = pb.AllocateResponse()
        for names in wanted:
            asked.append({})
            response.container_responses.append(await self._response(names, asked[-1]))
        await self._refuse_held(list(ids))
        since = await self._grant(ids, ChainMap(*asked))
        for its, container in zip(asked, response.container_responses, strict=True):
            annotate(container, self.resource, its, self._register.boot, since)
        return response

    async def GetPreferredAllocation(  # noqa: N802
        self, request: pb.PreferredAllocationRequest, context: object
    ) -> pb.PreferredAllocationResponse:
        """Return which devices a container should get.

        This call never returns an error, because at an error the kubelet would reject the pod.
        """
        began = time.perf_counter()
        response = pb.PreferredAllocationResponse()
        with self._calls.busy(0.0), self._allocations.busy(AllocationsInFlight.AFTER_PREFERENCE):
            for container in request.container_requests:
                available, must_include = list(container.available_deviceIDs), list(container.must_include_deviceIDs)
                chosen = await self._preferred(available, must_include, container.allocation_size)
                response.container_responses.add(deviceIDs=chosen)
        self.statistics.preferences += 1
        self.statistics.preference_seconds += time.perf_counter() - began
        return response

    async def PreStartContainer(  # noqa: N802
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """Reset a container's devices before its start.

        Return an error, so that the container does not start, if an id now stands for other hardware than at the grant,
        or for hardware that another holder has.
        """
        listed = self.inventory.snapshot.devices
        of = {name: self.ids.device_id_of(name) for name in request.devices_ids}
        devices = in_order(listed[device] for device in set(of.values()) & listed.keys())
        try:
            if of:
                with self._calls.busy(0.0):
                    begun = await self._holders.begun(self.resource, of) if self._holders is not None else ()
                    await self._register.start(self.resource, of, begun)
                    if devices and "reset" in self.source.hooks:
                        await self._register.hooks.call(self.statistics.hooks, "reset", self.source, devices)
                        # A reset may give a device another device number.
                        await self._register.start(self.resource, of, begun)
            self._failed_starts.pop(frozenset(request.devices_ids), None)
        except (DeviceConflictError, hooks.HookError, LedgerError, LookTimeoutError) as error:
            self._log_failed_start(request.devices_ids, error)
            conflict = isinstance(error, DeviceConflictError)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION if conflict else _INTERNAL, str(error))
        return pb.PreStartContainerResponse()

    def _log_failed_start(self, names: Sequence[str], error: Exception) -> None:
        """Log why the container with these ids does not start, and its pod if the last scan has found the pod."""
        by_id = self._holders.holders(self.resource) if self._holders is not None else {}
        holders = {holder for name in names for holder in by_id.get(name, ())}
        pods = ", ".join(sorted(f"{holder.namespace}/{holder.pod}" if holder.pod else holder.uid for holder in holders))
        key = frozenset(names)
        again = self._failed_starts.pop(key, "") == str(error)
        self._failed_starts[key] = str(error)
        if len(self._failed_starts) > KEPT_FAILURES:
            del self._failed_starts[next(iter(self._failed_starts))]
        ids = ", ".join(map(printable, names[:SHOWN_IDS]))
        extra = {"resource": self.resource, "device": ids} | ({"pod": pods} if pods else {})
        text = "a container%s with device %s cannot start: %s"
        where = f" of pod {pods}" if pods else "", ids
        if again:
            _LOG.debug(text, *where, error, extra=extra)  # The kubelet tries again until the pod is deleted.
        else:
            _LOG.warning(text, *where, error, extra=extra)

    def _is_held(self, device: str) -> bool:
        """Return whether a device has a holder or a grant in progress."""
        return device in self._asked_for or self._register.is_held((self.resource, device))

    def _lines_if_listed(self) -> tuple[Entry, ...] | None:
        """Return the present device list for the kubelet; None before the source's first scan.

        The kubelet reads the option `pre_start_required` only at Register. If the option is needed and the kubelet has
        not read it yet, all devices are listed as unhealthy, because containers would start without PreStartContainer.
        """
        if not self.inventory.snapshot.listed:
            return None
        if self._announced is not None and self.options.pre_start_required > self._announced.pre_start_required:
            return self.ids.entries(lambda device: False, ())
        now = self._register.withheld(self.resource, "plugin")
        self._register.offered(self.resource, "plugin", now)
        withheld = set(now.ids)
        if self._holders is not None:
            withheld.update(self._holders.unnamed_reasons(self.resource))
        return self.ids.entries(partial(self._register.offers, self.resource), withheld)

    def list_inputs(self) -> tuple[object, ...]:
        """Return the present inputs of the device list and the options. Equal results mean equal lists."""
        register, devices = self._register, self.inventory.snapshot.devices
        unknown = tuple(map(register.evidence_missing, itertools.repeat(self.resource), devices))
        refused = self._holders.unnamed_reasons(self.resource).keys() if self._holders is not None else frozenset()
        return register.offer_question(), unknown, refused, self.ids.legacy, frozenset(self._asked_for)

    def checked(self, names: Sequence[str]) -> dict[str, Device]:
        """Return, for each of one container's ids, the device.

        Raises Refusal if an id occurs twice, or the device of an id does not exist or is unhealthy.
        """
        if len(set(names)) != len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            shown = ", ".join(printable(name[:MAX_ID]) for name in twice[:SHOWN_IDS])
            more = ", ..." if len(twice) > SHOWN_IDS else ""
            raise self._refusal("duplicate", f"device {shown}{more} is requested twice", _INVALID)
        listed = self.inventory.snapshot.devices
        devices: dict[str, Device] = {}
        for name in names:
            device = listed.get(self.ids.offered_as(name))
            if device is None or name not in self.ids.names_of(device):
                raise self._refusal("unknown", f"there is no device {printable(name[:MAX_ID])}", _INVALID)
            if not device.health.usable:
                why = f": {device.message}" if device.message else ""
                raise self._refusal("unhealthy", f"device {name} is unhealthy{why}")
            devices[name] = device
        return devices

    async def _refuse_held(self, names: Sequence[str]) -> None:
        """Read the holders' evidence again. Raise Refusal if another pod still holds an id, or cannot be recorded.

        If the kubelet counts the holder as ended, this method waits for the end of the holder's processes. All
        Allocates together wait at most PATIENCE seconds for one holder (`allocation_wait`).
        """
        if self._holders is None:
            return
        began, waited = time.monotonic(), False
        try:
            held = await self._holders.still_held(self.resource, names)
            if not held and not self._ending.since:
                return
            while self._ending.waits(held, self._holders.unnamed_reasons(self.resource), names):
                waited = True
                await asyncio.sleep(LOOK)
                held = await self._holders.still_held(self.resource, names)
        except LedgerError as error:
            raise self._unrecorded(error) from error
        finally:
            if waited:
                self.statistics.waits.add(time.monotonic() - began)
        for name, why in held.items():
            self._register.waits.expect([(self.resource, self.ids.device_id_of(name)) for name in held], EXPECTED)
            self.refresh()  # The kubelet should have the new device list before it chooses devices for the next pod.
            raise self._refusal("held", f"device {name} is still held: {why}")

    def _unanswered(self, error: LookTimeoutError) -> Refusal:
        return self._refusal("timeout", str(error), grpc.StatusCode.DEADLINE_EXCEEDED)

    def _unrecorded(self, error: LedgerError) -> Refusal:
        return self._refusal("ledger", f"{error}", grpc.StatusCode.UNAVAILABLE)

    async def _grant(self, ids: Mapping[str, str], asked: Mapping[str, Wanted]) -> float:
        """Record a grant of ids; return its time (Unix seconds). The caller must have called `_refuse_held` before.

        ids: the device of each id. asked: for each id, the identity and amount for which the response was made.

        Raises Refusal if another holder excludes the grant, or if a device is for claims now.
        """
        try:
            # PreStartContainer waits for a running `reset`. Allocate does not wait for it, because that would delay all
            # pods of the node.
            since = await self._register.grant(self.resource, ids, asked, checkpoint=False)
        except UnknownHolderError as error:
            raise self._refusal("starting", str(error), grpc.StatusCode.UNAVAILABLE) from error
        except OtherSideError as error:
            raise self._refusal("side", str(error)) from error
        except DeviceConflictError as error:
            raise self._refusal("excluded", str(error)) from error
        except LedgerError as error:
            raise self._unrecorded(error) from error
        self.host.granted()
        return since

    async def _response(self, names: Sequence[str], asked: dict[str, Wanted]) -> pb.ContainerAllocateResponse:
        """Return the response for one container with these ids. Raises Refusal.

        asked: a mapping to which this method adds the identity and amount of each id.
        """
        by_name, by_id = self.checked(names), dict[str, Device]()
        # The identities are recorded before `edits` runs, because a scan or reload may change devices during the hook.
        for name, device in by_name.items():
            asked[name] = self._register.wanted(self.resource, device.id)
            by_id[device.id] = device
        devices = in_order(by_id.values())
        extra: object = NO_EDITS
        try:
            if "edits" in self.source.hooks:
                extra = await self.statistics.hooks.call("edits", self.source, self.source.edits, devices)
        except hooks.HookTimeoutError as error:
            raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "timeout", str(error)) from error
        except hooks.HookError as error:
            raise Refusal(_INTERNAL, "edits", str(error)) from error
        if not isinstance(extra, ContainerEdits):
            details = f"edits of {self.resource} returned {type(extra).__name__}, not ContainerEdits"
            raise Refusal(_INTERNAL, "edits", details)
        try:
            metadata = (await self.host.metadata(devices),) if self.source.metadata else ()
        except OSError as error:
            raise self._refusal("metadata", f"the device metadata cannot be written: {error}", _INTERNAL) from error
        try:
            edits = ContainerEdits.merge((*metadata, *map(_EDITS, devices)), winner=extra)
            response = container_response(edits)
        except EditConflictError as error:
            text = f"the edits of {', '.join(names)} contradict each other: {error}"
            raise self._refusal("conflict", text) from error
        except (TypeError, ValueError, AttributeError) as error:
            # For example, the value that `edits` returned for an environment variable is a number.
            raise self._refusal("edits", f"the edits cannot be sent to the kubelet: {error}", _INTERNAL) from error
        return response

    def _refusal(self, reason: str, text: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> Refusal:
        return Refusal(code, reason, f"{self.resource}: {text}")

    async def _preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        try:
            avoided = {*self.host.draining(), *await self._still_used(set(available).difference(must_include))}
            available, must_include = preference.avoiding(avoided, self.ids, available, must_include, size)
            if "prefer" in self.source.hooks:
                chosen = await self._preferred_by_hook(available, must_include, size)
                if chosen is not None:
                    return chosen
            return preference.choice(self.source, self.inventory.snapshot, self.ids, available, must_include, size)
        except Exception:  # The kubelet would reject the pod if the call failed.
            _LOG.exception(
                "no preference could be found; the first available ids are preferred", extra={"resource": self.resource}
            )
            return [*must_include, *(name for name in available if name not in must_include)][:size]

    async def _still_used(self, available: Collection[str]) -> set[str]:
        """Return the devices of those available ids whose former holders still have running processes."""
        recorded = self._register.snapshot.allocations
        names = [name for name in available if (self.resource, name) in recorded]
        if self._holders is None or not names:
            return set()
        return {self.ids.offered_as(name) for name in await self._holders.still_running(self.resource, names)}

    async def _preferred_by_hook(self, available: list[str], must_include: list[str], size: int) -> list[str] | None:
        listed = self.inventory.snapshot.devices

        def devices(names: Iterable[str]) -> list[Device]:
            return in_order(listed[name] for name in set(map(self.ids.offered_as, names)) & listed.keys())

        try:
            asked = devices(available), devices(must_include), size
            preferred = await self.statistics.hooks.call("prefer", self.source, self.source.prefer, *asked)
        except hooks.HookError as error:
            _LOG.warning("%s; choosing without it", error, extra={"resource": self.resource})
            return None
        if isinstance(preferred, str) or not isinstance(preferred, Iterable):
            text = "prefer must return devices or their ids, not %r; choosing without it"
            _LOG.warning(text, preferred, extra={"resource": self.resource})
            return None
        ids = [device.id if isinstance(device, Device) else str(device) for device in preferred]
        chosen = preference.as_names(ids, available, must_include, self.ids.offered_as)
        if chosen is None or len(chosen) != size:
            text = "prefer answered %s for %d of %s; choosing without it"
            _LOG.warning(text, ids, size, available, extra={"resource": self.resource})
            return None
        return chosen
