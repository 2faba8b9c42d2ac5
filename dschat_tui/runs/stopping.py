"""Stop a run that another command started, and wait until none of its processes is left."""

from __future__ import annotations

import time
from collections.abc import Callable

from dschat_tui.runs import control
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.processes import leftovers
from dschat_tui.runs.state import RUNNING, RunState
from dschat_tui.runs.supervisor import SAVE_SECONDS
from dschat_tui.text import duration

POLL_SECONDS = 0.2
SECONDS_BETWEEN_NOTES = 10.0


def stopping_text(state: RunState, requests: int, key: str) -> str:
    """What happens to a run after so many requests to stop, and what `key` does now."""
    if requests > 1:
        return f"ending its processes ({key} again: at once)"
    limit = SAVE_SECONDS
    asked = state["stop"]
    if asked:
        limit = max(0.0, asked["asked"] + asked["limit_seconds"] - time.time())
    return f"saving a checkpoint, {duration(limit)} at most ({key} again: without)"


def stop(run: RunFolder, now: bool, limit_seconds: float, note: Callable[[str], None]) -> str:
    """Stop a run; its state when none of its processes is left.

    Args:
        run: one whose supervisor is alive.
        now: without a checkpoint.
        limit_seconds: how long the step may take to save; then the supervisor ends its processes.
        note: called with progress.

    Raises:
        NotRunning: its supervisor is gone, or runs on another machine.
    """
    state = run.read_state()
    if state is None or not control.has_supervisor(state):
        raise control.NotRunning(f"{run.path}: no supervisor of this run is alive")
    if now:
        note("ending its processes: SIGTERM, 15 s of grace, SIGKILL")
        control.end_now(run)
    else:
        run.request_stop(limit_seconds)
    asked, next_note = time.monotonic(), 0.0
    while control.has_supervisor(state) or (state["state"] == RUNNING and leftovers(state)):
        waited = time.monotonic() - asked
        if not now and next_note <= waited < limit_seconds:
            note(f"waiting for its checkpoint, {duration(limit_seconds - waited)} more at most")
            next_note = waited + SECONDS_BETWEEN_NOTES
        time.sleep(POLL_SECONDS)
        state = run.read_state() or state
    return control.standing(state)
