"""The command line of `convert`, which reads and prints manifests alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deviceplugin.cli import CommandError, CommandLine
from deviceplugin.device import counted, printable

if TYPE_CHECKING:
    from dra_bridge.convert.convert import ManifestText
    from dra_bridge.convert.pods import CustomPath

_SUFFIXES: Final = {".json", ".yaml", ".yml"}
_CONVERT: Final = """
Replace the limits of pods by claims, in manifests, and print them; what is to be said about them goes to the standard
error. Nothing else of the text changes. The exit status is 1 if something was refused: it is printed as it was.
"""


def add_convert(line: CommandLine) -> None:
    """Add the command `convert`."""
    command = line.add("convert", _convert, "Print manifests with claims in place of limits, or the other way round.")
    command.description = _CONVERT
    add_files(command, "manifests (default: -)")
    about = "the namespace of objects that name none; it is written into their templates"
    command.add_argument("--namespace", "-n", default="", metavar="NAME", help=about)
    about = "the DeviceClass for an extended resource, beside those of DeviceClasses in the manifests; may be repeated"
    command.add_argument("--class", dest="classes", action="append", default=[], metavar="NAME=CLASS", help=about)
    about = "where a custom resource has pod templates, such as RayCluster=spec.workerGroupSpecs[*].template"
    command.add_argument(
        "--pod-template-path", type=_custom, action="append", default=[], metavar="KIND=PATH", help=about
    )
    about = "the version of resource.k8s.io for the templates (default: %(default)s)"
    command.add_argument("--resource-api", choices=("v1", "v1beta2", "v1beta1"), default="v1", help=about)
    either = command.add_mutually_exclusive_group()
    about = "print what --patch names instead: a Kustomize component that converts, or the templates that it needs"
    either.add_argument("--patch", choices=("kustomize", "templates"), help=about)
    either.add_argument("--reverse", action="store_true", help="print the manifests as they were before")


def add_files(command: argparse.ArgumentParser, about: str) -> None:
    """Add the option for files, directories and the standard input."""
    command.add_argument(
        "-f",
        "--filename",
        dest="files",
        action="append",
        default=[],
        metavar="FILE",
        help=f"a file, a directory with files of YAML and JSON below it, or - for standard input: {about}",
    )


def _custom(text: str) -> CustomPath:
    from dra_bridge.convert.pods import CustomPath

    try:
        return CustomPath.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _classes(given: list[str]) -> dict[str, str]:
    from deviceplugin.naming import NamingError, check_resource

    classes: dict[str, str] = {}
    for text in given:
        name, _, class_name = text.partition("=")
        try:
            check_resource(name)
        except NamingError as error:
            raise CommandError(f"dra-bridge convert: --class {text}: {error}") from error
        if not class_name or classes.setdefault(name, class_name) != class_name:
            raise CommandError(f"dra-bridge convert: --class {text}: write NAME=CLASS, once for each resource")
    return classes


def _paths(files: list[str]) -> Iterator[Path]:
    for name in files:
        path = Path(name)
        if name == "-" or not path.is_dir():
            yield path
            continue
        below = path.rglob("*")
        yield from sorted(one for one in below if one.suffix in _SUFFIXES and one.is_file())


def read_files(files: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of files, of those below directories, and of the standard input. Raises CommandError."""
    paths = list(_paths(files))
    if not paths:
        raise CommandError(f"there are no files of YAML or JSON in {', '.join(files)}")
    for path in paths:
        try:
            data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
        yield "<stdin>" if str(path) == "-" else str(path), data


def _streams(files: list[str]) -> list[ManifestText]:
    from dra_bridge.convert.convert import ManifestText

    try:
        return [ManifestText(name, data.decode()) for name, data in read_files(files)]
    except UnicodeDecodeError as error:
        raise CommandError(f"a file is not UTF-8: {error}") from error


def _convert(options: argparse.Namespace) -> int:
    from dra_bridge.convert import kustomize
    from dra_bridge.convert.convert import Conversion, convert, joined, reverse
    from dra_bridge.convert.remarks import Level

    classes = _classes(options.classes)
    streams = _streams(options.files or ["-"])
    if options.reverse:
        _write(joined(reverse(streams)))
        return 0
    how = Conversion(classes, options.namespace, options.resource_api, options.pod_template_path)
    converted = convert(streams, how)
    if options.patch:
        _write(kustomize.component(converted, how) if options.patch == "kustomize" else kustomize.templates(converted))
    else:
        _write(joined(converted.texts))
    for remark in converted.remarks:
        print(printable(str(remark)), file=sys.stderr)
    changed = counted(sum(len(pod.change.containers) for pod in converted.pods), "container")
    print(f"converted: {changed}; {counted(len(converted.templates), 'ResourceClaimTemplate')}", file=sys.stderr)
    return int(any(remark.kind.level is Level.REFUSED for remark in converted.remarks))


def _write(text: str) -> None:
    """Write a text byte for byte; the text layer would change the ends of lines on some systems."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
