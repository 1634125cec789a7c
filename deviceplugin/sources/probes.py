"""The health of a resource's devices by the probe that its config names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from deviceplugin import health
from deviceplugin.config.types import CommandProbeConfig, HealthConfig
from deviceplugin.device import Device

_LOG: Final = logging.getLogger(__name__)
FIRST_PROBE: Final = 2.0
"""Seconds that a device's first probe is waited for; if it takes longer, its health is unknown until then."""
OPEN_TIMEOUT: Final = 5.0
"""Seconds in which a device's nodes must open."""


class ProbedHealth:
    """Probes one resource's devices and judges their health; `config.probe` is "open" or a command."""

    def __init__(self, resource: str, config: HealthConfig) -> None:
        self._resource = resource
        self._period = config.period
        self._rules = health.Rules(config.failures, config.successes)
        probe: Callable[[Device], health.Finding] = health.open_probe
        timeout = OPEN_TIMEOUT
        if isinstance(config.probe, CommandProbeConfig):
            probe = health.command_probe(config.probe.command, config.probe.timeout)
            timeout = config.probe.timeout + 5.0  # the command's own limit comes first, and its message says more
        self._prober = health.Prober(probe, timeout=timeout)
        self._histories: dict[str, health.HealthHistory] = {}
        self._begun: set[str] = set()
        """Devices whose first probe was begun."""
        self._pending: set[str] = set()
        """Devices whose first probe has not ended."""

    async def probe_new(self, devices: Sequence[Device], changed: asyncio.Event, tasks: set[asyncio.Task[Any]]) -> None:
        """Probe the devices that were not there before, and forget those that are gone.

        If that takes longer than FIRST_PROBE, it goes on among `tasks` and sets `changed` at its end.
        """
        self._histories = {device.id: self._histories.get(device.id, health.HealthHistory()) for device in devices}
        self._begun &= self._histories.keys()
        new = [device for device in devices if device.id not in self._begun | self._pending]
        if not new:
            return
        names = {device.id for device in new}
        self._begun |= names
        self._pending |= names
        first = asyncio.create_task(self._probe(new))
        tasks.add(first)
        first.add_done_callback(tasks.discard)
        first.add_done_callback(lambda _: self._pending.difference_update(names))
        done, _ = await asyncio.wait({first}, timeout=FIRST_PROBE)
        if not done:
            first.add_done_callback(lambda _: changed.set())

    def judged(self, device: Device) -> Device:
        """Return a device with the worse of its own health and that by its probes."""
        history = self._histories[device.id]
        return device.with_health(*health.worst((device.health, device.message), (history.health, history.message)))

    async def run(self, devices: Callable[[], Sequence[Device]], changed: asyncio.Event) -> None:
        """Probe the current devices every period; set `changed` when the health of one changes."""
        while True:
            await asyncio.sleep(self._period)
            if await self._probe([device for device in devices() if device.id not in self._pending]):
                changed.set()

    async def _probe(self, devices: Sequence[Device]) -> bool:
        """Probe devices once; return whether the health or message of one changed."""
        found = await self._prober.check(devices)
        now, changed = time.monotonic(), False
        for name, (verdict, message) in found.items():
            before = self._histories.get(name)
            if before is None:
                continue  # gone meanwhile
            after = self._histories[name] = before.checked(verdict, message, now, self._rules)
            if (before.health, before.message) != (after.health, after.message):
                changed = True
                level = logging.INFO if after.health.usable else logging.WARNING
                why = f": {message}" if message else ""
                _LOG.log(level, "%s: %s is %s%s", self._resource, name, after.health.value, why)
        return changed
