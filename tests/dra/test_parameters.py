"""Expressions that check opaque parameters; tests/cluster/test_parameters_real.py has an API server evaluate them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml

from dra_bridge import cli
from dra_bridge.parameters import TAKES_NONE, expression
from tests.test_chart import by_name, helm_is_there, rendered

TOYS = Path(__file__).parents[2] / "examples" / "own-plugin" / "toys.py"
SOURCES = """\
import msgspec
from deviceplugin import Device, DeviceSource
from dra_bridge import run

class Fast(msgspec.Struct):
    speed: int = 1

class Careful(msgspec.Struct):
    margin: int = 1

class Plain(DeviceSource):
    resource, driver = "example.com/plain", "plain.example.com"
    async def watch(self):
        yield []

class Runner(Plain):
    resource, driver, config_type = "example.com/runner", "mixed.example.com", Fast

class Walker(Plain):
    resource, driver, config_type = "example.com/walker", "mixed.example.com", Careful

class Parent(Plain):
    resource, driver, config_type = "example.com/parent", "later.example.com", Fast
    async def child_sources(self):
        yield []

run(Plain(), Runner(), Walker(), Parent())
"""


def checks(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the values that `manifests --check-parameters=values` prints for an author's file, by driver."""
    assert cli.main(["manifests", "--source", str(file), "--command", "x", "--check-parameters=values"]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out)["checkParameters"])


def test_each_driver_by_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parameters of a driver are those of all its sources; with unknown child sources, all parameters pass."""
    file = tmp_path / "agent.py"
    file.write_text(SOURCES)
    found = checks(file, capsys)
    assert found.keys() == {"plain.example.com", "mixed.example.com"}
    assert found["plain.example.com"] == f'"{TAKES_NONE}"'
    assert all(name in found["mixed.example.com"] for name in ('"speed"', '"margin"', 'exists(t, t == "")'))


@helm_is_there
def test_the_chart_has_the_same_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """With the values that `manifests` prints, the Helm chart makes the same policy as `manifests`."""
    values = yaml.safe_load((TOYS.parent / "values.yaml").read_text())
    found = by_name(rendered({**values, "checkParameters": checks(TOYS, capsys)}))
    command = " ".join(values["command"])
    assert cli.main(["manifests", "--source", str(TOYS), "--command", command, "--check-parameters"]) == 0
    wanted = by_name(yaml.safe_load_all(capsys.readouterr().out))
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        assert found[kind, "dra-bridge-parameters"] == wanted[kind, "dra-bridge-parameters"]


class Growing(enum.Enum):
    ONE = "one"

    @classmethod
    def _missing_(cls, value: object) -> Growing:
        return cls.ONE


class Nested(msgspec.Struct):
    inner: Nested | None = None


class Rows(msgspec.Struct, array_like=True):
    first: int = 0


class Left(msgspec.Struct, tag=True):
    left: int = 0


class Right(msgspec.Struct, tag=True):
    right: int = 0


@pytest.mark.parametrize(
    "field",
    [Any, Growing, Rows, Left | Right, list[Any] | Any, Annotated[int, msgspec.Meta(multiple_of=2)] | Any],
    ids=str,
)
def test_what_only_the_driver_can_tell_passes(field: Any) -> None:
    """If the expression cannot judge a field's values, it only checks the field's name."""
    kind = msgspec.defstruct("Kind", [("field", field, None)])
    found = expression([kind])
    assert '"field" in' not in found
    assert 'k != "field"' in found


def test_a_type_within_itself_ends() -> None:
    """The expression for a type that contains itself is finite and shorter than 10,000 characters."""
    assert 0 < len(expression([Nested])) < 10_000


def test_values_are_quoted() -> None:
    """In the CEL expression, quotes and backslashes of a value are escaped: the value cannot end its string literal."""
    kind = msgspec.defstruct("Kind", [("field", Literal['a"b\\'], "")])
    assert 'p.parameters["field"] == "a\\"b\\\\"' in expression([kind])
