"""Which devices a process's register grants and offers, and which devices exclude each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pytest

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError, DeviceKey, HardwareIndex, hardware_of
from deviceplugin.hook_runs import HookRun
from deviceplugin.hooks import HookStatistics, HookTimeoutError
from deviceplugin.identity import UNIDENTIFIED, Identity, Tokens, boot_id, identified
from deviceplugin.register import operations
from deviceplugin.register.question import Use
from deviceplugin.register.records import (
    UNKNOWN,
    WHOLE,
    Amount,
    Change,
    Claim,
    ClaimDevice,
    DeviceRecord,
    LedgerError,
    Operation,
    SideName,
    State,
)
from deviceplugin.register.rules import Excluded, KubeletSnapshot, ObservedAllocation
from deviceplugin.register.store import MemoryStore
from deviceplugin.source import DeviceSource
from tests.identities import seen_as
from tests.register.resources import ListedResource, ListedResources

R = "example.com/r"
FORMER = "example.com/former"
D = "d.example.com"
NONE: Tokens = frozenset()
_T = TypeVar("_T")


def key(name: str) -> DeviceKey:
    return R, name


def hardware(**devices: Device | str) -> HardwareIndex:
    """Return an index of devices by id. devices: by id a device, or the tokens of a device without counters."""
    return HardwareIndex(
        {
            key(name): hardware_of(Device(name), frozenset(one.split()), "d")
            if isinstance(one, str)
            else hardware_of(one, NONE, "d")
            for name, one in devices.items()
        }
    )


def part(name: str, memory: int | str, *, brings: int | str | None = 10) -> Device:
    counters: Mapping[str, Mapping[str, int | str]] = {"gpu": {"memory": brings}} if brings is not None else {}
    return Device(name, consumes={"gpu": {"memory": memory}}, counters=counters)


def seen(tokens: str) -> Identity:
    """Return the identity that a record of this boot has for a device with these tokens."""
    return identified(frozenset(tokens.split()), boot_id())


class RegisterInMemory(ListedResources):
    """A register of one or more resources, which is in memory only; a test sets the holders."""

    def __init__(self, *devices: Device, driver: str = D, replicas: int = 1, **tokens: str) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        super().__init__(self.store, ListedResource(R, *devices, driver=driver, replicas=replicas, **tokens))

    def add(self, resource: str, *devices: Device, driver: str = D, replicas: int = 1, **tokens: str) -> ListedResource:
        self.services[resource] = ListedResource(resource, *devices, driver=driver, replicas=replicas, **tokens)
        return self.services[resource]

    def list(self, *devices: Device, **tokens: str) -> None:
        self.services[R].list(*devices, **tokens)

    async def grant(self, *names: str, resource: str = R) -> None:
        await self.register.grant(resource, {name: self.services[resource].device_of(name) for name in names})

    async def refused(self, *names: str, why: str, resource: str = R) -> None:
        before = self.store.snapshot.allocations.keys()
        with pytest.raises(DeviceConflictError, match=why):
            await self.grant(*names, resource=resource)
        assert self.store.snapshot.allocations.keys() == before

    async def named(
        self,
        resource: str = R,
        *held: str,
        identity: Identity = UNIDENTIFIED,
        amount: Amount = WHOLE,
        pod: str = "u1",
    ) -> None:
        """Record the result of a scan in which a current checkpoint names a pod with these ids only."""
        self.now += 1.0
        by_id = {
            name: ObservedAllocation(
                self.services[resource].device_of(name) if resource in self.services else name,
                "p",
                holders=frozenset({(pod, "main")}),
                identity=identity,
                amount=amount,
            )
            for name in held
        }
        seen = KubeletSnapshot(self.store.snapshot.sequence, self.now, True, by_id)
        await self.register.observe({resource: seen})
        self.register.notify()

    async def end(self, *names: str, resource: str = R) -> None:
        """Record that the pods with these ids have ended."""
        held = {device_id for of, device_id in self.store.snapshot.allocations if of == resource}
        await self.named(resource, *held)
        await self.named(resource, *(held - set(names)))

    async def claim(self, *names: str, uid: str = "u", driver: str = D) -> None:
        devices = tuple(
            ClaimDevice(R, one, identity=self.register.wanted(R, one).identity, amount=WHOLE) for one in names
        )
        claim = Claim(driver, uid, "ml", "train", devices, "{}", 0.0)
        answer = await self.register.decide([key(one) for one in names], lambda view: operations.prepare(claim, view))
        assert isinstance(answer, Claim)

    def side(self, state: State, *names: str) -> None:
        changes = [Change("devices", key(one), DeviceRecord(R, one, state, 0.0)) for one in names]
        self.store.snapshot = self.store.snapshot.with_changes(changes, self.store.snapshot.sequence + 1)

    def withheld(self, side: SideName = "plugin", resource: str = R) -> set[str]:
        return set(self.register.withheld(resource, side).ids)


# Devices that exclude each other.


def test_a_part_is_found_by_the_larger_devices_tokens() -> None:
    """A larger device's token counts as listed and leads to the parts, which are no peers of each other."""
    parts = {name: Device(name, identity=name, part_of=["char:195:0"]) for name in ("p0", "p1")}
    index = HardwareIndex(
        {key(name): hardware_of(part, frozenset({name}), "d", frozenset(part.part_of)) for name, part in parts.items()}
    )
    assert index.having_any({"char:195:0"}) == {key("p0"), key("p1")}
    assert "char:195:0" in index.listed
    assert not index.related


