"""The options that every agent has, on whichever command line: where the kubelet is, metrics, logs.

A module of its own, since an author's own plugin reads them as well as `deviceplugin run` does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin.addresses import parse_address

if TYPE_CHECKING:
    from deviceplugin.node.paths import Paths

__all__ = ["EXITS", "RunOptions", "add_run_options", "parse_run", "run_options"]

EXITS: Final = (
    "exit status: 0 all is well, 1 it failed while running, 2 wrong usage or a config file that cannot be used"
)


@dataclass(frozen=True)
class RunOptions:
    """What the options that every agent has say."""

    paths: Paths
    metrics_address: str | None


def parse_run(argv: Sequence[str] | None = None) -> RunOptions:
    """Read the options of an author's own plugin (`run(Source())`) and set up its logs."""
    parser = argparse.ArgumentParser(
        description="Serve a device plugin to this node's kubelet.", epilog=EXITS, allow_abbrev=False
    )
    add_run_options(parser)
    return run_options(parser.parse_args(argv))


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every agent has; dra-bridge has them too."""
    parser.add_argument(
        "--kubelet-root",
        type=_path,
        default=Path("/var/lib/kubelet"),
        metavar="DIR",
        help="the kubelet's --root-dir (%(default)s)",
    )
    parser.add_argument(
        "--device-plugin-dir",
        type=_path,
        metavar="DIR",
        help="where kubelet.sock is (device-plugins in the kubelet's root)",
    )
    parser.add_argument(
        "--pod-resources-socket",
        type=_path,
        metavar="PATH",
        help="the kubelet's PodResources service (pod-resources/kubelet.sock in its root)",
    )
    parser.add_argument(
        "--cgroup-root",
        type=_path,
        metavar="DIR",
        help="where the host's cgroup file system is mounted (/sys/fs/cgroup)",
    )
    parser.add_argument(
        "--pod-log-dir",
        type=_path,
        metavar="DIR",
        help="the kubelet's podLogsDir, which tells pods' names by their UIDs (/var/log/pods)",
    )
    parser.add_argument(
        "--metrics-address",
        type=_address,
        metavar="HOST:PORT",
        help="serve Prometheus metrics there, such as :9410 (not served)",
    )
    _add_log_options(parser)


def run_options(options: argparse.Namespace) -> RunOptions:
    """Take the options added by `add_run_options` and set up the logs as they say."""
    _set_up_logs(options)
    from deviceplugin.node.paths import Paths

    paths = Paths(
        options.kubelet_root,
        options.device_plugin_dir,
        options.pod_resources_socket,
        options.cgroup_root,
        options.pod_log_dir,
    )
    return RunOptions(paths, options.metrics_address)


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="lines for people or for machines (%(default)s)"
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much is said (%(default)s)",
    )


def _set_up_logs(options: argparse.Namespace) -> None:
    from deviceplugin.node import logs

    if options.log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines are not JSON
    logs.setup(options.log_format, options.log_level)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text).absolute()


def _address(text: str) -> str:
    try:
        parse_address(text)
    except OSError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT; write :9410 for all addresses, and an IPv6 address in brackets: [::1]:80"
        ) from None
    return text
