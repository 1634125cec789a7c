"""Defines the source of a resource in the config file.

The source lists the devices of all entries of the resource, with the resource's settings.

Each entry has a source of its own, whose async `watch` yields the entry's devices. An entry's source may have `notes`:
sentences for the log, for example about a glob that matches nothing. An entry's source may also define the hooks
`edits` and `measure`, which are called only with devices of the entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from msgspec.structs import replace

from deviceplugin import health, identity
from deviceplugin.backoff import Backoff
from deviceplugin.config.lock import OPEN, Lock
from deviceplugin.config.rules import sides_conflict
from deviceplugin.config.types import (
    DeviceEntry,
    DraConfig,
    HealthConfig,
    ResourceConfig,
    SharingConfig,
    typed_attributes,
)
from deviceplugin.device import ContainerEdits, Device, DeviceNode, Mount, natural, some
from deviceplugin.exclusion import titled
from deviceplugin.naming import PCI_BUS_ID
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.sources.path import PathSource, filled
from deviceplugin.sources.pci import PciSource
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.sources.usb import UsbSource
from deviceplugin.tasks import cancel_all

if TYPE_CHECKING:
    from deviceplugin.sources.nvidia import NvidiaSource

_LOG: Final = logging.getLogger(__name__)
_PLACEHOLDER: Final = re.compile(r"\{(id|path|name)\}")
FIRST_LIST: Final = 2.0
"""Maximum seconds for which a resource's first device list waits for the first lists of all entries. Devices of a
slower entry are added in a later list."""
RETRY: Final = (1.0, 30.0)
"""Seconds between a failure of an entry's source and its next start: (after the first failure, maximum)."""
FIRST_PROBE: Final = 2.0
"""Maximum seconds for which a device list waits for the first probe of a new device. If the probe takes longer, the
device's health is unknown until the probe ends."""
OPEN_TIMEOUT: Final = 5.0
"""Maximum seconds for the probe "open" to open all nodes of a device. After that, the probe's result is bad."""


def build_entry(resource: ResourceConfig, index: int) -> DeviceSource:
    """Return the source of one entry of a resource. index: the entry's position in the resource's `devices`."""
    entry, permissions = resource.devices[index], resource.permissions
    if entry.parts:
        return PathSource(*entry.parts, permissions=permissions, resource=resource.name)
    if entry.pci is not None:
        return PciSource(entry.pci, permissions=permissions, resource=resource.name)
    if entry.usb_ids:
        return UsbSource(*entry.usb_ids, permissions=permissions, resource=resource.name)
    if entry.nvidia is not None:
        from deviceplugin.sources.nvidia import NvidiaSource, Places

        quiet = None if entry.nvidia.recovery == "never" else entry.nvidia.recovery
        return NvidiaSource(
            entry.nvidia,
            rules=health.HealthRules(resource.health.failures, resource.health.successes, quiet),
            period=resource.health.period,
            places=Places(library=entry.nvidia.library or ""),
        )
    assert entry.simulated is not None
    simulated, before = entry.simulated, sum(earlier.simulated is not None for earlier in resource.devices[:index])
    prefix = f"sim{before}" if before else "sim"
    return SimulatedSource(simulated.count, numa=simulated.numa, unhealthy_file=simulated.unhealthy_file, prefix=prefix)


