"""Calls the hook `released` for devices without a holder, and knows the devices for which the hook must still succeed.

A device counts as released when the hook `released` has succeeded for the device since its last holder. After the
agent's start, or when a source first lists a device, the device does not count as released, because it may have been
used before.

An unreleased device stays offered: the hook is called before the grant at the latest. If the hook fails, no pod or
claim gets the device, and the hook is called again after a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from deviceplugin.backoff import Backoff
from deviceplugin.device import Device, in_order
from deviceplugin.exclusion import DeviceKey, HardwareIndex, titled
from deviceplugin.hook_runs import HookRuns
from deviceplugin.hooks import HookStatistics
from deviceplugin.identity import Tokens, same_hardware
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.register.records import NONE, Point, RegisterSnapshot
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
FIRST: Final = 2.0
"""Maximum seconds between a device's first failed call of the hook `released` and the next call."""
MOST: Final = 60.0
"""Maximum seconds between any failed call of the hook `released` for a device and the next call."""


@dataclass(slots=True)
class FailedRelease:
    """A device whose last call of `released` failed.

    error: the error of that call. due: the earliest time for the next call (monotonic seconds).
    """

    error: str = ""
    due: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST, MOST))

    @property
    def reason(self) -> str:
        """The reason why no pod or claim gets the device now, for messages."""
        return f"withheld until `released` succeeds: {self.error}"


class _Moment(NamedTuple):
    """A device's tokens and holders at a call of `released`. A holder that is not among these holders came later."""

    tokens: Tokens
    holders: frozenset[object]


class ReleaseHost(Protocol):
    """The operations of the register that this module needs (`deviceplugin.register.register.Register` has them)."""

    @property
    def hooks(self) -> HookRuns:
        """The running hooks."""

    @property
    def snapshot(self) -> RegisterSnapshot:
        """The register's present records."""

    def hardware(self) -> HardwareIndex:
        """Return the identity tokens of all devices that the sources list."""

    def sources(self) -> Iterable[tuple[DeviceSource, InventorySnapshot]]:
        """Return the source of each resource, with the devices that the source lists now."""

    def evidence_missing(self, resource: str, device: str) -> str:
        """Return why the holder of a device is not known yet; "" if it is known."""

    def is_free(self, key: DeviceKey, units: Collection[tuple[str, ...]] = ()) -> bool:
        """Return whether a device has no holder. units: the keys of holders that do not count."""

    def notify(self) -> None:
        """Announce that a call of `released` has ended, so that other devices may be offered."""


