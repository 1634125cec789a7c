"""How the register decides whether a pod or claim may get devices, given what other holders have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.identity import Identity, identified
from deviceplugin.register.question import (
    Counter,
    Use,
    View,
    Wanted,
    allocation_unit,
    claim_unit,
    part_of,
    refusal,
    uses,
    wanted_use,
)
from deviceplugin.register.records import (
    UNKNOWN,
    WHOLE,
    AllocationRecord,
    Amount,
    Change,
    Claim,
    ClaimDevice,
    RegisterSnapshot,
)

R, S = "example.com/gpu", "example.com/half"
D, E = "gpu.example.com", "other.example.com"
HALF, THIRD = Amount("1/2"), Amount("1/3")
BOOT = "1"
MEMORY: Counter = (D, "card", "memory")
VIEW = View(BOOT, {R: D, S: D}, {MEMORY: Fraction(10)})


def named(*tokens: str, boot: str = BOOT) -> Identity:
    """Return a device's identity with these tokens."""
    return identified(frozenset(tokens), boot)


def takes(memory: str, part: str = "1") -> Amount:
    return Amount(part, (("card", "memory", memory),))


def pod(name: str, *tokens: str, device: str = "", resource: str = R, amount: Amount = WHOLE) -> AllocationRecord:
    """Return the record of a device id that a pod holds."""
    identity = named(*tokens)
    return AllocationRecord(resource, name, device or name, 0.0, 1, pod="ml/train", identity=identity, amount=amount)


def claim(
    device: str, *tokens: str, uid: str = "c", driver: str = D, amount: Amount = WHOLE, admin: bool = False
) -> Claim:
    """Return a claim that holds a device."""
    held = ClaimDevice(R, device, "", admin, named(*tokens), amount)
    return Claim(driver, uid, "ml", uid, (held,), "ready", 0.0)


def held(*records: AllocationRecord | Claim) -> RegisterSnapshot:
    """Return a register with these records."""
    changes = [
        Change("claims", (one.driver, one.uid), one)
        if isinstance(one, Claim)
        else Change("allocations", (one.resource, one.device_id), one)
        for one in records
    ]
    return RegisterSnapshot().with_changes(changes, 1)


def use(name: str, *tokens: str, device: str = "", resource: str = R, amount: Amount = WHOLE, view: View = VIEW) -> Use:
    """Return what a pod that requests a device id would use."""
    wanted = Wanted((resource, device or name), named(*tokens), amount)
    return wanted_use(allocation_unit(resource, name), wanted, view)


def asked(state: RegisterSnapshot, *wanted: Use, view: View = VIEW, **more: Any) -> str:
    return refusal(wanted, state, view, **more)


# Parts of the same hardware.


def test_parts_of_one_thing_add_up_whatever_it_is_called() -> None:
    """Two devices with a common identity token are the same hardware: their parts add up, and a refusal names both."""
    state = held(pod("a", "n1", amount=HALF), claim("b", "n1", "n2", amount=THIRD))
    assert asked(state, use("c", "n1", resource=S, amount=Amount("1/6"))) == ""
    reason = asked(state, use("c", "n1", "n3", resource=S, amount=HALF))
    assert reason.startswith(f"c of {S} and b of {R}, which counts as held by claim ml/c, are the same hardware (n1)")
    assert asked(state, use("c", "n2", resource=S, amount=Amount("2/3"))) == "", "b alone has it"
    assert asked(state, use("c", "n3", resource=S)) == ""


def test_functions_of_one_group_belong_in_one_resource() -> None:
    """Two functions of a card that share a node do not go to different pods; the refusal says to use one resource."""
    state = held(pod("gpu", "char:511:12", "pci:0000:01:00.0"))
    reason = asked(state, use("audio", "char:511:12", "pci:0000:01:00.1", resource=S))
    assert reason.endswith("(char 511:12); if one pod needs both, which share a node, put them into one resource")


def test_one_holder_does_not_get_one_thing_twice() -> None:
    """A request that has the same hardware twice, or more of a device or counter than there is, is refused."""
    nobody = RegisterSnapshot()
    assert asked(nobody, use("a", "n1")) == ""
    twice = f"a of {R} and b of {R}, requested with it, are the same hardware (n1)"
    assert asked(nobody, use("a", "n1"), use("b", "n1")) == twice
    assert asked(nobody, *(use(f"a::{n}", "n1", device="a", amount=HALF) for n in range(2))) == ""
    more = [use(f"a::{n}", "n1", device="a", amount=HALF) for n in range(3)]
    assert asked(nobody, *more) == f"more of a of {R} is requested than there is"
    assert asked(nobody, use("x", amount=takes("5")), use("y", amount=takes("5"))) == ""
    reason = f"x of {R} does not fit beside y of {R}, requested with it (counter memory of card)"
    assert asked(nobody, use("x", amount=takes("5")), use("y", amount=takes("6"))) == reason
    assert asked(nobody, use("x", amount=takes("11"))) == "", "what the list says of one device is not judged"


