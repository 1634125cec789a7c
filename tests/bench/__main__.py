"""Runs the measurements of the package `tests.bench`, and prints each result with its limit."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from deviceplugin.register.register import Register
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire import deviceplugin_pb2_grpc as pb_grpc
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class
from tests.bench import bench_claims, bench_client, bench_metrics
from tests.bench.kubelet import OPTIONS, Kubelet
from tests.bench.process import Process, process
from tests.config.files import bombs
from tests.kubeconfigs import written
from tests.programs import ANY_CONFIG
from tests.scenarios.node import wait_for

MB = 1e6
RESULTS: list[tuple[str, str, str, float | None]] = []
QUICK = False


def result(what: str, value: float, unit: str, limit: float | None, *, least: bool = False) -> None:
    """Print and store a measurement with its limit. least: whether the limit is a minimum, not a maximum."""
    ratio = None if limit is None else (limit / value if least else value / limit)
    shown = f"{value:.3g} {unit}".strip() if value < 1000 else f"{value:,.0f} {unit}".strip()
    wanted = "" if limit is None else f"{'>=' if least else '<='} {limit:g} {unit}".strip()
    RESULTS.append((what, shown, wanted, ratio))
    verdict = "" if ratio is None else f"{ratio:5.2f} of the limit" + ("" if ratio <= 1 else "   MISSED")
    print(f"{what:<58} {shown:>12}   {wanted:<10} {verdict}".rstrip(), flush=True)


def config(root: Path, count: int, driver: str = "") -> list[str]:
    """Return the arguments of an agent that serves `count` simulated devices.

    driver: the DRA driver for claims of the devices; "" for an agent without DRA.
    """
    path = root / "config.yaml"
    simulated = {"count": count, "numa": 2, "unhealthy_file": str(root / "unhealthy" / "list")}
    (root / "unhealthy").mkdir(exist_ok=True)
    resource: dict[str, Any] = {"name": "example.com/bench", "devices": [{"simulated": simulated}]}
    if driver:
        resource |= {"driver": driver, "dra": {"share": "50%"}}
    path.write_text(json.dumps({"resources": [resource]}))
    return [
        "-m",
        "dra_bridge" if driver else "deviceplugin",
        "run",
        "--config",
        str(path),
        *ANY_CONFIG,
        "--kubelet-root",
        str(root),
        "--log-level",
        "error",
    ]


@contextlib.contextmanager
def served(count: int, *more: str) -> Iterator[tuple[Kubelet, Process]]:
    """Run the agent with `count` devices. The context begins when the kubelet has the agent's first device list."""
    with Kubelet() as node, process(*config(node.root, count), *more) as agent:
        node.wait(lambda: node.lists, "list")
        yield node, agent


# --- the measurements ---


def restart() -> None:
    """Measure the time from a new socket of the kubelet to the agent's Register."""
    with served(8) as (node, _):
        node.restart()
        times = [node.restart() * 1e3 for _ in range(20)]
    result("kubelet.sock back to Register, median of 20", statistics.median(times), "ms", 10)
    result("kubelet.sock back to Register, worst of 20", max(times), "ms", 50)


