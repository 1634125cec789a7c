"""Edits a YAML text without changes of other bytes, and marks the edits, so that they can be undone. Pure functions.

Comments mark each changed line. A removed line becomes a comment, `# dra-bridge: was LINE`. An added line ends with the
comment `# dra-bridge: added`, and an added document begins with this comment.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import yaml

from dra_bridge.convert.documents import (
    BOM,
    Document,
    Tree,
    UnwritableError,
    YamlTextError,
    documents,
    inside_scalars,
    text_end,
)
from dra_bridge.convert.templates import template_name

WAS: Final = "# dra-bridge: was "
ADDED: Final = "# dra-bridge: added"
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")
_WAS_LINE: Final = re.compile(rf"([ ]*){re.escape(WAS)}(.*)", re.DOTALL)


class Edit(NamedTuple):
    """A text that replaces a range of a document's text. start, end: indexes in the document's text."""

    start: int
    end: int
    text: str


def removed(text: str, mapping: yaml.MappingNode, keys: Collection[str]) -> list[Edit]:
    """Return the edits that remove the entries with these keys from a YAML mapping.

    Raises UnwritableError if the lines of these entries contain other text as well.
    """
    pairs = mapping.value
    edits = []
    for index, (key, value) in enumerate(pairs):
        if key.value not in keys:
            continue
        start, end = key.start_mark.index, max(key.end_mark.index, text_end(value))
        if not mapping.flow_style:
            start, end = _line_start(text, start), _line_end(text, end)
            if text[start : key.start_mark.index].strip(" "):
                raise UnwritableError(f"other text is before `{key.value}` on its line")
        elif index + 1 < len(pairs):
            end = pairs[index + 1][0].start_mark.index
        elif index:
            start = text_end(pairs[index - 1][1])
        edits.append(Edit(start, end, ""))
    return edits


def with_list(
    text: str, mapping: yaml.MappingNode, key: str, values: Sequence[str], without: Collection[str] = ()
) -> Edit:
    """Return the edit that adds an entry, whose value is a list, at the beginning of a mapping.

    values: the list's items in flow style. without: keys of the mapping that other edits remove. Raises UnwritableError
    if no line is suitable for the insertion.
    """
    eol = Document(text, 1).eol
    value = f"[{', '.join(values)}]"
    if mapping.flow_style:
        rest = any(pair[0].value not in without for pair in mapping.value)
        quoted = bool(mapping.value) and mapping.value[0][0].style == '"'
        name = f'"{key}"' if quoted else key
        place = mapping.start_mark.index + 1
        place += text[mapping.start_mark.index :].index("{")  # An anchor or a tag may stand before the mapping's brace.
        return Edit(place, place, f"{name}: {value}{', ' if rest else ''}")
    for first, _ in mapping.value:
        start = _line_start(text, first.start_mark.index)
        indent = text[start : first.start_mark.index]
        if not indent.strip(" "):
            if len(values) > 1:
                value = "".join(f"{eol}{indent}- {one}" for one in values)
                return Edit(start, start, f"{indent}{key}:{value}{eol}")
            return Edit(start, start, f"{indent}{key}: {value}{eol}")
    raise UnwritableError(f"`{key}` cannot be added, because no entry of the mapping begins a line")


def with_items(text: str, sequence: yaml.Node, values: Sequence[str]) -> Edit:
    """Return the edit that adds items at the beginning of a list.

    Raises UnwritableError if no line is suitable for this. sequence: the YAML node of the list, or of a null in its
    place. values: the items in flow style.
    """
    start, end = sequence.start_mark.index, sequence.end_mark.index
    if isinstance(sequence, yaml.ScalarNode):
        return Edit(start, end, f"{' ' if start == end else ''}[{', '.join(values)}]")
    if not isinstance(sequence, yaml.SequenceNode):
        raise UnwritableError("a value to extend is not a list")
    if sequence.flow_style:
        place = start + 1 + text[start:].index("[")
        return Edit(place, place, ", ".join(values) + (", " if sequence.value else ""))
    eol = Document(text, 1).eol
    for item in sequence.value:
        begin = _line_start(text, item.start_mark.index)
        dash = re.fullmatch(r"( *)-[ ]+", text[begin : item.start_mark.index])
        if dash:
            return Edit(begin, begin, "".join(f"{dash[1]}- {value}{eol}" for value in values))
    raise UnwritableError("an item cannot be added, because no item of the list begins a line")


def marked(text: str, edits: Iterable[Edit]) -> str:
    """Return a document's text after the edits, with comments that mark each changed line."""
    eol = Document(text, 1).eol
    lines = _LINE.findall(text)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    ordered = sorted(edits)
    touched: set[int] = set()
    for edit in ordered:
        first, last = (bisect.bisect_right(starts, index) - 1 for index in (edit.start, max(edit.start, edit.end - 1)))
        if not _is_new_line(edit, starts):
            touched |= set(range(min(first, len(lines) - 1), last + 1))
    new = []
    number = 0
    while number < len(lines):
        end = number
        while end in touched:
            end += 1
        end = max(end, number + 1)
        until = starts[end] + (end == len(lines))
        inside = [edit for edit in ordered if starts[number] <= edit.start < until]
        changed = _changed(text, starts[number], starts[end], inside)
        if number in touched:
            was = lines[number:end]
            new += [_tagged(line, eol) for line in _LINE.findall(changed) if line.strip()]
            new += [_commented(line) for line in was]
        else:
            lead = changed[: len(changed) - len(lines[number])]
            new += [_tagged(line, eol) for line in _LINE.findall(lead)]
            new.append(lines[number])
        number = end
    return "".join(new)


