"""Prepare waits for devices whose holders are about to end, and for nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from deviceplugin.device import Device
from deviceplugin.register import operations, releases
from deviceplugin.register.records import Change, Side, State
from deviceplugin.register.rules import KubeletEvidence, KubeletSnapshot
from dra_bridge.driver import ClaimError, DriverHost, Prepared, RunningPods, preparation, waiting
from dra_bridge.driver.waiting import MARGIN
from tests.dra.driver.served import T0, D, Plain, R, Serve, ServedDriver, claim, ref, result
from tests.waits import until

CALL = 45.0
"""Seconds after which the kubelet gives up a call."""

Answers = dict[str, Prepared | ClaimError]


def call(here: ServedDriver, *uids: str, seconds: float = CALL) -> asyncio.Task[Answers]:
    """Have claims prepared as the kubelet does, with a deadline in seconds."""
    return asyncio.create_task(here.driver.prepare([ref(uid) for uid in uids], seconds))


async def waits(here: ServedDriver, *devices: str) -> None:
    """Wait until Prepare calls wait for these devices, and for no others."""
    await until(lambda: set(here.driver.waits.devices) == {(R, device) for device in devices})


def failures(here: ServedDriver) -> dict[str, int]:
    return dict(here.driver.statistics.prepare.failures)


async def held(here: ServedDriver, *more: str) -> None:
    """Have claim 1 hold d0, and add claim 2, which is allocated d0 too; claims in `more` get devices of their own."""
    await here.give("1", "d0")
    here.claims.add(claim("2", result("d0")), *(claim(uid, result(f"d{n + 1}")) for n, uid in enumerate(more)))


async def second(here: ServedDriver) -> asyncio.Task[Answers]:
    """Have claim 2 wait for d0, which claim 1 holds; return the call."""
    await held(here)
    waiting_call = call(here, "2")
    await waits(here, "d0")
    return waiting_call


async def test_a_claim_gets_a_device_when_its_holder_is_unprepared(serve: Serve) -> None:
    """A Prepare waits for the device's holder and succeeds when the holder is unprepared; an Event names the holder."""
    here = await serve()
    waiting_call = await second(here)
    assert failures(here) == {}
    assert await here.unprepare("1") is None
    assert isinstance((await waiting_call)["2"], Prepared)
    await waits(here)
    assert sum(here.driver.statistics.waits.counts) == 1
    assert failures(here) == {}
    assert here.claims.events == ["claim-2 DeviceNotAvailable: d0 of example.com/fpga is held by claim default/claim-1"]


async def test_a_claim_that_waits_does_not_harm_the_others_of_its_call(serve: Serve) -> None:
    """While a claim of a call waits, the call's other claims are prepared; the answer has all of them."""
    here = await serve()
    await held(here, "3")
    together = call(here, "2", "3", "none")
    await until(lambda: (D, "3") in here.async_ledger.snapshot.claims)
    other = call(here, "3")
    assert isinstance((await other)["3"], Prepared)
    assert not together.done()
    await here.unprepare("1")
    answers = await together
    assert {uid: isinstance(answer, Prepared) for uid, answer in answers.items()} == {
        "2": True,
        "3": True,
        "none": False,
    }


async def test_a_claim_is_refused_shortly_before_the_deadline(serve: Serve) -> None:
    """Shortly before the deadline the waiting claim gets an error that names the holder; others stay prepared."""
    here = await serve()
    await held(here, "3")
    answers = await call(here, "2", "3", seconds=MARGIN + 0.2)
    assert "is held by claim default/claim-1" in str(answers["2"])
    assert isinstance(answers["3"], Prepared)
    assert here.async_ledger.snapshot.claims.keys() == {(D, "1"), (D, "3")}
    assert failures(here) == {"refused": 1}
    await waits(here)


async def test_without_a_deadline_nothing_is_waited_for(serve: Serve) -> None:
    """A Prepare without a deadline fails at once while the device is held."""
    here = await serve()
    await held(here)
    assert "is held by" in str(await here.refusal("2"))


@pytest.mark.parametrize("how", ["caller", "agent"])
async def test_a_wait_ends_with_its_caller_and_with_the_agent(serve: Serve, how: str) -> None:
    """A wait that its caller or the agent ends leaves no record and no file, and takes no device afterwards."""
    here = await serve()
    waiting_call = await second(here)
    if how == "caller":
        waiting_call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting_call
    else:
        here.driver.end_waits()
        assert "is held by" in str((await waiting_call)["2"])
    await waits(here)
    await here.unprepare("1")
    await here.driver.tasks.wait()
    assert not here.async_ledger.snapshot.claims
    assert not here.all_files


async def test_an_unprepare_ends_the_wait_of_its_claim(serve: Serve) -> None:
    """An Unprepare of a waiting claim ends the claim's Prepare at once; another claim waits on."""
    here = await serve()
    await held(here)
    here.claims.add(claim("3", result("d0")))
    ended, other = call(here, "2"), call(here, "3")
    await until(lambda: "claim-3" in "".join(here.claims.events) and "claim-2" in "".join(here.claims.events))
    assert await here.unprepare("2") is None
    assert "cancelled by Unprepare" in str((await ended)["2"])
    assert not other.done()
    await here.unprepare("1")
    assert isinstance((await other)["3"], Prepared)


