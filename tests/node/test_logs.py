"""Log lines: text for people, JSON for programs."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.node import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def failure() -> logging.LogRecord:
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        return logging.makeLogRecord({"name": "x", "levelno": 40, "msg": "went wrong", "exc_info": sys.exc_info()})


def test_text_is_a_line_for_people() -> None:
    """A text line has the time, the level, the module without the package's name, the message and extra fields."""
    out = io.StringIO()
    logs.setup("text", "info", out)
    logging.getLogger("deviceplugin.kubelet.registration").info("%s is back", "kubelet.sock", extra={"resource": "a/b"})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
        r" INFO    kubelet.registration: a/b: kubelet.sock is back\n",
        out.getvalue(),
    )


def test_text_on_a_terminal_is_shorter() -> None:
    """On a terminal a text line has the time of day without the date."""
    out = Terminal()
    logs.setup("text", "info", out)
    logging.getLogger("other").warning("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING other: hello\n", out.getvalue())


def test_text_shows_the_traceback_below() -> None:
    """An exception's traceback follows the line."""
    first, second, *_, last = logs.TextFormatter().format(failure()).splitlines()
    assert first.endswith("x: went wrong")
    assert second == "Traceback (most recent call last):"
    assert last == "lines"


def test_json_is_an_object_a_line() -> None:
    """A JSON line begins with time, level, logger and message, and goes on with extra fields."""
    out = io.StringIO()
    logs.setup("json", "info", out)
    logging.getLogger("deviceplugin.node.agent").error("%d of\nthem", 3, extra={"resource": "a/b", "path": io})
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert list(said)[:4] == ["ts", "level", "logger", "msg"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["ts"])
    assert said["level"] == "error"
    assert said["logger"] == "deviceplugin.node.agent"
    assert said["msg"] == "3 of\nthem"
    assert said["resource"] == "a/b"
    assert "module 'io'" in said["path"]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"resource": "a/b", "device": "d0", "pod": "team/p"}, "a/b: device d0 is back pod=team/p"),
        ({"driver": "b.a", "resource": "a/b"}, "b.a: device d0 is back resource=a/b"),
        ({"device": "d0", "resource": "a/b"}, "device d0 is back resource=a/b"),
        ({}, "device d0 is back"),
    ],
)
def test_a_line_begins_with_what_it_is_about(extra: dict[str, str], text: str) -> None:
    """A text line begins with its first field if that is a resource or driver; fields in the message are left out."""
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "device d0 is back", **extra})
    assert logs.TextFormatter().format(record).partition(" n: ")[2] == text
    line = json.loads(logs.JsonFormatter().format(record))
    assert {name: line[name] for name in line.keys() - {"ts", "level", "logger"}} == {"msg": record.msg, **extra}


def test_json_carries_the_traceback() -> None:
    """An exception's traceback is in the object, and the object stays on one line."""
    line = logs.JsonFormatter().format(failure())
    assert "\n" not in line
    assert json.loads(line)["exc"].endswith("RuntimeError: two\nlines")


def test_extra_fields_do_not_hide_the_message() -> None:
    """Extra fields with a name of the format's own fields are dropped."""
    record = logging.makeLogRecord({"name": "x", "msg": "true", "levelname": "INFO", "level": "9", "ts": "never"})
    said = json.loads(logs.JsonFormatter().format(record))
    assert (said["level"], said["msg"], said["ts"] != "never") == ("info", "true", True)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.text(), st.dictionaries(st.text(min_size=1).map("f_{}".format), _VALUES, max_size=3))
def test_whatever_is_logged_is_one_line_of_json(message: str, extra: dict[str, object]) -> None:
    """Any message and any extra fields become one line that is JSON."""
    line = logs.JsonFormatter().format(
        logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": message, **extra})
    )
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail)["msg"] == message


def test_cycles_are_said_somehow() -> None:
    """An extra field that contains itself is written as [[...]]."""
    cycle: list[object] = []
    cycle.append(cycle)
    line = logs.JsonFormatter().format(logging.makeLogRecord({"name": "x", "msg": "m", "cycle": cycle}))
    assert json.loads(line)["cycle"] == "[[...]]"


class Untellable:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.parametrize("format_", ["text", "json"])
def test_a_librarys_mistake_does_not_cost_the_line(
    format_: Literal["text", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    """A log record with wrong arguments, or values on which `str` fails, is logged as its plain message."""
    out = io.StringIO()
    logs.setup(format_, "info", out)
    logging.getLogger("x").info("first %d", "x")
    logging.getLogger("x").info("second %s", Untellable())
    if format_ == "json":
        logging.getLogger("x").info("third", extra={"what": Untellable()})
        said = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [one["msg"] for one in said] == ["first %d", "second %s", "third"]
    assert len(out.getvalue().splitlines()) == (3 if format_ == "json" else 2)
    assert capsys.readouterr().err == ""


UNCAUGHT = """
import gc, threading
from deviceplugin.node import logs

class Cycle:
    def __del__(self):
        raise ValueError("in a finalizer")

logs.setup("json")
thread = threading.Thread(target=lambda: 1 / 0, name="author's")
thread.start()
thread.join()
cycle = Cycle()
del cycle
raise RuntimeError("at last")
"""


def test_what_nobody_catches_is_json_too() -> None:
    """Errors that end a thread, a finalizer or the process are JSON lines as well."""
    ended = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    said = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [one["exc"].splitlines()[-1] for one in said] == [
        "ZeroDivisionError: division by zero",
        "ValueError: in a finalizer",
        "RuntimeError: at last",
    ]
    assert said[0]["msg"] == "thread author's ended by an error"


def test_level_is_a_floor() -> None:
    """Lines below the level are not written; libraries log from warnings on."""
    out = io.StringIO()
    logs.setup("text", "debug", out)
    logging.getLogger("deviceplugin").debug("seen")
    logging.getLogger("watchdog.observers").debug("unseen")
    logs.setup("text", "error", out)
    logging.getLogger("deviceplugin").warning("unseen")
    assert "unseen" not in out.getvalue()
    assert "seen" in out.getvalue()


def test_setup_replaces_what_was_set_up() -> None:
    """After logging was set up twice, each line is written once."""
    out = io.StringIO()
    logs.setup("text", "info", out)
    logs.setup("json", "info", out)
    logging.getLogger("x").info("once")
    assert out.getvalue().count("once") == 1


def test_python_warnings_are_logged() -> None:
    """A Python warning is a log line as well."""
    out = io.StringIO()
    logs.setup("json", "info", out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old ways", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert json.loads(out.getvalue())["logger"] == "py.warnings"


@pytest.mark.parametrize(("format_", "level"), [("xml", "info"), ("text", "loud")])
def test_unknown_format_or_level_is_refused(format_: str, level: str) -> None:
    """An unknown format or level is an error that names the known ones."""
    with pytest.raises(ValueError, match="text or json, at debug, info, warning, error"):
        logs.setup(format_, level)  # type: ignore[arg-type]
