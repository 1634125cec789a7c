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
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"deviceplugin {VERSION}"
myst_heading_anchors = 3


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


def check_offline(app: Sphinx, error: Exception | None) -> None:
    """Fail if a page of the site loads anything from elsewhere."""
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^>]*>")
    for page in sorted(Path(app.outdir).rglob("*.html")) if error is None else ():
        if found := loads.search(page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page.relative_to(app.outdir)} loads {found[0]}")


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("build-finished", check_offline)
    app.connect("source-read", leave_links)