def allocate() -> None:
    """Compare Allocate of the framework with Allocate of a servicer that is written without the framework."""
    rounds, calls, seconds = (20, 50, 0.1) if QUICK else (100, 100, 0.2)  # short turns: both programs see the same load
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["dev-3"])])
    with Kubelet() as node, contextlib.ExitStack() as stack:
        rival_address = f"unix:{node.root / 'bare.sock'}"
        plugin = ("-m", "tests.bench.plugin")
        ours = stack.enter_context(process(*plugin, "framework", "--kubelet-root", str(node.root), "--log-level=error"))
        bare = stack.enter_context(process(*plugin, "bare", rival_address))
        node.wait(lambda: node.lists, "list")
        addresses = (node.plugin, rival_address)
        stubs = []
        for address in addresses:
            channel = stack.enter_context(grpc.insecure_channel(address, options=OPTIONS))
            grpc.channel_ready_future(channel).result(20)
            stubs.append(pb_grpc.DevicePluginStub(channel))
        answers = [stub.Allocate(request) for stub in stubs]
        for one in answers[0].container_responses:
            one.ClearField("annotations")  # only the framework's response has annotations (the devices' identities)
        assert answers[0] == answers[1], "both must do the same"
        p50 = in_turn(stubs, request, rounds, calls)
        result("Allocate p50, one caller", p50[0], "ms", None)
        result("Allocate p50, one caller, bare grpc.aio", p50[1], "ms", None)
        result("Allocate p50 against bare grpc.aio", p50[0] / p50[1], "", 1.3)
        callers = []
        for _ in range(2):
            caller = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.caller", "4"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            callers.append(stack.enter_context(caller))
        rates: tuple[list[float], list[float]] = ([], [])
        costs: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for address, server, into, cost in zip(addresses, (ours, bare), rates, costs, strict=True):
                before = server.cpu
                done = together(callers, address, seconds)
                if turn:  # the first turn is a warm-up
                    into.append(done / seconds)
                    cost.append((server.cpu - before) / done)
        rate = [statistics.median(one) for one in rates]
        cpu = [sum(one) / len(one) for one in costs]
        result("Allocate calls/s, 8 callers", rate[0], "", None)
        result("Allocate calls/s, 8 callers, bare grpc.aio", rate[1], "", None)
        beside = statistics.median(one / other for one, other in zip(*rates, strict=True))
        result("Allocate calls/s, 8 callers, against bare grpc.aio", beside, "", 0.8, least=True)
        result("CPU of a call, against bare grpc.aio", cpu[0] / cpu[1], "", None)


def in_turn(
    stubs: Sequence[pb_grpc.DevicePluginStub], request: pb.AllocateRequest, rounds: int, calls: int
) -> list[float]:
    """Call Allocate `calls` times on each of two servicers, in `rounds` rounds; return both medians in ms."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for stub, into in zip(stubs, taken, strict=True):
            for _ in range(calls):
                began = time.perf_counter()
                stub.Allocate(request)
                into.append(time.perf_counter() - began)
    return [statistics.median(times) * 1e3 for times in taken]


def adopted() -> None:
    """Compare Allocate of an adopted vendor's plugin through the agent with a program that only forwards the bytes."""
    rounds, calls = (20, 50) if QUICK else (100, 100)
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["dev-3"])])
    with Kubelet() as node, contextlib.ExitStack() as stack:
        directory, file = node.root / "adopted", node.root / "config.yaml"
        file.write_text(json.dumps({"resources": [{"name": "example.com/bench", "devices": [{"plugin": {}}]}]}))
        options = ["--config", str(file), "--adopt", str(directory), "--kubelet-root", str(node.root)]
        agent = stack.enter_context(process("-m", "deviceplugin", "run", *options, "--log-level=error"))
        wait_for("the agent's kubelet.sock", (directory / "kubelet.sock").exists, 30)
        plugin = ("-m", "tests.bench.plugin")
        stack.enter_context(process(*plugin, "vendor", str(directory)))
        node.wait(lambda: node.lists, "list")
        forwarder = f"unix:{node.root / 'forwarder.sock'}"
        stack.enter_context(process(*plugin, "forwarder", forwarder, f"unix:{directory / 'vendor.sock'}"))
        stubs = []
        for address in (node.plugin, forwarder):
            channel = stack.enter_context(grpc.insecure_channel(address, options=OPTIONS))
            grpc.channel_ready_future(channel).result(20)
            stubs.append(pb_grpc.DevicePluginStub(channel))
        p50 = in_turn(stubs, request, rounds, calls)
        result("adopted: Allocate p50, one caller", p50[0], "ms", None)
        result("adopted: Allocate p50, one caller, a forwarder of bytes", p50[1], "ms", None)
        write = asyncio.run(grants(1000 if QUICK else 5000))
        result("adopted: a grant in the register, in memory", write, "ms", None)
        result("adopted: Allocate p50 without it, against that forwarder", (p50[0] - write) / p50[1], "", 1.3)
        result("resident, 8 adopted devices", agent.settled() / MB, "MB", 48)


async def grants(count: int) -> float:
    """Return the median time of a grant in ms, if the agent keeps its records of holders only in memory."""
    register, times = Register(), []
    for _ in range(count):
        began = time.perf_counter()
        await register.grant("example.com/bench", {"dev-3": "dev-3"})
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def together(callers: Sequence[subprocess.Popen[str]], address: str, seconds: float) -> int:
    """Make all callers call Allocate at the same time; return the number of completed calls."""
    for caller in callers:
        assert caller.stdin is not None
        caller.stdin.write(f"{address} {seconds}\n")
        caller.stdin.flush()
    return sum(int(caller.stdout.readline()) for caller in callers if caller.stdout is not None)


