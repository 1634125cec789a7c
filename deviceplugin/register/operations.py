"""The operations of the register: pure functions of the register's snapshot that return a result and changed records.

A caller omits the argument `state` and gets an `Operation`. `Store.do` calls the operation with the snapshot, perhaps
in another thread, so the caller must not change the arguments afterwards. In all functions, `devices` are ids of
physical devices, and `now` is the present time in Unix seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Concatenate, Final, ParamSpec, TypeVar

from deviceplugin.register import rules
from deviceplugin.register.question import Use, View, Wanted, claim_unit, larger, refusal, wanted_use
from deviceplugin.register.records import (
    NONE,
    AllocationRecord,
    Change,
    Claim,
    ClaimDevice,
    Decision,
    DeviceRecord,
    EndedClaim,
    FormerGrant,
    Operation,
    RecordKey,
    RegisterSnapshot,
    Setting,
    Side,
    State,
)
from deviceplugin.sharing import device_of

_P = ParamSpec("_P")
_T = TypeVar("_T")

KEEP_ENDED: Final = 1024
"""Maximum number of unprepared claims to remember. The kubelet's claim state no longer names older claims."""

_TURNED: Final = {
    State.PLUGIN: State.TO_DRA,
    State.TO_DRA: State.PLUGIN,
    State.DRA: State.TO_PLUGIN,
    State.TO_PLUGIN: State.DRA,
}
"""For each state on a side, the state that begins a move to the other side. For each moving state, the state before."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The result of `observe`: the ids whose allocations ended, the newly found ids, and the quarantined devices."""

    released: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of completing moves (`commit_to_dra`, `commit_to_plugin`).

    devices: the devices that have moved. waiting: for each other device, the event for which its move waits.
    """

    devices: tuple[str, ...] = ()
    waiting: Mapping[str, rules.MoveWait] = field(default_factory=lambda: NONE)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of `reconcile_evidence` for a resource. changed: the new state of each changed device.

    uncertain: the devices that may have a holder (a pod or a claim) which the register does not know. An uncertain
    device must not be offered until newer evidence excludes such a holder.
    """

    changed: Mapping[str, State]
    uncertain: tuple[str, ...] = ()


def _operation(decide: Callable[Concatenate[RegisterSnapshot, _P], Decision[_T]]) -> Callable[_P, Operation[_T]]:
    """Convert a function of (snapshot, arguments) to a function of (arguments) that returns an operation."""

    @functools.wraps(decide)
    def with_arguments(*args: _P.args, **kwargs: _P.kwargs) -> Operation[_T]:
        return lambda state: decide(state, *args, **kwargs)

    return with_arguments


@_operation
def forget(state: RegisterSnapshot, resource: str, devices: Collection[str]) -> Decision[tuple[str, ...]]:
    """Remove the records of devices that no longer exist, except devices with holders; return the removed ids."""
    gone = tuple(
        device
        for device in dict.fromkeys(devices)
        if (resource, device) in state.devices and not _is_held(state, resource, device)
    )
    return Decision(gone, tuple(Change("devices", (resource, device), None) for device in gone))


@_operation
def grant(
    state: RegisterSnapshot, resource: str, wanted: Mapping[str, Wanted], view: View, now: float
) -> Decision[rules.Refused | rules.Excluded | None]:
    """Grant all requested devices to a container, or none of them.

    The result is None if the devices are granted, else the refusal. Devices on the DRA side, and devices of other
    holders, are refused. wanted: for each kubelet device id (the id of a replica, or of the device itself), the
    requested device. An id that was granted before can be granted again, because the kubelet does not tell the plugin
    when a container's allocation ends.
    """
    new: list[Use] = []
    for device_id, requested in wanted.items():
        if (refused := rules.allocate_refusal(state, resource, requested.key[1])) is not None:
            return Decision(refused)
        new.append(wanted_use(("id", resource, device_id), requested, view))
    if why := refusal(new, state, view):
        return Decision(rules.Excluded(why))
    changes = []
    for device_id, requested in wanted.items():
        given = resource, device_id, requested.key[1], now, state.sequence + 1
        before = state.allocations.get((resource, device_id))
        if before is None:
            record = AllocationRecord(*given, identity=requested.identity, amount=requested.amount)
        else:
            record = AllocationRecord(*given, before.holders, pod=before.pod, shown=before.shown, former=before.former)
            record = _granted_anew(record, before, requested)
        changes.append(_put_allocation(record))
    return Decision(None, tuple(changes))


