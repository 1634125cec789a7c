"""Decides whether a device may be offered or granted beside what others hold, for pods and claims alike.

There is one guard for a process. A device is reserved during its grant, so that of two conflicting grants at the same
time, through whichever side, one is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from deviceplugin import identity
from deviceplugin.device import Device
from deviceplugin.exclusion import Key, Thing, Things, natural_key, thing_of, titled
from deviceplugin.hook_runs import DeviceBusyError, HookRuns
from deviceplugin.identity import Tokens, shown
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.allocation_gate import AllocationGate, AllowAll, Side
from deviceplugin.kubelet.granted import Granted
from deviceplugin.sharing import device_of, times_offered
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
_K = TypeVar("_K")

_WORDS: Final[Mapping[Side, str]] = {"plugin": "for pods", "dra": "for claims", "": "quarantined"}


class ConflictError(Exception):
    """Raised when a device cannot be given away beside what others hold, or is not what it was listed as."""


class ServedDevices(Protocol):
    """A resource's devices (`deviceplugin.node.service.Service`)."""

    source: DeviceSource
    inventory: Inventory

    @property
    def held_devices(self) -> frozenset[str]:
        """The devices that pods hold or were just given."""

    def device_of(self, device_id: str) -> str:
        """Return the device of one of the kubelet's ids."""


async def _tokens_now(devices: Mapping[_K, Device]) -> dict[_K, Tokens]:
    """Return what devices are now, by the same keys; in a thread if that may block."""

    def read() -> dict[_K, Tokens]:
        return {key: identity.tokens_now(device) for key, device in devices.items()}

    return read() if all(map(identity.is_quick, devices.values())) else await asyncio.to_thread(read)


class ListedThings:
    """What the devices of this process's resources are. served: returns these resources by name."""

    def __init__(self, served: Callable[[], Mapping[str, ServedDevices]]) -> None:
        self.served: Final = served
        self._things = Things({})
        self._version: object = None

    def now(self) -> Things:
        """Return all devices; the same object until they change."""
        services = self.served()
        version = tuple(
            (name, id(one.inventory), one.inventory.snapshot.version, id(one.source)) for name, one in services.items()
        )
        if self._version != version:
            found: dict[Key, Thing] = {}
            for name, one in services.items():
                now, source = one.inventory.snapshot, one.source
                for device in now.devices.values():
                    tokens = now.identities.get(device.id, frozenset())
                    if tokens or device.consumes or device.counters:
                        shared = times_offered(source, device) > 1
                        found[name, device.id] = thing_of(device, tokens, source.driver or name, shared=shared)
            self._version, self._things = version, Things(found)
        return self._things

    def has(self, key: Key) -> bool:
        """Whether its source lists a device now."""
        snapshot = self.served()[key[0]].inventory.snapshot
        return key[1] in snapshot.devices and key[1] not in snapshot.gone

    def group(self, resource: str, device: str) -> tuple[Key, ...]:
        """Return a device and those of its driver that move together with it, the first of them leading."""
        services, things = self.served(), self.now()
        if (resource, device) not in things.related:
            return ((resource, device),)
        driver = services[resource].source.driver
        mine = {name for name, one in services.items() if name == resource or (driver and one.source.driver == driver)}
        return things.group((resource, device), (key for key in things.related if key[0] in mine and self.has(key)))


