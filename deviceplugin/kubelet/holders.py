"""Decides from evidence which allocations still hold devices. No other module makes this decision. Pure functions.

An allocation ends on two conditions: checkpoints that the kubelet wrote at the agent's requests do not name the
allocation, and no process of its pod can run any more. If evidence is missing, late or unreadable, the state of an
allocation is "unknown"; an unknown allocation counts as held. PodResources `List` is no evidence for this decision
(`deviceplugin.kubelet.podresources` says why).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deviceplugin.identity import UNIDENTIFIED, Tokens
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.checkpoint import CheckpointVersion, ours
from deviceplugin.kubelet.pod_evidence import SHOWN, PodsShown
from deviceplugin.kubelet.pod_names import PodLogs
from deviceplugin.register.question import Use, Wanted, allocation_unit, part_of, takes_recorded
from deviceplugin.register.records import UNKNOWN, Allocation, AllocationRecord, RecordKey
from deviceplugin.register.rules import KubeletSnapshot, ObservedAllocation

CLOCK_STEP: Final = 1.0
"""Maximum seconds by which a log directory made after a grant may seem older than the grant, if the clock was set."""


class EvidenceSource(enum.Enum):
    """The kinds of evidence about the holders of devices. The enum's values are values of a metric's label."""

    CHECKPOINT = "checkpoint"
    CGROUPS = "cgroups"
    POD_DIRECTORIES = "pod_directories"
    CLAIM_STATE = "claim_state"
    CLAIM_FILES = "claim_files"
    API_SERVER = "api_server"


class HoldReason(NamedTuple):
    """The reason why an allocation counts as held.

    named: whether the kubelet's checkpoint names the allocation. certain: False if an old checkpoint is the only
    evidence that the allocation is held. begun: whether the AllocateResponse in the checkpoint shows that the
    allocation is the id's last grant, whose container was not known before.
    """

    named: bool
    certain: bool
    reason: str
    begun: bool = False


@dataclass(frozen=True, slots=True)
class HolderEvidence:
    """The evidence of one scan.

    checkpoints: the checkpoint files that were read; empty if none was readable. current: whether the kubelet wrote the
    checkpoints after the agent's own request, and `shows_present` is true for them. problem: why no checkpoint was
    read, or why the checkpoints are not current. ended: the allocations that no checkpoint names, and whose containers
    have ended in pods that still run. begun, replaced: see `PendingGrants`.
    """

    checkpoints: Sequence[CheckpointVersion]
    current: bool
    pods: PodProcesses
    problem: str = ""
    ended: frozenset[Allocation] = frozenset()
    begun: frozenset[Allocation] = frozenset()
    replaced: frozenset[Allocation] = frozenset()


@dataclass(frozen=True)
class HolderSnapshot:
    """The allocations that counted as held at one moment.

    at: the time at which the reading of the evidence began (monotonic seconds). current: whether the checkpoints are
    new enough to prove that an allocation which they do not name has ended. held: the allocations that count as held.
    registered: for each resource, the ids that are healthy in any of the checkpoints; None if no checkpoint was
    readable. problem: why the checkpoint is missing or not current; "" if neither. shown: the facts about pods from all
    reads of cgroups and pod directories until that moment. active: the UIDs of pods that the kubelet counts as active,
    or that a restarted kubelet may still have to admit again.
    """

    at: float = 0.0
    current: bool = False
    held: Mapping[Allocation, HoldReason] = field(default_factory=dict)
    registered: Mapping[str, frozenset[str]] | None = None
    problem: str = ""
    shown: PodsShown = SHOWN
    active: frozenset[str] = frozenset()

    @functools.cached_property
    def _by_resource(self) -> Mapping[str, Mapping[str, Mapping[Allocation, HoldReason]]]:
        held: dict[str, dict[str, dict[Allocation, HoldReason]]] = {}
        for allocation, holding in self.held.items():
            held.setdefault(allocation.resource, {}).setdefault(allocation.device_id, {})[allocation] = holding
        return held

    def of(self, resource: str) -> Mapping[str, Mapping[Allocation, HoldReason]]:
        """Return, for each held device id of one resource, the allocations of this id that count as held."""
        return self._by_resource.get(resource, {})

    def unnamed(self, resource: str) -> frozenset[str]:
        """Return the ids that certainly have a holder although the kubelet does not count this holder.

        No checkpoint names a holder of such an id, and the holder's pod is not active. The scheduler would send a new
        pod for the id, and the agent would refuse this pod's Allocate. So the id is reported as unhealthy.

        A holder that no checkpoint names and that has no processes has probably ended, so its id is not in the result.
        If such an id were reported as unhealthy until its holder has provably ended, new pods would fail.

        If no checkpoint names an active pod, the kubelet has lost its checkpoint since the grant. The scheduler still
        counts the pod's request. If the pod's id were reported as unhealthy, the node would have too little capacity
        when a restarted kubelet admits the pod again, and the kubelet would end the pod. Before the id's next grant,
        the agent reads the holder's processes again.
        """
        unnamed: set[str] = set()
        for device_id, holding in self.of(resource).items():
            dropped, named = False, False
            for allocation, reason in holding.items():
                named = named or reason.named
                dropped = dropped or (reason.certain and allocation.pod_uid not in self.active)
            if dropped and not named:
                unnamed.add(device_id)
        return frozenset(unnamed)


def holders(before: Iterable[Allocation], seen: HolderEvidence, at: float = 0.0) -> HolderSnapshot:
    """Return the allocations that count as held.

    before: the allocations that counted as held until now. at: the time at which the reading of the evidence began
    (monotonic seconds).
    """
    current = seen.current and bool(seen.checkpoints)
    named: frozenset[Allocation] = frozenset().union(*(version.allocations for version in seen.checkpoints))
    held: dict[Allocation, HoldReason] = {}
    for allocation in sorted(named | frozenset(before)):
        runs = seen.pods.may_run(allocation.pod_uid) if allocation not in seen.ended else ""
        there = bool(runs) and seen.pods.has(allocation.pod_uid)
        if allocation in named:
            # If only some of the checkpoints name an allocation, the allocation may have ended.
            certain = there or (current and all(allocation in version.allocations for version in seen.checkpoints))
            begun = allocation in seen.begun
            held[allocation] = HoldReason(True, certain or begun, "the kubelet's checkpoint names it", begun)
        # The following reason does not depend on a newer checkpoint: while processes of the pod may run, no checkpoint
        # can prove that the allocation has ended.
        elif runs and seen.checkpoints:
            reason = f"the kubelet's checkpoint does not name it, but {runs}"
            held[allocation] = HoldReason(False, current or there, reason)
        elif not current and allocation not in seen.replaced:
            held[allocation] = HoldReason(False, there, f"not known: {seen.problem}")
    registered: dict[str, frozenset[str]] = {}
    for version in seen.checkpoints:
        for resource, ids in version.registered.items():
            registered[resource] = registered.get(resource, frozenset()) | ids
    return HolderSnapshot(at, current, held, registered if seen.checkpoints else None, seen.problem, seen.pods.shown)


class PendingGrants(NamedTuple):
    """The allocations for pending grants (grants without a known container) that the checkpoint shows.

    begun: the allocations that have these grants according to the AllocateResponses in the checkpoint. replaced: the
    earlier allocations of the same ids. The kubelet has dropped each of these earlier allocations that the checkpoint
    does not name, because the kubelet composed the checkpoint after the last grant.
    """

    begun: frozenset[Allocation]
    replaced: frozenset[Allocation]


def begun(
    grants: Mapping[Allocation, tuple[str, Wanted]], records: Mapping[RecordKey, AllocationRecord]
) -> frozenset[Allocation]:
    """Return the allocations whose AllocateResponse is that of a pending grant (with an unknown container).

    grants: for each allocation that a checkpoint named, the AllocateResponse and the grant in it. records: the
    register's records.
    """
    found: set[Allocation] = set()
    for allocation, (_, answer) in grants.items():
        record = records.get(allocation[2:])
        if record is not None and record.pending and answer.since == record.since:
            found.add(allocation)
    return frozenset(found)


def pending_grants(
    checkpoints: Iterable[CheckpointVersion],
    records: Mapping[RecordKey, AllocationRecord],
    grants: Mapping[Allocation, tuple[str, Wanted]],
) -> PendingGrants:
    """Return the allocations for pending grants (grants whose container is not known) that these checkpoints name.

    records: for each (resource, id), the register's record. grants: see `begun`.
    """
    named, replaced = begun(grants, records), set[Allocation]()
    named &= frozenset[Allocation]().union(*(version.allocations for version in checkpoints))
    for allocation in named:
        for holder in records[allocation[2:]].holders:
            replaced.add(Allocation(*holder, *allocation[2:]))
    return PendingGrants(named, frozenset(replaced))


def possible_holders(
    grants: Iterable[AllocationRecord],
    named: Iterable[Allocation],
    granted: Callable[[Allocation], Wanted | None],
    pods: Mapping[str, PodLogs],
) -> frozenset[Allocation]:
    """Return, as allocations, all containers that may hold pending grants which an earlier kubelet process requested.

    The container is "" if the containers of a pod are not known. A pod whose log directory is older than a grant does
    not hold the grant.

    grants: the pending grants. named: the allocations in the checkpoint, which may be another kubelet's or an old one.
    granted: a function that returns an allocation's grant from the AllocateResponse in the checkpoint. pods: for the
    UID of each pod that may run, the facts from the pod's log directory.
    """
    given: dict[RecordKey, list[Wanted | None]] = {}
    for allocation in named:
        given.setdefault(allocation[2:], []).append(granted(allocation))
    possible: set[Allocation] = set()
    for record in grants:
        key = record.resource, record.device_id
        # If an AllocateResponse lacks the time of the grant (as from an adopted plugin), it may be of the pending
        # grant.
        if any(answer is None or answer.since in (0.0, record.since) for answer in given.get(key, ())):
            continue
        for uid, logs in pods.items():
            if logs.changed >= record.since - CLOCK_STEP:
                possible.update(Allocation(uid, container, *key) for container in logs.containers or ("",))
    return frozenset(possible)


def unknown(held: Collection[Allocation], seen: HolderEvidence, *, asked: bool) -> frozenset[EvidenceSource]:
    """Return the kinds of evidence whose lack makes it unknown whether the allocations `held` have ended.

    asked: whether the agent requested a checkpoint when it read the evidence `seen`.
    """
    found = set()
    if not seen.checkpoints or (asked and not seen.current):
        found.add(EvidenceSource.CHECKPOINT)
    if any(seen.pods.is_unknown(allocation.pod_uid) for allocation in held):
        found.add(EvidenceSource.CGROUPS)
        if not (seen.pods.shown.directories and seen.pods.directories is not None) and not seen.pods.checkpoint_decides:
            found.add(EvidenceSource.POD_DIRECTORIES)
    return frozenset(found)


def running(
    allocations: Iterable[Allocation], resource: str, device_ids: Collection[str], pods: Collection[str]
) -> dict[str, str]:
    """Return, for each device id held by a pod that still has processes, the pod's UID.

    pods: the UIDs of all pods with processes.
    """
    return {
        allocation.device_id: allocation.pod_uid
        for allocation in of_ids(allocations, resource, device_ids)
        if allocation.pod_uid in pods
    }


def of_ids(allocations: Iterable[Allocation], resource: str, device_ids: Collection[str]) -> list[Allocation]:
    """Return the allocations of these device ids of the resource."""
    return [
        allocation
        for allocation in allocations
        if allocation.resource == resource and allocation.device_id in device_ids
    ]


def ended(allocations: Iterable[Allocation], pods: PodProcesses) -> frozenset[Allocation]:
    """Return the allocations of pods without processes.

    The caller must know that the kubelet has finished admitting these pods, because a pod has no processes before that.
    """
    return frozenset(allocation for allocation in allocations if not pods.may_run(allocation.pod_uid))


def claim_is_over(claim_uid: str, pod_uids: Iterable[str], named: Collection[str], pods: PodProcesses) -> bool:
    """Return whether a claim is unused on this node: the claim state does not name it, and its pods cannot run.

    named: the UIDs of the claims in the kubelet's claim state.
    """
    return claim_uid not in named and not any(pods.may_run(uid) for uid in pod_uids)


def needs_request(held: Mapping[Allocation, HoldReason], pods: PodProcesses) -> frozenset[Allocation]:
    """Return the allocations about which a newer checkpoint might give new evidence.

    Such a checkpoint might show that an allocation has ended, or that its pod runs without a visible cgroup.
    """

    def settled(uid: str) -> bool:
        return bool(pods.may_run(uid)) and not pods.is_undecided(uid)

    return frozenset(
        allocation for allocation, holding in held.items() if not (holding.named and settled(allocation.pod_uid))
    )


class UnrecordedEvidence(NamedTuple):
    """The input of `unrecorded`. Two inputs are equal if no evidence has changed between them.

    held: the allocations that count as held. named: the allocations in the checkpoint. answers: the grants in the
    AllocateResponses of the checkpoint. copied: the grants in other agents' copies of their allocations. unscanned: the
    allocations that appeared in a copy after the last scan. observed: the resources whose allocations the register has
    compared with evidence. records: the register's records of these allocations.
    """

    held: Mapping[Allocation, HoldReason]
    named: frozenset[Allocation]
    answers: Mapping[Allocation, tuple[str, Wanted]]
    copied: Mapping[Allocation, Wanted]
    unscanned: frozenset[Allocation]
    observed: frozenset[str]
    records: Mapping[tuple[str, str], AllocationRecord]
    boot: str


def grant_of(answer: Wanted | None, copied: Wanted | None) -> Wanted | None:
    """Return an allocation's grant, combined from the AllocateResponse and an agent's copy; None if neither has it.

    Only the copy has the further device nodes that the holder has been able to open since the grant.
    """
    if answer is None or copied is None:
        return answer or copied
    return answer._replace(identity=answer.identity.reaching(copied.identity))


def unrecorded(seen: UnrecordedEvidence, title: Callable[[str], str] = str) -> tuple[Use, ...]:
    """Return the uses of devices by allocations that are not in the register: of other plugins, or with lost records.

    title: a function that returns, for a pod's UID, the pod's name for messages.
    """
    allocations = sorted(seen.named.union(seen.held, seen.unscanned))
    # An AllocateResponse of another boot names the nodes of all devices of a container. So nodes of a recorded device
    # are left out of the other allocations of the container.
    recorded: dict[tuple[str, str], Tokens] = {}
    for allocation in allocations:
        if (record := seen.records.get(allocation[2:])) is not None:
            recorded[allocation[:2]] = recorded.get(allocation[:2], frozenset()) | record.identity.in_boot(seen.boot)
    uses = []
    for allocation in allocations:
        _, answer = seen.answers.get(allocation) or ("", None)
        if (what := grant_of(answer, seen.copied.get(allocation))) is None:
            continue
        is_recorded, tokens = allocation[2:] in seen.records, what.identity.in_boot(seen.boot)
        unit, who = allocation_unit(allocation.resource, allocation.device_id), f"pod {title(allocation.pod_uid)}"
        if ours(what) and not is_recorded:
            over = allocation.resource in seen.observed and allocation not in seen.unscanned
            if not over:
                now, part, takes = what.identity.valid_in(seen.boot), part_of(what.amount), takes_recorded(what.amount)
                uses.append(Use(unit, who, what.key, tokens, part, takes, now.reached, within=now.within))
        elif tokens and not (is_recorded and tokens <= recorded[allocation[:2]]):
            uses.append(Use(unit, who, None, tokens, None))
        record = seen.records.get(allocation[2:])
        known = record.identity.valid_in(seen.boot).reached if record is not None else frozenset()
        if not ours(what) and (opened := what.identity.valid_in(seen.boot).reached - known):
            # A node in the response of an adopted plugin did not exist at Allocate.
            uses.append(Use(unit, who, None, frozenset(), None, reached=opened))
    return tuple(uses)


def kubelet_snapshot(
    sequence: int,
    scan: HolderSnapshot,
    resource: str,
    device_of: Callable[[str], str],
    granted: Callable[[Allocation], Wanted | None] = lambda allocation: None,
    title: Callable[[str], str] = str,
) -> KubeletSnapshot:
    """Return the part of a scan's result that is about one resource, as input of the register.

    sequence: the register's sequence before the scan. device_of: a function that returns the device of an id that the
    kubelet knows. granted: a function that returns an allocation's grant from the AllocateResponse in the checkpoint.
    title: a function that returns, for a pod's UID, the pod's name for messages.
    """
    registered = (scan.registered or {}).get(resource, frozenset())
    held = {}
    for device_id, allocations in scan.of(resource).items():
        # Messages about the id name its most certain holder. They give no reason if the checkpoint names this holder.
        shown, holding = min(allocations.items(), key=lambda item: (not item[1].certain, item[0]))
        answer = granted(shown) or Wanted((resource, ""), UNIDENTIFIED, UNKNOWN)
        held[device_id] = ObservedAllocation(
            answer.key[1] or device_of(device_id),
            title(shown.pod_uid),
            any(each.certain for each in allocations.values()),
            frozenset((allocation.pod_uid, allocation.container) for allocation in allocations),
            "" if holding.named else holding.reason,
            answer.identity,
            answer.amount,
            scan.registered is not None and not any(each.named and each.certain for each in allocations.values()),
            scan.shown.of({allocation.pod_uid for allocation in allocations}),
            any(each.begun for each in allocations.values()),
        )
    ids = frozenset(map(device_of, registered))
    return KubeletSnapshot(sequence, scan.at, scan.current, held, ids, scan.problem)
