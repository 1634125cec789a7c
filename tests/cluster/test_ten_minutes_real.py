"""docs/limits-to-claims.md, command by command, on the real node: what it prints is what the page shows.

Rules of the page: a block whose first line is `# NAME` is a file NAME; a block `console` has commands after `$ ` and
what they print, where `...` stands for any lines. `TEN_MINUTES=record` writes into the page what they print where that
is not what it shows; look at the difference then.

What differs from a reader's cluster: the image is imported, not built by Docker (commands of BEFORE are not run), and
the agent sees the cgroups of this run alone.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from deviceplugin.version import VERSION
from tests.cluster import image, isolate
from tests.cluster.node import Cluster, remove_ledger

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits-to-claims.md"
BEFORE = ("pip ", "docker ")
LOOKS = ("kubectl get ", "kubectl logs ", "dra-bridge status")
"""Commands that change nothing: they are run again until they show what the page shows."""
PATIENCE = 60.0
RECORD = os.environ.get("TEN_MINUTES") == "record"
DEVICES = [Path(f"/dev/ttyS{number}") for number in range(4)]


@dataclass(frozen=True)
class Step:
    """A file to write (name), or a command to run: what follows in its block. line: of the page, from 0."""

    line: int
    text: str
    name: str = ""
    command: str = ""


def steps(page: str) -> list[Step]:
    """Return what a reader does, in its order."""
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
    """Return the lines of a text without what differs from run to run.

    Ages and durations, the random ends of names, the width of columns, and lines that say how far something is.
    """
    lines = []
    for line in text.strip().splitlines():
        line = re.sub(r"\b\d+m\d+s\b|\b\d+(\.\d+)? ?[smh]\b", "AGE", line)
        line = re.sub(r"-[bcdfghjklmnpqrstvwxz2456789]{5}\b", "-XXXXX", line)
        if not re.search(r"^Waiting for |: \d+ of \d+ devices moved$|: nothing to move$", line):
            lines.append(" ".join(line.split()))
    return lines


def agrees(step: Step, text: str) -> bool:
    """Return whether a command has printed what the page shows; `...` there stands for any lines.

    A command that waits may explain more on its way.
    """
    shown, seen = plain(step.text), plain(text)
    if "--wait" in step.command:
        rest = iter(seen)
        return all(line in rest for line in shown)
    lines = (r"(.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown)
    return re.fullmatch("".join(lines), "".join(f"{line}\n" for line in seen)) is not None


def forget(node: Cluster) -> None:
    """Remove what agents of other tests, or the page, leave at the API server and on the node."""
    kinds = "namespace,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding"
    node.kubectl("delete", kinds, "--selector=app.kubernetes.io/managed-by=dra-bridge")
    node.kubectl("delete", "configmap", "deviceplugin", "--namespace=kube-system", "--ignore-not-found")
    remove_ledger()


@pytest.fixture
def reader(node: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What somebody has who begins the page: a cluster, four serial ports on the node, the images, the programs."""
    if node.minor < 35:
        pytest.skip("step 4 of the page needs what came with 1.35")
    forget(node)
    node.tag_image(image.AGENTS[0], f"docker.io/library/deviceplugin:{VERSION}")
    node.tag_image(image.IMAGE, "docker.io/library/busybox:1.37")
    programs = tmp_path / "bin"
    programs.mkdir()
    bridge = programs / "dra-bridge"
    # The host's cgroups have the pods of other runs, too.
    bridge.write_text(
        f"#!/bin/bash\nset -o pipefail\n"
        f'if [ "$1" = manifests ]; then {sys.executable} -m dra_bridge "$@" | '
        f"sed 's|path: /sys/fs/cgroup$|path: {isolate.POD_CGROUPS}|'; "
        f'else exec {sys.executable} -m dra_bridge "$@"; fi\n'
    )
    bridge.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = [path for path in DEVICES if not path.exists()]
    for path in made:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(4, 64 + int(path.name[-1])))
    try:
        yield {
            **os.environ,
            "HOME": str(tmp_path),
            "KUBECONFIG": str(node.kubeconfig),
            "PATH": f"{programs}:{node.binaries.kubernetes}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
    finally:
        for pod in node.pods():
            print(f"--- {pod.explain()}")
            with suppress(Exception):
                print(pod.logs())
        node.clean()
        forget(node)
        for path in made:
            path.unlink()


def run(command: str, directory: Path, environment: dict[str, str]) -> str:
    """Return all that a command prints, as a terminal shows it."""
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


@pytest.mark.lengthy
def test_the_page_is_what_happens(reader: dict[str, str], tmp_path: Path) -> None:
    """Every command of the page prints what the page shows, from the plain plugin to claims and back."""
    page = PAGE.read_text()
    recorded = {}
    for step in steps(page):
        if step.name:
            (tmp_path / step.name).write_text(step.text)
            continue
        if step.command.startswith(BEFORE):
            continue
        if RECORD and step.command.startswith(LOOKS):
            time.sleep(8)
        deadline = time.monotonic() + PATIENCE
        while True:
            text = run(step.command, tmp_path, reader)
            same = agrees(step, text)
            if same or RECORD or not step.command.startswith(LOOKS) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        print(f"$ {step.command}\n{text}", flush=True)
        if not same:
            recorded[step.line] = text
        assert same or RECORD, f"line {step.line + 1}: {step.command}: {plain(step.text)} is {plain(text)}"
    if RECORD:
        PAGE.write_text(with_outputs(page, recorded))


def with_outputs(page: str, outputs: dict[int, str]) -> str:
    """Return the page with what its commands printed, by the line of the command."""
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
