"""Computes the ResourceSlices of a driver's pool from the driver's devices, as a pure function.

Each driver has one pool on a node, with the node's name. The limits are those of Kubernetes 1.36
(k8s.io/api/resource/v1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, Literal, TypeVar

from deviceplugin import naming
from deviceplugin.device import Device, natural
from deviceplugin.device_metadata import attribute, numa_attribute
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.naming import NamingError
from dra_bridge.kube import Object

_T = TypeVar("_T")

MAX_DEVICES: Final = 64
"""Maximum number of devices in a slice. The API server allows 64 if a device has taints or consumes counters, else 128.
"""
MAX_COUNTER_SETS: Final = 8
MAX_NAME: Final = 253
NAMES: Final = 8
"""Number of candidate names of each slice. If another program's slice has the first name, the second name is used, and
so on."""

Feature = Literal["taints", "sharing", "counters", "lists"]
"""An optional feature of the API server. A server without the feature drops the feature's fields from a slice without
an error.

A server without "lists" refuses an attribute with a list, because the attribute would have no value without the list.
"""
CounterAmounts = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Offer:
    """The devices of one resource in its driver's pool.

    offered: the ids of the devices that claims may get; None for all devices. replicas: for each device id, the number
    of claims that may share the device; 1 for an id that is not in the mapping. order: device ids in the order in which
    the scheduler should allocate the devices. The scheduler begins with the first device of a slice. qualifier: the
    prefix of the devices' published names (`deviceplugin.naming`).
    """

    snapshot: InventorySnapshot
    offered: Collection[str] | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    order: Sequence[str] = ()
    qualifier: str = ""

    @property
    def devices(self) -> list[Device]:
        """All devices of the resource, including unhealthy devices and devices that are not offered to claims.

        The devices in `order` come first, then the others in natural order (gpu2 before gpu10).
        """
        devices = self.snapshot.devices
        at = {name: number for number, name in enumerate(self.order)}
        return [devices[name] for name in sorted(devices, key=lambda name: (at.get(name, len(at)), natural(name)))]


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of one driver on one node.

    offers: one `Offer` for each resource of the driver, even if claims get none of its devices now. unhealthy: the
    effect of the taint `<driver>/unhealthy` on unhealthy devices. annotations: the slices' annotations with names under
    `<driver>/`. In all slices but the first, the values of these annotations are empty. empty: whether the pool has a
    slice even if it offers no device.
    """

    driver: str
    node: str
    offers: tuple[Offer, ...] = ()
    unhealthy: Literal["NoSchedule", "NoExecute"] = "NoSchedule"
    annotations: Mapping[str, str] = field(default_factory=dict)
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Desired:
    """The slices that a pool should have.

    slices: bodies in the form of resource.k8s.io/v1, without `spec.pool.generation`, owner and resourceVersion. needs:
    the optional features of the API server that the slices use. problems: a sentence for each item that the slices
    lack, with the reason.
    """

    slices: tuple[Object, ...]
    needs: frozenset[Feature]
    problems: tuple[str, ...]


def slice_name(node: str, driver: str, number: int, taken: Collection[str] = ()) -> str:
    """Return the name of a pool's slice. The name is constant, so a create whose response was lost can be repeated.

    number: the slice's index in the pool. taken: names that slices of other programs have. The function returns the
    first of the `NAMES` candidates that is not taken.
    """
    for variant in range(NAMES):
        seed = f"{node}\0{driver}" + (f"\0{variant}" if variant else "")
        end = f"-{hashlib.sha256(seed.encode()).hexdigest()[:5]}-{number}"
        name = f"{node}-{driver}"[: MAX_NAME - len(end)].rstrip("-.") + end
        if name not in taken:
            break
    return name


def own_name(node: str, driver: str, name: str) -> bool:
    """Return whether `slice_name` can return this name for a slice of this pool."""
    number = name.rpartition("-")[2]
    if not (number.isascii() and number.isdecimal() and len(number) < 6):
        return False
    tried: set[str] = set()
    while len(tried) < NAMES:
        tried.add(candidate := slice_name(node, driver, int(number), tried))
        if candidate == name:
            return True
    return False


