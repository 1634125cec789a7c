"""A USB device is identified by its serial number or by its port: who may hold it, and which containers may start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from deviceplugin import identity
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.identity import Tokens, agree, identified, lasting
from deviceplugin.register import identification
from deviceplugin.register.identification import StartNodes
from deviceplugin.register.question import View, Wanted, allocation_unit, refusal, wanted_use
from deviceplugin.register.records import (
    WHOLE,
    Allocation,
    AllocationRecord,
    Amount,
    Change,
    FormerGrant,
    RegisterSnapshot,
)
from deviceplugin.register.store import MemoryStore
from tests.register.resources import ListedResource, ListedResources

R, BOOT = "example.com/stick", "1"


def at(number: int, serial: str, place: str, *, port: bool = False) -> Tokens:
    """Return the tokens of a USB device whose node has this number. port: the device is identified by its port."""
    tokens = {f"char:188:{number}", f"hardware:usb:1:2:{serial}#tty", f"place:usb:{place}#tty"}
    return frozenset(tokens | {f"port:/dev/by-path/{place}"} if port else tokens)


def held(device: str, tokens: Tokens, **more: object) -> AllocationRecord:
    """Return a container's allocation of a device. tokens: what identifies the device, such as its serial number."""
    record = AllocationRecord(R, device, device, 0.0, 1, frozenset({(f"uid-{device}", "main")}), pending=False)
    return replace(record, pod=f"ml/{device}", identity=identified(tokens, BOOT), amount=WHOLE, **more)  # type: ignore[arg-type]


def state(*records: AllocationRecord) -> RegisterSnapshot:
    return RegisterSnapshot().with_changes(
        [Change("allocations", (record.resource, record.device_id), record) for record in records], 1
    )


def asked(now: RegisterSnapshot, device: str, tokens: Tokens) -> str:
    view = View(BOOT, present={(R, device): tokens})
    return refusal(
        [wanted_use(allocation_unit(R, device), Wanted((R, device), identified(tokens, BOOT), WHOLE), view)], now, view
    )


def start(now: RegisterSnapshot, **present: Tokens) -> tuple[str, RegisterSnapshot]:
    ids = frozenset(present)
    decision = identification.start(R, StartNodes(present, ids), View(BOOT))(now)
    return decision.answer, now.following(decision)


def test_a_holder_of_hardware_and_a_holder_of_its_place_exclude_each_other() -> None:
    """A holder by serial number and a holder by port exclude each other if the device is the same."""
    by_serial, by_port = held("A", at(1, "A", "1-1")), held("P", at(1, "A", "1-1", port=True))
    assert "same hardware" in asked(state(by_serial), "P", at(7, "A", "1-1", port=True))
    assert "same hardware" in asked(state(by_port), "A", at(7, "A", "1-1"))


def test_a_holder_has_only_what_it_was_given() -> None:
    """A USB device that was moved from a held port is free, and so is the port from which a held device was moved."""
    assert asked(state(held("P", at(1, "A", "1-1", port=True))), "A", at(7, "A", "1-2")) == ""
    assert asked(state(held("A", at(1, "A", "1-1"))), "P", at(7, "B", "1-1", port=True)) == ""


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        (at(1, "A", "1-1"), at(2, "A", "1-2"), True),
        (at(1, "A", "1-1"), at(1, "B", "1-1"), False),
        (at(1, "A", "1-1", port=True), at(2, "B", "1-1", port=True), True),
        (at(1, "A", "1-1", port=True), at(2, "B", "1-2", port=True), False),
    ],
    ids=["another place", "another stick", "another stick in the port", "nothing in common"],
)
def test_two_looks_are_of_one_device(was: Tokens, now: Tokens, same: bool) -> None:
    """Two reads find the same device if its serial number is the same, or its port if it is identified by the port."""
    assert agree(was, now) is same


@pytest.mark.parametrize("port", [False, True])
def test_a_container_starts_with_the_present_number_of_its_device(port: bool) -> None:
    """A container that restarts after its device's number has changed gets the new number, and the former is free."""
    why, after = start(state(held("A", at(1, "A", "1-1", port=port))), A=at(7, "A", "1-1", port=port))
    assert why == ""
    assert after.allocations[R, "A"].identity.reached == {"char:188:7"}
    assert asked(after, "B", at(1, "B", "1-2")) == ""
    assert start(after, A=at(7, "A", "1-1", port=port)) == ("", after)


@pytest.mark.parametrize("holder", ["", "uid-A", "uid-other"])
def test_a_restart_soon_after_the_grant_leaves_the_former_number(holder: str) -> None:
    """If a container restarts before a scan saw its grant, the former number is free if no other pod can have it."""
    holders = frozenset({(holder, "main")} if holder else ())
    now = state(held("A", at(1, "A", "1-1"), pending=True, holders=holders))
    for begun in ((), (Allocation("uid-A", "main", R, "A"),)):
        decision = identification.start(R, StartNodes({"A": at(7, "A", "1-1")}, frozenset("A")), View(BOOT), begun)(now)
        assert decision.answer == ""
        is_free = not asked(now.following(decision), "B", at(1, "B", "1-2"))
        assert is_free == (bool(begun) and holder != "uid-other")


