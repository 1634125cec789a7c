"""Runs the command line `deviceplugin`, with its commands run, validate, devices, schema, import, demo, completion.

The command line of `dra_bridge` uses this module's classes. Each command imports only the modules that it needs, so
that `validate` never loads gRPC, and `run` starts quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from deviceplugin import config, device_links
from deviceplugin.config import Config, ConfigError, Lock
from deviceplugin.device import Device, counted, printable
from deviceplugin.node import logs
from deviceplugin.node.options import EXITS, add_config_options, add_run_options, lock_of, run_options
from deviceplugin.tables import Line, aligned, fits, print_lines, terminal_width, wrapped
from deviceplugin.version import VERSION, installing

if TYPE_CHECKING:
    from deviceplugin.sources import ConfiguredSource

_LOG: Final = logging.getLogger(__name__)
_LIST_TIMEOUT: Final = 10.0
_Listed = list[tuple["ConfiguredSource", Sequence[Device]]]


class CommandError(Exception):
    """Raised when a command cannot continue. status: the exit status of the program."""

    def __init__(self, message: object, status: int = 2) -> None:
        super().__init__(str(message))
        self.status = status


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a help text. The lines of examples are not wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.split("\n\n")
        return "\n\n".join(one if one.startswith("examples:") else fill(one, width, indent) for one in paragraphs)


class CommandLine:
    """A program with commands. Each command is a function that gets the options and returns the exit status."""

    def __init__(self, program: str, about: str) -> None:
        self.parser = argparse.ArgumentParser(prog=program, description=about, epilog=EXITS, allow_abbrev=False)
        self.parser.add_argument(
            "--version", action="version", version=f"{program} {VERSION}", help="show the version and exit"
        )
        self._commands = self.parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        self, name: str, command: Callable[[argparse.Namespace], int], about: str, examples: Sequence[str] = ()
    ) -> argparse.ArgumentParser:
        """Add a command; return the parser for its options. examples: command lines without the program's name."""
        lines = "".join(f"  {self.parser.prog} {line}\n" for line in examples)
        epilog = f"examples:\n{lines}\n{EXITS}" if examples else EXITS
        parser = self._commands.add_parser(
            name, help=about, description=about, epilog=epilog, allow_abbrev=False, formatter_class=_HelpFormatter
        )
        parser.set_defaults(command=command)
        return parser

    def main(self, argv: Sequence[str] | None) -> int:
        """Run the command that the arguments name; return the exit status."""
        completion = self.add("completion", self._completion, "Print a shell's completion of this program.")
        completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
        if sys.stdout is None or sys.stderr is None:
            print("the standard output or error is closed; redirect it to /dev/null", file=sys.stderr or sys.stdout)
            return 2
        options = self.parser.parse_args(argv)
        try:
            status = int(options.command(options))
            # The output is flushed here, because an error of this flush is handled below, unlike an error of the flush
            # at exit.
            sys.stdout.flush()
            return status
        except CommandError as error:
            print("\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
            return error.status
        except ConfigError as error:
            print(explained(error), file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:
            if error.name != "aiohttp":
                raise
            print(error, file=sys.stderr)  # The error's message names the extra to install.
            return 2
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            if error.filename or error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            # The reader of the output has closed the pipe, or the disk is full. With /dev/null as the output, the
            # interpreter's last flush does not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.ENOSPC:
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
            return int(error.errno == errno.ENOSPC)

    def _completion(self, options: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError as error:
            raise CommandError(f"shtab is not installed; {installing('cli')}") from error
        for parser in (self.parser, *self._commands.choices.values()):
            for action in parser._actions:  # noqa: SLF001 - argparse has no other way to its options
                if action.metavar in ("FILE", "DIR", "PATH"):
                    action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(self.parser, options.shell))
        return 0


def standard_input() -> BinaryIO:
    """Return the standard input. Raises CommandError if the program was started without it (`<&-`)."""
    if sys.stdin is None:
        raise CommandError("the standard input is closed")
    return sys.stdin.buffer


def explained(error: ConfigError) -> str:
    """Return the problems of a config file as one text. The text also states their number if there are several."""
    number = len(error.problems)
    return f"{error}\n{error.file} cannot be used: {number} problems" if number > 1 else str(error)


# The functions below are the commands of `deviceplugin`.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `deviceplugin`; return the exit status."""
    line = CommandLine("deviceplugin", "Kubernetes device plugins from a file.")
    run = line.add("run", _run, "Serve the devices of a config file to this node's kubelet.")
    add_config_options(run)
    add_run_options(run)
    validate = line.add("validate", _validate, "Check config files.")
    validate.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="config files (YAML), - for standard input"
    )
    validate.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="another config file"
    )
    devices = line.add("devices", _devices, "List the devices that would be served on this node now.")
    either = devices.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="the config file (YAML), - for standard input"
    )
    either.add_argument("--config", type=Path, metavar="FILE", help="the same")
    devices.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="output format (default: %(default)s)"
    )
    examples = ("import generic-device-plugin.yaml > devices.yaml", "import - <<< \"--device '{...}'\"")
    about = "Make a config file of another plugin's settings, and name what has no counterpart here."
    import_ = line.add("import", _import, about, examples)
    import_.description = (
        f"{about} FILE has settings of generic-device-plugin, smarter-device-manager or NVIDIA's device plugin: "
        "a config file, flags, `args` of a container, a manifest, or values of a chart."
    )
    import_.add_argument("file", type=Path, metavar="FILE", help="the settings, - for standard input")
    line.add("schema", _schema, "Print the config file's JSON schema.")
    demo = line.add("demo", _demo, "Show a device plugin at work, with simulated devices and an embedded kubelet.")
    demo.add_argument("--hold", action="store_true", help="keep serving until interrupted")
    return line.main(argv)