def _granted_anew(record: AllocationRecord, before: AllocationRecord, requested: Wanted) -> AllocationRecord:
    """Return an id's record after a new grant.

    Former holders stay in the record until evidence shows that they have ended. If no checkpoint has named the
    container of the previous grant, each container that a later checkpoint names counts as possible holder of that
    grant.
    """
    identity, amount = requested.identity if requested.identity.tokens else before.identity, requested.amount
    if before.pending:
        identity, amount = identity.reaching(before.identity), larger(before.amount, amount)
    elif (identity, amount) != (before.identity, before.amount):
        record = replace(record, former=(*record.former, FormerGrant(before.holders, before.identity, before.amount)))
    return replace(record, identity=identity, amount=amount)


@_operation
def observe(state: RegisterSnapshot, resource: str, snapshot: rules.KubeletSnapshot, now: float) -> Decision[Observed]:
    """Compare the allocations of a resource with a scan of the kubelet's checkpoint and of the pods' cgroups.

    An allocation ends when its id has no holder left, and no grant of the id waits for a checkpoint that names its
    container. A held id without a record is recorded as an allocation. If the device of such an id is on the DRA side,
    the evidence contradicts the register, and the device is quarantined.
    """
    changes: list[Change] = []
    released: list[str] = []
    for key, record in state.allocations.items():
        if record.resource != resource or snapshot.sequence < record.sequence:
            continue  # The evidence is older than the id's last grant.
        after = _observed(record, snapshot)
        if after is None:
            released.append(record.device_id)
            changes.append(Change("allocations", key, None))
        elif after != record:
            stored = replace(after, absent_since=record.absent_since, pod=record.pod, ending=record.ending)
            changes.append(_put_allocation(after, durable=stored != record))
    added: list[str] = []
    quarantined: dict[str, None] = {}
    for device_id, observed in snapshot.held.items():
        at = state.state(resource, observed.device)
        if (resource, device_id) in state.allocations or (at.prepares and not observed.sure):
            continue
        added.append(device_id)
        changes.append(_found(state, resource, device_id, observed, now))
        if at.prepares and observed.device not in quarantined:
            quarantined[observed.device] = None
            reason = f"{at.text}, but the kubelet says that pod {observed.pod} holds it"
            changes += _moved(state, resource, {observed.device: State.QUARANTINED}, now, reason)
    return Decision(Observed(tuple(released), tuple(added), tuple(quarantined)), tuple(changes))


@_operation
def observe_all(
    state: RegisterSnapshot, seen: Mapping[str, rules.KubeletSnapshot], now: float
) -> Decision[Mapping[str, Observed]]:
    """Execute `observe` for each resource of a scan. seen: the scan's result for each resource."""
    decisions = {resource: observe(resource, snapshot, now)(state) for resource, snapshot in seen.items()}
    changes = [change for decision in decisions.values() for change in decision.changes]
    return Decision({resource: decision.answer for resource, decision in decisions.items()}, tuple(changes))


@_operation
def add_holders(state: RegisterSnapshot, holders: Iterable[tuple[str, str, str, str]], now: float) -> Decision[None]:
    """Record containers that may still run as holders. holders: each as (pod UID, container, resource, kubelet id)."""
    records: dict[RecordKey, AllocationRecord] = {}
    for pod_uid, container, resource, device_id in holders:
        key = resource, device_id
        record = records.get(key) or state.allocations.get(key)
        if record is None:
            record = AllocationRecord(
                resource, device_id, device_of(device_id, 2), now, state.sequence + 1, pending=False
            )
        records[key] = replace(record, holders=record.holders | {(pod_uid, container)})
    return Decision(
        None, tuple(_put_allocation(after) for key, after in records.items() if state.allocations.get(key) != after)
    )


