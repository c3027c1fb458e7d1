"""The house rules: rooms are entered by their doors, and functions stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "saltflat"
MODULES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}

# room -> the rooms that it may use; what lies at the top of the package is open to all of them.
MAY_USE: dict[str, set[str]] = {
    "checkpoints": set(),
    "convex": set(),
    "curvature": set(),
    "symmetries": {"convex", "curvature"},
    "landscape": {"curvature"},
    "measures": {"convex", "curvature", "landscape", "symmetries"},
    "report": {"curvature", "landscape", "measures"},
    "slices": {"convex", "curvature", "landscape", "report", "symmetries"},
    "audit": {"curvature", "landscape", "measures", "report", "symmetries"},
    "training": {"curvature", "landscape", "measures", "report", "symmetries"},
    "integrations": {"measures", "training"},
    "sweep": {"report"},
    "datasets": set(),
    "papers": {"curvature", "datasets", "measures", "report", "sweep", "symmetries", "training"},
    "cli": {"checkpoints", "datasets", "measures", "papers", "report", "symmetries"},
}
OUTSIDE = {"zoo", "datasets", "demo"}
MOST_LINES = 40
MOST_MODULES = 200


def room(path: Path) -> str | None:
    """The folder below the package, or None for what lies at its top."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def imports(path: Path) -> Iterator[tuple[ast.ImportFrom, list[str]]]:
    """Imports of our own modules, and where from."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("saltflat"):
            yield node, node.module.split(".")[1:]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the signature, which may list many options one a line, and without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(SOURCE)}: {function.name} has {lines(function)} lines"
        for path, tree in TREES.items()
        for function in functions(tree)
        if lines(function) > MOST_LINES
    ]
    assert not long, "\n".join(long)


def test_modules_are_few() -> None:
    assert len(MODULES) < MOST_MODULES


def test_own_modules_are_not_imported_lazily() -> None:
    lazy = [
        f"{path.relative_to(SOURCE)}: {function.name} imports {node.module}"
        for path, tree in TREES.items()
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saltflat")
    ]
    assert not lazy, "\n".join(lazy)


def test_rooms_are_entered_by_their_doors() -> None:
    rooms = {room(path) for path in MODULES} - {None}
    past = [
        f"{path.relative_to(SOURCE)}: {node.module}"
        for path in MODULES
        for node, where in imports(path)
        if where and where[0] in rooms and len(where) > 1 and where[0] != room(path)
    ]
    assert not past, "\n".join(past)


@pytest.mark.parametrize("name", MAY_USE)
def test_directions(name: str) -> None:
    used = {
        where[0]
        for path in MODULES
        if room(path) == name
        for _, where in imports(path)
        if where and (SOURCE / where[0]).is_dir()
    }
    assert used - {name} <= MAY_USE[name]


def test_networks_and_data_are_used_by_demonstrations_papers_and_the_command_alone() -> None:
    """They are shipped, and nothing that measures or trains may come to need them."""
    users = {
        room(path)
        for path in MODULES
        for node, where in imports(path)
        if {*where[:1], *(() if where else (name.name for name in node.names))} & OUTSIDE
    }
    assert users - {"datasets"} <= {"demo", "cli", "papers"}


def test_every_room_is_in_the_table() -> None:
    assert {room(path) for path in MODULES} - {None, "demo"} == set(MAY_USE)


@pytest.mark.parametrize("module", ["saltflat", "saltflat.cli"])
def test_importing_the_package_leaves_scipy_alone(module: str) -> None:
    """It costs as much as the rest of the package, and few calls need it."""
    code = f"import {module}, sys; print([m for m in sys.modules if m.split('.')[0] == 'scipy'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
