"""The documents are in plain technical English: a short list of rules, close to Kubernetes' own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import api_page, reference_pages
from tests.source import ROOT

PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
GENERATED = {
    *("docs/support-matrix.md", "docs/api.md", "docs/scale.md"),
    *(path.relative_to(ROOT).as_posix() for path in reference_pages.PAGES),
}
"""Pages that are generated from tests, from the code, or from measurements."""
LONGEST = 40
"""The maximum number of words in a sentence."""
BUDGET = 20_000
"""The maximum number of words in all pages together, with their code.

A word has a letter or a digit, so marks of tables are no words.
"""
RULES = {
    r"\b[Ww]hoever\b|(?<![\w?] )\bWho (?!\w[^.?]*\?)": "name the subject: a user, an agent, a program",
    r"\bis told\b|\b[Ww]hat is told\b|\btells (?!the driver's)\w+": "things have, show, return or report",
    r"\bsomebody\b|\banybody\b|\bnobody\b": "name the user, pod, claim or program",
    r"\b(easy|easily|simply|please|obviously|of course)\b": "leave it out",
    r"\b(e\.g\.|i\.e\.|etc\.|via)(?=\W)": "write it in English",
    r"\b(we|We|our|Our)\b(?! (own )?file)": "name the project, the agent or the page",
    r"\b(sick|well again|in the hands?|at the mercy|under the hood|out of the box|gives? way)\b": "no metaphors",
    r"\bthe same is true\b|\b[Mm]ind (that|the|kubelet)\b|\bsee to (it|both)\b|\b[Bb]ut for\b": "say it directly",
}


def prose(text: str) -> Iterator[str]:
    """The paragraphs, list items, headings and cells of a page, without code, with the texts of its links."""
    text = re.sub(r"^[ ]*```.*?^[ ]*```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "CODE", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-#|]|\d+\.) ?)", text):
        yield from (re.sub(r"\s+", " ", part).strip(" -#*") for part in block.split("|"))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose."""
    for block in prose(text):
        yield from re.split(r"(?<=[.!?])\**\s+", block)


@pytest.mark.parametrize("name", [page for page in PAGES if page not in GENERATED])
def test_sentences_are_short_and_plain(name: str) -> None:
    """No sentence of a page has more than 40 words, or words that the rules forbid."""
    found = []
    for sentence in sentences((ROOT / name).read_text()):
        if len(re.findall(r"\S*\w\S*", sentence)) > LONGEST:
            found.append(f"over {LONGEST} words: {sentence}")
        found += [f"{why}: {sentence}" for rule, why in RULES.items() if re.search(rule, sentence)]
    assert not found, "\n".join(found)


def test_rules_find_what_they_are_for() -> None:
    """The rules find these wrong sentences, and accept a question that begins with Who."""
    wrong = (
        "Who deletes the Node object deletes it, too.",
        "The agent is told of it.",
        "Nobody is evicted, and somebody waits.",
        "It is easy.",
        "We serve it.",
        " ".join(["word"] * (LONGEST + 1)),
    )
    for text in wrong:
        (sentence,) = sentences(text)
        long = len(sentence.split()) > LONGEST
        assert long or any(re.search(rule, sentence, re.IGNORECASE) for rule in RULES), sentence
    assert not any(re.search(rule, "Who can read the metrics port?") for rule in RULES)


def test_the_documents_have_a_budget() -> None:
    """All pages together have at most BUDGET words."""
    written = [(ROOT / page).read_text() for page in PAGES if page not in GENERATED]
    assert sum(bool(re.search(r"\w", word)) for text in written for word in text.split()) <= BUDGET


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures are written in other words by other Pythons")
def test_the_api_page_is_that_of_the_docstrings() -> None:
    """docs/api.md has all public names with their fields and hooks, as they are in the code."""
    assert api_page.PAGE.read_text() == api_page.page(), "run: python -m tests.api_page"


@pytest.mark.parametrize("path", reference_pages.PAGES, ids=lambda path: path.name)
def test_reference_pages_are_what_the_code_has(path: Path) -> None:
    """Metrics with their labels, and findings with their remedies, are as they are in the code."""
    assert path.read_text() == reference_pages.PAGES[path](), "run: python -m tests.reference_pages"
