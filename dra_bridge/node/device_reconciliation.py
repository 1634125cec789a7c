"""Has the ledger reconcile the evidence about devices, before any of them is offered (R8)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from deviceplugin.backoff import Backoff
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.kubelet.claim_state import ClaimStateError
from dra_bridge.kube import ClusterError
from dra_bridge.ledger import operations
from dra_bridge.ledger.records import LedgerError, Side, State
from dra_bridge.node.evidence import EvidenceReader
from dra_bridge.node.resource import DriverContext, ResourceRuntime
from dra_bridge.node.slice_feed import decide_names, qualifiers_of

_LOG: Final = logging.getLogger(__name__)

RESOLVE: Final = 30.0
"""Seconds between two checks whether a quarantined device may leave quarantine."""

EVIDENCE_ERRORS: Final = (LedgerError, CheckpointError, ClaimStateError, ClusterError, OSError, TimeoutError)
"""Raised where the evidence cannot be read now."""


@dataclass(frozen=True, slots=True)
class DeviceReconciler:
    """Reconciles the devices of one driver.

    named: called after devices were given names. changed: called after the ledger changed. quarantined: called with
    (resource, device) after a device was quarantined.
    """

    context: DriverContext
    evidence: EvidenceReader
    named: Callable[[], None]
    changed: Callable[[], None]
    quarantined: Callable[[str, str], None]

    async def keep(self, one: ResourceRuntime) -> None:
        """Reconcile the devices of a resource whenever there are others, until cancelled."""
        resource = one.service.resource
        while True:
            one.changed.clear()
            try:
                await self._reconcile_all(resource, one)
            finally:
                self.context.gate.reasons.pop(resource, None)
            await one.changed.wait()

    def forget_unlisted(self, one: ResourceRuntime) -> None:
        """Reconcile devices that are unplugged again when they come back: somebody may hold them then."""
        resource, listed = one.service.resource, one.service.inventory.snapshot.devices
        gone = {key for key in self.context.gate.reconciled if key[0] == resource and key[1] not in listed}
        self.context.gate.reconciled.difference_update(gone)

    async def _reconcile_all(self, resource: str, one: ResourceRuntime) -> None:
        """Reconcile devices until none is left: all at each start, for the ledger may have lost its last records."""
        backoff, logged, tries = Backoff(first=0.1, most=5.0), "", 0
        while True:
            tries += 1
            listed = one.service.inventory.snapshot.listed
            unreconciled = self._unreconciled(resource, one)
            if not unreconciled and (not listed or resource in qualifiers_of(self.context.ledger.snapshot)):
                if listed and not one.reconciled.is_set():
                    one.reconciled.set()
                    one.service.release_idle()
                return
            holders = {
                name: self.context.node.foreign_holder(resource, name, self.context.name) for name in unreconciled
            }
            reasons = {name: holder for name, holder in holders.items() if holder}
            try:
                if await decide_names(self.context, resource):
                    self.named()
                doubtful = await self.reconcile(one, [name for name in unreconciled if name not in reasons])
            except EVIDENCE_ERRORS as error:
                reasons |= dict.fromkeys(unreconciled, f"not known: {error or type(error).__name__}")
            else:
                problem = self.context.node.agent.tracker.snapshot.problem
                reasons |= dict.fromkeys(doubtful, f"not known: {problem}" if problem else "not known")
                if not reasons:
                    backoff.reset()
                    continue
            self.context.gate.reasons[resource] = reasons
            text = "; ".join(f"{device}: {reason}" for device, reason in sorted(reasons.items()))
            # At the start the kubelet does not listen yet; that is soon over.
            if text != logged and tries > 3:
                logged = text
                _LOG.warning("%s: devices are withheld: %s", resource, text)
            await asyncio.sleep(backoff.next())

    def _unreconciled(self, resource: str, one: ResourceRuntime) -> list[str]:
        """Return the devices about which no evidence was reconciled yet, or that the ledger does not have."""
        known, reconciled = self.context.ledger.snapshot.devices, self.context.gate.reconciled
        keys = {name: (resource, name) for name in one.service.inventory.snapshot.devices}
        return [name for name, key in keys.items() if key not in reconciled or key not in known]

    async def reconcile(self, one: ResourceRuntime, devices: Sequence[str]) -> tuple[str, ...]:
        """Have the ledger reconcile the evidence about these devices; return those that stay in doubt.

        Raises one of `EVIDENCE_ERRORS`: it cannot be read now.
        """
        if not devices:
            return ()
        resource = one.service.resource
        evidence = await self.evidence.read(one.service, devices)
        if self.context.resources.get(resource) is not one:
            return ()  # it was dropped meanwhile
        count = len(one.service.inventory.snapshot.devices)
        side = Side.DRA if self.context.share.of(one.policy).of(count) == count else Side.PLUGIN
        done = await self.context.ledger.do(
            operations.reconcile_evidence(resource, evidence, devices, side, time.time())
        )
        guard = self.context.node.agent.guard
        await self.context.ledger.identify({(resource, name): guard.identity(resource, name) for name in devices})
        self.context.gate.reconciled.update((resource, name) for name in devices if name not in done.doubtful)
        for device, state in done.changed.items():
            if state is State.QUARANTINED:
                self.quarantined(resource, device)
            elif (resource, device) in self.context.gate.reconciled:
                _LOG.debug("%s: device %s is %s", resource, device, state.text)
        self.changed()
        return done.doubtful

    async def keep_resolving(self) -> None:
        """Reconcile quarantined devices from time to time, until cancelled."""
        # Each time claims are listed: for a device that stays quarantined this is done more and more rarely.
        backoff = Backoff(first=RESOLVE, most=10 * RESOLVE)
        while True:
            await asyncio.sleep(backoff.next())
            await self.resolve()
            if not any(record.state is State.QUARANTINED for record in self.context.ledger.snapshot.devices.values()):
                backoff.reset()

    async def resolve(self) -> None:
        """Reconcile quarantined devices: the evidence about them may agree by now."""
        for resource, one in tuple(self.context.resources.items()):
            listed = one.service.inventory.snapshot.devices
            records = self.context.ledger.snapshot.of(resource)
            names = [name for name in listed if name in records and records[name].state is State.QUARANTINED]
            try:
                await self.reconcile(one, names)
            except EVIDENCE_ERRORS as error:
                _LOG.info("%s: quarantined devices stay so for now: %s", resource, error)
                continue
            for name in names:
                state = self.context.ledger.snapshot.device(resource, name).state
                if state is not State.QUARANTINED:
                    _LOG.warning("%s: device %s leaves quarantine; it is %s", resource, name, state.text)
