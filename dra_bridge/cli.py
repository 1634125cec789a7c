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
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from failing at its flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    manifests = add("manifests", _manifests, "Print what to apply to a cluster so that the agent runs on its nodes.")
    _add_deployment(manifests)
    return parser


def _add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options of `manifests.Deployment`; what is not given keeps its default there."""

    def add(option: str, field: str, about: str, **more: Any) -> None:
        parser.add_argument(option, dest=field, default=argparse.SUPPRESS, help=about, **more)

    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    add("--image", "image", "the agent's image (dra-bridge:latest)", metavar="IMAGE")
    add("--pull-policy", "pull_policy", "of the image (IfNotPresent)", choices=("Always", "IfNotPresent", "Never"))
    add("--namespace", "namespace", "where the agent runs (dra-bridge)", metavar="NAME")
    add("--name", "name", "of the DaemonSet and all that belongs to it (dra-bridge)", metavar="NAME")
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
    add("--kubelet-root", "kubelet_root", "the kubelet's --root-dir (/var/lib/kubelet)", metavar="DIR")
    add("--cdi-dir", "cdi_directory", "where the container runtime finds CDI specs (/var/run/cdi)", metavar="DIR")
    add("--metrics-port", "metrics_port", "0 for no metrics, and no probes (9410)", type=_port, metavar="PORT")
    add("--memory", "memory", "the container's limit (128Mi)", metavar="QUANTITY")
    add(
        "--node-selector",
        "node_selector",
        "a label that nodes must have; may be given several times",
        type=_label,
        action="append",
        metavar="KEY=VALUE",
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


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
    sys.stdout.write(to_yaml(manifests(found, text, Deployment(**given))))
    return 0
