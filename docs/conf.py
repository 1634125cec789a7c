"""How Sphinx makes the site of these pages: `tox -e docs`. The pages are plain Markdown, and complete without it."""

import configparser
import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from deviceplugin.version import VERSION  # noqa: E402

project = "deviceplugin"
copyright = "the authors, Apache License 2.0"  # noqa: A001
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"deviceplugin {VERSION}"
myst_heading_anchors = 3
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


def as_rest(_: Sphinx, __: str, ___: str, ____: object, _____: object, lines: list[str]) -> None:
    """Make reStructuredText of our docstrings.

    A paragraph `name: text. other: text.` becomes a list, and an indented paragraph a block of Python.
    """
    made: list[str] = []
    inside = False  # a block of code, whose paragraphs follow each other
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        code, inside = inside, paragraph.startswith("    ")
        if inside:
            made += [*([] if code else [".. code-block:: python", ""]), *paragraph.splitlines(), ""]
        elif re.match(r"[a-z_]+: ", paragraph):
            text = " ".join(line.strip() for line in paragraph.splitlines())
            fields = re.split(r"(?<=[.)]) (?=[a-z_]+: )", text)
            made += [*(re.sub(r"^([a-z_]+): ", r"* **\1**: ", one) for one in fields), ""]
        else:
            made += [*paragraph.splitlines(), ""]
    lines[:] = made


def check_offline(app: Sphinx, error: Exception | None) -> None:
    """Fail if a page of the site loads anything from elsewhere."""
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^>]*>")
    for page in sorted(Path(app.outdir).rglob("*.html")) if error is None else ():
        if found := loads.search(page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page.relative_to(app.outdir)} loads {found[0]}")


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("build-finished", check_offline)
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("source-read", leave_links)
