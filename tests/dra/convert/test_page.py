"""The commands on the page docs/manifests.md are run, and their output is compared with the page."""

from __future__ import annotations

from pathlib import Path

from tests.pages import happens
from tests.source import ROOT


def test_the_page_is_what_happens(tmp_path: Path) -> None:
    """Every command of the page prints what the page shows."""
    happens(ROOT / "docs" / "manifests.md", 3, tmp_path)
