"""Defines a source of simulated devices without hardware or device nodes, for demonstrations and tests."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from deviceplugin import filewatch, looked_at
from deviceplugin.device import Device, Health
from deviceplugin.looks import Looks
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)


class SimulatedSource(DeviceSource):
    """Lists simulated devices sim-0, sim-1 and so on. Each NUMA node has a block of consecutive devices.

    count: the number of devices at the start. numa: the number of NUMA nodes; None if the devices' NUMA nodes are
    unknown. unhealthy_file: the path of a file with the ids of unhealthy devices, as in the config file. prefix: the
    text before the hyphen in each id. resource: the resource's name, if the source is not an entry of a config file.
    rescan: the maximum seconds between two reads of the file.
    """

    def __init__(
        self,
        count: int,
        *,
        numa: int | None = None,
        unhealthy_file: str | None = None,
        prefix: str = "sim",
        resource: str = "",
        rescan: float = 30.0,
    ) -> None:
        self.resource = resource or self.resource
        self._file = unhealthy_file
        self._looks = Looks("the file of unhealthy devices", threads=1, resource=self.resource)
        self._rescan = rescan
        self._lock = threading.Lock()
        self._watches: set[filewatch.Watch] = set()
        self._devices = {
            f"{prefix}-{index}": Device(f"{prefix}-{index}", numa=index * numa // count if numa else None)
            for index in range(count)
        }
        self._warned = ""
        self._unhealthy: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"<SimulatedSource {self.resource or 'of'} {len(self._devices)} devices>"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices with their present health."""
        with self._lock:
            return tuple(
                device.with_health(Health.UNHEALTHY, self._unhealthy[name]) if name in self._unhealthy else device
                for name, device in self._devices.items()
            )

    def add(self, device: Device | str) -> None:
        """Plug a device in, or replace the device with the same id. Thread-safe."""
        if isinstance(device, str):
            device = Device(device)
        with self._lock:
            self._devices[device.id] = device
        self._wake()

    def remove(self, device: str) -> None:
        """Unplug a device. Raises KeyError if no device has this id. Thread-safe."""
        with self._lock:
            del self._devices[device]
        self._wake()

    def set_health(self, device: str, health: Health, message: str = "") -> None:
        """Set a device's health and the reason. Raises KeyError if no device has this id. Thread-safe."""
        with self._lock:
            self._devices[device] = self._devices[device].with_health(health, message)
        self._wake()

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices now and whenever one of them changes."""
        directories = [os.path.dirname(self._file)] if self._file else []
        with filewatch.shared().watch(directories, filewatch.NAMES_AND_WRITES) as watch:
            with self._lock:
                self._watches.add(watch)
            try:
                listed: Sequence[Device] | None = None
                while True:
                    if self._file:
                        await self._looks.until_answered("list", self.read, self._file)
                    devices = self.devices
                    if devices != listed:
                        listed = devices
                        yield devices
                    await watch.wait(self._rescan, unwatched=filewatch.AT_REST)
            finally:
                with self._lock:
                    self._watches.discard(watch)

    def _wake(self) -> None:
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.wake()

    def read(self, file: str) -> None:
        """Read the file of unhealthy devices. If the file cannot be read, the health of the devices does not change."""
        warning = ""
        looked_at.at(file)
        try:
            with open(file, encoding="utf-8") as stream:
                lines = [line.strip() for line in stream.read(1 << 20).splitlines()]
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            warning = f"{file} cannot be read, the health of simulated devices stays as it is: {error}"
        if not warning:
            named = (line.partition(" ") for line in lines if line and not line.startswith("#"))
            self._unhealthy = {name: why.strip() or f"named in {file}" for name, _, why in named}
            if unknown := sorted(self._unhealthy.keys() - self._devices.keys()):
                warning = f"{file} names devices that do not exist: {', '.join(unknown[:5])}"
        if warning and warning != self._warned:
            _LOG.warning("%s", warning)
        self._warned = warning
