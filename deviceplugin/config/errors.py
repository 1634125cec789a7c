"""What is wrong with a config file: one problem, all of a file's, and the error that carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from deviceplugin.device import printable

if TYPE_CHECKING:
    import yaml

MAX_SHOWN: Final = 25
"""Problems that an error's text shows; all are in `problems`."""
MAX_PROBLEMS: Final = 100
"""Problems after which reading stops; the search for similar names takes most of a millisecond each."""


class Problem(NamedTuple):
    """One thing wrong with a file: its line (from 1), its place in it, and what would be right."""

    line: int
    path: str
    message: str


class ConfigError(ValueError):
    """Raised when a config file cannot be used; carries all problems that were found.

    Attributes:
        file: the file's name as it was given.
        problems: in the order of their lines, at least one.

    """

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__(file, self.problems)

    @property
    def line(self) -> int:
        """The first problem's line, from 1; 0 if it is about the file itself."""
        return self.problems[0].line

    @property
    def path(self) -> str:
        """The first problem's place in the file, `$.resources[0].devices[1]`."""
        return self.problems[0].path

    @property
    def message(self) -> str:
        """The first problem in words."""
        return self.problems[0].message

    def __str__(self) -> str:
        lines = []
        for line, path, message in self.problems[:MAX_SHOWN]:
            where = f"{self.file}:{line}" if line else self.file
            lines.append(f"{where}: {message}" if path == "$" and not line else f"{where}: {path}: {message}")
        if len(self.problems) > MAX_SHOWN:
            atleast = "at least " if len(self.problems) == MAX_PROBLEMS else ""
            lines.append(f"{self.file}: and {atleast}{len(self.problems) - MAX_SHOWN} more")
        return "\n".join(lines)


def file_error(file: str, message: str, line: int = 0) -> ConfigError:
    """Return the error about a whole file; line 0 is the file itself."""
    return ConfigError(file, [Problem(line, "$", message)])


class Problems:
    """Collects the problems of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Problem] = []

    def report(self, node: yaml.Node, path: str, message: str) -> None:
        """Add a problem with a node.

        Raises:
            ConfigError: there are too many problems to go on.

        """
        if len(message) > 600:
            message = f"{message[:300]} ... {message[-200:]}"
        self.found.append(Problem(node.start_mark.line + 1, printable(path), printable(message)))
        if len(self.found) == MAX_PROBLEMS:
            raise ConfigError(self.file, self.found)
