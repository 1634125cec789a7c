"""While two USB sticks swap device numbers, no CDI file has the other stick's number, or one that another holder has.

The two sticks are links to /dev/tty and /dev/ptmx. A fake sysfs shows the numbers of these device nodes as those of USB
devices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin import cdi, identity, sysfs
from deviceplugin.backoff import Backoff
from deviceplugin.device import Device, DeviceNode
from deviceplugin.kubelet.containers import Starts
from deviceplugin.register.records import Change, Claim, Decision
from dra_bridge.driver import DriverHost, RunningPods
from dra_bridge.driver.claim_files import ClaimFiles
from dra_bridge.driver.claims import prepared_of
from tests.dra.driver.served import D, ServedDriver, claim, result, served_driver
from tests.waits import until

NODES = ("/dev/tty", "/dev/ptmx")
NUMBERS = [f"{os.major(of)}:{os.minor(of)}" for of in (os.stat(node).st_rdev for node in NODES)]
TTY, PTMX = (f"char:{number}" for number in NUMBERS)


class Sticks:
    """Two USB sticks, A and B, each one device. at: the index of each stick's device node in `NODES`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "by-id").mkdir()
        (directory / "sys/dev/char").mkdir(parents=True)
        self.at: dict[str, int] = {}
        for serial in "AB":
            usb = directory / f"sys/devices/usb1/1-{serial}"
            usb.mkdir(parents=True)
            for name, value in {"idVendor": "0403", "idProduct": "6001", "serial": serial}.items():
                (usb / name).write_text(value)

    def plug(self, **at: int) -> list[Device]:
        """Plug in the named sticks with these device nodes, and unplug the others; return the named sticks' devices."""
        for serial, node in self.at.items():
            (self.directory / "by-id" / serial).unlink()
            (self.directory / "sys/dev/char" / NUMBERS[node]).unlink()
        self.at = at
        for serial, node in at.items():
            (self.directory / "by-id" / serial).symlink_to(NODES[node])
            (self.directory / "sys/dev/char" / NUMBERS[node]).symlink_to(f"../../devices/usb1/1-{serial}")
        return [Device(serial.lower(), nodes=[str(self.directory / "by-id" / serial)]) for serial in at]


class Pods(DriverHost):
    """A host for claims with one pod each. replaced: the pods whose containers have all restarted."""

    def __init__(self) -> None:
        self.replaced: set[str] = set()
        self.asked: Starts = {}

    async def running_pods(self) -> RunningPods:
        return RunningPods(frozenset({"pod-1", "pod-2"}))

    async def starts(self, pods: Collection[str]) -> Starts:
        return {uid: {"main": 1} for uid in pods}

    async def restarted(self, before: Starts, pods: Collection[str], waited: float) -> bool:
        self.asked = before
        return self.replaced.issuperset(pods)


@pytest.fixture
async def pods() -> Pods:
    return Pods()


@pytest.fixture
async def sticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sticks:
    made = sysfs.HardwareReader
    monkeypatch.setattr("deviceplugin.identity.HardwareReader", lambda _: made(str(tmp_path / "sys")))
    monkeypatch.setattr("dra_bridge.driver.renewal.SETTLED", 0.0)
    return Sticks(tmp_path)


@pytest.fixture
async def here(tmp_path: Path, sticks: Sticks, pods: Pods) -> AsyncIterator[ServedDriver]:
    """Claim 1 has stick A at /dev/tty, claim 2 stick B at /dev/ptmx."""
    made = await served_driver(tmp_path, devices=sticks.plug(A=0, B=1), host=pods)
    await identity.publish(made.inventory, sticks.plug(A=0, B=1), {})
    for uid, device in (("1", "a"), ("2", "b")):
        made.claims.add(claim(uid, result(device), pods=[f"pod-{uid}"]))
        await made.prepared(uid)
    yield made
    await made.end()


async def publish(here: ServedDriver, devices: list[Device]) -> None:
    await identity.publish(here.inventory, devices, {})
    for uid in ("1", "2"):
        await here.driver.renewal.renew(uid)


