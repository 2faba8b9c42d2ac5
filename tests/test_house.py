"""How the packages are built: which folder may stand on which."""

from __future__ import annotations

import ast
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "dschat_tui")
LONGEST_FUNCTION = 80
# What only they may import: the commands nobody, the dashboard the commands.
IMPORTERS = {"dschat_tui.cli": set(), "dschat_tui.dashboard": {"dschat_tui.cli"}}
# Processes without a terminal, whose log is their stderr, and a page of the documentation.
PRINTING = {"supervisor.py", "guard.py", "quantities.py"}
LOGIC = ("runs", "sweep", "chat", "logs")


@functools.cache
def sources(package: str) -> list[tuple[Path, ast.Module]]:
    """The modules of a package by their paths below the root, parsed."""
    files = sorted((ROOT / package).rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def folder_of(name: str) -> str:
    """`engine.log` of `engine.log.write`; a module that lies in no folder is one by itself."""
    return ".".join(name.split(".")[:2])


def imports(package: str) -> Iterator[tuple[str, str, str]]:
    """Each import of our own code: the folder that imports, the folder imported, and where.

    Imports inside functions count: they make an order of loading possible, not of understanding.
    """
    for path, tree in sources(package):
        module = ".".join(path.with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith(tuple(f"{each}." for each in PACKAGES)):
                    yield folder_of(module), folder_of(name), f"{path}:{node.lineno}"


def arrows(package: str) -> dict[str, dict[str, str]]:
    """From each folder of a package to those of it that it imports from, with a place that does."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for user, used, place in imports(package):
        if used != user and used.startswith(f"{package}."):
            found[user].setdefault(used, place)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_each_other_in_one_direction(package):
    graph = arrows(package)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # The sorter lists a circle from what is imported to what imports it.
        circle = error.args[1]
        steps = [graph[user][used] for used, user in itertools.pairwise(circle)]
        pytest.fail(f"{' <- '.join(circle)}: {', '.join(steps)}")
    assert len(graph) > 1


def test_nothing_stands_on_screens_and_commands():
    seen = set()
    for user, used, place in itertools.chain.from_iterable(map(imports, PACKAGES)):
        if user.startswith("engine."):
            assert used.startswith("engine."), f"{place}: the engine knows no screen"
        if used in IMPORTERS and user != used:
            seen.add(used)
            assert user in IMPORTERS[used], f"{place}: {user} imports {used}"
    assert seen == {"dschat_tui.dashboard"}


def test_what_is_no_screen_and_no_command_prints_nothing():
    looked_at = 0
    for path, tree in sources("dschat_tui"):
        if path.parts[1] not in LOGIC or path.name in PRINTING:
            continue
        looked_at += 1
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not (called and node.func.id == "print"), f"{path}:{node.lineno}"
    assert looked_at > len(LOGIC)


def test_functions_are_short():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        f"{path}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for package in PACKAGES
        for path, tree in sources(package)
        for node in ast.walk(tree)
        if isinstance(node, functions)
    }
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}
    assert len(lengths) > 1000


def test_the_persons_side_says_what_it_hands_over():
    """Types at every boundary: `Any` would let a misspelt key of a record through."""
    for path, tree in sources("dschat_tui"):
        if path.parts[1] != "dashboard":
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert "Any" not in names, path
