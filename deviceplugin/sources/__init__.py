"""From a resource of the config file to a source of its devices.

`build` puts a source together from the resource's entries. A new kind of entry is a field of
`config.DeviceEntry` and a line in `_KINDS`; its source yields from an async `watch`, and may have
`notes`, sentences about what it finds that are worth telling (a glob that matches nothing), and the
hooks `edits` and `measure`, which get its own devices only.

What is the same for all kinds is done here: `include` and `exclude`, health probes, replicas by
name, and what the resource adds to each device.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final, cast

import msgspec

from deviceplugin import health, identity
from deviceplugin.config import (
    CommandProbeConfig,
    DeviceEntry,
    DraConfig,
    HealthConfig,
    NvidiaConfig,
    PciConfig,
    ResourceConfig,
    SimulatedConfig,
    UsbConfig,
    sides_conflict,
)
from deviceplugin.device import ContainerEdits, Device, DeviceNode, Health, Mount
from deviceplugin.naming import PCI_BUS_ID
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources.path import GroupSource, PathSource
from deviceplugin.sources.simulated import SimulatedSource

__all__ = ["ConfiguredSource", "build", "overlaps"]

_LOG: Final = logging.getLogger(__name__)
FIRST_LIST: Final = 2.0
"""Seconds that the first list waits for all entries; one that takes longer joins later."""
RETRY: Final = (1.0, 30.0)
"""Seconds before an entry that failed is tried again, the first time and at the most."""
OPEN_TIMEOUT: Final = 5.0
"""Seconds in which a device's nodes must open."""


def build(resource: ResourceConfig) -> ConfiguredSource:
    """Return the source of a resource's devices."""
    return ConfiguredSource(resource)


def overlaps(resources: Iterable[ResourceConfig]) -> list[str]:
    """Return a sentence for each two ids, of one resource or two, whose paths lead to one thing now. Blocks."""
    owners: dict[str, tuple[str, str]] = {}
    configured: dict[str, ResourceConfig] = {}
    known: dict[tuple[str, str], identity.Tokens] = {}
    notes: dict[str, None] = {}
    for resource in resources:
        configured[resource.name] = resource
        entries = tuple(entry for entry in resource.devices if entry.path or entry.group)
        source = ConfiguredSource(msgspec.structs.replace(resource, devices=entries))
        found = {
            device.id: device
            for entry in source.entries
            if isinstance(entry, PathSource | GroupSource)
            for device in entry.look()
            if source.wants(device)
        }
        for name, tokens in identity.identities(list(found.values())).items():
            known[resource.name, name] = tokens
            for token in sorted(tokens):
                other, one = owners.setdefault(token, (resource.name, name)), (resource.name, name)
                if other != one:
                    text = f"{name} of {resource.name} and {other[1]} of {other[0]} are one thing"
                    text += f" ({identity.shown({token})}): while one is held, the other is given to nobody"
                    if sides_conflict(resource, configured[other[0]]):
                        text += "; neither is offered, since their drivers' shares put them on different sides"
                    if tokens - known[other] and known[other] - tokens:
                        text += "; a node that they only share belongs under `nodes`"
                    notes[text] = None
    return list(notes)


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


def _nvidia(nvidia: NvidiaConfig, resource: ResourceConfig, number: int) -> DeviceSource:
    from deviceplugin.sources.nvidia import NvidiaSource  # the others do without NVML

    return NvidiaSource(
        mig=nvidia.mig,
        profile=nvidia.profile,
        injection=nvidia.injection,
        ignore_xids=nvidia.ignore_xids,
        rules=health.Rules(
            resource.health.failures,
            resource.health.successes,
            None if nvidia.recovery == "never" else nvidia.recovery,
        ),
        period=resource.health.period,
        library=nvidia.library,
    )


def _pci(pci: PciConfig, resource: ResourceConfig, number: int) -> DeviceSource:
    from deviceplugin.sources.pci import PciFilter, PciSource

    return PciSource(
        PciFilter(pci.vendor, pci.device, pci.class_, pci.driver, pci.address, pci.functions),
        permissions=resource.permissions,
        resource=resource.name,
    )


def _usb(usb: UsbConfig, resource: ResourceConfig, number: int) -> DeviceSource:
    from deviceplugin.sources.usb import UsbFilter, UsbSource

    return UsbSource(UsbFilter(usb.vendor, usb.product, usb.serial), permissions=resource.permissions)


_KINDS: Final[Mapping[str, Callable[[Any, ResourceConfig, int], DeviceSource]]] = {
    # key of the entry: its value, the resource, how many of this kind came before -> source
    "path": _path,
    "group": _group,
    "simulated": _simulated,
    "nvidia": _nvidia,
    "pci": _pci,
    "usb": _usb,
}


