"""Reading a file that is too large, too deep or random gives a config or an error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deviceplugin import config
from deviceplugin.config import ConfigError, parse
from tests.config.files import KEYS, WHOLE, bombs, problems, refused


def test_billion_laughs_end_early() -> None:
    """Aliases that multiply into more values than any config has are refused, not followed."""
    levels = ["a0: &a0 {path: /dev/x}"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    nested = "\n".join(levels) + "\nresources:\n- &r {name: a/b, devices: [" + "path: /dev/x, " * 1000 + "]}\n"
    assert "unknown key" in str(refused(nested))  # the aliases below an unknown key are not followed
    wide = "resources:\n- &r {name: a/b, devices: &d [" + "{path: /dev/x}, " * 1000 + "]}\n" + "- *r\n" * 1000
    assert "once its aliases are followed" in str(refused(wide))
    merged = "x: &m0 {a: b}\n" + "".join(
        f"x{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
    )
    assert "once its aliases are followed" in str(refused(f"{merged}<<: *m8\n"))


@pytest.mark.parametrize("name", bombs())
def test_hostile_file_is_refused_in_bounded_time_and_memory(name: str, tmp_path: Path) -> None:
    """Any file up to 4 MiB is read within 5 s of processor time and 64 MB; the next good file is read."""
    text, advice = bombs()[name]
    file, good = tmp_path / "bomb.yaml", tmp_path / "good.yaml"
    file.write_text(text)
    good.write_text(WHOLE)
    assert file.stat().st_size <= config.MAX_BYTES
    code = f"""
import resource
from deviceplugin import config
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
good = config.load({str(good)!r})
before = peak()
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
try:
    config.load({str(file)!r})
except config.ConfigError as error:
    print(error)
assert peak() - before <= 64e6, peak() - before
assert config.load({str(good)!r}) == good
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert advice in done.stdout


@pytest.mark.parametrize(
    "text",
    ['"a\\e[31m\\u202eb": 1', 'metrics: {"a\\r\\nb": 1}', "resources: !<!%1b[31m> [1]", "metrics: !%1b%0a%07 {}"],
)
def test_control_characters_are_shown_escaped(text: str) -> None:
    """Control characters of a config file are escaped in errors: they cannot move the cursor or start a line."""
    error = refused(text)
    assert error.problems
    assert all(line.isprintable() for line in str(error).split("\n")), str(error)
    assert str(error).count("\n") == len(error.problems) - 1


def test_a_text_that_ends_in_an_open_quote_is_refused() -> None:
    """An open quote at the end is an error, also if the parser finds it behind the last line."""
    assert "found unexpected end of stream" in str(refused('"\n'))


@pytest.mark.parametrize("text", ["driver: rw\u00a0", "- \u2003a", "resources: a\u00a0"])
def test_a_text_that_ends_in_a_no_break_space_is_refused(text: str) -> None:
    """A value with a space at its end that YAML keeps, and `str.strip` removes, is an error, not an endless search."""
    assert problems(text)


def test_endless_problems_are_cut_short() -> None:
    """The text of an error with many problems is cut, and has the number of problems left out."""
    error = refused("resources: [" + "{}, " * 40 + "]")
    assert len(error.problems) == 80
    assert str(error).splitlines()[-1] == "my.yaml: and 55 more"
    error = refused("resources: [" + "{}, " * 400 + "]")
    assert len(error.problems) == 100
    assert str(error).splitlines()[-1] == "my.yaml: and at least 75 more"


def test_long_values_are_cut_short() -> None:
    """A value of a megabyte does not become an error of a megabyte."""
    assert len(str(refused(f"resources: [{{name: {'x' * 1_000_000}, devices: [path: /dev/x]}}]"))) < 2000


_TEXT = st.text(st.sampled_from("resourcenamdvip/*.:-[]{}&*<'\"#!|>%@\n\t 01~,?\\\0é\u2028\ud800")) | st.text()


@given(_TEXT)
@example("!")
@example("? a\n: b\n? a\n: c")
@example("resources: !x [")
def test_any_text_is_a_config_or_an_error(text: str) -> None:
    """Any text gives a config or a ConfigError, and no other exception."""
    with contextlib.suppress(ConfigError):
        parse(text)


@given(st.binary())
def test_any_bytes_are_a_config_or_an_error(data: bytes) -> None:
    """Any bytes give a config or a ConfigError, and no other exception."""
    with contextlib.suppress(ConfigError):
        parse(data)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()

_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)

_NEARLY = st.recursive(
    _SCALARS | st.sampled_from(["example.com/a", "/dev/x", "rw"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)


@given(_JSON | _NEARLY | st.fixed_dictionaries({"resources": st.lists(_NEARLY, max_size=3)}))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_structure_is_a_config_or_an_error(data: Any) -> None:
    """A structure of any shape, dumped as YAML, gives a config or a ConfigError whose problems all have a place."""
    try:
        text = yaml.safe_dump(data, allow_unicode=True)
    except UnicodeEncodeError:
        return
    assert all(problem.path.startswith("$") and problem.message for problem in problems(text))


def test_parser_without_libyaml_says_the_same() -> None:
    """Without libyaml the Python parser of PyYAML gives the same configs and errors."""
    samples = [
        WHOLE,
        "",
        "a: \x07",
        "resources: [}",
        "[" * 1000,
        "a: &a [*a]",
        "resources: 1",
        "\ta",
        "a: 1\n---\nb: 1",
    ]
    code = f"""
import yaml
del yaml.CSafeLoader
from deviceplugin import config
from deviceplugin.config import document
assert document.Loader.__mro__[1] is yaml.SafeLoader
for sample in {samples!r}:
    try:
        print(config.parse(sample) == config.parse(sample.encode()))
    except config.ConfigError as error:
        print(error.line, error.path, len(error.problems))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    expected = [(found[0].line, found[0].path, len(found)) if (found := problems(text)) else True for text in samples]
    assert done.stdout.splitlines() == [
        " ".join(map(str, one)) if isinstance(one, tuple) else "True" for one in expected
    ]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("".join(f"user{n}:$6$hash{n}:19000:0:99999:7:::\n" for n in range(40)), 4),
        ("hash-of-a-token", 1),
    ],
)
def test_other_files_are_not_repeated(text: str, problems: int) -> None:
    """An error for /etc/shadow or a token in place of a config file shows no line of it, and only a few problems."""
    error = refused(text)
    assert len(error.problems) == problems
    assert "hash" not in str(error)
    if problems > 1:
        assert "unknown key (40 of them); there are resources, metrics" in str(error)