def _observed(record: AllocationRecord, snapshot: rules.KubeletSnapshot) -> AllocationRecord | None:
    """Return an allocation's record, updated from the evidence; None if the allocation has ended."""
    observed = snapshot.held.get(record.device_id) or rules.ObservedAllocation(record.device, record.pod, sure=False)
    record = replace(record, pod=observed.pod, ending=observed.ending)
    if observed.device != record.device and not record.amount.part:
        # The recorded device was derived from the id alone, because the source had not listed the device yet.
        record = replace(record, device=observed.device)
    if observed.identity.says_more_than(record.identity):
        record = replace(record, identity=observed.identity)
    if not record.amount.part and observed.amount.part:
        record = replace(record, amount=observed.amount)
    holders = observed.holders
    named = observed.begun or (observed.sure and not holders <= record.holders)
    # If only an old checkpoint names a container, the container may have ended before the last grant.
    if record.pending and not named:
        holders &= record.holders
    shown = observed.shown.union(one for one in record.shown if one[0] not in dict(observed.shown))
    former = tuple(one for one in record.former if not one.holders.isdisjoint(holders))
    record = replace(record, shown=frozenset(one for one in shown if one[0] in dict(holders)), former=former)
    if record.pending and not named and not rules.grant_is_over(record, snapshot):
        absent = snapshot.at if record.absent_since is None and snapshot.current else record.absent_since
        return replace(record, holders=holders, absent_since=absent)
    return replace(record, holders=holders, pending=False, absent_since=None) if holders else None


@_operation
def reserve(
    state: RegisterSnapshot,
    claim: Claim,
    view: View,
    *,
    durable: bool,
    move_idle: bool = False,
    along: Collection[RecordKey] = (),
) -> Decision[Claim | rules.Refused | rules.Excluded]:
    """Reserve a claim's free devices while the claim's driver sets them up. `prepare` completes the grant.

    The operation's result is the claim's record if the register has one already (a record whose `result` is None is
    only a reservation), else the reservation. durable: whether the reservation is written to disk, so that an Unprepare
    after a crash can undo the setup of the devices. move_idle: whether the operation begins to move the claim's idle
    devices to DRA if it refuses the claim. along: other devices that must move together with the claim's devices.
    """
    recorded = state.claims.get((claim.driver, claim.uid))
    if recorded is not None and (
        recorded.result is not None or (recorded.durable, recorded.devices) == (durable, claim.devices)
    ):
        return Decision(recorded)
    durable = durable or (recorded is not None and recorded.durable)
    return _take(state, replace(claim, result=None, durable=durable), view, move_idle=move_idle, along=along)


@_operation
def prepare(
    state: RegisterSnapshot, claim: Claim, view: View, *, move_idle: bool = False, along: Collection[RecordKey] = ()
) -> Decision[Claim | rules.Refused | rules.Excluded]:
    """Grant a claim its devices until the claim is unprepared.

    The operation's result for an already prepared claim is the existing record. Devices with administrative access are
    not held, and may be on any side. claim: the claim's record with the Prepare response, so that a repeated Prepare
    gets the same response after a restart of the agent. move_idle, along: see `reserve`.
    """
    recorded = state.claims.get((claim.driver, claim.uid))
    if recorded is not None and recorded.result is not None:
        return Decision(recorded)
    return _take(state, replace(claim, durable=True), view, move_idle=move_idle, along=along)


def _take(
    state: RegisterSnapshot, claim: Claim, view: View, *, move_idle: bool, along: Collection[RecordKey]
) -> Decision[Claim | rules.Refused | rules.Excluded]:
    unit, uses = claim_unit(claim.driver, claim.uid), []
    for one in claim.devices:
        if not one.admin:
            refused = rules.prepare_refusal(state, claim.driver, one.resource, one.device)
            if refused is not None:
                decision = _moves_begun(state, claim, refused, along) if move_idle else Decision(refused)
                return rules.with_outlook(decision, state, claim, view)
            uses.append(wanted_use(unit, Wanted((one.resource, one.device), one.identity, one.amount), view))
    if why := refusal(uses, state, view) or rules.other_parameters(state, claim):
        return rules.with_outlook(Decision(rules.Excluded(why)), state, claim, view)
    record = replace(claim, sequence=state.sequence + 1)
    return Decision(record, (_put_claim(record),))


def _moves_begun(
    state: RegisterSnapshot, claim: Claim, refused: rules.Refused, along: Collection[RecordKey]
) -> Decision[rules.Refused | rules.Excluded]:
    """Begin to move a refused claim's idle devices to DRA, unless a resource keeps them (`rules.kept_by_limits`).

    The returned refusal says whether the refused device moves now. `dra_bridge.handover` begins the moves of held
    devices, because it must lower the Node's number of allocatable devices first.
    """
    if stays := rules.kept_by_limits(state, {*claim.held, *along}):
        return Decision(replace(refused, unmoved=stays) if refused.record.state is State.PLUGIN else refused)
    changes: list[Change] = []
    for resource, device in sorted(claim.held):
        if state.state(resource, device) is State.PLUGIN and not state.allocations_on(resource, (device,)):
            reason, to = f"for claim {claim.title}", {device: State.TO_DRA}
            changes += _moved(state, resource, to, claim.since, reason, claim.driver, for_claim=True)
            at = refused.record
            if (resource, device) == (at.resource, at.device):
                refused = replace(refused, record=replace(at, state=State.TO_DRA, since=claim.since), moving=True)
    return Decision(refused, tuple(changes))


