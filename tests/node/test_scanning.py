"""When the agent scans for the pods that hold devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import cast

import pytest

from deviceplugin.kubelet.holders import HolderSnapshot
from deviceplugin.kubelet.tracker import HolderTracker
from deviceplugin.node import scanning
from deviceplugin.node.evidence import NodeEvidence
from deviceplugin.node.scanning import HolderScanner
from deviceplugin.register import operations
from deviceplugin.register.register import Register

NEVER = 1000.0


class Scans:
    """Counts scans. failing: the exception that a scan raises. answer: a scan ends once this is set."""

    def __init__(self, period: float, register: Register | None) -> None:
        self.snapshot = HolderSnapshot()
        self.count = 0
        self.wanted_ids: list[Collection[tuple[str, str]]] = []
        self.came, self.answer = asyncio.Event(), asyncio.Event()
        self.answer.set()
        self.failing: Exception | None = None
        tracker, evidence = cast("HolderTracker", self), cast("NodeEvidence", self)
        always, self.wanted = register is None, asyncio.Event()
        self.scanner = HolderScanner({}, tracker, register or Register(), self.wanted, period, evidence, always=always)

    def title(self, pod_uid: str) -> str:
        return pod_uid

    async def read_others(self) -> bool:
        return False

    async def scan(self, wanted: Collection[tuple[str, str]] = ()) -> HolderSnapshot | None:
        self.wanted_ids.append(wanted)
        self.count += 1
        self.came.set()
        await self.answer.wait()
        if self.failing is not None:
            raise self.failing
        return None


@asynccontextmanager
async def scanning_grants(period: float = NEVER, register: Register | None = None) -> AsyncIterator[Scans]:
    scans = Scans(period, register)
    task = asyncio.create_task(scans.scanner.run())
    try:
        yield scans
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_grants_that_follow_each_other_without_end_are_scanned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While grants follow each other without a pause, a scan for them comes within `BURST` seconds."""
    monkeypatch.setattr(scanning, "SOON", 0.02)
    monkeypatch.setattr(scanning, "BURST", 0.1)

    async def grant() -> None:
        while True:
            scanner.wanted.set()
            await asyncio.sleep(0)

    async with scanning_grants() as scanner, asyncio.timeout(20):
        granting = asyncio.create_task(grant())
        for _ in range(2):
            await scanner.came.wait()
            scanner.came.clear()
        granting.cancel()


async def test_grants_that_come_together_share_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants within `SOON` seconds share one scan, since each scan has the kubelet write its checkpoint."""
    monkeypatch.setattr(scanning, "SOON", 0.2)
    monkeypatch.setattr(scanning, "BURST", NEVER)
    async with scanning_grants() as scanner, asyncio.timeout(20):
        for _ in range(5):
            scanner.wanted.set()
            await asyncio.sleep(0)
        await scanner.came.wait()
        assert scanner.count == 1
        assert not scanner.wanted.is_set()


async def test_a_grant_at_the_end_of_a_period_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scan asks who holds a device that was granted just before the end of a period."""
    monkeypatch.setattr(scanning, "SOON", 0.5)  # the time SOON ends after the period
    register = Register()
    async with scanning_grants(0.2, register) as scanner, asyncio.timeout(20):
        await asyncio.sleep(0)  # from here on the scanner waits
        await register.grant("example.com/r", {"a": "a"})
        scanner.wanted.set()
        await scanner.came.wait()
    assert scanner.wanted_ids[0] == {("example.com/r", "a")}


async def test_a_grant_whose_container_is_not_named_is_asked_about_whatever_is_served() -> None:
    """A scan asks also about a pending grant of a resource that is no longer served."""
    register = Register()
    await register.grant("example.com/dropped", {"a": "a"})
    async with scanning_grants(0.01, register) as scanner, asyncio.timeout(20):
        await scanner.came.wait()
    assert scanner.wanted_ids[0] == {("example.com/dropped", "a")}


async def test_a_device_that_somebody_waits_for_is_looked_at_often() -> None:
    """While a claim waits for a device that a pod holds, scans follow each other; for a free device they do not."""
    register = Register()
    await register.store.do(operations.add_holders([("uid", "main", "example.com/fpga", "d0")], 1.0))
    async with scanning_grants(register=register) as scanner:
        with register.waits.waiting([("example.com/fpga", "d1")]):
            await asyncio.sleep(0)
            assert not scanner.wanted.is_set()
        with register.waits.waiting([("example.com/fpga", "d0")]):
            async with asyncio.timeout(30):
                while scanner.count < 3:
                    scanner.came.clear()
                    await scanner.came.wait()


async def test_calls_that_come_before_a_reading_begins_share_it() -> None:
    """Calls that come before a scan begins share it; later calls share the next one."""
    async with scanning_grants() as scanner, asyncio.timeout(20):
        scanner.answer.clear()
        first = [asyncio.create_task(scanner.scanner.scan({(f"r{number}", "a")})) for number in range(3)]
        await scanner.came.wait()
        assert scanner.wanted_ids == [{("r0", "a"), ("r1", "a"), ("r2", "a")}]
        late = [asyncio.create_task(scanner.scanner.scan({(f"late{number}", "a")})) for number in range(2)]
        await asyncio.sleep(0)  # from here on the calls wait
        late[0].cancel()
        await asyncio.wait(late[:1])
        scanner.answer.set()
        await asyncio.gather(*first, late[1])
    assert scanner.wanted_ids[1:] == [{("late0", "a"), ("late1", "a")}]


async def test_a_failed_reading_fails_the_calls_that_wait_and_the_next_call_gets_another() -> None:
    """A scan that fails raises in each call that waits for it; the next call gets another scan."""
    async with scanning_grants() as scanner, asyncio.timeout(20):
        scanner.failing = OSError("the disk hangs")
        calls = [asyncio.create_task(scanner.scanner.scan()) for _ in range(2)]
        assert await asyncio.gather(*calls, return_exceptions=True) == [scanner.failing] * 2
        scanner.failing = None
        assert await scanner.scanner.scan() is None
    assert scanner.count == 2


@pytest.mark.parametrize("begun", [True, False])
async def test_calls_end_with_the_task_that_makes_the_readings(begun: bool) -> None:
    """When the scanner ends, calls that wait for a scan are cancelled."""
    async with scanning_grants() as scanner, asyncio.timeout(20):
        scanner.answer.clear()
        calls = [asyncio.create_task(scanner.scanner.scan())]
        await scanner.came.wait()
        if not begun:
            calls.append(asyncio.create_task(scanner.scanner.scan()))
            await asyncio.sleep(0)  # from here on the call waits
    await asyncio.wait(calls, timeout=20)
    assert all(call.cancelled() for call in calls)


async def test_a_device_that_waits_for_its_last_holder_is_asked_about_in_each_reading() -> None:
    """A scan that is requested for one device also asks about the devices of pending grants."""
    register = Register()
    await register.grant("example.com/r", {"a": "a"})
    async with scanning_grants(register=register) as scanner, asyncio.timeout(20):
        await scanner.scanner.scan({("example.com/r", "b")})
    assert scanner.wanted_ids == [{("example.com/r", "a"), ("example.com/r", "b")}]