async def test_changes_of_other_devices_cost_a_waiting_claim_no_request(serve: Serve) -> None:
    """50 other changes of the ledger cause no read of the waiting claim; the end of its device's holder causes one."""
    here = await serve()
    waiting_call = await second(here)
    gets = here.claims.gets
    for number in range(50):
        await here.async_ledger.do(operations.set_setting("section", "key", str(number)))
        await asyncio.sleep(0)
    assert here.claims.gets == gets
    await here.unprepare("1")
    await waiting_call
    assert here.claims.gets == gets + 1


async def test_a_wait_ends_when_the_claim_is_gone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting claim is read again from time to time, and its Prepare fails when the claim is deleted."""
    monkeypatch.setattr(waiting, "REREAD", 0.05)
    here = await serve()
    waiting_call = await second(here)
    del here.claims.claims["claim-2"]
    assert "does not exist" in str((await waiting_call)["2"])
    assert failures(here) == {"gone": 1}


async def test_a_claim_waits_for_the_move_that_it_begins(serve: Serve) -> None:
    """Prepare of a claim for an idle device that is for limits begins its move to DRA, and succeeds after the move."""
    here = await serve(side=Side.PLUGIN)
    here.claims.add(claim("1", result("d0")))
    waiting_call = call(here, "1")
    await waits(here, "d0")
    assert here.async_ledger.snapshot.state(R, "d0") is State.TO_DRA
    sequence = here.async_ledger.snapshot.sequence
    seen = KubeletSnapshot(sequence, 2.0, current=True)
    await here.async_ledger.do(operations.commit_to_dra(R, ["d0"], KubeletEvidence(sequence, {"d0": 1.0}, seen), T0))
    assert isinstance((await waiting_call)["1"], Prepared)


async def test_a_claim_waits_until_its_devices_holder_is_known(serve: Serve) -> None:
    """While the holder of a device is not known, as just after the agent's start, Prepare waits."""

    class Starting(DriverHost):
        is_ready = False

        def ready(self, resource: str, device: str) -> bool:
            return self.is_ready

    host = Starting()
    here = await serve(host=host)
    here.claims.add(claim("1", result("d0")))
    waiting_call = call(here, "1")
    await waits(here, "d0")
    host.is_ready = True
    here.async_ledger.changes.note()
    assert isinstance((await waiting_call)["1"], Prepared)


async def test_a_claim_that_is_allocated_anew_waits_for_its_former_pods(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that was allocated another device waits until no pod with its former device runs."""

    class Pods(DriverHost):
        now = RunningPods(frozenset({"pod-uid"}))

        async def running_pods(self) -> RunningPods:
            return self.now

        def last_running_pods(self) -> RunningPods:
            return self.now

    monkeypatch.setattr(preparation, "PATIENCE", 0.0)
    pods = Pods()
    here = await serve(host=pods)
    await here.give("1", "d0")
    assert await here.unprepare("1") is None
    here.claims.add(claim("1", result("d1")))
    waiting_call = call(here, "1")
    await waits(here, "d0")
    pods.now = RunningPods()
    here.async_ledger.changes.note()
    assert isinstance((await waiting_call)["1"], Prepared)
    assert here.async_ledger.snapshot.claims[D, "1"].held == {(R, "d1")}


async def test_a_claim_waits_for_a_hook_that_works_on(serve: Serve) -> None:
    """A Prepare waits for a hook `released` that runs on after its timeout."""
    go = asyncio.Event()
    go.set()

    class Wiped(Plain):
        hook_timeout = 0.05

        async def released(self, devices: Sequence[Device]) -> None:
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue

    here = await serve(Wiped())
    await held(here)
    go.clear()
    await here.unprepare("1")
    waiting_call = call(here, "2")
    await waits(here, "d0")
    go.set()
    assert isinstance((await waiting_call)["2"], Prepared)


async def test_a_claim_waits_until_a_failed_release_has_succeeded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Prepare waits while `released` fails; the hook is called again after a pause, not at each try of the claim."""
    monkeypatch.setattr(releases, "FIRST", 0.2)
    calls: list[str] = []

    class Wiped(Plain):
        fails = 0

        async def released(self, devices: Sequence[Device]) -> None:
            assert [device.id for device in devices] == ["d0"]
            self.fails -= 1
            calls.append("fails" if self.fails >= 0 else "succeeds")
            if self.fails >= 0:
                raise OSError("no such hardware")

    source = Wiped()
    here = await serve(source)
    await held(here)
    source.fails = 2
    await here.unprepare("1")
    waiting_call = call(here, "2")
    await waits(here, "d0")
    await until(lambda: (R, "d0") in here.register.releases.failed)
    assert "no such hardware" in here.register.withheld(R, "dra").devices["d0"]
    while not waiting_call.done():
        here.register.releases.look(R, all_known=False)  # each scan of the agent makes this call
        await asyncio.sleep(0.01)
    assert isinstance((await waiting_call)["2"], Prepared)
    assert calls == ["succeeds", "fails", "fails", "succeeds"]


async def test_a_claim_does_not_wait_for_a_device_that_is_quarantined(serve: Serve) -> None:
    """A Prepare of a quarantined device fails at once: no known event ends a quarantine."""
    here = await serve()
    here.claims.add(claim("1", result("d0")))
    record = here.async_ledger.snapshot.device(R, "d0")
    quarantined = dataclasses.replace(record, state=State.QUARANTINED)
    changed = here.async_ledger.snapshot.with_changes(
        [Change("devices", (R, "d0"), quarantined)], here.async_ledger.snapshot.sequence
    )
    here.async_ledger.ledger.snapshot = changed
    assert "is quarantined" in str((await call(here, "1"))["1"])
