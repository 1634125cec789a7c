"""Writes docs/scale.md: each part of a run writes its own section, and other sections stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.fleet.limits import Limit

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
ORDER: Final = {
    "growth": "What do agents ask of the API server?",
    "rest": "What do agents ask at rest?",
    "restart": "What happens when the API server restarts?",
    "peers": "What does the helper of Go drivers ask?",
    "commands": "What do status and rollout cost at 1,000 nodes?",
    "node": "How much can one node have?",
    "load": "What does a loaded cluster see?",
    "extrapolation": "What follows for 15,000 nodes?",
}
"""The headings of the page's sections by the sections' keys, in their order on the page."""
TITLE: Final = """# How many nodes can run agents?

No figure here is a guess: `tox -e fleet` measures them, writes this page, and fails if a limit is missed.
The API server is real, with default priority and fairness, RBAC and the policies of the manifests. The agents are the
real code, many in a process, each with an embedded kubelet and 8 devices. The machine has two cores.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def cell(value: object) -> str:
    """Return a value as the text of a cell; large numbers have fewer decimals."""
    if isinstance(value, float):
        if value == int(value) or abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def of_limits(limits: Sequence[Limit]) -> str:
    """Return the table of the limits of a part."""
    rows = [
        (one.what, f"{cell(one.value)} {one.unit}".strip(), one.text + ("" if one.met else ": MISSED"))
        for one in limits
    ]
    return table(("measured", "value", "limit"), rows)


def sections(text: str) -> dict[str, str]:
    """Return the sections of the page by their part."""
    parts = {heading: part for part, heading in ORDER.items()}
    found = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    return {parts[heading]: body for heading, body in zip(found[::2], found[1::2], strict=True) if heading in parts}


def write(new: Mapping[str, str], path: Path = PAGE) -> None:
    """Write the page with these sections, in place of their former texts; other sections stay."""
    kept = sections(path.read_text()) if path.exists() else {}
    kept |= {part: f"\n{body.strip()}\n\n" for part, body in new.items()}
    body = "".join(f"## {heading}\n{kept[part]}" for part, heading in ORDER.items() if part in kept)
    path.write_text(f"{TITLE}\n{body.rstrip()}\n")
