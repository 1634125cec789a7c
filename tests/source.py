"""The product's modules, each parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package by name, without generated ones."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "wire" not in path.parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


PRODUCT = modules("deviceplugin") | modules("dra_bridge")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's tree."""
    return tuple(ast.walk(tree(path)))
