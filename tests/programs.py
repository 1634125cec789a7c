"""Programs that tests run in processes of their own; none outlives its test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import build

__all__ = ["ANY_CONFIG", "image_environment", "promtool", "running", "tool"]

promtool = pytest.mark.skipif(
    not shutil.which("promtool") and "CI" not in os.environ, reason="promtool (Debian: prometheus) is not installed"
)
"""Marks a test that runs promtool. Without promtool the test is skipped, except in CI, where it fails."""

ANY_CONFIG = ("--allow-commands", "--allow-host-path=/")
"""Options of `run` with which a config file may name any command and any path of the host."""
DEADLINE = 120.0
"""Seconds after which a program is killed, so that a read of its output ends."""


def tool(program: str) -> pytest.MarkDecorator:
    """Return a mark for a test that runs a program of `build.TOOLS`: skip it outside CI if the program is missing."""
    there = (build.cache_directory() / f"{program}-{build.TOOLS[program].version}").exists()
    return pytest.mark.skipif(
        not there and "CI" not in os.environ, reason=f"`python -m tests.cluster.build {program}` builds {program}"
    )


def image_environment() -> dict[str, str]:
    """Return the environment variables that examples/Dockerfile sets for an agent in its image."""
    text = Path(__file__).parents[1].joinpath("examples", "Dockerfile").read_text()
    (line,) = set(re.findall(r"^ENV (PYTHONOPTIMIZE.+)$", text, re.MULTILINE))
    return dict(variable.split("=", 1) for variable in line.split())


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block at the latest.

    The program handles SIGINT even if the tests run in the background of a shell without job control, whose children
    ignore SIGINT.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=env)
    finally:
        signal.signal(signal.SIGINT, before)
    late = threading.Timer(DEADLINE, process.kill)
    late.daemon = True
    late.start()
    with process:
        try:
            yield process
        finally:
            late.cancel()
            process.kill()
