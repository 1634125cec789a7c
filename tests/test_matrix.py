"""The support matrix: the page that is generated from the reports of test runs."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import matrix

REPORT = """<testsuites><testsuite timestamp="2026-11-27T01:02:03.4+00:00">
<testcase classname="tests.cluster.test_dra" name="test_selectors" time="1"/>
<testcase classname="tests.cluster.test_dra" name="test_no_execute"><skipped message="came with 1.33"/></testcase>
<testcase classname="tests.cluster.test_dra" name="test_conditions[x]"><failure message="boom&#10;more">x</failure>
</testcase>
<testcase classname="tests.cluster.test_dra" name="test_parameters"/>
<testcase classname="tests.cluster.test_dra" name="test_of_long_ago"/>
<testcase classname="tests.cluster.test_witnesses_real" name="test_etcd_is_restored"><properties>
<property name="holders" value='["e", "4", "4", "0", "0", "1.2 4.0 0.7"]'/></properties></testcase>
<testcase classname="tests.cluster.test_witnesses_real" name="test_cdi_directory_is_wiped"><properties>
<property name="holders" value='["f", "4", "5", "1", "0", "-"]'/></properties><failure message="overlap"/></testcase>
<testcase classname="tests.cluster.test_witnesses_real" name="test_aliases_of_a_node">
<skipped message="CLUSTER_LONG is not set"/></testcase>
<testcase classname="tests.cluster.test_dra.TestOnRealNode" name="test_parameters"><error message="late"/></testcase>
<testcase classname="" name="pytest"><error message="interrupted"/></testcase>
</testsuite></testsuites>"""
ONE = """<testsuite timestamp="{day}T01:02:03"><testcase classname="tests.{module}" name="{test}"/></testsuite>"""


class Kept:
    """A directory of reports, and the record and page that are made of them."""

    def __init__(self, directory: Path) -> None:
        self.reports, self.page, self.record = directory / "reports", directory / "page.md", directory / "record.json"
        self.reports.mkdir()

    def merge(self, name: str, report: str) -> str:
        """Record one report; return the page."""
        file = self.reports / name
        file.write_text(report)
        assert matrix.main(["--merge", str(self.reports)]) == 0
        file.unlink()
        return self.page.read_text()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """An empty directory of reports, in place of the recorded results and of the page of the repository."""
    kept = Kept(tmp_path)
    monkeypatch.setattr(matrix, "PAGE", kept.page)
    monkeypatch.setattr(matrix, "RECORD", kept.record)
    return kept


def rows(page: str) -> dict[str, list[str]]:
    """Return the rows of a page's tables: the further cells by the first cell."""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if "|" in line)
    return {first: others for first, *others in cells}


