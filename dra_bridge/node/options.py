"""Defines the options of an agent with device plugin and DRA, for `dra_bridge.run` and `dra-bridge run`."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin.node import options as common

if TYPE_CHECKING:
    from dra_bridge.kube import Cluster

AGENT: Final = "dra-bridge"
"""The default name of an agent, which is also the name of its directory in the kubelet's directory `plugins`."""
_NAME: Final = re.compile(r"[A-Za-z0-9]([-.A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an agent with device plugin and DRA to a parser."""
    node = os.environ.get("NODE_NAME") or socket.gethostname()
    about = "this node's name in the cluster (default: $NODE_NAME, else the host's name: %(default)s)"
    parser.add_argument("--node-name", default=node, metavar="NAME", help=about)
    add_kubeconfig(parser)
    about = "token and ca.crt of a service account, of the server $KUBERNETES_SERVICE_HOST (default: the pod's own)"
    parser.add_argument("--service-account", metavar="DIR", type=Path, help=about)
    about = "write status.devices of prepared claims: a GET and a PATCH for each claim, and the right to patch"
    parser.add_argument("--claim-status", action="store_true", help=about)
    about = "names the agent's directory, plugins/NAME in --kubelet-root; a second agent of the same name waits"
    parser.add_argument(
        "--agent-name", default=AGENT, metavar="NAME", type=_name, help=f"{about} (default: %(default)s)"
    )
    common.add_run_options(parser)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory name of letters, digits, dots and hyphens")
    return text


@dataclass(frozen=True, slots=True)
class BridgeOptions(common.RunOptions):
    """The values of the options of an agent with device plugin and DRA.

    node: the name of this node and of its pools. claim_status: whether to write `status.devices` of prepared claims.
    agent_name: the name of the directory with the ledger file and the drivers' sockets. namespace: the namespace of the
    node's Lease.
    """

    cluster: Cluster
    node: str
    claim_status: bool = False
    agent_name: str = AGENT
    namespace: str = "dra-bridge"


def parse_run(argv: Sequence[str] | None = None, metrics_address: str | None = None) -> BridgeOptions:
    """Parse the command line of a program that calls `dra_bridge.run(Source())`, and set up its logs.

    metrics_address: the address of the metrics server, if the program has no option for it.
    """
    about = "Serve devices to this node's pods and claims."
    parser = argparse.ArgumentParser(description=about, epilog=common.EXITS, allow_abbrev=False)
    add_run_options(parser)
    parser.set_defaults(metrics_address=metrics_address)
    from dra_bridge.kube import AccessError

    try:
        return run_options(parser.parse_args(argv))
    except AccessError as error:
        parser.exit(2, f"{error}\n")


def run_options(options: argparse.Namespace) -> BridgeOptions:
    """Return the values of the options that `add_run_options` added, and set up the logs.

    Raises AccessError if the configuration for the API server cannot be found or read.
    """
    run = common.run_options(options)
    from dra_bridge.kube import Cluster, own_namespace

    cluster = Cluster.from_environment(options.kubeconfig, options.service_account)
    # A wrong configuration is reported here, before the agent makes an event loop, a socket or a ledger.
    cluster.configure()
    node, agent = options.node_name, options.agent_name
    return BridgeOptions(run.paths, run.metrics_address, cluster, node, options.claim_status, agent, own_namespace())


def add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    """Add the option `--kubeconfig` to a parser."""
    about = "how to reach the API server (default: the pod's service account, else $KUBECONFIG, else ~/.kube/config)"
    parser.add_argument("--kubeconfig", metavar="FILE", help=about)
