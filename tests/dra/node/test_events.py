"""Moves of devices, and claims, as events on the status page."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from deviceplugin.metrics.report import Event, EventSource, ShareProgress
from deviceplugin.register.records import Claim, ClaimDevice, DeviceRecord, RegisterSnapshot, State
from dra_bridge.node.status import events
from tests.dra.node.test_status import DRIVER, bridge, status_of
from tests.metrics.views import RESOURCE


def snapshot(
    state: State, count: int = 1, since: float = 5.0, reason: str = "", **claims: str | None
) -> RegisterSnapshot:
    names = [f"d{number}" for number in range(count)]
    return RegisterSnapshot(
        1,
        {(RESOURCE, name): DeviceRecord(RESOURCE, name, state, since, reason=reason) for name in names},
        {},
        {
            (DRIVER, name): Claim(DRIVER, name, "team", name, (ClaimDevice(RESOURCE, "d0"),), result, 1.0)
            for name, result in claims.items()
        },
    )


def test_moves_are_events_at_their_time() -> None:
    """The begin and end of a device's move and a quarantine are events with their reason; a new device is no event."""
    plugin, leaving = snapshot(State.PLUGIN), snapshot(State.TO_DRA, reason="the share is 1")
    assert events(plugin, plugin, 9.0) == []
    assert events(snapshot(State.PLUGIN, 0), plugin, 9.0) == []
    assert events(plugin, leaving, 9.0) == [Event(5.0, RESOURCE, "moving to the DRA side: d0 (the share is 1)")]
    assert events(leaving, snapshot(State.DRA), 9.0) == [Event(5.0, RESOURCE, "moved to the DRA side: d0")]
    assert events(plugin, snapshot(State.QUARANTINED), 9.0) == [Event(5.0, RESOURCE, "quarantined: d0", bad=True)]


def test_many_moves_at_once_are_one_event() -> None:
    """64 devices that begin to move at once are one event."""
    assert [event.text for event in events(snapshot(State.PLUGIN, 64), snapshot(State.TO_DRA, 64), 9.0)] == [
        "moving to the DRA side: 64 devices"
    ]


def test_claims_are_events() -> None:
    """A prepared and an unprepared claim are events; a reservation is not."""
    none, reserved, prepared = snapshot(State.DRA), snapshot(State.DRA, c=None), snapshot(State.DRA, c="{}")
    assert events(none, reserved, 9.0) == events(reserved, none, 9.0) == []
    for before in (none, reserved):
        assert events(before, prepared, 9.0) == [Event(9.0, RESOURCE, "claim team/c prepared: d0")]
    assert events(prepared, none, 9.0) == [Event(9.0, RESOURCE, "claim team/c unprepared: d0")]


def test_the_bridge_tells_each_event_once() -> None:
    """The agent reports a device's move once; moves that the ledger had at the first call are not events."""
    made = bridge()
    status = status_of(made)
    assert isinstance(status, EventSource)
    assert status.events() == []
    ledger = made.drivers[DRIVER].async_ledger
    record = ledger.snapshot.devices[RESOURCE, "b"]
    moved = {**ledger.snapshot.devices, (RESOURCE, "b"): replace(record, state=State.DRA, since=6.0, reason="")}
    ledger.snapshot = replace(ledger.snapshot, devices=moved)
    assert status.events() == [Event(6.0, RESOURCE, "moved to the DRA side: b")]
    assert status.events() == []


def test_what_a_ledger_has_that_is_opened_late_is_no_event() -> None:
    """If a ledger is opened later, the devices and claims that it has are not events."""
    made = bridge()
    status, opened = status_of(made), made.agent.register
    made.agent.register = SimpleNamespace(snapshot=RegisterSnapshot())
    assert status.events() == []
    made.agent.register = opened
    assert status.events() == []


def test_share_and_progress_are_reported() -> None:
    """The report has the requested number of devices for claims (the share), and how many devices are in each state."""
    assert status_of(bridge()).report().shares == {RESOURCE: ShareProgress("2", 4, 1, 1, 1)}