def test_a_run_is_recorded(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The page counts passed tests; a skipped test is a "no" with its reason, a test with a failed case is FAILED."""
    asked: list[tuple[str, Sequence[str]]] = []

    def run(version: str, tests: Sequence[str], nodes: int, report: Path) -> None:
        asked.append((version, tests))
        report.write_text(REPORT)

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main(["--version", "1.32.2", "--record", "test_dra::test_selectors", matrix.HOLDERS]) == 1
    page = kept.page.read_text()
    found, said = rows(page), matrix.features("test_dra")
    here = str(matrix.HERE)
    assert asked == [("1.32.2", [f"{here}/test_dra.py::test_selectors", f"{here}/{matrix.HOLDERS}.py"])]
    assert f"1 of {len(said)} tests passed on all of 1.32." in page
    assert said["test_selectors"] not in found
    assert found[said["test_no_execute"]] == ["no"]
    assert found[said["test_conditions"] + " [x]"] == ["FAILED"]
    assert found[said["test_parameters"]] == ["FAILED"]
    assert found[matrix.TITLES["test_dra"]] == ["1.32.2 on 2026-11-27: 4"]
    assert "test_of_long_ago" not in page
    assert "- 1.32: came with 1.33" in page
    assert found["1.32"] == ["2", "1", "1", "0", "1.2 s", "4.0 s"]
    printed = capsys.readouterr().out
    assert "1.32.2: test_conditions[x]: boom\n" in printed
    assert "1.32.2: test_cdi_directory_is_wiped: overlap\n" in printed
    assert "1.32.2: pytest: interrupted\n" in printed


def test_a_test_that_was_not_run(kept: Kept) -> None:
    """The page has a dash where a test was not run on a version of Kubernetes."""
    kept.merge("1.32.2.xml", REPORT)
    page = kept.merge("1.37.2.xml", ONE.format(day="2026-11-28", module="cluster.test_dra", test="test_steady_state"))
    said = matrix.features("test_dra")
    assert rows(page)[said["test_selectors"]] == ["yes", "-"]
    assert rows(page)[said["test_steady_state"]] == ["-", "yes"]
    assert rows(page)[said["test_a_late_prepare"]] == ["-", "-"]


def test_a_part_of_a_run_is_merged(kept: Kept) -> None:
    """A test that runs again gets the new day and version; other tests and other versions keep their results."""
    kept.merge("1.37.1.xml", REPORT)
    kept.merge("1.36.3.xml", REPORT)
    anew = ONE.format(day="2026-11-28", module="cluster.test_dra", test="test_conditions[y]")
    page = kept.merge("claims-1.37.2.xml", anew)
    found, said = rows(page), matrix.features("test_dra")
    assert found[said["test_no_execute"]] == ["no", "no"]
    assert found[said["test_conditions"] + " [x]"] == ["FAILED", "-"]
    assert found[said["test_conditions"] + " [y]"] == ["-", "yes"]
    assert found[matrix.TITLES["test_dra"]][1] == "1.37.1 on 2026-11-27: 3; 1.37.2 on 2026-11-28: 1"
    assert found["1.37"] == found["1.36"] == ["2", "1", "1", "0", "1.2 s", "4.0 s"]


def test_the_machine_has_a_report_of_its_own(kept: Kept) -> None:
    """The page has the results of the virtual machine beside those of the nodes of the same version."""
    kept.merge("1.32.2.xml", REPORT)
    machine = ONE.format(day="2026-11-27", module="vm.test_unit", test="test_reboot")
    page, said = kept.merge("vm-1.32.2.xml", machine), matrix.features(matrix.MACHINE)
    assert f"## {matrix.TITLES[matrix.MACHINE]}\n\n1 of {len(said)} tests passed on all of 1.32." in page
    assert rows(page)[said["test_token"]] == ["-"]
    assert f"## {matrix.TITLES['test_dra']}\n" in page


def test_the_page_is_that_of_the_record() -> None:
    """docs/support-matrix.md is generated from the recorded results."""
    assert matrix.PAGE.read_text() == matrix.page(matrix.merged(matrix.read(), [])), (
        "run: python -m tests.cluster.matrix --merge /var/empty"
    )


def test_a_version_without_a_report_fails_the_whole(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose node did not start is not on the page, and the exit status is 1."""
    monkeypatch.setattr(matrix, "run", lambda *arguments: None)
    assert matrix.main(["--version", "1.32.2", "--record"]) == 1
    assert "1.32" not in kept.page.read_text()


def test_holders_are_read_from_a_report_of_pytest(tmp_path: Path) -> None:
    """pytest's report has the day of the run, and the counts of devices' holders that a test records as a property."""
    test, report = tmp_path / "test_one.py", tmp_path / "report.xml"
    test.write_text("""def test_one(record_property): record_property("holders", '["e", "4"]')""")
    settings = matrix.HERE.parents[1] / "setup.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    subprocess.run([*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(test)], check=True)
    seen = matrix.outcomes("1.37.2", report)["test_one"]["test_one"]
    assert (seen.word, seen.version, seen.holders) == ("yes", "1.37.2", ["4"])
    assert dt.date.fromisoformat(seen.date)