def numbers(here: ServedDriver, uid: str) -> set[str]:
    """Return the device numbers in a claim's CDI file; without a file, none."""
    try:
        devices: list[dict[str, Any]] = json.loads((here.cdi / f"{D}-claim_{uid}.json").read_bytes())["devices"]
    except FileNotFoundError:
        return set()
    nodes = [node for device in devices for node in device["containerEdits"]["deviceNodes"]]
    return {f"char:{node['major']}:{node['minor']}" for node in nodes}


def record(here: ServedDriver, uid: str) -> Claim:
    return here.async_ledger.snapshot.claims[D, uid]


def reaches(here: ServedDriver, uid: str) -> set[str]:
    """Return the device numbers that a claim's containers may have, by ledger and by the agent's file of the claim."""
    (device,) = record(here, uid).devices
    assert here.own[uid].devices == (device,)
    its = device.identity
    return {token for token in (its.tokens | its.reached) - its.left if token.startswith("char:")}


async def left(here: ServedDriver, uid: str) -> None:
    """Have the agent read when the pod's containers started, and then that all of them have restarted."""
    while not await here.driver.renewal.look_left(uid):
        assert record(here, uid)


async def test_two_claims_swap_their_numbers(here: ServedDriver, sticks: Sticks, pods: Pods) -> None:
    """Two sticks swap device numbers: each claim gets a CDI file with its stick's new number.

    A claim has no CDI file until the containers of the other claim, which still have this number, have restarted.
    """
    await publish(here, sticks.plug(A=1, B=0))
    for uid, had in (("1", TTY), ("2", PTMX)):
        assert numbers(here, uid) == set()
        assert reaches(here, uid) == {had}
        assert not await here.driver.renewal.look_left(uid), "the starts of containers are read first"
        assert not await here.driver.renewal.look_left(uid), "no container has restarted"
    assert pods.asked == {"pod-2": {"main": 1}}
    pods.replaced = {"pod-1"}
    noticed: list[object] = []
    here.register.subscribe(lambda: noticed.append(here))
    await left(here, "1")
    assert noticed, "the device that has the former number now may be offered again"
    assert reaches(here, "1") == set()
    assert not await here.driver.renewal.renew("1"), "claim 2 reaches the number"
    assert await here.driver.renewal.renew("2")
    assert numbers(here, "2") == {TTY}
    assert reaches(here, "2") == {TTY, PTMX}
    pods.replaced = {"pod-1", "pod-2"}
    await left(here, "2")
    assert await here.driver.renewal.renew("1")
    assert (numbers(here, "1"), numbers(here, "2")) == ({PTMX}, {TTY})
    assert (reaches(here, "1"), reaches(here, "2")) == ({PTMX}, {TTY})


async def test_a_stick_that_is_away_has_no_number(here: ServedDriver, sticks: Sticks) -> None:
    """While a stick is unplugged its claim has no CDI file. It has one when the stick is back at its old number."""
    await publish(here, sticks.plug(B=1))
    assert numbers(here, "1") == set()
    await until(lambda: here.claims.events, "it is written in the background")
    assert reaches(here, "1") == {TTY}
    assert numbers(here, "2") == {PTMX}
    await publish(here, sticks.plug(A=0, B=1))
    assert numbers(here, "1") == {TTY}
    assert not await here.driver.renewal.look_left("1"), "nothing is left to leave"
    assert reaches(here, "1") == {TTY}


def check(here: ServedDriver) -> None:
    """Check that each number in a claim's CDI file is one that this claim's containers may have, and no other's."""
    for uid, other in ("12", "21"):
        (held,), (of_other,) = record(here, uid).devices, record(here, other).devices
        mine, theirs = ((i.tokens | i.reached) - i.left for i in (held.identity, of_other.identity))
        assert numbers(here, uid) <= mine - theirs


