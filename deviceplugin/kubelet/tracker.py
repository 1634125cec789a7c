"""Finds out, from files of the kubelet and cgroups, which pods hold devices, for all resources of this process.

A scan reads the kubelet's checkpoint and the pods' cgroups. If a newer checkpoint might show that an allocation has
ended, the scan calls PodResources `List`, which makes the kubelet drop the allocations of ended pods (kubelet 1.36,
devicemanager/manager.go), and then makes the kubelet write its checkpoint (`CheckpointReader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import boot_id
from deviceplugin.kubelet import holders, pod_evidence
from deviceplugin.kubelet.cgroups import PodProcesses, PodReader, read_directories
from deviceplugin.kubelet.checkpoint import CheckpointError, CheckpointReader, CheckpointVersion, DeviceLists, ours
from deviceplugin.kubelet.containers import ContainerStarts, LostAllocations
from deviceplugin.kubelet.foreign_plugin import KubeletRecord
from deviceplugin.kubelet.holders import EvidenceSource, HolderEvidence, HolderSnapshot, UnrecordedEvidence, of_ids
from deviceplugin.kubelet.paths import Paths
from deviceplugin.kubelet.plugin_directory import KUBELET_SOCKET
from deviceplugin.kubelet.pod_names import PodNames
from deviceplugin.kubelet.podresources import (
    AllocationsInFlight,
    ClaimUse,
    PodContainer,
    PodResources,
    PodResourcesReport,
)
from deviceplugin.kubelet.request_schedule import RequestSchedule
from deviceplugin.looks import LONG, Looks, LookTimeoutError
from deviceplugin.register.copies import AllocationCopies
from deviceplugin.register.question import Use, Wanted
from deviceplugin.register.records import Allocation, AllocationRecord, LedgerError, RecordKey
from deviceplugin.register.register import Register
from deviceplugin.tasks import SharedCall

_LOG: Final = logging.getLogger(__name__)
_EndedAndOthers = tuple[frozenset[Allocation], frozenset[Allocation]]

ADMISSION: Final = 0.5
"""Seconds after a grant of an id within which an Allocate for another container of the pod may request the id again.

