"""The demo checks its own statements, so its exit status is most of the test."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from deviceplugin import demo
from deviceplugin.device import ContainerEdits, Device
from tests.programs import running


def test_story_is_true_and_short() -> None:
    """The demo ends with 0 within seconds, and its table names every pod; without a terminal the text is plain."""
    out, began = io.StringIO(), time.monotonic()
    assert demo.main(stream=out) == 0
    assert time.monotonic() - began < 15
    text = out.getvalue()
    for told in ("registered again", "waited, now runs", "fell off the bus", "recovered", "`released` hook"):
        assert told in text
    table = text.split("Which pod held what\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["POD", "trainer", "notebook", "batch", "nightly", "evening"]
    assert "\033" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the demo's text is coloured, unless NO_COLOR is set."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured, plain = Terminal(), Terminal()
    demo.Printer(coloured).event("pod", "text")
    monkeypatch.setenv("NO_COLOR", "1")
    demo.Printer(plain).event("pod", "text")
    assert "\033[" in coloured.getvalue()
    assert "\033" not in plain.getvalue()


def test_story_that_is_not_true_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a statement of the demo is not true, the demo says so and ends with 1."""

    def wrong(self: demo.Gpus, devices: Sequence[Device]) -> ContainerEdits:
        return ContainerEdits(env={"GPU_VISIBLE_DEVICES": "all"})

    monkeypatch.setattr(demo.Gpus, "edits", wrong)
    out = io.StringIO()
    assert demo.main(stream=out) == 1
    assert "expected, but not true: trainer knows its devices" in out.getvalue()


def test_hold_serves_until_a_signal() -> None:
    """With `hold` the demo prints its kubelet's directory and serves until SIGTERM, then ends with 0."""
    code = "import sys; from deviceplugin import demo; sys.exit(demo.main(hold=True))"
    with running([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if found := re.search(r"--kubelet-root (\S+)", line):
                break
        else:
            raise AssertionError(f"it ended with {process.wait()} and never held")
        assert os.path.exists(f"{found[1]}/device-plugins/kubelet.sock")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(20) == 0
        assert "goaway" not in process.stderr.read().lower()
    assert not os.path.exists(found[1])
