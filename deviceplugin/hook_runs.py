"""Runs the hooks that change devices (reset, prepare, unprepare, released), one at a time for each device.

A grant of a device waits until the device's running hooks have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey, titled
from deviceplugin.hooks import HookError, HookStatistics
from deviceplugin.identity import Tokens
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)

CANCELLED: Final = 1.0
"""Seconds that a hook's coroutine has to end after its cancellation. After that, the hook counts as a holder of its
devices until it ends."""


class DeviceBusyError(HookError):
    """Raised if a hook still runs for a device, so that no other hook can run. The message names hook and device."""


@dataclass(eq=False, slots=True)
class HookRun:
    """One call of a hook.

    tokens: for each device, its identity tokens when the hook began (later, the device's id may stand for other
    hardware). over: a future that is done when the hook has ended or is overdue. left: whether the hook still runs
    although its caller has stopped waiting. overdue: whether the hook still runs after its timeout, and so counts as a
    holder of its devices.
    """

    hook: str
    tokens: Mapping[DeviceKey, Tokens]
    over: asyncio.Future[None]
    left: bool = False
    overdue: bool = False

    @property
    def reason(self) -> str:
        """The reason why the hook's devices cannot be granted, for messages."""
        return f"`{self.hook}` is still running on it" + (", after its timeout" if self.overdue else "")


class HookDevices(Protocol):
    """The methods of `deviceplugin.register.register.Register` that this module calls."""

    def with_peers(self, keys: Iterable[DeviceKey]) -> set[DeviceKey]:
        """Return these devices, all devices that have hardware in common with any of these, their parts and wholes."""

    def tokens(self, key: DeviceKey) -> Tokens:
        """Return a device's present identity tokens (`deviceplugin.identity`)."""

    def notify(self) -> None:
        """Notify subscribers that a hook has become a holder of its devices, or has ended."""


class HookRuns:
    """The running hooks that change devices, for pods and claims: reset, prepare, unprepare, released.

    Hooks on the same hardware run one by one, in the order of their calls. A hook that still runs after its timeout, or
    after its caller was cancelled, counts as a holder of its devices until the hook ends. Hooks run in this process, so
    no hook continues after the end of the process.
    """

    def __init__(self, devices: HookDevices) -> None:
        self._devices = devices
        self.running: list[HookRun] = []
        """The running hooks, in the order in which they were called."""

    @property
    def overdue(self) -> Mapping[DeviceKey, str]:
        """For each device that an overdue hook holds, the reason as text."""
        return {key: run.reason for run in self.running if run.overdue for key in run.tokens}

    @property
    def held(self) -> Mapping[DeviceKey, Tokens]:
        """For each device that an overdue hook holds, the device's identity tokens when the hook began."""
        return {key: tokens for run in self.running if run.overdue for key, tokens in run.tokens.items()}

    async def call(
        self, statistics: HookStatistics, hook: str, source: DeviceSource, devices: Sequence[Device], *more: object
    ) -> Any:
        """Wait until earlier hooks of the devices have ended, then call a hook; return its result.

        The hook has its source's timeout. Raises HookError if the hook failed. Raises DeviceBusyError if an earlier
        hook still runs after its own timeout, or after this call has waited for this hook's timeout.
        """
        run = self._begin(hook, source, devices)
        return await self._call(run, statistics, source, devices, *more, patience=source.hook_timeout)

    def start(
        self,
        statistics: HookStatistics,
        hook: str,
        source: DeviceSource,
        devices: Sequence[Device],
        ended: Callable[[str], None] = lambda error: None,
    ) -> asyncio.Task[str]:
        """Call a hook in a background task. The task returns the hook's error as text, "" if the hook succeeded.

        The method `wait` also waits for the end of this hook. ended: a function that is called with the task's result
        before such calls of `wait` return.
        """
        run = self._begin(hook, source, devices)

        async def work() -> str:
            why = ""
            try:
                await self._call(run, statistics, source, devices, patience=None)
            except HookError as error:
                why = str(error)
            ended(why)
            return why

        return asyncio.create_task(work())

    async def wait(self, keys: Iterable[DeviceKey], *, resets: bool = True) -> None:
        """Wait until no hook runs for these devices, their peers, parts or wholes (`HardwareIndex.touching`).

        Raises DeviceBusyError if a hook still runs after its timeout.

        resets: whether to wait for calls of the hook `reset` too; False for a caller that itself calls `reset`.
        """
        devices = {key: self._devices.tokens(key) for key in keys}
        while await self._wait(devices, [run for run in self.running if resets or run.overdue or run.hook != "reset"]):
            pass  # The check is repeated, because another hook may have begun during the wait.

    def _begin(self, hook: str, source: DeviceSource, devices: Iterable[Device]) -> HookRun:
        keys = ((source.resource, device.id) for device in devices)
        run = HookRun(
            hook, {key: self._devices.tokens(key) for key in keys}, asyncio.get_running_loop().create_future()
        )
        self.running.append(run)
        return run

    async def _call(
        self,
        run: HookRun,
        statistics: HookStatistics,
        source: DeviceSource,
        devices: Sequence[Device],
        *more: object,
        patience: float | None,
    ) -> Any:
        try:
            await self._wait(run.tokens, self.running[: self.running.index(run)], patience)
            method, left = getattr(source, run.hook), partial(self._leave, run)
            return await statistics.call(run.hook, source, method, devices, *more, left=left)
        finally:
            if not run.left:
                self._end(run)

    async def _wait(
        self, devices: Mapping[DeviceKey, Tokens], runs: Sequence[HookRun], patience: float | None = None
    ) -> bool:
        """Wait until those of `runs` that use the hardware of these devices have ended; return whether there was one.

        Raises DeviceBusyError if such a hook is overdue, or still runs after `patience` seconds.
        """
        wanted = self._devices.with_peers(devices) if runs else set()
        tokens = frozenset[str]().union(*devices.values())

        def works_on_them(run: HookRun) -> bool:
            return not (wanted.isdisjoint(run.tokens) and all(map(tokens.isdisjoint, run.tokens.values())))

        if runs := [run for run in runs if works_on_them(run)]:
            await asyncio.wait({run.over for run in runs}, timeout=patience)
            for run in runs:
                if run.overdue or not run.over.done():
                    raise DeviceBusyError(f"{titled(min(run.tokens.keys() & wanted or run.tokens))}: {run.reason}")
        return bool(runs)

    def _leave(self, run: HookRun, work: asyncio.Future[Any]) -> None:
        """Treat a hook as a holder of its devices until it ends; a coroutine first has CANCELLED seconds to end."""
        run.left = True
        work.add_done_callback(lambda _: self._end(run))
        if isinstance(work, asyncio.Task):
            asyncio.get_running_loop().call_later(CANCELLED, self._hold, run)
        else:
            self._hold(run)

    def _hold(self, run: HookRun) -> None:
        if not run.over.done():
            run.overdue = True
            run.over.set_result(None)
            self._devices.notify()

    def _end(self, run: HookRun) -> None:
        self.running.remove(run)
        if not run.overdue:
            run.over.set_result(None)
            return
        run.overdue = False
        _LOG.info("`%s` has ended, after its timeout: %s", run.hook, ", ".join(map(titled, sorted(run.tokens))))
        self._devices.notify()