class ExclusionGuard:
    """Keeps devices that are one thing, or parts of one thing, from holders that exclude each other.

    served: as in `ListedThings`. gate: knows the holders in ledgers, and on which side devices are. allocated: returns
    all that pods hold, also of resources that are served no more, by (resource, the kubelet's device id); the same
    object until it changes. reread: has `allocated` know what the kubelet's checkpoint names now. orphaned: returns
    what claims of drivers that are not served hold, under keys for messages; as `allocated`.
    """

    def __init__(
        self,
        served: Callable[[], Mapping[str, ServedDevices]] = dict,
        gate: AllocationGate | None = None,
        allocated: Callable[[], Mapping[Key, Granted]] = dict,
        *,
        reread: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
        orphaned: Callable[[], Mapping[Key, Tokens]] = dict,
    ) -> None:
        self.boot: Final = identity.boot_id()
        self.reread: Final = reread
        self.listed: Final = ListedThings(served)
        self.hooks: Final = HookRuns(self._with_peers, self.notify)
        self._gate: AllocationGate = gate or AllowAll()
        self._allocated = allocated
        self._orphaned = orphaned
        self._reserved: list[Sequence[Key]] = []
        self._granted: dict[Key, Tokens] = {}
        """What devices that are held now were when this process granted them, or first saw them."""
        self._subscribers: list[Callable[[], None]] = []
        self._noticed: object = None
        self._settled: tuple[Things, object, object] | None = None
        """With these things, `allocated` and `orphaned` everything held is the same thing as when it was granted."""
        self._withheld: dict[tuple[str, Side], Mapping[str, str]] = {}
        self.unsettled = False
        """Whether something held excludes devices under other ids, as of the last `notify`."""

    def held(self, *, claims: bool = True) -> dict[Key, Tokens]:
        """Return what is held, reserved grants included. claims: include devices that only claims hold."""
        things, gate, services = self.listed.now(), self._gate, self.listed.served()
        held: dict[Key, Tokens] = {
            (name, one): frozenset() for name, each in services.items() for one in each.held_devices
        }
        for key, tokens in self._outside():
            held[key] = held.get(key, frozenset()) | tokens
        for key, tokens in self._granted.items():
            # What was granted just before its resource was dropped is in no checkpoint that was read yet.
            if key in held or key[0] not in services:
                held[key] = held.get(key, frozenset()) | tokens
        reserved = (*self._reserved, self.hooks.overdue)
        held |= {key: frozenset() for keys in reserved for key in keys if key not in held}
        for key, tokens in gate.held().items():
            if claims or not gate.claimed(*key):
                held[key] = tokens or held.get(key, frozenset())
        if claims:
            held |= {key: frozenset() for key in things.related if key not in held and gate.claimed(*key)}
        return held

    def _outside(self) -> Iterator[tuple[Key, Tokens]]:
        """Yield what is held by the kubelet's files, and what it was when it was granted."""
        things, services = self.listed.now(), self.listed.served()
        for (name, device_id), (tokens, shared) in self._allocated().items():
            if name in services:
                devices = {services[name].device_of(device_id)}
            else:
                # Of a resource that is served no more it is not known whether its ids were those of replicas.
                devices = {device_id, device_of(device_id, 2)}
            for key in ((name, device) for device in devices):
                if shared:
                    # A holder that may not have its device alone excludes nobody from what is shared here.
                    yield key, frozenset() if things.tokens(key) else tokens - things.shared_tokens
                else:
                    yield key, tokens
        yield from self._orphaned().items()

    def withheld(self, resource: str, side: Side) -> Mapping[str, str]:
        """Return which of a resource's devices must not be offered on a side, and why.

        On the side of claims the scheduler itself fits parts beside others that claims hold.
        """
        things, held = self.listed.now(), self.held()
        if resource not in self.listed.served() or not (things.related or held):
            return {}
        snapshot = self.listed.served()[resource].inventory.snapshot
        keys = [(resource, name) for name in snapshot.devices]
        found = things.conflicts(keys, held, self.held(claims=False) if side == "dra" else None)
        for key in things.related & set(keys) - found.keys():
            if why := self._elsewhere(key) or self._named_before(key, held, side):
                found[key] = why
        for key, why in self.hooks.overdue.items():
            for peer in self._with_peers([key]).intersection(keys):
                found[peer] = why if peer == key else f"{titled(key)}, which is the same thing or a part of it: {why}"
        withheld = {device: why for (_, device), why in found.items()}
        before = self._withheld.get((resource, side), {})
        for device, why in withheld.items():
            if before.get(device) != why:
                extra = {"resource": resource, "device": device}
                _LOG.info("%s: device %s is not offered (%s): %s", resource, device, side, why, extra=extra)
        self._withheld[resource, side] = withheld
        return withheld

    def _elsewhere(self, key: Key) -> str:
        mine, services = self._gate.side(*key), self.listed.served()
        for peer in sorted(self.listed.now().peers(key)):
            if self.listed.has(peer) and (theirs := self._gate.side(*peer)) != mine:
                reason = f"{titled(peer)}, which is the same thing or a part of it, is {_WORDS[theirs]}"
                reason += f" and this one {_WORDS[mine]}"
                if services[key[0]].source.driver != services[peer[0]].source.driver:
                    reason += "; give both resources the share none, or both the share all"
                return reason
        return ""

    def _named_before(self, key: Key, held: Collection[Key], side: Side) -> str:
        """Return under which other id an idle device is offered already, so that it counts once; "" if none."""
        if key in held:
            return ""
        services = self.listed.served()
        mine = services[key[0]].source
        for other in sorted(self.listed.now().aliases(key), key=natural_key):
            theirs = services[other[0]].source
            together = other[0] == key[0] or (side == "dra" and mine.driver and mine.driver == theirs.driver)
            if together and mine.replicas == 1 and natural_key(other) < natural_key(key) and self.listed.has(other):
                return f"it is offered as {titled(other)}"
        return ""

    def last_withheld(self, resource: str) -> Mapping[str, str]:
        """Return what `withheld` answered last for the plugin side; from any thread."""
        return self._withheld.get((resource, "plugin"), {})

    def identity(self, resource: str, device: str) -> str:
        """Return what a device is, as a ledger records it; "" if that is not known."""
        return identity.recorded(self.listed.now().tokens((resource, device)), self.boot)

    def granted(self, resource: str, device: str) -> Granted:
        """Return what a device is now, for the answer to Allocate."""
        return Granted(self.listed.now().tokens((resource, device)), self.listed.now().shared((resource, device)))

    @contextmanager
    def reserve(self, keys: Iterable[Key]) -> Iterator[None]:
        """Have devices count as held while they are granted; the caller has them recorded as held before the end.

        On which side peers are does not matter here: they are offered on neither side while they are on different
        ones, but a claim that was allocated before its device began to move must still be prepared (R2).
        Raises ConflictError: one cannot be granted beside what others hold.
        """
        wanted = tuple(dict.fromkeys(keys))
        if related := not self._unrelated(wanted):
            things, held = self.listed.now(), self.held()
            if reason := things.conflict(wanted, held):
                raise ConflictError(reason)
            self._granted |= {key: things.tokens(key) for key in wanted if key not in held}
        self._reserved.append(wanted)
        try:
            yield
        finally:
            self._reserved.remove(wanted)
            if related:
                self.notify()

    def _unrelated(self, wanted: Sequence[Key]) -> bool:
        """Whether devices exclude nothing: they have no peers, and nothing held is another thing than when granted.

        So it is on nearly every node; then a grant need not compare all holders.
        """
        things, settled = self.listed.now(), self._settled
        tokens = {key: things.tokens(key) for key in wanted}
        if settled is None or settled[0] is not things or not things.related.isdisjoint(wanted):
            return False
        if any(self._granted.get(key, now) != now for key, now in tokens.items()):
            return False
        allocated, orphaned = self._allocated(), self._orphaned()
        if allocated is not settled[1] or orphaned is not settled[2]:
            if any(things.excluded(key, one) for key, one in self._outside()):
                return False
            self._settled = things, allocated, orphaned
        self._granted |= tokens
        return True

    def in_use(self, keys: Iterable[Key]) -> set[Key]:
        """Return those devices that are being granted, that hooks hold, or that another id's holder has."""
        wanted = tuple(keys)
        granting = {key for keys in self._reserved for key in keys} | self.hooks.overdue.keys()
        return granting.intersection(wanted) | self.listed.now().conflicts(wanted, self.held()).keys()

    def _with_peers(self, keys: Iterable[Key]) -> set[Key]:
        return {one for key in keys for one in (key, *self.listed.now().peers(key))}

    async def verify(self, keys: Iterable[Key], *, resets: bool = True) -> None:
        """Wait for hooks, as `HookRuns` does, and check that devices are what they were listed as.

        Raises ConflictError.
        """
        keys = tuple(keys)
        try:
            await self.hooks.wait(keys, resets=resets)
        except DeviceBusyError as error:
            raise ConflictError(str(error)) from error
        for resource, served in tuple(self.listed.served().items()):  # a reload may drop one meanwhile
            if names := [device for of, device in keys if of == resource]:
                await self._verify(served.inventory, names)

    async def _verify(self, inventory: Inventory, names: Sequence[str]) -> None:
        snapshot = inventory.snapshot
        devices = {name: snapshot.devices[name] for name in names if name in snapshot.devices}

        now = await _tokens_now(devices)
        listed = {name: snapshot.identities.get(name, frozenset()) for name in now}
        other = [name for name, tokens in now.items() if tokens.isdisjoint(listed[name])]
        if any(now[name] or listed[name] for name in other) and inventory.snapshot is snapshot:
            there = [device for device in snapshot.devices.values() if device.id not in snapshot.gone]
            await identity.publish(inventory, there)
        for name in other:
            if listed[name]:
                was = f"device {name} of {snapshot.resource} is not what it was listed as"
                raise ConflictError(f"{was}: {shown(listed[name])}, now {shown(now[name])}")

    async def verify_granted(self, keys: Iterable[Key]) -> None:
        """Check that devices still are what they were when they were granted. Raises ConflictError: one is not."""
        held, services = self.held(), self.listed.served()
        devices: dict[Key, Device] = {}
        for resource, name in keys:
            listed = services[resource].inventory.snapshot.devices if resource in services else {}
            if held.get((resource, name)) and name in listed:
                devices[resource, name] = listed[name]

        for key, tokens in (await _tokens_now(devices)).items():
            if tokens.isdisjoint(held[key]):
                was = f"{titled(key)} is not what its holder was given"
                raise ConflictError(f"{was}: {shown(held[key])}, now {shown(tokens)}")

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` when other devices may be offered than before because of their peers."""
        self._subscribers.append(callback)

    def notify(self, *, scanned: bool = False) -> None:
        """Tell the subscribers if other devices may be offered now. scanned: `allocated` is newer than all grants."""
        if scanned:
            served, allocated = self.listed.served().keys(), set(self._allocated())
            allocated |= {(name, device_of(one, 2)) for name, one in allocated}
            self._granted = {key: one for key, one in self._granted.items() if key[0] in served or key in allocated}
        things, held = self.listed.now(), self.held()
        self._granted = {key: self._granted.get(key) or tokens or things.tokens(key) for key, tokens in held.items()}
        was = {key: tokens | self._granted[key] for key, tokens in held.items()}
        self.unsettled = any(things.excluded(key, tokens) for key, tokens in was.items())
        self._settled = None if self.unsettled else (things, self._allocated(), self._orphaned())
        # Others exclude nobody, whoever holds them.
        excluding = [key for key, tokens in held.items() if key in things.related or things.excluded(key, tokens)]
        was = {key: held[key] | things.tokens(key) for key in excluding}
        sides = {key: self._gate.side(*key) for key in things.related}
        noticed: object = things.related, was, sides, self.hooks.overdue
        if noticed != self._noticed:
            self._noticed = noticed
            for callback in self._subscribers:
                callback()