def overlaps(resources: Iterable[ResourceConfig]) -> list[str]:
    """Return sentences about devices that are listed under two ids, and about devices without device nodes. Blocks."""
    owners: dict[str, tuple[str, str]] = {}
    configured: dict[str, ResourceConfig] = {}
    tokens_by_key: dict[tuple[str, str], identity.Tokens] = {}
    containing: list[tuple[tuple[str, str], str]] = []
    notes: dict[str, None] = {}
    for resource in resources:
        configured[resource.name] = resource
        entries = [PathSource(*entry.parts) for entry in resource.devices if entry.parts]
        listed: dict[str, Device] = {}
        owned: set[str] = set()
        for device in (device for entry in entries for device in entry.scan() if is_wanted(device, resource)):
            hosts = _hosts(device)
            if device.id not in listed and owned.isdisjoint(hosts):  # `ConfiguredSource` serves only these.
                listed[device.id] = device
                owned.update(hosts)
        notes |= {f"{resource.name}: {note}": None for note in nodeless(listed.values())}
        found = identity.identities(list(listed.values()))
        for name, others in found.containing.items():
            containing += (((resource.name, name), token) for token in sorted(others))
        for name, tokens in found.tokens.items():
            tokens_by_key[resource.name, name] = tokens
            for token in sorted(tokens):
                other, key = owners.setdefault(token, (resource.name, name)), (resource.name, name)
                if other != key:
                    text = f"{titled(key)} and {titled(other)} are the same hardware"
                    text += f" ({identity.shown({token})}): while one is held, the other is given to nobody"
                    if sides_conflict(resource, configured[other[0]]):
                        text += "; neither is offered, since their drivers' shares put them on different sides"
                    differ = tokens - tokens_by_key[other] and tokens_by_key[other] - tokens
                    if differ and identity.reachable(frozenset({token})):
                        text += "; a node that they only share belongs under `nodes`"
                    notes[text] = None
    for part, token in containing:
        if (whole := owners.get(token)) is not None and tokens_by_key[part].isdisjoint(tokens_by_key[whole]):
            text = f"{titled(part)} is a part of {titled(whole)} ({identity.shown({token})})"
            notes[f"{text}: while one is held, the other is given to nobody"] = None
    return list(notes)


def _hosts(device: Device) -> list[str]:
    """Return the host paths of a device's nodes, with links resolved, and of its mounts."""
    hosts = [node.real for node in device.nodes]  # type: ignore[union-attr]  # Device made them so
    return hosts + [mount.host for mount in device.edits.mounts]


def nodeless(devices: Iterable[Device]) -> list[str]:
    """Return sentences about devices whose paths are no device nodes, and about devices without a path."""
    devices = list(devices)
    mounted = [mount.host for device in devices for mount in device.edits.mounts]
    empty = [device.id for device in devices if not device.container_edits]
    notes = []
    if mounted:
        notes.append(f"not a device node, containers get it as a mount: {some(mounted, 3)}")
    if empty:
        notes.append(f"no device node, containers get what the resource's own keys say: {some(empty, 3)}")
    return notes


def is_wanted(device: Device, resource: ResourceConfig) -> bool:
    """Return whether a resource's settings `include` and `exclude` select a device."""
    if not (resource.include or resource.exclude):
        return True
    names = _names(device)
    included = not resource.include or any(_fits(pattern, names) for pattern in resource.include)
    return included and not any(_fits(pattern, names) for pattern in resource.exclude)


class _Served(NamedTuple):
    """A device of the resource. entry: the device source, made from an entry of the config, that lists the device.

    listed: the device as this device source lists it. device: the same device with the resource's settings.
    """

    entry: DeviceSource
    listed: Device
    device: Device


