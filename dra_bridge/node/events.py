"""What happened between two snapshots of a ledger: moves of devices, and claims. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from deviceplugin.device import counted
from deviceplugin.metrics.report import Event
from dra_bridge.ledger.records import Claim, Snapshot, State

NAMED: Final = 3
"""Devices that one event names; of more it says the number."""
_WORDS: Final = {
    State.TO_DRA: "leaving for the DRA side",
    State.DRA: "moved to the DRA side",
    State.TO_PLUGIN: "leaving for the device plugin side",
    State.PLUGIN: "moved to the device plugin side",
    State.QUARANTINED: "quarantined",
}


def events(before: Snapshot, now: Snapshot, at: float) -> list[Event]:
    """Return the moves and claims that began or ended, oldest first. at: Unix seconds, for what has no time itself."""
    if before is now:
        return []
    return sorted((*_moves(before, now), *_claims(before, now, at)), key=lambda event: event.at)


def _moves(before: Snapshot, now: Snapshot) -> Iterator[Event]:
    together: dict[tuple[float, str, State, str], list[str]] = defaultdict(list)
    for key, record in now.devices.items():
        old = before.devices.get(key)
        if old is not None and old.state is not record.state:
            together[record.since, record.resource, record.state, record.reason].append(record.device)
    for (since, resource, state, reason), names in together.items():
        what = ", ".join(names) if len(names) <= NAMED else counted(len(names))
        text = f"{_WORDS[state]}: {what}" + (f" ({reason})" if reason else "")
        yield Event(since, resource, text, state is State.QUARANTINED)


def _claims(before: Snapshot, now: Snapshot, at: float) -> Iterator[Event]:
    for key in now.claims.keys() | before.claims.keys():
        old, new = before.claims.get(key), now.claims.get(key)
        if new is not None and new.result is not None and (old is None or old.result is None):
            yield _claim_event(new, "prepared", at)
        elif new is None and old is not None and old.result is not None:
            yield _claim_event(old, "unprepared", at)


def _claim_event(claim: Claim, verb: str, at: float) -> Event:
    names = [one.device for one in claim.devices]
    what = ", ".join(names) if len(names) <= NAMED else counted(len(names))
    resource = claim.devices[0].resource if claim.devices else claim.driver
    return Event(at, resource, f"claim {claim.title} {verb}: {what}")
