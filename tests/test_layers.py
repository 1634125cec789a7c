"""Which package may import which, how long a module may be, and what a plugin's process must not load."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source import PRODUCT, ROOT, modules, nodes, tree

ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

BASE = set(re.findall(r"`(\w+)`", CONTRIBUTING.read_text().split("top level of `deviceplugin`: ")[1].split("\n\n")[0]))
"""Modules at the top level of deviceplugin that count as one layer, `base`."""
TOP = {"", "__main__", "cli", "cli_manifests", "cli_plan", "demo"}
"""Modules of each distribution that count as its layer `top`: the package itself ("") and its programs."""


def full(layer: str) -> str:
    """Return a layer's name with its distribution, which documents leave out if it is deviceplugin."""
    return layer if layer.startswith("dra_bridge.") else f"deviceplugin.{layer}"


MAY_IMPORT = {
    full(layer): {full(other) for other in re.findall(r"`([\w.]+)`", may)}
    for layer, may in re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|$", CONTRIBUTING.read_text(), re.MULTILINE)
}
"""For each layer, the layers from which its modules may import, also for types alone (the table in CONTRIBUTING.md)."""

LONGEST = 600
"""The maximum number of lines in a product module."""


def is_module(name: str) -> bool:
    """Whether this is a module or a package of the repository."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_name(f"{path.name}.py").exists() or (path / "__init__.py").exists()


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a file imports at the top level, in a function, or for types alone."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                # `from package import module` imports the module, even while the package is still being imported.
                name = f"{node.module}.{alias.name}"
                found.add(name if is_module(name) else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def layer_of(module: str) -> str:
    """The layer that a module of either distribution belongs to."""
    distribution, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if name in TOP:
        return f"{distribution}.top"
    return "deviceplugin.base" if distribution == "deviceplugin" and name in BASE else f"{distribution}.{name}"


def crossings(name: str) -> Iterator[str]:
    """The other layers that a module imports from, also for types alone."""
    for module in imports(PRODUCT[name]):
        if module.partition(".")[0] in ("deviceplugin", "dra_bridge") and layer_of(module) != layer_of(name):
            yield layer_of(module)


def test_each_module_belongs_to_a_layer() -> None:
    """The table of layers leaves out no module, and has no other layers; the list of `base` names modules."""
    assert {layer_of(name) for name in PRODUCT} | {full("wire"), "dra_bridge.wire"} == MAY_IMPORT.keys()
    assert all(is_module(f"deviceplugin.{name}") for name in BASE)
    assert not [name for name in PRODUCT if layer_of(name) not in MAY_IMPORT]


def test_layers_import_what_they_may() -> None:
    """A module imports from its own layer and from the layers that its layer may import, also for types alone."""
    crossed = {(name, layer_of(name), other) for name in PRODUCT for other in crossings(name)}
    assert not {(name, layer, other) for name, layer, other in crossed if other not in MAY_IMPORT[layer]}


def test_layers_have_no_circle() -> None:
    """The layers can be put in an order in which each imports only those before it."""
    below: set[str] = set()
    while ready := {layer for layer, may in MAY_IMPORT.items() if layer not in below and may <= below}:
        below |= ready
    assert below == MAY_IMPORT.keys()


def test_layers_that_may_be_imported_are() -> None:
    """Each import that the table of layers allows is used by a module."""
    crossed = {(name, other) for name in PRODUCT for other in crossings(name)}
    real = {(layer_of(name), other) for name, other in crossed}
    unused = {(layer, other) for layer, may in MAY_IMPORT.items() for other in may} - real
    assert not unused


def test_packages_are_ordered_as_they_import() -> None:
    """The architecture page has each package below all that it imports; and none is left out."""
    rows = re.findall(
        r"^\| `([\w.]+)` \| [^|]* \|$", ARCHITECTURE.read_text().split("Three layers are not in it")[0], re.MULTILINE
    )
    aside = {"deviceplugin.base", "deviceplugin.top", "dra_bridge.top", "deviceplugin.testing", "dra_bridge.testing"}
    order = [full(layer) for layer in rows]
    assert sorted(order) == sorted(MAY_IMPORT.keys() - aside)
    for layer in order:
        assert all(order.index(one) < order.index(layer) for one in MAY_IMPORT[layer] - aside), layer


def test_modules_are_short() -> None:
    """No product module has more than 600 lines."""
    long = {
        name
        for name, path in PRODUCT.items()
        if "testing" not in path.parts and len(path.read_text().splitlines()) > LONGEST
    }
    assert not long


def test_each_class_has_a_name_of_its_own() -> None:
    """No two classes or type aliases of the product have the same name."""
    names = [node.name for path in PRODUCT.values() for node in nodes(path) if isinstance(node, ast.ClassDef)]
    top = (node for path in PRODUCT.values() for node in tree(path).body)
    assigned = (target for node in top if isinstance(node, ast.Assign) for target in node.targets)
    names += [target.id for target in assigned if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id)]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@functools.cache
def private(path: Path) -> frozenset[str]:
    """The private functions, classes, variables and attributes that a module defines."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
    return frozenset(name for name in found if re.match("_[a-zA-Z]", name))


