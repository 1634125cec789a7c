"""What the register of a process offers, grants and lets go of: which devices exclude each other, for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import sharing
from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError, DeviceKey, Things, thing_of
from deviceplugin.hooks import HookStatistics, HookTimeoutError
from deviceplugin.identity import Tokens, boot_id, recorded
from deviceplugin.inventory import Inventory
from deviceplugin.register import operations
from deviceplugin.register.question import Use
from deviceplugin.register.records import (
    WHOLE,
    AllocationRecord,
    Amount,
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    LedgerError,
    Operation,
    State,
)
from deviceplugin.register.register import MemoryStore, OtherSideError, Register, RegisterHost, Side, UnknownHolderError
from deviceplugin.register.rules import KubeletSnapshot, ObservedAllocation
from deviceplugin.source import DeviceSource

R = "example.com/r"
FORMER = "example.com/former"
D = "d.example.com"
NONE: Tokens = frozenset()
_T = TypeVar("_T")


def key(name: str) -> DeviceKey:
    return R, name


def things(**devices: Device | str) -> Things:
    """Return devices by id; a string is the tokens of one without counters."""
    return Things(
        {
            key(name): thing_of(Device(name), frozenset(one.split()), "d")
            if isinstance(one, str)
            else thing_of(one, NONE, "d")
            for name, one in devices.items()
        }
    )


def part(name: str, memory: int | str, *, brings: int | str | None = 10) -> Device:
    counters: Mapping[str, Mapping[str, int | str]] = {"gpu": {"memory": brings}} if brings is not None else {}
    return Device(name, consumes={"gpu": {"memory": memory}}, counters=counters)


def seen(tokens: str) -> str:
    """Return tokens as a record of this boot has them."""
    return recorded(frozenset(tokens.split()), boot_id())


class Listed:
    """A resource as a service has it; what its devices are is in `tokens`, by id."""

    def __init__(self, resource: str, *devices: Device, tokens: Mapping[str, str], driver: str, replicas: int) -> None:
        self.source = cast("DeviceSource", SimpleNamespace(resource=resource, driver=driver, replicas=replicas))
        self.inventory = Inventory(resource)
        self.list(*devices, tokens=tokens)

    def list(self, *devices: Device, tokens: Mapping[str, str]) -> None:
        known = {name: frozenset(one.split()) for name, one in tokens.items()}
        named = [Device(name, identity=one.split()[0]) for name, one in tokens.items()]
        self.inventory.publish([*named, *devices], known)

    def ids_now(self, device: Device) -> tuple[str, ...]:
        return sharing.replicas_of(device.id, self.source.replicas)

    def device_of(self, device_id: str) -> str:
        return sharing.device_of(device_id, self.source.replicas)


class World(RegisterHost):
    """A register over resources' devices, whose holders are what a test says."""

    services: dict[str, Listed]

    def evidence_missing(self, resource: str, device: str) -> str:
        return self.unknown.get(device, "")

    def __init__(self, *devices: Device, driver: str = D, replicas: int = 1, **tokens: str) -> None:
        self.services = {}
        self.foreign: tuple[Use, ...] = ()
        self.unknown: dict[str, str] = {}
        self.store = MemoryStore()
        self.now = 0.0
        self.add(R, *devices, driver=driver, replicas=replicas, **tokens)
        self.register = Register(self, self.store)

    def foreign_uses(self) -> tuple[Use, ...]:
        return self.foreign

    def add(self, resource: str, *devices: Device, driver: str = D, replicas: int = 1, **tokens: str) -> Listed:
        self.services[resource] = Listed(resource, *devices, tokens=tokens, driver=driver, replicas=replicas)
        return self.services[resource]

    def list(self, *devices: Device, **tokens: str) -> None:
        self.services[R].list(*devices, tokens=tokens)

    async def grant(self, *names: str, resource: str = R) -> None:
        await self.register.grant(resource, {name: self.services[resource].device_of(name) for name in names})

    async def refused(self, *names: str, why: str, resource: str = R) -> None:
        before = self.store.snapshot.allocations.keys()
        with pytest.raises(DeviceConflictError, match=why):
            await self.grant(*names, resource=resource)
        assert self.store.snapshot.allocations.keys() == before

    async def named(self, resource: str = R, *held: str, identity: str = "", amount: Amount = WHOLE) -> None:
        """Have a checkpoint that the kubelet was asked for name a pod with these ids, and no other."""
        self.now += 1.0
        by_id = {
            name: ObservedAllocation(
                self.services[resource].device_of(name) if resource in self.services else name,
                "p",
                holders=frozenset({("u1", "main")}),
                identity=identity,
                amount=amount,
            )
            for name in held
        }
        await self.register.observe(resource, KubeletSnapshot(self.store.snapshot.sequence, self.now, True, by_id))
        self.register.notify()

    async def end(self, *names: str, resource: str = R) -> None:
        """Have the pods of some ids end."""
        held = {device_id for of, device_id in self.store.snapshot.allocations if of == resource}
        await self.named(resource, *held)
        await self.named(resource, *(held - set(names)))

    async def claim(self, *names: str, uid: str = "u", driver: str = D) -> None:
        devices = tuple(ClaimDevice(R, one, identity=self.register.identity(R, one), amount=WHOLE) for one in names)
        claim = Claim(driver, uid, "ml", "train", devices, "{}", 0.0)
        answer = await self.register.decide([key(one) for one in names], lambda view: operations.prepare(claim, view))
        assert isinstance(answer, Claim)

    def side(self, state: State, *names: str) -> None:
        changes = [Change("devices", key(one), DeviceRecord(R, one, state, 0.0)) for one in names]
        self.store.snapshot = self.store.snapshot.with_changes(changes, self.store.snapshot.sequence + 1)

    def withheld(self, side: Side = "plugin", resource: str = R) -> set[str]:
        return set(self.register.withheld(resource, side))


