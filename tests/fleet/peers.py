"""The measurements of `tests.fleet.parts` for the Go example driver, which uses the helper kubeletplugin."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tests.bench.peers import class_of, peer, rights
from tests.fleet.audit import of_user
from tests.fleet.nodes import ROOTS
from tests.fleet.parts import Counts, Measured, Rest, at_rest, each, wait_for
from tests.fleet.plane import DEVICES, names_of
from tests.fleet.workers import Worker

PROGRAM: Final = "dra-example-kubeletplugin"
DRIVER: Final = "peer.example.com"
USER: Final = "default:peer"
FIRST: Final = 9000
"""The number of the first node with a Go driver."""


@dataclass
class Peers:
    """The requests of Go drivers.

    start: requests of a driver at its start. claim: requests of a driver for a claim. rest: requests of a driver in a
    minute in which nothing changes, without watches. beside: the figures of the agents during the same time.
    """

    nodes: int
    start: Counts
    rest: Counts
    watches: float
    claim: Counts
    beside: Rest


def measure(measured: Measured, worker: Worker, count: int, seconds: float, *, reopened: bool = False) -> Peers | None:
    """Run `count` Go drivers beside the agents, and return their figures; None if the program is missing.

    seconds, reopened: the parameters of `Measured.rest`, by which agents and drivers are observed.
    """
    program = peer(PROGRAM)
    if program is None:
        return None
    plane, names = measured.plane, names_of(count, FIRST)
    plane.add_nodes(names)
    plane.api.apply([*rights(), class_of("peer", DRIVER)])
    worker.order("kubelets", names=names).result(120)
    measured.requests(USER)
    with drivers(measured, program, names):
        wait_for(lambda: len(_slices(measured)) >= count, 120.0, f"slices of {count} Go drivers")
        measured.quiet()
        start = [one for one in measured.requests(USER) if not at_rest(one)]
        beside = measured.rest(seconds, reopened=reopened)
        rest = of_user(measured.last, USER)

        def pod(node: str) -> None:
            name = f"{node}-claim"
            worker.order("pod", name=name, node=node, template={"peer": 1}).result(60)
            worker.order("running", name=name, timeout=60).result(90)
            worker.order("delete", name=name, timeout=60).result(90)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(pod, names))
        measured.quiet()
        claims = [one for one in measured.requests(USER) if not at_rest(one)]
    others = [one for one in rest if one.verb != "watch"]
    a_minute = {what: number * 60 / seconds for what, number in each(others, count).items()}
    watches = (len(rest) - len(others)) / count * 60 / seconds
    return Peers(count, each(start, count), a_minute, watches, each(claims, count), beside)


def _slices(measured: Measured) -> Sequence[object]:
    selector = f"spec.driver={DRIVER}"
    return measured.plane.api.list("ResourceSlice", None, "resource.k8s.io/v1", field_selector=selector)


@contextmanager
def drivers(measured: Measured, program: str, names: Sequence[str]) -> Iterator[None]:
    """Run a Go driver for each of these nodes."""
    processes = []
    try:
        for name in names:
            root = ROOTS / name
            config = measured.plane.service_account_kubeconfig("peer", bound_to=("Node", name))
            options = {
                "node-name": name,
                "driver-name": DRIVER,
                "num-devices": DEVICES,
                "cdi-root": root / "cdi",
                "kubeconfig": config,
                "kubelet-plugins-directory-path": root / "plugins",
                "kubelet-registrar-directory-path": root / "plugins_registry",
            }
            with (measured.plane.logs / f"{name}.log").open("wb") as log:
                command = [program, *(f"--{option}={value}" for option, value in options.items())]
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
