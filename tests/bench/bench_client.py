"""Measures the memory of the bridge with its API client, and the duration of a GET.

`python -m tests.bench client` runs the measurement. The client is a separate process that runs this module. The server
is the fake API server.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

GETS = 500


class Measured(NamedTuple):
    """The results. resident: memory in bytes, with all modules of the bridge. seconds: median duration of a GET."""

    resident: float
    seconds: float


def client(url: str) -> None:
    """Read a Node `GETS` times; print the resident memory and the median duration."""
    import dra_bridge.node.bridge  # noqa: F401
    from dra_bridge.kube import NODES, Cluster

    async def gets() -> list[float]:
        async with Cluster.from_server(url) as cluster:
            times = []
            for _ in range(GETS):
                began = time.perf_counter()
                await cluster.get(NODES, "n1")
                times.append(time.perf_counter() - began)
            return times

    times = asyncio.run(gets())
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    print(resident, statistics.median(times))


def measure() -> Measured:
    """Run the client against a fake API server."""
    from dra_bridge.testing.apiserver import FakeApiServer
    from tests.programs import image_environment

    with FakeApiServer() as server:
        labels = {f"example.com/label-{n}": "x" * 30 for n in range(40)}
        server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": labels}})
        command = [sys.executable, "-m", "tests.bench.bench_client", server.url]
        environment = {**os.environ, **image_environment()}
        for _ in range(2):  # the first run writes the bytecode that an image contains
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    resident, seconds = map(float, done.stdout.split())
    return Measured(resident, seconds)


if __name__ == "__main__":
    client(sys.argv[1])
