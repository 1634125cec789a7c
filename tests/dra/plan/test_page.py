"""docs/plan.md, command by command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.pages import agrees, run, steps
from tests.source import ROOT


def test_the_page_is_what_happens(tmp_path: Path) -> None:
    """Every command of the page prints what the page shows."""
    program = tmp_path / "bin" / "dra-bridge"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dra_bridge "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = steps((ROOT / "docs" / "plan.md").read_text())
    assert sum(bool(step.command) for step in found) == 1
    for step in found:
        if step.name:
            (tmp_path / step.name).write_text(step.text)
            continue
        text = run(step.command, tmp_path, environment)
        assert agrees(step, text), f"line {step.line + 1}: {step.command}: {text}"
