"""Gives the register evidence about holders of devices: pods, and claims of DRA drivers outside this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.exclusion import NO_TOKENS, DeviceKey, titled
from deviceplugin.kubelet.checkpoint import DeviceLists, ours
from deviceplugin.kubelet.orphaned_claims import OrphanedClaims
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.looks import TIMEOUT, LookTimeoutError
from deviceplugin.node.claim_side import ClaimSide
from deviceplugin.register import question
from deviceplugin.register.copies import AllocationCopies
from deviceplugin.register.question import Use, View, uncertain_uses
from deviceplugin.register.records import Allocation
from deviceplugin.register.register import Register, RegisterHost, ResourceDevices
from deviceplugin.tasks import in_time


@dataclass(slots=True, eq=False)
class DriverEvidence:
    """Records for which devices of one DRA driver this process has compared the recorded holders with evidence.

    The ledger (the file of records) may have lost its last changes. So a device is offered and granted only after this
    comparison. reconciled: the compared devices. reasons: for each resource, and each of its devices that could not be
    compared, the reason.
    """

    reconciled: set[DeviceKey] = field(default_factory=set)
    reasons: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def missing(self, key: DeviceKey) -> str:
        """Return why the holder of a device is unknown; "" if it is known."""
        if key in self.reconciled:
            return ""
        return self.reasons.get(key[0], {}).get(key[1], "the agent has just started, or the device is new")


class NodeEvidence(RegisterHost):
    """Creates the register and the readers of evidence of one process, and gives the register this evidence.

    services: for each resource of the process, its service; the mapping changes when services start or end. drivers:
    for the name of each DRA driver of the process, the driver's evidence. lists: the device lists that this process
    sends to the kubelet. side: the DRA part of the process. scan_wanted: an event that is set when a scan should run
    soon. report_holders: whether metrics show the holders.
    """

    def __init__(
        self,
        services: Mapping[str, ResourceDevices],
        paths: Paths,
        lists: DeviceLists,
        side: ClaimSide,
        scan_wanted: asyncio.Event,
        *,
        report_holders: bool = False,
    ) -> None:
        self.services = services
        self.drivers: dict[str, DriverEvidence] = {}
        self.register = Register(self)
        self._copies = copies = AllocationCopies(paths.cdi_dir, paths.plugins, side.agent_name)
        self.tracker = HolderTracker(
            lists,
            paths,
            self.register,
            scan_wanted,
            copies=copies,
            claim_uses=report_holders,
            believe_checkpoint=not side.serves_claims,
        )
        self.claims = OrphanedClaims(paths.kubelet_root, side.drivers, str(paths.cdi_dir), self.tracker.pods)
        self._serves_claims = side.serves_claims
        self._scan_wanted = scan_wanted
        self._foreign: tuple[tuple[Use, ...], tuple[Use, ...], list[Use], tuple[Use, ...]] = ((), (), [], ())

    def foreign_uses(self) -> tuple[Use, ...]:
        """Return the uses of devices through other drivers and plugins; the same object until a use changes."""
        pods, claims, doubtful = self.tracker.foreign(), self.claims.uses(), list[Use]()
        others = *pods, *claims
        for resource, service in self.services.items():
            if isinstance(service.source, AdoptedSource):
                doubtful += self._doubtful(resource, service.source, others)
        if self._foreign[0] is not pods or self._foreign[1] is not claims or self._foreign[2] != doubtful:
            self._foreign = pods, claims, doubtful, (*others, *doubtful)
        return self._foreign[3]

    def _doubtful(self, resource: str, source: AdoptedSource, others: tuple[Use, ...]) -> list[Use]:
        """Return a use for each free device of an adopted resource that may have a holder under another name.

        A holder may have the device under an id that the vendor's plugin does not list now. Or a holder has the device
        from another resource: the plugin's last response for the device names a device node of it. others: the uses by
        other drivers and plugins.
        """
        records, held = self.register.snapshot, dict[str, str]()
        for allocation in records.allocations_of(resource):
            held[allocation.device] = allocation.holder
        for claim in records.claims.values():
            for of, device in claim.held:
                if of == resource:
                    held[device] = claim.holder
        uses: list[Use] = []
        for name, devices in source.plugins.doubtful(resource, held).items():
            what = f"{held[name]} has {name} of {resource}, which the vendor's plugin does not list any more"
            uses += uncertain_uses((resource, name), what, dict.fromkeys(sorted(devices - held.keys()), frozenset()))
        if (plugin := source.plugins.plugin(resource)) is not None:
            listed, view = self.register.hardware().listed, View(self.register.boot, others=others)
            for name, nodes in plugin.opens.items():
                for use in question.uses(records, nodes, view) if name not in held else ():
                    if question.opened(nodes, resource, use, listed):
                        title = f"{use.title}, as {titled(use.key)}" if use.key is not None else use.title
                        uses.append(Use(use.unit, title, (resource, name), NO_TOKENS, None))
        return uses

    def unserved_holders(self, served: Collection[str]) -> Mapping[DeviceKey, frozenset[PodContainer]]:
        """Return the devices that pods have from resources that this process served formerly, each with its containers.

        Any thread may call this method. served: the resources that are served now. A process without a ledger loses
        its records at its end. So it takes the devices from the checkpoint, unless the kubelet counts devices of the
        resource as healthy, so that another process serves the resource.
        """
        now, records = self.tracker.snapshot, self.register.snapshot.allocations
        held: dict[DeviceKey, frozenset[PodContainer]] = {}
        for resource in {allocation.resource for allocation in now.held if allocation.resource not in served}:
            by_others = self._serves_claims or now.registered is None or bool(now.registered.get(resource))
            for device_id, containers in self.tracker.holders(resource).items():
                if (record := records.get((resource, device_id))) is not None:
                    devices = {record.device}
                else:
                    grants = map(self.tracker.granted, () if by_others else now.of(resource).get(device_id, ()))
                    devices = {grant.key[1] for grant in grants if grant is not None and ours(grant)}
                for device in devices:
                    held[resource, device] = held.get((resource, device), frozenset()) | containers
        return held

    async def reread(self, *, checkpoint: bool = True) -> None:
        """Read the files of other agents and drivers, and the kubelet's checkpoint, again if they have changed.

        Raises LookTimeoutError if the read of the checkpoint hangs.
        """
        if checkpoint:
            await self.tracker.reread()
        if await self.read_others():
            self._scan_wanted.set()

    async def read_others(self) -> bool:
        """Read the changed copies of other agents' allocations, and the claim files. If a read hangs, known facts stay.

        Returns whether the copies name further allocations, so that a scan is needed to decide about them.
        """
        with contextlib.suppress(LookTimeoutError):
            served = frozenset(self.claims.served)
            await self.tracker.other_looks.at("claims", self._read_others, served, brief=True)
        return self.tracker.note_copies()

    def _read_others(self, served: frozenset[str]) -> None:
        self._copies.read()
        self.claims.refresh(served)

    def granted_paths(self, allocations: Collection[Allocation]) -> frozenset[str] | None:
        """Return the host paths in the AllocateResponses of these allocations; None if these are not known."""
        paths: set[str] = set()
        for allocation in allocations:
            if (grant := self.tracker.granted(allocation)) is None or grant.paths is None:
                return None
            paths |= grant.paths
        return frozenset(paths) if allocations else None

    async def keep_copies(self) -> None:
        """Write copies of the allocations after each change, until cancelled (see `AllocationCopies`)."""
        await self._copies.keep(self.register.store, self.tracker.other_looks)

    async def write_copies(self) -> None:
        """Write copies of the allocations before the process ends. A write that hangs or fails raises no error."""
        with contextlib.suppress(OSError):
            await in_time(self._copies.write(self.register.snapshot, self.tracker.other_looks), TIMEOUT)

    def evidence_missing(self, resource: str, device: str) -> str:
        """Return why the holder of a device is unknown; "" if it is known."""
        service = self.services.get(resource)
        if service is None and self._serves_claims:
            return "its resource is not served"
        driver = service.source.driver if service is not None else None
        if not driver or not self._serves_claims:
            return self.claims.problem(driver)
        evidence = self.drivers.get(driver)
        return evidence.missing((resource, device)) if evidence is not None else "the agent has just started"
