"""The operations on devices, holds, claims and settings: pure functions that return an answer and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dra_bridge.ledger.records import (
    NONE,
    PULLED,
    RESTING,
    Change,
    Claim,
    Decision,
    DeviceRecord,
    Hold,
    Key,
    Operation,
    Setting,
    Side,
    Snapshot,
    State,
)
from dra_bridge.ledger.rules import (
    ClusterEvidence,
    Held,
    KubeletEvidence,
    KubeletSnapshot,
    Refused,
    r1_refusal,
    r2_refusal,
    r2_taken,
    r5_waits_for,
    r6_waits_for,
    r7_releases,
)

__all__ = [
    "WELL_APART",
    "Committed",
    "Granted",
    "Observed",
    "adopt",
    "begin_move",
    "cancel_move",
    "commit_to_dra",
    "commit_to_plugin",
    "describe",
    "forget",
    "grant",
    "identify",
    "observe",
    "prepare",
    "put_device",
    "reopen",
    "reserve",
    "seen_hold",
    "set_setting",
    "unprepare",
]

WELL_APART: Final = 10.0
"""Seconds between the two snapshots that release a grant whose pod was never seen (R7)."""

_LEAVING: Final = {State.PLUGIN: State.TO_DRA, State.DRA: State.TO_PLUGIN}
_ARRIVED: Final = {State.TO_DRA: State.DRA, State.TO_PLUGIN: State.PLUGIN}
_CANCELLED: Final = {State.TO_DRA: State.PLUGIN, State.TO_PLUGIN: State.DRA}


@dataclass(frozen=True, slots=True)
class Granted:
    """Allocate may answer. sequence: the ledger's with this grant."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What a snapshot led to, by unit: released ones, ones that the ledger did not know."""

    released: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Devices that arrived, and what each of the others waits for."""

    devices: tuple[str, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=lambda: NONE)


def adopt(resource: str, devices: Iterable[str], side: Side, now: float) -> Operation[tuple[str, ...]]:
    """Take devices that the ledger does not know yet on a side; answer which those were.

    Args:
        resource: the extended resource's name.
        devices: physical devices' ids, known or not.
        side: where new ones begin, unless somebody holds them on the other.
        now: Unix seconds.

    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[tuple[str, ...]]:
        new = [device for device in ids if (resource, device) not in state.devices]
        if not new:
            return Decision(())
        held = {hold.device for hold in state.holds_on(resource, new)}
        claimed = {device for claim in state.claims_on(resource, new) for of, device in claim.held if of == resource}
        begins = {
            device: State.PLUGIN if device in held else State.DRA if device in claimed else RESTING[side]
            for device in new
        }
        return Decision(tuple(new), _moved(state, resource, begins, now, ""))

    return decide


def forget(resource: str, devices: Iterable[str]) -> Operation[tuple[str, ...]]:
    """Drop devices that are no more; answer which. Held ones stay."""
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[tuple[str, ...]]:
        gone = tuple(
            device
            for device in ids
            if (resource, device) in state.devices
            and not state.holds_on(resource, (device,))
            and not state.claims_on(resource, (device,))
        )
        return Decision(gone, tuple(Change("devices", (resource, device), None) for device in gone))

    return decide


def identify(identities: Mapping[Key, str]) -> Operation[None]:
    """Record what devices are; one that somebody holds keeps the identity that its holder got, until a reboot."""

    def decide(state: Snapshot) -> Decision[None]:
        changes = []
        for key, identity in identities.items():
            record = state.devices.get(key)
            if record is None or not identity or record.identity == identity:
                continue
            same_boot = record.identity.split(" ")[0] == identity.split(" ")[0]
            if same_boot and (state.holds_on(key[0], key[1:]) or state.claims_on(key[0], key[1:])):
                continue
            changes.append(Change("devices", key, replace(record, identity=identity)))
        return Decision(None, tuple(changes))

    return decide