def test_a_name_that_leads_to_another_thing_than_its_holder_got_is_given_to_nobody() -> None:
    """A held device whose identity has changed is refused, also to its holder; an unknown identity is not compared."""
    state = held(pod("a", "n1", amount=HALF))
    for wanted in (use("a", "n2"), use("a::1", "n2", device="a", amount=HALF)):
        assert asked(state, wanted) == f"a of {R} is held as n1, and is n2 now"
        assert asked(state, wanted, own=lambda one: True)
    assert asked(state, use("a", "n1", "n2")) == ""
    assert asked(state, use("a")) == ""
    for before in (pod("a"), AllocationRecord(R, "a", "a", 0.0, 1, identity=named("n1", boot="0"), amount=WHOLE)):
        assert asked(held(before), use("a", "n2")) == ""
        assert asked(held(before), use("b", "n1")) == "", "what it was in another boot is nothing now"
        assert asked(held(before), use("a::1", "n2", device="a", amount=HALF)), "by its name it is held"


@pytest.mark.parametrize("amount", [UNKNOWN, Amount("x"), Amount("1/0")])
def test_a_part_that_is_not_known_may_be_all_of_it(amount: Amount) -> None:
    """If it is not known which part of a device is held or requested, the part counts as the whole device."""
    assert part_of(amount) is None
    for state in (held(pod("a", "n1", amount=amount)), held(claim("a", "n1", amount=amount))):
        tiny = Amount("1/100")
        assert asked(state, use("a::1", "n1", device="a", amount=tiny))
        assert asked(state, use("b", "n1", amount=tiny))
        assert asked(state, use("b", "n2")) == ""
    assert asked(held(pod("b", "n1", amount=Amount("1/100"))), use("a", "n1", amount=amount))


@pytest.mark.parametrize("by", ["record", "amount"])
def test_access_without_holding_excludes_nobody(by: str) -> None:
    """Administrative access holds no device and is never refused, even if the device's identity has changed."""
    nothing = Amount("0", (("card", "memory", "10"),))
    one = claim("a", "n1", admin=True) if by == "record" else claim("a", "n1", amount=nothing)
    assert asked(held(one), use("a", "n1", amount=takes("10"))) == ""
    assert asked(held(one), use("a", "n2")) == ""
    assert asked(held(pod("a", "n1", amount=takes("10"))), use("a", "n2", amount=nothing)) == ""
    devices = ClaimDevice(R, "b", "", False, named("n2"), HALF), ClaimDevice(R, "a", "", True, named("n1"), WHOLE)
    both = held(Claim(D, "c", "ml", "c", devices, "ready", 0.0))
    assert asked(both, use("b::1", "n2", device="b", amount=HALF), use("a", "n1")) == "", "of one claim, too"


# Holders that do not count.


def test_what_a_holder_has_already_does_not_count() -> None:
    """A repeated request for a device id or by a claim is not refused because of its own record."""
    state = held(pod("a", "n1", amount=takes("6")), claim("b", "n2", amount=takes("4")))
    assert asked(state, use("a", "n1", amount=takes("6"))) == ""
    again = Wanted((R, "b"), named("n2"), takes("4"))
    assert asked(state, wanted_use(claim_unit(D, "c"), again, VIEW)) == ""
    assert asked(state, wanted_use(claim_unit(D, "other"), again, VIEW)) == f"b of {R} is held by claim ml/c"
    assert asked(state, wanted_use(claim_unit(E, "c"), again, VIEW)), "of another driver"
    assert asked(state, use("a", "n1", amount=takes("7"))), "beside others it counts as what it is now"
    both = use("a", "n1", amount=takes("6")), use("b", "n2")
    assert asked(state, *both) == f"b of {R} is held by claim ml/c", "one unit of several is no excuse for the others"


def test_own_tells_who_else_does_not_count_and_counted_whose_counters_do() -> None:
    """Uses for which `own` is true do not count at all; uses for which `counted` is false count without counters."""
    state = held(pod("x", amount=takes("5")), claim("y", "n1", amount=takes("5")))
    whole = use("y", "n1", amount=takes("6"))

    def is_claim(one: Use) -> bool:
        return one.unit[0] == "claim"

    assert asked(state, whole) == f"y of {R} is held by claim ml/c"
    assert "(counter memory of card)" in asked(state, whole, own=is_claim)
    assert asked(state, use("y", "n1", amount=takes("5")), own=is_claim) == ""
    both = held(claim("x", uid="x", amount=takes("5")), claim("y", "n1", amount=takes("5")))
    assert asked(both, use("z", amount=takes("9")))
    assert asked(both, use("z", amount=takes("9")), counted=lambda one: not is_claim(one)) == ""
    assert asked(both, use("y", "n1"), counted=lambda one: not is_claim(one)), "what it is counts all the same"


