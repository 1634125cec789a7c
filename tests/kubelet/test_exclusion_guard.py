"""Which devices exclude each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from deviceplugin.kubelet.allocation_gate import AllowAll, Side
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.device import Device
from deviceplugin.exclusion import Key, Things, thing_of
from deviceplugin.hooks import HookStatistics, HookTimeoutError
from deviceplugin.identity import Tokens, boot_id
from deviceplugin.inventory import Inventory
from deviceplugin.kubelet.granted import Granted
from deviceplugin.source import DeviceSource

R = "example.com/r"
NONE: Tokens = frozenset()


def key(name: str) -> Key:
    return R, name


def things(scope: str = "d", **devices: Device | str) -> Things:
    """Return devices by id; a string is the tokens of one without counters."""
    return Things(
        {
            key(name): thing_of(Device(name), frozenset(one.split()), scope)
            if isinstance(one, str)
            else thing_of(one, NONE, scope)
            for name, one in devices.items()
        }
    )


def part(memory: int | str, *, brings: int | str | None = 10) -> Device:
    counters: Mapping[str, Mapping[str, int | str]] = {"gpu": {"memory": brings}} if brings is not None else {}
    return Device("x", consumes={"gpu": {"memory": memory}}, counters=counters)


def test_aliases_exclude_each_other() -> None:
    """Of ids for one thing only one is given away; the reason names both."""
    now = things(a="n1", b="n1 x", c="n2")
    assert now.peers(key("a")) == {key("b")}
    assert now.related == {key("a"), key("b")}
    reason = now.conflict([key("b")], {key("a"): NONE})
    assert reason == f"b of {R} and a of {R}, which counts as held, are one thing (n1)"
    assert now.conflict([key("a"), key("c")], {key("a"): NONE}) == ""
    assert now.conflict([key("a"), key("b")], {}), "one holder does not get one thing twice"


def test_parts_fit_while_counters_suffice() -> None:
    """Halves fit beside each other, the whole beside nothing, and a third not beside two."""
    now = things(whole=part(10), half=part(5), other=part(5), third=part(1))
    assert now.conflict([key("half"), key("other")], {}) == ""
    assert now.conflict([key("other")], {key("half"): NONE}) == ""
    assert "whole" in now.conflict([key("half")], {key("whole"): NONE})
    assert now.conflict([key("whole")], {key("third"): NONE})
    assert now.conflict([key("third")], {key("half"): NONE, key("other"): NONE})
    assert now.conflict([key("half")], {key("half"): NONE, key("other"): NONE}) == ""


@pytest.mark.parametrize("one", [part(1, brings=None), part("-1")], ids=["no capacity", "negative"])
def test_parts_of_what_is_not_known_exclude_each_other(one: Device) -> None:
    """Without a capacity, or with an amount that is none, nothing fits beside."""
    now = things(a=one, b=part(1, brings=None))
    assert now.conflict([key("b")], {key("a"): NONE})
    assert now.conflict([key("a")], {}) == ""


def test_counter_sets_belong_to_a_driver() -> None:
    """The same name of another driver is another set."""
    now = Things({("r", "a"): thing_of(part(10), NONE, "d"), ("s", "b"): thing_of(part(10), NONE, "e")})
    assert not now.related
    assert now.conflict([("r", "a")], {("s", "b"): NONE}) == ""


def test_an_id_that_changes_while_it_is_held_excludes_what_it_was_and_is() -> None:
    """Whoever has the old thing keeps it, whatever id that has now; nobody else gets the id."""
    now = things(a="n2", b="n1", c="n2", d="n3")
    held = {key("a"): frozenset({"n1"})}
    assert "is held as n1, and is n2 now" in now.conflict([key("a")], held)
    assert now.conflicts([key(name) for name in "abcd"], held).keys() == {key("a"), key("b"), key("c")}


def test_a_held_device_that_is_not_listed_excludes_what_it_was() -> None:
    """A link that replaces another one to the same node is the same device."""
    assert things(b="n1").conflict([key("b")], {key("a"): frozenset({"n1"})})


def test_shared_aliases_do_not_exclude_each_other() -> None:
    """Where every one of its ids has several holders, one more is no harm."""
    both = {key(name): thing_of(Device(name), frozenset({"kvm"}), "d", shared=True) for name in "ab"}
    assert Things(both).conflict([key("b")], {key("a"): NONE}) == ""
    both[key("b")] = thing_of(Device("b"), frozenset({"kvm"}), "d")
    assert Things(both).conflict([key("a")], {key("b"): NONE})


def test_groups_reach_through_others() -> None:
    """Devices that consume from one counter set belong together, also through a third; aliases do, too."""
    now = things(
        a=Device("a", consumes={"x": {"m": 1}}),
        b=Device("b", consumes={"y": {"m": 1}}),
        c=Device("c", consumes={"x": {"m": 1}, "y": {"m": 1}}),
        d="n1",
    )
    assert now.group(key("b"), now.related) == (key("a"), key("b"), key("c"))
    assert now.group(key("b"), ()) == (key("b"),)
    assert now.group(key("d"), now.related) == (key("d"),)


DEVICES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.frozensets(st.sampled_from(["n1", "n2", "n3"]), max_size=2), st.integers(0, 4)),
    max_size=6,
)


@given(DEVICES, st.lists(st.sampled_from("abcdef")))
def test_whatever_is_granted_in_turn_never_overlaps(devices: dict[str, tuple[Tokens, int]], wanted: list[str]) -> None:
    """Holders that come one after the other have no token in common and stay within the counters."""
    now = Things(
        {
            key(name): thing_of(
                Device(name, consumes={"s": {"m": amount}} if amount else {}, counters={"s": {"m": 4}}), tokens, "d"
            )
            for name, (tokens, amount) in devices.items()
        }
    )
    held: dict[Key, Tokens] = {}
    for name in wanted:
        if name in devices and key(name) not in held:
            alone = now.conflicts([key(name)], held)
            assert bool(alone) == bool(now.conflict([key(name)], held))
            if not alone:
                held[key(name)] = devices[name][0]
    tokens = [token for one in held.values() for token in one]
    assert len(tokens) == len(set(tokens))
    assert sum(devices[name][1] for _, name in held) <= 4


# The guard.


class Known(AllowAll):
    """What a ledger would say."""

    def __init__(self) -> None:
        self.holds: dict[Key, Tokens] = {}
        self.sides: dict[Key, Side] = {}

    def held(self) -> Mapping[Key, Tokens]:
        return self.holds

    def claimed(self, resource: str, device: str) -> bool:
        return self.sides.get((resource, device)) == "dra" and (resource, device) in self.holds

    def side(self, resource: str, device: str) -> Side:
        return self.sides.get((resource, device), "plugin")


class World:
    """A guard over one resource's devices by their identities."""

    def __init__(self, **identities: str) -> None:
        self.known = Known()
        source = SimpleNamespace(driver="d", replicas=1, replicas_of=lambda device: 1)
        self.served = SimpleNamespace(source=source, inventory=Inventory(R), held_devices=frozenset())
        self.guard = ExclusionGuard(lambda: cast("Any", {R: self.served}), self.known)
        self.list(**identities)

    def list(self, **identities: str) -> None:
        devices = [Device(name, identity=one) for name, one in identities.items()]
        self.served.inventory.publish(devices, {name: frozenset({one}) for name, one in identities.items()})

    def grant(self, name: str) -> None:
        with self.guard.reserve([key(name)]):
            self.served.held_devices |= {name}


