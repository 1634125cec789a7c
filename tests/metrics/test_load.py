"""The load of devices: measured in the background, and dropped when old."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deviceplugin.device import Device
from deviceplugin.metrics import load
from deviceplugin.metrics.load import QUANTITIES, Gauge, MeasureError, checked, measure_for_ever
from deviceplugin.source import DeviceSource, Measured

DEVICES = [Device("a"), Device("b")]


class Plain(DeviceSource):
    resource = "example.com/gpu"
    hook_timeout = 5.0

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def measure(self, devices: Sequence[Device]) -> Measured:
        answer: Measured = self.answer()
        return answer


class Coroutine(Plain):
    async def measure(self, devices: Sequence[Device]) -> Measured:  # type: ignore[override]
        answer: Measured = await self.answer()
        return answer


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class TestChecked:
    """Which results of `measure` are valid."""

    def test_numbers_by_device_and_quantity_are_taken(self) -> None:
        """Numbers and booleans, for a whole device or by parts of a quantity, are kept as numbers."""
        said = {"a": {"utilization_ratio": 0.5, "throttled": {"power": True}}, "b": {"own_total": 3}}
        assert checked(said, DEVICES) == {
            "a": {"utilization_ratio": 0.5, "throttled": {"power": 1}},
            "b": {"own_total": 3},
        }

    def test_what_a_device_cannot_tell_is_absent(self) -> None:
        """None and NaN give no value, not 0; a device without a result has no load."""
        said = {"a": {"power_watts": None, "fan_ratio": float("nan"), "clock_hertz": {"sm": None}}, "b": None}
        assert checked(said, DEVICES) == {"a": {}}

    def test_devices_that_were_not_asked_for_are_left_out(self) -> None:
        """Results for a device that `measure` was not asked for are dropped."""
        assert checked({"gone": {"power_watts": 1}}, DEVICES) == {}

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (None, "NoneType"),
            ([1], "list"),
            ({"a": 3}, "for device a it returned int"),
            ({DEVICES[0]: {"power": 1}}, r"the keys of its result must be device ids, not Device\("),
            ({"a": {"power": "much"}}, "'much'"),
            ({"a": {"GPU Util": 1}}, "temperature_celsius"),
            ({"a": {3: 1}}, "3 cannot be"),
            ({"a": {"health": 1}}, "'health' is the name of another metric"),
            ({"a": {"state_total": 1}}, "'state_total' is the name of another metric"),
            ({"a": {"jobs_total": 1, "jobs": 1}}, "'jobs' is used with and without _total"),
        ],
    )
    def test_anything_else_is_an_error_that_says_what(self, said: object, why: str) -> None:
        """Any result of `measure` other than numbers by device and quantity is an error that names the wrong value."""
        with pytest.raises(MeasureError, match=why):
            checked(said, DEVICES)

    def test_known_quantities_are_in_base_units(self) -> None:
        """The names of known quantities end with a base unit or a count; `throttled` is the exception."""
        units = ("ratio", "bytes", "celsius", "watts", "hertz", "total", "second")
        assert [name for name in QUANTITIES if not name.endswith(units)] == ["throttled"]


class TestGauge:
    """One source, measured several times."""

    async def test_both_kinds_of_hook_are_measured(self) -> None:
        """`measure` may be a plain function or a coroutine function."""

        async def answer() -> Mapping[str, Any]:
            return {"a": {"power_watts": 2}}

        for source in (Plain(lambda: {"a": {"power_watts": 2}}), Coroutine(answer)):
            assert Gauge(source, 10).reading is None
            gauge = Gauge(source, 10)
            await gauge.take(DEVICES)
            assert gauge.reading is not None
            assert gauge.reading == {"a": {"power_watts": 2}}
            assert (gauge.calls, gauge.failures, gauge.error) == (1, 0, "")

    async def test_an_error_takes_the_values_away_and_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """After an exception or a wrong result there is no load, and the error is logged once."""
        answers: Iterator[object] = iter(
            [{"a": {"power_watts": 2}}, ValueError("no driver"), ValueError("no driver"), 7]
        )

        def answer() -> object:
            one = next(answers)
            if isinstance(one, Exception):
                raise one
            return one

        gauge = Gauge(Plain(answer), 10)
        await gauge.take(DEVICES)
        for _ in range(2):
            await gauge.take(DEVICES)
            assert gauge.reading is None
        assert "no driver" in gauge.error
        assert len(caplog.records) == 1
        await gauge.take(DEVICES)
        assert "int" in gauge.error
        assert gauge.failures == 3

    async def test_what_works_again_is_shown_again(self, caplog: pytest.LogCaptureFixture) -> None:
        """After an error the next valid result counts, and the log says so."""
        caplog.set_level(logging.INFO)
        answers = iter([{}, 3, {"a": {"fan_ratio": 1}}])
        gauge = Gauge(Plain(lambda: next(answers)), 10)
        for _ in range(3):
            await gauge.take(DEVICES)
        assert gauge.reading is not None
        assert gauge.error == ""
        assert "works again" in caplog.text

    async def test_a_hanging_hook_is_not_called_again(self, released: threading.Event) -> None:
        """A `measure` that hangs is not called again before it has ended."""
        calls = 0

        def answer() -> Measured:
            nonlocal calls
            calls += 1
            if calls == 1:
                released.wait()
            return {"a": {"fan_ratio": 0.5}}

        source = Plain(answer)
        source.hook_timeout = 0.01
        gauge = Gauge(source, 10)
        await gauge.take(DEVICES)
        assert "0.01 s" in gauge.error
        await gauge.take(DEVICES)
        await gauge.take(DEVICES)
        assert calls == 1
        assert "still hangs" in gauge.error
        released.set()
        async with asyncio.timeout(5):
            while gauge.reading is None:
                source.hook_timeout = 5
                await gauge.take(DEVICES)
        assert calls == 2

    async def test_a_reading_grows_old_and_disappears(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reading that is older than 2.5 periods is dropped."""
        now = 1000.0
        monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
        gauge = Gauge(Plain(lambda: {"a": {"fan_ratio": 0.5}}), 10)
        await gauge.take(DEVICES)
        now += 24
        assert gauge.reading is not None
        now += 2
        assert gauge.reading is None

    async def test_without_devices_nothing_is_asked(self) -> None:
        """Without devices `measure` is not called."""
        gauge = Gauge(Plain(lambda: 1 / 0), 10)
        await gauge.take([])
        assert (gauge.calls, gauge.reading, gauge.error) == (0, None, "")


