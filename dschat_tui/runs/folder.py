"""The folder of a run: where everything lies, and `run.json`, its state."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.config import layout
from engine.config.layout import StepName

PENDING, RUNNING, DONE, FAILED, STOPPED = "pending", "running", "done", "failed", "stopped"

# psutil derives start times from the boot time, which shifts a little when the clock is corrected
START_TIME_TOLERANCE_SECONDS = 1.0


@dataclass(frozen=True)
class Step:
    """One of the three steps: its number, its name in logs and configuration, its title."""

    number: int
    name: StepName
    title: str

    @property
    def folder(self) -> str:
        """Name of its folder inside the run's."""
        return layout.STEP_FOLDERS[self.name]


TITLES: dict[StepName, str] = {"sft": "SFT", "reward": "reward model", "ppo": "RLHF (PPO)"}
STEPS = tuple(Step(number, name, TITLES[name]) for name, number in layout.STEP_NUMBERS.items())


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


class RunFolder:
    """Paths inside a run's folder, and its state on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config_file = self.path / "run.yaml"
        self.state_file = self.path / "run.json"
        self.supervisor_log = self.path / "supervisor.log"

    def step_folder(self, step: Step) -> Path:
        """Folder of a step's log, metrics, checkpoints and models."""
        return self.path / step.folder

    def training_log(self, step: Step) -> Path:
        """The log that a step's processes write."""
        return self.step_folder(step) / "training.log"

    def model_folders(self, step: Step, ema: bool) -> list[Path]:
        """The model folders that a step must leave behind, complete, to be done."""
        return [self.step_folder(step) / name for name in layout.model_folders(step.name, ema)]

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
        temporary = self.path / f".run.json.{os.getpid()}"
        content = json.dumps({**state, "updated": time.time()}, indent=2, allow_nan=False)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.state_file)

    def create(self, config_yaml: str, profile: str, steps: list[Step]) -> dict[str, Any]:
        """Write run.yaml and a run.json with `steps` pending; steps already there are kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(config_yaml, encoding="utf-8")
        state = self.read_state() or {
            "version": 1,
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
        "cause": None,
        "metrics": {},
    }
