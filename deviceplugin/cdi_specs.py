"""Reads the node's CDI specs: the names of CDI devices, and the device nodes that containers get with these devices.

Container runtimes read all specs in these directories, and find a CDI device by the `kind` in the specs, not by the
names of the files (tags.cncf.io/container-device-interface 1.0, pkg/cdi/cache.go and spec.go). The functions block.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from deviceplugin import cdi, looked_at
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import NodeKind, Tokens, node_token, numbers_of

_LOG: Final = logging.getLogger(__name__)

STATIC: Final = "/etc/cdi"
"""The directory of CDI specs that stay after a reboot."""
DIRECTORIES: Final = (STATIC, cdi.DIRECTORY)
_SUFFIXES: Final = (".json", ".yaml", ".yml")
_KINDS: Final[Mapping[str, NodeKind]] = {"c": "char", "u": "char", "b": "block"}  # The node kind of each CDI node type.

_Nodes = Sequence[Mapping[str, Any]]
"""The list `deviceNodes` of container edits."""


def directories(directory: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the directories of CDI specs on a node. directory: the directory to which this agent writes its specs."""
    return tuple(dict.fromkeys((*DIRECTORIES, os.fspath(directory))))


def names_of(kind: str, directories: Iterable[str]) -> frozenset[str]:
    """Return the short names of all CDI devices of this kind in the specs of these directories."""
    return frozenset(name for spec in _specs(directories) if spec.kind == kind for name in spec.devices)


def nodes_of(names: Collection[str], directories: Iterable[str]) -> Tokens:
    """Return the tokens of the device nodes that a container gets with CDI devices.

    A name without a spec gives no token. names: the fully qualified names of the CDI devices, `vendor/class=name`.
    """
    return frozenset[str]().union(*nodes_by_name(names, directories).values())


def nodes_by_name(names: Collection[str], directories: Iterable[str]) -> dict[str, Tokens]:
    """Return, for each of these CDI devices that has a spec, the tokens of the device nodes that a container gets.

    If a spec has no number for a node, the token has the node's present number. names: as of `nodes_of`.
    """
    tokens: dict[str, set[str]] = {}
    wanted = frozenset(names)
    for spec in _specs(directories) if wanted else ():
        for short, nodes in spec.devices.items():
            if (name := f"{spec.kind}={short}") in wanted:
                of = tokens.setdefault(name, set())
                for node in (*spec.common, *nodes):
                    of |= _numbers(node)
    return {name: frozenset(of) for name, of in tokens.items()}


def token_of(node: Mapping[str, Any]) -> str:
    """Return the identity token (type and number) of a device node in a CDI spec; "" if the spec has no number."""
    kind, major, minor = _KINDS.get(node.get("type", "")), node.get("major"), node.get("minor", 0)
    if kind is None or not (major and isinstance(major, int) and isinstance(minor, int)):
        return ""
    return node_token(kind, major, minor)


class _Spec(NamedTuple):
    """A CDI spec. devices: for the name of each device, its nodes. common: the nodes that come with every device."""

    kind: str = ""
    devices: Mapping[str, _Nodes] = {}
    common: _Nodes = ()


def _specs(directories: Iterable[str]) -> Iterator[_Spec]:
    for directory in directories:
        looked_at.at(directory)
        try:
            names = [name for name in os.listdir(directory) if name.endswith(_SUFFIXES)]
        except OSError:
            continue
        for file in (os.path.join(directory, name) for name in names):
            if (present := file_identity(file)) is not None:  # None if it was removed after the directory was listed.
                yield _kept(file, present) if present.settled else _read(file)


@functools.lru_cache(maxsize=1024)
def _kept(file: str, _: FileIdentity) -> _Spec:
    return _read(file)


def _read(file: str) -> _Spec:
    """Return the CDI spec in a file; an empty one if the file cannot be read as a CDI spec."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _Spec()  # The file was removed after the directory was listed.
    import yaml

    try:
        # The loader of libyaml is fast: a spec of GPUs has thousands of lines.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        spec = json.loads(text) if file.endswith(".json") else yaml.load(text, loader)  # noqa: S506  # a safe loader
        devices = {str(device["name"]): _nodes(device) for device in spec.get("devices") or ()}
        return _Spec(str(spec["kind"]), devices, _nodes(spec))
    except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError, RecursionError) as error:
        _LOG.warning("%s cannot be read as a CDI spec: %s", file, error)
    return _Spec()


def _nodes(edited: Mapping[str, Any]) -> _Nodes:
    return [node for node in (edited.get("containerEdits") or {}).get("deviceNodes") or () if _path(node)]


def _path(node: Mapping[str, Any]) -> str:
    return str(node.get("hostPath") or node["path"])


def _numbers(node: Mapping[str, Any]) -> Tokens:
    if token := token_of(node):
        return frozenset({token})
    # The agent's container may lack the directory in which a vendor's driver container has the nodes.
    return numbers_of([_path(node)]) or numbers_of([str(node.get("path"))])