class TestForEver:
    """All sources, measured periodically."""

    async def test_one_that_is_slow_holds_up_no_other(self, released: threading.Event) -> None:
        """A slow source does not delay another source."""
        counts = {"fast": 0}
        enough = asyncio.Event()

        async def quick() -> Measured:
            counts["fast"] += 1
            if counts["fast"] == 3:
                enough.set()
            return {}

        slow = Gauge(Plain(lambda: released.wait() and {}), 0.01)
        gauges = [(slow, DEVICES), (Gauge(Coroutine(quick), 0.01), DEVICES)]
        async with asyncio.timeout(10):
            task = asyncio.create_task(measure_for_ever(lambda: gauges, 0.01))
            await enough.wait()
        assert slow.calls == 1
        task.cancel()

    async def test_devices_that_appear_are_measured_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Devices of the first list are measured at once, without waiting for a period."""
        monkeypatch.setattr(load, "TICK", 0.001)
        asked = asyncio.Event()

        async def quick() -> Measured:
            asked.set()
            return {}

        gauge = Gauge(Coroutine(quick), 3600)
        devices: list[Device] = []
        looks = 0

        def gauges() -> Sequence[tuple[Gauge, Sequence[Device]]]:
            nonlocal looks
            looks += 1
            if looks == 5:
                devices.extend(DEVICES)
            return [(gauge, list(devices))]

        async with asyncio.timeout(10):
            task = asyncio.create_task(measure_for_ever(gauges, 3600))
            await asked.wait()
        task.cancel()

    async def test_ending_it_ends_what_it_started(self) -> None:
        """When the task is cancelled, running measurements end."""
        began, ended = asyncio.Event(), asyncio.Event()

        async def endless() -> Measured:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return {}

        async with asyncio.timeout(10):
            task = asyncio.create_task(measure_for_ever(lambda: [(gauge, DEVICES)], 10))
            gauge = Gauge(Coroutine(endless), 10)
            await began.wait()
            task.cancel()
            await ended.wait()
