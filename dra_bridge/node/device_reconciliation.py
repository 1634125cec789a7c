"""Compares the ledger file's records of devices with evidence of holders before the agent offers any device."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

from deviceplugin.backoff import Backoff
from deviceplugin.cdi import CdiError
from deviceplugin.exclusion import DeviceKey
from deviceplugin.kubelet import claim_state
from deviceplugin.kubelet.checkpoint import CheckpointError
from deviceplugin.kubelet.claim_state import ClaimStateError
from deviceplugin.kubelet.holders import EvidenceSource
from deviceplugin.node.agent import Agent
from deviceplugin.node.service import Service
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError, Side, State
from deviceplugin.register.rules import ClaimEvidence, Evidence, KubeletSnapshot
from dra_bridge.driver import Driver
from dra_bridge.handover.moved import Allocated
from dra_bridge.kube import ClaimResult, Cluster, ClusterError, ListedClaim, NotFoundError
from dra_bridge.node.claim_lists import ClaimLists
from dra_bridge.node.resource import DriverContext, ResourceRuntime
from dra_bridge.node.slice_feed import decide_names

_LOG: Final = logging.getLogger(__name__)

RESOLVE: Final = 30.0
"""Seconds until the first check whether quarantined devices can leave quarantine. The later pauses grow to ten times
this value."""

_SOURCES: Final[tuple[tuple[type[Exception], EvidenceSource], ...]] = (
    (ClaimStateError, EvidenceSource.CLAIM_STATE),
    (CdiError, EvidenceSource.CLAIM_FILES),
    (ClusterError, EvidenceSource.API_SERVER),
    (TimeoutError, EvidenceSource.API_SERVER),
)
"""For each type of error, the source of evidence that cannot be read. Other sources that cannot be read are reported by
the scan for holders itself."""

EVIDENCE_ERRORS: Final = (LedgerError, CheckpointError, ClaimStateError, CdiError, ClusterError, OSError, TimeoutError)
"""The types of errors that are raised when evidence about devices cannot be read now."""


def sources_of(error: Exception) -> list[EvidenceSource]:
    """Return a list with the source of evidence that an error concerns; [] if the error concerns none."""
    return [source for kind, source in _SOURCES if isinstance(error, kind)][:1]


@dataclass(eq=False)
class EvidenceReader:
    """Reads the holders of one driver's devices from all evidence outside the agent's own ledger file."""

    driver: Driver
    agent: Agent
    cluster: Cluster
    lists: ClaimLists
    errors: ClassVar[tuple[type[Exception], ...]] = (ClusterError,)

    async def scan(self, resource: str, device_ids: Collection[str]) -> KubeletSnapshot | None:
        """Scan for holders now, and return the holders of a resource's devices; see `HolderScanner.scan`."""
        result = await self.agent.scanner.scan({(resource, device_id) for device_id in device_ids})
        return None if result is None else result.resources.get(resource)

    def title(self, pod_uid: str) -> str:
        """Return a pod's name, for messages."""
        return self.agent.tracker.title(pod_uid)

    async def read(self, service: Service, devices: Sequence[str]) -> Evidence:
        """Return the evidence of the holders of these devices of a resource.

        Raises one of `EVIDENCE_ERRORS`, for example CheckpointError if an Allocate ran during the read.
        """
        if why := self.agent.claims.lost():
            raise CdiError(why)
        resource, ids, wanted = service.resource, service.endpoint.ids, frozenset(devices)
        asked = {(resource, device_id) for device in devices for device_id in ids.ids_of(device)}
        scan, tracker = await self.agent.scanner.scan(asked), self.agent.tracker
        if scan is None:
            raise CheckpointError("an Allocate was answered while the checkpoint was read")
        if scan.holders.registered is None:
            raise CheckpointError(scan.holders.problem)
        if (now := scan.resources.get(resource)) is None:
            raise CheckpointError(f"{resource} is not served any more")
        prepared = await tracker.looks.at("claim state", claim_state.read, self.agent.paths.kubelet_root)
        evident = await self.driver.files.reading.at("evidence", self.driver.claim_evidence, prepared, resource)
        # A claim is evidence even if the names in its allocation are not the present names of these devices, because
        # the agent's file of the claim may identify the devices.
        claims = [replace(claim, devices=claim.devices & wanted) for claim in evident if not self._recorded(claim)]
        recorded = self.agent.register.snapshot.of(resource)
        if any(name not in recorded or recorded[name].state is State.QUARANTINED for name in devices):
            # Allocations of claims count as well, so that the device of a claim that is not prepared yet stays on the
            # DRA side.
            _, listed = await self._list()
            uids = {claim.uid for claim in claims}
            for claim in listed:
                names = wanted & {device for of, device in self._allocated(claim) if of == resource}
                if names and claim.uid not in uids:
                    title = claim.namespace, claim.name
                    claims.append(ClaimEvidence(self.driver.name, claim.uid, names, False, *title))
        mine = {device_id: holder for device_id, holder in now.held.items() if holder.device in wanted}
        return Evidence(mine, tuple(claims), current=now.current)

    def _recorded(self, claim: ClaimEvidence) -> bool:
        """Return whether the ledger file has all devices of the claim.

        A claim that was recorded from evidence may lack devices, because its resources are recorded one after another.
        """
        record = self.driver.records.get(claim.uid)
        return record is not None and (record.result is not None or not record.durable)

    async def _list(self) -> tuple[float, list[ListedClaim]]:
        """List all claims. Return when the list began, and the claims with devices of the driver on this node."""
        found: list[ListedClaim] = []

        def visit(claim: ListedClaim) -> None:
            if any(map(self._here, claim.results)):
                found.append(claim)

        return await self.lists.read(visit), found

    def _here(self, result: ClaimResult) -> bool:
        return (result.driver, result.pool) == (self.driver.name, self.driver.pool) and not result.admin

    def _allocated(self, claim: ListedClaim) -> set[DeviceKey]:
        """Return the (resource, device) of each device of this node in a claim's allocation.

        Devices to which the claim has only administrative access are not included.
        """
        devices = self.driver.devices.by_name
        return {
            (devices[result.device][0].source.resource, devices[result.device][1].id)
            for result in claim.results
            if self._here(result) and result.device in devices
        }

    async def allocated(self) -> Allocated:
        """Read one consistent list of all claims.

        Return the devices of this node that are allocated, and their claims.
        """
        at, listed = await self._list()
        named = [(claim, self._allocated(claim)) for claim in listed]
        claims = {key: claim.title for claim, keys in named for key in keys}
        return Allocated(at, claims, frozenset().union(*(keys for claim, keys in named if claim.for_limits)))

    async def allocates(self, claim: str, resource: str, device: str | None) -> bool:
        """Read one claim (namespace/name). Return whether its allocation has this device of this node.

        device: None for any device of the resource.
        """
        namespace, _, name = claim.partition("/")
        try:
            found = await self.cluster.claim(name, namespace)
        except NotFoundError:
            return False
        return any(of == resource and device in (None, name) for of, name in self._allocated(found))