async def test_an_unknown_holder_of_a_part_holds_the_larger_device() -> None:
    """If a pod may have a partition, or a hook runs on it, no pod gets the whole device; another partition is free."""
    parts = [Device(name, identity=name, part_of=["gpu"]) for name in ("p0", "p1")]
    here = RegisterInMemory(*parts)
    here.add("example.com/whole", gpu="gpu")
    await here.named(R, "former-id", amount=UNKNOWN)
    await here.refused("gpu", resource="example.com/whole", why="p0 of example.com/r, which counts as held")
    await here.named(R)
    over = asyncio.get_running_loop().create_future()
    over.set_result(None)
    here.register.hooks.running.append(HookRun("reset", {key("p0"): frozenset({"p0"})}, over, overdue=True))
    await here.refused("gpu", resource="example.com/whole", why="p0 of example.com/r: `reset` is still running on it")
    await here.grant("p1")


async def test_counters_that_were_taken_before_a_driver_was_renamed_are_still_taken() -> None:
    """A held partition's counters stay taken after a rename of the driver: the whole device is refused."""
    here = RegisterInMemory(part("half", 5), part("whole", 10))
    await here.grant("half")
    here.services.clear()
    here.add(R, part("half", 5), part("whole", 10), driver="e.example.com")
    await here.refused("whole", why="does not fit beside half")


async def test_a_stick_that_comes_back_is_its_holders_and_its_numbers_are_nobodys() -> None:
    """If a held USB device gets another number, other devices with either number are withheld until its holder ends."""
    first, second = "hardware:usb:1:2:A#tty", "hardware:usb:1:2:B#tty"
    here = RegisterInMemory(a=f"{first} char:188:1")
    await here.grant("a")
    here.list(a=f"{first} char:188:2", b=f"{second} char:188:1", c="n9")
    assert here.withheld() == {"b"}, "a is what its holder was given, b has the number that it was given"
    await here.refused("b", why="the same hardware \\(char 188:1\\)")
    await here.grant("c")
    here.list(b=f"{second} char:188:2", c="n9")
    await here.refused("b", why="the same hardware \\(char 188:2\\)")
    await here.end("a")
    await here.grant("b")


