"""``python -m tests.fleet`` (or `tox -e fleet`): measures the requests of a fleet of agents to a real API server.

It writes docs/scale.md, where each part has its sections, and fails if a limit is missed. It needs root, and Go for
programs that are not built yet. The arguments are parts: `growth` observes fleets of several sizes at rest, moves their
devices from plugin to DRA, and runs claims; then it restarts the API server, and runs Go example drivers beside the
agents. `rest` observes a fleet for a longer time while nothing changes. The others are `commands`, `node` and `load`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from dra_bridge.node.slice_feed import HOLDERS
from tests.bench.peers import peer
from tests.cluster import build, isolate
from tests.fleet import commands, load, one_node, page, parts, peers
from tests.fleet.commands import Command
from tests.fleet.limits import (
    BUSIEST,
    CLAIM_READS,
    CLAIM_WRITES,
    COMMAND_MB,
    FIRST_OUTPUT,
    GROWTH,
    IN_STEP,
    MOVE_REQUESTS,
    POD_LISTS,
    REST_REQUESTS,
    SPREAD,
    Limit,
)
from tests.fleet.parts import Counts, Rest, Restart, Size
from tests.fleet.peers import Peers
from tests.fleet.plane import control_plane
from tests.fleet.workers import PERIOD, fleet

SIZES: Final = (50, 100, 200)
LARGE: Final = 15_000
REST: Final = 360.0
"""Seconds for which a fleet without changes is observed: about as long as the API server keeps a watch open."""


def total(requests: Counts) -> float:
    """Return the sum of requests of all kinds."""
    return sum(requests.values())


def reads(requests: Counts) -> Counts:
    """Return the requests with a verb that reads."""
    return {what: number for what, number in requests.items() if what.startswith(("get ", "list "))}


def writes(requests: Counts) -> Counts:
    """Return the requests with a verb that writes."""
    return {what: number for what, number in requests.items() if what not in reads(requests)}


def in_words(requests: Counts) -> str:
    """Return requests by verb and resource, as text."""
    return ", ".join(f"{page.cell(number)} {what}" for what, number in requests.items()) or "none"


def limits_of_growth(sizes: Sequence[Size]) -> list[Limit]:
    """Return the limits for a growing fleet, with its figures."""
    first, last = sizes[0], sizes[-1]
    return [
        Limit("requests of an agent whose 8 devices move", max(total(one.move) for one in sizes), MOVE_REQUESTS),
        Limit("reads of an agent for a claim", max(total(reads(one.claim)) for one in sizes), CLAIM_READS),
        Limit("writes of an agent for a claim", max(total(writes(one.claim)) for one in sizes), CLAIM_WRITES),
        Limit("requests of a start, largest fleet against smallest", total(last.start) / total(first.start), GROWTH),
        Limit("requests of a move, largest against smallest", total(last.move) / total(first.move), GROWTH),
        Limit("bytes of an agent's lists, largest against smallest", last.list_bytes / first.list_bytes, GROWTH),
        Limit("CPU of an agent at rest, largest against smallest", last.rest.agent_cpu / first.rest.agent_cpu, GROWTH),
    ]


def limits_of_restart(one: Restart) -> list[Limit]:
    """Return the limits for a restart of the API server, with its figures."""
    others = sum(number for schema, number in one.rejected.items() if schema not in OURS)
    return [
        Limit("seconds until all agents are in step", one.in_step, IN_STEP, "s"),
        Limit("seconds over which they list", one.seconds, SPREAD, "s", least=True),
        Limit("part of the lists in the busiest second", one.most / max(1, one.lists), BUSIEST),
        Limit("requests of others that are rejected", others, 0),
    ]


OURS: Final = ("dra-bridge",)
"""The flow schemas that only agents use."""


def page_of_growth(sizes: Sequence[Size]) -> str:
    """Return the section of docs/scale.md about a growing fleet."""
    head = (
        "agents",
        "open watches",
        "requests of a start",
        "of 8 moves",
        "of a claim",
        "bytes of its lists",
        "API server: cores",
        "MB",
        "agent: % of a core",
        "MB",
    )
    rows = [
        (
            one.nodes,
            one.rest.open_watches,
            total(one.start),
            total(one.move),
            total(one.claim),
            int(one.list_bytes),
            one.rest.server_cpu,
            one.rest.server_mb,
            one.rest.agent_cpu,
            one.rest.agent_mb,
        )
        for one in sizes
    ]
    last = sizes[-1]
    scans = [(one.nodes, one.by_driver[0], one.by_driver[1] * 1e3, one.by_driver[2]) for one in sizes]
    return "\n".join(
        (
            f"Requests are of one agent. An agent has {parts.WATCHES} watches: its Node, its Lease, the slices of its "
            "node, and the driver's slices without a node.",
            f"CPU and memory of an agent include its embedded kubelet, in a process with others; it looks at its files "
            f"every {PERIOD:g} s.\n",
            page.table(head, rows),
            f"- At a start: {in_words(last.start)}. The list of all claims is the one request that grows with the "
            "cluster; it is made once for devices that no ledger knows.",
            f"- For 8 devices that move to DRA together: {in_words(last.move)}.",
            f"- For a claim that is prepared and unprepared: {in_words(last.claim)}. An agent writes its Lease at most "
            f"every {HOLDERS:g} s because of holders, however many claims or pods come and go.\n",
            "A list of the driver's slices, as `status` and `rollout` make it, is a scan in the API server:\n",
            page.table(("nodes", "bytes", "ms", "requests"), scans),
            page.of_limits(limits_of_growth(sizes)),
        )
    )


def page_of_restart(one: Restart) -> str:
    """Return the section of docs/scale.md about a restart of the API server."""
    rows = [
        ("agents", one.nodes),
        ("lists", one.lists),
        ("seconds from the first to the last list", one.seconds),
        ("lists in the busiest second", one.most),
        ("seconds until the last agent has all its watches", one.in_step),
        ("requests of an agent", total(one.requests)),
        ("answers 429", one.too_many),
        ("rejected, by flow schema", _by_schema(one.rejected)),
        ("queued, by flow schema", _by_schema(one.waited)),
    ]
    return "\n".join(
        (
            "All agents lose their watches at once, and come back at random moments within half a minute.\n",
            page.table(("what", "value"), rows),
            page.of_limits(limits_of_restart(one)),
        )
    )


def _by_schema(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {schema}" for schema, number in sorted(numbers.items()) if number) or "none"


def page_of_peers(ours: Size, others: Peers | None) -> str:
    """Return the section of docs/scale.md about the Go example driver."""
    if others is None:
        return "It was not measured: this machine has no program of it (`PEER_PROGRAMS`).\n"
    rows = [
        ("at a start", total(ours.start), total(others.start), in_words(others.start)),
        ("a claim", total(ours.claim), total(others.claim), in_words(others.claim)),
    ]
    text = (
        f"The Go example driver {build.PEERS[peers.PROGRAM].version} ran on {others.nodes} nodes beside the agents.\n"
    )
    return f"{text}\n{page.table(('requests', 'agent', 'Go driver', 'of the Go driver'), rows)}\n" + page.of_limits(
        limits_of_peers(ours, others)
    )


def limits_of_peers(ours: Size, others: Peers) -> list[Limit]:
    """Return the limits for an agent compared with the Go example driver, with the figures."""
    return [
        Limit(
            "reads for a claim, against the Go driver's", total(reads(ours.claim)) / max(1.0, total(others.claim)), 1.0
        ),
    ]


def page_of_extrapolation(sizes: Sequence[Size], restart: Restart) -> str:
    """Return the section of docs/scale.md about fleets that were not measured."""
    last = sizes[-1]
    seconds = max(restart.seconds, 1.0)
    requests = total(restart.requests) * LARGE
    rows = [
        ("open watches", f"{parts.WATCHES * LARGE:,}"),
        ("requests after a restart of the API server, a second", f"{page.cell(requests / seconds)}"),
        ("list of the driver's slices, MB", f"{page.cell(last.by_driver[0] / last.nodes * LARGE / 1e6)}"),
        ("requests for a list of them, 500 each", f"{-(-LARGE // 500)}"),
    ]
    return "\n".join(
        (
            f"What one agent asks does not depend on the size of the fleet, so these figures are multiples of those at "
            f"{last.nodes} agents. No fleet of this size was run.\n",
            page.table(("for 15,000 nodes", "value"), rows),
        )
    )


def limits_of_rest(ours: Rest, others: Peers | None) -> list[Limit]:
    """Return the limits for a fleet at rest (while nothing changes), with its figures."""
    limits = [Limit("requests of an agent, a minute, beside its watches", ours.a_minute, REST_REQUESTS)]
    if others is not None:
        more = ours.a_minute - total(others.rest)
        limits.append(Limit("requests a minute more than the Go driver's", more, REST_REQUESTS))
    return limits


def page_of_rest(ours: Rest, others: Peers | None) -> str:
    """Return the section of docs/scale.md about a fleet at rest (while nothing changes)."""
    rows: list[tuple[object, ...]] = [
        ("agent", ours.nodes, ours.a_minute, in_words(ours.requests), ours.watches),
    ]
    if others is not None:
        rows.append(("Go driver", others.nodes, total(others.rest), in_words(others.rest), others.watches))
    an_hour = 60 * (ours.a_minute + ours.watches)
    kinds = dict.fromkeys(KINDS, 0.0)
    for what, number in ours.requests.items():
        kinds[next(kind for kind, starts in KINDS.items() if what.startswith(starts))] += 60 * number
    others_an_hour = ", ".join(f"{page.cell(number)} {kind}" for kind, number in kinds.items())
    return "\n".join(
        (
            f"An agent at rest asks the API server {page.cell(an_hour)} times an hour. It opens each of its "
            f"{parts.WATCHES} watches anew after 4 to 8 minutes, {page.cell(60 * ours.watches)} times an hour. Other "
            f"requests are {others_an_hour}. It renews no Lease: it writes its own when a device changes.\n",
            f"**15,000 agents at rest ask {an_hour * LARGE:,.0f} times an hour, {page.cell(an_hour * LARGE / 3600)} a "
            "second.**\n",
            "This needs etcd's progress notifications as kubeadm sets them, every 5 s. With etcd's default of 10 "
            "minutes each watch also lists its objects anew about every 4 minutes, which was not measured.\n",
            f"The figures of {ours.seconds:.0f} s, a minute:\n",
            page.table(("program", "number", "requests", "of them", "watches opened"), rows),
            page.of_limits(limits_of_rest(ours, others)),
        )
    )


KINDS: Final[dict[str, tuple[str, ...]]] = {
    "for the versions that the server serves": ("get /apis",),
    "lists": ("list",),
    "reads of one object": ("get",),
    "writes": ("",),
}
"""Kinds of requests other than watches; a request is of the first kind with which its verb and resource begin."""


def rest(options: argparse.Namespace) -> list[Limit]:
    """Observe a fleet and Go example drivers while nothing changes, after each watch was reopened once."""
    with control_plane() as plane, fleet(plane, options.processes) as nodes:
        measured = parts.Measured(plane, nodes)
        measured.grow(options.agents)
        others = peers.measure(measured, nodes.workers[0], options.peers, REST, reopened=True)
        ours = others.beside if others is not None else measured.rest(REST, reopened=True)
        parts.show(ours)
    page.write({"rest": page_of_rest(ours, others)})
    return limits_of_rest(ours, others)


def growth(options: argparse.Namespace) -> list[Limit]:
    """Measure a growing fleet, a restart of its API server, and Go example drivers beside the agents."""
    with control_plane() as plane, fleet(plane, options.processes) as nodes:
        measured = parts.Measured(plane, nodes)
        sizes = parts.growth(measured, options.sizes, options.rest)
        others = peers.measure(measured, nodes.workers[0], options.peers, options.rest)
        parts.show(others)
        restart = measured.restart(3.0, 2 * IN_STEP)
        parts.show(restart)
        found = [*limits_of_growth(sizes), *limits_of_restart(restart)]
        if others is not None:
            found += limits_of_peers(sizes[-1], others)
    page.write(
        {
            "growth": page_of_growth(sizes),
            "restart": page_of_restart(restart),
            "peers": page_of_peers(sizes[-1], others),
            "extrapolation": page_of_extrapolation(sizes, restart),
        }
    )
    return found


def page_of_commands(count: int, found: Sequence[Command], scan: tuple[int, float, int]) -> str:
    """Return the section of docs/scale.md about the commands `status` and `rollout`."""
    head = ("command", "s to its first line", "its CPU until then", "s", "MB", "lines", "requests", "of them")
    rows = [
        (one.name, one.first, one.cpu, one.seconds, one.mb, one.lines, total(one.requests), in_words(one.requests))
        for one in found
    ]
    return "\n".join(
        (
            f"{count:,} Nodes with 50 images each, Leases and slices as agents write them, a pod each that does not "
            f"run yet, and no agents. `status` is the fastest of {commands.TRIES} runs. The machine did other work: "
            f"{page.cell(os.getloadavg()[1])} programs waited for its two cores.\n",
            page.table(head, rows),
            f"A list of the driver's slices has {scan[0]:,} bytes and takes {page.cell(scan[1])} s in {scan[2]} "
            "requests.\n",
            page.of_limits(limits_of_commands(count, found)),
        )
    )


def limits_of_commands(count: int, found: Sequence[Command]) -> list[Limit]:
    """Return the limits for the commands `status` and `rollout`, with their figures."""
    return [
        *(Limit(f"{one.name}: seconds to its first line", one.first, FIRST_OUTPUT, "s") for one in found),
        *(Limit(f"{one.name}: resident MB", one.mb, COMMAND_MB, "MB") for one in found),
        *(Limit(f"{one.name}: exit status", one.status, 0) for one in found),
        *(Limit(f"{one.name}: lists of pods", one.requests.get("list pods", 0.0), POD_LISTS * count) for one in found),
    ]


def of_commands(options: argparse.Namespace) -> list[Limit]:
    """Measure `status` and `rollout` with many nodes."""
    with control_plane() as plane:
        found, scan = commands.measure(plane, options.nodes)
        left = commands.unrestored(plane)
    page.write({"commands": page_of_commands(options.nodes, found, scan)})
    return [*limits_of_commands(options.nodes, found), Limit("annotations that an undone rollout leaves", len(left), 0)]


def node(options: argparse.Namespace) -> list[Limit]:
    """Run 10,000 pods (`--pods`) on one fake node."""
    found = one_node.measure(options.pods)
    parts.show(found)
    page.write({"node": one_node.section(found)})
    return one_node.limits(found)


def of_load(options: argparse.Namespace) -> list[Limit]:
    """Run pods on a fleet with little free capacity by the real scheduler."""
    with control_plane() as plane, fleet(plane, options.processes) as nodes:
        plane.start_scheduling()
        measured = parts.Measured(plane, nodes)
        measured.grow(options.agents, status_period=10.0)
        found = load.measure(measured, options.load)
    page.write({"load": load.section(found)})
    return load.limits(found)


PARTS: Final[dict[str, Callable[[argparse.Namespace], list[Limit]]]] = {
    "growth": growth,
    "rest": rest,
    "commands": of_commands,
    "node": node,
    "load": of_load,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in Linux namespaces of the run's own; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="agents (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="that agents share (default: %(default)s)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds of rest at each size (default: %(default)s)")
    parser.add_argument("--agents", type=int, default=60, help="of the parts rest and load (default: %(default)s)")
    parser.add_argument("--pods", type=int, default=10_000, help="of the part node (default: %(default)s)")
    parser.add_argument("--load", type=float, default=120.0, help="seconds of each load (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1000, help="of the part commands (default: %(default)s)")
    parser.add_argument("--peers", type=int, default=20, help="Go drivers (default: %(default)s)")
    options: Any = parser.parse_args(argv)
    if not isolate.inside():
        try:
            build.ensure()
        except build.BuildError as error:
            print(error, file=sys.stderr)
            return 1
        peer(peers.PROGRAM)
        return isolate.run([sys.executable, "-m", "tests.fleet", *(sys.argv[1:] if argv is None else argv)])
    os.nice(5)
    limits = [limit for name in options.parts or PARTS for limit in PARTS[name](options)]
    for limit in limits:
        print(f"{limit.what:<64} {limit.value:10.2f} {limit.unit:<3} {limit.text}{'' if limit.met else '   MISSED'}")
    missed = sum(not limit.met for limit in limits)
    print(json.dumps({"limits": len(limits), "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
