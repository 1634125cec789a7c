"""Parses a config file into YAML nodes, with limits for size and depth, and defines the errors of config files.

Scalars are read by YAML 1.2's core schema: `on`, `no`, `12:30` and `0644` are text, and only `true` and `false` are
booleans. Anchors and merge keys are supported.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import yaml

from deviceplugin.config.texts import MAX_TEXT
from deviceplugin.device import printable

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML without libyaml gives the same results, but is slower.
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]

MAX_BYTES: Final = 4 << 20
"""Maximum bytes of a config file. The file is usually in a ConfigMap, which can hold 1 MiB."""
MAX_VALUES: Final = 50_000
"""Maximum number of values in a file, before and after YAML aliases are replaced. Each value takes up to 500 bytes of
memory."""
MAX_DIRECTIVES: Final = 32
"""Maximum number of %TAG directives. libyaml compares each directive with all earlier directives, so 200,000 directives
would take minutes."""
MAX_DEPTH: Final = 32
"""Maximum nesting depth of lists and mappings. libyaml overflows the stack at some 10,000 levels."""
MAX_SHOWN: Final = 25
"""Maximum number of problems in an error's text. The error's attribute `problems` has all problems."""
MAX_UNKNOWN: Final = 3
"""Maximum number of unknown keys without a similar known key that are reported for one mapping. More unknown keys mean
that the file is probably no config file."""
MAX_PROBLEMS: Final = 100
"""Number of problems after which reading of the file stops, because the search for similar names takes up to a
millisecond for each problem."""


class Problem(NamedTuple):
    """One problem of a file. line: the number of the line, from 1; 0 for the file as a whole.

    path: the path of the key with the problem. message: the mistake and its correction, as text.
    """

    line: int
    path: str
    message: str


class ConfigError(ValueError):
    """Raised when a config file cannot be used.

    file: the file's name from the caller. problems: all problems (at least one), sorted by line. line, path, message:
    the fields of the first problem.
    """

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        self.line, self.path, self.message = self.problems[0]
        super().__init__(file, self.problems)

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
    """Return a ConfigError with one problem, which concerns the file as a whole. line: its line; 0 if there is none."""
    return ConfigError(file, [Problem(line, "$", message)])


class Problems:
    """Collects the problems of one config file; raises ConfigError after MAX_PROBLEMS.

    lines: a mapping from the path of each value that was read so far to the value's line.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Problem] = []
        self.lines: dict[str, int] = {}

    def report(self, path: str, message: str, line: int = 0) -> None:
        """Add a problem; raise ConfigError if there are MAX_PROBLEMS problems.

        line: the problem's line; 0 for the line of the value at `path`.
        """
        if len(message) > 600:
            message = f"{message[:300]} ... {message[-200:]}"
        self.found.append(Problem(line or self.lines[path], printable(path), printable(message)))
        if len(self.found) == MAX_PROBLEMS:
            raise ConfigError(self.file, self.found)


class Loader(_BaseLoader):
    """A PyYAML loader that composes nodes, with scalars by YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # Empty, so that the rules of YAML 1.1 do not apply.


TAG: Final = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    Loader.add_implicit_resolver(TAG + _name, re.compile(rf"^(?:{_pattern})\Z"), _first)


def compose(text: str | bytes, file: str) -> yaml.Node:
    """Return the root node of a file's only document.

    Raises ConfigError if the file is no YAML, is empty, is not a config file, or exceeds the limits.
    """
    try:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > MAX_BYTES:
            raise file_error(file, f"is larger than {MAX_BYTES >> 20} MiB; this is not a config file")
        text = data.decode("utf-8-sig")
        if data.count(b"%TAG") > MAX_DIRECTIVES:
            raise file_error(file, f"has more than {MAX_DIRECTIVES} %TAG directives")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise file_error(file, "is not UTF-8 text; save it as UTF-8", line) from None
    except UnicodeEncodeError as error:
        what = f"is not text: it contains a character that UTF-8 cannot encode ({error.reason})"
        raise file_error(file, what, text[: error.start].count("\n") + 1) from None  # type: ignore[arg-type]
    try:
        _bound(text, file)
        node: yaml.Node | None = yaml.compose(text, Loader=Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        # `error.character` is an int or a text, depending on whether libyaml is used.
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise file_error(file, f"is not YAML: the character #x{code:04x} is not allowed", line) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax(text, file, error) from None
    if node is None or kind(node) == "null":
        raise file_error(file, "is empty; it needs `resources:`, a list of resources with `name:` and `devices:`", 1)
    if kind(node) == "str":  # The message must not contain the text, because the text may be a password.
        how = "; `deviceplugin import` takes generic-device-plugin's flags" * bool(FLAG.search(scalar_text(node)))
        message = f"is a text without keys; this is not a config file, which begins with `resources:`{how}"
        raise file_error(file, message, 1)
    return node


def compose_all(text: str) -> list[yaml.Node]:
    """Return the root node of each YAML document in a text.

    Raises yaml.YAMLError, and ConfigError if the text exceeds the limits.
    """
    _bound(text, "<text>")
    return [node for node in yaml.compose_all(text, Loader=Loader) if node is not None]


def plain(root: yaml.Node, file: str = "<text>") -> Any:
    """Return a node's value: str, int, bool, None, list, or dict with str keys. Other scalars become str.

    If several aliases name one list or mapping, they all become the same Python object. Raises ConfigError if merge
    keys add too many keys.
    """
    made: dict[int, Any] = {}
    added = 0

    def merge(node: yaml.Node, pairs: dict[str, Any]) -> None:
        nonlocal added
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            merged = value(part) if isinstance(part, yaml.MappingNode) else {}
            added += len(merged)
            if added > MAX_VALUES:
                raise file_error(
                    file, f"has more than {MAX_VALUES} values once its aliases are followed", line_of(node)
                )
            pairs |= merged | pairs

    def value(node: yaml.Node) -> Any:
        text = scalar_text(node)
        match kind(node):
            case _ if id(node) in made:
                return made[id(node)]
            case "seq":
                items: list[Any] = made.setdefault(id(node), [])
                items += map(value, node.value)
                return items
            case "map":
                pairs: dict[str, Any] = made.setdefault(id(node), {})
                pairs.update({scalar_text(key): value(below) for key, below in node.value if kind(key) != "merge"})
                for key, below in node.value:
                    if kind(key) == "merge":
                        merge(below, pairs)
                return pairs
            case "int" if len(text) <= 40:
                return int(text)
            case "bool":
                return text.lower() == "true"
            case "null":
                return None
        return text

    return value(root)


def _bound(text: str, file: str) -> None:
    """Raise ConfigError if a file exceeds the limits of values, levels or characters."""
    depth = values = 0
    for event in yaml.parse(text, Loader=Loader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > MAX_DEPTH:
                raise file_error(file, f"is nested deeper than {MAX_DEPTH} levels", line)
            if values > MAX_VALUES:
                raise file_error(file, f"has more than {MAX_VALUES} values", line)
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
                message = f"has a text of {len(event.value)} characters; at most {MAX_TEXT} are allowed"
                raise file_error(file, message, line)


def line_of(node: yaml.Node) -> int:
    """Return the line of a node's beginning, from 1."""
    return int(node.start_mark.line) + 1