async def test_the_next_holder_of_a_stick_does_not_have_its_former_holders_numbers() -> None:
    """If a USB device is granted again, its former numbers are withheld until a checkpoint names the next container."""
    first, second, third = (f"hardware:usb:1:2:{serial}#tty" for serial in "ABC")
    here = RegisterInMemory(a=f"{first} char:188:1")
    await here.grant("a")
    await here.named(R, "a", pod="former")
    here.list(a=f"{first} char:188:2")
    await here.register.adopt()
    here.list(a=f"{first} char:188:3", b=f"{second} char:188:1", c=f"{third} char:188:2")
    await here.grant("a")
    assert here.withheld() == {"b", "c"}, "the next pod's container is not named yet"
    await here.named(R, "a", pod="former")
    assert here.withheld() == {"b", "c"}
    await here.named(R, "a", pod="next")
    assert not here.withheld()
    await here.grant("b", "c")


async def test_numbers_of_a_grant_whose_container_is_not_known_are_the_next_holders_too() -> None:
    """If no checkpoint named a grant's container, the grant's device number is withheld until the next holder ends."""
    first, second = "hardware:usb:1:2:A#tty", "hardware:usb:1:2:B#tty"
    here = RegisterInMemory(a=f"{first} char:188:1")
    await here.grant("a")
    here.list(a=f"{first} char:188:2", b=f"{second} char:188:1")
    await here.grant("a")
    await here.named(R, "a")
    assert here.withheld() == {"b"}
    await here.end("a")
    assert not here.withheld()


async def test_the_next_holder_of_a_replica_has_the_part_that_it_was_granted() -> None:
    """A replica of 1/2 counts as 1/3 after a new grant of 1/3, once a checkpoint names the container of this grant."""
    here = RegisterInMemory(Device("a"), replicas=2)
    await here.grant("a::0")
    await here.named(R, "a::0", pod="former", amount=UNKNOWN)
    here.services[R] = ListedResource(R, Device("a"), driver=D, replicas=3)
    await here.grant("a::0", "a::1")
    await here.refused("a::2", why="is held by")
    await here.named(R, "a::0", "a::1", pod="next", amount=UNKNOWN)
    await here.grant("a::2")


async def test_sticks_that_swap_their_numbers_are_not_held_twice() -> None:
    """If two held USB devices swap numbers, none counts as held twice; each is withheld until the other is free."""
    first, second = "hardware:usb:1:2:A#tty", "hardware:usb:1:2:B#tty"
    here = RegisterInMemory(a=f"{first} char:188:1", b=f"{second} char:188:2")
    await here.grant("a")
    await here.grant("b")
    here.list(a=f"{first} char:188:2", b=f"{second} char:188:1")
    await here.register.adopt()
    assert not here.register.held_twice()
    assert here.withheld() == {"a", "b"}
    await here.end("a")
    assert here.withheld() == {"a"}, "the holder of b may reach it"
    await here.end("b")
    assert not here.withheld()


async def test_another_stick_with_the_number_of_the_first_is_not_the_same_device() -> None:
    """If the path of a held device leads to another USB device, the device is withheld until the holder has ended."""
    here = RegisterInMemory(ttyUSB0="hardware:usb:1:2:A#tty char:188:0")
    await here.grant("ttyUSB0")
    here.list(ttyUSB0="hardware:usb:1:2:B#tty char:188:0")
    assert here.withheld() == {"ttyUSB0"}
    await here.refused("ttyUSB0", why="is held as char 188:0, hardware usb:1:2:A#tty, and is char 188:0, hardware usb")
    await here.end("ttyUSB0")
    await here.grant("ttyUSB0")


def test_groups_reach_through_others() -> None:
    """Devices are of one group if they consume from a common counter set, or each has one in common with a third."""
    now = hardware(
        a=Device("a", consumes={"x": {"m": 1}}),
        b=Device("b", consumes={"y": {"m": 1}}),
        c=Device("c", consumes={"x": {"m": 1}, "y": {"m": 1}}),
        d="n1",
    )
    assert now.group(key("b"), now.related) == (key("a"), key("b"), key("c"))
    assert now.group(key("b"), ()) == (key("b"),)
    assert now.group(key("d"), now.related) == (key("d"),)


