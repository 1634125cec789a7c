"""Makes a resource's device list for the kubelet, and the ListAndWatch streams that send the list."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.foreign_plugin import LATE, SentList
from deviceplugin.kubelet.podresources import AllocationsInFlight
from deviceplugin.sharing import device_of, replicas_of, shares
from deviceplugin.source import DeviceSource
from deviceplugin.tasks import in_time
from deviceplugin.wire import deviceplugin_pb2 as pb

_LOG: Final = logging.getLogger(__name__)

MAX_LIST_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of a device list. After a larger message, the kubelet shows a capacity of 0 (kubernetes#109304)."""
_TOO_LARGE: Final = (
    "the list of %d devices has %d bytes, more than the %d that the kubelet takes; it is not sent. "
    "Use shorter device ids, fewer devices or replicas, or leave the topology out"
)
ANY_REPLICAS: Final = 2  # `device_of` treats all numbers of replicas above 1 in the same way.


class Entry(NamedTuple):
    """One device id in the device list for the kubelet."""

    name: str
    healthy: bool
    numa: tuple[int, ...]


def rendered(lines: Iterable[Entry]) -> pb.ListAndWatchResponse:
    """Return the ListAndWatch message that contains these entries."""
    response = pb.ListAndWatchResponse()
    for line in lines:
        device = response.devices.add(ID=line.name, health="Healthy" if line.healthy else "Unhealthy")
        for node in line.numa:
            device.topology.nodes.add(ID=node)
    return response


class DeviceIds:
    """The ids under which the kubelet knows the devices of one resource.

    The number of replicas of a device changes only while the device has no holder. A legacy id is an id from before a
    change of the configuration; it stays in the list as unhealthy, because a pod may hold it. held: a function that
    returns whether a device has a holder.
    """

    def __init__(
        self, source: DeviceSource, inventory: Inventory, held: Callable[[str], bool] = lambda device: False
    ) -> None:
        self._source = source
        self._inventory = inventory
        self._held = held
        self._times: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self.legacy: Mapping[str, str] = {}  # For each legacy id, its device.

    def entries(self, offers: Callable[[str], bool], withheld: Collection[str]) -> tuple[Entry, ...]:
        """Return the present device list for the kubelet.

        A device of unknown health is listed as healthy, because only broken devices should be withdrawn from pods. Ids
        of a device that is not offered, and legacy ids, are listed as unhealthy instead of being left out. offers: a
        function that returns whether a device is offered to pods. withheld: further ids to list as unhealthy.
        """
        shown: dict[str, Entry] = {}
        numa: dict[str, tuple[int, ...]] = {}
        for device in self._inventory.snapshot.devices.values():
            usable = device.health.usable and offers(device.id)
            of = numa[device.id] = device.numa_nodes if self._source.topology else ()
            for name in self.names_of(device):
                shown[name] = Entry(name, usable and name not in withheld, of)
        for name, its_device in self.legacy.items():
            if name not in shown:
                shown[name] = Entry(name, False, numa.get(its_device, ()))
        return tuple(shown.values())

    def offered(self) -> tuple[str, ...]:
        """Return the present ids of all listed devices, without legacy ids (of earlier configurations)."""
        return tuple(name for device in self._inventory.snapshot.devices.values() for name in self.names_of(device))

    def replace(self, source: DeviceSource) -> None:
        """Replace the source. The ids that do not exist with the new source become legacy ids."""
        before = {**{name: self.device_id_of(name) for name in self.offered()}, **self.legacy}
        self._source = source
        self._inventory.share(shares(source, self._inventory.snapshot.devices.values()))
        self._times, self._refused = {}, {}
        now = frozenset(self.offered())
        self.legacy = {name: device for name, device in before.items() if name not in now}

    def keep(self, names: Iterable[str]) -> None:
        """Add to the legacy ids those of the ids `names` that are not present ids of devices."""
        offered = frozenset(self.offered())
        kept = {name: self.device_id_of(name) for name in sorted(names) if name not in offered}
        self.legacy = {**self.legacy, **kept}

    def forget(self, names: Iterable[str]) -> None:
        """Remove these legacy ids from the list."""
        drop = set(names)
        self.legacy = {name: device for name, device in self.legacy.items() if name not in drop}

    def adopt_existing(self, names: Iterable[str]) -> frozenset[str]:
        """Add to the legacy ids those ids that pods had before the agent's start.

        An id whose device is not listed does not become a legacy id. Return the ids whose devices are not listed.
        """
        devices, offered = self._inventory.snapshot.devices, {*self.offered(), *self.legacy}
        ids = {name: self.device_id_of(name) for name in sorted(names) if name not in offered}
        adopted = {name: device for name, device in ids.items() if device in devices}
        self.legacy = {**self.legacy, **adopted}
        return frozenset(ids.keys() - adopted.keys())

    def device_id_of(self, name: str) -> str:
        """Return the device to which an id in the kubelet's device list belongs. The id may be a legacy id."""
        listed = self._inventory.snapshot.devices.get(self.offered_as(name))
        if name in self.legacy and (listed is None or name not in self.names_of(listed)):
            return self.legacy[name]
        return listed.id if listed is not None else device_of(name, ANY_REPLICAS)

    def names_of(self, device: Device) -> tuple[str, ...]:
        """Return a device's present ids in the list for the kubelet, without legacy ids (of earlier configurations)."""
        if not (replicas := self._inventory.snapshot.replicas):
            return (device.id,)
        names = replicas_of(device.id, self._times_of(device, replicas.get(device.id, 1)))
        if len(names) == 1 and device_of(device.id, ANY_REPLICAS) != device.id:
            # The id of this device looks like a replica id, so the device gets a proper replica id too.
            return replicas_of(device.id, ANY_REPLICAS)[:1]
        return names

    def _times_of(self, device: Device, times: int) -> int:
        """Return the number of a device's ids: the former number while the device has a holder, otherwise `times`."""
        before = self._times.get(device.id, times)
        if times != before and self._held(device.id):
            if self._refused.get(device.id) != times:
                self._refused[device.id] = times
                text = "device %s is offered %d times as before, not %d times: a pod or claim has it"
                extra = {"resource": self._source.resource, "device": device.id}
                _LOG.warning(text, device.id, before, times, extra=extra)
            return before
        self._times[device.id] = times
        self._refused.pop(device.id, None)
        return times

    def ids_of(self, device: str) -> tuple[str, ...]:
        """Return all ids of a device that the kubelet may know, including legacy ids."""
        listed = self._inventory.snapshot.devices.get(device)
        now = self.names_of(listed) if listed is not None else (device,)
        return (*now, *(name for name, of in self.legacy.items() if of == device))

    def offered_as(self, name: str) -> str:
        """Return the id of the device that has this kubelet id now; the kubelet id itself if no device has this id."""
        listed = self._inventory.snapshot.devices.get(name)
        if listed is not None and self.names_of(listed) == (name,):
            return name
        return device_of(name, ANY_REPLICAS) if self._inventory.snapshot.replicas else name


