"""Reads a config file: returns its values as objects of `config.types`, or raises an error with all problems."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from deviceplugin.config import document
from deviceplugin.config.document import ConfigError, line_of
from deviceplugin.config.lock import OPEN, Lock
from deviceplugin.config.rules import ConfigRules, any_of
from deviceplugin.config.types import KINDS, Config, DeviceEntry


def load(path: str | Path, lock: Lock = OPEN) -> Config:
    """Read and parse a config file.

    Raises ConfigError if the file cannot be read, is not valid, or names a command or path that `lock` forbids.
    """
    file = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(document.MAX_BYTES + 1)
    except IsADirectoryError:
        raise document.file_error(file, "is a directory; name the file in it") from None
    except (OSError, ValueError) as error:  # A path with a NUL raises ValueError.
        raise document.file_error(file, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse(data, file, lock)


def parse(text: str | bytes, file: str = "<config>", lock: Lock = OPEN) -> Config:
    """Parse the text of a config file. file: the file's name in errors.

    Raises ConfigError if the config is not valid, or names a command or path that `lock` forbids.
    """
    reader = Reader(file, lock)
    node = document.compose(text, file)
    if isinstance(node, yaml.CollectionNode) and "resources" not in document.keys(node):
        from deviceplugin.config import foreign

        if foreign.has_settings(node, file):
            how = f"`deviceplugin import {'-' if file.startswith('<') else file}` makes a config file of them"
            raise document.file_error(file, f"has the settings of another device plugin; {how}", 1)
        document.check_kind(node, file)
    config = reader.read(node, _type_info(), "$")
    if reader.problems.found:
        raise ConfigError(file, reader.problems.found)
    assert isinstance(config, Config)
    return config


@functools.cache
def _type_info() -> Any:
    """Return msgspec's description of the config's types.

    The result is cached, because making it takes some milliseconds.
    """
    import msgspec.inspect

    return msgspec.inspect.type_info(Config)


_Pair = tuple[yaml.Node, yaml.Node]
_Advice = Callable[[str], str] | None
"""A function that returns the message for an invalid text, with the correction; None if there is no advice."""
_Options = dict[str, tuple[Any, _Advice]]
"""The allowed types of a value. For each kind of YAML node (`document.kind`): msgspec's type, and the advice for an
invalid value."""
_BAD: Final = object()
"""The object in place of an invalid value whose problem was already reported."""


class Reader:
    """Converts YAML nodes to the types of the config file. Collects all problems before it raises an error."""

    def __init__(self, file: str, lock: Lock) -> None:
        self.problems = document.Problems(file)
        self._rules = ConfigRules(self.problems, lock)
        self._values = 0
        self._merging: set[int] = set()
        self._above: list[tuple[str, Mapping[str, Any]]] = []
        """The path and the allowed keys of each mapping that contains the present node; the outermost mapping is first.
        """

    def read(self, node: yaml.Node, info: Any, path: str) -> Any:
        """Return a node's value. If the value is invalid, report the problem and return `_BAD`.

        info: msgspec's description of the value's type. Raises ConfigError if there are too many values or problems.
        """
        self._count(node)
        self.problems.lines[path] = line_of(node)
        options = _options(info)
        what, value = document.kind(node), document.scalar_text(node)
        if what == "null":
            return self._report(path, f"has no value; expected {_expected(options)}")
        if "str" in options and (text := _placeholder(node)):
            return self._report(path, f'{text} is a mapping in YAML; write "{text}" in quotes')
        if what not in options:
            return self._report(path, _mismatch(node, options, path))
        info, advice = options[what]
        match type(info).__name__:
            case "StructType":
                return self._struct(node, info, path)
            case "DictType":
                return self._dict(node, info, path)
            case "VarTupleType":
                return self._tuple(node, info, path)
            case "LiteralType":
                return self._word(node, options, path)
            case "StrType":
                return self._string(value, info, path, advice)
            case "BoolType" if value.lower() in {"true", "false"}:
                return value.lower() == "true"
            case "IntType" if re.fullmatch(r"[-+]?[0-9]{1,40}", value):
                if info.ge <= int(value) <= info.le:  # All integer types of the config have a minimum and a maximum.
                    return int(value)
                return self._report(path, f"must be {info.ge} to {info.le}, not {int(value)}")
        return self._report(path, _mismatch(node, {what: (info, advice)}, path))

    def _report(self, path: str, message: str, node: yaml.Node | None = None) -> Any:
        self.problems.report(path, message, 0 if node is None else line_of(node))
        return _BAD

    def _count(self, node: yaml.Node) -> None:
        self._values += 1
        if self._values > document.MAX_VALUES:
            message = f"has more than {document.MAX_VALUES} values once its aliases are followed; use fewer aliases"
            raise document.file_error(self.problems.file, message, line_of(node))

    def _string(self, value: str, info: Any, path: str, advice: _Advice) -> Any:
        if info.max_length is not None and len(value) > info.max_length:
            return self._report(path, f"has {len(value)} characters; at most {info.max_length} are allowed")
        if info.pattern is None or re.fullmatch(info.pattern, value):
            return value
        assert advice is not None
        return self._report(path, advice(value))

    def _word(self, node: yaml.Node, options: _Options, path: str) -> Any:
        value, words = str(node.value), options["str"][0].values
        if value in words:
            return value
        message = f"{value!r} is not one of {any_of(words)}" if len(options) == 1 else _mismatch(node, options, path)
        guess = _closest(value, words)
        return self._report(path, f"{message}; did you mean {guess!r}?" if guess else message)

    def _tuple(self, node: yaml.Node, info: Any, path: str) -> Any:
        if len(node.value) < (info.min_length or 0):
            few = "the list is empty" if not node.value else f"the list has only {len(node.value)}"
            return self._report(path, f"{few}; it needs at least {info.min_length}")
        values = [self.read(item, info.item_type, f"{path}[{index}]") for index, item in enumerate(node.value)]
        return _BAD if _BAD in values else tuple(values)

    def _dict(self, node: yaml.Node, info: Any, path: str) -> Any:
        values: dict[Any, Any] = {}
        for key, value in self._pairs(node, path):
            place = _place_below(path, str(key.value))
            name = self.read(key, info.key_type, place)
            values[name] = self.read(value, info.value_type, place)
        return _BAD if _BAD in values or _BAD in values.values() else values

    def _struct(self, node: yaml.Node, info: Any, path: str) -> Any:
        fields = {field.encode_name: field for field in info.fields}
        values: dict[str, Any] = {}
        meant: set[str | None] = set()
        strange: list[yaml.Node] = []
        self._above.append((path, fields))
        pairs = self._pairs(node, path)
        given = {str(key.value) for key, _ in pairs}
        for key, value in pairs:
            name = str(key.value)
            if name in fields:
                values[name] = self.read(value, fields[name].type, _place_below(path, name))
            elif own := next((own for own in _OTHER_NAMES.get(name, ()) if own in fields), None):
                meant.add(own)
                self._report(_place_below(path, name), f"unknown key {name!r}; write `{_pair(own, value)}`", key)
            elif place := self._place_of(name, value, given):
                meant.add(None)
                self._report(_place_below(path, name), f"unknown key {name!r}; {place}", key)
            else:
                meant.add(guess := _closest(name, fields) if len(strange) < document.MAX_UNKNOWN else None)
                if guess:
                    self._report(_place_below(path, name), f"unknown key {name!r}; did you mean {guess!r}?", key)
                else:
                    strange.append(key)
        self._above.pop()
        for key in strange[: document.MAX_UNKNOWN]:
            # The message contains the key only if it looks like a name: in a wrong file, a key may be a password.
            named = re.fullmatch(r"[A-Za-z_][\w.-]{0,31}", name := str(key.value))
            place, what = (_place_below(path, name), f"unknown key {name!r}") if named else (path, "unknown key")
            more = f" ({len(strange)} of them)" if len(strange) > document.MAX_UNKNOWN else ""
            self._report(place, f"{what}{more}; there are {', '.join(fields)}", key)
        missing = [name for name, field in fields.items() if field.required and name not in values.keys() | meant]
        for name in missing:
            self._report(path, f"{name!r} is missing")
        good = {fields[name].name: value for name, value in values.items() if value is not _BAD}
        blank = {field.name: _BLANK[next(iter(_options(field.type)))] for field in info.fields if field.required}
        made = info.cls(**blank | good)
        # The rules are checked for the valid values even if other values are invalid, so that one error reports all
        # problems.
        if values or not meant:
            self._rules.check(made, path, values.keys())
        return _BAD if meant or missing or len(good) < len(values) else made

    def _place_of(self, key: str, value: yaml.Node, given: Collection[str]) -> str:
        """Return advice on the place where a misplaced key belongs; "" if no near mapping can have the key.

        key, value: the misplaced key and its value. given: all keys of the mapping with the misplaced key.
        """
        if key in _FOREIGN:
            return "it is a key of another device plugin, whose settings `deviceplugin import` converts"
        (_, fields), *above = reversed(self._above)
        words = {key} if _below(fields, key, value).keys() & given else {*_OTHER_NAMES.get(key, ()), key}
        for word in sorted(words, key=key.__eq__):
            below = _below(fields, word, value)
            if present := [name for name in below if name in given and word == key]:
                return f"it belongs under {any_of(f'`{name}`' for name in present)}; indent it by more spaces than that"
            for path, outer in above:
                if word in outer:
                    return f"it is a key of {path}; indent it like the other keys of that"
            if below:
                return f"write {any_of(f'`{form}`' for form in below.values())}"
            for path, outer in above:
                if forms := _below(outer, word, value):
                    return f"write {any_of(f'`{form}`' for form in forms.values())} in {path}"
            if forms := _below(fields, word, value, levels=2):
                return f"write {any_of(f'`{form}`' for form in forms.values())}"
        return ""

    def _pairs(self, node: yaml.Node, path: str) -> Collection[_Pair]:
        """Return a mapping's keys and values, including keys from YAML merge keys (`<<`).

        Reports a problem for each key that is no text or occurs twice.
        """
        pairs: dict[str, _Pair] = {}
        merges = []
        for key, value in node.value:
            if document.kind(key) == "merge":
                merges.append(value)
            elif document.kind(key) != "str":
                self._report(path, f"a key must be text, not {_got(key)}; put it in quotes", key)
            elif key.value in pairs:
                message = f"the key {key.value!r} is given twice, first on line {line_of(pairs[key.value][0])}"
                self._report(_place_below(path, key.value), message, key)
            else:
                pairs[key.value] = key, value
        for merge in merges:
            self._merge(merge, pairs, path)
        return pairs.values()

    def _merge(self, node: yaml.Node, pairs: dict[str, _Pair], path: str) -> None:
        """Add the pairs of a merge key's mappings to a mapping. The mapping's own pairs take precedence."""
        self._count(node)
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            self._count(part)
            if not isinstance(part, yaml.MappingNode):
                self._report(path, f"`<<` merges a mapping or a list of mappings, not {_got(part)}", node)
            elif id(part) in self._merging:
                self._report(path, "`<<` merges a mapping into itself", node)
            else:
                self._merging.add(id(part))
                for key, value in self._pairs(part, path):
                    self._count(key)
                    pairs.setdefault(str(key.value), (key, value))
                self._merging.discard(id(part))


_KINDS: Final = {
    "StrType": ("str", "text"),
    "LiteralType": ("str", ""),
    "IntType": ("int", "a whole number"),
    "BoolType": ("bool", "true or false"),
    "VarTupleType": ("seq", "a list"),
    "DictType": ("map", "a mapping"),
    "StructType": ("map", ""),
}
"""For each of msgspec's types: the kind of YAML node for values of this type, and the type's name in messages."""
_BLANK: Final[dict[str, Any]] = {"str": "", "int": 0, "seq": ()}
"""For each kind of node: the value in place of an invalid or missing required value, so that the rules can still check
the other values of the mapping."""
_TRUE: Final = {"yes", "on", "y", "true"}
_FALSE: Final = {"no", "off", "n", "false"}


def _options(info: Any, advice: _Advice = None) -> _Options:
    """Return, for each kind of YAML node, the allowed type of a value of this kind; the type None is left out.

    All types of a union have different kinds.
    """
    match type(info).__name__:
        case "Metadata":
            return _options(info.type, (info.extra or {}).get("advice", advice))
        case "UnionType":
            return {kind: option for member in info.types for kind, option in _options(member, advice).items()}
        case "NoneType":
            return {}
        case name:
            return {_KINDS[name][0]: (info, advice)}


def _expected(options: _Options) -> str:
    return any_of(map(_described, (info for info, _ in options.values())))


def _described(info: Any) -> str:
    kind = type(info).__name__
    if kind == "LiteralType":
        return any_of(info.values)
    if kind == "StructType":
        if info.cls is DeviceEntry:
            return f"a mapping with one of {any_of(KINDS)}"
        required = [field.encode_name for field in info.fields if field.required]
        return f"a mapping with {' and '.join(required) or any_of(field.encode_name for field in info.fields)}"
    return _KINDS[kind][1]


def _got(node: yaml.Node) -> str:
    """Describe a node for a message: its kind, and the beginning of its value."""
    value = document.scalar_text(node)
    text = value if len(value) <= 60 else f"{value[:57]}..."
    number = f"the number {text}"
    words = {"map": "a mapping", "seq": "a list", "null": "nothing", "bool": text, "int": number, "float": number}
    words["str"] = f"the text {text!r}"
    return words.get(document.kind(node), f"something tagged {node.tag}")


def _below(fields: Mapping[str, Any], key: str, value: yaml.Node, levels: int = 1) -> dict[str, str]:
    """Return, for each field whose mapping (or list of mappings) may contain `key`, an example of the field in YAML.

    levels: the number of levels below the fields on which the key is searched.
    """
    forms: dict[str, str] = {}
    for name, field in fields.items():
        for option, _ in _options(field.type).values():
            item = option.item_type if type(option).__name__ == "VarTupleType" else option
            begin, end = ("{", "}") if item is option else ("[{", "}]")
            for inner, _ in _options(item).values() if type(item).__name__ in _KINDS else ():
                if type(inner).__name__ != "StructType":
                    continue
                inside = {field.encode_name: field for field in inner.fields}
                if key in inside:
                    forms.setdefault(name, f"{name}: {begin}{_pair(key, value)}{end}")
                elif levels > 1:
                    for names, form in _below(inside, key, value, levels - 1).items():
                        forms.setdefault(f"{name}.{names}", f"{name}: {begin}{form}{end}")
    return forms


def _pair(key: str, value: yaml.Node) -> str:
    text = document.scalar_text(value)
    quoted = isinstance(value, yaml.ScalarNode) and value.style in ("'", '"')
    return f"{key}: {json.dumps(text) if quoted else text[:60] or '...'}"


def _placeholder(node: yaml.Node) -> str:
    """Return a placeholder, such as {id}, that YAML has read as a mapping for lack of quotes; "" for other nodes."""
    if not isinstance(node, yaml.MappingNode) or not node.flow_style or len(node.value) != 1:
        return ""
    key, value = node.value[0]
    known = document.kind(value) == "null" and document.scalar_text(key) in _PLACEHOLDERS
    return f"{{{key.value}}}" if known else ""


_PLACEHOLDERS: Final = {"id", "path", "name", "node"}
_OTHER_NAMES: Final = {
    "mountPath": ("container",),
    "containerPath": ("container",),
    "hostPath": ("host", "path"),
    "readOnly": ("readonly",),
    "count": ("replicas",),
}
"""For each key of Kubernetes or of other device plugins: the keys in this config file with the same meaning."""
_FOREIGN: Final = {"groups", "devicematch", "nummaxdevices", "timeSlicing"}
"""Keys that occur only in the config files of other device plugins."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}


