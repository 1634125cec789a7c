"""``python -m tests.cluster.matrix``: what works on which Kubernetes, by running the tests on real nodes of each.

The versions are run one after another, each on NODES isolated nodes with the programs of ``tests.cluster.build``. With
``--record`` PAGE is made of pytest's reports. A test is one feature and its docstring says which. Tests that passed on
all versions are counted; the others have a row: ``yes`` is a test that passed and ``no`` one that was skipped because
the version lacks the feature, for the reason given below the table.

`--machine` makes the part about the virtual machine of tests/vm anew, of its own reports.

With CLUSTER_LONG in the environment all scenarios of HOLDERS run, half an hour for each version, else some of them.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    "test_parameters_real": "Parameters at admission",
    HOLDERS: "No device has two holders",
}
"""The modules of tests, and the heading of each on PAGE."""
MACHINE = "test_unit"
"""The module of tests/vm: `tox -e vm -- --junitxml=DIRECTORY/vm-VERSION.xml tests/vm` writes a report of its own.

It is the last part of PAGE, which `--machine DIRECTORY` makes anew of such reports alone.
"""
TITLES = {**TESTS, MACHINE: "As a unit of systemd, with cgroup v2, in a virtual machine"}
SCENARIOS = {
    "test_plugin_scenarios": HERE.parent / "scenarios" / "plugin.py",
    MACHINE: HERE.parent / "vm" / "test_unit.py",
}
"""Where a module has its tests from, if not from the file of its name."""
HEAD = ["scenario", "Kubernetes", "holders before", "holders after", "overlaps", "released in use", "seconds of moves"]
PAGE = ROOT / "docs" / "support-matrix.md"
INTRODUCTION = """# Support matrix: what was seen on which Kubernetes

Tests ran with a real API server, scheduler, controller manager, kubelet and containerd ({containerd}). Those that did
not pass on all versions have a row. `yes`: it passed. `no`: this version lacks what the test needs. `-`: it was not
run. [Support](support.md) lists the feature gates. `tox -e matrix -- --record` makes this page. Each change is tested
with {default}.
"""
SCENARIOS_OF_HOLDERS = """Faults of each kind during moves, and pods that wait for each device.
A container locks its devices; a lock that fails is an overlap.
"""


class Outcome(NamedTuple):
    """How a test went on one version: yes, no or FAILED, and why it was skipped or what failed."""

    word: str
    reason: str = ""


def outcomes(report: Path) -> dict[str, dict[str, Outcome]]:
    """Return how each test went by module and test from a report of pytest's in JUnit's form."""
    found: dict[str, dict[str, Outcome]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # pytest wrote it
        module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
        outcome = Outcome("yes")
        for child in case:
            if child.tag == "skipped":
                outcome = Outcome("no", child.get("message", ""))
            elif child.tag in ("failure", "error"):
                outcome = Outcome("FAILED", child.get("message", "").partition("\n")[0][:200])
        tests, name = found.setdefault(module, {}), case.get("name", "")
        if name not in tests or tests[name].word != "FAILED":  # a test can fail once more, in its teardown
            tests[name] = outcome
    return found


def holder_rows(report: Path) -> list[list[str]]:
    """Return what the scenarios about holders recorded in a report: HEAD without the version."""
    properties = ET.parse(report).getroot().iter("property")
    return sorted(json.loads(one.get("value", "")) for one in properties if one.get("name") == "holders")


def features(path: Path) -> dict[str, str]:
    """Return the first line of each test's docstring by the test."""
    return {
        item.name: (ast.get_docstring(item) or item.name).partition("\n")[0]
        for item in ast.walk(ast.parse(path.read_text()))
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_")
    }


def table(by_version: Mapping[str, Mapping[str, Sequence[str]]], said: Mapping[str, str]) -> str:
    """Return how many of a module's tests passed on all versions, a table of the others, and the reasons below it.

    Tests that said lacks are left out.
    """
    names = dict.fromkeys(name for found in by_version.values() for name in found if name.partition("[")[0] in said)
    versions = [minor(version) for version in by_version]
    rows = [["", *versions]]
    reasons: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: list(said).index(name.partition("[")[0])):
        plain, _, parameters = name.partition("[")
        feature = said[plain] + (f" [{parameters}" if parameters else "")
        cells = [Outcome(*found.get(name, ("-",))) for found in by_version.values()]
        if any(cell.word != "yes" for cell in cells):
            rows.append([feature.replace("|", "\\|"), *(cell.word for cell in cells)])
        for version, cell in zip(versions, cells, strict=True):
            if cell.reason:
                reasons.setdefault(cell.reason, []).append(version)
    passed = f"{len(names) - len(rows) + 1} of {counted(len(names), 'test')} passed on all of {', '.join(versions)}."
    because = [f"- {', '.join(dict.fromkeys(of))}: {why}" for why, of in reasons.items()]
    return "\n".join([passed, *(["", markdown(rows)] if rows[1:] else []), *([""] if because else []), *because])


