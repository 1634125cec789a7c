"""Which gate decides what pods get of a resource: its driver's ledger, or one for all that have no driver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import grpc

from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.allocation_gate import AllocationGate, Refusal, Side


class _DenyAll(AllocationGate):
    def offers(self, resource: str, device: str) -> bool:
        return False

    def claimed(self, resource: str, device: str) -> bool:
        return True  # nothing is known, and unknown counts as held

    def side(self, resource: str, device: str) -> Side:
        return ""

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", f"{resource}: its ledger is not open now")


DENY_ALL: Final = _DenyAll()
"""The allocation gate of a resource whose ledger is not open yet, or not for it any more."""


class ResourceGates:
    """The allocation gate for the whole node: each resource's own gate decides.

    free: decides about resources that have no driver. ledgers: returns the gates of all drivers, also of those that
    no resource names any more.
    """

    def __init__(self, free: AllocationGate, ledgers: Callable[[], Iterable[AllocationGate]]) -> None:
        self.by_resource: dict[str, AllocationGate] = {}
        self._free = free
        self._ledgers = ledgers

    def _of(self, resource: str) -> AllocationGate:
        return self.by_resource.get(resource, self._free)

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side offers the device."""
        return self._of(resource).offers(resource, device)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self._of(resource).avoids(resource)

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device, or may."""
        return self._of(resource).claimed(resource, device)

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices that are offered to nobody for now, and why."""
        return self._of(resource).withheld(resource)

    def held(self) -> Mapping[Key, Tokens]:
        """Return what any ledger counts as held, and what it was when it was granted."""
        found: dict[Key, Tokens] = {}
        for ledger_gate in self._ledgers():
            for key, tokens in ledger_gate.held().items():
                found[key] = found.get(key, frozenset()) | tokens
        return found

    def side(self, resource: str, device: str) -> Side:
        """Return on which side the device is."""
        return self._of(resource).side(resource, device)

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that the ids are given out, or raise Refusal."""
        await self._of(resource).grant(resource, names, devices)
