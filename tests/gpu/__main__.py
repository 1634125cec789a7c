"""Checks the NVIDIA source on real hardware. `tox -e gpu` runs `python -m tests.gpu`.

The checks change nothing on the machine. Each check prints a line. All measured values are written to a JSON file, so
that a run can be examined on another machine. The exit status is 1 if a check failed or there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from deviceplugin import naming, topology
from deviceplugin.config.types import NvidiaConfig
from deviceplugin.device import Device, Health
from deviceplugin.metrics.load import QUANTITIES, checked
from deviceplugin.sources.nvidia import NvidiaSource, Places
from deviceplugin.sources.nvidia.devices import CDI_KIND
from deviceplugin.sources.nvidia.nvml import NvmlError
from deviceplugin.sources.nvidia.session import Session
from deviceplugin.testing.kubelet import FakeKubelet
from deviceplugin.testing.plugin import serve

MOST_BLOCKED = 0.25
"""Maximum seconds for which the event loop may be blocked while GPUs are scanned and measured."""


class Failed(Exception):  # noqa: N818
    """A check has failed. The message states the unexpected value."""


def expect(right: object, what: str) -> None:
    if not right:
        raise Failed(what)


class Checks:
    """All checks, their results, and the measured values."""

    def __init__(self, places: Places, seconds: float) -> None:
        self.places = places
        self.seconds = seconds
        self.seen: dict[str, Any] = {}
        self.results: dict[str, str] = {}
        self.devices: list[Device] = []

    def source(self, **options: Any) -> NvidiaSource:
        period = options.pop("period", 10.0)
        return NvidiaSource(NvidiaConfig(**options), places=self.places, resource="nvidia.com/gpu", period=period)

    def run(self) -> bool:
        """Run all checks; return whether all succeeded. If the first check fails, skip the others."""
        self.seen["machine"] = {"python": sys.version, "kernel": platform.release(), "at": time.time()}
        for check in (
            self.look, self.describe, self.compare, self.nodes, self.partitions, self.choose, self.wait, self.measure,
            self.follow, self.serve,
        ):  # fmt: skip
            if not self._one(check.__name__, check) and check == self.look:
                break
        return all(result == "ok" for result in self.results.values())

    def _one(self, name: str, check: Callable[[], None]) -> bool:
        try:
            check()
            self.results[name] = "ok"
        except (Failed, NvmlError) as error:
            self.results[name] = f"failed: {error}"
        except Exception:
            self.results[name] = f"failed: {traceback.format_exc()}"
        print(f"{name}: {self.results[name]}")
        return self.results[name] == "ok"

    # Checks of what the source finds.

    def look(self) -> None:
        """NVML lists at least one GPU. Two later scans have the same result, and the last one takes less than 2 s."""
        session = self._session()
        try:
            times, looks = [], []
            for _ in range(3):
                began = time.perf_counter()
                looks.append(session.scan())
                times.append(time.perf_counter() - began)
        finally:
            session.close()
        look = looks[-1]
        self.seen["look"] = {
            "seconds": times,
            "driver": look.driver,
            "cuda": look.cuda,
            "listening": look.listening,
            "notes": look.notes,
            "findings": {name: [verdict.value, why] for name, (verdict, why) in look.findings.items()},
            "links": [[*sorted(pair), score] for pair, score in look.links.items()],
        }
        expect(look.gpus, "there is no GPU")
        expect(looks[1] == looks[2], "two looks at a quiet machine differ")
        expect(times[2] < 2.0, f"a later look took {times[2]:.3f} s")
        source = self.source()
        source.update(look)
        self.devices = source.devices()

    def describe(self) -> None:
        """No GPU is unhealthy; each has memory and the usual attributes, in a form that the API server accepts."""
        self.seen["devices"] = [
            {
                "id": device.id,
                "numa": device.numa_nodes,
                "attributes": dict(device.attributes),
                "capacity": dict(device.capacity),
                "health": device.health.value,
                "message": device.message,
            }
            for device in self.devices
        ]
        for device in self.devices:
            assert not list(naming.problems(device, "gpu.example.com"))
            wanted = {"uuid", "index", "productName", "driverVersion", "cudaDriverVersion", naming.PCI_BUS_ID}
            missing = wanted - device.attributes.keys()
            expect(not missing, f"{device.id} does not tell {', '.join(sorted(missing))}")
            expect("memory" in device.capacity, f"{device.id} does not tell its memory")
            expect(device.health is not Health.UNHEALTHY, f"{device.id} is unhealthy: {device.message}")

    def compare(self) -> None:
        """If nvidia-smi is installed, it has the same GPUs, indexes, addresses, names, and about the same memory."""
        smi = shutil.which("nvidia-smi")
        self.seen["nvidia-smi"] = smi
        if smi is None:
            return
        fields = "uuid,index,pci.bus_id,name,memory.total,driver_version"
        said = _run([smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
        self.seen["smi"] = {"query": said, "topology": _run([smi, "topo", "-m"]), "list": _run([smi, "-L"])}
        rows = {row[0]: row for row in ([cell.strip() for cell in line.split(",")] for line in said.splitlines())}
        expect(set(rows) == {device.id for device in self.devices}, f"nvidia-smi lists {sorted(rows)}")
        for device in self.devices:
            row = rows[device.id]
            expect(str(device.attributes["index"]) == row[1], f"{device.id}: nvidia-smi has index {row[1]}")
            address = str(device.attributes[naming.PCI_BUS_ID])
            expect(row[2].lower().endswith(address), f"{device.id}: nvidia-smi has it at {row[2]}, not {address}")
            expect(device.attributes["productName"] == row[3], f"{device.id}: nvidia-smi calls it {row[3]}")
            mine = int(str(device.capacity["memory"]).removesuffix("Mi"))
            expect(abs(mine - int(row[4])) <= mine // 50, f"{device.id}: nvidia-smi has {row[4]} MiB, not {mine}")

    def nodes(self) -> None:
        """All device nodes of `injection: nodes` exist, and nvidiactl is one of them. CDI names are only recorded."""
        source = self.source(injection="nodes")
        source.update(self._looked())
        paths = sorted({node.host for one in source.devices() for node in one.container_edits.device_nodes})
        self.seen["nodes"] = {path: os.path.exists(path) for path in paths}
        missing = [path for path in paths if not os.path.exists(path)]
        expect(not missing, f"there is no {', '.join(missing)}")
        expect(any(path.endswith("nvidiactl") for path in paths), "nvidiactl is missing")
        source = self.source(injection="cdi")
        source.update(self._looked())
        self.seen["cdi"] = {one.id: list(one.edits.cdi) or f"none of {CDI_KIND}" for one in source.devices()}

    def partitions(self) -> None:
        """MIG partitions, if there are any, have their profile, and are in a form that the API server accepts."""
        look = self._looked()
        self.seen["mig"] = {
            gpu.uuid: None if gpu.partitions is None else [repr(part) for part in gpu.partitions] for gpu in look.gpus
        }
        for profile in {part.profile for gpu in look.gpus for part in gpu.partitions or ()}:
            source = self.source(profile=profile)
            source.update(look)
            for device in source.devices():
                assert not list(naming.problems(device, "gpu.example.com"))
                expect(device.attributes["profile"] == profile, f"{device.id} is of another profile")

    def choose(self) -> None:
        """For each number of GPUs, the choice by links has this number of GPUs, and takes less than 0.1 s."""
        source = self.source()
        source.update(self._looked())
        ids = [device.id for device in source.devices()]
        chosen: dict[str, Any] = {}
        for size in range(1, len(ids) + 1):
            began = time.perf_counter()
            chosen[str(size)] = topology.preferred(ids, (), size, source.links)
            expect(time.perf_counter() - began < 0.1, f"choosing {size} of {len(ids)} took too long")
            expect(len(chosen[str(size)]) == size, f"{size} of {len(ids)} were asked for")
        self.seen["chosen"] = chosen

    def wait(self) -> None:
        """A wait of 0.5 s for XIDs ends in less than 2 s."""
        session = self._session()
        try:
            session.scan()
            began = time.perf_counter()
            xids, _ = session.wait(0.5)
            took = time.perf_counter() - began
        finally:
            session.close()
        self.seen["wait"] = {"seconds": took, "xids": [repr(xid) for xid in xids]}
        expect(took < 2.0, f"waiting 0.5 s for events took {took:.3f} s")

    # Checks of what the source does.

    def measure(self) -> None:
        """Measured quantities are known ones; memory, utilization and temperature have plausible values."""
        session = self._session()
        try:
            session.scan()
            began = time.perf_counter()
            raw = session.measure([device.id for device in self.devices])
            took = time.perf_counter() - began
        finally:
            session.close()
        values = checked(raw, self.devices)
        self.seen["load"] = {"seconds": took, "values": values}
        for name, load in values.items():
            expect(set(load) <= set(QUANTITIES), f"{name} tells quantities that have no name")
            total, used = (cast("float", load.get(key, 0)) for key in ("memory_total_bytes", "memory_used_bytes"))
            expect(0 <= used <= total > 0, f"{name} uses {used} of {total} bytes")
            busy = cast("float", load.get("utilization_ratio", 0.0))
            expect(0 <= busy <= 1, f"{name} is busy {busy}")
            heat = load.get("temperature_celsius", {})
            expect(isinstance(heat, dict) and all(0 < degrees < 130 for degrees in heat.values()), f"{name}: {heat}")

    def follow(self) -> None:
        """While the GPUs are watched and measured, their list stays the same, and the event loop is not blocked.

        The loop is not blocked for `MOST_BLOCKED` seconds or longer.
        """
        blocked, lists, readings = asyncio.run(self._follow(self.seconds))
        self.seen["follow"] = {"blocked_seconds": blocked, "lists": lists, "readings": readings}
        expect(lists == 1, f"the list changed {lists - 1} times")
        expect(blocked < MOST_BLOCKED, f"the loop stood still for {blocked:.3f} s")

    async def _follow(self, seconds: float) -> tuple[float, int, int]:
        source = self.source(period=0.5)
        worst, lists, readings = 0.0, 0, 0
        ending = asyncio.Event()

        async def tick() -> None:
            nonlocal worst
            while not ending.is_set():
                began = time.perf_counter()
                await asyncio.sleep(0.01)
                worst = max(worst, time.perf_counter() - began - 0.01)

        async def load(devices: Sequence[Device]) -> None:
            nonlocal readings
            while not ending.is_set():
                await source.measure(devices)
                readings += 1

        tasks = [asyncio.create_task(tick())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), aclosing(cast("Any", source.watch())) as watch:
                async for devices in watch:
                    lists += 1
                    if lists == 1:
                        tasks.append(asyncio.create_task(load(devices)))
        ending.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return worst, lists, readings

    def serve(self) -> None:
        """A pod of the fake kubelet gets one GPU, whose id is in NVIDIA_VISIBLE_DEVICES."""
        with FakeKubelet() as kubelet, serve(self.source(), kubelet, timeout=60):
            kubelet.wait_allocatable("nvidia.com/gpu", len(self.devices), 60)
            pod = kubelet.run_pod("pod", {"nvidia.com/gpu": 1})
            given, env = pod.devices["nvidia.com/gpu"], pod.container().env
        self.seen["pod"] = {"given": given, "env": dict(env)}
        expect(env["NVIDIA_VISIBLE_DEVICES"] == given[0], f"the pod got {env}")

    def _session(self) -> Session:
        return Session(self.places)

    def _looked(self) -> Any:
        session = self._session()
        try:
            return session.scan()
        finally:
            session.close()


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else f"ended with {done.returncode}: {done.stderr.strip()}"


def main(argv: Sequence[str] | None = None, places: Places | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--record", type=Path, default=Path("gpu-report.json"), help="where to write what was seen")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the GPUs are followed")
    parser.add_argument("--library", default="", help="libnvidia-ml.so.1, if not where programs look")
    options = parser.parse_args(argv)
    checks = Checks(places or Places(library=options.library), options.seconds)
    fine = checks.run()
    report = {"results": checks.results, **checks.seen}
    options.record.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(f"{'all is well' if fine else 'something is wrong'}; what was seen is in {options.record}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