def _run(options: argparse.Namespace) -> int:
    from deviceplugin.node.process import run_config

    run = run_options(options)
    try:
        return run_config(options.config, run.paths, run.metrics_address, lock_of(options), options.adopt)
    except ConfigError as error:
        if options.log_format != "json":
            raise
        _LOG.error("%s", error, extra={"file": error.file, "line": error.line, "path": error.path})
        return 2


def _load(file: Path) -> Config:
    """Read a config file, or standard input if the file is `-`. Raises ConfigError."""
    if str(file) != "-":
        return config.load(file)
    return config.parse(standard_input().read(config.MAX_BYTES + 1), _title(file))


def _title(file: Path) -> str:
    return "<stdin>" if str(file) == "-" else str(file)


def _validate(options: argparse.Namespace) -> int:
    files = [*options.files, *options.config]
    if not files:
        raise CommandError("deviceplugin validate: name a config file")
    status = 0
    for file in files:
        try:
            loaded = _load(file)
        except ConfigError as error:
            print(explained(error), file=sys.stderr)
            status = 2
            continue
        print(f"{_title(file)}: good, {counted(len(loaded.resources), 'resource')}")
        _note_options(_title(file), config.needed(loaded))
        for resource in loaded.resources:
            counts = [entry.simulated.count if entry.simulated else 0 for entry in resource.devices]
            if any(counts):
                print(f"{_title(file)}: note: {resource.name}: simulated devices have no device node", file=sys.stderr)
            if all(counts) and isinstance(share := resource.dra.share, int) and share > sum(counts):
                note = f"`dra: {{share: {share}}}` of {counted(sum(counts))}: all go to claims"
                print(f"{_title(file)}: note: {resource.name}: {note}", file=sys.stderr)
        if any(entry.path or entry.group for resource in loaded.resources for entry in resource.devices):
            from deviceplugin import sources

            for note in sources.overlaps(loaded.resources):
                print(f"{_title(file)}: warning: {note}", file=sys.stderr)
    return status


def _note_options(file: str, lock: Lock) -> None:
    """If `run` accepts this file only with certain options, print these options to stderr."""
    if arguments := lock.arguments():
        print(f"{file}: note: `run` takes it only with {shlex.join(arguments)}", file=sys.stderr)


def _devices(options: argparse.Namespace) -> int:
    import asyncio

    logs.setup("text", "error")
    file = options.file or options.config
    loaded = _load(file)
    listed, status = asyncio.run(_list(loaded))
    lock = config.needed(loaded)
    edits = [device.container_edits for _, devices in listed for device in devices]
    # If the host path of a device node is a symlink, `node.real` is the symlink's target.
    hosts = {node.real for edit in edits for node in edit.device_nodes}
    hosts |= {mount.host for edit in edits for mount in edit.mounts}
    outside = sorted(host for host in hosts if not lock.allows(host))
    _note_options(_title(file), config.Lock(lock.commands, (*lock.host_paths, *outside), lock.plugins))
    if options.output == "json":
        print(json.dumps({"resources": [_as_json(source, devices) for source, devices in listed]}, indent=2))
    else:
        _print_devices(listed)
    return status


def _import(options: argparse.Namespace) -> int:
    from deviceplugin.config import foreign

    try:
        data = standard_input().read() if str(options.file) == "-" else options.file.read_bytes()
        made = foreign.imported(data.decode().replace("\r\n", "\n"), config.parse)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{_title(options.file)}: cannot be read: {error}") from error
    except foreign.UnknownSettingsError as error:
        raise CommandError(f"{_title(options.file)}: {error}") from error
    for note in made.notes:
        print(f"{_title(options.file)}: not imported: {printable(note)}", file=sys.stderr)
    print(foreign.as_file(made), end="")
    return 0


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(config.schema(), indent=2))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from deviceplugin import demo

    return demo.main(options.hold)


