"""The ledger as the allocation gate of the plugin side.

As the servicer's allocation gate it says what the plugin side offers (R3) and records what it gives
out before the answer leaves (R1); as an observer of the kubelet's checkpoint it releases what is over
(R7) and notices what contradicts the ledger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, cast

import grpc

from deviceplugin import identity
from deviceplugin.identity import Tokens
from deviceplugin.kubelet.allocation_gate import Refusal, Side
from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard
from deviceplugin.kubelet.holders import HolderSnapshot
from dra_bridge import ledger
from dra_bridge.ledger import AsyncLedger, Held, KubeletSnapshot, LedgerError, Snapshot

__all__ = ["LedgerGate", "allocations_of", "held_units", "kubelet_snapshot"]

_LOG: Final = logging.getLogger(__name__)


DeviceIdResolver = Callable[[str], str]
"""Returns the device of one of the kubelet's ids, also of one from before sharing changed (`DeviceIds`)."""


def held_units(
    now: HolderSnapshot, resource: str, device_id_of: DeviceIdResolver, title: Callable[[str], str] = str
) -> dict[str, Held]:
    """Return who holds what of a resource as the ledger takes it: by the kubelet's id.

    title: a pod's name by its UID, for people.
    """
    units = {}
    for unit, allocations in now.of(resource).items():
        holders = frozenset((one.pod_uid, one.container) for one in allocations)
        # The one that is surest is shown; the checkpoint itself needs no further reason.
        one, holding = min(allocations.items(), key=lambda item: (not item[1].certain, item[0]))
        sure = any(each.certain for each in allocations.values())
        units[unit] = Held(
            device_id_of(unit), title(one.pod_uid), sure, holders, "" if holding.named else holding.reason
        )
    return units


def kubelet_snapshot(
    sequence: int, now: HolderSnapshot, resource: str, device_id_of: DeviceIdResolver, title: Callable[[str], str] = str
) -> KubeletSnapshot:
    """Return a scan's result of one resource as the ledger takes it. sequence: the ledger's before the scan."""
    registered = (now.registered or {}).get(resource, frozenset())
    return KubeletSnapshot(
        sequence,
        now.at,
        now.awake,
        held_units(now, resource, device_id_of, title),
        frozenset(map(device_id_of, registered)),
        now.problem,
    )


def allocations_of(now: Snapshot) -> list[Allocation]:
    """Return the allocations that the ledger knows, for the tracker to go on counting as held after a restart."""
    return [
        Allocation(pod_uid, container, hold.resource, hold.unit)
        for hold in now.holds.values()
        for pod_uid, container in hold.holders
    ]


class LedgerGate:
    """Asks the ledger for the plugin side.

    Args:
        async_ledger: the ledger.
        device_id_of: returns the device of an id of the kubelet's, by resource; the resources that
            the ledger decides about. Others are offered and granted freely.
        changed: called after something was released, found or quarantined.
        quarantined: called with (resource, device) after a device was quarantined.
        title: a pod's name by its UID, for people.
        guard: tells what devices are.
        allocated: returns (resource, the kubelet's id) of all that pods hold by the witnesses.

    Attributes:
        reconciled: (resource, device) of those about which this process has reconciled the evidence (R8).
            No other is offered or given out: the ledger may have lost what came last.
        reasons: by resource and device, why it is not known yet who holds it.
        draining: which devices of a resource new pods had better not get (drain: wait).

    """

    def __init__(
        self,
        async_ledger: AsyncLedger,
        device_id_of: Mapping[str, DeviceIdResolver],
        changed: Callable[[], None] = lambda: None,
        quarantined: Callable[[str, str], None] = lambda resource, device: None,
        title: Callable[[str], str] = str,
        guard: ExclusionGuard | None = None,
        allocated: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self._guard = guard or ExclusionGuard()
        self._allocated = allocated
        self._ledger = async_ledger
        self._title = title
        self.device_id_of = device_id_of
        self.changed = changed
        self.quarantined = quarantined
        self.reconciled: set[tuple[str, str]] = set()
        self.reasons: dict[str, Mapping[str, str]] = {}
        self.draining: Callable[[str], Collection[str]] = lambda resource: ()

    # The allocation gate.

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side shows this device healthy (R3); not before its evidence was reconciled."""
        if resource not in self.device_id_of:
            return True
        if (resource, device) not in self.reconciled:
            return False
        record = self._ledger.snapshot.devices.get((resource, device))
        return record is not None and record.state.healthy

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that these ids are given out (R1).

        Raises:
            Refusal: a device is not on the plugin side, nothing is known of it yet, or the ledger
                cannot be written.

        """
        if resource not in self.device_id_of:
            return
        if unreconciled := [device for device in devices if (resource, device) not in self.reconciled]:
            details = f"{resource}: who holds {', '.join(unreconciled)} is not known yet; the agent has just started"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", details)
        units = {name: self.device_id_of[resource](name) for name in names}
        try:
            await self._ledger.identify({(resource, one): self._guard.identity(resource, one) for one in devices})
            answer = await self._ledger.do(ledger.grant(resource, units, time.time()))
        except LedgerError as error:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "ledger", f"{resource}: the ledger cannot be written: {error}"
            ) from error
        if isinstance(answer, ledger.Refused):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "side", answer.message)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self.draining(resource)

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device; of one about which nothing is known yet it may."""
        known = (resource, device) in self.reconciled
        return not known or bool(self._ledger.snapshot.claims_on(resource, (device,)))

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices about which nothing is known yet, and why."""
        return dict(self.reasons.get(resource, {}))

    def held(self) -> Mapping[tuple[str, str], Tokens]:
        """Return the devices that pods and claims hold by the ledger, and what they were when they were granted."""
        now, allocated = self._ledger.snapshot, self._allocated()
        # Nobody observes the holds of a resource that is served no more: the tracker alone knows when they end.
        keys = {
            (hold.resource, hold.device)
            for hold in now.holds.values()
            if hold.resource in self.device_id_of or (hold.resource, hold.unit) in allocated
        }
        keys.update(*(claim.held for claim in now.claims.values()))
        return {key: identity.tokens_of(now.device(*key).identity, self._guard.boot) for key in keys}

    def side(self, resource: str, device: str) -> Side:
        """Return on which side the ledger has the device."""
        state = self._ledger.snapshot.device(resource, device).state
        return "plugin" if state.allocates else "dra" if state.prepares else ""

    # The observer.

    def awaited(self) -> Collection[tuple[str, str]]:
        """Return the ids of grants whose container no checkpoint has named."""
        return {key for key, hold in self._ledger.snapshot.holds.items() if hold.pending}

    def before_scan(self) -> object:
        """Remember where the ledger stood."""
        return self._ledger.snapshot.sequence

    async def after_scan(self, before: object, now: HolderSnapshot) -> None:
        """Release what is over, take in what is held and the ledger does not know."""
        news = False
        for resource, device_id_of in tuple(self.device_id_of.items()):  # a reload may drop one meanwhile
            seen = kubelet_snapshot(cast("int", before), now, resource, device_id_of, self._title)
            try:
                found = await self._ledger.do(ledger.observe(resource, seen, time.time()))
            except LedgerError as error:
                _LOG.warning("%s: the ledger cannot be written: %s", resource, error)
                continue
            for unit in found.found:
                _LOG.info("%s: pod %s holds %s, which the ledger did not know", resource, seen.held[unit].pod, unit)
            for device in found.quarantined:
                self.quarantined(resource, device)
            news = news or bool(found.released or found.found or found.quarantined)
        if news:
            self.changed()
