"""The ledger as an event loop uses it: operations that are committed together, and the answers to their callers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import looks
from deviceplugin.register import operations
from deviceplugin.register.records import LedgerError, LedgerLostError, Side, State
from dra_bridge.ledger import worker
from dra_bridge.ledger.store import Ledger
from dra_bridge.ledger.worker import AsyncLedger
from tests.dra.ledger.samples import T0, D, Flaky, R, Watched, adopt, claim, grant, prepare, reserve


async def test_a_lost_ledger_is_reported_to_its_owner(path: str) -> None:
    """If the ledger's directory is removed, an operation raises LedgerLostError and the event `lost` is set."""
    async_ledger = await AsyncLedger.open(path)
    await async_ledger.do(adopt(R, ["a"], Side.PLUGIN, T0))
    assert not async_ledger.lost.is_set()
    shutil.rmtree(Path(path).parent)
    with pytest.raises(LedgerLostError):
        await async_ledger.do(grant(R, {"a": "a"}, T0))
    async with asyncio.timeout(60):
        await async_ledger.lost.wait()
    await async_ledger.close()


class SlowDisk:
    """A disk whose commits are counted; while the test holds it, commits wait."""

    def __init__(self) -> None:
        self.commits = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def step(self, statement: str) -> None:
        if statement == "COMMIT":
            self.commits += 1
            self.begun.set()
            self.go_on.wait(10)

    def hold(self) -> None:
        """Have the next commit wait; count from 0."""
        self.commits = 0
        self.go_on.clear()
        self.begun.clear()


def slow(path: str) -> tuple[AsyncLedger, SlowDisk]:
    disk = SlowDisk()
    return AsyncLedger(Ledger(path, connect=Watched.by(disk.step))), disk


