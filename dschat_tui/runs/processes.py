"""The processes that a run started: found again by what run.json records, and ended."""

from __future__ import annotations

import time

import psutil

from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import is_alive
from dschat_tui.runs.state import FAILED, RUNNING, RunState

# In the environment of every process of a run; its value is the id in run.json.
RUN_MARK = "DSCHAT_RUN"
POLL_SECONDS = 0.1
KILL_SECONDS = 10.0


def leftovers(state: RunState) -> list[psutil.Process]:
    """Living processes of a run's steps: leaders as recorded, and all that carry its mark."""
    found = {}
    for record in state["steps"].values():
        if record["process"] and is_alive(record["process"]):
            process = psutil.Process(record["process"]["pid"])
            found[process.pid] = process
    mark = state["id"]
    if mark is not None:
        for process in psutil.process_iter():
            if _mark_of(process) == mark:
                found[process.pid] = process
    return list(found.values())


def end_leftovers(state: RunState, grace_seconds: float) -> list[int]:
    """End what a run without supervisor left: SIGTERM, a grace, SIGKILL; the pids that survive.

    psutil compares the start time of a process before each signal, so none is taken for another.
    """
    kill_at = time.monotonic() + grace_seconds
    give_up_at = kill_at + KILL_SECONDS
    terminated: set[int] = set()
    while processes := leftovers(state):
        now = time.monotonic()
        if now >= give_up_at:
            return [process.pid for process in processes]
        for process in processes:
            try:
                if now >= kill_at:
                    process.kill()
                elif process.pid not in terminated:
                    process.terminate()
                    terminated.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_SECONDS)
    return []


def note_lost_supervisor(run: RunFolder, state: RunState) -> None:
    """Write into run.json that a run failed because its supervisor vanished."""
    pid = state["supervisor"]["pid"] if state["supervisor"] else None
    for record in state["steps"].values():
        if record["state"] == RUNNING:
            record["state"], record["ended"] = FAILED, time.time()
            record["cause"] = {
                "id": "supervisor_lost",
                "line": f"the supervisor of this run, process {pid}, was killed",
                "advice": "The processes of the step were ended. Resume it from the last "
                f"checkpoint: dschat run --resume {run.path}",
            }
    state["state"] = FAILED
    run.write_state(state)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(RUN_MARK)
    except (psutil.Error, OSError):
        return None  # gone meanwhile, or another user's, so not of this run
