"""Measures the duration of a scrape with 64 devices and 200 holders, and the memory that metrics need.

`python -m tests.bench metrics` runs the measurement. The agent is a separate process that runs this module. It is
scraped with Prometheus' headers, and computes the metrics anew for each scrape.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from http.client import HTTPConnection

SCRAPES = 3_000
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1"
)
"""The header Accept of Prometheus 3."""
SETTLED = 500
"""Number of scrapes after which the memory should not grow any more."""


def agent() -> None:
    """Run the agent. Print its memory without metrics, then serve metrics until standard input ends."""
    import asyncio

    import deviceplugin.node.process
    import deviceplugin.sources  # noqa: F401
    from deviceplugin import Device, DeviceSource
    from deviceplugin.kubelet.holders import HolderSnapshot, HoldReason
    from deviceplugin.kubelet.paths import Paths
    from deviceplugin.node.agent import Agent
    from deviceplugin.register.records import Allocation
    from deviceplugin.source import Measured

    class Gpus(DeviceSource):
        resource = "example.com/gpu"
        replicas = 4

        async def watch(self):  # type: ignore[no-untyped-def]
            yield [Device(f"GPU-0a1b2c3d-{n:04d}-4e5f-8a9b-0c1d2e3f4a5b", numa=n // 32) for n in range(64)]

        def measure(self, devices: Sequence[Device]) -> Measured:
            return {
                device.id: {
                    "utilization_ratio": n / 64,
                    "memory_used_bytes": n * 2**30,
                    "memory_total_bytes": 80 * 2**30,
                    "temperature_celsius": {"gpu": 40 + n / 8, "memory": 30},
                    "power_watts": 100 + n,
                    "energy_joules_total": 1e6 * n,
                    "clock_hertz": {"sm": 1e9, "memory": 1e9, "graphics": 1e9, "video": 1e9},
                    "throttled": {"power": 0, "thermal": 1, "hardware": 0},
                    "ecc_errors_total": {"corrected": 0, "uncorrected": 0},
                    "pcie_bytes_per_second": {"receive": 1e6, "transmit": 1e5},
                    "nvlink_bytes_total": {"receive": 1.0, "transmit": 2.0},
                }
                for n, device in enumerate(devices)
            }

    async def main(root: Path) -> None:
        running = Agent([Gpus()], Paths(root))
        task = asyncio.create_task(running.run())
        while not running.services:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while not running.services["example.com/gpu"].inventory.snapshot.listed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        held = {
            Allocation(
                f"0a1b2c3d-{n:04d}",
                "main",
                "example.com/gpu",
                f"GPU-0a1b2c3d-{n // 4:04d}-4e5f-8a9b-0c1d2e3f4a5b::{n % 4}",
            ): HoldReason(True, True, "the kubelet's checkpoint names it")
            for n in range(200)
        }
        running.tracker.snapshot = HolderSnapshot(time.monotonic(), held=held)
        running.tracker.names.known = {
            one.pod_uid: ("team-a", f"train-{n}-7c9f8b6d5-x2x4z") for n, one in enumerate(held)
        }
        assert "deviceplugin.metrics.collectors" not in sys.modules
        print(json.dumps({"rss": rss("self")}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        from deviceplugin.metrics import collectors as metrics
        from deviceplugin.metrics import web

        web.LIFETIME, web.LIFETIME_FACTOR = 0.0, 0  # type: ignore[misc]  # no cached metrics
        with metrics.serving("127.0.0.1:0", running) as server:
            print(json.dumps({"address": server.address}), flush=True)
            reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            while not reading.done():
                running.tracker.snapshot = HolderSnapshot(time.monotonic(), held=held)
                await asyncio.sleep(1)
        running.stop()
        await task

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(main(Path(root)))


def rss(pid: int | str) -> float:
    """Return a process's resident memory in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmRSS")


def scrape(connection: HTTPConnection, count: int, headers: dict[str, str]) -> tuple[list[float], bytes]:
    """Scrape `count` times; return the sorted durations in milliseconds, and the body of the last response."""
    times, body = [], b""
    for _ in range(count):
        began = time.perf_counter()
        connection.request("GET", "/metrics", headers=headers)
        body = connection.getresponse().read()
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times), body


class Figures(NamedTuple):
    """The results of the measurement.

    lines: number of lines of a scrape. settled_mb: resident memory of the agent after `SETTLED` scrapes, in MB above
    its memory without metrics. growth_mb: growth of the memory in MB over all further scrapes.
    """

    lines: int
    p50_ms: float
    p99_ms: float
    settled_mb: float
    growth_mb: float


def measure(scrapes: int = SCRAPES) -> Figures:
    """Start an agent, scrape it `scrapes` times, and return the results."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bench_metrics"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        return _measure(process.pid, process.stdin, process.stdout, scrapes)


def _measure(pid: int, stdin: IO[bytes], stdout: IO[bytes], scrapes: int) -> Figures:
    from http.client import HTTPConnection

    without = json.loads(stdout.readline())["rss"]
    stdin.write(b"\n")
    stdin.flush()
    host, _, port = json.loads(stdout.readline())["address"].rpartition(":")
    connection = HTTPConnection(host, int(port))
    accept = {"Accept": ACCEPT, "Accept-Encoding": "gzip"}
    plain = {"Accept": "text/plain"}
    while (body := scrape(connection, 1, plain)[1]).count(b"deviceplugin_device_power_watts{") < 64:
        time.sleep(0.2)
    scrape(connection, SETTLED, accept)
    settled = rss(pid)
    times, _ = scrape(connection, scrapes, accept)
    last = rss(pid)
    connection.close()
    stdin.close()
    return Figures(
        body.count(b"\n"), times[len(times) // 2], times[len(times) * 99 // 100], settled - without, last - settled
    )


if __name__ == "__main__":
    agent()
