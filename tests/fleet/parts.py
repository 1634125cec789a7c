"""The measurements of a run; each returns figures, which `tests.fleet.limits` compares with limits."""

from __future__ import annotations

import contextlib
import json
import math
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dra_bridge.rollout import fleet as rollout_fleet
from dra_bridge.rollout import progress
from tests.fleet.audit import Log, Request, counts, of_user, spread
from tests.fleet.plane import AGENTS, DRIVER, NAMESPACE, ControlPlane, Flows, names_of
from tests.fleet.workers import PERIOD, Fleet

INTERVAL: Final = 0.15
"""Seconds between the starts of two nodes."""
QUIET: Final = PERIOD + 2.0
"""Seconds without a request after which a start, a move or a claim is over.

An agent reads its node's files every PERIOD seconds, and may send a request after that.
"""

Counts = dict[str, float]
"""Requests by verb and resource, as text."""


def at_rest(request: Request) -> bool:
    """Return whether agents make this request even if nothing changes: a watch, or a read of the API versions."""
    return request.verb == "watch" or request.what.startswith("/apis")


def each(requests: Iterable[Request], count: int) -> Counts:
    """Return the requests by verb and resource, divided by this number of nodes or claims."""
    found = counts(requests)
    return {f"{verb} {what}": number / count for (verb, what), number in sorted(found.items())}


@dataclass
class Rest:
    """Figures of a fleet at rest, while nothing changes.

    seconds: the time of observation. requests: by kind, per agent and minute, without watches. watches: the number that
    an agent opens in a minute. server_cpu: cores that the API server uses. agent_cpu: % of a core for an agent and its
    kubelet, whose files the agent reads every PERIOD seconds. server_mb, agent_mb: resident memory.
    """

    nodes: int
    seconds: float
    requests: Counts
    watches: float
    open_watches: int
    server_cpu: float
    server_mb: float
    agent_cpu: float
    agent_mb: float

    @property
    def a_minute(self) -> float:
        """The requests of an agent per minute, without watches."""
        return sum(self.requests.values())


@dataclass
class Size:
    """Figures at one size of the fleet.

    start: requests of an agent at its start. move: requests of an agent while its devices move from plugin to DRA.
    claim: requests of an agent for a claim. list_bytes: bytes of the lists that a starting agent requests, without the
    list of all claims. by_driver: bytes, seconds and requests of a list of the driver's slices.
    """

    nodes: int
    rest: Rest
    start: Counts
    move: Counts
    claim: Counts
    list_bytes: float
    by_driver: tuple[int, float, int]


@dataclass
class Restart:
    """Figures after a restart of the API server.

    lists, seconds, most: the number of the agents' lists, the time from the first to the last one, and the number in
    the busiest second. in_step: seconds from the start of the API server's process until all agents had all their
    watches. requests: per agent. rejected: the number of rejected requests, by flow schema.
    """

    nodes: int
    lists: int
    seconds: float
    most: int
    in_step: float
    requests: Counts
    too_many: int
    rejected: dict[str, int] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)


