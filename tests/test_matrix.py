"""The table of what works on which Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cluster.test_dra" name="test_a" time="1"/>
<testcase classname="tests.cluster.test_dra" name="test_b"><skipped message="came with 1.33"/></testcase>
<testcase classname="tests.cluster.test_dra" name="test_c[x]"><failure message="boom&#10;more">x</failure></testcase>
<testcase classname="tests.cluster.test_dra" name="test_d"/>
<testcase classname="tests.cluster.test_witnesses_real" name="test_e"><properties>
<property name="holders" value='["e", "4", "4", "0", "0", "1.2"]'/></properties></testcase>
<testcase classname="tests.cluster.test_dra.TestOnRealNode" name="test_d"><error message="late">trace</error></testcase>
</testsuite></testsuites>"""


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that passed is a yes, one that was skipped a no with its reason, and any failure fails the whole."""
    (tmp_path / "1.32.2.xml").write_text(REPORT)
    table = tmp_path / "table.md"
    assert matrix.main(["--reports", str(tmp_path), "--version", "1.32.2", "--table", str(table)]) == 1
    rows = dict(
        line.strip("| ").split(" | ")
        for line in table.read_text().partition("\n\n")[0].splitlines()
        if line.startswith("| ")
    )
    words = {name.strip(): word.strip() for name, word in rows.items()}
    assert {name: words[name] for name in ("test_a", "test_b", "test_c [x]", "test_d")} == {
        "test_a": "yes",
        "test_b": "no",
        "test_c [x]": "FAILED",
        "test_d": "FAILED",
    }
    said = capsys.readouterr().out
    assert "- test_b, 1.32.2: no: came with 1.33" in said
    assert "boom" in said
    assert "more" not in said
    assert (
        "| e        | 1.32.2     | 4              | 4             | 0        | 0               | 1.2              |"
        in said
    )


def test_holders_are_read_from_a_report_of_pytest(tmp_path: Path) -> None:
    """A report that pytest writes with this project's settings has what a scenario recorded about holders."""
    test, report = tmp_path / "test_one.py", tmp_path / "report.xml"
    test.write_text("""def test_one(record_property): record_property("holders", '["e", "4"]')""")
    settings = matrix.HERE.parents[1] / "setup.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(settings)]
    subprocess.run([*command, f"--rootdir={tmp_path}", f"--junitxml={report}", str(test)], check=True)
    assert matrix.holder_rows("1.32.2", report) == [["e", "1.32.2", "4"]]


def test_features_are_docstrings() -> None:
    """A feature is named by the first line of its test's docstring."""
    said = matrix.features([matrix.HERE / "test_dra.py"])
    assert said["test_dra", "test_selectors"].startswith("Claims select on attributes")
