"""Runs programs of this repository as forked processes, whose modules were imported once for all tests.

The imports of an agent take 0.25 to 0.5 s of CPU time, and tests start hundreds of agents. The fork server of
`multiprocessing` has imported the same modules, and has one thread, because gRPC starts its threads at its first use.
`tests.node.test_agent`, `tests.dra.test_cli` and all tests on real nodes start programs as users do.
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
"""Python's fork server; a process has only one."""
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
    """A process `python ARGUMENT ...` with methods of `subprocess.Popen`; its output is appended to a file."""

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
    """Run the program in this process: `-m MODULE [ARGUMENT ...]` or `FILE [ARGUMENT ...]`."""
    gc.freeze()  # memory pages that the garbage collector does not write to stay shared
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
        sys.modules.pop(arguments[1], None)  # otherwise Python warns that the module is run twice
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
