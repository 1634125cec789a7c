"""Probes devices, and computes their health from the results of probes, with rules against flapping.

The rules (tests compare them with an independent model):

1. Before the first result, a device's health is unknown. The first result alone decides the health.
2. `failures` bad probes in a row make a device unhealthy. Fewer bad probes change nothing.
3. A fault is an event by which a device reports that it is broken. A fault makes the device unhealthy at once.
4. An unhealthy device becomes healthy after `successes` good probes in a row, all at least `quiet` seconds after the
   device's last fault. If `quiet` is None, the device stays unhealthy after a fault.
5. A probe without a result leaves an unhealthy device unhealthy. The health of any other device becomes unknown until
the next probe with a result. A probe without a result neither extends nor ends a row of good or bad probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deviceplugin import hooks
from deviceplugin.device import Device, Health


class Verdict(enum.Enum):
    """The result of one probe of a device."""

    GOOD = "good"
    BAD = "bad"
    UNREADABLE = "unreadable"


ProbeResult = tuple[Verdict, str]
"""A verdict, and the reason for this verdict as text."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """The numbers in the rules of this module. quiet: in seconds; None if a device stays unhealthy after a fault."""

    failures: int = 3
    successes: int = 2
    quiet: float | None = 0.0


@dataclass(frozen=True, slots=True)
class HealthHistory:
    """A device's health by the rules of this module, and the earlier probes and faults on which the rules depend."""

    health: Health = Health.UNKNOWN
    message: str = "not probed yet"
    failures: int = 0
    successes: int = 0
    fault_at: float | None = None
    known: bool = False

    def checked(self, verdict: Verdict, message: str, now: float, rules: HealthRules) -> HealthHistory:
        """Return the history after a probe with this verdict. now: the probe's time (monotonic seconds)."""
        if verdict is Verdict.UNREADABLE:
            return self if self.health is Health.UNHEALTHY else replace(self, health=Health.UNKNOWN, message=message)
        if verdict is Verdict.BAD:
            failures = self.failures + 1
            after = replace(self, failures=failures, successes=0, known=True)
            if self.known and self.health is not Health.UNHEALTHY and failures < rules.failures:
                return after
            return replace(after, health=Health.UNHEALTHY, message=message)
        if self.health is not Health.UNHEALTHY:
            return replace(self, health=Health.HEALTHY, message="", failures=0, known=True)
        if self.fault_at is not None and (rules.quiet is None or now - self.fault_at < rules.quiet):
            return replace(self, failures=0, successes=0)
        successes = self.successes + 1
        if successes < rules.successes:
            return replace(self, failures=0, successes=successes)
        return HealthHistory(Health.HEALTHY, "", known=True)

    def faulted(self, message: str, now: float) -> HealthHistory:
        """Return the history after a fault. now: the fault's time (monotonic seconds)."""
        return replace(self, health=Health.UNHEALTHY, message=message, successes=0, fault_at=now, known=True)


def worst(*findings: tuple[Health, str]) -> tuple[Health, str]:
    """Return the worst of several (health, message) pairs of one device: unhealthy, else unknown, else healthy."""
    order = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)
    return min(findings, key=lambda finding: order.index(finding[0]))


_ABSENT: Final = {errno.ENOENT, errno.ENXIO, errno.ENODEV, errno.EIO, errno.ENOTDIR, errno.ETIMEDOUT}
_TEMPFAIL: Final = 75  # The exit status for "no result" (EX_TEMPFAIL of sysexits.h).
_SHOWN: Final = 200
_KEPT: Final = 4096  # Of a command's output, this number of bytes at the end is kept, to find the last line.


def open_probe(device: Device) -> ProbeResult:
    """Probe whether a device exists: open and close each of its device nodes. Blocks.

    If another process has opened a node exclusively (EBUSY), the result is good. If the agent lacks the permission to
    open a node, the probe has no result.
    """
    for node in device.container_edits.device_nodes:
        flags = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        flags |= os.O_RDWR if {"r", "w"} <= set(node.permissions) else os.O_WRONLY if "w" in node.permissions else 0
        try:
            os.close(os.open(node.host, flags))
        except OSError as error:
            if error.errno == errno.EBUSY:
                continue
            verdict = Verdict.BAD if error.errno in _ABSENT else Verdict.UNREADABLE
            return verdict, f"{node.host} cannot be opened: {error.strerror}"
    for mount in device.container_edits.mounts:
        if not os.path.exists(mount.host):
            return Verdict.BAD, f"{mount.host} is not there"
    return Verdict.GOOD, ""


