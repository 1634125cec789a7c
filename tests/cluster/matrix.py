"""``python -m tests.cluster.matrix`` runs the tests on real nodes of each Kubernetes version, for the support matrix.

The versions run one after another, each on NODES isolated nodes with the programs of ``tests.cluster.build``. The first
line of a test's docstring is the feature's name on PAGE. With ``--record`` the results are written into RECORD, where
they replace earlier results of these tests on this minor version, and PAGE is made from RECORD. So a part of the tests
can be run alone::

    python -m tests.cluster.matrix --record --version 1.35.4 test_quota_real test_dra::test_selectors
    python -m tests.cluster.matrix --merge DIRECTORY    # records reports VERSION.xml and PART-VERSION.xml of pytest

With CLUSTER_LONG in the environment all scenarios of HOLDERS run, half an hour for each version; otherwise a part runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deviceplugin.device import counted
from tests.cluster import build

VERSIONS = ("1.32.2", "1.33.13", "1.34.4", "1.35.4", "1.36.3", "1.37.2")
NODES = 2
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOLDERS = "test_witnesses_real"
TESTS = {
    "test_plugin_scenarios": "Limits",
    "test_dra": "Claims",
    "test_handover": "Both sides on one node, and moves",
    "test_slices_real": "Slices, rights and policies",
    "test_daemonset_real": "In a DaemonSet, from the image",
    "test_helm_real": "By Helm",
    "test_cli_real": "Commands",
    "test_autoscaler_real": "Autoscalers",
    "test_quota_real": "Quotas",
    "test_kueue_real": "Kueue, where PEER_PROGRAMS has it",
    "test_parameters_real": "Parameters at admission",
    "test_metadata_real": "Files about devices in containers",
    HOLDERS: "No device has two holders",
}
"""The headings on PAGE, by the module of the tests."""
MACHINE = "test_unit"
"""The module of tests/vm: `tox -e vm -- --junitxml=DIRECTORY/vm-VERSION.xml tests/vm` writes a separate report."""
TITLES = {**TESTS, MACHINE: "As a unit of systemd, with cgroup v2, in a virtual machine"}
SCENARIOS = {
    "test_plugin_scenarios": HERE.parent / "scenarios" / "plugin.py",
    MACHINE: HERE.parent / "vm" / "test_unit.py",
}
"""The file with the tests of a module, for modules whose tests are in another file."""
HEAD = ["scenario", "Kubernetes", "holders before", "holders after", "overlaps", "released in use", "seconds of moves"]
RECORD = HERE / "matrix.json"
"""The file of the results: the fields of Seen, by module, test and minor version."""
PAGE = ROOT / "docs" / "support-matrix.md"
INTRODUCTION = """# Support matrix: what was seen on which Kubernetes

