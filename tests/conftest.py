"""Settings of all tests: hypothesis has no deadline, as a busy machine may be slow."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from deviceplugin import looks

gc.disable()  # no garbage collection until the tests are loaded: loading creates hardly any garbage
settings.register_profile("quick", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=200)  # tox -e explore
settings.load_profile("quick")


@settings(max_examples=2, database=None)
@given(strategies.text(), strategies.lists(strategies.floats(), min_size=200))
def draw(_text: str, _numbers: list[float]) -> None:
    """Draw some values, so that hypothesis writes its caches: a Unicode table, and the constants found in modules."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile the test modules and call `draw` once, so that not each of the processes that start later does it."""
    if sys.dont_write_bytecode:
        return
    tests = Path(__file__).parent
    for path in config.rootpath.glob("tests/**/test_*.py"):
        if not any(path.parent.glob(f"__pycache__/{path.stem}.*-pytest-*.pyc")) and "cluster" not in path.parts:
            importlib.import_module(".".join(path.relative_to(tests.parent).with_suffix("").parts))
    draw()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread modules over the processes of pytest-xdist: some directories' tests mostly wait, others mostly compute."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: 0 if "cluster" in item.path.parts else zlib.crc32(item.path.name.encode()))


def pytest_collection_finish() -> None:
    """Exclude all objects that are loaded now, such as thousands of tests, from later garbage collections."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def a_core_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make event loops wait up to 60 s for brief file accesses: a busy machine is not a slow file system."""
    monkeypatch.setattr(looks, "PROMPT", 60.0)


@pytest.fixture(autouse=True)
def logs_restored() -> Iterator[None]:
    """Restore logging after each test, because commands and agents in this process configure it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    excepthooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    libraries = {name: logging.getLogger(name).level for name in ("asyncio", "grpc", "watchdog", "aiohttp")}
    yield
    sys.excepthook, threading.excepthook, sys.unraisablehook = excepthooks
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, before in libraries.items():
        logging.getLogger(name).setLevel(before)