# What excludes what.


async def test_aliases_exclude_each_other() -> None:
    """Of ids for one thing only one is given away; the reason names both."""
    world = World(a="n1", b="n1 x", c="n2")
    await world.grant("a")
    await world.refused("b", why=f"b of {R} and a of {R}, which counts as held, are the same hardware \\(n1\\)")
    await world.grant("a", "c")


async def test_one_holder_does_not_get_one_thing_twice() -> None:
    """Neither by two ids of it, nor by parts that together are more than the whole."""
    await World(a="n1", b="n1 x").refused("a", "b", why="the same hardware")
    await World(part("whole", 10), part("half", 5)).refused("whole", "half", why="does not fit")


async def test_parts_fit_while_counters_suffice() -> None:
    """Halves fit beside each other, the whole beside nothing, and a third not beside two."""

    def parts() -> World:
        return World(part("whole", 10), part("half", 5), part("other", 5), part("third", 1))

    world = parts()
    await world.grant("half", "other")
    await world.refused("third", why=r"third .* does not fit beside half .*, other .* \(counter memory of gpu\)")
    await world.grant("half")
    world = parts()
    await world.grant("half")
    await world.grant("other")
    world = parts()
    await world.grant("whole")
    await world.refused("half", why="whole")
    world = parts()
    await world.grant("third")
    await world.refused("whole", why="third")


@pytest.mark.parametrize("one", [part("a", 1, brings=None), part("a", "-1")], ids=["no capacity", "negative"])
async def test_parts_of_what_is_not_known_exclude_each_other(one: Device) -> None:
    """Without a capacity, or with an amount that is none, nothing fits beside."""
    world = World(one, part("b", 1, brings=None))
    await world.grant("a")
    await world.refused("b", why="does not fit beside a")


async def test_counter_sets_belong_to_a_driver() -> None:
    """The same name of another driver is another set."""
    world = World(part("a", 10))
    world.add("example.com/s", part("b", 10), driver="e.example.com")
    await world.grant("a")
    await world.grant("b", resource="example.com/s")
    assert not world.register.listed.now().related


async def test_counters_that_were_taken_before_a_driver_was_renamed_are_still_taken() -> None:
    """Of a partition that is held the scope is that of its resource now; of a resource that is gone its name then."""
    world = World(part("half", 5), part("whole", 10))
    await world.grant("half")
    world.services.clear()
    world.add(R, part("half", 5), part("whole", 10), driver="e.example.com")
    await world.refused("whole", why="does not fit beside half")


async def test_an_id_that_changes_while_it_is_held_excludes_what_it_was_and_is() -> None:
    """Whoever has the old thing keeps it, whatever id that has now; nobody else gets the id."""
    world = World(a="n1")
    await world.grant("a")
    world.list(a="n2", b="n1", c="n2", d="n3")
    await world.refused("a", why="is held as n1, and is n2 now")
    assert world.withheld() == {"a", "b", "c"}


