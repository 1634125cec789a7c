"""``python -m tests.cluster.matrix``: what works on which Kubernetes, by running the tests on real nodes of each.

The versions are run one after another, each isolated and with the programs of ``tests.cluster.build``. A test is one
feature and its docstring says which. In the table, which is Markdown, ``yes`` is a test that passed and ``no`` one that
was skipped because the version lacks the feature, for the reason given below the table; ``FAILED`` speaks for itself.

On HOLDERS_ON all scenarios of ``test_witnesses_real.py`` run too, half an hour each. A second table has their holders,
overlaps and seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VERSIONS = ("1.32.2", "1.33.13", "1.34.4", "1.35.4", "1.36.3", "1.37.1")
HERE = Path(__file__).parent
TESTS = ("test_dra.py", "test_slices_real.py", "test_plugin_scenarios.py")
HOLDERS = "test_witnesses_real.py"
HOLDERS_ON = ("1.34.4", "1.36.3", "1.37.1")
HEAD = ["scenario", "Kubernetes", "holders before", "holders after", "overlaps", "released in use", "seconds of moves"]


@dataclass(frozen=True)
class Outcome:
    """How a test went on one version. reason: why it was skipped, or what failed."""

    word: str
    reason: str = ""


def outcomes(report: Path) -> dict[tuple[str, str], Outcome]:
    """Return how each test went by (module, test) from a report of pytest's in JUnit's form."""
    found: dict[tuple[str, str], Outcome] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # pytest wrote it
        module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        outcome = Outcome("yes")
        for child in case:
            if child.tag == "skipped":
                outcome = Outcome("no", child.get("message", ""))
            elif child.tag in ("failure", "error"):
                outcome = Outcome("FAILED", child.get("message", "").partition("\n")[0][:200])
        key = module, case.get("name", "")
        if key not in found or found[key].word != "FAILED":  # a test can fail once more, in its teardown
            found[key] = outcome
    return found


def holder_rows(version: str, report: Path) -> list[list[str]]:
    """Return what the scenarios about holders recorded in a report, a row of HEAD each."""
    found = [
        one.get("value", "") for one in ET.parse(report).getroot().iter("property") if one.get("name") == "holders"
    ]
    return [[name, version, *cells] for name, *cells in map(json.loads, found)]


def features(paths: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Return the first line of each test's docstring by (module, test)."""
    found: dict[tuple[str, str], str] = {}
    for path in paths:
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_"):
                found[path.stem, item.name] = (ast.get_docstring(item) or item.name).partition("\n")[0]
    return found


def table(by_version: Mapping[str, Mapping[tuple[str, str], Outcome]], said: Mapping[tuple[str, str], str]) -> str:
    """Return the table and the reasons below it."""
    keys = dict.fromkeys(key for found in by_version.values() for key in found)
    rows = [["feature", *by_version]]
    reasons: dict[str, None] = {}
    for module, name in keys:
        plain, _, parameters = name.partition("[")
        feature = said.get((module, plain), plain) + (f" [{parameters}" if parameters else "")
        cells = []
        for version, found in by_version.items():
            outcome = found.get((module, name), Outcome("-"))
            cells.append(outcome.word)
            if outcome.reason:
                reasons[f"{name}, {version}: {outcome.word}: {outcome.reason}"] = None
        rows.append([feature.replace("|", "\\|"), *cells])
    return "\n".join([markdown(rows), "", *(f"- {reason}" for reason in reasons)])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def run(version: str, tests: Sequence[str], report: Path) -> None:
    """Run the tests on a node of one version."""
    environment = {**os.environ, "KUBERNETES_VERSION": version, "CLUSTER_LONG": "1"}
    subprocess.run([sys.executable, "-m", "tests.cluster.build", version], check=True, env=environment)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    subprocess.run([sys.executable, "-m", "tests.cluster.isolate", *pytest], check=False, env=environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all versions, print the table; 1 if a test failed anywhere or a version gave no report."""
    parser = argparse.ArgumentParser(prog="tests.cluster.matrix", description=__doc__)
    parser.add_argument("--version", action="append", help="one of these instead of all (may be given again)")
    parser.add_argument("--table", type=Path, help="also write the table to this file")
    parser.add_argument("--reports", type=Path, help="keep pytest's reports here, and use those that are there")
    parser.add_argument(
        "tests",
        nargs="*",
        help="what to run (%(default)s)",
        default=[str(HERE / one) for one in (*TESTS, HOLDERS)],
    )
    options = parser.parse_args(argv)
    by_version: dict[str, Mapping[tuple[str, str], Outcome]] = {}
    holders: list[list[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.reports or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for version in options.version or VERSIONS:
            report = directory / f"{version}.xml"
            if not report.exists():
                print(f"--- Kubernetes {version}", flush=True)
                tests = [one for one in options.tests if version in HOLDERS_ON or Path(one).name != HOLDERS]
                run(version, tests, report)
            by_version[version] = outcomes(report) if report.exists() else {}
            holders += holder_rows(version, report) if report.exists() else []
    scenarios = HERE.parent / "scenarios" / "plugin.py"
    said = features([HERE / one for one in (*TESTS, HOLDERS)])
    said |= {("test_plugin_scenarios", name): text for (_, name), text in features([scenarios]).items()}
    printed = table(by_version, said)
    if holders:
        printed += "\n\n" + markdown([HEAD, *sorted(holders)])
    print(printed)
    if options.table:
        options.table.write_text(printed + "\n")
    whole = all(found and all(one.word != "FAILED" for one in found.values()) for found in by_version.values())
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