def test_two_grants_at_once_do_not_both_pass() -> None:
    """What is being granted counts as held; a grant that failed does not."""
    world = World(a="n1", b="n1")
    with world.guard.reserve([key("a")]):
        with pytest.raises(ConflictError, match="one thing"), world.guard.reserve([key("b")]):
            pass
        assert "one thing" in world.guard.withheld(R, "plugin")["b"]
    with world.guard.reserve([key("b")]):
        pass


def test_what_was_granted_is_remembered_as_what_it_was() -> None:
    """Two ids swap what they lead to: both are withheld until the holder ends, then they are as they are."""
    world = World(a="n1", b="n2", c="n3")
    world.grant("a")
    world.list(a="n2", b="n1", c="n3")
    assert world.guard.withheld(R, "plugin").keys() == {"a", "b"}
    with pytest.raises(ConflictError, match="is held as n1"):
        world.grant("a")
    world.served.held_devices = frozenset()
    world.guard.notify()
    assert world.guard.withheld(R, "plugin") == {}
    world.grant("a")
    assert world.guard.identity(R, "a") == f"boot:{boot_id()} n2"


def test_a_ledger_knows_what_was_granted_before() -> None:
    """A holder from before a restart excludes what its device was, also if its id is not listed any more."""
    world = World(b="n1", c="n2")
    world.known.holds = {key("a"): frozenset({"n1"})}
    assert world.guard.withheld(R, "plugin").keys() == {"b"}


