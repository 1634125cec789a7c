"""Checks those rules of a config file that the types in `config.types` cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from deviceplugin import naming
from deviceplugin.config.document import Problems
from deviceplugin.config.known_plugins import known_plugin
from deviceplugin.config.lock import ADOPTED, CODE, OPEN, PATHS, Lock, texts_of
from deviceplugin.config.types import (
    KINDS,
    Config,
    DeviceEntry,
    MetricsConfig,
    ResourceConfig,
    UsbConfig,
    typed_attributes,
)
from deviceplugin.device import Device

ADOPTED_KEYS: Final = {"name", "devices", "driver", "attributes", "capacity", "dra"}
"""The allowed keys of a resource whose devices a vendor's plugin lists. The plugin makes all other decisions."""


class ConfigRules:
    """Checks the mappings of one config file, in the order of the file. lock: the allowed commands and host paths."""

    def __init__(self, problems: Problems, lock: Lock = OPEN) -> None:
        self._report, self._lines = problems.report, problems.lines
        self._lock = lock
        self._names: dict[str, int] = {}
        """For each resource name, the number of the first line with this name."""
        self._mixed: dict[str, str] = {}
        """For each domain, the name of the first resource with `mig: mixed`."""
        self._groups: dict[str, tuple[int, frozenset[str]]] = {}
        """For each path without wildcards in the key `group` of an entry: the line of its first use, and the paths of
        that group."""

    def check(self, value: msgspec.Struct, path: str, keys: AbstractSet[str]) -> None:
        """Report the problems of a mapping. keys: the keys that the mapping has in the file.

        value: the mapping, with blank values in place of invalid values, whose problems were reported before.
        """
        match value:
            case DeviceEntry():
                self._check_entry(value, path, keys)
            case ResourceConfig():
                self._check_resource(value, path, keys)
            case MetricsConfig():
                for key in sorted({"key", "client_ca"} & keys) if "certificate" not in keys else ():
                    self._report(f"{path}.{key}", "there is no TLS without `certificate`")
            case Config():
                self._check_config(value.resources, path)
        if self._lock is not OPEN:
            self._check_lock(value, path)

    def _check_lock(self, value: msgspec.Struct, path: str) -> None:
        for key in PATHS.get(type(value), ()):
            given = getattr(value, key)
            for index, host in enumerate(given if isinstance(given, tuple) else texts_of(given)):
                if host and isinstance(host, str) and (problem := self._lock.problem(type(value), host)):
                    self._report(f"{path}.{key}" + f"[{index}]" * isinstance(given, tuple), problem)
        if isinstance(value, DeviceEntry) and value.plugin is not None and not self._lock.plugins:
            text = "a vendor's plugin chooses what pods get of the host, which is not allowed; "
            self._report(f"{path}.plugin", f"{text}`run --adopt={ADOPTED}` allows it")
        for key in CODE.get(type(value), ()):
            if getattr(value, key) and not self._lock.commands:
                message = "the agent would execute this, which is not allowed; `run --allow-commands` allows it"
                self._report(f"{path}.{key}", message)

    def _check_entry(self, entry: DeviceEntry, path: str, keys: AbstractSet[str]) -> None:
        kinds, given = any_of(KINDS), [key for key in keys if key in KINDS]
        if not given:
            self._report(path, f"an entry needs one of {kinds}")
        elif len(given) > 1:
            self._report(path, f"an entry has one of {kinds}, not {' and '.join(given)}; make each an entry of its own")
        elif "container" in keys and given != ["path"]:
            how = "in a group write each part as {path: ..., container: ...}"
            self._report(f"{path}.container", f"belongs to a path; {how}")
        several = not isinstance(entry.usb, UsbConfig)
        usb = [(f"usb[{index}]" if several else "usb", wanted) for index, wanted in enumerate(entry.usb_ids)]
        for place, wanted in (("pci", entry.pci), *usb):
            if wanted is not None and wanted == type(wanted)():
                named = any_of(field.encode_name for field in msgspec.structs.fields(wanted))
                self._report(f"{path}.{place}", f"would be every {place[:3].upper()} device; give {named}")
        if entry.group is not None and len(set(entry.globs)) < len(entry.globs):
            self._report(f"{path}.group", "the same glob is given twice; a device has each node once")
        elif entry.group is not None:
            if all(part.optional for part in entry.parts):
                self._report(f"{path}.group", "all parts are optional; a device needs one that is always there")
            self._check_group(entry.globs, f"{path}.group")

    def _check_group(self, group: tuple[str, ...], path: str) -> None:
        """Report each device node that is in two different groups of paths, because devices would share hardware."""
        own, seen = frozenset(group), set[frozenset[str]]()
        for index, member in enumerate(group):
            if re.search(r"[*?[]", member):
                continue
            line, other = self._groups.setdefault(member, (self._lines[f"{path}[{index}]"], own))
            if other in seen or other <= own or own <= other:
                seen.add(other)
                continue
            message = (
                f"{member} is in another group, too, on line {line}; if their devices share it, put it under `nodes` "
                f"of both resources instead; if one device excludes the other, write {member[:-1]}[{member[-1]}]"
            )
            self._report(f"{path}[{index}]", message)
            break

    def _check_resource(self, resource: ResourceConfig, path: str, keys: AbstractSet[str]) -> None:
        name = resource.name
        if name in self._names:
            line = self._names[name]
            message = f"the resource {name!r} is there already, on line {line}; put its devices into one list"
            self._report(f"{path}.name", message)
        elif name:
            self._names[name] = self._lines[f"{path}.name"]
        graphics = [index for index, entry in enumerate(resource.devices) if entry.nvidia is not None]
        if len(graphics) > 1:
            message = "a resource has one nvidia entry; choose among the GPUs with include and exclude"
            self._report(f"{path}.devices[{graphics[1]}]", message)
        domain = name.partition("/")[0]
        for index in graphics:
            gpus = resource.devices[index].nvidia
            if gpus is not None and gpus.mixed and (other := self._mixed.setdefault(domain, name)) != name:
                message = f"{other} brings the resources {domain}/mig-<profile> already; give this one another domain"
                self._report(f"{path}.devices[{index}].nvidia.mig", message)
        if resource.plugin is not None:
            if len(resource.devices) > 1:
                message = "a resource with a plugin entry has no other; the plugin lists its devices"
                self._report(f"{path}.devices", message)
            for key in sorted(keys - ADOPTED_KEYS):
                text = "the vendor's plugin decides this; with a plugin entry only name, driver, attributes, capacity"
                self._report(f"{path}.{key}", f"{text} and dra are given")
            self._check_plugin(resource, path, keys)
        own = {host for entry in resource.devices for host in entry.globs}
        for index, shared in enumerate(resource.nodes):
            if shared in own:
                message = f"{shared!r} is a device of this resource, or shared, not both"
                self._report(f"{path}.nodes[{index}]", message)
        mounted: set[str] = set()
        for index, mount in enumerate(resource.mounts):
            if mount.container in mounted:
                message = f"something is mounted at {mount.container!r} already"
                self._report(f"{path}.mounts[{index}].container", message)
            mounted.add(mount.container)
        if "dra" in keys and "driver" not in keys:
            message = "claims need a driver's name; write driver: and a DNS name, such as gpu.example.com"
            self._report(f"{path}.dra", message)
        if resource.metadata and "driver" not in keys:
            message = "the files name a driver; write driver: and a DNS name, such as gpu.example.com"
            self._report(f"{path}.metadata", message)
        # The constructor of `Device` checks limits of the API server that no pattern can express.
        device = Device("x", attributes=typed_attributes(resource.attributes), capacity=resource.capacity)
        for key, problem in naming.problems(device, resource.driver or "example.com"):
            self._report(f"{path}.{key}", problem)

    def _check_plugin(self, resource: ResourceConfig, path: str, keys: AbstractSet[str]) -> None:
        """Report a vendor's plugin that cannot be adopted, or has a `driver` but is not known to work with claims."""
        name, plugin = resource.name, known_plugin(resource.name)
        if not name:
            return
        if plugin is not None and plugin.serves == "no":
            text = f"the plugin of {name} ({plugin.plugin}) cannot be adopted: {plugin.why}"
            self._report(f"{path}.devices", text)
        elif "driver" not in keys or (plugin is not None and plugin.serves == "both"):
            return
        elif plugin is not None:
            text = f"the plugin of {name} ({plugin.plugin}) serves no claims: {plugin.why}; leave `driver` out"
            self._report(f"{path}.driver", text)
        elif not any(entry.plugin is not None and entry.plugin.claims for entry in resource.devices):
            text = (
                f"it is not known whether the plugin of {name} can serve claims; if its answers depend on the ids "
                "alone, and it looks for pods neither in the API server nor in PodResources, write `claims: true` "
                "under `plugin`"
            )
            self._report(f"{path}.driver", text)

    def _check_config(self, resources: tuple[ResourceConfig, ...], path: str) -> None:
        """Report two resources with a common device that neither would offer, because of `driver` and `dra.share`.

        Also report `dra.unhealthy: NoExecute` for a driver with devices of an adopted plugin, because each restart of
        the plugin would end pods.
        """
        adopted = {resource.driver for resource in resources if resource.adopted and resource.driver}
        first: dict[object, int] = {}
        filters: dict[object, int] = {}
        for index, resource in enumerate(resources):
            if resource.driver in adopted and resource.dra.unhealthy == "NoExecute":
                message = (
                    f"driver {resource.driver} has devices of a vendor's plugin: while that restarts they are "
                    "unhealthy, and with NoExecute their pods would end; leave `dra.unhealthy` out"
                )
                self._report(f"{path}.resources[{index}]", message)
            kept = filters.setdefault((resource.include, resource.exclude), index)
            places = [(kept, place) for entry in resource.devices for place in _places(entry)]
            for number in dict.fromkeys(first.setdefault(place, index) for place in places):
                other = resources[number]
                if sides_conflict(resource, other):
                    message = (
                        f"it has devices of {other.name} ({path}.resources[{number}]) under another driver and "
                        "on other sides, so they would be offered to nobody; "
                        "give both the share none, or both the share all"
                    )
                    self._report(f"{path}.resources[{index}]", message)
                    break


def _places(entry: DeviceEntry) -> Iterator[object]:
    """Yield keys of a device entry for comparison: two entries that list the same devices have a key in common."""
    yield from entry.globs
    yield from (place for place in (entry.pci, *entry.usb_ids, entry.nvidia) if place is not None)


def sides_conflict(resource: ResourceConfig, other: ResourceConfig) -> bool:
    """Return whether, because of `driver` and `dra.share`, neither of two resources would offer a common device."""
    sides = {_side_of(resource), _side_of(other)}
    return resource.driver != other.driver and (len(sides) > 1 or None in sides)


def _side_of(resource: ResourceConfig) -> str | None:
    """Return the `Side` that has all devices of a resource, "plugin" or "dra"; None if both sides may have devices."""
    if resource.driver is None or resource.dra.share in (0, "none", "0%"):
        return "plugin"
    return "dra" if resource.dra.share in ("all", "100%") else None


def any_of(words: Iterable[object]) -> str:
    """Return the words as a text like "a, b or c"."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last
