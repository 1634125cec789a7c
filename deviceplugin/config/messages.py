"""Sentences about a value of the wrong type, and how a place in the file is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import yaml

from deviceplugin.config import document
from deviceplugin.config.types import DeviceEntry

_KINDS: Final = {
    "StrType": ("str", "text"),
    "LiteralType": ("str", ""),
    "IntType": ("int", "a whole number"),
    "BoolType": ("bool", "true or false"),
    "VarTupleType": ("seq", "a list"),
    "DictType": ("map", "a mapping"),
    "StructType": ("map", ""),
}
"""By kind of type as msgspec describes it: the kind of its nodes, and what they are called."""
_TRUE: Final = {"yes", "on", "y", "true"}
_FALSE: Final = {"no", "off", "n", "false"}


def _kinds(info: Any) -> set[str]:
    kind = type(info).__name__
    if kind == "Metadata":
        return _kinds(info.type)
    if kind == "UnionType":
        return set().union(*map(_kinds, info.types))
    return {kind}


def accepts(info: Any, node: yaml.Node) -> bool:
    """Return whether a node is of the kind of one of a type's options."""
    return document.kind(node) in {_KINDS[kind][0] for kind in _kinds(info) & _KINDS.keys()}


def expected(info: Any) -> str:
    """Return what a value of this type is."""
    kind = type(info).__name__
    if kind == "Metadata":
        return expected(info.type)
    if kind == "UnionType":
        return any_of(expected(option) for option in info.types if type(option).__name__ != "NoneType")
    if kind == "LiteralType":
        return any_of(info.values)
    if kind == "StructType":
        if info.cls is DeviceEntry:
            return f"a mapping with one of {any_of(DeviceEntry.__struct_fields__)}"
        required = [field.encode_name for field in info.fields if field.required]
        return f"a mapping with {' and '.join(required or [field.encode_name for field in info.fields])}"
    return _KINDS[kind][1]


def got(node: yaml.Node) -> str:
    """Return what a node is, with its value if that is short."""
    value = document.scalar_text(node)
    text = value if len(value) <= 60 else f"{value[:57]}..."
    number = f"the number {text}"
    words = {"map": "a mapping", "seq": "a list", "null": "nothing", "bool": text, "int": number, "float": number}
    words["str"] = f"the text {text!r}"
    return words.get(document.kind(node), f"something tagged {node.tag}")


def mismatch(node: yaml.Node, info: Any) -> str:
    """Return what was expected, what the node is, and if possible what to write."""
    message = f"expected {expected(info)}, got {got(node)}"
    what, value = document.kind(node), document.scalar_text(node)
    kinds = _kinds(info)
    if "StrType" in kinds and what in {"int", "float", "bool"}:
        return f'{message}; write "{value}" in quotes'
    if "BoolType" in kinds and what == "str" and value.lower() in _TRUE | _FALSE:
        return f"{message}; write {'true' if value.lower() in _TRUE else 'false'}"
    if "IntType" in kinds and what == "str" and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        return f"{message}; write {int(value)}"
    if "VarTupleType" in kinds:
        return f"{message}; begin each item on a line of its own with a dash"
    if getattr(info, "cls", None) is DeviceEntry and what == "str" and value.startswith("/"):
        return f"{message}; write path: {value}"
    return message


def place_below(path: str, key: str) -> str:
    """Return the place of a key's value in the mapping at `path`."""
    return f"{path}.{key}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) else f'{path}["{key[:80]}"]'


def any_of(words: Iterable[object]) -> str:
    """Return words as a choice: a, b or c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} or {last}" if most else last


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant."""
    import difflib

    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:64], lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None