def test_tests_use_what_is_public() -> None:
    """Outside of the model no test reads, replaces or imports what is private to the product."""
    theirs = frozenset[str]().union(*map(private, PRODUCT.values())) - {"_replace", "_asdict"}
    tests = {name: path for name, path in modules("tests").items() if not name.startswith("tests.model.")}
    uses: list[str] = []
    for path in tests.values():
        own = private(path).union(*(private(tests[name]) for name in imports(path) & tests.keys()))
        for node in nodes(path):
            found = ""
            if isinstance(node, ast.Attribute):
                found = node.attr if node.attr not in own else ""
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("deviceplugin", "dra_bridge")):
                found = " ".join({alias.name for alias in node.names} & theirs)
            elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called in {"setattr", "getattr", "object"}:
                    found = " ".join({str(one.value) for one in node.args if isinstance(one, ast.Constant)} & theirs)
            if found in theirs:
                uses.append(f"{path.relative_to(ROOT / 'tests')} {found}")
    assert not uses


def test_framework_knows_nothing_of_the_bridge() -> None:
    """deviceplugin imports neither dra_bridge nor a client of the API server (aiohttp, kubernetes_asyncio)."""
    foreign = {"dra_bridge", "aiohttp", "kubernetes_asyncio", "tests"}
    imported = {(name, module) for name, path in modules("deviceplugin").items() for module in imports(path)}
    assert not {(name, module) for name, module in imported if module.partition(".")[0] in foreign}


def test_no_import_runs_back_up() -> None:
    """No module imports itself through other modules, not even in a function or for types alone."""
    graph = {name: imports(path) & PRODUCT.keys() - {name} for name, path in PRODUCT.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for below in graph[name]:
                visit(below, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_types_are_decoded_by_decoders_that_exist_before_the_threads() -> None:
    """msgspec 0.22 crashes if two threads are the first to decode a type, so modules have a decoder for each type."""
    calls = ((name, node) for name, path in PRODUCT.items() for node in nodes(path) if isinstance(node, ast.Call))
    assert not [
        f"{name}, line {call.lineno}"
        for name, call in calls
        if ".testing." not in name and ast.unparse(call.func) == "msgspec.json.decode" and call.keywords
    ]


def test_values_import_nothing() -> None:
    """Devices are values: their module imports nothing of the package."""
    assert not [module for module in imports(ROOT / "deviceplugin" / "device.py") if module.startswith("deviceplugin")]


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import deviceplugin", {"grpc", "msgspec", "watchdog", "yaml", "asyncio"}),
        ("import deviceplugin.config", {"grpc", "watchdog"}),
        ("import deviceplugin.testing.plugin", {"grpc", "watchdog", "msgspec", "yaml"}),
        (
            "import deviceplugin.node.process, deviceplugin.sources",
            {
                "prometheus_client",
                "aiohttp",
                "kubernetes_asyncio",
                "pynvml",
                "rich",
                "sqlite3",
                "pytest",
                "http.server",
            },
        ),
    ],
)
def test_what_is_not_needed_is_not_loaded(code: str, without: set[str]) -> None:
    """A plugin's process, which runs on every node, does not load modules that it does not need."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert loaded.isdisjoint(without)