async def test_a_held_device_that_is_not_listed_excludes_what_it_was() -> None:
    """A link that replaces another one to the same node is the same device."""
    world = World(a="n1")
    await world.grant("a")
    world.list(b="n1")
    await world.refused("b", why="the same hardware")


async def test_ids_of_one_thing_share_its_parts() -> None:
    """Where its ids have several holders each, all of them together get no more than the whole."""
    world = World(a="n1", b="n1", replicas=2)
    await world.grant("a::0")
    await world.grant("b::0")
    for name in ("a::1", "b::1"):
        await world.refused(name, why="the same hardware|is held by")
    assert world.withheld() == {"a::1", "b::1"}
    alone = world.add("example.com/alone", x="n1")
    await world.refused("x", why="the same hardware", resource="example.com/alone")
    await world.end("b::0")
    await world.grant("a::1")
    assert alone.ids_now(Device("x")) == ("x",)


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


@given(DEVICES, st.lists(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=2)))
def test_whatever_is_granted_in_turn_never_overlaps(
    devices: dict[str, tuple[Tokens, int]], wanted: list[set[str]]
) -> None:
    """Holders that come one after the other have no token in common and stay within the counters.

    What is offered is what can be granted.
    """

    async def run() -> None:
        world = World()
        listed = [
            Device(name, consumes={"s": {"m": amount}} if amount else {}, counters={"s": {"m": 4}})
            for name, (_, amount) in devices.items()
        ]
        tokens_now = {name: tokens for name, (tokens, _) in devices.items()}
        world.services[R].inventory.publish(
            [
                Device(
                    one.id, identity=min(tokens_now[one.id], default=""), consumes=one.consumes, counters=one.counters
                )
                for one in listed
            ],
            tokens_now,
        )
        held: set[str] = set()
        for names in wanted:
            if not names <= devices.keys() - held:
                continue
            offered = names.isdisjoint(world.register.withheld(R, "plugin"))
            try:
                await world.grant(*sorted(names))
            except DeviceConflictError:
                assert not (offered and len(names) == 1)
            else:
                held |= names
        tokens = [token for name in held for token in devices[name][0]]
        assert len(tokens) == len(set(tokens))
        assert sum(devices[name][1] for name in held) <= 4

    asyncio.run(run())


# What was granted, and by whom.


