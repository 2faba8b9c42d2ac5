"""What can be watched: the folder of a run, that of a step, or one training.log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dschat_tui.runs.state import RunState, parse_run_state, unknown_run_state
from engine.config.steps import BY_FOLDER, PIPELINES, STEPS

# the key of a log whose step only its lines tell
ONE_LOG = "log"


class SourceError(ValueError):
    """There is nothing to watch at a path."""


@dataclass(frozen=True)
class Source:
    """Logs by step, and where the answers and the state of the run lie, should there be any."""

    path: Path
    logs: Mapping[str, Path]
    rollouts: Path
    state_file: Path | None = None

    def read_state(self) -> RunState | None:
        """The content of run.json; None where there is none that can be read."""
        return None if self.state_file is None else _read_state(self.state_file)


def _read_state(file: Path) -> RunState | None:
    try:
        return parse_run_state(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
        begun = (_read_state(state_file) or unknown_run_state())["steps"]
        is_dpo = "dpo" in begun or steps["dpo"].is_dir()
        names = PIPELINES["dpo" if is_dpo else "ppo"]
        logs: dict[str, Path] = {step: steps[step] / "training.log" for step in names}
        rollouts = steps["ppo"] / "rollouts.jsonl"
        return Source(path, logs, rollouts, state_file)
    if (path / "training.log").is_file():
        return find_source(path / "training.log")
    raise SourceError(
        f"{path} holds neither run.json, nor step1-sft and its like, nor training.log. "
        "Give the folder of a run, or a training.log"
    )
