"""The register of one agent process. The plugin and DRA drivers call it before they offer, grant or release a device.

`deviceplugin.register.question` decides whether a grant is permitted, from the records and the evidence of holders that
this module collects. The store records the grant. A process has one register for all its resources and DRA drivers.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from deviceplugin import identity
from deviceplugin.device import Device
from deviceplugin.exclusion import (
    NO_TOKENS,
    DeviceConflictError,
    DeviceKey,
    Hardware,
    HardwareIndex,
    hardware_in,
    other_hardware,
    titled,
)
from deviceplugin.hook_runs import DeviceBusyError, HookRuns
from deviceplugin.identity import UNIDENTIFIED, Tokens, shown
from deviceplugin.inventory import Inventory, InventorySnapshot
from deviceplugin.register import identification, opened, operations
from deviceplugin.register.offers import ListedResource, OfferQuestion, WithheldDevices, withheld_devices
from deviceplugin.register.question import (
    HOOK,
    RELEASE,
    Use,
    View,
    Wanted,
    as_parts,
    held_twice,
    in_scopes,
    is_given_by_others,
    possible_uses,
    refusal,
    takes_of,
    uses,
    wanted_use,
)
from deviceplugin.register.records import NONE, WHOLE, Allocation, Amount, Operation, Point, RegisterSnapshot, SideName
from deviceplugin.register.releases import Releases
from deviceplugin.register.rules import Excluded, KubeletSnapshot, Refused
from deviceplugin.register.store import MemoryStore, Store
from deviceplugin.register.waits import Waits
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

SIDES: Final[tuple[SideName, ...]] = ("dra", "plugin")


class OtherSideError(DeviceConflictError):
    """Raised when a pod's `limits` request a device of the DRA side, or a claim a device of the plugin side."""


class HookWorksError(DeviceConflictError):
    """Raised when a hook still runs for the requested device although the hook's timeout is over."""


class UnknownHolderError(DeviceConflictError):
    """Raised when the agent does not know yet whether the requested device has a holder."""


class ResourceDevices(Protocol):
    """The facts about one resource that the register needs (implemented by `deviceplugin.node.service.Service`)."""

    source: DeviceSource
    inventory: Inventory

    def ids_now(self, device: Device) -> tuple[str, ...]:
        """Return a device's present ids at the kubelet: the device's own id, or the ids of its replicas."""

    def device_of(self, device_id: str) -> str:
        """Return the device of a kubelet id: the id itself, or the device whose replica has this id."""


class RegisterHost:
    """The operations of a process that its register needs. These default methods are for a process without resources.

    services: for each resource of the process, its service.
    """

    services: Mapping[str, ResourceDevices] = MappingProxyType({})

    def foreign_uses(self) -> tuple[Use, ...]:
        """Return the uses by other drivers and plugins, read from their files.

        Returns the same object until a use changes.
        """
        return ()

    async def reread(self, *, checkpoint: bool = True) -> None:
        """Read the files for `foreign_uses` again. checkpoint: whether to read the kubelet's checkpoint as well."""

    def granted_paths(self, allocations: Collection[Allocation]) -> frozenset[str] | None:
        """Return the host paths in the AllocateResponses of these allocations; None if these are not known."""
        return None

    def evidence_missing(self, resource: str, device: str) -> str:
        """Return why the holder of a device is not known yet; "" if it is known."""
        return ""


