"""The commands of docs/limits-to-claims.md on the real node: each command prints what the page shows.

tests/pages.py has the rules by which the page is read. `TEN_MINUTES=record` writes the commands' outputs into the page
where they differ from the page; check the change before its commit.

Differences from a reader's cluster: the image is imported, not built by Docker (commands of BEFORE are not run), and
the agent sees only the cgroups of this run.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deviceplugin.version import VERSION
from tests.cluster import image, isolate
from tests.cluster.node import Cluster, remove_ledger
from tests.pages import agrees, plain, run, steps, with_outputs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits-to-claims.md"
BEFORE = ("pip ", "docker ")
LOOKS = ("kubectl get ", "kubectl logs ", "dra-bridge status")
"""Commands that change nothing: the test runs them again until their output is that of the page."""
PATIENCE = 60.0
RECORD = os.environ.get("TEN_MINUTES") == "record"
DEVICES = [Path(f"/dev/ttyS{number}") for number in range(4)]


def forget(node: Cluster) -> None:
    """Remove the objects and the ledger that the page's commands, or agents of other tests, have left."""
    kinds = "namespace,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding"
    node.kubectl("delete", kinds, "--selector=app.kubernetes.io/managed-by=dra-bridge")
    node.kubectl("delete", "configmap", "deviceplugin", "--namespace=kube-system", "--ignore-not-found")
    remove_ledger()


@pytest.fixture
def reader(node: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Prepare the page's requirements: a cluster, four serial ports on the node, images, and programs.

    Return the environment variables of the commands.
    """
    if node.minor < 35:
        pytest.skip("step 4 of the page needs what came with 1.35")
    forget(node)
    node.tag_image(image.AGENTS[0], f"docker.io/library/deviceplugin:{VERSION}")
    node.tag_image(image.IMAGE, "docker.io/library/busybox:1.37")
    programs = tmp_path / "bin"
    programs.mkdir()
    bridge = programs / "dra-bridge"
    # The host's cgroups also contain pods of other runs.
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


@pytest.mark.lengthy
def test_the_page_is_what_happens(reader: dict[str, str], tmp_path: Path) -> None:
    """Every command of the page prints the output that the page shows."""
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
