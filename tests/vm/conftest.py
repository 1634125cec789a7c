"""The node of the tests: one machine for all tests, because a boot without KVM takes minutes."""

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
    """Set a timeout of three hours for each test; each wait in a test has a shorter limit."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(3 * 3600))


def pytest_report_header() -> str:
    """Print whether the machine uses KVM."""
    return f"the virtual machine runs {'on KVM' if accelerated() else 'in software'}"


@pytest.fixture(scope="session")
def node() -> Iterator[MachineCluster]:
    """A node whose agent is a unit, with four devices, of which two are for claims."""
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
