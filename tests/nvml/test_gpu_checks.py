"""The checks for real hardware (`tox -e gpu`), run on machines of the fake NVML library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.__main__ import main
from tests.nvml import gpus as machines
from tests.nvml.gpus import FakeGpus


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/nowhere")  # the nvidia-smi of this machine does not know the fake GPUs
    return tmp_path / "report.json"


def test_checks_pass_on_a_sound_machine_and_record_it(gpus: FakeGpus, report: Path) -> None:
    """On a machine with eight good GPUs the checks pass, and the record has all results."""
    uuids = machines.dgx_a100(gpus)
    for name in ("nvidiactl", "nvidia-uvm"):
        (Path(gpus.places.dev) / name).touch()
    for index in range(8):
        gpus.set(f"gpu{index}.util", 10)
    gpus.write()
    assert main(["--record", str(report), "--seconds", "1"], gpus.places) == 0, report.read_text()
    seen = json.loads(report.read_text())
    assert set(seen["results"].values()) == {"ok"}
    assert [device["id"] for device in seen["devices"]] == uuids
    assert len(seen["look"]["links"]) == 28
    assert len(seen["chosen"]["4"]) == 4
    assert seen["follow"]["readings"] > 0


def test_checks_fail_without_a_gpu(gpus: FakeGpus, report: Path) -> None:
    """On a machine without a GPU the checks fail at once with that reason."""
    assert main(["--record", str(report), "--seconds", "1"], gpus.places) == 1
    assert json.loads(report.read_text())["results"] == {"look": "failed: there is no GPU"}


def test_checks_find_a_broken_gpu(gpus: FakeGpus, report: Path) -> None:
    """A GPU without a node, or with errors, makes checks fail."""
    gpus.gpu(0)
    gpus.write(gpu0__temp=200)
    Path(gpus.places.dev, "nvidia0").unlink()
    assert main(["--record", str(report), "--seconds", "1"], gpus.places) == 1
    results = json.loads(report.read_text())["results"]
    assert results["nodes"].startswith("failed: there is no")
    assert results["measure"].startswith("failed")
