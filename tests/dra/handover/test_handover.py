"""Which devices move between limits and claims, and what their moves wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.backoff import Backoff
from deviceplugin.register import operations
from deviceplugin.register.records import (
    NONE,
    Claim,
    ClaimDevice,
    LedgerError,
    RecordKey,
    RegisterSnapshot,
    Side,
    State,
)
from deviceplugin.register.rules import KubeletEvidence, KubeletSnapshot
from deviceplugin.register.waits import RefusedClaim
from deviceplugin.sharing import device_of
from dra_bridge.handover.ends import MovesToPlugin, shown_unhealthy
from dra_bridge.handover.moved import Allocated
from dra_bridge.handover.planner import (
    ALL,
    Movable,
    Moving,
    Plan,
    exchanged,
    followers,
    held_and_expected,
    leading,
    needed_by,
    plan,
)
from dra_bridge.handover.share import Share
from tests.dra.ledger.samples import DirectLedger, adopt, grant, reserve
from tests.model.flow import DEVICES, Flow, Outside, R, Source


class Clock:
    """A clock that stands still until a test changes it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


async def test_a_claim_that_keeps_a_device_is_read_seldom_and_claims_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a claim keeps its device for an hour, claims are listed once, and this claim is read at most 40 times."""
    outside, clock = Outside(), Clock()
    flow = await Flow.begin(tmp_path, outside, Source())
    await flow.move(1)
    (device,) = (name for name in DEVICES if flow.state(name) is State.DRA)
    outside.record("allocated", f"1={device}")
    monkeypatch.setattr("dra_bridge.handover.ends.time", clock)
    monkeypatch.setattr(flow.handover.to_plugin, "waits", lambda: Backoff(first=0.5, most=300.0))
    lists: list[float] = []
    reads: list[tuple[str, str, str | None]] = []
    allocated, allocates = flow.allocated, flow.allocates

    async def lists_claims() -> Allocated:
        lists.append(clock.now)
        return await allocated()

    async def reads_claim(claim: str, resource: str, device: str | None) -> bool:
        reads.append((claim, resource, device))
        return await allocates(claim, resource, device)

    monkeypatch.setattr(flow, "allocated", lists_claims)
    monkeypatch.setattr(flow, "allocates", reads_claim)
    flow.handover.ask(Share(0))
    for _ in range(1800):
        await flow.advance()
        clock.now += 2.0
    assert len(lists) == 1
    assert set(reads) == {("default/1", R, device)}
    assert 12 <= len(reads) <= 40
    outside.record("deallocated", "1")
    clock.now += 300.0
    await flow.advance()
    assert flow.state(device) is State.PLUGIN
    assert len(lists) == 2
    await flow.end()


async def test_a_list_that_fails_is_not_tried_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If lists of claims fail for an hour, 120 to 250 are tried for all devices together; then the devices move."""
    outside, clock = Outside(), Clock()
    flow = await Flow.begin(tmp_path, outside, Source())
    await flow.move(2)
    monkeypatch.setattr("dra_bridge.handover.ends.time", clock)
    monkeypatch.setattr(flow.handover.to_plugin, "waits", lambda: Backoff(first=0.5, most=300.0))
    tries = []

    async def fails() -> dict[tuple[str, str], str]:
        tries.append(clock.now)
        raise LedgerError("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(flow, "allocated", fails)
        flow.handover.ask(Share(0))
        for _ in range(1800):
            with contextlib.suppress(LedgerError):
                await flow.advance()
            clock.now += 2.0
    assert 120 <= len(tries) <= 250
    clock.now += 30.0
    await flow.advance()
    assert {flow.state(name) for name in DEVICES} == {State.PLUGIN}
    await flow.end()


async def test_a_list_that_began_before_the_slice_was_accepted_ends_no_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move from claims to limits ends only by a list of claims that began after the slice had lost the device."""
    flow = await Flow.begin(tmp_path, Outside(), Source())
    await flow.move(2)
    began = 4.0

    async def lists_claims() -> Allocated:
        return Allocated(began)

    monkeypatch.setattr(flow, "allocated", lists_claims)
    monkeypatch.setattr(flow, "withdrawn", lambda resource, device: None if device in flow.slice() else 5.0)
    flow.handover.ask(Share(0))
    for _ in range(5):
        await flow.advance()
    assert {flow.state(name) for name in DEVICES} == {State.TO_PLUGIN}
    assert {wait.text for wait in flow.handover.waiting.values()} == {"a list of claims"}
    began = 6.0
    await flow.move(0)
    await flow.end()


async def test_a_share_that_is_forced_no_more_when_the_claims_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request for 0 devices for claims loses the word `force` while claims are listed, no move is forced."""
    flow = await Flow.begin(tmp_path, Outside(), Source())
    await flow.move(2)

    async def lists_claims() -> Allocated:
        flow.handover.ask(Share(0))
        return Allocated(time.monotonic(), {(R, "a"): "default/by-limits"}, frozenset({(R, "a")}))

    monkeypatch.setattr(flow, "allocated", lists_claims)
    flow.handover.ask(Share(0, forced=True))
    while flow.handover.share.forced:
        await flow.advance()
    assert {flow.state(name) for name in DEVICES} == {State.TO_PLUGIN}
    assert "until it ends, a kubelet restart would end others" in flow.handover.waiting["b"].text
    await flow.end()


async def test_a_step_that_follows_another_plans_with_the_new_device_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that moves devices wakes the tasks that send device lists; these tasks run before the next step."""
    flow = await Flow.begin(tmp_path, Outside(), Source())
    events: list[str] = []
    followed = asyncio.Event()
    moved, commit = flow.moved, MovesToPlugin.commit

    def has_moved(resource: str) -> None:
        moved(resource)
        asyncio.get_running_loop().call_soon(events.append, "lists")

    async def in_each_step(moves: MovesToPlugin, *args: Any) -> tuple[str, ...]:
        if "commit" in events:
            followed.set()
        events.append("commit")
        return await commit(moves, *args)

    monkeypatch.setattr(flow, "moved", has_moved)
    monkeypatch.setattr(MovesToPlugin, "commit", in_each_step)
    flow.handover.ask(Share(1))
    moving = asyncio.create_task(flow.handover.run())
    async with asyncio.timeout(20):
        await followed.wait()
    moving.cancel()
    assert events == ["commit", "lists", "lists", "commit"]
    await flow.end()


S = "example.com/other"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectLedger]:
    """An open ledger with devices for limits: a, b and d of resource R, and c of resource S."""
    with DirectLedger(str(tmp_path / "ledger.db")) as opened:
        opened.do(adopt(R, ["a", "b", "d"], Side.PLUGIN, 0.0))
        opened.do(adopt(S, ["c"], Side.PLUGIN, 0.0))
        yield opened


def test_devices_that_a_claim_came_for_are_not_turned_round() -> None:
    """A device that moves to DRA for a waiting claim does not move back, however few devices are to be for claims."""
    states = {"a": State.TO_DRA, "b": State.DRA, "c": State.PLUGIN}
    assert plan(states, (), Share(0)).to_plugin == ("a", "b")
    assert plan(states, (), Share(0), expected={"a"}).to_plugin == ("b",)
    assert plan(states, (), Share(1), expected={"a"}).to_plugin == ("b",)


def test_an_idle_device_moves_instead_of_a_held_one() -> None:
    """If a device becomes idle while the move of a held device waits, the idle device moves, and the held one stays."""
    states = {"a": State.TO_DRA, "b": State.TO_DRA, "c": State.PLUGIN, "d": State.DRA, "e": State.QUARANTINED}
    assert exchanged(states, {"a", "b"}, ()) == Plan(("c",), ("a",))
    assert exchanged(states, {"a", "b"}, {"a"}) == Plan(("c",), ("b",))
    assert exchanged(states, {"a", "b", "c"}, ()) == exchanged(states, (), ()) == Plan()
    back = {"a": State.TO_PLUGIN, "b": State.DRA, "c": State.PLUGIN}
    assert exchanged(back, {"a"}, ()) == Plan(("a",), ("b",))
    assert exchanged(back, {"a", "b"}, ()) == Plan()


def test_what_is_held_is_not_expected(store: DirectLedger) -> None:
    """A device that moves to DRA for a claim counts as expected by the claim, and as held once a pod is granted it."""
    claim = Claim("d", "1", "default", "c", (ClaimDevice(R, "a"),), None, 1.0)
    store.do(reserve(claim, durable=True, move_idle=True))
    assert held_and_expected(store.snapshot) == (frozenset(), frozenset({(R, "a")}))
    store.do(grant(R, {"a": "a"}, 1.0))
    assert held_and_expected(store.snapshot) == (frozenset({(R, "a")}), frozenset())


@pytest.mark.parametrize("replicas", [1, 2])
def test_evidence_is_gathered_in_the_order_of_the_rule(store: DirectLedger, replicas: int) -> None:
    """A device counts as withdrawn from the kubelet if none of its ids is healthy; without a kubelet no device does."""
    store.do(operations.begin_move(R, DEVICES, Side.DRA, 1.0))
    moving = ALL.in_state(store.snapshot, R, State.TO_DRA)
    device_id_of = partial(device_of, replicas=replicas)
    assert moving == DEVICES
    assert shown_unhealthy(moving, None, device_id_of) == {}
    healthy = frozenset({"b" if replicas == 1 else "b::1"})
    assert shown_unhealthy(moving, (3.0, healthy), device_id_of) == {"a": 3.0}
    assert ALL.in_state(store.snapshot, R, State.TO_PLUGIN) == ()


def test_a_driver_moves_its_own_devices_and_those_of_none(store: DirectLedger) -> None:
    """A driver moves its own devices and those of no driver, but not those of another driver."""
    for name, driver in (("a", "d"), ("b", "e")):
        store.do(operations.begin_move(R, [name], Side.DRA, 1.0, driver=driver))
    assert Moving("d").of(store.snapshot, R).keys() == {"a", "d"}
    assert Moving("d", leaving=True).of(store.snapshot, R).keys() == {"a"}
    assert Moving("d").in_state(store.snapshot, R, State.TO_DRA) == ("a",)
    assert Moving("e", leaving=True).in_state(store.snapshot, R, State.PLUGIN) == ()


# Groups: devices that only move together, because they are parts of one device.

GROUP = ((R, "a"), (R, "b"), (S, "c"))
TOGETHER = {"a": GROUP, "b": GROUP, "c": GROUP, "d": ((R, "d"),)}


def movable(now: RegisterSnapshot, resource: str, refused: Mapping[RecordKey, RefusedClaim] = NONE) -> Movable:
    states = {name: record.state for name, record in now.of(resource).items()}
    return Movable.of(now, resource, states, TOGETHER, refused, "d")


def test_parts_of_one_device_count_as_one(store: DirectLedger) -> None:
    """A plan of moves has only the first of a device's parts, which counts as held if any part is held."""
    assert leading(movable(store.snapshot, S)) == ({}, frozenset(), frozenset())
    at = {"a": State.PLUGIN, "d": State.PLUGIN}
    assert leading(movable(store.snapshot, R)) == (at, frozenset(), frozenset())
    store.do(grant(S, {"c": "c"}, 0.0))
    assert leading(movable(store.snapshot, R)) == (at, frozenset("a"), frozenset())


def test_parts_follow_the_first(store: DirectLedger) -> None:
    """When the first part of a device moves, to DRA or back, the other parts follow it, in both resources."""
    assert followers(movable(store.snapshot, R)) == []
    store.do(operations.begin_move(R, ["a", "d"], Side.DRA, 0.0))
    assert followers(movable(store.snapshot, R)) == [("b", Side.DRA, "it moves with a", False)]
    assert followers(movable(store.snapshot, S)) == [("c", Side.DRA, "it moves with a", False)]
    store.do(operations.begin_move(R, ["b"], Side.DRA, 0.0))
    store.do(operations.begin_move(R, ["a"], Side.PLUGIN, 0.0))
    assert followers(movable(store.snapshot, R)) == [("b", Side.PLUGIN, "it moves with a", False)]


def test_a_claim_for_a_part_takes_all_along(store: DirectLedger) -> None:
    """All parts of a device move for a claim for one part, and stay until all have moved, also with a share of 0."""
    store.do(operations.begin_move(R, ["b"], Side.DRA, 0.0, "whatever the words", for_claim=True))
    for resource in (R, S):
        for name, side, reason, for_claim in followers(movable(store.snapshot, resource)):
            store.do(operations.begin_move(resource, [name], side, 0.0, reason, for_claim=for_claim))
    assert {store.snapshot.state(*part) for part in GROUP} == {State.TO_DRA}
    evidence = KubeletSnapshot(store.snapshot.sequence, 2.0, True)
    shown = KubeletEvidence(store.snapshot.sequence, {"a": 1.0}, evidence)
    assert store.do(operations.commit_to_dra(R, ["a"], shown, 0.0)).devices == ("a",)
    leaders, held, expected = leading(movable(store.snapshot, R))
    assert plan(leaders, held, Share(0), expected=expected) == Plan()
    assert followers(movable(store.snapshot, R)) == []


def refused_now(now: RegisterSnapshot, *devices: str) -> dict[RecordKey, RefusedClaim]:
    """Return the ledger's record of a refusal of driver d's claim 1, which is allocated these devices."""
    return {("d", "1"): RefusedClaim("default/c", {(R, name): now.device(R, name).sequence for name in devices})}


def test_a_refused_claim_takes_held_devices_once(store: DirectLedger) -> None:
    """After a claim was refused, its devices, which pods hold, and their groups begin to move to DRA, once.

    The move is not reversed while the refusal is remembered, and is not begun again after it was reversed.
    """
    store.do(grant(R, {"b": "b", "d": "d"}, 0.0))
    refused = refused_now(store.snapshot, "b", "d")
    assert not needed_by(store.snapshot, refused, "another driver", TOGETHER)
    reason = "for claim default/c"
    expected = [(name, Side.DRA, reason, True) for name in ("a", "b", "d")]
    assert followers(movable(store.snapshot, R, refused)) == expected
    assert followers(movable(store.snapshot, S, refused)) == [("c", *expected[0][1:])]
    store.do(operations.begin_move(R, ["a", "b", "d"], Side.DRA, 0.0, reason, for_claim=True))
    leaders, held, awaited = leading(movable(store.snapshot, R, refused))
    assert plan(leaders, held, Share(0), expected=awaited) == Plan()
    leaders, held, awaited = leading(movable(store.snapshot, R))
    assert plan(leaders, held, Share(0), expected=awaited).to_plugin == ("d",)
    store.do(operations.begin_move(R, ["a", "b", "d"], Side.PLUGIN, 0.0))
    assert not needed_by(store.snapshot, refused, "d", TOGETHER)


def test_no_refused_claim_takes_devices_while_pods_have_some_by_limits_from_both_sides(store: DirectLedger) -> None:
    """A refused claim moves no device of a resource while its pods by limits have devices of both plugin and DRA.

    Nor does the claim move devices that only move together (a group) if one of them belongs to such a resource.
    """
    store.do(adopt(S, ["e"], Side.DRA, 0.0))
    store.do(grant(S, {"c": "c"}, 0.0))
    served = Claim("d", "2", "default", "served", (ClaimDevice(S, "e", limits=True),), None, 1.0)
    store.do(reserve(served, durable=True))
    refused = refused_now(store.snapshot, "b", "d")
    assert needed_by(store.snapshot, refused, "d", TOGETHER).keys() == {(R, "d")}
