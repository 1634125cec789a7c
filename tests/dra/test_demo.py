"""The bridge's demo: it checks what it tells, so its exit status is most of the test."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from deviceplugin.demo import Printer
from dra_bridge import cli, demo
from dra_bridge.testing.node import FakeNode, Holding
from tests.programs import running


@pytest.fixture(scope="module")
def holding() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The demo that serves on: its process, and what it printed until then."""
    with running([sys.executable, "-u", "-m", "dra_bridge", "demo", "--hold"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "dra-bridge migrate" in line:
                break
        yield process, "".join(lines)


@pytest.fixture
def printed(holding: tuple[subprocess.Popen[str], str]) -> str:
    """What the demo printed before it began to serve on."""
    return holding[1].split("\nStill serving")[0]


def test_story_is_true(holding: tuple[subprocess.Popen[str], str]) -> None:
    """The demo comes to its end: what it printed was so."""
    process, text = holding
    assert process.poll() is None, text
    assert "Still serving" in text


def test_naive_switch_gives_a_device_twice(printed: str) -> None:
    """The first part shows one device in two containers, each of which sees it, on one side each."""
    first = printed.split("2. The same with the bridge")[0]
    rows = re.findall(r"^(gpu-\d)\s+(\S+)\s+(plugin|claim)\s+GPU_VISIBLE_DEVICES=(gpu-\d)$", first, re.MULTILINE)
    twice = [row for row in rows if row[1] == "batch"] + [row for row in rows if row[1] == "train-1"]
    assert [(row[0], row[2], row[3]) for row in twice] == [("gpu-0", "claim", "gpu-0"), ("gpu-0", "plugin", "gpu-0")]


def test_bridge_gives_none_twice(printed: str) -> None:
    """The second part moves devices there and back under churn, shows who held what when, and finds no overlap."""
    second = printed.split("2. The same with the bridge")[1]
    assert "never by two at once" in second
    assert len(re.findall(r"is asked for \S+ +[\d.]+ s later", second)) == len(demo.SHARES)
    counts = re.findall(r"^gpu-\d   [pc.]{72} +(\d+) +(\d+) *$", second, re.MULTILINE)
    assert f"\n{sum(int(one) for row in counts for one in row)} times a device was held" in second
    assert len(re.findall(r"^gpu-\d   (?=.*p)(?=.*c)[pc.]{72} ", second, re.MULTILINE)) == 4


def test_plain_when_nobody_looks(printed: str) -> None:
    """Without a terminal the output has no escape sequences and no line wider than a page."""
    assert "\033" not in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_failure_of_a_pod_fits_on_a_page() -> None:
    """What the kubelet says of a pod that was given a withdrawn device is cut."""
    node: Any = None
    pod: Any = Mock(phase="Failed", reason="x" * 50, message="x" * 200)
    pod.name = "claim-100"
    churn = demo.Churn(node, 0)
    churn._replace_ended("claim", {pod: 1.0})
    out = io.StringIO()
    Printer(out).event("pod", "was made", *churn.failed)
    assert "claim-100" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_a_harmless_naive_switch_is_not_told_as_harmful(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the naive switch gave no device twice, the demo would fail rather than say that it did."""
    monkeypatch.setattr(demo, "overlaps", lambda holdings: [])
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "this should be so and is not: one device has two holders" in out.getvalue()


def test_a_bridge_that_gives_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two pods held one device under the bridge, the demo would end with 1 and say which."""
    holdings = FakeNode.holdings

    def twice(self: FakeNode) -> list[Holding]:
        found = holdings(self)
        return [*found, Holding(found[-1].device, "ghost", "claim", found[-1].begin, None)]

    move_devices = demo.move_devices

    def move(scene: demo.Scene, count: int) -> tuple[float, float]:
        ended = move_devices(scene, count)
        monkeypatch.setattr(FakeNode, "holdings", twice)
        return ended

    monkeypatch.setattr(demo, "SHARES", ("none", "all", "none"))
    monkeypatch.setattr(demo, "move_devices", move)
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "this should be so and is not: no device had two holders" in out.getvalue()
    assert "ghost" in out.getvalue()


def test_what_ends_a_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends by an error ends the demo with 1 and its error."""

    async def broken(*_: Any) -> None:
        raise OSError("no agent today")

    monkeypatch.setattr(demo, "bridge", broken)
    monkeypatch.setattr(demo, "TIMEOUT", 1.0)
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "failed" in out.getvalue()


def test_a_background_that_is_interrupted_at_its_beginning_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is waited for leaves nobody behind who goes on making sockets."""
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt), demo.in_background("driver", work):
        raise KeyboardInterrupt
    assert ended.is_set()


def test_demo_needs_nothing_of_the_tests() -> None:
    """A user's installation has no pytest, and neither demo wants it."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'rich')))\n"
        "import deviceplugin.demo, deviceplugin.testing.serving, dra_bridge.demo, dra_bridge.testing.node\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_hold_serves_the_command_line(
    holding: tuple[subprocess.Popen[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With --hold it serves on; `status` and `migrate` work against it until SIGTERM ends it with 0."""
    process, text = holding
    found = re.search(r"migrate (?P<node>\S+) --driver (?P<driver>\S+) .*--kubeconfig (?P<file>\S+)", text)
    assert found, f"it ended with {process.wait()} and never held"
    said = found.groupdict()
    kubeconfig = ["--kubeconfig", said["file"]]
    asked = ["migrate", said["node"], "--driver", said["driver"], "--share", "3", "--wait", "--timeout", "20"]
    assert cli.main([*asked, *kubeconfig]) == 0
    capsys.readouterr()
    assert cli.main(["status", "-o", "json", *kubeconfig]) == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["settled"]
    assert node["resources"][0]["counts"] == {"dra": 3, "plugin": 1}
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.wait(20) == 0
    assert not Path(said["file"]).exists()
