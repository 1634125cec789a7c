"""The command line of the bridge: the agent with both sides, and moves over a fleet of them.

`run` is the node agent. `status`, `migrate` and `rollout` talk to the API server alone, with the
rights of whoever calls them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from deviceplugin.node.options import EXITS
from dra_bridge.node.options import add_kubeconfig, add_run_options, run_options

if TYPE_CHECKING:
    from dra_bridge.kube import Cluster
    from dra_bridge.rollout.fleet import NodeView

__all__ = ["main"]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from failing at its flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-bridge",
        description="Serve devices to pods and to claims, and move them between the two on a live node.",
        epilog=EXITS,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about, epilog=EXITS, allow_abbrev=False)
        one.set_defaults(command=command)
        return one

    run = add("run", _run, "Serve the devices of a config file to this node's kubelet, on both sides.")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    add_run_options(run)
    uninstall = add("uninstall", _uninstall, "Remove the slices that a config's drivers published.")
    uninstall.add_argument("--config", type=Path, metavar="FILE", help="the config file (YAML)")
    uninstall.add_argument("--driver", action="append", default=[], metavar="NAME", help="a driver's name")
    uninstall.add_argument("--node", default="", metavar="NAME", help="of this node alone (all nodes)")
    add_kubeconfig(uninstall)
    status = add("status", _status, "Show per node and device: side, state, holder and since when.")
    status.add_argument("--driver", default="", metavar="NAME", help="of this driver alone (all that report moves)")
    status.add_argument("--node", action="append", default=[], metavar="NAME", help="this node; may be repeated (all)")
    status.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="how it is shown (%(default)s)"
    )
    add_kubeconfig(status)
    migrate = add("migrate", _migrate, "Ask nodes for a share: how many of a driver's devices claims are to have.")
    migrate.add_argument("nodes", nargs="+", metavar="NODE", help="a node's name")
    migrate.add_argument("--driver", required=True, metavar="NAME", help="the driver's name")
    which = migrate.add_mutually_exclusive_group(required=True)
    _add_share(which)
    which.add_argument("--unset", dest="share", action="store_const", const="default", help="the same as default")
    migrate.add_argument("--wait", action="store_true", help="follow the move until it is done")
    migrate.add_argument("--timeout", type=_seconds, default=0.0, metavar="SECONDS", help="wait no longer (for ever)")
    add_kubeconfig(migrate)
    rollout = add("rollout", _rollout, "Ask many nodes for a share, some at a time; stop when one stalls or pods fail.")
    rollout.description = _ROLLOUT
    rollout.add_argument("--driver", required=True, metavar="NAME", help="the driver's name")
    which = rollout.add_mutually_exclusive_group(required=True)
    _add_share(which)
    which.add_argument("--undo", action="store_true", help="ask each node again for what it was asked for before")
    rollout.add_argument("--selector", "-l", required=True, metavar="LABELS", help="which nodes, such as pool=gpu")
    rollout.add_argument(
        "--max-unavailable", type=_count, default=1, metavar="N", help="nodes in the move at once (%(default)s)"
    )
    rollout.add_argument("--pause", action="store_true", help="stop after the first N nodes; the same command goes on")
    rollout.add_argument(
        "--timeout-per-node",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="a node that takes longer has stalled (%(default)g)",
    )
    add_kubeconfig(rollout)
    demo = add("demo", _demo, "Show it all at work, with a kubelet and an API server in this process.")
    demo.add_argument("--hold", action="store_true", help="go on serving until interrupted")
    manifests = add("manifests", _manifests, "Print what to apply to a cluster so that the agent runs on its nodes.")
    _add_deployment(manifests)
    return parser


_ROLLOUT: Final = """
Ask the nodes of a label selector for a share, some at a time. What each node was asked for before stands in its
annotation <driver>/dra-share-before: the same command goes on where a run stopped, and --undo restores it. A
run stops when a node is not done in time, or when a pod on a node that it has begun is Failed or cannot be prepared
(FailedPrepareDynamicResources), asks for the driver's devices, and was not in that state before the node was begun.
"""


def _add_share(parser: argparse._MutuallyExclusiveGroup) -> None:
    parser.add_argument(
        "--share",
        type=_share,
        metavar="SHARE",
        help="what claims get: none, all, a number of devices, a percentage; default removes what was asked for",
    )


def _share(text: str) -> str:
    from dra_bridge.handover import ShareError, parse_share

    if text == "default":
        return text
    try:
        parse_share(text)
    except ShareError as error:
        raise argparse.ArgumentTypeError(f"{error}, or default") from None
    return text.strip()


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, at least 1")
    return int(text)


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options of `manifests.Deployment`; what is not given keeps its default there."""

    def add(option: str, field: str, about: str, **more: Any) -> None:
        parser.add_argument(option, dest=field, default=argparse.SUPPRESS, help=about, **more)

    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    add("--image", "image", "the agent's image (deviceplugin:0.1.0)", metavar="IMAGE")
    add("--pull-policy", "pull_policy", "of the image (IfNotPresent)", choices=("Always", "IfNotPresent", "Never"))
    add("--namespace", "namespace", "where the agent runs (dra-bridge)", type=_name, metavar="NAME")
    add("--name", "name", "of the DaemonSet and all that belongs to it (dra-bridge)", type=_name, metavar="NAME")
    add(
        "--resource-api",
        "version",
        "the version of resource.k8s.io that the DeviceClasses are in (v1)",
        choices=("v1", "v1beta2", "v1beta1"),
    )
    add(
        "--no-extended-resource",
        "extended_resource",
        "leave extendedResourceName out, which servers before 1.34 refuse",
        action="store_false",
    )
    add("--kubelet-root", "kubelet_root", "the kubelet's --root-dir (/var/lib/kubelet)", type=_directory, metavar="DIR")
    add(
        "--cdi-dir",
        "cdi_directory",
        "where the container runtime finds CDI specs (/var/run/cdi)",
        type=_directory,
        metavar="DIR",
    )
    add(
        "--claim-status",
        "claim_status",
        "run the agent with --claim-status, and give it the right to patch the status of claims",
        action="store_true",
    )
    add("--metrics-port", "metrics_port", "0 for no metrics, and no probes (9410)", type=_port, metavar="PORT")
    add(
        "--runtime-class",
        "runtime_class",
        "of the agent's pod; `nvidia` where that is not the nodes' default and there are GPUs (none)",
        metavar="NAME",
    )
    add("--memory", "memory", "the container's limit (128Mi)", metavar="QUANTITY")
    add(
        "--node-selector",
        "node_selector",
        "a label that nodes must have; may be given several times",
        type=_label,
        action="append",
        metavar="KEY=VALUE",
    )


