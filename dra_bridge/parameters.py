"""Makes CEL expressions by which an admission policy checks the opaque parameters of claims and classes.

The `config_type` of the driver's device sources determines the correct form of parameters. An expression reads
`p.parameters`, where `p` is one opaque configuration in a claim or class. The expression's value is a text that names
the first wrong field; "" if there is none. The driver would refuse all parameters that an expression refuses
(`driver.claims.decoded_config`). Some checks are done only by the driver: patterns, formats of strings, missing fields
that the class or the claim may add, and deeply nested values. All functions are pure.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import inspect as types

TAKES_NONE: Final = "this driver accepts no parameters"
DEPTH: Final = 4
"""Maximum depth to which a CEL expression checks nested parameters. The API server limits the length and the cost of an
expression."""
_USUAL: Final = ("apiVersion", "kind")
"""Fields that are allowed in the parameters of every `config_type`."""
_TEXTS: Final = (
    *(types.StrType, types.BytesType, types.ByteArrayType, types.UUIDType),
    *(types.DateTimeType, types.DateType, types.TimeType, types.TimeDeltaType),
)
_LISTS: Final = (types.ListType, types.SetType, types.FrozenSetType, types.VarTupleType)
_FIELDS: Final = (types.StructType, types.DataclassType, types.TypedDictType)
_OBJECTS: Final = (*_FIELDS, types.DictType)
_BOUNDS: Final = (("ge", ">=", "at least"), ("gt", ">", "above"), ("le", "<=", "at most"), ("lt", "<", "below"))
_INT64: Final = 2**63


def expression(config_types: Iterable[Any]) -> str:
    """Return the CEL expression for a driver, from the `config_type` of each of its sources; "" for no check."""
    wanted = [one for one in dict.fromkeys(config_types) if one is not None]
    if not wanted:
        return _text(TAKES_NONE)
    return _either([_problem(types.type_info(one), "p.parameters", "", 0) for one in wanted])


def _problem(info: Any, value: str, path: str, depth: int) -> str:
    """Return a CEL expression that checks whether a value has this type; "" if every value is accepted.

    The expression's value is the problem in words, "" if there is none.

    value: a CEL expression for the value. path: the value's name in messages, "" for the parameters as a whole.
    """
    name = path or "parameters"
    while isinstance(info, types.Metadata):
        info = info.type
    if depth > DEPTH:
        return ""
    if isinstance(info, types.UnionType):
        return _union(info, value, path, depth)
    if isinstance(info, _FIELDS):
        return _object(info, value, path, depth)
    if isinstance(info, types.DictType):
        items = _problem(info.value_type, f"{value}[k{depth}]", f"{path}.*".strip("."), depth + 1)
        return _typed(value, "map", f"{name}: must be an object", [_each(value, f"k{depth}", items)])
    if isinstance(info, _LISTS):
        items = _problem(info.item_type, f"e{depth}", f"{name}[]", depth + 1)
        bounds = _sizes(info, value, f"{name}: must have", "elements")
        return _typed(value, "list", f"{name}: must be a list", [*bounds, _each(value, f"e{depth}", items)])
    if isinstance(info, types.TupleType):
        return _typed(value, "list", f"{name}: must be a list", [])
    return _scalar(info, value, name)


def _scalar(info: Any, value: str, name: str) -> str:
    if isinstance(info, types.LiteralType):
        return _one_of(value, name, info.values)
    if isinstance(info, types.EnumType):
        return "" if _takes_more(info.cls) else _one_of(value, name, [member.value for member in info.cls])
    if isinstance(info, types.BoolType):
        return _typed(value, "bool", f"{name}: must be true or false", [])
    if isinstance(info, types.NoneType):
        return _typed(value, "null_type", f"{name}: must be null", [])
    if isinstance(info, types.IntType):
        return _typed(value, "int", f"{name}: must be an integer", _numbers(info, value, name))
    if isinstance(info, types.FloatType):
        number = f"type({value}) == int || type({value}) == double"
        return _first([_unless(number, f"{name}: must be a number", _first(_numbers(info, value, name)))])
    if isinstance(info, types.StrType):
        bounds = _sizes(info, value, f"{name}: must have", "characters")
        return _typed(value, "string", f"{name}: must be a string", bounds)
    return _typed(value, "string", f"{name}: must be a string", []) if isinstance(info, _TEXTS) else ""


def _object(info: Any, value: str, path: str, depth: int) -> str:
    if isinstance(info, types.StructType) and info.array_like:
        return ""
    known = [field.encode_name for field in info.fields]
    more = [info.tag_field] if isinstance(info, types.StructType) and info.tag_field else []
    allowed = [*known, *more, *(_USUAL if depth == 0 else ())]
    prefix = f"{path}." if path else ""
    listed = f"; there are {', '.join([*known, *more]) or 'none'}"
    found = f"{value}.filter(k, {' && '.join(f'k != {_text(name)}' for name in allowed) or 'true'})"
    unknown = f'{found}.map(k, {_text(f"unknown field {prefix}")} + k + {_text(listed)})[?0].orValue("")'
    problems = [] if isinstance(info, types.TypedDictType) and not known else [unknown]
    for field in info.fields:
        quoted = _text(field.encode_name)
        inner = _problem(field.type, f"{value}[{quoted}]", f"{prefix}{field.encode_name}", depth + 1) or '""'
        # At depth 0, a missing field is no problem, because the driver merges the parameters of class and claim. The
        # driver does not merge nested objects.
        absent = _text(f"{prefix}{field.encode_name}: is required" if field.required and depth else "")
        if (inner, absent) != ('""', '""'):
            problems.append(f"({quoted} in {value} ? {inner} : {absent})")
    return _typed(value, "map", f"{path or 'parameters'}: must be an object", problems)


def _union(info: Any, value: str, path: str, depth: int) -> str:
    kinds = [kind for kind in info.types if not isinstance(kind, types.NoneType)]
    # If a value may be of several types of objects, the driver chooses the type by a tag or by the fields. The
    # expression does not make this choice, so it checks nothing.
    if sum(isinstance(kind, _OBJECTS) for kind in kinds) > 1:
        return ""
    problem = _either([_problem(kind, value, path, depth) for kind in kinds])
    return problem and (f'({value} == null ? "" : {problem})' if len(kinds) < len(info.types) else problem)


def _either(problems: Sequence[str]) -> str:
    """Return a CEL expression that checks whether a value has one of several types.

    problems: for each type, the expression of `_problem`.

    The result is "" if one type accepts all values.
    """
    if len(problems) < 2 or "" in problems:
        return "" if "" in problems else "".join(problems)
    return f'[[{", ".join(problems)}]].map(ps, ps.exists(t, t == "") ? "" : ps.join("; or "))[0]'


def _each(value: str, name: str, problem: str) -> str:
    return problem and f'{value}.map({name}, {problem}).filter(t, t != "")[?0].orValue("")'


def _typed(value: str, kind: str, message: str, problems: Sequence[str]) -> str:
    return _unless(f"type({value}) == {kind}", message, _first(problems))


def _unless(condition: str, message: str, problem: str = '""') -> str:
    return f"({condition} ? {problem} : {_text(message)})"


def _first(problems: Sequence[str]) -> str:
    given = [one for one in problems if one]
    if len(given) < 2:
        return given[0] if given else '""'
    return f'[{", ".join(given)}].filter(t, t != "")[?0].orValue("")'


def _one_of(value: str, name: str, values: Iterable[Any]) -> str:
    chosen = sorted(values, key=repr)
    equal = " || ".join(f"{value} == {_text(one)}" for one in chosen)
    return _unless(equal, f"{name}: must be one of {', '.join(map(str, chosen))}")


def _numbers(info: Any, value: str, name: str) -> list[str]:
    bounds = [(sign, word, getattr(info, key)) for key, sign, word in _BOUNDS]
    return [
        _unless(f"{value} {sign} {bound!r}", f"{name}: must be {word} {bound}")
        for sign, word, bound in bounds
        if bound is not None and -_INT64 < bound < _INT64
    ]


def _sizes(info: Any, value: str, begin: str, what: str) -> list[str]:
    bounds = ((">=", "at least", info.min_length), ("<=", "at most", info.max_length))
    return [
        _unless(f"size({value}) {sign} {bound}", f"{begin} {word} {bound} {what}")
        for sign, word, bound in bounds
        if bound is not None
    ]


def _takes_more(kind: type[enum.Enum]) -> bool:
    """Return whether an enum accepts other values than those of its members, because it defines `_missing_`."""
    return getattr(kind._missing_, "__func__", None) is not getattr(enum.Enum._missing_, "__func__", None)


def _text(value: str | int) -> str:
    """Return a value as a CEL literal: the value's JSON, with escapes only for JSON's own special characters."""
    return json.dumps(value, ensure_ascii=False)
