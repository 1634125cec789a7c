"""The table of what works on which Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cluster.test_dra" name="test_a" time="1"/>
<testcase classname="tests.cluster.test_dra" name="test_b"><skipped message="came with 1.33"/></testcase>
<testcase classname="tests.cluster.test_dra" name="test_c[x]"><failure message="boom&#10;more">x</failure></testcase>
<testcase classname="tests.cluster.test_dra" name="test_d"/>
<testcase classname="tests.cluster.test_dra.TestOnRealNode" name="test_d"><error message="late">trace</error></testcase>
</testsuite></testsuites>"""


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that passed is a yes, one that was skipped a no with its reason, and any failure fails the whole."""
    (tmp_path / "1.32.2.xml").write_text(REPORT)
    table = tmp_path / "table.md"
    assert matrix.main(["--reports", str(tmp_path), "--version", "1.32.2", "--table", str(table)]) == 1
    rows = dict(line.strip("| ").split(" | ") for line in table.read_text().splitlines() if line.startswith("| "))
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


def test_features_are_docstrings() -> None:
    """A feature is named by the first line of its test's docstring."""
    said = matrix.features([matrix.HERE / "test_dra.py"])
    assert said["test_dra", "test_selectors"].startswith("Claims select on attributes")