class Outside(World):
    """What pods hold by the kubelet, and claims of drivers that are not served."""

    def __init__(self, **identities: str) -> None:
        self.allocated: dict[Key, Granted] = {}
        self.orphaned: dict[Key, Tokens] = {}
        super().__init__(**identities)
        self.served.device_of = lambda device_id: device_id
        self.guard = ExclusionGuard(
            lambda: cast("Any", {R: self.served}),
            self.known,
            lambda: self.allocated,
            orphaned=lambda: self.orphaned,
        )
        self.guard.notify()


@pytest.mark.parametrize("other", [key("gone"), ("example.com/former", "a"), ("example.com/former", "x::1")])
def test_what_a_pod_holds_by_another_name_is_withheld(other: Key) -> None:
    """Also of what was allocated since the last scan; others are granted as before."""
    world = Outside(a="n1", b="n2")
    world.allocated = {other: Granted(frozenset({"n1"}))}
    with pytest.raises(ConflictError, match="one thing"):
        world.grant("a")
    assert world.guard.withheld(R, "plugin").keys() == world.guard.withheld(R, "dra").keys() == {"a"}
    assert world.guard.in_use(map(key, "ab")) == {key("a")}
    world.grant("b")
    world.allocated = {}
    world.guard.notify(scanned=True)
    world.grant("a")


def test_an_id_that_stands_for_another_device_than_its_holder_got_is_withheld() -> None:
    """An agent that starts does not take what the id stands for now for what it stood for then."""
    world = Outside(a="n2", b="n1", c="n3")
    world.allocated = {key("a"): Granted(frozenset({"n1"}))}
    for _ in range(2):
        world.guard.notify(scanned=True)
        assert world.guard.withheld(R, "plugin").keys() == {"a", "b"}


def test_what_an_orphaned_claim_holds_is_withheld() -> None:
    """The reason names the claim; when it has ended, subscribers hear of it."""
    world = Outside(a="n1", b="n2")
    calls: list[None] = []
    world.guard.subscribe(lambda: calls.append(None))
    world.orphaned = {("old.example.com", "claim ml/train"): frozenset({"n1"})}
    with pytest.raises(ConflictError, match=r"claim ml/train of old\.example\.com"):
        world.grant("a")
    world.guard.notify(scanned=True)
    unsettled = [world.guard.unsettled]
    world.orphaned = {}
    before = len(calls)
    world.guard.notify(scanned=True)
    assert len(calls) == before + 1
    assert [*unsettled, world.guard.unsettled] == [True, False]
    world.grant("a")


def test_who_may_share_a_device_excludes_nobody_from_sharing_it() -> None:
    """So of plugins that say nothing of it; a device that is to be had alone is excluded."""
    world = Outside(a="n1")
    world.allocated = {("example.com/other", "x"): Granted(frozenset({"n1"}), shared=True)}
    assert world.guard.withheld(R, "plugin").keys() == {"a"}
    world.served.source = SimpleNamespace(driver="d", replicas=2, replicas_of=lambda device: 2)
    world.guard.notify()
    assert world.guard.withheld(R, "plugin") == {}
    world.allocated = {("example.com/other", "x"): Granted(frozenset({"n1"}))}
    assert world.guard.withheld(R, "plugin").keys() == {"a"}


def test_nodes_of_one_answer_do_not_tell_listed_devices_apart() -> None:
    """Without tokens of its own, an id that is listed is what it is listed as."""
    world = Outside(a="n1", b="n2")
    nodes = Granted(frozenset({"n1", "n2"}), shared=True)
    world.allocated = {key("a"): nodes, key("b"): nodes}
    world.guard.notify(scanned=True)
    assert world.guard.withheld(R, "plugin") == {}