def change() -> None:
    """Measure the time from a change of a device's health (in a file) to the kubelet's new device list."""
    for count, limit in ((8, 20), (10_000, 150)):
        with served(count) as (node, _):
            times = []
            for turn in range(5 if QUICK else 20):
                wanted = [f"sim-{turn % 8}"] if turn % 2 == 0 else []
                new = node.root / "new"
                new.write_text("".join(f"{name} broken\n" for name in wanted))
                before = len(node.lists)
                began = time.monotonic()
                os.replace(new, node.root / "unhealthy" / "list")
                node.wait(lambda: len(node.lists) > before and node.lists[-1][1] == wanted, "list")  # noqa: B023
                times.append((node.lists[-1][0] - began) * 1e3)
        result(f"a device's change to the list, {count:,} devices, median", statistics.median(times), "ms", limit)


def start() -> None:
    """Measure the time from the start of the agent's process to Register."""
    times, cpu = [], []
    for _ in range(3 if QUICK else 10):
        with Kubelet() as node, process(*config(node.root, 8)) as agent:
            node.wait(lambda: node.registered, "Register")
            cpu.append(agent.cpu)
            times.append(node.registered[-1][0] - agent.began)
    result("process start to Register, median", statistics.median(times), "s", 0.6)
    result("process start to Register, CPU", statistics.median(cpu), "s", None)


def memory() -> None:
    """Measure the agent's resident memory after it has stopped growing."""
    for count, limit in ((8, 48), (10_000, 64)):
        with served(count) as (_, agent):
            result(f"resident, {count:,} devices", agent.settled() / MB, "MB", limit)
    address = free_address()
    with served(8, "--metrics-address", address) as (_, agent):
        scrape(address)
        result("resident, 8 devices, metrics scraped", agent.settled() / MB, "MB", 51)


def free_address() -> str:
    """Return an address of this machine with an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def get(address: str, path: str) -> float:
    """Read a page of the agent with Prometheus' headers; return the duration in seconds."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers={"Accept-Encoding": "gzip", "Accept": bench_metrics.ACCEPT})
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    assert answer.read()
    connection.close()
    return time.perf_counter() - began


def scrape(address: str) -> None:
    """Read the metrics ten times."""
    for _ in range(10):
        get(address, "/metrics")