@dataclass(eq=False, slots=True)
class Stream:
    """One ListAndWatch call.

    shown: the time (monotonic seconds) and the healthy ids of the last list that the stream sent.
    """

    ending: bool = False
    shown: tuple[float, frozenset[str]] | None = None


class ListStreams:
    """The ListAndWatch streams of a resource. begun: the number of streams that have been opened so far.

    lines: a function that returns the present device list, or None before the source's first list. in_flight: counts
    the running Allocates. A device list that withdraws no device is sent only after `AllocationsInFlight.pause`.
    """

    def __init__(
        self, resource: str, lines: Callable[[], tuple[Entry, ...] | None], in_flight: AllocationsInFlight
    ) -> None:
        self.begun = 0
        self.sent: tuple[SentList, ...] = ()
        """The last sent device list, and the lists that it replaced less than LATE seconds ago; the oldest first."""
        self._resource = resource
        self._lines = lines
        self._in_flight = in_flight
        self._serving = True
        self._on_end: Callable[[], None] = lambda: None
        self.open: set[Stream] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._wake = asyncio.Event()
        self._resends = 0
        self._version = 0
        """The version of the device list: a number that grows with each `refresh` and with each new stream."""
        self._made: tuple[int, tuple[Entry, ...] | None, frozenset[str]] = (-1, None, frozenset())
        """The last computed device list, as (version of the list, list, healthy ids in the list)."""

    def start(self, on_end: Callable[[], None]) -> None:
        """Accept ListAndWatch streams. on_end: a function that is called when the last open stream has ended."""
        self._serving, self._on_end = True, on_end

    def stop(self) -> None:
        """Make each open stream, and each new stream, end instead of sending another device list."""
        self._serving, self._on_end = False, lambda: None

    @property
    def live(self) -> bool:
        """Whether a ListAndWatch stream is open."""
        return bool(self.open)

    def shown(self) -> tuple[float, frozenset[str]] | None:
        """Return (monotonic seconds, ids): the time of the last device list to the kubelet, and its healthy ids.

        The result is None if no stream is open, or while an open stream has not sent its first list. If several streams
        are open, the result has the latest of their times and the healthy ids of all of them.
        """
        shown = [stream.shown for stream in self.open if stream.shown is not None]
        if not shown or len(shown) < len(self.open):
            return None
        return max(at for at, _ in shown), frozenset().union(*(ids for _, ids in shown))

    def healthy(self) -> frozenset[str] | None:
        """Return the ids that are Healthy in the last sent device list or in the next one.

        The result is None in the same cases as that of `shown`.
        """
        if (shown := self.shown()) is None:
            return None
        return shown[1] | self._now()[1]

    def staying(self) -> frozenset[str] | None:
        """Return the ids that are Healthy both in the last sent device list and in the next one.

        The result is None in the same cases as that of `shown`.
        """
        if (shown := self.shown()) is None:
            return None
        return shown[1] & self._now()[1]

    async def end(self, timeout: float) -> bool:
        """End every stream; return whether all streams have ended within `timeout` seconds."""
        for stream in self.open:
            stream.ending = True
        self.refresh()
        return await in_time(self._none_open.wait(), timeout)

    def refresh(self) -> None:
        """Compute the device list again, and send it on every stream if it has changed."""
        self._version += 1
        self._wake.set()
        self._wake = asyncio.Event()

    def resend(self) -> bool:
        """Send the present list again, so that the kubelet writes its checkpoint; return whether a stream is open."""
        self._resends += 1
        self._wake.set()
        self._wake = asyncio.Event()
        return any(stream.shown is not None for stream in self.open)

    def _now(self) -> tuple[tuple[Entry, ...] | None, frozenset[str]]:
        """Return the present device list, which is computed once for each version, and its healthy ids."""
        if self._made[0] != self._version:
            lines = self._lines()
            self._made = self._version, lines, frozenset(line.name for line in lines or () if line.healthy)
        return self._made[1:]

    def _note(self, now: SentList) -> None:
        """Record the list that is sent now. Drop former lists that were replaced more than LATE seconds ago."""
        replaced = itertools.pairwise((*self.sent, now))
        self.sent = (*(sent_list for sent_list, after in replaced if after.at > now.at - LATE), now)

    async def lists(self) -> AsyncGenerator[pb.ListAndWatchResponse, None]:
        """Open a ListAndWatch stream: yield the device list now and after each change, until the stream is ended."""
        stream = Stream()
        self.open.add(stream)
        self._none_open.clear()
        self.begun += 1
        self._version += 1  # The first list of a stream is computed anew, with the options that the kubelet read last.
        _LOG.debug("the kubelet listens to the device list", extra={"resource": self._resource})
        try:
            sent: tuple[Entry, ...] | None = None
            refused: tuple[Entry, ...] | None = None
            resends, paused = self._resends, False
            while self._serving and not stream.ending:
                wake, (lines, healthy) = self._wake, self._now()
                if resends != self._resends:
                    resends, sent = self._resends, None
                if lines is not None and lines not in (sent, refused):
                    # Only a list that withdraws no device may wait. A withdrawal is sent at once, because the next pod
                    # in a burst could get the withdrawn device.
                    if not paused and sent is not None and stream.shown is not None and stream.shown[1] <= healthy:
                        await self._in_flight.pause()
                        paused = True
                        continue
                    message = rendered(lines)
                    if (size := message.ByteSize()) <= MAX_LIST_BYTES:
                        self._note(SentList(time.time(), healthy))
                        yield message
                        sent = lines
                        stream.shown = (time.monotonic(), healthy)
                    else:
                        refused = lines
                        _LOG.error(_TOO_LARGE, len(lines), size, MAX_LIST_BYTES, extra={"resource": self._resource})
                    del message
                await wake.wait()  # `wake` is already set if the device list changed while it was being sent.
                paused = False
        finally:
            self.open.discard(stream)
            if not self.open:
                self._none_open.set()
                _LOG.debug("the kubelet no longer listens to the device list", extra={"resource": self._resource})
                self._on_end()