class SlowStore(MemoryStore):
    """Decides at once, and takes its time to record; so that of two operations the second knows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def do(self, operation: Operation[_T]) -> _T:
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().do(operation)


async def test_two_grants_at_once_do_not_both_pass() -> None:
    """Whatever is asked while a grant is being recorded is decided after it; one that failed does not count."""
    world = World(a="n1", b="n1", c="n2")
    store = world.register.store = SlowStore()
    store.error = LedgerError("the disk is full")
    store.go_on.set()
    with pytest.raises(LedgerError):
        await world.grant("a")
    store.error = None
    store.go_on.clear()
    first, second = (asyncio.create_task(world.grant(name)) for name in "ba")
    await store.begun.wait()
    store.go_on.set()
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert answers[0] is None
    assert "the same hardware" in str(answers[1])


async def test_nothing_is_released_while_it_is_granted() -> None:
    """Nor another id of the same thing: the hook would work on what a pod has by then."""
    world = World(a="n1", b="n1", c="n2")
    store = world.register.store = SlowStore()
    grant = asyncio.create_task(world.grant("a"))
    await store.begun.wait()
    assert [world.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    store.go_on.set()
    await grant
    assert [world.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    assert world.register.is_free(key("a"), {("id", R, "a")})


async def test_what_was_granted_is_remembered_as_what_it_was() -> None:
    """Two ids swap what they lead to: both are withheld until the holder ends, then they are as they are."""
    world = World(a="n1", b="n2", c="n3")
    await world.grant("a")
    world.list(a="n2", b="n1", c="n3")
    assert world.withheld() == {"a", "b"}
    await world.refused("a", why="is held as n1")
    with pytest.raises(DeviceConflictError, match="is not what its holder was given: n1, now n2"):
        await world.register.verify_granted([key("a")])
    await world.end("a")
    assert world.withheld() == set()
    await world.grant("a")
    await world.register.verify_granted([key("a")])
    assert world.register.identity(R, "a") == f"boot:{boot_id()} n2"


async def test_what_is_not_listed_any_more_is_not_granted() -> None:
    """A device that is another thing than it was listed as is refused, and listed as what it is."""
    world = World()
    device = Device("a", identity="n2")
    world.services[R].inventory.publish([device], {"a": frozenset({"n1"})})
    await world.refused("a", why="is not what it was listed as: n1, now n2")
    await world.grant("a")
    assert world.register.identity(R, "a") == seen("n2")


def test_a_ledger_knows_what_was_granted_before() -> None:
    """A holder from before a restart excludes what its device was, also if its id is not listed any more."""
    world = World(b="n1", c="n2")
    record = AllocationRecord(R, "a", "a", 0.0, 1, identity=seen("n1"), amount=WHOLE)
    world.store.snapshot = world.store.snapshot.with_changes([Change("allocations", key("a"), record)], 1)
    assert world.withheld() == {"b"}


async def test_a_holding_of_unknown_identity_is_what_its_device_is_listed_as() -> None:
    """So after a reboot, where the answer to Allocate says nothing of this boot; one that is known stays.

    It counts at the next grant, though nothing has been scanned since the list.
    """
    world = World()
    await world.named(R, "a", identity=recorded(frozenset({"n9"}), "another boot"))
    world.list(a="n1", b="n1", c="n3")
    await world.refused("b", why="the same hardware")
    assert world.store.snapshot.allocations[key("a")].identity == seen("n1")
    world.list(a="n2", b="n1", c="n3")
    await world.refused("b", why="the same hardware")
    assert world.withheld() == {"a", "b"}


async def test_all_nodes_of_an_answer_are_those_of_its_devices_until_these_are_listed() -> None:
    """Its devices are not told apart before; one that is listed as something else keeps what its holder got."""
    world = World(d="n1", e="n2", f="n9")
    unsure = recorded(frozenset({"n1", "n2", "n3"}), boot_id(), sure=False)
    await world.named(R, "a", "b", "c", identity=unsure)
    assert world.withheld() == {"d", "e"}
    world.list(a="n1", b="n2", c="n9", d="n1", e="n2", f="n9", g="n3")
    await world.register.adopt()
    identities = [world.store.snapshot.allocations[key(name)].identity for name in "abc"]
    assert identities == [seen("n1"), seen("n2"), unsure]
    assert world.withheld() >= {"c", "d", "e", "g"}
    assert {"a", "b"} & world.withheld() == {"a", "b"}, "c's holder may have either"
    await world.end("c")
    assert world.withheld() == {"d", "e", "f"}
    await world.named(R, "a", "b", identity=unsure)
    assert world.store.snapshot.allocations[key("a")].identity == seen("n1")


async def test_which_holder_is_not_known_gets_nothing() -> None:
    """While evidence is missing nothing is granted, and the reason says what is missing."""
    world = World(a="n1", b="n2")
    world.unknown = {"a": "the kubelet's claim state cannot be read"}
    with pytest.raises(UnknownHolderError, match="device a is not known yet: the kubelet's claim state"):
        await world.grant("a")
    assert not world.register.offers(R, "a")
    assert world.register.offers(R, "b")
    await world.grant("b")


async def test_the_other_side_gets_nothing() -> None:
    """What claims may have is neither shown to the kubelet nor granted; the refusal says where it is."""
    world = World(a="n1", b="n2")
    world.side(State.DRA, "a")
    with pytest.raises(OtherSideError, match=r"'a' of example\.com/r is on the DRA side"):
        await world.grant("b", "a")
    assert not world.store.snapshot.allocations
    assert not world.register.offers(R, "a")


# What others hold.


def other(tokens: str, *, unit: tuple[str, ...] = ("id", FORMER, "x", "u1", "main"), **known: Any) -> Use:
    """Return what a pod of another plugin has, or a claim of a driver that is not served."""
    title = known.pop("title", "pod default/p")
    return Use(unit, title, known.pop("key", None), frozenset(tokens.split()), known.pop("part", None), **known)


@pytest.mark.parametrize(
    ("resource", "name"), [(R, "gone"), (FORMER, "a"), (FORMER, "x::1")], ids=["gone", "former", "former replica"]
)
async def test_what_a_pod_holds_by_another_name_is_withheld(resource: str, name: str) -> None:
    """Also by a name of a resource that is served no more, or of a gone device; others are granted as before."""
    world = World(a="n1", b="n2")
    await world.named(resource, name, identity=seen("n1"))
    await world.refused("a", why="the same hardware")
    assert world.withheld() == world.withheld("dra") == {"a"}
    assert [world.register.is_free(key(one)) for one in "ab"] == [False, True]
    await world.grant("b")
    await world.named(resource)
    assert world.withheld() == set()
    await world.grant("a")


async def test_a_resource_that_is_served_no_more_keeps_its_holders() -> None:
    """A reload that drops a resource, or names it anew, changes nothing of what is held."""
    world = World(a="n1", b="n2")
    world.add(FORMER, x="n1")
    await world.grant("x", resource=FORMER)
    del world.services[FORMER]
    await world.refused("a", why=f"x of {FORMER}, which counts as held")
    assert not world.register.is_free(key("a"))
    assert world.withheld() == world.withheld("dra") == {"a"}


async def test_what_other_plugins_hold_is_withheld() -> None:
    """How much of it they have is not known, so that nothing is left of it; also what was allocated just now."""
    world = World(a="n1", b="n2")
    world.foreign = (other("n1"),)
    await world.refused("a", why="what pod default/p has, which counts as held, are the same hardware")
    assert world.withheld() == world.withheld("dra") == {"a"}
    assert [world.register.is_free(key(one)) for one in "ab"] == [False, True]
    world.foreign = ()
    await world.grant("a")


async def test_what_another_agent_granted_leaves_the_rest() -> None:
    """Our answers say how much a holder has: beside a half there is a half."""
    world = World(a="n1", replicas=2)
    world.foreign = (other("n1", part=Fraction(1, 2)),)
    await world.grant("a::0")
    await world.refused("a::1", why="the same hardware|is held by")
    world.foreign = (other("n1", part=Fraction(1)),)
    assert world.withheld() == {"a::0", "a::1"}


async def test_what_is_granted_is_read_anew() -> None:
    """The checkpoint and the claim state may have changed since the last look."""
    world = World(a="n1")

    async def reread() -> None:
        world.foreign = (other("n1"),)

    world.reread = reread  # type: ignore[method-assign]
    await world.refused("a", why="the same hardware")


async def test_an_id_that_stands_for_another_device_than_its_holder_got_is_withheld() -> None:
    """An agent that starts does not take what the id stands for now for what it stood for then."""
    world = World(a="n2", b="n1", c="n3")
    for _ in range(2):
        await world.named(R, "a", identity=seen("n1"))
        await world.register.adopt()
        assert world.withheld() == {"a", "b"}


async def test_what_an_orphaned_claim_holds_is_withheld() -> None:
    """The reason names the claim; when it has ended, subscribers hear of it."""
    world = World(a="n1", b="n2")
    calls: list[None] = []
    world.register.subscribe(lambda: calls.append(None))
    world.foreign = (other("n1", unit=("claim", "old.example.com", "u"), title="claim ml/train of old.example.com"),)
    await world.refused("a", why=r"claim ml/train of old\.example\.com")
    world.register.notify()
    world.foreign = ()
    before = len(calls)
    world.register.notify()
    assert len(calls) == before + 1
    world.register.notify()
    assert len(calls) == before + 1
    await world.grant("a")


# What is offered.


async def test_an_id_is_offered_beside_its_own_holder() -> None:
    """The kubelet counts its holder itself; only what would be more than the whole is withheld."""
    world = World(a="n1", b="n2", replicas=2)
    await world.grant("a::0")
    await world.grant("b::0", "b::1")
    assert world.withheld() == set()
    world.services[R].source.replicas = 3
    assert world.withheld() == {"a::2", "b::2"}


async def test_ids_of_one_thing_are_offered_once() -> None:
    """The first one is, unless another one is held: what the kubelet and the scheduler count is what there is."""
    world = World(a10="n1", a9="n1", b="n2")
    assert world.register.withheld(R, "plugin") == {"a10": f"it is offered as a9 of {R}"}
    await world.grant("a10")
    assert world.withheld() == {"a9"}


def test_members_on_two_sides_are_offered_on_neither() -> None:
    """Nothing is offered on one side while a peer is on the other."""
    world = World(a="n1", b="n1", c="n2")
    world.side(State.DRA, "b")
    assert world.withheld() == {"a", "b"}
    assert world.withheld("dra") == {"a", "b"}


async def test_slices_offer_parts_beside_parts_that_claims_hold() -> None:
    """The scheduler counts what claims have; of what pods have it knows nothing."""
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]

    def listed() -> World:
        return World(*halves, Device("w", consumes={"g": {"m": 10}}))

    world = listed()
    world.side(State.DRA, *"xyw")
    await world.claim("x")
    assert world.withheld("dra") == set()
    world = listed()
    await world.grant("x")
    world.side(State.DRA, *"yw")
    assert world.withheld("dra") >= {"w"}
    world.side(State.DRA, "x")
    assert world.withheld("dra") == {"x", "w"}


async def test_slices_offer_what_claims_of_the_same_driver_hold() -> None:
    """The scheduler counts them itself; those of a former driver, and pods, it does not know."""
    world = World(a="n1", b="n2", c="n3")
    world.side(State.DRA, *"abc")
    await world.claim("a")
    await world.claim("b", uid="v", driver="former.example.com")
    assert world.withheld("dra") == {"b"}
    assert world.withheld() == {"a", "b"}


async def test_subscribers_hear_of_holders_that_matter() -> None:
    """Subscribers are called once for a change."""
    world = World(a="n1", b="n1", c="n2")
    world.register.notify()
    calls: list[None] = []
    world.register.subscribe(lambda: calls.append(None))
    await world.grant("c")
    assert not calls, "what has no peers concerns nobody else"
    await world.grant("a")
    assert len(calls) == 1
    world.register.notify()
    assert len(calls) == 1


# Hooks.


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
    world.register.subscribe(lambda: reconciled.put_nowait(None))
    try:
        with pytest.raises(HookTimeoutError):
            await world.register.hooks.call(HookStatistics(), "reset", Slow(), [Device("a")])
        await reconciled.get()
        await world.register.verify([key("c")])
        for device in ("a", "b"):
            with pytest.raises(
                DeviceConflictError, match=r"a of .*: `reset` is still running on it, after its timeout"
            ):
                await world.register.verify([key(device)], resets=False)
        assert world.withheld("dra") == world.withheld() == {"a", "b"}
        assert world.register.withheld(R, "plugin")["a"] == "`reset` is still running on it, after its timeout"
        assert [world.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    finally:
        over.set()
    await reconciled.get()
    assert world.withheld() == {"b"}
    await world.register.verify([key("a")])


async def test_parts_of_what_a_hook_works_on_are_neither_granted_nor_offered() -> None:
    """A hook of one half may work on what the other half is a part of, too."""
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]
    world = World(*halves)
    over = threading.Event()

    class Slow(DeviceSource):
        resource = R
        hook_timeout = 0.01

        def released(self, devices: Sequence[Device]) -> None:
            over.wait()

    try:
        assert "did not answer" in await world.register.hooks.start(HookStatistics(), "released", Slow(), [halves[0]])
        with pytest.raises(DeviceConflictError, match=r"x of .*: `released` is still running on it"):
            await world.register.verify([key("y")])
        assert world.withheld("dra") == world.withheld() == {"x", "y"}
    finally:
        over.set()


async def turns() -> None:
    """Let all that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_grant_waits_for_every_hook_that_begins_meanwhile() -> None:
    """While it waits for one hook nobody has the device yet, so that another one may begin."""
    world = World(a="n1", b="n1")
    over = {name: asyncio.Event() for name in "ab"}

    class Slow(DeviceSource):
        resource = R

        async def released(self, devices: Sequence[Device]) -> None:
            await over[devices[0].id].wait()

    first = world.register.hooks.start(HookStatistics(), "released", Slow(), [Device("a")])
    grant = asyncio.create_task(world.grant("a"))
    await turns()
    second = world.register.hooks.start(HookStatistics(), "released", Slow(), [Device("b")])
    over["a"].set()
    await first
    await turns()
    assert not grant.done()
    over["b"].set()
    await second
    await grant


async def test_a_device_of_the_other_side_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """That a claim holds it is no reason to look for it among those of pods."""
    caplog.set_level("INFO")
    world = World(Device("x"))
    world.side(State.DRA, "x")
    await world.claim("x")
    assert set(world.register.withheld(R, "plugin")) == {"x"}
    assert world.register.last_withheld(R) == {}
    assert "is not offered" not in caplog.text
