"""Defines the lock: the commands, host paths and plugins that a config file may name.

Without a lock, every user with the right to write the ConfigMap is root on every node, because the agent runs the
file's commands and mounts its host paths into containers. `run` makes the lock from --allow-commands and
--allow-host-path, which the writer of the file cannot change.

Paths in the file contain no `.` or `..` (`texts`). The lock must allow both a path as written, and its target if it is
a symlink. The paths of devices are checked whenever the devices are listed (`deviceplugin.sources.configured`). Other
paths are checked when the file is read. So the lock does not see symlinks that are made later, or that are not mounted
into the agent's container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any, Final

from msgspec import Struct

from deviceplugin.config.types import (
    CommandProbeConfig,
    Config,
    DeviceEntry,
    MountConfig,
    NvidiaConfig,
    PartConfig,
    ResourceConfig,
    SimulatedConfig,
)

_PATTERN: Final = re.compile(r"[*?[]")
DEVICES: Final = "/dev"
"""Paths in this directory are allowed without --allow-host-path. If an --allow-host-path is this directory or a path in
it, only the prefixes given by --allow-host-path are allowed."""
PATHS: Final[Mapping[type, tuple[str, ...]]] = {
    DeviceEntry: ("path", "group"),
    PartConfig: ("path",),
    MountConfig: ("host",),
    ResourceConfig: ("nodes",),
    SimulatedConfig: ("unhealthy_file",),
}
"""For each type of mapping in the config file: the keys whose values are host paths."""
ADOPTED: Final = "/run/deviceplugin/plugins"
"""The default directory in which vendors' plugins register with the agent. /run is empty after a reboot."""
CODE: Final[Mapping[type, tuple[str, ...]]] = {CommandProbeConfig: ("command",), NvidiaConfig: ("library",)}
"""For each type of mapping in the config file: the keys that name a program or library which the agent executes."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The commands, host paths and plugins that a config file may name.

    commands: whether the file may name code that the agent executes: commands of probes, and NVIDIA's library.
    host_paths: the allowed prefixes. A path is allowed if it is equal to a prefix or below it. A path element of a
    prefix may be a pattern (/run/fpga*). A pattern allows the same text in the file, and each name without wildcards
    that the pattern matches. /dev is allowed too, unless a prefix in /dev is given. plugins: whether the file may name
    vendors' plugins for adoption, which choose the edits of containers themselves.
    """

    commands: bool = False
    host_paths: tuple[str, ...] = ()
    plugins: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All allowed prefixes, including /dev unless a prefix in /dev is given."""
        narrowed = any(_steps(path)[:1] == [DEVICES[1:]] for path in self.host_paths)
        return self.host_paths if narrowed else (DEVICES, *self.host_paths)

    @classmethod
    def resolved(cls, commands: bool, host_paths: Iterable[str], plugins: bool = False) -> Lock:
        """Return a lock with these prefixes, and with the same prefixes after their symlinks are resolved.

        For example, /var/run/x becomes /run/x.
        """
        given = tuple(host_paths)
        return cls(commands, tuple(dict.fromkeys((*given, *map(_real_name, given)))), plugins)

    def allows(self, path: str) -> bool:
        """Return whether a path or glob, as written, is equal to or below an allowed prefix."""
        steps = _steps(path)
        return any(_begins(steps, _steps(prefix)) for prefix in self.prefixes)

    def problem(self, kind: type, path: str) -> str:
        """Return the reason why a path in a mapping of the type `kind` is not allowed; "" if it is allowed.

        The target of a symlink must be allowed too, except for paths of devices, which are checked when devices are
        listed.
        """
        if not self.allows(path):
            return self.refusal(path)
        target = path if kind in {DeviceEntry, PartConfig} else os.path.realpath(path)
        return "" if self.allows(target) else f"{path!r} is a symlink out of the allowed paths: {self.refusal(target)}"

    def refusal(self, path: str) -> str:
        """Return the message for a path that is not allowed, with the option of `run` that would allow the path."""
        within = ", ".join(self.prefixes)
        return f"{path!r} is a path of the host outside of {within}; `run --allow-host-path={path}` allows it"

    def arguments(self) -> list[str]:
        """Return the command-line options of `run` for this lock."""
        paths = [f"--allow-host-path={path}" for path in self.host_paths]
        return ["--allow-commands"] * self.commands + paths + [f"--adopt={ADOPTED}"] * self.plugins


OPEN: Final = Lock(commands=True, host_paths=("/",), plugins=True)
"""The lock that allows everything: for sources in Python, and for commands that only read a config file."""


def needed(config: Config) -> Lock:
    """Return the smallest lock that allows all commands, plugins and paths (outside of /dev) of a config."""
    parts = list(_parts(config))
    named = {path for part in parts for key in PATHS.get(type(part), ()) for path in texts_of(getattr(part, key))}
    commands = any(getattr(part, key) for part in parts for key in CODE.get(type(part), ()))
    plugins = any(resource.adopted for resource in config.resources)
    return Lock(commands, tuple(sorted(path for path in named if not Lock().allows(path))), plugins)


def texts_of(value: Any) -> Iterable[str]:
    """Return the texts in a value. The value is one text, a sequence of texts, or None."""
    return (value,) if isinstance(value, str) else [text for text in value or () if isinstance(text, str)]


def _parts(value: Any) -> Iterator[Struct]:
    """Yield a mapping of the config file, and all mappings nested in this mapping."""
    if isinstance(value, Struct):
        yield value
        for name in value.__struct_fields__:
            yield from _parts(getattr(value, name))
    elif isinstance(value, tuple):
        for element in value:
            yield from _parts(element)


def _steps(path: str) -> list[str]:
    return [step for step in path.split("/") if step]


def _begins(steps: list[str], prefix: list[str]) -> bool:
    return len(steps) >= len(prefix) and all(map(_fits, steps, prefix))


def _real_name(prefix: str) -> str:
    """Return a prefix with resolved symlinks.

    A symlink is kept if it is the last path element, or comes after the first element with a pattern.
    """
    steps = _steps(prefix)
    fixed = len(list(takewhile(lambda step: not _PATTERN.search(step), steps[:-1])))
    return os.path.join(os.path.realpath("/" + "/".join(steps[:fixed])), *steps[fixed:])


def _fits(step: str, pattern: str) -> bool:
    return step == pattern or (not _PATTERN.search(step) and fnmatchcase(step, pattern))