def command_probe(argv: Sequence[str], timeout: float) -> Callable[[Device], ProbeResult]:
    """Return a probe that runs a command: exit status 0 is good, 75 means no result, any other status is bad.

    argv: the command. In each argument, `{id}` and `{node}` are replaced by the device's id and first device node. The
    command's environment has DEVICE_ID, and DEVICE_NODES with ':' between the paths. timeout: seconds after which all
    processes of the command are killed, and the probe is bad.
    """

    def probe(device: Device) -> ProbeResult:
        nodes = [node.host for node in device.container_edits.device_nodes]
        first = nodes[0] if nodes else ""
        try:
            process = subprocess.Popen(
                [word.replace("{id}", device.id).replace("{node}", first) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DEVICE_ID": device.id, "DEVICE_NODES": ":".join(nodes)},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return Verdict.UNREADABLE, f"{argv[0]} cannot be run: {getattr(error, 'strerror', None) or error}"
        with process:
            try:
                output = _output(process, timeout)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    # The command's process group is killed. A child in a session of its own survives, and the probe
                    # does not wait for it.
                    os.killpg(process.pid, signal.SIGKILL)
                return Verdict.BAD, f"{argv[0]} did not end within {timeout:g} s"
        if process.returncode == 0:
            return Verdict.GOOD, ""
        last = output.decode(errors="replace").strip().rpartition("\n")[2][:_SHOWN]
        why = f"{argv[0]} ended with {process.returncode}" + (f": {last}" if last else "")
        return Verdict.UNREADABLE if process.returncode == _TEMPFAIL else Verdict.BAD, why

    return probe


def _output(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    """Wait for the end of a command; return the last _KEPT bytes of its output.

    Raises TimeoutExpired if the command, or a child process with its output open, still runs after `timeout` seconds.
    """
    assert process.stdout is not None
    deadline, output = time.monotonic() + timeout, b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                process.wait(max(0.0, deadline - time.monotonic()))
                return output
            output = (output + piece)[-_KEPT:]
    raise subprocess.TimeoutExpired(process.args, timeout)


@dataclass(eq=False)
class Prober:
    """Probes devices, at most `at_once` at a time. A hanging probe does not delay the probes of other devices.

    timeout: the maximum seconds for one probe.
    """

    probe: Callable[[Device], ProbeResult]
    timeout: float
    at_once: int = 8
    _deadlines: dict[str, float] = field(default_factory=dict, init=False)
    """For each device with an unfinished probe: the probe's deadline (by the loop's clock). The thread of the probe
    removes the entry."""

    async def check(self, devices: Iterable[Device]) -> dict[str, ProbeResult]:
        """Probe each device once; return, for each device id, the result. Never raises."""
        turn = asyncio.Semaphore(self.at_once)

        async def checked(device: Device) -> tuple[str, ProbeResult]:
            async with turn:
                return device.id, await self._check(device)

        return dict(await asyncio.gather(*map(checked, devices)))

    async def _check(self, device: Device) -> ProbeResult:
        now = asyncio.get_running_loop().time()
        if (deadline := self._deadlines.get(device.id)) is not None:
            # The previous probe still runs because its caller was cancelled. Before its deadline, it has not failed.
            if now < deadline:
                return Verdict.UNREADABLE, "the previous probe has not ended yet"
            return Verdict.BAD, "the probe still hangs"
        hanging = sum(now >= deadline for deadline in tuple(self._deadlines.values()))
        if hanging >= self.at_once:  # Each hanging probe occupies a thread, so their number is limited.
            return Verdict.UNREADABLE, f"not probed: {hanging} probes of other devices hang"
        self._deadlines[device.id] = now + self.timeout

        def run() -> ProbeResult:
            try:
                return self.probe(device)
            finally:
                del self._deadlines[device.id]

        try:
            return await hooks.call(f"the probe of {device.id}", run, timeout=self.timeout)
        except hooks.HookTimeoutError as error:
            if error.work is None:  # No thread was started that would remove the entry.
                del self._deadlines[device.id]
                return Verdict.UNREADABLE, str(error)
            return Verdict.BAD, str(error)
        except hooks.HookError as error:
            return Verdict.UNREADABLE, str(error)
