"""The node of the tests: one machine for all of them, since it boots for minutes where there is no KVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import isolate
from tests.vm.machine import LIMIT, accelerated
from tests.vm.node import DRIVER, FPGAS, MachineCluster

DEVICES = 4
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each test take hours: what it waits for has a limit."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(3 * 3600))


def pytest_report_header() -> str:
    """Say what the machine runs on."""
    return f"the virtual machine runs {'on KVM' if accelerated() else 'in software'}"


@pytest.fixture(scope="session")
def node() -> Iterator[MachineCluster]:
    """A node whose agent is a unit, with devices for both sides."""
    if not isolate.inside():
        pytest.fail("run this by `tox -e vm`, or with `python -m tests.cluster.isolate` before it")
    cluster = MachineCluster()
    try:
        cluster.start()
        resource = {"name": FPGAS, "driver": DRIVER, "devices": [{"path": "/dev/fpga*"}], "dra": {"share": 2}}
        cluster.install_agent([resource], DEVICES)
        cluster.wait_allocatable(FPGAS, 2, timeout=LIMIT)
        yield cluster
    finally:
        cluster.stop()
