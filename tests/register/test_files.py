"""Even if agents' records, their copies or claim files are lost, or of another agent, no device has two holders."""

from __future__ import annotations

import asyncio

import pytest

from deviceplugin.device import Device
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import (
    A,
    B,
    D,
    E,
    Varying,
    got,
    lose_register,
    offering,
    running,
    serving,
    some,
)

# Two agents with different names.


async def test_what_claims_of_a_second_agent_have_is_given_to_nobody(node: FakeNode) -> None:
    """If two agents list the same hardware, a device that a claim of one agent holds is withheld by the other."""
    other = Listed(B, E)
    other.lists = asyncio.Queue()
    other.list(Device("x0", identity="serial:d0"))
    async with offering(node, Listed(A, D, "d0", tokens=True), share="all", name="one") as one:
        pod = await one.claimant("c0")
        async with serving(node, other, name="two") as two:
            await two.until(lambda: f"d0 of {A}, which counts as held" in two.withheld(B).get("x0", ""))
            assert not two.healthy(B)
            await one.stopped(pod)
            await two.until(lambda: two.healthy(B) == {"x0"})


@pytest.mark.parametrize("driver", [D, E])
async def test_claims_of_an_agent_of_another_name_are_those_of_their_driver(node: FakeNode, driver: str) -> None:
    """If an agent with another name takes over the resource, a claim holds its device until the claim's pod ends."""
    async with offering(node, Listed(A, D), share="all") as here:
        pod = await here.claimant("c0")
        (held,) = got(node, pod)
    async with serving(node, Listed(A, driver), name="other") as here:
        await here.until(lambda: here.healthy() | {held} == {"d0", "d1"})
        await here.scans()
        others = [await here.run(f"q{number}", {A: 1}) for number in range(2)]
        assert running(node, held) == {pod.uid}
        for one in others:
            await here.stopped(one)
        if driver == D:
            await here.stopped(pod)
            await here.until(lambda: here.healthy() == {"d0", "d1"})
    async with serving(node, Listed(A, driver)) as here:
        if driver != D:
            await here.stopped(pod)
        await here.until(lambda: here.healthy() == {"d0", "d1"})


async def test_claims_of_another_agents_driver_are_known_after_a_reload_that_names_it(node: FakeNode) -> None:
    """A claim's device is refused to pods also after a reload adds the claim's driver to a resource without devices."""
    async with offering(node, Listed(A, D, "d0"), share="all", name="one") as one:
        pod = await one.claimant("c0")
    async with serving(node, Listed(A, "", "d0"), name="two") as two:
        await two.until(lambda: f"through driver {D}" in two.withheld().get("d0", ""))
        empty = Listed(B, D)
        empty.lists = asyncio.Queue()
        empty.list()
        await two.serve(empty, Listed(A, "", "d0"))
        assert (await two.run("q", {A: 1})).running is False
        await two.stopped(pod)
        await two.until(lambda: two.healthy() == {"d0"})


async def test_a_share_that_another_agents_pod_has_is_all_that_is_withheld(node: FakeNode) -> None:
    """If a pod of another agent has one of a device's two replicas, one more replica is granted, and no third."""
    async with serving(node, Varying(2)) as here:
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})
        first = await here.run("p", {A: 1})
        await here.scans()
    async with serving(node, Varying(2), name="other") as here:
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})
        second = await here.run("q", {A: 1})
        assert second.running
        await here.stopped(first)
        await here.scans()
    async with serving(node, Varying(2)) as here:
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})
        assert (await here.run("r", {A: 1})).running
        assert not (await here.run("s", {A: 1})).running


# Lost claim files.


@some(
    "driver, files",
    [(D, (True, "*")), (D, (False, "*")), (E, (True, "*.claim")), ("", (False, "*"))],
    [D, E, ""],
    [(False, "*"), (True, "*"), (True, "*.claim")],
)
async def test_a_claim_that_is_named_by_the_kubelet_alone_may_have_any_device(
    node: FakeNode, driver: str, files: tuple[bool, str]
) -> None:
    """Without register and claim files a claim's device is not granted, and without the driver no device is granted."""
    both, lost = files
    async with offering(node, Listed(A, D), share="all") as here:
        pod = await here.claimant("c0")
        (held,) = got(node, pod)
    await asyncio.to_thread(node.stop)
    if both:
        lose_register(node.root)
    for path in [path for path in node.cdi.rglob(lost) if path.is_file()]:
        path.unlink()
    await asyncio.to_thread(node.start)
    async with serving(node, Listed(A, driver), both=both) as here:
        await here.until(lambda: A in node.resources())
        explained = both and driver == D
        if explained:
            await here.until(lambda: here.healthy() | {held} == {"d0", "d1"})
        else:
            await here.until(
                lambda: {one for one, why in here.withheld().items() if "there is no file of" in why} == {"d0", "d1"}
            )
        others = [await here.run(f"q{number}", {A: 1}) for number in range(2)]
        assert [one.running for one in others].count(True) == explained
        assert running(node, held) == {pod.uid}
        for one in others:
            await here.stopped(one)
        if explained:
            await here.stopped(pod)
    async with serving(node, Listed(A, D)) as here:  # with this driver the claim can be unprepared
        await here.stopped(pod)
        await here.until(lambda: here.healthy() == {"d0", "d1"}, 30)
