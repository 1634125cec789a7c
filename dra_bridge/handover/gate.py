"""The ledger between the plugin door and the kubelet's books.

As the endpoint's doorkeeper it says what the plugin side offers (R3) and records what it gives
out before the answer leaves (R1); as an observer of the kubelet's books it releases what is over
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
from deviceplugin.kubelet.allocation_gate import Refusal
from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.kubelet.exclusion_guard import ExclusionGuard, Side
from deviceplugin.kubelet.holders import HolderSnapshot
from dra_bridge import ledger
from dra_bridge.ledger import AsyncLedger, Held, KubeletSnapshot, LedgerError, Snapshot

__all__ = ["Keeper", "allocations_of", "held_units", "kubelet_snapshot"]

_LOG: Final = logging.getLogger(__name__)


Behind = Callable[[str], str]
"""What tells the device behind an id of the kubelet's (`Endpoint.behind`), also one from before sharing was changed."""


def held_units(
    now: HolderSnapshot, resource: str, behind: Behind, title: Callable[[str], str] = str
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
        units[unit] = Held(behind(unit), title(one.pod_uid), sure, holders, "" if holding.named else holding.reason)
    return units


def kubelet_snapshot(
    sequence: int, now: HolderSnapshot, resource: str, behind: Behind, title: Callable[[str], str] = str
) -> KubeletSnapshot:
    """Return a scan's result of one resource as the ledger takes it. sequence: the ledger's before the scan."""
    registered = (now.registered or {}).get(resource, frozenset())
    return KubeletSnapshot(
        sequence,
        now.at,
        now.awake,
        held_units(now, resource, behind, title),
        frozenset(map(behind, registered)),
        now.problem,
    )


def allocations_of(now: Snapshot) -> list[Allocation]:
    """Return the allocations that the ledger knows, for the tracker to go on counting as held after a restart."""
    return [
        Allocation(pod_uid, container, hold.resource, hold.unit)
        for hold in now.holds.values()
        for pod_uid, container in hold.holders
    ]


class Keeper:
    """Asks the ledger for the plugin door.

    Args:
        desk: the ledger's face.
        behind: what tells the device behind an id of the kubelet's, by resource; the resources that
            the ledger decides about. Others are offered and granted freely.
        changed: called after something was released, found or quarantined.
        quarantined: called with (resource, device) after a device was quarantined.
        title: a pod's name by its UID, for people.
        guard: tells what devices are.
        allocated: returns (resource, the kubelet's id) of all that pods hold by the witnesses.

    Attributes:
        heard: (resource, device) of those about which this process has heard the evidence (R8).
            No other is offered or given out: the ledger may have lost what came last.
        reasons: by resource and device, why it is not known yet who holds it.
        steer: which devices of a resource new pods had better not get (drain: wait).

    """

    def __init__(
        self,
        desk: AsyncLedger,
        behind: Mapping[str, Behind],
        changed: Callable[[], None] = lambda: None,
        quarantined: Callable[[str, str], None] = lambda resource, device: None,
        title: Callable[[str], str] = str,
        guard: ExclusionGuard | None = None,
        allocated: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self._guard = guard or ExclusionGuard()
        self._allocated = allocated
        self._desk = desk
        self._title = title
        self.behind = behind
        self.changed = changed
        self.quarantined = quarantined
        self.heard: set[tuple[str, str]] = set()
        self.reasons: dict[str, Mapping[str, str]] = {}
        self.steer: Callable[[str], Collection[str]] = lambda resource: ()

    # The doorkeeper.

    def offers(self, resource: str, device: str) -> bool:
        """Return whether the plugin side shows this device healthy (R3); not before its evidence was heard."""
        if resource not in self.behind:
            return True
        if (resource, device) not in self.heard:
            return False
        record = self._desk.snapshot.devices.get((resource, device))
        return record is not None and record.state.healthy

    async def grant(self, resource: str, names: Sequence[str], devices: Sequence[str]) -> None:
        """Record that these ids are given out (R1).

        Raises:
            Refusal: a device is not on the plugin side, nothing is known of it yet, or the ledger
                cannot be written.

        """
        if resource not in self.behind:
            return
        if unheard := [device for device in devices if (resource, device) not in self.heard]:
            details = f"{resource}: who holds {', '.join(unheard)} is not known yet; the agent has just started"
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "starting", details)
        units = {name: self.behind[resource](name) for name in names}
        try:
            await self._desk.identify({(resource, one): self._guard.identity(resource, one) for one in devices})
            answer = await self._desk.do(ledger.grant(resource, units, time.time()))
        except LedgerError as error:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, "ledger", f"{resource}: the ledger cannot be written: {error}"
            ) from error
        if isinstance(answer, ledger.Refused):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "side", answer.message)

    def avoids(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get."""
        return self.steer(resource)

    def claimed(self, resource: str, device: str) -> bool:
        """Return whether a claim holds the device; of one about which nothing is known yet it may."""
        known = (resource, device) in self.heard
        return not known or bool(self._desk.snapshot.claims_on(resource, (device,)))

    def withheld(self, resource: str) -> Mapping[str, str]:
        """Return the devices about which nothing is known yet, and why."""
        return dict(self.reasons.get(resource, {}))

    def held(self) -> Mapping[tuple[str, str], Tokens]:
        """Return the devices that pods and claims hold by the ledger, and what they were when they were granted."""
        now, allocated = self._desk.snapshot, self._allocated()
        # Nobody observes the holds of a resource that is served no more: the tracker alone knows when they end.
        keys = {
            (hold.resource, hold.device)
            for hold in now.holds.values()
            if hold.resource in self.behind or (hold.resource, hold.unit) in allocated
        }
        keys.update(*(claim.held for claim in now.claims.values()))
        return {key: identity.tokens_of(now.device(*key).identity, self._guard.boot) for key in keys}

    def side(self, resource: str, device: str) -> Side:
        """Return on which side the ledger has the device."""
        state = self._desk.snapshot.device(resource, device).state
        return "plugin" if state.allocates else "dra" if state.prepares else ""

    # The observer.

    def awaited(self) -> Collection[tuple[str, str]]:
        """Return the ids of grants whose container no checkpoint has named."""
        return {key for key, hold in self._desk.snapshot.holds.items() if hold.pending}

    def before_scan(self) -> object:
        """Remember where the ledger stood."""
        return self._desk.snapshot.sequence

    async def after_scan(self, before: object, now: HolderSnapshot) -> None:
        """Release what is over, take in what is held and the ledger does not know."""
        news = False
        for resource, behind in tuple(self.behind.items()):  # a reload may drop one meanwhile
            seen = kubelet_snapshot(cast("int", before), now, resource, behind, self._title)
            try:
                found = await self._desk.do(ledger.observe(resource, seen, time.time()))
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
