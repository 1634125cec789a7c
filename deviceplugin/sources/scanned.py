"""Defines the base class of sources that scan the file system for devices. The class decides when to scan."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from deviceplugin import filewatch
from deviceplugin.device import Device, Health
from deviceplugin.looks import Looks
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
SCAN_TIMEOUT: Final = 15.0
"""If a scan takes longer than this number of seconds, a file system may hang, so all listed devices are unhealthy."""
UNWATCHED: Final = 5.0
"""Seconds between two scans if the file system of a watched directory causes no inotify events."""
MAX_PAUSE: Final = 0.5
"""Maximum seconds of the pause between two scans while watched directories change without a change of devices."""


@dataclass(slots=True)
class Scan:
    """The result of one scan. directories: the directories to watch until the next scan. notes: sentences for the log.

    seen: a value that changes if an unchanged list of devices may stand for other hardware, for example after a device
    node was created again.
    """

    devices: list[Device] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    seen: object = None


class ScannedSource(DeviceSource):
    """Finds devices by scans: one at the start, one after each change in a watched directory, and periodic scans.

    permissions: the container's permissions for the nodes, some of r, w and m. resource: the resource's name, if the
    source is not an entry of a config file, or if a hook needs the name. rescan: seconds between two periodic scans; a
    random deviation of up to a fifth is added.
    """

    DEBOUNCE: ClassVar[float] = 0.0
    """Seconds between a change and the scan, because a driver creates a device's nodes after its entry in sysfs."""

    def __init__(self, permissions: str, resource: str, rescan: float) -> None:
        self.resource = resource or self.resource
        self.permissions = permissions
        self.notes: tuple[str, ...] = ()
        self._rescan = rescan
        self._looks = Looks(self.resource or "devices", threads=1, resource=self.resource)

    def scan(self) -> list[Device]:
        """Scan now, and return the devices. Blocks."""
        scan = self._scan()
        self.notes = tuple(scan.notes)
        return scan.devices

    def _scan(self) -> Scan:
        raise NotImplementedError

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices now and whenever they change. While a scan hangs, all devices are yielded as unhealthy."""
        listed: list[Device] | None = None
        seen: object = None
        hinted, pause = False, 0.0
        with filewatch.shared().watch(()) as watch:
            while True:
                began = time.monotonic()
                look = self._looks.begin("scan", self._scan, place=repr(self))
                if why := await self._looks.late(look, SCAN_TIMEOUT, give_up=False):
                    _LOG.warning("the scan for devices failed: %s", why)
                    if listed:
                        listed = [device.with_health(Health.UNHEALTHY, why) for device in listed]
                        yield listed
                    await self._looks.until_ended(look)
                scan = look.result
                took = time.monotonic() - began
                for note in scan.notes:
                    if note not in self.notes:
                        _LOG.info("%s", note)
                self.notes = tuple(scan.notes)
                watch.set(scan.directories)
                if scan.devices != listed or scan.seen != seen:
                    listed, seen = scan.devices, scan.seen
                    yield listed
                    pause = 0.0
                elif hinted:
                    pause = min(MAX_PAUSE, max(took, 2 * pause))
                if pause:
                    # Without this pause, frequent changes of other files would cause one scan after another.
                    await asyncio.sleep(pause)
                rescan = self._rescan * random.uniform(0.8, 1.2)  # noqa: S311  # no secret
                hinted = await watch.wait(rescan, unwatched=UNWATCHED)
                if hinted:
                    await asyncio.sleep(self.DEBOUNCE)
                else:
                    pause = 0.0