class ReconciledDriver(Protocol):
    """The driver's object that reports changes of devices (`dra_bridge.node.driver_runtime.DriverRuntime`)."""

    def devices_named(self) -> None:
        """Report the devices' health to the kubelet, because the devices now have published names."""

    def changed(self) -> None:
        """Update device lists, moves and slices, because holders or states of devices have changed in the ledger."""

    def quarantined(self, resource: str, device: str) -> None:
        """Log an error and write an Event, because a device was quarantined."""


@dataclass(frozen=True, slots=True)
class DeviceReconciler:
    """Compares the ledger file's records of one driver's devices with evidence of their holders (reconciliation)."""

    context: DriverContext
    evidence: EvidenceReader
    runtime: ReconciledDriver

    async def keep(self, served: ResourceRuntime) -> None:
        """Reconcile the devices of a resource after each change of its inventory, until cancelled."""
        resource = served.service.resource
        while True:
            served.changed.clear()
            try:
                await self._reconcile_all(resource, served)
            finally:
                self.context.evidence.reasons.pop(resource, None)
            await served.changed.wait()

    def forget_unlisted(self, served: ResourceRuntime) -> None:
        """Mark unplugged devices as not reconciled: they may have other holders when they are plugged in again."""
        resource, listed = served.service.resource, served.listed.devices
        gone = {key for key in self.context.evidence.reconciled if key[0] == resource and key[1] not in listed}
        self.context.evidence.reconciled.difference_update(gone)

    async def _reconcile_all(self, resource: str, served: ResourceRuntime) -> None:
        """Compare the records of a resource's devices with evidence (reconcile), until all devices are reconciled.

        After the agent's start, no device counts as reconciled, because the ledger file may have lost its last records.
        """
        backoff, logged, tries = Backoff(first=0.1, most=5.0), set[str](), 0
        while True:
            tries += 1
            snapshot, register = served.listed, self.context.ledger.snapshot
            certain = self.context.evidence.reconciled & register.devices.keys()
            unreconciled = [name for name in snapshot.devices if (resource, name) not in certain]
            if not unreconciled and (not snapshot.listed or resource in self.context.qualifiers()):
                if snapshot.listed:
                    served.reconciled.set()
                    served.service.release_idle()
                return
            reasons: dict[str, str] = {}
            try:
                if await decide_names(self.context, resource):
                    self.runtime.devices_named()
                uncertain = await self.reconcile(served, unreconciled)
            except EVIDENCE_ERRORS as error:
                self.evidence.agent.tracker.unknown.update(sources_of(error))
                reasons = dict.fromkeys(unreconciled, str(error) or type(error).__name__)
            else:
                problem = self.evidence.agent.tracker.snapshot.problem
                reasons = dict.fromkeys(uncertain, problem or "it may have a holder on the other side")
                if not reasons:
                    backoff.reset()
                    continue
            self.context.evidence.reasons[resource] = reasons
            text = "; ".join(f"{device}: {reason}" for device, reason in sorted(reasons.items()))
            # Shortly after the start, the kubelet may not have called ListAndWatch yet, so the first tries log no
            # warning.
            if text not in logged and tries > 3:
                # All logged texts are remembered, so that each of two alternating messages is logged only once.
                logged.add(text)
                where = {"resource": resource, "device": ", ".join(sorted(reasons))}
                _LOG.warning("devices are withheld because their holders are not known: %s", text, extra=where)
            await asyncio.sleep(backoff.next())

    async def reconcile(self, served: ResourceRuntime, devices: Sequence[str]) -> tuple[str, ...]:
        """Compare the ledger file's records of these devices with the evidence, and correct the records.

        Return the devices whose holders stay uncertain. Raises one of `EVIDENCE_ERRORS` if the evidence cannot be read
        now.
        """
        if not devices:
            return ()
        resource = served.service.resource
        evidence = await self.evidence.read(served.service, devices)
        if self.context.resources.get(resource) is not served:
            return ()  # The driver does not serve the resource any more.
        count = len(served.listed.devices)
        for_claims = self.context.share.of(served.policy).of(count) == count
        side = Side.DRA if for_claims and await self.context.node.watch.initialized() else Side.PLUGIN
        done = await self.context.ledger.do(
            operations.reconcile_evidence(resource, evidence, devices, side, time.time(), self.context.name)
        )
        await self.evidence.agent.register.adopt()
        if self.context.resources.get(resource) is not served:
            return ()
        self.context.evidence.reconciled.update((resource, name) for name in devices if name not in done.uncertain)
        for device, state in done.changed.items():
            if state is State.QUARANTINED:
                self.runtime.quarantined(resource, device)
            elif (resource, device) in self.context.evidence.reconciled:
                extra = {"resource": resource, "device": device}
                _LOG.debug("the state of device %s has changed: it is %s", device, state.text, extra=extra)
        self.runtime.changed()
        return done.uncertain

    async def keep_resolving(self) -> None:
        """Try to reconcile quarantined devices regularly, until cancelled."""
        # Each try lists all claims of the cluster, so the delays grow while one of the driver's devices is quarantined.
        backoff = Backoff(first=RESOLVE, most=10 * RESOLVE)
        while True:
            await asyncio.sleep(backoff.next())
            await self.resolve()
            if not any(self._quarantined(*each) for each in self.context.resources.items()):
                backoff.reset()

    def _quarantined(self, resource: str, served: ResourceRuntime) -> list[str]:
        records = self.context.ledger.snapshot
        return [name for name in served.listed.devices if records.state(resource, name) is State.QUARANTINED]

    async def resolve(self) -> None:
        """Try once to reconcile quarantined devices, because the evidence about them may no longer be contradictory."""
        for resource, served in tuple(self.context.resources.items()):
            names = self._quarantined(resource, served)
            try:
                await self.reconcile(served, names)
            except EVIDENCE_ERRORS as error:
                self.evidence.agent.tracker.unknown.update(sources_of(error))
                _LOG.info(
                    "cannot compare quarantined devices with evidence now: %s", error, extra={"resource": resource}
                )
                continue
            for name in names:
                state = self.context.ledger.snapshot.state(resource, name)
                if state is not State.QUARANTINED:
                    extra = {"resource": resource, "device": name}
                    _LOG.warning("device %s leaves quarantine; it is %s", name, state.text, extra=extra)
