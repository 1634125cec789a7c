"""How Sphinx makes the site of these pages: `tox -e docs`. The pages are plain Markdown, and complete without it."""

import configparser
import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from deviceplugin.version import VERSION  # noqa: E402

project = "deviceplugin"
copyright = "the authors, Apache License 2.0"  # noqa: A001
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = f"deviceplugin {VERSION}"
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # single backticks, as in Markdown


def leave_links(_: Sphinx, name: str, source: list[str]) -> None:
    """Let links out of docs/ lead to the repository, or be their text where setup.cfg has no `url`."""
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    url = setup_cfg.get("metadata", "url", fallback="")

    def target(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        full = posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), path))
        if "://" in path or not path or full.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({url}/blob/v{VERSION}/{full}{mark}{anchor})" if url else link[1]

    source[0] = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", target, source[0])


def list_fields(_: Sphinx, __: str, ___: str, ____: object, _____: object, lines: list[str]) -> None:
    """Make lists of our docstrings' fields: lines `name: text`, and what is indented below them."""
    made: list[str] = []
    inside = False
    for line in lines:
        field = re.match(r"([a-z_]+): (.+)", line)
        if bool(field) is not inside and not (inside and line.startswith(" ")):
            made.append("")
        if field:
            made.append(f"* **{field[1]}**: {field[2]}")
        else:
            made.append(f"  {line.strip()}" if inside and line.startswith(" ") else line)
        inside = bool(field) or (inside and line.startswith(" "))
    lines[:] = made


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("autodoc-process-docstring", list_fields, priority=400)  # before napoleon
    app.connect("source-read", leave_links)
