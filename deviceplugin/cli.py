"""The command line: run, validate, devices, schema, demo.

What a command does not need it does not import: `validate` never loads gRPC, and `run` has little
between the start of the process and the kubelet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from deviceplugin.agent import Paths
    from deviceplugin.config import Config, ConfigError
    from deviceplugin.device import Device
    from deviceplugin.sources import ConfiguredSource

__all__ = ["RunOptions", "add_run_options", "main", "parse_run", "run_options"]

_LOG: Final = logging.getLogger(__name__)
_EXITS: Final = (
    "exit status: 0 all is well, 1 it failed while running, 2 wrong usage or a config file that cannot be used"
)
_LIST_TIMEOUT: Final = 10.0


@dataclass(frozen=True)
class RunOptions:
    """What the options that every agent has say."""

    paths: Paths
    metrics_address: str | None


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


def parse_run(argv: Sequence[str] | None = None) -> RunOptions:
    """Read the options of an author's own plugin (`run(Source())`) and set up its logs."""
    parser = argparse.ArgumentParser(
        description="Serve a device plugin to this node's kubelet.", epilog=_EXITS, allow_abbrev=False
    )
    add_run_options(parser)
    return run_options(parser.parse_args(argv))


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every agent has; dra-bridge has them too."""
    parser.add_argument(
        "--kubelet-root",
        type=Path,
        default=Path("/var/lib/kubelet"),
        metavar="DIR",
        help="the kubelet's --root-dir (%(default)s)",
    )
    parser.add_argument(
        "--device-plugin-dir",
        type=Path,
        metavar="DIR",
        help="where kubelet.sock is (device-plugins in the kubelet's root)",
    )
    parser.add_argument(
        "--pod-resources-socket",
        type=Path,
        metavar="PATH",
        help="the kubelet's PodResources service (pod-resources/kubelet.sock in its root)",
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
    from deviceplugin.agent import Paths

    paths = Paths(options.kubelet_root, options.device_plugin_dir, options.pod_resources_socket)
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
    from deviceplugin import logs

    if options.log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines are not JSON
    logs.setup(options.log_format, options.log_level)


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT; write :9410 for all addresses")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise argparse.ArgumentTypeError(f"an IPv6 address goes in brackets: [{host}]:{port}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deviceplugin", description="Kubernetes device plugins from a file.", epilog=_EXITS, allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about, epilog=_EXITS, allow_abbrev=False)
        one.set_defaults(command=command)
        return one

    run = add("run", _run, "Serve the devices of a config file to this node's kubelet.")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    add_run_options(run)
    validate = add("validate", _validate, "Check config files.")
    validate.add_argument("files", type=Path, nargs="*", metavar="FILE", help="config files (YAML)")
    validate.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="one more of them")
    devices = add("devices", _devices, "List the devices that would be served on this node now.")
    devices.add_argument("--config", type=Path, required=True, metavar="FILE", help="the config file (YAML)")
    devices.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="how they are shown (%(default)s)"
    )
    add("schema", _schema, "Print the config file's JSON schema.")
    demo = add("demo", _demo, "Show it all at work, with simulated devices and a kubelet in this process.")
    demo.add_argument("--hold", action="store_true", help="go on serving until interrupted")
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"deviceplugin {version('deviceplugin')}")
        except PackageNotFoundError:
            print("deviceplugin, not installed")
        parser.exit()


def _run(options: argparse.Namespace) -> int:
    with _without_openssl():
        from deviceplugin import sources  # noqa: F401  # needed in a moment
        from deviceplugin.config import ConfigError
        from deviceplugin.process import run_config

        if options.metrics_address is not None:
            from deviceplugin import metrics  # noqa: F401
    run = run_options(options)

    try:
        return run_config(options.config, run.paths, run.metrics_address)
    except ConfigError as error:
        if options.log_format == "json":
            _LOG.error("%s", error, extra={"file": error.file, "line": error.line, "path": error.path})
        else:
            _say(error)
        return 2


@contextlib.contextmanager
def _without_openssl() -> Iterator[None]:
    """Have the imports inside do without OpenSSL: 6 MB on every node for what a plugin never uses.

    asyncio and hashlib know Pythons that are built without it. Afterwards it can be imported.
    """
    hidden = [name for name in ("ssl", "_hashlib") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: not to be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _validate(options: argparse.Namespace) -> int:
    from deviceplugin import config

    files = [*options.files, *options.config]
    if not files:
        print("deviceplugin validate: name a config file", file=sys.stderr)
        return 2
    status = 0
    for file in files:
        try:
            found = config.load(file)
        except config.ConfigError as error:
            _say(error)
            status = 2
        else:
            print(f"{file}: good, {_count(len(found.resources), 'resource')}")
    return status


def _devices(options: argparse.Namespace) -> int:
    import asyncio

    from deviceplugin import config, logs

    logs.setup("text", "error")
    try:
        found = config.load(options.config)
    except config.ConfigError as error:
        _say(error)
        return 2
    listed, status = asyncio.run(_list(found))
    if options.output == "json":
        print(json.dumps({"resources": [_as_json(source, devices) for source, devices in listed]}, indent=2))
    else:
        _print_table(listed)
    return status


def _schema(options: argparse.Namespace) -> int:
    from deviceplugin import config

    print(json.dumps(config.schema(), indent=2))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from deviceplugin import demo

    return demo.main(options.hold)


def _say(error: ConfigError) -> None:
    more = _count(len(error.problems), "problem")
    print(f"{error}\n{error.file} cannot be used: {more}" if len(error.problems) > 1 else error, file=sys.stderr)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# What would be served.

_Listed = list[tuple["ConfiguredSource", Sequence["Device"]]]


async def _list(found: Config) -> tuple[_Listed, int]:
    import asyncio

    from deviceplugin import sources

    built = [sources.build(resource) for resource in found.resources]
    lists = await asyncio.gather(*map(_first_list, built), return_exceptions=True)
    listed: _Listed = []
    status = 0
    for source, devices in zip(built, lists, strict=True):
        if isinstance(devices, BaseException):
            print(
                f"{source.resource}: its devices cannot be listed: {str(devices) or type(devices).__name__}",
                file=sys.stderr,
            )
            status = 1
        else:
            listed.append((source, devices))
    return listed, status


async def _first_list(source: ConfiguredSource) -> Sequence[Device]:
    import asyncio

    generator = cast("AsyncGenerator[Sequence[Device]]", source.watch())
    async with contextlib.aclosing(generator) as lists, asyncio.timeout(_LIST_TIMEOUT):
        return await anext(lists)


def _as_json(source: ConfiguredSource, devices: Sequence[Device]) -> dict[str, Any]:
    return {
        "name": source.resource,
        "driver": source.driver,
        "topology": source.topology,
        "offered": sum(map(source.replicas_of, devices)),
        "devices": [
            {
                "id": device.id,
                "health": device.health.value,
                "message": device.message,
                "replicas": source.replicas_of(device),
                "numa": list(device.numa_nodes) if source.topology else [],
                "nodes": [
                    {"host": node.host, "container": node.path, "permissions": node.permissions}
                    for node in device.container_edits.device_nodes
                ],
                "mounts": [
                    {"host": mount.host, "container": mount.container, "readonly": mount.readonly}
                    for mount in device.edits.mounts
                ],
            }
            for device in devices
        ],
        "notes": list(source.notes),
    }


_COLUMNS: Final = ("RESOURCE", "DEVICE", "HEALTH", "REPLICAS", "NUMA", "NODES")


def _print_table(listed: _Listed) -> None:
    rows = [
        (
            source.resource,
            device.id,
            device.health.value + (f" ({device.message})" if device.message else ""),
            str(source.replicas_of(device)),
            (source.topology and ",".join(map(str, device.numa_nodes))) or "-",
            _nodes(source, device),
        )
        for source, devices in listed
        for device in devices
    ]
    if rows:
        _print_rows(rows)
        print()
    for source, devices in listed:
        healthy = sum(device.health.usable for device in devices)
        unwell = f", {len(devices) - healthy} of them unhealthy" if healthy < len(devices) else ""
        offered = sum(map(source.replicas_of, devices))
        shared = f", offered {offered} times in all" if offered > len(devices) else ""
        print(f"{source.resource}: {_count(len(devices), 'device')}{unwell}{shared}")
        for note in source.notes:
            print(f"  {note}")


def _nodes(source: ConfiguredSource, device: Device) -> str:
    """Return what of the host goes into a container because of this device, not of its resource."""
    general = {mount.container for mount in source.config.mounts}
    places = [(node.host, node.path) for node in device.container_edits.device_nodes]
    places += [(mount.host, mount.container) for mount in device.edits.mounts if mount.container not in general]
    return ", ".join(host if host == inside else f"{inside} -> {host}" for host, inside in places) or "-"


def _print_rows(rows: Iterable[Sequence[str]]) -> None:
    if sys.stdout.isatty() and _print_rich(rows):
        return
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(_COLUMNS) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))


def _print_rich(rows: Iterable[Sequence[str]]) -> bool:
    """Print with rich, where the extra `cli` is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        style = "red" if row[2].startswith("unhealthy") else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    Console().print(table)
    return True
