"""The sequences that gave a device twice, withheld it from everybody, or kept it: each row of the table is a test."""

from __future__ import annotations

import asyncio

import pytest

from dra_bridge.testing.node import FakeNode
from tests.register.node import A, D, E, Listed, running, serving

TOKENS = pytest.mark.parametrize("tokens", [False, True], ids=["names", "tokens"])


# A driver's name is taken away, and comes back.


@TOKENS
@pytest.mark.parametrize(("between", "side"), [("", "plugin"), (E, "plugin"), (E, "dra")])
async def test_a_driver_that_is_named_again_gives_no_device_twice(
    node: FakeNode, between: str, side: str, tokens: bool
) -> None:
    """What a pod or a claim got while the resource had another driver, or none, is not given away until that ends."""
    share = "all" if side == "dra" else "none"
    async with serving(node, Listed(A, D, tokens=tokens), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0", "d1"})
        await here.serve(Listed(A, between, tokens=tokens), share=share)
        if side == "dra":
            await here.until(lambda: here.sliced(between) == {"d0", "d1"})
            holder = await here.claimant("holder", between)
        else:
            await here.until(lambda: here.healthy() == {"d0", "d1"})
            holder = await here.run("holder", {A: 1})
        (held,) = node.devices_of(holder)
        others = [node.start_pod(name, template={D: 1}) for name in ("p0", "p1")]
        await here.serve(Listed(A, D, tokens=tokens), share="all")
        await here.until(lambda: any(pod.running for pod in others))
        await here.scans()
        assert running(node, held) == {holder.uid}
        assert held not in here.sliced()
        await here.stopped(holder)
        for pod in others:
            await asyncio.to_thread(pod.wait_running, 15)
