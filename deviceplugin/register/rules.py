"""Decides whether an Allocate, a Prepare, or the end of a move between plugin and DRA is permitted. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from deviceplugin.exclusion import DeviceKey
from deviceplugin.identity import UNIDENTIFIED, Identity
from deviceplugin.register.question import HOOK, RELEASE, Use, View, Wanted, claim_unit, refusal, wanted_use
from deviceplugin.register.records import (
    NONE,
    UNKNOWN,
    AllocationRecord,
    Amount,
    Claim,
    ClaimDevice,
    ContainerKey,
    Decision,
    DeviceRecord,
    Outlook,
    RecordKey,
    RegisterSnapshot,
    State,
)

WELL_APART: Final = 3.0
"""A grant counts as ended after two kubelet checkpoints without its id, with at least this number of seconds between.

The kubelet records an allocation some microseconds after the agent's AllocateResponse, and then writes its checkpoint
at once (kubelet 1.36, devicemanager/manager.go: allocateContainerResources). But on a busy node the goroutine that
records the allocation may not run for a second. The kubelet writes both checkpoints at requests of the agent, so other
goroutines of the kubelet ran between the two.
"""


@dataclass(frozen=True, slots=True)
class MoveWait:
    """The event for which the move of a device between plugin and DRA waits. text: the event, for messages.

    on_holder: True if the move waits for the end of a holder, which may run for long; False if the move waits for new
    evidence, which arrives soon. pod: the namespace/name of the holder if it is a pod with a known name, else "".
    claim: the namespace/name of the holder if it is a claim with a known name, else "".
    """

    text: str
    on_holder: bool = False
    pod: str = ""
    claim: str = ""

    @staticmethod
    def for_pod(pod: str) -> MoveWait:
        """Return a wait (`MoveWait`) for the end of a pod. pod: the pod's namespace/name or UID, "" if unknown."""
        return MoveWait(f"pod {pod}" if pod else "its pod", on_holder=True, pod=pod)

    @staticmethod
    def for_claim(claim: str) -> MoveWait:
        """Return a wait (`MoveWait`) for the end of a claim. claim: the claim's namespace/name."""
        return MoveWait(f"claim {claim}", on_holder=True, claim=claim)


@dataclass(frozen=True, slots=True)
class ObservedAllocation:
    """A kubelet device id that containers hold according to the kubelet's checkpoint and the pods' cgroups.

    pod: the name of one pod that holds the id, for messages. sure: False if an old checkpoint is the only evidence of
    the holder; the id then counts as held, but does not prove that the register is wrong. reason: why the id counts as
    held, for messages. identity, amount: the device's identity and the granted part, if the checkpoint has the
    AllocateResponse. ending, shown: as in `AllocationRecord`. begun: whether the checkpoint names the container of the
    id's last grant.
    """

    device: str
    pod: str
    sure: bool = True
    holders: frozenset[ContainerKey] = frozenset()
    reason: str = ""
    identity: Identity = UNIDENTIFIED
    amount: Amount = UNKNOWN
    ending: bool = False
    shown: frozenset[tuple[str, str]] = frozenset()
    begun: bool = False


@dataclass(frozen=True, slots=True)
class KubeletSnapshot:
    """The ids of one resource that containers hold, according to the kubelet's checkpoint and the pods' cgroups.

    sequence: the register's sequence before the evidence was read. at: the time at which the reading of the evidence
    began (monotonic seconds). current: whether the kubelet wrote the checkpoint after `at`, with no Allocate meanwhile.
    held: the ids that containers hold. registered: the ids that the kubelet counts as healthy. problem: why the
    snapshot is not current.
    """

    sequence: int
    at: float
    current: bool
    held: Mapping[str, ObservedAllocation] = field(default_factory=lambda: NONE)
    registered: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KubeletEvidence:
    """The evidence that is necessary to end a move to DRA. Times are monotonic seconds of one process.

    sequence: the register's sequence before any of the evidence was read. shown: for each device, the time at which
    ListAndWatch sent the device as Unhealthy. snapshot: the ids that containers hold. It proves that a device has no
    holder only if it was read after the device's time in `shown`.
    """

    sequence: int
    shown: Mapping[str, float]
    snapshot: KubeletSnapshot