def _meant(path: str, value: str) -> str:
    """Return advice with the correct text, if `value` is a text that other programs accept at this path; else ""."""
    key = re.sub(r"\[[0-9]+\]$", "", path).rpartition(".")[2]
    if key in {"period", "timeout", "recovery"} and (time := re.fullmatch(r"([0-9]{1,7})\s*([smh])", value)):
        return f"write {int(time[1]) * _UNITS[time[2]]}, the number of seconds"
    item = path.endswith("]")
    if key == "mounts" and item and (mount := re.fullmatch(r"(/[^:]*):(/[^:]*)(?::(ro|rw))?", value)):
        return f"write {{host: {mount[1]}, container: {mount[2]}{', readonly: false' * (mount[3] != 'ro')}}}"
    if key == "mounts" and item and value.startswith("/"):
        return f"write {{host: {value}, container: {value}}}"
    if key == "probe" and value.startswith("/"):
        return f"write {{command: [{', '.join(value.split())}]}}"
    ids = re.fullmatch(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})", value)
    if ids and key in {"usb", "pci"}:
        return f'write {{vendor: "{ids[1]}", {"product" if key == "usb" else "device"}: "{ids[2]}"}}'
    if key == "pci" and re.fullmatch(r"[0-9a-fA-F*?]+:[0-9a-fA-F*?:.]+", value):
        return f'write {{address: "{value}"}}'
    if key == "health" and value in {"open", "none"}:
        return f"write {{probe: {value}}}"
    if key == "sharing" and value.isdecimal():
        return f"write {{replicas: {value}}}"
    return ""