class ConfiguredSource(DeviceSource):
    """Lists the devices of all entries of a resource. lock: the allowed paths; other paths are not listed.

    profiles: the MIG profiles that entries of the config file list. They get no further resource.
    """

    def __init__(self, config: ResourceConfig, lock: Lock = OPEN, profiles: Collection[str] = ()) -> None:
        self.config = config
        self._lock = lock
        self._profiles = profiles
        self._children: dict[str, ConfiguredSource] = {}
        self.resource = config.name
        self.driver = config.driver
        self.replicas = config.sharing.most
        self.topology = config.topology
        self.metadata = config.metadata
        self.policy = config.policy
        self.entries = tuple(build_entry(config, index) for index in range(len(config.devices)))
        self._templates = {name: value for name, value in config.env.items() if _PLACEHOLDER.search(value)}
        """The environment variables whose values depend on the container's devices."""
        self._edits = ContainerEdits(
            env={name: value for name, value in config.env.items() if name not in self._templates},
            nodes=[DeviceNode(path, permissions=config.permissions) for path in config.nodes],
            mounts=[Mount(mount.host, mount.container, mount.readonly) for mount in config.mounts],
            annotations=config.annotations,
            cdi=config.cdi,
        )
        self._served: Mapping[str, _Served] = {}
        self._left_out: Mapping[str, None] = {}
        self._probed = None if config.health.probe == "none" else ProbedHealth(config.name, config.health)

    def __repr__(self) -> str:
        return f"<ConfiguredSource {self.resource}: {', '.join(map(repr, self.entries))}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the log about the last device lists of the entries, and about devices that are left out."""
        return (*(note for entry in self.entries for note in getattr(entry, "notes", ())), *self._left_out)

    @property
    def nodeless(self) -> Sequence[str]:
        """Sentences about devices without device nodes, except devices of entries that have the hook `edits`."""
        return nodeless(served.listed for served in self._served.values() if "edits" not in served.entry.hooks)

    @functools.cached_property
    def hooks(self) -> frozenset[str]:
        """The names of the hooks that the source of any entry has."""
        hooks = {name for entry in self.entries for name in entry.hooks if name in {"edits", "measure"}}
        return frozenset(hooks | {"edits"} if self._templates else hooks)

    @property
    def links(self) -> Mapping[frozenset[str], float]:
        """The link scores of pairs of devices, from the property `links` of the entries' sources. Higher is closer."""
        return {pair: score for entry in self.entries for pair, score in entry.links.items()}

    def replicas_of(self, device: Device) -> int:
        """Return how many containers may share this device, as the resource's setting `sharing` states."""
        replicas = self.config.sharing.replicas
        if isinstance(replicas, int):
            return replicas
        names = [name.casefold() for name in (*_names(device), *_words(device))]
        fitting = (count for pattern, count in replicas.items() if _fits(pattern.casefold(), names))
        return next(fitting, 1)

    async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        """Return the edits for one container, from the entries' hooks `edits` and the resource's settings.

        If the edits of a hook and of the settings conflict, those of the settings take precedence.
        """
        edits = await self._ask("edits", devices)
        names = sorted((device.id for device in devices), key=natural)  # The order of `devices` is arbitrary.
        listed = [self._served[name].listed for name in names if name in self._served]
        env = {name: ",".join(_filled(value, device) for device in listed) for name, value in self._templates.items()}
        if not (edits or env):
            return ContainerEdits()
        return ContainerEdits.merge(edits, winner=ContainerEdits.merge([self._edits, ContainerEdits(env=env)]))

    async def measure(self, devices: Sequence[Device]) -> Measured:
        """Return the measured values of these devices, which the hooks `measure` of the entries' sources return."""
        measured_parts = await self._ask("measure", devices)
        return {name: values for measured in measured_parts for name, values in measured.items()}

    async def _ask(self, hook: str, devices: Sequence[Device]) -> list[Any]:
        """Call a hook of those entries' sources that define this hook; return the results.

        Each hook gets only the devices of its entry, as the entry's source has listed them.
        """
        own: dict[DeviceSource, list[Device]] = {}
        for device in devices:
            if (served := self._served.get(device.id)) is not None and hook in served.entry.hooks:
                own.setdefault(served.entry, []).append(served.listed)
        answers = []
        for entry, listed in own.items():
            answer = getattr(entry, hook)(listed)
            answers.append(await answer if inspect.isawaitable(answer) else answer)
        return answers

    def _mixed(self) -> NvidiaSource | None:
        """Return the source of the entry that brings a resource for each MIG profile. A resource has at most one."""
        pairs = zip(self.config.devices, self.entries, strict=True)
        mixed = (source for entry, source in pairs if entry.nvidia is not None and entry.nvidia.mixed)
        return cast("NvidiaSource | None", next(mixed, None))

    def children(self) -> tuple[ConfiguredSource, ...]:
        """Return the sources of the further resources known now: one for each other MIG profile, only for `limits`.

        These resources have no DRA driver, because a resource that is added to a driver later would rename devices: the
        published names of a driver's devices depend on the names of all resources of the driver. Their devices are not
        shared, because the resource's setting `sharing` is for whole GPUs.
        """
        domain = self.resource.partition("/")[0]
        if (source := self._mixed()) is not None:
            from deviceplugin.sources.nvidia import resource_of

            for profile in source.seen_profiles:
                name = f"{domain}/{resource_of(profile)}"
                if profile not in self._profiles and name not in self._children:
                    only = DeviceEntry(nvidia=replace(source.wanted, mig="single", profile=profile))
                    alone = {"driver": None, "dra": DraConfig(), "sharing": SharingConfig()}
                    config = replace(self.config, name=name, devices=(only,), **alone)
                    self._children[name] = ConfiguredSource(config, self._lock)
        return tuple(self._children.values())

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        """Yield `children` when there is a first or a new MIG profile."""
        if (source := self._mixed()) is not None:
            async with contextlib.aclosing(source.profiles()) as seen:
                async for _ in seen:
                    yield self.children()

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices of all entries now, and again whenever the devices of an entry change."""
        lists: list[Sequence[Device] | None] = [None] * len(self.entries)
        changed = asyncio.Event()
        tasks: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._follow(index, lists, changed)) for index in range(len(lists))
        }
        if self._probed is not None:
            tasks.add(asyncio.create_task(self._probed.run(self._listed, changed)))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LIST):
                    while None in lists:
                        await changed.wait()
                        changed.clear()
            while True:
                changed.clear()
                devices = self._together(lists)
                if self._probed is not None:
                    await self._probed.probe_new(self._listed(), changed, tasks)
                    devices = [self._probed.judged(device) for device in devices]
                yield devices
                await changed.wait()
        finally:
            await cancel_all(tasks)

    def _listed(self) -> list[Device]:
        """Return the devices as the entries' sources list them, because a probe must not open the resource's mounts."""
        return [served.listed for served in self._served.values()]

    async def _follow(self, index: int, lists: list[Sequence[Device] | None], changed: asyncio.Event) -> None:
        """Keep an entry's device list in `lists` up to date until the entry's source ends. Restart a failed source."""
        entry, backoff = self.entries[index], Backoff(*RETRY)
        while True:
            try:
                async with contextlib.aclosing(cast("AsyncGenerator[Sequence[Device]]", entry.watch())) as watch:
                    async for devices in watch:
                        lists[index] = devices
                        changed.set()
                        backoff.reset()
                return  # The source has ended without an error, so its last list stays valid.
            except Exception:
                delay = backoff.next()
                _LOG.exception(
                    "%r failed; it is started again in %.1f s", entry, delay, extra={"resource": self.resource}
                )
                if lists[index] is None:
                    lists[index] = ()
                    changed.set()
            await asyncio.sleep(delay)

    def _together(self, lists: Iterable[Sequence[Device] | None]) -> list[Device]:
        """Return the device list of the resource: each selected device once, with the resource's settings.

        lists: for each entry, its device list; None before its first list.
        """
        served: dict[str, _Served] = {}
        owners: dict[str, str] = {}  # For each host path of a node or mount, the id of its device.
        left_out: dict[str, None] = {}
        twice: list[str] = []
        pairs = ((entry, device) for entry, listed in zip(self.entries, lists, strict=True) for device in listed or ())
        for entry, device in pairs:
            if not is_wanted(device, self.config):
                continue
            if device.id in served:
                twice.append(device.id)
                continue
            hosts = _hosts(device)
            outside = next((host for host in hosts if not self._lock.allows(host)), None)
            if outside is not None:
                left_out[f"{device.id} is left out: {self._lock.refusal(outside)}"] = None
                continue
            double = next(filter(owners.__contains__, hosts), None)
            if double is not None:
                other = owners[double]
                # The ids `device.id` and `other` are of the same device. Keep the id that the previous list had,
                # because a pod may hold the device under this id.
                if device.id not in self._served or other in self._served:
                    left_out[f"{device.id} is left out: it leads to {double}, which is served as {other}"] = None
                    continue
                left_out[f"{other} is left out: it leads to {double}, which is served as {device.id}"] = None
                del served[other]
                owners = {host: owner for host, owner in owners.items() if owner != other}
            owners.update(dict.fromkeys(hosts, device.id))
            before = self._served.get(device.id)
            made = before.device if before is not None and before.listed is device else self._with_settings(device)
            served[device.id] = _Served(entry, device, made)
        if twice:
            left_out[f"{some(twice, 3)}: found by two entries and served once, as the first entry has it"] = None
        for note in sorted(left_out.keys() - self._left_out.keys()):
            _LOG.warning("%s", note, extra={"resource": self.resource})
        self._served, self._left_out = served, left_out
        return [kept.device for kept in served.values()]

    def _with_settings(self, device: Device) -> Device:
        """Return a device with the resource's configured edits, attributes and capacity added."""
        if not (self._edits or self.config.attributes or self.config.capacity):
            return device
        return dataclasses.replace(
            device,
            edits=ContainerEdits.merge([self._edits], winner=device.edits) if device.edits else self._edits,
            attributes={**device.attributes, **typed_attributes(self.config.attributes)},
            capacity={**device.capacity, **self.config.capacity},
        )


