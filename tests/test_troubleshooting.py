"""docs/troubleshooting.md has every reason and Event of the code, and no message that the code does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dra_bridge.driver.claims import Reason
from tests.source import PRODUCT, ROOT, nodes, tree

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MODULES = [
    path for path in PRODUCT.values() if "testing" not in path.relative_to(ROOT).parts and path.name != "demo.py"
]


def code() -> str:
    """Return all strings of the code except docstrings, with single spaces."""
    return re.sub(r"\s+", " ", " ".join(" ".join(texts(tree(path))) for path in MODULES))


def texts(node: ast.AST) -> list[str]:
    docstrings = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Expr)}
    return [
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docstrings
    ]


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def calls(*names: str) -> Iterator[ast.Call]:
    for path in MODULES:
        yield from (one for one in nodes(path) if isinstance(one, ast.Call) and name_of(one) in names)


def first_words(*names: str) -> set[str]:
    """Return the first string among the arguments of each call of the functions with these names."""
    found = set()
    for call in calls(*names):
        words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found |= set(words[:1])
    return found


def reasons_of_refusals() -> set[str]:
    return first_words("Refusal", "_refusal")


def reasons_of_claims() -> set[str]:
    """Return the reasons for a claim's failure (members of `Reason`) that occur in the code."""
    found = set()
    for path in MODULES:
        for one in nodes(path):
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "Reason":
                found.add(Reason[one.attr].value)
    return found


def reasons_of_events() -> set[str]:
    """Return the reasons of Events, from the calls of the two functions that write Events."""
    found = first_words("alarm")
    for call in calls("_start", "start"):
        if any(isinstance(one, ast.Attribute) and one.attr == "claim_event" for one in call.args):
            found |= {text for one in call.args if isinstance(one, ast.Constant) for text in texts(one)}
    return found


def rows(heading: str) -> set[str]:
    """Return the words in backticks of the first cells of a section's tables."""
    section = re.split(r"^#+ ", PAGE.split(f" {heading}\n")[1], flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_every_reason_of_a_refused_allocate_is_there() -> None:
    """Each reason of `deviceplugin_allocation_refusals_total` is explained, and none that does not exist."""
    found = reasons_of_refusals()
    assert len(found) > 8
    assert rows("It failed with UnexpectedAdmissionError") == found


def test_every_reason_of_a_claim_that_fails_is_there() -> None:
    """Each reason of the failures of Prepare and Unprepare is explained, and none that does not exist."""
    found = reasons_of_claims()
    assert found == set(Reason)
    assert rows("It stays in ContainerCreating") | rows("It stays Terminating") == found


def test_every_event_is_there() -> None:
    """The page explains each Event that the agents write, and two Events of the kubelet."""
    found = reasons_of_events()
    assert "DeviceQuarantined" in found
    assert rows("Events") == found | {"UnexpectedAdmissionError", "FailedPrepareDynamicResources"}


LOGGED = sorted(
    rows("The agent does not start, or ends")
    | rows("Devices are missing")
    | rows("Other warnings and errors in the log")
)


def test_messages_are_those_of_the_code() -> None:
    """Each message that the page explains is part of a string in the code."""
    text = code()
    messages = {*LOGGED, *rows("A move does not end"), *rows("The command line")}
    assert not sorted(message for message in messages if message not in text)


def texts_of_names(path: Path) -> dict[str, str]:
    """Return the strings that are assigned to names, by name, in all scopes of a module."""
    targets: list[tuple[ast.expr, ast.expr | None]] = []
    for one in nodes(path):
        if isinstance(one, ast.Assign):
            targets += [(each, one.value) for each in one.targets]
        elif isinstance(one, ast.AnnAssign):
            targets.append((one.target, one.value))
    return {
        target.id: value.value
        for target, value in targets
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def logged() -> set[str]:
    """Return the messages that are logged at WARNING and ERROR, without those that only have an error's text."""
    found = set()
    for path in MODULES:
        known = texts_of_names(path)
        for call in nodes(path):
            if (
                not isinstance(call, ast.Call)
                or name_of(call) not in ("warning", "error", "exception")
                or not call.args
            ):
                continue
            if not isinstance(call.func, ast.Attribute) or "log" not in ast.unparse(call.func.value).lower():
                continue
            first = call.args[0]
            text = known.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
            assert isinstance(text, str), f"what is logged by {ast.unparse(call)} cannot be read here"
            found.add(re.sub(r"\s+", " ", text))
    return {text for text in found if re.search("[a-z]", re.sub(r"%(\.\d)?[a-z]", "", text))}


def test_messages_do_not_begin_with_what_they_are_about() -> None:
    """No message begins with a resource or driver, which log lines take from `extra`; three have a signal or path."""
    assert {text for path in MODULES for text in texts(tree(path)) if re.match("%s: .*[a-z]{3}", text)} == {
        "%s: the agent ends; pods keep their devices",
        "%s: cannot save the config file for a start with an invalid file: %s",
        "%s: `metrics` is read at the start only; restart the agent to apply the change",
    }


def test_every_warning_and_error_is_there() -> None:
    """Each message that is logged at WARNING and ERROR is explained by a row."""
    found = logged()
    assert len(found) > 50
    assert not sorted(text for text in found if not any(message in text for message in LOGGED))
