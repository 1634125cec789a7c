"""Reboots after which device nodes have other numbers, or appear late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.device import Device
from deviceplugin.testing import FakePod
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import Listed
from tests.register.node import BOTH, A, D, serving

PLACES = (
    "deviceplugin.identity",
    "deviceplugin.kubelet.tracker",
    "dra_bridge.ledger.store",
)


@contextlib.contextmanager
def another_boot() -> Iterator[None]:
    """In this block an agent runs as if in another boot of the node."""
    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            patch.setattr(f"{place}.boot_id", lambda: "an-earlier-boot")
        yield


def put(path: Path, number: int) -> None:
    """Make a device node."""
    path.unlink(missing_ok=True)
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(60, number))


def hardware(pod: FakePod) -> set[int]:
    """Return the minor numbers of the nodes that a pod's container got."""
    return {os.minor(os.stat(one.host).st_rdev) for one in pod.nodes}


@BOTH
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
async def test_numbers_are_swapped_by_a_reboot(node: FakeNode, tmp_path: Path, late: bool, both: bool) -> None:
    """If a reboot swaps the nodes of two devices, no two pods get the same device.

    The kubelet starts the pod with the AllocateResponse from before the reboot.
    """
    tty = [tmp_path / f"ttyX{n}" for n in range(2)]
    for n, path in enumerate(tty):
        put(path, 10 + n)

    def source(first: int) -> Listed:
        made = Listed(A, D)
        made.lists = asyncio.Queue()
        made.list(Device("serial-0", nodes=[str(tty[first])]), Device("serial-1", nodes=[str(tty[1 - first])]))
        return made

    with another_boot():
        async with serving(node, source(0), both=both) as here:
            await here.until(lambda: here.healthy() == {"serial-0", "serial-1"})
            pod = await here.run("p", {A: 1})
            await here.scans()
    if late:
        for path in tty:
            path.unlink()
    # after the reboot serial-0 has the second node
    swapped = source(1)
    if late:
        swapped.lists = asyncio.Queue()
        swapped.list()
    await asyncio.to_thread(node.stop)
    node.hold_sources()  # the kubelet gets its pods only when the plugin is there
    await asyncio.to_thread(node.reboot)
    async with serving(node, swapped, both=both) as here:
        await here.until(lambda: A in node.resources())
        await here.scans()
        if late:
            for n, path in enumerate(tty):
                put(path, 10 + n)
            swapped.list(Device("serial-0", nodes=[str(tty[1])]), Device("serial-1", nodes=[str(tty[0])]))
        await here.scans()
        node.release_sources()
        await here.until(lambda: pod.phase != "Pending")
        await here.scans()
        others = [await here.run(f"q{n}", {A: 1}) for n in range(2)]
        has = [sorted(hardware(one)) for one in (pod, *others) if one.running]
        assert len(has) == len({tuple(one) for one in has}), has
