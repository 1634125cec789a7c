"""If lists or the config change during an Allocate or a Prepare, no two pods get the same hardware."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from deviceplugin.device import ContainerEdits, Device
from deviceplugin.kubelet import registration
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import BOTH, A, B, D, got, serving


def card(name: str, hardware: str) -> Device:
    """Return a device that gives its container a variable with the name of its hardware."""
    return Device(name, edits=ContainerEdits({f"DEVICE_{hardware}": "1"}), identity=f"serial:{hardware}")


def cards(source: Listed, **hardware: str) -> None:
    source.list(*(card(name, one) for name, one in hardware.items()))


class Slow(Listed):
    """A source whose `edits` waits until a test sets `end`."""

    def __init__(self, resource: str = A, driver: str = D) -> None:
        super().__init__(resource, driver)
        self.lists = asyncio.Queue()
        self.began, self.end = asyncio.Event(), asyncio.Event()

    async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
        self.began.set()
        await self.end.wait()
        return ContainerEdits()


@BOTH
async def test_a_list_changes_while_edits_works_for_a_pod(node: FakeNode, both: bool) -> None:
    """If a list gives a device id other hardware during an Allocate's `edits`, no two pods get the same hardware."""
    source = Slow()
    cards(source, d0="h0")
    async with serving(node, source, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        first = node.start_pod("p", {A: 1})
        await asyncio.wait_for(source.began.wait(), 15)
        cards(source, d0="h1", d1="h0")
        await here.until(lambda: "d1" in here.agent.services[A].inventory.snapshot.devices)
        source.end.set()
        await here.until(lambda: first.phase != "Pending")
        await here.soon(lambda: "d1" in here.healthy(), 5)
        second = await here.run("q", {A: 1})
        third = await here.run("r", {A: 1})
        has = [sorted(got(node, pod)) for pod in (first, second, third) if pod.running]
        assert has, "a pod runs"
        assert len(has) == len({tuple(one) for one in has}), has


@pytest.mark.parametrize("hook", ["released", "edits"])
async def test_a_list_changes_while_a_claim_is_prepared(node: FakeNode, hook: str) -> None:
    """If a list gives a device name other hardware during a Prepare's hook, no two pods get the same hardware."""

    class Wiped(Listed):
        began, end, slow = asyncio.Event(), asyncio.Event(), False

        async def released(self, devices: Sequence[Device]) -> None:
            if self.slow and hook == "released":
                self.began.set()
                await self.end.wait()

        async def edits(self, devices: Sequence[Device]) -> ContainerEdits:
            if self.slow and hook == "edits":
                self.began.set()
                await self.end.wait()
            return ContainerEdits()

    source = Wiped(A, D)
    source.lists = asyncio.Queue()
    cards(source, d0="h0")
    async with serving(node, source, share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        before = await here.claimant("c0")
        source.slow = True
        await here.stopped(before)
        first = node.start_pod("c1", template={D: 1})
        await asyncio.wait_for(source.began.wait(), 15)
        await here.until(lambda: first.bound)
        await here.scans()
        cards(source, d0="h1", d1="h0")
        await here.until(lambda: "d1" in here.agent.services[A].inventory.snapshot.devices)
        source.slow = False
        source.end.set()
        await here.soon(lambda: first.running, 8)
        pods = [node.start_pod(f"c{n}", template={D: 1}) for n in (2, 3)]
        await here.until(lambda: pods[0].phase != "Pending")
        await here.scans()
        has = [sorted(got(node, pod)) for pod in (first, *pods) if pod.running]
        assert has, "a pod runs"
        assert len(has) == len({tuple(one) for one in has}), has


@BOTH
@pytest.mark.parametrize(("to", "outlasts"), [(A, False), (B, False), (B, True)], ids=["same", "other", "outlasts"])
async def test_a_reload_moves_hardware_while_edits_works(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, both: bool, to: str, outlasts: bool
) -> None:
    """If a reload during an Allocate's `edits` offers the hardware under another name, no two pods get it.

    outlasts: `edits` takes longer than the agent waits for the calls of a resource that it removes.
    """
    if outlasts:
        short = functools.partial(registration.RegistrationTiming, calls=0.5)
        monkeypatch.setattr(registration, "RegistrationTiming", short)
    source = Slow()
    source.hook_timeout = 60.0
    cards(source, d0="h0")
    other = Listed(to, D)
    other.lists = asyncio.Queue()
    cards(other, x0="h0")
    async with serving(node, source, both=both) as here:
        await here.until(lambda: here.healthy() == {"d0"})
        first = node.start_pod("p", {A: 1})
        await asyncio.wait_for(source.began.wait(), 15)
        reload = asyncio.create_task(here.serve(other))
        await here.soon(reload.done, 40 if outlasts else 0.3)
        if not outlasts:
            source.end.set()
            await here.soon(lambda: first.phase != "Pending", 8)
        await reload
        await here.until(lambda: to in node.resources())
        if outlasts:
            await here.scans()
            second = node.start_pod("q", {to: 1})
            await here.scans()
            source.end.set()
            await here.soon(lambda: first.phase != "Pending" and second.phase != "Pending", 5)
        else:
            second = await here.run("q", {to: 1})
        has = [sorted(got(node, pod)) for pod in (first, second) if pod.running]
        assert has, "a pod runs"
        assert len(has) == len({tuple(one) for one in has}), has
