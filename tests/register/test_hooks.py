"""Hooks around the use of devices: of those that share one, of administrators, and of those that work on too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from deviceplugin.device import Device
from deviceplugin.testing.claim_state import DevicesOfClaim
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import BOTH, A, D, Here, answered, running, serving

SHARES = tuple(f"00000000-0000-4000-8000-00000000000{number}" for number in range(3))


class Mode(msgspec.Struct, forbid_unknown_fields=True):
    """How a device is set up."""

    name: str = "plain"


class Noted(Listed):
    """Devices that note which hooks were called for them."""

    config_type = Mode

    def __init__(self, *names: str, replicas: int = 1) -> None:
        super().__init__(A, D, *names, replicas=replicas)
        self.calls: list[tuple[str, str]] = []
        self.modes: list[str] = []

    def note(self, hook: str, devices: Sequence[Device]) -> None:
        self.calls += [(hook, device.id) for device in devices]

    async def reset(self, devices: Sequence[Device]) -> None:
        self.note("reset", devices)

    async def prepare(self, devices: Sequence[Device], config: Mode) -> None:
        self.note("prepare", devices)
        self.modes.append(config.name)

    async def unprepare(self, devices: Sequence[Device]) -> None:
        self.note("unprepare", devices)


async def test_administrative_access_undoes_no_other_claims_set_up(node: FakeNode) -> None:
    """No hook is called for it: neither when it is prepared nor when it is unprepared."""
    async with serving(node, source := Noted("d0"), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        owner = here.allocate("owner", D, "d0")
        assert await here.prepare(D, owner) == ""
        before = [*source.calls]
        assert ("prepare", "d0") in before
        visitor = here.allocate("visitor", D, "d0", adminAccess=True)
        assert await here.prepare(D, visitor) == ""
        assert await here.unprepare(D, visitor) == ""
        assert source.calls == before
        assert await here.unprepare(D, owner) == ""
        assert source.calls == [*before, ("unprepare", "d0")]


async def test_administrative_access_that_outlives_a_claim_undoes_nothing(node: FakeNode) -> None:
    """What its device was set up for has ended before it: no hook is called then either."""
    async with serving(node, source := Noted("d0"), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        visitor = here.allocate("visitor", D, "d0", adminAccess=True)
        assert await here.prepare(D, visitor) == ""
        assert source.calls == []
        owner = here.allocate("owner", D, "d0")
        assert await here.prepare(D, owner) == ""
        assert await here.unprepare(D, owner) == ""
        before = [*source.calls]
        assert before[-1] == ("unprepare", "d0")
        assert await here.unprepare(D, visitor) == ""
        assert source.calls == before


async def test_a_shared_device_is_unprepared_when_its_last_claim_ends(node: FakeNode) -> None:
    """The end of one of two sharers takes nothing away from the other."""
    async with serving(node, source := Noted("d0", replicas=2), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        claims = [
            here.allocate(f"c{number}", D, "d0", shareID=SHARES[number], consumedCapacity={f"{D}/shares": "1"})
            for number in range(2)
        ]
        for claim in claims:
            assert await here.prepare(D, claim) == ""
        assert source.calls.count(("reset", "d0")) == 1
        assert await here.unprepare(D, claims[0]) == ""
        assert ("unprepare", "d0") not in source.calls
        assert await here.unprepare(D, claims[1]) == ""
        assert source.calls.count(("unprepare", "d0")) == 1


async def test_a_shared_device_keeps_its_parameters_while_a_claim_has_it(node: FakeNode) -> None:
    """A claim with other parameters is refused, and the error names the claim whose parameters they are."""
    async with serving(node, source := Noted("d0", replicas=2), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        for name, mode in (("first", "fast"), ("second", "slow"), ("third", "fast")):
            node.claim(name, D, parameters={D: {"name": mode}})
        first = await here.claimant("p0", claims=["first"])
        second = node.start_pod("p1", claims=["second"])
        await here.until(lambda: answered(second))
        assert not second.running
        assert "default/first" in second.container().message
        assert set(source.modes) == {"fast"}
        await here.stopped(second)
        third = await here.claimant("p2", claims=["third"])
        assert running(node, "d0") == {first.uid, third.uid}
        for pod in (first, third):
            await here.stopped(pod)
        node.claim("fourth", D, parameters={D: {"name": "slow"}})
        await here.claimant("p3", claims=["fourth"])
        assert source.modes[-1] == "slow"


class Overdue(Listed):
    """Devices of which the first call of one hook works on after its timeout, until a test lets it end."""

    hook_timeout = 0.3

    def __init__(self, hook: str) -> None:
        super().__init__(A, D, "d0")
        self.ends = threading.Event()
        self.calls = self.now = self.most = 0
        self._hook = hook
        self._lock = threading.Lock()

    def _work(self, hook: str) -> None:
        if hook != self._hook:
            return
        with self._lock:
            self.calls += 1
            first = self.calls == 1
            self.now += 1
            self.most = max(self.most, self.now)
        if first:
            self.ends.wait(60)
        with self._lock:
            self.now -= 1

    def reset(self, devices: Sequence[Device]) -> None:
        self._work("reset")

    def prepare(self, devices: Sequence[Device], config: object) -> None:
        self._work("prepare")

    def unprepare(self, devices: Sequence[Device]) -> None:
        self._work("unprepare")


@pytest.fixture
def overdue(request: pytest.FixtureRequest) -> Iterator[Overdue]:
    source = Overdue(request.param)
    yield source
    source.ends.set()


@BOTH
@pytest.mark.parametrize("overdue", ["reset"], indirect=True)
async def test_no_container_starts_while_a_reset_works_on(node: FakeNode, overdue: Overdue, both: bool) -> None:
    """The kubelet asks again and again: there is one reset of the device at a time, and the pod runs after it."""
    async with serving(node, overdue, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        pod = node.start_pod("p", {A: 1})
        await here.until(lambda: pod.running or len(node.rpcs("PreStartContainer")) >= 3)
        assert not pod.running
        assert overdue.most == 1
        overdue.ends.set()
        await asyncio.to_thread(pod.wait_running, 15)
        assert overdue.most == 1


@BOTH
@pytest.mark.parametrize("overdue", ["reset"], indirect=True)
async def test_the_next_pod_gets_no_device_on_which_a_reset_works_on(
    node: FakeNode, overdue: Overdue, both: bool
) -> None:
    """The pod that it was for has ended: the device is given to the next one when the reset has ended, too."""
    async with serving(node, overdue, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        pod = node.start_pod("p", {A: 1})
        await here.until(lambda: node.rpcs("PreStartContainer"))
        await here.stopped(pod)
        await here.scans()
        follower = await here.run("q", {A: 1})
        assert not follower.running
        assert "reset" in here.withheld()["d0"]
        assert overdue.most == 1
        await here.stopped(follower)
        overdue.ends.set()
        await here.until(lambda: here.healthy() == {"d0"})
        assert (await here.run("r", {A: 1})).running
        assert overdue.most == 1


async def prepared_after(here: Here, first: DevicesOfClaim, second: DevicesOfClaim, ends: threading.Event) -> None:
    """Ask for a second claim, and for the end of the first one, until it is prepared; let the hook end meanwhile."""
    ends.set()
    async with asyncio.timeout(15):
        while await here.prepare(D, second):
            await here.unprepare(D, first)


@pytest.mark.parametrize("overdue", ["reset", "prepare"], indirect=True)
async def test_the_next_claim_gets_no_device_on_which_a_hook_works_on(node: FakeNode, overdue: Overdue) -> None:
    """The claim that it was for is gone: the device is prepared for the next one when the hook has ended, too."""
    async with serving(node, overdue, share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        first, second = (here.allocate(name, D, "d0") for name in ("first", "second"))
        assert "did not answer" in await here.prepare(D, first)
        assert await here.prepare(D, first) != ""
        await here.unprepare(D, first)
        node.remove_claim("first")
        assert await here.prepare(D, second) != ""
        assert (overdue.now, overdue.most) == (1, 1)
        await prepared_after(here, first, second, overdue.ends)
        assert overdue.most == 1


@pytest.mark.parametrize("overdue", ["unprepare"], indirect=True)
async def test_a_claim_is_not_unprepared_while_its_hook_works_on(node: FakeNode, overdue: Overdue) -> None:
    """The kubelet asks again: there is one unprepare at a time, and the next claim gets the device after it."""
    async with serving(node, overdue, share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        first, second = (here.allocate(name, D, "d0") for name in ("first", "second"))
        assert await here.prepare(D, first) == ""
        assert "did not answer" in await here.unprepare(D, first)
        assert await here.unprepare(D, first) != ""
        assert await here.prepare(D, second) != ""
        assert (overdue.now, overdue.most) == (1, 1)
        await prepared_after(here, first, second, overdue.ends)
        assert overdue.most == 1
