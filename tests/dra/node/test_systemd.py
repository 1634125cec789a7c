"""An agent for limits and claims as a systemd unit that starts before the kubelet: when it counts as started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from tests.kubeconfigs import written
from tests.programs import running
from tests.service_manager import service_manager

CONFIG = """
resources:
  - {name: example.com/fpga, driver: fpga.example.com, devices: [{simulated: {count: 4}}], dra: {share: 2}}
"""


def offered(server: FakeApiServer) -> int:
    return sum(len(one["spec"].get("devices", ())) for one in server.objects("resourceslices"))


def test_ready_after_a_reboot_with_devices_on_both_sides(tmp_path: Path) -> None:
    """After a reboot the agent is ready without kubelet and API server; it has devices for limits and for claims."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "cdi").mkdir()
    with service_manager() as manager, contextlib.ExitStack() as stack:
        with FakeApiServer() as server, FakeNode(server, "n1") as node:
            kubeconfig = written(tmp_path / "kubeconfig", server.url)
            command = [sys.executable, "-m", "tests.kubeconfigs", "run", f"--kubeconfig={kubeconfig}", "--node-name=n1"]
            command += [f"--config={tmp_path / 'config.yaml'}", f"--cdi-dir={tmp_path / 'cdi'}"]
            command += ["--allow-host-path=/", f"--pod-log-dir={tmp_path}"]
            root = node.paths.kubelet_root
            with running([*command, f"--kubelet-root={root}"], env=os.environ) as process:
                manager.wait_for("READY=")
                server.wait_for(lambda server: offered(server) == 2, 30.0)
                node.start_pod("limits", {"example.com/fpga": 1}).wait_running()
                process.send_signal(signal.SIGKILL)
                process.wait()
            # A copy of the kubelet's root without a kubelet; the path is short because sockets need that.
            after = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "k"
            shutil.copytree(root, after, ignore=lambda of, names: [one for one in names if Path(of, one).is_socket()])
        log = stack.enter_context(open(tmp_path / "log", "w"))
        with running([*command, f"--kubelet-root={after}"], env=os.environ, stderr=log.fileno()) as process:
            manager.wait_for("READY=")
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
    assert "counts as started" not in (tmp_path / "log").read_text()
