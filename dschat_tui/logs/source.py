"""What can be watched: the folder of a run or of a step, or one training.log."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config.steps import BY_FOLDER, PIPELINES, STEPS

# The key of a log whose step is known from its lines alone.
ONE_LOG = "log"


class SourceError(ValueError):
    """There is nothing to watch at a path."""


@dataclass(frozen=True)
class Source:
    """Logs by step, and the files of the answers and of the run's state, which may not exist."""

    path: Path
    logs: Mapping[str, Path]
    rollouts: Path
    state_file: Path | None = None


def find_source(path: Path) -> Source:
    """What there is to watch at a path.

    Raises:
        SourceError: neither a run, nor a step, nor a log.
    """
    path = path.absolute()
    if path.is_file():
        step = BY_FOLDER.get(path.parent.name)
        key = ONE_LOG if step is None else step.name
        return Source(path, {key: path}, path.parent / "rollouts.jsonl")
    if not path.is_dir():
        raise SourceError(f"{path} does not exist. Give the folder of a run, or a training.log")
    steps = {step.name: path / step.folder for step in STEPS}
    state_file = path / "run.json"
    if state_file.is_file() or any(folder.is_dir() for folder in steps.values()):
        recorded = _recorded_steps(state_file)
        there = {name for name, folder in steps.items() if folder.is_dir() or name in recorded}
        # The pipeline that has all of the run's steps; before its second step that is PPO's.
        names = next((p for p in PIPELINES.values() if there <= {*p}), PIPELINES["ppo"])
        logs: dict[str, Path] = {step: steps[step] / "training.log" for step in names}
        rollouts = steps["ppo"] / "rollouts.jsonl"
        return Source(path, logs, rollouts, state_file)
    if (path / "training.log").is_file():
        return find_source(path / "training.log")
    raise SourceError(
        f"{path} holds neither run.json, nor step1-sft and its like, nor training.log. "
        "Give the folder of a run, or a training.log"
    )


def _recorded_steps(state_file: Path) -> Container[str]:
    """The names of the steps in a run.json; none where it cannot be read."""
    try:
        steps = json.loads(state_file.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return steps if isinstance(steps, dict) else ()
