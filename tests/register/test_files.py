"""Registers, copies and claims' files that are lost, from before, or of another agent: no device has two holders."""

from __future__ import annotations

import asyncio

import pytest

from deviceplugin.testing import FakePod
from dra_bridge.testing.node import FakeNode
from tests.register.files import lose_register, registers
from tests.register.node import A, D, Here, Listed, got, running, serving

TOKENS = pytest.mark.parametrize("tokens", [False, True], ids=["names", "tokens"])


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
    async with serving(node, Listed(A, D, tokens=tokens)) as here:
        await here.until(lambda: here.healthy() == {"d0", "d1"})
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


async def test_a_register_without_its_log_is_not_believed_over_its_copy(node: FakeNode) -> None:
    """The agent was killed; what SQLite had not taken from its log yet is lost, and so is the kubelet's checkpoint."""
    async with serving(node, Listed(A, D)) as here:
        await here.until(lambda: here.healthy() == {"d0", "d1"})
    async with serving(node, Listed(A, D)) as here:
        await here.until(lambda: here.healthy() == {"d0", "d1"})
        pod = await here.run("p", {A: 1})
        (held,) = got(node, pod)
        await here.scans()
        await here.until(lambda: any(pod.uid in copy.read_text() for copy in node.cdi.glob("*.allocations")))
        kept = {path: path.read_bytes() for path in registers(node.root) if path.name == "register.db"}
        kept |= {path: path.read_bytes() for path in node.cdi.glob("*.allocations")}
    await asyncio.to_thread(node.stop)
    lose_register(node.root)
    for path, data in kept.items():
        path.write_bytes(data)
    node.damage_checkpoint("deleted")
    await asyncio.to_thread(node.start)
    async with serving(node, Listed(A, D)) as here:
        await here.until(lambda: here.healthy() | {held} == {"d0", "d1"})
        await here.scans()
        others = [await here.run(f"q{number}", {A: 1}) for number in range(2)]
        assert running(node, held) == {pod.uid}
        for one in (*others, pod):
            await here.stopped(one)
        await here.until(lambda: here.healthy() == {"d0", "d1"})
