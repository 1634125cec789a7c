"""The command line of the bridge: the node agent, and commands that move devices between device plugin and DRA.

`run` is the node agent. `status`, `migrate` and `rollout` send requests only to the API server, with the user's rights.
Each command imports only the modules that it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from deviceplugin.backoff import Backoff
from deviceplugin.cli import CommandError, CommandLine
from deviceplugin.device import counted, printable
from deviceplugin.node import logs
from deviceplugin.node.options import add_config_options, lock_of
from deviceplugin.tables import Line, import_rich, print_lines, terminal_width, wrapped
from dra_bridge.cli_manifests import add_convert, add_manifests, matching
from dra_bridge.cli_plan import add_plan
from dra_bridge.node.options import add_kubeconfig, add_run_options, run_options

if TYPE_CHECKING:
    from dra_bridge.kube import Cluster
    from dra_bridge.rollout.display import FleetStatus
    from dra_bridge.rollout.fleet import NodeView
    from dra_bridge.rollout.reporter import Reporter

_T = TypeVar("_T")

PATIENCE: Final = 5.0
"""Maximum seconds between two tries of a command to reach an API server that does not respond."""
WATCH_PERIOD: Final = 2.0
"""Seconds between two updates of `status --watch`."""
_ROLLOUT: Final = """
Set the share of the nodes of a label selector, some at a time. Each node's previous share is kept in its annotation
<driver>/dra-share-before: the same command continues where a run stopped, and --undo restores it. A run stops when a
node is not done in time. It stops when a pod that asks for the driver's devices fails on a node that has begun: the
pod is Failed or cannot be prepared (FailedPrepareDynamicResources), and was not before. It also stops at a node that
another user, or a rollout of another share, has begun, unless --take-over is given.