def grant(resource: str, units: Mapping[str, str], now: float) -> Operation[Granted | Refused]:
    """Give units to a container (R1), all or none.

    Args:
        resource: the extended resource's name.
        units: the physical device's id by unit, the id in Allocate (a replica's, or the device's
            own). A unit that was given before is given anew: the kubelet took it back unseen.
        now: Unix seconds.

    """

    def decide(state: Snapshot) -> Decision[Granted | Refused]:
        for device in dict.fromkeys(units.values()):
            refusal = r1_refusal(state, resource, device)
            if refusal is not None:
                return Decision(refusal)
        sequence = state.sequence + 1
        changes = []
        for unit, device in units.items():
            before = state.holds.get((resource, unit))
            # Its earlier holders stay in the record until the witnesses say that they are gone.
            holders = before.holders if before is not None else frozenset()
            pod = before.pod if before is not None else ""
            changes.append(
                Change("holds", (resource, unit), Hold(resource, unit, device, now, sequence, holders, pod=pod))
            )
        return Decision(Granted(sequence), tuple(changes))

    return decide


def observe(resource: str, snapshot: KubeletSnapshot, now: float, *, apart: float = WELL_APART) -> Operation[Observed]:
    """Compare the holds of a resource with what the witnesses say: release what is over (E2, R7).

    A hold is over when none of its holders is left, and no grant of it waits for its container to be named. An id
    that is held and that the ledger does not know becomes a hold; if its device is on the DRA side, the two
    contradict each other and the device is quarantined.

    Args:
        resource: the extended resource's name.
        snapshot: what the witnesses say of all of the resource's ids.
        now: Unix seconds.
        apart: seconds between the two checkpoints of R7.

    """

    def decide(state: Snapshot) -> Decision[Observed]:
        changes: list[Change] = []
        released: list[str] = []
        for key, hold in state.holds.items():
            if hold.resource != resource or snapshot.sequence < hold.sequence:
                continue  # given out, perhaps anew, after the witnesses were asked
            after = _observed(hold, snapshot, apart)
            if after is None:
                released.append(hold.unit)
                changes.append(Change("holds", key, None))
            elif after != hold:
                durable = (after.holders, after.pending) != (hold.holders, hold.pending)
                changes.append(Change("holds", key, after, durable=durable))
        found, quarantined = _found(state, resource, snapshot.held, now, changes)
        return Decision(Observed(tuple(released), found, quarantined), tuple(changes))

    return decide


def _observed(hold: Hold, snapshot: KubeletSnapshot, apart: float) -> Hold | None:
    """Return a hold as the witnesses leave it; None if it is over."""
    held = snapshot.held.get(hold.unit)
    holders = held.holders if held is not None else frozenset()
    pod = held.pod if held is not None else hold.pod
    if held is not None and held.sure and holders - hold.holders:
        return replace(hold, holders=holders, pending=False, absent_since=None, pod=pod)
    if not hold.pending:
        return replace(hold, holders=holders, pod=pod) if holders else None
    # A new name that only an old checkpoint has may be that of a pod that ended before this grant.
    holders &= hold.holders
    if r7_releases(hold, snapshot, apart):
        return replace(hold, holders=holders, pending=False, absent_since=None, pod=pod) if holders else None
    absent = snapshot.at if hold.absent_since is None and snapshot.awake else hold.absent_since
    return replace(hold, holders=holders, absent_since=absent, pod=pod)


