"""Crashes, a full disk and a failing fsync at every durable step of the agent's work."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.source import DeviceSource
from tests.model.flow import Flow, Outside, Plain, Source, aftermath, replayed, story, watching

pytestmark = pytest.mark.explore

EVERY = 1 if os.environ.get("DEVICEPLUGIN_MODEL") == "long" else 3
"""Crashes and failures are tried at every step (1) or at every third step (3)."""
SOURCES: dict[str, type[DeviceSource]] = {"plain": Plain, "hooked": Source}


@pytest.fixture
def memory() -> Iterator[Path]:
    """Make a directory in memory, where thousands of commits are fast."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as made:
        yield Path(made)


async def live(directory: Path, kind: str, die_at: int) -> None:
    """Run `story` and kill the process at the given step; each grant, end and allocation is recorded at once."""
    count = 0

    def step(_name: str) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    outside = Outside()

    def record(word: str, name: str) -> None:
        outside.record(word, name)
        os.write(1, f"{word} {name}\n".encode())

    with watching(step, str(directory)):
        flow = await Flow.begin(directory, outside, SOURCES[kind](), step)
        await story(flow, record)
        await flow.end()


def kill_everywhere(directory: str, kind: str) -> None:
    """For each step, fork a child that dies at this step. The calling process must have no threads."""
    for die_at in range(1, 2000, EVERY):
        home = Path(directory, str(die_at))
        home.mkdir()
        child = os.fork()
        if not child:
            status = 1
            try:
                recorded = os.open(home / "recorded", os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(recorded, 1)
                asyncio.run(live(home, kind, die_at))
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(die_at, status, flush=True)
        if status != -signal.SIGKILL:
            return


@pytest.mark.parametrize("kind", SOURCES)
def test_a_kill_at_any_step_gives_nothing_twice_and_loses_nothing(memory: Path, kind: str) -> None:
    """After a kill at any step no device gets two holders, and all devices can move between limits and claims."""
    script = f"from tests.model.test_crash_points import kill_everywhere; kill_everywhere({str(memory)!r}, {kind!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert lines[-1][1] == 0, done.stderr
    assert len(lines) > 90 // EVERY
    print(f"{kind}: {len(lines) - 1} places to die")
    for die_at, _ in lines:
        home = memory / str(die_at)
        outside = replayed((home / "recorded").read_text().splitlines())
        try:
            asyncio.run(aftermath(home, outside, SOURCES[kind]()))
        except Exception as error:
            raise AssertionError(f"died at step {die_at}: {error}") from error


class Failing:
    """A database connection on a `Disk`. A failing statement has no effect, except if the disk is `late`."""

    def __init__(self, path: str, disk: Disk) -> None:
        self._inner = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._disk = disk

    def execute(self, sql: str, *args: Any) -> Any:
        writes = sql.startswith(("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT"))
        fails = writes and self._disk.fails()
        if fails and not self._disk.late:
            raise self._disk.error()
        answer = self._inner.execute(sql, *args)
        if fails:
            raise self._disk.error()
        return answer

    def close(self) -> None:
        self._inner.close()


class Disk:
    """A disk on which `times` steps fail from step `at` on. late: a failing step takes effect, as before an fsync."""

    def __init__(self, at: int, times: int, *, late: bool) -> None:
        self.at, self.times, self.late = at, times, late
        self.count = 0

    def fails(self) -> bool:
        self.count += 1
        return self.at <= self.count < self.at + self.times

    def error(self) -> sqlite3.OperationalError:
        error = sqlite3.OperationalError("database or disk is full" if not self.late else "disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR if self.late else sqlite3.SQLITE_FULL
        return error

    def step(self, name: str) -> None:
        """Raise OSError if this step, a change of a CDI file, is one that fails."""
        if name in {"draft", "half a draft", "rename", "remove"} and self.fails():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def suffer(home: Path, disk: Disk) -> bool:
    """Run `story` on this disk, then start the agent again on a good one. Return whether a step failed."""
    outside = Outside()

    def step(name: str) -> None:
        if not name.startswith(("slice", "open", "create")):
            disk.step(name)

    with watching(step, str(home)):
        flow = await Flow.begin(home, outside, Source(), step, connect=lambda path: Failing(path, disk))
        await story(flow, outside.record)
        await flow.end()
    await aftermath(home, outside, Source())
    return disk.count >= disk.at


@pytest.mark.parametrize(("late", "times"), [(False, 1), (False, 4), (True, 1), (True, 2)])
def test_a_full_disk_or_a_failing_fsync_at_any_step_gives_nothing_twice_and_loses_nothing(
    memory: Path, late: bool, times: int
) -> None:
    """After failing writes at any step, no device has two holders or is lost, even if a failed write took effect."""
    first = 6  # the steps before the sixth make the database file
    for at in range(first, 2000, EVERY):
        home = memory / str(at)
        home.mkdir()
        try:
            failed = asyncio.run(suffer(home, Disk(at, times, late=late)))
        except Exception as error:
            raise AssertionError(f"failed at statement {at}: {error}") from error
        if not failed:
            break
    print(f"{'fsync fails' if late else 'disk full'} {times} times in a row: {(at - first) // EVERY} places")
    assert at > 60
