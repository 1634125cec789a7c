"""A scrape of 64 devices and 200 holders: how long it takes, and what memory metrics cost.

Run by `python -m tests.bench.bench_metrics`; exit status 1 if a limit is missed. The agent is a
process of its own, scraped over one kept connection as Prometheus does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection

SCRAPES = 10_000
SETTLED = 2_000
"""Scrapes after which memory must grow no more."""
LIMIT_MS = 10.0
LIMIT_MB = 4.0
LIMIT_GROWTH_MB = 0.5


def agent() -> None:
    """Be the agent: say the memory without metrics, then serve them until stdin ends."""
    from deviceplugin import cli

    with cli._without_openssl():  # as `deviceplugin run` does
        import asyncio

        import deviceplugin.process
        import deviceplugin.sources  # noqa: F401
    from deviceplugin import Device, DeviceSource
    from deviceplugin.agent import Agent, Paths
    from deviceplugin.podresources import Holder, Holdings
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
        await running.services["example.com/gpu"].inventory.newer(0)
        running.books.holdings = Holdings(
            {
                "example.com/gpu": {
                    f"GPU-0a1b2c3d-{n // 4:04d}-4e5f-8a9b-0c1d2e3f4a5b::{n % 4}": frozenset(
                        {Holder("team-a", f"train-{n}-7c9f8b6d5-x2x4z", "main")}
                    )
                    for n in range(200)
                }
            }
        )
        assert "ssl" not in sys.modules
        assert "deviceplugin.metrics" not in sys.modules
        print(json.dumps({"rss": rss("self")}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        from deviceplugin import metrics

        with metrics.serving("127.0.0.1:0", running) as server:
            print(json.dumps({"address": server.address}), flush=True)
            reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            while not reading.done():
                running.books.looked_at = time.monotonic()
                await asyncio.sleep(1)
        running.stop()
        await task

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(main(Path(root)))


def rss(pid: int | str) -> float:
    """Return a process's resident memory in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def scrape(connection: HTTPConnection, count: int, headers: dict[str, str]) -> tuple[list[float], bytes]:
    """Scrape so often; return the milliseconds that each took, sorted, and the last answer."""
    times, body = [], b""
    for _ in range(count):
        began = time.perf_counter()
        connection.request("GET", "/metrics", headers=headers)
        body = connection.getresponse().read()
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times), body


def main() -> int:
    """Measure; return the exit status."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bench_metrics", "agent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        return _measure(process, process.stdin or sys.stdin.buffer, process.stdout or sys.stdout.buffer)


def _measure(process: subprocess.Popen[bytes], stdin: IO[bytes], stdout: IO[bytes]) -> int:
    from http.client import HTTPConnection  # with OpenSSL, which the agent does without

    without = json.loads(stdout.readline())["rss"]
    stdin.write(b"\n")
    stdin.flush()
    host, _, port = json.loads(stdout.readline())["address"].rpartition(":")
    connection = HTTPConnection(host, int(port))
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    while scrape(connection, 1, accept)[1].count(b"deviceplugin_device_power_watts{") < 64:
        time.sleep(0.2)
    plain, body = scrape(connection, 200, accept)
    first = rss(process.pid)
    packed, _ = scrape(connection, SETTLED, {**accept, "Accept-Encoding": "gzip"})
    settled = rss(process.pid)
    more, _ = scrape(connection, SCRAPES, {**accept, "Accept-Encoding": "gzip"})
    last = rss(process.pid)
    connection.close()
    stdin.close()
    process.wait()
    packed = sorted(packed + more)
    figures = {
        "lines": body.count(b"\n"),
        "bytes": len(body),
        "plain_p50_ms": round(plain[len(plain) // 2], 2),
        "gzip_p50_ms": round(packed[len(packed) // 2], 2),
        "gzip_p99_ms": round(packed[len(packed) * 99 // 100], 2),
        "rss_without_mb": round(without, 1),
        "rss_first_mb": round(first - without, 2),
        "rss_settled_mb": round(settled - without, 2),
        "rss_growth_mb": round(last - settled, 2),
    }
    missed = [
        what
        for what, bad in (
            (f"a scrape takes more than {LIMIT_MS} ms", packed[len(packed) // 2] > LIMIT_MS),
            (f"metrics cost more than {LIMIT_MB} MB", settled - without > LIMIT_MB),
            (f"{SCRAPES} scrapes cost more than {LIMIT_GROWTH_MB} MB", last - settled > LIMIT_GROWTH_MB),
        )
        if bad
    ]
    print(json.dumps(figures, indent=1))
    for what in missed:
        print(f"missed: {what}")
    return int(bool(missed))


if __name__ == "__main__":
    if sys.argv[1:] == ["agent"]:
        agent()
    else:
        sys.exit(main())
