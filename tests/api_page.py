"""``python -m tests.api_page`` writes docs/api.md from the docstrings of the public names."""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import deviceplugin
import deviceplugin.testing
import dra_bridge
import dra_bridge.testing

PAGE: Final = Path(__file__).parents[1] / "docs" / "api.md"
HEAD: Final = """# API reference

Made of the docstrings by `python -m tests.api_page`. All other names are internal and may change.
"""
NAMES: Final = {
    deviceplugin: ("Device", "DeviceNode", "Mount", "ContainerEdits", "Health", "Version", "DeviceSource", "run"),
    dra_bridge: ("run",),
    deviceplugin.testing: (
        "FakeKubelet",
        "FakePod",
        "FakeContainer",
        "ContainerSpec",
        "Served",
        "PodFailedError",
        "serve",
    ),
    dra_bridge.testing: ("FakeNode", "FakeApiServer", "ServedBoth", "serve_both", "overlaps"),
}
"""The public names, by the module from which users import them."""
INTERNAL: Final = {
    *("end_container", "end_containers", "end_pod", "make_pod_files", "private_socket", "record_registration"),
    *("record_update", "recorded", "start_container", "start_sandbox", "take_pod_rejection", "take_rejection"),
    *("remove_pod", "cdi_devices", "dynamic_resources", "node_allocatable", "schedule", "report", "HOOKS"),
}
"""Methods of the fakes that are not documented, because only other parts of the fakes call them."""


def page() -> str:
    """Return the text of docs/api.md."""
    parts = [HEAD.rstrip()]
    for module, names in NAMES.items():
        parts.append(f"\n## `{module.__name__}`")
        for name in names:
            parts += _entry(name, getattr(module, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    doc = inspect.getdoc(thing) or ""
    yield f"\n### {name}\n"
    if not (inspect.isclass(thing) and issubclass(thing, str | enum.Enum | Exception | deviceplugin.DeviceSource)):
        yield f"`{name}{_signature(thing)}`\n"
    yield _markdown(doc)
    if inspect.isclass(thing) and not issubclass(thing, str | enum.Enum | Exception):
        members = [each for each in _members(thing) if each]
        if members:
            yield "\n".join(members)


def _signature(thing: Any) -> str:
    """Return the parameters with their defaults, and with their types unless the object is a fake for tests."""
    typed = not thing.__module__.startswith(("deviceplugin.testing", "dra_bridge.testing"))
    shown: list[str] = []
    keyword_only = False
    for one in inspect.signature(thing).parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not keyword_only and not any(each.startswith("*") for each in shown):
            shown.append("*")
        keyword_only = keyword_only or one.kind is one.KEYWORD_ONLY
        text = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD) + one.name
        if typed and one.annotation is not one.empty:
            text += f": {re.sub(r'[a-z_.]+[.](?=[A-Z])', '', str(one.annotation))}"
        if one.default is not one.empty:
            value = sorted(one.default) if isinstance(one.default, frozenset) else one.default
            default = str(value) if isinstance(value, enum.Enum) else repr(value)
            text += f" = {'...' if default.startswith('<') else default}"
        shown.append(text)
    return f"({', '.join(shown)})"


def _members(thing: type) -> Iterator[str]:
    bases = [base for base in thing.__mro__ if base.__module__.partition(".")[0] in ("deviceplugin", "dra_bridge")]
    names = dict.fromkeys(name for base in bases for name in vars(base) if not name.startswith("_"))
    for name in names:
        member = inspect.getattr_static(thing, name)
        member = getattr(member, "__func__", member)
        if name in INTERNAL:
            continue
        if inspect.isfunction(member):
            yield f"- `{name}{_signature(member)}`: {_first(member)}"
        elif isinstance(member, property):
            yield f"- `{name}`: {_first(member)}"


def _first(thing: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _markdown(doc: str) -> str:
    """Return a docstring as Markdown: a paragraph `name: text. other: text.` becomes a list."""
    made = []
    for paragraph in re.split(r"\n\s*\n", doc):
        if paragraph.startswith("    "):
            made.append("```python\n" + inspect.cleandoc(paragraph) + "\n```")
        elif fields := re.match(r"(Attributes|Raises):\n", paragraph):
            made.append(_listed(inspect.cleandoc(paragraph[fields.end() :])))
        elif re.match(r"[a-z_]+: ", paragraph):
            made.append(_listed(paragraph))
        else:
            made.append(" ".join(paragraph.split()))
    return "\n\n".join(made) + "\n"


def _listed(text: str) -> str:
    one_line = " ".join(line.strip() for line in text.splitlines())
    fields = re.split(r"(?<=[.)`]) (?=[A-Za-z_]+: )", one_line)
    return "\n".join(re.sub(r"^([A-Za-z_]+): ", r"- `\1`: ", field) for field in fields)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
