"""Measures the time and memory of `dra-bridge plan` for 1,000 nodes with 8,000 pods, and compares them with limits.

`python -m tests.bench.bench_plan` takes a minute. Its exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.dra.plan.cases import BOARD, DRIVER, GROUP, device_class, node, pod

NODES = 1000
PODS = 8
"""Number of pods of each node."""
SECONDS = 10.0
FIRST = 2.0
"""Maximum seconds until the first line of output."""
MEGABYTES = 300.0


def objects() -> Iterator[dict[str, Any]]:
    """Yield a cluster's objects as `kubectl get -A -o json` prints them, with fields that `plan` does not read."""
    yield device_class()
    for number in range(NODES):
        name = f"node-{number:04}"
        body = node(name, count=8, labels={GROUP: f"group-{number // 100}", "kubernetes.io/os": "linux"})
        images = [
            {"names": [f"registry.example/image-{image}@sha256:{'0' * 64}"], "sizeBytes": 1} for image in range(20)
        ]
        conditions = [{"type": kind, "status": "False", "message": "kubelet has " + kind} for kind in ("A", "B", "C")]
        body["status"] |= {"images": images, "conditions": conditions}
        yield body
        for index in range(PODS):
            yield whole_pod(f"pod-{number:04}-{index}", name, index)


def whole_pod(name: str, on: str, index: int) -> dict[str, Any]:
    """Return a pod with the fields that the API server adds."""
    started = {"phase": "Running", "startTime": "2026-11-26T08:00:00Z", "podIP": "10.0.0.1"}
    body = pod(name, index % 2, on, status=started)
    body["metadata"] |= {"labels": {"app": name}, "uid": name, "creationTimestamp": "2026-11-26T08:00:00Z"}
    body["spec"].setdefault("containers", [])
    body["spec"]["containers"] += [{"name": f"c{one}", "image": "x:1"} for one in range(2)]
    for container in body["spec"]["containers"]:
        container |= {
            "env": [{"name": f"VARIABLE_{one}", "value": "a value of some length"} for one in range(12)],
            "volumeMounts": [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}],
            "terminationMessagePolicy": "File",
        }
    conditions = [{"type": kind, "status": "True"} for kind in ("Ready", "Initialized", "PodScheduled")]
    return {**body, "status": {**body["status"], "conditions": conditions}}


def measured(file: Path) -> tuple[float, float, float]:
    """Run `plan` on a dump; return the CPU seconds, the seconds until the first output, and the peak memory in MB."""
    command = [sys.executable, "-m", "dra_bridge", "plan", "-f", str(file), "--driver", DRIVER]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    first = time.monotonic() - began
    text = process.stdout.read().decode()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 5, text
    assert BOARD in text
    return usage.ru_utime + usage.ru_stime, first, usage.ru_maxrss / 1e3


def write(directory: Path) -> None:
    """Write a dump of the cluster in JSON and one in YAML."""
    whole = {"apiVersion": "v1", "kind": "List", "items": list(objects())}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    (directory / "dump.json").write_text(json.dumps(whole))
    (directory / "dump.yaml").write_text(yaml.dump(whole, Dumper=dumper))


def main() -> int:
    """Measure `plan` on dumps in JSON and YAML; return 1 if a limit is exceeded."""
    missed = 0
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        # The dumps are written in another process, because the kernel counts this process's peak memory for the
        # measured child processes as well.
        subprocess.run([sys.executable, "-m", "tests.bench.bench_plan", directory], check=True)
        for file in sorted(Path(directory).iterdir()):
            cpu, first, most = measured(file)
            wrong = cpu > SECONDS or first > FIRST or most > MEGABYTES
            missed += wrong
            size = file.stat().st_size / 1e6
            shown = f"{file.name}, {size:.0f} MB: {cpu:.1f} s of CPU (<= {SECONDS:g}), first output after {first:.1f} s"
            print(f"{shown} (<= {FIRST:g}), {most:.0f} MB (<= {MEGABYTES:g}){'   MISSED' if wrong else ''}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