Tests ran with a real API server, scheduler, controller manager, kubelet and containerd ({containerd}). Those that did
not pass on all versions of a part have a row. `yes`: it passed. `no`: this version lacks what the test needs. `-`: it
was not run. [Support](support.md) lists the feature gates. `tox -e matrix -- --record` runs all or a part, writes
[the record](../tests/cluster/matrix.json), which has version and day of each cell, and makes this page of it. Each
change is tested with {default}.
"""
SCENARIOS_OF_HOLDERS = """Faults of each kind during moves, and pods that wait for each device.
A container locks its devices; a lock that fails is an overlap.
"""


class Seen(NamedTuple):
    """The result of a test on one version. word: yes, no (skipped) or FAILED. reason: why it was skipped or failed.

    holders: the columns of HEAD, without its first two, for a scenario that counts holders of devices.
    """

    word: str
    version: str
    date: str
    reason: str = ""
    holders: Sequence[str] = ()


Record = dict[str, dict[str, dict[str, Seen]]]


def outcomes(version: str, report: Path) -> dict[str, dict[str, Seen]]:
    """Return the results in a JUnit report of pytest, by module and test.

    Skipped scenarios about holders are left out: they were skipped to save time, not because a feature is missing.
    Entries of pytest itself, such as an interruption, have the module "".
    """
    found: dict[str, dict[str, Seen]] = {}
    for suite in ET.parse(report).getroot().iter("testsuite"):  # the report is pytest's, so it is trusted
        date = suite.get("timestamp", "").partition("T")[0]
        for case in suite.iter("testcase"):
            module = next((part for part in case.get("classname", "").split(".") if part.startswith("test_")), "")
            holders = [
                json.loads(one.get("value", "")) for one in case.iter("property") if one.get("name") == "holders"
            ]
            seen = Seen("yes", version, date, "", holders[0][1:] if holders else ())
            for child in case:
                if child.tag == "skipped":
                    seen = seen._replace(word="no", reason=child.get("message", ""))
                elif child.tag in ("failure", "error"):
                    seen = seen._replace(word="FAILED", reason=child.get("message", "").partition("\n")[0][:200])
            tests, name = found.setdefault(module, {}), case.get("name", "")
            if module == HOLDERS and seen.word == "no":
                continue
            if name not in tests or tests[name].word != "FAILED":  # a failed test may have a second entry
                tests[name] = seen
    return found


def read() -> Record:
    """Return the content of RECORD; an empty record if the file does not exist."""
    modules = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return {
        module: {test: {at: Seen(*seen) for at, seen in cells.items()} for test, cells in tests.items()}
        for module, tests in modules.items()
    }


def merged(record: Record, seen: Sequence[Mapping[str, Mapping[str, Seen]]]) -> Record:
    """Return a record with the results of these reports added.

    If a report has a test, all earlier results of this test on this minor version are left out, also those of other
    parameters. Tests that no longer exist are left out.
    """
    cells = [(module, test, one) for report in seen for module, tests in report.items() for test, one in tests.items()]
    anew = {(module, plain(test), minor(one.version)) for module, test, one in cells}
    made: Record = {}
    for module in TITLES:
        said = features(module)
        for test, kept in record.get(module, {}).items():
            left = {at: one for at, one in kept.items() if (module, plain(test), at) not in anew}
            if left and plain(test) in said:
                made.setdefault(module, {})[test] = left
        for _, test, one in (cell for cell in cells if cell[0] == module and plain(cell[1]) in said):
            made.setdefault(module, {}).setdefault(test, {})[minor(one.version)] = one
    return made


def write(record: Record) -> None:
    """Write RECORD, with a line for each test, and write PAGE from this record."""

    def cells(of: Mapping[str, Seen]) -> str:
        short = {at: seen[: 5 if seen.holders else 4 if seen.reason else 3] for at, seen in sorted(of.items())}
        return json.dumps(short)

    modules = []
    for module, tests in record.items():
        lines = [f"  {json.dumps(test)}: {cells(tests[test])}" for test in sorted(tests)]
        modules.append(f" {json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(modules) + "\n}\n")
    PAGE.write_text(page(record))


def features(module: str) -> dict[str, str]:
    """Return the first line of each test's docstring, by the test's name."""
    path = SCENARIOS.get(module, HERE / f"{module}.py")
    return {
        item.name: (ast.get_docstring(item) or item.name).partition("\n")[0]
        for item in ast.walk(ast.parse(path.read_text()))
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_")
    }


def versions_of(tests: Mapping[str, Mapping[str, Seen]]) -> list[str]:
    """Return the minor versions on which any of these tests ran."""
    return sorted({at for cells in tests.values() for at in cells})


def table(tests: Mapping[str, Mapping[str, Seen]], said: Mapping[str, str]) -> str:
    """Return how many of a part's tests passed on all versions, a table of the other tests, and their reasons.

    said: the features by test. Tests without a feature are left out; tests that never ran have a row.
    """
    ran = {plain(name) for name in tests}
    names = [name for name in [*tests, *(one for one in said if one not in ran)] if plain(name) in said]
    versions = versions_of(tests)
    rows = [["", *versions]]
    reasons: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: list(said).index(plain(name))):
        _, _, parameters = name.partition("[")
        feature = said[plain(name)] + (f" [{parameters}" if parameters else "")
        cells = [tests.get(name, {}).get(version) for version in versions]
        words = [cell.word if cell else "-" for cell in cells]
        if any(word != "yes" for word in words):
            rows.append([feature.replace("|", "\\|"), *words])
        for version, cell in zip(versions, cells, strict=True):
            if cell and cell.reason:
                reasons.setdefault(cell.reason, []).append(version)
    passed = f"{len(names) - len(rows) + 1} of {counted(len(names), 'test')} passed on all of {', '.join(versions)}."
    because = [f"- {', '.join(dict.fromkeys(of))}: {why}" for why, of in reasons.items()]
    return "\n".join([passed, *(["", markdown(rows)] if rows[1:] else []), *([""] if because else []), *because])


def holders_table(tests: Mapping[str, Mapping[str, Seen]]) -> str:
    """Return a table with the sums of the scenarios about holders, with a row for each version."""
    rows = [["", "scenarios", "passed", *HEAD[4:6], "moves: half within", "slowest move"]]
    for version in versions_of(tests):
        cells = [cells[version] for cells in tests.values() if version in cells]
        counts = [cell.holders for cell in cells if cell.holders]
        seconds = [float(one) for row in counts for one in row[4].split() if one != "-"]
        times = [f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"] if seconds else ["", ""]
        sums = [str(sum(int(row[place]) for row in counts)) for place in (2, 3)]
        passed = sum(cell.word == "yes" for cell in cells)
        rows.append([version, str(len(cells)), str(passed), *sums, *times])
    return markdown(rows)


def plain(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0]


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return version.rpartition(".")[0]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. rows: the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def runs(record: Record) -> str:
    """Return a table of the number of tests of each part, by version and day of the run."""
    versions = sorted({at for tests in record.values() for at in versions_of(tests)})
    rows = [["", *versions]]
    for module, tests in record.items():
        row = [TITLES[module]]
        for version in versions:
            of = Counter((cells[version].version, cells[version].date) for cells in tests.values() if version in cells)
            row.append("; ".join(f"{at} on {date}: {count}" for (at, date), count in sorted(of.items())) or "-")
        rows.append(row)
    return markdown(rows)


def page(record: Record) -> str:
    """Return the text of PAGE."""
    parts = [INTRODUCTION.format(containerd=build.CONTAINERD_VERSION, default=minor(build.DEFAULT_VERSION))]
    parts += ["How many tests were seen, with which programs and when:\n", runs(record)]
    for module, tests in record.items():
        parts += [f"\n## {TITLES[module]}\n"]
        if module == HOLDERS:
            parts += [SCENARIOS_OF_HOLDERS, holders_table(tests)]
        else:
            parts += [table(tests, features(module))]
    return "\n".join(parts) + "\n"


def run(version: str, tests: Sequence[str], nodes: int, report: Path) -> None:
    """Run the tests on `nodes` nodes of one version, and write pytest's report."""
    environment = {**os.environ, "KUBERNETES_VERSION": version}
    subprocess.run([sys.executable, "-m", "tests.cluster.build", version], check=True, env=environment)
    isolated = f"{nodes}*popen//python={sys.executable} -m tests.cluster.isolate {sys.executable}"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*pytest, "--tx", isolated, "--dist", "worksteal", *tests], check=False, env=environment)


