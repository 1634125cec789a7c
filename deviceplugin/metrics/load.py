"""Measures the load of devices: calls the hook `measure` of sources in the background, and keeps the results.

No scrape waits for hardware. A value that could not be read recently is missing in the metrics: it is not replaced by
zero or by an earlier value.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from deviceplugin import hooks
from deviceplugin.device import Device
from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
STALE: Final = 2.5  # Number of periods after which a measurement is too old.
TICK: Final = 0.5  # Maximum seconds between two checks for sources whose devices must be measured now.


class Quantity(NamedTuple):
    """A quantity in the result of a source's hook `measure`. about: the help text of the quantity's metric.

    label: "" for a quantity with one number. For a quantity with several numbers, the metric's label; `measure` returns
    a mapping from values of this label to the numbers.
    """

    about: str
    label: str = ""


QUANTITIES: Final[Mapping[str, Quantity]] = {
    "utilization_ratio": Quantity("Share of time in which the device was at work"),
    "memory_utilization_ratio": Quantity("Share of time in which the device's memory was read or written"),
    "encoder_utilization_ratio": Quantity("Share of time in which the video encoder was at work"),
    "decoder_utilization_ratio": Quantity("Share of time in which the video decoder was at work"),
    "memory_used_bytes": Quantity("The device's own memory in use"),
    "memory_total_bytes": Quantity("The device's own memory, all of it"),
    "temperature_celsius": Quantity("Temperature, by sensor where there are several", "sensor"),
    "power_watts": Quantity("Power drawn now"),
    "power_limit_watts": Quantity("Power above which the device slows itself down"),
    "energy_joules_total": Quantity("Energy used since the driver was loaded"),
    "clock_hertz": Quantity("Clock frequency now, by what it drives (graphics, sm, memory, video)", "clock"),
    "throttled": Quantity("1 while the device slows itself down for this reason", "reason"),
    "ecc_errors_total": Quantity("Memory errors found, by kind (corrected, uncorrected)", "kind"),
    "xid_errors_total": Quantity("Errors that the driver reported, by XID code", "code"),
    "pcie_bytes_per_second": Quantity("PCIe throughput now, by direction (receive, transmit)", "direction"),
    "pcie_replays_total": Quantity("PCIe packets sent again"),
    "nvlink_bytes_total": Quantity("Bytes over NVLink, by direction (receive, transmit)", "direction"),
    "fan_ratio": Quantity("Fan speed as a share of its highest"),
}
"""The usual quantities of sources. The key is the name of the quantity's metric, without `deviceplugin_device_`. Names
of counters end with `_total`. A source may have further quantities."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
TAKEN: Final = frozenset({"health", "held_twice", "holders", "replicas", "state", "state_since_timestamp_seconds"})
"""Names that a source must not use for a quantity, because metrics `deviceplugin_device_<name>` with another meaning
exist."""

Value = float | dict[str, float]  # A measured value: one number, or a number for each value of the quantity's label.
Reading = Mapping[str, Mapping[str, Value]]
"""The result of one call of `measure`: for each device id and quantity, the value."""


class MeasureError(Exception):
    """Raised when the result of `measure` does not map device ids to mappings from quantities to numbers."""


def checked(measured: object, devices: Sequence[Device]) -> Reading:
    """Return the values of these devices from the result of `measure`, without None and infinite values.

    Raises MeasureError if the result does not map device ids to mappings from quantities to numbers.
    """
    if not isinstance(measured, Mapping):
        raise MeasureError(f"it returned {type(measured).__name__}, not {{device id: {{quantity: number}}}}")
    if wrong := [key for key in measured if not isinstance(key, str)]:
        raise MeasureError(f"the keys of its result must be device ids, not {wrong[0]!r}")
    readings: dict[str, Mapping[str, Value]] = {}
    for device in devices:
        quantities = measured.get(device.id)
        if quantities is None:
            continue
        if not isinstance(quantities, Mapping):
            raise MeasureError(
                f"for device {device.id} it returned {type(quantities).__name__}, not {{quantity: number}}"
            )
        values: dict[str, Value] = {}
        for name, value in quantities.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise MeasureError(f"{name!r} cannot be the name of a quantity; write it like temperature_celsius")
            if name.removesuffix("_total") in TAKEN:
                raise MeasureError(f"{name!r} is the name of another metric; use another name, such as own_{name}")
            if f"{name}_total" in quantities:
                raise MeasureError(f"{name!r} is used with and without _total, but one name is one metric")
            if isinstance(value, Mapping):
                numbers = {key: number for key, part in value.items() if (number := _number(name, part)) is not None}
                # A label value must be valid UTF-8, but may be a file name with other bytes.
                parts = {str(key).encode(errors="replace").decode(): figure for key, figure in numbers.items()}
                if parts:
                    values[name] = parts
            elif (number := _number(name, value)) is not None:
                values[name] = number
        readings[device.id] = values
    return readings


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise MeasureError(f"{name} is {value!r}, not a number")
    number = int(value) if isinstance(value, bool) else value
    return number if math.isfinite(number) else None