def _found(
    state: Snapshot, resource: str, held: Mapping[str, Held], now: float, changes: list[Change]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found: list[str] = []
    quarantined: dict[str, None] = {}
    for unit, holder in held.items():
        record = state.device(resource, holder.device)
        if (resource, unit) in state.holds or (record.state.prepares and not holder.sure):
            continue
        found.append(unit)
        changes.append(Change("holds", (resource, unit), seen_hold(state, resource, unit, holder, now)))
        if record.state.prepares and holder.device not in quarantined:
            quarantined[holder.device] = None
            reason = f"{record.state.text}, but the kubelet says that pod {holder.pod} holds it"
            record = DeviceRecord(resource, holder.device, State.QUARANTINED, now, reason=reason)
            changes.append(put_device(record, state))
    return tuple(found), tuple(quarantined)


def seen_hold(state: Snapshot, resource: str, unit: str, held: Held, now: float) -> Hold:
    """Return the record of an id that is held and was granted by an agent before, or by a ledger that is lost."""
    return Hold(
        resource, unit, held.device, now, state.sequence + 1, held.holders, pending=not held.holders, pod=held.pod
    )


def reserve(claim: Claim, *, durable: bool, pull: bool = False) -> Operation[Claim | Refused]:
    """Reserve a claim's devices (R2) while its driver works on them; `prepare` completes it.

    Answers the claim as the ledger has it already, if it has (a `result` of None: not completed),
    else the reservation. Without `durable` a crash forgets it; a driver whose work leaves traces
    on the device wants it durable, so that an Unprepare after a crash can undo them.

    pull: where a device is on the plugin's side and idle, begin its move to DRA.
    """

    def decide(state: Snapshot) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        same = known is not None and (known.durable, known.devices) == (durable, claim.devices)
        if known is not None and (same or known.result is not None):
            return Decision(known)
        refusal = _claim_refusal(state, claim)
        if refusal is not None:
            return _pulled(state, claim, refusal) if pull else Decision(refusal)
        durably = durable or (known is not None and known.durable)
        record = replace(claim, result=None, sequence=state.sequence + 1, durable=durably)
        return Decision(record, (Change("claims", key, record, durable=durably),))

    return decide


def prepare(claim: Claim, *, pull: bool = False) -> Operation[Claim | Refused]:
    """Give a claim its devices for good (R2); idempotent by driver and UID.

    Devices of administrative access are seen, not held, and need no side. A claim that is
    prepared already is answered as it was.

    Args:
        claim: with its result, which restarts answer with.
        pull: where a device is on the plugin's side and idle, begin its move to DRA.

    """

    def decide(state: Snapshot) -> Decision[Claim | Refused]:
        key = (claim.driver, claim.uid)
        known = state.claims.get(key)
        if known is not None and known.result is not None:
            return Decision(known)
        refusal = _claim_refusal(state, claim)
        if refusal is not None:
            return _pulled(state, claim, refusal) if pull else Decision(refusal)
        record = replace(claim, sequence=state.sequence + 1, durable=True)
        return Decision(record, (Change("claims", key, record),))

    return decide


def _claim_refusal(state: Snapshot, claim: Claim) -> Refused | None:
    for device in claim.devices:
        if not device.admin:
            refusal = r2_refusal(state, device.resource, device.device) or r2_taken(state, claim, device)
            if refusal is not None:
                return refusal
    return None


def _pulled(state: Snapshot, claim: Claim, refusal: Refused) -> Decision[Claim | Refused]:
    changes = []
    for resource, device in sorted(claim.held):
        record = state.device(resource, device)
        if record.state is State.PLUGIN and not state.holds_on(resource, (device,)):
            moved = replace(record, state=State.TO_DRA, since=claim.since, reason=f"{PULLED}{claim.title}")
            changes.append(put_device(moved, state))
            if (resource, device) == (refusal.resource, refusal.device):
                refusal = replace(refusal, state=State.TO_DRA, since=claim.since, moving=True)
    return Decision(refusal, tuple(changes))


def reopen(driver: str, uid: str) -> Operation[Claim | None]:
    """Make a prepared claim one that is about to be again, its devices still held (after a reboot)."""

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None or known.result is None:
            return Decision(known)
        record = replace(known, result=None, sequence=state.sequence + 1)
        return Decision(record, (Change("claims", (driver, uid), record),))

    return decide


def describe(driver: str, uid: str, namespace: str, name: str, pods: Iterable[str] = ()) -> Operation[Claim | None]:
    """Add what is known of a claim: its name, where only its CDI file was known, and pods that share it."""
    more = frozenset(pods)

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None:
            return Decision(None)
        named = known if known.name else replace(known, namespace=namespace, name=name)
        record = replace(named, pods=known.pods | more)
        if record == known:
            return Decision(known)
        return Decision(record, (Change("claims", (driver, uid), record, durable=known.durable),))

    return decide


def unprepare(driver: str, uid: str) -> Operation[Claim | None]:
    """Take back a claim's devices; answer the record that was there, None for an unknown claim."""

    def decide(state: Snapshot) -> Decision[Claim | None]:
        known = state.claims.get((driver, uid))
        if known is None:
            return Decision(None)
        return Decision(known, (Change("claims", (driver, uid), None, durable=known.durable),))

    return decide


def set_setting(section: str, key: str, value: str | None) -> Operation[None]:
    """Keep a value, or drop it (None)."""

    def decide(state: Snapshot) -> Decision[None]:
        if state.setting(section, key) == value:
            return Decision(None)
        record = None if value is None else Setting(section, key, value)
        return Decision(None, (Change("settings", (section, key), record),))

    return decide


def begin_move(
    resource: str, devices: Iterable[str], to: Side, now: float, reason: str = ""
) -> Operation[Mapping[str, State]]:
    """Send devices towards a side; answer the new state of those that changed.

    One that is moving the other way turns round. Quarantined devices stay.
    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Mapping[str, State]]:
        moves: dict[str, State] = {}
        for device in ids:
            at = state.device(resource, device).state
            if at is not State.QUARANTINED and at.goal is not to:
                moves[device] = _CANCELLED.get(at) or _LEAVING[at]
        return Decision(moves, _moved(state, resource, moves, now, reason))

    return decide


def cancel_move(resource: str, devices: Iterable[str], now: float) -> Operation[Mapping[str, State]]:
    """Send moving devices back where they came from; answer the new state of those that changed."""
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Mapping[str, State]]:
        at = {device: state.device(resource, device).state for device in ids}
        moves = {device: _CANCELLED[where] for device, where in at.items() if where in _CANCELLED}
        return Decision(moves, _moved(state, resource, moves, now, "cancelled"))

    return decide


def commit_to_dra(resource: str, devices: Iterable[str], evidence: KubeletEvidence, now: float) -> Operation[Committed]:
    """End moves to DRA for which the evidence suffices (R5)."""
    return _commit(resource, devices, State.TO_DRA, lambda state, record: r5_waits_for(state, record, evidence), now)


def commit_to_plugin(
    resource: str, devices: Iterable[str], evidence: ClusterEvidence, now: float
) -> Operation[Committed]:
    """End moves to the plugin for which the evidence suffices (R6)."""
    return _commit(resource, devices, State.TO_PLUGIN, lambda state, record: r6_waits_for(state, record, evidence), now)


def _commit(
    resource: str,
    devices: Iterable[str],
    at: State,
    waits_for: Callable[[Snapshot, DeviceRecord], str],
    now: float,
) -> Operation[Committed]:
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Committed]:
        moves: dict[str, State] = {}
        waiting: dict[str, str] = {}
        for device in ids:
            record = state.device(resource, device)
            if record.state is at:
                reason = waits_for(state, record)
                if reason:
                    waiting[device] = reason
                else:
                    moves[device] = _ARRIVED[at]
        return Decision(Committed(tuple(moves), waiting), _moved(state, resource, moves, now, ""))

    return decide


def _moved(state: Snapshot, resource: str, moves: Mapping[str, State], now: float, reason: str) -> tuple[Change, ...]:
    return tuple(
        put_device(DeviceRecord(resource, device, to, now, reason=reason), state) for device, to in moves.items()
    )


def put_device(record: DeviceRecord, state: Snapshot) -> Change:
    """Return the change that records a device; it keeps the identity that is known unless it has its own."""
    identity = record.identity or state.device(record.resource, record.device).identity
    record = replace(record, sequence=state.sequence + 1, identity=identity)
    return Change("devices", (record.resource, record.device), record)
