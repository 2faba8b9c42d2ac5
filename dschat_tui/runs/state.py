"""run.json: the state of a run, typed, and the reading of what older versions wrote."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TypedDict, cast

from engine.config.steps import BY_NAME, STEPS, Step
from engine.log.causes import Cause

PENDING, RUNNING, DONE, FAILED, STOPPED = "pending", "running", "done", "failed", "stopped"
# of a run only: it waits at a gate between two steps
PAUSED = "paused"

VERSION = 1

# Final figures of a step by name; those that are not finite are the words nan, inf and -inf.
FinalMetrics = dict[str, float | int | str | None]


class ProcessIdentity(TypedDict):
    """A process, and when it started in seconds since the epoch: pids are reused."""

    pid: int
    started: float | None


class StepState(TypedDict):
    """One step; times are in seconds since the epoch.

    `log_offset` is where its log begins in training.log, after those of earlier attempts.
    """

    state: str
    folder: str
    command: list[str] | None
    process: ProcessIdentity | None
    started: float | None
    ended: float | None
    returncode: int | None
    log_offset: int
    cause: Cause | None
    metrics: FinalMetrics


class Acceptance(TypedDict):
    """Why a person let the run continue past a gate, and when."""

    time: float
    reason: str


class GateRecord(TypedDict):
    """A gate that a finished step did not pass; `gate` is the option that sets the threshold."""

    gate: str
    step: str
    reading: float | str | None
    threshold: float
    action: str
    time: float
    accepted: Acceptance | None


class StopState(TypedDict):
    """When a stop with a checkpoint was asked for, and how long saving may take."""

    asked: float
    limit_seconds: float


class OptionChange(TypedDict):
    """An option that was changed when the run was resumed."""

    time: float
    key: str
    before: object
    after: object


class RunState(TypedDict):
    """A run; `steps` is in the order in which they run."""

    version: int
    id: str | None
    profile: str
    created: float
    updated: float
    state: str
    steps: dict[str, StepState]
    supervisor: ProcessIdentity | None
    stop: StopState | None
    gates: list[GateRecord]
    changes: list[OptionChange]


def new_run_state(profile: str) -> RunState:
    """The state of a run without steps."""
    now = time.time()
    return {
        "version": VERSION,
        "id": uuid.uuid4().hex,
        "profile": profile,
        "created": now,
        "updated": now,
        "state": PENDING,
        "steps": {},
        "supervisor": None,
        "stop": None,
        "gates": [],
        "changes": [],
    }


def unknown_run_state() -> RunState:
    """The state of a run whose run.json cannot be read."""
    return {
        **new_run_state(profile=""),
        "id": None,
        "created": 0.0,
        "updated": 0.0,
        "state": "unknown",
    }


def new_step_state(step: Step) -> StepState:
    """The state of a step that has not begun."""
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


def parse_run_state(text: str) -> RunState:
    """The content of a run.json; keys that its version did not write have the value of a new run.

    Raises:
        ValueError: it is not JSON, not an object, or its steps are no records.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    steps = found.get("steps", {})
    if not isinstance(steps, dict) or not all(isinstance(s, dict) for s in steps.values()):
        raise ValueError("its 'steps' are no records of steps")
    known = {step.name: new_step_state(step) for step in STEPS}
    state = {**unknown_run_state(), **found}
    state["steps"] = {name: {**known[name], **steps[name]} for name in steps if name in known}
    for key, form in (("gates", GateRecord), ("changes", OptionChange)):
        records = state[key] if isinstance(state[key], list) else []
        needed = form.__annotations__.keys()
        state[key] = [r for r in records if isinstance(r, dict) and r.keys() >= needed]
    return cast(RunState, state)


def read_run_state(file: Path | None) -> RunState | None:
    """The content of a run.json; None where there is none that can be read."""
    try:
        return None if file is None else parse_run_state(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def has_state(state: RunState, step: str, wanted: str) -> bool:
    """Whether a run has a step, and it is in a state."""
    return step in state["steps"] and state["steps"][step]["state"] == wanted


def in_order(steps: dict[str, StepState]) -> dict[str, StepState]:
    """The steps in the order of the table."""
    return {step.name: steps[step.name] for step in STEPS if step.name in steps}


def steps_of(state: RunState) -> list[tuple[Step, StepState]]:
    """The steps of a run, each with its state."""
    return [(BY_NAME[name], record) for name, record in state["steps"].items()]