class ListedHardware:
    """The identity of all devices that this process's sources list. served: for each resource, its service.

    `now` sets the attributes `hardware` (its result), `resources`, `scopes` and `limits` (see `View`), and
    `has_released` (a source has the hook `released`).
    """

    def __init__(self, served: Mapping[str, ResourceDevices], boot: str) -> None:
        self.served: Final = served
        self._boot = boot
        self.hardware = HardwareIndex({})
        self._version: list[object] = [None]
        self.resources: dict[str, ListedResource] = {}
        self.scopes: Mapping[str, str] = {}
        self.limits: Mapping[tuple[str, str, str], Fraction] = {}
        self.has_released = False

    def now(self) -> HardwareIndex:
        """Return the identity tokens of all devices that the sources list; the same object until a device changes."""
        services, version = self.served.values(), list[object]()
        for service in services:
            version += service, service.inventory.snapshot, service.source
        if len(version) != len(self._version) or not all(map(operator.is_, version, self._version)):
            hardware, resources = dict[DeviceKey, Hardware](), dict[str, ListedResource]()
            for name, service in self.served.items():
                now, source = service.inventory.snapshot, service.source
                resources[name] = ListedResource(now, source.driver or "", source.replicas, service.ids_now)
                hardware |= hardware_in(now, source.driver or name)
            self._version, self.resources, self.hardware = version, resources, HardwareIndex(hardware, self._boot)
            self.scopes = {name: listed.driver or name for name, listed in resources.items()}
            self.limits = self.hardware.limits()
            self.has_released = any("released" in service.source.hooks for service in services)
        return self.hardware

    def has(self, key: DeviceKey) -> bool:
        """Return whether the resource's source lists the device now."""
        snapshot = self.served[key[0]].inventory.snapshot
        return key[1] in snapshot.devices and key[1] not in snapshot.gone

    def groups(self, resource: str, devices: Iterable[str]) -> dict[str, tuple[DeviceKey, ...]]:
        """Return, for each device, the sorted devices of its driver that must be on the same side as the device."""
        services, hardware = self.served, self.now()
        groups: dict[str, tuple[DeviceKey, ...]] = {}
        for device in devices:
            groups[device] = (key,) = ((resource, device),)
            if key in hardware.related:
                driver = services[resource].source.driver
                mine = {name for name in services if driver and services[name].source.driver == driver} | {resource}
                groups[device] = hardware.group(key, (of for of in hardware.related if of[0] in mine and self.has(of)))
        return groups