@pytest.mark.parametrize("killed", range(1, 6))
async def test_an_agent_is_killed_at_each_step_of_a_swap(
    here: ServedDriver, sticks: Sticks, pods: Pods, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """An agent killed before any write leaves no CDI file with another claim's number; the next agent goes on."""
    write, writes = ClaimFiles.write, 0

    async def broken(self: ClaimFiles, *arguments: Any) -> bool:
        nonlocal writes
        writes += 1
        if writes == killed:
            raise cdi.CdiError("the agent is killed before it writes the files")
        return await write(self, *arguments)

    monkeypatch.setattr(ClaimFiles, "write", broken)
    devices = sticks.plug(A=1, B=0)
    await identity.publish(here.inventory, devices, {})
    pods.replaced, agent = {"pod-1", "pod-2"}, here
    for step in (step for _ in range(6) for step in ("renew", "look_left")):
        for uid in ("1", "2"):
            try:
                await getattr(agent.driver.renewal, step)(uid)
            except cdi.CdiError:
                check(agent)
                agent = await here.again(devices=devices, host=pods)
                await identity.publish(agent.inventory, devices, {})
                for each in ("1", "2"):  # as `ClaimReconciler` does at the start
                    await agent.driver.files.write(record(agent, each), prepared_of(record(agent, each)))
            check(agent)
    assert writes >= killed
    assert (numbers(agent, "1"), numbers(agent, "2")) == ({PTMX}, {TTY})
    assert (reaches(agent, "1"), reaches(agent, "2")) == ({PTMX}, {TTY})


async def test_the_files_follow_without_being_asked(here: ServedDriver, sticks: Sticks, pods: Pods) -> None:
    """After a swap, the agent's own loop notices restarted containers and renews both CDI files."""
    await identity.publish(here.inventory, sticks.plug(A=1, B=0), {})
    pods.replaced = {"pod-1", "pod-2"}
    keeping = asyncio.create_task(here.driver.renewal.keep())
    await until(lambda: (numbers(here, "1"), numbers(here, "2")) == ({PTMX}, {TTY}))
    keeping.cancel()


async def test_a_file_that_cannot_be_renewed_delays_no_other(
    here: ServedDriver, sticks: Sticks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CDI file that cannot be renewed waits for the backoff; meanwhile the file of an unplugged stick is removed."""
    monkeypatch.setattr("dra_bridge.driver.renewal.Backoff", lambda **_: Backoff(first=3600.0, most=3600.0))
    described = cdi.described

    def fails(nodes: Sequence[DeviceNode]) -> Mapping[DeviceNode, tuple[dict[str, Any], ...]]:
        if nodes[0].path.endswith("/A"):
            raise cdi.CdiError("no such node")
        return described(nodes)

    monkeypatch.setattr(cdi, "described", fails)
    keeping = asyncio.create_task(here.driver.renewal.keep())
    await until(lambda: "claim 1 cannot be renewed: no such node" in caplog.text)
    await identity.publish(here.inventory, sticks.plug(A=0), {})
    await until(lambda: not numbers(here, "2"))
    keeping.cancel()


async def test_a_claim_that_waits_is_prepared_as_before(here: ServedDriver, sticks: Sticks) -> None:
    """While a stick is unplugged, a repeated Prepare gives the same answer and writes no CDI file."""
    before = await here.prepared("1")
    await publish(here, sticks.plug(B=1))
    assert (await here.prepared("1")).devices == before.devices
    assert numbers(here, "1") == set()
    await here.driver.close()


async def test_a_node_of_the_granted_stick_that_comes_later_is_added(tmp_path: Path, sticks: Sticks) -> None:
    """A claim's CDI file gets a new device node if sysfs shows that this node belongs to the claim's stick."""
    (usb,) = sticks.plug(A=0)
    component = tmp_path / "sys/devices/usb1/1-A/1-A:1.0/ttyUSB0"
    component.mkdir(parents=True)
    here = await served_driver(tmp_path, devices=[usb])
    await identity.publish(here.inventory, [usb], {})
    here.claims.add(claim("1", result("a")))
    await here.prepared("1")
    more = Device("a", nodes=[*usb.nodes, NODES[1]])
    await identity.publish(here.inventory, [more], {})
    assert not await here.driver.renewal.renew("1"), "nothing shows that the other node is of this stick"
    assert numbers(here, "1") == {TTY}
    (tmp_path / "sys/dev/char" / NUMBERS[1]).symlink_to("../../devices/usb1/1-A/1-A:1.0/ttyUSB0")
    await identity.publish(here.inventory, [more], {})
    assert await here.driver.renewal.renew("1")
    assert numbers(here, "1") == {TTY, PTMX}
    (tmp_path / "sys/dev/char" / NUMBERS[1]).unlink()
    await identity.publish(here.inventory, [usb], {})
    assert await here.driver.renewal.renew("1")
    assert numbers(here, "1") == {TTY}, "a number that sysfs shows no more is removed"
    await here.end()


async def test_a_claim_of_a_group_follows_its_own_sticks_alone(here: ServedDriver, sticks: Sticks) -> None:
    """The configuration adds claim 2's stick to claim 1's device: claim 1's CDI file keeps only its own stick.

    After a swap of both sticks' numbers, neither claim has a CDI file.
    """
    a, b = sticks.plug(A=0, B=1)
    await publish(here, [Device("a", nodes=[*a.nodes, *b.nodes])])
    assert (numbers(here, "1"), numbers(here, "2")) == ({TTY}, {PTMX})
    sticks.plug(A=1, B=0)
    await publish(here, [Device("a", nodes=[*a.nodes, *b.nodes])])
    assert (numbers(here, "1"), numbers(here, "2")) == (set(), set())
    assert (reaches(here, "1"), reaches(here, "2")) == ({TTY}, {PTMX})
    check(here)


async def test_administrative_access_follows_a_device(here: ServedDriver, sticks: Sticks) -> None:
    """The CDI file of a claim with adminAccess gets a new number at once; for a device that is away it has none."""
    here.claims.add(claim("3", result("a", adminAccess=True)))
    await here.prepared("3")
    await publish(here, sticks.plug(A=1, B=0))
    assert await here.driver.renewal.renew("3")
    assert numbers(here, "3") == {PTMX}
    await publish(here, sticks.plug(B=0))
    assert await here.driver.renewal.renew("3")
    assert numbers(here, "3") == set()


async def test_numbers_that_an_older_agent_has_swapped_are_withheld(
    here: ServedDriver, sticks: Sticks, pods: Pods
) -> None:
    """An older agent wrote swapped numbers into two CDI files: the files are removed until the containers restart."""
    devices = sticks.plug(A=1, B=0)
    for uid, other in ("12", "21"):
        mine, theirs = record(here, uid), record(here, other)
        assert mine.result is not None
        had, has = (TTY, PTMX) if uid == "1" else (PTMX, TTY)
        spec = mine.result.replace(f'minor\\":{had[7:]}', f'minor\\":{has[7:]}')
        assert spec != mine.result
        identity_now = mine.devices[0].identity.reaching(theirs.devices[0].identity)
        device = msgspec.structs.replace(mine.devices[0], identity=identity_now)
        swapped = dataclasses.replace(mine, devices=(device,), result=spec)
        await here.async_ledger.do(lambda _, it=swapped: Decision(None, (Change("claims", (D, it.uid), it),)))  # type: ignore[misc]
        await here.driver.files.write(swapped, prepared_of(swapped))
    await publish(here, devices)
    assert (numbers(here, "1"), numbers(here, "2")) == (set(), set())
    pods.replaced = {"pod-1", "pod-2"}
    await left(here, "1")
    await left(here, "2")
    await publish(here, devices)
    assert (numbers(here, "1"), numbers(here, "2")) == ({PTMX}, {TTY})
    assert (reaches(here, "1"), reaches(here, "2")) == ({PTMX}, {TTY})
