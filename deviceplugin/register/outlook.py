"""Decides whether a claim that is refused its devices may get them soon. Pure functions.

A holder is about to end in these cases:

- It is a claim of the same driver. The scheduler gives a device to a claim only when the claims that it knows leave
  enough of it. So the holder is deallocated or deleted at the API server, and its pod was deleted by force, say.
- It is a pod by limits which the kubelet's checkpoint does not name any more, or whose processes have ended; or a grant
  whose pod is not known yet: the kubelet may have rejected it.
- It is a hook that works on after its timeout.

Of a pod by limits that the kubelet counts as active nobody knows on the node whether it is being deleted.
"""

from __future__ import annotations

from dataclasses import replace

from deviceplugin.exclusion import DeviceKey
from deviceplugin.register.question import Use, View, Wanted, claim_unit, refusal, wanted_use
from deviceplugin.register.records import AllocationRecord, Claim, Decision, Outlook, RegisterSnapshot, State
from deviceplugin.register.rules import Excluded, Refused


def with_outlook(
    decision: Decision[Claim | Refused | Excluded], state: RegisterSnapshot, claim: Claim, view: View
) -> Decision[Claim | Refused | Excluded]:
    """Return a decision whose refusal, if it is one, says whether the claim may get its devices soon."""
    if isinstance(decision.answer, Claim):
        return decision
    seen = outlook(state.with_changes(decision.changes, state.sequence + 1), claim, view)
    # What is refused although it seems free stays so: pods by limits on both sides may keep it on its side.
    return replace(decision, answer=replace(decision.answer, outlook=seen if seen.waits else Outlook.FINAL))


def outlook(state: RegisterSnapshot, claim: Claim, view: View) -> Outlook:
    """Return whether a claim may get its devices soon. claim: as it would be recorded."""
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
        return of_driver or use.unit[0] == "hook" or (allocation is not None and _ends(allocation))

    return Outlook.FINAL if refusal(wanted, state, view, own=ends) else Outlook.ENDING


def _of_side(state: RegisterSnapshot, driver: str, key: DeviceKey) -> Outlook:
    """Return what the side of a device, and the pods that have it, say of a claim for it."""
    record, resource, device = state.device(*key), *key
    allocations = state.allocations_on(resource, (device,))
    if record.state is State.QUARANTINED or record.driver not in ("", driver) or not all(map(_ends, allocations)):
        return Outlook.FINAL
    if allocations:
        return Outlook.ENDING
    return Outlook.MOVING if record.state is State.TO_DRA else Outlook.FREE


def _ends(allocation: AllocationRecord) -> bool:
    return allocation.pending or allocation.ending