def desired(pool: Pool, *, without: Collection[Feature] = (), taken: Collection[str] = ()) -> Desired | None:
    """Return the slices that this pool should have; None while a device source has not listed its devices.

    This is a pure function, so the same input gives the same bodies. If the API server would refuse an attribute, a
    capacity or a whole device, only this item is left out and reported, so that the rest of the pool is published.

    Each device has a fixed position in one slice, also while the device is not offered to claims. So a change of one
    device's state, health or taints changes only one slice, by one atomic write. without: features that the API server
    lacks. taken: names that slices of other programs have.
    """
    if not all(offer.snapshot.listed for offer in pool.offers):
        return None
    problems: list[str] = []
    sets = {} if "counters" in without else _counter_sets(pool, problems)
    used: set[str] = set()
    places: list[Object | None] = []
    needs: set[Feature] = set()
    for offer in pool.offers:
        for device in offer.devices:
            offered = offer.offered is None or device.id in offer.offered
            consumed: Mapping[str, CounterAmounts] = {}
            if "counters" not in without:
                consumed = _consumed(device, sets, problems if offered else [])
            used.update(consumed)
            features: Mapping[Feature, object] = {
                "taints": not device.health.usable,
                "sharing": offer.replicas.get(device.id, 1) > 1,
                "counters": device.consumes,
                "lists": len(device.numa_nodes) > 1,
            }
            needed = {feature for feature, uses in features.items() if offered and uses}
            needs |= needed
            left_out = (device.consumes and not consumed) or ("taints" in needed and "taints" in without)
            possible = offered and not left_out
            places.append(_entry(device, offer, pool, without, consumed, problems) if possible else None)
    counters: list[Object] = [{"name": name, "counters": _counters(sets[name])} for name in sorted(used, key=natural)]
    parts: list[Object] = []
    if any(places):
        parts += [{"sharedCounters": part} for part in _chunks(counters, MAX_COUNTER_SETS)]
        for chunk in _chunks(places, MAX_DEVICES):
            devices = [entry for entry in chunk if entry is not None]
            parts.append({"devices": devices} if devices else {})
    if not parts and pool.empty:
        parts = [{}]
    slices: list[Object] = []
    for number, part in enumerate(parts):
        metadata: Object = {"name": slice_name(pool.node, pool.driver, number, taken)}
        if pool.annotations:
            # All slices have the annotations, because the admission policies identify a slice of this agent by the
            # names of its annotations, and then permit a former driver to delete the slice.
            metadata["annotations"] = dict(pool.annotations) if number == 0 else dict.fromkeys(pool.annotations, "")
        whole = {"name": pool.node, "resourceSliceCount": len(parts)}
        spec = {"driver": pool.driver, "nodeName": pool.node, "pool": whole, **part}
        slices.append({"metadata": metadata, "spec": spec})
    return Desired(tuple(slices), frozenset(needs), tuple(dict.fromkeys(problems)))


def _entry(
    device: Device,
    offer: Offer,
    pool: Pool,
    without: Collection[Feature],
    consumed: Mapping[str, CounterAmounts],
    problems: list[str],
) -> Object:
    replicas = 1 if "sharing" in without else offer.replicas.get(device.id, 1)
    attributes: Object = {naming.EXTENDED_RESOURCE: {"string": naming.canonical_resource(offer.snapshot.resource)}}
    capacity: Object = {}
    if replicas > 1:
        policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
        capacity[naming.SHARES] = {"value": str(replicas), "requestPolicy": policy}
    taken = {naming.qualified(key, pool.driver) for key in (*attributes, *capacity)}
    # If a device has too many attributes and capacities, the NUMA node is left out before the device's own capacity and
    # attributes.
    wanted: list[tuple[str, Any, bool]] = [(key, value, True) for key, value in device.capacity.items()]
    wanted += [(key, value, False) for key, value in device.attributes.items()]
    for key, value, amount in wanted:
        try:
            (naming.check_capacity if amount else naming.check_attribute)(key, value)
            if naming.qualified(key, pool.driver) in taken:
                raise NamingError(f"{key!r} is given twice, or is a name that the framework uses")
            if len(taken) == naming.MAX_ENTRIES:
                raise NamingError(
                    f"a device can have {naming.MAX_ENTRIES} attributes and capacities, and {key!r} would be one more"
                )
        except NamingError as error:
            problems.append(f"{offer.snapshot.resource} device {device.id!r}: left out: {error}")
            continue
        taken.add(naming.qualified(key, pool.driver))
        if amount:
            capacity[key] = _capacity(value, replicas)
        else:
            attributes[key] = attribute(value)
    numa = device.numa_nodes
    is_known = bool(numa) and not (len(numa) > 1 and "lists" in without)
    if is_known and naming.NUMA_NODE not in taken and len(taken) < naming.MAX_ENTRIES:
        attributes[naming.NUMA_NODE] = numa_attribute(numa)
    entry: Object = {"name": naming.device_name(device.id, offer.qualifier), "attributes": attributes}
    if capacity:
        entry["capacity"] = capacity
    if replicas > 1:
        entry["allowMultipleAllocations"] = True
    if not device.health.usable:
        entry["taints"] = [{"key": f"{pool.driver}/unhealthy", "effect": pool.unhealthy}]
    if consumed:
        entry["consumesCounters"] = [
            {"counterSet": counter_set, "counters": _counters(what)} for counter_set, what in sorted(consumed.items())
        ]
    return entry


def _capacity(value: int | str, replicas: int) -> Object:
    """Return an entry of a device's capacity. value: the device's whole amount. replicas: see `Offer`.

    A claim that requests no amount of a shared device gets the amount divided by `replicas`. Without a request policy,
    such a claim would take the whole capacity, and no other claim could share the device (k8s.io/api/resource/v1,
    CapacityRequestPolicy).
    """
    if replicas == 1:
        return {"value": str(value)}
    number = naming.parse_quantity(value)
    part = Fraction(number // replicas) if number.denominator == 1 else Fraction(0)
    return {"value": str(value), "requestPolicy": {"default": _like(str(value), part)}}


def _like(text: str, number: Fraction) -> str:
    """Return a number as a quantity, with a binary suffix (such as Gi) if `text` has one and no digit is lost."""
    best = str(number)
    if text.endswith("i") and number:
        for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1):
            if number % 1024**power == 0:
                best = f"{number // 1024**power}{suffix}"
    return best


def _counter_sets(pool: Pool, problems: list[str]) -> dict[str, CounterAmounts]:
    """Return, for each set's name, the counter sets of all devices, including devices that are not offered to claims.

    A set is left out if two devices define it differently, or if the API server would refuse it.
    """
    sets: dict[str, CounterAmounts] = {}
    bad: set[str] = set()
    for offer in pool.offers:
        for device in offer.snapshot.devices.values():
            for name, counters in device.counters.items():
                try:
                    naming.check_counters(name, counters)
                except NamingError as error:
                    problems.append(f"{offer.snapshot.resource} device {device.id!r}: left out: {error}")
                    bad.add(name)
                    continue
                first = sets.setdefault(name, counters)
                if first is not counters and _numbers(first) != _numbers(counters):
                    problems.append(f"{offer.snapshot.resource}: left out: devices differ in counter set {name!r}")
                    bad.add(name)
    return {name: counters for name, counters in sets.items() if name not in bad}


def _numbers(counters: CounterAmounts) -> dict[str, Fraction]:
    return {name: naming.parse_quantity(value) for name, value in counters.items()}


def _consumed(device: Device, sets: Mapping[str, CounterAmounts], problems: list[str]) -> Mapping[str, CounterAmounts]:
    """Return the counters that a device consumes; empty if the API server would refuse these counters."""
    try:
        if len(device.consumes) > naming.MAX_CONSUMED_SETS:
            used = f"the device consumes from {len(device.consumes)} counter sets"
            raise NamingError(f"{used}, but only {naming.MAX_CONSUMED_SETS} are allowed")
        for name, counters in device.consumes.items():
            naming.check_counters(name, counters)
            if name not in sets:
                raise NamingError(f"the device consumes from counter set {name!r}, which no device defines")
            if unknown := counters.keys() - sets[name].keys():
                raise NamingError(f"the device consumes counter {min(unknown)!r}, which set {name!r} does not have")
    except NamingError as error:
        problems.append(f"device {device.id!r} is not offered: {error}")
        return {}
    return device.consumes


def _counters(counters: Mapping[str, int | str]) -> Object:
    return {name: {"value": str(value)} for name, value in sorted(counters.items())}


def _chunks(items: list[_T], size: int) -> list[list[_T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
