"""Config files on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deviceplugin import config
from deviceplugin.config import ConfigError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("missing.yaml", "cannot be read: No such file or directory"),
        (".", "is a directory; name the file in it"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("/dev/zero", "is larger than 4 MiB"),
        ("x" * 300, "cannot be read: File name too long"),
        ("/proc/self/mem", "cannot be read"),
    ],
)
def test_file_that_cannot_be_read_is_said(tmp_path: Path, name: str, advice: str) -> None:
    """A missing file, or a directory, is a ConfigError."""
    with pytest.raises(ConfigError, match=re.escape(advice)) as caught:
        config.load(tmp_path / name if name != "." else tmp_path)
    assert (caught.value.line, caught.value.path) == (0, "$")


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_examples_can_be_used(file: Path) -> None:
    """Every example with resources in it is a config file without a problem."""
    if "\nresources:" in file.read_text():
        assert config.load(file).resources