async def _list(loaded: Config) -> tuple[_Listed, int]:
    """Return (the devices of each resource whose source lists them now, the exit status: 1 if a source failed).

    Resources that sources bring, such as those of MIG profiles, are among these resources.
    """
    from deviceplugin import sources

    for resource in loaded.resources:
        if resource.adopted:
            print(
                f"{resource.name}: its devices are listed by the plugin that registers with the agent", file=sys.stderr
            )
    configured = [resource for resource in loaded.resources if not resource.adopted]
    built = [sources.ConfiguredSource(resource, profiles=loaded.profiles) for resource in configured]
    listed = await _first_lists(built)
    names = {resource.name for resource in loaded.resources}
    children = [child for source, _ in listed for child in source.children() if child.resource not in names]
    listed += await _first_lists(children)
    return listed, int(len(listed) < len(built) + len(children))


async def _first_lists(built: Sequence[ConfiguredSource]) -> _Listed:
    """Return the devices of each source that lists them now. Print the errors of the others."""
    import asyncio

    lists = await asyncio.gather(*map(first_list, built), return_exceptions=True)
    listed: _Listed = []
    for source, devices in zip(built, lists, strict=True):
        if isinstance(devices, BaseException):
            reason = str(devices) or type(devices).__name__
            print(f"{source.resource}: its devices cannot be listed: {reason}", file=sys.stderr)
        else:
            listed.append((source, devices))
    return listed


async def first_list(source: ConfiguredSource) -> Sequence[Device]:
    """Return the first device list of a source.

    Raises the exceptions of the source's `watch`, and TimeoutError if no list comes within _LIST_TIMEOUT seconds.
    """
    import asyncio

    generator = cast("AsyncGenerator[Sequence[Device]]", source.watch())
    async with contextlib.aclosing(generator) as lists, asyncio.timeout(_LIST_TIMEOUT):
        return await anext(lists)


def _unlinked(devices: Sequence[Device]) -> list[str]:
    """Return warnings about devices that running containers lose after a reload of systemd (see `device_links`)."""
    if not device_links.reload_matters():
        return []
    missing = device_links.unlinked(devices)
    return [device_links.warning(missing)] if missing else []


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
                "mounts": [asdict(mount) for mount in device.edits.mounts],
            }
            for device in devices
        ],
        "notes": [*source.notes, *source.nodeless, *_unlinked(devices)],
    }


def _print_devices(listed: _Listed) -> None:
    print_lines(_table(listed, terminal_width()))
    for source, devices in listed:
        healthy = sum(device.health.usable for device in devices)
        unwell = f", {len(devices) - healthy} of them unhealthy" if healthy < len(devices) else ""
        offered = sum(map(source.replicas_of, devices))
        shared = f", offered {offered} times in all" if offered > len(devices) else ""
        notes = (*source.notes, *source.nodeless, *_unlinked(devices))
        print(f"{source.resource}: {counted(len(devices))}{unwell}{shared}")
        print_lines(wrapped(notes, terminal_width(), "  "))


def _table(listed: _Listed, width: int | None) -> Iterator[Line]:
    """Yield the lines of a table of all devices.

    If the paths make the table too wide, each path is printed on a line of its own.
    """
    rows = [
        (
            source.resource,
            device.id,
            device.health.value,
            str(source.replicas_of(device)),
            (source.topology and ",".join(map(str, device.numa_nodes))) or "-",
        )
        for source, devices in listed
        for device in devices
    ]
    if not rows:
        return
    header = ("RESOURCE", "DEVICE", "HEALTH", "REPLICAS", "NUMA")
    found = [
        (device, [printable(node) for node in _nodes(source, device)])
        for source, devices in listed
        for device in devices
    ]
    cells = [
        (*row[:2], row[2] + (f" ({device.message})" if device.message else ""), *row[3:], ", ".join(nodes) or "-")
        for row, (device, nodes) in zip(rows, found, strict=True)
    ]
    lines = aligned([tuple(map(printable, cell)) for cell in ((*header, "NODES"), *cells)])
    bad = [not device.health.usable for device, _ in found]
    if fits(lines, width):
        yield from map(Line, lines, (False, *bad))
    else:
        lines = aligned([(f"  {name}", *more) for _, name, *more in (header, *rows)])
        yield Line(lines[0])
        above = ""
        for line, row, (device, nodes), unwell in zip(lines[1:], rows, found, bad, strict=True):
            if row[0] != above:
                yield Line(above := row[0])
            yield Line(line, unwell)
            yield from wrapped(filter(None, [device.message, *nodes]), width, "      ")
    yield Line("")


def _nodes(source: ConfiguredSource, device: Device) -> list[str]:
    """Return the host paths that a container gets for this device, except paths that the resource's settings mount."""
    general = {mount.container for mount in source.config.mounts}
    places = [(node.real, node.path) for node in device.container_edits.device_nodes]
    places += [(mount.host, mount.container) for mount in device.edits.mounts if mount.container not in general]
    return [host if host == inside else f"{inside} -> {host}" for host, inside in places]
