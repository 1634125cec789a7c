"""What works on which Kubernetes: what is kept of a run, and the page that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cluster.test_dra" name="test_selectors" time="1"/>
<testcase classname="tests.cluster.test_dra" name="test_no_execute"><skipped message="came with 1.33"/></testcase>
<testcase classname="tests.cluster.test_dra" name="test_conditions[x]"><failure message="boom&#10;more">x</failure>
</testcase>
<testcase classname="tests.cluster.test_dra" name="test_parameters"/>
<testcase classname="tests.cluster.test_dra" name="test_of_long_ago"/>
<testcase classname="tests.cluster.test_witnesses_real" name="test_e"><properties>
<property name="holders" value='["e", "4", "4", "0", "0", "1.2 4.0 0.7"]'/></properties></testcase>
<testcase classname="tests.cluster.test_witnesses_real" name="test_f"><properties>
<property name="holders" value='["f", "4", "5", "1", "0", "-"]'/></properties><failure message="overlap"/></testcase>
<testcase classname="tests.cluster.test_witnesses_real" name="test_g"><skipped message="CLUSTER_LONG is not set"/>
</testcase>
<testcase classname="tests.cluster.test_dra.TestOnRealNode" name="test_parameters"><error message="late"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of reports and what else matrix reads and writes."""
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "matrix.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    return tmp_path


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's tables by the first one."""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if "|" in line)
    return {first: others for first, *others in cells}


def test_a_run_is_kept_and_makes_the_page(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that passed is a yes, one that was skipped a no with its reason, and any failure fails the whole."""
    (kept / "1.32.2.xml").write_text(REPORT)
    assert matrix.main(["--reports", str(kept), "--version", "1.32.2", "--record"]) == 1
    page = (kept / "page.md").read_text()
    found, said = rows(page), matrix.features(matrix.HERE / "test_dra.py")
    assert found[said["test_selectors"]] == ["yes"]
    assert found[said["test_no_execute"]] == ["no"]
    assert found[said["test_conditions"] + " [x]"] == ["FAILED"]
    assert found[said["test_parameters"]] == ["FAILED"]
    assert "test_of_long_ago" not in page
    assert f"- 1.32: {said['test_no_execute']} came with 1.33" in page
    assert found["1.32"] == ["2", "1", "1", "0", "1.2 s", "4.0 s"]
    printed = capsys.readouterr().out
    assert "1.32.2: test_conditions[x]: boom\n" in printed
    assert "1.32.2: test_f: overlap\n" in printed


def test_a_run_replaces_what_was_kept_of_its_modules(kept: Path) -> None:
    """Other versions and modules stay; a version without the test has a dash."""
    (kept / "1.32.2.xml").write_text(REPORT)
    outcomes = {"date": "2026-01-01", "outcomes": {"test_reload": ["yes", ""]}, "holders": []}
    matrix.RECORD.write_text(json.dumps({"1.37.1": {"test_plugin_scenarios": outcomes, "test_dra": outcomes}}))
    matrix.main(["--reports", str(kept), "--version", "1.32.2", "--record"])
    said = matrix.features(matrix.HERE / "test_dra.py")
    assert rows((kept / "page.md").read_text())[said["test_selectors"]] == ["yes", "-"]
    again = """<testsuite><testcase classname="tests.cluster.test_dra" name="test_selectors"/></testsuite>"""
    (kept / "1.32.2.xml").write_text(again)
    assert matrix.main(["--reports", str(kept), "--version", "1.32.2", "--record"]) == 0
    record = json.loads(matrix.RECORD.read_text())
    assert record["1.32.2"]["test_dra"]["outcomes"] == {"test_selectors": ["yes", ""]}
    assert record["1.32.2"].keys() == {"test_dra", "test_witnesses_real"}
    assert record["1.37.1"].keys() == {"test_dra", "test_plugin_scenarios"}


def test_a_version_without_a_report_fails_the_whole(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that did not start leaves what was kept as it was."""
    monkeypatch.setattr(matrix, "run", lambda *arguments: None)
    assert matrix.main(["--version", "1.32.2", "--record"]) == 1
    assert json.loads((kept / "matrix.json").read_text()) == {}


def test_the_page_is_made_from_what_was_kept() -> None:
    """`python -m tests.cluster.matrix --page` changes nothing."""
    record = json.loads(matrix.RECORD.read_text())
    assert matrix.page(record) == matrix.PAGE.read_text()
    assert record.keys() <= set(matrix.VERSIONS)


def test_holders_are_read_from_a_report_of_pytest(tmp_path: Path) -> None:
    """A report that pytest writes with this project's settings has what a scenario recorded about holders."""
    test, report = tmp_path / "test_one.py", tmp_path / "report.xml"
    test.write_text("""def test_one(record_property): record_property("holders", '["e", "4"]')""")
    settings = matrix.HERE.parents[1] / "setup.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    subprocess.run([*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(test)], check=True)
    assert matrix.holder_rows(report) == [["e", "4"]]
