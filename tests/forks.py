"""Programs of this repository as processes that are forked: what they import was imported before, once for all tests.

An agent imports for a quarter to half a second of a core, and tests start hundreds of them. The fork server of
`multiprocessing` has imported the same and has one thread: gRPC starts its own in the process that uses it first.
`tests.node.test_agent` and `tests.dra.test_cli` start programs as users do, so do all tests on real nodes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.event_loop import OUTPUT, record_file_operations

__all__ = ["SERVER", "Forked"]

SERVER = multiprocessing.get_context("forkserver")
"""The fork server of Python, of which a process has one."""
SERVER.set_forkserver_preload(
    [
        "deviceplugin.metrics.collectors",
        "deviceplugin.metrics.web",
        "deviceplugin.testing.foreign",
        "dra_bridge.node.process",
        "pytest",
        "tests.scenarios.fake_sides",
    ]
)


class Forked:
    """`python ARGUMENT ...` as `subprocess.Popen` has it, its output appended to a file."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        output.touch()
        self._process = SERVER.Process(
            target=_run, args=(list(arguments), str(output), dict(os.environ), os.getcwd()), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], output: str, environment: Mapping[str, str], directory: str) -> None:
    """Be the program: `-m MODULE [ARGUMENT ...]` or `FILE [ARGUMENT ...]`."""
    gc.freeze()  # pages that no collection touches stay shared
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if where := environment.get(OUTPUT):
        record_file_operations(where)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # or Python warns of running it twice
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
