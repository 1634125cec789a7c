"""Processes with many nodes each (`tests.fleet.nodes`), and the orders to these processes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

from tests.cluster import isolate
from tests.fleet.plane import ControlPlane, Usage
from tests.programs import image_environment

PERIOD: Final = 10.0
"""Seconds between two reads of a node's files by its agent. The agent's own value is 2.

These reads make no requests to the API server. With hundreds of nodes, two cores are too slow for a read every 2 s.
"""


class OrderError(Exception):
    """An order failed in its process."""


class Worker:
    """A process with many nodes."""

    def __init__(self, plane: ControlPlane, number: int, period: float = PERIOD) -> None:
        self.names: list[str] = []
        self._orders: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        address = f"{isolate.SERVICE_IP}:443"
        command = [sys.executable, "-m", "tests.fleet.nodes", str(plane.accounts), address, str(period)]
        server = {"KUBERNETES_SERVICE_HOST": isolate.SERVICE_IP, "KUBERNETES_SERVICE_PORT": "443"}
        with (plane.logs / f"nodes-{number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**image_environment(), **server},
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._orders.pop(answer["order"])
            if "error" in answer:
                future.set_exception(OrderError(answer["error"]))
            else:
                future.set_result(answer["result"])
        for future in list(self._orders.values()):
            future.set_exception(OrderError("the process has ended"))

    def order(self, do: str, **arguments: Any) -> Future[Any]:
        """Send an order; return a future with its result, or with an OrderError."""
        future: Future[Any] = Future()
        assert self.process.stdin is not None
        with self._lock:
            number = next(self._numbers)
            self._orders[number] = future
            self.process.stdin.write(json.dumps({"order": number, "do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        return future

    def usage(self) -> Usage:
        """Return the CPU time and memory of the process."""
        return Usage.of(self.process.pid)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Fleet:
    """All processes, and the nodes in them."""

    def __init__(self, plane: ControlPlane, workers: Sequence[Worker]) -> None:
        self.plane = plane
        self.workers = workers

    @property
    def names(self) -> list[str]:
        """The names of all nodes."""
        return [name for worker in self.workers for name in worker.names]

    def of(self, node: str) -> Worker:
        """Return the process of a node."""
        return next(worker for worker in self.workers if node in worker.names)

    def start(self, names: Sequence[str], interval: float, **options: Any) -> None:
        """Start nodes with agents, one per interval (in seconds)."""
        parts = [list(names[number :: len(self.workers)]) for number in range(len(self.workers))]
        orders = []
        for worker, part in zip(self.workers, parts, strict=True):
            worker.names += part
            orders.append(worker.order("start", names=part, interval=interval * len(self.workers), **options))
        for order in orders:
            order.result(600)

    def check(self) -> None:
        """Raise OrderError if an agent has ended."""
        for worker in self.workers:
            if failed := worker.order("failed").result(60):
                raise OrderError("; ".join(failed))


@contextmanager
def fleet(plane: ControlPlane, count: int, period: float = PERIOD) -> Iterator[Fleet]:
    """Run this number of processes while the context is open."""
    plane.accounts.mkdir(exist_ok=True)
    (plane.accounts / "admin").write_text(plane.admin_token)
    if not (plane.accounts / "ca.crt").exists():
        (plane.accounts / "ca.crt").symlink_to(plane.directory / "pki" / "ca.crt")
    workers: list[Worker] = []
    try:
        workers += (Worker(plane, number, period) for number in range(count))
        yield Fleet(plane, workers)
    finally:
        for worker in workers:
            worker.close()