class ConfiguredSource(DeviceSource):
    """The devices of all of a resource's entries, with what the resource says of each of them."""

    def __init__(self, config: ResourceConfig) -> None:
        self.config = config
        self.resource = config.name
        self.driver = config.driver
        self.replicas = config.sharing.most
        self.topology = config.topology
        self.policy = config.prefer
        kinds = [entry.kind for entry in config.devices]
        self.entries = tuple(
            _build_entry(entry, config, kinds[:index].count(entry.kind)) for index, entry in enumerate(config.devices)
        )
        self._edits = ContainerEdits(
            env=config.env,
            nodes=[DeviceNode(path, permissions=config.permissions) for path in config.nodes],
            mounts=[Mount(mount.host, mount.container, mount.readonly) for mount in config.mounts],
            annotations=config.annotations,
            cdi=config.cdi,
        )
        self._attributes = config.device_attributes
        self._made: Mapping[str, tuple[Device, Device]] = {}
        self._doubles: Mapping[str, None] = {}
        self._owners: Mapping[str, int] = {}
        self._prober = _prober(config.health)
        self._rules = health.Rules(config.health.failures, config.health.successes)
        self._courses: dict[str, health.HealthHistory] = {}
        self._looked: set[str] = set()
        """Devices whose first look was begun."""
        self._looking: set[str] = set()
        """Devices whose first look is not over yet."""

    def __repr__(self) -> str:
        return f"<ConfiguredSource {self.resource}: {', '.join(map(repr, self.entries))}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth telling about what the entries find; as of their last lists."""
        return (*(note for entry in self.entries for note in getattr(entry, "notes", ())), *self._doubles)

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that its entries have."""
        return frozenset(name for entry in self.entries for name in entry.hooks if name in {"edits", "measure"})

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """How close the devices are to each other, pair by pair, as far as the entries know."""
        return {pair: score for entry in self.entries for pair, score in entry.links.items()}

    def replicas_of(self, device: Device) -> int:
        """Return how often this device is offered."""
        replicas = self.config.sharing.replicas
        if isinstance(replicas, int):
            return replicas
        names = [name.casefold() for name in (*_names(device), *_words(device))]
        fitting = (count for pattern, count in replicas.items() if _fits(pattern.casefold(), names))
        return next(fitting, 1)

    async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return what the entries say of their devices in one container."""
        found = []
        for entry, own in self._by_entry(devices):
            if "edits" in entry.hooks:
                edits = entry.edits(own)
                found.append(await edits if inspect.isawaitable(edits) else edits)
        return ContainerEdits.merge(found, winner=self._edits) if found else ContainerEdits()

    async def measure(self, devices: Sequence[Device]) -> Measured:
        """Return what the entries measure of their devices."""
        found: dict[str, Any] = {}
        for entry, own in self._by_entry(devices):
            if "measure" in entry.hooks:
                measured = entry.measure(own)
                found.update(await measured if inspect.isawaitable(measured) else measured)
        return found

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        """Yield the sources of further resources that its entries bring along: partitions by profile.

        They are for pods alone, without a driver: what a driver publishes is named after its resources, and
        one that joins later would rename devices that are allocated.
        """
        domain = self.resource.partition("/")[0]
        built: dict[str, DeviceSource] = {}
        for entry, source in zip(self.config.devices, self.entries, strict=True):
            if entry.nvidia is None or entry.nvidia.mig != "mixed" or entry.nvidia.profile is not None:
                continue
            from deviceplugin.sources.nvidia import NvidiaSource, resource_of

            assert isinstance(source, NvidiaSource)
            async with contextlib.aclosing(source.profiles()) as seen:
                async for profiles in seen:
                    for profile in profiles:
                        only = msgspec.structs.replace(entry.nvidia, mig="single", profile=profile)
                        name = f"{domain}/{resource_of(profile)}"
                        if name not in built:
                            devices = (DeviceEntry(nvidia=only),)
                            config = msgspec.structs.replace(
                                self.config, name=name, devices=devices, driver=None, dra=DraConfig()
                            )
                            built[name] = ConfiguredSource(config)
                    yield tuple(built.values())

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices of all entries now, and whenever one entry's change."""
        lists: list[Sequence[Device] | None] = [None] * len(self.entries)
        changed = asyncio.Event()
        tasks = {asyncio.create_task(self._follow(index, lists, changed)) for index in range(len(lists))}
        if self._prober is not None:
            tasks.add(asyncio.create_task(self._probe_for_ever(self._prober, changed)))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LIST):
                    while None in lists:
                        await changed.wait()
                        changed.clear()
            while True:
                changed.clear()
                devices = self._together(
                    (index, device) for index, listed in enumerate(lists) for device in listed or ()
                )
                if self._prober is not None:
                    devices = await self._judged(self._prober, devices, changed, tasks)
                yield devices
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

    def _together(self, found: Iterable[tuple[int, Device]]) -> list[Device]:
        """Return what is to be served: each wanted device once, with what the resource says of it."""
        made: dict[str, tuple[Device, Device]] = {}
        owners: dict[str, str] = {}
        doubles: dict[str, None] = {}
        entries: dict[str, int] = {}
        for index, device in found:
            if not self.wants(device):
                continue
            if device.id in made:
                doubles[f"{device.id} is found by two entries and served once"] = None
                continue
            hosts = [node.host for node in device.nodes]  # type: ignore[union-attr]  # Device made them so
            if device.edits.mounts:
                hosts += [mount.host for mount in device.edits.mounts]
            double = next(filter(owners.__contains__, hosts), None)
            if double is not None:
                other = owners[double]
                # Who is served already stays: a pod may have it, and the new name is the same device.
                if device.id not in self._made or other in self._made:
                    doubles[f"{device.id} leads to {double} like {other} and is left out"] = None
                    continue
                doubles[f"{other} leads to {double} like {device.id} and is left out"] = None
                del made[other], entries[other]
                owners = {host: owner for host, owner in owners.items() if owner != other}
            for host in hosts:
                owners[host] = device.id
            entries[device.id] = index
            known = self._made.get(device.id)
            made[device.id] = known if known is not None and known[0] is device else (device, self._make(device))
        for double in doubles.keys() - self._doubles.keys():
            _LOG.warning("%s: %s", self.resource, double)
        self._made, self._doubles, self._owners = made, doubles, entries
        return [device for _, device in made.values()]

    def wants(self, device: Device) -> bool:
        """Return whether `include` and `exclude` let a device through."""
        include, exclude = self.config.include, self.config.exclude
        if not (include or exclude):
            return True
        names = _names(device)
        return (not include or any(_fits(pattern, names) for pattern in include)) and not any(
            _fits(pattern, names) for pattern in exclude
        )

    def _by_entry(self, devices: Sequence[Device]) -> list[tuple[DeviceSource, list[Device]]]:
        """Return the entries' own devices among these, as the entries made them."""
        own: dict[int, list[Device]] = {}
        for device in devices:
            if device.id in self._owners:
                own.setdefault(self._owners[device.id], []).append(self._made[device.id][0])
        return [(self.entries[index], mine) for index, mine in own.items()]

    async def _judged(
        self, prober: health.Prober, devices: Sequence[Device], changed: asyncio.Event, tasks: set[asyncio.Task[None]]
    ) -> list[Device]:
        """Return the devices with what their probes say; those never seen before are looked at first.

        A first look that takes long goes on among `tasks`, and what it finds is a change.
        """
        self._courses = {device.id: self._courses.get(device.id, health.HealthHistory()) for device in devices}
        self._looked &= self._courses.keys()
        fresh = [device for device in devices if device.id not in self._looked | self._looking]
        if fresh:
            self._looked |= {device.id for device in fresh}
            first = asyncio.create_task(self._look_first(prober, fresh))
            tasks.add(first)
            first.add_done_callback(tasks.discard)
            done, _ = await asyncio.wait({first}, timeout=FIRST_LIST)
            if not done:
                first.add_done_callback(lambda _: changed.set())
        judged = []
        for device in devices:
            course = self._courses[device.id]
            judged.append(device.with_health(*health.worst((device.health, device.message), _said(course))))
        return judged

    async def _look_first(self, prober: health.Prober, devices: Sequence[Device]) -> None:
        names = {device.id for device in devices}
        self._looking |= names
        try:
            await self._look(prober, devices)
        finally:
            self._looking -= names

    async def _look(self, prober: health.Prober, devices: Sequence[Device]) -> bool:
        """Look at devices once; return whether that changed what is to be said of one."""
        found = await prober.check(devices)
        now, changed = time.monotonic(), False
        for name, (verdict, message) in found.items():
            before = self._courses.get(name)
            if before is None:
                continue  # gone meanwhile
            after = self._courses[name] = before.checked(verdict, message, now, self._rules)
            if _said(before) != _said(after):
                changed = True
                level = logging.INFO if after.health.usable else logging.WARNING
                why = f": {message}" if message else ""
                _LOG.log(level, "%s: %s is %s%s", self.resource, name, after.health.value, why)
        return changed

    async def _probe_for_ever(self, prober: health.Prober, changed: asyncio.Event) -> None:
        while True:
            await asyncio.sleep(self.config.health.period)
            if await self._look(prober, [one for name, (one, _) in self._made.items() if name not in self._looking]):
                changed.set()

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


def _prober(config: HealthConfig) -> health.Prober | None:
    if isinstance(config.probe, CommandProbeConfig):
        # The command's own limit comes first and says more.
        timeout = config.probe.timeout + 5.0
        return health.Prober(health.command_probe(config.probe.command, config.probe.timeout), timeout=timeout)
    return health.Prober(health.open_probe, timeout=OPEN_TIMEOUT) if config.probe == "open" else None


def _said(course: health.HealthHistory) -> tuple[Health, str]:
    return course.health, course.message


def _names(device: Device) -> list[str]:
    """Return what a user may call a device: its id, its PCI address, the paths behind and in front of it."""
    edits = device.container_edits
    names = [device.id]
    if address := device.attributes.get(PCI_BUS_ID):
        names.append(str(address))
    for node in edits.device_nodes:
        names += (node.host, node.path)
    for mount in edits.mounts:
        names += (mount.host, mount.container)
    return names


def _words(device: Device) -> list[str]:
    """Return the product's name and its words."""
    products = [str(device.attributes[key]) for key in ("productName", "product", "model") if key in device.attributes]
    return [word for product in products for word in (product, *re.findall(r"[A-Za-z0-9]+", product))]


def _fits(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
