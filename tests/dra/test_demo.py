"""The bridge's demo checks its own statements, so its exit status is most of the test."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deviceplugin.demo import Printer
from dra_bridge import cli, demo
from dra_bridge.node.bridge import Bridge
from dra_bridge.testing.node import FakeNode, Holding
from tests.programs import running

WITHOUT_EXTRAS = """
import runpy, sys
sys.modules.update(dict.fromkeys(("pytest", "hypothesis", "rich")))
sys.argv = ["dra_bridge", "demo", "--hold"]
runpy.run_module("dra_bridge", run_name="__main__")
"""
"""The demo as in a user's installation, which has no pytest; the demo does not need rich."""


def test_story_is_true_and_the_node_is_served_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo shows a node without and with the bridge, as plain text; with --hold it serves `status` and `migrate`.

    SIGTERM ends the demo with status 0. A run takes many seconds, so this one test checks all that it prints.
    """
    with running([sys.executable, "-u", "-c", WITHOUT_EXTRAS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "dra-bridge migrate" in line:
                break
        print(text := "".join(lines))  # pytest shows the output if a check fails
        assert process.poll() is None, text
        printed, _, invitation = text.partition("\nStill serving")
        shows_a_device_twice_after_a_naive_switch(printed)
        shows_none_twice_with_the_bridge(printed)
        assert "\033" not in printed, "there is no terminal"
        assert max(map(len, printed.splitlines())) <= 100
        kubeconfig = serves_the_command_line(invitation, capsys)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.wait(20) == 0
        assert not kubeconfig.exists()


def shows_a_device_twice_after_a_naive_switch(printed: str) -> None:
    """Check that in the demo's first part two containers have one device, one by the plugin and one by a claim."""
    first = printed.split("2. The same with the bridge")[0]
    rows = re.findall(r"^(gpu-\d)\s+(\S+)\s+(plugin|claim)\s+GPU_VISIBLE_DEVICES=(gpu-\d)$", first, re.MULTILINE)
    twice = [row for row in rows if row[1] == "batch"] + [row for row in rows if row[1] == "train-1"]
    assert [(row[0], row[2], row[3]) for row in twice] == [("gpu-0", "claim", "gpu-0"), ("gpu-0", "plugin", "gpu-0")]


def shows_none_twice_with_the_bridge(printed: str) -> None:
    """Check that in the demo's second part devices move in both directions, and no device has two holders."""
    second = printed.split("2. The same with the bridge")[1]
    assert "never by two at once" in second
    assert len(re.findall(r"share \S+ +requested, [\d.]+ s later", second)) == len(demo.SHARES)
    counts = re.findall(r"^gpu-\d   [pc.]{72} +(\d+) +(\d+) *$", second, re.MULTILINE)
    assert f"\n{sum(int(one) for row in counts for one in row)} times a device was held" in second
    assert len(re.findall(r"^gpu-\d   (?=.*p)(?=.*c)[pc.]{72} ", second, re.MULTILINE)) == 4


def serves_the_command_line(invitation: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Check that `migrate` and `status` work as the demo says; return the kubeconfig that they use."""
    found = re.search(r"migrate (?P<node>\S+) --driver (?P<driver>\S+) .*--kubeconfig (?P<file>\S+)", invitation)
    assert found
    said = found.groupdict()
    kubeconfig = ["--kubeconfig", said["file"]]
    asked = ["migrate", said["node"], "--driver", said["driver"], "--share", "3", "--wait", "--timeout", "20"]
    assert cli.main([*asked, *kubeconfig]) == 0
    capsys.readouterr()
    assert cli.main(["status", "-o", "json", *kubeconfig]) == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["done"]
    assert node["resources"][0]["counts"] == {"dra": 3, "plugin": 1}
    return Path(said["file"])


def test_the_failure_of_a_pod_fits_on_a_page() -> None:
    """The kubelet's message about a failed pod is printed in lines of at most 100 characters."""
    node: Any = None
    pod: Any = Mock(phase="Failed", reason="UnexpectedAdmissionError", message="too few devices " * 12)
    pod.name = "claim-100"
    churn = demo.Churn(node, 0)
    churn.replace_ended("claim", {pod: 1.0})
    out = io.StringIO()
    Printer(out).event("pod", "was made", *demo.failures(churn.failed))
    words = " ".join(out.getvalue().split())
    assert "claim-100: UnexpectedAdmissionError: too few devices " in words
    assert words.count("too few devices") == 12
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_a_harmless_naive_switch_is_not_told_as_harmful(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the naive switch does not give a device two holders as expected, the demo says so and ends with status 1."""
    monkeypatch.setattr(demo, "overlaps", lambda holdings: [])
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "expected, but not true: one device has two holders" in out.getvalue()


def test_a_bridge_that_gives_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two pods held one device under the bridge, the demo ends with status 1 and names the pods."""
    held = [
        Holding("gpu-0", f"{side}-{number}", side, number, number + 0.9)
        for side in ("plugin", "claim")
        for number in range(20)
    ]
    monkeypatch.setattr(demo, "naive", Mock())
    monkeypatch.setattr(demo, "move_devices", Mock(return_value=(0.0, 20.0)))
    monkeypatch.setattr(FakeNode, "holdings", lambda _: held)
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "expected, but not true: no device had two holders" in out.getvalue()
    assert "claim-0" in out.getvalue()


def test_what_ends_a_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an agent ends by an error, the demo prints this error and ends with status 1."""

    async def broken(_: Bridge) -> None:
        raise OSError("no agent today")

    monkeypatch.setattr(demo, "naive", Mock())
    monkeypatch.setattr(Bridge, "run", broken)
    monkeypatch.setattr(demo, "TIMEOUT", 1.0)
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "failed" in out.getvalue()


def test_a_background_that_is_interrupted_at_its_beginning_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the background task starts ends the task."""
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt), demo.in_background("driver", work):
        raise KeyboardInterrupt
    assert ended.is_set()
