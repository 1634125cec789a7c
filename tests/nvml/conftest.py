"""Fixtures: the fake NVML library, compiled once, and new GPUs for each test."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deviceplugin.device import Device
from tests.nvml.gpus import FakeGpus, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    made = FakeGpus(tmp_path / "gpus", library)
    monkeypatch.setenv("FAKE_NVML", str(made.state))
    unload()
    yield made
    made.state.unlink(missing_ok=True)  # calls that hang go on
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(10)
            assert not thread.is_alive()
    unload()
    # A library that stays loaded would keep its counts of calls for later tests.
    assert str(library) not in Path("/proc/self/maps").read_text()


def unload() -> None:
    """Unload the fake NVML library with all of its state."""
    import pynvml  # type: ignore[import-untyped]

    from deviceplugin.sources.nvidia.nvml import unload as unload_library

    if pynvml.nvmlLib is not None:
        unload_library(pynvml)


Until = Callable[[AsyncIterator[Sequence[Device]], Callable[[dict[str, Device]], object]], Awaitable[dict[str, Device]]]


@pytest.fixture
def until() -> Until:
    """Return a function that waits for a source's device list that fits a condition, and returns the devices by id."""
    import asyncio

    async def take(
        lists: AsyncIterator[Sequence[Device]], wanted: Callable[[dict[str, Device]], object]
    ) -> dict[str, Device]:
        seen: dict[str, Device] = {}
        try:
            async with asyncio.timeout(20):
                async for devices in lists:
                    seen = {device.id: device for device in devices}
                    if wanted(seen):
                        return seen
        except TimeoutError:
            raise AssertionError(f"not in time; the last list is {seen}") from None
        raise AssertionError(f"the lists ended with {seen}")

    return take