def _name(text: str) -> str:
    if len(text) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name; write at most 63 small letters, digits and dashes, no dash at either end"
        )
    return text


def _directory(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an absolute path; write the nodes' own, such as /var/lib/x")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _run(options: argparse.Namespace) -> int:
    from deviceplugin.config import ConfigError
    from dra_bridge.kube import AccessError
    from dra_bridge.node.process import run_config

    try:
        return run_config(options.config, run_options(options))
    except (ConfigError, AccessError) as error:
        print(error, file=sys.stderr)
        return 2


def _uninstall(options: argparse.Namespace) -> int:
    from deviceplugin import config
    from dra_bridge.slices import remove_slices

    drivers = set(options.driver)
    try:
        if options.config:
            drivers |= {resource.driver for resource in config.load(options.config).resources if resource.driver}
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if not drivers:
        print("dra-bridge uninstall: name a config file or a driver", file=sys.stderr)
        return 2

    async def remove(cluster: Cluster) -> str:
        count = await remove_slices(cluster, sorted(drivers), options.node)
        return f"{count} slice{'s' if count != 1 else ''} removed"

    done = _ask(options, remove)
    if isinstance(done, int):
        return done
    print(done)
    return 0


def _manifests(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from deviceplugin import config
    from dra_bridge.manifests import Deployment, manifests, to_yaml

    given = {key: value for key, value in vars(options).items() if key in {one.name for one in fields(Deployment)}}
    if "node_selector" in given:
        given["node_selector"] = dict(given["node_selector"])
    try:
        text = options.config.read_text(encoding="utf-8")
        found = config.parse(text, str(options.config))
    except (OSError, UnicodeDecodeError) as error:
        print(f"{options.config} cannot be read: {error}", file=sys.stderr)
        return 2
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    deployment = Deployment(**given)
    sys.stdout.write(to_yaml(manifests(found, text, deployment)))
    metrics = found.metrics
    files = list(dict.fromkeys(filter(None, (metrics.certificate, metrics.key, metrics.token))))
    if deployment.metrics_port and files:
        print(f"{', '.join(files)}: to be mounted into the DaemonSet's container, from a Secret say", file=sys.stderr)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from dra_bridge import demo

    return demo.main(options.hold)


# What is so.


def _status(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.rollout import read_nodes

    nodes = _ask(options, lambda cluster: read_nodes(cluster, options.driver, options.node))
    if isinstance(nodes, int):
        return nodes
    if options.output == "json":
        print(json.dumps({"nodes": [_as_json(view) for view in nodes]}, indent=2))
        return 0
    rows = [
        (
            view.node,
            device.resource,
            device.name,
            device.side,
            device.state.value + (" (gone)" if device.gone else ""),
            " for ".join(filter(None, (device.holder, ", ".join(device.pods)))) or "-",
            _age(time.time() - device.since),
            device.waits or "-",
        )
        for view in nodes
        for device in view.devices
    ]
    if rows:
        _print_rows(("NODE", "RESOURCE", "DEVICE", "SIDE", "STATE", "HOLDER", "SINCE", "WAITS FOR"), rows)
        print()
    for view in nodes:
        print(f"{view.node} {view.driver}: {_fleet().summary(view)}")
        for line in _fleet().obstacles(view) if view.reported is not None else ():
            print(f"  {line}")
    if not nodes:
        print("no node has slices that report moves", file=sys.stderr)
    return 0


def _fleet() -> Any:
    """Return the module of the pure functions; imported when it is needed."""
    from dra_bridge.rollout import fleet

    return fleet


def _as_json(view: NodeView) -> dict[str, Any]:
    return {
        "node": view.node,
        "driver": view.driver,
        "asked": view.asked,
        "before": view.before.share if view.before is not None else None,
        "inRollout": view.before is not None,
        "settled": _fleet().settled(view),
        "waitsFor": _fleet().obstacles(view),
        "resources": [
            {
                "name": name,
                "share": resource.share,
                "counts": resource.counts,
                "devices": [
                    {
                        "name": one.name,
                        "side": one.side,
                        "state": one.state.value,
                        "holder": one.holder,
                        "pods": list(one.pods),
                        "since": datetime.fromtimestamp(one.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                        "waitsFor": one.waits,
                        "gone": one.gone,
                    }
                    for one in view.devices
                    if one.resource == name
                ],
            }
            for name, resource in (view.reported.resources if view.reported is not None else {}).items()
        ],
    }


def _age(seconds: float) -> str:
    """Return a length of time as kubectl shows ages."""
    left = max(0, int(seconds))
    for unit, size, below in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if left < size * below:
            return f"{left // size}{unit}"
    return f"{left // 86400}d"


def _ask(options: argparse.Namespace, question: Callable[[Cluster], Awaitable[_T]]) -> _T | int:
    """Ask the API server; return the answer, or the exit status after what went wrong was said."""
    from dra_bridge.kube import AccessError, Cluster, ClusterError
    from dra_bridge.rollout.rollout import RolloutError

    async def ask() -> _T:
        async with Cluster.from_environment(options.kubeconfig) as cluster:
            return await question(cluster)

    try:
        return asyncio.run(ask())
    except (RolloutError, AccessError) as error:
        print(error, file=sys.stderr)
        return 2
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty() and (rich := _rich()):
        table = rich.table.Table(*header, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(rich.text.Text(cell) for cell in row))
        rich.console.Console().print(table)
        return
    lines = [header, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))


def _rich() -> Any:
    """Return rich where the extra `cli` is installed."""
    try:
        import rich.console
        import rich.progress
        import rich.table
        import rich.text
    except ImportError:
        return None
    return rich


# What steers.


def _migrate(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.rollout import migrate

    nodes = list(dict.fromkeys(options.nodes))
    share = None if options.share == "default" else options.share
    with _reporter() as reporter:
        try:
            done = _ask(
                options,
                lambda cluster: migrate(
                    cluster, nodes, options.driver, share, reporter, wait=options.wait, timeout=options.timeout
                ),
            )
        except KeyboardInterrupt:
            reporter.say(
                f"interrupted; what was asked for stays asked for. dra-bridge status --driver {options.driver} shows "
                "how far it is, another migrate turns it round"
            )
            return 130
    return int(not done) if isinstance(done, bool) else done


def _rollout(options: argparse.Namespace) -> int:
    from dra_bridge.rollout.fleet import Goal, Limits
    from dra_bridge.rollout.rollout import rollout

    goal = Goal(None if options.share == "default" else options.share, options.undo)
    limits = Limits(options.max_unavailable, options.timeout_per_node, options.pause)
    with _reporter() as reporter:
        try:
            done = _ask(
                options, lambda cluster: rollout(cluster, options.driver, goal, options.selector, limits, reporter)
            )
        except KeyboardInterrupt:
            reporter.say("interrupted; nodes in the move go on, no other is begun. The same command goes on from here")
            return 130
    if done is False and not options.undo:
        print("the same command goes on from here; --undo in place of --share takes it back", file=sys.stderr)
    return int(not done) if isinstance(done, bool) else done


@contextlib.contextmanager
def _reporter() -> Iterator[Lines]:
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        yield Lines()
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.completed} of {task.total}"),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns) as bars:
        yield Bars(bars)


class Lines:
    """Tells what goes on by lines, for pipes and logs."""

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}
        self._explained: dict[str, list[str]] = {}
        self._most: dict[str, int] = {}

    def show(self, nodes: Sequence[NodeView]) -> None:
        """Print a line for each node of which something changed."""
        for view in nodes:
            # Without an annotation only the agent knows what it is to be.
            known = view.reported is not None and (view.asked is not None or not view.reported.asked)
            self.bar(view, _fleet().distance(view) if known else -1)

    def bar(self, view: NodeView, left: int) -> None:
        """Show how many devices have still to move; -1 while that is not known."""
        if left < 0:
            return
        most = self._most[view.node] = max(self._most.get(view.node, 0), left)
        text = f"{most - left} of {most} devices moved" if most else "nothing to move"
        if self._shown.get(view.node) != text:
            self._shown[view.node] = text
            self.say(f"{view.node}: {text}")

    def explain(self, nodes: Sequence[NodeView]) -> None:
        """Print what nodes wait for, where that is not what was printed before."""
        for view in nodes:
            lines = _fleet().obstacles(view)
            if lines and self._explained.get(view.node) != lines:
                self._explained[view.node] = lines
                for line in lines:
                    self.say(f"{view.node}: {line}")

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)


class Bars(Lines):
    """Tells what goes on by progress bars, for terminals."""

    def __init__(self, bars: Any) -> None:
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def bar(self, view: NodeView, left: int) -> None:
        """Move the node's bar."""
        if view.node not in self._tasks:
            self._tasks[view.node] = self._bars.add_task(view.node, total=None)
        if left >= 0:
            most = self._most[view.node] = max(self._most.get(view.node, 0), left)
            self._bars.update(self._tasks[view.node], total=max(most, 1), completed=most - left if most else 1)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False)
