"""Splits a YAML stream into documents, and parses a document into an object and YAML nodes with positions.

All functions are pure. The parser is libyaml, if PyYAML was built with libyaml. kubectl and Helm use a port of libyaml
(go.yaml.in/yaml/v2), so they read a text as this module does. Like kubectl and Helm, this module first splits the
stream at lines that begin with `---`, and then parses each document. So an invalid document does not affect the other
documents.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

_START: Final = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)
_DIRECTIVES: Final = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*%(?:[^\n]*\n(?=[%#\s]|\Z))*")
_BARE_START: Final = re.compile(r"---[ \t]*(?:#[^\n]*)?\r?(?:\n|\Z)")
_FAST: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BOM: Final = "\ufeff"


class YamlTextError(Exception):
    """Raised when a text is not YAML, or has more than one document. The message names the line of the error."""


class UnwritableError(Exception):
    """Raised when an edit of a text would also change other parts of the text. The message states the reason."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a stream. text: the document's text, with its line `---` if there is one.

    line: the number of the document's first line in the stream, from 1.
    """

    text: str
    line: int

    @property
    def eol(self) -> str:
        """The line ending of the document, such as a newline."""
        first = self.text.partition("\n")[0]
        return "\r\n" if first.endswith("\r") else "\n"

    @property
    def head(self) -> int | None:
        """The index in the text at which other documents can be inserted: after a line `---`, or 0 without this line.

        The value is None if the line `---` has more text, or if directives come before this line, so that no document
        can be inserted.
        """
        if _DIRECTIVES.match(self.text):
            return None
        bare = _BARE_START.match(self.text)
        if bare is not None:
            return bare.end() if bare[0].endswith("\n") else None
        return None if _START.match(self.text) else 0


def documents(stream: str) -> list[Document]:
    """Split a stream into its documents. The stream is the concatenation of the documents' texts."""
    starts = [0]
    for match in _START.finditer(stream):
        # A line `---` after directives (such as %YAML) belongs to the same document as the directives.
        if match.start() and not _DIRECTIVES.fullmatch(stream, starts[-1], match.start()):
            starts.append(match.start())
    found, line = [], 1
    for start, end in zip(starts, [*starts[1:], len(stream)], strict=True):
        found.append(Document(stream[start:end], line))
        line += stream.count("\n", start, end)
    return found


class _Redefining(yaml.SafeLoader):
    """A YAML loader that accepts a second definition of an anchor, as kubectl does; libyaml's loader does not."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if not self.check_event(yaml.AliasEvent):
            self.anchors.pop(self.peek_event().anchor, None)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


class Tree:
    """A document's object, and the YAML nodes that the object was made from.

    Raises YamlTextError if the text is not one document of YAML.
    """

    def __init__(self, text: str) -> None:
        self.root: yaml.Node | None
        self.object: Any
        try:
            try:
                self.root, self.object = _loaded(_FAST, text)
            except yaml.composer.ComposerError:
                self.root, self.object = _loaded(_Redefining, text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            raise YamlTextError(f"{getattr(error, 'problem', None) or error}{where}") from error
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            # For example, a date with month 13 causes a ValueError.
            raise YamlTextError(f"{type(error).__name__}: {error}") from error
        self._shared = {id(node) for node, count in _references(self.root) if count > 1}

    def entry(self, mapping: yaml.Node, key: str) -> tuple[yaml.Node, yaml.Node]:
        """Return the nodes of a key and its value.

        Raises UnwritableError if the key does not occur exactly once, or if the text of key or value is also used
        elsewhere, by an anchor, an alias or a merge key.
        """
        found = [] if not isinstance(mapping, yaml.MappingNode) else [e for e in mapping.value if e[0].value == key]
        if len(found) != 1:
            raise UnwritableError(f"`{key}` occurs {len(found)} times, or comes from a merge key")
        if any(id(node) in self._shared for node in found[0]):
            raise UnwritableError(f"`{key}` is an alias, is from a merge key, or has an anchor that is used elsewhere")
        return found[0][0], found[0][1]

    def item(self, sequence: yaml.Node, index: int) -> yaml.Node:
        """Return the node of a sequence's item. Raises UnwritableError as `entry` does."""
        node: yaml.Node = sequence.value[index]
        if id(node) in self._shared:
            raise UnwritableError(f"item {index} has an anchor that is used elsewhere, or is an alias")
        return node

    def at(self, path: tuple[str | int, ...]) -> yaml.Node:
        """Return the node at a path of keys and indexes. Raises UnwritableError as `entry` does."""
        assert self.root is not None
        node = self.root
        for step in path:
            node = self.entry(node, step)[1] if isinstance(step, str) else self.item(node, step)
        return node

    def mapping(self, node: yaml.Node) -> yaml.MappingNode:
        """Return the node as a mapping. Raises UnwritableError if it is not a mapping."""
        if not isinstance(node, yaml.MappingNode):
            raise UnwritableError("a value to change is not a mapping")
        return node

    def line_of(self, path: tuple[str | int, ...]) -> int:
        """Return the number of the line in which the node at a path begins. The text's first line has the number 0."""
        node = self.root
        for step in path:
            if isinstance(step, int) and isinstance(node, yaml.SequenceNode):
                node = node.value[step]
            elif isinstance(node, yaml.MappingNode):
                node = next((value for key, value in node.value if key.value == step), node)
        return 0 if node is None else int(node.start_mark.line)


def _loaded(kind: Any, text: str) -> tuple[yaml.Node | None, Any]:
    loader = kind(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def text_end(node: yaml.Node) -> int:
    """Return the index after a node's last character.

    For a node in block style, `end_mark` is at the beginning of the next token instead.
    """
    end = 0
    for one in _below(node):
        flow = isinstance(one, yaml.CollectionNode) and one.flow_style
        if isinstance(one, yaml.ScalarNode) or flow:
            end = max(end, one.end_mark.index)
    return end


def inside_scalars(tree: Tree) -> set[tuple[int, int]]:
    """Return the index ranges of all scalars in a document. A line inside such a range is text, not YAML syntax."""
    if tree.root is None:
        return set()
    scalars = (node for node in _below(tree.root) if isinstance(node, yaml.ScalarNode))
    return {(node.start_mark.index, node.end_mark.index) for node in scalars}


def _below(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield a YAML node and all nodes below this node, each once."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += _children(one)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _references(root: yaml.Node | None) -> list[tuple[yaml.Node, int]]:
    """Return all nodes below the root, each with the number of its uses.

    The number is above 1 if aliases or merge keys use the node too.
    """
    if root is None:
        return []
    counts: Counter[int] = Counter()
    by_id = {}
    for node in _below(root):
        for child in _children(node):
            counts[id(child)] += 1
            by_id[id(child)] = child
    return [(by_id[key], count) for key, count in counts.items()]
