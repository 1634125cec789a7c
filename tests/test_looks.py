"""Reads of files in threads: their deadlines, limits, and what goes on while one hangs.

A subject is a directory, or the devices of a resource; the threads of each subject are limited separately.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deviceplugin import looked_at, looks
from deviceplugin.device import Device, Health
from deviceplugin.inventory import Inventory
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.sources.path import PathSource
from deviceplugin.sources.simulated import SimulatedSource
from deviceplugin.testing import FakeKubelet, serve

R, OTHER = "example.com/slow", "example.com/quick"


class Gate:
    """A function that hangs while the gate is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.calls = 0

    def __call__(self, path: str = "/x") -> str:
        self.calls += 1
        looked_at.at(path)
        assert self.opened.wait(60)
        return path


@pytest.fixture(autouse=True)
def a_loop_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "PROMPT", 0.001)


async def answered(subject: Looks) -> None:
    """Wait until no file access of `subject` hangs any more."""
    changed = asyncio.Event()
    before, subject.changed = subject.changed, lambda: (before(), changed.set())  # type: ignore[assignment, func-returns-value]
    async with asyncio.timeout(60):
        while subject.hanging:
            await changed.wait()


async def test_a_look_that_hangs_fails_with_its_path() -> None:
    """A read that hangs fails with its path; further reads of its subject fail at once, other subjects go on."""
    gate, subject, other = Gate(), Looks("files", resource=R), Looks("others")
    before = looks.timeouts[R, "grant"]
    with pytest.raises(LookTimeoutError, match=r"^/dev/slow did not answer within 0.05 s$"):
        await subject.at("grant", gate, "/dev/slow", timeout=0.05)
    with pytest.raises(LookTimeoutError, match=r"^/dev/slow did not answer"):
        await subject.at("grant", gate, "/dev/other")
    assert gate.calls == 1
    assert looks.timeouts[R, "grant"] == before + 1
    assert await other.at("grant", os.stat, "/") == os.stat("/")
    gate.opened.set()
    await answered(subject)
    assert await subject.at("grant", gate, "/dev/other") == "/dev/other"


async def test_threads_of_a_subject_are_bounded() -> None:
    """Of many hanging reads of a subject only two have threads, and the others never start."""
    gate, subject = Gate(), Looks("many files", threads=2)
    tasks = [asyncio.create_task(subject.at("scan", gate, timeout=0.1)) for _ in range(20)]
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, LookTimeoutError) for one in found)
    assert sum(thread.name == "look at many files" for thread in threading.enumerate()) == 2
    gate.opened.set()
    await answered(subject)
    assert gate.calls == 2
    assert await subject.at("scan", gate) == "/x"


async def test_a_result_that_is_late_is_awaited() -> None:
    """`until_answered` reports a read that hangs, and returns the result when the read ends."""
    gate, subject = Gate(), Looks("files")
    waiting = asyncio.create_task(subject.until_answered("list", gate, "/late", timeout=0.01))
    async with asyncio.timeout(60):
        while not subject.hanging:
            await asyncio.wait({waiting}, timeout=0.01)
    assert not waiting.done()
    gate.opened.set()
    assert await waiting == "/late"


async def test_an_error_is_the_callers() -> None:
    """An exception that a read raises is raised in its caller, and later reads work."""
    subject = Looks("files")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await subject.at("scan", os.stat, "/not/there", brief=True)
        with pytest.raises(RuntimeError, match="SystemExit"):
            await subject.at("scan", sys.exit)
    assert (look := subject.brief("scan", os.stat, "/")) is None or look.result


async def test_devices_are_unhealthy_while_a_look_at_them_hangs() -> None:
    """While a read of a device's path hangs, all devices of the resource are unhealthy; then they are as listed."""
    gate, inventory = Gate(), Inventory(R)
    inventory.publish([Device("a"), Device("b", health=Health.UNHEALTHY, message="broken")])
    with pytest.raises(LookTimeoutError):
        await inventory.looks.at("grant", gate, "/dev/a", timeout=0.01)
    assert {device.message for device in inventory.devices.values()} == {"/dev/a did not answer within 0.01 s"}
    inventory.publish([Device("a"), Device("b", health=Health.UNHEALTHY, message="broken"), Device("c")])
    assert {device.health for device in inventory.devices.values()} == {Health.UNHEALTHY}
    gate.opened.set()
    await answered(inventory.looks)
    assert [device.message for device in inventory.devices.values()] == ["", "broken", ""]


def test_a_thread_that_hangs_keeps_no_process() -> None:
    """A hanging read does not keep the process from ending."""
    program = (
        "import asyncio, threading; from deviceplugin.looks import Looks, LookTimeoutError\n"
        "async def main():\n"
        "    try: await Looks('x').at('scan', threading.Event().wait, timeout=0.05)\n"
        "    except LookTimeoutError: print('late')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr


def test_no_product_code_uses_the_loops_default_threads() -> None:
    """No product code uses the loop's default threads, whose number is small and which are joined at the end."""
    root = Path(looks.__file__).parents[1]
    users = [
        str(path.relative_to(root))
        for package in ("deviceplugin", "dra_bridge")
        for path in root.joinpath(package).rglob("*.py")
        if {"testing"}.isdisjoint(path.parts) and path.name != "demo.py"
        if any(word in path.read_text() for word in ("to_thread(", "run_in_executor(", "ThreadPoolExecutor"))
    ]
    assert not users


def test_device_paths_that_hang_hold_up_no_other_pod(
    tmp_path: Path, fake_kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a device path hangs, Allocate of its resource fails, and its devices are unhealthy; other pods start."""
    paths = [tmp_path / name for name in ("a0", "a1")]
    for path in paths:
        path.touch()
    gate, look = Gate(), os.stat

    def stat(path: object, *arguments: object, **more: object) -> os.stat_result:
        if str(path) in map(str, paths):
            gate(str(path))
        return look(path, *arguments, **more)  # type: ignore[arg-type]

    gate.opened.set()
    monkeypatch.setattr(os, "stat", stat)
    with serve([PathSource(f"{tmp_path}/a*", resource=R), SimulatedSource(2, resource=OTHER)], fake_kubelet):
        fake_kubelet.wait_allocatable(R, 2)
        gate.opened.clear()
        with pytest.raises(Exception, match=rf"{tmp_path}/a\d did not answer within"):
            fake_kubelet.run_pod("slow", {R: 1})
        assert fake_kubelet.run_pod("quick", {OTHER: 1}).device_ids
        fake_kubelet.wait_allocatable(R, 0)
        gate.opened.set()
        fake_kubelet.wait_allocatable(R, 2)
        assert fake_kubelet.run_pod("again", {R: 1}).device_ids
