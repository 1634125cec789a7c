"""Reads a config file along its types, to values or to all the problems that it has."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from deviceplugin.config import document
from deviceplugin.config.document import ConfigError
from deviceplugin.config.messages import accepts, any_of, closest, expected, got, mismatch, place_below
from deviceplugin.config.rules import Checked, Rules
from deviceplugin.config.types import Config


def load(path: str | Path) -> Config:
    """Read a config file.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be served.

    """
    file = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(document.MAX_BYTES + 1)
    except IsADirectoryError:
        raise document.file_error(file, "is a directory; name the file in it") from None
    except OSError as error:
        raise document.file_error(file, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise document.file_error(file, f"cannot be read: {error}") from None
    return parse(data, file)


def parse(text: str | bytes, file: str = "<config>") -> Config:
    """Read a config from text; `file` is what errors call it.

    Raises:
        ConfigError: what it says cannot be served.

    """
    reader = Reader(file)
    config = reader.read(document.compose(text, file), _type_info(), "$")
    if reader.problems.found:
        raise ConfigError(file, reader.problems.found)
    assert isinstance(config, Config)
    return config


@functools.cache
def _type_info() -> Any:
    """Return the types of the file as msgspec describes them, which takes a while."""
    import msgspec.inspect

    return msgspec.inspect.type_info(Config)


_BAD: Final = object()
"""Stands for a value about which a problem has been reported."""


class Reader:
    """Reads a file's nodes along the types; collects problems instead of stopping at the first."""

    def __init__(self, file: str) -> None:
        self.problems = document.Problems(file)
        self._rules = Rules()
        self._values = 0
        self._merging: set[int] = set()

    def read(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None = None) -> Any:
        """Return a node's value as this type has it, or _BAD with the problem reported.

        advice: what to write in place of a text of the wrong form.

        Raises:
            ConfigError: the file has too many values or problems to go on.

        """
        self._count(node)
        kind = type(info).__name__
        if kind == "Metadata":
            return self.read(node, info.type, path, (info.extra or {}).get("advice", advice))
        value = document.scalar_text(node)
        match kind, document.kind(node):
            case _, "null":
                return self._report(node, path, f"has no value; expected {expected(info)}")
            case "UnionType", _:
                return self._union(node, info, path, advice)
            case "StructType", "map":
                return self._struct(node, info, path)
            case "DictType", "map":
                return self._dict(node, info, path)
            case "VarTupleType", "seq":
                return self._tuple(node, info, path)
            case "LiteralType", "str":
                return self._word(node, info, info, path)
            case "StrType", "str":
                return self._string(node, info, path, advice)
            case "BoolType", "bool" if value.lower() in {"true", "false"}:
                return value.lower() == "true"
            case "IntType", "int" if re.fullmatch(r"[-+]?[0-9]{1,40}", value):
                return self._integer(node, info, path)
        return self._report(node, path, mismatch(node, info))

    def _report(self, node: yaml.Node, path: str, message: str) -> Any:
        self.problems.report(node, path, message)
        return _BAD

    def _count(self, node: yaml.Node) -> None:
        self._values += 1
        if self._values > document.MAX_VALUES:
            message = f"has more than {document.MAX_VALUES} values once its aliases are followed; use fewer aliases"
            raise document.file_error(self.problems.file, message, node.start_mark.line + 1)

    def _union(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        options = [option for option in info.types if type(option).__name__ != "NoneType"]
        if len(options) == 1:
            return self.read(node, options[0], path, advice)
        for option in options:
            if accepts(option, node):
                if type(option).__name__ == "LiteralType":
                    return self._word(node, option, info, path)
                return self.read(node, option, path, advice)
        return self._report(node, path, mismatch(node, info))

    def _string(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        value: str = node.value
        if info.max_length is not None and len(value) > info.max_length:
            return self._report(node, path, f"has {len(value)} characters; at most {info.max_length} are allowed")
        if info.pattern is None or re.fullmatch(info.pattern, value):
            return value
        assert advice is not None
        return self._report(node, path, advice(value))

    def _word(self, node: yaml.Node, info: Any, wanted: Any, path: str) -> Any:
        """Read one of the words of a Literal; `wanted` is it, or a union that it belongs to."""
        value: str = node.value
        if value in info.values:
            return value
        message = f"{value!r} is not one of {any_of(info.values)}" if info is wanted else mismatch(node, wanted)
        guess = closest(value, info.values)
        return self._report(node, path, f"{message}; did you mean {guess!r}?" if guess else message)

    def _integer(self, node: yaml.Node, info: Any, path: str) -> Any:
        value = int(document.scalar_text(node))
        if (info.ge is None or value >= info.ge) and (info.le is None or value <= info.le):
            return value
        return self._report(node, path, f"must be {info.ge} to {info.le}, not {value}")

    def _tuple(self, node: yaml.Node, info: Any, path: str) -> Any:
        if len(node.value) < (info.min_length or 0):
            few = "the list is empty" if not node.value else f"the list has only {len(node.value)}"
            return self._report(node, path, f"{few}; it needs at least {info.min_length}")
        values = [self.read(item, info.item_type, f"{path}[{index}]") for index, item in enumerate(node.value)]
        return _BAD if _BAD in values else tuple(values)

    def _dict(self, node: yaml.Node, info: Any, path: str) -> Any:
        values: dict[Any, Any] = {}
        for key, value in self._pairs(node, path):
            place = place_below(path, str(key.value))
            name = self.read(key, info.key_type, place)
            values[name] = self.read(value, info.value_type, place)
        return _BAD if _BAD in values or _BAD in values.values() else values

    def _struct(self, node: yaml.Node, info: Any, path: str) -> Any:
        fields = {field.encode_name: field for field in info.fields}
        before = len(self.problems.found)
        values: dict[str, Any] = {}
        nodes: dict[str, yaml.Node] = {}
        meant: set[str | None] = set()
        for key, value in self._pairs(node, path):
            name = str(key.value)
            if name in fields:
                nodes[name] = value
                values[name] = self.read(value, fields[name].type, place_below(path, name))
            else:
                guess = closest(name, fields)
                meant.add(guess)
                advice = f"did you mean {guess!r}?" if guess else f"there are {', '.join(fields)}"
                self._report(key, place_below(path, name), f"unknown key {name!r}; {advice}")
        for name, field in fields.items():
            if field.required and name not in values and name not in meant:
                self._report(node, path, f"{name!r} is missing")
        good = {name: value for name, value in values.items() if value is not _BAD}
        self._rules.check(info.cls, Checked(self.problems, node, path, nodes, good))
        if len(self.problems.found) > before:
            return _BAD
        return info.cls(**{fields[name].name: value for name, value in good.items()})

    def _pairs(self, node: yaml.Node, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's keys and values, with those of merge keys; report keys that are no text, or double."""
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if document.kind(key) == "merge":
                merges.append(value)
            elif document.kind(key) != "str":
                self._report(key, path, f"a key must be text, not {got(key)}; put it in quotes")
            elif key.value in pairs:
                first = pairs[key.value][0].start_mark.line + 1
                message = f"the key {key.value!r} is given twice, first on line {first}"
                self._report(key, place_below(path, key.value), message)
            else:
                pairs[key.value] = key, value
        for merge in merges:
            for key, value in self._merged(merge, path):
                pairs.setdefault(str(key.value), (key, value))
        return list(pairs.values())

    def _merged(self, node: yaml.Node, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        self._count(node)
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for part in parts:
            self._count(part)
            if not isinstance(part, yaml.MappingNode):
                self._report(node, path, f"`<<` merges a mapping or a list of mappings, not {got(part)}")
            elif id(part) in self._merging:
                self._report(node, path, "`<<` merges a mapping into itself")
            else:
                self._merging.add(id(part))
                for key, value in self._pairs(part, path):
                    self._count(key)
                    pairs.setdefault(str(key.value), (key, value))
                self._merging.discard(id(part))
        return list(pairs.values())