Before the first device moves, all nodes are marked cluster-autoscaler.kubernetes.io/scale-down-disabled, and their
agents publish a pool, if empty. A node whose devices have all moved is not marked any more. Where devices stay on both
sides in this group of nodes, the mark stays. --autoscaler ignore leaves this out.
"""

_ADOPT: Final = """
Check whether the agents can adopt a device plugin, and print the kubectl commands that it takes, in order; nothing
is changed. The exit status is 1 if the plugin cannot be adopted, or given back, now.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if (given := sys.argv[1:] if argv is None else argv) and given[0] in ("validate", "devices", "schema"):
        print(f"dra-bridge has no such command; deviceplugin {given[0]} reads the same config files", file=sys.stderr)
        return 2
    program = "kubectl dra-bridge" if Path(sys.argv[0]).name == "kubectl-dra_bridge" else "dra-bridge"
    line = CommandLine(program, "Serve devices to pods and to claims, and move them between both on a live node.")
    run = line.add("run", _run, "Serve the devices of a config file to this node's kubelet, on both sides.")
    add_config_options(run)
    add_run_options(run)
    uninstall = line.add("uninstall", _uninstall, "Remove the slices that a config's drivers published.")
    uninstall.add_argument("--config", type=Path, metavar="FILE", help="the config file (YAML)")
    uninstall.add_argument("--driver", action="append", default=[], metavar="NAME", help="a driver's name")
    uninstall.add_argument("--node", default="", metavar="NAME", help="only this node (default: all nodes)")
    check = "remove nothing; exit with 1 if claims have devices: their pods cannot end without an agent"
    uninstall.add_argument("--check", action="store_true", help=check)
    force = "remove even if agents run (they publish slices again) or claims are allocated"
    uninstall.add_argument("--force", action="store_true", help=force)
    status = line.add("status", _status, "Show per node and device: side, state, holder, health and since when.")
    about = "only this driver (default: all that report moves)"
    status.add_argument("--driver", default="", metavar="NAME", help=about)
    about = "only this node; may be repeated (default: all)"
    status.add_argument("--node", action="append", default=[], metavar="NAME", help=about)
    about = "output format (default: %(default)s)"
    status.add_argument("-o", "--output", choices=("table", "json"), default="table", help=about)
    status.add_argument("--problems", action="store_true", help="only nodes and devices with problems")
    status.add_argument("--watch", "-w", action="store_true", help="refresh until interrupted")
    about = "Set the share of nodes: how many of a driver's devices claims can get."
    examples = (
        "migrate node1 --driver fpga.example.com --share 1 --wait",
        "migrate node1 node2 --driver fpga.example.com --share all --wait --timeout 600",
        "migrate node1 --driver fpga.example.com --share default",
    )
    migrate = line.add("migrate", _migrate, about, examples)
    migrate.add_argument("nodes", nargs="+", metavar="NODE", help="a node's name")
    same = "the same as --share default"
    _add_share(migrate).add_argument("--unset", dest="share", action="store_const", const="default", help=same)
    migrate.add_argument("--wait", action="store_true", help="wait until the devices have moved; show progress")
    migrate.add_argument(
        "--timeout", type=_seconds, default=0.0, metavar="SECONDS", help="longest wait (default: no limit)"
    )
    rollouts = (
        "rollout --driver fpga.example.com --share all --selector pool=fpga --max-unavailable 2",
        "rollout --driver fpga.example.com --selector pool=fpga --undo",
    )
    rollout = line.add("rollout", _rollout, "Set the share of many nodes, some at a time; stop at failures.", rollouts)
    rollout.description = _ROLLOUT
    _add_share(rollout).add_argument("--undo", action="store_true", help="restore each node's previous share")
    selector = matching(r".*\S.*", "selects all nodes; name a label, such as pool=gpu")
    about = "which nodes, such as pool=gpu"
    rollout.add_argument("--selector", "-l", required=True, type=selector, metavar="LABELS", help=about)
    over = "take over nodes from the rollout of another user or of another share"
    rollout.add_argument("--take-over", action="store_true", help=over)
    nodes = matching("0*[1-9][0-9]*", "is not a number of nodes, at least 1", int)
    most = "the most nodes that move at the same time (default: %(default)s)"
    rollout.add_argument("--max-unavailable", type=nodes, default=1, metavar="N", help=most)
    pause = "stop after the first N nodes; run the same command to continue"
    rollout.add_argument("--pause", action="store_true", help=pause)
    longest = "a node that takes longer counts as stalled (default: %(default)g)"
    rollout.add_argument("--timeout-per-node", type=_seconds, default=600.0, metavar="SECONDS", help=longest)
    adopt = line.add("adopt", _adopt, "Check a vendor's DaemonSet; print the commands that have the agents adopt it.")
    adopt.description = _ADOPT
    adopt.add_argument("daemonset", metavar="DAEMONSET", help="the name of the device plugin's DaemonSet")
    adopt.add_argument("--namespace", "-n", required=True, metavar="NAME", help="the DaemonSet's namespace")
    adopt.add_argument("--undo", action="store_true", help="print the commands that undo the adoption")
    printed = "output format (default: %(default)s)"
    adopt.add_argument("-o", "--output", choices=("text", "json"), default="text", help=printed)
    where = "the namespace of the agents (default: found by the ClusterRoleBinding of `manifests`)"
    adopt.add_argument("--agents", default="", metavar="NAMESPACE", help=where)
    held = "a node whose devices are held for longer does not stop the rollout: it counts as waiting"
    rollout.add_argument("--continue-when-held", action="store_true", help=held)
    rollout.add_argument("--dry-run", action="store_true", help="show the order of the nodes; write nothing")
    ignored = "auto: mark nodes while an autoscaler could drain what pods use; ignore: the cluster has none"
    rollout.add_argument("--autoscaler", choices=("auto", "ignore"), default="auto", help=ignored)
    for command in (uninstall, status, migrate, rollout):
        command.add_argument("--namespace", "-n", default="", metavar="NAME", help=where)
    for command in (uninstall, status, migrate, rollout, adopt):
        add_kubeconfig(command)
    demo = line.add("demo", _demo, "Show both sides at work, with an embedded kubelet and API server.")
    demo.add_argument("--hold", action="store_true", help="keep serving until interrupted")
    add_manifests(line)
    add_convert(line)
    add_plan(line)
    return line.main(argv)