def flat() -> None:
    """Measure the growth of memory, threads and open files over many kubelet restarts and Allocates."""
    restarts, calls = (40, 5_000) if QUICK else (200, 50_000)
    with served(8) as (node, agent):
        for _ in range(20):
            node.restart()
        before = (agent.settled(), agent.threads, agent.descriptors)
        # A restart leaves cyclic garbage, which Python collects only after some hundred restarts. So the highest of
        # these sizes includes garbage, and the lowest shows the lasting growth.
        sizes = []
        for _ in range(6):
            for _ in range(restarts // 2):
                node.restart()
            sizes.append(agent.settled())
        result(f"resident, most in between over {3 * restarts} restarts", (max(sizes) - before[0]) / MB, "MB", None)
        grown(f"{3 * restarts} kubelet restarts", agent, before, min(sizes))
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["sim-3"])])
        with grpc.insecure_channel(node.plugin, options=OPTIONS) as channel:
            stub = pb_grpc.DevicePluginStub(channel)
            for _ in range(calls // 20):
                stub.Allocate(request)
            before = (agent.settled(), agent.threads, agent.descriptors)
            for _ in range(calls):
                stub.Allocate(request)
            grown(f"{calls:,} Allocates", agent, before)


def grown(what: str, agent: Process, before: tuple[float, int, int], resident: float | None = None) -> None:
    """Print the growth of the agent's memory, threads and open files since `before`.

    resident: the present resident memory in bytes; None to measure it now.
    """
    resident = agent.settled() if resident is None else resident
    result(f"resident, growth over {what}", max(0.0, resident - before[0]) / MB, "MB", 1.0)
    result(
        f"threads and open files more after {what}",
        max(0, agent.threads - before[1]) + max(0, agent.descriptors - before[2]),
        "",
        1,
    )


def metrics() -> None:
    """Measure the duration of a scrape on a large node, and the memory that metrics need."""
    scrapes = 1_000 if QUICK else bench_metrics.SCRAPES
    found = bench_metrics.measure(scrapes)
    result(f"scrape, 64 devices, 200 holders, {found.lines} lines, p50", found.p50_ms, "ms", 30.0)
    result("scrape, p99", found.p99_ms, "ms", None)
    result("resident, more with metrics", found.settled_mb, "MB", 12.0)
    result(f"resident, growth over {scrapes:,} scrapes", max(0.0, found.growth_mb), "MB", 0.5)


def client() -> None:
    """Measure the memory and the speed of the bridge's API client."""
    measured = bench_client.measure()
    result("the bridge's modules with the API client, resident", measured.resident / MB, "MB", 62)
    result("GET of a Node over a kept connection, median", measured.seconds * 1e3, "ms", 1.5)


def claims() -> None:
    """Measure the list of all claims that a device's move from DRA to the plugin needs, for few, many, large claims."""
    few = bench_claims.measure(10, 2_000)
    for what, count, size in (("10", 10, 2_000), ("30,000", 30_000, 2_000), ("200 of 500 kB", 200, 500_000)):
        listed = bench_claims.measure(count, size)
        assert listed.found == 10
        result(f"a list of {what} claims: bytes", listed.size / MB, "MB", None)
        result(f"a list of {what} claims: bytes, against 10", listed.size / few.size, "", None)
        result(f"a list of {what} claims: requests", listed.requests, "", None)
        result(f"a list of {what} claims", listed.seconds, "s", None)
        result(f"a list of {what} claims: resident, more at the most", listed.peak / MB, "MB", 24)


def bridge() -> None:
    """Measure the memory of an agent with device plugin and DRA that uses a kubeconfig and serves one pod by each."""
    with FakeApiServer() as server, FakeNode(server, "n1") as node:
        made = server.create(device_class("example.com/bench", "bench.example.com"))
        file = written(node.root / "kubeconfig", server.url, {"token": "t"})
        more = ("--kubeconfig", str(file), "--node-name", "n1", *node.arguments)
        with process(*config(node.root, 8, "bench.example.com"), *more) as agent:
            wait_for("slices", lambda: len(server.objects("resourceslices")) > 0, 60)
            node.start_pod("limits", {"example.com/bench": 1}).wait_running()
            node.start_pod("claim", template={made["metadata"]["name"]: 1}).wait_running()
            result("resident, dra-bridge run with a kubeconfig", agent.settled() / MB, "MB", 75)


def growth() -> None:
    """Measure how an agent's start, calls to the kubelet, memory and CPU grow with the number of resources."""
    before: tuple[int, int] | None = None
    for count in (1, 16, 64):
        names = [f"example.com/r{number}" for number in range(count)]
        with FakeApiServer() as server, FakeNode(server, "n1") as node:
            path, file = node.root / "config.yaml", written(node.root / "kubeconfig", server.url, {"token": "t"})
            resources = [
                {
                    "name": name,
                    "driver": f"r{number}.example.com",
                    "devices": [{"simulated": {"count": 4}}],
                    "dra": {"share": "50%"},
                }
                for number, name in enumerate(names)
            ]
            path.write_text(json.dumps({"resources": resources}))
            options = ("--config", str(path), *ANY_CONFIG, *node.arguments, "--log-level", "error")
            more = ("--kubeconfig", str(file), "--node-name", "n1")
            with process("-m", "dra_bridge", "run", *options, *more) as agent:
                began = time.monotonic()
                for name in names:
                    node.wait_devices(name, 2, timeout=120)

                def offered(server: FakeApiServer = server) -> int:
                    return sum(len(body["spec"].get("devices") or ()) for body in server.objects("resourceslices"))

                wait_for("slices", lambda count=count: offered() == 2 * count, 120)  # type: ignore[misc]
                result(f"{count} resources: served on both sides", time.monotonic() - began, "s", 12)
                calls = len(node.registrations) + sum(len(node.updates(name)) for name in names)
                result(f"{count} resources: Register and lists", calls, "", None)
                if before is not None:
                    of, then = before
                    times = (calls / then) / (count / of)
                    result(f"{count} resources: these, a resource, against {of}", times, "", 1)
                before = count, calls
                resident, cpu, since = agent.settled(), agent.cpu, time.monotonic()
                time.sleep(10 if QUICK else 20)
                result(f"{count} resources: CPU at rest", 100 * (agent.cpu - cpu) / (time.monotonic() - since), "%", 1)
                result(f"{count} resources: resident", resident / MB, "MB", 80)


def flood() -> None:
    """Measure how requests of 100 clients without a token slow down other clients.

    Each of the 100 clients repeatedly sends 300 requests for /status at once.
    """
    seconds = 5 if QUICK else 20
    for count in (64, 5_000):
        address = free_address()
        with served(count, "--metrics-address", address) as (node, agent), contextlib.ExitStack() as stack:
            channel = stack.enter_context(grpc.insecure_channel(node.plugin, options=OPTIONS))
            stub = pb_grpc.DevicePluginStub(channel)
            scrape(address)
            noticed(stub, address, 1)
            before = noticed(stub, address, seconds / 2)
            clients = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.flood", address, "100", "300"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(clients)
            during = noticed(stub, address, seconds)
            for name, path, limit in (("scrape", "/metrics", 1.0), ("/healthz", "/healthz", 0.2)):
                for when, pages, most in (("before", before.pages, None), ("flooded", during.pages, limit)):
                    times = pages[path]
                    result(f"{when}, {count:,} devices: {name}, worst of {len(times)}", max(times), "s", most)
            ratio = during.allocate / before.allocate
            result(f"flooded, {count:,} devices: Allocate p50, against before", ratio, "", 2)
            result(f"flooded, {count:,} devices: resident at the most", agent.highest / MB, "MB", 128)
            clients.communicate()


class Noticed(NamedTuple):
    """Durations in seconds. allocate: the median of the Allocates. pages: the duration of each request, by path."""

    allocate: float
    pages: dict[str, list[float]]


def noticed(stub: pb_grpc.DevicePluginStub, address: str, seconds: float) -> Noticed:
    """Call Allocate with short pauses, as a kubelet does, and read pages in other threads; return the durations."""
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["sim-3"])])
    pages: dict[str, list[float]] = {"/metrics": [], "/healthz": []}
    over = threading.Event()

    def read(path: str) -> None:
        while not over.is_set():
            pages[path].append(get(address, path))
            over.wait(0.1)

    threads = [threading.Thread(target=read, args=(path,)) for path in pages]
    for thread in threads:
        thread.start()
    times, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        stub.Allocate(request)
        times.append(time.perf_counter() - began)
        time.sleep(0.005)
    over.set()
    for thread in threads:
        thread.join()
    return Noticed(statistics.median(times), pages)