The kubelet calls Allocate for one container of a pod after another, and between two calls only writes its checkpoint
(kubelet 1.36, devicemanager/manager.go: Allocate).
"""
READMISSION: Final = 30.0
"""Seconds in which a restarted kubelet admits all pods again, after its `List` response has named the first of them."""
GRANT_REWRITE: Final = 4.0
"""Maximum seconds for which an Allocate waits for a new checkpoint of the kubelet. The time is long, because after it
the Allocate is refused, and its pod fails."""


def is_recent(record: AllocationRecord) -> bool:
    """Return whether the kubelet may still be admitting the pod of a grant."""
    return record.since > time.time() - ADMISSION


class HolderTracker:
    """Reads from the node which pods hold devices by `limits`. The register stores the result.

    scan_wanted: an event that is set when a scan is due at once. copies: the reader of the copies that other agents
    write of their allocations. claim_uses: whether each scan calls PodResources `List`, to get the containers that use
    claims, for metrics. believe_checkpoint: see `PodReader`.
    """

    def __init__(
        self,
        lists: DeviceLists,
        paths: Paths,
        register: Register,
        scan_wanted: asyncio.Event,
        *,
        copies: AllocationCopies,
        claim_uses: bool = False,
        believe_checkpoint: bool = False,
    ) -> None:
        self.snapshot = HolderSnapshot(problem="the kubelet has not been asked yet")
        self.read_at: float | None = None
        """The time at which a scan last read the checkpoint (monotonic seconds); None before the first scan."""
        self.claim_uses: frozenset[ClaimUse] = frozenset()
        """The devices that containers use through claims, from the last response to `List`."""
        self.all_pods_listed = False
        """Whether the last response to `List` named all running pods. The response lacks pods that were deleted by
        force, or that a restarted kubelet does not know."""
        self.pods: Final = PodReader(
            paths.kubelet_root, paths.cgroup_root, believe_checkpoint=believe_checkpoint, boot=boot_id()
        )
        self.names: Final = PodNames(paths.pod_log_dir)
        self._register = register
        self.looks: Final = Looks("the kubelet's files")
        """Runs all reads of the kubelet's checkpoint and claim state, and of the pods' cgroups."""
        self.other_looks: Final = Looks("files of other agents and drivers", threads=1)
        """Runs all reads of other agents' copies and of claim files, in only one thread, because each read of copies
        finds only the changes since the last read."""
        self._present = SharedCall(lambda: self.looks.at("checkpoint", self._checkpoint.newest, brief=True))
        """Reads the checkpoint. Simultaneous reads for the registrations of several resources access the file only
        once."""
        self._checkpoint = CheckpointReader(paths, lists, self._known, self.looks)
        self._lists = SharedCall(self._list)
        self.pod_resources: Final = PodResources(paths.pod_resources)
        self.in_flight = AllocationsInFlight()
        self._requests = RequestSchedule(scan_wanted)
        self._wants_claim_uses = claim_uses
        self._refused: dict[tuple[str, str], str] = {}
        """For each (resource, id) of which an Allocate was refused, because processes of the id's holder run: the
        reason. A scan keeps the ids that still have a holder which no checkpoint names."""
        self._recorded: tuple[object, object, frozenset[Allocation]] = (None, None, frozenset())
        """The register's allocation records, the grants that the checkpoint reader keeps, and the `Allocation` values
        that were made from both."""
        self._foreign: tuple[UnrecordedEvidence | None, tuple[Use, ...]] = (None, ())
        self._lost = LostAllocations(self.pods, paths.container_log_dir)
        self.starts: Final = ContainerStarts(self.pods, paths.container_log_dir)
        self._copies = copies
        self._copied: Mapping[Allocation, Wanted] = {}
        """For each held allocation in other agents' copies, the grant in the copy."""
        self._unscanned: frozenset[Allocation] = frozenset()
        """Allocations that appeared in another agent's copy after the last scan."""
        self._begun: frozenset[str] = frozenset()
        """UIDs of pods with devices whose admission by the kubelet is complete: pods that were known at the agent's
        start, or were seen running."""
        self._live: frozenset[str] = frozenset()
        """UIDs of pods with devices that may have run at the last scan."""
        self._former: frozenset[str] = frozenset()
        """UIDs of pods with devices that were known at the agent's start. After a reboot, these pods have directories
        before they have cgroups."""
        self._kubelet: FileIdentity | None = None
        """The identity of kubelet.sock at this process's start or at the last Register; None without kubelet.sock."""
        self._socket = paths.plugins / KUBELET_SOCKET
        self._returning: frozenset[str] = frozenset()
        """UIDs of pods with devices that a restarted kubelet may still have to admit again."""
        self._admitting_since: float | None = None
        """The time at which the restarted kubelet first listed a running pod (monotonic seconds); None before that;
        minus infinity if the kubelet started long before this process."""
        self._in_one_root = all(
            path.is_relative_to(paths.kubelet_root) for path in (paths.plugins, paths.pod_resources)
        )
        self.observed: frozenset[str] = frozenset()
        """The resources whose allocations were compared with evidence at least once since the resource was added."""
        self._unanswered = ""
        """Why the last request for a checkpoint failed; "" if the kubelet wrote the checkpoint."""
        self.problems: tuple[str, ...] = ()
        """Messages about the pods of this node whose cgroups the last scan could not see."""
        self.unknown: Counter[EvidenceSource] = Counter()
        """For each kind of evidence, the number of scans in which it did not show whether a holder had ended."""

    async def start(self) -> None:
        """Record the allocations in the checkpoint and in other agents' copies, before the agent serves any device.

        The caller must have called `AllocationCopies.read` and `note_copies` before.
        """
        records = self._register.snapshot.allocations.values()
        socket = await self.looks.until_answered("evidence", file_identity, self._socket)
        self.pods.known(pod_evidence.recorded({place for record in records for place in record.shown}, boot_id()))
        seen = await self.looks.until_answered("evidence", self._read)
        await self._register.add_holders(await self.looks.until_answered("evidence", self._possible_holders, seen))
        self.snapshot = holders.holders(self._known(), seen)
        self._expect_admission(socket)
        if socket is not None and time.time() - socket.modified_ns / 1e9 > READMISSION:
            self._admitting_since = -math.inf
        self._begun = self._former = frozenset(allocation.pod_uid for allocation in self.snapshot.held)
        await self.names.update(self._begun)
        self._note_problem(seen)
        with contextlib.suppress(LookTimeoutError):
            if problem := await self.names.looks.at("pod names", self.names.missing):
                _LOG.warning("%s", problem)

    def _known(self) -> frozenset[Allocation]:
        """The allocations in the register, of other plugins at the last scan, and of pending grants.

        A checkpoint that was read has named the allocations of pending grants. The kubelet may drop such an allocation,
        and write its checkpoint again, before a scan records the container.
        """
        records, grants = self._register.snapshot.allocations, self._checkpoint.known.grants
        of, granted, allocations = self._recorded  # `_recorded` is read once, because other threads may replace it.
        if of is not records or granted is not grants:
            held = set(holders.begun(grants, records))
            for record in records.values():
                for who in record.holders:
                    held.add(Allocation(*who, record.resource, record.device_id))
            allocations = frozenset(held)
            self._recorded = records, grants, allocations
        return allocations | self.snapshot.held.keys() | self._unscanned

    async def kubelet_started(self, kubelet: FileIdentity | None) -> None:
        """Prepare, before each Register, for a kubelet that may have lost its checkpoint.

        Record the pods that may hold the grants without a known holder, and expect that the kubelet admits the pods
        with devices again. kubelet: the identity of kubelet.sock. Raises LookTimeoutError.
        """
        if kubelet == self._kubelet:
            return
        seen = await self.looks.at("evidence", self._read)
        found = await self.looks.at("evidence", self._possible_holders, seen)
        self._unscanned |= found
        with contextlib.suppress(LedgerError):  # The next scan tries again to record the holders.
            await self._register.add_holders(found)
        self._expect_admission(kubelet)

    def _expect_admission(self, kubelet: FileIdentity | None) -> None:
        """Expect that a kubelet admits the pods with devices again. kubelet: kubelet.sock's identity, if it exists."""
        self._kubelet, self._admitting_since = kubelet, None
        self._returning = frozenset(allocation.pod_uid for allocation in self._known())
        self.snapshot = replace(self.snapshot, active=self._returning)

    def _possible_holders(self, seen: HolderEvidence) -> frozenset[Allocation]:
        """Return, as allocations, the containers that have, or may have, the pending grants. Blocks.

        If a checkpoint that was read has named the container of a grant, this container has the grant. Otherwise
        `holders.possible_holders` decides. A checkpoint lists the resources that the kubelet knows. If it lacks a
        resource before this process registers, the former checkpoint is lost. If the kubelet has restarted since this
        process started, the checkpoint may also be an old one, so that all resources count as missing in it.
        """
        kept, records = set[str](), self._register.snapshot.allocations
        if self._kubelet is None:
            kept.update(*(version.registered for version in seen.checkpoints))
        begun = holders.begun(self._checkpoint.known.grants, records)
        known = {allocation[2:] for allocation in begun}
        pending = [one for key, one in records.items() if one.pending and one.resource not in kept and key not in known]
        if not pending:
            return begun
        named = frozenset[Allocation]().union(*(file.allocations for file in seen.checkpoints))
        pods = self.names.logs(seen.pods.candidates - {self.pods.own_pod})
        possible = holders.possible_holders(pending, named, self._answer, pods)
        for pod_uid, resource, device_id in sorted({(one.pod_uid, *one[2:]) for one in possible}):
            why = "it was granted shortly before an agent's or the kubelet's end, and no checkpoint names its pod"
            text = "device %s counts as held while processes of pod %s run: %s"
            extra = {"resource": resource, "device": device_id, "pod": pod_uid}
            _LOG.warning(text, device_id, pod_uid, why, extra=extra)
        return begun | possible

    async def still_held(self, resource: str, device_ids: Collection[str]) -> Mapping[str, str]:
        """Return, for each of these ids that another pod still holds, the reason.

        The caller is about to grant an Allocate, so this method reads the checkpoint again.

        The kubelet allocates an id again only when it counts the former holder as ended. The kubelet can be wrong in
        three cases: the holding pod was deleted by force; the kubelet lost its checkpoint and does not know the pod; or
        a client called PodResources List during the pod's Allocate (kubernetes#137534). Only in the last case the
        present checkpoint still names the pod. If a named pod has no cgroup, the Allocate is for the pod itself, whose
        init container had the device before.
        """
        wanted = frozenset(device_ids)
        if not await self.looks.at("holders", self._may_be_held, resource, wanted, brief=True):
            for name in wanted:
                self._refused.pop((resource, name), None)
            return {}
        allocations, running, admitted = await self.looks.at("holders", self._holders_now, resource, wanted)
        refused: dict[str, str] = {}
        if admitted and not running:
            written, problem = await self._checkpoint.written(GRANT_REWRITE)
            named: frozenset[Allocation] = frozenset().union(*(file.allocations for file in written))
            named_ids = {(holder.pod_uid, holder.device_id) for holder in of_ids(named, resource, wanted)}
            why = problem or "is named in the kubelet's checkpoint"
            allocations, running, admitted = await self.looks.at("holders", self._holders_now, resource, wanted)
            # All holders of an id are checked, because one of several may have ended and have an empty cgroup.
            for holder in allocations:
                if holder.pod_uid in admitted and (problem or (holder.pod_uid, holder.device_id) in named_ids):
                    refused[holder.device_id] = (
                        f"pod {self.title(holder.pod_uid)} has not started a process yet and {why}"
                    )
        held = [holder for holder in allocations if holder.pod_uid in running.values() or holder.device_id in refused]
        self._begun |= {holder.pod_uid for holder in held}
        await self._register.add_holders(held)
        dropped = {name: f"processes of pod {self.title(uid)} run" for name, uid in running.items()}
        others = {key: why for key, why in self._refused.items() if key[0] != resource or key[1] not in wanted}
        self._refused = others | {(resource, name): why for name, why in dropped.items()}
        if dropped:
            self._requests.dispute()
        return refused | dropped

    async def begun(self, resource: str, device_ids: Collection[str]) -> frozenset[Allocation]:
        """Return the allocations for pending grants of these ids, if the present checkpoint names them.

        Raises LookTimeoutError.
        """
        records = self._register.snapshot.allocations_of(resource)
        pending = {
            (resource, record.device_id): record
            for record in records
            if record.pending and record.device_id in device_ids
        }
        if not pending:
            return frozenset()
        read = await self.looks.at("holders", self._newest, brief=True)
        return holders.pending_grants(read, pending, self._checkpoint.known.grants).begun

    async def still_running(self, resource: str, device_ids: Collection[str]) -> Collection[str]:
        """Return the ids, from `device_ids`, whose holding pods have running processes."""
        return (await self.looks.at("holders", self._holders_now, resource, frozenset(device_ids)))[1].keys()

    def _may_be_held(self, resource: str, device_ids: frozenset[str]) -> bool:
        """Return False only if no pod that may hold one of these ids still has cgroups. Blocks."""
        self._newest()
        named, found = self._checkpoint.known.last.allocations, set[str]()
        for holder in self._known() | named:
            # If the kubelet has lost a container's allocations, and now allocates for this container again, the former
            # instance of the container has ended.
            lost = holder.container and holder not in named
            if lost or (holder.resource == resource and holder.device_id in device_ids):
                found.add(holder.pod_uid)
        return any(map(self.pods.may_exist, found))

    def _holders_now(
        self, resource: str, device_ids: frozenset[str]
    ) -> tuple[Sequence[Allocation], Mapping[str, str], frozenset[str]]:
        """Return the allocations of these ids, each id's running pod (UID), and the UIDs of pods with empty cgroups."""
        read, pods = self._newest(), self.pods.read()
        allocations = of_ids(self._known_or(read) - self._ended_containers(read, pods), resource, device_ids)
        uids = {allocation.pod_uid for allocation in allocations}
        may_run = {uid for uid in uids if pods.may_run(uid)}
        return allocations, holders.running(allocations, resource, device_ids, may_run), pods.empty & uids

    async def ended(self, resource: str, device_ids: Collection[str]) -> _EndedAndOthers:
        """Return two sets: the allocations of these ids whose pods have ended, and the other allocations.

        The caller is about to grant an Allocate. The other allocations belong to pods that run, or that the kubelet may
        just be admitting. The Allocate may be for such a pod itself, if the pod's init container had the device before.
        """
        wanted = frozenset(device_ids)
        if not of_ids(self._known_or(await self.looks.at("holders", self._newest, brief=True)), resource, wanted):
            return frozenset(), frozenset()
        return await self.looks.at("holders", self._ended, resource, wanted)

    def _ended(self, resource: str, device_ids: frozenset[str]) -> _EndedAndOthers:
        read, pods = self._newest(), self.pods.read()
        allocations = frozenset(of_ids(self._known_or(read), resource, device_ids))
        uids = {allocation.pod_uid for allocation in allocations}
        # The kubelet and the runtime create a pod's log and pod directories after the pod's admission.
        begun = self._begun | self.names.known.keys() | self.names.read_shortly(uids).keys()
        begun |= read_directories(self.pods.kubelet_root) or frozenset()
        # A short-lived pod may have ended, and its directories may be gone, before any scan saw the pod. So a pod
        # without directories counts as in admission for only ADMISSION seconds after the grant.
        records = self._register.snapshot.allocations
        admitted = {
            allocation
            for allocation in allocations
            if allocation.pod_uid not in begun
            and (record := records.get(allocation[2:])) is not None
            and is_recent(record)
        }
        ended = holders.ended(allocations - admitted, pods) | (allocations & self._ended_containers(read, pods))
        return ended, allocations - ended

    def _newest(self) -> list[CheckpointVersion]:
        """Return the present checkpoint in a list, empty if it cannot be read. Blocks.

        During an Allocate, this checkpoint still names a holder that the kubelet has just dropped, because the kubelet
        writes its checkpoint after Allocate.
        """
        with contextlib.suppress(CheckpointError):
            return [self._checkpoint.newest(nodes=True)]
        return []

    def _known_or(self, read: Sequence[CheckpointVersion]) -> frozenset[Allocation]:
        return self._known().union(*(version.allocations for version in read))

    def _ended_containers(self, read: Sequence[CheckpointVersion], pods: PodProcesses) -> frozenset[Allocation]:
        """Return the known allocations whose containers have ended and that none of these checkpoints names. Blocks."""
        if not read:
            return frozenset()
        named: frozenset[Allocation] = frozenset().union(*(version.allocations for version in read))
        lost = {one for one in self._known() - named if one.container and one.pod_uid in (pods.running or ())}
        return self._lost.ended(lost, {holder[2:] for holder in named}, self._register.snapshot.allocations)

    async def recorded(self, resource: str, served: Collection[str]) -> KubeletRecord | None:
        """Return the checkpoint's present entries of a resource; None if the checkpoint cannot be read.

        served: the resources of this process.
        """
        now = None
        with contextlib.suppress(CheckpointError, LookTimeoutError):
            now = await self._present()
        if now is None or now.file is None:
            return None
        known = self._checkpoint.known
        grants = {} if resource in known.adopted else known.grants
        answered = (one for one in now.allocations if one.resource == resource and one in grants)
        return KubeletRecord(
            now.file.modified_ns / 1e9,
            now.registered.get(resource, frozenset()),
            {name: ids for name, ids in now.registered.items() if name not in served},
            frozenset(allocation for allocation in answered if not ours(grants[allocation][1])),
        )

    async def reread(self) -> None:
        """Read the checkpoint again if the file has changed, because it may name new allocations."""
        with contextlib.suppress(CheckpointError):
            await self.looks.at("checkpoint", partial(self._checkpoint.newest, nodes=True), brief=True)

    def note_copies(self) -> bool:
        """Add the allocations in newly read copies to the known allocations. Return whether there are any."""
        if copied := self._copies.changed():
            self._copied = {**self._copied, **copied}
            self._unscanned |= copied.keys()
        return bool(copied)

    async def listed(self, running: Collection[str]) -> frozenset[str]:
        """Return the UIDs of those running pods that the kubelet counts as active (in the response of `List`).

        running: the UIDs of all pods whose processes run.
        """
        await self.in_flight.wait()
        report = await self._lists()
        return frozenset() if report is None else await self._listed(report, running)

    def title(self, pod_uid: str) -> str:
        """Return a pod's namespace and name if both are known, else its UID."""
        return "/".join(self.names.known.get(pod_uid, (pod_uid,)))

    def pods_named(self, uids: Collection[str]) -> tuple[PodContainer, ...]:
        """Return these pods, with the names from the kubelet's log directories. This method blocks for a short time."""
        return self.names.pods(uids)

    def holders(self, resource: str) -> Mapping[str, frozenset[PodContainer]]:
        """Return, for each held id of a resource, the containers that hold it, with the known names of pods."""
        return {
            device_id: frozenset(
                PodContainer(*self.names.known.get(holder.pod_uid, ("", "")), holder.container, holder.pod_uid)
                for holder in allocations
            )
            for device_id, allocations in self.snapshot.of(resource).items()
        }

    def granted(self, allocation: Allocation) -> Wanted | None:
        """Return the grant of an allocation, from the AllocateResponse or another agent's copy; None if unknown."""
        return holders.grant_of(self._answer(allocation), self._copied.get(allocation))

    def _answer(self, allocation: Allocation) -> Wanted | None:
        """Return the grant of an allocation, from the AllocateResponse in the checkpoint; None if it is not known."""
        return (self._checkpoint.known.grants.get(allocation) or ("", None))[1]

    def foreign(self) -> tuple[Use, ...]:
        """Return the uses of devices by allocations of other plugins, and by allocations whose records were lost.

        The returned object stays the same until a use changes.
        """
        reader, records = self._checkpoint.known, self._register.snapshot.allocations
        held, named, unscanned = self.snapshot.held, reader.last.allocations, self._unscanned
        # Each grant changes the register's records, but only changed records of these allocations change the result.
        recorded: dict[RecordKey, AllocationRecord] = {}
        for holder in (*held, *named, *unscanned):
            if (record := records.get(holder[2:])) is not None:
                recorded[holder[2:]] = record
        where = self.observed, recorded, boot_id()
        seen = UnrecordedEvidence(held, named, reader.grants, self._copied, unscanned, *where)
        if seen != self._foreign[0]:
            uses = holders.unrecorded(seen, self.title)
            self._foreign = seen, uses if uses != self._foreign[1] else self._foreign[1]
        return self._foreign[1]

    def double_held(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the ids that several running pods certainly hold at once (kubernetes#137534), with the pods' names.

        An old checkpoint may name pods that have ended. If no checkpoint names a holder of an id, the pods may be
        possible holders (`holders.possible_holders`).
        """
        pods: dict[tuple[str, str], dict[str, None]] = {}
        named: set[RecordKey] = set()
        for allocation, holding in self.snapshot.held.items():
            key = allocation.resource, allocation.device_id
            if holding.named:
                named.add(key)
            if holding.certain and allocation.pod_uid in self._live:
                pods.setdefault(key, {})[self.title(allocation.pod_uid)] = None
        return {key: tuple(those) for key, those in pods.items() if len(those) > 1 and key in named}

    def unnamed_reasons(self, resource: str) -> Mapping[str, str]:
        """Return, for each id that counts as held although the kubelet may allocate it again, the reason."""
        snapshot = self.snapshot
        reasons = {device_id: why for (of, device_id), why in list(self._refused.items()) if of == resource}
        for device_id in snapshot.unnamed(resource):
            for allocation, holding in snapshot.of(resource)[device_id].items():
                if holding.certain:
                    reasons[device_id] = f"{holding.reason} (pod {self.title(allocation.pod_uid)})"
        return reasons

    async def scan(self, wanted: Collection[tuple[str, str]] = ()) -> HolderSnapshot | None:
        """Read the evidence, and return the holders; None if an Allocate ran whose grant the evidence may lack.

        wanted: the (resource, device id) pairs for which a caller waits until they have no holder. The scan makes the
        kubelet write its checkpoint in three cases: a wanted id has no holder with running processes; the processes of
        a holder have ended; or, periodically, a holder has had no processes yet.
        """
        await self.in_flight.wait()
        at, kubelet = time.monotonic(), self._kubelet
        unscanned = self._unscanned
        before = seen = await self.looks.at("evidence", self._read, timeout=LONG)
        report = await self._list() if self._wants_claim_uses else None
        now = holders.holders(self._known(), seen, at)
        if asked := self._requests.due(now, seen.pods, wanted):
            report = report or await self._list()
            written, self._unanswered = await self._checkpoint.written()
            seen = await self.looks.at("evidence", self._read, written, self._unanswered, timeout=LONG)
            if report is not None:  # The kubelet has answered `List`, and so has dropped the ended pods.
                seen = self._with_hidden(before.pods, seen)
            now = holders.holders(self._known() | now.held.keys(), seen, at)
        all_pods_listed, listed = self.all_pods_listed, None
        if report is not None:
            look = seen.pods if asked else await self.looks.at("evidence", self.pods.read, timeout=LONG)
            listed = await self._listed(report, look.may_be_ours)
            all_pods_listed = look.running is not None and look.may_be_ours == listed and (look.whole or bool(listed))
        if not self.in_flight.none_since(at):
            return None
        self.claim_uses = self.claim_uses if report is None else report.claims
        self.all_pods_listed = all_pods_listed
        pods = frozenset(allocation.pod_uid for allocation in now.held)
        self._live = frozenset(filter(seen.pods.may_run, pods))
        self._begun = pods & (self._begun | (before.pods.running or frozenset()))
        self.unknown.update(holders.unknown(now.held, seen, asked=asked))
        await self.names.update(pods)
        # Evidence of a former kubelet does not show which pods the present kubelet has admitted.
        current = kubelet == self._kubelet
        now = replace(now, active=self._active(now, listed, asked=asked) if current else self.snapshot.active)
        if self._refused:
            # If an active pod's id was refused to another pod, the kubelet may choose the id again for the next pod.
            unnamed = {allocation[2:] for allocation, of in now.held.items() if of.certain and not of.named}
            self._refused = {key: why for key, why in self._refused.items() if key in unnamed}
        self.snapshot = now
        self._unscanned -= unscanned
        if self._copied:
            self._copied = {one: self._copied[one] for one in self._copied.keys() & self._known()}
        self.read_at = self.read_at if now.registered is None else at
        self._note_problem(seen)
        return now

    def _active(self, now: HolderSnapshot, listed: frozenset[str] | None, *, asked: bool) -> frozenset[str]:
        """Return the pods that the kubelet counts as active, or may still have to admit again after its restart.

        listed: the pods in the present kubelet's response to `List`; None without a response. A kubelet that lists no
        pod has not got its pods from the API server yet. asked: whether the scan has called `List`.
        """
        for allocation, holding in now.held.items():
            if holding.named or (listed and allocation.pod_uid in listed):
                self._returning -= {allocation.pod_uid}
        if listed:
            self._admitting_since = now.at if self._admitting_since is None else self._admitting_since
            if now.at - self._admitting_since >= READMISSION:
                self._returning = frozenset()
        if listed is None and not asked:
            return self.snapshot.active
        return self._returning | (listed or frozenset())

    def _with_hidden(self, before: PodProcesses, seen: HolderEvidence) -> HolderEvidence:
        """Mark, in the evidence, running pods whose cgroups are not visible.

        before: the result of the read of the cgroups before the checkpoints were written.
        """
        if not seen.current:
            return seen
        named = [{allocation.pod_uid for allocation in version.allocations} for version in seen.checkpoints]
        found = pod_evidence.hidden(before, set.intersection(*named) - self._former, seen.pods)
        return replace(seen, pods=self.pods.hide(seen.pods, found)) if found else seen

    def _note_problem(self, seen: HolderEvidence) -> None:
        """Store a message about pods whose cgroups are not visible; log it if the last scan had no such message."""
        titles = {uid: self.title(uid) for uid in seen.pods.shown.hidden}
        problem = pod_evidence.problem(seen.pods, str(self.pods.cgroups), titles)
        if problem and not self.problems:  # A changed text is not logged again, because the pods in it change often.
            _LOG.warning("%s", problem)
        self.problems = tuple(filter(None, [problem]))

    def _read(self, written: Sequence[CheckpointVersion] = (), problem: str = "") -> HolderEvidence:
        """Read the checkpoint, then the cgroups. written, problem: the result of `CheckpointReader.written`."""
        read = list(written)
        if written:
            self._checkpoint.take(written)
        else:
            try:
                read.append(self._checkpoint.newest(nodes=True))
                problem = problem or self._unanswered or "the kubelet has not been asked for a newer checkpoint"
            except CheckpointError as error:
                problem = "; ".join(filter(None, (str(error), problem)))
        grants = holders.pending_grants(read, self._register.snapshot.allocations, self._checkpoint.known.grants)
        pods = self.pods.read({allocation.pod_uid for version in read for allocation in version.allocations})
        return HolderEvidence(read, bool(written), pods, problem, self._ended_containers(read, pods), *grants)

    async def _list(self) -> PodResourcesReport | None:
        report = await self.pod_resources.list()
        if report is not None and self._in_one_root and not self.pods.is_in_kubelets_root:
            await self.looks.at("evidence", self.pods.answered)
        return report

    async def _listed(self, report: PodResourcesReport, running: Collection[str]) -> frozenset[str]:
        names = await self.names.now(running)
        # If two running pods have the same name, one of them was deleted by force. The response does not show which of
        # the two is active, so neither counts.
        counts = Counter(names.values())
        return frozenset(uid for uid, name in names.items() if name in report.pods and counts[name] == 1)