def _mismatch(node: yaml.Node, options: _Options, path: str) -> str:
    """Return the message for a node of the wrong kind, with the expected kind, the found kind and a correction."""
    message = f"expected {_expected(options)}, got {_got(node)}"
    what, value = document.kind(node), document.scalar_text(node)
    kinds = {type(info).__name__ for info, _ in options.values()}
    if meant := _meant(path, value):
        return f"{message}; {meant}"
    if what == "seq" and path.endswith(".path"):
        return f"{message}; make each path an entry of its own, or write `group` if they are one device"
    if isinstance(node, yaml.SequenceNode) and node.flow_style and "StrType" in kinds:
        return f"{message}; put a text that begins with [ in quotes"
    if "StrType" in kinds and what in {"int", "float", "bool"}:
        return f'{message}; write "{value}" in quotes'
    if "BoolType" in kinds and what == "str" and value.lower() in _TRUE | _FALSE:
        return f"{message}; write {'true' if value.lower() in _TRUE else 'false'}"
    if "IntType" in kinds and what == "str" and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        return f"{message}; write {int(value)}"
    if "VarTupleType" in kinds:
        return f"{message}; begin each item on a line of its own with a dash"
    classes = [getattr(info, "cls", None) for info, _ in options.values()]
    if DeviceEntry in classes and what == "str" and value.startswith("/"):
        return f"{message}; write path: {value}"
    return message


def _place_below(path: str, key: str) -> str:
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,79}", key) else f'{path}["{key[:80]}"]'


def _closest(word: str, words: Iterable[str]) -> str | None:
    """Return the word of `words` that is most similar to a misspelt word; None if none is similar."""
    import difflib

    lowered = {name.lower(): name for name in words}
    close = difflib.get_close_matches(word.lower()[:64], lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None
