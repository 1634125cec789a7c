"""The outlook for a refused claim: whether the devices that it has allocated are expected to come free."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from deviceplugin.identity import Identity
from deviceplugin.register.question import Use, View
from deviceplugin.register.records import (
    WHOLE,
    AllocationRecord,
    Amount,
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    Outlook,
    Record,
    RecordKey,
    RegisterSnapshot,
    State,
)
from deviceplugin.register.rules import outlook

R, D = "example.com/fpga", "fpga.example.com"
HALF = Amount("1/2")
N1, N2 = Identity("1", frozenset({"n1"})), Identity("1", frozenset({"n2"}))


def claim(uid: str, device: str = "d0", driver: str = D, amount: Amount = WHOLE) -> Claim:
    held = ClaimDevice(R, device, identity=N1, amount=amount)
    return Claim(driver, uid, "default", f"claim-{uid}", (held,), "{}", 1.0)


def pod(*, pending: bool = False, ending: bool = False) -> AllocationRecord:
    holders = frozenset() if pending else frozenset({("uid", "main")})
    return AllocationRecord(R, "d0", "d0", 1.0, 1, holders, pending, identity=N1, amount=WHOLE, ending=ending)


def key_of(record: Record) -> tuple[str, RecordKey]:
    match record:
        case DeviceRecord():
            return "devices", (record.resource, record.device)
        case AllocationRecord():
            return "allocations", (record.resource, record.device_id)
        case Claim():
            return "claims", (record.driver, record.uid)
    raise AssertionError(record)


def state(at: State, *records: Record, driver: str = D) -> RegisterSnapshot:
    device = DeviceRecord(R, "d0", at, 1.0, driver="" if at is State.PLUGIN else driver)
    return RegisterSnapshot().with_changes([Change(*key_of(one), one) for one in (device, *records)], 1)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (state(State.DRA), Outlook.FREE),
        (state(State.DRA, claim("1")), Outlook.ENDING),
        (state(State.DRA, claim("1", driver="other.example.com")), Outlook.FINAL),
        (state(State.DRA, claim("1", "alias")), Outlook.FINAL),
        (state(State.DRA, pod()), Outlook.FINAL),
        (state(State.DRA, pod(ending=True)), Outlook.ENDING),
        (state(State.DRA, driver="other.example.com"), Outlook.FINAL),
        (state(State.TO_PLUGIN, claim("1")), Outlook.ENDING),
        (state(State.TO_DRA), Outlook.MOVING),
        (state(State.TO_DRA, pod(pending=True)), Outlook.ENDING),
        (state(State.TO_DRA, pod(ending=True)), Outlook.ENDING),
        (state(State.TO_DRA, pod()), Outlook.FINAL),
        (state(State.PLUGIN), Outlook.FREE),
        (state(State.PLUGIN, pod(ending=True)), Outlook.ENDING),
        (state(State.PLUGIN, pod()), Outlook.FINAL),
        (state(State.QUARANTINED), Outlook.FINAL),
    ],
    ids=range(16),
)
def test_what_holds_a_device_decides(now: RegisterSnapshot, expected: Outlook) -> None:
    """The outlook for a claim follows from the device's state and from whether its holder is expected to end."""
    assert outlook(now, claim("2"), View("1")) is expected


def test_a_hook_that_works_on_ends() -> None:
    """A device on which a hook still runs is expected to come free."""
    hook = Use(("hook", R, "d0"), "`reset` is still running on it", (R, "d0"), frozenset(), None)
    assert outlook(state(State.DRA), claim("2"), View("1", others=(hook,))) is Outlook.ENDING


def test_what_others_hold_does_not_end() -> None:
    """A device that another plugin's pod holds is not expected to come free."""
    other = Use(("id", "vendor.example.com/x", "0"), "pod p", None, frozenset({"n1"}), Fraction(1))
    assert outlook(state(State.DRA), claim("2"), View("1", others=(other,))) is Outlook.FINAL


def test_a_part_of_a_device_is_free_beside_another_one() -> None:
    """While a claim holds one half of a device, the other half is free; once both are held, a claim waits."""
    half = state(State.DRA, claim("1", amount=HALF))
    wanted = claim("2", amount=HALF)
    assert outlook(half, wanted, View("1")) is Outlook.FREE
    full = half.with_changes([Change("claims", (D, "3"), claim("3", amount=HALF))], 2)
    assert outlook(full, wanted, View("1")) is Outlook.ENDING


def test_the_worst_of_several_devices_counts() -> None:
    """A claim of several devices has the worst outlook of them: FINAL if a running pod holds one."""
    devices = (*claim("2").devices, ClaimDevice(R, "d1", identity=N2, amount=WHOLE))
    both = replace(claim("2"), devices=devices)
    now = state(State.DRA, claim("1"), DeviceRecord(R, "d1", State.PLUGIN, 1.0))
    assert outlook(now, both, View("1")) is Outlook.ENDING
    held = replace(pod(), device_id="d1", device="d1", identity=N2)
    assert outlook(now.with_changes([Change("allocations", (R, "d1"), held)], 2), both, View("1")) is Outlook.FINAL
