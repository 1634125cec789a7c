"""The command-line options for paths, metrics and logs, of all agents and of plugins that call `run(Source())`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin.addresses import parse_address
from deviceplugin.kubelet.paths import Paths
from deviceplugin.node import logs

if TYPE_CHECKING:
    from deviceplugin.config import Lock, MetricsConfig

EXITS: Final = "exit status: 0 success, 1 failure while running, 2 wrong usage or a config file that cannot be used"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The values of the options that all agents have (`add_run_options`)."""

    paths: Paths
    metrics_address: str | None


def parse_run(argv: Sequence[str] | None = None, metrics_address: str | None = None) -> RunOptions:
    """Parse the options of a plugin that calls `run(Source())`, and set up its logs.

    metrics_address: the address of the metrics if the command line names none.
    """
    parser = argparse.ArgumentParser(
        description="Serve a device plugin to this node's kubelet.", epilog=EXITS, allow_abbrev=False
    )
    add_run_options(parser)
    parser.set_defaults(metrics_address=metrics_address)
    return run_options(parser.parse_args(argv))


def metrics_config(
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    token: str | Path | None = None,
) -> MetricsConfig | None:
    """Return the metrics' settings for a plugin that calls `run(Source())`; None if no path is given.

    Raises ValueError if a path is not absolute, or if `key` or `client_ca` is given without `certificate`.
    """
    files = {"certificate": certificate, "key": key, "client_ca": client_ca, "token": token}
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in given.items():
        if not isinstance(path, str | Path) or not str(path).startswith("/"):
            raise ValueError(f"{name} must be an absolute path, not {path!r}")
        if name in ("key", "client_ca") and "certificate" not in given:
            raise ValueError(f"{name}: there is no TLS without `certificate`")
    if not given:
        return None
    from deviceplugin.config import MetricsConfig

    paths = {name: str(path) for name, path in given.items()}
    return MetricsConfig(
        certificate=paths.get("certificate"),
        key=paths.get("key"),
        client_ca=paths.get("client_ca"),
        token=paths.get("token"),
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all agents have, dra-bridge included."""
    paths = Paths()

    def add(option: str, default: Path | None, metavar: str, about: str) -> None:
        parser.add_argument(option, type=_path, default=default, metavar=metavar, help=about)

    add("--kubelet-root", paths.kubelet_root, "DIR", "the kubelet's --root-dir (default: %(default)s)")
    plugins = "where kubelet.sock is; most kubelets with another --root-dir have it in /var/lib/kubelet/device-plugins"
    add("--device-plugin-dir", None, "DIR", f"{plugins} (default: device-plugins in --kubelet-root)")
    socket = "the kubelet's PodResources service (default: pod-resources/kubelet.sock in its root)"
    add("--pod-resources-socket", None, "PATH", socket)
    add(
        "--cgroup-root",
        paths.cgroup_root,
        "DIR",
        "where the host's cgroup file system is mounted (default: %(default)s)",
    )
    pod_logs = "the kubelet's podLogsDir, whose directories have pods' names and UIDs (default: %(default)s)"
    add("--pod-log-dir", paths.pod_log_dir, "DIR", pod_logs)
    container_logs = "where the kubelet links to the logs of containers that have started (default: %(default)s)"
    add("--container-log-dir", paths.container_log_dir, "DIR", container_logs)
    add("--cdi-dir", paths.cdi_dir, "DIR", "where the container runtime finds CDI specs (default: %(default)s)")
    parser.add_argument(
        "--metrics-address",
        type=_address,
        metavar="HOST:PORT",
        help="serve Prometheus metrics at this address, such as :9410, with the names of holders; `metrics` of the "
        "config file adds TLS and a token (default: not served)",
    )
    formats = "log lines as text or as JSON (default: %(default)s)"
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text", help=formats)
    parser.add_argument(
        "--log-level", choices=logs.LEVELS, default="info", help="lowest level that is logged (default: %(default)s)"
    )


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a config file and its lock. A plugin that calls `run(Source())` has no such options."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    commands = (
        "let the file name what the agent runs: commands of health.probe, and NVIDIA's library (default: refused)"
    )
    parser.add_argument("--allow-commands", action="store_true", help=commands)
    paths = (
        "let the file name host paths at and below this one, besides /dev; one below /dev replaces /dev; may be "
        "repeated (default: /dev)"
    )
    parser.add_argument("--allow-host-path", type=_host_path, action="append", default=[], metavar="PREFIX", help=paths)
    adopt = (
        "let vendors' device plugins register in this directory instead of the kubelet's, and serve their devices; a "
        "plugin decides what containers get of the host (default: none can register)"
    )
    parser.add_argument("--adopt", type=Path, metavar="DIR", help=adopt)


def lock_of(options: argparse.Namespace) -> Lock:
    """Return the config file's lock (the commands and paths that the file may name) from the command-line options."""
    from deviceplugin.config import Lock

    return Lock.resolved(options.allow_commands, options.allow_host_path, options.adopt is not None)


def run_options(options: argparse.Namespace) -> RunOptions:
    """Return the values of the options that `add_run_options` has added, and set up the logs."""
    if options.log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's log lines are turned off, because they are not JSON.
    logs.setup(options.log_format, options.log_level)
    paths = Paths(**{field.name: getattr(options, field.name) for field in fields(Paths)})
    return RunOptions(paths, options.metrics_address)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text).absolute()


def _host_path(text: str) -> str:
    if not text.startswith("/") or {".", ".."} & set(text.split("/")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an absolute path without . and ..")
    return text


def _address(text: str) -> str:
    try:
        parse_address(text)
    except OSError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT; write :9410 for all addresses, and an IPv6 address in brackets: [::1]:80"
        ) from None
    return text
