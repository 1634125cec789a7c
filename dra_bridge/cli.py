"""The command line of the bridge: the agent with both doors, and what steers a fleet of them.

`run` is the node agent. `migrate`, `rollout` and `status` talk to the API server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deviceplugin import cli as common

if TYPE_CHECKING:
    from deviceplugin.agent import Paths
    from dra_bridge.cluster import Cluster

__all__ = ["RunOptions", "main", "parse_run"]

_LOG: Final = logging.getLogger(__name__)
_EXITS: Final = (
    "exit status: 0 all is well, 1 it failed while running, 2 wrong usage or a config file that cannot be used"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-bridge",
        description="Serve devices to pods and to claims, and move them between the two on a live node.",
        epilog=_EXITS,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about, epilog=_EXITS, allow_abbrev=False)
        one.set_defaults(command=command)
        return one

    run = add("run", _run, "Serve the devices of a config file to this node's kubelet, through both doors.")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    _add_run_options(run)
    uninstall = add("uninstall", _uninstall, "Remove the slices that a config's drivers published.")
    uninstall.add_argument("--config", type=Path, metavar="FILE", help="the config file (YAML)")
    uninstall.add_argument("--driver", action="append", default=[], metavar="NAME", help="a driver's name")
    uninstall.add_argument("--node", default="", metavar="NAME", help="of this node alone (all nodes)")
    _add_kubeconfig(uninstall)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node-name",
        default=os.environ.get("NODE_NAME") or socket.gethostname(),
        metavar="NAME",
        help="this node's name in the cluster ($NODE_NAME, else the host's name: %(default)s)",
    )
    _add_kubeconfig(parser)
    parser.add_argument(
        "--cdi-dir",
        default="/var/run/cdi",
        metavar="DIR",
        help="where the container runtime finds CDI specs (%(default)s)",
    )
    common.add_run_options(parser)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the options of an agent with both doors say."""

    paths: Paths
    metrics_address: str | None
    cluster: Cluster
    node: str
    cdi_directory: str


def parse_run(argv: Sequence[str] | None = None) -> RunOptions:
    """Read the options of an author's own agent (`dra_bridge.run(Source())`) and set up its logs."""
    parser = argparse.ArgumentParser(
        description="Serve devices to this node's pods and claims.", epilog=_EXITS, allow_abbrev=False
    )
    _add_run_options(parser)
    return _run_options(parser.parse_args(argv))


def _run_options(options: argparse.Namespace) -> RunOptions:
    run = common.run_options(options)
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from dra_bridge.cluster import Cluster

    cluster = Cluster.from_environment(options.kubeconfig)
    return RunOptions(run.paths, run.metrics_address, cluster, options.node_name, options.cdi_dir)


def _add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="how to reach the API server (the pod's service account, else $KUBECONFIG, else ~/.kube/config)",
    )


def _run(options: argparse.Namespace) -> int:
    from deviceplugin.config import ConfigError
    from dra_bridge.agent import run_config
    from dra_bridge.cluster import AccessError

    try:
        run = _run_options(options)
        return run_config(
            options.config,
            run.paths,
            run.cluster,
            run.node,
            metrics_address=run.metrics_address,
            cdi_directory=run.cdi_directory,
        )
    except (ConfigError, AccessError) as error:
        print(error, file=sys.stderr)
        return 2


def _uninstall(options: argparse.Namespace) -> int:
    from deviceplugin import config
    from dra_bridge.cluster import Cluster, ClusterError
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

    async def remove() -> int:
        async with Cluster.from_environment(options.kubeconfig) as cluster:
            return await remove_slices(cluster, sorted(drivers), options.node)

    try:
        count = asyncio.run(remove())
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} slice{'s' if count != 1 else ''} removed")
    return 0