class Measured:
    """A control plane, its fleet, and the log of the agents' requests."""

    def __init__(self, plane: ControlPlane, nodes: Fleet) -> None:
        self.plane = plane
        self.fleet = nodes
        self.log: Log = plane.audit
        self.last: list[Request] = []
        """The requests of all users that the last call of `requests` has read."""
        self._read: list[Request] = []
        """The requests that were read from the log after the last call of `requests`."""

    def requests(self, user: str = AGENTS) -> list[Request]:
        """Return the requests of the agents since the last call."""
        self.last, self._read = self._since(), []
        return of_user(self.last, user)

    def _since(self) -> list[Request]:
        """Return the requests of all users since the last call of `requests`; that method returns them again."""
        self._read += self.log.more()
        return self._read

    def quiet(self) -> None:
        """Wait until there was no request for QUIET seconds, except those for which `at_rest` is true.

        Raises TimeoutError.
        """
        began = time.time()

        def over() -> bool:
            return time.time() - max([began, *(one.at for one in self._since() if not at_rest(one))]) > QUIET

        wait_for(over, 180.0, f"{QUIET:g} s without a request")

    def watching(self, since: float, seconds: float) -> dict[str, list[float]]:
        """Wait until each agent has opened WATCHES watches since a time (in Unix seconds), for `seconds` at most.

        Return, by node, the times at which its watches were opened.
        """

        def opened() -> dict[str, list[float]]:
            times: dict[str, list[float]] = {name: [] for name in self.fleet.names}
            for one in of_user(self._since(), AGENTS):
                if one.verb == "watch" and one.code == 200 and one.at >= since:
                    times[one.node].append(one.at)
            return times

        with contextlib.suppress(TimeoutError):
            wait_for(lambda: all(len(times) >= WATCHES for times in opened().values()), seconds, "all watch")
        return opened()

    def grow(self, count: int, **options: Any) -> list[str]:
        """Start nodes until there are `count`; return the new ones. options: passed to `Nodes.start`."""
        names = names_of(count)[len(self.fleet.names) :]
        self.plane.add_nodes(names)
        self.fleet.start(names, INTERVAL, **options)
        self.plane.wait_for(
            lambda: len(self.views(names)) == len(names), 120.0, f"{len(names)} agents have reported their devices"
        )
        self.fleet.check()
        return names

    def views(self, names: Collection[str]) -> list[rollout_fleet.NodeView]:
        """Return what `rollout` reads about these nodes, without nodes whose agents have not reported."""
        api, wanted = self.plane.api, set(names)
        nodes = [body for body in api.list("Node", None, "v1") if body["metadata"]["name"] in wanted]
        leases = [body for body in api.list("Lease", NAMESPACE) if body["metadata"]["name"] in wanted]
        slices = api.list("ResourceSlice", None, "resource.k8s.io/v1")
        views = rollout_fleet.views(DRIVER, nodes, slices, leases=leases)
        return [view for view in views if view.reported is not None]

    def rest(self, seconds: float, *, reopened: bool = False) -> Rest:
        """Observe the fleet for this number of seconds while nothing changes.

        reopened: first wait until the agents have reopened their watches, which all began together at the start.
        """
        self.quiet()
        self.requests()
        if reopened:
            self.watching(time.time(), LONGEST)
            self.requests()
        began, server = time.monotonic(), self.plane.usage()
        agents = [worker.usage() for worker in self.fleet.workers]
        time.sleep(seconds)  # the measured time
        took, now = time.monotonic() - began, self.plane.usage()
        after = [worker.usage() for worker in self.fleet.workers]
        requests, count = self.requests(), len(self.fleet.names)
        watches = [request for request in requests if request.verb == "watch"]
        others = [request for request in requests if request.verb != "watch"]
        gauge = "apiserver_longrunning_requests"
        cpu = sum(b.cpu - a.cpu for a, b in zip(agents, after, strict=True)) / took / count
        return Rest(
            count,
            took,
            {what: number * 60 / took for what, number in each(others, count).items()},
            len(watches) / count * 60 / took,
            int(sum(value for labels, value in self.plane.series(gauge)[gauge] if labels["verb"] == "WATCH")),
            (now.cpu - server.cpu) / took,
            now.resident,
            100 * cpu,
            sum(one.resident for one in after) / count,
        )

    def move(self, names: Sequence[str], share: str) -> Counts:
        """Annotate Nodes with the share of devices that is to be for claims, and wait until the devices have moved.

        Return the requests of the agents for each node.
        """
        self.requests()
        with ThreadPoolExecutor(4) as pool:
            patch = rollout_fleet.share_patch(DRIVER, share)
            list(pool.map(lambda name: self.plane.api.patch("Node", name, patch, api_version="v1"), names))
        wait_for(lambda: all(map(rollout_fleet.finished, self.views(names))), 180.0, f"{len(names)} nodes at {share}")
        self.quiet()
        mine = set(names)
        return each([one for one in self.requests() if one.node in mine and not at_rest(one)], len(names))

    def claims(self, names: Sequence[str]) -> Counts:
        """Run and delete a pod with a claim on each of these nodes; return the requests for each claim.

        Each pod runs until its node's Lease has the claim, and the next step comes when the Lease has no claim any
        more.
        """
        self.requests()

        def one(node: str) -> None:
            worker, name = self.fleet.of(node), f"{node}-claim"
            worker.order("pod", name=name, node=node, template={DRIVER: 1}).result(60)
            worker.order("running", name=name, timeout=60).result(90)
            wait_for(lambda: self._held(node), 60.0, f"the Lease of {node} names the claim")
            worker.order("delete", name=name, timeout=60).result(90)
            wait_for(lambda: not self._held(node), 60.0, f"the Lease of {node} names no claim")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, names))
        mine = set(names)
        return each([one for one in self.requests() if one.node in mine and not at_rest(one)], len(names))

    def _held(self, node: str) -> bool:
        """Return whether the report in a node's Lease has a holder."""
        report = progress.read(DRIVER, [self.plane.api.get("Lease", node, NAMESPACE)])
        assert report is not None
        return any(device.holder for one in report.resources.values() for device in one.devices.values())

    def lists_of(self, node: str) -> dict[str, int]:
        """Return, for each list with which an agent's watches begin, how many bytes the API server sends."""
        slices = "/apis/resource.k8s.io/v1/resourceslices"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        lists = {
            "node": ("/api/v1/nodes", f"metadata.name={node}"),
            "lease": (leases, f"metadata.name={node}"),
            "slices of the node": (slices, f"spec.nodeName={node}"),
            "slices of the driver without a node": (slices, f"spec.driver={DRIVER},spec.nodeName="),
        }
        found = {}
        for what, (path, selector) in lists.items():
            query = urllib.parse.urlencode({"fieldSelector": selector, "limit": 500})
            code, body = self.plane.api.raw("GET", f"{path}?{query}")
            assert code == 200, body
            found[what] = len(body)
        return found

    def restart(self, downtime: float, seconds: float) -> Restart:
        """Restart the API server; return the agents' requests until all have their watches, or for `seconds`."""
        self.quiet()
        self.requests()
        begun = self.plane.restart_apiserver(downtime)
        opened = self.watching(begun, seconds)
        self.quiet()
        requests = self.requests()
        count = len(self.fleet.names)
        lists = spread([one for one in requests if one.verb == "list" and one.code == 200])
        last = [sorted(at)[WATCHES - 1] - begun if len(at) >= WATCHES else math.inf for at in opened.values()]
        flows = self.plane.flows()
        return Restart(
            count,
            lists.number,
            lists.seconds,
            lists.most,
            max(last),
            each(requests, count),
            flows.too_many,
            dict(flows.rejected),
            waited_of(flows),
        )