def in_pytest(what: str) -> str:
    """Return pytest's argument for MODULE or MODULE::TEST."""
    module, *test = what.split("::", 1)
    return "::".join([str(HERE / f"{module}.py"), *test])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all versions and print failed tests; return 1 if a test failed or a version has no report."""
    parser = argparse.ArgumentParser(prog="tests.cluster.matrix", description=__doc__)
    parser.add_argument("--version", action="append", help="one of these instead of all (may be given again)")
    parser.add_argument("--nodes", type=int, default=NODES, help=f"how many nodes at a time ({NODES})")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and {PAGE.name} after each version")
    parser.add_argument(
        "--merge", type=Path, metavar="DIRECTORY", help="run nothing, record pytest's reports from here"
    )
    parser.add_argument("tests", nargs="*", help="what to run: modules, or MODULE::TEST (all)")
    options = parser.parse_args(argv)
    if options.merge:
        found = {report: report.stem.rpartition("-")[2] for report in sorted(options.merge.glob("*.xml"))}
        write(merged(read(), [outcomes(version, report) for report, version in found.items()]))
        return 0
    whole = True
    with tempfile.TemporaryDirectory() as directory:
        for version in options.version or VERSIONS:
            print(f"--- Kubernetes {version}", flush=True)
            report = Path(directory) / f"{version}.xml"
            run(version, [in_pytest(what) for what in options.tests or TESTS], options.nodes, report)
            tests = outcomes(version, report) if report.exists() else {}
            failed = [
                f"{version}: {name}: {seen.reason}"
                for module in tests.values()
                for name, seen in module.items()
                if seen.word == "FAILED"
            ]
            print(*failed, sep="\n")
            whole = whole and bool(tests) and not failed
            if options.record:
                write(merged(read(), [tests]))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