# Grants and their holders.


class SlowStore(MemoryStore):
    """A store that waits before each operation until a test sets `go_on`, and then raises `error` if it is set."""

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
    """Of two simultaneous grants of one device the second is refused; an earlier grant that failed does not count."""
    here = RegisterInMemory(a="n1", b="n1", c="n2")
    store = here.register.store = SlowStore()
    store.error = LedgerError("the disk is full")
    store.go_on.set()
    with pytest.raises(LedgerError):
        await here.grant("a")
    store.error = None
    store.go_on.clear()
    first, second = (asyncio.create_task(here.grant(name)) for name in "ba")
    await store.begun.wait()
    store.go_on.set()
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert answers[0] is None
    assert "the same hardware" in str(answers[1])


async def test_nothing_is_released_while_it_is_granted() -> None:
    """While a grant is recorded, and afterwards, no id of the same hardware is free, so `released` is not called."""
    here = RegisterInMemory(a="n1", b="n1", c="n2")
    store = here.register.store = SlowStore()
    grant = asyncio.create_task(here.grant("a"))
    await store.begun.wait()
    assert [here.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    store.go_on.set()
    await grant
    assert [here.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    assert here.register.is_free(key("a"), {("id", R, "a")})


async def test_what_was_granted_is_remembered_as_what_it_was() -> None:
    """If two device ids swap their hardware while a pod holds one, both are withheld until the pod has ended."""
    here = RegisterInMemory(a="n1", b="n2", c="n3")
    await here.grant("a")
    here.list(a="n2", b="n1", c="n3")
    assert here.withheld() == {"a", "b"}
    await here.refused("a", why="is held as n1")
    with pytest.raises(DeviceConflictError, match="is not what its holder was given: n1, now n2"):
        await here.register.verify_granted([key("a")])
    await here.end("a")
    assert here.withheld() == set()
    await here.grant("a")
    await here.register.verify_granted([key("a")])
    assert here.register.wanted(R, "a").identity == seen_as(boot_id(), "n2")


async def test_what_is_not_listed_any_more_is_not_granted() -> None:
    """A device that is no longer the hardware of its list is refused once; the next grant records the new identity."""
    here = RegisterInMemory()
    device = Device("a", identity="n2")
    here.services[R].inventory.publish([device], {"a": frozenset({"n1"})})
    await here.refused("a", why="is not what it was listed as: n1, now n2")
    await here.grant("a")
    assert here.register.wanted(R, "a").identity == seen("n2")


async def test_a_holding_of_unknown_identity_is_what_its_device_is_listed_as() -> None:
    """After a reboot a held device of unknown identity gets the identity that it is listed with, at the next request.

    A known identity does not change with later lists.
    """
    here = RegisterInMemory()
    await here.named(R, "a", identity=identified(frozenset({"n9"}), "another boot"))
    here.list(a="n1", b="n1", c="n3")
    await here.refused("b", why="the same hardware")
    assert here.store.snapshot.allocations[key("a")].identity == seen("n1")
    here.list(a="n2", b="n1", c="n3")
    await here.refused("b", why="the same hardware")
    assert here.withheld() == {"a", "b"}


async def test_all_nodes_of_an_answer_are_those_of_its_devices_until_these_are_listed() -> None:
    """All nodes in a response for several devices count for each device, until the list has the device's own node."""
    here = RegisterInMemory(d="n1", e="n2", f="n9")
    unsure = identified(frozenset({"n1", "n2", "n3"}), boot_id(), sure=False)
    await here.named(R, "a", "b", "c", identity=unsure)
    assert here.withheld() == {"d", "e"}
    here.list(a="n1", b="n2", c="n9", d="n1", e="n2", f="n9", g="n3")
    await here.register.adopt()
    identities = [here.store.snapshot.allocations[key(name)].identity for name in "abc"]
    assert identities == [seen("n1"), seen("n2"), unsure]
    assert here.withheld() >= {"c", "d", "e", "g"}
    assert {"a", "b"} & here.withheld() == {"a", "b"}, "c's holder may have either"
    await here.end("c")
    assert here.withheld() == {"d", "e", "f"}
    await here.named(R, "a", "b", identity=unsure)
    assert here.store.snapshot.allocations[key("a")].identity == seen("n1")


# Devices that pods of other plugins and claims of other drivers hold.


def other(tokens: str, *, unit: tuple[str, ...] = ("id", FORMER, "x", "u1", "main"), **known: Any) -> Use:
    """Return the use of a device by a pod of another plugin, or by a claim of a driver that is not served."""
    title = known.pop("title", "pod default/p")
    return Use(unit, title, known.pop("key", None), frozenset(tokens.split()), known.pop("part", None), **known)


@pytest.mark.parametrize(
    ("resource", "name"), [(R, "gone"), (FORMER, "a"), (FORMER, "x::1")], ids=["gone", "former", "former replica"]
)
async def test_what_a_pod_holds_by_another_name_is_withheld(resource: str, name: str) -> None:
    """If a pod holds hardware by the id of a gone device or former resource, the hardware's present id is withheld."""
    here = RegisterInMemory(a="n1", b="n2")
    await here.named(resource, name, identity=seen("n1"))
    await here.refused("a", why="the same hardware")
    assert here.withheld() == here.withheld("dra") == {"a"}
    assert [here.register.is_free(key(one)) for one in "ab"] == [False, True]
    await here.grant("b")
    await here.named(resource)
    assert here.withheld() == set()
    await here.grant("a")


async def test_what_is_granted_is_read_anew() -> None:
    """A grant reads the files about other holders again, and is refused for a use that was not there before."""
    here = RegisterInMemory(a="n1")

    async def reread(*, checkpoint: bool = True) -> None:
        here.foreign = (other("n1"),)

    here.reread = reread  # type: ignore[method-assign]
    await here.refused("a", why="the same hardware")


async def test_what_others_got_while_a_grant_waited_for_a_hook_is_refused() -> None:
    """If other holders get the devices while a grant and a Prepare wait for a hook, both are refused after the wait."""
    here = RegisterInMemory(a="n1", b="n2")
    here.side(State.DRA, "b")
    begun, over, files = asyncio.Event(), asyncio.Event(), tuple[Use, ...]()

    class Slow(DeviceSource):
        resource = R

        async def unprepare(self, devices: Sequence[Device]) -> None:
            begun.set()
            await over.wait()

    async def reread(*, checkpoint: bool = True) -> None:
        here.foreign = files

    here.reread = reread  # type: ignore[method-assign]
    hook = asyncio.create_task(
        here.register.hooks.call(HookStatistics(), "unprepare", Slow(), [Device("a"), Device("b")])
    )
    await begun.wait()
    pod = asyncio.create_task(here.grant("a"))
    claim = Claim(D, "u", "ml", "train", (ClaimDevice(R, "b", identity=seen("n2"), amount=WHOLE),), "{}", 0.0)
    claims = asyncio.create_task(here.register.decide([key("b")], lambda view: operations.prepare(claim, view)))
    await turns()
    assert not pod.done()
    assert not claims.done()
    files = other("n1"), other("n2")
    over.set()
    await hook
    with pytest.raises(DeviceConflictError, match="the same hardware"):
        await pod
    answer = await claims
    assert isinstance(answer, Excluded)
    assert "the same hardware" in answer.message
    assert not here.store.snapshot.index


async def test_what_others_hold_is_withheld() -> None:
    """A device that another driver's claim holds is withheld from limits and claims until that claim ends."""
    here = RegisterInMemory(a="n1", b="n2")
    calls: list[None] = []
    here.register.subscribe(lambda: calls.append(None))
    here.foreign = (other("n1", unit=("claim", "old.example.com", "u"), title="claim ml/train of old.example.com"),)
    await here.refused(
        "a", why=r"what claim ml/train of old\.example\.com has, which counts as held, are the same hardware"
    )
    assert here.withheld() == here.withheld("dra") == {"a"}
    assert [here.register.is_free(key(one)) for one in "ab"] == [False, True]
    here.register.notify()
    here.foreign = ()
    before = len(calls)
    here.register.notify()
    assert len(calls) == before + 1
    here.register.notify()
    assert len(calls) == before + 1
    await here.grant("a")


# Devices that are offered.


async def test_an_id_is_offered_beside_its_own_holder() -> None:
    """A held id stays offered; after an increase of replicas, ids that exceed the whole device are withheld."""
    here = RegisterInMemory(a="n1", b="n2", replicas=2)
    await here.grant("a::0")
    await here.grant("b::0", "b::1")
    assert here.withheld() == set()
    here.services[R].source.replicas = 3
    assert here.withheld() == {"a::2", "b::2"}


async def test_ids_of_one_thing_are_offered_once() -> None:
    """Of several ids of the same hardware one is offered: the held one, else the first in natural order."""
    here = RegisterInMemory(a10="n1", a9="n1", b="n2")
    assert here.register.withheld(R, "plugin").ids == {"a10": f"it is offered as a9 of {R}"}
    await here.grant("a10")
    assert here.withheld() == {"a9"}


def test_members_on_two_sides_are_offered_on_neither() -> None:
    """If two ids of the same hardware are on different sides (device plugin and DRA), neither id is offered."""
    here = RegisterInMemory(a="n1", b="n1", c="n2")
    here.side(State.DRA, "b")
    assert here.withheld() == {"a", "b"}
    assert here.withheld("dra") == {"a", "b"}


async def test_slices_offer_parts_beside_parts_that_claims_hold() -> None:
    """Slices still have all partitions if a claim holds one; if a pod holds one, the whole device is withheld."""
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]

    def listed() -> RegisterInMemory:
        return RegisterInMemory(*halves, Device("w", consumes={"g": {"m": 10}}))

    here = listed()
    here.side(State.DRA, *"xyw")
    await here.claim("x")
    assert here.withheld("dra") == set()
    here = listed()
    await here.grant("x")
    here.side(State.DRA, *"yw")
    assert here.withheld("dra") >= {"w"}
    here.side(State.DRA, "x")
    assert here.withheld("dra") == {"x", "w"}


async def test_slices_offer_what_claims_of_the_same_driver_hold() -> None:
    """Slices still have a device that a claim of their driver holds, but not one that a former driver's claim holds."""
    here = RegisterInMemory(a="n1", b="n2", c="n3")
    here.side(State.DRA, *"abc")
    await here.claim("a")
    await here.claim("b", uid="v", driver="former.example.com")
    assert here.withheld("dra") == {"b"}
    assert here.withheld() == {"a", "b"}


async def test_subscribers_hear_of_holders_that_matter() -> None:
    """Subscribers are called for a new holder only if another device id is the same hardware."""
    here = RegisterInMemory(a="n1", b="n1", c="n2")
    here.register.notify()
    calls: list[None] = []
    here.register.subscribe(lambda: calls.append(None))
    await here.grant("c")
    assert not calls, "what has no peers concerns nobody else"
    await here.grant("a")
    assert len(calls) == 1
    here.register.notify()
    assert len(calls) == 1


async def test_the_end_of_a_former_drivers_claim_concerns_the_driver_that_the_config_names() -> None:
    """Subscribers are called when a former driver's claim ends, also for a device without an identity."""
    here = RegisterInMemory()
    here.add(R, Device("a"), driver=D)
    here.side(State.DRA, "a")
    await here.claim("a", driver="former.example.com")
    here.register.notify()
    calls: list[None] = []
    here.register.subscribe(lambda: calls.append(None))
    await here.store.do(operations.unprepare("former.example.com", "u"))
    here.register.notify()
    assert len(calls) == 1


# Hooks.


async def test_nothing_that_a_hook_works_on_after_its_timeout_is_granted() -> None:
    """While a `reset` still runs after its timeout, no id of its device's hardware is granted or offered."""
    here = RegisterInMemory(a="n1", b="n1", c="n2")
    over = threading.Event()

    class Slow(DeviceSource):
        resource = R
        hook_timeout = 0.01

        def reset(self, devices: Sequence[Device]) -> None:
            over.wait()

    reconciled: asyncio.Queue[None] = asyncio.Queue()
    here.register.subscribe(lambda: reconciled.put_nowait(None))
    try:
        with pytest.raises(HookTimeoutError):
            await here.register.hooks.call(HookStatistics(), "reset", Slow(), [Device("a")])
        await reconciled.get()
        await here.register.verify([key("c")])
        for device in ("a", "b"):
            with pytest.raises(
                DeviceConflictError, match=r"a of .*: `reset` is still running on it, after its timeout"
            ):
                await here.register.verify([key(device)], resets=False)
        assert here.withheld("dra") == here.withheld() == {"a", "b"}
        assert here.register.withheld(R, "plugin").ids["a"] == "`reset` is still running on it, after its timeout"
        assert [here.register.is_free(key(name)) for name in "abc"] == [False, False, True]
    finally:
        over.set()
    await reconciled.get()
    assert here.withheld() == {"b"}
    await here.register.verify([key("a")])


async def test_parts_of_what_a_hook_works_on_are_neither_granted_nor_offered() -> None:
    """While a hook still runs for one half of a device after its timeout, neither half is granted or offered."""
    halves = [Device(name, consumes={"g": {"m": 5}}, counters={"g": {"m": 10}}) for name in "xy"]
    here = RegisterInMemory(*halves)
    over = threading.Event()

    class Slow(DeviceSource):
        resource = R
        hook_timeout = 0.01

        def released(self, devices: Sequence[Device]) -> None:
            over.wait()

    try:
        assert "did not answer" in await here.register.hooks.start(HookStatistics(), "released", Slow(), [halves[0]])
        with pytest.raises(DeviceConflictError, match=r"x of .*: `released` is still running on it"):
            await here.register.verify([key("y")])
        assert here.withheld("dra") == here.withheld() == {"x", "y"}
    finally:
        over.set()


async def turns() -> None:
    """Let all other tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_grant_waits_for_every_hook_that_begins_meanwhile() -> None:
    """If a second hook for the same hardware begins while a grant waits for the first, the grant waits for both."""
    here = RegisterInMemory(a="n1", b="n1")
    over = {name: asyncio.Event() for name in "ab"}

    class Slow(DeviceSource):
        resource = R

        async def released(self, devices: Sequence[Device]) -> None:
            await over[devices[0].id].wait()

    first = here.register.hooks.start(HookStatistics(), "released", Slow(), [Device("a")])
    grant = asyncio.create_task(here.grant("a"))
    await turns()
    second = here.register.hooks.start(HookStatistics(), "released", Slow(), [Device("b")])
    over["a"].set()
    await first
    await turns()
    assert not grant.done()
    over["b"].set()
    await second
    await grant


async def test_a_device_of_the_other_side_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """A device of the DRA side is withheld from limits without a log line that it is not offered."""
    caplog.set_level("INFO")
    here = RegisterInMemory(Device("x"))
    here.side(State.DRA, "x")
    await here.claim("x")
    withheld = here.register.withheld(R, "plugin")
    here.register.offered(R, "plugin", withheld)
    assert set(withheld.ids) == {"x"}
    assert not withheld.devices
    assert "is not offered" not in caplog.text
