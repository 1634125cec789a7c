"""Which part of a device a claim is granted, and how the claim's file records it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from deviceplugin.device import Device
from deviceplugin.identity import Identity
from deviceplugin.inventory import Inventory
from deviceplugin.register.records import Amount, Claim, ClaimDevice
from deviceplugin.sharing import shares
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claim_devices import ServedResource, compared_parameters, granted_device
from dra_bridge.driver.claim_files import filed
from dra_bridge.driver.claims import Result
from tests.identities import seen_as

R = "example.com/fpga"
D = "fpga.example.com"


class Shared(DeviceSource):
    """A source whose devices have four shares each, except device `two`, which has two shares."""

    resource = R
    driver = D
    replicas = 4

    def replicas_of(self, device: Device) -> int:
        return 2 if device.id == "two" else 4


def granted(device: Device, *, admin: bool = False, parameters: str = "", **result: Any) -> ClaimDevice:
    fields = {"request": "r", "driver": D, "pool": "n", "device": "published", "adminAccess": admin, **result}
    inventory = Inventory(R)
    inventory.publish([device], {device.id: frozenset({"uuid:1", "char:240:0"})}, shares(Shared(), [device]))
    served = ServedResource(Shared(), inventory)
    return granted_device(served, device, msgspec.convert(fields, Result), "b", parameters)


@pytest.mark.parametrize(
    ("device", "consumed", "part"),
    [
        ("d", {"shares": "1"}, "1/4"),
        ("two", {"shares": "1"}, "1/2"),
        ("d", {"shares": "2"}, "1/2"),
        ("d", {f"{D}/shares": "3", "memory": "5Gi"}, "3/4"),
        ("d", {"shares": 4}, "1"),
        ("two", {"shares": "3"}, "1"),  # the claim was allocated when the device had more shares
        ("d", {"memory": "5Gi"}, ""),
        ("d", {"other.example.com/shares": "1"}, ""),
        ("d", {"shares": "many"}, ""),
        ("d", {"shares": "0"}, ""),
        ("d", {"shares": None}, ""),
        ("d", None, ""),
    ],
)
def test_the_part_of_a_shared_device(device: str, consumed: Any, part: str) -> None:
    """A claim's part of a device is the claim's shares divided by the device's; it is unknown if the shares are."""
    assert granted(Device(device), shareID="s", consumedCapacity=consumed).amount == Amount(part)


def test_a_device_that_is_not_shared_is_had_whole() -> None:
    """An allocation without a share ID grants the whole device, also if its source divides devices into shares."""
    one = granted(Device("d"))
    assert (one.resource, one.device, one.share, one.admin, one.amount) == (R, "d", "", False, Amount("1"))
    assert one.identity == seen_as("b", "char:240:0", "uuid:1")
    assert one.parameters == ""


def test_a_partition_takes_counters() -> None:
    """A claim takes the counters that its device consumes; with adminAccess it takes nothing."""
    device = Device("d", consumes={"gpu": {"memory": "5Gi", "engines": 2}, "bus": {"lanes": 4}})
    takes = (("bus", "lanes", "4"), ("gpu", "engines", "2"), ("gpu", "memory", "5Gi"))
    assert granted(device).amount == Amount("1", takes)
    seen = granted(device, admin=True, shareID="s", consumedCapacity={"shares": "1"})
    assert (seen.admin, seen.amount) == (True, Amount("0"))


def test_parameters_are_compared_as_text() -> None:
    """Equal parameters give the same text in any order of their fields; without a hook `prepare` the text is empty."""

    class Tuned(Shared):
        def prepare(self, devices: Sequence[Device], config: Any) -> None: ...

    text = compared_parameters
    assert text(Tuned(), {"b": 1, "a": 2}) == text(Tuned(), {"a": 2, "b": 1}) == '{"a":2,"b":1}'
    assert text(Tuned(), msgspec.defstruct("Config", [("b", int), ("a", int)])(b=1, a=2)) == '{"a":2,"b":1}'
    assert not text(Shared(), {"a": 2})


def test_a_file_says_all_that_a_record_does() -> None:
    """A claim's file has all that its ledger record has; a device without an identity gets the boot as its identity."""
    full = granted(Device("d", consumes={"gpu": {"memory": "5Gi"}}), parameters='{"a":1}')
    plain = ClaimDevice(R, "e", "s", admin=True, amount=Amount("0"))
    claim = Claim(D, "1", "ml", "train", (full, plain), None, 1.0, pods=frozenset({"p"}))
    file = filed(claim, "b", "agent")
    assert (file.driver, file.uid, file.namespace, file.name, file.boot) == (D, "1", "ml", "train", "b")
    assert file.agent == "agent"
    assert file.pods == {"p"}
    assert list(file.devices or ()) == [full, msgspec.structs.replace(plain, identity=Identity("b"))]
