"""The ledger as the allocation gate of the plugin side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import grpc

from deviceplugin import identity
from deviceplugin.exclusion import Key
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.allocation_gate import Refusal, Side
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError
from deviceplugin.register.rules import Refused
from dra_bridge.handover.evidence import DeviceIdResolver, kubelet_snapshot
from dra_bridge.ledger.worker import AsyncLedger

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LedgerGate:
    """Asks the ledger what the plugin side may offer (R3), and records a grant before Allocate is answered (R1).

    After each scan for holders the ledger releases what nobody holds (R7), and quarantines what contradicts it.

    device_id_of: returns the device of an id of the kubelet's, by resource. changed: called after an allocation was
    released or found, or a device was quarantined. quarantined: called with (resource, device) after that. title: a
    pod's name by its UID, for people. allocated: returns (resource, the kubelet's id) of all that the last scan found
    held by pods. draining: returns the devices of a resource that new pods had better not get (drain: wait).
    reconciled: (resource, device) of those whose evidence this process has reconciled with the ledger (R8). No other
    one is offered or granted: the ledger may have lost the last changes. reasons: by resource and device, why it is
    not known yet who holds it.
    """

    ledger: AsyncLedger
    device_id_of: Mapping[str, DeviceIdResolver]
    changed: Callable[[], None] = lambda: None
    quarantined: Callable[[str, str], None] = lambda resource, device: None
    title: Callable[[str], str] = str
    guard: ExclusionGuard = field(default_factory=ExclusionGuard)
    allocated: Callable[[], Collection[Key]] = tuple
    draining: Callable[[str], Collection[str]] = lambda resource: ()
    reconciled: set[Key] = field(default_factory=set)
    reasons: dict[str, Mapping[str, str]] = field(default_factory=dict)

    # The allocation gate.

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side may show this device Healthy (R3)."""
        record = self.ledger.snapshot.devices.get((resource, device))
        return (resource, device) in self.reconciled and record is not None and record.state.healthy

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that these ids are given out (R1).

        Raises Refusal if a device is not on the plugin side, its evidence is not reconciled yet, or the ledger cannot
        be written.
        """
        if unreconciled := [device for device in devices if (resource, device) not in self.reconciled]:
            details = f"{resource}: who holds {', '.join(unreconciled)} is not known yet; the agent has just started"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", details)
        ids = {name: self.device_id_of[resource](name) for name in names}
        try:
            await self.ledger.identify({(resource, one): self.guard.identity(resource, one) for one in devices})
            answer = await self.ledger.do(operations.grant(resource, ids, time.time()))
        except LedgerError as error:
            details = f"{resource}: the ledger cannot be written: {error}"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "ledger", details) from error
        if isinstance(answer, Refused):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "side", answer.message)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self.draining(resource)

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device, or may because its evidence is not reconciled yet."""
        known = (resource, device) in self.reconciled
        return not known or bool(self.ledger.snapshot.claims_on(resource, (device,)))

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices of which it is not known yet who holds them, and why."""
        return dict(self.reasons.get(resource, {}))

    def held(self) -> Mapping[Key, Tokens]:
        """Return the devices that pods and claims hold by the ledger, and their identity when they were granted."""
        now, allocated = self.ledger.snapshot, self.allocated()
        # No scan releases the allocations of a resource that is not served any more: the tracker knows when they end.
        keys = {
            (one.resource, one.device)
            for one in now.allocations.values()
            if one.resource in self.device_id_of or (one.resource, one.device_id) in allocated
        }
        keys.update(*(claim.held for claim in now.claims.values()))
        return {key: identity.tokens_of(now.device(*key).identity, self.guard.boot) for key in keys}

    def side(self, resource: str, device: str) -> Side:
        """Return on which side the ledger has the device."""
        state = self.ledger.snapshot.device(resource, device).state
        return "plugin" if state.allocates else "dra" if state.prepares else ""

    # Scans for holders.

    def awaited(self) -> Collection[Key]:
        """Return the ids that were granted and whose container no checkpoint has named yet."""
        return {key for key, one in self.ledger.snapshot.allocations.items() if one.pending}

    def before_scan(self) -> object:
        """Return the ledger's sequence."""
        return self.ledger.snapshot.sequence

    async def after_scan(self, before: object, scan: HolderSnapshot) -> None:
        """Release allocations that are over, and record holders that the ledger does not know."""
        changed = False
        for resource, device_id_of in tuple(self.device_id_of.items()):  # a reload may drop one meanwhile
            seen = kubelet_snapshot(cast("int", before), scan, resource, device_id_of, self.title)
            try:
                done = await self.ledger.do(operations.observe(resource, seen, time.time()))
            except LedgerError as error:
                _LOG.warning("%s: the ledger cannot be written: %s", resource, error)
                continue
            for name in done.found:
                _LOG.info("%s: pod %s holds %s, which the ledger did not know", resource, seen.held[name].pod, name)
            for device in done.quarantined:
                self.quarantined(resource, device)
            changed = changed or bool(done.released or done.found or done.quarantined)
        if changed:
            self.changed()
