"""Registers, copies and claims' files that are lost, from before, or of another agent: no device has two holders."""

from __future__ import annotations

import asyncio

import pytest

from deviceplugin.device import Device
from deviceplugin.testing import FakePod
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import (
    BOTH,
    TOKENS,
    A,
    B,
    D,
    E,
    Here,
    Varying,
    got,
    lose_register,
    offering,
    registers,
    running,
    serving,
    some,
)


async def hang(here: Here) -> FakePod:
    """Run a pod on one of two devices and delete it by force; it hangs, and the kubelet does not name it any more."""
    node = here.node
    await here.until(lambda: here.healthy() == {"d0", "d1"})
    pod = await here.run("p", {A: 1})
    await here.scans()
    pod.force_delete(hang=True)
    await here.scans()
    await here.stopped(await here.run("second", {A: 1}))  # so the kubelet writes its checkpoint
    await here.until(lambda: pod.uid not in node.checkpoint.read_text())
    return pod


async def keeps(here: Here, pod: FakePod) -> None:
    """Check that a device of two is given to nobody else while the containers of its pod run, and after that it is."""
    node = here.node
    (held,) = got(node, pod)
    await here.until(lambda: here.healthy() == {"d0", "d1"} - {held})
    others = [await here.run(f"q{number}", {A: 1}) for number in range(2)]
    assert running(node, held) == {pod.uid}
    for one in others:
        await here.stopped(one)
    await asyncio.to_thread(pod.end_containers, 15)
    await here.until(lambda: here.healthy() == {"d0", "d1"})


# A register from before.


@TOKENS
async def test_a_register_from_before_is_not_believed_over_its_copy(node: FakeNode, tokens: bool) -> None:
    """An operator has put it back: the copy names who came since, though the kubelet has forgotten it."""
    async with offering(node, Listed(A, D, tokens=tokens)):
        pass
    before = {path: path.read_bytes() for path in registers(node.root)}
    async with serving(node, Listed(A, D, tokens=tokens)) as here:
        pod = await hang(here)
    lose_register(node.root)
    for path, data in before.items():
        path.write_bytes(data)
    for _ in range(2):  # the copy is made anew at each start
        async with serving(node, Listed(A, D, tokens=tokens)) as here:
            await here.until(lambda: len(here.healthy()) == 1)
            await here.scans()
    async with serving(node, Listed(A, D, tokens=tokens)) as here:
        await keeps(here, pod)


# Agents of other names.


async def test_a_second_agent_leaves_the_first_ones_driver_alone(node: FakeNode) -> None:
    """It has a name, a resource and a driver of its own; the claims of the first one are unprepared by that."""
    async with offering(node, Listed(A, D), share="all", name="one") as one:
        pods = [await one.claimant("c0")]
        async with serving(node, Listed(B, E, "x0"), share="all", name="two") as two:
            await two.until(lambda: two.sliced(E) == {"x0"})
            assert two.bridge is not None
            assert two.bridge.drivers.keys() == {E}
            assert len(node.dra.plugins(D)) == 1
            pods.append(await one.claimant("c1"))
            assert got(node, pods[0]) | got(node, pods[1]) == {"d0", "d1"}
            for pod in pods:
                await one.stopped(pod)
            await one.until(lambda: one.sliced() == {"d0", "d1"})
            assert not list(node.cdi.glob("*/*.claim"))


async def test_what_claims_of_a_second_agent_have_is_given_to_nobody(node: FakeNode) -> None:
    """Both have the same hardware, by other names: the claim's own file says what it is."""
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
    """Who serves the driver unprepares them; nobody gets their devices. The agent that made them can come back."""
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
    """The devices are of another resource now, and those of the driver's own are not there."""
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


@BOTH
async def test_what_a_pod_of_another_agents_resource_has_is_given_to_nobody(node: FakeNode, both: bool) -> None:
    """It hangs, and the agent has the same hardware by another name."""
    async with serving(node, Listed(A, D, tokens=True)) as here:
        pod = await hang(here)
        (held,) = got(node, pod)
    async with serving(node, Listed(B, E, tokens=True), both=both, name="other") as other:
        await other.until(lambda: other.healthy(B) == {"d0", "d1"} - {held})
        assert (await other.run("q0", {B: 1})).device_ids != (held,)
        await asyncio.to_thread(pod.end_containers, 15)
        await other.until(lambda: held in other.healthy(B))


async def test_a_share_that_another_agents_pod_has_is_all_that_is_withheld(node: FakeNode) -> None:
    """The checkpoint and the copy name one and the same allocation; the other share is for the next pod."""
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


# Claims' files that are lost.


@some(
    "driver, files",
    [(D, (True, "*")), (D, (False, "*")), (E, (True, "*.claim")), ("", (False, "*"))],
    [D, E, ""],
    [(False, "*"), (True, "*"), (True, "*.claim")],
)
async def test_a_claim_that_is_named_by_the_kubelet_alone_may_have_any_device(
    node: FakeNode, driver: str, files: tuple[bool, str]
) -> None:
    """Register and claims' files are lost, and another driver is configured, or `deviceplugin run` follows."""
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
    async with serving(node, Listed(A, D)) as here:  # the driver ends it
        await here.stopped(pod)
        await here.until(lambda: here.healthy() == {"d0", "d1"}, 30)