def with_documents(document: Document, texts: Sequence[str]) -> str:
    """Return a document's text with new documents before it.

    Raises UnwritableError if the document's line `---` has more text, or comes after directives.
    """
    if not texts:
        return document.text
    if document.head is None:
        where = "the line `---` has more text, or comes after directives"
        raise UnwritableError(f"{where}, so no other document can begin there")
    eol, head = document.eol, document.head
    new = "".join(f"{ADDED}\n{text}---\n" for text in texts).replace("\n", eol)
    return document.text[:head] + new + document.text[head:]


def reversed_stream(stream: str) -> str:
    """Undo the changes that comments mark in a stream. Documents that are not YAML stay as they are."""
    bom = BOM if stream.startswith(BOM) else ""
    kept = []
    # `joins` is True after the removal of an added document. The line `---` after this document was added with the
    # document, so this line is removed as well; the line `---` before the document stays.
    joins = False
    for document in documents(stream.removeprefix(bom)):
        text = document.text
        if joins:
            text = text[document.head or 0 :]
        joins = False
        try:
            tree = Tree(document.text)
        except YamlTextError:
            kept.append(text)
            continue
        head = document.head or 0
        if document.text.startswith(ADDED, head) and template_name(tree.object) is not None:
            kept.append(text[: len(text) - (len(document.text) - head)])
            joins = True
            continue
        offset = len(document.text) - len(text)
        kept.append(_reversed(text, {(start - offset, end - offset) for start, end in inside_scalars(tree)}))
    return bom + "".join(kept)


def _reversed(text: str, scalars: Iterable[tuple[int, int]]) -> str:
    ranges = sorted(scalars)
    kept = []
    index = 0
    for line in _LINE.findall(text):
        before = bisect.bisect_left(ranges, (index, -1)) - 1
        inside = before >= 0 and ranges[before][1] > index
        index += len(line)
        if inside:
            kept.append(line)
            continue
        while was := _WAS_LINE.fullmatch(line):
            line = was[1] + was[2]
        if not line.rstrip("\r\n").endswith(ADDED):
            kept.append(line)
    return "".join(kept)


def _is_new_line(edit: Edit, starts: Sequence[int]) -> bool:
    index = bisect.bisect_left(starts, edit.start)
    return edit.start == edit.end and edit.text.endswith("\n") and starts[index] == edit.start


def _changed(text: str, start: int, end: int, edits: Iterable[Edit]) -> str:
    parts = []
    position = start
    for edit in edits:
        parts += [text[position : max(position, edit.start)], edit.text]
        position = max(position, edit.end)
    return "".join(parts) + text[position:end]


def _tagged(line: str, eol: str) -> str:
    return line.rstrip("\r\n") + f"  {ADDED}{eol}"


def _commented(line: str) -> str:
    rest = line.lstrip(" ")
    return f"{line[: len(line) - len(rest)]}{WAS}{rest}" if rest.strip() else line


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _line_end(text: str, index: int) -> int:
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
