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
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from deviceplugin.node.options import EXITS, add_run_options, run_options

if TYPE_CHECKING:
    from deviceplugin.config import Config, ConfigError
    from deviceplugin.device import Device
    from deviceplugin.sources import ConfiguredSource

__all__ = ["main"]

_LOG: Final = logging.getLogger(__name__)
_LIST_TIMEOUT: Final = 10.0


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
        prog="deviceplugin", description="Kubernetes device plugins from a file.", epilog=EXITS, allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, about: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about, epilog=EXITS, allow_abbrev=False)
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
    from deviceplugin.config import ConfigError
    from deviceplugin.node.process import run_config

    run = run_options(options)

    try:
        return run_config(options.config, run.paths, run.metrics_address)
    except ConfigError as error:
        if options.log_format == "json":
            _LOG.error("%s", error, extra={"file": error.file, "line": error.line, "path": error.path})
        else:
            _say(error)
        return 2


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
            if any(entry.path or entry.group for resource in found.resources for entry in resource.devices):
                from deviceplugin import sources

                for note in sources.overlaps(found.resources):
                    print(f"{file}: warning: {note}", file=sys.stderr)
    return status


def _devices(options: argparse.Namespace) -> int:
    import asyncio

    from deviceplugin import config
    from deviceplugin.node import logs

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