def _filled(value: str, device: Device) -> str:
    """Return a text with a device's values in place of placeholders. {name} is the id if the device has no path."""
    edits = device.container_edits
    nodes = [(node.host, node.path) for node in edits.device_nodes[: len(device.nodes)]]
    host, path = next(iter([*nodes, *((mount.host, mount.container) for mount in edits.mounts)]), (device.id, ""))
    return filled(value, device.id, os.path.basename(host), path)


class ProbedHealth:
    """Probes the devices of one resource and judges their health.

    `config.probe` is "open" (the probe opens the device's nodes) or a command.
    """

    def __init__(self, resource: str, config: HealthConfig) -> None:
        self._resource = resource
        self._period = config.period
        self._rules = health.HealthRules(config.failures, config.successes)
        if isinstance(config.probe, str):
            self._prober = health.Prober(health.open_probe, timeout=OPEN_TIMEOUT)
        else:
            probe = health.command_probe(config.probe.command, config.probe.timeout)
            # The command's own timeout is shorter than this one, so it expires first. Its message has more details.
            self._prober = health.Prober(probe, timeout=config.probe.timeout + 5.0)
        self._histories: dict[str, health.HealthHistory] = {}
        self._pending: set[str] = set()
        """Ids of devices whose first probe has not ended yet."""

    async def probe_new(self, devices: Sequence[Device], changed: asyncio.Event, tasks: set[asyncio.Task[Any]]) -> None:
        """Probe the new devices, and remove the health of devices that are no longer listed.

        A probe that takes longer than FIRST_PROBE seconds continues as one of `tasks`, and sets `changed` at its end.
        """
        new = [device for device in devices if device.id not in self._histories.keys() | self._pending]
        self._histories = {device.id: self._histories.get(device.id, health.HealthHistory()) for device in devices}
        if not new:
            return
        names = {device.id for device in new}
        self._pending |= names
        first = asyncio.create_task(self._probe(new))
        tasks.add(first)
        first.add_done_callback(tasks.discard)
        first.add_done_callback(lambda _: self._pending.difference_update(names))
        done, _ = await asyncio.wait({first}, timeout=FIRST_PROBE)
        if not done:
            first.add_done_callback(lambda _: changed.set())

    def judged(self, device: Device) -> Device:
        """Return the device with the worse of two states of health: from its source, and from its probes."""
        history = self._histories[device.id]
        return device.with_health(*health.worst((device.health, device.message), (history.health, history.message)))

    async def run(self, devices: Callable[[], Sequence[Device]], changed: asyncio.Event) -> None:
        """Probe the present devices periodically. Set `changed` when the health of a device changes."""
        while True:
            await asyncio.sleep(self._period)
            if await self._probe([device for device in devices() if device.id not in self._pending]):
                changed.set()

    async def _probe(self, devices: Sequence[Device]) -> bool:
        """Probe each device once; return whether the health or the health message of any device has changed."""
        findings = await self._prober.check(devices)
        now, changed = time.monotonic(), False
        for name, (verdict, message) in findings.items():
            before = self._histories.get(name)
            if before is None:
                continue  # The device was removed during the probe.
            after = self._histories[name] = before.checked(verdict, message, now, self._rules)
            if (before.health, before.message) != (after.health, after.message):
                changed = True
                why = f": {message}" if message else ""
                _LOG.debug("%s is %s%s", name, after.health.value, why, extra={"resource": self._resource})
        return changed


def _names(device: Device) -> list[str]:
    """Return the names of a device that a pattern can match: id, PCI address, paths on the host and in containers."""
    edits = device.container_edits
    names = [device.id]
    if address := device.attributes.get(PCI_BUS_ID):
        names.append(str(address))
    for node in edits.device_nodes:
        names += (node.host, node.real, node.path)
    for mount in edits.mounts:
        names += (mount.host, mount.container)
    return names


def _words(device: Device) -> list[str]:
    products = [str(device.attributes[key]) for key in ("productName", "product", "model") if key in device.attributes]
    return [word for product in products for word in (product, *re.findall(r"[A-Za-z0-9]+", product))]


def _fits(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
