"""The load that one node can have: an agent process on a fake node, with many devices, claims and pods."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deviceplugin.testing.pods import FakePod
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class
from tests.bench.process import Process, process
from tests.fleet import page
from tests.fleet.limits import CLAIM_READS, NODE_FILES, NODE_GROWTH, NODE_MB, Limit
from tests.fleet.parts import wait_for
from tests.fleet.plane import DRIVER, RESOURCE
from tests.kubeconfigs import written
from tests.programs import ANY_CONFIG

DEVICES: Final = 300
CLAIMS: Final = 100
LIMITS: Final = 10
"""Number of pods with limits; with the pods with claims, there are as many pods as a kubelet runs (maxPods)."""
TIMEOUT: Final = 300.0


@dataclass
class Use:
    """The resources that an agent uses.

    mb: resident memory. ledger: bytes of the ledger's file, without its log of changes, whose size is limited. files:
    the number of open files. threads: the number of the process's threads.
    """

    mb: float
    ledger: int
    files: int
    threads: int


@dataclass
class OneNode:
    """A node's figures.

    first: the agent's use before the first pod. full: its use while all pods of the first round run. claims: seconds
    until the last of the pods with claims ran, which were started at once. gets: GET requests for each claim. leases:
    all writes of the Lease. early: the use after the first tenth of the rounds, when `early_pods` pods have ended.
    late: the use after the last round, when all `pods` pods have ended.
    """

    first: Use
    full: Use
    claims: float
    gets: float
    leases: int
    early: Use
    late: Use
    early_pods: int
    pods: int
    seconds: float


def use(agent: Process, root: Path) -> Use:
    """Return the memory, ledger size, open files and threads of an agent. root: the directory of its kubelet."""
    (ledger,) = (root / "plugins").rglob("register.db")
    return Use(agent.resident / 1e6, ledger.stat().st_size, agent.descriptors, agent.threads)


def at_rest(agent: Process, root: Path) -> Use:
    """Return what `use` returns, once the agent's memory and files are stable."""
    agent.settled()
    return use(agent, root)


def start(node: FakeNode, number: int) -> list[FakePod]:
    """Start all pods of a round at once, the pods with claims first."""
    classes = {device_class(RESOURCE, DRIVER)["metadata"]["name"]: 1}

    def one(index: int) -> FakePod:
        wants: dict[str, Any] = {"template": classes} if index < CLAIMS else {"limits": {RESOURCE: 1}}
        return node.start_pod(f"p{number}-{index}", **wants)

    return [one(index) for index in range(CLAIMS + LIMITS)]


def each(pods: Sequence[FakePod], do: Callable[[FakePod], object]) -> None:
    """Call a function with each pod, all at the same time."""
    with ThreadPoolExecutor(len(pods)) as pool:
        list(pool.map(do, pods))


def measure(count: int) -> OneNode:
    """Run `count` pods on a node, in rounds of as many pods as the node can have at once."""
    with FakeApiServer() as server, FakeNode(server, "n1") as node:
        server.create(device_class(RESOURCE, DRIVER))
        path, file = node.root / "config.yaml", written(node.root / "kubeconfig", server.url, {"token": "t"})
        resource = {"name": RESOURCE, "driver": DRIVER, "devices": [{"simulated": {"count": DEVICES}}]}
        path.write_text(json.dumps({"resources": [{**resource, "dra": {"share": "50%"}}]}))
        options = ("--config", str(path), *ANY_CONFIG, "--log-level", "error", *node.arguments)
        more = ("--kubeconfig", str(file), "--node-name", "n1")
        with process("-m", "dra_bridge", "run", *options, *more) as agent:

            def offered() -> int:
                return sum(len(body["spec"].get("devices") or ()) for body in server.objects("resourceslices"))

            node.wait_devices(RESOURCE, DEVICES // 2, timeout=TIMEOUT)
            wait_for(lambda: offered() == DEVICES // 2, TIMEOUT, "slices")
            began = time.monotonic()
            first = at_rest(agent, node.root)
            marks: dict[int, Use] = {}
            gets = leases = done = 0
            full, claims = first, 0.0
            rounds = max(2, -(-count // (CLAIMS + LIMITS)))
            for number in range(rounds):
                server.log.clear()
                started = time.monotonic()
                pods = start(node, number)
                each(pods[:CLAIMS], lambda pod: pod.wait_running(TIMEOUT))
                if number == 0:
                    claims = time.monotonic() - started
                each(pods, lambda pod: pod.wait_running(TIMEOUT))
                if number == 0:
                    full = at_rest(agent, node.root)
                each(pods, lambda pod: pod.delete(TIMEOUT))
                gets += sum(one.method == "GET" and "/resourceclaims/" in one.path for one in server.log)
                leases += sum(one.method == "PATCH" and "/leases/" in one.path for one in server.log)
                server.compact()  # The fake server would keep all former objects.
                done += len(pods)
                if number + 1 in (max(1, rounds // 10), rounds):
                    marks[done] = at_rest(agent, node.root)
                    print(f"{done} pods after {time.monotonic() - began:.0f} s: {marks[done]}", flush=True)
    early_pods, late_pods = min(marks), max(marks)
    per_claim = gets / (rounds * CLAIMS)
    seconds = time.monotonic() - began
    return OneNode(
        first, full, claims, per_claim, leases, marks[early_pods], marks[late_pods], early_pods, done, seconds
    )


def limits(one: OneNode) -> list[Limit]:
    """Return the limits for one node, with its figures."""
    return [
        Limit("resident MB of the agent with all pods", one.full.mb, NODE_MB, "MB"),
        Limit("resident memory after all pods against before", one.late.mb / one.early.mb, NODE_GROWTH),
        Limit("bytes of its ledger after all pods against before", one.late.ledger / one.early.ledger, NODE_GROWTH),
        Limit("open files more than before", one.late.files - one.early.files, NODE_FILES),
        Limit("threads more than before", one.late.threads - one.early.threads, NODE_FILES),
        Limit("reads of a claim", one.gets, CLAIM_READS),
    ]


def section(one: OneNode) -> str:
    """Return the section of docs/scale.md about one node."""
    states = (
        (f"{DEVICES} devices, no pods", one.first),
        (f"{CLAIMS + LIMITS} pods, {CLAIMS} of them with claims", one.full),
        (f"no pods, after {one.early_pods:,}", one.early),
        (f"no pods, after {one.pods:,}", one.late),
    )
    rows = [(what, use.mb, use.ledger, use.files, use.threads) for what, use in states]
    return "\n".join(
        (
            f"The agent is a process of its own, kubelet and API server are the fakes. {CLAIMS} pods with claims that "
            f"start at once run after {page.cell(one.claims)} s. {one.pods:,} pods come and go within "
            f"{one.seconds / 60:.0f} minutes, {CLAIMS + LIMITS} at a time; the agent writes its Lease "
            f"{one.leases} times.\n",
            page.table(("state", "MB", "bytes of its ledger", "open files", "threads"), rows),
            page.of_limits(limits(one)),
        )
    )
