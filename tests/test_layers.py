"""Who may import whom, and what a plugin's process must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) not in late
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in late
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by name, without generated ones."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "wire" not in path.parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("name", modules("deviceplugin"))
def test_framework_knows_nothing_of_the_bridge(name: str) -> None:
    """dra_bridge depends on deviceplugin, never the other way round; no client of the API server is loaded here."""
    foreign = {"dra_bridge", "aiohttp", "kubernetes_asyncio", "tests"}
    assert {module.partition(".")[0] for module, _ in imports(modules("deviceplugin")[name])}.isdisjoint(foreign)


@pytest.mark.parametrize("package", ["deviceplugin", "dra_bridge"])
def test_no_import_runs_back_up(package: str) -> None:
    """No module imports itself by way of others while it is imported."""
    rooms = modules(package)
    graph = {
        name: {module for module, early in imports(path) if early and module in rooms and module != name}
        for name, path in rooms.items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for below in graph[name]:
                visit(below, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_values_are_the_first_room() -> None:
    """Devices are values: their module imports nothing of the package."""
    assert not [
        module for module, _ in imports(ROOT / "deviceplugin" / "device.py") if module.startswith("deviceplugin")
    ]


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
    """Every node pays for what a plugin's process loads."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert loaded.isdisjoint(without)
