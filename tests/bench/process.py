"""Runs a Python program as a child process, and measures it by /proc."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.programs import image_environment


class Process:
    """A child process, measured by /proc. Python runs with the environment variables of the agent's image."""

    def __init__(self, *command: str) -> None:
        self.began = time.monotonic()
        environment = {**os.environ, **image_environment()}
        self.child = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, env=environment)

    def _status(self, key: str) -> int:
        for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
        raise KeyError(key)

    @property
    def resident(self) -> float:
        """The present resident memory in bytes."""
        return self._status("VmRSS") * 1024.0

    @property
    def highest(self) -> float:
        """The peak resident memory in bytes."""
        return self._status("VmHWM") * 1024.0

    @property
    def cpu(self) -> float:
        """The CPU seconds that the process has used so far."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def threads(self) -> int:
        """The present number of threads."""
        return self._status("Threads")

    @property
    def descriptors(self) -> int:
        """The present number of open files."""
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))

    def settled(self) -> float:
        """Wait until the resident memory is constant for 0.5 s; return it. Raises TimeoutError after a minute."""
        before, until = -1.0, time.monotonic() + 60
        while (now := self.resident) != before:
            if time.monotonic() > until:
                raise TimeoutError(f"the memory of process {self.child.pid} still grows: {now}")
            before = now
            time.sleep(0.5)
        return now

    def end(self) -> None:
        """End the process. If it has ended by itself before, print its standard error."""
        said = b""
        if self.child.poll() is not None and self.child.stderr is not None:
            said = self.child.stderr.read()
        self.child.terminate()
        self.child.communicate(timeout=20)
        if said:
            print(said.decode(), file=sys.stderr)


@contextlib.contextmanager
def process(*command: str) -> Iterator[Process]:
    """Run a child process while the context is active."""
    child = Process(*command)
    try:
        yield child
    finally:
        child.end()
