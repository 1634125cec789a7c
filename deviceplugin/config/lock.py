"""The lock: the commands and host paths that a config file may name.

Without a lock, a user who may write the ConfigMap is root on every node, because the agent runs the file's commands and
mounts its host paths into containers. `run` makes the lock from --allow-commands and --allow-host-path, which the
writer of the file cannot change.

The file's paths have no `.` and `..` steps (`texts`). The lock must allow both a path as it is written, and the target
of the path's symlinks. The paths of devices are checked each time that the devices are listed
(`deviceplugin.sources.configured`), other paths when the file is read. The agent cannot see symlinks that are not
mounted into its container, or that are made later.
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
"""The directory whose paths are allowed without an option, unless a prefix in it is given."""
PATHS: Final[Mapping[type, tuple[str, ...]]] = {
    DeviceEntry: ("path", "group"),
    PartConfig: ("path",),
    MountConfig: ("host",),
    ResourceConfig: ("nodes",),
    SimulatedConfig: ("unhealthy_file",),
}
"""For each type of mapping in the file, the keys whose values are paths of the host."""
ADOPTED: Final = "/run/deviceplugin/plugins"
"""The default directory in which vendors' plugins register with the agent. /run is empty after a reboot."""
CODE: Final[Mapping[type, tuple[str, ...]]] = {CommandProbeConfig: ("command",), NvidiaConfig: ("library",)}
"""For each type of mapping in the file, the keys whose values name code that the agent executes."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The commands, host paths and plugins that a config file may name.

    commands: whether the file may name code that the agent executes: commands of probes, and NVIDIA's library.
    host_paths: prefixes; a path equal to or below a prefix is allowed. A step of a prefix may be a pattern
    (/run/fpga*); the pattern allows a step of the same text, or a step without wildcards that it matches. /dev is a
    prefix, unless a prefix in /dev is given. plugins: whether vendors' plugins may be adopted, which choose the edits
    of containers themselves.
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
        """Return a lock that also allows its prefixes with symlinks resolved, such as /run/x for /var/run/x."""
        given = tuple(host_paths)
        return cls(commands, tuple(dict.fromkeys((*given, *map(_real_name, given)))), plugins)

    def allows(self, path: str) -> bool:
        """Return whether a path or glob, as written, is equal to or below an allowed prefix."""
        steps = _steps(path)
        return any(_begins(steps, _steps(prefix)) for prefix in self.prefixes)

    def problem(self, kind: type, path: str) -> str:
        """Return why a path in a mapping of this type is not allowed; "" if it is allowed. Reads symlinks."""
        if not self.allows(path):
            return self.refusal(path)
        target = path if kind in {DeviceEntry, PartConfig} else os.path.realpath(path)
        return "" if self.allows(target) else f"{path!r} is a symlink out of the allowed paths: {self.refusal(target)}"

    def refusal(self, path: str) -> str:
        """Return a message that a path is not allowed, with the option of `run` that allows this path."""
        within = ", ".join(self.prefixes)
        return f"{path!r} is a path of the host outside of {within}; `run --allow-host-path={path}` allows it"

    def arguments(self) -> list[str]:
        """Return the options of `run` that make this lock."""
        paths = [f"--allow-host-path={path}" for path in self.host_paths]
        return ["--allow-commands"] * self.commands + paths + [f"--adopt={ADOPTED}"] * self.plugins


OPEN: Final = Lock(commands=True, host_paths=("/",), plugins=True)
"""The lock that allows everything, for an author's own sources, and for commands that only read a config."""


def needed(config: Config) -> Lock:
    """Return the smallest lock that allows all commands, plugins and paths (outside of /dev) of a config."""
    parts = list(_parts(config))
    named = {path for part in parts for key in PATHS.get(type(part), ()) for path in texts_of(getattr(part, key))}
    commands = any(getattr(part, key) for part in parts for key in CODE.get(type(part), ()))
    plugins = any(resource.adopted for resource in config.resources)
    return Lock(commands, tuple(sorted(path for path in named if not Lock().allows(path))), plugins)


def texts_of(value: Any) -> Iterable[str]:
    """Return the texts of a value, which may be one text, several, or None."""
    return (value,) if isinstance(value, str) else [text for text in value or () if isinstance(text, str)]


def _parts(value: Any) -> Iterator[Struct]:
    """Yield a mapping of the file and all mappings nested in it."""
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

    Symlinks are not resolved in the last step, and in steps from the first pattern on.
    """
    steps = _steps(prefix)
    fixed = len(list(takewhile(lambda step: not _PATTERN.search(step), steps[:-1])))
    return os.path.join(os.path.realpath("/" + "/".join(steps[:fixed])), *steps[fixed:])


def _fits(step: str, pattern: str) -> bool:
    return step == pattern or (not _PATTERN.search(step) and fnmatchcase(step, pattern))
