"""R8: the operation that compares the ledger with evidence, or builds it from evidence where it is empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dra_bridge.ledger.operations import put_device, seen_hold
from dra_bridge.ledger.records import (
    RESTING,
    Change,
    Claim,
    ClaimDevice,
    Decision,
    DeviceRecord,
    Operation,
    Side,
    Snapshot,
    State,
)
from dra_bridge.ledger.rules import ClaimEvidence, Evidence, Held

__all__ = ["Reconciled", "reconcile_evidence"]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The devices of a resource after its evidence was looked at. changed: with a new state.

    doubtful: those that may have a holder on the other side; they must not be offered before
    better evidence is there.
    """

    changed: Mapping[str, State]
    quarantined: tuple[str, ...]
    doubtful: tuple[str, ...] = ()


def reconcile_evidence(
    resource: str, evidence: Evidence, devices: Iterable[str], side: Side, now: float
) -> Operation[Reconciled]:
    """Compare the ledger with evidence, or build it from evidence where it is empty (R8).

    A device that the ledger does not know goes to DRA if a claim's allocation or a CDI file names
    it, to the plugin if the kubelet's checkpoint does, to quarantine if both do, to `side` if
    neither. One that it knows stays, unless a holder on the other side proves it wrong (a mere
    allocation does not: the scheduler writes some minutes late; neither does what is not sure: it
    makes the device doubtful). A quarantined one leaves as soon as the evidence and the ledger's
    own holders are of one mind.

    Args:
        resource: the extended resource's name.
        evidence: of all holders of `devices`.
        devices: the physical devices in question.
        side: where those go that nobody holds.
        now: Unix seconds.

    """
    ids = tuple(dict.fromkeys(devices))

    def decide(state: Snapshot) -> Decision[Reconciled]:
        held = sorted(evidence.held.values(), key=lambda one: one.sure)  # sure ones last: they count
        plugin = {one.device: one for one in held}
        prepared = {d: c for c in evidence.claims if c.prepared for d in c.devices}
        claimed = {d: c for c in evidence.claims for d in c.devices}
        changes: list[Change] = []
        changed: dict[str, State] = {}
        quarantined: list[str] = []
        doubtful: list[str] = []
        for device in dict.fromkeys((*ids, *plugin, *claimed)):
            known = state.devices.get((resource, device))
            pod, claim = plugin.get(device), claimed.get(device)
            if known is None or known.state is State.QUARANTINED:
                for hold in state.holds_on(resource, (device,)):
                    pod = pod or Held(device, hold.pod or "unknown")
                for one in state.claims_on(resource, (device,)):
                    claim = claim or ClaimEvidence(one.driver, one.uid, frozenset((device,)), prepared=True)
            elif known.state.prepares and pod is not None and not pod.sure:
                doubtful.append(device)
                pod = None
            if pod is None and not evidence.awake and (known is None or not known.state.allocates):
                # It may have been given to a pod that the checkpoint does not name yet.
                doubtful.append(device)
                continue
            at, reason = _proven(known, pod.pod if pod else None, claim, prepared.get(device), side)
            if known is None or at is not known.state:
                changed[device] = at
                changes.append(put_device(DeviceRecord(resource, device, at, now, reason=reason), state))
            if at is State.QUARANTINED:
                quarantined.append(device)
        for unit, holder in evidence.held.items():
            if (resource, unit) not in state.holds and holder.device not in doubtful:
                changes.append(Change("holds", (resource, unit), seen_hold(state, resource, unit, holder, now)))
        for claim in evidence.claims:
            key = (claim.driver, claim.uid)
            record = state.claims.get(key)
            if not claim.prepared or (record is not None and record.result is not None):
                continue
            # A claim over several resources is found once for each of them.
            known_devices = record.devices if record is not None else ()
            devices = (
                *known_devices,
                *(
                    ClaimDevice(resource, device, claim.shares.get(device, ""))
                    for device in sorted(claim.devices)
                    if not any((one.resource, one.device) == (resource, device) for one in known_devices)
                ),
            )
            if record is None:
                record = Claim(claim.driver, claim.uid, claim.namespace, claim.name, (), None, now)
            pods = record.pods | claim.pods
            if (devices, pods) != (known_devices, record.pods):
                record = replace(record, devices=devices, pods=pods, sequence=state.sequence + 1)
                changes.append(Change("claims", key, record, durable=record.durable))
        return Decision(Reconciled(changed, tuple(quarantined), tuple(dict.fromkeys(doubtful))), tuple(changes))

    return decide


def _proven(
    known: DeviceRecord | None,
    pod: str | None,
    claimed: ClaimEvidence | None,
    prepared: ClaimEvidence | None,
    side: Side,
) -> tuple[State, str]:
    """Return the state that the evidence leaves a device in, and why if it is not as it was."""
    if known is None or known.state is State.QUARANTINED:
        if pod is not None and claimed is not None:
            return State.QUARANTINED, f"held by pod {pod} and allocated to claim {claimed.uid}"
        if pod is not None:
            return State.PLUGIN, f"held by pod {pod}"
        if claimed is not None:
            return State.DRA, f"allocated to claim {claimed.uid}"
        return RESTING[side], ""
    if pod is not None and (known.state.prepares or prepared is not None):
        return State.QUARANTINED, f"{known.state.text}, but pod {pod} holds it"
    if prepared is not None and known.state.allocates:
        return State.QUARANTINED, f"{known.state.text}, but claim {prepared.uid} is prepared with it"
    return known.state, known.reason
