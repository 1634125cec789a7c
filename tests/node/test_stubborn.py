"""The end of an agent whose hooks or watches refuse to be cancelled."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin.testing import FakeKubelet

SCRIPT = """
import asyncio, contextlib, sys
from deviceplugin import ContainerEdits, Device, DeviceSource, run

class Toys(DeviceSource):
    resource = "example.com/toy"
    hook_timeout = 0.5

    async def watch(self):
        yield [Device("a"), Device("b")]
        while {watch}:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def edits(self, devices):
        while {edits}:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        return ContainerEdits()

if __name__ == "__main__":
    run(Toys())
"""


@pytest.mark.parametrize("which", ["neither", "watch", "edits"])
def test_the_agent_ends_with_a_stubborn_coroutine(tmp_path: Path, which: str) -> None:
    """A hook or `watch` that refuses to be cancelled does not keep the agent from ending with status 0."""
    script = tmp_path / "toys.py"
    script.write_text(SCRIPT.format(watch=which == "watch", edits=which == "edits"))
    with FakeKubelet() as kubelet:
        process = subprocess.Popen([sys.executable, str(script), *kubelet.arguments])
        try:
            kubelet.wait_allocatable("example.com/toy", 2, 20)
            kubelet.run_pod("p", {"example.com/toy": 1}, check=False)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