def test_others_and_what_is_offered_beside_count() -> None:
    """Other drivers' holders count by identity token, a running hook by its device, uses in `beside` by their parts."""
    hook = Use(("hook", R, "h"), "`reset` is still running on it", (R, "h"), frozenset(), None)
    foreign = Use(("foreign", "x"), "claim ml/nic of x", None, frozenset({"n1"}), None)
    view = View(BOOT, others=(hook, foreign))
    assert asked(RegisterSnapshot(), use("h", "n9"), view=view) == "`reset` is still running on it"
    text = f"a of {R} and what claim ml/nic of x has, which counts as held, are the same hardware (n1)"
    assert asked(RegisterSnapshot(), use("a", "n1"), view=view) == text
    assert asked(RegisterSnapshot(), use("0", "n2"), view=view) == ""
    offered = [use("a::0", device="a", amount=HALF)]
    assert asked(RegisterSnapshot(), use("a::1", device="a", amount=HALF), beside=offered) == ""
    assert asked(RegisterSnapshot(), use("a", amount=THIRD), use("a::1", device="a", amount=HALF), beside=offered)


def test_a_claim_without_a_name_is_shown_by_its_uid() -> None:
    """A refusal shows a claim without a known name by its UID, and a pod without a known name as "a pod"."""
    nameless = Claim(D, "uid-1", "", "", (ClaimDevice(R, "a", amount=WHOLE),), None, 0.0)
    assert asked(held(nameless), use("a")) == f"a of {R} is held by claim uid-1"
    assert asked(held(AllocationRecord(R, "a::0", "a", 0.0, 1)), use("a")) == f"a of {R} is held by a pod"


# Counters.


def test_parts_fit_while_counters_suffice() -> None:
    """Partitions are granted while their counters suffice; the refusal names the held partition and the counter."""
    half = held(pod("x", amount=takes("5")))
    assert asked(half, use("y", resource=S, amount=takes("5"))) == ""
    reason = asked(half, use("y", resource=S, amount=takes("5100m")))
    assert reason == f"y of {S} does not fit beside x of {R}, which counts as held (counter memory of card)"
    assert asked(held(pod("x", amount=takes("10"))), use("y", amount=takes("1")))
    assert asked(half, use("y")) == "", "it takes nothing"
    assert asked(half, use("y", amount=Amount("1", (("card", "slices", "99"),)))) == ""


@pytest.mark.parametrize("limits", [{}, {MEMORY: Fraction(0)}, {(E, "card", "memory"): Fraction(10)}])
def test_parts_of_what_is_not_known_exclude_each_other(limits: Mapping[Counter, Fraction]) -> None:
    """If no amount of a counter is listed, only one holder may consume from the counter."""
    view = View(BOOT, {R: D}, limits)
    assert asked(RegisterSnapshot(), use("x", amount=takes("1"), view=view), view=view) == ""
    assert asked(held(pod("y", amount=takes("1"))), use("x", amount=takes("1"), view=view), view=view)


def test_an_amount_that_is_none_excludes_all() -> None:
    """A negative amount of a counter, held or requested, excludes all other holders of the counter."""
    assert asked(held(pod("x", amount=takes("-5"))), use("y", amount=takes("1")))
    assert asked(held(pod("x", amount=takes("1"))), use("y", amount=takes("-5")))


def test_counter_sets_belong_to_a_driver() -> None:
    """Counter sets of the same name are the same set only in resources of one driver."""
    alone = "example.com/alone"
    limits = {(scope, *MEMORY[1:]): Fraction(10) for scope in (D, E, alone)}
    view = View(BOOT, {R: D, S: E, alone: alone}, limits)
    full = held(pod("x", amount=takes("10")))
    for resource in (S, alone):
        assert asked(full, use("y", resource=resource, amount=takes("1"), view=view), view=view) == ""
    assert asked(full, use("y", amount=takes("1"), view=view), view=view)


def test_a_claim_counts_under_its_former_driver_and_under_the_present_one() -> None:
    """After a rename of the driver, a claim's counters count for the former driver and for the new driver."""
    limits = {(scope, *MEMORY[1:]): Fraction(10) for scope in (D, E)}
    full = held(claim("x", driver=D, amount=takes("10")))
    for scopes in ({R: E}, {R: E, S: D}, {R: D}):
        view = View(BOOT, scopes, limits)
        for resource in scopes:
            assert asked(full, use("y", resource=resource, amount=takes("1"), view=view), view=view), scopes
    gone = View(BOOT, {S: E}, limits)
    assert asked(full, use("y", resource=S, amount=takes("1"), view=gone), view=gone) == "", "another driver's"