@_operation
def reopen(state: RegisterSnapshot, driver: str, uid: str) -> Decision[Claim | None]:
    """Change a prepared claim back to a reservation: the claim keeps its devices, and loses its Prepare response.

    A claim is reopened after a reboot, when the devices must be set up again, and after an Unprepare during which
    processes of the claim's pods still ran.
    """
    recorded = state.claims.get((driver, uid))
    if recorded is None or recorded.result is None:
        return Decision(recorded)
    record = replace(recorded, result=None, sequence=state.sequence + 1)
    return Decision(record, (_put_claim(record),))


@_operation
def adopt_claims(state: RegisterSnapshot, claims: Iterable[Claim]) -> Decision[tuple[Claim, ...]]:
    """Record the claims and devices that are only in the agent's claim files; return the new records.

    The register lacks a claim if the ledger (the SQLite file of the records) was lost or replaced by an older copy. If
    the register has other devices for a claim than the claim's file, the claim was allocated again. The claim then
    counts as holder of its former and its new devices.
    """
    new = []
    for claim in claims:
        key = claim.driver, claim.uid
        recorded = state.claims.get(key, claim)
        if key not in state.ended and (recorded is claim or not claim.held <= recorded.held):
            devices = rules.added(recorded.devices, claim.devices)
            more = replace(recorded, devices=devices, result=None, pods=recorded.pods | claim.pods)
            new.append(replace(more, sequence=state.sequence + 1))
    return Decision(tuple(new), tuple(map(_put_claim, new)))


@_operation
def describe(
    state: RegisterSnapshot, driver: str, uid: str, namespace: str, name: str, pods: Collection[str] = ()
) -> Decision[Claim | None]:
    """Add pod UIDs to a claim's record; add the namespace and name if the record, made from a file, has none."""
    recorded = state.claims.get((driver, uid))
    if recorded is None:
        return Decision(None)
    record = replace(recorded, pods=recorded.pods.union(pods))
    if not recorded.name:
        record = replace(record, namespace=namespace, name=name)
    return Decision(record, (_put_claim(record),) if record != recorded else ())


@_operation
def unprepare(state: RegisterSnapshot, driver: str, uid: str) -> Decision[Claim | None]:
    """Remove a claim's record, so that its devices are free. Return the record, or None for an unknown claim."""
    key = driver, uid
    recorded = state.claims.get(key)
    if recorded is None:
        return Decision(None)
    changes = [Change("claims", key, None, durable=recorded.durable)]
    if key not in state.ended and len(state.ended) >= KEEP_ENDED:
        changes.append(Change("ended", next(iter(state.ended)), None, durable=False))
    changes.append(Change("ended", key, EndedClaim(driver, uid), durable=False))
    return Decision(recorded, tuple(changes))


@_operation
def set_setting(state: RegisterSnapshot, section: str, key: str, value: str | None) -> Decision[None]:
    """Store the value of a setting; None removes the stored value."""
    if state.setting(section, key) == value:
        return Decision(None)
    record = None if value is None else Setting(section, key, value)
    return Decision(None, (Change("settings", (section, key), record),))


@_operation
def begin_move(
    state: RegisterSnapshot,
    resource: str,
    devices: Collection[str],
    to: Side,
    now: float,
    reason: str = "",
    driver: str = "",
    *,
    for_claim: bool = False,
) -> Decision[Mapping[str, State]]:
    """Begin to move devices to the plugin or to DRA. The result is the new state of each device whose state changed.

    A device that is moving away from side `to` turns back. Quarantined devices do not move. A device in another
    driver's slices does not move either, because it must first move to the plugin. driver: the driver whose claims will
    get the devices. for_claim: whether the move begins because a claim needs the devices.
    """
    at = {device: state.device(resource, device) for device in devices}
    moves = {
        device: _TURNED[record.state]
        for device, record in at.items()
        if record.state in _TURNED
        and record.state.goal is not to
        and (to is Side.PLUGIN or record.driver in ("", driver))
    }
    return Decision(moves, _moved(state, resource, moves, now, reason, driver, for_claim=for_claim))