LONGEST: Final = 600.0
"""Seconds after which all watches were reopened: a watch lasts 480 s at most."""
WATCHES: Final = 4
"""The watches of an agent with one driver: its Node, its Lease, slices of its node, slices without a node."""


def waited_of(flows: Flows) -> dict[str, int]:
    """Return the requests that were in a queue, by flow schema."""
    return {schema: number for schema, number in flows.waited.items() if number}


def wait_for(what: Callable[[], object], timeout: float, text: str) -> None:
    """Wait until the condition is true, with a check every two seconds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {text}")
        time.sleep(2.0)


def by_driver(plane: ControlPlane) -> tuple[int, float, int]:
    """List the driver's slices as `rollout` and `status` do: return bytes, seconds and requests."""
    size, requests, more, took = 0, 0, "", 0.0
    path = "/apis/resource.k8s.io/v1/resourceslices"
    while True:
        query = {"fieldSelector": f"spec.driver={DRIVER}", "limit": "500", **({"continue": more} if more else {})}
        began = time.monotonic()
        code, body = plane.api.raw("GET", f"{path}?{urllib.parse.urlencode(query)}")
        took += time.monotonic() - began
        assert code == 200, body
        size, requests, more = size + len(body), requests + 1, json.loads(body)["metadata"].get("continue", "")
        if not more:
            return size, took, requests


def growth(measured: Measured, sizes: Sequence[int], seconds: float) -> list[Size]:
    """At each size, measure starts, moves of devices from plugin to DRA, claims, and a time without changes."""
    found = []
    for size in sizes:
        measured.requests()
        new = measured.grow(size)
        started = each([one for one in measured.requests() if one.verb != "watch"], len(new))
        moved = measured.move(new, "all")
        claimed = measured.claims(new[:40])
        rest = measured.rest(seconds)
        listed = sum(measured.lists_of(new[0]).values())
        found.append(Size(size, rest, started, moved, claimed, listed, by_driver(measured.plane)))
        show(found[-1])
    return found


def show(figures: Any) -> None:
    """Print figures."""
    print(asdict(figures), flush=True)
