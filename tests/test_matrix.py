"""What works on which Kubernetes: the page that is made of a run's reports."""

from __future__ import annotations

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
    """A directory for reports and the page."""
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    return tmp_path


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's tables by the first one."""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if "|" in line)
    return {first: others for first, *others in cells}


def test_a_run_is_kept_and_makes_the_page(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that passed is counted, one that was skipped is a no with its reason, and any failure fails the whole."""
    (kept / "1.32.2.xml").write_text(REPORT)
    assert matrix.main(["--reports", str(kept), "--version", "1.32.2", "--record"]) == 1
    page = (kept / "page.md").read_text()
    found, said = rows(page), matrix.features(matrix.HERE / "test_dra.py")
    assert "1 of 4 tests passed on all of 1.32." in page
    assert said["test_selectors"] not in found
    assert found[said["test_no_execute"]] == ["no"]
    assert found[said["test_conditions"] + " [x]"] == ["FAILED"]
    assert found[said["test_parameters"]] == ["FAILED"]
    assert "test_of_long_ago" not in page
    assert "- 1.32: came with 1.33" in page
    assert found["1.32"] == ["2", "1", "1", "0", "1.2 s", "4.0 s"]
    printed = capsys.readouterr().out
    assert "1.32.2: test_conditions[x]: boom\n" in printed
    assert "1.32.2: test_f: overlap\n" in printed


def test_the_machine_has_a_report_of_its_own(kept: Path) -> None:
    """What ran in the virtual machine is in the page, beside what ran on nodes of that version."""
    (kept / "1.32.2.xml").write_text(REPORT)
    machine = """<testsuite><testcase classname="tests.vm.test_unit" name="test_reboot"/></testsuite>"""
    (kept / "vm-1.32.2.xml").write_text(machine)
    matrix.main(["--reports", str(kept), "--version", "1.32.2", "--record"])
    page = (kept / "page.md").read_text()
    assert f"## {matrix.TITLES[matrix.MACHINE]}\n\n1 of 1 test passed on all of 1.32." in page
    assert matrix.TITLES["test_dra"] in page


def test_the_part_about_the_machine_alone(kept: Path) -> None:
    """It is made anew of the machine's reports, names the tests that were not run, and leaves the rest of the page."""
    (kept / "page.md").write_text("# Page\n\nrest\n")
    machine = """<testsuite><testcase classname="tests.vm.test_unit" name="test_reboot"/></testsuite>"""
    (kept / "vm-1.36.3.xml").write_text(machine)
    for _ in range(2):
        assert matrix.main(["--machine", str(kept)]) == 0
        page, said = (kept / "page.md").read_text(), matrix.features(matrix.SCENARIOS[matrix.MACHINE])
        assert page.startswith(f"# Page\n\nrest\n\n## {matrix.TITLES[matrix.MACHINE]}\n")
        assert page.count("## ") == 1
        assert f"1 of {len(said)} tests passed on all of 1.36." in page
        assert rows(page)[said["test_token"]] == ["-"]
        assert said["test_reboot"] not in rows(page)


def test_a_test_that_a_version_does_not_have(kept: Path) -> None:
    """It has a dash in the column of that version."""
    (kept / "1.32.2.xml").write_text(REPORT)
    other = """<testsuite><testcase classname="tests.cluster.test_dra" name="test_reload"/></testsuite>"""
    (kept / "1.37.1.xml").write_text(other)
    matrix.main(["--reports", str(kept), "--version", "1.32.2", "--version", "1.37.1", "--record"])
    said = matrix.features(matrix.HERE / "test_dra.py")
    assert rows((kept / "page.md").read_text())[said["test_selectors"]] == ["yes", "-"]


def test_a_version_without_a_report_fails_the_whole(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that did not start is in no column."""
    monkeypatch.setattr(matrix, "run", lambda *arguments: None)
    assert matrix.main(["--version", "1.32.2", "--record"]) == 1
    assert "1.32" not in (kept / "page.md").read_text()


def test_holders_are_read_from_a_report_of_pytest(tmp_path: Path) -> None:
    """A report that pytest writes with this project's settings has what a scenario recorded about holders."""
    test, report = tmp_path / "test_one.py", tmp_path / "report.xml"
    test.write_text("""def test_one(record_property): record_property("holders", '["e", "4"]')""")
    settings = matrix.HERE.parents[1] / "setup.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    subprocess.run([*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(test)], check=True)
    assert matrix.holder_rows(report) == [["e", "4"]]