@_operation
def commit_to_dra(
    state: RegisterSnapshot, resource: str, devices: Collection[str], evidence: rules.KubeletEvidence, now: float
) -> Decision[Committed]:
    """Complete the moves to DRA of the devices that, as the evidence proves, no pod with `limits` holds."""
    moving = _in_state(state, resource, devices, State.TO_DRA)
    waits = {record.device: rules.to_dra_waits_for(state, record, evidence) for record in moving}
    return _committed(state, resource, waits, State.DRA, now)


@_operation
def commit_to_plugin(
    state: RegisterSnapshot, resource: str, devices: Collection[str], evidence: rules.ClusterEvidence, now: float
) -> Decision[Committed]:
    """Complete the moves to the plugin of the devices that, as the evidence proves, no claim has or may get."""
    moving = _in_state(state, resource, devices, State.TO_PLUGIN)
    waits = {record.device: rules.to_plugin_waits_for(state, record, evidence) for record in moving}
    return _committed(state, resource, waits, State.PLUGIN, now)


def _in_state(state: RegisterSnapshot, resource: str, devices: Iterable[str], at: State) -> list[DeviceRecord]:
    records = (state.device(resource, device) for device in dict.fromkeys(devices))
    return [record for record in records if record.state is at]


def _committed(
    state: RegisterSnapshot, resource: str, waits: Mapping[str, rules.MoveWait | None], arrived: State, now: float
) -> Decision[Committed]:
    moves = {device: arrived for device, what in waits.items() if what is None}
    waiting = {device: what for device, what in waits.items() if what is not None}
    return Decision(Committed(tuple(moves), waiting), _moved(state, resource, moves, now))


@_operation
def reconcile_evidence(
    state: RegisterSnapshot,
    resource: str,
    evidence: rules.Evidence,
    devices: Collection[str],
    side: Side,
    now: float,
    driver: str = "",
) -> Decision[Reconciled]:
    """Compare the register with evidence of holders, or fill an empty register from this evidence.

    A device without a record is put on the DRA side if a claim's allocation or a CDI file names the device, on the
    plugin side if the kubelet's checkpoint names the device, into quarantine if both are true, and on `side` if neither
    is true. A device with a record is quarantined if the evidence proves a holder on the other side, and else keeps its
    state. The allocation of an unprepared claim proves no holder, because the scheduler may write the allocation
    minutes late. A holder of which the evidence is not sure only makes the device uncertain (`Reconciled`). A
    quarantined device leaves quarantine when the evidence and the register's own holders agree. evidence: the evidence
    of all holders of `devices`.

    A claim that this process has unprepared counts as unprepared even if evidence shows the claim as prepared: the
    evidence may have been read before the Unprepare, and the kubelet's claim state names the claim until the kubelet
    has the response. If such a claim was prepared again, the register has a new record of the claim.
    """
    claims = [
        replace(claim, prepared=False) if (claim.driver, claim.uid) in state.ended else claim
        for claim in evidence.merged
    ]
    # Allocations that prove a holder (`sure`) come last, because in the mapping `plugin` a later allocation of a device
    # replaces an earlier one.
    held = sorted(evidence.held.values(), key=lambda allocation: allocation.sure)
    plugin = {allocation.device: allocation for allocation in held}
    prepared = {d: c for c in claims if c.prepared for d in c.devices}
    claimed = {d: c for c in claims for d in c.devices}
    changes: list[Change] = []
    changed: dict[str, State] = {}
    uncertain: dict[str, None] = {}
    for device in dict.fromkeys((*devices, *plugin, *claimed)):
        recorded = state.devices.get((resource, device))
        pod, claim = plugin.get(device), claimed.get(device)
        if recorded is None or recorded.state is State.QUARANTINED:
            for record in state.allocations_on(resource, (device,)):
                pod = pod or rules.ObservedAllocation(device, record.pod or "unknown")
            for holder in state.claims_on(resource, (device,)):
                claim = claim or rules.ClaimEvidence(holder.driver, holder.uid, frozenset((device,)), prepared=True)
        elif recorded.state.prepares and pod is not None and not pod.sure:
            uncertain[device] = None
            pod = None
        if pod is None and not evidence.current and (recorded is None or not recorded.state.allocates):
            uncertain[device] = None  # The device may have been granted to a pod that the checkpoint does not name yet.
            continue
        at, reason = _proven(recorded, pod.pod if pod else None, claim, prepared.get(device), side)
        if recorded is None or at is not recorded.state:
            changed[device] = at
            changes += _moved(state, resource, {device: at}, now, reason, driver)
    for device_id, observed in evidence.held.items():
        if (resource, device_id) not in state.allocations and observed.device not in uncertain:
            changes.append(_found(state, resource, device_id, observed, now))
    changes += _prepared_claims(state, resource, claims, now)
    return Decision(Reconciled(changed, tuple(uncertain)), tuple(changes))


