"""Reads a config file along its types, to values or to all the problems that it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from deviceplugin.config.document import MAX_BYTES, MAX_VALUES, TAG, compose, is_plain, scalar_text
from deviceplugin.config.errors import ConfigError, Problems, file_error
from deviceplugin.config.messages import accepts, any_of, closest, expected, got, mismatch, place_below
from deviceplugin.config.rules import Rules
from deviceplugin.config.types import Config


def load(path: str | Path) -> Config:
    """Read a config file.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be served.

    """
    file = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise file_error(file, "is a directory; name the file in it") from None
    except OSError as error:
        raise file_error(file, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise file_error(file, f"cannot be read: {error}") from None
    return parse(data, file)


def parse(text: str | bytes, file: str = "<config>") -> Config:
    """Read a config from text; `file` is what errors call it.

    Raises:
        ConfigError: what it says cannot be served.

    """
    reader = Reader(file)
    config = reader.read(compose(text, file), _info(), "$")
    if reader.problems.found:
        raise ConfigError(file, reader.problems.found)
    assert isinstance(config, Config)
    return config


def _info() -> Any:
    """Return the types of the file as msgspec describes them; made once, it takes a while."""
    global _INFO
    if _INFO is None:
        import msgspec.inspect

        _INFO = msgspec.inspect.type_info(Config)
    return _INFO


_INFO: Any = None
_BAD: Final = object()
"""Stands for a value about which a problem has been reported."""


class Reader:
    """Goes through a file's nodes along the types; collects problems instead of stopping at one."""

    def __init__(self, file: str) -> None:
        self.problems = Problems(file)
        self._rules = Rules(self.problems)
        self._values = 0
        self._merging: set[int] = set()

    def read(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None = None) -> Any:
        """Return a node's value as this type has it, or _BAD with the problem reported.

        Raises:
            ConfigError: the file has too many values or problems to go on.

        """
        self._count(node)
        kind = type(info).__name__
        if kind == "Metadata":
            return self.read(node, info.type, path, (info.extra or {}).get("advice", advice))
        if node.tag == TAG + "null":
            return self._report(node, path, f"has no value; expected {expected(info)}")
        if kind == "UnionType":
            return self._union(node, info, path, advice)
        if kind in {"StructType", "DictType"} and isinstance(node, yaml.MappingNode) and is_plain(node):
            return self._struct(node, info, path) if kind == "StructType" else self._dict(node, info, path)
        if kind == "VarTupleType" and isinstance(node, yaml.SequenceNode) and is_plain(node):
            return self._tuple(node, info, path)
        if kind in {"StrType", "LiteralType"} and node.tag == TAG + "str" and isinstance(node, yaml.ScalarNode):
            return self._string(node, info, path, advice)
        value = scalar_text(node)
        if kind == "BoolType" and node.tag == TAG + "bool" and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        if kind == "IntType" and node.tag == TAG + "int" and re.fullmatch(r"[-+]?[0-9]{1,40}", value):
            return self._integer(node, info, path)
        return self._report(node, path, mismatch(node, info))

    def _report(self, node: yaml.Node, path: str, message: str) -> Any:
        self.problems.report(node, path, message)
        return _BAD

    def _count(self, node: yaml.Node) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise file_error(
                self.problems.file,
                f"has more than {MAX_VALUES} values once its aliases are followed; use fewer aliases",
                node.start_mark.line + 1,
            )

    def _union(self, node: yaml.Node, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        options = [option for option in info.types if type(option).__name__ != "NoneType"]
        if len(options) == 1:
            return self.read(node, options[0], path, advice)
        for option in options:
            if accepts(option, node):
                if type(option).__name__ == "LiteralType" and isinstance(node, yaml.ScalarNode):
                    return self._word(node, option, info, path)
                return self.read(node, option, path, advice)
        return self._report(node, path, mismatch(node, info))

    def _string(self, node: yaml.ScalarNode, info: Any, path: str, advice: Callable[[str], str] | None) -> Any:
        value: str = node.value
        if type(info).__name__ == "LiteralType":
            return self._word(node, info, info, path)
        if info.max_length is not None and len(value) > info.max_length:
            return self._report(node, path, f"has {len(value)} characters; at most {info.max_length} are allowed")
        if info.pattern is None or re.fullmatch(info.pattern, value):
            return value
        assert advice is not None
        return self._report(node, path, advice(value))

    def _word(self, node: yaml.ScalarNode, info: Any, wanted: Any, path: str) -> Any:
        """Read one of some words; wanted: these, and what else would be right."""
        value: str = node.value
        if value in info.values:
            return value
        guess = closest(value, info.values)
        end = f"; did you mean {guess!r}?" if guess else ""
        said = f"{value!r} is not one of {any_of(info.values)}"
        return self._report(node, path, (said if info is wanted else mismatch(node, wanted)) + end)

    def _integer(self, node: yaml.Node, info: Any, path: str) -> Any:
        value = int(scalar_text(node))
        if (info.ge is None or value >= info.ge) and (info.le is None or value <= info.le):
            return value
        return self._report(node, path, f"must be {info.ge} to {info.le}, not {value}")

    def _tuple(self, node: yaml.SequenceNode, info: Any, path: str) -> Any:
        if len(node.value) < (info.min_length or 0):
            few = "the list is empty" if not node.value else f"the list has only {len(node.value)}"
            return self._report(node, path, f"{few}; it needs at least {info.min_length}")
        values = [self.read(item, info.item_type, f"{path}[{index}]") for index, item in enumerate(node.value)]
        return _BAD if _BAD in values else tuple(values)

    def _dict(self, node: yaml.MappingNode, info: Any, path: str) -> Any:
        values: dict[Any, Any] = {}
        for key, value in self._pairs(node, path):
            place = place_below(path, str(key.value))
            name = self.read(key, info.key_type, place)
            values[name] = self.read(value, info.value_type, place)
        return _BAD if _BAD in values or _BAD in values.values() else values

    def _struct(self, node: yaml.MappingNode, info: Any, path: str) -> Any:
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
        self._rules.check(info.cls, node, path, nodes, good)
        if len(self.problems.found) > before:
            return _BAD
        return info.cls(**{fields[name].name: value for name, value in good.items()})

    def _pairs(self, node: yaml.MappingNode, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's keys and values, merge keys followed, doubtful keys reported."""
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merges: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == TAG + "merge":
                merges.append(value)
            elif key.tag != TAG + "str" or not isinstance(key, yaml.ScalarNode):
                self._report(key, path, f"a key must be text, not {got(key)}; put it in quotes")
            elif key.value in pairs:
                first = pairs[key.value][0].start_mark.line + 1
                self._report(
                    key, place_below(path, key.value), f"the key {key.value!r} is given twice, first on line {first}"
                )
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
