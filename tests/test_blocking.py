"""A coroutine that blocks the event loop is named, and does not keep the agent from ending."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest

from deviceplugin import Device, DeviceSource
from deviceplugin.testing import BlockedLoopError, FakeKubelet, Served
from tests.programs import running

SCRIPT = """
import time
from deviceplugin import Device, DeviceSource, run

class Slow(DeviceSource):
    resource = "example.com/slow"

    async def watch(self):
        yield [Device("a")]
        print("blocks", flush=True)
        while True:
            time.sleep(1000)

run(Slow())
"""


class Sleeping(DeviceSource):
    resource = "example.com/sleeping"

    async def watch(self):  # type: ignore[no-untyped-def]  # as an author writes it
        time.sleep(30.0)  # noqa: ASYNC251 - that is the mistake
        yield [Device("a")]


def test_served_names_the_line_that_blocks(served: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    """For a `watch` that sleeps without await, `served` raises an error with resource, file and line."""
    with pytest.raises(
        BlockedLoopError, match=r"example.com/sleeping: .*test_blocking\.py:\d+, in watch blocks the who"
    ):
        served(Sleeping(), timeout=25.0)
    assert "has blocked the whole agent for" in caplog.text


class Polling(DeviceSource):
    resource = "example.com/polling"

    async def watch(self):  # type: ignore[no-untyped-def]
        while True:
            yield [Device("a")]
            time.sleep(1.0)  # noqa: ASYNC251


def test_served_names_a_line_that_blocks_for_a_second_again_and_again(served: Callable[..., Served]) -> None:
    """If `watch` blocks the loop for a second again and again, the test fails at its end or before, with the line."""
    where = r"example.com/polling: .*test_blocking\.py:\d+, in watch blocks the whole agent"
    with pytest.raises(BlockedLoopError, match=where):
        served(Polling(), timeout=60.0)


def test_a_blocked_agent_says_so_and_ends_at_the_second_signal(fake_kubelet: FakeKubelet) -> None:
    """`run` logs the line that blocks; the second SIGTERM ends the process."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *fake_kubelet.arguments]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "blocks\n"
        line = next(line for line in process.stderr if "blocked the whole agent for" in line)
        assert "example.com/slow" in line
        assert "in watch" in line
        deadline = time.monotonic() + 20.0
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)  # two signals that arrive at once count as one
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
        assert process.returncode == -signal.SIGTERM
