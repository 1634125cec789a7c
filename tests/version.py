"""Sets the version: `python -m tests.version X.Y.Z` writes it into deviceplugin/version.py and the other FILES.

Code and packaging read the version from deviceplugin/version.py. The other files (YAML, Markdown, shell) cannot do so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deviceplugin.version import VERSION

ROOT: Final = Path(__file__).resolve().parent.parent
FILES: Final = (
    "charts/dra-bridge/Chart.yaml",
    "deviceplugin/version.py",
    "docs/limits-to-claims.md",
    "docs/operations.md",
    "examples/Dockerfile",
    "examples/daemonset.yaml",
    "examples/krew/dra-bridge.yaml",
    "examples/krew/kubectl-dra_bridge",
    "examples/own-plugin/Dockerfile",
)
PLACE: Final = re.compile(r'(deviceplugin[-:]|/download/v|ersion: v?|VERSION: Final = ")(\d+\.\d+\.\d+)\b')
"""A version after one of the texts that precede it in these files."""


def found(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the versions that are found in each of FILES, by the file's path."""
    return {name: [one[2] for one in PLACE.finditer((root / name).read_text())] for name in FILES}


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write the version given on the command line into FILES; return the exit status."""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        print(f"usage: python -m tests.version X.Y.Z (it is {VERSION})", file=sys.stderr)
        return 2
    for name in FILES:
        path = root / name
        path.write_text(PLACE.sub(rf"\g<1>{arguments[0]}", path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