def hostile() -> None:
    """Measure config files and calls that are made to take a long time."""
    worst, name = 0.0, ""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.yaml"
        for what, (text, _) in bombs().items():
            file.write_text(text)
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "deviceplugin", "validate", str(file)], capture_output=True, check=False
            )
            worst, name = max((worst, name), (time.perf_counter() - began, what))
    result(f"validate of hostile files, worst ({name})", worst, "s", 2)
    with served(8) as (node, _), grpc.insecure_channel(node.plugin, options=OPTIONS) as channel:
        ids = [f"sim-{number % 10_000}" for number in range(20_000)]
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        stub = pb_grpc.DevicePluginStub(channel)
        began = time.perf_counter()
        with contextlib.suppress(grpc.RpcError):
            stub.Allocate(request)
        size = request.ByteSize() // 1000
        result(f"Allocate of {size} KB of repeated ids, refused", (time.perf_counter() - began) * 1e3, "ms", 100)


PARTS: dict[str, Callable[[], None]] = {
    "restart": restart,
    "allocate": allocate,
    "adopted": adopted,
    "change": change,
    "start": start,
    "memory": memory,
    "flat": flat,
    "metrics": metrics,
    "client": client,
    "claims": claims,
    "bridge": bridge,
    "growth": growth,
    "flood": flood,
    "hostile": hostile,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurements; return 1 if a limit is exceeded."""
    global QUICK
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options: Any = parser.parse_args(argv)
    if unknown := sorted(set(options.parts) - PARTS.keys()):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    QUICK = options.quick
    with tempfile.TemporaryDirectory() as bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode
        # This run of the agent writes the bytecode that an image contains, so that no measured process has to compile.
        address = free_address()
        with served(8, "--metrics-address", address):
            scrape(address)
        for name in options.parts or PARTS:
            PARTS[name]()
    missed = [what for what, _, _, ratio in RESULTS if ratio is not None and ratio > 1]
    print(f"{len(RESULTS)} figures, {len(missed)} limits missed" + "".join(f"\n  {what}" for what in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