@dataclass(frozen=True, slots=True)
class ClusterEvidence:
    """The evidence that is necessary to end a move to the plugin side. Times are monotonic seconds of one process.

    sequence: the register's sequence before any of the evidence was read. withdrawn: for each device, the time at which
    the API server accepted the slice without the device. listed_at: the time at which a consistent LIST of all claims
    began. allocated: for each device that a claim's allocation names, the claim's namespace/name, even if the claim is
    not prepared.
    """

    sequence: int
    withdrawn: Mapping[str, float]
    listed_at: float
    allocated: Mapping[str, str] = field(default_factory=lambda: NONE)


@dataclass(frozen=True, slots=True)
class ClaimEvidence:
    """A claim whose allocation names devices of this node, or that has files on this node.

    devices: the devices of one resource that the claim holds. prepared: whether the claim has files, or the kubelet
    counts the claim as prepared; namespace and name may then be unknown (""). pods: the known UIDs of the claim's pods.
    granted: those devices of the claim, of all resources, for which the evidence contains identity and amount.
    """

    driver: str
    uid: str
    devices: frozenset[str]
    prepared: bool
    namespace: str = ""
    name: str = ""
    pods: frozenset[str] = frozenset()
    granted: tuple[ClaimDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one resource's holders, read from the kubelet, the API server and files instead of the register.

    held: for each id that is held according to the kubelet's checkpoint, the allocation. claims: the claims of the API
    server, the kubelet's claim state and the agent's claim files, the most reliable origin first. current: whether the
    kubelet wrote the checkpoint at the agent's own request. If False, the absence of an id in `held` proves nothing.
    """

    held: Mapping[str, ObservedAllocation] = field(default_factory=lambda: NONE)
    claims: Sequence[ClaimEvidence] = ()
    current: bool = True

    @property
    def merged(self) -> list[ClaimEvidence]:
        """The claims, each with the combined facts of the API server, the kubelet's claim state and the claim files."""
        merged: dict[RecordKey, ClaimEvidence] = {}
        for claim in self.claims:
            key = claim.driver, claim.uid
            first = merged.get(key, claim)
            merged[key] = replace(
                first,
                devices=first.devices | claim.devices,
                prepared=first.prepared or claim.prepared,
                namespace=first.namespace or claim.namespace,
                name=first.name or claim.name,
                pods=first.pods | claim.pods,
                granted=added(first.granted, claim.granted),
            )
        return list(merged.values())


def added(recorded: tuple[ClaimDevice, ...], further: Iterable[ClaimDevice]) -> tuple[ClaimDevice, ...]:
    """Return a claim's recorded devices, plus the devices of `further` that are not recorded."""
    names = {(device.resource, device.device) for device in recorded}
    return (*recorded, *(device for device in further if (device.resource, device.device) not in names))


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a pod or a claim does not get a device. record: the device's record.

    holder: the pod that holds the device, for messages. moving: whether the device is moving to the requested side
    (plugin or DRA), so that a later request can succeed. unmoved: the resource that prevents the device's move because
    of `kept_by_limits`, else "". outlook: whether the refused claim may get its devices soon.
    """

    record: DeviceRecord
    holder: str = ""
    moving: bool = False
    unmoved: str = ""
    outlook: Outlook = Outlook.FINAL

    @property
    def message(self) -> str:
        """The refusal as a message: the device, its side (plugin or DRA), the time of its last move, and the holder."""
        record = self.record
        text = f"device {record.device!r} of {record.resource} is {record.state.text}"
        if record.since:  # `since` is 0 if the device has always had this state.
            text += f" since {_utc(record.since)}"
        if self.record.driver:
            text += f" (driver {self.record.driver})"
        if self.holder:
            text += f", held by {self.holder}"
        if self.moving:
            text += "; it is moving to the requested side, try again"
        if self.unmoved:
            ends = "a kubelet restart would end some of these pods"
            text += f"; it stays there while pods have devices of {self.unmoved} by limits on both sides: {ends}"
        return text


@dataclass(frozen=True, slots=True)
class Excluded:
    """The refusal of a device to a pod or claim, because other holders leave too little of the device.

    outlook: whether the refused claim may get its devices soon.
    """

    message: str
    outlook: Outlook = Outlook.FINAL


def served_by_limits(claim: Claim, resource: str) -> int:
    """Return how many devices of a resource a claim has for a pod's `limits`; 0 if a user created the claim."""
    return sum(device.limits and not device.admin and device.resource == resource for device in claim.devices)


def held_by_limits(now: RegisterSnapshot, resource: str) -> tuple[int, int]:
    """Return two counts: the devices of a resource that pods have by `limits` from the plugin, and from DRA."""
    return len(now.allocations_of(resource)), sum(served_by_limits(claim, resource) for claim in now.claims.values())


def kept_by_limits(now: RegisterSnapshot, devices: Iterable[RecordKey]) -> str:
    """Return a resource of these devices which must not move devices to DRA now; "" if there is none.

    No device of a resource moves while pods with `limits` have some devices of the resource from the plugin, and others
    from DRA. After a restart, the kubelet may need all remaining ids to admit its pods again, and this function does
    not know how many ids the kubelet needs. The claim that needs `devices` has no device yet, so it does not count.
    """
    leaving = sorted({of for of, device in devices if now.device(of, device).state is State.PLUGIN})
    return next((of for of in leaving if all(held_by_limits(now, of))), "")


def allocate_refusal(now: RegisterSnapshot, resource: str, device: str) -> Refused | None:
    """Return why a device's state forbids an Allocate; None in the states PLUGIN and TO_DRA, which permit it."""
    record = now.device(resource, device)
    return None if record.state.allocates else Refused(record, moving=record.state is State.TO_PLUGIN)


def prepare_refusal(now: RegisterSnapshot, driver: str, resource: str, device: str) -> Refused | None:
    """Return why a Prepare is refused because of the device's state or driver, or because a pod holds the device.

    The result is None if the state is DRA or TO_PLUGIN, the driver publishes the device, and no pod holds the device.
    """
    record = now.device(resource, device)
    pods = now.allocations_on(resource, (device,)) if (resource, device) in now.index else ()
    holder = pods[0].pod or "a pod" if pods else ""
    if record.state.prepares and record.driver in ("", driver):
        return Refused(record, holder) if holder else None
    return Refused(record, holder, record.state is State.TO_DRA and record.driver in ("", driver))


def other_parameters(now: RegisterSnapshot, claim: Claim) -> str:
    """Return an error if another request or claim has a device of this claim with other parameters; else ""."""
    for device in claim.devices:
        name = device.resource, device.device
        others = now.claims_on(name[0], name[1:]) if name in now.index and not device.admin else ()
        for other in (claim, *others):
            if other is not claim and (other.driver, other.uid) == (claim.driver, claim.uid):
                continue  # `other` is the record of the claim itself.
            for theirs in other.devices:
                same = (theirs.resource, theirs.device, theirs.admin) == (device.resource, device.device, device.admin)
                if same and theirs.parameters != device.parameters:
                    what = f"device {device.device!r} of {device.resource} is shared with claim"
                    how = "has it with other parameters" if theirs.parameters else "may have it with other parameters"
                    return f"{what} {other.title}, which {how}"
    return ""


def to_dra_waits_for(now: RegisterSnapshot, record: DeviceRecord, evidence: KubeletEvidence) -> MoveWait | None:
    """Return the event for which the end of a move to DRA still waits; None if the move can end."""
    shown = evidence.shown.get(record.device)
    seen = evidence.snapshot
    if evidence.sequence < record.sequence:
        return MoveWait("evidence read after the move began")
    if shown is None:
        return MoveWait("ListAndWatch to show it Unhealthy")
    for held in seen.held.values():
        if held.device == record.device:
            text = f"pod {held.pod} ({held.reason})" if held.reason else f"pod {held.pod}"
            return MoveWait(text, on_holder=held.sure, pod=held.pod)
    if not seen.current:
        return MoveWait(f"a checkpoint that the kubelet has written since ({seen.problem or 'not requested yet'})")
    if seen.at < shown or record.device in seen.registered:
        return MoveWait("the kubelet to acknowledge that it is Unhealthy")
    if seen.sequence < evidence.sequence:
        return MoveWait("a snapshot of the kubelet's holders")
    for allocation in now.allocations_on(record.resource, (record.device,)):
        if allocation.pod:
            return MoveWait.for_pod(allocation.pod)
        return MoveWait(f"the pod it was allocated to at {_utc(allocation.since)}")
    return None


def to_plugin_waits_for(now: RegisterSnapshot, record: DeviceRecord, evidence: ClusterEvidence) -> MoveWait | None:
    """Return the event for which the end of a move to the plugin side still waits; None if the move can end."""
    accepted = evidence.withdrawn.get(record.device)
    if evidence.sequence < record.sequence:
        return MoveWait("evidence read after the move began")
    if accepted is None:
        return MoveWait("the API server to accept the slice without it")
    if evidence.listed_at < accepted:
        return MoveWait("a list of claims")
    if record.device in evidence.allocated:
        return MoveWait.for_claim(evidence.allocated[record.device])
    for claim in now.claims_on(record.resource, (record.device,)):
        return MoveWait.for_claim(claim.title)
    return None


def grant_is_over(record: AllocationRecord, snapshot: KubeletSnapshot) -> bool:
    """Return whether a grant has ended although no checkpoint has ever named its pod.

    One checkpoint without the id is not enough, because the kubelet may not have recorded the pod yet. So two
    checkpoints without the id are needed, requested with at least WELL_APART seconds between them.
    """
    return snapshot.current and record.absent_since is not None and snapshot.at - record.absent_since >= WELL_APART


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The next functions decide whether a claim that was refused its devices may get them soon.


def with_outlook(
    decision: Decision[Refused | Excluded], state: RegisterSnapshot, claim: Claim, view: View
) -> Decision[Claim | Refused | Excluded]:
    """Return the refusal with its `outlook` (whether the claim may get its devices soon)."""
    seen = outlook(state.with_changes(decision.changes, state.sequence + 1), claim, view)
    # If `outlook` returns FREE for a refused claim, the refusal gets the outlook FINAL. For example, the claim's device
    # has no holder, but cannot move to DRA because pods have devices by `limits` both from the plugin and from DRA.
    return replace(decision, answer=replace(decision.answer, outlook=seen if seen.waits else Outlook.FINAL))


def outlook(state: RegisterSnapshot, claim: Claim, view: View) -> Outlook:
    """Return whether a claim may get its devices soon. claim: the record that a grant to the claim would make.

    A holder is about to end in these cases:

    - The holder is a claim of the same driver. The scheduler allocates a device to a claim only if all other allocated
      claims leave enough of the device. So the holding claim was deallocated or deleted at the API server, for example
      after its pod was deleted by force.
    - The holder is a pod with `limits` that the kubelet's checkpoint does not name any more, or whose processes have
      ended.
    - The holder is the pod of a grant, but the pod is not known yet. The kubelet may have rejected this pod.
    - The holder is a hook that still runs after its timeout, or a failed `released`, which the agent calls again.

    A pod with `limits` that is being deleted does not count as about to end while the kubelet counts the pod as active.
    """
    sides = {_of_side(state, claim.driver, key) for key in claim.held}
    for worst in (Outlook.FINAL, Outlook.ENDING, Outlook.MOVING):
        if worst in sides:
            return worst
    unit = claim_unit(claim.driver, claim.uid)
    devices = (device for device in claim.devices if not device.admin)
    wanted = [
        wanted_use(unit, Wanted((device.resource, device.device), device.identity, device.amount), view)
        for device in devices
    ]
    if not refusal(wanted, state, view):
        return Outlook.FREE

    def ends(use: Use) -> bool:
        allocation = state.allocations.get((use.unit[1], use.unit[2])) if use.unit[0] == "id" else None
        of_driver = use.unit[:2] == ("claim", claim.driver) and use.key in claim.held
        return of_driver or use.unit[0] in (HOOK, RELEASE) or (allocation is not None and _ends(allocation))

    return Outlook.FINAL if refusal(wanted, state, view, own=ends) else Outlook.ENDING


def _of_side(state: RegisterSnapshot, driver: str, key: DeviceKey) -> Outlook:
    """Return whether a claim may get a device soon, decided from the device's state and its holders."""
    record, resource, device = state.device(*key), *key
    allocations = state.allocations_on(resource, (device,))
    if record.state is State.QUARANTINED or record.driver not in ("", driver) or not all(map(_ends, allocations)):
        return Outlook.FINAL
    if allocations:
        return Outlook.ENDING
    return Outlook.MOVING if record.state is State.TO_DRA else Outlook.FREE


def _ends(allocation: AllocationRecord) -> bool:
    return allocation.pending or allocation.ending