def _add_share(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options for a driver and the requested share. Return the group of options that exclude each other."""
    parser.add_argument("--driver", required=True, metavar="NAME", help="the driver's name")
    group = parser.add_mutually_exclusive_group(required=True)
    about = "what claims get: none, all, a number of devices, a percentage; default removes the node's override"
    group.add_argument("--share", type=_share, metavar="SHARE", help=about)
    about = "move devices also if a kubelet restart would end pods then (kubernetes#124586)"
    parser.add_argument("--force", action="store_true", help=about)
    return group


def _requested_share(options: argparse.Namespace) -> str | None:
    """Return the value of the Node annotation that requests the share; None to remove the annotation.

    Raises CommandError.
    """
    share: str | None = None if options.share == "default" else options.share
    if options.force and share is None:
        raise CommandError("--force needs a share: none, all, a number of devices, or a percentage")
    return f"{share} force" if options.force else share


def _share(text: str) -> str:
    from dra_bridge.handover.share import ShareError, parse_share

    if text == "default":
        return text
    try:
        return str(parse_share(text))
    except ShareError as error:
        raise argparse.ArgumentTypeError(f"{error}, or default") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _run(options: argparse.Namespace) -> int:
    from dra_bridge.kube import AccessError
    from dra_bridge.node.process import run_config

    try:
        return run_config(options.config, run_options(options), lock_of(options), options.adopt)
    except AccessError as error:
        raise CommandError(error) from error


def _uninstall(options: argparse.Namespace) -> int:
    from deviceplugin import config
    from dra_bridge.rollout.agents import lease_namespaces
    from dra_bridge.rollout.removal import left_behind, obstacles, remaining_marks
    from dra_bridge.rollout.rollout import check_driver, read_leases
    from dra_bridge.slices.publisher import remove_slices

    async def remove(cluster: Cluster) -> tuple[int, list[str]]:
        for driver in options.driver:
            leases = await read_leases(cluster, await lease_namespaces(cluster, options.namespace))
            await check_driver(cluster, driver, leases)
        check = options.check
        reasons = await obstacles(cluster, drivers, options.node, options.namespace, before=check)
        if options.check and reasons:
            raise CommandError("\n".join(reasons), status=1)
        if options.check:
            return 0, []
        if reasons and not options.force:
            raise CommandError(
                "\n".join(("nothing was removed; --force removes the slices in spite of these reasons:", *reasons)),
                status=1,
            )
        removed = await remove_slices(cluster, sorted(drivers), options.node)
        return removed, [*reasons, *([] if options.node else await remaining_marks(cluster, drivers))]

    drivers = set(options.driver)
    if options.config:
        drivers |= {resource.driver for resource in config.load(options.config).resources if resource.driver}
    if not drivers:
        raise CommandError("dra-bridge uninstall: name a config file or a driver")
    removed, warnings = _ask(options, remove)
    if options.check:
        print(f"no claim has devices of {', '.join(sorted(drivers))}: the agents can be removed")
        return 0
    print(counted(removed, "slice"), "removed")
    if not options.node:
        print(left_behind(drivers))
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from dra_bridge import demo

    return demo.main(options.hold)


def _ask(options: argparse.Namespace, question: Callable[[Cluster], Awaitable[_T]]) -> _T:
    """Run `question` with a client of the API server, and return the result of `question`.

    Raises CommandError if the configuration for the API server cannot be used (status 2), or if a request fails (status
    1).
    """
    from dra_bridge.kube import AccessError, Cluster, ClusterError, UnavailableError
    from dra_bridge.rollout.rollout import RolloutError

    async def ask() -> _T:
        # A user waits for the command, so the command retries requests after shorter pauses than an agent.
        async with Cluster.from_environment(options.kubeconfig, backoff=Backoff(most=PATIENCE)) as cluster:
            try:
                return await question(cluster)
            except UnavailableError as error:
                if error.code:
                    raise
                raise CommandError(f"cannot reach an API server at {cluster.where}: {error}", status=1) from error

    # The log shows no warnings of the API client, because the command's own error has the same content.
    logs.setup("text", "error")
    try:
        return asyncio.run(ask())
    except RolloutError as error:
        raise CommandError(error, error.status) from error
    except AccessError as error:
        raise CommandError(error) from error
    except ClusterError as error:
        raise CommandError(error, status=1) from error


def _status(options: argparse.Namespace) -> int:
    from dra_bridge.kube import UnavailableError
    from dra_bridge.rollout import display
    from dra_bridge.rollout.status import read_status

    if options.output == "json" and (options.watch or options.problems):
        raise CommandError(
            "dra-bridge status: --watch and --problems are for tables; the JSON output always contains everything"
        )
    terminal = sys.stdout.isatty()

    def lines(fleet_status: FleetStatus) -> list[Line]:
        rest = display.lines(
            fleet_status, terminal_width(), time.time(), problems=options.problems, with_totals=not shown_first
        )
        return [*([Line("")] if shown_first and rest else []), *rest]

    shown_first = False

    def show_totals(nodes: Sequence[NodeView]) -> None:
        nonlocal shown_first
        if options.output != "json" and not options.watch and (first := display.totals(nodes, terminal_width())):
            print_lines(first)
            sys.stdout.flush()
            shown_first = True

    async def read(cluster: Cluster) -> FleetStatus:
        answer = await read_status(cluster, options.driver, options.node, options.namespace, show_totals)
        if not answer.nodes:
            of = f" of node {', '.join(options.node)}" if options.node else ""
            raise CommandError(
                f"no Lease{of} has the annotation {options.driver or 'DRIVER'}/handover, by which an agent of "
                "dra-bridge reports its devices; does its DaemonSet run, and does its config name a driver?",
                status=1,
            )
        return answer

    async def watch(cluster: Cluster) -> FleetStatus:
        while True:
            try:
                shown = lines(await read(cluster))
            except UnavailableError as error:
                shown = wrapped([f"the API server does not answer: {error}"], None)
            if terminal:
                _redraw(shown)
            else:
                print("\n".join((time.strftime("--- %H:%M:%S"), *(line.text for line in shown))), flush=True)
            await asyncio.sleep(WATCH_PERIOD)

    status = _ask(options, watch if options.watch else read)
    if options.output == "json":
        print(json.dumps(display.as_json(status), indent=2))
    else:
        print_lines(lines(status))
    return int(bool(status.problems))


def _redraw(lines: Sequence[Line]) -> None:
    """Clear the terminal, and print as many of these lines as fit on the screen, from the first line."""
    from dra_bridge.rollout import display

    size = shutil.get_terminal_size()
    sys.stdout.write("\x1b[H\x1b[2J")
    print_lines(display.first_rows(lines, size.columns, size.lines))
    sys.stdout.flush()


def _migrate(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.rollout import migrate

    if options.timeout and not options.wait:
        raise CommandError("dra-bridge migrate: --timeout needs --wait")
    nodes = list(dict.fromkeys(options.nodes))
    share = _requested_share(options)
    done = _follow(
        options,
        lambda cluster, reporter: migrate(
            cluster,
            nodes,
            options.driver,
            share,
            reporter,
            namespace=options.namespace,
            wait=options.wait,
            timeout=options.timeout,
        ),
        f"interrupted; the requested share stays. dra-bridge status --driver {options.driver} shows how far "
        "it is, another migrate reverses it",
    )
    return int(not done)


def _rollout(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.fleet import Goal, RolloutLimits
    from dra_bridge.rollout.rollout import rollout

    goal = Goal(_requested_share(options), options.undo, take_over=options.take_over)
    ignore = options.autoscaler == "ignore"
    patience, held = options.timeout_per_node, options.continue_when_held
    limits = RolloutLimits(options.max_unavailable, patience, options.pause, ignore, continue_when_held=held)
    driver, selector, namespace = options.driver, options.selector, options.namespace
    done = _follow(
        options,
        lambda cluster, reporter: rollout(
            cluster, driver, goal, selector, limits, reporter, namespace, dry_run=options.dry_run
        ),
        "interrupted; nodes that have begun continue, no other node begins. Run the same command to continue",
        "" if options.undo else "run the same command to continue; --undo in place of --share takes it back",
    )
    return int(not done)


def _adopt(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.adoption import advise

    advice = _ask(
        options,
        lambda cluster: advise(cluster, options.daemonset, options.namespace, options.agents, back=options.undo),
    )
    if options.output == "json":
        print(json.dumps(dataclasses.asdict(advice), indent=2))
    else:
        for problem in advice.problems:
            print(printable(problem), file=sys.stderr)
        for note in advice.notes:
            print(f"# {printable(note)}")
        for command in advice.commands:
            print(printable(command))
        if advice.commands:
            back = "" if options.undo else f"; the way back: dra-bridge adopt {options.daemonset} --undo ..."
            print(f"# nothing was changed: run these commands, in this order{back}")
    return int(bool(advice.problems))


def _follow(
    options: argparse.Namespace,
    work: Callable[[Cluster, Reporter], Awaitable[bool]],
    interrupted: str,
    stopped: str = "",
) -> bool:
    """Run `work` with a client of the API server, and show the progress. Return whether the work is done.

    interrupted: the text to print after Ctrl-C. stopped: the text to print if `work` returns False; "" for none.
    """
    from dra_bridge.rollout.reporter import Reporter

    with contextlib.ExitStack() as stack:
        show: Callable[[str], None] = functools.partial(print, flush=True)
        bars = None
        if sys.stdout.isatty() and (rich := import_rich()):
            name = rich.table.Column(overflow="fold")
            columns = (
                rich.progress.TextColumn("{task.description}", markup=False, table_column=name),
                rich.progress.BarColumn(bar_width=12),
                rich.progress.TextColumn("{task.completed} of {task.total} {task.fields[unit]}"),
                rich.progress.TimeElapsedColumn(),
            )
            # The progress bars disappear at the end, because a bar that stays would look like a move that does not
            # continue.
            bars = stack.enter_context(rich.progress.Progress(*columns, transient=True))
            show = functools.partial(bars.console.print, markup=False, highlight=False)

        def say(line: str) -> None:
            for part in wrapped([line], terminal_width()):
                show(part.text)

        reporter = Reporter(say, bars)
        try:
            done = _ask(options, lambda cluster: work(cluster, reporter))
        except KeyboardInterrupt:
            say(interrupted)
            raise
    if not done and stopped:
        print(stopped, file=sys.stderr, flush=True)
    print_lines(wrapped(reporter.stopped, terminal_width()))
    return done
