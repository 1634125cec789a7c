"""The rules of a config file that no type can express."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import yaml

from deviceplugin import naming
from deviceplugin.config.document import Problems
from deviceplugin.config.known_plugins import known_plugin
from deviceplugin.config.lock import ADOPTED, CODE, OPEN, PATHS, Lock, texts_of
from deviceplugin.config.types import Config, DeviceEntry, MetricsConfig, ResourceConfig, typed_attributes
from deviceplugin.device import Device

ADOPTED_KEYS: Final = {"name", "devices", "driver", "attributes", "capacity", "dra"}
"""The keys that a resource with a plugin entry may have. The plugin decides everything else."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A mapping of the file: its node and path; by key, the valid values, and the nodes of all values."""

    problems: Problems
    node: yaml.Node
    path: str
    nodes: Mapping[str, yaml.Node]
    values: dict[str, Any]

    def report(self, key: str, message: str, below: str = "", node: yaml.Node | None = None) -> None:
        """Add a problem with a key's value, or with the part of the value at the path `below`."""
        self.problems.report(node or self.nodes[key], f"{self.path}.{key}{below}", message)


class ConfigRules:
    """Checks the mappings of one file, in their order. lock: the commands and host paths that are allowed."""

    def __init__(self, lock: Lock = OPEN) -> None:
        self._lock = lock
        self._names: dict[str, int] = {}
        """By resource: the line of its name."""
        self._groups: dict[str, tuple[int, frozenset[str]]] = {}
        """By path without wildcards: the line of the first group that has it, and that group."""
        self._checks: Mapping[type, Callable[[Checked], None]] = {
            DeviceEntry: self._check_entry,
            ResourceConfig: self._check_resource,
            MetricsConfig: self._check_metrics,
            Config: self._check_config,
        }

    def check(self, kind: type, mapping: Checked) -> None:
        """Report the problems of a mapping of this type, and normalize its values."""
        if (check := self._checks.get(kind)) is not None:
            check(mapping)
        self._check_lock(kind, mapping)

    def _check_lock(self, kind: type, mapping: Checked) -> None:
        if self._lock is OPEN:
            return
        for key in PATHS.get(kind, ()):
            value = mapping.values.get(key)
            for index, path in enumerate(texts_of(value)):
                if problem := self._lock.problem(kind, path):
                    listed = isinstance(value, tuple)
                    node = mapping.nodes[key].value[index] if listed else None
                    mapping.report(key, problem, f"[{index}]" * listed, node)
        if kind is DeviceEntry and "plugin" in mapping.nodes and not self._lock.plugins:
            text = "a vendor's plugin chooses what pods get of the host, which is not allowed; "
            mapping.report("plugin", f"{text}`run --adopt={ADOPTED}` allows it")
        for key in CODE.get(kind, ()):
            if mapping.values.get(key) and not self._lock.commands:
                message = "the agent would execute this, which is not allowed; `run --allow-commands` allows it"
                mapping.report(key, message)

    def _check_entry(self, entry: Checked) -> None:
        kinds = any_of(DeviceEntry.__struct_fields__)
        if not entry.nodes and not entry.node.value:  # an unknown key has been reported
            entry.problems.report(entry.node, entry.path, f"an entry needs one of {kinds}")
        elif len(entry.nodes) > 1:
            message = f"an entry has one of {kinds}, not {' and '.join(entry.nodes)}; make each an entry of its own"
            entry.problems.report(entry.node, entry.path, message)
        for kind in ("pci", "usb"):
            wanted = entry.values.get(kind)
            if wanted is not None and wanted == type(wanted)():
                named = any_of(field.encode_name for field in msgspec.structs.fields(wanted))
                entry.report(kind, f"would be every {kind.upper()} device; give {named}")
        group = entry.values.get("group", ())
        if len(set(group)) < len(group):
            entry.report("group", "the same glob is given twice; a device has each node once")
        elif group:
            self._check_group(entry, group)

    def _check_group(self, entry: Checked, group: tuple[str, ...]) -> None:
        """Report a device node in two groups that differ: their devices may share the node, or be one device."""
        own, seen = frozenset(group), set[frozenset[str]]()
        for index, (member, node) in enumerate(zip(group, entry.nodes["group"].value, strict=True)):
            if re.search(r"[*?[]", member):
                continue
            line, other = self._groups.setdefault(member, (node.start_mark.line + 1, own))
            if other in seen or other <= own or own <= other:
                seen.add(other)
                continue
            message = (
                f"{member} is in another group, too, on line {line}; if their devices share it, put it under `nodes` "
                f"of both resources instead; if one device excludes the other, write {member[:-1]}[{member[-1]}]"
            )
            entry.report("group", message, f"[{index}]", node)
            break

    def _check_resource(self, resource: Checked) -> None:
        values = resource.values
        name, devices = values.get("name"), values.get("devices", ())
        if name is not None:
            if name in self._names:
                line = self._names[name]
                message = f"the resource {name!r} is there already, on line {line}; put its devices into one list"
                resource.report("name", message)
            self._names.setdefault(name, resource.nodes["name"].start_mark.line + 1)
        graphics = [index for index, entry in enumerate(devices) if entry.nvidia is not None]
        if len(graphics) > 1:
            message = "a resource has one nvidia entry; choose among the GPUs with include and exclude"
            resource.report("devices", message, f"[{graphics[1]}]")
        if any(entry.plugin is not None for entry in devices):
            if len(devices) > 1:
                resource.report("devices", "a resource with a plugin entry has no other; the plugin lists its devices")
            for key in resource.nodes.keys() - ADOPTED_KEYS:
                text = "the vendor's plugin decides this; with a plugin entry only name, driver, attributes, capacity"
                resource.report(key, f"{text} and dra are given")
            self._check_plugin(resource)
        own = {path for entry in devices for path in entry.globs}
        for index, shared in enumerate(values.get("nodes", ())):
            if shared in own:
                message = f"{shared!r} is a device of this resource, or shared, not both"
                resource.report("nodes", message, f"[{index}]")
        if "permissions" in values:
            values["permissions"] = "".join(mode for mode in "rwm" if mode in values["permissions"])
        mounted: set[str] = set()
        for index, mount in enumerate(values.get("mounts", ())):
            if mount.container in mounted:
                message = f"something is mounted at {mount.container!r} already"
                resource.report("mounts", message, f"[{index}].container")
            mounted.add(mount.container)
        self._check_claims(resource)

    def _check_plugin(self, resource: Checked) -> None:
        """Report a resource whose plugin cannot be adopted, or not for claims, as far as it is known."""
        name = resource.values.get("name", "")
        plugin = known_plugin(name)
        if plugin is not None and plugin.serves == "no":
            resource.report("devices", f"the plugin of {name} ({plugin.plugin}) cannot be adopted: {plugin.why}")
        elif "driver" not in resource.nodes or (plugin is not None and plugin.serves == "both"):
            return
        elif plugin is not None:
            text = f"the plugin of {name} ({plugin.plugin}) serves no claims: {plugin.why}; leave `driver` out"
            resource.report("driver", text)
        elif not any(entry.plugin is not None and entry.plugin.claims for entry in resource.values["devices"]):
            text = (
                f"it is not known whether the plugin of {name} can serve claims; if its answers depend on the ids "
                "alone, and it looks for pods neither in the API server nor in PodResources, write `claims: true` "
                "under `plugin`"
            )
            resource.report("driver", text)

    def _check_claims(self, resource: Checked) -> None:
        if "dra" in resource.nodes and "driver" not in resource.nodes:
            resource.report("dra", "claims need a driver's name; write driver: and a DNS name, such as gpu.example.com")
        # These limits are those of the API server; no pattern expresses them.
        attributes, capacity = resource.values.get("attributes", {}), resource.values.get("capacity", {})
        device = Device("x", attributes=typed_attributes(attributes), capacity=capacity)
        for key, problem in naming.problems(device, resource.values.get("driver") or "example.com"):
            resource.report(key, problem)

    def _check_config(self, config: Checked) -> None:
        """Report drivers with the same devices on different sides: neither driver would offer them.

        Report NoExecute for an adopted plugin's devices too: a restart of the plugin would end pods.
        """
        resources: tuple[ResourceConfig, ...] = config.values.get("resources", ())
        adopted = {resource.driver for resource in resources if resource.adopted and resource.driver}
        for index, resource in enumerate(resources):
            if resource.driver in adopted and resource.dra.unhealthy == "NoExecute":
                message = (
                    f"driver {resource.driver} has devices of a vendor's plugin: while that restarts they are "
                    "unhealthy, and with NoExecute their pods would end; leave `dra.unhealthy` out"
                )
                config.report("resources", message, f"[{index}]", config.nodes["resources"].value[index])
        first: dict[object, int] = {}
        filters: dict[object, int] = {}
        for index, resource in enumerate(resources):
            kept = filters.setdefault((resource.include, resource.exclude), index)
            places = [(kept, place) for entry in resource.devices for place in _places(entry)]
            for number in dict.fromkeys(first.setdefault(place, index) for place in places):
                other = resources[number]
                if sides_conflict(resource, other):
                    message = (
                        f"it has devices of {other.name} ({config.path}.resources[{number}]) under another driver and "
                        "on other sides, so they would be offered to nobody; "
                        "give both the share none, or both the share all"
                    )
                    config.report("resources", message, f"[{index}]", config.nodes["resources"].value[index])
                    break

    def _check_metrics(self, metrics: Checked) -> None:
        for name in ("key", "client_ca"):
            if name in metrics.nodes and "certificate" not in metrics.nodes:
                metrics.report(name, "there is no TLS without `certificate`")


def _places(entry: DeviceEntry) -> Iterator[object]:
    """Yield keys of an entry. Two entries that list the same devices have one of them in common."""
    yield from entry.globs
    yield from (place for place in (entry.pci, entry.usb, entry.nvidia) if place is not None)


def sides_conflict(resource: ResourceConfig, other: ResourceConfig) -> bool:
    """Return whether a device of both resources would be offered by neither, since their sides differ."""
    sides = {_side_of(resource), _side_of(other)}
    return resource.driver != other.driver and (len(sides) > 1 or None in sides)


def _side_of(resource: ResourceConfig) -> str | None:
    """Return the side of all of a resource's devices; None if they are divided."""
    if resource.driver is None or resource.dra.share in (0, "none", "0%"):
        return "plugin"
    return "dra" if resource.dra.share in ("all", "100%") else None


def any_of(words: Iterable[object]) -> str:
    """Return words as a choice: a, b or c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last
