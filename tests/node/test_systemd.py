"""What an agent reports to systemd: READY, STATUS, WATCHDOG and STOPPING."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.testing import FakeKubelet
from tests.programs import running
from tests.service_manager import ServiceManagerEnd, service_manager


@pytest.fixture
def root() -> Iterator[Path]:
    """A kubelet root with a short path, since the paths of sockets are limited."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def manager() -> Iterator[ServiceManagerEnd]:
    with service_manager() as made:
        yield made


@contextlib.contextmanager
def agent(tmp_path: Path, manager: ServiceManagerEnd, root: Path, devices: str, **environment: str) -> Iterator[int]:
    """Run an agent as a systemd unit does; gives its pid."""
    config = tmp_path / "config.yaml"
    config.write_text(f"resources: [{{name: example.com/fpga, devices: [{devices}]}}]")
    command = [sys.executable, "-m", "deviceplugin", "run", f"--config={config}", f"--kubelet-root={root}"]
    command += ["--allow-host-path=/", f"--cdi-dir={tmp_path}", f"--pod-log-dir={tmp_path}"]
    with running(command, env={**os.environ, **environment}) as process:
        yield process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


SIMULATED = "{simulated: {count: 2}}"
NEVER = """
import asyncio
from deviceplugin import DeviceSource, run

class Never(DeviceSource):
    resource = "example.com/fpga"

    async def watch(self):
        await asyncio.Event().wait()
        yield []

run(Never())
"""
"""An author's agent whose source never lists devices."""


def test_ready_before_the_kubelet(tmp_path: Path, root: Path, manager: ServiceManagerEnd) -> None:
    """Without a kubelet the agent sends READY once its socket exists and its devices are listed."""
    (root / "device-plugins").mkdir()
    with agent(tmp_path, manager, root, SIMULATED):
        assert manager.wait_for("READY=") == "1"
        assert list((root / "device-plugins").glob("*.sock"))
        assert "kubelet.sock is not there" in manager.wait_for("STATUS=serves 1 resource; not ready: ")
    assert manager.wait_for("STOPPING=") == "1"


def test_ready_beside_a_socket_of_before_a_reboot(tmp_path: Path, root: Path, manager: ServiceManagerEnd) -> None:
    """A kubelet.sock without a listener, as after a reboot, does not delay READY."""
    (root / "device-plugins").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(root / "device-plugins" / "kubelet.sock"))
    with agent(tmp_path, manager, root, SIMULATED):
        assert manager.wait_for("READY=") == "1"
    assert not any("counts as started" in said for said in manager.told)


def test_ready_on_a_node_that_never_had_a_kubelet(tmp_path: Path, manager: ServiceManagerEnd) -> None:
    """Without a device plugin directory READY is sent at once: only a kubelet makes that directory."""
    with agent(tmp_path, manager, tmp_path / "none", SIMULATED):
        assert manager.wait_for("READY=") == "1"


def test_ready_beside_a_kubelet(tmp_path: Path, manager: ServiceManagerEnd) -> None:
    """Beside a kubelet that runs, the agent sends READY once its resources are registered."""
    with FakeKubelet() as kubelet, agent(tmp_path, manager, kubelet.root, SIMULATED):
        assert manager.wait_for("READY=") == "1"
        assert manager.wait_for("STATUS=") == "serves 1 resource"


def test_watchdog(tmp_path: Path, manager: ServiceManagerEnd) -> None:
    """If systemd asks for it, the event loop sends WATCHDOG=1 repeatedly."""
    with agent(tmp_path, manager, tmp_path / "none", SIMULATED, WATCHDOG_USEC="1000000"):
        manager.wait_for("READY=")
        assert [manager.wait_for("WATCHDOG=") for _ in range(3)] == ["1", "1", "1"]


def test_what_the_agent_does_not_serve(tmp_path: Path, manager: ServiceManagerEnd) -> None:
    """While a source has not listed its devices READY is not sent, and STATUS names the resource."""
    source = tmp_path / "agent.py"
    source.write_text(NEVER)
    command = [sys.executable, str(source), f"--kubelet-root={tmp_path / 'none'}"]
    with running(command, env=os.environ) as process:
        assert manager.wait_for("STATUS=") == "starts: example.com/fpga: its source has not listed its devices"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert manager.wait_for("STOPPING=") == "1"
    assert "READY=1" not in manager.told