def _syntax(text: str, file: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 0
    message = ": ".join(part for part in (error.context, error.problem) if part)
    shown = "" if mark is None else text.split("\n")[min(mark.line, text.count("\n"))]
    # libyaml reads ahead of the events that this module checks, so its own depth limit can raise this error first.
    if "maximum nesting depth" in message:
        return file_error(file, f"is nested deeper than {MAX_DEPTH} levels", line)
    if mark is not None and "\t" in text[text.rfind("\n", 0, mark.index) + 1 :].partition("\n")[0]:
        message += "; the line contains a tab, YAML indents with spaces only"
    if "another document" in message:
        message = "a second document begins here; one file holds one document"
    elif "undefined alias" in message:
        message += "; an anchor (&name) comes before its alias (*name); put a pattern that begins with * in quotes"
    elif FLAG.search(shown):
        message += "; `deviceplugin import` makes a config file of generic-device-plugin's flags"
    elif glob := _GLOB.search(shown):
        message += f'; inside of [...] and {{...}} put a glob with brackets in quotes: "{glob[0]}"'
    elif named := _PLACEHOLDER.search(shown):
        message += f'; put a text with {named[1]} in quotes: "{named[0]}"'
    elif "mapping values are not allowed" in message or "did not find expected" in message:
        message += "; keys of one mapping, and dashes of one list, begin in the same column"
    return file_error(file, f"is not valid YAML: {message}", line)


_GLOB: Final = re.compile(r"(?<![^\s\[{,:])/[^\s\"',\[\]{}]*\[[^\]\s\"']*\][^\s\"',\]}]*")
"""Matches a glob with brackets that is not in quotes."""
_PLACEHOLDER: Final = re.compile(r"(?<![^\s\[{,:])[^\s\"',\[\]{}]*(\{(?:id|path|name|node)\})[^\s\"',\[\]{}]*")
"""Matches a text with a placeholder that is not in quotes."""
FLAG: Final = re.compile(r"(?<!\S)--(device|domain|config|listen|log-level|plugin-directory)(?:=|[ \t]*\n|[ \t]+|$)")
"""Matches a flag of generic-device-plugin in a command line, from the flag's name to the place where its value begins.
"""


def keys(node: yaml.Node) -> dict[str, yaml.Node]:
    """Return a dict from each key of a YAML mapping to its value; an empty dict for a node that is no mapping."""
    return {scalar_text(key): value for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def check_kind(node: yaml.Node, file: str) -> None:
    """Raise ConfigError for a Kubernetes object or Helm values that contain a config file, as they are none."""
    given = keys(node)
    if {"apiVersion", "kind"} <= given.keys():
        what = scalar_text(given["kind"])
        how = "" if what != "ConfigMap" else "; the config file is a text under its `data`, save that text as a file"
        raise file_error(file, f"is a Kubernetes object ({what[:63]}), not a config file{how}", 1)
    if {"config", "groups"} & given.keys():
        how = "the config file is what `config` has; `helm template` shows the ConfigMaps that the chart makes of it"
        raise file_error(file, f"looks like values of the Helm chart; {how}", 1)


_SCALARS: Final = {"str", "int", "float", "bool", "null", "merge"}


def kind(node: yaml.Node) -> str:
    """Return the kind of a node: map, seq, str, int, float, bool, null or merge; for other kinds, the node's tag."""
    if isinstance(node, yaml.ScalarNode):
        name = node.tag.removeprefix(TAG)
        return name if name in _SCALARS else node.tag
    if node.tag not in {TAG + "map", TAG + "seq"}:
        return node.tag
    return "map" if isinstance(node, yaml.MappingNode) else "seq"


def scalar_text(node: yaml.Node) -> str:
    """Return a scalar's text; "" for a list or mapping, because its nesting can be infinite."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