class Gauge:
    """Measures one source's devices. An instance belongs to one event loop; any thread may read its fields.

    calls, failures, seconds: the number of calls of the hook `measure`, the number of failed calls, and the total
    duration of all calls. error: the reason why no measurement is available now, or "".
    """

    def __init__(self, source: DeviceSource, period: float) -> None:
        self.source = source
        self.calls = 0
        self.failures = 0
        self.seconds = 0.0
        self.error = ""
        self._period = period
        self._reading: tuple[Reading, float] | None = None  # The last measurement, and its time (monotonic seconds).
        # The future of the last call that timed out; done when this call has ended.
        self._hanging: asyncio.Future[Any] | None = None

    @property
    def reading(self) -> Reading | None:
        """The last measurement; None before the first measurement, or if the last one is too old."""
        values, at = self._reading or (None, 0.0)
        return values if time.monotonic() - at <= self._period * STALE else None

    async def take(self, devices: Sequence[Device]) -> None:
        """Call `measure` once and store the result. After a failure, `reading` is None, and `error` has the reason."""
        what = f"measure of {self.source.resource}"
        if self._hanging is not None and not (await asyncio.wait({self._hanging}, timeout=0.0))[0]:
            # The earlier call hangs, and occupies a thread. A second call would hang too, in a further thread.
            self._failed(f"{what} still hangs")
            return
        self._hanging = None
        if not devices:
            self._reading, self.error = None, ""
            return
        self.calls += 1
        began = time.perf_counter()
        timeout = min(self.source.hook_timeout, max(self._period, 1.0))
        try:
            measured = await hooks.call(what, self.source.measure, devices, timeout=timeout)
            self._reading = checked(measured, devices), time.monotonic()
        except MeasureError as error:
            self._failed(f"{what}: {error}")
        except hooks.HookError as error:
            if isinstance(error, hooks.HookTimeoutError):
                self._hanging = error.work
            self._failed(str(error))
        else:
            if self.error:
                _LOG.info("%s works again", what)
            self.error = ""
        finally:
            self.seconds += time.perf_counter() - began

    def _failed(self, error: str) -> None:
        self.failures += 1
        self._reading = None
        if error != self.error:
            _LOG.warning("%s; the load of the source's devices is not shown", error)
        self.error = error


async def measure_for_ever(gauges: Callable[[], Sequence[tuple[Gauge, Sequence[Device]]]], period: float) -> None:
    """Measure all sources in parallel, once in `period` seconds. The first measurement needs a list with devices."""
    loop = asyncio.get_running_loop()
    running: dict[Gauge, asyncio.Task[None]] = {}
    due: dict[Gauge, float] = {}
    try:
        while True:
            now, asked = loop.time(), gauges()
            due = {gauge: due.get(gauge, now) for gauge, _ in asked}
            running = {gauge: task for gauge, task in running.items() if not task.done()}
            for gauge, devices in asked:
                if due[gauge] <= now and gauge not in running and (devices or gauge.reading is not None):
                    due[gauge] = max(due[gauge] + period, now)
                    running[gauge] = asyncio.create_task(gauge.take(devices), name=f"measure {gauge.source.resource}")
            await asyncio.sleep(min(period, TICK))
    finally:
        for task in running.values():
            task.cancel()
