"""Reward functions of the user's, from a file, with the signature that TRL's users have."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import RewardFunction

Function = Callable[..., Any]


class RewardError(RuntimeError):
    """A reward function that cannot be used; the message names it, its file and the prompt."""


class RewardFunctions:
    """Functions by name, asked one after another.

    Raises:
        RewardError: a file that cannot be read, or without the function.
    """

    def __init__(self, specs: Sequence[RewardFunction]) -> None:
        self._functions = {spec.name: _load(spec) for spec in specs}

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> dict[str, list[float | None]]:
        """A reward of each function for each answer; None where it cannot say.

        Raises:
            RewardError: a function raises, or returns something else than a number or None for
                each answer.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        found = {}
        for name, function in self._functions.items():
            try:
                values = list(function(**{**columns, **given}))
            except Exception as error:
                raise RewardError(
                    f"reward function {name!r} raised {type(error).__name__}: {error}; the first "
                    f"of its {len(prompts)} prompts was {prompts[0]!r}"
                ) from error
            found[name] = _checked(name, values, prompts)
        return found


def problem_of(spec: RewardFunction) -> str | None:
    """Why a function cannot be there, as its file says without being run; None: it can."""
    file = Path(spec.path or "")
    if not file.is_file():
        return (
            f"rewards.functions: there is no Python file {spec.path} for {spec.name!r}. Give its "
            "path, from here or from the profile"
        )
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"rewards.functions: {file} is not Python: {error}. Correct the file"
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    if spec.name in names or "*" in names:
        return None
    known = ", ".join(sorted(names)) or "nothing"
    return f"rewards.functions: {file} has no function {spec.name!r}, only {known}. Name one of it"


def _load(spec: RewardFunction) -> Function:
    problem = problem_of(spec)
    if problem is not None:
        raise RewardError(problem)
    file = Path(spec.path or "").resolve()
    module_spec = importlib.util.spec_from_file_location(f"dschat_rewards_{file.stem}", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, spec.name, None)
    if not callable(function):
        raise RewardError(f"{file} has no function {spec.name!r}")
    return function


def _checked(name: str, values: list[Any], prompts: Sequence[Any]) -> list[float | None]:
    if len(values) != len(prompts):
        raise RewardError(
            f"reward function {name!r} returned {len(values)} rewards for {len(prompts)} answers"
        )
    for value, prompt in zip(values, prompts, strict=True):
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if value is not None and not is_number:
            raise RewardError(f"reward function {name!r} returned {value!r} for {prompt!r}")
    return [None if value is None else float(value) for value in values]
