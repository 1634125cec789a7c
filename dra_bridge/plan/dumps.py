"""Reads files with API objects (dumps) in YAML or JSON. Fields that `plan` does not use are not kept, to save memory.

A list in YAML is read item by item from the parser's events, because a tree of 8,000 pods would take a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import yaml

from dra_bridge.convert.pods import pod_specs
from dra_bridge.plan.objects import CUT, Body, name_of, part, title_of

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: Final[Mapping[str, Any]] = {"": None, "null": None, "~": None, "true": True, "false": False}
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")


TEMPLATE: Final = "PodTemplateSpec"
"""The kind that `objects_of` gives to pod templates."""


class DumpError(Exception):
    """Raised when a dump cannot be read. The message states the position in the dump."""


def objects_of(text: bytes) -> Iterator[tuple[str, Body]]:
    """Yield the objects in a dump that `plan` uses, each as its kind and its used fields. Raises DumpError.

    The pod templates of Deployments and similar objects get the kind TEMPLATE. These templates are used only in dumps
    without nodes, such as a chart.
    """
    for body in _bodies(text):
        kind = body.get("kind") if isinstance(body, dict) else None
        try:
            if isinstance(kind, str) and kind in CUT:
                yield kind, CUT[kind](body)
            if isinstance(kind, str) and kind != "Pod":
                for _, spec in pod_specs(body, ()):
                    metadata = {**part(body, "metadata"), "name": f"{name_of(body)} ({kind})"}
                    yield TEMPLATE, CUT["Pod"]({"metadata": metadata, "spec": spec})
        except (AttributeError, TypeError, ValueError) as error:
            raise DumpError(f"a {kind} does not have the form of the API: {error}") from error


def _bodies(text: bytes) -> Iterator[Any]:
    if text.lstrip()[:1] == b"{":
        try:
            yield from _items(msgspec.json.decode(text))
        except msgspec.MsgspecError:
            pass  # The text is no JSON, but YAML in flow style, or it has several documents.
        else:
            return
    try:
        yield from _from_yaml(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"{error}") from error


def _items(body: Any) -> Iterator[Any]:
    if not isinstance(body, dict) or not isinstance(body.get("items"), list):
        yield body
        return
    known = str(body.get("kind", "")).removesuffix("List")
    for item in body["items"]:
        # In a list of one kind from the API server, the items have no `kind`.
        yield {"kind": known, **item} if isinstance(item, dict) else item


def _from_yaml(text: bytes) -> Iterator[Any]:
    """Yield objects from the YAML parser's events: each item of a top-level `items`, or else the whole document."""
    events = iter(yaml.parse(text, Loader=_LOADER))
    for event in events:
        if not isinstance(event, yaml.DocumentStartEvent):
            continue
        start = next(events)
        if not isinstance(start, yaml.MappingStartEvent):
            _value(start, events, {})
            continue
        whole: dict[str, Any] = {}
        anchors: dict[str, Any] = {}
        waiting: list[Any] = []
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = _value(event, events, anchors)
            event = next(events)
            if key == "items" and isinstance(event, yaml.SequenceStartEvent):
                whole["items"] = True
                while not isinstance(event := next(events), yaml.SequenceEndEvent):
                    item = _value(event, events, anchors)
                    if isinstance(item, dict) and "kind" not in item:
                        waiting.append(item)  # The list's kind implies the item's kind, and may come later.
                    else:
                        yield item
            else:
                whole[str(key)] = _value(event, events, anchors)
        if "items" not in whole:
            yield _merged(whole)
        for item in waiting:
            yield {"kind": str(whole.get("kind", "")).removesuffix("List"), **item}


def _value(event: Any, events: Iterator[Any], anchors: dict[str, Any]) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        value = _scalar(event)
    elif isinstance(event, yaml.AliasEvent):
        if event.anchor not in anchors:
            raise DumpError(f"undefined alias {event.anchor!r}\n{event.start_mark}")
        return anchors[event.anchor]
    elif isinstance(event, yaml.SequenceStartEvent):
        value = []
        while not isinstance(inner := next(events), yaml.SequenceEndEvent):
            value.append(_value(inner, events, anchors))
    else:
        value = {}
        while not isinstance(inner := next(events), yaml.MappingEndEvent):
            key = _value(inner, events, anchors)
            value[str(key)] = _value(next(events), events, anchors)
        value = _merged(value)
    if event.anchor:
        anchors[event.anchor] = value
    return value


def _merged(body: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with the keys of the mappings under its merge key (`<<`), which its own keys replace."""
    if "<<" not in body:
        return body
    merged = body.pop("<<")
    for one in merged if isinstance(merged, list) else [merged]:
        if not isinstance(one, dict):
            raise DumpError(f"the merge key << has {one!r}, which is no mapping")
        body = {**one, **body}
    return body


def _scalar(event: Any) -> Any:
    """Return the value of a YAML scalar as text, integer, bool or null. Fields that `plan` uses have no other types."""
    text = event.value
    if event.style or not event.implicit[0]:
        return text
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if len(text) < 19 and _INTEGER.fullmatch(text) else text


def by_kind(objects: Iterable[tuple[str, Body]]) -> dict[str, tuple[Body, ...]]:
    """Group objects by their kind. Of objects with the same kind, namespace and name, only the last counts.

    Pod templates count as pods if there are no nodes.
    """
    found: dict[str, dict[str | int, Body]] = {}
    for kind, body in objects:
        bodies = found.setdefault(kind, {})
        bodies[len(bodies) if name_of(body).startswith("?") else title_of(body)] = body
    templates = found.pop(TEMPLATE, {})
    if templates and "Node" not in found:
        found["Pod"] = dict(enumerate([*found.get("Pod", {}).values(), *templates.values()]))
    return {kind: tuple(bodies.values()) for kind, bodies in found.items()}