def test_a_pod_counts_where_its_resource_is_served_no_more() -> None:
    """A pod's counters of a resource that is no longer served count for each driver with a counter set of that name."""
    view = View(BOOT, {S: D}, VIEW.limits)
    full = held(pod("x", amount=takes("10")))
    assert asked(full, use("y", resource=S, amount=takes("1"), view=view), view=view)
    assert asked(full, use("y", resource=S, view=view), view=view) == ""


def test_what_is_held_is_found_by_name_token_and_counter() -> None:
    """Present uses are found by device name, identity token or counter, except those with administrative access."""
    records = pod("a", "n1", amount=takes("1")), claim("b", "n2"), claim("c", "n3", uid="admin", admin=True)
    state = held(*records)
    for point, keys in (
        ((R, "a"), [(R, "a")]),
        ("n1", [(R, "a")]),
        (("card", "memory"), [(R, "a")]),
        ("n2", [(R, "b")]),
        ("n3", []),
        ((R, "c"), []),
        ("n4", []),
    ):
        assert [one.key for one in uses(state, [point], VIEW)] == keys, point


# Random requests.


class Listed(NamedTuple):
    """A listed device: its number of parts, and the memory that each part consumes."""

    name: str
    tokens: frozenset[str]
    parts: int
    memory: int


TOKENS = st.frozensets(st.sampled_from(["n1", "n2", "n3"]), max_size=2)
LISTS = st.lists(
    st.builds(Listed, st.sampled_from("abcd"), TOKENS, st.integers(1, 3), st.integers(0, 6)),
    max_size=6,
    unique_by=lambda one: one.name,
)
ASKED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.booleans()), max_size=12)


def total(of: Sequence[Use]) -> dict[object, list[Fraction]]:
    """Return the used parts of each device, by its name and identity tokens, and the used amounts of each counter."""
    found: dict[object, list[Fraction]] = {}
    for one in of:
        for point in one.points:
            found.setdefault(point, []).append(Fraction(1) if one.part is None else one.part)
        for counter, amount in one.takes.items():
            found.setdefault(counter, []).append(amount)
    return found


def exceeded(of: Sequence[Use]) -> set[object]:
    """Return the identity tokens, device names and counters of which more is used than there is."""
    limits: dict[object, Fraction] = {MEMORY: Fraction(10)}
    return {point for point, each in total(of).items() if len(each) > 1 and sum(each) > limits.get(point, Fraction(1))}


@given(LISTS, ASKED)
def test_whatever_is_granted_in_turn_never_exceeds_the_whole(
    devices: list[Listed], wanted: list[tuple[str, int, bool]]
) -> None:
    """Grants in any order use no more of a device or counter than there is; each refused request would use more."""
    listed = {one.name: one for one in devices}
    state, granted = RegisterSnapshot(), dict[tuple[str, ...], Use]()
    for name, number, by_claim in wanted:
        if (one := listed.get(name)) is None:
            continue
        amount = Amount(f"1/{one.parts}", (("card", "memory", str(one.memory)),) if one.memory else ())
        identity, device_id = named(*one.tokens), f"{name}::{number % one.parts}"
        unit = claim_unit(D, device_id) if by_claim else allocation_unit(R, device_id)
        asks = wanted_use(unit, Wanted((R, name), identity, amount), VIEW)
        others = [use for of, use in granted.items() if of != unit]
        why = refusal([asks], state, VIEW)
        assert bool(why) == bool(exceeded([*others, asks])), why
        if why:
            continue
        granted[unit] = asks
        record: AllocationRecord | Claim = AllocationRecord(
            R, device_id, name, 0.0, 1, identity=identity, amount=amount
        )
        if by_claim:
            record = Claim(D, device_id, "ml", "c", (ClaimDevice(R, name, "", False, identity, amount),), None, 0.0)
        key = (D, device_id) if by_claim else (R, device_id)
        state = state.with_changes([Change("claims" if by_claim else "allocations", key, record)], 1)
    assert not exceeded(list(granted.values()))


@given(st.lists(st.tuples(st.sampled_from("ab"), TOKENS, st.sampled_from(["", "0", "1/2", "1"])), max_size=4), TOKENS)
def test_a_thing_is_refused_to_all_or_to_none_of_its_names(
    holders: list[tuple[str, frozenset[str], str]], tokens: frozenset[str]
) -> None:
    """A request for hardware under any unheld name is refused exactly if a holder has one of the hardware's tokens."""
    records = [
        pod(f"{name}::{number}", *sorted(has), device=name, amount=Amount(part))
        for number, (name, has, part) in enumerate(holders)
    ]
    state = held(*records)
    answers = {bool(asked(state, use(name, *sorted(tokens)))) for name in ("new", "newer")}
    expected = any(has & tokens and part != "0" for _, has, part in holders)
    assert answers == {expected}