class Releases:
    """The state of the hook `released` for each device whose source has this hook.

    An instance belongs to one event loop. statistics: for each resource, the counts of the hook's calls. failed: the
    devices whose last call of the hook has failed.
    """

    def __init__(self, register: ReleaseHost) -> None:
        self.statistics: defaultdict[str, HookStatistics] = defaultdict(HookStatistics)
        self.failed: dict[DeviceKey, FailedRelease] = {}
        self._register = register
        self._released: dict[DeviceKey, _Moment] = {}
        """For each released device, its tokens and holders when its hook `released` was last called."""
        self._used: set[DeviceKey] = set()
        """The devices that had a holder since the agent's start, and have not been released since that holder."""
        self._running: set[DeviceKey] = set()
        """The devices for which the hook `released` is running."""
        self._tasks: set[asyncio.Task[str]] = set()
        self._noted: tuple[object, object] = (None, None)
        self._unreleased: Mapping[DeviceKey, str] = NONE
        self._listed: Mapping[DeviceKey, Device] = NONE
        """The listed devices whose sources have the hook `released`."""

    def unreleased(self) -> Mapping[DeviceKey, str]:
        """Return, for each device that must be released before its next grant, the reason.

        The result includes devices that still have a holder, and the same hardware under other device ids. The returned
        object stays the same until its content changes.
        """
        hardware, index = self._register.hardware(), self._register.snapshot.index
        if self._noted[0] is not hardware:
            self._note_list()
        if self._noted[0] is not hardware or self._noted[1] is not index:
            self._note_holders(hardware)
            self._noted = hardware, index
            self._changed(hardware)
        return self._unreleased

    def _note_list(self) -> None:
        listed: dict[DeviceKey, Device] = {}
        for source, now in self._register.sources():
            if "released" in source.hooks:
                listed |= {(source.resource, device.id): device for device in now.devices.values()}
        self._listed = listed
        self._used &= listed.keys()
        for known in (self._released, self.failed):
            for key in known.keys() - listed.keys():
                del known[key]

    def _note_holders(self, hardware: HardwareIndex) -> None:
        state, held = self._register.snapshot, self._register.snapshot.index.keys()
        for key in self._listed:
            tokens, released = hardware.tokens(key), self._released.get(key)
            if key in held or not held.isdisjoint(tokens):
                holders = _moment(state, key, tokens).holders
                if holders - (released.holders if released is not None else frozenset()):
                    self._used.add(key)
                    self._released.pop(key, None)
                    continue
            if released is not None and released.tokens != tokens and not same_hardware(released.tokens, tokens):
                del self._released[key]

    def _changed(self, hardware: HardwareIndex) -> None:
        now: dict[DeviceKey, str] = {}
        for key in self._listed:
            if key not in self._released:
                why = f"`released` of {titled(key)} has not succeeded since its last holder"
                now.update(dict.fromkeys((key, *hardware.aliases(key)), why))
        if now != self._unreleased:
            self._unreleased = now

    def pending(self) -> set[DeviceKey]:
        """Return the devices without a holder for which the hook `released` must still succeed."""
        return set(self.unreleased().keys() - self._register.snapshot.index.keys())

    def look(self, resource: str, *, all_known: bool) -> None:
        """Start calls of the hook `released` for a resource's unreleased devices that have no holder.

        all_known: whether the agent knows the pods of all running processes. If False, the hook is not called for a
        device that has had no holder since the agent's start, because an unknown pod may still have the device.
        """
        if not (unreleased := self.unreleased()):
            return
        fresh: list[Device] = []
        for key, device in self._listed.items():
            if key[0] != resource or key not in unreleased or not (all_known or key in self._used):
                continue
            if key not in self.failed:
                fresh.append(device)
            else:
                # The device gets a call of its own, because another device may have caused the failure.
                self._start(resource, [device])
        self._start(resource, fresh)

    def begin(self, keys: Iterable[DeviceKey], units: Collection[tuple[str, ...]] = ()) -> None:
        """Before a grant, start `released` for those of the devices `keys` that are unreleased and have no holder.

        This method does not wait for the hook; the method's caller does. After a failure the hook is not called before
        `FailedRelease.due`. units: the keys of holders that have ended, and so do not count.
        """
        if not (unreleased := self.unreleased()):
            return
        hardware = self._register.hardware()
        named = {name for key in keys if key in unreleased for name in (key, *hardware.aliases(key))}
        devices: dict[str, list[Device]] = {}
        for key in sorted(named & self._listed.keys() & unreleased.keys()):
            devices.setdefault(key[0], []).append(self._listed[key])
        for resource, of in devices.items():
            self._start(resource, of, units)

    def _start(self, resource: str, devices: Sequence[Device], units: Collection[tuple[str, ...]] = ()) -> None:
        register, keys = self._register, dict[DeviceKey, _Moment]()
        free, now = list[Device](), time.monotonic()
        for device in in_order(devices):
            key = resource, device.id
            failure, busy = self.failed.get(key), key in self._released or key in self._running
            if busy or (failure is not None and failure.due > now) or register.evidence_missing(*key):
                continue
            if register.is_free(key, units):
                free.append(device)
                keys[key] = _moment(register.snapshot, key, register.hardware().tokens(key))
        if free:
            self._running |= keys.keys()
            source = next(source for source, _ in register.sources() if source.resource == resource)
            task = register.hooks.start(
                self.statistics[resource], "released", source, free, lambda error: self._ended(keys, error)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ended(self, keys: Mapping[DeviceKey, _Moment], error: str) -> None:
        self._running -= keys.keys()
        for key, began in keys.items():
            extra = dict(zip(("resource", "device"), key, strict=True))
            failure = self.failed.get(key)
            if error:
                failure = failure or FailedRelease()
                level = logging.WARNING if failure.error != error else logging.DEBUG
                _LOG.log(level, "device %s is withheld until `released` succeeds: %s", key[1], error, extra=extra)
                failure.error, failure.due = error, time.monotonic() + failure.backoff.next()
                self.failed[key] = failure
                continue
            self._released[key] = began
            self._used.discard(key)
            if self.failed.pop(key, None) is not None:
                _LOG.info("device %s is no longer withheld: `released` has succeeded", key[1], extra=extra)
        self._noted = None, None
        self._register.notify()


def _moment(state: RegisterSnapshot, key: DeviceKey, tokens: Tokens) -> _Moment:
    points: tuple[Point, ...] = (key, *tokens)
    holders = set[object]()
    for table, name in {entry for point in points for entry in state.index.get(point, ())}:
        if table == "claims":
            holders.add((table, name, state.claims[name].sequence))
        else:
            record = state.allocations[name]
            holders |= {(table, name, record.sequence), *((table, name, holder) for holder in record.holders)}
    return _Moment(tokens, frozenset(holders))
