"""Pages of documentation as steps of a reader: files to write, commands to run, and their output.

A block whose first line is `# NAME` is a file NAME; a block `console` has commands after `$ ` and their output, where
`...` stands for any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.source import ROOT


@dataclass(frozen=True)
class Step:
    """A file to write (name), or a command to run. text: the file's content, or the command's output. line: from 0."""

    line: int
    text: str
    name: str = ""
    command: str = ""


def steps(page: str) -> list[Step]:
    """Return the steps of a page, in order."""
    found = []
    lines = page.splitlines()
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        first = page.count("\n", 0, block.start(2))
        inside = lines[first : first + block[2].count("\n")]
        if block[1] in ("yaml", "text") and inside[0].startswith("# "):
            found.append(Step(first, "\n".join(inside[1:]) + "\n", name=inside[0].removeprefix("# ")))
        if block[1] == "console":
            assert inside[0].startswith("$ "), f"line {first + 1}: a console block begins with a command"
            starts = [number for number, line in enumerate(inside) if line.startswith("$ ")]
            for start, end in zip(starts, [*starts[1:], len(inside)], strict=True):
                text = "\n".join(inside[start + 1 : end])
                found.append(Step(first + start, text, command=inside[start].removeprefix("$ ")))
    return found


def plain(text: str) -> list[str]:
    """Return the lines of a text without the parts that differ from run to run.

    These are ages and durations, the random ends of names, the width of columns, and lines about progress.
    """
    lines = []
    for line in text.strip().splitlines():
        line = re.sub(r"\b\d+m\d+s\b|\b\d+(\.\d+)? ?[smh]\b", "AGE", line)
        line = re.sub(r"-[bcdfghjklmnpqrstvwxz2456789]{5}\b", "-XXXXX", line)
        if not re.search(r"^Waiting for |: \d+ of \d+ devices moved$|: nothing to move$", line):
            lines.append(" ".join(line.split()))
    return lines


def agrees(step: Step, text: str) -> bool:
    """Return whether a command's output agrees with the page; `...` on the page stands for any lines.

    The output of a command that waits may have further lines.
    """
    shown, seen = plain(step.text), plain(text)
    if "--wait" in step.command:
        rest = iter(seen)
        return all(line in rest for line in shown)
    lines = (r"(.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown)
    return re.fullmatch("".join(lines), "".join(f"{line}\n" for line in seen)) is not None


def run(command: str, directory: Path, environment: dict[str, str]) -> str:
    """Return a command's output, with its standard error."""
    done = subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=directory,
        text=True,
        timeout=180,
    )
    return done.stdout.rstrip("\n")


def with_outputs(page: str, outputs: dict[int, str]) -> str:
    """Return the page with these outputs in place of its own. outputs: by the index of the command's line."""
    lines, inside = [], False
    for number, line in enumerate(page.splitlines()):
        if line.startswith("$ ") or line == "```":
            inside = False
        if not inside:
            lines.append(line)
        if number in outputs:
            lines += outputs[number].splitlines()
            inside = True
    return "\n".join(lines) + "\n"


def happens(page: Path, commands: int, directory: Path) -> None:
    """Do the steps of a page without a cluster, with this tree's `dra-bridge`. Raises AssertionError if outputs differ.

    commands: the number of commands on the page. directory: an empty directory in which the steps run.
    """
    program = directory / "bin" / "dra-bridge"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dra_bridge "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = steps(page.read_text())
    assert sum(bool(step.command) for step in found) == commands
    for step in found:
        if step.name:
            (directory / step.name).write_text(step.text)
            continue
        text = run(step.command, directory, environment)
        assert agrees(step, text), f"line {step.line + 1}: {step.command}: {text}"
