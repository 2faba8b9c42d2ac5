"""How the packages are built: which folder may stand on which."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def sources(package: str) -> Iterator[tuple[Path, ast.Module]]:
    """The modules of a package by their paths below the root, parsed."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def folder_of(name: str) -> str:
    """`engine.log` of `engine.log.write`; a module that lies in no folder is one by itself."""
    return ".".join(name.split(".")[:2])


def arrows(package: str) -> dict[str, dict[str, str]]:
    """From each folder of a package to those it imports from, with a module that does.

    Imports inside functions count: they make an order of loading possible, not of understanding.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, tree in sources(package):
        module = ".".join(path.with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in {folder_of(name) for name in names if name.startswith(f"{package}.")}:
                if target != folder_of(module):
                    found[folder_of(module)].setdefault(target, f"{path}:{node.lineno}")
    return found


@pytest.mark.parametrize("package", ["engine"])
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
