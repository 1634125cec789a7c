"""Simulated devices: number, NUMA nodes and health."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.device import Device, Health
from deviceplugin.sources.simulated import SimulatedSource

NEVER = 3600.0


def lists(source: SimulatedSource) -> contextlib.aclosing[AsyncGenerator[Sequence[Device]]]:
    return contextlib.aclosing(cast("AsyncGenerator[Sequence[Device]]", source.watch()))


async def following(watch: AsyncGenerator[Sequence[Device]]) -> Sequence[Device]:
    async with asyncio.timeout(10):
        return await anext(watch)


def unhealthy(devices: Sequence[Device]) -> dict[str, str]:
    return {device.id: device.message for device in devices if device.health is Health.UNHEALTHY}


def test_ids_are_numbered() -> None:
    """Devices are numbered from 0, healthy and without a NUMA node."""
    devices = SimulatedSource(3).devices
    assert [device.id for device in devices] == ["sim-0", "sim-1", "sim-2"]
    assert {(device.health, device.numa) for device in devices} == {(Health.HEALTHY, None)}


@given(st.integers(1, 200), st.integers(1, 16))
def test_numa_nodes_get_blocks(count: int, numa: int) -> None:
    """NUMA nodes get consecutive devices, in numbers that differ by at most one."""
    nodes = [device.numa_nodes[0] for device in SimulatedSource(count, numa=numa).devices]
    assert nodes == sorted(nodes)
    sizes = [nodes.count(node) for node in range(numa)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


async def test_health_is_set_from_any_thread() -> None:
    """A device's health, set in another thread, is listed at once with its message."""
    source = SimulatedSource(2)
    async with lists(source) as watch:
        assert unhealthy(await following(watch)) == {}
        thread = threading.Thread(target=source.set_health, args=("sim-1", Health.UNHEALTHY, "too hot"))
        thread.start()
        assert unhealthy(await following(watch)) == {"sim-1": "too hot"}
        source.set_health("sim-1", Health.HEALTHY)
        assert unhealthy(await following(watch)) == {}
        thread.join()


async def test_devices_come_and_go() -> None:
    """Devices that are added or removed change the list at once."""
    source = SimulatedSource(1)
    async with lists(source) as watch:
        await following(watch)
        source.add(Device("extra", numa=3))
        assert [device.id for device in await following(watch)] == ["sim-0", "extra"]
        source.remove("sim-0")
        assert [device.id for device in await following(watch)] == ["extra"]
        source.add("sim-0")
        assert [device.id for device in await following(watch)] == ["extra", "sim-0"]


def test_unknown_device_is_a_mistake() -> None:
    """Setting the health of an unknown device, or removing it, is a KeyError."""
    with pytest.raises(KeyError):
        SimulatedSource(1).set_health("sim-1", Health.UNHEALTHY)
    with pytest.raises(KeyError):
        SimulatedSource(1).remove("sim-1")


async def test_two_watchers_hear_the_same() -> None:
    """Two watches of one source get every change."""
    source = SimulatedSource(1)
    async with lists(source) as one, lists(source) as other:
        await following(one)
        await following(other)
        source.add("x")
        assert len(await following(one)) == len(await following(other)) == 2


async def test_changes_after_the_end_are_no_matter() -> None:
    """A source whose watch has ended can still be changed."""
    source = SimulatedSource(1)
    async with lists(source) as watch:
        await following(watch)
    source.add("x")
    assert len(source.devices) == 2


async def test_file_names_the_unhealthy(tmp_path: Path) -> None:
    """Devices named in a watched file are unhealthy, with or without a reason, until the file is removed."""
    file = tmp_path / "unhealthy"
    async with lists(SimulatedSource(3, unhealthy_file=str(file), rescan=NEVER)) as watch:
        assert unhealthy(await following(watch)) == {}
        file.write_text("# broken ones\n\nsim-1\nsim-2  fell off the bus\n")
        devices = await following(watch)
        while len(unhealthy(devices)) < 2:  # the file may be read half written
            devices = await following(watch)
        assert unhealthy(devices) == {"sim-1": f"named in {file}", "sim-2": "fell off the bus"}
        file.unlink()
        assert unhealthy(await following(watch)) == {}


async def test_file_in_a_directory_to_come(tmp_path: Path) -> None:
    """The watched file's directory may be created later."""
    file = tmp_path / "later" / "unhealthy"
    async with lists(SimulatedSource(1, unhealthy_file=str(file), rescan=NEVER)) as watch:
        await following(watch)
        new = tmp_path / "new"
        new.mkdir()
        (new / "unhealthy").write_text("sim-0\n")
        new.rename(tmp_path / "later")
        assert unhealthy(await following(watch)) == {"sim-0": f"named in {file}"}


def test_unreadable_file_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the file cannot be read, the health stays, and that is logged once."""
    file = tmp_path / "unhealthy"
    file.write_text("sim-0\n")
    source = SimulatedSource(1, unhealthy_file=str(file))
    source.read(str(file))
    file.unlink()
    file.mkdir()
    source.read(str(file))
    source.read(str(file))
    assert unhealthy(source.devices) == {"sim-0": f"named in {file}"}
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text


def test_unknown_names_in_the_file_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unknown names in the file are logged once."""
    file = tmp_path / "unhealthy"
    file.write_text("sim-7\n")
    source = SimulatedSource(1, unhealthy_file=str(file))
    source.read(str(file))
    source.read(str(file))
    assert unhealthy(source.devices) == {}
    assert [record.message for record in caplog.records] == [f"{file} names devices that do not exist: sim-7"]
