"""From a resource of the config file to a source of its devices.

`build` puts a source together from the resource's entries. A new kind of entry is a field of
`config.DeviceEntry` and a line in `_KINDS`; its source yields from an async `watch`, and may have
`notes`, sentences about what it finds that are worth telling (a glob that matches nothing).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from deviceplugin.config import DeviceEntry, ResourceConfig, SimulatedConfig
from deviceplugin.device import ContainerEdits, Device, Mount
from deviceplugin.source import DeviceSource
from deviceplugin.sources.path import GroupSource, PathSource
from deviceplugin.sources.simulated import SimulatedSource

__all__ = ["ConfiguredSource", "build"]

_LOG: Final = logging.getLogger(__name__)
FIRST_LIST: Final = 2.0
"""Seconds that the first list waits for all entries; one that takes longer joins later."""
RETRY: Final = (1.0, 30.0)
"""Seconds before an entry that failed is tried again, the first time and at the most."""


def build(resource: ResourceConfig) -> ConfiguredSource:
    """Return the source of a resource's devices."""
    return ConfiguredSource(resource)


def _path(glob: str, resource: ResourceConfig, number: int) -> DeviceSource:
    return PathSource(glob, permissions=resource.permissions)


def _group(globs: tuple[str, ...], resource: ResourceConfig, number: int) -> DeviceSource:
    return GroupSource(globs, permissions=resource.permissions)


def _simulated(simulated: SimulatedConfig, resource: ResourceConfig, number: int) -> DeviceSource:
    return SimulatedSource(
        simulated.count,
        numa=simulated.numa,
        unhealthy_file=simulated.unhealthy_file,
        prefix=f"sim{number}" if number else "sim",
    )


_KINDS: Final[Mapping[str, Callable[[Any, ResourceConfig, int], DeviceSource]]] = {
    # key of the entry: its value, the resource, how many of this kind came before -> source
    "path": _path,
    "group": _group,
    "simulated": _simulated,
}


class ConfiguredSource(DeviceSource):
    """The devices of all of a resource's entries, with what the resource says of each of them."""

    def __init__(self, config: ResourceConfig) -> None:
        self.config = config
        self.resource = config.name
        self.driver = config.driver
        self.replicas = config.sharing.replicas
        self.topology = config.topology
        kinds = [entry.kind for entry in config.devices]
        self.entries = tuple(
            _build_entry(entry, config, kinds[:index].count(entry.kind)) for index, entry in enumerate(config.devices)
        )
        self._edits = ContainerEdits(
            env=config.env,
            mounts=[Mount(mount.host, mount.container, mount.readonly) for mount in config.mounts],
            annotations=config.annotations,
            cdi=config.cdi,
        )
        self._attributes = config.device_attributes
        self._made: Mapping[str, tuple[Device, Device]] = {}
        self._doubles: Mapping[str, None] = {}

    def __repr__(self) -> str:
        return f"<ConfiguredSource {self.resource}: {', '.join(map(repr, self.entries))}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth telling about what the entries find; as of their last lists."""
        return (*(note for entry in self.entries for note in getattr(entry, "notes", ())), *self._doubles)

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices of all entries now, and whenever one entry's change."""
        lists: list[Sequence[Device] | None] = [None] * len(self.entries)
        changed = asyncio.Event()
        tasks = [asyncio.create_task(self._follow(index, lists, changed)) for index in range(len(lists))]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LIST):
                    while None in lists:
                        await changed.wait()
                        changed.clear()
            while True:
                changed.clear()
                yield self._together([device for devices in lists for device in devices or ()])
                await changed.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, lists: list[Sequence[Device] | None], changed: asyncio.Event) -> None:
        """Keep one entry's list up to date; its failure is not the others'."""
        delay, longest = RETRY
        while True:
            try:
                generator = cast("AsyncGenerator[Sequence[Device]]", self.entries[index].watch())
                async with contextlib.aclosing(generator) as watch:
                    async for devices in watch:
                        lists[index] = devices
                        changed.set()
                        delay = RETRY[0]
                return  # its last list stays true
            except Exception:
                _LOG.exception("%s: %r failed; again in %g s", self.resource, self.entries[index], delay)
                if lists[index] is None:
                    lists[index] = ()
                    changed.set()
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest)

    def _together(self, found: Sequence[Device]) -> list[Device]:
        """Return what is to be served: each device once, with what the resource says of it."""
        made: dict[str, tuple[Device, Device]] = {}
        owners: dict[str, str] = {}
        doubles: dict[str, None] = {}
        for device in found:
            if device.id in made:
                doubles[f"{device.id} is found by two entries and served once"] = None
                continue
            hosts = [node.host for node in device.nodes]  # type: ignore[union-attr]  # Device made them so
            hosts += [mount.host for mount in device.edits.mounts]
            double = next((host for host in hosts if host in owners), None)
            if double is not None:
                doubles[f"{device.id} leads to {double} like {owners[double]} and is left out"] = None
                continue
            owners.update(dict.fromkeys(hosts, device.id))
            known = self._made.get(device.id)
            made[device.id] = known if known is not None and known[0] is device else (device, self._make(device))
        for double in doubles.keys() - self._doubles.keys():
            _LOG.warning("%s: %s", self.resource, double)
        self._made, self._doubles = made, doubles
        return [device for _, device in made.values()]

    def _make(self, device: Device) -> Device:
        if not (self._edits or self._attributes or self.config.capacity):
            return device
        return replace(
            device,
            edits=ContainerEdits.merge([self._edits], winner=device.edits) if device.edits else self._edits,
            attributes={**device.attributes, **self._attributes},
            capacity={**device.capacity, **self.config.capacity},
        )


def _build_entry(entry: DeviceEntry, config: ResourceConfig, number: int) -> DeviceSource:
    return _KINDS[entry.kind](getattr(entry, entry.kind), config, number)