def test_ids_of_one_thing_are_offered_once() -> None:
    """The first one is, unless another one is held: what the kubelet and the scheduler count is what there is."""
    world = World(a10="n1", a9="n1", b="n2")
    assert world.guard.withheld(R, "plugin") == {"a10": f"it is offered as a9 of {R}"}
    world.grant("a10")
    assert world.guard.withheld(R, "plugin").keys() == {"a9"}


def test_members_on_two_sides_are_offered_on_neither() -> None:
    """Nothing is offered on one side while a peer is on the other."""
    world = World(a="n1", b="n1", c="n2")
    world.known.sides = {key("b"): "dra"}
    assert world.guard.withheld(R, "plugin").keys() == {"a", "b"}
    assert world.guard.withheld(R, "dra").keys() == {"a", "b"}


def test_slices_offer_parts_beside_parts_that_claims_hold() -> None:
    """The scheduler counts what claims have; of what pods have it knows nothing."""
    world = World()
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]
    world.served.inventory.publish([*halves, Device("w", consumes={"g": {"m": 10}})])
    world.known.sides = dict.fromkeys(map(key, "xyw"), "dra")
    world.known.holds = {key("x"): NONE}
    assert world.guard.withheld(R, "dra") == {}
    world.known.holds = {}
    world.served.held_devices = frozenset({"x"})
    assert world.guard.withheld(R, "dra").keys() == {"w"}


def test_subscribers_hear_of_holders_that_matter() -> None:
    """Subscribers are called once for a change."""
    world = World(a="n1", b="n1")
    world.guard.notify()
    calls: list[None] = []
    world.guard.subscribe(lambda: calls.append(None))
    world.grant("a")
    assert len(calls) == 1
    world.guard.notify()
    assert len(calls) == 1


async def test_nothing_that_a_hook_works_on_after_its_timeout_is_granted() -> None:
    """Nor another id of the same thing; others are, and all are once the hook has ended."""
    world = World(a="n1", b="n1", c="n2")
    over = threading.Event()

    class Slow(DeviceSource):
        resource = R
        hook_timeout = 0.01

        def reset(self, devices: Sequence[Device]) -> None:
            over.wait()

    reconciled: asyncio.Queue[None] = asyncio.Queue()
    world.guard.subscribe(lambda: reconciled.put_nowait(None))
    try:
        with pytest.raises(HookTimeoutError):
            await world.guard.hooks.call(HookStatistics(), "reset", Slow(), [Device("a")])
        await reconciled.get()
        await world.guard.verify([key("c")])
        for device in ("a", "b"):
            with pytest.raises(ConflictError, match=r"a of .*: `reset` still works on it, after its timeout"):
                await world.guard.verify([key(device)], resets=False)
        assert world.guard.withheld(R, "dra").keys() == world.guard.withheld(R, "plugin").keys() == {"a", "b"}
        assert world.guard.withheld(R, "plugin")["a"] == "`reset` still works on it, after its timeout"
        assert world.guard.in_use([key("a"), key("b"), key("c")]) == {key("a"), key("b")}
    finally:
        over.set()
    await reconciled.get()
    assert world.guard.withheld(R, "plugin").keys() == {"b"}
    await world.guard.verify([key("a")])


async def test_parts_of_what_a_hook_works_on_are_neither_granted_nor_offered() -> None:
    """A hook of one half may work on what the other half is a part of, too."""
    world = World()
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]
    world.served.inventory.publish(halves)
    over = threading.Event()

    class Slow(DeviceSource):
        resource = R
        hook_timeout = 0.01

        def released(self, devices: Sequence[Device]) -> None:
            over.wait()

    try:
        assert "did not answer" in await world.guard.hooks.start(HookStatistics(), "released", Slow(), [halves[0]])
        with pytest.raises(ConflictError, match=r"x of .*: `released` still works on it"):
            await world.guard.verify([key("y")])
        assert world.guard.withheld(R, "dra").keys() == world.guard.withheld(R, "plugin").keys() == {"x", "y"}
    finally:
        over.set()