def test_containers_whose_sticks_have_swapped_start_one_after_the_other() -> None:
    """If two held devices have swapped numbers, one container restarts only after the other has restarted."""
    now = state(held("A", at(1, "A", "1-1")), held("B", at(2, "B", "1-2")))
    why, now = start(now, A=at(2, "A", "1-1"))
    assert why == f"A of {R} and B of {R}, which counts as held by pod ml/B, are the same hardware (char 188:2)"
    why, now = start(now, B=at(1, "B", "1-2"))
    assert why == ""
    why, now = start(now, A=at(2, "A", "1-1"))
    assert why == ""
    reached = {name: (*of.identity.reached, *of.identity.left) for (_, name), of in now.allocations.items()}
    assert reached == {"A": ("char:188:2", "char:188:1"), "B": ("char:188:1", "char:188:2")}
    why, now = start(now, B=at(2, "B", "1-2"))
    assert "same hardware" in why
    why, now = start(now, A=at(1, "A", "1-1"))
    assert why == ""
    assert now.allocations[R, "A"].identity == identified(at(1, "A", "1-1"), BOOT)


def test_shared_sticks_that_have_swapped_are_not_shared_with_each_others_holders() -> None:
    """If shared devices have swapped numbers, a container does not start while the other's holder can open its node."""
    halves = (held("A", at(1, "A", "1-1")), held("B", at(2, "B", "1-2")))
    now = state(*(replace(each, amount=Amount("1/2")) for each in halves))
    why, now = start(now, A=at(2, "A", "1-1"))
    assert why == f"A of {R} and B of {R}, which counts as held by pod ml/B, are the same hardware (char 188:2)"
    why, now = start(now, B=at(1, "B", "1-2"))
    assert why == ""


def test_a_container_does_not_start_with_the_stick_of_another_one_in_its_port() -> None:
    """If a held device is put into a port that another pod holds, neither container starts until it is moved again."""
    now = state(held("A", at(1, "A", "1-1")), held("P", at(2, "T", "1-2", port=True)))
    for _ in range(2):
        why, now = start(now, P=at(3, "A", "1-2", port=True))
        assert "same hardware" in why
        why, now = start(now, A=at(3, "A", "1-2"))
        assert "same hardware" in why
    assert start(now, A=at(4, "A", "1-1"))[0] == ""
    assert start(now, P=at(5, "T", "1-2", port=True))[0] == ""


@pytest.mark.parametrize(
    "more",
    [
        {"pending": True},
        {"holders": frozenset({("uid-A", "main"), ("uid-Z", "main")})},
        {"former": (FormerGrant(frozenset({("uid-Z", "main")}), identified(at(9, "Z", "1-3"), BOOT), WHOLE),)},
    ],
    ids=["a container that is not known", "two pods", "a former holder"],
)
def test_a_further_holder_may_still_have_the_former_number(more: Mapping[str, object]) -> None:
    """If another holder of the device may still run, the former number stays withheld after a container's restart."""
    why, after = start(state(held("A", at(1, "A", "1-1"), **more)), A=at(7, "A", "1-1"))
    assert why == ""
    reaches = after.allocations[R, "A"].identity
    assert (reaches.tokens, reaches.reached) == (lasting(at(1, "A", "1-1")), frozenset({"char:188:7"}))
    assert "same hardware" in asked(after, "B", at(1, "B", "1-2"))


def test_an_init_container_has_ended_when_another_container_of_its_pod_starts() -> None:
    """When the pod's main container starts, its init container counts as ended: the device's former number is free."""
    both = {"holders": frozenset({("uid-A", "main"), ("uid-A", "init")})}
    why, after = start(state(held("A", at(1, "A", "1-1"), **both)), A=at(7, "A", "1-1"))
    assert why == ""
    assert asked(after, "B", at(1, "B", "1-2")) == ""


def test_a_container_does_not_start_with_paths_that_name_the_former_node() -> None:
    """A container that was given the node's path itself, not a symlink, does not start after a change of the number."""
    now, ids = state(held("A", at(1, "A", "1-1")), held("B", at(2, "B", "1-2"))), frozenset("A")
    moved = identification.start(R, StartNodes({"A": at(3, "A", "1-1")}, ids, ids), View(BOOT))(now)
    assert moved.answer == f"A of {R} had the nodes char 188:1 and has char 188:3 now: delete the pod"
    other = identification.start(R, StartNodes({"A": at(1, "Z", "1-3")}, ids, ids), View(BOOT))(now)
    assert "is not what its holder was given" in other.answer
    for decision in (moved, other):
        assert asked(now.following(decision), "C", at(1, "C", "1-4")) == ""
    same = identification.start(R, StartNodes({"A": at(1, "A", "1-1")}, ids, ids), View(BOOT))(now)
    assert (same.answer, same.changes) == ("", ())


def test_an_id_without_a_record_starts_nothing_new() -> None:
    """The start of a container with a device id that has no record adds no record."""
    assert start(state(), A=at(1, "A", "1-1")) == ("", state())


async def test_the_stick_in_a_port_is_read_again_before_the_port_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a grant of a port the device in it is read again: the grant is refused if another pod holds the device."""
    ports, sticks = ListedResource("example.com/port", driver=""), ListedResource(R, driver="")
    here = ListedResources(MemoryStore(), ports, sticks)
    port, stick = Device("P", nodes=["/dev/by-path/1-1"]), Device("A", nodes=["/dev/by-id/A"])
    now = {"P": at(1, "T", "1-1", port=True), "A": at(2, "A", "1-2")}
    monkeypatch.setattr(identity, "tokens_now", lambda device: now[device.id])

    def identities(devices: Sequence[Device]) -> identity.Identified:
        return identity.Identified({device.id: now[device.id] for device in devices}, {})

    monkeypatch.setattr(identity, "identities", identities)
    ports.inventory.publish([port], {"P": now["P"]})
    sticks.inventory.publish([stick], {"A": now["A"]})
    await here.register.grant(R, {"A": "A"})
    now["P"] = at(7, "A", "1-1", port=True)
    with pytest.raises(DeviceConflictError, match="same hardware"):
        await here.register.grant("example.com/port", {"P": "P"})
    now["P"] = at(8, "T", "1-1", port=True)
    await here.register.grant("example.com/port", {"P": "P"})