def holders_table(by_version: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sums of the scenarios about holders, a row for each version."""
    rows = [["", "scenarios", "passed", *HEAD[4:6], "moves: half within", "slowest move"]]
    for version, found in by_version.items():
        words = [word for word, *_ in found["outcomes"].values() if word != "no"]
        seconds = [float(one) for row in found["holders"] for one in row[5].split() if one != "-"]
        times = [f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"] if seconds else ["", ""]
        sums = [str(sum(int(row[place]) for row in found["holders"])) for place in (3, 4)]
        rows.append([minor(version), str(len(words)), str(words.count("yes")), *sums, *times])
    return markdown(rows)


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return version.rpartition(".")[0]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def page(reports: Mapping[str, Path]) -> str:
    """Return PAGE of pytest's reports by version."""
    record: dict[str, dict[str, dict[str, Any]]] = {}
    for version, report in reports.items():
        for part in filter(Path.exists, (report, report.with_name(f"vm-{report.name}"))):
            ran, day = outcomes(part), dt.datetime.fromtimestamp(part.stat().st_mtime, dt.UTC).date().isoformat()
            for module in TITLES.keys() & ran.keys():
                holders = holder_rows(part) if module == HOLDERS else []
                record.setdefault(version, {})[module] = {"date": day, "outcomes": ran[module], "holders": holders}
    parts = [INTRODUCTION.format(containerd=build.CONTAINERD_VERSION, default=minor(build.DEFAULT_VERSION))]
    dates = [[version, *sorted({module["date"] for module in record[version].values()})] for version in record]
    parts += [markdown([["Kubernetes", "run on"], *([version, " to ".join(days)] for version, *days in dates)])]
    for module, title in TITLES.items():
        found = {version: record[version][module] for version in record if module in record[version]}
        parts += [f"\n## {title}\n"]
        if module == HOLDERS:
            parts += [SCENARIOS_OF_HOLDERS, holders_table(found)]
        else:
            said = features(SCENARIOS.get(module, HERE / f"{module}.py"))
            parts += [table({version: one["outcomes"] for version, one in found.items()}, said)]
    return "\n".join(parts) + "\n"


def machine_part(page_now: str, reports: Mapping[str, Path]) -> str:
    """Return PAGE as it is now, with another part about the machine: of its reports by version. Tests that none has are
    named as not run.
    """
    said = features(SCENARIOS[MACHINE])
    by_version = {version: outcomes(report).get(MACHINE, {}) for version, report in reports.items()}
    ran = {name.partition("[")[0] for found in by_version.values() for name in found}
    missing = {name: Outcome("-") for name in said if name not in ran}
    days = {dt.datetime.fromtimestamp(one.stat().st_mtime, dt.UTC).date().isoformat() for one in reports.values()}
    head = page_now.partition(f"\n## {TITLES[MACHINE]}\n")[0]
    shown = table({version: {**found, **missing} for version, found in by_version.items()}, said)
    return f"{head}\n## {TITLES[MACHINE]}\n\nRun on {', '.join(sorted(days))}. {shown}\n"


def run(version: str, tests: Sequence[str], report: Path) -> None:
    """Run the tests on nodes of one version."""
    environment = {**os.environ, "KUBERNETES_VERSION": version}
    subprocess.run([sys.executable, "-m", "tests.cluster.build", version], check=True, env=environment)
    isolated = f"{NODES}*popen//python={sys.executable} -m tests.cluster.isolate {sys.executable}"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*pytest, "--tx", isolated, "--dist", "worksteal", *tests], check=False, env=environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all versions and print what did not pass; 1 if a test failed anywhere or a version gave no report."""
    parser = argparse.ArgumentParser(prog="tests.cluster.matrix", description=__doc__)
    parser.add_argument("--version", action="append", help="one of these instead of all (may be given again)")
    parser.add_argument("--reports", type=Path, help="keep pytest's reports here, and use those that are there")
    parser.add_argument("--record", action="store_true", help=f"make {PAGE.name} of the reports")
    parser.add_argument(
        "--machine", type=Path, metavar="DIRECTORY", help="take the machine's part from its reports here"
    )
    parser.add_argument("modules", nargs="*", help="what to run: module names (all)")
    options = parser.parse_args(argv)
    if options.machine:
        found = {one.stem.removeprefix("vm-"): one for one in sorted(options.machine.glob("vm-*.xml"))}
        PAGE.write_text(machine_part(PAGE.read_text(), found))
        return 0
    whole = True
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.reports or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        reports: dict[str, Path] = {}
        for version in options.version or VERSIONS:
            report = directory / f"{version}.xml"
            if not report.exists():
                print(f"--- Kubernetes {version}", flush=True)
                run(version, [str(HERE / f"{module}.py") for module in options.modules or TESTS], report)
            tests = outcomes(report) if report.exists() else {}
            if tests:
                reports[version] = report
            failed = [
                f"{version}: {name}: {outcome.reason}"
                for module in tests.values()
                for name, outcome in module.items()
                if outcome.word == "FAILED"
            ]
            print(*failed, sep="\n")
            whole = whole and bool(tests) and not failed
        if options.record:
            PAGE.write_text(page(reports))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
