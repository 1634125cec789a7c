"""The JSON schema and the code accept the same configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from deviceplugin import config
from tests.config.files import KEYS, WHOLE, WORD, problems

ROOT = Path(__file__).parent.parent.parent

_BEYOND = (
    "is there already, on line",
    "is mounted at",
    "are the same to driver",
    "has at most 64 bytes",
    "at the most, not",
    "must be at least 0 and fit into 64 bits",
    "would be every",
    "a resource has one nvidia entry",
    "is in another group, too",
    "or shared, not both",
    "would be offered to nobody",
    "all parts are optional",
)
"""Messages of problems that only the code finds; the schema accepts such files."""


def test_schema_file_is_that_of_the_code() -> None:
    """api/config.schema.json is what `deviceplugin schema` prints."""
    file = ROOT / "api" / "config.schema.json"
    assert json.loads(file.read_text()) == config.schema(), "run: deviceplugin schema > api/config.schema.json"


def test_schema_is_the_same_without_docstrings() -> None:
    """The image runs `python -OO`, which removes docstrings and not the descriptions in the schema."""
    command = [sys.executable, "-OO", "-m", "deviceplugin", "schema"]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert json.loads(printed.stdout) == config.schema()


def test_schema_is_a_schema() -> None:
    """The schema is a valid JSON schema of draft 2020-12, and every key in it is described."""
    schema = config.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        assert definition["description"]
        for name, field in definition["properties"].items():
            reference = schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
            assert field.get("description") or reference.get("description"), (definition["title"], name)


_VALIDATOR = jsonschema.Draft202012Validator(config.schema())


def agree(data: Any) -> bool:
    """Check that schema and code agree on this config; return whether the schema accepts it."""
    text = json.dumps(data, ensure_ascii=False)
    by_schema = [error.message for error in _VALIDATOR.iter_errors(data)]
    by_code = problems(text)
    if by_schema:
        assert by_code, (data, by_schema)
    else:
        beyond = [any(words in problem.message for words in _BEYOND) for problem in by_code]
        assert all(beyond), (data, by_code)
    return not by_schema


_ODD: st.SearchStrategy[Any] = (
    st.sampled_from([None, True, False, 0, -1, 3, 1.5, "", "x", "/dev/x", "/dev/..", [], {}, ["x"], 2**64]) | WORD
)

_PATH = st.from_regex(r"\A(/[-a-z?]{1,3}){1,3}\Z", fullmatch=True) | st.sampled_from(["/dev/tty[0-9]*", "/a.b/..c"])

_NAME = st.from_regex(r"[a-z]{1,3}(\.[a-z]{1,3})?/[a-zA-Z0-9]{1,4}", fullmatch=True)

_IDENTIFIER = st.from_regex(r"([a-z]{1,3}/)?[a-zA-Z_][a-zA-Z_0-9]{0,3}", fullmatch=True)

_ENTRY = st.one_of(
    st.fixed_dictionaries({"path": _PATH}),
    st.fixed_dictionaries({"group": st.lists(_PATH, min_size=2, max_size=3, unique=True)}),
    st.fixed_dictionaries(
        {
            "simulated": st.fixed_dictionaries(
                {"count": st.integers(1, 9)}, optional={"numa": st.integers(1, 3), "unhealthy_file": _PATH}
            )
        }
    ),
)

_RESOURCE = st.fixed_dictionaries(
    {"name": _NAME, "devices": st.lists(_ENTRY, min_size=1, max_size=3), "driver": st.just("a.b")},
    optional={
        "permissions": st.sampled_from(["r", "wr", "rwm"]),
        "nodes": st.lists(_PATH.filter(lambda path: "[" not in path), max_size=2),
        "env": st.dictionaries(_IDENTIFIER.filter(lambda name: "/" not in name), WORD, max_size=2),
        "mounts": st.lists(
            st.fixed_dictionaries({"host": _PATH, "container": _PATH}, optional={"readonly": st.booleans()}), max_size=2
        ),
        "annotations": st.dictionaries(_NAME, WORD, max_size=2),
        "cdi": st.lists(st.just("a.b/c=d"), max_size=2),
        "sharing": st.fixed_dictionaries({}, optional={"replicas": st.integers(1, 3)}),
        "topology": st.booleans(),
        "attributes": st.dictionaries(
            _IDENTIFIER,
            st.booleans() | st.integers(-9, 9) | WORD | st.fixed_dictionaries({"version": st.just("1.2.3-rc.1")}),
            max_size=3,
        ),
        "capacity": st.dictionaries(
            _IDENTIFIER, st.integers(0, 9) | st.sampled_from(["16Gi", "1e30", "500m"]), max_size=3
        ),
        "dra": st.fixed_dictionaries(
            {}, optional={"share": st.sampled_from(["none", "50%", 3]), "drain": st.just("wait")}
        ),
    },
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every container in a structure with every key or index in it."""
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    return [place for key, value in items for place in ((data, key), *places(value))]


@given(st.fixed_dictionaries({"resources": st.lists(_RESOURCE, min_size=1, max_size=2)}), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_schema_and_code_agree(data: Any, draw: st.DataObject) -> None:
    """An editor that checks by the schema accepts and refuses the same files as the agent does."""
    change = draw.draw(st.sampled_from(["nothing", "replace", "replace", "remove", "add"]))
    place, key = draw.draw(st.sampled_from(places(data)))
    if change == "replace":
        place[key] = draw.draw(_ODD)
    elif change == "remove":
        del place[key]
    elif change == "add" and isinstance(place, dict):
        place[draw.draw(KEYS | WORD)] = draw.draw(_ODD)
    text = json.dumps(data, ensure_ascii=False)
    # Characters that no YAML file may contain, and line ends, where Python's $ is not ECMAScript's.
    assume(text.isprintable() and "\\n" not in text)
    event(f"{change}: {'accepted' if agree(data) else 'refused'}")


def test_schema_and_code_agree_on_the_samples() -> None:
    """The schema accepts and refuses the sample configs of these tests as the code does."""
    agree(yaml.safe_load(WHOLE))
    for replicas in ({"a100": 4}, {"": 4}, {"a": 0}, {}):
        agree({"resources": [{"name": "a/b", "devices": [{"path": "/dev/x"}], "sharing": {"replicas": replicas}}]})
    entries: tuple[dict[str, Any], ...] = (
        {"nvidia": {}},
        {"pci": {"vendor": "8086"}},
        {"pci": {}},
        {"usb": {"vendor": "x"}},
        {"usb": [{"vendor": "1a6e"}, {"vendor": "18d1"}]},
        {"usb": [{"vendor": "1a6e"}]},
        {"usb": [{"vendor": "1a6e"}, {}]},
        {"path": "/dev/x", "container": "/dev/y"},
        {"path": "/dev/x", "container": "y"},
        {"container": "/dev/y"},
        {"pci": {"vendor": "8086"}, "container": "/dev/y"},
        {"group": ["/dev/x", {"path": "/dev/y", "optional": True, "container": "/dev/z"}]},
        {"group": [{"path": "/dev/x", "optional": True}, {"path": "/dev/y", "optional": True}]},
        {"group": ["/dev/x", {"optional": True}]},
        {"nvidia": {"mig": "x"}},
    )
    for entry in entries:
        agree({"resources": [{"name": "a/b", "devices": [entry]}]})