def _proven(
    recorded: DeviceRecord | None,
    pod: str | None,
    claimed: rules.ClaimEvidence | None,
    prepared: rules.ClaimEvidence | None,
    side: Side,
) -> tuple[State, str]:
    """Return the state that a device has according to the evidence, and the reason for the state."""
    if recorded is None or recorded.state is State.QUARANTINED:
        if pod is not None and claimed is not None:
            return State.QUARANTINED, f"held by pod {pod} and allocated to claim {claimed.uid}"
        if pod is not None:
            return State.PLUGIN, f"held by pod {pod}"
        if claimed is not None:
            return State.DRA, f"allocated to claim {claimed.uid}"
        return State(side.value), ""
    if pod is not None and (recorded.state.prepares or prepared is not None):
        return State.QUARANTINED, f"{recorded.state.text}, but pod {pod} holds it"
    if prepared is not None and recorded.state.allocates:
        return State.QUARANTINED, f"{recorded.state.text}, but claim {prepared.uid} is prepared with it"
    return recorded.state, recorded.reason


def _prepared_claims(
    state: RegisterSnapshot, resource: str, claims: Iterable[rules.ClaimEvidence], now: float
) -> list[Change]:
    """Return the changes that record the claims which the evidence shows as prepared, and the register does not."""
    changes = []
    for claim in claims:
        recorded = state.claims.get((claim.driver, claim.uid))
        if not claim.prepared or (recorded is not None and recorded.result is not None):
            continue
        # A claim with devices of several resources is found once for each resource. So the claim's record may
        # already have devices of other resources.
        before = recorded or Claim(claim.driver, claim.uid, "", "", (), None, now)
        if not before.name:
            before = replace(before, namespace=claim.namespace, name=claim.name)
        devices = rules.added(before.devices, claim.granted)
        unknown = (ClaimDevice(resource, device, limits=True) for device in sorted(claim.devices))
        devices = rules.added(devices, unknown)
        after = replace(before, devices=devices, pods=before.pods | claim.pods)
        if after != before:
            changes.append(_put_claim(replace(after, sequence=state.sequence + 1)))
    return changes


def _is_held(state: RegisterSnapshot, resource: str, device: str) -> bool:
    return bool(state.allocations_on(resource, (device,)) or state.claims_on(resource, (device,)))


def _found(
    state: RegisterSnapshot, resource: str, device_id: str, observed: rules.ObservedAllocation, now: float
) -> Change:
    """Return the change that records a held id, which an earlier process granted or whose record was lost."""
    record = AllocationRecord(resource, device_id, observed.device, now, state.sequence + 1, observed.holders)
    record = replace(record, identity=observed.identity, amount=observed.amount, shown=observed.shown)
    return _put_allocation(replace(record, pending=not observed.holders, pod=observed.pod))


def _put_allocation(record: AllocationRecord, *, durable: bool = True) -> Change:
    return Change("allocations", (record.resource, record.device_id), record, durable=durable)


def _put_claim(record: Claim) -> Change:
    return Change("claims", (record.driver, record.uid), record, durable=record.durable)


def _moved(
    state: RegisterSnapshot,
    resource: str,
    moves: Mapping[str, State],
    now: float,
    reason: str = "",
    driver: str = "",
    *,
    for_claim: bool = False,
) -> tuple[Change, ...]:
    """Return the changes that give devices new states. moves: the new state of each device.

    driver: the DRA driver to record for devices whose records name no driver.
    """
    records = []
    for device, to in moves.items():
        before = state.device(resource, device)
        of = "" if to is State.PLUGIN else before.driver or driver
        at = replace(before, state=to, since=now, sequence=state.sequence + 1)
        records.append(replace(at, reason=reason, driver=of, for_claim=for_claim))
    return tuple(Change("devices", (resource, record.device), record) for record in records)
