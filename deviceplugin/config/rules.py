"""The rules of a config file that no type can say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import yaml

from deviceplugin import naming
from deviceplugin.config.errors import Problems
from deviceplugin.config.messages import any_of
from deviceplugin.config.types import Config, DeviceEntry, MetricsConfig, ResourceConfig, typed_attributes
from deviceplugin.device import Device

Nodes = Mapping[str, yaml.Node]


class Rules:
    """Checks the mappings of one file, one after another; what is wrong is added to its problems."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._names: dict[str, int] = {}
        """By resource: the line of its name."""
        self._groups: dict[str, tuple[int, frozenset[str]]] = {}
        """By path without wildcards: the line of the first group that has it, and that group."""
        self._checks: dict[type, Callable[[yaml.Node, str, Nodes, dict[str, Any]], None]] = {
            DeviceEntry: self._check_entry,
            ResourceConfig: self._check_resource,
            MetricsConfig: self._check_metrics,
            Config: self._check_config,
        }

    def check(self, kind: type, node: yaml.Node, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        """Check a mapping of this type: its node and place, and by key the nodes and the values that are good.

        Values may be changed to the form in which they are kept.
        """
        check = self._checks.get(kind)
        if check is not None:
            check(node, path, nodes, values)

    def _check_entry(self, node: yaml.Node, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        kinds = DeviceEntry.__struct_fields__
        if not nodes and not node.value:  # an unknown key has been reported
            self._problems.report(node, path, f"an entry needs one of {any_of(kinds)}")
        elif len(nodes) > 1:
            self._problems.report(
                node,
                path,
                f"an entry has one of {any_of(kinds)}, not {' and '.join(nodes)}; make each an entry of its own",
            )
        for kind in ("pci", "usb"):
            if kind in values and values[kind] == type(values[kind])():
                named = [field.encode_name for field in msgspec.structs.fields(type(values[kind]))]
                self._problems.report(
                    nodes[kind], f"{path}.{kind}", f"would be every {kind.upper()} device; give {any_of(named)}"
                )
        group = values.get("group", ())
        if len(set(group)) < len(group):
            self._problems.report(
                nodes["group"], f"{path}.group", "the same glob is given twice; a device has each node once"
            )
        elif group:
            self._check_group(path, nodes["group"], group)

    def _check_group(self, path: str, node: yaml.Node, group: tuple[str, ...]) -> None:
        """Refuse a node of two groups that have other nodes each: it may be one that they share, or what they are."""
        mine, seen = frozenset(group), set[frozenset[str]]()
        for index, (member, place) in enumerate(zip(group, node.value, strict=True)):
            if re.search(r"[*?[]", member):
                continue
            line, other = self._groups.setdefault(member, (place.start_mark.line + 1, mine))
            if other in seen or other <= mine or mine <= other:
                seen.add(other)
                continue
            self._problems.report(
                place,
                f"{path}.group[{index}]",
                f"{member} is in another group, too, on line {line}; if their devices share it, put it under `nodes` "
                f"of both resources instead; if one device excludes the other, write {member[:-1]}[{member[-1]}]",
            )
            break

    def _check_resource(self, node: yaml.Node, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        name = values.get("name")
        if name is not None:
            if name in self._names:
                self._problems.report(
                    nodes["name"],
                    f"{path}.name",
                    f"the resource {name!r} is there already, on line {self._names[name]}; "
                    "put its devices into one list",
                )
            self._names.setdefault(name, nodes["name"].start_mark.line + 1)
        graphics = [index for index, entry in enumerate(values.get("devices", ())) if entry.nvidia is not None]
        if len(graphics) > 1:
            self._problems.report(
                nodes["devices"],
                f"{path}.devices[{graphics[1]}]",
                "a resource has one nvidia entry; choose among the GPUs with include and exclude",
            )
        own = {path for entry in values.get("devices", ()) for path in (entry.path, *(entry.group or ()))}
        for index, shared in enumerate(values.get("nodes", ())):
            if shared in own:
                self._problems.report(
                    nodes["nodes"],
                    f"{path}.nodes[{index}]",
                    f"{shared!r} is a device of this resource, or shared, not both",
                )
        if "permissions" in values:
            values["permissions"] = "".join(mode for mode in "rwm" if mode in values["permissions"])
        places: set[str] = set()
        for index, mount in enumerate(values.get("mounts", ())):
            if mount.container in places:
                self._problems.report(
                    nodes["mounts"],
                    f"{path}.mounts[{index}].container",
                    f"something is mounted at {mount.container!r} already",
                )
            places.add(mount.container)
        self._check_claims(path, nodes, values)

    def _check_claims(self, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        driver = values.get("driver")
        if "dra" in nodes and "driver" not in nodes:
            self._problems.report(
                nodes["dra"],
                f"{path}.dra",
                "claims need a driver's name; write driver: and a DNS name, such as gpu.example.com",
            )
        # What no pattern says, in the words of those who will publish it.
        attributes, capacity = values.get("attributes", {}), values.get("capacity", {})
        device = Device("x", attributes=typed_attributes(attributes), capacity=capacity)
        for problem in naming.attribute_problems(device, driver or "example.com"):
            self._problems.report(nodes["attributes"], f"{path}.attributes", problem)
        for problem in naming.capacity_problems(device):
            self._problems.report(nodes["capacity"], f"{path}.capacity", problem)
        most = naming.MAX_ENTRIES - 2  # as naming.check_device: two are the DRA side's own
        if len(attributes) + len(capacity) > most:
            self._problems.report(
                nodes["attributes" if attributes else "capacity"],
                f"{path}.{'attributes' if attributes else 'capacity'}",
                f"a device has {most} attributes and capacities at the most, not {len(attributes) + len(capacity)}",
            )

    def _check_config(self, node: yaml.Node, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        """Refuse drivers over the same devices whose shares put these on different sides: neither would offer them."""
        resources: tuple[ResourceConfig, ...] = values.get("resources", ())
        first: dict[object, int] = {}
        filters: dict[object, int] = {}
        for index, one in enumerate(resources):
            kept = filters.setdefault((one.include, one.exclude), index)
            places = [(kept, place) for entry in one.devices for place in _places(entry)]
            for number in dict.fromkeys(first.setdefault(place, index) for place in places):
                other = resources[number]
                if sides_conflict(one, other):
                    self._problems.report(
                        nodes["resources"].value[index],
                        f"{path}.resources[{index}]",
                        f"it has devices of {other.name} ({path}.resources[{number}]) under another driver and on "
                        "other sides, so they would be offered to nobody; "
                        "give both the share none, or both the share all",
                    )
                    break

    def _check_metrics(self, node: yaml.Node, path: str, nodes: Nodes, values: dict[str, Any]) -> None:
        for name in ("key", "client_ca"):
            if name in nodes and "certificate" not in nodes:
                self._problems.report(nodes[name], f"{path}.{name}", "there is no TLS without `certificate`")


def _places(entry: DeviceEntry) -> tuple[object, ...]:
    """Return what two entries have in common that find the same devices."""
    found = (entry.path, *(entry.group or ()), entry.pci, entry.usb, entry.nvidia)
    return tuple(one for one in found if one is not None)


def sides_conflict(one: ResourceConfig, other: ResourceConfig) -> bool:
    """Return whether a device of both resources would be offered to nobody: it is not on one side alone."""
    sides = {_side_of(one), _side_of(other)}
    return one.driver != other.driver and (len(sides) > 1 or None in sides)


def _side_of(resource: ResourceConfig) -> str | None:
    """Return the side of all of a resource's devices; None if they are divided."""
    if resource.driver is None or resource.dra.share in (0, "none", "0%"):
        return "plugin"
    return "dra" if resource.dra.share in ("all", "100%") else None
