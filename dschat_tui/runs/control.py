"""Finding runs, describing them, and asking their supervisors to stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import is_alive
from dschat_tui.runs.processes import leftovers
from dschat_tui.runs.state import RUNNING, ProcessIdentity, RunState, unknown_run_state
from dschat_tui.runs.supervisor import SAVE_SECONDS
from engine.config.steps import STEPS

# What a listing says of a run whose run.json says running, and whose supervisor is gone.
LOST = "lost"
RUNS_FOLDER = Path("output")


class Described(TypedDict):
    """What `dschat runs` reports of a run.

    `standing` is its actual state, `problem` what is wrong with an unreadable run.json,
    `checkpoints` the steps at which each step has one.
    """

    name: str
    path: str
    standing: str
    problem: str | None
    checkpoints: dict[str, list[int]]
    state: RunState


class NotRunning(ValueError):
    """A run has no living supervisor on this machine."""


class NotDeletable(ValueError):
    """A run has living processes."""


class NoSuchRun(ValueError):
    """There is no run of this name or path."""


def find_run(name: str) -> RunFolder:
    """A run by its path, or by its name in `output/`.

    Raises:
        NoSuchRun: neither holds a run.json.
    """
    for path in (Path(name), RUNS_FOLDER / name):
        if (path / "run.json").is_file():
            return RunFolder(path)
    raise NoSuchRun(
        f"{name} is no run: there is no {Path(name) / 'run.json'}, nor "
        f"{RUNS_FOLDER / name / 'run.json'}. `dschat runs list` shows those that exist"
    )


def find_runs(places: Iterable[Path]) -> list[RunFolder]:
    """The runs in folders, and those that are runs themselves, the one that changed last first."""
    files = set()
    for place in places:
        files |= {file.absolute() for file in (place / "run.json", *place.glob("*/run.json"))}
    there = [(file.stat().st_mtime, file) for file in files if file.is_file()]
    return [RunFolder(file.parent) for _, file in sorted(there, reverse=True)]


def supervisor_of(state: RunState | None) -> ProcessIdentity | None:
    """The supervisor that run.json names, where it is alive on this machine."""
    if state is None or not is_alive(state["supervisor"]):
        return None
    return state["supervisor"]


def has_supervisor(state: RunState | None) -> bool:
    """Whether the supervisor that run.json names is alive on this machine."""
    return supervisor_of(state) is not None


def standing(state: RunState) -> str:
    """The actual state of a run: `running` in run.json is `lost` without a supervisor."""
    lost = state["state"] == RUNNING and not has_supervisor(state)
    return LOST if lost else state["state"]


def describe(run: RunFolder) -> Described:
    """What `dschat runs` reports of a run; of an unreadable one its path and what is wrong."""
    state, problem = unknown_run_state(), None
    try:
        state = run.read_state() or state
    except (OSError, ValueError) as error:
        problem = str(error)
    checkpoints: dict[str, list[int]] = {step.name: run.checkpoints(step) for step in STEPS}
    return {
        "name": run.path.name,
        "path": str(run.path),
        "standing": "unreadable" if problem else standing(state),
        "problem": problem,
        "checkpoints": {name: steps for name, steps in checkpoints.items() if steps},
        "state": state,
    }


def is_supervised(run: RunFolder, process: subprocess.Popen[bytes] | None = None) -> bool:
    """Whether the supervisor of a run is alive on this machine.

    `process` is the supervisor where this process started it, which run.json may not name yet.
    """
    if process is not None:
        return process.poll() is None
    return has_supervisor(run.read_state())


def ask_to_stop(run: RunFolder, process: subprocess.Popen[bytes] | None = None) -> None:
    """Ask a run to save a checkpoint and stop; asked again, by anyone, to `end_now`.

    Args:
        run: the run.
        process: its supervisor where this process started it; None: the one run.json names.

    Raises:
        NotRunning: its supervisor is gone, or runs on another machine.
    """
    if run.stop_request.exists() or not is_supervised(run, process):
        end_now(run, process)
    else:
        run.request_stop(SAVE_SECONDS)


def end_now(run: RunFolder, process: subprocess.Popen[bytes] | None = None) -> None:
    """Ask a run's supervisor to stop without a checkpoint; asked again, without the grace.

    Raises:
        NotRunning: its supervisor is gone, or runs on another machine.
    """
    if not is_supervised(run, process):
        raise NotRunning(f"{run.path}: no supervisor of this run is alive on this machine")
    if process is not None:
        process.send_signal(signal.SIGTERM)
    elif (supervisor := supervisor_of(run.read_state())) is not None:
        os.kill(supervisor["pid"], signal.SIGTERM)


def delete(run: RunFolder) -> list[str]:
    """Remove what a run made; the names of what else is in its folder, which stays.

    Raises:
        NotDeletable: its supervisor or another of its processes is alive.
        RunIsHeld: another process looks after it.
        OSError: something cannot be removed.
    """
    state = describe(run)["state"]
    if has_supervisor(state):
        raise NotDeletable(f"{run.path} is running. Stop it first: dschat runs stop {run.path}")
    if leftovers(state):
        raise NotDeletable(
            f"processes of {run.path} are alive. `dschat run --resume {run.path}` ends them"
        )
    with run.lock(wait=False):
        for step in STEPS:
            if run.step_folder(step).exists():
                shutil.rmtree(run.step_folder(step))
        # run.json last: what is left of an interrupted deletion is still a run
        for file in (run.stop_request, run.supervisor_log, run.config_file, run.state_file):
            file.unlink(missing_ok=True)
        run.lock_file.unlink(missing_ok=True)
    others = sorted(path.name for path in run.path.iterdir())
    if not others:
        run.path.rmdir()
    return others