class Register:
    """Records which pods and claims hold this node's devices, and decides whether another holder may get a device.

    host: the process that the register belongs to. store: the store that keeps the records.
    """

    def __init__(self, host: RegisterHost | None = None, store: Store | None = None) -> None:
        self._host = host = host or RegisterHost()
        self.boot: Final = identity.boot_id()
        self.evidence_missing: Final = host.evidence_missing
        self.store: Store = store or MemoryStore()
        self.listed: Final = ListedHardware(host.services, self.boot)
        self.hooks: Final = HookRuns(self)
        self.releases: Final = Releases(self)
        self.waits: Final = Waits()
        self._subscribers: list[Callable[[], None]] = []
        self._noticed: object = None
        self._noticed_for: tuple[View | None, RegisterSnapshot | None] = (None, None)
        self._withheld: dict[tuple[str, SideName], WithheldDevices] = {}
        self._asked: OfferQuestion | None = None
        self._view: tuple[tuple[object, ...], View] = ((), View())
        self._possible: tuple[object, object, tuple[Use, ...]] = (None, None, ())
        self._granted_now: Counter[DeviceKey] = Counter()
        self._adopted: tuple[object, object, object] = (None, None, None)
        """The devices' tokens, allocations and claims for which `adopt` last set identities."""

    @property
    def snapshot(self) -> RegisterSnapshot:
        """All records of the register now."""
        return self.store.snapshot

    def view(self) -> View:
        """Return the facts that `refusal` needs besides the records; the same object until a fact changes."""
        listed, overdue = self.listed, self.hooks.overdue if self.hooks.running else NONE
        hardware = listed.now()
        foreign = *self._host.foreign_uses(), *self._possible_now(hardware)
        unreleased = self.releases.unreleased() if listed.has_released else NONE
        failed = {key: failure.reason for key, failure in self.releases.failed.items()} if unreleased else NONE
        now = hardware, unreleased, foreign, overdue, failed
        if self._view[0] != now:
            busy = *self._busy(HOOK, overdue, self.hooks.held), *self._busy(RELEASE, failed, NONE)
            all_uses = as_parts((*(in_scopes(use, listed.scopes) for use in foreign), *busy), hardware.larger)
            tokens = hardware.tokens_by_device, hardware.listed
            self._view = now, View(self.boot, listed.scopes, listed.limits, all_uses, unreleased, *tokens)
        return self._view[1]

    def _busy(self, kind: str, devices: Mapping[DeviceKey, str], held: Mapping[DeviceKey, Tokens]) -> list[Use]:
        """Return, for each of these devices and each device that shares counters with one, a use of the whole device.

        kind: the first element of the uses' keys. devices: for each device, the reason. held: the tokens before a hook.
        """
        hardware = self.listed.now()
        parts = {
            peer: f"{titled(device)}: {why}"
            for device, why in devices.items()
            for peer in hardware.peers(device) - hardware.aliases(device)
        }
        busy = {**parts, **devices}
        return [Use((kind, *of), why, of, held.get(of, hardware.tokens(of)), None) for of, why in busy.items()]

    def _possible_now(self, hardware: HardwareIndex) -> tuple[Use, ...]:
        """Return a use for each device that a pod may have got from another plugin."""
        services, records = self.listed.served, self.store.snapshot.allocations
        if self._possible[0] is not hardware or self._possible[1] is not records:
            named = {
                allocation.resource for allocation in records.values() if is_given_by_others(allocation)
            } & services.keys()
            devices = {
                name: {device: hardware.tokens((name, device)) for device in services[name].inventory.snapshot.devices}
                for name in named
            }
            possible = possible_uses(records.values(), self.boot, devices, hardware.listed) if devices else ()
            self._possible = hardware, records, possible
        return self._possible[2]

    def hardware(self) -> HardwareIndex:
        """Return the identity tokens of all devices that the sources list (see `ListedHardware.now`)."""
        return self.listed.now()

    def sources(self) -> Iterator[tuple[DeviceSource, InventorySnapshot]]:
        """Yield the source of each resource, with the devices that the source lists now."""
        for service in self.listed.served.values():
            yield service.source, service.inventory.snapshot

    # The next methods return a device's identity, and the amount of a device that a holder gets.

    def times(self, resource: str, device: Device) -> int | None:
        """Return how many containers may share a device; None if this process has no such resource."""
        service = self.listed.served.get(resource)
        return None if service is None else len(service.ids_now(device))

    def wanted(self, resource: str, device: str) -> Wanted:
        """Return the identity and the amount that a container with one id of the device would get now."""
        key, served = (resource, device), self.listed.served.get(resource)
        its = self.listed.now().identities.get(key, UNIDENTIFIED)
        listed = served.inventory.snapshot.devices.get(device) if served is not None else None
        if served is None or listed is None:
            return Wanted(key, its, WHOLE)
        times = len(served.ids_now(listed))
        if times == 1 and not listed.consumes:
            return Wanted(key, its, WHOLE)
        scope = self.listed.scopes.get(resource, "") if listed.consumes else ""
        return Wanted(key, its, Amount("1" if times == 1 else f"1/{times}", takes_of(listed), scope))

    # Offers.

    def side(self, key: DeviceKey) -> SideName:
        """Return whether a device is for pods' `limits` (plugin), for claims (dra), or for neither (none)."""
        return self.snapshot.state(*key).side

    def offers(self, resource: str, device: str) -> bool:
        """Return whether ListAndWatch may report a device as Healthy, provided that no holder excludes the device."""
        return self.snapshot.state(resource, device).healthy and not self.evidence_missing(resource, device)

    def withheld(self, resource: str, side: SideName) -> WithheldDevices:
        """Return the devices that ListAndWatch (side plugin) or the slices (side dra) must not offer now."""
        return withheld_devices(self.offer_question(), resource, side)

    def offer_question(self) -> OfferQuestion:
        """Return the input of `withheld_devices`; the same object until a record, a device or a fact changes."""
        asked, state, view = self._asked, self.snapshot, self.view()
        if asked is None or asked.state is not state or asked.facts is not view:
            self._asked = asked = OfferQuestion(state, view, self.listed.hardware, self.listed.resources, self.wanted)
        return asked

    def offered(self, resource: str, side: SideName, withheld: WithheldDevices) -> None:
        """Record the withheld devices of the newest device list (side plugin) or slices (side dra). Log new reasons."""
        before = self.last_withheld(resource, side).devices
        for name, why in withheld.devices.items():
            if before.get(name) != why:
                extra = {"resource": resource, "device": name}
                _LOG.info("device %s is not offered on the %s side: %s", name, side, why, extra=extra)
        self._withheld[resource, side] = withheld

    def last_withheld(self, resource: str, side: SideName = "plugin") -> WithheldDevices:
        """Return the withheld devices of the newest device list (side plugin) or slices (side dra); thread-safe."""
        return self._withheld.get((resource, side), WithheldDevices())

    def same_as(self, resource: str, device_id: str) -> frozenset[DeviceKey]:
        """Return the listed devices whose hardware is the hardware that was last granted under this kubelet id."""
        allocation, hardware = self.snapshot.allocations.get((resource, device_id)), self.listed.now()
        tokens = allocation.identity.in_boot(self.boot) if allocation is not None else frozenset()
        return frozenset(key for key in hardware.having_any(tokens) if identity.agree(tokens, hardware.tokens(key)))

    def held_twice(self) -> frozenset[DeviceKey]:
        """Return the devices whose holders together have more than the whole device."""
        state, view, hardware, twice = self.snapshot, self.view(), self.listed.now(), set[DeviceKey]()
        foreign = {point for use in view.others for point in use.points}
        for resource, listed in self.listed.resources.items():
            for name, device in listed.snapshot.devices.items():
                points: set[Point] = {(resource, name), *hardware.tokens((resource, name))}
                holders = {entry for point in points for entry in state.index.get(point, ())}
                several = len(holders) > 1 or not foreign.isdisjoint(points)  # A device usually has one holder at most.
                if several and held_twice(self.wanted(resource, name), len(listed.ids(device)), state, view):
                    twice.add((resource, name))
        return frozenset(twice)

    # Grants.

    async def grant(
        self, resource: str, ids: Mapping[str, str], asked: Mapping[str, Wanted] = NONE, *, checkpoint: bool = True
    ) -> float:
        """Record a grant of kubelet ids to a container; return the grant's Unix time. ids: for each id, its device.

        asked: for each id, the device's identity and amount at the request; by default the present identity and amount.
        checkpoint: whether to read the kubelet's checkpoint; False if the caller has just read the checkpoint.

        Raises DeviceConflictError if an id stands for another device now, if other holders or the device's side (plugin
        or DRA) exclude the grant, or if the device's holder is unknown. Raises LookTimeoutError if a read of the
        device's paths hangs, or the store's error if the grant could not be recorded.
        """
        keys = [*zip(itertools.repeat(resource), dict.fromkeys(ids.values()))]
        await self.verify(keys, resets=False)
        with self._granting(keys):
            await self._host.reread(checkpoint=checkpoint)
            wanted, identities = dict[str, Wanted](), self.listed.now().identities
            for name, device in ids.items():
                if why := self.evidence_missing(resource, device):
                    raise UnknownHolderError(f"the holder of device {device} is not known yet: {why}")
                wanted[name] = asked.get(name) or self.wanted(resource, device)
                if wanted[name].identity.tokens != identities.get((resource, device), UNIDENTIFIED).tokens:
                    raise DeviceConflictError(f"device {device} stands for other hardware than when it was requested")
            now = time.time()
            answer = await self.store.do(operations.grant(resource, wanted, self.view(), now))
        if isinstance(answer, Refused):
            raise OtherSideError(answer.message)
        if isinstance(answer, Excluded):
            raise DeviceConflictError(answer.message)
        return now

    @contextmanager
    def _granting(self, keys: Collection[DeviceKey]) -> Iterator[None]:
        """Keep the devices' hook `released` from starting while the devices are being granted.

        Afterwards, call the subscribers, unless the grant can only have changed the offers of the granted devices.
        """
        self._granted_now.update(keys)
        listed = self.listed.now()
        try:
            yield
        finally:
            self._granted_now.subtract(keys)
            now = self.listed.now()
            if self.listed.has_released:
                self.releases.unreleased()  # `unreleased` records new holders, which may end before its next call.
            if now is not listed or self._view[1] is not self._noticed_for[0] or not now.touched.isdisjoint(keys):
                self.notify()

    def is_held(self, key: DeviceKey) -> bool:
        """Return whether a pod or a claim holds any part of the device with this resource and id."""
        return key in self.snapshot.index

    async def decide(self, keys: Collection[DeviceKey], operation: Callable[[View], Operation[_T]]) -> _T:
        """Verify devices, then execute the operation that grants the devices to a claim, and return its result.

        Raises the errors of `verify` and of the store.
        """
        await self.verify(keys)
        with self._granting(keys):
            if keys:  # An already prepared claim has no keys, and needs no evidence.
                await self._host.reread()
            return await self.store.do(operation(self.view()))

    def is_free(self, key: DeviceKey, units: Collection[tuple[str, ...]] = ()) -> bool:
        """Return whether a device, and all devices that touch it, have no holder and no grant in progress.

        units: the keys (`Use.unit`) of holders that do not count.
        """
        if any(self._granted_now[name] > 0 for name in (key, *self.listed.now().touching(key))):
            return False
        view, wanted = self.view(), self.wanted(*key)
        whole = wanted_use((RELEASE, *key), wanted, view)._replace(part=Fraction(1))
        return not refusal([whole], self.snapshot, view, own=lambda use: use.unit in units or use.unit[0] == RELEASE)

    def tokens(self, key: DeviceKey) -> Tokens:
        """Return the tokens that a device had when its source last listed the device."""
        return self.listed.now().tokens(key)

    def with_peers(self, keys: Iterable[DeviceKey]) -> set[DeviceKey]:
        """Return these devices, the devices that share hardware with any of them, their parts, and their wholes."""
        return {peer for key in keys for peer in (key, *self.listed.now().touching(key))}

    async def verify(self, keys: Collection[DeviceKey], *, resets: bool = True) -> None:
        """Prepare a grant of devices: compare them with their present hardware; wait until their running hooks end.

        Hooks take time. So a grant reads the evidence of other holders afterwards, and compares the tokens again.
        Raises DeviceConflictError, or LookTimeoutError if a read of the device's paths hangs. resets: whether to wait
        for the hook `reset` as well; False for a caller that itself calls `reset`.
        """
        self.listed.now()  # `now` also finds out whether any source has the hook `released`.
        if keys and self.listed.has_released:
            await self.release(keys)
        if self._adopted[0] is not self.listed.now():
            await self.adopt()
            self.notify()
        names: dict[str, list[str]] = {}
        for resource, device in keys:
            names.setdefault(resource, []).append(device)
        for resource, of in names.items():
            if (served := self.listed.served.get(resource)) is not None:  # A reload may have removed the resource.
                await self._verify(served.inventory, of)
        if self.hooks.running:
            try:
                await self.hooks.wait(keys, resets=resets)
            except DeviceBusyError as error:
                raise HookWorksError(str(error)) from error

    async def release(self, keys: Iterable[DeviceKey], units: Collection[tuple[str, ...]] = ()) -> None:
        """Before a grant, read the evidence again, and start `released` for devices without a holder (`begin`)."""
        await self._host.reread()  # The hook `released` must not be called for a device with a holder.
        self.releases.begin(keys, units)

    async def _verify(self, inventory: Inventory, names: Sequence[str]) -> None:
        snapshot = inventory.snapshot
        devices: dict[str, Device] = {}
        for name in names:
            if name in snapshot.devices:
                devices[name] = snapshot.devices[name]
        now = await identity.read(inventory.looks, "grant", devices)
        other, changed = list[str](), False
        for name, tokens in now.items():
            listed = snapshot.identities.get(name, NO_TOKENS)
            if (tokens or listed) and not identity.agree(tokens, listed):
                other.append(name)
            elif not tokens <= listed and identity.is_port(tokens):
                changed = True  # The USB port has other hardware now, which may have a holder.
        if (other or changed) and inventory.snapshot is snapshot:
            there = [device for device in snapshot.devices.values() if device.id not in snapshot.gone]
            await identity.publish(inventory, there, snapshot.replicas)
        for name in other:
            if listed := snapshot.identities.get(name, NO_TOKENS):
                was = f"device {name} of {snapshot.resource} is not what it was listed as"
                raise DeviceConflictError(f"{was}: {shown(listed)}, now {shown(now[name])}")

    async def verify_granted(self, keys: Iterable[DeviceKey]) -> None:
        """Check that devices are still the hardware that their holders were granted.

        Raises DeviceConflictError for another identity, LookTimeoutError if a read of the device's paths hangs.
        """
        services, state, view = self.listed.served, self.snapshot, self.view()
        granted: dict[DeviceKey, Tokens] = {}
        devices: dict[str, dict[str, Device]] = {}
        for resource, name in keys:
            held = [use for use in uses(state, [(resource, name)], view) if use.key == (resource, name)]
            granted[resource, name] = frozenset().union(*(use.tokens for use in held))
            listed = services[resource].inventory.snapshot.devices if resource in services else {}
            if granted[resource, name] and name in listed:
                devices.setdefault(resource, {})[name] = listed[name]
        for resource, of in devices.items():
            for name, tokens in (await identity.read(services[resource].inventory.looks, "granted", of)).items():
                if why := other_hardware((resource, name), granted[resource, name], tokens):
                    raise DeviceConflictError(why)

    async def start(self, resource: str, ids: Mapping[str, str], begun: Collection[Allocation] = ()) -> None:
        """Check the devices of a starting container, and record which device nodes the container gets.

        ids: for each id, its device. begun: those allocations in a checkpoint that belong to pending grants of these
        ids.

        At each start the runtime resolves symlinks anew, and reads the device numbers of all nodes. A USB device can
        have another device number by then. A device that has another id now is checked under that id.

        Raises DeviceConflictError if a device is not the granted device, or if another holder has the device;
        LookTimeoutError if a read of the device's paths hangs; the store's errors.
        """
        services, hardware, records = self.listed.served, self.listed.now(), self.snapshot.allocations
        fixed: list[DeviceKey] = []
        moving: dict[str, dict[str, Device]] = {}
        whole, plain = set[str](), set[str]()
        for name, device_id in ids.items():
            key, record = (resource, device_id), records.get((resource, name))
            if device_id not in services[resource].inventory.snapshot.devices:
                if not (renamed := sorted(self.same_as(resource, name))):
                    await opened.check_away(services[resource].inventory, record, self.boot)
                    continue
                key = renamed[0]
            device = services[key[0]].inventory.snapshot.devices[key[1]]
            paths = opened.granted_paths(record, self._host.granted_paths, begun) if record is not None else None
            nodes = opened.started(device, usb=identity.is_usb(hardware.tokens(key)), paths=paths)
            if not nodes:
                fixed.append(key)
                continue
            moving.setdefault(key[0], {})[name] = replace(device, nodes=nodes)
            if len(nodes) == len(device.nodes):
                whole.add(name)
            if not device.links:
                plain.add(name)
        await self.verify_granted(fixed)
        present: dict[str, Tokens] = {}
        for of, devices in moving.items():
            present |= await identity.read(services[of].inventory.looks, "start", devices)
        if present:
            at_start = identification.StartNodes(present, frozenset(whole), frozenset(plain))
            if why := await self.store.do(identification.start(resource, at_start, self.view(), begun)):
                raise DeviceConflictError(why)

    # Evidence.

    async def adopt(self) -> None:
        """Record the present identity of the device for each holder's record that has no identity of this boot."""
        state, hardware = self.snapshot, self.listed.now()
        now = hardware, state.allocations, state.claims
        if all(map(operator.is_, now, self._adopted)):
            return
        keys = {(allocation.resource, allocation.device) for allocation in state.allocations.values()}
        keys.update(key for claim in state.claims.values() for key in claim.held)
        identities = {key: one for key in keys if (one := hardware.identities.get(key, UNIDENTIFIED)) != UNIDENTIFIED}
        if identities:
            inventories = {name: served.inventory for name, served in self.listed.served.items()}
            at_paths = await opened.tokens_at_paths(state, identities, inventories, self._host.granted_paths)
            await self.store.do(identification.adopt(identities, self.boot, at_paths))
        self._adopted = now

    async def observe(self, seen: Mapping[str, KubeletSnapshot]) -> Mapping[str, operations.Observed]:
        """Compare allocations with evidence. seen: the evidence for each resource. Raises the store's errors."""
        return await self.store.do(operations.observe_all(seen, time.time()))

    async def add_holders(self, holders: Iterable[tuple[str, str, str, str]]) -> None:
        """Record further holders, each as (pod UID, container, resource, kubelet id). Raises the store's errors."""
        if named := tuple(holders):
            await self.store.do(operations.add_holders(named, time.time()))

    # Changes.

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a new or ended holder may change which devices are offered."""
        self._subscribers.append(callback)

    def notify(self) -> None:
        """Call the subscribers if offers may have changed. After most grants, this method calls no subscriber."""
        self.store.changes.note()
        hardware, state, view = self.listed.now(), self.snapshot, self.view()
        self._noticed_for = view, state
        foreign: dict[Point, object] = {}
        for point, entries in state.index.items():
            if isinstance(point, str):
                listed = hardware.having_any((point,))
                if len(listed) > 1 or any(not listed.issuperset(self._keys(state, entry)) for entry in entries):
                    foreign[point] = entries
            elif point in hardware.related or self._of_another_driver(point, entries):
                foreign[point] = entries
        sides = {key: state.state(*key).side for key in hardware.related}
        noticed: object = hardware.related, foreign, sides, view.others
        if noticed != self._noticed:
            self._noticed = noticed
            for callback in self._subscribers:
                callback()

    def notify_changes(self) -> None:
        """Call `notify` if records, devices, or facts of `view` have changed since its last call."""
        if not all(map(operator.is_, (self.view(), self.snapshot), self._noticed_for)):
            self.notify()

    def _of_another_driver(self, point: DeviceKey, entries: Iterable[tuple[str, DeviceKey]]) -> bool:
        """Return whether a claim of another driver holds the device, so that the present driver must not offer it."""
        served = self.listed.served.get(point[0])
        return served is not None and any(
            table == "claims" and key[0] != served.source.driver for table, key in entries
        )

    @staticmethod
    def _keys(state: RegisterSnapshot, entry: tuple[str, DeviceKey]) -> Collection[DeviceKey]:
        table, key = entry
        if table == "claims":
            return state.claims[key].held
        allocation = state.allocations[key]
        return ((allocation.resource, allocation.device),)
