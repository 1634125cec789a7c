"""Decides which listed devices must not be offered to the kubelet in ListAndWatch, or to DRA in slices.

All functions are pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final, NamedTuple

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey, HardwareIndex, natural_key, titled
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.register.question import (
    UNCERTAIN,
    Use,
    View,
    Wanted,
    allocation_unit,
    is_given_by_others,
    refusal,
    use_of_allocation,
    wanted_use,
)
from deviceplugin.register.records import NONE, Point, RegisterSnapshot, SideName

_SIDES: Final[Mapping[SideName, str]] = {"plugin": "for pods", "dra": "for claims", "none": "quarantined"}


class ListedResource(NamedTuple):
    """A resource of this process, and its device list at one moment.

    driver: the resource's DRA driver, or "". ids: a function that returns a device's kubelet ids: its own id, or the
    ids of its replicas.
    """

    snapshot: InventorySnapshot
    driver: str
    replicas: int
    ids: Callable[[Device], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class OfferQuestion:
    """The input for the decision which devices a side (plugin or DRA) may offer, for all resources.

    state: the register's records. facts: the facts that the register does not record, for example holders outside the
    register. hardware: for each device that a source lists, the device's identity tokens. resources: for each resource
    of this process, its devices (`ListedResource`). wanted: a function that returns the hardware identity of a device,
    and the amount of the device that a holder gets with one kubelet id.
    """

    state: RegisterSnapshot
    facts: View
    hardware: HardwareIndex
    resources: Mapping[str, ListedResource]
    wanted: Callable[[str, str], Wanted]

    @functools.cached_property
    def view(self) -> View:
        """A copy of `facts` with an empty `unreleased`, because devices in `unreleased` stay offered."""
        return replace(self.facts, unreleased=NONE)

    @functools.cached_property
    def foreign(self) -> frozenset[Point]:
        """The keys (`Point`) of the devices that have a holder outside the register's records."""
        return frozenset(point for use in self.view.others for point in use.points)

    @functools.cached_property
    def by_others(self) -> frozenset[Point]:
        """The keys (`Point`) of devices that pods have, or may have, through another plugin of the same resource."""
        uses = [use for use in self.view.others if use.unit[0] == UNCERTAIN]
        given = (allocation for allocation in self.state.allocations.values() if is_given_by_others(allocation))
        uses += [use_of_allocation(allocation, self.view) for allocation in given]
        return frozenset(point for use in uses for point in use.points)


@dataclass(frozen=True, slots=True)
class WithheldDevices:
    """The devices of a resource that the plugin, or DRA, must not offer, although the resource's source lists them.

    ids: for each kubelet id that must not be offered (in DRA: for each device id), the reason. devices: for each device
    on this side (plugin or DRA) of which no id may be offered, the reason. by_others: those of `devices` that pods
    have, or may have, through another plugin of the same resource.
    """

    ids: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    by_others: frozenset[str] = frozenset()


def withheld_devices(asked: OfferQuestion, resource: str, side: SideName) -> WithheldDevices:
    """Return the devices of a resource that the side (plugin or dra) must not offer now, with the reasons.

    A kubelet id must not be offered if the other holders of the device's hardware leave too little of the hardware. For
    DRA, claims of the device's own driver do not count as other holders: the scheduler itself subtracts the devices and
    counters of these claims. The ids of a device are checked in order, and an idle id that is offered counts as held
    for the next ids.
    """
    if (listed := asked.resources.get(resource)) is None:
        return WithheldDevices()
    state, hardware, foreign = asked.state, asked.hardware, asked.foreign
    by_others: set[str] = set()
    withheld: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for device in listed.snapshot.devices.values():
        key, tokens = (resource, device.id), hardware.tokens((resource, device.id))
        points: set[Point] = {key, *tokens, *hardware.larger.get(key, ())}
        idle = foreign.isdisjoint(points) and state.index.keys().isdisjoint(points)
        if idle and not device.consumes and key not in hardware.related:
            continue  # In the usual case, no holder has any part of the device.
        ids = listed.ids(device) if side == "plugin" else (device.id,)
        points.update((name, counter) for name, of in device.consumes.items() for counter in of)
        entries = {entry for point in points for entry in state.index.get(point, ())}
        free = foreign.isdisjoint(points) and (
            not entries or (side == "plugin" and _holds_itself_alone(asked, key, ids, entries))
        )
        excluded = {} if free else _excluded(asked, key, ids, side)
        if side == "plugin" and device.consumes and (why := _overdrawn(asked, key)):
            excluded = dict.fromkeys(ids, why)  # The slices leave out a device that takes too much from a counter.
        if key in hardware.related and len(excluded) < len(ids):
            named_before = "" if state.index.get(key) else _offered_under_another_id(asked, key, side)
            if why := _peer_on_other_side(asked, key) or named_before:
                excluded = dict.fromkeys(ids, why) | excluded
        withheld |= excluded
        at = state.state(*key)
        if excluded and len(excluded) == len(ids) and (at.healthy if side == "plugin" else at.offered):
            reasons[device.id] = next(iter(excluded.values()))
            if not asked.by_others.isdisjoint(points):
                by_others.add(device.id)
    return WithheldDevices(withheld, reasons, frozenset(by_others))


