"""The folder of a run: where everything lies, and `run.json`, its state."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from engine.config import layout
from engine.config.steps import STEPS, Step

PENDING, RUNNING, DONE, FAILED, STOPPED = "pending", "running", "done", "failed", "stopped"
# of a run alone: it waits at a gate between two steps
PAUSED = "paused"

# psutil derives start times from the boot time, which shifts a little when the clock is corrected
START_TIME_TOLERANCE_SECONDS = 1.0


def process_identity(pid: int) -> dict[str, Any] | None:
    """Pid and start time (seconds since the epoch) of a living process, or None."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return {"pid": pid, "started": process.create_time()}
    except psutil.NoSuchProcess:
        return None


def is_alive(identity: dict[str, Any] | None) -> bool:
    """Whether the process recorded as `{"pid", "started"}` still runs, and is the same process."""
    if identity is None:
        return False
    now = process_identity(int(identity["pid"]))
    if now is None:
        return False
    return abs(now["started"] - identity["started"]) <= START_TIME_TOLERANCE_SECONDS


class RunIsHeld(RuntimeError):
    """Another process holds the lock of a run: its supervisor, or who ends what one left."""


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

    def model_folders(self, step: Step, ema: bool) -> list[Path]:
        """The model folders that a step must leave behind, complete, to be done."""
        return [self.step_folder(step) / name for name in step.model_folders(ema)]

    def checkpoints(self, step: Step) -> list[dict[str, Any]]:
        """The manifests of a step's whole checkpoints, oldest first."""
        return [manifest for _, manifest in layout.whole_checkpoints(self.step_folder(step))]

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

    def read_state(self) -> dict[str, Any] | None:
        """The content of run.json, or None where there is no run yet.

        Raises:
            ValueError: run.json is not a JSON object.
        """
        try:
            text = self.state_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            state = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.state_file} is not JSON: {error}") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.state_file} holds a {type(state).__name__}, not an object")
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace run.json atomically: a reader sees the old state or the new one, whole."""
        content = json.dumps({**state, "updated": time.time()}, indent=2, allow_nan=False)
        self._replace(self.state_file, content + "\n")

    def write_config(self, config_yaml: str) -> None:
        """Replace run.yaml atomically."""
        self._replace(self.config_file, config_yaml)

    def request_stop(self, limit_seconds: float) -> None:
        """Ask the running step to save a checkpoint and end, and its supervisor to see to it.

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

    def create(self, config_yaml: str, profile: str, steps: list[Step]) -> dict[str, Any]:
        """Write run.yaml and a run.json with `steps` pending; steps already there are kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config_yaml)
        state = self.read_state() or {
            "version": 1,
            "id": uuid.uuid4().hex,
            "profile": profile,
            "created": time.time(),
            "steps": {},
        }
        for step in steps:
            state["steps"][step.name] = new_step_state(step)
        order = [step.name for step in STEPS]
        state["steps"] = dict(sorted(state["steps"].items(), key=lambda item: order.index(item[0])))
        state |= {"state": PENDING, "supervisor": None}
        self.write_state(state)
        return state


def next_free(parent: Path, name: str) -> Path:
    """The folder that a new run called `name` gets: with a number where the name is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def new_step_state(step: Step) -> dict[str, Any]:
    """The record in run.json of a step that has not begun."""
    return {
        "state": PENDING,
        "folder": step.folder,
        "command": None,
        "process": None,
        "started": None,
        "ended": None,
        "returncode": None,
        "log_offset": 0,
        "cause": None,
        "metrics": {},
    }