async def test_what_is_asked_together_is_committed_together(path: str) -> None:
    """Operations that are asked for during one commit are written in one further commit.

    One of them that raises an error does not affect the others.
    """
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, [str(n) for n in range(9)], Side.PLUGIN, T0))
    disk.hold()
    first = async_ledger.do(operations.begin_move(R, ["8"], Side.DRA, T0))
    await asyncio.to_thread(disk.begun.wait, 10)
    others = [async_ledger.do(operations.begin_move(R, [str(n)], Side.DRA, T0)) for n in range(7)]
    mistaken: Any = async_ledger.do(lambda now: 1 // 0)  # type: ignore[arg-type, return-value]
    granted = async_ledger.do(grant(R, {"7": "7"}, T0))
    assert not granted.done()
    disk.go_on.set()
    with pytest.raises(ZeroDivisionError):
        await mistaken
    await asyncio.gather(first, *others, granted)
    assert disk.commits == 2
    assert {record.state for record in async_ledger.snapshot.of(R).values()} == {State.PLUGIN, State.TO_DRA}
    assert async_ledger.snapshot.allocations_on(R, ["7"])
    await async_ledger.close()
    with pytest.raises(LedgerError):
        await async_ledger.do(grant(R, {"1": "1"}, T0))


async def test_a_grant_does_not_wait_for_a_thread(path: str) -> None:
    """500 grants are recorded at once, each in its own commit; the write-ahead log is emptied in between."""
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a"], Side.PLUGIN, T0))
    disk.commits = 0
    for number in range(500):
        assert async_ledger.do(grant(R, {"a": "a"}, T0 + number)).done()
        assert async_ledger.snapshot.allocations[R, "a"].since == T0 + number
        if number % 100 == 99 and async_ledger.answering is not None:
            await asyncio.wait({async_ledger.answering})
    assert disk.commits == 500 + 5, "one more for each log that begins anew"
    assert os.path.getsize(f"{path}-wal") < 250 * 3 * 4096, "a commit has three pages"
    await async_ledger.close()
    reopened = Ledger(path)
    assert reopened.snapshot.allocations[R, "a"].since == T0 + 499
    reopened.close()


async def test_what_comes_later_is_done_later(path: str) -> None:
    """An Unprepare that follows a Prepare is recorded after the Prepare, although a commit delays the Prepare."""
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a", "b"], Side.DRA, T0))
    await async_ledger.do(reserve(claim("1", "a", result=None), durable=True))
    disk.hold()
    async_ledger.do(operations.begin_move(R, ["b"], Side.PLUGIN, T0))
    await asyncio.to_thread(disk.begun.wait, 10)
    async_ledger.do(prepare(claim("1", "a"))).cancel()
    disk.go_on.set()
    with async_ledger.ledger.guard:  # the thread has ended its commit, and the event loop has not run since
        pass
    await async_ledger.do(operations.unprepare(D, "1"))
    assert not async_ledger.snapshot.claims
    await async_ledger.close()
    assert not async_ledger.snapshot.claims


async def test_nobody_waits_for_a_ledger_whose_process_is_torn_down(path: str) -> None:
    """If the ledger's task is cancelled while the disk hangs, all of its callers are cancelled."""
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a", "b"], Side.DRA, T0))
    disk.hold()
    asked = [async_ledger.do(operations.begin_move(R, [name], Side.PLUGIN, T0)) for name in "ab"]
    await asyncio.to_thread(disk.begun.wait, 10)
    asked.append(async_ledger.do(operations.begin_move(R, ["a"], Side.DRA, T0)))
    assert async_ledger.answering is not None
    async_ledger.answering.cancel()
    await asyncio.wait(asked, timeout=10)
    assert all(answered.cancelled() for answered in asked)
    disk.go_on.set()
    await async_ledger.close()


async def test_a_log_that_cannot_be_emptied_is_written_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two failed checkpoints of the write-ahead log, the file is opened again, and later grants are kept."""
    monkeypatch.setattr("dra_bridge.ledger.store.CHECKPOINT", 3)
    fails: set[str] = set()
    opened: list[str] = []

    def connect(where: str) -> Flaky:
        opened.append(where)
        return Flaky(where, fails)

    async_ledger = AsyncLedger(Ledger(path, connect=connect))  # type: ignore[arg-type]
    await async_ledger.do(adopt(R, ["a"], Side.PLUGIN, T0))
    fails.add("PRAGMA wal_checkpoint")
    for number in range(2):
        await async_ledger.do(grant(R, {"a": "a"}, T0 + number))
        assert async_ledger.answering is not None
        await asyncio.wait({async_ledger.answering})
    fails.clear()
    await async_ledger.do(grant(R, {"a": "a"}, T0 + 3))
    assert len(opened) == 2, "all of it was read again, and written into the database"
    assert async_ledger.snapshot.allocations[R, "a"].since == T0 + 3
    await async_ledger.close()


async def test_a_disk_that_takes_long_holds_up_the_loop_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one slow commit, later grants do not block the event loop; all of them are kept."""
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a"], Side.PLUGIN, T0))
    disk.hold()
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    first = async_ledger.do(grant(R, {"a": "a"}, T0))
    assert not first.done()
    monkeypatch.setattr(looks, "PROMPT", 60.0)
    later = async_ledger.do(grant(R, {"a": "a"}, T0 + 1))
    disk.go_on.set()
    await asyncio.gather(first, later)
    assert not async_ledger.do(grant(R, {"a": "a"}, T0 + 2)).done(), "the disk was slow just now"
    await async_ledger.close()
    reopened = Ledger(path)
    assert reopened.snapshot.allocations[R, "a"].since == T0 + 2
    reopened.close()


async def test_a_disk_that_does_not_answer_stops_no_caller(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk hangs, operations fail after a deadline of 0.2 s, and then at once.

    When the disk answers, new operations succeed, and a delayed grant has been recorded.
    """
    monkeypatch.setattr(looks, "PROMPT", 0.001)
    monkeypatch.setattr(worker, "DEADLINE", 0.2)
    monkeypatch.setattr(worker, "CLOSING", 0.2)
    before = looks.timeouts["", "record"]
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
    disk.hold()
    asked = [async_ledger.do(grant(R, {name: name}, T0)) for name in "ab"]
    for answered in asked:
        with pytest.raises(LedgerError, match=re.escape(path) + r"(-wal)? did not answer within 0.2 s"):
            await answered
    assert async_ledger.do(grant(R, {"b": "b"}, T0)).exception() is not None, "at once"
    assert looks.timeouts["", "record"] == before + 1
    disk.go_on.set()
    answers = asyncio.Event()
    async_ledger.looks.changed = answers.set
    async with asyncio.timeout(60):
        while async_ledger.looks.hanging:
            await answers.wait()
    await async_ledger.do(grant(R, {"b": "b"}, T0 + 1))
    assert {key[1] for key in async_ledger.snapshot.allocations} == {"a", "b"}, "the first was recorded late"
    disk.hold()
    last = async_ledger.do(grant(R, {"a": "a"}, T0 + 2))
    with pytest.raises(LedgerError):
        await last
    await async_ledger.close()
    disk.go_on.set()


async def test_what_only_this_process_is_to_know_needs_no_commit(path: str) -> None:
    """A claim's reservation in memory needs no commit, waits for a running commit, and fails if the ledger is lost."""
    async_ledger, disk = slow(path)
    await async_ledger.do(adopt(R, ["a", "b", "c", "d"], Side.DRA, T0))
    disk.commits = 0
    assert async_ledger.do(reserve(claim("1", "a", result=None), durable=False)).done()
    assert [one.uid for one in async_ledger.snapshot.claims_on(R, ["a"])] == ["1"]
    assert not disk.commits
    disk.hold()
    prepared = async_ledger.do(reserve(claim("2", "b", result=None), durable=True))
    await asyncio.to_thread(disk.begun.wait, 10)
    other = async_ledger.do(reserve(claim("3", "c", result=None), durable=False))
    assert not other.done()
    disk.go_on.set()
    await asyncio.gather(prepared, other)
    assert {one.uid for one in async_ledger.snapshot.claims.values()} == {"1", "2", "3"}
    shutil.rmtree(Path(path).parent)
    with pytest.raises(LedgerLostError):
        await async_ledger.do(reserve(claim("4", "d", result=None), durable=False))
    await async_ledger.close()


async def test_the_async_ledger_passes_on_that_a_write_failed(path: str) -> None:
    """If the commits of two callers' grants fail, each gets an error, and two failed writes are counted; no others."""
    fails: set[str] = set()
    store = Ledger(path, connect=lambda where: Flaky(where, fails))  # type: ignore[arg-type,return-value]
    async_ledger = AsyncLedger(store)
    await async_ledger.do(adopt(R, ["a", "b"], Side.PLUGIN, T0))
    assert async_ledger.write_failures == 0
    fails.add("COMMIT")
    answers = await asyncio.gather(
        *(async_ledger.do(grant(R, {device_id: device_id}, T0)) for device_id in "ab"),
        return_exceptions=True,
    )
    assert all(isinstance(answer, LedgerError) for answer in answers)
    assert async_ledger.write_failures == 2
    fails.clear()
    await async_ledger.do(grant(R, {"a": "a"}, T0))
    assert async_ledger.write_failures == 2
    await async_ledger.close()


async def test_an_async_ledger_that_nobody_waits_for_gives_the_lock_back(path: str) -> None:
    """A cancelled wait for another agent's ledger leaves no lock: the ledger can be opened then."""
    first = Ledger(path)
    opening = asyncio.create_task(AsyncLedger.open(path))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    first.close()
    second = await AsyncLedger.open(path)
    await second.close()


async def test_an_async_ledger_that_is_open_when_its_caller_is_cancelled_gives_the_lock_back(path: str) -> None:
    """If opening the ledger is cancelled just after it got the lock, the lock is released."""
    opening = asyncio.create_task(AsyncLedger.open(path))
    await asyncio.sleep(0)
    for thread in threading.enumerate():
        if thread.name == "ledger open":
            thread.join(60)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(60):
        await (await AsyncLedger.open(path)).close()