def _holds_itself_alone(
    asked: OfferQuestion, key: DeviceKey, ids: Sequence[str], entries: Collection[tuple[str, DeviceKey]]
) -> bool:
    """Return whether the device has one id, its allocation is the only holder, and the granted hardware is unchanged.

    For such a device, which is the usual held device, no further check is necessary.
    """
    if len(ids) > 1 or entries != {("allocations", (key[0], ids[0]))}:
        return False
    allocation = asked.state.allocations[key[0], ids[0]]
    return allocation.device == key[1] and allocation.identity == asked.wanted(*key).identity


def _excluded(asked: OfferQuestion, key: DeviceKey, ids: Sequence[str], side: SideName) -> dict[str, str]:
    """Return the reason for each id that could not be granted now, among the ids of one device.

    On the DRA side, the device's own id is the only id.
    """
    state, view, resource = asked.state, asked.view, key[0]
    driver, wanted = asked.resources[resource].driver, asked.wanted(*key)
    if side == "dra":
        held = key in state.index
        why = refusal(
            [wanted_use(("slice",), wanted, view)._replace(part=Fraction(1))],
            state,
            view,
            own=lambda use: use.key == key and (use.unit[:2] == ("claim", driver) or _is_only_possible(use, held=held)),
            counted=lambda use: use.unit[0] != "claim",
        )
        return {key[1]: why} if why else {}
    refused: dict[str, str] = {}
    offered: list[Use] = []
    for name in ids:
        requested = wanted_use(allocation_unit(resource, name), wanted, view)
        given = (resource, name) in state.allocations
        own = functools.partial(_is_only_possible, held=given)
        if why := refusal([requested], state, view, offered, own=own):
            refused[name] = why
        elif not given:
            offered.append(requested)
    return refused


def _overdrawn(asked: OfferQuestion, key: DeviceKey) -> str:
    """Return a reason if a device takes more than a counter has, or takes from an undeclared counter; else ""."""
    limits = asked.view.limits
    use = wanted_use(allocation_unit(*key), asked.wanted(*key), asked.view)
    for counter, taken in use.takes.items():
        if not 0 <= taken <= limits.get(counter, Fraction(-1)):
            has = f"has {limits[counter]}" if counter in limits else "is not declared, or declared in different ways"
            return f"it takes {taken} from counter {counter[2]} of {counter[1]}, which {has}"
    return ""


def _is_only_possible(use: Use, *, held: bool) -> bool:
    """Return whether a use is uncertain and the device has a known holder; such a use changes no offer."""
    return held and use.unit[0] == UNCERTAIN


def _peer_on_other_side(asked: OfferQuestion, key: DeviceKey) -> str:
    """Return why a device is not offered if a device that shares its hardware is on another side; else "".

    The sides are plugin (pods' `limits`) and DRA (claims). Neither of the two devices is offered.
    """
    mine, resources = asked.state.state(*key).side, asked.resources
    for peer in sorted(asked.hardware.peers(key)):
        if _is_listed(asked, peer) and (theirs := asked.state.state(*peer).side) != mine:
            reason = f"overlaps {titled(peer)}, which is {_SIDES[theirs]}"
            if resources[key[0]].driver != resources[peer[0]].driver:
                reason += "; give both resources the share none, or both the share all"
            return reason
    return ""


def _offered_under_another_id(asked: OfferQuestion, key: DeviceKey, side: SideName) -> str:
    """Return a reason if an idle device's hardware is already offered under another id that sorts first; else ""."""
    mine = asked.resources[key[0]]
    for other in sorted(asked.hardware.aliases(key), key=natural_key):
        theirs = asked.resources[other[0]]
        together = other[0] == key[0] or (side == "dra" and mine.driver and mine.driver == theirs.driver)
        if together and mine.replicas == 1 and natural_key(other) < natural_key(key) and _is_listed(asked, other):
            return f"it is offered as {titled(other)}"
    return ""


def _is_listed(asked: OfferQuestion, key: DeviceKey) -> bool:
    snapshot = asked.resources[key[0]].snapshot
    return key[1] in snapshot.devices and key[1] not in snapshot.gone
