"""The folder of a run: its paths, and `run.json`, its state."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dschat_tui.runs.state import (
    PENDING,
    RunState,
    in_order,
    new_run_state,
    new_step_state,
    parse_run_state,
)
from engine.config import layout
from engine.config.steps import Step


class RunIsHeld(RuntimeError):
    """Another process holds the lock of a run: its supervisor or its guard."""


class RunFolder:
    """Paths inside a run's folder, and its state on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config_file = self.path / "run.yaml"
        self.state_file = self.path / "run.json"
        self.supervisor_log = self.path / "supervisor.log"
        self.stop_request = self.path / layout.STOP_REQUEST
        self.lock_file = self.path / ".lock"

    def step_folder(self, step: Step) -> Path:
        """Folder of a step's log, metrics, checkpoints and models."""
        return self.path / step.folder

    def training_log(self, step: Step) -> Path:
        """The log that a step's processes write."""
        return self.step_folder(step) / "training.log"

    def model_folders(self, step: Step, ema: bool, critic: bool = True) -> list[Path]:
        """The model folders that a step must leave behind, complete, to be done."""
        return [self.step_folder(step) / name for name in step.model_folders(ema, critic)]

    def checkpoints(self, step: Step) -> list[int]:
        """The optimizer steps after which a step has whole checkpoints, in order."""
        return [manifest.step for _, manifest in layout.whole_checkpoints(self.step_folder(step))]

    @contextmanager
    def lock(self, wait: bool) -> Iterator[None]:
        """Hold the run: one process at a time runs its steps, or ends what is left of them.

        Raises:
            RunIsHeld: another process holds it, and `wait` is not set.
        """
        with self.lock_file.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise RunIsHeld(f"{self.path}: another process looks after this run") from error
            yield

    def read_state(self) -> RunState | None:
        """The content of run.json, or None where there is no run yet.

        Raises:
            ValueError: run.json is damaged.
        """
        try:
            text = self.state_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return parse_run_state(text)
        except ValueError as error:
            raise ValueError(f"{self.state_file} cannot be read: {error}") from error

    def write_state(self, state: RunState) -> None:
        """Replace run.json atomically: a reader sees the old state or the new one, whole."""
        content = json.dumps({**state, "updated": time.time()}, indent=2, allow_nan=False)
        self._replace(self.state_file, content + "\n")

    def write_config(self, config_yaml: str) -> None:
        """Replace run.yaml atomically."""
        self._replace(self.config_file, config_yaml)

    def request_stop(self, limit_seconds: float) -> None:
        """Ask the running step to save a checkpoint and end, and its supervisor to enforce it.

        After `limit_seconds` the supervisor ends the step's processes itself.
        """
        self._replace(self.stop_request, json.dumps({"limit_seconds": limit_seconds}) + "\n")

    def _replace(self, target: Path, content: str) -> None:
        temporary = self.path / f".{target.name}.{os.getpid()}"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, config_yaml: str, profile: str, steps: Iterable[Step]) -> RunState:
        """Write run.yaml and a run.json with `steps` pending; steps already there are kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config_yaml)
        state = self.read_state() or new_run_state(profile)
        for step in steps:
            state["steps"][step.name] = new_step_state(step)
        state["steps"] = in_order(state["steps"])
        state["state"], state["supervisor"] = PENDING, None
        self.write_state(state)
        return state


def next_free(parent: Path, name: str) -> Path:
    """The folder that a new run called `name` gets: with a number where the name is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder
